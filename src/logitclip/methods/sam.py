"""Sharpness-aware minimisation (Foret et al., 2021)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from logitclip.methods import METHODS
from logitclip.methods.base import Augment, Job, Step
from logitclip.methods.standard import Standard


@partial(METHODS.register, name="sam")
class SAM(Standard):
    """SAM: step along the gradient at the worst nearby point, `w + rho g/|g|`.

    The paper does not give its rho; 0.05 is the usual default. Under DDP each replica perturbs by its own gradient.
    Only the first pass updates batch-norm statistics and the state of the criterion. The perturbation does not depend
    on the scale of the gradient, so a gradient scaler needs no special treatment.
    """

    def __init__(self, job: Job, *, rho: float = 0.05) -> None:
        """
        Args:
            rho: Distance to the worst nearby point.
        """
        if not rho > 0:
            raise ValueError(f"rho must be positive, got {rho}.")
        super().__init__(job)
        self.rho = rho

    def train_step(self, index: Tensor, x: Tensor, y: Tensor, augment: Augment) -> Step:
        view = augment(x)
        self.optimizer.zero_grad()
        with self.fabric.no_backward_sync(self.model, enabled=self.fabric.world_size > 1):
            logits = self.model(view)
            loss = self.objective(logits, y)
            self.fabric.backward(loss)
        with perturb_weights(self.network, self.rho), frozen_statistics(self.network, self.criterion):
            self.optimizer.zero_grad()
            self.fabric.backward(self.objective(self.model(view), y))
        self.update(self.model, self.optimizer)
        return Step(loss.detach(), logits.detach())


@contextlib.contextmanager
def perturb_weights(network: nn.Module, rho: float) -> Iterator[None]:
    """Move the weights by rho along their normalised gradient, and restore them exactly afterwards."""
    weights = [w for w in network.parameters() if w.grad is not None]
    before = [w.detach().clone() for w in weights]
    with torch.no_grad():
        gradients = [w.grad.to(torch.promote_types(w.dtype, torch.float32)) for w in weights]  # type: ignore[union-attr]
        norm = torch.nn.utils.get_total_norm(gradients)
        # A gradient that overflowed in half precision has no direction: do not move.
        step = torch.where(norm.isfinite(), rho / (norm + 1e-12), 0.0)
        for w, g in zip(weights, gradients, strict=True):
            w.add_(torch.nan_to_num(g * step, 0.0, 0.0, 0.0))
    try:
        yield
    finally:
        with torch.no_grad():
            for w, old in zip(weights, before, strict=True):
                w.copy_(old)


@contextlib.contextmanager
def frozen_statistics(network: nn.Module, criterion: nn.Module) -> Iterator[None]:
    """Keep the running statistics of batch norm in this block, and the criterion in evaluation mode."""
    flags = [(m, "track_running_stats") for m in network.modules() if hasattr(m, "track_running_stats")]
    flags += [(m, "training") for m in criterion.modules()]
    flags = [(module, flag) for module, flag in flags if getattr(module, flag)]
    for module, flag in flags:
        setattr(module, flag, False)
    try:
        yield
    finally:
        for module, flag in flags:
            setattr(module, flag, True)
