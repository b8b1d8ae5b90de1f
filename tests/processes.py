"""Processes that tests start, wait for and end; one that hangs is killed with all that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable

import pytest


def finished(process: subprocess.Popen[str], seconds: float = 200) -> tuple[int, str, str]:
    """Its exit code, stdout and stderr."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        _give_up(process, f"still running after {seconds} s")
    return process.returncode, out, err


def wait_until(reached: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 120) -> None:
    """Wait while the process works."""
    deadline = time.monotonic() + seconds
    while not reached():
        if process.poll() is not None or time.monotonic() > deadline:
            _give_up(process, "not reached")
        time.sleep(0.005)


def _give_up(process: subprocess.Popen[str], why: str) -> None:
    with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
        os.killpg(process.pid, signal.SIGKILL)
    pytest.fail(f"{why}: {process.communicate()}")
