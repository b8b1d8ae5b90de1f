"""The two numbers that every loss is computed from, with the clip: `log p_y` and the sum over classes of `log p_k`.

`row_log_probs` has a plain form that works everywhere, and one for the CPU with a gradient in closed form: it
processes rows in blocks that stay in the cache, and stores no [N, K] array besides the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from logitclip.clip import (
    Clip,
    apply_clip,
    clip_factor,
    eager_on_cpu,
    full_precision,
    needs_plain_form,
    plain_clip,
    plain_gradient,
    radial,
    takes_closed_form,
    wants_plain_gradient,
)

BLOCK = 256 * 1024  # entries in a block: a few of them fit the second-level cache
PRODUCT = 64 * 1024  # entries of a block that are multiplied at a time where only their sums are needed
KEPT = 1024 * 1024  # exponentials kept for the backward pass; where there are more, they are computed again
MIN_BLOCKED = 64 * 1024  # entries below which, with nothing to clip, torch's own log_softmax is as fast
EXP_SAFE = 40.0  # exp of a clipped logit needs no shift by the row's maximum below this
LOG2_E = math.log2(math.e)  # exp(x) = exp2(x LOG2_E), and exp2 takes half the time on CPUs


def row_log_probs(
    logits: Tensor, target: Tensor, clip: Clip | None = None, *, total: bool = True
) -> tuple[Tensor, Tensor | None]:
    """`log p_y` and the sum of `log p_k` over the classes, with `p = softmax(clip(z))`.

    Args:
        logits: [..., K].
        target: [...] class indices.
        clip: the clip, or None.
        total: False skips the second number, which many losses do not need.

    Returns:
        Two tensors of shape [...] (the second is None without `total`), in float32 for half-precision logits.

    Raises:
        ValueError: if the shapes do not fit.

    >>> row_log_probs(torch.zeros(1, 4), torch.tensor([2]))
    (tensor([-1.3863]), tensor([-5.5452]))
    """
    if target.shape != logits.shape[:-1]:
        raise ValueError(f"target must have the shape {tuple(logits.shape[:-1])}, got {tuple(target.shape)}.")
    logits = full_precision(logits)
    classes = logits.shape[-1]
    if takes_closed_form(logits, 2.0 if clip is None else clip.p) and (
        clip is not None or logits.numel() >= MIN_BLOCKED
    ):
        if logits.ndim == 2:
            log_p, mean = _Blocked.apply(logits, target, clip, total)
            return log_p, mean * classes if total else None
        log_p, mean = _Blocked.apply(logits.reshape(-1, classes), target.flatten(), clip, total)
        return log_p.view(target.shape), (mean * classes).view(target.shape) if total else None
    log_probs = clipped_log_probs(logits, clip)
    return pick(log_probs, target), sum_log_probs(log_probs) / classes * classes if total else None


def sum_log_probs(log_probs: Tensor, *, keepdim: bool = False) -> Tensor:
    """The sum over the last dimension, where masked classes, with -inf, count as 0."""
    total = log_probs.sum(-1, keepdim=keepdim)
    if eager_on_cpu(total) and not needs_plain_form(total.neg()):
        return total
    return log_probs.nan_to_num(nan=math.nan, posinf=math.inf, neginf=0.0).sum(-1, keepdim=keepdim)


def pick(log_probs: Tensor, target: Tensor) -> Tensor:
    """The entries of `log_probs` [..., K] at `target` [...]."""
    return log_probs.gather(-1, target.unsqueeze(-1)).squeeze(-1)


def clipped_log_probs(logits: Tensor, clip: Clip | None) -> Tensor:
    """`log softmax(clip(z))` over the last dimension, [..., K]; half precision is computed in float32."""
    logits = full_precision(logits)
    return torch.log_softmax(logits if clip is None else apply_clip(logits, clip), dim=-1)


class _Blocked(torch.autograd.Function):
    """The closed form. With s = delta/|z| for clipped rows and 1 for the others, z' = s z and e = exp z':

    log p_y = z'_y - log sum e and mean log p = mean z' - log sum e. For upstream gradients g of the first and h of the
    second, dz' = g 1_y + h/K - (g + h) e / sum e, and dz = s dz'; for clipped rows, minus its
    component along z, s (dz'.z) z/|z|^2. Numbers per row are columns [N, 1].
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, clip: Clip | None, mean: bool):
        index = target.unsqueeze(1)
        at_target = logits.gather(1, index)
        ctx.clip = clip
        ctx.set_materialize_grads(False)
        exps, norm, scale, shift, total, dot, average = _statistics(logits, clip, mean)
        # Without a clip masked classes affect only the mean.
        unbounded = norm if norm is not None else None if average is None else average.neg()
        ctx.plain = unbounded is not None and needs_plain_form(unbounded)
        if ctx.plain:
            ctx.save_for_backward(logits, index, *[None] * 8)
            log_p, mean_log_p = _plain(logits, target, clip)
            return log_p, mean_log_p if mean else None
        log_total = total.log()
        log_p = _exponent(at_target, scale, shift).div_(LOG2_E) - log_total
        log_p.clamp_(max=0)  # p_y must not round to above 1
        mean_log_p = None if average is None else (average - log_total).squeeze(1)
        ctx.save_for_backward(logits, index, at_target, exps, norm, scale, shift, total, dot, average)
        ctx.overwritten = exps is None
        return log_p.squeeze(1), mean_log_p

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, h: Tensor | None):  # type: ignore[override]
        logits, index, at_target, exps, norm, scale, shift, total, dot, average = ctx.saved_tensors
        clip = ctx.clip
        upstream = h if g is None else g
        if upstream is None:
            return None, None, None, None
        if ctx.plain or wants_plain_gradient(upstream):
            grad = plain_gradient(lambda z: _plain(z, index.squeeze(1), clip), logits, [g, h])
            return grad, None, None, None
        g = torch.zeros_like(total) if g is None else g.unsqueeze(1)
        h = None if h is None else h.unsqueeze(1)
        sg, sh = (g, h) if scale is None else (g * scale, None if h is None else h * scale)
        weight = (sg if sh is None else sg + sh) / total
        along = even = None
        if clip is not None:
            along = (weight * dot).addcmul_(sg, at_target, value=-1)
            if h is not None:
                along.addcmul_(h, average if shift is None else average + shift, value=-1)
            along = radial(along, norm, clip.tau)
        if sh is not None:
            even = sh / logits.shape[1]
        # The gradient is written over the exponentials (`data`: they are saved, but never read again), unless they
        # were not kept, or have become the gradient in an earlier pass over a retained graph.
        missing, ctx.overwritten = ctx.overwritten, True
        grad = torch.empty_like(logits) if missing else exps.data
        for out, z, s, m, w, a, c in _blocks(grad, logits, scale, shift, weight.neg_(), along, even):
            if missing:
                torch.exp2(_exponent(z, s, m, out), out=out)
            out.mul_(w)
            if a is not None:
                out.addcmul_(z, a)
            if c is not None:
                out.add_(c)
        grad.scatter_add_(1, index, sg)
        return grad, None, None, None


def _statistics(logits: Tensor, clip: Clip | None, mean: bool) -> tuple[Any, ...]:
    """e = exp(s z - shift), or None if there are too many, and columns: norm, s, shift, the sums of e and of e z, the
    mean of s z - shift. Values that are not needed are None."""
    if logits.numel() <= BLOCK:
        return _block_statistics(logits, clip, mean)
    keep = logits.numel() <= KEPT
    exps = torch.empty_like(logits if keep else logits[: _rows(logits)])
    blocks = [
        _block_statistics(z, clip, mean, out=exps[: len(z)] if e is None else e)[1:]
        for z, e in _blocks(logits, exps if keep else None)
    ]
    columns = (None if column[0] is None else torch.cat(column) for column in zip(*blocks, strict=True))
    return exps if keep else None, *columns


def _block_statistics(z: Tensor, clip: Clip | None, mean: bool, out: Tensor | None = None) -> tuple[Any, ...]:
    norm = scale = shift = dot = None
    if clip is not None:
        norm = torch.linalg.vector_norm(z, dim=1, keepdim=True)
        scale = clip_factor(norm, clip)
    if clip is None or max(clip.tau, clip.delta) > EXP_SAFE:
        shift = z.amax(1, keepdim=True)
        shift = shift if scale is None else shift * scale
    e = _exponent(z, scale, shift, out)
    average = e.mean(1, keepdim=True).div_(LOG2_E) if mean else None
    total = e.exp2_().sum(1, keepdim=True)
    if clip is not None:
        dot = _row_dots(e, z)
    return e, norm, scale, shift, total, dot, average


def _row_dots(a: Tensor, b: Tensor) -> Tensor:
    """The dot product of each row of `a` with that of `b`, a column.

    A product as large as a block would not stay with malloc, which returns it to the OS; the next step page-faults.
    """
    if a.numel() <= PRODUCT:
        return (a * b).sum(1, keepdim=True)
    step = max(1, PRODUCT // a.shape[1])
    pieces = zip(a.split(step), b.split(step), strict=True)
    return torch.cat([(x * y).sum(1, keepdim=True) for x, y in pieces])


def _exponent(z: Tensor, scale: Tensor | None, shift: Tensor | None, out: Tensor | None = None) -> Tensor:
    """`(s z - shift) log2(e)`, to be used by exp2."""
    if shift is None and scale is not None:
        return torch.mul(z, scale * LOG2_E, out=out)
    z = z if scale is None else torch.mul(z, scale, out=out)
    return torch.sub(z, shift, out=out).mul_(LOG2_E)  # type: ignore[arg-type]


def _blocks(matrix: Tensor, *others: Tensor | None) -> Iterable[tuple[Any, ...]]:
    """The same rows of every argument, as many at a time as make a block of the first."""
    if matrix.numel() <= BLOCK:
        return [(matrix, *others)]
    step = _rows(matrix)
    return (
        tuple(None if t is None else t[i : i + step] for t in (matrix, *others)) for i in range(0, len(matrix), step)
    )


def _rows(matrix: Tensor) -> int:
    return max(1, BLOCK // matrix.shape[1])


def _plain(z: Tensor, target: Tensor, clip: Clip | None) -> list[Tensor]:
    log_probs = torch.log_softmax(z if clip is None else plain_clip(z, clip), dim=1)
    return [pick(log_probs, target), sum_log_probs(log_probs) / z.shape[1]]
