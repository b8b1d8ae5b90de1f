"""Columns from files of every kind."""

import numpy as np
import pytest

from logitclip.data import _columns
from logitclip.data._columns import Dates, TextColumn, Unusable, as_text, from_frame, read_table, take

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def reason(column) -> str:
    assert isinstance(column, Unusable)
    return column.reason


def shown(column):
    """Return a column as plain values, None where missing."""
    if isinstance(column, Unusable):
        return column.reason
    if isinstance(column, TextColumn):
        return [None if code < 0 else column.values[code] for code in column.codes]
    numbers = column.days if isinstance(column, Dates) else column
    return [None if np.isnan(value) else value for value in numbers.tolist()]


def write(path, content):
    path.write_text(content, encoding="utf-8")
    return path


ROWS = """age,city,member,since,score
39, Paris ,true,1970-01-02,1.5
?,Rome,false,1970-01-03,
41,,,,nan
40,Paris,true,1970-01-04,-2
"""
EXPECTED = {
    "age": [39, None, 41, 40],
    "city": ["Paris", "Rome", None, "Paris"],
    "member": [1, 0, None, 1],
    "since": [1, 2, None, 3],
    "score": [1.5, None, None, -2],
}


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_csv(tmp_path, delimiter):
    path = write(tmp_path / "x.csv", "\ufeff" + ROWS.replace(",", delimiter))
    assert {name: shown(column) for name, column in read_table(path).items()} == EXPECTED


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_csv_with_decimal_commas(tmp_path, delimiter):
    rows = ["height;weight;code;kind", "1,5;70;007;a,b", "-2,25e1;80,5;1,2;c", ";;3;c"]
    path = write(tmp_path / "x.csv", "\n".join(rows).replace(";", delimiter))
    assert {name: shown(column) for name, column in read_table(path, text=["code"]).items()} == {
        "height": [1.5, -22.5, None],
        "weight": [70, 80.5, None],
        "code": ["007", "1,2", "3"],
        "kind": ["a,b", "c", "c"],
    }


def test_a_lone_zero_before_the_comma_tells_decimals_from_thousands(tmp_path):
    path = write(tmp_path / "x.csv", "\ufeffheight;kind\n1,125;a\n-0,250;b\n")
    assert shown(read_table(path)["height"]) == [1.125, -0.25]


def test_decimal_points_are_kept_beside_commas_in_text(tmp_path):
    path = write(tmp_path / "x.csv", "a;b;c\n1.5;2.5;1,2\n3.5;4.5;3,4\n")
    assert {name: shown(column) for name, column in read_table(path).items()} == {
        "a": [1.5, 3.5],
        "b": [2.5, 4.5],
        "c": ["1,2", "3,4"],
    }


def test_separated_thousands_stay_text(tmp_path):
    path = write(tmp_path / "x.tsv", "price\ty\n1,234\ta\n999\tb\n12,500\ta\n")
    assert shown(read_table(path)["price"]) == ["1,234", "999", "12,500"]


def test_csv_with_blanks_after_the_commas(tmp_path):
    """As in adult.data of the UCI repository."""
    path = write(tmp_path / "x.csv", "age, work, hours\n39, State-gov, 40\n50, ?, ?\n")
    assert {name: shown(column) for name, column in read_table(path).items()} == {
        "age": [39, 50],
        "work": ["State-gov", None],
        "hours": [40, None],
    }


def test_csv_types_are_inferred_from_every_row(tmp_path):
    path = write(tmp_path / "x.csv", "a,b\n" + "1,2\n" * 400_000 + "1.5,two\n")
    columns = read_table(path)
    assert columns["a"][-1] == 1.5
    assert shown(columns["b"])[-2:] == ["2", "two"]


def test_csv_with_newlines_in_values(tmp_path):
    """More than one block of quoted newlines: a reader that splits at newlines would cut some values in two."""
    columns = read_table(write(tmp_path / "x.csv", "a,b\n" + '1,"two\nlines, and a comma"\n' * 100_000))
    assert isinstance(columns["b"], TextColumn)
    assert columns["b"].values == ["two\nlines, and a comma"]
    assert len(columns["a"]) == 100_000


def test_csv_text_on_request_and_compressed(tmp_path):
    import gzip

    (tmp_path / "x.csv.gz").write_bytes(gzip.compress(b"zip,n\n007,1\n010,2\n"))
    assert shown(read_table(tmp_path / "x.csv.gz", text=["zip"])["zip"]) == ["007", "010"]
    assert shown(read_table(tmp_path / "x.csv.gz")["zip"]) == [7, 10]
    (tmp_path / "x.csv.gz").rename(tmp_path / "UPPER.CSV.GZ")
    assert shown(read_table(tmp_path / "UPPER.CSV.GZ")["n"]) == [1, 2]


def test_parquet_of_every_type(tmp_path):
    import datetime as dt
    from decimal import Decimal

    import pyarrow.parquet as pq

    day = dt.datetime(1970, 1, 2, 12, tzinfo=dt.UTC)
    content = {
        "int": pa.array([1, None, 3], pa.uint64()),
        "half": pa.array([np.float16(0.5), None, np.float16(2)], pa.float16()),
        "decimal": pa.array([Decimal("1.25"), None, Decimal("2.50")]),
        "bool": pa.array([True, None, False]),
        "date": pa.array([day.date(), None, day.date()]),
        "stamp": pa.array([day, None, day], pa.timestamp("ns", "UTC")),
        "time": pa.array([dt.time(6), None, dt.time(12)], pa.time32("s")),
        "span": pa.array([dt.timedelta(days=2), None, dt.timedelta(hours=12)]),
        "text": pa.array(["b", None, "a"]),
        "large": pa.array(["b", None, "a"], pa.large_string()),
        "coded": pa.array(["b", None, "b"]).dictionary_encode(),
        "nothing": pa.nulls(3),
        "list": pa.array([[1], None, [2, 3]]),
        "bytes": pa.array([b"x", None, b"y"]),
    }
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table(content), path, row_group_size=2)
    columns = read_table(path)
    reasons = {name: reason(columns.pop(name)) for name in ("time", "span", "list", "bytes")}
    assert {name: shown(column) for name, column in columns.items()} == {
        "int": [1, None, 3],
        "half": [0.5, None, 2],
        "decimal": [1.25, None, 2.5],
        "bool": [1, None, 0],
        "date": [1, None, 1],
        "stamp": [1.5, None, 1.5],
        "text": ["b", None, "a"],
        "large": ["b", None, "a"],
        "coded": ["b", None, "b"],
        "nothing": [None, None, None],
    }
    assert all(reasons[name].startswith("is a duration or a time of day") for name in ("time", "span"))
    assert reasons["list"] == "holds lists of 1 to 2 numbers; vectors must have one length"
    assert reasons["bytes"].startswith("is not UTF-8 text")


def test_npz(tmp_path):
    path = tmp_path / "x.npz"
    days = np.array(["1970-01-03", "NaT"], "datetime64[D]")
    arrays = {"x": np.arange(4).reshape(2, 2), "y": np.array(["b", "a"]), "s": np.array([b"u", b"?"]), "when": days}
    np.savez(path, **arrays, image=np.zeros((2, 3, 3)))
    columns = read_table(path)
    assert shown(columns.pop("when")) == [2, None]
    assert columns.pop("image") == Unusable(2, "is an array (2, 3, 3) of float64, not a column")
    assert {name: shown(column) for name, column in columns.items()} == {
        "x0": [0, 2],
        "x1": [1, 3],
        "y": ["b", "a"],
        "s": ["u", None],
    }


def test_data_frames():
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"n": [1, 2], "f": [0.5, None], "t": ["a", None], "c": pd.Categorical(["x", "y"])})
    frame["mixed"], frame["when"] = [1, "one"], pd.to_datetime(["2020-01-01", "2020-01-02"])
    columns = from_frame(frame)
    assert shown(columns.pop("when")) == [18262, 18263]
    assert {name: shown(column) for name, column in columns.items()} == {
        "n": [1, 2],
        "f": [0.5, None],
        "t": ["a", None],
        "c": ["x", "y"],
        "mixed": ["1", "one"],
    }
    with pytest.raises(ValueError, match="The data frame has two columns called 'n'; rename one"):
        from_frame(pd.concat([frame[["n"]], frame[["n"]]], axis=1))


def test_wrong_files_are_one_sentence(tmp_path):
    cases = {
        "gone.csv": (None, "There is no file .*gone.csv"),
        "x.xlsx": (b"PK", r"x.xlsx is a spreadsheet: save the sheet as csv"),
        "x.txt": (b"a,b", r"Unknown format of a table: .*x.txt. Use .csv, .tsv"),
        "empty.csv": (b"", r"empty.csv could not be read \(Empty CSV file\)"),
        "header.csv": (b"a,b\n", r"header.csv holds no rows"),
        "ragged.csv": (b"a,b\n1,2\n1,2,3\n", r"ragged.csv could not be read .*Expected 2 columns, got 3"),
        "twice.csv": (b"a,a\n1,2\n", r"twice.csv has two columns called 'a'"),
        "broken.parquet": (b"PAR1 nonsense", r"broken.parquet could not be read"),
        "packed.csv": (
            b"\x1f\x8b\x08\x00,\n1\n1,2,3\n",
            r"packed.csv could not be read \(it is compressed, or of another",
        ),
        "broken.npz": (b"PK\x03\x04 nonsense", r"broken.npz could not be read"),
        "latin.csv": ("größe,b\n1,2\n".encode("latin-1"), r"latin.csv could not be read \(.*; save it as UTF-8"),
        "wide.csv": (
            "a,b\n1,2\n".encode("utf-16"),
            r"wide.csv could not be read \(its text is utf-16\); save it as UTF-8",
        ),
        "broken.csv.gz": (b"\x1f\x8b nonsense", r"broken.csv.gz could not be read"),
    }
    for name, (content, message) in cases.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message) as error:
            read_table(tmp_path / name)
        assert "\n" not in str(error.value)
    (tmp_path / "carriage.csv").write_bytes(b"a,b\r1,2\r3,4\r")  # old Mac line ends are valid
    assert {name: list(values) for name, values in read_table(tmp_path / "carriage.csv").items()} == {
        "a": [1, 3],
        "b": [2, 4],
    }
    np.savez(tmp_path / "uneven.npz", x=np.zeros((3, 2)), y=np.zeros(4))
    with pytest.raises(ValueError, match="'y' has 4 rows, others 3"):
        read_table(tmp_path / "uneven.npz")


def test_a_file_that_must_not_be_read_needs_no_repair(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Failed to open local file. Detail: [errno 13] Permission denied")

    monkeypatch.setattr(_columns, "_open_file", refuse)
    for name in ("x.csv", "x.parquet"):
        (tmp_path / name).touch()
        with pytest.raises(ValueError, match=rf"{name} could not be read: Permission denied\.$"):
            read_table(tmp_path / name)


def test_text_that_is_not_utf8_has_a_reason(tmp_path):
    (tmp_path / "x.csv").write_bytes(b"a,b\n1,caf\xe9\n2,x\n")
    assert reason(read_table(tmp_path / "x.csv")["b"]).startswith("is not UTF-8 text; save the file as UTF-8")
    with pytest.raises(ValueError, match=r"x.csv could not be read \(.*invalid UTF8 data.*; save it as UTF-8"):
        read_table(tmp_path / "x.csv", text=["b"])


def test_a_pickle_in_an_npz_is_not_opened(tmp_path):
    class Trap:
        def __reduce__(self):
            return (write, (tmp_path / "sprung", "x"))

    np.savez(tmp_path / "x.npz", x=np.array([Trap()], dtype=object))
    with pytest.raises(ValueError, match=r"x.npz could not be read \(Object arrays cannot be loaded"):
        read_table(tmp_path / "x.npz")
    assert not (tmp_path / "sprung").exists()


def test_without_pyarrow_the_extra_is_named_and_npz_still_works(tmp_path, monkeypatch):
    np.savez(tmp_path / "x.npz", x=np.zeros((3, 2)))
    write(tmp_path / "x.csv", "a\n1\n")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    assert list(read_table(tmp_path / "x.npz")) == ["x0", "x1"]
    with pytest.raises(ImportError, match=r"pip install 'logitclip\[data\]'"):
        read_table(tmp_path / "x.csv")


@pytest.mark.parametrize("kind", ["list", "large", "fixed", "frame"])
def test_a_column_of_vectors_becomes_numbered_columns(tmp_path, kind):
    vectors = [[1.5, 2.0, 3.0], None, [4.0, 5.0, 6.5]]
    if kind == "frame":
        pd = pytest.importorskip("pandas")
        columns = from_frame(pd.DataFrame({"id": [7, 8, 9], "v": [np.array(v) if v else None for v in vectors]}))
    else:
        types = {"list": pa.list_(pa.float32()), "large": pa.large_list(pa.float64()), "fixed": pa.list_(pa.int8(), 3)}
        vectors = [[1, 2, 3], None, [4, 5, 6]]
        path = tmp_path / "vectors.parquet"
        parquet.write_table(pa.table({"id": [7, 8, 9], "v": pa.array(vectors, types[kind])}), path)
        columns = read_table(path)
    assert list(columns) == ["id", "v0", "v1", "v2"]
    np.testing.assert_array_equal(columns["v2"], [3.0, np.nan, vectors[2][2]])


def test_vectors_may_not_share_a_name_with_a_column(tmp_path):
    path = tmp_path / "vectors.parquet"
    parquet.write_table(pa.table({"v0": [1, 2], "v": [[1.0, 2.0], [3.0, 4.0]]}), path)
    with pytest.raises(ValueError, match="two columns called 'v0'; rename one"):
        read_table(path)


def test_dates_as_text_and_rows_of_them():
    dates = Dates(np.array([0.5, np.nan, 1.0]))
    text = as_text(dates)
    assert [None if code < 0 else text.values[code] for code in text.codes] == [
        "1970-01-01T12:00:00",
        None,
        "1970-01-02",
    ]
    kept = take({"when": dates}, np.array([2]))["when"]
    assert isinstance(kept, Dates)
    assert kept.days.tolist() == [1.0]
