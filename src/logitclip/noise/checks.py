"""Checks of labels, options and arrays that noise rules and records share."""

from __future__ import annotations

import io
import typing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from logitclip import files


def read_matrix(matrix: Any, num_classes: int | None = None) -> Tensor:
    """Read and check a transition matrix.

    Args:
        matrix: [K, K], an array, or the path of a .npy, .npz or .csv file.
        num_classes: K, if it is known.

    Returns:
        The matrix, float64 [K, K].

    Raises:
        ValueError: If it is not square, or a row is not a distribution.

    >>> read_matrix([[0.75, 0.25], [0.0, 1.0]]).tolist()
    [[0.75, 0.25], [0.0, 1.0]]
    """
    rows = read_array(matrix, "matrix")
    k = len(rows) if num_classes is None and rows.ndim else num_classes
    if rows.shape != (k, k):
        raise ValueError(f"matrix must be square, a row and a column for each class ({k}), got {list(rows.shape)}.")
    if not bool((rows.isfinite() & (rows >= 0)).all()):
        raise ValueError("matrix must hold probabilities: finite and not negative.")
    worst = int((rows.sum(1) - 1).abs().argmax())
    if abs(float(rows[worst].sum()) - 1) > 1e-5:
        raise ValueError(f"Each row of matrix must sum to 1; row {worst} sums to {float(rows[worst].sum()):g}.")
    return rows


def class_labels(labels: Any, num_classes: int, *, what: str = "labels") -> Tensor:
    """Copy `labels` to int64 [N] on the CPU; raise unless they are in 0..K-1."""
    if not is_integer(num_classes) or num_classes < 2:
        raise ValueError(f"num_classes must be an integer of at least 2, got {num_classes!r}.")
    array = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    if array.ndim != 1 or not len(array):
        raise ValueError(f"{what} must have one dimension and at least one entry, got the shape {array.shape}.")
    if array.dtype.kind not in "iu":
        raise ValueError(f"{what} must be integers, got {array.dtype}.")
    low, high = array.min(), array.max()
    if low < 0 or high >= num_classes:
        raise ValueError(f"{what} must lie in 0..{num_classes - 1}, got {low if low < 0 else high}.")
    return torch.from_numpy(array.astype(np.int64))


def noisy_labels(labels: Tensor, num_classes: int, n: int) -> Tensor:
    """Check the labels that a rule returned or a file holds: [n] int64 or [n, K] float32."""
    if len(labels) != n or (labels.ndim > 1 and labels.shape != (n, num_classes)):
        raise ValueError(f"noisy labels must be [{n}] or, if soft, [{n}, {num_classes}]; got {list(labels.shape)}.")
    return labels.float() if labels.ndim > 1 else class_labels(labels, num_classes, what="noisy labels")


def check_rate(rate: object) -> None:
    if not is_real_number(rate) or not 0 <= rate <= 1:
        raise ValueError(f"rate must be a share between 0 and 1, got {rate!r}.")


def check_choice(name: str, value: object, choices: object) -> None:
    if value not in typing.get_args(choices):
        raise ValueError(f"{name} must be one of {', '.join(typing.get_args(choices))}; got {value!r}.")


def check_generator(generator: object) -> None:
    if not isinstance(generator, torch.Generator) or generator.device.type != "cpu":
        example = "pass generator=torch.Generator().manual_seed(0)"
        raise ValueError(f"generator must be a torch.Generator on the CPU, got {generator!r}: {example}.")


def is_integer(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def is_real_number(value: object) -> typing.TypeGuard[float]:
    return is_integer(value) or isinstance(value, (float, np.floating))


def inputs_of(source: Any) -> Any:
    return source.train.x if hasattr(source, "train") else source


def read_array(value: Any, what: str) -> Tensor:
    """Return a float64 tensor from an array or from a file."""
    if isinstance(value, Tensor):
        return value.detach().cpu().double()
    named = isinstance(value, (str, Path))
    try:
        return torch.from_numpy(np.array(_read_file(Path(value)) if named else value, np.float64))
    except Exception as error:  # a damaged file can make numpy raise almost anything
        source = f"the file {value}" if named else "an array of numbers"
        raise ValueError(f"{what} cannot be read as {source}: {error}") from error


def _read_file(path: Path) -> np.ndarray:
    content = files.read_bytes(path)
    if path.suffix == ".csv":
        return np.loadtxt(io.StringIO(content.decode("utf-8-sig"), newline=None), delimiter=",", ndmin=2)
    loaded = np.load(io.BytesIO(content), allow_pickle=False)
    if isinstance(loaded, np.ndarray):
        return loaded
    with loaded:
        if len(loaded.files) != 1:
            raise ValueError(f"it holds {len(loaded.files)} arrays, one is expected.")
        return loaded[loaded.files[0]]
