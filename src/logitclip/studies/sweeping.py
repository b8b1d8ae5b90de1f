"""Sweeps: tune and train the missing runs of a recipe, and collect the results."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from logitclip.runs.config import RunConfig, words_to_tune
from logitclip.runs.results import Failure, Result, read_outcome
from logitclip.studies import executors, tuning
from logitclip.studies.listener import Listener
from logitclip.studies.manifest import Manifest, id_of, open_manifest
from logitclip.studies.recipe import Cell, Recipe
from logitclip.studies.tuning import FindOutcome


@dataclass(frozen=True)
class CellOutcome:
    """A cell of a recipe and its outcome."""

    cell: Cell
    config: RunConfig | None  # with the tuned value filled in; None if no value is chosen yet, or all trials failed
    outcome: Result | Failure | None  # None if there is no run yet


def collect(recipe: Recipe) -> list[CellOutcome]:
    """Return every cell with its outcome, read from the run folders. Nothing is trained."""

    @functools.cache
    def find(config: RunConfig) -> Result | Failure | None:
        id = id_of(recipe, config)
        return None if id is None else read_outcome(Path(config.runs) / id)

    return _pair_outcomes(recipe, range(len(recipe.cells)), find)


def sweep(
    recipe: Recipe,
    *,
    executor: str = "local",
    jobs: int | None = None,
    per_device: int = 1,
    address: str | None = None,
    shard: tuple[int, int] = (1, 1),
    listener: Listener | None = None,
) -> list[CellOutcome]:
    """Tune and train the missing runs of a recipe, and return its rows.

    A sweep can be stopped at any time and restarted, and several sweeps can share a folder. Finished runs are not
    repeated; failed runs are retried, unless they diverged. The list of cells is kept in the folder of runs, see
    `manifest`.

    Args:
        executor, jobs, per_device, address: Where to run, as in `executors.execute`.
        shard: (i, n): only the i-th of n parts. The cells that share a tuned value are in the same part.
        listener: Hears what happens to the runs, and which values are tuned and chosen.

    Raises:
        ValueError: If the shard or a place to run does not exist.
        CannotWrite: If the folder of runs cannot be written.
    """
    listener = listener or Listener()
    memory = _Memory(listener, open_manifest(recipe))
    tuned, plain = _parts(recipe, memory, shard)
    waiting: dict[Path, set[RunConfig]] = defaultdict(set)  # run id -> the configs to tune that it is a trial of
    undecided = set(tuned)

    def advance(config: RunConfig) -> list[RunConfig]:
        """Return what to run next for a config to tune: its trials and, once the value is chosen, its cells."""
        trials = tuning.next_trials(config, memory.outcome)
        for trial in trials:
            waiting[memory.folder(trial)].add(config)
        if trials or config not in undecided:
            return trials
        undecided.remove(config)
        decision = _choose(config, memory.outcome)
        listener.on_chosen(config, decision)
        return [_fill_in(recipe.cells[i], decision) for i in tuned[config]] if isinstance(decision, RunConfig) else []

    def then(config: RunConfig, found: Result | Failure) -> list[RunConfig]:
        memory.keep(config, found)
        more = [run for group in waiting.pop(memory.folder(config), ()) for run in advance(group)]
        memory.save(more)
        return more

    for config, cells in tuned.items():
        listener.on_tuning(config, len(cells))
    # Trials come first, as other runs wait for them; cells without tuning fill the gaps.
    first = [run for config in tuned for run in advance(config)] + [recipe.cells[i].config for i, *_ in plain.values()]
    memory.save(first)
    executors.execute(
        first,
        executor=executor,
        jobs=jobs,
        per_device=per_device,
        address=address,
        listener=listener,
        then=then,
    )
    mine = sorted(i for part in (tuned, plain) for cells in part.values() for i in cells)
    return _pair_outcomes(recipe, mine, memory.outcome)


def tune(config: RunConfig, search: tuning.Search | None = None, **where: Any) -> dict[tuning.Tunable, float | None]:
    """Run the trials of a search, and return the validation accuracy of each value in %; None if its trial failed.

    As in a sweep, trials that failed before are retried once.

    Args:
        where: Executor, jobs, per_device, address and listener, as in `executors.execute`.

    Raises:
        ValueError: If the config has nothing to tune, or as in `executors.execute`.
    """
    search = search or tuning.search_for(config)
    memory = _Memory(Listener(), Manifest(None))
    while todo := tuning.next_trials(config, memory.outcome, search):
        executors.execute(todo, then=memory.keep, **where)
    return tuning.scores_of_trials(config, memory.outcome, search)


class _Memory:
    """Caches ids, which take time to compute, and the outcomes of this sweep: earlier failures do not count."""

    def __init__(self, listener: Listener, manifest: Manifest) -> None:
        self.listener, self.manifest = listener, manifest
        self.seen: dict[Path, Result | Failure] = {}
        self.folders: dict[RunConfig, Path] = {}

    def folder(self, config: RunConfig) -> Path:
        if config not in self.folders:
            self.folders[config] = Path(config.runs) / config.id
            self.manifest.add(config, self.folders[config].name)
        return self.folders[config]

    def save(self, configs: Iterable[RunConfig]) -> None:
        """Write the ids computed so far, and those of these runs, to the manifest."""
        for config in configs:
            self.folder(config)
        self.manifest.save()

    def keep(self, config: RunConfig, found: Result | Failure) -> tuple[()]:
        """Record an outcome; nothing follows it."""
        self.seen[self.folder(config)] = found
        return ()

    def outcome(self, config: RunConfig) -> Result | Failure | None:
        """Return the outcome of a run, also one of an earlier sweep unless it is a failure that may be retried."""
        folder = self.folder(config)
        if folder not in self.seen:
            found = read_outcome(folder)
            if found is None or (isinstance(found, Failure) and not found.final):
                return None  # the cause of an earlier failure may be gone: retry it
            self.seen[folder] = found
            self.listener.on_skipped(config, found)
        return self.seen[folder]


def _parts(
    recipe: Recipe, memory: _Memory, shard: tuple[int, int]
) -> tuple[dict[RunConfig, list[int]], dict[Path, list[int]]]:
    """Return the positions of a shard's cells. Cells are grouped by the config that is tuned for them, or by run id."""
    i, n = shard
    if not 1 <= i <= n:
        raise ValueError(f"A shard is one of 1/n to n/n, got {i}/{n}.")
    tuned: dict[RunConfig, list[int]] = defaultdict(list)
    plain: dict[Path, list[int]] = defaultdict(list)
    for at, cell in enumerate(recipe.cells):
        if tuning.is_tuned(cell.config):
            tuned[recipe.to_tune(cell)].append(at)
        else:
            plain[memory.folder(cell.config)].append(at)
    return dict(list(tuned.items())[i - 1 :: n]), dict(list(plain.items())[i - 1 :: n])


def _pair_outcomes(recipe: Recipe, positions: Iterable[int], outcome: FindOutcome) -> list[CellOutcome]:
    """Return the cells at these positions with their outcomes; a cell whose value is not chosen yet has none."""
    decide = functools.cache(lambda config: None if tuning.next_trials(config, outcome) else _choose(config, outcome))
    rows = []
    for cell in (recipe.cells[i] for i in positions):
        config = cell.config
        if tuning.is_tuned(config):
            decision = decide(recipe.to_tune(cell))
            if not isinstance(decision, RunConfig):
                rows.append(CellOutcome(cell, None, decision))
                continue
            config = _fill_in(cell, decision)
        rows.append(CellOutcome(cell, config, outcome(config)))
    return rows


def _choose(config: RunConfig, outcome: FindOutcome) -> RunConfig | Failure:
    try:
        return tuning.choose(config, outcome)
    except ValueError as error:  # all its trials failed
        return Failure(id="", error=str(error), traceback="", attempts=0, final=False)


def _fill_in(cell: Cell, chosen: RunConfig) -> RunConfig:
    """Return the cell's own config with the chosen value; it trains on all examples."""
    filled = {field: getattr(chosen, field) for field, *_ in words_to_tune(cell.config)}
    return replace(cell.config, **filled, val=0.0)
