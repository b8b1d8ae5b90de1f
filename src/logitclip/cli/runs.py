"""The command about finished and unfinished runs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Literal

from rich.filesize import decimal
from rich.markup import escape
from tyro.conf import Positional, UseAppendAction, arg

from logitclip.cli.options import Flag, Runs, Text, runs_folder
from logitclip.cli.output import make_table, put, show, show_json, tell
from logitclip.cli.terminal import result_table
from logitclip.runs.claims import Claimed
from logitclip.runs.plugins import plugins_ignored
from logitclip.runs.results import OPTIONS, Failure, Result
from logitclip.text import counted, printable

if TYPE_CHECKING:
    from logitclip.runs.listing import Run

Action = Literal["list", "show", "diff", "rm", "gc"]
Ids = Annotated[Positional[tuple[str, ...]], arg(help_behavior_hint="")]
Where = Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="CONDITION", help_behavior_hint="")]

_TAKES = {  # action -> what it takes besides --runs
    "list": ("ids", "--where", "--sort", "--csv", "--json"),
    "show": ("ids", "--json"),
    "diff": ("ids",),
    "rm": ("ids", "--where", "--dry"),
    "gc": ("--dry",),
}


@plugins_ignored()
def runs(
    action: Positional[Action] = "list",
    ids: Ids = (),
    /,
    *,
    where: Where = (),
    sort: Text = None,
    csv: Flag = False,
    json: Flag = False,
    dry: Flag = False,
    runs: Runs = None,
) -> None:
    """List the runs in a folder, show one, compare two, or remove some.

    Example: logitclip runs list --where "noise=symmetric:*" --sort last10_accuracy

    `show` prints the options of a run that differ from the defaults, its result, and why it failed. `diff` compares two
    runs. `rm` removes runs, by id or --where. `gc` removes what no run needs any more: checkpoints of finished runs,
    half-written files, empty folders, and features of encoders that no run names.

    Args:
        action: What to do.
        ids: The runs: the beginning of an id is enough.
        where: Only runs that meet this condition: loss=ce, clip=norm:*, lr<0.1, status=failed. Can be repeated.
        sort: Sort by a number, as in last10_accuracy, highest first; or by an option.
        csv: Print CSV, one line for each run.
        json: Print JSON.
        dry: With rm and gc, only print what would be removed.
    """
    from logitclip.runs import listing

    folder = runs_folder(runs)
    given = {"ids": ids, "--where": where, "--sort": sort}
    given |= {"--csv": csv, "--json": json, "--dry": dry}
    for name, value in given.items():
        if value and name not in _TAKES[action]:
            raise ValueError(f"runs {action} takes {', '.join(_TAKES[action])} and --runs, not {name}.")
    if csv and json:
        raise ValueError("--csv and --json exclude each other.")
    wanted = {"show": 1, "diff": 2}.get(action)
    if wanted is not None and len(ids) != wanted:
        raise ValueError(f"runs {action} needs {'one id' if wanted == 1 else 'two ids'}, got {len(ids)}.")
    if action == "gc":
        _print_removed(listing.collect_garbage(folder, dry=dry), dry)
        return
    every = listing.read_runs(folder)
    found = [listing.find(every, start) for start in ids] if ids else every
    found = listing.select(found, where)
    if sort is not None:
        found = listing.sort_runs(found, sort)
    if action == "rm":
        if not ids and not where:
            raise ValueError("runs rm needs the ids of runs, or --where.")
        _remove_runs(found, dry)
    elif action == "show":
        _show_run(found[0], json)
    elif action == "diff":
        _show_difference(found[0], found[1])
    elif csv:
        print(printable(listing.as_csv(found)), end="")
    elif json:
        show_json([run.record for run in found])
    else:
        _show_list(found)


def _show_list(found: list[Run]) -> None:
    from logitclip.data.dataset import trusted_test

    records = [run.record for run in found]
    known = [record for record in records if record["data"]]  # a config that cannot be read has no options
    varied = [name for name in OPTIONS if name == "data" or len({str(record[name]) for record in known}) > 1]
    titles = {"last10_accuracy": "test", "val_accuracy": "validation", "memorised": "memorised", "seconds": "time"}
    numbers = [name for name in titles if any(record[name] is not None for record in records)]
    table = make_table(counted(len(found), "run"), "id", "status", *(titles[name] for name in numbers), *varied)
    for record in records:
        texts = [_format_value(record[name]) for name in varied]
        shown = ["" if record[name] is None else f"{record[name]:.1f}" for name in numbers]
        table.add_row(record["id"][:8], record["status"], *shown, *texts)
    for column in table.columns:  # on a narrow terminal, ids and numbers stay whole
        longest = max((len(str(cell)) for cell in column.cells), default=0)
        column.min_width = longest if column.header == "id" else min(6, longest)
        column.no_wrap = any("path=" in str(cell) or "/" in str(cell) for cell in column.cells)
    show(table)
    statuses = [record["status"] for record in records]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
    if not found:
        show("No run.")
        return
    show(f"{counts}. Accuracies and memorised labels in %, time in seconds. Validation labels are noisy.")
    if not all(trusted_test(str(record["data"])) for record in records if record["data"]):
        show("The test labels of your own data may be noisy too; a perfect classifier scores 1 - their noise rate.")


def _show_run(run: Run, json: bool) -> None:
    from logitclip.runs.listing import changed_options

    options = {} if run.config is None else {"data": run.config.data, **changed_options(run.config)}
    failure = run.outcome.error if isinstance(run.outcome, Failure) else None
    if json:
        show_json({**run.record, "folder": run.folder, "bytes": run.bytes, "changed": options, "error": failure})
        return
    show(_format_value(f"Run {run.id}: {run.status}. {run.folder}, {decimal(run.bytes)}"))
    table = make_table("", "option", "value", whole=("value",))
    for name, value in options.items():
        table.add_row(name, _format_value(value))
    show(table)
    if isinstance(run.outcome, Result):
        show(result_table(run.outcome))
    elif isinstance(run.outcome, Failure):
        show(_format_value(run.outcome.error))
        if run.outcome.traceback:
            show(_format_value(run.outcome.traceback))
    elif run.owner is not None:
        show(_format_value(f"Trained now by {run.owner}."))


def _show_difference(one: Run, other: Run) -> None:
    """Show the options and numbers that differ between two runs."""
    table = make_table("What differs", "", one.id[:8], other.id[:8])
    for name, value in one.record.items():
        if name != "id" and value != other.record[name]:
            table.add_row(name, _format_value(value), _format_value(other.record[name]))
    show(table)


def _remove_runs(found: list[Run], dry: bool) -> None:
    """Remove the runs that can be removed, then name the others."""
    from logitclip.runs.listing import NotARun, remove

    freed, kept = dict[str, int](), list[str]()
    for run in found:
        try:
            freed[run.id] = remove(run, dry=dry)
        except (Claimed, NotARun, OSError) as error:
            kept.append(str(error))
    _print_removed(freed, dry)
    if kept:
        raise ValueError(" ".join(kept))


def _print_removed(freed: dict[str, int], dry: bool) -> None:
    for name, size in freed.items():
        put(f"{name} ({decimal(size)})", sys.stdout)
    tell(f"{'would remove' if dry else 'removed'} {counted(len(freed), 'item')}, {decimal(sum(freed.values()))}.")


def _format_value(value: object) -> str:
    if isinstance(value, tuple | list):
        return ",".join(map(_format_value, value))
    return "" if value is None else escape(f"{value:g}" if isinstance(value, float) else str(value))
