"""The closed form against plain operations, under every transform of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from memory import Memory
from torch import Tensor, nn
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from logitclip import fused, losses
from logitclip.clip import Clip, clip_logits, make_clip
from logitclip.criterion import LogitClip, Loss
from logitclip.fused import ONLY_TARGET, WITH_SUM, row_log_probs

torch.set_num_threads(1)

SMALL, LARGE = (6, 5), (100, 3000)  # the second is more than one block
CLIPS = [None, (1.0, None), (2.0, 0.5), (0.5, 3.0), (1e3, None), (60.0, 50.0)]  # the last two need shifted exponentials


def batch(shape: tuple[int, ...] = SMALL, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Make labels and logits whose rows have norms from about 0.1 to 100, none near a threshold."""
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(shape, generator=g, dtype=torch.float64)
    norms = 10 ** torch.linspace(-1.013, 1.987, z[..., 0].numel(), dtype=torch.float64).reshape(shape[:-1])
    z = z / z.norm(dim=-1, keepdim=True) * norms.unsqueeze(-1)
    return z.to(dtype), torch.randint(shape[-1], shape[:-1], generator=g)


@contextmanager
def plain() -> Iterator[None]:
    """Compute everything with plain operations."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("clip", "fused"):
            patch.setattr(f"logitclip.{module}.takes_closed_form", lambda z, p: False)
        yield


def clip_of(clip: Any) -> Clip | None:
    return None if clip is None or clip[0] is None else make_clip(*clip)


def numbers(z: Tensor, y: Tensor, clip: Any, *, mean: bool = True) -> list[Tensor]:
    """Return the row log-probabilities and their gradients for upstream gradients of both signs."""
    z = z.detach().requires_grad_()
    outputs = [x for x in row_log_probs(z, y, clip_of(clip), wanted=WITH_SUM if mean else ONLY_TARGET) if x is not None]
    upstream = [torch.linspace(-1, 2, x.numel(), dtype=x.dtype).reshape(x.shape).roll(i) for i, x in enumerate(outputs)]
    return [*outputs, *torch.autograd.grad(outputs, z, upstream)]


def assert_same(z: Tensor, y: Tensor, clip: Any, *, mean: bool = True, tolerance: float = 1e-12) -> None:
    got = numbers(z, y, clip, mean=mean)
    with plain():
        expected = numbers(z, y, clip, mean=mean)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def in_closed_form(z: Tensor, y: Tensor, tau: float | None = 1.0, p: float = 2.0) -> bool:
    node: Any = row_log_probs(z.requires_grad_(), y, None if tau is None else make_clip(tau, p=p))[0].grad_fn
    if type(node).__name__ == "ViewBackward0":
        node = node.next_functions[0][0]
    return type(node).__name__ == "_RowLogProbsBackward"


# -- which form is used ------------------------------------------------------------------------------------------------


class Subclass(Tensor):
    pass


def test_the_closed_form_is_taken_where_it_is_meant_to_be() -> None:
    assert in_closed_form(*batch())
    assert in_closed_form(*batch(LARGE))
    assert in_closed_form(*batch((3, 4, 5)))
    assert in_closed_form(*batch(LARGE), tau=None)
    z, y = batch()
    assert in_closed_form(nn.Parameter(z), y)
    assert in_closed_form(z.float(), y)
    assert not in_closed_form(z.clone(), y, tau=None)  # small, and nothing to clip
    assert not in_closed_form(z.clone(), y, p=1.0)
    assert not in_closed_form(z.clone().as_subclass(Subclass), y)


def test_half_precision_is_computed_in_float32() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        for shape in (SMALL, LARGE):
            z, y = batch(shape, dtype)
            log_p, sum_log_p, gradient = numbers(z, y, (1.0, None))
            assert (log_p.dtype, sum_log_p.dtype, gradient.dtype) == (torch.float32, torch.float32, dtype)
            *expected, exact = numbers(z.float(), y, (1.0, None))
            assert torch.equal(log_p, expected[0])
            assert torch.equal(sum_log_p, expected[1])
            assert torch.equal(gradient, exact.to(dtype))


# -- the closed form equals plain operations ---------------------------------------------------------------------------


@pytest.fixture(params=["one block", "several blocks", "not kept", "rows above a block"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ways to cut logits [13, 9]; 30 entries are three rows, which do not divide 13."""
    block, kept = {
        "one block": (1000, 1000),
        "several blocks": (30, 1000),
        "not kept": (30, 0),
        "rows above a block": (5, 0),
    }[request.param]
    monkeypatch.setattr(fused, "MIN_BLOCKED", 0)
    monkeypatch.setattr(fused, "BLOCK_ENTRIES", block)
    monkeypatch.setattr(fused, "MOST_EXPONENTIALS", kept)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("clip", [(None, None), (1.0, None), (2.5, 0.4)], ids=str)
def test_every_device_gives_the_numbers_of_float64(clip: Any, device: str) -> None:
    z, y = 3 * torch.randn(64, 30, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 30
    z[0], z[1, 3:], z[2] = 0, -torch.inf, 1e20 * z[2]
    got = numbers(z.to(device), y.to(device) % 3, clip)
    for one, other in zip(got, numbers(z.double(), y % 3, clip), strict=True):
        torch.testing.assert_close(one.cpu().double(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("clip", CLIPS, ids=str)
def test_equals_the_plain_form(clip: Any, mean: bool) -> None:
    z, y = batch((13, 9))
    assert_same(z, y, clip, mean=mean)
    assert_same(z[:0], y[:0], clip, mean=mean)  # an empty batch
    assert_same(z[:4] * 1e-3, y[:4], clip, mean=mean)  # no row is clipped
    assert_same(z.float(), y, clip, mean=mean, tolerance=2e-5)
    assert_same(z.view(13, 3, 3), y[:, None].expand(13, 3) % 3, clip, mean=mean)  # dense outputs
    z[3] = 0  # no norm to divide by
    assert_same(z, y, clip, mean=mean)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("clip", CLIPS, ids=str)
def test_layout_does_not_matter(clip: Any) -> None:
    z, y = batch((13, 9))
    expected = numbers(z, y, clip)
    spread = torch.zeros(26, 18, dtype=z.dtype)
    spread[::2, ::2] = z
    for view in (z.t().contiguous().t(), spread[::2, ::2]):
        assert not view.is_contiguous()
        for a, b in zip(numbers(view, y, clip), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)
    assert_same(z[:1].expand(13, 9), y, clip)  # one row, expanded thirteen times


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("clip", CLIPS, ids=str)
def test_extreme_logits(clip: Any) -> None:
    g = torch.Generator().manual_seed(0)
    z = torch.randn(13, 9, generator=g, dtype=torch.float64).sign() * 1e4
    z[1] = 1e4
    z[2, 0] = 0
    y = torch.randint(9, (13,), generator=g)
    assert_same(z, y, clip)
    log_p, sum_log_p, gradient = numbers(z.float(), y, clip)
    assert all(x.isfinite().all() for x in (log_p, sum_log_p, gradient))
    assert (log_p <= 0).all()
    assert (sum_log_p < 0).all()


@pytest.mark.parametrize("clip", CLIPS, ids=str)
def test_real_shapes(clip: Any) -> None:
    for shape in ((50, 10), (7, 300_000), LARGE):
        for mean in (True, False):
            assert_same(*batch(shape), clip, mean=mean)
    assert_same(*batch((700, 2000)), clip)  # too many exponentials to keep


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("clip", CLIPS, ids=str)
def test_one_of_the_outputs(clip: Any) -> None:
    z, y = batch((13, 9))

    def gradient(which: int) -> Tensor:
        x = z.clone().requires_grad_()
        output: Any = row_log_probs(x, y, clip_of(clip))[which]
        return torch.autograd.grad((output / (1, 9)[which]).exp().sum(), x)[0]

    for which in (0, 1):
        got = gradient(which)
        with plain():
            torch.testing.assert_close(got, gradient(which), rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("clip", CLIPS, ids=str)
def test_a_retained_graph_gives_the_same_gradient_again(clip: Any) -> None:
    z, y = batch((13, 9))
    z.requires_grad_()
    log_p, sum_log_p = row_log_probs(z, y, clip_of(clip))
    total = log_p.square().sum() + sum_log_p.square().sum()  # type: ignore[union-attr]
    gradients = [torch.autograd.grad(total, z, retain_graph=True)[0] for _ in range(3)]
    kept = gradients[0].clone()
    assert torch.equal(gradients[0], gradients[1])
    gradients[1].zero_()  # writing to one gradient changes no other
    gradients[0].fill_(7)
    assert torch.equal(gradients[2], kept)
    assert torch.equal(torch.autograd.grad(total, z)[0], kept)


def test_accumulates_into_grad() -> None:
    z, y = batch()
    z.requires_grad_()
    criterion = LogitClip("ce", tau=1.0)
    criterion(z, y).backward()
    assert z.grad is not None
    once = z.grad.clone()
    criterion(z, y).backward()
    torch.testing.assert_close(z.grad, 2 * once)


def test_logits_changed_in_place_are_noticed() -> None:
    z, y = batch()
    z = z.requires_grad_() * 1
    loss = LogitClip("ce", tau=1.0)(z, y)
    with torch.no_grad():
        z += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_without_gradients() -> None:
    z, y = batch(LARGE)
    expected = LogitClip("nce", tau=1.0)(z.clone().requires_grad_(), y)
    with torch.inference_mode():
        assert LogitClip("nce", tau=1.0)(z, y) == expected
    assert not LogitClip("nce", tau=1.0)(z, y).requires_grad


# -- every transform of torch, at a small shape and at one of several blocks -------------------------------------------


CRITERIA = {name: LogitClip(name, tau=1.0) for name in ("ce", "nce")}
both_shapes = pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "blocked"])
both_losses = pytest.mark.parametrize("name", list(CRITERIA))


def loss_and_gradient(function: Callable[..., Tensor], z: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    z = z.detach().clone().requires_grad_()
    loss = function(z, *args)
    loss.backward()
    assert z.grad is not None
    return loss.detach(), z.grad


@both_losses
@both_shapes
def test_hessian_vector_products(name: str, shape: tuple[int, int]) -> None:
    z, y = batch(shape)
    direction = batch(shape, seed=1)[0]

    def product() -> Tensor:
        x = z.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(CRITERIA[name](x, y), x, create_graph=True)
        return torch.autograd.grad(gradient, x, direction)[0]

    got = product()
    assert got.abs().max() > 0
    with plain():
        torch.testing.assert_close(got, product(), rtol=1e-10, atol=1e-14)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("clip", [None, (1.0, None), (2.0, 0.5), (60.0, None)], ids=str)
def test_first_and_second_derivatives_by_differences(clip: Any) -> None:
    z, y = batch((5, 4))
    z[1] *= 50  # clipped also at 60
    assert in_closed_form(z, y, clip and clip[0])
    for mean in (True, False):
        function: Any = partial(row_log_probs, target=y, clip=clip_of(clip), wanted=WITH_SUM if mean else ONLY_TARGET)
        log_probs = lambda x, f=function: f(x)[: 1 + mean]  # noqa: B023, E731
        assert gradcheck(log_probs, (z,))
        assert gradgradcheck(log_probs, (z,))


@pytest.mark.parametrize("clip", [(1.0, None), (2.0, 0.5)], ids=str)
def test_the_second_derivative_also_follows_the_upstream_gradient(clip: Any) -> None:
    z, y = batch()
    z.requires_grad_()
    upstream = torch.linspace(-1, 1, len(z), dtype=z.dtype, requires_grad=True)
    log_p = row_log_probs(z, y, make_clip(*clip), ONLY_TARGET)[0]
    (gradient,) = torch.autograd.grad(log_p, z, upstream, create_graph=True)
    direction = batch(seed=1)[0]
    (got,) = torch.autograd.grad(gradient, upstream, direction)
    step = 1e-6
    above, below = (row_log_probs(z + s * direction, y, make_clip(*clip), ONLY_TARGET)[0] for s in (step, -step))
    torch.testing.assert_close(got, (above - below) / (2 * step), rtol=1e-6, atol=1e-8)


@pytest.mark.skipif(" " in torch.__file__, reason="torch's compiler cannot link in a folder with a space")
@both_shapes
def test_compile_fullgraph(shape: tuple[int, int]) -> None:
    """Both losses in one graph: compiling takes seconds."""
    z, y = batch(shape, torch.float32)
    both = lambda x, t: CRITERIA["ce"](x, t) + 2 * CRITERIA["nce"](x, t)  # noqa: E731
    torch.compiler.reset()
    compiled = torch.compile(both, fullgraph=True)
    for a, b in zip(loss_and_gradient(compiled, z, y), loss_and_gradient(both, z, y), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@both_losses
@both_shapes
def test_func_grad_vmap_and_jvp(name: str, shape: tuple[int, int]) -> None:
    z, y = batch(shape)
    criterion = CRITERIA[name]
    loss, gradient = loss_and_gradient(criterion, z, y)
    torch.testing.assert_close(torch.func.grad(criterion)(z, y), gradient)
    many, labels = torch.stack([z, z.flip(0), z * 3]), torch.stack([y, y.flip(0), y])
    torch.testing.assert_close(
        torch.func.vmap(criterion)(many, labels),
        torch.stack([criterion(a, b) for a, b in zip(many, labels, strict=True)]),
    )
    torch.testing.assert_close(
        torch.func.vmap(torch.func.grad(criterion))(many, labels),
        torch.stack([loss_and_gradient(criterion, a, b)[1] for a, b in zip(many, labels, strict=True)]),
    )
    direction = batch(shape, seed=1)[0]
    value, slope, *_ = torch.func.jvp(lambda x: criterion(x, y), (z,), (direction,))
    torch.testing.assert_close(value, loss)
    torch.testing.assert_close(slope, (gradient * direction).sum())


def test_func_hessian() -> None:
    z, y = batch()
    got = torch.func.hessian(lambda x: CRITERIA["ce"](x, y))(z)
    torch.testing.assert_close(got, torch.autograd.functional.hessian(lambda x: CRITERIA["ce"](x, y), z))


@both_losses
@pytest.mark.parametrize("vectorize", [False, True])
def test_batched_gradients(name: str, vectorize: bool) -> None:
    """A backward pass under vmap, and a second one through it."""
    z, y = batch()
    rows = LogitClip(Loss(name, reduction="none"), tau=1.0)
    with plain():
        jacobian = torch.autograd.functional.jacobian(lambda x: rows(x, y), z)
        hessian = torch.autograd.functional.hessian(lambda x: CRITERIA[name](x, y), z)
    got = torch.autograd.functional.jacobian(lambda x: rows(x, y), z, vectorize=vectorize)
    torch.testing.assert_close(got, jacobian)
    got = torch.autograd.functional.jacobian(lambda x: clip_logits(x, 1.0).square().sum(1), z, vectorize=vectorize)
    torch.testing.assert_close(got.sum(1), torch.func.jacrev(lambda x: clip_logits(x, 1.0).square().sum(1))(z).sum(1))
    got = torch.autograd.functional.hessian(lambda x: CRITERIA[name](x, y), z, vectorize=vectorize)
    torch.testing.assert_close(got, hessian)


@both_losses
@both_shapes
def test_forward_mode(name: str, shape: tuple[int, int]) -> None:
    z, y = batch(shape)
    direction = batch(shape, seed=1)[0]
    _, gradient = loss_and_gradient(CRITERIA[name], z, y)
    with forward_ad.dual_level():
        slope = forward_ad.unpack_dual(CRITERIA[name](forward_ad.make_dual(z, direction), y)).tangent
    torch.testing.assert_close(slope, (gradient * direction).sum())


@both_losses
@both_shapes
def test_autocast(name: str, shape: tuple[int, int]) -> None:
    n, classes = shape
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(classes, 8, generator=g).requires_grad_()
    x, y = torch.randn(n, 8, generator=g), torch.randint(classes, (n,), generator=g)
    with torch.autocast("cpu", torch.bfloat16):
        logits = F.linear(x, weight)
        assert logits.dtype == torch.bfloat16
        loss = CRITERIA[name](logits, y)
        of_float = CRITERIA[name](logits.float(), y)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, CRITERIA[name](logits.float(), y))  # autocast does not lower precision inside
    assert torch.equal(loss, of_float)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.isfinite().all()
    assert weight.grad.abs().max() > 0


class Step(nn.Module):
    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return torch.stack([criterion(z, y) for criterion in CRITERIA.values()])


@both_shapes
def test_export(shape: tuple[int, int]) -> None:
    z, y = batch(shape)
    program = torch.export.export(Step(), (z, y))
    other, labels = batch(shape, seed=1)
    torch.testing.assert_close(program.module()(other, labels), Step()(other, labels))


@both_losses
@both_shapes
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(name: str, shape: tuple[int, int], reentrant: bool) -> None:
    z, y = batch(shape)
    again = lambda x: checkpoint(CRITERIA[name], x, y, use_reentrant=reentrant)  # noqa: E731
    for a, b in zip(loss_and_gradient(again, z), loss_and_gradient(CRITERIA[name], z, y), strict=True):
        assert torch.equal(a, b)


@both_shapes
def test_saved_tensors_on_the_cpu(shape: tuple[int, int]) -> None:
    z, y = batch(shape)
    with torch.autograd.graph.save_on_cpu():
        got = loss_and_gradient(CRITERIA["nce"], z, y)
    for a, b in zip(got, loss_and_gradient(CRITERIA["nce"], z, y), strict=True):
        assert torch.equal(a, b)


# -- clip_logits has a closed form of its own --------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [(1.0, None), (2.0, 0.5), (0.5, 3.0)], ids=str)
def test_clip_equals_its_plain_form(clip: Any) -> None:
    z = batch((4, 5, 6))[0]
    upstream = batch((4, 5, 6), seed=1)[0]

    def derivatives(dim: int) -> list[Tensor]:
        x, g = z.clone().requires_grad_(), upstream.clone().requires_grad_()
        out = clip_logits(x, *clip, dim=dim)
        (first,) = torch.autograd.grad(out, x, g, retain_graph=True)
        (again,) = torch.autograd.grad(out, x, g, create_graph=True)
        return [out, first, again, *torch.autograd.grad(again.square().sum(), (x, g))]

    for dim in (-1, 1, 0):
        got = derivatives(dim)
        with plain():
            for a, b in zip(got, derivatives(dim), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [True, False])
def test_no_second_array_besides_the_gradient(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    n, classes, block = 200, 1000, 10_000
    monkeypatch.setattr(fused, "BLOCK_ENTRIES", block)
    monkeypatch.setattr(fused, "MOST_EXPONENTIALS", n * classes if kept else 0)
    z, y = batch((n, classes))
    z.requires_grad_()
    with Memory(z, y) as memory:
        torch.autograd.grad(LogitClip("nce", tau=1.0)(z, y), z)
    assert 8 * n * classes <= memory.peak < 8 * (n * classes + 3 * block + 40 * n)


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "blocked"])
@pytest.mark.parametrize("bad", [-1, 10**6])
def test_targets_out_of_range(shape: tuple[int, int], bad: int) -> None:
    z, y = batch(shape)
    y[2] = bad
    for function in (losses.ce, CRITERIA["ce"], CRITERIA["nce"]):
        with pytest.raises(ValueError, match=rf"Targets must lie in 0..{shape[1] - 1}, got {bad}"):
            function(z, y)


# -- every loss of the registry ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*losses.LOSSES])
def test_every_loss_differentiates_twice_in_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "MIN_BLOCKED", 0)
    monkeypatch.setattr(fused, "BLOCK_ENTRIES", 12)
    z, y = batch()
    direction = batch(seed=1)[0]

    def product() -> Tensor:
        x = z.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(LogitClip(name, tau=3.0)(x, y), x, create_graph=True)
        return torch.autograd.grad(gradient, x, direction)[0]

    got = product()
    assert got.abs().max() > 0
    with plain():
        torch.testing.assert_close(got, product(), rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("name", [*losses.LOSSES])
def test_every_loss_compiles_in_one_graph(name: str) -> None:
    """With class weights and an ignored row, and for soft targets; a memory of gradients stays outside the graph."""
    function: Any = losses.LOSSES[name]
    z, y = batch(dtype=torch.float32)
    y[2] = -100
    weighted = LogitClip(Loss(name, weight=torch.linspace(0.5, 1.5, z.shape[1])), tau=3.0)
    soft = 0.8 * F.one_hot(y.clamp(min=0), z.shape[1]) + 0.2 / z.shape[1]
    for criterion, target in ((weighted, y), (LogitClip(name, tau=3.0), soft)):
        torch.compiler.reset()
        compiled = torch.compile(criterion, backend="eager", fullgraph="threshold" not in function.takes)
        for a, b in zip(loss_and_gradient(compiled, z, target), loss_and_gradient(criterion, z, target), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [*losses.LOSSES])
def test_every_loss_keeps_float32_under_autocast(name: str) -> None:
    z, y = batch(dtype=torch.bfloat16)
    criterion = LogitClip(name, tau=3.0)
    with torch.autocast("cpu", torch.bfloat16):
        loss, gradient = loss_and_gradient(criterion, z, y)
    expected, wanted = loss_and_gradient(criterion, z.float(), y)
    assert (loss.dtype, gradient.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(loss, expected)
    assert torch.equal(gradient, wanted.bfloat16())
