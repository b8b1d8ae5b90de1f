"""Rows with labels beside those that `fit` learns from: `val` to choose by, `test` to measure the accuracy on."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from logitclip.data._columns import TextColumn, as_text, from_numpy, is_numeric_text
from logitclip.data.table import column_text
from logitclip.own_data.kind import Kind, Rows
from logitclip.own_data.tables import read_columns
from logitclip.registry import suggest


@dataclass(frozen=True, eq=False)
class Labelled:
    """Rows with their labels.

    Attributes:
        rows: The rows that have a label.
        labels: Positions in the classes of the training data, int64 [N]; -1 for another class.
    """

    rows: Rows
    labels: np.ndarray

    @property
    def digest(self) -> str:
        """A digest of features and labels."""
        content = np.ascontiguousarray(self.rows.features).tobytes() + self.labels.tobytes()
        return hashlib.sha256(content).hexdigest()


def read_labelled(data: Any, kind: Kind, classes: Sequence[str], what: str) -> Labelled:
    """Read rows with labels, of the same kind as the training data.

    Args:
        data: A file or data frame with the label column, a folder with one folder of images per class, or a pair of
            rows and labels.
        kind: How the training data was read.
        classes: Its classes.
        what: Val or test, for messages; `val` may hold no other class.

    Raises:
        ValueError: If there are no labels, or one of `val` is no class of the training data.
    """
    rows: Any
    if isinstance(data, tuple):
        rows, labels = kind.read(data[0]), _as_text(data[1])
    elif isinstance(data, str | os.PathLike) and Path(data).is_dir():
        rows = kind.read(data)
        labels = _as_text(np.array([PurePath(name).parts[0] for name in rows.names]))
    else:
        label = str(kind.label)
        columns = read_columns(data, {label})
        if label not in columns:
            raise ValueError(f"The {what} data has no column {label!r}. {suggest(label, columns)}")
        rows, labels = kind.read(data), column_text(columns, label, f"the {what} data")
    if len(labels.codes) != len(rows):
        raise ValueError(f"The {what} data must have a label for each of {len(rows)} rows, got {len(labels.codes)}.")
    known = np.flatnonzero(labels.codes >= 0)
    if not len(known):
        raise ValueError(f"The {what} data has no labels.")
    place = {name: i for i, name in enumerate(classes)}
    positions = np.array([place.get(value, -1) for value in match_classes(labels.values, classes)])[labels.codes[known]]
    if what == "val" and (positions < 0).any():
        other = labels.values[labels.codes[known][(positions < 0).argmax()]]
        raise ValueError(f"The val data: {other!r} is not a class of the training data. {suggest(other, classes)}")
    return Labelled(rows.take(known), positions)


def match_classes(labels: Sequence[str], classes: Sequence[str]) -> list[str]:
    """Return labels as the classes are written: a table with another type of numbers has 0.0 for 0, or True for 1.

    >>> match_classes(["0.0", "1", "2", "ant"], ["0", "1.0"])
    ['0', '1.0', '2', 'ant']
    """
    names: dict[float | None, str] = {number: name for name in classes if (number := _as_number(name)) is not None}
    if len(names) < len(classes):  # some are words, or two of them are the same number
        return list(labels)
    return [label if label in classes else names.get(_as_number(label), label) for label in labels]


def _as_number(label: str) -> float | None:
    if label.lower() in ("false", "true"):
        return float(label.lower() == "true")
    return float(label) if is_numeric_text(label) else None


def _as_text(labels: Any) -> TextColumn:
    values = np.asarray(labels)
    if values.dtype.kind in "biuf":
        return as_text(values.astype(np.float64))
    column = from_numpy(values.astype(str))
    assert isinstance(column, TextColumn)
    return column
