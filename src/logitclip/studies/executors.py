"""Where runs are executed: in this process, in a pool of processes on this machine, or on a Ray cluster.

All three take jobs from one queue and differ only in where they call `_attempt`. The state of a sweep is in the folders
of its runs, so several sweeps can share a folder, and any of them can be killed and restarted.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from logitclip import data, files
from logitclip.encoders import blocks
from logitclip.engine import Diverged
from logitclip.launch import interrupts_blocked
from logitclip.registry import suggest
from logitclip.runs import claims
from logitclip.runs.config import RunConfig
from logitclip.runs.encoding import Pool, compute_features
from logitclip.runs.results import Failure, Result, read_outcome, record_failure
from logitclip.runs.train import OnBatch, OnEpoch, train
from logitclip.studies.listener import Listener

log = logging.getLogger(__name__)

POLL = 1.0  # seconds between two checks of a run that another process trains
TRIES = 2  # a run whose process dies is tried once more
RETRIES = 3  # retries of a run whose Ray node or process was lost
CONNECT = 5.0  # seconds to wait for the address of a Ray cluster
SAVING = 30.0  # seconds that interrupted runs on Ray have to save their last epoch


Then = Callable[[RunConfig, Result | Failure], Iterable[RunConfig]]


def execute(
    configs: Iterable[RunConfig],
    *,
    executor: str = "local",
    jobs: int | None = None,
    address: str | None = None,
    listener: Listener | None = None,
    then: Then | None = None,
) -> None:
    """Run every config that has no result yet. A failed run is recorded, and the others continue.

    Configs with the same id are run once. If another process trains a run, wait for it, or take over if that process
    dies. Runs that failed before are retried, unless they diverged.

    Args:
        executor: inline (this process), local (processes on this machine) or ray (a Ray cluster; all its machines must
            see the folder of the runs, and this one, under the same path).
        jobs: runs at the same time. Locally as many as there are cores for, by default, or one where there is a GPU;
            on Ray as many as the cluster has room for.
        address: of a running Ray cluster, or auto; without it, Ray is started on this machine.
        listener: hears what happens to the runs.
        then: called with every config and its outcome; returns configs to run next.
    """
    if executor not in EXECUTORS:
        raise ValueError(f"Unknown executor {executor!r}. {suggest(executor, EXECUTORS)}")
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}.")
    if jobs is not None and jobs > 1 and executor == "inline":
        raise ValueError(f"The executor inline runs one job at a time: jobs must be 1, got {jobs}.")
    if address is not None and executor != "ray":
        raise ValueError(f"An address is for the executor ray, not for {executor}.")
    queue = _Queue(configs, listener, then)
    for folder in {job.folder.parent for job in queue.todo}:
        _check_writable(folder)  # check here, else every run would fail with the same error
    if queue.left:
        EXECUTORS[executor](queue, jobs, address)


def _encode_first(queue: _Queue, pool: Pool) -> None:
    """Compute the features of all runs before any of them starts."""
    seen = set()
    for config in [job.config.resolved() for job in queue.todo if job.config.encoder != "none"]:
        source = config.data, config.root, config.encoder, config.accelerator
        if source not in seen:
            seen.add(source)
            dataset = data.load(config.data, config.root, raw=True)
            compute_features(config, dataset, pool=pool, on_rows=partial(queue.listener.on_encoding, config))


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise files.CannotWrite(f"Cannot write runs to {folder}: {error.strerror or error}.") from error


# -- the queue ---------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Job:
    config: RunConfig
    folder: Path
    before: Failure | None  # of an earlier sweep
    started: bool = False
    deaths: int = 0  # processes that died while training it
    again: float = 0.0  # when to check again the runs of other processes


class _Queue:
    """The runs still to do, each once; it also tells the listener what happens to them."""

    def __init__(self, configs: Iterable[RunConfig], listener: Listener | None, then: Then | None) -> None:
        self.listener = listener or Listener()
        self.then: Then = (lambda *_: ()) if then is None else then
        self.seen: set[Path] = set()
        self.todo: deque[_Job] = deque()
        self.elsewhere: deque[_Job] = deque()
        self.add(configs)

    @property
    def left(self) -> bool:
        return bool(self.todo or self.elsewhere)

    @property
    def pause(self) -> float | None:
        """Seconds until the next check of a run elsewhere; None if there is none."""
        return max(0.0, self.elsewhere[0].again - time.monotonic()) if self.elsewhere else None

    def add(self, configs: Iterable[RunConfig]) -> None:
        """Put new runs in front of the queue, so that tuned cells that were started are finished first."""
        waiting, new = deque(configs), []
        while waiting:
            config = waiting.popleft()
            folder = Path(config.runs) / config.id
            if folder in self.seen:
                continue
            self.seen.add(folder)
            found = read_outcome(folder)
            if isinstance(found, Result) or (found is not None and found.final):
                self.listener.on_skipped(config, found)
                waiting.extend(self.then(config, found))
            else:
                self.listener.on_queued(config)
                new.append(_Job(config, folder, found))
        self.todo.extendleft(reversed(new))

    def next(self) -> _Job | None:
        """The next run without an outcome; another process may have finished some of them."""
        while self.todo or self.pause == 0:
            job = (self.todo or self.elsewhere).popleft()
            found = read_outcome(job.folder)
            if found is None or found == job.before:
                return job
            self.finish(job, found)
        return None

    def progress(self, job: _Job, row: dict[str, Any] | None) -> None:
        """Report the first message of a run as its start: only then has the run been claimed."""
        if not job.started:
            job.started = True
            self.listener.on_start(job.config, row)
        elif row is not None:  # None when a run is retried from its beginning
            self.listener.on_epoch(job.config, row)

    def finish(self, job: _Job, found: Result | Failure | None) -> None:
        """Record an outcome; None means that another process trains the run."""
        if found is None:
            if not job.again:
                self.listener.on_elsewhere(job.config)
            job.again = time.monotonic() + POLL
            self.elsewhere.append(job)
        else:
            if isinstance(found, Result):
                self.listener.on_done(job.config, found)
            else:
                self.listener.on_failed(job.config, found)
            self.add(self.then(job.config, found))

    def died(self, job: _Job, error: str, tries: int) -> None:
        """Retry a run whose process died, up to `TRIES` times."""
        job.deaths += 1
        if job.deaths < tries or isinstance(read_outcome(job.folder), Result):  # it may have died after its end
            self.todo.appendleft(job)
        else:
            self.finish(job, record_failure(job.folder, error, attempts=job.deaths))


def _attempt(
    config: RunConfig, folder: Path, on_epoch: OnEpoch | None, on_batch: OnBatch | None = None
) -> Result | Failure | None:
    """Train a run and record any failure; None means that another process trains it."""
    try:
        result = train(config, on_epoch=on_epoch, on_batch=on_batch)
    except claims.Claimed:
        return None
    except Exception as error:
        sentence = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
        return record_failure(folder, sentence, traceback.format_exc(), final=isinstance(error, Diverged))
    with contextlib.suppress(OSError):
        (folder / "failure.json").unlink(missing_ok=True)
    return result


# -- in this process ---------------------------------------------------------------------------------------------------


def _inline(queue: _Queue, _jobs: int | None, _address: str | None) -> None:
    _encode_first(queue, blocks.in_this_process)
    while queue.left:
        job = queue.next()
        if job is None:
            time.sleep(queue.pause or 0.0)
            continue
        on_epoch: OnEpoch | None = partial(_shown, queue, job)
        if job.config.devices > 1:  # callbacks do not reach spawned processes: report only the start
            on_epoch = None
            queue.progress(job, None)
        queue.finish(job, _attempt(job.config, job.folder, on_epoch, partial(queue.listener.on_batch, job.config)))


def _shown(queue: _Queue, job: _Job, _config: RunConfig, row: dict[str, Any] | None) -> None:
    queue.progress(job, row)


# -- a pool of processes on this machine -------------------------------------------------------------------------------


@dataclass(eq=False)
class _Worker:
    """A worker process that trains the runs sent through its pipe, one after the other."""

    process: BaseProcess
    pipe: Connection
    job: _Job | None = None


def _local(queue: _Queue, jobs: int | None, _address: str | None) -> None:
    jobs = jobs or _room([job.config for job in queue.todo])
    _encode_first(queue, partial(blocks.in_processes, jobs=1 if torch.accelerator.is_available() else jobs))
    workers: list[_Worker] = []
    try:
        while True:
            workers = [worker for worker in workers if worker.job or worker.process.is_alive()]
            idle = [worker for worker in workers if not worker.job]
            while (idle or len(workers) < jobs) and (job := queue.next()):
                if not idle:
                    workers.append(_started())
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
                if (worker.pipe in ready or worker.process.sentinel in ready) and not _heard(queue, worker, job):
                    workers.remove(worker)
                    worker.process.join()  # reap it: a zombie still counts as alive
                    worker.pipe.close()
                    queue.died(job, _death(worker.process.exitcode), TRIES)
    finally:
        for worker in workers:
            # SIGTERM saves the run as Ctrl-C does. Idle workers are killed: interpreter shutdown takes seconds.
            worker.process.terminate() if worker.job else worker.process.kill()
            worker.pipe.close()
        for worker in workers:
            worker.process.join()


def _heard(queue: _Queue, worker: _Worker, job: _Job) -> bool:
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


def _room(configs: list[RunConfig]) -> int:
    """How many of these runs fit on the machine at once: they share its cores, but not its GPU."""
    if torch.accelerator.is_available() and any(config.accelerator != "cpu" for config in configs):
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(config.threads * config.devices for config in configs))


def _started() -> _Worker:
    context = multiprocessing.get_context("spawn")
    pipe, its_end = context.Pipe()
    process = context.Process(target=_work, args=(its_end,))
    with interrupts_blocked():
        process.start()
    its_end.close()
    return _Worker(process, pipe)


def _work(pipe: Connection) -> None:
    """The main loop of a worker. On SIGTERM, also sent when its parent dies, it saves its run and ends."""

    def stop(*_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second signal must not interrupt the save
        raise KeyboardInterrupt

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
            signal.signal(signal.SIGTERM, stop)
            found = _attempt(config, folder, partial(_tell, pipe))
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            pipe.send(("outcome", found))


def _tell(pipe: Connection, _config: RunConfig, row: dict[str, Any] | None) -> None:
    try:
        pipe.send(("progress", row))
    except OSError:  # the parent is gone: save and end, as by Ctrl-C
        raise KeyboardInterrupt from None


def _death(exitcode: int | None) -> str:
    code = exitcode or 0
    name = signal.Signals(-code).name if -code in list(signal.Signals) else f"exit code {code}"
    hint = " It may have run out of memory: try fewer jobs." if name == "SIGKILL" else ""
    return f"The process of the run died {TRIES} times ({name}).{hint}"


# -- Ray ---------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _cluster(address: str | None) -> Iterator[Any]:
    """Yield Ray, connected to a cluster; one that was started here ends with the block."""
    try:
        import ray
    except ImportError as error:
        raise ImportError("The executor ray needs Ray: pip install 'logitclip[ray]'.") from error
    own = not ray.is_initialized()
    if own:
        _check_answers(address or os.environ.get("RAY_ADDRESS"))
        on_terminate = signal.getsignal(signal.SIGTERM)
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_terminate or signal.SIG_DFL)  # Ray has replaced it by its own
    try:
        yield ray
    finally:
        if own:
            ray.shutdown()


def _ray(queue: _Queue, jobs: int | None, address: str | None) -> None:
    with _cluster(address) as ray:
        _encode_first(queue, partial(blocks.on_ray, jobs=jobs))
        _run_on(ray, queue, jobs)


def _run_on(ray: Any, queue: _Queue, jobs: int | None) -> None:
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    gpus = bool(ray.cluster_resources().get("GPU"))
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    letters: Any = ray.remote(_Letters).options(num_cpus=0, scheduling_strategy=here).remote()
    running: dict[Any, _Job] = {}
    looked_at: set[str] = set()  # resources that were already reported as missing
    try:
        while queue.left or running:
            while (jobs is None or len(running) < jobs) and (job := queue.next()):
                config = replace(job.config, root=job.config.root or os.environ.get("LOGITCLIP_DATA"))
                on_gpu = config.accelerator == "cuda" or (config.accelerator == "auto" and gpus)
                needs = {"CPU": config.threads * config.devices, "GPU": config.devices if on_gpu else 0}
                said = " and ".join(f"{count} {kind}s" for kind, count in needs.items() if count)
                if said not in looked_at and not _has_room(ray.nodes(), needs):
                    log.warning("No node of the cluster has %s: runs that need it wait for one that does.", said)
                looked_at.add(said)
                task = ray.remote(_on_node).options(num_cpus=needs["CPU"], num_gpus=needs["GPU"], max_retries=RETRIES)
                running[task.remote(Path.cwd(), config, job.folder, letters)] = job
            if not running:
                time.sleep(queue.pause or 0.0)
                continue
            ready, _ = ray.wait(list(running), timeout=POLL)
            jobs_by_folder = {job.folder: job for job in running.values()}
            for folder, row in ray.get(letters.take.remote()):
                if folder in jobs_by_folder:
                    queue.progress(jobs_by_folder[folder], row)
            for task in ready:
                job = running.pop(task)
                try:
                    found = ray.get(task)
                except RayError as error:
                    sentence = str(error).strip().rpartition("\n")[2]
                    queue.died(job, f"Ray gave up on the run: {type(error).__name__}: {sentence}", tries=1)
                else:
                    if found is not None and read_outcome(job.folder) is None:
                        log.warning(
                            "%s has no result that a Ray node wrote there. Is it on a shared file system?", job.folder
                        )
                    queue.finish(job, found)
    finally:
        if running:  # interrupted: the tasks save as by Ctrl-C
            for task in running:
                ray.cancel(task)
            ray.wait(list(running), num_returns=len(running), timeout=SAVING)


def _check_answers(address: str | None) -> None:
    """Reject an address at which nothing listens; Ray itself would retry silently for minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():  # auto, local, or none
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f"No Ray cluster answers at {address} ({error}). Start one: ray start --head.") from error


def _has_room(nodes: list[dict[str, Any]], needs: dict[str, int]) -> bool:
    """Whether an idle node has the resources that a run needs."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    return any(all(has.get(kind, 0) >= count for kind, count in needs.items()) for has in alive)


class _Letters:
    """A mailbox for progress messages from the runs on a cluster."""

    def __init__(self) -> None:
        self.letters: list[tuple[Path, dict[str, Any] | None]] = []

    def put(self, folder: Path, row: dict[str, Any] | None) -> None:
        self.letters.append((folder, row))

    def take(self) -> list[tuple[Path, dict[str, Any] | None]]:
        taken, self.letters = self.letters, []
        return taken


def _on_node(here: Path, config: RunConfig, folder: Path, letters: Any) -> Result | Failure | None:
    """A run as a Ray task. Relative paths refer to the folder in which the sweep was started."""
    with contextlib.chdir(here):
        return _attempt(config, folder, partial(_write, letters, folder))


def _write(letters: Any, folder: Path, _config: RunConfig, row: dict[str, Any] | None) -> None:
    letters.put.remote(folder, row)


EXECUTORS: dict[str, Callable[[_Queue, int | None, str | None], None]] = {
    "inline": _inline,
    "local": _local,
    "ray": _ray,
}
