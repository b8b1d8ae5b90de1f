"""Own data end to end: fit, the model folder, predict, issues. Small data, few epochs."""

import gzip
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import scipy.sparse
import torch

import logitclip as lc
from logitclip import files
from logitclip.data._columns import read_table
from logitclip.files import object_digest
from logitclip.own_data import facts, find_issues, fitting, planning
from logitclip.own_data.combining import Vote, adjust_for_classes, combine, share_out, weigh
from logitclip.own_data.folds import make_folds
from logitclip.own_data.images import Images
from logitclip.own_data.issues import SURE, count_marked, find_suggestion, judge_labels, make_less_sure, show_values
from logitclip.own_data.kind import RowNumbers, Rows
from logitclip.own_data.labelled import match_classes
from logitclip.own_data.learners import Forest, Logistic, Neighbours
from logitclip.own_data.parts import Parts
from logitclip.own_data.planning import make_plan
from logitclip.own_data.source import Options, look, look_again
from logitclip.own_data.tables import Table
from logitclip.runs.train import train
from logitclip.text import guard_formula, unguard_formula

QUICK = {"epochs": 6}


@pytest.fixture(scope="module")
def people(tmp_path_factory):
    """Three classes by two numbers and a category; 20 % of the labels are the next class."""
    rng = np.random.default_rng(0)
    true = np.arange(600) % 3
    x = np.array([[0, 0], [6, 0], [0, 6]])[true] + rng.normal(size=(600, 2))
    given = np.where(rng.random(600) < 0.2, (true + 1) % 3, true)
    frame = pd.DataFrame({"x": x[:, 0], "y": x[:, 1], "town": np.array(["ab", "cd"])[true % 2], "id": np.arange(600)})
    frame.loc[::50, "x"] = None
    frame["kind"] = np.array(["red", "green", "blue"])[given]
    path = tmp_path_factory.mktemp("people") / "people.csv"
    frame.to_csv(path, index=False)
    return path, frame, true, given


@pytest.fixture(scope="module")
def fitted(people, tmp_path_factory):
    out = tmp_path_factory.mktemp("fitted") / "model"
    return lc.fit(people[0], label="kind", out=out, **QUICK)


def test_the_model_learns_the_true_classes(people, fitted):
    _, frame, true, _ = people
    predicted = fitted.predict(frame)
    assert list(predicted.columns) == ["row", "class", "probability"]
    assert (predicted["class"] == np.array(["red", "green", "blue"])[true]).mean() > 0.95
    assert predicted["probability"].between(1 / 3, 1).all()
    assert predicted["row"].tolist()[:2] == ["1", "2"]


def test_the_noise_is_estimated(fitted):
    low, high = fitted.noise["rate_interval"]
    assert low <= 0.2 <= high
    blue, green, red = fitted.class_names
    assert (blue, green, red) == ("blue", "green", "red")
    assert fitted.noise["matrix"][2][1] == pytest.approx(0.2, abs=0.08)  # red given as green
    assert 0.7 < fitted.facts["noisy_accuracy"] < 0.95


def test_the_wrong_labels_are_found(people, fitted):
    _, _, true, given = people
    issues = fitted.issues
    assert sorted(issues["row"].astype(int)) == list(range(1, 601))
    assert issues["score"].is_monotonic_decreasing
    wrong = (given != true)[issues["row"].astype(int) - 1]
    assert wrong[: wrong.sum()].mean() > 0.9
    flagged = issues[(issues["suggested"] != issues["given"]) & (issues["suggested"] != "")]
    rows = flagged["row"].astype(int) - 1
    assert len(flagged) > 30
    assert (flagged["suggested"] == np.array(["red", "green", "blue"])[true[rows]]).mean() > 0.9
    assert issues["score"].sum() == pytest.approx((given != true).sum(), rel=0.4)  # scores are probabilities


def test_the_folder_has_no_pickle_and_a_fresh_process_predicts_the_same(people, fitted, tmp_path):
    path, frame, _, _ = people
    names = {file.name for file in fitted.folder.iterdir() if not file.name.startswith(".")}
    files = {*fitted.facts["files"], "model.json", "issues.csv", "page.html"}
    assert names == files  # the parts of the fit are gone
    assert {name.rpartition(".")[2] for name in names} == {"json", "csv", "html", "safetensors", "skops", "npz"}
    subprocess.run(
        [sys.executable, "-m", "logitclip", "predict", fitted.folder, path, "-o", tmp_path / "out.csv"],
        check=True,
    )
    again = pd.read_csv(tmp_path / "out.csv", dtype={"row": str})
    pd.testing.assert_frame_equal(again, fitted.predict(frame), check_dtype=False)


def test_the_page_shows_noise_accuracy_and_rows(fitted):
    page = (fitted.folder / "page.html").read_text(encoding="utf-8")
    assert "of the labels are wrong" in page
    assert f'style="width: {fitted.facts["noisy_accuracy"]:.1%}"' in page
    assert fitted.noise_summary in page
    assert fitted.accuracy_summary in page
    assert page.count("<tr") > 60
    shown = fitted.issues.head(60)
    unclear = shown["suggested"] == ""
    assert page.count('<td class="suggested">?</td>') == unclear.sum()


@pytest.mark.parametrize("clip", ["norm:temp=2.5", "none"])
def test_the_accuracy_of_the_model_is_that_of_its_learner_if_there_is_one(people, tmp_path, clip):
    model = lc.fit(people[0], "kind", out=tmp_path, learner="network", clip=clip, epochs=30)
    (network,) = model.facts["learners"]
    assert model.facts["noisy_accuracy"] == network["noisy_accuracy"]  # networks that have seen a label do not count


def test_a_marked_label_is_never_its_own_suggestion(blobs):
    source, _ = blobs
    given = source.labels
    other, wrong = (given + 1) % 3, np.ones(450, bool)
    for suggested, marked, expected in ((other, wrong, other), (given, wrong, None), (given, ~wrong, given)):
        found = find_suggestion(SimpleNamespace(suggested=suggested, wrong=marked), 7, source)
        assert found == ("" if expected is None else source.class_names[expected[7]])


def test_columns_missing_unknown_and_new(people, fitted, caplog):
    _, frame, _, _ = people
    with pytest.raises(ValueError, match=r"There is no column 'town'. Did you mean 'twon'"):
        fitted.predict(frame.rename(columns={"town": "twon"}))
    strange = frame.head(3).assign(town="never seen", extra=1)
    assert len(fitted.predict(strange)) == 3
    assert "column 'town' has values that the model does not know: 'never seen'; they count as rare" in caplog.text
    with pytest.raises(ValueError, match="Column 'x' held numbers when the model was fitted, now it holds 'many'"):
        fitted.predict(frame.head(3).assign(x="many"))
    new = frame.head(4).assign(kind=["red", "green", "blue", "violet"])
    sentence = fitted.agreement(new, fitted.predict(new))
    assert "75.0% agree with the column 'kind'" in sentence
    assert "If 20% of these labels are wrong, even the true classes agree with only about 80%." in sentence
    assert "1 class is new to the model and counted as wrong: violet" in sentence
    some = new.assign(kind=["red", None, "blue", None])
    assert "100.0% agree" in fitted.agreement(some, fitted.predict(some))
    odd = new.assign(kind=[b"caf\xe9"] * 4)
    assert "They cannot be compared with the column 'kind'" in fitted.agreement(odd, fitted.predict(odd))
    none = new.assign(kind=None)
    assert fitted.agreement(none, fitted.predict(none)) is None
    for one, other in ((new, new[:3]), (new[:3], new)):  # the file has changed meanwhile
        sentence = str(fitted.agreement(one, fitted.predict(other)))
        assert sentence == (
            f"They cannot be compared with the column 'kind': there are {len(one)} labels for {len(other)} rows."
        )


def test_the_index_of_a_data_frame_is_no_feature_and_mixed_values_are_text(people, tmp_path):
    class Planned(Exception):
        pass

    def stop(plan):
        raise Planned(plan)

    frame = people[1].sample(frac=1, random_state=0).drop(columns="id")
    frame["town"] = frame["town"].where(frame["town"] == "ab", 7)
    with pytest.raises(Planned) as stopped:
        lc.fit(frame, "kind", drop="y", out=tmp_path, on_plan=stop, **QUICK)
    assert stopped.value.args[0].source.used == {"x": "number", "town": "category"}
    with pytest.raises(ValueError, match="fit has no option 'runs'"):
        lc.fit(frame, "kind", out=tmp_path, runs="elsewhere", **QUICK)


@pytest.fixture
def copied(fitted, tmp_path):
    """A copy of the fitted model folder, and a function that changes its model.json with a digest that matches."""
    folder = tmp_path / "model"
    shutil.copytree(fitted.folder, folder, ignore=shutil.ignore_patterns(".*"))

    def change(*removed, **changed):
        content = {**fitted.facts, **changed}
        content = {name: value for name, value in content.items() if name not in removed}
        (folder / "model.json").write_text(json.dumps({**content, "digest": object_digest(content)}), encoding="utf-8")

    return folder, change


def test_a_damaged_folder_is_one_sentence(copied, tmp_path):
    folder, change = copied
    with pytest.raises(ValueError, match=r"is not a model folder: it has no model.json"):
        lc.load(tmp_path)
    change(format=99)
    with pytest.raises(ValueError, match="its format is 99, not 2"):
        lc.load(folder)
    (folder / "model.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(ValueError, match=r"model.json holds no object"):
        lc.load(folder)


@pytest.mark.parametrize("name", ["weights.safetensors", "preprocessing.skops", "model.json"])
def test_one_changed_byte_is_noticed(name, copied):
    folder, _ = copied
    content = bytearray((folder / name).read_bytes())
    at = content.index(b'"temperature": ') + 15 if name == "model.json" else len(content) // 2
    content[at] = ord("7") if content[at] != ord("7") else ord("8")
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"The model in .* cannot be read: .*does not have the digest") as error:
        lc.load(folder)
    assert "\n" not in str(error.value)
    (folder / name).unlink()
    with pytest.raises(ValueError, match=r"there is no file|it has no model.json"):
        lc.load(folder)


def test_every_fact_is_checked(copied, people):
    """Whatever is missing or of another type ends in a sentence; so do numbers out of their ranges."""
    folder, change = copied
    for name, fact in facts.FACTS.items():
        wrong = [[], {"a": {}}, 7.5, -1, "", None, True, float("nan"), [float("nan")] * 3, [["x"]]]
        for value in [value for value in wrong if not fact.holds(value)]:
            change(**{name: value})
            with pytest.raises(ValueError, match=f"cannot be read: in model.json {name!r} must be ") as error:
                lc.load(folder)
            assert "\n" not in str(error.value)
        change(name)
        if name == "learners":
            with pytest.raises(ValueError, match="neither 'learners' nor 'model'"):
                lc.load(folder)
        elif fact.optional:
            assert len(lc.load(folder).predict(people[1][:3])) == 3
        else:
            with pytest.raises(ValueError, match=f"model.json has no {name!r}"):
                lc.load(folder)
    for temperature in (-1, 0, float("inf")):
        assert not facts.FACTS["temperature"].holds(temperature)
    change(log_prior=[0.0] * 7)
    with pytest.raises(ValueError, match="'log_prior' must have a number for each of the 3 classes"):
        lc.load(folder)
    change(files={"../weights.safetensors": "0"})
    with pytest.raises(ValueError, match="which is no file of the folder"):
        lc.load(folder)


def test_a_folder_of_version_0_1_is_read_with_one_warning(copied, fitted, people, caplog):
    folder, change = copied
    network = next(one for one in fitted.facts["learners"] if one["name"] == "network")
    old = {"model": network["recipe"]["model"], "augment": "none", "input_shape": network["input_shape"]}
    change("files", "learners", "label_type", format=1, **old)
    caplog.clear()
    model = lc.load(folder)
    assert [record.message for record in caplog.records if "without digests" in record.message] == [caplog.messages[-1]]
    alone = replace(fitted, learners=[(one, 1.0) for one, _ in fitted.learners if one.name == "network"])
    assert model.predict(people[1]).equals(alone.predict(people[1]))


def test_two_fits_do_not_mix_in_one_folder(people, tmp_path):
    from logitclip.runs.claims import Claimed

    def second(plan):
        with pytest.raises(Claimed, match=r"is being trained by .*process \d+"):
            lc.fit(people[0], "kind", out=tmp_path / "m", **QUICK)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lc.fit(people[0], "kind", out=tmp_path / "m", on_plan=second, **QUICK)
    assert not (tmp_path / "m" / "model.json").exists()
    assert not (tmp_path / "m" / "claim").exists()


def test_what_cannot_be_written_is_refused_before_training(people, pictures, tmp_path):
    shutil.copytree(pictures, tmp_path / "pictures")
    file = tmp_path / "pictures" / "red" / os.fsdecode(b"caf\xe9.png")
    try:
        shutil.copy(next((tmp_path / "pictures" / "red").glob("0*.png")), file)
    except OSError:
        pytest.skip("the file system only takes UTF-8")
    with pytest.raises(ValueError, match=r"The file name red/caf\\xe9.png is not UTF-8: rename the file"):
        lc.fit(tmp_path / "pictures", out=tmp_path / "m")
    with pytest.raises(ValueError, match=r"people.csv is a file, and `fit` writes a folder: name another one with out"):
        lc.fit(people[0], "kind", out=people[0])
    (tmp_path / "n" / "page.html").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"page.html is a folder, and `fit` writes a file there"):
        lc.fit(people[0], "kind", out=tmp_path / "n")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "unlabelled.csv").write_text("x,y\n1,2\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"unlabelled.csv is a file that `fit` did not write and would replace"):
        lc.fit(people[0], "kind", out=tmp_path / "theirs")
    with pytest.raises(ValueError, match="lr must be positive and finite"):
        lc.fit(people[0], "kind", out=tmp_path / "m", lr=float("nan"), on_plan=lambda plan: pytest.fail("too late"))


def test_what_can_be_refused_is_refused_before_the_encoder_works(tmp_path, monkeypatch):
    monkeypatch.setattr(fitting, "look", lambda *_, **__: pytest.fail("too late"))
    (tmp_path / "issues.csv").write_text("x,y\n1,2\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"issues.csv is a file that `fit` did not write and would replace"):
        lc.fit(tmp_path, out=tmp_path)
    with pytest.raises(ValueError, match=r"There is no .*typo.csv, the test data"):
        lc.fit(tmp_path, out=tmp_path / "m", test=tmp_path / "typo.csv")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(pytest.fail.Exception, match="too late"):  # ~ is the home, as in every other path
        lc.fit(tmp_path, out=tmp_path / "m", test="~/issues.csv")


@pytest.mark.parametrize("ending", [".csv", ".csv.gz", ".parquet", ".npz"])
def test_data_with_a_name_that_is_not_utf8(ending, people, tmp_path):
    path, frame = tmp_path / os.fsdecode(b"caf\xe9"), people[1]
    path = path.with_name(path.name + ending)
    try:
        path.touch()
    except OSError:
        pytest.skip("the file system only takes UTF-8")
    if ending == ".npz":
        content = io.BytesIO()
        np.savez(content, y=frame["y"].to_numpy(), kind=frame["kind"].to_numpy().astype(str))
        path.write_bytes(content.getvalue())
    elif ending == ".parquet":
        path.write_bytes(frame.to_parquet())
    else:
        text = frame.to_csv(index=False).encode()
        path.write_bytes(gzip.compress(text) if ending.endswith("gz") else text)
    model = lc.fit(path, "kind", out=tmp_path / "m", learner="forest")
    assert f"<h1>caf\\udce9{ending}</h1>" in (tmp_path / "m" / "page.html").read_text("utf-8")
    assert len(model.predict(path)) == len(frame)


def test_the_model_is_there_if_the_page_fails(people, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("no room")

    monkeypatch.setattr(fitting, "write_page", fail)
    with pytest.raises(OSError, match="no room"):
        lc.fit(people[0], "kind", out=tmp_path, **QUICK)
    assert len(lc.load(tmp_path).issues) == 600


def test_a_model_folder_is_no_data(fitted, tmp_path, capsys, monkeypatch):
    code, _, told = run(capsys, monkeypatch, "predict", fitted.folder, fitted.folder, "-o", tmp_path / "x.csv")
    assert code == 2
    assert "is a model folder, not data: name a table or a folder of images." in " ".join(told.split())


def test_a_model_folder_never_imports_a_plugin(fitted, tmp_path):
    """A model folder may be untrusted: nothing in it is executed."""
    folder, plugin = tmp_path / "model", tmp_path / "plugin.py"
    shutil.copytree(fitted.folder, folder, ignore=shutil.ignore_patterns(".*"))
    plugin.write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n", encoding="utf-8")
    network = next(one for one in fitted.facts["learners"] if one["name"] == "network")
    learner = {**network, "recipe": {**network["recipe"], "model": "theirs"}}
    content = {**fitted.facts, "plugin": [str(plugin)], "learners": [learner]}
    (folder / "model.json").write_text(json.dumps({**content, "digest": object_digest(content)}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"The model in .* cannot be read: Unknown model 'theirs'"):
        lc.load(folder)
    assert not (tmp_path / "executed").exists()


# -- images and text ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """60 pictures of 16x16 pixels, red or blue with noise; every tenth is in the wrong folder, one is corrupt."""
    Image = pytest.importorskip("PIL.Image")
    folder, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for i in range(60):
        pixels = rng.integers(0, 120, (16, 16, 3), dtype=np.uint8)
        pixels[..., 2 * (i % 2)] += 100
        name = "red" if (i % 2 == 0) != (i % 10 == 0) else "blue"
        (folder / name).mkdir(exist_ok=True)
        Image.fromarray(pixels).save(folder / name / f"{i:02}.png")
    (folder / "red" / "broken.png").write_bytes(b"not a picture")
    return folder


def test_a_folder_of_small_pictures(pictures, tmp_path, caplog):
    plan = make_plan(look(pictures))
    assert isinstance(plan.source.kind, Images)
    assert plan.source.kind.size == 16
    assert plan.network.options.model == "strided_cnn"
    assert any("images of 16x16 pixels" in line for line in plan.lines())
    model = lc.fit(pictures, out=tmp_path / "m", epochs=10)
    assert "broken.png is not a readable image" in caplog.text
    issues = model.issues
    assert len(issues) == 60
    assert issues["row"].str.endswith(".png").all()
    assert (tmp_path / "m" / "page.html").read_text(encoding="utf-8").count("data:image/png;base64,") == 60
    found = model.predict(pictures)
    assert len(found) == 61
    assert found[found["row"] == "red/broken.png"]["class"].isna().all()
    listed = pd.DataFrame({"file": found["row"], "colour": found["class"].fillna("red")})
    labelled = replace(model, facts={**model.facts, "label": "colour"})
    assert "100.0% agree" in labelled.agreement(listed, found)  # without the broken one
    colours = np.array([int(name[-6:-4]) % 2 for name in found["row"] if "broken" not in name])
    assert ((found["class"].dropna() == "blue").to_numpy() == colours).mean() > 0.8


def test_unreadable_images_are_skipped_where_images_stay_on_disk(pictures, tmp_path, caplog, monkeypatch):
    in_memory = look(pictures)
    monkeypatch.setattr("logitclip.own_data.images.IN_MEMORY", 0)
    caplog.clear()
    on_disk = look(pictures)
    assert "broken.png is not a readable image" in caplog.text
    assert list(on_disk.rows.names) == list(in_memory.rows.names)
    np.testing.assert_array_equal(on_disk.labels, in_memory.labels)
    np.testing.assert_array_equal(on_disk.rows.features, in_memory.rows.features)
    every = torch.arange(60)
    assert torch.equal(on_disk.rows.inputs[every], in_memory.rows.inputs[every])
    assert len(lc.fit(pictures, out=tmp_path / "m", epochs=1).issues) == 60


def test_of_train_and_test_folders_only_train_has_rows(pictures, tmp_path):
    """The test images must not take the place of held-out rows, however many there are."""
    shutil.copytree(pictures, tmp_path / "train", ignore=shutil.ignore_patterns("broken.png"))
    shutil.copytree(pictures / "red", tmp_path / "test" / "blue")
    source = look(tmp_path)
    assert len(source.labels) == 60
    assert all(name.startswith(source.class_names[k]) for name, k in zip(source.rows.names, source.labels, strict=True))


def test_texts(tmp_path):
    rng = np.random.default_rng(0)
    words = {
        "sport": ["goal", "team", "match", "player", "score", "ball"],
        "food": ["cook", "rice", "salt", "oven", "taste", "soup"],
    }
    rows = [(" ".join(rng.choice(words[kind], 6)), kind) for kind in ("sport", "food") for _ in range(100)]
    frame = pd.DataFrame(rows, columns=["words", "kind"])
    frame.to_csv(tmp_path / "x.csv", index=False)
    with pytest.raises(ValueError, match="to use its words, give --text words"):
        look(tmp_path / "x.csv", "kind")
    assert look(tmp_path / "x.csv", "kind", Options(text=["words"])).kind.name == "text"
    model = lc.fit(tmp_path / "x.csv", label="kind", text="words", out=tmp_path / "m", clip="none", epochs=8)
    assert (model.predict(frame)["class"] == frame["kind"]).mean() > 0.95
    assert rows[0][0].split()[0] in (tmp_path / "m" / "page.html").read_text(encoding="utf-8")
    shown = model.issues.iloc[: max(60, model.marked)]
    assert shown["values"].tolist() == [rows[int(row) - 1][0] for row in shown["row"]]
    assert not model.issues["values"].iloc[len(shown) :].any()


def test_a_long_text_is_shown_on_one_line_up_to_a_length():
    kind = SimpleNamespace(show=lambda i, names: "a line\nand another " * 50)
    found = show_values(SimpleNamespace(kind=kind), 0)
    assert found.startswith("a line and another a line")
    assert found.endswith("...")
    assert len(found) == 300


# -- bad inputs: a sentence or a recorded skip -------------------------------------------------------------------------

GOOD = "a,b,y\n" + "".join(f"{i % 7},{i % 3},{'uv'[i % 2]}\n" for i in range(40))


@pytest.mark.parametrize(
    ("content", "label", "sentence"),
    [
        (b"", "y", r"x.csv could not be read \(Empty CSV file\)"),
        (b"a,b,y\n", "y", "x.csv holds no rows"),
        (GOOD.encode(), "yy", r"x.csv has no column 'yy'. Did you mean 'y'"),
        (GOOD.encode(), None, r"Which column of .*x.csv is the label\? It has a, b, y"),
        (GOOD.replace("u", "v").encode(), "y", "the label 'y' is 'v' in every row; at least two classes are needed"),
        (GOOD.replace("a,b,y", "a,a,y").encode(), "y", "x.csv has two columns called 'a'; rename one"),
        (b"a,y\n1,caf\xe9\n2,x\n" * 5, "y", r"x.csv could not be read \(.*UTF8"),
        ("a,y\n" + "".join(f"{i % 5},{i / 7:.4f}\n" for i in range(40)), "y", "has 40 different values in 40 rows"),
        (b"a,y\n" + b"1,u\n1,v\n" * 9, "y", "No column is left as a feature: 'a' has the same value in every row"),
        (b"a,y\n" + b"1,u\n2,v\n" * 3, "y", "x.csv has 6 rows; at least 10 are needed"),
    ],
    ids=["empty", "header", "misspelt", "none", "one_class", "twice", "encoding", "floats", "same", "few"],
)
def test_a_bad_table_is_one_sentence(tmp_path, content, label, sentence):
    path = tmp_path / "x.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=sentence) as error:
        lc.fit(path, label=label, out=tmp_path / "m")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "m" / "model.json").exists()


@pytest.mark.parametrize(
    ("columns", "options", "sentence"),
    [
        ("a,b,y", {"drop": "nosuch"}, "x.csv has no column 'nosuch'"),
        ("a,b,y", {"image": "a", "drop": "nosuch"}, "x.csv has no column 'nosuch'"),
        ("a,b,y", {"image": "a", "text": "b"}, "Give either image or text: beside images no other column is used"),
        ("a,b,y", {"weight": "a", "drop": "a"}, "The column 'a' is named for two things: name it once"),
        ("a,b,y", {"learner": "forrest"}, "There is no learner 'forrest'. Did you mean 'forest'"),
        ("a,b,y", {"balance": "maybe"}, "balance must be on, off or auto, got 'maybe'"),
        ("a,b,y", {"clip": "norm:size=auto"}, "No value can be searched for in 'norm:size=auto'"),
    ],
)
def test_a_column_that_cannot_be_used_as_asked_is_refused(columns, options, sentence, tmp_path):
    (tmp_path / "x.csv").write_text(GOOD.replace("a,b,y", columns), encoding="utf-8")
    with pytest.raises(ValueError, match=sentence):
        lc.fit(tmp_path / "x.csv", "y", out=tmp_path / "m", **options)
    assert not (tmp_path / "m").exists()


def test_classes_that_differ_in_case_are_named(tmp_path):
    (tmp_path / "x.csv").write_text(GOOD + "3,1,U\n", encoding="utf-8")
    assert (
        "Classes 'U' and 'u' differ only in case or spaces: are they one class?"
        in make_plan(look(tmp_path / "x.csv", "y")).lines()
    )


def test_a_model_of_the_same_data_is_kept(tmp_path, caplog):
    """`issues` with the folder of `fit` must not change its model."""
    (tmp_path / "x.csv").write_text(GOOD, encoding="utf-8")
    options = {"out": tmp_path / "m", "epochs": 2}
    lc.fit(tmp_path / "x.csv", "y", **options)
    before = (tmp_path / "m" / "model.json").read_bytes()
    find_issues(tmp_path / "x.csv", "y", **options, on_plan=lambda plan: pytest.fail("nothing is trained"))
    assert "it is kept as it is" in caplog.text
    assert (tmp_path / "m" / "model.json").read_bytes() == before
    lc.fit(tmp_path / "x.csv", "y", **{**options, "balance": "on"})
    balanced = (tmp_path / "m" / "model.json").read_bytes()
    assert balanced != before
    lc.fit(tmp_path / "x.csv", "y", **{**options, "seed": 1})
    assert (tmp_path / "m" / "model.json").read_bytes() not in (before, balanced)


def test_missing_packages_are_named_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(fitting, "find_spec", lambda name: None if name in ("pandas", "skops") else name)
    with pytest.raises(ImportError, match=r"needs pandas, skops: pip install 'logitclip\[own-data\]'"):
        lc.fit(tmp_path / "x.csv", "y", out=tmp_path / "m")


def test_an_empty_column_is_left_out_with_a_reason_and_dates_are_used(tmp_path):
    rows = "".join(f"{i % 7},,2020-01-{i % 28 + 1:02},caf\\xe9,{'uv'[i % 2]}\n" for i in range(40))
    (tmp_path / "x.csv").write_bytes(("a,empty,when,odd,y\n" + rows).replace("\\xe9", "\xe9").encode("latin-1"))
    lines = make_plan(look(tmp_path / "x.csv", "y")).lines()
    assert any("Left out: 'empty' has no values." in line for line in lines)
    assert any("when (date)" in line for line in lines if line.startswith("Used"))
    assert any("Left out: 'odd' is not UTF-8 text" in line for line in lines)


def test_what_may_be_an_id_or_free_text_gets_a_hint(tmp_path):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"x": rng.normal(size=60), "customer": rng.permutation(10**6)[:60]})
    frame["note"] = [f"a note of row {i} in words" for i in range(60)]
    frame["kind"] = np.where(frame["x"] > 0, "u", "v")
    lines = make_plan(look(frame, "kind")).lines()
    id_hint = "'customer' is a different whole number in every row: if it is an id, leave it out with --drop customer."
    assert [line for line in lines if "customer" in line and "Used" not in line] == [id_hint]
    (left,) = [line for line in lines if line.startswith("Left out")]
    assert left.endswith("to use its words, give --text note.")


def test_a_class_with_one_example_is_named_and_never_judged(tmp_path):
    (tmp_path / "x.csv").write_text(GOOD + "3,1,lonely\n", encoding="utf-8")
    plan = make_plan(look(tmp_path / "x.csv", "y"))
    assert any("Class 'lonely' with one example" in line for line in plan.lines())
    issues = find_issues(tmp_path / "x.csv", "y", out=tmp_path / "m", epochs=2)
    assert len(issues) == 40
    assert "41" not in set(issues["row"])


def test_ten_thousand_classes(tmp_path):
    rng = np.random.default_rng(0)
    label = np.repeat(np.arange(10_000), 2)
    frame = pd.DataFrame({"a": label % 97 + rng.normal(size=20_000), "b": label % 89, "y": label})
    frame.to_parquet(tmp_path / "x.parquet")
    model = lc.fit(tmp_path / "x.parquet", label="y", out=tmp_path / "m", clip="none", epochs=1, model="mlp:depth=0")
    assert len(model.class_names) == 10_000
    assert model.noise["matrix"] is None
    assert len(model.predict(frame.head(5))) == 5


def test_a_folder_to_test_on_may_be_named_from_the_home(pictures, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(pictures.parent))
    model = lc.fit(pictures, out=tmp_path, test=f"~/{pictures.name}", learner="logistic")
    assert model.facts["test_accuracy"] > 0.8
    found = model.predict(f"~/{pictures.name}")
    assert len(found) == 61
    assert "agree with the class folders" in str(model.agreement(f"~/{pictures.name}", found))


def test_a_folder_with_few_pictures(pictures, tmp_path):
    for name in ("red", "blue"):
        (tmp_path / name).mkdir()
        for file in sorted((pictures / name).glob("[0-9]*.png"))[:4]:
            shutil.copy(file, tmp_path / name)
    with pytest.raises(ValueError, match="has 8 rows; at least 10 are needed"):
        lc.fit(tmp_path, out=tmp_path / "m")


def test_folders_without_pictures(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(ValueError, match="holds no image"):
        lc.fit(tmp_path, out=tmp_path / "m")
    with pytest.raises(ValueError, match="is a folder, its class folders are the labels: leave out label"):
        lc.fit(tmp_path, label="y")
    with pytest.raises(ValueError, match=r"There is no file .*gone.csv"):
        lc.fit(tmp_path / "gone.csv", label="y")


# -- the command line --------------------------------------------------------------------------------------------------


def run(capsys, monkeypatch, *args):
    """Run a command; return its exit code and output."""
    from logitclip import cli

    monkeypatch.setattr("sys.argv", ["logitclip", *map(str, args)])
    code = 0
    try:
        cli.main()
    except SystemExit as stop:
        code = stop.code
    return code, *capsys.readouterr()


def test_columns_that_are_named_one_by_one_are_refused(people, tmp_path, capsys, monkeypatch):
    """Only the last --drop would count."""
    out = ("-o", tmp_path / "m", "--label", "kind", "--epochs", 2)
    code, _, told = run(capsys, monkeypatch, "fit", people[0], "--drop", "x", "--drop=town", *out)
    assert (code, told) == (
        2,
        "logitclip: --drop is given twice: give it once, with the columns separated by commas.\n",
    )


def test_fit_says_something_before_it_imports_torch(people):
    code = """
import sys
from logitclip.cli import own_data
def tell(said):
    raise SystemExit(f"{said} {'torch' in sys.modules}")
own_data.tell = tell
getattr(own_data, sys.argv[1])(own_data.Path(sys.argv[2]))
"""
    for command in ("fit", "issues"):
        done = subprocess.run(
            [sys.executable, "-c", code, command, people[0]], capture_output=True, text=True, timeout=120
        )
        assert done.stderr == f"reading {people[0]} False\n"


def test_commands(people, tmp_path, capsys, monkeypatch):
    path, *_ = people
    quick = ("--clip", "norm:temp=2.5", "--epochs", 3)
    code, printed, told = run(capsys, monkeypatch, "fit", path, "--label", "kind", "-o", tmp_path / "m", *quick)
    assert code == 0
    assert told.startswith(f"logitclip: reading {path}\n")
    assert "600 rows in 3 classes" in told
    assert "Left out: 'id' numbers the rows" in told
    assert "This will take about" in told
    assert "of the labels, by predictions that have not seen them. Some labels" in " ".join(printed.split())
    assert "predict with: logitclip predict" in printed
    code, _, told = run(capsys, monkeypatch, "predict", tmp_path / "m", path, "-o", tmp_path / "out.csv")
    assert code == 0
    assert "agree with the column 'kind'" in told
    assert len(pd.read_csv(tmp_path / "out.csv")) == 600
    code, printed, _ = run(
        capsys, monkeypatch, "issues", path, "--label", "kind", "--fast", "-o", tmp_path / "n", "--json", *quick
    )
    assert code == 0
    assert list(json.loads(printed)[0]) == ["row", "given", "suggested", "score", "wrong", "values"]
    code, _, told = run(capsys, monkeypatch, "fit", path, "--label", "kidn")
    assert code == 2
    assert "has no column 'kidn'. Did you mean 'kind'" in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("clip", "sentence"),
    [
        ("none", "logitclip: Training failed: Training diverged in epoch 1"),
        ("norm:temp=auto", "logitclip: No value of clip.temp can be chosen: all trials failed."),
    ],
)
def test_training_that_diverges_has_its_own_exit_code(clip, sentence, people, tmp_path, capsys, monkeypatch):
    options = ("--label", "kind", "-o", tmp_path / "m", "--epochs", 1, "--lr", 1e30, "--clip", clip)
    code, _, told = run(capsys, monkeypatch, "fit", people[0], *options, "--learner", "network")
    assert code == 3
    assert told.splitlines()[-1].startswith(sentence)
    assert "Traceback" not in told


def test_names_of_classes_are_shown_as_they_are(tmp_path, capsys, monkeypatch):
    """Some mean something to rich (markup), to pandas (a missing value) or to a spreadsheet (a formula)."""
    names = np.array(["=[/b]", "None"])
    frame = pd.DataFrame({"x": np.arange(60) % 2 + np.linspace(0, 0.1, 60), "kind": names[np.arange(60) % 2]})
    frame.to_csv(tmp_path / "x.csv", index=False)
    quick = ("--fast", "-o", tmp_path / "m")
    code, printed, told = run(capsys, monkeypatch, "issues", tmp_path / "x.csv", "--label", "kind", *quick)
    assert (code, "Traceback" in told) == (0, False)
    assert "[/b]" in printed
    assert set(lc.load(tmp_path / "m").issues["given"]) == {"=[/b]", "None"}
    assert ",'=[/b]," in (tmp_path / "m" / "issues.csv").read_text(encoding="utf-8")
    assert "=[/b]" in set(lc.load(tmp_path / "m").predict(frame)["class"])
    run(capsys, monkeypatch, "predict", tmp_path / "m", tmp_path / "x.csv", "-o", tmp_path / "out.csv")
    assert ",'=[/b]," in (tmp_path / "out.csv").read_text(encoding="utf-8")
    assert ",=[/b]," not in (tmp_path / "out.csv").read_text(encoding="utf-8")
    code, printed, _ = run(
        capsys, monkeypatch, "noise", "pair:rate=0.5", "--data", f"table:path={tmp_path / 'x.csv'},label=kind"
    )
    assert code == 0
    assert "[/b]" in printed


def test_each_name_comes_back_from_a_csv_file():
    names = ["=a", "'=a", "''=a", "'a", "'", "", "-", "-1", "'-1", "-a", "+1", "@", "\tx", "a"]
    assert [unguard_formula(guard_formula(name)) for name in names] == names
    assert not [name for name in names if guard_formula(name).startswith(("=", "+", "@", "-a", "\t"))]


def test_train_points_to_fit(capsys, monkeypatch):
    code, _, told = run(capsys, monkeypatch, "train", "--data", "train.csv")
    assert code == 2
    assert "logitclip fit train.csv --label COLUMN" in told


def test_train_says_that_test_labels_may_be_noisy(people, tmp_path, capsys, monkeypatch):
    data = f"table:path={people[0]},label=kind"
    monkeypatch.setenv("COLUMNS", "200")  # in a narrow terminal the words are on several lines
    code, printed, _ = run(capsys, monkeypatch, "train", "--data", data, "--epochs", 1, "--runs", tmp_path)
    assert code == 0
    assert "test accuracy on labels that may be noisy" in printed
    assert "of noisy labels, a perfect classifier predicts" in printed
    assert (
        "The test labels of your own data may be noisy too" in run(capsys, monkeypatch, "runs", "--runs", tmp_path)[1]
    )


@pytest.fixture
def unbalanced():
    """19 of 20 rows belong to one class, and the classes overlap."""
    rare = np.arange(1000) % 20 == 0
    x = 1.5 * rare + np.random.default_rng(0).normal(size=1000)
    return pd.DataFrame({"x": x, "kind": np.where(rare, "rare", "common")})


def test_balance_lets_rare_classes_count(unbalanced, tmp_path):
    shares = []
    for balance in ("off", "auto", "on"):
        model = lc.fit(unbalanced, "kind", out=tmp_path / balance, learner="logistic", balance=balance)
        shares.append((model.predict(unbalanced)["class"] == "rare").mean())
    assert shares[0] < 0.05
    assert 0.1 < shares[1] == shares[2] < 0.5


def test_rare_classes_are_learnt_with_weights(unbalanced, tmp_path):
    """Without weights the rare class is never predicted."""
    unbalanced.to_csv(tmp_path / "x.csv", index=False)
    data = f"table:path={tmp_path / 'x.csv'},label=kind"
    options = {"data": data, "clip": "norm:temp=2", "model": "mlp:depth=0", "epochs": 5, "runs": str(tmp_path / "runs")}
    shares = []
    for balance in (False, True):
        result = train(lc.RunConfig(**options, balance=balance, per_example=True))
        shares.append(np.load(result.folder / "examples.npz")["prediction"].mean())
    assert shares[0] < 0.02
    assert 0.1 < shares[1] < 0.5


def test_the_time_that_is_left_is_told(monkeypatch):
    from logitclip.cli import own_data

    told, clock = [], [0.0]
    monkeypatch.setattr(own_data, "tell", told.append)
    monkeypatch.setattr(own_data.time, "monotonic", lambda: clock[0])
    pace = own_data.Pace()
    for at, share in ((10, 0.1), (40, 0.2), (60, 0.3), (80, 0.8), (90, 1.0)):
        clock[0] = at
        pace(share)
    assert told == ["20% done, about 2 min 40 s left", "80% done, about 20 s left"]


def test_predict_does_not_overwrite_its_data(tmp_path, capsys, monkeypatch):
    path = tmp_path / "people.csv"
    path.write_text("x,kind\n1,a\n", encoding="utf-8")
    code, _, told = run(capsys, monkeypatch, "predict", tmp_path / "m", path, "-o", path)
    assert code == 2
    assert "is the data itself: name another file with -o." in " ".join(told.split())
    assert path.read_text(encoding="utf-8") == "x,kind\n1,a\n"


def test_steps_are_timed_with_the_threads_of_the_network(people, monkeypatch):
    seen = []
    real = torch.optim.SGD.step
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self: (seen.append(torch.get_num_threads()), real(self)))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        make_plan(look(people[0], "kind"), accelerator="cpu", threads=1, **QUICK)
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {1}


def test_the_forecast_counts_folds_searches_and_other_programs(people, monkeypatch):
    source = look(people[0], "kind")
    monkeypatch.setattr(planning, "_step_seconds", lambda network, source: 1.0)
    monkeypatch.setattr(planning, "_busy", lambda: 1.0)

    def forecast(**options):
        return make_plan(source, learner="network", **options).seconds

    steps = -(-600 // 128) * 20
    assert forecast() == pytest.approx(1.5 * 1.2 * steps, rel=0.05)  # two halves, and half of a network on all rows
    assert forecast(five_folds=True) == pytest.approx(4.5 * 1.2 * steps, rel=0.05)
    assert forecast(clip="norm:temp=auto") == pytest.approx((1.5 + 5 * 0.49) * 1.2 * steps, rel=0.05)
    before = forecast()
    monkeypatch.setattr(planning, "_busy", lambda: 3.0)
    assert forecast() == pytest.approx(3 * before)


def test_the_share_that_is_done_follows_the_forecast(people, tmp_path):
    plans, shares = [], []
    calls = {"on_plan": plans.append, "on_progress": shares.append}
    lc.fit(people[0], label="kind", out=tmp_path, learner="forest,logistic", **calls)
    (plan,) = plans
    assert plan.seconds == pytest.approx(sum(plan.costs[name] for name in ("forest", "logistic", "rest")))
    assert shares[0] == pytest.approx(0.7 * plan.costs["forest"] / plan.seconds)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


# -- learners, votes and scores ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def blobs():
    """Rows of three classes, with 25 % of the labels moved to the next class."""
    rng = np.random.default_rng(1)
    true = np.arange(450) % 3
    x = (np.array([[0, 0], [4, 0], [0, 4]])[true] + rng.normal(size=(450, 2))).astype(np.float32)
    given = np.where(rng.random(450) < 0.25, (true + 1) % 3, true)
    source = look(pd.DataFrame(x, columns=["a", "b"]), pd.Series(given, name="kind"))
    return source, true


@pytest.mark.parametrize("make", [Forest, Logistic, Neighbours])
def test_a_learner_of_many_classes_warns_of_nothing(make):
    x, y = np.eye(12, dtype=np.float32), np.arange(12) % 9
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(9).fit(Rows(RowNumbers(y), x, torch.from_numpy(x)), y)


@pytest.mark.parametrize("make", [Forest, Logistic, Neighbours])
def test_a_learner_predicts_out_of_fold_and_comes_back_from_its_files(make, blobs):
    source, true = blobs
    learner = make(3)
    held_out = learner.out_of_fold(source.rows, source.labels, None, make_folds(source, 5, 0), 0)["held_out"]
    assert held_out.sum(1) == pytest.approx(1)
    assert (held_out.argmax(1) == true).mean() > 0.85
    learner = learner.fresh()
    weight = np.where(source.labels == true, 1.0, 0.0) + 1e-9
    learner.fit(source.rows, source.labels, weight, 0)
    found = learner.predict_proba(source.rows)
    assert (found.argmax(1) == true).mean() > 0.9
    again = make(3)
    contents = learner.contents()
    again.restore(learner.facts(), contents.__getitem__)
    assert np.array_equal(again.predict_proba(source.rows), found)


def test_many_weak_features_get_a_strong_penalty():
    rng = np.random.default_rng(0)
    true = np.arange(200) % 2
    x = rng.normal(size=(200, 400)) + 0.1 * true[:, None]
    given = np.where(rng.random(200) < 0.3, 1 - true, true)
    source = look(x, label=given)
    found = Logistic(2).out_of_fold(source.rows, source.labels, None, make_folds(source, 5, 0), 0)
    assert found["strength"] == 1e-3  # the likelihood of 3e-4 is lower
    fixed = Logistic(2, strength=1e-3)
    again = fixed.out_of_fold(source.rows, source.labels, None, make_folds(source, 5, 0), 0)
    assert np.array_equal(again["held_out"], found["held_out"])


def test_the_arrays_of_a_forest_predict_as_scikit_learn_does(blobs):
    source, _ = blobs
    forest = Forest(3)
    forest.fit(source.rows, source.labels, None, 5)
    oracle = forest._grow(source.rows, source.labels, None, 5, out_of_bag=False)
    found = forest.predict_proba(source.rows)
    assert found == pytest.approx(oracle.predict_proba(source.rows.features), abs=1e-3)
    content = forest.contents()[forest.file]
    assert len(content) < 600_000
    forest.left = forest.left * 0  # an endless walk
    with pytest.raises(ValueError, match="holds no forest of `fit`"):
        Forest(3).restore({}, forest.contents().__getitem__)


def test_groups_and_times_do_not_leak():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"x": rng.normal(size=120), "who": np.repeat(np.arange(24), 5), "day": np.arange(120) % 30})
    frame["kind"] = np.where(rng.random(120) < 0.5, "a", "b")
    source = look(frame, "kind", Options(group="who"))
    assert list(source.used) == ["x", "day"]
    for train_rows, test_rows in make_folds(source, 5, 0):
        assert not {*source.groups[train_rows]} & {*source.groups[test_rows]}
    source = look(frame, "kind", Options(time="day"))
    folds = list(make_folds(source, 5, 0))
    for train_rows, test_rows in folds:
        assert source.times[train_rows].max() < source.times[test_rows].min()
    assert len(np.unique(np.concatenate([test for _, test in folds]))) == 100  # the first sixth is never predicted
    with pytest.raises(ValueError, match="There must be at least 30 groups, got 24"):
        make_folds(look(frame, "kind", Options(group="who")), 30, 0)
    with pytest.raises(ValueError, match="Give either group or time"):
        look(frame, "kind", Options(group="who", time="day"))
    few = look(frame.assign(who=frame["who"] % 2), "kind", Options(group="who"))
    with pytest.raises(ValueError, match="There must be at least 5 groups, got 2"):
        make_plan(few)


def test_only_rows_of_one_class_with_a_weight_are_refused(people):
    frame = people[1].assign(heavy=people[1]["kind"] == "red").astype({"heavy": float})
    with pytest.raises(ValueError, match="the weights 'heavy' must be above 0 in rows of at least two classes"):
        look(frame, "kind", Options(weight="heavy"))


def test_a_few_val_rows_that_are_all_right_do_not_make_the_model_certain(tmp_path):
    frame = pd.DataFrame(
        {"x": np.repeat([0.0, 9.0], 30) + np.arange(60) % 7 / 7, "kind": np.repeat(["low", "high"], 30)}
    )
    model = lc.fit(frame, "kind", val=frame.iloc[[0, -1]], out=tmp_path, learner="logistic")
    assert model.facts["val_accuracy"] == 1
    assert model.predict(frame)["probability"].mean() == pytest.approx(0.75, abs=0.05)  # 3 of 4: the rule of succession


def test_a_class_that_loses_labels_is_adjusted_for():
    """Half of the labels of class 1 became 0: learners are unsure of it, and the adjusted votes find the wrong ones."""
    rng = np.random.default_rng(0)
    true = np.arange(1000) % 2
    given = np.where((true == 1) & (rng.random(1000) < 0.5), 0, true)
    votes = np.where(true[:, None] == 1, [0.52, 0.48], [0.97, 0.03]) + rng.uniform(-0.02, 0.02, (1000, 1)) * [1, -1]
    assert (votes.argmax(1) == true).mean() < 0.7
    assert (adjust_for_classes(votes, given).argmax(1) == true).all()


def test_a_few_labels_of_a_class_of_their_own_do_not_hide_the_wrong_ones(people, tmp_path):
    frame, given = people[1].drop(columns="id").head(200), people[3][:200]
    frame.loc[[7, 70, 150], "kind"] = "purple"
    issues = lc.fit(frame, "kind", out=tmp_path, learner="forest,logistic").issues
    wrong = set(np.flatnonzero(given != people[2][:200])) | {7, 70, 150}
    marked = set(issues["row"][issues["wrong"]].astype(int) - 1)
    assert len(marked & wrong) > 0.8 * len(wrong)
    assert len(marked - wrong) < 0.2 * len(marked)


def test_a_learner_counts_less_for_each_standard_error_it_is_behind():
    rng = np.random.default_rng(0)
    given = rng.integers(0, 2, 300)
    good, other = (np.where(rng.random(300) < 0.8, given, 1 - given) for _ in range(2))
    right = {"forest": good == given, "logistic": other == given, "neighbours": rng.random(300) < 0.5}
    weights = weigh(right)
    ahead, behind = sorted(("forest", "logistic"), key=lambda name: -right[name].sum())
    differ = right[ahead] != right[behind]
    z = (right[ahead].sum() - right[behind].sum()) / differ.sum() ** 0.5
    assert weights[behind] / weights[ahead] == pytest.approx(np.exp(-z))
    assert sum(weights.values()) == pytest.approx(1)
    assert weights["neighbours"] < 0.01
    shares = share_out({**right, "forest": ~right[ahead]})
    assert shares == {"forest": 0.0, "logistic": 1.0, "neighbours": 0.0}  # one is far behind, the other only votes
    assert share_out({"neighbours": right["neighbours"]}) == {"neighbours": 1.0}
    sure, guess = 0.8 * np.eye(2)[good] + 0.1, np.full((300, 2), 0.5)
    votes = combine({"forest": Vote(sure), "neighbours": Vote(guess)}, given)
    assert votes.weights == {"forest": 1.0, "neighbours": 0.0}
    assert votes.accuracies["forest"] == (good == given).mean()


def test_scores_mark_suggest_and_abstain():
    rng = np.random.default_rng(0)
    true = rng.integers(0, 3, 2000)
    given = np.where(rng.random(2000) < 0.3, (true + 1) % 3, true)
    clear = 0.94 * np.eye(3)[true] + 0.02
    found = judge_labels(combine({"forest": Vote(clear), "logistic": Vote(clear)}, given), given)
    assert (found.wrong == (given != true)).all()
    sure = found.scores >= SURE
    assert sure.sum() > 400
    assert (found.suggested[sure] == true[sure]).all()
    assert (found.suggested[~sure] == given[~sure]).all()
    low, high = found.noise.rate_interval
    assert low <= (given != true).mean() <= high
    other = 0.94 * np.eye(3)[np.where(given == true, true, (true + 2) % 3)] + 0.02  # is wrong about the wrong labels
    split = judge_labels(combine({"forest": Vote(clear), "logistic": Vote(other)}, given), given)
    assert (split.suggested == given).all()  # the learners never agree on another class
    assert found.ranking[: int(found.wrong.sum())].tolist() == sorted(
        np.flatnonzero(given != true), key=lambda i: -found.scores[i]
    )


def test_votes_that_repeat_the_largest_class_have_learnt_nothing():
    rng = np.random.default_rng(0)
    given = np.arange(1000) % 100 // 79  # 79 % are 0
    votes = np.stack([0.79 + rng.normal(0, 0.01, 1000), 0.21 + rng.normal(0, 0.01, 1000)], 1)
    found = judge_labels(combine({"forest": Vote(votes / votes.sum(1, keepdims=True))}, given), given)
    assert not found.learnt
    assert not found.wrong.any()
    assert (found.suggested == given).all()
    assert count_marked(0, 1000, learnt=False) == "None of 1,000 labels is marked wrong, because the noise is unknown."


def test_votes_have_learnt_even_if_class_noise_lets_the_largest_class_agree_as_often():
    """Of 500 labels 1, 300 became 0: guessing 0 agrees with 80 % of the labels, the truth with 70 %."""
    true = np.arange(1000) % 2
    given = np.where(np.arange(1000) // 2 % 5 < 3, 0, true)
    clear = np.where(true[:, None] == [0, 1], 0.9, 0.1)
    found = judge_labels(combine({"forest": Vote(clear), "logistic": Vote(clear)}, given), given)
    assert found.learnt
    assert found.scores[given != true].min() > found.scores[given == true].max()


def test_labels_that_may_be_wrong_count_less_when_they_are_learnt_again(blobs, tmp_path):
    source, true = blobs
    plan = make_plan(source, learner="forest,logistic")
    judged_by = {learner.name: fitting._vote(plan, learner, Parts(tmp_path, source)) for learner in plan.learners}
    votes = {name: Vote(one["held_out"]) for name, one in judged_by.items()}
    found = judge_labels(combine(votes, source.labels), source.labels)
    weight = fitting._weigh_rows(plan, found)
    right = source.labels == true
    assert weight.mean() == pytest.approx(1)
    assert weight[right].mean() > 4 * weight[~right].mean()
    assert weight[0] / weight[1] == pytest.approx(((1 - found.scores[0]) / (1 - found.scores[1])) ** 2)
    unknown = replace(found, scores=np.where(np.arange(450) < 5, np.nan, found.scores))
    assert fitting._weigh_rows(plan, unknown)[:5] == pytest.approx(1)
    assert (fitting._weigh_rows(plan, replace(found, learnt=False)) == 1).all()


def test_reviewed_rows_count_three_times_and_a_class_of_one_balances_nothing(blobs):
    unknown = SimpleNamespace(learnt=False)
    source = replace(blobs[0], reviewed=np.arange(450) < 10)
    weight = fitting._weigh_rows(make_plan(source, learner="logistic"), unknown)
    assert weight[:10] / weight[10:20] == pytest.approx(3)
    kinds = pd.Series(["a"] * 30 + ["b"] * 29 + ["c"], name="kind")
    plan = make_plan(look(pd.DataFrame({"x": np.arange(60) % 7}), kinds), learner="logistic", balance="auto")
    assert (fitting._weigh_rows(plan, unknown) == 1).all()


def test_rows_of_a_table_are_taken_with_one_copy_and_without_a_list_of_names(blobs):
    rows, index = blobs[0].rows, np.array([7, 2, 400])
    taken = rows.take(index)
    assert list(taken.names) == ["8", "3", "401"]
    assert not isinstance(taken.names, list)  # a million strings, in every fold
    assert np.array_equal(taken.features, rows.features[index])
    assert taken.inputs.data_ptr() == taken.features.ctypes.data


def test_what_was_learnt_with_other_weights_is_not_taken(blobs, tmp_path):
    source, _ = blobs
    plan, parts = make_plan(source, learner="logistic"), Parts(tmp_path, source)
    weights = np.ones(450), np.where(source.labels == 0, 9.0, 1.0)
    one, other = (
        fitting._learn(plan, plan.learners[0], weight, parts).predict_proba(source.rows) for weight in weights
    )
    assert (other[:, 0] > one[:, 0]).mean() > 0.9


def test_labels_that_a_network_has_only_memorised_are_not_learnt():
    rng = np.random.default_rng(0)
    given, guessed, seen = rng.integers(0, 3, 300), *rng.dirichlet(np.ones(3), (2, 300))
    memorised = (seen + 2 * np.eye(3)[given]) / 3
    found = judge_labels(combine({"network": Vote(guessed, memorised)}, given), given)
    assert not found.learnt
    assert not found.wrong.any()


def test_nothing_is_suggested_where_most_labels_may_be_wrong():
    rng = np.random.default_rng(0)
    true = rng.integers(0, 3, 2000)
    given = np.where(rng.random(2000) < 0.65, rng.integers(0, 3, 2000), true)
    clear = 0.94 * np.eye(3)[(true + (rng.random(2000) < 0.3)) % 3] + 0.02
    votes = combine({"forest": Vote(clear), "logistic": Vote(clear)}, given)
    found = judge_labels(votes, given)
    assert (votes.probabilities.argmax(1) == given).mean() < 0.5
    assert found.wrong.any()
    assert (found.suggested == given).all()


def test_scores_are_less_sure_than_bayes_rule():
    chances = np.linspace(0.01, 0.99, 50)
    against, split, agreeing = (make_less_sure(chances, np.full(50, agreement)) for agreement in (1, 0, -1))
    for found in (against, split, agreeing):
        assert (np.diff(found) > 0).all()
    assert (agreeing < split).all()
    assert (split < against).all()
    assert against[-1] < 0.92
    assert agreeing[0] > 0.01


def test_the_summaries_say_what_the_estimate_means(fitted):
    def told(**noise):
        model = replace(fitted, facts={**fitted.facts, "noise": {**fitted.noise, **noise}})
        return model.noise_summary, model.accuracy_summary

    noise, accuracy = told(rate=0.1, rate_interval=[0.05, 0.12], at_most=0.12)
    assert "Between 5% and 12% of the labels are wrong, probably about 10%" in noise
    assert "such as those of labelling rules, are not counted" in noise
    assert "clean" not in noise
    assert "even the true classes would agree with only about 90% of all labels (88% to 95%)." in accuracy
    assert "The model agrees with more" not in accuracy
    more = told(rate=0.4, rate_interval=[0.3, 0.5], at_most=0.5)[1]
    assert more.endswith("The model agrees with more: it repeats some wrong labels, or fewer than 40% are wrong.")
    noise, accuracy = told(rate=0.1, rate_interval=[0.01, 0.25], at_most=0.25)
    assert noise.startswith("At most 25% of the labels are wrong")
    assert accuracy.endswith("Some labels may be wrong: the true classes would agree with 75% to 99% of all labels.")
    assert "The labels look clean" in told(rate=0.0, rate_interval=[0.0, 0.03], at_most=0.03)[0]
    lost = replace(fitted, facts={**fitted.facts, "noisy_accuracy": 0.8, "largest_share": 0.79, "learnt": False})
    guessing = (
        "80.0% of the labels, by predictions that have not seen them. Guessing the largest class would agree with about"
    )
    assert "The noise cannot be estimated" in lost.noise_summary
    assert lost.accuracy_summary == f"The model agrees with {guessing} 79.0%."


# -- what people expect ------------------------------------------------------------------------------------------------


def test_arrays_keep_types_and_index(blobs, tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 3))
    for y in ((x[:, 0] > 0).astype(int), x[:, 0] > 0, np.where(x[:, 0] > 0, "u", "v")):
        model = lc.fit(x, y, out=tmp_path / str(y.dtype), learner="logistic")
        assert model.classes_.tolist() == np.unique(y).tolist()
        assert type(model.classes_.tolist()[0]) is type(y.tolist()[0])
        assert (model.predict(x)["class"].to_numpy() == y).mean() > 0.9
        assert model.predict_proba(x).shape == (120, 2)
        assert model.predict(x, probabilities=True).shape == (120, 5)
    frame = pd.DataFrame(x, columns=list("abc"), index=[f"row {i}" for i in range(120)]).assign(kind=y)
    model = lc.fit(frame, "kind", out=tmp_path / "frame", learner="logistic")
    assert model.predict(frame).index.tolist() == frame.index.tolist()
    with pytest.raises(ValueError, match="The data must have a label for each of 120 rows"):
        lc.fit(x, y[:7], out=tmp_path / "no")
    with pytest.raises(ValueError, match=r"Labels must be an array \[N\], got one of shape \(120, 1\)"):
        lc.fit(x, y[:, None], out=tmp_path / "no")
    with pytest.raises(ValueError, match="data must be a file, a folder, a data frame or an array"):
        lc.fit([1, 2, 3], y, out=tmp_path / "no")


def test_data_frames_of_other_libraries_and_arrays_of_objects_are_read(people, tmp_path):
    frame = people[1].head(100).drop(columns=["id", "kind"])
    given = people[1]["kind"].head(100)
    as_before = lc.fit(frame, given, out=tmp_path / "pandas", learner="logistic").issues
    arrow = pa.table(frame.assign(kind=given))
    for name, data in {"arrow": arrow, "stream": Exported(arrow)}.items():
        model = lc.fit(data, "kind", out=tmp_path / name, learner="logistic")
        assert model.issues.equals(as_before)
        assert model.predict(data)["class"].equals(model.predict(frame)["class"])
    mixed = lc.fit(frame.to_numpy(), given.tolist(), out=tmp_path / "objects", learner="logistic")
    assert mixed.issues["score"].equals(as_before["score"])
    with pytest.raises(ValueError, match=r"got csr_matrix: make it dense with toarray\(\)"):
        lc.fit(scipy.sparse.csr_matrix(np.eye(20)), np.arange(20) % 2, out=tmp_path / "no")


class Exported:
    """A data frame of another library, such as polars: it has columns, and exports Arrow data."""

    def __init__(self, table):
        self.table, self.columns = table, table.column_names

    def __arrow_c_stream__(self, requested_schema=None):
        return self.table.__arrow_c_stream__(requested_schema)


@pytest.mark.parametrize("missing", [None, pd.NA, float("nan")], ids=str)
def test_labels_beside_the_data_may_be_missing(missing, people, tmp_path):
    frame, some = people[1].head(100).drop(columns=["id", "kind"]), np.arange(100) % 4 == 0
    given = [missing if out else kind for out, kind in zip(some, people[1]["kind"], strict=False)]
    for name, data in {"frame": frame, "array": frame[["x", "y"]].to_numpy()}.items():
        model = lc.fit(data, given, out=tmp_path / name, learner="logistic")
        assert model.class_names == ["blue", "green", "red"]
        assert pd.read_csv(tmp_path / name / "unlabelled.csv")["row"].tolist() == list(range(1, 101, 4))
        kept = look_again(model.facts)  # what `review` shows
        assert list(kept.rows.names) == [str(i + 1) for i in np.flatnonzero(~some)]
    every = people[1]["kind"].head(100)
    measured = lc.fit(frame, every, out=tmp_path / "test", learner="logistic", test=(frame, given))
    right = measured.predict(frame)["class"].to_numpy() == every.to_numpy()
    assert measured.facts["test_accuracy"] == right[~some].mean()


def test_types_of_labels_are_kept_in_columns_of_any_kind(tmp_path):
    x = np.random.default_rng(0).normal(size=(60, 2))
    y = (x[:, 0] > 0).astype(int)
    for i, column in enumerate((pd.Categorical(y), pd.array(y, "Int64"), pd.array(y > 0, "boolean"))):
        frame = pd.DataFrame(x).assign(**{"9": column}).rename(columns={"9": 9})
        model = lc.fit(frame, 9, out=tmp_path / str(i), learner="logistic")
        assert model.classes_.tolist() == np.unique(np.asarray(column)).tolist()
        assert type(model.classes_.tolist()[0]) is (bool if i == 2 else int)


def test_a_name_of_a_file_is_predicted_as_text_or_path(people, fitted):
    assert fitted.predict(str(people[0])).equals(fitted.predict(people[0]))


def test_dates_that_are_not_read_get_a_hint_and_never_order_rows(tmp_path):
    days = pd.date_range("2026-01-01", periods=60)
    frame = pd.DataFrame({"x": np.arange(60) % 7, "kind": np.where(np.arange(60) % 7 > 3, "u", "v")})
    frame = frame.assign(
        german=days.strftime("%d.%m.%Y"), iso=days.strftime("%Y-%m-%d"), code=[f"{i}.1" for i in days.day]
    )
    hints = [line for line in make_plan(look(frame, "kind")).lines() if "holds dates as text" in line]
    assert [line.split(":")[0] for line in hints] == [
        "'german' holds dates as text, such as '01.01.2026'",
        "'iso' holds dates as text, such as '2026-01-01'",
    ]
    with pytest.raises(ValueError, match=r"the time 'german' holds '01.01.2026': write dates as 2026-11-18"):
        look(frame, "kind", Options(time="german"))
    assert look(frame, "kind", Options(time="iso")).times.tolist() == list(range(60))


def test_numbers_that_are_text_and_values_far_from_the_others_are_told():
    number = np.random.default_rng(0).normal(size=60).round(3)
    texts = {
        "comma": [f"{x}".replace(".", ",") for x in number],
        "share": [f"{x} %" for x in number],
        "thousands": [f"{100_000 * x:,.0f}" for x in number],
        "stray": [*map(str, number[:-1]), "n.a."],
    }
    codes = {"zip": [f"{i:05}" for i in range(60)], "town": ["ab", "cd"] * 30, "version": ["1.2.3", "1.3.0"] * 30}
    frame = pd.DataFrame({**texts, **codes, "far": [*number[:-1], 999_999], "near": number, "kind": ["a", "b"] * 30})
    lines = make_plan(look(frame, "kind"), learner="logistic").lines()
    told = [line.partition(" make it text")[0] for line in lines if " make it text" in line]
    reasons = texts["comma"][0], texts["share"][0], next(x for x in texts["thousands"] if "," in x), "n.a."
    assert told == [
        f"{name!r} holds numbers, but values such as {value!r}" for name, value in zip(texts, reasons, strict=True)
    ]
    (far,) = [line for line in lines if "far from the others" in line]
    assert far.startswith("'far' has a value far from the others, 999999: if it stands for a missing one")


def test_copies_of_rows_are_told(people):
    frame = people[1].drop(columns="id").head(100)
    thrice = pd.concat([frame] * 3, ignore_index=True)

    def told(data, **options):
        return [line for line in make_plan(look(data, "kind", Options(**options))).lines() if "copies" in line]

    (line,) = told(thrice)
    assert line.startswith("200 rows are copies of others, label included.")
    assert not told(frame)
    assert not told(thrice.assign(group=thrice.index % 100), group="group")
    assert not told(thrice.assign(kind=thrice["kind"].sample(frac=1, random_state=0).to_numpy()))  # equal by chance


def test_rows_without_a_label_are_predicted_and_weights_count(people, tmp_path):
    frame = people[1].head(200).drop(columns="id").assign(importance=1.0)
    frame.loc[::4, "kind"] = None
    frame.loc[frame["kind"] == "blue", "importance"] = 0.0
    model = lc.fit(frame, "kind", weight="importance", out=tmp_path, learner="logistic")
    found = pd.read_csv(tmp_path / "unlabelled.csv")
    assert found["row"].tolist() == list(range(1, 201, 4))
    assert "blue" not in set(found["class"])  # rows of weight 0 teach nothing
    assert isinstance(model.kind, Table)
    assert "importance" not in model.kind.preprocessor.kinds
    assert set(model.issues["row"].astype(int) % 4) == {0, 2, 3}
    with pytest.raises(ValueError, match="the weights 'town' must be numbers"):
        lc.fit(frame, "kind", weight="town", out=tmp_path / "no")


def test_test_data_measures_the_accuracy(people, tmp_path):
    frame, true = people[1].drop(columns="id"), np.array(["red", "green", "blue"])[people[2]]
    model = lc.fit(frame, "kind", out=tmp_path, learner="logistic", test=frame.assign(kind=true))
    assert model.facts["test_accuracy"] == (model.predict(frame)["class"] == true).mean()
    assert f"Accuracy on your test data: {model.facts['test_accuracy']:.1%}" in model.accuracy_summary
    some = frame.assign(kind=[*true[:100], *[None] * (len(true) - 100)])
    again = lc.fit(frame, "kind", out=tmp_path, learner="logistic", test=some)
    assert again.facts["test_accuracy"] == (model.predict(frame)["class"] == true)[:100].mean()
    with pytest.raises(ValueError, match="The test data has no column 'kind'"):
        lc.fit(frame, "kind", out=tmp_path, learner="logistic", test=frame.drop(columns="kind"))


def test_labels_of_another_type_are_the_same_classes(tmp_path):
    """A table with a missing label has 0.0 and 1.0 where another has 0 and 1."""
    x = np.random.default_rng(0).normal(size=(60, 2))
    y = (x[:, 0] > 0).astype(int)
    frame = pd.DataFrame(x, columns=["a", "b"])
    files = {kind: tmp_path / f"{kind}.csv" for kind in ("int", "float", "bool")}
    for kind, file in files.items():
        frame.assign(kind=y.astype(kind)).to_csv(file, index=False)
    frames = {kind: frame.assign(kind=y.astype(kind)) for kind in files}
    for data, other in (
        (files["int"], files["float"]),
        (files["float"], frames["int"]),
        (frames["bool"], files["bool"]),
    ):
        model = lc.fit(data, "kind", out=tmp_path / "model", learner="logistic", val=other, test=other)
        assert model.facts["test_accuracy"] > 0.9
        assert "new to the model" not in str(model.agreement(other, model.predict(other)))
    assert match_classes(["01", "x"], ["1", "1.0"]) == ["01", "x"]  # two classes are the same number


def test_the_page_names_the_clip_only_of_a_model_with_a_network(blobs, tmp_path):
    x, y = blobs[0].rows.features, blobs[0].labels
    for learner, clipped in (("logistic", False), ("network", True)):
        model = lc.fit(x, y, out=tmp_path / learner, learner=learner, epochs=1)
        assert ("norm:temp" in (tmp_path / learner / "page.html").read_text("utf-8")) == clipped
        clean = replace(model, facts={**model.facts, "learnt": True, "noise": {**model.noise, "at_most": 0.01}})
        assert ("--clip none" in clean.noise_summary) == clipped


def test_val_data_decides_how_much_each_learner_counts(tmp_path):
    """The labels of the rows follow one rule, those of val another: only the forest can learn the second one."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (400, 2))
    y = np.where(x[:, 0] * x[:, 1] > 0, "same", "other")
    inside = rng.uniform(-1, 1, (200, 2))
    truth = np.where(inside[:, 0] * inside[:, 1] > 0, "same", "other")
    model = lc.fit(x, y, val=(inside, truth), learner="forest,logistic", out=tmp_path / "both")
    assert [one["name"] for one in model.facts["learners"]] == ["forest"]
    assert model.facts["val_accuracy"] == (model.predict(inside)["class"] == truth).mean()
    swapped = np.where(truth == "same", "other", "same")  # now the forest is wrong
    model = lc.fit(x, y, val=(inside, swapped), learner="forest,logistic", out=tmp_path / "swapped")
    assert [one["name"] for one in model.facts["learners"]] == ["logistic"]
    with pytest.raises(ValueError, match="The val data: 'new' is not a class of the training data"):
        lc.fit(x, y, val=(inside, np.full(200, "new")), learner="logistic", out=tmp_path / "no")
    with pytest.raises(ValueError, match="The val data must have a label for each of 200 rows, got 3"):
        lc.fit(x, y, val=(inside, truth[:3]), learner="logistic", out=tmp_path / "no")


def test_issues_never_changes_a_model_that_fit_made(people, tmp_path, caplog):
    frame = people[1]
    model = lc.fit(frame, "kind", out=tmp_path / "model", learner="logistic")
    before = (tmp_path / "model" / "model.json").read_bytes()
    found = lc.find_issues(frame, "kind", out=tmp_path / "model", learner="forest")
    assert "made of this data with other settings: these are its issues" in caplog.text
    pd.testing.assert_frame_equal(found, model.issues)
    with pytest.raises(ValueError, match="has a model that `fit` made of other data: name another folder"):
        lc.find_issues(frame.head(300), "kind", out=tmp_path / "model", learner="forest")
    assert (tmp_path / "model" / "model.json").read_bytes() == before
    for rows in (600, 300):  # what issues has made, it replaces
        assert len(lc.find_issues(frame.head(rows), "kind", out=tmp_path / "issues", learner="logistic")) == rows


def test_labels_that_rules_explain_have_no_estimate_but_at_most(tmp_path):
    """Labels by one column, which a small tree repeats, and by the sum of all, which it cannot."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(500, 6))
    rule = np.where(x[:, 0] > 0.3, "u", "v")
    model = lc.fit(x, rule, learner="forest,logistic", out=tmp_path / "rule")
    assert model.facts["rules"] > 0.95
    assert model.noise["rate_interval"] == [0.0, 0.5]
    assert model.noise_summary.startswith("At most 50% of the labels are wrong. A decision tree with few leaves")
    folder = shlex.quote(str(tmp_path / "rule"))
    assert model.noise_summary.endswith(f"logitclip review {folder} --audit 100.")
    assert model.accuracy_summary.endswith("the true classes would agree with 50% to 100% of all labels.")
    smooth = np.where(x.sum(1) > 0, "u", "v")
    model = lc.fit(x, smooth, learner="forest,logistic", out=tmp_path / "smooth")
    assert "rules" not in model.facts
    assert model.noise["rate_interval"][1] < 0.3


def test_the_columns_that_mattered_are_shown(tmp_path):
    """Of all columns one decides, and it is not among the first four; of thirty, not all can be tried."""
    rng = np.random.default_rng(0)
    for count in (8, 30):
        frame = pd.DataFrame(rng.normal(size=(300, count)), columns=[f"c{i}" for i in range(count)])
        true = np.where(frame["c6"] > 0, "u", "v")
        frame["kind"] = np.where(rng.random(300) < 0.1, "u", true)
        model = lc.fit(frame, "kind", out=tmp_path / str(count), learner="forest,logistic")
        first = model.issues.head(5)["values"]
        assert first.str.startswith("c6 ").all()
        page = (model.folder / "page.html").read_text(encoding="utf-8")
        assert all(value in page for value in first)
        assert model.issues["values"].str.len().gt(0).sum() >= 60


def test_a_killed_fit_resumes(people, tmp_path, monkeypatch):
    """What was computed before is not computed again, and the model is that of an undisturbed fit."""
    whole = lc.fit(people[0], "kind", out=tmp_path / "whole", **QUICK)
    calls = []
    real = fitting._learn

    def killed(plan, learner, weight, parts):
        if len(calls) == 1:
            calls.append("killed")
            raise KeyboardInterrupt
        calls.append(learner.name)
        return real(plan, learner, weight, parts)

    monkeypatch.setattr(fitting, "_learn", killed)
    with pytest.raises(KeyboardInterrupt):
        lc.fit(people[0], "kind", out=tmp_path / "m", **QUICK)
    assert len(list((tmp_path / "m" / "parts").iterdir())) == 5  # four votes and a learner
    monkeypatch.setattr(Forest, "out_of_fold", lambda *_: pytest.fail("computed again"))
    again = lc.fit(people[0], "kind", out=tmp_path / "m", **QUICK)
    for name, digest in whole.facts["files"].items():
        if not name.endswith(".skops"):  # a zip file knows the time
            assert again.facts["files"][name] == digest
    assert not (tmp_path / "m" / "parts").exists()


@pytest.mark.parametrize("step", ["page.html", "model.json", "forest.safetensors", "issues.csv", "parts"])
def test_a_fit_that_is_killed_while_it_writes_leaves_nothing_of_it_or_of_an_earlier_one(step, people, tmp_path):
    """The page and the list of an earlier model are not taken for its own, and nothing half-written stays."""
    settings = {"learner": "forest", "seed": 1}
    whole = lc.fit(people[0], "kind", out=tmp_path / "whole", **settings)
    folder = lc.fit(people[0], "kind", out=tmp_path / "m", learner="forest").folder
    script = f"""
import os, shutil, logitclip as lc
rename, rmdir = os.replace, os.rmdir
def stop(path):
    if os.path.basename(path) == {step!r}:
        os._exit(9)
def replace(old, new):
    stop(new)
    rename(old, new)
os.replace = replace
os.rmdir = stop
lc.fit({str(people[0])!r}, "kind", out={str(folder)!r}, **{settings!r})
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 9
    lc.fit(people[0], "kind", out=folder, **settings)
    left, wanted = ({path.name for path in place.iterdir()} for place in (folder, whole.folder))
    assert left == wanted
    for name in ("issues.csv", "page.html", "forest.safetensors"):
        assert (folder / name).read_bytes() == (whole.folder / name).read_bytes()


def test_an_earlier_model_survives_a_full_disk(people, tmp_path, monkeypatch):
    before = lc.fit(people[0], "kind", out=tmp_path / "m", learner="forest").predict(people[0])
    names = {path.name for path in (tmp_path / "m").iterdir()}
    real = files.write_synced

    def full(path, content):
        if path.name.endswith("forest.safetensors"):
            raise OSError(28, "No space left on device")
        real(path, content)

    monkeypatch.setattr(files, "write_synced", full)
    with pytest.raises(files.CannotWrite, match=r"forest.safetensors: No space left on device. Earlier files"):
        lc.fit(people[0], "kind", out=tmp_path / "m", learner="forest", seed=1)
    assert {path.name for path in (tmp_path / "m").iterdir()} == {*names, "parts"}
    assert lc.load(tmp_path / "m").predict(people[0]).equals(before)


def test_parts_are_never_written_through_a_link(people, tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "parts").symlink_to(theirs)
    lc.fit(people[0], "kind", out=tmp_path / "m", **QUICK)
    assert not any(theirs.iterdir())
    assert not (tmp_path / "m" / "parts").exists()


def test_parts_of_somebody_else_stay(blobs, tmp_path):
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "screws.csv").touch()
    parts = Parts(tmp_path, blobs[0])
    parts.compute({"part": 1}, lambda: {"x": np.zeros(1)})
    (path,) = (tmp_path / "parts").glob("*.npz")
    files.scratch_name(path).touch()  # of a fit that was killed
    parts.remove()
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["screws.csv"]


@pytest.mark.parametrize("damage", ["cut", "flipped", "FIFO"])
def test_a_damaged_part_is_computed_again(damage, blobs, tmp_path):
    parts = Parts(tmp_path, blobs[0])
    wanted = np.arange(1000.0)
    parts.compute({"part": 1}, lambda: {"x": wanted})
    (path,) = (tmp_path / "parts").iterdir()
    content = path.read_bytes()
    middle = len(content) // 2
    path.write_bytes(content[:middle] + (b"" if damage == "cut" else b"?" + content[middle + 1 :]))
    if damage == "FIFO":
        path.unlink()
        os.mkfifo(path)
    assert (parts.compute({"part": 1}, lambda: {"x": wanted})["x"] == wanted).all()
    assert (parts.compute({"part": 1}, lambda: pytest.fail("computed again"))["x"] == wanted).all()


def test_the_data_is_read_once(people, tmp_path, monkeypatch):
    from logitclip.own_data import tables

    reads = []
    real = tables.read_table
    monkeypatch.setattr(tables, "read_table", lambda path, **options: (reads.append(path), real(path, **options))[1])
    lc.fit(people[0], "kind", out=tmp_path, find_issues=True, **QUICK)
    assert reads == [str(people[0])]
    val, test = (shutil.copy(people[0], tmp_path / f"{name}.csv") for name in ("val", "test"))
    reads.clear()
    lc.fit(people[0], "kind", out=tmp_path / "beside", val=val, test=test, learner="logistic")
    assert reads == [str(path) for path in (people[0], val, test)]


def test_the_clip_is_searched_where_it_is_asked_for(people, tmp_path):
    model = lc.fit(people[1], "kind", out=tmp_path / "m", clip="norm:tau=auto", epochs=2, learner="network")
    assert model.facts["clip"].startswith("norm:tau=")
    assert "auto" not in model.facts["clip"]


def test_new_rows_without_a_label_make_a_new_model_folder(tmp_path):
    """The labelled rows are the same; the rows to predict, their numbers or a column's name are not."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"x": rng.normal(size=60), "kind": [*["a", "b"] * 28, *[None] * 4]})
    frame["x"] += (frame["kind"] == "b") * 4.0
    options = {"out": tmp_path, "learner": "logistic"}
    lc.fit(frame, "kind", **options)
    first = (tmp_path / "unlabelled.csv").read_bytes()
    lc.fit(frame.iloc[:59], "kind", **options)
    assert (tmp_path / "unlabelled.csv").read_bytes().count(b"\n") == first.count(b"\n") - 1
    moved = pd.concat([frame.iloc[56:], frame.iloc[:56]])
    assert set(lc.fit(moved, "kind", **options).issues["row"].astype(int)) == set(range(5, 61))
    lc.fit(frame.iloc[:56], "kind", **options)
    assert not (tmp_path / "unlabelled.csv").exists()
    renamed = lc.fit(frame.iloc[:56].rename(columns={"x": "height"}), "kind", **options)
    assert len(renamed.predict(pd.DataFrame({"height": [0.0, 4.0]}))) == 2


def test_images_of_val_and_test_that_cannot_be_read_do_not_count(tmp_path):
    from reviews import make_images

    train, val = make_images(tmp_path / "train"), make_images(tmp_path / "val", 18)
    damaged = next((val / "dark").iterdir())
    damaged.write_bytes(b"no image")
    options = {"learner": "logistic,forest", "val": val, "test": val}
    model = lc.fit(train, out=tmp_path / "with", **options)
    damaged.unlink()
    again = lc.fit(train, out=tmp_path / "without", **options)
    assert model.facts["test_accuracy"] == again.facts["test_accuracy"]
    assert model.facts["temperature"] == again.facts["temperature"]
    for file in val.rglob("*.png"):
        file.write_bytes(b"no image")
    for name in ("val", "test"):  # said before anything is trained
        with pytest.raises(ValueError, match=f"None of the {name} images can be read"):
            lc.fit(train, out=tmp_path / "none", learner="logistic", **{name: val})


@pytest.mark.parametrize("by", ["groups", "times"])
def test_of_very_many_rows_whole_groups_or_the_latest_are_held_out(by, monkeypatch):
    from logitclip.own_data import folds

    monkeypatch.setattr(folds, "MOST_PREDICTIONS", 3000)
    rng = np.random.default_rng(0)
    number = rng.integers(0, 40, 2000)
    source = SimpleNamespace(labels=np.zeros(2000, int), class_names=("a", "b"), groups=None, times=None)
    setattr(source, by, number)
    ((train, held),) = folds.make_folds(source, 5, 0)  # type: ignore[arg-type]
    assert 50 <= len(held) <= 200
    assert not set(number[train]) & set(number[held])
    if by == "times":
        assert number[train].max() < number[held].min()


def test_logistic_regression_stops_without_a_word_to_the_user(recwarn):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 300)).astype(np.float32)
    x[:, 0] *= 100  # a column so long that a hundred steps are not enough
    rows = Rows([str(i) for i in range(400)], x, torch.from_numpy(x))
    learner = Logistic(3, strength=3.0)
    learner.fit(rows, rng.integers(0, 3, 400))
    assert learner.predict_proba(rows).shape == (400, 3)
    assert not [str(warning.message) for warning in recwarn]


def test_predict_writes_csv_only(tmp_path, capsys, monkeypatch):
    code, _, told = run(capsys, monkeypatch, "predict", tmp_path, tmp_path / "new.csv", "-o", tmp_path / "out.xlsx")
    assert code == 2
    assert "should end in .csv" in " ".join(told.split())
    assert not (tmp_path / "out.xlsx").exists()


def test_cores_and_folders_are_checked_before_the_plan(people, tmp_path):
    with pytest.raises(ValueError, match="jobs must be at least 1, got 0"):
        lc.fit(people[0], label="kind", out=tmp_path / "m", jobs=0)
    with pytest.raises(ValueError, match="is a folder; name a csv"):
        read_table(tmp_path)


def test_an_interrupted_fit_says_how_to_resume(people, tmp_path, capsys, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("logitclip.own_data.fit", interrupt)
    code, _, told = run(capsys, monkeypatch, "fit", people[0], "--label", "kind", "--out", tmp_path / "m")
    assert code == 130
    assert "Repeat the command to resume" in " ".join(told.split())
