"""The folder of a run: claims, checkpoints, the result, and reading all of it back.

A run in progress has `config.json`, `noise.json` (the noise record), `metrics.jsonl` (a row per epoch) and
`checkpoints/<epochs done>/`. A finished run has `weights.safetensors` and `result.json` in place of the checkpoints,
`validation.npz` if examples were held out, and `examples.npz` if asked for. `result.json` names its run and has the
digest of every other file, so a result that is incomplete or of another run is never used.

Files are written atomically. Only `metrics.jsonl` grows during a run; a resumed run rewrites it from the checkpoint.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import logging
import math
import os
import shutil
import socket
import threading
import time
import typing
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from logitclip import files
from logitclip.registry import first_line
from logitclip.runs.config import UNCOUNTED, RunConfig, checked

log = logging.getLogger(__name__)

HEARTBEAT = 5.0  # seconds between two heartbeats of a claim
SILENCE = 60.0  # seconds without a heartbeat after which a claim from another machine is void
CLAIM_LOCK = ".claim.lock"  # held while a claim is made, and while unneeded files are removed
LOCK_TIMEOUT = 10.0  # seconds to wait for the lock; after that, rely on exclusive creation of the claim
KEPT = 2  # checkpoints to keep: the last one, and the one before in case the last is damaged
PROC = Path("/proc")  # Linux only
WINDOWS = os.name == "nt"


class Claimed(RuntimeError):
    """Another process is training this run."""


# -- metrics -----------------------------------------------------------------------------------------------------------


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write all rows of `metrics.jsonl`."""
    files.write(path, _lines(rows))


def _lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Append one row, all of it or nothing; only a crash can cut it short."""
    files.append(path, _lines([row]))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl`, without a last row that a crash cut short."""
    rows = []
    with contextlib.suppress(FileNotFoundError), path.open(encoding="utf-8") as stream:
        for line in stream:
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
    return rows


# -- claims ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def claim(folder: Path) -> Iterator[str]:
    """Claim the folder for this process; yields the key for `check_claim`.

    A claim is void if its process has died or, on another machine, sent no heartbeat for `SILENCE` seconds.

    Raises:
        Claimed: another process holds the folder.
        logitclip.files.CannotWrite: the folder cannot be made or written to.
    """
    file, key = folder / "claim", uuid.uuid4().hex
    over = threading.Event()

    def beat() -> None:
        while not over.wait(HEARTBEAT):
            with contextlib.suppress(OSError):
                os.utime(file)

    heart = threading.Thread(target=beat, daemon=True)
    try:  # an interrupt at any point must not leave the claim behind
        with files.explained(folder):
            try:
                _lock_and_take(file, key)
            except FileNotFoundError:  # the folder was empty, and `runs gc` has just removed it
                _lock_and_take(file, key)
        heart.start()
        yield key
    finally:
        over.set()
        try:
            _release(file, key)
        except BaseException:  # an interrupt between the end of the run and the release
            _release(file, key)
            raise
        if heart.is_alive():
            heart.join()


def _release(file: Path, key: str) -> None:
    if _owner(file).get("key") == key:
        file.unlink(missing_ok=True)


def claimed_by(folder: Path) -> str | None:
    """Describe the process that trains the run in `folder` now; None if there is none."""
    file = folder / "claim"
    if not file.exists():
        return None
    owner = _owner(file)
    return None if _void(file, owner, time.time()) else _who(owner)


def check_claim(folder: Path, key: str) -> None:
    """Raise `Claimed` unless the claim with this key still stands: another machine may have taken it over."""
    owner = _owner(folder / "claim")
    if owner.get("key") != key:
        raise Claimed(f"{folder} is no longer claimed by this process but by {_who(owner)}; this one stops.")


def _lock_and_take(file: Path, key: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    # One at a time, so that two processes cannot both take over the same void claim.
    with files.lock(file.parent / CLAIM_LOCK, LOCK_TIMEOUT) as lock:
        lock.touch()
        now = lock.stat().st_mtime  # by the clock of the file system, which may be a file server
        _take(file, {**_identity(), "key": key}, now)


def _take(file: Path, me: dict[str, Any], now: float) -> None:
    if file.exists():
        owner = _owner(file)
        if not _void(file, owner, now):
            raise Claimed(
                f"{file.parent} is being trained by {_who(owner)}. Wait for it, or remove {file} if it is gone."
            )
        file.unlink(missing_ok=True)
    try:
        with file.open("x") as stream:  # exclusive, in case the lock does not reach another machine
            stream.write(json.dumps(me))
    except FileExistsError:
        raise Claimed(f"{file.parent} has just been claimed by another process.") from None
    except OSError:
        file.unlink(missing_ok=True)
        raise


def _owner(file: Path) -> dict[str, Any]:
    """The content of a claim; empty if it is missing, incomplete or not a claim."""
    owner = files.read_json(file)
    return owner if isinstance(owner, dict) and isinstance(owner.get("pid", 0), int) else {}


def _void(file: Path, owner: dict[str, Any], now: float) -> bool:
    if owner.get("machine") == _machine():
        started = _started(owner.get("pid", 0))
        return started is None or started != owner.get("started")
    try:
        # An empty claim is from a process that was killed while writing it. Both times are by the same clock, so a
        # claim stamped in the future was not made by a heartbeat.
        return abs(now - file.stat().st_mtime) > (SILENCE if owner else HEARTBEAT)
    except FileNotFoundError:
        return True


def _identity() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "machine": _machine(),
        "pid": os.getpid(),
        "started": _started(os.getpid()),
    }


def _who(owner: dict[str, Any]) -> str:
    return f"process {owner['pid']} on {owner.get('host')}" if "pid" in owner else "another process"


def _machine() -> str:
    """Identifies the PID namespace: host, boot, container."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # no /proc: the name alone
        parts += [(PROC / "sys/kernel/random/boot_id").read_text().strip(), os.readlink(PROC / "self/ns/pid")]
    if WINDOWS:  # which cannot tell whether a process is alive: only the heartbeat decides
        parts.append(str(os.getpid()))
    return " ".join(parts)


def _started(pid: int) -> str | None:
    """The start time of a process on this machine, which tells a reused PID from the old one; None if it is gone."""
    try:
        state, *rest = (PROC / f"{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state == "Z" else rest[18]  # Z: a zombie
    except (OSError, IndexError, ValueError):
        pass
    if (PROC / "self").exists():
        return None
    if WINDOWS:  # os.kill(pid, 0) would send Ctrl-C
        return "unknown"
    try:  # no /proc (macOS): only whether there is such a process
        os.kill(pid, 0)
    except OSError:
        return None
    return "unknown"


# -- checkpoints -------------------------------------------------------------------------------------------------------

FILES: tuple[str, ...] = ("weights.safetensors", "state.pt", "rows.jsonl")


def save_checkpoint(
    folder: Path, weights: dict[str, Any], state: dict[str, Any], rows: list[dict[str, Any]], run: str
) -> None:
    """Save a checkpoint after `len(rows)` epochs, as one directory that is renamed once, when it is complete."""
    import torch

    state_file = io.BytesIO()
    torch.save(state, state_file)
    parts = (_as_safetensors(weights), state_file.getvalue(), _lines(rows))
    contents = dict(zip(FILES, parts, strict=True))
    manifest = {
        "epochs": len(rows),
        "run": run,
        "sha256": {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()},
    }
    contents["manifest.json"] = json.dumps(manifest, indent=1).encode()
    target = folder / "checkpoints" / f"{len(rows):06d}"
    scratch = files.scratch_name(target)
    with files.explained(target):
        try:
            scratch.mkdir(parents=True)
            for name, content in contents.items():
                files.write_synced(scratch / name, content)
            if target.exists():  # a damaged one, whose epoch has just been repeated
                shutil.rmtree(target)
            scratch.rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        files.sync_folder(target.parent)
    older = [checkpoint for checkpoint in _checkpoints(folder) if checkpoint < target]
    for old in older[KEPT - 1 :]:
        shutil.rmtree(old, ignore_errors=True)


def _as_safetensors(weights: dict[str, Any]) -> bytes:
    from safetensors.torch import save

    # Copies, because safetensors does not store weights that are shared between layers.
    return save({name: weight.detach().to("cpu", copy=True).contiguous() for name, weight in weights.items()})


Checkpoint = tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]


def load_checkpoint(folder: Path, run: str) -> Checkpoint | None:
    """Weights, state and rows of the last intact checkpoint of this run; None if there is none.

    Damaged checkpoints and those of another run are logged and skipped.
    """
    import torch
    from safetensors.torch import load

    for checkpoint in _checkpoints(folder):
        try:
            manifest = json.loads((checkpoint / "manifest.json").read_bytes())
            if manifest["run"] != run:
                log.warning("Skipped the checkpoint %s: it belongs to another run.", checkpoint)
                continue
            contents = [(checkpoint / name).read_bytes() for name in FILES]
            for name, content in zip(FILES, contents, strict=True):
                if hashlib.sha256(content).hexdigest() != manifest["sha256"][name]:
                    raise ValueError(f"{name} has been changed")
            weights, state, rows = contents
            return (
                load(weights),
                torch.load(io.BytesIO(state), weights_only=True, map_location="cpu"),  # no pickle is ever executed
                [json.loads(row) for row in rows.splitlines()],
            )
        except Exception as error:  # whatever the damage, an older one may be intact
            log.warning("Skipped the checkpoint %s: it is damaged (%s).", checkpoint, first_line(error))
    return None


def tidy(folder: Path) -> None:
    """Remove temporary files of killed processes."""
    for left_over in (*folder.glob(f"{files.SCRATCH}*"), *(folder / "checkpoints").glob(f"{files.SCRATCH}*")):
        if left_over.is_dir():
            shutil.rmtree(left_over, ignore_errors=True)
        else:
            left_over.unlink(missing_ok=True)


def _checkpoints(folder: Path) -> list[Path]:
    """Newest first."""
    return sorted((p for p in (folder / "checkpoints").glob("[0-9]*") if p.is_dir()), reverse=True)


# -- results and failures ----------------------------------------------------------------------------------------------

LAST = 10  # epochs over which the reported accuracy is averaged
METRICS, NOISE, WEIGHTS = "metrics.jsonl", "noise.json", "weights.safetensors"
VALIDATION, EXAMPLES = "validation.npz", "examples.npz"


@dataclass(frozen=True)
class Result:
    """The result of a finished run; accuracies and shares are percentages. `train` returns it.

    Attributes:
        id: the id of the run, which names its folder.
        config: the resolved `RunConfig` as a dict.
        last10_accuracy: test accuracy, mean of the last 10 epochs.
        best_accuracy: test accuracy of the best epoch, chosen on the test set.
        val_accuracy: accuracy on held-out noisy labels, mean of the last 10 epochs; None if none are held out.
        memorised: share of the wrong labels that the final model predicts as given; None if there are none.
        recovered: share of the wrong labels for which the final model predicts the true class.
        noise_rate: realised share of wrong training labels.
        clip: the clip, in canonical form: without knobs that have their default.
        epochs: number of epochs.
        seconds: training time.
        versions: versions of Python and the libraries, by name.
        device: name of the device.
        commit: the git commit of the code, if known.

    >>> import tempfile
    >>> import logitclip as lc
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = lc.train(lc.RunConfig(noise="symmetric:rate=0.5", epochs=2, runs=folder))
    ...     rows = result.rows
    >>> result.epochs, result.noise_rate, len(rows)
    (2, 50.0, 2)
    """

    id: str
    config: dict[str, Any]
    last10_accuracy: float
    best_accuracy: float
    val_accuracy: float | None
    memorised: float | None
    recovered: float | None
    noise_rate: float
    clip: str
    epochs: int
    seconds: float
    versions: dict[str, str]
    device: str
    commit: str | None

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return Path(self.config["runs"]) / self.id

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of `metrics.jsonl`, one for each epoch."""
        rows = read_rows(self.folder / METRICS)
        if len(rows) != self.epochs:
            raise Damaged(_damage(self.folder, f"{METRICS} has {len(rows)} rows, not {self.epochs}"))
        return rows

    @property
    def noise(self) -> dict[str, Any]:
        """The noise record: rule, seed, realised rate, transition matrix, and the classes by name and size."""
        return json.loads(self._read(NOISE))

    @property
    def validation(self) -> dict[str, np.ndarray]:
        """The `index`, `label` and `prediction` (after the last epoch) of each held-out example of a run with `val`."""
        with np.load(io.BytesIO(self._read(VALIDATION))) as file:
            return {name: file[name] for name in ("index", "label", "prediction")}

    def weights(self) -> dict[str, Any]:
        """The trained weights, as tensors by name."""
        from safetensors.torch import load

        return load(self._read(WEIGHTS))

    def _read(self, name: str) -> bytes:
        """The content of a file that belongs to the result, if it is unchanged."""
        digests = (files.read_json(self.folder / "result.json") or {}).get("sha256", {})
        try:
            content = (self.folder / name).read_bytes()
        except OSError as error:
            raise Damaged(_damage(self.folder, f"{name} is missing")) from error
        if hashlib.sha256(content).hexdigest() != digests.get(name):
            raise Damaged(_damage(self.folder, f"{name} has been changed"))
        return content


@dataclass(frozen=True)
class Failure:
    """A run that failed, as `failure.json` in its folder records it."""

    id: str
    error: str  # one sentence
    traceback: str
    attempts: int  # over all sweeps
    final: bool  # it would fail again (it diverged): do not retry


class Failed(ValueError):
    """A run that is needed has failed, or all runs of a search have."""


class Damaged(ValueError):
    """A result whose files are missing or changed, or that belongs to another run."""


def finish(folder: Path, result: Result, weights: dict[str, Any]) -> None:
    """Write the weights and the result, with the digests of all files that belong to it, and remove the checkpoints."""
    files.write(folder / WEIGHTS, _as_safetensors(weights))
    names = (METRICS, NOISE, WEIGHTS, VALIDATION, EXAMPLES)
    digests = {name: files.sha256(folder / name) for name in names if (folder / name).exists()}
    files.write_json(folder / "result.json", {**asdict(result), "sha256": digests})
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    _add_to_index(result, folder)


INDEX = "index.csv"  # of a folder of runs: a line for each finished run
OPTIONS = tuple(field.name for field in fields(RunConfig) if field.name not in UNCOUNTED)
NUMBERS = (
    *("last10_accuracy", "best_accuracy", "val_accuracy", "memorised", "recovered", "noise_rate", "seconds"),
    *("device", "commit"),
)
COLUMNS = ("id", "status", *OPTIONS, *NUMBERS)


def _add_to_index(result: Result, folder: Path) -> None:
    """Add a line for a finished run to the index of all runs."""
    index = folder.parent / INDEX
    values = {"id": result.id, "status": "done", **result.config, **vars(result)}
    try:
        if not index.exists():
            draft = files.scratch_name(index)
            draft.write_text(csv_line(COLUMNS))
            try:
                os.link(draft, index)
            except FileExistsError:  # another process was faster
                pass
            except OSError:  # a file system without hard links
                with contextlib.suppress(FileExistsError), index.open("x", encoding="utf-8") as stream:
                    stream.write(csv_line(COLUMNS))
            draft.unlink(missing_ok=True)
        files.append(index, csv_line(values.get(name) for name in COLUMNS).encode())
    except OSError as error:
        log.warning("Cannot add the run %s to %s: %s", result.id, index, error)


def csv_line(values: Iterable[Any]) -> str:
    """One line of CSV; lists as 0.4,0.7, and a quote before text that a spreadsheet would read as a formula."""
    texts = [",".join(map(str, value)) if isinstance(value, list | tuple) else value for value in values]
    texts = [f"'{text}" if isinstance(text, str) and text.startswith(tuple("=+-@")) else text for text in texts]
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(texts)
    return line.getvalue()


def outcome(config: RunConfig) -> Result | Failure | None:
    """Read the outcome of a run from its folder: a result, else a failure, else None."""
    return read_outcome(Path(config.runs) / config.id)


def read_outcome(folder: Path) -> Result | Failure | None:
    """Read the outcome in the folder of a run. A damaged result is logged and counts as a failure."""
    try:
        result = _checked_result(folder)
    except Damaged as error:
        log.warning("%s", error)
        return Failure(id=folder.name, error=str(error), traceback="", attempts=0, final=False)
    return result or _failure(folder)


def read_result(folder: Path) -> Result | None:
    """Read the result of a finished run; None if there is none, or if it is damaged, which is logged."""
    found = read_outcome(folder)
    return found if isinstance(found, Result) else None


def _checked_result(folder: Path) -> Result | None:
    if not (folder / "result.json").exists():
        return None
    content = files.read_json(folder / "result.json")
    digests = content.pop("sha256", None) if isinstance(content, dict) else None
    try:
        result = _of_type(Result, content)
        RunConfig(**result.config)
        if not isinstance(digests, dict) or not {METRICS, NOISE, WEIGHTS} <= digests.keys():
            raise ValueError("it has no digests")
    except (TypeError, ValueError) as error:
        raise Damaged(_damage(folder, f"result.json cannot be read ({error})")) from error
    if result.id != folder.name:
        raise Damaged(_damage(folder, f"result.json belongs to the run {result.id}"))
    for name, digest in digests.items():
        file = folder / Path(name).name
        if not file.is_file():
            raise Damaged(_damage(folder, f"{name} is missing"))
        if name != WEIGHTS and files.sha256(file) != digest:  # weights are large: they are checked when they are read
            raise Damaged(_damage(folder, f"{name} has been changed"))
    result.config["runs"] = str(folder.parent)  # folders may be moved
    return result


def _failure(folder: Path) -> Failure | None:
    content = files.read_json(folder / "failure.json")
    try:
        return None if content is None else _of_type(Failure, content)
    except (TypeError, ValueError) as error:
        log.warning("%s is ignored: %s", folder / "failure.json", error)
        return None


def record_failure(folder: Path, error: str, trace: str = "", *, attempts: int = 1, final: bool = False) -> Failure:
    """Write `failure.json`, counting earlier attempts, and return the failure."""
    before = read_outcome(folder)
    earlier = before.attempts if isinstance(before, Failure) else 0
    failure = Failure(folder.name, error, trace, earlier + attempts, final)
    try:
        files.write_json(folder / "failure.json", asdict(failure))
    except files.CannotWrite as problem:  # only the caller is told
        log.warning("%s", problem)
    return failure


T = typing.TypeVar("T", Result, Failure)


def _of_type(kind: type[T], content: Any) -> T:
    """`content`, as read from JSON, as a dataclass whose fields have the types they are annotated with."""
    if not isinstance(content, dict):
        raise TypeError(f"it must be a JSON object, got {type(content).__name__}")
    values = kind(**content)
    for name, hint in typing.get_type_hints(kind).items():
        value = checked(name, hint, getattr(values, name))
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} must be finite, got {value}.")
    return values


def _damage(folder: Path, reason: str) -> str:
    return f"The result in {folder} is not used: {reason}. Repeat the command to train it again."
