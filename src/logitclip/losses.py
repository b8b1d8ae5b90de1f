"""Every loss as one elementwise function of two numbers per example.

A loss is a function `phi(log_p, sum_log_p, *, knobs)`: `log_p` is the log-probability of the label and `sum_log_p` the
sum of the log-probabilities of all classes. Call the second parameter `_` if the loss depends on `log_p` alone. The
decorator `@loss` turns phi into the public function of logits and targets and registers it in `LOSSES`. For soft
targets t the loss is the expectation of phi under t.

Formulas are written in log-probabilities, so that values and gradients stay finite at p_y = 0 and p_y = 1.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, overload

import torch
from torch import Tensor

from logitclip.clip import check_logits, check_positive, eager_on_cpu
from logitclip.fused import clipped_log_probs, pick, row_log_probs, sum_log_probs
from logitclip.registry import Registry

LOSSES = Registry("loss")

LOG_ZERO = math.log(1e-4)  # RCE's value for log 0 in every public code base (the SCE paper's text says -4)

Knobs = ParamSpec("Knobs")


class TrainingState(NamedTuple):
    """The state of training for a loss with a schedule; `Loss.start_epoch` sets it."""

    epoch: Tensor | int  # counted from 0
    class_counts: Tensor | None = None  # how many examples carry each label, [K]


@overload  # with a schedule
def loss(
    phi: Callable[Concatenate[Tensor, Tensor, TrainingState | None, Knobs], tuple[Tensor, Tensor | None]],
) -> Callable[Concatenate[Tensor, Tensor, Knobs], Tensor]: ...
@overload
def loss(
    phi: Callable[Concatenate[Tensor, Any, Knobs], Tensor],
) -> Callable[Concatenate[Tensor, Tensor, Knobs], Tensor]: ...
def loss(phi: Callable[..., Any]) -> Callable[..., Tensor]:
    """Make the public function of a loss from its `phi`, and register it under the name of phi.

    Args:
        phi: called as ``phi(log_p, sum_log_p, **knobs)`` with tensors of one shape; returns values of that shape. The
            name of its second parameter says what it gets: `sum_log_p`; `_`, nothing; or `log_probs`, all
            log-probabilities [..., K]. In the last case phi takes a `TrainingState` or None as its third argument and
            returns its values with a weight per example, or None.

    Returns:
        ``fn(logits, target, **knobs)``, which returns one value per example. Its knobs are the keyword-only parameters
        of phi.

    Raises:
        ValueError: if the name is taken.

    >>> @loss
    ... def squared(log_p, _, *, scale: float = 1.0):
    ...     '''Squared error of the label's probability.'''
    ...     return scale * one_minus_p(log_p) ** 2
    >>> squared(torch.zeros(1, 4), torch.tensor([2]), scale=16.0)
    tensor([9.])
    """
    parameters = list(inspect.signature(phi, eval_str=True).parameters.values())

    @functools.wraps(phi)
    def function(logits: Tensor, target: Tensor, **knobs: Any) -> Tensor:
        values, weights = evaluate(function, logits, check_target(logits, target)[0], knobs)
        return values if weights is None else values * weights

    arguments = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Tensor)
        for name in ("logits", "target")
    ]
    knobs = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    function.__doc__ = _public_doc(phi)
    function.__annotations__ = {p.name: p.annotation for p in (*arguments, *knobs)}
    vars(function).update(
        __signature__=inspect.Signature([*arguments, *knobs], return_annotation=Tensor),
        phi=phi,
        second=parameters[1].name,
    )
    return LOSSES.register(function)


def _public_doc(phi: Callable[..., Any]) -> str:
    """The docstring of phi with the arguments that every loss has."""
    common = "Args:\n    logits: [..., K].\n    target: class indices [...], or probabilities [..., K].\n"
    returns = (
        "Returns:\n"
        "    One value per example, [...]; float32 for half-precision logits.\n\n"
        "Raises:\n"
        "    ValueError: if the shapes do not fit or a knob is out of its range.\n\n"
    )
    doc = inspect.cleandoc(phi.__doc__ or f"The loss {phi.__name__}.") + "\n\n"
    before, found, after = doc.partition("Args:\n")
    if found:
        knobs, gap, after = after.partition("\n\n")
        return (before + common + knobs + gap + returns + after).rstrip() + "\n"
    summary, gap, after = doc.partition("\n\n")
    return (summary + gap + common + "\n" + returns + after).rstrip() + "\n"


def evaluate(
    function: Any,
    logits: Tensor,
    target: Tensor,
    knobs: dict[str, Any],
    clip: tuple[float, float | None, float] | None = None,
    class_weight: Tensor | None = None,
    state: TrainingState | None = None,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute a loss over the last dimension of `logits`.

    Args:
        function: a loss from `LOSSES`.
        logits: [..., K].
        target: class indices [...], or probabilities [..., K].
        knobs: of the loss.
        clip: (tau, delta, p), or None.
        class_weight: weights of the terms of soft targets, [K]; ignored for class indices.
        state: the epoch and class counts, for a loss with a schedule.
        kept: [...], False for examples that do not count; their values are finite, whatever their targets are.

    Returns:
        One value per example, [...], and one weight per example, or None if all weigh the same.
    """
    tau, delta, p = clip or (None, None, 2.0)
    soft = target.is_floating_point()
    if not soft and function.second != "log_probs":
        log_p, mean = row_log_probs(logits, target, tau, delta, p=p, mean=function.second != "_")
        return function.phi(_finite(log_p, kept), None if mean is None else mean * logits.shape[-1], **knobs), None

    log_probs = clipped_log_probs(logits, tau, delta, p=p)
    expected = log_probs
    if soft:
        target = target.to(log_probs.dtype)
        # 0 log 0 = 0 for masked classes, which no target names
        expected = log_probs.masked_fill(log_probs.isneginf() & (target == 0), 0.0)
    if function.second == "log_probs":
        if soft and class_weight is not None:
            raise ValueError(f"{function.__name__} takes class weights with class-index targets only.")
        log_p = (target * expected).sum(-1) if soft else pick(log_probs, target)
        return function.phi(_finite(log_p, kept), log_probs, state, **knobs)
    terms = target if class_weight is None else target * class_weight.to(target.dtype)
    total = None if function.second == "_" else sum_log_probs(log_probs, keepdim=True)
    return (terms * function.phi(expected, total, **knobs)).sum(-1), None


def _finite(log_p: Tensor, kept: Tensor | None) -> Tensor:
    """Replace log p_y of examples that do not count: their target may be a masked class, and 0 times inf is NaN."""
    return log_p if kept is None else log_p.masked_fill(~kept, -1.0)


def check_classes(logits: Tensor, dim: int = -1) -> None:
    """Refuse logits with fewer than two classes along `dim`."""
    check_logits(logits)
    if logits.shape[dim] < 2:
        raise ValueError(
            f"There must be at least two logits per example, got {logits.shape[dim]}: turn a single one into two, for "
            "instance by torch.cat([-logits, logits], 1) / 2, and use class indices 0 and 1."
        )


def check_target(
    logits: Tensor, target: Tensor, ignore_index: int | None = None, dim: int = -1
) -> tuple[Tensor, Tensor | None]:
    """Check a target against logits with the classes along `dim`.

    Values are checked in eager mode on a CPU only: elsewhere that would wait for the device.

    Args:
        logits: [N, K, ...] for ``dim=1``.
        target: class indices [N, ...], or probabilities in the shape of the logits.
        ignore_index: a class index that marks examples to leave out.
        dim: the class dimension.

    Returns:
        The target, with 0 in place of `ignore_index`, and the mask of the examples to keep, or None for all of them.

    Raises:
        TypeError: if the target is not a tensor.
        ValueError: if its shape does not fit or its values are out of range.
    """
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a tensor, got {type(target).__name__}: use torch.as_tensor(target).")
    check_classes(logits, dim)
    shape, classes = logits.shape, logits.shape[dim]
    without_classes = shape[:dim] + shape[dim:][1:]
    look = eager_on_cpu(logits)
    if target.is_floating_point():
        if target.shape != shape:
            hint = " Class indices must be integers: use target.long()." if target.shape == without_classes else ""
            raise ValueError(
                f"Probability targets must have the shape of the logits, {tuple(shape)}, "
                f"got {tuple(target.shape)}.{hint}"
            )
        if look and target.numel():
            tolerance = 1e-3 if target.dtype in (torch.float32, torch.float64) else 2e-2
            sums = target.sum(dim, dtype=torch.float32)
            if not (target.min() >= 0 and (sums - 1).abs().max() <= tolerance):  # also refuses NaN
                single = " If these are N single logits, use torch.stack([-z, z], 1) / 2 and target.long()."
                raise ValueError(
                    "Probability targets must be non-negative and sum to 1 over the classes. Multi-label targets are "
                    "not supported: train one two-class problem per label, or normalise the rows."
                    + (single if logits.ndim == 1 else "")
                )
        return target, None
    if target.shape != without_classes:
        if target.shape == shape:
            raise ValueError(
                f"An integer target in the shape of the logits, {tuple(shape)}, is a multi-label target, which is not "
                "supported: give class indices (one-hot rows: target.argmax(1)), or probabilities as target.float()."
            )
        raise ValueError(
            f"Logits of shape {tuple(shape)} need targets of shape {tuple(without_classes)}, got {tuple(target.shape)}."
        )
    if target.dtype != torch.int64:
        target = target.long()
    if look:
        if not target.numel():
            return target, None
        low, high = map(int, target.aminmax())
        if ignore_index is None or not low <= ignore_index <= high:
            if low < 0 or high >= classes:
                raise ValueError(f"Targets must lie in 0..{classes - 1}, got {low if low < 0 else high}.")
            return target, None
    elif ignore_index is None:
        return target, None
    kept = target != ignore_index
    if look and bool((kept & ((target < 0) | (target >= classes))).any()):
        bad = target[kept & ((target < 0) | (target >= classes))][0]
        raise ValueError(f"Targets must lie in 0..{classes - 1} or be ignore_index={ignore_index}, got {int(bad)}.")
    return target.where(kept, 0), kept


# -- the losses, in the order of the paper ---------------------------------------------------------------------------


@loss
def ce(log_p: Tensor, _: None) -> Tensor:
    """Cross entropy, `-log p_y`.

    >>> ce(torch.zeros(1, 4), torch.tensor([2]))
    tensor([1.3863])

    Paper: Eq. 1.
    """
    return -log_p


@loss
def focal(log_p: Tensor, _: None, *, gamma: float = 0.5, detach_weight: bool = False) -> Tensor:
    """Focal loss, `-(1-p_y)^gamma log p_y`.

    Args:
        gamma: how strongly well-classified examples are down-weighted, at least 0; 0 is cross entropy.
        detach_weight: treat the factor `(1-p_y)^gamma` as a constant in the gradient, as the public code bases of
            robust losses do. The default is the gradient of the published formula.

    >>> focal(torch.zeros(1, 4), torch.tensor([2]), gamma=2.0)
    tensor([0.7798])
    """
    at_least(0, gamma=gamma)
    log_p_factor = log_p.detach() if detach_weight else log_p
    # With gamma < 1 the power has no gradient at p_y = 1: the clamp cuts it there, where the loss is flat anyway.
    return one_minus_p(log_p_factor).clamp_min(torch.finfo(log_p.dtype).tiny) ** gamma * -log_p


@loss
def mae(log_p: Tensor, _: None, *, scale: float = 2.0) -> Tensor:
    """Mean absolute error, `|e_y - p|_1 = 2(1-p_y)`.

    Args:
        scale: the factor before `1-p_y`, at least 0; 1 is the "reduced" MAE of other code bases.

    >>> mae(torch.zeros(1, 4), torch.tensor([2]))
    tensor([1.5000])
    """
    at_least(0, scale=scale)
    return scale * one_minus_p(log_p)


@loss
def phuber_ce(log_p: Tensor, _: None, *, threshold: float = 10.0) -> Tensor:
    """Partially Huberised cross entropy: `-log p_y`, linear in p_y where `p_y <= 1/threshold`.

    Args:
        threshold: above 1; the largest slope in `p_y`. The paper uses 10 on CIFAR-10 and 30 on CIFAR-100 and WebVision.

    >>> phuber_ce(torch.zeros(1, 4), torch.tensor([2]), threshold=2.0)
    tensor([1.1931])
    """
    _above_one(threshold=threshold)
    linear = math.log(threshold) + 1 - threshold * log_p.exp()
    return torch.where(log_p <= -math.log(threshold), linear, -log_p)


@loss
def rce(log_p: Tensor, _: None, *, log_zero: float = LOG_ZERO) -> Tensor:
    """Reverse cross entropy, `-log_zero (1-p_y)`.

    Args:
        log_zero: the value that stands for log 0, negative.

    >>> rce(torch.zeros(1, 4), torch.tensor([2]), log_zero=-4.0)
    tensor([3.])
    """
    if not -math.inf < log_zero < 0:
        raise ValueError(f"log_zero stands for log 0 and must be negative and finite, got {log_zero}.")
    return -log_zero * one_minus_p(log_p)


@loss
def sce(log_p: Tensor, _: None, *, alpha: float = 0.5, beta: float = 1.0, log_zero: float = LOG_ZERO) -> Tensor:
    """Symmetric cross entropy, `alpha CE + beta RCE`.

    Args:
        alpha: weight of cross entropy, at least 0.
        beta: weight of reverse cross entropy, at least 0.
        log_zero: of reverse cross entropy, see `rce`.

    >>> sce(torch.zeros(1, 4), torch.tensor([2]), alpha=1.0, beta=0.0)
    tensor([1.3863])
    """
    at_least(0, alpha=alpha, beta=beta)
    return alpha * -log_p + beta * _phi(rce)(log_p, None, log_zero=log_zero)


@loss
def gce(log_p: Tensor, _: None, *, q: float = 0.7) -> Tensor:
    """Generalised cross entropy, `(1 - p_y^q)/q`.

    Args:
        q: positive; cross entropy in the limit of 0, reduced MAE at 1.

    >>> gce(torch.zeros(1, 4), torch.tensor([2]), q=1.0)
    tensor([0.7500])
    """
    check_positive("q", q)
    return torch.expm1(q * log_p) / -q


@loss
def taylor_ce(log_p: Tensor, _: None, *, order: int = 2) -> Tensor:
    """Taylor cross entropy, `sum_i (1-p_y)^i / i` for i from 1 to `order`.

    Args:
        order: how many terms, from 1 (the reduced MAE) to 1000 (nearly cross entropy). The paper does not state its
            order; 2 is this project's choice.

    >>> taylor_ce(torch.zeros(1, 4), torch.tensor([2]), order=1)
    tensor([0.7500])
    """
    at_least(1, order=order)
    if order > 1000:
        raise ValueError(f"order must be at most 1000, got {order}.")
    x = one_minus_p(log_p)
    total = x / order
    for i in range(order - 1, 0, -1):
        total = x * (total + 1 / i)
    return total


@loss
def nce(log_p: Tensor, sum_log_p: Tensor, *, scale: float = 1.0) -> Tensor:
    """Normalised cross entropy, `log p_y / sum_k log p_k`.

    Args:
        scale: a factor, at least 0.

    >>> nce(torch.zeros(1, 4), torch.tensor([2]))
    tensor([0.2500])
    """
    at_least(0, scale=scale)
    return scale * (log_p / sum_log_p)


@loss
def ael(log_p: Tensor, _: None, *, a: float = 2.5) -> Tensor:
    """Asymmetric exponential loss, `exp(-p_y/a)`.

    Its minimum is `exp(-1/a)`, not 0.

    Args:
        a: positive; the larger, the closer to a straight line in `p_y`, and the flatter.

    >>> ael(torch.zeros(1, 4), torch.tensor([2]), a=0.25)
    tensor([0.3679])
    """
    check_positive("a", a)
    return torch.exp(log_p.exp() / -a)


@loss
def aul(log_p: Tensor, _: None, *, a: float = 5.5, q: float = 3.0) -> Tensor:
    """Asymmetric unhinged loss, `((a-p_y)^q - (a-1)^q)/q`.

    Args:
        a: above 1; the larger, the closer to a straight line in `p_y`.
        q: positive; 1 is the reduced MAE.

    >>> aul(torch.zeros(1, 4), torch.tensor([2]), a=2.0, q=1.0)
    tensor([0.7500])
    """
    _above_one(a=a)
    check_positive("q", q)
    return _power_gap(a - 1, one_minus_p(log_p), q)


@loss
def agce(log_p: Tensor, _: None, *, a: float = 0.6, q: float = 0.6) -> Tensor:
    """Asymmetric generalised cross entropy, `((a+1)^q - (a+p_y)^q)/q`.

    Args:
        a: positive; the larger, the closer to a straight line in `p_y`. In the limit of 0 it is GCE.
        q: positive; 1 is the reduced MAE.

    >>> agce(torch.zeros(1, 4), torch.tensor([2]), a=1.0, q=1.0)
    tensor([0.7500])
    """
    check_positive("a", a)
    check_positive("q", q)
    return -_power_gap(a + 1, torch.expm1(log_p), q)


@loss
def cores(
    log_p: Tensor,
    log_probs: Tensor,
    state: TrainingState | None,
    *,
    beta: float = 2.0,
    warmup: int = 10,
    ramp: int = 30,
    sieve_after: int = 30,
    prior: Literal["labels", "uniform"] = "labels",
) -> tuple[Tensor, Tensor | None]:
    """CORES: `CE - beta_e sum_k pi_k l_k` with `l_k = -log(p_k + 1e-8)`.

    `Loss.start_epoch` sets the epoch e and the counts of the (noisy) labels, which give pi. Without an epoch beta is
    constant, pi is uniform, and no example is left out.

    Args:
        beta: the largest weight of the regulariser, at least 0.
        warmup: the number of epochs with weight 0.
        ramp: the number of epochs over which the weight then rises linearly to beta.
        sieve_after: after this epoch, examples with a CE above the mean of `l_k` are left out.
        prior: pi is the share of each label ("labels") or uniform.

    >>> cores(torch.zeros(1, 4), torch.tensor([2]), beta=0.0)
    tensor([1.3863])
    """
    at_least(0, beta=beta, warmup=warmup)
    at_least(1, ramp=ramp)
    reference = torch.logaddexp(log_probs, log_probs.new_tensor(math.log(1e-8)))  # -l_k
    present = (~log_probs.isneginf()).to(reference.dtype)  # masked classes do not enter the means
    mean = weighted = (reference * present).sum(-1) / present.sum(-1)
    if state is None:
        return beta * weighted - log_p, None
    epoch, counts = state
    if counts is not None and prior == "labels":
        if counts.shape != reference.shape[-1:]:
            raise ValueError(f"class_counts needs {reference.shape[-1]} entries, got {tuple(counts.shape)}.")
        shares = present * (counts / counts.sum()).to(reference)
        weighted = (reference * shares).sum(-1) / shares.sum(-1)
    now = torch.as_tensor(epoch, device=log_p.device)
    risen = torch.clamp((now - warmup) / max(ramp - 1, 1), 0, 1).to(log_p.dtype)
    kept = (mean - log_p <= 0) | (now <= sieve_after)
    return beta * risen * weighted - log_p, kept.to(log_p.dtype).detach()


# Active-passive sums. The paper uses them on CIFAR-100 and WebVision; the defaults are its CIFAR-100 settings.


@loss
def nce_mae(log_p: Tensor, sum_log_p: Tensor, *, alpha: float = 50.0, beta: float = 1.0, scale: float = 1.0) -> Tensor:
    """NCE + MAE, `alpha NCE + beta scale (1-p_y)`.

    Args:
        alpha: weight of NCE, at least 0.
        beta: weight of MAE, at least 0.
        scale: of MAE; 1 is the reduced MAE, which the authors use.

    >>> nce_mae(torch.zeros(1, 4), torch.tensor([2]), alpha=1.0)
    tensor([1.])
    """
    at_least(0, alpha=alpha, beta=beta)
    return alpha * _phi(nce)(log_p, sum_log_p) + beta * _phi(mae)(log_p, None, scale=scale)


@loss
def nce_agce(
    log_p: Tensor, sum_log_p: Tensor, *, alpha: float = 50.0, beta: float = 0.1, a: float = 1.8, q: float = 3.0
) -> Tensor:
    """NCE + AGCE, `alpha NCE + beta AGCE`.

    Args:
        alpha: weight of NCE, at least 0.
        beta: weight of AGCE, at least 0.
        a: of AGCE, positive; the paper uses 2.5 on WebVision.
        q: of AGCE, positive.

    >>> nce_agce(torch.zeros(1, 4), torch.tensor([2]), alpha=1.0, beta=1.0, a=1.0, q=1.0)
    tensor([1.])
    """
    at_least(0, alpha=alpha, beta=beta)
    return alpha * _phi(nce)(log_p, sum_log_p) + beta * _phi(agce)(log_p, None, a=a, q=q)


@loss
def nce_rce(
    log_p: Tensor, sum_log_p: Tensor, *, alpha: float = 1.0, beta: float = 1.0, log_zero: float = LOG_ZERO
) -> Tensor:
    """NCE + RCE, `alpha NCE + beta RCE`; not in the paper, with the defaults of its authors.

    Args:
        alpha: weight of NCE, at least 0.
        beta: weight of RCE, at least 0.
        log_zero: of RCE, see `rce`.

    >>> nce_rce(torch.zeros(1, 4), torch.tensor([2]), log_zero=-1.0)
    tensor([1.])
    """
    at_least(0, alpha=alpha, beta=beta)
    return alpha * _phi(nce)(log_p, sum_log_p) + beta * _phi(rce)(log_p, None, log_zero=log_zero)


# -- parts of losses -------------------------------------------------------------------------------------------------


def one_minus_p(log_p: Tensor) -> Tensor:
    """`1 - p` from log p, accurate also where p rounds to 1.

    >>> one_minus_p(torch.tensor([-1e-10, 0.0]))
    tensor([1.0000e-10, -0.0000e+00])
    """
    return -torch.expm1(log_p)


def at_least(least: float, **knobs: float) -> None:
    """Refuse the first of `knobs` that is below `least` or not finite.

    Raises:
        ValueError: such as "gamma must be at least 0 and finite, got -1."
    """
    for name, value in knobs.items():
        if not least <= value < math.inf:
            raise ValueError(f"{name} must be at least {least} and finite, got {value}.")


def _above_one(**knobs: float) -> None:
    for name, value in knobs.items():
        if not 1 < value < math.inf:
            raise ValueError(f"{name} must be above 1 and finite, got {value}.")


def _power_gap(base: float, change: Tensor, q: float) -> Tensor:
    """((base + change)^q - base^q) / q, accurate also where the two powers are large and close."""
    return base**q / q * torch.expm1(q * torch.log1p(change / base))


def _phi(function: Any) -> Callable[..., Tensor]:
    return function.phi


# A loss that a plugin registers can be called as `losses.name`, too.


def __getattr__(name: str) -> Any:
    if name in LOSSES:
        return LOSSES[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(LOSSES)
