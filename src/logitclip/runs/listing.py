"""A folder of runs: list, filter, compare and remove them."""

from __future__ import annotations

import contextlib
import fnmatch
import logging
import operator
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from logitclip import files
from logitclip.encoders.features import remove_unused
from logitclip.files import Json
from logitclip.registry import suggest
from logitclip.runs import claims, results
from logitclip.runs.checkpoints import CHECKPOINTS, temporary_files
from logitclip.runs.config import UNCOUNTED, RunConfig
from logitclip.runs.results import Failure, Result

log = logging.getLogger(__name__)

STATUSES = ("done", "failed", "running", "stopped")  # stopped: it can be resumed
UNFINISHED = 3600.0  # seconds after which a temporary file of the index is of a killed process
_COMPARE = {
    "=": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}


class NotARun(ValueError):
    """A folder that is not removed, because it is a link or not the folder of a run."""


@dataclass(frozen=True)
class Run:
    """One folder of a run."""

    folder: Path
    config: RunConfig | None  # resolved, that of the result if there is one; None if it is missing or damaged
    outcome: Result | Failure | None
    owner: str | None  # the process that trains it now

    @property
    def id(self) -> str:
        return self.folder.name

    @property
    def status(self) -> str:
        """One of `STATUSES`."""
        if isinstance(self.outcome, Result):
            return "done"
        if self.owner is not None:
            return "running"
        return "failed" if self.outcome is not None else "stopped"

    @property
    def bytes(self) -> int:
        """Disk use of its files."""
        return _size(self.folder)

    @property
    def record(self) -> Json:
        """The run as one flat row: id, status, options and numbers; None where there is no number yet."""
        options = {} if self.config is None else asdict(self.config)
        result = asdict(self.outcome) if isinstance(self.outcome, Result) else {}
        return {
            "id": self.id,
            "status": self.status,
            **{name: options.get(name) for name in results.OPTIONS},
            **{name: result.get(name) for name in results.NUMBERS},
        }


def read_runs(folder: Path) -> list[Run]:
    """Return every run in a folder of runs, oldest first. Nothing is imported and no data is read."""
    if not folder.is_dir():
        raise ValueError(f"There is no folder of runs {folder}: name it with --runs.")
    found = [path for path in folder.iterdir() if re.fullmatch("[0-9a-f]{16}", path.name) and path.is_dir()]
    return [read_run(path) for path in sorted(found, key=lambda path: (path.stat().st_mtime, path.name))]


def read_run(folder: Path) -> Run:
    """Return the run in one folder."""
    outcome = results.read_outcome(folder)
    options = outcome.config if isinstance(outcome, Result) else _unchanged_options(folder)
    try:
        config = RunConfig(**options) if isinstance(options, dict) else None
    except (TypeError, ValueError):  # of another version
        config = None
    return Run(folder, config, outcome, claims.describe_owner(folder))


def _unchanged_options(folder: Path) -> Json | None:
    """Return the options of a run without a result; None if they are missing, or were edited afterwards."""
    options = files.read_json(folder / results.CONFIG)
    if not isinstance(options, dict) or options.pop("digest", None) in (None, files.object_digest(options)):
        return options if isinstance(options, dict) else None
    log.warning("%s has been changed: the run matches no condition on its options.", folder / results.CONFIG)
    return None


def find(runs: Sequence[Run], start: str) -> Run:
    """Return the run whose id begins with `start`."""
    matches = [run for run in runs if run.id.startswith(start.lower())]
    if len(matches) == 1 and start:
        return matches[0]
    if not matches:
        raise ValueError(f"No run has an id that begins with {start!r}: `logitclip runs` lists them.")
    raise ValueError(f"{len(matches)} runs have an id that begins with {start!r}: write more of it.")


def select(runs: Iterable[Run], conditions: Iterable[str]) -> list[Run]:
    """Return the runs that meet every condition.

    Args:
        conditions: An option, number or `status`, compared with a value: ``loss=ce``, ``clip=norm:*`` (with the
            wildcards * and ?), ``lr<0.1``, ``memorised>=50``. A run without the number does not meet the condition;
            ``memorised=none`` finds such runs.
    """
    chosen = list(runs)
    for condition in conditions:
        name, sign, wanted = _parse_condition(condition)
        chosen = [run for run in chosen if _meets(run.record[name], sign, wanted)]
    return chosen


def sort_runs(runs: Iterable[Run], name: str) -> list[Run]:
    """Sort runs by a number, highest first, or by text, from a to z; those without it come last."""
    _check_column(name)

    def key(run: Run) -> tuple[bool, float, str]:
        value = run.record[name]
        number = isinstance(value, int | float)
        return value is None, -value if number else 0.0, "" if number else str(value)

    return sorted(runs, key=key)


def changed_options(config: RunConfig) -> Json:
    """Return the options of a resolved config that differ from the defaults for its dataset, if it has any."""
    try:
        plain = RunConfig(data=config.data, plugin=config.plugin, root=config.root).resolve()
    except ValueError:  # no defaults, or a dataset of a plugin, which is not imported to read, or of another version
        plain = RunConfig()
    hidden = {*UNCOUNTED, "data"}
    return {
        field.name: getattr(config, field.name)
        for field in fields(config)
        if field.name not in hidden and getattr(config, field.name) != getattr(plain, field.name)
    }


def as_csv(runs: Iterable[Run]) -> str:
    """Return one line for each run, for pandas and spreadsheets."""
    lines = (results.csv_line(run.record.values()) for run in runs)
    return results.csv_line(results.COLUMNS) + "".join(lines)


def remove(run: Run, *, dry: bool = False) -> int:
    """Remove the folder of a run and return the bytes that were freed; if `dry`, remove nothing.

    Raises:
        NotARun: The folder is a link, or has no config.json of ours.
        logitclip.runs.claims.Claimed: The run is being trained.
    """
    if run.folder.is_symlink():
        raise NotARun(f"{run.folder} is a link, and only folders of runs are removed. Remove the link yourself.")
    if not _is_run_folder(run.folder) and not claims.is_unstarted(run.folder):
        raise NotARun(f"{run.folder} is not the folder of a run: it has no config.json of ours. It is left as it is.")
    size = run.bytes
    if dry and run.owner is not None:
        raise claims.Claimed(f"{run.folder} is being trained by {run.owner}.")
    if dry:
        return size
    with claims.claim(run.folder):
        for file in run.folder.iterdir():
            if file.name != claims.CLAIM:
                files.remove(file)
    (run.folder / claims.CLAIM_LOCK).unlink(missing_ok=True)
    run.folder.rmdir()
    return size


def collect_garbage(folder: Path, *, dry: bool = False) -> dict[str, int]:
    """Remove checkpoints of finished runs, temporary files of killed processes and folders of runs that never started.

    Features that no run names any more go too, whatever folder their runs were in. The index is rebuilt. Links are not
    followed. Return the bytes of each file or folder that was removed, or, if `dry`, that would be.
    """
    freed: dict[str, int] = {}
    for run in read_runs(folder):
        if not _find_needless(run):
            continue
        late = f"{run.folder} is being claimed by another process: try again."
        lock = files.lock(run.folder / claims.CLAIM_LOCK, claims.LOCK_TIMEOUT, late=late)
        with contextlib.nullcontext() if dry else lock:
            for path in _find_needless(read_run(run.folder)):  # again, as it may have been claimed since
                freed[str(path.relative_to(folder))] = _size(path)
                if not dry:
                    claims.remove_unstarted(path) if path == run.folder else files.remove(path)
    for path in folder.glob(f"{files.SCRATCH}*"):  # of the index
        if path.lstat().st_mtime < time.time() - UNFINISHED:
            freed[path.name] = _size(path)
            if not dry:
                files.remove(path)
    freed |= remove_unused(dry=dry)
    if not dry:
        with files.lock(folder / results.INDEX_LOCK, claims.LOCK_TIMEOUT):
            if results.can_write_index(folder / results.INDEX):
                files.replace(folder / results.INDEX, as_csv(read_runs(folder)).encode())
    return freed


def _find_needless(run: Run) -> list[Path]:
    """Return the files and folders of a run that nobody needs; the whole folder if the run never started."""
    if run.owner is not None or run.folder.is_symlink():
        return []
    if claims.is_unstarted(run.folder):
        return [run.folder]
    needless = temporary_files(run.folder)
    if run.status == "done":
        left = (run.folder / CHECKPOINTS, run.folder / results.FAILURE)
        needless += [path for path in left if path.exists() or path.is_symlink()]
    return needless


def _is_run_folder(folder: Path) -> bool:
    """Return whether a folder has the config.json of a run, of this version or another."""
    options = files.read_json(folder / results.CONFIG)
    return isinstance(options, dict) and {"data", "loss", "model", "seed"} <= options.keys()


def _size(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder; those of links are the links' own."""
    found = [path, *path.rglob("*")] if path.is_dir() and not path.is_symlink() else [path]
    return sum(file.lstat().st_size for file in found if file.is_symlink() or file.is_file())


def _parse_condition(condition: str) -> tuple[str, str, str]:
    """Split a condition such as lr<0.1 into its name, sign and value, and check all three."""
    match = re.fullmatch(r"\s*(\w+)\s*(!=|<=|>=|=|<|>)\s*(.*?)\s*", condition)
    if match is None:
        raise ValueError(f"A condition is an option, = or < or >, and a value, as in loss=ce; got {condition!r}.")
    name, sign, wanted = match.groups()
    _check_column(name)
    if sign not in ("=", "!=") and _parse_number(wanted) is None:
        raise ValueError(f"{name} is compared with a number, as in {name}{sign}0.1; got {wanted!r}.")
    return name, sign, wanted


def _check_column(name: str) -> None:
    if name not in results.COLUMNS:
        raise ValueError(f"A run has no option or number {name!r}. {suggest(name, results.COLUMNS)}")


def _meets(value: object, sign: str, wanted: str) -> bool:
    """Return whether an option or number of a run meets a condition; text is compared with wildcards."""
    number = _parse_number(wanted)
    if value is None and number is not None:
        return False
    if isinstance(value, int | float) and not isinstance(value, bool) and number is not None:
        return _COMPARE[sign](value, number)
    if sign not in ("=", "!="):
        return False
    text = ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
    return fnmatch.fnmatchcase(text.lower(), wanted.lower()) is (sign == "=")


def _parse_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
