"""Commands about recipes: sweep runs one, report and figures show its results."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.markup import escape
from tyro.conf import Positional, UseAppendAction, arg

from logitclip.cli.options import ChangeOptions, Flag, Place, Plugins, Quiet, Root, Runs, Text, Verbose, runs_folder
from logitclip.cli.output import Exit, can_be_bold, fail, put, show, show_json, tell
from logitclip.cli.terminal import SweepBoard, announce
from logitclip.cli.training import set_verbosity, stop_on_sigterm
from logitclip.runs.config import words_to_tune
from logitclip.runs.plugins import plugins_ignored
from logitclip.runs.results import Failure
from logitclip.text import counted, duration

ASK_HOURS = 100  # a sweep that would take longer asks first

if TYPE_CHECKING:
    from logitclip.data import Dataset
    from logitclip.studies.recipe import Cell, Recipe
    from logitclip.studies.sweeping import CellOutcome

RecipeName = Annotated[
    Positional[str], arg(help="A recipe, see `logitclip list recipes`, or the path of a .toml file.")
]
Files = Annotated[UseAppendAction[tuple[Path, ...]], arg(aliases=["-o"], metavar="FILE", help_behavior_hint="")]


def sweep(
    recipe: RecipeName,
    /,
    *,
    changes: ChangeOptions,
    scale: str = "full",
    place: Annotated[Place, arg(name="")],
    shard: str = "1/1",
    runs: Runs = None,
    root: Root = None,
    download: Flag = False,
    mirror: Text = None,
    plugin: Plugins = (),
    skip_missing: Flag = False,
    yes: Annotated[Flag, arg(aliases=["-y"])] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Run the missing runs of a recipe, tuning included; interrupt it and repeat the command at any time.

    Example: logitclip sweep table1 --scale cpu

    The recipes of the paper have four scales. smoke: one epoch on a few digits, to see that it works; seconds. cpu: the
    comparison on digits with a small network; minutes of a core, an hour for table1. mini: a part of the real data with
    a small network; minutes to hours. full: the paper's networks, data and epochs; for table1 that is about 56,000
    hours of a core, so it is for many GPUs. A sweep that would take more than 100 hours asks before it starts.

    Args:
        scale: The scale to run it at: smoke, cpu, mini or full.
        changes: Options to set in every run, whatever the recipe says.
        shard: Run one of several parts, 1/4 to 4/4, each as a job of its own.
        download: Download the data, human labels and encoders that the recipe uses, if they are missing.
        mirror: Download them from this folder or address instead of the official one.
        plugin: The Python files that the recipe names as plugins; without this they are not run.
        skip_missing: Leave out the runs whose data is missing, instead of starting none.
        yes: Start without asking, however long it takes.
    """
    part, parts = _parse_shard(shard)
    set_verbosity(quiet, verbose)
    stop_on_sigterm()
    kept = runs_folder(runs)
    if not quiet:
        announce(f"sweep of {recipe}", kept)
    from logitclip import data  # slow: they import torch
    from logitclip.runs.encoding import fetch_encoders
    from logitclip.studies import sweeping
    from logitclip.studies.recipe import load_recipe

    folders = {"runs": str(kept), "root": None if root is None else str(root)}
    loaded = load_recipe(recipe, scale, **folders, plugin=plugin, changes=changes)
    load = partial(data.load, download=download or mirror is not None, mirror=mirror)
    loaded = _leave_out_missing(loaded, load) if skip_missing else loaded
    datasets = [load(spec, where) for spec, where in loaded.data()]  # one sentence if one is missing
    configs = [cell.config for cell in loaded.cells]
    if download:
        fetch_encoders(configs)
    name = f"{loaded.name} ({loaded.scale})"
    tuned = len({loaded.to_tune(cell) for cell in loaded.cells if words_to_tune(cell.config)})
    if not quiet:
        trials = f" and trials to tune {counted(tuned, 'value')}" if tuned else ""
        tell(f"{name}: {counted(len(configs), 'run')}{trials}.")
    if not yes:
        _ask_before_a_long_sweep(loaded, datasets, parts)
    board = SweepBoard(name, configs, quiet=quiet, verbose=verbose)
    with board:
        rows = sweeping.sweep(loaded, **asdict(place), shard=(part, parts), listener=board)
    if quiet:
        return _exit_unless_done(rows)
    failed = f", {board.failed} failed" if board.failed else ""
    put(f"{board.done} runs done, {board.before} done before{failed}, in {duration(board.seconds)}.", sys.stdout)
    figure = f"{loaded.command('figures')} -o {shlex.quote(loaded.name)}.svg"  # a figure may have no table
    put(f"Next: {loaded.command('report') if loaded.rows else figure}", sys.stdout)
    _exit_unless_done(rows)


def _leave_out_missing(recipe: Recipe, load: Callable[..., Dataset]) -> Recipe:
    """Leave out the cells whose data cannot be loaded, with a line for each dataset.

    Raises:
        ValueError: No data can be loaded; the error is that of the last one.
    """
    missing: dict[tuple[str, str | None], ValueError] = {}
    for spec, where in recipe.data():
        try:
            load(spec, where)
        except ValueError as error:
            missing[spec, where] = error
            tell(f"left out: {error}")
    kept = [cell for cell in recipe.cells if (cell.config.data, cell.config.root) not in missing]
    if missing and not kept:
        raise list(missing.values())[-1]
    return replace(recipe, cells=tuple(kept))


def _ask_before_a_long_sweep(recipe: Recipe, datasets: list[Dataset], parts: int) -> None:
    """Ask whether to start a sweep that would take days; refuse to start it if there is nobody to ask."""
    from logitclip.studies import sweeping

    hours = _estimate_hours(recipe, datasets, recipe.cells) / parts
    if hours >= ASK_HOURS:  # it takes time to see what is done already
        left = [row.cell for row in sweeping.collect(recipe) if row.outcome is None]
        hours = _estimate_hours(recipe, datasets, left) / parts
    if hours < ASK_HOURS:
        return
    cost = f"This sweep would take about {float(f'{hours:.2g}'):,.0f} hours of one core or device."
    if not (sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()):
        fail(Exit.MISTAKE, f"{cost} Add --yes to start it, or take a smaller scale, as in --scale cpu.")
    tell(f"{cost} Start it? [y/N]")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        fail(Exit.MISTAKE, "Not started. A smaller scale is --scale cpu.")


def _estimate_hours(recipe: Recipe, datasets: list[Dataset], cells: Iterable[Cell]) -> float:
    """Estimate the time of runs and their trials, from timed training steps."""
    from logitclip.runs.cost import run_seconds
    from logitclip.search import HELD_OUT, TRIALS
    from logitclip.studies.tuning import GRID_VAL, search_for

    places = dict.fromkeys((cell.config.data, cell.config.root) for cell in recipe.cells)  # in the order of `data`
    data = dict(zip(places, datasets, strict=True))
    seconds: dict[tuple[object, ...], float] = {}
    total, trials = 0.0, dict[object, float]()
    for cell in cells:
        config = cell.config
        kind = (config.data, config.root, config.model, config.epochs, config.limit, config.augment, config.val)
        if kind not in seconds:
            seconds[kind] = run_seconds(config, data[config.data, config.root])
        total += seconds[kind]
        if words_to_tune(config):
            grid = search_for(config).values
            runs = len(grid) * (1 - GRID_VAL) if grid else TRIALS * (1 - HELD_OUT)
            trials[recipe.to_tune(cell)] = runs * seconds[kind]
    return (total + sum(trials.values())) / 3600


def _exit_unless_done(rows: Iterable[CellOutcome]) -> None:
    """Exit unless every run has a result."""
    outcomes = [row.outcome for row in rows]
    if any(isinstance(outcome, Failure) for outcome in outcomes):
        raise SystemExit(Exit.FAILED)
    if None in outcomes:
        raise SystemExit(Exit.MISSING)


def _parse_shard(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts):
        return int(part), int(parts)
    raise ValueError(f"shard must be one of n parts, from 1/n to n/n, as in 1/4; got {text!r}.")


@plugins_ignored()
def report(
    recipe: RecipeName,
    /,
    *,
    out: Files = (),
    scale: str = "full",
    strict: Flag = False,
    json: Flag = False,
    runs: Runs = None,
    root: Root = None,
) -> None:
    """Show the results of a recipe as a table, beside the paper's numbers where there are any.

    Example: logitclip report quickstart -o report.html -o table.tex

    Args:
        out: Also write it to this file: .html (a page with curves, noise and settings; it opens offline), .md, .tex
            (for booktabs), .csv (a line for each cell and statistic) or .json. Can be repeated.
        scale: The scale it was run at.
        strict: Exit with code 3 if a run failed, 4 if one has no result yet.
        json: Print a JSON object instead of a table.
    """
    from logitclip.files import write
    from logitclip.studies import drawing, reporting
    from logitclip.studies.tables import tabulate

    for path in out:
        drawing.check_suffix(path, reporting.WRITERS, "report")
    loaded, rows = _collect(recipe, scale, runs, root)
    table = tabulate(loaded, rows)
    for path in out:
        write(path, reporting.WRITERS[path.suffix.lower()](table, rows).encode())
        tell(f"wrote {path}")
    if json:
        show_json(reporting.as_json(table))
    else:
        show(reporting.terminal(table, bold=can_be_bold(sys.stdout)))
        if not loaded.paper:  # of the paper's tables the caption says it all
            show(escape(loaded.about))
    if strict:
        _exit_unless_done(rows)


@plugins_ignored()
def figures(
    recipe: RecipeName,
    /,
    *,
    out: Files,
    scale: str = "full",
    runs: Runs = None,
    root: Root = None,
) -> None:
    """Draw the figure of a recipe or, if it has none, accuracy and memorised share by epoch.

    Example: logitclip figures quickstart -o curves.svg -o curves.html

    Args:
        out: The file to write: .svg, .pdf, .png or .html (interactive). Can be repeated.
        scale: The scale it was run at.
    """
    from logitclip.studies import drawing, figures
    from logitclip.studies.tables import missing_runs

    if not out:
        raise ValueError("figures needs a file to write, as in -o curves.svg.")
    for path in out:
        drawing.check_suffix(path)
    loaded, rows = _collect(recipe, scale, runs, root)
    chart = figures.draw(loaded, rows)
    for path in out:
        drawing.save(chart, path)
        tell(f"wrote {path}")
    if missing := missing_runs(loaded, rows):
        tell(missing)


def _collect(recipe: str, scale: str, runs: Path | None, root: Path | None) -> tuple[Recipe, list[CellOutcome]]:
    """Return a recipe as it was swept, and the outcomes of its cells."""
    from logitclip.studies import sweeping
    from logitclip.studies.manifest import as_swept
    from logitclip.studies.recipe import load_recipe

    folders = {"runs": str(runs_folder(runs)), "root": None if root is None else str(root)}
    loaded = as_swept(load_recipe(recipe, scale, **folders))
    return loaded, sweeping.collect(loaded)
