"""Several answers for an item: fuse them into probabilities of the true class, and say who is reliable.

`dawid_skene` estimates a confusion matrix for each annotator and the probabilities of each item's true class by
expectation maximisation (Dawid and Skene, 1979). `fuse_with_features` replaces the class shares in it by a classifier's
out-of-fold prediction for the item (as Raykar et al., 2010, do), so that items with similar features help each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from logitclip.files import Json
from logitclip.own_data.folds import FOLDS

EM_STEPS = 200  # of expectation maximisation, at most
TOLERANCE = 1e-6
PSEUDO = 0.5  # answers that a cell of a confusion matrix has before any was seen, shared with all annotators
ROUNDS = 4  # of classifier and fusion in turn
STRENGTH = 0.01  # C of the logistic regression: strongly regularised, on standardised features


@dataclass(frozen=True, eq=False)
class Answers:
    """Answers of annotators, one entry per answer.

    Attributes:
        item: Position of the item, int [A] in 0..N-1.
        annotator: Position in `annotators`, int [A].
        answer: Position in `class_names`, int [A].
        items: Names of the items, [N].
        annotators: Names of the annotators, [R].
        class_names: The classes, [K].
    """

    item: np.ndarray
    annotator: np.ndarray
    answer: np.ndarray
    items: Sequence[str]
    annotators: Sequence[str]
    class_names: Sequence[str]

    @property
    def votes(self) -> np.ndarray:
        """How many annotators gave each class to each item, [N, K]."""
        votes = np.zeros((len(self.items), len(self.class_names)))
        np.add.at(votes, (self.item, self.answer), 1)
        return votes


@dataclass(frozen=True, eq=False)
class FusedLabels:
    """What the answers say.

    Attributes:
        probabilities: Probabilities of the true class of each item, [N, K].
        confusion: Confusion matrix of each annotator, [R, K, K]: row = true class, column = answer, rows sum to 1.
    """

    probabilities: np.ndarray
    confusion: np.ndarray


def dawid_skene(answers: Answers) -> FusedLabels:
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


def fuse_with_features(answers: Answers, features: np.ndarray, seed: int = 0) -> FusedLabels:
    """Fuse answers with a classifier's prediction for each item instead of the class shares.

    Args:
        answers: The answers.
        features: Features of the items, [N, D].
        seed: Seed of the folds.
    """
    fused = dawid_skene(answers)
    scale = features.std(0)
    x = (features - features.mean(0)) / np.where(scale > 0, scale, 1.0)
    for _ in range(ROUNDS):
        predicted = _out_of_fold(x, fused.probabilities, seed)
        confusion = _confusion(answers, fused.probabilities)
        fused = FusedLabels(_posterior(answers, np.log(predicted), confusion), confusion)
    return fused


def reliability(answers: Answers, fused: FusedLabels) -> list[Json]:
    """Return the share of right answers of each annotator with a 95 % interval, the most reliable first.

    An annotator's own answers count in the fused probabilities: if annotators err together, that flatters each of them.
    Without them, an item with few other answers tells little. So both ways are computed. The interval holds those of
    both, Clopper and Pearson's for the expected number of right answers, with fewer answers where the truth is
    uncertain; the accuracy is their mean. Errors that most annotators share are not noticed.
    """
    logs = np.log(fused.probabilities[answers.item] + 1e-12)
    own = np.log(fused.confusion[answers.annotator, :, answers.answer])
    shares, lows, highs = zip(*(_accuracy(answers, values) for values in (logs, logs - own)), strict=True)
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


def _accuracy(answers: Answers, logs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return each annotator's share of right answers and the ends of its interval, by log-probabilities [A, K]."""
    from scipy.stats import beta

    chances = np.exp(logs - logs.max(1, keepdims=True))
    right = chances[np.arange(len(logs)), answers.answer] / chances.sum(1)
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


def from_table(items: Sequence[str], annotators: Sequence[str], answers: Sequence[str]) -> Answers:
    """Make `Answers` from three columns, one row per answer.

    Items keep the order in which they occur first. If an annotator answered an item twice, both answers count.
    """
    names = list(dict.fromkeys(items))
    people, classes = sorted(set(annotators)), sorted(set(answers))
    place = {name: i for i, name in enumerate(names)}
    return Answers(
        np.array([place[name] for name in items]),
        np.searchsorted(people, annotators),
        np.searchsorted(classes, answers),
        names,
        people,
        classes,
    )


def from_columns(columns: dict[str, Sequence[str | None]]) -> Answers:
    """Make `Answers` from one column per annotator; None where an annotator was not asked.

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
    return Answers(
        item,
        np.array([people.index(who) for _, who, _ in given], dtype=int),
        np.array([place[value] for _, _, value in given], dtype=int),
        [str(i + 1) for i in answered.tolist()],
        people,
        classes,
    )


def _confusion(answers: Answers, probabilities: np.ndarray) -> np.ndarray:
    classes = probabilities.shape[1]
    counts = np.zeros((len(answers.annotators), classes, classes))  # annotator, answer, true class
    np.add.at(counts, (answers.annotator, answers.answer), probabilities[answers.item])
    counts = counts.transpose(0, 2, 1)
    shared = counts.sum(0) + np.eye(classes) + 0.1
    shared /= shared.sum(1, keepdims=True)
    counts = counts + PSEUDO * classes * shared
    return counts / counts.sum(2, keepdims=True)


def _posterior(answers: Answers, log_prior: np.ndarray, confusion: np.ndarray) -> np.ndarray:
    logs = log_prior.copy()
    np.add.at(logs, answers.item, np.log(confusion[answers.annotator, :, answers.answer]))
    shifted = np.exp(logs - logs.max(1, keepdims=True))
    return shifted / shifted.sum(1, keepdims=True)


def _out_of_fold(x: np.ndarray, probabilities: np.ndarray, seed: int) -> np.ndarray:
    """Return out-of-fold predictions [N, K] of logistic regression on probable classes: each counts by its share."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import KFold

    rows, classes = probabilities.shape
    found = np.full((rows, classes), 1 / classes)
    if rows < 2 * FOLDS:
        return found
    for train, test in KFold(FOLDS, shuffle=True, random_state=seed).split(x):
        weights = probabilities[train]
        item, label = np.nonzero(weights > 0.01)
        if len(np.unique(label)) < 2:
            continue
        model = LogisticRegression(C=STRENGTH, max_iter=200)
        model.fit(x[train][item], label, sample_weight=weights[item, label])
        found[np.ix_(test, model.classes_)] = model.predict_proba(x[test])
    found = np.maximum(found, 1e-3)
    return found / found.sum(1, keepdims=True)
