"""The training loop: trains a model on the splits of a dataset and reports a row of numbers per epoch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from logitclip.clip import norm_quantiles
from logitclip.criterion import LogitClip
from logitclip.data import Dataset, Split
from logitclip.data.augment import transform
from logitclip.data.loading import batches
from logitclip.launch import make_fabric, using_threads
from logitclip.methods.base import Augment, Batch, Job, Method, Settings, View
from logitclip.methods.standard import Standard
from logitclip.rng import derived_seed, stream

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = ["Diverged", "Progress", "Settings", "fit", "learning_rate", "make_fabric"]

Row = dict[str, Any]  # the numbers of an epoch, as in `metrics.jsonl`: float, int, list of float, or None
Resume = tuple[dict[str, Tensor], dict[str, Any], int]  # weights, state, and the number of epochs done
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
        row: the numbers of the epoch, by name.
        method: the training method with its network.
        fabric: the Lightning Fabric of this process.
        examples: per-example records [N] if `Settings.per_example` is set, and `val_prediction` [V] if there are
            held-out examples.

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

    row: Row
    method: Method
    fabric: Fabric
    examples: dict[str, Tensor]

    def weights(self) -> dict[str, Tensor]:
        """The weights by name."""
        return self.method.weights()

    def state(self) -> dict[str, Any]:
        """All other state that resuming needs."""
        precision = self.fabric.strategy.precision.state_dict()
        return {"method": self.method.state_dict(), "precision": precision, "examples": self.examples}


def learning_rate(settings: Settings, epoch: int) -> float:
    """Return the learning rate of an epoch.

    The schedule "multistep" divides it by 10 at each milestone (a share of the epochs), "cosine" follows a half cosine
    and "constant" keeps it.

    Args:
        settings: uses `lr`, `schedule`, `milestones` and `epochs`.
        epoch: from 0.

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
    after_batch: Callable[[int], None] | None = None,
) -> M:
    """Train a network: the training loop itself, without specs and run folders.

    Each epoch reports a row of numbers, among them ``loss``, ``train_accuracy`` and ``test_accuracy``, the
    ``memorised`` and ``recovered`` shares of the wrong labels, and the ``clipped`` share and ``norm_quantiles`` of the
    logits.

    Args:
        dataset: its training labels may be noisy. `train.clean_labels`, if known, are used to measure memorisation. If
            its test split is empty, `test_accuracy` is None.
        model: a network that returns logits [N, K], or a function from a seed to one.
        criterion: called with logits [N, K] and labels [N].
        method: the training method; see `logitclip.methods`.
        settings: epochs, batch size, learning rate and so on.
        view: turns a batch of the dataset into the model's input: random with a generator, fixed without. By default
            the dataset's normalisation.
        index: [M] int64, the training examples to train on; by default all.
        held_out: [V] int64, the training examples to validate on, with their possibly wrong labels; by default none.
        augment_held_out: validate on augmented inputs, as the released code does.
        fabric: a launched Lightning Fabric; by default one for this process.
        resume: weights, state and the number of epochs done, from an earlier `Progress`.
        after_epoch: called with a `Progress` after each epoch.
        after_batch: called after each training batch with the number of examples that this process has trained on in
            the epoch.

    Returns:
        The method, with its trained network: ``predict`` gives logits and ``weights`` the weights by name.

    Raises:
        Diverged: if the loss, the logits or their norms are not finite.
        ValueError: if there is not one full batch to train on.

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
    fabric = make_fabric() if fabric is None else fabric
    view = transform("none", dataset.mean, dataset.std) if view is None else view
    index = torch.arange(len(dataset.train)) if index is None else index
    make_model = (lambda _: model) if isinstance(model, nn.Module) else model
    labels, wrong = _hard(dataset.train.labels), _wrong_labels(dataset.train, index)
    train, test = dataset.train.to(fabric.device), dataset.test.to(fabric.device)
    rank, world = fabric.global_rank, fabric.world_size
    measure_every = settings.measure_every or (1 if len(train) <= 20_000 else 10)
    with using_threads(settings.threads):
        worker = method(Job(train, dataset.num_classes, index, view, make_model, criterion, settings, fabric))
        first_learnt = torch.full((len(train),), -1)
        examples: dict[str, Tensor] = {}
        start = 0
        if resume is not None:
            weights, state, start = resume
            worker.load(weights, state["method"])
            fabric.strategy.precision.load_state_dict(state["precision"])
            examples = state["examples"]
            first_learnt = examples.get("first_learnt", first_learnt)
        for epoch in range(start, settings.epochs):
            lr = learning_rate(settings, epoch)
            worker.start_epoch(epoch, lr)
            order = batches(
                train,
                settings.batch_size,
                index=index,
                generator=stream("cpu", settings.seed, "order", epoch, rank),
                drop_last=settings.drop_last,
                rank=rank,
                world=world,
                workers=settings.workers,
                device=fabric.device,
            )
            views = stream(fabric.device, settings.seed, "views", epoch, rank)
            with _model_randomness(fabric.device, derived_seed(settings.seed, "model", epoch, rank)):
                trained = _train(worker, epoch, order, lambda x, g=views: view(x, g), fabric, after_batch)
            row: Row = {"epoch": epoch, "lr": lr, **trained}
            measured = _accuracy(worker, test, view, settings, fabric) if len(test) else _sum_of_weights(worker)
            row["test_accuracy"] = measured if len(test) else None
            if not all(map(math.isfinite, [row["loss"], measured, *(row["norm_quantiles"] or ())])):
                decay = lr * settings.weight_decay >= 1  # a step then turns the weights around
                remedy = f"weight_decay (it is {settings.weight_decay:g})" if decay else f"lr (it is {lr:g} there)"
                raise Diverged(
                    f"Training diverged in epoch {epoch + 1}: the loss, the logits or their norms are not finite. "
                    f"Lower {remedy}{'' if decay else ', or limit the gradient with grad_clip'}."
                )
            row["val_accuracy"] = predicted = None
            if held_out is not None and len(held_out):
                seen = (lambda x, _, g=views: view(x, g)) if augment_held_out else view
                predicted = _predicted(worker, train, seen, settings, fabric, held_out)
                row["val_accuracy"] = 100 * int((predicted == labels[held_out]).sum()) / len(held_out)
            measure = (epoch + 1) % measure_every == 0 or epoch == settings.epochs - 1
            row |= _memorisation(worker, train, view, settings, fabric, wrong) if measure else _UNMEASURED
            if settings.per_example:
                mean_margin = examples.get("mean_margin", torch.zeros(()))
                examples = _per_example(worker, train, view, settings, fabric)
                examples["mean_margin"] = mean_margin + (examples["margin"] - mean_margin) / (epoch + 1)
                learnt = (examples["prediction"] == labels) & (first_learnt < 0)
                first_learnt[learnt] = epoch
                examples["first_learnt"] = first_learnt
            if predicted is not None:
                examples["val_prediction"] = predicted
            if after_epoch is not None:
                after_epoch(Progress(row, worker, fabric, examples))
    return worker


# -- one epoch ---------------------------------------------------------------------------------------------------------


def _train(
    worker: Method,
    epoch: int,
    order: Iterable[Batch],
    augment: Augment,
    fabric: Fabric,
    after_batch: Callable[[int], None] | None = None,
) -> Row:
    """Train one epoch; return the mean loss, the accuracy on the given labels, and statistics of the clip."""
    losses, sizes, hits, norms, seen = [], [], [], [], 0
    tau = worker.criterion.tau if isinstance(worker.criterion, LogitClip) else None
    p = worker.criterion.p if isinstance(worker.criterion, LogitClip) else 2.0
    for _, y, step in worker.train_epoch(epoch, order, augment):
        losses.append(step.loss * len(y))
        sizes.append(len(y))
        if step.logits is not None:
            hits.append((step.logits.argmax(1) == _hard(y)).sum())
            norms.append(torch.linalg.vector_norm(step.logits.float(), p, dim=1))
        seen += len(y)
        if after_batch is not None:
            after_batch(seen)
    if not sizes:
        raise ValueError("There is not one full batch to train on: lower batch_size, or set drop_last to False.")
    loss, n, hit = _summed(
        fabric, torch.stack(losses).cpu().double().sum(), sum(sizes), torch.stack(hits).sum() if hits else 0
    )
    row = {"loss": loss / n, "train_accuracy": 100 * hit / n if hits else None, "clipped": None, "norm_quantiles": None}
    if norms:
        norm = _gathered(fabric, torch.cat(norms)).cpu()
        row["norm_quantiles"] = [round(value, 6) for value in norm_quantiles(norm)]
        if tau is not None:
            row["clipped"] = 100 * int((norm >= tau).sum()) / len(norm)
    return row


def _accuracy(worker: Method, split: Split, view: View, settings: Settings, fabric: Fabric) -> float:
    """Return the accuracy on `split` in percent, or NaN if a logit is not finite."""
    hits = bad = torch.zeros((), dtype=torch.int64, device=fabric.device)
    n = 0
    for _, y, logits in _evaluate(worker, split, view, settings, fabric, None):
        hits = hits + (logits.argmax(1) == _hard(y)).sum()
        bad = bad + (~logits.isfinite()).sum()
        n += len(y)
    hit, bad, n = _summed(fabric, hits, bad, n)
    return math.nan if bad else 100 * hit / n


def _sum_of_weights(worker: Method) -> float:
    """Sum all weights; the sum is finite only if every weight is."""
    return sum(float(weight.double().sum()) for weight in worker.weights().values())


def _predicted(worker: Method, split: Split, view: View, settings: Settings, fabric: Fabric, index: Tensor) -> Tensor:
    """Predict the class of each example at `index`."""
    every = torch.zeros(len(split), dtype=torch.int64, device=fabric.device)
    for at, _, logits in _evaluate(worker, split, view, settings, fabric, index):
        every[at] = logits.argmax(1)
    return _over_ranks(fabric, every).cpu()[index]


_UNMEASURED = {"memorised": None, "recovered": None}


def _memorisation(worker: Method, train: Split, view: View, settings: Settings, fabric: Fabric, wrong: Tensor) -> Row:
    """Of the wrong labels, measure the share predicted as given and the share predicted as true, in percent."""
    if train.clean_labels is None or not len(wrong):
        return _UNMEASURED
    given = true = torch.zeros((), dtype=torch.int64, device=fabric.device)
    for at, y, logits in _evaluate(worker, train, view, settings, fabric, wrong):
        prediction = logits.argmax(1)
        given = given + (prediction == _hard(y)).sum()
        true = true + (prediction == train.clean_labels[at]).sum()
    given, true = _summed(fabric, given, true)
    return {"memorised": 100 * given / len(wrong), "recovered": 100 * true / len(wrong)}


def _per_example(worker: Method, train: Split, view: View, settings: Settings, fabric: Fabric) -> dict[str, Tensor]:
    """Compute cross entropy, margin, prediction and best other class of every training example, in dataset order."""
    record = torch.zeros(4, len(train), device=fabric.device)
    for at, y, logits in _evaluate(worker, train, view, settings, fabric, None):
        log_probs, label = logits.float().log_softmax(1), _hard(y)[:, None]
        own = log_probs.gather(1, label)[:, 0]
        best, other = log_probs.scatter(1, label, -torch.inf).max(1)
        record[:, at] = torch.stack([-own, own - best, logits.argmax(1).float(), other.float()])
    loss, margin, prediction, other = _over_ranks(fabric, record).cpu()
    return {"loss": loss, "margin": margin, "prediction": prediction.long(), "other": other.long()}


@torch.no_grad()
def _evaluate(
    worker: Method, split: Split, view: View, settings: Settings, fabric: Fabric, index: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield (index, labels, logits) for this rank's part of a split, in order and without augmentation."""
    part = (torch.arange(len(split)) if index is None else index)[fabric.global_rank :: fabric.world_size]
    size = max(settings.batch_size, 256)
    for at, x, y in batches(split, size, index=part, device=fabric.device, workers=settings.workers):
        yield at, y, worker.predict(view(x, None))


def _summed(fabric: Fabric, *values: Tensor | float) -> list[float]:
    """Sum each value over the ranks."""
    row = torch.tensor([float(value) for value in values], dtype=torch.float64)
    return _over_ranks(fabric, row).tolist()


def _over_ranks(fabric: Fabric, tensor: Tensor) -> Tensor:
    """Sum a tensor over the ranks."""
    if fabric.world_size == 1:
        return tensor
    return fabric.all_reduce(tensor.to(fabric.device), reduce_op="sum")  # type: ignore[return-value]


def _gathered(fabric: Fabric, values: Tensor) -> Tensor:
    """Concatenate the values of all ranks; each rank may hold a different number."""
    if fabric.world_size == 1:
        return values
    counts = torch.zeros(fabric.world_size, dtype=torch.int64, device=values.device)
    counts[fabric.global_rank] = len(values)
    ends = _over_ranks(fabric, counts).cumsum(0).tolist()
    end = ends[fabric.global_rank]
    every = values.new_zeros(ends[-1])
    every[end - len(values) : end] = values
    return _over_ranks(fabric, every)


def _hard(labels: Tensor) -> Tensor:
    return labels.argmax(1) if labels.is_floating_point() else labels


def _wrong_labels(train: Split, index: Tensor) -> Tensor:
    """Return the examples of `index` whose label is known to be wrong."""
    if train.clean_labels is None:
        return index[:0]
    return index[_hard(train.labels)[index] != train.clean_labels[index]]


@contextlib.contextmanager
def _model_randomness(device: torch.device, seed: int) -> Iterator[None]:
    """Seed torch's global generators, the only ones that dropout can use, and restore them after the block."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
