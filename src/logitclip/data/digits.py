"""Handwritten digits, 8x8 pixels: real images that come with scikit-learn, so nothing is downloaded."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch

from logitclip.data.dataset import DATASETS, Dataset, Defaults, Split, with_defaults

TRAIN = 1400


DEFAULTS: Defaults = {
    "model": "mlp:width=256,depth=3",
    "epochs": 150,
    "batch_size": 128,
    "lr": 0.1,
    "momentum": 0.9,
    "nesterov": False,
    "weight_decay": 0.0,
    "schedule": "multistep",
    "milestones": (0.4, 0.7),
    "augment": "none",
    "drop_last": False,
}


@DATASETS.register
@with_defaults(DEFAULTS)
def digits(root: str | Path | None = None) -> Dataset:
    """Digits: 1,400 + 397 handwritten digits of 8x8 pixels, from scikit-learn; needs no file.

    >>> data = digits()
    >>> data.train.x.shape, len(data.test)
    (torch.Size([1400, 1, 8, 8]), 397)
    """
    rows = _read_pixels()
    # Grey levels 0..16 become 0..240: bytes, and no rounding.
    x = torch.from_numpy((15 * rows[:, :-1]).astype(np.uint8)).view(-1, 1, 8, 8)
    y = torch.from_numpy(rows[:, -1].astype(np.int64))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))  # the file is ordered by writer
    train, test = (Split(x[part], y[part]) for part in (order[:TRAIN], order[TRAIN:]))
    return Dataset(name="digits", train=train, test=test, num_classes=10, class_names=tuple("0123456789"))


def _read_pixels() -> np.ndarray:
    """Return the grey levels and the label of each digit, [1797, 65]."""
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        raise ImportError("The digits come with scikit-learn: pip install 'logitclip[train]'.")
    file = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if file.exists():  # to import scikit-learn takes a second, to read its file a tenth of that
        return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits

    bunch: Any = load_digits()
    return np.column_stack([bunch.data, bunch.target])
