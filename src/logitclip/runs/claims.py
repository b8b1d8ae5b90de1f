"""Claims: one process at a time trains a run. A claim is a file in the folder of the run, kept alive by a heartbeat."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from logitclip import files
from logitclip.files import Json

HEARTBEAT = 5.0  # seconds between two heartbeats of a claim
SILENCE = 60.0  # seconds without a heartbeat after which a claim from another machine is void
CLAIM = "claim"  # the file
CLAIM_LOCK = ".claim.lock"  # held while a claim is made, and while unneeded files are removed
LOCK_TIMEOUT = 10.0  # seconds to wait for the lock; after that, rely on exclusive creation of the claim
PROC = Path("/proc")  # Linux only
WINDOWS = os.name == "nt"


class Claimed(RuntimeError):
    """Another process is training this run."""


@contextlib.contextmanager
def claim(folder: Path) -> Iterator[str]:
    """Claim the folder for this process; yields the key for `check_claim`.

    A claim is void if its process has died or, on another machine, sent no heartbeat for `SILENCE` seconds. If the
    folder is new and the block writes nothing, it is removed again.

    Raises:
        Claimed: Another process holds the folder.
        logitclip.files.CannotWrite: The folder cannot be made or written to.
    """
    file, key, new = folder / CLAIM, uuid.uuid4().hex, not folder.exists()
    over = threading.Event()

    def beat() -> None:
        while not over.wait(HEARTBEAT):
            with contextlib.suppress(OSError):
                os.utime(file)

    heart = threading.Thread(target=beat, daemon=True)
    try:
        try:
            with files.explain_errors(folder):
                try:
                    _write_claim(file, key)
                except FileNotFoundError:  # the folder was empty, and `runs gc` has just removed it
                    _write_claim(file, key)
            heart.start()
            yield key
        finally:
            _release(file, key)
    finally:  # twice: an interrupt at any point, also during the first release, must not leave the claim behind
        _release(file, key)
        over.set()
        if heart.is_alive():
            heart.join()
        with contextlib.suppress(OSError):  # this must not hide why the block failed
            if new and is_unstarted(folder):
                with files.lock(folder / CLAIM_LOCK, LOCK_TIMEOUT):
                    if not file.exists():
                        _remove_empty(folder)


def _release(file: Path, key: str) -> None:
    if _read_owner(file).get("key") == key:
        file.unlink(missing_ok=True)


def describe_owner(folder: Path) -> str | None:
    """Describe the process that trains the run in `folder` now; None if there is none."""
    file = folder / CLAIM
    if not file.exists():
        return None
    owner = _read_owner(file)
    return None if _is_void(file, owner, time.time()) else _name_of(owner)


def check_claim(folder: Path, key: str) -> None:
    """Raise `Claimed` unless the claim with this key still stands: another machine may have taken it over."""
    owner = _read_owner(folder / CLAIM)
    if owner.get("key") != key:
        raise Claimed(f"{folder} is no longer claimed by this process but by {_name_of(owner)}; this one stops.")


def is_unstarted(folder: Path) -> bool:
    """Return whether a folder has nothing but a claim: the process ended before it wrote anything."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set[str]()
    return bool(names) and names <= {CLAIM_LOCK, CLAIM}


def remove_unstarted(folder: Path) -> None:
    """Remove a folder that `is_unstarted`. The lock goes last: without it, a new claim may be made."""
    (folder / CLAIM).unlink(missing_ok=True)
    _remove_empty(folder)


def _remove_empty(folder: Path) -> None:
    (folder / CLAIM_LOCK).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not empty: it has just been claimed
        folder.rmdir()


def _write_claim(file: Path, key: str) -> None:
    """Write a claim of this process; a void claim of another process is replaced."""
    me = {"host": socket.gethostname(), "machine": _machine(), "pid": os.getpid(), "started": _start_time(os.getpid())}
    files.make_folder(file.parent)
    # One at a time, so that two processes cannot both take over the same void claim.
    with files.lock(file.parent / CLAIM_LOCK, LOCK_TIMEOUT) as lock:
        lock.touch()
        now = lock.stat().st_mtime  # by the clock of the file system, which may be a file server
        files.clear_place(file)
        if file.exists():
            owner = _read_owner(file)
            if not _is_void(file, owner, now):
                raise Claimed(
                    f"{file.parent} is being trained by {_name_of(owner)}. Wait for it, or remove {file} if it is gone."
                )
            file.unlink(missing_ok=True)
        try:
            with file.open("x", encoding="utf-8") as stream:  # exclusive, in case the lock reaches only this machine
                stream.write(json.dumps({**me, "key": key}))
        except FileExistsError:
            raise Claimed(f"{file.parent} has just been claimed by another process.") from None
        except BaseException:  # the disk is full, or an interrupt: an empty claim would not be released
            file.unlink(missing_ok=True)
            raise


def _read_owner(file: Path) -> Json:
    """Return the content of a claim; empty if it is missing, incomplete or not a claim."""
    owner = files.read_json(file)
    return owner if isinstance(owner, dict) and isinstance(owner.get("pid", 0), int) else {}


def _is_void(file: Path, owner: Json, now: float) -> bool:
    """Return whether the process of a claim is dead or, on another machine, silent."""
    if owner.get("machine") == _machine():
        started = _start_time(owner.get("pid", 0))
        return started is None or started != owner.get("started")
    try:
        # An empty claim is from a process that was killed while writing it. Both times are by the same clock, so a
        # claim stamped in the future was not made by a heartbeat.
        return abs(now - file.stat().st_mtime) > (SILENCE if owner else HEARTBEAT)
    except FileNotFoundError:
        return True


def _name_of(owner: Json) -> str:
    return f"process {owner['pid']} on {owner.get('host')}" if "pid" in owner else "another process"


def _machine() -> str:
    """Return what identifies the PID namespace: host, boot, container."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # no /proc: only the name
        parts += [(PROC / "sys/kernel/random/boot_id").read_text("ascii").strip(), os.readlink(PROC / "self/ns/pid")]
    if WINDOWS:  # which cannot tell whether a process is alive: only the heartbeat decides
        parts.append(str(os.getpid()))
    return " ".join(parts)


def _start_time(pid: int) -> str | None:
    """Return the start time of a process on this machine, which tells a reused PID apart; None if it is gone."""
    try:
        state, *rest = (PROC / f"{pid}/stat").read_text("latin-1").rpartition(")")[2].split()  # any name
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
