"""Find wrong labels by the votes of learners that have not seen them."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from logitclip import files
from logitclip.noise.estimate import NoiseEstimate, estimate_noise
from logitclip.own_data.calibration import calibrate, find_temperature, given_the_label
from logitclip.own_data.combining import Votes
from logitclip.own_data.kind import Source
from logitclip.search import agree_beyond_chance
from logitclip.text import guard_formula

# Chosen on the sets of benchmarks/own_data_sets.py that are there to decide on, by benchmarks/own_data_decide.py:
DOUBT = 1.55, 1.29, -0.44  # weights of the odds by Bayes' rule and of agreement, and the offset, see `make_less_sure`
ODDS = 4.0  # log-odds by Bayes' rule from which more say little more
SURE = 0.9  # score from which the class that all learners agree on is suggested,
LEAST_AGREEMENT = 0.6  # unless the votes agree with fewer labels
UNCERTAIN = "?"  # what people see where a label is marked wrong and no other class is certain enough
LONGEST = 300  # characters of the values of a row in the list and on the page
WIDER_BY = 2.0  # standard errors that the range of the noise rate is wider than the shares it is made of


@dataclass(frozen=True, eq=False)
class Issues:
    """A score for every label, and the noise that follows from the same votes."""

    scores: np.ndarray  # [N] the probability that the label is wrong; NaN where it cannot be scored
    suggested: np.ndarray  # [N] class positions: the given class, unless all learners agree on another
    wrong: np.ndarray  # [N] bool: more likely wrong than right
    noise: NoiseEstimate
    true_accuracy: float  # estimated share of the true classes that the votes predict
    probabilities: np.ndarray  # [n, K] of the judged rows: calibrated, by learners that have not seen the label
    learnt: bool  # whether held-out votes agree with labels beyond chance; else the noise is unknown, no label `wrong`

    @property
    def ranking(self) -> np.ndarray:
        """Rows from the most to the least suspicious, without those that cannot be scored."""
        order = np.argsort(-np.where(np.isnan(self.scores), -np.inf, self.scores), kind="stable")
        return order[: int((~np.isnan(self.scores)).sum())]


def judge_labels(votes: Votes, labels: np.ndarray, reviewed: np.ndarray | None = None) -> Issues:
    """Score labels by the votes of learners that have not seen them.

    The score is the probability that the label is wrong, by Bayes' rule from the calibrated vote and the estimated
    noise, and from whether all learners agree, made less sure: on sets with known wrong labels, Bayes' rule was too
    sure, because learners share errors.

    Args:
        votes: The votes on n rows.
        labels: Their noisy labels [n].
        reviewed: Which labels a person has confirmed or corrected, bool [n]: they calibrate the votes as true labels.
    """
    mixed, rows = votes.probabilities, np.arange(len(labels))
    logits = np.log(np.maximum(mixed, 1e-9))
    learnt = agree_beyond_chance(votes.held_out, labels)
    noise = _within_range(estimate_noise(labels, mixed), votes, labels)
    matrix = noise.matrix if learnt else None
    if reviewed is not None and learnt and not reviewed.all():  # what is left has more noise than the whole
        matrix = estimate_noise(labels[~reviewed], mixed[~reviewed]).matrix
    probabilities = calibrate(logits, find_temperature(logits, labels, matrix, true=reviewed))
    posterior = given_the_label(probabilities, labels, matrix)
    agreement = np.where(votes.agreed < 0, 0, np.where(votes.agreed == labels, -1, 1))
    scores = make_less_sure(1 - posterior[rows, labels], agreement)
    wrong = (scores > 0.5) & learnt
    trusted = learnt and (mixed.argmax(1) == labels).mean() >= LEAST_AGREEMENT
    sure = trusted & (scores >= SURE) & (agreement == 1)
    suggested = np.where(sure, votes.agreed, labels)
    true_accuracy = float(posterior[rows, mixed.argmax(1)].mean())
    found = Issues(scores, suggested, wrong, noise, true_accuracy, probabilities, learnt)
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
    )


def spread_over(issues: Issues, judged: np.ndarray, labels: np.ndarray) -> Issues:
    """Return the issues of all N rows from those of the rows at the positions `judged`; the others have no score."""
    scores, suggested, wrong = np.full(len(labels), np.nan), labels.copy(), np.zeros(len(labels), bool)
    scores[judged], suggested[judged], wrong[judged] = issues.scores, issues.suggested, issues.wrong
    return replace(issues, scores=scores, suggested=suggested, wrong=wrong)


def make_less_sure(chances: np.ndarray, agreement: np.ndarray) -> np.ndarray:
    """Return probabilities of being wrong that hold, from those by Bayes' rule and the agreement of the learners.

    The log-odds are a weighted sum of the agreement and of the log-odds by Bayes' rule, which count less the larger
    they are.

    Args:
        chances: Probabilities by Bayes' rule [n].
        agreement: 1 if all learners agree on another class, -1 if they agree with the label, 0 if they differ, [n].

    >>> make_less_sure(np.array([0.001, 0.5, 0.999]), np.array([-1, 0, 1])).round(2)
    array([0.04, 0.39, 0.91])
    """
    by_odds, by_agreement, offset = DOUBT
    chances = np.clip(chances, 1e-9, 1 - 1e-9)
    odds = np.tanh(np.log(chances / (1 - chances)) / ODDS)
    return 1 / (1 + np.exp(-(by_odds * odds + by_agreement * agreement + offset)))


def _within_range(noise: NoiseEstimate, votes: Votes, labels: np.ndarray) -> NoiseEstimate:
    """Return the estimate with a range of the rate that also holds where errors depend on the features.

    Labels that every learner contradicts are almost all wrong, and few wrong labels escape every learner: their shares
    are the ends of the range, widened by two standard errors.
    """
    against = float(((votes.agreed >= 0) & (votes.agreed != labels)).mean())
    error = [
        WIDER_BY * math.sqrt(max(share * (1 - share), 1 / len(labels)) / len(labels))
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


def find_suggestion(issues: Issues, i: int, source: Source) -> str:
    """Return the class suggested for a row: empty if the label is marked wrong and no other class is certain enough."""
    none = issues.wrong[i] and issues.suggested[i] == source.labels[i]
    return "" if none else source.class_names[int(issues.suggested[i])]


def show_values(source: Source, i: int, names: Sequence[str] = ()) -> str:
    """Return the columns `names` of a row, or the text of one, on one line that is not too long."""
    text = " ".join(source.kind.show(i, names).split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def write_issues(path: Path, issues: Issues, source: Source, mattered: Mapping[int, Sequence[str]]) -> None:
    """Write all scored rows as CSV, the most suspicious first, those in `mattered` with their values or text."""
    text = io.StringIO()
    table = csv.writer(text)
    table.writerow(["row", "given", "suggested", "score", "wrong", "values"])
    names, classes, labels = source.rows.names, source.class_names, source.labels
    for i in issues.ranking.tolist():
        cells = [names[i], classes[int(labels[i])], find_suggestion(issues, i, source)]
        values = guard_formula(show_values(source, i, mattered[i])) if i in mattered else ""
        wrong = str(bool(issues.wrong[i])).lower()
        table.writerow([*map(guard_formula, cells), f"{issues.scores[i]:.4f}", wrong, values])
    files.replace(path, text.getvalue().encode())
