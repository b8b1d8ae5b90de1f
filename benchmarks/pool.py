"""Speed-up of the local pool over sequential runs, and its scheduling overhead.

    python benchmarks/pool.py [--runs 24] [--jobs 2]

Every seed trains on digits twice, once inline and once in the pool, in separate folders. The seeds are split into two
halves, and inline and pool alternate. The gain is the inline time divided by the pool time, including the start of its
processes. The scheduling share is the part of the workers' time, from the first start of a run to the last end, in
which they do not train: they choose, read back, send or wait.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from logitclip.runs.config import RunConfig
from logitclip.runs.results import Result, find_outcome
from logitclip.studies import executors
from logitclip.studies.listener import Listener


def measure(executor: str, jobs: int, seeds: list[int], folder: str) -> tuple[float, float, float]:
    """Return the total seconds, the seconds of training, and the workers' time from the first start to the last end."""
    configs = [RunConfig(noise="symmetric:rate=0.5", clip="norm:temp=1.5", seed=seed, runs=folder) for seed in seeds]
    times: list[float] = []

    class Clock(Listener):
        def on_start(self, config: RunConfig, row: dict[str, Any] | None) -> None:
            times.append(time.monotonic())

        def on_done(self, config: RunConfig, result: Result) -> None:
            times.append(time.monotonic())

    begin = time.monotonic()
    executors.execute(configs, executor=executor, jobs=jobs, listener=Clock())
    whole = time.monotonic() - begin
    results = [find_outcome(config) for config in configs]
    training = sum(result.seconds for result in results if isinstance(result, Result))
    return whole, training, jobs * (times[-1] - times[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=24, help="runs of each kind")
    parser.add_argument("--jobs", type=int, default=2, help="workers of the pool")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    sums = {"inline": [0.0, 0.0, 0.0], "local": [0.0, 0.0, 0.0]}
    halves = [list(range(options.runs // 2)), list(range(options.runs // 2, options.runs))]
    with tempfile.TemporaryDirectory() as folder:
        executors.execute([RunConfig(epochs=1, runs=folder)], executor="inline")  # import everything before measuring
        for seeds in halves:
            for executor, jobs in (("inline", 1), ("local", options.jobs)):
                found = measure(executor, jobs, seeds, f"{folder}/{executor}")
                sums[executor] = [a + b for a, b in zip(sums[executor], found, strict=True)]
    gain = sums["inline"][0] / sums["local"][0]
    idle = 1 - sums["local"][1] / sums["local"][2]
    row = {
        "runs": options.runs,
        "jobs": options.jobs,
        "cores": os.cpu_count(),
        "inline_seconds": round(sums["inline"][0], 1),
        "pool_seconds": round(sums["local"][0], 1),
        "gain": round(gain, 3),
        "scheduling_share": round(idle, 4),
        "seconds_per_run_inline": round(sums["inline"][1] / options.runs, 2),
        "seconds_per_run_pool": round(sums["local"][1] / options.runs, 2),
    }
    table = Table(*row)
    table.add_row(*map(str, row.values()))
    Console(width=150).print(table)
    path = options.out / f"pool-cpu-{platform.machine()}-torch{torch.__version__}.csv"
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(row))
        writer.writeheader()
        writer.writerow(row)
    print(path)


if __name__ == "__main__":
    main()
