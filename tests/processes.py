"""Processes that tests start with a session of their own, wait for and end. Their time limit is in conftest.py."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Its exit code, stdout and stderr."""
    with _none_left(process):
        out, err = process.communicate()
    return process.returncode, out, err


def wait_until(reached: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait while the process works."""
    with _none_left(process):
        while not reached():
            if process.poll() is not None:
                pytest.fail(f"The process has ended with {process.returncode}: {process.communicate()}")
            time.sleep(0.005)


@contextlib.contextmanager
def _none_left(process: subprocess.Popen[str]) -> Iterator[None]:
    """If the test fails meanwhile, by its time limit too, kill the process and all that it started."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
            os.killpg(process.pid, signal.SIGKILL)
        raise
