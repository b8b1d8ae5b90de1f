"""`run(config)`: from names to a trained model in a folder. Exported as `logitclip.train`."""

from __future__ import annotations

import copy
import dataclasses
import io
import logging
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from logitclip import data, engine, models, noise, runs
from logitclip.clip import PENALTIES
from logitclip.config import RunConfig, load_plugins, parse_milestones
from logitclip.criterion import clipped
from logitclip.data.augment import transform
from logitclip.data.loading import hold_out
from logitclip.methods import METHODS
from logitclip.methods.standard import stream

log = logging.getLogger(__name__)

LAST = 10  # epochs that the reported accuracy is the mean of


@dataclass(frozen=True)
class Result:
    """What came out of a run; accuracies and shares are percentages."""

    id: str
    config: dict[str, Any]
    last10_accuracy: float  # on the test set, mean of the last 10 epochs
    best_accuracy: float  # of the best epoch, chosen on the test set
    val_accuracy: float | None  # on held-out noisy labels, mean of the last 10 epochs
    memorised: float | None  # of the wrong labels, the share predicted as given, after the last epoch
    recovered: float | None  # of the wrong labels, the share predicted as true
    noise_rate: float
    clip: str
    epochs: int
    seconds: float
    versions: dict[str, str]
    device: str
    commit: str | None

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of `metrics.jsonl`, one for each epoch."""
        return runs.read_rows(self.folder / "metrics.jsonl")

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return Path(self.config["runs"]) / self.id


OnEpoch = Callable[[RunConfig, dict[str, Any]], None]


def run(config: RunConfig, *, on_epoch: OnEpoch | None = None) -> Result:
    """Train as `config` says, in the folder `runs/<id>`, and return the result; a finished run is only read back.

    An interrupted run is resumed from its last checkpoint, and ends with the same numbers.

    Args:
        on_epoch: called with the resolved config and the row of each epoch, for progress bars and the like. With
            several devices it is called in the first process, so it must be picklable.
    """
    config = config.resolved()
    id = config.id
    folder = Path(config.runs) / id
    finished = read_result(folder)
    if finished is not None:
        return finished
    fabric = engine.make_fabric(
        accelerator=config.accelerator, devices=config.devices, nodes=config.nodes, precision=config.precision
    )
    launched = torch.distributed.is_torchelastic_launched()
    if fabric.world_size > 1 and not launched:
        with runs.claim(folder):
            return fabric.launch(_work, config, id, on_epoch)
    fabric.launch()
    if fabric.is_global_zero:
        with runs.claim(folder):
            return _work(fabric, config, id, on_epoch)
    return _work(fabric, config, id, on_epoch)


def read_result(folder: Path) -> Result | None:
    """The result of a finished run, or None."""
    content = runs.read_json(folder / "result.json")
    if content is None:
        return None
    content["config"] = {**content["config"], "runs": str(folder.parent)}  # folders may be moved
    return Result(**content)


def _work(fabric: Any, config: RunConfig, id: str, on_epoch: OnEpoch | None) -> Result:
    """The run itself, in each process; the first one writes."""
    load_plugins(config.plugin)
    folder, writes = Path(config.runs) / id, fabric.is_global_zero
    started, before = time.monotonic(), 0.0
    dataset, rate = prepare(config)
    held = hold_out(
        len(dataset.train),
        config.val,
        rule=config.val_rule,
        generator=stream("cpu", config.seed, "validation"),
    )
    checkpoint = runs.load_checkpoint(folder, id, tidy=writes)
    rows: list[dict[str, Any]] = []
    resume = None
    examples: dict[str, Tensor] = {}
    if checkpoint is not None:
        weights, state, rows = checkpoint
        before, examples = state["seconds"], state["examples"]
        resume = weights, state, len(rows)
    if writes:
        runs.write_json(folder / "config.json", asdict(config))
        runs.write_rows(folder / "metrics.jsonl", rows)
    board = _tensorboard(folder) if config.tensorboard and writes else None
    saved, unsaved = time.monotonic(), None

    def save() -> None:
        nonlocal saved, unsaved
        if unsaved is not None and writes:
            runs.save_checkpoint(folder, *unsaved, id)
        saved, unsaved = time.monotonic(), None

    def after_epoch(progress: engine.Progress) -> None:
        nonlocal unsaved, examples
        examples = progress.examples
        rows.append(progress.row)
        state = {**progress.state(), "seconds": before + time.monotonic() - started}
        unsaved = copy.deepcopy((len(rows), progress.weights(), state, rows))
        if time.monotonic() - saved >= config.checkpoint_seconds or len(rows) == config.epochs:
            save()
        if not writes:
            return
        runs.append_row(folder / "metrics.jsonl", progress.row)
        if board is not None:
            for key, value in progress.row.items():
                if isinstance(value, int | float) and key != "epoch":
                    board.add_scalar(key, value, progress.row["epoch"])
        if on_epoch is not None:
            on_epoch(config, progress.row)

    try:
        engine.fit(
            dataset,
            partial(build_model, config, dataset),
            clipped(config.loss, config.clip),
            METHODS.build(config.method),
            settings(config, len(dataset.train)),
            view=transform(str(config.augment), dataset.mean, dataset.std),
            index=held.train,
            held_out=held.val,
            augment_held_out=held.augmented,
            fabric=fabric,
            resume=resume,
            after_epoch=after_epoch,
        )
    except KeyboardInterrupt:
        save()  # the end of the last whole epoch
        raise
    last = rows[-LAST:]
    result = Result(
        id=id,
        config=asdict(config),
        last10_accuracy=_mean([row["test_accuracy"] for row in last]),
        best_accuracy=max(row["test_accuracy"] for row in rows),
        val_accuracy=_mean([row["val_accuracy"] for row in last]) if config.val else None,
        memorised=rows[-1]["memorised"],
        recovered=rows[-1]["recovered"],
        noise_rate=100 * rate,
        clip=config.clip,
        epochs=len(rows),
        seconds=round(before + time.monotonic() - started, 3),
        versions=versions(),
        device=device_name(fabric.device),
        commit=_commit(),
    )
    if writes:
        if board is not None:
            board.close()
        if config.per_example:
            _write_examples(folder / "examples.npz", dataset, examples)
        runs.write_json(folder / "result.json", asdict(result))
    return result


def prepare(config: RunConfig) -> tuple[data.Dataset, float]:
    """The dataset of a resolved config with its noise in place, and the realised rate of the noise."""
    dataset = data.load(config.data, config.root)
    if config.limit:
        dataset = _limited(dataset, config.limit)
    if config.noise == "none":
        train = dataset.train
        wrong = 0.0 if train.clean_labels is None else float((train.labels != train.clean_labels).double().mean())
        return dataset, wrong
    record = noise.apply(config.noise, dataset, config.noise_seed, load=lambda source: data.load(source, config.root))
    train = dataset.train.relabel(record.labels)
    if record.images is not None:
        train = dataclasses.replace(train, x=record.images)
    return dataclasses.replace(dataset, train=train), record.rate


def settings(config: RunConfig, examples: int) -> engine.Settings:
    """What the engine needs of a resolved config."""
    names = [f.name for f in dataclasses.fields(engine.Settings)]
    shared = {name: getattr(config, name) for name in names if hasattr(config, name)}
    shared["milestones"] = parse_milestones(config.milestones or "")
    shared["penalty"] = None if config.penalty == "none" else PENALTIES.build(config.penalty)
    shared["measure_every"] = config.measure_every or (1 if examples <= 20_000 else 10)
    return engine.Settings(**shared)


def build_model(config: RunConfig, dataset: data.Dataset, seed: int) -> nn.Module:
    """The network of a resolved config, for the inputs that its augmentation makes of the dataset."""
    view = transform(str(config.augment), dataset.mean, dataset.std)
    shape = view(dataset.test.x[torch.tensor([0])], None).shape[1:]
    return models.build(str(config.model), dataset.num_classes, shape, seed=seed)


def versions() -> dict[str, str]:
    """The versions a number may depend on."""
    found = {"python": platform.python_version()}
    for package in ("logitclip", "torch", "numpy", "lightning-fabric"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "unknown"
    return found


def device_name(device: torch.device) -> str:
    """What the run computed on."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({platform.machine()})"


def _limited(dataset: data.Dataset, limit: int) -> data.Dataset:
    """A fixed random choice of the training and test examples, the same for every seed."""
    index = {}
    for name, split in (("train", dataset.train), ("test", dataset.test)):
        order = torch.randperm(len(split), generator=stream("cpu", 0, "limit", name))
        index[name] = order[:limit].sort().values
    return dataclasses.replace(
        dataset,
        train=dataset.train.select(index["train"]),
        test=dataset.test.select(index["test"]),
        label_sets={name: labels[index["train"]] for name, labels in dataset.label_sets.items()},
    )


def _write_examples(path: Path, dataset: data.Dataset, examples: dict[str, Tensor]) -> None:
    arrays = {**examples, "label": dataset.train.labels}
    if dataset.train.clean_labels is not None:
        arrays["clean_label"] = dataset.train.clean_labels
    content = io.BytesIO()
    np.savez_compressed(content, **{name: array.numpy() for name, array in arrays.items()})
    runs.write(path, content.getvalue())


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("--tensorboard needs TensorBoard: pip install 'logitclip[tensorboard]'.") from error
    return SummaryWriter(str(folder / "tensorboard"))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _commit() -> str | None:
    """The commit of the code, if it runs from a checkout."""
    try:
        answer = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None if answer.returncode == 0 else None
