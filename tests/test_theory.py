"""The bounds against optimisation: nothing here reuses a formula of `theory` to check it."""

import inspect
import itertools
import math

import numpy as np
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.special import log_softmax, logsumexp, softmax

from logitclip import theory
from logitclip.losses import LOSSES, loss, one_minus_p
from logitclip.theory import (
    CLEAN_GAP,
    NOISY_GAP,
    all_bounds,
    asymmetric_risk_gap,
    base_loss_bounds,
    bounds_of,
    ce_bound_from_gap,
    instance_risk_gap,
    lipschitz_constant,
    lipschitz_loss_bound,
    loss_bounds,
    probability_bounds,
    symmetric_risk_gap,
    trivial_risk_gap,
)

INF = math.inf


def ce(logits, y=0):
    return logsumexp(logits, axis=-1) - logits[..., y]


def random_in_ball(rng, count, num_classes, radius, p):
    """Draw points in the ball and on its surface; half of them lie near corners and axes, where the extremes are."""
    z = rng.standard_normal((count, num_classes))
    z[: count // 4] = np.sign(z[: count // 4])
    z[count // 4 : count // 2] **= 5
    z *= radius / np.linalg.norm(z, ord=p, axis=1, keepdims=True)
    return z * np.minimum(1, 2 * rng.random((count, 1)))


def largest_ce(num_classes, radius, p, rng):
    """Maximise CE on the p-sphere by z <- argmax <gradient, z>, which never decreases CE because CE is convex."""
    starts = rng.standard_normal((40, num_classes))
    starts[::2] *= 0.01  # half of them near one rival ...
    starts[::2, 1] += 1
    starts[1::4] = 1 + 0.01 * starts[1::4]  # ... a quarter near equal rivals
    starts[:, 0] = -1
    z = radius * starts / np.linalg.norm(starts, ord=p, axis=1, keepdims=True)
    for _ in range(3000):
        gradient = softmax(z, axis=1)
        gradient[:, 0] = -gradient[:, 1:].sum(1)
        size = np.abs(gradient) / np.abs(gradient).max(1, keepdims=True)
        step = np.sign(gradient) * size ** (1 / (p - 1))
        step *= radius / np.linalg.norm(step, ord=p, axis=1, keepdims=True)
        moved, z = np.abs(step - z).max(), step
        if moved < 1e-12:
            break
    return ce(z).max()


def smallest_ce(num_classes, radius, p, rng):
    """Minimise CE on the p-sphere; minimise its log, so that tiny values count."""

    def log_ce(free):
        norm = np.linalg.norm(free, ord=p)
        z = radius * free / norm
        rivals = logsumexp(z[1:]) - z[0]
        value = np.logaddexp(0, rivals)
        gradient = np.concatenate([[-1.0], softmax(z[1:])]) * np.exp(rivals - value) / value
        unit = np.sign(free) * (np.abs(free) / norm) ** (p - 1)
        return np.log(value), radius / norm * (gradient - unit * (gradient @ (free / norm)))

    start = rng.standard_normal(num_classes)
    start[0] = abs(start[0]) + 1
    options = {"maxiter": 5000, "maxfun": 20000, "ftol": 1e-15, "gtol": 1e-12}
    return np.exp(minimize(log_ce, start, jac=True, method="L-BFGS-B", options=options).fun)


# --- ranges of cross entropy -----------------------------------------------------------------------------------------


@given(st.lists(st.floats(-300, 300), min_size=2, max_size=30), st.data())
def test_gap_bounds_cross_entropy(logits, data):
    z, y = np.array(logits), data.draw(st.integers(0, len(logits) - 1))
    assert ce(z, y) <= ce_bound_from_gap(z.max() - z.min(), len(z)) * (1 + 1e-12) + 1e-12


def test_gap_bound_is_reached():
    z = np.array([-1.0, 2.0, 2.0, 2.0])
    assert ce_bound_from_gap(3.0, 4) == pytest.approx(ce(z), rel=1e-14)


@pytest.mark.parametrize("tau", [1e-3, 0.1, 1, 3, 20])
@pytest.mark.parametrize("num_classes", [2, 3, 10, 1000])
def test_max_norm_bounds_are_the_printed_ones_and_reached(tau, num_classes):
    corner = np.full(num_classes, -tau)
    corner[0] = tau
    lower, upper = loss_bounds(tau, num_classes)
    assert lower == pytest.approx(np.log1p((num_classes - 1) * np.exp(-2 * tau)), rel=1e-13)
    assert upper == pytest.approx(np.log1p((num_classes - 1) * np.exp(2 * tau)), rel=1e-13)
    assert lower == pytest.approx(ce(corner), rel=1e-6)
    assert upper == pytest.approx(ce(-corner), rel=1e-13)


@pytest.mark.parametrize("num_classes", [2, 3, 10, 100, 1000])
@pytest.mark.parametrize("radius", [0.1, 1, 3, 6, 20])
def test_sharp_euclidean_bounds_are_reached_by_optimisation(num_classes, radius):
    rng = np.random.default_rng(0)
    lower, upper = loss_bounds(radius, num_classes, p=2)
    assert upper == pytest.approx(largest_ce(num_classes, radius, 2, rng), abs=1e-5)
    assert lower == pytest.approx(smallest_ce(num_classes, radius, 2, rng), rel=1e-5)


@pytest.mark.parametrize(("num_classes", "radius", "upper"), [(10, 6, 8.616), (3, 3, 4.401)])
def test_one_rival_beats_equal_rivals(num_classes, radius, upper):
    lead = radius * math.sqrt(num_classes / (num_classes - 1))
    assert loss_bounds(radius, num_classes, p=2)[1] == pytest.approx(upper, abs=5e-4)
    assert loss_bounds(radius, num_classes, p=2)[1] > math.log1p((num_classes - 1) * math.exp(lead)) + 0.01


@pytest.mark.parametrize("p", [1.1, 1.5, 3, 8])
@pytest.mark.parametrize(("num_classes", "radius"), [(2, 5), (3, 0.5), (3, 4), (10, 2), (10, 9), (60, 15)])
def test_bounds_of_other_norms_are_reached_too(p, num_classes, radius):
    rng = np.random.default_rng(1)
    lower, upper = loss_bounds(radius, num_classes, p=p)
    assert upper == pytest.approx(largest_ce(num_classes, radius, p, rng), abs=1e-5)
    assert lower == pytest.approx(smallest_ce(num_classes, radius, p, rng), rel=1e-5)


@pytest.mark.parametrize("num_classes", [2, 3, 10])
def test_bounds_of_the_one_norm_are_reached_at_the_vertices(num_classes):
    vertices = 3.0 * np.concatenate([np.eye(num_classes), -np.eye(num_classes)])
    assert loss_bounds(3.0, num_classes, p=1) == pytest.approx((ce(vertices).min(), ce(vertices).max()), rel=1e-12)


@settings(deadline=None)
@given(
    st.floats(0.01, 30), st.floats(0.01, 30), st.integers(2, 200), st.sampled_from([1, 1.5, 2, 3, INF]), st.integers(0)
)
def test_no_clipped_logits_leave_the_bounds(tau, delta, num_classes, p, seed):
    """Eq. 4 written out: norms below tau stay, the others become delta."""
    z = np.random.default_rng(seed).standard_normal((50, num_classes)) * 3 * tau
    z[:25] /= num_classes
    norm = np.linalg.norm(z, ord=p, axis=1, keepdims=True)
    clipped = np.where(norm >= tau, delta * z / norm, z)
    lower, upper = loss_bounds(tau, num_classes, delta, p)
    printed = loss_bounds(tau, num_classes, delta)
    assert printed[0] <= lower * (1 + 1e-12)
    assert upper <= printed[1] * (1 + 1e-12)
    for y in range(min(num_classes, 5)):
        assert lower * (1 - 1e-9) - 1e-12 <= ce(clipped, y).min()
        assert ce(clipped, y).max() <= upper * (1 + 1e-9)
    m, n = probability_bounds(tau, num_classes, delta, p)
    assert m * (1 - 1e-9) <= softmax(clipped, axis=1).min()
    assert softmax(clipped, axis=1).max() <= n * (1 + 1e-9)


def test_the_radius_is_the_larger_of_threshold_and_scale():
    assert loss_bounds(0.5, 10, delta=2.0, p=2) == loss_bounds(2.0, 10, p=2) == loss_bounds(2.0, 10, delta=0.5, p=2)
    assert loss_bounds(0.5, 10, delta=2.0) == loss_bounds(2.0, 10)


@pytest.mark.parametrize("p", [1, 1.5, 2, INF])
@pytest.mark.parametrize("num_classes", [2, 10, 1000])
def test_limits_in_tau(p, num_classes):
    """tau -> 0: both ends meet at log K; tau -> inf: the range and [M, N] of the loss without a clip."""
    assert loss_bounds(1e-9, num_classes, p=p) == pytest.approx((math.log(num_classes),) * 2, abs=1e-8)
    assert loss_bounds(1e-320, num_classes, p=p) == pytest.approx((math.log(num_classes),) * 2, abs=1e-12)
    assert loss_bounds(INF, num_classes, p=p) == (0, INF)
    assert probability_bounds(INF, num_classes, p=p) == (0, 1)
    lower, upper = loss_bounds(1e4, num_classes, p=p)
    assert lower == 0
    assert upper == pytest.approx(2 ** (1 - 1 / p) * 1e4, rel=1e-3)
    widths = [trivial_risk_gap(loss_bounds(tau, num_classes, p=p)) for tau in (0.01, 0.1, 1, 10, 100)]
    assert widths == sorted(widths)


# --- losses that depend on p_y alone ---------------------------------------------------------------------------------

OF_TARGET = [name for name in LOSSES if name in oracles.OF_TARGET]
OF_ALL = [name for name in LOSSES if name in oracles.OF_ALL]


def phi(name, p, **knobs):
    """A loss of p_y alone, from its oracle."""
    return oracles.OF_TARGET[name](np.log(p), 1 - p, **knobs)[0]


KNOBS = [
    *((name, {}) for name in OF_TARGET),
    ("focal", {"gamma": 0.0}),
    ("focal", {"gamma": 2.0}),
    ("mae", {"scale": 1.0}),
    ("phuber_ce", {"threshold": 2.0}),
    ("rce", {"log_zero": -4.0}),
    ("sce", {"alpha": 6.0, "beta": 0.1}),
    ("sce", {"alpha": 0.0, "beta": 1.0}),
    ("gce", {"q": 1.0}),
    ("gce", {"q": 1.8}),
    ("taylor_ce", {"order": 6}),
    ("aul", {"a": 3.0, "q": 0.1}),
    ("agce", {"a": 1.8, "q": 3.0}),
]


@pytest.mark.parametrize(("loss", "knobs"), KNOBS)
@pytest.mark.parametrize(("tau", "num_classes", "p"), [(0.2, 2, INF), (1.0, 10, INF), (1.0, 10, 2), (3.0, 100, 2)])
def test_lipschitz_constant_against_differences(loss, knobs, tau, num_classes, p):
    m, n = probability_bounds(tau, num_classes, p=p)
    # Evenly spaced in log p: the steepest place may be a narrow strip at M.
    grid = np.unique(np.concatenate([np.geomspace(m, n, 40001), np.linspace(m, n, 40001)]).clip(m, n))
    slopes = np.abs(np.diff(phi(loss, grid, **knobs)) / np.diff(grid))[np.diff(grid) > 1e-9 * n]
    constant = lipschitz_constant(loss, tau, num_classes, p=p, **knobs)
    assert slopes.max() <= constant * (1 + 1e-5)
    assert slopes.max() == pytest.approx(constant, rel=2e-3)


@pytest.mark.parametrize(("loss", "knobs"), KNOBS)
@pytest.mark.parametrize(("tau", "num_classes", "p"), [(0.2, 2, INF), (1.0, 10, INF), (1.0, 10, 2), (3.0, 100, 2)])
def test_range_and_lipschitz_bound_of_phi(loss, knobs, tau, num_classes, p):
    m, n = probability_bounds(tau, num_classes, p=p)
    values = phi(loss, np.linspace(m, n, 1001), **knobs)
    lower, upper = base_loss_bounds(loss, tau, num_classes, p=p, **knobs)
    assert (lower, upper) == pytest.approx((values.min(), values.max()), rel=1e-9)
    constant = lipschitz_constant(loss, tau, num_classes, p=p, **knobs)
    assert np.abs(values).max() <= lipschitz_loss_bound(constant, values[0], (m, n)) * (1 + 1e-12)


def test_cross_entropy_is_one_of_the_losses():
    assert base_loss_bounds("ce", 0.7, 5, 2.0, 2) == loss_bounds(0.7, 5, 2.0, 2)


def test_without_a_clip_only_the_robust_losses_are_bounded():
    assert {n for n in OF_TARGET if base_loss_bounds(n, INF, 10)[1] == INF} >= {"ce", "focal", "sce"}
    assert not {n for n in OF_TARGET if base_loss_bounds(n, INF, 10)[1] == INF} & {"mae", "gce", "agce", "phuber_ce"}
    # GCE is bounded though not Lipschitz at 0, so its bound does not come from Prop 2.4.
    unbounded = {n for n in OF_TARGET if lipschitz_constant(n, INF, 10) == INF}
    assert unbounded >= {"ce", "focal", "sce", "gce"}
    assert not unbounded & {"mae", "rce", "phuber_ce", "taylor_ce", "ael", "aul", "agce"}


@pytest.mark.parametrize("tau", [8.0, 30.0, 200.0, 340.0])
def test_lipschitz_constants_where_probabilities_are_tiny(tau):
    """|phi'| at the smallest p_y, by hand."""
    m, _ = probability_bounds(tau, 10)
    slopes = {"ce": 1 / m, "mae": 2.0, "gce": m**-0.3, "phuber_ce": 10.0, "sce": 0.5 / m - math.log(1e-4), "ael": 0.4}
    for name, slope in slopes.items():
        assert lipschitz_constant(name, tau, 10) == pytest.approx(slope, rel=1e-5), name


# --- losses of one's own ---------------------------------------------------------------------------------------------


def test_a_new_loss_has_its_bounds_from_its_phi():
    @loss
    def squared_error(log_p, _, *, scale: float = 1.0):
        """Squared error."""
        return scale * one_minus_p(log_p) ** 2

    m, n = probability_bounds(1.0, 10)
    assert base_loss_bounds("squared_error", 1.0, 10, scale=3.0) == pytest.approx((3 * (1 - n) ** 2, 3 * (1 - m) ** 2))
    assert lipschitz_constant("squared_error", 1.0, 10) == pytest.approx(2 * (1 - m))
    rows = all_bounds(1.0, 10, loss="squared_error", noise="symmetric", rate=0.2)
    assert one(rows, "squared_error loss", "Prop 2.4").applies


def test_a_loss_that_is_not_monotone_brings_its_own_range_or_has_none():
    @loss
    def hill(log_p, _):
        """p_y (1-p_y): largest at 1/2."""
        return log_p.exp() * one_minus_p(log_p)

    @loss
    def spread(log_p, log_probs, state):
        """The variance of the log-probabilities."""
        return log_probs.var(-1) + 0 * log_p, None

    assert base_loss_bounds("hill", 1.0, 10) == pytest.approx([p * (1 - p) for p in probability_bounds(1.0, 10)])
    assert base_loss_bounds("hill", 3.0, 2) == base_loss_bounds("spread", 1.0, 10) == (-INF, INF)
    with pytest.raises(ValueError, match="slope of hill in p_y is not monotone"):
        lipschitz_constant("hill", 3.0, 2)
    rows = all_bounds(3.0, 2, loss="hill", noise="symmetric", rate=0.2)
    assert not one(rows, "hill loss", "Prop 2.4").applies
    assert one(rows, CLEAN_GAP, "Thm 2.2").upper == INF
    try:
        bounds_of("hill")(lambda ball: (0.0, 0.25))
        assert base_loss_bounds("hill", 3.0, 2) == (0.0, 0.25)
    finally:
        del theory.BOUNDS["hill"]


@pytest.mark.parametrize("name", list(LOSSES))
@pytest.mark.parametrize(("radius", "num_classes", "p"), [(0.3, 2, 2), (2, 3, INF), (5, 10, 2), (1, 100, 1)])
def test_ranges_from_phi_against_random_logits(name, radius, num_classes, p):
    """Brute force with the library's own function: no logits in the ball leave the range, and some come near."""
    z = random_in_ball(np.random.default_rng(0), 20000, num_classes, radius, p)
    best = np.full(num_classes, -1.0 if p == INF else 0.0 if p == 1 else -1 / (num_classes - 1))
    best[0] = 1
    best *= radius / np.linalg.norm(best, ord=p)
    z = torch.tensor(np.concatenate([z, [best, -best]]))
    values = LOSSES[name](z, torch.zeros(len(z), dtype=torch.int64))
    lower, upper = base_loss_bounds(name, radius, num_classes, p=p)
    assert lower - 1e-12 <= values.min() <= values.max() <= upper + 1e-12
    if name != "cores" and lower > -INF:  # its range is that of a box around the possible values
        assert values.min() == pytest.approx(lower, rel=1e-9)
        assert values.max() - values.min() > 0.5 * (upper - lower)


# --- losses that depend on all probabilities -------------------------------------------------------------------------


def joint(loss, z, *, shares=None, **knobs):
    """A loss of label 0, from its oracle; `shares` are the prior of cores."""
    if loss == "cores":
        knobs = {"beta": knobs.get("beta", 2.0), "prior": None if shares is None else np.array(shares)}
    rows = np.atleast_2d(z)
    values = oracles.loss(loss, rows, np.zeros(len(rows), dtype=np.int64), **knobs).values
    return values if z.ndim > 1 else values[0]


JOINT = [
    *((name, {}) for name in OF_ALL),
    ("nce", {"scale": 10.0}),
    ("cores", {"beta": 0.0}),
    ("cores", {"beta": 0.5, "prior": "uniform"}),
    ("cores", {"prior": "uniform"}),
    ("nce_mae", {"alpha": 1.0, "beta": 2.0, "scale": 2.0}),
    ("nce_agce", {"alpha": 1.0, "beta": 4.0, "a": 6.0, "q": 1.5}),
    ("nce_rce", {"alpha": 10.0, "beta": 0.1}),
]


def extremes(loss, radius, num_classes, p, knobs, rng):
    """Find the smallest and largest value in the ball by gradient search from the best of many points."""
    z = random_in_ball(rng, 4000, num_classes, radius, p)
    corner = np.full(num_classes, -1.0 if p == INF else -1 / (num_classes - 1))
    corner[0] = 1
    corner *= radius / np.linalg.norm(corner, ord=p)
    z = np.concatenate([z, [corner, -corner]])
    found = []
    for sign in (1, -1):

        def value(free, sign=sign):
            norm = np.linalg.norm(free, ord=p)
            return sign * joint(loss, free if norm <= radius else radius * free / norm, **knobs)

        values = sign * joint(loss, z, **knobs)
        starts = z[np.argsort(values)[:3]]
        found.append(sign * min([values.min(), *(minimize(value, start, method="L-BFGS-B").fun for start in starts)]))
    return found


@pytest.mark.parametrize(("loss", "knobs"), JOINT)
@pytest.mark.parametrize(
    ("radius", "num_classes", "p"), [(1, 2, INF), (1, 4, INF), (3, 4, 2), (0.5, 10, 2), (6, 10, 2)]
)
def test_direct_bounds_hold(loss, knobs, radius, num_classes, p):
    low, high = extremes(loss, radius, num_classes, p, knobs, np.random.default_rng(2))
    lower, upper = base_loss_bounds(loss, radius, num_classes, p=p, **knobs)
    assert lower - 1e-9 <= low
    assert high <= upper + 1e-9
    if loss != "cores" and lower > -INF:  # exact below for every p, above for the max norm
        assert low == pytest.approx(lower, rel=1e-6)
        if p == INF:
            assert high == pytest.approx(upper, rel=1e-6)


def test_cores_bound_holds_for_any_shares_of_the_labels():
    rng = np.random.default_rng(3)
    lower, upper = base_loss_bounds("cores", 2.0, 4, p=2)
    for shares in ([0.7, 0.2, 0.1, 0.0], [0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]):
        low, high = extremes("cores", 2.0, 4, 2, {"shares": shares}, rng)
        assert lower <= low < high <= upper
    tighter = base_loss_bounds("cores", 2.0, 4, p=2, prior="uniform")
    assert tighter[0] == lower
    assert tighter[1] < upper
    assert base_loss_bounds("cores", 1.0, 4, beta=0.0) == loss_bounds(1.0, 4)
    assert base_loss_bounds("cores", INF, 4) == pytest.approx((2 * math.log(1e-8), INF))  # the 1e-8 in its log


@pytest.mark.parametrize("tau", [1e-9, 300.0, 400.0, 1e4, INF])
@pytest.mark.parametrize("p", [1, 1.5, 2, INF])
def test_every_loss_at_extreme_tau(tau, p):
    for name in LOSSES:
        lower, upper = base_loss_bounds(name, tau, 10, p=p)
        assert lower <= upper
    for name in OF_TARGET:
        assert lipschitz_constant(name, tau, 10, p=p) >= 0


def test_limits_of_nce():
    assert base_loss_bounds("nce", 1e-9, 10) == pytest.approx((0.1, 0.1), rel=1e-7)
    assert base_loss_bounds("nce", INF, 10) == pytest.approx((0, 1))


# --- risk gaps on small finite problems ------------------------------------------------------------------------------


def minimise_risk(targets, radius, p):
    """Minimise sum_k target_k CE(z, k) over the ball for each row, by accelerated projected gradient descent."""

    def project(z):
        if p == INF:
            return z.clip(-radius, radius)
        return z * np.minimum(1, radius / np.linalg.norm(z, axis=1, keepdims=True).clip(1e-300))

    z = ahead = np.zeros_like(targets)
    for i in range(1500):
        new = project(ahead - 1.5 * (softmax(ahead, axis=1) - targets))  # the gradient is 1/2-Lipschitz
        ahead, z = new + i / (i + 3) * (new - z), new
    return z


def risk(z, targets, weights):
    return float(weights @ -(targets * log_softmax(z, axis=1)).sum(1))


@pytest.mark.parametrize("p", [2, INF])
def test_the_minimiser_minimises(p):
    rng = np.random.default_rng(4)
    targets, weights = rng.dirichlet(np.ones(4), size=6), np.full(6, 1 / 6)
    for radius in (0.3, 1.0, 5.0):
        z = minimise_risk(targets, radius, p)
        assert (np.linalg.norm(z, ord=p, axis=1) <= radius * (1 + 1e-12)).all()
        best = risk(z, targets, weights)
        for _ in range(300):
            other = random_in_ball(rng, 6, 4, radius, p)
            assert all(best <= risk(z + step * (other - z), targets, weights) + 1e-12 for step in (1, 0.1, 0.01))


def problem(rng, num_classes, size, hard):
    """Draw weights of `size` instances and their clean label distributions."""
    if hard:
        clean = np.eye(num_classes)[rng.integers(num_classes, size=size)]
    else:
        clean = rng.dirichlet(np.full(num_classes, 0.3), size=size)
    return rng.dirichlet(np.ones(size)), clean


def gaps(weights, clean, noisy, radius, p):
    """Compute R(f~) - R(f*) and R^eta(f*) - R^eta(f~)."""
    best, fooled = np.split(minimise_risk(np.concatenate([clean, noisy]), radius, p), 2)
    return (
        risk(fooled, clean, weights) - risk(best, clean, weights),
        risk(best, noisy, weights) - risk(fooled, noisy, weights),
    )


SETTINGS = list(itertools.product([2, 3, 5], [0.2, 1.0, 4.0], [2, INF], [True, False]))


@pytest.mark.parametrize(("num_classes", "tau", "p", "hard"), SETTINGS)
def test_symmetric_noise(num_classes, tau, p, hard):
    rng = np.random.default_rng(5)
    weights, clean = problem(rng, num_classes, 8, hard)
    largest = 0.0
    for rate in (0.0, 0.1, 0.3, 0.9 * (1 - 1 / num_classes)):
        noisy = (1 - rate) * clean + rate / (num_classes - 1) * (1 - clean)
        gap, noisy_gap = gaps(weights, clean, noisy, tau, p)
        for bounds in (loss_bounds(tau, num_classes), loss_bounds(tau, num_classes, p=p)):
            assert -1e-9 <= gap <= symmetric_risk_gap(bounds, num_classes, rate) + 1e-9
            assert -1e-9 <= noisy_gap <= instance_risk_gap(bounds, num_classes, rate)
            assert max(gap, noisy_gap) <= trivial_risk_gap(bounds) + 1e-9
        largest = max(largest, gap)
    if tau >= 1:
        assert largest > 1e-3  # the inequalities are not trivial


def random_transition(rng, num_classes):
    """Draw rows whose diagonal is the largest entry."""
    rows = rng.dirichlet(np.full(num_classes, 0.5), size=num_classes)
    for i, row in enumerate(rows):
        j = row.argmax()
        row[[i, j]] = row[[j, i]]
    return rows


@pytest.mark.parametrize(("num_classes", "tau", "p", "hard"), SETTINGS)
def test_asymmetric_noise(num_classes, tau, p, hard):
    rng = np.random.default_rng(6)
    largest = 0.0
    for _ in range(3):
        weights, clean = problem(rng, num_classes, 8, hard)
        transition = random_transition(rng, num_classes)
        prior = weights @ clean
        clean_gap, gap = gaps(weights, clean, clean @ transition, tau, p)
        for bounds in (loss_bounds(tau, num_classes), loss_bounds(tau, num_classes, p=p)):
            assert -1e-9 <= gap <= asymmetric_risk_gap(bounds, transition.tolist(), prior.tolist())
            assert max(gap, clean_gap) <= trivial_risk_gap(bounds) + 1e-9
        largest = max(largest, gap)
    if tau >= 1:
        assert largest > 1e-3


@pytest.mark.parametrize(("num_classes", "tau", "p", "hard"), SETTINGS)
def test_instance_noise(num_classes, tau, p, hard):
    """Each instance has its own transition."""
    rng = np.random.default_rng(7)
    weights, clean = problem(rng, num_classes, 8, hard)
    transitions = np.stack([random_transition(rng, num_classes) for _ in weights])
    noisy = np.einsum("xi,xij->xj", clean, transitions)
    rate = 1 - np.einsum("x,xi,xii->", weights, clean, transitions)
    clean_gap, gap = gaps(weights, clean, noisy, tau, p)
    for bounds in (loss_bounds(tau, num_classes), loss_bounds(tau, num_classes, p=p)):
        assert -1e-9 <= gap <= instance_risk_gap(bounds, num_classes, rate)
        assert max(gap, clean_gap) <= trivial_risk_gap(bounds) + 1e-9
    if tau >= 1:
        assert gap > 1e-3


def test_symmetric_noise_with_another_scale():
    """Threshold 1, scale 3: the clipped logits are the ball of radius 1 and the sphere of radius 3."""
    num_classes, tau, delta, rate = 3, 1.0, 3.0, 0.5
    clean, weights = np.eye(num_classes)[[0, 1, 2, 0]], np.array([0.4, 0.3, 0.2, 0.1])
    noisy = (1 - rate) * clean + rate / (num_classes - 1) * (1 - clean)
    rng = np.random.default_rng(8)

    def minimiser(targets):
        rows = []
        for target, inside in zip(targets, minimise_risk(targets, tau, 2), strict=True):
            found = [inside]
            for _ in range(10):
                fit = minimize(
                    lambda d, t=target: -t @ log_softmax(delta * d / np.linalg.norm(d)), rng.standard_normal(3)
                )
                found.append(delta * fit.x / np.linalg.norm(fit.x))
            rows.append(min(found, key=lambda z, t=target: -t @ log_softmax(z)))
        return np.array(rows)

    best, fooled = minimiser(clean), minimiser(noisy)
    assert np.linalg.norm(best, axis=1) == pytest.approx(delta)
    assert (np.linalg.norm(fooled, axis=1) < tau).all()
    gap = risk(fooled, clean, weights) - risk(best, clean, weights)
    assert 0.1 < gap <= symmetric_risk_gap(loss_bounds(tau, num_classes, delta, p=2), num_classes, rate)
    # With tau instead of max(tau, delta), the range and the theorem would be wrong.
    assert risk(best, clean, weights) < loss_bounds(tau, num_classes, p=2)[0]


@pytest.mark.parametrize(("loss", "knobs"), [("mae", {}), ("gce", {}), ("nce", {}), ("nce_agce", {}), ("cores", {})])
def test_risk_gap_of_a_general_loss(loss, knobs):
    """Find f* and f~ by exhaustive search over a fine grid of the ball; for K = 2 only z_1 - z_0 matters."""
    tau, rate = 1.0, 0.3
    z = np.stack([np.linspace(-tau, tau, 2001), -np.linspace(-tau, tau, 2001)], axis=1)
    per_class = np.stack([joint(loss, z, **knobs), joint(loss, z[:, ::-1], **knobs)], axis=1)
    bounds = base_loss_bounds(loss, tau, 2, **knobs)
    for clean in (np.array([1.0, 0.0]), np.array([0.8, 0.2]), np.array([0.55, 0.45])):
        noisy = (1 - rate) * clean + rate * clean[::-1]
        best, fooled = (per_class @ clean).argmin(), (per_class @ noisy).argmin()
        gap = (per_class[fooled] - per_class[best]) @ clean
        assert 0 <= gap <= symmetric_risk_gap(bounds, 2, rate) + 1e-12
        noisy_gap = (per_class[best] - per_class[fooled]) @ noisy
        assert 0 <= noisy_gap <= asymmetric_risk_gap(bounds, [[0.7, 0.3], [0.3, 0.7]])


# --- the theorems as formulas ----------------------------------------------------------------------------------------


def test_a_b_and_c():
    tau, k, eta = 1.3, 7, 0.25
    a = math.log((1 + (k - 1) * math.exp(2 * tau)) / (1 + (k - 1) * math.exp(-2 * tau)))
    bounds = loss_bounds(tau, k)
    assert trivial_risk_gap(bounds) == pytest.approx(a, rel=1e-13)
    assert symmetric_risk_gap(bounds, k, eta) == pytest.approx(eta * k / ((1 - eta) * k - 1) * a, rel=1e-13)
    assert instance_risk_gap(bounds, k, eta) == pytest.approx(k * a * (1 - eta), rel=1e-13)
    transition = [[0.9, 0.1, 0.0], [0.2, 0.5, 0.3], [0.0, 0.0, 1.0]]
    bounds, prior = loss_bounds(tau, 3), [0.5, 0.25, 0.25]
    a = bounds[1] - bounds[0]
    assert asymmetric_risk_gap(bounds, transition) == pytest.approx(3 * a * (0.9 + 0.5 + 1) / 3)
    assert asymmetric_risk_gap(bounds, transition, prior) == pytest.approx(3 * a * (0.45 + 0.125 + 0.25))
    assert asymmetric_risk_gap(bounds, np.array(transition), np.array(prior)) == pytest.approx(3 * a * 0.825)  # pyright: ignore


@given(st.integers(2, 1000), st.floats(0, 0.999), st.floats(0.01, 100))
def test_when_the_theorems_beat_the_trivial_bound(num_classes, share, tau):
    rate, bounds = share * (1 - 1 / num_classes), loss_bounds(tau, num_classes)
    trivial = trivial_risk_gap(bounds)
    assert instance_risk_gap(bounds, num_classes, rate) > trivial
    turn = (num_classes - 1) / (2 * num_classes)
    if abs(rate - turn) > 1e-9:
        assert (symmetric_risk_gap(bounds, num_classes, rate) < trivial) == (rate < turn)


def test_no_noise_costs_nothing_even_without_a_clip():
    assert symmetric_risk_gap(loss_bounds(INF, 10), 10, 0.0) == 0
    assert symmetric_risk_gap(loss_bounds(INF, 10), 10, 0.1) == INF


# --- the table -------------------------------------------------------------------------------------------------------


def one(bounds, quantity, paper):
    (row,) = [b for b in bounds if b.quantity == quantity and b.paper == paper]
    return row


def test_all_bounds_at_half_symmetric_noise():
    rows = all_bounds(1.0, 10, noise="symmetric", rate=0.5)
    assert (one(rows, "ce loss", "Prop 2.1").lower, one(rows, "ce loss", "Prop 2.1").upper) == loss_bounds(1.0, 10)
    assert one(rows, "ce loss", "Eq. 2").upper == pytest.approx(loss_bounds(1.0, 10)[1])
    assert one(rows, CLEAN_GAP, "Thm 2.2").upper == symmetric_risk_gap(loss_bounds(1.0, 10), 10, 0.5)
    assert one(rows, CLEAN_GAP, "").smallest  # 0.5 > 9/20: the trivial bound is the smaller one
    assert all(row.applies for row in rows)
    assert {r.paper for r in rows} == {"Eq. 2", "Prop 2.1", "Prop 2.4", "Thm 2.2", "Thm 2.3", "Thm E.1", ""}
    assert sum(row.smallest for row in rows) == len({row.quantity for row in rows}) == 4
    assert one(all_bounds(1.0, 10, noise="symmetric", rate=0.2), CLEAN_GAP, "Thm 2.2").smallest


def test_all_bounds_of_another_norm_are_sharper_than_the_printed_ones():
    printed, rows = (all_bounds(2.5, 10, delta=0.4, p=p, noise="instance", rate=0.4) for p in (INF, 2))
    assert len(rows) == len(printed)
    assert one(printed, "ce loss", "Prop 2.1").upper == loss_bounds(2.5, 10)[1]
    assert one(rows, "ce loss", "").upper == loss_bounds(2.5, 10, p=2)[1] < loss_bounds(2.5, 10)[1]
    assert one(rows, "ce loss", "").smallest
    assert one(rows, NOISY_GAP, "Thm E.1").upper == instance_risk_gap(loss_bounds(2.5, 10, p=2), 10, 0.4)
    assert "only on the class" in one(rows, NOISY_GAP, "Thm 2.3").reason
    assert "symmetric" in one(rows, CLEAN_GAP, "Thm 2.2").reason
    assert one(rows, "ce loss", "Eq. 2").upper == pytest.approx(ce_bound_from_gap(math.sqrt(2) * 2.5, 10))


def test_all_bounds_of_another_loss():
    rows = all_bounds(1.0, 10, loss="gce", knobs={"q": 0.5}, noise="symmetric", rate=0.2)
    bounds = base_loss_bounds("gce", 1.0, 10, q=0.5)
    assert one(rows, CLEAN_GAP, "Thm 2.2").upper == symmetric_risk_gap(bounds, 10, 0.2)
    assert one(rows, "gce loss", "Prop 2.4").upper > one(rows, "gce loss", "").upper == bounds[1]
    rows = all_bounds(1.0, 10, loss="nce")
    assert "all probabilities" in one(rows, "nce loss", "Prop 2.4").reason
    assert [row.name for row in rows if row.quantity in (CLEAN_GAP, NOISY_GAP)] == ["trivial", "trivial"]


def test_all_bounds_of_a_matrix():
    num_classes, rate = 4, 0.3
    circular = [[0.0] * num_classes for _ in range(num_classes)]
    for i in range(num_classes):
        circular[i][i], circular[i][(i + 1) % num_classes] = 1 - rate, rate
    named = all_bounds(1.0, num_classes, noise="asymmetric", rate=rate)
    by_matrix = all_bounds(1.0, num_classes, noise="transition", transition=circular)
    for row, other in zip(named, by_matrix, strict=True):
        assert row.upper == pytest.approx(other.upper, nan_ok=True)
    assert one(by_matrix, NOISY_GAP, "Thm 2.3").upper == asymmetric_risk_gap(loss_bounds(1.0, num_classes), circular)


@pytest.mark.parametrize(
    ("noise", "rate", "quantity", "paper", "words"),
    [
        ("symmetric", 0.9, CLEAN_GAP, "Thm 2.2", "rate must be below 1 - 1/num_classes = 0.9"),
        ("asymmetric", 0.5, NOISY_GAP, "Thm 2.3", "below 0.5"),
        ("pair", 0.6, NOISY_GAP, "Thm E.1", "below 0.5"),
        ("instance", 0.95, NOISY_GAP, "Thm E.1", "rate must be below"),
    ],
)
def test_a_theorem_that_does_not_apply_says_why(noise, rate, quantity, paper, words):
    rows = all_bounds(1.0, 10, noise=noise, rate=rate)
    row = one(rows, quantity, paper)
    assert words in row.reason
    assert not row.applies
    assert not row.smallest
    assert one(rows, quantity, "").smallest


def test_many_classes_need_no_matrix():
    assert one(all_bounds(1.0, 10**6, noise="asymmetric", rate=0.4), NOISY_GAP, "Thm 2.3").applies


# --- bad input -------------------------------------------------------------------------------------------------------

EYE, OK = [[1.0, 0.0], [0.0, 1.0]], (0.0, 1.0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: loss_bounds(0.0, 10), "tau must be positive, got 0.0"),
        (lambda: loss_bounds(-1.0, 10), "tau must be positive, got -1.0"),
        (lambda: loss_bounds(math.nan, 10), "tau must be positive, got nan"),
        (lambda: loss_bounds(1.0, 10, delta=0.0), "delta must be positive, got 0.0"),
        (lambda: loss_bounds(1.0, 1), "num_classes must be an integer of at least 2, got 1"),
        (lambda: loss_bounds(1.0, 10.0), "num_classes must be an integer of at least 2, got 10.0"),  # pyright: ignore
        (lambda: loss_bounds(1.0, 10, p=0.5), "p must be at least 1, got 0.5"),
        (lambda: loss_bounds(1.0, 10, p=math.nan), "p must be at least 1"),
        (lambda: ce_bound_from_gap(-0.1, 10), "at least 0, got -0.1"),
        (lambda: trivial_risk_gap((2.0, 1.0)), "lower <= upper"),
        (lambda: symmetric_risk_gap(OK, 10, 0.9), "below 1 - 1/num_classes"),
        (lambda: symmetric_risk_gap(OK, 3, 2 / 3), "below 1 - 1/num_classes"),
        (lambda: symmetric_risk_gap(OK, 10, 0.95), "got 0.95"),
        (lambda: symmetric_risk_gap(OK, 10, -0.1), "rate must be between 0 and 1, got -0.1"),
        (lambda: instance_risk_gap(OK, 10, 0.9), "below 1 - 1/num_classes"),
        (lambda: instance_risk_gap(OK, 10, math.nan), "rate must be between"),
        (lambda: asymmetric_risk_gap(OK, [[0.5, 0.5], [0.0, 1.0]]), "class 0 becomes 1 with probability 0.5"),
        (lambda: asymmetric_risk_gap(OK, [[1.0, 0.0], [0.6, 0.4]]), "class 1 becomes 0"),
        (
            lambda: asymmetric_risk_gap(OK, [[0.9, 0.2], [0.0, 1.0]]),
            "must sum to 1; row 0 sums to 1.1",
        ),
        (lambda: asymmetric_risk_gap(OK, [[1.1, -0.1], [0.0, 1.0]]), "finite and not negative"),
        (lambda: asymmetric_risk_gap(OK, [[1.0]]), "num_classes must be an integer of at least 2, got 1"),
        (lambda: asymmetric_risk_gap(OK, [[1.0, 0.0], [1.0]]), "cannot be read as an array"),
        (lambda: asymmetric_risk_gap(OK, EYE, [1.0]), "prior must have 2 entries"),
        (lambda: asymmetric_risk_gap(OK, EYE, [0.5, 0.6]), "prior must sum to 1"),
        (lambda: asymmetric_risk_gap(OK, EYE, [1.5, -0.5]), "prior must have no negative entry"),
        (lambda: lipschitz_loss_bound(-1.0, 0.0, OK), "at least 0, got -1.0"),
        (lambda: lipschitz_loss_bound(1.0, 0.0, (0.9, 0.1)), "0 <= M <= N <= 1"),
        (lambda: lipschitz_constant("gcee", 1.0, 10), "Did you mean 'gce'"),
        (lambda: lipschitz_constant("nce", 1.0, 10), "depends on all probabilities"),
        (lambda: lipschitz_constant("cores", 1.0, 10), "depends on all probabilities"),
        (lambda: base_loss_bounds("hinge", 1.0, 10), "Unknown loss 'hinge'"),
        (lambda: base_loss_bounds("focal", 1.0, 10, gama=1), "Did you mean 'gamma'"),
        (lambda: base_loss_bounds("ce", 1.0, 10, q=1), "no knob 'q'"),
        (lambda: base_loss_bounds("focal", 1.0, 10, gamma=-1), "gamma must be at least 0"),
        (lambda: base_loss_bounds("mae", 1.0, 10, scale=-1), "scale must be at least 0"),
        (lambda: base_loss_bounds("phuber_ce", 1.0, 10, threshold=1), "threshold must be above 1"),
        (lambda: base_loss_bounds("rce", 1.0, 10, log_zero=4), "must be negative and finite, got 4"),
        (lambda: base_loss_bounds("sce", 1.0, 10, alpha=-1), "alpha must be at least 0"),
        (lambda: base_loss_bounds("gce", 1.0, 10, q=0), "q must be positive and finite, got 0.0"),
        (lambda: base_loss_bounds("taylor_ce", 1.0, 10, order=0), "order must be at least 1"),
        (lambda: base_loss_bounds("taylor_ce", 1.0, 10, order=1.5), "order of the loss 'taylor_ce' must be an integer"),
        (lambda: base_loss_bounds("ael", 1.0, 10, a=0), "a must be positive"),
        (lambda: base_loss_bounds("aul", 1.0, 10, a=1), "a must be above 1"),
        (lambda: base_loss_bounds("agce", 1.0, 10, a=-1), "a must be positive"),
        (lambda: base_loss_bounds("cores", 1.0, 10, beta=-1), "beta must be at least 0"),
        (lambda: base_loss_bounds("cores", 1.0, 10, prior="x"), "prior of the loss 'cores' is one of labels, uniform"),
        (lambda: base_loss_bounds("nce", 1.0, 10, scale=-1), "scale must be at least 0"),
        (lambda: all_bounds(1.0, 10, noise="open_set", rate=0.1), "No theorem is about 'open_set'"),
        (lambda: all_bounds(1.0, 10, noise="symmetric"), "A rate is needed"),
        (lambda: all_bounds(1.0, 10, rate=0.5), "A rate is needed"),
        (lambda: all_bounds(1.0, 10, noise="symmetric", rate=1.5), "between 0 and 1, got 1.5"),
        (lambda: all_bounds(1.0, 10, noise="transition"), "needs a transition matrix"),
        (lambda: all_bounds(1.0, 10, noise="symmetric", rate=0.1, transition=EYE), "no other takes one"),
        (
            lambda: all_bounds(1.0, 10, noise="transition", transition=EYE),
            "for each class (10), got [2, 2]",
        ),
        (lambda: all_bounds(1.0, 10, loss="gec"), "Did you mean 'gce'"),
        (lambda: all_bounds(-1.0, 10), "tau must be positive"),
    ],
)
def test_bad_input_is_a_sentence(call, words):
    with pytest.raises(ValueError) as error:
        call()
    assert words in str(error.value)


# --- the module itself -----------------------------------------------------------------------------------------------


def test_each_numbered_item_has_one_home():
    functions = [f for f in vars(theory).values() if inspect.isfunction(f)]
    tags = [doc.splitlines()[-1] for doc in map(inspect.getdoc, functions) if doc and "Paper: " in doc]
    wanted = ["Eq. 2", "Prop 2.1", "Prop 2.4", "Thm 2.2", "Thm 2.3", "Thm E.1"]
    assert sorted(tags) == [f"Paper: {item}." for item in wanted]
