"""Augmentation of whole batches, on their device, with an explicit generator.

An augmentation is ``fn(x, generator, *, knobs)``. Without a generator it gives the view that evaluation uses: the same
shape, no randomness.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Generator, Tensor
from torch.nn.functional import pad

from logitclip.registry import Registry

AUGMENTS = Registry("augmentation", package="logitclip.data")

Transform = Callable[[Tensor, Generator | None], Tensor]


@AUGMENTS.register
def none(x: Tensor, generator: Generator | None = None) -> Tensor:
    """Return the inputs unchanged."""
    return x


@AUGMENTS.register
def flip_crop(x: Tensor, generator: Generator | None = None, *, padding: int = 4) -> Tensor:
    """Random horizontal flip, then a random crop of the zero-padded image: the usual CIFAR augmentation.

    The padding is black *before* normalisation. Returns a tensor of the shape and type of `x`, [N, C, H, W].

    Args:
        padding: Black pixels on each side.

    >>> x = torch.arange(2 * 3 * 8 * 8, dtype=torch.uint8).view(2, 3, 8, 8)
    >>> flip_crop(x, torch.Generator().manual_seed(0), padding=2).shape
    torch.Size([2, 3, 8, 8])
    """
    _check_images(x, "flip_crop")
    height, width = x.shape[-2:]
    if not 0 <= padding <= max(height, width):
        most = max(height, width)
        raise ValueError(f"padding must be between 0 and {most} for {height}x{width} images, got {padding}.")
    if generator is None or not len(x):
        return x
    return _random_crop(pad(_random_flip(x, generator), [padding] * 4), x.shape[-2], x.shape[-1], generator)


@AUGMENTS.register
def crop(x: Tensor, generator: Generator | None = None, *, size: int = 224) -> Tensor:
    """Random square crop of `size` and random horizontal flip; in evaluation, the centre crop.

    Args:
        size: Side of the crop in pixels.
    """
    _check_images(x, "crop")
    height, width = x.shape[-2:]
    if not 0 < size <= min(height, width):
        raise ValueError(f"size must be between 1 and {min(height, width)} for {height}x{width} images, got {size}.")
    if generator is None or not len(x):
        top, left = (height - size) // 2, (width - size) // 2
        return x[..., top : top + size, left : left + size]
    return _random_flip(_random_crop(x, size, size, generator), generator)


def normalise(x: Tensor, mean: Sequence[float] = (), std: Sequence[float] = ()) -> Tensor:
    """Scale bytes to [0, 1], then apply `(x - mean) / std` per channel, if given.

    Args:
        x: [N, C, H, W] or [N, D]; uint8 or floating point.
        mean, std: One number per channel, C or D of them; empty for none.

    Returns:
        A floating-point tensor of the same shape.

    Raises:
        ValueError: If the number of means or deviations does not fit `x`.

    >>> normalise(torch.tensor([[0, 255]], dtype=torch.uint8))
    tensor([[0., 1.]])
    """
    unit = 255.0 if x.dtype == torch.uint8 else 1.0
    if not mean:
        return x / unit if unit != 1 else x
    if not len(mean) == len(std) == x.shape[1]:
        raise ValueError(f"{len(mean)} means and {len(std)} deviations do not fit inputs of shape {tuple(x.shape)}.")
    shift, scale = (t.view(-1, *[1] * (x.dim() - 2)) for t in _shift_and_scale(tuple(mean), tuple(std), unit, x.device))
    return x.to(torch.float32, copy=True).sub_(shift).mul_(scale)


@functools.cache  # send the constants to a GPU once, not with every batch
def _shift_and_scale(
    mean: tuple[float, ...], std: tuple[float, ...], unit: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    return unit * torch.tensor(mean, device=device), 1 / (unit * torch.tensor(std, device=device))


def transform(spec: str, mean: Sequence[float] = (), std: Sequence[float] = ()) -> Transform:
    """Return the function from a batch to the input of a model: ``fn(x, generator)``, ``fn(x, None)`` in evaluation.

    Args:
        spec: Name and knobs of the augmentation.
        mean, std: One number per channel, for `normalise`.

    Returns:
        The function. Its `x` is a batch of the dataset, [N, C, H, W] uint8 or [N, D].

    Raises:
        ValueError: If the augmentation or one of its knobs is unknown.

    >>> view = transform("flip_crop:padding=4", mean=(0.5,), std=(0.25,))
    >>> view(torch.zeros(2, 1, 8, 8, dtype=torch.uint8), None).unique()
    tensor([-2.])
    """
    augment = AUGMENTS.build(spec)
    return lambda x, generator: normalise(augment(x, generator), mean, std)


def _check_images(x: Tensor, name: str) -> None:
    if x.dim() != 4:
        raise ValueError(f"{name} needs images [N, C, H, W], got shape {tuple(x.shape)}; use augment 'none'.")


def _random_flip(x: Tensor, generator: Generator) -> Tensor:
    mirrored = torch.randint(0, 2, (len(x), 1, 1, 1), generator=generator, device=x.device, dtype=torch.uint8)
    if x.dtype != torch.uint8:
        return torch.where(mirrored.bool(), x.flip(-1), x)
    # x + mirrored * (x.flip(-1) - x): exact, because bytes wrap around, and vectorised, which torch.where is not.
    return x.flip(-1).sub_(x).mul_(mirrored).add_(x)


def _random_crop(x: Tensor, height: int, width: int, generator: Generator) -> Tensor:
    # All windows of all images are one view, numbered by the flat position of their first pixel: one index_select.
    n, channels, full_height, full_width = x.shape
    x = x.contiguous()
    top = torch.randint(0, full_height - height + 1, (n,), generator=generator, device=x.device)
    left = torch.randint(0, full_width - width + 1, (n,), generator=generator, device=x.device)
    plane = full_height * full_width
    first = torch.arange(n, device=x.device) * (channels * plane) + top * full_width + left
    extent = (channels - 1) * plane + (height - 1) * full_width + width
    windows = x.as_strided((x.numel() - extent + 1, channels, height, width), (1, plane, full_width, 1))
    return windows.index_select(0, first)
