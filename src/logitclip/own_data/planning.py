"""From data to the settings of an ordinary run, and how long training will take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from logitclip import models
from logitclip.launch import using_threads
from logitclip.own_data.source import HELD_OUT, Source
from logitclip.runs.config import RunConfig, word_to_tune
from logitclip.runs.train import settings as run_settings
from logitclip.search import HELD_OUT as SEARCH_HELD_OUT
from logitclip.search import TRIALS
from logitclip.studies.tuning import GRID_VAL, search_for, trial
from logitclip.text import duration

AUTO = "norm:temp=auto"
FOLDS = 5
STEPS = 20_000  # limit of a run, unless that is fewer than 10 epochs
SEARCHED_ROWS = 20_000  # rows on which the clip is searched, if there are twice as many
CPU_PIXELS = 64  # without a GPU, larger images are reduced to this
IN_MEMORY = 2_000_000_000  # bytes of decoded images that are kept in memory
UNBALANCED = 5.0  # ratio of the largest to the smallest class from which classes are weighted
MEASURED = 4  # training steps that are timed
CHOOSE = "choose the clip"
OVERHEAD = 1.0  # seconds to start and to write a run


@dataclass(frozen=True, eq=False)
class Plan:
    """What `fit` will do."""

    source: Source
    config: RunConfig  # of the final run; its clip may still be auto or grid
    size: int  # side of the images, in pixels
    runs: dict[str, tuple[int, int]]  # what for -> runs, and rows trained on in each
    step_seconds: float  # of a batch, measured

    @property
    def seconds(self) -> float:
        """How long training will take, from a few measured steps."""
        return sum(count * self.run_seconds(rows) for count, rows in self.runs.values())

    def run_seconds(self, rows: int) -> float:
        """How long one run on so many rows takes."""
        return self.start_seconds + self.epoch_seconds(rows) * int(self.config.epochs or 1)

    @property
    def start_seconds(self) -> float:
        """How long a run takes before its first epoch."""
        return OVERHEAD + self.source.load_seconds

    def epoch_seconds(self, rows: int) -> float:
        """How long an epoch of so many rows takes; half of it is evaluation, order and records."""
        return 2 * self.training_seconds(rows)

    def training_seconds(self, rows: int) -> float:
        """How long the training steps on so many rows take."""
        return self.step_seconds * -(-rows // int(self.config.batch_size or 1))

    def rows_of(self, config: RunConfig) -> int:
        """Return how many rows a run of this plan trains on."""
        if config.val and CHOOSE in self.runs:  # the other runs then have no val
            return self.runs[CHOOSE][1]
        folds = self.runs.get("judge every label out of fold")
        return folds[1] if folds and not config.per_example else self.runs["train the model"][1]

    def lines(self) -> list[str]:
        """Describe data and plan, a sentence a line."""
        source, counts = self.source, self.source.counts
        named = [f"{name} ({count:,})" for name, count in zip(source.class_names, counts.tolist(), strict=True)]
        shown = ", ".join(named) if len(named) <= 12 else f"{', '.join(named[:10])} and {len(named) - 10} more"
        lines = [
            f"{source.path}: {len(source.labels):,} rows in {len(counts)} classes: {shown}.",
            "Used: " + ", ".join(f"{name} ({kind})" for name, kind in list(source.used.items())[:30]) + ".",
        ]
        if len(source.used) > 30:
            lines[-1] = lines[-1][:-1] + f" and {len(source.used) - 30} more."
        lines += [f"Left out: {name!r} {reason}." for name, reason in source.left_out.items()]
        lone = [source.class_names[k] for k in np.flatnonzero(counts == 1).tolist()]
        if lone:
            lines.append(f"{_few(lone)} with one example: their labels cannot be judged.")
        lines += [
            f"Classes {' and '.join(map(repr, names))} differ only in case or spaces: are they one class?"
            for names in _alike(source.class_names)
        ]
        if source.kind == "image":
            reason = "" if self.size == source.pixels else f", reduced from {source.pixels} because there is no GPU"
            inputs = f"images of {self.size}x{self.size} pixels{reason}"
        else:
            inputs = f"{source.features} features"
        weighted = ", classes weighted by size" if self.config.balance else ""
        lines.append(
            f"Network: {self.config.model} on {inputs}; {self.config.epochs} epochs of batches of "
            f"{self.config.batch_size}{weighted}; clip {self.config.clip}."
        )
        runs = ", ".join(f"{count} to {purpose}" for purpose, (count, _) in self.runs.items())
        lines.append(
            f"Runs: {runs}. {HELD_OUT:.0%} of the rows are held out, with their noisy labels, to judge and calibrate."
        )
        earlier = any(Path(self.config.runs).glob("*/result.json"))
        lines.append(
            f"This will take about {duration(max(1.0, self.seconds))}"
            f"{', less if some of the runs are finished already' if earlier else ''}."
        )
        return lines


def make_plan(source: Source, *, clip: str = AUTO, folds: int = 0, out: str = "model", **options: Any) -> Plan:
    """Choose network, input size and settings.

    Args:
        source: The data.
        clip: The clip; a number may be the word auto or grid.
        folds: Folds of out-of-fold predictions; 0 for none.
        out: The model folder; its subfolder `runs` gets the runs.
        options: Fields of `RunConfig` to use instead of the plan's.

    Raises:
        ValueError: If an option is unknown or out of range.
    """
    rows, gpu = len(source.labels), torch.accelerator.is_available()
    knobs, size = dict(source.knobs), 0
    if source.kind == "image":
        size = min(source.pixels, 256 if gpu else CPU_PIXELS)
        knobs |= {"size": size, "memory": rows * 3 * size * size <= IN_MEMORY}
        network = "cnn" if not gpu or size < 48 else f"resnet:depth=18{',stem=cifar' if size < 128 else ''}"
        settings: dict[str, Any] = {"model": network, "lr": 0.05, "weight_decay": 5e-4, "batch_size": 128}
        settings["augment"] = f"crop:size={size * 7 // 8}" if size >= 48 else "none"
        most = 60
    else:
        depth, most = (1, 20) if source.kind == "text" else (2, 60)
        settings = {"model": f"mlp:width=256,depth={depth}", "lr": 0.05, "weight_decay": 1e-4, "augment": "none"}
        settings["batch_size"] = 128 if rows < 100_000 else 1024
    settings["batch_size"] = min(settings["batch_size"], max(8, rows // 8))
    settings["epochs"] = int(np.clip(STEPS * settings["batch_size"] // rows, 10, most))
    several = source.counts[source.counts > 1]  # a class of one is often a typing error
    settings["balance"] = bool(len(several) and several.max() > UNBALANCED * several.min())
    settings |= {"schedule": "cosine", "momentum": 0.9, "nesterov": True, "drop_last": False}
    planned = ("data", "runs", "per_example")
    unknown = [name for name in options if name not in RunConfig.__dataclass_fields__ or name in planned]
    if unknown:
        raise ValueError(f"fit has no option {unknown[0]!r}.")
    settings |= {name: value for name, value in options.items() if value is not None}
    spec = replace(source, knobs={**knobs, "test": HELD_OUT}).spec
    config = RunConfig(data=spec, clip=clip, runs=f"{out}/runs", per_example=True, **settings)
    wanted = word_to_tune(config)
    tried = config if wanted is None else trial(config, search_for(config), 1.0)
    run_settings(tried.resolved())  # refuses now what no run can have, not after the plan

    runs = {}
    val = config.val if wanted is None else 0.0  # once the clip is chosen, nothing is held out to choose it
    trained = round(rows * (1 - HELD_OUT) * (1 - val))
    if wanted is not None:
        searched = min(trained, SEARCHED_ROWS) if rows > 2 * SEARCHED_ROWS else trained
        # The grid of eleven holds out a tenth, the search a half.
        count, held_out = (11, GRID_VAL) if wanted[2] == "grid" else (TRIALS, SEARCH_HELD_OUT)
        runs[CHOOSE] = (count, round(searched * (1 - (config.val or held_out))))
    if folds:
        runs["judge every label out of fold"] = (folds, round(rows * (1 - 1 / folds) * (1 - val)))
    runs["train the model"] = (1, trained)
    return Plan(source, config, size, runs, _step_seconds(source, config, size))


def _step_seconds(source: Source, config: RunConfig, size: int) -> float:
    """Time a few training steps of the network on random inputs."""
    side = size * 7 // 8 if "crop" in str(config.augment) else size
    shape = (3, side, side) if source.kind == "image" else (source.features,)
    on_cpu = config.accelerator == "cpu" or not torch.accelerator.is_available()
    device = torch.device("cpu") if on_cpu else torch.accelerator.current_accelerator()
    model = models.build(str(config.model), len(source.class_names), shape).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    x = torch.zeros(int(config.batch_size or 1), *shape, device=device)
    y = torch.zeros(len(x), dtype=torch.int64, device=device)
    times = []
    with using_threads(config.threads):  # more threads than a run has can be far slower on a busy machine
        for _ in range(MEASURED):
            started = time.perf_counter()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if not on_cpu:
                torch.accelerator.synchronize()
            times.append(time.perf_counter() - started)
    return min(times)


def _alike(names: Sequence[str]) -> list[list[str]]:
    """Return the groups of names that are equal but for case and spaces."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault("".join(name.casefold().split()), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"Class{'es' if len(names) > 1 else ''} {', '.join(map(repr, names[:3]))}{more}"
