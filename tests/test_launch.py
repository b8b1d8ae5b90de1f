"""Processes and devices: what this machine has not, and how processes end."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing import ProcessRaisedException

from logitclip.launch import block_interrupts, launch, make_fabric, using_deterministic_algorithms


def test_half_precision_on_a_cpu_is_refused():
    with pytest.raises(ValueError, match="The precision 16-mixed needs a GPU: on a CPU use bf16-mixed"):
        make_fabric(accelerator="cpu", precision="16-mixed")


@pytest.mark.parametrize("wanted", [True, False])
def test_deterministic_algorithms_end_with_the_block(wanted, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with using_deterministic_algorithms(wanted):
        assert torch.are_deterministic_algorithms_enabled() is wanted
        assert torch.backends.cudnn.benchmark is not wanted
        assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) is wanted
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.benchmark
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_device_that_is_not_there_is_a_sentence():
    with pytest.raises(ValueError, match="Cannot use 1 devices of the accelerator cuda: "):
        make_fabric(accelerator="cuda")


# -- how processes end -------------------------------------------------------------------------------------------------


KEPT: list[Any] = []


def leave_badly() -> None:
    """End the group in the order that deadlocks, in an exit handler that runs after those of `launch`.

    The wrapper has the last reference to the group and frees it. The destructor holds the GIL and waits for gloo's
    thread, which waits for the other process, and then for the GIL, to free the tensors of its last collective.
    """
    if KEPT:
        first = torch.distributed.get_rank() == 0
        time.sleep(0 if first else 2)
        torch.distributed.all_gather([torch.zeros(1), torch.zeros(1)], torch.ones(1), async_op=first)
        torch.distributed.destroy_process_group()
        KEPT.clear()


atexit.register(leave_badly)  # handlers run in reverse order


def keep_the_wrapper(fabric: Any, end: str, folder: Path) -> None:
    KEPT.append(fabric.setup(nn.Linear(2, 2)))
    KEPT[0](torch.ones(1, 2)).sum().backward()
    if fabric.is_global_zero and end == "raises":
        raise RuntimeError("raised on purpose")
    (folder / str(fabric.global_rank)).touch()


@pytest.mark.parametrize("end", ["returns", "raises"])
def test_processes_end_whatever_their_group_is_doing(end: str, tmp_path: Path) -> None:
    raises = pytest.raises(ProcessRaisedException, match="raised on purpose")
    others = set(multiprocessing.active_children())  # of tests that ran before: joblib keeps its processes
    with contextlib.nullcontext() if end == "returns" else raises:
        launch(keep_the_wrapper, end, tmp_path, accelerator="cpu", devices=2)
    if end == "returns":
        assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}
    assert not set(multiprocessing.active_children()) - others


def test_an_interrupt_that_another_thread_receives_waits_for_the_end_of_the_block() -> None:
    steps: list[str] = []
    done = threading.Event()
    thread = threading.Thread(target=done.wait, daemon=True)  # its mask does not hold the signal back
    thread.start()
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with block_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
            steps.append("processes started")
        steps.append("not reached")
    done.set()
    assert steps == ["processes started"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="Windows")
def test_two_signals_at_once_interrupt_once_and_print_nothing():
    script = """
import signal, threading
from logitclip.launch import raise_interrupt_on
both = (signal.SIGINT, signal.SIGTERM)
raise_interrupt_on(*both)
try:
    signal.pthread_sigmask(signal.SIG_BLOCK, both)
    for number in both:
        signal.pthread_kill(threading.main_thread().ident, number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, both)
except KeyboardInterrupt:
    print("interrupted")
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert (found.stdout, found.stderr) == ("interrupted\n", "")


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="Windows")
def test_a_signal_in_a_destructor_is_not_lost():
    script = """
import signal, time
from logitclip.launch import raise_interrupt_on

class Dying:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)

raise_interrupt_on(signal.SIGINT, signal.SIGTERM)
try:
    Dying()
    time.sleep(1000)
except KeyboardInterrupt:
    print("interrupted")
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert (found.stdout, found.stderr) == ("interrupted\n", "")
