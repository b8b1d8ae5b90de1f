"""The folder of a run: who works in it, what is written there, and reading it back.

`config.json`, `metrics.jsonl` (a row per epoch), `checkpoints/<epochs done>/`, `result.json`. Every file appears whole
or not at all: it is written under another name, flushed to the disk and renamed.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

HEARTBEAT = 5.0  # seconds between two signs of life
SILENCE = 60.0  # seconds without one after which a claim of another machine is void
KEPT = 2  # checkpoints kept: the last one, and the one before in case it is damaged


class Claimed(RuntimeError):
    """Somebody else is working on this run."""


# -- whole files -------------------------------------------------------------------------------------------------------


def write(path: Path, content: bytes) -> None:
    """Write a file in one step: after a crash there is the old one or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        _write_synced(scratch, content)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def write_json(path: Path, content: Any) -> None:
    write(path, (json.dumps(content, indent=1, sort_keys=True) + "\n").encode())


def read_json(path: Path) -> Any:
    """The content of a JSON file, or None if there is none that can be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        log.warning("%s is not valid JSON; it is taken as missing.", path)
        return None


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write all rows of `metrics.jsonl`."""
    write(path, _lines(rows))


def _lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Add one row at the end. A crash may cut it; resuming writes the rows of the checkpoint again."""
    with path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(row) + "\n")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl`; a last one cut by a crash is left out."""
    rows = []
    with contextlib.suppress(FileNotFoundError), path.open(encoding="utf-8") as stream:
        for line in stream:
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
    return rows


# -- who works here ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Hold the folder for this process, or raise `Claimed`. A claim whose owner has died is taken over."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "claim"
    me = {"host": socket.gethostname(), "pid": os.getpid(), "started": _started(os.getpid()), "key": uuid.uuid4().hex}
    with _one_at_a_time(folder / ".claim.lock"):
        if file.exists():
            owner = read_json(file) or {}
            if not _void(file, owner):
                where = f"process {owner.get('pid')} on {owner.get('host')}"
                raise Claimed(f"{folder} is being worked on by {where}. Wait for it, or remove {file} if it is gone.")
            file.unlink(missing_ok=True)
        try:
            with file.open("x") as stream:  # exclusive, should the lock not reach another machine
                stream.write(json.dumps(me))
        except FileExistsError:
            raise Claimed(f"{folder} has just been claimed by another process.") from None
    over = threading.Event()

    def beat() -> None:
        while not over.wait(HEARTBEAT):
            with contextlib.suppress(OSError):
                os.utime(file)

    heart = threading.Thread(target=beat, daemon=True)
    heart.start()
    try:
        yield
    finally:
        over.set()
        heart.join()
        if (read_json(file) or {}).get("key") == me["key"]:
            file.unlink(missing_ok=True)


@contextlib.contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Serialise the taking of claims, so that two processes cannot both take over the same void one."""
    try:
        import fcntl
    except ImportError:  # Windows: the exclusive creation of the claim has to do
        yield
        return
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _void(file: Path, owner: dict[str, Any]) -> bool:
    if owner.get("host") == socket.gethostname():
        started = _started(owner.get("pid", 0))
        return started is None or started != owner.get("started")
    try:
        return time.time() - file.stat().st_mtime > SILENCE
    except FileNotFoundError:
        return True


def _started(pid: int) -> str | None:
    """When a process of this machine was started, None if it is not there; tells a reused number from the old one."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        pass
    if Path("/proc/self").exists():
        return None
    try:  # no /proc (macOS): all one can ask is whether there is such a process
        os.kill(pid, 0)
    except OSError:
        return None
    return "unknown"


# -- checkpoints -------------------------------------------------------------------------------------------------------


def save_checkpoint(
    folder: Path, epochs: int, weights: dict[str, Any], state: dict[str, Any], rows: list[dict[str, Any]], run: str
) -> None:
    """Save a checkpoint as one directory that is renamed once, when it is complete."""
    import torch
    from safetensors.torch import save

    state_file = io.BytesIO()
    torch.save(state, state_file)
    files = {
        "weights.safetensors": save({k: v.detach().cpu().contiguous() for k, v in weights.items()}),
        "state.pt": state_file.getvalue(),
        "rows.jsonl": _lines(rows),
    }
    manifest = {"epochs": epochs, "run": run, "sha256": {k: hashlib.sha256(v).hexdigest() for k, v in files.items()}}
    files["manifest.json"] = json.dumps(manifest, indent=1).encode()
    target = folder / "checkpoints" / f"{epochs:06d}"
    scratch = folder / "checkpoints" / f".{epochs:06d}.{uuid.uuid4().hex[:8]}"
    try:
        scratch.mkdir(parents=True)
        for name, content in files.items():
            _write_synced(scratch / name, content)
        if target.exists():  # a damaged one that has just been done again
            shutil.rmtree(target)
        scratch.rename(target)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    for old in _checkpoints(folder)[KEPT:]:
        shutil.rmtree(old, ignore_errors=True)


Checkpoint = tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]


def load_checkpoint(folder: Path, run: str, *, tidy: bool = True) -> Checkpoint | None:
    """Weights, state and rows of the last checkpoint that is whole and of this run; None if there is none.

    One that is damaged or of another run is named in the log and the one before it is used. `tidy` removes what an
    interrupted write has left.
    """
    import torch
    from safetensors.torch import load_file

    for left_over in () if not tidy else (folder / "checkpoints").glob(".*"):
        shutil.rmtree(left_over, ignore_errors=True)
    for checkpoint in _checkpoints(folder):
        manifest = read_json(checkpoint / "manifest.json") or {}
        if manifest.get("run") != run:
            log.warning("The checkpoint %s is not of this run; it is passed over.", checkpoint)
            continue
        try:
            for name, digest in manifest["sha256"].items():
                with (checkpoint / name).open("rb") as stream:
                    if hashlib.file_digest(stream, "sha256").hexdigest() != digest:
                        raise ValueError(f"{name} has been changed")
            weights = load_file(checkpoint / "weights.safetensors")
            state = torch.load(checkpoint / "state.pt", weights_only=True, map_location="cpu")
            return weights, state, read_rows(checkpoint / "rows.jsonl")
        except Exception as error:  # whatever is wrong with it, there may be an older one
            log.warning("The checkpoint %s is damaged (%s); it is passed over.", checkpoint, error)
    return None


def _checkpoints(folder: Path) -> list[Path]:
    """Newest first."""
    return sorted((p for p in (folder / "checkpoints").glob("[0-9]*") if p.is_dir()), reverse=True)
