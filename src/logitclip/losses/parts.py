"""What several losses share: `1 - p` without cancellation, checks of knobs."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from logitclip.clip import eager_on_cpu


def one_minus_p(log_p: Tensor) -> Tensor:
    """`1 - p` from log p, accurate also where p rounds to 1.

    >>> one_minus_p(torch.tensor([-1e-10, 0.0]))
    tensor([1.0000e-10, -0.0000e+00])
    """
    return -torch.expm1(log_p)


def infinite_if_masked(phi: Callable[[Tensor], Tensor], log_p: Tensor) -> Tensor:
    """`phi(log_p)`, and infinity without a gradient where the label is a masked class: there phi' would be NaN."""
    masked = log_p.isneginf()
    if eager_on_cpu(log_p) and not bool(masked.any()):
        return phi(log_p)
    return phi(log_p.masked_fill(masked, -1.0)).masked_fill(masked, math.inf)


def power_gap(base: float, change: Tensor, q: float) -> Tensor:
    """((base + change)^q - base^q) / q, accurate also where the two powers are large and close."""
    return base**q / q * torch.expm1(q * torch.log1p(change / base))


def check_at_least(least: float, **knobs: float) -> None:
    """Refuse the first of `knobs` that is below `least` or not finite.

    Raises:
        ValueError: Such as "gamma must be at least 0 and finite, got -1."
    """
    for name, value in knobs.items():
        if not least <= value < math.inf:
            raise ValueError(f"{name} must be at least {least} and finite, got {value}.")


def check_above(limit: float, **knobs: float) -> None:
    """Refuse the first of `knobs` that is not above `limit` or not finite.

    Raises:
        ValueError: Such as "threshold must be above 1 and finite, got 1."
    """
    for name, value in knobs.items():
        if not limit < value < math.inf:
            raise ValueError(f"{name} must be above {limit} and finite, got {value}.")
