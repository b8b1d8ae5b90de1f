"""How long a run will take, from a few training steps."""

from __future__ import annotations

import time

import torch
from torch import nn

from logitclip.data import Dataset
from logitclip.data.augment import transform
from logitclip.launch import find_device, using_threads
from logitclip.runs.config import RunConfig
from logitclip.runs.train import build_model

TIMED_EXAMPLES = 64  # of a timed step
TIMED_STEPS = 2  # the first one also allocates memory


def run_seconds(config: RunConfig, dataset: Dataset) -> float:
    """Estimate the seconds of a run on one device: time training steps of its network on a few examples.

    Evaluation, and the further passes of methods such as SAM, are not counted. A run on features of an encoder counts
    as nothing: its network is small, and the encoder sees each example once, for all runs.

    Args:
        config: The run; a clip that is still to be tuned does not matter.
        dataset: Its data, as `data.load` returns it.
    """
    if config.encoder != "none":
        return 0.0
    resolved = RunConfig(data=config.data, model=config.model, epochs=config.epochs, augment=config.augment).resolve()
    device = find_device(config.accelerator)
    on_cpu = device.type == "cpu"
    view = transform(str(resolved.augment), dataset.mean, dataset.std)
    model = build_model(str(resolved.model), dataset, view, seed=0).to(device)
    x = view(dataset.train.x[torch.arange(min(TIMED_EXAMPLES, len(dataset.train)))], None).to(device)
    target = torch.zeros(len(x), dtype=torch.int64, device=device)
    clock = time.process_time if on_cpu else time.perf_counter  # seconds of a core, however busy the machine is
    times = []
    with using_threads(config.threads):
        for _ in range(TIMED_STEPS):
            began = clock()
            nn.functional.cross_entropy(model(x), target).backward()
            if not on_cpu:
                torch.accelerator.synchronize()
            times.append(clock() - began)
    examples = min(config.limit or len(dataset.train), len(dataset.train)) * (1 - config.val)
    return min(times) / len(x) * examples * int(resolved.epochs or 1)
