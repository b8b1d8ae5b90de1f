"""Two numbers beside the clip: stopping early, and the ceiling, true labels. Writes results/early_stopping.csv.

    python benchmarks/early_stopping.py --root DATA --runs RUNS table1:mini table1:cpu benchmarks/real_noise.toml

Every cell of results/RECIPE_SCALE.csv is trained twice more without the clip, with each of its seeds: with a tenth of
its noisy labels held out, and on true labels. A line has the accuracies on true test labels:

- `early`: in the epoch with the highest accuracy on the held-out noisy labels (the first, if there are several);
- `oracle`: in the best epoch of the same runs, which needs the true test labels to be found;
- `true_labels`: of the runs on true labels, the mean of their last 10 epochs, as in all tables.

For the recipe `leaderboard` only CE is trained, without label smoothing, and `variant` is the column. Finished runs are
not repeated. Lines of other cells stay in the file.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evidence import AXES, COMPARED, RESULTS, read_lines

from logitclip.runs.config import RunConfig
from logitclip.runs.results import METRICS, Result
from logitclip.studies import sweeping
from logitclip.studies.recipe import Cell, Recipe, load_recipe
from logitclip.studies.tables import datasets_of, provenance, results_of

OUT = RESULTS / "early_stopping.csv"
HELD_OUT = 0.1
NAMES = ("recipe", "scale", *(axis for axis in AXES if axis != "clip"))


def on_true_labels(config: RunConfig) -> RunConfig:
    """The same training on true labels: without made noise, or with the column that has them."""
    data = config.data.replace("label=label,clean_label=true_label", "label=true_label")
    return replace(config, noise="none", data=data)


def rivals(recipe: Recipe, done: Collection[tuple[str, ...]] = ()) -> Recipe:
    """The cells without the clip that have a line in the evidence, each as two runs; without those in `done`."""
    rows = read_lines(RESULTS / f"{recipe.name}_{recipe.scale}.csv")
    if recipe.name == "leaderboard":
        rows = [{"loss": "ce", "variant": row["column"]} for row in rows]
        recipe = replace(recipe, cells=tuple(map(without_smoothing, recipe.cells)))
    wanted = {at_names(row, recipe) for row in rows}.difference(done)
    by_variant = COMPARED.get(recipe.name, ("clip", ""))[0] == "variant"
    axis, plain = ("variant", "CE") if by_variant else ("clip", "none")
    cells = []
    for cell in recipe.cells:
        if cell.coordinates.get(axis) == plain and place(recipe, cell) in wanted:
            for rival, config in (
                ("early", replace(cell.config, val=HELD_OUT, measure_every=min(cell.config.measure_every, 1))),
                ("true", on_true_labels(cell.config)),
            ):
                cells.append(Cell({**cell.coordinates, "rival": rival}, config, cell.own_noise))
    return replace(recipe, name=f"{recipe.name}_early", cells=tuple(cells), digest="")


def without_smoothing(cell: Cell) -> Cell:
    """The cell with CE instead of CE with a tuned label smoothing."""
    if cell.coordinates["loss"] != "ce:label_smoothing=auto":
        return cell
    return replace(cell, coordinates={**cell.coordinates, "loss": "ce"}, config=replace(cell.config, loss="ce"))


def place(recipe: Recipe, cell: Cell) -> tuple[str, ...]:
    at = cell.coordinates
    return at_names({**at, "variant": at.get("variant") or at.get("column", "")}, recipe)


def at_names(at: Mapping[str, Any], recipe: Recipe) -> tuple[str, ...]:
    """The place of a cell or of a line, without the clip and the seed."""
    data = "" if recipe.name == "leaderboard" else datasets_of(recipe.cells)
    return tuple(str(at.get(axis) or (data if axis == "data" else "")) for axis in NAMES[2:])


def stopped(folder: Path) -> float:
    """The test accuracy in the epoch that is best on the held-out labels."""
    rows = [json.loads(line) for line in (folder / METRICS).read_text(encoding="utf-8").splitlines()]
    return max(rows, key=lambda row: row["val_accuracy"])["test_accuracy"]


def lines_of(name: str, recipe: Recipe, rows: Sequence[sweeping.CellOutcome]) -> list[dict[str, Any]]:
    made_with = provenance(results_of(rows))
    found: dict[tuple[str, ...], dict[str, list[tuple[RunConfig, Result]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if isinstance(row.outcome, Result) and row.config is not None:
            found[place(recipe, row.cell)][str(row.cell.coordinates["rival"])].append((row.config, row.outcome))
    lines = []
    for at, runs in found.items():
        early, true = runs["early"], [result for _, result in runs["true"]]
        if not early or not true:
            continue
        results = [result for _, result in early]
        numbers = {
            "early": [stopped(Path(config.runs) / result.id) for config, result in early],
            "oracle": [result.best_accuracy for result in results],
            "true_labels": [result.last10_accuracy for result in true],
        }
        lines.append(
            dict(zip(NAMES, (name, recipe.scale, *at), strict=True))
            | {"runs": len(early)}
            | {key: round(statistics.fmean(values), 3) for key, values in numbers.items()}
            | {"ids": " ".join(result.id for result in [*results, *true])}
            | {key: " ".join(made_with.get(key, [])) for key in ("commit", "torch")}
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", help="recipe:scale, as in table1:cpu, or a file")
    parser.add_argument("--runs", default="runs", help="folder of the runs")
    parser.add_argument("--root", help="folder of the data")
    parser.add_argument("--plugin", action="append", default=[], help="a plugin that a recipe names")
    parser.add_argument("--read", action="store_true", help="train nothing: take the runs that are finished")
    parser.add_argument("--missing", action="store_true", help="train only the cells that have no line yet")
    options = parser.parse_args()
    for given in options.recipes:
        name, _, scale = given.partition(":")
        recipe = load_recipe(name, scale or "full", runs=options.runs, root=options.root, plugin=options.plugin)
        rows = [row for row in read_lines(OUT) if (row["recipe"], row["scale"]) == (recipe.name, recipe.scale)]
        done = {tuple(row[name] for name in NAMES[2:]) for row in rows}
        both = rivals(recipe, done if options.missing else ())
        lines = lines_of(recipe.name, recipe, sweeping.collect(both) if options.read else sweeping.sweep(both, jobs=1))
        found = {tuple(line[name] for name in NAMES) for line in lines}
        others = [row for row in read_lines(OUT) if tuple(row[name] for name in NAMES) not in found]
        if lines:
            with OUT.open("w", encoding="utf-8", newline="") as stream:
                writer = csv.DictWriter(stream, list(lines[0]), lineterminator="\n")
                writer.writeheader()
                writer.writerows([*others, *lines])
        print(f"{given}: {len(lines)} cells", flush=True)


if __name__ == "__main__":
    main()
