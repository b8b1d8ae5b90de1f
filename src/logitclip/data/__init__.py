"""Datasets by name: see `dataset.py` for what one is, and one file for each family.

data = load("cifar10", root="data", download=True)
view = transform("flip_crop:padding=4", data.mean, data.std)
for index, x, y in batches(data.train, 128, generator=generator):
    loss = criterion(model(view(x, generator)), y)
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path

from logitclip.data.augment import AUGMENTS, normalise, transform
from logitclip.data.dataset import DATASETS, Dataset, Examples, Split, protocol_of, with_protocol
from logitclip.data.loading import Holdout, batch_indices, batches, hold_out

__all__ = [
    "AUGMENTS",
    "DATASETS",
    "Dataset",
    "Examples",
    "Holdout",
    "Split",
    "batch_indices",
    "batches",
    "hold_out",
    "load",
    "normalise",
    "protocol_of",
    "transform",
    "with_protocol",
]


def load(
    spec: str, root: str | Path | None = None, *, download: bool = False, mirror: str | Path | None = None
) -> Dataset:
    """The dataset that `spec` names.

    Args:
        spec: a name with its knobs: ``"digits"``, ``"cifar100:labels=coarse"``.
        root: the folder of the data; by default that in the environment variable LOGITCLIP_DATA, or ``data``.
        download: get what is missing from its official address.
        mirror: a folder, or the beginning of an address, to download from instead.

    >>> load("digits").num_classes
    10
    """
    function = DATASETS.build(spec)
    wanted = inspect.signature(function).parameters
    given = {"download": download, "mirror": mirror}
    folder = Path(os.path.expanduser(root if root is not None else os.environ.get("LOGITCLIP_DATA") or "data"))
    return function(folder, **{name: value for name, value in given.items() if name in wanted})
