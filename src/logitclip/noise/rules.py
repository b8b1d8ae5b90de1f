"""The noise rules: pure functions of labels and a generator.

A rule takes class labels as a tensor, an array or a list and returns new ones of the same kind (arrays for lists). It
changes neither its input nor the global random state.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from logitclip.noise.checks import (
    check_choice,
    check_generator,
    check_rate,
    class_labels,
    inputs_of,
    is_integer,
    read_array,
    read_matrix,
)
from logitclip.registry import Registry

NOISES = Registry("noise", injected=("generator", "images", "mapping", "label_sets"))

Draw = Literal["exact", "per_class", "independent"]
Arrows = Literal["map", "blocks", "pairs"]


def rule(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """Register a noise rule under the name of the function.

    The function gets a checked int64 copy of the labels, which it may change; the public function takes labels as a
    tensor, an array or a list and returns the same kind. Keyword-only parameters are knobs, except `generator`,
    `images`, `mapping` and `label_sets`, which `apply` supplies.

    Args:
        function: ``(labels [N], num_classes, *, knobs) -> labels [N]``.

    Returns:
        The public function.

    Raises:
        ValueError: If the name is taken.

    >>> @rule
    ... def first_class(labels, num_classes, *, rate: float, generator: torch.Generator):
    ...     '''Move a share `rate` of the labels to class 0.'''
    ...     return labels.masked_fill(torch.rand(len(labels), generator=generator) < rate, 0)
    >>> first_class([0, 1, 2], 3, rate=1.0, generator=torch.Generator())
    array([0, 0, 0])
    """

    takes_generator = "generator" in inspect.signature(function).parameters

    @functools.wraps(function)
    def noise(labels: Any, num_classes: int, **options: Any) -> Any:
        if takes_generator:
            check_generator(options.get("generator"))
        noisy = function(class_labels(labels, num_classes), num_classes, **options)
        return noisy.to(labels.device) if isinstance(labels, Tensor) else noisy.numpy()

    return NOISES.register(noise)


# -- the rules ---------------------------------------------------------------------------------------------------------


@rule
def none(labels: Tensor, num_classes: int) -> Tensor:
    """Keep the labels.

    Args:
        labels: Class labels, integers [N].
        num_classes: K.

    Returns:
        The same labels [N].

    Raises:
        ValueError: If a label is not in 0..K-1.

    >>> none([0, 1, 2], 3)
    array([0, 1, 2])
    """
    return labels


@rule
def symmetric(
    labels: Tensor,
    num_classes: int,
    *,
    rate: float,
    draw: Draw = "exact",
    include_self: bool = False,
    generator: torch.Generator,
) -> Tensor:
    """Flip a share `rate` of the labels to another class, chosen uniformly: eta_jk = rate / (K - 1).

    Args:
        labels: Class labels, integers [N].
        num_classes: K.
        rate: Share of the labels to flip.
        draw: Which labels to flip. "exact": exactly that share of all labels (the released code); "per_class": exactly
            that share of each class; "independent": each label with probability `rate`.
        include_self: Draw the new label from all K classes, as DivideMix and SOP do: one in K stays right, so the share
            of wrong labels is rate * (K - 1) / K.
        generator: Source of randomness, on the CPU.

    Returns:
        Noisy labels [N].

    Raises:
        ValueError: If a label or an option is out of range.

    >>> clean = torch.arange(1000) % 10
    >>> noisy = symmetric(clean, 10, rate=0.5, generator=torch.Generator().manual_seed(0))
    >>> int((noisy != clean).sum())
    500
    """
    chosen = choose(labels, num_classes, rate, draw, generator)
    if include_self:
        labels[chosen] = torch.randint(num_classes, chosen.shape, generator=generator)
    else:  # 1 to K - 1 steps around the circle of classes
        step = torch.randint(1, num_classes, chosen.shape, generator=generator)
        labels[chosen] = (labels[chosen] + step) % num_classes
    return labels


@rule
def asymmetric(
    labels: Tensor,
    num_classes: int,
    *,
    rate: float,
    variant: Arrows = "map",
    draw: Draw = "exact",
    mapping: Mapping[int, int] | None = None,
    generator: torch.Generator,
) -> Tensor:
    """Flip a share `rate` of the labels along a fixed mapping between similar classes.

    Three different rules of this name are in use for CIFAR-100; the record names the variant.

    Args:
        labels: Class labels, integers [N].
        num_classes: K.
        rate: Share of the labels to flip.
        variant: "map": along `mapping`; "blocks": to the next class inside blocks of five consecutive classes, the last
            back to the first; "pairs": two random classes of each block of five are swapped, the others stay.
        draw: As for `symmetric`. "exact" (the released code) chooses the share among *all* labels. A class without an
            arrow keeps its labels, so fewer than `rate` of all labels are wrong.
        mapping: Source class -> target class, for the variant "map"; CIFAR-10 maps five classes. None: every class
            to the next one, the last to the first.
        generator: Source of randomness, on the CPU.

    Returns:
        Noisy labels [N].

    Raises:
        ValueError: If a label, an option or an arrow is out of range.

    >>> asymmetric([0, 1, 2, 3], 4, rate=1.0, mapping={3: 1}, generator=torch.Generator())
    array([0, 1, 2, 1])
    """
    target = _arrows(num_classes, variant, mapping, generator)
    chosen = choose(labels, num_classes, rate, draw, generator)
    labels[chosen] = target[labels[chosen]]
    return labels


@rule
def pair(labels: Tensor, num_classes: int, *, rate: float, draw: Draw = "exact", generator: torch.Generator) -> Tensor:
    """Flip a share `rate` of the labels to the next class, the last to the first, for every dataset.

    Args:
        labels: Class labels, integers [N].
        num_classes: K.
        rate: Share of the labels to flip.
        draw: As for `symmetric`.
        generator: Source of randomness, on the CPU.

    Returns:
        Noisy labels [N].

    Raises:
        ValueError: If a label or an option is out of range.

    >>> pair([0, 1, 2], 3, rate=1.0, generator=torch.Generator())
    array([1, 2, 0])
    """
    chosen = choose(labels, num_classes, rate, draw, generator)
    labels[chosen] = (labels[chosen] + 1) % num_classes
    return labels


@rule
def transition(labels: Tensor, num_classes: int, *, matrix: Any, generator: torch.Generator) -> Tensor:
    """Draw each label from the row of its class: P(noisy = k | clean = j) = matrix[j, k].

    Args:
        labels: Class labels, integers [N].
        num_classes: K.
        matrix: [K, K], with rows that sum to one; in a spec, the path of a .npy, .npz or .csv file.
        generator: Source of randomness, on the CPU.

    Returns:
        Noisy labels [N].

    Raises:
        ValueError: If a label is out of range, or `matrix` is not a transition matrix of K classes.

    >>> transition([0, 1, 1], 2, matrix=[[0, 1], [0, 1]], generator=torch.Generator())
    array([1, 1, 1])
    """
    rows = read_matrix(matrix, num_classes)
    u = torch.rand(len(labels), dtype=torch.float64, generator=generator)
    noisy = torch.empty_like(labels)
    for c, members in by_class(labels, num_classes):
        noisy[members] = inverse_cdf(rows[c], u[members])
    return noisy


@rule
def open_set(labels: Tensor, num_classes: int, *, rate: float, source: Any, generator: torch.Generator) -> Tensor:
    """Replace a share `rate` of the *images* by images of another dataset, and keep the labels.

    `apply` replaces the images; it keeps the pairs that this function returns in `NoisyLabels.replaced` and the new
    images in `NoisyLabels.images`.

    Args:
        labels: Class labels, integers [N].
        num_classes: K.
        rate: Share of the images to replace.
        source: The other images, or their dataset; in a spec, its name, which `load` of `apply` resolves.
        generator: Source of randomness, on the CPU.

    Returns:
        Not labels but pairs [M, 2]: a position in this dataset and the index of the source image that replaces it. No
        position or image occurs twice.

    Raises:
        ValueError: If a label or the rate is out of range, or the source is a name or has too few images.

    >>> exchange = open_set([0, 1, 2, 0], 3, rate=0.5, source=torch.zeros(9, 2), generator=torch.Generator())
    >>> exchange.shape
    (2, 2)
    """
    if isinstance(source, str):
        raise ValueError(f"open_set needs the images of {source!r}, not only the name: pass load=... to noise.apply.")
    positions, available = choose(labels, num_classes, rate, "exact", generator), len(inputs_of(source))
    if available < len(positions):
        raise ValueError(f"open_set replaces {len(positions)} images but its source has only {available}.")
    return torch.stack([positions, torch.randperm(available, generator=generator)[: len(positions)]], dim=1)


SETS = {  # usual name -> name in the files of CIFAR-10N and CIFAR-100N
    "worst": "worse_label",
    "aggregate": "aggre_label",
    "random1": "random_label1",
    "random2": "random_label2",
    "random3": "random_label3",
    "fine": "noisy_label",
}


@rule
def real(labels: Tensor, num_classes: int, *, set: str, label_sets: Mapping[str, Any] | None = None) -> Tensor:
    """Use human labels: a label set that comes with the dataset.

    Args:
        labels: Class labels, integers [N].
        num_classes: K.
        set: The name in the dataset's files, or one of worst, aggregate, random1, random2, random3 (CIFAR-10N) and fine
            (CIFAR-100N).
        label_sets: Human labels [N] by name.

    Returns:
        Human labels [N].

    Raises:
        ValueError: If there is no label set of this name, or it has another number of labels.

    >>> real([0, 1, 2], 3, set="mine", label_sets={"mine": [0, 2, 2]})
    array([0, 2, 2])
    """
    found = dict(label_sets or {})
    if not found:
        raise ValueError(
            f"The noise 'real:set={set}' needs human labels, and this dataset came without any: for CIFAR, put "
            "CIFAR-10_human.pt or CIFAR-100_human.pt beside the data."
        )
    name = set if set in found else SETS.get(set, set)
    if name not in found:
        friendly = [alias for alias, official in SETS.items() if official in found]
        raise ValueError(f"The dataset has no label set {set!r}. It has: {', '.join([*found, *friendly])}.")
    chosen = class_labels(found[name], num_classes, what=f"the label set {name!r}")
    if len(chosen) != len(labels):
        raise ValueError(f"The label set {name!r} has {len(chosen)} labels for {len(labels)} examples.")
    return chosen


@rule
def votes(labels: Tensor, num_classes: int, *, counts: Any) -> Tensor:
    """Soft targets from annotator votes, as of CIFAR-10H: target_ik = counts_ik / sum_j counts_ij.

    Args:
        labels: Class labels, integers [N].
        num_classes: K.
        counts: [N, K], the number of annotators who chose label k for example i; in a spec, the path of a .npy, .npz or
            .csv file.

    Returns:
        Soft labels, float32 [N, K].

    Raises:
        ValueError: If `counts` has another shape or a negative entry, or if an example has no votes.

    >>> votes([0, 1], 2, counts=[[3, 1], [0, 5]]).tolist()
    [[0.75, 0.25], [0.0, 1.0]]
    """
    table, shape = read_array(counts, "counts"), (len(labels), num_classes)
    if table.shape != shape:
        raise ValueError(f"counts must have a row per example and a column per class, {shape}, got {(*table.shape,)}.")
    if not bool((table.isfinite() & (table >= 0)).all()):
        raise ValueError("counts must be finite and not negative.")
    total = table.sum(1, keepdim=True)
    if not bool((total > 0).all()):
        raise ValueError(f"Example {int(total.argmin())} has no votes: every row of counts needs at least one.")
    return (table / total).float()


@rule
def file(labels: Tensor, num_classes: int, *, path: str, source: str | None = None) -> Tensor:
    """Read the labels from a file, after checking that it fits these clean labels.

    Args:
        labels: Clean labels, integers [N].
        num_classes: K.
        path: A record that `NoisyLabels.save` wrote; or a .json, .csv or .npy file with a class number for each example
            (or, in a .csv or .npy file, its probabilities of the classes), as ``cifar10_dependent_0.4.json``, published
            with the LogitClip code.
        source: The dataset of the new images, for a published file that replaces images (``cifar10_open_0.4.json``);
            only `apply` can read such a file.

    Returns:
        Noisy labels [N].

    Raises:
        ValueError: If the file is missing, damaged or made for other data, or if it replaces images.

    >>> import json, tempfile
    >>> with tempfile.NamedTemporaryFile("w", suffix=".json") as saved:
    ...     json.dump([0, 1, 2, 1] * 10, saved)
    ...     saved.flush()
    ...     noisy = file([0, 1, 2, 0] * 10, 3, path=saved.name)
    >>> noisy[:4]
    array([0, 1, 2, 1])
    """
    from logitclip.noise.records import NoisyLabels  # records import the rules

    record = NoisyLabels.from_file(path, labels, num_classes, source)
    if record.replaced is not None:
        raise ValueError(f"{path} replaces images, not labels: read it with noise.apply('file:path={path}', ...).")
    return record.labels


# -- parts of the rules ------------------------------------------------------------------------------------------------


def choose(labels: Tensor, num_classes: int, rate: float, draw: str, generator: torch.Generator) -> Tensor:
    """Return the positions of the labels to flip. With the same seed, a higher rate flips a superset."""
    check_rate(rate)
    check_choice("draw", draw, Draw)
    n = len(labels)
    if draw == "independent":
        return (torch.rand(n, dtype=torch.float64, generator=generator) < rate).nonzero().squeeze(1)
    order = torch.randperm(n, generator=generator)
    if draw == "exact":
        return order[: _count_of(rate, n)]
    # In random order, the first members of a class are a random part of it.
    members = by_class(labels[order], num_classes)
    return torch.cat([order[found[: _count_of(rate, len(found))]] for _, found in members])


def _count_of(rate: float, n: int) -> int:
    return math.floor(rate * n + 1e-6)  # 0.29 * 100 is 28.999999999999996


def _arrows(num_classes: int, variant: str, mapping: Mapping[int, int] | None, generator: torch.Generator) -> Tensor:
    """Return the class that each class becomes, [K]; itself if it has no arrow."""
    check_choice("variant", variant, Arrows)
    classes = torch.arange(num_classes)
    target = classes.clone()
    if variant != "map":
        if mapping is not None:
            raise ValueError(f"mapping belongs to the variant 'map' of asymmetric noise, not to {variant!r}.")
        for block in classes.split(5):
            if variant == "blocks":
                target[block] = block.roll(-1)
            elif len(block) > 1:
                two = block[torch.randperm(len(block), generator=generator)[:2]]
                target[two] = two.flip(0)
        return target
    if mapping is None:
        return (classes + 1) % num_classes
    if not mapping:
        raise ValueError("mapping is empty, so asymmetric noise would change nothing; None means the next class.")
    for source, to in mapping.items():
        if not all(is_integer(c) and 0 <= c < num_classes for c in (source, to)):
            raise ValueError(f"mapping joins classes in 0..{num_classes - 1}, got the arrow {source!r} -> {to!r}.")
        target[source] = to
    return target


def arrow_matrix(
    num_classes: int,
    *,
    rate: float,
    variant: Literal["map", "blocks"] = "map",
    mapping: Mapping[int, int] | None = None,
) -> Tensor:
    """Return the transition matrix of `asymmetric` noise.

    Args:
        num_classes: K.
        rate, variant, mapping: As for `asymmetric`.

    Returns:
        The matrix, float64 [K, K].

    Raises:
        ValueError: If an option or an arrow is out of range, or if the variant has no fixed matrix.

    >>> arrow_matrix(3, rate=0.4, mapping={0: 2}).tolist()
    [[0.6, 0.0, 0.4], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """
    check_rate(rate)
    if variant not in ("map", "blocks"):
        raise ValueError(f"Only the variants map and blocks of asymmetric noise have a fixed matrix, got {variant!r}.")
    target = _arrows(num_classes, variant, mapping, torch.Generator())
    stays = torch.eye(num_classes, dtype=torch.float64)
    return (1 - rate) * stays + rate * stays[target]


def inverse_cdf(probabilities: Tensor, u: Tensor) -> Tensor:
    """Return the first class whose cumulative probability exceeds u; probabilities are [K], or a row for each u."""
    cdf = probabilities.double().cumsum(-1)
    u = u * cdf[..., -1]  # rows sum to one up to rounding; no class of probability zero is ever drawn
    return torch.searchsorted(cdf, u if cdf.ndim == 1 else u[:, None], right=True).view(-1)


def by_class(labels: Tensor, num_classes: int) -> Iterator[tuple[int, Tensor]]:
    """Return (class, positions of its members) for every class, also for empty ones."""
    sizes = labels.bincount(minlength=num_classes).tolist()
    # numpy uses radix sort for 16 bits: five times as fast
    classes = labels.numpy().astype(np.uint16 if num_classes <= 2**16 else np.int64)
    return enumerate(torch.from_numpy(classes.argsort(kind="stable")).split(sizes))
