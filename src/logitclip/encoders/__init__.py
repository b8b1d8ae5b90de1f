"""Pretrained encoders by name, from images or texts to features; `features.py` keeps what they compute.

An encoder is a function `fn(*, knobs, takes, device) -> Encoder`; `reads` names the files that its numbers depend on.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from logitclip.encoders._weights import downloads_allowed
from logitclip.files import Json, sha256_once
from logitclip.launch import find_device
from logitclip.registry import Registry, attach

__all__ = [
    "AUTO_ENCODERS",
    "ENCODERS",
    "HEAD",
    "Encoder",
    "InputKind",
    "build",
    "downloads_allowed",
    "identify",
    "is_ours",
    "reads",
]

ENCODERS = Registry("encoder", injected=("takes", "device"), package=__name__)

InputKind = Literal["images", "texts"]
Kind = InputKind  # its older name, which plugins import
F = TypeVar("F", bound=Callable[..., Any])

# What `auto` stands for; docs/photos_and_texts.md says why.
AUTO_ENCODERS: Mapping[InputKind, str] = {
    "images": "hf:name=facebook/dinov2-small",
    "texts": "hf:name=intfloat/multilingual-e5-small,prompt=query:",
}
AUTO = AUTO_ENCODERS  # its older name, which plugins may import

# Defaults of a run on features, decided on noisy validation labels; docs/photos_and_texts.md has the numbers.
HEAD: Mapping[str, Any] = {
    "model": "mlp:depth=0",
    "epochs": 20,
    "batch_size": 128,
    "lr": 0.01,
    "momentum": 0.9,
    "nesterov": True,
    "weight_decay": 0.05,
    "schedule": "cosine",
    "milestones": (),
    "augment": "none",
    "drop_last": False,
}


class Encoder(Protocol):
    """Protocol of a loaded encoder: it prepares one example at a time, and encodes batches of them.

    `prepare` is called in background threads with a PIL image in RGB or with a text.

    >>> class Lengths:
    ...     width, size = 1, 0
    ...     def prepare(self, example):
    ...         return len(example)
    ...     def __call__(self, batch):
    ...         return torch.tensor(batch, dtype=torch.float32)[:, None]
    >>> encode: Encoder = Lengths()
    >>> encode([encode.prepare(text) for text in ("a", "bcd")])
    tensor([[1.],
            [3.]])
    """

    width: int  # D
    size: int  # shorter side in pixels below which images need not be decoded; 0: at their full size

    def prepare(self, example: Any, /) -> Any: ...
    def __call__(self, batch: list[Any], /) -> Tensor: ...  # [N, D]


def reads(find: Callable[..., Iterable[Path]]) -> Callable[[F], F]:
    """Name the files that the features of an encoder depend on: weights, and files of the tokenizer or processor.

    Args:
        find: From the knobs of the encoder to the files.

    Returns:
        A decorator.
    """
    return attach(reads=find)


@ENCODERS.register
def none(*, takes: InputKind, device: torch.device) -> Encoder:
    """No encoder: the network gets the inputs themselves."""
    raise ValueError("The encoder none has no features.")


def build(spec: str, takes: InputKind, *, accelerator: str = "auto") -> Encoder:
    """Load an encoder.

    Args:
        spec: Name and knobs: ``"hf:FOLDER"``.
        takes: What it gets: images or texts.
        accelerator: One of auto, cpu, cuda and mps. On a GPU the encoder computes in half precision.

    Returns:
        The encoder, in evaluation mode.

    Raises:
        ValueError: If the weights are missing or unsafe, or the encoder does not take such inputs.
        ImportError: If its package is not installed.
    """
    return ENCODERS.build(spec)(takes=takes, device=find_device(accelerator))


def files_of(spec: str) -> list[Path]:
    """Return the files that an encoder reads, see `reads`; none for one that does not say."""
    name, knobs = ENCODERS.parse(spec)
    find: Callable[..., Iterable[Path]] | None = getattr(ENCODERS[name], "reads", None)
    return [] if find is None else list(find(**knobs))


def identify(spec: str) -> Json:
    """Return what the features of an encoder depend on: its spec without its place, and the digests of its files.

    Args:
        spec: Name and knobs.

    Returns:
        `spec` and `files`, for JSON. A folder and a name on the hub with the same files have the same identity.

    Raises:
        ValueError: If its files are missing.
    """
    name, knobs = ENCODERS.parse(spec)
    found = files_of(spec)
    folder = Path(os.path.commonpath([path.parent for path in found])) if found else Path()
    files = {path.relative_to(folder).as_posix(): sha256_once(path) for path in found}
    if not is_ours(spec):  # a plugin may change
        files["plugin"] = sha256_once(Path(str(inspect.getsourcefile(ENCODERS[name]))))
    counted = {knob: value for knob, value in knobs.items() if knob != "name"}
    default = {knob.name: knob.default for knob in ENCODERS.knobs(name).values()}
    shown = {knob: counted[knob] for knob in default if knob in counted and counted[knob] != default[knob]}
    return {"spec": ENCODERS.format(name, shown), "files": files}


def is_ours(spec: str) -> bool:
    """Return whether an encoder is one of this package, not of a plugin."""
    name = spec.partition(":")[0].strip()
    return name in ENCODERS and ENCODERS[name].__module__.startswith(f"{__name__}.")
