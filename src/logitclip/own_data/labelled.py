"""Rows with labels beside those that `fit` learns from: `val` to choose by, `test` to measure the accuracy on."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

import numpy as np

from logitclip.data._columns import from_frame, from_numpy, is_numeric_text
from logitclip.data.table import column_text
from logitclip.own_data.kind import Kind, Rows
from logitclip.own_data.tables import as_series, read_columns
from logitclip.registry import suggest

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import ArrayLike

    from logitclip.own_data.kind import Data


@dataclass(frozen=True, eq=False)
class Labelled:
    """Rows with their labels."""

    rows: Rows  # those that have a label
    labels: np.ndarray  # positions in the classes of the training data, int64 [N]; -1 for another class

    @property
    def digest(self) -> str:
        """A digest of features and labels."""
        content = np.ascontiguousarray(self.rows.features).tobytes() + self.labels.tobytes()
        return hashlib.sha256(content).hexdigest()


def read_labelled(data: Data | tuple[Data, ArrayLike], kind: Kind, classes: Sequence[str], what: str) -> Labelled:
    """Read rows with labels, of the same kind as the training data.

    Args:
        data: A file or data frame with the label column, a folder with one folder of images per class, or a pair of
            rows and labels.
        kind: How the training data was read.
        classes: Its classes.
        what: The name of the data, for messages: val or test. `val` may hold no other class.

    Raises:
        ValueError: If there are no labels, one of `val` is no class of the training data, or no image can be read.
    """
    label = str(kind.label)
    if isinstance(data, tuple):
        rows, columns = kind.read_beside(data[0], None), from_frame(as_series(data[1]).to_frame(label))
    elif isinstance(data, str | os.PathLike) and Path(data).is_dir():
        rows = kind.read_beside(data, None)
        columns = {label: from_numpy(np.array([PurePath(name).parts[0] for name in rows.names]))}
    else:
        columns = read_columns(data, {label, *kind.text_columns})
        rows = kind.read_beside(data, columns)
    if label not in columns:
        raise ValueError(f"The {what} data has no column {label!r}. {suggest(label, columns)}")
    labels = column_text(columns, label, f"the {what} data")
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
    rows = rows.take(known)
    if np.isnan(rows.features).any(1).all():
        raise ValueError(f"None of the {what} images can be read.")
    return Labelled(rows, positions)


class Agreement:
    """The share of predictions that agree with given labels, counted part by part.

    Args:
        labels: The given labels as text, None where there is none, [N]; or why they cannot be read.
        values: The classes as they are predicted.
        classes: The same as text.
        column: The label column; None for folders of images.
    """

    def __init__(
        self, labels: np.ndarray | ValueError, values: list[object], classes: list[str], column: str | None
    ) -> None:
        self.labels, self.classes, self.column = labels, classes, column
        self.names = dict(zip(values, classes, strict=True))
        self.done, self.right, self.counts = 0, 0, Counter[str]()

    def add(self, predicted: pd.DataFrame) -> None:
        """Count the next predictions, a data frame as `predict` returns it."""
        if isinstance(self.labels, ValueError) or not len(self.labels):
            return
        given = self.labels[self.done : self.done + len(predicted)]
        self.done += len(predicted)
        if len(given) < len(predicted):  # the file has changed: `sentence` says it
            return
        said = predicted["class"].map(self.names.get, na_action="ignore")
        rows = said.to_frame("said").assign(given=given).dropna()
        distinct = rows["given"].unique().tolist()
        name_of = dict(zip(distinct, match_classes(distinct, self.classes), strict=True))
        labels = np.array([name_of[label] for label in rows["given"]], dtype=object)
        self.right += int((labels == rows["said"].to_numpy(object)).sum())
        self.counts.update(labels)

    def sentence(self) -> str | None:
        """Return the share of rows with label and prediction that agree, and how to read it; None without labels."""
        place = "class folders" if self.column is None else f"column {self.column!r}"
        if isinstance(self.labels, ValueError):
            return f"They cannot be compared with the {place}: {self.labels}"
        if len(self.labels) not in (0, self.done):
            counts = f"there are {len(self.labels):,} labels for {self.done:,} rows"
            return f"They cannot be compared with the {place}: {counts}."
        if not self.counts:
            return None
        new = sorted({*self.counts} - {*self.classes})
        are = "classes are" if len(new) > 1 else "class is"
        unknown = f" {len(new)} {are} new to the model and counted as wrong: {', '.join(new[:3])}." if new else ""
        return (
            f"{self.right / self.counts.total():.1%} agree with the {place}. If 20% of these labels are wrong, even "
            f"the true classes agree with only about 80%.{unknown}"
        )


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
