"""Batches, validation splits and stratified splits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor
from torch.utils.data import DataLoader

from logitclip.data.dataset import Dataset, Examples, Split
from logitclip.rng import stream


class Holdout(NamedTuple):
    """A split of the training examples into a training and a validation part.

    Attributes:
        train: Sorted positions of the training part, int64 [M].
        val: Sorted positions of the validation part, int64 [V].
        augmented: Whether to augment validation inputs.

    >>> Holdout(train=torch.tensor([0, 2]), val=torch.tensor([1]), augmented=False).val
    tensor([1])
    """

    train: Tensor
    val: Tensor
    augmented: bool


def hold_out(
    n: int, share: float, *, rule: Literal["random", "released"] = "random", generator: Generator | None = None
) -> Holdout:
    """Split `n` training examples into a training and a validation part. Validation labels stay noisy.

    Args:
        n: Number of examples.
        share: Share of the validation part; 0 for none.
        rule: "random" draws it with `generator` and evaluates without augmentation. "released" follows the paper's
            code: the last examples, evaluated with the training augmentation.
        generator: Needed by the rule "random".

    Returns:
        The sorted positions of both parts, and whether to augment the validation part.

    Raises:
        ValueError: If the share is out of range or leaves one part empty.

    >>> hold_out(10, 0.2, rule="released").val
    tensor([8, 9])
    """
    if not 0 <= share < 1:
        raise ValueError(f"The share held out must be at least 0 and below 1, got {share}.")
    if rule not in ("random", "released"):
        raise ValueError(f"rule must be 'random' or 'released', got {rule!r}.")
    count = round(share * n)
    if share and not 0 < count < n:
        raise ValueError(f"A share of {share} of {n} examples leaves none to train or to validate on.")
    if rule == "released" or not count:
        order = torch.arange(n)
    elif generator is None:
        raise ValueError("The rule 'random' needs a generator.")
    else:
        order = torch.randperm(n, generator=generator)
    train, val = order[: n - count].sort().values, order[n - count :].sort().values
    return Holdout(train, val, augmented=rule == "released")


def limit_examples(dataset: Dataset, train: int, test: int) -> Dataset:
    """Keep `train` and `test` examples, a fixed random choice that is the same for every seed; 0 keeps all."""
    if train:
        index = choose_examples(len(dataset.train), train, "train")
        label_sets = {name: labels[index] for name, labels in dataset.label_sets.items()}
        dataset = replace(dataset, train=dataset.train.select(index), label_sets=label_sets)
    if test:
        dataset = replace(dataset, test=dataset.test.select(choose_examples(len(dataset.test), test, "test")))
    return dataset


def choose_examples(examples: int, limit: int, split: str) -> Tensor:
    """Return the sorted positions of the examples that `limit_examples` keeps of a split."""
    return torch.randperm(examples, generator=stream("cpu", 0, "limit", split))[:limit].sort().values


@dataclass(frozen=True)
class Part:
    """The part of a dataset to test on."""

    share: float = 0.2  # of each class
    fold: int = 0  # which of the `1 / share` disjoint parts
    seed: int = 0  # of the split


def stratified_split(labels: Tensor, share: float, seed: int, *, fold: int = 0) -> tuple[Tensor, Tensor]:
    """Split positions into a training and a test part with the same share of every class.

    Args:
        labels: Class of each example, int64 [N].
        share: Share of each class in the test part.
        seed: Seed of the random order within classes.
        fold: Which of the `1 / share` disjoint test parts to use. Together they cover every example, except that a
            class with one example always stays in the training part.

    Returns:
        Training and test positions, both sorted.

    Raises:
        ValueError: If `share` is not between 0 and 1, `fold` is out of range, or the test part would be empty.

    >>> train, test = stratified_split(torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]), 0.25, seed=0)
    >>> len(train), len(test)
    (6, 2)
    """
    if not 0 < share < 1:
        raise ValueError(f"test must be a share between 0 and 1, got {share}.")
    folds = max(1, round(1 / share))
    if not 0 <= fold < folds:
        raise ValueError(f"fold must be in 0..{folds - 1} for test={share}, got {fold}.")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    order = order[labels[order].argsort(stable=True)]  # sorted by class, in random order within each
    counts = torch.bincount(labels)
    rank = torch.arange(len(labels)) - (counts.cumsum(0) - counts).repeat_interleave(counts)

    def part(fold: int) -> Tensor:
        start, stop = ((counts * share * k).round().long() for k in (fold, fold + 1))
        stop = torch.minimum(stop, start + counts - 1)  # keep at least one example of every class for training
        return (rank >= start.repeat_interleave(counts)) & (rank < stop.repeat_interleave(counts))

    tested, first = part(fold), part(0)
    related = range(folds) if fold else [0]  # fold 0 does not depend on the others
    if share * len(labels) >= 1 and not all(part(k).any() for k in related):
        # Only tiny classes. Fold 0 takes every n-th example if it is empty; the others take turns with the rest.
        several = (counts > 1).repeat_interleave(counts)
        if not first.any():
            first = (torch.arange(len(labels)) % folds == 0) & several
        rest = several & ~first
        tested = first if fold == 0 else rest & ((rest.cumsum(0) - 1) % (folds - 1) == fold - 1)
    if not tested.any():
        raise ValueError(f"test={share} of each class is less than one of {len(labels)} examples; raise it.")
    return order[~tested].sort().values, order[tested].sort().values


def batch_indices(
    index: Tensor,
    batch_size: int,
    *,
    generator: Generator | None = None,
    drop_last: bool = False,
    rank: int = 0,
    world: int = 1,
) -> tuple[Tensor, ...]:
    """Divide positions into batches.

    Rank r owns the positions with position % world == r, in every epoch, so per-example state never moves. All ranks
    get the same number of batches.

    Args:
        index: Positions, int64 [N].
        batch_size: Examples per batch and rank.
        generator: Shuffles the positions, if given.
        drop_last: Drop an incomplete last batch.
        rank: This process, in 0..world-1.
        world: Number of processes.

    Returns:
        The positions of each batch of this rank.

    Raises:
        ValueError: If a rank would get no batch.

    >>> batch_indices(torch.arange(5), 2)
    (tensor([0, 1]), tensor([2, 3]), tensor([4]))
    >>> batch_indices(torch.arange(5), 2, rank=1, world=2)
    (tensor([1]), tensor([3]))
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
    if not 0 <= rank < world:
        raise ValueError(f"rank must be in 0..{world - 1}, got {rank}.")
    if not len(index):
        return ()
    sizes = torch.bincount(index % world, minlength=world).tolist()
    own = index[index % world == rank]
    if generator is not None:
        own = own[torch.randperm(len(own), generator=generator)]
    if drop_last:
        steps = min(sizes) // batch_size
        if not steps:
            raise ValueError(
                f"{min(sizes)} examples make no batch of {batch_size}: lower batch_size, or keep the last batch."
            )
        return own[: steps * batch_size].split(batch_size)
    steps = -(-max(sizes) // batch_size)
    if min(sizes) < steps:
        raise ValueError(
            f"{min(sizes)} examples in one of {world} processes make no {steps} batches: raise batch_size."
        )
    if -(-len(own) // batch_size) == steps:
        return own.split(batch_size)
    return own.tensor_split(steps)  # one batch short: make all batches a little smaller instead


def batches(
    split: Split,
    batch_size: int,
    *,
    index: Tensor | None = None,
    generator: Generator | None = None,
    drop_last: bool = False,
    rank: int = 0,
    world: int = 1,
    workers: int = 0,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Iterate over un-augmented batches ``(index, x, y)`` on `device`; `index` are positions in the split.

    Tensors are indexed on their device: move the split there once, with `Split.to`. Image files are decoded in
    `workers` processes, a few batches ahead. Decoding is deterministic, so the number of workers changes no result.

    Args:
        split: The examples.
        batch_size: Examples per batch and rank.
        index: The positions to use; all by default.
        generator: Shuffles them, if given; on the CPU.
        drop_last: Drop an incomplete last batch.
        rank, world: See `batch_indices`.
        workers: Processes that decode images.
        device: Where the batches go.

    Returns:
        An iterator over (positions [B] int64, inputs [B, ...], labels [B]).

    Raises:
        ValueError: If a rank would get no batch.

    >>> split = Split(torch.zeros(5, 2), torch.arange(5))
    >>> [y.tolist() for _, _, y in batches(split, 2)]
    [[0, 1], [2, 3], [4]]
    """
    every = torch.arange(len(split)) if index is None else index
    plan = batch_indices(every, batch_size, generator=generator, drop_last=drop_last, rank=rank, world=world)
    return _batches(split, plan, workers, torch.device(device))


def _batches(
    split: Split, plan: tuple[Tensor, ...], workers: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    if not plan:
        return
    there = torch.cat(plan).to(device).split([len(index) for index in plan])  # one transfer for all batches

    def select(values: Tensor) -> Iterator[Tensor]:
        resident = values.device == there[0].device
        for index in there if resident else plan:
            yield values.index_select(0, index).to(device, non_blocking=True)

    inputs = select(split.x) if isinstance(split.x, Tensor) else _decode_batches(split.x, plan, workers, device)
    yield from zip(there, inputs, select(split.labels), strict=True)


def _decode_batches(
    examples: Examples, plan: tuple[Tensor, ...], workers: int, device: torch.device
) -> Iterator[Tensor]:
    loader = DataLoader(
        examples,  # type: ignore[arg-type]  # indexed by one batch of positions at a time
        sampler=plan,
        batch_size=None,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # otherwise it uses the global one for the seeds of its workers
    )
    try:
        for x in loader:
            yield x.to(device, non_blocking=True)
    except ValueError as error:  # a worker's message is a traceback; our sentence is its end
        raise ValueError(str(error).rpartition("ValueError: ")[2].strip()) from error
