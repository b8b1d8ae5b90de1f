"""Start processes in their own session, wait for them and end them. Their time limit is in conftest.py."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for the process; return its exit code, stdout and stderr."""
    with _none_left(process):
        out, err = process.communicate()
    return process.returncode, out, err


def wait_until(reached: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait until the condition holds, while the process is alive."""
    with _none_left(process):
        while not reached():
            if process.poll() is not None:
                pytest.fail(f"The process has ended with {process.returncode}: {process.communicate()}")
            time.sleep(0.005)


@contextlib.contextmanager
def _none_left(process: subprocess.Popen[str]) -> Iterator[None]:
    """Kill the process and its children if the test fails, also by its time limit."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(ProcessLookupError):  # it may have exited already
            os.killpg(process.pid, signal.SIGKILL)
        raise
