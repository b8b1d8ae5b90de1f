"""The types that methods and the training loop share: `Settings`, `Job`, `Step` and the `Method` protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from logitclip.data import Split
from logitclip.methods.settings import Settings

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = ["Job", "Method", "Settings", "Step"]

Augment = Callable[[Tensor], Tensor]  # one random view of a batch, ready for the model
State = dict[str, Any]  # what a checkpoint keeps of a method beside its weights: tensors, numbers, and dicts of them
View = Callable[[Tensor, torch.Generator | None], Tensor]  # see logitclip.data.augment.transform
Batch = tuple[Tensor, Tensor, Tensor]  # index, x, y


@dataclass(frozen=True)
class Job:
    """The arguments of a method.

    Attributes:
        train: Training split.
        num_classes: K.
        index: Positions in `train` of the examples to train on, int64 [M].
        view: Turns a batch into the model's input: random with a generator, fixed without.
        make_model: From a seed to a network.
        criterion: Called with logits [N, K] and labels [N].
        settings: How to train.
        fabric: A launched Lightning Fabric.

    >>> import logitclip as lc
    >>> from logitclip.launch import make_fabric
    >>> from logitclip.methods.standard import Standard
    >>> digits = lc.data.load("digits")
    >>> job = Job(
    ...     digits.train, 10, torch.arange(100), lc.data.transform("none"),
    ...     lambda seed: lc.models.build("mlp", 10, (64,), seed=seed),
    ...     lc.LogitClip("ce", temp=1.5), Settings(), make_fabric(accelerator="cpu"),
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
        loss: Mean over the batch, a scalar.
        logits: [N, K], before any clip; None if the step has none.

    >>> Step(torch.tensor(0.5), torch.zeros(2, 3)).loss
    tensor(0.5000)
    """

    loss: Tensor
    logits: Tensor | None


class Method(Protocol):
    """Protocol of training methods, which are built as `Method(job, *, knobs)`.

    Attributes:
        losses: Names of the losses that the method accepts; None: any criterion.
        distributed: Whether it can train in several processes.
        criterion: The criterion of the job.

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

    def state_dict(self) -> State:
        """Return all other state that resuming needs: tensors, numbers and strings in dicts and lists."""
        ...

    def load(self, weights: dict[str, Tensor], state: State) -> None:
        """Restore what `weights` and `state_dict` returned."""
