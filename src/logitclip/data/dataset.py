"""Split and Dataset, and the registry of datasets with their default settings."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from logitclip.registry import Registry, attach

F = TypeVar("F", bound=Callable[..., Any])
Defaults = Mapping[str, Any]  # training defaults, by the names of `RunConfig`'s fields
DATASETS = Registry("dataset", injected=("root", "download", "mirror", "raw"), package="logitclip.data")


def with_defaults(
    defaults: Defaults | Callable[..., Defaults],
    *,
    asymmetric: Mapping[int, int] | None = None,
    num_classes: int | None = None,
) -> Callable[[F], F]:
    """Attach the training defaults of a benchmark to a dataset function, so that they are known without its data.

    Args:
        defaults: Training defaults under the names of `RunConfig`'s fields: model, epochs, batch_size, lr, momentum,
            nesterov, weight_decay, schedule, milestones (shares of the epochs), augment, drop_last; or a function from
            knobs of the dataset to these.
        asymmetric: Source class -> target class of asymmetric noise; None: each class to the next.
        num_classes: K, which `asymmetric` belongs to.

    Returns:
        A decorator.

    >>> @with_defaults({"model": "mlp", "epochs": 30, "batch_size": 32, "lr": 0.1})
    ... def wine(root): ...
    >>> wine.defaults["epochs"]
    30
    """
    return attach(defaults=defaults, asymmetric=asymmetric, num_classes=num_classes)


def with_protocol(*args: Any, **options: Any) -> Callable[[F], F]:
    """Do what `with_defaults` does, under its old name, until version 0.3."""
    warnings.warn("with_protocol is called with_defaults now.", DeprecationWarning, stacklevel=2)
    return with_defaults(*args, **options)


def defaults_of(spec: str) -> Defaults:
    """Return the training defaults of a dataset. Reads no data.

    Args:
        spec: Name and knobs of the dataset.

    Returns:
        Values by the names of `RunConfig`'s fields.

    >>> defaults_of("digits")["epochs"], defaults_of("webvision:size=64")["augment"]
    (150, 'crop:size=56')
    """
    defaults = getattr(DATASETS[DATASETS.parse(spec)[0]], "defaults", {})
    return defaults if isinstance(defaults, Mapping) else _call_with_knobs(defaults, spec)


def asymmetric_of(spec: str) -> Mapping[int, int] | None:
    """Return the class pairs that asymmetric noise confuses on a dataset. Reads no data.

    Args:
        spec: Name and knobs of the dataset.

    Returns:
        Source class -> target class; None if each class becomes the next one.

    >>> asymmetric_of("cifar10")
    {9: 1, 2: 0, 4: 7, 3: 5, 5: 3}
    """
    return getattr(DATASETS[DATASETS.parse(spec)[0]], "asymmetric", None)


def classes_of(spec: str) -> int | None:
    """Return the number of classes of a dataset; None if only its data tells.

    >>> classes_of("cifar10"), classes_of("folder")
    (10, None)
    """
    return getattr(DATASETS[DATASETS.parse(spec)[0]], "num_classes", None)


def trusted_test(spec: str) -> bool:
    """Return whether the test labels of a dataset are known to be right; those of your own table or folder are not.

    >>> trusted_test("cifar10"), trusted_test("table:path=x.csv,label=y")
    (True, False)
    >>> trusted_test("table:path=x.csv,label=y,clean_label=truth")
    True
    """
    name = spec.partition(":")[0].strip()
    return name not in ("table", "folder") or "clean_label" in DATASETS.split(spec)[1]


def with_files(describe: Callable[..., Iterable[bytes]]) -> Callable[[F], F]:
    """Attach what tells whether the files have changed that a dataset reads beside those that its spec names.

    Args:
        describe: A function from `root` and knobs to a line for each file, with its name, size and time of change.

    Returns:
        A decorator.
    """
    return attach(describe_files=describe)


def describe_files(spec: str, root: str | Path | None = None) -> Iterable[bytes]:
    """Return a line for each file of a dataset, see `with_files`; nothing for a dataset that does not say."""
    if not DATASETS.knows(spec):  # of a plugin that is not imported
        return ()
    describe = getattr(DATASETS[DATASETS.parse(spec)[0]], "describe_files", None)
    return () if describe is None else _call_with_knobs(describe, spec, data_folder(root))


def _call_with_knobs(function: Callable[..., Any], spec: str, *args: object) -> Any:
    """Call a function with those knobs of a dataset that it takes."""
    name, given = DATASETS.parse(spec)
    known = DATASETS.knobs(name)
    wanted = list(inspect.signature(function).parameters)[len(args) :]
    return function(*args, **{knob: given.get(knob, known[knob].default) for knob in wanted})


class Examples(Protocol):
    """Protocol of inputs that a tensor of positions can index: a tensor in memory, or files decoded on demand.

    >>> class Squares:
    ...     def __len__(self):
    ...         return 100
    ...     def __getitem__(self, index):
    ...         return (index[:, None] ** 2).float()
    >>> Split(Squares(), torch.zeros(100, dtype=torch.int64)).x[torch.tensor([2, 3])]
    tensor([[4.],
            [9.]])
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: Tensor, /) -> Any: ...  # a tensor; of texts, a list


@dataclass(frozen=True, eq=False, repr=False)
class Split:
    """Inputs with labels.

    Attributes:
        x: uint8 images [N, C, H, W] or float32 features [N, D].
        labels: The given labels, which may be noisy: int64 [N], or float32 [N, K] if they are soft.
        clean_labels: The true labels, int64 [N], if known.
        rows: The row of the file or listing that each example comes from, int64 [N].
        beside: Features that an encoder leaves as they are, float32 [N, D].

    Raises:
        ValueError: If the inputs and labels differ in number.

    >>> split = Split(torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]))
    >>> noisy = split.relabel(torch.tensor([0, 1, 1, 1]))
    >>> noisy, noisy.clean_labels
    (Split(4 examples of [2]), tensor([0, 1, 0, 1]))
    """

    x: Examples
    labels: Tensor
    clean_labels: Tensor | None = None
    rows: Tensor | None = None
    beside: Tensor | None = None

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
        optional = {name: getattr(self, name) for name in ("clean_labels", "rows", "beside")}
        return Split(x, self.labels[index], **{k: None if v is None else v[index] for k, v in optional.items()})

    def relabel(self, labels: Tensor) -> Split:
        """Replace the labels. The old labels become the clean labels, unless those are known."""
        clean = self.labels if self.clean_labels is None else self.clean_labels
        return replace(self, labels=labels, clean_labels=clean)


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """A training split, a test split and metadata.

    Attributes:
        name: Name of the dataset.
        train: Training split.
        test: Test split; it may be empty.
        num_classes: K.
        class_names: K names.
        asymmetric: Source class -> target class of asymmetric noise; None: each class to the next.
        mean: Mean of each channel of inputs scaled to [0, 1]; empty: inputs are not shifted.
        std: Standard deviation of each channel; empty: inputs are not rescaled.
        label_sets: Human labels [N] of the training split, by name.
        features: Keys of the cached features that the inputs are, if an encoder computed them.

    Raises:
        ValueError: If there are not K class names, or if a label is outside 0..K-1.

    >>> split = Split(torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]))
    >>> Dataset("toy", split, split, num_classes=2, class_names=("cat", "dog"))
    Dataset('toy', train=Split(4 examples of [2]), test=Split(4 examples of [2]), 2 classes)
    """

    name: str
    train: Split
    test: Split
    num_classes: int
    class_names: tuple[str, ...]
    asymmetric: Mapping[int, int] | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    label_sets: Mapping[str, Tensor] = field(default_factory=dict)
    features: tuple[str, ...] = ()

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


def data_folder(root: str | Path | None = None) -> Path:
    """Return the folder of all data: `root` if given, else $LOGITCLIP_DATA, else ``data``."""
    return Path(os.path.expanduser(root or os.environ.get("LOGITCLIP_DATA") or "data"))


def locate(path: str, root: str | Path) -> Path:
    """Return `path` itself if it exists, else `path` within `root`."""
    plain = Path(os.path.expanduser(path))
    return plain if path and plain.exists() else Path(root) / plain
