"""A review: which rows a person is asked about, what the page shows of them, and what the answers say.

`Review` is the state behind the page. It hands out rows, the suspicious ones in their order and those of an audit among
them, and appends each answer to a file. `server` serves it, and `write_page` puts it into one file.
"""

from __future__ import annotations

import calendar
import contextlib
import itertools
import json
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from logitclip import files
from logitclip.data._images import as_address
from logitclip.files import Json
from logitclip.own_data import audit
from logitclip.own_data.answers import (
    ANSWERS,
    CLASS,
    NO_CLASS,
    UNDO,
    UNSURE,
    Answer,
    append_answers,
    match_rows,
    read_answers,
    settle,
)
from logitclip.own_data.facts import is_list_of, is_share, is_whole
from logitclip.own_data.fitted_rows import FittedRows
from logitclip.own_data.model import PREDICTIONS, Model, predictions_from_bytes, read_checked

AUDIT = "audit.json"  # in the model folder: the draw
EARLIER = "earlier_audits.json"  # what audits of earlier models in the folder said
SEED = 0  # of the draw, and of the order
LAST_ANSWERS = 20  # suspects whose share of wrong labels tells when to stop
LEASE = 600.0  # seconds for which a row that a reviewer has on screen is not given to another
TEMPLATES = Path(__file__).parent / "templates"
PAGE_ROWS, PAGE_BYTES = 500, 20_000_000  # of the page in one file


class Review:
    """A review of a model's data.

    Args:
        model, rows: The model and its data.
        audit_size: Rows to draw for an audit; 0 for none, or for the one that was begun.

    Raises:
        ValueError: If the audit is larger than the data, or nothing is known about the labels.
    """

    def __init__(self, model: Model, rows: FittedRows, audit_size: int = 0) -> None:
        self.model, self.rows = model, rows
        self.path = model.folder / ANSWERS
        self.given = np.asarray(rows.source.labels)
        self.class_names = model.class_names
        self.positions = {name: k for k, name in enumerate(self.class_names)}
        checked = rows.source.reviewed
        self.checked = np.zeros(len(rows), bool) if checked is None else checked  # in an earlier round
        self._read_suspects()
        self.answers, self.changed = match_rows(read_answers(self.path), rows.digest_of, rows.find)
        self.settled, self.disagreements = settle(self.answers)
        self.reviewed, self.asked = self._draw(audit_size)
        self.strata = audit.make_strata(self.scores, self.reviewed)
        self.queue = interleave(self.suspects, self.asked.tolist(), SEED)
        self.blind = set(self.asked.tolist())
        self.leases: dict[int, tuple[str, float]] = {}
        self.asked_again: set[tuple[str, str]] = set()  # rows with answers that disagree, and who has seen them since
        self.lock = threading.Lock()

    def _read_suspects(self) -> None:
        issues = self.model.issues
        self.scores = np.full(len(self.rows), np.nan)
        self.suggested = self.given.copy()
        self.suspects: list[int] = []
        self.marked: set[int] = set()  # the suspects to look at first; all, if no label is marked wrong
        columns = issues[["row", "suggested", "score", "wrong"]]
        for name, suggested, score, wrong in columns.itertuples(index=False, name=None):
            place = self.rows.place(name)
            if place is not None:
                self.scores[place] = score
                self.suggested[place] = self.positions.get(suggested, self.given[place])
                if not self.checked[place]:
                    self.suspects.append(place)
                    if wrong:
                        self.marked.add(place)
        if not self.suspects:
            raise ValueError(f"{self.model.folder} has no list of suspicious labels: fit the model again.")
        self.marked = self.marked or set(self.suspects)
        self.classes, self.chances = np.full((len(self.rows), 1), -1), np.zeros((len(self.rows), 1))
        if PREDICTIONS in self.model.facts.get("files", {}):
            try:
                content = read_checked(self.model.folder, PREDICTIONS, self.model.facts)
            except ValueError as error:
                raise ValueError(f"The model in {self.model.folder} cannot be read: {error}.") from None
            classes, chances = predictions_from_bytes(content)
            if len(classes) == len(self.rows):
                self.classes, self.chances = classes, chances

    def _is_begun(self, content: object) -> bool:
        """Return whether this is the content of audit.json for this model."""
        return (
            isinstance(content, dict)
            and content.get("model") == self.model.facts.get("digest")
            and all(is_whole(content.get(name)) for name in ("size", "seed"))
            and is_list_of(lambda place: is_whole(place) and place < len(self.rows))(content.get("reviewed"))
        )

    def _draw(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return which rows were reviewed before the audit, and its rows; a begun audit is continued or enlarged."""
        path = self.model.folder / AUDIT
        begun = files.read_json(path)
        reviewed = np.zeros(len(self.rows), bool)
        if self._is_begun(begun):
            size, seed, places = max(size, begun["size"]), begun["seed"], begun["reviewed"]
        elif size:
            named = [place for name in self.settled if (place := self.rows.place(name)) is not None]
            places, seed = sorted({*named, *np.flatnonzero(self.checked).tolist()}), SEED
        else:
            return reviewed, np.empty(0, int)
        reviewed[places] = True
        rest = int((~reviewed).sum())
        if size > rest:
            raise ValueError(f"An audit of {size} rows needs as many that are not reviewed; there are {rest}.")
        digest = self.model.facts.get("digest")
        files.write_json(path, {"model": digest, "size": size, "seed": seed, "reviewed": sorted(map(int, places))})
        return reviewed, audit.draw_rows(self.scores, audit.make_strata(self.scores, reviewed), size, seed)

    # -- what the page shows -------------------------------------------------------------------------------------------

    def item(self, i: int) -> Json:
        """Return what the page shows of a row. In an audit, label, suggestions and neighbours are not in it."""
        name = self.rows.names[i]
        shown: Json = {
            "id": i,
            "row": name,
            "digest": self.rows.digest(i),
            "audit": i in self.blind,
            "content": self.rows.content(i),
            "given": None,
            "suggestions": [],
            "neighbours": [],
        }
        if not shown["audit"]:
            return shown | self.reveal(i)
        if self.rows.has_pictures:  # the name of a file, or of its folder, may be the label
            shown |= {"row": str(i + 1), "content": []}
        return shown

    def reveal(self, i: int, *, neighbours: bool = True) -> Json:
        """Return what an audit hides: the given label, the suggestions, the neighbours."""
        chances = {int(k): float(p) for k, p in zip(self.classes[i], self.chances[i], strict=True) if k >= 0}
        order = list(dict.fromkeys([int(self.suggested[i]), *chances]))
        given = int(self.given[i])
        near = self.rows.neighbours(i) if neighbours else []
        return {
            "row": self.rows.names[i],
            "marked": i in self.marked,
            "given": self.class_names[given],
            "given_probability": chances.get(given),
            "suggestions": [[self.class_names[k], chances.get(k)] for k in order if k != given][:4],
            "neighbours": [
                {"id": j, "label": self.class_names[int(self.given[j])], "content": self.rows.content(j)[:3]}
                for j in near
            ],
        }

    def state(self, reviewer: str = "") -> Json:
        """Return the progress: what is left, the reviewer's speed, and the last suspects."""
        places = {self.rows.place(name): answer for name, answer in self.settled.items()}
        names = [self.rows.place(row) for row in self.disagreements]
        done = {*places, *names}
        checked = {self.rows.names[i] for i in np.flatnonzero(self.checked).tolist()}  # their label is the answer
        suspects = [a for a in self.answers if a.kind == CLASS and not a.audit and a.row not in checked][-LAST_ANSWERS:]
        wrong = sum(a.label != self.class_names[self.given[self.rows.place(a.row)]] for a in suspects)
        mine = [a.time for a in self.answers if a.reviewer == reviewer and a.kind != UNDO][-LAST_ANSWERS:]
        return {
            "answered": len(done),
            "left": len(self.marked.difference(done)),
            "audit": len(self.blind),
            "audit_left": sum(i not in done for i in self.asked.tolist()),
            "last": len(suspects),
            "last_wrong": wrong,
            "per_minute": _per_minute(mine),
            "disagreements": len(self.disagreements),
            "can_undo": self._last_of(reviewer) is not None,
        }

    def next_items(self, session: str, count: int = 1, reviewer: str = "") -> list[Json]:
        """Return the next rows for a browser: unanswered, and not on the screen of another.

        Rows on which the reviewer and others disagree come first, once, with what they said.
        """
        with self.lock:
            now = time.monotonic()
            done = {self.rows.place(name) for name in (*self.settled, *self.disagreements)}
            self.leases = {i: (who, at) for i, (who, at) in self.leases.items() if now - at < LEASE and i not in done}
            disputed = self._find_disputed(reviewer)
            free = (i for i in self.queue if i not in done and self.leases.get(i, (session,))[0] == session)
            chosen = [i for _, i in zip(range(count), itertools.chain(disputed, free), strict=False)]
            self.leases |= dict.fromkeys(chosen, (session, now))
        return [self.item(i) | ({"said": disputed[i]} if i in disputed else {}) for i in chosen]

    def _find_disputed(self, reviewer: str) -> dict[int, list[tuple[str, str]]]:
        """Return the rows that a reviewer is asked again, and who said what about them."""
        return {
            place: [(answer.reviewer, answer.text) for answer in answers]
            for row, answers in self.disagreements.items()
            if any(answer.reviewer == reviewer for answer in answers)
            and (row, reviewer) not in self.asked_again
            and (place := self.rows.place(row)) is not None
        }

    # -- answers -------------------------------------------------------------------------------------------------------

    def answer(self, place: int, digest: str, kind: str, label: str, reviewer: str) -> Json:
        """Append an answer, and return what an audit hid.

        Raises:
            ValueError: If the row, the class or the kind of answer is unknown, or the row has changed.
        """
        if not 0 <= place < len(self.rows):
            raise ValueError(f"There is no row {place}.")
        if kind == CLASS and label not in self.positions:
            raise ValueError(f"There is no class {label!r}.")
        if kind not in (CLASS, UNSURE, NO_CLASS):
            raise ValueError(f"An answer is class, unsure or none, not {kind!r}.")
        name = self.rows.names[place]
        if self.rows.digest(place) != digest:
            raise ValueError(f"Row {name} has changed since it was shown.")
        if name in self.disagreements:
            self.asked_again.add((name, reviewer))
        self._append(Answer(name, digest, kind, label, reviewer, _now(), place in self.blind))
        return self.reveal(place, neighbours=False)

    def undo(self, reviewer: str) -> Json | None:
        """Take back the last answer of a reviewer, and return its row; None if there is none."""
        last = self._last_of(reviewer)
        if last is None:
            return None
        self._append(Answer(last.row, last.digest, UNDO, "", reviewer, _now(), last.audit))
        place = self.rows.place(last.row)
        return None if place is None else self.item(place)

    def _last_of(self, reviewer: str) -> Answer | None:
        undone: set[str] = set()
        for answer in reversed(self.answers):
            if answer.reviewer != reviewer or answer.row in undone:
                continue
            if answer.kind != UNDO:
                return answer
            undone.add(answer.row)
        return None

    def _append(self, answer: Answer) -> None:
        with self.lock:
            append_answers(self.path, [answer])
            self.answers.append(answer)
            self.settled, self.disagreements = settle(self.answers)

    def answers_array(self) -> np.ndarray:
        """Return the true classes that were answered, int [N], with the codes of `audit` for the other rows."""
        found = np.where(self.checked, self.given, audit.UNANSWERED_CODE)
        codes = {UNSURE: audit.UNSURE_CODE, NO_CLASS: audit.NO_CLASS_CODE}
        said = {n: codes.get(a.kind, self.positions.get(a.label, audit.NO_CLASS_CODE)) for n, a in self.settled.items()}
        for name, answer in {**said, **dict.fromkeys(self.disagreements, audit.UNSURE_CODE)}.items():
            if (place := self.rows.place(name)) is not None:
                found[place] = answer
        return found

    def report(self) -> audit.Report | None:
        """Return what the audit says; None if there is none, or nothing was answered."""
        found = self.answers_array()
        if not len(self.asked) or not (found[self.asked] >= 0).any():
            return None
        return audit.report(self.given, self.classes[:, 0], found, self.strata, self.asked)

    def keep_report(self) -> None:
        """Keep what the audit says, for when another model is in the folder."""
        found, digest = self.report(), self.model.facts.get("digest")
        if found is not None and digest is not None:
            every = [*self.earlier, audit.Earlier(digest, found.noise, found.model)]
            files.write_json(self.model.folder / EARLIER, [asdict(one) for one in every])

    @property
    def earlier(self) -> list[audit.Earlier]:
        """What audits said of earlier models in this folder, the oldest first."""
        kept = files.read_json(self.model.folder / EARLIER)
        every = [_parse_earlier(one) for one in kept] if isinstance(kept, list) else []
        return [one for one in every if one is not None and one.of != self.model.facts.get("digest")]

    # -- the page ------------------------------------------------------------------------------------------------------

    def page(self, nonce: str, data: Json | None = None) -> str:
        """Return the page; with `data`, the rows are in it and no server is needed."""
        about = {
            "kind": self.rows.source.kind.name,
            "classes": self.class_names,
            "title": self.model.folder.resolve().name,
            "model": self.model.facts.get("digest", ""),
            "data": data,
        }
        # A script element ends at the first </script>, whatever the JSON says.
        embedded = json.dumps(about, ensure_ascii=True).replace("<", "\\u003c")
        page, style, script = ((TEMPLATES / f"review.{kind}").read_text("utf-8") for kind in ("html", "css", "js"))
        policy = f'<meta http-equiv="Content-Security-Policy" content="{content_policy(nonce, served=False)}">'
        parts = {"STYLE": style, "SCRIPT": script, "POLICY": "" if data is None else policy, "NONCE": nonce}
        for name, text in {**parts, "DATA": embedded}.items():  # the data last: nothing in it is replaced
            page = page.replace(f"@@{name}@@", text)
        return page

    def write_page(self, path: Path) -> tuple[int, int]:
        """Write the review as one file that needs no server.

        Returns:
            How many rows are in it, and how many did not fit: it holds at most 500 rows and 20 MB.
        """
        done = {self.rows.place(name) for name in self.settled}
        left = [i for i in self.queue if i not in done]
        items, pictures, size = [], {}, 0
        for i in left[:PAGE_ROWS]:
            item: Json = self.item(i) | {"hidden": self.reveal(i) if i in self.blind else None}
            shown = [i, *(near["id"] for near in item["neighbours"])] if self.rows.has_pictures else []
            fresh = [j for j in shown if j not in pictures]
            new = {j: as_address(picture) for j in fresh if (picture := self.rows.picture(j)) is not None}
            size += len(json.dumps(item)) + sum(map(len, new.values()))
            if size > PAGE_BYTES and items:
                break
            items.append(item)
            pictures |= new
        page = self.page(secrets.token_urlsafe(16), {"items": items, "pictures": pictures})
        files.write(path, page.encode())
        return len(items), len(left) - len(items)


def _parse_earlier(kept: object) -> audit.Earlier | None:
    """Return what `keep_report` has written; None if it is something else."""
    if not isinstance(kept, dict) or not isinstance(kept.get("of"), str):
        return None
    noise, model = (_parse_rate(kept.get(name)) for name in ("noise", "model"))
    return None if noise is None else audit.Earlier(kept["of"], noise, model)


def _parse_rate(kept: object) -> audit.Rate | None:
    if not isinstance(kept, dict) or not all(is_share(kept.get(name)) for name in ("value", "low", "high")):
        return None
    answers = kept.get("answers")
    return audit.Rate(kept["value"], kept["low"], kept["high"], answers if is_whole(answers) else 0)


def interleave(suspects: Sequence[int], asked: Sequence[int], seed: int) -> list[int]:
    """Return suspects in their order, and among them, at random places, as many rows of an audit.

    >>> interleave([5, 7, 9, 2], [1, 7], seed=0)
    [5, 1, 7, 9, 2]
    """
    blind = set(asked)
    rest = [i for i in suspects if i not in blind]
    beside = min(len(asked), len(rest))
    turns = np.random.default_rng(seed).permutation([True] * len(asked) + [False] * beside)
    drawn, named = iter(asked), iter(rest)
    return [next(drawn) if turn else next(named) for turn in turns] + list(named)


def content_policy(nonce: str, *, served: bool) -> str:
    """Return the content security policy of the page: nothing runs or loads but what is in it, or from its server."""
    rules = [
        "default-src 'none'",
        f"script-src 'nonce-{nonce}'",
        f"style-src 'nonce-{nonce}'",
        "img-src 'self' data:" if served else "img-src data:",
        "connect-src 'self'" if served else "connect-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    return "; ".join([*rules, "frame-ancestors 'none'"] if served else rules)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _per_minute(times: Sequence[str]) -> float | None:
    """Return the speed over the last answers, breaks of more than five minutes aside."""
    seconds = []
    for at in times:
        with contextlib.suppress(ValueError):  # of a file answers.csv that a spreadsheet has saved
            seconds.append(calendar.timegm(time.strptime(at, "%Y-%m-%dT%H:%M:%SZ")))
    gaps = [b - a for a, b in itertools.pairwise(seconds) if 0 <= b - a <= 300]
    return round(60 * len(gaps) / max(sum(gaps), 1), 1) if gaps else None
