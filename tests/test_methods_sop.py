"""SOP and SOP+ against NumPy, on fixed numbers; gradients against differences of the stated loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from jobs import CLASSES, CLIPS, labels, make_job, network, numbers, scaling_fabric
from torch import Tensor, nn

from logitclip.clip import CLIPS as LINKS
from logitclip.clip import PENALTIES
from logitclip.criterion import Loss
from logitclip.methods.sop import SOP, SOPPlus, sop_loss

N = 9
X, Y = numbers(N, 5, seed=3), labels(N)
ONE_HOT = np.eye(CLASSES)[Y]
# Large enough to matter, some beyond 1 so that the clamps act, and p + U - V below 0 in places.
U, V = 1.2 * numbers(N, 1, seed=4), 1.2 * numbers(N, CLASSES, seed=5)


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def stated(z: np.ndarray, u: np.ndarray, v: np.ndarray, v_stopped: np.ndarray) -> tuple[float, float, np.ndarray]:
    """Compute the cross entropy, the squared error and phat as in the paper; `v_stopped` gets no gradient."""
    big_u, big_v = np.clip(u**2 * ONE_HOT, 0, 1), np.clip(v**2 * (1 - ONE_HOT), 0, 1)
    stopped = np.clip(v_stopped**2 * (1 - ONE_HOT), 0, 1)
    phat = np.maximum(softmax(z) + big_u - stopped, 1e-4)
    phat = np.clip(phat / np.abs(phat).sum(1, keepdims=True), 1e-4, 1)
    predicted = np.eye(CLASSES)[z.argmax(1)]
    squared = ((predicted + big_u - big_v - ONE_HOT) ** 2).sum() / N
    return -(ONE_HOT * np.log(phat)).sum(1).mean(), squared, phat


def differences(f: Callable[[np.ndarray], float], at: np.ndarray, step: float = 1e-6) -> np.ndarray:
    """Compute the gradient of f by central differences."""
    gradient = np.zeros_like(at)
    for i in np.ndindex(at.shape):
        move = np.zeros_like(at)
        move[i] = step
        gradient[i] = (f(at + move) - f(at - move)) / (2 * step)
    return gradient


def test_loss_and_gradients() -> None:
    z, u, v = numbers(N, CLASSES).requires_grad_(), U.clone().requires_grad_(), V.clone().requires_grad_()
    p = z.softmax(1)
    p.retain_grad()
    loss, phat = sop_loss(z, p, torch.from_numpy(ONE_HOT), u, v)
    loss.backward()
    zn, un, vn = (t.detach().numpy() for t in (z, u, v))
    cross_entropy, squared, expected = stated(zn, un, vn, vn)
    assert squared > 0.1
    assert (expected <= 1e-4).any(), "the floor should be seen"
    assert loss.item() == pytest.approx(cross_entropy + squared, rel=1e-12)
    np.testing.assert_allclose(phat.detach(), expected, rtol=1e-12)
    for tensor, gradient in (
        (z, differences(lambda z: sum(stated(z, un, vn, vn)[:2]), zn)),
        (u, differences(lambda u: sum(stated(zn, u, vn, vn)[:2]), un)),
        (v, differences(lambda v: sum(stated(zn, un, v, vn)[:2]), vn)),  # through the squared error only
    ):
        assert np.abs(gradient).max() > 1e-3
        assert tensor.grad is not None
        np.testing.assert_allclose(tensor.grad, gradient, atol=1e-8)
    # A gradient of V through the cross entropy would be different.
    through_both = differences(lambda v: sum(stated(zn, un, v, v)[:2]), vn)
    assert np.abs(v.grad.numpy() - through_both).max() > 1e-3  # type: ignore[union-attr]
    # p gets only the gradient of the cross entropy: the predicted class is a constant.
    zero = torch.zeros(N, CLASSES, dtype=torch.float64)
    again = p.detach().clone().requires_grad_()
    flipped = zero.index_fill(1, torch.tensor(0), 9.0)  # other predicted classes
    sop_loss(flipped, again, torch.from_numpy(ONE_HOT), U, V)[0].backward()
    torch.testing.assert_close(p.grad, again.grad)


def start(method: type[SOP], x: Tensor = X, *, rows: Tensor | None = None, **more: Any) -> SOP:
    """Make a method on a dataset of 20 examples; `rows` hold X, Y, U and V."""
    rows = torch.arange(N) if rows is None else rows
    knobs = {name: more.pop(name) for name in list(more) if name.startswith(("lr_", "ratio_", "strong"))}
    data, y = numbers(20, 5, seed=8).to(x.dtype), labels(20, seed=9)
    data[rows], y[rows] = x, Y
    worker = method(make_job(data, y, network(5, CLASSES).to(x.dtype), batch_size=N, **more), **knobs)
    worker.u, worker.v = worker.u.to(x.dtype), worker.v.to(x.dtype)
    worker.u[rows], worker.v[rows] = U.to(x.dtype), V.to(x.dtype)
    worker.network.train()
    return worker


def identity(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize("clip", CLIPS)
def test_step(clip: str) -> None:
    """u, v and the weights after one step; u and v are indexed by example, not by position in the batch."""
    rows = torch.tensor([17, 3, 4, 0, 19, 8, 11, 2, 6])
    worker = start(SOP, rows=rows, clip=clip, lr_u=0.7, lr_v=1.3)
    u_before, v_before = worker.u.clone(), worker.v.clone()
    weight, bias = (p.detach().numpy().copy() for p in worker.network.parameters())
    link = LINKS.build(clip)
    x, un, vn = X.numpy(), U.numpy(), V.numpy()

    def total(weight: np.ndarray, bias: np.ndarray, u: np.ndarray, v: np.ndarray) -> float:
        z = torch.from_numpy(x @ weight.T + bias)
        linked = link(z).numpy()
        # The predicted class is that of the unclipped logits: a clip by value may cause ties.
        squared = stated(z.numpy(), u, v, vn)[1]
        return stated(linked, u, v, vn)[0] + squared

    report = worker.train_step(rows, X, Y, identity)
    assert report.loss.item() == pytest.approx(total(weight, bias, un, vn), rel=1e-10)
    np.testing.assert_allclose(report.logits, x @ weight.T + bias, rtol=1e-10)  # type: ignore[arg-type]
    new_u = un - 0.7 * differences(lambda u: total(weight, bias, u, vn), un)
    new_v = vn - 1.3 * differences(lambda v: total(weight, bias, un, v), vn)
    new_weight = weight - 0.1 * differences(lambda w: total(w, bias, un, vn), weight)
    new_bias = bias - 0.1 * differences(lambda b: total(weight, b, un, vn), bias)
    np.testing.assert_allclose(worker.u[rows], new_u, atol=1e-8)
    np.testing.assert_allclose(worker.v[rows], new_v, atol=1e-8)
    np.testing.assert_allclose(worker.network[0].weight.detach(), new_weight, atol=1e-8)  # type: ignore[index]
    np.testing.assert_allclose(worker.network[0].bias.detach(), new_bias, atol=1e-8)  # type: ignore[index]
    others = torch.ones(20, dtype=torch.bool).index_fill(0, rows, False)
    assert torch.equal(worker.u[others], u_before[others])
    assert torch.equal(worker.v[others], v_before[others])


def test_u_and_v_have_neither_momentum_nor_decay_nor_schedule() -> None:
    worker = start(SOP, lr_u=0.5, lr_v=0.5, momentum=0.9, weight_decay=0.1)
    z = (X @ worker.network[0].weight.T + worker.network[0].bias).detach().numpy()  # type: ignore[index]
    u, v = U.numpy(), V.numpy()
    for epoch in (0, 1):
        worker.start_epoch(epoch, 0.0)  # the network does not change: its learning rate is 0
        u, v = (
            u - 0.5 * differences(lambda u, v=v: sum(stated(z, u, v, v)[:2]), u),
            v - 0.5 * differences(lambda v, u=u, old=v: sum(stated(z, u, v, old)[:2]), v),
        )
        worker.train_step(torch.arange(N), X, Y, identity)
        np.testing.assert_allclose(worker.u[:N], u, atol=1e-8)
        np.testing.assert_allclose(worker.v[:N], v, atol=1e-8)


@pytest.mark.parametrize("clip", CLIPS)
def test_sop_plus(clip: str) -> None:
    """The balance of the mean phat, and the divergence of a second view from the first, which gets no gradient."""
    worker = start(SOPPlus, clip=clip, strong=False, ratio_balance=0.3, ratio_consistency=0.8, lr_u=0.7, lr_v=1.3)
    other_view = X + 0.5 * numbers(N, 5, seed=12)
    views = iter([X, other_view])
    weight, bias = (p.detach().numpy().copy() for p in worker.network.parameters())
    un, vn, link = U.numpy(), V.numpy(), LINKS.build(clip)

    def linked(x: Tensor, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        z = torch.from_numpy(x.numpy() @ weight.T + bias)
        return z.numpy(), link(z).numpy()

    target = softmax(linked(X, weight)[1])

    def total(weight: np.ndarray, u: np.ndarray, v: np.ndarray) -> float:
        z, first = linked(X, weight)
        cross_entropy, _, phat = stated(first, u, v, vn)
        balance = -(1 / CLASSES * np.log(np.clip(phat.mean(0), 1e-4, 1))).sum()
        second = softmax(linked(other_view, weight)[1])
        consistency = (target * np.log(target / second)).sum(1).mean()
        return cross_entropy + stated(z, u, v, vn)[1] + 0.3 * balance + 0.8 * consistency

    report = worker.train_step(torch.arange(N), X, Y, lambda _: next(views))
    assert report.loss.item() == pytest.approx(total(weight, un, vn), rel=1e-10)
    assert report.logits is not None
    assert report.logits.shape == (N, CLASSES)
    new_weight = weight - 0.1 * differences(lambda w: total(w, un, vn), weight)
    np.testing.assert_allclose(worker.network[0].weight.detach(), new_weight, atol=1e-8)  # type: ignore[index]
    np.testing.assert_allclose(worker.u[:N], un - 0.7 * differences(lambda u: total(weight, u, vn), un), atol=1e-8)
    np.testing.assert_allclose(worker.v[:N], vn - 1.3 * differences(lambda v: total(weight, un, v), vn), atol=1e-8)


def test_without_its_two_terms_sop_plus_is_sop() -> None:
    plain, plus = start(SOP), start(SOPPlus, strong=False, ratio_balance=0.0, ratio_consistency=0.0)
    for worker in (plain, plus):
        worker.train_step(torch.arange(N), X, Y, identity)
    torch.testing.assert_close(plain.u, plus.u)
    torch.testing.assert_close(plain.network[0].weight, plus.network[0].weight)  # type: ignore[index]


def test_the_second_view_is_strong() -> None:
    """data_loaders.py: the policy first, then the usual augmentation, then Cutout of 16 pixels on normalised images."""
    x = torch.randint(0, 256, (6, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    job = make_job(x, labels(6), nn.Sequential(nn.Flatten(), nn.Linear(3072, CLASSES)).double())
    worker = SOPPlus(job)
    seen = []

    def augment(batch: Tensor) -> Tensor:
        seen.append(batch)
        return batch.double() / 255 + 1  # never 0

    worker.start_epoch(3, 0.1)
    view = worker.second_view(x, augment)
    assert seen[0].dtype == torch.uint8
    assert not torch.equal(seen[0], x)
    cut = (view == 0).all(1)
    assert ((cut.sum((1, 2)) >= 64) & (cut.sum((1, 2)) <= 256)).all()
    kept = ~cut[:, None].expand_as(view)
    assert torch.equal(view[kept], (seen[0].double() / 255 + 1)[kept])
    worker.start_epoch(3, 0.1)  # a function of the seed and the epoch
    assert torch.equal(worker.second_view(x, augment), view)
    worker.start_epoch(4, 0.1)
    assert not torch.equal(worker.second_view(x, augment), view)


def test_the_strong_view_needs_images() -> None:
    with pytest.raises(ValueError, match="needs uint8 images: for other inputs use strong=false"):
        start(SOPPlus)


def test_u_and_v_start_small_and_differ_by_seed() -> None:
    x, y = torch.zeros(2000, 5), labels(2000)
    one, other = (SOP(make_job(x, y, network(5, CLASSES), seed=seed)) for seed in (0, 1))
    assert one.u.shape == (2000, 1)
    assert one.v.shape == (2000, CLASSES)
    assert one.v.std().item() == pytest.approx(1e-8, rel=0.05)
    assert one.u.std().item() == pytest.approx(1e-8, rel=0.1)
    assert not torch.equal(one.u, other.u)


def test_penalty_is_added() -> None:
    free, held = start(SOP), start(SOP, penalty=PENALTIES.build("norm:weight=0.3"))
    losses = [w.train_step(torch.arange(N), X, Y, identity) for w in (free, held)]
    norm = losses[0].logits.norm(dim=1).mean()  # type: ignore[union-attr]
    torch.testing.assert_close(losses[1].loss, losses[0].loss + 0.3 * norm)
    assert not torch.equal(free.network[0].weight, held.network[0].weight)  # type: ignore[index]


def test_soft_labels_are_taken_as_they_are() -> None:
    worker, soft = start(SOP), start(SOP)
    worker.train_step(torch.arange(N), X, Y, identity)
    soft.train_step(torch.arange(N), X, torch.from_numpy(ONE_HOT), identity)
    torch.testing.assert_close(worker.u, soft.u)


def test_a_gradient_scaler_changes_nothing() -> None:
    plain, scaled = (start(SOP, X.float(), fabric=scaling_fabric(scale), lr_u=0.7) for scale in (1.0, 2.0**12))
    for worker in (plain, scaled):
        worker.train_step(torch.arange(N), X.float(), Y, identity)
    for a, b in ((plain.u, scaled.u), (plain.v, scaled.v), (plain.network[0].weight, scaled.network[0].weight)):  # type: ignore[index]
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert not torch.equal(plain.u[:N], U.float())


def test_after_an_overflow_everything_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = start(SOP, X.float(), fabric=scaling_fabric(2.0**127))  # single precision ends at 2^128
    plain = worker.loss

    def steep(*args: Any) -> tuple[Tensor, Tensor]:
        logits, loss = plain(*args)
        return logits, 8 * (loss + logits.sum() + args[2].sum() + args[3].sum())

    monkeypatch.setattr(worker, "loss", steep)
    before = [w.detach().clone() for w in (worker.u, worker.v, *worker.network.parameters())]
    worker.train_step(torch.arange(N), X.float(), Y, identity)
    assert all(map(torch.equal, (worker.u, worker.v, *worker.network.parameters()), before))


def test_state_round_trip() -> None:
    one, other = start(SOP), start(SOP, seed=5)
    one.train_step(torch.arange(N), X, Y, identity)
    other.load(one.weights(), one.state_dict())
    for worker in (one, other):
        worker.train_step(torch.arange(N), X, Y, identity)
    assert torch.equal(one.u, other.u)
    assert torch.equal(one.v, other.v)
    assert all(map(torch.equal, one.network.parameters(), other.network.parameters()))


@pytest.mark.parametrize(
    ("method", "knobs"),
    [
        (SOP, {"lr_u": -1.0}),
        (SOP, {"lr_v": float("inf")}),
        (SOPPlus, {"ratio_balance": -0.1, "strong": False}),
        (SOPPlus, {"ratio_consistency": float("nan"), "strong": False}),
    ],
)
def test_knobs_out_of_range(method: Any, knobs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(knobs))} must be at least 0"):
        start(method, **knobs)


@pytest.mark.parametrize(
    "criterion",
    [
        Loss("gce"),
        Loss("ce", weight=torch.ones(CLASSES)),
        Loss("ce", reduction="sum"),
        torch.nn.CrossEntropyLoss(label_smoothing=0.1),
    ],
    ids=str,
)
def test_another_criterion_is_refused(criterion: Any) -> None:
    with pytest.raises(ValueError, match="SOP has its own objective"):
        start(SOP, criterion=criterion)
