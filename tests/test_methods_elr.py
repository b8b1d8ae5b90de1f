"""ELR against NumPy, on fixed numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from jobs import CLASSES, CLIPS, labels, make_job, network, numbers
from torch import Tensor

from logitclip.clip import CLIPS as LINKS
from logitclip.clip import PENALTIES
from logitclip.methods.elr import ELR, elr_term, updated_targets
from logitclip.runs.config import RunConfig

N = 9
X, Y = numbers(N, 5, seed=3), labels(N)


def probabilities(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(1, keepdims=True))
    return np.clip(e / e.sum(1, keepdims=True), 1e-4, 1 - 1e-4)


def stated(z: np.ndarray, targets: np.ndarray, weight: float) -> float:
    """Compute cross entropy plus weight log(1 - <t, p>)."""
    e = np.exp(z - z.max(1, keepdims=True))
    cross_entropy = -np.log((e / e.sum(1, keepdims=True))[range(N), Y])
    return float((cross_entropy + weight * np.log(1 - (targets * probabilities(z)).sum(1))).mean())


def test_the_targets_are_an_average_of_past_probabilities() -> None:
    targets, by_hand = torch.zeros(N, CLASSES, dtype=torch.float64), np.zeros((N, CLASSES))
    for visit in range(4):
        z = 3 * numbers(N, CLASSES, seed=visit)
        z[0] = torch.tensor([30.0, 0, 0, 0])  # the clamp acts
        p = probabilities(z.numpy())
        targets, by_hand = updated_targets(targets, z, 0.7), 0.7 * by_hand + 0.3 * p / p.sum(1, keepdims=True)
        np.testing.assert_allclose(targets, by_hand, rtol=1e-12)
    assert targets.sum(1).max() < 1, "the average begins at 0"


def test_the_term_and_its_gradient() -> None:
    """The gradient is p_k (sum_j t_j p_j - t_k) / (1 - sum_j t_j p_j): towards the target."""
    z, t = numbers(N, CLASSES).requires_grad_(), numbers(N, CLASSES, seed=8).softmax(1)
    elr_term(z, t).backward()
    p = z.detach().softmax(1)
    inner = (t * p).sum(1, keepdim=True)
    expected = -p * (t - inner) / (1 - inner) / N
    torch.testing.assert_close(z.grad, expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("penalty", [None, "norm:weight=0.3"])
@pytest.mark.parametrize("clip", CLIPS)
def test_a_step_uses_the_target_after_its_update(clip: str, penalty: str | None) -> None:
    built, link = None if penalty is None else PENALTIES.build(penalty), LINKS.build(clip)
    worker = ELR(make_job(X, Y, network(5, 6, CLASSES), clip=clip, penalty=built), beta=0.6, weight=2.0)
    worker.targets = worker.targets.double()
    targets = np.zeros((N, CLASSES))
    for epoch in range(3):
        with torch.no_grad():
            z = worker.network(X)
        linked = link(z).numpy()
        p = probabilities(linked)
        targets = 0.6 * targets + 0.4 * p / p.sum(1, keepdims=True)
        worker.start_epoch(epoch, 0.1)
        ((_, _, step),) = worker.train_epoch(epoch, [(torch.arange(N), X, Y)], lambda x: x)
        norm = 0.3 * z.norm(dim=1).mean().item() if penalty else 0.0
        assert step.loss.item() == pytest.approx(stated(linked, targets, 2.0) + norm, rel=1e-10)
        np.testing.assert_allclose(worker.targets, targets, rtol=1e-12)


def test_only_the_rows_of_a_batch_change() -> None:
    worker = ELR(make_job(X, Y, network(5, 6, CLASSES)))
    own = torch.tensor([1, 4, 7])
    worker.train_step(own, X[own], Y[own], lambda x: x)
    others = [i for i in range(N) if i not in own]
    assert not worker.targets[others].any()
    assert (worker.targets[own].sum(1) > 0.29).all()


def test_soft_labels_train() -> None:
    soft: Tensor = numbers(N, CLASSES, seed=9).softmax(1)
    worker = ELR(make_job(X, soft, network(5, 6, CLASSES)))
    assert worker.train_step(torch.arange(N), X, soft, lambda x: x).loss.isfinite()


@pytest.mark.parametrize(
    ("data", "noise", "spec"),
    [
        ("cifar10", "symmetric:rate=0.4", "elr"),
        ("cifar10", "asymmetric:rate=0.4", "elr:beta=0.9,weight=1"),
        ("cifar100", "asymmetric:rate=0.4", "elr:beta=0.9,weight=7"),
        ("digits", "none", "elr"),
    ],
)
def test_published_settings(data: str, noise: str, spec: str) -> None:
    assert RunConfig(data=data, noise=noise, method="elr").resolve().method == spec


@pytest.mark.parametrize("knobs", [{"beta": 1.0}, {"beta": -0.1}, {"weight": -1.0}])
def test_knobs_out_of_range(knobs: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(knobs))} must be at least 0"):
        ELR(make_job(X, Y, network(5, 6, CLASSES)), **knobs)
