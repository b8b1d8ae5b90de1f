"""Figures of small real runs, and of the theory."""

import json
import math
import re
import shutil
import statistics
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from logitclip import cli
from logitclip.runs.results import Result
from logitclip.studies import drawing, figures, sweeping
from logitclip.studies.recipe import FIGURES, load_recipe

RECIPE = """
title = "Temps"
[base]
loss = "ce"
epochs = 3
limit = 128
[grid]
data = ["digits"]
clip = ["none", "norm:temp=0.02", "norm:temp=0.5"]
noise = ["symmetric:rate=0.5", "asymmetric:rate=0.4"]
model = ["mlp", "mlp:width=32"]
seed = [0, 1]
[table]
rows = ["data", "model", "clip"]
cols = ["noise"]
cells = ["memorised"]
[figure]
kind = "lines"
x = "clip"
y = "last10_accuracy"
panel = "model"
reference = "none"
"""


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("figures")
    (folder / "temps.toml").write_text(RECIPE, encoding="utf-8")
    (folder / "curves.toml").write_text(RECIPE.partition("[figure]")[0], encoding="utf-8")
    sweeping.sweep(load(folder), executor="inline")
    return folder


def load(folder, name="temps"):
    return load_recipe(str(folder / f"{name}.toml"), runs=str(folder / "runs"))


@pytest.fixture(scope="session")
def rows(folder):
    return sweeping.collect(load(folder))


def data(chart):
    """Return the data of a chart."""
    spec = chart.to_dict()
    if "vconcat" in spec:
        return [value for row in spec["vconcat"] for value in row["data"]["values"]]
    return next(iter(spec["datasets"].values())) if "datasets" in spec else spec["data"]["values"]


def svg(chart, path):
    """Return a chart as it is written, and check that a page shows it readably."""
    drawing.save(chart, path)
    ElementTree.parse(path)
    text = path.read_text(encoding="utf-8")
    assert int(re.findall(r'width="(\d+)', text)[0]) <= drawing.WIDE
    assert min(map(float, re.findall(r'font-size[=:]"?([\d.]+)', text))) >= drawing.SMALL
    return text


def test_bounds_are_those_of_the_proposition():
    chart = figures.draw(load_recipe("figure1"), [])
    values = data(chart)
    assert len({value["K"] for value in values}) == 4
    for value in values[::37]:
        sign = 2 if value["bound"] == "upper" else -2
        assert value["loss"] == pytest.approx(math.log(1 + (int(value["K"]) - 1) * math.exp(sign * value["tau"])))
    dash = chart.to_dict()["encoding"]["strokeDash"]["scale"]
    assert dict(zip(dash["domain"], map(tuple, dash["range"]), strict=True)) == {"upper": (5, 3), "lower": (1, 0)}


def test_a_figure_kind_is_one_function(tmp_path, monkeypatch):
    def dots(recipe, rows, *, x: str, size: str = ""):
        import altair

        return altair.Chart(altair.Data(values=[{"x": x, "size": size}])).mark_point()  # type: ignore[arg-type]

    monkeypatch.setitem(FIGURES._entries, "dots", dots)
    file = tmp_path / "mine.toml"
    file.write_text(
        RECIPE.partition("[figure]")[0] + '[figure]\nkind = "dots"\nx = "clip"\nsize = "big"', encoding="utf-8"
    )
    recipe = load_recipe(str(file), runs=str(tmp_path))
    assert figures.draw(recipe, []).to_dict()["data"]["values"] == [{"x": "clip", "size": "big"}]
    file.write_text(file.read_text(encoding="utf-8").replace("size", "sise"), encoding="utf-8")
    with pytest.raises(ValueError, match=r"Unknown key 'sise' in \[figure\] of kind dots. Did you mean 'size'"):
        load_recipe(str(file))


def test_lines_have_a_panel_a_colour_and_a_band(folder, rows, tmp_path):
    chart = figures.draw(load(folder), rows)
    values = data(chart)
    assert len(values) == 2 * 2 * 3
    assert {value["series"] for value in values} == {"symmetric 50 %", "asymmetric 40 %"}  # not the only dataset
    assert {value["panel"] for value in values} == {"mlp", "mlp width=32"}
    assert {value["x"] for value in values if not value.get("level")} == {0.02, 0.5}
    assert sum(value.get("level", False) for value in values) == 4
    where = {"clip": "norm:temp=0.02", "noise": "symmetric:rate=0.5", "model": "mlp"}
    numbers = [row.outcome.last10_accuracy for row in rows if row.cell.coordinates.items() >= where.items()]
    (point,) = [v for v in values if v["x"] == 0.02 and v["series"] == "symmetric 50 %" and v["panel"] == "mlp"]
    assert point["mean"] == pytest.approx(statistics.mean(numbers))
    assert point["high"] - point["mean"] == pytest.approx(statistics.stdev(numbers))
    text = svg(chart, tmp_path / "lines.svg")
    shown = (
        "Temps",
        "test accuracy in %",
        "mlp width=32",
        "symmetric 50 %",
        "temp (dotted: no clip)",
    )
    assert all(words in text for words in shown)


def test_lines_over_the_reciprocal(folder, rows, tmp_path):
    """Figure 2's x axis is tau = 1/temp."""
    assert (load_recipe("figure2").figure or {})["reciprocal"] == "tau"
    recipe = load(folder)
    chart = figures.draw(replace(recipe, figure={**(recipe.figure or {}), "reciprocal": "tau"}), rows)
    assert {value["x"] for value in data(chart) if not value.get("level")} == {50.0, 2.0}
    assert "tau (dotted: no clip)" in svg(chart, tmp_path / "lines.svg")


def test_bars_are_grouped(folder, rows, tmp_path):
    recipe = replace(load(folder), figure={"kind": "bars", "x": "noise", "y": "memorised"})
    one = [row for row in rows if row.cell.coordinates["model"] == "mlp"]
    chart = figures.draw(recipe, one)
    assert {value["series"] for value in data(chart)} == {"no clip", "temp=0.02", "temp=0.5"}
    text = svg(chart, tmp_path / "bars.svg")
    assert text.count('aria-roledescription="bar"') == 2 * 3
    assert text.count('aria-roledescription="rule mark"') >= 2 * 3


def test_a_recipe_without_a_figure_is_drawn_epoch_by_epoch(folder, rows, tmp_path):
    recipe = load(folder, "curves")
    assert recipe.figure is None
    chart = figures.draw(recipe, rows)
    values = data(chart)
    assert len(values) == 2 * 2 * 2 * 3 * 3  # quantities, noises, models, clips, epochs
    where = {"clip": "none", "noise": "symmetric:rate=0.5", "model": "mlp"}
    runs = [row.outcome.rows for row in rows if row.cell.coordinates.items() >= where.items()]
    last = [run[-1]["memorised"] for run in runs]
    (point,) = [
        v
        for v in values
        if (v["panel"], v["group"], v["link"], v["epoch"]) == ("symmetric 50 %", "mlp", "no clip", 3)
        and v["quantity"] == "memorised"
    ]
    assert point["mean"] == pytest.approx(statistics.mean(last), rel=1e-3)
    assert (point["low"], point["high"], point["n"]) == (
        pytest.approx(min(last), rel=1e-3),
        pytest.approx(max(last), rel=1e-3),
        2,
    )
    text = svg(chart, tmp_path / "curves.svg")
    assert "wrong labels memorised" in text
    assert 'opacity="0"' not in text  # the points under the pointer


def test_panels_of_a_row_have_one_y_axis_and_none_is_empty(tmp_path):
    point = {"link": "", "mean": 1.0, "low": 1.0, "high": 1.0, "n": 1}
    values = [
        {**point, "panel": f"panel {i}", "group": group, "quantity": quantity, "epoch": epoch}
        for i in range(7)
        for group in ("a", "b")
        for quantity in ("test_accuracy", "memorised")
        for epoch in (1, 2)
        if quantity == "test_accuracy" or i % 2
    ]
    found = figures.Curves(values, [f"panel {i}" for i in range(7)], ["a", "b"], [])
    chart = drawing.apply_style(figures.draw_epochs(found))
    rows = chart.to_dict()["vconcat"]
    assert [len({value["panel"] for value in row["data"]["values"]}) for row in rows] == [5, 2, 2, 1]
    assert all("resolve" not in row for row in rows)
    assert all("strokeDash" in layer["encoding"] for row in rows for layer in row["spec"]["layer"][1:])
    text = svg(chart, tmp_path / "curves.svg")
    assert text.count(">panel 1<") == 2  # the columns of the second row are others, so they are named again


def test_seeds_are_aggregated_by_mean_and_ends():
    runs = [
        [{"test_accuracy": 10.0, "memorised": 4.0, "norm_quantiles": [1.0, 2.0, 3.0, 4.0, 5.0]}],
        [{"test_accuracy": 30.0, "memorised": None, "norm_quantiles": [3.0, 4.0, 5.0, 6.0, 7.0]}],
    ]
    accuracy, memorised, norms = figures._over_seeds(runs)
    assert accuracy == {"quantity": "test_accuracy", "epoch": 1, "mean": 20, "low": 10, "high": 30, "n": 2}
    assert memorised == {"quantity": "memorised", "epoch": 1, "mean": 4, "low": 4, "high": 4, "n": 1}
    assert norms == {"quantity": "norms", "epoch": 1, "mean": 4, "low": 2, "high": 6, "n": 2}


def test_long_runs_are_thinned_and_keep_their_last_epoch():
    row = {"test_accuracy": 50.0, "memorised": None, "norm_quantiles": None}
    runs = [[{**row, "memorised": 7.0 if epoch % 10 == 9 else None} for epoch in range(n)] for n in (1000, 990)]
    values = list(figures._over_seeds(runs))
    accuracy, memorised = ([v for v in values if v["quantity"] == name] for name in ("test_accuracy", "memorised"))
    assert len(accuracy) == figures.POINTS + 1
    assert [(v["epoch"], v["n"]) for v in (accuracy[0], accuracy[-1])] == [(1, 2), (1000, 1)]
    assert [v["epoch"] for v in memorised] == list(range(10, 1001, 10))  # measured in every tenth epoch alone
    assert len(values) == len(accuracy) + len(memorised)


@pytest.mark.parametrize(
    ("suffix", "start"), [("svg", b"<svg"), ("pdf", b"%PDF"), ("png", b"\x89PNG"), ("html", b"<!")]
)
def test_the_suffix_says_the_format(tmp_path, suffix, start):
    path = tmp_path / "new" / f"figure.{suffix}"
    drawing.save(figures.draw(load_recipe("figure1"), []), path)
    content = path.read_bytes()
    assert content.lstrip().startswith(start)
    if suffix == "html":
        assert not re.search(rb"<script[^>]+src=", content)  # no external resources


@pytest.mark.parametrize("name", ["figure.jpeg", "figure", "figure.svgz"])
def test_other_formats_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match=r"\.svg, \.pdf, \.png, \.html"):
        drawing.check_suffix(tmp_path / name)


def test_nothing_to_draw_is_a_sentence(folder, tmp_path):
    for name in ("temps", "curves"):
        recipe = load_recipe(str(folder / f"{name}.toml"), runs=str(tmp_path))
        with pytest.raises(ValueError, match=rf"logitclip sweep .*{name}.toml'? --scale full --runs .+ first"):
            figures.draw(recipe, sweeping.collect(recipe))


@pytest.mark.parametrize("module", ["altair", "vl_convert"])
def test_without_the_extra_there_is_a_sentence(monkeypatch, tmp_path, module):
    recipe = load_recipe("figure1")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"pip install 'logitclip\[report\]'"):
        drawing.save(figures.draw(recipe, []), tmp_path / "figure.svg")


def test_numbers_along_an_axis():
    assert [figures._find_number(v) for v in ("norm:temp=1.5", 3, "norm:tau=1e-3", "value:limit=0.25")] == [
        1.5,
        3.0,
        1e-3,
        0.25,
    ]
    with pytest.raises(ValueError, match="no number"):
        figures._find_number("none")


def test_noise_charts_need_no_data(rows, monkeypatch, tmp_path):
    monkeypatch.setattr("logitclip.data.load", None)
    row = next(row for row in rows if isinstance(row.outcome, Result))
    charts, sentences = figures.noise_charts([row])
    assert sentences == []
    shares = {(v["true"], v["given"]): v["share"] for v in charts[0]["spec"]["data"]["values"]}
    matrix = row.outcome.noise["transition"]
    assert shares["3", "3"] == round(100 * matrix[3][3], 2)
    lost = replace(row.outcome, config={**row.outcome.config, "runs": str(tmp_path)})
    charts, sentences = figures.noise_charts([replace(row, outcome=lost)])
    assert charts == []
    assert sentences[0].startswith("The noise symmetric:rate=0.5 of digits is not shown: ")
    assert "noise.json is missing" in sentences[0]


def test_figures_command(monkeypatch, capsys, folder, tmp_path):
    def run(*args):
        monkeypatch.setattr("sys.argv", ["logitclip", "figures", *map(str, args)])
        try:
            cli.main()
        except SystemExit as stop:
            return int(stop.code or 0), capsys.readouterr().err
        return 0, capsys.readouterr().err

    out = tmp_path / "curves.svg"
    assert run(folder / "curves.toml", "--runs", folder / "runs", "-o", out) == (0, f"logitclip: wrote {out}\n")
    assert out.read_text(encoding="utf-8").startswith("<svg")
    more = [tmp_path / name for name in ("a.svg", "b.html")]
    words = ["-o", more[0], "-o", more[1]]
    assert run(folder / "curves.toml", "--runs", folder / "runs", *words)[0] == 0
    assert all(path.stat().st_size for path in more)
    some = tmp_path / "runs"
    shutil.copytree(folder / "runs", some)
    shutil.rmtree(next(some.glob("*/result.json")).parent)
    code, err = run(folder / "curves.toml", "--runs", some, "-o", out)
    assert code == 0
    assert "1 of 24 runs have no result yet: logitclip sweep " in err
    code, err = run("figure1", "-o", tmp_path / ".svg")
    assert (code, "is only an ending: name the file, as in figure.svg." in err) == (2, True)
    assert run("figure1")[0] == 2
    code, err = run("figure1", "-o", tmp_path / "figure.bmp")
    assert code == 2
    assert err.startswith("logitclip: Unknown format of a figure")


def test_charts_are_valid_vega_lite(folder, rows):
    """Altair validates its charts when it writes them; this checks the page's charts, which have no config, again."""
    found = figures.curves(load(folder, "curves"), rows)
    for _, charts in figures.curve_charts(found):
        for chart in charts:
            json.dumps(chart["spec"], allow_nan=False)
            drawing.vl_convert().vegalite_to_vega({**chart["spec"], "width": 300})
