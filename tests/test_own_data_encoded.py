"""Photos and texts of one's own as features of a tiny encoder."""

from __future__ import annotations

import shlex
import shutil

import numpy as np
import pytest
from encoders_for_tests import make_texts, save_photos, save_text_encoder

import logitclip as lc
from logitclip import encoders
from logitclip.cli.terminal import EncodingBar
from logitclip.data import _columns as columns_module
from logitclip.own_data import model as model_module
from logitclip.own_data.kind import NewRows, Rows
from logitclip.runs.plugins import loaded_plugins

pd = pytest.importorskip("pandas")


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOGITCLIP_FEATURES", str(tmp_path / "features"))


@pytest.fixture
def reviews():
    """120 texts with the number of their words beside them, some of them under the wrong label."""
    texts, labels = make_texts(120)
    frame = pd.DataFrame({"text": texts, "words": [len(text.split()) for text in texts]})
    frame["kind"] = np.where(labels == 0, "film", "other")
    frame.loc[[5, 17, 60], "kind"] = frame.loc[[5, 17, 60], "kind"].map({"film": "other", "other": "film"})
    return frame


FAST = {"learner": "network,logistic", "clip": "norm:temp=2.5", "epochs": 10}


def test_texts_are_fitted_and_predicted_with_an_encoder(reviews, bert, tmp_path):
    plans, rows = [], []
    calls = {"on_plan": plans.append, "on_rows": lambda *done: rows.append(done)}
    model = lc.fit(reviews, "kind", text="text", encoder=f"hf:{bert}", out=tmp_path / "model", **FAST, **calls)
    assert rows == [(0, 120), (120, 120)]
    lines = " ".join(plans[0].lines())
    assert f"17 features of hf:name={bert}" in lines  # of the encoder, and the number of words
    assert "text (text), words (number)" in lines
    assert "--encoder auto" not in lines
    truth = np.where(make_texts(120)[1] == 0, "film", "other")
    assert (model.predict(reviews)["class"].to_numpy() == truth).mean() > 0.9
    again = lc.load(tmp_path / "model").predict(reviews)
    assert again.equals(model.predict(reviews))
    assert model.facts["encoder"]["identity"] == encoders.identify(f"hf:{bert}")
    assert {one["name"]: one["weight"] for one in model.facts["learners"]} == {"network": 0.5, "logistic": 0.5}


def test_photos_are_fitted_and_predicted_with_an_encoder(vit, tmp_path):
    folder = save_photos(tmp_path / "photos", 60)
    damaged = sorted(folder.rglob("*.png"))[2]
    damaged.write_bytes(b"no image")
    model = lc.fit(folder, encoder=f"hf:{vit}", out=tmp_path / "model", **FAST)
    found = model.predict(folder)
    assert len(found) == 60
    assert found["class"].isna().sum() == 1
    known = found[found["class"].notna()]
    assert (known["class"] == known["row"].str[:3]).mean() > 0.9


def test_a_relative_encoder_is_found_from_another_folder(vit, tmp_path, monkeypatch, command):
    folder = save_photos(tmp_path / "photos", 40)
    monkeypatch.chdir(vit.parent)
    model = lc.fit(folder, encoder=f"hf:{vit.name}", out=tmp_path / "model", learner="logistic")
    assert model.facts["encoder"]["spec"] == f"hf:name={vit.resolve()}"
    monkeypatch.chdir(tmp_path)
    code, _, err = command("predict", "model", "photos", "-o", "out.csv")
    assert code == 0, err
    right = (model.predict(folder)["class"] == model.predict(folder)["row"].str[:3]).mean()
    assert f"{right:.1%} agree with the class folders" in err


def test_predict_downloads_a_missing_encoder(vit, tmp_path, monkeypatch, command):
    import huggingface_hub

    asked = []

    def ask(name, **options):
        asked.append(options["local_files_only"])
        if options["local_files_only"] and False not in asked:
            raise FileNotFoundError(name)
        return str(vit)

    folder = save_photos(tmp_path / "photos", 40)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", ask)
    lc.fit(folder, encoder="hf:me/tiny", out=tmp_path / "model", learner="logistic", download=True)
    asked.clear()
    code, _, err = command("predict", tmp_path / "model", folder, "-o", tmp_path / "out.csv")
    assert (code, "add --download to fetch it" in err) == (2, True), err
    code, _, err = command("predict", tmp_path / "model", folder, "-o", tmp_path / "out.csv", "--download")
    assert code == 0, err


def test_without_an_encoder_the_plan_says_what_one_would_bring(reviews, tmp_path):
    plans = []
    lc.fit(reviews, "kind", text="text", out=tmp_path / "model", learner="logistic", on_plan=plans.append)
    assert "add --encoder auto --download" in " ".join(plans[0].lines())


def test_other_weights_are_refused_in_one_sentence(reviews, bert, tmp_path):
    own = shutil.copytree(bert, tmp_path / "bert")
    lc.fit(reviews, "kind", text="text", encoder=f"hf:{own}", out=tmp_path / "model", **FAST)
    save_text_encoder(own, seed=1)
    with pytest.raises(ValueError, match="has other weights or another tokenizer than when the model was fitted"):
        lc.load(tmp_path / "model")


def test_a_bundle_needs_no_other_folder(reviews, bert, tmp_path):
    own = shutil.copytree(bert, tmp_path / "bert")
    model = lc.fit(reviews, "kind", text="text", encoder=f"hf:{own}", out=tmp_path / "model", bundle=True, **FAST)
    wanted = model.predict(reviews)
    shutil.rmtree(own)
    moved = (tmp_path / "model").rename(tmp_path / "elsewhere")
    assert lc.load(moved).predict(reviews).equals(wanted)
    with pytest.raises(ValueError, match="name one with encoder"):
        lc.fit(reviews, "kind", text="text", out=tmp_path / "other", bundle=True)


def test_a_bundle_of_an_earlier_model_is_not_taken_and_a_link_not_written_through(reviews, bert, tmp_path):
    other, theirs = save_text_encoder(tmp_path / "other", seed=1), tmp_path / "theirs"
    theirs.mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "encoder").symlink_to(theirs)
    options = {"text": "text", "out": tmp_path / "model", **FAST}
    lc.fit(reviews, "kind", encoder=f"hf:{bert}", bundle=True, **options)
    assert not any(theirs.iterdir())
    model = lc.fit(reviews, "kind", encoder=f"hf:{other}", **options)
    wanted = model.predict(reviews)
    assert lc.load(tmp_path / "model").predict(reviews).equals(wanted)
    lc.fit(reviews, "kind", encoder=f"hf:{other}", bundle=True, **options)
    lc.fit(reviews, "kind", encoder=f"hf:{tmp_path / 'model' / 'encoder'}", bundle=True, **options)  # its own bundle
    shutil.rmtree(other)
    assert lc.load(tmp_path / "model").predict(reviews).equals(wanted)


def test_predictions_stream(reviews, bert, tmp_path, monkeypatch):
    model = lc.fit(reviews, "kind", text="text", encoder=f"hf:{bert}", out=tmp_path / "model", **FAST)
    whole = model.predict_proba(reviews)
    sizes = []
    original = NewRows.take
    monkeypatch.setattr(NewRows, "take", lambda self, index: sizes.append(len(index)) or original(self, index))
    monkeypatch.setattr(model_module, "ENCODED_AT_ONCE", 50)
    np.testing.assert_allclose(model.predict_proba(reviews), whole, atol=1e-3)
    assert sizes == [50, 50, 20]


@pytest.mark.parametrize("suffix", ["csv", "csv.gz", "parquet"])
def test_the_command_predicts_a_file_part_by_part(suffix, command, reviews, bert, tmp_path, monkeypatch):
    fit = {"text": "text", "encoder": f"hf:{bert}", "out": tmp_path / "model", "learner": "logistic"}
    model = lc.fit(reviews, "kind", **fit)
    path = tmp_path / f"new.{suffix}"
    reviews.to_parquet(path) if suffix == "parquet" else reviews.to_csv(path, index=False)
    wanted = model.predict(path)
    monkeypatch.setattr(columns_module, "PART", 700)
    monkeypatch.setattr(columns_module, "PART_ROWS", 23)
    assert len(list(model.kind.read_parts(path))) > 4
    code, _, err = command("predict", tmp_path / "model", path, "-o", tmp_path / "out.csv")
    assert code == 0, err
    found = pd.read_csv(tmp_path / "out.csv", dtype={"row": str})
    assert found["row"].tolist() == wanted["row"].tolist() == [str(i + 1) for i in range(120)]
    assert found["class"].tolist() == wanted["class"].tolist()
    np.testing.assert_allclose(found["probability"], wanted["probability"], atol=1e-3)
    right = (wanted["class"] == reviews["kind"]).mean()
    assert f"{right:.1%} agree with the column 'kind'" in err


def test_a_mistake_in_a_file_is_one_sentence_and_leaves_no_file(command, reviews, bert, tmp_path):
    out = tmp_path / "model"
    lc.fit(reviews, "kind", text="text", encoder=f"hf:{bert}", out=out, learner="logistic")
    wrong = {
        "no text": (reviews.drop(columns="text"), "There is no column 'text'"),
        "no number": (reviews.assign(words="many"), "Column 'words' held numbers when the model was fitted"),
        "no rows": (reviews.head(0), "holds no rows"),
    }
    for name, (frame, sentence) in wrong.items():
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
        code, _, err = command("predict", out, tmp_path / f"{name}.csv", "-o", tmp_path / "out.csv")
        assert (code, sentence in err) == (2, True), err
    (tmp_path / "cut.csv").write_bytes(b'text,words\na,1\n"b,2\nc')
    code, _, err = command("predict", out, tmp_path / "cut.csv", "-o", tmp_path / "out.csv")
    assert (code, "could not be read" in err) == (2, True), err
    assert not [path for path in tmp_path.iterdir() if "out.csv" in path.name]


def test_a_table_of_numbers_takes_no_encoder(reviews, bert, tmp_path):
    with pytest.raises(ValueError, match="An encoder takes images or texts: name the columns"):
        lc.fit(reviews[["words", "kind"]], "kind", encoder=f"hf:{bert}", out=tmp_path / "model")


PLUGIN = """
import torch
from logitclip.encoders import ENCODERS, reads

class Lengths:
    width, size = 2, 0
    def prepare(self, text):
        return [len(text), text.count("o")]
    def __call__(self, batch):
        return torch.tensor(batch, dtype=torch.float32)

@ENCODERS.register
@reads(lambda: [])
def lengths(*, takes, device):
    return Lengths()

@ENCODERS.register
def lengths_of(*, name, takes, device):
    return Lengths()
"""


def test_an_encoder_of_a_plugin(command, reviews, tmp_path, monkeypatch):
    monkeypatch.setattr(encoders.ENCODERS, "_entries", dict(encoders.ENCODERS._entries))
    reviews.to_csv(tmp_path / "reviews.csv", index=False)
    (tmp_path / "lengths.py").write_text(PLUGIN)
    plugin = ("--plugin", tmp_path / "lengths.py")
    fit = ("fit", tmp_path / "reviews.csv", "--label", "kind", "--text", "text", "--encoder", "lengths")
    code, _, err = command(*fit, "--out", tmp_path / "model")
    assert (code, "name its file: --plugin FILE.py" in err) == (2, True), err
    code, out, err = command(*fit, "--learner", "logistic", "--out", tmp_path / "model", *plugin)
    assert code == 0, err
    named = f"--plugin {shlex.quote(str(tmp_path / 'lengths.py'))}"
    assert named in out.replace("\n", " ")
    assert str(tmp_path / "lengths.py") in loaded_plugins()  # for processes that encode
    predict = ("predict", tmp_path / "model", tmp_path / "reviews.csv", "-o", tmp_path / "out.csv")
    code, _, err = command(*predict, *plugin)
    assert (code, "120 predictions" in err) == (0, True), err
    code, _, err = command("apply", tmp_path / "model", "-o", tmp_path / "corrected.csv", *plugin)
    assert (code, f"{named}` asks for them" in err.replace("\n", " ")) == (2, True), err
    for encoder in ("lengths", "lengths_of:x"):
        code, _, err = command(*fit[:-1], encoder, "--bundle", "--out", tmp_path / "other", *plugin)
        assert (code, "cannot be bundled" in err) == (2, True), err


def test_the_features_of_test_rows_are_kept(reviews, bert, tmp_path):
    rows = []
    options = {"text": "text", "encoder": f"hf:{bert}", "learner": "logistic", "test": reviews.head(30)}
    model = lc.fit(reviews, "kind", **options, out=tmp_path / "a", on_rows=lambda *done: rows.append(done))
    assert rows == [(0, 120), (120, 120), (0, 30), (30, 30)]
    truth = model.predict(reviews.head(30))["class"] == reviews.head(30)["kind"]
    assert model.facts["test_accuracy"] == pytest.approx(truth.mean())
    again = lc.fit(reviews, "kind", **options, out=tmp_path / "b", on_rows=lambda *done: pytest.fail("computed again"))
    assert again.facts["test_accuracy"] == model.facts["test_accuracy"]


def test_the_bar_begins_again(capsys):
    bar = EncodingBar()
    for done, rows in [(0, 9), (9, 9), (0, 4), (4, 4)]:
        bar(done, rows)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" rows")[0] for line in lines] == [
        f"Encoding: {n}" for n in ("0 of 9", "9 of 9", "0 of 4", "4 of 4")
    ]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_table_is_predicted_part_by_part(suffix, command, tmp_path, monkeypatch, caplog):
    """Numbers, booleans, dates, categories and vectors; the first part of a csv file has whole numbers only."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 2, 100)
    frame = pd.DataFrame(
        {"size": labels + generator.normal(0, 0.3, 100).round(2), "old": labels > generator.random(100)}
    )
    frame.loc[:60, "size"] = labels[:61]
    frame["day"] = (np.datetime64("2026-01-01") + labels * 40 + np.arange(100) % 7).astype(str)
    frame["colour"] = np.where(generator.random(100) < 0.5, "red", "blue")
    frame["kind"] = np.where(labels == 0, "herb", "shrub")
    if suffix == "parquet":
        frame["v"] = list(np.stack([np.zeros(100), labels, generator.normal(0, 1, 100)], 1))  # v0 is no feature
    model = lc.fit(frame, "kind", learner="logistic", out=tmp_path / "model")
    frame.loc[[3, 90], "colour"] = "green"
    path = tmp_path / f"new.{suffix}"
    frame.to_parquet(path) if suffix == "parquet" else frame.to_csv(path, index=False)
    monkeypatch.setattr(columns_module, "PART", 700)
    monkeypatch.setattr(columns_module, "PART_ROWS", 23)
    parts = list(model.kind.read_parts(path))
    assert len(parts) > 4
    features = [rows.features for rows in (*parts, model.kind.read(path)) if isinstance(rows, Rows)]
    assert len(features) == len(parts) + 1
    np.testing.assert_array_equal(np.concatenate(features[:-1]), features[-1])
    caplog.clear()
    code, _, err = command("predict", tmp_path / "model", path, "-o", tmp_path / "out.csv")
    assert code == 0, err
    assert caplog.text.count("has values that the model does not know: 'green'") == 1
    wanted = model.predict(path)
    assert pd.read_csv(tmp_path / "out.csv")["class"].tolist() == wanted["class"].tolist()
    assert f"{(wanted['class'] == frame['kind']).mean():.1%} agree with the column 'kind'" in err


def test_command(command, reviews, bert, tmp_path):
    reviews.to_csv(tmp_path / "reviews.csv", index=False)
    arguments = ("--label", "kind", "--text", "text", "--encoder", f"hf:{bert}", "--learner", "logistic")
    code, _, err = command("issues", tmp_path / "reviews.csv", *arguments, "-o", tmp_path / "issues")
    assert code == 0, err
    code, out, err = command("predict", tmp_path / "issues", tmp_path / "reviews.csv", "--json")
    assert (code, out.count('"class"')) == (0, 120), err
