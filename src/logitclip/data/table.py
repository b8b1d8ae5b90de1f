"""A table of your own: one row per example, with features, free text or image files, and a label column."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from logitclip.data._columns import (
    Column,
    Columns,
    Dates,
    TextColumn,
    Unusable,
    as_text,
    is_numeric_text,
    read_table,
    take,
)
from logitclip.data._folds import group_folds, group_numbers, time_folds, time_numbers
from logitclip.data._images import ImageFiles, own_image_defaults
from logitclip.data._listings import Listing, image_dataset
from logitclip.data._loading import Part, stratified_split
from logitclip.data._preprocessing import Preprocessor
from logitclip.data._texts import TextInputs
from logitclip.data.dataset import DATASETS, Dataset, Defaults, Split, locate, with_defaults, with_files
from logitclip.registry import suggest
from logitclip.text import split_names

log = logging.getLogger(__name__)


def _defaults(image: str | None, size: int) -> Defaults:
    if image is not None:
        return own_image_defaults(size)
    return {
        "model": "mlp",
        "epochs": 100,
        "batch_size": 128,
        "lr": 0.05,
        "momentum": 0.9,
        "nesterov": True,
        "weight_decay": 1e-4,
        "schedule": "multistep",
        "milestones": (0.5, 0.75),
        "augment": "none",
        "drop_last": False,
    }


def _describe_files(root: Path, path: str, image: str | None) -> Iterator[bytes]:
    where = locate(path, root)
    if image is None or not where.is_file():
        return iter(())
    columns = read_table(where, text=(image,))
    names = column_text(columns, image, where)
    return ImageFiles(where.parent, sorted(names.values)).describe()


@DATASETS.register
@with_files(_describe_files)
@with_defaults(_defaults)
def table(
    root: str | Path = ".",
    *,
    path: str,
    label: str,
    clean_label: str | None = None,
    drop: str | None = None,
    text: str | None = None,
    image: str | None = None,
    group: str | None = None,
    time: str | None = None,
    dates: bool = False,
    size: int = 256,
    memory: bool = False,
    test: float = 0.2,
    fold: int = 0,
    test_path: str | None = None,
    split_seed: int = 0,
    raw: bool = False,
) -> Dataset:
    """Your own csv, tsv, parquet or npz file: one row per example, one column with the label.

    Args:
        path: The file, as written or within `root`.
        label: The column with the possibly noisy labels; its sorted values are the classes.
        clean_label: A column with the true labels, if there is one; test rows are judged by it.
        drop: Columns to leave out, separated by commas.
        text: Columns with free text, separated by commas.
        image: A column with image files, relative to the folder of the table; no other column is then a feature, and
            `drop`, `text`, `group`, `time`, `dates` and `test_path` are refused.
        group: A column whose equal values belong together: a group is either trained on or tested. No feature.
        time: A column with times: the latest rows are tested, later folds earlier ones. No feature.
        dates: Use columns of dates as features.
        size: Side of the decoded images; training crops 7/8 of it.
        memory: Decode every image once, keep it in memory, and skip unreadable images with a warning.
        test: The share of each class to hold out for testing.
        fold: Which of the `1 / test` disjoint parts to hold out, from 0.
        test_path: A file with the test rows, instead of a share.
        split_seed: Seed of the split.
    """
    where, part = locate(path, root), Part(test, fold, split_seed)
    if image is not None:
        refused = {"drop": drop, "text": text, "group": group, "time": time, "dates": dates, "test_path": test_path}
        for knob, value in refused.items():
            if value:
                raise ValueError(f"{knob} is not for a table of images: leave it out.")
        return _image_table(where, label, clean_label, image, part=part, size=size, memory=memory and not raw)
    roles = Roles(label, clean_label, split_names(drop), split_names(text), group, time, dates)
    return load_table(where, roles, test=part if test_path is None else locate(test_path, root), raw=raw)[0]


@dataclass(frozen=True)
class Roles:
    """What the columns of a table are for; see `table`."""

    label: str
    clean_label: str | None = None
    drop: Sequence[str] = ()
    text: Sequence[str] = ()
    group: str | None = None
    time: str | None = None
    dates: bool = False

    @property
    def labels(self) -> list[str]:
        return [name for name in (self.label, self.clean_label) if name is not None]

    @property
    def aside(self) -> list[str]:
        """The columns that say how to split the table."""
        return [name for name in (self.group, self.time) if name is not None]

    def select_features(self, columns: Columns) -> Columns:
        features = {n: column for n, column in columns.items() if n not in (*self.labels, *self.drop, *self.aside)}
        if self.dates:
            return features
        reason = "holds dates; to use them, give dates=True"
        return {n: Unusable(len(c.days), reason) if isinstance(c, Dates) else c for n, c in features.items()}


def load_table(
    path: str | Path, roles: Roles, *, test: Part | str | Path | None = None, raw: bool = False
) -> tuple[Dataset, Preprocessor]:
    """Load a table as `table` does.

    Args:
        path: The file.
        roles: What its columns are for.
        test: The rows to hold out, by default a fifth; or a file with the test rows.
        raw: Keep the texts as they are, joined row by row; the other columns become features beside them.

    Returns:
        The dataset and the preprocessor that made its features.
    """
    text = roles.text
    columns = read_table(path, text=(*roles.labels, *text, *filter(None, [roles.group])))
    for name in (*roles.labels, *roles.drop, *text, *roles.aside):
        require_column(columns, name, path)
    classes = class_names([columns[name] for name in roles.labels], roles.label, path)
    labels, *clean = (class_positions(columns[name], name, classes, path) for name in roles.labels)
    truth = clean[0] if clean else labels
    features = roles.select_features(columns)
    fit = Preprocessor.fit_beside if raw and text else Preprocessor.fit
    if test is None or isinstance(test, Part):
        kept, held_out = _split_rows(columns, path, labels, roles, test or Part())
        train_columns, test_columns = take(features, kept), take(features, held_out)
        test_truth = truth[held_out]
        preprocessor = fit(train_columns, text)
    else:
        if roles.aside:
            raise ValueError("group and time say how to split a table: leave them out beside a file of test rows.")
        kept, train_columns = torch.arange(len(labels)), features
        preprocessor = fit(features, text)
        test_columns, test_truth = _read_test(test, roles, classes, preprocessor)
        held_out = torch.arange(len(test_truth))

    def split(columns: Columns, *labels: Any) -> Split:
        features = preprocessor.transform(columns)
        if raw and text:
            return Split(join_texts(columns, text), *labels, beside=features if preprocessor.kinds else None)
        return Split(features, *labels)

    if preprocessor.dropped:
        reasons = "; ".join(f"{name!r} {reason}" for name, reason in preprocessor.dropped.items())
        log.warning("columns left out: %s", reasons)
    dataset = Dataset(
        name="table",
        train=split(train_columns, labels[kept], truth[kept] if clean else None, kept),
        test=split(test_columns, test_truth, None, held_out),
        num_classes=len(classes),
        class_names=tuple(classes),
    )
    return dataset, preprocessor


def _read_test(
    path: str | Path, roles: Roles, classes: Sequence[str], preprocessor: Preprocessor
) -> tuple[Columns, Tensor]:
    """Read a file of test rows: its columns, and the classes that its rows are judged by."""
    columns = read_table(path, text={*roles.labels, *roles.text, *preprocessor.text_columns})
    judge = roles.clean_label if roles.clean_label in columns else roles.label
    require_column(columns, judge, path)
    return columns, class_positions(columns[judge], judge, classes, path)


def _split_rows(columns: Columns, path: str | Path, labels: Tensor, roles: Roles, part: Part) -> tuple[Tensor, Tensor]:
    """Split by classes, groups or times. A fold is one of `1 / share`; fold 0 of times is the latest period."""
    group, time, share, fold = roles.group, roles.time, part.share, part.fold
    if group is None and time is None:
        return stratified_split(labels, share, part.seed, fold=fold)
    if group is not None and time is not None:
        raise ValueError("Give either group or time: a split is by one of them.")
    if not 0 < share < 1:
        raise ValueError(f"test must be a share between 0 and 1, got {share}.")
    count = max(2, round(1 / share))
    if group is not None:
        parts = group_folds(group_numbers(columns, group, path), labels.numpy(), count, part.seed)
    else:
        parts = time_folds(time_numbers(columns, str(time), path), count - 1)[::-1]
    if not 0 <= fold < len(parts):
        raise ValueError(f"fold must be in 0..{len(parts) - 1} for test={share}, got {fold}.")
    train, test = parts[fold]
    return torch.from_numpy(train), torch.from_numpy(test)


def join_texts(columns: Columns, names: Sequence[str]) -> TextInputs:
    """Join the text columns row by row, a line each; a missing text is left out."""
    found = [as_text(columns[name]) for name in names]  # type: ignore[arg-type]  # `require_column` has checked them
    lines = [np.array([*text.values, ""], dtype=object)[text.codes] for text in found]
    return TextInputs(["\n".join(line for line in row if line) for row in zip(*lines, strict=True)])


def image_listing(columns: Columns, path: Path, folder: Path, label: str, image: str) -> Listing:
    """List the files in the column `image`, which are relative to `folder`, with the labels in the column `label`.

    Raises:
        ValueError: If a column is missing or a row has no file name or label; `path` names the table.
    """
    names, labels = column_text(columns, image, path), column_text(columns, label, path)
    _refuse_missing(names, image, path, what="image file")
    _refuse_missing(labels, label, path)
    rows = [
        (i + 2, names.values[file], labels.values[value])  # line 1 is the header
        for i, (file, value) in enumerate(zip(names.codes, labels.codes, strict=True))
    ]
    return Listing(path, folder, rows)


def _image_table(path: Path, label: str, clean_label: str | None, image: str, **options: Any) -> Dataset:
    labels = [label] if clean_label is None else [label, clean_label]
    columns = read_table(path, text=(image, *labels))
    for name in (image, *labels):
        require_column(columns, name, path)
    classes = class_names([columns[name] for name in labels], label, path)
    listing = image_listing(columns, path, path.parent, label, image)
    dataset = image_dataset("table", listing, None, classes, **options)
    if clean_label is None:
        return dataset
    truth = class_positions(columns[clean_label], clean_label, classes, path)
    train, test = dataset.train, dataset.test
    train = replace(train, clean_labels=truth[train.rows])
    return replace(dataset, train=train, test=replace(test, labels=truth[test.rows]))


# -- labels ------------------------------------------------------------------------------------------------------------


def require_column(columns: Columns, name: str, path: str | Path) -> None:
    """Raise a ValueError with a suggestion if there is no column `name`."""
    if name not in columns:
        raise ValueError(f"{path} has no column {name!r}. {suggest(name, columns)}")


def column_text(columns: Columns, name: str, path: str | Path) -> TextColumn:
    """Return a column as text, or raise a ValueError if it is missing or cannot be used."""
    require_column(columns, name, path)
    column = columns[name]
    if isinstance(column, Unusable):
        raise ValueError(f"{path}: column {name!r} {column.reason}.")
    return as_text(column)


def class_names(columns: Sequence[Column], label: str, path: str | Path) -> list[str]:
    """Return the distinct values of the label columns, sorted: as numbers if all of them are.

    Raises:
        ValueError: If there are fewer than two, or so many that they cannot be classes.
    """
    texts = [column_text({label: column}, label, path) for column in columns]
    values = sorted({value for text in texts for value in text.values})
    rows = len(texts[0].codes)
    if len(values) < 2:
        found = f"is {values[0]!r} in every row" if values else "has no values"
        raise ValueError(f"{path}: the label {label!r} {found}; at least two classes are needed.")
    if len(values) > max(2, rows / 2):
        raise ValueError(
            f"{path}: the label {label!r} has {len(values)} different values in {rows} rows: too many to be classes."
        )
    return sorted(values, key=float) if all(map(is_numeric_text, values)) else values


def class_positions(column: Column, name: str, classes: Sequence[str], path: str | Path) -> Tensor:
    """Return the labels as positions in `classes`, int64 [N].

    Raises:
        ValueError: If a label is missing or is not one of `classes`.
    """
    text = column_text({name: column}, name, path)
    _refuse_missing(text, name, path)
    position = {value: i for i, value in enumerate(classes)}
    labels = np.array([position.get(value, -1) for value in text.values])[text.codes]
    if (labels < 0).any():
        row = int((labels < 0).argmax())
        raise ValueError(
            f"{path}, row {row + 1}: {text.values[text.codes[row]]!r} is not a class of the training data. "
            f"{suggest(text.values[text.codes[row]], classes)}"
        )
    return torch.from_numpy(labels)


def _refuse_missing(text: TextColumn, name: str, path: str | Path, what: str = "label") -> None:
    missing = np.flatnonzero(text.codes < 0)
    if len(missing):
        others = f" (and in {len(missing) - 1} other rows)" if len(missing) > 1 else ""
        raise ValueError(
            f"{path}, row {missing[0] + 1}: the {what} {name!r} is missing{others}; fill it in or remove the row."
        )
