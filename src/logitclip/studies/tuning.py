"""Finding a good value of an option: the paper's grid, and a search that costs a quarter of it.

One number of a config may be the word `grid` or `auto`: ``norm:temp=grid``, ``norm:weight=grid``. `trials` says
which runs the choice still needs, and `choose` puts the number in place. Both look only at the config and at what came
out of the runs, so tuning can be stopped, resumed and shared like the runs themselves.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from logitclip import run_folder
from logitclip.config import RunConfig, load_plugins, registries, word_to_tune
from logitclip.registry import suggest
from logitclip.run_folder import LAST, Failure, Result, outcome
from logitclip.studies import executors

Outcome = Callable[[RunConfig], Result | Failure | None]

# What the word `grid` stands for. The paper names the values of temp (its "1/tau"), of LC-V's limit and the penalty's
# weight; it is silent on LogitNorm's temperature, which gets the same eleven.
_ELEVEN = (0.1, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0)
GRIDS: Mapping[str, tuple[float, ...]] = {
    "clip.norm.temp": _ELEVEN,
    "clip.value.limit": _ELEVEN,
    "clip.logit_norm.temperature": _ELEVEN,
    "penalty.norm.weight": (0.01, 0.05, 0.1, 0.5),
}
GRID_VAL = 0.1  # share of the noisy examples to validate on, as in the paper
FAST_TRIALS = 5
FAST_VAL = 0.51  # in the fast search: shorter runs, so that all five cost less than a quarter of the grid


@dataclass(frozen=True)
class Search:
    """How a value is looked for."""

    option: str  # a field of RunConfig, "lr", or a knob of a spec, "clip.temp"
    values: tuple[Any, ...] = ()  # all of these are tried; empty: the fast search,
    grid: tuple[float, ...] = ()  # which begins with three values of this range and goes wherever it gets better


def tuned(config: RunConfig) -> bool:
    """Whether a number of the config is to be found by tuning."""
    return word_to_tune(config) is not None


def with_value(config: RunConfig, option: str, value: Any) -> RunConfig:
    """The config with an option set: a field, or a knob of the spec in a field.

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
        raise ValueError(f"The option {field} has no knob {knob!r}: it is a value of its own.")
    load_plugins(config.plugin)
    name, knobs = registries()[field].split(str(getattr(config, field)))
    knobs.pop(knob, None)
    knobs[knob] = f"{value:g}" if isinstance(value, float) else str(value)
    return replace(config, **{field: f"{name}:" + ",".join(f"{key}={text}" for key, text in knobs.items())})


def search_for(config: RunConfig) -> Search:
    """The search that the word `grid` or `auto` in a config stands for."""
    wanted = word_to_tune(config)
    if wanted is None:
        raise ValueError("There is nothing to tune: no number of the config is a word, as in norm:temp=auto.")
    field, knob, word = wanted
    search = fast_search(config, f"{field}.{knob}")
    return replace(search, values=search.grid) if word == "grid" else search


def fast_search(config: RunConfig, option: str) -> Search:
    """The fast search for a knob of the config's clip or penalty, as in clip.temp."""
    field, _, knob = option.partition(".")
    key = f"{field}.{str(getattr(config, field, '')).partition(':')[0]}.{knob}" if knob else option
    if key not in GRIDS:
        raise ValueError(
            f"No values are known to choose {key} from, as for {', '.join(GRIDS)}. Name them: "
            f"`logitclip tune --option {option} --values 0.1,0.2`."
        )
    return Search(option, grid=GRIDS[key])


def trials(config: RunConfig, outcome: Outcome = outcome, search: Search | None = None) -> list[RunConfig]:
    """The runs that the choice needs next and that have no outcome yet; none when the choice can be made."""
    search = search or search_for(config)
    asked = [trial(config, search, value) for value in search.values or _asked(config, outcome, search)]
    return [config for config in asked if outcome(config) is None]


def choose(config: RunConfig, outcome: Outcome = outcome, search: Search | None = None) -> RunConfig:
    """The config with the best value in place, by what came out of the trials; it trains on everything."""
    search = search or search_for(config)
    return replace(with_value(config, search.option, best(tried(config, outcome, search))), val=0.0)


def best(scores: Mapping[Any, float | None]) -> Any:
    """The value with the highest score, the first of several; None is the score of a trial that failed."""
    known = {value: score for value, score in scores.items() if score is not None}
    if not known:
        raise ValueError("No value can be chosen: all trials failed.")
    return max(known, key=known.__getitem__)


def trial(config: RunConfig, search: Search, value: float) -> RunConfig:
    """The run that tries a value: with some of the noisy examples held out."""
    config = with_value(config, search.option, value)
    if search.values:
        return replace(config, val=config.val or GRID_VAL)
    return replace(config, val=config.val or FAST_VAL, val_rule="random")


def tried(config: RunConfig, outcome: Outcome, search: Search) -> dict[float, float | None]:
    """The score of each value tried so far, in their order; None if its run failed."""
    found = _found(config, outcome, search, search.values or _asked(config, outcome, search))
    return {value: _validation(result) for value, result in found.items()} if search.values else _scores(found)


def _found(
    config: RunConfig, outcome: Outcome, search: Search, values: Iterable[float]
) -> dict[float, Result | Failure]:
    """What came out of the trials of these values, as far as they are done."""
    found = {value: outcome(trial(config, search, value)) for value in values}
    return {value: result for value, result in found.items() if result is not None}


# -- the fast search ---------------------------------------------------------------------------------------------------


def _start(grid: tuple[float, ...]) -> tuple[float, ...]:
    """Three values to begin with, evenly spaced in their logarithms."""
    low, high = grid[len(grid) // 5], grid[-1]
    return low, _rounded(math.sqrt(low * high)), high


def _asked(config: RunConfig, outcome: Outcome, search: Search) -> list[float]:
    """The values to try, as far as the outcomes so far decide them: the first three, then one after the other."""
    values = list(_start(search.grid))
    while len(values) < FAST_TRIALS:
        found = _found(config, outcome, search, values)
        if len(found) < len(values):
            break
        values.append(_next(_scores(found)))
    return values


def _next(scores: dict[float, float | None]) -> float:
    """The next value: past the end if the best one lies there, else in the wider gap beside it (in logarithms)."""
    values = sorted(scores)
    best = max(range(len(values)), key=lambda i: _or_worst(scores[values[i]]))
    if best in (0, len(values) - 1):
        inner = values[1 if best == 0 else -2]
        return _rounded(values[best] * values[best] / inner)
    below, at, above = values[best - 1 : best + 2]
    return _rounded(math.sqrt(at * above if above / at >= at / below else at * below))


def _or_worst(score: float | None) -> float:
    return -math.inf if score is None else score


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _validation(found: Result | Failure | None) -> float | None:
    """The accuracy on held-out noisy labels, mean of the last 10 epochs: the paper's score."""
    return found.val_accuracy if isinstance(found, Result) else None


def _scores(found: Mapping[float, Result | Failure]) -> dict[float, float | None]:
    """The scores of the fast search, in points: validation accuracy, less two signs that a value is not a good one.

    The gap to the accuracy on the training labels: what is fitted but does not generalise is memorised. And the share
    of held-out examples on which it is outvoted by the other trials: what a network has memorised, or failed to learn,
    the others have not. Both show where validation is almost blind: under asymmetric noise right and wrong predictions
    alike agree with many of the noisy labels.
    """
    scores: dict[float, float | None] = dict.fromkeys(found)
    finished, held_out = dict[float, Result](), dict[float, dict[str, np.ndarray]]()
    for value, result in found.items():
        if isinstance(result, Result):
            try:
                held_out[value], finished[value] = result.validation, result
            except ValueError as error:
                warnings.warn(f"{error} Until then it counts as failed.", stacklevel=2)
    voters = [value for value, file in held_out.items() if _has_learnt(file["label"], file["prediction"])]
    for value, result in finished.items():
        score = result.val_accuracy or 0.0
        fitted = [row["train_accuracy"] for row in result.rows[-LAST:] if row["train_accuracy"] is not None]
        # DivideMix, say, has no such accuracy; and with augmentation it may be below that of validation.
        gap = max(0.0, sum(fitted) / len(fitted) - score) if fitted else 0.0
        others = [held_out[voter]["prediction"] for voter in voters if voter != value]
        apart = _outvoted(held_out[value]["prediction"], np.stack(others)) if len(voters) > 1 else 0.0
        scores[value] = score - gap - 100 * apart
    return scores


def _outvoted(prediction: np.ndarray, others: np.ndarray) -> float:
    """The share of examples for which fewer of the others [M, N] say the same than agree on something else."""
    same = (others == prediction).sum(0)
    most = (others[:, None] == others).sum(1).max(0)
    return float((same < most).mean())


def _has_learnt(label: np.ndarray, prediction: np.ndarray) -> bool:
    """Whether it is better than always to answer with the most frequent label, by two standard errors."""
    label = label.argmax(1) if label.ndim == 2 else label
    share = np.bincount(label).max() / len(label)
    return bool((prediction == label).mean() > share + 2 * math.sqrt(share * (1 - share) / len(label)))


# -- studies -----------------------------------------------------------------------------------------------------------


def study(
    config: RunConfig,
    option: str,
    low: float,
    high: float,
    count: int,
    *,
    storage: str | None = None,
    log: bool = True,
    on_event: executors.OnEvent | None = None,
) -> Any:
    """An Optuna study of any numeric option between two bounds, until `count` trials have ended; it can be resumed.

    Its name says what is studied, so that processes with the same arguments and storage share the work.

    Args:
        storage: where the study is kept: a file (SQLite; a name that ends in .log is a journal), or any SQL address.
            None keeps it in memory; the runs, which take the time, are kept in any case.
        log: look evenly in the logarithm of the option.
    """
    try:
        import optuna
    except ImportError as error:
        raise ImportError("Studies need Optuna: pip install 'logitclip[tune]'.") from error
    if not -math.inf < low < high < math.inf or (log and low <= 0):
        raise ValueError(
            f"The bounds must be two numbers, the first smaller{' and positive' * log}; got {low}, {high}."
        )
    if count < 1:
        raise ValueError(f"A study needs at least one trial, got {count}.")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    search = Search(option, values=(low, high))
    whole = _whole(config, option, low)

    def config_of(params: Mapping[str, Any]) -> RunConfig:
        value = params[option]
        return trial(config, search, round(value) if whole else six_digits(value))

    name = f"{option} {config_of({option: low}).id}"  # the rest of the config decides the id
    try:
        found = optuna.create_study(
            storage=_storage(storage), study_name=name, direction="maximize", load_if_exists=True
        )
    except ImportError:  # of a database's driver
        raise
    except Exception as error:  # what it is depends on the database
        reason = str(error).partition("\n")[0]
        raise ValueError(f"The study cannot be kept in {storage!r}: {reason}.") from error
    # A new seed each time it is resumed, or the first proposals would be repeated.
    found.sampler = optuna.samplers.TPESampler(seed=config.seed + len(found.trials))
    states = optuna.trial.TrialState
    for left in found.get_trials(states=(states.RUNNING,)):
        lost = config_of(left.params) if option in left.params else None
        if lost is None or _abandoned(lost):  # its process was killed: do it first, from its last checkpoint
            found.tell(left.number, state=states.FAIL, skip_if_finished=True)
            if lost is not None:
                found.enqueue_trial(left.params)
    while len(found.get_trials(states=(states.COMPLETE, states.PRUNED))) < count:
        asked = found.ask()
        if whole:
            asked.suggest_int(option, round(low), round(high), log=log)
        else:
            asked.suggest_float(option, low, high, log=log)
        run = config_of(asked.params)
        executors.execute([run], executor="inline", on_event=on_event)
        score = _validation(outcome(run))
        # One that failed or diverged has no score; it counts as pruned, so that a study of failures ends as well.
        # Another process that has just started may have taken it for one that was killed, and does it again.
        found.tell(asked, score, states.PRUNED if score is None else states.COMPLETE, skip_if_finished=True)
    return found


def six_digits(value: float) -> float:
    """The value that a study tries in place of one with more digits."""
    return value if isinstance(value, int) else float(f"{value:.6g}")


def _whole(config: RunConfig, option: str, low: float) -> bool:
    """Whether the option, a field or a knob, takes whole numbers alone."""
    field, _, knob = option.partition(".")
    if not knob:
        return isinstance(getattr(config.resolved(), field, None), int)
    if low != round(low):
        return False
    between = with_value(config, option, low + 0.5)
    try:
        between.resolved()
    except ValueError:
        with_value(config, option, round(low)).resolved()  # it is the option that is refused, not its fraction
        return True
    return False


def _storage(storage: str | None) -> Any:
    if storage is None or "://" in storage:
        return storage
    if storage.endswith(".log"):
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        return JournalStorage(JournalFileBackend(storage))
    return f"sqlite:///{storage}"


def _abandoned(config: RunConfig) -> bool:
    try:
        with run_folder.claim(Path(config.runs) / config.id):
            return True
    except run_folder.Claimed:
        return False
