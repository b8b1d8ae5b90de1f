"""The training loop: trains a model on the splits of a dataset and reports a row of numbers per epoch."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from logitclip import launch
from logitclip.clip import logit_norms, norm_quantiles
from logitclip.criterion import LogitClip
from logitclip.data import Dataset, Split, batches
from logitclip.data.augment import transform
from logitclip.methods import check_restores
from logitclip.methods.base import Job, Method, Settings, State, View
from logitclip.methods.standard import Standard
from logitclip.rng import derived_seed, stream

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = ["Diverged", "Progress", "Settings", "fit", "learning_rate"]

EpochRow = dict[str, Any]  # the numbers of an epoch, as in `metrics.jsonl`: float, int, list of float, or None
Resume = tuple[dict[str, Tensor], State, int]  # weights, state, and the number of epochs done
M = TypeVar("M", bound=Method)


class Diverged(ValueError):
    """Training diverged: the loss, the logits or their norms are not finite.

    >>> import logitclip as lc
    >>> network = lc.models.build("mlp:width=8", num_classes=10, input_shape=(1, 8, 8))
    >>> try:
    ...     fit(lc.data.load("digits"), network, lc.Loss("ce"), settings=Settings(epochs=1, lr=1e30))
    ... except Diverged as error:
    ...     print(str(error).partition(":")[0])
    Training diverged in epoch 1
    """


@dataclass(frozen=True)
class Progress:
    """The state of training after an epoch; `fit` passes it to `after_epoch`.

    Attributes:
        row: The numbers of the epoch, by name.
        method: The training method with its network.
        fabric: The Lightning Fabric of this process.
        examples: Per-example records [N] if `Settings.per_example` is set, after the last epoch also
            `test_prediction` and `test_confidence` [M]; and `val_prediction` [V] if there are held-out examples.

    Save `weights` and `state` after an epoch to resume from it:

    >>> import logitclip as lc
    >>> digits, saved = lc.data.load("digits"), []
    >>> def train(epochs, resume=None):
    ...     network = lc.models.build("mlp:width=8", num_classes=10, input_shape=(1, 8, 8))
    ...     settings = Settings(epochs=epochs, schedule="constant")
    ...     fit(digits, network, lc.Loss("ce"), settings=settings, resume=resume, after_epoch=saved.append)
    >>> train(epochs=1)
    >>> train(epochs=2, resume=(saved[0].weights(), saved[0].state(), 1))
    >>> [progress.row["epoch"] for progress in saved]
    [0, 1]
    """

    row: EpochRow
    method: Method
    fabric: Fabric
    examples: dict[str, Tensor]

    def weights(self) -> dict[str, Tensor]:
        """Return the weights by name."""
        return self.method.weights()

    def state(self) -> State:
        """Return all other state that resuming needs.

        Raises:
            ValueError: The method saves state that its `load` does not restore.
        """
        check_restores(type(self.method))
        precision = self.fabric.strategy.precision.state_dict()
        return {"method": self.method.state_dict(), "precision": precision, "examples": self.examples}


def _check_restored(method: Method, saved: State) -> None:
    """Raise a ValueError if `load` has left out a part of the saved state: the run would go on with other numbers."""
    restored = method.state_dict()
    for name, value in saved.items():
        if name not in restored or not _same(restored[name], value):
            raise ValueError(
                f"The load of {type(method).__name__} does not restore {name!r}, which its state_dict returned: mend "
                "it and repeat the command."
            )


def _same(one: Any, other: Any) -> bool:
    """Compare two states; NaN equals NaN."""
    if isinstance(one, np.ndarray | Tensor) or isinstance(other, np.ndarray | Tensor):
        if type(one) is not type(other):
            return False
        one, other = torch.as_tensor(one), torch.as_tensor(other).to(torch.as_tensor(one).device)
        return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other or (one != one and other != other))


def learning_rate(settings: Settings, epoch: int) -> float:
    """Return the learning rate of an epoch.

    The schedule "multistep" divides it by 10 at each milestone (a share of the epochs), "cosine" follows a half cosine
    and "constant" keeps it.

    Args:
        settings: Uses `lr`, `schedule`, `milestones` and `epochs`.
        epoch: From 0.

    Returns:
        The learning rate.

    >>> [round(learning_rate(Settings(epochs=200), e), 6) for e in (0, 79, 80, 139, 140)]
    [0.1, 0.1, 0.01, 0.01, 0.001]
    """
    if settings.schedule == "cosine":
        return settings.lr * (1 + math.cos(math.pi * epoch / settings.epochs)) / 2
    if settings.schedule == "constant":
        return settings.lr
    # No milestone falls into the first epoch, however few epochs there are.
    return settings.lr * 0.1 ** sum(epoch >= max(1, round(m * settings.epochs)) for m in settings.milestones)


def fit(
    dataset: Dataset,
    model: nn.Module | Callable[[int], nn.Module],
    criterion: nn.Module,
    method: Callable[[Job], M] = Standard,  # type: ignore[assignment]
    settings: Settings | None = None,
    *,
    view: View | None = None,
    index: Tensor | None = None,
    held_out: Tensor | None = None,
    augment_held_out: bool = False,
    fabric: Fabric | None = None,
    resume: Resume | None = None,
    after_epoch: Callable[[Progress], None] | None = None,
) -> M:
    """Train a network: the training loop itself, without specs and run folders.

    Each epoch reports a row of numbers, among them ``loss``, ``train_accuracy`` and ``test_accuracy``, the
    ``memorised`` and ``recovered`` shares of the wrong labels, and the ``clipped`` share and ``norm_quantiles`` of the
    logits.

    Args:
        dataset: Its training labels may be noisy. `train.clean_labels`, if known, are used to measure memorisation. If
            its test split is empty, `test_accuracy` is None.
        model: A network that returns logits [N, K], or a function from a seed to one.
        criterion: Called with logits [N, K] and labels [N].
        method: The training method; see `logitclip.methods`.
        settings: Epochs, batch size, learning rate and so on.
        view: Turns a batch of the dataset into the model's input: random with a generator, fixed without. By default
            the dataset's normalisation.
        index: [M] int64, the training examples to train on; by default all.
        held_out: [V] int64, the training examples to validate on, with their possibly wrong labels; by default none.
        augment_held_out: Validate on augmented inputs, as the released code does.
        fabric: A launched Lightning Fabric; by default one for this process.
        resume: Weights, state and the number of epochs done, from an earlier `Progress`.
        after_epoch: Called with a `Progress` after each epoch.

    Returns:
        The method, with its trained network: ``predict`` gives logits and ``weights`` the weights by name.

    Raises:
        Diverged: If the loss, the logits or their norms are not finite.
        ValueError: If there is not one full batch to train on.

    >>> import logitclip as lc
    >>> digits = lc.data.load("digits")
    >>> network = lc.models.build("mlp:width=32", num_classes=10, input_shape=(1, 8, 8))
    >>> trained = lc.engine.fit(
    ...     digits, network, lc.LogitClip("ce", temp=1.5), settings=lc.engine.Settings(epochs=3, lr=0.1),
    ...     after_epoch=lambda progress: print(sorted(progress.row)[:3]),
    ... )
    ['clipped', 'epoch', 'loss']
    ['clipped', 'epoch', 'loss']
    ['clipped', 'epoch', 'loss']
    >>> trained.predict(lc.data.normalise(digits.test.x)).shape
    torch.Size([397, 10])
    """
    settings = settings or Settings()
    fabric = launch.make_fabric() if fabric is None else fabric
    view = transform("none", dataset.mean, dataset.std) if view is None else view
    index = torch.arange(len(dataset.train)) if index is None else index
    make_model = (lambda _: model) if isinstance(model, nn.Module) else model
    train = dataset.train.to(fabric.device)
    job = Job(train, dataset.num_classes, index, view, make_model, criterion, settings, fabric)
    with launch.using_threads(settings.threads):
        worker = method(job)
        evaluator = Evaluator(job, dataset.test.to(fabric.device), held_out, augmented=augment_held_out)
        start = 0
        if resume is not None:
            weights, state, start = resume
            worker.load(weights, state["method"])
            _check_restored(worker, state["method"])
            fabric.strategy.precision.load_state_dict(state["precision"])
            evaluator.examples = state["examples"]
        for epoch in range(start, settings.epochs):
            views = stream(fabric.device, settings.seed, "views", epoch, fabric.global_rank)
            row = _train_epoch(worker, job, epoch, views)
            evaluator.measure(worker, row, views)
            if after_epoch is not None:
                after_epoch(Progress(row, worker, fabric, evaluator.examples))
    return worker


def _train_epoch(worker: Method, job: Job, epoch: int, views: torch.Generator) -> EpochRow:
    """Train one epoch; return the mean loss, the accuracy on the given labels, and statistics of the clip."""
    settings, fabric = job.settings, job.fabric
    lr, rank = learning_rate(settings, epoch), fabric.global_rank
    worker.start_epoch(epoch, lr)
    order = batches(
        job.train,
        settings.batch_size,
        index=job.index,
        generator=stream("cpu", settings.seed, "order", epoch, rank),
        drop_last=settings.drop_last,
        rank=rank,
        world=fabric.world_size,
        workers=settings.workers,
        device=fabric.device,
    )
    clip = worker.criterion.clip if isinstance(worker.criterion, LogitClip) else None
    losses, hits, norms, seen = [], [], [], 0
    with _model_randomness(fabric.device, derived_seed(settings.seed, "model", epoch, rank)):
        for _, y, step in worker.train_epoch(epoch, order, lambda x: job.view(x, views)):
            losses.append(step.loss * len(y))
            seen += len(y)
            if step.logits is not None:
                hits.append((step.logits.argmax(1) == hard_labels(y)).sum())
                norms.append(logit_norms(step.logits.float(), 2.0 if clip is None else clip.p, dim=1))
    if not losses:
        raise ValueError("There is not one full batch to train on: lower batch_size, or set drop_last to False.")
    loss, n, hit = _sum_each(
        fabric, torch.stack(losses).cpu().double().sum(), seen, torch.stack(hits).sum() if hits else 0
    )
    row = {"epoch": epoch, "lr": lr, "loss": loss / n, "train_accuracy": 100 * hit / n if hits else None}
    row |= {"clipped": None, "norm_quantiles": None}
    if norms:
        norm = _gather(fabric, torch.cat(norms)).cpu()
        row["norm_quantiles"] = [round(value, 6) for value in norm_quantiles(norm)]
        if clip is not None:
            row["clipped"] = 100 * int((norm >= clip.tau).sum()) / len(norm)
    return row


# -- after each epoch --------------------------------------------------------------------------------------------------


class Evaluator:
    """Measures a method after each epoch: accuracies, memorised labels, and records of the training examples.

    Args:
        job: The job of the method.
        test: The test split, on the device of the job; it may be empty.
        held_out: [V] int64, the training examples to validate on; None: none.
        augmented: Validate on augmented inputs.
    """

    def __init__(self, job: Job, test: Split, held_out: Tensor | None = None, *, augmented: bool = False) -> None:
        self.job, self.test, self.augmented = job, test, augmented
        self.held_out = torch.arange(0) if held_out is None else held_out
        self.labels = hard_labels(job.train.labels).cpu()
        clean = job.train.clean_labels
        self.wrong = job.index[:0] if clean is None else job.index[(self.labels != clean.cpu())[job.index]]
        self.every = job.settings.measure_every or (1 if len(job.train) <= 20_000 else 10)
        self.examples: dict[str, Tensor] = {}  # of the last epoch, see `Progress`

    def measure(self, worker: Method, row: EpochRow, views: torch.Generator) -> None:
        """Add the accuracies and the shares of memorised labels to the row of an epoch, and update `examples`.

        Args:
            worker: The method.
            row: The numbers of the training epoch.
            views: The generator of the epoch's random views.

        Raises:
            Diverged: If the loss, the logits or their norms are not finite.
        """
        settings, epoch = self.job.settings, row["epoch"]
        if len(self.test):
            row["test_accuracy"] = measured = self._accuracy(worker)
        else:  # the sum of all weights is finite only if every weight is
            row["test_accuracy"], measured = None, sum(float(w.double().sum()) for w in worker.weights().values())
        _check_finite(row, measured, settings)
        row["val_accuracy"] = predicted = None
        if len(self.held_out):
            predicted = self._predict_held_out(worker, views)
            row["val_accuracy"] = 100 * int((predicted == self.labels[self.held_out]).sum()) / len(self.held_out)
        row |= {"memorised": None, "recovered": None}
        if (epoch + 1) % self.every == 0 or epoch == settings.epochs - 1:
            row |= self._memorisation(worker)
        if settings.per_example:
            self.examples = self._record(worker, epoch)
            if epoch == settings.epochs - 1 and len(self.test):
                self.examples |= self._predict_test(worker)
        if predicted is not None:
            self.examples["val_prediction"] = predicted

    def _accuracy(self, worker: Method) -> float:
        """Return the test accuracy in percent, or NaN if the logits of an example are not finite.

        Masked classes, at -inf, are fine as long as one class is not masked.
        """
        hits = bad = torch.zeros((), dtype=torch.int64, device=self.job.fabric.device)
        n = 0
        for _, y, logits in self._evaluate(worker, self.test, self.job.view):
            hits = hits + (logits.argmax(1) == hard_labels(y)).sum()
            bad = bad + (~logits.amax(1).isfinite()).sum()
            n += len(y)
        hit, bad, n = _sum_each(self.job.fabric, hits, bad, n)
        return math.nan if bad else 100 * hit / n

    def _predict_test(self, worker: Method) -> dict[str, Tensor]:
        """Predict the class of each test example, and its softmax probability."""
        fabric = self.job.fabric
        found = torch.zeros(2, len(self.test), device=fabric.device)
        for at, _, logits in self._evaluate(worker, self.test, self.job.view):
            confidence, prediction = logits.float().softmax(1).max(1)
            found[:, at] = torch.stack([confidence, prediction.float()])
        confidence, prediction = _sum_over_ranks(fabric, found).cpu()
        return {"test_confidence": confidence, "test_prediction": prediction.long()}

    def _predict_held_out(self, worker: Method, views: torch.Generator) -> Tensor:
        """Predict the class of each held-out example."""
        train, fabric, view = self.job.train, self.job.fabric, self.job.view
        seen: View = (lambda x, _: view(x, views)) if self.augmented else view
        every = torch.zeros(len(train), dtype=torch.int64, device=fabric.device)
        for at, _, logits in self._evaluate(worker, train, seen, self.held_out):
            every[at] = logits.argmax(1)
        return _sum_over_ranks(fabric, every).cpu()[self.held_out]

    def _memorisation(self, worker: Method) -> EpochRow:
        """Measure which share of the wrong labels is predicted as given, and which as true, in percent."""
        train, fabric = self.job.train, self.job.fabric
        if train.clean_labels is None or not len(self.wrong):
            return {}
        given = true = torch.zeros((), dtype=torch.int64, device=fabric.device)
        for at, y, logits in self._evaluate(worker, train, self.job.view, self.wrong):
            prediction = logits.argmax(1)
            given = given + (prediction == hard_labels(y)).sum()
            true = true + (prediction == train.clean_labels[at]).sum()
        given, true = _sum_each(fabric, given, true)
        return {"memorised": 100 * given / len(self.wrong), "recovered": 100 * true / len(self.wrong)}

    def _record(self, worker: Method, epoch: int) -> dict[str, Tensor]:
        """Record every training example, in dataset order.

        The records are cross entropy, margin (also its mean over the epochs), prediction, best other class, and the
        first epoch in which the label was predicted (-1: never).
        """
        train, fabric = self.job.train, self.job.fabric
        record = torch.zeros(4, len(train), device=fabric.device)
        for at, y, logits in self._evaluate(worker, train, self.job.view):
            log_probs, label = logits.float().log_softmax(1), hard_labels(y)[:, None]
            own = log_probs.gather(1, label)[:, 0]
            best, other = log_probs.scatter(1, label, -torch.inf).max(1)
            record[:, at] = torch.stack([-own, own - best, logits.argmax(1).float(), other.float()])
        loss, margin, prediction, other = _sum_over_ranks(fabric, record).cpu()
        mean_margin = self.examples.get("mean_margin", torch.zeros(()))
        first_learnt = self.examples.get("first_learnt", torch.full((len(train),), -1)).clone()
        first_learnt[(prediction == self.labels) & (first_learnt < 0)] = epoch
        return {
            "loss": loss,
            "margin": margin,
            "prediction": prediction.long(),
            "other": other.long(),
            "mean_margin": mean_margin + (margin - mean_margin) / (epoch + 1),
            "first_learnt": first_learnt,
        }

    @torch.no_grad()
    def _evaluate(
        self, worker: Method, split: Split, view: View, index: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield (index, labels, logits) for this rank's part of a split, in order."""
        fabric, settings = self.job.fabric, self.job.settings
        part = (torch.arange(len(split)) if index is None else index)[fabric.global_rank :: fabric.world_size]
        size = max(settings.batch_size, 256)
        for at, x, y in batches(split, size, index=part, device=fabric.device, workers=settings.workers):
            yield at, y, worker.predict(view(x, None))


def _check_finite(row: EpochRow, measured: float, settings: Settings) -> None:
    """Raise `Diverged` unless the loss, the norms of the logits and what was measured are finite."""
    if all(map(math.isfinite, [row["loss"], measured, *(row["norm_quantiles"] or ())])):
        return
    decay = row["lr"] * settings.weight_decay >= 1  # a step then turns the weights around
    remedy = f"weight_decay (it is {settings.weight_decay:g})" if decay else f"lr (it is {row['lr']:g} there)"
    raise Diverged(
        f"Training diverged in epoch {row['epoch'] + 1}: the loss, the logits or their norms are not finite. "
        f"Lower {remedy}{'' if decay else ', or limit the gradient with grad_clip'}."
    )


def _sum_each(fabric: Fabric, *values: Tensor | float) -> list[float]:
    """Sum each value over the ranks."""
    row = torch.tensor([float(value) for value in values], dtype=torch.float64)
    return _sum_over_ranks(fabric, row).tolist()


def _sum_over_ranks(fabric: Fabric, tensor: Tensor) -> Tensor:
    """Sum a tensor over the ranks."""
    if fabric.world_size == 1:
        return tensor
    return fabric.all_reduce(tensor.to(fabric.device), reduce_op="sum")  # type: ignore[return-value]


def _gather(fabric: Fabric, values: Tensor) -> Tensor:
    """Concatenate the values of all ranks; each rank may hold a different number."""
    if fabric.world_size == 1:
        return values
    counts = torch.zeros(fabric.world_size, dtype=torch.int64, device=values.device)
    counts[fabric.global_rank] = len(values)
    ends = _sum_over_ranks(fabric, counts).cumsum(0).tolist()
    end = ends[fabric.global_rank]
    every = values.new_zeros(ends[-1])
    every[end - len(values) : end] = values
    return _sum_over_ranks(fabric, every)


def hard_labels(labels: Tensor) -> Tensor:
    """Return the labels [N], or the likeliest class of soft labels [N, K]."""
    return labels.argmax(1) if labels.is_floating_point() else labels


@contextlib.contextmanager
def _model_randomness(device: torch.device, seed: int) -> Iterator[None]:
    """Seed torch's global generators, the only ones that dropout can use, and restore them after the block."""
    on_cpu = device.type == "cpu"
    with torch.random.fork_rng([] if on_cpu else [device], device_type="cuda" if on_cpu else device.type):
        # Seeding absent accelerators formats a stack trace for each of them, which takes milliseconds.
        torch.default_generator.manual_seed(seed) if on_cpu else torch.manual_seed(seed)
        yield


def __getattr__(name: str) -> Any:
    if name != "make_fabric":  # its old place, until version 0.3
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("Import make_fabric from logitclip.launch instead.", DeprecationWarning, stacklevel=2)
    return launch.make_fabric
