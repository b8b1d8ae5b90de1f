"""DivideMix against NumPy and plain torch, on fixed numbers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from jobs import CLASSES, CLIPS, labels, make_job, network, numbers
from torch import Tensor, nn

from logitclip.clip import CLIPS as LINKS
from logitclip.clip import PENALTIES
from logitclip.criterion import Loss
from logitclip.methods import METHODS
from logitclip.methods import dividemix as module
from logitclip.methods.dividemix import (
    DivideMix,
    lower_of_two,
    mix_up,
    mixmatch_losses,
    negative_entropy,
    refine_labels,
)
from logitclip.methods.dividemix import sharpen as sharpened
from logitclip.runs.config import RunConfig

N = 16
X, Y = numbers(N, 5, seed=20), labels(N, seed=21)
CLIP = "norm:tau=2,delta=1.5"


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def sharpen(p: np.ndarray, temperature: float) -> np.ndarray:
    return p ** (1 / temperature) / (p ** (1 / temperature)).sum(1, keepdims=True)


def make(*, x: Tensor = X, y: Tensor = Y, norm: bool = False, view: Any = None, **more: Any) -> DivideMix:
    """Make a DivideMix with two different networks; options are knobs of the method or settings of the job."""
    names = DivideMix.__init__.__kwdefaults__ or {}
    knobs = {name: more.pop(name) for name in list(more) if name in names}
    view = view or (lambda x, generator: x)
    job = make_job(x, y, lambda seed: network(5, 6, CLASSES, norm=norm, seed=seed % 97), view=view, **more)
    return DivideMix(job, **{"warm_up": 1, **knobs})


def one_epoch(worker: DivideMix, epoch: int, augment: Callable[[Tensor], Tensor] = lambda x: x) -> list[Any]:
    worker.start_epoch(epoch, worker.settings.lr)
    return list(worker.train_epoch(epoch, [], augment))


def logits(net: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return net(x)


# -- warm-up -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", [None, "norm:weight=0.3"])
@pytest.mark.parametrize("confidence", [False, True])
@pytest.mark.parametrize("clip", CLIPS)
def test_warm_up(clip: str, confidence: bool, penalty: str | None) -> None:
    """Cross entropy on all labels; for asymmetric noise plus the negative entropy, the mean of sum p log p."""
    built = None if penalty is None else PENALTIES.build(penalty)
    worker = make(clip=clip, confidence_penalty=confidence, penalty=built)
    nets, link = [copy.deepcopy(net) for net, _, _ in worker.nets], LINKS.build(clip)
    steps = one_epoch(worker, 0)
    assert len(steps) == 2
    for net, trained, (index, y, step) in zip(nets, worker.nets, steps, strict=True):
        z = net(X[index])
        p = link(z).softmax(1)
        loss = -p[range(N), y].log().mean() + confidence * (p * p.log()).sum(1).mean()
        if penalty:
            loss = loss + 0.3 * z.norm(dim=1).mean()
        assert step.loss.item() == pytest.approx(loss.item(), rel=1e-10)
        assert torch.allclose(step.logits, z, rtol=1e-10)
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        for w, before, g in zip(trained[0].parameters(), net.parameters(), gradients, strict=True):
            torch.testing.assert_close(w, before - 0.1 * g, rtol=1e-8, atol=1e-10)


def test_batches_of_the_warm_up_are_twice_as_large() -> None:
    sizes = [len(y) for _, y, _ in one_epoch(make(batch_size=5), 0)]
    assert sizes == [10, 6, 10, 6]
    sizes = [len(y) for _, y, _ in one_epoch(make(batch_size=5, drop_last=True), 0)]
    assert sizes == [10, 10]


def test_negative_entropy() -> None:
    z = numbers(6, CLASSES)
    p = softmax(z.numpy())
    assert negative_entropy(z).item() == pytest.approx((p * np.log(p)).sum(1).mean(), rel=1e-12)


# -- which labels to believe -------------------------------------------------------------------------------------------


def posterior(values: np.ndarray, split: float) -> np.ndarray:
    """Fit two Gaussians by EM, starting from a split at `split`; return the posterior of the lower one."""

    def fitted(share: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        mean = (share * values).sum(1) / share.sum(1)
        variance = (share * (values - mean[:, None]) ** 2).sum(1) / share.sum(1) + 5e-4
        return share.sum(1) / len(values), mean, variance

    def expected(weight: np.ndarray, mean: np.ndarray, variance: np.ndarray) -> tuple[np.ndarray, float]:
        density = np.exp(-((values - mean[:, None]) ** 2) / (2 * variance[:, None]))
        density *= (weight / np.sqrt(2 * np.pi * variance))[:, None]
        return density / density.sum(0), np.log(density.sum(0)).mean()

    parts, bound = fitted(np.stack([values < split, values >= split]).astype(float)), -np.inf
    for _ in range(10):
        share, likelihood = expected(*parts)
        parts = fitted(share)
        if abs(likelihood - bound) < 1e-2:
            break
        bound = likelihood
    return expected(*parts)[0][parts[1].argmin()]


def test_mixture_is_two_gaussians() -> None:
    rng = np.random.default_rng(0)
    values = np.concatenate([0.1 + 0.05 * rng.standard_normal(60), 0.7 + 0.1 * rng.standard_normal(40)])
    got = lower_of_two(torch.from_numpy(values), seed=0).numpy()
    np.testing.assert_allclose(got, posterior(values, 0.4), atol=1e-9)
    assert got[:60].min() > 0.9
    assert got[60:].max() < 0.1
    flipped = lower_of_two(torch.from_numpy(1 - values), seed=0).numpy()  # now the second group is the lower one
    assert flipped[:60].max() < 0.1
    assert flipped[60:].min() > 0.9


def test_mixture_of_equal_losses_says_something_and_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = lower_of_two(torch.zeros(20, dtype=torch.float64), seed=0)
    assert got.isfinite().all()


@pytest.mark.parametrize("clip_mixture", [True, False])
@pytest.mark.parametrize("clip", CLIPS)
def test_losses_that_are_split(clip: str, clip_mixture: bool) -> None:
    """Compute the cross entropy of un-augmented examples in eval mode, scaled to [0, 1]."""
    index = torch.tensor([1, 2, 5, 7, 8, 9, 12, 15])
    worker = make(clip=clip, clip_mixture=clip_mixture, norm=True, index=index, view=_shifted)
    for number, (net, _, _) in enumerate(worker.nets):
        worker.clean_probability(number, 1)
        assert not net.training
        z = logits(net.eval(), X[index] + 1)
        z = LINKS.build(clip)(z) if clip_mixture else z
        loss = -np.log(softmax(z.numpy())[range(8), Y[index]])
        np.testing.assert_allclose(worker.history[number][0], (loss - loss.min()) / np.ptp(loss), atol=1e-10)


def _shifted(x: Tensor, generator: torch.Generator | None) -> Tensor:
    return x + 1 if generator is None else x - 7


@pytest.mark.parametrize("window", [1, 2, 3])
def test_losses_are_averaged_over_a_window(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    seen: list[Tensor] = []
    scaled: list[Tensor] = []
    monkeypatch.setattr(module, "lower_of_two", lambda values, seed: seen.append(values) or values)
    worker = make(loss_window=window)
    for epoch in range(1, 5):
        with torch.no_grad():
            for w in worker.network.parameters():
                w.mul_(1.3)
        worker.clean_probability(0, epoch)
        assert len(worker.history[0]) == min(window, epoch)
        loss = -logits(worker.network.eval(), X).log_softmax(1)[range(N), Y]
        scaled.append((loss - loss.min()) / (loss.max() - loss.min()))
        torch.testing.assert_close(seen[-1], torch.stack(scaled[-window:]).mean(0))  # the last ones, not the first


# -- targets, mixing and the three terms -------------------------------------------------------------------------------


def test_parts_in_numpy() -> None:
    p = softmax(numbers(6, CLASSES).numpy())
    w, y = np.linspace(0, 1, 6), np.eye(CLASSES)[labels(6)]
    got = refine_labels(torch.from_numpy(y), torch.from_numpy(w), torch.from_numpy(p), 0.5)
    np.testing.assert_allclose(got, sharpen(w[:, None] * y + (1 - w[:, None]) * p, 0.5), rtol=1e-12)
    np.testing.assert_allclose(sharpened(torch.from_numpy(p), 0.25), sharpen(p, 0.25), rtol=1e-12)

    x, order = numbers(6, 3).numpy(), np.array([3, 1, 0, 5, 4, 2])
    for weight in (0.8, 0.2):  # the example itself gets the larger share
        got_x, got_y = mix_up(torch.from_numpy(x), torch.from_numpy(p), weight, torch.from_numpy(order))
        np.testing.assert_allclose(got_x, 0.8 * x + 0.2 * x[order], rtol=1e-12)
        np.testing.assert_allclose(got_y, 0.8 * p + 0.2 * p[order], rtol=1e-12)

    z = numbers(6, CLASSES, seed=2)
    q = softmax(z.numpy())
    supervised, unsupervised, uneven = mixmatch_losses(z, torch.from_numpy(p), 4)
    assert supervised.item() == pytest.approx(-(p[:4] * np.log(q[:4])).sum(1).mean(), rel=1e-12)
    assert unsupervised.item() == pytest.approx(((q[4:] - p[4:]) ** 2).mean(), rel=1e-12)  # over all elements
    prior = 1 / CLASSES
    assert uneven.item() == pytest.approx((prior * np.log(prior / q.mean(0))).sum(), rel=1e-12)


def test_terms_without_unlabelled_rows_or_with_a_class_never_predicted() -> None:
    z = torch.tensor([[0.0, -2000.0]]).repeat(4, 1).requires_grad_()
    supervised, unsupervised, uneven = mixmatch_losses(z, torch.tensor([[1.0, 0.0]]).repeat(4, 1), 4)
    assert unsupervised.item() == 0
    (supervised + unsupervised + uneven).backward()
    assert uneven.isfinite()  # log p is -inf, the probability 0
    assert z.grad is not None
    assert z.grad.isfinite().all()


def test_weight_ramps_up_with_fractions_of_epochs() -> None:
    worker = make(warm_up=10, lambda_u=25.0)
    expected = {0: 0.0, 10: 0.0, 10.5: 25 * 0.5 / 16, 18: 12.5, 25.9: 25 * 15.9 / 16, 26: 25.0, 300: 25.0}
    assert {epoch: worker.unsupervised_weight(epoch) for epoch in expected} == pytest.approx(expected)


@pytest.mark.parametrize("penalty", [None, "norm:weight=0.3"])
@pytest.mark.parametrize("views", [1, 2, 3])
@pytest.mark.parametrize("clip", ["none", CLIP, "value:limit=0.5"])
def test_semi_supervised_steps(monkeypatch: pytest.MonkeyPatch, clip: str, views: int, penalty: str | None) -> None:
    """Two whole steps of each network, written out: targets, mixed batch, three terms, weights after the step."""
    drawn: list[tuple[float, Tensor]] = []

    def recorded(x: Tensor, target: Tensor, weight: float, order: Tensor) -> tuple[Tensor, Tensor]:
        drawn.append((weight, order))
        return mix_up(x, target, weight, order)

    monkeypatch.setattr(module, "mix_up", recorded)
    built = None if penalty is None else PENALTIES.build(penalty)
    worker = make(clip=clip, views=views, lambda_u=30.0, warm_up=2, ramp=4.0, norm=True, batch_size=5, penalty=built)
    clean = [torch.linspace(0, 1, N), torch.linspace(1, 0, N) ** 0.8]
    monkeypatch.setattr(worker, "clean_probability", lambda number, epoch: clean[number])
    nets = [copy.deepcopy(net) for net, _, _ in worker.nets]
    link = LINKS.build(clip)
    made: list[Tensor] = []

    def augment(x: Tensor) -> Tensor:
        made.append(x + 0.1 * numbers(*x.shape, seed=len(made)))
        return made[-1]

    worker.start_epoch(3, 0.1)
    at: dict[int, int] = {0: 0, 1: 0}
    for step_number, (index, y, step) in enumerate(worker.train_epoch(3, [], augment)):
        number = 0 if step_number < -(-int((clean[1] > 0.5).sum()) // 5) else 1
        net, other, believed = nets[number].train(), nets[1 - number].eval(), clean[1 - number]
        assert (believed[index] > 0.5).all()
        x_views, u_views = made[:views], made[views:]
        assert len(u_views) == views
        made.clear()
        with torch.no_grad():  # in train mode: batch norm sees these passes as well, those of the guesses first
            guess: Any = 0
            for u in u_views:
                guess = guess + link(net(u)).softmax(1) + link(other(u)).softmax(1)
            first = [net(x) for x in x_views]
            p = sum(link(z).softmax(1) for z in first) / views
        w = believed[index][:, None].numpy()
        target_x = sharpen(w * np.eye(CLASSES)[y] + (1 - w) * p.numpy(), 0.5)  # type: ignore[union-attr]
        target_u = sharpen((guess / (2 * views)).numpy(), 0.5)
        targets = torch.from_numpy(np.concatenate([target_x] * views + [target_u] * views))
        weight, order = drawn.pop()
        own = max(weight, 1 - weight)
        inputs = torch.cat([*x_views, *u_views])
        z = net(own * inputs + (1 - own) * inputs[order])
        target = own * targets + (1 - own) * targets[order]
        q, labelled = link(z).softmax(1), views * len(y)
        supervised = -(target[:labelled] * q[:labelled].log()).sum(1).mean()
        unsupervised = (q[labelled:] - target[labelled:]).square().mean()
        uneven = (0.25 * torch.log(0.25 / q.mean(0))).sum()
        steps = int((believed > 0.5).sum()) // 5 + 1
        ramped = 30.0 * min((3 + at[number] / steps - 2) / 4, 1)
        loss = supervised + ramped * unsupervised + uneven
        if penalty:
            loss = loss + 0.3 * z.norm(dim=1).mean()
        assert step.loss.item() == pytest.approx(loss.item(), rel=1e-8)
        torch.testing.assert_close(step.logits, first[0])
        with torch.no_grad():
            gradients = torch.autograd.grad(loss, list(net.parameters()))
            for v, g in zip(net.parameters(), gradients, strict=True):
                v -= 0.1 * g
        at[number] += 1
    assert at == {0: 2, 1: 2}
    for net, (trained, _, _) in zip(nets, worker.nets, strict=True):
        for name, value in net.state_dict().items():
            torch.testing.assert_close(trained.state_dict()[name], value, rtol=1e-7, atol=1e-9)


def test_mixing_weights_are_beta_and_orders_are_permutations(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[float, Tensor]] = []
    monkeypatch.setattr(module, "mix_up", lambda x, t, weight, order: drawn.append((weight, order)) or (x, t))
    x, y = numbers(600, 5), labels(600)
    one_epoch(make(x=x, y=y, batch_size=2, alpha=4.0), 1)
    weights = np.array([weight for weight, _ in drawn])
    assert len(weights) > 200
    assert weights.mean() == pytest.approx(0.5, abs=0.04)
    assert weights.var() == pytest.approx(1 / 36, rel=0.25)  # of Beta(4, 4)
    assert all(torch.equal(order.sort().values, torch.arange(len(order))) for _, order in drawn)
    assert len({tuple(order.tolist()) for _, order in drawn}) > 50


# -- two networks ------------------------------------------------------------------------------------------------------


def test_networks_start_differently_and_exchange_their_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make()
    assert not torch.equal(worker.nets[0][0][0].weight, worker.nets[1][0][0].weight)  # type: ignore[index]
    clean = [torch.arange(N) < 6, torch.arange(N) >= 10]
    monkeypatch.setattr(worker, "clean_probability", lambda number, epoch: clean[number].float())
    (first, _, _), (second, _, _) = one_epoch(worker, 1)
    assert sorted(first.tolist()) == list(range(10, N))
    assert sorted(second.tolist()) == list(range(6))


def test_modes() -> None:
    """The network being trained is in train mode; the other one, and any evaluation, is in eval mode."""
    worker = make(norm=True)
    seen: list[tuple[int, bool, bool]] = []
    for number, (net, _, _) in enumerate(worker.nets):
        net.register_forward_hook(
            lambda net, args, out, n=number: seen.append((n, net.training, torch.is_grad_enabled()))
        )
    one_epoch(worker, 0)
    assert seen == [(0, True, True), (1, True, True)]
    seen.clear()
    one_epoch(worker, 1)
    looks, rest = seen[:2], seen[2:]
    assert looks == [(0, False, False), (1, False, False)]
    for number in (0, 1):
        own = rest[: len(rest) // 2] if number == 0 else rest[len(rest) // 2 :]
        guesses = [(number, True, False)] * 2 + [(1 - number, False, False)] * 2
        assert own == [*guesses, *[(number, True, False)] * 2, (number, True, True)]
    seen.clear()
    worker.predict(X)
    assert [(n, training) for n, training, _ in seen] == [(0, False), (1, False)]


def test_prediction_is_the_sum_of_logits_without_the_clip() -> None:
    worker = make(clip="norm:tau=0.1", norm=True)
    expected = sum(logits(net.eval(), X) for net, _, _ in worker.nets)
    with torch.no_grad():
        torch.testing.assert_close(worker.predict(X), expected)


def test_both_networks_follow_the_learning_rate() -> None:
    worker = make()
    worker.start_epoch(0, 0.0123)
    assert [group["lr"] for o in worker.optimizers() for group in o.param_groups] == [0.0123, 0.0123]


# -- which examples ----------------------------------------------------------------------------------------------------


def test_only_the_given_examples_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    index = torch.tensor([0, 3, 4, 6, 9, 10, 13])
    x = X.clone()
    x[torch.ones(N, dtype=torch.bool).index_fill(0, index, False)] = torch.nan  # held out: must not be used
    worker = make(x=x, index=index, batch_size=3)
    for epoch in (0, 1, 2):
        for at, y, step in one_epoch(worker, epoch):
            assert set(at.tolist()) <= set(index.tolist())
            assert torch.equal(y, Y[at])
            assert step.loss.isfinite()


@pytest.mark.parametrize("probability", [0.0, 1.0, 0.3])
def test_no_split(monkeypatch: pytest.MonkeyPatch, probability: float) -> None:
    """If all or no labels are considered clean, all examples count as labelled, with their own clean probability."""
    worker = make()
    targets: list[Tensor] = []

    def watched(given: Tensor, clean: Tensor, p: Tensor, temperature: float) -> Tensor:
        assert torch.equal(clean, torch.full((N,), probability))
        targets.append(refine_labels(given, clean, p, temperature))
        return targets[-1]

    monkeypatch.setattr(module, "refine_labels", watched)
    monkeypatch.setattr(worker, "clean_probability", lambda *_: torch.full((N,), probability))
    for at, _, step in one_epoch(worker, 1):
        assert sorted(at.tolist()) == list(range(N))
        assert step.loss.isfinite()
    assert len(targets) == 2


def test_batch_norm_trains_on_a_single_clean_example(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make(norm=True)
    monkeypatch.setattr(worker, "clean_probability", lambda *_: (torch.arange(N) == 3).float())
    for at, _, step in one_epoch(worker, 1):
        assert set(at.tolist()) == {3}
        assert step.loss.isfinite()


@pytest.mark.parametrize(("drop_last", "expected"), [(False, [4, 4, 2, 4, 4, 2]), (True, [4, 4, 4, 4])])
def test_drop_last(monkeypatch: pytest.MonkeyPatch, drop_last: bool, expected: list[int]) -> None:
    worker = make(batch_size=4, drop_last=drop_last)
    monkeypatch.setattr(worker, "clean_probability", lambda *_: (torch.arange(N) < 10).float())
    assert [len(at) for at, _, _ in one_epoch(worker, 1)] == expected
    monkeypatch.setattr(worker, "clean_probability", lambda *_: (torch.arange(N) < 3).float())
    assert [len(at) for at, _, _ in one_epoch(worker, 1)] == [3, 3]  # a part smaller than a batch is used whole


# -- the clip ----------------------------------------------------------------------------------------------------------

SITES = ("clip_warm_up", "clip_guesses", "clip_mixed", "clip_mixture")


def trained(**more: Any) -> Tensor:
    """Return all weights after three epochs, two of them semi-supervised."""
    worker = make(x=numbers(60, 5), y=labels(60), batch_size=20, lr=0.3, lambda_u=5.0, **more)
    for epoch in range(3):
        one_epoch(worker, epoch)
    return torch.cat([value.detach().flatten() for value in worker.weights().values()])


def test_each_place_of_the_clip_can_be_switched_and_matters() -> None:
    everywhere, nowhere = trained(clip=CLIP), trained(clip="none")
    results = [everywhere, nowhere]
    for site in SITES:
        results += [trained(clip=CLIP, **{site: False}), trained(clip=CLIP, **{s: s == site for s in SITES})]
    for i, one in enumerate(results):
        for other in results[:i]:
            assert (one - other).abs().max() > 1e-6
    assert torch.equal(trained(clip=CLIP, **dict.fromkeys(SITES, False)), nowhere)


# -- presets and refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "noise", "expected"),
    [
        ("cifar10", "symmetric:rate=0.2", (10, 0, 0.5, 1, False)),
        ("cifar10", "symmetric:rate=0.5", (10, 25, 0.5, 1, False)),
        ("cifar10", "symmetric:0.5", (10, 25, 0.5, 1, False)),
        ("cifar10", "symmetric:rate=0.8", (10, 25, 0.5, 1, False)),
        ("cifar10", "symmetric:rate=0.9", (10, 50, 0.6, 5, False)),
        ("cifar10", "asymmetric:rate=0.4", (10, 0, 0.5, 1, True)),
        ("cifar100", "symmetric:rate=0.2", (30, 25, 0.5, 1, False)),
        ("cifar100", "symmetric:rate=0.5", (30, 150, 0.5, 1, False)),
        ("cifar100", "symmetric:rate=0.8", (30, 150, 0.5, 1, False)),
        ("cifar100:labels=fine", "symmetric:rate=0.9", (30, 150, 0.6, 5, False)),
        ("cifar10", "instance:rate=0.4", (10, 0, 0.5, 1, False)),
        ("cifar100", "real:set=noisy_label", (30, 0, 0.5, 1, False)),
        ("webvision", "none", (1, 0, 0.5, 1, False)),
        ("digits", "symmetric:rate=0.45", (10, 25, 0.5, 1, False)),
    ],
)
def test_presets(data: str, noise: str, expected: tuple[Any, ...]) -> None:
    preset = DivideMix.preset(data, noise)
    names = ("warm_up", "lambda_u", "p_threshold", "loss_window", "confidence_penalty")
    assert tuple(preset[name] for name in names) == expected
    assert preset["alpha"] == (0.5 if data == "webvision" else 4)


def test_a_default_given_against_the_preset_stays_when_it_is_read_again() -> None:
    own = RunConfig(method="dividemix:lambda_u=25", noise="asymmetric:rate=0.4")
    assert METHODS.parse(own.resolve().method)[1]["lambda_u"] == 25
    assert own.resolve().resolve() == own.resolve()
    assert own.id != replace(own, method="dividemix").id


def test_presets_reach_the_run_and_given_knobs_come_first() -> None:
    def resolved(method: str, noise: str) -> str:
        return RunConfig(data="digits", method=method, noise=noise).resolve().method

    assert resolved("dividemix", "symmetric:rate=0.5") == "dividemix"  # all defaults
    assert resolved("dividemix", "asymmetric:rate=0.4") == "dividemix:lambda_u=0,confidence_penalty=true"
    assert resolved("dividemix:lambda_u=5", "asymmetric:rate=0.4") == "dividemix:lambda_u=5,confidence_penalty=true"
    assert resolved("dividemix", "symmetric:rate=0.9") == "dividemix:lambda_u=50,p_threshold=0.6,loss_window=5"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"criterion": Loss("gce")}, "accepts only the loss ce"),
        ({"criterion": nn.CrossEntropyLoss(label_smoothing=0.1)}, "accepts only the loss ce"),
        ({"y": torch.full((N, CLASSES), 0.25)}, "needs class labels, not soft ones"),
        ({"warm_up": -1}, "warm_up must be at least 0"),
        ({"lambda_u": -1.0}, "lambda_u must be at least 0"),
        ({"views": 0}, "views must be at least 1"),
        ({"loss_window": 0}, "loss_window must be at least 1"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"alpha": -1.0}, "alpha must be positive"),
        ({"ramp": 0.0}, "ramp must be positive"),
        ({"p_threshold": 1.0}, "p_threshold must lie between 0 and 1"),
    ],
)
def test_refusals(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**more)


def test_one_network_for_both_is_refused() -> None:
    shared = network(5, CLASSES)
    with pytest.raises(ValueError, match="trains two networks: give a function"):
        DivideMix(make_job(X, Y, lambda seed: shared))


def test_a_run_that_is_all_warm_up_says_so(caplog: pytest.LogCaptureFixture) -> None:
    make(warm_up=4, epochs=5)
    assert not caplog.records
    make(warm_up=5, epochs=5)
    assert "All 5 epochs are warm-up" in caplog.text


def test_several_devices_are_refused_before_anything_starts() -> None:
    with pytest.raises(ValueError, match="'dividemix' trains in one process: devices and nodes must be 1"):
        RunConfig(method="dividemix", devices=2).resolve()


# -- state -------------------------------------------------------------------------------------------------------------


def test_state_round_trip() -> None:
    one, other = make(loss_window=3, momentum=0.9, norm=True), make(loss_window=3, momentum=0.9, norm=True, seed=0)
    for epoch in range(3):
        one_epoch(one, epoch)
    other.load(copy.deepcopy(one.weights()), copy.deepcopy(one.state_dict()))
    for worker in (one, other):
        one_epoch(worker, 3)
    assert all(map(torch.equal, one.weights().values(), other.weights().values()))
    assert all(torch.equal(a, b) for a, b in zip(one.history[0], other.history[0], strict=True))
