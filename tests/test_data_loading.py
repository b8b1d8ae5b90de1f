"""Batches: every example where it belongs, in memory and on disk, in one process and in several."""

import itertools
import os
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import as_tensor

from logitclip.data import Dataset, Split, batch_indices, batches, hold_out, load
from logitclip.data._loading import stratified_split


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


class OnDisk:
    """A stand-in for files: decodes `i` to a constant image of value i; some positions are damaged."""

    def __init__(self, n, damaged=()):
        self.n, self.damaged = n, damaged

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        for i in index.tolist():
            if i in self.damaged:
                raise ValueError(f"image{i}.jpg is not a readable image; repair it.")
        return index.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 4, 4).clone()


def split(n=20):
    return Split(torch.arange(n, dtype=torch.float32).view(n, 1), torch.arange(n) % 7)


# -- validation ------------------------------------------------------------------------------------------------------


def test_ten_percent_of_cifar_is_5000():
    held = hold_out(50_000, 0.1, generator=generator())
    assert len(held.val) == 5_000
    assert torch.equal(torch.cat([held.train, held.val]).sort().values, torch.arange(50_000))
    assert not held.augmented
    assert torch.equal(held.val, hold_out(50_000, 0.1, generator=generator()).val)
    assert not torch.equal(held.val, hold_out(50_000, 0.1, generator=generator(1)).val)
    assert 2200 < int((held.val < 25_000).sum()) < 2800


def test_the_released_rule_takes_the_last_ones_with_augmentation():
    held = hold_out(50_000, 0.1, rule="released")
    assert torch.equal(held.val, torch.arange(45_000, 50_000))
    assert torch.equal(held.train, torch.arange(45_000))
    assert held.augmented


def test_no_validation():
    held = hold_out(10, 0.0)
    assert len(held.val) == 0
    assert torch.equal(held.train, torch.arange(10))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"share": 1.0}, "must be at least 0 and below 1, got 1.0"),
        ({"share": -0.1}, "got -0.1"),
        ({"share": 0.01}, "leaves none"),
        ({"share": 0.1, "rule": "first"}, "rule must be 'random' or 'released', got 'first'"),
        ({"share": 0.1}, "needs a generator"),
    ],
)
def test_wrong_shares(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        hold_out(10, **arguments)


# -- batches of indices ----------------------------------------------------------------------------------------------


@given(
    n=st.integers(1, 60),
    batch_size=st.integers(1, 9),
    world=st.integers(1, 4),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    part=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_ranks_own_fixed_examples_and_get_as_many_batches(n, batch_size, world, drop_last, shuffle, part):
    index = torch.randperm(n, generator=generator(n))[: n // 2 + 1] if part else torch.arange(n)
    try:
        plans = [
            batch_indices(
                index,
                batch_size,
                generator=generator(rank) if shuffle else None,
                drop_last=drop_last,
                rank=rank,
                world=world,
            )
            for rank in range(world)
        ]
    except ValueError as error:
        counts = torch.bincount(index % world, minlength=world)
        few = counts.min() < (batch_size if drop_last else -(-counts.max() // batch_size))
        assert few, f"refused for no reason: {error}"  # noqa: PT017
        return
    assert len({len(plan) for plan in plans}) == 1, "DDP would hang"
    for rank, plan in enumerate(plans):
        seen = torch.cat(plan)
        assert bool((seen % world == rank).all())
        assert all(0 < len(batch) <= batch_size for batch in plan)
        assert len(seen.unique()) == len(seen)
        assert set(seen.tolist()) <= set(index.tolist())
        if drop_last:
            assert all(len(batch) == batch_size for batch in plan)
    if not drop_last:
        assert torch.equal(torch.cat([torch.cat(plan) for plan in plans]).sort().values, index.sort().values)


def test_order():
    index = torch.tensor([5, 2, 9, 4])
    assert torch.equal(torch.cat(batch_indices(index, 3)), index)
    shuffled = torch.cat(batch_indices(torch.arange(100), 7, generator=generator()))
    assert not torch.equal(shuffled, torch.arange(100))
    assert torch.equal(shuffled, torch.cat(batch_indices(torch.arange(100), 7, generator=generator())))
    assert batch_indices(torch.tensor([], dtype=torch.int64), 4) == ()


def test_cifar_has_390_steps():
    assert len(batch_indices(torch.arange(50_000), 128, generator=generator(), drop_last=True)) == 390


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"batch_size": 16, "drop_last": True}, "10 examples make no batch of 16"),
        ({"batch_size": 4, "rank": 2, "world": 2}, "rank must be in 0..1, got 2"),
        ({"batch_size": 1, "world": 3}, "3 examples in one of 3 processes make no 4 batches"),
    ],
)
def test_impossible_batches_are_said_at_once(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        batches(split(10), **options)  # raised before the first batch


# -- batches of data -------------------------------------------------------------------------------------------------


def test_index_x_and_y_belong_together():
    data = split()
    seen = []
    for index, x, y in batches(data, 6, generator=generator()):
        assert torch.equal(x, data.x[index])
        assert torch.equal(y, data.labels[index])
        seen += index.tolist()
    assert sorted(seen) == list(range(20))


def test_a_part_keeps_the_positions_of_the_whole():
    part = torch.tensor([3, 17, 8])
    ((index, x, y),) = batches(split(), 5, index=part)
    assert torch.equal(index, part)
    assert x.flatten().tolist() == [3, 17, 8]
    assert y.tolist() == [3, 3, 1]
    assert list(batches(split(), 5, index=part[:0])) == []


def test_soft_labels():
    soft = torch.softmax(torch.randn(20, 3, generator=generator()), 1)
    for index, _, y in batches(Split(split().x, soft), 8):
        assert torch.equal(y, soft[index])


@pytest.mark.parametrize("workers", [0, 2])
def test_files_are_decoded_in_the_same_order_by_any_number_of_workers(workers):
    data = Split(OnDisk(50), torch.arange(50) % 7)
    state = torch.get_rng_state()
    got = list(batches(data, 8, generator=generator(), workers=workers))
    assert torch.equal(torch.get_rng_state(), state), "the global generator was used"
    expected = batch_indices(torch.arange(50), 8, generator=generator())
    for (index, x, y), wanted in zip(got, expected, strict=True):
        assert torch.equal(index, wanted)
        assert torch.equal(x[:, 0, 0, 0].long(), index)
        assert torch.equal(y, index % 7)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_file_is_one_sentence_from_a_worker_too(workers):
    data = Split(OnDisk(20, damaged=(13,)), torch.zeros(20, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"^image13\.jpg is not a readable image; repair it\.$"):
        list(batches(data, 4, workers=workers))


def test_many_batches_do_not_use_up_file_handles():
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = set(map(int, os.listdir("/dev/fd")))
    free = (number for number in itertools.count() if number not in taken)
    limit = next(itertools.islice(free, 100, None))  # which leaves 100, whatever earlier tests have open
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit, hard), hard))
    try:
        data = Split(OnDisk(200), torch.zeros(200, dtype=torch.int64))
        assert sum(len(index) for index, _, _ in batches(data, 1, workers=1)) == 200  # none of them is kept
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_moving_a_split():
    data = split().relabel(torch.zeros(20, dtype=torch.int64))
    moved = data.to("meta")
    assert {as_tensor(moved.x).device.type, moved.labels.device.type, moved.clean_labels.device.type} == {"meta"}
    disk = Split(OnDisk(3), torch.arange(3))
    assert disk.to("cpu").x is disk.x


# -- by name ---------------------------------------------------------------------------------------------------------


def test_repr_is_one_line():
    assert repr(load("digits")) == (
        "Dataset('digits', train=Split(1,400 examples of [1, 8, 8]), test=Split(397 examples of [1, 8, 8]), 10 classes)"
    )


def test_load_looks_where_it_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("LOGITCLIP_DATA", str(tmp_path / "elsewhere"))
    with pytest.raises(ValueError, match=r"CIFAR-10 is not in .*elsewhere"):
        load("cifar10")
    with pytest.raises(ValueError, match=r"CIFAR-10 is not in .*here"):
        load("cifar10", tmp_path / "here")
    monkeypatch.delenv("LOGITCLIP_DATA")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="CIFAR-10 is not in data:"):
        load("cifar10")
    assert list(tmp_path.iterdir()) == [], "looking made a folder"


def test_load_names_what_it_does_not_know():
    with pytest.raises(ValueError, match=r"Unknown dataset 'cifar11'\. Did you mean 'cifar10'"):
        load("cifar11")
    with pytest.raises(ValueError, match="has no knob 'download'"):
        load("cifar10:download=true")
    assert isinstance(load("digits", download=True), Dataset)


# -- stratified splits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_the_split_keeps_the_share_of_every_class_and_loses_nobody(share):
    labels = torch.randint(0, 7, (1000,), generator=torch.Generator().manual_seed(0))
    train, test = stratified_split(labels, share, seed=3)
    assert torch.equal(torch.cat([train, test]).sort().values, torch.arange(1000))
    counts = torch.bincount(labels)
    assert torch.equal(torch.bincount(labels[test]), (counts * share).round().long())


def test_the_split_never_empties_a_class():
    train, test = stratified_split(torch.tensor([0, 1, 1, 1, 1]), 0.9, seed=0)
    assert torch.tensor([0, 1, 1, 1, 1])[train].tolist() == [0, 1]
    assert len(test) == 3
    with pytest.raises(ValueError, match="less than one of 4 examples; raise it"):
        stratified_split(torch.tensor([0, 0, 1, 1]), 0.1, seed=0)


@pytest.mark.parametrize("share", [0.5, 0.25, 0.2, 0.1])
def test_folds_are_disjoint_and_cover_every_example(share):
    labels = torch.randint(0, 7, (1003,), generator=torch.Generator().manual_seed(1))
    parts = [stratified_split(labels, share, 0, fold=k)[1] for k in range(round(1 / share))]
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(1003))
    for part in parts:
        shares = torch.bincount(labels[part], minlength=7) - torch.bincount(labels) * share
        assert shares.abs().max() <= 1


@pytest.mark.parametrize("share", [0.5, 0.25, 0.2, 0.1])
@pytest.mark.parametrize("size", range(2, 10))
def test_folds_of_tiny_classes_are_disjoint_and_cover_every_example(share, size):
    labels = torch.arange(size * 40) % 40
    splits = [stratified_split(labels, share, 0, fold=k) for k in range(round(1 / share))]
    assert torch.equal(torch.cat([test for _, test in splits]).sort().values, torch.arange(len(labels)))
    assert all(len(labels[train].unique()) == 40 for train, _ in splits)


def test_the_first_fold_does_not_depend_on_the_others():
    """Fold 1 would be empty, so the examples of the others are dealt out; fold 0 has one of each class."""
    labels = torch.arange(12) % 4
    assert sorted(labels[stratified_split(labels, 0.2, 0)[1]].tolist()) == [0, 1, 2, 3]
    assert [len(stratified_split(labels, 0.2, 0, fold=k)[1]) for k in range(5)] == [4, 2, 2, 2, 2]


def test_a_class_with_one_example_is_always_trained_on():
    labels = torch.tensor([0] * 9 + [1])
    assert all(9 in stratified_split(labels, 0.2, 0, fold=k)[0] for k in range(5))
    with pytest.raises(ValueError, match=r"fold must be in 0..4 for test=0.2, got 5"):
        stratified_split(labels, 0.2, 0, fold=5)
