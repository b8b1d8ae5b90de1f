"""Which columns mattered for the judgement of a row."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from logitclip.data._columns import Column, Dates, TextColumn, Unusable, take
from logitclip.own_data.issues import Issues
from logitclip.own_data.kind import Source
from logitclip.own_data.model import Model
from logitclip.own_data.tables import Table

SHOWN = 4  # columns of a row that people see
FIRST = 60  # rows that are explained at least
MOST_CELLS = 4_000  # rows times columns that are explained at most, beyond the first rows
CANDIDATES = 20  # columns that are tried; of more, those that say most about the label by themselves
BINS = 10  # of numbers


def columns_that_mattered(model: Model, source: Source, issues: Issues) -> dict[int, list[str]]:
    """Return the columns that mattered most for suspicious rows, the most important first.

    A column matters for a row if the probability of the given label changes when its value is replaced by a typical
    one: the median, or the most frequent category.

    Args:
        model: The model.
        source: Its data.
        issues: The scores of the labels: the first rows and those marked wrong are explained.

    Returns:
        Position of the row -> names of columns. Empty for images, and for texts, which are shown as a whole.
    """
    kind = source.kind
    if type(kind) is not Table:
        return {}
    names = _candidates(kind, source.labels)
    count = max(FIRST, min(int(issues.wrong.sum()), MOST_CELLS // len(names)))
    rows = issues.ranking[:count]
    given = source.labels[rows]

    def probability(columns: Mapping[str, Column]) -> np.ndarray:
        found = model.probabilities_of(kind.rows(columns))
        return np.log(np.maximum(found[np.arange(len(rows)), given], 1e-6))

    as_it_is = take(kind.columns, rows)
    before = probability(as_it_is)
    effects = np.stack(
        [np.abs(probability({**as_it_is, name: _typical(kind.columns[name], len(rows))}) - before) for name in names]
    )
    order = np.argsort(-effects, axis=0, kind="stable")[:SHOWN]
    return {int(row): [names[j] for j in order[:, i]] for i, row in enumerate(rows)}


def _typical(column: Column, count: int) -> Column:
    """Return a column of `count` typical values: the median, or the most frequent category."""
    if isinstance(column, TextColumn):
        return TextColumn(np.full(count, np.bincount(column.codes + 1).argmax() - 1), column.values)
    if isinstance(column, Dates):
        return Dates(np.full(count, np.nanmedian(column.days)))
    assert not isinstance(column, Unusable)
    return np.full(count, np.nanmedian(column))


def _candidates(kind: Table, labels: np.ndarray) -> list[str]:
    names = list(kind.used)
    if len(names) <= CANDIDATES:
        return names
    said = {name: _predictive_share(kind.columns[name], labels) for name in names}
    return sorted(names, key=lambda name: -said[name])[:CANDIDATES]


def _predictive_share(column: Column, labels: np.ndarray) -> float:
    """Return the share of the labels that the most frequent class of each category, or bin of numbers, predicts."""
    if isinstance(column, TextColumn):
        codes = column.codes + 1
    else:
        values = column.days if isinstance(column, Dates) else column
        assert isinstance(values, np.ndarray)
        codes = np.searchsorted(np.nanquantile(values, np.linspace(0, 1, BINS + 1)[1:-1]), values)
    table = np.zeros((int(codes.max()) + 1, int(labels.max()) + 1))
    np.add.at(table, (codes, labels), 1)
    return float(table.max(1).sum() / len(labels))
