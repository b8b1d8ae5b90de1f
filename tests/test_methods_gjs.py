"""GJS against NumPy, on fixed numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from jobs import CLASSES, CLIPS, labels, make_job, network, numbers

from logitclip.clip import CLIPS as LINKS
from logitclip.clip import PENALTIES
from logitclip.methods.gjs import GJS, gjs_loss
from logitclip.runs.config import RunConfig

N = 9
X, Y = numbers(N, 5, seed=3), labels(N)
ONE_HOT = np.eye(CLASSES)[Y]


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def divergence(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return np.where(p > 0, p * np.log(np.where(p > 0, p, 1) / q), 0).sum(1)


def stated(views: list[np.ndarray], target: np.ndarray, weight: float) -> float:
    """Compute the weighted Jensen-Shannon divergence of target and views, over its largest value for w -> 1."""
    weights = [weight, *[(1 - weight) / len(views)] * len(views)]
    parts = [target, *map(softmax, views)]
    mean = sum(w * p for w, p in zip(weights, parts, strict=True))
    total = sum(w * divergence(p, mean) for w, p in zip(weights, parts, strict=True))
    return float((total / -((1 - weight) * np.log(1 - weight))).mean())


@pytest.mark.parametrize("views", [1, 2, 3])
@pytest.mark.parametrize("weight", [0.1, 0.5, 0.9])
def test_the_loss(weight: float, views: int) -> None:
    logits = [3 * numbers(N, CLASSES, seed=i) for i in range(views)]
    loss = gjs_loss(logits, torch.from_numpy(ONE_HOT), weight)
    assert loss.item() == pytest.approx(stated([z.numpy() for z in logits], ONE_HOT, weight), rel=1e-10)
    soft = softmax(numbers(N, CLASSES, seed=7).numpy())
    loss = gjs_loss(logits, torch.from_numpy(soft), weight)
    assert loss.item() == pytest.approx(stated([z.numpy() for z in logits], soft, weight), rel=1e-10)


def test_it_goes_from_cross_entropy_to_mae() -> None:
    z = numbers(N, CLASSES)
    p_y = softmax(z.numpy())[range(N), Y]
    near_ce = gjs_loss([z, z], torch.from_numpy(ONE_HOT), 1e-6).item()
    assert near_ce == pytest.approx(-np.log(p_y).mean(), rel=1e-3)
    near_mae = gjs_loss([z, z], torch.from_numpy(ONE_HOT), 1 - 1e-6).item()
    assert near_mae == pytest.approx((1 - p_y).mean(), rel=0.1)


def test_views_that_disagree_cost_more() -> None:
    z, target = numbers(N, CLASSES), torch.from_numpy(ONE_HOT)
    assert (
        gjs_loss([z, z.roll(1, 1)], target, 0.3)
        > (gjs_loss([z, z], target, 0.3) + gjs_loss([z.roll(1, 1)], target, 0.3)) / 2
    )


def test_extreme_logits_have_finite_gradients() -> None:
    z = torch.tensor([[1e4, -1e4, 0.0, 0.0]], dtype=torch.float64).requires_grad_()
    for y in range(CLASSES):
        loss = gjs_loss([z, 2 * z], torch.eye(CLASSES, dtype=torch.float64)[[y]], 0.5)
        loss.backward()
        assert loss.isfinite()
        assert z.grad is not None
        assert z.grad.isfinite().all()


@pytest.mark.parametrize("penalty", [None, "norm:weight=0.3"])
@pytest.mark.parametrize("clip", CLIPS)
def test_a_step_sees_two_views_one_after_the_other(clip: str, penalty: str | None) -> None:
    built, link = None if penalty is None else PENALTIES.build(penalty), LINKS.build(clip)
    worker = GJS(make_job(X, Y, network(5, 6, CLASSES), clip=clip, penalty=built), weight=0.3)
    seen = [X + 0.2 * numbers(N, 5, seed=i) for i in (0, 1)]
    with torch.no_grad():
        logits = [worker.network(x) for x in seen]
    expected = stated([link(z).numpy() for z in logits], ONE_HOT, 0.3)
    expected += 0.3 * torch.cat(logits).norm(dim=1).mean().item() if penalty else 0.0  # of both views
    sizes: list[int] = []
    worker.network.register_forward_hook(lambda module, args, out: sizes.append(len(out)))
    views = iter(seen)
    step = worker.train_step(torch.arange(N), X, Y, lambda x: next(views))
    assert step.loss.item() == pytest.approx(expected, rel=1e-9)
    assert sizes == [N, N]


@pytest.mark.parametrize(
    ("data", "noise", "weight"),
    [
        ("cifar10", "none", 0.5),
        ("cifar10", "symmetric:rate=0.5", 0.9),  # the nearest is 0.4
        ("cifar10", "symmetric:rate=0.8", 0.1),
        ("cifar10", "asymmetric:rate=0.4", 0.3),
        ("cifar100", "symmetric:rate=0.6", 0.9),
        ("cifar100", "asymmetric:rate=0.2", 0.5),
        ("cifar100", "asymmetric:rate=0.4", 0.1),
        ("digits", "instance:rate=0.2", 0.3),
    ],
)
def test_published_settings(data: str, noise: str, weight: float) -> None:
    assert GJS.preset(data, noise) == {"weight": weight}
    spec = "gjs" if weight == 0.5 else f"gjs:weight={weight}"
    assert RunConfig(data=data, noise=noise, method="gjs").resolve().method == spec


@pytest.mark.parametrize("weight", [0.0, 1.0, -1.0])
def test_a_weight_out_of_range(weight: float) -> None:
    with pytest.raises(ValueError, match="weight must lie between 0 and 1"):
        GJS(make_job(X, Y, network(5, 6, CLASSES)), weight=weight)
