"""Columns of numbers, text and dates from csv, tsv, parquet and npz files and from pandas data frames."""

from __future__ import annotations

import codecs
import contextlib
import csv as builtin_csv
import errno
import os
import re
import warnings
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor

from logitclip.files import Json
from logitclip.text import explain_missing, first_line

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow

MICROSECONDS = 24 * 3600 * 10**6  # of a day
TIME_ONLY = "is a duration or a time of day; derive numbers from it, such as hours, to use it"
PART = 1 << 22  # bytes of a csv file that are read at a time
PART_ROWS = 8192  # rows of a parquet file that are read at a time
MISSING = frozenset({"", "?", "na", "n/a", "#n/a", "nan", "null"})  # in lower case


class TextColumn(NamedTuple):
    """A column of text: row i is `values[codes[i]]`; code -1 means missing."""

    codes: np.ndarray  # [N] int64
    values: list[str]  # distinct


class Dates(NamedTuple):
    """A column of dates, with or without a time of day."""

    days: np.ndarray  # [N] float64, days since 1970-01-01; nan where missing


class Unusable(NamedTuple):
    """A column that cannot be a feature or a label, and the reason."""

    rows: int
    reason: str


Column = np.ndarray | TextColumn | Dates | Unusable  # numbers are float64 [N], nan where missing
Columns = Mapping[str, Column]


def read_table(path: str | Path, *, text: Collection[str] = ()) -> dict[str, Column]:
    """Read a csv, tsv, parquet or npz file.

    Booleans become 0 and 1. Vectors become numbered columns `x0`, `x1`, ...: a two-dimensional array `x` of an npz
    file, or a parquet column of lists of one length. Other lists and types that are neither numbers nor text
    nor dates become `Unusable`.

    Args:
        path: The file; csv and tsv may be gzipped. The delimiter is detected, and so is a decimal comma.
        text: Columns of a csv file to read as text even if they look like numbers (`007` is not 7).

    Returns:
        The columns by name, all with the same number of rows.

    Raises:
        ValueError: If the file is missing, empty or damaged, or if two columns share a name.
    """
    path = Path(os.path.expanduser(path))
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a csv, tsv, parquet or npz file.")
    if not path.is_file():
        raise ValueError(f"There is no file {path}; name a csv, tsv, parquet or npz file.")
    kind = table_kind(path)
    readers = {".csv": _read_csv, ".tsv": _read_csv, ".parquet": _read_parquet, ".npz": _read_npz}
    if kind in (".xlsx", ".xlsm", ".xlsb", ".xls", ".ods"):
        raise ValueError(f"{path} is a spreadsheet: save the sheet as csv (UTF-8) and name that file.")
    if kind not in readers:
        raise ValueError(f"Unknown format of a table: {path}. Use .csv, .tsv, .parquet or .npz.")
    columns = readers[kind](path, text)
    if not columns or not row_count(columns):
        raise ValueError(f"{path} holds no rows.")
    return columns


def from_frame(frame: pd.DataFrame) -> dict[str, Column]:
    """Convert a pandas data frame; raise a ValueError if two of its columns share a name."""
    pa = _pyarrow()

    def column(values: pd.Series) -> pyarrow.ChunkedArray:
        try:
            return pa.chunked_array([pa.array(values, from_pandas=True)])
        except pa.ArrowException:  # values of several types
            return pa.chunked_array([pa.array([None if v is None or v != v else str(v) for v in values], pa.string())])

    named = ((str(name), column(frame.iloc[:, i])) for i, name in enumerate(frame.columns))
    return _from_arrow(named, "The data frame")


def to_frame(columns: Columns) -> pd.DataFrame:
    """Convert columns to a data frame that is read as the same columns; those that cannot be used are left out.

    >>> to_frame({"word": from_numpy(np.array(["b", "a"])), "size": np.array([1.5, 2.0])})
      word  size
    0    b   1.5
    1    a   2.0
    """
    import pandas as pd

    def values(column: Column) -> np.ndarray:
        if isinstance(column, TextColumn):
            return np.array([*column.values, None], dtype=object)[column.codes]
        if isinstance(column, Dates):
            known = ~np.isnan(column.days)
            ticks = np.rint(np.where(known, column.days, 0) * MICROSECONDS).astype("datetime64[us]")
            return np.where(known, ticks, np.datetime64("NaT"))
        return np.asarray(column)

    usable = {name: values(column) for name, column in columns.items() if not isinstance(column, Unusable)}
    return pd.DataFrame(usable, index=range(row_count(columns)))


def table_kind(path: Path) -> str:
    """Return how the name of a table ends, without .gz.

    >>> table_kind(Path("Rows.CSV.gz"))
    '.csv'
    """
    return Path(path.name.lower().removesuffix(".gz")).suffix


def row_count(columns: Columns) -> int:
    """Return the number of rows."""
    column = next(iter(columns.values()))
    if isinstance(column, Unusable):
        return column.rows
    return len(column.codes if isinstance(column, TextColumn) else column.days if isinstance(column, Dates) else column)


def read_table_parts(
    path: str | Path, names: Collection[str], *, text: Collection[str] = ()
) -> Iterator[dict[str, Column]]:
    """Read some columns part by part, so that the memory does not grow with the file.

    Args:
        path: A csv, tsv or parquet file. An npz file or a csv file with decimal commas is one part, with all columns.
        names: The columns to read, if the file has them.
        text: Columns of a csv file to read as text even if they look like numbers. Others are numbers if they are in
            the first part, else text.

    Yields:
        The columns of the next rows by name.

    Raises:
        ValueError: As `read_table` does.
    """
    path = Path(os.path.expanduser(path))
    kind = table_kind(path)
    if not path.is_file() or kind not in (".csv", ".tsv", ".parquet"):
        yield read_table(path, text=text)
        return
    rows = 0
    with _explain_arrow_errors(path):
        if kind == ".parquet":
            batches = _parquet_batches(path, names)
        else:
            layout = _CsvLayout.of(path)
            if layout.may_have_decimal_commas:
                yield read_table(path, text=text)
                return
            batches = layout.open(names, text)
    while True:
        with _explain_arrow_errors(path):
            batch = next(batches, None)
        if batch is None:
            break
        if batch.num_rows and batch.num_columns:
            rows += batch.num_rows
            columns = (_pyarrow().chunked_array([column]) for column in batch.columns)
            yield _from_arrow(zip(batch.schema.names, columns, strict=True), path)
    if not rows:  # or say why
        yield read_table(path, text=text)


def find_delimiter(text: str) -> str:
    """Return the delimiter of a csv file: the one that its first line has most of, outside quotes."""
    header = (text.splitlines() or [""])[0]
    return max(",;\t|", key=re.sub(r'"[^"]*"', "", header).count)


class _CsvLayout(NamedTuple):
    """What the start of a csv file says about the rest."""

    path: Path
    start: str
    delimiter: str
    names: list[str]

    @classmethod
    def of(cls, path: Path) -> _CsvLayout:
        with _open_csv(path) as file:
            first = file.read(1 << 16)
        if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise OSError("its text is utf-16")
        start = first.decode("utf-8-sig", errors="replace")
        header, delimiter = (start.splitlines() or [""])[0], find_delimiter(start)
        return cls(path, start, delimiter, next(builtin_csv.reader([header], delimiter=delimiter), []))

    @property
    def may_have_decimal_commas(self) -> bool:
        # A comma before exactly three digits may separate thousands, unless a lone zero is before it.
        found = re.search(r"\d,(?:\d{1,2}|\d{4,})(?![\d,])|(?<![\d.,])0,\d", self.start)
        return self.delimiter != "," and found is not None

    def options(
        self, text: Collection[str], types: Mapping[str, pyarrow.DataType] | None = None, **convert: Any
    ) -> Json:
        """Return pyarrow's options to parse the file, with some columns as text and others of some `types`."""
        from pyarrow import csv

        texts = {name: _pyarrow().string() for name in self.names if name.strip() in text}
        nulls = [*csv.ConvertOptions().null_values, "?"]
        nulls += [f" {null}" for null in nulls]  # after the comma of "a, b"
        columns = {"column_types": {**(types or {}), **texts}, **convert}
        return {
            "parse_options": csv.ParseOptions(delimiter=self.delimiter, newlines_in_values=True),
            "convert_options": csv.ConvertOptions(strings_can_be_null=True, null_values=nulls, **columns),
        }

    def open(self, names: Collection[str], text: Collection[str]) -> Iterator[pyarrow.RecordBatch]:
        """Yield batches of some columns: numbers if the first batch has numbers, else text."""
        from pyarrow import csv

        wanted = [name for name in self.names if name.strip() in names]
        if not wanted:
            return

        def read(types: Mapping[str, pyarrow.DataType] | None = None) -> csv.CSVStreamingReader:
            options = self.options(text, types, include_columns=wanted)
            return csv.open_csv(_open_csv(self.path), csv.ReadOptions(block_size=PART), **options)

        pa = _pyarrow()
        with read() as first:  # later rows of whole numbers may have fractions
            kinds = {field.name: pa.float64() if _is_number(field.type) else field.type for field in first.schema}
        types = {n: kind if kind in (pa.float64(), pa.bool_()) else pa.string() for n, kind in kinds.items()}
        with read(types) as batches:
            yield from batches


def _is_number(kind: pyarrow.DataType) -> bool:
    import pyarrow.types as is_a

    return is_a.is_integer(kind) or is_a.is_floating(kind)


def _open_csv(path: Path) -> pyarrow.NativeFile:
    return _pyarrow().input_stream(_open_file(path), compression="gzip" if path.suffix.lower() == ".gz" else None)


def _open_file(path: Path) -> pyarrow.NativeFile:
    return _pyarrow().OSFile(os.fsencode(path))  # pyarrow would read no path that is not UTF-8


def _read_csv(path: Path, text: Collection[str]) -> dict[str, Column]:
    with _explain_arrow_errors(path):
        from pyarrow import csv

        layout = _CsvLayout.of(path)
        points = (".", ",") if layout.may_have_decimal_commas else (".",)
        tables = [csv.read_csv(_open_csv(path), **layout.options(text, decimal_point=point)) for point in points]
        table = max(tables, key=lambda table: sum(map(_is_number, table.schema.types)))  # the first of equals
        return _from_arrow(zip(table.column_names, table.columns, strict=True), path)


def _read_parquet(path: Path, text: Collection[str]) -> dict[str, Column]:
    with _explain_arrow_errors(path):
        from pyarrow import parquet

        with parquet.ParquetFile(_open_file(path)) as file:
            table = file.read()
        return _from_arrow(zip(table.column_names, table.columns, strict=True), path)


def _parquet_batches(path: Path, names: Collection[str]) -> Iterator[pyarrow.RecordBatch]:
    from pyarrow import parquet

    # A whole row group may not fit in memory.
    with parquet.ParquetFile(_open_file(path), buffer_size=PART, pre_buffer=False) as file:
        # A list v becomes v0, v1, ..., of which some may not be wanted.
        vectors = {name[:end] for name in names for end in range(1, len(name)) if name[end:].isdecimal()}
        wanted = [name for name in file.schema_arrow.names if name.strip() in {*names, *vectors}]
        if wanted:
            yield from file.iter_batches(batch_size=PART_ROWS, columns=wanted)


def _pyarrow() -> ModuleType:
    with explain_missing("Reading csv and parquet files needs pyarrow", "data"):
        import pyarrow
    return pyarrow


@contextlib.contextmanager
def _explain_arrow_errors(path: Path) -> Iterator[None]:
    """Raise errors of the block as a ValueError that names the file and the remedy."""
    pa = _pyarrow()
    try:
        yield
    except (pa.ArrowException, builtin_csv.Error, OSError, UnicodeDecodeError) as error:
        if isinstance(error, PermissionError):
            raise ValueError(f"{path} could not be read: {os.strerror(error.errno or errno.EACCES)}.") from error
        reason = first_line(error)
        encoded = isinstance(error, UnicodeDecodeError) or "UTF8" in reason or "utf-16" in reason
        remedy = "save it as UTF-8" if encoded else "repair it or save it again"
        if path.suffix.lower() in (".csv", ".tsv") and _begins_as_archive(path):
            reason, remedy = "it is compressed, or of another format", "name it .csv.gz or .parquet, or save it as text"
        raise ValueError(f"{path} could not be read ({reason}); {remedy}.") from error


def _from_arrow(named: Iterable[tuple[str, pyarrow.ChunkedArray]], source: str | Path) -> dict[str, Column]:
    """Convert Arrow's columns; `source` names the file if two of them share a name."""
    columns: dict[str, Column] = {}
    for name, values in named:
        for part, column in _split_vectors(name.strip(), values).items():
            if part in columns:
                raise ValueError(f"{source} has two columns called {part!r}; rename one.")
            columns[part] = column
    return columns


def _split_vectors(name: str, values: pyarrow.ChunkedArray) -> dict[str, Column]:
    """Return a column under its name; lists of one length, such as the vectors of an encoder, as numbered columns."""
    import pyarrow.types as is_a

    kind = values.type
    if not (is_a.is_list(kind) or is_a.is_large_list(kind) or is_a.is_fixed_size_list(kind)):
        return {name: _arrow_column(values)}
    if not _is_number(kind.value_type):
        return {name: Unusable(len(values), f"is of type {kind}, neither numbers nor text")}
    import pyarrow as pa
    from pyarrow import compute

    known = values.drop_null()
    lengths = np.unique(np.asarray(compute.list_value_length(known)))  # type: ignore[attr-defined]  # made at import
    if len(lengths) != 1 or not lengths[0]:
        found = f"lists of {lengths[0]} to {lengths[-1]} numbers" if len(lengths) else "no list"
        return {name: Unusable(len(values), f"holds {found}; vectors must have one length")}
    flat = compute.list_flatten(known).cast(pa.float64())  # type: ignore[attr-defined]
    vectors = np.full((len(values), int(lengths[0])), np.nan)
    vectors[np.asarray(values.is_valid())] = np.asarray(flat).reshape(-1, int(lengths[0]))
    return {f"{name}{i}": vectors[:, i] for i in range(vectors.shape[1])}


def _arrow_column(values: pyarrow.ChunkedArray) -> Column:
    import pyarrow as pa
    import pyarrow.types as is_a

    if is_a.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    kind = values.type
    if is_a.is_null(kind):
        return np.full(len(values), np.nan)
    if is_a.is_boolean(kind):
        values, kind = values.cast(pa.int8()), pa.int8()
    if _is_number(kind) or is_a.is_decimal(kind):
        return values.cast(pa.float64(), safe=False).to_numpy()
    if is_a.is_date(kind) or is_a.is_timestamp(kind):
        return from_numpy(values.cast(pa.timestamp("us")).to_numpy().astype("datetime64[us]"))
    if is_a.is_temporal(kind):
        return Unusable(len(values), TIME_ONLY)
    if is_a.is_string(kind) or is_a.is_large_string(kind) or is_a.is_string_view(kind):
        # One chunk: unifying the dictionaries of many takes quadratic time.
        encoded = values.cast(pa.large_string()).combine_chunks().dictionary_encode()
        return _clean_text(encoded.indices.fill_null(-1).to_numpy(), encoded.dictionary.to_pylist())
    if is_a.is_binary(kind) or is_a.is_large_binary(kind):
        return Unusable(len(values), "is not UTF-8 text; save the file as UTF-8 to use it")
    return Unusable(len(values), f"is of type {kind}, neither numbers nor text")


def _begins_as_archive(path: Path) -> bool:
    """Return whether a file begins like one of gzip, zip (also a spreadsheet) or parquet."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(4).startswith((b"\x1f\x8b", b"PK\x03\x04", b"PAR1"))
    return False


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
            if columns and len(values) != row_count(columns):
                raise ValueError(
                    f"{path}: {part!r} has {len(values)} rows, others {row_count(columns)}: columns differ in length."
                )
            columns[part] = from_numpy(values)
    return columns


def from_numpy(values: np.ndarray) -> Column:
    """Convert an array of N rows to a column.

    >>> from_numpy(np.array(["b", "a", "", "b"]))
    TextColumn(codes=array([ 1,  0, -1,  1]), values=['a', 'b'])
    """
    if values.ndim == 1 and values.dtype.kind in "biuf":
        return values.astype(np.float64)
    if values.ndim == 1 and values.dtype.kind in "SU":
        distinct, codes = np.unique(values, return_inverse=True)
        texts = [v.decode("utf-8", "replace") if isinstance(v, bytes) else v for v in distinct.tolist()]
        return _clean_text(codes, texts)
    if values.ndim == 1 and values.dtype.kind == "M":
        ticks = values.astype("datetime64[us]").astype(np.int64)
        return Dates(np.where(np.isnat(values), np.nan, ticks / MICROSECONDS))
    if values.dtype.kind == "m":
        return Unusable(len(values), TIME_ONLY)
    return Unusable(len(values) if values.ndim else 1, f"is an array {values.shape} of {values.dtype}, not a column")


def _clean_text(codes: np.ndarray, values: list[str]) -> TextColumn:
    """Strip values and mark placeholders for missing values as missing."""
    stripped = [value.strip() for value in values]
    distinct = [value for value in dict.fromkeys(stripped) if value.lower() not in MISSING]
    position = {value: i for i, value in enumerate(distinct)}
    moved = np.array([position.get(value, -1) for value in stripped] + [-1])  # the code -1 finds the last
    return TextColumn(moved[codes], distinct)


def as_text(column: np.ndarray | TextColumn | Dates) -> TextColumn:
    """Write numbers as text, `1` rather than `1.0`, and dates as `2026-11-18` or `2026-11-18T09:30:00`."""
    if isinstance(column, TextColumn):
        return column
    values = column.days if isinstance(column, Dates) else column
    known = ~np.isnan(values)
    distinct, codes = np.unique(values[known], return_inverse=True)
    all_codes = np.full(len(values), -1)
    all_codes[known] = codes
    if isinstance(column, Dates):
        return TextColumn(all_codes, [date_text(day) for day in distinct.tolist()])
    return TextColumn(all_codes, [str(int(v)) if v.is_integer() else repr(v) for v in distinct.tolist()])


def value_text(column: Column, row: int, digits: int = 6) -> str:
    """Return a value as people read it, a number with `digits` digits; an empty text if it is missing."""
    if isinstance(column, TextColumn):
        return "" if column.codes[row] < 0 else column.values[column.codes[row]]
    if isinstance(column, Dates):
        return "" if np.isnan(column.days[row]) else date_text(float(column.days[row]))
    return "" if isinstance(column, Unusable) or np.isnan(column[row]) else f"{column[row]:.{digits}g}"


def date_text(day: float) -> str:
    """Write days since 1970-01-01 as a date, with the time unless it is midnight.

    >>> date_text(1.0), date_text(1.5)
    ('1970-01-02', '1970-01-02T12:00:00')
    """
    if day.is_integer():
        return str(np.datetime64(int(day), "D"))
    return str(np.datetime64(round(day * 86_400), "s"))


def read_dates(text: TextColumn) -> Dates | None:
    """Read a column of text as dates; None if a value is no date.

    >>> read_dates(TextColumn(np.array([0, -1]), ["1970-01-03"]))
    Dates(days=array([ 2., nan]))
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # NumPy warns that it converts time zones to UTC
            found = np.array([*text.values, "NaT"], dtype="datetime64[us]")
    except ValueError:
        return None
    dates = from_numpy(found[text.codes])
    assert isinstance(dates, Dates)
    return dates


def date_in_text(text: TextColumn) -> str | None:
    """Return a value of a column of text if all of them look like dates, such as 18.11.2026; else None.

    >>> date_in_text(TextColumn(np.array([0, 1]), ["18.11.2026", "1.2.2027"]))
    '18.11.2026'
    >>> date_in_text(TextColumn(np.array([0, 1]), ["18.11.2026", "1.2"]))
    """
    dates = all(re.match(r"\d{1,4}([./-])\d{1,2}\1\d{1,4}\b", value) for value in text.values)
    return text.values[0] if text.values and dates else None


NUMBER = re.compile(r"[-+]?[€$£]?\s?(\d+|\d{1,3}([ ,.'\u2019\u00a0\u202f]\d{3})+)([.,]\d+)?\s?[%€$£]?")


def unread_number(text: TextColumn) -> str | None:
    """Return the first value that is no plain number of a column of text that holds hardly anything but numbers.

    >>> unread_number(TextColumn(np.array([0, 1, 2]), ["2", "1,5", "0,7"]))
    '1,5'
    >>> unread_number(TextColumn(np.array([0, 1]), ["12 Main Street", "007"]))
    """
    first = text.values[:1000]
    numbers = sum(is_numeric_text(value) or NUMBER.fullmatch(value) is not None for value in first)
    if not first or numbers < 0.9 * len(first) or date_in_text(text) is not None:
        return None
    return next((value for value in text.values if not is_numeric_text(value)), None)


def is_numeric_text(text: str) -> bool:
    """Return whether `text` can be read as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def take(columns: Columns, index: Tensor | np.ndarray) -> dict[str, Column]:
    """Select the rows at the positions `index`, int64 [n]."""
    i = np.asarray(index)

    def rows(column: Column) -> Column:
        if isinstance(column, Unusable):
            return Unusable(len(i), column.reason)
        if isinstance(column, Dates):
            return Dates(column.days[i])
        return TextColumn(column.codes[i], column.values) if isinstance(column, TextColumn) else column[i]

    return {name: rows(column) for name, column in columns.items()}
