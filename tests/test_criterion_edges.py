"""Numbers at the edge, options that everyone tries, and what a user would see if a line of the maths were wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import logitclip as lc
from logitclip.clip import logit_norms, vector_norm
from logitclip.losses import LOSSES, loss

torch.set_num_threads(1)

NAMES = list(LOSSES)


def random(*shape: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- options that everyone tries ---------------------------------------------------------------------------------------


def test_logit_clip_takes_the_options_of_a_loss_by_name() -> None:
    z, y, weight = random(8, 5), torch.arange(8) % 5, torch.arange(1.0, 6.0)
    criterion = lc.LogitClip("gce", temp=2.0, weight=weight, reduction="sum", ignore_index=3, q=0.5)
    inner = lc.Loss("gce:q=0.5", weight=weight, reduction="sum", ignore_index=3)
    assert torch.equal(criterion(z, y), inner(lc.clip_logits(z, temp=2.0), y)) or torch.allclose(
        criterion(z, y), inner(lc.clip_logits(z, temp=2.0), y)
    )
    assert lc.LogitClip("ce", temp=1.0, label_smoothing=0.1)(z, y).item() == pytest.approx(
        F.cross_entropy(lc.clip_logits(z, temp=1.0), y, label_smoothing=0.1).item()
    )


@pytest.mark.parametrize("option", [{"weight": torch.ones(5)}, {"reduction": "sum"}, {"ignore_index": 3}, {"q": 0.5}])
def test_with_a_criterion_of_ones_own_they_belong_to_it(option: dict[str, Any]) -> None:
    (name,) = option
    sentence = rf"^{name} is an option of a loss by name: give it to your CrossEntropyLoss\.$"
    with pytest.raises(ValueError, match=sentence):
        lc.LogitClip(nn.CrossEntropyLoss(), tau=1.0, **option)


def test_clip_logits_takes_temp_like_the_others() -> None:
    z = random(4, 5)
    assert torch.equal(lc.clip_logits(z, temp=2.5), lc.clip_logits(z, 2.5, 0.4))
    with pytest.raises(ValueError, match=r"Give tau \(with an optional delta\) or temp"):
        lc.clip_logits(z, 1.0, temp=1.0)
    with pytest.raises(ValueError, match="needs a threshold"):
        lc.clip_logits(z)


# -- numbers at the edge -----------------------------------------------------------------------------------------------


def test_a_large_head_says_nan_where_squares_overflow() -> None:
    hidden, weight, y = random(3, 4), random(5, 4, seed=1), torch.arange(3)
    for reduction in ("none", "mean", "sum"):
        assert lc.linear_cross_entropy(1e20 * hidden, weight, y, reduction=reduction, tau=1.0).isnan().all()


def test_a_large_head_with_the_largest_scale_is_finite() -> None:
    hidden, weight, y = random(3, 4).requires_grad_(), random(5, 4, seed=1), torch.arange(3)
    value = lc.linear_cross_entropy(hidden, weight, y, reduction="none", tau=1.0, delta=1e10)
    exact = lc.losses.ce(lc.clip_logits(hidden.double() @ weight.double().T, 1.0, 1e10), y)
    torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=2048)
    assert torch.autograd.grad(value.sum(), hidden)[0].isfinite().all()


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0])
def test_the_norm_of_a_million_entries(p: float) -> None:
    """Entries that are equal are the worst: every addition rounds to the same side."""
    for z in (torch.randn(1, 1_000_000, generator=torch.Generator().manual_seed(0)), torch.full((1, 1_000_000), 0.1)):
        exact = torch.linalg.vector_norm(z.double(), p, dim=1, keepdim=True)
        torch.testing.assert_close(vector_norm(z, p, 1).double(), exact, rtol=1e-5, atol=0)
        torch.testing.assert_close(logit_norms(z, p).double(), exact[:, 0], rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("clip", [False, True])
def test_a_masked_label_gives_no_nan_gradient(name: str, clip: bool) -> None:
    z = torch.tensor([[0.0, 1.0, -math.inf], [1.0, 2.0, 3.0]], requires_grad=True)
    criterion = lc.LogitClip(name, tau=1.0, reduction="none") if clip else lc.Loss(name, reduction="none")
    values = criterion(z, torch.tensor([2, 0]))
    (gradient,) = torch.autograd.grad(values.sum(), z)
    assert gradient.isfinite().all()
    assert not values.isnan().any()


@pytest.mark.parametrize(("tau", "delta"), [(100.0, None), (100.0, 1.0), (1.0, 100.0), (60.0, 100.0)])
def test_large_clipped_logits_do_not_overflow_float32(tau: float, delta: float | None) -> None:
    z, y = torch.tensor([[95.0, 0.0, 0.0], [300.0, 0.0, 0.0], [0.0, 95.0, 0.0]]), torch.zeros(3, dtype=torch.int64)
    value = lc.LogitClip("ce", tau=tau, delta=delta, reduction="none")(z, y)
    exact = F.cross_entropy(lc.clip_logits(z.double(), tau, delta), y, reduction="none")
    torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-5)
    head = lc.linear_cross_entropy(z, torch.eye(3), y, tau=tau, delta=delta, reduction="none")
    torch.testing.assert_close(head.double(), exact, rtol=1e-5, atol=1e-5)


def test_hidden_states_of_0_have_a_gradient() -> None:
    hidden = torch.zeros(2, 3, requires_grad=True)
    scaled, factor = lc.clip_hidden(hidden, random(5, 3), tau=1.0)
    assert (factor == 1).all()
    (gradient,) = torch.autograd.grad(scaled.sum() + factor.sum(), hidden)
    assert gradient.isfinite().all()


# -- weights and targets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-6, 0.01, 1.0, 100.0])
def test_a_mean_does_not_depend_on_the_scale_of_weights(scale: float) -> None:
    z, y, weight = random(6, 5), torch.arange(6) % 5, torch.tensor([0.5, 1.0, 2.0, 0.1, 3.0])
    expected = F.cross_entropy(z, y, weight=weight)
    torch.testing.assert_close(lc.Loss("ce", weight=scale * weight)(z, y), expected)
    torch.testing.assert_close(lc.Loss("ce")(z, y, scale * weight[y]), expected)
    head = lc.linear_cross_entropy(z, torch.eye(5), y, weight=scale * weight)
    torch.testing.assert_close(head, expected)


def test_a_soft_target_on_a_masked_class_is_an_infinite_loss() -> None:
    z = torch.tensor([[0.0, 1.0, -math.inf]])
    assert lc.losses.ce(z, torch.tensor([[0.5, 0.4, 0.1]])).item() == math.inf
    assert math.isfinite(lc.losses.ce(z, torch.tensor([[0.5, 0.5, 0.0]])).item())


@pytest.mark.parametrize("total", [1.03, 0.97, 1.0015])
def test_probabilities_that_do_not_sum_to_1_are_refused(total: float) -> None:
    z, target = random(2, 3), torch.tensor([[0.2, 0.3, 0.5], [0.1, 0.1, 0.8]])
    with pytest.raises(ValueError, match="sum to 1"):
        lc.Loss("ce")(z, total * target)
    lc.Loss("ce")(z, 1.0005 * target)
    lc.Loss("ce")(z.bfloat16(), (1.01 * target).bfloat16())  # rounding may take that much
    with pytest.raises(ValueError, match="sum to 1"):
        lc.Loss("ce")(z.bfloat16(), (1.04 * target).bfloat16())


def test_weights_of_classes_examples_and_ignored_ones_multiply() -> None:
    z, y = random(6, 3), torch.tensor([0, 1, 2, -100, 1, 0])
    weight, example = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 0.5, 0.25, 9.0, 0.0, 3.0])
    each = F.cross_entropy(z, y, reduction="none")
    weights = weight[y.clamp_min(0)] * example * (y >= 0)
    for reduction, expected in (
        ("none", weights * each),
        ("sum", (weights * each).sum()),
        ("mean", (weights * each).sum() / weights.sum()),
    ):
        got = lc.Loss("ce", weight=weight, reduction=reduction)(z, y, example)  # type: ignore[arg-type]
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("shape", [(40, 7), (3, 7, 5)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_small_step_against_the_gradient_lowers_the_loss(name: str, shape: tuple[int, ...]) -> None:
    """What training sees: on float32, with and without the clip, and from a linear layer."""
    z = random(*shape).requires_grad_()
    y = torch.arange(z.numel() // 7).view(shape[0], *shape[2:]) % 7
    for criterion in (lc.Loss(name, reduction="sum"), lc.LogitClip(name, temp=2.5, reduction="sum")):
        criterion.eval()
        before = criterion(z, y)
        (gradient,) = torch.autograd.grad(before, z)
        square = float(gradient.square().sum())
        step = 1e-3 / math.sqrt(max(square, 1e-12))
        after = criterion((z - step * gradient).detach().double(), y)
        exact = criterion(z.detach().double(), y)
        if name in ("nfl", "anl_fl", "jal_fl", "eps_focal_mae"):  # focal weights are constants in their gradients
            assert after < exact + 1e-9
        else:
            assert float(exact - after) == pytest.approx(step * square, rel=0.05, abs=1e-9)


def test_a_certain_label_never_has_a_probability_above_1() -> None:
    z = torch.zeros(2000, 10)
    z[:, 0] = torch.linspace(5, 39, 2000)  # exponentials need no shift: the sum of e may round to below e_y
    y = torch.zeros(2000, dtype=torch.int64)
    assert lc.LogitClip("ce", tau=39.5, reduction="none")(z, y).min() >= 0
    assert lc.LogitClip("mae", tau=39.5, reduction="none")(z, y).min() >= 0
    assert lc.LogitClip("bootstrap_hard", tau=39.5, reduction="none")(z, y).min() >= 0


def test_smoothed_labels_with_class_weights_and_ignored_rows_are_torchs():
    options: dict[str, Any] = {"ignore_index": 1, "label_smoothing": 0.2}
    weight = torch.tensor([0.5, 2.0, 1.0, 4.0], dtype=torch.float64)
    logits = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([0, 1, 2, 3, 1, 3])
    expected = nn.CrossEntropyLoss(weight=weight, **options)(logits, target)
    criterion = lc.Loss("ce", class_weight=weight, **options)
    torch.testing.assert_close(criterion(logits, target), expected)
    logits[1] = torch.nan  # of an ignored row
    torch.testing.assert_close(criterion(logits, target), expected)


def test_smoothed_labels_with_class_weights_leave_masked_classes_out():
    logits, target = random(5, 4), torch.tensor([0, 1, 2, 0, 1])
    weight = torch.tensor([0.5, 2.0, 1.0, 4.0])
    masked = logits.masked_fill(torch.tensor([False, False, False, True]), -math.inf)
    expected = lc.Loss("ce", class_weight=weight[:3], label_smoothing=0.2)(logits[:, :3], target)
    torch.testing.assert_close(lc.Loss("ce", class_weight=weight, label_smoothing=0.2)(masked, target), expected)


def test_a_knob_of_a_plugin_may_be_called_label_smoothing(monkeypatch):
    """It is not the label smoothing of ce: class weights and heads leave it to the loss."""
    monkeypatch.setattr(LOSSES, "_entries", dict(LOSSES._entries))

    @loss
    def shifted(log_p, *, label_smoothing: float = 0.0):
        return label_smoothing - log_p

    logits = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    target, weight = torch.tensor([0, 1, 2, 3, 1, 3]), torch.tensor([0.5, 2.0, 1.0, 4.0], dtype=torch.float64)
    expected = F.cross_entropy(logits, target, weight) + 0.3
    criterion = lc.Loss("shifted:label_smoothing=0.3", class_weight=weight)
    torch.testing.assert_close(criterion(logits, target), expected)
    head = lc.LinearLogitClip(4, 4, "shifted:label_smoothing=0.3", tau=None, bias=False, class_weight=weight).double()
    with torch.no_grad():
        head.weight.copy_(torch.eye(4))
    torch.testing.assert_close(head(logits, target), expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_masked_class_in_a_large_batch_is_as_in_a_small_one(name: str) -> None:
    """Large batches have a form of their own, without a clip, too."""
    z, y = random(66, 1000).double(), torch.arange(66)
    z[:, 500] = -math.inf
    large, small = z.clone().requires_grad_(), z.clone().requires_grad_()
    criterion = lc.Loss(name, reduction="sum")
    values = [criterion(large, y), sum(criterion(*part) for part in zip(small.split(6), y.split(6), strict=True))]
    torch.testing.assert_close(*values)
    torch.testing.assert_close(
        *(torch.autograd.grad(value, x)[0] for value, x in zip(values, (large, small), strict=True))
    )


def test_the_sieve_does_not_count_ignored_examples() -> None:
    z, y, counts = random(40, 2), torch.arange(40) % 2, torch.full((2,), 10.0)
    z[20:] = 0.0  # the sieve would leave these out
    alone, beside = lc.Loss("cores"), lc.Loss("cores", ignore_index=9)
    for criterion in (alone, beside):
        criterion.start_epoch(50, counts)
    alone(z[:20], y[:20])
    beside(z, y.where(torch.arange(40) < 20, 9))
    assert alone.removed.sum() > 0
    assert torch.equal(alone.removed, beside.removed)


@pytest.mark.parametrize(("name", "q"), [("agce", 0.5), ("agce", 2.0), ("aul", 0.5), ("aul", 2.0)])
def test_a_large_a_does_not_cost_the_digits_of_asymmetric_losses(name: str, q: float) -> None:
    """For a large a both are (1-p) a^(q-1): the difference of two powers that agree in six digits."""
    z, y, a = random(8, 5), torch.arange(8) % 5, 1e6
    value = lc.Loss(name, reduction="none", a=a, q=q)(z, y)
    missed = 1 - z.double().softmax(1).gather(1, y[:, None])[:, 0]
    torch.testing.assert_close(value.double(), missed * a ** (q - 1), rtol=1e-4, atol=0)
    ranges = [
        lc.theory.base_loss_bounds(name, 2.0, 5, a=1e12, q=q),
        lc.theory.base_loss_bounds("mae", 2.0, 5, scale=1.0),
    ]
    assert [end * 1e12 ** (1 - q) for end in ranges[0]] == pytest.approx(list(ranges[1]), rel=1e-5)
