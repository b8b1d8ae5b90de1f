"""Independent losses and links in NumPy float64: formulas as published, gradients by hand.

A loss of p_y alone is `(log_p, rest, **knobs) -> (value, slope)`, all of shape [N]: log_p = log p_y, rest = 1 - p_y and
slope = d value / d log p_y, which stays finite at p_y = 0. A loss of all probabilities is
`(log_probs, y, **knobs) -> (values [N], slopes [N, K])` with the slope in each log p_k. `loss` chains them with the
softmax and a link.
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


def ce(log_p: ndarray, rest: ndarray) -> Pair:
    return -log_p, -np.ones_like(log_p)


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
    return combine(alpha, ce(log_p, rest), beta, rce(log_p, rest, log_zero))


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


OF_TARGET: dict[str, Callable[..., Pair]] = {
    f.__name__: f for f in (ce, focal, mae, phuber_ce, rce, sce, gce, taylor_ce, ael, aul, agce)
}
OF_ALL: dict[str, Callable[..., Pair]] = {f.__name__: f for f in (nce, cores, nce_mae, nce_agce, nce_rce)}

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
    log_probs = log_softmax(linked)
    if name in OF_TARGET:
        values, slopes = of_all(OF_TARGET[name], log_probs, y, **knobs)
    else:
        values, slopes = OF_ALL[name](log_probs, y, **knobs)
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
