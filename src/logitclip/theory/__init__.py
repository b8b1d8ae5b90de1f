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

from logitclip.theory.ranges import (
    BOUNDS,
    Ball,
    Range,
    base_loss_bounds,
    bounds_of,
    ce_bound_from_gap,
    lipschitz_constant,
    lipschitz_loss_bound,
    loss_bounds,
    probability_bounds,
)
from logitclip.theory.risk_gaps import (
    CLEAN_GAP,
    NOISY_GAP,
    Bound,
    all_bounds,
    asymmetric_risk_gap,
    instance_risk_gap,
    symmetric_risk_gap,
    trivial_risk_gap,
)

__all__ = [
    "BOUNDS",
    "CLEAN_GAP",
    "NOISY_GAP",
    "Ball",
    "Bound",
    "Range",
    "all_bounds",
    "asymmetric_risk_gap",
    "base_loss_bounds",
    "bounds_of",
    "ce_bound_from_gap",
    "instance_risk_gap",
    "lipschitz_constant",
    "lipschitz_loss_bound",
    "loss_bounds",
    "probability_bounds",
    "symmetric_risk_gap",
    "trivial_risk_gap",
]
