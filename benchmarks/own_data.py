"""Own data: `fit` and `issues` against other ways, on sets that nothing was decided on.

    python benchmarks/own_data.py --real FOLDER [--half report] [--seeds 5] [--minutes 30] [--work build/own_data]

The sets are those of own_data_sets.py, divided in two before anything was measured: `--half decide` are those that
settings were chosen on, `--half report` the others. Each set whose labels are right gets four kinds of noise at 30 %.
Every result is kept in the work folder. The command stops after `--minutes`; repeat it to continue. It writes
results/own_data.csv, a row for each set, noise, seed and method, results/own_data_scores.csv, and the tables of
docs/own_data.md and docs/wrong_labels.md. `--minutes 0` only writes them.

All other methods see the features of `fit`'s preprocessor; trees get 100 singular vectors of texts. CPU seconds are
those of the call, without imports. CleanLearning ranks labels by the self-confidence of its out-of-fold predictions.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import shutil
import statistics
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from own_data_sets import DECIDE, FASHION, REPORT, Task, load, noises_of

import logitclip as lc
from logitclip.data._columns import from_frame
from logitclip.data._preprocessing import Preprocessor
from logitclip.studies.measures import calibration_error

ROOT = Path(__file__).parents[1]
METHODS = (
    *("fit", "fit without clip", "CleanLearning(forest)", "CleanLearning(boosting)", "CleanLearning(logistic)"),
    *("forest", "LightGBM", "LogitClipClassifier"),
)
Done = dict[tuple[str, str, int], dict[str, dict[str, Any]]]  # set, noise and seed -> method -> what was measured
MEASURES = {  # title of a table -> page, column, factor
    "accuracy": ("own_data", "accuracy", 100),
    "calibration error": ("own_data", "calibration_error", 100),
    "CPU seconds": ("own_data", "seconds", 1),
    "average precision": ("wrong_labels", "average_precision", 100),
}
BY_SET = ("accuracy", "average precision")  # tables with a row for each set; the CSV file has all


# -- methods -----------------------------------------------------------------------------------------------------------


def run_fit(task: Task, folder: Path, seed: int, clip: str) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    pictures = "file" in task.train  # a table of pictures lies beside them
    place = Path(task.train["file"].iloc[0]).parent if pictures else folder
    train, test = (place / f"{folder.name}-{part}.csv" for part in ("train", "test"))
    for part, file in ((task.train, train), (task.test, test)):
        names = {"file": part["file"].map(lambda name: Path(name).name)} if pictures else {}
        part.assign(**names).to_csv(file, index=False)
    shutil.rmtree(folder / "model", ignore_errors=True)
    started = time.process_time()
    model = lc.fit(train, label="label", text=task.text, out=folder / "model", clip=clip, seed=seed)
    seconds = time.process_time() - started
    found = measure(task, model.predict_proba(test), model.class_names, seconds)
    issues = model.issues.assign(position=model.issues["row"].map(row_positions(task).__getitem__))
    scores = np.full(len(task.train), np.nan)
    scores[issues["position"]] = issues["score"]
    followed = task.train["label"].to_numpy().astype(str)
    marked = issues[issues["wrong"] & (issues["suggested"] != "")]
    followed[marked["position"]] = marked["suggested"]
    low, high = model.noise["rate_interval"]
    rate = float(task.wrong.mean())
    place = np.minimum((np.nan_to_num(scores) * 10).astype(int), 9)
    return {
        **found,
        **rank(task, scores),
        "noise_after": float((followed != task.true.astype(str)).mean()),
        "range": [low, high, low <= rate <= high],
        "reliability": [np.bincount(place, minlength=10).tolist(), np.bincount(place, task.wrong, 10).tolist()],
        "learners": {one["name"]: one["weight"] for one in model.facts["learners"]},
    }


def row_positions(task: Task) -> dict[str, int]:
    names = task.train["file"] if "file" in task.train else range(1, len(task.train) + 1)
    return {Path(str(name)).name: i for i, name in enumerate(names)}


def make_features(task: Task) -> tuple[np.ndarray, np.ndarray]:
    """Return the features of `fit`'s preprocessor; pixels for pictures."""
    if "file" in task.train:
        from PIL import Image

        train, test = (
            np.stack([np.asarray(Image.open(name), dtype=np.float32).ravel() / 255 for name in part["file"]])
            for part in (task.train, task.test)
        )
        return train, test
    train, test = (from_frame(part.drop(columns="label")) for part in (task.train, task.test))
    preprocessor = Preprocessor.fit(train, task.text)
    return preprocessor.transform(train).numpy(), preprocessor.transform(test).numpy()


def make_learner(name: str, seed: int) -> Any:
    from cleanlab.classification import CleanLearning
    from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
    from sklearn.linear_model import LogisticRegression

    if name == "LogitClipClassifier":
        from logitclip.integrations.sklearn import LogitClipClassifier

        return LogitClipClassifier(temp="auto", random_state=seed)
    if name == "LightGBM":
        from lightgbm import LGBMClassifier

        return LGBMClassifier(random_state=seed, verbose=-1, n_jobs=1)
    inner = {
        "forest": RandomForestClassifier(random_state=seed),
        "boosting": HistGradientBoostingClassifier(random_state=seed),
        "logistic": LogisticRegression(max_iter=300),
    }
    if name in inner:
        return inner[name]
    return CleanLearning(inner[name.partition("(")[2][:-1]], seed=seed)


def run_other(task: Task, seed: int, name: str) -> dict[str, Any]:
    from sklearn.decomposition import TruncatedSVD

    train, test = make_features(task)
    classes, labels = np.unique(task.train["label"].to_numpy().astype(str), return_inverse=True)
    if task.text and ("boosting" in name or "forest" in name or name == "LightGBM"):
        reduce = TruncatedSVD(100, random_state=seed).fit(train)
        train, test = reduce.transform(train), reduce.transform(test)
    learner = make_learner(name, seed)
    started = time.process_time()
    learner.fit(train, labels)
    seconds = time.process_time() - started
    seen = getattr(getattr(learner, "clf", learner), "classes_", np.arange(len(classes)))
    probabilities = np.zeros((len(test), len(classes)))
    probabilities[:, seen] = learner.predict_proba(test)
    found = measure(task, probabilities, classes.tolist(), seconds)
    if name.startswith("CleanLearning"):
        found |= rank(task, 1 - learner.get_label_issues()["label_quality"].to_numpy())
    return found


def measure(task: Task, probabilities: np.ndarray, classes: list[str], seconds: float) -> dict[str, float]:
    truth = np.array([classes.index(label) if label in classes else -1 for label in task.test["label"].astype(str)])
    return {
        "accuracy": float((probabilities.argmax(1) == truth).mean()),
        "calibration_error": calibration_error(probabilities.max(1), probabilities.argmax(1) == truth),
        "seconds": seconds,
        "true_rate": float(task.wrong.mean()),
    }


def rank(task: Task, scores: np.ndarray) -> dict[str, float]:
    from sklearn.metrics import average_precision_score

    return {"average_precision": float(average_precision_score(task.wrong, np.nan_to_num(scores, nan=-1.0)))}


def cases(args: argparse.Namespace) -> Iterator[tuple[int, str, str]]:
    """Yield seed, set and noise, such that a run that is stopped early has seen all sets."""
    names = REPORT if args.half == "report" else DECIDE
    for seed in range(args.seeds):
        for turn in range(4):
            for i, name in enumerate(names):
                noises = noises_of(name)
                if turn < len(noises):
                    yield seed, name, noises[(turn + i) % len(noises)]


def import_everything(work: Path) -> None:
    """Fit a small table first: CPU seconds are those of the calls, without the imports of the first one."""
    task = load("iris", "symmetric", None, 0)
    shutil.rmtree(work / "imports", ignore_errors=True)  # one of an earlier run would be kept
    lc.fit(task.train, "label", out=work / "imports", epochs=1)
    for name in ("CleanLearning(forest)", "LightGBM", "LogitClipClassifier"):
        make_learner(name, 0)


def run(args: argparse.Namespace) -> None:
    if args.minutes:
        import_everything(args.work)
    stop = time.monotonic() + 60 * args.minutes
    for seed, name, noise in cases(args):
        for method in METHODS:
            file = args.work / args.half / f"{name}-{noise}-{seed}-{method}.json"
            if name in args.skip.split(","):
                continue
            if file.exists() or time.monotonic() > stop:
                continue
            print(f"{time.strftime('%H:%M:%S')} {name}, {noise}, seed {seed}: {method}", flush=True)
            task = load(name, noise, args, seed)
            with warnings.catch_warnings(action="ignore"):
                if method.startswith("fit"):
                    clip = "none" if "without" in method else "auto"
                    found = run_fit(task, args.work / "fit" / f"{name}-{noise}-{seed}-{clip}", seed, clip)
                else:
                    found = run_other(task, seed, method)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(found), encoding="utf-8")


# -- tables ------------------------------------------------------------------------------------------------------------


def read(args: argparse.Namespace) -> Done:
    """Return the results of each case by method; cases that a method is missing from are left out."""
    found: Done = {}
    for file in sorted((args.work / args.half).glob("*.json")):
        name, noise, seed, method = file.stem.split("-", 3)
        found.setdefault((name, noise, int(seed)), {})[method] = json.loads(file.read_text(encoding="utf-8"))
    return {case: {name: by[name] for name in METHODS} for case, by in found.items() if {*METHODS} <= {*by}}


def write_csv(done: Done, path: Path) -> None:
    columns = ("accuracy", "calibration_error", "seconds", "average_precision", "true_rate", "noise_after")
    with path.open("w", newline="", encoding="utf-8") as stream:
        table = csv.writer(stream)
        table.writerow(["data", "noise", "seed", "method", *columns, "range_low", "range_high"])
        for (name, noise, seed), by in done.items():
            for method, found in by.items():
                cells = [f"{found[column]:.4f}" if column in found else "" for column in columns]
                ends = [f"{end:.4f}" for end in found.get("range", [])[:2]]
                table.writerow([name, noise, seed, method, *cells, *ends])


def mean_ranks(done: Done, column: str, methods: list[str]) -> tuple[list[float], float]:
    """Return the mean rank of each method over the sets, and Nemenyi's critical difference at 5 %."""
    sets = sorted({name for name, _, _ in done})
    sign = -1 if column in ("accuracy", "average_precision") else 1
    ranks = []
    for name in sets:
        values = [
            sign * statistics.mean(by[method][column] for case, by in done.items() if case[0] == name)
            for method in methods
        ]
        ranks.append([sum(v < value for v in values) + (sum(v == value for v in values) + 1) / 2 for value in values])
    from scipy.stats import studentized_range

    k = len(methods)
    critical = studentized_range.ppf(0.95, k, np.inf) / 2**0.5 * (k * (k + 1) / (6 * len(sets))) ** 0.5
    return np.mean(ranks, axis=0).tolist(), float(critical)


def as_heading(method: str) -> str:
    """Return the name of a method for the head of a table, where it may break."""
    return re.sub("(?<=[a-z])(?=[A-Z])", "\u00ad", method).replace("(", " (")


def show(done: Done, title: str) -> None:
    """Write a table into its page, between two comments: a row per set and kind of noise, a column per method."""
    page, column, factor = MEASURES[title]
    methods = [method for method in METHODS if all(column in by[method] for by in done.values())]
    lines = [f"| | cases | {' | '.join(map(as_heading, methods))} |", "|---" * (len(methods) + 2) + "|"]

    def add(name: str, chosen: list[dict[str, dict[str, Any]]]) -> None:
        cells = [f"{factor * statistics.mean(by[method][column] for by in chosen):.1f}" for method in methods]
        lines.append(f"| {name} | {len(chosen)} | {' | '.join(cells)} |")

    for name in dict.fromkeys(case[0] for case in done) if title in BY_SET else ():
        add(name, [by for case, by in done.items() if case[0] == name])
    for noise in dict.fromkeys(case[1] for case in done):
        add(f"*all with {noise} noise*", [by for case, by in done.items() if case[1] == noise])
    add("**mean**", list(done.values()))
    ranks, critical = mean_ranks(done, column, methods)
    sets = len({case[0] for case in done})
    lines.append(
        f"| mean rank (critical difference {critical:.1f}) | {sets} sets | {' | '.join(f'{r:.1f}' for r in ranks)} |"
    )
    put(page, title, lines)


def show_ranges(done: Done) -> None:
    """Write how often the range of the noise rate held, and how wide it is, by the kind of noise."""
    lines = ['| noise | cases | the range held | `fit` says only "at most" | mean width in points |', "|---" * 5 + "|"]
    for noise in dict.fromkeys(case[1] for case in done):
        ranges = [by["fit"]["range"] for case, by in done.items() if case[1] == noise]
        held, at_most = sum(one[2] for one in ranges), sum(low < high / 3 for low, high, _ in ranges)
        width = 100 * statistics.mean(high - low for low, high, _ in ranges)
        lines.append(f"| {noise} | {len(ranges)} | {held} | {at_most} | {width:.0f} |")
    put("wrong_labels", "range of the noise rate", lines)


def put(page: str, title: str, lines: list[str]) -> None:
    """Put a table into a page of the documentation, between two comments."""
    file, table = ROOT / "docs" / f"{page}.md", "\n".join(lines)
    marked = re.compile(rf"(<!-- own_data.py: {title} -->\n).*?(<!-- end of table -->)", re.DOTALL)
    file.write_text(marked.sub(lambda found: f"{found[1]}{table}\n{found[2]}", file.read_text("utf-8")), "utf-8")


def write_scores(done: Done, path: Path) -> None:
    """Write how many labels there are in each tenth of the score, and how many of them are wrong."""
    tenths = [by["fit"]["reliability"] for by in done.values()]
    counts, wrong = (np.sum([one[i] for one in tenths], axis=0) for i in (0, 1))
    with path.open("w", newline="", encoding="utf-8") as stream:
        table = csv.writer(stream)
        table.writerow(["from", "to", "labels", "wrong"])
        table.writerows([i / 10, (i + 1) / 10, counts[i], int(wrong[i])] for i in range(10))


def find_gaps(done: Done, column: str, others: tuple[str, ...]) -> dict[str, float]:
    """Return by how many points `fit` is above the best of others on each set, by the means over its cases."""
    gaps = {}
    for name in dict.fromkeys(case[0] for case in done):
        chosen = [by for case, by in done.items() if case[0] == name]
        means = {method: 100 * statistics.mean(by[method][column] for by in chosen) for method in ("fit", *others)}
        gaps[name] = means["fit"] - max(means[method] for method in others)
    return gaps


def summarise(done: Done) -> None:
    """Print what the pages say."""
    fits = {case: by["fit"] for case, by in done.items()}
    change = {case: 100 * (found["true_rate"] - found["noise_after"]) for case, found in fits.items()}
    print(f"{len({case[2] for case in done})} seeds, {len(done)} cases")
    print(f"points of noise removed by following suggested: mean {statistics.mean(change.values()):.2f}")
    print("worst:", ", ".join(f"{case} {change[case]:.2f}" for case in sorted(change, key=change.__getitem__)[:5]))
    for noise in dict.fromkeys(case[1] for case in fits):
        held = [found["range"][2] for case, found in fits.items() if case[1] == noise]
        print(f"range held, {noise}: {sum(held)} of {len(held)}")
    comparisons = [("accuracy", (name,)) for name in METHODS[1:]]
    comparisons += [("accuracy", ("forest", "LightGBM", "LogitClipClassifier")), ("accuracy", METHODS[2:])]
    comparisons += [("average_precision", (name,)) for name in METHODS[1:5]]
    for column, others in comparisons:
        gaps = find_gaps(done, column, others)
        error = statistics.stdev(gaps.values()) / len(gaps) ** 0.5
        print(
            f"{column}, fit above {' or '.join(others)}: {statistics.mean(gaps.values()):.2f} ({error:.2f}) over sets;"
        )
        print(
            "    behind:",
            ", ".join(f"{name} {gaps[name]:.1f}" for name in sorted(gaps, key=gaps.__getitem__) if gaps[name] < 0),
        )
    tables = [by for case, by in done.items() if case[1] != "real" and not case[0].endswith("_pictures")]
    for name in ("fit", "CleanLearning(forest)"):
        print(f"CPU seconds on tables, {name}: {statistics.mean(by[name]['seconds'] for by in tables):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--real", type=Path, required=True, help="folder with the sets whose wrong labels are real")
    parser.add_argument("--fashion", type=Path, default=FASHION)
    parser.add_argument("--half", choices=("decide", "report"), default="report")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--skip", default="", help="sets to leave out, separated by commas")
    parser.add_argument("--work", type=Path, default=Path("build/own_data"))
    args = parser.parse_args()
    args.work = args.work.resolve()
    run(args)
    done = read(args)
    if done and args.half == "report":
        write_csv(done, ROOT / "results" / "own_data.csv")
        write_scores(done, ROOT / "results" / "own_data_scores.csv")
        for title in MEASURES:
            show(done, title)
        show_ranges(done)
    if done:
        summarise(done)


if __name__ == "__main__":
    main()
