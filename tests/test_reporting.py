"""Reports of small real runs: the numbers, the sentences about them, and the page in a browser."""

import base64
import csv
import dataclasses
import html
import io
import json
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from logitclip import cli, files
from logitclip.cli.output import can_be_bold
from logitclip.losses import LOSSES
from logitclip.runs.config import RunConfig
from logitclip.runs.results import Failure, Result
from logitclip.runs.train import prepare
from logitclip.studies import examples, executors, figures, reporting, sweeping
from logitclip.studies.recipe import Recipe, load_recipe
from logitclip.studies.tables import DASH, headline, pairs_of, tabulate, title

RECIPE = """
title = "Digits <small> & 100 % of them"
about = "Two losses."
[base]
data = "digits"
epochs = 3
limit = 128
[grid]
loss = ["ce", "gce:q=0.6"]
clip = ["none", "norm:temp=0.02"]
noise = ["symmetric:rate=0.5", "asymmetric:rate=0.4"]
seed = [0, 1]
[[override]]
when = { loss = "gce:q=0.6", noise = "asymmetric:rate=0.4", clip = "none", seed = 1 }
set = { lr = 1e30 }
[table]
rows = ["loss", "clip"]
cols = ["noise"]
cells = ["last10_accuracy", "memorised"]
"""


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A recipe of 16 small runs, one of which diverges, and its run folder."""
    folder = tmp_path_factory.mktemp("reports")
    (folder / "mine.toml").write_text(RECIPE, encoding="utf-8")
    sweeping.sweep(load(folder), executor="inline")
    return folder


def load(folder: Path, scale: str = "full") -> Recipe:
    return load_recipe(str(folder / "mine.toml"), scale, runs=str(folder / "runs"))


@pytest.fixture(scope="session")
def rows(folder):
    return sweeping.collect(load(folder))


@pytest.fixture(scope="session")
def table(folder, rows):
    return tabulate(load(folder), rows)


def entry(table, statistic="last10_accuracy", **coordinates):
    (found,) = [
        e
        for e in table.entries.values()
        if e.statistic == statistic and all(e.coordinates[axis] == value for axis, value in coordinates.items())
    ]
    return found


def values(rows, statistic, **coordinates):
    cells = [row for row in rows if all(row.cell.coordinates[axis] == value for axis, value in coordinates.items())]
    return [getattr(row.outcome, statistic) for row in cells if isinstance(row.outcome, Result)]


CELL = {"loss": "ce", "clip": "none", "noise": "symmetric:rate=0.5"}


def test_means_and_standard_deviations_are_those_of_the_results(table, rows):
    for statistic in ("last10_accuracy", "memorised"):
        ours, numbers = entry(table, statistic, **CELL), values(rows, statistic, **CELL)
        assert len(numbers) == ours.n == 2
        assert ours.mean == pytest.approx(sum(numbers) / 2)
        assert ours.std == pytest.approx(abs(numbers[0] - numbers[1]) / 2**0.5)  # of a sample of two
        assert ours.ours == f"{statistics.mean(numbers):.2f} ± {statistics.stdev(numbers):.2f}"
        assert set(ours.ids) == {row.outcome.id for row in rows if row.cell.coordinates.items() >= CELL.items()}


def test_rows_and_columns_are_in_the_order_of_the_recipe(table):
    assert table.row_axes == ("loss", "clip")
    assert [row[0] for row in table.rows] == ["ce", "ce", "gce:q=0.6", "gce:q=0.6"]
    assert table.col_heads() == ["symmetric 50 %", "asymmetric 40 %"]
    assert table.labels(table.rows[1], table.rows[0]) == ["", "temp=0.02"]
    assert table.labels(table.rows[2], table.rows[1]) == ["gce", "no clip"]


def test_an_axis_that_the_table_forgets_is_not_averaged_over(folder, rows):
    table = tabulate(replace(load(folder), rows=("loss",)), rows)
    assert table.row_axes == ("loss", "clip")
    assert entry(table, **CELL).n == 2


def test_bold_is_the_better_of_a_pair_and_no_tie(table):
    told_apart = 0
    for statistic, better in (("last10_accuracy", max), ("memorised", min)):
        for loss in ("ce", "gce:q=0.6"):
            for noise in ("symmetric:rate=0.5", "asymmetric:rate=0.4"):
                pair = [entry(table, statistic, loss=loss, noise=noise, clip=c) for c in ("none", "norm:temp=0.02")]
                tie = pair[0].mean == pair[1].mean
                assert [e.mean for e in pair if e.best] == ([] if tie else [better(e.mean for e in pair)])
                told_apart += not tie
    assert told_apart >= 4


def test_a_cell_without_a_partner_is_not_bold(folder, rows):
    alone = [row for row in rows if row.cell.coordinates["clip"] == "none"]
    assert not any(entry.best for entry in tabulate(load(folder), alone).entries.values())


def test_failed_runs_are_counted_and_named(table, rows):
    assert sum(isinstance(row.outcome, Failure) for row in rows) == 1
    hurt = entry(table, loss="gce:q=0.6", clip="none", noise="asymmetric:rate=0.4")
    assert hurt.n == 1
    assert hurt.std is None
    assert table.ours(hurt) == f"{hurt.mean:.2f} (n=1)"
    (note,) = table.notes
    assert note.startswith("1 of 16 runs failed and are not in the means. gce, asymmetric 40 %, seed 1: ")
    assert "loss" in note


def test_missing_runs_are_a_dash_and_a_sentence(folder, rows):
    some = [replace(row, outcome=None) if row.cell.coordinates["loss"] == "ce" else row for row in rows]
    table = tabulate(load(folder), some)
    assert entry(table, **CELL).ours == DASH
    assert any(
        "8 of 16 runs have no result yet" in note and re.search(r"mine.toml'? --scale", note) for note in table.notes
    )


def test_test_labels_that_may_be_wrong_are_named(folder, rows):
    config = replace(rows[0].cell.config, data="table:path=x.csv,label=y")
    own = sweeping.CellOutcome(replace(rows[0].cell, config=config), config, None)
    assert any("test labels of table:path=x.csv,label=y may be wrong" in n for n in tabulate(load(folder), [own]).notes)
    assert not any("may be wrong" in note for note in tabulate(load(folder), rows).notes)
    assert figures.draw(load(folder), rows).to_dict()["title"] == title(load(folder))
    noisy = [replace(row, cell=replace(row.cell, config=replace(row.cell.config, data=config.data))) for row in rows]
    assert "may be wrong" in figures.draw(load(folder), noisy).to_dict()["title"]["subtitle"]


def test_a_recipe_that_was_never_run_is_a_table_of_dashes(tmp_path, folder):
    recipe = load_recipe(str(folder / "mine.toml"), runs=str(tmp_path))
    rows = sweeping.collect(recipe)
    table = tabulate(recipe, rows)
    assert {e.ours for e in table.entries.values()} == {DASH}
    assert "±" not in table.caption
    assert DASH in reporting.markdown(table)
    assert "0 of 16" in reporting.html(table, rows)


def test_mixed_versions_and_devices_are_warned_of(folder, tmp_path, table):
    assert table.warnings == ()
    shutil.copytree(folder / "runs", tmp_path / "runs")
    recipe = load_recipe(str(folder / "mine.toml"), runs=str(tmp_path / "runs"))
    file = tmp_path / "runs" / entry(table, **CELL).ids[0] / "result.json"
    result = json.loads(file.read_text(encoding="utf-8"))
    result["versions"]["torch"], result["device"] = "1.0.0", "abacus"
    file.write_text(json.dumps({**result, "digest": files.object_digest(result)}), encoding="utf-8")
    mixed = tabulate(recipe, sweeping.collect(recipe))
    versions, devices = mixed.warnings
    assert "versions of torch" in versions
    assert "1.0.0 (runs: 1)" in versions
    assert "abacus (runs: 1)" in devices
    assert "Warning" in reporting.markdown(mixed)
    assert versions in reporting.as_json(mixed)["warnings"]


# -- the paper's numbers -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def beside_the_paper(tmp_path_factory):
    """Two cells of Table 1 at a reduced laptop scale: cross entropy under two noises."""
    recipe = load_recipe("table1", "cpu", runs=str(tmp_path_factory.mktemp("table1")))
    wanted = [{"loss": "ce", "clip": "none", "noise": f"symmetric:rate={rate}", "seed": 0} for rate in (0.2, 0.5)]
    cells = [replace(c, config=replace(c.config, epochs=2, limit=128)) for c in recipe.cells if c.coordinates in wanted]
    recipe = replace(recipe, cells=tuple(cells))
    executors.execute([cell.config for cell in recipe.cells], executor="inline")
    return recipe, sweeping.collect(recipe)


def test_the_papers_number_and_the_difference_stand_beside_ours(beside_the_paper):
    recipe, rows = beside_the_paper
    table = tabulate(recipe, rows)
    ours = entry(table, noise="symmetric:rate=0.2")
    assert (ours.published, ours.published_std) == (86.73, 0.72)
    assert ours.theirs == "86.73 ± 0.72"
    assert (ours.difference, ours.beside) == (None, "(86.73 ± 0.72)")  # other data: no difference
    assert "These runs are on digits; the paper's numbers are for cifar10 and cannot be compared." in table.notes
    same = replace(ours, comparable=True)
    assert same.difference == pytest.approx(ours.mean - 86.73)
    assert same.gap == f"{ours.mean - 86.73:+.2f}".replace("-", "−")
    assert same.beside == f"(86.73 ± 0.72; {same.gap})"
    assert replace(same, values=()).beside == "(86.73 ± 0.72)"  # nothing to compare it with yet
    for text in (reporting.markdown(table), reporting.html(table, rows)):
        assert "(86.73 ± 0.72)" in text
    assert "cannot be compared" in reporting.latex(table)
    assert "86.73 $\\pm$ 0.72" in reporting.latex(table)
    assert title(recipe) == "Table 1: Robust losses with and without the clip (on digits, scale cpu)"


def test_what_the_paper_does_not_have_is_a_dash(beside_the_paper):
    recipe, rows = beside_the_paper
    cell = rows[1].cell
    moved = dataclasses.replace(cell, coordinates={**cell.coordinates, "noise": "pair:rate=0.3"})
    table = tabulate(recipe, [rows[0], replace(rows[1], cell=moved)])
    assert entry(table, noise="pair:rate=0.3").beside == ""
    assert entry(table, noise="pair:rate=0.3").gap == DASH


def test_an_own_recipe_has_no_column_of_the_paper(table, rows):
    assert not table.compared
    for text in (
        reporting.markdown(table),
        reporting.latex(table),
        reporting.html(table, rows).partition("<script")[0],
    ):
        assert "paper" not in text


# -- the effect --------------------------------------------------------------------------------------------------------


def test_the_headline_is_the_mean_gain_and_its_spread_over_the_seeds(rows):
    pairs = pairs_of(rows)
    assert len(pairs) == 7  # of 8; one run without the clip diverged
    gains: dict[int, list[float]] = {0: [], 1: []}
    for without, clipped in pairs:
        assert (without.clip, clipped.clip) == ("none", "norm:temp=0.02")
        names = without.config.keys() - {"clip"}
        assert all(without.config[name] == clipped.config[name] for name in names)
        gains[without.config["seed"]].append(clipped.last10_accuracy - without.last10_accuracy)
    means = [statistics.fmean(values) for values in gains.values()]
    gain, spread = statistics.fmean(means), statistics.stdev(means)
    verb = "raises" if gain >= 0 else "lowers"
    text = f"The clip {verb} test accuracy by {abs(gain):.1f} ± {spread:.1f} points (mean over 4 settings, standard"
    assert headline(rows).startswith(text)
    learnt = [statistics.fmean(run.memorised for run in runs) for runs in zip(*pairs, strict=True)]
    assert f"memorise {learnt[0]:.0f} % of the wrong labels, with it {learnt[1]:.0f} %." in headline(rows)
    assert headline([row for row in rows if row.cell.coordinates["clip"] == "none"]) == ""


def test_a_smoke_test_does_not_headline_an_effect(folder, rows):
    table = tabulate(replace(load(folder), scale="smoke"), rows)
    for text in (reporting.markdown(table), reporting.html(table, rows), reporting.json(table)):
        assert "A smoke test: it shows that everything runs." in text
        assert "test accuracy by" not in text


def swept(tmp_path, text):
    """Run the recipe of this text in this process."""
    (tmp_path / "own.toml").write_text(text, encoding="utf-8")
    recipe = load_recipe(str(tmp_path / "own.toml"), runs=str(tmp_path / "runs"))
    return recipe, sweeping.sweep(recipe, executor="inline")


def test_a_clip_that_was_never_active_is_named(tmp_path):
    recipe, rows = swept(
        tmp_path,
        '[base]\nepochs = 2\nlimit = 64\n[grid]\nclip = ["none", "norm:tau=1e6", "norm:tau=0.1"]\nlr = [0.1, 0.2]\n'
        '[table]\nrows = ["clip"]\ncols = ["lr"]\n',
    )
    sentence = "In 2 of 4 runs with the clip it was never active: no norm reached its threshold."
    assert [note for note in tabulate(recipe, rows).notes if sentence in note]
    active = [row for row in rows if row.cell.coordinates["clip"] != "norm:tau=1e+06"]
    assert not [note for note in tabulate(recipe, active).notes if "never active" in note]


def test_examples_are_memorised_without_the_clip_and_recovered_with_it(tmp_path):
    """Two runs that differ only in the clip, long enough for the unclipped one to memorise."""
    recipe, rows = swept(
        tmp_path,
        'base = { epochs = 40, limit = 200, noise = "symmetric:rate=0.5", lr = 0.2, model = "mlp:norm=batch" }\n'
        'grid = { clip = ["none", "norm:temp=5"] }\n',
    )
    found = examples.compare(rows, count=3)
    assert found is not None
    without, clipped = pairs_of(rows)[0]
    assert (found.without.id, found.clipped.id) == (without.id, clipped.id)
    # At most the smaller of what one memorised and the other recovered; at least their forced overlap.
    assert found.share <= min(without.memorised, clipped.recovered) + 1e-9
    assert found.share >= without.memorised + clipped.recovered - 100 - 1e-9
    dataset, record = prepare(RunConfig(**{**without.config, "plugin": ()}))
    assert len(found.examples) == 3
    for example in found.examples:
        assert (int(example.given), int(example.true)) == (
            int(record.labels[example.index]),
            int(record.clean_labels[example.index]),
        )
        assert example.given != example.true
        image = Image.open(io.BytesIO(base64.b64decode(example.picture.partition(",")[2])))
        assert np.array_equal(np.asarray(image), dataset.train.x[example.index, 0].numpy())
    page = reporting.html(tabulate(recipe, rows), rows)
    assert page.count('<img src="data:image/png;base64,') == 8
    gone = []
    for row in rows:
        assert isinstance(row.outcome, Result)
        gone.append(replace(row, outcome=replace(row.outcome, config={**row.outcome.config, "data": "cifar10"})))
    assert examples.compare(gone) is None  # the data is not here


def test_what_was_chosen_stands_in_the_cell_and_what_varies_in_the_settings(tmp_path):
    (tmp_path / "tuned.toml").write_text(
        'base = { epochs = 1, limit = 64, noise = "symmetric:rate=0.5" }\n'
        'grid = { loss = ["ce", "gce"], clip = ["none", "norm:temp=grid"] }\n'
        '[[override]]\nwhen = { clip = "norm:temp=grid", loss = "ce" }\nset = { clip = "norm:temp=1.5" }\n'
        '[[override]]\nwhen = { clip = "norm:temp=grid", loss = "gce" }\nset = { clip = "norm:temp=2", lr = 0.01 }\n',
        encoding="utf-8",
    )
    recipe = load_recipe(str(tmp_path / "tuned.toml"), runs=str(tmp_path / "runs"))
    rows = sweeping.sweep(recipe, executor="inline")
    table = tabulate(recipe, rows)
    chosen = {(e.coordinates["loss"], e.coordinates["clip"]): e.chosen for e in table.entries.values()}
    assert chosen["ce", "norm:temp=grid"] == "temp=1.5"
    assert chosen["gce", "norm:temp=grid"] == "temp=2"
    assert chosen["ce", "none"] == ""
    for text in (reporting.markdown(table), reporting.latex(table), reporting.html(table, rows)):
        assert "temp=1.5" in text
    assert reporting._describe_settings(rows)["lr"] == ["0.1", "0.01 (gce, tuned temp)"]


# -- writers -----------------------------------------------------------------------------------------------------------


def test_terminal(table):
    from rich.console import Console

    console = Console(width=120, record=True, file=io.StringIO())
    console.print(reporting.terminal(table))
    text = console.export_text()
    assert "Digits <small> & 100 % of them" in text
    assert entry(table, **CELL).ours in text
    assert "1 of 16 runs failed" in text
    assert "Bold: best within each group" in text
    console.print(reporting.terminal(table, bold=False))
    text = console.export_text()
    best = [one.ours for one in table.entries.values() if one.best]
    assert all(f"*{ours}" in text for ours in best)
    assert text.count("*") == len(best) + 1 > 1  # and the caption
    assert "*: best within each group" in text


def test_bold_is_only_for_those_who_see_it(monkeypatch):
    assert not can_be_bold(io.StringIO())
    screen = io.StringIO()
    screen.isatty = lambda: True
    for term, seen in (("xterm", True), ("dumb", False)):
        monkeypatch.setenv("TERM", term)
        assert can_be_bold(screen) == seen


def test_in_a_narrow_terminal_the_names_of_rows_stay_whole_and_a_pipe_folds_nothing(tmp_path, monkeypatch, capsys):
    from rich.console import Console

    recipe = load_recipe("table1", runs=str(tmp_path))
    recipe = replace(recipe, cells=recipe.cells[:50:5])
    table = tabulate(recipe, sweeping.collect(recipe))
    console = Console(width=64, record=True, file=io.StringIO())
    console.print(reporting.terminal(table))
    assert "tuned temp" in console.export_text()
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.argv", ["logitclip", "report", "table5", "--runs", str(tmp_path)])
    cli.main()
    assert " logit_norm tuned temperature " in capsys.readouterr().out


def test_markdown_has_as_many_cells_in_every_line(table):
    lines = [line for line in reporting.markdown(table).splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 4
    assert {line.count("|") for line in lines} == {1 + 2 + 4}
    best = next(e for e in table.entries.values() if e.best and e.n == 2)
    assert f"**{best.ours}**" in reporting.markdown(table)


def test_latex_is_balanced_and_escaped(table):
    text = reporting.latex(table)
    assert "Digits <small> \\& 100 \\% of them" in text
    body = text.partition("\\midrule")[2].partition("\\bottomrule")[0]
    lines = [line for line in body.strip().splitlines() if line != "\\addlinespace"]
    assert len(lines) == 4
    assert {len(re.findall(r"(?<!\\)&", line)) for line in lines} == {5}
    assert all(line.endswith("\\\\") for line in lines)
    assert "\\begin{tabular}{llrrrr}" in text
    assert "\\multicolumn{2}{c}{symmetric 50 \\%} & \\multicolumn{2}{c}{asymmetric 40 \\%} \\\\" in text
    assert "\\cmidrule(lr){3-4}\\cmidrule(lr){5-6}" in text
    assert "\\label{tab:mine-full}" in text
    assert "Bold: best within each group" in text
    assert not re.search(r"(?<!\\)[_#]|(?<![\\{])%(?! )", text.partition("\\end{table}")[0])
    assert text.count("{") == text.count("}")


def test_tex_specials():
    assert reporting._escape_latex("a_b\\{~^") == "a\\_b\\textbackslash{}\\{\\textasciitilde{}\\textasciicircum{}"


def test_csv_and_json_hold_every_cell(table):
    lines = list(csv.DictReader(io.StringIO(reporting.csv(table))))
    assert len(lines) == 2 * 2 * 2 * 2
    names = ("statistic", "mean", "std", "half_width", "n", "published", "published_std", "difference", "chosen", "ids")
    assert tuple(lines[0]) == ("loss", "clip", "noise", *names)
    for line, e in zip(lines, table.entries.values(), strict=True):
        assert float(line["mean"]) == e.mean
        assert line["ids"].split() == list(e.ids)
    again = json.loads(json.dumps(reporting.as_json(table), allow_nan=False))
    assert [cell["mean"] for cell in again["cells"]] == [e.mean for e in table.entries.values()]
    assert again["notes"] == list(table.notes)


# -- what others wrote -------------------------------------------------------------------------------------------------

HOSTILE = r"""
title = "Title \u001b[31m <script>pwned()</script> [link](javascript:pwned)"
[base]
data = "digits"
epochs = 1
limit = 64
noise = "symmetric:rate=0.5"
[grid]
"=a [/b]" = ["=pwned()", "</script><script>pwned()</script>", "bell \u0007\u001b]0;pwned\u0007 [/] $\\input{x}$ | `x`"]
[variant."=pwned()"]
loss = "ce"
[variant."</script><script>pwned()</script>"]
loss = "mae"
[variant."bell \u0007\u001b]0;pwned\u0007 [/] $\\input{x}$ | `x`"]
loss = "gce"
[table]
rows = ["=a [/b]"]
"""


@pytest.fixture(scope="session")
def hostile(tmp_path_factory):
    """A recipe whose names contain scripts, formulas, markup and terminal commands, and its run folder."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "hostile.toml").write_text(HOSTILE, encoding="utf-8")
    recipe = load_recipe(str(folder / "hostile.toml"), runs=str(folder / "runs"))
    sweeping.sweep(recipe, executor="inline")
    return recipe, sweeping.collect(recipe)


def test_no_writer_lets_a_name_be_more_than_text(hostile, command):
    recipe, rows = hostile
    table = tabulate(recipe, rows)
    texts = {
        "html": reporting.html(table, rows),
        "markdown": reporting.markdown(table),
        "latex": reporting.latex(table),
        "csv": reporting.csv(table),
    }
    for text in texts.values():
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text.partition("<script>")[0])
    assert "<script>pwned" not in texts["html"]
    for character in "<`[|":
        assert f"{character}script" not in texts["markdown"]
        assert not re.search(rf"(?<!\\){re.escape(character)}(?=x|link)", texts["markdown"])
    rows_of_table = [line for line in texts["markdown"].splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in rows_of_table} == {3}
    assert "\\input" not in texts["latex"]
    assert [line["'=a [/b]"][:2] for line in csv.DictReader(io.StringIO(texts["csv"]))] == ["'=", "</", "be"]
    code, out, err = command("report", *shlex.split(recipe.command("report"))[2:])
    assert code == 0, err
    assert "\x1b" not in out + err
    assert "␛[31m <script>" in out
    assert "[/]" in out


@pytest.mark.parametrize("suffix", ["html", "svg", "pdf", "png"])
def test_no_figure_lets_a_name_be_more_than_text(hostile, tmp_path, suffix):
    from logitclip.studies import drawing, figures

    recipe, rows = hostile
    drawing.save(figures.draw(recipe, rows), tmp_path / f"figure.{suffix}")  # vl-convert aborts on control characters
    content = (tmp_path / f"figure.{suffix}").read_bytes()
    assert b"<script>pwned" not in content
    if suffix == "svg":
        ElementTree.fromstring(content)


@pytest.fixture(scope="session")
def page(table, rows):
    return reporting.html(table, rows)


def test_the_page_needs_nothing_from_elsewhere(page):
    without_scripts = re.sub(r"<script.*?</script>", "", page, flags=re.S)
    assert not re.search(r"(?:src|href|url)\s*[=(]\s*[\"']?(?:https?:)?//", without_scripts)
    assert "<script src" not in page
    assert page.count("window.vegaEmbed=") == 1  # one runtime for all charts
    assert len(page) < 2_000_000


def test_the_page_escapes_what_others_wrote(page):
    assert "Digits &lt;small&gt; &amp; 100 % of them" in page
    assert "<small> &" not in page


def test_the_page_shows_settings_versions_and_runs(page, rows):
    shown = html.unescape(re.sub(r"<script.*?</script>|<[^>]+>", " ", page, flags=re.S))
    result = next(row.outcome for row in rows if isinstance(row.outcome, Result))
    assert "15 of 16" in shown
    assert result.versions["torch"] in shown
    assert result.device in shown
    assert re.search(r"limit\s+128", shown)
    assert not re.search(r"val_rule\s+random", shown)  # a default


def test_the_page_holds_aggregates_and_the_noise(page):
    specs = [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', page, re.S)]
    assert len(specs) == 2 * 3 + 2  # accuracy, memorised and norms for two noises; two matrices
    for spec in specs[:6]:
        data = spec["data"]["values"]
        assert len(data) == 3 * 2 * 2  # epochs, losses, clips: the seeds are averaged
        assert all(value["low"] <= value["mean"] <= value["high"] for value in data)
    symmetric, asymmetric = (spec["data"]["values"] for spec in specs[6:])
    for matrix in (symmetric, asymmetric):
        for true in {value["true"] for value in matrix}:
            assert sum(value["share"] for value in matrix if value["true"] == true) == pytest.approx(100, abs=0.1)
    assert all(int(v["given"]) in (int(v["true"]), (int(v["true"]) + 1) % 10) for v in asymmetric)
    assert any(v["given"] != v["true"] for v in asymmetric)


@pytest.mark.parametrize("module", ["jinja2", "altair", "vl_convert"])
def test_without_the_extra_the_page_is_refused_with_a_sentence(monkeypatch, table, rows, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"pip install 'logitclip\[report\]'"):
        reporting.html(table, rows)
    assert reporting.markdown(table)
    assert reporting.terminal(table)


# -- command line ------------------------------------------------------------------------------------------------------


@pytest.fixture
def command(capsys, monkeypatch):
    def run(*args):
        monkeypatch.setattr("sys.argv", ["logitclip", *map(str, args)])
        monkeypatch.setenv("COLUMNS", "160")
        try:
            cli.main()
        except SystemExit as stop:
            return (int(stop.code or 0), *capsys.readouterr())
        return (0, *capsys.readouterr())

    return run


def test_report_command_writes_what_it_is_asked_for(command, folder, tmp_path, table):
    files = [tmp_path / "new" / f"report.{suffix}" for suffix in ("html", "md", "tex", "csv", "json")]
    options = [part for file in files for part in ("-o", file)]
    code, out, err = command("report", folder / "mine.toml", "--runs", folder / "runs", *options)
    assert code == 0, err
    assert entry(table, **CELL).ours in out
    assert (tmp_path / "new" / "report.md").read_text(encoding="utf-8") == reporting.markdown(table)
    assert all(path.stat().st_size > 500 for path in files)
    assert command("report", folder / "mine.toml", "--runs", folder / "runs", "--strict")[0] == 3  # one run diverged
    assert command("report", folder / "mine.toml", "--runs", tmp_path / "none", "--strict")[0] == 4
    code, out, _ = command("report", folder / "mine.toml", "--runs", folder / "runs", "--json")
    assert code == 0
    assert json.loads(out)["cells"][0]["n"] == 2


def test_report_command_answers_mistakes(command):
    code, out, err = command("report", "tabel1")
    assert (code, out) == (2, "")
    assert "Unknown recipe" in err


def test_report_of_a_figure_without_runs_names_the_command_that_draws_it(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b b.toml").write_text(
        '[figure]\nkind = "bounds"\nclasses = [10]\ntau = [0.1, 5.0]\n', encoding="utf-8"
    )
    code, out, err = command("report", "b b.toml")
    assert (code, out) == (2, "")
    said = re.fullmatch(r"logitclip: The recipe b b has no runs to report: (.*) draws it\.\n", err)
    assert said is not None
    name, *arguments = shlex.split(said[1])
    assert name == "logitclip"
    assert command(*arguments)[0] == 0
    assert (tmp_path / "b b.svg").exists()


# -- in a browser ------------------------------------------------------------------------------------------------------

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

# Waits for the charts, moves the pointer over the first one until a tooltip appears, clicks a button of the legend,
# and reports to the surrounding page.
PROBE = """
<script>
const seen = {errors: []};
window.addEventListener("error", event => seen.errors.push(event.message));
window.addEventListener("unhandledrejection", event => seen.errors.push(String(event.reason)));
const error = console.error;
console.error = (...words) => { seen.errors.push(words.join(" ")); error(...words); };
const pause = ms => new Promise(done => setTimeout(done, ms));
const ink = canvas => canvas.toDataURL();
async function probe() {
  for (let i = 0; i < 100 && !document.body.dataset.ready; i++) await pause(50);
  const canvases = [...document.querySelectorAll("figure canvas")], canvas = canvases[0];
  seen.charts = canvases.length;
  seen.blank = canvases.filter(canvas => {
    const empty = Object.assign(document.createElement("canvas"), {width: canvas.width, height: canvas.height});
    return ink(canvas) == ink(empty);
  }).length;
  seen.width = document.documentElement.clientWidth;
  seen.overflow = document.documentElement.scrollWidth - seen.width;
  const box = canvas.getBoundingClientRect();
  for (let i = 1; i < 10 && !seen.tooltip; i++) {
    const at = {bubbles: true, clientX: box.left + box.width * i / 10, clientY: box.top + box.height / 2, view: window};
    for (const kind of ["pointerover", "pointermove", "mousemove"])
      canvas.dispatchEvent(new (kind.startsWith("p") ? PointerEvent : MouseEvent)(kind, at));
    await pause(100);
    const tooltip = document.querySelector("#vg-tooltip-element.visible");
    seen.tooltip = tooltip && tooltip.textContent;
  }
  const before = ink(canvas), button = document.querySelector(".legend button");
  button.click();
  await pause(300);
  seen.pressed = button.getAttribute("aria-pressed");
  seen.changed = ink(canvas) != before;
  parent.postMessage(JSON.stringify(seen), "*");
}
probe();
</script>
"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install -y chromium")
@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_works_in_a_browser_offline(page, tmp_path, width):
    """Charts, tooltips and the legend work, without requests, console errors or anything wider than the page.

    The page is in a frame, because a browser window cannot be as narrow as a phone.
    """
    assert CHROMIUM is not None
    (tmp_path / "report.html").write_text(page.replace("<body>", "<body>" + PROBE, 1), encoding="utf-8")
    frame = f'<iframe src="report.html" style="width: {width}px; height: 3000px; border: 0"></iframe>'
    hear = "<script>onmessage = event => document.body.dataset.seen = event.data</script>"
    (tmp_path / "frame.html").write_text(f"<body>{hear}{frame}</body>", encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    options += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={tmp_path / 'profile'}"]
    options += ["--virtual-time-budget=20000", "--window-size=1400,3100", "--hide-scrollbars", "--dump-dom"]
    done = subprocess.run(
        [CHROMIUM, *options, f"file://{tmp_path}/frame.html"], capture_output=True, text=True, timeout=120
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    found = re.search(r'data-seen="(.*?)"', done.stdout, re.S)
    assert found, done.stdout[-500:] + done.stderr[-2000:]
    seen = json.loads(html.unescape(found[1]))
    assert seen["errors"] == []
    assert (seen["charts"], seen["blank"]) == (8, 0)
    assert seen["width"] == width
    assert seen["overflow"] <= 0
    assert re.fullmatch(
        r"run(ce|gce)clip(no clip|temp=0.02)epoch[123]mean[\d.]+least[\d.]+largest[\d.]+runs[12]", seen["tooltip"]
    )
    assert seen["pressed"] == "true"
    assert seen["changed"]


def test_reports_and_figures_import_no_plugin(command, tmp_path):
    plugin, recipe = tmp_path / "report_plugin.py", tmp_path / "own.toml"
    plugin.write_text(
        f"open({str(tmp_path / 'executed')!r}, 'a').write('x')\n"
        "from logitclip.losses import loss\n"
        "@loss\ndef report_loss(log_p, _):\n    return -log_p\n",
        encoding="utf-8",
    )
    recipe.write_text(
        f'[base]\nepochs = 2\nlimit = 64\n[grid]\nloss = ["ce", "mine"]\nnoise = ["symmetric:rate=0.5"]\n'
        f'[variant.mine]\nloss = "report_loss"\nplugin = ["{plugin}"]\n[table]\nrows = ["loss"]\ncols = ["noise"]\n',
        encoding="utf-8",
    )
    runs = ["--runs", str(tmp_path / "runs")]
    code, _, err = command("sweep", str(recipe), *runs, "--executor", "inline")
    assert code == 2
    assert "which is Python code: add --plugin" in err
    assert not (tmp_path / "executed").exists()
    assert command("sweep", str(recipe), *runs, "--executor", "inline", "--plugin", str(plugin))[0] == 0
    assert (tmp_path / "executed").read_text(encoding="utf-8") == "x"
    for name in [name for name in sys.modules if name.startswith("logitclip_plugin")]:
        del sys.modules[name]
    del LOSSES._entries["report_loss"]
    code, out, _ = command("report", str(recipe), *runs, "-o", str(tmp_path / "page.html"), "--strict")
    assert code == 0
    assert "mine" in out
    assert command("figures", str(recipe), *runs, "-o", str(tmp_path / "curves.svg"))[0] == 0
    assert (tmp_path / "executed").read_text(encoding="utf-8") == "x"
