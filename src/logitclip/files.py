"""Whole files: atomic writes, JSON, digests, and a lock between processes."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

log = logging.getLogger(__name__)

SCRATCH = ".scratch-"  # prefix of temporary names


class CannotWrite(OSError):
    """The disk is full, or the folder is not writable."""


def write(path: Path, content: bytes) -> None:
    """Write a file atomically: after a crash it has the old content or the new, never half of it.

    Symbolic links are followed. Devices and FIFOs are written to, not replaced.
    """
    if not path.name:
        raise ValueError(f"{path} is a folder: name a file in it.")
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_bytes(content)
            return
        path = Path(os.path.realpath(path))
        scratch = scratch_name(path)
        try:
            write_synced(scratch, content)
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)
        sync_folder(path.parent)


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Raise an OSError of the block as `CannotWrite`, with a sentence that names `path`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise CannotWrite(f"Cannot write {path}: {reason}. Earlier files are intact.") from error


def scratch_name(path: Path) -> Path:
    """A temporary name beside `path`."""
    return path.with_name(f"{SCRATCH}{uuid.uuid4().hex[:8]}-{path.name}")


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and wait until the disk has it."""
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut, on systems where a folder can be synced."""
    with contextlib.suppress(OSError):  # Windows, and some network file systems
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_json(path: Path, content: Any) -> None:
    """Write `content` as JSON, atomically."""
    write(path, (json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n").encode())


def write_record(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object with one line for each key, however long its value, atomically."""
    lines = (f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in content.items())
    write(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode())


def read_json(path: Path) -> Any:
    """Read a JSON file; None if it is missing, or if it is not valid, which is logged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, RecursionError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not valid JSON"
        log.warning("Ignored %s: %s.", path, reason)
        return None


def append(path: Path, line: bytes) -> None:
    """Append a line to a file, all of it or nothing; only a crash can cut it short."""
    with explained(path), path.open("ab", buffering=0) as stream:
        end = stream.seek(0, os.SEEK_END)
        try:
            if stream.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            stream.truncate(end)
            raise


def sha256(path: Path) -> str:
    """The digest of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def lock(path: Path, timeout: float, *, waiting: str = "", late: str = "") -> Iterator[Path]:
    """Hold the lock file `path`, so that one process at a time runs the block.

    The lock ends with its process, however that ends. On a file system without locks the block runs without one.

    Args:
        path: The lock file, which is made if it is missing and stays there.
        timeout: Seconds to wait while another process holds the lock.
        waiting: A sentence to log before waiting.
        late: The message of the TimeoutError after `timeout` seconds. If empty, the block then runs without the lock.

    Yields:
        `path`.
    """
    held = FileLock(path, is_singleton=False)
    try:
        try:
            held.acquire(timeout=0)
        except Timeout:
            if waiting:
                log.warning("%s", waiting)
            held.acquire(timeout=timeout)
    except Timeout:
        if late:
            raise TimeoutError(late) from None
    except (OSError, NotImplementedError):  # the file system has no locks
        pass
    try:
        yield path
    finally:
        held.release()
