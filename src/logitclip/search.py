"""The search for a good value of the clip. It depends only on the results of the trials, not on training or files.

The first three values are evenly spaced in the logarithm. Then one value follows at a time: beyond the best value if
that lies at an end, else beside it. `tune` runs the search around any training function; `logitclip tune` runs the same
search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Trial", "Tuned", "tune"]

BETWEEN = (1.0, 5.0)  # where the search for temp starts; it may go beyond
TRIALS = 5
HELD_OUT = 0.51  # share of the examples to validate on; five trials on the rest cost a quarter of the paper's grid


@dataclass(frozen=True)
class Trial:
    """The result of training with one value, on held-out examples with their noisy labels.

    Attributes:
        predictions: predicted classes [N].
        labels: noisy labels [N].
        train_accuracy: accuracy on the training labels, in [0, 1], if known.
        val_accuracy: accuracy on the held-out labels, in [0, 1]; None: computed from `predictions`.

    >>> Trial(np.array([0, 1, 1]), np.array([0, 1, 0])).accuracy
    0.6666666666666666
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
        best: the value with the highest score.
        scores: the score of each value, in the order of the trials; None if training failed.

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
        train: trains a fresh model with the value it is given, and returns ``(predictions, labels)`` or
            ``(predictions, labels, train_accuracy)``: the predicted classes [N] or logits [N, K] for held-out examples,
            their noisy labels [N], and the share of the training labels that the model predicts, in [0, 1]. The
            held-out examples must be the same in every call. Return None if training failed.
        between: the smallest and the largest of the first three values. The search may leave this range.
        trials: how often to train, at least 3.
        values: try exactly these values instead, and score them by validation accuracy alone, as the paper does.

    Returns:
        The best value, and the score of each value: validation accuracy, minus the gap to the training accuracy, minus
        the share of held-out examples for which the other trials agree on another class.

    Raises:
        ValueError: if an argument is out of its range, or if all trials failed.

    >>> def train(temp):  # instead of training: predictions that are best at temp = 2.5
    ...     rng, labels = np.random.default_rng(round(100 * temp)), np.arange(1000) % 4
    ...     wrong = rng.random(1000) < 0.3 * abs(math.log(temp / 2.5))
    ...     return np.where(wrong, (labels + 1) % 4, labels), labels
    >>> tune(train).best
    2.24
    """
    if values is not None:
        if not len(values):
            raise ValueError("values must not be empty.")
        done = {float(value): _trial(train(value)) for value in values}
        scores = {value: None if trial is None else trial.accuracy for value, trial in done.items()}
        return Tuned(best(scores), scores)
    if trials < 3:
        raise ValueError(f"trials must be at least 3, got {trials}.")
    done = {}
    while ahead := [value for value in proposed(between, done, trials) if value not in done]:
        done |= {value: _trial(train(value)) for value in ahead}
    scores = scored(done)
    return Tuned(best(scores), scores)


def proposed(between: tuple[float, float], done: Mapping[float, Trial | None], count: int = TRIALS) -> list[float]:
    """Return the values to try, as far as the finished trials decide them: the first three, then one at a time."""
    low, high = between
    if not 0 < low < high < math.inf:
        raise ValueError(f"between must be two positive numbers, the smaller first, got {between}.")
    values = [low, _rounded(math.sqrt(low * high)), high]
    while len(values) < count and all(value in done for value in values):
        values.append(_next(scored({value: done[value] for value in values})))
    return values


@dataclass(frozen=True)
class Score:
    """The score of a trial and its parts, each in [0, 1]."""

    accuracy: float  # on the held-out noisy labels
    gap: float  # training accuracy minus `accuracy`, at least 0
    outvoted: float  # share of held-out examples for which the other trials agree on another class

    @property
    def total(self) -> float:
        """The score: validation accuracy minus both penalties."""
        return self.accuracy - self.gap - self.outvoted


def scored(done: Mapping[float, Trial | None]) -> dict[float, float | None]:
    """Return the score of each value, see `score_parts`; None if its training failed."""
    return {value: None if score is None else score.total for value, score in score_parts(done).items()}


def score_parts(done: Mapping[float, Trial | None]) -> dict[float, Score | None]:
    """Return the score of each value: validation accuracy minus two penalties. None if its training failed.

    The first penalty is the gap to the accuracy on the training labels: a model that fits them without generalising has
    memorised them. The second is the share of held-out examples for which the other trials agree on another class: a
    model that differs from the others has memorised a wrong label or failed to learn. Both penalties help where
    validation accuracy says little: under asymmetric noise, right and wrong predictions alike agree with many of the
    noisy labels. A model that does not beat the most frequent label has no vote, and is outvoted everywhere.
    """
    finished = {value: trial for value, trial in done.items() if trial is not None}
    voters = [value for value, trial in finished.items() if has_learnt(trial.predictions, trial.labels)]
    scores: dict[float, Score | None] = dict.fromkeys(done)
    for value, trial in finished.items():
        # With augmentation the training accuracy may be below the validation accuracy.
        gap = 0.0 if trial.train_accuracy is None else max(0.0, trial.train_accuracy - trial.accuracy)
        others = [finished[voter].predictions for voter in voters if voter != value]
        if voters and value not in voters:
            apart = 1.0  # its gap is small because it learnt nothing
        else:
            apart = _outvoted(trial.predictions, np.stack(others)) if others else 0.0
        scores[value] = Score(trial.accuracy, gap, apart)
    return scores


def has_learnt(predictions: np.ndarray, labels: np.ndarray) -> bool:
    """Return whether predictions beat the most frequent label by two standard errors."""
    share = np.unique(labels, return_counts=True)[1].max() / len(labels)
    hits = (predictions == labels).mean()
    return bool(hits > share + 2 * math.sqrt(share * (1 - share) / len(labels)))


def best(scores: Mapping[Any, float | None]) -> Any:
    """Return the value with the highest score; the first of several."""
    known = {value: score for value, score in scores.items() if score is not None}
    if not known:
        raise ValueError("No value can be chosen: all trials failed.")
    return max(known, key=known.__getitem__)


def _next(scores: Mapping[float, float | None]) -> float:
    """Return the next value: beyond the end if the best one lies there, else in the wider (log) gap beside it."""
    values = sorted(scores)
    at_best = values.index(max(values, key=lambda value: _or_worst(scores[value])))
    if at_best in (0, len(values) - 1):
        inner = values[1 if at_best == 0 else -2]
        return _rounded(values[at_best] * values[at_best] / inner)
    below, at, above = values[at_best - 1 : at_best + 2]
    return _rounded(math.sqrt(at * above if above / at >= at / below else at * below))


def _or_worst(score: float | None) -> float:
    return -math.inf if score is None else score


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _outvoted(predictions: np.ndarray, others: np.ndarray) -> float:
    """Return the share of examples for which more of the others [M, N] agree on another class than on this one."""
    same = (others == predictions).sum(0)
    most = (others[:, None] == others).sum(1).max(0)
    return float((same < most).mean())


def _trial(result: Any) -> Trial | None:
    """Check what a training function returned."""
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
    train_accuracy = None if len(result) == 2 or result[2] is None else float(result[2])
    if train_accuracy is not None and not 0 <= train_accuracy <= 1:
        raise ValueError(f"train_accuracy must lie in [0, 1], got {train_accuracy}. Divide percentages by 100.")
    return Trial(predictions, labels, train_accuracy)


def _classes(values: Any) -> np.ndarray:
    """Return classes [N] from classes [N], or from logits or probabilities [N, K]; tensors may be on any device."""
    array = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    return array.argmax(1) if array.ndim == 2 else array
