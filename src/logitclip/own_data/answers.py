"""Answers of reviewers: a file that is only appended to and synced after each answer, its exchange as CSV, and merging.

An answer belongs to a row and to a digest of the row's content. If the row has changed since, the answer is not used.
"""

from __future__ import annotations

import csv
import io
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from logitclip import files
from logitclip.files import Json
from logitclip.text import unguard_formula

log = logging.getLogger(__name__)

ANSWERS = "answers.jsonl"  # in the model folder
CLASS, UNSURE, NO_CLASS, UNDO = "class", "unsure", "none", "undo"
ANSWER_KINDS = (CLASS, UNSURE, NO_CLASS, UNDO)
LONGEST_TEXT = 1000  # characters of a text in an answer


@dataclass(frozen=True)
class Answer:
    """What a reviewer said about a row.

    >>> Answer("7", "0f3a", "class", "cat").text
    'cat'
    """

    row: str  # its number or file name
    digest: str  # of the content of the row
    kind: str  # class, unsure, none (it is in no class) or undo (the reviewer takes back the answer to this row)
    label: str = ""  # the true class, if the kind is class
    reviewer: str = ""  # a name
    time: str = ""  # in UTC, as in 2026-01-31T12:00:00Z
    audit: bool = False  # whether the given label and the suggestions were hidden

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not (bool if field.name == "audit" else str):
                raise ValueError(f"The {field.name} of an answer cannot be {value!r}.")
            if isinstance(value, str) and len(value) > LONGEST_TEXT:
                raise ValueError(
                    f"The {field.name} of an answer has more than {LONGEST_TEXT} characters: {len(value)}."
                )
        if self.kind not in ANSWER_KINDS:
            raise ValueError(f"An answer is one of {', '.join(ANSWER_KINDS)}, not {self.kind!r}.")
        if (self.kind == CLASS) != bool(self.label):
            raise ValueError(f"An answer of the kind {self.kind!r} cannot have the label {self.label!r}.")

    @property
    def text(self) -> str:
        """The answer in words."""
        return {CLASS: self.label, UNSURE: "unsure", NO_CLASS: "in no class", UNDO: "taken back"}[self.kind]


def append_answers(path: Path, answers: Iterable[Answer]) -> None:
    """Append answers, and wait until the disk has them.

    A line that a crash cut short stays as it is; the next answer starts a new line.
    """
    lines = b"".join(json.dumps(asdict(answer), ensure_ascii=False).encode() + b"\n" for answer in answers)
    if not lines:
        return
    new = not path.exists()
    torn = not new and not files.read_bytes(path).endswith(b"\n")
    files.append(path, b"\n" * torn + lines, sync=True)
    if new:
        files.sync_folder(path.parent)


def read_answers(path: Path) -> list[Answer]:
    """Read all answers in the order in which they were given; a damaged line is skipped, which is logged."""
    if not path.exists():
        return []
    answers = []
    for number, line in enumerate(files.read_bytes(path).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            answers.append(Answer(**json.loads(line)))
        except (ValueError, TypeError, RecursionError):
            log.warning("Line %d of %s is no answer and is left out: a crash may have cut it short.", number, path)
    return answers


def settle(answers: Iterable[Answer]) -> tuple[dict[str, Answer], dict[str, list[Answer]]]:
    """Find what counts: the last answer of each reviewer to a row, if the reviewers agree.

    A class or "in no class" counts more than "unsure".

    Returns:
        The answer to each row, and the answers that disagree by row.

    >>> one, two, three = Answer("1", "", "class", "cat", "Ann"), Answer("1", "", "class", "dog", "Bob"), Answer(
    ...     "1", "", "unsure", "", "Eve")
    >>> settle([one, three])[0]["1"].label, [a.text for a in settle([one, two, three])[1]["1"]]
    ('cat', ['cat', 'dog'])
    """
    last: dict[str, dict[str, Answer]] = {}
    for answer in answers:
        of_row = last.setdefault(answer.row, {})
        of_row.pop(answer.reviewer, None)
        if answer.kind != UNDO:
            of_row[answer.reviewer] = answer
    settled, disagreements = {}, {}
    for row, by_reviewer in last.items():
        sure = [answer for answer in by_reviewer.values() if answer.kind != UNSURE]
        if len({answer.text for answer in sure}) > 1:
            disagreements[row] = sure
        elif by_reviewer:
            settled[row] = (sure or list(by_reviewer.values()))[-1]
    return settled, disagreements


def match_rows(
    answers: Sequence[Answer], digest_of: Callable[[str], str | None], find: Callable[[str], str | None]
) -> tuple[list[Answer], list[str]]:
    """Keep the answers whose row has not changed.

    Args:
        answers: The answers.
        digest_of: Returns the digest of the row with a name; None if there is no such row.
        find: Returns the name of the only row with a digest; None if there is none, or several.

    Returns:
        The answers, with the present name of a row that has moved, and the names of the rows that have changed. A row
        in no class that is no longer there is not one of them.
    """
    kept, changed = [], {}
    for answer in answers:
        if digest_of(answer.row) == answer.digest:
            kept.append(answer)
        elif (name := find(answer.digest)) is not None:
            kept.append(Answer(**{**asdict(answer), "row": name}))
        elif answer.kind != NO_CLASS:  # such a row was left out of the data
            changed[answer.row] = None
    return kept, list(changed)


def read_answers_csv(path: Path) -> list[Answer]:
    """Read `answers.csv`, as the review page in a file saves it.

    Raises:
        ValueError: If it is not such a file.
    """
    try:
        text = files.read_bytes(path).decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"The answers in {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text; save the answers on the review page again.") from None
    rows = csv.DictReader(io.StringIO(text, newline=""))
    missing = {"row", "digest", "kind", "label"} - set(rows.fieldnames or ())
    if missing:
        raise ValueError(f"{path} holds no answers: it has no column {sorted(missing)[0]!r}.")
    answers = []
    known = {field.name for field in fields(Answer)}
    for number, row in enumerate(rows, 2):
        values: Json = {name: unguard_formula(value or "") for name, value in row.items() if name in known}
        values["audit"] = values.get("audit", "").strip().lower() == "true"
        try:
            answers.append(Answer(**values))
        except ValueError as error:
            raise ValueError(f"Line {number} of {path} is no answer: {error}") from None
    return answers


def merge_answers(path: Path, new: Sequence[Answer]) -> int:
    """Append the answers that the file does not hold yet, and return how many those are."""
    known = set(read_answers(path))
    fresh = [answer for answer in dict.fromkeys(new) if answer not in known]
    append_answers(path, fresh)
    return len(fresh)
