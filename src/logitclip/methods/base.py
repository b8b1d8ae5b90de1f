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

Augment = Callable[[Tensor], Tensor]  # one random view of a batch, ready for the model
View = Callable[[Tensor, torch.Generator | None], Tensor]  # see logitclip.data.augment.transform
Batch = tuple[Tensor, Tensor, Tensor]  # index, x, y

LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Settings:
    """How to train. The fields mean what they mean in `RunConfig`."""

    epochs: int = 150
    batch_size: int = 128
    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    schedule: str = "multistep"
    milestones: tuple[float, ...] = (0.4, 0.7)
    grad_clip: float = 0.0
    penalty: Callable[[Tensor], Tensor] | None = None  # a function of a batch's logits, added to the loss
    drop_last: bool = False
    seed: int = 0
    channels_last: bool = True
    compile: bool = False
    workers: int = 0
    threads: int = 1
    per_example: bool = False
    measure_every: int = 0  # epochs between two measurements of memorisation; 0: 1 up to 20,000 examples, else 10

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
    """Everything a method is built from."""

    train: Split
    num_classes: int
    index: Tensor  # the examples of `train` to train on
    view: View  # turns a batch into the model's input: random with a generator, fixed without
    make_model: Callable[[int], nn.Module]  # from a seed
    criterion: nn.Module
    settings: Settings
    fabric: Fabric  # launched


class Step(NamedTuple):
    """The report of one training step."""

    loss: Tensor  # mean over the batch
    logits: Tensor | None  # before any clip; None if the step has none


class Method(Protocol):
    """A training method: `Method(job, *, knobs)`."""

    losses: ClassVar[tuple[str, ...] | None]  # names of the losses it accepts; None: any criterion
    distributed: ClassVar[bool]  # whether it can train in several processes
    criterion: nn.Module

    def start_epoch(self, epoch: int, lr: float) -> None:
        """Prepare for an epoch, counted from 0, with this learning rate."""

    def train_epoch(
        self, epoch: int, batches: Iterable[Batch], augment: Augment
    ) -> Iterator[tuple[Tensor, Tensor, Step]]:
        """Train one epoch; yields (index, y, Step) for each batch."""
        ...

    def predict(self, x: Tensor) -> Tensor:
        """Logits [N, K] of model inputs, in evaluation mode."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """The weights to keep, by name."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """All other state that resuming needs: tensors, numbers and strings in dicts and lists."""
        ...

    def load(self, weights: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Restore what `weights` and `state_dict` returned."""
