"""How noisy are labels? Noise rate and transition matrix from labels and out-of-fold probabilities, with intervals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

RESAMPLES = 100
MOST_CELLS = 2_000_000  # rows times classes that are resampled; of more rows, a random part is used
MOST_CLASSES = 500  # with more classes there is no matrix, only a rate


@dataclass(frozen=True, eq=False)
class NoiseEstimate:
    """An estimate of label noise. Intervals cover 95 % of the bootstrap; they do not cover the bias of the model."""

    rate: float  # share of wrong labels
    rate_interval: tuple[float, float]
    matrix: np.ndarray | None  # [K, K]: row = true class, column = given label, rows sum to 1; None for many classes
    matrix_lower: np.ndarray | None  # [K, K]
    matrix_upper: np.ndarray | None  # [K, K]

    @property
    def looks_clean(self) -> bool:
        """Whether at most 3 % of the labels are wrong, by the upper end of the interval."""
        return self.rate_interval[1] <= 0.03

    def __str__(self) -> str:
        low, high = self.rate_interval
        return f"about {self.rate:.0%} of the labels are wrong (95 % interval {low:.0%} to {high:.0%})"


def estimate_noise(
    labels: np.ndarray, probabilities: np.ndarray, *, resamples: int = RESAMPLES, seed: int = 0
) -> NoiseEstimate:
    """Estimate the noise rate and the transition matrix by confident counting (Northcutt et al., 2021).

    Class k gets the threshold t_k: the mean of p_k over the examples labelled k. An example counts as class k if
    p_k >= t_k, as the most probable such class if there are several, and not at all if there is none. The counts of
    (given label, class) are scaled to the number of examples of each label, and their shares estimate the joint
    distribution of given and true labels.

    Args:
        labels: Given labels, int [N] in 0..K-1.
        probabilities: Class probabilities [N, K] from models that were not trained on the example: out-of-fold
            predictions, or predictions for held-out examples.
        resamples: Bootstrap resamples for the intervals.
        seed: Seed of the bootstrap.

    Returns:
        The estimate with 95 % intervals.

    Raises:
        ValueError: If the shapes do not match, there are no examples, or a label is out of range.

    >>> rng = np.random.default_rng(0)
    >>> true = rng.integers(0, 3, 3000)
    >>> given = np.where(rng.random(3000) < 0.2, (true + 1) % 3, true)
    >>> estimate = estimate_noise(given, 0.9 * np.eye(3)[true] + 0.1 / 3)
    >>> round(estimate.rate, 2), estimate.matrix.round(1).tolist()
    (0.21, [[0.8, 0.2, 0.0], [0.0, 0.8, 0.2], [0.2, 0.0, 0.8]])
    """
    labels, probabilities = np.asarray(labels), np.asarray(probabilities)
    if labels.ndim != 1 or probabilities.ndim != 2 or len(labels) != len(probabilities) or not len(labels):
        raise ValueError(
            f"Labels [N] and probabilities [N, K] are needed, got shapes {labels.shape} and {probabilities.shape}."
        )
    n, classes = probabilities.shape
    if not 0 <= labels.min() <= labels.max() < classes:
        raise ValueError(f"Labels must be in 0..{classes - 1}, got {labels.min()}..{labels.max()}.")
    rng = np.random.default_rng(seed)
    most = max(100, MOST_CELLS // classes)
    if n > most:
        chosen = rng.choice(n, most, replace=False)
        labels, probabilities, n = labels[chosen], probabilities[chosen], most
    rate, matrix = _counted(labels, probabilities, np.ones(n))
    rates, matrices = np.empty(resamples), []
    for i in range(resamples):
        rates[i], resampled = _counted(labels, probabilities, rng.multinomial(n, np.full(n, 1 / n)).astype(float))
        if resampled is not None:
            matrices.append(resampled)
    low, high = np.quantile(rates, [0.025, 0.975])
    lower, upper = np.quantile(matrices, [0.025, 0.975], axis=0) if matrices else (None, None)
    return NoiseEstimate(rate, (float(min(low, rate)), float(max(high, rate))), matrix, lower, upper)


def _counted(labels: np.ndarray, probabilities: np.ndarray, weights: np.ndarray) -> tuple[float, np.ndarray | None]:
    """Return the noise rate and the transition matrix of weighted examples."""
    n, classes = probabilities.shape
    sizes = np.bincount(labels, weights, minlength=classes)
    own = probabilities[np.arange(n), labels]
    with np.errstate(invalid="ignore", divide="ignore"):
        thresholds = np.bincount(labels, weights * own, minlength=classes) / sizes
    passed = probabilities >= np.where(sizes > 0, thresholds, np.inf) - 1e-9  # the mean of equal numbers is rounded
    counted = passed.any(1)
    guess = np.where(passed, probabilities, -1.0).argmax(1)
    if classes > MOST_CLASSES:
        wrong = np.bincount(labels[counted], (weights * (guess != labels))[counted], minlength=classes)
        total = np.bincount(labels[counted], weights[counted], minlength=classes)
        shares = np.divide(wrong, total, out=np.zeros(classes), where=total > 0)
        return float((shares * sizes).sum() / sizes.sum()), None
    pairs = labels[counted] * classes + guess[counted]
    counts = np.bincount(pairs, weights[counted], minlength=classes**2).reshape(classes, classes)
    counts[counts.sum(1) == 0] = np.eye(classes)[counts.sum(1) == 0]  # nothing to count: the label is right
    joint = counts / counts.sum(1, keepdims=True) * sizes[:, None] / sizes.sum()  # [given, true]
    true = joint.sum(0)
    matrix = np.divide(joint.T, true[:, None], out=np.eye(classes), where=true[:, None] > 0)
    return float(1 - np.trace(joint)), matrix
