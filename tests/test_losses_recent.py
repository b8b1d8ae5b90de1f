"""What is special about the losses since 2023 and their statistics; test_losses.py has the tests of all losses."""

from __future__ import annotations

import io
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F

from logitclip import fused, losses, theory
from logitclip.clip import clip_logits, extended_logit_norm, l1_penalty, make_clip, softcap, z_penalty
from logitclip.criterion import LogitClip, Loss, build_criterion
from logitclip.fused import STATISTICS, SUMS, Wanted, row_log_probs
from logitclip.losses import LOSSES, loss
from logitclip.losses.memory import EVERY, LOWEST, RECENT, find_threshold, fit_mixture

torch.set_num_threads(1)

EVERYTHING = Wanted(tuple(STATISTICS), {"gamma": 0.5})


def batch(rows: int = 13, classes: int = 9, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(rows, classes, generator=generator, dtype=torch.float64)
    z = z * 10 ** torch.linspace(-1, 1.3, rows, dtype=torch.float64)[:, None]
    return z, torch.randint(classes, (rows,), generator=generator)


# -- row statistics ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["one block", "several blocks", "not kept"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    block, kept = {"one block": (1000, 1000), "several blocks": (30, 1000), "not kept": (30, 0)}[request.param]
    monkeypatch.setattr(fused, "MIN_BLOCKED", 0)
    monkeypatch.setattr(fused, "BLOCK_ENTRIES", block)
    monkeypatch.setattr(fused, "MOST_EXPONENTIALS", kept)


def by_definition(z: Tensor, y: Tensor, clip: Any) -> list[Tensor]:
    """All statistics from probabilities, as their descriptions say."""
    log_probs = torch.log_softmax(z if clip is None else clip_logits(z, *clip), 1)
    p, log_floor = log_probs.exp(), math.log(1e-7)
    weight = (1 - p.detach()) ** 0.5
    floored = log_probs.clamp_min(log_floor)
    floored_weight = (1 - floored.detach().exp()) ** 0.5
    return [
        log_probs.gather(1, y[:, None])[:, 0],
        log_probs.sum(1),
        log_probs.max(1).values,
        (p.argmax(1) == y).to(z.dtype),
        torch.full_like(z[:, 0], z.shape[1]),
        (p**2).sum(1),
        (p * log_probs).sum(1),
        (log_probs - log_floor).clamp_min(0).sum(1),
        (-weight * log_probs).sum(1),
        (-((1 - 1e-7) ** 0.5) * log_floor + floored_weight * floored).sum(1),
    ]


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("clip", [None, (1.0, None), (2.0, 0.5), (60.0, 50.0)], ids=str)
def test_the_closed_form_of_every_statistic(clip: Any) -> None:
    z, y = batch()
    upstream = [torch.linspace(-1, 2, len(z), dtype=z.dtype).roll(i) for i in range(10)]
    results = []
    for function in (
        lambda x: row_log_probs(x, y, None if clip is None else make_clip(*clip), EVERYTHING),
        lambda x: by_definition(x, y, clip),
    ):
        x = z.clone().requires_grad_()
        outputs = list(function(x))
        pairs = [(o, u) for o, u in zip(outputs, upstream, strict=True) if o.requires_grad]
        (gradient,) = torch.autograd.grad([o for o, _ in pairs], x, [u for _, u in pairs])
        results.append([o.detach() for o in outputs] + [gradient])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("clip", [None, (1.0, None)], ids=str)
def test_one_statistic_at_a_time_and_its_second_derivative(clip: Any) -> None:
    z, y = batch(5, 4)
    for name in ("max_log_p", "sum_p2", "sum_p_log_p", "sum_log_p"):
        wanted = Wanted((name,))

        def one(x: Tensor, wanted: Wanted = wanted) -> Tensor:
            return row_log_probs(x, y, None if clip is None else make_clip(*clip), wanted)[1]

        x = z.clone().requires_grad_()
        assert gradcheck(one, (x,))
        assert gradgradcheck(one, (x,))


def test_a_masked_class_counts_in_no_statistic() -> None:
    z, y = batch()
    z[:, 3], y[y == 3] = -math.inf, 0
    there = [k for k in range(9) if k != 3]
    for clip in (None, make_clip(1.0)):
        got = row_log_probs(z, y, clip, EVERYTHING)
        alone = row_log_probs(z[:, there], y - (y > 3).long(), clip, EVERYTHING)
        for a, b in zip(got, alone, strict=True):
            torch.testing.assert_close(a, b)


def test_a_statistic_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"The loss 'odd' takes 'sum_p3': .* sum_log_p, max_log_p"):

        @loss
        def odd(log_p: Tensor, sum_p3: Tensor) -> Tensor:
            """Nothing."""
            return log_p + sum_p3

    assert "odd" not in LOSSES
    assert set(SUMS) <= set(STATISTICS)


# -- label smoothing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.1, 0.9, -0.4])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("soft", [False, True])
def test_label_smoothing_is_that_of_torch(share: float, reduction: Any, weighted: bool, soft: bool) -> None:
    z, y = batch(20, 5)
    weight = torch.tensor([0.5, 1.0, 2.0, 0.1, 3.0], dtype=z.dtype) if weighted else None
    target = torch.softmax(batch(20, 5, seed=1)[0], 1) if soft else y.index_fill(0, torch.tensor([3]), -100)
    smooth = target if soft else F.one_hot(target.clamp_min(0), 5).to(z.dtype)
    if share >= 0:
        theirs = nn.CrossEntropyLoss(label_smoothing=share, reduction=reduction, weight=weight)(z, target)
    else:  # torch refuses it; the formula does not
        smooth = (1 - share) * smooth + share / 5
        each = -(smooth * torch.log_softmax(z, 1) * (1.0 if weight is None else weight)).sum(1)
        counts = torch.ones(20, dtype=z.dtype) if soft else (target >= 0).to(z.dtype)
        each = each * (counts > 0)
        if not soft and weight is not None:
            counts = counts * weight[target.clamp_min(0)]
        theirs = {"none": each, "sum": each.sum(), "mean": each.sum() / counts.sum()}[reduction]
    ours = Loss("ce", label_smoothing=share, reduction=reduction, weight=weight)(z, target)
    torch.testing.assert_close(ours, theirs)


def test_without_label_smoothing_ce_computes_only_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Wanted] = []
    monkeypatch.setattr(
        "logitclip.losses.contract.row_log_probs",
        lambda logits, target, clip, wanted: asked.append(wanted) or row_log_probs(logits, target, clip, wanted),
    )
    z, y = batch()
    Loss("ce")(z, y)
    Loss("ce", label_smoothing=0.1)(z, y)
    smoothed = ("sum_log_p", "classes")
    assert [wanted.names for wanted in asked] == [(), (), smoothed, smoothed]  # when made, and when called


# -- single losses -----------------------------------------------------------------------------------------------------


def test_bi_tempered_has_the_values_of_its_authors_tests() -> None:
    """Their loss of soft labels is ours plus a number that depends only on the labels."""
    z = torch.tensor([[-0.5, 0.1, 2.0], [0.1, 1.5, -5.0], [4.0, -3.0, -6.0]], dtype=torch.float64)
    labels = torch.tensor([[0.2, 0.3, 0.5], [0.6, 0.3, 0.1], [0.2, 0.8, 0.0]], dtype=torch.float64)
    for target, values in (
        (labels, [0.02301914, 0.18972909, 0.93874922]),
        (0.85 * torch.eye(3, dtype=torch.float64) + 0.05, [0.76652711, 0.08627685, 1.35443510]),
    ):
        log_half = (target.sqrt() - 1) / 0.5
        constant = (target * log_half).sum(1) - ((target**1.5).sum(1) - 1) / 1.5
        ours = losses.bi_tempered(z, target, t1=0.5, t2=1.5) + constant
        torch.testing.assert_close(ours, torch.tensor(values, dtype=torch.float64), rtol=0, atol=2e-5)


def test_bi_tempered_at_1_and_1_is_cross_entropy_and_its_predictions_sum_to_1() -> None:
    z, y = batch(20, 50)
    torch.testing.assert_close(losses.bi_tempered(z, y, t1=1.0, t2=1.0), losses.ce(z, y))
    from logitclip.losses.other import _log_tempered_softmax

    for t in (1.01, 1.2, 2.0, 5.0):
        torch.testing.assert_close(_log_tempered_softmax(z, t).exp().sum(1), torch.ones(20, dtype=z.dtype))
    x = batch(3, 4)[0].requires_grad_()
    assert gradgradcheck(lambda z: losses.bi_tempered(z, torch.tensor([0, 1, 2])), (x,))


def test_backward_needs_labels_that_say_something() -> None:
    """At rate 1 - 1/K all rows of T are equal, and the loss was infinite."""
    with pytest.raises(ValueError, match=r"rate must not be 1 - 1/K = 0\.75"):
        Loss("backward:rate=0.75")(torch.zeros(2, 4), torch.tensor([0, 1]))
    assert Loss("backward:rate=0.75")(torch.zeros(2, 3), torch.tensor([0, 1])).isfinite()


def test_forward_and_backward_take_a_matrix(tmp_path: Path) -> None:
    z, y = batch(20, 3)
    matrix = np.array([[0.7, 0.2, 0.1], [0.1, 0.9, 0.0], [0.3, 0.1, 0.6]])
    np.save(tmp_path / "t.npy", matrix)
    for name in ("forward", "backward"):
        expected = oracles.loss(name, z.numpy(), y.numpy(), matrix=matrix).values
        for given in (str(tmp_path / "t.npy"), torch.tensor(matrix)):
            np.testing.assert_allclose(Loss(name, matrix=given, reduction="none")(z, y), expected, rtol=1e-9)
        torch.testing.assert_close(Loss(f"{name}:rate=0")(z, y), Loss("ce")(z, y))
    with pytest.raises(ValueError, match="matrix must be square, a row and a column for each class"):
        Loss("forward", matrix=torch.tensor(matrix))(*batch(4, 5))
    with pytest.raises(ValueError, match="matrix has no inverse"):
        Loss("backward", matrix=torch.full((2, 2), 0.5))
    with pytest.raises(ValueError, match=r"Each row of matrix must sum to 1"):
        Loss("forward", matrix=torch.ones(2, 2))
    np.save(tmp_path / "t.npy", np.eye(3))  # a file that has changed is read again
    for name in ("forward", "backward"):
        torch.testing.assert_close(Loss(name, matrix=str(tmp_path / "t.npy"))(z, y), Loss("ce")(z, y))
    # In expectation over symmetric noise, the backward correction is the clean loss.
    criterion = Loss("backward:rate=0.3", reduction="none")
    values = torch.stack([criterion(z, torch.full((20,), k)) for k in range(3)])
    noisy = 0.7 * values[y, torch.arange(20)] + 0.15 * (values.sum(0) - values[y, torch.arange(20)])
    torch.testing.assert_close(noisy, losses.ce(z, y))


def test_eps_softmax_has_no_gradient_for_impossible_labels() -> None:
    z = torch.tensor([[0.0, math.log(2e-3)], [0.0, math.log(5e-4)]], dtype=torch.float64, requires_grad=True)
    values = Loss("eps_ce_mae:alpha=1,beta=0", reduction="none")(z, torch.tensor([1, 1]))
    (gradient,) = torch.autograd.grad(values.sum(), z)
    assert gradient[0, 1] < -0.9  # cross entropy's
    assert (gradient[1] == 0).all()  # p_y < 1e-8 (m+1)
    assert values[1].item() == pytest.approx(-math.log(1e-8))


def test_the_bound_of_the_unhinged_loss_is_reached() -> None:
    for p in (1.5, 2.0, math.inf):
        lower, upper = theory.base_loss_bounds("unhinged", 2.0, 10, p=p)
        assert upper == -lower
        direction = torch.full((1, 10), -1.0, dtype=torch.float64)
        direction[0, 3] = 9.0 ** (1 / (p - 1)) if p < math.inf else 1.0
        values = [LogitClip("unhinged", tau=2.0, p=p)(s * 1e3 * direction, torch.tensor([3])).item() for s in (1, -1)]
        assert values == pytest.approx([lower, upper], rel=1e-6)
    assert theory.base_loss_bounds("unhinged", math.inf, 10) == (-math.inf, math.inf)


# -- optimised gradient clipping ---------------------------------------------------------------------------------------


def recent_values() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    clean, noisy = torch.randn(2, RECENT // 2, generator=generator)
    return torch.cat([0.3 * clean.abs(), 4 + noisy]).clamp(1e-7, -math.log(LOWEST)).double()


def test_the_threshold_is_where_noisy_labels_have_so_much_more_gradient() -> None:
    recent = recent_values()
    (clean, clean_variance), (noisy, noisy_variance) = fit_mixture(recent)
    assert clean < 0.4
    assert noisy == pytest.approx(4, abs=0.2)
    h = np.linspace(1e-7, -math.log(1e-7), 1000)

    def mean_gradient(mean: float, variance: float, t: float) -> float:
        density = np.exp(-((h - mean) ** 2) / (2 * variance))
        return float((density * np.minimum(np.exp(h), 1 / t)).sum() / density.sum())

    thresholds = []
    for most in (1.5, 3.0, 10.0):
        t = find_threshold(recent, torch.reciprocal, most)
        thresholds.append(t)
        ratios = [
            mean_gradient(noisy, noisy_variance, x) / mean_gradient(clean, clean_variance, x) for x in (t - 1e-3, t)
        ]
        assert ratios[0] >= most * (1 - 1e-2)
        assert ratios[1] <= most * (1 + 1e-2)
    assert thresholds == sorted(thresholds, reverse=True)
    assert find_threshold(recent, torch.reciprocal, 1e9) == LOWEST  # never so much: nothing is clipped
    assert find_threshold(recent, torch.reciprocal, 0.5) == 1 - LOWEST


@pytest.mark.parametrize("name", ["ogc_ce", "ogc_focal", "ogc_gce"])
def test_ogc_finds_its_threshold_in_training_and_resumes(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    n = RECENT // EVERY
    batches = [
        (4 * torch.randn(n, 3, generator=generator), torch.randint(3, (n,), generator=generator))
        for _ in range(EVERY + 5)
    ]
    criterion = LogitClip(name, tau=20.0)
    inner: Any = criterion.criterion
    criterion.set_lr(0.01)
    assert inner.memory.lr.item() == pytest.approx(0.01)  # it sets the ratio of the gradients
    plain = Loss(name, reduction="none")
    for step, (z, y) in enumerate(batches):
        if step == EVERY - 1:
            assert inner.memory.threshold.item() == pytest.approx(LOWEST)
        criterion(z, y)
        if step == 10:  # a validation loss is not remembered
            criterion.eval()(z, y)
            criterion.train()
            with torch.no_grad():
                criterion(z, y)
    found = inner.memory.threshold.item()
    assert LOWEST < found < 1
    # Below the threshold the loss is its tangent: continuous, with a constant slope in p.
    p = torch.tensor([0.25, 0.5, 0.999999, 1.000001], dtype=torch.float64) * found
    log_p = p.log().requires_grad_()
    function: Any = LOSSES[name]
    values = function.phi(log_p, inner.memory.threshold.double())
    slopes = torch.autograd.grad(values.sum(), log_p)[0] / p
    torch.testing.assert_close(slopes, slopes[:1].expand(4), rtol=1e-4, atol=0)
    torch.testing.assert_close(values[2], values[3], rtol=1e-4, atol=1e-4)
    assert (plain(*batches[0]) - Loss(name, reduction="none")(*batches[0])).abs().max() == 0
    # What is saved continues as if nothing had happened.
    file = io.BytesIO()
    torch.save(criterion.state_dict(), file)
    file.seek(0)
    resumed = LogitClip(name, tau=20.0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    resumed.set_lr(0.01)
    for z, y in batches:
        assert torch.equal(criterion(z, y), resumed(z, y))


def test_ogc_clips_nothing_before_it_has_seen_enough() -> None:
    criterion = Loss("ogc_ce")
    assert criterion.memory is not None
    generator = torch.Generator().manual_seed(0)
    for _ in range(2 * EVERY):
        criterion(4 * torch.randn(8, 3, generator=generator), torch.randint(3, (8,), generator=generator))
    assert criterion.memory.threshold.item() == pytest.approx(LOWEST)


def test_ogc_does_not_remember_ignored_examples() -> None:
    criterion = Loss("ogc_ce")
    assert criterion.memory is not None
    criterion(torch.zeros(4, 2), torch.tensor([0, -100, 1, -100]))
    assert criterion.memory.recent.isnan().sum() == 2
    assert criterion.memory.recent[-4].item() == pytest.approx(math.log(2))


# -- links and penalties -----------------------------------------------------------------------------------------------


def test_softcap_bounds_and_keeps_the_order() -> None:
    z, _ = batch()
    capped = softcap(z, 2.0)
    assert (capped.abs() <= 2).all()
    assert torch.equal(capped[:6].argsort(1), z[:6].argsort(1))
    torch.testing.assert_close(softcap(1e-4 * z, 2.0), 1e-4 * z, rtol=1e-4, atol=0)
    assert softcap(torch.tensor([-math.inf, 1.0]), 1.0)[0] == -math.inf
    assert softcap(z.half(), 2.0).dtype == torch.float16
    with pytest.raises(ValueError, match=r"cap must be positive and finite, got 0"):
        softcap(z, 0)


def test_extended_logit_norm_divides_by_distances_to_boundaries() -> None:
    generator = torch.Generator().manual_seed(0)
    features, weight = torch.randn(6, 4, generator=generator), torch.randn(5, 4, generator=generator)
    z = features @ weight.T
    out = extended_logit_norm(z, weight)
    for i in range(6):
        m = int(z[i].argmax())
        distances = [float((z[i, m] - z[i, k]) / (weight[m] - weight[k]).norm()) for k in range(5) if k != m]
        torch.testing.assert_close(out[i], z[i] / (sum(distances) / 5), rtol=1e-4, atol=1e-5)  # with 0 for class m
    torch.testing.assert_close(extended_logit_norm(z.T, weight, dim=0), out.T)
    assert extended_logit_norm(torch.zeros(1, 5), weight).isfinite().all()
    with pytest.raises(ValueError, match=r"linear_weight must be \[5, D\], got \(4, 4\)"):
        extended_logit_norm(z, weight[:4])


def test_extended_logit_norm_does_not_see_masked_classes_and_those_with_equal_weights() -> None:
    generator = torch.Generator().manual_seed(0)
    z, weight = torch.randn(6, 5, generator=generator), torch.randn(5, 4, generator=generator)
    masked = torch.cat([z, torch.full((6, 1), -math.inf)], 1)
    out = extended_logit_norm(masked, torch.cat([weight, weight[:1]]))
    torch.testing.assert_close(out[:, :5], extended_logit_norm(z, weight))
    assert out[:, 5].isneginf().all()
    same = torch.cat([weight, weight[:1]]).requires_grad_()
    both = torch.cat([z, z[:, :1]], 1).requires_grad_()
    slopes = torch.autograd.grad(extended_logit_norm(both, same).square().sum(), (both, same))
    assert all(slope.isfinite().all() for slope in slopes)


def test_extended_logit_norm_trains_the_last_layer_of_a_network() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5)).double()
    x, y = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64), torch.arange(6) % 5
    criterion: Any = build_criterion("ce", "extended_logit_norm", head=model, reduction="sum")
    assert repr(criterion).startswith("Linked(\n  extended_logit_norm\n")
    assert not list(criterion.parameters())
    assert not criterion.state_dict()

    def loss(weight: Tensor) -> Tensor:
        z = F.linear(model[:2](x), weight, model[2].bias)
        return F.cross_entropy(extended_logit_norm(z, weight), y, reduction="sum")

    weight: Any = model[2].weight
    torch.testing.assert_close(criterion(model(x), y), loss(weight))
    assert torch.autograd.gradcheck(loss, weight)
    (expected,), (slope,) = (
        torch.autograd.grad(loss(weight), weight),
        torch.autograd.grad(criterion(model(x), y), weight),
    )
    torch.testing.assert_close(slope, expected)
    criterion(model(x), y, example_weight=torch.ones(6, dtype=torch.float64))
    nested = LogitClip(build_criterion("ce", "extended_logit_norm"), tau=1.0)
    assert nested.needs_head()
    nested.set_head(model[2])
    assert nested(model(x), y).isfinite()


def test_extended_logit_norm_says_what_is_missing() -> None:
    criterion: Any = build_criterion("ce", "extended_logit_norm")
    with pytest.raises(ValueError, match=r"extended_logit_norm needs the weight of the last layer: call set_head"):
        criterion(torch.zeros(2, 3), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"extended_logit_norm needs a last linear layer; Tanh has none\."):
        criterion.set_head(nn.Tanh())
    with pytest.raises(ValueError, match=r"linear_weight"):
        build_criterion("ce", "extended_logit_norm:linear_weight=1")


def test_penalties() -> None:
    z, _ = batch()
    torch.testing.assert_close(z_penalty(z), z.exp().sum(1).log().square().mean())
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    expected = sum(float(p.detach().abs().sum()) for p in model.parameters())
    assert float(l1_penalty(model.parameters())) == pytest.approx(expected)
    with pytest.raises(ValueError, match="at least one parameter"):
        l1_penalty([])


def test_the_compiler_is_not_imported_before_somebody_compiles():
    """It takes seconds, of every command."""
    code = (
        "import sys, logitclip as lc; lc.LogitClip('ce', temp=1.0); lc.train; assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
