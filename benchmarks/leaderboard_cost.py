"""The cost of each column of the leaderboard: how many runs and trials, and their seconds of training.

    python benchmarks/leaderboard_cost.py RUNS [SCALE]

RUNS is the folder of `logitclip sweep leaderboard --scale SCALE` (mini), whose report is results/leaderboard_mini.csv.
The result is results/leaderboard_cost.csv.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

from logitclip.studies.recipe import load_recipe

RESULTS = Path(__file__).parents[1] / "results"


def parts(spec: str) -> tuple[str, ...]:
    """The name and the knobs of a spec, whatever their order."""
    name, _, knobs = spec.partition(":")
    return name, *sorted(knobs.split(","))


def main() -> None:
    scale = sys.argv[2] if len(sys.argv) > 2 else "mini"
    columns = {
        (parts(cell.config.data), parts(cell.config.noise)): cell.coordinates["column"]
        for cell in load_recipe("leaderboard", scale).cells
    }
    with (RESULTS / f"leaderboard_{scale}.csv").open(encoding="utf-8", newline="") as stream:
        reported = {name for line in csv.DictReader(stream) for name in line["ids"].split()}
    cost = {column: {"runs": 0, "trials": 0, "seconds": 0.0} for column in columns.values()}
    for file in sorted(Path(sys.argv[1]).glob("*/result.json")):
        found = json.loads(file.read_text(encoding="utf-8"))
        config = found["config"]
        if not config["val"] and file.parent.name not in reported:  # of another choice, in an interrupted sweep
            continue
        column = cost[columns[parts(config["data"]), parts(config["noise"])]]
        column["trials" if config["val"] else "runs"] += 1
        column["seconds"] += found["seconds"]
    with (RESULTS / "leaderboard_cost.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["column", "runs", "trials", "seconds"])
        writer.writerows([name, c["runs"], c["trials"], round(c["seconds"], 1)] for name, c in cost.items())


if __name__ == "__main__":
    main()
