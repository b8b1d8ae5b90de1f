"""Commands that train one model: train, and tune, which finds a value first."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import asdict, replace
from typing import Any, Literal

from logitclip.cli.options import Flag, RunOptions, Text, Whole
from logitclip.cli.output import show, show_json, tell
from logitclip.config import RunConfig
from logitclip.progress import SweepBoard, TrainingBar, make_table, result_table
from logitclip.run_folder import outcome


def train(config: RunOptions, *, download: Flag = False, mirror: Text = None, json: Flag = False) -> None:
    """Train one model; with no options, cross entropy on the digits. Everything else is an option.

    Example: logitclip train --noise symmetric:rate=0.5 --clip norm:temp=1.5

    Args:
        download: Get the data from its official address if it is not there.
        mirror: Get it from this folder, or address, instead.
        json: Print the result as one JSON object on stdout.
    """
    from logitclip.engine import without_destructors
    from logitclip.training import train

    stop_on_sigterm()
    _get_data(config, download, mirror)
    bar = TrainingBar()
    try:
        with without_destructors():  # a process of torchrun has joined a group
            result = train(config, on_epoch=bar)
    except (KeyboardInterrupt, SystemExit):
        bar.stop()
        tell("interrupted. The same command goes on from the last whole epoch.")
        raise
    finally:
        bar.stop()
    if os.environ.get("RANK", "0") != "0":  # one of several processes of torchrun: the first one reports
        return
    if json:
        show_json(asdict(result))
        return
    show(result_table(result))


def _get_data(config: RunConfig, download: bool, mirror: str | None) -> None:
    if download or mirror is not None:
        from logitclip import data

        data.load(config.data, config.root, download=True, mirror=mirror)


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
    executor: Literal["local", "inline", "ray"] = "local",
    jobs: Whole = None,
    address: Text = None,
    download: Flag = False,
    mirror: Text = None,
    json: Flag = False,
) -> None:
    """Find a good value of an option on held-out noisy labels, then train with it on everything.

    Example: logitclip tune --noise symmetric:rate=0.5 --clip norm:temp=auto

    There are three ways: a fast search (temp=auto, or --option clip.temp --fast), all values of a grid (temp=grid for
    the paper's, or --values), and a study by Optuna (--between). All runs are kept: the command can be stopped and
    started again.

    Args:
        option: What to tune: an option of the run, as in lr, or a knob of one, as in clip.temp or loss.q.
        values: The values to choose from, as in 0.1,0.5,1; texts that hold commas are parted by semicolons.
        fast: Find the value in five runs on less than half of the examples.
        between: The bounds of a study by Optuna, as in 0.1,10.
        linear: Let the study look evenly at the value, not at its logarithm.
        trials: Trials of the study, with those that are in its storage; 20 if not given.
        storage: Where the study is kept: a file, a journal (a name that ends in .log), or any SQL address.
        executor: Processes on this machine, this process alone, or a Ray cluster.
        jobs: Runs at the same time; as many as there is room for if not given.
        address: The address of a Ray cluster, or auto.
        download: Get the data from its official address if it is not there.
        mirror: Get it from this folder, or address, instead.
        json: Print the trials and the result as one JSON object on stdout.
    """
    from logitclip.studies import executors, sweeping, tuning

    stop_on_sigterm()
    ways = [values is not None, fast, between is not None]
    if sum(ways) != (option is not None):
        raise ValueError("Give --option with one of --values, --fast and --between; or neither, and temp=auto.")
    if between is None and (linear or storage is not None or trials is not None):
        raise ValueError("--linear, --trials and --storage are for a study: give --between as well.")
    if between is not None and (executor == "ray" or jobs is not None or address is not None):
        raise ValueError(
            "A study makes one run at a time, on this machine: --jobs, --address and --executor ray are not for it. To "
            "share the work, give the command several times with one --storage."
        )
    _get_data(config, download, mirror)
    if option == "clip.temp" and config.clip == "none":
        config = replace(config, clip="norm")
    if option is None:
        search = tuning.search_for(config)
    elif fast:
        search = tuning.fast_search(config, option)
    else:
        search = tuning.Search(option, _values(option, values or ""))
    board = SweepBoard(f"tune {search.option}", [config], tuned=search.option.partition(".")[0])
    where = {"executor": executor, "jobs": jobs, "address": address, "on_event": board}
    with board:
        if between is not None:
            bounds = _two_numbers(between)
            count = 20 if trials is None else trials
            study = tuning.study(config, search.option, *bounds, count, storage=storage, log=not linear, on_event=board)
            ended = [trial for trial in study.trials if trial.state.is_finished() and trial.params]
            scores = {tuning.six_digits(trial.params[search.option]): trial.value for trial in ended}
        else:
            scores = sweeping.tune(config, search, **where)
        best = tuning.best(scores)
        chosen = replace(tuning.with_value(config, search.option, best), val=0.0)
        executors.execute([chosen], **where)
    result: Any = outcome(chosen)
    if hasattr(result, "error"):
        raise ValueError(f"The run with the value that was chosen, {best}, has failed: {result.error}")
    if json:
        tried = [{"value": value, "score": score} for value, score in scores.items()]
        show_json({"option": search.option, "tried": tried, "chosen": best, "result": asdict(result)})
        return
    table = make_table(f"{search.option}: {len(scores)} values tried", "value", "score")
    for value, score in scores.items() if values else sorted(scores.items()):
        name = f"{value:g}" if isinstance(value, float) else f"{value}"
        table.add_row(name, "failed" if score is None else f"{score:.2f}", style="bold green" * (value == best))
    show(table)
    show(result_table(result))


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
    return tuple(parts) if "str" in kind or "Literal" in kind else tuple(map(_value, parts))


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
