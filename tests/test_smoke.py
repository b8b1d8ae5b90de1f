"""Every recipe from the sweep to its report, at the smallest scale."""

from __future__ import annotations

import csv
import io
import json
from html import escape

import pytest

from logitclip.runs.results import Result
from logitclip.studies import drawing, figures, reporting, sweeping
from logitclip.studies.recipe import load_recipe, recipe_names
from logitclip.studies.tables import tabulate


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_runs_to_its_report_and_its_figure(name, tmp_path) -> None:
    recipe = load_recipe(name, "smoke", runs=str(tmp_path))
    rows = sweeping.sweep(recipe, executor="inline")
    assert len(rows) == len(recipe.cells)
    assert all(isinstance(row.outcome, Result) for row in rows)
    assert [row.outcome for row in sweeping.collect(recipe)] == [row.outcome for row in rows]
    if recipe.rows:
        table = tabulate(recipe, rows)
        assert not any("no result" in note or "failed" in note for note in table.notes)
        lines = list(csv.DictReader(io.StringIO(reporting.csv(table))))
        assert lines
        assert all(line["mean"] for line in lines if line["statistic"] != "temp")  # without a clip there is none
        assert len(json.dumps(reporting.as_json(table))) > 100
        number = next(iter(table.entries.values()))
        for text in (reporting.markdown(table), reporting.latex(table), reporting.html(table, rows)):
            assert escape(recipe.title) in text
            assert table.ours(number).partition(" ")[0] in text
    drawing.save(figures.draw(recipe, rows), tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").read_text(encoding="utf-8").startswith("<svg")
