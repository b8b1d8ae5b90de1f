"""Image files, decoded on demand or once into memory."""

from __future__ import annotations

import base64
import contextlib
import copy
import io
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from logitclip.text import explain_missing

if TYPE_CHECKING:
    from PIL import Image

    from logitclip.data.dataset import Defaults

log = logging.getLogger(__name__)

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")


class ImageFiles:
    """Image files that are decoded when they are indexed, always to the same uint8 tensor.

    The shorter side is scaled to `size` and the centre square is kept, so every image has one shape and a batch is one
    tensor. Random augmentation happens later, on whole batches. The paper does not say how it crops WebVision's images:
    this is our choice. EXIF orientation is applied; grayscale, 16-bit, CMYK, palette and transparent images become RGB.

    Args:
        folder: The folder that `names` are relative to.
        names: File names with forward slashes.
        size: Side S of the square, in pixels.

    `images[index]` with a tensor of n positions is uint8 [n, 3, S, S].

    Raises:
        ValueError: If `size` is below 1, or, on decoding, if a file is missing or damaged.
    """

    def __init__(self, folder: str | Path, names: Sequence[str], size: int = 256) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1 pixel, got {size}.")
        _pillow()  # fail now if the package is missing, not in a worker process in the middle of an epoch
        self.folder = os.fspath(folder)
        self.size = size
        # One array rather than a list of strings: cheap to share with, or send to, worker processes.
        self.names = np.array([os.fsencode(name) for name in names], dtype=bytes)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self), 3, self.size, self.size))

    def select(self, index: Tensor) -> ImageFiles:
        """Return the files at `index`."""
        chosen = copy.copy(self)
        chosen.names = self.names[index.numpy()]
        return chosen

    def join(self, others: ImageFiles) -> ImageFiles:
        """Return these files and then others of the same folder."""
        both = copy.copy(self)
        both.names = np.concatenate([self.names, others.names])
        return both

    def path(self, i: int) -> str:
        """Return the path of image `i`."""
        return os.path.join(self.folder, os.fsdecode(self.names[i]))

    def decode(self, i: int) -> Tensor:
        """Return image `i`, uint8 [3, S, S]."""
        from PIL import Image, ImageOps

        square = ImageOps.fit(self.open(i, self.size), (self.size, self.size), Image.Resampling.BILINEAR)
        return torch.from_numpy(np.array(square)).permute(2, 0, 1)

    def decode_or_skip(self, i: int) -> Tensor | None:
        """Return image `i` as `decode` does; None, with a warning, if it cannot be read."""
        try:
            return self.decode(i)
        except ValueError as error:
            log.warning("skipped: %s", error)
            return None

    def open(self, i: int, size: int = 0) -> Image.Image:
        """Return image `i` as a PIL image in RGB; with `size`, a large JPEG may be reduced to twice that."""
        path = self.path(i)
        try:
            return _open_as_rgb(path, size)
        except FileNotFoundError:
            raise ValueError(f"There is no image {path}; restore it or remove it from the data.") from None
        except Exception as error:  # decoders fail on damaged files in many ways
            raise ValueError(f"{path} is not a readable image ({error}); repair it or remove it.") from error

    def __getitem__(self, index: Tensor | Sequence[int]) -> Tensor:
        positions = torch.as_tensor(index).tolist()
        images = torch.empty((len(positions), 3, self.size, self.size), dtype=torch.uint8)
        for image, i in zip(images, positions, strict=True):
            image.copy_(self.decode(i))
        return images

    def describe(self) -> Iterator[bytes]:
        """Yield name, size and time of change of each file: what its content is known by."""
        for i, name in enumerate(self.names):
            try:
                stat = os.stat(self.path(i))
            except OSError:
                stat = None  # an image that cannot be read has no features
            yield b"%s\0%d\0%d\n" % (name, stat.st_size if stat else -1, stat.st_mtime_ns if stat else -1)

    def sizes(self, index: Tensor) -> Tensor:
        """Return width and height of the files at `index`, [n, 2]; (0, 0) for a file that cannot be opened."""
        found = torch.zeros((len(index), 2), dtype=torch.int64)
        for row, i in zip(found, index.tolist(), strict=True):
            with contextlib.suppress(Exception), _pillow().open(self.path(i)) as image:
                row.copy_(torch.tensor(image.size))
        return found


def read_all(images: ImageFiles) -> tuple[Tensor, Tensor]:
    """Decode every file once and skip the unreadable ones with a warning.

    Returns:
        The images, uint8 [M, 3, S, S], and their positions in `images`, [M].
    """
    kept, decoded = [], torch.empty(images.shape, dtype=torch.uint8)
    for i in range(len(images)):
        image = images.decode_or_skip(i)
        if image is not None:
            decoded[len(kept)] = image
            kept.append(i)
    return decoded[: len(kept)], torch.tensor(kept, dtype=torch.int64)


def find_images(folder: Path, under: str = "") -> Iterator[str]:
    """Yield the names of the image files below `folder/under`, at any depth, without hidden files."""
    for parent, _, files in os.walk(folder / under):
        for file in files:
            if file.lower().endswith(IMAGE_SUFFIXES) and not file.startswith("."):
                yield Path(parent, file).relative_to(folder).as_posix()


def png_address(pixels: Tensor) -> str:
    """Return an image [C, H, W] of bytes, grey or RGB, as a PNG in a data: address."""
    values = pixels[0] if len(pixels) == 1 else pixels.permute(1, 2, 0)
    return as_address(to_png(_pillow().fromarray(np.ascontiguousarray(values.numpy()))))


def to_png(image: Image.Image) -> bytes:
    """Return the content of a PNG file."""
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()


def as_address(png: bytes) -> str:
    """Return a PNG file as a data: address, for a page in one file."""
    return "data:image/png;base64," + base64.b64encode(png).decode()


def image_defaults(size: int) -> Defaults:
    """Return the paper's settings for WebVision, with a crop of 7/8 of the decoded size (224 of 256)."""
    return {
        "model": "resnet:depth=18" if size >= 128 else "resnet:depth=18,stem=cifar",
        "epochs": 120,
        "batch_size": 128,
        "lr": 0.1,
        "momentum": 0.9,
        "nesterov": True,
        "weight_decay": 5e-4,
        "schedule": "multistep",
        "milestones": (1 / 3, 2 / 3),
        "augment": f"crop:size={size * 7 // 8}",
        "drop_last": True,
    }


def own_image_defaults(size: int) -> Defaults:
    """Return `image_defaults` without `drop_last`: own images may be few."""
    return {**image_defaults(size), "drop_last": False}


def _pillow() -> ModuleType:
    with explain_missing("Reading image files needs pillow", "data"):
        from PIL import Image
    return Image


def _open_as_rgb(path: str, size: int) -> Image.Image:
    from PIL import Image, ImageOps

    # Photos from the web often have broken EXIF blocks: warnings about them help nobody.
    with warnings.catch_warnings(action="ignore"), Image.open(path) as image:
        if size:  # decode large JPEGs at 1/2, 1/4 or 1/8 scale, but never below twice the size we need
            image.draft("RGB", (2 * size, 2 * size))
        image.load()
        with contextlib.suppress(Exception):  # a broken EXIF block: keep the image as it is stored
            image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I"):  # 16 bits per pixel, which `convert` would clip to 8
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        elif image.mode in ("P", "PA"):
            image = image.convert("RGBA")
        return image.convert("RGB")
