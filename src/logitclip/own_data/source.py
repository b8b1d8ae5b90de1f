"""Inspect the user's data: rows, classes, features, and the dataset spec that describes it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from logitclip.data import DATASETS
from logitclip.data.columns import Column, Columns, Text, Unusable, read_table, row_count
from logitclip.data.folder import train_folder
from logitclip.data.images import IMAGE_SUFFIXES, ImageFiles
from logitclip.data.listings import Listing, collect, list_classes
from logitclip.data.preprocessing import Preprocessor
from logitclip.data.table import image_listing, load_table, require
from logitclip.text import listed

HELD_OUT = 0.1  # share of the rows to validate and calibrate the final model on, with their noisy labels
FEWEST = 10  # rows, so that one is held out
SAMPLE = 500  # number of image files whose size is read
REVIEW_COLUMN = "logitclip_review"  # what `apply` says about a row: never a feature
WORDS = 3  # a column of text with more words on average is probably free text


@dataclass(frozen=True, eq=False)
class Source:
    """Data with a label for every row."""

    path: Path
    kind: str  # "table", "text" or "image"
    knobs: dict[str, Any]  # of the dataset spec
    labels: np.ndarray  # [N] positions in class_names
    class_names: Sequence[str]
    names: Sequence[str]  # [N] row numbers (from 1, without the header) or file names
    features: int  # of a table: how many inputs the network has
    used: dict[str, str]  # column -> number, category, text or image
    left_out: dict[str, str]  # column -> why
    load_seconds: float = 0.0  # measured time of reading and preprocessing
    pixels: int = 0  # of images: the median of the shorter sides
    texts: Sequence[str] | None = None  # [N] what to show of each row

    @property
    def spec(self) -> str:
        """The dataset spec of an ordinary run."""
        knobs = {key: str(value) for key, value in self.knobs.items()}
        spec = DATASETS.format("folder" if self.path.is_dir() else "table", knobs)
        read = DATASETS.parse(spec)[1] if DATASETS.split(spec)[1] == knobs else {}
        lost = [value for key, value in knobs.items() if read.get(key) is None]  # the name none means no name
        if lost:
            raise ValueError(f"The names {lost} cannot be written as a spec: rename the column.")
        return spec

    @property
    def counts(self) -> np.ndarray:
        """The number of rows of each class, [K]."""
        return np.bincount(self.labels, minlength=len(self.class_names))


def look(
    path: str | Path,
    label: str | None = None,
    *,
    text: Sequence[str] = (),
    image: str | None = None,
    drop: Sequence[str] = (),
) -> Source:
    """Look at a table or a folder of class folders.

    Args:
        path: A csv, tsv, parquet or npz file, or a folder with one folder of images per class; of a folder with
            `train/<class>`, the rows are in `train`, and its `test` or `val` is not used.
        label: The label column of a table.
        text: Columns with free text.
        image: A column with image files; detected if its values end in .jpg, .png and so on.
        drop: Columns to leave out.

    Raises:
        ValueError: If the data cannot be used.
    """
    path = Path(os.path.expanduser(path))
    if path.is_dir():
        for name, given in (("label", label), ("text", text), ("image", image), ("drop", drop)):
            if given:
                raise ValueError(f"{path} is a folder, its class folders are the labels: leave out {name}.")
        while (train := train_folder(path)) is not None:  # a run on `path` would test on other rows, those of `test`
            path = train
        listing, classes = list_classes(path)
        return _images(path, {"path": path}, listing, classes, {"image files": "image"}, {})
    if label is None:
        columns = read_table(path)
        raise ValueError(f"Which column of {path} is the label? It has {listed(columns)}.")
    image, drop = _checked(path, label, text, image, drop)
    if image is not None:
        listing, classes = image_listing(path, label, image)
        others = [name for name in read_table(path) if name not in (label, image)]
        left_out = dict.fromkeys(others, "is not used beside images")
        return _images(
            path, {"path": path, "label": label, "image": image}, listing, classes, {image: "image"}, left_out
        )
    return _table(path, label, text, drop)


def _table(path: Path, label: str, text: Sequence[str], drop: Sequence[str]) -> Source:
    Preprocessor.fit({"": np.arange(2.0)})  # imports scikit-learn, which only the first of all loads has to wait for
    started = time.perf_counter()
    dataset, preprocessor = load_table(path, label, drop=drop, text=text, test=HELD_OUT)
    load_seconds = time.perf_counter() - started
    rows = torch.cat([split.rows for split in (dataset.train, dataset.test) if split.rows is not None])
    labels = torch.cat([dataset.train.labels, dataset.test.labels])[rows.argsort()].numpy()
    knobs: dict[str, Any] = {"path": path, "label": label}
    knobs |= {"drop": ",".join(drop)} if drop else {}
    knobs |= {"text": ",".join(text)} if text else {}
    left_out = {**dict.fromkeys(drop, "you left it out"), **preprocessor.dropped}
    columns = read_table(path, text=text)
    for name, column in columns.items():
        if name in preprocessor.dropped and isinstance(column, Text) and _words(column) >= WORDS:
            left_out[name] += f"; to use its words, give --text {name}"
    return Source(
        path=path,
        kind="text" if text else "table",
        knobs=knobs,
        labels=labels,
        class_names=dataset.class_names,
        names=_RowNumbers(len(labels)),
        features=int(dataset.train.x[torch.tensor([0])].shape[1]),
        used=dict(preprocessor.kinds),
        left_out=left_out,
        load_seconds=load_seconds,
        texts=_Shown({name: columns[name] for name in text or list(preprocessor.kinds)[:4]}),
    )


def _images(
    path: Path,
    knobs: dict[str, Any],
    listing: Listing,
    classes: Sequence[str],
    used: dict[str, str],
    left_out: dict[str, str],
) -> Source:
    names, labels = collect(listing, classes)
    check_names(names)
    _require_rows(len(names), path)
    if len(classes) < 2:
        raise ValueError(f"{path} holds {len(classes)} classes; at least two are needed.")
    files = ImageFiles(listing.folder, names)
    sample = torch.linspace(0, len(names) - 1, min(SAMPLE, len(names))).round().long().unique()
    sides = files.sizes(sample).amin(1)
    if not (sides > 0).any():
        raise ValueError(f"None of the image files in {path} can be opened; are they images?")
    return Source(
        path=path,
        kind="image",
        knobs=knobs,
        labels=labels.numpy(),
        class_names=tuple(classes),
        names=names,
        features=0,
        used=used,
        left_out=left_out,
        pixels=int(sides[sides > 0].median()),
    )


def check_names(names: Sequence[str]) -> None:
    """Raise a ValueError if a file name cannot be written to issues.csv or predictions, which are UTF-8."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            shown = os.fsencode(name).decode("utf-8", "backslashreplace")
            raise ValueError(f"The file name {shown} is not UTF-8: rename the file.") from None


def _require_rows(count: int, path: Path) -> None:
    if count < FEWEST:
        raise ValueError(f"{path} has {count} rows; at least {FEWEST} are needed.")


def _checked(
    path: Path, label: str, text: Sequence[str], image: str | None, drop: Sequence[str]
) -> tuple[str | None, Sequence[str]]:
    """Check rows and named columns of a table; return the column with image files, if any, and those to leave out."""
    if image is not None and text:
        raise ValueError("Give either image or text: beside images no other column is used.")
    columns = read_table(path, text=(label,))
    for name in (label, *text, *drop):
        require(columns, name, path)
    for name in (*text, *drop):
        if not name or "," in name:
            raise ValueError(f"The column name {name!r} is empty or has a comma, so no list can hold it: rename it.")
    _require_rows(row_count(columns), path)
    if REVIEW_COLUMN in columns and REVIEW_COLUMN not in drop:
        drop = (*drop, REVIEW_COLUMN)
    if image is not None or text:
        return image, drop
    for name, column in columns.items():
        if name in (label, *drop) or not isinstance(column, Text) or not column.values:
            continue
        if all(value.lower().endswith(IMAGE_SUFFIXES) for value in column.values[:1000]):
            return name, drop
    return None, drop


def _words(column: Text) -> float:
    return float(np.mean([len(value.split()) for value in column.values[:1000]])) if column.values else 0.0


class _RowNumbers(Sequence[str]):
    """Row numbers from 1, as text, without a list of a million strings."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, i: Any) -> Any:
        return str(range(1, self.rows + 1)[i])


class _Shown(Sequence[str]):
    """The values of some columns, row by row, for people to read."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return row_count(self.columns)

    def __getitem__(self, i: Any) -> Any:
        values = {name: _value(column, i) for name, column in self.columns.items()}
        return next(iter(values.values())) if len(values) == 1 else ", ".join(f"{k} {v}" for k, v in values.items())


def _value(column: Column, i: int) -> str:
    if isinstance(column, Text):
        return "" if column.codes[i] < 0 else column.values[column.codes[i]]
    return "" if isinstance(column, Unusable) else f"{column[i]:g}"
