"""What every kind of own data has: rows with labels, and how to read new rows.

A kind is a class, named in `source.KINDS`: `Table`, `Texts` and `Images`. With an encoder there are two more, in
`source.ENCODED`.
"""

from __future__ import annotations

import importlib.util
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from logitclip.data._columns import Columns
from logitclip.data._images import ImageFiles
from logitclip.encoders.features import Inputs, select_inputs
from logitclip.own_data.facts import Facts

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import ArrayLike

    Data = str | os.PathLike[str] | pd.DataFrame | np.ndarray  # what a kind reads
    Labels = str | ArrayLike | None  # the label column, or a label for each row

ENCODER_HINT = (
    "This starts from nothing. A pretrained encoder starts from what others have learnt, often far more accurate: "
    + ("" if importlib.util.find_spec("transformers") else "pip install 'logitclip[encoders]' and ")
    + "add --encoder auto --download."
)
FEWEST = 10  # rows, so that each fold has two
Read = Callable[[str], bytes]  # from the name of a file in the model folder to its content, checked
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows as the learners see them."""

    names: Sequence[str]  # row numbers (from 1, without the header) or file names, [N]
    features: np.ndarray  # standardised, float32 [N, D]
    inputs: Tensor | ImageFiles  # what the network sees: the features, or images

    def __len__(self) -> int:
        return len(self.features)

    def take(self, index: np.ndarray) -> Rows:
        """Return some of the rows; `index` are positions or a mask."""
        index = np.flatnonzero(index) if index.dtype == bool else index
        where, features = torch.from_numpy(index), self.features[index]
        names = self.names
        names = names.take(index) if isinstance(names, RowNumbers) else [names[i] for i in index.tolist()]
        if not isinstance(self.inputs, Tensor):
            inputs = self.inputs.select(where)
        elif self.inputs.data_ptr() == self.features.ctypes.data and self.inputs.shape == self.features.shape:
            inputs = torch.from_numpy(features)  # one array, so it is copied once
        else:
            inputs = self.inputs[where]
        return replace(self, names=names, features=features, inputs=inputs)


class NewRows:
    """Rows to predict, which are encoded when they are taken, so that a million need no more memory than a few."""

    def __init__(
        self,
        names: Sequence[str],
        inputs: Inputs,
        encode: Callable[[Inputs], np.ndarray],
        finish: Callable[[np.ndarray, np.ndarray], Rows],
    ) -> None:
        self.names, self.inputs, self.encode, self.finish = names, inputs, encode, finish

    def __len__(self) -> int:
        return len(self.names)

    def take(self, index: np.ndarray) -> Rows:
        """Encode some of the rows."""
        index = np.flatnonzero(index) if index.dtype == bool else index
        return self.finish(self.encode(select_inputs(self.inputs, torch.from_numpy(index))), index)


class Kind(ABC):
    """One kind of data: how to read it, what a network for it looks like, and how to show a row."""

    name: ClassVar[str]
    label: str | None  # the label column, if there is one
    mean: tuple[float, ...] = ()  # of the channels of images
    std: tuple[float, ...] = ()
    hint: ClassVar[str] = ""  # what `fit` should say about this kind of data
    alike: ClassVar[tuple[str, ...]] = ()  # learners of the final model in equal shares; else held-out labels decide

    @classmethod
    @abstractmethod
    def restore(cls, facts: Facts, read: Read) -> Kind:
        """Return the kind that a model folder describes."""

    def facts(self) -> Facts:
        """Return what model.json must hold for `restore`."""
        return {"kind": self.name, "label": self.label}

    def contents(self) -> dict[str, bytes]:
        """Return the files of the model folder that `restore` reads."""
        return {}

    @property
    def text_columns(self) -> set[str]:
        """The columns of a table that are read as text, whatever their values look like."""
        return set()

    @abstractmethod
    def read(self, data: Data, columns: Columns | None = None) -> Rows | NewRows:
        """Read new rows: a file, a folder or a data frame; `columns` if those of a table have been read."""

    def read_beside(self, data: Data, columns: Columns | None) -> Rows:
        """Read `val` or `test` rows of a fit. What is expensive to compute is kept for the next one."""
        rows = self.read(data, columns)
        assert isinstance(rows, Rows)
        return rows

    def read_parts(self, data: Data) -> Iterator[Rows | NewRows]:
        """Read new rows part by part, in the order of `read`. A kind whose rows need much memory reads them late."""
        yield self.read(data)

    @abstractmethod
    def network(self, rows: int) -> dict[str, str | float]:
        """Return the settings of a network for `rows` rows: model, epochs, lr, batch_size and so on."""

    @abstractmethod
    def describe(self, rows: Rows) -> str:
        """Say what a learner sees of a row, as in "12 features"."""

    def show(self, i: int, names: Sequence[str] = ()) -> str:
        """Return what people should read of training row `i`; of a table, the columns `names`."""
        return ""

    def content(self, i: int) -> list[tuple[str, str]]:
        """Return names and values of all that training row `i` has."""
        return [("row", self.show(i))]

    def content_bytes(self, i: int) -> bytes:
        """Return what training row `i` is known by, wherever it stands: its content without its label."""
        return json.dumps(sorted(self.content(i))).encode()

    def thumbnail(self, i: int) -> str | None:
        """Return training row `i` as a data address, if it is a picture."""
        return None


@dataclass(frozen=True, eq=False)
class Source:
    """Data with labels, read once. What the data has no column for is None."""

    path: Path  # where it comes from, for messages
    kind: Kind
    rows: Rows  # those with a label
    labels: np.ndarray  # positions in `class_names`, int64 [N]
    class_names: Sequence[str]  # sorted, [K]
    used: Mapping[str, str]  # column -> number, category, date, text or image
    left_out: Mapping[str, str]  # column -> why
    label_type: str = "text"  # of the labels in a data frame or an array: int, float, bool or text
    weight: np.ndarray | None = None  # [N]
    groups: np.ndarray | None = None  # as numbers, [N]
    times: np.ndarray | None = None  # [N]
    unlabelled: Rows | None = None  # the rows without a label
    reviewed: np.ndarray | None = None  # whether a person has confirmed or corrected the label of a row, bool [N]

    @property
    def counts(self) -> np.ndarray:
        """The number of rows of each class, [K]."""
        return np.bincount(self.labels, minlength=len(self.class_names))


def require_rows(count: int, path: str | Path) -> None:
    """Raise a ValueError if there are too few rows."""
    if count < FEWEST:
        raise ValueError(f"{path} has {count} {'row' if count == 1 else 'rows'}; at least {FEWEST} are needed.")


def check_names(names: Sequence[str]) -> None:
    """Raise a ValueError if a file name cannot be written to issues.csv or predictions, which are UTF-8."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            shown = os.fsencode(name).decode("utf-8", "backslashreplace")
            raise ValueError(f"The file name {shown} is not UTF-8: rename the file.") from None


class RowNumbers(Sequence[str]):
    """Row numbers from 1, as text, without a list of a million strings."""

    def __init__(self, numbers: np.ndarray) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, i: int) -> str:  # type: ignore[override]
        return str(int(self.numbers[i]) + 1)

    def take(self, index: np.ndarray) -> RowNumbers:
        """Return the row numbers at some positions."""
        return RowNumbers(self.numbers[index])
