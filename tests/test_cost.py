"""Estimates of how long runs take, and what a sweep does with them."""

import io
import sys

import pytest

from logitclip import data
from logitclip.cli import studies
from logitclip.runs import cost
from logitclip.runs.config import RunConfig
from logitclip.runs.cost import run_seconds
from logitclip.studies.recipe import load_recipe


def test_the_estimate_grows_with_the_work():
    digits = data.load("digits", None)
    small = run_seconds(RunConfig(model="mlp:width=512,depth=4", epochs=1), digits)
    assert 0 < small < 60
    large = run_seconds(RunConfig(model="mlp:width=512,depth=4", epochs=1000, clip="norm:temp=auto"), digits)
    assert 100 < large / small < 10_000
    half = run_seconds(RunConfig(model="mlp:width=512,depth=4", epochs=1000, limit=len(digits.train) // 100), digits)
    assert half < large / 5
    assert run_seconds(RunConfig(encoder="hf:name=somewhere"), digits) == 0  # not the network for images


def test_each_run_is_timed_on_its_own_data(monkeypatch, tmp_path):
    """Though the spec of one dataset begins as that of another."""
    rows = [f"{i * i % 37},{i % 2},{i % 4}" for i in range(80)]
    (tmp_path / "a.csv").write_text("\n".join(["x,kind,kind2", *rows]), encoding="utf-8")
    specs = ["table:path=a.csv,label=kind2", "table:path=a.csv,label=kind"]
    file = tmp_path / "both.toml"
    file.write_text(f"[grid]\ndata = {specs}\nseed = [0]\n", encoding="utf-8")
    recipe = load_recipe(str(file), root=str(tmp_path))
    datasets = [data.load(spec, root) for spec, root in recipe.data()]
    timed: dict[str, int] = {}

    def seconds(config: RunConfig, dataset: data.Dataset) -> float:
        timed[config.data] = dataset.num_classes
        return 1.0

    monkeypatch.setattr(cost, "run_seconds", seconds)
    assert studies._estimate_hours(recipe, datasets, recipe.cells) == pytest.approx(2 / 3600)
    assert timed == {specs[0]: 4, specs[1]: 2}


@pytest.fixture
def long(monkeypatch):
    monkeypatch.setattr(studies, "ASK_HOURS", 0)


SWEEP = ("sweep", "quickstart", "--scale", "smoke", "--executor", "inline", "-q")


def test_a_long_sweep_is_not_started_if_nobody_can_be_asked(command, long, tmp_path):
    code, out, err = command(*SWEEP, "--runs", tmp_path / "runs")
    assert (code, out) == (2, "")
    assert "hours of one core or device. Add --yes to start it, or take a smaller scale, as in --scale cpu." in err
    assert not list(tmp_path.glob("runs/*"))
    code, _, err = command(*SWEEP, "--runs", tmp_path / "runs", "--yes")
    assert (code, err) == (0, "")


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("", 2), ("n", 2)])
def test_a_terminal_is_asked(command, long, tmp_path, monkeypatch, answer, code):
    stdin = io.StringIO(f"{answer}\n")
    monkeypatch.setattr(stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdin", stdin)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    found, _, err = command(*SWEEP, "--runs", tmp_path / "runs")
    assert found == code
    assert "Start it? [y/N]" in " ".join(err.split())  # a narrow terminal breaks the line
    assert bool(list(tmp_path.glob("runs/*/result.json"))) == (code == 0)
