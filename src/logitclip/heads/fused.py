"""From a criterion on the logits of a linear layer to blocks of rows, with the gradients computed beside the values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from logitclip.clip import Clip, clip_factor, eager_on_cpu
from logitclip.criterion import Loss
from logitclip.heads.blocks import BlockedHead, Gradients, LinearTerms, Shard, add_product, block_size, row_blocks
from logitclip.losses.contract import call, evaluate, wanted_statistics
from logitclip.losses.reduction import check_weights, denominator, reduce, weights_of
from logitclip.losses.targets import check_target

Compute = Callable[[Tensor, Tensor, Tensor | None, Tensor | None, tuple[bool, ...]], tuple[Tensor, Gradients]]


def check_layer(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if weight.ndim != 2 or hidden.ndim < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"Hidden states [..., D] and a weight [K, D] do not fit: got {tuple(hidden.shape)} and "
            f"{tuple(weight.shape)}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"The bias must have the shape {tuple(weight.shape[:1])}, got {tuple(bias.shape)}.")


def check_unmasked(bias: Tensor | None) -> None:
    if bias is not None and eager_on_cpu(bias) and bias.isneginf().any():  # elsewhere it would wait for the device
        raise ValueError("With a clip the bias must be finite, got -inf: to mask a class, use LogitClip on the logits.")


def _eager_loss(
    criterion: Loss | Callable[[], Loss],
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    clip: Clip | None,
    example_weight: Tensor | None,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """Return the reduced loss of `criterion` on the logits of a linear layer."""
    if not isinstance(criterion, Loss):  # made here, as torch.compile cannot trace that
        criterion = criterion()
    check_layer(hidden, weight, bias)
    shard = Shard(len(weight), weight.device, group)
    shape = hidden.shape[:-1]
    logits = weight.new_empty(()).expand(*shape, shard.num_classes)  # their shape, without their memory
    target, kept = check_target(logits, target, criterion.ignore_index)
    class_weight = criterion.weight
    check_weights(logits.shape, class_weight, example_weight)

    if torch.is_grad_enabled():
        for name, x in (("target", target), ("example_weight", example_weight), ("class weight", class_weight)):
            if x is not None and x.requires_grad:
                raise ValueError(f"{name} would get no gradient here: detach it, or use LogitClip on the logits.")

    soft = target.is_floating_point()
    rows = hidden.reshape(-1, hidden.shape[-1])
    target = target.reshape(-1, shard.num_classes) if soft else target.flatten()
    row_weight = None if example_weight is None else example_weight.flatten()
    index = None if kept is None else kept.flatten().nonzero().squeeze(1)
    if index is not None:  # rows that do not count cost nothing
        rows, target = rows[index], target[index]
        row_weight = None if row_weight is None else row_weight[index]
    dtype = _compute_dtype(hidden, weight)
    full = torch.promote_types(dtype, torch.float32)
    row_weight = None if row_weight is None else row_weight.to(full)

    takes = criterion.function.takes
    kind = _ByAutograd if soft or takes[0] != "log_p" or "state" in takes else _ClosedForm
    if clip is not None and kind is _ClosedForm:
        check_unmasked(bias)
    run = kind(criterion, target, clip, row_weight, dtype, shard)
    values = _FusedLoss.apply(run, torch.is_grad_enabled() and criterion.reduction != "none", rows, weight, bias)
    if criterion.reduction != "none":
        return values
    return (values if index is None else values.new_zeros(shape.numel()).index_copy(0, index, values)).view(shape)


layer_loss: Any = torch.compiler.disable(_eager_loss)  # a graph break around blocks and chunks


def _compute_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype of the matrix products. Gradients with respect to logits are below the range of float16."""
    device, dtype = weight.device.type, torch.promote_types(hidden.dtype, weight.dtype)
    if dtype != torch.float64 and torch.is_autocast_enabled(device):  # autocast leaves float64 alone
        dtype = torch.get_autocast_dtype(device)
    return torch.float32 if dtype == torch.float16 else dtype


class _FusedLoss(torch.autograd.Function):
    """A function that computes its gradient together with its value.

    `run(hidden, weight, bias, upstream, needs)` returns the values and the gradients that are needed, for an upstream
    gradient of 1 if it is None. Without `eager`, and when the backward pass is repeated, it runs again.
    """

    @staticmethod
    def forward(ctx: Any, run: Compute, eager: bool, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        needs = ctx.needs_input_grad[2:] if eager else (False,) * 3
        values, gradients = _run(run, hidden, weight, bias, None, needs)
        ctx.run, ctx.gradients = run, gradients if eager else None
        ctx.save_for_backward(hidden, weight, bias)
        return values

    @staticmethod
    def backward(ctx: Any, upstream: Tensor):  # type: ignore[override]
        if torch.is_grad_enabled():
            raise RuntimeError(
                "The loss of a linear layer without its logits has no second derivative: use LogitClip on the logits."
            )
        gradients, ctx.gradients = ctx.gradients, None  # autograd may write into them after this
        if gradients is None:
            _, gradients = _run(ctx.run, *ctx.saved_tensors, upstream, ctx.needs_input_grad[2:])
        elif not upstream.is_cpu or upstream != 1:
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(upstream)
        return None, None, *gradients


def _run(run: Compute, hidden: Tensor, weight: Tensor, bias: Tensor | None, *args: Any) -> tuple[Tensor, list[Any]]:
    """`run`, outside autocast, with gradients in the dtypes of their arguments.

    For float16 they stay float32, and autograd converts them when they have been multiplied by the upstream gradient:
    without the factor of a `GradScaler`, small ones would be lost.
    """
    arguments: Any = [None if x is None else x.detach() for x in (hidden, weight, bias)]
    with torch.autocast(weight.device.type, enabled=False):
        values, gradients = run(*arguments, *args)
    pairs = zip(gradients, arguments, strict=True)
    return values, [g if g is None or x.dtype == torch.float16 else g.to(x.dtype) for g, x in pairs]


# -- a loss of a linear layer, block by block --------------------------------------------------------------------------


@dataclass
class _LayerLoss:
    """A `Compute`: the loss of `criterion` on the logits of a linear layer, with its gradients.

    Attributes:
        criterion: The loss.
        target: Classes [N], or probabilities [N, K].
        clip: The clip of the logits.
        row_weight: Weights of the rows [N].
        dtype: Type of the matrix products; statistics of rows have `full`, which is at least float32.
        shard: The classes of this process.
    """

    criterion: Loss
    target: Tensor
    clip: Clip | None
    row_weight: Tensor | None
    dtype: torch.dtype
    shard: Shard

    def __post_init__(self) -> None:
        self.full = torch.promote_types(self.dtype, torch.float32)
        # With class weights, `nn.CrossEntropyLoss` weights the smoothed part class by class, which phi cannot do.
        self.smoothing = self.criterion.smoothing
        self.knobs = {} if self.smoothing else dict(self.criterion.knobs)

    def _upstream(self, upstream: Tensor | None, result: Tensor, rows: slice) -> Tensor:
        """Return the upstream gradient of the values of a block."""
        if upstream is None:
            return torch.ones_like(result)
        return upstream.expand(len(self.target))[rows].to(self.full)


class _ClosedForm(_LayerLoss):
    """Losses of statistics of a row, in terms of four numbers per row.

    These are the norm n of the logits z, L = log sum exp(s z) with s the factor of the clip, z_y, and the mean v.z with
    v = 1/K. Then log p_y = s z_y - L, the mean log-probability is s v.z - L sum v, and dL = s p, dn = z / n. The other
    two are linear in the hidden states: z_y = W_y h + b_y and v.z = (v W) h + v.b.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        criterion, target = self.criterion, self.target
        # A memory observes the rows of all blocks at once, and only once if backward is repeated.
        self.seen: list[Tensor] | None = None if criterion.memory is None else []
        self.wanted = wanted_statistics(criterion.function, self.knobs)
        self.sums = self.wanted.sums()
        self.class_weight = None if criterion.weight is None else criterion.weight.to(self.full)
        self.of_class = None if self.class_weight is None else self.class_weight[target]
        if criterion.reduction == "mean":  # divided here, not at the end: the gradients are computed with the values
            ones = torch.ones(len(target), dtype=self.full, device=target.device)
            row_weight = ones if self.row_weight is None else self.row_weight
            counted = weights_of(ones, target, row_weight, None, None, self.class_weight)
            self.row_weight = row_weight / denominator(ones if counted is None else counted)

    def __call__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, upstream: Tensor | None, needs: tuple[bool, ...]
    ) -> tuple[Tensor, Gradients]:
        hidden, bias = hidden.to(self.dtype), None if bias is None else bias.to(self.full)
        terms = LinearTerms(hidden, weight, bias, self.target, self._class_shares(weight), self.shard)
        tops = bool({"max_log_p", "is_max"} & set(self.wanted.names))
        head = BlockedHead(hidden, weight, bias, self.clip, needs, self.shard, tuple(self.sums.values()), tops)
        values = torch.empty(len(hidden), dtype=self.full, device=weight.device)
        for rows in head.blocks:
            result, leaves = self._values(head, terms, rows, any(needs))
            values[rows] = result.detach()
            if any(needs):
                ones = self._upstream(upstream, result, rows)
                given = [leaf for leaf in leaves if leaf is not None]
                found = iter(torch.autograd.grad(result, given, ones, allow_unused=True, materialize_grads=True))
                each: Any = (None if leaf is None else next(found) for leaf in leaves)
                d_y, d_log_total, d_norm, d_mean, d_top, *d_sums = each
                if d_mean is not None:
                    terms.d_mean[rows] = d_mean
                picks = [(self.target[rows], d_y), *([] if d_top is None else [(head.at_top, d_top)])]
                head.add_gradients(picks, d_log_total, d_norm, d_sums)
        if self.seen:
            self.criterion.memory.observe(torch.cat(self.seen))
            self.seen = None
        gradients = terms.add_to(head.d_hidden, head.d_weight, head.d_bias)
        return values if self.criterion.reduction == "none" else values.sum(), gradients

    def _class_shares(self, weight: Tensor) -> Tensor | None:
        """v: the share of each class of this process in the mean log-probability; None if no mean is needed."""
        if not self.smoothing and "sum_log_p" not in self.wanted.names:
            return None
        v = torch.full((len(weight),), 1 / self.shard.num_classes, dtype=self.full, device=weight.device)
        if self.smoothing and self.class_weight is not None:
            v *= self.class_weight[self.shard.first : self.shard.first + len(weight)]
        return v

    def _values(
        self, head: BlockedHead, terms: LinearTerms, rows: slice, grad: bool
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Return the weighted losses of a block, and the numbers per row that they are computed from."""
        norm, log_total, expected = head.statistics(rows)
        of_sums = head.sum_statistics(log_total)
        z_y, mean = terms.at_target[rows], None if terms.mean is None else terms.mean[rows]
        z_top = head.z_top if head.wants_top else None
        leaves = [z_y, log_total, norm, mean, z_top, *(value for value, _, _ in of_sums)]
        for leaf in leaves:
            if leaf is not None:
                leaf.requires_grad_(grad)
        with torch.set_grad_enabled(grad):
            scale, moved = 1.0, 0.0
            if norm is not None and self.clip is not None:
                scale = clip_factor(norm, self.clip)
                moved = scale - scale.detach()
                if expected is not None:  # dL/ds is the expectation of z under p
                    log_total = log_total + expected * moved
            log_p = _at_most_0(scale * z_y - log_total)
            found = {"classes": torch.full_like(head.log_total, self.shard.num_classes)}
            if z_top is not None:
                top = scale * z_top - log_total
                found |= {"max_log_p": top, "is_max": (head.at_top == self.target[rows]).to(top.dtype)}
            for name, (leaf, slopes, along) in zip(self.sums, of_sums, strict=True):
                found[name] = leaf - slopes * (log_total - log_total.detach()) + along * moved
            mean_log_p = None if mean is None else scale * mean - terms.v_sum * log_total
            return self._loss(log_p, mean_log_p, found, rows), leaves

    def _loss(self, log_p: Tensor, mean_log_p: Tensor | None, found: dict[str, Tensor], rows: slice) -> Tensor:
        criterion, smoothing = self.criterion, self.smoothing
        if mean_log_p is not None:
            found["sum_log_p"] = self.shard.num_classes * mean_log_p
        if self.seen is not None and log_p.requires_grad:
            self.seen.append(log_p.detach())
        value = call(criterion.function, log_p, found, self.knobs, criterion.memory)
        if self.of_class is not None:
            value = value * self.of_class[rows]
        if smoothing and mean_log_p is not None:  # with class weights, v has them
            value = (1 - smoothing) * value - smoothing * mean_log_p
        return value if self.row_weight is None else value * self.row_weight[rows]


def _at_most_0(log_p: Tensor) -> Tensor:
    """p must not round to above 1; the gradient stays."""
    return log_p - log_p.detach().clamp_min(0)


class _ByAutograd(_LayerLoss):
    """Losses of all log-probabilities, and probability targets: autograd differentiates the logits of a block."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.soft = self.target.is_floating_point()
        self.learns = torch.is_grad_enabled()  # not from a loss for validation
        if self.shard.group is not None:
            what = "Probability targets" if self.soft else self.criterion.name
            raise ValueError(f"{what} cannot be used with sharded classes: all classes of a row are needed at once.")

    def __call__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, upstream: Tensor | None, needs: tuple[bool, ...]
    ) -> tuple[Tensor, Gradients]:
        hidden, w = hidden.to(self.dtype), weight.to(self.dtype)
        zeros = partial(torch.zeros, dtype=self.full, device=weight.device)
        values, weights = zeros(len(hidden)), zeros(len(hidden))
        d_hidden = zeros(hidden.shape) if needs[0] else None
        d_weight = zeros(weight.shape) if needs[1] else None
        d_bias = zeros(len(weight)) if bias is not None and needs[2] else None
        for rows in row_blocks(len(hidden), -(-block_size(len(hidden), len(weight)) // 4)):
            h = hidden[rows]
            logits = (h @ w.t()).to(self.full)
            if bias is not None:
                logits += bias
            with torch.set_grad_enabled(any(needs)):
                value, weights[rows] = self._values(logits.requires_grad_(any(needs)), rows, count=upstream is None)
                result = value * weights[rows]
            values[rows] = value.detach()
            if any(needs):
                dz = torch.autograd.grad(result, logits, self._upstream(upstream, result, rows))[0]
                if d_bias is not None:
                    d_bias += dz.sum(0)
                dz = dz.to(self.dtype)
                if d_hidden is not None:
                    add_product(dz, w, d_hidden[rows])
                if d_weight is not None:
                    add_product(dz.t(), h, d_weight)
        gradients = d_hidden, d_weight, d_bias
        if self.criterion.reduction == "mean":
            for gradient in gradients:
                if gradient is not None:
                    gradient /= denominator(weights)
        return reduce(values, weights, self.criterion.reduction), gradients

    def _values(self, logits: Tensor, rows: slice, count: bool) -> tuple[Tensor, Tensor]:
        """Return the losses of a block, and their weights."""
        criterion, y, knobs = self.criterion, self.target[rows], self.knobs
        if self.soft and self.smoothing:
            y = y * (1 - self.smoothing) + self.smoothing / self.shard.num_classes
        state = criterion.training_state()
        values, own = evaluate(criterion.function, logits, y, knobs, self.clip, criterion.weight, state)
        if own is not None and count and self.learns:
            criterion.count_removed(own, y)
        row_weight = None if self.row_weight is None else self.row_weight[rows]
        weights = weights_of(values, y, own, row_weight, None, criterion.weight)
        return values, torch.ones_like(values) if weights is None else weights
