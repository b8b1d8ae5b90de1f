"""Own data: the choices inside `fit` and `issues`, on the sets that are there to decide on.

    python benchmarks/own_data_decide.py --real FOLDER [--seeds 1] [--work build/own_data]

For each set of DECIDE in own_data_sets.py, without pictures, every learner votes and learns again; what it says is
kept in the work folder. Then every choice is made on these arrays: how votes are weighted, when they count as learnt,
the numbers that turn votes into a score (`DOUBT`), when a class is suggested (`SURE`, `LEAST_AGREEMENT`), how much a
row counts when it is learnt again, the share below which a learner is left out (`LEAST_SHARE`), the temperature of the
model, width and epochs of the network, and when labels look like those of rules. results/own_data_decide.csv has a row
for each choice and measure. Rates of all made noise are 30 %, so nothing that depends on the rate was fitted here.
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
from own_data_sets import DECIDE, FASHION, REAL_TEXTS, load, noises_of

from logitclip.own_data import combining, issues, rules
from logitclip.own_data.calibration import calibrate, match_confidence
from logitclip.own_data.combining import Vote, adjust_for_classes, combine
from logitclip.own_data.folds import FOLDS, make_folds
from logitclip.own_data.issues import judge_labels
from logitclip.own_data.kind import Source
from logitclip.own_data.network import Network
from logitclip.own_data.planning import HALVES, make_plan
from logitclip.own_data.source import Options, look
from logitclip.search import beats_chance
from logitclip.studies.measures import calibration_error

ROOT = Path(__file__).parents[1]
LEARNERS = ("network", "forest", "logistic")
AGAIN = ("all labels alike", "marked labels left out", "weight 1 - score", "weight (1 - score)^2")  # the last is in use
NETWORKS = {
    "width 64": {"model": "mlp:width=64,depth=2"},
    "width 256": {"model": "mlp:width=256,depth=2"},
    "15 epochs": {"epochs": 15},
    "25 epochs": {"epochs": 25},
}
LEAVES = (8, 16, 32)
BY_RULES = ("agnews", "trec")  # the sets whose labels rules made
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
        return {name: Vote(a[f"{name} votes"], a.get(f"{name} votes seen")) for name in names}

    @property
    def wrong(self) -> np.ndarray:
        return self.arrays["labels"] != self.arrays["true"]


def compute(name: str, noise: str, seed: int, args: argparse.Namespace) -> Arrays:
    """Let every learner vote and learn again, in every way that is compared."""
    task = load(name, noise, args, seed)
    source = look(task.train, "label", Options(text=task.text))
    plan, test = make_plan(source, seed=seed), source.kind.read_beside(task.test, None)
    place = {name: i for i, name in enumerate(source.class_names)}
    found: Arrays = {
        "labels": source.labels,
        "true": np.array([place.get(str(label), -1) for label in task.true]),
        "test": np.array([place.get(str(label), -1) for label in task.test["label"]]),
    }
    voted: dict[str, Arrays] = {}
    for learner in plan.learners:
        if isinstance(learner, Network):
            found |= let_network_vote(learner, source, seed, "network votes")
        else:
            folds = make_folds(source, FOLDS, seed)
            voted[learner.name] = learner.out_of_fold(source.rows, source.labels, None, folds, seed)
            found[f"{learner.name} votes"] = voted[learner.name]["held_out"]
    judged = judge_labels(combine(Case(name, found).votes, source.labels), source.labels)
    right = 1 - judged.scores if judged.learnt else np.ones(len(source.labels))
    for i, weight in enumerate((np.ones(len(right)), 1.0 - judged.wrong, right, right**2)):
        kept = np.flatnonzero(weight)
        part, chosen = source.rows.take(kept), None if np.ptp(weight[kept]) == 0 else weight[kept] / weight[kept].mean()
        for learner in plan.learners:
            if learner.name != combining.ADVISER:
                again = learner.to_learn_again(voted.get(learner.name, {}))
                again.fit(part, source.labels[kept], chosen, seed)
                found[f"{learner.name} test {i}"] = again.predict_proba(test)
                found[f"{learner.name} train {i}"] = again.predict_proba(source.rows)
    for leaves in LEAVES:
        rules.RULES = leaves
        found[f"rules {leaves}"] = rules.check_by_rules(source, seed)
    network = plan.network
    assert network is not None
    for title, settings in ({} if name in REAL_TEXTS else NETWORKS).items():
        tried = Network(network.classes, replace(network.options, **settings), network.mean, network.std)
        found |= let_network_vote(tried, source, seed, title)
    return found


def let_network_vote(network: Network, source: Source, seed: int, title: str) -> Arrays:
    started = time.process_time()
    votes = network.out_of_fold(source.rows, source.labels, None, make_folds(source, HALVES, seed), seed)
    seconds = time.process_time() - started
    return {title: votes["held_out"], f"{title} seen": votes["seen"], f"{title} seconds": np.array(seconds)}


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
    """Compare when a class is suggested: by how many points the noise falls."""
    rows: Rows = []
    before = issues.SURE, issues.LEAST_AGREEMENT
    for sure in (0.8, 0.85, 0.9):
        for least in (0.0, 0.5, 0.55, 0.6, 0.65):
            issues.SURE, issues.LEAST_AGREEMENT = sure, least
            removed = []
            for case in cases:
                labels, true = case.arrays["labels"], case.arrays["true"]
                found = judge_labels(combine(case.votes, labels), labels)
                removed.append(100 * ((labels != true).mean() - (found.suggested != true).mean()))
            choice = f"SURE {sure:g}, LEAST_AGREEMENT {least:g}"
            rows.append(("suggested", choice, "points removed", float(np.mean(removed))))
            rows.append(("suggested", choice, "points removed at worst", float(np.min(removed))))
    issues.SURE, issues.LEAST_AGREEMENT = before
    return rows


def mix(case: Case, part: str, again: int, weights: dict[str, float]) -> np.ndarray:
    """Return what the model of all learners says of the test or training rows."""
    return sum((weights[name] * case.arrays[f"{name} {part} {again}"] for name in LEARNERS), np.zeros(1))


def learn_again(cases: list[Case]) -> Rows:
    """Compare how much labels count when learners learn again, when a learner is left out, and the temperature."""
    rows: Rows = []
    before = combining.LEAST_SHARE
    for i, again in enumerate(AGAIN):
        for least in (before,) if i < len(AGAIN) - 1 else (0.0, 0.1, 0.2, 0.25, 0.33):
            combining.LEAST_SHARE = least
            found = np.array([_measure_model(case, i) for case in cases])
            names = ("accuracy", "calibration error without a temperature", "calibration error", "% with the network")
            choice = f"{again}, LEAST_SHARE {least:g}"
            rows += [("learning again", choice, n, 100 * float(v)) for n, v in zip(names, found.mean(0), strict=True)]
    combining.LEAST_SHARE = before
    return rows


def _measure_model(case: Case, again: int) -> tuple[float, float, float, float]:
    labels, truth = case.arrays["labels"], case.arrays["test"]
    together = combine(case.votes, labels)
    judged = judge_labels(together, labels)
    test, train = (mix(case, part, again, together.weights) for part in ("test", "train"))
    logits, seen = (np.log(np.maximum(one, 1e-12)) for one in (test, train))
    temperature = match_confidence(seen, judged.true_accuracy) if judged.learnt else 1.0
    plain, calibrated = (
        calibration_error(one.max(1), one.argmax(1) == truth) for one in (test, calibrate(logits, temperature))
    )
    return float((test.argmax(1) == truth).mean()), plain, calibrated, float(together.weights["network"] > 0)


def notice_learning(cases: list[Case]) -> Rows:
    """Compare two tests of whether the votes have learnt: that they beat the largest class, or chance."""
    found: dict[str, list[tuple[bool, bool]]] = {"the largest class": [], "chance": []}
    for case in cases:
        labels = case.arrays["labels"]
        together = combine(case.votes, labels)
        right = (together.probabilities.argmax(1) == labels).mean()
        share = np.bincount(labels).max() / len(labels)
        learnt = {
            "the largest class": beats_chance(right, share, len(labels)),
            "chance": judge_labels(together, labels).learnt,
        }
        for title, passed in learnt.items():
            model = mix(case, "test", len(AGAIN) - 1 if passed else 0, together.weights)
            found[title].append((passed, (model.argmax(1) == case.arrays["test"]).mean()))
    names = ("% learnt", "accuracy")
    return [
        ("learnt", f"beats {title}", name, 100 * float(value))
        for title, values in found.items()
        for name, value in zip(names, np.mean(values, 0), strict=True)
    ]


def choose_network(cases: list[Case]) -> Rows:
    """Compare widths and epochs of the network that votes on tables."""
    from sklearn.metrics import average_precision_score

    rows: Rows = []
    tables = [case for case in cases if next(iter(NETWORKS)) in case.arrays]
    for title in ("network votes", *NETWORKS):
        found = []
        for case in tables:
            a = case.arrays
            votes = {**case.votes, "network": Vote(a[title], a[f"{title} seen"])}
            scores = judge_labels(combine(votes, a["labels"]), a["labels"]).scores
            precision = average_precision_score(case.wrong, scores)
            found.append((100 * (a[title].argmax(1) == a["true"]).mean(), 100 * precision, a[f"{title} seconds"]))
        names = ("accuracy of its votes on true labels", "average precision of all votes", "CPU seconds")
        choice = "width 128, 20 epochs" if title == "network votes" else title
        rows += [("network", choice, n, float(v)) for n, v in zip(names, np.mean(found, 0), strict=True)]
    return rows


def notice_rules(cases: list[Case]) -> Rows:
    """Compare when labels look like those of rules: how often where rules made them, and how often elsewhere."""
    rows: Rows = []
    for leaves in LEAVES:
        for least in (0.7, 0.8, 0.9):
            for behind in (1.0, 2.0, 3.0):
                noticed: dict[bool, list[bool]] = {True: [], False: []}
                for case in cases:
                    labels, by_tree = case.arrays["labels"], case.arrays[f"rules {leaves}"]
                    right = combine(case.votes, labels).probabilities.argmax(1) == labels
                    ahead, other = int((right & ~by_tree).sum()), int((by_tree & ~right).sum())
                    close = (ahead - other) / max(1, ahead + other) ** 0.5 <= behind
                    enough = min(right.mean(), by_tree.mean()) >= least
                    noticed[case.name.startswith(BY_RULES)].append(bool(close and enough))
                choice = f"{leaves} leaves, LEAST_PREDICTED {least:g}, BEHIND {behind:g}"
                for made, values in noticed.items():
                    where = "% noticed where rules made the labels" if made else "% noticed elsewhere"
                    rows.append(("rules", choice, where, 100 * float(np.mean(values))))
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
    choices = (weigh_votes, notice_learning, fit_doubt, follow_suggestions, learn_again, choose_network, notice_rules)
    rows = [row for choose in choices for row in choose(cases)]
    with (ROOT / "results" / "own_data_decide.csv").open("w", newline="", encoding="utf-8") as stream:
        table = csv.writer(stream)
        table.writerow(["decision", "choice", "measure", "value", "cases"])
        table.writerows([*row[:3], f"{row[3]:.2f}", len(cases)] for row in rows)


if __name__ == "__main__":
    main()
