"""The link: what is done to the logits before the loss.

`clip_logits` is the paper's method (Eq. 3 and 4); the others are what the paper compares it with.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from logitclip.registry import Registry

CLIPS = Registry("clip")
PENALTIES = Registry("penalty")


def check_clip(tau: float, delta: float | None, p: float) -> float:
    """Check the options of Eq. 4 and return delta, which is tau when it is None."""
    if not tau > 0 or math.isinf(tau):
        raise ValueError(f"tau must be positive and finite, got {tau}. To switch clipping off, leave the clip out.")
    if delta is None:
        delta = tau
    if not delta > 0 or math.isinf(delta):
        raise ValueError(f"delta must be positive and finite, got {delta}.")
    if not p >= 1:
        raise ValueError(f"p must be at least 1 (math.inf is allowed), got {p}: below 1 it is not a norm.")
    return delta


def clip_logits(logits: Tensor, tau: float, delta: float | None = None, *, p: float = 2.0, dim: int = -1) -> Tensor:
    """Clip the p-norm of each logit vector: `delta z/|z|_p` if `|z|_p >= tau`, else `z`.

    The direction, and so the prediction, stays as it is. With ``delta=None`` the scale is the threshold (Eq. 3) and the
    function is continuous; with ``delta != tau`` it jumps at the threshold, as Eq. 4 does.

    Args:
        logits: any shape; vectors lie along `dim`.
        tau: the threshold on the norm.
        delta: the norm of a clipped vector; None means tau.
        p: which norm, from 1 to `math.inf`. Where a norm has no gradient the usual subgradient is taken: for p = 1 an
            entry of 0 counts as sign 0; for p = inf the entries that tie for the maximum share the gradient evenly.

    Returns:
        The clipped logits, in the shape and dtype of `logits`. In float16 and bfloat16 the norm is taken in float32.

    >>> clip_logits(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), tau=1.0)
    tensor([[0.6000, 0.8000],
            [0.3000, 0.4000]])

    Paper: Eq. 3, Eq. 4.
    """
    delta = check_clip(tau, delta, p)
    check_logits(logits)
    z = full_precision(logits)
    norm = vector_norm(z, p, dim)
    # Chosen before the reciprocal, so that zero logits are safe and the factor below the threshold is exactly 1.
    factor = torch.where(norm >= tau, norm / delta, 1.0).reciprocal()
    return (z * factor).to(logits.dtype)


def full_precision(logits: Tensor) -> Tensor:
    """Half-precision logits as float32, others as they are."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def vector_norm(z: Tensor, p: float, dim: int) -> Tensor:
    """The p-norm along `dim`, which is kept with size 1."""
    if p in (1, 2, math.inf):
        return torch.linalg.vector_norm(z, p, dim=dim, keepdim=True)
    # Other powers may leave the range of floats (1e4 to the 10th does in float32): take them of entries of at most 1.
    largest = z.detach().abs().amax(dim, keepdim=True).clamp_min(torch.finfo(z.dtype).tiny)
    return largest * torch.linalg.vector_norm(z / largest, p, dim=dim, keepdim=True)


def clip_by_value(logits: Tensor, limit: float) -> Tensor:
    """Clamp every logit to [-limit, limit]: the paper's LC-V.

    Clamped entries get no gradient, and the prediction may change (ties at the limit).

    >>> clip_by_value(torch.tensor([3.0, -0.5, 2.0]), limit=1.0)
    tensor([ 1.0000, -0.5000,  1.0000])

    Paper: LC-V.
    """
    check_positive("limit", limit)
    check_logits(logits)
    return logits.clamp(-limit, limit)


def logit_norm(logits: Tensor, temperature: float, *, dim: int = -1) -> Tensor:
    """LogitNorm: give every logit vector the norm 1/temperature, `z / (T (|z| + 1e-7))`.

    >>> logit_norm(torch.tensor([3.0, 4.0]), temperature=0.5)
    tensor([1.2000, 1.6000])

    Paper: LogitNorm.
    """
    check_positive("temperature", temperature)
    check_logits(logits)
    z = full_precision(logits)
    return (z / ((vector_norm(z, 2, dim) + 1e-7) * temperature)).to(logits.dtype)


def norm_penalty(logits: Tensor, *, dim: int = -1) -> Tensor:
    """The mean 2-norm of the logit vectors, to be added to a loss with a weight (not squared, as in the paper).

    >>> norm_penalty(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
    tensor(3.)

    Paper: Norm Regularization.
    """
    check_logits(logits)
    return vector_norm(full_precision(logits), 2, dim).mean()


def check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value}.")


def check_logits(logits: Tensor) -> None:
    if not logits.is_floating_point():
        raise ValueError(f"logits must be a floating-point tensor, got {logits.dtype}.")
    if logits.ndim == 0:
        raise ValueError("logits must have a class dimension, got a single number.")


# The same under the names of the command line.


@CLIPS.register
def none(logits: Tensor) -> Tensor:
    """The logits as they are."""
    return logits


@CLIPS.register
def norm(logits: Tensor, *, tau: float, delta: float | None = None, p: float = 2.0) -> Tensor:
    """Clip the norm: threshold tau, scale delta (Eq. 4)."""
    return clip_logits(logits, tau, delta, p=p)


@CLIPS.register
def official(logits: Tensor, *, temp: float) -> Tensor:
    """Clip the norm with threshold temp and scale 1/temp: the released code, and the paper's tabulated "1/tau"."""
    check_positive("temp", temp)
    return clip_logits(logits, temp, 1 / temp)


@CLIPS.register
def value(logits: Tensor, *, limit: float) -> Tensor:
    """Clamp each logit to [-limit, limit] (LC-V)."""
    return clip_by_value(logits, limit)


def _logit_norm(logits: Tensor, *, temperature: float) -> Tensor:
    """Give every logit vector the norm 1/temperature (LogitNorm)."""
    return logit_norm(logits, temperature)


CLIPS.register(_logit_norm, name="logit_norm")


def _no_penalty(logits: Tensor) -> Tensor:
    """No penalty."""
    return logits.new_zeros(())


def _weighted_norm(logits: Tensor, *, weight: float) -> Tensor:
    """The mean norm of the logits times a weight (norm regularisation)."""
    check_positive("weight", weight)
    return weight * norm_penalty(logits)


PENALTIES.register(_no_penalty, name="none")
PENALTIES.register(_weighted_norm, name="norm")
