"""A table as a dataset."""

import numpy as np
import pytest
import torch
from tensors import as_tensor

from logitclip.data._columns import TextColumn, read_dates, read_table
from logitclip.data._loading import Part
from logitclip.data.dataset import DATASETS, defaults_of
from logitclip.data.table import Roles, load_table, table

pytest.importorskip("pyarrow")


def write(path, content):
    path.write_text(content, encoding="utf-8")
    return path


@pytest.mark.filterwarnings("error")
def test_times_with_a_zone_are_read_as_utc():
    dates = read_dates(TextColumn(np.arange(2), ["1970-01-02 00:00:00Z", "1970-01-02 01:00:00+01:00"]))
    assert dates is not None
    assert dates.days.tolist() == [1, 1]


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
    assert data.train.x.shape == (70, 3)
    assert data.test.x.shape == (30, 3)
    assert data.train.clean_labels is None
    np.testing.assert_allclose(data.train.x[:, 0].mean(), 0, atol=1e-6)
    assert abs(float(data.test.x[:, 0].mean())) > 1e-3  # fitted without the test rows
    assert defaults_of("table:path=x,label=y")["model"] == "mlp"


def test_the_truth_is_no_feature_and_judges_the_test_rows(people):
    data, prep = load_table(people, Roles("given", "truth", drop=["row"]))
    assert prep.kinds == {"x": "number", "group": "category"}
    wrong = data.train.labels != data.train.clean_labels
    assert 0 < int(wrong.sum()) <= 10
    scaler = prep.transformer.named_transformers_["numbers"][-1]
    x = data.test.x[:, 0] * scaler.scale_[0] + scaler.mean_[0]
    assert torch.equal(data.test.labels, (x > 0).long())


def test_every_row_is_held_out_once_and_knows_its_number(people):
    folds = [table(path=str(people), label="given", drop="truth", fold=k) for k in range(5)]
    assert sorted(row for data in folds for row in data.test.rows.tolist()) == list(range(100))
    given = read_table(people, text=["given"])["given"]
    assert isinstance(given, TextColumn)
    for split in (folds[3].train, folds[3].test):
        assert [given.values[given.codes[row]] for row in split.rows] == [
            folds[3].class_names[label] for label in split.labels
        ]


def test_a_column_of_image_files(tmp_path):
    Image = pytest.importorskip("PIL.Image")
    for i in range(10):
        Image.new("RGB", (9, 9), (255 * (i % 2), 0, 0)).save(tmp_path / f"{i}.png")
    rows = "".join(f"{i}.png,{i},{'ab'[i % 2]}\n" for i in range(10))
    write(tmp_path / "x.csv", "file,other,y\n" + rows)
    data = table(tmp_path, path="x.csv", label="y", image="file", size=8, memory=True)
    assert data.class_names == ("a", "b")
    assert torch.equal(data.train.x[:, 0, 0, 0] // 255, data.train.labels)
    write(tmp_path / "x.csv", "file,y\n" + "gone.png,a\n0.png,b\n" * 3)
    with pytest.raises(ValueError, match=r"x.csv, line 2: there is no image .*gone.png \(and 2 others\)"):
        table(tmp_path, path="x.csv", label="y", image="file")
    write(tmp_path / "x.csv", "file,y\n" + "0.png,a\n,b\n" * 3)
    with pytest.raises(ValueError, match=r"x.csv, row 2: the image file 'file' is missing \(and in 2 other rows\)"):
        table(tmp_path, path="x.csv", label="y", image="file")


def test_the_truth_about_image_files(tmp_path):
    """The colour tells the true class; every tenth label is wrong."""
    Image = pytest.importorskip("PIL.Image")
    rows = "file,given,truth\n"
    for i in range(20):
        Image.new("RGB", (8, 8), (255 * (i % 2), 0, 0)).save(tmp_path / f"{i}.png")
        rows += f"{i}.png,{'ab'[(i + (i % 10 == 0)) % 2]},{'ab'[i % 2]}\n"
    write(tmp_path / "x.csv", rows)
    spec = f"table:path={tmp_path / 'x.csv'},label=given,image=file,size=8,memory=true"
    folds = [DATASETS.build(f"{spec},clean_label=truth,fold={k}")() for k in range(5)]
    for data in folds:
        assert torch.equal(as_tensor(data.train.x)[:, 0, 0, 0] // 255, as_tensor(data.train.clean_labels))
        assert torch.equal(as_tensor(data.test.x)[:, 0, 0, 0] // 255, data.test.labels)
    assert sum(int((data.train.labels != data.train.clean_labels).sum()) for data in folds) == 2 * 4
    for knob in ("drop=truth", "text=truth", f"test_path={tmp_path / 'x.csv'}"):
        with pytest.raises(ValueError, match=f"^{knob.partition('=')[0]} is not for a table of images: leave it out"):
            DATASETS.build(f"{spec},{knob}")()
    with pytest.raises(ValueError, match=r"x.csv has no column 'turth'. Did you mean 'truth'"):
        DATASETS.build(f"{spec},clean_label=turth")()


def test_a_column_of_text(tmp_path):
    rows = "".join(f"{i},this is a text about {w} and more,{w[0]}\n" for i, w in enumerate(["sea", "hill"] * 10))
    write(tmp_path / "x.csv", "n,words,y\n" + rows)
    data = table(tmp_path, path="x.csv", label="y", drop="n", text="words")
    assert as_tensor(data.train.x).shape[1] > 10
    with pytest.raises(ValueError, match=r"x.csv has no column 'wrods'. Did you mean 'words'"):
        table(tmp_path, path="x.csv", label="y", text="wrods")


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
    assert as_tensor(data.test.x).shape == (2, as_tensor(data.train.x).shape[1])
    assert data.test.rows.tolist() == [0, 1]
    write(test, "x,group,row,given\n1,u,3,maybe\n")
    with pytest.raises(ValueError, match=r"test.csv, row 1: 'maybe' is not a class of the training data. Known: no"):
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
    data, _ = load_table(path, Roles("y"), test=Part(0.5))
    assert data.class_names == names


def test_npz_labels(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "x.npz", x=rng.normal(size=(40, 3)).astype("f4"), y=np.arange(40) % 4)
    data, _ = load_table(tmp_path / "x.npz", Roles("y"), test=Part(0.25))
    assert data.class_names == ("0", "1", "2", "3")
    assert torch.bincount(data.test.labels).tolist() == [2, 2, 2, 2]


def test_wrong_labels_are_one_sentence(people, tmp_path):
    with pytest.raises(ValueError, match=r"people.csv has no column 'gvien'. Did you mean 'given'?"):
        table(path=str(people), label="gvien")
    with pytest.raises(ValueError, match=r"people.csv has no column 'rwo'. Did you mean 'row'?"):
        table(path=str(people), label="given", drop="rwo")
    with pytest.raises(
        ValueError, match="the label 'row' has 100 different values in 100 rows: too many to be classes"
    ):
        table(path=str(people), label="row")
    with pytest.raises(ValueError, match=r"test must be a share between 0 and 1, got 2.0"):
        table(path=str(people), label="given", test=2.0)
    path = write(tmp_path / "x.csv", "x,y\n1,a\n2,b\n3,\n4,a\n5,?\n")
    with pytest.raises(ValueError, match=r"x.csv, row 3: the label 'y' is missing \(and in 1 other rows\); fill it in"):
        load_table(path, Roles("y"))
    path = write(tmp_path / "x.csv", "x,y\n1,a\n2,a\n3,a\n")
    with pytest.raises(ValueError, match="the label 'y' is 'a' in every row; at least two classes"):
        load_table(path, Roles("y"))
    with pytest.raises(ValueError, match=r"There is no file nowhere/x.csv"):
        table("nowhere", path="x.csv", label="y")
    with pytest.raises(ValueError, match="needs 'path'"):
        DATASETS.build("table")


@pytest.fixture
def visits(tmp_path):
    """60 visits of 12 patients, one a day; the label has nothing to do with either."""
    rows = [f"p{i % 12},2024-{1 + i // 28:02}-{1 + i % 28:02},{i % 7},{'ab'[i % 2]}" for i in range(60)]
    return write(tmp_path / "visits.csv", "patient,day,x,kind\n" + "\n".join(rows) + "\n")


def test_no_group_is_trained_on_and_tested(visits):
    folds = [table(path=str(visits), label="kind", group="patient", fold=k) for k in range(5)]
    for data in folds:
        assert not {row % 12 for row in data.train.rows.tolist()} & {row % 12 for row in data.test.rows.tolist()}
        assert as_tensor(data.train.x).shape[1] == 1  # neither the group nor a date is a feature
    assert sorted(row for data in folds for row in data.test.rows.tolist()) == list(range(60))


def test_the_latest_rows_are_tested(visits):
    folds = [table(path=str(visits), label="kind", drop="patient", time="day", fold=k) for k in range(4)]
    assert folds[0].test.rows.tolist() == list(range(48, 60))
    assert folds[3].train.rows.tolist() == list(range(12))
    for data in folds:
        assert data.train.rows.max() < data.test.rows.min()


def test_dates_are_features_if_asked_for(visits):
    data, prep = load_table(visits, Roles("kind", drop=["patient"], dates=True))
    assert prep.kinds == {"day": "date", "x": "number"}
    assert torch.as_tensor(data.train.x).shape[1] == 8
    _, prep = load_table(visits, Roles("kind", drop=["patient"]))
    assert prep.dropped == {"day": "holds dates; to use them, give dates=True"}


@pytest.mark.parametrize(
    ("knobs", "sentence"),
    [
        ({"group": "patients"}, "has no column 'patients'. Did you mean 'patient'"),
        ({"group": "patient", "time": "day"}, "either group or time"),
        ({"group": "patient", "test": 0.05}, "at least 20 groups, got 12"),
        ({"time": "day", "fold": 4}, r"fold must be in 0..3 for test=0.2, got 4"),
        ({"time": "day", "test_path": "visits.csv"}, "leave them out beside a file of test rows"),
    ],
)
def test_splits_that_cannot_be_made(knobs, sentence, visits):
    with pytest.raises(ValueError, match=sentence):
        table(root=visits.parent, path="visits.csv", label="kind", **knobs)
