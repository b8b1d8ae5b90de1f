"""Several answers for an item: fuse them into probabilities of the true class, and say who is reliable.

`dawid_skene` estimates a confusion matrix for each annotator and the probabilities of each item's true class by
expectation maximisation (Dawid and Skene, 1979). `fuse_with_features` replaces the class shares in it by a classifier's
out-of-fold prediction for the item (as Raykar et al., 2010, do), so that items with similar features help each other.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from logitclip import files
from logitclip.data._columns import Columns, read_table, row_count, table_kind, take, to_frame
from logitclip.data.table import column_text
from logitclip.files import Json
from logitclip.own_data.calibration import softmax
from logitclip.own_data.folds import FOLDS
from logitclip.own_data.source import Options, find_image_column
from logitclip.text import guard_formula

FUSED_FILES = ("fused.csv", "fused.parquet")  # in the model folder: of text, of other data
RELIABILITY = "annotators.csv"
FUSED_LABEL, FUSED_WEIGHT, FUSED_ITEM = "fused_label", "fused_probability", "fused_item"  # columns of fused data
LEAST_LEARNT = 0.02  # probability of a class with which an item is still learnt from
EM_STEPS = 200  # of expectation maximisation, at most
TOLERANCE = 1e-6
PSEUDO = 0.5  # answers that a cell of a confusion matrix has before any was seen, shared with all annotators
ROUNDS = 4  # of classifier and fusion in turn
STRENGTH = 0.01  # C of the logistic regression: strongly regularised, on standardised features


@dataclass(frozen=True, eq=False)
class Annotations:
    """Answers of annotators, one entry per answer."""

    item: np.ndarray  # position in `items`, int [A]
    annotator: np.ndarray  # position in `annotators`, int [A]
    answer: np.ndarray  # position in `class_names`, int [A]
    items: Sequence[str]  # [N]
    annotators: Sequence[str]  # [R]
    class_names: Sequence[str]  # [K]

    @property
    def votes(self) -> np.ndarray:
        """How many annotators gave each class to each item, [N, K]."""
        votes = np.zeros((len(self.items), len(self.class_names)))
        np.add.at(votes, (self.item, self.answer), 1)
        return votes


@dataclass(frozen=True, eq=False)
class FusedLabels:
    """What the answers say."""

    probabilities: np.ndarray  # of the true class of each item, [N, K]
    confusion: np.ndarray  # of each annotator, [R, K, K]: row = true class, column = answer, rows sum to 1


def dawid_skene(answers: Annotations) -> FusedLabels:
    """Fuse answers by expectation maximisation, from the shares of the votes.

    An annotator with few answers is taken to be like the others: the confusion matrix of all annotators counts as half
    an answer in each cell.

    >>> answers = from_table(["1", "1", "1", "2", "2", "2"], ["a", "b", "c"] * 2, ["x", "x", "y", "y", "y", "y"])
    >>> dawid_skene(answers).probabilities.round(1).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    votes = answers.votes
    prior = np.full(votes.shape[1], 1 / votes.shape[1])
    current = (votes + 0.1) / (votes + 0.1).sum(1, keepdims=True)
    confusion = _confusion(answers, current)
    for _ in range(EM_STEPS):
        prior = (current.sum(0) + 1) / (len(current) + len(prior))
        confusion = _confusion(answers, current)
        following = _posterior(answers, np.broadcast_to(np.log(prior), current.shape), confusion)
        change = np.abs(following - current).max()
        current = following
        if change < TOLERANCE:
            break
    return FusedLabels(current, confusion)


def fuse_with_features(answers: Annotations, features: np.ndarray) -> FusedLabels:
    """Fuse answers with a classifier's prediction for each item instead of the class shares.

    The features of the items are [N, D].
    """
    fused = dawid_skene(answers)
    scale = features.std(0)
    x = (features - features.mean(0)) / np.where(scale > 0, scale, 1.0)
    for _ in range(ROUNDS):
        predicted = _out_of_fold(x, fused.probabilities)
        confusion = _confusion(answers, fused.probabilities)
        fused = FusedLabels(_posterior(answers, np.log(predicted), confusion), confusion)
    return fused


def reliability(answers: Annotations, fused: FusedLabels) -> list[Json]:
    """Return the share of right answers of each annotator with a 95 % interval, the most reliable first.

    An annotator's own answers count in the fused probabilities: if annotators err together, that flatters each of them.
    Without them, an item with few other answers tells little. So both ways are computed. The interval holds those of
    both, Clopper and Pearson's for the expected number of right answers, with fewer answers where the truth is
    uncertain; the accuracy is their mean. Errors that most annotators share are not noticed.
    """
    logs = np.log(fused.probabilities[answers.item] + 1e-12)
    own = np.log(fused.confusion[answers.annotator, :, answers.answer])
    shares, lows, highs = zip(*(_estimate_accuracy(answers, values) for values in (logs, logs - own)), strict=True)
    n = np.bincount(answers.annotator, minlength=len(answers.annotators))
    found = [
        {
            "annotator": name,
            "answers": int(n[r]),
            "accuracy": float(np.mean([share[r] for share in shares])),
            "low": float(min(low[r] for low in lows)),
            "high": float(max(high[r] for high in highs)),
        }
        for r, name in enumerate(answers.annotators)
        if n[r]
    ]
    return sorted(found, key=lambda row: (-row["accuracy"], row["annotator"]))


def _estimate_accuracy(answers: Annotations, logs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return each annotator's share of right answers and the ends of its interval, by log-probabilities [A, K]."""
    from scipy.stats import beta

    right = softmax(logs)[np.arange(len(logs)), answers.answer]
    people = len(answers.annotators)
    n = np.bincount(answers.annotator, minlength=people)
    share = np.bincount(answers.annotator, right, minlength=people) / np.maximum(n, 1)
    unknown = np.bincount(answers.annotator, right * (1 - right), minlength=people) / np.maximum(n, 1)
    spread = share * (1 - share)
    effective = np.where(spread > 0, n * spread / np.maximum(spread + unknown, 1e-12), n)
    k = share * effective
    low = np.where(k > 0, beta.ppf(0.025, np.maximum(k, 1e-9), effective - k + 1), 0.0)
    high = np.where(k < effective, beta.ppf(0.975, k + 1, np.maximum(effective - k, 1e-9)), 1.0)
    return share, low, high


def from_table(items: Sequence[str], annotators: Sequence[str], answers: Sequence[str]) -> Annotations:
    """Make `Annotations` from three columns, one row per answer.

    Items keep the order in which they occur first. If an annotator answered an item twice, both answers count.
    """
    names = list(dict.fromkeys(items))
    people, classes = sorted(set(annotators)), sorted(set(answers))
    place = {name: i for i, name in enumerate(names)}
    return Annotations(
        np.array([place[name] for name in items]),
        np.searchsorted(people, annotators),
        np.searchsorted(classes, answers),
        names,
        people,
        classes,
    )


def from_columns(columns: dict[str, Sequence[str | None]]) -> Annotations:
    """Make `Annotations` from one column per annotator; None where an annotator was not asked.

    Items are named by their row, from 1; those without any answer are left out.

    Raises:
        ValueError: If there is no answer at all.

    >>> from_columns({"ann": ["x", None], "bob": ["y", "y"]}).votes.tolist()
    [[1.0, 1.0], [0.0, 1.0]]
    """
    given = [(i, who, value) for who, values in columns.items() for i, value in enumerate(values) if value is not None]
    if not given:
        raise ValueError(f"There is no answer in the columns {', '.join(columns)}.")
    people, classes = list(columns), sorted({value for _, _, value in given})
    place = {name: k for k, name in enumerate(classes)}
    answered, item = np.unique([i for i, _, _ in given], return_inverse=True)
    return Annotations(
        item,
        np.array([people.index(who) for _, who, _ in given], dtype=int),
        np.array([place[value] for _, _, value in given], dtype=int),
        [str(i + 1) for i in answered.tolist()],
        people,
        classes,
    )


def _confusion(answers: Annotations, probabilities: np.ndarray) -> np.ndarray:
    classes = probabilities.shape[1]
    counts = np.zeros((len(answers.annotators), classes, classes))  # annotator, answer, true class
    np.add.at(counts, (answers.annotator, answers.answer), probabilities[answers.item])
    counts = counts.transpose(0, 2, 1)
    shared = counts.sum(0) + np.eye(classes) + 0.1
    shared /= shared.sum(1, keepdims=True)
    counts = counts + PSEUDO * classes * shared
    return counts / counts.sum(2, keepdims=True)


def _posterior(answers: Annotations, log_prior: np.ndarray, confusion: np.ndarray) -> np.ndarray:
    logs = log_prior.copy()
    np.add.at(logs, answers.item, np.log(confusion[answers.annotator, :, answers.answer]))
    return softmax(logs)


def _out_of_fold(x: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """Return out-of-fold predictions [N, K] of logistic regression on probable classes: each counts by its share."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import KFold

    rows, classes = probabilities.shape
    found = np.full((rows, classes), 1 / classes)
    if rows < 2 * FOLDS:
        return found
    for train, test in KFold(FOLDS, shuffle=True, random_state=0).split(x):
        weights = probabilities[train]
        item, label = np.nonzero(weights > 0.01)
        if len(np.unique(label)) < 2:
            continue
        model = LogisticRegression(C=STRENGTH, max_iter=200)
        model.fit(x[train][item], label, sample_weight=weights[item, label])
        found[np.ix_(test, model.classes_)] = model.predict_proba(x[test])
    found = np.maximum(found, 1e-3)
    return found / found.sum(1, keepdims=True)


# -- tables ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class FusedData:
    """A table to fit on, made from the answers of several annotators.

    It has a row for each item and probable class, with the columns `fused_label`, `fused_probability` (the weight) and
    `fused_item` (the group), and the features of the item. Items without any answer have no label: `fit` predicts them.
    """

    path: Path
    way: str  # features or dawid_skene, whichever was used
    reliability: list[Json]
    disagree: float  # share of the items whose annotators disagree
    unanswered: int  # items without any answer
    predicted: bool  # the classes of these items will be; images are left out


def fuse_data(
    data: Path,
    out: Path,
    *,
    annotators: Sequence[str] = (),
    item: str | None = None,
    annotator: str | None = None,
    answer: str | None = None,
    text: Sequence[str] = (),
    drop: Sequence[str] = (),
) -> FusedData:
    """Fuse the answers of annotators in a table, and write what `fit` learns from.

    Items with features are fused with a classifier that sees them; on LabelMe that was right for 83.8 % of the items
    (Dawid and Skene: 79.5 %, majority: 76.6 %), on the sentiment sentences for 91.4 % (91.5 %, 88.7 %).

    Args:
        data: A csv, tsv, parquet or npz file.
        out: The model folder; it gets annotators.csv and fused.csv, or fused.parquet if the data is not text.
        annotators: The columns with the answers of one annotator each; an empty value means not asked.
        item: In a table with one row per answer, the column that names the item.
        annotator: The column that names the annotator.
        answer: The column with the answer.
        text: Columns with free text.
        drop: Columns to leave out.

    Raises:
        ValueError: If a column is missing, or the options do not fit together.
    """
    long = (item, annotator, answer)
    if bool(annotators) == any(long) or (any(long) and not all(long)):
        raise ValueError("Name either the columns of the annotators, or all three of item, annotator and answer.")
    named = [*annotators, *(name for name in long if name is not None)]
    columns = read_table(data, text=(*named, *text))
    for name in (*named, *text, *drop):
        if name not in columns:
            raise ValueError(f"There is no column {name!r} in {data}; it has {', '.join(list(columns)[:20])}.")
    if annotators:
        answers = from_columns(_spell_alike({name: _cell_texts(columns, name) for name in annotators}))
        rows = np.array([int(name) - 1 for name in answers.items])
    else:
        answers, rows = _long(columns, str(item), str(annotator), str(answer))
    left = {name: column for name, column in columns.items() if name not in (*named, *drop)}
    if not left:
        raise ValueError(f"{data} has no column to learn from beside the answers: add the features of each item.")
    fused, way = _fuse(answers, left, rows, text)
    judged = reliability(answers, fused)
    _write_reliability(out / RELIABILITY, judged)
    silent = np.setdiff1d(np.arange(row_count(columns)), rows) if annotators else np.empty(0, int)
    path = out / FUSED_FILES[table_kind(data) not in (".csv", ".tsv")]
    images = find_image_column(left, FUSED_LABEL, Options(text=tuple(text)))
    _write_fused(path, left, answers, fused, rows, silent if images is None else silent[:0])
    votes = answers.votes
    return FusedData(path, way, judged, float(((votes > 0).sum(1) > 1).mean()), len(silent), images is None)


def _cell_texts(columns: Columns, name: str) -> list[str | None]:
    text = column_text(columns, name, "the data")
    return [None if code < 0 else text.values[code] for code in text.codes.tolist()]


def _spell_alike(cells: dict[str, Sequence[str | None]]) -> dict[str, Sequence[str | None]]:
    """Return answers with 1 for 1.0 if both occur: a column of whole numbers with gaps is often saved so.

    >>> _spell_alike({"ann": ["0.0", None, "1.0"], "bob": ["0", "1", "1"]})["ann"]
    ['0', None, '1']
    """
    known = {value for values in cells.values() for value in values if value is not None}
    whole = {value: value[:-2] for value in known if re.fullmatch(r"-?\d+\.0", value)}
    if known.isdisjoint(whole.values()):
        return cells
    return {name: [value and whole.get(value, value) for value in values] for name, values in cells.items()}


def _long(columns: Columns, item: str, annotator: str, answer: str) -> tuple[Annotations, np.ndarray]:
    """Return the answers, and the first row of each item."""
    cells = list(zip(*(_cell_texts(columns, name) for name in (item, annotator, answer)), strict=True))
    for number, row in enumerate(cells, 1):
        if None in row:
            raise ValueError(f"Row {number} has an empty {(item, annotator, answer)[row.index(None)]!r}.")
    answers = from_table(*zip(*cells, strict=True))  # type: ignore[arg-type]
    first: dict[str, int] = {}
    for place, (name, _, _) in enumerate(cells):
        first.setdefault(str(name), place)
    return answers, np.array([first[name] for name in answers.items])


def _fuse(answers: Annotations, columns: Columns, rows: np.ndarray, text: Sequence[str]) -> tuple[FusedLabels, str]:
    from logitclip.data._preprocessing import Preprocessor

    chosen = take(columns, rows)
    try:
        features = Preprocessor.fit(chosen, text).transform(chosen).double().numpy()
    except ValueError:  # no usable column, such as pictures
        return dawid_skene(answers), "dawid_skene"
    return fuse_with_features(answers, features), "features"


def _write_reliability(path: Path, rows: list[Json]) -> None:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["annotator", "answers", "accuracy", "low", "high"])
    for row in rows:
        shares = (f"{row[name]:.4f}" for name in ("accuracy", "low", "high"))
        table.writerow([guard_formula(row["annotator"]), row["answers"], *shares])
    files.replace(path, text.getvalue().encode())


def _write_fused(
    path: Path,
    features: Columns,
    answers: Annotations,
    fused: FusedLabels,
    rows: np.ndarray,
    silent: np.ndarray,
) -> None:
    """Write one row per item and probable class; items without an answer have one row without a label."""
    place, label = np.nonzero(fused.probabilities > LEAST_LEARNT)
    frame = to_frame(take(features, np.concatenate([rows[place], silent])))
    frame[FUSED_LABEL] = [*np.array(answers.class_names, dtype=object)[label], *[None] * len(silent)]
    frame[FUSED_WEIGHT] = np.append(fused.probabilities[place, label].round(4), np.ones(len(silent)))
    frame[FUSED_ITEM] = [*np.array(answers.items, dtype=object)[place], *(str(row + 1) for row in silent)]
    text = path.suffix == ".csv"
    files.replace(path, frame.to_csv(index=False, lineterminator="\n").encode() if text else frame.to_parquet())
