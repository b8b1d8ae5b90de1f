"""The losses of a last linear layer, for up to millions of classes: the whole logits are never stored.

`linear_cross_entropy` and `LinearLogitClip` take the hidden states and the weight of the layer. Rows are processed in
blocks, and the gradient with respect to a block of logits is computed together with its loss, so that three matrix
products suffice, as without fusion. `clip_hidden` does the clip alone, for other fused kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from logitclip.clip import clip_factor, eager_on_cpu, threshold_and_scale
from logitclip.criterion import Loss, Reduction
from logitclip.fused_linear import (
    STEP,
    BlockedHead,
    Clip,
    Gradients,
    LinearTerms,
    Shard,
    add_product,
    block_size,
    row_blocks,
)
from logitclip.losses import check_target, evaluate

Run = Callable[[Tensor, Tensor, Tensor | None, Tensor | None, tuple[bool, ...]], tuple[Tensor, Gradients]]


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    tau: float | None = None,
    delta: float | None = None,
    temp: float | None = None,
    example_weight: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Cross entropy of the clipped logits `clip(W h + b)`, without storing the whole logits.

    The arguments of `torch.nn.functional.linear_cross_entropy`, and the clip of Eq. 4 with p = 2.

    Time: three matrix products of N K D multiplications, as without fusion, and two exponentials per logit. A fourth
    product with ``reduction="none"``, whose gradient has to wait for the backward pass. Memory, beyond the gradients:
    two megabytes for at most D rows, whose logits are kept where the gradient of the weight will be. For more rows,
    1/12 of the logits, at least 16 MB and at most 256 rows; below about 500 rows and above 100,000 classes, two
    megabytes and two more products, as logits are computed again. There is no second derivative.

    Args:
        input: hidden states, [..., D].
        linear_weight: [K, D].
        linear_bias: [K] or None; finite, so it cannot mask a class. With a clip, -inf is refused on a CPU and gives NaN
            elsewhere, as do logits whose norm overflows when it is squared (1.8e19 in float32).
        target: class indices [...], or probabilities [..., K].
        weight: a weight per class, [K].
        reduction: "mean", "sum" or "none". The mean divides by the sum of the weights of the class indices, or by the
            number of probability targets. The mean over nothing at all is 0, not NaN.
        ignore_index: class indices with this value do not count; None means -100.
        label_smoothing: share of the target that is spread evenly over all classes.
        tau, delta, temp: threshold and scale of the clip, or temp for both (threshold temp, scale 1/temp). Without
            them nothing is clipped.
        example_weight: a weight per example or token, [...], which also counts in the mean.
        group: processes that share the classes. Each has its own rows of `linear_weight` and `linear_bias` in the order
            of the ranks, and all have the same `input`, `target` (indices of all classes) and `weight` [K]. Each gets
            the loss, the gradient of its rows and the whole gradient of `input`.

    Returns:
        A scalar, or [...] for "none"; float32 for half-precision arguments.

    Raises:
        ValueError: if shapes do not fit, a target is out of range or an option is invalid; also if a target or a weight
            of examples or classes requires a gradient, as it would get none.

    >>> hidden, head = torch.ones(2, 3), torch.zeros(1000, 3)
    >>> linear_cross_entropy(hidden, head, torch.tensor([0, 999]), tau=1.0)
    tensor(6.9078)
    """
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing}.")
    if ignore_index is not None and target.is_floating_point():
        raise ValueError(f"ignore_index={ignore_index} needs class indices, got probability targets.")
    ignored = -100 if ignore_index is None else ignore_index
    criterion = partial(Loss, "ce", reduction=reduction, weight=weight, ignore_index=ignored)
    clip = _clip(tau, delta, temp)
    return _loss(
        criterion, input, linear_weight, linear_bias, target, clip, example_weight, group, smoothing=label_smoothing
    )


class LinearLogitClip(nn.Linear):
    """A last linear layer with any loss of the library on its clipped logits, without storing the whole logits.

    Args:
        in_features: D.
        num_classes: K.
        loss: a loss and its knobs, as in ``"gce:q=0.7"``; knobs may also be given as keywords.
        tau, delta, temp: the clip, as in `LogitClip`; without them nothing is clipped.
        bias: whether the layer has a bias.
        reduction, ignore_index: as in `Loss`.
        class_weight: a weight per class, [K].
        group: processes that share the classes, see `linear_cross_entropy`. Each owns its part of the weight: K is
            split as evenly as possible, and the first ranks have one class more. CORES cannot be shared.
        device, dtype: of the weight and the bias.
        **knobs: of the loss.

    The call takes hidden states [..., D], targets [...] (or probabilities [..., K]) and optionally `example_weight`
    [...], and returns the loss. `logits(hidden)` returns [..., K] for predictions. See `linear_cross_entropy` for time
    and memory; CORES and probability targets need four to six times the memory.

    >>> head = LinearLogitClip(3, 1000, "gce:q=0.7", tau=1.0)
    >>> loss = head(torch.ones(2, 3), torch.tensor([0, 999]))
    >>> loss.backward()
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        loss: str = "ce",
        *,
        tau: float | None = None,
        delta: float | None = None,
        temp: float | None = None,
        bias: bool = True,
        reduction: Reduction = "mean",
        class_weight: Tensor | None = None,
        ignore_index: int = -100,
        group: dist.ProcessGroup | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **knobs: Any,
    ) -> None:
        here = num_classes
        if group is not None:
            each, more = divmod(num_classes, dist.get_world_size(group))
            here = each + (dist.get_rank(group) < more)
        super().__init__(in_features, here, bias=bias, device=device, dtype=dtype)
        self.criterion = Loss(loss, reduction=reduction, weight=class_weight, ignore_index=ignore_index, **knobs)
        self.clip = _clip(tau, delta, temp)
        self.num_classes, self.group = num_classes, group

    def forward(self, hidden: Tensor, target: Tensor, example_weight: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return _loss(self.criterion, hidden, self.weight, self.bias, target, self.clip, example_weight, self.group)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits before the clip, [..., K] (K of this process); their argmax is the prediction."""
        return nn.functional.linear(hidden, self.weight, self.bias)

    def start_epoch(self, epoch: int, class_counts: Tensor | None = None) -> None:
        """Tell the loss the epoch and the class counts; see `Loss.start_epoch`."""
        self.criterion.start_epoch(epoch, class_counts)

    def extra_repr(self) -> str:
        clip = "" if self.clip is None else f", tau={self.clip[0]}, delta={self.clip[1]}"
        return f"{self.in_features}, {self.num_classes}{clip}, bias={self.bias is not None}"


def clip_hidden(
    hidden: Tensor,
    weight: Tensor,
    tau: float | None = None,
    delta: float | None = None,
    bias: Tensor | None = None,
    *,
    temp: float | None = None,
    gram: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rescale hidden states so that their logits are clipped: `W(s h) + s b = clip(W h + b)`.

    A kernel without the clip (torch's `linear_cross_entropy`, Liger, cut-cross-entropy) can then train with it.
    The norm comes from the Gram matrix, `|W h + b|^2 = h~' (W~' W~) h~` with h~ = [h, 1] and W~ = [W, b], which costs
    K D^2 multiplications in float64. Gradients with respect to all arguments are exact.

    Args:
        hidden: [..., D].
        weight: [K, D].
        tau, delta, temp: the clip, as in `LogitClip`.
        bias: [K] or None. A kernel whose bias is the same for all rows needs it as one more feature: give it
            ``torch.cat([hidden, factor], -1)`` and ``torch.cat([weight, bias[:, None]], 1)``.
        gram: `gram_matrix(weight, bias)` of a frozen head, computed once; the weight then gets no gradient from the
            norm.

    Returns:
        The rescaled hidden states, [..., D], and the factor s, [..., 1].

    Raises:
        ValueError: if shapes do not fit, the bias masks a class, or the clip is not exactly one of tau and temp.

    >>> hidden, head = torch.tensor([[3.0, 4.0]]), torch.eye(2)
    >>> clip_hidden(hidden, head, tau=1.0)
    (tensor([[0.6000, 0.8000]]), tensor([[0.2000]]))
    """
    threshold, scale = threshold_and_scale(tau, delta, temp)
    _check_layer(hidden, weight, bias)
    _check_unmasked(bias)
    if gram is None:
        gram = gram_matrix(weight, bias)
    size = weight.shape[1] + (bias is not None)
    if gram.shape != (size, size):
        raise ValueError(f"gram must be the gram_matrix of weight and bias, ({size}, {size}), got {tuple(gram.shape)}.")
    h = hidden.double()
    if bias is not None:
        h = torch.cat([h, torch.ones_like(h[..., :1])], -1)
    square = ((h @ gram.double()) * h).sum(-1, keepdim=True)
    norm = square.clamp_min(torch.finfo(torch.float32).tiny).sqrt()  # the root has no gradient at 0
    factor = clip_factor(norm, threshold, scale).to(hidden.dtype)
    return hidden * factor, factor


def gram_matrix(weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`W' W`, or `[W, b]' [W, b]` with a bias, accumulated in float64: [D, D] or [D + 1, D + 1].

    >>> gram_matrix(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[10., 14.],
            [14., 20.]], dtype=torch.float64)
    """
    return _Gram.apply(weight, bias)


class _Gram(torch.autograd.Function):
    """Without a float64 copy of the weight. For an upstream gradient G, d[W, b] = [W, b] (G + G')."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight, bias)
        size = weight.shape[1] + (bias is not None)
        gram = torch.zeros(size, size, dtype=torch.float64, device=weight.device)
        for k in range(0, len(weight), STEP):
            w = weight[k : k + STEP].double()
            if bias is not None:
                w = torch.cat([w, bias[k : k + STEP, None].double()], 1)
            gram.addmm_(w.t(), w)
        return gram

    @staticmethod
    def backward(ctx: Any, upstream: Tensor):  # type: ignore[override]
        weight, bias = ctx.saved_tensors
        both = (upstream + upstream.t()).to(weight.dtype)
        if bias is None:
            return weight @ both, None
        last = both[:-1, -1]
        return weight @ both[:-1, :-1] + torch.outer(bias, last), weight @ last + bias * both[-1, -1]


# -- from a criterion to blocks ----------------------------------------------------------------------------------------


def _clip(tau: float | None, delta: float | None, temp: float | None) -> Clip | None:
    return None if tau is delta is temp is None else threshold_and_scale(tau, delta, temp)


def _check_layer(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if weight.ndim != 2 or hidden.ndim < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"Hidden states [..., D] and a weight [K, D] do not fit: got {tuple(hidden.shape)} and "
            f"{tuple(weight.shape)}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"The bias must have the shape {tuple(weight.shape[:1])}, got {tuple(bias.shape)}.")


def _check_unmasked(bias: Tensor | None) -> None:
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
    smoothing: float = 0.0,
) -> Tensor:
    """The reduced loss of `criterion` on the logits of a linear layer."""
    if not isinstance(criterion, Loss):  # made here, as torch.compile cannot trace that
        criterion = criterion()
    _check_layer(hidden, weight, bias)
    shard = Shard(len(weight), weight.device, group)
    shape = hidden.shape[:-1]
    logits = weight.new_empty(()).expand(*shape, shard.num_classes)  # their shape, without their memory
    target, kept = check_target(logits, target, criterion.ignore_index)
    class_weight = criterion.weight
    if class_weight is not None and len(class_weight) != shard.num_classes:
        raise ValueError(f"weight has {len(class_weight)} entries for {shard.num_classes} classes.")
    if example_weight is not None and example_weight.shape != shape:
        raise ValueError(f"example_weight must have the shape {tuple(shape)}, got {tuple(example_weight.shape)}.")

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

    run = _by_autograd if soft or criterion.function.second == "log_probs" else _closed_form
    if clip is not None and run is _closed_form:
        _check_unmasked(bias)
    run = run(criterion, target, clip, row_weight, dtype, shard, smoothing)
    values = _Fused.apply(run, torch.is_grad_enabled() and criterion.reduction != "none", rows, weight, bias)
    if criterion.reduction != "none":
        return values
    return (values if index is None else values.new_zeros(shape.numel()).index_copy(0, index, values)).view(shape)


_loss: Any = torch.compiler.disable(_eager_loss)  # a graph break around blocks and chunks


def _compute_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype of the matrix products. Gradients with respect to logits are below the range of float16."""
    device, dtype = weight.device.type, torch.promote_types(hidden.dtype, weight.dtype)
    if dtype != torch.float64 and torch.is_autocast_enabled(device):  # autocast leaves float64 alone
        dtype = torch.get_autocast_dtype(device)
    return torch.float32 if dtype == torch.float16 else dtype


class _Fused(torch.autograd.Function):
    """A function that computes its gradient together with its value.

    `run(hidden, weight, bias, upstream, needs)` returns the values and the gradients that are needed, for an upstream
    gradient of 1 if it is None. Without `eager`, and when the backward pass is repeated, it runs again.
    """

    @staticmethod
    def forward(ctx: Any, run: Run, eager: bool, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
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


def _run(run: Run, hidden: Tensor, weight: Tensor, bias: Tensor | None, *args: Any) -> tuple[Tensor, list[Any]]:
    """`run`, outside autocast, with gradients in the dtypes of their arguments.

    For float16 they stay float32, and autograd converts them when they have been multiplied by the upstream gradient:
    without the factor of a `GradScaler`, small ones would be lost.
    """
    arguments: Any = [None if x is None else x.detach() for x in (hidden, weight, bias)]
    with torch.autocast(weight.device.type, enabled=False):
        values, gradients = run(*arguments, *args)
    pairs = zip(gradients, arguments, strict=True)
    return values, [g if g is None or x.dtype == torch.float16 else g.to(x.dtype) for g, x in pairs]


# -- losses of log p_y and the mean log-probability --------------------------------------------------------------------


def _closed_form(
    criterion: Loss,
    target: Tensor,
    clip: Clip | None,
    row_weight: Tensor | None,
    dtype: torch.dtype,
    shard: Shard,
    smoothing: float,
) -> Run:
    """A `run` in terms of four numbers per row.

    These are the norm n of the logits z, L = log sum exp(s z) with s the factor of the clip, z_y, and the mean v.z with
    v = 1/K. Then log p_y = s z_y - L, the mean log-probability is s v.z - L sum v, and dL = s p, dn = z / n. The other
    two are linear in the hidden states: z_y = W_y h + b_y and v.z = (v W) h + v.b.
    """
    function, knobs, classes = criterion.function, criterion.knobs, shard.num_classes
    full = torch.promote_types(dtype, torch.float32)
    class_weight = None if criterion.weight is None else criterion.weight.to(full)
    of_class = None if class_weight is None else class_weight[target]
    if criterion.reduction == "mean":
        weights = torch.ones(len(target), dtype=full, device=target.device) if row_weight is None else row_weight
        total = (weights if of_class is None else weights * of_class).sum()
        row_weight = weights / torch.where(total == 0, 1.0, total)

    def value(log_p: Tensor, mean_log_p: Tensor | None, rows: slice) -> Tensor:
        value = function.phi(log_p, None if mean_log_p is None else classes * mean_log_p, **knobs)
        if of_class is not None:
            value = value * of_class[rows]
        if smoothing and mean_log_p is not None:  # with class weights, v has them
            value = (1 - smoothing) * value - smoothing * mean_log_p
        return value if row_weight is None else value * row_weight[rows]

    def run(hidden: Tensor, weight: Tensor, bias: Tensor | None, upstream: Tensor | None, needs: tuple[bool, ...]):
        hidden, bias = hidden.to(dtype), None if bias is None else bias.to(full)
        v = None
        if smoothing or function.second != "_":
            v = torch.full((len(weight),), 1 / classes, dtype=full, device=weight.device)
            if smoothing and class_weight is not None:
                v *= class_weight[shard.first : shard.first + len(weight)]
        terms = LinearTerms(hidden, weight, bias, target, v, shard)
        head = BlockedHead(hidden, weight, bias, clip, needs, shard)
        values = torch.empty(len(hidden), dtype=full, device=weight.device)
        for rows in head.blocks:
            norm, log_total, expected = head.statistics(rows)
            z_y, mean = terms.at_target[rows], None if terms.mean is None else terms.mean[rows]
            leaves = [x.requires_grad_(any(needs)) for x in (z_y, log_total, norm, mean) if x is not None]
            with torch.set_grad_enabled(any(needs)):
                scale = 1.0
                if norm is not None and clip is not None:
                    scale = clip_factor(norm, *clip)
                    if expected is not None:  # dL/ds is the expectation of z under p
                        log_total = log_total + expected * (scale - scale.detach())
                log_p = scale * z_y - log_total
                log_p = log_p - log_p.detach().clamp_min(0)  # p_y must not round to above 1; its gradient stays
                result = value(log_p, None if mean is None else scale * mean - terms.v_sum * log_total, rows)
            values[rows] = result.detach()
            if any(needs):
                ones = torch.ones_like(result) if upstream is None else upstream.expand(len(hidden))[rows].to(full)
                d = iter(torch.autograd.grad(result, leaves, ones, allow_unused=True, materialize_grads=True))
                head.add_gradients(target[rows], next(d), next(d), None if norm is None else next(d))
                if mean is not None:
                    terms.d_mean[rows] = next(d)
        gradients = terms.add_to(head.d_hidden, head.d_weight, head.d_bias)
        return values if criterion.reduction == "none" else values.sum(), gradients

    return run


# -- losses of all log-probabilities, and probability targets ----------------------------------------------------------


def _by_autograd(
    criterion: Loss,
    target: Tensor,
    clip: Clip | None,
    row_weight: Tensor | None,
    dtype: torch.dtype,
    shard: Shard,
    smoothing: float,
) -> Run:
    """A `run` that leaves the gradient with respect to the logits of a block to autograd."""
    soft = target.is_floating_point()
    if shard.group is not None:
        what = "Probability targets" if soft else criterion.name
        raise ValueError(f"{what} cannot be used with sharded classes: all classes of a row are needed at once.")
    full = torch.promote_types(dtype, torch.float32)

    def block_loss(logits: Tensor, rows: slice, count: bool) -> tuple[Tensor, Tensor]:
        """The weighted values of a block, and the weights."""
        y = target[rows]
        if soft and smoothing:
            y = y * (1 - smoothing) + smoothing / shard.num_classes
        values, weights = evaluate(
            criterion.function,
            logits,
            y,
            criterion.knobs,
            None if clip is None else (*clip, 2.0),
            criterion.weight,
            criterion.training_state(),
        )
        if weights is None:
            weights = torch.ones_like(values)
        elif count and criterion.removed is not None and criterion.training:
            criterion._count_removed(1 - weights, y, None)
        if row_weight is not None:
            weights = weights * row_weight[rows]
        if criterion.weight is not None and not soft:
            weights = weights * criterion.weight.to(full)[y]
        return values * weights, weights

    def run(hidden: Tensor, weight: Tensor, bias: Tensor | None, upstream: Tensor | None, needs: tuple[bool, ...]):
        hidden, w = hidden.to(dtype), weight.to(dtype)
        zeros = partial(torch.zeros, dtype=full, device=weight.device)
        values, weights = zeros(len(hidden)), zeros(len(hidden))
        d_hidden = zeros(hidden.shape) if needs[0] else None
        d_weight = zeros(weight.shape) if needs[1] else None
        d_bias = zeros(len(weight)) if bias is not None and needs[2] else None
        for rows in row_blocks(len(hidden), -(-block_size(len(hidden), len(weight)) // 4)):
            h = hidden[rows]
            logits = (h @ w.t()).to(full)
            if bias is not None:
                logits += bias
            with torch.set_grad_enabled(any(needs)):
                result, weights[rows] = block_loss(logits.requires_grad_(any(needs)), rows, count=upstream is None)
            values[rows] = result.detach()
            if any(needs):
                ones = torch.ones_like(result) if upstream is None else upstream.expand(len(hidden))[rows].to(full)
                dz = torch.autograd.grad(result, logits, ones)[0]
                if d_bias is not None:
                    d_bias += dz.sum(0)
                dz = dz.to(dtype)
                if d_hidden is not None:
                    add_product(dz, w, d_hidden[rows])
                if d_weight is not None:
                    add_product(dz.t(), h, d_weight)
        gradients = d_hidden, d_weight, d_bias
        if criterion.reduction == "none":
            return values, gradients
        if criterion.reduction == "sum":
            return values.sum(), gradients
        total = weights.sum()
        total = torch.where(total == 0, 1.0, total)
        for gradient in gradients:
            if gradient is not None:
                gradient /= total
        return values.sum() / total, gradients

    return run
