"""The numbers of a table: what a statistic of a run is, how to print it, and how to compare runs.

A statistic of one run is a field of its result or a function of it. Two compare runs, so they are computed with the
table: `gain`, the difference from the same run without a clip, and `rank`, the rank among the rows.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from logitclip.clip import CLIPS
from logitclip.runs.results import Result
from logitclip.text import explain_missing

LEVEL = 0.05  # of tests, and of intervals: 95 %
BINS = 15  # of the calibration error
RESAMPLES = 2000  # of the bootstrap


def _score_wrong_labels(result: Result, score: Callable[[np.ndarray, np.ndarray], float]) -> float | None:
    """Score the ranking of the training labels by their mean margin over the epochs, in %."""
    examples = result.examples if result.config["per_example"] else {}
    if "clean_label" not in examples:
        return None
    wrong = examples["label"] != examples["clean_label"]
    return 100 * score(-examples["mean_margin"], wrong) if 0 < wrong.sum() < len(wrong) else None


def _score_calibration(result: Result) -> float | None:
    if not result.config["per_example"]:
        return None
    found = result.test_predictions
    return 100 * calibration_error(found["confidence"], found["prediction"] == found["label"])


@dataclass(frozen=True)
class Measure:
    """A statistic: how to print it, which direction is better (1 up, -1 down, 0 neither), and how to compute it."""

    title: str
    better: int = 0
    decimals: int = 2
    compute: Callable[[Result], float | None] | None = None  # None: a field of the result, or a comparison of runs


MEASURES = {
    "last10_accuracy": Measure("test accuracy in %, mean of the last 10 epochs", 1),
    "best_accuracy": Measure("test accuracy in %, best epoch (chosen on the test set)", 1),
    "best_minus_last": Measure(
        "test accuracy of the best epoch minus that of the last 10, in points",
        -1,
        compute=lambda result: result.best_accuracy - result.last10_accuracy,
    ),
    "gain": Measure("gain in accuracy over the same run without a clip, in points", 1),
    "rank": Measure("rank among the rows by accuracy, 1 for the best", -1),
    "memorised": Measure("memorised wrong labels in %", -1),
    "recovered": Measure("recovered wrong labels in %", 1),
    "wrong_label_auroc": Measure(
        "AUROC in % of finding wrong labels by the mean margin",
        1,
        compute=lambda result: _score_wrong_labels(result, auroc),
    ),
    "wrong_label_ap": Measure(
        "average precision in % of finding wrong labels by the mean margin",
        1,
        compute=lambda result: _score_wrong_labels(result, average_precision),
    ),
    "calibration_error": Measure(
        f"expected calibration error in % on test examples, {BINS} bins", -1, compute=_score_calibration
    ),
    "noise_rate": Measure("wrong labels in %"),
    "temp": Measure("temp chosen", compute=lambda result: CLIPS.parse(result.clip)[1].get("temp")),
    "seconds": Measure("training time of a run in s", decimals=1),
}
PER_EXAMPLE = ("wrong_label_auroc", "wrong_label_ap", "calibration_error")  # need runs with `per_example`


def value_of(result: Result, statistic: str) -> float | None:
    """Return a statistic of one run; None if the run has none."""
    compute = MEASURES[statistic].compute
    return getattr(result, statistic) if compute is None else compute(result)


# -- formulas ----------------------------------------------------------------------------------------------------------


def auroc(scores: np.ndarray, positive: np.ndarray) -> float:
    """Return the probability that a positive example has a higher score than a negative one; ties count half.

    >>> auroc(np.array([3.0, 2.0, 2.0, 1.0]), np.array([True, True, False, False]))
    0.875
    """
    ranks = average_ranks(scores)
    count, others = int(positive.sum()), int((~positive).sum())
    return float((ranks[positive].sum() - count * (count + 1) / 2) / (count * others))


def average_precision(scores: np.ndarray, positive: np.ndarray) -> float:
    """Return the precision at each threshold, weighted by the recall it adds; equal scores enter together.

    >>> average_precision(np.array([3.0, 2.0, 1.0]), np.array([True, False, True]))
    0.8333333333333333
    """
    order = np.argsort(-scores, kind="stable")
    ends = np.flatnonzero(np.append(np.diff(scores[order]) != 0, True))
    found = np.cumsum(positive[order])[ends]
    precision, added = found / (ends + 1), np.diff(found, prepend=0)
    return float((precision * added).sum() / positive.sum())


def calibration_error(confidence: np.ndarray, correct: np.ndarray) -> float:
    """Return the mean difference of confidence and accuracy over bins of equal width, weighted by their sizes.

    >>> calibration_error(np.array([0.9, 0.9, 0.6, 0.6]), np.array([True, True, True, False]))
    0.1
    """
    place = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = np.bincount(place, correct - confidence.astype(np.float64), minlength=BINS)
    return float(f"{np.abs(gaps).sum() / len(confidence):.12g}")


def average_ranks(values: np.ndarray) -> np.ndarray:
    """Return ranks from 1 for the smallest value; equal values share the mean of their ranks.

    >>> average_ranks(np.array([10.0, 30.0, 10.0])).tolist()
    [1.5, 3.0, 1.5]
    """
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]


def half_width(values: Sequence[float]) -> float | None:
    """Return half of the width of Student's confidence interval of the mean; None for fewer than two values.

    >>> round(half_width([1.0, 2.0, 3.0]), 3)
    2.484
    """
    if len(values) < 2:
        return None
    error = statistics.stdev(values) / math.sqrt(len(values))
    return float(_scipy_stats().t.ppf(1 - LEVEL / 2, len(values) - 1)) * error


def bootstrap_interval(values: np.ndarray) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the mean of values [N], from 2,000 fixed resamples.

    >>> bootstrap_interval(np.array([1.0, 2.0, 3.0]))
    (1.0, 3.0)
    """
    resampled = np.random.default_rng(0).choice(values, (RESAMPLES, len(values))).mean(1)
    low, high = np.quantile(resampled, [LEVEL / 2, 1 - LEVEL / 2]).tolist()
    return low, high


def critical_difference(methods: int, blocks: int) -> float:
    """Return Nemenyi's critical difference of mean ranks of `methods` on `blocks` datasets (Demsar, JMLR 2006).

    >>> round(critical_difference(4, 14), 2)
    1.25
    """
    studentized = _scipy_stats().studentized_range.ppf(1 - LEVEL, methods, math.inf)
    return float(studentized) / math.sqrt(2) * math.sqrt(methods * (methods + 1) / (6 * blocks))


def _scipy_stats() -> ModuleType:
    with explain_missing("Intervals and critical differences need SciPy", "report"):
        from scipy import stats
    return stats
