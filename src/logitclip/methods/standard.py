"""One network, one criterion, SGD; and the contract every method keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from logitclip.data import Split
from logitclip.methods import METHODS

Augment = Callable[[Tensor], Tensor]  # one random view of a batch, ready for the model


class Step(NamedTuple):
    """What a training step reports: the mean loss, and the logits before any clip (None: there are none)."""

    loss: Tensor
    logits: Tensor | None


@METHODS.register
class standard:
    """Minimise the criterion by SGD."""

    losses: tuple[str, ...] | None = None  # the losses a method accepts, by name; None: any criterion

    def __init__(
        self, train: Split, make_model: Callable[[int], nn.Module], criterion: nn.Module, settings: Any, fabric: Any
    ) -> None:
        self.train, self.settings, self.fabric = train, settings, fabric
        self.criterion = criterion.to(fabric.device)
        self.network = make_model(settings.seed)
        if settings.channels_last:
            self.network = self.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = torch.optim.SGD(
            self.network.parameters(),
            lr=settings.lr,
            momentum=settings.momentum,
            nesterov=settings.nesterov,
            weight_decay=settings.weight_decay,
        )
        self.model, self.optimizer = fabric.setup(self.network, optimizer)
        if settings.compile:
            self.model = torch.compile(self.model)

    def train_epoch(self, epoch: int, batches: Iterable[tuple[Tensor, Tensor, Tensor]], augment: Augment) -> Any:
        """Train once over `batches` of (index, x, y); yields (index, y, Step) for each, so that others can look on."""
        self.network.train()
        for index, x, y in batches:
            yield index, y, self.train_step(index, x, y, augment)

    def train_step(self, index: Tensor, x: Tensor, y: Tensor, augment: Augment) -> Step:
        """One update of the weights. `index` says which examples of the dataset these are."""
        logits = self.model(augment(x))
        loss = self.criterion(logits, y)
        if self.settings.penalty is not None:
            loss = loss + self.settings.penalty(logits)
        self.optimizer.zero_grad()
        self.fabric.backward(loss)
        if self.settings.grad_clip:
            self.fabric.clip_gradients(
                self.model, self.optimizer, max_norm=self.settings.grad_clip, error_if_nonfinite=False
            )
        self.optimizer.step()
        return Step(loss.detach(), logits.detach())

    def predict(self, x: Tensor) -> Tensor:
        """The logits of ready inputs, as used for evaluation."""
        self.network.eval()
        return self.model(x)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of this epoch."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def weights(self) -> dict[str, Tensor]:
        """The weights to keep, by name."""
        return self.network.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """All the rest that a resumed run needs: tensors, numbers and strings in dicts and lists."""
        return {"optimizer": self.optimizer.state_dict(), "criterion": self.criterion.state_dict()}

    def load(self, weights: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Take back what `weights` and `state_dict` gave."""
        self.network.load_state_dict(weights)
        self.optimizer.load_state_dict(state["optimizer"])
        self.criterion.load_state_dict(state["criterion"])
