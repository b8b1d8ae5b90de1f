"""SOP: the noise of each example is modelled by sparse parameters of its own."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from logitclip.losses import at_least
from logitclip.methods import METHODS
from logitclip.methods.base import Augment, Job, Step
from logitclip.methods.standard import Standard
from logitclip.rng import stream

FLOOR = 1e-4  # of probabilities, as in the released code


@partial(METHODS.register, name="sop")
class SOP(Standard):
    """SOP: every example i has a u_i and a v_i that explain a wrong label away.

    With y one-hot, `U = clamp(u^2 y)` and `V = clamp(v^2 (1-y))`, the network fits `p + U - V` to y by cross entropy,
    and u and v fit what the predicted class leaves over by squared error. u and v have their own SGD, without
    momentum and with constant rates. The rates follow CIFAR-10's; on CIFAR-100 the released code takes lr_u = 1 and
    lr_v = 10, or 100 with asymmetric noise. Their gradient is that of the mean over a batch, so halve them with the
    batch size. The clip acts on the logits before p.
    """

    losses = ("ce",)

    def __init__(self, job: Job, *, lr_u: float = 10.0, lr_v: float = 10.0) -> None:
        at_least(0, lr_u=lr_u, lr_v=lr_v)
        super().__init__(job)
        self.lr_u, self.lr_v = lr_u, lr_v
        n, device = len(job.train), job.fabric.device
        generator = stream("cpu", self.settings.seed, "sop")
        self.u = (1e-8 * torch.randn(n, 1, generator=generator)).to(device)
        self.v = (1e-8 * torch.randn(n, job.num_classes, generator=generator)).to(device)

    def train_step(self, index: Tensor, x: Tensor, y: Tensor, augment: Augment) -> Step:
        own = index.to(self.u.device)
        u, v = self.u[own].requires_grad_(), self.v[own].requires_grad_()
        logits, loss = self.loss(x, self._one_hot(y), u, v, augment)
        loss = self.penalised(loss, logits)
        self.optimizer.zero_grad()
        self.fabric.backward(loss)
        scaler = getattr(self.fabric.strategy.precision, "scaler", None)
        scale = 1.0 if scaler is None else scaler.get_scale()
        for table, part, lr in ((self.u, u, self.lr_u), (self.v, v, self.lr_v)):
            # After an overflow in half precision they stay, as the weights do.
            gradient = torch.nan_to_num(part.grad / scale, 0.0, 0.0, 0.0)  # type: ignore[operator]
            table[own] = part.detach() - lr * gradient
        self.update(self.model, self.optimizer)
        return Step(loss.detach(), logits.detach())

    def loss(self, x: Tensor, y: Tensor, u: Tensor, v: Tensor, augment: Augment) -> tuple[Tensor, Tensor]:
        """Logits and loss of a batch."""
        logits = self.model(augment(x))
        return logits, sop_loss(logits, self.criterion.link(logits).softmax(1), y, u, v)[0]

    def _one_hot(self, y: Tensor) -> Tensor:
        if y.is_floating_point():
            return y
        return torch.nn.functional.one_hot(y, self.job.num_classes).float()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "u": self._gathered(self.u), "v": self._gathered(self.v)}

    def _gathered(self, table: Tensor) -> Tensor:
        """Each rank knows the rows it owns: those whose number leaves its own when divided by the number of ranks."""
        if self.fabric.world_size == 1:
            return table
        rows = torch.arange(len(table), device=table.device) % self.fabric.world_size == self.fabric.global_rank
        return cast(Tensor, self.fabric.all_reduce(table * rows[:, None], reduce_op="sum"))

    def load(self, weights: dict[str, Tensor], state: dict[str, Any]) -> None:
        super().load(weights, state)
        self.u.copy_(state["u"])
        self.v.copy_(state["v"])


@partial(METHODS.register, name="sop_plus")
class SOPPlus(SOP):
    """SOP with a balance term and consistency of two views (SOP+)."""

    def __init__(
        self,
        job: Job,
        *,
        lr_u: float = 10.0,
        lr_v: float = 10.0,
        ratio_balance: float = 0.1,
        ratio_consistency: float = 0.9,
    ) -> None:
        at_least(0, ratio_balance=ratio_balance, ratio_consistency=ratio_consistency)
        super().__init__(job, lr_u=lr_u, lr_v=lr_v)
        self.ratio_balance, self.ratio_consistency = ratio_balance, ratio_consistency

    def loss(self, x: Tensor, y: Tensor, u: Tensor, v: Tensor, augment: Augment) -> tuple[Tensor, Tensor]:
        logits, other = self.model(torch.cat([augment(x), augment(x)])).chunk(2)
        p = self.criterion.link(logits).softmax(1)
        loss, phat = sop_loss(logits, p, y, u, v)
        balance = -phat.mean(0).clamp(FLOOR, 1).log().mean()
        log_other = self.criterion.link(other).log_softmax(1)
        consistency = torch.nn.functional.kl_div(log_other, p.detach(), reduction="batchmean")
        return logits, loss + self.ratio_balance * balance + self.ratio_consistency * consistency


def sop_loss(logits: Tensor, p: Tensor, y: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """SOP's loss of a batch, and the corrected probabilities.

    Args:
        logits: [N, K], only for the predicted class.
        p: [N, K], the probabilities.
        y: [N, K], one-hot.
        u: [N, 1]; v: [N, K]: the parameters of these examples.
    """
    big_u = (u.square() * y).clamp(0, 1)
    big_v = (v.square() * (1 - y)).clamp(0, 1)
    phat = (p + big_u - big_v.detach()).clamp_min(FLOOR)
    phat = torch.nn.functional.normalize(phat, p=1, dim=1).clamp(FLOOR, 1)
    cross_entropy = -(y * phat.log()).sum(1).mean()
    predicted = torch.nn.functional.one_hot(logits.argmax(1), logits.shape[1])
    squared = (predicted + big_u - big_v - y).square().sum(1).mean()
    return cross_entropy + squared, phat
