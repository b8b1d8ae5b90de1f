"""SAM against NumPy and plain torch, on fixed numbers."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from jobs import CLASSES, CLIPS, labels, make_job, network, numbers, scaling_fabric
from torch import Tensor, nn

from logitclip.clip import PENALTIES
from logitclip.criterion import Loss, build_criterion
from logitclip.methods.sam import SAM, frozen_statistics, perturb_weights

X, Y = numbers(12, 5, seed=7), labels(12)


def step(worker: SAM) -> Any:
    worker.network.train()
    return worker.train_step(torch.arange(len(X)), worker.job.train.x, Y, lambda x: x)  # type: ignore[arg-type]


def test_step_of_a_linear_model_in_numpy() -> None:
    """w_hat = w + rho g/|g|, the gradient there, and SGD with momentum and weight decay from w."""
    model = network(5, CLASSES)
    worker = SAM(make_job(X, Y, model, momentum=0.9, weight_decay=0.01), rho=0.3)
    weight, bias = (p.detach().numpy().copy() for p in model.parameters())
    x, one_hot = X.numpy(), np.eye(CLASSES)[Y]
    velocity: Any = (0.0, 0.0)

    def gradients(weight: np.ndarray, bias: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        z = x @ weight.T + bias
        p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
        loss = -(one_hot * np.log(p)).sum(1).mean()
        return loss, (p - one_hot).T @ x / len(x), (p - one_hot).mean(0)

    for _ in range(3):
        loss, gw, gb = gradients(weight, bias)
        norm = np.sqrt((gw**2).sum() + (gb**2).sum()) + 1e-12
        _, gw, gb = gradients(weight + 0.3 * gw / norm, bias + 0.3 * gb / norm)
        velocity = (0.9 * velocity[0] + gw + 0.01 * weight, 0.9 * velocity[1] + gb + 0.01 * bias)
        z = x @ weight.T + bias
        weight, bias = weight - 0.1 * velocity[0], bias - 0.1 * velocity[1]
        report = step(worker)
        assert report.loss.item() == pytest.approx(loss, rel=1e-12)
        assert torch.allclose(report.logits, torch.from_numpy(z), rtol=1e-12)
        np.testing.assert_allclose(worker.network[0].weight.detach(), weight, rtol=1e-12)  # type: ignore[index]
        np.testing.assert_allclose(worker.network[0].bias.detach(), bias, rtol=1e-12)  # type: ignore[index]


def reference(model: nn.Module, x: Tensor, y: Tensor, objective: Any, rho: float, most: float = 0.0) -> list[Tensor]:
    """Compute the weights after one step with lr 0.1 in plain torch; batch-norm statistics come from the first pass."""
    model.train()
    weights = list(model.parameters())
    first = torch.autograd.grad(objective(model(x), y), weights)
    norm = torch.cat([g.flatten() for g in first]).norm()
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for w, g in zip(moved.parameters(), first, strict=True):
            w += rho * g / norm
    second = torch.autograd.grad(objective(moved(x), y), list(moved.parameters()))
    norm = torch.cat([g.flatten() for g in second]).norm()
    factor = min(1.0, most / (norm.item() + 1e-6)) if most else 1.0  # as torch clips gradients
    return [w - 0.1 * factor * g for w, g in zip(weights, second, strict=True)]


@pytest.mark.parametrize("loss", ["ce", "gce:q=0.7", "nce_rce", "cores"])
@pytest.mark.parametrize("clip", CLIPS)
def test_any_objective(clip: str, loss: str) -> None:
    model = network(5, 6, CLASSES)
    worker = SAM(make_job(X, Y, model, loss=loss, clip=clip), rho=0.2)
    expected = reference(model, X, Y, build_criterion(loss, clip), 0.2)
    step(worker)
    assert all(map(_close, worker.network.parameters(), expected))


def test_penalty_and_gradient_clipping_act_on_the_second_gradient() -> None:
    model, penalty = network(5, 6, CLASSES), PENALTIES.build("norm:weight=0.3")
    worker = SAM(make_job(X, Y, model, penalty=penalty, grad_clip=0.05), rho=0.2)
    ce = nn.CrossEntropyLoss()

    def objective(z: Tensor, y: Tensor) -> Tensor:
        return ce(z, y) + 0.3 * z.norm(dim=1).mean()

    step(worker)
    assert all(map(_close, worker.network.parameters(), reference(model, X, Y, objective, 0.2, most=0.05)))


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_takes_its_statistics_from_the_first_pass(momentum: float | None) -> None:
    model = network(5, 6, CLASSES, norm=True)
    model[1].momentum = momentum  # type: ignore[index]
    worker = SAM(make_job(X, Y, model), rho=0.5)
    expected = reference(model, X, Y, nn.CrossEntropyLoss(), 0.5)  # one pass through `model` itself
    step(worker)
    assert all(map(_close, worker.network.parameters(), expected))  # normalised by the batch in both passes
    ours, plain = worker.network[1], model[1]  # type: ignore[index]
    assert torch.equal(ours.running_mean, plain.running_mean)
    assert torch.equal(ours.running_var, plain.running_var)
    assert ours.num_batches_tracked == plain.num_batches_tracked == 1
    assert ours.track_running_stats


def test_a_norm_without_statistics_stays_without() -> None:
    model = nn.Sequential(nn.BatchNorm1d(5, track_running_stats=False), nn.BatchNorm1d(5))
    with frozen_statistics(model, Loss("ce")):
        assert not model[1].track_running_stats
    assert not model[0].track_running_stats
    assert model[1].track_running_stats


def test_weights_come_back_to_the_bit() -> None:
    model = network(5, 6, CLASSES).float()
    for w in model.parameters():
        w.grad = 3 * torch.randn(w.shape, generator=torch.Generator().manual_seed(2))
    before = [w.detach().clone() for w in model.parameters()]
    with perturb_weights(model, 0.05):
        moved = torch.cat([(w - old).flatten() for w, old in zip(model.parameters(), before, strict=True)])
        assert moved.norm().item() == pytest.approx(0.05, rel=1e-3)
    assert all(map(torch.equal, model.parameters(), before))
    with pytest.raises(KeyboardInterrupt), perturb_weights(model, 0.05):
        raise KeyboardInterrupt
    assert all(map(torch.equal, model.parameters(), before))


def test_zero_gradient_moves_nothing() -> None:
    model = network(5, CLASSES)
    for w in model.parameters():
        w.grad = torch.zeros_like(w)
    before = [w.detach().clone() for w in model.parameters()]
    with perturb_weights(model, 0.05):
        assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_an_overflow_in_the_first_pass_is_harmless(bad: float) -> None:
    model = network(5, CLASSES)
    for w in model.parameters():
        w.grad = torch.ones_like(w)
    model[0].weight.grad[1, 2] = bad  # type: ignore[index]
    before = [w.detach().clone() for w in model.parameters()]
    with perturb_weights(model, 0.05):
        assert all(map(torch.equal, model.parameters(), before))


def test_half_precision_gradients_do_not_overflow_the_norm() -> None:
    model = nn.Linear(3, 3).to(torch.float16)
    for w in model.parameters():
        w.grad = torch.full_like(w, 3e4)  # their squares overflow half precision
    before = model.weight.detach().clone()
    with perturb_weights(model, 0.5):
        assert (model.weight - before).float().norm().item() == pytest.approx(0.5 * np.sqrt(9 / 12), rel=1e-2)


def test_the_scale_of_the_gradients_changes_nothing() -> None:
    model = network(5, 6, CLASSES).float()
    plain = SAM(make_job(X.float(), Y, model, fabric=scaling_fabric(1.0)), rho=0.2)
    scaled = SAM(make_job(X.float(), Y, model, fabric=scaling_fabric(2.0**14), grad_clip=0.1), rho=0.2)
    clipped_too = SAM(make_job(X.float(), Y, model, fabric=scaling_fabric(1.0), grad_clip=0.1), rho=0.2)
    unscaled = SAM(make_job(X.float(), Y, model, fabric=scaling_fabric(2.0**14)), rho=0.2)
    for worker in (plain, scaled, clipped_too, unscaled):
        step(worker)
    for one, other in ((plain, unscaled), (scaled, clipped_too)):
        for a, b in zip(one.network.parameters(), other.network.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    assert not torch.equal(plain.network[0].weight, scaled.network[0].weight)  # type: ignore[index]


def test_a_step_that_overflows_is_left_out_and_the_scale_lowered() -> None:
    model = network(5, CLASSES).float()
    fabric = scaling_fabric(2.0**127)  # single precision ends at 2^128
    worker = SAM(make_job(100 * X.float(), Y, model, fabric=fabric), rho=0.2)
    step(worker)
    assert all(map(torch.equal, worker.network.parameters(), model.parameters()))
    assert fabric.strategy.precision.scaler.get_scale() == 2.0**126


def test_a_sieving_loss_counts_the_first_pass_alone() -> None:
    model, kept = network(5, 6, CLASSES), nn.CrossEntropyLoss(reduction="none")
    counts = torch.bincount(Y, minlength=CLASSES).float()
    worker = SAM(make_job(X, Y, model, loss="cores:sieve_after=0"), rho=0.2)
    worker.start_epoch(1, 0.1)
    z = model(X)
    out = kept(z, Y) > -(torch.softmax(z, 1) + 1e-8).log().mean(1)
    assert 0 < out.sum() < len(Y)
    step(worker)
    assert torch.equal(worker.criterion.removed, torch.bincount(Y[out], minlength=CLASSES).float())
    worker.start_epoch(2, 0.1)
    assert torch.equal(worker.criterion.class_counts, counts - torch.bincount(Y[out], minlength=CLASSES))


@pytest.mark.parametrize("rho", [0.0, -1.0, float("nan")])
def test_rho_out_of_range(rho: float) -> None:
    with pytest.raises(ValueError, match="rho must be positive"):
        SAM(make_job(X, Y, network(5, CLASSES)), rho=rho)


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-10, atol=1e-12)
