"""Hyperparameter search: the paper's grid, and a search that costs a quarter of it.

One number of a config may be the word `grid` or `auto`: ``norm:temp=grid``, ``norm:weight=grid``. `trials` returns
the runs that the search still needs, and `choose` fills in the best value. Both read only the config and the outcomes
of runs, so tuning can be stopped, resumed and shared like the runs themselves. A knob of the loss and one of the clip
may both be `auto`: they share the five trials.
"""

from __future__ import annotations

import contextlib
import logging
import math
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from logitclip.losses import LOSSES
from logitclip.registry import suggest
from logitclip.runs import claims
from logitclip.runs.config import RunConfig, load_plugins, registries, words_to_tune
from logitclip.runs.results import LAST, Failure, Result, outcome
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
from logitclip.studies import executors
from logitclip.studies.listener import Listener
from logitclip.text import explain_missing, first_line

if TYPE_CHECKING:
    from optuna import Study
    from optuna.storages import JournalStorage
    from optuna.trial import FrozenTrial

log = logging.getLogger(__name__)

Outcome = Callable[[RunConfig], Result | Failure | None]
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
    known: Any = LOSSES[name] if field == "loss" else None
    if known is not None and knob in known.tune:
        return Search(option, grid=known.tune[knob], fixed=True)
    key = f"{field}.{name}.{knob}" if knob else option
    if key not in GRIDS:
        raise ValueError(
            f"No values are known to choose {key} from, as for {', '.join(GRIDS)}. Name them: "
            f"`logitclip tune --option {option} --values 0.1,0.2`."
        )
    return Search(option, grid=GRIDS[key])


def trials(config: RunConfig, outcome: Outcome = outcome, search: Search | None = None) -> list[RunConfig]:
    """Return the next runs that the search needs and that have no outcome yet; empty when `choose` can decide."""
    config, search = _step(config, outcome, search)
    asked = [trial(config, search, value) for value in search.values or _values_to_try(config, outcome, search)]
    return [config for config in asked if outcome(config) is None]


def choose(config: RunConfig, outcome: Outcome = outcome, search: Search | None = None) -> RunConfig:
    """Return the config with the best value filled in; it trains on all examples."""
    config, search = _step(config, outcome, search)
    return replace(with_value(config, search.option, best_value(config, outcome, search)), val=0.0)


def _step(config: RunConfig, outcome: Outcome, search: Search | None) -> tuple[RunConfig, Search]:
    """Return the config and the search of one number.

    Of two numbers, the clip's comes first: three values of it, with the loss at its default. Then come the neighbours
    of that default, with the best value of the clip: two trials, because the default has its own already.
    """
    words = words_to_tune(config)
    if search is not None or len(words) < 2:
        return config, search or search_for(config)
    option = f"loss.{words[0][1]}"
    knob = fast_search(config, option)
    loss: Any = LOSSES[config.loss.partition(":")[0]]
    default = loss.defaults[words[0][1]]
    first = with_value(config, option, default)
    search = replace(search_for(first), count=TRIALS - 2)
    found = [outcome(trial(first, search, value)) for value in _values_to_try(first, outcome, search)]
    if None in found or not any(isinstance(result, Result) for result in found):
        return first, search
    at = knob.grid.index(default)
    return replace(config, clip=choose(first, outcome, search).clip), replace(knob, grid=knob.grid[at - 1 : at + 2])


def best_value(config: RunConfig, outcome: Outcome, search: Search) -> Tunable:
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


def trial(config: RunConfig, search: Search, value: Tunable) -> RunConfig:
    """Return the run that tries a value, with some of the noisy examples held out."""
    config = with_value(config, search.option, value)
    if search.values:
        return replace(config, val=config.val or GRID_VAL)
    return replace(config, val=config.val or HELD_OUT, val_rule="random")


def scores_of_trials(config: RunConfig, outcome: Outcome, search: Search) -> dict[Tunable, float | None]:
    """Return the validation accuracy of each value tried so far, in order and in %; None if its run failed."""
    found = outcomes_of_trials(config, outcome, search, search.values or _values_to_try(config, outcome, search))
    return {value: _validation(result) for value, result in found.items()}


def fast_trials(config: RunConfig, outcome: Outcome, search: Search) -> dict[float, Trial | None]:
    """Return the finished trials of the fast search; None for those that failed."""
    return _trials(outcomes_of_trials(config, outcome, search, _values_to_try(config, outcome, search)))


def outcomes_of_trials(
    config: RunConfig, outcome: Outcome, search: Search, values: Iterable[V]
) -> dict[V, Result | Failure]:
    """Return the outcomes of the finished trials among these values."""
    found = {value: outcome(trial(config, search, value)) for value in values}
    return {value: result for value, result in found.items() if result is not None}


# -- the fast search ---------------------------------------------------------------------------------------------------


def _values_to_try(config: RunConfig, outcome: Outcome, search: Search) -> list[float]:
    """Return the values to try, as far as they are known from the outcomes so far."""
    if search.fixed:
        return list(search.grid)
    between = range_of(search.grid)
    done: dict[float, Trial | None] = {}
    while ahead := [value for value in propose_values(between, done, search.count) if value not in done]:
        found = outcomes_of_trials(config, outcome, search, ahead)
        done |= _trials(found)
        if len(found) < len(ahead):
            break
    return propose_values(between, done, search.count)


def _validation(found: Result | Failure | None) -> float | None:
    """Return the accuracy on held-out noisy labels, mean of the last 10 epochs: the paper's score."""
    return found.val_accuracy if isinstance(found, Result) else None


def _trials(found: Mapping[float, Result | Failure]) -> dict[float, Trial | None]:
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
    listener: Listener | None = None,
) -> Study:
    """Search a numeric option between two bounds with Optuna until `count` trials have ended; it can be resumed.

    A study that is killed and resumed makes the same trials as one that is not: the seed of each proposal follows from
    the number of finished trials. Trials that failed are tried again when the study is resumed, unless they diverged.
    Processes with the same arguments and storage share one study.

    Args:
        storage: Where the study is kept: a file (SQLite; a name that ends in .log is a journal), or any SQL address.
            None keeps it in memory; the runs, which take the time, are kept in any case.
        log: Sample log-uniformly.
    """
    with explain_missing("Studies need Optuna", "tune"):
        import optuna
    if not -math.inf < low < high < math.inf or (log and low <= 0):
        raise ValueError(
            f"The bounds must be two numbers, the first smaller{' and positive' * log}; got {low}, {high}."
        )
    if count < 1:
        raise ValueError(f"A study needs at least one trial, got {count}.")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    search = Search(option, values=(low, high))
    whole = _whole(config, option, low)

    def config_of(params: Mapping[str, float]) -> RunConfig:
        value = params[option]
        return trial(config, search, round(value) if whole else six_digits(value))

    name = f"{option} {config_of({option: low}).id}"  # the rest of the config decides the id
    states = optuna.trial.TrialState
    with _explain_storage_errors(storage):
        found = optuna.create_study(
            storage=_storage(storage), study_name=name, direction="maximize", load_if_exists=True
        )
        _resume_trials(found, config_of)
    failures = 0  # of this call: so a study of failures ends as well
    while True:
        with _explain_storage_errors(storage):
            ended = len(found.get_trials(deepcopy=False, states=(states.COMPLETE, states.PRUNED)))
            if ended + failures >= count:
                return found
            found.sampler = optuna.samplers.TPESampler(seed=config.seed + ended + failures)
            asked = found.ask()
            if whole:
                asked.suggest_int(option, round(low), round(high), log=log)
            else:
                asked.suggest_float(option, low, high, log=log)
        run = config_of(asked.params)
        executors.execute([run], executor="inline", listener=listener)
        result = outcome(run)
        score = _validation(result)
        diverged = isinstance(result, Failure) and result.final  # it has no score, and would have none again
        failures += score is None and not diverged
        state = states.COMPLETE if score is not None else states.PRUNED if diverged else states.FAIL
        with _explain_storage_errors(storage):
            # Another process may have taken this trial for a killed one, and have repeated it.
            found.tell(asked, score, state, skip_if_finished=True)


def _resume_trials(study: Study, config_of: Callable[[Mapping[str, float]], RunConfig]) -> None:
    """Ask again for trials whose process was killed, or that failed for a reason that may have passed."""
    from optuna.trial import TrialState as states

    def run_of(trial: FrozenTrial) -> RunConfig | None:
        params = trial.params or trial.system_attrs.get("fixed_params")  # of a trial that waits
        return config_of(params) if params else None

    others = study.get_trials(states=(states.WAITING, states.COMPLETE, states.PRUNED))
    covered = {run_of(trial) for trial in others}
    for left in study.get_trials(states=(states.RUNNING, states.FAIL)):
        lost = run_of(left)
        if left.state == states.RUNNING:
            if lost is not None and not _is_abandoned(lost):
                covered.add(lost)
                continue
            study.tell(left.number, state=states.FAIL, skip_if_finished=True)
        if lost is not None and lost not in covered:
            covered.add(lost)
            study.enqueue_trial(left.params)


@contextlib.contextmanager
def _explain_storage_errors(storage: str | None) -> Iterator[None]:
    """Explain errors of the file or database of a study; their types depend on the database."""
    try:
        yield
    except ImportError:  # of a database's driver
        raise
    except Exception as error:
        raise ValueError(
            f"The study cannot be stored in {storage!r}: {first_line(error)}. Its finished runs are kept and will not "
            "be repeated."
        ) from error


def six_digits(value: float) -> float:
    """Return the value rounded to six digits, as a study tries it."""
    return value if isinstance(value, int) else float(f"{value:.6g}")


def _whole(config: RunConfig, option: str, low: float) -> bool:
    """Return whether the option, a field or a knob, must be an integer."""
    field, _, knob = option.partition(".")
    if not knob:
        return isinstance(getattr(config.resolve(), field, None), int)
    tried = with_value(config, option, low)  # refuses a field without knobs
    found = registries()[field].knobs(str(getattr(tried, field)).partition(":")[0]).get(knob)
    kinds = () if found is None else typing.get_args(found.annotation) or (found.annotation,)
    return low == round(low) and int in kinds and float not in kinds


def _storage(storage: str | None) -> str | JournalStorage | None:
    """Return the storage of a study for Optuna: an address, or a file as SQLite or as a journal."""
    if storage is None or "://" in storage:
        return storage
    if storage.endswith(".log"):
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        backend = JournalFileBackend(storage)
        _drop_torn_line(Path(storage))
        return JournalStorage(backend)
    return f"sqlite:///{storage}"


def _drop_torn_line(journal: Path) -> None:
    """Cut off the end of a line that a crash left behind: the next line would be appended to it."""
    from optuna.storages.journal import JournalFileSymlinkLock

    lock = JournalFileSymlinkLock(str(journal))
    lock.acquire()
    try:
        with journal.open("rb+") as stream:
            content = stream.read()
            if not content.endswith(b"\n"):
                stream.truncate(content.rfind(b"\n") + 1)
    finally:
        lock.release()


def _is_abandoned(config: RunConfig) -> bool:
    """Return whether no process trains this run."""
    # Not by claiming it: a claim that a killed process left says that its run is to be tidied up.
    return claims.describe_owner(Path(config.runs) / config.id) is None
