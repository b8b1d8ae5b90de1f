"""Does the clip help, cell by cell, and does the paper agree? Makes docs/evidence_table.md and results/*.csv from runs.

The runs come first, and take hours (`--scale mini` needs CIFAR under --root):

    logitclip sweep table1 --scale cpu --runs RUNS
    logitclip sweep table1 --scale mini --runs RUNS --root DATA
    python benchmarks/evidence.py --runs RUNS --root DATA table1:cpu table1:mini

For every cell: the accuracy without and with the clip, the difference with its standard error (of the differences
seed by seed), and the paper's difference. A cell *agrees* if the difference has the sign of the paper's and is at least
two standard errors from 0, *disagrees* if it has the other sign and is, and is *undecided* otherwise.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from logitclip.studies import sweeping
from logitclip.studies.recipe import load_recipe
from logitclip.studies.tables import Entry, Table, datasets_of, label, tabulate

ROOT = Path(__file__).parents[1]
FIELDS: tuple[str, ...] = (
    "recipe",
    "scale",
    "data",
    "cell",
    "clip",
    "runs",
    "without",
    "with_clip",
    "difference",
    "standard_error",
)
FIELDS += ("paper_without", "paper_with", "paper_difference", "verdict", "ids", "commits", "torch")


@dataclass(frozen=True)
class Comparison:
    """A cell without and with a clip."""

    cell: str
    clip: str
    without: Entry
    with_clip: Entry

    @property
    def differences(self) -> list[float]:
        """Seed by seed, with the clip minus without; none unless both have the same seeds."""
        if len(self.without.values) != len(self.with_clip.values):
            return []
        return [b - a for a, b in zip(self.without.values, self.with_clip.values, strict=True)]

    @property
    def difference(self) -> float:
        return statistics.fmean(self.with_clip.values) - statistics.fmean(self.without.values)

    @property
    def standard_error(self) -> float | None:
        n = len(self.differences)
        return statistics.stdev(self.differences) / math.sqrt(n) if n > 1 else None

    @property
    def paper(self) -> float | None:
        """The paper's difference."""
        theirs, ours = self.with_clip.published, self.without.published
        return None if theirs is None or ours is None else theirs - ours

    @property
    def verdict(self) -> str:
        if self.paper is None:
            return "not in the paper"
        if self.standard_error is None or abs(self.difference) < 2 * self.standard_error:
            return "undecided"
        return "agrees" if self.difference * self.paper > 0 else "disagrees"


def comparisons(table: Table) -> list[Comparison]:
    """Every cell with a clip beside the one without, in the order of the table."""
    accuracy = [entry for entry in table.entries.values() if entry.statistic == "last10_accuracy" and entry.values]
    rest = lambda entry: tuple((a, v) for a, v in entry.coordinates.items() if a != "clip")  # noqa: E731
    plain = {rest(entry): entry for entry in accuracy if entry.coordinates.get("clip") == "none"}
    return [
        Comparison(
            ", ".join(label(axis, value, table.bare) for axis, value in rest(entry)),
            str(entry.coordinates["clip"]),
            plain[rest(entry)],
            entry,
        )
        for entry in accuracy
        if entry.coordinates.get("clip", "none") != "none" and rest(entry) in plain
    ]


def record(name: str, scale: str, data: str, made_with: Any, one: Comparison) -> dict[str, Any]:
    rounded = lambda value: "" if value is None else round(value, 3)  # noqa: E731
    return {
        "recipe": name,
        "scale": scale,
        "data": data,
        "cell": one.cell,
        "clip": one.clip,
        "runs": len(one.with_clip.values),
        "without": rounded(one.without.mean),
        "with_clip": rounded(one.with_clip.mean),
        "difference": rounded(one.difference),
        "standard_error": rounded(one.standard_error),
        "paper_without": rounded(one.without.published),
        "paper_with": rounded(one.with_clip.published),
        "paper_difference": rounded(one.paper),
        "verdict": one.verdict,
        "ids": " ".join(one.without.ids + one.with_clip.ids),
        "commits": " ".join(made_with.get("commit", [])),
        "torch": " ".join(made_with.get("torch", [])),
    }


def markdown(title: str, rows: list[dict[str, Any]]) -> str:
    """A compact table: ours and the paper's side by side."""
    signed = lambda value: "–" if value == "" else f"{value:+.1f}".replace("-", "−")  # noqa: E731
    plain = lambda value: "–" if value == "" else f"{value:.1f}"  # noqa: E731
    lines = [
        f"### {title}\n",
        "| cell | runs | without | with | difference | paper: without | with | difference | verdict |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        error = "" if row["standard_error"] == "" else f" ± {row['standard_error']:.1f}"
        cells = [f"{row['cell']}, {label('clip', row['clip'])}", row["runs"], plain(row["without"])]
        cells += [plain(row["with_clip"]), signed(row["difference"]) + error, plain(row["paper_without"])]
        cells += [plain(row["paper_with"]), signed(row["paper_difference"]), row["verdict"]]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", help="recipe:scale, as in table1:cpu")
    parser.add_argument("--runs", default="runs", help="folder of the runs")
    parser.add_argument("--root", help="folder of the data")
    options = parser.parse_args()
    counts, parts = Counter[str](), []
    for given in options.recipes:
        name, _, scale = given.partition(":")
        recipe = load_recipe(name, scale or "full", runs=options.runs, root=options.root)
        table = tabulate(recipe, sweeping.collect(recipe))
        data = datasets_of(recipe.cells)
        rows = [record(recipe.name, recipe.scale, data, table.made_with, one) for one in comparisons(table)]
        counts.update(row["verdict"] for row in rows)
        with (ROOT / "results" / f"{recipe.name}_{recipe.scale}.csv").open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        parts.append(markdown(f"{recipe.paper or recipe.name}, {recipe.scale} scale, on {data}", rows))
    total = ", ".join(f"{verdict}: {count}" for verdict, count in sorted(counts.items()))
    command = "python benchmarks/evidence.py " + " ".join(options.recipes)
    head = f"<!-- made by: {command} -->\n\nOf {sum(counts.values())} cells, {total}.\n"
    (ROOT / "docs" / "evidence_table.md").write_text("\n".join([head, *parts]), encoding="utf-8")
    print(f"{sum(counts.values())} cells: {total}")


if __name__ == "__main__":
    main()
