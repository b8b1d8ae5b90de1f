"""The data of the next `fit`: fused answers of annotators, and corrections of a review."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from disk import everything_in
from reviews import make_images, make_model, make_table, open_review

from logitclip.own_data import fitting, load
from logitclip.own_data.annotators import FUSED_ITEM, FUSED_LABEL, FUSED_WEIGHT, fuse_data
from logitclip.own_data.answers import Answer, append_answers
from logitclip.own_data.apply import apply_answers, correct_data
from logitclip.own_data.source import Options, look
from logitclip.runs.claims import Claimed, claim


def crowd(folder: Path, seed: int = 0) -> tuple[Path, np.ndarray]:
    """Write a table with three annotators, the last of whom guesses, and return the true classes."""
    rng = np.random.default_rng(seed)
    true = rng.integers(0, 2, 120)
    frame = pd.DataFrame({"x": 3.0 * true + rng.normal(size=120), "word": ["a", "b"] * 60})
    for name, skill in (("ann", 0.95), ("bob", 0.8), ("eve", 0.5)):
        said = np.where(rng.random(120) < skill, true, 1 - true)
        frame[name] = np.array(["no", "yes"])[said]
        frame.loc[rng.random(120) < 0.2, name] = ""
    frame.loc[(frame[["ann", "bob", "eve"]] == "").all(axis=1), "ann"] = "no"
    frame.to_csv(folder / "crowd.csv", index=False)
    return folder / "crowd.csv", true


def test_one_column_an_annotator(tmp_path: Path) -> None:
    path, true = crowd(tmp_path)
    fused = fuse_data(path, tmp_path, annotators=["ann", "bob", "eve"])
    assert fused.way == "features"
    assert [row["annotator"] for row in fused.reliability] == ["ann", "bob", "eve"]
    assert all(row["low"] < row["accuracy"] < row["high"] for row in fused.reliability)
    table: Any = pd.read_csv(fused.path)
    assert list(table) == ["x", "word", FUSED_LABEL, FUSED_WEIGHT, FUSED_ITEM]
    assert table.groupby(FUSED_ITEM)[FUSED_WEIGHT].sum().to_numpy() == pytest.approx(np.ones(120), abs=0.05)
    best = table.sort_values(FUSED_WEIGHT).drop_duplicates(FUSED_ITEM, keep="last").sort_values(FUSED_ITEM)
    assert ((best[FUSED_LABEL] == "yes").to_numpy() == (true == 1)).mean() > 0.85
    assert (best["x"].to_numpy() == pd.read_csv(path)["x"].to_numpy()).all()
    assert pd.read_csv(tmp_path / "annotators.csv")["annotator"].tolist() == ["ann", "bob", "eve"]


def test_items_without_an_answer_are_predicted(tmp_path: Path, capsys) -> None:
    from logitclip.cli.own_data import FitOptions, fit

    path, true = crowd(tmp_path)
    frame = pd.read_csv(path, keep_default_na=False)
    frame.loc[[4, 70], ["ann", "bob", "eve"]] = ""
    frame.to_csv(path, index=False)
    fit(path, out=tmp_path / "model", options=FitOptions(annotators="ann,bob,eve", learner="logistic"))
    assert "2 items without any answer" in capsys.readouterr().out
    fused: Any = pd.read_csv(tmp_path / "model" / "fused.csv", keep_default_na=False).set_index(FUSED_ITEM)
    assert fused.index[fused[FUSED_LABEL] == ""].tolist() == [5, 71]
    found: Any = pd.read_csv(tmp_path / "model" / "unlabelled.csv")
    assert (found["class"] == np.array(["no", "yes"])[true[[4, 70]]]).all()


def test_one_row_an_answer_gives_the_same(tmp_path: Path) -> None:
    path, _ = crowd(tmp_path)
    wide = fuse_data(path, tmp_path / "wide", annotators=["ann", "bob", "eve"])
    frame = pd.read_csv(path, keep_default_na=False).reset_index(names="id")
    frame["id"] += 1
    long = frame.melt(["id", "x", "word"], ["ann", "bob", "eve"], "who", "label").query("label != ''")
    long.sort_values("id").to_csv(tmp_path / "long.csv", index=False)
    other = fuse_data(tmp_path / "long.csv", tmp_path / "long", item="id", annotator="who", answer="label")
    pd.testing.assert_frame_equal(pd.read_csv(other.path), pd.read_csv(wide.path))
    assert other.disagree == wide.disagree


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "Name either"),
        ({"item": "x"}, "Name either"),
        ({"annotators": ["ann"], "item": "x", "annotator": "ann", "answer": "bob"}, "Name either"),
        ({"annotators": ["ann", "joe"]}, "There is no column 'joe'"),
        ({"annotators": ["ann", "bob", "eve"], "drop": ["x", "word"]}, "no column to learn from"),
        ({"item": "word", "annotator": "ann", "answer": "eve"}, "has an empty"),
    ],
)
def test_options_that_do_not_fit_together(tmp_path: Path, options: dict, message: str) -> None:
    path, _ = crowd(tmp_path)
    with pytest.raises(ValueError, match=message):
        fuse_data(path, tmp_path, **options)


def test_corrections_are_written_into_the_model_folder(tmp_path: Path) -> None:
    model = make_model(make_table(tmp_path), tmp_path / "model", label="kind")
    with pytest.raises(ValueError, match="There are no answers"):
        correct_data(model.folder, model.folder)
    review = open_review(model)
    append_answers(review.path, [Answer("1", review.rows.digest(0), "class", "oak", "Ann")])
    corrected = correct_data(model.folder, model.folder)
    assert corrected.round is not None
    done = corrected.round.applied
    assert (corrected.label, done.corrected + done.kept, len(corrected.round.review.settled)) == ("kind", 1, 1)
    assert pd.read_csv(corrected.path)["kind"].tolist()[0] == "oak"


def test_an_interrupted_round_is_finished_by_the_same_command(tmp_path: Path, monkeypatch, caplog) -> None:
    from logitclip.cli.own_data import FitOptions, fit

    data, options = make_table(tmp_path), FitOptions(learner="logistic")
    model = make_model(data, tmp_path / "model", label="kind")
    review = open_review(model)
    answers = [Answer("1", review.rows.digest(0), "class", "oak", "Ann"), Answer("2", review.rows.digest(1), "none")]
    append_answers(review.path, answers)

    def full(*_) -> None:
        raise OSError("no room")

    with monkeypatch.context() as at_the_end:
        at_the_end.setattr(fitting, "write_issues", full)
        with pytest.raises(OSError, match="no room"):
            fit(data, out=model.folder, options=replace(options, answers=model.folder))
    append_answers(tmp_path / "more.jsonl", [Answer("3", review.rows.digest(2), "class", "elm", "Bob")])
    fit(data, out=model.folder, options=replace(options, answers=tmp_path / "more.jsonl"))
    assert "was interrupted: it is finished first, with the answers that it had." in caplog.text
    assert "Newer answers are kept; repeat the command to use them." in caplog.text
    assert len(load(model.folder).issues) == len(pd.read_csv(data)) - 1
    assert open_review(load(model.folder)).checked.sum() == 1
    fit(data, out=model.folder, options=replace(options, answers=model.folder))
    assert open_review(load(model.folder)).checked.sum() == 2


def test_data_for_the_next_fit_is_written_only_by_who_holds_the_folder(tmp_path: Path) -> None:
    from logitclip.cli.own_data import FitOptions, fit

    table, out, quick = make_table(tmp_path), tmp_path / "model", FitOptions(learner="logistic")
    path, _ = crowd(tmp_path)
    model = make_model(table, out, label="kind", learner="logistic")
    append_answers(out / "answers.jsonl", [Answer("1", open_review(model).rows.digest(0), "class", "oak", "Ann")])
    before = everything_in(out)
    with claim(out):
        for options in ({"answers": out}, {"annotators": "ann,bob,eve"}):
            with pytest.raises(Claimed, match=f"trained by process {os.getpid()}"):
                fit(table if "answers" in options else path, out=out, options=replace(quick, **options))
        assert {name: content for name, content in everything_in(out).items() if name != "claim"} == before


def test_files_that_fit_did_not_write_are_not_replaced_by_fused_answers(tmp_path: Path) -> None:
    from logitclip.cli.own_data import FitOptions, fit

    path, _ = crowd(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "annotators.csv").write_text("my own notes", encoding="utf-8")
    with pytest.raises(ValueError, match=r"annotators\.csv is a file that `fit` did not write"):
        fit(path, out=tmp_path / "mine", options=FitOptions(annotators="ann,bob,eve"))
    with pytest.raises(ValueError, match="There is no column 'joe'"):
        fit(path, out=tmp_path / "new", options=FitOptions(annotators="ann,joe"))
    assert not (tmp_path / "new").exists()


def test_the_command_fits_on_answers_and_says_what_the_round_brought(tmp_path: Path, capsys) -> None:
    from logitclip.cli.own_data import FitOptions, fit

    data = make_table(tmp_path)
    model = make_model(data, tmp_path / "model", label="kind")
    with pytest.raises(ValueError, match="has none: give --out"):
        fit(data, out=tmp_path / "other", options=FitOptions(answers=model.folder))
    review = open_review(model)
    true = pd.read_csv(tmp_path / "with_truth.csv", keep_default_na=False)["true"].tolist()
    first = review.suspects[:12]
    for i in first:
        review.answer(i, review.rows.digest(i), "class", true[i], "Ann")
    wrong = sum(true[i] != model.class_names[review.given[i]] for i in first)
    capsys.readouterr()
    fit(data, out=model.folder, options=FitOptions(answers=model.folder, learner="logistic"))
    out, err = capsys.readouterr()
    assert f"The last round: {wrong} label" in out
    assert f"{12 - wrong} confirmed" in err
    again = open_review(load(model.folder))
    assert again.checked.sum() == 12
    assert again.state()["last"] == 0  # of this round
    assert not set(first) & set(again.suspects)
    assert again.scores[first].max() == 0.0
    assert (again.answers_array()[first] == again.given[first]).all()
    kept = fit_on(tmp_path / "model" / "corrected.csv", tmp_path / "fresh")  # without the folder's answers
    assert open_review(kept).checked.sum() == 12


def test_after_a_round_the_audit_before_it_is_still_reported(tmp_path: Path, capsys) -> None:
    from logitclip.cli.own_data import FitOptions, fit
    from logitclip.cli.review import review

    data = make_table(tmp_path)
    model = make_model(data, tmp_path / "model", label="kind")
    true = pd.read_csv(tmp_path / "with_truth.csv", keep_default_na=False)["true"].tolist()

    def audit(size: int) -> Any:
        state = open_review(load(model.folder), size)
        for i in state.asked.tolist():
            state.answer(i, state.rows.digest(i), "class", true[i], "Ann")
        found = state.report()
        assert found is not None
        return found

    options = FitOptions(answers=model.folder, learner="logistic")
    first = audit(40)
    fit(data, out=model.folder, options=options)
    fit(data, out=model.folder, options=options)  # the model stays, and so does what is kept
    second = audit(30)
    capsys.readouterr()
    review(model.folder, report=True)
    out = capsys.readouterr().out
    said = (
        f"An earlier audit, with 40 answers: {first.noise.value:.1%} ({first.noise.low:.1%} to {first.noise.high:.1%}) "
        "of the labels were wrong, as they were then; the model of then was right for "
    )
    assert out.count("An earlier audit") == 1
    assert f"{said}{first.model.value:.1%}" in out
    assert f"Audit: {second.noise.answers} answers" in out
    fit(data, out=model.folder, options=options)
    review(model.folder, json=True)
    kept = json.loads("{" + capsys.readouterr().out.partition("\n{")[2])["earlier_audits"]
    assert [one["noise"]["value"] for one in kept] == [first.noise.value, second.noise.value]
    for content in ("7", "[7]", '[{"of": "x", "noise": {"value": 2}}]'):
        (model.folder / "earlier_audits.json").write_text(content, encoding="utf-8")
        assert open_review(load(model.folder)).earlier == []


def test_rounds_remember_the_columns_of_the_model(tmp_path: Path, capsys) -> None:
    """`--answers` needs no other option; two rounds, the second on what the first has written."""
    from logitclip.cli.own_data import FitOptions, fit

    rng = np.random.default_rng(0)
    words = [["fine", "good", "nice", "warm"], ["bad", "cold", "poor", "sad"]]
    texts = [" ".join(rng.choice(words[i % 2], 6)) + f" {i}" for i in range(80)]
    frame = pd.DataFrame({"said": texts, "site": ["a", "b"] * 40, "kind": ["yes", "no"] * 40})
    frame.loc[:5, "kind"] = ["no", "yes"] * 3
    frame.to_csv(tmp_path / "texts.csv", index=False)
    out, quick = tmp_path / "model", FitOptions(learner="logistic")
    fit(tmp_path / "texts.csv", out=out, options=FitOptions("kind", text="said", drop="site", learner="logistic"))
    printed = capsys.readouterr().out
    assert f"Check them: logitclip review {shlex.quote(str(out))}" in printed
    for rows, data, brought in (
        (range(4), tmp_path / "texts.csv", "4 labels corrected; "),
        (range(4, 6), out / "corrected.csv", "2 labels corrected (6 in all); "),
    ):
        review = open_review(load(out))
        for i in rows:
            review.answer(i, review.rows.digest(i), "class", ["yes", "no"][i % 2], "Ann")
        fit(data, out=out, options=replace(quick, answers=out))
        printed, plan = capsys.readouterr()
        assert f"The last round: {brought}" in printed
        assert "'site' as you asked" in plan
        assert "labels a person has checked: they count as true" in plan
        notes = pd.read_csv(out / "corrected.csv", keep_default_na=False)["logitclip_review"].tolist()
        done = max(rows) + 1
        assert notes[:done] == ["corrected from no", "corrected from yes"] * (done // 2)
        assert not any(notes[done:])
    assert open_review(load(out)).checked.sum() == 6


def test_rounds_on_a_folder_of_images(tmp_path: Path, capsys) -> None:
    from logitclip.cli.own_data import FitOptions, fit

    photos = make_images(tmp_path / "photos")
    model = make_model(photos, tmp_path / "model", learner="logistic")
    before = sorted(path.relative_to(photos) for path in photos.rglob("*"))
    for count, pictures in ((4, (1, 2, 3, 4)), (7, (0, 5, 9))):  # a round starts from the folder, with all answers
        review = open_review(load(model.folder))
        for i, name in enumerate(review.rows.names):
            number = int(name.split("/")[1].split()[0])
            if number in pictures:
                review.answer(i, review.rows.digest(i), "class", ["dark", "light"][number % 2], "Ann")
        fit(photos, out=model.folder, options=FitOptions(answers=model.folder, learner="logistic"))
        out, err = capsys.readouterr()
        assert "The last round:" in out
        assert "kept as it is" not in err
        again = open_review(load(model.folder))
        assert again.checked.sum() == count
        assert again.rows.has_pictures
    listed = pd.read_csv(model.folder / "corrected.csv", keep_default_na=False)
    wrong = listed[listed["logitclip_review"].str.startswith("corrected from")]
    assert sorted(wrong["label"]) == ["dark", "light"]  # pictures 0 and 9 were in the other folder
    assert sorted(path.relative_to(photos) for path in photos.rglob("*")) == before
    assert len(load(model.folder).predict(photos)) == 36


@pytest.mark.parametrize("kind", ["csv", "tsv", "parquet"])
def test_names_that_are_formulas_come_back_as_they_were(tmp_path: Path, kind: str) -> None:
    photos, classes = tmp_path / "photos", {"dark": "=dark", "light": "'+light"}
    for old, new in classes.items():
        (make_images(photos) / old).rename(photos / new)
    model = make_model(photos, tmp_path / "model", learner="logistic")
    review = open_review(model)
    names, labels = list(review.rows.names), [review.class_names[k] for k in review.given]
    for i, label in ((0, "'+light"), (1, labels[1])):
        review.answer(i, review.rows.digest(i), "class", label, "Ann")
    apply_answers(review.rows, review.settled, tmp_path / f"list.{kind}")
    again = look(tmp_path / f"list.{kind}", "label", Options(image="file", folder=str(photos)))
    assert list(again.rows.names) == names
    assert [again.class_names[k] for k in again.labels] == ["'+light", *labels[1:]]
    assert again.reviewed is not None
    assert again.reviewed.sum() == 2


def test_reviewed_labels_count_more_in_the_search_for_a_clip(tmp_path: Path, monkeypatch) -> None:
    import logitclip.own_data.fitting as module

    frame = pd.read_csv(make_table(tmp_path))
    frame["logitclip_review"] = ["kept"] * 30 + [""] * 90
    seen = []

    def tune(train, **options):
        predicted, labels, accuracy = train(1.0)
        seen.append((len(predicted), len(labels), accuracy))
        return SimpleNamespace(best=1.0)

    monkeypatch.setattr(module.search, "tune", tune)
    for reviewed in (frame.drop(columns="logitclip_review"), frame):
        module.fit(reviewed, "kind", out=tmp_path / str(len(seen)), clip="norm:temp=auto", learner="network", epochs=1)
    plain = seen[0][0]
    assert seen[0][:2] == (plain, plain)
    assert seen[1][0] == seen[1][1] > plain + 2 * 5


def fit_on(data: Path, out: Path):
    return make_model(data, out, label="kind", learner="logistic")


def test_the_command_fits_on_annotators(tmp_path: Path, capsys) -> None:
    from logitclip.cli.own_data import FitOptions, fit

    path, true = crowd(tmp_path)
    fit(path, out=tmp_path / "model", options=FitOptions(annotators="ann,bob,eve", learner="forest"))
    out = capsys.readouterr().out
    assert "annotators.csv" in out
    model = load(tmp_path / "model")
    assert model.class_names == ["no", "yes"]
    predicted = model.predict(pd.read_csv(path).drop(columns=["ann", "bob", "eve"]))["class"]
    assert ((predicted == "yes").to_numpy() == (true == 1)).mean() > 0.85


def test_issues_takes_annotators_and_answers_but_no_folder_of_fit(tmp_path: Path, capsys) -> None:
    from logitclip.cli.own_data import FitOptions, fit, issues

    path, _ = crowd(tmp_path)
    crowded = FitOptions(annotators="ann,bob,eve", learner="logistic")
    issues(path, out=tmp_path / "found", options=crowded)
    out = capsys.readouterr().out
    assert "annotators.csv" in out
    assert "Most suspicious labels" in out
    assert load(tmp_path / "found").facts["made_by"] == "issues"

    table = make_table(tmp_path)
    model = make_model(table, tmp_path / "checked", label="kind", learner="logistic", made_by="issues")
    one = open_review(model).rows.digest(0)
    append_answers(model.folder / "answers.jsonl", [Answer("1", one, "class", "oak", "Ann")])
    issues(table, out=model.folder, options=FitOptions(answers=model.folder, learner="logistic"))
    assert "The last round: 1 label corrected" in capsys.readouterr().out

    fit(path, out=tmp_path / "model", options=crowded)
    before = everything_in(tmp_path / "model")
    with pytest.raises(ValueError, match="has a model that `fit` made: name another folder"):
        issues(path, out=tmp_path / "model", options=crowded)
    assert everything_in(tmp_path / "model") == before


def with_decimal_commas(folder: Path) -> Path:
    frame = pd.read_csv(make_table(folder), keep_default_na=False)
    frame.to_csv(folder / "commas.csv", index=False, sep=";", decimal=",")
    return folder / "commas.csv"


def test_numbers_with_decimal_commas_stay_numbers(tmp_path: Path) -> None:
    data = with_decimal_commas(tmp_path)
    model = fit_on(data, tmp_path / "model")
    review = open_review(model)
    append_answers(review.path, [Answer("1", review.rows.digest(0), "class", "oak", "Ann")])
    for name in ("again.csv", "again.tsv", "again.parquet"):
        apply_answers(review.rows, review.settled, tmp_path / name)
        again = look(tmp_path / name, "kind")
        assert again.used == review.rows.source.used
        assert (again.rows.features == review.rows.source.rows.features).all()
    corrected = correct_data(model.folder, model.folder)
    assert open_review(fit_on(corrected.path, tmp_path / "next")).rows.digest(0) == review.rows.digest(0)
    read = pd.read_csv(data, sep=";", decimal=",", keep_default_na=False)
    for name in ("ann", "bob"):
        read[name] = read["kind"]
    read.to_csv(tmp_path / "crowd.csv", index=False, sep=";", decimal=",")
    fused = fuse_data(tmp_path / "crowd.csv", tmp_path, annotators=["ann", "bob"], drop=["kind"])
    assert look(fused.path, FUSED_LABEL, Options(drop=(FUSED_WEIGHT, FUSED_ITEM))).used["x"] == "number"


@pytest.mark.parametrize("suffix", ["parquet", "npz"])
def test_vectors_and_whole_labels_of_other_formats_are_read_again(tmp_path: Path, suffix: str) -> None:
    rng = np.random.default_rng(0)
    kind = np.arange(40) % 2
    vectors = (np.eye(2)[kind] * 3 + rng.normal(size=(40, 2))).astype(np.float32)
    data, codes = tmp_path / f"rows.{suffix}", np.array(["007", "7"])[rng.integers(0, 2, 40)]
    if suffix == "npz":
        np.savez(data, v=vectors, kind=kind.astype(float), code=codes)
    else:
        frame = pd.DataFrame({"v": list(vectors), "kind": kind.astype(float), "code": codes})
        frame.to_parquet(data)
    model = fit_on(data, tmp_path / "model")
    review = open_review(model)
    append_answers(review.path, [Answer("1", review.rows.digest(0), "class", "1", "Ann")])
    corrected = correct_data(model.folder, model.folder)
    again = look(corrected.path, "kind")
    assert again.used == {"v0": "number", "v1": "number", "code": "category"}
    assert again.class_names == ("0", "1")
    assert again.labels.tolist() == [1, *kind[1:]]
    review = open_review(model)
    apply_answers(review.rows, review.settled, tmp_path / "again.csv")
    assert look(tmp_path / "again.csv", "kind").labels.tolist() == [1, *kind[1:]]
    assert look(tmp_path / "again.csv", "kind").used["v0"] == "number"


def test_vectors_and_arrays_keep_their_features_with_annotators(tmp_path: Path) -> None:
    path, _ = crowd(tmp_path)
    frame = pd.read_csv(path, keep_default_na=False)
    vectors = np.stack([frame["x"], -frame["x"]], 1)
    said = {name: frame[name].to_numpy(str) for name in ("ann", "bob", "eve")}
    said["code"] = np.array(["007", "7"])[np.arange(len(frame)) % 2]
    np.savez(tmp_path / "crowd.npz", v=vectors, **said)
    pd.DataFrame({"v": list(vectors), **said}).to_parquet(tmp_path / "crowd.parquet")
    for name in ("crowd.npz", "crowd.parquet"):
        fused = fuse_data(tmp_path / name, tmp_path, annotators=["ann", "bob", "eve"])
        used = look(fused.path, FUSED_LABEL, Options(weight=FUSED_WEIGHT, group=FUSED_ITEM)).used
        assert used == {"v0": "number", "v1": "number", "code": "category"}


def test_whole_numbers_with_gaps_are_the_same_answers(tmp_path: Path) -> None:
    """A data frame writes 1.0 where an annotator was not asked about every row."""
    path, _ = crowd(tmp_path)
    frame = pd.read_csv(path, keep_default_na=False).replace({"no": 0, "yes": 1, "": None})
    frame = frame.astype({"ann": float, "bob": float}).assign(eve=frame["ann"].fillna(0).astype(int))
    frame.to_csv(path, index=False)
    fused = fuse_data(path, tmp_path, annotators=["ann", "bob", "eve"])
    assert set(pd.read_csv(fused.path, dtype=str)[FUSED_LABEL]) == {"0", "1"}
    assert min(row["accuracy"] for row in fused.reliability) > 0.5
    frame = frame.assign(ann=frame["ann"].map({0.0: "v1", 1.0: "v1.0"}))
    frame.to_csv(path, index=False)
    assert {"v1", "v1.0"} <= set(
        pd.read_csv(fuse_data(path, tmp_path, annotators=["ann"], drop=["bob", "eve"]).path)[FUSED_LABEL]
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group": "word"}, "Leave out --group"),
        ({"weight": "x"}, "Leave out --weight"),
        ({"time": "x"}, "Leave out --time"),
        ({"label": "word"}, "Give either a label column"),
    ],
)
def test_options_that_annotators_replace_are_refused(tmp_path: Path, options: dict, message: str) -> None:
    from logitclip.cli.own_data import FitOptions, fit

    path, _ = crowd(tmp_path)
    with pytest.raises(ValueError, match=message):
        fit(path, out=tmp_path / "model", options=FitOptions(annotators="ann,bob,eve", **options))


def test_annotators_of_images(tmp_path: Path, capsys) -> None:
    """The files are relative to the table, an item is a group, and each of its rows is asked about once."""
    from logitclip.cli.own_data import FitOptions, fit
    from logitclip.cli.review import review as show_answers

    photos = make_images(tmp_path / "photos")
    names = sorted(str(path.relative_to(photos)) for path in photos.rglob("*.png"))
    ann = [name.split("/")[0] for name in names]
    frame = pd.DataFrame({"photo": names, "ann": ann, "bob": ["dark", "light"] * 18})
    (photos / "more.png").write_bytes((photos / names[0]).read_bytes())
    frame.loc[len(frame)] = ["more.png", "", ""]  # nobody was asked
    frame.to_csv(photos / "crowd.csv", index=False)
    fit(photos / "crowd.csv", out=tmp_path / "model", options=FitOptions(annotators="ann,bob", learner="logistic"))
    shown = capsys.readouterr()
    assert "'fused_item' is not used" not in shown.err
    assert "1 item without any answer: they are left out" in shown.out + shown.err
    review = open_review(load(tmp_path / "model"), 25)
    source = review.rows.source
    assert source.weight is not None
    assert len(set(source.groups.tolist())) == 36 < len(review.rows)  # type: ignore[union-attr]
    seen = []
    while items := review.next_items("here", 1, "Ann"):
        seen.append(items[0]["id"])
        review.answer(seen[-1], items[0]["digest"], "class", "dark", "Ann")
    assert sorted(seen) == list(range(len(review.rows)))
    done = apply_answers(review.rows, review.settled, tmp_path / "corrected.csv")
    show_answers(tmp_path / "model", report=True)
    assert "these are shares of rows" in capsys.readouterr().out
    assert done.corrected + done.kept == len(review.rows)
    assert set(pd.read_csv(tmp_path / "corrected.csv")[FUSED_LABEL]) == {"dark"}


def test_weights_and_groups_of_images_count(tmp_path: Path) -> None:
    photos = make_images(tmp_path / "photos")
    names = sorted(str(path.relative_to(photos)) for path in photos.rglob("*.png"))
    kinds = [name.split("/")[0] for name in names]
    frame = pd.DataFrame({"photo": names, "kind": kinds, "who": np.arange(36) // 3, "w": [1, 1, 4] * 12})
    frame.to_csv(photos / "photos.csv", index=False)
    source = look(photos / "photos.csv", "kind", Options(group="who", weight="w"))
    assert source.groups is not None
    assert source.weight is not None
    assert source.groups.tolist() == (np.arange(36) // 3).tolist()
    assert source.weight.tolist() == [0.5, 0.5, 2.0] * 12
    assert look(photos / "photos.csv", "kind", Options(time="who")).times is not None


def test_apply_keeps_every_column(tmp_path: Path) -> None:
    """Whole numbers of 17 digits, times of day and groups such as 007 are what they were, whatever the format."""
    rows = np.arange(40)
    frame = pd.DataFrame({"x": rows % 2 + 0.01 * rows, "kind": np.array(["ash", "oak"])[rows % 2]})
    frame["number"], frame["time"] = rows + 9007199254740993, [f"12:{row:02d}:00" for row in rows]
    frame["who"], frame["v"] = (
        np.array(["007", "7", "08", "9", "1.0", "11", "12", "13"])[rows // 5],
        list(np.stack([rows, rows + 0.5], 1)),
    )
    frame.to_parquet(tmp_path / "rows.parquet")
    frame.drop(columns="v").to_csv(tmp_path / "rows.csv", index=False)
    for data, name in (("rows.parquet", "again.csv"), ("rows.csv", "again.parquet")):
        model = make_model(tmp_path / data, tmp_path / f"of {data}", label="kind", group="who", learner="logistic")
        review = open_review(model)
        apply_answers(review.rows, review.settled, tmp_path / name)
        again = pd.read_csv(tmp_path / name, dtype=str) if name.endswith("csv") else pd.read_parquet(tmp_path / name)
        for column in ("number", "time", "who", "kind"):
            assert [str(value) for value in again[column]] == frame[column].astype(str).tolist(), (name, column)
        vectors = ["v0", "v1"] if data == "rows.parquet" else []
        assert {*again} == {"x", "kind", "number", "time", "who", *vectors, "logitclip_review"}


def test_val_and_test_images_are_in_the_folder_of_the_training_images(tmp_path: Path) -> None:
    from logitclip.own_data.labelled import read_labelled

    photos = make_images(tmp_path / "photos")
    names = sorted(str(path.relative_to(photos)) for path in photos.rglob("*.png"))
    (tmp_path / "lists").mkdir()
    train, test = tmp_path / "lists" / "train.csv", tmp_path / "lists" / "test.csv"
    frame = pd.DataFrame({"photo": names, "kind": [name.split("/")[0] for name in names]})
    frame[::2].to_csv(train, index=False)
    frame[1::2].to_csv(test, index=False)
    source = look(train, "kind", Options(folder=str(photos)))
    beside = read_labelled(test, source.kind, source.class_names, "test")
    assert len(beside.rows) == 18
    assert np.isfinite(beside.rows.features).all()
    for missing in (pd.DataFrame({"photo": ["gone.png"], "kind": ["dark"]}), frame[::2]):  # or those of the training
        missing.to_csv(test, index=False)
        with pytest.raises(ValueError, match="None of the test images can be read"):
            read_labelled(test, source.kind, source.class_names, "test")
