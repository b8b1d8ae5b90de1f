"""The links: Eq. 4 and its gradients at every kind of point, and the three alternatives it is compared with."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from logitclip import theory
from logitclip.clip import (
    CLIPS,
    PENALTIES,
    clip_by_value,
    clip_logits,
    logit_norm,
    make_clip,
    norm_penalty,
    takes_closed_form,
)
from logitclip.criterion import LogitClip

torch.set_num_threads(1)

POWERS = [1.0, 1.5, 2.0, 3.0, 20.0, math.inf]


def rows(seed: int, n: int = 60, classes: int = 6) -> Tensor:
    """Rows of norms from 1e-3 to 1e4."""
    rng = np.random.default_rng(seed)
    return torch.tensor(rng.normal(size=(n, classes)) * 10 ** rng.uniform(-3, 4, size=(n, 1)))


def gradient(function: Any, logits: Tensor, upstream: Tensor) -> Tensor:
    logits = logits.clone().requires_grad_()
    return torch.autograd.grad(function(logits), logits, upstream)[0]


# -- Eq. 4 -------------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(2, 300),
    st.floats(0.05, 50),
    st.none() | st.floats(0.05, 50),
    st.sampled_from(POWERS) | st.floats(1, 50),
)
def test_is_eq_4(seed: int, classes: int, tau: float, delta: float | None, p: float) -> None:
    z = rows(seed, classes=classes)
    z = z[np.abs(oracles.norm(z.numpy(), p)[:, 0] / tau - 1) > 1e-5]
    expected, pullback = oracles.clip(tau, delta, p)(z.numpy())
    got = clip_logits(z, tau, delta, p=p)
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=0)
    upstream = torch.randn(z.shape, generator=torch.Generator().manual_seed(0)).double()
    gain = max(1.0, (delta or tau) / tau)
    np.testing.assert_allclose(
        gradient(lambda x: clip_logits(x, tau, delta, p=p), z, upstream), pullback(upstream.numpy()), atol=1e-11 * gain
    )
    below = oracles.norm(z.numpy(), p)[:, 0] < tau
    assert torch.equal(got[below], z[below])  # bit for bit, whatever tau and delta


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_threshold_itself_is_clipped(dtype: torch.dtype) -> None:
    z = torch.tensor([[3.0, 4.0], [-4.0, 3.0], [0.0, 5.0]], dtype=dtype)  # norms of exactly 5
    assert torch.equal(clip_logits(z, 5.0, 10.0), 2 * z)
    assert torch.equal(clip_logits(z, 5.0), z)
    above = 5.0 * (1 + 1e-6) if dtype == torch.float32 else 5.0 * (1 + 1e-12) if dtype == torch.float64 else 5.1
    assert torch.equal(clip_logits(z, above, 10.0), z)
    # The gradient there is that of the clipped side: it has no component along z.
    (along,) = gradient(lambda x: clip_logits(x, 5.0), z[:1], z[:1])
    assert along.abs().max() < 1e-2
    assert torch.equal(gradient(lambda x: clip_logits(x, above), z, z), z)


@pytest.mark.parametrize(("p", "row"), [(1.0, [2.0, -3.0, 0.0]), (2.0, [3.0, 0.0, -4.0]), (math.inf, [5.0, -5.0, 1.0])])
def test_the_threshold_in_other_norms(p: float, row: list[float]) -> None:
    z = torch.tensor([row], dtype=torch.float64)  # norm exactly 5
    assert torch.equal(clip_logits(z, 5.0, 2.5, p=p), z / 2)
    assert torch.equal(clip_logits(z, math.nextafter(5.0, 6.0), 2.5, p=p), z)


@pytest.mark.parametrize("p", POWERS)
def test_norm_is_bounded_and_direction_kept(p: float) -> None:
    z = rows(0, n=300, classes=10)
    for tau, delta in ((1.0, None), (1.5, 1 / 1.5), (0.4, 2.5)):
        got = clip_logits(z, tau, delta, p=p)
        norm = oracles.norm(z.numpy(), p)[:, 0]
        clipped = torch.tensor(norm >= tau)
        np.testing.assert_allclose(oracles.norm(got.numpy(), p)[clipped, 0], delta or tau, rtol=1e-12)
        assert 0 < clipped.sum() < 300
        cosine = torch.nn.functional.cosine_similarity(z, got)
        torch.testing.assert_close(cosine, torch.ones_like(cosine))
        assert torch.equal(got.argmax(1), z.argmax(1))
        assert torch.equal(got.argsort(1), z.argsort(1))


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2])
def test_any_dim(p: float, dim: int) -> None:
    z = 3 * torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0))
    got = clip_logits(z, 1.5, 1.0, p=p, dim=dim)
    torch.testing.assert_close(got, clip_logits(z.movedim(dim, -1).contiguous(), 1.5, 1.0, p=p).movedim(-1, dim))


def test_one_vector_and_no_rows() -> None:
    assert clip_logits(torch.tensor([30.0, 40.0]), 1.0).tolist() == pytest.approx([0.6, 0.8])
    assert clip_logits(torch.zeros(0, 5), 1.0).shape == (0, 5)


@pytest.mark.parametrize("p", [5.0, 10.0, 20.0, 100.0])
def test_large_powers_do_not_overflow_float32(p: float) -> None:
    z = torch.tensor([[1e4, -1e4, 5e3], [1e-6, 1e-7, 0.0]])
    got = clip_logits(z, 1.0, p=p)
    np.testing.assert_allclose(got, oracles.clip(1.0, None, p)(z.double().numpy())[0], rtol=1e-6)
    assert gradient(lambda x: clip_logits(x, 1.0, p=p), z, torch.ones_like(z)).isfinite().all()


# -- gradients at the kinks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", POWERS)
def test_zero_logits_have_the_gradient_of_the_identity(p: float) -> None:
    upstream = torch.tensor([[1.0, -2.0, 3.0]])
    assert torch.equal(gradient(lambda x: clip_logits(x, 1.0, p=p), torch.zeros(1, 3), upstream), upstream)


def test_ties_of_the_max_norm_share_the_gradient() -> None:
    z, upstream = torch.tensor([[4.0, -4.0, 1.0]]), torch.tensor([[1.0, 0.0, 0.0]])
    # z' = z / ||z||: g/4 minus (g.z/16) times the subgradient of the norm, which is (1/2, -1/2, 0).
    expected = torch.tensor([[0.25 - 0.125, 0.125, 0.0]])
    torch.testing.assert_close(gradient(lambda x: clip_logits(x, 1.0, p=math.inf), z, upstream), expected)


@pytest.mark.parametrize("p", [1.0, 1.5, 3.0])
def test_zero_entries_have_sign_0(p: float) -> None:
    z, upstream = torch.tensor([[3.0, 0.0, 0.0, -1.0]]).double(), torch.tensor([[1.0, 2.0, 0.0, 1.0]]).double()
    got = gradient(lambda x: clip_logits(x, 1.0, p=p), z, upstream)
    np.testing.assert_allclose(got, oracles.clip(1.0, None, p)(z.numpy())[1](upstream.numpy()), rtol=1e-12)
    norm = float(oracles.norm(z.numpy(), p)[0, 0])
    assert got[0, 1].item() == pytest.approx(2 / norm)  # no gradient flows through the norm


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("delta", [None, 0.5, 3.0])
def test_first_and_second_derivatives(p: float, delta: float | None) -> None:
    z = torch.tensor([[3.0, -4.0, 1.0], [0.1, 0.05, -0.2], [-7.0, 2.0, 5.5]], dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: clip_logits(x, 1.0, delta, p=p), z)
    assert gradgradcheck(lambda x: clip_logits(x, 1.0, delta, p=p), z)


def test_gradient_is_orthogonal_to_clipped_logits() -> None:
    z = 10 * torch.randn(20, 7, generator=torch.Generator().manual_seed(0)).double()
    got = gradient(
        lambda x: clip_logits(x, 1.0), z, torch.randn(20, 7, generator=torch.Generator().manual_seed(1)).double()
    )
    assert (got * z).sum(1).abs().max() < 1e-12


# -- extreme rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("dim", [0, 1])
def test_norms_beyond_the_range_of_squares(p: float, dim: int, device: str) -> None:
    z = torch.tensor([[3e20, -4e20], [3e30, 4e30], [3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [1e-25, 1e-25]])
    expected, pullback = oracles.clip(1.0, None, p)(z.double().numpy())
    z, upstream = (z if dim else z.T).to(device), torch.ones_like(z if dim else z.T).to(device)
    got = clip_logits(z, 1.0, p=p, dim=dim)
    slope = gradient(lambda x: clip_logits(x, 1.0, p=p, dim=dim), z, upstream)
    np.testing.assert_allclose((got if dim else got.T).cpu(), expected, rtol=1e-6)
    np.testing.assert_allclose((slope if dim else slope.T).cpu(), pullback(np.ones((6, 2))), rtol=1e-5, atol=1e-7)
    assert norm_penalty(z[:1] if dim else z[:, :1], dim=dim).item() == pytest.approx(5e20)
    assert logit_norm(z, 1.0, dim=dim).isfinite().all()


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("delta", [None, 0.5])
def test_masked_classes_stay_masked_and_have_no_part_in_the_norm(p: float, delta: float | None, device: str) -> None:
    z = torch.tensor([[3.0, -math.inf, 4.0], [-math.inf, 0.3, 0.4], [1e20, -math.inf, 0.0]], device=device)
    present = ~z.isneginf()
    for link in (
        lambda x: clip_logits(x, 1.0, delta, p=p),
        lambda x: logit_norm(x, 0.5),
        lambda x: clip_by_value(x, 1.0),
    ):
        got = link(z)
        slope = gradient(link, z, torch.where(present, 1.0, 0.0))
        assert torch.equal(got.isneginf(), ~present)
        assert (slope[~present] == 0).all()
        for i in range(3):
            row = z[i, present[i]]
            torch.testing.assert_close(got[i, present[i]], link(row))
            torch.testing.assert_close(slope[i, present[i]], gradient(link, row, torch.ones_like(row)))


def test_scales_beyond_reason_are_refused() -> None:
    for value in (1e-11, 1e11, 1e300, 5e-324):
        for options in ({"tau": value}, {"tau": 1.0, "delta": value}):
            with pytest.raises(ValueError, match=r"must lie between 1e-10 and 1e10, got"):
                clip_logits(torch.ones(2, 3), **options)
    with pytest.raises(ValueError, match=r"delta=1e\+06 is beyond the range of torch\.float16 logits"):
        clip_logits(torch.ones(2, 3).half(), 1.0, 1e6)
    for dtype in (torch.float32, torch.float64):
        z = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e20, 0.0]], dtype=dtype)
        for p in POWERS:
            assert clip_logits(z, 1e-10, 1e10, p=p).isfinite().all()
            assert gradient(lambda x, p=p: clip_logits(x, 1e-10, 1e10, p=p), z, torch.ones_like(z)).isfinite().all()


# -- without torch's private names -------------------------------------------------------------------------------------


def test_without_private_names_of_torch_the_plain_form_is_used() -> None:
    """A new version of torch may drop these private names: that may cost speed but must not crash."""
    code = """
import torch
for owner, name in ((torch._C, "_are_functorch_transforms_active"), (torch._C._functorch, "is_legacy_batchedtensor")):
    delattr(owner, name)
import logitclip as lc
from logitclip.clip import takes_closed_form
assert not takes_closed_form(torch.ones(2, 3), 2)
z, y = torch.tensor([[30.0, 40.0, 0.0], [0.3, 0.4, 0.0]], requires_grad=True), torch.tensor([0, 1])
for name in lc.losses.LOSSES:
    loss = lc.LogitClip(name, tau=1.0)(z, y)
    (slope,) = torch.autograd.grad(loss, z)
    assert loss.isfinite() and slope.isfinite().all()
assert (lc.clip_logits(z, 1.0).norm(dim=1) - torch.tensor([1.0, 0.5])).abs().max() < 1e-6
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_the_level_of_forward_mode_the_plain_form_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert takes_closed_form(torch.ones(2, 3), 2)
    monkeypatch.delattr("torch.autograd.forward_ad._current_level")
    assert not takes_closed_form(torch.ones(2, 3), 2)


# -- half precision ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("p", POWERS)
def test_half_precision_goes_through_float32(dtype: torch.dtype, p: float) -> None:
    z = (1e4 * torch.randn(50, 30, generator=torch.Generator().manual_seed(0))).to(dtype)  # squares overflow float16
    z[0] = 0
    got = clip_logits(z, 1.0, p=p)
    assert got.dtype == dtype
    assert torch.equal(got, clip_logits(z.float(), 1.0, p=p).to(dtype))
    upstream = torch.ones_like(z)
    wide = gradient(lambda x: clip_logits(x, 1.0, p=p), z.float(), upstream.float())
    assert torch.equal(gradient(lambda x: clip_logits(x, 1.0, p=p), z, upstream), wide.to(dtype))


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tau": 0.0}, "tau must be positive and finite, got 0.0"),
        ({"tau": -1.0}, "tau must be positive and finite, got -1.0"),
        ({"tau": math.nan}, "tau must be positive and finite, got nan"),
        ({"tau": math.inf}, "tau must be positive and finite, got inf. To switch clipping off, leave the clip out"),
        ({"tau": 1.0, "delta": 0.0}, "delta must be positive and finite, got 0.0"),
        ({"tau": 1.0, "delta": -2.0}, "delta must be positive and finite, got -2.0"),
        ({"tau": 1.0, "delta": math.nan}, "delta must be positive and finite, got nan"),
        ({"tau": 1.0, "delta": math.inf}, "delta must be positive and finite, got inf"),
        ({"tau": 1.0, "p": 0.5}, "p must be at least 1 .* got 0.5"),
        ({"tau": 1.0, "p": 0.0}, "p must be at least 1 .* got 0.0"),
        ({"tau": 1.0, "p": -math.inf}, "p must be at least 1 .* got -inf"),
        ({"tau": 1.0, "p": math.nan}, "p must be at least 1 .* got nan"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        clip_logits(torch.ones(2, 3), **options)


@pytest.mark.parametrize("options", [{"temp": "auto"}, {"tau": "auto"}, {"tau": 1.0, "delta": "1"}, {"temp": "1.5"}])
def test_words_instead_of_numbers(options: dict[str, Any]) -> None:
    """The command line takes `temp=auto`; Python has lc.tune."""
    name, value = list(options.items())[-1]
    with pytest.raises(
        ValueError, match=f"^{name} must be a number, got '{value}'.* use lc.tune, or --clip norm:temp=auto"
    ):
        make_clip(**options)
    with pytest.raises(ValueError, match=f"^{name} must be a number"):
        LogitClip("ce", **options)


@pytest.mark.parametrize(
    "function",
    [lambda z: clip_logits(z, 1.0), lambda z: clip_by_value(z, 1.0), lambda z: logit_norm(z, 1.0), norm_penalty],
)
def test_logits_of_the_wrong_kind(function: Any) -> None:
    with pytest.raises(ValueError, match=r"floating-point tensor, got torch\.int64"):
        function(torch.ones(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="must have a class dimension"):
        function(torch.tensor(1.0))


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_options_of_the_others_out_of_range(value: float) -> None:
    with pytest.raises(ValueError, match=f"limit must be positive and finite, got {value}"):
        clip_by_value(torch.ones(3), value)
    with pytest.raises(ValueError, match=f"temperature must be positive and finite, got {value}"):
        logit_norm(torch.ones(3), value)


# -- what the paper compares it with -----------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.integers(2, 100), st.floats(0.05, 20))
def test_clip_by_value(seed: int, classes: int, limit: float) -> None:
    z = rows(seed, classes=classes)
    expected, pullback = oracles.clip_by_value(limit)(z.numpy())
    assert np.array_equal(clip_by_value(z, limit), expected)
    upstream = torch.ones_like(z)
    got = gradient(lambda x: clip_by_value(x, limit), z, upstream)
    assert np.array_equal(got, pullback(upstream.numpy()))
    assert (got[z.abs() > limit] == 0).all()
    # Prop 2.1 holds for it as printed, with the max norm.
    lower, upper = theory.loss_bounds(limit, classes)
    ce = -clip_by_value(z, limit).log_softmax(1)
    assert lower - 1e-12 <= ce.min() <= ce.max() <= upper + 1e-12


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float16, 70_000.0), (torch.float32, 1e39)])
def test_clip_by_value_beyond_the_range_of_the_logits(dtype: torch.dtype, limit: float) -> None:
    z = torch.tensor([3.0, -60_000.0, -math.inf], dtype=dtype)
    assert torch.equal(clip_by_value(z, limit), z)


def test_clip_by_value_can_change_the_prediction() -> None:
    z = torch.tensor([2.0, 9.0])
    assert z.argmax() == 1
    assert clip_by_value(z, 1.0).argmax() == 0
    assert clip_logits(z, 1.0).argmax() == 1


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.integers(2, 100), st.floats(0.01, 20))
def test_logit_norm(seed: int, classes: int, temperature: float) -> None:
    z = rows(seed, classes=classes)
    expected, pullback = oracles.logit_norm(temperature)(z.numpy())
    got = logit_norm(z, temperature)
    np.testing.assert_allclose(got, expected, rtol=1e-12)
    norm = got.norm(dim=1) * temperature  # constant, except for the 1e-7 that protects zero logits
    np.testing.assert_allclose(norm, 1 / (1 + 1e-7 / z.norm(dim=1)), rtol=1e-12)
    upstream = torch.randn(z.shape, generator=torch.Generator().manual_seed(0)).double()
    reach = (1 / (temperature * z.norm(dim=1, keepdim=True))).numpy()
    got = gradient(lambda x: logit_norm(x, temperature), z, upstream).numpy()
    assert (np.abs(got - pullback(upstream.numpy())) <= 1e-11 * np.maximum(1, reach)).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_logit_norm_at_zero_is_finite(dtype: torch.dtype) -> None:
    z = torch.zeros(2, 3, dtype=dtype)  # (the gradient there, 1e7, is beyond float16)
    assert torch.equal(logit_norm(z, 0.5), z)
    assert gradient(lambda x: logit_norm(x, 0.5), z, torch.ones_like(z)).isfinite().all()


def test_logit_norm_and_penalty_over_another_dim() -> None:
    z = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(logit_norm(z, 0.5, dim=1).norm(dim=1), torch.full((4, 6), 2.0))
    torch.testing.assert_close(norm_penalty(z, dim=1), z.norm(dim=1).mean())


def test_norm_penalty_is_the_mean_norm_and_safe_at_zero() -> None:
    z = torch.tensor([[3.0, 4.0], [0.0, 0.0]], requires_grad=True)
    norm_penalty(z).backward()
    assert norm_penalty(z).item() == 2.5  # not squared
    assert z.grad is not None
    torch.testing.assert_close(z.grad, torch.tensor([[0.3, 0.4], [0.0, 0.0]]))


# -- by name -----------------------------------------------------------------------------------------------------------


def test_clips_by_name() -> None:
    z = rows(0)
    for spec, expected in {
        "none": z,
        "norm:tau=2": clip_logits(z, 2.0),
        "norm:tau=2,delta=0.5,p=inf": clip_logits(z, 2.0, 0.5, p=math.inf),
        "norm:temp=2.5": clip_logits(z, 2.5, 0.4),
        "value:limit=1.5": clip_by_value(z, 1.5),
        "logit_norm:temperature=0.5": logit_norm(z, 0.5),
    }.items():
        assert torch.equal(CLIPS.build(spec)(z), expected), spec
    with pytest.raises(ValueError, match=r"needs a threshold: give tau=1 \(Eq. 3\) or temp=1.5"):
        CLIPS.build("norm")(z)
    with pytest.raises(
        ValueError, match=r"Give tau \(with an optional delta\) or temp, got tau=1.0, delta=None, temp=2.0"
    ):
        CLIPS.build("norm:tau=1,temp=2")(z)
    with pytest.raises(ValueError, match=r"temp must be positive and finite, got -1\.0"):
        CLIPS.build("norm:temp=-1")(z)


def test_penalties_by_name() -> None:
    z = rows(0)
    assert PENALTIES.build("none")(z).item() == 0
    torch.testing.assert_close(PENALTIES.build("norm:weight=0.1")(z), 0.1 * z.norm(dim=1).mean())
    with pytest.raises(ValueError, match="weight must be positive"):
        PENALTIES.build("norm:weight=0")(z)


def test_a_nan_in_one_row_leaves_the_others_alone() -> None:
    logits = torch.tensor([[-math.inf, 3.0, 4.0], [1.0, math.nan, 2.0]])
    clipped = clip_logits(logits, 1.0)
    torch.testing.assert_close(clipped[0], torch.tensor([-math.inf, 0.6, 0.8]))
    losses = LogitClip(torch.nn.CrossEntropyLoss(reduction="none"), tau=1.0)(logits, torch.tensor([1, 1]))
    assert losses[0].isfinite()
    assert losses[1].isnan()
