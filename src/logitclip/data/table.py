"""Rows of a csv, parquet or npz file: features, a label column, and the `Preprocessor` between them and a network."""

from __future__ import annotations

import csv as builtin_csv
import json
import logging
import math
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from logitclip.data.dataset import DATASETS, Dataset, Split
from logitclip.data.folder import locate, stratified_split
from logitclip.registry import suggest

log = logging.getLogger(__name__)

MAX_LEVELS = 64  # of a text column; the rarer ones share the level "other"
MISSING = frozenset({"", "?", "na", "n/a", "#n/a", "nan", "null"})  # in lower case
DAY = 86_400_000_000  # microseconds


class Text(NamedTuple):
    """A column of text: row i is `values[codes[i]]`, missing where the code is -1."""

    codes: np.ndarray  # [N] int64
    values: list[str]  # all different


Column = np.ndarray | Text  # numbers are float64 [N], nan where missing
Columns = Mapping[str, Column]


# -- files to columns ------------------------------------------------------------------------------------------------


def read_table(path: str | Path, *, text: Collection[str] = ()) -> dict[str, Column]:
    """The columns of a csv, tsv, parquet or npz file.

    Truth values become 0 and 1, dates and times days (since 1970). In an npz file each array is a column, or several
    if it has two dimensions: those of `x` are called `x0`, `x1`, ... Columns that are neither numbers nor text, such
    as lists, are left out with a warning.

    Args:
        text: columns of a csv file that are text whatever they look like (`007` is not 7).
    """
    path = Path(os.path.expanduser(path))
    if not path.is_file():
        raise ValueError(f"There is no file {path}; name a csv, tsv, parquet or npz file.")
    kind = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    readers = {".csv": _read_csv, ".tsv": _read_csv, ".parquet": _read_parquet, ".npz": _read_npz}
    if kind not in readers:
        raise ValueError(f"{path} should be a csv, tsv, parquet or npz file, and its name should end so.")
    columns = readers[kind](path, text)
    if not columns or not _rows(columns):
        raise ValueError(f"{path} holds no rows.")
    return columns


def _rows(columns: Columns) -> int:
    column = next(iter(columns.values()))
    return len(column.codes if isinstance(column, Text) else column)


def _read_csv(path: Path, text: Collection[str]) -> dict[str, Column]:
    pa = _pyarrow()
    from pyarrow import csv

    def read() -> Any:
        with pa.input_stream(path) as stream:  # also decompresses
            start = stream.read(1 << 16).decode("utf-8-sig", errors="replace")
        header = (start.splitlines() or [""])[0]
        unquoted = re.sub(r'"[^"]*"', "", header)
        delimiter = max(",;\t|", key=unquoted.count)
        names = next(builtin_csv.reader([header], delimiter=delimiter), [])
        nulls = [*csv.ConvertOptions().null_values, "?"]
        return csv.read_csv(
            path,
            parse_options=csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=csv.ConvertOptions(
                strings_can_be_null=True,
                null_values=nulls + [f" {null}" for null in nulls],  # after the comma of "a, b"
                column_types={name: pa.string() for name in names if name.strip() in text},
            ),
        )

    return _from_arrow(path, read)


def _read_parquet(path: Path, text: Collection[str]) -> dict[str, Column]:
    _pyarrow()
    from pyarrow import parquet

    def read() -> Any:
        with parquet.ParquetFile(path) as file:
            return file.read()

    return _from_arrow(path, read)


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise ImportError("Reading csv and parquet files needs pyarrow: pip install 'logitclip[data]'.") from error
    return pyarrow


def _from_arrow(path: Path, read: Callable[[], Any]) -> dict[str, Column]:
    try:
        table = read()
    except (_pyarrow().ArrowException, builtin_csv.Error, OSError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ValueError(f"{path} could not be read ({reason}); repair it or save it anew.") from error
    columns: dict[str, Column] = {}
    for name, values in zip(table.column_names, table.columns, strict=True):
        name = name.strip()
        if name in columns:
            raise ValueError(f"{path} has two columns called {name!r}; rename one.")
        column = _arrow_column(values)
        if column is None:
            log.warning("%s: column %r is left out: %s is neither numbers, dates nor text", path, name, values.type)
        else:
            columns[name] = column
    return columns


def _arrow_column(values: Any) -> Column | None:
    """A pyarrow column as ours, or None if it is of no use."""
    import pyarrow as pa
    import pyarrow.types as is_a

    if is_a.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    kind = values.type
    if is_a.is_null(kind):
        return np.full(len(values), np.nan)
    if is_a.is_boolean(kind):
        values, kind = values.cast(pa.int8()), pa.int8()
    if is_a.is_integer(kind) or is_a.is_floating(kind) or is_a.is_decimal(kind):
        return values.cast(pa.float64(), safe=False).to_numpy()
    if is_a.is_date(kind):
        values, kind = values.cast(pa.timestamp("us")), pa.timestamp("us")
    unit = {is_a.is_timestamp: pa.timestamp, is_a.is_time: pa.time64, is_a.is_duration: pa.duration}
    for matches, make in unit.items():
        if matches(kind):
            return values.cast(make("us"), safe=False).cast(pa.int64()).cast(pa.float64(), safe=False).to_numpy() / DAY
    if is_a.is_string(kind) or is_a.is_large_string(kind) or is_a.is_string_view(kind):
        # One chunk: unifying the dictionaries of many takes quadratic time.
        encoded = values.cast(pa.large_string()).combine_chunks().dictionary_encode()
        return _text(encoded.indices.fill_null(-1).to_numpy(), encoded.dictionary.to_pylist())
    return None


def _read_npz(path: Path, text: Collection[str]) -> dict[str, Column]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (ValueError, OSError, EOFError, KeyError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} could not be read ({error}); save plain arrays with numpy.savez.") from error
    columns: dict[str, Column] = {}
    for name, array in arrays.items():
        parts = {f"{name}{i}": array[:, i] for i in range(array.shape[1])} if array.ndim == 2 else {name: array}
        for part, values in parts.items():
            column = from_numpy(values) if values.ndim == 1 else None
            if column is None:
                log.warning("%s: array %r is left out: %s %s is no column", path, name, values.dtype, values.shape)
            elif columns and len(values) != _rows(columns):
                raise ValueError(
                    f"{path}: {part!r} has {len(values)} rows and others {_rows(columns)}; save as many of each."
                )
            else:
                columns[part] = column
    return columns


def from_numpy(values: np.ndarray) -> Column | None:
    """A one-dimensional array as a column, or None if it is of no use.

    >>> from_numpy(np.array(["b", "a", "", "b"]))
    Text(codes=array([ 1,  0, -1,  1]), values=['a', 'b'])
    """
    if values.dtype.kind in "biuf":
        return values.astype(np.float64)
    if values.dtype.kind in "mM":
        days = values.astype(f"{values.dtype.kind}8[us]").astype(np.float64) / DAY
        return np.where(np.isnat(values), np.nan, days)
    if values.dtype.kind in "SU":
        distinct, codes = np.unique(values, return_inverse=True)
        return _text(codes, [v.decode("utf-8", "replace") if isinstance(v, bytes) else v for v in distinct.tolist()])
    return None


def _text(codes: np.ndarray, values: list[str]) -> Text:
    """Without the blanks around values, and with what stands for a missing value missing."""
    stripped = [value.strip() for value in values]
    distinct = [value for value in dict.fromkeys(stripped) if value.lower() not in MISSING]
    position = {value: i for i, value in enumerate(distinct)}
    moved = np.array([position.get(value, -1) for value in stripped] + [-1])  # the code -1 finds the last
    return Text(moved[codes], distinct)


def _as_text(column: Column) -> Text:
    """Numbers as text, `1` rather than `1.0`."""
    if isinstance(column, Text):
        return column
    distinct, codes = np.unique(column[~np.isnan(column)], return_inverse=True)
    all_codes = np.full(len(column), -1)
    all_codes[~np.isnan(column)] = codes
    return Text(all_codes, [str(int(v)) if v.is_integer() else repr(v) for v in distinct.tolist()])


def _take(columns: Columns, index: Tensor) -> dict[str, Column]:
    i = index.numpy()
    return {
        name: Text(column.codes[i], column.values) if isinstance(column, Text) else column[i]
        for name, column in columns.items()
    }


# -- columns to features ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Number:
    """Missing values become the median; then the mean is taken off and the standard deviation divided by."""

    name: str
    median: float
    mean: float
    std: float

    @property
    def features(self) -> list[str]:
        return [self.name]


@dataclass(frozen=True)
class Category:
    """One feature per level, one for all other values and one for missing ones: 1 for what a row is, else 0."""

    name: str
    levels: tuple[str, ...]

    @property
    def features(self) -> list[str]:
        return [f"{self.name}={level}" for level in (*self.levels, "<other>", "<missing>")]


@dataclass(frozen=True)
class Preprocessor:
    """From columns to the features a network takes; what it learns, it learns from the columns given to `fit`.

    >>> prep = Preprocessor.fit({"age": np.array([20.0, 40.0, np.nan]), "sex": from_numpy(np.array(["f", "m", "m"]))})
    >>> prep.feature_names
    ['age', 'sex=m', 'sex=<other>', 'sex=<missing>']
    >>> prep.transform({"age": np.array([30.0]), "sex": from_numpy(np.array(["x"]))})
    tensor([[0., 0., 1., 0.]])
    >>> Preprocessor.from_json(prep.to_json()) == prep
    True
    """

    columns: tuple[Number | Category, ...]
    dropped: Mapping[str, str] = field(default_factory=dict)  # columns that are no features, and why

    @classmethod
    def fit(cls, columns: Columns) -> Preprocessor:
        """Learn medians, means, deviations and levels.

        Columns that cannot tell one row from another are dropped, as are text columns most of whose values are rare
        (ids, names, free text): a warning names them.
        """
        kept: list[Number | Category] = []
        dropped: dict[str, str] = {}
        for name, column in columns.items():
            found = _fit_category(name, column) if isinstance(column, Text) else _fit_number(name, column)
            if isinstance(found, str):
                dropped[name] = found
            else:
                kept.append(found)
        reasons = "; ".join(f"{name!r} {reason}" for name, reason in dropped.items())
        if not kept:
            raise ValueError(f"No column is left as a feature: {reasons or 'there is none beside the label'}.")
        if dropped:
            log.warning("columns left out: %s", reasons)
        return cls(tuple(kept), dropped)

    @property
    def feature_names(self) -> list[str]:
        return [feature for column in self.columns for feature in column.features]

    @property
    def text_columns(self) -> set[str]:
        """For `read_table`: what was text when this was fitted is to be read as text."""
        return {column.name for column in self.columns if isinstance(column, Category)}

    def transform(self, columns: Columns) -> Tensor:
        """The features, float32 [N, D]. Columns that `fit` did not see are ignored; those it did see must be there."""
        missing = [column.name for column in self.columns if column.name not in columns]
        if missing:
            others = f" (and {len(missing) - 1} others)" if len(missing) > 1 else ""
            raise ValueError(f"There is no column {missing[0]!r}{others}. {suggest(missing[0], columns)}")
        rows = _rows({column.name: columns[column.name] for column in self.columns})
        features = np.zeros((rows, len(self.feature_names)), dtype=np.float32)
        start = 0
        for column in self.columns:
            if isinstance(column, Number):
                features[:, start] = _standardise(column, columns[column.name])
            else:
                features[np.arange(rows), start + _levels(column, columns[column.name])] = 1
            start += len(column.features)
        return torch.from_numpy(features)

    def to_json(self) -> str:
        described = [{"kind": type(column).__name__.lower(), **asdict(column)} for column in self.columns]
        return json.dumps({"version": 1, "columns": described, "dropped": dict(self.dropped)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Preprocessor:
        kinds = {"number": Number, "category": Category}
        try:
            content = json.loads(text)
            if content["version"] != 1:
                raise ValueError(f"its version is {content['version']!r}, not 1")
            columns = []
            for described in content["columns"]:
                column = kinds[described.pop("kind")](**described)
                if isinstance(column, Category):
                    column = Category(column.name, tuple(column.levels))
                elif not (math.isfinite(column.median) and math.isfinite(column.mean) and 0 < column.std < math.inf):
                    raise ValueError(f"the numbers of {column.name!r} are not usable")
                columns.append(column)
            return cls(tuple(columns), dict(content["dropped"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"This is not a preprocessor saved by logitclip: {error}.") from error

    def save(self, path: str | Path) -> None:
        """Write `to_json` to a file, whole or not at all."""
        part = Path(f"{path}.{os.getpid()}.part")
        try:
            part.write_text(self.to_json(), encoding="utf-8")
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> Preprocessor:
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} could not be read: {error}") from error


def _fit_number(name: str, values: np.ndarray) -> Number | str:
    """What to do with a column of numbers, or why it is dropped."""
    present = values[np.isfinite(values)]
    if not len(present):
        return "has no values"
    median, largest = float(np.median(present)), float(np.abs(present).max())
    # Of numbers within [-1, 1], squares neither over- nor underflow, and the mean of equal ones is exact.
    unit = np.where(np.isfinite(values), values, median) / (largest or 1.0)
    mean, std = largest * float(unit.mean()), largest * float(unit.std())
    if std == 0:
        return "has the same value in every row"
    return Number(name, median, mean, std)


def _fit_category(name: str, column: Text) -> Category | str:
    counts = np.bincount(column.codes + 1, minlength=len(column.values) + 1)  # the first is the missing ones'
    present = {value: int(count) for value, count in zip(column.values, counts[1:], strict=True) if count}
    if len(present) + (counts[0] > 0) < 2:
        return "has the same value in every row" if present else "has no values"
    common = sorted((value for value in present if present[value] > 1), key=lambda v: (-present[v], v))[:MAX_LEVELS]
    if 2 * (sum(present[value] for value in common) + counts[0]) < len(column.codes):
        return f"is text with {len(present)} different values in {len(column.codes)} rows"
    return Category(name, tuple(sorted(common)))


def _standardise(column: Number, values: Column) -> np.ndarray:
    if isinstance(values, Text):
        try:
            values = np.array([*map(float, values.values), np.nan])[values.codes]
        except ValueError:
            wrong = next(value for value in values.values if not _is_number(value))
            raise ValueError(f"Column {column.name!r} held numbers when it was fitted, and now {wrong!r}.") from None
    limit = float(np.finfo(np.float32).max)
    with np.errstate(over="ignore"):  # infinities are cut as well
        filled = np.where(np.isfinite(values), values, column.median)
        return np.clip((filled - column.mean) / column.std, -limit, limit)


def _levels(column: Category, values: Column) -> np.ndarray:
    """The position among `column.features` of each row's."""
    text = _as_text(values)
    position = {level: i for i, level in enumerate(column.levels)}
    other, missing = len(column.levels), len(column.levels) + 1
    return np.array([*(position.get(value, other) for value in text.values), missing])[text.codes]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


# -- the dataset -----------------------------------------------------------------------------------------------------


@DATASETS.register
def table(
    root: str | Path = ".",
    *,
    path: str,
    label: str,
    clean_label: str | None = None,
    drop: str | None = None,
    test: float = 0.2,
    test_path: str | None = None,
    split_seed: int = 0,
) -> Dataset:
    """A csv, tsv, parquet or npz file of yours: one row per example, one column with the label.

    Args:
        path: the file; as it stands, or within `root`.
        label: the column with the labels, noisy or not; the classes are its values, sorted.
        clean_label: a column with the true labels, if there is one; the test rows are then judged by it.
        drop: columns that are no features, with commas between them.
        test, split_seed: the share of each class that is held out for testing, and the seed it is drawn with.
        test_path: a file with the test rows instead.
    """
    return load_table(
        locate(path, root),
        label,
        clean_label=clean_label,
        drop=[name.strip() for name in drop.split(",")] if drop else [],
        test=test if test_path is None else locate(test_path, root),
        split_seed=split_seed,
    )[0]


def load_table(
    path: str | Path,
    label: str,
    *,
    clean_label: str | None = None,
    drop: Sequence[str] = (),
    test: float | str | Path = 0.2,
    split_seed: int = 0,
) -> tuple[Dataset, Preprocessor]:
    """As `table`, with the preprocessor that made the features; `test` is a share or a file."""
    special = [label] if clean_label is None else [label, clean_label]
    columns = read_table(path, text=special)
    for name in (*special, *drop):
        if name not in columns:
            raise ValueError(f"{path} has no column {name!r}. {suggest(name, columns)}")
    classes = _classes([columns[name] for name in special], label, path)
    labels, *clean = (_labels(columns[name], name, classes, path) for name in special)
    truth = clean[0] if clean else labels
    features = {name: column for name, column in columns.items() if name not in (*special, *drop)}

    if isinstance(test, (str, Path)):
        train_columns, test_path = features, test
        preprocessor = Preprocessor.fit(features)
        columns = read_table(test_path, text={*special, *preprocessor.text_columns})
        judge = clean_label if clean_label in columns else label
        if judge not in columns:
            raise ValueError(f"{test_path} has no column {judge!r}. {suggest(str(judge), columns)}")
        test_columns, test_truth = columns, _labels(columns[judge], judge, classes, test_path)
    else:
        kept, held_out = stratified_split(labels, test, split_seed)
        train_columns, test_columns = _take(features, kept), _take(features, held_out)
        test_truth, labels, truth = truth[held_out], labels[kept], truth[kept]
        preprocessor = Preprocessor.fit(train_columns)

    train = Split(preprocessor.transform(train_columns), labels, truth if clean else None)
    dataset = Dataset(
        name="table",
        train=train,
        test=Split(preprocessor.transform(test_columns), test_truth),
        num_classes=len(classes),
        class_names=tuple(classes),
        protocol={
            "model": "mlp",
            "epochs": 100,
            "batch_size": 128 if len(train) < 100_000 else 1024,
            "lr": 0.05,
            "momentum": 0.9,
            "nesterov": True,
            "weight_decay": 1e-4,
            "schedule": "multistep",
            "milestones": (0.5, 0.75),
            "augment": "none",
            "drop_last": False,
        },
    )
    return dataset, preprocessor


def _classes(columns: Sequence[Column], label: str, path: str | Path) -> list[str]:
    """The values of the label columns, sorted: as numbers if they all are."""
    texts = [_as_text(column) for column in columns]
    values = sorted({value for text in texts for value in text.values})
    rows = len(texts[0].codes)
    if len(values) < 2:
        raise ValueError(f"{path}: the label {label!r} has {len(values)} different values; at least two are needed.")
    if len(values) > max(2, rows / 2):
        raise ValueError(
            f"{path}: the label {label!r} has {len(values)} different values in {rows} rows: those are no classes."
        )
    return sorted(values, key=float) if all(map(_is_number, values)) else values


def _labels(column: Column, name: str, classes: Sequence[str], path: str | Path) -> Tensor:
    text = _as_text(column)
    if (text.codes < 0).any():
        row, count = int((text.codes < 0).argmax()) + 1, int((text.codes < 0).sum())
        others = f" (and in {count - 1} other rows)" if count > 1 else ""
        raise ValueError(f"{path}, row {row}: the label {name!r} is missing{others}; fill it in or remove the row.")
    position = {value: i for i, value in enumerate(classes)}
    moved = np.array([position.get(value, -1) for value in text.values])
    labels = moved[text.codes]
    if (labels < 0).any():
        row = int((labels < 0).argmax())
        raise ValueError(
            f"{path}, row {row + 1}: {text.values[text.codes[row]]!r} is no class of the training data. "
            f"{suggest(text.values[text.codes[row]], classes)}"
        )
    return torch.from_numpy(labels)
