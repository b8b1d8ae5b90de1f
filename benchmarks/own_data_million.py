"""`logitclip fit` on 1,000,000 rows x 20 columns: time, peak memory, how often the table is parsed, the time estimates.

    python benchmarks/own_data_million.py [--rows 1000000] [--epochs 20] [--clip norm:temp=auto] [--learner network]
        [--find-issues] [--tree FOLDER] [--work build/million]

The table has five classes, ten informative numbers, five uninformative ones and four categories; 30 % of the labels are
moved to the next class. `--tree` is a checkout of another commit, to compare with. A line is added to
results/own_data_million.csv: the seconds on the clock and of the processor, the peak memory of the process, how often
it parsed the table, the plan's time estimate, the estimate a minute after training started and the time that it really
took from there, the accuracy on the true labels of 10,000 other rows, and the size of the model folder. One thread.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd

HERE = Path(__file__).resolve().parent
CLASSES = 5
COUNTING = """
import atexit, functools, runpy, sys
import pyarrow.csv
parses = []
def count(parse):
    return functools.wraps(parse)(lambda *args, **options: (parses.append(1), parse(*args, **options))[1])
pyarrow.csv.read_csv, pyarrow.csv.open_csv = count(pyarrow.csv.read_csv), count(pyarrow.csv.open_csv)
atexit.register(lambda: print("parsed", len(parses), "times", file=sys.stderr))
sys.argv[0] = "logitclip"
runpy.run_module("logitclip", run_name="__main__", alter_sys=True)
"""


def table(rows: int, seed: int, rate: float) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(0).normal(size=(CLASSES, 10))
    true = rng.integers(0, CLASSES, rows)
    frame = pd.DataFrame(centres[true] + rng.normal(size=(rows, 10)), columns=[f"a{i}" for i in range(10)])
    for i in range(5):
        frame[f"b{i}"] = rng.normal(size=rows)
    for i in range(4):
        frame[f"c{i}"] = np.array(["red", "green", "blue", "grey"])[rng.integers(0, 4, rows)]
    frame["kind"] = np.where(rng.random(rows) < rate, (true + 1) % CLASSES, true)
    return frame


def seconds(text: str) -> float:
    """Convert '1 h 2 min', '3 min 4 s' or '5 s' to seconds."""
    units = {"h": 3600, "min": 60, "s": 1}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"(\d+) (h|min|s)", text))


def fit_options(args: argparse.Namespace, train: Path, out: Path) -> list[str]:
    options = ["fit", train, "--label", "kind", "-o", out, "--epochs", args.epochs, "--clip", args.clip]
    options += ["--learner", args.learner] if args.learner else []
    options += ["--find-issues"] if args.find_issues else []
    return list(map(str, options))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--clip", default="norm:temp=auto")
    parser.add_argument("--learner", default="")
    parser.add_argument("--find-issues", action="store_true")
    parser.add_argument("--tree", type=Path, default=HERE.parent)
    parser.add_argument("--work", type=Path, default=Path("build/million"))
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    train, test, out = args.work / f"train-{args.rows}.csv", args.work / "test.csv", args.work / "model"
    shutil.rmtree(out, ignore_errors=True)
    for file, rows, seed, rate in ((train, args.rows, 1, 0.3), (test, 10_000, 2, 0.0)):
        if not file.exists():
            table(rows, seed, rate).to_csv(file, index=False, float_format="%.6g")
    environment = {**os.environ, "PYTHONPATH": str(args.tree / "src"), "OMP_NUM_THREADS": "1"}
    started, lines = time.monotonic(), []
    process = subprocess.Popen(
        [sys.executable, "-c", COUNTING, *fit_options(args, train, out)],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stderr is not None
    for line in process.stderr:
        print(line, end="", file=sys.stderr)
        lines.append((time.monotonic() - started, line))
    if process.wait():
        raise SystemExit(process.returncode)
    total = time.monotonic() - started
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    planned = next((at, seconds(line)) for at, line in lines if "will take about" in line)
    later = next(((at, seconds(line)) for at, line in lines if " left" in line and at > planned[0] + 60), None)
    answer = subprocess.run(
        [sys.executable, "-m", "logitclip", "predict", out, test, "-o", args.work / "out.csv"],
        check=True,
        capture_output=True,
        text=True,
        env=environment,
    )
    commit = ["git", "-C", args.tree, "rev-parse", "--short", "HEAD"]
    row = {
        "commit": subprocess.run(commit, check=True, capture_output=True, text=True).stdout.strip(),
        "rows": args.rows,
        "epochs": args.epochs,
        "clip": args.clip,
        "learner": args.learner,
        "find_issues": args.find_issues,
        "seconds": round(total, 1),
        "processor_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_gigabytes": round(usage.ru_maxrss / 1e6, 2),
        "parses": next(int(line.split()[1]) for _, line in reversed(lines) if line.startswith("parsed ")),
        "seconds_to_the_plan": round(planned[0], 1),
        "planned_seconds": planned[1],
        "after_a_minute_left": None if later is None else later[1],
        "after_a_minute_really_left": None if later is None else round(total - later[0], 1),
        "on_true_labels": answer.stderr.splitlines()[-1].partition(" agree")[0].rpartition(" ")[2],
        "folder_megabytes": round(sum(file.stat().st_size for file in out.rglob("*") if file.is_file()) / 1e6, 2),
    }
    add_line(HERE / "results" / "own_data_million.csv", row)


def add_line(path: Path, row: dict[str, object]) -> None:
    """Add a line to a CSV file; lines that were written before a column existed are empty there."""
    earlier: list[dict[str, str]] = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            earlier = list(csv.DictReader(file))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        writer.writeheader()
        writer.writerows([*earlier, row])


if __name__ == "__main__":
    main()
