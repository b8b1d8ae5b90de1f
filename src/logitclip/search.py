"""The search for a good value of the clip. It depends only on the results of the trials, not on training or files.

The first three values are evenly spaced in the logarithm. Then one value follows at a time: beyond the best value if
that lies at an end, else beside it. `tune` runs the search around any training function; `logitclip tune` runs the same
search.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

__all__ = ["Trial", "Tuned", "tune"]

V = TypeVar("V")

BETWEEN = (1.0, 5.0)  # where the search for temp starts; it may go beyond
TRIALS = 5
NOTHING_LEARNT = (
    "No trial is better than chance, so the choice means nothing. Train longer, on more examples or with another "
    "learning rate."
)
TIED_WITHIN = 1.5  # accuracies within this many standard errors of the best count as ties
HELD_OUT = 0.51  # share of the examples to validate on; five trials on the rest cost a quarter of the paper's grid


@dataclass(frozen=True)
class Trial:
    """The result of training with one value, on held-out examples with their noisy labels.

    Attributes:
        predictions: Predicted classes [N].
        labels: Noisy labels [N].
        train_accuracy: Accuracy on the training labels, in [0, 1], if known.
        val_accuracy: Accuracy on the held-out labels, in [0, 1]; None: computed from `predictions`.

    >>> Trial(np.array([0, 1, 1, 0]), np.array([0, 1, 0, 0])).accuracy
    0.75
    """

    predictions: np.ndarray
    labels: np.ndarray
    train_accuracy: float | None = None
    val_accuracy: float | None = None

    @property
    def accuracy(self) -> float:
        """Validation accuracy, in [0, 1]."""
        return float((self.predictions == self.labels).mean()) if self.val_accuracy is None else self.val_accuracy


@dataclass(frozen=True)
class Tuned:
    """The result of `tune`.

    Attributes:
        best: The value to use.
        scores: The accuracy on the held-out noisy labels, in [0, 1], of each value in the order of the trials; None if
            training failed.

    >>> def train(temp):  # instead of training: predictions and labels
    ...     return np.arange(10) < temp, np.ones(10, bool)
    >>> tune(train, values=[1.0, 2.0])
    Tuned(best=2.0, scores={1.0: 0.1, 2.0: 0.2})
    """

    best: float
    scores: dict[float, float | None]


def tune(
    train: Callable[[float], Any],
    *,
    between: tuple[float, float] = BETWEEN,
    trials: int = TRIALS,
    values: Sequence[float] | None = None,
) -> Tuned:
    """Find a good temp (or tau) for your own training loop, without a clean label.

    Args:
        train: Trains a fresh model with the value it is given, and returns ``(predictions, labels)`` or
            ``(predictions, labels, train_accuracy)``: the predicted classes [N] or logits [N, K] for held-out examples,
            their noisy labels [N], and the share of the training labels that the model predicts, in [0, 1]. The
            held-out examples must be the same in every call. Return None if training failed.
        between: The smallest and the largest of the first three values. The search may leave this range.
        trials: How often to train, at least 3.
        values: Try exactly these values instead, and choose only by validation accuracy, as the paper does.

    Returns:
        The validation accuracy of each value, and the best value: of those within 1.5 standard errors of the highest
        accuracy, the one with the highest score. The score is the validation accuracy, minus the gap to the training
        accuracy, minus the share of held-out examples for which the other trials agree on another class.

    Raises:
        ValueError: If an argument is out of its range, or if all trials failed.

    >>> def train(temp):  # instead of training: predictions that are best at temp = 2.5
    ...     rng, labels = np.random.default_rng(round(100 * temp)), np.arange(1000) % 4
    ...     wrong = rng.random(1000) < 0.3 * abs(math.log(temp / 2.5))
    ...     return np.where(wrong, (labels + 1) % 4, labels), labels
    >>> tune(train).best
    2.24
    """
    given = None if values is None else [float(value) for value in values]
    if given is not None and not given:
        raise ValueError("values must not be empty.")
    if trials < 3:
        raise ValueError(f"trials must be at least 3, got {trials}.")
    low, high = map(float, between)
    done: dict[float, Trial | None] = {}

    def next_values() -> Sequence[float]:
        return propose_values((low, high), done, trials) if given is None else given

    while ahead := [value for value in next_values() if value not in done]:
        for value in ahead:
            finished = [trial for trial in done.values() if trial is not None]
            done[value] = _trial(train(value), finished[0] if finished else None)
    scores = {value: None if trial is None else trial.accuracy for value, trial in done.items()}
    chosen = best(done) if given is None else highest(scores)
    if given is None and not any(map(has_learnt, done.values())):
        warnings.warn(NOTHING_LEARNT, stacklevel=2)
    return Tuned(chosen, scores)


def range_of(grid: Sequence[float]) -> tuple[float, float]:
    """Return where the search starts instead of trying a grid: its lowest fifth is left out.

    >>> range_of([0.1, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0])
    (1.0, 5.0)
    """
    return grid[len(grid) // 5], grid[-1]


def propose_values(
    between: tuple[float, float], done: Mapping[float, Trial | None], count: int = TRIALS
) -> list[float]:
    """Return the values to try, as far as the finished trials decide them: the first three, then one at a time."""
    low, high = between
    if not 0 < low < high < math.inf:
        raise ValueError(f"between must be two positive numbers, the smaller first, got {between}.")
    values = [low, _round(math.sqrt(low * high)), high]
    while len(values) < count and all(value in done for value in values):
        values.append(_next({value: done[value] for value in values}))
    return values


@dataclass(frozen=True)
class Score:
    """How a trial did on the held-out examples; all numbers in [0, 1]."""

    accuracy: float  # on the noisy labels
    gap: float | None  # training accuracy minus `accuracy`, at least 0; None if a trial has no training accuracy
    outvoted: float  # share of the examples for which the other trials agree on another class
    contender: bool  # whether `accuracy` is about as high as the highest

    @property
    def total(self) -> float:
        """Accuracy minus both penalties."""
        return self.accuracy - (self.gap or 0.0) - self.outvoted


def best(done: Mapping[float, Trial | None]) -> float:
    """Return the best value: of the `contenders`, the one with the highest total."""
    scores = score_trials(done)
    return highest({value: score.total if score and score.contender else None for value, score in scores.items()})


def score_trials(done: Mapping[float, Trial | None]) -> dict[float, Score | None]:
    """Return the score of each value; None if its training failed.

    A model that fits the training labels without generalising has memorised them: it has a large gap. A model that
    differs from the others has memorised, or has learnt too little. Only models that have learnt vote.
    """
    finished = {value: trial for value, trial in done.items() if trial is not None}
    voters = {value: trial.predictions for value, trial in finished.items() if has_learnt(trial)}
    known = all(trial.train_accuracy is not None for trial in finished.values())
    tied = contenders(done)
    scores: dict[float, Score | None] = dict.fromkeys(done)
    for value, trial in finished.items():
        # With augmentation the training accuracy may be below the validation accuracy.
        gap = max(0.0, (trial.train_accuracy or 0.0) - trial.accuracy) if known else None
        others = [predictions for voter, predictions in voters.items() if voter != value]
        scores[value] = Score(trial.accuracy, gap, share_outvoted(trial.predictions, others), value in tied)
    return scores


def contenders(done: Mapping[float, Trial | None]) -> list[float]:
    """Return the values whose validation accuracy is within `TIED_WITHIN` standard errors of the best, which is first.

    The standard error is that of the difference between two models on the same examples. It is large where validation
    accuracy says little: under asymmetric noise, right and wrong predictions alike agree with many of the noisy labels.
    A model that learnt nothing has no gap. It is left out, unless no model learnt anything.

    Raises:
        ValueError: If all trials failed.
    """
    finished = {value: trial for value, trial in done.items() if trial is not None}
    trials = {value: trial for value, trial in finished.items() if has_learnt(trial)} or finished
    first = highest({value: trial.accuracy for value, trial in trials.items()})
    right = {value: trial.predictions == trial.labels for value, trial in trials.items()}

    def near(value: float) -> bool:
        difference = right[first].astype(float) - right[value]
        error = float(difference.std()) / math.sqrt(len(difference))
        return trials[first].accuracy - trials[value].accuracy <= TIED_WITHIN * error

    return [first, *(value for value in trials if value != first and near(value))]


def share_outvoted(predictions: np.ndarray, others: Sequence[np.ndarray]) -> float:
    """Return the share of examples for which more of the others agree on another class than on this one."""
    if not others:
        return 0.0
    votes = np.stack(others)
    same = (votes == predictions).sum(0)
    most = (votes[:, None] == votes).sum(1).max(0)
    return float((same < most).mean())


def has_learnt(trial: Trial | None) -> bool:
    """Return whether a trial's predictions agree with the labels more often than by chance."""
    return trial is not None and agree_beyond_chance(trial.predictions, trial.labels)


def agree_beyond_chance(predictions: np.ndarray, labels: np.ndarray) -> bool:
    """Return whether predictions agree with labels more often than by chance, by two standard errors.

    By chance, predictions and labels with these class shares agree as often as if they were independent. A constant
    prediction is never better. Predictions that favour rare classes may be, though they do not beat the most frequent
    label.

    >>> labels = np.array([0, 0, 0, 1] * 25)
    >>> agree_beyond_chance(np.zeros(100), labels), agree_beyond_chance(labels ^ (np.arange(100) < 30), labels)
    (False, True)
    """
    shares = [(predictions == k).mean() * (labels == k).mean() for k in np.unique(labels)]
    return beats_chance((predictions == labels).mean(), float(sum(shares)), len(labels))


def beats_chance(hits: float, chance: float, count: int, errors: float = 2.0) -> bool:
    """Return whether the share of hits among `count` examples exceeds that of chance by `errors` standard errors.

    >>> beats_chance(0.55, 0.5, 1000), beats_chance(0.55, 0.5, 100)
    (True, False)
    """
    return bool(hits > chance + errors * math.sqrt(chance * (1 - chance) / count))


def highest(scores: Mapping[V, float | None]) -> V:
    """Return the value with the highest score; the first of several."""
    known = {value: score for value, score in scores.items() if score is not None}
    if not known:
        raise ValueError("No value can be chosen: all trials failed.")
    return max(known, key=known.__getitem__)


def _next(done: Mapping[float, Trial | None]) -> float:
    """Return the next value: beyond the end if the best one lies there, else in the wider (log) gap beside it."""
    values = sorted(done)
    failed = all(trial is None for trial in done.values())
    at_best = 0 if failed else values.index(best(done))
    if at_best in (0, len(values) - 1):
        inner = values[1 if at_best == 0 else -2]
        return _round(values[at_best] * values[at_best] / inner)
    below, at, above = values[at_best - 1 : at_best + 2]
    return _round(math.sqrt(at * above if above / at >= at / below else at * below))


def _round(value: float) -> float:
    return float(f"{value:.3g}")


def _trial(result: Any, other: Trial | None) -> Trial | None:
    """Check what a training function returned, and that the held-out examples are those of another trial."""
    if result is None:
        return None
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise ValueError(
            "The training function must return (predictions, labels) or (predictions, labels, train_accuracy), "
            f"got {type(result).__name__}."
        )
    predictions, labels = (_classes(values) for values in result[:2])
    if predictions.shape != labels.shape or not len(labels):
        raise ValueError(
            f"There must be as many predictions as labels and at least one, got {len(predictions)} and {len(labels)}."
        )
    if other is not None and not np.array_equal(labels, other.labels):
        raise ValueError("The held-out examples must be the same in every call of the training function.")
    train_accuracy = None if len(result) == 2 or result[2] is None else float(result[2])
    if train_accuracy is not None and not 0 <= train_accuracy <= 1:
        raise ValueError(f"train_accuracy must lie in [0, 1], got {train_accuracy}. Divide percentages by 100.")
    return Trial(predictions, labels, train_accuracy)


def _classes(values: Any) -> np.ndarray:
    """Return classes [N] from classes [N], or from logits or probabilities [N, K]; tensors may be on any device."""
    array = values.detach().cpu() if hasattr(values, "detach") else np.asarray(values)
    if array.ndim == 2 and array.shape[1] == 1:
        raise ValueError(f"Classes must be [N], or logits [N, K], got a column of shape {tuple(array.shape)}.")
    return np.asarray(array.argmax(1) if array.ndim == 2 else array)  # numpy has no bfloat16, in which logits may be
