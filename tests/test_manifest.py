"""The manifest of a sweep: what `report` needs where neither plugins nor data files are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from logitclip.runs.config import RunConfig
from logitclip.runs.plugins import plugins_ignored
from logitclip.runs.results import Result
from logitclip.studies import sweeping
from logitclip.studies.manifest import SWEEPS, as_swept
from logitclip.studies.recipe import load_recipe

PLUGIN = """
import torch
from torch import nn

from logitclip.data import DATASETS, Dataset, Split, with_defaults
from logitclip.models import MODELS
from logitclip.noise import NOISES


@MODELS.register
def tinyvit_{tag}(num_classes, *, in_features: int, patch: int = 4, width: int = 8):
    return nn.Sequential(nn.Flatten(), nn.Linear(in_features, width), nn.ReLU(), nn.Linear(width, num_classes))


@NOISES.register
def block_{tag}(labels, num_classes, *, rate: float = 0.2, size: int = 3, generator):
    wrong = torch.rand(len(labels), generator=generator) < rate
    return torch.where(wrong, (labels + 1) % num_classes, labels)


@DATASETS.register
@with_defaults({{"epochs": 1, "batch_size": 32, "lr": 0.1}})
def blobs_{tag}(root, *, spread: float = 1.0):
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(150) % 3
    x = torch.randn(150, 4, generator=generator) + spread * y[:, None]
    return Dataset("blobs", Split(x[:100], y[:100]), Split(x[100:], y[100:]), 3, ("a", "b", "c"))
"""

RECIPE = """
[base]
data = "blobs_{tag}:spread=2.0"
plugin = ["{plugin}"]
[grid]
model = ["tinyvit_{tag}:patch=4", "tinyvit_{tag}:width=16"]
noise = ["block_{tag}:size=5,rate=0.4"]
clip = ["none", "norm:temp=auto"]
"""


def make(folder: Path, tag: str) -> tuple[str, Path]:
    """A recipe and its plugin; each test registers names of its own."""
    plugin = folder / "mine.py"
    plugin.write_text(PLUGIN.format(tag=tag), encoding="utf-8")
    file = folder / "own.toml"
    file.write_text(RECIPE.format(tag=tag, plugin=plugin.as_posix()), encoding="utf-8")
    return str(file), plugin


def sweep(file: str, plugin: Path, folder: Path, **changes):
    recipe = load_recipe(file, runs=str(folder), plugin=[str(plugin)], changes=changes)
    return sweeping.sweep(recipe, executor="inline")


@plugins_ignored()
def collect(file: str, folder: Path) -> list[sweeping.CellOutcome]:
    return sweeping.collect(as_swept(load_recipe(file, runs=str(folder))))


def numbers(rows: list[sweeping.CellOutcome]) -> list[tuple[str, float]]:
    return [(row.outcome.id, row.outcome.last10_accuracy) for row in rows if isinstance(row.outcome, Result)]


def test_a_study_of_plugins_is_reported_without_them(tmp_path):
    """A default spelt out, knobs in another order, defaults of a plugin's dataset: as the sweep understood them."""
    file, plugin = make(tmp_path, "kept")
    swept = sweep(file, plugin, tmp_path / "runs")
    plugin.unlink()
    moved = (tmp_path / "runs").rename(tmp_path / "elsewhere")
    rows = collect(file, moved)
    assert numbers(rows) == numbers(swept)
    assert len(numbers(rows)) == 4
    assert [row.cell.coordinates for row in rows] == [row.cell.coordinates for row in swept]
    assert rows[0].cell.coordinates["noise"] == "block_kept:rate=0.4,size=5"
    assert rows[1].config is not None
    assert swept[1].config is not None
    assert rows[1].config.clip == swept[1].config.clip != "norm:temp=auto"


def test_options_of_the_command_line_are_kept(tmp_path):
    file, plugin = make(tmp_path, "options")
    swept = sweep(file, plugin, tmp_path / "runs", epochs=2, schedule="constant")
    with plugins_ignored():
        recipe = as_swept(load_recipe(file, runs=str(tmp_path / "runs")))
    assert dict(recipe.changes) == {"epochs": 2, "schedule": "constant"}
    assert "--epochs 2 --schedule constant --plugin" in recipe.command()
    assert "--epochs" not in recipe.command("report")
    rows = collect(file, tmp_path / "runs")
    assert numbers(rows) == numbers(swept)
    assert {row.outcome.epochs for row in rows if isinstance(row.outcome, Result)} == {2}
    sweep(file, plugin, tmp_path / "runs")  # the last sweep counts
    assert {row.outcome.epochs for row in collect(file, tmp_path / "runs") if isinstance(row.outcome, Result)} == {1}


def test_a_torn_line_and_foreign_lines_are_left_out(tmp_path):
    file, plugin = make(tmp_path, "torn")
    swept = sweep(file, plugin, tmp_path / "runs")
    (manifest,) = (tmp_path / "runs" / SWEEPS).iterdir()
    before = manifest.read_bytes()
    bad = [{"id": "../../etc", "config": {}}, {"id": "0" * 16, "config": {"nothing": 1}}, [1], {"id": 5}]
    manifest.write_bytes(before + "".join(json.dumps(line) + "\n" for line in bad).encode() + b'{"cells": [{"coor')
    assert numbers(collect(file, tmp_path / "runs")) == numbers(swept)
    sweep(file, plugin, tmp_path / "runs", epochs=2)  # appends after the torn line
    assert len(numbers(collect(file, tmp_path / "runs"))) == 4
    with manifest.open("a", encoding="utf-8") as stream:
        stream.write('{"changes": {}, "cells": [{"coordinates": {}}]}\n')
    with pytest.raises(ValueError, match=r"is damaged .* remove the file and repeat the sweep"):
        collect(file, tmp_path / "runs")


def test_a_recipe_that_was_never_swept_is_read_from_its_file(tmp_path):
    recipe = load_recipe("quickstart", "smoke", runs=str(tmp_path))
    assert as_swept(recipe) is recipe
    assert all(row.outcome is None for row in sweeping.collect(recipe))


def test_a_repeated_sweep_adds_nothing(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text(
        '[base]\nlimit = 64\nepochs = 1\nmodel = "mlp:width=8,depth=1"\n[grid]\nseed = [0, 1]\n', encoding="utf-8"
    )
    recipe = load_recipe(str(file), runs=str(tmp_path / "runs"))
    sweeping.sweep(recipe, executor="inline")
    (manifest,) = (tmp_path / "runs" / SWEEPS).iterdir()
    before = manifest.read_bytes()
    assert len(before.splitlines()) == 3
    sweeping.sweep(recipe, executor="inline")
    assert manifest.read_bytes() == before
    ids = [json.loads(line).get("id") for line in before.splitlines()]
    assert ids[1:] == [RunConfig(**vars(cell.config)).id for cell in recipe.cells]
