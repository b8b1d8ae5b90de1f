"""Several learners' votes on the true class of each row, and how much each learner counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from logitclip.own_data.calibration import calibrate, find_temperature

ADVISER = "neighbours"  # votes on labels, and is part of the model only if there is no other learner
PRIOR = 5.0  # rows that each learner is taken to explain before any is looked at
LEAST_SHARE = 0.1  # a learner with a smaller share is left out
ROUNDS = 100


@dataclass(frozen=True, eq=False)
class Vote:
    """What one learner says of every row.

    Attributes:
        held_out: class probabilities [n, K] by models that have not seen the row's label.
        seen: class probabilities [n, K] by models that have, averaged over their training; None if there are none.
    """

    held_out: np.ndarray
    seen: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Votes:
    """What the learners say together.

    Attributes:
        probabilities: of the true class, [n, K].
        agreed: the class that every learner predicts, with and without the adjustment, [n]; -1 if they differ.
        doubted: the largest share of the labels that any learner contradicts.
        weights: the share of each learner in the final model, by name; they sum to 1.
        accuracies: the share of the noisy labels that each learner predicts out of fold.
    """

    probabilities: np.ndarray
    agreed: np.ndarray
    doubted: float
    weights: dict[str, float]
    accuracies: dict[str, float]


def combine(votes: Mapping[str, Vote], labels: np.ndarray) -> Votes:
    """Combine what several learners say.

    On the labels all learners vote alike; the mean is adjusted for classes that lose more labels than others. In the
    final model the learners are mixed such that held-out noisy labels are most likely (stacking).

    Args:
        votes: The learners' votes by name.
        labels: Noisy labels [n] of the same rows.

    Returns:
        The votes together.
    """
    held_out = {name: vote.held_out for name, vote in votes.items()}
    each = [held_out[name] if vote.seen is None else (held_out[name] + vote.seen) / 2 for name, vote in votes.items()]
    predictions = np.stack([found.argmax(1) for one in each for found in (one, adjust_for_classes(one, labels))])
    mixed = [name for name in votes if name != ADVISER or len(votes) == 1]
    shares = dict(zip(mixed, stack([held_out[name] for name in mixed], labels), strict=True))
    return Votes(
        adjust_for_classes(np.mean(each, axis=0), labels),
        np.where((predictions == predictions[0]).all(0), predictions[0], -1),
        float((predictions[1::2] != labels).mean(1).max()),
        {name: shares.get(name, 0.0) for name in votes},
        {name: float((found.argmax(1) == labels).mean()) for name, found in held_out.items()},
    )


def stack(probabilities: Sequence[np.ndarray], labels: np.ndarray) -> list[float]:
    """Return the shares of learners in a mixture that makes the labels most likely.

    Each learner's probabilities are first scaled to the noisy labels by a temperature. The shares are those of the EM
    algorithm for a mixture, with a few rows' worth of equal shares before; small shares become 0.

    Args:
        probabilities: Held-out probabilities [N, K] of each learner.
        labels: Noisy labels [N].

    >>> sure, guessing = np.array([[0.9, 0.1], [0.1, 0.9]] * 50), np.full((100, 2), 0.5)
    >>> stack([sure, guessing], np.array([0, 1] * 50))
    [1.0, 0.0]
    """
    scaled = []
    for found in probabilities:
        logits = np.log(np.maximum(found, 1e-6))
        scaled.append(calibrate(logits, find_temperature(logits, labels, None))[np.arange(len(labels)), labels])
    likelihood = np.stack(scaled, 1) + 1e-9
    shares = np.full(len(scaled), 1 / len(scaled))
    for _ in range(ROUNDS):
        explained = likelihood * shares
        explained /= explained.sum(1, keepdims=True)
        shares = (explained.sum(0) + PRIOR) / (len(labels) + PRIOR * len(scaled))
    shares = np.where(shares < LEAST_SHARE, 0.0, shares)
    return (shares / shares.sum()).tolist()


def adjust_for_classes(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Divide the probability of each class by its mean over the rows that are labelled so, and normalise.

    Where many labels of a class are wrong, learners are unsure of it: its probabilities are too low, also for rows that
    belong to it. The mean over its labels says how sure they are on average (the thresholds of confident learning,
    Northcutt et al., 2021).

    Args:
        probabilities: Out-of-fold probabilities [N, K].
        labels: Noisy labels [N].

    Returns:
        The adjusted probabilities [N, K].

    >>> adjust_for_classes(np.array([[0.8, 0.2], [0.6, 0.4], [0.6, 0.4]]), np.array([0, 0, 1])).round(2)
    array([[0.7 , 0.3 ],
           [0.46, 0.54],
           [0.46, 0.54]])
    """
    counts = np.bincount(labels, minlength=probabilities.shape[1])
    own = probabilities[np.arange(len(labels)), labels]
    mean = np.bincount(labels, own, minlength=len(counts)) / np.maximum(counts, 1)
    scaled = probabilities / np.maximum(np.where(counts > 0, mean, 1.0), 1e-3)
    return scaled / scaled.sum(1, keepdims=True)
