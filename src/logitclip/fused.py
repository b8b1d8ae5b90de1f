"""The numbers that every loss is computed from, with the clip: `log p_y`, the sum over classes of `log p_k`, and more.

`row_log_probs` has a plain form that works everywhere, and one for the CPU with a gradient in closed form: it
processes rows in blocks that stay in the cache, and stores no [N, K] array besides the gradient. `STATISTICS`
says which numbers there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

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

BLOCK_ENTRIES = 256 * 1024  # entries in a block: a few of them fit the second-level cache
PRODUCT = 64 * 1024  # entries of a block that are multiplied at a time where only their sums are needed
MOST_EXPONENTIALS = 1024 * 1024  # kept for the backward pass; where there are more, they are computed again
MIN_BLOCKED = 64 * 1024  # entries below which, with nothing to clip, torch's own log_softmax is as fast
EXP_SAFE = 40.0  # exp of a clipped logit needs no shift by the row's maximum below this
LOG2_E = math.log2(math.e)  # exp(x) = exp2(x LOG2_E), and exp2 takes half the time on CPUs


# -- what a loss may ask for -------------------------------------------------------------------------------------------

LOG_FLOOR = math.log(1e-7)  # floor of log p_k in the losses of the active negative family


class RowSum(NamedTuple):
    """A number per row of the form `sum_k f(log p_k)`; masked classes count as 0."""

    value: Callable[..., Tensor]  # f, elementwise
    slope: Callable[..., Tensor]  # what the gradient takes for its derivative
    knobs: tuple[str, ...] = ()  # knobs of the loss that f depends on


def _focal_weight(x: Tensor, gamma: float) -> Tensor:
    """(1-p)^gamma, which the gradient takes for a constant, as the authors' code does."""
    return torch.expm1(x.detach()).neg_().clamp_min(torch.finfo(x.dtype).tiny) ** gamma


def _focal_above_floor(x: Tensor, gamma: float) -> Tensor:
    highest = -((1 - math.exp(LOG_FLOOR)) ** gamma) * LOG_FLOOR
    floored = x.clamp_min(LOG_FLOOR)
    return highest + _focal_weight(floored, gamma) * floored


SUMS: dict[str, RowSum] = {
    "sum_p2": RowSum(lambda x: torch.exp(2 * x), lambda x: 2 * torch.exp(2 * x)),
    "sum_p_log_p": RowSum(lambda x: x * x.exp(), lambda x: (1 + x) * x.exp()),
    "sum_above_floor": RowSum(lambda x: (x - LOG_FLOOR).relu(), lambda x: (x > LOG_FLOOR).to(x.dtype)),
    "sum_focal": RowSum(
        lambda x, gamma: _focal_weight(x, gamma) * -x, lambda x, gamma: -_focal_weight(x, gamma), ("gamma",)
    ),
    "sum_focal_above_floor": RowSum(
        _focal_above_floor, lambda x, gamma: _focal_weight(x, gamma) * (x > LOG_FLOOR), ("gamma",)
    ),
}
STATISTICS = {  # a loss names what it needs; only that is computed
    "sum_log_p": "sum of log p_k over the classes",
    "max_log_p": "largest log p_k",
    "is_max": "1 if the label is the (first) class with the largest probability, else 0",
    "classes": "number of classes that are not masked",
    "sum_p2": "sum of p_k^2",
    "sum_p_log_p": "sum of p_k log p_k, the negative entropy",
    "sum_above_floor": "sum of max(log p_k - log 1e-7, 0)",
    "sum_focal": "sum of -(1-p_k)^gamma log p_k; the weights are constants in the gradient",
    "sum_focal_above_floor": "the largest focal loss, at p = 1e-7, less that of p_k: the sum where this is positive",
}


class Wanted(NamedTuple):
    """The numbers that a loss needs besides log p_y, with the knobs that some of them depend on."""

    names: tuple[str, ...] = ()
    knobs: Mapping[str, Any] = {}

    def sums(self) -> dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]]:
        """f and its slope, with their knobs, of each sum."""
        bound = {}
        for name in self.names:
            if name in SUMS:
                value, slope, knobs = SUMS[name]
                given = {knob: self.knobs[knob] for knob in knobs}
                bound[name] = (partial(value, **given), partial(slope, **given)) if given else (value, slope)
        return bound


ONLY_TARGET, WITH_SUM = Wanted(), Wanted(("sum_log_p",))


def row_log_probs(
    logits: Tensor, target: Tensor, clip: Clip | None = None, wanted: Wanted = WITH_SUM
) -> tuple[Tensor, ...]:
    """`log p_y` and other numbers per row, with `p = softmax(clip(z))`.

    Args:
        logits: [..., K].
        target: [...] class indices.
        clip: The clip, or None.
        wanted: Names from `STATISTICS`.

    Returns:
        `log p_y` and then the wanted numbers, tensors of shape [...]; float32 for half-precision logits.

    Raises:
        ValueError: If the shapes do not fit.

    >>> row_log_probs(torch.zeros(1, 4), torch.tensor([2]))
    (tensor([-1.3863]), tensor([-5.5452]))
    """
    if target.shape != logits.shape[:-1]:
        raise ValueError(f"target must have the shape {tuple(logits.shape[:-1])}, got {tuple(target.shape)}.")
    logits = full_precision(logits)
    if takes_closed_form(logits, 2.0 if clip is None else clip.p) and (
        clip is not None or logits.numel() >= MIN_BLOCKED
    ):
        if logits.ndim == 2:
            return _closed_form(logits, target, clip, wanted)
        flat = _closed_form(logits.reshape(-1, logits.shape[-1]), target.flatten(), clip, wanted)
        return tuple(x.view(target.shape) for x in flat)
    log_probs = clipped_log_probs(logits, clip)
    found = statistics_of(log_probs, logits, wanted)
    if "sum_log_p" in found:
        found["sum_log_p"] = found["sum_log_p"] / logits.shape[-1] * logits.shape[-1]  # rounded as in the closed form
    if "is_max" in found:
        found["is_max"] = pick(found["is_max"], target)
    return (pick(log_probs, target), *(x if n == "is_max" else x.squeeze(-1) for n, x in found.items()))


def statistics_of(log_probs: Tensor, logits: Tensor, wanted: Wanted) -> dict[str, Tensor]:
    """Return the wanted numbers from all log-probabilities [..., K], in plain operations: [..., 1]; is_max has K."""
    found: dict[str, Tensor] = {}
    sums = wanted.sums()
    masked = log_probs.isneginf() if set(wanted.names) - {"sum_log_p"} else None
    for name in wanted.names:
        if name == "sum_log_p":
            found[name] = sum_log_probs(log_probs, keepdim=True)
        elif name == "max_log_p":
            found[name] = log_probs.gather(-1, logits.argmax(-1, keepdim=True))
        elif name == "is_max":
            top = logits.argmax(-1, keepdim=True)
            found[name] = torch.zeros_like(log_probs).scatter(-1, top, 1.0)
        elif name == "classes":
            found[name] = (~masked).sum(-1, keepdim=True).to(log_probs.dtype)  # type: ignore[operator]
        else:
            terms = sums[name][0](log_probs.masked_fill(masked, -1.0))  # type: ignore[arg-type]
            found[name] = terms.masked_fill(masked, 0.0).sum(-1, keepdim=True)  # type: ignore[arg-type]
    return found


def _closed_form(logits: Tensor, target: Tensor, clip: Clip | None, wanted: Wanted) -> tuple[Tensor, ...]:
    names = wanted.names
    if not names:
        return (_RowLogProbs.apply(logits, target, clip, False, False, ())[0],)
    sums = wanted.sums()
    top = "max_log_p" in names
    mean = "sum_log_p" in names or bool(sums) or top  # also tells whether a class is masked
    outputs = _RowLogProbs.apply(logits, target, clip, mean, top, tuple(sums.values()))
    of_sums = dict(zip(sums, outputs[3:], strict=True))
    found = [outputs[0]]
    for name in names:
        if name == "sum_log_p":
            found.append(outputs[1] * logits.shape[1])
        elif name == "max_log_p":
            found.append(outputs[2])
        elif name == "is_max":
            found.append((logits.argmax(1) == target).to(logits.dtype))
        elif name == "classes":
            masked = needs_plain_form(logits.amin(1).neg())
            found.append(
                (~logits.isneginf()).sum(1).to(logits.dtype)
                if masked
                else torch.full_like(outputs[0], logits.shape[1], requires_grad=False)
            )
        else:
            found.append(of_sums[name])
    return tuple(found)


def sum_log_probs(log_probs: Tensor, *, keepdim: bool = False) -> Tensor:
    """Return the sum over the last dimension, where masked classes, with -inf, count as 0."""
    total = log_probs.sum(-1, keepdim=keepdim)
    if eager_on_cpu(total) and not needs_plain_form(total.neg()):
        return total
    return log_probs.nan_to_num(nan=math.nan, posinf=math.inf, neginf=0.0).sum(-1, keepdim=keepdim)


def pick(log_probs: Tensor, target: Tensor) -> Tensor:
    """Return the entries of `log_probs` [..., K] at `target` [...]."""
    return log_probs.gather(-1, target.unsqueeze(-1)).squeeze(-1)


def clipped_log_probs(logits: Tensor, clip: Clip | None) -> Tensor:
    """`log softmax(clip(z))` over the last dimension, [..., K]; half precision is computed in float32."""
    logits = full_precision(logits)
    return torch.log_softmax(logits if clip is None else apply_clip(logits, clip), dim=-1)


class _RowLogProbs(torch.autograd.Function):
    """The closed form. With s = delta/|z| for clipped rows and 1 for the others, z' = s z and e = exp z':

    log p_y = z'_y - log sum e and mean log p = mean z' - log sum e. For upstream gradients g of the first and h of the
    second, dz' = g 1_y + h/K - (g + h) e / sum e, and dz = s dz'; for clipped rows, minus its component along z,
    s (dz'.z) z/|z|^2. Numbers per row are columns [N, 1].

    The largest log-probability is one more log p at a class, with a g of its own. A sum over k of f(log p_k) with
    upstream gradient q adds q (f'(log p_k) - p_k S) to dz', where S is the sum of f'.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, clip: Clip | None, mean: bool, top: bool, sums: tuple[Any, ...]
    ):
        index = target.unsqueeze(1)
        at_target = logits.gather(1, index)
        ctx.clip, ctx.top, ctx.sums = clip, top, sums
        ctx.set_materialize_grads(False)
        exps, norm, scale, shift, total, dot, average = _statistics(logits, clip, mean)
        # Without a clip masked classes affect only the mean.
        unbounded = norm if norm is not None else None if average is None else average.neg()
        ctx.plain = unbounded is not None and needs_plain_form(unbounded)
        if ctx.plain:
            ctx.save_for_backward(logits, index, *[None] * 8)
            log_p, mean_log_p, max_log_p, *values = _plain(logits, target, clip, sums)
            return log_p, mean_log_p if mean else None, max_log_p if top else None, *values
        log_total = total.log()
        log_p = _exponent(at_target, scale, shift).div_(LOG2_E) - log_total
        log_p.clamp_(max=0)  # p_y must not round to above 1
        mean_log_p = None if average is None else (average - log_total).squeeze(1)
        max_log_p, more = None, []
        if top:
            at_max, index_max = logits.max(1, keepdim=True)
            max_log_p = (_exponent(at_max, scale, shift).div_(LOG2_E) - log_total).clamp_(max=0).squeeze(1)
            more += [index_max, at_max]
        values = []
        for value, slope, along in _sums(logits, scale, shift, log_total, sums) if sums else ():
            values.append(value.squeeze(1))
            more += [slope, along]
        ctx.save_for_backward(logits, index, at_target, exps, norm, scale, shift, total, dot, average, *more)
        ctx.overwritten = exps is None
        return log_p.squeeze(1), mean_log_p, max_log_p, *values

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, d_target: Tensor | None, d_mean: Tensor | None, d_max: Tensor | None, *d_sums: Tensor | None
    ):
        logits, index, at_target, exps, norm, scale, shift, total, dot, average, *more = ctx.saved_tensors
        clip, nothing = ctx.clip, (None,) * 5
        upstream = next((x for x in (d_target, d_mean, d_max, *d_sums) if x is not None), None)
        if upstream is None:
            return None, *nothing
        if ctx.plain or wants_plain_gradient(upstream):
            plain = lambda z: _plain(z, index.squeeze(1), clip, ctx.sums)  # noqa: E731
            return plain_gradient(plain, logits, [d_target, d_mean, d_max, *d_sums]), *nothing

        def times_s(gradient: Tensor) -> Tensor:
            """An upstream gradient times s, a column: dz = s dz'."""
            return gradient.unsqueeze(1) if scale is None else gradient.unsqueeze(1) * scale

        # Each log p at a class k: (k, z_k, s g). Each sum of f: (f', s q, the sums of f' and of f' z).
        d_y = torch.zeros_like(total[:, 0]) if d_target is None else d_target
        picks, terms = [(index, at_target, times_s(d_y))], []
        if ctx.top:
            index_max, at_max, *more = more
            if d_max is not None:
                picks.append((index_max, at_max, times_s(d_max)))
        for (_, slope), gradient, slope_sum, slope_dot in zip(ctx.sums, d_sums, more[::2], more[1::2], strict=True):
            if gradient is not None:
                terms.append((slope, times_s(gradient), slope_sum, slope_dot))
        # What e is multiplied by: -s (g + h + sum of q S) / sum e, here still without its sign.
        of_exps, of_mean = picks[0][2], None if d_mean is None else times_s(d_mean)
        if of_mean is not None:
            of_exps = of_exps + of_mean
        for _, _, coefficient in picks[1:]:
            of_exps = of_exps + coefficient
        for _, coefficient, slope_sum, _ in terms:
            of_exps = of_exps + coefficient * slope_sum
        of_exps = of_exps / total
        of_logits = even = None
        if clip is not None:
            # What z is multiplied by: -s (dz'.z) / |z|^2 for clipped rows, 0 for the others.
            minus_dot = of_exps * dot
            for _, logit, coefficient in picks:
                minus_dot.addcmul_(coefficient, logit, value=-1)
            if d_mean is not None:  # s h mean z = h mean z'
                mean_clipped = average if shift is None else average + shift
                minus_dot.addcmul_(d_mean.unsqueeze(1), mean_clipped, value=-1)
            for _, coefficient, _, slope_dot in terms:
                minus_dot.addcmul_(coefficient, slope_dot, value=-1)
            of_logits = radial(minus_dot, norm, clip.tau)
        if of_mean is not None:
            even = of_mean / logits.shape[1]  # s h / K, the same for all classes
        # The gradient is written over the exponentials (`data`: they are saved, but never read again), unless they
        # were not kept, or have become the gradient in an earlier pass over a retained graph.
        missing, ctx.overwritten = ctx.overwritten, True
        grad = torch.empty_like(logits) if missing else exps.data
        _write_gradient(grad, logits, missing, (scale, shift, total), (of_exps.neg_(), of_logits, even), terms)
        for at, _, coefficient in picks:
            grad.scatter_add_(1, at, coefficient)
        return grad, *nothing


def _write_gradient(
    grad: Tensor, logits: Tensor, missing: bool, rows: tuple[Any, ...], factors: tuple[Any, ...], terms: list[Any]
) -> None:
    """Write `of_exps e + of_logits z + even + sum of s q f'(log p_k)` over `grad`, which holds e unless it is missing.

    Args:
        grad: [N, K].
        logits: z, [N, K].
        missing: Whether e is to be computed again.
        rows: The columns s, shift and sum e.
        factors: The columns `of_exps`, `of_logits` and `even`; the last two may be None.
        terms: Of each sum over k of f(log p_k), f' and the column s q, and more.
    """
    scale, shift, total = rows
    log_total = total.log() if terms else None
    coefficients = [coefficient for _, coefficient, *_ in terms]
    for out, z, s, m, of_exps, of_logits, even, n, *columns in _blocks(
        grad, logits, scale, shift, *factors, log_total, *coefficients
    ):
        if missing:
            torch.exp2(_exponent(z, s, m, out), out=out)
        out.mul_(of_exps)
        if of_logits is not None:
            out.addcmul_(z, of_logits)
        if even is not None:
            out.add_(even)
        if n is not None:
            log_p = _exponent(z, s, m).div_(LOG2_E).sub_(n)
            for (slope, *_), column in zip(terms, columns, strict=True):
                out.addcmul_(slope(log_p), column)


def _sums(
    logits: Tensor, scale: Tensor | None, shift: Tensor | None, log_total: Tensor, sums: tuple[Any, ...]
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of each sum over k of f(log p_k): its value, and the sums of f' and of f' z, columns."""
    found: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in sums]
    for z, s, m, n in _blocks(logits, scale, shift, log_total):
        log_p = _exponent(z, s, m).div_(LOG2_E).sub_(n)
        for into, (value, slope) in zip(found, sums, strict=True):
            slopes = slope(log_p)
            into.append((value(log_p).sum(1, keepdim=True), slopes.sum(1, keepdim=True), _row_dots(slopes, z)))
    return [tuple(torch.cat(column) for column in zip(*of_sum, strict=True)) for of_sum in found]  # type: ignore[misc]


def _statistics(logits: Tensor, clip: Clip | None, mean: bool) -> tuple[Any, ...]:
    """e = exp(s z - shift), or None if there are too many, and columns: norm, s, shift, the sums of e and of e z, the
    mean of s z - shift. Values that are not needed are None."""
    if logits.numel() <= BLOCK_ENTRIES:
        return _block_statistics(logits, clip, mean)
    keep = logits.numel() <= MOST_EXPONENTIALS
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
    """Return the dot product of each row of `a` with that of `b`, a column.

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
    """Return the same rows of every argument, as many at a time as make a block of the first."""
    if matrix.numel() <= BLOCK_ENTRIES:
        return [(matrix, *others)]
    step = _rows(matrix)
    return (
        tuple(None if t is None else t[i : i + step] for t in (matrix, *others)) for i in range(0, len(matrix), step)
    )


def _rows(matrix: Tensor) -> int:
    return max(1, BLOCK_ENTRIES // matrix.shape[1])


def _plain(z: Tensor, target: Tensor, clip: Clip | None, sums: tuple[Any, ...]) -> list[Tensor]:
    """log p_y, the mean and the largest log-probability, and the sums, in plain operations."""
    log_probs = torch.log_softmax(z if clip is None else plain_clip(z, clip), dim=1)
    masked = log_probs.isneginf()
    return [
        pick(log_probs, target),
        sum_log_probs(log_probs) / z.shape[1],
        pick(log_probs, z.argmax(1)),
        *(value(log_probs.masked_fill(masked, -1.0)).masked_fill(masked, 0.0).sum(1) for value, _ in sums),
    ]
