"""Co-teaching (Han et al., 2018): two networks choose small-loss examples for each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from torch import Tensor
from torch.nn.functional import cross_entropy

from logitclip.methods import METHODS
from logitclip.methods.base import Augment, Batch, Job, Step
from logitclip.methods.two_networks import TwoNetworks
from logitclip.noise import NOISES


@partial(METHODS.register, name="co_teaching")
class CoTeaching(TwoNetworks):
    """Co-teaching: each network trains on the examples of a batch whose loss is smallest for the other one.

    A share `forget_rate` of each batch is left out, reached linearly over the first `gradual` epochs. The prediction is
    that of the first network, as the authors report it. The clip acts on the logits of the losses that choose and of
    those that train. Han et al., 2018, Co-teaching: Robust Training of Deep Neural Networks with Extremely Noisy
    Labels, arXiv 1804.06872.

    The authors use Adam with lr 0.001, 200 epochs and batches of 128; here it is SGD, as for the other methods. Their
    code divides the mean loss by the number of examples once more, which Adam does not notice; this is the mean.
    """

    losses = ("ce",)

    def __init__(self, job: Job, *, forget_rate: float = 0.2, gradual: int = 10) -> None:
        """
        Args:
            forget_rate: Share of a batch that is left out; the authors use the noise rate, which they assume known.
            gradual: Epochs until that share is reached.
        """
        if not 0 <= forget_rate < 1:
            raise ValueError(f"forget_rate must be at least 0 and below 1, got {forget_rate}.")
        if gradual < 1:
            raise ValueError(f"gradual must be at least 1, got {gradual}.")
        if job.train.labels.is_floating_point():
            raise ValueError("co_teaching needs class labels, not soft ones: it decides which labels are wrong.")
        super().__init__(job)
        self.forget_rate, self.gradual = forget_rate, gradual
        self.epoch = 0

    @staticmethod
    def preset(data: str, noise: str) -> dict[str, float]:
        """Return the authors' setting: the rate of the noise, if it has one, is left out.

        >>> CoTeaching.preset("cifar10", "pair:rate=0.45")
        {'forget_rate': 0.45}
        """
        rate = NOISES.parse(noise)[1].get("rate")
        return {} if rate is None else {"forget_rate": min(float(rate), 0.9)}

    def start_epoch(self, epoch: int, lr: float) -> None:
        super().start_epoch(epoch, lr)
        self.epoch = epoch

    def train_epoch(
        self, epoch: int, batches: Iterable[Batch], augment: Augment
    ) -> Iterator[tuple[Tensor, Tensor, Step]]:
        self.nets[1][0].train()
        return super().train_epoch(epoch, batches, augment)

    def train_step(self, index: Tensor, x: Tensor, y: Tensor, augment: Augment) -> Step:
        view = augment(x)
        logits = [model(view) for _, model, _ in self.nets]
        linked = [self.criterion.link(z) for z in logits]
        kept = max(1, int((1 - left_out(self.epoch, self.forget_rate, self.gradual)) * len(y)))
        smallest = [cross_entropy(z.detach(), y, reduction="none").argsort(stable=True)[:kept] for z in linked]
        losses = [
            self.add_penalty(cross_entropy(z[chosen], y[chosen]), of_all[chosen])
            for z, of_all, chosen in zip(linked, logits, reversed(smallest), strict=True)
        ]
        for loss, (_, model, optimizer) in zip(losses, self.nets, strict=True):
            self.minimise(loss, model, optimizer)
        return Step(losses[0].detach(), logits[0].detach())


def left_out(epoch: int, forget_rate: float, gradual: int) -> float:
    """Return the share of a batch that is left out in an epoch, from 0: linear up to `forget_rate`.

    >>> [round(left_out(epoch, 0.5, 5), 3) for epoch in (0, 1, 4, 5)]
    [0.0, 0.125, 0.5, 0.5]
    """
    return forget_rate * min(1.0, epoch / max(1, gradual - 1))
