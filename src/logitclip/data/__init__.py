"""Datasets by name. `dataset.py` defines what a dataset is; every family has its own file, plumbing an underscore.

>>> import torch
>>> data, generator = load("digits"), torch.Generator().manual_seed(0)
>>> view = transform("none", data.mean, data.std)
>>> for index, x, y in batches(data.train, 128, generator=generator):
...     inputs = view(x, generator)  # the model's input; y are the labels
"""

from __future__ import annotations

import inspect
from pathlib import Path

from logitclip.data._loading import Holdout, batch_indices, batches, hold_out
from logitclip.data.augment import AUGMENTS, normalise, transform
from logitclip.data.dataset import (
    DATASETS,
    Dataset,
    Examples,
    Split,
    asymmetric_of,
    data_folder,
    defaults_of,
    with_defaults,
    with_protocol,  # noqa: F401 (its old name, not listed)
)

__all__ = [
    "AUGMENTS",
    "DATASETS",
    "Dataset",
    "Examples",
    "Holdout",
    "Split",
    "asymmetric_of",
    "batch_indices",
    "batches",
    "defaults_of",
    "hold_out",
    "load",
    "normalise",
    "transform",
    "with_defaults",
]


def load(
    spec: str,
    root: str | Path | None = None,
    *,
    download: bool = False,
    mirror: str | Path | None = None,
    raw: bool = False,
) -> Dataset:
    """Load a dataset by name.

    Args:
        spec: Name and knobs: ``"digits"``, ``"cifar100:labels=coarse"``.
        root: Folder of the data; by default $LOGITCLIP_DATA, or ``data``.
        download: Download missing files from their official address.
        mirror: A folder or an address prefix to download from instead.
        raw: Leave images and texts as they are, for an encoder: image files not decoded, texts not counted.

    Returns:
        The dataset, with its training and test split.

    Raises:
        ValueError: If the name or a knob is unknown, or the data is missing or damaged.

    >>> load("digits").num_classes
    10
    """
    function = DATASETS.build(spec)
    wanted = inspect.signature(function).parameters
    given = {"download": download, "mirror": mirror, "raw": raw}
    return function(data_folder(root), **{name: value for name, value in given.items() if name in wanted})
