"""Calibrated probabilities of the true class from logits and noisy labels, and what they say about each label."""

from __future__ import annotations

import numpy as np

from logitclip.noise.estimate import MOST_SAMPLED

TEMPERATURES = np.geomspace(0.02, 50, 60)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return the softmax over the last axis."""
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def calibrate(logits: np.ndarray, temperature: float, log_prior: np.ndarray | float = 0.0) -> np.ndarray:
    """Return the calibrated probabilities of the classes, see `find_temperature`."""
    return softmax(logits / temperature + log_prior)


def find_temperature(
    logits: np.ndarray, labels: np.ndarray, matrix: np.ndarray | None, true: np.ndarray | None = None
) -> float:
    """Fit the temperature of temperature scaling on noisy labels.

    Plain temperature scaling would fit the noise: at a noise rate of 40 % it makes every prediction at most 60 % sure.
    Here the labels are explained by a clean prediction followed by noise: T maximises the likelihood
    sum_i log (softmax(z_i / T) M)_{y_i}, where M[true, given] is the transition matrix.

    Args:
        logits: [N, K] of held-out examples.
        labels: Their noisy labels [N].
        matrix: The transition matrix [K, K]; None means no noise.
        true: Which labels are known to be true, bool [N]; they are explained without noise.
    """
    true = np.zeros(len(labels), bool) if true is None else true
    if logits.size > MOST_SAMPLED:
        chosen = np.random.default_rng(0).choice(len(labels), max(100, MOST_SAMPLED // logits.shape[1]), replace=False)
        logits, labels, true = logits[chosen], labels[chosen], true[chosen]
    rows = np.arange(len(labels))

    def likelihood(temperature: float) -> float:
        probabilities = calibrate(logits, temperature)
        given = probabilities if matrix is None else np.where(true[:, None], probabilities, probabilities @ matrix)
        return float(np.log(np.maximum(given[rows, labels], 1e-12)).sum())

    best = int(np.argmax([likelihood(t) for t in TEMPERATURES]))
    around = np.geomspace(TEMPERATURES[max(best - 1, 0)], TEMPERATURES[min(best + 1, len(TEMPERATURES) - 1)], 30)
    return float(around[np.argmax([likelihood(t) for t in around])])


def match_confidence(logits: np.ndarray, accuracy: float) -> float:
    """Return the temperature at which the mean probability of the predicted class is the accuracy.

    >>> round(match_confidence(np.array([[2.0, 0.0], [0.0, 2.0]]), 0.75), 2)
    1.82
    """
    low, high = 0.2, 5.0  # beyond them, the estimate of the accuracy is to blame
    for _ in range(20):
        middle = (low * high) ** 0.5
        sure = calibrate(logits, middle).max(1).mean() > accuracy
        low, high = (middle, high) if sure else (low, middle)
    return float((low * high) ** 0.5)


def given_the_label(probabilities: np.ndarray, labels: np.ndarray, matrix: np.ndarray | None) -> np.ndarray:
    """Return the probability of each true class given the input and the noisy label, [N, K].

    By Bayes' rule it is proportional to p(true = k | x) M[k, y].

    Args:
        probabilities: Calibrated probabilities of the true class [N, K].
        labels: Noisy labels [N].
        matrix: The transition matrix [K, K]; None spreads the noise evenly.
    """
    classes = probabilities.shape[1]
    if matrix is None:
        likelihood = np.full_like(probabilities, 0.1 / max(classes - 1, 1))
        likelihood[np.arange(len(labels)), labels] = 0.9
    else:
        # Every confusion stays possible: the matrix is an estimate from few examples.
        smoothed = 0.98 * matrix + 0.02 / classes
        likelihood = smoothed[:, labels].T
    joint = probabilities * likelihood
    return joint / np.maximum(joint.sum(1, keepdims=True), 1e-300)
