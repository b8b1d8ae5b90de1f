"""Tables of numbers, categories, dates and free text: one row per example."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from logitclip.data._columns import Column, Columns, from_frame, read_table, read_table_parts, row_count, value_text
from logitclip.data._preprocessing import Preprocessor
from logitclip.own_data.facts import Facts
from logitclip.own_data.kind import ENCODER_HINT, Kind, NewRows, Read, RowNumbers, Rows
from logitclip.text import quote_some

if TYPE_CHECKING:
    import pandas as pd

    from logitclip.own_data.kind import Data, Labels

log = logging.getLogger(__name__)

PREPROCESSING = "preprocessing.skops"
COLUMNS_SHOWN = 4  # columns of a row that people see


@dataclass(frozen=True, eq=False)
class Table(Kind):
    """A csv, tsv, parquet or npz file, or a data frame."""

    name: ClassVar[str] = "table"
    label: str | None
    preprocessor: Preprocessor
    columns: Columns = field(default_factory=dict)  # of the training rows

    @classmethod
    def fit(cls, columns: Columns, label: str, text: Sequence[str]) -> Table:
        """Learn the preprocessing from the columns of the training rows."""
        return cls(label, Preprocessor.fit(columns, text), columns)

    @classmethod
    def restore(cls, facts: Facts, read: Read) -> Table:
        return cls(facts["label"], Preprocessor.from_bytes(read(PREPROCESSING)))

    def contents(self) -> dict[str, bytes]:
        return {PREPROCESSING: self.preprocessor.to_bytes()}

    @property
    def text_columns(self) -> set[str]:
        return self.preprocessor.text_columns

    def read(self, data: Data, columns: Columns | None = None) -> Rows | NewRows:
        columns = read_columns(data, self.text_columns) if columns is None else columns
        return self._read_part(columns, 0, set())

    def read_parts(self, data: Data) -> Iterator[Rows | NewRows]:
        if not isinstance(data, str | os.PathLike):
            yield self.read(data)
            return
        start, warned = 0, set[str]()
        for columns in read_table_parts(os.fspath(data), {*self.used}, text=self.text_columns):
            yield self._read_part(columns, start, warned)
            start += row_count(columns)

    def _read_part(self, columns: Columns, start: int, warned: set[str]) -> Rows | NewRows:
        """Return rows from the number `start` on, and name unknown values of the columns that are not yet `warned`."""
        rows = self.rows(columns, start + np.arange(row_count(columns)))
        for name, new in self.preprocessor.unknown(columns).items():
            if name not in warned:
                log.warning(
                    "column %r has values that the model does not know: %s; they count as rare ones",
                    name,
                    quote_some(new),
                )
                warned.add(name)
        return rows

    def rows(self, columns: Columns, numbers: np.ndarray | None = None) -> Rows:
        """Return the rows of some columns; `numbers` are their positions in the file, if they are not all of them."""
        features = self.preprocessor.transform(columns)
        names = RowNumbers(np.arange(row_count(columns)) if numbers is None else numbers)
        return Rows(names, features.numpy(), features)

    def network(self, rows: int) -> dict[str, str | float]:
        return {
            "model": "mlp:width=128,depth=2",
            "lr": 0.1,
            "weight_decay": 1e-4,
            "batch_size": 128 if rows < 100_000 else 1024,
            "epochs": 20,
            "augment": "none",
        }

    def describe(self, rows: Rows) -> str:
        return f"{rows.features.shape[1]} features"

    def show(self, i: int, names: Sequence[str] = ()) -> str:
        values = {name: value_text(self.columns[name], i) for name in names or self.shown_columns}
        return next(iter(values.values())) if len(values) == 1 else ", ".join(f"{k} {v}" for k, v in values.items())

    def content(self, i: int) -> list[tuple[str, str]]:
        texts = [name for name, what in self.used.items() if what == "text"]
        names = (*texts, *(name for name in self.columns if name not in texts))
        return [(name, value_text(self.columns[name], i, digits=15)) for name in names]

    @property
    def used(self) -> Mapping[str, str]:
        """The columns that are features, and what they are."""
        return self.preprocessor.kinds

    @property
    def dropped(self) -> Mapping[str, str]:
        """The columns that are no features, and why."""
        return self.preprocessor.dropped

    @property
    def shown_columns(self) -> list[str]:
        """The columns of a row that people see."""
        return list(self.preprocessor.kinds)[:COLUMNS_SHOWN]


@dataclass(frozen=True, eq=False)
class Texts(Table):
    """A table with free text: TF-IDF features, a flatter network, and the text itself to show."""

    name: ClassVar[str] = "text"
    hint: ClassVar[str] = ENCODER_HINT

    def network(self, rows: int) -> dict[str, str | float]:
        return {**super().network(rows), "model": "mlp:width=256,depth=1"}

    @property
    def shown_columns(self) -> list[str]:
        return [name for name, kind in self.preprocessor.kinds.items() if kind == "text"]


def read_columns(data: Data, text: Collection[str] = ()) -> dict[str, Column]:
    """Read a file, or convert a data frame or an array [N, D]; see `as_frame`."""
    if isinstance(data, str | os.PathLike):
        return read_table(os.fspath(data), text=text)
    return from_frame(as_frame(data))


def as_frame(data: object) -> pd.DataFrame:
    """Return data as a pandas data frame, its columns named by text.

    Args:
        data: A data frame of pandas, or of another library that exports Arrow data, such as polars; or an array [N, D],
            whose columns are called x0, x1, ...

    Raises:
        ValueError: If it is something else.
    """
    import pandas as pd

    if isinstance(data, pd.DataFrame):
        return data.set_axis([str(name).strip() for name in data.columns], axis=1)
    if hasattr(data, "__arrow_c_stream__") and hasattr(data, "columns"):
        import pyarrow as pa

        return as_frame(pa.table(data).to_pandas())
    array = np.asarray(data)
    if array.ndim != 2 or array.dtype.kind not in "biufO":
        found = type(data).__name__ if array.ndim != 2 else f"an array of {array.dtype}"
        remedy = ": make it dense with toarray()" if hasattr(data, "toarray") else ""
        raise ValueError(f"data must be a file, a folder, a data frame or an array [N, D], got {found}{remedy}.")
    return pd.DataFrame(array, columns=[f"x{i}" for i in range(array.shape[1])]).infer_objects()


def with_labels(data: object, label: Labels) -> tuple[pd.DataFrame, str]:
    """Return a data frame with the labels in it, and the name of their column.

    Args:
        data: A data frame or an array; see `as_frame`.
        label: The name of a column, or labels [N].

    Raises:
        ValueError: If there is not one label for each row, or a column has the name of the labels.
    """
    frame = as_frame(data)
    if label is None:
        raise ValueError(f"Which column is the label? There are {', '.join(frame.columns[:20])}.")
    if np.ndim(label) == 0:
        return frame, str(label)
    values, name = as_series(label), str(getattr(label, "name", None) or "label")
    if len(values) != len(frame):
        raise ValueError(f"The data must have a label for each of {len(frame)} rows, got {len(values)}.")
    if name in frame:
        raise ValueError(f"The data has a column {name!r} already: give the labels another name, or name that column.")
    return frame.assign(**{name: values.array}), name


def as_series(labels: object) -> pd.Series:
    """Return labels as a pandas series.

    Raises:
        ValueError: If they are not an array [N].
    """
    import pandas as pd

    if isinstance(labels, pd.Series):
        return labels
    values = np.asarray(labels)
    if values.ndim != 1:
        raise ValueError(f"Labels must be an array [N], got one of shape {values.shape}.")
    return pd.Series(values)
