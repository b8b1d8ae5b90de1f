"""Own data end to end: fit, the model folder, predict, issues. Small data, few epochs."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

import logitclip as lc
from logitclip import files
from logitclip.data import load as load_dataset
from logitclip.own_data import facts, find_issues, fitting
from logitclip.own_data import issues as judging
from logitclip.own_data.planning import make_plan
from logitclip.own_data.source import look
from logitclip.runs.results import Failed, read_result
from logitclip.runs.train import train
from logitclip.studies import tuning
from logitclip.text import guard_formula, unguard_formula

QUICK = {"clip": "norm:temp=2.5", "epochs": 12}


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
    return lc.fit(people[0], label="kind", out=out, find_issues=True, **QUICK)


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
    assert fitted.noise["from"] == "out of fold"
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
    flagged = issues[issues["wrong"]]
    rows = flagged["row"].astype(int) - 1
    assert (flagged["suggested"] == np.array(["red", "green", "blue"])[true[rows]]).mean() > 0.9
    assert issues["score"].sum() == pytest.approx((given != true).sum(), rel=0.25)  # scores are probabilities


def test_labels_that_follow_from_the_features_still_get_a_suggestion():
    """The noise estimate is near 0, so no label is marked, but the network contradicts the last rows."""
    given = np.repeat([0, 1, 0], [100, 100, 12])
    logits = np.stack([np.zeros(212), np.linspace(-6, -3, 212)], 1)
    logits[100:200] = -logits[:100]
    logits[200:] = [0.0, 0.5]  # unsure, and against the label
    found = judging.judged(logits, given, np.zeros(2), "out of fold")
    assert found.noise.rate < 0.01
    assert set(found.ranking[:12]) == set(range(200, 212))
    assert not found.wrong.any()
    assert (found.suggested[200:] == 1).all()
    assert (found.suggested[:200] == given[:200]).all()
    sentence = judging.marked(0, 212, "out of fold")
    assert (
        "0 of 212 labels are marked wrong: those more likely wrong than right at the estimated noise rate" in sentence
    )


def test_a_label_is_marked_wrong_if_its_score_is_above_a_half():
    """Also if no single other class is more probable than the given one."""
    rng = np.random.default_rng(0)
    true = rng.integers(0, 4, 2000)
    given = np.where(rng.random(2000) < 0.3, rng.integers(0, 4, 2000), true)
    found = judging.judged(3 * np.eye(4)[true] + rng.normal(size=(2000, 4)), given, np.zeros(4), "out of fold")
    assert (found.wrong == (found.scores > 0.5)).all()
    assert (found.suggested[found.wrong] != given[found.wrong]).all()
    assert (given != true)[found.wrong].mean() > 0.8


def test_the_summaries_say_what_the_estimate_means(fitted):
    def told(**noise):
        model = replace(fitted, facts={**fitted.facts, "noise": {**fitted.noise, **noise}})
        return model.noise_summary, model.accuracy_summary

    noise, accuracy = told(rate=0.1, rate_interval=[0.05, 0.15], at_most=0.25)
    assert "About 10% of the labels are wrong (95 % interval 5% to 15%), by predictions for every row" in noise
    assert "They contradict 25% of the labels: so many are wrong if every prediction is right." in noise
    assert "as those of labelling rules do, are not counted" in noise
    assert "clean" not in noise
    assert "a perfect classifier would score about 90% (85% to 95% over its interval)" in accuracy
    assert "contradict" not in told(rate=0.1, rate_interval=[0.05, 0.25], at_most=0.25)[0]
    noise, _ = told(rate=0.0, rate_interval=[0.0, 0.01], at_most=0.03)
    assert "The labels look clean: the clip can only cost accuracy. Try --clip none." in noise
    lost = replace(fitted, facts={**fitted.facts, "noisy_accuracy": 0.8, "largest_share": 0.79, "learnt": False})
    unknown = "The noise cannot be estimated: the network is not clearly better than guessing the largest class."
    guessing = "Accuracy on held-out noisy labels: 80.0%. Guessing the largest class scores about 79.0%."
    assert (lost.noise_summary, lost.accuracy_summary) == (unknown, guessing)
    fast = replace(lost, facts={**lost.facts, "noise": {**fitted.noise, "from": "one run"}})
    assert "on the held-out rows. With few of them, judging every row (--find-issues)" in fast.noise_summary
    old = {name: fact for name, fact in fitted.facts.items() if name not in ("learnt", "largest_share")}
    assert replace(fitted, facts=old).noise_summary == fitted.noise_summary
    assert replace(fitted, facts={**old, "noisy_accuracy": 0.3}).noise_summary == unknown


@pytest.mark.parametrize("fast", [True, False])
def test_labels_that_nothing_predicts_are_not_wrong(fast, tmp_path):
    """The network always guesses the larger class, and thus contradicts every label of the smaller one."""
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(300, 4)), columns=list("abcd"))
    frame["kind"] = np.where(np.arange(300) % 14 < 11, "common", "rare")
    model = lc.fit(frame, "kind", out=tmp_path, find_issues=not fast, clip="norm:temp=2.5", epochs=4)
    assert model.facts["noisy_accuracy"] > 0.7
    assert not model.issues["wrong"].any()
    assert "The noise cannot be estimated" in model.noise_summary
    assert "Guessing the largest class scores about 79.0%." in model.accuracy_summary
    assert model.predict(frame)["probability"].mean() < 0.9  # of the given labels, not of imagined true ones
    page = (tmp_path / "page.html").read_text()
    assert "None of 300 labels is marked wrong, because the noise is unknown." in page
    assert "true class, given as" not in page


def test_a_network_that_repeats_the_largest_class_has_learnt_nothing():
    rng = np.random.default_rng(0)
    given = np.arange(1000) % 100 // 79  # 79 % are 0
    found = judging.judged(rng.normal([1.0, 0.0], 0.1, (1000, 2)), given, np.zeros(2), "out of fold")
    assert not found.learnt
    assert not found.wrong.any()
    assert (found.scores < 0.5).all()
    assert judging.judged(3 * np.eye(2)[given], given, np.zeros(2), "out of fold").learnt


def test_the_folder_has_no_pickle_and_a_fresh_process_predicts_the_same(people, fitted, tmp_path):
    path, frame, _, _ = people
    names = {file.name for file in fitted.folder.iterdir()}
    assert names == {"model.json", "weights.safetensors", "preprocessing.skops", "issues.csv", "page.html", "runs"}
    subprocess.run(
        [sys.executable, "-m", "logitclip", "predict", fitted.folder, path, "-o", tmp_path / "out.csv"],
        check=True,
    )
    again = pd.read_csv(tmp_path / "out.csv", dtype={"row": str})
    pd.testing.assert_frame_equal(again, fitted.predict(frame), check_dtype=False)


def test_the_run_is_an_ordinary_run(fitted):
    result = read_result(fitted.folder / "runs" / fitted.facts["run"])
    config = result.config
    assert config["model"] == "mlp:depth=2"
    assert "table:path=" in config["data"]
    assert train(lc.RunConfig(**{**config, "plugin": ()})).id == result.id


def test_the_page_shows_noise_curves_and_rows(fitted):
    page = (fitted.folder / "page.html").read_text()
    assert "of the labels are wrong" in page
    assert "<svg" in page
    assert fitted.noise_summary in page
    assert fitted.accuracy_summary in page
    assert page.count("<tr") > 60


def test_one_run_finds_wrong_labels_too(people, tmp_path):
    path, _, true, given = people
    issues = find_issues(path, "kind", fast=True, out=tmp_path / "m", **QUICK)
    wrong = (given != true)[issues["row"].astype(int) - 1]
    assert wrong[: wrong.sum()].mean() > 0.8
    assert issues["wrong"].mean() == pytest.approx(0.2, abs=0.1)
    assert {"row", "mean_margin"} <= set(np.load(next((tmp_path / "m" / "runs").glob("*/examples.npz"))).files)


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
    assert "perfect classifier would agree with about 1 - r" in sentence
    assert "1 class is new to the model and counted as wrong: violet" in sentence
    some = new.assign(kind=["red", None, "blue", None])
    assert "100.0% agree" in fitted.agreement(some, fitted.predict(some))
    odd = new.assign(kind=[b"caf\xe9"] * 4)
    assert "They cannot be compared with the column 'kind'" in fitted.agreement(odd, fitted.predict(odd))
    none = new.assign(kind=None)
    assert fitted.agreement(none, fitted.predict(none)) is None


def test_a_data_frame_and_a_search(people, tmp_path):
    _, frame, true, _ = people
    model = lc.fit(frame, label="kind", out=tmp_path / "m", clip="norm:tau=auto", epochs=3)
    assert model.facts["clip"].startswith("norm:tau=")
    assert len(list((tmp_path / "m" / "runs").glob("*/result.json"))) == 6
    assert (lc.load(tmp_path / "m").predict(frame)["class"] == np.array(["red", "green", "blue"])[true]).mean() > 0.8


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


def test_the_plan_measures_on_the_device_of_the_runs(people, tmp_path, monkeypatch):
    waited = []
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr("torch.accelerator.synchronize", lambda: waited.append(1))
    make_plan(look(people[0], "kind"), out=str(tmp_path), accelerator="cpu", **QUICK)
    assert not waited
    make_plan(look(people[0], "kind"), out=str(tmp_path), **QUICK)
    assert waited


@pytest.mark.parametrize(
    ("clip", "tried", "trained", "folded"),
    [("norm:temp=2.5", None, 405, 360), ("norm:temp=auto", 405, 540, 480), ("norm:temp=grid", 405, 540, 480)],
)
def test_the_plan_knows_what_val_holds_out(people, tmp_path, clip, tried, trained, folded):
    plan = make_plan(look(people[0], "kind"), clip=clip, folds=5, out=str(tmp_path), epochs=2, val=0.25)
    expected = {"judge every label out of fold": (5, folded), "train the model": (1, trained)}
    if tried is not None:
        trial = tuning.trial(replace(plan.config, per_example=False), tuning.search_for(plan.config), 1.0)
        assert plan.rows_of(trial) == tried
        expected["choose the clip"] = (11 if "grid" in clip else 5, tried)
    final = plan.config if tried is None else replace(plan.config, val=0.0)  # as `fit` does
    assert plan.rows_of(final) == trained
    assert plan.rows_of(replace(final, per_example=False)) == folded
    assert plan.runs == expected


@pytest.fixture
def copied(fitted, tmp_path):
    """A copy of the fitted model folder, and a function that changes its model.json with a digest that matches."""
    folder = tmp_path / "model"
    shutil.copytree(fitted.folder, folder, ignore=shutil.ignore_patterns("runs"))

    def change(*removed, **changed):
        content = {**fitted.facts, **changed}
        content = {name: value for name, value in content.items() if name not in removed}
        (folder / "model.json").write_text(json.dumps({**content, "digest": files.object_digest(content)}))

    return folder, change


def test_a_damaged_folder_is_one_sentence(copied, tmp_path):
    folder, change = copied
    with pytest.raises(ValueError, match=r"is not a model folder: it has no model.json"):
        lc.load(tmp_path)
    change(format=99)
    with pytest.raises(ValueError, match="its format is 99, not 2"):
        lc.load(folder)
    (folder / "model.json").write_text("[1]")
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


def test_every_fact_is_checked(copied, fitted):
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
        if fact.optional:
            assert lc.load(folder).class_names == fitted.class_names
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
    change("files", format=1)
    caplog.clear()
    model = lc.load(folder)
    assert [record.message for record in caplog.records if "without digests" in record.message] == [caplog.messages[-1]]
    assert model.predict(people[1]).equals(fitted.predict(people[1]))


def test_two_fits_do_not_mix_in_one_folder(people, tmp_path):
    from logitclip.runs.claims import Claimed

    def second(plan):
        with pytest.raises(Claimed, match=r"is being trained by .*process \d+"):
            lc.fit(people[0], "kind", out=tmp_path / "m", **QUICK)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lc.fit(people[0], "kind", out=tmp_path / "m", on_plan=second, **QUICK)
    assert not (tmp_path / "m" / "model.json").exists()
    assert not (tmp_path / "m" / "runs" / "claim").exists()


def test_what_cannot_be_written_is_refused_before_training(people, pictures, tmp_path):
    shutil.copytree(pictures, tmp_path / "pictures")
    file = tmp_path / "pictures" / "red" / os.fsdecode(b"caf\xe9.png")
    try:
        shutil.copy(next((tmp_path / "pictures" / "red").glob("0*.png")), file)
    except OSError:
        pytest.skip("the file system only takes UTF-8")
    with pytest.raises(ValueError, match=r"The file name red/caf\\xe9.png is not UTF-8: rename the file"):
        lc.fit(tmp_path / "pictures", out=tmp_path / "m")
    (tmp_path / "n" / "page.html").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"page.html is a folder, and `fit` writes a file there"):
        lc.fit(people[0], "kind", out=tmp_path / "n")
    with pytest.raises(ValueError, match="lr must be positive and finite"):
        lc.fit(people[0], "kind", out=tmp_path / "m", lr=float("nan"), on_plan=lambda plan: pytest.fail("too late"))


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
    shutil.copytree(fitted.folder, folder, ignore=shutil.ignore_patterns("runs"))
    plugin.write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    content = {**fitted.facts, "plugin": [str(plugin)], "model": "theirs"}
    (folder / "model.json").write_text(json.dumps({**content, "digest": files.object_digest(content)}))
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
    assert plan.size == 16
    assert "size=16" in plan.config.data
    assert plan.config.model == "cnn"
    assert any("images of 16x16 pixels" in line for line in plan.lines())
    model = lc.fit(pictures, out=tmp_path / "m", clip="norm:temp=2", epochs=15)
    assert "broken.png is not a readable image" in caplog.text
    issues = model.issues
    assert len(issues) == 60
    assert issues["row"].str.endswith(".png").all()
    assert (tmp_path / "m" / "page.html").read_text().count("data:image/png;base64,") == 60
    found = model.predict(pictures)
    assert len(found) == 61
    assert found[found["row"] == "red/broken.png"]["class"].isna().all()
    listed = pd.DataFrame({"file": found["row"], "colour": found["class"].fillna("red")})
    labelled = replace(model, facts={**model.facts, "label": "colour"})
    assert "100.0% agree" in labelled.agreement(listed, found)  # without the broken one
    colours = np.array([int(name[-6:-4]) % 2 for name in found["row"] if "broken" not in name])
    assert ((found["class"].dropna() == "blue").to_numpy() == colours).mean() > 0.8


def test_of_train_and_test_folders_only_train_has_rows(pictures, tmp_path):
    """The test images must not take the place of held-out rows, however many there are."""
    shutil.copytree(pictures, tmp_path / "train", ignore=shutil.ignore_patterns("broken.png"))
    for i in range(2):
        shutil.copytree(pictures / "red", tmp_path / "test" / "blue" / str(i))
        shutil.copytree(pictures / "blue", tmp_path / "test" / "red" / str(i))
    source = look(tmp_path)
    assert len(source.labels) == 60
    dataset = load_dataset(make_plan(source).config.data)
    assert sorted([*dataset.train.rows.tolist(), *dataset.test.rows.tolist()]) == list(range(60))
    for split in (dataset.train, dataset.test):
        assert split.labels.tolist() == source.labels[split.rows].tolist()


def test_texts(tmp_path):
    rng = np.random.default_rng(0)
    words = {
        "sport": ["goal", "team", "match", "player", "score", "ball"],
        "food": ["cook", "rice", "salt", "oven", "taste", "soup"],
    }
    rows = [(" ".join(rng.choice(words[kind], 6)), kind) for kind in ("sport", "food") for _ in range(100)]
    frame = pd.DataFrame(rows, columns=["words", "kind"])
    frame.to_csv(tmp_path / "x.csv", index=False)
    hint = look(tmp_path / "x.csv", "kind", text=["words"])
    assert hint.kind == "text"
    model = lc.fit(tmp_path / "x.csv", label="kind", text="words", out=tmp_path / "m", clip="none", epochs=8)
    assert (model.predict(frame)["class"] == frame["kind"]).mean() > 0.95
    assert rows[0][0].split()[0] in (tmp_path / "m" / "page.html").read_text()


# -- bad inputs: a sentence or a recorded skip -------------------------------------------------------------------------

GOOD = "a,b,y\n" + "".join(f"{i % 7},{i % 3},{'uv'[i % 2]}\n" for i in range(40))


@pytest.mark.parametrize(
    ("content", "label", "sentence"),
    [
        (b"", "y", r"x.csv could not be read \(Empty CSV file\)"),
        (b"a,b,y\n", "y", "x.csv holds no rows"),
        (GOOD.encode(), "yy", r"x.csv has no column 'yy'. Did you mean 'y'"),
        (GOOD.encode(), None, r"Which column of .*x.csv is the label\? It has a, b, y"),
        (GOOD.replace("u", "v").encode(), "y", "the label 'y' has 1 different values; at least two are needed"),
        (GOOD.replace("a,b,y", "a,a,y").encode(), "y", "x.csv has two columns called 'a'; rename one"),
        (b"a,y\n1,caf\xe9\n2,x\n" * 5, "y", r"x.csv could not be read \(.*UTF8"),
        ("a,y\n" + "".join(f"{i % 5},{i / 7:.4f}\n" for i in range(40)), "y", "has 40 different values in 40 rows"),
        (GOOD.replace("0,0,u", "0,0,").encode(), "y", r"x.csv, row 1: the label 'y' is missing.*; fill it in"),
        (b"a,y\n" + b"1,u\n1,v\n" * 9, "y", "No column is left as a feature: 'a' has the same value in every row"),
        (b"a,y\n" + b"1,u\n2,v\n" * 3, "y", "x.csv has 6 rows; at least 10 are needed"),
    ],
    ids=["empty", "header", "misspelt", "none", "one_class", "twice", "encoding", "floats", "missing", "same", "few"],
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
        ("none,b,y", {"drop": "none"}, r"The names \['none'\] cannot be written as a spec: rename the column"),
        ("None,b,y", {"text": "None"}, r"The names \['None'\] cannot be written as a spec"),
        ('"a,c",b,y', {"drop": ["a,c"]}, "The column name 'a,c' is empty or has a comma"),
        (",b,y", {"drop": [""]}, "The column name '' is empty or has a comma"),
        ("a,b,y", {"drop": "nosuch"}, "x.csv has no column 'nosuch'"),
        ("a,b,y", {"image": "a", "drop": "nosuch"}, "x.csv has no column 'nosuch'"),
        ("a,b,y", {"image": "a", "text": "b"}, "Give either image or text: beside images no other column is used"),
    ],
)
def test_a_column_that_cannot_be_used_as_asked_is_refused(columns, options, sentence, tmp_path):
    (tmp_path / "x.csv").write_text(GOOD.replace("a,b,y", columns))
    with pytest.raises(ValueError, match=sentence):
        lc.fit(tmp_path / "x.csv", "y", out=tmp_path / "m", **options)
    assert not (tmp_path / "m").exists()


def test_a_label_may_be_called_none(tmp_path):
    (tmp_path / "x.csv").write_text(GOOD.replace("a,b,y", "a,b,none"))
    assert "label=none" in make_plan(look(tmp_path / "x.csv", "none")).config.data


def test_classes_that_differ_in_case_are_named(tmp_path):
    (tmp_path / "x.csv").write_text(GOOD + "3,1,U\n")
    assert (
        "Classes 'U' and 'u' differ only in case or spaces: are they one class?"
        in make_plan(look(tmp_path / "x.csv", "y")).lines()
    )


def test_the_plan_names_finished_runs(tmp_path):
    (tmp_path / "x.csv").write_text(GOOD)
    plans = []
    for _ in range(2):
        lc.fit(
            tmp_path / "x.csv",
            "y",
            out=tmp_path / "m",
            clip="norm:temp=2",
            epochs=2,
            on_plan=lambda plan: plans.append(plan.lines()[-1]),
        )
    assert ["finished already" in line for line in plans] == [False, True]


def test_missing_packages_are_named_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(fitting, "find_spec", lambda name: None if name in ("pandas", "skops") else name)
    with pytest.raises(ImportError, match=r"needs pandas, skops: pip install 'logitclip\[own-data\]'"):
        lc.fit(tmp_path / "x.csv", "y", out=tmp_path / "m")


def test_an_empty_column_and_dates_are_left_out_with_a_reason(tmp_path):
    rows = "".join(f"{i % 7},,2020-01-{i % 28 + 1:02},caf\\xe9,{'uv'[i % 2]}\n" for i in range(40))
    (tmp_path / "x.csv").write_bytes(("a,empty,when,odd,y\n" + rows).replace("\\xe9", "\xe9").encode("latin-1"))
    lines = make_plan(look(tmp_path / "x.csv", "y")).lines()
    assert any("Left out: 'empty' has no values." in line for line in lines)
    assert any("Left out: 'when' is a date or time" in line for line in lines)
    assert any("Left out: 'odd' is not UTF-8 text" in line for line in lines)


def test_a_class_with_one_example_is_named_and_never_judged(tmp_path):
    (tmp_path / "x.csv").write_text(GOOD + "3,1,lonely\n")
    plan = make_plan(look(tmp_path / "x.csv", "y"))
    assert any("Class 'lonely' with one example" in line for line in plan.lines())
    assert not plan.config.balance  # one label is no reason to weight the classes
    issues = find_issues(tmp_path / "x.csv", "y", out=tmp_path / "m", clip="norm:temp=2", epochs=2)
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


def test_commands(people, tmp_path, capsys, monkeypatch):
    path, *_ = people
    quick = ("--clip", "norm:temp=2.5", "--epochs", 3)
    code, printed, told = run(capsys, monkeypatch, "fit", path, "--label", "kind", "-o", tmp_path / "m", *quick)
    assert code == 0
    assert "600 rows in 3 classes" in told
    assert "Left out: 'id' numbers the rows" in told
    assert "This will take about" in told
    assert "Accuracy on held-out noisy labels" in printed
    assert "a perfect classifier would score about" in " ".join(printed.split())
    assert "predict with: logitclip predict" in printed
    code, _, told = run(capsys, monkeypatch, "predict", tmp_path / "m", path, "-o", tmp_path / "out.csv")
    assert code == 0
    assert "agree with the column 'kind'" in told
    assert len(pd.read_csv(tmp_path / "out.csv")) == 600
    code, printed, _ = run(
        capsys, monkeypatch, "issues", path, "--label", "kind", "--fast", "-o", tmp_path / "m", "--json", *quick
    )
    assert code == 0
    assert list(json.loads(printed)[0]) == ["row", "given", "suggested", "score", "wrong"]
    code, _, told = run(capsys, monkeypatch, "fit", path, "--label", "kidn")
    assert code == 2
    assert "has no column 'kidn'. Did you mean 'kind'" in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("clip", "sentence"),
    [
        ("none", "logitclip: Training failed: Diverged: Training diverged in epoch 1"),
        ("norm:temp=auto", "logitclip: No value of clip.temp can be chosen: all trials failed."),
    ],
)
def test_training_that_diverges_has_its_own_exit_code(clip, sentence, people, tmp_path, capsys, monkeypatch):
    options = ("--label", "kind", "-o", tmp_path / "m", "--epochs", 1, "--lr", 1e30, "--clip", clip)
    code, _, told = run(capsys, monkeypatch, "fit", people[0], *options)
    assert code == 3
    assert told.splitlines()[-1].startswith(sentence)
    assert "Traceback" not in told


def test_folds_that_fail_have_it_too(people, tmp_path, capsys, monkeypatch):
    def diverge(*args, **where):
        raise Failed("A run has failed: Training diverged.")

    monkeypatch.setattr("logitclip.own_data.issues.fold_logits", diverge)
    options = ("--label", "kind", "-o", tmp_path / "m", "--epochs", 1, "--clip", "none")
    code, _, told = run(capsys, monkeypatch, "issues", people[0], *options)
    assert (code, told.splitlines()[-1]) == (3, "logitclip: A run has failed: Training diverged.")


def test_names_of_classes_are_shown_as_they_are(tmp_path, capsys, monkeypatch):
    """Some mean something to rich (markup), to pandas (a missing value) or to a spreadsheet (a formula)."""
    names = np.array(["=[/b]", "None"])
    frame = pd.DataFrame({"x": np.arange(60) % 2 + np.linspace(0, 0.1, 60), "kind": names[np.arange(60) % 2]})
    frame.to_csv(tmp_path / "x.csv", index=False)
    quick = ("--clip", "norm:temp=2.5", "--epochs", 3, "--fast", "-o", tmp_path / "m")
    code, printed, told = run(capsys, monkeypatch, "issues", tmp_path / "x.csv", "--label", "kind", *quick)
    assert (code, "Traceback" in told) == (0, False)
    assert "[/b]" in printed
    assert set(lc.load(tmp_path / "m").issues["given"]) == {"=[/b]", "None"}
    assert ",'=[/b]," in (tmp_path / "m" / "issues.csv").read_text()
    assert "=[/b]" in set(lc.load(tmp_path / "m").predict(frame)["class"])
    run(capsys, monkeypatch, "predict", tmp_path / "m", tmp_path / "x.csv", "-o", tmp_path / "out.csv")
    assert ",'=[/b]," in (tmp_path / "out.csv").read_text()
    assert ",=[/b]," not in (tmp_path / "out.csv").read_text()
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


def test_with_weighted_classes_the_accuracy_is_that_of_the_predictions(unbalanced, tmp_path):
    """`predict` adds the class shares to the logits, and so do the accuracy and the suggestions for held-out rows."""
    model = lc.fit(unbalanced, "kind", out=tmp_path, model="mlp:depth=0", clip="norm:temp=2", epochs=5)
    config = model.facts["config"]
    assert config["balance"]
    rows = load_dataset(config["data"]).test.rows.tolist()
    predicted = model.predict(unbalanced)["class"].to_numpy()
    assert model.facts["noisy_accuracy"] == (predicted == unbalanced["kind"])[rows].mean()
    issues = model.issues.set_index(model.issues["row"].astype(int) - 1).loc[rows]
    assert not issues["wrong"].any()
    assert (issues["suggested"] == predicted[rows]).all()


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


def test_the_time_that_is_left_is_told_inside_an_epoch(people, tmp_path, monkeypatch):
    """The plan expects a second per step and it takes ten: the estimate adapts after a few batches."""
    from logitclip.cli import own_data

    told, clock = [], [0.0]
    monkeypatch.setattr(own_data, "tell", told.append)
    monkeypatch.setattr(own_data.time, "monotonic", lambda: clock[0])
    source = replace(look(people[0], "kind"), load_seconds=0.0)
    plan = replace(make_plan(source, out=str(tmp_path), **QUICK), step_seconds=1.0)
    pace = own_data.Pace()
    pace.plan(plan)
    told.clear()
    clock[0] = 10 * plan.start_seconds
    pace.on_start(plan.config, None)
    while not told:
        clock[0] += 10
        pace.on_batch(plan.config, round(clock[0] / 10 - 1) * plan.config.batch_size)
    assert clock[0] == pace.EVERY
    assert told == [f"{3 / plan.seconds:.0%} done, about {own_data.duration(10 * (plan.seconds - 3))} left"]


def test_predict_does_not_overwrite_its_data(tmp_path, capsys, monkeypatch):
    path = tmp_path / "people.csv"
    path.write_text("x,kind\n1,a\n")
    code, _, told = run(capsys, monkeypatch, "predict", tmp_path / "m", path, "-o", path)
    assert code == 2
    assert "is the data itself: name another file with -o." in " ".join(told.split())
    assert path.read_text() == "x,kind\n1,a\n"


def test_steps_are_timed_with_the_threads_of_a_run(monkeypatch):
    from logitclip.own_data import planning

    seen = []
    real = torch.optim.SGD.step
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self: (seen.append(torch.get_num_threads()), real(self)))
    source = planning.Source.__new__(planning.Source)
    for name, value in {"kind": "table", "class_names": ("a", "b"), "knobs": {}}.items():
        object.__setattr__(source, name, value)
    monkeypatch.setattr(planning.Source, "features", 4, raising=False)
    config = planning.RunConfig(model="mlp:width=8", batch_size=4, accelerator="cpu", threads=1)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        planning._step_seconds(source, config, 0)
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {1}
