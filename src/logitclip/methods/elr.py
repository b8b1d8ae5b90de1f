"""ELR (Liu et al., 2020): early-learning regularisation towards an average of past predictions."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from logitclip.data import DATASETS
from logitclip.losses import check_at_least
from logitclip.methods import METHODS
from logitclip.methods.base import Augment, Job, State, Step
from logitclip.methods.standard import Standard, gather_rows
from logitclip.noise import NOISES

FLOOR = 1e-4  # probabilities are clamped to [FLOOR, 1 - FLOOR], as in the authors' code


@partial(METHODS.register, name="elr")
class ELR(Standard):
    """ELR: cross entropy, plus a term that keeps predictions near their average over past epochs.

    With p the probabilities of example i, its target is `t_i <- beta t_i + (1-beta) p`, and the loss is
    `CE + weight log(1 - sum_k t_ik p_k)`. The term pulls p towards what the network predicted before it began to
    memorise. The clip acts on the logits of both terms. Liu et al., 2020, Early-Learning Regularization Prevents
    Memorization of Noisy Labels, arXiv 2007.00151.

    The defaults of the knobs depend on the dataset and the noise: see `preset`. The authors train 120 or 150 epochs
    with lr 0.02, batches of 128 and weight decay 1e-3.
    """

    losses = ("ce",)

    def __init__(self, job: Job, *, beta: float = 0.7, weight: float = 3.0) -> None:
        """
        Args:
            beta: Share of the old target that is kept at each visit of an example.
            weight: Weight of the term, the authors' lambda.
        """
        check_at_least(0, weight=weight)
        if not 0 <= beta < 1:
            raise ValueError(f"beta must be at least 0 and below 1, got {beta}.")
        super().__init__(job)
        self.beta, self.weight = beta, weight
        self.targets = torch.zeros(len(job.train), job.num_classes, device=job.fabric.device)

    @staticmethod
    def preset(data: str, noise: str) -> dict[str, float]:
        """Return the authors' settings for a dataset and a noise; datasets without their own use those of CIFAR-10.

        >>> ELR.preset("cifar100", "symmetric:rate=0.5")
        {'beta': 0.9, 'weight': 7.0}
        """
        name, kind = DATASETS.split(data)[0], NOISES.split(noise)[0]
        if name == "cifar100":
            return {"beta": 0.9, "weight": 7.0}
        if name not in ("webvision", "clothing1m") and kind in ("asymmetric", "pair"):
            return {"beta": 0.9, "weight": 1.0}
        return {"beta": 0.7, "weight": 3.0}

    def train_step(self, index: Tensor, x: Tensor, y: Tensor, augment: Augment) -> Step:
        own = index.to(self.targets.device)
        logits = self.model(augment(x))
        linked = self.criterion.link(logits)
        self.targets[own] = updated_targets(self.targets[own], linked.detach(), self.beta)
        loss = cross_entropy(linked, y) + self.weight * elr_term(linked, self.targets[own])
        loss = self.add_penalty(loss, logits)
        self.minimise(loss, self.model, self.optimizer)
        return Step(loss.detach(), logits.detach())

    def state_dict(self) -> State:
        return {**super().state_dict(), "targets": gather_rows(self.targets, self.fabric)}

    def load(self, weights: dict[str, Tensor], state: State) -> None:
        super().load(weights, state)
        self.targets.copy_(state["targets"])


def updated_targets(targets: Tensor, logits: Tensor, beta: float) -> Tensor:
    """Move targets [N, K] towards the clamped probabilities of logits [N, K].

    >>> updated_targets(torch.tensor([[0.0, 1.0]]), torch.zeros(1, 2), beta=0.5)
    tensor([[0.2500, 0.7500]])
    """
    p = logits.softmax(1).clamp(FLOOR, 1 - FLOOR)
    return (beta * targets + (1 - beta) * p / p.sum(1, keepdim=True)).to(targets.dtype)


def elr_term(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of `log(1 - sum_k t_k p_k)` over the rows of logits [N, K]; p is clamped."""
    p = logits.softmax(1).clamp(FLOOR, 1 - FLOOR)
    return (1 - (targets * p).sum(1)).log().mean()
