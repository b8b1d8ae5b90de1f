"""SOP (Liu et al., 2022): sparse parameters of each example model its label noise."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import kl_div, normalize, one_hot

from logitclip.data.autoaugment import autoaugment, cutout
from logitclip.losses import check_at_least
from logitclip.methods import METHODS
from logitclip.methods.base import Augment, Job, State, Step
from logitclip.methods.standard import Standard, gather_rows
from logitclip.rng import stream

FLOOR = 1e-4  # least probability, as in the authors' code


@partial(METHODS.register, name="sop")
class SOP(Standard):
    """SOP: parameters u_i and v_i of each example i model the noise of its label.

    With y one-hot, `U = clamp(u^2 y)` and `V = clamp(v^2 (1-y))`, the network fits `p + U - V` to y by cross entropy;
    u and v fit the residual of the predicted class by squared error. u and v are trained by SGD without momentum, with
    constant learning rates: 10 and 10 for CIFAR-10, the defaults; the authors use lr_u = 1 and lr_v = 10 for CIFAR-100,
    and 0.1 and 100 with asymmetric noise there. The gradient is that of the batch mean, so scale both with the batch
    size. The clip acts on the logits before the softmax.
    """

    losses = ("ce",)

    def __init__(self, job: Job, *, lr_u: float = 10.0, lr_v: float = 10.0) -> None:
        """
        Args:
            lr_u: Learning rate of u, the noise of the given class.
            lr_v: Learning rate of v, the noise of the other classes.
        """
        check_at_least(0, lr_u=lr_u, lr_v=lr_v)
        super().__init__(job)
        self.lr_u, self.lr_v = lr_u, lr_v
        n, device = len(job.train), job.fabric.device
        generator = stream("cpu", self.settings.seed, "sop")
        self.u = (1e-8 * torch.randn(n, 1, generator=generator)).to(device)
        self.v = (1e-8 * torch.randn(n, job.num_classes, generator=generator)).to(device)

    def train_step(self, index: Tensor, x: Tensor, y: Tensor, augment: Augment) -> Step:
        own = index.to(self.u.device)
        u, v = self.u[own].requires_grad_(), self.v[own].requires_grad_()
        target = y if y.is_floating_point() else one_hot(y, self.job.num_classes).float()
        logits, loss = self.loss(x, target, u, v, augment)
        loss = self.add_penalty(loss, logits)
        self.optimizer.zero_grad()
        self.fabric.backward(loss)
        scaler = getattr(self.fabric.strategy.precision, "scaler", None)
        scale = 1.0 if scaler is None else scaler.get_scale()
        for table, part, lr in ((self.u, u, self.lr_u), (self.v, v, self.lr_v)):
            # After an overflow in half precision they stay unchanged, like the weights.
            gradient = torch.nan_to_num(part.grad / scale, 0.0, 0.0, 0.0)  # type: ignore[operator]
            table[own] = part.detach() - lr * gradient
        self.update(self.model, self.optimizer)
        return Step(loss.detach(), logits.detach())

    def loss(self, x: Tensor, y: Tensor, u: Tensor, v: Tensor, augment: Augment) -> tuple[Tensor, Tensor]:
        """Return the logits and the loss of a batch."""
        logits = self.model(augment(x))
        return logits, sop_loss(logits, self.criterion.link(logits).softmax(1), y, u, v)[0]

    def state_dict(self) -> State:
        tables = {"u": gather_rows(self.u, self.fabric), "v": gather_rows(self.v, self.fabric)}
        return {**super().state_dict(), **tables}

    def load(self, weights: dict[str, Tensor], state: State) -> None:
        super().load(weights, state)
        self.u.copy_(state["u"])
        self.v.copy_(state["v"])


@partial(METHODS.register, name="sop_plus")
class SOPPlus(SOP):
    """SOP+: SOP with a balance term and consistency of two views, the second one strongly augmented.

    As in the authors' code, the second view is AutoAugment's policy for CIFAR-10, then the usual augmentation, then
    Cutout of 16 pixels.
    """

    def __init__(
        self,
        job: Job,
        *,
        lr_u: float = 10.0,
        lr_v: float = 10.0,
        ratio_balance: float = 0.1,
        ratio_consistency: float = 0.9,
        strong: bool = True,
    ) -> None:
        """
        Args:
            lr_u, lr_v: As in SOP.
            ratio_balance: Weight of the balance term.
            ratio_consistency: Weight of the consistency term.
            strong: Augment the second view strongly; needs images. False: the usual augmentation.
        """
        check_at_least(0, ratio_balance=ratio_balance, ratio_consistency=ratio_consistency)
        first = job.train.x[job.index[:1]]
        if strong and (first.dtype != torch.uint8 or first.ndim != 4):
            raise ValueError("The strong view of sop_plus needs uint8 images: for other inputs use strong=false.")
        super().__init__(job, lr_u=lr_u, lr_v=lr_v)
        self.ratio_balance, self.ratio_consistency, self.strong = ratio_balance, ratio_consistency, strong

    def start_epoch(self, epoch: int, lr: float) -> None:
        super().start_epoch(epoch, lr)
        self.views = stream(self.fabric.device, self.settings.seed, "strong view", epoch, self.fabric.global_rank)

    def second_view(self, x: Tensor, augment: Augment) -> Tensor:
        """Return the view whose prediction must agree with that of the first."""
        return cutout(augment(autoaugment(x, self.views)), self.views) if self.strong else augment(x)

    def loss(self, x: Tensor, y: Tensor, u: Tensor, v: Tensor, augment: Augment) -> tuple[Tensor, Tensor]:
        logits, other = self.model(torch.cat([augment(x), self.second_view(x, augment)])).chunk(2)
        p = self.criterion.link(logits).softmax(1)
        loss, phat = sop_loss(logits, p, y, u, v)
        balance = -phat.mean(0).clamp(FLOOR, 1).log().mean()
        log_other = self.criterion.link(other).log_softmax(1)
        consistency = kl_div(log_other, p.detach(), reduction="batchmean")
        return logits, loss + self.ratio_balance * balance + self.ratio_consistency * consistency


def sop_loss(logits: Tensor, p: Tensor, y: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return SOP's loss of a batch.

    Args:
        logits: [N, K], used for the predicted class only.
        p: [N, K], probabilities.
        y: [N, K], one-hot.
        u: [N, 1], parameters of these examples.
        v: [N, K], parameters of these examples.

    Returns:
        The loss and the corrected probabilities [N, K].
    """
    big_u = (u.square() * y).clamp(0, 1)
    big_v = (v.square() * (1 - y)).clamp(0, 1)
    phat = (p + big_u - big_v.detach()).clamp_min(FLOOR)
    phat = normalize(phat, p=1, dim=1).clamp(FLOOR, 1)
    cross_entropy = -(y * phat.log()).sum(1).mean()
    predicted = one_hot(logits.argmax(1), logits.shape[1])
    squared = (predicted + big_u - big_v - y).square().sum(1).mean()
    return cross_entropy + squared, phat
