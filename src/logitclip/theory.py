"""The paper's bounds: how large a clipped loss can get, and what label noise can then cost.

A clip with threshold `tau` and scale `delta` returns logits with a norm in [0, tau) or of exactly delta, so everything
here is a statement about the ball of radius max(tau, delta) in the p-norm. There are three steps, each usable alone::

    ranges     loss_bounds, probability_bounds, base_loss_bounds     the values that a clipped loss can take
    risk gaps  symmetric_, asymmetric_, instance_, trivial_risk_gap  from the range of *any* loss to the cost of noise
    table      all_bounds                                            all of them for one setting, the smallest marked

`p=math.inf` is the paper's case and gives its printed formulas. They hold for every other p as well, since
||z||_inf <= ||z||_p (the paper prints this chain of norms the other way round, which would not carry them over).
With another p the functions return the sharper range that this p allows.

The values of a loss come from its `phi` in `logitclip.losses`, in float64; this module has the geometry and the proofs.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from logitclip.losses import LOSSES

Range = tuple[float, float]


# --- the range of clipped cross entropy ------------------------------------------------------------------------------


def ce_bound_from_gap(gap: float, num_classes: int) -> float:
    """Cross entropy is at most log(1 + (K-1) e^gap), where gap = z_max - z_min.

    Args:
        gap: the difference between the largest and the smallest logit.
        num_classes: K.

    Returns:
        The bound.

    Raises:
        ValueError: if gap is negative or num_classes below 2.

    >>> logits = [2.0, -1.0, 0.5]
    >>> round(ce_bound_from_gap(max(logits) - min(logits), len(logits)), 4)
    3.7177

    Paper: Eq. 2.
    """
    _require(gap >= 0, "gap is z_max - z_min and must be at least 0", gap)
    return _log1p_exp(math.log(_check_classes(num_classes) - 1) + gap)


def loss_bounds(tau: float, num_classes: int, delta: float | None = None, p: float = math.inf) -> Range:
    """The smallest and the largest value of clipped cross entropy.

    With s = max(tau, delta), for p = inf: log(1 + (K-1) e^(-2s)) <= CE <= log(1 + (K-1) e^(2s)), the printed bounds.
    They hold for every p. For p < inf the result is the exact range on the p-ball, which is narrower.

    Args:
        tau: the threshold of the clip; `math.inf` means no clip.
        num_classes: K.
        delta: the scale of the clip; None means tau.
        p: which norm is clipped.

    Returns:
        (lower, upper).

    Raises:
        ValueError: if an option is out of range.

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

    They are e^-upper and e^-lower of `loss_bounds`, which has the same arguments. For p = inf:
    M = 1 / (1 + (K-1) e^(2s)) and N = 1 / (1 + (K-1) e^(-2s)).

    >>> m, n = probability_bounds(1.0, 10)
    >>> round(m, 4), round(n, 4)
    (0.0148, 0.4509)
    """
    lower, upper = loss_bounds(tau, num_classes, delta, p)
    return math.exp(-upper), math.exp(-lower)


class Ball(NamedTuple):
    """The clip as a bound sees it: the range of CE, and how far z_y can lead the mean of the other logits."""

    lower: float
    upper: float
    lead: float
    num_classes: int


def _ball(tau: float, num_classes: int, delta: float | None, p: float) -> Ball:
    _require(tau > 0, "tau must be positive", tau)
    _require(delta is None or delta > 0, "delta must be positive", delta)
    _require(p >= 1, "p must be at least 1", p)
    num_classes = _check_classes(num_classes)
    radius = tau if delta is None else max(tau, delta)
    # z_y - mean_{k != y} z_k is linear in z, so its maximum is the radius times a dual norm. CE is convex and symmetric
    # in the other classes: at its minimum they are all equal, and the lead is at its maximum.
    dual = 1 - 1 / p
    lead = radius * (1 + (num_classes - 1) ** (1 - 1 / dual)) ** dual if dual else radius
    log_others = math.log(num_classes - 1)
    upper = _log1p_exp(log_others + lead)  # z_y low and the others equal: the maximum, unless one rival does better
    if 1 < p < math.inf and num_classes > 2 and radius < math.inf:
        upper = max(upper, _one_rival_upper(radius, num_classes - 2, p))
    return Ball(_log1p_exp(log_others - lead), upper, lead, num_classes)


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
        loss: the name of the loss. `ball` is a `Ball`, and the knobs are those of the loss.

    Returns:
        A decorator.
    """

    def register(function: Callable[..., Range]) -> Callable[..., Range]:
        BOUNDS[loss] = function
        return function

    return register


def base_loss_bounds(
    loss: str, tau: float, num_classes: int, delta: float | None = None, p: float = math.inf, **knobs: Any
) -> Range:
    """The range of any loss on clipped logits.

    For a loss that is monotone in p_y it is [phi(N), phi(M)], always inside Prop 2.4's bound. A loss of p_y and
    sum_k log p_k is evaluated at the ends of what both can be; NCE's range is then exact below for every p, and above
    for p = inf. That of cores is for its full `beta` and for any prior.

    Args:
        loss: its name, or a spec such as "gce:q=0.7".
        tau: the threshold of the clip; `math.inf` means no clip.
        num_classes: K.
        delta: the scale of the clip; None means tau.
        p: which norm is clipped.
        **knobs: of the loss.

    Returns:
        (lower, upper); (-inf, inf) for a loss that is not monotone and has no bound of its own, see `bounds_of`.

    Raises:
        ValueError: if the loss is unknown or an option is out of range.

    >>> lower, upper = base_loss_bounds("gce", 1.0, 10, q=0.7)
    >>> round(lower, 4), round(upper, 4)
    (0.6106, 1.3537)
    >>> lower, upper = base_loss_bounds("nce", 1.0, 10, p=2)
    >>> round(lower, 4), round(upper, 4)
    (0.0599, 0.1405)
    """
    name, knobs = LOSSES.parse(loss, **knobs)
    function: Any = LOSSES[name]
    ball = _ball(tau, num_classes, delta, p)
    if name in BOUNDS:
        return BOUNDS[name](ball, **knobs)
    if function.second == "log_probs":
        return -math.inf, math.inf
    losses = _grid(ball)[:, None]  # -log p_y from the smallest to the largest, [C, 1]
    if function.second == "_":
        values = function.phi(-losses, None, **knobs)
    else:
        values = function.phi(*torch.broadcast_tensors(-losses, -_sums(losses, ball)), **knobs)
    # Monotone in the sum for every p_y, and in p_y along both ends of the sum: the extremes are at the corners.
    if not (_monotone(values, 1) and _monotone(values[:, [0, -1]], 0)):
        return -math.inf, math.inf
    corners = values[[0, -1]][:, [0, -1]]
    return _limit(corners.min()), _limit(corners.max())


def _limit(value: Tensor) -> float:
    """A value of phi as a float, with infinity for what grew with FAR."""
    return float(value) if value.abs() < 1e100 else math.copysign(math.inf, value)


def _grid(ball: Ball) -> Tensor:
    """Values of CE_y = -log p_y in the ball: half of them evenly spaced, half with evenly spaced p_y, ends included."""
    lower, upper = ball.lower, min(ball.upper, FAR)
    in_p = -np.log(np.linspace(math.exp(-lower), math.exp(-upper), 513)[1:-1])
    return torch.from_numpy(np.sort(np.concatenate([np.linspace(lower, upper, 513), in_p.clip(lower, upper)])))


def _sums(losses: Tensor, ball: Ball) -> Tensor:
    """Values of sum_k CE_k for each CE_y, from the smallest to the largest, [C, 9].

    The other terms sum to at most (K-1)(CE_y + lead), by z_y - z_k = CE_k - CE_y, and to at least
    (K-1) log((K-1) / (1 - p_y)), by Jensen's inequality.
    """
    others = ball.num_classes - 1
    most = others * (losses + min(ball.lead, FAR))
    least = (others * (math.log(others) - (-torch.expm1(-losses)).log())).minimum(most)
    return losses + least + torch.linspace(0, 1, 9, dtype=torch.float64) * (most - least)


def _monotone(values: Tensor, dim: int, tolerance: float = 1e-12) -> bool:
    """Whether all values rise along `dim`, or all fall, up to rounding."""
    count = values.shape[dim] - 1
    before, after = values.narrow(dim, 0, count), values.narrow(dim, 1, count)
    slack = tolerance * (1 + before.abs().minimum(after.abs()))
    return bool((after <= before + slack).all() or (after >= before - slack).all())


@bounds_of("cores")
def _cores(ball: Ball, *, prior: str = "labels", **knobs: Any) -> Range:
    """CE_y - beta sum_k prior_k l_k rises in CE_y and falls in each l_k, so its range is that of the box of both.

    For a uniform prior the mean of l_k is at least what it is at p_k = 1/K, by Jensen's inequality. The shares of the
    labels are not known here: for "labels" the range holds for any.
    """

    def value(loss: float, others: float) -> float:
        cores: Any = LOSSES["cores"]
        log_p = -torch.tensor([loss, others], dtype=torch.float64).clamp_max(FAR)
        return _limit(cores.phi(log_p[0], log_p[1:], None, **knobs)[0])

    nearest = math.log(ball.num_classes) if prior == "uniform" else ball.lower
    return value(ball.lower, ball.upper), value(ball.upper, nearest)


def lipschitz_constant(
    loss: str, tau: float, num_classes: int, delta: float | None = None, p: float = math.inf, **knobs: Any
) -> float:
    """The Lipschitz constant on [M, N] of a loss that depends on p_y alone, with the arguments of `base_loss_bounds`.

    Returns:
        The largest `|dphi/dp_y|`; inf where it exceeds a float.

    Raises:
        ValueError: if the loss depends on all probabilities, or if its slope is not monotone.

    >>> round(lipschitz_constant("ce", 1.0, 10), 3) == round(1 / probability_bounds(1.0, 10)[0], 3)
    True
    >>> lipschitz_constant("mae", 1.0, 10)
    2.0
    """
    name, knobs = LOSSES.parse(loss, **knobs)
    function: Any = LOSSES[name]
    if function.second != "_":
        raise ValueError(f"{name} depends on all probabilities, Prop 2.4 is about losses of p_y alone.")
    slopes = _log_slopes(function.phi, -_grid(_ball(tau, num_classes, delta, p)), knobs)
    if not _monotone(slopes, 0, tolerance=1e-6):
        raise ValueError(f"The slope of {name} in p_y is not monotone, so its largest value is not known.")
    return float(slopes[[0, -1]].max().exp())


def _log_slopes(phi: Callable[..., Tensor], log_p: Tensor, knobs: dict[str, Any]) -> Tensor:
    """log |dphi/dp| = log |dphi/dlog p| - log p at each log p.

    Near p = 0 rounding may hide how phi changes. There the slope is continued as a power of p.
    """

    def gradient(log_p: Tensor) -> Tensor:
        log_p = log_p.clone().requires_grad_()
        return torch.autograd.grad(phi(log_p, None, **knobs).sum(), log_p)[0].abs()

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
        ValueError: if L is negative or (M, N) are not probabilities in order.

    >>> m, n = probability_bounds(1.0, 10)
    >>> round(lipschitz_loss_bound(2.0, 2 * (1 - m), (m, n)), 4)
    2.8424

    Paper: Prop 2.4.
    """
    m, n = probabilities
    _require(lipschitz >= 0, "a Lipschitz constant must be at least 0", lipschitz)
    _require(0 <= m <= n <= 1, "probabilities must be (M, N) with 0 <= M <= N <= 1", probabilities)
    return _times(n - m, lipschitz) + abs(phi_at_m)


# --- what label noise can cost ---------------------------------------------------------------------------------------
# f* minimises the clean risk R, f~ the noisy risk R^eta. Each theorem uses no more of a loss than its range, so the
# functions take a range: loss_bounds(...) gives the paper's A, B and C; base_loss_bounds(...) the same for any loss.


def trivial_risk_gap(bounds: Range) -> float:
    """upper - lower: no two risks of a loss within `bounds` differ by more, whatever the noise.

    For `loss_bounds` this is the paper's A = log((1 + (K-1) e^(2 tau)) / (1 + (K-1) e^(-2 tau))).

    >>> round(trivial_risk_gap(loss_bounds(1.0, 10)), 4)
    3.4155
    """
    lower, upper = bounds
    _require(lower <= upper, "bounds must be (lower, upper) with lower <= upper", bounds)
    return upper - lower


def symmetric_risk_gap(bounds: Range, num_classes: int, rate: float) -> float:
    """Symmetric noise of rate eta < 1 - 1/K: 0 <= R(f~) - R(f*) <= eta K / ((1-eta) K - 1) * (upper - lower).

    This is below the trivial bound only for eta < (K-1) / (2K). The paper allows eta = 1 - 1/K, where it divides by 0.

    >>> round(symmetric_risk_gap(loss_bounds(1.0, 10), 10, rate=0.2), 4)
    0.9759

    Paper: Thm 2.2.
    """
    _check_identifiable(rate, num_classes)
    return _times(rate * num_classes / ((1 - rate) * num_classes - 1), trivial_risk_gap(bounds))


def asymmetric_risk_gap(
    bounds: Range, transition: Sequence[Sequence[float]], prior: Sequence[float] | None = None
) -> float:
    """Class-conditional noise with eta_ij < 1 - eta_i: 0 <= R^eta(f*) - R^eta(f~) <= K (upper - lower) E[1 - eta_i].

    `transition[i][j]` is p(y = j | y* = i), K rows that sum to 1; `prior` the shares of the clean classes, uniform by
    default. The condition makes K (1 - eta_i) > 1, so the trivial bound is always smaller; it also proves the theorem
    for every bounded loss. (The printed proof takes CE(f*, j) = upper for each j != y*, true only for K = 2.)

    >>> round(asymmetric_risk_gap(loss_bounds(1.0, 2), [[0.9, 0.1], [0.3, 0.7]]), 4)
    3.2

    Paper: Thm 2.3.
    """
    rows = _check_transition(transition)
    prior = _check_prior(prior, len(rows))
    for i, row in enumerate(rows):
        j = max((j for j in range(len(row)) if j != i), key=row.__getitem__)
        if row[j] >= row[i]:
            raise ValueError(
                f"Thm 2.3 needs eta_ij < 1 - eta_i, but class {i} becomes {j} with probability {row[j]:g} "
                f"and stays with {row[i]:g}."
            )
    kept = sum(share * row[i] for i, (share, row) in enumerate(zip(prior, rows, strict=True)))
    return len(rows) * kept * trivial_risk_gap(bounds)


def instance_risk_gap(bounds: Range, num_classes: int, rate: float) -> float:
    """Instance-dependent noise: 0 <= R^eta(f*) - R^eta(f~) <= K (upper - lower) E[1 - eta_x], `rate` the mean of eta_x.

    Needs eta_xj < 1 - eta_x for every instance, which only the caller can know; it implies rate < 1 - 1/K, which is
    checked. As for Thm 2.3, the trivial bound is always smaller.

    >>> round(instance_risk_gap(loss_bounds(1.0, 10), 10, rate=0.4), 4)
    20.4932

    Paper: Thm E.1.
    """
    _check_identifiable(rate, num_classes)
    return num_classes * (1 - rate) * trivial_risk_gap(bounds)


# --- all of them in one table ----------------------------------------------------------------------------------------

CLEAN_GAP, NOISY_GAP = "clean-risk gap R(f~) - R(f*)", "noisy-risk gap R^eta(f*) - R^eta(f~)"


@dataclasses.dataclass(frozen=True)
class Bound:
    """One row of `all_bounds`: `quantity` lies in [lower, upper], if the bound applies."""

    quantity: str
    name: str
    paper: str  # the item of the paper, "" for a bound it does not print
    lower: float = math.nan
    upper: float = math.nan
    reason: str = ""  # why it does not apply
    smallest: bool = False  # of the bounds of this quantity that apply

    @property
    def applies(self) -> bool:
        return not self.reason


def all_bounds(
    tau: float,
    num_classes: int,
    *,
    delta: float | None = None,
    p: float = math.inf,
    loss: str = "ce",
    knobs: Mapping[str, Any] | None = None,
    noise: str | None = None,
    rate: float | None = None,
    transition: Sequence[Sequence[float]] | None = None,
    prior: Sequence[float] | None = None,
) -> list[Bound]:
    """Every bound for one clip, loss and noise, in the order loss, p_y, risk gaps, with the smallest of each marked.

    For p < inf each appears twice: as printed (max norm) and with the sharper range for this p.

    Args:
        knobs: of the loss, such as `{"q": 0.7}`.
        noise: "symmetric", "asymmetric" or "pair" (each class becomes the next one), or "instance", with its `rate`;
            or "transition" with its matrix. None: nothing about noise but the trivial bound, which always holds.
        transition, prior: as for `asymmetric_risk_gap`.

    >>> for bound in all_bounds(1.0, 10, noise="symmetric", rate=0.2):
    ...     if bound.smallest:
    ...         print(f"{bound.quantity}: {bound.upper:.4f} ({bound.name})")
    ce loss: 4.2121 (range)
    p_y: 0.4509 (M and N)
    clean-risk gap R(f~) - R(f*): 0.9759 (symmetric noise)
    noisy-risk gap R^eta(f*) - R^eta(f~): 3.4155 (trivial)
    """
    theorems = _theorems(num_classes, noise, rate, transition, prior)
    rows: list[Bound] = []
    for norm in dict.fromkeys((math.inf, p)):
        sharper = f", for p={norm:g}" if norm < math.inf else ""
        bounds = base_loss_bounds(loss, tau, num_classes, delta, norm, **(knobs or {}))
        probabilities = probability_bounds(tau, num_classes, delta, norm)
        if loss == "ce":
            gap = 2 ** (1 - 1 / norm) * max(tau, delta or tau)  # no two entries differ by more than 2^(1-1/p) ||z||_p
            rows.append(
                Bound("ce loss", f"z_max - z_min <= {gap:.4g}", "Eq. 2", 0.0, ce_bound_from_gap(gap, num_classes))
            )
        rows.append(
            Bound(f"{loss} loss", f"range{sharper}", "Prop 2.1" if loss == "ce" and not sharper else "", *bounds)
        )
        try:
            lipschitz = lipschitz_constant(loss, tau, num_classes, delta, norm, **(knobs or {}))
            limit = lipschitz_loss_bound(lipschitz, bounds[1], probabilities)
            rows.append(
                Bound(f"{loss} loss", f"Lipschitz constant {lipschitz:.4g}{sharper}", "Prop 2.4", -limit, limit)
            )
        except ValueError as error:
            rows.append(Bound(f"{loss} loss", f"Lipschitz constant{sharper}", "Prop 2.4", reason=str(error)))
        rows.append(Bound("p_y", f"M and N{sharper}", "Prop 2.4", *probabilities))
        for quantity, name, paper, theorem in theorems:
            try:
                rows.append(Bound(quantity, name + sharper, paper, 0.0, theorem(bounds)))
            except ValueError as error:
                rows.append(Bound(quantity, name + sharper, paper, reason=str(error)))
    groups = {row.quantity: [r for r in rows if r.quantity == row.quantity] for row in rows}
    best = [min((r for r in group if r.applies), key=lambda r: (r.upper, -r.lower)) for group in groups.values()]
    return [dataclasses.replace(r, smallest=any(r is b for b in best)) for group in groups.values() for r in group]


_Theorem = tuple[str, str, str, Callable[[Range], float]]


def _theorems(
    num_classes: int,
    noise: str | None,
    rate: float | None,
    transition: Sequence[Sequence[float]] | None,
    prior: Sequence[float] | None,
) -> list[_Theorem]:
    """The risk gaps to try, as (quantity, name, paper, theorem); one that does not apply raises ValueError."""
    matrix = noise == "transition"
    if noise not in (None, "symmetric", "asymmetric", "pair", "instance", "transition"):
        raise ValueError(
            f"No theorem is about {noise!r} noise; use symmetric, asymmetric, pair, instance or transition."
        )
    if matrix != (transition is not None) or (prior is not None and not matrix):
        raise ValueError("The noise 'transition' needs a transition matrix, and no other takes one or a prior.")
    if (noise is None or matrix) != (rate is None):
        raise ValueError(f"A rate is needed for symmetric, asymmetric, pair and instance noise alone; got {rate!r}.")
    eta = 0.0 if rate is None else rate
    _check_rate(eta)
    if transition is not None and len(_check_transition(transition)) != num_classes:
        raise ValueError(f"transition must have {num_classes} rows, one per class, got {len(transition)}.")

    def clean(bounds: Range) -> float:
        if noise != "symmetric":
            raise ValueError("It needs symmetric noise.")
        return symmetric_risk_gap(bounds, num_classes, eta)

    def noisy(bounds: Range) -> float:
        if transition is not None:
            return asymmetric_risk_gap(bounds, transition, prior)
        if noise in ("asymmetric", "pair") and eta >= 0.5:
            raise ValueError(f"It needs eta_ij < 1 - eta_i, that is a rate below 0.5, got {eta:g}.")
        return instance_risk_gap(bounds, num_classes, eta)  # B and C, for one rate in all classes

    def class_conditional(bounds: Range) -> float:
        if noise == "instance":
            raise ValueError("It needs noise that depends on the class alone.")
        return noisy(bounds)

    trivial: list[_Theorem] = [(quantity, "trivial", "", trivial_risk_gap) for quantity in (CLEAN_GAP, NOISY_GAP)]
    if noise is None:
        return trivial
    return [
        (CLEAN_GAP, "symmetric noise", "Thm 2.2", clean),
        (NOISY_GAP, "class-conditional noise", "Thm 2.3", class_conditional),
        (NOISY_GAP, "instance-dependent noise", "Thm E.1", noisy),
        *trivial,
    ]


# --- checks and arithmetic that neither overflows nor makes NaN of 0 * inf -------------------------------------------


def _require(rule: bool, sentence: str, value: object) -> None:
    if not rule:
        raise ValueError(f"{sentence}, got {value!r}")


def _check_classes(num_classes: int) -> int:
    whole = hasattr(num_classes, "__index__")
    _require(whole and num_classes >= 2, "num_classes must be an integer of at least 2", num_classes)
    _require(num_classes <= 10**15, "num_classes must be at most 10^15", num_classes)
    return operator.index(num_classes)


def _check_rate(rate: float) -> None:
    _require(0 <= rate <= 1, "rate must be between 0 and 1", rate)


def _check_identifiable(rate: float, num_classes: int) -> None:
    _check_rate(rate)
    limit = 1 - 1 / _check_classes(num_classes)
    # The tolerance lets no rounding of 1 - 1/K through, at which the factor of Thm 2.2 is infinite.
    _require(rate < limit - 1e-12, f"rate must be below 1 - 1/num_classes = {limit:.6g}", rate)


def _check_transition(transition: Sequence[Sequence[float]]) -> list[list[float]]:
    rows = [[float(entry) for entry in row] for row in transition]
    _check_classes(len(rows))
    for i, row in enumerate(rows):
        if len(row) != len(rows):
            raise ValueError(f"transition must be square, but row {i} of {len(rows)} has {len(row)} entries.")
        _check_distribution(row, f"row {i} of transition")
    return rows


def _check_prior(prior: Sequence[float] | None, num_classes: int) -> list[float]:
    if prior is None:
        return [1 / num_classes] * num_classes
    shares = [float(share) for share in prior]
    _require(len(shares) == num_classes, f"prior must have {num_classes} entries, one per class", len(shares))
    _check_distribution(shares, "prior")
    return shares


def _check_distribution(values: list[float], name: str) -> None:
    _require(all(value >= 0 for value in values), f"{name} must have no negative entry", values)
    _require(abs(math.fsum(values) - 1) < 1e-6, f"{name} must sum to 1", math.fsum(values))


def _times(a: float, b: float) -> float:
    return a * b if a else 0.0


def _log1p_exp(x: float) -> float:
    """log(1 + e^x)."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _log_sum_exp(*terms: float) -> float:
    top = max(terms)
    return top + math.log(sum(math.exp(term - top) for term in terms))
