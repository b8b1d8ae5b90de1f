"""The manifest of a sweep: its cells and the ids of their runs, kept in the folder of runs for commands that only read.

The id of a run depends on plugins and data files, and on the defaults that a plugin registers. `report` and `figures`
import no plugin, and may be called on a machine that has none of these files, so a sweep writes down what it computed.

A manifest is a file of JSON lines that only grows, so several sweeps can write to it. A line with `cells` has the cells
and the options of the command line; the last such line counts. A line with `id` has the config of a run, or of a trial.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from logitclip import files
from logitclip.files import Json
from logitclip.runs.config import UNCOUNTED, RunConfig
from logitclip.studies.recipe import Cell, Recipe

log = logging.getLogger(__name__)

SWEEPS = "sweeps"  # in the folder of runs
_DEFAULTS = {field.name: field.default for field in fields(RunConfig)}


@dataclass
class Manifest:
    """What a sweep keeps: the ids of its runs by config, and the line about its cells."""

    path: Path | None  # None: nothing is kept
    ids: dict[RunConfig, str] = field(default_factory=dict)
    cells: Json | None = None
    torn: bool = False  # its last line was cut short by a crash
    lines: list[str] = field(default_factory=list)  # to be written

    def add(self, config: RunConfig, id: str) -> None:
        """Keep the id of a run; `save` writes it."""
        key = _without_places(config)
        if self.ids.get(key) != id:
            self.ids[key] = id
            self.lines.append(json.dumps({"id": id, "config": _changed_fields(key)}))

    def save(self) -> None:
        """Append what is new. If the folder cannot be written to, the runs themselves say so."""
        lines, self.lines = self.lines, []
        if self.path is None or not lines:
            return
        text = "\n" * self.torn + "\n".join(lines) + "\n"
        self.torn = False
        try:
            files.make_folder(self.path.parent)
            files.append(self.path, text.encode())
        except OSError as error:
            log.info("The list of the cells of this sweep cannot be kept: %s", error)


def open_manifest(recipe: Recipe) -> Manifest:
    """Return the manifest of a recipe, to which a sweep adds the recipe's cells and the ids of its runs."""
    manifest = _read_manifest(recipe)
    cells = [
        {
            "coordinates": dict(cell.coordinates),
            "own_noise": cell.own_noise,
            "config": _changed_fields(_without_places(cell.config)),
        }
        for cell in recipe.cells
    ]
    line = json.dumps({"changes": dict(recipe.changes), "cells": cells})
    if json.loads(line) != manifest.cells:
        manifest.lines.append(line)
    return manifest


def as_swept(recipe: Recipe) -> Recipe:
    """Return the recipe with the cells and ids of its last sweep in the folder of runs; unchanged if there was none.

    Raises:
        ValueError: The manifest is damaged.
    """
    manifest = _read_manifest(recipe)
    if manifest.cells is None:
        return recipe
    axes, first = list(recipe.cells[0].coordinates), recipe.cells[0].config
    try:
        cells = tuple(
            Cell(
                {axis: cell["coordinates"][axis] for axis in axes},
                replace(RunConfig(**cell["config"]), runs=first.runs, root=first.root),
                bool(cell["own_noise"]),
            )
            for cell in manifest.cells["cells"]
        )
        changes = {name: getattr(RunConfig(**{name: value}), name) for name, value in manifest.cells["changes"].items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{manifest.path} is damaged ({error!r}): remove the file and repeat the sweep.") from error
    return replace(recipe, cells=cells, changes=changes, ids=manifest.ids) if cells else recipe


def id_of(recipe: Recipe, config: RunConfig) -> str | None:
    """Return the id of a run: as its sweep computed it, or else computed now; None if the sweep did not get to it."""
    return config.id if recipe.ids is None else recipe.ids.get(_without_places(config))


def _read_manifest(recipe: Recipe) -> Manifest:
    """Return what the last sweep of a recipe kept in the folder of runs; lines that cannot be read are skipped."""
    if not recipe.digest or not recipe.cells:
        return Manifest(None)
    name = f"{recipe.name}-{recipe.scale}-{recipe.digest[:8]}.jsonl"
    path = Path(recipe.cells[0].config.runs) / SWEEPS / name
    content = files.read_bytes(path) if path.exists() else b""
    manifest = Manifest(path, torn=bool(content) and not content.endswith(b"\n"))
    for text in content.splitlines():
        with contextlib.suppress(KeyError, TypeError, ValueError, RecursionError):  # cut short, or of another version
            line = dict(json.loads(text))
            if "cells" in line:
                manifest.cells = line
            elif re.fullmatch("[0-9a-f]{16}", line["id"]):
                manifest.ids[_without_places(RunConfig(**line["config"]))] = line["id"]
    return manifest


def _without_places(config: RunConfig) -> RunConfig:
    """Return the config without the fields that may differ between machines and change no number."""
    return replace(config, **{name: _DEFAULTS[name] for name in UNCOUNTED})


def _changed_fields(config: RunConfig) -> Json:
    return {name: value for name, value in vars(config).items() if value != _DEFAULTS[name]}
