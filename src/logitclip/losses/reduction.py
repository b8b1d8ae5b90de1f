"""Weights of examples and classes, and reductions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Reduction = Literal["mean", "sum", "none"]


def check_weights(shape: Sequence[int], weight: Tensor | None, example_weight: Tensor | None) -> None:
    """Refuse weights that do not fit logits of this shape, [..., K]."""
    if weight is not None and len(weight) != shape[-1]:
        raise ValueError(f"weight has {len(weight)} entries for {shape[-1]} classes.")
    if example_weight is not None and example_weight.shape != shape[:-1]:
        raise ValueError(f"example_weight must have the shape {tuple(shape[:-1])}, got {tuple(example_weight.shape)}.")


def weights_of(
    values: Tensor,
    target: Tensor,
    own: Tensor | None,
    example_weight: Tensor | None,
    kept: Tensor | None,
    class_weight: Tensor | None,
) -> Tensor | None:
    """Return the weight of each value, or None if all weigh the same.

    Args:
        values: [...]; only their dtype is used.
        target: Class indices [...], or probabilities [..., K], whose class weights are in the values already.
        own: Weights that the loss itself gives, such as those of a sieve, [...].
        example_weight: Weights that the caller gives, [...].
        kept: False for examples that do not count, [...].
        class_weight: [K].
    """
    weights = own
    for more in (example_weight, kept):
        if more is not None:
            weights = more.to(values.dtype) if weights is None else weights * more.to(values.dtype)
    if class_weight is not None and not target.is_floating_point():
        of_class = class_weight.to(values.dtype)[target]
        weights = of_class if weights is None else weights * of_class
    return weights


def reduce(values: Tensor, weights: Tensor | None, reduction: Reduction, counted: Tensor | None = None) -> Tensor:
    """Weight and reduce the values of a loss: the one place for it.

    Args:
        values: [...].
        weights: [...], or None.
        reduction: "mean", "sum" or "none".
        counted: What a mean divides by is their sum; None means `weights`.
    """
    if weights is None and counted is None and values.numel():
        return values.mean() if reduction == "mean" else values.sum() if reduction == "sum" else values
    if weights is None:
        weights = torch.ones_like(values)
    weighted = values * weights
    if reduction != "mean":
        return weighted.sum() if reduction == "sum" else weighted
    return weighted.sum() / denominator(weights if counted is None else counted)


def denominator(weights: Tensor) -> Tensor:
    """What a mean divides by: the sum of the weights, or 1 if it is 0, so that a mean over nothing is 0."""
    total = weights.sum()
    return torch.where(total == 0, 1.0, total)
