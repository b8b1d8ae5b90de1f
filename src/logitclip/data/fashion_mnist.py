"""Fashion-MNIST, from its gzipped IDX files."""

from __future__ import annotations

import gzip
import hashlib
import math
import zlib
from pathlib import Path

import numpy as np
import torch

from logitclip.data._download import Remote, fetch
from logitclip.data._pickles import as_labels
from logitclip.data.dataset import DATASETS, Dataset, Defaults, Split, with_defaults

ADDRESS = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
PACKED = {  # size and MD5
    "train-images-idx3-ubyte": (26_421_880, "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
    "train-labels-idx1-ubyte": (29_515, "25c81989df183df01b3e8a0aad5dffbe"),
    "t10k-images-idx3-ubyte": (4_422_102, "bef4ecab320f06d8554ea6380940ec79"),
    "t10k-labels-idx1-ubyte": (5_148, "bb300cfdad3c16e7a12a480ee83cd310"),
}
REMOTES = {name: Remote(f"{ADDRESS}/{name}.gz", *published) for name, published in PACKED.items()}
# MD5 of the unpacked files: packed ones differ between distributors. MNIST has files of the same names and shapes.
CONTENT = {
    "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
    "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
    "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
}
DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # of the package dataset-fashion-mnist
CLASSES = ("T-shirt", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


DEFAULTS: Defaults = {
    "model": "cnn:width=32",
    "epochs": 60,
    "batch_size": 128,
    "lr": 0.1,
    "momentum": 0.9,
    "nesterov": False,
    "weight_decay": 5e-4,
    "schedule": "multistep",
    "milestones": (0.4, 0.7),
    "augment": "flip_crop:padding=2",
    "drop_last": True,
}


@DATASETS.register
@with_defaults(DEFAULTS)
def fashion_mnist(
    root: str | Path, *, subset: bool = False, download: bool = False, mirror: str | Path | None = None
) -> Dataset:
    """Fashion-MNIST: 60,000 + 10,000 grey pictures of clothes, 28x28 pixels, in 10 classes.

    Args:
        root: Has the four IDX files, gzipped or not, itself or in ``fashion-mnist``, ``fashion_mnist`` or
            ``FashionMNIST/raw``; otherwise those of Debian's package dataset-fashion-mnist are used, if installed.
        subset: Accept a part of the data, or changed data, without checking checksums.
    """
    folder = _find_folder(Path(root))
    if folder is None:
        if not download:
            raise ValueError(
                f"Fashion-MNIST is not in {root}: put train-images-idx3-ubyte.gz and the three other files into "
                f"{Path(root) / 'fashion-mnist'} (from {ADDRESS}), install Debian's dataset-fashion-mnist, or ask for "
                "the download (--download)."
            )
        folder = Path(root) / "fashion-mnist"
        for remote in REMOTES.values():
            fetch(remote, folder, mirror)
    return Dataset(
        name="fashion_mnist",
        train=_read_split(folder, "train", subset),
        test=_read_split(folder, "t10k", subset),
        num_classes=10,
        class_names=CLASSES,
        mean=(0.2860,),
        std=(0.3530,),
    )


def _find_file(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / f"{name}.gz", folder / name) if path.is_file()), None)


def _find_folder(root: Path) -> Path | None:
    places = (root / "fashion-mnist", root / "fashion_mnist", root / "FashionMNIST" / "raw", root, DEBIAN)
    return next((folder for folder in places if all(_find_file(folder, name) for name in REMOTES)), None)


def _read_split(folder: Path, part: str, subset: bool) -> Split:
    images = _read_idx(folder, f"{part}-images-idx3-ubyte", subset)
    labels = _read_idx(folder, f"{part}-labels-idx1-ubyte", subset)
    source = str(_find_file(folder, f"{part}-labels-idx1-ubyte"))
    labels = as_labels(labels, source, length=len(images), num_classes=len(CLASSES))
    return Split(torch.from_numpy(images).unsqueeze(1), labels)


def _read_idx(folder: Path, name: str, subset: bool) -> np.ndarray:
    """Read an IDX file: 0, 0, 8 (uint8), the number of axes, each length as a big-endian int32, the data."""
    path = _find_file(folder, name)
    if path is None:
        raise ValueError(f"{folder / name}.gz is missing.")
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path} is cut off or damaged ({error}). Delete it and download it again.") from error
    axes = 3 if "idx3" in name else 1
    start = 4 + 4 * axes
    shape = tuple(np.frombuffer(raw[4:start], ">i4").tolist())
    if raw[:4] != bytes((0, 0, 8, axes)) or len(raw) != start + math.prod(shape):
        raise ValueError(f"{path} is not a complete IDX file with {axes} axes. Delete it and download it again.")
    if not subset and hashlib.md5(raw, usedforsecurity=False).hexdigest() != CONTENT[name]:
        raise ValueError(
            f"{path} is not Fashion-MNIST's: damaged, or another dataset's of the same name, such as MNIST's. Replace "
            f"it, or write 'fashion_mnist:subset=true' to use changed data."
        )
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape).copy()
