"""Writes the generated parts of the documentation: tables from the registries, and pictures.

    python docs/generate.py            write them
    python docs/generate.py --notebook run the notebook and store its outputs
    python docs/generate.py --readme   fit the wines and store what fit prints in README.md
    python docs/generate.py --check    fail if a page is not current (pictures are not compared)

A page marks the place of a table with two comments, `<!-- generated: losses -->` and `<!-- end -->`; everything between
them is replaced. The pictures of CIFAR-10's noise need its files: LOGITCLIP_DATA names their folder.
"""

from __future__ import annotations

import ast
import contextlib
import csv
import functools
import io
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import evidence_tables
import head_tables
import leaderboard_tables
import review_tables

DOCS = Path(__file__).parent
MARKED = re.compile(r"(<!-- generated: ([a-z0-9_ ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def registry_table(kind: str) -> str:
    """The entries of a registry with their knobs and first sentences."""
    from logitclip.runs.config import registries

    registry = registries()[kind]
    lines = ["| spec, with its defaults | what it is |", "|---|---|"]
    for name in registry:
        spec, summary = (text.replace("|", r"\|") for text in registry.describe(name))
        lines.append(f"| `{spec}` | {summary} |")
    return "\n".join(lines)


def loss_knobs() -> str:
    """The knobs of every loss with their defaults and meanings, from the docstrings."""
    from docstring_parser import parse

    from logitclip.losses import LOSSES
    from logitclip.registry import show_value

    lines = ["| loss | knob | default | meaning |", "|---|---|---|---|"]
    for name in LOSSES:
        meanings = {p.arg_name: " ".join(str(p.description).split()) for p in parse(LOSSES[name].__doc__ or "").params}
        for knob in LOSSES.knobs(name).values():
            default = f"{knob.default:.3g}" if isinstance(knob.default, float) else show_value(knob.default)
            lines.append(f"| `{name}` | `{knob.name}` | {default} | {meanings[knob.name]} |")
    return "\n".join(lines)


def loss_count() -> str:
    """How many losses there are."""
    from logitclip.losses import LOSSES

    return f"There are {len(list(LOSSES))} losses."


def loss_advice() -> str:
    """When to take each loss, from its docstring."""
    from logitclip.losses import LOSSES

    lines = ["| loss | when |", "|---|---|"]
    for name in LOSSES:
        (text,) = re.findall(r"(?ms)^When: (.*?)\n\n", LOSSES[name].__doc__ or "")
        lines.append(f"| `{name}` | {_sentence(text)} |")
    return "\n".join(lines)


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    return text[0].upper() + text[1:]


def loss_settings() -> str:
    """The settings of the authors of each loss, by dataset: options of `logitclip train`."""
    from logitclip.losses import LOSSES

    found: dict[str, dict[str, str]] = {name: LOSSES[name].settings for name in LOSSES}  # type: ignore[attr-defined]
    datasets = list(dict.fromkeys(dataset for settings in found.values() for dataset in settings))
    lines = [f"| loss | {' | '.join(datasets)} |", "|---" * (len(datasets) + 1) + "|"]
    for name, settings in found.items():
        if settings:
            cells = " | ".join(f"`--loss {settings[d]}`" if d in settings else "" for d in datasets)
            lines.append(f"| `{name}` | {cells} |")
    return "\n".join(lines)


def authors_losses() -> str:
    """Differences between each loss and its authors' code, from benchmarks/authors_losses.py."""
    lines = ["| loss | authors' code | value | gradient | why they differ |", "|---|---|--:|--:|---|"]
    with (DOCS.parent / "results" / "losses_authors.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            code = f"{row['repository']} at {row['commit']}"
            lines.append(f"| `{row['loss']}` | {code} | {row['value']} | {row['gradient']} | {row['why']} |")
    return "\n".join(lines)


KINDS = {
    "losses": "loss",
    "clips": "clip",
    "penalties": "penalty",
    "noises": "noise",
    "datasets": "data",
    "encoders": "encoder",
    "augmentations": "augment",
    "networks": "model",
    "methods": "method",
}


def recipe_table() -> str:
    """Every recipe with the number of its runs at each scale, and of its trials where a value is tuned."""
    from logitclip.studies.recipe import load_recipe, recipe_names

    lines = ["| recipe | paper | what it shows | cpu | mini | full |", "|---|---|---|--:|--:|--:|"]
    for name in recipe_names():
        recipe = load_recipe(name)
        costs = " | ".join(cost(name, scale) for scale in ("cpu", "mini", "full"))
        lines.append(f"| `{name}` | {recipe.paper or ''} | {recipe.title} | {costs} |")
    return "\n".join(lines)


SECONDS = {  # of an epoch on one quiet core, by dataset, network and number of images; measured with `standard`
    ("digits", "mlp", 0): 3.5 / 150,
    ("cifar10", "strided_cnn", 5_000): 30 / 30,
    ("cifar100", "strided_cnn", 10_000): 45 / 30,
    ("cifar10", "wrn", 0): 50_000 / 55,
    ("cifar100", "wrn", 0): 50_000 / 55,
}
TIMES = {"standard": 1.0, "sam": 2.0, "sop": 2.0, "sop_plus": 2.0}  # what a method takes of that, about
DIVIDEMIX = 30 / 3.5  # measured only on digits


@functools.cache
def cost(name: str, scale: str) -> str:
    """Runs and trials of a recipe, the epochs they need at full scale, and their time on one core where it is known."""
    from logitclip.search import TRIALS
    from logitclip.studies import tuning
    from logitclip.studies.recipe import load_recipe

    recipe = load_recipe(name, scale)
    if not recipe.cells:
        return "none"
    runs = [cell.config for cell in recipe.cells]
    for config in {recipe.to_tune(cell) for cell in recipe.cells if tuning.is_tuned(cell.config)}:
        runs += [config] * (len(tuning.search_for(config).values) or TRIALS)
    trials = len(runs) - len(recipe.cells)
    text = f"{len(recipe.cells)} + {trials}" if trials else f"{len(recipe.cells)}"
    paper = scale == "full" and not runs[0].data.startswith("digits")
    parts = [f"{sum(map(epochs_of, runs)):,} epochs"] if paper else []
    seconds = [seconds_of(config) for config in runs]
    if None not in seconds:
        parts.append(duration(sum(filter(None, seconds))))
    return f"{text}: {', '.join(parts)}" if parts else text


def epochs_of(config: Any) -> int:
    from logitclip.data import defaults_of

    return config.epochs or defaults_of(config.data)["epochs"]


def seconds_of(config: Any) -> float | None:
    """The time of a run on one core, or None if nobody has measured its like."""
    from logitclip.data import defaults_of

    model = config.model or defaults_of(config.data)["model"]
    data, network, method = (spec.partition(":")[0] for spec in (config.data, model, config.method))
    times = TIMES | ({"dividemix": DIVIDEMIX} if data == "digits" else {})
    epoch = SECONDS.get((data, network, config.limit))
    return None if epoch is None or method not in times else epochs_of(config) * epoch * times[method]


def duration(seconds: float) -> str:
    """Minutes, rounded up, or hours with two digits."""
    hours = seconds / 3600
    if hours < 1:
        return f"{math.ceil(seconds / 60)} min"
    return f"{hours:.1f} h" if hours < 10 else f"{round(hours, 1 - math.floor(math.log10(hours))):,.0f} h"


def recipe_choices() -> str:
    """The comment at the top of each recipe of the paper: its settings, and the choices the paper leaves open."""
    from logitclip.studies.recipe import RECIPES, load_recipe, recipe_names

    parts = []
    for name in recipe_names():
        if paper := load_recipe(name).paper:
            comment = re.match(r"(?:#.*\n)+", (RECIPES / f"{name}.toml").read_text(encoding="utf-8"))
            assert comment, f"{name}.toml has no comment"
            text = re.sub(r"^# ?", "", comment[0].strip(), flags=re.MULTILINE)
            parts.append(f"### {paper}\n\n" + re.sub(r"(?<!\n)\n- ", "\n\n- ", text, count=1))
    return "\n\n".join(parts)


def tuning_table() -> str:
    """`auto` against the grid, temp 1 and no clip, from benchmarks/tuning.py."""
    from logitclip.studies.tables import label

    lines = ["| | noise | no clip | temp=1 | grid | auto | auto - grid |", "|---|---|---|---|---|---|---|"]
    last = ""
    for row in evidence_tables.read(DOCS.parent / "results" / "tuning.csv"):
        numbers = " | ".join(f"{row[name]:.1f}" for name in ("none", "temp=1", "grid", "auto"))
        setting = "" if row["setting"] == last else row["setting"]
        difference = f"{row['auto_less_grid']:+.1f}".replace("-", "−")
        lines.append(f"| {setting} | {label('noise', row['noise'])} | {numbers} | {difference} |")
        last = row["setting"]
    return "\n".join(lines)


def other_losses() -> str:
    """Accuracy and memorised labels of the losses that are not in Table 1, from the recipe all_losses on digits."""
    found: dict[str, dict[tuple[str, str], str]] = {}
    for row in evidence_tables.read(DOCS.parent / "results" / "all_losses_cpu.csv"):
        clip = "none" if row["clip"] == "none" else "clip"
        found.setdefault(row["loss"], {})[row["statistic"], clip] = f"{row['mean']:.1f}"
    lines = ["| loss | accuracy | wrong labels memorised |", "|---|---|---|"]
    for loss, cells in found.items():
        pairs = (f"{cells[name, 'none']} → {cells[name, 'clip']}" for name in ("last10_accuracy", "memorised"))
        lines.append(f"| `{loss}` | {' | '.join(pairs)} |")
    return "\n".join(lines)


def command_help() -> str:
    """`logitclip COMMAND --help` of every command, as a terminal of 100 columns shows it."""
    from logitclip import cli

    def text(command: str) -> str:
        sys.argv = ["logitclip", command, "--help"]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            cli.main()
        lines = [line.rstrip() for line in printed.getvalue().strip().splitlines()]
        return f"### logitclip {command}\n\n```text\n" + "\n".join(lines) + "\n```"

    before = sys.argv, {name: os.environ.get(name) for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    os.environ |= {"COLUMNS": "100", "NO_COLOR": "1"}
    os.environ.pop("FORCE_COLOR", None)
    try:
        return "\n\n".join(text(command) for command in cli.COMMANDS)
    finally:
        sys.argv = before[0]
        for name, value in before[1].items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def generated(name: str) -> str:
    if name.startswith("evidence "):
        return evidence_tables.table(name.removeprefix("evidence "))
    if name.startswith("leaderboard "):
        return leaderboard_tables.table(name.removeprefix("leaderboard "))
    if name.startswith("review "):
        return review_tables.table(name.removeprefix("review "))
    if name.startswith("heads "):
        return head_tables.table(name.removeprefix("heads "))
    others = {
        "recipes": recipe_table,
        "loss knobs": loss_knobs,
        "loss count": loss_count,
        "loss advice": loss_advice,
        "loss settings": loss_settings,
        "loss authors": authors_losses,
        "choices": recipe_choices,
        "other losses": other_losses,
        "tuning": tuning_table,
        "command help": command_help,
    }
    return others[name]() if name in others else registry_table(KINDS[name])


def write_pages(*, check: bool) -> list[str]:
    """Bring the marked parts of all pages up to date, or with `check` only name the pages that are not.

    Frames and line breaks of the command help depend on the version of tyro: a check compares words.
    """
    stale = []
    for page in [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        new = MARKED.sub(lambda m: f"{m[1]}\n{generated(m[2])}\n\n{m[3]}", text)
        if words(new) != words(text):
            stale.append(page.name)
        if new != text and not check:
            page.write_text(new, encoding="utf-8")
    return stale


def words(text: str) -> list[str]:
    return re.sub("[╭╮╰╯│─]", " ", text).split()


# -- the notebook ------------------------------------------------------------------------------------------------------

NOTEBOOK = DOCS / "start" / "own_data.ipynb"


def run_notebook() -> None:
    """Run the cells in one namespace, from top to bottom, and store what they print and show."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    namespace: dict[str, Any] = {}
    for count, cell in enumerate((c for c in notebook["cells"] if c["cell_type"] == "code"), 1):
        *body, last = ast.parse("".join(cell["source"])).body
        shown = isinstance(last, ast.Expr) and not ast.unparse(last).startswith("print(")
        printed, value = io.StringIO(), None
        with contextlib.redirect_stdout(printed):
            exec(compile(ast.Module(body if shown else [*body, last], []), NOTEBOOK.name, "exec"), namespace)
            if shown:
                value = eval(ast.unparse(last), namespace)
        outputs: list[dict[str, Any]] = []
        if printed.getvalue():
            outputs.append({"output_type": "stream", "name": "stdout", "text": printed.getvalue()})
        if value is not None:
            data = {"text/plain": repr(value), "text/html": value._repr_html_()}
            outputs.append({"output_type": "execute_result", "execution_count": count, "data": data, "metadata": {}})
        cell |= {"execution_count": count, "outputs": outputs}
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


# -- the README --------------------------------------------------------------------------------------------------------

SHOWN = 4  # lines of issues.csv, with its head


def fit_wines(folder: Path) -> tuple[str, list[str], list[int]]:
    """Fit the wines of the README: what fit prints, the lines of issues.csv, and the rows that are really wrong."""
    from screenshots import write_wines

    wrong = write_wines(folder / "wines.csv")
    printed = run_in(folder, "fit", "wines.csv", "--label", "kind", "--out", "model")
    return printed, (folder / "model" / "issues.csv").read_text(encoding="utf-8").splitlines(), wrong


def audit_wines(folder: Path, answers: int = 50) -> str:
    """Answer an audit of the wines with their true kinds: what `review --report` prints."""
    from screenshots import true_kinds

    import logitclip as lc
    from logitclip.own_data.fitted_rows import FittedRows
    from logitclip.own_data.review import Review

    model = lc.load(folder / "model")
    review, kinds = Review(model, FittedRows(model), answers), true_kinds()
    for place in review.asked.tolist():
        item = review.item(place)
        review.answer(place, item["digest"], "class", kinds[place], "the data")
    return run_in(folder, "review", "model", "--report")


def audit_lines(report: str) -> list[str]:
    """The head of the table that `review --report` prints, and its rows that are not about a single class."""
    lines = [line.strip() for line in report.splitlines() if "  " in line.strip()]
    return [line for line in lines if "labels '" not in line]


def run_in(folder: Path, *arguments: str) -> str:
    """Run a command line in a folder: what it prints."""
    command = [sys.executable, "-m", "logitclip", *arguments]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, encoding="utf-8", timeout=300, check=True
    )
    return done.stdout


def update_readme() -> None:
    """Store the noise rate and the marks that fit prints, the first lines of its list, and what an audit says."""
    with tempfile.TemporaryDirectory() as folder:
        printed, issues, _ = fit_wines(Path(folder))
        audit = audit_wines(Path(folder))
    rate, _, marks = printed.splitlines()[:3]
    rows = [row if len(row) <= 90 else row[:82].rpartition(", ")[0] + ', ..."' for row in issues[:SHOWN]]
    blocks = iter(["\n".join([rate.partition(". ")[0] + ".", marks, "", *rows]), "\n".join(audit_lines(audit))])
    page = DOCS.parent / "README.md"
    text = page.read_text(encoding="utf-8")
    page.write_text(
        re.sub(r"```text\n.*?```", lambda _: f"```text\n{next(blocks)}\n```", text, flags=re.DOTALL), encoding="utf-8"
    )


def main() -> None:
    if "--check" in sys.argv[1:]:
        stale = write_pages(check=True)
        if stale:
            sys.exit(f"Not current: {', '.join(stale)}. Run python docs/generate.py.")
        return
    if "--notebook" in sys.argv[1:]:
        run_notebook()
        return
    if "--readme" in sys.argv[1:]:
        update_readme()
        return
    import pictures

    write_pages(check=False)
    pictures.draw(list(pictures.PICTURES))


if __name__ == "__main__":
    main()
