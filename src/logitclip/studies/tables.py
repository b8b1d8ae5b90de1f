"""A recipe's runs as one table: means over the seeds, beside the paper's numbers, and the words to label them with."""

from __future__ import annotations

import itertools
import re
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from logitclip.clip import CLIPS
from logitclip.run_folder import Failure, Result
from logitclip.studies.recipe import Cell, Recipe, load_recipe, published
from logitclip.studies.sweeping import Row

AVERAGED = ("seed", "noise_seed")  # the axes that a mean is taken over; all others make a cell
DASH = "–"


@dataclass(frozen=True)
class Kind:
    """How a statistic reads, and which way is better: 1 up, -1 down, 0 neither."""

    title: str
    better: int = 0
    decimals: int = 2


KINDS = {
    "last10_accuracy": Kind("test accuracy in %, mean of the last 10 epochs", 1),
    "best_accuracy": Kind("test accuracy in %, best epoch (chosen on the test set)", 1),
    "memorised": Kind("memorised wrong labels in %", -1),
    "recovered": Kind("recovered wrong labels in %", 1),
    "noise_rate": Kind("wrong labels in %"),
    "temp": Kind("temp chosen"),
    "seconds": Kind("seconds", decimals=1),
}


def kind_of(statistic: str) -> Kind:
    return KINDS.get(statistic) or Kind(statistic.replace("_", " "))


@dataclass(frozen=True)
class Entry:
    """One statistic of one cell: ours and, if there is one, the paper's."""

    coordinates: Mapping[str, Any]
    statistic: str
    values: tuple[float, ...] = ()  # one for each run
    ids: tuple[str, ...] = ()
    published: float | None = None
    published_std: float | None = None
    best: bool = False  # of the cells that differ in clip or penalty alone

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None

    @property
    def std(self) -> float | None:
        """Sample standard deviation; None for a single run."""
        return statistics.stdev(self.values) if self.n > 1 else None

    @property
    def difference(self) -> float | None:
        return None if self.mean is None or self.published is None else self.mean - self.published

    @property
    def kind(self) -> Kind:
        return kind_of(self.statistic)

    @property
    def ours(self) -> str:
        """`87.31 ± 0.42`, or a dash if there is no run."""
        return self._number(self.mean, self.std)

    @property
    def theirs(self) -> str:
        return self._number(self.published, self.published_std)

    @property
    def beside(self) -> str:
        """The paper's number with the difference, `86.73 ± 0.72 (+0.58)`, or a dash."""
        return self.theirs if self.difference is None else f"{self.theirs} ({self.gap})"

    @property
    def gap(self) -> str:
        """The difference with its sign, a real minus; a dash if there is none."""
        if self.difference is None:
            return DASH
        return f"{self.difference:+.{self.kind.decimals}f}".replace("-", "\N{MINUS SIGN}")

    def _number(self, mean: float | None, std: float | None) -> str:
        if mean is None:
            return DASH
        spread = "" if std is None or (std == 0 and self.statistic == "temp") else f" ± {std:.{self.kind.decimals}f}"
        return f"{mean:.{self.kind.decimals}f}{spread}"


Place = tuple[Any, ...]  # the values of the row axes, or of the column axes


@dataclass(frozen=True)
class Table:
    """Entries by row, column and statistic, and what has to be said about them."""

    recipe: Recipe
    row_axes: tuple[str, ...]
    col_axes: tuple[str, ...]
    rows: tuple[Place, ...]
    cols: tuple[Place, ...]
    statistics: tuple[str, ...]
    entries: Mapping[tuple[Place, Place, str], Entry]
    bare: Collection[str]  # axes whose values need no knobs to be told apart
    notes: tuple[str, ...] = ()  # sentences below the table
    warnings: tuple[str, ...] = ()
    made_with: Mapping[str, list[str]] = field(default_factory=dict)  # versions, devices and commits

    @property
    def columns(self) -> list[tuple[Place, str]]:
        return [(col, statistic) for col in self.cols for statistic in self.statistics]

    @property
    def compared(self) -> bool:
        """Whether there is any number of the paper to show."""
        return any(entry.published is not None for entry in self.entries.values())

    @property
    def most(self) -> int:
        """The runs of the cell that has most."""
        return max((entry.n for entry in self.entries.values()), default=0)

    def ours(self, entry: Entry) -> str:
        """Our number; a cell that has fewer runs than others says so."""
        return f"{entry.ours} (n={entry.n})" if 0 < entry.n < self.most else entry.ours

    def line(self, row: Place) -> list[Entry]:
        return [self.entries[row, col, statistic] for col, statistic in self.columns]

    def heads(self) -> list[str]:
        """What stands above each column."""
        several = len(self.statistics) > 1 or not self.col_axes
        return [
            ", ".join([*self._labels(self.col_axes, col), *([statistic_name(statistic)] if several else [])])
            for col, statistic in self.columns
        ]

    def col_heads(self) -> list[str]:
        return [", ".join(self._labels(self.col_axes, col)) for col in self.cols]

    def statistic_heads(self) -> list[str]:
        return [statistic_name(statistic) for statistic in self.statistics]

    @property
    def has_best(self) -> bool:
        return any(entry.best for entry in self.entries.values())

    def labels(self, row: Place, before: Place | None = None) -> list[str]:
        """What stands before a row; empty where the row before has the same, up to the first that differs."""
        texts = self._labels(self.row_axes, row)
        for i, (own, other) in enumerate(zip(row, before or (), strict=False)):
            if own != other or i == len(row) - 1:
                break
            texts[i] = ""
        return texts

    def _labels(self, axes: Sequence[str], place: Place) -> list[str]:
        return [label(axis, value, self.bare) for axis, value in zip(axes, place, strict=True)]

    @property
    def caption(self) -> str:
        """What the numbers are."""
        what = "; ".join(kind_of(statistic).title for statistic in self.statistics)
        spread = f" Mean ± sample standard deviation over {self.most} runs." if self.most > 1 else ""
        paper = " Second line: the paper's number, and ours minus the paper's." if self.compared else ""
        return f"{what[:1].upper()}{what[1:]}.{spread}{paper}"


# -- from rows to a table ----------------------------------------------------------------------------------------------


def tabulate(recipe: Recipe, rows: Sequence[Row]) -> Table:
    """The table of a recipe from `sweeping.collect(recipe)`: means over the seeds, and the paper's numbers beside them.

    Axes that the recipe names neither as rows nor as columns, other than the seeds, become rows.
    """
    if not rows:
        raise ValueError(f"The recipe {recipe.name} has no runs to report: logitclip figures {recipe.name} draws it.")
    axes = axes_of(rows)
    col_axes = tuple(axis for axis in recipe.cols if axis in axes)
    row_axes = tuple(dict.fromkeys([axis for axis in recipe.rows if axis in axes] + list(axes)))
    row_axes = tuple(axis for axis in row_axes if axis not in col_axes)
    places = [(_place(row, row_axes), _place(row, col_axes)) for row in rows]
    row_places, col_places = (tuple(dict.fromkeys(place)) for place in zip(*places, strict=True))
    paper = published(recipe.name) if recipe.paper else []
    entries = {}
    for at in itertools.product(row_places, col_places):
        mine = [row for row, place in zip(rows, places, strict=True) if place == at]
        coordinates = dict(zip(row_axes + col_axes, at[0] + at[1], strict=True))
        for statistic in recipe.statistics:
            pairs = [(_value(row, statistic), row.outcome.id) for row in mine if isinstance(row.outcome, Result)]
            pairs = [(value, id) for value, id in pairs if value is not None]
            theirs = _published(paper, coordinates, statistic) if mine else None
            entries[*at, statistic] = Entry(
                coordinates,
                statistic,
                tuple(value for value, _ in pairs),
                tuple(id for _, id in pairs),
                *((theirs.value, theirs.std) if theirs else (None, None)),
            )
    _mark_best(entries)
    table = Table(recipe, row_axes, col_axes, row_places, col_places, recipe.statistics, entries, bare_axes(axes))
    return replace(table, notes=_notes(table, rows), warnings=_warnings(rows), made_with=provenance(results_of(rows)))


def _place(row: Row, axes: Iterable[str]) -> Place:
    return tuple(row.cell.coordinates.get(axis) for axis in axes)


def _value(row: Row, statistic: str) -> float | None:
    if statistic == "temp":
        return None if row.config is None else CLIPS.parse(row.config.clip)[1].get("temp")
    return getattr(row.outcome, statistic)


def _published(paper: Iterable[Any], coordinates: Mapping[str, Any], statistic: str) -> Any:
    """The paper's number for these coordinates, if there is exactly one; what is no axis here is not compared."""
    found = [
        number
        for number in paper
        if number.statistic == statistic
        and all(str(coordinates[axis]) == value for axis, value in number.coordinates.items() if axis in coordinates)
    ]
    return found[0] if len(found) == 1 else None


def _mark_best(entries: dict[Any, Entry]) -> None:
    """Mark the better one of each pair with and without clip, or of more than two; never one alone, and no tie."""
    groups: dict[Any, list[Any]] = {}
    for key, entry in entries.items():
        if entry.kind.better and entry.mean is not None:
            others = tuple((a, v) for a, v in entry.coordinates.items() if a not in ("clip", "penalty"))
            groups.setdefault((others, entry.statistic), []).append(key)
    for keys in groups.values():
        best, *others = sorted(keys, key=lambda key: -entries[key].kind.better * (entries[key].mean or 0.0))
        if others and entries[best].mean != entries[others[0]].mean:
            entries[best] = replace(entries[best], best=True)


def _notes(table: Table, rows: Sequence[Row]) -> tuple[str, ...]:
    recipe = table.recipe
    notes = []
    if table.compared:
        here, there = datasets_of(recipe.cells), datasets_of(load_recipe(recipe.name, "full").cells)
        if recipe.scale == "full":
            notes.append("Full scale: the paper's settings; where it is silent, those in the recipe's comment.")
        else:
            theirs = "were made with more training" if here == there else f"are for {there}"
            notes.append(f"Scale {recipe.scale} on {here}: the paper's numbers {theirs}, and for orientation only.")
    failed = [(row, row.outcome) for row in rows if isinstance(row.outcome, Failure)]
    if failed:
        named = [
            f"{series(row.cell.coordinates, bare=table.bare)}: {failure.error.rstrip('.')}"
            for row, failure in failed[:5]
        ]
        more = [f"and {len(failed) - 5} more"] if len(failed) > 5 else []
        notes.append(f"{len(failed)} of {len(rows)} runs failed and are not in the means. {'; '.join(named + more)}.")
    missing = sum(row.outcome is None for row in rows)
    if missing:
        notes.append(f"{missing} of {len(rows)} runs have no result yet: {recipe.command()} makes them.")
    return tuple(notes)


def datasets_of(cells: Iterable[Cell]) -> str:
    return " and ".join(dict.fromkeys(cell.config.data.partition(":")[0] for cell in cells))


def _warnings(rows: Sequence[Row]) -> tuple[str, ...]:
    """What should be the same for all runs of a table, and is not."""
    results = results_of(rows)
    names = dict.fromkeys(name for result in results for name in result.versions)
    seen = {f"versions of {name}": Counter(result.versions.get(name, "none") for result in results) for name in names}
    seen["devices"] = Counter(result.device for result in results)
    return tuple(
        f"These runs mix {what}: {', '.join(f'{value} (runs: {n})' for value, n in sorted(counts.items()))}."
        for what, counts in seen.items()
        if len(counts) > 1
    )


def axes_of(rows: Iterable[Row]) -> dict[str, list[Any]]:
    """The axes that make cells, with their values in order; not those that a mean is taken over."""
    axes: dict[str, list[Any]] = {}
    for row in rows:
        for axis, value in row.cell.coordinates.items():
            if axis not in AVERAGED and value not in axes.setdefault(axis, []):
                axes[axis].append(value)
    return axes


def results_of(rows: Iterable[Row]) -> list[Result]:
    return [row.outcome for row in rows if isinstance(row.outcome, Result)]


# -- words -------------------------------------------------------------------------------------------------------------


def label(axis: str, value: Any, bare: Collection[str] = ()) -> str:
    """How a coordinate reads; the axes in `bare` are called by their names alone.

    >>> label("noise", "symmetric:rate=0.5"), label("clip", "norm:temp=1.5"), label("clip", "none")
    ('symmetric 50 %', 'temp=1.5', 'no clip')
    >>> label("loss", "gce:q=0.7"), label("loss", "gce:q=0.7", bare={"loss"})
    ('gce q=0.7', 'gce')
    """
    if axis in ("clip", "penalty", "noise") and value == "none":
        return f"no {axis}"
    if not isinstance(value, str):
        return DASH if value is None else f"{axis.replace('_', ' ')} {value}"
    name, _, knobs = value.partition(":")
    if not knobs or axis in bare:
        return name
    if name == "norm" and axis == "clip":
        return knobs
    knobs = re.sub(r"\brate=([\d.e-]+)", lambda match: f"{100 * float(match[1]):g} %", knobs)
    return f"{name} {knobs.replace(',', ', ')}"


def bare_axes(axes: Mapping[str, Sequence[Any]]) -> frozenset[str]:
    """The axes that need no knobs to be told apart: losses and methods that differ in their names."""
    names = {axis: [str(value).partition(":")[0] for value in axes.get(axis, ())] for axis in ("loss", "method")}
    return frozenset(axis for axis, found in names.items() if len(set(found)) == len(found))


def series(coordinates: Mapping[str, Any], without: Collection[str] = (), bare: Collection[str] = ()) -> str:
    """Coordinates in one line: what is switched off is not said.

    >>> series({"loss": "ce", "clip": "none", "noise": "pair:rate=0.2"})
    'ce, pair 20 %'
    """
    shown = {axis: value for axis, value in coordinates.items() if axis not in without}
    on = [label(axis, value, bare) for axis, value in shown.items() if value != "none"]
    return ", ".join(on or [label(axis, value, bare) for axis, value in shown.items()])


def statistic_name(statistic: str) -> str:
    return statistic.replace("last10_", "").replace("_", " ")


def provenance(results: Sequence[Result]) -> dict[str, list[str]]:
    """What the runs were made with."""
    names = dict.fromkeys(name for result in results for name in result.versions)
    seen = {name: [result.versions.get(name) for result in results] for name in names}
    seen["device"] = [result.device for result in results]
    seen["commit"] = [result.commit and result.commit[:12] for result in results]
    return {name: [str(v) for v in dict.fromkeys(values) if v is not None] or [DASH] for name, values in seen.items()}
