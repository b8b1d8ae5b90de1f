"""How noisy are labels? Noise rate and transition matrix from labels and out-of-fold probabilities, with intervals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SUREST = 0.5  # share of the predictions of each class that the estimate is based on
CLEAN = 0.05  # labels look clean if at most this share of them may be wrong
RESAMPLES = 100
MOST_SAMPLED = 2_000_000  # rows times classes that are looked at; of more rows, a random part is used
LARGEST_MATRIX = 500  # with more classes there is no matrix, only a rate


@dataclass(frozen=True, eq=False)
class NoiseEstimate:
    """An estimate of label noise. Intervals cover 95 % of the bootstrap; they do not cover the bias of the model.

    Attributes:
        rate: Share of wrong labels.
        rate_interval: Its interval.
        at_most: The upper end of the interval or, if that is larger, the share of labels that predictions contradict,
            which is the rate if no prediction is wrong.
        matrix: Transition matrix [K, K]: row = true class, column = given label, rows sum to 1; None for many classes.
        matrix_lower: Lower ends of the intervals of its cells, [K, K].
        matrix_upper: Upper ends, [K, K].
    """

    rate: float
    rate_interval: tuple[float, float]
    at_most: float
    matrix: np.ndarray | None
    matrix_lower: np.ndarray | None
    matrix_upper: np.ndarray | None


def estimate_noise(
    labels: np.ndarray, probabilities: np.ndarray, *, resamples: int = RESAMPLES, seed: int = 0
) -> NoiseEstimate:
    """Estimate the noise rate and the transition matrix from the surest predictions.

    A prediction contradicts a label because the label is wrong or because the prediction is. The surer the predictions,
    the fewer of them are wrong, so the share of contradictions falls towards the noise rate. Each prediction gets a
    place u in [0, 1] among those of the same class, 0 for the surest. A straight line through the contradictions of the
    surest half, by least squares, estimates the rate at u = 0. The labels of the surest half, by predicted class, give
    the transition matrix, with its noise scaled to that rate.

    Noise must depend only on the class. Where it follows from the features, as that of labelling rules does, the model
    learns it and the estimate is too low. Where even the surest predictions are often wrong, it is too high.

    Args:
        labels: Given labels, int [N] in 0..K-1.
        probabilities: Class probabilities [N, K] from models that were not trained on the example: out-of-fold
            predictions, or predictions for held-out examples. Only their order matters.
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
    most = max(100, MOST_SAMPLED // classes)
    if n > most:
        chosen = rng.choice(n, most, replace=False)
        labels, probabilities, n = labels[chosen], probabilities[chosen], most
    predicted = probabilities.argmax(1)
    places = _rank_in_class(predicted, probabilities.max(1))
    sure = places <= SUREST
    seen = labels[sure], predicted[sure], places[sure]

    rate, matrix = _estimate_weighted(*seen, np.ones(sure.sum()), classes)
    rates, matrices = np.empty(resamples), []
    for i in range(resamples):
        weights = rng.multinomial(n, np.full(n, 1 / n))[sure].astype(float)
        rates[i], resampled = _estimate_weighted(*seen, weights, classes)
        if resampled is not None:
            matrices.append(resampled)
    low, high = (float(end) for end in np.quantile([*rates, rate], [0.025, 0.975]))
    unseen = min(1.0, 3 / int(sure.sum()))  # rule of three: bound for an event never seen
    low, high = min(low, 1 - unseen), max(high, unseen)
    lower, upper = np.quantile(matrices, [0.025, 0.975], axis=0) if matrices else (None, None)
    if lower is not None and upper is not None:
        missed = np.minimum(1.0, 3 / np.maximum(1, np.bincount(predicted[sure], minlength=classes)))[:, None]
        lower, upper = np.minimum(lower, 1 - missed), np.maximum(upper, missed)
    return NoiseEstimate(
        rate=rate,
        rate_interval=(min(low, rate), max(high, rate)),
        at_most=max(high, rate, float((predicted != labels).mean())),
        matrix=matrix,
        matrix_lower=lower,
        matrix_upper=upper,
    )


def _rank_in_class(predicted: np.ndarray, confidence: np.ndarray) -> np.ndarray:
    """Return where each prediction stands among those of its class, from 0 (surest) to 1; equal ones share a place."""
    places = np.empty(len(predicted))
    for k in np.unique(predicted):
        rows = np.flatnonzero(predicted == k)
        _, which, counts = np.unique(-confidence[rows], return_inverse=True, return_counts=True)
        places[rows] = ((counts.cumsum() - counts / 2) / len(rows))[which]
    return places


def _estimate_weighted(
    labels: np.ndarray, predicted: np.ndarray, places: np.ndarray, weights: np.ndarray, classes: int
) -> tuple[float, np.ndarray | None]:
    """Return the noise rate and the transition matrix by weighted predictions, all of them sure."""
    if not weights.any():
        weights = np.ones_like(weights)
    wrong = (labels != predicted).astype(float)
    share, centre = np.average(wrong, weights=weights), np.average(places, weights=weights)
    spread = np.average((places - centre) ** 2, weights=weights)
    slope = np.average((places - centre) * wrong, weights=weights) / spread if spread > 0 else 0.0
    rate = float(np.clip(share - slope * centre, 0, share))  # surer predictions are not worse
    if classes > LARGEST_MATRIX:
        return rate, None
    counts = np.bincount(predicted * classes + labels, weights, minlength=classes**2).reshape(classes, classes)
    counts[counts.sum(1) == 0] = np.eye(classes)[counts.sum(1) == 0]  # never predicted: the label is right
    scale = rate / share if share > 0 else 0.0
    return rate, (1 - scale) * np.eye(classes) + scale * counts / counts.sum(1, keepdims=True)
