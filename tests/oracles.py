"""Independent losses and links in NumPy float64: formulas as published, gradients by hand.

A new loss needs one function here, its name in one of the three lists, and bad values of its knobs in `OUT_OF_RANGE`.

A loss of only p_y is `(log_p, rest, **knobs) -> (value, slope)`, all of shape [N]: log_p = log p_y, rest = 1 - p_y and
slope = d value / d log p_y, which stays finite at p_y = 0. A loss of all probabilities is
`(log_probs, y, **knobs) -> (values [N], slopes [N, K])` with the slope in each log p_k. A loss with another link than
the softmax takes the logits instead, and its slopes are those in each logit. `loss` chains them with the softmax and a
link.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

LOG_1E4 = math.log(1e-4)
Pair = tuple[ndarray, ndarray]

# -- losses of p_y -----------------------------------------------------------------------------------------------------


def focal(log_p: ndarray, rest: ndarray, gamma: float = 0.5, detach_weight: bool = False) -> Pair:
    weight = rest**gamma
    # d(1-p)^gamma = -gamma (1-p)^gamma p/(1-p) dlog p, and log p / (1-p) tends to -1 at p = 1.
    ratio = np.divide(log_p, rest, out=-np.ones_like(rest), where=rest > 0)
    moving = 0.0 if detach_weight else gamma * weight * np.exp(log_p) * ratio
    return -weight * log_p, moving - weight


def mae(log_p: ndarray, rest: ndarray, scale: float = 2.0) -> Pair:
    return scale * rest, -scale * np.exp(log_p)


def phuber_ce(log_p: ndarray, rest: ndarray, threshold: float = 10.0) -> Pair:
    p = np.exp(log_p)
    linear = p <= 1 / threshold
    value = np.where(linear, -threshold * p + math.log(threshold) + 1, -log_p)
    return value, np.where(linear, -threshold * p, -1.0)


def rce(log_p: ndarray, rest: ndarray, log_zero: float = LOG_1E4) -> Pair:
    return -log_zero * rest, log_zero * np.exp(log_p)


def sce(log_p: ndarray, rest: ndarray, alpha: float = 0.5, beta: float = 1.0, log_zero: float = LOG_1E4) -> Pair:
    return combine(alpha, ce_of(log_p), beta, rce(log_p, rest, log_zero))


def gce(log_p: ndarray, rest: ndarray, q: float = 0.7) -> Pair:
    power = np.exp(q * log_p)
    return (1 - power) / q, -power


def taylor_ce(log_p: ndarray, rest: ndarray, order: int = 2) -> Pair:
    i = np.arange(1, order + 1)
    powers = rest[:, None] ** (i - 1)  # the derivative of (1-p)^i / i is -(1-p)^(i-1)
    return (powers * rest[:, None] / i).sum(1), -np.exp(log_p) * powers.sum(1)


def ael(log_p: ndarray, rest: ndarray, a: float = 2.5) -> Pair:
    p = np.exp(log_p)
    return np.exp(-p / a), -p / a * np.exp(-p / a)


def aul(log_p: ndarray, rest: ndarray, a: float = 5.5, q: float = 3.0) -> Pair:
    base = (a - 1) + rest  # a - p
    return (base**q - (a - 1) ** q) / q, -np.exp(log_p) * base ** (q - 1)


def agce(log_p: ndarray, rest: ndarray, a: float = 0.6, q: float = 0.6) -> Pair:
    p = np.exp(log_p)
    return ((a + 1) ** q - (a + p) ** q) / q, -p * (a + p) ** (q - 1)


def js(log_p: ndarray, rest: ndarray, pi: float = 0.7) -> Pair:
    """H(pi e_y + (1-pi) p) - pi H(e_y) - (1-pi) H(p) over the classes y and "another", scaled."""
    v = 1 - pi
    p, mixed = np.exp(log_p), pi + v * np.exp(log_p)
    # The other classes: v p_k log(v p_k) - v p_k log p_k = v p_k log v.
    divergence = -mixed * np.log(mixed) - v * rest * math.log(v) + v * p * log_p
    slope = v * p * (-np.log(mixed) - 1 + math.log(v) + log_p + 1)
    return -divergence / (v * math.log(v)), -slope / (v * math.log(v))


def poly1(log_p: ndarray, rest: ndarray, epsilon: float = 2.0) -> Pair:
    return -log_p + epsilon * rest, -1 - epsilon * np.exp(log_p)


def tangent(log_p: ndarray, value: ndarray, slope: ndarray, at: float, tau: float) -> Pair:
    """A loss with its tangent below p = 1e-7, where OGC's threshold starts."""
    p = np.exp(log_p)
    return np.where(p <= 1e-7, at + tau * (1e-7 - p), value), np.where(p <= 1e-7, -tau * p, slope)


def ogc_ce(log_p: ndarray, rest: ndarray, epsilon: float = 20.0) -> Pair:
    return tangent(log_p, *ce_of(log_p), -math.log(1e-7), 1e7)


def ogc_focal(log_p: ndarray, rest: ndarray, epsilon: float = 20.0, gamma: float = 0.5) -> Pair:
    t, u = 1e-7, 1 - 1e-7
    tau = u**gamma / t - gamma * u ** (gamma - 1) * math.log(t)
    return tangent(log_p, *focal(log_p, rest, gamma), -(u**gamma) * math.log(t), tau)


def ogc_gce(log_p: ndarray, rest: ndarray, epsilon: float = 20.0, q: float = 0.7) -> Pair:
    return tangent(log_p, *gce(log_p, rest, q), (1 - 1e-7**q) / q, 1e-7 ** (q - 1))


def ce_of(log_p: ndarray, rest: ndarray | None = None) -> Pair:
    """Cross entropy without label smoothing, which is a loss of only p_y."""
    return -log_p, -np.ones_like(log_p)


# -- losses of all probabilities ---------------------------------------------------------------------------------------


def nce(log_probs: ndarray, y: ndarray, scale: float = 1.0) -> Pair:
    total = log_probs.sum(1)
    value = at(log_probs, y) / total
    slopes = one_hot(y, log_probs) / total[:, None] - (value / total)[:, None]
    return scale * value, scale * slopes


def cores(log_probs: ndarray, y: ndarray, beta: float = 2.0, prior: ndarray | None = None) -> Pair:
    """CE - beta sum_k prior_k l_k at a given beta, before the sieve."""
    probs, classes = np.exp(log_probs), log_probs.shape[1]
    prior = np.full(classes, 1 / classes) if prior is None else prior
    value = -at(log_probs, y) - beta * (prior * -np.log(probs + 1e-8)).sum(1)
    return value, -one_hot(y, log_probs) + beta * prior * probs / (probs + 1e-8)


def cores_keeps(log_probs: ndarray, y: ndarray) -> ndarray:
    """The sieve: CE - (1/K) sum_k l_k <= 0, with the uniform mean whatever the prior."""
    return -at(log_probs, y) + np.log(np.exp(log_probs) + 1e-8).mean(1) <= 0


def nce_mae(log_probs: ndarray, y: ndarray, alpha: float = 50.0, beta: float = 1.0, scale: float = 1.0) -> Pair:
    return combine(alpha, nce(log_probs, y), beta, of_all(mae, log_probs, y, scale=scale))


def nce_agce(
    log_probs: ndarray, y: ndarray, alpha: float = 50.0, beta: float = 0.1, a: float = 1.8, q: float = 3.0
) -> Pair:
    return combine(alpha, nce(log_probs, y), beta, of_all(agce, log_probs, y, a=a, q=q))


def nce_rce(log_probs: ndarray, y: ndarray, alpha: float = 1.0, beta: float = 1.0, log_zero: float = LOG_1E4) -> Pair:
    return combine(alpha, nce(log_probs, y), beta, of_all(rce, log_probs, y, log_zero=log_zero))


def ce(log_probs: ndarray, y: ndarray, label_smoothing: float = 0.0) -> Pair:
    classes = log_probs.shape[1]
    target = (1 - label_smoothing) * one_hot(y, log_probs) + label_smoothing / classes
    return -(target * log_probs).sum(1), -target


def ratio(terms: ndarray, slopes: ndarray, y: ndarray) -> Pair:
    """t_y / sum_k t_k."""
    total = terms.sum(1, keepdims=True)
    value = at(terms, y)[:, None] / total
    return value[:, 0], slopes * (one_hot(y, terms) - value) / total


def focal_terms(log_probs: ndarray, gamma: float) -> Pair:
    """-(1-p)^gamma log p of every class, with the weights held constant."""
    weights = (-np.expm1(log_probs)).clip(0) ** gamma
    return -weights * log_probs, -weights


def nfl(log_probs: ndarray, y: ndarray, gamma: float = 0.5) -> Pair:
    return ratio(*focal_terms(log_probs, gamma), y)


def anl_ce(log_probs: ndarray, y: ndarray, alpha: float = 5.0, beta: float = 5.0) -> Pair:
    floored = np.maximum(log_probs, math.log(1e-7))
    value, slopes = ratio(floored - math.log(1e-7), (log_probs > math.log(1e-7)).astype(float), y)
    return combine(alpha, nce(log_probs, y), beta, (1 - value, -slopes))


def anl_fl(log_probs: ndarray, y: ndarray, alpha: float = 5.0, beta: float = 5.0, gamma: float = 0.5) -> Pair:
    highest = -((1 - 1e-7) ** gamma) * math.log(1e-7)
    terms, slopes = focal_terms(np.maximum(log_probs, math.log(1e-7)), gamma)
    slopes = slopes * (log_probs > math.log(1e-7))
    value, slopes = ratio(np.maximum(highest - terms, 0), -slopes, y)
    return combine(alpha, nfl(log_probs, y, gamma), beta, (1 - value, -slopes))


def eps_softmax(log_probs: ndarray, y: ndarray, m: float) -> tuple[ndarray, ndarray]:
    """log max(q_y, 1e-8), and its slope in log p_y."""
    p = np.exp(at(log_probs, y))
    q = (p + m * (log_probs.argmax(1) == y)) / (m + 1)
    log_q = np.where(log_probs.argmax(1) == y, np.log1p((p - 1) / (m + 1)), at(log_probs, y) - np.log1p(m))
    free = log_q >= math.log(1e-8)
    inner = np.divide(p / (m + 1), q, out=np.ones_like(q), where=(q > 0) & (log_probs.argmax(1) == y))
    return np.maximum(log_q, math.log(1e-8)), free * inner


def eps_ce_mae(log_probs: ndarray, y: ndarray, alpha: float = 0.01, beta: float = 5.0, m: float = 1e5) -> Pair:
    log_q, slope = eps_softmax(log_probs, y, m)
    first = -log_q, -slope[:, None] * one_hot(y, log_probs)
    return combine(alpha, first, beta, of_all(mae, log_probs, y))


def eps_focal_mae(
    log_probs: ndarray, y: ndarray, alpha: float = 0.01, beta: float = 5.0, m: float = 1e5, gamma: float = 0.1
) -> Pair:
    log_q, slope = eps_softmax(log_probs, y, m)
    weight = np.maximum(-np.expm1(log_q), 1e-300) ** gamma
    first = -weight * log_q, -(weight * slope)[:, None] * one_hot(y, log_probs)
    return combine(alpha, first, beta, of_all(mae, log_probs, y))


def amse(log_probs: ndarray, y: ndarray, a: float = 30.0) -> Pair:
    probs, classes = np.exp(log_probs), log_probs.shape[1]
    gap = a * one_hot(y, log_probs) - probs
    return (gap**2).sum(1) / classes, -2 * gap * probs / classes


def jal_ce(log_probs: ndarray, y: ndarray, alpha: float = 1.0, beta: float = 1.0, a: float = 30.0) -> Pair:
    return combine(alpha, nce(log_probs, y), beta, amse(log_probs, y, a))


def jal_fl(
    log_probs: ndarray, y: ndarray, alpha: float = 1.0, beta: float = 1.0, a: float = 30.0, gamma: float = 0.5
) -> Pair:
    return combine(alpha, nfl(log_probs, y, gamma), beta, amse(log_probs, y, a))


def unhinged(log_probs: ndarray, y: ndarray) -> Pair:
    return log_probs.mean(1) - at(log_probs, y), 1 / log_probs.shape[1] - one_hot(y, log_probs)


def bootstrap_soft(log_probs: ndarray, y: ndarray, beta: float = 0.95) -> Pair:
    probs = np.exp(log_probs)
    target = beta * one_hot(y, log_probs) + (1 - beta) * probs
    return -(target * log_probs).sum(1), -target - (1 - beta) * probs * log_probs


def bootstrap_hard(log_probs: ndarray, y: ndarray, beta: float = 0.8) -> Pair:
    target = beta * one_hot(y, log_probs) + (1 - beta) * one_hot(log_probs.argmax(1), log_probs)
    return -(target * log_probs).sum(1), -target


def transition(classes: int, rate: float) -> ndarray:
    return (1 - rate) * np.eye(classes) + rate / (classes - 1) * (1 - np.eye(classes))


def forward(log_probs: ndarray, y: ndarray, rate: float = 0.2, matrix: ndarray | None = None) -> Pair:
    t = transition(log_probs.shape[1], rate) if matrix is None else matrix
    with np.errstate(divide="ignore"):
        joint = log_probs + np.log(t[:, y].T)
    total = np.logaddexp.reduce(joint, axis=1, keepdims=True)
    return -total[:, 0], -np.exp(joint - total)


def backward(log_probs: ndarray, y: ndarray, rate: float = 0.2, matrix: ndarray | None = None) -> Pair:
    rows = np.linalg.inv(transition(log_probs.shape[1], rate) if matrix is None else matrix)[y]
    return -(rows * log_probs).sum(1), -rows


# -- losses of the logits ----------------------------------------------------------------------------------------------


def ldr_kl(z: ndarray, y: ndarray, lam: float = 10.0, margin: float = 0.1) -> Pair:
    log_soft = np.where(z < -30, z, np.log(np.maximum(np.logaddexp(0, z), 1e-300)))
    log_soft = log_soft - log_soft.max(1, keepdims=True)
    s = np.exp(log_soft) / np.exp(log_soft).mean(1, keepdims=True)
    d = s - at(s, y)[:, None] + margin * (1 - one_hot(y, z))
    top = d.max(1, keepdims=True)
    e = np.exp((d - top) / lam)
    value = top[:, 0] + lam * np.log(e.mean(1))
    ds = e / e.sum(1, keepdims=True) - one_hot(y, z)
    # s_k = K sp_k / sum sp, and d log sp / dz = sigmoid(z) / sp(z)
    share = s / z.shape[1]
    d_log = np.where(z < -30, 1.0, np.exp(-np.logaddexp(0, -z)) / np.maximum(np.logaddexp(0, z), 1e-300))
    inner = (ds * s).sum(1, keepdims=True)
    return value, (ds * s - inner * share) * d_log


def bi_tempered(z: ndarray, y: ndarray, t1: float = 0.8, t2: float = 1.2) -> Pair:
    below = z - z.max(1, keepdims=True)

    def log_p(shift: ndarray) -> ndarray:
        return below - shift if t2 == 1 else np.log1p((t2 - 1) * (shift - below)) / (1 - t2)

    low, high = np.zeros((len(z), 1)), np.full((len(z), 1), float(z.shape[1]) ** 5 + 1)
    for _ in range(300):  # bisection: the sum of p falls in the shift
        middle = (low + high) / 2
        over = np.exp(log_p(middle)).sum(1, keepdims=True) > 1
        low, high = np.where(over, middle, low), np.where(over, high, middle)
    logs = log_p(low)
    log_t1 = logs if t1 == 1 else np.expm1((1 - t1) * logs) / (1 - t1)
    value = -at(log_t1, y) - (1 - np.exp((2 - t1) * logs).sum(1)) / (2 - t1)
    dp = np.exp((1 - t1) * logs) - one_hot(y, z) * np.exp(-t1 * logs)  # d value / dp
    tilted = np.exp(t2 * logs)  # dp/dz at a constant shift
    escort = tilted / tilted.sum(1, keepdims=True)
    return value, dp * tilted - escort * (dp * tilted).sum(1, keepdims=True)


OF_TARGET: dict[str, Callable[..., Pair]] = {
    f.__name__: f
    for f in (focal, mae, phuber_ce, rce, sce, gce, taylor_ce, ael, aul, agce, js, poly1, ogc_ce, ogc_focal, ogc_gce)
} | {"ce": ce_of}
_OF_ALL = (
    *(ce, nce, cores, nce_mae, nce_agce, nce_rce, nfl, anl_ce, anl_fl, eps_ce_mae, eps_focal_mae, amse),
    *(jal_ce, jal_fl, unhinged, bootstrap_soft, bootstrap_hard, forward, backward),
)
OF_ALL: dict[str, Callable[..., Pair]] = {f.__name__: f for f in _OF_ALL}
OF_LOGITS: dict[str, Callable[..., Pair]] = {f.__name__: f for f in (ldr_kl, bi_tempered)}
ORACLES = OF_TARGET | OF_ALL | OF_LOGITS

# -- what tests of all losses need to know of one ----------------------------------------------------------------------

SYMMETRIC = {
    "mae",
    "rce",
    "nce",
    "nce_mae",
    "nce_rce",
    "unhinged",
    "nfl",
    "anl_ce",
    "anl_fl",
}  # sum_k L(z, k) is the same for all z
OF_ARGMAX = {"eps_ce_mae", "eps_focal_mae", "bootstrap_hard"}  # jump, or bend, where two classes tie for the largest
ROUGH: dict[str, float] = dict.fromkeys(
    ("ogc_ce", "ogc_focal", "ogc_gce", "ldr_kl"), 1e-7
)  # a threshold in float32, a search
DETACHED = {"nfl", "anl_fl", "jal_fl", "eps_focal_mae"}  # gradients hold focal weights constant, as the authors' do
# The oracle of CORES has its beta and prior; the rest of its schedule acts through the epoch and has its own tests.
SCHEDULE = {"cores": {"warmup", "ramp", "sieve_after", "prior"}}
OUT_OF_RANGE: dict[str, dict[str, Any]] = {
    "ce": {"label_smoothing": (1.1, math.inf, -math.inf)},
    "focal": {"gamma": (-0.1, math.inf)},
    "mae": {"scale": (-1.0, math.inf)},
    "phuber_ce": {"threshold": (1.0, 0.0, math.inf)},
    "rce": {"log_zero": (0.0, 1.0, -math.inf)},
    "sce": {"alpha": (-1.0,), "beta": (-1.0, math.inf), "log_zero": (0.0,)},
    "gce": {"q": (0.0, -1.0, math.inf)},
    "taylor_ce": {"order": (0, -1, 1.5)},
    "nce": {"scale": (-1.0,)},
    "ael": {"a": (0.0, -1.0, math.inf)},
    "aul": {"a": (1.0, 0.5, math.inf), "q": (0.0, math.inf)},
    "agce": {"a": (0.0, math.inf), "q": (0.0, -1.0)},
    "cores": {"beta": (-1.0, math.inf), "warmup": (-1,), "ramp": (0,), "prior": ("lables",)},
    "nce_mae": {"alpha": (-1.0,), "beta": (-1.0,), "scale": (-1.0,)},
    "nce_agce": {"alpha": (-1.0,), "beta": (-1.0,), "a": (0.0,), "q": (0.0,)},
    "nce_rce": {"alpha": (-1.0,), "beta": (-1.0,), "log_zero": (0.0,)},
    "nfl": {"gamma": (-0.1, math.inf)},
    "anl_ce": {"alpha": (-1.0, math.inf), "beta": (-1.0,)},
    "anl_fl": {"alpha": (-1.0,), "beta": (-1.0,), "gamma": (-1.0,)},
    "eps_ce_mae": {"alpha": (-1.0,), "beta": (-1.0,), "m": (-1.0, math.inf)},
    "eps_focal_mae": {"alpha": (-1.0,), "beta": (-1.0,), "m": (-1.0,), "gamma": (-1.0,)},
    "amse": {"a": (1.0, math.inf)},
    "jal_ce": {"alpha": (-1.0,), "beta": (-1.0,), "a": (1.0,)},
    "jal_fl": {"alpha": (-1.0,), "beta": (-1.0,), "a": (1.0,), "gamma": (-1.0,)},
    "ogc_ce": {"epsilon": (-1.0, math.inf)},
    "ogc_focal": {"epsilon": (-1.0,), "gamma": (-1.0,)},
    "ogc_gce": {"epsilon": (-1.0,), "q": (0.0,)},
    "js": {"pi": (0.0, 1.0, -1.0)},
    "poly1": {"epsilon": (-1.5, math.inf)},
    "bootstrap_soft": {"beta": (-0.1, 1.1)},
    "bootstrap_hard": {"beta": (-0.1, 1.1)},
    "ldr_kl": {"lam": (0.0, -1.0, math.inf), "margin": (-1.0,)},
    "bi_tempered": {"t1": (-0.1, 1.1), "t2": (0.9, 6.0)},
    "forward": {"rate": (-0.1, 1.0)},
    "backward": {"rate": (-0.1, 1.0)},
}

# -- links: z -> (z', pullback of the gradient) ------------------------------------------------------------------------

Link = Callable[[ndarray], tuple[ndarray, Callable[[ndarray], ndarray]]]


def no_link(z: ndarray) -> tuple[ndarray, Callable[[ndarray], ndarray]]:
    return z, lambda g: g


def norm(z: ndarray, p: float) -> ndarray:
    """||z||_p of each row, [N, 1], scaled by the largest entry so that no power overflows."""
    top = np.abs(z).max(1, keepdims=True)
    if p == math.inf:
        return top
    scaled = np.abs(z) / np.where(top > 0, top, 1.0)
    return top * (scaled**p).sum(1, keepdims=True) ** (1 / p)


def clip(tau: float, delta: float | None = None, p: float = 2.0) -> Link:
    """Eq. 4: delta z / ||z||_p where ||z||_p >= tau, else z."""
    delta = tau if delta is None else delta

    def link(z: ndarray) -> tuple[ndarray, Callable[[ndarray], ndarray]]:
        size = norm(z, p)
        clipped = size >= tau
        size = np.where(clipped, size, 1.0)
        unit = z / size
        if p == math.inf:
            highest = np.abs(z) == np.abs(z).max(1, keepdims=True)
            slope = np.sign(z) * highest / highest.sum(1, keepdims=True)
        else:
            slope = np.sign(z) * np.abs(unit) ** (p - 1)

        def pullback(g: ndarray) -> ndarray:
            return np.where(clipped, delta / size * (g - (g * unit).sum(1, keepdims=True) * slope), g)

        return np.where(clipped, delta * unit, z), pullback

    return link


def clip_by_value(limit: float) -> Link:
    """LC-V: clamp each entry to [-limit, limit]; no gradient outside."""
    return lambda z: (np.minimum(np.maximum(z, -limit), limit), lambda g: g * (np.abs(z) <= limit))


def logit_norm(temperature: float) -> Link:
    """z / (T (||z||_2 + 1e-7)); the gradient of the norm at 0 is 0 by convention."""

    def link(z: ndarray) -> tuple[ndarray, Callable[[ndarray], ndarray]]:
        size = norm(z, 2)
        direction = np.divide(z, size, out=np.zeros_like(z), where=size > 0)
        out = z / (temperature * (size + 1e-7))

        def pullback(g: ndarray) -> ndarray:
            radial = (g * out).sum(1, keepdims=True) * direction
            return (g / temperature - radial) / (size + 1e-7)

        return out, pullback

    return link


# -- the chain ---------------------------------------------------------------------------------------------------------


def log_softmax(z: ndarray) -> ndarray:
    """Compute log p, exactly even where p rounds to 1: leave the largest entry out of the sum and add it with log1p."""
    shifted = z - z.max(1, keepdims=True)
    e = np.exp(shifted)
    np.put_along_axis(e, z.argmax(1)[:, None], 0.0, 1)
    return shifted - np.log1p(e.sum(1, keepdims=True))


class Result(NamedTuple):
    values: ndarray  # [N]
    gradient: ndarray  # [N, K], with respect to the logits before the link
    slopes: ndarray  # [N, K], with respect to the log-probabilities


def loss(name: str, z: ndarray, y: ndarray, link: Link = no_link, **knobs: Any) -> Result:
    """Evaluate a loss behind a link. `y` are indices [N], or probabilities [N, K] for the expected loss."""
    if y.ndim == 2:
        each = [loss(name, z, np.full(len(z), k), link, **knobs) for k in range(z.shape[1])]
        shares = y.T[:, :, None]
        values, gradient, slopes = (np.stack(part) for part in zip(*each, strict=True))
        return Result((y.T * values).sum(0), (shares * gradient).sum(0), (shares * slopes).sum(0))
    linked, pullback = link(z)
    if name in OF_LOGITS:
        values, gradient = OF_LOGITS[name](linked, y, **knobs)
        return Result(values, pullback(gradient), gradient)
    log_probs = log_softmax(linked)
    if name in OF_ALL:
        values, slopes = OF_ALL[name](log_probs, y, **knobs)
    else:
        values, slopes = of_all(OF_TARGET[name], log_probs, y, **knobs)
    # d log p_k = dz_k - sum_j p_j dz_j
    return Result(values, pullback(slopes - np.exp(log_probs) * slopes.sum(1, keepdims=True)), slopes)


def of_all(function: Callable[..., Pair], log_probs: ndarray, y: ndarray, **knobs: Any) -> Pair:
    """Turn a loss of p_y into one of all log-probabilities; 1 - p_y is the sum of the other probabilities."""
    rest = (np.exp(log_probs) * (1 - one_hot(y, log_probs))).sum(1)
    value, slope = function(at(log_probs, y), rest, **knobs)
    return value, slope[:, None] * one_hot(y, log_probs)


def combine(alpha: float, first: Pair, beta: float, second: Pair) -> Pair:
    return alpha * first[0] + beta * second[0], alpha * first[1] + beta * second[1]


def at(a: ndarray, y: ndarray) -> ndarray:
    return a[np.arange(len(y)), y]


def one_hot(y: ndarray, like: ndarray) -> ndarray:
    return np.eye(like.shape[1])[y]
