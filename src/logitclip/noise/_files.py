"""Files of noisy labels: which they are, how they are read, and whether they fit the data."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from logitclip.search import beats_chance


def record_files(path: str | Path) -> tuple[Path, Path]:
    """Return the two files of a noise record: its arrays (.npz) and everything else (.json)."""
    stem = os.fspath(path).removesuffix(".npz").removesuffix(".json")
    return Path(f"{stem}.npz"), Path(f"{stem}.json")


def read_noise_file(path: str) -> Tensor | None:
    """Read the labels in a .json, .csv or .npy file.

    Args:
        path: The file.

    Returns:
        Labels int64 [N], soft labels float32 [N, K], or pairs int64 [M, 2] of replaced images; None for a record.

    Raises:
        ValueError: If the file is missing, or holds something else.
    """
    file = Path(os.path.expanduser(path))
    if file.suffix not in READERS or (file.suffix == ".json" and record_files(path)[0].is_file()):
        return None
    try:
        content = READERS[file.suffix](file)
        if content is None:
            return None
        numbers = torch.from_numpy(content)
    except FileNotFoundError as error:
        raise ValueError(f"There is no noise file {path}.") from error
    except Exception as error:  # not JSON, ragged lists, no numbers, a damaged array
        raise ValueError(f"{path} is not a noise file: {type(error).__name__}, {error}") from error
    pairs = numbers.ndim == 2 and not numbers.is_floating_point()
    if not numbers.ndim or numbers.ndim > 2 or (pairs and numbers.shape[1] != 2):
        raise ValueError(f"{path} must be a list of labels or of pairs, got the shape {list(numbers.shape)}.")
    if numbers.is_floating_point():
        _check_soft(path, numbers)
    return numbers


def _read_json(file: Path) -> np.ndarray | None:
    content = json.loads(file.read_text(encoding="utf-8"))
    return np.array(content).astype(np.int64, casting="safe") if isinstance(content, list) and content else None


def _read_csv(file: Path) -> np.ndarray:
    """Read one class number in each row, or a probability for each class; a first row that is no number is a header."""
    with file.open(encoding="utf-8-sig") as lines:
        first = lines.readline().split(",")[0]
    if not first:
        raise ValueError("the file is empty")
    try:
        float(first)
        skip = 0
    except ValueError:
        skip = 1
    rows = np.loadtxt(file, delimiter=",", ndmin=2, skiprows=skip, dtype=np.float64, encoding="utf-8-sig")
    if rows.shape[1] > 1:
        return rows.astype(np.float32)
    if not (rows == np.floor(rows)).all():
        raise ValueError("a label must be a class number, an integer")
    return rows[:, 0].astype(np.int64)


def _read_npy(file: Path) -> np.ndarray:
    array = np.load(file, allow_pickle=False)
    if array.ndim == 2 and array.dtype.kind == "f":
        return array.astype(np.float32)
    return array.astype(np.int64, casting="safe")


READERS = {".json": _read_json, ".csv": _read_csv, ".npy": _read_npy}


def _check_soft(path: str, rows: Tensor) -> None:
    sums = rows.double().sum(1)
    if not bool((rows >= 0).all() and ((sums - 1).abs() < 1e-3).all()):  # also refuses NaN
        raise ValueError(f"Each row of {path} must hold probabilities of the classes, which sum to 1.")


def check_agreement(path: str, labels: Tensor, clean: Tensor, num_classes: int) -> None:
    """Refuse labels that agree with the truth no more often than by chance."""
    labels = labels.argmax(1) if labels.ndim > 1 else labels
    counts = [values.bincount(minlength=num_classes) / len(values) for values in (labels, clean)]
    chance = float(counts[0] @ counts[1])
    agreement = float((labels == clean).double().mean())
    if not beats_chance(agreement, chance, len(clean), errors=3.0):
        raise ValueError(
            f"Only {agreement:.1%} of the labels in {path} are the true ones: it was made for other data, or for the "
            "same in another order."
        )


def check_pairs(path: str, pairs: Tensor, examples: int, source: str | None) -> Tensor:
    """Refuse pairs of replaced images that do not fit a dataset of `examples` images."""
    positions, images = pairs.unbind(1)
    if source is None:
        raise ValueError(f"{path} replaces images: name their dataset, as in file:path={path},source=cifar100.")
    if len(positions.unique()) < len(positions) or not 0 <= int(positions.min()) <= int(positions.max()) < examples:
        raise ValueError(f"The positions in {path} must be different and lie in 0..{examples - 1}.")
    if int(images.min()) < 0:
        raise ValueError(f"The image indices in {path} must not be negative, got {int(images.min())}.")
    return pairs
