"""The link: what is done to the logits before the loss.

`clip_logits` is the paper's method (Eq. 3 and 4); the others are what the paper compares it with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

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


def threshold_and_scale(
    tau: float | None = None, delta: float | None = None, temp: float | None = None, p: float = 2.0
) -> tuple[float, float]:
    """The threshold and the scale of Eq. 4, from tau with an optional delta, or from temp.

    The released code and the paper's tabulated "1/tau" are `temp`: threshold temp, scale 1/temp.

    >>> threshold_and_scale(tau=1.0), threshold_and_scale(temp=2.0)
    ((1.0, 1.0), (2.0, 0.5))
    """
    if temp is not None:
        if tau is not None or delta is not None:
            raise ValueError(f"Give tau (with an optional delta) or temp, got tau={tau}, delta={delta}, temp={temp}.")
        check_positive("temp", temp)
        tau, delta = temp, 1 / temp
    if tau is None:
        raise ValueError("The clip by norm needs a threshold: give tau=1 (Eq. 3) or temp=1.5.")
    return float(tau), float(check_clip(tau, delta, p))


def clip_logits(logits: Tensor, tau: float, delta: float | None = None, *, p: float = 2.0, dim: int = -1) -> Tensor:
    """Clip the p-norm of each logit vector: `delta z/|z|_p` if `|z|_p >= tau`, else `z`.

    The direction, and so the prediction, stays as it is. With ``delta=None`` the scale is the threshold (Eq. 3) and the
    function is continuous; with ``delta != tau`` it jumps at the threshold, as Eq. 4 does.

    Args:
        logits: any shape; vectors lie along `dim`. They must be finite: an entry of -inf, as masks of classes use it,
            gives the vector an infinite norm, and NaN. Use a large negative number instead, or mask after the clip.
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
    clipped = _Clip.apply(z, tau, delta, dim) if takes_closed_form(z, p) else plain_clip(z, tau, delta, p, dim)
    return clipped.to(logits.dtype)


def plain_clip(z: Tensor, tau: float, delta: float, p: float = 2.0, dim: int = -1) -> Tensor:
    """Eq. 4 in plain operations, which every transform of torch understands."""
    return z * clip_factor(vector_norm(z, p, dim), tau, delta)


def clip_factor(norm: Tensor, tau: float, delta: float) -> Tensor:
    """What Eq. 4 multiplies a vector of this norm by: delta/norm from tau on, exactly 1 below."""
    ratio = norm / delta
    # Chosen before the reciprocal, so that zero logits are safe; for delta = tau the clamp is a cheaper way to choose.
    ratio = ratio.clamp_min(1.0) if delta == tau else torch.where(norm >= tau, ratio, 1.0)
    return ratio.reciprocal()


def takes_closed_form(z: Tensor, p: float) -> bool:
    """The one place that chooses between gradients written by hand and plain operations.

    Compilers, function transforms, forward-mode AD and tensor subclasses get the plain operations.
    """
    return (
        p == 2
        and eager_on_cpu(z)
        and z.dtype in (torch.float32, torch.float64)
        and type(z) in (Tensor, torch.nn.Parameter)
        and torch.autograd.forward_ad._current_level < 0
    )


def eager_on_cpu(x: Tensor) -> bool:
    """Whether there are values to look at without waiting for a device: no compiler and no function transform is on."""
    return x.is_cpu and not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()


class _Clip(torch.autograd.Function):
    """Eq. 4 for p = 2. With s the factor, dz = s g, less its part along z where clipped: s (g.z) z/|z|^2."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, tau: float, delta: float, dim: int) -> Tensor:
        norm = vector_norm(z, 2, dim)
        factor = clip_factor(norm, tau, delta)
        ctx.save_for_backward(z, norm, factor)
        ctx.options = tau, delta, dim
        return z * factor

    @staticmethod
    def backward(ctx: Any, g: Tensor):  # type: ignore[override]
        z, norm, factor = ctx.saved_tensors
        tau, delta, dim = ctx.options
        if wants_plain_gradient(g):
            return plain_gradient(lambda z: [plain_clip(z, tau, delta, dim=dim)], z, [g]), None, None, None
        along = (g * z).sum(dim, keepdim=True).mul_(factor)
        return (g * factor).addcmul_(z, radial(along, norm, tau), value=-1), None, None, None


def radial(along: Tensor, norm: Tensor, tau: float) -> Tensor:
    """What multiple of z the clip takes off a gradient whose dot with z is `along`: along/norm^2, and 0 below tau."""
    return along.div_(norm).div_(norm).masked_fill_(norm < tau, 0.0)


def wants_plain_gradient(upstream: Tensor) -> bool:
    """Whether a backward pass is itself differentiated, compiled, or batched as by `jacobian(..., vectorize=True)`."""
    batched = torch._C._functorch.is_legacy_batchedtensor(upstream)  # type: ignore[attr-defined]
    return batched or torch.is_grad_enabled() or not eager_on_cpu(upstream)


def plain_gradient(function: Callable[[Tensor], list[Tensor]], z: Tensor, upstream: list[Tensor | None]) -> Tensor:
    """The gradient of the outputs of `function` as autograd finds it, itself differentiable if that is wanted."""
    differentiable = torch.is_grad_enabled()
    with torch.enable_grad():
        pairs = [(x, g) for x, g in zip(function(z), upstream, strict=True) if g is not None]
    outputs, gradients = zip(*pairs, strict=True)
    return torch.autograd.grad(outputs, z, gradients, create_graph=differentiable)[0]


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
def norm(
    logits: Tensor, *, tau: float | None = None, delta: float | None = None, temp: float | None = None, p: float = 2.0
) -> Tensor:
    """Clip the norm (Eq. 4): threshold tau and scale delta, or threshold temp and scale 1/temp."""
    threshold, scale = threshold_and_scale(tau, delta, temp, p)
    return clip_logits(logits, threshold, scale, p=p)


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
