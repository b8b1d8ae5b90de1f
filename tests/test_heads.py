"""Losses of a linear layer without its logits, against the unfused composition."""

from __future__ import annotations

import csv
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from memory import Memory
from processes import finished
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from logitclip.criterion import LogitClip, Loss
from logitclip.heads import LinearLogitClip, blocks, clip_hidden, gram_matrix, linear_cross_entropy
from logitclip.losses import LOSSES

torch.set_num_threads(1)

N, D, K = 30, 5, 23
CLIPS: list[Any] = [None, (4.0, None), (4.0, 0.5), (0.5, 3.0), (70.0, 60.0)]  # the last needs shifted exponentials


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use blocks of eight rows and six classes, which do not divide the totals."""
    monkeypatch.setattr(blocks, "SMALL_BLOCK", 8 * K)
    monkeypatch.setattr(blocks, "MOST_ROWS", 8)
    monkeypatch.setattr(blocks, "FEWEST_ROWS", 0)
    monkeypatch.setattr(blocks, "CHUNK", 50)


@pytest.fixture(params=["kept", "computed again", "kept in the gradient"])
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return a number of features for each way to keep the logits between the passes."""
    monkeypatch.setattr(blocks, "FEWEST_ROWS", 1000 if request.param == "computed again" else 0)
    return N + 3 if request.param == "kept in the gradient" else D


def layer(n: int = N, d: int = D, k: int = K, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    """Make hidden states, weight, bias and labels; the norms of the logits range from 0.05 to 100, none near tau."""
    g = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (torch.randn(s, generator=g, dtype=torch.float64) for s in ((n, d), (k, d), (k,)))
    hidden /= (F.linear(hidden, weight)).norm(dim=1, keepdim=True)
    hidden *= 10 ** torch.linspace(-1.3, 2, n, dtype=torch.float64)[:, None]
    tensors = [x.to(dtype).requires_grad_() for x in (hidden, weight, bias / (10 * k**0.5))]
    return [*tensors, torch.randint(k, (n,), generator=g)]


def unfused(
    loss: str,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    clip: Any,
    *args: Any,
    **options: Any,
) -> Tensor:
    criterion: Any = Loss(loss, weight=options.pop("class_weight", None), **options)
    if clip is not None:
        criterion = LogitClip(criterion, tau=clip[0], delta=clip[1])
    return criterion(F.linear(hidden, weight, bias), target, *args)


def fused(
    loss: str,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    clip: Any,
    *args: Any,
    **options: Any,
) -> Tensor:
    tau, delta = clip or (None, None)
    head = LinearLogitClip(
        weight.shape[1], len(weight), loss, tau=tau, delta=delta, bias=bias is not None, dtype=weight.dtype, **options
    )
    del head.weight, head.bias
    head.weight, head.bias = weight, bias  # type: ignore[assignment]
    return head(hidden, target, *args)


def assert_same(got: Tensor, expected: Tensor, inputs: list[Tensor], tolerance: float = 1e-9, **options: Any) -> None:
    """Return values, and gradients for an upstream gradient that is not 1."""
    assert got.shape == expected.shape
    upstream = torch.linspace(-1, 2, got.numel(), dtype=got.dtype).view_as(got)
    gradients = [torch.autograd.grad(x, inputs, upstream) for x in (got, expected)]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    largest = max(float(x.detach().abs().max()) for x in inputs if x.numel())
    rounding = 16 * torch.finfo(got.dtype).eps * largest  # of a probability near 1, times an input
    for a, b in zip(*gradients, strict=True):
        scale = float(b.abs().max()) if b.numel() else 1.0
        atol = max(tolerance * max(scale, 1e-3), rounding)
        torch.testing.assert_close(a, b, rtol=tolerance, atol=atol, **options)


# -- values and gradients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", CLIPS, ids=str)
@pytest.mark.parametrize("loss", list(LOSSES))
def test_every_loss_equals_the_unfused_composition(loss: str, clip: Any, width: int) -> None:
    hidden, weight, bias, target = layer(d=width)
    for reduction in ("mean", "sum", "none"):
        got = fused(loss, hidden, weight, bias, target, clip, reduction=reduction)
        expected = unfused(loss, hidden, weight, bias, target, clip, reduction=reduction)
        assert_same(got, expected, [hidden, weight, bias])


@pytest.mark.parametrize("clip", [None, (4.0, None), (4.0, 0.5)], ids=str)
@pytest.mark.parametrize("loss", ["ce", "gce", "nce_mae", "cores"])
def test_weights_and_ignored_rows(loss: str, clip: Any, width: int) -> None:
    hidden, weight, bias, target = layer(d=width)
    target[::4] = 7
    options: Any = {"class_weight": torch.linspace(0.1, 2, K, dtype=torch.float64), "ignore_index": 7}
    example_weight = torch.linspace(0, 3, N, dtype=torch.float64)
    for reduction in ("mean", "sum", "none"):
        options["reduction"] = reduction
        got = fused(loss, hidden, weight, bias, target, clip, example_weight, **options)
        expected = unfused(loss, hidden, weight, bias, target, clip, example_weight, **options)
        assert_same(got, expected, [hidden, weight, bias])


@pytest.mark.parametrize("clip", [None, (4.0, 0.5)], ids=str)
@pytest.mark.parametrize("loss", ["ce", "gce", "nce"])
def test_probability_targets(loss: str, clip: Any) -> None:
    hidden, weight, bias, _ = layer()
    target = torch.softmax(torch.randn(N, K, generator=torch.Generator().manual_seed(1), dtype=torch.float64), 1)
    options: Any = {"class_weight": torch.linspace(0.1, 2, K, dtype=torch.float64)}
    got = fused(loss, hidden, weight, bias, target, clip, **options)
    assert_same(got, unfused(loss, hidden, weight, bias, target, clip, **options), [hidden, weight, bias])


@given(
    n=st.integers(1, 20),
    d=st.integers(1, 6),
    k=st.integers(2, 40),
    seed=st.integers(0, 10**6),
    size=st.sampled_from([1e-3, 1.0, 1e3]),  # no row, some rows, all rows clipped
    with_bias=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.3]),
    clip=st.sampled_from(CLIPS),
)
@settings(max_examples=60, deadline=None)
def test_random_sizes(
    n: int, d: int, k: int, seed: int, size: float, with_bias: bool, smoothing: float, clip: Any
) -> None:
    hidden, weight, bias, target = layer(n, d, k, seed=seed)
    hidden = (hidden.detach() * size).requires_grad_()
    tau, delta = clip or (None, None)
    inputs = [hidden, weight, bias] if with_bias else [hidden, weight]
    got = linear_cross_entropy(
        hidden,
        weight,
        target,
        linear_bias=bias if with_bias else None,
        label_smoothing=smoothing,
        tau=tau,
        delta=delta,
    )
    logits = F.linear(hidden, weight, bias if with_bias else None)
    if clip is not None:
        norms = logits.detach().norm(dim=1)
        if ((norms - tau).abs() < 1e-5).any():
            return
        logits = LogitClip("ce", tau=tau, delta=delta).link(logits)
    assert_same(got, F.cross_entropy(logits, target, label_smoothing=smoothing), inputs)


@pytest.mark.parametrize("clip", CLIPS, ids=str)
def test_float32(clip: Any) -> None:
    hidden, weight, bias, target = layer(200, 16, 500, torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "CHUNK", 1000)
        got = fused("ce", hidden, weight, bias, target, clip)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    expected = unfused("ce", *exact, target, clip)
    upstream = torch.autograd.grad(got, [hidden, weight, bias])
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=0)
    for a, b in zip(upstream, torch.autograd.grad(expected, exact), strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


needs_torch_2_13 = pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch has it from 2.13 on")


@needs_torch_2_13
@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"reduction": "none"}, {"ignore_index": 3}], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("soft", [False, True])
def test_the_arguments_mean_what_they_mean_in_torch(
    options: dict[str, Any], smoothing: float, weighted: bool, soft: bool
) -> None:
    hidden, weight, bias, target = layer()
    options = {**options, "linear_bias": bias, "label_smoothing": smoothing}
    if weighted:
        options["weight"] = torch.linspace(0.1, 2, K, dtype=torch.float64)
    if soft:
        options.pop("ignore_index", None)
        target = torch.softmax(torch.randn(N, K, generator=torch.Generator().manual_seed(1), dtype=torch.float64), 1)
    else:
        target[::5] = 3 if "ignore_index" in options else -100
    expected = F.linear_cross_entropy(hidden, weight, target, **options)  # type: ignore[attr-defined]
    assert_same(linear_cross_entropy(hidden, weight, target, **options), expected, [hidden, weight, bias])


def test_tokens_and_single_vectors() -> None:
    hidden, weight, bias, target = layer()
    expected = linear_cross_entropy(hidden, weight, target, linear_bias=bias, reduction="none", tau=4.0)
    for shape in ((2, 15), (5, 2, 3)):
        got = linear_cross_entropy(
            hidden.view(*shape, D), weight, target.view(shape), linear_bias=bias, reduction="none", tau=4.0
        )
        assert torch.equal(got, expected.view(shape))
    one = linear_cross_entropy(hidden[7], weight, target[7], linear_bias=bias, tau=4.0)
    torch.testing.assert_close(one, expected[7])


def test_nothing_to_learn_from() -> None:
    hidden, weight, bias, target = layer()
    for rows, ignored in ((slice(0), target[:0]), (slice(None), torch.full_like(target, -100))):
        loss = linear_cross_entropy(hidden[rows], weight, ignored, linear_bias=bias, tau=4.0)
        assert loss == 0
        for gradient in torch.autograd.grad(loss, [hidden, weight, bias]):
            assert not gradient.any()


def test_zero_logits() -> None:
    weight, target = torch.zeros(K, D, requires_grad=True), torch.arange(4)
    hidden = torch.ones(4, D, requires_grad=True)
    for tau in (None, 1.0):
        loss = linear_cross_entropy(hidden, weight, target, tau=tau)
        assert_same(loss, F.cross_entropy(F.linear(hidden, weight), target), [hidden, weight], tolerance=1e-6)


def test_the_first_of_tied_classes_is_the_largest_one() -> None:
    """Which class is predicted does not depend on how the classes are split into chunks."""
    weight, target = torch.zeros(K, D), torch.tensor([0, 1, K - 1])
    hidden = torch.ones(3, D)
    for tau in (None, 1.0):
        head = LinearLogitClip(D, K, "eps_ce_mae", tau=tau, bias=False, reduction="none")
        head.load_state_dict({"weight": weight}, strict=False)
        expected = Loss("eps_ce_mae", reduction="none")(F.linear(hidden, weight), target)
        assert expected[0] < expected[1]  # the first is the one that is predicted
        torch.testing.assert_close(head(hidden, target), expected)


def test_what_would_get_no_gradient_is_refused() -> None:
    hidden, weight, bias, target = layer()
    learnt = torch.ones(len(target), dtype=torch.float64, requires_grad=True)
    soft = F.one_hot(target, K).double().requires_grad_()
    with pytest.raises(ValueError, match="example_weight would get no gradient here: detach it, or use LogitClip"):
        linear_cross_entropy(hidden, weight, target, linear_bias=bias, example_weight=learnt)
    with pytest.raises(ValueError, match="target would get no gradient"):
        linear_cross_entropy(hidden, weight, soft, linear_bias=bias)
    with torch.no_grad():
        linear_cross_entropy(hidden, weight, soft, linear_bias=bias, example_weight=learnt)


# -- CORES -------------------------------------------------------------------------------------------------------------


def test_cores_has_its_prior_and_its_sieve() -> None:
    hidden, weight, bias, target = layer()
    counts = torch.bincount(target, minlength=K)
    head = LinearLogitClip(D, K, "cores", tau=4.0, dtype=torch.float64)
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.copy_(bias)
    criterion = LogitClip("cores", tau=4.0)
    sieve: Any = criterion.criterion
    for epoch in (0, 20, 40, 41):
        head.start_epoch(epoch, counts)
        criterion.start_epoch(epoch, counts)
        got, expected = head(hidden, target), criterion(F.linear(hidden, weight, bias), target)
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
        a = torch.autograd.grad(got, [hidden, head.weight, head.bias])
        for x, y in zip(a, torch.autograd.grad(expected, [hidden, weight, bias]), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-12)
        with torch.no_grad():  # a validation loss is not counted
            head(hidden, target)
        assert torch.equal(head.criterion.removed, sieve.removed)
    assert head.criterion.removed.sum() > 0


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_ogc_remembers_a_batch_once(reduction: Any) -> None:
    hidden, weight, bias, target = layer()
    head = LinearLogitClip(D, K, "ogc_ce", tau=4.0, dtype=torch.float64, reduction=reduction)
    criterion = LogitClip("ogc_ce", tau=4.0, reduction=reduction)
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.copy_(bias)
    value = head(hidden, target).sum()
    value.backward(retain_graph=True)
    value.backward()
    criterion(F.linear(hidden, weight, bias), target).sum().backward()
    got, expected = head.criterion.memory, criterion.criterion.memory  # type: ignore[union-attr]
    assert got.seen.tolist() == [N, 1] == expected.seen.tolist()
    torch.testing.assert_close(got.recent, expected.recent)


# -- what frozen heads, repeated backward passes and transforms do -----------------------------------------------------


def test_only_what_is_needed_gets_a_gradient() -> None:
    hidden, weight, bias, target = layer()
    full = torch.autograd.grad(linear_cross_entropy(hidden, weight, target, linear_bias=bias, tau=4.0), [hidden, bias])
    frozen = linear_cross_entropy(hidden, weight.detach(), target, linear_bias=bias.detach(), tau=4.0)
    assert torch.equal(torch.autograd.grad(frozen, hidden)[0], full[0])
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, target, tau=4.0).requires_grad


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_repeated_backward_passes_and_accumulation(reduction: Any) -> None:
    hidden, weight, bias, target = layer()
    loss = linear_cross_entropy(hidden, weight, target, linear_bias=bias, reduction=reduction, tau=4.0).sum()
    first = torch.autograd.grad(3 * loss, [hidden, weight, bias], retain_graph=True)
    kept = [x.clone() for x in first]
    for x in first:
        x.zero_()  # callers may write into it
    for a, b in zip(torch.autograd.grad(loss, [hidden, weight, bias]), kept, strict=True):
        torch.testing.assert_close(3 * a, b)
    for part in (slice(0, 10), slice(10, N)):
        total = linear_cross_entropy(hidden[part], weight, target[part], linear_bias=bias, reduction="sum", tau=4.0)
        (total / (N if reduction == "mean" else 1)).backward()
    torch.testing.assert_close(3 * weight.grad, kept[1])


def test_a_second_derivative_is_refused() -> None:
    hidden, weight, _, target = layer()
    loss = linear_cross_entropy(hidden, weight, target, tau=4.0)
    with pytest.raises(RuntimeError, match="has no second derivative: use LogitClip on the logits"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_a_changed_weight_is_noticed() -> None:
    hidden, weight, _, target = layer()
    loss = linear_cross_entropy(hidden, weight, target, reduction="none").sum()
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    hidden, weight, bias, target = layer()

    def loss(hidden: Tensor) -> Tensor:
        return linear_cross_entropy(hidden.tanh(), weight, target, linear_bias=bias, tau=4.0)

    expected = torch.autograd.grad(loss(hidden), [hidden])
    checkpoint(loss, hidden, use_reentrant=reentrant).backward()  # type: ignore[union-attr]
    assert torch.equal(hidden.grad, expected[0])  # type: ignore[arg-type]


def test_compile() -> None:
    hidden, weight, bias, target = layer()

    def loss(hidden: Tensor) -> Tensor:
        return 2 * linear_cross_entropy(hidden.tanh(), weight, target, linear_bias=bias, tau=4.0)

    expected, slope = loss(hidden), torch.autograd.grad(loss(hidden), hidden)[0]
    got = torch.compile(loss, backend="aot_eager")(hidden)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(torch.autograd.grad(got, hidden)[0], slope)
    head = LinearLogitClip(D, K, "gce", tau=4.0, dtype=torch.float64)
    for function in (loss, lambda hidden: 2 * head(hidden.tanh(), target)):
        torch._dynamo.reset()
        assert torch._dynamo.explain(function)(hidden).graph_break_count == 1  # around the hand-written part


def test_the_clip_alone_compiles_without_a_graph_break() -> None:
    hidden, weight, bias, _ = layer()

    def total(hidden: Tensor) -> Tensor:
        scaled, factor = clip_hidden(hidden, weight, 4.0, 0.5, bias)
        return (scaled.cos().sum() + factor.sum()).sin()

    expected = total(hidden)
    got = torch.compile(total, backend="aot_eager", fullgraph=True)(hidden)
    torch.testing.assert_close(got, expected)
    slopes = [torch.autograd.grad(x, [hidden, weight, bias]) for x in (got, expected)]
    for a, b in zip(*slopes, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [True, False])
def test_half_precision(dtype: torch.dtype, autocast: bool) -> None:
    exact = layer(60, 8, 40, torch.float32)
    hidden, weight, bias, target = exact
    if not autocast:
        hidden, weight, bias = (x.detach().to(dtype).requires_grad_() for x in (hidden, weight, bias))
        exact[:3] = [x.detach().float().requires_grad_() for x in (hidden, weight, bias)]
    with torch.autocast("cpu", dtype, enabled=autocast):
        loss = linear_cross_entropy(hidden, weight, target, linear_bias=bias, temp=1.5)
    assert loss.dtype == torch.float32
    loss.backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == hidden.dtype
    got = [x.grad.float() for x in (hidden, weight, bias)]  # type: ignore[union-attr]
    expected = linear_cross_entropy(exact[0], exact[1], target, linear_bias=exact[2], temp=1.5)
    error = 3 * torch.finfo(dtype).eps
    torch.testing.assert_close(loss, expected, rtol=error, atol=error)
    for a, b in zip(got, torch.autograd.grad(expected, exact[:3]), strict=True):
        assert (a - b).norm() <= 3 * error * b.norm()


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_is_accurate_where_the_label_is_nearly_certain(autocast: bool) -> None:
    """p_y - 1 must not be computed from a p_y that has been rounded to 1."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(300, 32, generator=generator)
    target = torch.randint(300, (400,), generator=generator)
    scale = torch.linspace(0.1, 0.6, 400)[:, None]
    hidden = scale * weight[target] + 0.05 * torch.randn(400, 32, generator=generator)
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    exact = hidden.double().requires_grad_()
    losses = F.cross_entropy(exact @ weight.double().t(), target, reduction="none")
    (expected,) = torch.autograd.grad(losses.sum(), exact)
    got = (hidden.float() if autocast else hidden.clone()).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        linear_cross_entropy(got, weight.float() if autocast else weight, target, reduction="sum").backward()
    p = (-losses.detach()).exp()
    for low, high in ((0.5, 0.9), (0.9, 0.99), (0.99, 0.999), (0.999, 0.9999)):
        rows = (p > low) & (p <= high)
        assert rows.sum() > 10
        error = (got.grad.double()[rows] - expected[rows]).norm() / expected[rows].norm()  # type: ignore[union-attr]
        assert error < 0.06, (low, float(error))


def test_a_loss_scale_saves_small_gradients() -> None:
    """Gradients of float16 hidden states are multiplied by the factor of a GradScaler before they are rounded."""
    hidden, weight, bias, target = layer(60, 8, 40, torch.float32)
    hidden = hidden.detach().half().requires_grad_()
    exact = hidden.detach().float().requires_grad_()
    tiny = torch.full((60,), 2.0**-20)
    for loss in ("ce", "cores"):
        with torch.autocast("cpu", torch.float16):
            total = fused(loss, hidden, weight, bias, target, (1.5, None), tiny, reduction="sum")
        got = torch.autograd.grad(2.0**20 * total, hidden)[0]
        expected = torch.autograd.grad(fused(loss, exact, weight, bias, target, (1.5, None), reduction="sum"), exact)[0]
        assert (got - expected).norm() <= torch.finfo(torch.float16).eps * expected.norm()


def test_autocast_leaves_float64_alone() -> None:
    hidden, weight, bias, target = layer()
    expected = linear_cross_entropy(hidden, weight, target, linear_bias=bias, tau=4.0)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(linear_cross_entropy(hidden, weight, target, linear_bias=bias, tau=4.0), expected)


def test_the_logits_are_never_held(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    n, d, k = (220, 4, 3000) if width < N else (220, 220, 30_000)
    monkeypatch.setattr(blocks, "SMALL_BLOCK", 0)
    monkeypatch.setattr(blocks, "MOST_ROWS", 256)
    monkeypatch.setattr(blocks, "CHUNK", n * k // 50)
    hidden, weight, bias, target = layer(n, d, k)
    gradients = 8 * (n * d + k * (d + 1))
    with Memory(hidden, weight, bias, target) as memory:
        linear_cross_entropy(hidden, weight, target, linear_bias=bias, tau=4.0).backward()
    fused_peak = memory.peak - gradients
    for x in (hidden, weight, bias):
        x.grad = None
    with Memory(hidden, weight, bias, target) as memory:
        LogitClip("ce", tau=4.0)(F.linear(hidden, weight, bias), target).backward()
    assert memory.peak - gradients > 8 * n * k
    assert fused_peak < (memory.peak - gradients) / 20


# -- the clip alone ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("clip", CLIPS[1:], ids=str)
def test_clipped_hidden_states_have_clipped_logits(clip: Any, with_bias: bool) -> None:
    hidden, weight, bias, target = layer()
    inputs = [hidden, weight, bias] if with_bias else [hidden, weight]
    scaled, factor = clip_hidden(hidden, weight, *clip, bias=bias if with_bias else None)
    if with_bias:
        logits = F.linear(torch.cat([scaled, factor], -1), torch.cat([weight, bias[:, None]], 1))
    else:
        logits = F.linear(scaled, weight)
    expected = LogitClip("ce", tau=clip[0], delta=clip[1]).link(F.linear(hidden, weight, bias if with_bias else None))
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    assert_same(F.cross_entropy(logits, target), F.cross_entropy(expected, target), inputs)


@needs_torch_2_13
@pytest.mark.parametrize("chunked", [False, True])
def test_clipped_hidden_states_before_the_function_of_torch(chunked: bool) -> None:
    hidden, weight, _, target = layer()
    options = torch.nn.LinearCrossEntropyOptions() if chunked else None  # type: ignore[attr-defined]
    scaled, _ = clip_hidden(hidden, weight, temp=1.5)
    got = F.linear_cross_entropy(scaled, weight, target, options=options)  # type: ignore[attr-defined]
    expected = linear_cross_entropy(hidden, weight, target, temp=1.5)
    torch.testing.assert_close(got, expected)
    slopes = [torch.autograd.grad(x, [hidden, weight]) for x in (got, expected)]
    for a, b in zip(*slopes, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_a_frozen_head_has_one_gram_matrix() -> None:
    hidden, weight, bias, _ = layer()
    weight, bias = weight.detach(), bias.detach()
    gram = gram_matrix(weight, bias)
    expected, _ = clip_hidden(hidden, weight, 4.0, bias=bias)
    got, _ = clip_hidden(hidden, weight, 4.0, bias=bias, gram=gram)
    assert torch.equal(got, expected)
    with pytest.raises(ValueError, match=r"gram must be the gram_matrix of weight and bias, \(5, 5\), got \(6, 6\)"):
        clip_hidden(hidden, weight, 4.0, gram=gram)


def test_the_norm_survives_an_ill_conditioned_weight() -> None:
    """All rows share a component 10,000 times as large as the rest, and the hidden states are orthogonal to it."""
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(1000, 8, generator=g) + 1e4
    half = torch.randn(20, 4, generator=g)
    hidden = torch.cat([half, -half], 1)
    exact = F.linear(hidden.double(), weight.double()).norm(dim=1)
    _, factor = clip_hidden(hidden, weight, tau=1.0)
    torch.testing.assert_close(1 / factor.squeeze(1).double(), exact, rtol=1e-6, atol=0)
    in_float32 = ((hidden @ (weight.t() @ weight)) * hidden).sum(1).clamp_min(0).sqrt()
    assert ((in_float32 - exact).abs() > 0.01 * exact).any()


def test_second_derivatives_of_the_clip_alone() -> None:
    hidden, weight, bias, _ = layer(3, 2, 4)

    def factor(*inputs: Tensor) -> Tensor:
        return clip_hidden(inputs[0], inputs[1], 0.01, bias=inputs[2])[0]

    assert torch.autograd.gradgradcheck(factor, (hidden, weight, bias))


# -- bad arguments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": torch.full((N,), K)}, r"Targets must lie in 0\.\.22, got 23"),
        ({"target": torch.zeros(N - 1, dtype=torch.int64)}, r"need targets of shape \(30,\), got \(29,\)"),
        ({"target": torch.zeros(N)}, "Class indices must be integers: use target.long"),
        ({"input": torch.zeros(N, 4)}, r"do not fit: got \(30, 4\) and \(23, 5\)"),
        ({"linear_weight": torch.zeros(K, 2, D)}, "do not fit"),
        ({"linear_bias": torch.zeros(8)}, r"bias must have the shape \(23,\), got \(8,\)"),
        ({"weight": torch.ones(8)}, "weight has 8 entries for 23 classes"),
        ({"example_weight": torch.ones(8)}, r"example_weight must have the shape \(30,\), got \(8,\)"),
        ({"label_smoothing": 2.0}, r"label_smoothing must be in \[0, 1\], got 2.0"),
        ({"reduction": "avg"}, "Unknown reduction 'avg'"),
        ({"target": torch.full((N, K), 1 / K), "ignore_index": 3}, "ignore_index=3 needs class indices"),
        ({"tau": 0.0}, "tau must be positive"),
        ({"delta": -1.0}, "delta must be positive"),
        ({"tau": None, "delta": 1.0}, "without tau clips nothing"),
        ({"temp": 1.0}, "Give tau .* or temp"),
    ],
    ids=str,
)
def test_bad_arguments(change: dict[str, Any], message: str) -> None:
    hidden, weight, bias, target = layer()
    arguments = {"input": hidden, "linear_weight": weight, "linear_bias": bias, "target": target, "tau": 1.0, **change}
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**arguments)


def test_a_masked_class_with_a_clip_is_refused_instead_of_nan() -> None:
    hidden, weight, bias, target = layer()
    bias = bias.detach().clone()
    target[target == 3] = 4
    bias[3] = -torch.inf
    for call in (
        lambda: linear_cross_entropy(hidden, weight, target, linear_bias=bias, tau=1.0),
        lambda: clip_hidden(hidden, weight, 1.0, bias=bias),
    ):
        with pytest.raises(ValueError, match="the bias must be finite, got -inf: to mask a class, use LogitClip"):
            call()
    expected = F.cross_entropy(hidden @ weight.t() + bias, target)  # without a clip it works
    torch.testing.assert_close(linear_cross_entropy(hidden, weight, target, linear_bias=bias), expected)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("delta", [None, 0.5, 300.0, 1e10])
def test_rows_whose_squares_overflow_have_loss_nan_and_the_others_do_not(delta: float | None, gradients: bool) -> None:
    hidden = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    hidden[:2] *= 1e20
    weight = torch.randn(50, 8, generator=torch.Generator().manual_seed(1)).requires_grad_(gradients)
    loss = linear_cross_entropy(hidden, weight, torch.arange(4), tau=1.0, delta=delta, reduction="none")
    assert loss[:2].isnan().all()
    assert loss[2:].isfinite().all()


# -- speed -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("rows", [256, 2048])
def test_the_time_against_plain_cross_entropy_has_not_doubled(rows: int) -> None:
    """Compare the ratio of CPU times, measured in alternating fresh processes, with the committed one."""
    folder = Path(__file__).parents[1] / "benchmarks"
    [committed] = (folder / "results").glob("million_classes-*.csv")
    took: dict[str, list[float]] = {"ours": [], "plain": []}
    for _ in range(3):
        for case, times in took.items():
            command = [sys.executable, folder / "million_classes.py", "--one", "65536", "128", str(rows), case]
            times.append(json.loads(subprocess.run(command, capture_output=True, check=True, timeout=300).stdout)[0])
    now = statistics.median(a / b for a, b in zip(took["ours"], took["plain"], strict=True))
    with committed.open(newline="", encoding="utf-8") as stream:
        cell = {"classes": "65536", "width": "128", "rows": str(rows)}
        found = [row for row in csv.DictReader(stream) if cell.items() <= row.items() and row["seconds"]]
    ours, plain = ([float(r["seconds"]) for r in found if r["case"] == case] for case in ("ours", "plain"))
    assert now < 2 * statistics.median(ours) / statistics.median(plain)


@pytest.mark.slow
def test_the_examples_run(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    root = Path(__file__).parents[1]
    language_model = [root / "examples" / "causal_lm.py", "--steps", "2", "--out", tmp_path / "out.csv"]
    classes = [
        root / "benchmarks" / "hundred_thousand_classes.py",
        "--classes",
        "500",
        "--examples",
        "500",
        "--epochs",
        "1",
    ]
    for script in (language_model, classes):
        subprocess.run([sys.executable, *script], capture_output=True, check=True, timeout=500)
    assert len((tmp_path / "out.csv").read_text(encoding="utf-8").splitlines()) == 5


# -- classes sharded over processes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3])
def test_classes_sharded_over_ranks(world: int, tmp_path: Any) -> None:
    command = [sys.executable, __file__, str(world), str(tmp_path / "store")]
    processes = [
        subprocess.Popen(
            [*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        for rank in range(world)
    ]
    for process in processes:
        code, out, err = finished(process)
        assert (code, out) == (0, "same\n"), err


def _rank(world: int, store: str, rank: int) -> None:
    """One process of the test above: compare its part of the loss and gradients with the whole layer."""
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    group = dist.group.WORLD
    blocks.SMALL_BLOCK, blocks.MOST_ROWS, blocks.FEWEST_ROWS, blocks.CHUNK = 8 * 10, 8, 0, 50
    hidden, weight, bias, target = layer()
    target[::7] = -100
    options: Any = {"weight": torch.linspace(0.1, 2, K, dtype=torch.float64), "label_smoothing": 0.1}
    bounds = [K * r // world + (r == 1) for r in range(world)] + [K]  # parts of different sizes
    mine = slice(bounds[rank], bounds[rank + 1])
    for tau, delta in ((None, None), (4.0, 0.5), (70.0, 60.0)):
        for reduction in ("mean", "none"):
            clip: Any = {"tau": tau, "delta": delta, "reduction": reduction}
            whole = linear_cross_entropy(hidden, weight, target, linear_bias=bias, **options, **clip)
            part = [x.detach()[mine].requires_grad_() for x in (weight, bias)]
            got = linear_cross_entropy(hidden, part[0], target, linear_bias=part[1], **options, **clip, group=group)
            torch.testing.assert_close(got, whole, rtol=1e-10, atol=1e-10)
            expected = torch.autograd.grad(whole.sum(), [hidden, weight, bias])
            slopes = torch.autograd.grad(got.sum(), [hidden, *part])
            for a, b in zip(slopes, [expected[0], expected[1][mine], expected[2][mine]], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    sizes = [K // world + (r < K % world) for r in range(world)]
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    for loss in LOSSES:
        head = LinearLogitClip(D, K, loss, tau=4.0, group=group, dtype=torch.float64)
        function: Any = LOSSES[loss]
        if {"log_probs", "logits"} & set(function.takes):  # every class of a row
            with pytest.raises(ValueError, match=f"{loss} cannot be used with sharded classes"):
                head(hidden, target)
            continue
        with torch.no_grad():
            head.weight.copy_(weight[mine])
            head.bias.copy_(bias[mine])
        got, expected = head(hidden, target), fused(loss, hidden, weight, bias, target, (4.0, None))
        torch.testing.assert_close(got, expected)
        slopes = torch.autograd.grad(expected, [hidden, weight, bias])
        parts = torch.autograd.grad(got, [hidden, head.weight, head.bias])
        for a, b in zip(parts, [slopes[0], slopes[1][mine], slopes[2][mine]], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    dist.barrier()
    print("same", flush=True)
    os._exit(0)  # gloo's destructors may wait for each other


if __name__ == "__main__":
    _rank(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))


def test_the_old_place_works_and_warns() -> None:
    import logitclip.linear

    with pytest.warns(DeprecationWarning, match=r"Import gram_matrix from logitclip\.heads"):
        assert logitclip.linear.gram_matrix is gram_matrix
    with pytest.raises(AttributeError, match="no attribute 'gram'"):
        logitclip.linear.gram  # noqa: B018
