"""Split and Dataset, and the registry of datasets with their default settings."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from logitclip.registry import Registry

F = TypeVar("F", bound=Callable[..., Any])
DATASETS = Registry("dataset", injected=("root", "download", "mirror"), package="logitclip.data")


def with_protocol(
    protocol: Mapping[str, Any] | Callable[..., Mapping[str, Any]], *, asymmetric: Mapping[int, int] | None = None
) -> Callable[[F], F]:
    """Give a dataset function what is known about its benchmark without reading any data.

    Args:
        protocol: training defaults under the names of `RunConfig`'s fields: model, epochs, batch_size, lr, momentum,
            nesterov, weight_decay, schedule, milestones (shares of the epochs), augment, drop_last; or a function from
            knobs of the dataset to these.
        asymmetric: source class -> target class of asymmetric noise; None: each class to the next.

    Returns:
        A decorator.
    """

    def decorate(function: F) -> F:
        function.protocol, function.asymmetric = protocol, asymmetric  # type: ignore[attr-defined]
        return function

    return decorate


def protocol_of(spec: str) -> Mapping[str, Any]:
    """The training defaults of a dataset. Reads no data.

    Args:
        spec: Name and knobs of the dataset.

    Returns:
        Values by the names of `RunConfig`'s fields.

    >>> protocol_of("digits")["epochs"], protocol_of("webvision:size=64")["augment"]
    (150, 'crop:size=56')
    """
    name, given = DATASETS.parse(spec)
    protocol = getattr(DATASETS[name], "protocol", {})
    if isinstance(protocol, Mapping):
        return protocol
    knobs = {knob.name: given.get(knob.name, knob.default) for knob in DATASETS.knobs(name).values()}
    return protocol(**{knob: knobs[knob] for knob in inspect.signature(protocol).parameters})


def asymmetric_of(spec: str) -> Mapping[int, int] | None:
    """The class pairs that asymmetric noise confuses on a dataset. Reads no data.

    Args:
        spec: Name and knobs of the dataset.

    Returns:
        Source class -> target class; None if each class becomes the next one.

    >>> asymmetric_of("cifar10")
    {9: 1, 2: 0, 4: 7, 3: 5, 5: 3}
    """
    return getattr(DATASETS[DATASETS.parse(spec)[0]], "asymmetric", None)


def trusted_test(spec: str) -> bool:
    """Return whether the test labels of a dataset are known to be right: not for your own table or folder.

    >>> trusted_test("cifar10"), trusted_test("table:path=x.csv,label=y")
    (True, False)
    >>> trusted_test("table:path=x.csv,label=y,clean_label=truth")
    True
    """
    name, knobs = DATASETS.split(spec)
    return name not in ("table", "folder") or "clean_label" in knobs


class Examples(Protocol):
    """Inputs indexed by a tensor of positions: a tensor in memory, or files that are decoded on demand."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: Tensor, /) -> Tensor: ...


@dataclass(frozen=True, eq=False, repr=False)
class Split:
    """Inputs with labels. `labels` may be noisy; `clean_labels` are the true labels, if known."""

    x: Examples  # [N, C, H, W] uint8 images or [N, D] float32 features
    labels: Tensor  # [N] int64, or [N, K] float32 when they are soft
    clean_labels: Tensor | None = None  # [N] int64
    rows: Tensor | None = None  # [N] int64, the row of the file or listing that each example comes from

    def __post_init__(self) -> None:
        if len(self.x) != len(self.labels):
            raise ValueError(f"{len(self.x)} inputs and {len(self.labels)} labels do not belong together.")
        if self.clean_labels is not None and len(self.clean_labels) != len(self.labels):
            raise ValueError(f"{len(self.labels)} labels and {len(self.clean_labels)} clean labels differ in number.")

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return f"Split({len(self):,} examples of {list(getattr(self.x, 'shape', '?'))[1:]})"

    def to(self, device: torch.device | str) -> Split:
        """Move all tensors to `device`; image files stay on disk."""
        held = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **{name: value.to(device) for name, value in held.items()})

    def select(self, index: Tensor) -> Split:
        """Return the examples at `index`. Inputs that are not a tensor need a `select` method."""
        x = self.x[index] if isinstance(self.x, Tensor) else self.x.select(index)  # type: ignore[attr-defined]
        optional = {name: getattr(self, name) for name in ("clean_labels", "rows")}
        return Split(x, self.labels[index], **{k: None if v is None else v[index] for k, v in optional.items()})

    def relabel(self, labels: Tensor) -> Split:
        """Replace the labels. The old labels become the clean labels, unless those are known."""
        clean = self.labels if self.clean_labels is None else self.clean_labels
        return replace(self, labels=labels, clean_labels=clean)


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """A training split, a test split and metadata."""

    name: str
    train: Split
    test: Split
    num_classes: int
    class_names: tuple[str, ...]
    asymmetric: Mapping[int, int] | None = None  # source -> target class of asymmetric noise; None: the next class
    mean: tuple[float, ...] = ()  # per channel, of inputs scaled to [0, 1]
    std: tuple[float, ...] = ()
    label_sets: Mapping[str, Tensor] = field(default_factory=dict)  # human labels of the training split, by name

    def __post_init__(self) -> None:
        if len(self.class_names) != self.num_classes:
            raise ValueError(f"{self.name}: {self.num_classes} classes but {len(self.class_names)} class names.")
        for split in (self.train, self.test):
            labels = split.labels
            if (
                labels.dtype == torch.int64
                and len(labels)
                and not 0 <= int(labels.min()) <= int(labels.max()) < self.num_classes
            ):
                bad = labels[(labels < 0) | (labels >= self.num_classes)][0]
                raise ValueError(f"{self.name}: label {int(bad)} is outside 0..{self.num_classes - 1}.")

    def __repr__(self) -> str:
        return f"Dataset({self.name!r}, train={self.train}, test={self.test}, {self.num_classes} classes)"


def locate(path: str, root: str | Path) -> Path:
    """Return `path` itself if it exists, else `path` within `root`."""
    plain = Path(os.path.expanduser(path))
    return plain if path and plain.exists() else Path(root) / plain
