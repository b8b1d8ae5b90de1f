"""Batches of a split, and the part of it that is held out for validation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor
from torch.utils.data import DataLoader

from logitclip.data.dataset import Examples, Split


class Holdout(NamedTuple):
    """Positions to train on and to validate on, both sorted, and whether validation sees augmented inputs."""

    train: Tensor
    val: Tensor
    augmented: bool


def hold_out(
    n: int, share: float, *, rule: Literal["random", "released"] = "random", generator: Generator | None = None
) -> Holdout:
    """Set a share of `n` training examples aside, labels as they are: with noise, validation is on noisy labels.

    Args:
        share: of the examples, to validate on: 0.1 is 5,000 of CIFAR's 50,000. 0: none.
        rule: "random": drawn with `generator`, evaluated without augmentation. "released": what the paper's code does,
            the last ones by position, evaluated with the training augmentation.

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
    order = order[labels[order].argsort(stable=True)]  # by class, in random order within each
    counts = torch.bincount(labels)
    rank = torch.arange(len(labels)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    start, stop = ((counts * share * part).round().long() for part in (fold, fold + 1))
    stop = torch.minimum(stop, start + counts - 1)  # at least one example of every class is trained on
    tested = (rank >= start.repeat_interleave(counts)) & (rank < stop.repeat_interleave(counts))
    if not tested.any() and share * len(labels) >= 1:  # only tiny classes: take every n-th example of all classes
        tested = (torch.arange(len(labels)) % folds == fold) & (counts > 1).repeat_interleave(counts)
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
    """The positions in `index`, batch by batch; shuffled if there is a generator.

    Of `world` processes, the one of number `rank` owns the positions that leave that rest when divided by `world`: the
    same ones in every epoch, so that what belongs to an example can stay where it is. All get as many batches.

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
    return own.tensor_split(steps)  # a few examples short of a batch: all batches a little smaller, none missing


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
    """Un-augmented batches ``(index, x, y)`` on `device`; `index` are positions in the split, whatever the order.

    Inputs in memory are selected where they are: move the split to the device once, with `Split.to`. Inputs on disk are
    decoded in `workers` processes, some batches ahead; nothing random happens there, so their number changes nothing.

    Args:
        index: the positions to go through; all of them by default.
        generator: shuffles them, if given. It is on the CPU.
        drop_last: leave out a last batch that is not full.
        rank: of this process among `world`, see `batch_indices`.

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
    there = torch.cat(plan).to(device).split([len(index) for index in plan])  # one transfer, not one for each batch

    def select(values: Tensor) -> Iterator[Tensor]:
        resident = values.device == there[0].device
        for index in there if resident else plan:
            yield values.index_select(0, index).to(device, non_blocking=True)

    inputs = select(split.x) if isinstance(split.x, Tensor) else _decoded(split.x, plan, workers, device)
    yield from zip(there, inputs, select(split.labels), strict=True)


def _decoded(examples: Examples, plan: tuple[Tensor, ...], workers: int, device: torch.device) -> Iterator[Tensor]:
    loader = DataLoader(
        examples,  # type: ignore[arg-type]  # indexed by a whole batch of positions at a time
        sampler=plan,
        batch_size=None,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # it would draw the seeds of its workers from the global one
    )
    try:
        for x in loader:
            yield x.to(device, non_blocking=True)
    except ValueError as error:  # a worker's comes with its traceback as text; the sentence is at its end
        raise ValueError(str(error).rpartition("ValueError: ")[2].strip()) from error
