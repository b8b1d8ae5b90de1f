"""`Loss` as a drop-in for `nn.CrossEntropyLoss`, `LogitClip` around any criterion, and the inputs that both reject."""

from __future__ import annotations

import copy
import io
import math
import pickle
import re
import warnings
from typing import Any

import pytest
import torch
from oracles import OUT_OF_RANGE
from torch import Tensor, nn
from torch.nn import functional as F

from logitclip import losses, theory
from logitclip.clip import CLIPS, clip_by_value, clip_logits, extended_logit_norm, logit_norm, make_clip
from logitclip.criterion import Linked, LogitClip, Loss, build_criterion
from logitclip.losses import LOSSES

torch.set_num_threads(1)

NAMES = list(LOSSES)
SHAPES = [(8, 5), (5,), (4, 5, 6), (2, 5, 3, 4)]


def random(*shape: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def labels(shape: tuple[int, ...], classes: int = 5, seed: int = 0) -> Tensor:
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(seed))


def spatial(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of class indices for logits of `shape`."""
    return shape[:1] + shape[2:] if len(shape) > 1 else ()


def both(first: Any, second: Any, logits: Tensor, *args: Any) -> None:
    """Assert that two criteria agree in value and gradient."""
    results = []
    for criterion in (first, second):
        z = logits.clone().requires_grad_()
        value = criterion(z, *args)
        (grad,) = torch.autograd.grad(value.sum(), z)
        results.append((value.detach(), grad))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


# -- as nn.CrossEntropyLoss --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
class TestAgainstCrossEntropyLoss:
    def options(self, reduction: str, weighted: bool) -> dict[str, Any]:
        return {"reduction": reduction, "weight": torch.tensor([0.5, 1.0, 2.0, 0.0, 3.0]) if weighted else None}

    def test_class_indices(self, shape: Any, weighted: bool, reduction: str, device: str) -> None:
        options = self.options(reduction, weighted)
        target = labels(spatial(shape), classes=3) if len(shape) == 1 else labels(spatial(shape))
        ours, theirs = Loss("ce", **options).to(device), nn.CrossEntropyLoss(**options).to(device)
        both(ours, theirs, random(*shape).to(device), target.to(device))

    def test_probabilities(self, shape: Any, weighted: bool, reduction: str, device: str) -> None:
        options = self.options(reduction, weighted)
        target = random(*shape, seed=1).softmax(1 if len(shape) > 1 else 0)
        ours, theirs = Loss("ce", **options).to(device), nn.CrossEntropyLoss(**options).to(device)
        both(ours, theirs, random(*shape).to(device), target.to(device))

    @pytest.mark.parametrize("ignore_index", [-100, 255, 2])
    def test_ignored(self, shape: Any, weighted: bool, reduction: str, ignore_index: int) -> None:
        options = {**self.options(reduction, weighted), "ignore_index": ignore_index}
        target = labels(spatial(shape))
        if target.ndim:
            target.view(-1)[::3] = ignore_index
            assert 0 < (target == ignore_index).sum() < target.numel()
        else:
            target.fill_(1)
        both(Loss("ce", **options), nn.CrossEntropyLoss(**options), random(*shape), target)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(4, 5), (2, 5, 3, 4)], ids=str)
def test_mean_of_every_loss_divides_by_the_weights(name: str, shape: tuple[int, ...]) -> None:
    logits, target = random(*shape), labels(spatial(shape))
    target.view(-1)[0] = -100
    class_weight = torch.tensor([0.5, 1.0, 2.0, 0.25, 3.0])
    example_weight = random(*target.shape, seed=2).abs()
    values = Loss(name, reduction="none")(logits, target)
    assert values.view(-1)[0] == 0
    weights = class_weight[target.clamp_min(0)] * example_weight * (target != -100)
    total = Loss(name, weight=class_weight, reduction="sum")(logits, target, example_weight)
    torch.testing.assert_close(total, (weights * values).sum())
    mean = Loss(name, weight=class_weight)(logits, target, example_weight=example_weight)
    torch.testing.assert_close(mean, (weights * values).sum() / weights.sum())
    each = Loss(name, weight=class_weight, reduction="none")(logits, target, example_weight)
    torch.testing.assert_close(each, weights * values)


@pytest.mark.parametrize("name", NAMES)
def test_one_hot_probabilities_equal_class_indices_with_example_weights(name: str) -> None:
    logits, target, weight = random(6, 5), labels((6,)), random(6, seed=1).abs()
    one_hot = F.one_hot(target, 5).float()
    torch.testing.assert_close(Loss(name)(logits, one_hot, weight), Loss(name)(logits, target, weight))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("case", ["all ignored", "empty", "no weight"])
def test_the_mean_over_nothing_is_0(case: str, clip: bool, reduction: Any) -> None:
    logits = (torch.zeros(0, 5) if case == "empty" else random(4, 5)).requires_grad_()
    target = (
        torch.zeros(0, dtype=torch.int64) if case == "empty" else torch.full((4,), -100 if "ignored" in case else 1)
    )
    weight = torch.zeros(5) if case == "no weight" else None
    for name in NAMES:
        criterion: nn.Module = Loss(name, reduction=reduction, weight=weight)
        loss = (LogitClip(criterion, tau=1.0) if clip else criterion)(logits, target)
        assert loss.item() == 0
        (grad,) = torch.autograd.grad(loss, logits)
        assert (grad == 0).all()
        assert grad.shape == logits.shape


def test_an_empty_batch_without_reduction_is_empty() -> None:
    assert Loss("gce", reduction="none")(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64)).shape == (0,)
    assert Loss("gce", reduction="none")(torch.zeros(0, 5), torch.zeros(0, 5)).shape == (0,)


def test_small_integer_targets_and_half_precision() -> None:
    logits, target = random(4, 5), labels((4,))
    expected = F.cross_entropy(logits, target)
    for dtype in (torch.uint8, torch.int8, torch.int32):
        torch.testing.assert_close(Loss("ce")(logits, target.to(dtype)), expected)
    loss = Loss("ce", weight=torch.ones(5, dtype=torch.float64))(logits.half(), target)
    assert loss.dtype == torch.float32
    soft = F.one_hot(target, 5)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        torch.testing.assert_close(Loss("ce")(logits, soft.to(dtype)), expected)


def test_class_weights_follow_the_module() -> None:
    criterion = LogitClip(Loss("ce", weight=torch.ones(5)), tau=1.0)
    assert [name for name, _ in criterion.named_buffers()] == ["criterion.weight"]
    assert not list(criterion.parameters())


# -- bad input ---------------------------------------------------------------------------------------------------------

BAD = [
    ("batch sizes", random(4, 5), labels((3,)), r"Logits of shape \(4, 5\) need targets of shape \(4,\), got \(3,\)"),
    ("one target for all", random(4, 5), labels((1,)), r"need targets of shape \(4,\), got \(1,\)"),
    ("a scalar target", random(4, 5), torch.tensor(1), r"need targets of shape \(4,\), got \(\)"),
    ("a column of targets", random(4, 5), labels((4, 1)), r"need targets of shape \(4,\), got \(4, 1\)"),
    (
        "image sizes",
        random(2, 5, 3, 4),
        labels((2, 4, 3)),
        r"Logits of shape \(2, 5, 3, 4\) need targets of shape \(2, 3, 4\), got \(2, 4, 3\)",
    ),
    (
        "soft image sizes",
        random(2, 5, 3, 4),
        torch.full((2, 3, 4, 5), 0.2),
        r"shape of the logits, \(2, 5, 3, 4\), got \(2, 3, 4, 5\)",
    ),
    ("too large", random(4, 5), torch.tensor([0, 1, 5, 2]), r"must lie in 0\.\.4, got 5"),
    ("negative", random(4, 5), torch.tensor([0, 1, -1, 2]), r"must lie in 0\.\.4, got -1"),
    ("beside ignored", random(3, 5), torch.tensor([-100, 7, 1]), r"in 0\.\.4 or be ignore_index=-100, got 7"),
    ("float indices", random(4, 5), labels((4,)).float(), r"must be integers: use target\.long\(\)"),
    ("soft batch sizes", random(4, 5), torch.full((3, 5), 0.2), r"shape of the logits, \(4, 5\), got \(3, 5\)"),
    ("soft, one for all", random(4, 5), torch.full((1, 5), 0.2), r"shape of the logits, \(4, 5\), got \(1, 5\)"),
    ("soft, negative", random(1, 2), torch.tensor([[1.5, -0.5]]), "non-negative and sum to 1"),
    ("soft, NaN", random(1, 2), torch.tensor([[math.nan, 1.0]]), "non-negative and sum to 1"),
    ("multi-label", random(2, 3), torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]), "one two-class problem per label"),
    ("multi-label integers", random(2, 3), torch.tensor([[1, 0, 1], [0, 1, 0]]), r"target\.argmax\(1\)"),
    ("dense multi-label", random(2, 3, 4), torch.ones(2, 3, 4, dtype=torch.int64), "multi-label target, which is not"),
    (
        "single logit",
        random(4, 1),
        labels((4,), 1),
        r"at least two logits .* got 1: .*torch\.cat\(\[-logits, logits\], 1\)",
    ),
    ("single logit, floats", random(4, 1), torch.ones(4, 1), "at least two logits per example, got 1"),
    ("integer logits", torch.ones(4, 5, dtype=torch.int64), labels((4,)), r"floating-point tensor, got torch\.int64"),
    ("no class dimension", torch.tensor(1.0), torch.tensor(0), "must have a class dimension"),
]


@pytest.mark.parametrize(("logits", "target", "sentence"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
@pytest.mark.parametrize("clip", [False, True])
def test_wrong_targets_are_refused_in_one_sentence(logits: Tensor, target: Tensor, sentence: str, clip: bool) -> None:
    for name in ("ce", "nce", "cores"):
        with pytest.raises(ValueError, match=sentence) as error:
            (LogitClip(name, tau=1.0) if clip else Loss(name))(logits, target)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(("logits", "target", "sentence"), [b[1:] for b in BAD if "batch sizes" in b[0]])
def test_loss_functions_check_as_well(logits: Tensor, target: Tensor, sentence: str) -> None:
    for name in NAMES:
        with pytest.raises(ValueError, match=sentence):
            LOSSES[name](logits, target)


def test_wrong_weights_are_refused() -> None:
    logits, target = random(4, 5), labels((4,))
    with pytest.raises(ValueError, match="weight has 3 entries for 5 classes"):
        Loss("ce", weight=torch.ones(3))(logits, target)
    with pytest.raises(ValueError, match="weight has 1 entries for 5 classes"):
        Loss("ce", weight=torch.ones(1))(logits, torch.full((4, 5), 0.2))
    with pytest.raises(ValueError, match=r"a float per class, got torch\.float32, \(1, 5\)"):
        Loss("ce", weight=torch.ones(1, 5))
    with pytest.raises(ValueError, match=r"a float per class, got torch\.int64"):
        Loss("ce", weight=torch.ones(5, dtype=torch.int64))
    for shape in ((3,), (1,), (), (4, 1)):
        with pytest.raises(
            ValueError, match=r"example_weight must have the shape \(4,\), got " + re.escape(str(shape))
        ):
            Loss("ce")(logits, target, torch.ones(shape))
    with pytest.raises(ValueError, match="cores takes class weights with class-index targets only"):
        Loss("cores", weight=torch.ones(5))(logits, torch.full((4, 5), 0.2))


def test_unknown_options_are_refused_at_construction() -> None:
    with pytest.raises(ValueError, match=r"Unknown reduction 'means'\. Did you mean 'mean'"):
        Loss("ce", reduction="means")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Unknown reduction None"):
        Loss("ce", reduction=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Unknown loss 'gcee'\. Did you mean 'gce'"):
        LogitClip("gcee", tau=1.0)
    with pytest.raises(ValueError, match="The loss 'gce' has no knob 'gamma'"):
        Loss("gce", gamma=1.0)
    with pytest.raises(TypeError, match="the name of a loss or a callable such as a module, got 3"):
        LogitClip(3, tau=1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a callable such as a module, got <class"):
        LogitClip(nn.CrossEntropyLoss, tau=1.0)
    with pytest.raises(TypeError, match=r"class_weight must be a tensor, got list: use torch\.tensor\(weight\)"):
        Loss("ce", weight=[1.0, 2.0])
    with pytest.raises(ValueError, match=r"Unknown clip 'nrom'\. Did you mean 'norm'"):
        build_criterion("ce", "nrom:tau=1")


@pytest.mark.parametrize("name", NAMES)
def test_knobs_out_of_range_are_refused_at_construction(name: str) -> None:
    free = {"detach_weight", "sieve_after", "matrix"}  # any value will do, or it is tested below
    assert set(OUT_OF_RANGE.get(name, ())) == set(LOSSES.knobs(name)) - free
    for knob, values in OUT_OF_RANGE.get(name, {}).items():
        for value in (*values, math.nan):
            bad: dict[str, Any] = {knob: value}
            with pytest.raises(ValueError, match=rf"^{knob} .* got '?{re.escape(str(value))}'?\b"):
                Loss(name, **bad)
            with pytest.raises(ValueError, match=knob):
                theory.base_loss_bounds(name, 1.0, 10, **bad)


# -- LogitClip ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_loss_by_name_is_that_loss_on_clipped_logits(name: str, shape: tuple[int, ...], device: str) -> None:
    dim, target = (1 if len(shape) > 1 else 0), labels(spatial(shape)).to(device)
    for tau, delta, p in ((1.0, None, 2.0), (2.5, 0.4, 2.0), (3.0, 1.0, 1.0), (1.0, 2.0, math.inf)):
        criterion = LogitClip(name, tau=tau, delta=delta, p=p)

        def by_hand(z: Tensor, t: Tensor, tau: float = tau, delta: float | None = delta, p: float = p) -> Tensor:
            return Loss(name)(clip_logits(z, tau, delta, p=p, dim=dim), t)

        both(criterion, by_hand, random(*shape).to(device), target)
        both(criterion, by_hand, random(*shape).to(device), random(*shape, seed=1).softmax(dim).to(device))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_around_a_criterion_of_torch(shape: tuple[int, ...]) -> None:
    dim = 1 if len(shape) > 1 else 0
    for inner in (
        nn.CrossEntropyLoss(label_smoothing=0.1),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), reduction="sum", ignore_index=2),
    ):
        both(
            LogitClip(inner, tau=1.0),
            lambda z, t, inner=inner: inner(clip_logits(z, 1.0, dim=dim), t),
            random(*shape),
            labels(spatial(shape)),
        )
    both(LogitClip(nn.CrossEntropyLoss(), tau=1.0), LogitClip("ce", tau=1.0), random(*shape), labels(spatial(shape)))


def test_around_any_callable() -> None:
    logits, target = random(4, 5), labels((4,))

    def margin(z: Tensor, t: Tensor, shift: float, *, power: int = 1) -> Tensor:
        return (z.sum(1) + t + shift).pow(power).mean()

    got = LogitClip(margin, tau=1.0)(logits, target, 0.5, power=2)
    torch.testing.assert_close(got, margin(clip_logits(logits, 1.0), target, 0.5, power=2))
    pair = (target, target.flip(0), 0.3)  # a target that is not a tensor, as in mixup

    def mixed(z: Tensor, t: tuple[Tensor, Tensor, float]) -> Tensor:
        return t[2] * F.cross_entropy(z, t[0]) + (1 - t[2]) * F.cross_entropy(z, t[1])

    torch.testing.assert_close(LogitClip(mixed, tau=1.0)(logits, pair), mixed(clip_logits(logits, 1.0), pair))


def test_around_any_callable_what_it_is_not_made_for_is_refused() -> None:
    clip = LogitClip(lambda z, t: ((z - t) ** 2).mean(), tau=1.0)  # would broadcast
    with pytest.raises(ValueError, match="4 rows of logits and 1 targets do not belong together"):
        clip(random(4, 5), torch.full((1, 5), 0.2))
    with pytest.raises(ValueError, match="Multi-label targets are not supported"):
        LogitClip(nn.BCEWithLogitsLoss(), tau=1.0)(random(2, 3), torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]))
    with pytest.raises(ValueError, match="multi-label target, which is not supported"):
        LogitClip(nn.MultiLabelMarginLoss(), tau=1.0)(random(2, 3), torch.tensor([[0, 2, -1], [1, -1, -1]]))
    for target in (torch.ones(4, 1), torch.ones(4), None):
        with pytest.raises(ValueError, match="at least two logits per example, got 1"):
            LogitClip(nn.BCEWithLogitsLoss(), tau=1.0)(random(4, 1), target)
    with pytest.raises(ValueError, match="do not belong together"):
        build_criterion(lambda z, t: z.sum() + t.sum(), "value:limit=1")(random(4, 5), labels((3,)))


def test_nested_clips() -> None:
    outer = LogitClip(LogitClip("ce", tau=1.0), tau=3.0)
    torch.testing.assert_close(outer(random(4, 5), labels((4,))), LogitClip("ce", tau=1.0)(random(4, 5), labels((4,))))


def test_a_clip_can_follow_a_schedule() -> None:
    logits, target = random(6, 5) * 10, labels((6,))
    following, given, by_temp = LogitClip("ce", tau=1.0), LogitClip("ce", tau=1.0, delta=0.5), LogitClip("ce", temp=2.0)
    following.tau = given.tau = 5.0
    by_temp.temp = 4.0
    assert (following.delta, given.delta) == (5.0, 0.5)
    assert (by_temp.tau, by_temp.delta, following.temp) == (4.0, 0.25, None)
    for criterion, tau, delta in ((following, 5.0, 5.0), (given, 5.0, 0.5), (by_temp, 4.0, 0.25)):
        torch.testing.assert_close(criterion.link(logits), clip_logits(logits, tau, delta))
        torch.testing.assert_close(criterion(logits, target), LogitClip("ce", tau=tau, delta=delta)(logits, target))
    with pytest.raises(ValueError, match="made with temp: set temp"):
        by_temp.tau = 1.0
    with pytest.raises(ValueError, match="made with tau: set tau"):
        following.temp = 1.0
    with pytest.raises(ValueError, match="tau must be positive"):
        following.tau = -1.0
    assert following.tau == 5.0


def test_temp_is_threshold_temp_and_scale_1_over_temp() -> None:
    criterion = LogitClip("gce:q=0.5", temp=2.5)
    assert (criterion.tau, criterion.delta, criterion.p) == (2.5, 0.4, 2.0)
    logits, target = random(6, 5), labels((6,))
    torch.testing.assert_close(criterion(logits, target), Loss("gce", q=0.5)(clip_logits(logits, 2.5, 0.4), target))
    for temp in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"temp must be positive and finite, got {temp}"):
            LogitClip("ce", temp=temp)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tau": 0}, "tau must be positive"),
        ({"tau": -1}, "tau must be positive"),
        ({"tau": 1, "delta": 0}, "delta must be positive"),
        ({"tau": 1, "p": 0.5}, "p must be at least 1"),
    ],
)
def test_clip_options_are_checked_at_construction(options: dict[str, float], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        LogitClip("ce", **options)


# -- any clip by name --------------------------------------------------------------------------------------------------

HEAD = nn.Linear(4, 5)
HEAD.weight.data = random(5, 4, seed=3)

LINKS = {
    "none": lambda z: z,
    "norm:tau=1": lambda z: clip_logits(z, 1.0),
    "norm:tau=2,delta=0.5,p=inf": lambda z: clip_logits(z, 2.0, 0.5, p=math.inf),
    "norm:temp=1.5": lambda z: clip_logits(z, 1.5, 1 / 1.5),
    "value:limit=1": lambda z: clip_by_value(z, 1.0),
    "softcap:cap=2": lambda z: 2 * torch.tanh(z / 2),
    "logit_norm:temperature=0.5": lambda z: logit_norm(z, 0.5),
    "extended_logit_norm": lambda z: extended_logit_norm(z, HEAD.weight),
}


def test_every_clip_is_tried() -> None:
    assert {spec.partition(":")[0] for spec in LINKS} == set(CLIPS)


@pytest.mark.parametrize("spec", LINKS)
@pytest.mark.parametrize("inner", ["nce", nn.CrossEntropyLoss(label_smoothing=0.1)], ids=["name", "module"])
def test_clipped(spec: str, inner: Any) -> None:
    criterion = build_criterion(inner, spec, head=HEAD)
    base = Loss(inner) if isinstance(inner, str) else inner
    for shape in SHAPES:
        dim = 1 if len(shape) > 1 else 0
        both(
            criterion,
            lambda z, t, dim=dim: base(LINKS[spec](z.movedim(dim, -1)).movedim(-1, dim), t),
            random(*shape),
            labels(spatial(shape)),
        )
    link: Any = criterion.link
    torch.testing.assert_close(link(random(4, 5)), LINKS[spec](random(4, 5)))


@pytest.mark.parametrize(
    "spec", ["norm:tau=0", "norm:tau=1,p=0.5", "norm:temp=0", "value:limit=-1", "logit_norm:temperature=0"]
)
def test_clipped_checks_at_construction(spec: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        build_criterion("ce", spec)


# -- diagnostics -------------------------------------------------------------------------------------------------------


def test_diagnose_counts_and_measures() -> None:
    logits = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [0.6, 0.8]], dtype=torch.float64)
    report = LogitClip("ce", tau=1.0).diagnose(logits)
    assert report.clipped == 0.5  # the norm 1 of the last row counts
    assert report.norm_quantiles[0.5] == 0.75
    assert list(report.norm_quantiles) == [0.05, 0.25, 0.5, 0.75, 0.95]
    assert (report.loss, report.lowest_loss) == (None, None)
    dense = LogitClip("ce", tau=1.0, p=math.inf).diagnose(random(2, 5, 3, 4).half())
    assert dense.clipped == (random(2, 5, 3, 4).abs().amax(1) >= 1).float().mean().item()
    assert LogitClip("ce", tau=1.0).diagnose(torch.tensor([3.0, 4.0])).clipped == 1.0
    with pytest.raises(ValueError, match=r"nothing to diagnose in logits of shape \(0, 5\)"):
        LogitClip("ce", tau=1.0).diagnose(torch.zeros(0, 5))
    ignored = LogitClip("ce", tau=1.0).diagnose(logits, torch.tensor([-100, 1, 1, 0]))
    assert ignored.clipped == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match="nothing to diagnose"):
        LogitClip("ce", tau=1.0).diagnose(logits, torch.full((4,), -100))
    with pytest.raises(ValueError, match="need targets of shape"):
        LogitClip("ce", tau=1.0).diagnose(logits, torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize("name", [n for n in NAMES if n != "cores"])  # the bound of cores is not sharp
def test_diagnose_warns_at_the_lower_bound(name: str) -> None:
    perfect = torch.eye(10)[labels((50,), 10)] - 0.1  # the best possible direction
    target = labels((50,), 10)
    criterion = LogitClip(name, tau=0.5)
    if math.inf in map(abs, theory.base_loss_bounds(name, math.inf, 10)[:1]):  # it has no lowest value without a clip
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            lowest = criterion.diagnose(100 * perfect, target).lowest_loss
            assert lowest is None or lowest == pytest.approx(float(criterion(100 * perfect, target)), rel=1e-4)
        return
    with pytest.warns(UserWarning, match=f"The mean {name} loss, .* has reached .* too small a scale underfits"):
        report = criterion.diagnose(100 * perfect, target)
    assert report.loss is not None
    assert report.loss == pytest.approx(report.lowest_loss, rel=1e-4)
    assert report.loss == pytest.approx(float(criterion(100 * perfect, target)))


@pytest.mark.parametrize(("temp", "lowest"), [(4.0, 4.3568), (2.5, 4.2081), (1.5, 3.9446)])
def test_diagnose_warns_at_the_bottom_of_table_8(temp: float, lowest: float) -> None:
    """Threshold above scale: rows lie on the sphere of radius 1/temp, with a far higher loss than norms below temp."""
    target = torch.arange(100)
    criterion = LogitClip("ce", temp=temp)
    with pytest.warns(UserWarning, match="raise delta"):
        report = criterion.diagnose(50 * (torch.eye(100) - 0.01), target)
    assert report.lowest_loss == pytest.approx(lowest, abs=1e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = criterion.diagnose(0.5 * torch.eye(100), target)  # nothing is clipped yet
    assert report.clipped == 0
    assert report.lowest_loss == pytest.approx(theory.loss_bounds(temp, 100, p=2)[0])


@pytest.mark.parametrize("name", NAMES)
def test_diagnose_is_silent_in_a_healthy_state(name: str) -> None:
    target = labels((50,), 10)
    half_right = random(50, 10, scale=1.0) + 2 * torch.eye(10)[target]
    perfect = 100 * (torch.eye(10)[target] - 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert LogitClip(name, tau=1.0).diagnose(half_right, target).loss is not None
        LogitClip(name, tau=1.0).diagnose(torch.zeros(50, 10), target)
        LogitClip(name, tau=30.0).diagnose(perfect, target)  # a good fit, not underfitting
        LogitClip(nn.CrossEntropyLoss(), tau=0.5).diagnose(perfect, target)  # a loss without known bounds


def test_diagnose_takes_what_the_criterion_takes() -> None:
    logits, target = random(6, 5), labels((6,))
    ignoring = target.clone()
    ignoring[::2] = 255
    criterion = LogitClip(Loss("gce:q=0.5", ignore_index=255, reduction="none"), tau=1.0)
    report = criterion.diagnose(logits, ignoring)
    assert report.loss == pytest.approx(float(criterion(logits, ignoring).sum() / 3))
    soft = LogitClip("ce", tau=1.0).diagnose(logits, F.one_hot(target, 5).float())
    assert soft.loss == pytest.approx(LogitClip("ce", tau=1.0).diagnose(logits, target).loss)
    leaf = logits.clone().requires_grad_()
    LogitClip("ce", tau=1.0).diagnose(leaf, target)
    assert leaf.grad is None


# -- devices -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_loss_on_every_device(name: str, device: str) -> None:
    logits, target, counts = random(20, 5), labels((20,)), torch.tensor([1.0, 2, 3, 4, 5])
    results = []
    for there in ("cpu", device):
        criterion = LogitClip(Loss(name, weight=torch.arange(1.0, 6.0)), tau=1.0).to(there)
        criterion.start_epoch(40, counts.to(there))
        z = logits.to(there).requires_grad_()
        value = criterion(z, target.to(there))
        results.append([x.cpu() for x in (value.detach(), *torch.autograd.grad(value, z))])
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spec", ["none", "norm:tau=1", "norm:temp=2,p=3", "value:limit=1", "logit_norm:temperature=1"])
def test_a_loss_never_waits_for_the_device(name: str, spec: str) -> None:
    """Tensors on "meta" have no values: `.item()` and a branch on a value would raise."""
    logits = torch.empty(8, 5, device="meta", requires_grad=True)
    target = torch.empty(8, dtype=torch.int64, device="meta")
    weight = None if name == "cores" else torch.empty(5, device="meta")
    criterion: Any = build_criterion(Loss(name, weight=weight, ignore_index=3), spec)
    for given in (target, torch.empty(8, 5, device="meta")):
        value = criterion(logits, given, example_weight=torch.empty(8, device="meta"))
        (grad,) = torch.autograd.grad(value, logits)
        assert (value.shape, grad.shape) == ((), (8, 5))
    scheduled = Loss("cores")
    scheduled.epoch = torch.empty((), device="meta")
    scheduled.class_counts = scheduled.removed = torch.empty(5, device="meta")
    assert scheduled(logits, target).shape == ()


def test_a_schedule_works_in_a_compiled_criterion() -> None:
    logits, target = 10 * random(6, 5), labels((6,))
    for name, criterion in {"tau": LogitClip("ce", tau=1.0), "temp": LogitClip("ce", temp=2.0)}.items():
        compiled = torch.compile(criterion, backend="eager", fullgraph=True)  # raises if it compiles too often
        for step in range(12):
            setattr(criterion, name, 1.0 + 0.3 * step)
            torch.testing.assert_close(compiled(logits, target), criterion(logits, target))


# -- state -------------------------------------------------------------------------------------------------------------


def test_start_epoch_reaches_cores_through_any_link() -> None:
    counts, logits, target = torch.tensor([1.0, 2, 3, 4, 5]), random(20, 5), labels((20,))
    plain = Loss("cores")
    plain.start_epoch(35, counts)
    for spec in LINKS:
        criterion: Any = build_criterion("cores", spec, head=HEAD)
        criterion.start_epoch(35, counts)
        torch.testing.assert_close(criterion(logits, target), plain(LINKS[spec](logits), target))
    inner = Loss("cores")
    LogitClip(LogitClip(inner, tau=1.0), tau=2.0).start_epoch(35, counts)
    assert inner.epoch == 35


def test_start_epoch_changes_nothing_for_the_others() -> None:
    logits, target = random(20, 5), labels((20,))
    for name in NAMES:
        criterion = Loss(name)
        before = criterion(logits, target)
        criterion.start_epoch(0 if criterion.scheduled else 50, torch.ones(5))
        assert torch.equal(criterion(logits, target), before) != criterion.scheduled
    LogitClip(nn.CrossEntropyLoss(), tau=1.0).start_epoch(3)


def test_state_dict_round_trip() -> None:
    def make(name: str, weight: Tensor) -> LogitClip:
        return LogitClip(Loss(name, weight=weight), tau=1.0)

    for name in NAMES:
        trained, resumed = make(name, torch.arange(5.0)), make(name, torch.ones(5))
        trained.start_epoch(40, torch.ones(5))
        file = io.BytesIO()
        torch.save(trained.state_dict(), file)
        file.seek(0)
        resumed.load_state_dict(torch.load(file, weights_only=True))
        resumed.start_epoch(40, torch.ones(5))
        logits, target = random(20, 5), labels((20,))
        assert torch.equal(resumed(logits, target), trained(logits, target))


def test_what_the_sieve_counted_is_saved_and_summed_over_processes() -> None:
    counts, logits, target = torch.full((5,), 20.0), random(20, 5), labels((20,))
    trained, resumed = (LogitClip("cores:sieve_after=0", tau=1.0) for _ in range(2))
    trained.start_epoch(40, counts)
    trained(logits, target)
    inner: Any = trained.criterion
    counted = inner.removed.clone()
    assert counted.sum() > 0
    with torch.no_grad():  # a validation loss is not counted
        trained(logits, target)
    resumed.load_state_dict(pickle.loads(pickle.dumps(trained)).state_dict())
    trained.sync(lambda tensor: 2 * tensor)  # two processes with the same counts
    for criterion, removed in ((trained, 2 * counted), (resumed, counted)):
        criterion.start_epoch(41, counts)
        sieve: Any = criterion.criterion
        torch.testing.assert_close(sieve.class_counts, counts - removed)
    trained.load_state_dict(LogitClip("cores", tau=1.0).state_dict())  # a criterion that has not counted yet
    assert inner.removed is None
    for name in NAMES:
        untouched = Loss(name)
        untouched.sync(lambda tensor: tensor + 1)
        assert not untouched.state_dict() or untouched.memory is not None
    LogitClip(nn.CrossEntropyLoss(), tau=1.0).sync(lambda tensor: tensor)


@pytest.mark.parametrize("spec", LINKS)
def test_pickle_and_deepcopy(spec: str) -> None:
    logits, target = random(20, 5), labels((20,))
    for inner in (*NAMES, nn.CrossEntropyLoss()):
        criterion: Any = build_criterion(inner, spec, head=HEAD)
        criterion.start_epoch(33, torch.ones(5)) if hasattr(criterion, "start_epoch") else None
        expected = criterion(logits, target)
        for again in (copy.deepcopy(criterion), pickle.loads(pickle.dumps(criterion))):
            assert torch.equal(again(logits, target), expected)
            assert repr(again) == repr(criterion)


def test_repr_says_what_it_is() -> None:
    assert repr(Loss("gce:q=0.5")) == "Loss('gce', q=0.5, reduction='mean')"
    assert repr(Loss("ce", reduction="sum")) == "Loss('ce', reduction='sum')"
    text = repr(LogitClip("ce", tau=1.5, p=math.inf))
    assert text == "LogitClip(\n  tau=1.5, delta=1.5, p=inf\n  (criterion): Loss('ce', reduction='mean')\n)"
    assert "value, limit=1.0" in repr(build_criterion("ce", "value:limit=1"))
    assert "logit_norm, temperature=0.5" in repr(build_criterion("ce", "logit_norm:temperature=0.5"))
    assert "lambda" in repr(Linked("ce", lambda z: z))


def test_it_trains() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), random(64, 4)
    y = x[:, :3].argmax(1)
    criterion, optimizer = LogitClip("ce", tau=1.0), torch.optim.SGD(model.parameters(), lr=0.5)
    values = []
    for _ in range(100):
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    assert theory.loss_bounds(1.0, 3, p=2)[0] <= values[-1] < values[0]
    assert (model(x).argmax(1) == y).float().mean() > 0.9


# -- what came up in review --------------------------------------------------------------------------------------------


def test_row_log_probs_never_takes_another_batch_size():
    from logitclip.fused import row_log_probs

    for logits, target in ((torch.zeros(4, 3), torch.tensor([0])), (torch.zeros(4, 2, 3), torch.zeros(2, 2).long())):
        with pytest.raises(ValueError, match="target must have the shape"):
            row_log_probs(logits, target, make_clip(1.0))


def test_a_scale_without_a_threshold_is_refused():
    with pytest.raises(ValueError, match="without tau"):
        clip_logits(torch.zeros(2, 3), delta=1.0)


def test_single_logits_with_one_label_each_get_advice():
    with pytest.raises(ValueError, match="single logits"):
        Loss("ce")(torch.zeros(4), torch.tensor([1.0, 0.0, 1.0, 1.0]))


def test_a_list_as_target_is_one_sentence():
    with pytest.raises(TypeError, match=r"must be a tensor, got list"):
        Loss("ce")(torch.zeros(2, 3), [0, 1])  # pyright: ignore


def test_example_weights_do_not_change_the_type_of_the_loss():
    loss = Loss("ce")(torch.zeros(2, 3), torch.tensor([0, 1]), torch.ones(2, dtype=torch.float64))
    assert loss.dtype == torch.float32


@pytest.mark.parametrize("name", list(LOSSES))
@pytest.mark.parametrize("clip", [None, 1.0])
def test_ignored_rows_may_have_any_class_masked(name: str, clip: float | None) -> None:
    """Class 0, say a padding token, stands in for the targets that are ignored."""
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    logits[:, 0] = -math.inf
    logits.requires_grad_()
    criterion = Loss(name) if clip is None else LogitClip(name, tau=clip)
    target = torch.tensor([1, 2, -100, 4])
    loss = criterion(logits, target)
    (gradient,) = torch.autograd.grad(loss, logits)
    kept = target != -100
    expected = criterion(logits[kept], target[kept])
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logits)[0])
    assert gradient.isfinite().all()


def test_a_criterion_of_ones_own_behind_the_clip_keeps_its_methods() -> None:
    class Scheduled(nn.Module):
        epoch: Any = None

        def forward(self, logits: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(logits, target)

        def start_epoch(self, epoch: int, class_counts: Tensor | None = None) -> None:
            self.epoch = epoch

    class Hundredfold(Loss):
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return 100 * super().forward(*args, **kwargs)

    scheduled = Scheduled()
    LogitClip(scheduled, tau=1.0).start_epoch(3)
    assert scheduled.epoch == 3
    logits, target = torch.randn(4, 5), torch.tensor([0, 1, 2, 3])
    got = LogitClip(Hundredfold("ce"), tau=1.0)(logits, target)
    torch.testing.assert_close(got, 100 * LogitClip("ce", tau=1.0)(logits, target))


def test_values_are_checked_in_compiled_code_on_demand():
    """A multi-hot target is a number in compiled code, where a check would break the graph, unless it is asked for."""
    logits, multi_hot = torch.zeros(2, 4), torch.tensor([[1.0, 1, 0, 0], [0, 1, 0, 1]])
    compiled = torch.compile(Loss("ce"), backend="eager")
    assert compiled(logits, multi_hot).isfinite()
    losses.check_values()
    try:
        with pytest.raises(ValueError, match="sum to 1 over the classes"):
            compiled(logits, multi_hot)
        with pytest.raises(ValueError, match=r"Targets must lie in 0\.\.3, got 7"):
            compiled(logits, torch.tensor([0, 7]))
    finally:
        losses.check_values(False)
    assert compiled(logits, multi_hot).isfinite()


def test_one_word_for_the_loss_and_for_class_weights_and_the_old_ones_still_work():
    import inspect

    from logitclip import heads

    logits, target, weights = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 2]), torch.tensor([1.0, 2.0, 3.0])
    for make in (Loss, LogitClip, heads.LinearLogitClip):
        assert "loss" in inspect.signature(make).parameters
    new = LogitClip(loss="gce", temp=1.5, class_weight=weights)(logits, target)
    with pytest.warns(DeprecationWarning, match="criterion is called loss now"):
        old = LogitClip(criterion="gce", temp=1.5, weight=weights)
    assert torch.equal(old(logits, target), new)
    with pytest.warns(DeprecationWarning, match="spec is called loss now"):
        assert Loss(spec="mae").name == "mae"
    hidden, head = torch.randn(6, 4), torch.randn(3, 4)
    both = [heads.linear_cross_entropy(hidden, head, target, **{word: weights}) for word in ("weight", "class_weight")]
    assert torch.equal(*both)


def test_both_words_for_class_weights_are_refused():
    from logitclip import heads

    with pytest.raises(ValueError, match="not both"):
        Loss("ce", class_weight=torch.ones(3), weight=torch.ones(3))
    with pytest.raises(ValueError, match="not both"):
        heads.linear_cross_entropy(
            torch.ones(1, 2), torch.ones(3, 2), torch.tensor([0]), class_weight=torch.ones(3), weight=torch.ones(3)
        )
