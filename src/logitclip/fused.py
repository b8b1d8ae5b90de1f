"""The two numbers every loss is made of: `log p_y` and the mean over classes of `log p_k`, clip included.

`row_log_probs` has a plain form that works everywhere, and a blocked form for large logits on a CPU: rows are taken in
blocks that stay in the cache, only per-row statistics are saved, and the gradient is written in one closed form. It
reads the logits twice and never stores a second [N, K] array besides their gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from logitclip.clip import check_clip, clip_logits, full_precision

BLOCK = 128 * 1024  # entries in a block: a few of them fit the second-level cache
MIN_BLOCKED = 64 * 1024  # entries below which one pass of plain operations is as fast
LINEAR_BLOCK = 16 * 1024 * 1024  # entries of the logits of a linear layer held at once
_EXP_SAFE = 40.0  # exp of a clipped logit needs no shift by the row's maximum below this


def row_log_probs(
    logits: Tensor,
    target: Tensor,
    tau: float | None = None,
    delta: float | None = None,
    *,
    p: float = 2.0,
    mean: bool = True,
) -> tuple[Tensor, Tensor | None]:
    r"""`log p_y` and the mean of `log p_k` over the classes, with `p = softmax(clip(z))`.

    Args:
        logits: [..., K], or [N, K] for the blocked form.
        target: [...] class indices.
        tau, delta, p: the clip of Eq. 4; ``tau=None`` means none.
        mean: False skips the second number, which many losses do not need.

    Returns:
        Two tensors of shape [...] (the second is None without `mean`), in float32 for half-precision logits.

    >>> row_log_probs(torch.zeros(1, 4), torch.tensor([2]))
    (tensor([-1.3863]), tensor([-1.3863]))
    """
    if tau is not None:
        delta = check_clip(tau, delta, p)
    if _takes_blocked_form(logits, p):
        return _Blocked.apply(logits, target, tau, delta, mean)
    log_probs = clipped_log_probs(logits, tau, delta, p=p)
    log_p = pick(log_probs, target)
    return log_p, log_probs.mean(-1) if mean else None


def pick(log_probs: Tensor, target: Tensor) -> Tensor:
    """The entries of `log_probs` [..., K] at `target` [...]."""
    return log_probs.gather(-1, target.unsqueeze(-1)).squeeze(-1)


def clipped_log_probs(logits: Tensor, tau: float | None, delta: float | None, *, p: float = 2.0) -> Tensor:
    """`log softmax(clip(z))` over the last dimension, [..., K]; half precision is computed in float32."""
    logits = full_precision(logits)
    return torch.log_softmax(logits if tau is None else clip_logits(logits, tau, delta, p=p), dim=-1)


def linear_row_log_probs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    tau: float | None = None,
    delta: float | None = None,
    *,
    bias: Tensor | None = None,
    p: float = 2.0,
    mean: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """`row_log_probs` of ``hidden @ weight.T + bias``, without ever holding these logits as a whole.

    Rows are taken in blocks; each block's logits are computed, used and dropped, and computed again in the backward
    pass. So the extra memory is that of one block, whatever the number of classes.

    Args:
        hidden: [N, D]; weight: [K, D]; bias: [K] or None; target: [N].
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden [N, D] and weight [K, D] do not fit: got {tuple(hidden.shape)} and {tuple(weight.shape)}."
        )
    if target.shape != hidden.shape[:1]:
        raise ValueError(f"target must have the shape {tuple(hidden.shape[:1])}, got {tuple(target.shape)}.")

    def block(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Any:
        logits = torch.nn.functional.linear(hidden, weight, bias)
        return row_log_probs(logits, target, tau, delta, p=p, mean=mean)

    step = max(1, LINEAR_BLOCK // len(weight))
    parts = [
        checkpoint(block, h, weight, bias, t, use_reentrant=False)
        for h, t in zip(hidden.split(step), target.split(step), strict=True)
    ]
    log_p, mean_log_p = zip(*parts, strict=True)  # type: ignore[misc]
    return torch.cat(log_p), torch.cat(mean_log_p) if mean else None


def linear_clip_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    tau: float | None = None,
    delta: float | None = None,
    *,
    bias: Tensor | None = None,
    p: float = 2.0,
) -> Tensor:
    """The mean clipped cross entropy of a last linear layer, for a million classes: see `linear_row_log_probs`.

    >>> hidden, weight = torch.ones(2, 3), torch.zeros(1000, 3)
    >>> linear_clip_cross_entropy(hidden, weight, torch.tensor([0, 999]), tau=1.0)
    tensor(6.9078)
    """
    return -linear_row_log_probs(hidden, weight, target, tau, delta, bias=bias, p=p, mean=False)[0].mean()


def _takes_blocked_form(logits: Tensor, p: float) -> bool:
    # The one place that chooses. Compilers, function transforms and forward-mode AD see the plain form.
    return (
        logits.numel() >= MIN_BLOCKED
        and not torch.compiler.is_compiling()
        and logits.ndim == 2
        and p == 2
        and logits.device.type == "cpu"
        and logits.dtype in (torch.float32, torch.float64)
        and not torch._C._are_functorch_transforms_active()
        and torch.autograd.forward_ad._current_level < 0
    )


class _Blocked(torch.autograd.Function):
    """The blocked form. With s = delta/|z| for clipped rows and 1 for the others, z' = s z and L = log sum exp z':

    log p_y = z'_y - L and mean log p = mean z' - L. For upstream gradients g of the first and h of the second,
    dz' = g e_y + h/K - (g + h) p, and dz = s dz', less its part along z where clipped: s (dz'.z) z/|z|^2.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, tau: float | None, delta: float | None, mean: bool):
        n, k = logits.shape
        log_p = logits.gather(1, target[:, None])[:, 0]  # z_y for now
        mean_log_p = torch.empty_like(log_p) if mean else None
        norm = torch.empty_like(log_p)
        total = torch.empty_like(log_p)
        # Clipped logits are small enough to exponentiate as they are; others are shifted by their maximum.
        shift = None if tau and delta and max(tau, delta) < _EXP_SAFE else torch.empty_like(log_p)
        scale = torch.ones_like(log_p)
        buffer = logits.new_empty(min(n, _rows(k)), k)
        for rows in _blocks(n, k):
            z, e = logits[rows], buffer[: rows.stop - rows.start]
            if tau is None:
                e.copy_(z)
            else:
                torch.linalg.vector_norm(z, dim=1, out=norm[rows])
                torch.mul(z, _factor(norm[rows], tau, delta, out=scale[rows])[:, None], out=e)
            if mean_log_p is not None:
                torch.mean(e, 1, out=mean_log_p[rows])
            if shift is not None:
                e -= torch.amax(e, 1, out=shift[rows])[:, None]
            torch.sum(e.exp_(), 1, out=total[rows])
        log_sum = total.log() if shift is None else total.log().add_(shift)
        log_p.mul_(scale).sub_(log_sum).clamp_(max=0)  # rounding must not make p_y exceed 1
        if mean_log_p is not None:
            mean_log_p.sub_(log_sum)
        # One block is small: keep its exponentials, so that the backward pass need not compute them again.
        kept = buffer if n <= len(buffer) else None
        ctx.save_for_backward(logits, target, scale, norm, total, shift, kept)
        ctx.clip = tau, delta
        ctx.set_materialize_grads(False)
        return log_p, mean_log_p

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, h: Tensor | None = None):
        logits, target, scale, norm, total, shift, kept = ctx.saved_tensors
        tau, delta = ctx.clip
        if torch.is_grad_enabled():  # somebody will differentiate this gradient: take that of the plain form
            grad = _plain_gradient(logits, target, tau, delta, (g, h)) if ctx.needs_input_grad[0] else None
            return grad, None, None, None, None
        n, k = logits.shape
        g = torch.zeros_like(scale) if g is None else g
        weight = (g if h is None else g + h) / total  # of the exponentials in -dz'
        along_e = (weight * scale).neg_()
        radial = pull = None
        if tau is not None and bool((clipped := norm >= tau).any()):
            radial = torch.where(clipped, scale / norm.square(), 0.0)
            pull = g * logits.gather(1, target[:, None])[:, 0]
        grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
        buffer = logits.new_empty(min(n, _rows(k)), k)
        for rows in _blocks(n, k):
            z, out = logits[rows], grad[rows]
            if kept is not None:
                e = kept
            else:
                e = out.copy_(z) if tau is None else torch.mul(z, scale[rows][:, None], out=out)
                if shift is not None:
                    e -= shift[rows][:, None]
                e.exp_()
            along_z = None
            if radial is not None and pull is not None:
                along_z = torch.mul(e, z, out=buffer[: len(z)]).sum(1).mul_(weight[rows]).sub_(pull[rows])
                if h is not None:
                    along_z -= h[rows] * z.mean(1)
                along_z *= radial[rows]
            torch.mul(e, along_e[rows][:, None], out=out)
            if along_z is not None:
                out.addcmul_(z, along_z[:, None])
            if h is not None:
                out += (h[rows] * scale[rows]).div_(k)[:, None]
        grad.scatter_add_(1, target[:, None], (g * scale)[:, None])
        return grad, None, None, None, None


def _rows(num_classes: int) -> int:
    return max(1, BLOCK // num_classes)


def _blocks(n: int, num_classes: int) -> list[slice]:
    step = _rows(num_classes)
    return [slice(i, min(i + step, n)) for i in range(0, n, step)]


def _factor(norm: Tensor, tau: float, delta: float | None, out: Tensor) -> Tensor:
    """The factor of Eq. 4 from the norms, as in `clip_logits`."""
    return torch.div(norm, tau if delta is None else delta, out=out).masked_fill_(norm < tau, 1.0).reciprocal_()


def _plain_gradient(
    logits: Tensor,
    target: Tensor,
    tau: float | None,
    delta: float | None,
    upstream: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    """The same gradient as the blocked one, as a differentiable function of logits and upstream gradients."""
    log_probs = clipped_log_probs(logits, tau, delta)
    outputs = (pick(log_probs, target), log_probs.mean(1))
    pairs = [(o, u) for o, u in zip(outputs, upstream, strict=True) if u is not None]
    outputs, upstream = zip(*pairs, strict=True)
    return torch.autograd.grad(outputs, logits, upstream, create_graph=True)[0]
