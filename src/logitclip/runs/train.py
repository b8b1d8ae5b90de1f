"""`train(config)`: build everything that a config names, train, and save the run in its folder."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import multiprocessing
import os
import platform
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from logitclip import data, engine, files, models, noise
from logitclip.clip import PENALTIES
from logitclip.criterion import Loss, build_criterion
from logitclip.data import hold_out
from logitclip.data._loading import choose_examples, limit_examples
from logitclip.data.augment import transform
from logitclip.encoders import downloads_allowed
from logitclip.encoders.features import OnRows
from logitclip.files import Json
from logitclip.launch import launch, make_fabric, raise_interrupt_on, using_deterministic_algorithms, using_threads
from logitclip.methods import METHODS
from logitclip.noise.records import reads_examples, reads_inputs
from logitclip.rng import stream
from logitclip.runs import checkpoints, claims, encoding, results
from logitclip.runs.config import RunConfig, identify_data, resolved_id
from logitclip.runs.plugins import load_plugins
from logitclip.runs.results import LAST, Result, read_result
from logitclip.text import explain_missing

SPLITS = ("train", "test")
TENSORBOARD = "tensorboard"  # in the folder of a run
MEMORY_ERRORS = (  # in torch's messages; the last two if the number of entries overflows
    *("out of memory", "not enough memory", "can't allocate memory"),
    *("size calculation overflow", "multiplication overflow"),
)
MOST_WEIGHT = 10.0  # largest class weight with `balance`: a few wrong labels must not count as hundreds

if TYPE_CHECKING:
    from multiprocessing.queues import SimpleQueue

    from lightning_fabric import Fabric
    from torch.utils.tensorboard import SummaryWriter

T = TypeVar("T")
LoadDataset = Callable[..., data.Dataset]  # from a spec, and `raw` as in `data.load`
OnEpoch = Callable[[RunConfig, engine.EpochRow | None], None]


def train(
    config: RunConfig,
    *,
    on_epoch: OnEpoch | None = None,
    on_rows: OnRows | None = None,
    download: bool = False,
    mirror: str | None = None,
) -> Result:
    """Train in the folder `runs/<id>` and return the result. A finished run is only read back.

    If a run is interrupted, call this again to resume it from its last checkpoint; it ends with the same numbers. Under
    torchrun the process group stays initialised and unused afterwards: a script may train again, or call
    `torch.distributed.destroy_process_group()` before it ends.

    Args:
        config: The run.
        on_epoch: Called with the resolved config and the row of each epoch, and once before the first epoch with the
            last row of a resumed run or None. With several devices it is called in rank 0, so it must be picklable.
        on_rows: Called with the rows that the encoder has done and all rows, while features are computed.
        download: Get missing data from its official address, and a missing encoder from the hub.
        mirror: A folder or address to download from instead.

    Returns:
        The result, which is also in the folder of the run.

    Raises:
        ValueError: The config cannot be trained: an unknown name, a value out of range, missing data.
        logitclip.engine.Diverged: The loss or the logits are not finite.
        logitclip.runs.claims.Claimed: Another process trains this run.
        logitclip.files.CannotWrite: The disk is full, or the folder cannot be written to.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = train(RunConfig(noise="symmetric:rate=0.5", clip="norm:temp=1.5", epochs=1, runs=folder))
    >>> result.noise_rate
    50.0
    """
    with downloads_allowed(download):
        config = _with_devices_of_torchrun(config).resolve()
        id = resolved_id(config)
    folder = Path(config.runs) / id
    finished = read_result(folder)
    if finished is not None:
        return finished
    if folder.is_symlink():
        raise ValueError(f"{folder} is a link, and a run is trained in a folder of its own: remove the link.")
    # Report mistakes before anything is written.
    build_criterion(config.loss, config.clip)
    settings_of(config)
    options = {"accelerator": config.accelerator, "devices": config.devices, "precision": config.precision}
    fabric = make_fabric(**options, nodes=config.nodes)
    load = partial(data.load, root=config.root, download=download or mirror is not None, mirror=mirror)
    if config.encoder != "none" and identify_data(config) not in _prepared:  # before any other process starts
        encoding.compute_features(config, load(config.data, raw=True), on_rows=on_rows)
    if fabric.world_size > 1 and not torch.distributed.is_torchelastic_launched():
        if download or mirror is not None:  # once, before the processes start
            load(config.data)
        with claims.claim(folder) as key:
            return read_result(folder) or _spawn(options, _Task(config, id, key, on_epoch))
    fabric.launch()
    with claims.claim(folder) if fabric.is_global_zero else contextlib.nullcontext("") as key:
        # Another process may have finished it just before the claim; processes of torchrun must all do the same.
        finished = read_result(folder) if fabric.world_size == 1 else None
        if finished is not None:
            return finished
        with _explain_memory_errors(config):
            return _train_here(fabric, _Task(config, id, key, on_epoch), load)


def _with_devices_of_torchrun(config: RunConfig) -> RunConfig:
    """Return the config with the devices and nodes of torchrun, if torchrun started this process."""
    asked = config.devices * config.nodes
    if not torch.distributed.is_torchelastic_launched():
        if config.nodes > 1:
            raise ValueError(
                "Several nodes need torchrun on each: torchrun --nnodes=2 --nproc-per-node=4 ... -m logitclip train"
            )
        return config
    world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if asked not in (1, world):
        raise ValueError(f"torchrun started {world} processes, but devices and nodes ask for {asked}: leave them out.")
    return dataclasses.replace(config, devices=local, nodes=world // local)


class OutOfMemory(MemoryError, ValueError):
    """A run needs more memory than there is."""


@contextlib.contextmanager
def _explain_memory_errors(config: RunConfig) -> Iterator[None]:
    """Name the options to lower when memory runs out."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(text in str(error).lower() for text in MEMORY_ERRORS):
            raise
        raise OutOfMemory(
            f"Training ran out of memory. Lower batch_size (it is {config.batch_size}), choose a smaller model (it is "
            f"{config.model}), or train on fewer examples with limit."
        ) from error


# -- several processes -------------------------------------------------------------------------------------------------


def _spawn(options: Json, task: _Task) -> Result:
    """Train in one spawned process per device. An error in any of them is raised here."""
    failures = multiprocessing.get_context("spawn").SimpleQueue()
    try:
        launch(_train_in_process, task, failures, **options)
    except ProcessExitedException as error:
        raise ChildProcessError(f"A training process has died ({error}). The run can be resumed.") from error
    except ProcessRaisedException:
        if failures.empty():
            raise
        raise failures.get() from None  # the first error: the others follow from it
    result = read_result(task.folder)
    if result is None:
        raise FileNotFoundError(
            f"{task.folder} has no result, though the run has ended: was the folder removed meanwhile?"
        )
    return result


def _train_in_process(fabric: Fabric, task: _Task, failures: SimpleQueue[Exception]) -> None:
    """Train in one of several spawned processes; an error is put into `failures`, for the parent to raise."""
    raise_interrupt_on(signal.SIGINT, signal.SIGTERM)
    try:
        load_plugins(task.config.plugin)
        with _explain_memory_errors(task.config):
            _train_here(fabric, task, partial(data.load, root=task.config.root))
    except (ValueError, OSError, ImportError, claims.Claimed) as error:
        failures.put(error)
        raise
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # the process is about to end


# -- the run in each process -------------------------------------------------------------------------------------------


def _train_here(fabric: Fabric, task: _Task, load: LoadDataset) -> Result:
    """Train a claimed run in this process, with its folder kept up to date; every process of a run calls it."""
    config = task.config
    with using_threads(config.threads), using_deterministic_algorithms(config.deterministic):
        dataset, noisy = prepare(config, load)
        generator = stream("cpu", config.seed, "validation")
        held = hold_out(len(dataset.train), config.val, rule=config.val_rule, generator=generator)
        view = transform(str(config.augment), dataset.mean, dataset.std)
        classes = {"class_names": list(dataset.class_names), "class_sizes": noisy.class_sizes.tolist()}
        record = _Record(fabric, task, {"data": dataset.name, **classes, **noisy.describe()})
        if record.writes:
            encoding.keep_features(dataset, record.folder)
        try:
            worker = engine.fit(
                dataset,
                partial(build_model, str(config.model), dataset, view),
                _build_criterion(config, dataset, held.train),
                METHODS.build(config.method),
                settings_of(config),
                view=view,
                index=held.train,
                held_out=held.val,
                augment_held_out=held.augmented,
                fabric=fabric,
                resume=record.resume,
                after_epoch=record.after_epoch,
            )
            result = record.summarise(100 * noisy.rate, fabric.device)
            if record.writes:
                record.finish(result, worker.weights(), dataset, held.val)
        except (files.CannotWrite, claims.Claimed):  # nothing can or should be written now
            raise
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, engine.Diverged) and not record.rows:
                record.remove()  # refused, or failed before there was anything to keep
                raise
            try:
                record.leave()
            except (KeyboardInterrupt, SystemExit):  # Ctrl-C or SIGTERM has interrupted that
                record.leave()
            raise
        finally:
            if record.board is not None:
                record.board.close()
    return result


@dataclasses.dataclass(frozen=True)
class _Task:
    """A run that this process has claimed."""

    config: RunConfig  # resolved
    id: str
    key: str  # of the claim
    on_epoch: OnEpoch | None = None

    @property
    def folder(self) -> Path:
        return Path(self.config.runs) / self.id


class _Record:
    """The progress of a run, read from its folder at the start; rank 0 keeps the folder up to date."""

    def __init__(self, fabric: Fabric, task: _Task, noise: Json) -> None:
        self.task, self.config, self.folder, self.writes = task, task.config, task.folder, fabric.is_global_zero
        self.rows: list[engine.EpochRow] = []
        self.examples: dict[str, Tensor] = {}
        self.resume: engine.Resume | None = None
        self.unsaved: checkpoints.Checkpoint | None = None
        self.result: Result | None = None  # of the finished run
        self.board: SummaryWriter | None = None
        seconds = 0.0
        checkpoint = checkpoints.load_checkpoint(self.folder, task.id)
        if checkpoint is not None:
            weights, state, self.rows = checkpoint
            seconds, self.examples = state["seconds"], state["examples"]
            self.resume = weights, state, len(self.rows)
        if fabric.broadcast(len(self.rows)) != len(self.rows):
            raise ValueError(f"Not all processes see the same checkpoints: {self.folder} must be on a shared disk.")
        self.saved = time.monotonic()
        self.started = self.saved - seconds
        self.new = self.writes and not (self.folder / results.CONFIG).exists()
        if not self.writes:
            return
        if task.config.tensorboard:
            with explain_missing("--tensorboard needs TensorBoard", "tensorboard"):
                from torch.utils.tensorboard import SummaryWriter
            files.clear_place(self.folder / TENSORBOARD)
            # Steps after the checkpoint are dropped.
            self.board = SummaryWriter(str(self.folder / TENSORBOARD), purge_step=len(self.rows))
        checkpoints.remove_temporary_files(self.folder)
        files.remove(self.folder / results.RESULT)  # a damaged one: `train` returns an intact one earlier
        results.write_config(self.folder, task.config)
        files.replace(self.folder / results.NOISE, files.line_per_key(noise))
        checkpoints.write_rows(self.folder / results.METRICS, self.rows)
        if task.on_epoch is not None:
            task.on_epoch(task.config, self.rows[-1] if self.rows else None)

    @property
    def seconds(self) -> float:
        """Training time, without the time between interruption and resumption."""
        return time.monotonic() - self.started

    def after_epoch(self, progress: engine.Progress) -> None:
        """Add an epoch to the folder: its row, and a checkpoint if `checkpoint_seconds` have passed since the last."""
        self.rows.append(progress.row)
        self.examples = progress.examples
        state = {**progress.state(), "seconds": self.seconds}  # on every rank: the state may be gathered
        if not self.writes:
            return
        claims.check_claim(self.folder, self.task.key)
        weights, rows = progress.weights(), list(self.rows)
        self.unsaved = weights, state, rows
        if time.monotonic() - self.saved >= self.config.checkpoint_seconds:
            self.save()
        else:  # copy: training continues in these tensors, and may be interrupted in the next epoch
            self.unsaved = _copy_to_cpu(weights), _copy_to_cpu(state), rows
        checkpoints.append_row(self.folder / results.METRICS, progress.row)
        if self.board is not None:
            for name, value in progress.row.items():
                if isinstance(value, int | float) and name != "epoch":
                    self.board.add_scalar(name, value, progress.row["epoch"])
        if self.task.on_epoch is not None:
            self.task.on_epoch(self.config, progress.row)

    def save(self) -> None:
        """Save the last finished epoch, if it is not saved yet."""
        if self.unsaved is not None:
            checkpoints.save_checkpoint(self.folder, *self.unsaved, self.task.id)
        self.saved, self.unsaved = time.monotonic(), None

    def leave(self) -> None:
        """Save the last finished epoch; if the result has been written, remove instead what it makes unnecessary."""
        if self.result is not None and (self.folder / results.RESULT).exists():
            results.tidy_finished(self.folder, self.result)
        else:
            self.save()

    def remove(self) -> None:
        """Remove what this process has written of a run that cannot be trained."""
        if self.board is not None:
            self.board.close()
        for name in (results.CONFIG, results.NOISE, results.METRICS, TENSORBOARD) if self.new else ():
            files.remove(self.folder / name)

    def summarise(self, noise_rate: float, device: torch.device) -> Result:
        """Return the result of the finished run."""
        last = self.rows[-LAST:]
        on_gpu = device.type == "cuda"
        return Result(
            id=self.task.id,
            config=json.loads(json.dumps(asdict(self.config))),  # lists instead of tuples, as `read_result` returns it
            last10_accuracy=_mean([row["test_accuracy"] for row in last]),
            best_accuracy=max(row["test_accuracy"] for row in self.rows),
            val_accuracy=_mean([row["val_accuracy"] for row in last]) if self.config.val else None,
            memorised=last[-1]["memorised"],
            recovered=last[-1]["recovered"],
            noise_rate=noise_rate,
            clip=self.config.clip,
            epochs=len(self.rows),
            seconds=round(self.seconds, 3),
            versions=versions(),
            device=torch.cuda.get_device_name(device) if on_gpu else f"{device.type} ({platform.machine()})",
            commit=_commit(),
        )

    def finish(self, result: Result, weights: dict[str, Tensor], dataset: data.Dataset, held_out: Tensor) -> None:
        """Write what was measured of the examples, the rows, the weights and the result."""
        self.result = result
        prediction = self.examples.pop("val_prediction", None)
        if prediction is not None:
            _write_examples(self.folder / results.VALIDATION, dataset.train, held_out, prediction=prediction)
        if self.config.per_example:
            test = {name: self.examples.pop(f"test_{name}") for name in ("prediction", "confidence")}
            _write_examples(self.folder / results.EXAMPLES, dataset.train, **self.examples)
            _write_examples(self.folder / results.TEST, dataset.test, **test)
        checkpoints.write_rows(self.folder / results.METRICS, self.rows)
        results.finish(self.folder, result, weights)


def _copy_to_cpu(tensors: T) -> T:
    """Return a copy in main memory of the tensors in nested collections."""
    from lightning_utilities.core.apply_func import apply_to_collection

    return apply_to_collection(tensors, Tensor, lambda tensor: tensor.detach().to("cpu", copy=True))


# -- from names to objects ---------------------------------------------------------------------------------------------


def prepare(config: RunConfig, load: LoadDataset | None = None) -> tuple[data.Dataset, noise.NoisyLabels]:
    """Return the dataset of a resolved config with the noise applied, and the record of the noise.

    Noise is drawn on the original inputs. Then the features of the encoder replace them, if there is one. The last
    result is kept, because the runs of a sweep often share it.
    """
    key = identify_data(config)
    if key not in _prepared:
        _prepared.clear()  # before the next one is loaded
        _prepared[key] = _prepare(config, load or partial(data.load, root=config.root))
    return _prepared[key]


_prepared: dict[tuple[str, ...], tuple[data.Dataset, noise.NoisyLabels]] = {}


def _prepare(config: RunConfig, load: LoadDataset) -> tuple[data.Dataset, noise.NoisyLabels]:
    """Load the data of a run and apply its noise; with an encoder, replace the inputs by features. See `prepare`."""
    if config.encoder == "none":
        return _with_noise(config, load)
    raw = functools.cache(partial(load, raw=True))
    dataset, record = _with_noise(config, load if reads_inputs(config.noise) else raw)
    whole = raw(config.data)
    part = limit_examples(whole, config.limit, config.test_limit)
    parts = {name: _with_rows_of(getattr(dataset, name), getattr(part, name), getattr(whole, name)) for name in SPLITS}
    features = encoding.encode_dataset(config, dataclasses.replace(part, **parts))
    splits = {name: _with_features(getattr(dataset, name), getattr(features, name)) for name in SPLITS}
    if record.images is not None:  # some of them are of another dataset
        splits["train"] = dataclasses.replace(splits["train"], x=encoding.encode_inputs(config, record.images))
    dataset = dataclasses.replace(features, **splits, label_sets={})
    return encoding.without_unreadable(dataset, record)


def _with_rows_of(split: data.Split, part: data.Split, whole: data.Split) -> data.Split:
    """Return `part`, or the rows of `split` if it has others: a limit takes others where images cannot be read."""
    if split.rows is None or part.rows is None or whole.rows is None or torch.isin(split.rows, part.rows).all():
        return part
    return whole.select(_find_rows(split.rows, whole.rows))


def _with_features(split: data.Split, features: data.Split) -> data.Split:
    """Replace the inputs of a split by the features of its rows."""
    x = features.x
    if features.rows is not None and split.rows is not None:  # images that cannot be read may have been left out
        assert isinstance(x, Tensor)
        x = x[_find_rows(split.rows, features.rows)]
    return dataclasses.replace(split, x=x, beside=None)


def _find_rows(wanted: Tensor, rows: Tensor) -> Tensor:
    """Return the positions of the wanted rows among all rows."""
    order = rows.argsort()
    return order[torch.searchsorted(rows[order], wanted)]


def _with_noise(config: RunConfig, load: LoadDataset) -> tuple[data.Dataset, noise.NoisyLabels]:
    """Return the dataset of a run, cut to its limits, with noisy labels (or images), and the record of the noise."""
    whole = load(config.data)
    dataset = limit_examples(whole, config.limit, config.test_limit)
    if not len(dataset.test):
        raise ValueError(f"{config.data} has no test examples, and a run is judged by them: use lc.engine.fit instead.")
    if config.noise == "none":  # the dataset may come with wrong labels
        labels, clean = dataset.train.labels, dataset.train.clean_labels
        labels = labels.argmax(1) if labels.is_floating_point() else labels
        clean = labels if clean is None else clean
        return dataset, noise.NoisyLabels(labels, clean, dataset.num_classes, "none", {}, config.noise_seed)
    if config.limit and reads_examples(config.noise):  # a file has a label for each example of the whole data
        record = noise.apply(config.noise, whole, config.noise_seed, load=load)
        record = record.select(choose_examples(len(whole.train), config.limit, "train"))
    else:
        record = noise.apply(config.noise, dataset, config.noise_seed, load=load)
    train = dataset.train.relabel(record.labels)
    if record.images is not None:
        train = dataclasses.replace(train, x=record.images)
    return dataclasses.replace(dataset, train=train), record


def settings_of(config: RunConfig) -> engine.Settings:
    """Return the engine settings of a resolved config."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(engine.Settings)}
    values["penalty"] = None if config.penalty == "none" else PENALTIES.build(config.penalty)
    if values["penalty"] is not None:
        values["penalty"](torch.zeros(1, 2))  # report a knob out of range now, not in training
    return engine.Settings(**values)


def _build_criterion(config: RunConfig, dataset: data.Dataset, index: Tensor) -> nn.Module:
    """Return the loss of a resolved config behind its clip; if asked for, classes are weighted by their share."""
    if not config.balance:
        return build_criterion(config.loss, config.clip)
    labels = dataset.train.labels[index]
    if labels.is_floating_point():
        raise ValueError("balance needs one label per example, not soft labels.")
    counts = torch.bincount(labels, minlength=dataset.num_classes).clamp(min=1)
    weight = len(labels) / (dataset.num_classes * counts)
    return build_criterion(Loss(config.loss, class_weight=weight.clamp(max=MOST_WEIGHT)), config.clip)


def build_model(spec: str, dataset: data.Dataset, view: engine.View, seed: int) -> nn.Module:
    """Return the network that `spec` names, for the inputs that `view` makes of the dataset."""
    return models.build(spec, dataset.num_classes, _input_shape(dataset, view), seed=seed)


def rebuild_network(result: Result, dataset: data.Dataset) -> tuple[nn.Module, engine.View]:
    """Return the trained network of a run, in evaluation mode, and the view that makes its inputs from the dataset.

    Raises:
        logitclip.runs.results.Damaged: The weights are damaged, or not those of this network.
    """
    view = transform(str(result.config["augment"]), dataset.mean, dataset.std)
    weights, shape = result.weights(), _input_shape(dataset, view)
    try:
        return models.rebuild(str(result.config["model"]), dataset.num_classes, shape, weights), view
    except models.WrongWeights as error:
        raise results.damage_error(result.folder, str(error)) from error


def _input_shape(dataset: data.Dataset, view: engine.View) -> tuple[int, ...]:
    return tuple(view(dataset.test.x[torch.tensor([0])], None).shape[1:])


def versions() -> dict[str, str]:
    """Return the versions of the packages that results may depend on."""
    found = {"python": platform.python_version()}
    for package in ("logitclip", "torch", "numpy", "lightning-fabric"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "unknown"
    return found


def _write_examples(path: Path, train: data.Split, index: Tensor | None = None, **arrays: Tensor) -> None:
    """Write arrays and labels of all training examples, or of those at `index`."""
    chosen = slice(None) if index is None else index
    arrays["label"] = train.labels[chosen]
    if train.clean_labels is not None:
        arrays["clean_label"] = train.clean_labels[chosen]
    if train.rows is not None:
        arrays["row"] = train.rows[chosen]
    if index is not None:
        arrays["index"] = index
    content = io.BytesIO()
    np.savez_compressed(content, **{name: array.numpy() for name, array in arrays.items()})  # type: ignore[arg-type]
    files.replace(path, content.getvalue())


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _commit() -> str | None:
    """Return the commit of the code, if it runs from a checkout."""
    file = Path(__file__)
    try:
        for command in (["ls-files", "--error-unmatch", file.name], ["rev-parse", "HEAD"]):
            answer = subprocess.run(["git", *command], cwd=file.parent, capture_output=True, timeout=5)
            if answer.returncode:  # not in a repository, or installed inside another one
                return None
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.decode().strip()
