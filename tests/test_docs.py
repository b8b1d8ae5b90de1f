"""The documentation is true: its Python runs, its commands exist, its links lead somewhere."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: p.name)
def test_python_runs_from_top_to_bottom(page):
    from logitclip.losses import LOSSES

    known = dict(LOSSES._entries)
    LOSSES._entries.pop("squared", None)  # the example of CONTRIBUTING.md, should somebody have added it
    try:
        exec(compile("\n".join(blocks(page, "python")), str(page), "exec"), {})
    finally:
        LOSSES._entries.clear()
        LOSSES._entries.update(known)


def commands() -> list[str]:
    lines = [line for page in PAGES for block in blocks(page, "console") for line in block.splitlines()]
    return sorted({line.removeprefix("$ ").strip() for line in lines if "logitclip " in line and "pip" not in line})


@pytest.mark.parametrize("command", commands())
def test_commands_are_understood(command, monkeypatch):
    """Each command line of the documentation parses; what it would do is replaced."""
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
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_generated_parts_are_current():
    """The tables of registries, options and results: `python docs/generate.py` writes them."""
    done = subprocess.run([sys.executable, ROOT / "docs" / "generate.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
