"""The losses of the paper, in its order, and the sums of an active and a passive loss."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from logitclip.clip import check_positive
from logitclip.losses.contract import TrainingState, loss
from logitclip.losses.parts import check_above, check_at_least, infinite_if_masked, one_minus_p, power_gap

LOG_ZERO = math.log(1e-4)  # RCE's value for log 0 in every public code base (the SCE paper's text says -4)


@loss(
    tune={"label_smoothing": (-0.4, -0.2, 0.0, 0.2, 0.4)},
    optional={"sum_log_p": "label_smoothing", "classes": "label_smoothing"},
)
def ce(log_p: Tensor, sum_log_p: Tensor | None, classes: Tensor | None, *, label_smoothing: float = 0.0) -> Tensor:
    """Cross entropy, `-log p_y`; with label smoothing r, `-(1-r) log p_y - r mean_k log p_k`.

    When: first, with the clip: there is nothing else to tune. Without it only if the labels are clean.

    Args:
        logits: [..., K].
        target: Class indices [...], or probabilities [..., K].
        label_smoothing: The share r, at most 1, of the target that is spread evenly over all classes. Below 0 it is
            negative label smoothing, which is not bounded below without a clip.

    Returns:
        One value per example, [...]; float32 for half-precision logits.

    Raises:
        ValueError: If the shapes do not fit or label_smoothing is above 1.

    >>> ce(torch.zeros(1, 4), torch.tensor([2]))
    tensor([1.3863])

    Reference for smoothing below 0: Wei, Liu, Liu, Niu, Sugiyama and Liu (2022), To Smooth or Not? When Label Smoothing
    Meets Noisy Labels, ICML 2022; arXiv 2106.04149.

    Paper: Eq. 1.
    """
    if sum_log_p is None or classes is None:
        return -log_p
    if not -math.inf < label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be at most 1 and finite, got {label_smoothing}.")
    return (label_smoothing - 1) * log_p - label_smoothing * (sum_log_p / classes)


@loss(tune={"gamma": (0.1, 0.5, 1.0, 2.0, 5.0)})
def focal(log_p: Tensor, *, gamma: float = 0.5, detach_weight: bool = False) -> Tensor:
    """Focal loss, `-(1-p_y)^gamma log p_y`.

    When: if you use it already. Under noise it behaves like `ce`, with and without the clip.

    Args:
        logits: [..., K].
        target: Class indices [...], or probabilities [..., K].
        gamma: How strongly well-classified examples are down-weighted, at least 0; 0 is cross entropy.
        detach_weight: Treat the factor `(1-p_y)^gamma` as a constant in the gradient, as the public code bases of
            robust losses do. The default is the gradient of the published formula.

    Returns:
        One value per example, [...]; float32 for half-precision logits.

    Raises:
        ValueError: If the shapes do not fit or gamma is below 0.

    >>> focal(torch.zeros(1, 4), torch.tensor([2]), gamma=2.0)
    tensor([0.7798])

    Reference: Lin, Goyal, Girshick, He and Dollár (2017), Focal Loss for Dense Object Detection, arXiv 1708.02002.
    """
    check_at_least(0, gamma=gamma)

    def phi(log_p: Tensor) -> Tensor:
        log_p_factor = log_p.detach() if detach_weight else log_p
        # With gamma < 1 the power has no gradient at p_y = 1: the clamp cuts it there, where the loss is flat anyway.
        return one_minus_p(log_p_factor).clamp_min(torch.finfo(log_p.dtype).tiny) ** gamma * -log_p

    return infinite_if_masked(phi, log_p)


@loss(tune={"scale": (0.5, 1.0, 2.0, 4.0, 8.0)})
def mae(log_p: Tensor, *, scale: float = 2.0) -> Tensor:
    """Mean absolute error, `|e_y - p|_1 = 2(1-p_y)`.

    When: with few classes and the clip. `rce` is the same at another scale, so tune the learning rate.

    Args:
        logits: [..., K].
        target: Class indices [...], or probabilities [..., K].
        scale: The factor before `1-p_y`, at least 0; 1 is the "reduced" MAE of other code bases.

    Returns:
        One value per example, [...]; float32 for half-precision logits.

    Raises:
        ValueError: If the shapes do not fit or scale is below 0.

    >>> mae(torch.zeros(1, 4), torch.tensor([2]))
    tensor([1.5000])

    Reference: Ghosh, Kumar and Sastry (2017), Robust Loss Functions under Label Noise for Deep Neural Networks,
    arXiv 1712.09482.
    """
    check_at_least(0, scale=scale)
    return scale * one_minus_p(log_p)


@loss(tune={"threshold": (2.0, 5.0, 10.0, 30.0, 100.0)})
def phuber_ce(log_p: Tensor, *, threshold: float = 10.0) -> Tensor:
    """Partially Huberised cross entropy: `-log p_y`, linear in p_y where `p_y <= 1/threshold`.

    When: instead of `ce` if you want no clip: it bounds the gradient of labels that look impossible.

    Args:
        logits: [..., K].
        target: Class indices [...], or probabilities [..., K].
        threshold: Above 1; the largest slope in `p_y`. The paper uses 10 on CIFAR-10 and 30 on CIFAR-100 and WebVision.

    Returns:
        One value per example, [...]; float32 for half-precision logits.

    Raises:
        ValueError: If the shapes do not fit or threshold is not above 1.

    >>> phuber_ce(torch.zeros(1, 4), torch.tensor([2]), threshold=2.0)
    tensor([1.1931])

    Reference: Menon, Rawat, Reddi and Kumar (2020), Can Gradient Clipping Mitigate Label Noise?, ICLR 2020.
    """
    check_above(1, threshold=threshold)
    linear = math.log(threshold) + 1 - threshold * log_p.exp()
    return torch.where(log_p <= -math.log(threshold), linear, -log_p)


@loss(tune={"log_zero": (-20.0, LOG_ZERO, -4.0, -2.0, -1.0)})
def rce(log_p: Tensor, *, log_zero: float = LOG_ZERO) -> Tensor:
    """Reverse cross entropy, `-log_zero (1-p_y)`.

    When: with few classes and the clip. `mae` is the same at another scale, so tune the learning rate.

    Args:
        logits: [..., K].
        target: Class indices [...], or probabilities [..., K].
        log_zero: The value that stands for log 0, negative.

    Returns:
        One value per example, [...]; float32 for half-precision logits.

    Raises:
        ValueError: If the shapes do not fit or log_zero is not negative.

    >>> rce(torch.zeros(1, 4), torch.tensor([2]), log_zero=-4.0)
    tensor([3.])

    Reference: Wang, Ma, Chen, Luo, Yi and Bailey (2019), Symmetric Cross Entropy for Robust Learning with Noisy Labels,
    arXiv 1908.06112.
    """
    if not -math.inf < log_zero < 0:
        raise ValueError(f"log_zero stands for log 0 and must be negative and finite, got {log_zero}.")
    return -log_zero * one_minus_p(log_p)


@loss(tune={"alpha": (0.1, 0.2, 0.5, 1.0, 2.0)})
def sce(log_p: Tensor, *, alpha: float = 0.5, beta: float = 1.0, log_zero: float = LOG_ZERO) -> Tensor:
    """Symmetric cross entropy, `alpha CE + beta RCE`.

    When: if `ce` memorises and `rce` underfits: `alpha` and `beta` weight the two.

    Args:
        logits: [..., K].
        target: Class indices [...], or probabilities [..., K].
        alpha: Weight of cross entropy, at least 0.
        beta: Weight of reverse cross entropy, at least 0.
        log_zero: The value that stands for log 0, see `rce`.

    Returns:
        One value per example, [...]; float32 for half-precision logits.

    Raises:
        ValueError: If the shapes do not fit or a knob is out of its range.

    >>> sce(torch.zeros(1, 4), torch.tensor([2]), alpha=1.0, beta=0.0)
    tensor([1.3863])

    Reference: Wang, Ma, Chen, Luo, Yi and Bailey (2019), Symmetric Cross Entropy for Robust Learning with Noisy Labels,
    arXiv 1908.06112.
    """
    check_at_least(0, alpha=alpha, beta=beta)
    return alpha * -log_p + beta * rce.phi(log_p, log_zero=log_zero)


@loss(tune={"q": (0.3, 0.5, 0.7, 0.8, 0.9)})
def gce(log_p: Tensor, *, q: float = 0.7) -> Tensor:
    """Generalised cross entropy, `(1 - p_y^q)/q`.

    When: next after `ce`: robust by itself. Decrease `q` if it learns too slowly, as with many classes.

    Args:
        logits: [..., K].
        target: Class indices [...], or probabilities [..., K].
        q: Positive; cross entropy in the limit of 0, reduced MAE at 1.

    Returns:
        One value per example, [...]; float32 for half-precision logits.

    Raises:
        ValueError: If the shapes do not fit or q is not positive.

    >>> gce(torch.zeros(1, 4), torch.tensor([2]), q=1.0)
    tensor([0.7500])

    Reference: Zhang and Sabuncu (2018), Generalized Cross Entropy Loss for Training Deep Neural Networks with Noisy
    Labels, arXiv 1805.07836.
    """
    check_positive("q", q)
    return torch.expm1(q * log_p) / -q


@loss(tune={"order": (1, 2, 3, 4, 6)})
def taylor_ce(log_p: Tensor, *, order: int = 2) -> Tensor:
    """Taylor cross entropy, `sum_i (1-p_y)^i / i` for i from 1 to `order`.

    When: to go from MAE (`order=1`) towards `ce` (a high order) in steps.

    Args:
        logits: [..., K].
        target: Class indices [...], or probabilities [..., K].
        order: How many terms, from 1 (the reduced MAE) to 1000 (nearly cross entropy). The paper does not state its
            order; 2 is this project's choice.

    Returns:
        One value per example, [...]; float32 for half-precision logits.

    Raises:
        ValueError: If the shapes do not fit or the order is out of its range.

    >>> taylor_ce(torch.zeros(1, 4), torch.tensor([2]), order=1)
    tensor([0.7500])

    Reference: Feng, Shu, Lin, Lv, Li and An (2020), Can Cross Entropy Loss Be Robust to Label Noise?, IJCAI 2020.
    """
    check_at_least(1, order=order)
    if order > 1000:
        raise ValueError(f"order must be at most 1000, got {order}.")
    x = one_minus_p(log_p)
    total = x / order
    for i in range(order - 1, 0, -1):
        total = x * (total + 1 / i)
    return total


@loss(tune={"scale": (0.3, 1.0, 3.0, 10.0, 30.0)})
def nce(log_p: Tensor, sum_log_p: Tensor, *, scale: float = 1.0) -> Tensor:
    """Normalised cross entropy, `log p_y / sum_k log p_k`.

    When: in one of the sums such as `nce_rce`. By itself it underfits.

    Args:
        logits: [..., K].
        target: Class indices [...], or probabilities [..., K].
        scale: A factor, at least 0.

    Returns:
        One value per example, [...]; float32 for half-precision logits.

    Raises:
        ValueError: If the shapes do not fit or scale is below 0.

    >>> nce(torch.zeros(1, 4), torch.tensor([2]))
    tensor([0.2500])

    Reference: Ma, Huang, Wang, Romano, Erfani and Bailey (2020), Normalized Loss Functions for Deep Learning with Noisy
    Labels, arXiv 2006.13554.
    """
    check_at_least(0, scale=scale)
    return infinite_if_masked(lambda log_p: scale * (log_p / sum_log_p), log_p)


@loss(tune={"a": (0.5, 1.0, 2.5, 5.0, 10.0)})
def ael(log_p: Tensor, *, a: float = 2.5) -> Tensor:
    """Asymmetric exponential loss, `exp(-p_y/a)`.

    Its minimum is `exp(-1/a)`, not 0.

    When: if most labels of each class are right, which is when theory promises robustness. It needs a learning rate of
    its own.

    Args:
        logits: [..., K].
        target: Class indices [...], or probabilities [..., K].
        a: Positive; the larger, the closer to a straight line in `p_y`, and the flatter.

    Returns:
        One value per example, [...]; float32 for half-precision logits.

    Raises:
        ValueError: If the shapes do not fit or a is not positive.

    >>> ael(torch.zeros(1, 4), torch.tensor([2]), a=0.25)
    tensor([0.3679])

    Reference: Zhou, Liu, Jiang, Gao and Ji (2021), Asymmetric Loss Functions for Learning with Noisy Labels,
    arXiv 2106.03110.
    """
    check_positive("a", a)
    return torch.exp(log_p.exp() / -a)


@loss(tune={"a": (1.5, 3.0, 5.5, 8.0, 12.0)})
def aul(log_p: Tensor, *, a: float = 5.5, q: float = 3.0) -> Tensor:
    """Asymmetric unhinged loss, `((a-p_y)^q - (a-1)^q)/q`.

    When: if most labels of each class are right, which is when theory promises robustness. It needs a learning rate of
    its own.

    Args:
        logits: [..., K].
        target: Class indices [...], or probabilities [..., K].
        a: Above 1; the larger, the closer to a straight line in `p_y`.
        q: Positive; 1 is the reduced MAE.

    Returns:
        One value per example, [...]; float32 for half-precision logits.

    Raises:
        ValueError: If the shapes do not fit or a knob is out of its range.

    >>> aul(torch.zeros(1, 4), torch.tensor([2]), a=2.0, q=1.0)
    tensor([0.7500])

    Reference: Zhou, Liu, Jiang, Gao and Ji (2021), Asymmetric Loss Functions for Learning with Noisy Labels,
    arXiv 2106.03110.
    """
    check_above(1, a=a)
    check_positive("q", q)
    return power_gap(a - 1, one_minus_p(log_p), q)


@loss(tune={"a": (0.1, 0.3, 0.6, 1.0, 3.0)})
def agce(log_p: Tensor, *, a: float = 0.6, q: float = 0.6) -> Tensor:
    """Asymmetric generalised cross entropy, `((a+1)^q - (a+p_y)^q)/q`.

    When: if most labels of each class are right, which is when theory promises robustness.

    Args:
        logits: [..., K].
        target: Class indices [...], or probabilities [..., K].
        a: Positive; the larger, the closer to a straight line in `p_y`. In the limit of 0 it is GCE.
        q: Positive; 1 is the reduced MAE.

    Returns:
        One value per example, [...]; float32 for half-precision logits.

    Raises:
        ValueError: If the shapes do not fit or a knob is out of its range.

    >>> agce(torch.zeros(1, 4), torch.tensor([2]), a=1.0, q=1.0)
    tensor([0.7500])

    Reference: Zhou, Liu, Jiang, Gao and Ji (2021), Asymmetric Loss Functions for Learning with Noisy Labels,
    arXiv 2106.03110.
    """
    check_positive("a", a)
    check_positive("q", q)
    return -power_gap(a + 1, torch.expm1(log_p), q)


@loss(tune={"beta": (0.5, 1.0, 2.0, 3.0, 4.0)})
def cores(
    log_p: Tensor,
    log_probs: Tensor,
    state: TrainingState | None,
    *,
    beta: float = 2.0,
    warmup: int = 10,
    ramp: int = 30,
    sieve_after: int = 30,
    prior: Literal["labels", "uniform"] = "labels",
) -> tuple[Tensor, Tensor | None]:
    """CORES: `CE - beta_e sum_k pi_k l_k` with `l_k = -log(p_k + 1e-8)`.

    `Loss.start_epoch` sets the epoch e and the counts of the (noisy) labels, which give pi. Without an epoch beta is
    constant, pi is uniform, and no example is left out.

    When: if the noise depends on the example: it stops using examples that look wrong. It needs epochs.

    Args:
        logits: [..., K].
        target: Class indices [...], or probabilities [..., K].
        beta: The largest weight of the regulariser, at least 0.
        warmup: The number of epochs with weight 0.
        ramp: The number of epochs over which the weight then rises linearly to beta.
        sieve_after: After this epoch, examples with a CE above the mean of `l_k` are left out.
        prior: Pi is the share of each label ("labels") or uniform.

    Returns:
        One value per example, [...]; float32 for half-precision logits.

    Raises:
        ValueError: If the shapes do not fit or a knob is out of its range.

    >>> cores(torch.zeros(1, 4), torch.tensor([2]), beta=0.0)
    tensor([1.3863])

    Reference: Cheng, Zhu, Li, Gong, Sun and Liu (2021), Learning with Instance-Dependent Label Noise: A Sample Sieve
    Approach, arXiv 2010.02347.
    """
    check_at_least(0, beta=beta, warmup=warmup)
    check_at_least(1, ramp=ramp)
    reference = torch.logaddexp(log_probs, log_probs.new_tensor(math.log(1e-8)))  # -l_k
    present = (~log_probs.isneginf()).to(reference.dtype)  # masked classes do not enter the means
    mean = weighted = (reference * present).sum(-1) / present.sum(-1)
    if state is None:
        return beta * weighted - log_p, None
    epoch, counts = state
    if counts is not None and prior == "labels":
        if counts.shape != reference.shape[-1:]:
            raise ValueError(f"class_counts needs {reference.shape[-1]} entries, got {tuple(counts.shape)}.")
        shares = present * (counts / counts.sum()).to(reference)
        weighted = (reference * shares).sum(-1) / shares.sum(-1)
    now = torch.as_tensor(epoch, device=log_p.device)
    risen = torch.clamp((now - warmup) / max(ramp - 1, 1), 0, 1).to(log_p.dtype)
    kept = (mean - log_p <= 0) | (now <= sieve_after)
    return beta * risen * weighted - log_p, kept.to(log_p.dtype).detach()


# Active-passive sums. The paper uses them on CIFAR-100 and WebVision; the defaults are its CIFAR-100 settings.


@loss(tune={"alpha": (1.0, 10.0, 50.0, 100.0, 200.0)})
def nce_mae(log_p: Tensor, sum_log_p: Tensor, *, alpha: float = 50.0, beta: float = 1.0, scale: float = 1.0) -> Tensor:
    """NCE + MAE, `alpha NCE + beta scale (1-p_y)`.

    When: with 100 classes or more, if you can tune its weights. The defaults are the paper's for CIFAR-100.

    Args:
        logits: [..., K].
        target: Class indices [...], or probabilities [..., K].
        alpha: Weight of NCE, at least 0.
        beta: Weight of MAE, at least 0.
        scale: The factor of MAE; 1 is the reduced MAE, which the authors use.

    Returns:
        One value per example, [...]; float32 for half-precision logits.

    Raises:
        ValueError: If the shapes do not fit or a knob is out of its range.

    >>> nce_mae(torch.zeros(1, 4), torch.tensor([2]), alpha=1.0)
    tensor([1.])

    Reference: Ma, Huang, Wang, Romano, Erfani and Bailey (2020), Normalized Loss Functions for Deep Learning with Noisy
    Labels, arXiv 2006.13554.
    """
    check_at_least(0, alpha=alpha, beta=beta)
    return alpha * nce.phi(log_p, sum_log_p) + beta * mae.phi(log_p, scale=scale)


@loss(tune={"alpha": (1.0, 10.0, 50.0, 100.0, 200.0)})
def nce_agce(
    log_p: Tensor, sum_log_p: Tensor, *, alpha: float = 50.0, beta: float = 0.1, a: float = 1.8, q: float = 3.0
) -> Tensor:
    """NCE + AGCE, `alpha NCE + beta AGCE`.

    When: with 100 classes or more, if you can tune its weights. The defaults are the paper's for CIFAR-100.

    Args:
        logits: [..., K].
        target: Class indices [...], or probabilities [..., K].
        alpha: Weight of NCE, at least 0.
        beta: Weight of AGCE, at least 0.
        a: The a of AGCE, positive; the paper uses 2.5 on WebVision.
        q: The q of AGCE, positive.

    Returns:
        One value per example, [...]; float32 for half-precision logits.

    Raises:
        ValueError: If the shapes do not fit or a knob is out of its range.

    >>> nce_agce(torch.zeros(1, 4), torch.tensor([2]), alpha=1.0, beta=1.0, a=1.0, q=1.0)
    tensor([1.])

    Reference: Zhou, Liu, Jiang, Gao and Ji (2021), Asymmetric Loss Functions for Learning with Noisy Labels,
    arXiv 2106.03110.
    """
    check_at_least(0, alpha=alpha, beta=beta)
    return alpha * nce.phi(log_p, sum_log_p) + beta * agce.phi(log_p, a=a, q=q)


@loss(tune={"alpha": (0.1, 0.3, 1.0, 3.0, 10.0)})
def nce_rce(
    log_p: Tensor, sum_log_p: Tensor, *, alpha: float = 1.0, beta: float = 1.0, log_zero: float = LOG_ZERO
) -> Tensor:
    """NCE + RCE, `alpha NCE + beta RCE`; not in the paper, with the defaults of its authors.

    When: with 100 classes or more, if you can tune its weights.

    Args:
        logits: [..., K].
        target: Class indices [...], or probabilities [..., K].
        alpha: Weight of NCE, at least 0.
        beta: Weight of RCE, at least 0.
        log_zero: The value that stands for log 0, see `rce`.

    Returns:
        One value per example, [...]; float32 for half-precision logits.

    Raises:
        ValueError: If the shapes do not fit or a knob is out of its range.

    >>> nce_rce(torch.zeros(1, 4), torch.tensor([2]), log_zero=-1.0)
    tensor([1.])

    Reference: Ma, Huang, Wang, Romano, Erfani and Bailey (2020), Normalized Loss Functions for Deep Learning with Noisy
    Labels, arXiv 2006.13554.
    """
    check_at_least(0, alpha=alpha, beta=beta)
    return alpha * nce.phi(log_p, sum_log_p) + beta * rce.phi(log_p, log_zero=log_zero)
