"""The documentation is correct: its Python runs, its commands parse, its links exist."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlparse

import pytest

ROOT = Path(__file__).parents[1]
OWN = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY")]
PAGES = [*OWN, *sorted(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts)]
NOTEBOOKS = sorted(page for page in (ROOT / "docs").rglob("*.ipynb") if "_build" not in page.parts)

# Hosts that the documentation links to. `make links` requests every link, which needs the network; this list catches
# new or mistyped hosts.
HOSTS = {"arxiv.org", "docs.ray.io", "keepachangelog.com", "optuna.org", "semver.org"}


def prose(page: Path) -> str:
    """Return a page without its code."""
    return re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: p.name)
def test_python_runs_from_top_to_bottom(page):
    exec(compile("\n".join(blocks(page, "python")), str(page), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.name)
def test_notebooks_run_and_their_outputs_are_stored(notebook):
    code = [cell for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1)), "not run from top to bottom"
    for output in (output for cell in code for output in cell["outputs"]):
        assert output["output_type"] != "error"
        assert "/tmp" not in json.dumps(output), "a path of the machine that ran it"
    source = "\n".join("".join(cell["source"]) for cell in code)
    exec(compile(source, notebook.name, "exec"), {"__name__": "__main__"})


def test_generated_parts_are_current():
    """The tables of losses, noises and recipes, and the help of every command."""
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "generate.py", "--check"], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr


def commands() -> list[str]:
    lines = [line for page in PAGES for block in blocks(page, "console") for line in block.splitlines()]
    return sorted({line.removeprefix("$ ").strip() for line in lines if "logitclip " in line and "pip" not in line})


@pytest.mark.parametrize("command", commands())
def test_commands_are_understood(command, monkeypatch):
    """Each command line of the documentation parses; the command itself is replaced by a stub."""
    from logitclip import cli

    called = []
    name = shlex.split(command)[1]
    assert name in cli.COMMANDS
    real = cli.COMMANDS[name]

    import functools

    @functools.wraps(real)
    def stand_in(*args, **kwargs):
        called.append(name)

    monkeypatch.setitem(cli.COMMANDS, name, stand_in)
    monkeypatch.setattr("logitclip.cli.options.read_config", lambda path: {})
    monkeypatch.setattr("sys.argv", [*shlex.split(command, comments=True)])
    cli.main()
    assert called == [name]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_within_the_repository_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", prose(page)):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=lambda p: p.name)
def test_links_outside_are_https_and_of_known_hosts(page):
    for address in re.findall(r"\]\((\w+://[^)\s]+)\)", page.read_text(encoding="utf-8")):
        assert urlparse(address).scheme == "https", address
        assert urlparse(address).hostname in HOSTS, f"{address}: if it is right, add its host to HOSTS"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_anchors_within_the_repository_exist(page):
    """Sphinx checks the anchors of its own pages, but README.md is read on GitHub."""
    for target, anchor in re.findall(r"\]\(([^):#]*)#([^)]+)\)", prose(page)):
        text = (page.parent / target if target else page).read_text(encoding="utf-8")
        headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
        slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert anchor in slugs, f"{page.name} links to {target}#{anchor}"


@pytest.mark.skipif(sys.platform == "win32", reason="a bash script")
def test_release_notes_are_the_section_of_the_changelog():
    import logitclip

    def notes(version):
        return subprocess.run(
            ["bash", ROOT / ".ci" / "release_notes", version], capture_output=True, text=True, timeout=60
        )

    done = notes(logitclip.__version__)
    assert done.returncode == 0, done.stderr
    assert "### Added" in done.stdout
    assert "## " not in done.stdout.replace("### ", "")
    other = notes("0.0.9")
    assert (other.returncode, other.stdout) == (1, "")
    assert "pyproject.toml has another version than 0.0.9" in other.stderr


def test_makefile_targets_of_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z-]+)", "".join(block for p in PAGES for block in blocks(p, "console"))):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_version_is_the_same_everywhere():
    import logitclip

    assert f'version = "{logitclip.__version__}"' in (ROOT / "pyproject.toml").read_text()
    assert f"version: {logitclip.__version__}" in (ROOT / "CITATION.cff").read_text()


def test_the_reference_has_every_public_name():
    import logitclip

    reference = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    for name in logitclip.__all__:
        assert re.search(rf":: logitclip\.{name}\b", reference), name
