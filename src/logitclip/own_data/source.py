"""Look at somebody's data: which kind it is, its rows, labels and columns."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from logitclip.data._columns import Columns, TextColumn, row_count, take
from logitclip.data._folds import group_numbers, time_numbers
from logitclip.data._images import IMAGE_SUFFIXES
from logitclip.data._listings import Listing, collect, list_classes
from logitclip.data.folder import train_folder
from logitclip.data.table import class_names, column_text, image_listing, require_column
from logitclip.own_data.encoded import EncodedImages, EncodedTexts, Encoding
from logitclip.own_data.facts import Facts
from logitclip.own_data.images import Images
from logitclip.own_data.kind import Kind, Rows, Source, require_rows
from logitclip.own_data.tables import Table, Texts, read_columns, with_labels
from logitclip.text import join_names

if TYPE_CHECKING:
    import pandas as pd

    from logitclip.own_data.kind import Data, Labels

KINDS: dict[str, type[Kind]] = {kind.name: kind for kind in (Table, Texts, Images)}
ENCODED: dict[str, type[Kind]] = {kind.name: kind for kind in (EncodedTexts, EncodedImages)}
FRAME = Path("the data frame")
REVIEW_COLUMN = "logitclip_review"  # what `apply` says about a row: never a feature
KEPT, CORRECTED = "kept", "corrected from "  # what it says of a label that a person has checked
LABEL_TYPES = {"i": "int", "u": "int", "f": "float", "b": "bool"}  # by the kind of a NumPy type


@dataclass(frozen=True)
class Options:
    """The columns of a table that mean something, and the folder of image files; see `fit`."""

    text: Sequence[str] = ()
    image: str | None = None
    drop: Sequence[str] = ()
    weight: str | None = None
    group: str | None = None
    time: str | None = None
    folder: str | None = None

    @property
    def special(self) -> list[str]:
        """The columns that are no features, without those to leave out."""
        return [name for name in (self.weight, self.group, self.time) if name is not None]


def look(
    data: Data,
    label: Labels = None,
    options: Options | None = None,
    *,
    decode: bool = True,
    encoding: Encoding | None = None,
) -> Source:
    """Read data and labels.

    Args:
        data: A csv, tsv, parquet or npz file, a folder with one folder of images per class, a data frame (of pandas,
            polars or pyarrow), or an array [N, D]. Of a folder with `train/<class>`, the rows are in `train`; its
            `test` or `val` is not used.
        label: The label column of a table, or an array of labels [N].
        options: The columns that mean something else than a feature.
        decode: Decode images now, and skip those that cannot be read.
        encoding: The encoder that turns images or texts into features.

    Raises:
        ValueError: If the data cannot be used.
    """
    options = options or Options()
    if isinstance(data, str | os.PathLike):
        path = Path(os.path.expanduser(data))
        if path.is_dir():
            return _look_at_folder(path, label, options, decode, encoding)
        if not isinstance(label, str):
            columns = read_columns(path)
            raise ValueError(f"Which column of {path} is the label? It has {join_names(columns)}.")
        columns, label_type = read_columns(path, {label, *options.text, *filter(None, [options.group])}), "text"
    else:
        path = FRAME
        frame, label = with_labels(data, label)
        columns, label_type = read_columns(frame), _label_type(frame, label)
    if REVIEW_COLUMN in columns and REVIEW_COLUMN not in options.drop:
        options = replace(options, drop=(*options.drop, REVIEW_COLUMN))
    _check_columns(columns, path, label, options)
    image = options.image or find_image_column(columns, label, options)
    if image is not None:
        options = replace(options, image=image)
        return _look_at_files(columns, path, label, options, label_type, decode, encoding)
    return _look_at_table(columns, path, label, options, label_type, encoding)


def look_again(facts: Facts, data: str | Path | None = None) -> Source:
    """Read the data that a model was fitted on.

    Args:
        facts: The content of model.json.
        data: The data, if it is no longer where the model was fitted on it.

    Raises:
        ValueError: If the data is not there, or cannot be used any more.
    """
    source = facts.get("source")
    if not isinstance(source, dict) or not isinstance(source.get("options"), dict):
        raise ValueError("The model was fitted by an older version, which does not say on which data: fit it again.")
    path = Path(source["path"] if data is None else data)
    if not path.exists():
        raise ValueError(f"The data of the model, {path}, is not there: name it with --data.")
    if path.is_dir() and facts["kind"] != Images.name:
        raise ValueError(f"{path} is a folder, and the model was fitted on a table: name that with --data.")
    if path.is_dir():  # also if the model was fitted on a corrected list of its files
        return look(path, decode=False)
    return look(path, facts["label"], Options(**source["options"]), decode=False)


def _label_type(frame: pd.DataFrame, label: str) -> str:
    """Return the type of the labels of a data frame: "int", "float", "bool" or "text"."""
    if label not in frame:
        return "text"
    dtype = frame[label].dtype
    return LABEL_TYPES.get(getattr(dtype, "categories", frame[label]).dtype.kind, "text")


def _look_at_folder(path: Path, label: Labels, options: Options, decode: bool, encoding: Encoding | None) -> Source:
    for name, value in {"label": label, **vars(options)}.items():
        if value is not None and len(value):
            raise ValueError(f"{path} is a folder, its class folders are the labels: leave out {name}.")
    while (train := train_folder(path)) is not None:
        path = train
    listing, classes = list_classes(path)
    kind, rows, labels, _ = _read_images(listing, classes, (None, None), decode, encoding)
    return Source(path, kind, rows, labels, tuple(classes), {"image files": "image"}, {})


def _look_at_files(
    columns: Columns, path: Path, label: str, options: Options, label_type: str, decode: bool, encoding: Encoding | None
) -> Source:
    image = str(options.image)
    folder = Path(os.path.expanduser(options.folder)) if options.folder else Path() if path is FRAME else path.parent
    listing = image_listing(columns, path, folder, label, image)
    classes = class_names([columns[label]], label, path)
    unused = {name: "is not used beside images" for name in columns if name not in (label, image, *options.special)}
    kind, rows, labels, kept = _read_images(listing, classes, (label, image), decode, encoding)
    reviewed = _find_reviewed(columns, kept)
    return Source(
        path=path,
        kind=kind,
        rows=rows,
        labels=labels,
        class_names=tuple(classes),
        used={image: "image"},
        left_out=unused | _about_review(reviewed),
        label_type=label_type,
        reviewed=reviewed,
        **_read_special(columns, options, path, kept, labels),
    )


def _read_images(
    listing: Listing,
    classes: Sequence[str],
    columns: tuple[str | None, str | None],
    decode: bool,
    encoding: Encoding | None,
) -> tuple[Images, Rows, np.ndarray, np.ndarray]:
    """Return the kind, rows and labels of the images that can be read, and their positions in the listing.

    The columns of a table are those of the label and of the image files.
    """
    names, labels = collect(listing, classes)
    require_rows(len(names), listing.source)
    if len(classes) < 2:
        raise ValueError(f"{listing.source} holds {len(classes)} classes; at least two are needed.")
    kind = Images.look(listing.folder, names, *columns)
    if encoding is not None:
        kind, rows, kept = EncodedImages.encode(kind, encoding)
    else:
        rows, kept = kind.load(decode=decode)
        kind = kind.keep(kept)
    return kind, replace(rows, names=_number_twins(rows.names)), labels.numpy()[kept], kept


def _number_twins(names: Sequence[str]) -> list[str]:
    """Return names of rows that differ: an image file may be in several lines of a table.

    >>> _number_twins(["a.png", "b.png", "a.png"])
    ['a.png', 'b.png', 'a.png (2)']
    """
    seen = Counter[str]()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return found


def _look_at_table(
    columns: Columns, path: Path, label: str, options: Options, label_type: str, encoding: Encoding | None
) -> Source:
    classes = class_names([columns[label]], label, path)
    given, place = column_text(columns, label, path), {value: i for i, value in enumerate(classes)}
    labels = np.array([*(place[value] for value in given.values), -1])[given.codes]  # -1 where there is none
    aside = (label, *options.drop, *options.special)
    features = {name: column for name, column in columns.items() if name not in aside}
    known = np.flatnonzero(labels >= 0)
    require_rows(len(known), path)
    inner = features if len(known) == len(labels) else take(features, known)
    if encoding is None:
        kind = (Texts if options.text else Table).fit(inner, label, options.text)
    elif options.text:
        kind = EncodedTexts.encode(inner, label, options.text, encoding)
    else:
        raise ValueError(
            f"An encoder takes images or texts: name the columns of {path} with free text, or leave it out."
        )
    unknown, reviewed = np.flatnonzero(labels < 0), _find_reviewed(columns, known)
    return Source(
        path=path,
        kind=kind,
        rows=kind.rows(inner, known),
        labels=labels[known],
        class_names=tuple(classes),
        used=dict(kind.used),
        left_out={**dict.fromkeys(options.drop, "as you asked"), **kind.dropped, **_about_review(reviewed)},
        label_type=label_type,
        unlabelled=kind.rows(take(features, unknown), unknown) if len(unknown) else None,
        reviewed=reviewed,
        **_read_special(columns, options, path, known, labels[known]),
    )


def _about_review(reviewed: np.ndarray | None) -> dict[str, str]:
    """Say in the plan what is done with the column that `apply` writes."""
    if reviewed is None:
        return {}
    return {REVIEW_COLUMN: f"says which {reviewed.sum():,} labels a person has checked: they count as true"}


def _find_reviewed(columns: Columns, rows: np.ndarray) -> np.ndarray | None:
    """Return which labels a person has confirmed or corrected, by the column that `apply` writes."""
    column = columns.get(REVIEW_COLUMN)
    if not isinstance(column, TextColumn):
        return None
    checked = [value == KEPT or value.startswith(CORRECTED) for value in column.values]
    return np.array([*checked, False])[column.codes][rows]


def _read_special(
    columns: Columns, options: Options, path: Path, rows: np.ndarray, labels: np.ndarray
) -> dict[str, Any]:
    """Return weights, groups and times of some rows with these labels, as far as the options name columns for them."""
    found = {}
    if options.weight is not None:
        found["weight"] = _read_weights(columns, options.weight, path, rows, labels)
    if options.group is not None:
        found["groups"] = group_numbers(columns, options.group, path)[rows]
    if options.time is not None:
        found["times"] = time_numbers(columns, options.time, path)[rows]
    return found


def _read_weights(columns: Columns, name: str, path: Path, rows: np.ndarray, labels: np.ndarray) -> np.ndarray:
    column = columns[name]
    if not isinstance(column, np.ndarray) or not np.isfinite(column[rows]).all() or (column[rows] < 0).any():
        raise ValueError(f"{path}: the weights {name!r} must be numbers that are at least 0, one in every row.")
    if len(np.unique(labels[column[rows] > 0])) < 2:
        raise ValueError(f"{path}: the weights {name!r} must be above 0 in rows of at least two classes.")
    return column[rows] / column[rows].mean()


def _check_columns(columns: Columns, path: Path, label: str, options: Options) -> None:
    """Raise a ValueError if a column that is named is missing or has two meanings."""
    if options.image is not None and options.text:
        raise ValueError("Give either image or text: beside images no other column is used.")
    if options.group is not None and options.time is not None:
        raise ValueError("Give either group or time: rows are divided by one of them.")
    named = [label, *options.text, *options.drop, *options.special]
    for name in named:
        require_column(columns, name, path)
    twice = [name for name in named if named.count(name) > 1]
    if twice:
        raise ValueError(f"The column {twice[0]!r} is named for two things: name it once.")
    require_rows(row_count(columns), path)


def find_image_column(columns: Columns, label: str, options: Options) -> str | None:
    """Return the column whose values are names of image files, if there is one."""
    if options.text:
        return None
    for name, column in columns.items():
        if name in (label, *options.drop) or not isinstance(column, TextColumn) or not column.values:
            continue
        if all(value.lower().endswith(IMAGE_SUFFIXES) for value in column.values[:1000]):
            return name
    return None
