"""Find wrong labels: by out-of-fold predictions for every row, or by the margins of one run."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from logitclip import data, files
from logitclip.noise.estimate import NoiseEstimate, estimate_noise
from logitclip.own_data.calibration import calibrated, find_temperature, given_the_label
from logitclip.own_data.model import logits_of
from logitclip.runs.config import RunConfig
from logitclip.runs.results import Result, require_result
from logitclip.runs.train import rebuild_network
from logitclip.search import beats_chance
from logitclip.studies import executors, tuning
from logitclip.text import guard_formula


@dataclass(frozen=True, eq=False)
class Issues:
    """A score for every label, and the noise that follows from the same predictions."""

    way: str  # "out of fold" or "one run"
    scores: np.ndarray  # [N]; NaN where a label cannot be scored
    suggested: np.ndarray  # [N] class positions: for wrong labels the best other class, else the prediction
    wrong: np.ndarray  # [N] bool: more likely wrong than right; in one run, as many as the noise rate says
    noise: NoiseEstimate
    learnt: bool  # whether the predictions beat guessing the largest class; else the noise is unknown, no label `wrong`
    probabilities: np.ndarray  # [N, K] by models that were not trained on the row; NaN where there is none

    @property
    def matrix(self) -> np.ndarray | None:
        """The transition matrix [K, K]; None if it is unknown."""
        return self.noise.matrix if self.learnt else None

    @property
    def ranking(self) -> np.ndarray:
        """Rows from the most to the least suspicious, without those that cannot be scored."""
        order = np.argsort(-np.where(np.isnan(self.scores), -np.inf, self.scores), kind="stable")
        return order[: int((~np.isnan(self.scores)).sum())]


def out_of_fold(config: RunConfig, labels: np.ndarray, log_prior: np.ndarray, folds: int, **where: Any) -> Issues:
    """Score every label with a model that was not trained on it.

    The rows are divided into `folds` parts; an ordinary run on the other parts predicts each. The score of a label is
    the probability that it is wrong, by Bayes' rule from the calibrated prediction and the estimated noise.

    Args:
        config: The run; its dataset spec gets other values of `test` and `fold`.
        labels: Noisy labels [N].
        log_prior: Added to the calibrated logits [K], see `find_temperature`.
        folds: Number of folds.
        where: executor, jobs and listener of `executors.execute`.

    Raises:
        ValueError: If a run fails.
    """
    logits = fold_logits(config, len(labels), len(log_prior), folds, **where)
    return judged(logits, labels, log_prior, "out of fold")


def fold_logits(config: RunConfig, rows: int, classes: int, folds: int, **where: Any) -> np.ndarray:
    """Return out-of-fold logits [N, K]: each row from a run on the other folds; NaN for rows that are never held out.

    The arguments are those of `out_of_fold`, with the number of rows N.
    """
    parts = fold_configs(config, folds)
    executors.execute(parts, **where)
    logits = np.full((rows, classes), np.nan)
    for part in parts:
        held_out, found = held_out_logits(require_result(part), part)
        logits[held_out] = found
    return logits


def fold_configs(config: RunConfig, folds: int) -> list[RunConfig]:
    """Return the runs of cross-validation: each holds out a different part of the rows."""
    share = tuning.with_value(config, "data.test", 1 / folds)
    return [tuning.with_value(share, "data.fold", fold) for fold in range(folds)]


def judged(logits: np.ndarray, labels: np.ndarray, log_prior: np.ndarray, way: str) -> Issues:
    """Score labels by the logits [N, K] of models that were not trained on them; rows of NaN are left out."""
    known = ~np.isnan(logits).any(1)
    given = labels[known]
    probabilities, noise, learnt = _explained(logits[known], given, log_prior)
    posterior = given_the_label(probabilities, given, noise.matrix if learnt else None)
    scores, suggested = np.full(len(labels), np.nan), labels.copy()
    scores[known] = 1 - posterior[np.arange(len(given)), given]
    wrong = (scores > 0.5) & learnt
    suggested[known] = np.where(wrong[known], _without(posterior, given).argmax(1), probabilities.argmax(1))
    every = np.full((len(labels), logits.shape[1]), np.nan)
    every[known] = probabilities
    return Issues(way, scores, suggested, wrong, noise, learnt, every)


def _explained(logits: np.ndarray, labels: np.ndarray, log_prior: np.ndarray) -> tuple[np.ndarray, NoiseEstimate, bool]:
    """Return the calibrated probabilities [N, K], the noise, and whether the network has learnt anything.

    A network that has not contradicts every label except those of the largest class. The noise is unknown then, and
    the probabilities are those of the given labels.
    """

    def by(matrix: np.ndarray | None) -> np.ndarray:
        return calibrated(logits, find_temperature(logits, labels, matrix, log_prior), log_prior)

    unexplained = by(None)
    noise = estimate_noise(labels, unexplained)
    probabilities = by(noise.matrix)
    learnt = _has_learnt(probabilities.argmax(1), labels)
    return probabilities if learnt else unexplained, noise, learnt


def one_run(result: Result, config: RunConfig, labels: np.ndarray, log_prior: np.ndarray) -> tuple[Issues, np.ndarray]:
    """Score the labels with a single training run.

    A clipped network learns wrong labels late or never. A training row is ranked by its margin, the log-probability of
    its label minus that of the best other class, averaged over the epochs (the area under the margin of Pleiss et al.,
    2020); a held-out row by the margin of the final network. The score is the share of the rows of the same part with a
    larger margin: 1 is the most suspicious.

    Returns:
        The issues, and the logits of the held-out rows as [N, K] with NaN elsewhere.
    """
    dataset = data.load(config.data, config.root)
    trained = result.examples
    rows, logits = held_out_logits(result, config, dataset)
    given = labels[rows]
    probabilities, noise, learnt = _explained(logits, given, log_prior)
    scores, other, predicted = np.full(len(labels), np.nan), labels.copy(), labels.copy()
    scores[trained["row"]] = _quantiles(-trained["mean_margin"])
    scores[rows] = _quantiles(_without(logits, given).max(1) - logits[np.arange(len(rows)), given])
    other[trained["row"]], other[rows] = trained["other"], _without(probabilities, given).argmax(1)
    predicted[trained["row"]], predicted[rows] = trained["prediction"], probabilities.argmax(1)
    every = np.full((len(labels), logits.shape[1]), np.nan)
    every[rows] = logits
    chances = np.full_like(every, np.nan)
    chances[rows] = probabilities
    wrong = (scores > 1 - noise.rate) & learnt
    return Issues("one run", scores, np.where(wrong, other, predicted), wrong, noise, learnt, chances), every


def held_out_logits(result: Result, config: RunConfig, dataset: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """Return the held-out rows of a run that can be read, [n], and its final network's logits for them, [n, K]."""
    config = config.resolved()
    dataset = data.load(config.data, config.root) if dataset is None else dataset
    network, view = rebuild_network(result, dataset)
    logits = logits_of(network, dataset.test.x, view).double().numpy()
    known = ~np.isnan(logits).any(1)
    return dataset.test.rows.numpy()[known], logits[known]


def _without(values: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Return a copy of values [N, K] with -inf in one class of each row."""
    rest = values.copy()
    rest[np.arange(len(classes)), classes] = -np.inf
    return rest


def _quantiles(values: np.ndarray) -> np.ndarray:
    """Return the share of values that are smaller, from 0 to 1."""
    ranks = np.empty(len(values))
    ranks[np.argsort(values, kind="stable")] = np.arange(len(values))
    return ranks / max(1, len(values) - 1)


def marked(wrong: int, judged: int, way: str, *, learnt: bool = True) -> str:
    """Say how many labels are marked wrong, and what that depends on."""
    if not learnt:
        return f"None of {judged:,} labels is marked wrong, because the noise is unknown."
    rule = "those more likely wrong than right" if way == "out of fold" else "as many as are wrong"
    return (
        f"{wrong:,} of {judged:,} labels are marked wrong: {rule} at the estimated noise rate. If the true rate is "
        "higher, other wrong labels come next in the ranking."
    )


def write(path: Path, issues: Issues, names: Sequence[str], class_names: Sequence[str], labels: np.ndarray) -> None:
    """Write all scored rows as CSV, the most suspicious first."""
    text = io.StringIO()
    table = csv.writer(text)
    table.writerow(["row", "given", "suggested", "score", "wrong"])
    for i in issues.ranking.tolist():
        cells = [names[i], class_names[int(labels[i])], class_names[int(issues.suggested[i])]]
        table.writerow([*map(guard_formula, cells), f"{issues.scores[i]:.4f}", str(bool(issues.wrong[i])).lower()])
    files.write(path, text.getvalue().encode())


def _has_learnt(predictions: np.ndarray, labels: np.ndarray) -> bool:
    """Return whether predictions beat the most frequent label by two standard errors."""
    share = np.unique(labels, return_counts=True)[1].max() / len(labels)
    return beats_chance((predictions == labels).mean(), share, len(labels))
