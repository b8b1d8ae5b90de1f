"""Co-teaching against plain torch, on fixed numbers."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from jobs import CLASSES, CLIPS, labels, make_job, network, numbers
from torch import nn

from logitclip.clip import CLIPS as LINKS
from logitclip.methods.co_teaching import CoTeaching, left_out
from logitclip.runs.config import RunConfig

N = 12
X, Y = numbers(N, 5, seed=3), labels(N)


def make(**more: Any) -> CoTeaching:
    knobs = {name: more.pop(name) for name in ("forget_rate", "gradual") if name in more}
    norm = more.pop("norm", False)
    return CoTeaching(make_job(X, Y, lambda seed: network(5, 6, CLASSES, norm=norm, seed=seed % 97), **more), **knobs)


def one_step(worker: CoTeaching, epoch: int) -> Any:
    worker.start_epoch(epoch, 0.1)
    ((_, _, step),) = worker.train_epoch(epoch, [(torch.arange(N), X, Y)], lambda x: x)
    return step


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("epoch", [0, 2, 9])
def test_each_network_learns_from_what_the_other_finds_easy(epoch: int, clip: str) -> None:
    worker, link = make(clip=clip, forget_rate=0.5, gradual=5, norm=True), LINKS.build(clip)
    nets = [copy.deepcopy(net).train() for net, _, _ in worker.nets]
    step = one_step(worker, epoch)
    kept = {0: 12, 2: 9, 9: 6}[epoch]
    z = [link(net(X)) for net in nets]
    each = [-of_one.log_softmax(1)[range(N), Y] for of_one in z]
    easy = [sorted(range(N), key=lambda i, of_one=of_one: of_one[i].item())[:kept] for of_one in each]
    losses = [each[0][easy[1]].mean(), each[1][easy[0]].mean()]
    assert step.loss.item() == pytest.approx(losses[0].item(), rel=1e-9)
    for net, loss, (trained, _, _) in zip(nets, losses, worker.nets, strict=True):
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        for w, before, g in zip(trained.parameters(), net.parameters(), gradients, strict=True):
            torch.testing.assert_close(w, before - 0.1 * g, rtol=1e-7, atol=1e-9)


def test_the_share_left_out_is_that_of_the_released_schedule() -> None:
    for rate, gradual in ((0.45, 10), (0.2, 5), (0.5, 1)):
        schedule = np.ones(30) * rate
        schedule[:gradual] = np.linspace(0, rate, gradual)
        np.testing.assert_allclose([left_out(epoch, rate, gradual) for epoch in range(30)], schedule)


def test_the_prediction_is_that_of_the_first_network_without_the_clip() -> None:
    worker = make(clip="norm:tau=0.1", norm=True)
    with torch.no_grad():
        torch.testing.assert_close(worker.predict(X), worker.nets[0][0].eval()(X))


def test_both_networks_train_and_are_saved() -> None:
    worker, other = make(norm=True), make(norm=True)
    assert not torch.equal(*(next(iter(net.parameters())) for net, _, _ in worker.nets))
    one_step(worker, 0)
    assert all(net.training for net, _, _ in worker.nets)
    other.load(worker.weights(), worker.state_dict())
    for a, b in zip(worker.nets, other.nets, strict=True):
        assert all(
            torch.equal(x, y) for x, y in zip(a[0].state_dict().values(), b[0].state_dict().values(), strict=True)
        )


def test_what_it_refuses() -> None:
    with pytest.raises(ValueError, match="forget_rate must be at least 0 and below 1, got 1"):
        make(forget_rate=1.0)
    with pytest.raises(ValueError, match="gradual must be at least 1, got 0"):
        make(gradual=0)
    soft = numbers(N, CLASSES).softmax(1)
    with pytest.raises(ValueError, match="needs class labels, not soft ones"):
        CoTeaching(make_job(X, soft, lambda seed: network(5, CLASSES, seed=seed % 97)))
    same: nn.Module = network(5, CLASSES)
    with pytest.raises(ValueError, match="trains two networks"):
        CoTeaching(make_job(X, Y, lambda seed: same))
    with pytest.raises(ValueError, match="trains in one process: devices and nodes must be 1"):
        RunConfig(method="co_teaching", devices=2).resolve()


def test_the_noise_rate_is_left_out() -> None:
    def resolved(noise: str) -> str:
        return RunConfig(noise=noise, method="co_teaching").resolve().method

    assert resolved("symmetric:rate=0.5") == "co_teaching:forget_rate=0.5"
    assert resolved("pair:rate=0.45") == "co_teaching:forget_rate=0.45"
    assert resolved("none") == "co_teaching"
