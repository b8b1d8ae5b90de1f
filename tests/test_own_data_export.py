"""ONNX files predict as the model does, by onnxruntime."""

import numpy as np
import pandas as pd
import pytest

import logitclip as lc
from logitclip import cli
from logitclip.data._texts import TextInputs
from logitclip.own_data import load
from logitclip.own_data.export import export

pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def rows():
    """Numbers with missing values and of any size, and categories with rare, missing and two common values."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 2)) * [1, 1e6]
    frame = pd.DataFrame({"size of it": x[:, 0], "price": x[:, 1]})
    frame.loc[::20, "price"] = None
    frame["town"] = np.where(rng.random(300) < 0.5, "ab", "cd")
    frame.loc[:3, "town"] = ["rare", "other", None, "cd"]
    frame["shape"] = rng.choice(["round", "flat", "long"], 300)
    frame["kind"] = np.where(x[:, 0] + (frame["town"] == "ab") > 0.5, 7, 3)
    return frame


def run(path, frame, model):
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    kinds = model.kind.preprocessor.kinds
    inputs = {
        name: frame[[name]].fillna("").to_numpy(str).astype(object)
        if kind == "category"
        else frame[[name]].to_numpy(np.float64)
        for name, kind in kinds.items()
    }
    return session.run(["class", "probabilities"], inputs)


@pytest.mark.parametrize("learner", ["network", "forest", "logistic", "network,forest,logistic"])
def test_a_table(learner, rows, tmp_path):
    model = lc.fit(rows, "kind", learner=learner, out=tmp_path / "model", epochs=3)
    export(model, tmp_path / "model.onnx")
    new = rows.drop(columns="kind").head(40).copy()
    new.loc[5, "town"], new.loc[6, "price"], new.loc[7, "shape"] = "never seen", np.inf, None
    classes, probabilities = run(tmp_path / "model.onnx", new, model)
    np.testing.assert_allclose(probabilities, model.predict_proba(new), atol=1e-5)
    assert classes.tolist() == model.predict(new)["class"].tolist()
    assert {*classes.tolist()} <= {3, 7}


def test_only_categories_and_classes_as_text(rows, tmp_path):
    frame = rows[["town", "shape"]].assign(kind=np.where(rows["town"] == "ab", "yes", "no"))
    model = lc.fit(frame, "kind", learner="forest", out=tmp_path / "model")
    export(load(tmp_path / "model"), tmp_path / "model.onnx")
    classes, probabilities = run(tmp_path / "model.onnx", frame, model)
    np.testing.assert_allclose(probabilities, model.predict_proba(frame), atol=1e-5)
    assert classes.tolist() == model.predict(frame)["class"].tolist()


def test_a_head_on_features(bert, tmp_path, monkeypatch):
    from encoders_for_tests import make_texts

    from logitclip import encoders
    from logitclip.encoders import blocks

    monkeypatch.setenv("LOGITCLIP_FEATURES", str(tmp_path / "features"))
    texts, labels = make_texts(60)
    frame = pd.DataFrame({"text": texts, "kind": labels})
    options = {"text": "text", "encoder": f"hf:{bert}", "learner": "network,logistic", "epochs": 3}
    model = lc.fit(frame, "kind", out=tmp_path / "model", **options)
    export(model, tmp_path / "model.onnx")
    session = runtime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    features = blocks.encode_block(encoders.build(f"hf:{bert}", "texts"), TextInputs(texts))
    (found,) = session.run(["probabilities"], {"features": features.astype(np.float32)})
    np.testing.assert_allclose(found, model.predict_proba(frame), atol=1e-5)


@pytest.mark.parametrize(
    ("change", "options", "sentence"),
    [
        ({}, {"learner": "neighbours"}, "The learner neighbours cannot be exported"),
        ({}, {"learner": "network", "model": "mlp:norm=batch", "epochs": 1}, "A BatchNorm1d in the network mlp"),
        ({"when": pd.date_range("2024-01-01", periods=300)}, {"learner": "logistic"}, "'when' holds dates"),
        ({"words": "free text of a row"}, {"learner": "logistic", "text": "words"}, "A model of texts cannot be"),
    ],
)
def test_what_cannot_be_exported(change, options, sentence, rows, tmp_path):
    model = lc.fit(rows.assign(**change), "kind", out=tmp_path / "model", **options)
    with pytest.raises(ValueError, match=sentence):
        export(model, tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()


@pytest.mark.parametrize("name", ["model.pb", "model", "model.onnx.gz"])
def test_another_ending_than_that_of_the_format_is_refused(name, rows, tmp_path, monkeypatch, capsys):
    lc.fit(rows, "kind", learner="logistic", out=tmp_path / "model")
    out = tmp_path / "out" / name
    monkeypatch.setattr("sys.argv", ["logitclip", "export", str(tmp_path / "model"), "-o", str(out)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"logitclip: Unknown format of a model: {str(out)!r}. Use .onnx.\n"
    assert not out.exists()
