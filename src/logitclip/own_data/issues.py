"""Find wrong labels by the votes of learners that have not seen them."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from logitclip import files
from logitclip.noise.estimate import NoiseEstimate, estimate_noise
from logitclip.own_data.calibration import calibrate, find_temperature, given_the_label
from logitclip.own_data.combining import Votes
from logitclip.own_data.kind import Source
from logitclip.search import beats_chance
from logitclip.text import guard_formula

# Chosen on the sets of benchmarks/own_data_sets.py that are there to decide on:
DOUBT = 0.4, -0.5  # slope and offset from the log-odds by Bayes' rule to those that hold: votes are too sure
LEFT_OUT = 0.3775  # labels with a higher score are not learnt from: by Bayes' rule they are probably wrong
SURE = 0.7  # score from which the class that all learners agree on is suggested
ERRORS = 2.0  # standard errors that the range of the noise rate is wider than the shares it is made of


@dataclass(frozen=True, eq=False)
class Issues:
    """A score for every label, and the noise that follows from the same votes."""

    scores: np.ndarray  # [N] the probability that the label is wrong; NaN where it cannot be scored
    suggested: np.ndarray  # [N] class positions: the given class, unless all learners agree on another
    wrong: np.ndarray  # [N] bool: more likely wrong than right
    left_out: np.ndarray  # [N] bool: not learnt from
    noise: NoiseEstimate
    accuracy: float  # share of the noisy labels that the votes predict
    probabilities: (
        np.ndarray
    )  # [n, K] of the rows that are judged: calibrated, by learners that have not seen the label
    learnt: bool  # whether the votes beat guessing the largest class; else the noise is unknown, no label `wrong`

    @property
    def ranking(self) -> np.ndarray:
        """Rows from the most to the least suspicious, without those that cannot be scored."""
        order = np.argsort(-np.where(np.isnan(self.scores), -np.inf, self.scores), kind="stable")
        return order[: int((~np.isnan(self.scores)).sum())]


def judge_labels(votes: Votes, labels: np.ndarray, reviewed: np.ndarray | None = None) -> Issues:
    """Score labels by the votes of learners that have not seen them.

    The score is the probability that the label is wrong, by Bayes' rule from the calibrated vote and the estimated
    noise, made less sure: on sets with known wrong labels, Bayes' rule was too sure, because learners share errors.

    Args:
        votes: The votes on n rows.
        labels: Their noisy labels [n].
        reviewed: Which labels a person has confirmed or corrected, bool [n]: they calibrate the votes as true labels.

    Returns:
        The issues of these rows.
    """
    mixed, rows = votes.probabilities, np.arange(len(labels))
    logits = np.log(np.maximum(mixed, 1e-9))
    learnt = beats_majority(mixed.argmax(1), labels)
    noise = _within_range(estimate_noise(labels, mixed), votes, labels)
    matrix = noise.matrix if learnt else None
    if reviewed is not None and learnt and not reviewed.all():  # what is left has more noise than the whole
        matrix = estimate_noise(labels[~reviewed], mixed[~reviewed]).matrix
    probabilities = calibrate(logits, find_temperature(logits, labels, matrix, true=reviewed))
    posterior = given_the_label(probabilities, labels, matrix)
    scores = make_less_sure(1 - posterior[rows, labels])
    wrong, left_out = (scores > 0.5) & learnt, (scores > LEFT_OUT) & learnt
    sure = wrong & (scores >= SURE) & (votes.agreed >= 0)
    suggested = np.where(sure, votes.agreed, labels)
    accuracy = float((mixed.argmax(1) == labels).mean())
    found = Issues(scores, suggested, wrong, left_out, noise, accuracy, probabilities, learnt)
    return trust_reviewed(found, labels, reviewed)


def trust_reviewed(issues: Issues, labels: np.ndarray, reviewed: np.ndarray | None) -> Issues:
    """Take labels that a person has confirmed or corrected for true: they are not suspicious, and are learnt from."""
    if reviewed is None:
        return issues
    return replace(
        issues,
        scores=np.where(reviewed, 0.0, issues.scores),
        suggested=np.where(reviewed, labels, issues.suggested),
        wrong=issues.wrong & ~reviewed,
        left_out=issues.left_out & ~reviewed,
    )


def spread_over(issues: Issues, judged: np.ndarray, labels: np.ndarray) -> Issues:
    """Return the issues of all N rows from those of the rows at the positions `judged`; the others have no score."""
    scores, suggested = np.full(len(labels), np.nan), labels.copy()
    wrong, left_out = np.zeros(len(labels), bool), np.zeros(len(labels), bool)
    scores[judged], suggested[judged] = issues.scores, issues.suggested
    wrong[judged], left_out[judged] = issues.wrong, issues.left_out
    return replace(issues, scores=scores, suggested=suggested, wrong=wrong, left_out=left_out)


def make_less_sure(chances: np.ndarray) -> np.ndarray:
    """Return probabilities of being wrong that hold, from those by Bayes' rule.

    >>> make_less_sure(np.array([0.01, 0.5, 0.99])).round(2)
    array([0.09, 0.38, 0.79])
    """
    slope, offset = DOUBT
    chances = np.clip(chances, 1e-9, 1 - 1e-9)
    return 1 / (1 + np.exp(-offset - slope * np.log(chances / (1 - chances))))


def _within_range(noise: NoiseEstimate, votes: Votes, labels: np.ndarray) -> NoiseEstimate:
    """Return the estimate with a range of the rate that also holds where errors depend on the features.

    Labels that every learner contradicts are almost all wrong, and few wrong labels escape every learner: their shares
    are the ends of the range, widened by two standard errors.
    """
    against = float(((votes.agreed >= 0) & (votes.agreed != labels)).mean())
    error = [
        ERRORS * math.sqrt(max(share * (1 - share), 1 / len(labels)) / len(labels))
        for share in (against, votes.doubted)
    ]
    low, high = max(0.0, float(against) - error[0]), min(1.0, votes.doubted + error[1])
    return replace(noise, rate=float(np.clip(noise.rate, low, high)), rate_interval=(low, high), at_most=high)


def count_marked(wrong: int, judged: int, *, learnt: bool = True) -> str:
    """Say how many labels are marked wrong, and what that depends on."""
    if not learnt:
        return f"None of {judged:,} labels is marked wrong, because the noise is unknown."
    return (
        f"{wrong:,} of {judged:,} labels are marked wrong: those more likely wrong than right. If the true rate is "
        "higher, other wrong labels come next in the ranking."
    )


def write_issues(path: Path, issues: Issues, source: Source) -> None:
    """Write all scored rows as CSV, the most suspicious first."""
    text = io.StringIO()
    table = csv.writer(text)
    table.writerow(["row", "given", "suggested", "score", "wrong"])
    names, classes, labels = source.rows.names, source.class_names, source.labels
    for i in issues.ranking.tolist():
        cells = [names[i], classes[int(labels[i])], classes[int(issues.suggested[i])]]
        table.writerow([*map(guard_formula, cells), f"{issues.scores[i]:.4f}", str(bool(issues.wrong[i])).lower()])
    files.replace(path, text.getvalue().encode())


def beats_majority(predictions: np.ndarray, labels: np.ndarray) -> bool:
    """Return whether predictions beat the most frequent label by two standard errors."""
    share = np.unique(labels, return_counts=True)[1].max() / len(labels)
    return beats_chance((predictions == labels).mean(), share, len(labels))
