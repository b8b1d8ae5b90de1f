"""Hyperparameter search: the paper's grid, and a search that costs a quarter of it.

One number of a config may be the word `grid` or `auto`: ``norm:temp=grid``, ``norm:weight=grid``. `next_trials` returns
the runs that the search still needs, and `choose` fills in the best value. Both read only the config and the outcomes
of runs, so tuning can be stopped, resumed and shared like the runs themselves. A knob of the loss and one of the clip
may both be `auto`: they share the five trials.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from logitclip.losses import LOSSES
from logitclip.registry import suggest
from logitclip.runs.config import RunConfig, registries, words_to_tune
from logitclip.runs.plugins import load_plugins
from logitclip.runs.results import LAST, Failure, Result, find_outcome
from logitclip.search import (
    HELD_OUT,
    NOTHING_LEARNT,
    TRIALS,
    Trial,
    best,
    has_learnt,
    highest,
    propose_values,
    range_of,
)

log = logging.getLogger(__name__)

FindOutcome = Callable[[RunConfig], Result | Failure | None]
Tunable = bool | int | float | str  # a value of an option or a knob
V = TypeVar("V", bound=Tunable)

# What the word `grid` stands for. The paper names the values of temp (its "1/tau"), of LC-V's limit and the penalty's
# weight; LogitNorm's temperature and the cap of softcap get the same eleven.
_ELEVEN = (0.1, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0)
GRIDS: Mapping[str, tuple[float, ...]] = {
    "clip.norm.temp": _ELEVEN,
    "clip.norm.tau": _ELEVEN,
    "clip.value.limit": _ELEVEN,
    "clip.logit_norm.temperature": _ELEVEN,
    "clip.softcap.cap": _ELEVEN,
    "penalty.norm.weight": (0.01, 0.05, 0.1, 0.5),
}
GRID_VAL = 0.1  # share of the noisy examples to validate on, as in the paper; for the fast search see `HELD_OUT`


@dataclass(frozen=True)
class Search:
    """How to search for a value."""

    option: str  # a field of RunConfig, "lr", or a knob of a spec, "clip.temp"
    values: tuple[Tunable, ...] = ()  # the grid: try all of these. Empty: the fast search,
    grid: tuple[float, ...] = ()  # which starts with three values of this range and follows the improvement,
    count: int = TRIALS  # as often as this,
    fixed: bool = False  # or tries exactly the values of the range


def is_tuned(config: RunConfig) -> bool:
    """Return whether a number of the config is still to be tuned."""
    return bool(words_to_tune(config))


def with_value(config: RunConfig, option: str, value: Tunable) -> RunConfig:
    """Return the config with an option set: a field, or a knob of the spec in a field.

    >>> with_value(RunConfig(clip="norm:temp=auto"), "clip.temp", 1.5).clip
    'norm:temp=1.5'
    >>> with_value(RunConfig(), "lr", 0.05).lr
    0.05
    """
    field, _, knob = option.partition(".")
    if field not in vars(config):
        raise ValueError(f"There is no option {field!r} to tune. {suggest(field, vars(config))}")
    if not knob:
        return replace(config, **{field: value})
    if field not in registries():
        raise ValueError(f"The option {field} has no knob {knob!r}: it is a plain value.")
    load_plugins(config.plugin)
    name, knobs = registries()[field].split(str(getattr(config, field)))
    knobs.pop(knob, None)
    return replace(config, **{field: registries()[field].format(name, {**knobs, knob: value})})


def search_for(config: RunConfig) -> Search:
    """Return the search that the word `grid` or `auto` in a config stands for; of two words, that of the clip."""
    wanted = words_to_tune(config)
    if not wanted:
        raise ValueError(
            "Nothing to tune. Write --clip norm:temp=auto, or name an option: --option lr --values 0.05,0.1."
        )
    field, knob, word = wanted[-1]
    search = fast_search(config, f"{field}.{knob}")
    return replace(search, values=search.grid) if word == "grid" else search


def fast_search(config: RunConfig, option: str) -> Search:
    """Return the fast search for a knob of the config's clip or penalty, as in clip.temp, or of its loss."""
    field, _, knob = option.partition(".")
    name = str(getattr(config, field, "")).partition(":")[0]
    if field == "loss" and knob in LOSSES[name].tune:
        return Search(option, grid=LOSSES[name].tune[knob], fixed=True)
    key = f"{field}.{name}.{knob}" if knob else option
    if key not in GRIDS:
        raise ValueError(
            f"No values are known to choose {key} from, as for {', '.join(GRIDS)}. Name them: "
            f"`logitclip tune --option {option} --values 0.1,0.2`."
        )
    return Search(option, grid=GRIDS[key])


def next_trials(
    config: RunConfig, outcome: FindOutcome = find_outcome, search: Search | None = None
) -> list[RunConfig]:
    """Return the next runs that the search needs and that have no outcome yet; empty when `choose` can decide."""
    config, search = _search_now(config, outcome, search)
    asked = [make_trial(config, search, value) for value in search.values or _values_to_try(config, outcome, search)]
    return [config for config in asked if outcome(config) is None]


def choose(config: RunConfig, outcome: FindOutcome = find_outcome, search: Search | None = None) -> RunConfig:
    """Return the config with the best value filled in; it trains on all examples.

    Raises:
        ValueError: If it has nothing to tune, or every trial failed.
    """
    config, search = _search_now(config, outcome, search)
    return replace(with_value(config, search.option, best_value(config, outcome, search)), val=0.0)


def _search_now(config: RunConfig, outcome: FindOutcome, search: Search | None) -> tuple[RunConfig, Search]:
    """Return the config and the search of one number.

    Of two numbers, the clip's comes first: three values of it, with the loss at its default. Then come the neighbours
    of that default, with the best value of the clip: two trials, because the default has its own already.
    """
    words = words_to_tune(config)
    if search is not None or len(words) < 2:
        return config, search or search_for(config)
    option = f"loss.{words[0][1]}"
    knob = fast_search(config, option)
    default = LOSSES[config.loss.partition(":")[0]].defaults[words[0][1]]
    first = with_value(config, option, default)
    search = replace(search_for(first), count=TRIALS - 2)
    found = [outcome(make_trial(first, search, value)) for value in _values_to_try(first, outcome, search)]
    if None in found or not any(isinstance(result, Result) for result in found):
        return first, search
    at, clip = knob.grid.index(default), choose(first, outcome, search).clip
    return replace(config, clip=clip), replace(knob, grid=knob.grid[at - 1 : at + 2])


def best_value(config: RunConfig, outcome: FindOutcome, search: Search) -> Tunable:
    """Return the value that the search chooses: for a grid, the one with the highest validation accuracy."""
    if search.values:
        return highest(scores_of_trials(config, outcome, search))
    trials = fast_trials(config, outcome, search)
    chosen = best(trials)
    if not any(map(has_learnt, trials.values())):
        log.warning(
            "The search for %s (loss %s, noise %s): %s", search.option, config.loss, config.noise, NOTHING_LEARNT
        )
    return chosen


def make_trial(config: RunConfig, search: Search, value: Tunable) -> RunConfig:
    """Return the run that tries a value, with some of the noisy examples held out."""
    config = with_value(config, search.option, value)
    if search.values:
        return replace(config, val=config.val or GRID_VAL)
    return replace(config, val=config.val or HELD_OUT, val_rule="random")


def scores_of_trials(config: RunConfig, outcome: FindOutcome, search: Search) -> dict[Tunable, float | None]:
    """Return the validation accuracy of each value tried so far, in order and in %; None if its run failed."""
    found = outcomes_of_trials(config, outcome, search, search.values or _values_to_try(config, outcome, search))
    return {value: val_accuracy(result) for value, result in found.items()}


def fast_trials(config: RunConfig, outcome: FindOutcome, search: Search) -> dict[float, Trial | None]:
    """Return the finished trials of the fast search; None for those that failed."""
    return _as_trials(outcomes_of_trials(config, outcome, search, _values_to_try(config, outcome, search)))


def outcomes_of_trials(
    config: RunConfig, outcome: FindOutcome, search: Search, values: Iterable[V]
) -> dict[V, Result | Failure]:
    """Return the outcomes of the finished trials among these values."""
    found = {value: outcome(make_trial(config, search, value)) for value in values}
    return {value: result for value, result in found.items() if result is not None}


# -- the fast search ---------------------------------------------------------------------------------------------------


def _values_to_try(config: RunConfig, outcome: FindOutcome, search: Search) -> list[float]:
    """Return the values to try, as far as they are known from the outcomes so far."""
    if search.fixed:
        return list(search.grid)
    between = range_of(search.grid)
    done: dict[float, Trial | None] = {}
    while ahead := [value for value in propose_values(between, done, search.count) if value not in done]:
        found = outcomes_of_trials(config, outcome, search, ahead)
        done |= _as_trials(found)
        if len(found) < len(ahead):
            break
    return propose_values(between, done, search.count)


def val_accuracy(found: Result | Failure | None) -> float | None:
    """Return the accuracy on held-out noisy labels, mean of the last 10 epochs: the paper's score."""
    return found.val_accuracy if isinstance(found, Result) else None


def _as_trials(found: Mapping[float, Result | Failure]) -> dict[float, Trial | None]:
    """Return the numbers of each run that the search needs; None if it failed."""
    trials: dict[float, Trial | None] = dict.fromkeys(found)
    for value, result in found.items():
        if not isinstance(result, Result):
            continue
        held_out = result.validation
        label = held_out["label"].argmax(1) if held_out["label"].ndim == 2 else held_out["label"]
        # A method need not have a training accuracy. DivideMix has one, of the examples that it believes to be clean.
        fitted = [row["train_accuracy"] for row in result.rows[-LAST:] if row["train_accuracy"] is not None]
        train_accuracy = sum(fitted) / len(fitted) / 100 if fitted else None
        trials[value] = Trial(held_out["prediction"], label, train_accuracy, (result.val_accuracy or 0.0) / 100)
    return trials
