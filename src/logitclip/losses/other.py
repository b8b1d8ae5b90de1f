"""Losses beside the two families: divergences, other links than the softmax, corrections by a transition matrix."""

from __future__ import annotations

import math
import os
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from logitclip.clip import check_positive
from logitclip.losses.contract import loss
from logitclip.losses.parts import check_at_least, one_minus_p
from logitclip.noise import read_matrix


@loss(
    tune={"pi": (0.1, 0.3, 0.5, 0.7, 0.9)},
    settings={
        "CIFAR-10": "js:pi=0.7",
        "CIFAR-100": "js:pi=0.3",
    },
)
def js(log_p: Tensor, *, pi: float = 0.7) -> Tensor:
    """Jensen-Shannon divergence of label and prediction with weights pi and 1-pi, over `-(1-pi) log(1-pi)`.

    Cross entropy in the limit of pi = 0, reduced MAE in that of 1. The authors choose pi by the noise: CIFAR-10 clean
    0.1, symmetric 0.7 (from 60 %: 0.9), asymmetric 0.3; CIFAR-100 clean and 20 % 0.1, 40 % 0.3, 60 % 0.5, asymmetric
    0.5.

    When: to go from `ce` to MAE with one bounded knob, as with `gce`. The method with two views is `gjs`.

    Args:
        logits: [..., K].
        target: Class indices [...], or probabilities [..., K].
        pi: Weight of the label, between 0 and 1.

    Returns:
        One value per example, [...]; float32 for half-precision logits.

    Raises:
        ValueError: If the shapes do not fit or pi is not between 0 and 1.

    >>> js(torch.zeros(1, 4), torch.tensor([2]), pi=0.5)
    tensor([1.0976])

    Reference: Englesson and Azizpour (2021), Generalized Jensen-Shannon Divergence Loss for Learning with Noisy Labels,
    NeurIPS 2021; arXiv 2105.04522.
    """
    if not 0 < pi < 1:
        raise ValueError(f"pi must be between 0 and 1, got {pi}.")
    rest = 1 - pi
    p, log_mixed = log_p.exp(), torch.log1p(rest * torch.expm1(log_p))
    own = p * log_p.clamp_min(torch.finfo(log_p.dtype).min) - p * log_mixed - one_minus_p(log_p) * math.log(rest)
    return (rest * own - pi * log_mixed) / -(rest * math.log(rest))


@loss(tune={"epsilon": (-0.5, 1.0, 2.0, 4.0, 8.0)})
def poly1(log_p: Tensor, *, epsilon: float = 2.0) -> Tensor:
    """Poly-1, `-log p_y + epsilon (1-p_y)`.

    When: if you use it already; a positive epsilon adds a share of the reduced MAE to `ce`.

    Args:
        logits: [..., K].
        target: Class indices [...], or probabilities [..., K].
        epsilon: At least -1; the authors use 2 on ImageNet, and -1 to 6 elsewhere.

    Returns:
        One value per example, [...]; float32 for half-precision logits.

    Raises:
        ValueError: If the shapes do not fit or epsilon is below -1.

    >>> poly1(torch.zeros(1, 4), torch.tensor([2]), epsilon=1.0)
    tensor([2.1363])

    Reference: Leng, Tan, Liu, Cubuk, Shi, Cheng and Anguelov (2022), PolyLoss: A Polynomial Expansion Perspective of
    Classification Loss Functions, arXiv 2204.12511.
    """
    check_at_least(-1, epsilon=epsilon)
    return -log_p + epsilon * one_minus_p(log_p)


@loss
def unhinged(log_p: Tensor, sum_log_p: Tensor, classes: Tensor) -> Tensor:
    """Unhinged loss, `mean_k log p_k - log p_y = mean(z) - z_y`: exactly symmetric.

    It lacks only a bound on the logits, without which it has no minimum. The clip is such a bound, so use it with one.

    When: always with the clip, which bounds it; then it is exactly robust to symmetric noise, and has no knob.

    Args:
        logits: [..., K].
        target: Class indices [...], or probabilities [..., K].

    Returns:
        One value per example, [...]; float32 for half-precision logits.

    Raises:
        ValueError: If the shapes do not fit.

    >>> unhinged(torch.tensor([[0.0, 0.0, 3.0, 0.0]]), torch.tensor([2]))
    tensor([-2.2500])

    Reference: van Rooyen, Menon and Williamson (2015), Learning with Symmetric Label Noise: The Importance of Being
    Unhinged, NeurIPS 2015; arXiv 1505.07634.
    """
    return sum_log_p / classes - log_p


@loss(tune={"beta": (0.7, 0.8, 0.9, 0.95, 0.99)})
def bootstrap_soft(log_p: Tensor, sum_p_log_p: Tensor, *, beta: float = 0.95) -> Tensor:
    """Soft bootstrapping, `-beta log p_y - (1-beta) sum_k p_k log p_k`.

    When: as a baseline. It adds some entropy minimisation to `ce`.

    Args:
        logits: [..., K].
        target: Class indices [...], or probabilities [..., K].
        beta: Trust in the label, from 0 to 1.

    Returns:
        One value per example, [...]; float32 for half-precision logits.

    Raises:
        ValueError: If the shapes do not fit or beta is not from 0 to 1.

    >>> bootstrap_soft(torch.zeros(1, 4), torch.tensor([2]))
    tensor([1.3863])

    Reference: Reed, Lee, Anguelov, Szegedy, Erhan and Rabinovich (2014), Training Deep Neural Networks on Noisy Labels
    with Bootstrapping, arXiv 1412.6596.
    """
    _check_share(beta=beta)
    return -beta * log_p - (1 - beta) * sum_p_log_p


@loss(tune={"beta": (0.5, 0.7, 0.8, 0.9, 0.95)})
def bootstrap_hard(log_p: Tensor, max_log_p: Tensor, *, beta: float = 0.8) -> Tensor:
    """Hard bootstrapping, `-beta log p_y - (1-beta) max_k log p_k`: the prediction is a second label.

    When: as a baseline.

    Args:
        logits: [..., K].
        target: Class indices [...], or probabilities [..., K].
        beta: Trust in the label, from 0 to 1.

    Returns:
        One value per example, [...]; float32 for half-precision logits.

    Raises:
        ValueError: If the shapes do not fit or beta is not from 0 to 1.

    >>> bootstrap_hard(torch.zeros(1, 4), torch.tensor([2]))
    tensor([1.3863])

    Reference: Reed, Lee, Anguelov, Szegedy, Erhan and Rabinovich (2014), Training Deep Neural Networks on Noisy Labels
    with Bootstrapping, arXiv 1412.6596.
    """
    _check_share(beta=beta)
    return -beta * log_p - (1 - beta) * max_log_p


def _check_share(**knobs: float) -> None:
    for name, value in knobs.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must be from 0 to 1, got {value}.")


# -- other links than the softmax --------------------------------------------------------------------------------------


@loss(
    tune={"lam": (0.3, 1.0, 3.0, 10.0, 30.0)},
    settings={"CIFAR-10": "ldr_kl:lam=10", "CIFAR-100": "ldr_kl:lam=1", "WebVision": "ldr_kl:lam=1"},
)
def ldr_kl(logits: Tensor, *, lam: float = 10.0, margin: float = 0.1) -> Tensor:
    """Label-distributionally robust loss, `lam log mean_k exp((s_k - s_y + margin [k != y]) / lam)`.

    The scores s are `softplus(z) / mean softplus(z)`, not a softmax.

    When: with clean to moderately noisy labels. Its scores are not logits, so tune the clip anew.

    Args:
        logits: [..., K].
        target: Class indices [...], or probabilities [..., K].
        lam: Positive; small values look at the strongest rival, large ones at all classes.
        margin: How far the label should be ahead, at least 0.

    Returns:
        One value per example, [...]; float32 for half-precision logits.

    Raises:
        ValueError: If the shapes do not fit or a knob is out of its range.

    >>> ldr_kl(torch.zeros(1, 4), torch.tensor([2]), lam=1.0)
    tensor([0.0759])

    Reference: Zhu, Ying and Yang (2023), Label Distributionally Robust Losses for Multi-class Classification:
    Consistency, Robustness and Adaptivity, ICML 2023; arXiv 2112.14869.
    """
    check_positive("lam", lam)
    check_at_least(0, margin=margin)
    masked = logits.isneginf()
    z = logits.masked_fill(masked, 0.0)
    low = z < -15  # there log softplus(z) is z
    log_softplus = torch.where(low, z, torch.nn.functional.softplus(z.masked_fill(low, 0.0)).log())
    log_count = (~masked).sum(-1, keepdim=True).to(z.dtype).log()
    log_softplus = log_softplus.masked_fill(masked, -math.inf)
    s = (log_softplus - log_softplus.logsumexp(-1, keepdim=True) + log_count).exp()
    raised = ((s + margin) / lam).masked_fill(masked, -math.inf)
    total = raised.logsumexp(-1, keepdim=True)
    own = torch.log1p(math.expm1(-margin / lam) * (raised - total).exp())  # the label itself has no margin
    return lam * (total + own - log_count) - s


@loss(tune={"t2": (1.1, 1.2, 1.5, 2.0, 3.0)})
def bi_tempered(logits: Tensor, *, t1: float = 0.8, t2: float = 1.2) -> Tensor:
    """Bi-tempered logistic loss, `-log_t1 p_y - (1 - sum_k p_k^(2-t1)) / (2-t1)` with the tempered softmax of t2.

    `log_t(x) = (x^(1-t) - 1) / (1-t)`, and `p = exp_t2(z - lambda)` with lambda such that p sums to 1. With t1 = t2 = 1
    it is cross entropy. The authors' code takes five steps for lambda; here it is exact.

    When: if a few labels are far off. t1 below 1 bounds the loss, t2 above 1 gives predictions heavy tails.

    Args:
        logits: [..., K].
        target: Class indices [...], or probabilities [..., K].
        t1: Temperature of the logarithm, from 0 to 1.
        t2: Temperature of the exponential, from 1 to 5.

    Returns:
        One value per example, [...]; float32 for half-precision logits.

    Raises:
        ValueError: If the shapes do not fit or a knob is out of its range.

    >>> bi_tempered(torch.zeros(1, 4), torch.tensor([2]), t1=1.0, t2=1.0)
    tensor([1.3863])

    Reference: Amid, Warmuth, Anil and Koren (2019), Robust Bi-Tempered Logistic Loss Based on Bregman Divergences,
    NeurIPS 2019; arXiv 1906.03361.
    """
    if not 0 <= t1 <= 1:
        raise ValueError(f"t1 must be from 0 to 1, got {t1}.")
    if not 1 <= t2 <= 5:
        raise ValueError(f"t2 must be from 1 to 5, got {t2}.")
    log_p = _log_tempered_softmax(logits, t2)
    powers = torch.exp((2 - t1) * log_p).sum(-1, keepdim=True)
    log_t1 = log_p if t1 == 1 else torch.expm1((1 - t1) * log_p) / (1 - t1)
    return (powers - 1) / (2 - t1) - log_t1


def _log_tempered_softmax(logits: Tensor, t: float) -> Tensor:
    """log exp_t(z - lambda), where lambda solves sum_k exp_t(z_k - lambda) = 1."""
    if t == 1:
        return torch.log_softmax(logits, dim=-1)
    masked = logits.isneginf()
    top = logits.amax(-1, keepdim=True).detach()
    below = (logits - top).masked_fill(masked, 0.0)

    def log_exp_t(shift: Tensor) -> Tensor:
        return (torch.log1p((t - 1) * (shift - below)) / (1 - t)).masked_fill(masked, -math.inf)

    def newton(shift: Tensor) -> Tensor:
        log_p = log_exp_t(shift)
        return shift + (log_p.exp().sum(-1, keepdim=True) - 1) / (t * log_p).exp().sum(-1, keepdim=True)

    # The sum falls and is convex in the shift, and is at least 1 at 0: Newton's method rises to the solution.
    with torch.no_grad():
        shift = torch.zeros_like(top)
        for _ in range(30):
            shift = newton(shift)
    return log_exp_t(newton(newton(shift)))  # two more steps have its first and second derivatives


# -- corrections by a transition matrix --------------------------------------------------------------------------------


@loss(tune={"rate": (0.05, 0.1, 0.2, 0.3, 0.4)})
def forward(log_probs: Tensor, *, rate: float = 0.2, matrix: str | None = None) -> Tensor:
    """Forward correction, `-log sum_j p_j T_jy`: the cross entropy of predicted *noisy* labels.

    When: if you know the noise, or can estimate it well: T says how often each true class gets each label.

    Args:
        logits: [..., K].
        target: Class indices [...], or probabilities [..., K].
        rate: T is that of symmetric noise with this rate, from 0 to below 1.
        matrix: T instead, [K, K] with rows that sum to 1: the path of a .npy, .npz or .csv file, or in Python an array.

    Returns:
        One value per example, [...]; float32 for half-precision logits.

    Raises:
        ValueError: If the shapes do not fit or T is not a transition matrix.

    >>> forward(torch.tensor([[30.0, 0.0]]), torch.tensor([1]), rate=0.5)
    tensor([0.6931])

    Reference: Patrini, Rozza, Menon, Nock and Qu (2017), Making Deep Neural Networks Robust to Label Noise: A Loss
    Correction Approach, CVPR 2017; arXiv 1609.03683.
    """
    _check_rate(rate)
    if matrix is None and rate == 0:
        return -log_probs
    p = log_probs.exp()
    if matrix is None:
        others = (~log_probs.isneginf()).sum(-1, keepdim=True).to(p.dtype) - 1
        noisy = (1 - rate) * p + rate / others.clamp_min(1) * one_minus_p(log_probs)
    else:
        noisy = p @ _find_matrix(matrix, p.shape[-1]).to(p)
    return -noisy.clamp_min(torch.finfo(p.dtype).tiny).log()


@loss(tune={"rate": (0.05, 0.1, 0.2, 0.3, 0.4)})
def backward(log_probs: Tensor, *, rate: float = 0.2, matrix: str | None = None) -> Tensor:
    """Backward correction, `sum_k (T^-1)_yk CE_k`: unbiased for the clean loss, and unbounded below.

    When: rarely; `forward` is more stable. With the clip it is bounded.

    Args:
        logits: [..., K].
        target: Class indices [...], or probabilities [..., K].
        rate: T is that of symmetric noise with this rate, from 0 to below 1; it must not be 1 - 1/K.
        matrix: T instead, [K, K] with rows that sum to 1: the path of a .npy, .npz or .csv file, or in Python an array.

    Returns:
        One value per example, [...]; float32 for half-precision logits.

    Raises:
        ValueError: If the shapes do not fit, or T is not a transition matrix with an inverse.

    >>> backward(torch.zeros(1, 4), torch.tensor([2]))
    tensor([1.3863])

    Reference: Patrini, Rozza, Menon, Nock and Qu (2017), Making Deep Neural Networks Robust to Label Noise: A Loss
    Correction Approach, CVPR 2017; arXiv 1609.03683.
    """
    _check_rate(rate)
    masked = log_probs.isneginf()
    finite = log_probs.masked_fill(masked, 0.0)
    if matrix is None:  # the inverse is (I - b J) / (1 - b K) with b = rate / (K-1)
        chance = 1 - 1 / finite.shape[-1]
        if chance and math.isclose(rate, chance, rel_tol=1e-6):
            raise ValueError(
                f"rate must not be 1 - 1/K = {chance:g}: such labels say nothing about the {finite.shape[-1]} classes."
            )
        count = (~masked).sum(-1, keepdim=True).to(finite.dtype)
        b = rate / (count - 1).clamp_min(1)
        values = (b * finite.sum(-1, keepdim=True) - finite) / (1 - b * count)
    else:
        values = -finite @ _find_matrix(matrix, finite.shape[-1], inverse=True).to(finite).t()
    return values.masked_fill(masked, math.inf)


def _check_rate(rate: float) -> None:
    if not 0 <= rate < 1:
        raise ValueError(f"rate must be from 0 to below 1, got {rate}.")


def _find_matrix(matrix: Any, classes: int, inverse: bool = False) -> Tensor:
    if not isinstance(matrix, str) or not os.path.isfile(matrix):
        return _parse_matrix(matrix, classes, inverse)
    found = os.stat(matrix)
    return _read_once(matrix, classes, inverse, found.st_mtime_ns, found.st_size)


def _parse_matrix(matrix: Any, classes: int, inverse: bool) -> Tensor:
    rows = read_matrix(matrix, classes)
    if not inverse:
        return rows
    if torch.linalg.matrix_rank(rows) < classes:
        raise ValueError("matrix has no inverse: its rows must be linearly independent.")
    return torch.linalg.inv(rows)


@lru_cache(maxsize=8)
def _read_once(path: str, classes: int, inverse: bool, changed: int, size: int) -> Tensor:
    """Read a file; it is read again if its time or size has changed."""
    return _parse_matrix(path, classes, inverse)
