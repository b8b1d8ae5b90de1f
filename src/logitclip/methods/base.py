"""The types that methods and the training loop share: `Settings`, `Job`, `Step` and the `Method` protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from logitclip.data import Split

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = ["Job", "Method", "Settings", "Step"]

Augment = Callable[[Tensor], Tensor]  # one random view of a batch, ready for the model
View = Callable[[Tensor, torch.Generator | None], Tensor]  # see logitclip.data.augment.transform
Batch = tuple[Tensor, Tensor, Tensor]  # index, x, y

LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Settings:
    """How to train. The fields have the same meaning as in `RunConfig`.

    Attributes:
        epochs: passes over the training data.
        batch_size: examples of one step in each process.
        lr: learning rate of the first epoch.
        momentum: of SGD.
        nesterov: use Nesterov momentum.
        weight_decay: of SGD.
        schedule: "multistep", "cosine" or "constant", see `logitclip.engine.learning_rate`.
        milestones: of the schedule "multistep", as shares of the epochs.
        grad_clip: largest global norm of the gradient; 0: no limit.
        penalty: a function of a batch's logits [N, K] to a scalar that is added to the loss.
        drop_last: drop an incomplete last batch.
        seed: seed of the weights, the order and the augmentation.
        channels_last: keep images in the channels-last layout.
        compile: compile the network with torch.compile.
        workers: processes that decode image files.
        threads: CPU threads of this process.
        per_example: record loss, margin and prediction of every training example.
        measure_every: epochs between two measurements of memorisation; 0: 1 up to 20,000 examples, else 10.

    Raises:
        ValueError: if a number is out of range, the schedule is unknown, or Nesterov momentum has no momentum.

    >>> Settings(epochs=5, lr=0.05).schedule
    'multistep'
    """

    epochs: int = 150
    batch_size: int = 128
    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    schedule: str = "multistep"
    milestones: tuple[float, ...] = (0.4, 0.7)
    grad_clip: float = 0.0
    penalty: Callable[[Tensor], Tensor] | None = None
    drop_last: bool = False
    seed: int = 0
    channels_last: bool = True
    compile: bool = False
    workers: int = 0
    threads: int = 1
    per_example: bool = False
    measure_every: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if not 0 < self.lr < LARGEST:
            raise ValueError(f"lr must be positive and finite in float32, got {self.lr}.")
        for name in ("momentum", "weight_decay", "grad_clip", "workers", "measure_every"):
            if not 0 <= getattr(self, name) < LARGEST:
                raise ValueError(f"{name} must be at least 0 and finite in float32, got {getattr(self, name)}.")
        if self.schedule not in ("multistep", "cosine", "constant"):
            raise ValueError(f"schedule must be multistep, cosine or constant, got {self.schedule!r}.")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0.")


@dataclass(frozen=True)
class Job:
    """The arguments of a method.

    Attributes:
        train: training split.
        num_classes: K.
        index: positions in `train` of the examples to train on, int64 [M].
        view: turns a batch into the model's input: random with a generator, fixed without.
        make_model: from a seed to a network.
        criterion: called with logits [N, K] and labels [N].
        settings: how to train.
        fabric: a launched Lightning Fabric.

    >>> import logitclip as lc
    >>> from logitclip.methods.standard import Standard
    >>> digits = lc.data.load("digits")
    >>> job = Job(
    ...     digits.train, 10, torch.arange(100), lc.data.transform("none"),
    ...     lambda seed: lc.models.build("mlp", 10, (64,), seed=seed),
    ...     lc.LogitClip("ce", temp=1.5), Settings(), lc.engine.make_fabric(accelerator="cpu"),
    ... )
    >>> Standard(job).predict(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """

    train: Split
    num_classes: int
    index: Tensor
    view: View
    make_model: Callable[[int], nn.Module]
    criterion: nn.Module
    settings: Settings
    fabric: Fabric


class Step(NamedTuple):
    """The report of one training step.

    Attributes:
        loss: mean over the batch, a scalar.
        logits: [N, K], before any clip; None if the step has none.

    >>> Step(torch.tensor(0.5), torch.zeros(2, 3)).loss
    tensor(0.5000)
    """

    loss: Tensor
    logits: Tensor | None


class Method(Protocol):
    """Protocol of training methods, which are built as `Method(job, *, knobs)`.

    Attributes:
        losses: names of the losses that the method accepts; None: any criterion.
        distributed: whether it can train in several processes.
        criterion: the criterion of the job.

    Most methods change one step of `Standard`:

    >>> from logitclip.methods.standard import Standard
    >>> class Twice(Standard):
    ...     def objective(self, logits, y):
    ...         return 2 * super().objective(logits, y)
    """

    losses: ClassVar[tuple[str, ...] | None]
    distributed: ClassVar[bool]
    criterion: nn.Module

    def start_epoch(self, epoch: int, lr: float) -> None:
        """Prepare for an epoch (counted from 0) with this learning rate."""

    def train_epoch(
        self, epoch: int, batches: Iterable[Batch], augment: Augment
    ) -> Iterator[tuple[Tensor, Tensor, Step]]:
        """Train one epoch; yield (index, y, Step) for each batch."""
        ...

    def predict(self, x: Tensor) -> Tensor:
        """Return the logits [N, K] of model inputs, in evaluation mode."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """Return the weights to keep, by name."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return all other state that resuming needs: tensors, numbers and strings in dicts and lists."""
        ...

    def load(self, weights: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Restore what `weights` and `state_dict` returned."""
