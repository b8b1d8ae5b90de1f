"""Own data: the choices inside `fit` and `issues`, on the sets that are there to decide on.

    python benchmarks/own_data_decide.py --real FOLDER [--seeds 1] [--work build/own_data]

For each set of DECIDE in own_data_sets.py, without pictures, every learner votes and learns again once; what it says is
kept in the work folder. Then every choice is made on these arrays: how votes are weighted, the numbers that turn votes
into a score (`DOUBT`), the score from which a class is suggested (`SURE`), the share below which a learner is left out
(`LEAST_SHARE`) and the temperature of the model. results/own_data_decide.csv has a row for each choice and measure.
"""

from __future__ import annotations

import argparse
import csv
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from own_data_sets import DECIDE, FASHION, load, noises_of

from logitclip.own_data import combining, issues
from logitclip.own_data.calibration import calibrate, calibration_error, match_confidence
from logitclip.own_data.combining import Vote, adjust_for_classes, combine
from logitclip.own_data.folds import FOLDS, make_folds
from logitclip.own_data.issues import judge_labels
from logitclip.own_data.learners import Logistic
from logitclip.own_data.network import Network
from logitclip.own_data.planning import HALVES, make_plan
from logitclip.own_data.source import Options, look

ROOT = Path(__file__).parents[1]
LEARNERS = ("network", "forest", "logistic")
STEEPNESS = {"equal votes": 0.0, "exp(-z/2)": 0.5, "exp(-z)": 1.0, "exp(-2z)": 2.0}
Arrays = dict[str, Any]
Rows = list[tuple[str, str, str, float]]


@dataclass(frozen=True)
class Case:
    """A set with noise: what the learners say of it."""

    name: str
    arrays: Arrays

    @property
    def votes(self) -> dict[str, Vote]:
        a = self.arrays
        names = (*LEARNERS, combining.ADVISER)
        return {name: Vote(a[f"{name} votes"], a["seen"] if name == "network" else None) for name in names}

    @property
    def wrong(self) -> np.ndarray:
        return self.arrays["labels"] != self.arrays["true"]


def compute(name: str, noise: str, seed: int, args: argparse.Namespace) -> Arrays:
    """Let every learner vote, and learn again without the labels that are marked."""
    task = load(name, noise, args, seed)
    source = look(task.train, "label", Options(text=task.text))
    plan, test = make_plan(source, seed=seed), source.kind.read(task.test)
    place = {name: i for i, name in enumerate(source.class_names)}
    found: Arrays = {
        "labels": source.labels,
        "true": np.array([place.get(str(label), -1) for label in task.true]),
        "test": np.array([place.get(str(label), -1) for label in task.test["label"]]),
    }
    for learner in plan.learners:
        folds = make_folds(source, HALVES if isinstance(learner, Network) else FOLDS, seed)
        found[f"{learner.name} votes"] = learner.out_of_fold(source.rows, source.labels, None, folds, seed)
        if isinstance(learner, Network):
            found["seen"] = learner.votes_on_seen
    kept = np.flatnonzero(~judge_labels(combine(Case(name, found).votes, source.labels), source.labels).wrong)
    for learner in plan.learners:
        if learner.name == combining.ADVISER:
            continue
        if isinstance(learner, Logistic):
            learner.strength = min(3.0, 10 * (learner.strength or 0.03))
        learner.fit(source.rows.take(kept), source.labels[kept], None, seed)
        found[f"{learner.name} test"] = learner.predict_proba(test)
        found[f"{learner.name} train"] = learner.predict_proba(source.rows)
    return found


def read_cases(args: argparse.Namespace) -> Iterator[Case]:
    for seed in range(args.seeds):
        for name in DECIDE:
            for noise in () if name.startswith("fashion") else noises_of(name):
                file = args.work / "votes" / f"{name}-{noise}-{seed}.npz"
                if not file.exists():
                    print(f"{time.strftime('%H:%M:%S')} {file.stem}", flush=True)
                    file.parent.mkdir(parents=True, exist_ok=True)
                    np.savez(file, **compute(name, noise, seed, args))
                with np.load(file) as kept:
                    yield Case(file.stem, dict(kept))


# -- choices -----------------------------------------------------------------------------------------------------------


def weigh_votes(cases: list[Case]) -> Rows:
    """Compare weights exp(-steepness * z) of learners that are z paired standard errors behind the best."""
    from sklearn.metrics import average_precision_score

    rows: Rows = []
    for title, steepness in STEEPNESS.items():
        precision, accuracy = [], []
        for case in cases:
            labels, votes = case.arrays["labels"], case.votes
            right = {name: vote.held_out.argmax(1) == labels for name, vote in votes.items()}
            weights = {name: weight**steepness for name, weight in combining.weigh(right).items()}
            each = {n: v.held_out if v.seen is None else (v.held_out + v.seen) / 2 for n, v in votes.items()}
            mixed = sum((weights[n] / sum(weights.values()) * one for n, one in each.items()), np.zeros(1))
            together = replace(combine(votes, labels), probabilities=adjust_for_classes(mixed, labels))
            accuracy.append((together.probabilities.argmax(1) == case.arrays["true"]).mean())
            precision.append(average_precision_score(case.wrong, judge_labels(together, labels).scores))
        rows.append(("weights of votes", title, "accuracy on true labels", 100 * float(np.mean(accuracy))))
        rows.append(("weights of votes", title, "average precision", 100 * float(np.mean(precision))))
    return rows


def fit_doubt(cases: list[Case]) -> Rows:
    """Fit the numbers of `make_less_sure`, and look at the reliability of the scores in use."""
    from sklearn.linear_model import LogisticRegression

    features, wrong, weight, scores = [], [], [], []
    for case in cases:
        labels = case.arrays["labels"]
        together = combine(case.votes, labels)
        found = judge_labels(together, labels)
        if not found.learnt:
            continue
        agreement = np.where(together.agreed < 0, 0, np.where(together.agreed == labels, -1, 1))
        by_odds, by_agreement, offset = issues.DOUBT  # back from the scores to the odds
        odds = (np.log(found.scores / (1 - found.scores)) - by_agreement * agreement - offset) / by_odds
        features.append(np.stack([odds, agreement], 1))
        wrong.append(case.wrong)
        weight.append(np.full(len(labels), 1 / len(labels)))
        scores.append(found.scores)
    y, score = np.concatenate(wrong), np.concatenate(scores)
    model = LogisticRegression(C=1e6).fit(np.concatenate(features), y, np.concatenate(weight))
    numbers = dict(zip(("odds", "agreement"), model.coef_[0], strict=True)) | {"offset": model.intercept_[0]}
    rows: Rows = [("DOUBT", name, "fitted", float(value)) for name, value in numbers.items()]
    for low in np.arange(10) / 10:
        inside = (score >= low) & (score < low + 0.1)
        if inside.any():
            rows.append(("DOUBT", f"score {low:.1f} to {low + 0.1:.1f}", "% wrong", 100 * float(y[inside].mean())))
    return rows


def follow_suggestions(cases: list[Case]) -> Rows:
    """Compare scores from which a class is suggested: by how many points the noise falls."""
    rows: Rows = []
    before = issues.SURE
    for sure in (0.6, 0.7, 0.8, 0.85, 0.9):
        issues.SURE = sure
        removed = []
        for case in cases:
            labels, true = case.arrays["labels"], case.arrays["true"]
            found = judge_labels(combine(case.votes, labels), labels)
            removed.append(100 * ((labels != true).mean() - (found.suggested != true).mean()))
        rows.append(("SURE", f"{sure:g}", "points removed", float(np.mean(removed))))
        rows.append(("SURE", f"{sure:g}", "points removed at worst", float(np.min(removed))))
    issues.SURE = before
    return rows


def share_and_calibrate(cases: list[Case]) -> Rows:
    """Compare the share below which a learner is left out, and the model with and without its temperature."""
    rows: Rows = []
    before = combining.LEAST_SHARE
    for least in (0.0, 0.1, 0.2, 0.25, 0.33):
        combining.LEAST_SHARE = least
        accuracy, plain, matched, used = [], [], [], []
        for case in cases:
            a = case.arrays
            together = combine(case.votes, a["labels"])
            test, train = (
                sum((together.weights[name] * a[f"{name} {part}"] for name in LEARNERS), np.zeros(1))
                for part in ("test", "train")
            )
            found = judge_labels(together, a["labels"])
            logits, seen = (np.log(np.maximum(one, 1e-12)) for one in (test, train))
            temperature = match_confidence(seen, found.true_accuracy) if found.learnt else 1.0
            accuracy.append((test.argmax(1) == a["test"]).mean())
            plain.append(calibration_error(test, a["test"]))
            matched.append(calibration_error(calibrate(logits, temperature), a["test"]))
            used.append(together.weights["network"] > 0)
        measures = {"accuracy": accuracy, "calibration error without a temperature": plain}
        measures |= {"calibration error": matched, "sets with the network": used}
        rows += [("LEAST_SHARE", f"{least:g}", name, 100 * float(np.mean(values))) for name, values in measures.items()]
    combining.LEAST_SHARE = before
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--real", type=Path, required=True, help="folder with the sets whose wrong labels are real")
    parser.add_argument("--fashion", type=Path, default=FASHION)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("build/own_data"))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    cases = list(read_cases(args))
    rows = [
        row for decide in (weigh_votes, fit_doubt, follow_suggestions, share_and_calibrate) for row in decide(cases)
    ]
    with (ROOT / "results" / "own_data_decide.csv").open("w", newline="", encoding="utf-8") as stream:
        table = csv.writer(stream)
        table.writerow(["decision", "choice", "measure", "value", "cases"])
        table.writerows([*row[:3], f"{row[3]:.2f}", len(cases)] for row in rows)


if __name__ == "__main__":
    main()
