"""Losses that came after the paper, and older ones that are compared with them.

Constants that are part of a loss, such as the clamp of the epsilon-softmax losses, are part of it here. `settings` are
the authors' settings, as options of `logitclip train`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from logitclip.fused import SUMS
from logitclip.losses.classic import focal, gce, mae, nce
from logitclip.losses.contract import loss
from logitclip.losses.memory import LOWEST
from logitclip.losses.parts import check_above, check_at_least, infinite_if_masked

# -- active and negative losses ----------------------------------------------------------------------------------------


@loss(tune={"gamma": (0.1, 0.5, 1.0, 2.0, 5.0)})
def nfl(log_p: Tensor, sum_focal: Tensor, *, gamma: float = 0.5) -> Tensor:
    """Normalised focal loss, `f_y / sum_k f_k` with `f_k = -(1-p_k)^gamma log p_k`.

    The weights `(1-p_k)^gamma` are constants in the gradient, as in the authors' code.

    When: in a sum such as `jal_fl` or `anl_fl`. By itself it underfits, like `nce`.

    Args:
        logits: [..., K].
        target: Class indices [...], or probabilities [..., K].
        gamma: How strongly well-classified examples are down-weighted, at least 0; 0 is `nce`.

    Returns:
        One value per example, [...]; float32 for half-precision logits.

    Raises:
        ValueError: If the shapes do not fit or gamma is below 0.

    >>> nfl(torch.zeros(1, 4), torch.tensor([2]))
    tensor([0.2500])

    Reference: Ma, Huang, Wang, Romano, Erfani and Bailey (2020), Normalized Loss Functions for Deep Learning with Noisy
    Labels, arXiv 2006.13554.
    """
    check_at_least(0, gamma=gamma)
    return infinite_if_masked(lambda log_p: SUMS["sum_focal"].value(log_p, gamma) / sum_focal, log_p)


@loss(
    tune={"alpha": (1.0, 2.0, 5.0, 10.0, 20.0)},
    settings={
        "CIFAR-10": "anl_ce:alpha=5,beta=5 --penalty l1:weight=5e-5 --weight-decay 0",
        "CIFAR-100": "anl_ce:alpha=10,beta=1 --penalty l1:weight=5e-7 --weight-decay 0",
        "WebVision": "anl_ce:alpha=20,beta=1 --penalty l1:weight=5e-6 --weight-decay 0",
    },
)
def anl_ce(
    log_p: Tensor, sum_log_p: Tensor, sum_above_floor: Tensor, *, alpha: float = 5.0, beta: float = 5.0
) -> Tensor:
    """Active negative loss, `alpha NCE + beta NNCE`, `NNCE = 1 - c_y / sum_k c_k`, `c_k = max(log p_k - log 1e-7, 0)`.

    The authors add an L1 penalty on all parameters instead of weight decay: `--penalty l1`, or `lc.l1_penalty`.

    When: with many classes and much symmetric noise, with the L1 penalty.

    Args:
        logits: [..., K].
        target: Class indices [...], or probabilities [..., K].
        alpha: Weight of NCE, at least 0.
        beta: Weight of NNCE, at least 0.

    Returns:
        One value per example, [...]; float32 for half-precision logits.

    Raises:
        ValueError: If the shapes do not fit or a knob is out of its range.

    >>> anl_ce(torch.zeros(1, 4), torch.tensor([2]), alpha=1.0, beta=1.0)
    tensor([1.])

    Reference: Ye, Li, Dai, Liu, Sun and Tong (2023), Active Negative Loss Functions for Learning with Noisy Labels,
    NeurIPS 2023; arXiv 2412.02373.
    """
    check_at_least(0, alpha=alpha, beta=beta)
    negative = 1 - SUMS["sum_above_floor"].value(log_p) / sum_above_floor
    return alpha * nce.phi(log_p, sum_log_p) + beta * negative


@loss(
    tune={"alpha": (1.0, 2.0, 5.0, 10.0, 20.0)},
    settings={
        "CIFAR-10": "anl_fl:alpha=5,beta=5 --penalty l1:weight=5e-5 --weight-decay 0",
        "CIFAR-100": "anl_fl:alpha=10,beta=1 --penalty l1:weight=5e-7 --weight-decay 0",
        "WebVision": "anl_fl:alpha=20,beta=1 --penalty l1:weight=5e-6 --weight-decay 0",
    },
)
def anl_fl(
    log_p: Tensor,
    sum_focal: Tensor,
    sum_focal_above_floor: Tensor,
    *,
    alpha: float = 5.0,
    beta: float = 5.0,
    gamma: float = 0.5,
) -> Tensor:
    """Active negative loss with focal loss, `alpha NFL + beta NNFL`.

    `NNFL = 1 - g_y / sum_k g_k`, where g is the largest focal loss, that of p = 1e-7, minus the focal loss. The focal
    weights are constants in the gradient. The authors add an L1 penalty, see `anl_ce`.

    When: as `anl_ce`; its results are about the same.

    Args:
        logits: [..., K].
        target: Class indices [...], or probabilities [..., K].
        alpha: Weight of NFL, at least 0.
        beta: Weight of NNFL, at least 0.
        gamma: The gamma of both focal losses, at least 0.

    Returns:
        One value per example, [...]; float32 for half-precision logits.

    Raises:
        ValueError: If the shapes do not fit or a knob is out of its range.

    >>> anl_fl(torch.zeros(1, 4), torch.tensor([2]), alpha=1.0, beta=1.0)
    tensor([1.])

    Reference: Ye, Li, Dai, Liu, Sun and Tong (2023), Active Negative Loss Functions for Learning with Noisy Labels,
    NeurIPS 2023; arXiv 2412.02373.
    """
    check_at_least(0, alpha=alpha, beta=beta)
    negative = 1 - SUMS["sum_focal_above_floor"].value(log_p, gamma) / sum_focal_above_floor
    return alpha * nfl.phi(log_p, sum_focal, gamma=gamma) + beta * negative


# -- epsilon-softmax ---------------------------------------------------------------------------------------------------


def _log_eps_softmax(log_p: Tensor, is_max: Tensor, m: float) -> Tensor:
    """log of `(p_y + m [y is the arg max]) / (m+1)`, at least log 1e-8: this clamp is the robustness of the losses."""
    check_at_least(0, m=m)
    if_max = torch.log1p(torch.expm1(log_p.masked_fill(is_max == 0, 0.0)) / (m + 1))
    return torch.where(is_max > 0, if_max, log_p - math.log1p(m)).clamp_min(math.log(1e-8))


@loss(
    tune={"beta": (0.5, 2.0, 5.0, 10.0, 20.0)},
    settings={
        "CIFAR-10": "eps_ce_mae:alpha=0.01,beta=5,m=1e5",
        "CIFAR-100": "eps_ce_mae:alpha=0.05,beta=1,m=1e4",
        "WebVision": "eps_ce_mae:alpha=0.015,beta=0.3,m=1e3",
    },
)
def eps_ce_mae(log_p: Tensor, is_max: Tensor, *, alpha: float = 0.01, beta: float = 5.0, m: float = 1e5) -> Tensor:
    """CE of the epsilon-softmax + MAE, `alpha -log max(q_y, 1e-8) + beta 2(1-p_y)`.

    `q_y = (p_y + m [y is the arg max]) / (m+1)`. Where the label is not the arg max, the first term has no gradient for
    p_y below `1e-8 (m+1)`. The authors tune the knobs by the noise: CIFAR-10 asymmetric alpha=0.02, m=1e3, instance
    alpha=0.045, beta=10; CIFAR-100 alpha=0.1, 0.05, 0.03, 0.0125, 0.0075 at rates 0, 0.2, 0.4, 0.6, 0.8.

    When: if you know the kind and the rate of the noise, which its settings depend on.

    Args:
        logits: [..., K].
        target: Class indices [...], or probabilities [..., K].
        alpha: Weight of the cross entropy, at least 0.
        beta: Weight of MAE, at least 0.
        m: What the arg max gets on top of its probability, at least 0; 0 is CE + MAE with a clamp.

    Returns:
        One value per example, [...]; float32 for half-precision logits.

    Raises:
        ValueError: If the shapes do not fit or a knob is out of its range.

    >>> eps_ce_mae(torch.zeros(1, 4), torch.tensor([2]), alpha=0.0, beta=1.0)
    tensor([1.5000])

    Reference: Wang, Zhou, Zhai, Jiang, Ji and Liu (2024), Epsilon-Softmax: Approximating One-Hot Vectors for Mitigating
    Label Noise, NeurIPS 2024; arXiv 2508.02387.
    """
    check_at_least(0, alpha=alpha, beta=beta)
    return alpha * -_log_eps_softmax(log_p, is_max, m) + beta * mae.phi(log_p)


@loss(
    tune={"beta": (0.5, 2.0, 5.0, 10.0, 20.0)},
    settings={
        "CIFAR-10": "eps_focal_mae:alpha=0.01,beta=5,m=1e5",
        "CIFAR-100": "eps_focal_mae:alpha=0.05,beta=1,m=1e4",
        "WebVision": "eps_focal_mae:alpha=0.015,beta=0.3,m=1e3",
    },
)
def eps_focal_mae(
    log_p: Tensor, is_max: Tensor, *, alpha: float = 0.01, beta: float = 5.0, m: float = 1e5, gamma: float = 0.1
) -> Tensor:
    """Focal loss of the epsilon-softmax + MAE, `alpha -(1-q)^gamma log q + beta 2(1-p_y)`, `q = max(q_y, 1e-8)`.

    See `eps_ce_mae`. The focal weight is a constant in the gradient, as in the authors' code.

    When: as `eps_ce_mae`; its results are about the same.

    Args:
        logits: [..., K].
        target: Class indices [...], or probabilities [..., K].
        alpha: Weight of the focal loss, at least 0.
        beta: Weight of MAE, at least 0.
        m: What the arg max gets on top of its probability, at least 0.
        gamma: The gamma of the focal loss, at least 0.

    Returns:
        One value per example, [...]; float32 for half-precision logits.

    Raises:
        ValueError: If the shapes do not fit or a knob is out of its range.

    >>> eps_focal_mae(torch.zeros(1, 4), torch.tensor([2]), alpha=0.0, beta=1.0)
    tensor([1.5000])

    Reference: Wang, Zhou, Zhai, Jiang, Ji and Liu (2024), Epsilon-Softmax: Approximating One-Hot Vectors for Mitigating
    Label Noise, NeurIPS 2024; arXiv 2508.02387.
    """
    check_at_least(0, alpha=alpha, beta=beta)
    log_q = _log_eps_softmax(log_p, is_max, m)
    return alpha * focal.phi(log_q, gamma=gamma, detach_weight=True) + beta * mae.phi(log_p)


# -- joint asymmetric losses -------------------------------------------------------------------------------------------


@loss(tune={"a": (5.0, 10.0, 30.0, 60.0, 100.0)})
def amse(log_p: Tensor, sum_p2: Tensor, classes: Tensor, *, a: float = 30.0) -> Tensor:
    """Asymmetric mean squared error, `|a e_y - p|^2 / K = (sum_k p_k^2 - 2 a p_y + a^2) / K`.

    When: in the sums `jal_ce` and `jal_fl`. By itself it is strong under symmetric and weak under asymmetric noise.

    Args:
        logits: [..., K].
        target: Class indices [...], or probabilities [..., K].
        a: Above 1; asymmetric, and so robust, if it is large enough for the noise (9 for ten classes and 80 %
            symmetric noise).

    Returns:
        One value per example, [...]; float32 for half-precision logits.

    Raises:
        ValueError: If the shapes do not fit or a is not above 1.

    >>> amse(torch.zeros(1, 4), torch.tensor([2]), a=2.0)
    tensor([0.8125])

    Reference: Wang, Liu, Zhou, Hu, Zhai, Jiang and Ji (2025), Joint Asymmetric Loss for Learning with Noisy Labels,
    ICCV 2025; arXiv 2507.17692.
    """
    check_above(1, a=a)
    return (sum_p2 - 2 * a * log_p.exp() + a * a) / classes


@loss(
    tune={"a": (5.0, 10.0, 30.0, 60.0, 100.0)},
    settings={
        "CIFAR-10": "jal_ce:alpha=1,beta=1,a=30 --penalty l1:weight=5e-5 --weight-decay 0",
        "CIFAR-100": "jal_ce:alpha=5,beta=1,a=20 --penalty l1:weight=5e-6 --weight-decay 0",
        "WebVision": "jal_ce:alpha=50,beta=1,a=30 --weight-decay 3e-5",
    },
)
def jal_ce(
    log_p: Tensor,
    sum_log_p: Tensor,
    sum_p2: Tensor,
    classes: Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    a: float = 30.0,
) -> Tensor:
    """Joint asymmetric loss, `alpha NCE + beta AMSE`.

    The authors add an L1 penalty on all parameters instead of weight decay on CIFAR: `--penalty l1`.

    When: with 100 classes or more, with the L1 penalty; of the sums it has the best published results.

    Args:
        logits: [..., K].
        target: Class indices [...], or probabilities [..., K].
        alpha: Weight of NCE, at least 0.
        beta: Weight of AMSE, at least 0.
        a: The a of AMSE, above 1.

    Returns:
        One value per example, [...]; float32 for half-precision logits.

    Raises:
        ValueError: If the shapes do not fit or a knob is out of its range.

    >>> jal_ce(torch.zeros(1, 4), torch.tensor([2]), a=2.0)
    tensor([1.0625])

    Reference: Wang, Liu, Zhou, Hu, Zhai, Jiang and Ji (2025), Joint Asymmetric Loss for Learning with Noisy Labels,
    ICCV 2025; arXiv 2507.17692.
    """
    check_at_least(0, alpha=alpha, beta=beta)
    return alpha * nce.phi(log_p, sum_log_p) + beta * amse.phi(log_p, sum_p2, classes, a=a)


@loss(
    tune={"a": (5.0, 10.0, 30.0, 60.0, 100.0)},
    settings={
        "CIFAR-10": "jal_fl:alpha=1,beta=1,a=30 --penalty l1:weight=5e-5 --weight-decay 0",
        "CIFAR-100": "jal_fl:alpha=5,beta=1,a=20 --penalty l1:weight=5e-6 --weight-decay 0",
        "WebVision": "jal_fl:alpha=50,beta=1,a=30 --weight-decay 3e-5",
    },
)
def jal_fl(
    log_p: Tensor,
    sum_focal: Tensor,
    sum_p2: Tensor,
    classes: Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    a: float = 30.0,
    gamma: float = 0.5,
) -> Tensor:
    """Joint asymmetric loss with focal loss, `alpha NFL + beta AMSE`.

    When: as `jal_ce`; its results are about the same.

    Args:
        logits: [..., K].
        target: Class indices [...], or probabilities [..., K].
        alpha: Weight of NFL, at least 0.
        beta: Weight of AMSE, at least 0.
        a: The a of AMSE, above 1.
        gamma: The gamma of NFL, at least 0.

    Returns:
        One value per example, [...]; float32 for half-precision logits.

    Raises:
        ValueError: If the shapes do not fit or a knob is out of its range.

    >>> jal_fl(torch.zeros(1, 4), torch.tensor([2]), a=2.0)
    tensor([1.0625])

    Reference: Wang, Liu, Zhou, Hu, Zhai, Jiang and Ji (2025), Joint Asymmetric Loss for Learning with Noisy Labels,
    ICCV 2025; arXiv 2507.17692.
    """
    check_at_least(0, alpha=alpha, beta=beta)
    return alpha * nfl.phi(log_p, sum_focal, gamma=gamma) + beta * amse.phi(log_p, sum_p2, classes, a=a)


# -- optimised gradient clipping ---------------------------------------------------------------------------------------


def _tangent(values: Tensor, log_p: Tensor, threshold: Tensor | None, at: Any, slope: Any) -> Tensor:
    """Return the loss above the threshold t, and below it the line L(t) + |L'(t)| (t - p).

    The authors' line starts at L(t) + 1 instead, so that for focal loss and GCE the value jumps at t; the gradients are
    the same. Before there is a threshold, it is 1e-7, the authors' lower end of p_y.
    """
    t = torch.tensor(LOWEST, dtype=log_p.dtype, device=log_p.device) if threshold is None else threshold.to(log_p)
    return torch.where(log_p <= t.log(), at(t.log()) + slope(t) * (t - log_p.exp()), values)


@loss(
    tune={"epsilon": (5.0, 10.0, 20.0, 40.0, 80.0)},
    settings={"CIFAR-10": "ogc_ce:epsilon=20", "CIFAR-100": "ogc_ce:epsilon=20"},
)
def ogc_ce(log_p: Tensor, threshold: Tensor | None, *, epsilon: float = 20.0) -> Tensor:
    """Optimised gradient clipping of CE: `-log p_y`, linear in p_y below a threshold that is found in training.

    `Loss` remembers the losses of recent examples and moves the threshold as training goes on, see `GradientMemory`. It
    needs the learning rate: call `criterion.set_lr(lr)` in your loop, or let `logitclip train` do it.

    When: instead of `phuber_ce`, if its threshold should follow the training and not be tuned.

    Args:
        logits: [..., K].
        target: Class indices [...], or probabilities [..., K].
        epsilon: Noisy labels may have 1 + lr epsilon times the mean gradient of clean ones; at least 0.

    Returns:
        One value per example, [...]; float32 for half-precision logits.

    Raises:
        ValueError: If the shapes do not fit or epsilon is below 0.

    >>> ogc_ce(torch.zeros(1, 4), torch.tensor([2]))
    tensor([1.3863])

    Reference: Ye, Wu, Zhang, Li, Chen and Jin (2025), Optimized Gradient Clipping for Noisy Label Learning, AAAI 2025;
    arXiv 2412.08941.
    """
    check_at_least(0, epsilon=epsilon)
    return _tangent(-log_p, log_p, threshold, torch.neg, torch.reciprocal)


@loss(
    tune={"epsilon": (5.0, 10.0, 20.0, 40.0, 80.0)},
    settings={"CIFAR-10": "ogc_focal:epsilon=20,gamma=0.5", "CIFAR-100": "ogc_focal:epsilon=20,gamma=0.5"},
)
def ogc_focal(log_p: Tensor, threshold: Tensor | None, *, epsilon: float = 20.0, gamma: float = 0.5) -> Tensor:
    """Optimised gradient clipping of focal loss; see `ogc_ce`.

    When: as `ogc_ce`, if you use focal loss already.

    Args:
        logits: [..., K].
        target: Class indices [...], or probabilities [..., K].
        epsilon: Noisy labels may have 1 + lr epsilon times the mean gradient of clean ones; at least 0.
        gamma: The gamma of focal loss, at least 0.

    Returns:
        One value per example, [...]; float32 for half-precision logits.

    Raises:
        ValueError: If the shapes do not fit or a knob is out of its range.

    >>> ogc_focal(torch.zeros(1, 4), torch.tensor([2]), gamma=2.0)
    tensor([0.7798])

    Reference: Ye, Wu, Zhang, Li, Chen and Jin (2025), Optimized Gradient Clipping for Noisy Label Learning, AAAI 2025;
    arXiv 2412.08941.
    """
    check_at_least(0, epsilon=epsilon)

    def slope(t: Tensor) -> Tensor:
        return (1 - t) ** gamma / t - gamma * t.log() * (1 - t) ** (gamma - 1)

    def value(log_p: Tensor) -> Tensor:
        return focal.phi(log_p, gamma=gamma)

    return _tangent(value(log_p), log_p, threshold, value, slope)


@loss(tune={"epsilon": (5.0, 10.0, 20.0, 40.0, 80.0)}, settings={"CIFAR-10": "ogc_gce:epsilon=20,q=0.7"})
def ogc_gce(log_p: Tensor, threshold: Tensor | None, *, epsilon: float = 20.0, q: float = 0.7) -> Tensor:
    """Optimised gradient clipping of GCE; see `ogc_ce`.

    When: as `ogc_ce`, if `gce` by itself still memorises.

    Args:
        logits: [..., K].
        target: Class indices [...], or probabilities [..., K].
        epsilon: Noisy labels may have 1 + lr epsilon times the mean gradient of clean ones; at least 0.
        q: The q of GCE, positive.

    Returns:
        One value per example, [...]; float32 for half-precision logits.

    Raises:
        ValueError: If the shapes do not fit or a knob is out of its range.

    >>> ogc_gce(torch.zeros(1, 4), torch.tensor([2]), q=1.0)
    tensor([0.7500])

    Reference: Ye, Wu, Zhang, Li, Chen and Jin (2025), Optimized Gradient Clipping for Noisy Label Learning, AAAI 2025;
    arXiv 2412.08941.
    """
    check_at_least(0, epsilon=epsilon)

    def value(log_p: Tensor) -> Tensor:
        return gce.phi(log_p, q=q)

    return _tangent(value(log_p), log_p, threshold, value, lambda t: t ** (q - 1))
