"""Sweeps: run what is missing of a recipe, tuning first where it has to, and collect what came out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from logitclip.config import RunConfig
from logitclip.executors import Failure, OnEvent
from logitclip.run import Result

if TYPE_CHECKING:
    from logitclip.recipes import Cell, Recipe


@dataclass(frozen=True)
class Row:
    """A cell of a recipe and what came out."""

    cell: Cell
    config: RunConfig | None  # with the tuned value in place; None: it has not been chosen yet
    outcome: Result | Failure | None


def collect(recipe: Recipe) -> list[Row]:
    """Every cell with its outcome, read from the folders; nothing is run."""
    raise NotImplementedError


def sweep(
    recipe: Recipe,
    *,
    executor: str = "local",
    jobs: int | None = None,
    address: str | None = None,
    shard: tuple[int, int] = (1, 1),
    on_event: OnEvent | None = None,
) -> list[Row]:
    """Run what is missing of a recipe, tuning first where it has to, and return its rows."""
    raise NotImplementedError
