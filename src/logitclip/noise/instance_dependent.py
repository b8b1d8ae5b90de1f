"""Noise that depends on the image: the probabilities of each example's label, and the rule that draws from them."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from logitclip.noise.checks import check_choice, check_generator, check_rate, class_labels, is_real_number
from logitclip.noise.rules import by_class, choose, inverse_cdf, rule

Instance = Literal["pdn", "released"]
Scaling = Literal["raw", "standard"]


@rule
def instance(
    labels: Tensor,
    num_classes: int,
    *,
    rate: float,
    variant: Instance = "pdn",
    std: float = 0.1,
    scaling: Scaling | None = None,
    images: Any = None,
    generator: torch.Generator,
) -> Tensor:
    """Instance-dependent noise: the image determines the probability of a flip and the new class (PDN).

    With q_i from a normal distribution (mean `rate`, deviation `std`) truncated to [0, 1], and a random matrix W_y for
    each true class y:

        P(noisy = k | x_i, y) = q_i softmax_{k != y}(x_i W_y)_k,    P(noisy = y | x_i, y) = 1 - q_i

    Truncation moves the mean if `rate` is within about 2 `std` of 0 or 1 (rate 0.05 gives 0.10); `std=0` avoids it.

    Args:
        labels: Class labels, integers [N].
        num_classes: K.
        rate: Mean of q_i.
        variant: "pdn": as above. "released", as in LogitClip's code: exactly a share `rate` of all examples, chosen
            independently of x, is mislabelled (q_i is 0 or 1); only the new class depends on x.
        std: Deviation of q_i, for the variant "pdn".
        scaling: Scaling of x. "raw": pixels 0..255, or unscaled features, as in PDN's code; the default of "pdn". The
            logits are then so large that nearly all images of a class get the same wrong class. "standard": each
            channel (each column of features) has mean 0 and deviation 1; the default of "released". LogitClip's code
            also augments the normalised images at random, which is not done here.
        images: [N, C, H, W] or [N, D]; any object that a tensor of positions can index. Read in small batches.
        generator: Source of randomness, on the CPU.

    Returns:
        Noisy labels [N].

    Raises:
        ValueError: If a label or an option is out of range, or the images are missing, not finite or of another number.

    >>> generator = torch.Generator().manual_seed(0)
    >>> images, clean = torch.randn(1000, 5, generator=generator), torch.arange(1000) % 10
    >>> noisy = instance(clean, 10, rate=0.4, variant="released", images=images, generator=generator)
    >>> int((noisy != clean).sum())
    400
    """
    p = instance_probabilities(
        labels, num_classes, rate=rate, variant=variant, std=std, scaling=scaling, images=images, generator=generator
    )
    return inverse_cdf(p, torch.rand(len(labels), dtype=torch.float64, generator=generator))


def instance_probabilities(
    labels: Any,
    num_classes: int,
    *,
    rate: float,
    variant: Instance = "pdn",
    std: float = 0.1,
    scaling: Scaling | None = None,
    images: Any = None,
    generator: torch.Generator,
) -> Tensor:
    """Return the distribution from which `instance` samples each label.

    The generator draws q of all examples, then W [D, K] ~ N(0, 1) class by class. `instance` does the same first, so
    with the same seed these are its probabilities.

    Args:
        labels, num_classes, rate, variant, std, scaling, images, generator: As for `instance`.

    Returns:
        Probabilities, float32 [N, K].

    Raises:
        ValueError: As for `instance`.

    >>> images = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> p = instance_probabilities([0, 1], 3, rate=0.4, std=0, images=images, generator=torch.Generator())
    >>> p[[0, 1], [0, 1]], p.sum(1)
    (tensor([0.6000, 0.6000]), tensor([1., 1.]))
    """
    labels = class_labels(labels, num_classes)
    check_rate(rate)
    check_choice("variant", variant, Instance)
    check_generator(generator)
    if not is_real_number(std) or not 0 <= std < math.inf:
        raise ValueError(f"std must be finite and not negative, got {std!r}.")
    if scaling is None:
        scaling = "raw" if variant == "pdn" else "standard"
    check_choice("scaling", scaling, Scaling)
    images = np.asarray(images) if isinstance(images, (list, tuple)) else images
    if images is None:
        raise ValueError("instance noise depends on the images: pass images=..., [N, C, H, W] or [N, D].")
    if len(images) != len(labels):
        raise ValueError(f"instance noise needs an image per label, got {len(images)} images for {len(labels)} labels.")
    if variant == "pdn":
        q = _truncated_normal(len(labels), rate, std, generator)
    else:
        q = torch.zeros(len(labels))
        q[choose(labels, num_classes, rate, "exact", generator)] = 1
    width = _load_images(images, torch.tensor([0])).flatten(1).shape[1]
    rows = max(64, 2**20 // width)  # rows at a time: few enough to stay in cache
    mean, deviation = _moments(images, rows) if scaling == "standard" else (None, None)
    p = torch.empty(len(labels), num_classes)
    # Class by class: one matrix product instead of N small ones, and only one W in memory.
    for c, members in by_class(labels, num_classes):
        w = torch.randn(width, num_classes, generator=generator)
        for part in members.split(rows):
            x = _load_images(images, part)
            if mean is not None and deviation is not None:
                x = (x - mean) / deviation
            logits = x.flatten(1) @ w
            if not bool(logits.isfinite().all()):
                raise ValueError("instance noise needs finite images, got some with NaN or infinity.")
            logits[:, c] = -math.inf
            p[part] = q[part, None] * logits.softmax(1)
            p[part, c] = 1 - q[part]
    return p


def _truncated_normal(n: int, mean: float, std: float, generator: torch.Generator) -> Tensor:
    """Return [n] samples of a normal distribution truncated to [0, 1], by the inverse CDF."""
    if std == 0:
        return torch.full((n,), float(mean))
    u = torch.rand(n, dtype=torch.float64, generator=generator)
    low, high = torch.special.ndtr((torch.tensor([0.0, 1.0], dtype=torch.float64) - mean) / std)
    return (mean + std * torch.special.ndtri(low + (high - low) * u)).clamp(0, 1).float()


def _moments(images: Any, rows: int) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of each channel [C, 1, 1] or column [D]; the deviation of a constant is 1."""
    first, second, count = torch.zeros(()), torch.zeros(()), 0
    for part in torch.arange(len(images)).split(rows):
        x = _load_images(images, part)
        variance, mean = (v.double() for v in torch.var_mean(x, [d for d in range(x.ndim) if d != 1], correction=0))
        first, second = first + len(x) * mean, second + len(x) * (variance + mean**2)
        count += len(x)
    mean = first / count
    deviation = (second / count - mean**2).clamp_min(0).sqrt()
    deviation = torch.where(deviation > 1e-6 * mean.abs(), deviation, 1.0)
    shape = (-1, *[1] * (_load_images(images, torch.tensor([0])).ndim - 2))
    return mean.float().view(shape), deviation.float().view(shape)


def _load_images(images: Any, index: Tensor) -> Tensor:
    """Return the images at these positions as float32 [n, ...]; only these are converted or decoded."""
    if isinstance(images, Tensor):
        x = images.index_select(0, index.to(images.device))  # copies whole rows, five times as fast as images[index]
    else:
        x = torch.as_tensor(images[index.numpy() if isinstance(images, np.ndarray) else index])
    x = x.cpu().float()
    if x.ndim < 2:
        raise ValueError(f"images must be [N, C, H, W] or [N, D], got {x.ndim} dimension.")
    return x
