"""CORES with its epochs, prior, sieve and denominator, through the method and through the engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from jobs import CLASSES, labels, make_job, network, numbers
from torch import Tensor, nn

from logitclip.clip import CLIPS as LINKS
from logitclip.criterion import build_criterion
from logitclip.data import Dataset, Split
from logitclip.engine import Progress, Settings, fit
from logitclip.launch import make_fabric
from logitclip.methods.standard import Standard

N = 40
X, Y = 2 * numbers(N, 5, seed=30), labels(N, seed=31)
COUNTS = np.bincount(Y, minlength=CLASSES)
BETA = np.concatenate([np.zeros(10), np.linspace(0, 2, 30), np.full(200, 2.0)])  # by epoch
EPOCHS = (0, 10, 30, 31, 39, 40, 150)


def stated(z: Tensor, y: Tensor, epoch: int, prior: np.ndarray) -> tuple[Tensor, np.ndarray]:
    """Compute the loss of a batch and the examples that the sieve drops, as in the paper."""
    p = z.softmax(1)
    cross_entropy, others = -p[range(len(y)), y].log(), -(p + 1e-8).log()
    loss = cross_entropy - BETA[epoch] * (torch.from_numpy(prior) * others).sum(1)
    left_out = (cross_entropy - others.mean(1) > 0).numpy() & (epoch > 30)
    kept = torch.from_numpy(1.0 - left_out)
    return (kept * loss).sum() / kept.sum(), left_out


def updated(left_out: np.ndarray, y: Tensor) -> np.ndarray:
    """Compute the prior of the next epoch."""
    left = COUNTS - np.bincount(y[torch.from_numpy(left_out)], minlength=CLASSES)
    return left / left.sum()


@pytest.mark.parametrize("clip", ["none", "norm:tau=1", "value:limit=1"])
@pytest.mark.parametrize("epoch", EPOCHS)
def test_step(epoch: int, clip: str) -> None:
    """Loss, sieve and gradient at an epoch, with the prior of the previous epoch."""
    model, link = network(5, CLASSES), LINKS.build(clip)
    worker = Standard(make_job(X, Y, model, loss="cores", clip=clip))
    criterion = worker.criterion if clip in ("none",) else worker.criterion.criterion
    prior, weights = COUNTS / N, list(model.parameters())
    for now in (epoch - 1, epoch) if epoch else (epoch,):
        loss, left_out = stated(link(model(X)), Y, now, prior)
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for w, g in zip(weights, gradients, strict=True):
                w -= 0.1 * g
        worker.start_epoch(now, 0.1)
        assert criterion.class_counts.numpy() / criterion.class_counts.sum().item() == pytest.approx(prior)
        step = worker.train_step(torch.arange(N), X, Y, lambda x: x)
        assert step.loss.item() == pytest.approx(loss.item(), rel=1e-6)  # the counts are kept in single precision
        assert criterion.removed.tolist() == np.bincount(Y[torch.from_numpy(left_out)], minlength=CLASSES).tolist()
        for w, expected in zip(worker.network.parameters(), weights, strict=True):
            torch.testing.assert_close(w, expected, rtol=1e-6, atol=1e-8)
        assert (0 < left_out.sum() < N) == (now > 30)
        prior = updated(left_out, Y)


def test_whole_training_at_more_epochs_than_the_table_of_beta_has() -> None:
    """160 epochs of three batches: the engine against a plain loop."""
    dataset = Dataset("numbers", Split(X, Y), Split(X, Y), CLASSES, tuple("abcd"))
    settings = Settings(epochs=160, batch_size=16, lr=0.02, momentum=0.0, schedule="constant")
    rows: dict[int, dict[str, Any]] = {}
    counts: dict[int, np.ndarray] = {}
    seen: list[tuple[Tensor, Tensor]] = []

    def after_epoch(progress: Progress) -> None:
        rows[progress.row["epoch"]] = progress.row
        criterion: Any = progress.method.criterion
        counts[progress.row["epoch"]] = criterion.class_counts.double().numpy().copy()

    class Watched(Standard):
        def train_step(self, index: Tensor, x: Tensor, y: Tensor, augment: Any) -> Any:
            seen.append((x, y))
            return super().train_step(index, x, y, augment)

    fabric = make_fabric(accelerator="cpu", precision="64")
    more = {"fabric": fabric, "after_epoch": after_epoch, "view": lambda x, generator: x}
    fit(dataset, lambda _: network(5, CLASSES), build_criterion("cores", "none"), Watched, settings, **more)

    model, prior, removed_at_last = network(5, CLASSES), COUNTS / N, 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for epoch in range(160):
        total, removed = 0.0, np.zeros(CLASSES)
        for _ in range(3):
            x, y = seen.pop(0)
            loss, left_out = stated(model(x), y, epoch, prior)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(y)
            removed += np.bincount(y[torch.from_numpy(left_out)], minlength=CLASSES)
        assert counts[epoch] / counts[epoch].sum() == pytest.approx(prior), epoch
        assert rows[epoch]["loss"] == pytest.approx(total / N, rel=1e-4), epoch
        prior = (COUNTS - removed) / (COUNTS - removed).sum()
        removed_at_last = removed.sum()
    assert removed_at_last > 0
    assert not seen


def test_a_batch_that_is_left_out_as_a_whole_costs_nothing() -> None:
    model = nn.Linear(5, CLASSES)
    worst = model(X.float()).detach().argmin(1)  # the least probable label of each example
    worker = Standard(make_job(X.float(), worst, model, loss="cores:sieve_after=0"))
    worker.start_epoch(1, 0.1)
    before = [w.detach().clone() for w in worker.network.parameters()]
    step = worker.train_step(torch.arange(N), X.float(), worst, lambda x: x)
    assert step.loss.item() == 0
    assert all(map(torch.equal, worker.network.parameters(), before))
    assert worker.criterion.removed.sum() == N
    worker.start_epoch(2, 0.1)  # the sieve dropped every example: fall back to the prior of all
    assert torch.equal(worker.criterion.class_counts, torch.bincount(worst, minlength=CLASSES).float())


def test_prior_counts_the_examples_trained_on_alone() -> None:
    index = torch.arange(0, N, 3)
    worker = Standard(make_job(X, Y, network(5, CLASSES), loss="cores", index=index))
    worker.start_epoch(0, 0.1)
    assert torch.equal(worker.criterion.class_counts, torch.bincount(Y[index], minlength=CLASSES).float())


def test_a_uniform_prior_stays_uniform() -> None:
    model = network(5, CLASSES)
    worker = Standard(make_job(X, Y, model, loss="cores:prior=uniform,sieve_after=0"))
    prior = np.full(CLASSES, 1 / CLASSES)
    for epoch in (38, 39):
        worker.start_epoch(epoch, 0.0)
        loss, left_out = stated(model(X), Y, epoch, prior)
        assert left_out.any()
        assert worker.train_step(torch.arange(N), X, Y, lambda x: x).loss.item() == pytest.approx(loss.item())


def test_what_was_left_out_is_part_of_the_state() -> None:
    one, other = (Standard(make_job(X, Y, network(5, CLASSES), loss="cores", clip="norm:tau=1")) for _ in range(2))
    one.start_epoch(39, 0.1)
    one.train_step(torch.arange(N), X, Y, lambda x: x)
    removed = one.criterion.criterion.removed.clone()
    assert removed.any()
    other.load(one.weights(), one.state_dict())
    other.start_epoch(40, 0.1)
    assert torch.equal(other.criterion.criterion.class_counts, torch.from_numpy(COUNTS) - removed)


def test_other_losses_have_no_such_state() -> None:
    worker = Standard(make_job(X, Y, network(5, CLASSES), loss="gce"))
    worker.start_epoch(40, 0.1)
    worker.train_step(torch.arange(N), X, Y, lambda x: x)
    assert worker.state_dict()["criterion"] == {}
