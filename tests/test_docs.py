"""The documentation is correct: its Python runs, its commands parse, its links exist."""

import csv
import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlparse

import pytest

ROOT = Path(__file__).parents[1]
OWN = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY")]
PAGES = [*OWN, *sorted(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts)]
NOTEBOOKS = sorted(page for page in (ROOT / "docs").rglob("*.ipynb") if "_build" not in page.parts)

# Hosts that the documentation links to. `make links` requests every link, which needs the network; this list catches
# new or mistyped hosts.
HOSTS = {"arxiv.org", "github.com", "docs.ray.io", "keepachangelog.com", "optuna.org", "semver.org"}


def prose(page: Path) -> str:
    """Return a page without its code."""
    return re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_block_is_of_a_kind_that_is_tested(page):
    """Python runs, commands and TOML are read; plain text is for the generated help and for lists of files."""
    languages = set(re.findall(r"^```+([a-z]+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE))
    shown = {"cli.md": {"text"}, "README.md": {"text", "bibtex"}}  # generated, and compared below
    assert languages <= {"python", "console", "bash", "toml"} | shown.get(page.name, set())


NOISY = list(range(10)) * 20
OWN_CODE = {  # what the README takes for granted: the loop of its reader, here one that predicts 7 of 10 labels
    "half": slice(0, None, 2),
    "rest": slice(1, None, 2),
    "fit": lambda criterion, rows: criterion.tau,
    "predict": lambda model, rows: [(label + (i % 10 < 3)) % 10 for i, label in enumerate(NOISY)][rows],
    "accuracy": lambda model, rows: 0.7,
    "noisy_labels": NOISY,
}


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: p.name)
def test_python_runs_from_top_to_bottom(page, tmp_path):
    if "init_process_group" in page.read_text(encoding="utf-8"):
        code = [*blocks(page, "python"), "import os", "os._exit(0)  # gloo's destructors may wait for each other"]
        (tmp_path / "train.py").write_text("\n".join(code), encoding="utf-8")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
        done = subprocess.run(torchrun, cwd=tmp_path, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr
        return
    own = OWN_CODE if page.name == "README.md" else {}
    exec(compile("\n".join(blocks(page, "python")), str(page), "exec"), {"__name__": "__main__", **own})


def test_the_readme_shows_what_fit_prints(tmp_path, monkeypatch):
    """Every line, with other numbers where a machine rounds differently; `generate.py --readme` writes them."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    generate = importlib.import_module("generate")
    output, issues, wrong = generate.fit_wines(tmp_path)
    hide = lambda line: re.sub(r"\d+(\.\d+)?", "0", line)  # noqa: E731
    shown, audited = blocks(ROOT / "README.md", "text")
    sentences, _, table = shown.partition("\n\n")
    assert all(hide(sentence) in hide(output) for sentence in sentences.splitlines())
    head, *rows = table.splitlines()
    assert head == issues[0]
    start = lambda line: hide(line).split(",")[:5]  # noqa: E731  # the values that mattered depend on rounding
    assert all(start(row) in map(start, issues) for row in rows)
    found = {int(line.partition(",")[0]) - 1 for line in issues[1:31]}
    assert len(found & set(wrong)) >= 27  # "nearly all of the first 30 are really wrong"
    printed = generate.audit_lines(generate.audit_wines(tmp_path))
    assert [hide(line) for line in printed] == [hide(line) for line in audited.splitlines()]


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
    """Every call of the command line; not those whose parser prints and exits (help, completion)."""
    shell = "\n".join(block for page in PAGES for kind in ("console", "bash") for block in blocks(page, kind))
    shell = shell.replace("\\\n", " ").replace("$SLURM_ARRAY_TASK_ID", "1")
    found = re.findall(r"^(?:\$ |torchrun .*-m )?(logitclip .*)", shell, flags=re.MULTILINE)
    return sorted({line.strip() for line in found if "--help" not in line and "--tyro" not in line})


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


SMALLER = {  # what makes a command of the first pages quick
    "train": "--epochs 1 --limit 200",
    "tune": "--epochs 1 --limit 200",
    "fit": "--epochs 2",
    "issues": "--epochs 2",
}


@pytest.mark.parametrize("page", ["README.md", "docs/start/command_line.md"])
def test_commands_of_the_first_pages_run(page, tmp_path):
    """In their order, in one folder, on small data. Sweeps and reports of all recipes run in test_smoke.py."""
    rows = [f"{i % 7},{i % 2 * 3 + i % 5},{'ab'[i % 2]}" for i in range(60)]
    (tmp_path / "train.csv").write_text("x,y,kind\n" + "\n".join(rows), encoding="utf-8")
    (tmp_path / "new.csv").write_text("x,y\n1,2\n3,4\n", encoding="utf-8")
    lines = "\n".join(blocks(ROOT / page, "console")).splitlines()
    commands = [line.removeprefix("$ ") for line in lines if re.match(r"\$ logitclip (?!sweep|report)", line)]
    commands = [command for command in commands if "--download" not in command]
    assert len(commands) >= 3
    for command in commands:
        name = command.split()[1]
        words = shlex.split(command, comments=True)[1:] + SMALLER.get(name, "").split()
        done = subprocess.run(
            [sys.executable, "-m", "logitclip", *words], cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"


def test_the_recipe_of_the_documentation_can_be_loaded(tmp_path, monkeypatch):
    """With the loss of another page as its plugin, as the text says."""
    from logitclip.studies.recipe import load_recipe

    monkeypatch.chdir(tmp_path)
    (text,) = blocks(ROOT / "docs" / "studies.md", "toml")
    (tmp_path / "my_study.toml").write_text(text, encoding="utf-8")
    (tmp_path / "my_loss.py").write_text(blocks(ROOT / "docs" / "extend.md", "python")[0], encoding="utf-8")
    for scale, runs in {"smoke": 12, "cpu": 60, "full": 60}.items():
        cells = load_recipe("my_study.toml", scale, plugin=["my_loss.py"]).cells
        assert len(cells) == runs
        mine = [cell.config for cell in cells if cell.coordinates["loss"] == "mine"]
        assert {config.loss for config in mine} == {"squared:scale=2"}
        assert {config.lr for config in mine if config.noise.startswith("asymmetric")} == {0.05}


def test_the_config_file_of_the_documentation_can_be_read(tmp_path):
    from logitclip.cli.options import read_config
    from logitclip.runs.config import RunConfig

    (text,) = blocks(ROOT / "docs" / "cli.md", "toml")
    (tmp_path / "run.toml").write_text(text, encoding="utf-8")
    assert RunConfig(**read_config(tmp_path / "run.toml")).clip == "norm:temp=1.5"


def test_names_beside_those_of_other_code_exist():
    from logitclip.runs.config import registries

    page = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
    options = re.findall(r"--(clip|noise|model|data) ([^ `]+)", page)
    losses = re.findall(r"`((?:ce|focal|[ans]?mae|[nrsg]ce|agce|aul|ael|nce_\w+)(?::[^`]*)?)`", page)
    assert len(options) > 10
    assert len(losses) > 20
    for kind, spec in [*options, *(("loss", spec) for spec in losses)]:
        if spec != "none":
            registries()[kind].parse(spec)


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
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"make ([a-z-]+)", "".join(block for p in PAGES for block in blocks(p, "console"))):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_the_lowest_versions_are_those_of_the_package():
    """CI tests the versions of .ci/lowest.txt; pyproject.toml promises them."""
    promised = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    pins = re.findall(
        r"^([\w-]+)==([\d.]+)$", (ROOT / ".ci" / "lowest.txt").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    assert {"torch", "numpy", "tyro"} <= {name for name, _ in pins}
    for name, version in pins:
        bounds = set(re.findall(rf'"{name}>=([\d.]+)"', promised))
        assert bounds == {re.sub(r"(?<=\d\.\d)\.0$|(?<=\d\.\d\d)\.0$", "", version)}, name


def test_version_is_the_same_everywhere():
    import logitclip

    assert f'version = "{logitclip.__version__}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f"version: {logitclip.__version__}" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_the_reference_has_every_public_name():
    """The build of the site checks the same, and the contents of modules."""
    import logitclip

    reference = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "reference").glob("*.md"))
    for name in logitclip.__all__:
        assert re.search(rf":: logitclip\.{name}$", reference, flags=re.MULTILINE), name
    for module in (ROOT / "src" / "logitclip" / "integrations").glob("[!_]*.py"):
        assert f":: logitclip.integrations.{module.stem}" in reference


def test_the_documentation_shows_every_registry(monkeypatch):
    """Tables of all kinds of names are generated into pages, and the page on losses says when to take each."""
    from logitclip.runs.config import registries

    shown = set(re.findall(r"<!-- generated: ([a-z]+) -->", "".join(p.read_text(encoding="utf-8") for p in PAGES)))
    monkeypatch.syspath_prepend(ROOT / "docs")
    kinds = importlib.import_module("generate").KINDS
    assert set(kinds.values()) == set(registries())
    assert set(kinds) <= shown
    page = (ROOT / "docs" / "losses.md").read_text(encoding="utf-8")
    when = page.partition("## When")[2].partition("## ")[0]
    for name in registries()["loss"]:
        assert f"`{name}`" in when, name


PICTURES = sorted((ROOT / "docs" / "img").glob("*.svg"))
PAGE, SMALLEST = 736, 12  # pixels


@pytest.mark.parametrize("picture", PICTURES, ids=lambda p: p.name)
def test_pictures_can_be_read_on_a_page_light_or_dark(picture):
    svg = picture.read_text(encoding="utf-8")
    width = int(re.findall(r'width="(\d+)', svg)[0])
    sizes = [float(size) for size in re.findall(r"font-size[=:][\s\"]*([\d.]+)", svg)]
    assert min(sizes) * min(1, PAGE / width) >= SMALLEST
    assert "prefers-color-scheme: dark" in svg
    assert not re.search(r"scale mini|scale cpu|\(on ", svg), "internals in a title"


def test_every_picture_is_made_by_a_script_and_shown_on_a_page(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    drawn = set(importlib.import_module("pictures").PICTURES)
    assert drawn == {picture.name for picture in PICTURES} - {"architecture.svg"}
    shown = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for picture in (ROOT / "docs" / "img").iterdir():
        assert f"img/{picture.name}" in shown, picture.name


def test_the_diagram_of_the_architecture_has_every_module():
    drawn = (ROOT / "docs" / "img" / "architecture.svg").read_text(encoding="utf-8")
    listed = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    package = ROOT / "src" / "logitclip"
    for entry in package.glob("[!_]*"):
        if entry.suffix == ".py" or (entry / "__init__.py").exists():
            assert f">{entry.stem}<" in drawn, entry.name
            assert re.search(rf"^  {entry.stem}(\.py|/) ", listed, flags=re.MULTILINE), entry.name


def test_the_number_of_losses_is_that_of_the_registry_or_of_the_leaderboard():
    from logitclip.losses import LOSSES

    with (ROOT / "results" / "leaderboard_mini.csv").open(encoding="utf-8", newline="") as stream:
        ranked = {line["loss"].partition(":")[0] for line in csv.DictReader(stream)}
    for page, count in (("README", len(list(LOSSES))), ("docs/index", len(ranked))):
        text = (ROOT / f"{page}.md").read_text(encoding="utf-8")
        assert re.findall(r"(\d+)\s\[?losses", text) == [str(count)], page


def test_the_page_of_the_leaderboard_agrees_with_its_csv():
    page = (ROOT / "docs" / "_static" / "leaderboard_mini.html").read_text(encoding="utf-8")
    assert len(page) < 400_000
    assert not re.search(r"(?<![\w.<])/(?:home|root|tmp|work|Users)/", page)  # no path of the machine that wrote it
    with (ROOT / "results" / "leaderboard_mini.csv").open(encoding="utf-8", newline="") as stream:
        lines = list(csv.DictReader(stream))
    expected = [f"{float(line['mean']):.2f}" if line["mean"] else "–" for line in lines]
    body = page.partition("<tbody>")[2].partition("</tbody>")[0]
    assert re.findall(r"<strong>([^<]+)</strong>", body) == expected


@pytest.mark.parametrize(
    ("what", "text", "kept"),
    [
        ("attribute", "Clip, as in norm:temp=1.5 or `norm:tau=1`.", "Clip, as in ``norm:temp=1.5`` or `norm:tau=1`."),
        ("attribute", "As in table:path=my.csv,label=kind.", "As in ``table:path=my.csv,label=kind``."),
        ("attribute", "As in hf:FOLDER, not as --seed; 0: all.", "As in ``hf:FOLDER``, not as ``--seed``; 0: all."),
        ("property", "The name: a hash.\n\nMore of it.", "The name: a hash.\n\nMore of it."),
        ("function", "Do.\n\nReturns:\n    A table: a row per input.\n", " A table: a row per input."),
        ("function", "Do.\n\nArgs:\n    k: K.\n    d: D.\n", ":param k: \\K.\n:param d: \\D."),
    ],
)
def test_the_reference_shows_whole_sentences(what, text, kept, monkeypatch):
    """Napoleon would take what stands before the first colon for a type."""
    napoleon = pytest.importorskip("sphinx.ext.napoleon")
    monkeypatch.syspath_prepend(ROOT / "docs")
    lines = text.splitlines()
    importlib.import_module("conf").keep_sentences(None, what, "name", None, None, lines)
    for style in (napoleon.GoogleDocstring, napoleon.NumpyDocstring):
        lines = style(lines, napoleon.Config(), what=what, name="name").lines()
    assert kept in "\n".join(lines)
    assert "type:" not in "\n".join(lines)


def test_the_build_of_the_site_stops_at_insides_of_annotations(tmp_path, monkeypatch):
    errors = pytest.importorskip("sphinx.errors")
    monkeypatch.syspath_prepend(ROOT / "docs")
    conf, site = importlib.import_module("conf"), SimpleNamespace(outdir=tmp_path)
    page = tmp_path / "reference" / "training.html"
    page.parent.mkdir()
    page.write_text("<em>lr</em> (<em>float</em><em> | </em><em>None</em>)", encoding="utf-8")
    conf.check_pages(site, None)
    for text in ("<span>Annotated</span><span>[</span>int]", "at_least.&lt;locals&gt;"):
        page.write_text(text, encoding="utf-8")
        with pytest.raises(errors.SphinxError, match="hide_notes"):
            conf.check_pages(site, None)
