"""Downloads from official addresses or a mirror: resumable, verified, atomic."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.client
import logging
import os
import shutil
import tarfile
import time
import urllib.error
import urllib.request
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from logitclip.files import lock

log = logging.getLogger(__name__)

_PIECE = 1 << 18
_TIMEOUT = 30.0  # seconds without a byte
_PAUSE = 1.0  # seconds before a failed attempt is repeated
_PATIENCE = 3600.0  # seconds to wait for the download of another process
_ATTEMPTS = 3  # failed attempts in a row before giving up
_CAP = 1 << 30  # largest file in bytes if the publisher states no size


@dataclass(frozen=True)
class Remote:
    """A published file: its address, its size in bytes and its MD5, as far as the publisher states them."""

    url: str
    size: int | None = None
    md5: str | None = None

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


def md5(path: Path) -> str:
    """Return the MD5 of a file, the checksum that publishers state. It detects damage, not attacks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def verify(path: Path, remote: Remote) -> None:
    """Raise a ValueError unless `path` is the published file, byte for byte."""
    size = path.stat().st_size
    if remote.size is not None and size != remote.size:
        what = f"has {size:,} bytes where {remote.size:,} are published: it is cut off or another file"
    elif remote.md5 is not None and md5(path) != remote.md5:
        what = f"is damaged: its checksum is not the published {remote.md5}"
    else:
        return
    raise ValueError(f"{path} {what}. Delete it and download it again from {remote.url}.")


def fetch(remote: Remote, folder: str | Path, mirror: str | Path | None = None) -> Path:
    """Download a published file into `folder`, unless it is there, and return its path.

    Partial downloads stay in ``<name>.part`` and are resumed. Only a file of the published size and checksum gets its
    real name. Processes that want the same file wait for each other.

    Args:
        mirror: A folder, or the beginning of an address, that has the file under the same name.
    """
    folder = Path(folder)
    source = remote.url if mirror is None else f"{os.path.expanduser(mirror).rstrip('/')}/{remote.name}"
    if "://" not in source and not Path(source).is_file():
        raise ValueError(f"The mirror {mirror} has no file {remote.name}.")
    folder.mkdir(parents=True, exist_ok=True)
    target, part = folder / remote.name, folder / f"{remote.name}.part"
    with _one_process_in(folder):
        if target.exists():
            try:
                verify(target, remote)
                return target
            except ValueError as error:
                log.warning("%s Downloading it again.", error)
        with part.open("ab") as out:
            _download_rest(source, out, remote)
        try:
            verify(part, remote)
        except ValueError:
            part.unlink()  # never resume from damaged bytes
            raise ValueError(
                f"The file from {source} is not the published {remote.name} (size or checksum differ). Nothing was "
                "kept. Try again, or name another mirror."
            ) from None
        os.replace(part, target)
    return target


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack the top folder of a tar.gz archive as `folder`, atomically.

    Members that would be written outside the folder, links that point out of it, and devices are refused, and nothing
    of the archive is kept. Absolute paths lose their leading slash (the rules of tarfile's filter "data").
    """
    scratch = folder.with_name(f".{folder.name}.unpacking")
    with _one_process_in(folder.parent):
        if folder.is_dir():  # another process was faster
            return folder
        shutil.rmtree(scratch, ignore_errors=True)  # of a process that was killed
        try:
            with gzip.open(archive) as stream:
                with tarfile.open(fileobj=stream, mode="r:") as tar:
                    tar.extractall(scratch, filter="data")
                while stream.read(_PIECE):  # the checksum is at the very end
                    pass
            if not (scratch / folder.name).is_dir():
                raise ValueError(f"it holds no folder {folder.name}")
            os.replace(scratch / folder.name, folder)
        except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error, ValueError) as error:
            raise ValueError(
                f"{archive} cannot be unpacked: {error}. Nothing of it was kept; delete it and download it again."
            ) from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _one_process_in(folder: Path) -> contextlib.AbstractContextManager[Path]:
    """Return the lock of a folder of downloads."""
    return lock(
        folder / ".download.lock",
        _PATIENCE,
        waiting=f"Another process is downloading into {folder}; waiting for it. Ctrl-C stops waiting.",
        late=f"Another process has held {folder / '.download.lock'} for {_PATIENCE / 60:g} minutes. End it, or wait "
        "until it has finished its download, and run this again.",
    )


def _download_rest(source: str, out: IO[bytes], remote: Remote) -> None:
    """Append the missing bytes to `out`; resume after a lost connection."""
    size, fruitless, problem = remote.size, 0, "the connection was closed"
    if size is None or out.tell() > size:
        _empty(out)  # without a known size, it may be part of another file
    columns = (TextColumn(remote.name), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(remote.name, total=size)
        while size is None or out.tell() < size:
            before = out.tell()
            try:
                with _open_source(source, out) as stream:
                    while (size is None or out.tell() <= size) and (block := stream.read(_PIECE)):
                        if size is None and out.tell() + len(block) > _CAP:
                            _empty(out)
                            raise ValueError(f"{source} sent more than {_CAP:,} bytes. Is it the right address?")
                        out.write(block)
                        progress.update(task, completed=out.tell())
                    if size is None:
                        if not getattr(stream, "length", 0):  # bytes still to come, if the server said
                            return
                        _empty(out)
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, urllib.error.HTTPError) and 400 <= error.code < 500:
                    raise ConnectionError(f"{source} cannot be downloaded: {error}.") from error
                problem = str(error)
                log.info("%s: %s", source, problem)
            fruitless = 0 if out.tell() > before else fruitless + 1
            if fruitless == _ATTEMPTS:
                total = "an unknown number of" if size is None else f"{size:,}"
                raise ConnectionError(
                    f"The download of {source} stopped after {out.tell():,} of {total} bytes ({problem}). "
                    f"Run it again to resume, or put {remote.name} into {Path(out.name).parent} yourself."
                )
            if fruitless:
                time.sleep(_PAUSE)


def _open_source(source: str, out: IO[bytes]) -> IO[bytes]:
    """Open `source` at the position where `out` ends."""
    if "://" not in source:
        stream = Path(source).open("rb")  # noqa: SIM115 (the caller closes it)
        stream.seek(out.tell())
        return stream
    request = urllib.request.Request(source, headers={"User-Agent": "logitclip", "Range": f"bytes={out.tell()}-"})
    response = urllib.request.urlopen(request, timeout=_TIMEOUT)
    if response.status != 206:  # the server ignores ranges and sends the whole file
        _empty(out)
    return response


def _empty(out: IO[bytes]) -> None:
    out.seek(0)
    out.truncate()
