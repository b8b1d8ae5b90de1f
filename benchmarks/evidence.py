"""Compare each cell of a recipe with and without the clip, and with the paper: writes results/RECIPE_SCALE.csv.

This reads finished runs, so start those first; they take hours. The mini scale needs CIFAR under --root:

    logitclip sweep table1 --scale cpu --runs RUNS
    logitclip sweep table1 --scale mini --runs RUNS --root DATA
    python benchmarks/evidence.py --runs RUNS --root DATA table1:cpu table1:mini
    python docs/generate.py

The last command updates the tables of docs/evidence.md from the CSV files. A line whose runs are not in the folder
stays in its file, so that cells can be run on several machines, one after another.

Each row compares a clip with no clip, or with what the paper compares it with, all other settings equal. It has
the accuracies on true test labels (mean of the last 10 epochs), their difference, its standard error (paired by seed),
the share of wrong labels that each run memorised, and the paper's accuracies. A cell is *undecided* if the difference
is at most two standard errors from 0, or if there is only one seed. Otherwise it *agrees* with the paper if both
differences have the same sign, and *disagrees* if not. Table 8 claims a size, which clips cost accuracy and which cost
next to nothing: a cell agrees if its cost is on the paper's side of LARGE points, by two standard errors, disagrees if
it is on the other side, and is undecided in between. The digits of Table 9 are compared with CIFAR-10. CLAIMS has
what the paper's text says where it has no number.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from logitclip.runs.plugins import plugins_ignored
from logitclip.runs.results import Result
from logitclip.studies import sweeping
from logitclip.studies.manifest import as_swept
from logitclip.studies.recipe import Recipe, load_recipe, read_published
from logitclip.studies.tables import datasets_of, find_published, provenance, results_of

RESULTS = Path(__file__).parents[1] / "results"
AXES = ("model", "method", "loss", "data", "noise", "clip", "variant")
COMPARED = {  # the axis and its value that the others are compared with, where that is not "no clip"
    "table5": ("clip", "logit_norm:temperature=grid"),
    "figure3": ("variant", "LC-V"),
    "figure4": ("variant", "+Reg"),
    "record": ("variant", "reciprocal"),
}
LARGE = 5.0  # points: a larger cost counts as one. The paper's costs in Table 8 are at most 2.8, or at least 8
SIZES = {"table8": -LARGE}  # recipes whose claim is about a size, not a sign
CLAIMS = {  # the sign of a difference where the paper has no number: for its figures and for other networks
    "table3": {"norm:temp=grid": 1},
    "figure3": {"ReLU6": -1, "LC-N": 1},
    "figure4": {"CE": -1, "+LC": 1},
}


def pairs(
    rows: Sequence[sweeping.CellOutcome], axis: str, base: Any
) -> dict[tuple[Any, ...], list[tuple[Result, Result]]]:
    """Pair the runs of each cell with those that have `axis` at `base`, seed by seed."""
    finished = [(row.cell.coordinates, row.outcome) for row in rows if isinstance(row.outcome, Result)]
    rest = lambda at: tuple((name, value) for name, value in at.items() if name != axis)  # noqa: E731
    plain = {rest(at): result for at, result in finished if at[axis] == base}
    found: dict[tuple[Any, ...], list[tuple[Result, Result]]] = {}
    for at, result in finished:
        if at[axis] != base and rest(at) in plain:
            cell = tuple((name, value) for name, value in at.items() if name != "seed")
            found.setdefault(cell, []).append((plain[rest(at)], result))
    return found


def verdict(difference: float, error: float | None, paper: float | None, *, least: float = 0.0) -> str:
    """Compare the difference with the paper's, given its standard error: are both on the same side of `least`?

    >>> verdict(5.0, 1.0, 8.0), verdict(-5.0, 1.0, 8.0), verdict(1.0, 1.0, 8.0), verdict(5.0, None, 8.0)
    ('agrees', 'disagrees', 'undecided', 'undecided')
    >>> verdict(-85.0, 3.0, -0.1, least=-5.0), verdict(0.3, 0.1, -0.1, least=-5.0), verdict(-9.0, 3.0, -0.1, least=-5.0)
    ('disagrees', 'agrees', 'undecided')
    """
    if paper is None:
        return "not in the paper"
    if error is None or abs(difference - least) <= 2 * error:
        return "undecided"
    return "agrees" if (difference - least) * (paper - least) > 0 else "disagrees"


def paper_differences(recipe: Recipe, axis: str, base: Any) -> dict[tuple[Any, ...], tuple[float, float]]:
    """Return the paper's accuracies of each cell: of the base, and of the cell."""
    data = {"data": "cifar10"} if datasets_of(recipe.cells) == "digits" else {}
    numbers, found = read_published(recipe.name), {}
    for cell in recipe.cells:
        at = {name: value for name, value in cell.coordinates.items() if name != "seed"}
        known = at | (data if "data" in at else {})
        theirs = [find_published(numbers, place, "last10_accuracy") for place in ({**known, axis: base}, known)]
        if theirs[0] and theirs[1]:
            found[tuple(at.items())] = theirs[0].value, theirs[1].value
    return found


def mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def records(recipe: Recipe) -> list[dict[str, Any]]:
    rows = sweeping.collect(recipe)
    made_with = provenance(results_of(rows))
    found = []
    axis, base = COMPARED.get(recipe.name, ("clip", "none"))
    paper = paper_differences(recipe, axis, base)
    for cell, runs in pairs(rows, axis, base).items():
        at = dict(cell)
        theirs = paper.get(cell)
        gap = theirs[1] - theirs[0] if theirs else None
        claim = gap if gap is not None else CLAIMS.get(recipe.name, {}).get(at[axis])
        gains = [clipped.last10_accuracy - plain.last10_accuracy for plain, clipped in runs]
        error = statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else None
        numbers = {
            "without": mean(plain.last10_accuracy for plain, _ in runs),
            "with_clip": mean(clipped.last10_accuracy for _, clipped in runs),
            "difference": mean(gains),
            "standard_error": error,
            "memorised_without": mean(plain.memorised for plain, _ in runs),
            "memorised_with": mean(clipped.memorised for _, clipped in runs),
            "best_epoch_without": mean(plain.best_accuracy for plain, _ in runs),
            "paper_without": theirs[0] if theirs else None,
            "paper_with": theirs[1] if theirs else None,
            "paper_difference": gap,
        }
        found.append(
            {"recipe": recipe.name, "scale": recipe.scale}
            | {name: at.get(name, "") for name in AXES}
            | {"data": at.get("data") or datasets_of(recipe.cells)}
            | {"compared_with": base}
            | {"chosen": " ".join(sorted({clipped.clip for _, clipped in runs})), "runs": len(runs)}
            | {name: "" if value is None else round(value, 3) for name, value in numbers.items()}
            | {"claim": "" if claim is None else "higher" if claim > 0 else "lower"}
            | {"verdict": verdict(statistics.fmean(gains), error, claim, least=SIZES.get(recipe.name, 0.0))}
            | {"ids": " ".join(result.id for pair in runs for result in pair)}
            | {name: " ".join(made_with.get(name, [])) for name in ("commit", "torch")}
        )
    return found


def named_recipes(description: str | None) -> Iterator[Recipe]:
    """Yield the recipes that the command line names, as they were swept; their plugins are not imported."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", help="recipe:scale, as in table1:cpu, or a file")
    parser.add_argument("--runs", default="runs", help="folder of the runs")
    parser.add_argument("--root", help="folder of the data")
    options = parser.parse_args()
    for given in options.recipes:
        name, _, scale = given.partition(":")
        with plugins_ignored():
            yield as_swept(load_recipe(name, scale or "full", runs=options.runs, root=options.root))


def merge(recipe: Recipe, found: Sequence[dict[str, Any]], before: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines that were found, and those of before for other cells of the recipe, in the recipe's order."""
    place = lambda line: tuple(str(line[axis]) for axis in AXES)  # noqa: E731
    lines = {place(line): line for line in [*before, *found]}
    data = datasets_of(recipe.cells)
    wanted = (tuple(str({"data": data, **cell.coordinates}.get(axis, "")) for axis in AXES) for cell in recipe.cells)
    return [lines[at] for at in dict.fromkeys(wanted) if at in lines]


def read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def main() -> None:
    for recipe in named_recipes(__doc__):
        path = RESULTS / f"{recipe.name}_{recipe.scale}.csv"
        found = merge(recipe, records(recipe), read_lines(path))
        if not found:
            print(f"{recipe.name}:{recipe.scale}: no pair of runs with and without a clip has finished")
            continue
        with path.open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, list(found[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(found)
        counts = Counter(record["verdict"] for record in found)
        print(
            f"{recipe.name}:{recipe.scale}: {len(found)} cells; "
            + ", ".join(f"{word} {count}" for word, count in sorted(counts.items()))
        )


if __name__ == "__main__":
    main()
