"""Where runs are executed: in this process, in a pool of processes on this machine, or on a Ray cluster.

All three take jobs from one queue and differ only in where they call `queue.attempt`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from logitclip import files
from logitclip.encoders import blocks
from logitclip.launch import block_interrupts, raise_interrupt_on
from logitclip.registry import suggest
from logitclip.runs.config import RunConfig
from logitclip.runs.train import OnEpoch
from logitclip.studies.listener import Listener
from logitclip.studies.on_ray import run_on_ray
from logitclip.studies.queue import Queue, QueuedRun, Room, Then, attempt, encode_first

if TYPE_CHECKING:
    from logitclip.engine import EpochRow

TRIES = 2  # a run whose process dies is tried once more


def execute(
    configs: Iterable[RunConfig],
    *,
    executor: str = "local",
    jobs: int | None = None,
    per_device: int = 1,
    address: str | None = None,
    listener: Listener | None = None,
    then: Then | None = None,
) -> None:
    """Run every config that has no result yet. A failed run is recorded, and the others continue.

    Configs with the same id are run once. If another process trains a run, wait for it, or take over if that process
    dies. Runs that failed before are retried, unless they diverged.

    Args:
        executor: Inline (this process), local (processes on this machine) or ray (a Ray cluster; all its machines must
            see the folder of the runs, and this one, under the same path).
        jobs: Runs at the same time; as many as fit by default. Locally that is `per_device` on each GPU, or as many as
            there are cores for; on Ray, what the cluster has room for.
        per_device: Runs that share a GPU.
        address: Address of a running Ray cluster, or auto; without it, Ray is started on this machine.
        listener: Hears what happens to the runs.
        then: Called with every config and its outcome; returns configs to run next.

    Raises:
        ValueError: If the executor is unknown, or the others do not fit it.
        CannotWrite: If a folder of runs cannot be written.
    """
    if executor not in EXECUTORS:
        raise ValueError(f"Unknown executor {executor!r}. {suggest(executor, EXECUTORS)}")
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}.")
    if jobs is not None and jobs > 1 and executor == "inline":
        raise ValueError(f"The executor inline runs one job at a time: jobs must be 1, got {jobs}.")
    if per_device < 1:
        raise ValueError(f"per_device must be at least 1, got {per_device}.")
    if address is not None and executor != "ray":
        raise ValueError(f"An address is for the executor ray, not for {executor}.")
    queue = Queue(configs, listener, then)
    if per_device > 1 and any(job.config.devices > 1 for job in queue.todo):
        raise ValueError(f"Runs on several devices share none of them: per_device must be 1, got {per_device}.")
    for folder in {job.folder.parent for job in queue.todo}:
        _check_writable(folder)  # check here, else every run would fail with the same error
    if queue.left:
        EXECUTORS[executor](queue, Room(jobs, per_device, address))


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise files.CannotWrite(f"Cannot write runs to {folder}: {error.strerror or error}.") from error


# -- in this process ---------------------------------------------------------------------------------------------------


def _run_inline(queue: Queue, _room: Room) -> None:
    """Run all jobs of the queue in this process, one after the other."""
    encode_first(queue, blocks.in_this_process)
    while queue.left:
        job = queue.next()
        if job is None:
            time.sleep(queue.pause or 0.0)
            continue
        on_epoch: OnEpoch | None = None
        if job.config.devices > 1:  # callbacks do not reach spawned processes: report only the start
            queue.progress(job, None)
        else:
            on_epoch = partial(lambda job, _config, row: queue.progress(job, row), job)
        queue.finish(job, attempt(job.config, job.folder, on_epoch))


# -- a pool of processes on this machine -------------------------------------------------------------------------------


@dataclass(eq=False)
class _Worker:
    """A worker process that trains the runs sent through its pipe, one after the other."""

    process: BaseProcess
    pipe: Connection
    slot: int  # 0, 1, ...: its place in the pool, which decides its devices
    job: QueuedRun | None = None


def _run_local(queue: Queue, room: Room) -> None:
    """Run all jobs of the queue in worker processes; a worker that dies is replaced, and its run tried again."""
    configs = [job.config for job in queue.todo]
    jobs = room.jobs or _count_slots(configs, room.per_device)
    gpus, per_run = _visible_gpus(configs), max(config.devices for config in configs)
    encode_first(queue, partial(blocks.in_processes, jobs=1 if torch.accelerator.is_available() else jobs))
    workers: list[_Worker] = []
    try:
        while True:
            workers = [worker for worker in workers if worker.job or worker.process.is_alive()]
            idle = [worker for worker in workers if not worker.job]
            while (idle or len(workers) < jobs) and (job := queue.next()):
                if not idle:
                    slot = next(i for i in range(jobs) if i not in {worker.slot for worker in workers})
                    workers.append(_start_worker(slot, _gpus_of_slot(slot, gpus, per_run)))
                worker = idle.pop() if idle else workers[-1]
                worker.job = job
                with contextlib.suppress(OSError):  # it has just died: handled below
                    worker.pipe.send((job.config, job.folder))
            busy = {worker: worker.job for worker in workers if worker.job}
            if not busy and not queue.left:
                return
            signs = [sign for worker in busy for sign in (worker.pipe, worker.process.sentinel)]
            ready = wait(signs, timeout=queue.pause if len(busy) < jobs else None)
            for worker, job in busy.items():
                if (worker.pipe in ready or worker.process.sentinel in ready) and not _receive(queue, worker, job):
                    workers.remove(worker)
                    worker.process.join()  # reap it: a zombie still counts as alive
                    worker.pipe.close()
                    queue.retry_dead(job, _describe_death(worker.process.exitcode), TRIES)
    finally:
        for worker in workers:
            # SIGTERM saves the run as Ctrl-C does. Idle workers are killed: interpreter shutdown takes seconds.
            worker.process.terminate() if worker.job else worker.process.kill()
            worker.pipe.close()
        for worker in workers:
            worker.process.join()


def _receive(queue: Queue, worker: _Worker, job: QueuedRun) -> bool:
    """Handle the messages of a worker; False if it has died and all its messages are handled."""
    try:
        if not worker.pipe.poll():
            return worker.process.is_alive()
        kind, detail = worker.pipe.recv()
    except (EOFError, OSError):
        return False
    if kind == "progress":
        queue.progress(job, detail)
    else:
        worker.job = None
        queue.finish(job, detail)
    return True


def _count_slots(configs: list[RunConfig], per_device: int) -> int:
    """Return how many runs fit on the machine: `per_device` on each GPU, or as many as there are cores for."""
    gpus, per_run = _visible_gpus(configs), max(config.devices for config in configs)
    if gpus:
        return max(1, len(gpus) // per_run) * per_device
    if torch.accelerator.is_available() and any(config.accelerator != "cpu" for config in configs):
        return per_device  # an accelerator without numbers, such as mps
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(config.threads * config.devices for config in configs))


def _visible_gpus(configs: list[RunConfig]) -> list[str]:
    """Return the CUDA devices that these runs may use, as CUDA_VISIBLE_DEVICES names them."""
    if not torch.cuda.is_available() or all(config.accelerator == "cpu" for config in configs):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    named = [name.strip() for name in visible.split(",")] if visible else []
    return named[: torch.cuda.device_count()] or [str(i) for i in range(torch.cuda.device_count())]


def _gpus_of_slot(slot: int, gpus: list[str], per_run: int) -> list[str]:
    """Return the devices of a worker: the next `per_run`, starting again when all are taken.

    >>> [_gpus_of_slot(slot, ["0", "1"], 1) for slot in range(3)]
    [['0'], ['1'], ['0']]
    """
    groups = max(1, len(gpus) // per_run)
    start = slot % groups * per_run
    return gpus[start : start + per_run]


def _start_worker(slot: int, gpus: list[str]) -> _Worker:
    """Start a worker process that sees only these GPUs."""
    context = multiprocessing.get_context("spawn")
    pipe, its_end = context.Pipe()
    process = context.Process(target=_run_worker, args=(its_end,))
    with block_interrupts(), _seeing_gpus(gpus):
        process.start()
    its_end.close()
    return _Worker(process, pipe, slot)


@contextlib.contextmanager
def _seeing_gpus(gpus: list[str]) -> Iterator[None]:
    """Let processes that start here see only these devices; all of them if none is named."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    try:
        yield
    finally:
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
        elif gpus:
            del os.environ["CUDA_VISIBLE_DEVICES"]


def _run_worker(pipe: Connection) -> None:
    """Run the main loop of a worker. On SIGTERM, also sent when its parent dies, it saves its run and ends."""

    def follow() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=follow, daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt, EOFError, OSError):
        while True:
            config, folder = pipe.recv()
            raise_interrupt_on(signal.SIGTERM)
            found = attempt(config, folder, partial(_send_row, pipe))
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            sys.unraisablehook = sys.__unraisablehook__
            pipe.send(("outcome", found))


def _send_row(pipe: Connection, _config: RunConfig, row: EpochRow | None) -> None:
    try:
        pipe.send(("progress", row))
    except OSError:  # the parent is gone: save and end, as by Ctrl-C
        raise KeyboardInterrupt from None


def _describe_death(exitcode: int | None) -> str:
    code = exitcode or 0
    name = signal.Signals(-code).name if -code in list(signal.Signals) else f"exit code {code}"
    hint = " It may have run out of memory: try fewer jobs." if name == "SIGKILL" else ""
    return f"The process of the run died {TRIES} times ({name}).{hint}"


EXECUTORS: dict[str, Callable[[Queue, Room], None]] = {"inline": _run_inline, "local": _run_local, "ray": run_on_ray}
