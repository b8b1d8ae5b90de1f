"""Processes and devices: the Lightning Fabric of a run, a process for each device, CPU threads."""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any

import torch

from logitclip.text import explain_missing

if TYPE_CHECKING:
    from lightning_fabric import Fabric

for talkative in ("distributed", "rank_zero"):  # here, because spawned processes import this module too
    logging.getLogger(f"lightning_fabric.utilities.{talkative}").setLevel(logging.WARNING)

SECONDS_TO_SAVE = 60.0  # seconds in which interrupted processes must save their last epoch


def make_fabric(*, accelerator: str = "auto", devices: int = 1, nodes: int = 1, precision: str = "32") -> Fabric:
    """Make a Lightning Fabric, which is not launched yet.

    Several devices of one machine get a spawned process each. Several nodes need torchrun.

    Args:
        accelerator: One of auto, cpu, cuda and mps.
        devices: Processes on this machine.
        nodes: Machines.
        precision: 32, 64, bf16-mixed, 16-mixed or bf16-true.

    Returns:
        The Fabric.

    Raises:
        ValueError: If this machine does not have these devices, or cannot use the precision.
        ImportError: If Lightning Fabric is not installed.

    >>> make_fabric(accelerator="cpu").world_size
    1
    """
    with explain_missing("Training needs Lightning Fabric", "train"), _hide_module("torchmetrics"):
        from lightning_fabric import Fabric
    cpu = accelerator == "cpu" or (accelerator == "auto" and not torch.accelerator.is_available())
    if precision == "16-mixed" and cpu:
        raise ValueError("The precision 16-mixed needs a GPU: on a CPU use bf16-mixed.")
    room = max(8, os.cpu_count() or 1)
    if cpu and devices > room:
        raise ValueError(f"devices must be at most {room} on the CPU of this machine, got {devices}.")
    launched = torch.distributed.is_torchelastic_launched()
    strategy = "auto" if devices * nodes == 1 else "ddp" if launched or nodes > 1 else "ddp_spawn"
    try:
        fabric = Fabric(
            accelerator=accelerator,
            devices=devices,
            num_nodes=nodes,
            precision={"32": "32-true", "64": "64-true"}.get(precision, precision),  # type: ignore[arg-type]
            strategy=strategy,
        )
    except Exception as error:  # Fabric raises many types; its message lists the devices
        raise ValueError(f"Cannot use {devices} devices of the accelerator {accelerator}: {error}") from error
    if precision == "64":
        # The default would round the logits to 32 bits before the loss.
        fabric.strategy.precision.convert_output = _return_unchanged
    return fabric


def launch(function: Callable[..., None], *args: Any, devices: int, **options: Any) -> None:
    """Call `function(fabric, *args)` in a new process for each device, and wait for all of them.

    Nothing is returned: the processes write their results to files. No process outlives this call, even if it raises:
    processes that still run get SIGTERM, then SIGKILL.

    Args:
        function: A module-level function; it and its arguments are pickled.
        args: Its arguments after the Fabric.
        devices: Number of processes.
        options: Options of `make_fabric`.

    Raises:
        torch.multiprocessing.ProcessRaisedException: A process raised an exception.
        torch.multiprocessing.ProcessExitedException: A process was killed or interrupted.
    """
    # As in torchrun, this process hosts the rendezvous store: no other program can take its port, and it outlives
    # the workers.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    others = set(multiprocessing.active_children())
    try:
        with block_interrupts():  # or Ctrl-C would end a process that still imports torch with a traceback
            started: Any = torch.multiprocessing.spawn(
                _in_process, (store.port, devices, options, function, args), devices, join=False
            )
        while not started.join():
            pass
    finally:
        left = set(multiprocessing.active_children()) - others
        for process in left:
            process.terminate()
        deadline = time.monotonic() + SECONDS_TO_SAVE
        for process in left:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()


def _in_process(
    rank: int, port: int, devices: int, options: dict[str, Any], function: Callable[..., None], args: tuple[Any, ...]
) -> None:
    """Call the function of `launch` in a process of one rank, as torchrun would start it."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        return  # it died before this process could ask for the signal
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(devices),
        "LOCAL_WORLD_SIZE": str(devices),
        "TORCHELASTIC_RUN_ID": "logitclip",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    with without_destructors():
        fabric = make_fabric(devices=devices, **options)
        fabric.launch()
        function(fabric, *args)
        fabric.barrier()  # no rank exits while another still waits for its data


def raise_interrupt_on(*numbers: signal.Signals) -> None:
    """Raise KeyboardInterrupt on the first of these signals; ignore a second, which would interrupt the save.

    If Python drops the KeyboardInterrupt, as in a destructor, the signal is sent again.
    """

    def repeat(dropped: Any) -> None:
        if dropped.exc_type is not KeyboardInterrupt:
            sys.__unraisablehook__(dropped)
            return
        raise_interrupt_on(*numbers)
        again = threading.Timer(0.01, os.kill, (os.getpid(), numbers[0]))
        again.daemon = True
        again.start()

    def stop(*_: object) -> None:
        for number in numbers:
            signal.signal(number, lambda *_: None)  # SIG_IGN prints a traceback if both came at the same time
        raise KeyboardInterrupt

    sys.unraisablehook = repeat
    for number in numbers:
        signal.signal(number, stop)


@contextlib.contextmanager
def block_interrupts() -> Iterator[None]:
    """Start processes with Ctrl-C blocked: the terminal sends it to all processes, but the parent ends its own.

    An interrupt of this process is raised after the block. The mask covers only this thread, so the handler waits too:
    the system may give the signal to another thread, and Python runs the handler here.
    """
    resource_tracker.ensure_running()  # its start would unblock them
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    waiting: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, lambda number, _: waiting.append(number)) if is_main else None
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
        if waiting:
            signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def without_destructors() -> Iterator[None]:
    """Make this process exit through `os._exit`, after its exit handlers, if it has joined a process group.

    The exit status is 0 if the block completes, and 1 otherwise.

    This avoids a deadlock. The destructor of a gloo group joins gloo's threads and may hold the GIL meanwhile, while a
    thread that still has to free the tensors of its last collective waits for the GIL. Which object frees the group
    depends on the order of destruction (a DDP wrapper may outlive `destroy_process_group`), so the only safe destructor
    is one that never runs. Use this only in a program that owns its process and keeps its results in files.
    """
    status = 1

    def end() -> None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError, AttributeError):  # broken pipe, closed stream, None
                    stream.flush()
            os._exit(status)

    atexit.register(end)
    yield
    status = 0


@contextlib.contextmanager
def _hide_module(module: str) -> Iterator[None]:
    """Hide a module from imports: Fabric imports torchmetrics only to read its version, which takes seconds."""
    hide = module not in sys.modules
    if hide:
        sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hide:
            del sys.modules[module]


def _return_unchanged(data: Any) -> Any:
    return data


@contextlib.contextmanager
def using_deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """Let torch use only deterministic algorithms in this block, if `wanted`; an operation without one raises.

    On a CPU the algorithms of a run are deterministic in any case.
    """
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
    before, benchmark = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.backends.cudnn.benchmark = benchmark


def find_device(accelerator: str) -> torch.device:
    """Return the device for one of auto, cpu, cuda and mps."""
    on_cpu = accelerator == "cpu" or not torch.accelerator.is_available()
    return (None if on_cpu else torch.accelerator.current_accelerator()) or torch.device("cpu")


@contextlib.contextmanager
def using_threads(count: int) -> Iterator[None]:
    """Use `count` CPU threads in this block. The last bits of a sum depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
