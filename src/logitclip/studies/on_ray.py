"""Runs on a Ray cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from logitclip.encoders import blocks
from logitclip.files import Json
from logitclip.runs.config import RunConfig
from logitclip.runs.results import Failure, Result, read_outcome
from logitclip.studies.queue import POLL, Queue, QueuedRun, Room, attempt, encode_first
from logitclip.text import explain_missing, first_line

if TYPE_CHECKING:
    from logitclip.engine import EpochRow

log = logging.getLogger(__name__)

RETRIES = 3  # retries of a run whose Ray node or process was lost
CONNECT = 5.0  # seconds to wait for the address of a Ray cluster
LOST = 15.0  # seconds without an answer after which the head of a cluster counts as lost; Ray waits 60
SECONDS_TO_SAVE_ON_RAY = 30.0  # seconds that interrupted runs on Ray have to save their last epoch


def run_on_ray(queue: Queue, room: Room) -> None:
    """Run all jobs of the queue as tasks of a Ray cluster.

    Raises:
        ConnectionError: The cluster is lost.
        ValueError: No cluster answers at the address.
    """
    with explain_missing("The executor ray needs Ray", "ray"):
        import ray
        from ray.exceptions import RayError
    own = not ray.is_initialized()
    if own:
        _start_ray(ray, room.address)
    try:
        encode_first(queue, partial(blocks.on_ray, jobs=room.jobs))
        _Cluster(ray, room.per_device).run(queue, room.jobs)
    except (RayError, ConnectionError) as error:  # of a run: handled. These are of the cluster itself
        raise ConnectionError(
            f"The Ray cluster is lost ({first_line(error)}). Finished runs and checkpoints are kept: repeat the "
            "command to resume."
        ) from error
    finally:
        if own:
            ray.shutdown()


def _start_ray(ray: ModuleType, address: str | None) -> None:
    _check_answers(address or os.environ.get("RAY_ADDRESS"))
    on_terminate = signal.getsignal(signal.SIGTERM)
    ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_terminate or signal.SIG_DFL)  # Ray has replaced it by its own


class _Cluster:
    """The tasks that run on a cluster, and the messages that they send."""

    def __init__(self, ray: ModuleType, per_device: int) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self.ray, self.per_device = ray, per_device
        self.gpus = bool(ray.cluster_resources().get("GPU"))
        self.letters: Any = ray.remote(_Mailbox).options(num_cpus=0, scheduling_strategy=here).remote()
        self.running: dict[Any, QueuedRun] = {}  # task -> its job
        self.head, self.answered = ray.get_runtime_context().gcs_address, time.monotonic()
        self.missed: set[str] = set()  # resources that were already reported as missing

    def run(self, queue: Queue, jobs: int | None) -> None:
        """Run all jobs of the queue, at most `jobs` at a time."""
        try:
            while queue.left or self.running:
                while (jobs is None or len(self.running) < jobs) and (job := queue.next()):
                    self.submit(job)
                if self.running:
                    self.wait(queue)
                else:
                    time.sleep(queue.pause or 0.0)
        finally:
            if self.running:  # interrupted: the tasks save as by Ctrl-C
                for task in self.running:
                    self.ray.cancel(task)
                self.ray.wait(list(self.running), num_returns=len(self.running), timeout=SECONDS_TO_SAVE_ON_RAY)

    def submit(self, job: QueuedRun) -> None:
        """Start a run as a task of the cluster, with the CPUs and GPUs it needs."""
        config = replace(job.config, root=job.config.root or os.environ.get("LOGITCLIP_DATA"))
        needs = resources(config, gpus=self.gpus, per_device=self.per_device)
        said = " and ".join(f"{count:g} {kind}s" for kind, count in needs.items() if count)
        if said not in self.missed and not _has_room(self.ray.nodes(), needs):
            log.warning("No node of the cluster has %s: runs that need it wait for one that does.", said)
        self.missed.add(said)
        task = self.ray.remote(_on_node).options(num_cpus=needs["CPU"], num_gpus=needs["GPU"], max_retries=RETRIES)
        self.running[task.remote(Path.cwd(), config, job.folder, self.letters)] = job

    def check_head(self) -> None:
        """Raise `ConnectionError` if the head has not answered for `LOST` seconds; Ray would exit the process."""
        try:
            _check_listens(self.head)
            self.answered = time.monotonic()
        except OSError as error:
            if time.monotonic() - self.answered > LOST:
                raise ConnectionError(f"its head at {self.head} does not answer: {error}") from error

    def wait(self, queue: Queue) -> None:
        """Wait a moment for messages and ended tasks, and tell the queue."""
        from ray.exceptions import RayError, RaySystemError

        ready, _ = self.ray.wait(list(self.running), timeout=POLL)
        self.check_head()
        jobs_by_folder = {job.folder: job for job in self.running.values()}
        for folder, row in self.ray.get(self.letters.take.remote()):
            if folder in jobs_by_folder:
                queue.progress(jobs_by_folder[folder], row)
        for task in ready:
            try:
                found = self.ray.get(task)
            except RaySystemError:  # of the cluster, not of this run
                raise
            except RayError as error:
                sentence = str(error).strip().rpartition("\n")[2]
                queue.retry_dead(
                    self.running.pop(task), f"Ray gave up on the run: {type(error).__name__}: {sentence}", 1
                )
                continue
            job = self.running.pop(task)
            if found is not None and read_outcome(job.folder) is None:
                log.warning("%s has no result that a Ray node wrote there. Is it on a shared file system?", job.folder)
            queue.finish(job, found)


def resources(config: RunConfig, *, gpus: bool, per_device: int) -> dict[str, float]:
    """Return what a run takes of a cluster; with `per_device` runs on a GPU, each takes a part of it.

    >>> resources(RunConfig(threads=2), gpus=True, per_device=4)
    {'CPU': 2, 'GPU': 0.25}
    """
    on_gpu = config.accelerator == "cuda" or (config.accelerator == "auto" and gpus)
    return {"CPU": config.threads * config.devices, "GPU": config.devices / per_device if on_gpu else 0}


def _check_answers(address: str | None) -> None:
    """Reject an address at which nothing listens; Ray itself would retry silently for minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():  # auto, local, or none
        return
    try:
        _check_listens(f"{host}:{port}")
    except (OSError, OverflowError) as error:
        raise ValueError(f"No Ray cluster answers at {address} ({error}). Start one: ray start --head.") from error


def _check_listens(address: str) -> None:
    """Raise an OSError unless something listens at the address."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT).close()


def _has_room(nodes: list[Json], needs: dict[str, float]) -> bool:
    """Return whether an idle node has the resources that a run needs."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    return any(all(has.get(kind, 0) >= count for kind, count in needs.items()) for has in alive)


class _Mailbox:
    """A mailbox for progress messages from the runs on a cluster."""

    def __init__(self) -> None:
        self.letters: list[tuple[Path, EpochRow | None]] = []

    def put(self, folder: Path, row: EpochRow | None) -> None:
        self.letters.append((folder, row))

    def take(self) -> list[tuple[Path, EpochRow | None]]:
        taken, self.letters = self.letters, []
        return taken


def _on_node(here: Path, config: RunConfig, folder: Path, letters: Any) -> Result | Failure | None:
    """Return a run as a Ray task. Relative paths refer to the folder in which the sweep was started."""
    with contextlib.chdir(here):
        return attempt(config, folder, partial(_send_letter, letters, folder))


def _send_letter(letters: Any, folder: Path, _config: RunConfig, row: EpochRow | None) -> None:
    letters.put.remote(folder, row)
