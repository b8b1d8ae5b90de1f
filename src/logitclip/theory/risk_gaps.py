"""What label noise can cost: from the range of a loss to a bound of a risk gap, and all bounds in one table."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from logitclip.noise import read_matrix
from logitclip.theory.ranges import (
    Range,
    base_loss_bounds,
    ce_bound_from_gap,
    check,
    check_num_classes,
    lipschitz_constant,
    lipschitz_loss_bound,
    probability_bounds,
    times,
)

# f* minimises the clean risk R, f~ the noisy risk R^eta. Each theorem uses no more of a loss than its range, so the
# functions take a range: loss_bounds(...) gives the paper's A, B and C; base_loss_bounds(...) the same for any loss.


def trivial_risk_gap(bounds: Range) -> float:
    """upper - lower: no two risks of a loss within `bounds` differ by more, whatever the noise.

    For `loss_bounds` this is the paper's A = log((1 + (K-1) e^(2 tau)) / (1 + (K-1) e^(-2 tau))).

    Args:
        bounds: (lower, upper), the range of the loss.

    Returns:
        The bound.

    Raises:
        ValueError: If lower > upper.

    >>> from logitclip.theory import loss_bounds
    >>> round(trivial_risk_gap(loss_bounds(1.0, 10)), 4)
    3.4155
    """
    lower, upper = bounds
    check(lower <= upper, "bounds must be (lower, upper) with lower <= upper", bounds)
    return upper - lower


def symmetric_risk_gap(bounds: Range, num_classes: int, rate: float) -> float:
    """Symmetric noise of rate eta < 1 - 1/K: 0 <= R(f~) - R(f*) <= eta K / ((1-eta) K - 1) * (upper - lower).

    This is below the trivial bound only for eta < (K-1) / (2K). The paper allows eta = 1 - 1/K, where it divides by 0.

    Args:
        bounds: (lower, upper), the range of the loss.
        num_classes: K.
        rate: Eta.

    Returns:
        The bound.

    Raises:
        ValueError: If the rate is not in [0, 1 - 1/K).

    >>> from logitclip.theory import loss_bounds
    >>> round(symmetric_risk_gap(loss_bounds(1.0, 10), 10, rate=0.2), 4)
    0.9759

    Paper: Thm 2.2.
    """
    _check_identifiable(rate, num_classes)
    return times(rate * num_classes / ((1 - rate) * num_classes - 1), trivial_risk_gap(bounds))


def asymmetric_risk_gap(
    bounds: Range, transition: Sequence[Sequence[float]], prior: Sequence[float] | None = None
) -> float:
    """Class-conditional noise with eta_ij < 1 - eta_i: 0 <= R^eta(f*) - R^eta(f~) <= K (upper - lower) E[1 - eta_i].

    The condition makes K (1 - eta_i) > 1, so the trivial bound is always smaller; it also proves the theorem for every
    bounded loss. (The printed proof assumes CE(f*, j) = upper for each j != y*, which is true only for K = 2.)

    Args:
        bounds: (lower, upper), the range of the loss.
        transition: [K, K], p(y = j | y* = i) in row i and column j; rows sum to 1.
        prior: [K], the shares of the clean classes; uniform by default.

    Returns:
        The bound.

    Raises:
        ValueError: If the matrix or the prior is not one of probabilities, or the condition does not hold.

    >>> from logitclip.theory import loss_bounds
    >>> round(asymmetric_risk_gap(loss_bounds(1.0, 2), [[0.9, 0.1], [0.3, 0.7]]), 4)
    3.2

    Paper: Thm 2.3.
    """
    rows = read_matrix(transition).tolist()
    check_num_classes(len(rows))
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

    The theorem needs eta_xj < 1 - eta_x for every instance, which only the caller can know. It implies
    rate < 1 - 1/K, which is checked. As for Thm 2.3, the trivial bound is always smaller.

    Args:
        bounds: (lower, upper), the range of the loss.
        num_classes: K.
        rate: The mean of eta_x.

    Returns:
        The bound.

    Raises:
        ValueError: If the rate is not in [0, 1 - 1/K).

    >>> from logitclip.theory import loss_bounds
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
    """One row of `all_bounds`: `quantity` lies in [lower, upper], if the bound applies.

    Attributes:
        quantity: What is bounded.
        name: Name of the bound.
        paper: The item of the paper; "" for a bound that it does not print.
        lower: NaN if the bound does not apply.
        upper: NaN if the bound does not apply.
        reason: Why it does not apply; "" if it does.
        smallest: Whether no other bound of this quantity is smaller.

    >>> bound = all_bounds(1.0, 10)[1]
    >>> bound.quantity, bound.paper, round(bound.upper, 4)
    ('ce loss', 'Prop 2.1', 4.2121)
    """

    quantity: str
    name: str
    paper: str
    lower: float = math.nan
    upper: float = math.nan
    reason: str = ""
    smallest: bool = False

    @property
    def applies(self) -> bool:
        """Whether the assumptions of the bound hold."""
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
    """Return every bound for one clip, loss and noise, by quantity, with the smallest of each marked.

    The paper states them for p = inf. A smaller p gives sharper ones.

    Args:
        tau, num_classes, delta, p: As for `loss_bounds`.
        loss: The name of a loss.
        knobs: Knobs of the loss, such as `{"q": 0.7}`.
        noise: "symmetric", "asymmetric" or "pair" (each class becomes the next one), or "instance", with its `rate`;
            or "transition" with its matrix. None: nothing about noise but the trivial bound, which always holds.
        rate: The noise rate.
        transition, prior: As for `asymmetric_risk_gap`.

    Returns:
        One `Bound` per row of the table.

    Raises:
        ValueError: If an option is missing or out of range.

    >>> for bound in all_bounds(1.0, 10, noise="symmetric", rate=0.2):
    ...     if bound.smallest:
    ...         print(f"{bound.quantity}: {bound.upper:.4f} ({bound.name})")
    ce loss: 4.2121 (range)
    p_y: 0.4509 (M and N)
    clean-risk gap R(f~) - R(f*): 0.9759 (symmetric noise)
    noisy-risk gap R^eta(f*) - R^eta(f~): 3.4155 (trivial)
    """
    theorems = _theorems(num_classes, noise, rate, transition, prior)
    knobs = knobs or {}
    bounds = base_loss_bounds(loss, tau, num_classes, delta, p, **knobs)
    probabilities = probability_bounds(tau, num_classes, delta, p)
    rows: list[Bound] = []
    if loss == "ce":
        gap = 2 ** (1 - 1 / p) * max(tau, delta or tau)  # no two entries differ by more than 2^(1-1/p) ||z||_p
        rows.append(Bound("ce loss", f"z_max - z_min <= {gap:.4g}", "Eq. 2", 0.0, ce_bound_from_gap(gap, num_classes)))
    printed = loss == "ce" and p == math.inf
    rows.append(Bound(f"{loss} loss", "range", "Prop 2.1" if printed else "", *bounds))
    try:
        lipschitz = lipschitz_constant(loss, tau, num_classes, delta, p, **knobs)
        limit = lipschitz_loss_bound(lipschitz, bounds[1], probabilities)
        rows.append(Bound(f"{loss} loss", f"Lipschitz constant {lipschitz:.4g}", "Prop 2.4", -limit, limit))
    except ValueError as error:
        rows.append(Bound(f"{loss} loss", "Lipschitz constant", "Prop 2.4", reason=str(error)))
    rows.append(Bound("p_y", "M and N", "Prop 2.4", *probabilities))
    for quantity, name, paper, theorem in theorems:
        try:
            rows.append(Bound(quantity, name, paper, 0.0, theorem(bounds)))
        except ValueError as error:
            rows.append(Bound(quantity, name, paper, reason=str(error)))
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
    """Return the risk gaps to try, as (quantity, name, paper, theorem); one that does not apply raises ValueError."""
    matrix = noise == "transition"
    if noise not in (None, "symmetric", "asymmetric", "pair", "instance", "transition"):
        raise ValueError(
            f"No theorem is about {noise!r} noise; use symmetric, asymmetric, pair, instance or transition."
        )
    if matrix != (transition is not None) or (prior is not None and not matrix):
        raise ValueError("The noise 'transition' needs a transition matrix, and no other takes one or a prior.")
    if (noise is None or matrix) != (rate is None):
        raise ValueError(f"A rate is needed only for symmetric, asymmetric, pair and instance noise; got {rate!r}.")
    eta = 0.0 if rate is None else rate
    _check_rate(eta)
    if transition is not None:
        transition = read_matrix(transition, num_classes).tolist()

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
            raise ValueError("It needs noise that depends only on the class.")
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


# --- checks ----------------------------------------------------------------------------------------------------------


def _check_rate(rate: float) -> None:
    check(0 <= rate <= 1, "rate must be between 0 and 1", rate)


def _check_identifiable(rate: float, num_classes: int) -> None:
    _check_rate(rate)
    limit = 1 - 1 / check_num_classes(num_classes)
    # The tolerance lets no rounding of 1 - 1/K through, at which the factor of Thm 2.2 is infinite.
    check(rate < limit - 1e-12, f"rate must be below 1 - 1/num_classes = {limit:.6g}", rate)


def _check_prior(prior: Sequence[float] | None, num_classes: int) -> list[float]:
    if prior is None:
        return [1 / num_classes] * num_classes
    shares = [float(share) for share in prior]
    check(len(shares) == num_classes, f"prior must have {num_classes} entries, one per class", len(shares))
    check(all(share >= 0 for share in shares), "prior must have no negative entry", shares)
    check(abs(math.fsum(shares) - 1) < 1e-6, "prior must sum to 1", math.fsum(shares))
    return shares
