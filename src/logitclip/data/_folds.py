"""Folds of a table that do not leak: by groups of rows that belong together, and by time."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from logitclip.data._columns import Columns, Dates, TextColumn, Unusable, as_text, date_in_text

Pairs = list[tuple[np.ndarray, np.ndarray]]  # positions to train on, and to predict


def group_folds(groups: np.ndarray, labels: np.ndarray, count: int, seed: int) -> Pairs:
    """Divide rows into `count` folds such that no group is in two of them, and the classes are alike.

    Args:
        groups: The group of each row, int64 [N].
        labels: The class of each row, int64 [N].
        count: Number of folds.
        seed: Seed of the division.

    Raises:
        ValueError: If there are fewer groups than folds.

    >>> [test.tolist() for _, test in group_folds(np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1]), 2, seed=0)]
    [[2, 3], [0, 1]]
    """
    from sklearn.model_selection import StratifiedGroupKFold

    distinct = len(np.unique(groups))
    if distinct < count:
        raise ValueError(f"There must be at least {count} groups, got {distinct}.")
    folds = StratifiedGroupKFold(count, shuffle=True, random_state=seed)
    return list(folds.split(labels, labels, groups))


def time_folds(times: np.ndarray, count: int) -> Pairs:
    """Cut rows into `count` + 1 periods; each but the first is predicted from the earlier ones, the last comes last.

    Args:
        times: The time of each row, [N]; equal times stay together.
        count: Number of folds.

    Raises:
        ValueError: If there are no more different times than folds.

    >>> [(train.tolist(), test.tolist()) for train, test in time_folds(np.array([3.0, 1.0, 2.0]), 2)]
    [([1], [2]), ([1, 2], [0])]
    """
    distinct, place = np.unique(times, return_inverse=True)
    if len(distinct) <= count:
        raise ValueError(f"There must be more than {count} different times, got {len(distinct)}.")
    share = np.bincount(place).cumsum() / len(times)
    period = np.minimum(np.ceil(share * (count + 1) - 1e-9).astype(int) - 1, count)[place]
    period = np.unique(period, return_inverse=True)[1]  # equal times may leave a period empty
    return [(np.flatnonzero(period < k), np.flatnonzero(period == k)) for k in range(1, period.max() + 1)]


def group_numbers(columns: Columns, name: str, path: str | Path) -> np.ndarray:
    """Return the group of each row as a number; a row without a group is a group of its own."""
    text = as_text(_usable_column(columns, name, path, "group"))
    alone = len(text.values) + np.arange(len(text.codes))
    return np.where(text.codes < 0, alone, text.codes)


def time_numbers(columns: Columns, name: str, path: str | Path) -> np.ndarray:
    """Return a number for each row that grows with its time; texts are sorted as texts.

    Raises:
        ValueError: If a time is missing, or if texts are dates that would be sorted wrongly.
    """
    column = _usable_column(columns, name, path, "time")
    if isinstance(column, TextColumn):
        date = date_in_text(column)
        if date is not None and not date[:4].isdigit():
            raise ValueError(f"{path}: the time {name!r} holds {date!r}: write dates as 2026-11-18, so that they sort.")
        order = {value: i for i, value in enumerate(sorted(column.values))}
        times = np.array([*(float(order[value]) for value in column.values), np.nan])[column.codes]
    else:
        times = column.days if isinstance(column, Dates) else column
    if np.isnan(times).any():
        row = int(np.isnan(times).argmax()) + 1
        raise ValueError(f"{path}, row {row}: the time {name!r} is missing; fill it in or remove the row.")
    return times


def _usable_column(columns: Columns, name: str, path: str | Path, what: str) -> np.ndarray | TextColumn | Dates:
    column = columns[name]
    if isinstance(column, Unusable):
        raise ValueError(f"{path}: the {what} {name!r} {column.reason}.")
    return column
