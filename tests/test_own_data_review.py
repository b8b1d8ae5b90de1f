"""The review behind the page and its server, without a browser: rows, queue, answers, refusals, apply, the commands."""

from __future__ import annotations

import http.client
import json
import os
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from reviews import BREAKING, HOSTILE, SECRET, make_images, make_model, make_table, open_review, serving

from logitclip.own_data import load
from logitclip.own_data.answers import Answer, append_answers, read_answers
from logitclip.own_data.apply import apply_answers
from logitclip.own_data.audit import UNSURE_CODE
from logitclip.own_data.fitted_rows import FittedRows
from logitclip.own_data.kind import Kind
from logitclip.own_data.review import Review, content_policy, interleave
from logitclip.own_data.source import look
from logitclip.own_data.tables import Table

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fitted")
    make_model(make_table(folder), folder / "model", label="kind")
    return folder


@pytest.fixture
def model(fitted: Path, tmp_path: Path):
    """A copy of the model, without answers; its data stays where it is."""
    return load(shutil.copytree(fitted / "model", tmp_path / "model", ignore=shutil.ignore_patterns("runs")))


def truth(fitted: Path) -> list[str]:
    return pd.read_csv(fitted / "with_truth.csv", keep_default_na=False)["true"].tolist()


class Client:
    """Requests to a server, as a browser would send them."""

    def __init__(self, address: str) -> None:
        self.host = address.removeprefix("http://")
        self.port = int(self.host.rpartition(":")[2])

    def ask(self, method: str, path: str, body: object = None, cookie: str | None = SECRET, **headers: str | None):
        given: dict[str, str | None] = {"Host": self.host, "Cookie": f"logitclip_{self.port}={cookie}"}
        if cookie is None:
            given["Cookie"] = None
        if method == "POST":
            given |= {"Origin": f"http://{self.host}", "Content-Type": "application/json"}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        sent = {name: value for name, value in given.items() if value is not None}
        connection.request(method, path, content, {"Content-Length": str(len(content or b"")), **sent})
        response = connection.getresponse()
        return response.status, response.read(), response.headers

    def next(self, session: str = "s", reviewer: str = "Ann", count: int = 1) -> dict:
        status, content, _ = self.ask("GET", f"/next?count={count}&session={session}&reviewer={reviewer}")
        assert status == 200, content
        return json.loads(content)

    def answer(self, item: dict, label: str, kind: str = "class", reviewer: str = "Ann", **more):
        values = {"id": item["id"], "digest": item["digest"], "kind": kind, "label": label, "reviewer": reviewer}
        status, content, _ = self.ask("POST", "/answer", values | {"session": "s", "count": 1} | more)
        return status, json.loads(content)


def test_the_queue_mixes_suspects_and_the_audit(model) -> None:
    review = open_review(model, 30)
    assert set(review.queue) == set(range(120))
    assert len(set(review.queue)) == len(review.queue) == 120
    assert [i for i in review.queue if i not in review.blind] == [i for i in review.suspects if i not in review.blind]
    first = [i in review.blind for i in review.queue[:60]]
    assert 5 < sum(first[:30]) < 25
    assert review.asked.tolist() == [i for i in review.queue if i in review.blind]
    assert Review(model, FittedRows(model)).blind == review.blind  # the audit goes on
    assert review.blind < Review(model, FittedRows(model), 50).blind  # and can be enlarged
    with pytest.raises(ValueError, match="An audit of 500 rows"):
        Review(model, FittedRows(model), 500)


@pytest.mark.parametrize(
    "content", [None, b"", b"\xff\xfe\x00", b"row,given\n1,a\n", b"row,suggested,score,wrong\n1,a,high,true\n"]
)
def test_a_damaged_list_of_labels_is_one_sentence(model, content: bytes | None) -> None:
    (model.folder / "issues.csv").unlink()
    if content is None:
        os.mkfifo(model.folder / "issues.csv")
    else:
        (model.folder / "issues.csv").write_bytes(content)
    with pytest.raises(ValueError, match=r"issues.csv cannot be read: .+\. Remove it and fit the model again\.$"):
        open_review(model, 30)


def test_missing_predictions_are_named_with_the_folder(model) -> None:
    (model.folder / "predictions.npz").unlink()
    with pytest.raises(ValueError, match=r"^The model in .*model cannot be read: there is no file predictions.npz\.$"):
        open_review(model, 30)


def test_an_audit_that_asks_more_than_was_asked_for_says_why(model, capsys) -> None:
    from logitclip.cli.review import review

    why = "--audit 20 asks {} rows: at least 5 from each of 5 groups by score, and never fewer than before."
    review(model.folder, audit=20, report=True)
    assert why.format(24) in capsys.readouterr().err  # the most suspicious group has four rows
    review(model.folder, audit=50, report=True)
    assert "--audit" not in capsys.readouterr().err
    review(model.folder, audit=20, report=True)
    assert why.format(50) in capsys.readouterr().err


@pytest.mark.parametrize("change", [{"size": "30"}, {"seed": None}, {"reviewed": [999]}, {"reviewed": 7}])
def test_an_audit_that_was_edited_is_drawn_again(model, change: dict) -> None:
    drawn = open_review(model, 30)
    path = model.folder / "audit.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | change), encoding="utf-8")
    assert open_review(model, 30).blind == drawn.blind


def test_mix_gives_every_row_once() -> None:
    assert sorted(interleave(range(20), [19, 3, 7], 1)) == list(range(20))
    assert interleave([], [2, 1], 0) == [2, 1]


def test_an_audit_hides_label_suggestions_and_neighbours(model) -> None:
    review = open_review(model, 20)
    hidden = review.item(review.asked[0])
    assert (hidden["audit"], hidden["given"], hidden["suggestions"], hidden["neighbours"]) == (True, None, [], [])
    shown = review.item(next(i for i in review.suspects if i not in review.blind))
    assert shown["given"] in model.class_names
    assert shown["suggestions"][0][0] != shown["given"]
    assert 0 <= shown["suggestions"][0][1] <= 1
    assert len(shown["neighbours"]) == 5
    assert shown["id"] not in [near["id"] for near in shown["neighbours"]]


def test_neighbours_are_the_nearest_rows(model) -> None:
    rows = FittedRows(model)
    features = rows.source.rows.features.astype(float)
    distances = np.square(features - features[7]).sum(1)
    distances[7] = np.inf
    assert sorted(distances[rows.neighbours(7)]) == pytest.approx(sorted(distances)[:5])


def test_answers_undo_and_progress(model, fitted: Path) -> None:
    review, true = open_review(model), truth(fitted)
    for _ in range(6):
        item = review.next_items("s")[0]
        review.answer(item["id"], item["digest"], "class", true[item["id"]], "Ann")
    state = review.state("Ann")
    assert (state["answered"], state["last"], state["can_undo"]) == (6, 6, True)
    assert state["last_wrong"] == sum(true[i] != model.class_names[review.given[i]] for i in review.suspects[:6])
    assert review.state("Bob")["can_undo"] is False
    assert review.undo("Bob") is None
    assert review.undo("Ann")["id"] == review.suspects[5]
    assert review.undo("Ann")["id"] == review.suspects[4]
    assert review.next_items("s")[0]["id"] == review.suspects[4]
    again = open_review(model)  # as after a restart
    assert again.state("Ann")["answered"] == 4
    assert again.undo("Ann")["id"] == review.suspects[3]


def test_a_time_that_a_spreadsheet_has_rewritten_does_not_count(model) -> None:
    review = open_review(model)
    for i, at in enumerate(("2026-01-31T12:00:00Z", "2026-01-31T12:00Z", "2026-01-31T12:00:30Z")):
        append_answers(review.path, [Answer(review.rows.names[i], review.rows.digest(i), "unsure", "", "Ann", at)])
    assert open_review(model).state("Ann")["per_minute"] == 2.0


def test_two_browsers_never_have_the_same_row(model) -> None:
    review = open_review(model)
    mine, yours = review.next_items("a", 5), review.next_items("b", 5)
    assert not {item["id"] for item in mine} & {item["id"] for item in yours}
    assert [item["id"] for item in review.next_items("a", 5)] == [item["id"] for item in mine]  # after a reload


def test_answers_to_changed_rows_are_not_used(fitted: Path, tmp_path: Path) -> None:
    frame = pd.read_csv(fitted / "table.csv", keep_default_na=False)
    data = tmp_path / "table.csv"
    frame.to_csv(data, index=False)
    model = load(shutil.copytree(fitted / "model", tmp_path / "model", ignore=shutil.ignore_patterns("runs")))
    review = Review(model, FittedRows(model, data))
    for i in range(10):
        review.answer(i, review.rows.digest(i), "class", "elm", "Ann")
    frame.loc[3, "x"] += 1.0
    frame.loc[5, "kind"] = "oak"  # another label is no change of the content
    frame.drop(index=0).to_csv(data, index=False)  # all rows move
    again = Review(model, FittedRows(model, data))
    assert again.changed == ["1", "4"]
    assert sorted(again.settled) == [str(i) for i in (1, 2, 4, 5, 6, 7, 8, 9)]


def test_reviewers_who_disagree_are_named(model) -> None:
    review = open_review(model)
    digest = review.rows.digest(2)
    review.answer(2, digest, "class", "elm", "Ann")
    review.answer(2, digest, "class", "oak", "Bob")
    assert [a.reviewer for a in review.disagreements["3"]] == ["Ann", "Bob"]
    assert review.answers_array()[2] == UNSURE_CODE


def test_those_who_disagree_are_asked_again_once(model) -> None:
    review = open_review(model)
    first = review.suspects[0]
    for who, label in (("Ann", "elm"), ("Bob", "oak")):
        review.answer(first, review.rows.digest(first), "class", label, who)
    assert [item["id"] for item in review.next_items("tab", 2, "Eve")] == review.suspects[1:3]
    again = review.next_items("tab", 2, "Ann")
    assert (again[0]["id"], again[0]["said"]) == (first, [("Ann", "elm"), ("Bob", "oak")])
    assert "said" not in again[1]
    review.answer(first, review.rows.digest(first), "class", "elm", "Ann")  # she is sure
    assert [item["id"] for item in review.next_items("tab", 1, "Ann")] == review.suspects[1:2]
    assert review.next_items("tab", 1, "Bob")[0]["id"] == first
    review.answer(first, review.rows.digest(first), "class", "elm", "Bob")
    assert not review.disagreements
    assert review.settled[review.rows.names[first]].label == "elm"


def test_a_wrong_answer_is_refused_and_nothing_is_written(model) -> None:
    review = open_review(model)
    digest = review.rows.digest(2)
    for values in ((500, digest, "class", "elm"), (2, "old", "class", "elm"), (2, digest, "class", "birch")):
        with pytest.raises(ValueError):
            review.answer(*values, "Ann")
    with pytest.raises(ValueError, match="class, unsure or none"):
        review.answer(2, digest, "undo", "", "Ann")
    assert not review.path.exists()


# -- the server --------------------------------------------------------------------------------------------------------


def test_who_is_let_in(model) -> None:
    with serving(open_review(model)) as address:
        client = Client(address)
        for path in ("/", "/next?count=1", "/picture/0"):
            assert client.ask("GET", path, cookie=None)[0] == 403
            assert client.ask("GET", path, cookie="wrong")[0] == 403
            assert client.ask("GET", path, Host="evil.example:80")[0] == 403
            assert client.ask("GET", path, Host=f"127.0.0.1.evil.example:{client.port}")[0] == 403
        assert client.ask("GET", "/?key=wrong", cookie=None)[0] == 403
        assert client.ask("GET", f"/?key={SECRET}", cookie=None, Host="evil.example:80")[0] == 403
        status, _, headers = client.ask("GET", f"/?key={SECRET}", cookie=None)
        assert (status, headers["location"]) == (303, "/")
        cookie = headers["set-cookie"].lower()
        assert "samesite=strict" in cookie
        assert "httponly" in cookie
        assert client.ask("GET", "/", Host=f"localhost:{client.port}")[0] == 200
        assert client.ask("GET", "/answer")[0] == 405
        assert client.ask("GET", "/picture/../../etc/passwd")[0] == 404
        assert client.ask("GET", "/picture/0")[0] == 404  # a table has no pictures


def test_answers_from_elsewhere_are_refused(model) -> None:
    with serving(open_review(model)) as address:
        client = Client(address)
        item = client.next()["items"][0]
        body = {"id": item["id"], "digest": item["digest"], "kind": "unsure", "label": "", "session": "s"}
        for headers in (
            {"Origin": "http://evil.example"},
            {"Origin": "null"},
            {"Origin": None},
            {"Origin": f"http://127.0.0.1:{client.port + 1}"},
        ):
            assert client.ask("POST", "/answer", body, **headers)[0] == 403
        assert client.ask("POST", "/answer", body, cookie=None)[0] == 403
        assert client.ask("POST", "/answer", body, Content_Type="text/plain")[0] == 415
        assert client.ask("POST", "/answer", b"{")[0] == 400
        assert client.ask("POST", "/answer", b"[1]")[0] == 400
        assert client.ask("POST", "/answer", {"id": item["id"]})[0] == 400
        assert client.ask("POST", "/answer", body | {"id": "../../etc"})[0] == 400
        assert client.ask("POST", "/answer", body | {"reviewer": "x" * 20_000})[0] == 413
        assert not (model.folder / "answers.jsonl").exists()
        assert client.ask("POST", "/answer", body)[0] == 200
    assert [a.kind for a in read_answers(model.folder / "answers.jsonl")] == ["unsure"]


def test_the_headers_of_the_page(model) -> None:
    with serving(open_review(model)) as address:
        client = Client(address)
        status, content, headers = client.ask("GET", "/")
        policy = headers["content-security-policy"]
        nonce = policy.partition("'nonce-")[2].partition("'")[0]
        assert status == 200
        assert policy == content_policy(nonce, served=True)
        assert "unsafe" not in policy
        assert nonce.encode() in content
        assert client.ask("GET", "/")[2]["content-security-policy"] != policy  # a nonce is used once
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert SECRET.encode() not in content


def test_an_answer_is_on_disk_before_the_next_row_is_shown(model, monkeypatch: pytest.MonkeyPatch) -> None:
    review = open_review(model, 20)
    with serving(review) as address:
        client = Client(address)
        item = client.next()["items"][0]
        status, found = client.answer(item, "elm")
        assert status == 200
        assert read_answers(review.path)[-1].label == "elm"
        assert found["items"][0]["id"] != item["id"]
        assert found["hidden"]["given"] in model.class_names
        monkeypatch.setattr("logitclip.files.os.fsync", _full_disk)
        status, found = client.answer(found["items"][0], "elm")
        assert status == 507
        assert "not saved" in found["error"]
        assert len(read_answers(review.path)) == 1


def _full_disk(handle: int) -> None:
    raise OSError(28, "No space left on device")


# -- the page in one file ----------------------------------------------------------------------------------------------


def test_the_file_holds_no_markup_from_data(model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    review = open_review(model, 30)
    count, left = review.write_page(tmp_path / "review.html")
    assert (count, left) == (120, 0)
    page = (tmp_path / "review.html").read_text("utf-8")
    assert HOSTILE not in page
    assert BREAKING not in page
    assert page.count("</script>") == 2
    assert page.count("<script") == 2
    assert "@@" not in page.replace(page.split('id="data"', 1)[1].partition("</script>")[0], "")
    assert "http-equiv" in page
    assert "connect-src 'none'" in page
    data = json.loads(page.split('id="data"', 1)[1].partition(">")[2].partition("</script>")[0])
    blind = [item for item in data["data"]["items"] if item["audit"]]
    assert len(blind) == 30
    assert all(item["given"] is None and item["hidden"]["given"] for item in blind)
    monkeypatch.setattr("logitclip.own_data.review.PAGE_ROWS", 50)
    assert review.write_page(tmp_path / "small.html") == (50, 70)
    monkeypatch.setattr("logitclip.own_data.review.PAGE_BYTES", 10_000)
    count, left = review.write_page(tmp_path / "small.html")
    assert 0 < count < 20
    assert count + left == 120


# -- apply -------------------------------------------------------------------------------------------------------------


def test_apply_writes_corrected_labels_and_what_was_changed(model, fitted: Path, tmp_path: Path) -> None:
    review, true = open_review(model), truth(fitted)
    before = (fitted / "table.csv").read_bytes()
    for i in review.suspects[:30]:
        review.answer(i, review.rows.digest(i), "class", true[i], "Ann")
    review.answer(review.suspects[30], review.rows.digest(review.suspects[30]), "none", "", "Ann")
    review.answer(review.suspects[31], review.rows.digest(review.suspects[31]), "unsure", "", "Ann")
    done = apply_answers(review.rows, review.settled, tmp_path / "corrected.csv")
    original = pd.read_csv(fitted / "table.csv", dtype=str, keep_default_na=False)
    written = pd.read_csv(tmp_path / "corrected.csv", dtype=str, keep_default_na=False)
    wrong = [i for i in review.suspects[:30] if true[i] != original["kind"][i]]
    assert (done.rows, done.corrected, done.kept, done.unsure, done.dropped) == (119, len(wrong), 30 - len(wrong), 1, 1)
    kept = [i for i in range(120) if i != review.suspects[30]]
    expected = original["kind"].copy()
    expected[wrong] = np.array(true, dtype=object)[wrong]
    assert written["kind"].tolist() == expected[kept].tolist()
    assert written[["x", "z", "note"]].to_numpy().tolist() == original.loc[kept, ["x", "z", "note"]].to_numpy().tolist()
    notes = dict(zip(kept, written["logitclip_review"], strict=True))
    assert notes[wrong[0]] == f"corrected from {original['kind'][wrong[0]]}"
    assert notes[review.suspects[31]] == "unsure"
    assert (fitted / "table.csv").read_bytes() == before
    with pytest.raises(ValueError, match="is the data itself"):
        apply_answers(review.rows, review.settled, fitted / "table.csv")
    with pytest.raises(ValueError, match="should end in"):
        apply_answers(review.rows, review.settled, tmp_path / "x.xlsx")
    first = tmp_path / "first.csv"  # the table of the user, which a model of a later round does not know
    first.write_bytes(before)
    with pytest.raises(ValueError, match="as the data of the first round: name another file"):
        apply_answers(review.rows, review.settled, first)
    assert first.read_bytes() == before
    apply_answers(review.rows, review.settled, tmp_path / "corrected.csv")  # its own result is written again


def test_the_column_of_apply_is_never_a_feature(model, fitted: Path, tmp_path: Path) -> None:
    review = open_review(model)
    review.answer(0, review.rows.digest(0), "class", "oak", "Ann")
    apply_answers(review.rows, review.settled, tmp_path / "corrected.csv")
    assert "logitclip_review" not in look(tmp_path / "corrected.csv", "kind").used
    rows = FittedRows(model, tmp_path / "corrected.csv")
    assert rows.digest(0) == review.rows.digest(0)


def test_images_get_a_list_and_stay_where_they_are(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "photos")
    model = make_model(folder, tmp_path / "model")
    review = open_review(model)
    before = sorted(path.relative_to(folder) for path in folder.rglob("*.png"))
    i = review.suspects[0]
    other = {"dark": "light", "light": "dark"}[model.class_names[review.given[i]]]
    review.answer(i, review.rows.digest(i), "class", other, "Ann")
    apply_answers(review.rows, review.settled, tmp_path / "list.csv")
    listed = pd.read_csv(tmp_path / "list.csv", keep_default_na=False)
    assert len(listed) == 36
    apply_answers(review.rows, review.settled, tmp_path / "list.parquet")  # as its name says
    assert pd.read_parquet(tmp_path / "list.parquet").equals(listed)
    row = listed[listed["file"] == review.rows.names[i]].iloc[0]
    assert (row["label"], row["logitclip_review"][:14]) == (other, "corrected from")
    assert sorted(path.relative_to(folder) for path in folder.rglob("*.png")) == before
    assert review.rows.picture(i)[:4] == b"\x89PNG"
    assert len(review.rows.neighbours(i)) == 5
    (folder / review.rows.names[i]).write_bytes(b"broken")
    assert review.rows.picture(i) is None
    assert Review(model, FittedRows(model)).changed == [review.rows.names[i]]
    blind = open_review(model, 10)
    for j in blind.asked.tolist():  # the folder of a picture is its label
        assert not any(name in json.dumps(blind.item(j)) for name in model.class_names)
    with serving(open_review(model)) as address:
        status, content, headers = Client(address).ask("GET", "/picture/3")
        assert (status, content[:4], headers["content-type"]) == (200, b"\x89PNG", "image/png")
        assert Client(address).ask("GET", "/picture/999")[0] == 404


def test_apply_keeps_what_earlier_rounds_said(tmp_path: Path) -> None:
    data = make_table(tmp_path)
    frame = pd.read_csv(data, keep_default_na=False)
    kinds = frame["kind"].tolist()
    frame["logitclip_review"] = ["corrected from oak", "corrected from oak", "kept", "kept", "unsure"] + [""] * 115
    frame.loc[[0, 1, 2, 3], "kind"] = "elm"
    frame.to_csv(data, index=False)
    review = open_review(make_model(data, tmp_path / "model", label="kind", learner="logistic"))
    for i, label in ((1, "oak"), (3, "oak"), (4, "elm"), (5, kinds[5])):
        review.answer(i, review.rows.digest(i), "class", label, "Ann")
    done = apply_answers(review.rows, review.settled, tmp_path / "corrected.csv")
    found = pd.read_csv(tmp_path / "corrected.csv", keep_default_na=False)
    said = found["logitclip_review"].tolist()
    fifth = "kept" if kinds[4] == "elm" else f"corrected from {kinds[4]}"
    assert said[:6] == ["corrected from oak", "kept", "kept", "corrected from elm", fifth, "kept"]
    assert found["kind"].tolist()[:5] == ["elm", "oak", "elm", "oak", "elm"]
    assert done.corrected == 2 + (fifth != "kept")
    assert done.corrected + done.kept == 6
    assert (done.unsure, done.rows) == (0, 120)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        *(((False, True), kind) for kind in ("bool", "boolean")),
        *(((3, 4), kind) for kind in ("Int64", "category")),
        ((0.0, 1.0), "float64"),
        *((("a", "b"), kind) for kind in ("str", "category")),
        (("a", "b "), "category"),
    ],
)
def test_corrected_labels_keep_the_type_of_their_column(tmp_path: Path, values: tuple, kind: str) -> None:
    rows = np.arange(60)
    labels = pd.Series(np.array(values, dtype=object)[rows % 2]).astype(kind)
    frame = pd.DataFrame({"x": rows % 2 + 0.01 * rows, "kind": labels})
    model = make_model(frame, tmp_path / "model", label="kind", learner="logistic")
    review = open_review(model)
    for i in (0, 1):
        review.answer(i, review.rows.digest(i), "class", model.class_names[1 - i], "Ann")
    done = apply_answers(review.rows, review.settled, tmp_path / "corrected.parquet")
    found = pd.read_parquet(tmp_path / "corrected.parquet")["kind"]
    assert done.corrected == 2
    if values[1] == "b ":  # a class has no blanks around it: its label is text
        assert found.tolist() == ["b", "a", *labels[2:]]
    else:
        assert found.tolist() == [labels[1], labels[0], *labels[2:]]
        assert kind == "category" or str(found.dtype) == kind  # parquet writes the values of categories
    apply_answers(review.rows, review.settled, tmp_path / "corrected.csv")
    again = look(tmp_path / "corrected.csv", "kind")
    assert list(again.class_names) == model.class_names
    assert again.labels.tolist() == [1, 0, *(rows[2:] % 2)]


def test_a_table_of_images_is_corrected_in_its_lines(tmp_path: Path) -> None:
    photos = make_images(tmp_path / "photos")
    names = sorted(str(path.relative_to(photos)) for path in photos.rglob("*.png"))
    frame = pd.DataFrame({"photo": names, "kind": [name.split("/")[0] for name in names], "by": "Ann"})
    (photos / names[2]).write_bytes(b"damaged")  # its row is skipped
    frame.to_csv(photos / "photos.csv", index=False)
    review = open_review(make_model(photos / "photos.csv", tmp_path / "model", label="kind", learner="logistic"))
    last = len(review.rows) - 1
    new = "dark" if frame["kind"].iloc[-1] == "light" else "light"
    review.answer(last, review.rows.digest(last), "class", new, "Ann")
    done = apply_answers(review.rows, review.settled, tmp_path / "corrected.csv")
    found = pd.read_csv(tmp_path / "corrected.csv", keep_default_na=False)
    assert (done.corrected, len(found)) == (1, len(frame))
    assert found["kind"].tolist() == [*frame["kind"][:-1], new]
    assert found["logitclip_review"].tolist()[-1].startswith("corrected from ")


# -- the commands ------------------------------------------------------------------------------------------------------


def test_the_commands(model, fitted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    from logitclip.cli.review import apply, review

    true = truth(fitted)
    spaced = model.folder.rename(tmp_path / "Ann's model")
    with pytest.raises(ValueError, match="There are no answers") as error:
        apply(spaced, out=tmp_path / "x.csv")
    assert f"`logitclip review {shlex.quote(str(spaced))}` asks" in str(error.value)
    review(spaced, out=tmp_path / "x.html")
    assert f"logitclip review {shlex.quote(str(spaced))} --answers answers.csv" in capsys.readouterr().err
    spaced.rename(model.folder)
    review(model.folder, audit=40, report=True)
    assert "None of the 40 rows" in capsys.readouterr().out
    state = open_review(model)
    names = state.rows.names
    said = [Answer(names[i], state.rows.digest(i), "class", true[i], "Ann", audit=True) for i in state.asked.tolist()]
    append_answers(state.path, said)
    other = Answer(said[0].row, said[0].digest, "none", reviewer="Bob")
    pd.DataFrame([vars(answer) for answer in (*said, other)]).to_csv(tmp_path / "answers.csv", index=False)
    review(model.folder, answers=tmp_path / "answers.csv", json=True)
    out, err = capsys.readouterr()
    assert "1 of 41 answers are new" in err
    assert f"The answers to row {said[0].row} disagree" in err
    found = json.loads(out)
    rate = np.mean([a != b for a, b in zip(true, pd.read_csv(fitted / "table.csv")["kind"], strict=True)])
    noise = found["audit_report"]["noise"]
    assert noise["low"] <= rate <= noise["high"]
    assert noise["answers"] == 39
    assert found["disagreements"] == [said[0].row]
    review(model.folder, report=True)
    out = capsys.readouterr().out
    assert "accuracy of the model, out of fold" in out
    assert "would halve the interval" in out
    assert "`fit` estimated" in out or not model.learnt
    assert "labels 'oak' that are wrong" in out
    assert f"logitclip apply {shlex.quote(str(model.folder))} -o corrected.csv" in out
    review(model.folder, out=tmp_path / "review.html")
    assert (tmp_path / "review.html").stat().st_size > 10_000
    apply(model.folder, out=tmp_path / "corrected.csv", json=True)
    assert json.loads(capsys.readouterr().out)["rows"] == 120
    apply(model.folder, out=tmp_path / "corrected.csv")
    assert "Fit again: logitclip fit" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="must not be negative"):
        review(model.folder, audit=-1)
    with pytest.raises(ValueError, match="is a folder, and the model was fitted on a table"):
        review(model.folder, report=True, data=tmp_path)
    with pytest.raises(ValueError, match="is not there: name it with --data"):
        review(model.folder, data=tmp_path / "gone.csv", report=True)


def test_a_kind_of_data_that_only_shows_its_rows_can_be_reviewed():
    class Signals(Table):
        content, content_bytes = Kind.content, Kind.content_bytes

        def show(self, i, names=()):
            return f"signal {i + 1}"

    rows: Any = object.__new__(FittedRows)
    rows.source = SimpleNamespace(kind=Signals("kind", None))
    assert rows.content(3) == [("row", "signal 4")]
    assert rows.digest(3) == rows.digest(3) != rows.digest(4)
    assert not rows.has_pictures
