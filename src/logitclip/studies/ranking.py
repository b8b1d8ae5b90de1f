"""Ranks of the rows of a table: in each column, and their means with intervals over the columns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from logitclip.runs.results import Failure, Result
from logitclip.studies.measures import LEVEL, average_ranks, bootstrap_interval, critical_difference
from logitclip.studies.sweeping import CellOutcome
from logitclip.text import counted

if TYPE_CHECKING:
    from logitclip.studies.tables import AxisValues, ResultTable

ROWS_IN_NOTE = 20  # rows in the note below a table


def rank_runs(blocks: Iterable[Sequence[CellOutcome]]) -> dict[str, float]:
    """Return the rank of each run among the runs of its block, by run id; only where every run of the block has ended.

    Runs that diverged share the last rank.
    """

    def accuracy(outcome: Result | Failure | None) -> float | None:
        if isinstance(outcome, Result):
            return outcome.last10_accuracy
        return -math.inf if outcome is not None and outcome.final else None

    ranks = {}
    for block in blocks:
        accuracies = [accuracy(row.outcome) for row in block]
        if len(block) > 1 and None not in accuracies:
            numbers = average_ranks(-np.array(accuracies, dtype=float))
            found = [(row.outcome, rank) for row, rank in zip(block, numbers.tolist(), strict=True)]
            ranks |= {result.id: rank for result, rank in found if isinstance(result, Result)}
    return ranks


def rank_rows(table: ResultTable) -> dict[AxisValues, np.ndarray]:
    """Return the ranks of each row by its mean accuracy, [C]: one for each column in which every row has a number.

    Rows whose runs diverged share the last rank.
    """
    ranked = []
    for col in table.cols:
        entries = [table.entries[row, col, "last10_accuracy"] for row in table.rows]
        accuracies = [-math.inf if entry.diverged else entry.mean for entry in entries]
        if len(accuracies) > 1 and None not in accuracies:
            ranked.append(average_ranks(-np.array(accuracies, dtype=float)))
    return dict(zip(table.rows, np.array(ranked).T, strict=True)) if ranked else {}


def describe_ranks(table: ResultTable) -> str:
    """Return the mean ranks and which of them can be told apart; empty if the table has no ranks, or no accuracies."""
    ranks = rank_rows(table) if "rank" in table.statistics else {}
    if not ranks:
        return ""

    def mean_of(row: AxisValues) -> str:
        low, high = bootstrap_interval(ranks[row])
        return f"{ranks[row].mean():.2f}" + (f" ({low:.1f} to {high:.1f})" if len(ranks[row]) > 1 else "")

    order = sorted(ranks, key=lambda row: (float(ranks[row].mean()), table.labels(row)))
    columns = len(ranks[order[0]])
    shown = "; ".join(f"{', '.join(table.labels(row))} {mean_of(row)}" for row in order[:ROWS_IN_NOTE])
    more = f"; and {len(order) - ROWS_IN_NOTE} more" if len(order) > ROWS_IN_NOTE else ""
    intervals = f", with {100 * (1 - LEVEL):g} % bootstrap intervals" if columns > 1 else ""
    text = f"Mean rank over {counted(columns, 'column')}{intervals}: {shown}{more}."
    if columns > 1:
        text += (
            f" Ranks that differ by less than {critical_difference(len(ranks), columns):.2f} cannot be told apart "
            f"(Nemenyi's test, {100 * LEVEL:g} %)."
        )
    return text
