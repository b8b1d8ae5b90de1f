"""The link function between the logits and the loss.

`clip_logits` is the paper's method (Eq. 3 and 4); the other functions are the paper's alternatives.

A logit of -inf masks its class. A masked class keeps its -inf and does not count in any norm.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from logitclip.registry import Registry

LONG = 16 * 1024  # entries that are summed at a time in float32

CLIPS = Registry("clip", injected=("linear_weight",))  # the weight of the last layer, if a clip needs it
PENALTIES = Registry("penalty")

# Private names of torch that tell whether a function transform is active. Without them `eager_on_cpu` is False, and
# everything is computed in plain operations.
_transforms_active = getattr(torch._C, "_are_functorch_transforms_active", None)
_is_batched = getattr(getattr(torch._C, "_functorch", None), "is_legacy_batchedtensor", None)


class Clip(NamedTuple):
    """The clip of Eq. 4 as one value: threshold, scale and norm. `make_clip` makes a checked one.

    >>> make_clip(temp=2.0)
    Clip(tau=2.0, delta=0.5, p=2.0)
    """

    tau: float  # threshold on the norm
    delta: float  # norm of a clipped vector
    p: float = 2.0  # which norm


def make_clip(
    tau: float | None = None, delta: float | None = None, p: float = 2.0, *, temp: float | None = None
) -> Clip:
    """Make the clip of Eq. 4 from tau with an optional delta, or from temp.

    `temp` is the option of the released code and the "1/tau" of the paper's tables: threshold temp, scale 1/temp.

    Args:
        tau: Threshold on the norm.
        delta: Norm of a clipped vector; None means tau.
        p: Which norm, from 1 to `math.inf`.
        temp: Instead of tau and delta.

    Returns:
        A `Clip`.

    Raises:
        ValueError: If neither tau nor temp is given, or both, or if one is not a number or out of range.

    >>> make_clip(1.0)
    Clip(tau=1.0, delta=1.0, p=2.0)
    """
    for name, value in (("tau", tau), ("delta", delta), ("temp", temp)):
        if isinstance(value, str):
            raise ValueError(
                f"{name} must be a number, got {value!r}. To search for one, use lc.tune, or --clip norm:temp=auto "
                "on the command line."
            )
    if temp is not None:
        if tau is not None or delta is not None:
            raise ValueError(f"Give tau (with an optional delta) or temp, got tau={tau}, delta={delta}, temp={temp}.")
        check_positive("temp", temp)
        tau, delta = temp, 1 / temp
    if tau is None and delta is not None:
        raise ValueError(f"delta={delta} without tau clips nothing: give tau, the threshold, too.")
    if tau is None:
        raise ValueError("The clip by norm needs a threshold: give tau=1 (Eq. 3) or temp=1.5.")
    if not 0 < tau < math.inf:
        raise ValueError(f"tau must be positive and finite, got {tau}. To switch clipping off, leave the clip out.")
    delta = tau if delta is None else delta
    check_positive("delta", delta)
    for name, value in (("tau", tau), ("delta", delta)):
        if not 1e-10 <= value <= 1e10:  # so that no gradient overflows in float32
            raise ValueError(f"{name} must lie between 1e-10 and 1e10, got {value}.")
    if not p >= 1:
        raise ValueError(f"p must be at least 1 (math.inf is allowed), got {p}: below 1 it is not a norm.")
    return Clip(float(tau), float(delta), float(p))


def clip_logits(
    logits: Tensor,
    tau: float | None = None,
    delta: float | None = None,
    *,
    p: float = 2.0,
    dim: int = -1,
    temp: float | None = None,
) -> Tensor:
    """Clip the p-norm of each logit vector: `delta z/|z|_p` if `|z|_p >= tau`, else `z`.

    The direction of the vector does not change, and so neither does the prediction. With ``delta=None`` the scale is
    the threshold (Eq. 3) and the function is continuous; with ``delta != tau`` it jumps at the threshold (Eq. 4).

    Args:
        logits: Any shape, with the classes along `dim`. A class is masked by a logit of -inf.
        tau: Threshold on the norm.
        delta: Norm of a clipped vector; None means tau.
        p: Which norm, from 1 to `math.inf`. Where the norm has no gradient, the usual subgradient is used: for p = 1,
            sign(0) = 0; for p = inf, entries that tie for the maximum share the gradient evenly.
        dim: The class dimension.
        temp: Instead of tau and delta: threshold temp and scale 1/temp.

    Returns:
        The clipped logits, in the shape and dtype of `logits`. In float16 and bfloat16 the norm is computed in float32.

    Raises:
        ValueError: If an option is out of range or the logits are not floating-point.

    >>> clip_logits(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), tau=1.0)
    tensor([[0.6000, 0.8000],
            [0.3000, 0.4000]])

    Paper: Eq. 3, Eq. 4.
    """
    return apply_clip(logits, make_clip(tau, delta, p, temp=temp), dim)


def apply_clip(logits: Tensor, clip: Clip, dim: int = -1) -> Tensor:
    """Eq. 4 with a `Clip`; see `clip_logits`."""
    check_logits(logits)
    if clip.delta > torch.finfo(logits.dtype).max:
        raise ValueError(f"delta={clip.delta:g} is beyond the range of {logits.dtype} logits.")
    z = full_precision(logits)
    clipped = _Clip.apply(z, clip, dim) if takes_closed_form(z, clip.p) else plain_clip(z, clip, dim)
    return clipped.to(logits.dtype)


def plain_clip(z: Tensor, clip: Clip, dim: int = -1) -> Tensor:
    """Eq. 4 in plain operations, which work under every transform and on every device."""
    masked = z.isneginf()
    present = z.masked_fill(masked, 0.0)
    return (present * clip_factor(vector_norm(present, clip.p, dim), clip)).masked_fill(masked, -math.inf)


def clip_factor(norm: Tensor, clip: Clip) -> Tensor:
    """Return the factor of Eq. 4 for a vector of this norm: delta/norm from tau on, exactly 1 below."""
    ratio = norm / clip.delta
    # Chosen before the reciprocal, so that zero logits are safe. A norm of NaN stays NaN. For delta = tau, clamping is
    # cheaper than `where`.
    ratio = ratio.clamp_min(1.0) if clip.delta == clip.tau else torch.where(norm < clip.tau, 1.0, ratio)
    return ratio.reciprocal()


def takes_closed_form(z: Tensor, p: float) -> bool:
    """Return whether to use the gradients written by hand. This is the only place that decides.

    Compilers, function transforms, forward-mode AD and tensor subclasses get plain operations.
    """
    return (
        p == 2
        and eager_on_cpu(z)
        and z.dtype in (torch.float32, torch.float64)
        and type(z) in (Tensor, torch.nn.Parameter)
        and getattr(forward_ad, "_current_level", 0) < 0
    )


def eager_on_cpu(x: Tensor) -> bool:
    """Return whether the values of `x` can be read without a sync: eager, CPU, no transform."""
    if not x.is_cpu or torch.compiler.is_compiling() or _transforms_active is None or _is_batched is None:
        return False
    return not _transforms_active()


class _Clip(torch.autograd.Function):
    """Eq. 4 for p = 2. With s the factor, dz = s g; for clipped rows, minus its component along z: s (g.z) z/|z|^2."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, clip: Clip, dim: int) -> Tensor:
        norm = torch.linalg.vector_norm(z, dim=dim, keepdim=True)
        ctx.options = clip, dim
        ctx.plain = needs_plain_form(norm)
        if ctx.plain:
            ctx.save_for_backward(z, None, None)
            return plain_clip(z, clip, dim)
        factor = clip_factor(norm, clip)
        ctx.save_for_backward(z, norm, factor)
        return z * factor

    @staticmethod
    def backward(ctx: Any, g: Tensor):  # type: ignore[override]
        z, norm, factor = ctx.saved_tensors
        clip, dim = ctx.options
        if ctx.plain or wants_plain_gradient(g):
            return plain_gradient(lambda z: [plain_clip(z, clip, dim)], z, [g]), None, None
        along = (g * z).sum(dim, keepdim=True).mul_(factor)
        return (g * factor).addcmul_(z, radial(along, norm, clip.tau), value=-1), None, None


def needs_plain_form(norm: Tensor) -> bool:
    """Return whether a 2-norm is infinite: the squares of a row overflowed, or a class is masked."""
    return bool(norm.isposinf().any())  # a NaN elsewhere does not hide it, as it would in the maximum


def radial(along: Tensor, norm: Tensor, tau: float) -> Tensor:
    """Return the multiple of z to subtract from a gradient with `along` = gradient.z: along/norm^2, and 0 below tau."""
    return along.div_(norm).div_(norm).masked_fill_(norm < tau, 0.0)


def wants_plain_gradient(upstream: Tensor) -> bool:
    """Return whether a backward pass is itself differentiated, compiled, or batched (`jacobian(vectorize=True)`)."""
    return torch.is_grad_enabled() or not eager_on_cpu(upstream) or _is_batched is None or _is_batched(upstream)


def plain_gradient(function: Callable[[Tensor], list[Tensor]], z: Tensor, upstream: list[Tensor | None]) -> Tensor:
    """Return the gradient of the outputs of `function` by autograd; differentiable itself if gradients are enabled."""
    differentiable = torch.is_grad_enabled()
    with torch.enable_grad():
        pairs = [(x, g) for x, g in zip(function(z), upstream, strict=True) if g is not None]
    outputs, gradients = zip(*pairs, strict=True)
    return torch.autograd.grad(outputs, z, gradients, create_graph=differentiable)[0]


def full_precision(logits: Tensor) -> Tensor:
    """Convert half-precision logits to float32; return others unchanged."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def vector_norm(z: Tensor, p: float, dim: int) -> Tensor:
    """Return the p-norm along `dim`, which is kept with size 1."""
    if p == 1 and z.shape[dim] > LONG:
        return z.abs().sum(dim, keepdim=True)  # in pairs, where the norm adds one by one and loses digits
    if p in (1, math.inf):
        return torch.linalg.vector_norm(z, p, dim=dim, keepdim=True)
    # Powers may overflow (1e20 squared does in float32): divide by the largest entry first.
    largest = torch.linalg.vector_norm(z.detach(), math.inf, dim=dim, keepdim=True)
    largest = largest.clamp_min(torch.finfo(z.dtype).tiny)
    if z.shape[dim] > LONG:  # norms of parts, and their norm: one long sum loses digits
        parts = [torch.linalg.vector_norm(part, p, dim=dim, keepdim=True) for part in (z / largest).split(LONG, dim)]
        return largest * torch.linalg.vector_norm(torch.cat(parts, dim), p, dim=dim, keepdim=True)
    return largest * torch.linalg.vector_norm(z / largest, p, dim=dim, keepdim=True)


def logit_norms(logits: Tensor, p: float = 2.0, dim: int = -1) -> Tensor:
    """Return the norms of logits along `dim`, as a clip compares them with tau: masked classes (at -inf) do not count.

    >>> logit_norms(torch.tensor([[3.0, 4.0, -torch.inf], [0.0, 0.0, 0.0]]))
    tensor([5., 0.])
    """
    z = full_precision(logits)
    z = z.masked_fill(z.isneginf(), 0.0)
    return vector_norm(z, p, dim).squeeze(dim) if z.shape[dim] > LONG else torch.linalg.vector_norm(z, p, dim=dim)


QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def norm_quantiles(norms: Tensor) -> list[float]:
    """Return the `QUANTILES` of norms [N]."""
    few = norms[:: 1 + len(norms) // 2**24]  # torch.quantile is limited to 2**24 values
    return torch.quantile(few, few.new_tensor(QUANTILES)).tolist()


def clip_by_value(logits: Tensor, limit: float) -> Tensor:
    """Clamp every logit to [-limit, limit]: the paper's LC-V.

    Clamped entries get no gradient, and the prediction may change (ties at the limit).

    Args:
        logits: Any shape. Masked classes stay at -inf.
        limit: The largest absolute value, positive.

    Returns:
        The clamped logits, in the shape and dtype of `logits`.

    Raises:
        ValueError: If limit is not positive and finite.

    >>> clip_by_value(torch.tensor([3.0, -0.5, 2.0]), limit=1.0)
    tensor([ 1.0000, -0.5000,  1.0000])

    Paper: LC-V.
    """
    check_positive("limit", limit)
    check_logits(logits)
    limit = min(limit, torch.finfo(logits.dtype).max)  # torch refuses bounds beyond it
    return logits.clamp(-limit, limit).masked_fill(logits.isneginf(), -math.inf)


def logit_norm(logits: Tensor, temperature: float, *, dim: int = -1) -> Tensor:
    """LogitNorm: scale every logit vector to norm 1/temperature, `z / (T (|z| + 1e-7))`.

    Args:
        logits: Any shape, with the classes along `dim`. Masked classes stay at -inf.
        temperature: T, positive.
        dim: The class dimension.

    Returns:
        The normalised logits, in the shape and dtype of `logits`.

    Raises:
        ValueError: If temperature is not positive and finite.

    >>> logit_norm(torch.tensor([3.0, 4.0]), temperature=0.5)
    tensor([1.2000, 1.6000])

    Paper: LogitNorm.
    """
    check_positive("temperature", temperature)
    check_logits(logits)
    z = full_precision(logits)
    masked = z.isneginf()
    z = z.masked_fill(masked, 0.0)
    normed = z / ((vector_norm(z, 2, dim) + 1e-7) * temperature)
    return normed.masked_fill(masked, -math.inf).to(logits.dtype)


def softcap(logits: Tensor, cap: float) -> Tensor:
    """Bound every logit smoothly, `cap tanh(z / cap)`.

    A smooth form of `clip_by_value`: the order of the logits stays, and every entry keeps a gradient.

    Args:
        logits: Any shape. Masked classes stay at -inf.
        cap: The bound, positive.

    Returns:
        The bounded logits, in the shape and dtype of `logits`.

    Raises:
        ValueError: If cap is not positive and finite.

    >>> softcap(torch.tensor([100.0, -0.5, 2.0]), cap=1.0)
    tensor([ 1.0000, -0.4621,  0.9640])

    Reference: Gemma Team (2024), Gemma 2: Improving Open Language Models at a Practical Size, arXiv 2408.00118.
    """
    check_positive("cap", cap)
    check_logits(logits)
    z = full_precision(logits)
    return (cap * torch.tanh(z / cap)).masked_fill(z.isneginf(), -math.inf).to(logits.dtype)


def extended_logit_norm(logits: Tensor, linear_weight: Tensor, *, dim: int = -1) -> Tensor:
    """Extended LogitNorm: divide the logits by the mean distance of the features to the decision boundaries.

    The distance to the boundary between the predicted class m and class k is `(z_m - z_k) / |w_m - w_k|`, so the weight
    of the last layer is needed, and it gets a gradient, too. As in the authors' code, the mean is over all classes,
    with distance 0 for the predicted one. `build_criterion("ce", "extended_logit_norm", head=network)` makes a
    criterion of it.

    Args:
        logits: Any shape, with the classes along `dim`. Masked classes stay at -inf.
        linear_weight: Weight of the last linear layer, [K, D].
        dim: The class dimension.

    Returns:
        The normalised logits, in the shape and dtype of `logits`.

    Raises:
        ValueError: If the weight has not one row per class.

    >>> extended_logit_norm(torch.tensor([3.0, 1.0]), torch.eye(2))
    tensor([4.2426, 1.4142])

    Reference: Ding, Liu, Unger and Eilertsen (2026), Enhancing Out-of-Distribution Detection with Extended Logit
    Normalization, CVPR, arXiv 2504.11434.
    """
    check_logits(logits)
    z = full_precision(logits).movedim(dim, -1)
    if linear_weight.ndim != 2 or len(linear_weight) != z.shape[-1]:
        raise ValueError(f"linear_weight must be [{z.shape[-1]}, D], got {tuple(linear_weight.shape)}.")
    masked = z.isneginf()
    top, at_top = z.max(-1, keepdim=True)
    w = linear_weight.to(z.dtype)
    between = torch.cdist(w, w, compute_mode="donot_use_mm_for_euclid_dist")[at_top.squeeze(-1)]  # [..., K]
    elsewhere = ~masked & (between > 0)  # not at the predicted class, nor at one with the same weight
    gaps = (top - z.masked_fill(masked, 0.0)).masked_fill(~elsewhere, 0.0)
    distances = gaps / between.masked_fill(~elsewhere, 1.0)
    mean = distances.sum(-1, keepdim=True) / (~masked).sum(-1, keepdim=True).clamp_min(1)
    return (z / (mean + 1e-7)).movedim(-1, dim).to(logits.dtype)


def z_penalty(logits: Tensor, *, dim: int = -1) -> Tensor:
    """Return the mean of `(log sum_k exp z_k)^2`, to be added to a loss with a weight: the z-loss of language models.

    Args:
        logits: Any shape, with the classes along `dim`.
        dim: The class dimension.

    Returns:
        The mean, a tensor of one number; float32 for half-precision logits.

    Raises:
        ValueError: If the logits are integers or a single number.

    >>> z_penalty(torch.zeros(2, 4))
    tensor(1.9218)

    Reference: Chowdhery and others (2022), PaLM: Scaling Language Modeling with Pathways, arXiv 2204.02311.
    """
    check_logits(logits)
    return full_precision(logits).logsumexp(dim).square().mean()


def l1_penalty(parameters: Iterable[Tensor]) -> Tensor:
    """Return the sum of all absolute parameters, to be added to a loss with a weight: for `anl_ce` and `jal_ce`.

    Args:
        parameters: ``model.parameters()``.

    Returns:
        The sum, a tensor of one number.

    Raises:
        ValueError: If there are no parameters.

    >>> l1_penalty(torch.nn.Linear(2, 1, bias=False).requires_grad_(False).parameters()) > 0
    tensor(True)
    """
    each = [parameter.abs().sum() for parameter in parameters]
    if not each:
        raise ValueError("l1_penalty needs at least one parameter.")
    return torch.stack(each).sum()


def norm_penalty(logits: Tensor, *, dim: int = -1) -> Tensor:
    """Return the mean 2-norm of the logit vectors, to be added to a loss with a weight (not squared, as in the paper).

    Args:
        logits: Any shape, with the classes along `dim`.
        dim: The class dimension.

    Returns:
        The mean, a tensor of one number; float32 for half-precision logits.

    Raises:
        ValueError: If the logits are integers or a single number.

    >>> norm_penalty(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
    tensor(3.)

    Paper: Norm Regularization.
    """
    check_logits(logits)
    z = full_precision(logits)
    return vector_norm(z.masked_fill(z.isneginf(), 0.0), 2, dim).mean()


def check_positive(name: str, value: float) -> None:
    """Raise a ValueError unless the value is positive and finite."""
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value}.")


def check_logits(logits: Tensor) -> None:
    """Raise a ValueError for integer logits and for a single number."""
    if not logits.is_floating_point():
        raise ValueError(f"logits must be a floating-point tensor, got {logits.dtype}.")
    if logits.ndim == 0:
        raise ValueError("logits must have a class dimension, got a single number.")


# -- the names of the command line ----------------------------------------------------------------------------------


@CLIPS.register
def none(logits: Tensor) -> Tensor:
    """Leave the logits unchanged."""
    return logits


@CLIPS.register
def norm(
    logits: Tensor, *, tau: float | None = None, delta: float | None = None, temp: float | None = None, p: float = 2.0
) -> Tensor:
    """Clip the norm (Eq. 4): threshold tau and scale delta, or threshold temp and scale 1/temp.

    Args:
        tau: Threshold on the norm.
        delta: Norm of a clipped vector; tau if not given.
        temp: Instead of tau and delta: the threshold, with the scale 1/temp; the paper's tabulated 1/tau.
        p: Order of the norm, from 1 to inf.
    """
    return clip_logits(logits, tau, delta, p=p, temp=temp)


@CLIPS.register
def value(logits: Tensor, *, limit: float) -> Tensor:
    """Clamp each logit to [-limit, limit] (LC-V).

    Args:
        limit: Largest absolute value of a logit.
    """
    return clip_by_value(logits, limit)


def _logit_norm(logits: Tensor, *, temperature: float) -> Tensor:
    """Scale every logit vector to norm 1/temperature (LogitNorm).

    Args:
        temperature: The inverse of the norm of every logit vector.
    """
    return logit_norm(logits, temperature)


CLIPS.register(_logit_norm, name="logit_norm")


def _softcap(logits: Tensor, *, cap: float) -> Tensor:
    """Bound each logit smoothly, `cap tanh(z / cap)`.

    Args:
        cap: Largest absolute value of a logit.
    """
    return softcap(logits, cap)


CLIPS.register(_softcap, name="softcap")


def _extended_logit_norm(logits: Tensor, *, linear_weight: Tensor) -> Tensor:
    """Divide the logits by the mean distance of the features to the decision boundaries (extended LogitNorm)."""
    return extended_logit_norm(logits, linear_weight)


CLIPS.register(_extended_logit_norm, name="extended_logit_norm")


def takes_weight(link: Callable[..., Tensor]) -> bool:
    """Return whether a link takes the weight of the last layer beside the logits."""
    try:
        parameter = inspect.signature(link).parameters.get("linear_weight")
    except (TypeError, ValueError):  # a function of torch without a signature
        return False
    return parameter is not None and parameter.default is parameter.empty


def _no_penalty(logits: Tensor) -> Tensor:
    """Add no penalty."""
    return logits.new_zeros(())


def _weighted_norm(logits: Tensor, *, weight: float) -> Tensor:
    """Add the mean norm of the logits times a weight (norm regularisation).

    Args:
        weight: Factor of the mean norm.
    """
    check_positive("weight", weight)
    return weight * norm_penalty(logits)


def _weighted_z(logits: Tensor, *, weight: float) -> Tensor:
    """Add the mean squared log-sum-exp of the logits times a weight (z-loss).

    Args:
        weight: Factor of the mean square.
    """
    check_positive("weight", weight)
    return weight * z_penalty(logits)


def _weighted_l1(parameters: Iterable[Tensor], *, weight: float) -> Tensor:
    """Add the L1 norm of all parameters times a weight (for the active negative and joint asymmetric losses).

    Args:
        weight: Factor of the sum of absolute values.
    """
    check_positive("weight", weight)
    return weight * l1_penalty(parameters)


def is_on_parameters(penalty: Callable[..., Tensor]) -> bool:
    """Return whether a penalty takes the parameters of the network instead of the logits."""
    return getattr(penalty, "func", penalty) is _weighted_l1


PENALTIES.register(_no_penalty, name="none")
PENALTIES.register(_weighted_norm, name="norm")
PENALTIES.register(_weighted_z, name="z")
PENALTIES.register(_weighted_l1, name="l1")
