"""Tables from files of every kind, and the preprocessor that makes features of them."""

import json
import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from logitclip.data.dataset import DATASETS
from logitclip.data.table import (
    MAX_LEVELS,
    Category,
    Number,
    Preprocessor,
    Text,
    from_numpy,
    load_table,
    read_table,
    table,
)

pa = pytest.importorskip("pyarrow")


def text(*values):
    return from_numpy(np.array(values))


def shown(column):
    """A column as plain values, None where missing."""
    if isinstance(column, Text):
        return [None if code < 0 else column.values[code] for code in column.codes]
    return [None if np.isnan(value) else value for value in column.tolist()]


def write(path, content):
    path.write_text(content, encoding="utf-8")
    return path


# -- reading ---------------------------------------------------------------------------------------------------------

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


def test_csv_with_blanks_after_the_commas(tmp_path):
    """As the UCI repository's adult.data has them."""
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
    """More than a block of them: a reader that splits at newlines would cut some in two."""
    columns = read_table(write(tmp_path / "x.csv", "a,b\n" + '1,"two\nlines, and a comma"\n' * 100_000))
    assert columns["b"].values == ["two\nlines, and a comma"]
    assert len(columns["a"]) == 100_000


def test_csv_text_on_request_and_compressed(tmp_path):
    import gzip

    (tmp_path / "x.csv.gz").write_bytes(gzip.compress(b"zip,n\n007,1\n010,2\n"))
    assert shown(read_table(tmp_path / "x.csv.gz", text=["zip"])["zip"]) == ["007", "010"]
    assert shown(read_table(tmp_path / "x.csv.gz")["zip"]) == [7, 10]


def test_parquet_of_every_type(tmp_path, caplog):
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
    }
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table(content), path, row_group_size=2)
    with caplog.at_level(logging.WARNING):
        columns = read_table(path)
    assert {name: shown(column) for name, column in columns.items()} == {
        "int": [1, None, 3],
        "half": [0.5, None, 2],
        "decimal": [1.25, None, 2.5],
        "bool": [1, None, 0],
        "date": [1, None, 1],
        "stamp": [1.5, None, 1.5],
        "time": [0.25, None, 0.5],
        "span": [2, None, 0.5],
        "text": ["b", None, "a"],
        "large": ["b", None, "a"],
        "coded": ["b", None, "b"],
        "nothing": [None, None, None],
    }
    assert "column 'list' is left out: list<" in caplog.text


def test_npz(tmp_path, caplog):
    path = tmp_path / "x.npz"
    days = np.array(["1970-01-03", "NaT"], "datetime64[D]")
    arrays = {"x": np.arange(4).reshape(2, 2), "y": np.array(["b", "a"]), "s": np.array([b"u", b"?"]), "when": days}
    np.savez(path, **arrays, image=np.zeros((2, 3, 3)))
    columns = read_table(path)
    assert {name: shown(column) for name, column in columns.items()} == {
        "x0": [0, 2],
        "x1": [1, 3],
        "y": ["b", "a"],
        "s": ["u", None],
        "when": [2, None],
    }
    assert "array 'image' is left out" in caplog.text


def test_wrong_files_are_one_sentence(tmp_path):
    cases = {
        "gone.csv": (None, "There is no file .*gone.csv"),
        "x.xlsx": (b"PK", r"x.xlsx should be a csv, tsv, parquet or npz file"),
        "empty.csv": (b"", r"empty.csv could not be read \(Empty CSV file\)"),
        "header.csv": (b"a,b\n", r"header.csv holds no rows"),
        "ragged.csv": (b"a,b\n1,2\n1,2,3\n", r"ragged.csv could not be read .*Expected 2 columns, got 3"),
        "twice.csv": (b"a,a\n1,2\n", r"twice.csv has two columns called 'a'"),
        "broken.parquet": (b"PAR1 nonsense", r"broken.parquet could not be read"),
        "broken.npz": (b"PK\x03\x04 nonsense", r"broken.npz could not be read"),
        "broken.csv.gz": (b"\x1f\x8b nonsense", r"broken.csv.gz could not be read"),
    }
    for name, (content, message) in cases.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message) as error:
            read_table(tmp_path / name)
        assert "\n" not in str(error.value)
    (tmp_path / "carriage.csv").write_bytes(b"a,b\r1,2\r3,4\r")  # the line ends of old Macs are no mistake
    assert {name: list(values) for name, values in read_table(tmp_path / "carriage.csv").items()} == {
        "a": [1, 3],
        "b": [2, 4],
    }
    np.savez(tmp_path / "uneven.npz", x=np.zeros((3, 2)), y=np.zeros(4))
    with pytest.raises(ValueError, match="'y' has 4 rows and others 3"):
        read_table(tmp_path / "uneven.npz")


def test_text_that_is_not_utf8_is_left_out_by_name(tmp_path, caplog):
    (tmp_path / "x.csv").write_bytes(b"a,b\n1,caf\xe9\n2,x\n")
    assert list(read_table(tmp_path / "x.csv")) == ["a"]
    assert "column 'b' is left out: binary" in caplog.text


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


# -- preprocessing ---------------------------------------------------------------------------------------------------


def test_numbers_are_filled_with_the_median_and_standardised():
    values = np.array([1.0, 2.0, np.nan, 4.0, np.inf])
    prep = Preprocessor.fit({"a": values})
    filled = np.array([1.0, 2.0, 2.0, 4.0, 2.0])
    assert prep.columns == (Number("a", 2.0, filled.mean(), filled.std()),)
    features = prep.transform({"a": values})
    assert features.dtype == torch.float32
    np.testing.assert_allclose(features[:, 0], (filled - filled.mean()) / filled.std(), rtol=1e-6)


def test_levels_others_and_missing_values():
    prep = Preprocessor.fit({"c": text("x", "x", "y", "y", "rare", "?")})
    assert prep.feature_names == ["c=x", "c=y", "c=<other>", "c=<missing>"]
    seen = prep.transform({"c": text("y", "x", "rare", "never seen", "", " x ")})
    assert seen.argmax(1).tolist() == [1, 0, 2, 2, 3, 0]
    assert seen.sum(1).tolist() == [1] * 6


def test_at_most_so_many_levels():
    values = [f"v{i:03}" for i in range(MAX_LEVELS + 6) for _ in range(2 if i < 6 else 3)]
    (column,) = Preprocessor.fit({"c": text(*values)}).columns
    assert column.levels == tuple(f"v{i:03}" for i in range(6, MAX_LEVELS + 6))


def test_useless_columns_are_dropped_and_named(caplog):
    n = 40
    columns = {
        "id": text(*(f"user {i}" for i in range(n))),
        "constant": np.full(n, 0.1),
        "same": text(*["x"] * n),
        "empty": np.full(n, np.nan),
        "blank": text(*[""] * n),
        "kept": np.arange(n, dtype=float),
        "seldom": text(*["x"] * 3, *[""] * (n - 3)),
    }
    prep = Preprocessor.fit(columns)
    assert [column.name for column in prep.columns] == ["kept", "seldom"]
    assert prep.dropped == {
        "id": "is text with 40 different values in 40 rows",
        "constant": "has the same value in every row",
        "same": "has the same value in every row",
        "empty": "has no values",
        "blank": "has no values",
    }
    assert "columns left out: 'id' is text with 40 different values" in caplog.text
    with pytest.raises(ValueError, match="No column is left as a feature: 'a' has the same value in every row"):
        Preprocessor.fit({"a": np.ones(3)})
    with pytest.raises(ValueError, match="there is none beside the label"):
        Preprocessor.fit({})


def test_extreme_numbers():
    """Neither squares nor differences of the largest and smallest floats get in the way."""
    for unit in (1e-300, 1.0, 1e300):
        prep = Preprocessor.fit({"a": unit * np.array([1.0, 2.0, 3.0])})
        np.testing.assert_allclose(prep.transform({"a": unit * np.array([2.0, 3.0])})[:, 0], [0, 1.5**0.5], rtol=1e-6)
        assert prep.transform({"a": np.array([1.7e308, -1.7e308])}).isfinite().all()


def test_other_files_later():
    prep = Preprocessor.fit({"n": np.array([1.0, 3.0, 1, 3]), "c": text("1", "1", "2", "2")})
    same = prep.transform({"n": np.array([3.0]), "c": text("2")})
    assert torch.equal(prep.transform({"new": text("?"), "c": np.array([2.0]), "n": text("3")}), same)
    assert prep.transform({"n": text("?"), "c": np.array([np.nan])}).tolist() == [[0.0, 0, 0, 0, 1]]
    with pytest.raises(ValueError, match=r"There is no column 'n' \(and 1 others\). Known: x."):
        prep.transform({"x": np.zeros(1)})
    with pytest.raises(ValueError, match=r"There is no column 'c'. Did you mean 'cc'?"):
        prep.transform({"n": np.zeros(1), "cc": text("1")})
    with pytest.raises(ValueError, match="Column 'n' held numbers when it was fitted, and now 'many'"):
        prep.transform({"n": text("3", "many"), "c": text("1", "1")})


names = st.text(min_size=1, max_size=8)
numbers = st.lists(st.floats(-1e9, 1e9) | st.just(float("nan")), min_size=6, max_size=6)
words = st.lists(st.sampled_from(["a", "b", "ü", "", "NA", "  c"]), min_size=6, max_size=6)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(names, numbers.map(np.array) | words.map(lambda w: text(*w)), max_size=5))
def test_saved_and_read_back_it_does_the_same(columns):
    columns = {**columns, "sure to stay": np.arange(6.0)}
    prep = Preprocessor.fit(columns)
    features = prep.transform(columns)
    assert features.isfinite().all()
    assert features.shape == (6, len(prep.feature_names))
    again = Preprocessor.from_json(prep.to_json())
    assert again == prep
    assert torch.equal(again.transform(columns), features)


def test_saved_as_json_in_a_file(tmp_path):
    prep = Preprocessor.fit({"n": np.array([1.0, 3.0]), "c": text("x", "")})
    prep.save(tmp_path / "p.json")
    assert Preprocessor.load(tmp_path / "p.json") == prep
    assert [p.name for p in tmp_path.iterdir()] == ["p.json"]
    for wrong in (tmp_path / "none.json", write(tmp_path / "cut.json", prep.to_json()[:40])):
        with pytest.raises(ValueError, match=f"{wrong.name} could not be read"):
            Preprocessor.load(wrong)
    assert json.loads((tmp_path / "p.json").read_text())["columns"][0] == {
        "kind": "number",
        "name": "n",
        "median": 2.0,
        "mean": 2.0,
        "std": 1.0,
    }


@pytest.mark.parametrize(
    "content",
    [
        "not json",
        "[]",
        "{}",
        '{"version": 2, "columns": [], "dropped": {}}',
        '{"version": 1, "columns": [{"kind": "nonsense"}], "dropped": {}}',
        '{"version": 1, "columns": [{"kind": "number", "name": "a"}], "dropped": {}}',
        '{"version": 1, "dropped": {}, "columns": [{"kind": "number", "name": "a", "median": 0, "mean": 0, "std": 0}]}',
        '{"version":1,"dropped":{},"columns":[{"kind":"number","name":"a","median":0,"mean":NaN,"std":1}]}',
    ],
)
def test_something_else_is_not_a_preprocessor(content):
    with pytest.raises(ValueError, match="not a preprocessor saved by logitclip"):
        Preprocessor.from_json(content)


# -- the dataset -----------------------------------------------------------------------------------------------------


@pytest.fixture
def people(tmp_path):
    """100 rows; the label is whether x > 0, wrong in every tenth row."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=100)
    truth = np.where(x > 0, "yes", "no")
    given = np.where(np.arange(100) % 10 == 0, np.where(truth == "yes", "no", "yes"), truth)
    rows = [f"{i},{a:.6f},{'uv'[i % 2]},{g},{t}" for i, (a, g, t) in enumerate(zip(x, given, truth, strict=True))]
    return write(tmp_path / "people.csv", "row,x,group,given,truth\n" + "\n".join(rows) + "\n")


def test_table(people):
    data = DATASETS.build(f"table:path={people},label=given,drop=row,truth,test=0.3")()
    assert data.class_names == ("no", "yes")
    assert data.train.x.shape == (70, 5)
    assert data.test.x.shape == (30, 5)
    assert data.train.clean_labels is None
    np.testing.assert_allclose(data.train.x[:, 0].mean(), 0, atol=1e-6)
    assert abs(float(data.test.x[:, 0].mean())) > 1e-3  # the test rows had no part in it
    assert data.protocol["model"] == "mlp"


def test_the_truth_is_no_feature_and_judges_the_test_rows(people):
    data, prep = load_table(people, "given", clean_label="truth", drop=["row"])
    assert prep.feature_names == ["x", "group=u", "group=v", "group=<other>", "group=<missing>"]
    wrong = data.train.labels != data.train.clean_labels
    assert 0 < int(wrong.sum()) <= 10
    x = data.test.x[:, 0] * prep.columns[0].std + prep.columns[0].mean
    assert torch.equal(data.test.labels, (x > 0).long())


def test_the_split_is_by_its_seed(people):
    first, again, other = (table(path=str(people), label="given", split_seed=s) for s in (0, 0, 1))
    assert torch.equal(first.train.x, again.train.x)
    assert not torch.equal(first.train.x, other.train.x)
    shares = [torch.bincount(d.labels) / len(d.labels) for d in (first.train, first.test)]
    assert torch.allclose(*shares, atol=0.03)


def test_a_file_of_test_rows(people, tmp_path):
    test = write(tmp_path / "test.csv", "extra,truth,x,group,row\n[],yes,1.5,u,3\n[],no,-2,w,4\n")
    data = table(tmp_path, path="people.csv", label="given", clean_label="truth", test_path="test.csv")
    assert len(data.train) == 100
    assert data.test.labels.tolist() == [1, 0]
    assert data.test.x.shape == (2, data.train.x.shape[1])
    write(test, "x,group,row,given\n1,u,3,maybe\n")
    with pytest.raises(ValueError, match=r"test.csv, row 1: 'maybe' is no class of the training data. Known: no, yes"):
        table(tmp_path, path="people.csv", label="given", test_path="test.csv", drop="truth")
    write(test, "x,group,row\n1,u,3\n")
    with pytest.raises(ValueError, match=r"test.csv has no column 'given'"):
        table(tmp_path, path="people.csv", label="given", test_path="test.csv")


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["10", "9", "10", "9", "100", "100"], ("9", "10", "100")),
        (["01", "02", "01", "02"], ("01", "02")),
        (["b", "a", "b", "a"], ("a", "b")),
        (["true", "false", "true", "false"], ("false", "true")),
        (["0.5", "1.5", "1.5", "0.5"], ("0.5", "1.5")),
    ],
)
def test_class_names_are_the_labels_sorted(tmp_path, labels, names):
    path = write(tmp_path / "x.csv", "x,y\n" + "".join(f"{i},{label}\n" for i, label in enumerate(labels)))
    data, _ = load_table(path, "y", test=0.5)
    assert data.class_names == names


def test_npz_labels(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "x.npz", x=rng.normal(size=(40, 3)).astype("f4"), y=np.arange(40) % 4)
    data, _ = load_table(tmp_path / "x.npz", "y", test=0.25)
    assert data.class_names == ("0", "1", "2", "3")
    assert torch.bincount(data.test.labels).tolist() == [2, 2, 2, 2]


def test_wrong_labels_are_one_sentence(people, tmp_path):
    with pytest.raises(ValueError, match=r"people.csv has no column 'gvien'. Did you mean 'given'?"):
        table(path=str(people), label="gvien")
    with pytest.raises(ValueError, match=r"people.csv has no column 'rwo'. Did you mean 'row'?"):
        table(path=str(people), label="given", drop="rwo")
    with pytest.raises(ValueError, match="the label 'row' has 100 different values in 100 rows: those are no classes"):
        table(path=str(people), label="row")
    with pytest.raises(ValueError, match=r"test must be a share between 0 and 1, got 2.0"):
        table(path=str(people), label="given", test=2.0)
    path = write(tmp_path / "x.csv", "x,y\n1,a\n2,b\n3,\n4,a\n5,?\n")
    with pytest.raises(ValueError, match=r"x.csv, row 3: the label 'y' is missing \(and in 1 other rows\); fill it in"):
        load_table(path, "y")
    path = write(tmp_path / "x.csv", "x,y\n1,a\n2,a\n3,a\n")
    with pytest.raises(ValueError, match="the label 'y' has 1 different values; at least two"):
        load_table(path, "y")
    with pytest.raises(ValueError, match=r"There is no file nowhere/x.csv"):
        table("nowhere", path="x.csv", label="y")
    with pytest.raises(ValueError, match="needs 'path'"):
        DATASETS.build("table")


def test_a_row_may_be_as_wide_as_it_likes():
    """One code path for any number of columns."""
    columns = {f"c{i}": np.arange(5.0) + i for i in range(300)}
    assert Preprocessor.fit(columns).transform(columns).shape == (5, 300)
    assert isinstance(Preprocessor.fit({"c": text("a", "a", "b")}).columns[0], Category)
