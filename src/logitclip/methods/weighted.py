"""Standard training with a weight for each example."""

from __future__ import annotations

from torch import Tensor

from logitclip.methods.base import Augment, Job, Step
from logitclip.methods.standard import Standard


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
