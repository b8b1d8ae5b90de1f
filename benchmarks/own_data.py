"""Own data: `fit` and `issues` against other ways, on real noise and on clean sets with 40 % next-class noise.

    python benchmarks/own_data.py --real FOLDER [--fortunes FOLDER] [--seeds 5] [--minutes 30] [--work build/own_data]

Data: `--real` has labelme_crowd.npz (fmenat/PyLearningCrowds), trec.csv (yueyu1030/COSINE) and hausa_news.csv
(uds-lsv/transfer-distant-transformer-african), whose wrong labels come from people and rules. Without `--real` they are
left out. Clean sets get 40 % next-class noise: digits (scikit-learn, as 8x8 PNG files), segments (2,310 image segments,
from `pip install river`) and fortunes (six kinds of short texts, from Debian's package fortunes).

Every result is kept in the work folder. The command stops after `--minutes`; repeat it to continue. It writes
results/own_data.csv (accuracy and calibration error on true test labels), results/own_data_issues.csv (precision at the
true number of wrong labels, average precision, CPU seconds) and results/own_data_noise.csv, and the tables of
docs/own_data.md and docs/wrong_labels.md. `--minutes 0` only writes them.

The methods: `fit`; the same network and class shares with plain CE; scikit-learn's MLPClassifier (256, 256),
HistGradientBoosting and LogisticRegression; cleanlab's CleanLearning around logistic regression;
LogitClipClassifier(temp="auto"). All but the first two see the same features, from the preprocessor of `fit` (pixels
for digits; trees get 100 singular vectors of texts). Wrong labels are found by `fit`'s five folds and its one run, and
by cleanlab's self-confidence on out-of-fold probabilities of plain CE and of logistic regression. `fit` keeps a tenth
of the rows for calibration; the other methods train on all rows.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import re
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import logitclip as lc
from logitclip.noise.estimate import NoiseEstimate, estimate_noise
from logitclip.own_data import issues as judging
from logitclip.own_data.calibration import calibration_error, softmax
from logitclip.own_data.planning import FOLDS
from logitclip.runs.config import RunConfig
from logitclip.runs.results import Result, outcome, read_result

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
DEBIAN = Path("/usr/share/games/fortunes")
KINDS = ("people", "definitions", "computers", "songs-poems", "politics", "science")
RATE = 0.4


@dataclass(frozen=True)
class Task:
    """Training rows with noisy and true labels, and clean test rows."""

    train: pd.DataFrame  # with columns `label` (noisy) and, for images, `file`
    true: np.ndarray
    test: pd.DataFrame
    text: tuple[str, ...] = ()

    @property
    def wrong(self) -> np.ndarray:
        return self.train["label"].to_numpy() != self.true


# -- data --------------------------------------------------------------------------------------------------------------


def next_class(labels: np.ndarray, seed: int) -> np.ndarray:
    """Move 40 % of the labels to the next class."""
    names = np.unique(labels)
    flipped = np.random.default_rng(seed).random(len(labels)) < RATE
    position = np.searchsorted(names, labels)
    return names[np.where(flipped, (position + 1) % len(names), position)]


def split(frame: Any, seed: int, text: tuple[str, ...] = ()) -> Task:
    """Keep a third of the rows for testing, and add noise to the others."""
    order = np.random.default_rng(100 + seed).permutation(len(frame))
    cut = 2 * len(frame) // 3
    train, test = (frame.iloc[part].reset_index(drop=True) for part in (order[:cut], order[cut:]))
    true = train["label"].to_numpy()
    return Task(train.assign(label=next_class(true, seed)), true, test, text)


def labelme(args: argparse.Namespace, seed: int) -> Task:
    file = np.load(args.real / "labelme_crowd.npz")
    names = [f"x{i}" for i in range(file["x_train"].shape[1])]
    train = pd.DataFrame(file["x_train"], columns=names).assign(label=file["one_answer_train"].astype(str))
    test = pd.DataFrame(file["x_test"], columns=names).assign(label=file["true_test"].astype(str))
    return Task(train, file["true_train"].astype(str), test)


def crowd_text(name: str) -> Callable[..., Task]:
    def load(args: argparse.Namespace, seed: int) -> Task:
        frame: Any = pd.read_csv(args.real / f"{name}.csv", dtype=str)
        train, test = (frame[frame["split"] == part].reset_index(drop=True) for part in ("train", "test"))
        kept = ["text", "label"]
        return Task(train[kept], train["true_label"].to_numpy(), test.assign(label=test["true_label"])[kept], ("text",))

    return load


def digits(args: argparse.Namespace, seed: int) -> Task:
    from PIL import Image
    from sklearn.datasets import load_digits

    bunch: Any = load_digits()
    folder = args.work / "digits"
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{i:04}.png" for i in range(len(bunch.images))]
    for name, image in zip(names, bunch.images, strict=True):
        if not (folder / name).exists():
            Image.fromarray((15 * image).astype(np.uint8)).save(folder / name)
    return split(pd.DataFrame({"file": names, "label": bunch.target.astype(str)}), seed)


def segments(args: argparse.Namespace, seed: int) -> Task:
    package = importlib.util.find_spec("river")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("segments come with river: pip install river")
    frame = pd.read_csv(Path(package.submodule_search_locations[0]) / "datasets" / "segment.csv.zip")
    return split(frame.rename(columns={"category": "label"}), seed)


def fortunes(args: argparse.Namespace, seed: int) -> Task:
    rows = [
        (" ".join(text.split()), kind)
        for kind in KINDS
        for text in (args.fortunes / kind).read_text("utf-8", "replace").split("\n%\n")[:500]
        if text.strip()
    ]
    return split(pd.DataFrame(rows, columns=["text", "label"]), seed, ("text",))


TASKS: dict[str, Callable[..., Task]] = {
    "labelme": labelme,
    "trec": crowd_text("trec"),
    "hausa": crowd_text("hausa_news"),
    "digits": digits,
    "segments": segments,
    "fortunes": fortunes,
}


# -- methods -----------------------------------------------------------------------------------------------------------


def measured(task: Task, probabilities: np.ndarray, classes: list[str]) -> dict[str, float]:
    truth = np.array([classes.index(label) if label in classes else -1 for label in task.test["label"]])
    return {
        "accuracy": float((probabilities.argmax(1) == truth).mean()),
        "calibration_error": calibration_error(probabilities, truth),
    }


def ranked(task: Task, scores: np.ndarray, seconds: float) -> dict[str, float]:
    """Return precision at the true number of wrong labels, and average precision; high scores are suspicious."""
    from sklearn.metrics import average_precision_score

    wrong, known = task.wrong, np.nan_to_num(scores, nan=-1.0)
    top = np.argsort(-known, kind="stable")[: wrong.sum()]
    return {
        "precision": float(wrong[top].mean()),
        "average_precision": float(average_precision_score(wrong, known)),
        "seconds": seconds,
    }


def fitted(task: Task, folder: Path, seed: int, clip: str) -> dict[str, Any]:
    """Fit with a clip (none: plain CE); return accuracy, issues and noise."""
    folder.mkdir(parents=True, exist_ok=True)
    images = "file" in task.train
    place = folder.parents[2] / "digits" if images else folder
    train, test = (place / f"{folder.parent.name}-{folder.name}-{part}.csv" for part in ("train", "test"))
    task.train.to_csv(train, index=False)
    task.test.to_csv(test, index=False)
    out = folder / ("clip" if clip != "none" else "ce")
    started, spent_file = time.process_time(), out / "cpu_seconds.json"
    model = lc.fit(train, label="label", text=task.text, out=out, clip=clip, seed=seed, find_issues=True)
    if not spent_file.exists():  # a repeated fit only reads its finished runs
        spent_file.write_text(json.dumps(time.process_time() - started))
    cpu_seconds = json.loads(spent_file.read_text())
    names, classes = model.class_names, len(model.class_names)
    _, x = model._inputs(test)
    logits = model.logits(x).double().numpy()
    log_prior = np.array(model.facts["log_prior"])
    probabilities = model.calibrated(logits) if clip != "none" else softmax(logits + log_prior)
    labels = np.array([names.index(label) for label in task.train["label"].astype(str)])
    final = read_result(out / "runs" / model.facts["run"])
    assert final is not None
    config = RunConfig(**{**final.config, "plugin": ()})
    per_fold = replace(config, per_example=False)
    folds = judging.fold_configs(per_fold, FOLDS)
    spent = {path.parent.name: read_result(path.parent) for path in (out / "runs").glob("*/result.json")}
    # Divide the CPU seconds among the runs by wall time, so that other programs do not count.
    scale = cpu_seconds / sum(done.seconds for done in spent.values() if done is not None)
    fold_seconds = scale * sum(done.seconds for done in map(outcome, folds) if isinstance(done, Result))
    search_seconds = scale * sum(done.seconds for done in spent.values() if done is not None and done.config["val"])
    oof = judging.fold_logits(per_fold, len(labels), classes, FOLDS, executor="inline")
    found: dict[str, Any] = {"test": measured(task, probabilities, names), "clip": model.facts["clip"]}
    found["test"]["accuracy_without_shares"] = measured(task, softmax(logits), names)["accuracy"]
    if clip == "none":
        known = ~np.isnan(oof).any(1)
        scores = np.full(len(labels), np.nan)
        scores[known] = 1 - softmax(oof[known])[np.arange(known.sum()), labels[known]]
        found["issues"] = {"cleanlab on CE": ranked(task, scores, fold_seconds)}
        return found
    five = judging.judged(oof, labels, log_prior, "out of fold")
    one, _ = judging.one_run(final, config, labels, log_prior)
    found["issues"] = {
        "five folds": ranked(task, five.scores, search_seconds + fold_seconds),
        "one run": ranked(task, one.scores, search_seconds + scale * final.seconds),
    }
    found["noise"] = {"five folds": estimated(five.noise), "held-out rows": estimated(one.noise)}
    found["noise"]["cleanlab's counting, five folds"] = counted(labels, softmax(oof + log_prior))
    return found


def estimated(noise: NoiseEstimate) -> dict[str, float]:
    low, high = noise.rate_interval
    return {"rate": noise.rate, "low": low, "high": high, "at_most": noise.at_most}


def counted(labels: np.ndarray, probabilities: np.ndarray) -> dict[str, float]:
    from cleanlab.count import estimate_joint

    known = ~np.isnan(probabilities).any(1)
    return {"rate": float(1 - np.trace(estimate_joint(labels[known], probabilities[known])))}


def features(task: Task, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the features of `fit`'s preprocessor; pixels for images."""
    if "file" in task.train:
        from PIL import Image

        place = folder.parents[2] / "digits"
        train, test = (
            np.stack([np.asarray(Image.open(place / name), dtype=np.float32).ravel() / 255 for name in part["file"]])
            for part in (task.train, task.test)
        )
        return train, test
    from logitclip.data.columns import from_frame
    from logitclip.data.preprocessing import Preprocessor

    train, test = (from_frame(part.drop(columns="label")) for part in (task.train, task.test))
    preprocessor = Preprocessor.fit(train, task.text)
    return preprocessor.transform(train).numpy(), preprocessor.transform(test).numpy()


def others(task: Task, folder: Path, seed: int, name: str) -> dict[str, Any]:
    from sklearn.decomposition import TruncatedSVD
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import cross_val_predict
    from sklearn.neural_network import MLPClassifier

    train, test = features(task, folder)
    classes, labels = np.unique(task.train["label"].to_numpy().astype(str), return_inverse=True)
    logistic = LogisticRegression(max_iter=300)
    started = time.process_time()
    if name == "LogisticRegression":
        probabilities = logistic.fit(train, labels).predict_proba(test)
        started = time.process_time()
        oof: Any = cross_val_predict(logistic, train, labels, cv=5, method="predict_proba")
        scores = 1 - oof[np.arange(len(labels)), labels]
        return {
            "test": measured(task, probabilities, classes.tolist()),
            "issues": {"cleanlab on logistic regression": ranked(task, scores, time.process_time() - started)},
            "noise": {"logistic regression": estimated(estimate_noise(labels, oof))},
        }
    if name == "MLPClassifier":
        model: Any = MLPClassifier((256, 256), max_iter=100, random_state=seed)
    elif name == "HistGradientBoosting":
        model = HistGradientBoostingClassifier(random_state=seed)
        if task.text:
            reduce = TruncatedSVD(100, random_state=seed).fit(train)
            train, test = reduce.transform(train), reduce.transform(test)
    elif name == "CleanLearning":
        from cleanlab.classification import CleanLearning

        model = CleanLearning(logistic, seed=seed)
    else:
        from logitclip.integrations.sklearn import LogitClipClassifier

        model = LogitClipClassifier(temp="auto", random_state=seed)
    return {"test": measured(task, model.fit(train, labels).predict_proba(test), classes.tolist())}


OTHERS = ("LogisticRegression", "CleanLearning", "HistGradientBoosting", "MLPClassifier", "LogitClipClassifier")
METHODS = ("fit", "plain CE", *OTHERS)


def run(args: argparse.Namespace) -> None:
    stop = time.monotonic() + 60 * args.minutes
    for seed in range(args.seeds):
        for name in args.tasks.split(","):
            for method in args.methods.split(","):
                file = args.work / "done" / f"{name}-{seed}-{method}.json"
                if file.exists() or time.monotonic() > stop:
                    continue
                print(f"{time.strftime('%H:%M:%S')} {name}, seed {seed}: {method}", flush=True)
                task, folder = TASKS[name](args, seed), args.work / "fit" / name / str(seed)
                started = time.process_time()
                with warnings.catch_warnings(action="ignore"):
                    if method in OTHERS:
                        found = others(task, folder, seed, method)
                    else:
                        found = fitted(task, folder, seed, "norm:temp=auto" if method == "fit" else "none")
                found |= {"true_rate": float(task.wrong.mean()), "cpu_seconds": time.process_time() - started}
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(found, indent=1))


# -- tables ------------------------------------------------------------------------------------------------------------


def tables(args: argparse.Namespace) -> None:
    done = {}
    for file in sorted((args.work / "done").glob("*.json")):
        name, seed, method = file.stem.split("-", 2)
        done[name, method, int(seed)] = json.loads(file.read_text())
    accuracy, issues, noise = (list(rows(done)) for rows in (accuracy_rows, issue_rows, noise_rows))
    write("own_data", accuracy)
    write("own_data_issues", issues)
    write("own_data_noise", noise)
    show("own_data", "accuracy", accuracy, "method", "accuracy", "accuracy_std")
    show("own_data", "calibration error", accuracy, "method", "calibration_error")
    show("wrong_labels", "average precision", issues, "way", "average_precision")
    show("wrong_labels", "precision", issues, "way", "precision")
    show("wrong_labels", "CPU seconds", issues, "way", "seconds")
    truth = [{**row, "from": "true rate", "rate": row["true_rate"]} for row in noise if row["from"] == "five folds"]
    limits = [{**row, "from": "at most", "rate": row["at_most"]} for row in noise if row["from"] == "five folds"]
    show("wrong_labels", "noise rate", [*truth, *noise, *limits], "from", "rate")


def accuracy_rows(done: dict[Any, Any]) -> Any:
    for name in TASKS:
        for method in METHODS:
            found = [value["test"] for (n, m, _), value in done.items() if (n, m) == (name, method)]
            if found:
                yield {
                    "data": name,
                    "method": method,
                    "seeds": len(found),
                    **{key: mean(found, key, 100) for key in ("accuracy", "calibration_error")},
                    "accuracy_std": spread(found, "accuracy"),
                    **{key: mean(found, key, 100) for key in ("accuracy_without_shares",) if key in found[0]},
                }
    complete = [n for n in TASKS if all(any((n, m) == key[:2] for key in done) for m in METHODS)]
    for key, sign in (("accuracy", -1), ("calibration_error", 1)):
        ranks: dict[str, list[float]] = {method: [] for method in METHODS}
        for name in complete:
            values = [
                sign * statistics.mean(v["test"][key] for (n, m, _), v in done.items() if (n, m) == (name, method))
                for method in METHODS
            ]
            for method, value in zip(METHODS, values, strict=True):
                ranks[method].append(sum(v < value for v in values) + (sum(v == value for v in values) + 1) / 2)
        for method in METHODS if complete else ():
            row = f"mean rank, {len(complete)} of {len(TASKS)} sets"
            yield {"data": row, "method": method, "seeds": "", key: mean_of(ranks[method])}


def issue_rows(done: dict[Any, Any]) -> Any:
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for (name, _, _), value in done.items():
        for way, scores in value.get("issues", {}).items():
            found.setdefault((name, way), []).append({**scores, "true_rate": value["true_rate"]})
    for (name, way), rows in sorted(found.items(), key=lambda item: (list(TASKS).index(item[0][0]), item[0][1])):
        yield {
            "data": name,
            "way": way,
            "seeds": len(rows),
            **{key: mean(rows, key, 100) for key in ("true_rate", "precision", "average_precision")},
            "seconds": mean(rows, "seconds", 1),
        }


def noise_rows(done: dict[Any, Any]) -> Any:
    for (name, _, seed), value in sorted(done.items(), key=lambda item: list(TASKS).index(item[0][0])):
        true = f"{100 * value['true_rate']:.1f}"
        for way, estimate in value.get("noise", {}).items():
            row = {key: f"{100 * number:.1f}" for key, number in estimate.items()}
            yield {"data": name, "seed": seed, "from": way, "true_rate": true, **row}


def show(page: str, title: str, rows: list[dict[str, Any]], across: str, key: str, spread: str = "") -> None:
    """Write a table into its page, between two comments: a row per data set, a column per method."""
    columns = list(dict.fromkeys(row[across] for row in rows))
    names = list(dict.fromkeys(row["data"] for row in rows if key in row))
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name in names:
        cells = []
        for column in columns:
            found = [row for row in rows if (row["data"], row[across]) == (name, column) and row.get(key)]
            cells.append(cell(found, key, spread))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    file = ROOT / "docs" / f"{page}.md"
    marked = re.compile(rf"(<!-- own_data.py: {title} -->\n).*?(<!-- end of table -->)", re.DOTALL)
    table = "\n".join(lines)
    file.write_text(marked.sub(lambda found: f"{found[1]}{table}\n{found[2]}", file.read_text("utf-8")), "utf-8")


def cell(found: list[dict[str, Any]], key: str, spread: str) -> str:
    """Format the mean of the rows with its standard deviation and number of seeds."""
    if not found:
        return ""
    text = f"{statistics.mean(float(row[key]) for row in found):.1f}"
    if found[0].get(spread):
        text += f" ± {found[0][spread]}"
    seeds = len(found) if "seed" in found[0] else int(found[0]["seeds"] or 1)  # a rank has none
    return text if seeds == 1 else f"{text} ({seeds})"


def mean(rows: list[dict[str, float]], key: str, factor: float) -> str:
    return f"{factor * statistics.mean(row[key] for row in rows):.1f}"


def mean_of(values: list[float]) -> str:
    return f"{statistics.mean(values):.2f}"


def spread(rows: list[dict[str, float]], key: str) -> str:
    return f"{100 * statistics.stdev(row[key] for row in rows):.1f}" if len(rows) > 1 else ""


def write(name: str, rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with open(RESULTS / f"{name}.csv", "w", newline="") as file:
        table = csv.DictWriter(file, columns)
        table.writeheader()
        table.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--real", type=Path, help="folder with labelme_crowd.npz, trec.csv and hausa_news.csv")
    parser.add_argument("--fortunes", type=Path, default=DEBIAN)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=60.0, help="start no new fit after this time")
    parser.add_argument("--work", type=Path, default=Path("build/own_data"))
    parser.add_argument("--tasks", default="", help="data sets, separated by commas; all by default")
    parser.add_argument("--methods", default=",".join(METHODS), help="methods, separated by commas")
    args = parser.parse_args()
    clean = ("digits", "segments", "fortunes")
    args.tasks = args.tasks or ",".join(TASKS if args.real else clean)
    run(args)
    tables(args)


if __name__ == "__main__":
    main()
