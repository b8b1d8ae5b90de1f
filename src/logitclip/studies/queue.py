"""The queue of runs that every executor takes from, and one attempt at a run.

The state of a sweep is in the folders of its runs, so several sweeps can share a folder, and any of them can be killed
and restarted.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from logitclip import data
from logitclip.engine import Diverged
from logitclip.runs.claims import Claimed
from logitclip.runs.config import RunConfig
from logitclip.runs.encoding import Pool, compute_features
from logitclip.runs.results import FAILURE, Failure, Result, read_outcome, record_failure
from logitclip.runs.train import OnEpoch, train
from logitclip.studies.listener import Listener
from logitclip.text import first_line

if TYPE_CHECKING:
    from logitclip.engine import EpochRow

POLL = 1.0  # seconds between two checks of a run that another process trains

Then = Callable[[RunConfig, Result | Failure], Iterable[RunConfig]]


@dataclass(eq=False)
class QueuedRun:
    """A run in the queue."""

    config: RunConfig
    folder: Path
    before: Failure | None  # of an earlier sweep
    started: bool = False
    deaths: int = 0  # processes that died while training it
    again: float = 0.0  # when to check again the runs of other processes


@dataclass(frozen=True)
class Room:
    """How many runs an executor may have at the same time, and where; see `executors.execute`."""

    jobs: int | None = None
    per_device: int = 1
    address: str | None = None


class Queue:
    """The runs still to do, each once; it also tells the listener what happens to them."""

    def __init__(self, configs: Iterable[RunConfig], listener: Listener | None, then: Then | None) -> None:
        self.listener = listener or Listener()
        self.then: Then = (lambda *_: ()) if then is None else then
        self.seen: set[Path] = set()
        self.todo: deque[QueuedRun] = deque()
        self.elsewhere: deque[QueuedRun] = deque()
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
                new.append(QueuedRun(config, folder, found))
        self.todo.extendleft(reversed(new))

    def next(self) -> QueuedRun | None:
        """Return the next run without an outcome; another process may have finished some of them."""
        while self.todo or self.pause == 0:
            job = (self.todo or self.elsewhere).popleft()
            found = read_outcome(job.folder)
            if found is None or found == job.before:
                return job
            self.finish(job, found)
        return None

    def progress(self, job: QueuedRun, row: EpochRow | None) -> None:
        """Report the first message of a run as its start: only then has the run been claimed."""
        if not job.started:
            job.started = True
            self.listener.on_start(job.config, row)
        elif row is not None:  # None when a run is retried from its beginning
            self.listener.on_epoch(job.config, row)

    def finish(self, job: QueuedRun, found: Result | Failure | None) -> None:
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

    def retry_dead(self, job: QueuedRun, error: str, tries: int) -> None:
        """Retry a run whose process died, up to `tries` times."""
        job.deaths += 1
        if job.deaths < tries or isinstance(read_outcome(job.folder), Result):  # it may have died after its end
            self.todo.appendleft(job)
        else:
            self.finish(job, record_failure(job.folder, job.config, error, attempts=job.deaths))


def encode_first(queue: Queue, pool: Pool) -> None:
    """Compute the features of all runs before any of them starts."""
    seen = set()
    for config in [job.config.resolve() for job in queue.todo if job.config.encoder != "none"]:
        source = config.data, config.root, config.encoder, config.accelerator, config.limit, config.test_limit
        if source not in seen:
            seen.add(source)
            dataset = data.load(config.data, config.root, raw=True)
            compute_features(config, dataset, pool=pool, on_rows=partial(queue.listener.on_encoding, config))


def attempt(config: RunConfig, folder: Path, on_epoch: OnEpoch | None) -> Result | Failure | None:
    """Train a run and record any failure; None means that another process trains it."""
    try:
        result = train(config, on_epoch=on_epoch)
    except Claimed:
        return None
    except Exception as error:
        name, line = type(error).__name__, first_line(error)
        sentence = f"{name}." if line == name else f"{name}: {line}."
        return record_failure(folder, config, sentence, traceback.format_exc(), final=isinstance(error, Diverged))
    with contextlib.suppress(OSError):
        (folder / FAILURE).unlink(missing_ok=True)
    return result
