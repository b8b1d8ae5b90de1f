"""Write the curves of a recipe, mean and range over the seeds in each epoch: results/curves_RECIPE_SCALE.csv.

    logitclip sweep memorisation --scale mini --runs RUNS --root DATA
    python benchmarks/curves.py --runs RUNS --root DATA memorisation:mini
    python docs/pictures.py

The last command draws the pictures of the documentation, from the CSV files only.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from logitclip.runs.config import plugins_ignored
from logitclip.studies import sweeping
from logitclip.studies.figures import curves
from logitclip.studies.manifest import as_swept
from logitclip.studies.recipe import load_recipe

RESULTS = Path(__file__).parents[1] / "results"
COLUMNS = ("panel", "series", "quantity", "epoch", "mean", "low", "high", "runs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", help="recipe:scale, as in memorisation:mini, or a file")
    parser.add_argument("--runs", default="runs", help="folder of the runs")
    parser.add_argument("--root", help="folder of the data")
    options = parser.parse_args()
    for given in options.recipes:
        name, _, scale = given.partition(":")
        with plugins_ignored():
            recipe = as_swept(load_recipe(name, scale or "full", runs=options.runs, root=options.root))
            found = curves(recipe, sweeping.collect(recipe)).values
        with (RESULTS / f"curves_{recipe.name}_{recipe.scale}.csv").open("w", encoding="utf-8", newline="") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow(COLUMNS)
            for point in found:
                if point["quantity"] != "norms":
                    point = {**point, "series": point["link"] or point["group"], "runs": point["n"]}
                    writer.writerow([point[column] for column in COLUMNS])
        print(f"{given}: {len(found)} points")


if __name__ == "__main__":
    main()
