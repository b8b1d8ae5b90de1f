"""The results of a recipe as one table: means over the seeds, the paper's numbers, titles and labels."""

from __future__ import annotations

import itertools
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from logitclip.data.dataset import trusted_test
from logitclip.runs.config import UNCOUNTED, words_to_tune
from logitclip.runs.results import Failure, Result
from logitclip.studies.measures import LEVEL, MEASURES, Measure, half_width, value_of
from logitclip.studies.ranking import describe_ranks, rank_runs
from logitclip.studies.recipe import Cell, Coordinates, Published, Recipe, Value, load_recipe, read_published
from logitclip.studies.sweeping import CellOutcome

ABBREVIATIONS = {  # of the paper
    "LC-V": "clip by value (LC-V)",
    "LC-N": "clip by norm (LC-N)",
    "+Reg": "penalty on the norm (+Reg)",
    "+LC": "clip (+LC)",
}
AVERAGED = ("seed", "noise_seed")  # axes to average over; all others make a cell
DASH = "–"
SMOKE_TEST = "A smoke test: it shows that everything runs. Too little is trained to say what the clip does."


@dataclass(frozen=True)
class Entry:
    """One statistic of one cell: our number and the paper's, if it has one."""

    coordinates: Coordinates
    statistic: str
    values: tuple[float, ...] = ()  # one for each run
    ids: tuple[str, ...] = ()
    published: float | None = None
    published_std: float | None = None
    best: bool = False  # of the cells that differ only in clip or penalty
    comparable: bool = True  # the paper's number is for the same data
    chosen: str = ""  # the clip or penalty of the runs, if the row label does not show it
    diverged: bool = False  # a run of the cell has no number, and would have none again

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
        known = self.mean is not None and self.published is not None and self.comparable
        return self.mean - self.published if known else None  # type: ignore[operator]

    @property
    def measure(self) -> Measure:
        return MEASURES[self.statistic]

    @property
    def ours(self) -> str:
        """`87.31 ± 0.42`, or a dash if there is no run."""
        return self._format(self.mean, self.half_width if self.statistic == "gain" else self.std)

    @property
    def theirs(self) -> str:
        return self._format(self.published, self.published_std)

    @property
    def beside(self) -> str:
        """The paper's number with the difference, `(86.73 ± 0.72; +0.58)`; empty if there is none."""
        if self.published is None:
            return ""
        return f"({self.theirs})" if self.difference is None else f"({self.theirs}; {self.gap})"

    @property
    def gap(self) -> str:
        """The difference with its sign, a real minus; a dash if there is none."""
        if self.difference is None:
            return DASH
        return f"{self.difference:+.{self.measure.decimals}f}".replace("-", "\N{MINUS SIGN}")

    @property
    def half_width(self) -> float | None:
        """Half of the width of the confidence interval of a gain; None for other statistics and for a single run."""
        return half_width(self.values) if self.statistic == "gain" else None

    def _format(self, mean: float | None, std: float | None) -> str:
        if mean is None:
            return DASH
        spread = "" if std is None or (std == 0 and self.statistic == "temp") else f" ± {std:.{self.measure.decimals}f}"
        sign = "+" if self.statistic == "gain" else ""
        return f"{mean:{sign}.{self.measure.decimals}f}{spread}".replace("-", "\N{MINUS SIGN}")


K = TypeVar("K")
AxisValues = tuple[Value, ...]  # the values of the row axes, or of the column axes
Point = tuple[tuple[str, Value], ...]  # coordinates, as a key


@dataclass(frozen=True)
class ResultTable:
    """Entries by row, column and statistic, with notes and warnings."""

    recipe: Recipe
    row_axes: tuple[str, ...]
    col_axes: tuple[str, ...]
    rows: tuple[AxisValues, ...]
    cols: tuple[AxisValues, ...]
    statistics: tuple[str, ...]
    entries: Mapping[tuple[AxisValues, AxisValues, str], Entry]
    bare: Collection[str]  # axes whose values are distinct without their knobs
    headline: str = ""  # the effect of the clip in a sentence
    notes: tuple[str, ...] = ()  # sentences below the table
    warnings: tuple[str, ...] = ()
    made_with: Mapping[str, list[str]] = field(default_factory=dict)  # versions, devices and commits

    @property
    def columns(self) -> list[tuple[AxisValues, str]]:
        return [(col, statistic) for col in self.cols for statistic in self.statistics]

    @property
    def compared(self) -> bool:
        """Whether the table has any number of the paper."""
        return any(entry.published is not None for entry in self.entries.values())

    @property
    def most(self) -> int:
        """The largest number of runs in a cell."""
        return max((entry.n for entry in self.entries.values()), default=0)

    def ours(self, entry: Entry) -> str:
        """Return our number, with the number of runs if other cells have more."""
        return f"{entry.ours} (n={entry.n})" if 0 < entry.n < self.most else entry.ours

    def details(self, entry: Entry) -> list[str]:
        """Return the text below our number: the paper's number and, once per cell, the chosen clip."""
        chosen = entry.chosen if entry.statistic == self.statistics[0] and entry.n else ""
        return [text for text in (entry.beside, chosen) if text]

    def line(self, row: AxisValues) -> list[Entry]:
        return [self.entries[row, col, statistic] for col, statistic in self.columns]

    def heads(self) -> list[str]:
        """Return the head of each column."""
        several = len(self.statistics) > 1 or not self.col_axes
        return [
            ", ".join([*self._labels(self.col_axes, col), *([statistic_name(statistic)] if several else [])])
            for col, statistic in self.columns
        ]

    def col_heads(self) -> list[str]:
        return [", ".join(self._labels(self.col_axes, col)) for col in self.cols]

    def statistic_heads(self) -> list[str]:
        return [statistic_name(statistic) for statistic in self.statistics]

    def labels(self, row: AxisValues, before: AxisValues | None = None) -> list[str]:
        """Return the labels of a row; empty where the row above has the same label, up to the first difference."""
        texts = self._labels(self.row_axes, row)
        for i, (own, other) in enumerate(zip(row, before or (), strict=False)):
            if own != other or i == len(row) - 1:
                break
            texts[i] = ""
        return texts

    def _labels(self, axes: Sequence[str], place: AxisValues) -> list[str]:
        return [label(axis, value, self.bare) for axis, value in zip(axes, place, strict=True)]

    @property
    def caption(self) -> str:
        """Return the caption, which explains the numbers."""
        return self.explain("Bold")

    def explain(self, best: str) -> str:
        """Return the caption of a table in which the best numbers are marked by what `best` names."""
        what = "; ".join(MEASURES[statistic].title for statistic in self.statistics)
        spread = f" Mean ± sample standard deviation over {self.most} runs." if self.most > 1 else ""
        if spread and "gain" in self.statistics:
            spread += f" Gain ± half of its {100 * (1 - LEVEL):g} % confidence interval (Student's t, paired by seed)."
        marked = any(entry.best for entry in self.entries.values())
        bold = f" {best}: best within each group that differs only in the clip or the penalty." if marked else ""
        paper = " In parentheses: the paper's number." if self.compared else ""
        if any(entry.difference is not None for entry in self.entries.values()):
            paper = " In parentheses: the paper's number, and ours minus the paper's."
        return f"{what[:1].upper()}{what[1:]}.{spread}{bold}{paper}"


# -- from rows to a table ----------------------------------------------------------------------------------------------


def tabulate(recipe: Recipe, rows: Sequence[CellOutcome]) -> ResultTable:
    """Return the table of a recipe from `sweeping.collect(recipe)`: means over seeds beside the paper's numbers.

    Axes that the recipe names neither as rows nor as columns, other than the seeds, become rows.

    Raises:
        ValueError: If there are no rows.
    """
    if not rows:
        draw = f": {recipe.command('figures')} -o {shlex.quote(recipe.name)}.svg draws it" if recipe.figure else ""
        raise ValueError(f"The recipe {recipe.name} has no runs to report{draw}.")
    axes = axes_of(rows)
    col_axes = tuple(axis for axis in recipe.cols if axis in axes)
    row_axes = tuple(dict.fromkeys([axis for axis in recipe.rows if axis in axes] + list(axes)))
    row_axes = tuple(axis for axis in row_axes if axis not in col_axes)
    places = [(_values_on(row, row_axes), _values_on(row, col_axes)) for row in rows]
    row_places, col_places = (tuple(dict.fromkeys(place)) for place in zip(*places, strict=True))
    paper = read_published(recipe.name) if recipe.paper else ()
    specs = {axis: {getattr(row.config, axis) for row in rows if row.config} - {"none"} for axis in ("clip", "penalty")}
    varying = [axis for axis, values in specs.items() if len(values) > 1]
    comparable = not paper or datasets_of(recipe.cells) == datasets_of(load_recipe(recipe.name, "full").cells)
    by_run = {  # what compares runs, computed from all of them; other statistics are of one run
        "gain": gains_of(rows) if "gain" in recipe.statistics else {},
        "rank": _ranks_of(rows, places) if "rank" in recipe.statistics else {},
    }
    entries = {}
    for line, column in itertools.product(row_places, col_places):
        mine = [row for row, place in zip(rows, places, strict=True) if place == (line, column)]
        coordinates = dict(zip(row_axes + col_axes, line + column, strict=True))
        for statistic in recipe.statistics:
            pairs = [
                (by_run[statistic].get(run.id) if statistic in by_run else value_of(run, statistic), run.id)
                for run in results_of(mine)
            ]
            pairs = [(value, id) for value, id in pairs if value is not None]
            theirs = find_published(paper, coordinates, statistic) if mine else None
            entries[line, column, statistic] = Entry(
                coordinates,
                statistic,
                tuple(value for value, _ in pairs),
                tuple(id for _, id in pairs),
                *((theirs.value, theirs.std) if theirs else (None, None)),
                comparable=comparable,
                chosen=_describe_tuned(mine, varying),
                diverged=any(isinstance(row.outcome, Failure) and row.outcome.final for row in mine),
            )
    _mark_best(entries)
    table = ResultTable(recipe, row_axes, col_axes, row_places, col_places, recipe.statistics, entries, bare_axes(axes))
    made_with = provenance(results_of(rows))
    return replace(
        table,
        headline=SMOKE_TEST if recipe.scale == "smoke" else headline(rows),
        notes=_make_notes(table, rows),
        warnings=_find_warnings(rows),
        made_with=made_with,
    )


def _values_on(row: CellOutcome, axes: Iterable[str]) -> AxisValues:
    return tuple(row.cell.coordinates.get(axis) for axis in axes)


def gains_of(rows: Iterable[CellOutcome]) -> dict[str, float]:
    """Return the accuracy of each run with a clip or a penalty minus that of the same cell without both, by run id."""
    cells: dict[Point, dict[bool, list[Result]]] = {}
    for row in rows:
        if isinstance(row.outcome, Result):
            others = tuple((a, v) for a, v in row.cell.coordinates.items() if a not in ("clip", "penalty"))
            plain = row.outcome.clip == "none" and row.outcome.config["penalty"] == "none"
            cells.setdefault(others, {}).setdefault(plain, []).append(row.outcome)
    return {
        result.id: result.last10_accuracy - cell[True][0].last10_accuracy
        for cell in cells.values()
        if len(cell.get(True, [])) == 1
        for result in cell.get(False, [])
    }


def _ranks_of(rows: Sequence[CellOutcome], places: Sequence[tuple[AxisValues, AxisValues]]) -> dict[str, float]:
    """Return the rank of each run among the runs of its column and seeds, by run id."""
    blocks: dict[object, list[CellOutcome]] = {}
    for row, (_, col) in zip(rows, places, strict=True):
        blocks.setdefault((col, *(row.cell.coordinates.get(axis) for axis in AVERAGED)), []).append(row)
    return rank_runs(blocks.values())


def _describe_tuned(rows: Iterable[CellOutcome], varying: Collection[str]) -> str:
    """Return the clips, penalties and tuned losses of the runs of a cell, if its coordinates do not fix them."""
    found: dict[str, None] = {}
    for row in (row for row in rows if row.config is not None):
        words = words_to_tune(row.cell.config)
        for axis in ("clip", "penalty", *(["loss"] if words and words[0][0] == "loss" else [])):
            spec, named = getattr(row.config, axis), row.cell.coordinates.get(axis)
            if spec not in ("none", named) and (named or axis in varying or words):
                found[label(axis, spec)] = None
    return ", ".join(found)


def find_published(paper: Iterable[Published], coordinates: Coordinates, statistic: str) -> Published | None:
    """Return the paper's number for these coordinates, if exactly one matches on the axes of this recipe."""
    found = [
        number
        for number in paper
        if number.statistic == statistic
        and all(str(coordinates[axis]) == value for axis, value in number.coordinates.items() if axis in coordinates)
    ]
    return found[0] if len(found) == 1 else None


def _mark_best(entries: dict[K, Entry]) -> None:
    """Mark the best entry of each group; no mark for a single entry or a tie."""
    groups: dict[tuple[Point, str], list[K]] = {}
    for key, entry in entries.items():
        if entry.measure.better and entry.mean is not None:
            others = tuple((a, v) for a, v in entry.coordinates.items() if a not in ("clip", "penalty"))
            groups.setdefault((others, entry.statistic), []).append(key)
    for keys in groups.values():
        best, *others = sorted(keys, key=lambda key: -entries[key].measure.better * (entries[key].mean or 0.0))
        if others and entries[best].mean != entries[others[0]].mean:
            entries[best] = replace(entries[best], best=True)


def noisy_test(rows: Sequence[CellOutcome]) -> str | None:
    """Return a sentence about test labels that may be wrong; None if all are right."""
    untrusted = sorted({row.cell.config.data for row in rows if not trusted_test(row.cell.config.data)})
    if not untrusted:
        return None
    return (
        f"The test labels of {', '.join(untrusted)} may be wrong. On noisy test labels a perfect classifier scores "
        f"about 100 % minus their noise rate."
    )


def _make_notes(table: ResultTable, rows: Sequence[CellOutcome]) -> tuple[str, ...]:
    """Return the sentences below a table: what it can be compared with, ranks, failures, idle clips, missing runs."""
    recipe = table.recipe
    notes = []
    if table.compared:
        here, there = datasets_of(recipe.cells), datasets_of(load_recipe(recipe.name, "full").cells)
        if recipe.scale == "full":
            notes.append("Full scale: the paper's settings; where the paper is silent, those in the recipe's comment.")
        elif here == there:
            notes.append(f"Scale {recipe.scale}: the paper trained longer; its numbers are for orientation only.")
        else:
            notes.append(f"These runs are on {here}; the paper's numbers are for {there} and cannot be compared.")
    if ranks := describe_ranks(table):
        notes.append(ranks)
    if noisy := noisy_test(rows):
        notes.append(noisy)
    failed = [(row, row.outcome) for row in rows if isinstance(row.outcome, Failure)]
    if failed:
        named = [
            f"{series(row.cell.coordinates, bare=table.bare)}: {failure.error.rstrip('.')}"
            for row, failure in failed[:5]
        ]
        more = [f"and {len(failed) - 5} more"] if len(failed) > 5 else []
        notes.append(f"{len(failed)} of {len(rows)} runs failed and are not in the means. {'; '.join(named + more)}.")
    clipped = [result for result in results_of(rows) if result.clip.partition(":")[0] == "norm"]
    accuracies = {result.last10_accuracy for result in results_of(rows) if result.clip == "none"}
    # An idle clip changes no number. The others are left out without reading their metrics.
    inactive = sum(_never_active(result) for result in clipped if result.last10_accuracy in accuracies)
    if inactive:
        notes.append(
            f"In {inactive} of {len(clipped)} runs with the clip it was never active: no norm reached its threshold. A "
            "smaller threshold would act."
        )
    if missing := missing_runs(recipe, rows):
        notes.append(missing)
    return tuple(notes)


def missing_runs(recipe: Recipe, rows: Sequence[CellOutcome]) -> str | None:
    """Say how many runs have no result yet, and how to make them; None if there are none."""
    missing = sum(row.outcome is None for row in rows)
    if not missing:
        return None
    text = f"{missing} of {len(rows)} runs have no result yet: {recipe.command()} makes them."
    # A finished run is not looked for: a run that nothing was tuned for may have the same options.
    if undecided := sum(row.config is None and row.outcome is None for row in rows):
        text += (
            f" For {undecided} of them a value is not chosen, because trials were not run yet or were removed; what is "
            "finished is not repeated."
        )
    return text


def pairs_of(rows: Iterable[CellOutcome]) -> list[tuple[Result, Result]]:
    """Return the results without a clip and with the clip by norm of the same coordinates, where both are there."""
    pairs: dict[Point, dict[str, list[Result]]] = {}
    for row in rows:
        if isinstance(row.outcome, Result) and "clip" in row.cell.coordinates:
            others = tuple((axis, value) for axis, value in row.cell.coordinates.items() if axis != "clip")
            name = row.outcome.clip.partition(":")[0]
            pairs.setdefault(others, {}).setdefault(name, []).append(row.outcome)
    found = [(pair.get("none", []), pair.get("norm", [])) for pair in pairs.values()]
    return [(none[0], norm[0]) for none, norm in found if len(none) == len(norm) == 1]


def _never_active(result: Result) -> bool:
    """Return whether no norm reached the threshold of the clip, in any epoch in which that was measured."""
    shares = [row["clipped"] for row in result.rows if row["clipped"] is not None]
    return bool(shares) and not any(shares)


def headline(rows: Sequence[CellOutcome]) -> str:
    """Return the effect of the clip on pairs of runs that differ in nothing else, with its uncertainty.

    The differences are averaged over the settings for each seed; the spread is that of these means over the seeds.
    """
    seeds: dict[int, list[float]] = {}
    settings: dict[str, list[float]] = {}
    pairs = pairs_of(rows)
    for without, clipped in pairs:
        gain = clipped.last10_accuracy - without.last10_accuracy
        seeds.setdefault(without.config["seed"], []).append(gain)
        setting = {name: value for name, value in without.config.items() if name not in (*AVERAGED, *UNCOUNTED)}
        settings.setdefault(str(setting), []).append(gain)
    if not pairs:
        return ""
    means = [statistics.fmean(gains) for gains in seeds.values()]
    gain, better = statistics.fmean(means), sum(statistics.fmean(gains) > 0 for gains in settings.values())
    spread = f" ± {statistics.stdev(means):.1f}" if len(means) > 1 else ""
    many = f"mean over {len(settings)} settings" if len(settings) > 1 else "one setting"
    over = f"{many}, standard deviation over {len(means)} seeds" if spread else f"{many}, one seed"
    text = f"The clip {'raises' if gain >= 0 else 'lowers'} test accuracy by {abs(gain):.1f}{spread} points ({over})"
    text += f"; it raises it in {better} of {len(settings)}." if len(settings) > 1 else "."
    before = [without.memorised for without, _ in pairs if without.memorised is not None]
    after = [clipped.memorised for _, clipped in pairs if clipped.memorised is not None]
    if len(before) == len(after) == len(pairs):
        text += f" Without it the networks memorise {statistics.fmean(before):.0f} % of the wrong labels, with it "
        text += f"{statistics.fmean(after):.0f} %."
    return text


def datasets_of(cells: Iterable[Cell]) -> str:
    return " and ".join(dict.fromkeys(cell.config.data.partition(":")[0] for cell in cells))


def _find_warnings(rows: Sequence[CellOutcome]) -> tuple[str, ...]:
    """Name versions and devices that differ between the runs of the table."""
    results = results_of(rows)
    names = dict.fromkeys(name for result in results for name in result.versions)
    seen = {f"versions of {name}": Counter(result.versions.get(name, "none") for result in results) for name in names}
    seen["devices"] = Counter(result.device for result in results)
    return tuple(
        f"These runs mix {what}: {', '.join(f'{value} (runs: {n})' for value, n in sorted(counts.items()))}."
        for what, counts in seen.items()
        if len(counts) > 1
    )


def axes_of(rows: Iterable[CellOutcome]) -> dict[str, list[Value]]:
    """Return the axes that make cells, with their values in order; without those that are averaged over."""
    axes: dict[str, list[Value]] = {}
    for row in rows:
        for axis, value in row.cell.coordinates.items():
            if axis not in AVERAGED and value not in axes.setdefault(axis, []):
                axes[axis].append(value)
    return axes


def results_of(rows: Iterable[CellOutcome]) -> list[Result]:
    return [row.outcome for row in rows if isinstance(row.outcome, Result)]


# -- words -------------------------------------------------------------------------------------------------------------


def title(recipe: Recipe) -> str:
    """Return the item of the paper, the recipe's title, and the data and scale of these runs."""
    return paper_title(recipe) + caption_title(recipe).removeprefix(recipe.title)


def paper_title(recipe: Recipe) -> str:
    """Return the item of the paper and the recipe's title, for figures."""
    item = f"{recipe.paper}: " if recipe.paper and not recipe.title.startswith(recipe.paper) else ""
    return f"{item}{recipe.title}"


def caption_title(recipe: Recipe) -> str:
    """Return the title without the number of the table, which LaTeX puts before it."""
    data = datasets_of(recipe.cells)
    known = data not in ("", "table", "folder")  # the user's own data has a title of its own
    shown = [f"on {data}"] if known and data not in recipe.title.lower() else []
    shown += [f"scale {recipe.scale}"] if recipe.cells and (recipe.paper or recipe.scale != "full") else []
    return f"{recipe.title} ({', '.join(shown)})" if shown else recipe.title


def label(axis: str, value: Value, bare: Collection[str] = ()) -> str:
    """Return the label of a coordinate; values of the axes in `bare` are shown without knobs.

    >>> label("noise", "symmetric:rate=0.5"), label("clip", "norm:temp=1.5"), label("clip", "none")
    ('symmetric 50 %', 'temp=1.5', 'no clip')
    >>> label("clip", "norm:temp=grid"), label("clip", "norm:tau=1"), label("variant", "LC-V")
    ('tuned temp', 'tau=1', 'clip by value (LC-V)')
    >>> label("loss", "gce:q=0.7"), label("loss", "gce:q=0.7", bare={"loss"})
    ('gce q=0.7', 'gce')
    >>> label("loss", "rce:log_zero=-9.210340371976182")
    'rce log_zero=-9.21'
    """
    if axis in ("clip", "penalty", "noise") and value == "none":
        return f"no {axis}"
    if not isinstance(value, str):
        return DASH if value is None else f"{axis.replace('_', ' ')} {value}"
    if value in ABBREVIATIONS:
        return ABBREVIATIONS[value]
    name, _, knobs = re.sub(r"(\w+)=(?:grid|auto)\b", r"tuned \1", value).partition(":")
    if not knobs or axis in bare:
        return name
    if name == "norm" and axis == "clip":
        return knobs
    knobs = re.sub(r"(?<==)-?\d+\.\d{6,}\b", lambda match: f"{float(match[0]):.3g}", knobs)
    knobs = re.sub(r"\brate=([\d.e-]+)", lambda match: f"{100 * float(match[1]):g} %", knobs)
    return f"{name} {knobs.replace(',', ', ')}"


def bare_axes(axes: Mapping[str, Sequence[Value]]) -> frozenset[str]:
    """Return the axes whose values can be told apart by name, without knobs: losses and methods."""
    names = {axis: [str(value).partition(":")[0] for value in axes.get(axis, ())] for axis in ("loss", "method")}
    return frozenset(axis for axis, found in names.items() if len(set(found)) == len(found))


def series(coordinates: Coordinates, without: Collection[str] = (), bare: Collection[str] = ()) -> str:
    """Return coordinates in one line, without what is switched off.

    >>> series({"loss": "ce", "clip": "none", "noise": "pair:rate=0.2"})
    'ce, pair 20 %'
    """
    shown = {axis: value for axis, value in coordinates.items() if axis not in without}
    on = [label(axis, value, bare) for axis, value in shown.items() if value != "none"]
    return ", ".join(on or [label(axis, value, bare) for axis, value in shown.items()])


def statistic_name(statistic: str) -> str:
    return statistic.replace("last10_", "").replace("_", " ")


def provenance(results: Sequence[Result]) -> dict[str, list[str]]:
    """Return the versions, devices and commits of the runs."""
    names = dict.fromkeys(name for result in results for name in result.versions)
    seen = {name: [result.versions.get(name) for result in results] for name in names}
    seen["device"] = [result.device for result in results]
    seen["commit"] = [result.commit and result.commit[:12] for result in results]
    return {name: [str(v) for v in dict.fromkeys(values) if v is not None] or [DASH] for name, values in seen.items()}
