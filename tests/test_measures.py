"""Measures of a table: each formula against scikit-learn and SciPy, and in the table of a recipe."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import average_precision_score, roc_auc_score

from logitclip.runs.results import Failure, Result
from logitclip.studies import figures, measures, ranking, reporting, sweeping, tables
from logitclip.studies.recipe import load_recipe

RECIPE = """
[base]
limit = 128
epochs = 3
model = "mlp:width=16,depth=1"
per_example = true
[grid]
loss = ["ce", "gce"]
clip = ["none", "norm:temp=0.5"]
noise = ["symmetric:rate=0.5", "pair:rate=0.3"]
seed = [0, 1]
[table]
rows = ["loss", "clip"]
cols = ["noise"]
cells = {cells}
[figure]
kind = "ranks"
x = "noise"
colour = "clip"
"""


@pytest.mark.parametrize("seed", range(5))
def test_rankings_of_wrong_labels(seed):
    draw = np.random.default_rng(seed)
    scores = draw.integers(0, 20, 200) / 7 if seed % 2 else draw.normal(size=200)  # with and without ties
    wrong = draw.random(200) < 0.3
    assert measures.auroc(scores, wrong) == pytest.approx(roc_auc_score(wrong, scores), abs=1e-12)
    assert measures.average_precision(scores, wrong) == pytest.approx(average_precision_score(wrong, scores), abs=1e-12)
    assert measures.average_ranks(scores) == pytest.approx(stats.rankdata(scores))


def test_calibration_error():
    draw = np.random.default_rng(0)
    confidence = draw.random(500).astype(np.float32)
    correct = draw.random(500) < confidence**2
    edges = np.linspace(0, 1, 16)
    expected = 0.0
    for low, high in itertools.pairwise(edges):
        inside = (confidence >= low) & (confidence < high)
        if inside.any():
            expected += abs(correct[inside].mean() - confidence[inside].astype(float).mean()) * inside.mean()
    assert measures.calibration_error(confidence, correct) == pytest.approx(expected, abs=1e-9)
    assert measures.calibration_error(np.ones(3), np.array([True, True, True])) == 0


def test_intervals_and_critical_differences():
    values = [1.5, -0.25, 3.0, 2.0]
    low, high = stats.t.interval(0.95, 3, loc=np.mean(values), scale=stats.sem(values))
    assert measures.half_width(values) == pytest.approx((high - low) / 2)
    assert measures.half_width([1.0]) is None
    # Table 5 of Demsar 2006: q at 5 % for 2 to 10 classifiers
    published = [1.960, 2.343, 2.569, 2.728, 2.850, 2.949, 3.031, 3.102, 3.164]
    for k, q in enumerate(published, start=2):
        assert measures.critical_difference(k, 10) == pytest.approx(q * math.sqrt(k * (k + 1) / 60), abs=2e-3)


def test_bootstrap_intervals():
    values = np.random.default_rng(1).gamma(2.0, size=12)
    expected = stats.bootstrap((values,), np.mean, method="percentile", n_resamples=20_000, rng=2).confidence_interval
    assert measures.bootstrap_interval(values) == pytest.approx(tuple(expected), rel=0.05)
    assert measures.bootstrap_interval(np.full(5, 3.0)) == (3.0, 3.0)


def test_runs_that_diverged_rank_last(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text(
        RECIPE.format(cells=["last10_accuracy", "rank"]).replace("epochs = 3", "epochs = 1"), encoding="utf-8"
    )
    recipe = load_recipe(str(file), runs=str(tmp_path / "runs"))
    rows = sweeping.sweep(recipe, executor="inline")
    broken = Failure("", "Diverged", "", 1, final=True)
    lost = [replace(row, outcome=broken) if row.cell.coordinates["loss"] == "gce" else row for row in rows]
    ranks = ranking.rank_rows(tables.tabulate(recipe, lost))
    assert {row: found.tolist() for row, found in ranks.items() if row[0] == "gce"} == {
        (loss, clip): [3.5, 3.5] for loss, clip in ranks if loss == "gce"
    }
    missing = [replace(row, outcome=None) if row.cell.coordinates["loss"] == "gce" else row for row in rows]
    assert ranking.rank_rows(tables.tabulate(recipe, missing)) == {}
    with pytest.raises(ValueError, match="No value of noise has a result in every row yet"):
        figures.draw(recipe, missing)


def test_every_statistic_is_a_cell_of_a_recipe(tmp_path):
    cells = ["last10_accuracy", "gain", "rank", "best_minus_last", *measures.PER_EXAMPLE]
    file = tmp_path / "own.toml"
    file.write_text(RECIPE.format(cells=cells), encoding="utf-8")
    recipe = load_recipe(str(file), runs=str(tmp_path / "runs"))
    rows = sweeping.sweep(recipe, executor="inline")
    table = tables.tabulate(recipe, rows)
    results = {tuple(row.cell.coordinates.values()): row.outcome for row in rows}
    place = (("ce", "norm:temp=0.5"), ("pair:rate=0.3",))
    gain = table.entries[*place, "gain"]
    accuracy = {key: result.last10_accuracy for key, result in results.items() if isinstance(result, Result)}
    paired = [
        accuracy["ce", "norm:temp=0.5", "pair:rate=0.3", seed] - accuracy["ce", "none", "pair:rate=0.3", seed]
        for seed in (0, 1)
    ]
    assert list(gain.values) == pytest.approx(paired)
    assert gain.half_width == pytest.approx(12.706 * statistics.stdev(paired) / math.sqrt(2), rel=1e-4)
    assert not table.entries[("ce", "none"), place[1], "gain"].values
    for seed in (0, 1):
        ours = [accuracy[*row, "pair:rate=0.3", seed] for row in table.rows]
        ranks = [table.entries[row, place[1], "rank"].values[seed] for row in table.rows]
        assert ranks == pytest.approx(stats.rankdata([-value for value in ours]))
    one = results["ce", "none", "pair:rate=0.3", 0]
    assert isinstance(one, Result)
    assert one.last10_accuracy + table.entries[("ce", "none"), place[1], "best_minus_last"].values[0] == pytest.approx(
        one.best_accuracy
    )
    found = one.test_predictions
    assert 100 * np.mean(found["prediction"] == found["label"]) == pytest.approx(one.rows[-1]["test_accuracy"])
    wrong = one.examples["label"] != one.examples["clean_label"]
    expected = 100 * roc_auc_score(wrong, -one.examples["mean_margin"])
    assert table.entries[("ce", "none"), place[1], "wrong_label_auroc"].values[0] == pytest.approx(expected)
    ranks = ranking.rank_rows(table)
    assert {len(found) for found in ranks.values()} == {2}
    assert sum(found.mean() for found in ranks.values()) == pytest.approx(10)
    assert any(f"differ by less than {measures.critical_difference(4, 2):.2f}" in note for note in table.notes)
    for write in (reporting.markdown, reporting.latex, reporting.csv, reporting.json):
        assert write(table)
    (line,) = (r for r in reporting.records(table) if r["statistic"] == "gain" and r["half_width"] == gain.half_width)
    assert (line["loss"], line["noise"]) == ("ce", "pair:rate=0.3")
    points = figures.draw(recipe, rows).to_dict()["data"]["values"]
    assert [point["mean"] for point in points] == sorted(found.mean() for found in ranks.values())
    assert {point["series"] for point in points} == {"no clip", "temp=0.5"}


@pytest.mark.parametrize(
    ("cells", "base", "message"),
    [
        (["wrong_label_ap"], "", "needs the records of single examples: per_example = true in"),
        (["rank"], "", "has rank, which needs last10_accuracy as well"),
        (["gian"], "", "Unknown statistic 'gian' in .table.. Did you mean 'gain'"),
    ],
)
def test_statistics_that_a_recipe_cannot_have(tmp_path, cells, base, message):
    file = tmp_path / "own.toml"
    file.write_text(f'[grid]\nloss = ["ce", "gce"]\n[table]\ncells = {cells}\n{base}', encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        load_recipe(str(file))
