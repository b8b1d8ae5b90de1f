"""Every loss as one elementwise function of two numbers per example.

A loss is a `phi(log_p, mean_log_p, *, knobs)`: `log_p` is the log-probability of the label, `mean_log_p` the mean over
classes of the log-probabilities; call the second parameter `_` if you do not need it. The decorator `@loss` turns phi
into the public function of logits and targets and puts it into `LOSSES`. For soft targets t the loss is the
expectation of phi under t.

Everything is written in log-probabilities, so that values and gradients stay finite at p_y = 0 and p_y = 1.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from logitclip.clip import check_logits, check_positive, eager_on_cpu
from logitclip.fused import clipped_log_probs, pick, row_log_probs
from logitclip.registry import Registry

LOSSES = Registry("loss", injected=("num_classes", "epoch", "class_counts"))

LOG_ZERO = math.log(1e-4)  # what RCE takes for log 0 in every public code base (the SCE paper's text says -4)


def loss(phi: Callable[..., Any]) -> Callable[..., Tensor]:
    """Make the public `fn(logits, target, *, knobs)` from `phi` and register it under phi's name.

    The function takes logits [..., K] with class indices [...] or probabilities [..., K], and returns one value per
    example, [...]. A phi whose second parameter is called `log_probs` gets all of them, [..., K], and the expected
    `log_p` for soft targets; it returns its values with a weight per example, or None.
    """
    parameters = list(inspect.signature(phi).parameters.values())

    @functools.wraps(phi)
    def function(logits: Tensor, target: Tensor, **knobs: Any) -> Tensor:
        values, weights = evaluate(function, logits, check_target(logits, target)[0], knobs)
        return values if weights is None else values * weights

    arguments = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("logits", "target")]
    vars(function).update(
        __signature__=inspect.Signature([*arguments, *parameters[2:]]),
        phi=phi,
        second=parameters[1].name,
        wants=frozenset(p.name for p in parameters[2:]),
    )
    return LOSSES.register(function)


def evaluate(
    function: Any,
    logits: Tensor,
    target: Tensor,
    knobs: dict[str, Any],
    clip: tuple[float, float | None, float] | None = None,
    class_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The values of a loss over the last dimension of `logits`, and the weights it gives them (None: all alike).

    `clip` is (tau, delta, p). `class_weight` acts here on soft targets alone, where it weights the term of each class.
    """
    tau, delta, p = clip or (None, None, 2.0)
    soft = target.is_floating_point()
    if "num_classes" in function.wants:
        knobs = {**knobs, "num_classes": logits.shape[-1]}
    if not soft and function.second != "log_probs":
        log_p, mean = row_log_probs(logits, target, tau, delta, p=p, mean=function.second != "_")
        return function.phi(log_p, mean, **knobs), None

    log_probs = clipped_log_probs(logits, tau, delta, p=p)
    target = target.to(log_probs.dtype) if soft else target
    if function.second == "log_probs":
        if soft and class_weight is not None:
            raise ValueError(f"{function.__name__} takes class weights with class-index targets only.")
        log_p = (target * log_probs).sum(-1) if soft else pick(log_probs, target)
        return function.phi(log_p, log_probs, **knobs)
    terms = target if class_weight is None else target * class_weight.to(target.dtype)
    return (terms * function.phi(log_probs, log_probs.mean(-1, keepdim=True), **knobs)).sum(-1), None


def check_classes(logits: Tensor) -> None:
    """Check that logits [..., K] have at least two classes."""
    check_logits(logits)
    if logits.shape[-1] < 2:
        raise ValueError(
            f"There must be at least two logits per example, got {logits.shape[-1]}: turn a single one into two, for "
            "instance by torch.cat([-logits, logits], 1) / 2, and use class indices 0 and 1."
        )


def check_target(logits: Tensor, target: Tensor, ignore_index: int | None = None) -> tuple[Tensor, Tensor | None]:
    """Check a target against logits [..., K]; return it ready for use and the mask of what is not ignored, or None.

    What needs a look at the values is checked in eager mode on a CPU alone: elsewhere it would wait for the device.
    """
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a tensor, got {type(target).__name__}: use torch.as_tensor(target).")
    check_classes(logits)
    classes = logits.shape[-1]
    look = eager_on_cpu(logits)
    if target.is_floating_point():
        if target.shape != logits.shape:
            hint = " Class indices must be integers: use target.long()." if target.shape == logits.shape[:-1] else ""
            raise ValueError(
                f"Probability targets must have the shape of the logits, {tuple(logits.shape)}, "
                f"got {tuple(target.shape)}.{hint}"
            )
        if look and target.numel():
            tolerance = 1e-3 if target.dtype in (torch.float32, torch.float64) else 2e-2
            sums = target.sum(-1, dtype=torch.float32)
            if not (target.min() >= 0 and (sums - 1).abs().max() <= tolerance):  # so that NaN is refused too
                single = " If these are N single logits, use torch.stack([-z, z], 1) / 2 and target.long()."
                raise ValueError(
                    "Probability targets must be non-negative and sum to 1 over the classes. Multi-label targets are "
                    "not supported: train one two-class problem per label, or normalise the rows."
                    + (single if logits.ndim == 1 else "")
                )
        return target, None
    if target.shape != logits.shape[:-1]:
        if target.shape == logits.shape:
            raise ValueError(
                "An integer target in the shape of the logits is a multi-label target, which is not supported: give "
                "class indices (one-hot rows: target.argmax(1)), or probabilities as target.float()."
            )
        raise ValueError(
            f"Logits of shape {tuple(logits.shape)} (classes last) need targets of shape {tuple(logits.shape[:-1])}, "
            f"got {tuple(target.shape)}."
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

    `detach_weight` treats the factor as a constant, which is what the public robust-loss code bases do.
    """
    at_least(0, gamma=gamma)
    log_p_factor = log_p.detach() if detach_weight else log_p
    # With gamma < 1 the power has no gradient at p_y = 1: the clamp cuts it there, where the loss is flat anyway.
    return one_minus_p(log_p_factor).clamp_min(torch.finfo(log_p.dtype).tiny) ** gamma * -log_p


@loss
def mae(log_p: Tensor, _: None, *, scale: float = 2.0) -> Tensor:
    """Mean absolute error, `|e_y - p|_1 = 2(1-p_y)`; ``scale=1`` is the "reduced" MAE of other code bases."""
    at_least(0, scale=scale)
    return scale * one_minus_p(log_p)


@loss
def phuber_ce(log_p: Tensor, _: None, *, threshold: float = 10.0) -> Tensor:
    """Partially Huberised CE: `-log p_y`, made linear in p_y where `p_y <= 1/t`, t the threshold.

    The paper takes a threshold of 10 on CIFAR-10 and 30 on CIFAR-100 and WebVision.
    """
    _above_one(threshold=threshold)
    linear = math.log(threshold) + 1 - threshold * log_p.exp()
    return torch.where(log_p <= -math.log(threshold), linear, -log_p)


@loss
def rce(log_p: Tensor, _: None, *, log_zero: float = LOG_ZERO) -> Tensor:
    """Reverse cross entropy, `-A (1-p_y)` with A the value taken for log 0 (`log_zero`, ln 1e-4)."""
    if not -math.inf < log_zero < 0:
        raise ValueError(f"log_zero stands for log 0 and must be negative and finite, got {log_zero}.")
    return -log_zero * one_minus_p(log_p)


@loss
def sce(log_p: Tensor, _: None, *, alpha: float = 0.5, beta: float = 1.0, log_zero: float = LOG_ZERO) -> Tensor:
    """Symmetric cross entropy, `alpha CE + beta RCE`."""
    at_least(0, alpha=alpha, beta=beta)
    return alpha * -log_p + beta * _phi(rce)(log_p, None, log_zero=log_zero)


@loss
def gce(log_p: Tensor, _: None, *, q: float = 0.7) -> Tensor:
    """Generalised cross entropy, `(1 - p_y^q)/q`.

    >>> gce(torch.zeros(1, 4), torch.tensor([2]), q=1.0)
    tensor([0.7500])
    """
    check_positive("q", q)
    return torch.expm1(q * log_p) / -q


@loss
def taylor_ce(log_p: Tensor, _: None, *, order: int = 2) -> Tensor:
    """Taylor cross entropy, `sum_i (1-p_y)^i / i` for i from 1 to `order`.

    The paper does not state its order; 2 is this project's choice.
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
def nce(log_p: Tensor, mean_log_p: Tensor, *, num_classes: int, scale: float = 1.0) -> Tensor:
    """Normalised cross entropy, `log p_y / sum_k log p_k`."""
    at_least(0, scale=scale)
    return scale / num_classes * (log_p / mean_log_p)


@loss
def ael(log_p: Tensor, _: None, *, a: float = 2.5) -> Tensor:
    """Asymmetric exponential loss, `exp(-p_y/a)` (not shifted: its minimum is `exp(-1/a)`)."""
    check_positive("a", a)
    return torch.exp(log_p.exp() / -a)


@loss
def aul(log_p: Tensor, _: None, *, a: float = 5.5, q: float = 3.0) -> Tensor:
    """Asymmetric unhinged loss, `((a-p_y)^q - (a-1)^q)/q` with a > 1."""
    _above_one(a=a)
    check_positive("q", q)
    return _power_gap(a - 1, one_minus_p(log_p), q)


@loss
def agce(log_p: Tensor, _: None, *, a: float = 0.6, q: float = 0.6) -> Tensor:
    """Asymmetric generalised cross entropy, `((a+1)^q - (a+p_y)^q)/q`."""
    check_positive("a", a)
    check_positive("q", q)
    return -_power_gap(a + 1, torch.expm1(log_p), q)


@loss
def cores(
    log_p: Tensor,
    log_probs: Tensor,
    *,
    epoch: int | Tensor | None = None,
    class_counts: Tensor | None = None,
    beta: float = 2.0,
    warmup: int = 10,
    ramp: int = 30,
    sieve_after: int = 30,
    prior: Literal["labels", "uniform"] = "labels",
) -> tuple[Tensor, Tensor | None]:
    """CORES: `CE - beta_e sum_k pi_k l_k` with `l_k = -log(p_k + 1e-8)`.

    Without an epoch beta is constant and every example counts. With one, beta is 0 for `warmup` epochs, then rises
    linearly over `ramp` epochs and stays; after epoch `sieve_after` examples with CE above the mean of
    `l_k` are left out. `class_counts`, the counts of the (noisy) labels, give pi; without them, or with
    ``prior="uniform"``, it is uniform. `Loss.start_epoch` supplies both.
    """
    at_least(0, beta=beta, warmup=warmup)
    at_least(1, ramp=ramp)
    reference = torch.logaddexp(log_probs, log_probs.new_tensor(math.log(1e-8)))  # -l_k
    mean = weighted = reference.mean(-1)
    if class_counts is not None and prior == "labels":
        if class_counts.shape != reference.shape[-1:]:
            raise ValueError(f"class_counts needs {reference.shape[-1]} entries, got {tuple(class_counts.shape)}.")
        weighted = (reference * (class_counts / class_counts.sum()).to(reference)).sum(-1)
    if epoch is None:
        return beta * weighted - log_p, None
    now = torch.as_tensor(epoch, device=log_p.device)
    risen = torch.clamp((now - warmup) / max(ramp - 1, 1), 0, 1).to(log_p.dtype)
    kept = (mean - log_p <= 0) | (now <= sieve_after)
    return beta * risen * weighted - log_p, kept.to(log_p.dtype).detach()


# Active-passive sums. The paper uses them on CIFAR-100 and WebVision; the defaults are its CIFAR-100 settings.


@loss
def nce_mae(
    log_p: Tensor, mean_log_p: Tensor, *, num_classes: int, alpha: float = 50.0, beta: float = 1.0, scale: float = 1.0
) -> Tensor:
    """NCE + MAE, `alpha NCE + beta (1-p_y)`: the reduced MAE, unless `scale` says otherwise."""
    at_least(0, alpha=alpha, beta=beta)
    return alpha * _phi(nce)(log_p, mean_log_p, num_classes=num_classes) + beta * _phi(mae)(log_p, None, scale=scale)


@loss
def nce_agce(
    log_p: Tensor,
    mean_log_p: Tensor,
    *,
    num_classes: int,
    alpha: float = 50.0,
    beta: float = 0.1,
    a: float = 1.8,
    q: float = 3.0,
) -> Tensor:
    """NCE + AGCE, `alpha NCE + beta AGCE`; the paper's WebVision has a = 2.5."""
    at_least(0, alpha=alpha, beta=beta)
    return alpha * _phi(nce)(log_p, mean_log_p, num_classes=num_classes) + beta * _phi(agce)(log_p, None, a=a, q=q)


@loss
def nce_rce(
    log_p: Tensor,
    mean_log_p: Tensor,
    *,
    num_classes: int,
    alpha: float = 1.0,
    beta: float = 1.0,
    log_zero: float = LOG_ZERO,
) -> Tensor:
    """NCE + RCE, `alpha NCE + beta RCE`; not in the paper, defaults of its authors."""
    at_least(0, alpha=alpha, beta=beta)
    passive = _phi(rce)(log_p, None, log_zero=log_zero)
    return alpha * _phi(nce)(log_p, mean_log_p, num_classes=num_classes) + beta * passive


def one_minus_p(log_p: Tensor) -> Tensor:
    """1 - p from log p, exact also where p rounds to 1."""
    return -torch.expm1(log_p)


def _power_gap(base: float, change: Tensor, q: float) -> Tensor:
    """((base + change)^q - base^q) / q, to full precision also where the two powers are large and close."""
    return base**q / q * torch.expm1(q * torch.log1p(change / base))


def _phi(function: Any) -> Callable[..., Tensor]:
    return function.phi


def at_least(least: float, **knobs: float) -> None:
    """Refuse the first of `knobs` that is below `least` or not finite."""
    for name, value in knobs.items():
        if not least <= value < math.inf:
            raise ValueError(f"{name} must be at least {least} and finite, got {value}.")


def _above_one(**knobs: float) -> None:
    for name, value in knobs.items():
        if not 1 < value < math.inf:
            raise ValueError(f"{name} must be above 1 and finite, got {value}.")
