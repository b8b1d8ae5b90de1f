"""One network, one criterion, SGD."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from logitclip.clip import is_on_parameters
from logitclip.criterion import Linked, LogitClip, Loss
from logitclip.methods import METHODS
from logitclip.methods.base import Augment, Batch, Job, State, Step


@partial(METHODS.register, name="standard")
class Standard:
    """Minimise the criterion by SGD."""

    losses: ClassVar[tuple[str, ...] | None] = None
    distributed: ClassVar[bool] = True

    def __init__(self, job: Job) -> None:
        self.job, self.settings, self.fabric = job, job.settings, job.fabric
        self._check_criterion()
        self.criterion: Any = job.criterion.to(job.fabric.device)
        self.network, self.model, self.optimizer = self.set_up(self.settings.seed)
        if hasattr(self.criterion, "set_head"):
            self.criterion.set_head(self.network)

    def set_up(self, seed: int) -> tuple[nn.Module, Any, Optimizer]:
        """Make a network; returns it, its wrapped (and compiled) form for training, and its optimiser."""
        settings = self.settings
        network = self.job.make_model(seed)
        if settings.channels_last:
            network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = torch.optim.SGD(
            network.parameters(),
            lr=settings.lr,
            momentum=settings.momentum,
            nesterov=settings.nesterov,
            weight_decay=settings.weight_decay,
        )
        model, optimizer = self.fabric.setup(network, optimizer)
        return network, torch.compile(model) if settings.compile else model, optimizer

    def start_epoch(self, epoch: int, lr: float) -> None:
        """Set the learning rate, and pass the epoch and the class counts on to the criterion."""
        for optimizer in self.optimizers():
            for group in optimizer.param_groups:
                group["lr"] = lr
        labels, classes = self.job.train.labels[self.job.index.to(self.job.train.labels.device)], self.job.num_classes
        counts = labels.sum(0) if labels.is_floating_point() else torch.bincount(labels, minlength=classes)
        if hasattr(self.criterion, "start_epoch"):
            self.criterion.start_epoch(epoch, counts.float().to(self.fabric.device))
        if hasattr(self.criterion, "set_lr"):
            self.criterion.set_lr(lr)

    def optimizers(self) -> list[Optimizer]:
        """Return the optimisers that follow the learning-rate schedule."""
        return [self.optimizer]

    def train_epoch(
        self, epoch: int, batches: Iterable[Batch], augment: Augment
    ) -> Iterator[tuple[Tensor, Tensor, Step]]:
        """Train one epoch over `batches` of (index, x, y); yields (index, y, Step) for each batch."""
        self.network.train()
        for index, x, y in batches:
            yield index, y, self.train_step(index, x, y, augment)
        if self.fabric.world_size > 1:
            average_buffers(self.network, self.fabric)
            if hasattr(self.criterion, "sync"):
                self.criterion.sync(partial(self.fabric.all_reduce, reduce_op="sum"))

    def train_step(self, index: Tensor, x: Tensor, y: Tensor, augment: Augment) -> Step:
        """Update the weights once; `index` holds the positions of the examples in the dataset."""
        logits = self.model(augment(x))
        loss = self.objective(logits, y)
        self.minimise(loss, self.model, self.optimizer)
        return Step(loss.detach(), logits.detach())

    def objective(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the criterion, plus the penalty on the logits if there is one."""
        return self.add_penalty(self.criterion(logits, y), logits)

    def add_penalty(self, loss: Tensor, logits: Tensor) -> Tensor:
        """Return the loss, plus the penalty on the logits or the parameters if there is one."""
        penalty = self.settings.penalty
        if penalty is None:
            return loss
        if is_on_parameters(penalty):
            groups = [group for optimizer in self.optimizers() for group in optimizer.param_groups]
            return loss + penalty(parameter for group in groups for parameter in group["params"])
        return loss + penalty(logits)

    def minimise(self, loss: Tensor, model: nn.Module, optimizer: Optimizer) -> None:
        """Make one step of an optimiser along the gradient of a loss."""
        optimizer.zero_grad()
        self.fabric.backward(loss)
        self.update(model, optimizer)

    def update(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Step along the gradients, with their global norm clipped to `grad_clip` if it is set.

        Paper: gradient clipping.
        """
        if self.settings.grad_clip:
            self.fabric.clip_gradients(model, optimizer, max_norm=self.settings.grad_clip, error_if_nonfinite=False)
        optimizer.step()

    def predict(self, x: Tensor) -> Tensor:
        """Return the logits [N, K] of model inputs, in evaluation mode."""
        # DDP would wait for the other ranks, which may have fewer batches: call the network itself.
        precision = self.fabric.strategy.precision
        with precision.forward_context():
            return precision.convert_output(self.network.eval()(precision.convert_input(x)))

    def weights(self) -> dict[str, Tensor]:
        """Return the weights to keep, by name."""
        return self.network.state_dict()

    def state_dict(self) -> State:
        """Return all other state that resuming needs: tensors, numbers and strings in dicts and lists."""
        return {"optimizer": self.optimizer.state_dict(), "criterion": self.criterion.state_dict()}

    def load(self, weights: dict[str, Tensor], state: State) -> None:
        """Restore what `weights` and `state_dict` returned."""
        self.network.load_state_dict(weights)
        self.optimizer.load_state_dict(state["optimizer"])
        self.criterion.load_state_dict(state["criterion"])

    def _check_criterion(self) -> None:
        """Refuse a criterion that a method with its own objective would ignore: it uses only the clip."""
        if self.losses is None:
            return
        criterion = self.job.criterion
        loss: Any = criterion.criterion if isinstance(criterion, Linked | LogitClip) else criterion
        named = isinstance(loss, Loss) and loss.name in self.losses
        if named and loss.weight is not None:
            raise ValueError(
                f"{type(self).__name__} has its own objective, which has no class weights: leave out balance, or take "
                "the method standard."
            )
        if not named or loss.reduction != "mean":
            raise ValueError(
                f"{type(self).__name__} has its own objective and accepts only the loss {' or '.join(self.losses)}, "
                f"clipped or not; got {loss}."
            )


class Weighted(Standard):
    """SGD on weighted examples. The weights have mean 1 over the training set, not over every batch.

    Args:
        job: The job.
        weights: A weight for each training example, [N].
    """

    def __init__(self, job: Job, weights: Tensor) -> None:
        super().__init__(job)
        self.example_weights = weights.to(job.fabric.device)

    def train_step(self, index: Tensor, x: Tensor, y: Tensor, augment: Augment) -> Step:
        self.of_batch = self.example_weights[index]
        return super().train_step(index, x, y, augment)

    def objective(self, logits: Tensor, y: Tensor) -> Tensor:
        return self.criterion(logits, y, self.of_batch) * self.of_batch.mean()


def gather_rows(table: Tensor, fabric: Any) -> Tensor:
    """Return a table of examples [N, D] with the rows of all ranks; rank r owns those with index % world_size == r."""
    if fabric.world_size == 1:
        return table
    rows = torch.arange(len(table), device=table.device) % fabric.world_size == fabric.global_rank
    return fabric.all_reduce(table * rows[:, None], reduce_op="sum")


def average_buffers(network: nn.Module, fabric: Any) -> None:
    """Average the batch-norm statistics over the ranks; DDP synchronises only the gradients."""
    for buffer in network.buffers():
        if buffer.is_floating_point():
            buffer.copy_(fabric.all_reduce(buffer.double(), reduce_op="mean"))
