"""The values that a clipped loss can take: the geometry of the ball that a clip leaves, and what a loss makes of it."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from logitclip.losses import LOSSES
from logitclip.losses.contract import LossFunction, call, wanted_statistics

Range = tuple[float, float]


# --- the range of clipped cross entropy ------------------------------------------------------------------------------


def ce_bound_from_gap(gap: float, num_classes: int) -> float:
    """Cross entropy is at most log(1 + (K-1) e^gap), where gap = z_max - z_min.

    Args:
        gap: The difference between the largest and the smallest logit.
        num_classes: K.

    Returns:
        The bound.

    Raises:
        ValueError: If gap is negative or num_classes below 2.

    >>> logits = [2.0, -1.0, 0.5]
    >>> round(ce_bound_from_gap(max(logits) - min(logits), len(logits)), 4)
    3.7177

    Paper: Eq. 2.
    """
    check(gap >= 0, "gap is z_max - z_min and must be at least 0", gap)
    return _log_sum_exp(0.0, math.log(check_num_classes(num_classes) - 1) + gap)


def loss_bounds(tau: float, num_classes: int, delta: float | None = None, p: float = math.inf) -> Range:
    """Return the smallest and the largest value of clipped cross entropy.

    With s = max(tau, delta), for p = inf: log(1 + (K-1) e^(-2s)) <= CE <= log(1 + (K-1) e^(2s)), the printed bounds.
    They hold for every p. For p < inf the result is the exact range on the p-ball, which is narrower.

    Args:
        tau: The threshold of the clip; `math.inf` means no clip.
        num_classes: K.
        delta: The scale of the clip; None means tau.
        p: Which norm is clipped.

    Returns:
        (lower, upper).

    Raises:
        ValueError: If an option is out of range.

    >>> lower, upper = loss_bounds(1.0, 10)
    >>> round(lower, 4), round(upper, 4)
    (0.7966, 4.2121)
    >>> lower, upper = loss_bounds(1.0, 10, p=2)
    >>> round(lower, 4), round(upper, 4)
    (1.4199, 3.2893)

    Paper: Prop 2.1.
    """
    ball = _ball(tau, num_classes, delta, p)
    return ball.lower, ball.upper


def probability_bounds(tau: float, num_classes: int, delta: float | None = None, p: float = math.inf) -> Range:
    """M and N, the smallest and the largest softmax probability of clipped logits.

    They are e^-upper and e^-lower of `loss_bounds`. For p = inf: M = 1 / (1 + (K-1) e^(2s)) and
    N = 1 / (1 + (K-1) e^(-2s)).

    Args:
        tau, num_classes, delta, p: As for `loss_bounds`.

    Returns:
        (M, N).

    Raises:
        ValueError: If an option is out of range.

    >>> m, n = probability_bounds(1.0, 10)
    >>> round(m, 4), round(n, 4)
    (0.0148, 0.4509)
    """
    lower, upper = loss_bounds(tau, num_classes, delta, p)
    return math.exp(-upper), math.exp(-lower)


class Ball(NamedTuple):
    """What a bound knows about the clip: the range of CE, and how far z_y can exceed the mean of the other logits.

    Attributes:
        lower: Smallest CE.
        upper: Largest CE.
        lead: Largest difference between z_y and the mean of the other logits.
        num_classes: K.

    >>> Ball(*loss_bounds(1.0, 10), lead=2.0, num_classes=10).lead
    2.0
    """

    lower: float
    upper: float
    lead: float
    num_classes: int


def _ball(tau: float, num_classes: int, delta: float | None, p: float) -> Ball:
    check(tau > 0, "tau must be positive", tau)
    check(delta is None or delta > 0, "delta must be positive", delta)
    check(p >= 1, "p must be at least 1", p)
    num_classes = check_num_classes(num_classes)
    radius = tau if delta is None else max(tau, delta)
    # z_y - mean_{k != y} z_k is linear in z, so its maximum is the radius times a dual norm. CE is convex and symmetric
    # in the other classes: at its minimum they are all equal, and the lead is at its maximum.
    dual = 1 - 1 / p
    lead = radius * (1 + (num_classes - 1) ** (1 - 1 / dual)) ** dual if dual else radius
    log_others = math.log(num_classes - 1)
    upper = _log_sum_exp(0.0, log_others + lead)  # z_y low, the others equal: the maximum, unless one rival does better
    if 1 < p < math.inf and num_classes > 2 and radius < math.inf:
        upper = max(upper, _one_rival_upper(radius, num_classes - 2, p))
    return Ball(_log_sum_exp(0.0, log_others - lead), upper, lead, num_classes)


def _one_rival_upper(radius: float, others: int, p: float) -> float:
    """CE where one rival class stands out above equal others, or -inf if no such point is stationary on the sphere.

    At a maximum of CE on the sphere all logits but z_y = -w solve z^(p-1) e^(-z) = const, so they take two values,
    v < p-1 < u, and the second-order condition allows u only once; moreover w^(p-1) = u^(p-1) + others * v^(p-1).
    With t = log(u/v) this is a curve, whose norm first falls and then rises in t. Its last crossing of the radius is
    the local maximum.
    """

    def log_point(t: float) -> tuple[float, float, float]:
        """log u, log w and the log of the norm."""
        log_u = math.log((p - 1) * t / -math.expm1(-t))
        log_ratio = math.log1p(others * math.exp(-(p - 1) * t)) / (p - 1)
        return log_u, log_u + log_ratio, log_u + _log_sum_exp(p * log_ratio, 0.0, math.log(others) - p * t) / p

    last = radius / ((p - 1) * 2 ** (1 / p))  # the norm is above 2^(1/p) u, and u above (p-1) max(1, t)
    if last <= 1:
        return -math.inf
    low, high = 0.0, last
    for _ in range(100):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, right) if log_point(left)[2] < log_point(right)[2] else (left, high)
    low, high, log_radius = high, last, math.log(radius)
    if log_point(low)[2] >= log_radius:
        return -math.inf
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if log_point(middle)[2] < log_radius else (low, middle)
    log_u, log_w, _ = log_point(low)
    u, w = math.exp(log_u), math.exp(log_w)
    return _log_sum_exp(0.0, u + w, math.log(others) + u * math.exp(-low) + w)


# --- the range of every other clipped loss ---------------------------------------------------------------------------

FAR = 1e150  # stands for an infinite cross entropy, so that 0 * FAR is 0 and FAR / FAR is 1
BOUNDS: dict[str, Callable[..., Range]] = {}  # by name, for losses whose range does not follow from their phi


def bounds_of(loss: str) -> Callable[[Callable[..., Range]], Callable[..., Range]]:
    """Register ``function(ball, **knobs) -> (lower, upper)`` as the range of a loss that is not monotone.

    Args:
        loss: The name of the loss. `ball` is a `Ball`, and the knobs are those of the loss.

    Returns:
        A decorator.

    >>> from logitclip.losses import loss
    >>> @loss
    ... def wave(log_p, _, *, scale: float = 1.0):
    ...     '''A loss between -scale and scale.'''
    ...     return scale * (10 * log_p).sin()
    >>> @bounds_of("wave")
    ... def wave_bounds(ball, *, scale=1.0):
    ...     return -scale, scale
    >>> base_loss_bounds("wave:scale=2", tau=1.0, num_classes=10)
    (-2.0, 2.0)
    """

    def register(function: Callable[..., Range]) -> Callable[..., Range]:
        BOUNDS[loss] = function
        return function

    return register


def base_loss_bounds(
    loss: str, tau: float, num_classes: int, delta: float | None = None, p: float = math.inf, **knobs: Any
) -> Range:
    """Return the range of any loss on clipped logits.

    For a loss that is monotone in p_y it is [phi(N), phi(M)], always inside Prop 2.4's bound. A loss of p_y and
    sum_k log p_k is evaluated at the ends of what both can be; NCE's range is then exact below for every p, and above
    for p = inf. That of cores is for its full `beta` and for any prior.

    Args:
        loss: Its name, or a spec such as "gce:q=0.7".
        tau: The threshold of the clip; `math.inf` means no clip.
        num_classes: K.
        delta: The scale of the clip; None means tau.
        p: Which norm is clipped.
        **knobs: Knobs of the loss.

    Returns:
        (lower, upper); (-inf, inf) for a loss that is not monotone and has no bound of its own, see `bounds_of`.

    Raises:
        ValueError: If the loss is unknown or an option is out of range.

    >>> lower, upper = base_loss_bounds("gce", 1.0, 10, q=0.7)
    >>> round(lower, 4), round(upper, 4)
    (0.6106, 1.3537)
    >>> lower, upper = base_loss_bounds("nce", 1.0, 10, p=2)
    >>> round(lower, 4), round(upper, 4)
    (0.0599, 0.1405)
    """
    name, knobs = LOSSES.parse(loss, **knobs)
    function = LOSSES[name]
    ball = _ball(tau, num_classes, delta, p)
    if name in BOUNDS:
        return BOUNDS[name](ball, **knobs)
    wanted = wanted_statistics(function, knobs).names
    if function.takes[0] != "log_p" or "state" in function.takes or set(wanted) - {"sum_log_p", "classes"}:
        if knobs.get("matrix") is None:
            function(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), **knobs)  # refuses knobs out of range
        return -math.inf, math.inf
    losses = _grid(ball)[:, None]  # -log p_y from the smallest to the largest, [C, 1]
    sums = _range_of_sums(losses, ball) if "sum_log_p" in wanted else losses
    log_p, sum_log_p = torch.broadcast_tensors(-losses, -sums)
    found = {"sum_log_p": sum_log_p, "classes": torch.full_like(log_p, num_classes)}
    values = call(function, log_p, {name: found[name] for name in wanted}, knobs)
    # Monotone in the sum for every p_y, and in p_y along both ends of the sum: the extremes are at the corners.
    if not (_monotone(values, 1) and _monotone(values[:, [0, -1]], 0)):
        return -math.inf, math.inf
    corners = values[[0, -1]][:, [0, -1]]
    return _limit(corners.min()), _limit(corners.max())


def _limit(value: Tensor) -> float:
    """Return a value of phi as a float, with infinity for what grew with FAR."""
    return float(value) if value.abs() < 1e100 else math.copysign(math.inf, value)


def _grid(ball: Ball) -> Tensor:
    """Values of CE_y = -log p_y in the ball: half of them evenly spaced, half with evenly spaced p_y, ends included."""
    lower, upper = ball.lower, min(ball.upper, FAR)
    in_p = -np.log(np.linspace(math.exp(-lower), math.exp(-upper), 513)[1:-1])
    return torch.from_numpy(np.sort(np.concatenate([np.linspace(lower, upper, 513), in_p.clip(lower, upper)])))


def _range_of_sums(losses: Tensor, ball: Ball) -> Tensor:
    """Values of sum_k CE_k for each CE_y, from the smallest to the largest, [C, 9].

    The other terms sum to at most (K-1)(CE_y + lead), by z_y - z_k = CE_k - CE_y, and to at least
    (K-1) log((K-1) / (1 - p_y)), by Jensen's inequality.
    """
    others = ball.num_classes - 1
    most = others * (losses + min(ball.lead, FAR))
    least = (others * (math.log(others) - (-torch.expm1(-losses)).log())).minimum(most)
    return losses + least + torch.linspace(0, 1, 9, dtype=torch.float64) * (most - least)


def _monotone(values: Tensor, dim: int, tolerance: float = 1e-12) -> bool:
    """Return whether all values rise along `dim`, or all fall, up to rounding."""
    count = values.shape[dim] - 1
    before, after = values.narrow(dim, 0, count), values.narrow(dim, 1, count)
    slack = tolerance * (1 + before.abs().minimum(after.abs()))
    return bool((after <= before + slack).all() or (after >= before - slack).all())


@bounds_of("unhinged")
def _unhinged(ball: Ball) -> Range:
    """mean(z) - z_y is -(K-1)/K times the lead of z_y over the mean of the others, which lies in [-lead, lead].

    Both ends are reached, and the bound is linear in the radius. Without a clip the loss is not bounded below.
    """
    furthest = (ball.num_classes - 1) / ball.num_classes * ball.lead
    return -furthest, furthest


@bounds_of("cores")
def _cores(ball: Ball, *, prior: str = "labels", **knobs: Any) -> Range:
    """CE_y - beta sum_k prior_k l_k rises in CE_y and falls in each l_k, so its range is that of the box of both.

    For a uniform prior the mean of l_k is at least what it is at p_k = 1/K, by Jensen's inequality. The shares of the
    labels are not known here: for "labels" the range holds for any.
    """

    def value(loss: float, others: float) -> float:
        log_p = -torch.tensor([loss, others], dtype=torch.float64).clamp_max(FAR)
        return _limit(LOSSES["cores"].phi(log_p[0], log_p[1:], None, **knobs)[0])

    nearest = math.log(ball.num_classes) if prior == "uniform" else ball.lower
    return value(ball.lower, ball.upper), value(ball.upper, nearest)


def lipschitz_constant(
    loss: str, tau: float, num_classes: int, delta: float | None = None, p: float = math.inf, **knobs: Any
) -> float:
    """Return the Lipschitz constant on [M, N] of a loss that depends only on p_y.

    Args:
        loss, tau, num_classes, delta, p, knobs: As for `base_loss_bounds`.

    Returns:
        The largest `|dphi/dp_y|`; inf where it exceeds a float.

    Raises:
        ValueError: If the loss depends on all probabilities, or if its slope is not monotone.

    >>> round(lipschitz_constant("ce", 1.0, 10), 3) == round(1 / probability_bounds(1.0, 10)[0], 3)
    True
    >>> lipschitz_constant("mae", 1.0, 10)
    2.0
    """
    name, knobs = LOSSES.parse(loss, **knobs)
    function = LOSSES[name]
    if function.takes[0] != "log_p" or "state" in function.takes or wanted_statistics(function, knobs).names:
        raise ValueError(f"{name} depends on all probabilities, Prop 2.4 is about losses of only p_y.")
    slopes = _log_slopes(function, -_grid(_ball(tau, num_classes, delta, p)), knobs)
    if not _monotone(slopes, 0, tolerance=1e-6):
        raise ValueError(f"The slope of {name} in p_y is not monotone, so its largest value is not known.")
    return float(slopes[[0, -1]].max().exp())


def _log_slopes(function: LossFunction[...], log_p: Tensor, knobs: dict[str, Any]) -> Tensor:
    """log |dphi/dp| = log |dphi/dlog p| - log p at each log p.

    Near p = 0 rounding may hide how phi changes. There the slope is continued as a power of p.
    """

    def gradient(log_p: Tensor) -> Tensor:
        log_p = log_p.clone().requires_grad_()
        return torch.autograd.grad(call(function, log_p, {}, knobs).sum(), log_p)[0].abs()

    probe = -torch.arange(700, dtype=torch.float64)
    size = gradient(probe)
    probe = probe[size > 1e-8 * size.max()][-2:]
    if len(probe) < 2:
        return torch.full_like(log_p, -math.inf)  # a constant
    near, last = gradient(probe).log() - probe
    power = torch.where((last - near).abs() < 1e-4, 0.0, near - last)  # constant slopes differ by rounding
    exact = gradient(log_p.clamp_min(probe[-1])).log() - log_p.clamp_min(probe[-1])
    return exact + power * (log_p - probe[-1]).clamp_max(0.0)


def lipschitz_loss_bound(lipschitz: float, phi_at_m: float, probabilities: Range) -> float:
    """A clipped loss phi(p_y) is at most `L (N - M) + |phi(M)|` in absolute value, L the Lipschitz constant of phi.

    Args:
        lipschitz: L.
        phi_at_m: phi(M).
        probabilities: (M, N).

    Returns:
        The bound.

    Raises:
        ValueError: If L is negative or (M, N) are not probabilities in order.

    >>> m, n = probability_bounds(1.0, 10)
    >>> round(lipschitz_loss_bound(2.0, 2 * (1 - m), (m, n)), 4)
    2.8424

    Paper: Prop 2.4.
    """
    m, n = probabilities
    check(lipschitz >= 0, "a Lipschitz constant must be at least 0", lipschitz)
    check(0 <= m <= n <= 1, "probabilities must be (M, N) with 0 <= M <= N <= 1", probabilities)
    return times(n - m, lipschitz) + abs(phi_at_m)


# --- checks and arithmetic that neither overflows nor makes NaN of 0 * inf -------------------------------------------


def check(rule: bool, sentence: str, value: object) -> None:
    if not rule:
        raise ValueError(f"{sentence}, got {value!r}")


def check_num_classes(num_classes: int) -> int:
    whole = hasattr(num_classes, "__index__")
    check(whole and num_classes >= 2, "num_classes must be an integer of at least 2", num_classes)
    check(num_classes <= 10**15, "num_classes must be at most 10^15", num_classes)
    return operator.index(num_classes)


def times(a: float, b: float) -> float:
    return a * b if a else 0.0


def _log_sum_exp(*terms: float) -> float:
    return float(np.logaddexp.reduce(terms))
