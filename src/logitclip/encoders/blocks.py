"""Encode blocks of inputs, in this process or in several. A block has the same features wherever it is computed."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch

from logitclip.data._texts import TextInputs
from logitclip.encoders import Encoder
from logitclip.encoders.features import InputBlock, Inputs, read_examples
from logitclip.launch import using_threads

log = logging.getLogger(__name__)

BATCH = 32  # examples; on a GPU four times as many
READING_THREADS = 4
AHEAD = 3  # batches that are prepared in advance
BLOCK_RETRIES = 3  # of a block whose Ray actor was lost

LoadEncoder = Callable[[], Encoder]  # a function that another process can call


def encode_block(encode: Encoder, inputs: Inputs) -> np.ndarray:
    """Return the features of a block, float32 [N, D]; NaN for an image that cannot be read.

    Texts are batched by length. One thread computes, so that the last bits do not depend on the number of cores.
    """
    order = range(len(inputs))
    if isinstance(inputs, TextInputs):
        order = sorted(order, key=lambda i: len(inputs.values[i]))
    size = BATCH if not torch.accelerator.is_available() else 4 * BATCH
    batches = [list(order[start : start + size]) for start in range(0, len(inputs), size)]
    found = np.full((len(inputs), encode.width), np.nan, dtype=np.float32)
    read = read_examples(inputs, encode.size)
    with using_threads(1), ThreadPoolExecutor(READING_THREADS) as readers:
        waiting: deque[tuple[list[int], list[Future[Any]]]] = deque()
        for batch in [*batches, *[None] * AHEAD]:
            if batch is not None:
                waiting.append((batch, [readers.submit(_read_and_prepare, encode, read[i]) for i in batch]))
            if waiting and (batch is None or len(waiting) > AHEAD):
                positions, futures = waiting.popleft()
                prepared = [future.result() for future in futures]
                known = [i for i, example in zip(positions, prepared, strict=True) if example is not None]
                if known:
                    found[known] = encode([example for example in prepared if example is not None]).numpy()
    return found


def _read_and_prepare(encode: Encoder, read: Callable[[], Any]) -> Any:
    try:
        example = read()
    except ValueError as error:  # an image file that cannot be read
        log.warning("skipped: %s", error)
        return None
    return encode.prepare(example)


def in_this_process(load: LoadEncoder, blocks: Iterator[InputBlock]) -> Iterator[tuple[int, np.ndarray]]:
    """Encode blocks one after the other."""
    encode = load()
    for number, inputs in blocks:
        yield number, encode_block(encode, inputs)


def in_processes(load: LoadEncoder, blocks: Iterator[InputBlock], *, jobs: int) -> Iterator[tuple[int, np.ndarray]]:
    """Encode blocks in `jobs` processes, which end with this one."""
    first = list(itertools.islice(blocks, 2))
    if len(first) < 2 or jobs == 1:  # not worth a process
        yield from in_this_process(load, itertools.chain(first, blocks))
        return
    blocks = itertools.chain(first, blocks)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=_start, initargs=(load,)) as pool:
        running: dict[Future[np.ndarray], int] = {}
        try:
            for number, inputs in blocks:
                running[pool.submit(_encode_here, inputs)] = number
                if len(running) > jobs:  # one waits, so that no process does
                    yield from _take_finished(running)
            while running:
                yield from _take_finished(running)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _take_finished(running: dict[Future[np.ndarray], int]) -> Iterator[tuple[int, np.ndarray]]:
    for future in wait(running, return_when=FIRST_COMPLETED).done:
        yield running.pop(future), future.result()


def on_ray(
    load: LoadEncoder, blocks: Iterator[InputBlock], *, jobs: int | None = None
) -> Iterator[tuple[int, np.ndarray]]:
    """Encode blocks on the cluster that Ray is connected to, in a pool of actors that hold the encoder.

    An actor that dies is started again, and its block is computed once more. Unless `jobs` says how many actors there
    are, there is one for each GPU of the cluster, or for each core.
    """
    import ray

    there = ray.cluster_resources()
    on_gpu = bool(there.get("GPU"))
    needs = {"num_cpus": 0 if on_gpu else 1, "num_gpus": int(on_gpu)}
    actor: Any = ray.remote(_Actor).options(**needs, max_restarts=-1, max_task_retries=BLOCK_RETRIES)
    idle = [actor.remote(Path.cwd(), load) for _ in range(jobs or int(there["GPU" if on_gpu else "CPU"]))]
    running: dict[Any, tuple[int, Any]] = {}

    def take_result() -> tuple[int, np.ndarray]:
        [task], _ = ray.wait(list(running), num_returns=1)
        number, worker = running.pop(task)
        idle.append(worker)
        return number, ray.get(task)

    for number, inputs in blocks:
        if not idle:
            yield take_result()
        worker = idle.pop()
        running[worker.encode.remote(inputs)] = number, worker
    while running:
        yield take_result()


class _Actor:
    """An encoder on a node of a Ray cluster. Relative paths refer to the folder of the process that asks."""

    def __init__(self, here: Path, load: LoadEncoder) -> None:
        os.chdir(here)
        self.encoder = load()

    def encode(self, inputs: Inputs) -> np.ndarray:
        return encode_block(self.encoder, inputs)


_loaded_encoder: Encoder


def _start(load: LoadEncoder) -> None:
    """Load the encoder once in each process."""
    global _loaded_encoder

    def follow() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    torch.set_num_threads(1)
    _loaded_encoder = load()


def _encode_here(inputs: Inputs) -> np.ndarray:
    return encode_block(_loaded_encoder, inputs)
