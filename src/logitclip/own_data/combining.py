"""Several learners' votes on the true class of each row, and how much each learner counts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

ADVISER = "neighbours"  # votes on labels, and is part of the model only if there is no other learner
LEAST_VOTE = 0.1  # of the mean vote for all labels; learners that vote less for a class do not recognise it
LEAST_SHARE = 0.2  # a learner with a smaller share is left out of the model


@dataclass(frozen=True, eq=False)
class Vote:
    """What one learner says of every row: class probabilities, [n, K]."""

    held_out: np.ndarray  # by models that have not seen the row's label
    seen: np.ndarray | None = None  # by models that have, averaged over their training


@dataclass(frozen=True, eq=False)
class Votes:
    """What the learners say together."""

    probabilities: np.ndarray  # of the true class, [n, K]
    held_out: np.ndarray  # the class that models which have not seen the label predict together, [n]
    agreed: np.ndarray  # the class that every learner predicts, with and without the adjustment, [n]; -1 if they differ
    doubted: float  # the largest share of the labels that any learner contradicts
    weights: dict[str, float]  # the share of each learner in the final model; they sum to 1
    accuracies: dict[str, float]  # the share of the noisy labels that each learner predicts out of fold


def combine(votes: Mapping[str, Vote], labels: np.ndarray, alike: Collection[str] = ()) -> Votes:
    """Combine what several learners say.

    On the labels the learners vote with weights by `weigh`, and the mean is adjusted for classes that lose more labels
    than others. In the final model they count by the same weights, without the adviser.

    Args:
        votes: The learners' votes by name.
        labels: Noisy labels [n] of the same rows.
        alike: Learners that make up the final model in equal shares, if all of them voted.
    """
    held_out = {name: vote.held_out for name, vote in votes.items()}
    right = {name: found.argmax(1) == labels for name, found in held_out.items()}
    each = {
        name: vote.held_out if vote.seen is None else (vote.held_out + vote.seen) / 2 for name, vote in votes.items()
    }
    both = [found.argmax(1) for one in each.values() for found in (one, adjust_for_classes(one, labels))]
    predictions, trusted = np.stack(both), weigh(right)
    equal = bool(alike) and set(alike) <= set(votes)
    shares = {name: (name in alike) / len(alike) for name in votes} if equal else share_out(right)

    def together(said: Mapping[str, np.ndarray]) -> np.ndarray:
        return adjust_for_classes(sum((trusted[name] * one for name, one in said.items()), np.zeros(1)), labels)

    return Votes(
        together(each),
        together(held_out).argmax(1),
        np.where((predictions == predictions[0]).all(0), predictions[0], -1),
        float((predictions[1::2] != labels).mean(1).max()),
        shares,
        {name: float(one.mean()) for name, one in right.items()},
    )


def weigh(right: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return the weights of learners, which sum to 1: exp(-z) of one that is z paired standard errors behind the best.

    Args:
        right: Which of the held-out labels each learner predicts, bool [n], by name.

    >>> weights = weigh({"a": np.array([True] * 8 + [False]), "b": np.array([True] * 4 + [False] * 5)})
    >>> {name: round(weight, 2) for name, weight in weights.items()}  # b is behind by 4 of 4 rows
    {'a': 0.88, 'b': 0.12}
    """
    best = max(right.values(), key=np.sum)
    weights = {name: np.exp(-errors_behind(one, best)) for name, one in right.items()}
    total = sum(weights.values())
    return {name: float(weight / total) for name, weight in weights.items()}


def errors_behind(right: np.ndarray, best: np.ndarray) -> float:
    """Return how many paired standard errors a learner is behind another, by which labels each predicts, bool [n].

    The learners differ only on the rows where one of them is right; of m such rows, a difference of about sqrt(m) is
    due to chance.
    """
    ahead, other = int((best & ~right).sum()), int((right & ~best).sum())
    return (ahead - other) / max(1, ahead + other) ** 0.5


def share_out(right: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return the shares of learners in the model: their weights, without the adviser and without small ones."""
    weights = weigh({name: one for name, one in right.items() if name != ADVISER or len(right) == 1})
    kept = {name: weight for name, weight in weights.items() if weight >= LEAST_SHARE}
    return {name: kept.get(name, 0.0) / sum(kept.values()) for name in right}


def accuracy_of(votes: Mapping[str, Vote], shares: Mapping[str, float], labels: np.ndarray) -> float:
    """Return the share of the labels [n] that learners with these shares predict together, none having seen them."""
    mixed = sum((share * votes[name].held_out for name, share in shares.items()), np.zeros(1))
    return float((mixed.argmax(1) == labels).mean())


def adjust_for_classes(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Divide the probability of each class by its mean over the rows that are labelled so, and normalise.

    Where many labels of a class are wrong, learners are unsure of it: its probabilities are too low, also for rows that
    belong to it. The mean over its labels says how sure they are on average (the thresholds of confident learning,
    Northcutt et al., 2021). It counts as at least a tenth of the mean over all labels: otherwise every row would go to
    a class that no learner recognises, such as a few odd labels.

    Args:
        probabilities: Out of fold, [N, K].
        labels: Noisy labels [N].

    >>> adjust_for_classes(np.array([[0.8, 0.2], [0.6, 0.4], [0.6, 0.4]]), np.array([0, 0, 1])).round(2)
    array([[0.7 , 0.3 ],
           [0.46, 0.54],
           [0.46, 0.54]])
    """
    counts = np.bincount(labels, minlength=probabilities.shape[1])
    own = probabilities[np.arange(len(labels)), labels]
    mean = np.bincount(labels, own, minlength=len(counts)) / np.maximum(counts, 1)
    scaled = probabilities / np.maximum(np.where(counts > 0, mean, 1.0), LEAST_VOTE * own.mean())
    return scaled / scaled.sum(1, keepdims=True)
