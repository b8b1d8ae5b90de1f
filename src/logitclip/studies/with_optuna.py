"""A search with Optuna: an option between two bounds, in a study that is kept and can be shared."""

from __future__ import annotations

import contextlib
import math
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from logitclip.runs import claims
from logitclip.runs.config import RunConfig, registries
from logitclip.runs.results import Failure, find_outcome
from logitclip.studies import executors
from logitclip.studies.listener import Listener
from logitclip.studies.tuning import Search, make_trial, val_accuracy, with_value
from logitclip.text import explain_missing, first_line

if TYPE_CHECKING:
    from optuna import Study
    from optuna.storages import JournalStorage
    from optuna.trial import FrozenTrial


def run_study(
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
    whole = _is_whole(config, option, low)

    def config_of(params: Mapping[str, float]) -> RunConfig:
        value = params[option]
        return make_trial(config, search, round(value) if whole else six_digits(value))

    name = f"{option} {config_of({option: low}).id}"  # the rest of the config decides the id
    states = optuna.trial.TrialState
    with _explain_storage_errors(storage):
        found = optuna.create_study(
            storage=_open_storage(storage), study_name=name, direction="maximize", load_if_exists=True
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
        result = find_outcome(run)
        score = val_accuracy(result)
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
            # Not by claiming it: a claim that a killed process left says that its run is to be tidied up.
            if lost is not None and claims.describe_owner(Path(lost.runs) / lost.id) is not None:
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


def _is_whole(config: RunConfig, option: str, low: float) -> bool:
    """Return whether the option, a field or a knob, must be an integer."""
    field, _, knob = option.partition(".")
    if not knob:
        return isinstance(getattr(config.resolve(), field, None), int)
    tried = with_value(config, option, low)  # refuses a field without knobs
    found = registries()[field].knobs(str(getattr(tried, field)).partition(":")[0]).get(knob)
    kinds = () if found is None else typing.get_args(found.annotation) or (found.annotation,)
    return low == round(low) and int in kinds and float not in kinds


def _open_storage(storage: str | None) -> str | JournalStorage | None:
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
