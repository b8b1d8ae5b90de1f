"""Where the weights of an encoder are: a folder, or a name in the user's hub cache. Safetensors only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

from logitclip.text import explain_missing, first_line

# Weights, and the files of tokenizers and image processors; never pickles and never code.
PATTERNS = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack")

_downloading: ContextVar[bool] = ContextVar("downloading", default=False)


@contextlib.contextmanager
def downloads_allowed(allowed: bool = True) -> Iterator[None]:
    """Fetch missing weights from the hub in this block, if `allowed`."""
    token = _downloading.set(allowed)
    try:
        yield
    finally:
        _downloading.reset(token)


def find_folder(name: str) -> Path:
    """Return the folder of an encoder.

    Args:
        name: A folder, or a name on the hub such as ``facebook/dinov2-small``, which must be in the user's cache.

    Raises:
        ValueError: If there is no such folder and the cache does not have the name.
    """
    folder = Path(os.path.expanduser(name))
    if folder.is_dir():
        return folder
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ValueError(f"There is no folder {name}: name the folder of an encoder, or its name on the hub.")
    with explain_missing("Encoders need transformers", "encoders"):
        import huggingface_hub as hub
    try:
        found = hub.snapshot_download(name, local_files_only=not _downloading.get(), allow_patterns=list(PATTERNS))
    except Exception as error:  # of many types: not in the cache, no such name, no network
        if _downloading.get():
            reason = first_line(error)
            raise ValueError(f"The encoder {name!r} cannot be downloaded: {reason}.") from error
        raise ValueError(
            f"There is no folder {name!r}, and the cache of the hub has no such name: add --download to fetch it."
        ) from None
    return Path(found)


def model_files(name: str, **_: object) -> list[Path]:
    """Return the files that the features of an encoder depend on, of all its modules.

    Raises:
        ValueError: If there are no safetensors, or a module has only a pickle.
    """
    folder = find_folder(name)
    found = sorted({path for pattern in PATTERNS for path in folder.rglob(pattern)})
    weights = [path for path in found if path.suffix == ".safetensors"]
    if not weights:
        raise ValueError(f"{folder} has no .safetensors file: other formats of weights may run code.")
    safe = {path.parent for path in weights}
    for path in folder.rglob("*"):
        if path.suffix in PICKLES and path.parent not in safe and "onnx" not in path.parts:
            raise ValueError(f"{path} may run code, and there is no .safetensors file beside it: convert it.")
    # Exports to other runtimes and the model card cannot change features.
    unread = {"onnx", "openvino", ".cache", "data_config.json"}
    return [path for path in found if not unread.intersection(path.relative_to(folder).parts)]
