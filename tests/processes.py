"""Processes that tests start, wait for and end; one that hangs is killed with all that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import NoReturn

import pytest


def finished(process: subprocess.Popen[str], seconds: float = 200) -> tuple[int, str, str]:
    """Its exit code, stdout and stderr."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        _give_up(process, f"still running after {seconds} s")
    except BaseException:  # the time limit of the test
        _killed(process)
        raise
    return process.returncode, out, err


def wait_until(reached: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 120) -> None:
    """Wait while the process works."""
    deadline = time.monotonic() + seconds
    while not reached():
        if process.poll() is not None or time.monotonic() > deadline:
            _give_up(process, "not reached")
        time.sleep(0.005)


def _give_up(process: subprocess.Popen[str], why: str) -> NoReturn:
    pytest.fail("\n".join([f"{why}:", *_killed(process)]))


def _killed(process: subprocess.Popen[str]) -> tuple[str, str]:
    """End the process and all that it started; its stdout, and its stderr with the stack of each of them."""
    for number in (signal.SIGABRT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=20)
    return "", "cannot be ended"
