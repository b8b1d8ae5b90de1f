"""The public functions: the loss of a linear layer, a layer with its loss, and the clip of hidden states."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from logitclip.clip import Clip, clip_factor, make_clip
from logitclip.criterion import Loss
from logitclip.heads.blocks import STEP
from logitclip.heads.fused import check_layer, check_unmasked, layer_loss
from logitclip.losses.reduction import Reduction


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
    class_weight: Tensor | None = None,
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
        input: Hidden states, [..., D].
        linear_weight: [K, D].
        linear_bias: [K] or None; finite, so it cannot mask a class. With a clip, -inf is refused on a CPU and gives NaN
            elsewhere, as do logits whose norm overflows when it is squared (1.8e19 in float32).
        target: Class indices [...], or probabilities [..., K].
        class_weight, weight: A weight per class, [K]; `weight` is torch's word.
        reduction: "mean", "sum" or "none". The mean divides by the sum of the weights of the class indices, or by the
            number of probability targets. The mean over nothing at all is 0, not NaN.
        ignore_index: Class indices with this value do not count; None means -100.
        label_smoothing: Share of the target that is spread evenly over all classes.
        tau, delta, temp: Threshold and scale of the clip, or temp for both (threshold temp, scale 1/temp). Without
            them nothing is clipped.
        example_weight: A weight per example or token, [...], which also counts in the mean.
        group: Processes that share the classes. Each has its own rows of `linear_weight` and `linear_bias` in the order
            of the ranks, and all have the same `input`, `target` (indices of all classes) and `weight` [K]. Each gets
            the loss, the gradient of its rows and the whole gradient of `input`.

    Returns:
        A scalar, or [...] for "none"; float32 for half-precision arguments.

    Raises:
        ValueError: If shapes do not fit, a target is out of range or an option is invalid; also if a target or a weight
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
    weights = {name: w for name, w in (("class_weight", class_weight), ("weight", weight)) if w is not None}
    criterion = partial(
        Loss, "ce", reduction=reduction, ignore_index=ignored, label_smoothing=label_smoothing, **weights
    )
    clip = _optional_clip(tau, delta, temp)
    return layer_loss(criterion, input, linear_weight, linear_bias, target, clip, example_weight, group)


class LinearLogitClip(nn.Linear):
    """A last linear layer with any loss of the library on its clipped logits, without storing the whole logits.

    Args:
        in_features: D.
        num_classes: K.
        loss: A loss and its knobs, as in ``"gce:q=0.7"``; knobs may also be given as keywords.
        tau, delta, temp: The clip, as in `LogitClip`; without them nothing is clipped.
        bias: Whether the layer has a bias.
        reduction, ignore_index: As in `Loss`.
        class_weight: A weight per class, [K].
        group: Processes that share the classes, see `linear_cross_entropy`. Each owns its part of the weight: K is
            split as evenly as possible, and the first ranks have one class more. CORES cannot be shared.
        device, dtype: Device and dtype of the weight and the bias.
        **knobs: Knobs of the loss.

    The call takes hidden states [..., D], targets [...] (or probabilities [..., K]) and optionally `example_weight`
    [...], and returns the loss. `logits(hidden)` returns [..., K] for predictions. See `linear_cross_entropy` for time
    and memory; CORES and probability targets need four to six times the memory.

    Raises:
        ValueError: If tau and temp are both given, or a number of the clip or a knob is invalid; by the call, if
            shapes or targets do not fit.

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
        self.criterion = Loss(loss, reduction=reduction, class_weight=class_weight, ignore_index=ignore_index, **knobs)
        self.clip = _optional_clip(tau, delta, temp)
        self.num_classes, self.group = num_classes, group

    def forward(self, hidden: Tensor, target: Tensor, example_weight: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return layer_loss(self.criterion, hidden, self.weight, self.bias, target, self.clip, example_weight, self.group)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits before the clip, [..., K] (K of this process); their argmax is the prediction."""
        return nn.functional.linear(hidden, self.weight, self.bias)

    def start_epoch(self, epoch: int, class_counts: Tensor | None = None) -> None:
        """Tell the loss the epoch and the class counts; see `Loss.start_epoch`."""
        self.criterion.start_epoch(epoch, class_counts)

    def extra_repr(self) -> str:
        clip = "" if self.clip is None else f", tau={self.clip.tau}, delta={self.clip.delta}"
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
        tau, delta, temp: The clip, as in `LogitClip`.
        bias: [K] or None. A kernel whose bias is the same for all rows needs it as one more feature: give it
            ``torch.cat([hidden, factor], -1)`` and ``torch.cat([weight, bias[:, None]], 1)``.
        gram: `gram_matrix(weight, bias)` of a frozen head, computed once; the weight then gets no gradient from the
            norm.

    Returns:
        The rescaled hidden states, [..., D], and the factor s, [..., 1].

    Raises:
        ValueError: If shapes do not fit, the bias masks a class, or the clip is not exactly one of tau and temp.

    >>> hidden, head = torch.tensor([[3.0, 4.0]]), torch.eye(2)
    >>> clip_hidden(hidden, head, tau=1.0)
    (tensor([[0.6000, 0.8000]]), tensor([[0.2000]]))
    """
    clip = make_clip(tau, delta, temp=temp)
    check_layer(hidden, weight, bias)
    check_unmasked(bias)
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
    factor = clip_factor(norm, clip).to(hidden.dtype)
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


def _optional_clip(tau: float | None, delta: float | None, temp: float | None) -> Clip | None:
    return None if tau is delta is temp is None else make_clip(tau, delta, temp=temp)
