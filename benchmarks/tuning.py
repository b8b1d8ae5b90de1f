"""`temp=auto` against the paper's grid: the values they choose, the accuracy after retraining, and the cost.

    python benchmarks/tuning.py [--scale digits] [--runs DIR] [--jobs 2]

Runs benchmarks/tuning.toml and writes results/tuning.csv. If it is interrupted, repeat the command to continue; the
scale `digits` leaves out Fashion-MNIST and three seeds. The CSV has, for each setting and noise, the mean test accuracy
over the seeds of no clip, temp 1, the grid and auto, and the difference between auto and the grid, paired by seed. The
cost is the number of examples that the trials train on, summed over their epochs, relative to the grid. It excludes
retraining, which costs the same for both.
"""

from __future__ import annotations

import argparse
import csv
import io
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from logitclip.files import write
from logitclip.runs.config import RunConfig
from logitclip.runs.results import Result, find_outcome
from logitclip.studies import sweeping, tuning
from logitclip.studies.listener import Listener
from logitclip.studies.recipe import Cell, load_recipe

HERE = Path(__file__).parent
NAMES = {"none": "none", "norm:temp=1": "temp=1", "norm:temp=grid": "grid", "norm:temp=auto": "auto"}


def cost(cell: Cell) -> float:
    """Sum epochs times the share of examples trained on over all trials of a tuned cell."""
    search = tuning.search_for(cell.config)
    values = tuning.scores_of_trials(cell.config, find_outcome, search)
    trials = [tuning.make_trial(cell.config, search, value) for value in values]
    return sum((1 - trial.val) * (trial.resolve().epochs or 0) for trial in trials)


def compare(rows: list[sweeping.CellOutcome]) -> list[dict[str, Any]]:
    """Return a row for each setting and noise whose runs are done."""
    cells: dict[tuple[str, str], dict[str, dict[int, tuple[float, str, float]]]] = {}
    for row in rows:
        at: Mapping[str, Any] = row.cell.coordinates
        if isinstance(row.outcome, Result):
            spent = cost(row.cell) if tuning.is_tuned(row.cell.config) else 0.0
            found = row.outcome.last10_accuracy, row.outcome.clip, spent
            cells.setdefault((at["setting"], at["noise"]), {}).setdefault(NAMES[at["clip"]], {})[at["seed"]] = found
    lines = []
    for (setting, noise), found in cells.items():
        seeds = sorted(found.get("auto", {}).keys() & found.get("grid", {}).keys())
        if not seeds:
            continue
        means = {
            name: statistics.mean(by_seed[seed][0] for seed in seeds)
            for name in NAMES.values()
            if (by_seed := found.get(name, {})).keys() >= set(seeds)
        }
        gaps = [found["auto"][seed][0] - found["grid"][seed][0] for seed in seeds]
        lines.append(
            {
                "setting": setting,
                "noise": noise,
                "seeds": len(seeds),
                **{name: round(means[name], 2) if name in means else "" for name in NAMES.values()},
                "auto_less_grid": round(statistics.mean(gaps), 2),
                "std_of_difference": round(statistics.stdev(gaps), 2) if len(gaps) > 1 else "",
                "auto_less_temp=1": round(means["auto"] - means["temp=1"], 2) if "temp=1" in means else "",
                "cost_of_auto": round(
                    sum(found["auto"][s][2] for s in seeds) / sum(found["grid"][s][2] for s in seeds), 3
                ),
                "temps_of_grid": " ".join(found["grid"][seed][1].rpartition("=")[2] for seed in seeds),
                "temps_of_auto": " ".join(found["auto"][seed][1].rpartition("=")[2] for seed in seeds),
            }
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--scale", default="full", help="full, digits (two seeds, without Fashion-MNIST) or smoke")
    parser.add_argument("--runs", default="runs", help="folder of the runs")
    parser.add_argument("--jobs", type=int, help="runs at a time")
    parser.add_argument("--out", type=Path, default=HERE.parent / "results" / "tuning.csv")
    options = parser.parse_args()
    recipe = load_recipe(str(HERE / "tuning.toml"), options.scale, runs=options.runs)
    console = Console()

    class Count(Listener):
        done = 0

        def on_done(self, config: RunConfig, result: Result) -> None:
            self.done += 1
            if self.done % 20 == 0:
                console.print(f"{self.done} runs done")

    rows = sweeping.sweep(recipe, jobs=options.jobs, listener=Count())
    lines = compare(rows)
    if not lines:
        raise SystemExit("No setting is done.")
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    write(options.out, text.getvalue().encode())
    table = Table(*lines[0])
    for line in lines:
        table.add_row(*map(str, line.values()))
    console.print(table)
    gaps = [line["auto_less_grid"] for line in lines]
    console.print(f"auto minus grid: mean {statistics.mean(gaps):+.2f}, worst {min(gaps):+.2f}, over {len(gaps)} cells")


if __name__ == "__main__":
    main()
