"""Simulate full disks, and read metrics and whole folders."""

from __future__ import annotations

import contextlib
import json
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Simulate a full disk: the kernel writes as much of a file as fits, then refuses."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl`, without a last row that a crash cut short."""
    rows = []
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_bytes().splitlines():
            rows.append(json.loads(line))
    return rows


def everything_in(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
