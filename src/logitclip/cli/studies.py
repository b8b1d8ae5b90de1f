"""Commands about recipes: sweep runs one, report and figures show its results."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from logitclip.cli.options import File, Flag, Text, Whole
from logitclip.cli.output import show, show_json, tell
from logitclip.cli.training import stop_on_sigterm
from logitclip.progress import SweepBoard, duration
from logitclip.run_folder import Result


def sweep(
    recipe: Positional[str],
    /,
    *,
    scale: str = "full",
    executor: Literal["local", "inline", "ray"] = "local",
    jobs: Whole = None,
    address: Text = None,
    shard: str = "1/1",
    runs: Path = Path("runs"),
    root: File = None,
    download: Flag = False,
    mirror: Text = None,
) -> None:
    """Run all that is missing of a recipe, with its tuning; it can be stopped and started again at any time.

    Example: logitclip sweep quickstart

    Args:
        recipe: A recipe, see `logitclip list recipes`, or the path of a .toml file.
        scale: The scale to run it at, as in cpu or smoke.
        executor: Processes on this machine, this process alone, or a Ray cluster.
        jobs: Runs at the same time; as many as there is room for if not given.
        address: The address of a Ray cluster, or auto; without it, Ray is started on this machine.
        shard: Only one part of several, as in 1/4 to 4/4, each started as a job of its own.
        runs: The folder for the folders of runs; several sweeps may share it.
        root: The folder with the data; $LOGITCLIP_DATA or ./data if not given.
        download: Get the data, and human labels if the recipe has them, from the official address if it is not there.
        mirror: Get it from this folder, or address, instead.
    """
    from logitclip import data
    from logitclip.studies import sweeping
    from logitclip.studies.recipe import load_recipe

    part, _, parts = shard.partition("/")
    if not (part.isdecimal() and parts.isdecimal()):
        raise ValueError(f"shard must be like 1/4, the first of four parts; got {shard!r}.")
    stop_on_sigterm()
    loaded = load_recipe(recipe, scale, runs=str(runs), root=None if root is None else str(root))
    for spec, place in loaded.data():
        data.load(spec, place, download=download or mirror is not None, mirror=mirror)  # one sentence if it is missing
    board = SweepBoard(f"{loaded.name} ({loaded.scale})", [cell.config for cell in loaded.cells])
    with board:
        rows = sweeping.sweep(
            loaded, executor=executor, jobs=jobs, address=address, shard=(int(part), int(parts)), on_event=board
        )
    time = duration(board.seconds)
    print(
        f"{board.done} runs done, {board.skipped} skipped as they were done before, {board.failed} failed, in {time}."
    )
    if loaded.rows:
        print(f"Next: {loaded.command('report')}")
    else:  # a figure may have no table
        print(f"Next: {loaded.command('figures')} -o {shlex.quote(loaded.name)}.svg")
    if not all(isinstance(row.outcome, Result) for row in rows):
        raise SystemExit(1)


def report(
    recipe: Positional[str],
    /,
    *,
    scale: str = "full",
    html: File = None,
    markdown: File = None,
    latex: File = None,
    csv: File = None,
    json: Flag = False,
    runs: Path = Path("runs"),
    root: File = None,
) -> None:
    """Show the runs of a recipe as a table, beside the paper's numbers where there are any.

    Example: logitclip report quickstart --html report.html

    Args:
        recipe: A recipe, see `logitclip list recipes`, or the path of a .toml file.
        scale: The scale it was run at.
        html: Also write a page there: table, curves, noise, settings. It opens offline.
        markdown: Also write the table there as Markdown.
        latex: Also write the table there as LaTeX, for booktabs.
        csv: Also write the table there as CSV, a line for each cell and statistic.
        json: Print a JSON object instead of a table.
        runs: The folder with the folders of runs.
        root: The folder with the data; $LOGITCLIP_DATA or ./data if not given.
    """
    from logitclip.run_folder import write
    from logitclip.studies import reporting, sweeping
    from logitclip.studies.recipe import load_recipe
    from logitclip.studies.tables import tabulate

    loaded = load_recipe(recipe, scale, runs=str(runs), root=None if root is None else str(root))
    rows = sweeping.collect(loaded)
    table = tabulate(loaded, rows)
    writers = [(markdown, reporting.markdown), (latex, reporting.latex), (csv, reporting.csv)]
    writers.append((html, partial(reporting.html, rows=rows)))
    paths = [path for path, _ in writers if path is not None]
    if len(set(paths)) < len(paths):
        raise ValueError("Two formats cannot be written to the same file.")
    for path, text in writers:
        if path is not None:
            write(path, text(table).encode())
            tell(f"wrote {path}")
    if json:
        show_json(reporting.as_json(table))
    else:
        show(reporting.terminal(table))


def figures(
    recipe: Positional[str],
    /,
    *,
    out: Annotated[Path, arg(aliases=["-o"])],
    scale: str = "full",
    runs: Path = Path("runs"),
    root: File = None,
) -> None:
    """Draw the figure of a recipe or, if it has none, how its runs learn and memorise epoch by epoch.

    Example: logitclip figures quickstart -o curves.svg

    Args:
        recipe: A recipe, see `logitclip list recipes`, or the path of a .toml file.
        out: The file to write: .svg, .pdf, .png or, to point at and click on, .html.
        scale: The scale it was run at.
        runs: The folder with the folders of runs.
        root: The folder with the data; $LOGITCLIP_DATA or ./data if not given.
    """
    from logitclip.studies import figures, sweeping
    from logitclip.studies.recipe import load_recipe

    figures.check_suffix(out)
    loaded = load_recipe(recipe, scale, runs=str(runs), root=None if root is None else str(root))
    figures.save(figures.draw(loaded, sweeping.collect(loaded)), out)
    tell(f"wrote {out}")
