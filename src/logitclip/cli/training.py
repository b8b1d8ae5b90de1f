"""Commands that train one model: train, and tune, which finds a value first."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from logitclip.cli.encoding import EncodingBar
from logitclip.cli.options import Executor, Flag, Quiet, RunOptions, Text, Verbose, Whole
from logitclip.cli.output import Exit, fail, make_table, show, show_json, tell
from logitclip.cli.terminal import SweepBoard, TrainingBar, announce, result_table
from logitclip.runs.config import RunConfig
from logitclip.runs.results import outcome, record_failure


def train(
    config: RunOptions,
    *,
    download: Flag = False,
    mirror: Text = None,
    json: Flag = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Train one model; without options, cross entropy on the digits.

    Example: logitclip train --noise symmetric:rate=0.5 --clip norm:temp=1.5

    Args:
        download: Download the data if it is missing.
        mirror: Download it from this folder or address instead of the official one.
        json: Print the result as one JSON object on stdout.
    """
    first = os.environ.get("RANK", "0") == "0"  # of several processes of torchrun, the first one reports
    set_verbosity(quiet, verbose)
    if first and not quiet:
        what = f"{config.data}, loss {config.loss}, clip {config.clip}, noise {config.noise}"
        announce(f"training on {what}", config.runs)
    from logitclip.engine import Diverged  # slow: it imports torch
    from logitclip.launch import without_destructors
    from logitclip.runs.train import train

    stop_on_sigterm()
    bar, encoding = TrainingBar(quiet=quiet, verbose=verbose), EncodingBar(quiet=quiet or not first)
    try:
        with without_destructors():  # under torchrun it has joined a process group
            result = train(config, on_epoch=bar, on_rows=encoding, download=download, mirror=mirror)
    except (KeyboardInterrupt, SystemExit):
        encoding.stop()
        bar.stop()
        tell("interrupted. Repeat the command to resume from the last whole epoch.")
        raise
    except Diverged as error:
        bar.stop()
        record_failure(Path(config.runs) / config.id, str(error), final=True)
        fail(Exit.FAILED, str(error))
    finally:
        bar.stop()
    if not first:
        return
    if json:
        show_json(asdict(result))
        return
    show(result_table(result))


def tune(
    config: RunOptions,
    *,
    option: Text = None,
    values: Text = None,
    fast: Flag = False,
    between: Text = None,
    linear: Flag = False,
    trials: Whole = None,
    storage: Text = None,
    executor: Executor = "local",
    jobs: Whole = None,
    address: Text = None,
    download: Flag = False,
    mirror: Text = None,
    json: Flag = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Find a good value of an option on held-out noisy labels, then train with it on everything.

    Example: logitclip tune --noise symmetric:rate=0.5 --clip norm:temp=auto

    There are three ways to search: a fast search (temp=auto, or --option clip.temp --fast), a grid (temp=grid is the
    paper's, --values your own), and an Optuna study (--between). All runs are kept, so the command can be resumed.

    Args:
        option: What to tune: an option of the run, as in lr, or a knob of one, as in clip.temp or loss.q.
        values: The values to try, as in 0.1,0.5,1. Separate values that contain commas with semicolons.
        fast: Search in five runs, each on less than half of the examples.
        between: Run an Optuna study between these bounds, as in 0.1,10.
        linear: Sample uniformly instead of log-uniformly.
        trials: Number of trials of the study, including those in its storage; 20 if not given.
        storage: Where the study is kept: a file, a journal (a name that ends in .log), or any SQL address.
        jobs: Number of runs at the same time; as many as fit if not given.
        address: The address of a Ray cluster, or auto.
        download: Download the data if it is missing.
        mirror: Download it from this folder or address instead of the official one.
        json: Print the trials and the result as one JSON object on stdout.
    """
    set_verbosity(quiet, verbose)
    stop_on_sigterm()
    ways = [values is not None, fast, between is not None]
    if sum(ways) != (option is not None):
        raise ValueError("Give --option with one of --values, --fast and --between; or neither, and temp=auto.")
    if between is None and (linear or storage is not None or trials is not None):
        raise ValueError("--linear, --trials and --storage are for a study: give --between as well.")
    if between is not None and (executor not in ("local", "inline") or jobs is not None or address is not None):
        raise ValueError(
            "A study makes one run at a time, on this machine: --jobs, --address and --executor ray are not for it. To "
            "share the work, give the command several times with one --storage."
        )
    if not quiet:
        announce(f"tuning on {config.data}", config.runs)
    from logitclip import data  # slow: they import torch
    from logitclip.search import scored
    from logitclip.studies import executors, sweeping, tuning

    if download or mirror is not None:
        data.load(config.data, config.root, download=True, mirror=mirror)
    if option == "clip.temp" and config.clip == "none":
        config = replace(config, clip="norm")
    if option is None:
        search = tuning.search_for(config)
    elif fast:
        search = tuning.fast_search(config, option)
    else:
        search = tuning.Search(option, _values(option, values or ""))
    field = search.option.partition(".")[0]
    board = SweepBoard(f"tune {search.option}", [config], field, quiet=quiet, verbose=verbose)
    where = {"executor": executor, "jobs": jobs, "address": address, "listener": board}
    with board:
        if between is not None:
            bounds = _two_numbers(between)
            count = 20 if trials is None else trials
            study = tuning.study(config, search.option, *bounds, count, storage=storage, log=not linear, listener=board)
            ended = [trial for trial in study.trials if trial.state.is_finished() and trial.params]
            scores = {tuning.six_digits(trial.params[search.option]): trial.value for trial in ended}
        else:
            scores = sweeping.tune(config, search, **where)
        known = any(score is not None for score in scores.values())
        best, chosen = None, config
        if known:
            best = tuning.highest(scores) if between else tuning.best_value(config, outcome, search)
            chosen = replace(tuning.with_value(config, search.option, best), val=0.0)
            executors.execute([chosen], **where)
    if not known:
        fail(Exit.FAILED, "No value can be chosen: all trials failed.")
    result: Any = outcome(chosen)
    if hasattr(result, "error"):
        fail(Exit.FAILED, f"The run with {search.option} = {best}, the best value, failed: {result.error}")
    parts = {} if search.values or between else scored(tuning.fast_trials(config, outcome, search))
    if json:
        tried = [
            {"value": value, "val_accuracy": score} | _in_points(parts.get(value)) for value, score in scores.items()
        ]
        show_json({"option": search.option, "tried": tried, "chosen": best, "result": asdict(result)})
        return
    show(_tried(search.option, scores if values else dict(sorted(scores.items())), best, parts))
    show(result_table(result))


def _in_points(score: Any) -> dict[str, Any]:
    """Return the parts of a score of the fast search, in points; none if there is no score."""
    if score is None:
        return {}
    parts = {"gap": score.gap, "outvoted": score.outvoted, "score": score.total}
    return {name: None if part is None else 100 * part for name, part in parts.items()} | {"contender": score.contender}


def _tried(option: str, scores: Mapping[Any, float | None], best: Any, parts: Mapping[Any, Any]) -> Any:
    """Return a table of the tried values, and why one of them was chosen."""
    from rich.console import Group
    from rich.markup import escape

    from logitclip.search import ERRORS

    equal = sum(score == scores[best] for score in scores.values())
    tied = sum(part is not None and part.contender for part in parts.values())
    if tied > 1:
        reason = f"the highest score of {tied} values within {ERRORS:g} standard errors of the highest accuracy"
    elif equal > 1:
        reason = f"the first tried of {equal} values with the highest accuracy"
    else:
        reason = "the highest accuracy"
    named = {value: f"{value:g}" if isinstance(value, float) else escape(str(value)) for value in scores}
    names = {"gap": "- gap to training labels", "outvoted": "- outvoted", "score": "= score"} if parts else {}
    heads = [*names.values(), f"within {ERRORS:g} errors"] if parts else []
    table = make_table("Values tried", option, "accuracy on held-out labels", *heads, "")
    for value, score in scores.items():
        cells = ["failed" if score is None else f"{score:.2f}"]
        points = _in_points(parts.get(value))
        cells += ["" if (number := points.get(name)) is None else f"{number:.2f}" for name in names]
        cells += ["yes" if points.get("contender") else ""] if parts else []
        winner = ("chosen", "bold green") if value == best else ("", "")
        table.add_row(named[value], *cells, winner[0], style=winner[1])
    why = "Accuracy in % on held-out noisy labels, mean of the last 10 epochs."
    if parts:
        why += (
            " The gap is the accuracy on the training labels minus this accuracy: a large gap means memorised labels. "
            "Outvoted is the share of held-out examples for which the other trials agree on another class."
        )
    return Group(f"[bold]Chosen: {option} = {named[best]}[/], {reason}.\n", table, why)


def set_verbosity(quiet: bool, verbose: bool) -> None:
    """Log at the level that -q and -v ask for."""
    if quiet and verbose:
        raise ValueError("--quiet and --verbose exclude each other.")
    logging.getLogger("logitclip").setLevel(logging.INFO if verbose else logging.WARNING)


def stop_on_sigterm() -> None:
    """On SIGTERM, save and stop as on Ctrl-C; ignore a second signal."""

    def stop(*_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)


def _values(option: str, text: str) -> tuple[bool | int | float | str, ...]:
    """The values to choose from. An option that takes text gets text, even if it looks like a number."""
    parts = [part.strip() for part in text.split(";" if ";" in text else ",")]
    kind = str(RunConfig.__annotations__.get(option))
    return tuple(parts) if any(word in kind for word in ("str", "Literal", "tuple")) else tuple(map(_value, parts))


def _value(text: str) -> bool | int | float | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def _two_numbers(text: str) -> tuple[float, float]:
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        raise ValueError(f"between must be two numbers, as in 0.1,10; got {text!r}.") from None
    return low, high
