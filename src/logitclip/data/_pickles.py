"""Safe reading of pickled arrays: CIFAR's Python files, and the human labels of CIFAR-10N and CIFAR-100N.

A pickle can execute any code, so none is trusted: the few names that such a file needs (an array, its type, its bytes)
are replaced by harmless stand-ins, and all others are rejected.
"""

from __future__ import annotations

import hashlib
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


class _DType:
    """A stand-in for numpy.dtype, limited to plain numbers."""

    def __init__(self, code: str, *_: object) -> None:
        if code not in {f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)}:
            raise pickle.UnpicklingError(f"arrays of type {code!r} are not allowed")
        self.code = code

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.code = f"{'>' if state[1] == '>' else '<'}{self.code}"


class _Array:
    """A stand-in for numpy.ndarray, which is pickled as an empty array with its shape, type and bytes as state."""

    def __init__(self, *_: object) -> None:
        self.value = np.empty(0, np.uint8)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, raw = state
        raw = raw.encode("latin1") if isinstance(raw, str) else raw  # Python 2 wrote bytes as str
        self.value = np.frombuffer(raw, dtype.code).reshape(shape, order="F" if fortran else "C")


def _latin1(text: str, encoding: str) -> bytes:
    """Encode as _codecs.encode does, which old pickles use for bytes."""
    return text.encode("latin1")


def _scalar(dtype: _DType, raw: bytes | str) -> int:
    """Make a numpy number, as the function does that pickles name."""
    return int(np.frombuffer(raw.encode("latin1") if isinstance(raw, str) else raw, dtype.code)[0])


_ADMITTED: dict[str, Any] = {
    "numpy.core.multiarray._reconstruct": _Array,
    "numpy._core.multiarray._reconstruct": _Array,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
    "numpy.ndarray": _Array,
    "numpy.dtype": _DType,
    "_codecs.encode": _latin1,
}


_UNKNOWN = "it asks for {}, which no file of labels or images needs"


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        name = f"{module_name}.{global_name}"
        if name not in _ADMITTED:
            raise pickle.UnpicklingError(_UNKNOWN.format(name))
        return _ADMITTED[name]


def read_pickle(path: Path) -> dict[str, Any]:
    """Read a pickled dict of arrays, lists and text, such as those of ``cifar-10-batches-py``, without running code."""
    with path.open("rb") as file:
        return _load_dict(path, lambda: _Unpickler(file, encoding="latin1").load())


def read_torch(path: Path) -> dict[str, Any]:
    """Read a dict of arrays saved by torch, such as ``CIFAR-10_human.pt``, without running code."""
    serialization = torch.serialization
    # The program may have allowed NumPy's own names globally; they must not mix with our stand-ins.
    others = serialization.get_safe_globals()
    serialization.clear_safe_globals()
    try:
        serialization.add_safe_globals([(stand_in, name) for name, stand_in in _ADMITTED.items()])
        return _load_dict(path, lambda: torch.load(path, map_location="cpu", weights_only=True))
    finally:
        serialization.clear_safe_globals()
        serialization.add_safe_globals(others)


def _load_dict(path: Path, load: Callable[[], Any]) -> dict[str, Any]:
    try:
        content = load()
    except FileNotFoundError:
        raise
    except Exception as error:  # unpicklers raise many types; the file is at fault
        raise _damage_error(path, "unsafe", error) from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__} instead of a dict. Delete it and download it again.")
    return {str(key): value.value if isinstance(value, _Array) else value for key, value in content.items()}


def _damage_error(path: Path, other: str, error: Exception) -> ValueError:
    reason = str(error)
    if name := re.search(r"GLOBAL (\S+)", reason):
        reason = _UNKNOWN.format(name[1])
    elif "weights_only" in reason:  # the rest of torch's message advises to trust the file
        reason = "it contains more than integers"
    first_line = reason.partition("\n")[0]
    if " " not in first_line:  # the bare key of a KeyError, say, or nothing
        first_line = "it is not such a file"
    return ValueError(f"{path} is damaged or {other} and was not read ({first_line}). Delete it and download it again.")


def read_labels(path: str | Path) -> dict[str, np.ndarray]:
    """Read the arrays of a label file by name: the official ``.pt``, ``.npz``, or ``.npy`` (named as the file)."""
    path = Path(path)
    if path.suffix == ".pt":
        return {name: np.asarray(value) for name, value in read_torch(path).items()}
    if path.suffix not in (".npz", ".npy"):
        raise ValueError(f"{path} is not a label file: it must be .pt, .npz or .npy.")
    try:
        content = np.load(path, allow_pickle=False)
        if isinstance(content, np.ndarray):
            return {path.stem: content}
        with content:
            return dict(content)
    except FileNotFoundError:
        raise
    except Exception as error:  # numpy and zipfile raise a dozen kinds on damaged files
        raise _damage_error(path, "holds pickled objects", error) from error


def as_labels(array: np.ndarray, source: str, *, length: int, num_classes: int) -> Tensor:
    """Check and return one class per example, int64 [length]; `source` names the file in errors."""
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise ValueError(f"{source} must be a list of class numbers, got shape {array.shape} of {array.dtype}.")
    if len(array) != length:
        raise ValueError(f"{source} has {len(array):,} labels for {length:,} examples; is it of another dataset?")
    labels = torch.from_numpy(array.astype(np.int64))
    outside = labels[(labels < 0) | (labels >= num_classes)]
    if len(outside):
        raise ValueError(f"{source} has the class {int(outside[0])}, outside 0..{num_classes - 1}.")
    return labels


def human_labels(
    path: str | Path,
    clean: Tensor,
    num_classes: int,
    *,
    keys: Mapping[str, str | None],
    clean_key: str = "clean_label",
    positions: Tensor | None = None,
) -> dict[str, Tensor]:
    """Read the label sets of a CIFAR-N file and check them against the dataset's own labels.

    Args:
        clean: The dataset's labels, [N]; those that the file has under `clean_key` must be the same.
        keys: The sets to read, each with the MD5 of its labels as bytes, or None where there is nothing to compare.
        positions: Which labels of the file are those of the N examples, if these are a part of the data.
    """
    arrays, found = read_labels(path), {}
    for key in (clean_key, *keys):
        if key not in arrays:
            raise ValueError(f"{path} has no {key!r}, only {', '.join(sorted(arrays))}.")
        array = arrays[key]
        if positions is not None:
            if len(array) <= int(positions.max()):
                raise ValueError(f"{path}: {key} has {len(array):,} labels, none at position {int(positions.max()):,}.")
            array = array[positions.numpy()]
        found[key] = as_labels(array, f"{path}: {key}", length=len(clean), num_classes=num_classes)
    if not torch.equal(found.pop(clean_key), clean):
        raise ValueError(f"{path}: {clean_key} differs from the dataset's labels; the file is of other data or order.")
    for key, digest in keys.items():
        if digest and hashlib.md5(found[key].byte().numpy(), usedforsecurity=False).hexdigest() != digest:
            raise ValueError(f"{path}: {key} is not the published label set. Delete it and download it again.")
    return found
