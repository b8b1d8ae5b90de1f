"""Write the curves of a recipe, mean and range over the seeds in each epoch: results/curves_RECIPE_SCALE.csv.

    logitclip sweep memorisation --scale mini --runs RUNS --root DATA
    python benchmarks/curves.py --runs RUNS --root DATA memorisation:mini
    python docs/pictures.py

The last command draws the pictures of the documentation, from the CSV files only.
"""

from __future__ import annotations

import csv

from evidence import RESULTS, named_recipes

from logitclip.studies import sweeping
from logitclip.studies.figures import curves

COLUMNS = ("panel", "series", "quantity", "epoch", "mean", "low", "high", "runs")


def main() -> None:
    for recipe in named_recipes(__doc__):
        found = curves(recipe, sweeping.collect(recipe)).values
        with (RESULTS / f"curves_{recipe.name}_{recipe.scale}.csv").open("w", encoding="utf-8", newline="") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow(COLUMNS)
            for point in found:
                if point["quantity"] != "norms":
                    point = {**point, "series": point["link"] or point["group"], "runs": point["n"]}
                    writer.writerow([point[column] for column in COLUMNS])
        print(f"{recipe.name}:{recipe.scale}: {len(found)} points")


if __name__ == "__main__":
    main()
