"""The command that finds a good value of an option, then trains with it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from rich.console import Group
from rich.markup import escape
from rich.text import Text as RichText
from tyro.conf import arg

from logitclip.cli.options import Flag, OptionalInt, Place, Quiet, RunOptions, Text, Verbose
from logitclip.cli.output import Exit, fail, make_table, show, show_json
from logitclip.cli.terminal import SweepBoard, announce, result_table
from logitclip.cli.training import set_verbosity, stop_on_sigterm
from logitclip.files import Json
from logitclip.runs.config import RunConfig, words_to_tune
from logitclip.runs.results import Failure, find_outcome

if TYPE_CHECKING:
    from logitclip.search import Score


@dataclass(frozen=True)
class SearchOptions:
    """How to search; without these options, for the number that the clip or the penalty leaves open as auto or grid."""

    option: Text = None
    """What to tune: an option of the run, as in lr, or a knob of one, as in clip.temp or loss.q."""
    values: Text = None
    """The values to try, as in 0.1,0.5,1. Separate values that contain commas with semicolons."""
    fast: Flag = False
    """Search in five runs, each on less than half of the examples."""
    between: Text = None
    """Run an Optuna study between these bounds, as in 0.1,10."""
    linear: Flag = False
    """In a study, sample uniformly instead of log-uniformly."""
    trials: OptionalInt = None
    """Number of trials of a study, including those in its storage; 20 if not given."""
    storage: Text = None
    """Where a study is kept: a file, a journal (a name that ends in .log), or any SQL address."""


@dataclass(frozen=True)
class Tried:
    """The values that a search tried."""

    option: str
    scores: dict[Any, float | None]  # value -> accuracy on held-out labels in %; None if its run failed
    best: Any  # the chosen value; None if all runs failed
    parts: Mapping[Any, Score | None] = field(default_factory=dict)  # value -> its score, after a fast search


def tune(
    config: RunOptions,
    search: Annotated[SearchOptions, arg(name="search")],
    place: Annotated[Place, arg(name="")],
    *,
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
        download: Download the data, and the encoder if there is one, if they are missing.
        mirror: Download it from this folder or address instead of the official one.
        json: Print the trials and the result as one JSON object on stdout.
    """
    set_verbosity(quiet, verbose)
    stop_on_sigterm()
    _check_options(config, search, place)
    if not quiet:
        announce(f"tuning on {config.data}", config.runs)
    from logitclip import data  # slow: they import torch
    from logitclip.runs.encoding import fetch_encoders
    from logitclip.studies import executors, tuning

    if download or mirror is not None:
        data.load(config.data, config.root, download=True, mirror=mirror)
    if download:
        fetch_encoders([config])
    if search.option == "clip.temp" and config.clip == "none":
        config = replace(config, clip="norm")
    named = search.option or tuning.search_for(config).option
    board = SweepBoard(f"tune {named}", [config], named.partition(".")[0], quiet=quiet, verbose=verbose)
    where = {**asdict(place), "listener": board}
    with board:
        tried = _run_study(config, search, board) if search.between else _search_values(config, search, where)
        chosen = config
        if tried.best is not None:
            chosen = replace(tuning.with_value(config, tried.option, tried.best), val=0.0)
            executors.execute([chosen], **where)
    if tried.best is None:
        fail(Exit.FAILED, "No value can be chosen: all trials failed.")
    result = find_outcome(chosen)
    if isinstance(result, Failure):
        fail(Exit.FAILED, f"The run with {tried.option} = {tried.best}, the best value, failed: {result.error}")
    assert result is not None
    if json:
        listed = [
            {"value": value, "val_accuracy": score} | _score_in_points(tried.parts.get(value))
            for value, score in tried.scores.items()
        ]
        show_json({"option": tried.option, "tried": listed, "chosen": tried.best, "result": asdict(result)})
        return
    show(tried_table(tried if search.values else replace(tried, scores=dict(sorted(tried.scores.items())))))
    show(result_table(result))


def _check_options(config: RunConfig, search: SearchOptions, place: Place) -> None:
    """Refuse options that exclude each other."""
    if sum([search.values is not None, search.fast, search.between is not None]) != (search.option is not None):
        raise ValueError("Give --option with one of --values, --fast and --between; or neither, and temp=auto.")
    if search.between is None and (search.linear or search.storage is not None or search.trials is not None):
        raise ValueError("--linear, --trials and --storage are for a study: give --between as well.")
    elsewhere = place.executor not in ("local", "inline") or place.jobs is not None or place.address is not None
    if search.between is not None and elsewhere:
        raise ValueError(
            "A study makes one run at a time, on this machine: --jobs, --address and --executor ray are not for it. To "
            "share the work, give the command several times with one --storage."
        )
    options = {f"{name}.{knob}": (name, knob) for name, knob, _ in words_to_tune(config)}
    kept = search.option or next(iter(options), None)
    for name, knob in [place for option, place in options.items() if option != kept]:
        raise ValueError(
            f"One value is tuned at a time: give {knob} in --{name} {getattr(config, name)} a number"
            + (f", or leave out --option {search.option}." if search.option else ", or sweep a recipe.")
        )


def _search_values(config: RunConfig, options: SearchOptions, where: Json) -> Tried:
    """Try the values of a grid, or those of the fast search."""
    from logitclip.search import score_trials
    from logitclip.studies import sweeping, tuning

    if options.option is None:
        search = tuning.search_for(config)
    elif options.fast:
        search = tuning.fast_search(config, options.option)
    else:
        search = tuning.Search(options.option, parse_values(options.option, options.values or ""))
    scores = sweeping.tune(config, search, **where)
    if all(score is None for score in scores.values()):
        return Tried(search.option, scores, None)
    best = tuning.best_value(config, find_outcome, search)
    parts = {} if search.values else score_trials(tuning.fast_trials(config, find_outcome, search))
    return Tried(search.option, scores, best, parts)


def _run_study(config: RunConfig, options: SearchOptions, board: SweepBoard) -> Tried:
    """Try the values that Optuna proposes."""
    from logitclip.studies import tuning, with_optuna

    option = str(options.option)
    try:
        low, high = map(float, str(options.between).split(","))
    except ValueError:
        raise ValueError(f"between must be two numbers, as in 0.1,10; got {options.between!r}.") from None
    count = 20 if options.trials is None else options.trials
    more = {"storage": options.storage, "log": not options.linear, "listener": board}
    study = with_optuna.run_study(config, option, low, high, count, **more)
    ended = [trial for trial in study.trials if trial.state.is_finished() and trial.params]
    scores = {with_optuna.six_digits(trial.params[option]): trial.value for trial in ended}
    known = any(score is not None for score in scores.values())
    return Tried(option, scores, tuning.highest(scores) if known else None)


def _score_in_points(score: Score | None) -> Json:
    """Return the parts of a score of the fast search, in points; none if there is no score."""
    if score is None:
        return {}
    parts = {"gap": score.gap, "outvoted": score.outvoted, "score": score.total}
    return {name: None if part is None else 100 * part for name, part in parts.items()} | {"contender": score.contender}


def tried_table(tried: Tried) -> Group:
    """Return a table of the tried values, and why one of them was chosen."""
    from logitclip.search import TIED_WITHIN

    option, scores, best, parts = tried.option, tried.scores, tried.best, tried.parts
    equal = sum(score == scores[best] for score in scores.values())
    tied = sum(part is not None and part.contender for part in parts.values())
    if tied > 1:
        reason = f"the highest score of {tied} values within {TIED_WITHIN:g} standard errors of the highest accuracy"
    elif equal > 1:
        reason = f"the first tried of {equal} values with the highest accuracy"
    else:
        reason = "the highest accuracy"
    named = {value: f"{value:g}" if isinstance(value, float) else escape(str(value)) for value in scores}
    names = {"gap": "- gap to training labels", "outvoted": "- outvoted", "score": "= score"} if parts else {}
    heads = [*names.values(), f"within {TIED_WITHIN:g} errors"] if parts else []
    table = make_table("Values tried", option, "accuracy on held-out labels", *heads, "")
    for value, score in scores.items():
        cells = ["failed" if score is None else f"{score:.2f}"]
        points = _score_in_points(parts.get(value))
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
    return Group(RichText.from_markup(f"[bold]Chosen: {option} = {named[best]}[/], {reason}.\n"), table, why)


def parse_values(option: str, text: str) -> tuple[bool | int | float | str, ...]:
    """Return the values to choose from. An option that takes text gets text, even if it looks like a number."""
    parts = [part.strip() for part in text.split(";" if ";" in text else ",")]
    kind = str(get_type_hints(RunConfig).get(option))
    takes_text = any(word in kind for word in ("str", "Literal", "tuple"))
    return tuple(parts) if takes_text else tuple(map(_parse_value, parts))


def _parse_value(text: str) -> bool | int | float | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text
