"""Whole files: atomic writes, JSON, digests, and a lock between processes.

`write` is for a path that the user named: it follows links and writes to devices. Everything else is for files in our
own folders: there a link, FIFO or device is never followed, read, waited for or written to, but refused or replaced.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import glob
import hashlib
import json
import logging
import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from filelock import BaseFileLock, FileLock, Timeout

log = logging.getLogger(__name__)

Json = dict[str, Any]  # a JSON object

SCRATCH = ".scratch-"  # prefix of temporary names
TICK = 3.0  # seconds in which a file may be written twice without another time of change


class CannotWrite(OSError):
    """The disk is full, or the folder is not writable."""


def write(path: Path, content: bytes) -> None:
    """Write a file that the user named, atomically: after a crash it has the old content or the new, never half of it.

    Symbolic links are followed. Devices and FIFOs are written to, not replaced.
    """
    with open_to_write(path) as write_piece:
        write_piece(content)


@contextlib.contextmanager
def open_to_write(path: Path) -> Iterator[Callable[[bytes], None]]:
    """Yield a function that writes the next piece of a file that the user named; see `write`."""
    if not path.name:
        raise ValueError(f"{path} is a folder: name a file in it.")
    device = path.exists() and not path.is_file() and not path.is_dir()
    target = path if device else Path(os.path.realpath(path))
    scratch = target if device else scratch_name(target)
    stream = None
    try:
        with explain_errors(path):
            make_folder(target.parent)
            stream = scratch.open("wb")
        yield functools.partial(_write_piece, path, stream)
        with explain_errors(path):
            stream.flush()
            if not device:
                os.fsync(stream.fileno())
                stream.close()
                scratch.replace(target)
                sync_folder(target.parent)
    finally:
        with contextlib.suppress(OSError):  # the rest does not fit either
            if stream is not None:
                stream.close()
        if not device:
            scratch.unlink(missing_ok=True)


def _write_piece(path: Path, stream: BinaryIO, content: bytes) -> None:
    with explain_errors(path):
        stream.write(content)


def replace(path: Path, content: bytes) -> None:
    """Write a file of ours atomically. A link, FIFO or device in its place is replaced, not followed."""
    with explain_errors(path):
        make_folder(path.parent)
        scratch = scratch_name(path)
        try:
            write_synced(scratch, content)
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)
        sync_folder(path.parent)


@contextlib.contextmanager
def stage(folder: Path, contents: Mapping[str, bytes]) -> Iterator[dict[str, Path]]:
    """Write files of ours under temporary names, so that a full disk is noticed before any file is replaced.

    Args:
        folder: Their folder.
        contents: What to write, by name.

    Yields:
        The temporary paths by name, for the block to rename. What it has not renamed is removed.
    """
    paths = {name: scratch_name(folder / name) for name in contents}
    try:
        for name, content in contents.items():
            with explain_errors(folder / name):
                make_folder(folder)
                write_synced(paths[name], content)
        with explain_errors(folder, "Some of its files may be new: repeat the command."):
            yield dict(paths)
    finally:
        for path in paths.values():
            path.unlink(missing_ok=True)
    sync_folder(folder)


def remove_scratch(folder: Path, names: Iterable[str]) -> None:
    """Remove what a killed process left of files with these names before it had written them."""
    for name in names:
        for path in folder.glob(f"{SCRATCH}*-{glob.escape(name)}"):
            path.unlink(missing_ok=True)


def make_folder(path: Path) -> None:
    """Make a folder and its parents, and sync the folders that name the new ones."""
    new = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in new:
        sync_folder(folder.parent)


def clear_place(path: Path) -> None:
    """Remove a link, FIFO, socket or device from the place of a file or folder of ours."""
    with contextlib.suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            path.unlink()


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with all that is in it, but never what a link points to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def explain_errors(path: Path, state: str = "Earlier files are intact.") -> Iterator[None]:
    """Raise an OSError of the block as `CannotWrite`; it names `path`, and says in which state the files are."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise CannotWrite(f"Cannot write {path}: {reason}. {state}") from error


def scratch_name(path: Path) -> Path:
    """Return a temporary name beside `path`."""
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


def write_json(path: Path, content: object) -> None:
    """Write a file of ours as JSON, atomically; see `replace`."""
    replace(path, json_bytes(content))


def json_bytes(content: object) -> bytes:
    """Return the content of a JSON file of ours."""
    return (json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def line_per_key(content: Mapping[str, Any]) -> bytes:
    """Return a JSON object with one line for each key, however long its value."""
    lines = (f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in content.items())
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def read_bytes(path: Path) -> bytes:
    """Read a regular file.

    Raises:
        OSError: It is missing, or it is a folder, or a FIFO or device, which could be waited for without end.
    """
    with _open_regular(path, os.O_RDONLY) as stream:
        return stream.read()


def _open_regular(path: Path, flags: int, mode: str = "rb") -> Any:
    """Open a regular file without buffering, and without waiting for the other end of a FIFO."""
    handle = os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0), 0o666)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        return os.fdopen(handle, mode, buffering=0)
    except BaseException:
        with contextlib.suppress(OSError):  # Ctrl-C inside fdopen: the stream has closed it
            os.close(handle)
        raise


def read_json(path: Path) -> Any:
    """Read a JSON file; None if it is missing, or if it is not valid, which is logged."""
    try:
        return json.loads(read_bytes(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, RecursionError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not valid JSON"
        log.warning("Ignored %s: %s.", path, reason)
        return None


def append(path: Path, line: bytes, *, sync: bool = False) -> None:
    """Append a line to a file of ours, all of it or nothing; only a crash can cut it short.

    Args:
        path: The file, which is made if it is missing.
        line: What to append.
        sync: Wait until the disk has it.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    with explain_errors(path):
        clear_place(path)
    with explain_errors(path), _open_regular(path, flags, "ab") as stream:
        end = stream.seek(0, os.SEEK_END)
        try:
            if stream.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if sync:
                os.fsync(stream.fileno())
        except OSError:
            stream.truncate(end)
            raise


def sha256(path: Path) -> str:
    """Return the digest of a regular file."""
    with _open_regular(path, os.O_RDONLY) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256_once(path: Path) -> str:
    """Return the digest of a file; it is read again only if its time or size has changed, or if it is new.

    Two writes in a row may have the same time: the clock of a file system may tick in seconds.
    """
    found = path.stat()
    if abs(time.time() - found.st_mtime) < TICK:
        return sha256(path)
    return _sha256_of(str(path.resolve()), found.st_mtime_ns, found.st_size)


@functools.cache
def _sha256_of(path: str, changed: int, size: int) -> str:
    return sha256(Path(path))


def object_digest(content: Mapping[str, Any]) -> str:
    """Return the digest of a JSON object without its key `digest`, whatever the order of its keys and its spaces.

    >>> signed = {"accuracy": 90.5, "epochs": 2}
    >>> signed["digest"] = object_digest(signed)
    >>> object_digest(signed) == signed["digest"], object_digest(signed | {"accuracy": 99.9}) == signed["digest"]
    (True, False)
    """
    rest = {key: value for key, value in content.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


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
    with contextlib.suppress(OSError):
        clear_place(path)
    held = FileLock(path, is_singleton=False)
    try:
        try:
            _acquire(held, timeout, waiting, late)
            yield path
        finally:
            held.release()
    finally:  # twice: an interrupt may have come before the first
        held.release()


def _acquire(held: BaseFileLock, timeout: float, waiting: str, late: str) -> None:
    """Take a lock; see `lock`."""
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
