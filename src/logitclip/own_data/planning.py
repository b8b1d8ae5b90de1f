"""What `fit` will do, and how long it will take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from logitclip import models
from logitclip.criterion import build_criterion
from logitclip.data._columns import Column, TextColumn, date_in_text, unread_number
from logitclip.launch import find_device, using_threads
from logitclip.own_data.folds import FOLDS, choose_rows, make_folds
from logitclip.own_data.kind import Rows, Source
from logitclip.own_data.learners import (
    LEAF,
    LINEAR_ROWS,
    REFERENCE,
    STRENGTHS,
    TREE_ROWS,
    TREES,
    Forest,
    Learner,
    Logistic,
    Neighbours,
)
from logitclip.own_data.network import AVERAGED_ROWS, Network, NetworkOptions
from logitclip.own_data.rules import ROWS as RULES_ROWS
from logitclip.own_data.tables import Table
from logitclip.registry import suggest
from logitclip.search import HELD_OUT as SEARCH_HELD_OUT
from logitclip.search import TRIALS
from logitclip.studies.tuning import GRIDS
from logitclip.text import counted, duration, join_names, quote_some

AUTO = "auto"
CLIP = "norm:temp={temp:g}"
USUAL_TEMP = 2.5  # the clip where there are too few rows to search for one
SEARCH_FROM = 5_000  # rows from which the clip is searched
SEARCHED_ROWS = 20_000  # rows on which it is searched
HALVES = 2  # folds of the network, unless five are asked for
LEARNER_NAMES = ("network", "forest", "logistic", "neighbours")
FEW = 20  # rows; fewer whole numbers may all differ by chance
LEAST_COPIES = 0.05  # share of the rows from which copies are told
FAR_AWAY = 1e3  # distances between the quartiles from which a value is told: standardised, the others become one number
MEASURED = 4  # training steps that are timed
TIMED_TREES = 4
LINEAR_CELLS = 40_000  # rows times features that a regression is timed on, or 300 rows
SET_UP, EPOCH = 0.06, 0.005  # seconds to set up the training of a network and, beside its steps, for each epoch
RULES_CELL = 7e-8  # seconds for each row and feature that a tree of rules is grown on
SPIN = 0.03  # seconds of work to find out how busy the machine is
MOST_CLASSES = 60  # beyond which auto takes only the network: the arrays of the others would be too large


@dataclass(frozen=True)
class ClipSearch:
    """The search for a number of a clip."""

    spec: str  # as in norm:temp=auto
    knob: str  # temp
    word: str  # auto or grid

    @property
    def grid(self) -> tuple[float, ...]:
        """The values of the paper."""
        return GRIDS[f"clip.{self.spec.partition(':')[0]}.{self.knob}"]

    def with_value(self, value: float) -> str:
        """Return the clip with a number."""
        return self.spec.replace(f"={self.word}", f"={value:g}")


@dataclass(frozen=True, eq=False)
class Plan:
    """What `fit` will do."""

    source: Source
    learners: list[Learner]
    clip_search: ClipSearch | None
    network_folds: int
    seed: int
    balance: str
    costs: Mapping[str, float]  # forecast seconds by the name of a learner, and of the rest

    @property
    def seconds(self) -> float:
        """How long all of it will take: a forecast."""
        return sum(self.costs.values())

    @property
    def network(self) -> Network | None:
        """The network, if it is one of the learners."""
        return next((learner for learner in self.learners if isinstance(learner, Network)), None)

    def folds_of(self, learner: Learner) -> int:
        """Return how many folds a learner predicts the rows in."""
        return self.network_folds if isinstance(learner, Network) and self.source.times is None else FOLDS

    def lines(self) -> list[str]:
        """Describe data and plan, a sentence a line."""
        source, counts = self.source, self.source.counts
        named = [f"{name} ({count:,})" for name, count in zip(source.class_names, counts.tolist(), strict=True)]
        lines = [
            f"{source.path}: {len(source.labels):,} rows in {len(counts)} classes: {join_names(named)}.",
            f"Used: {join_names(f'{name} ({kind})' for name, kind in source.used.items())}.",
        ]
        if source.unlabelled is not None:
            lines.append(f"{len(source.unlabelled):,} rows have no label: they are predicted.")
        lines += [f"Left out: {name!r} {reason}." for name, reason in source.left_out.items()]
        columns = source.kind.columns if isinstance(source.kind, Table) else {}
        lines += [f"{n!r} {why}" for n, column in columns.items() for why in _doubt(n, column, source.used.get(n))]
        copies = _count_copies(source)
        if copies:
            lines.append(
                f"{copies:,} rows are copies of others, label included. A copy in another fold gives a label away: "
                "remove them, or give all copies of a row one group with --group."
            )
        if source.kind.hint:
            lines.append(source.kind.hint)
        lone = [source.class_names[k] for k in np.flatnonzero(counts == 1).tolist()]
        if lone:
            classes = "Classes" if len(lone) > 1 else "Class"
            lines.append(f"{classes} {quote_some(lone)} with one example: such a label cannot be judged.")
        lines += [
            f"Classes {' and '.join(map(repr, names))} differ only in case or spaces: are they one class?"
            for names in _find_similar(source.class_names)
        ]
        return [*lines, *self._steps(), f"This will take about {duration(max(1.0, self.seconds))}."]

    def _steps(self) -> list[str]:
        lines = []
        if self.network is not None:
            options = self.network.options
            clip = f"{self.clip_search.spec}, which is searched for" if self.clip_search else options.clip
            lines.append(
                f"Network: {options.model} on {self.source.kind.describe(self.source.rows)}; "
                f"{counted(options.epochs, 'epoch')} of batches of {options.batch_size}; clip {clip}."
            )
        names = [learner.name for learner in self.learners]
        if len(names) == 1:
            lines.append(
                f"Learner: {names[0]}. It judges every label out of fold, and learns again with less weight "
                "on doubtful ones."
            )
        else:
            alike = self.source.kind.alike
            shares = f"In the model, {' and '.join(alike)} count the same."
            if not alike or not set(alike) <= set(names):
                shares = "Held-out labels decide how much each counts."
            lines.append(
                f"Learners: {', '.join(names)}. Each predicts every row without its label; they vote on the labels, "
                f"and learn again with less weight on doubtful ones. {shares}"
            )
        return lines


def make_plan(
    source: Source,
    *,
    clip: str = AUTO,
    learner: str = AUTO,
    balance: str = "off",
    five_folds: bool = False,
    jobs: int | None = 1,
    seed: int = 0,
    **options: Any,
) -> Plan:
    """Choose learners and settings for the data. The options are those of `fit`, whose `find_issues` is `five_folds`.

    Raises:
        ValueError: If an option is unknown or out of range.
    """
    if balance not in ("on", "off", "auto"):
        raise ValueError(f"balance must be on, off or auto, got {balance!r}.")
    known = [field.name for field in fields(NetworkOptions) if field.name != "clip"]
    for name in options:
        if name not in known:
            raise ValueError(f"fit has no option {name!r}. {suggest(name, known)}")
    if source.groups is not None or source.times is not None:
        make_folds(source, FOLDS, seed)  # too few groups or times are refused before anything is trained
    rows, classes = len(source.labels), len(source.class_names)
    clip_search = _find_clip_search(clip, rows)
    settings = {**source.kind.network(rows), **{k: v for k, v in options.items() if v is not None}}
    settings["clip"] = CLIP.format(temp=USUAL_TEMP) if clip == AUTO or clip_search else clip
    settings["threads"] = options.get("threads") or jobs or torch.get_num_threads()
    settings["batch_size"] = min(settings["batch_size"], max(8, rows // 2))
    network = Network(classes, NetworkOptions(**settings), source.kind.mean, source.kind.std)
    network.options.check(classes, network.input_shape(source.rows))
    every: dict[str, Learner] = {
        "network": network,
        "forest": Forest(classes, jobs),
        "logistic": Logistic(classes, jobs),
        "neighbours": Neighbours(classes, jobs),
    }
    wanted = _learner_names(learner, classes)
    folds = FOLDS if five_folds else HALVES
    plan = Plan(source, [every[name] for name in wanted], clip_search, folds, seed, balance, {})
    return replace(plan, costs=_forecast(plan))


def _learner_names(learner: str, classes: int) -> list[str]:
    if learner == AUTO:
        return list(LEARNER_NAMES) if classes <= MOST_CLASSES else ["network"]
    names = [name.strip() for name in learner.split(",")]
    for name in names:
        if name not in LEARNER_NAMES:
            raise ValueError(f"There is no learner {name!r}. {suggest(name, [*LEARNER_NAMES, AUTO])}")
    return [name for name in LEARNER_NAMES if name in names]


def _find_clip_search(clip: str, rows: int) -> ClipSearch | None:
    """Return the search for a number that a clip leaves open, or None."""
    if clip == AUTO:
        return ClipSearch("norm:temp=auto", "temp", "auto") if rows >= SEARCH_FROM else None
    name, _, knobs = clip.partition(":")
    words = [part.partition("=") for part in knobs.split(",") if part.partition("=")[2] in ("auto", "grid")]
    if not words:
        return None
    if len(words) > 1 or f"clip.{name}.{words[0][0]}" not in GRIDS:
        raise ValueError(f"No value can be searched for in {clip!r}: write norm:temp=auto, or a number.")
    return ClipSearch(clip, words[0][0], words[0][2])


def _forecast(plan: Plan) -> dict[str, float]:
    """Time a few steps of the network, a few trees and a small regression; return how long everything will take."""
    rows, width = plan.source.rows.features.shape
    page = 0.1 + 4e-4 * width  # with the columns that mattered
    costs = {"rest": page + RULES_CELL * FOLDS * min(rows, RULES_ROWS) * width}  # do rules explain the labels?
    for learner in plan.learners:
        if isinstance(learner, Network):
            seconds = _network_seconds(plan, learner)
        elif isinstance(learner, Forest):
            trees = 1.7 * TREES / TIMED_TREES  # two forests, one of them perhaps not in the model
            seconds = trees * min(rows, TREE_ROWS) * _seconds_per_row(_grow_trees, plan.source, 2_000)
        elif isinstance(learner, Logistic):
            fits = (len(STRENGTHS) + 1) * (FOLDS - 1)  # of many features it tries smaller ones
            part = max(300, LINEAR_CELLS // width)
            seconds = fits * min(rows, LINEAR_ROWS) * _seconds_per_row(learner.fresh().fit, plan.source, part)
        else:
            seconds = rows * min(rows, REFERENCE) * (5e-9 + 5e-11 * width)
        costs[learner.name] = seconds
    busy = _busy()
    return {name: busy * seconds for name, seconds in costs.items()}


def _network_seconds(plan: Plan, network: Network) -> float:
    rows = len(plan.source.labels)
    steps = -(-rows // network.options.batch_size) * network.options.epochs
    folds = plan.folds_of(network)
    passes, fits = folds - 0.5, folds + 0.5  # each fold without a part; and all rows, if it is in the model
    if plan.clip_search:
        passes += TRIALS * (1 - SEARCH_HELD_OUT) * min(1, SEARCHED_ROWS / rows)
        fits += TRIALS
    predicted = 1.2 if rows <= AVERAGED_ROWS else 1.0  # after every epoch, or after every fifth
    step = predicted * _step_seconds(network, plan.source)
    return fits * (SET_UP + EPOCH * network.options.epochs) + passes * steps * step


def _busy() -> float:
    """Return how much longer the clock runs than this thread computes, because other programs have its core."""
    clock, worked = time.perf_counter(), time.thread_time()
    while time.thread_time() - worked < SPIN:
        pass
    return (time.perf_counter() - clock) / (time.thread_time() - worked)


def _seconds_per_row(learn: Callable[[Rows, np.ndarray], object], source: Source, most: int) -> float:
    """Return the CPU seconds of `learn` per row, measured on at most `most` rows."""
    from sklearn import ensemble, linear_model  # noqa: F401  # loading them is not timed

    part = choose_rows(len(source.labels), most, 0)
    rows, labels = source.rows.take(part), source.labels[part]
    if len(np.unique(labels)) < 2:
        return 0.0
    started = time.thread_time()
    learn(rows, labels)
    return (time.thread_time() - started) / len(part)


def _grow_trees(rows: Rows, y: np.ndarray) -> None:
    from sklearn.ensemble import RandomForestClassifier

    RandomForestClassifier(TIMED_TREES, min_samples_leaf=LEAF, random_state=0).fit(rows.features, y)


def _step_seconds(network: Network, source: Source) -> float:
    """Time a few training steps of the network on empty inputs."""
    options, shape = network.options, network.input_shape(source.rows)
    device = find_device(options.accelerator)
    now = time.thread_time if device.type == "cpu" else time.perf_counter
    model = models.build(options.model, network.classes, shape).to(device)
    criterion = build_criterion("ce", options.clip, head=model).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9, nesterov=True)
    x = torch.zeros(options.batch_size, *shape, device=device)
    y = torch.zeros(len(x), dtype=torch.int64, device=device)
    times = []
    with using_threads(options.threads):  # more threads than training has can be far slower on a busy machine
        for _ in range(MEASURED):
            started = now()
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
            if device.type != "cpu":
                torch.accelerator.synchronize()
            times.append(now() - started)
    return min(times)


def _doubt(name: str, column: Column, used: str | None) -> Iterator[str]:
    """Say why a column may mean something else than what it is read as."""
    if isinstance(column, TextColumn) and used != "text":
        if (date := date_in_text(column)) is not None:
            yield (
                f"holds dates as text, such as {date!r}: to use them as dates, write them as 2026-11-18, or convert "
                "the column with pandas.to_datetime."
            )
        if (value := unread_number(column)) is not None:
            yield (
                f"holds numbers, but values such as {value!r} make it text: write numbers with a point, without signs "
                "of thousands or units, and leave missing ones empty."
            )
    elif used == "number":
        numbers = np.asarray(column)
        if _may_be_id(numbers):
            yield f"is a different whole number in every row: if it is an id, leave it out with --drop {name}."
        if (far := _far_value(numbers)) is not None:
            yield f"has a value far from the others, {far:g}: if it stands for a missing one, leave it empty."


def _may_be_id(column: np.ndarray) -> bool:
    """Return whether a column may hold shuffled ids: whole numbers, no two of them alike."""
    whole = len(column) >= FEW and (column == np.round(column)).all()
    return bool(whole) and len(np.unique(column)) == len(column)


def _far_value(column: np.ndarray) -> float | None:
    """Return the value that is farthest from the others, if it is very far."""
    values = column[np.isfinite(column)]
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    with np.errstate(over="ignore"):
        farthest = float(values[np.abs(values - middle).argmax()])
        return farthest if high > low and np.abs(farthest - middle) > FAR_AWAY * (high - low) else None


def _count_copies(source: Source) -> int:
    """Return how many rows equal another one, if equal rows always have equal labels; 0 if there are groups."""
    if source.groups is not None:
        return 0
    rows = np.fromiter((hash(row.tobytes()) for row in source.rows.features), np.int64, len(source.labels))
    distinct, first = np.unique(rows, return_index=True)
    same_label = source.labels[first][np.searchsorted(distinct, rows)] == source.labels
    copies = len(rows) - len(distinct)
    return copies if same_label.all() and copies >= LEAST_COPIES * len(rows) else 0


def _find_similar(names: Sequence[str]) -> list[list[str]]:
    """Return the groups of names that are equal but for case and spaces."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault("".join(name.casefold().split()), []).append(name)
    return [group for group in groups.values() if len(group) > 1]
