"""Images: a folder with one folder per class, or a table with a column of image files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from logitclip.data._columns import Columns
from logitclip.data._images import IMAGENET_MEAN, IMAGENET_STD, ImageFiles, find_images, png_address, read_all
from logitclip.data.table import column_text
from logitclip.own_data.facts import Facts
from logitclip.own_data.kind import ENCODER_HINT, Kind, NewRows, Read, Rows, check_names
from logitclip.own_data.tables import read_columns

if TYPE_CHECKING:
    from logitclip.own_data.kind import Data

CPU_PIXELS = 64  # without a GPU, larger images are reduced to this
IN_MEMORY = 2_000_000_000  # bytes of decoded images that are kept in memory
SAMPLE = 500  # number of image files whose size is read
THUMBNAIL = 96  # pixels
SMALL_SIDE = 16  # side of the small pictures that the learners other than the network see


@dataclass(frozen=True, eq=False)
class Images(Kind):
    """Image files, as squares of `size` pixels."""

    name: ClassVar[str] = "image"
    hint: ClassVar[str] = ENCODER_HINT
    label: str | None
    image: str | None  # the column with the files; None for a folder
    size: int
    pixels: int = 0  # of the training images: the median of the shorter sides
    folder: Path = Path()
    names: Sequence[str] = field(default_factory=list)  # of the training images
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD

    @classmethod
    def look(cls, folder: Path, names: Sequence[str], label: str | None, image: str | None) -> Images:
        """Look at the sizes of some of the images.

        Raises:
            ValueError: If none of them can be opened, or if a name is not UTF-8.
        """
        check_names(names)
        files = ImageFiles(folder, names)
        sample = torch.linspace(0, len(names) - 1, min(SAMPLE, len(names))).round().long().unique()
        sides = files.sizes(sample).amin(1)
        if not (sides > 0).any():
            raise ValueError(f"None of the image files in {folder} can be opened; are they images?")
        pixels = int(sides[sides > 0].median())
        size = min(pixels, 256 if torch.accelerator.is_available() else CPU_PIXELS)
        return cls(label, image, size, pixels, folder, names)

    @classmethod
    def restore(cls, facts: Facts, read: Read) -> Images:
        return cls(facts["label"], facts["image"], facts["size"])

    def facts(self) -> Facts:
        return {**super().facts(), "image": self.image, "size": self.size}

    def load(self, *, decode: bool = True) -> tuple[Rows, np.ndarray]:
        """Return the training rows and their positions in `names`.

        Args:
            decode: Decode the images, and skip those that cannot be read. Otherwise the rows have no features.
        """
        files = ImageFiles(self.folder, self.names, self.size)
        if not decode:
            return Rows(self.names, np.empty((len(self.names), 0), np.float32), files), np.arange(len(self.names))
        if len(self.names) * 3 * self.size**2 > IN_MEMORY:
            features = small_pictures(files)
            kept = torch.from_numpy(np.isfinite(features[:, 0])).nonzero().flatten()
            images, features = files.select(kept), features[kept.numpy()]
        else:
            images, kept = read_all(files)
            features = small_pictures(images)
        if not len(kept):
            raise ValueError(f"{self.folder} holds no readable image.")
        return Rows(self.keep(kept.numpy()).names, features, images), kept.numpy()

    def read(self, data: Data, columns: Columns | None = None) -> Rows | NewRows:
        folder, names = self._files(data, columns)
        files = ImageFiles(folder, names, self.size)
        return Rows(names, small_pictures(files), files)

    def _files(self, data: Data, columns: Columns | None) -> tuple[Path, list[str]]:
        file = isinstance(data, str | os.PathLike)
        if file and Path(data).is_dir():
            folder, names = Path(data), sorted(find_images(Path(data)))
            if not names:
                raise ValueError(f"{folder} holds no image.")
            check_names(names)
            return folder, names
        if self.image is None:
            raise ValueError(f"The model was fitted on a folder of images; give a folder, not {data}.")
        columns = read_columns(data) if columns is None else columns
        text = column_text(columns, self.image, str(data) if file else "The data frame")
        names = ["" if code < 0 else text.values[code] for code in text.codes]
        folder = Path(data).parent if file else Path()
        others = bool(self.names) and set(self.names).isdisjoint(names)  # images of val or test, not those trained on
        if others and not any((folder / name).is_file() for name in text.values):
            return self.folder, names
        return folder, names

    def network(self, rows: int) -> dict[str, str | float]:
        small = not torch.accelerator.is_available() or self.size < 48
        stem = ",stem=cifar" if self.size < 128 else ""
        return {
            "model": "strided_cnn" if small else f"resnet:depth=18{stem}",
            "lr": 0.05,
            "weight_decay": 5e-4,
            "batch_size": 128,
            "epochs": 30,
            "augment": f"crop:size={self.size * 7 // 8}" if self.size >= 48 else "none",
        }

    def describe(self, rows: Rows) -> str:
        reason = "" if self.size == self.pixels else f", reduced from {self.pixels} because there is no GPU"
        return f"images of {self.size}x{self.size} pixels{reason}"

    def show(self, i: int, names: Sequence[str] = ()) -> str:
        return self.names[i]

    def content(self, i: int) -> list[tuple[str, str]]:
        return [("file", self.names[i])]

    def content_bytes(self, i: int) -> bytes:
        try:
            return Path(self.folder, self.names[i]).read_bytes()
        except OSError:
            return b""

    def thumbnail(self, i: int) -> str | None:
        try:
            return png_address(ImageFiles(self.folder, [self.names[i]], min(THUMBNAIL, max(16, self.pixels))).decode(0))
        except ValueError:
            return None

    def keep(self, index: np.ndarray) -> Self:
        """Return this kind with some of the training images."""
        return replace(self, names=[self.names[i] for i in index.tolist()])


def small_pictures(images: Tensor | ImageFiles) -> np.ndarray:
    """Return images as rows of numbers, float32 [N, 3 * side * side] with a side of at most `SMALL_SIDE`.

    They are centred on 0.5 and scaled so that the deviation of natural images is about 1. Images that cannot be read
    are rows of NaN.
    """
    rows = torch.full((len(images), 3 * min(images.shape[-1], SMALL_SIDE) ** 2), torch.nan)
    for i in range(len(images)):
        pixels = images[i] if isinstance(images, Tensor) else images.decode_or_skip(i)
        if pixels is not None:
            small = pixels[None].float() / 255
            if small.shape[-1] > SMALL_SIDE:
                small = torch.nn.functional.interpolate(small, size=(SMALL_SIDE, SMALL_SIDE), mode="area")
            rows[i] = ((small - 0.5) / 0.25).flatten()
    return rows.numpy()
