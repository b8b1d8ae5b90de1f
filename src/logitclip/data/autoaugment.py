"""The AutoAugment policy for CIFAR-10 (Cubuk et al., 2019) and Cutout, for whole batches on their device.

The operations are Pillow's, to the last bit; Pillow itself works on one image at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor
from torch.nn.functional import conv2d, pad

from logitclip.data.augment import AUGMENTS

# Sub-policies of two operations: (name, probability, magnitude). One sub-policy is drawn for each image.
POLICY = (
    (("invert", 0.1, 0.0), ("contrast", 0.2, 1.18)),
    (("rotate", 0.7, 6.0), ("translate_x", 0.3, 9.0)),
    (("sharpness", 0.8, 0.28), ("sharpness", 0.9, 0.64)),
    (("shear_y", 0.5, 0.24), ("translate_y", 0.7, 9.0)),
    (("autocontrast", 0.5, 0.0), ("equalize", 0.9, 0.0)),
    (("shear_y", 0.2, 0.21), ("posterize", 0.3, 2.0)),
    (("colour", 0.4, 0.64), ("brightness", 0.6, 1.36)),
    (("sharpness", 0.3, 1.72), ("brightness", 0.7, 1.72)),
    (("equalize", 0.6, 0.0), ("equalize", 0.5, 0.0)),
    (("contrast", 0.6, 1.36), ("sharpness", 0.6, 1.0)),
    (("colour", 0.7, 1.36), ("translate_x", 0.5, 8.0)),
    (("equalize", 0.3, 0.0), ("autocontrast", 0.4, 0.0)),
    (("translate_y", 0.4, 3.0), ("sharpness", 0.2, 1.18)),
    (("brightness", 0.9, 1.18), ("colour", 0.2, 1.18)),
    (("solarize", 0.5, 205.0), ("invert", 0.0, 0.0)),
    (("equalize", 0.2, 0.0), ("autocontrast", 0.6, 0.0)),
    (("equalize", 0.2, 0.0), ("equalize", 0.6, 0.0)),
    (("colour", 0.9, 1.72), ("equalize", 0.6, 0.0)),
    (("autocontrast", 0.8, 0.0), ("solarize", 0.2, 52.0)),
    (("brightness", 0.1, 0.64), ("colour", 0.7, 0.1)),
    (("solarize", 0.4, 128.0), ("autocontrast", 0.9, 0.0)),
    (("translate_y", 0.9, 9.0), ("translate_y", 0.7, 9.0)),
    (("autocontrast", 0.9, 0.0), ("solarize", 0.8, 180.0)),
    (("equalize", 0.8, 0.0), ("invert", 0.1, 0.0)),
    (("translate_y", 0.7, 9.0), ("autocontrast", 0.9, 0.0)),
)


@AUGMENTS.register
def autoaugment(x: Tensor, generator: Generator | None = None) -> Tensor:
    """Apply the AutoAugment policy for CIFAR-10: two operations for each image, each with its probability.

    Args:
        x: [N, C, H, W] uint8, with one or three channels.

    Returns:
        A tensor of the same shape and type.

    >>> x = torch.arange(2 * 3 * 8 * 8, dtype=torch.uint8).view(2, 3, 8, 8)
    >>> autoaugment(x, torch.Generator().manual_seed(0)).shape
    torch.Size([2, 3, 8, 8])
    """
    if x.dtype != torch.uint8 or x.dim() != 4 or x.shape[1] not in (1, 3):
        raise ValueError(
            f"autoaugment needs uint8 images [N, C, H, W] with one or three channels, got {x.dtype} of shape "
            f"{tuple(x.shape)}."
        )
    if generator is None or not len(x):
        return x
    x = x.clone()
    chosen = torch.randint(len(POLICY), (len(x),), generator=generator, device=x.device)
    for slot in (0, 1):
        chance, sign = torch.rand(2, len(x), generator=generator, device=x.device)
        for i, policy in enumerate(POLICY):
            name, probability, magnitude = policy[slot]
            index = ((chosen == i) & (chance < probability)).nonzero().squeeze(1)
            if len(index):
                signs = torch.where(sign[index] < 0.5, -1.0, 1.0)
                x[index] = OPERATIONS[name](x[index], magnitude, signs)
    return x


def cutout(x: Tensor, generator: Generator, length: int = 16) -> Tensor:
    """Set a square of `length` pixels around a random pixel of each image to 0, the mean of normalised images.

    Args:
        x: [N, C, H, W] float, normalised.

    >>> int((cutout(torch.ones(1, 1, 32, 32), torch.Generator().manual_seed(0)) == 0).sum()) <= 256
    True
    """
    inside = []
    for size in x.shape[-2:]:
        centre = torch.randint(size, (len(x), 1), generator=generator, device=x.device)
        pixel = torch.arange(size, device=x.device)
        inside.append((pixel >= centre - length // 2) & (pixel < centre + length // 2))
    return x.masked_fill((inside[0][:, :, None] & inside[1][:, None, :])[:, None], 0)


# -- operations: fn(x [n, C, H, W] uint8, magnitude, signs [n]) -> the same shape --------------------------------------


Each = Tensor | float  # a number for each image, [n], or one for all


def _map_pixels(x: Tensor, a: Each = 1, b: Each = 0, c: Each = 0, d: Each = 0, e: Each = 1, f: Each = 0) -> Tensor:
    """Map pixel (u, v) to that at (a u + b v + c, d u + e v + f): nearest neighbour, black outside."""
    n, channels, height, width = x.shape
    u = torch.arange(width, device=x.device, dtype=torch.float64) + 0.5
    v = torch.arange(height, device=x.device, dtype=torch.float64)[:, None] + 0.5
    a, b, c, d, e, f = (torch.as_tensor(t).to(u).expand(n)[:, None, None] for t in (a, b, c, d, e, f))
    column, row = (a * u + b * v + c).floor().long(), (d * u + e * v + f).floor().long()
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    source = (row * width + column).where(inside, 0).view(n, 1, -1).expand(-1, channels, -1)
    return x.flatten(2).gather(2, source).view_as(x) * inside[:, None]


def _translate_x(x: Tensor, pixels: float, signs: Tensor) -> Tensor:
    return _map_pixels(x, c=pixels * signs)


def _translate_y(x: Tensor, pixels: float, signs: Tensor) -> Tensor:
    return _map_pixels(x, f=pixels * signs)


def _shear_y(x: Tensor, slope: float, signs: Tensor) -> Tensor:
    return _map_pixels(x, d=slope * signs.double())


def _rotate(x: Tensor, degrees: float, signs: Tensor) -> Tensor:
    cosine = math.cos(math.radians(degrees)) * torch.ones_like(signs).double()
    sine = -math.sin(math.radians(degrees)) * signs.double()  # counter-clockwise
    middle_u, middle_v = x.shape[-1] / 2, x.shape[-2] / 2
    c = middle_u - cosine * middle_u - sine * middle_v
    f = middle_v + sine * middle_u - cosine * middle_v
    return _map_pixels(x, cosine, sine, c, -sine, cosine, f)


def _blend(plain: Tensor, x: Tensor, factor: float) -> Tensor:
    """`plain + factor (x - plain)`, cut off to bytes."""
    return (plain + factor * (x.float() - plain)).clamp(0, 255).to(torch.uint8)


def _grey(x: Tensor) -> Tensor:
    if x.shape[1] == 1:
        return x
    red, green, blue = x.int().unbind(1)
    return ((19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16).to(torch.uint8)[:, None]


def _brightness(x: Tensor, factor: float, _: Tensor) -> Tensor:
    return _blend(torch.zeros_like(x, dtype=torch.float32), x, factor)


def _contrast(x: Tensor, factor: float, _: Tensor) -> Tensor:
    mean = (_grey(x).double().mean((1, 2, 3), keepdim=True) + 0.5).floor().float()
    return _blend(mean.expand(x.shape), x, factor)


def _colour(x: Tensor, factor: float, _: Tensor) -> Tensor:
    return _blend(_grey(x).float().expand(x.shape), x, factor)


def _sharpness(x: Tensor, factor: float, _: Tensor) -> Tensor:
    kernel = torch.ones(1, 1, 3, 3, device=x.device)
    kernel[..., 1, 1] = 5
    inner = conv2d(x.float().flatten(0, 1)[:, None], kernel).div(13).add(0.5).floor().clamp(0, 255)
    smooth = x.float()
    smooth[..., 1:-1, 1:-1] = inner.view(*x.shape[:2], *inner.shape[-2:])  # the border does not change
    return _blend(smooth, x, factor)


def _autocontrast(x: Tensor, _: float, __: Tensor) -> Tensor:
    low, high = (value[..., None, None].double() for value in (x.flatten(2).amin(2), x.flatten(2).amax(2)))
    scale = 255 / (high - low).clamp_min(1)
    stretched = (x * scale - low * scale).clamp(0, 255).to(torch.uint8)
    return torch.where(high > low, stretched, x)


def _equalize(x: Tensor, _: float, __: Tensor) -> Tensor:
    flat = x.flatten(2).long()
    counts = torch.zeros(*flat.shape[:2], 256, dtype=torch.int64, device=x.device)
    counts.scatter_add_(2, flat, torch.ones_like(flat))
    last = counts.gather(2, flat.amax(2, keepdim=True))
    step = (flat.shape[2] - last) // 255
    below = pad(counts.cumsum(2)[..., :-1], (1, 0))
    table = ((step // 2 + below) // step.clamp_min(1)).clamp(0, 255)
    return torch.where(step > 0, table.gather(2, flat), flat).view_as(x).to(torch.uint8)


def _invert(x: Tensor, _: float, __: Tensor) -> Tensor:
    return 255 - x


def _solarize(x: Tensor, threshold: float, _: Tensor) -> Tensor:
    return torch.where(x < threshold, x, 255 - x)


def _posterize(x: Tensor, bits: float, _: Tensor) -> Tensor:
    return x & (256 - 2 ** (8 - int(bits)))


OPERATIONS: dict[str, Callable[[Tensor, float, Tensor], Tensor]] = {
    operation.__name__.removeprefix("_"): operation
    for operation in (
        *(_translate_x, _translate_y, _shear_y, _rotate, _brightness, _contrast, _colour, _sharpness),
        *(_autocontrast, _equalize, _invert, _solarize, _posterize),
    )
}
