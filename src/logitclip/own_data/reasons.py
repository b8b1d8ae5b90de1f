"""Which columns mattered for the judgement of a row."""

from __future__ import annotations

import numpy as np

from logitclip.data._columns import Column, Dates, TextColumn, take
from logitclip.own_data.issues import Issues
from logitclip.own_data.kind import Source
from logitclip.own_data.model import Model
from logitclip.own_data.tables import COLUMNS_SHOWN, Table, Texts

LEAST_EXPLAINED = 60  # rows that are explained at least
MOST_EXPLAINED = 600  # rows times columns that are explained at most, beyond the first rows
CANDIDATES = 20  # columns that are tried; of more, those that say most about the label by themselves
NUMBER_BINS = 10


def columns_that_mattered(model: Model, source: Source, issues: Issues) -> dict[int, list[str]]:
    """Return the columns that mattered most for suspicious rows, the most important first.

    A column matters for a row if the probability of the given label changes when its value is replaced by a typical
    one: either quartile, or either of the two most frequent categories.

    Returns:
        Position of the row -> names of columns, for the first rows and those marked wrong. Texts, which are shown as a
        whole, have no names; images are not in it.
    """
    kind, marked = source.kind, int(issues.wrong.sum())
    if isinstance(kind, Texts):
        return {int(row): [] for row in issues.ranking[: max(LEAST_EXPLAINED, marked)]}
    if not isinstance(kind, Table):
        return {}
    names = _choose_columns(kind, source.labels)
    rows = issues.ranking[: max(LEAST_EXPLAINED, min(marked, MOST_EXPLAINED // len(names)))]
    # All replacements as one table: the rows as they are, then a copy of them for each typical value.
    copies = [(name, typical) for name in names for typical in _find_typical(kind.columns[name])]
    tall = take(kind.columns, np.tile(rows, 1 + len(copies)))
    for k, (name, typical) in enumerate(copies, start=1):
        _replace_values(tall[name], slice(k * len(rows), (k + 1) * len(rows)), typical)
    found = model.probabilities_of(kind.rows(tall)).reshape(1 + len(copies), len(rows), -1)
    log_p = np.log(np.maximum(found[:, np.arange(len(rows)), source.labels[rows]], 1e-6))
    effects = np.abs(log_p[1:] - log_p[0]).reshape(len(names), -1, len(rows)).sum(1)
    order = np.argsort(-effects, axis=0, kind="stable")[:COLUMNS_SHOWN]
    return {int(row): [names[j] for j in order[:, i]] for i, row in enumerate(rows)}


def _find_typical(column: Column) -> list[float]:
    """Return two typical values: the quartiles, or the codes of the two most frequent categories."""
    if isinstance(column, TextColumn):
        frequent = np.argsort(-np.bincount(column.codes + 1, minlength=2), kind="stable")[:2] - 1
        return frequent.tolist()
    return np.nanquantile(_numbers(column), (0.25, 0.75)).tolist()


def _replace_values(column: Column, where: slice, value: float) -> None:
    if isinstance(column, TextColumn):
        column.codes[where] = int(value)
    else:
        _numbers(column)[where] = value


def _numbers(column: Column) -> np.ndarray:
    values = column.days if isinstance(column, Dates) else column
    assert isinstance(values, np.ndarray)
    return values


def _choose_columns(kind: Table, labels: np.ndarray) -> list[str]:
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
        values = _numbers(column)
        codes = np.searchsorted(np.nanquantile(values, np.linspace(0, 1, NUMBER_BINS + 1)[1:-1]), values)
    table = np.zeros((int(codes.max()) + 1, int(labels.max()) + 1))
    np.add.at(table, (codes, labels), 1)
    return float(table.max(1).sum() / len(labels))
