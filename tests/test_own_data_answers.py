"""The file of answers: crashes, undo, disagreements, changed rows, CSV."""

import csv
import errno
import os
from dataclasses import fields
from pathlib import Path

import pytest

from logitclip.own_data import answers as module
from logitclip.own_data.answers import (
    Answer,
    append_answers,
    match_rows,
    merge_answers,
    read_answers,
    read_answers_csv,
    settle,
)
from logitclip.text import guard_formula

CAT = Answer("3", "abc", "class", "cat", "Ann", "2026-01-31T12:00:00Z")
DOG = Answer("3", "abc", "class", "dog", "Bob", "2026-01-31T12:00:01Z")
NONE = Answer("4", "def", "none", reviewer="Ann", audit=True)


def test_a_line_that_was_cut_short_costs_only_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "answers.jsonl"
    append_answers(path, [CAT, DOG])
    path.write_bytes(path.read_bytes()[:-20])
    append_answers(path, [NONE])
    assert read_answers(path) == [CAT, NONE]
    assert "Line 2" in caplog.text


def test_answers_are_synced_before_the_call_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(os.fstat(handle).st_size), fsync(handle))[1])
    path = tmp_path / "answers.jsonl"
    append_answers(path, [CAT])
    assert synced[0] == path.stat().st_size
    assert read_answers(path) == [CAT]


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "answers.jsonl"
    append_answers(path, [CAT])
    before = path.read_bytes()

    def fail(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        append_answers(path, [DOG])
    assert path.read_bytes() == before


def test_a_link_in_the_place_of_the_file_is_replaced(tmp_path: Path) -> None:
    path, theirs = tmp_path / "answers.jsonl", tmp_path / "notes.txt"
    theirs.write_text("my notes\n", encoding="utf-8")
    path.symlink_to(theirs)
    append_answers(path, [CAT])
    assert theirs.read_text(encoding="utf-8") == "my notes\n"
    assert read_answers(path) == [CAT]


def test_settling() -> None:
    undo = Answer("3", "abc", "undo", reviewer="Bob")
    unsure = Answer("3", "abc", "unsure", reviewer="Eve")
    assert settle([CAT, DOG, NONE]) == ({"4": NONE}, {"3": [CAT, DOG]})
    assert settle([CAT, DOG, undo]) == ({"3": CAT}, {})
    assert settle([unsure, CAT]) == ({"3": CAT}, {})
    assert settle([unsure]) == ({"3": unsure}, {})
    assert settle([DOG, undo]) == ({}, {})
    again = Answer("3", "abc", "class", "cat", "Bob")
    assert settle([CAT, DOG, again])[0]["3"].label == "cat"
    assert settle([CAT, Answer("3", "abc", "none", reviewer="Bob")])[1]["3"][1].text == "in no class"


def test_answers_to_changed_rows_are_named_and_those_to_moved_rows_are_kept() -> None:
    digests = {"3": "abc", "5": "changed", "9": "xyz"}
    other = Answer("5", "before", "unsure")
    moved = Answer("8", "xyz", "unsure")
    gone = Answer("77", "nowhere", "unsure")
    kept, changed = match_rows(
        [CAT, NONE, other, moved, gone], digests.get, {digest: row for row, digest in digests.items()}.get
    )
    assert [(answer.row, answer.text) for answer in kept] == [("3", "cat"), ("9", "unsure")]
    assert changed == ["5", "77"]


@pytest.mark.parametrize(
    "label", ["cat", "=cmd|' /C calc'!A0", 'with "quotes", commas\nand lines', "日本", "'quoted", "-x"]
)
def test_csv_gives_back_what_was_written(tmp_path: Path, label: str) -> None:
    answers = [Answer("3", "abc", "class", label, "@Ann", "t", audit=True), NONE]
    path = tmp_path / "answers.csv"
    names = [field.name for field in fields(Answer)]
    with path.open("w", encoding="utf-8", newline="") as file:  # as the page writes it
        table = csv.writer(file, lineterminator="\n")
        table.writerow(names)
        for answer in answers:
            values = vars(answer) | {"audit": str(answer.audit).lower()}
            table.writerow([guard_formula(values[name]) for name in names])
    assert read_answers_csv(path) == answers
    assert not any(
        line.startswith(("=", "@")) for line in path.read_text(encoding="utf-8").replace(",", "\n").splitlines()
    )


def test_a_spreadsheet_may_save_the_csv_with_a_mark_in_front(tmp_path: Path) -> None:
    path = tmp_path / "answers.csv"
    path.write_text("row,digest,kind,label\n3,abc,class,cat\n", encoding="utf-8-sig")
    assert read_answers_csv(path) == [Answer("3", "abc", "class", "cat")]


def test_merging_twice_adds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    append_answers(path, [CAT])
    assert merge_answers(path, [CAT, DOG, DOG]) == 1
    assert merge_answers(path, [CAT, DOG]) == 0
    assert read_answers(path) == [CAT, DOG]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "no column 'digest'"),
        ("row,digest,kind,label\n1,x,maybe,\n", "Line 2"),
        ("row,digest,kind,label\n1,x,class,\n", "cannot have the label ''"),
    ],
)
def test_a_file_that_holds_no_answers(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "answers.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_answers_csv(path)


@pytest.mark.timeout(60)
def test_answers_in_a_fifo_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "answers.csv")
    with pytest.raises(ValueError, match=r"cannot be read: it is not a regular file\.$"):
        read_answers_csv(tmp_path / "answers.csv")


def test_an_answer_is_checked() -> None:
    for values in ({"row": 3}, {"kind": "perhaps"}, {"kind": "unsure", "label": "cat"}, {"label": "x" * 2000}):
        with pytest.raises(ValueError):
            Answer(**{"row": "3", "digest": "abc", "kind": "class", "label": "cat", **values})
    assert module.ANSWERS == "answers.jsonl"
