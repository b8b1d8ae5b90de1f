"""GJS (Englesson and Azizpour, 2021): a Jensen-Shannon divergence of the label and two views."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from logitclip.data import DATASETS
from logitclip.methods import METHODS
from logitclip.methods.base import Augment, Job, Step
from logitclip.methods.standard import Standard
from logitclip.noise import NOISES

FLOOR = 1e-7  # least probability in a logarithm, as in the authors' code

# The authors' weight of the label for each rate of symmetric noise, and for asymmetric noise.
SYMMETRIC = {
    "cifar10": {0.0: 0.5, 0.2: 0.3, 0.4: 0.9, 0.6: 0.1, 0.8: 0.1},
    "cifar100": {0.0: 0.3, 0.2: 0.3, 0.4: 0.5, 0.6: 0.9, 0.8: 0.1},
}
ASYMMETRIC = {"cifar10": {0.2: 0.3, 0.4: 0.3}, "cifar100": {0.2: 0.5, 0.4: 0.1}}


@partial(METHODS.register, name="gjs")
class GJS(Standard):
    """GJS: the generalised Jensen-Shannon divergence of the label and the predictions of two views.

    With `m = w y + (1-w)/2 (p + q)`, p and q the predictions of two augmentations of an example, the loss is
    `w KL(y|m) + (1-w)/2 (KL(p|m) + KL(q|m))`, divided by `-(1-w) log(1-w)`: near cross entropy for small w and near MAE
    for large w, with consistency of the views. With one view it is the loss JS. The clip acts on the logits of both
    views. Englesson and Azizpour, 2021, Generalized Jensen-Shannon Divergence Loss for Learning with Noisy Labels,
    arXiv 2105.04522.

    The default of the knob depends on the dataset and the noise: see `preset`. The authors augment with RandAugment and
    Cutout, here it is the run's own augmentation, and train 400 epochs.
    """

    losses = ("ce",)

    def __init__(self, job: Job, *, weight: float = 0.5) -> None:
        """
        Args:
            weight: Weight of the label, the authors' pi_1, between 0 and 1.
        """
        if not 0 < weight < 1:
            raise ValueError(f"weight must lie between 0 and 1, got {weight}.")
        super().__init__(job)
        self.weight = weight

    @staticmethod
    def preset(data: str, noise: str) -> dict[str, float]:
        """Return the authors' weight for a dataset and a noise, at the nearest rate; by default that of CIFAR-10.

        >>> GJS.preset("cifar10", "symmetric:rate=0.4")
        {'weight': 0.9}
        """
        name, (kind, knobs) = DATASETS.split(data)[0], NOISES.parse(noise)
        if name == "webvision":
            return {"weight": 0.1}
        table = (ASYMMETRIC if kind in ("asymmetric", "pair") else SYMMETRIC)[name if name == "cifar100" else "cifar10"]
        rate = knobs.get("rate", 0.0 if kind == "none" else 0.2)
        return {"weight": table[min(table, key=lambda known: abs(known - rate))]}

    def train_step(self, index: Tensor, x: Tensor, y: Tensor, augment: Augment) -> Step:
        views = [self.model(augment(x)) for _ in range(2)]  # one after the other, as batch norm sees them
        target = y if y.is_floating_point() else one_hot(y, self.job.num_classes)
        loss = gjs_loss([self.criterion.link(z) for z in views], target.to(views[0].dtype), self.weight)
        loss = self.add_penalty(loss, torch.cat(views))
        self.minimise(loss, self.model, self.optimizer)
        return Step(loss.detach(), views[0].detach())


def gjs_loss(logits: list[Tensor], target: Tensor, weight: float) -> Tensor:
    """Return the mean GJS loss of a batch.

    Args:
        logits: [N, K] of each view.
        target: [N, K], one-hot or probabilities.
        weight: Weight of the target; the views share the rest.

    Returns:
        A scalar.

    >>> gjs_loss([torch.zeros(1, 2)], torch.tensor([[1.0, 0.0]]), 0.5)
    tensor(0.6226)
    """
    rest = 1 - weight
    parts = [(weight, target), *((rest / len(logits), z.softmax(1)) for z in logits)]
    log_mean = torch.stack([w * p for w, p in parts]).sum(0).clamp(FLOOR, 1).log()
    divergences = [w * (p * (p.clamp_min(FLOOR).log() - log_mean)).sum(1) for w, p in parts]
    return torch.stack(divergences).sum(0).mean() / -(rest * math.log(rest))
