"""`logitclip fit` on 1,000,000 rows x 20 columns: peak memory, progress, and how good the time estimates are.

    python benchmarks/own_data_million.py [--rows 1000000] [--epochs 20] [--clip norm:temp=auto] [--work build/million]

The table has five classes, ten informative numbers, five uninformative ones and four categories; 30 % of the labels are
moved to the next class. Prints one line of JSON: the peak memory of the process, the plan's time estimate, the estimate
a minute after training started and the time that it really took from there, and the accuracy on the true labels of
10,000 other rows.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd

CLASSES = 5


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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--clip", default="norm:temp=auto")
    parser.add_argument("--work", type=Path, default=Path("build/million"))
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    train, test, out = args.work / "train.csv", args.work / "test.csv", args.work / f"model-{args.epochs}"
    for file, rows, seed, rate in ((train, args.rows, 1, 0.3), (test, 10_000, 2, 0.0)):
        if not file.exists():
            table(rows, seed, rate).to_csv(file, index=False, float_format="%.6g")
    command = [sys.executable, "-m", "logitclip", "fit", train, "--label", "kind", "-o", out, "--epochs", args.epochs]
    command += ["--clip", args.clip]
    started, lines = time.monotonic(), []
    process = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        print(line, end="", file=sys.stderr)
        lines.append((time.monotonic() - started, line))
    if process.wait():
        raise SystemExit(process.returncode)
    total = time.monotonic() - started
    planned = next((at, seconds(line)) for at, line in lines if "will take about" in line)
    later = next(((at, seconds(line)) for at, line in lines if " left" in line and at > planned[0] + 60), None)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
    answer = subprocess.run(
        [sys.executable, "-m", "logitclip", "predict", out, test, "-o", args.work / "out.csv"],
        check=True,
        capture_output=True,
        text=True,
    )
    print(
        json.dumps(
            {
                "rows": args.rows,
                "epochs": args.epochs,
                "clip": args.clip,
                "peak_gigabytes": round(peak, 2),
                "seconds_to_the_plan": round(planned[0], 1),
                "planned_seconds": planned[1],
                "trained_seconds": round(total - planned[0], 1),
                "after_a_minute_left": None if later is None else later[1],
                "after_a_minute_really_left": None if later is None else round(total - later[0], 1),
                "on_true_labels": answer.stderr.splitlines()[-1].partition(" agree")[0].rpartition(" ")[2],
            }
        )
    )


if __name__ == "__main__":
    main()
