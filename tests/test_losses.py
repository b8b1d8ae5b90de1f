"""Every loss against the NumPy oracle, and its known properties: limits, ranges, bounds, the symmetric condition."""

from __future__ import annotations

import inspect
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from logitclip import fused, losses, theory
from logitclip.criterion import LogitClip, Loss
from logitclip.losses import LOSSES, loss, one_minus_p
from logitclip.registry import Knob

torch.set_num_threads(1)

NAMES = list(LOSSES)

# -- inputs ------------------------------------------------------------------------------------------------------------


def values_of(name: str, knob: Knob) -> st.SearchStrategy[Any]:
    """Draw valid values of a knob: 0, and from a quarter of the default to more than twice the default."""
    if knob.annotation is bool:
        return st.booleans()
    if knob.annotation is int:
        return st.integers(1, 4 * knob.default)

    def accepted(value: float) -> bool:
        try:
            given: dict[str, Any] = {knob.name: value}
            return bool(Loss(name, **given))
        except ValueError:
            return False

    return (st.just(0.0) | st.floats(0.25, 2.5).map(lambda factor: factor * knob.default)).filter(accepted)


def knobs_of(name: str) -> st.SearchStrategy[dict[str, Any]]:
    """Draw knobs: the defaults, or any subset with other values."""
    drawn = {k: v for k, v in LOSSES.knobs(name).items() if k not in oracles.SCHEDULE.get(name, ())}
    knobs = {k: values_of(name, v) for k, v in drawn.items() if v.default is not None}
    return st.just({}) | st.fixed_dictionaries({}, optional=knobs)


@st.composite
def batches(draw: st.DrawFn, max_classes: int = 1000, rows: int = 24) -> tuple[np.ndarray, np.ndarray]:
    """Draw logits [N, K] within ±1e4 and labels [N]: few rows chosen by hypothesis, or many from a seed."""
    if draw(st.booleans()):
        shape = draw(st.tuples(st.integers(1, 6), st.integers(2, 6)))
        z = draw(hnp.arrays(np.float64, shape, elements=st.floats(-1e4, 1e4)))
        return z, draw(hnp.arrays(np.int64, shape[:1], elements=st.integers(0, shape[1] - 1)))
    classes = draw(st.sampled_from([2, 3, 10, 100, max_classes]) | st.integers(2, max_classes))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    z = rng.normal(size=(rows, classes)) * 10 ** rng.uniform(-3, 4, size=(rows, 1))
    y = rng.integers(classes, size=rows)
    z[0] = 0
    z[1] = rng.uniform(-1e4, 1e4)  # all equal
    z[2, y[2]] = 1e4  # p_y = 1
    z[3, y[3]] = -1e4  # p_y = 0
    z[4] = rng.choice([-1e4, 1e4], classes)
    z[5] = rng.integers(-2, 3, classes)  # ties
    z[6], z[6, y[6]] = 0, 1e4
    z[7], z[7, y[7]] = 0, -1e4
    return z.clip(-1e4, 1e4), y


thresholds = st.floats(-1.5, 2.3).map(lambda x: 10**x)  # up to 200, whose exponential overflows float32
clips = st.none() | st.tuples(
    thresholds, st.none() | thresholds, st.just(2.0) | st.sampled_from([1.0, 1.5, 3.0, 20.0, math.inf])
)


def away_from_threshold(z: np.ndarray, y: np.ndarray, clip: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows whose norm differs from tau by more than 1e-5; at tau Eq. 4 jumps, so rounding would decide."""
    if clip is None:
        return z, y
    keep = np.abs(oracles.norm(z, clip[2])[:, 0] / clip[0] - 1) > 1e-5
    return z[keep], y[keep]


def away_from_ties(name: str, z: np.ndarray, y: np.ndarray, clip: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows whose largest logit is clearly the largest, for losses in which rounding would decide a tie."""
    if name not in oracles.OF_ARGMAX or not len(z):
        return z, y
    linked = np.sort(link_of(clip)(z)[0], axis=1)
    keep = linked[:, -1] - linked[:, -2] > 1e-4 * np.abs(linked).max(1).clip(1)
    return z[keep], y[keep]


def link_of(clip: Any) -> oracles.Link:
    return oracles.no_link if clip is None else oracles.clip(*clip)


def compute(name: str, logits: Tensor, target: Tensor, clip: Any = None, **knobs: Any) -> tuple[Tensor, Tensor]:
    """Compute values and gradients with the library."""
    logits = logits.clone().requires_grad_()
    criterion: Any = Loss(name, reduction="none", **knobs)
    if clip is not None:
        criterion = LogitClip(criterion, tau=clip[0], delta=clip[1], p=clip[2])
    values = criterion(logits, target)
    (gradient,) = torch.autograd.grad(values.sum(), logits)
    return values.detach(), gradient


# -- against the oracle ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_loss_and_knob_has_an_oracle(name: str) -> None:
    oracle = inspect.signature(oracles.ORACLES[name]).parameters
    for knob in LOSSES.knobs(name).values():
        if knob.name not in oracles.SCHEDULE.get(name, ()):
            assert oracle[knob.name].default == knob.default


@pytest.mark.parametrize("name", NAMES)
def test_oracle_gradients_are_derivatives_of_oracle_values(name: str) -> None:
    rng = np.random.default_rng(0)
    z, y, step = rng.normal(size=(20, 5)) * 2, rng.integers(5, size=20), 1e-6
    if name in oracles.DETACHED:
        pytest.skip("its gradient is not the derivative of its value")
    for link in (oracles.no_link, oracles.clip(1.0), oracles.clip(2.0, 0.5, 3.0), oracles.logit_norm(0.5)):
        numeric = np.stack(
            [
                (oracles.loss(name, z + e, y, link).values - oracles.loss(name, z - e, y, link).values) / (2 * step)
                for e in step * np.eye(5)
            ],
            axis=1,
        )
        np.testing.assert_allclose(oracles.loss(name, z, y, link).gradient, numeric, rtol=1e-6, atol=1e-7)


@pytest.fixture(params=["plain", "blocked"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Send all logits through plain operations, or through gradients written by hand (in several blocks)."""
    if request.param == "plain":
        for module in ("clip", "fused"):
            monkeypatch.setattr(f"logitclip.{module}.takes_closed_form", lambda z, p: False, raising=False)
    monkeypatch.setattr(fused, "MIN_BLOCKED", 0 if request.param == "blocked" else math.inf)
    monkeypatch.setattr(fused, "BLOCK_ENTRIES", 2000)
    return request.param


def check_against_oracle(name: str, data: st.DataObject, dtype: torch.dtype) -> None:
    z, y = data.draw(batches())
    clip, knobs = data.draw(clips), data.draw(knobs_of(name))
    z, y = away_from_threshold(torch.tensor(z, dtype=dtype).double().numpy(), y, clip)
    z, y = away_from_ties(name, z, y, clip)
    if not len(z):
        return
    expected = oracles.loss(name, z, y, link_of(clip), **knobs)
    values, gradient = (
        a.double().numpy() for a in compute(name, torch.tensor(z, dtype=dtype), torch.tensor(y), clip, **knobs)
    )
    if dtype == torch.float64:
        error = oracles.ROUGH.get(name, 1e-9)
        np.testing.assert_array_less(np.abs(values - expected.values), error * np.maximum(1, np.abs(expected.values)))
        np.testing.assert_array_less(
            np.abs(gradient - expected.gradient), error * np.maximum(1, np.abs(expected.gradient))
        )
        return
    # The error of float32 is proportional to the loss (AUL goes up to 25, NCE + MAE to 51) and to delta/tau.
    size = np.maximum(np.abs(expected.values), np.abs(expected.slopes).max(1)).clip(1)
    allowed = (4e-6 if name in oracles.ROUGH else 1e-6) * math.sqrt(z.shape[1]) * np.abs(z).max(1).clip(1) * size
    gain = 1.0 if clip is None or clip[1] is None else max(1.0, clip[1] / clip[0])
    np.testing.assert_array_less(np.abs(values - expected.values), allowed)
    np.testing.assert_array_less(np.abs(gradient - expected.gradient).max(1), allowed * gain)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.usefixtures("form")
def test_values_and_gradients(name: str, dtype: torch.dtype) -> None:
    @settings(max_examples=50, deadline=None, derandomize=True)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        check_against_oracle(name, data, dtype)

    check()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.usefixtures("form")
def test_values_and_gradients_at_length(name: str, dtype: torch.dtype) -> None:
    @settings(max_examples=500, deadline=None, derandomize=True)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        check_against_oracle(name, data, dtype)

    check()


@pytest.mark.parametrize("name", NAMES)
def test_soft_targets_are_expectations(name: str) -> None:
    @settings(max_examples=30, deadline=None, derandomize=True)
    @given(batches(max_classes=12), clips, st.integers(0, 2**32 - 1))
    def check(batch: Any, clip: Any, seed: int) -> None:
        z, y = away_from_ties(name, *away_from_threshold(batch[0], batch[1], clip), clip)
        if not len(z):
            return
        t = np.random.default_rng(seed).dirichlet(np.full(z.shape[1], 0.5), size=len(z))
        expected = oracles.loss(name, z, t, link_of(clip))
        values, gradient = compute(name, torch.tensor(z), torch.tensor(t), clip)
        error = oracles.ROUGH.get(name, 1e-9)
        np.testing.assert_allclose(values, expected.values, rtol=error, atol=error)
        np.testing.assert_allclose(gradient, expected.gradient, rtol=error, atol=error)
        one_hot = torch.tensor(oracles.one_hot(y, z))
        for soft, hard in zip(
            compute(name, torch.tensor(z), one_hot, clip),
            compute(name, torch.tensor(z), torch.tensor(y), clip),
            strict=True,
        ):
            torch.testing.assert_close(soft, hard, rtol=1e-9, atol=1e-9)

    check()


def extreme_rows(dtype: torch.dtype, classes: int) -> Tensor:
    """Zeros, ties, the largest and the smallest numbers, one entry against the rest."""
    info, rng = torch.finfo(dtype), torch.Generator().manual_seed(0)
    most, least = min(info.max, 1e30), info.smallest_normal
    rows = [torch.full((classes,), value) for value in (0.0, least, -least, 1.0, 1e4, -1e4, most, -most)]
    for value in (1e-3, 1.0, 17.0, 1e4, most):
        rows += [
            torch.zeros(classes),
            torch.full((classes,), -value),
            value * torch.randn(classes, generator=rng).sign(),
        ]
        rows[-3][0], rows[-2][0] = value, value
    rows += [scale * torch.randn(classes, generator=rng) for scale in (1e-4, 1.0, 1e2, 1e4)]
    return torch.stack(rows).to(dtype)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.usefixtures("form")
def test_nothing_is_ever_nan_or_infinite(name: str, dtype: torch.dtype) -> None:
    for classes in (2, 10, 1000):
        logits = extreme_rows(dtype, classes)
        for label in (0, classes - 1):
            target = torch.full((len(logits),), label)
            for clip in (
                None,
                (1.0, None, 2.0),
                (2.5, 0.4, 2.0),
                (0.5, 2.0, 1.0),
                (1.0, None, 1.5),
                (1.0, None, 3.0),
                (1.0, 0.5, math.inf),
                *(((1.0, 1e10, 2.0), (1e-10, None, 2.0), (1e-10, 1e10, 3.0)) if dtype.itemsize > 2 else ()),
            ):
                values, gradient = compute(name, logits, target, clip)
                assert values.isfinite().all(), clip
                assert gradient.isfinite().all(), clip
                assert gradient.dtype == dtype
                assert values.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_computed_in_float32(name: str, dtype: torch.dtype) -> None:
    logits = (3 * torch.randn(64, 20, generator=torch.Generator().manual_seed(0))).to(dtype)
    target = torch.arange(64) % 20
    for clip in (None, (1.0, None, 2.0)):
        values, gradient = compute(name, logits, target, clip)
        exact, exact_gradient = compute(name, logits.float(), target, clip)
        torch.testing.assert_close(values, exact, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradient, exact_gradient.to(dtype))


def test_functions_take_any_leading_shape_and_return_one_value_each() -> None:
    logits, target = (
        torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)),
        torch.tensor([[0, 1, 2], [3, 4, 0]]),
    )
    for name in NAMES:
        values = getattr(losses, name)(logits, target)
        assert values.shape == (2, 3)
        flat = getattr(losses, name)(logits.flatten(0, 1), target.flatten())
        torch.testing.assert_close(values.flatten(), flat)
        torch.testing.assert_close(getattr(losses, name)(logits[1, 2], target[1, 2]), values[1, 2])


# -- masked classes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("clip", [None, (1.0, None, 2.0), (2.5, 0.4, 2.0), (1.0, None, 3.0), (1.0, 0.5, math.inf)])
@pytest.mark.usefixtures("form")
def test_masked_classes_do_not_count(name: str, clip: Any) -> None:
    """A logit of -inf removes the class: from the norm, the sum of log-probabilities and every gradient."""
    rng = np.random.default_rng(0)
    z = torch.tensor(3 * rng.normal(size=(30, 8)))
    masked = torch.tensor(rng.random((30, 8)) < 0.3)
    masked[:, 0], masked[0] = False, False
    for soft in (False, True):
        share = torch.tensor(rng.dirichlet(np.ones(8), size=30)).masked_fill(masked, 0.0)
        target = share / share.sum(1, keepdim=True) if soft else torch.zeros(30, dtype=torch.int64)
        values, gradient = compute(name, z.masked_fill(masked, -math.inf), target, clip)
        assert (gradient[masked] == 0).all()
        for i in range(30):
            there = ~masked[i]
            alone = compute(name, z[i : i + 1, there], target[i : i + 1, there] if soft else target[:1], clip)
            torch.testing.assert_close(values[i : i + 1], alone[0])
            torch.testing.assert_close(gradient[i, there], alone[1][0])


def test_a_masked_label_is_an_infinite_loss_as_in_torch() -> None:
    logits, target = torch.tensor([[0.0, 1.0, -math.inf]]), torch.tensor([2])
    assert losses.ce(logits, target).item() == math.inf
    values, gradient = compute("mae", logits, target, (1.0, None, 2.0))
    assert values.item() == 2
    assert gradient.isfinite().all()


# -- a loss of one's own -----------------------------------------------------------------------------------------------


def test_a_new_loss_is_one_function_and_one_oracle(monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    """The example of docs/extend.md passes every test of all losses."""
    monkeypatch.delitem(LOSSES._entries, "squared", raising=False)
    page = (Path(__file__).parents[1] / "docs" / "extend.md").read_text(encoding="utf-8")
    exec(re.findall(r"```python\n(.*?@loss.*?)```", page, flags=re.DOTALL)[0], {"__name__": "plugin"})

    def squared(log_p: np.ndarray, rest: np.ndarray, scale: float = 1.0) -> oracles.Pair:
        return scale * rest**2, -2 * scale * np.exp(log_p) * rest

    for table in (oracles.OF_TARGET, oracles.ORACLES):
        monkeypatch.setitem(table, "squared", squared)
    test_every_loss_and_knob_has_an_oracle("squared")
    test_oracle_gradients_are_derivatives_of_oracle_values("squared")
    for dtype in (torch.float64, torch.float32):
        test_values_and_gradients("squared", dtype)
        test_nothing_is_ever_nan_or_infinite("squared", dtype)
    test_half_precision_is_computed_in_float32("squared", torch.bfloat16)
    test_soft_targets_are_expectations("squared")
    test_masked_classes_do_not_count("squared", (1.0, None, 2.0))
    test_symmetric_condition("squared")
    test_clipped_losses_obey_their_bounds("squared")
    logits, target = torch.eye(10) - 0.1, torch.arange(10)
    assert losses.squared(logits, target).shape == (10,)
    assert "squared" in dir(losses)
    with pytest.warns(UserWarning, match="The mean squared loss, .* has reached"):
        assert LogitClip("squared:scale=2", tau=0.5).diagnose(100 * logits, target).lowest_loss is not None
    assert command("bound", "--tau", 1, "--classes", 10, "--loss", "squared")[0] == 0
    assert "squared:scale=1" in command("list", "losses")[1]


def test_a_loss_without_a_known_range_is_diagnosed_without_it() -> None:
    @loss
    def hill(log_p: Tensor, _: None) -> Tensor:
        """p_y (1-p_y)."""
        return log_p.exp() * one_minus_p(log_p)

    report = LogitClip("hill", tau=5.0).diagnose(torch.eye(3), torch.arange(3))
    assert report.loss is not None
    assert report.lowest_loss is None


def test_help_shows_what_a_caller_passes() -> None:
    for name in NAMES:
        parameters = inspect.signature(LOSSES[name]).parameters
        assert list(parameters) == ["logits", "target", *LOSSES.knobs(name)]
        assert not any(isinstance(p.annotation, str) for p in parameters.values())  # float, not 'float'
        doc = inspect.getdoc(LOSSES[name]) or ""
        assert all(f"    {p}: " in doc for p in parameters), name  # each has a line
        assert all(section in doc for section in ("Args:", "Returns:", "Raises:", f">>> {name}(")), name
    assert not [name for name in dir(losses) if name not in LOSSES]
    with pytest.raises(AttributeError, match="has no attribute 'gcee'"):
        losses.gcee  # noqa: B018


# -- what is known about each ------------------------------------------------------------------------------------------


def at_probability(p_y: Any, classes: int = 2) -> tuple[Tensor, Tensor]:
    """Make logits with the given p_y and the rest shared evenly; all labels are 0."""
    p_y = torch.as_tensor(p_y, dtype=torch.float64).reshape(-1, 1)
    logits = torch.cat([p_y.log(), ((1 - p_y) / (classes - 1)).log().expand(-1, classes - 1)], 1)
    return logits, torch.zeros(len(p_y), dtype=torch.int64)


shares = torch.linspace(0.01, 0.99, 25, dtype=torch.float64)


@pytest.mark.parametrize(
    ("spec", "value"),
    [
        ("ce", -shares.log()),
        ("focal", -((1 - shares) ** 0.5) * shares.log()),
        ("mae", 2 * (1 - shares)),
        ("mae:scale=1", 1 - shares),
        ("rce", 9.210340371976182 * (1 - shares)),
        ("rce:log_zero=-4", 4 * (1 - shares)),
        ("sce", -0.5 * shares.log() + 9.210340371976182 * (1 - shares)),
        ("gce", (1 - shares**0.7) / 0.7),
        ("gce:q=1", 1 - shares),
        ("taylor_ce:order=1", 1 - shares),
        ("taylor_ce", (1 - shares) + (1 - shares) ** 2 / 2),
        ("ael", torch.exp(-shares / 2.5)),
        ("aul", ((5.5 - shares) ** 3 - 4.5**3) / 3),
        ("agce", (1.6**0.6 - (0.6 + shares) ** 0.6) / 0.6),
        ("nce", shares.log() / (shares.log() + (1 - shares).log())),
        ("nce_mae", 50 * shares.log() / (shares.log() + (1 - shares).log()) + 1 - shares),
        (
            "nce_agce",
            50 * shares.log() / (shares.log() + (1 - shares).log()) + 0.1 * (2.8**3 - (1.8 + shares) ** 3) / 3,
        ),
    ],
)
def test_defaults_are_those_of_the_paper(spec: str, value: Tensor) -> None:
    torch.testing.assert_close(Loss(spec, reduction="none")(*at_probability(shares)), value, rtol=1e-12, atol=1e-12)


def test_values_at_certainty() -> None:
    logits, target = torch.tensor([[1e4, -1e4], [-1e4, 1e4]], dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    ends = {
        "mae": (0, 2),
        "rce": (0, 9.210340371976182),
        "gce": (0, 1 / 0.7),
        "taylor_ce:order=4": (0, 1 + 1 / 2 + 1 / 3 + 1 / 4),
        "phuber_ce": (0, math.log(10) + 1),
        "phuber_ce:threshold=30": (0, math.log(30) + 1),
        "ael": (math.exp(-1 / 2.5), 1),
        "aul": (0, (5.5**3 - 4.5**3) / 3),
        "agce": (0, (1.6**0.6 - 0.6**0.6) / 0.6),
        "nce": (0, 1),
        "ce": (0, 2e4),
    }
    for spec, (right, wrong) in ends.items():
        assert Loss(spec, reduction="none")(logits, target).tolist() == pytest.approx([right, wrong], abs=1e-12), spec


def test_focal_detached_weight_gives_the_weighted_gradient_of_ce() -> None:
    logits, target = torch.randn(9, 4, generator=torch.Generator().manual_seed(0)).double(), torch.arange(9) % 4
    weight = (1 - logits.softmax(1)[torch.arange(9), target]).sqrt()
    values, gradient = compute("focal", logits, target, detach_weight=True)
    ce, ce_gradient = compute("ce", logits, target)
    torch.testing.assert_close(values, weight * ce)
    torch.testing.assert_close(gradient, weight[:, None] * ce_gradient)
    assert not torch.allclose(compute("focal", logits, target)[1], gradient)


@pytest.mark.parametrize("threshold", [2.0, 10.0, 30.0])
def test_phuber_is_continuous_with_its_slope(threshold: float) -> None:
    near = torch.tensor([1 / threshold - 1e-9, 1 / threshold, 1 / threshold + 1e-9], dtype=torch.float64)
    values, gradient = compute("phuber_ce", *at_probability(near), threshold=threshold)
    torch.testing.assert_close(values, torch.full_like(values, math.log(threshold)), rtol=0, atol=1e-7)
    torch.testing.assert_close(gradient, gradient[1].expand(3, 2), rtol=0, atol=1e-7)


def test_taylor_tends_to_ce() -> None:
    logits, target = at_probability(shares[5:])
    gaps = [(Loss("taylor_ce", order=n)(logits, target) - Loss("ce")(logits, target)).abs() for n in (1, 2, 6, 30, 300)]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 1e-9


@settings(max_examples=100, deadline=None, derandomize=True)
@given(batches())
def test_nce_lies_in_0_1_and_is_1_over_k_at_uniform(batch: Any) -> None:
    z, y = batch
    values = losses.nce(torch.tensor(z), torch.tensor(y))
    assert ((values >= 0) & (values <= 1 + 1e-12)).all()
    classes = z.shape[1]
    uniform = losses.nce(torch.full((1, classes), float(z[0, 0]), dtype=torch.float64), torch.tensor([0]))
    assert uniform.item() == pytest.approx(1 / classes, rel=1e-9)


def test_nce_barely_minds_a_confident_mistake() -> None:
    logits = torch.zeros(1, 10, dtype=torch.float64)
    logits[0, 0] = 1e4  # wrong, the others tie: 1/(K-1), not 1
    assert losses.nce(logits, torch.tensor([3])).item() == pytest.approx(1 / 9)


@pytest.mark.parametrize("name", NAMES)
def test_symmetric_condition(name: str) -> None:
    rng = np.random.default_rng(0)
    z = torch.tensor(rng.normal(size=(200, 7)) * 10 ** rng.uniform(-2, 2, size=(200, 1)))
    for clip in (None, (1.0, None, 2.0)):
        per_class = torch.stack([compute(name, z, torch.full((200,), k), clip)[0] for k in range(7)])
        total = per_class.sum(0)
        spread = ((total.max() - total.min()) / per_class.abs().max()).item()
        assert (spread < 1e-12) if name in oracles.SYMMETRIC else (spread > 1e-5), (clip, spread)


# -- bounds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_clipped_losses_obey_their_bounds(name: str) -> None:
    """Prop 2.4 bounds losses of p_y, direct bounds hold for the others, and the range lies inside them."""

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(
        batches(max_classes=100),
        thresholds,
        st.none() | thresholds,
        st.floats(1, 20) | st.just(math.inf),
        knobs_of(name),
    )
    def check(batch: Any, tau: float, delta: float | None, p: float, knobs: dict[str, Any]) -> None:
        z, y = batch
        classes = z.shape[1]
        values = compute(name, torch.tensor(z), torch.tensor(y), (tau, delta, p), **knobs)[0]
        lower, upper = theory.base_loss_bounds(name, tau, classes, delta, p, **knobs)
        slack = 1e-12 * max(1, abs(lower), abs(upper)) + 1e-12
        assert lower - slack <= values.min() <= values.max() <= upper + slack
        if name in oracles.OF_TARGET:
            lipschitz = theory.lipschitz_constant(name, tau, classes, delta, p, **knobs)
            m, n = theory.probability_bounds(tau, classes, delta, p)
            assert values.abs().max() <= theory.lipschitz_loss_bound(lipschitz, upper, (m, n)) * (1 + 1e-12)

    check()


# -- CORES -------------------------------------------------------------------------------------------------------------

BETA = {0: 0.0, 9: 0.0, 10: 0.0, 11: 2 / 29, 30: 2 * 20 / 29, 31: 2 * 21 / 29, 39: 2.0, 40: 2.0, 150: 2.0}


@pytest.fixture
def cores_batch() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(40, 6)) * 3, rng.integers(6, size=40)


@pytest.mark.parametrize("epoch", BETA)
@pytest.mark.parametrize("prior", ["labels", "uniform"])
def test_cores_schedule_prior_and_sieve(epoch: int, prior: str, cores_batch: Any) -> None:
    z, y = cores_batch
    counts = np.array([5, 1, 2, 10, 20, 2.0])
    shares = counts / counts.sum() if prior == "labels" else None
    expected = oracles.loss("cores", z, y, beta=BETA[epoch], prior=shares)
    keeps = oracles.cores_keeps(oracles.log_softmax(z), y) if epoch > 30 else np.ones(40, dtype=bool)
    assert 0 < keeps.sum() < 40 or epoch <= 30  # else the sieve would not be tested
    criterion = Loss("cores", prior=prior)
    criterion.start_epoch(epoch, torch.tensor(counts))
    logits = torch.tensor(z, requires_grad=True)
    mean = criterion(logits, torch.tensor(y))
    mean.backward()
    # The mean is over the kept examples only.
    assert mean.item() == pytest.approx(expected.values[keeps].mean(), rel=1e-6)
    gradient = np.where(keeps[:, None], expected.gradient, 0) / keeps.sum()
    assert logits.grad is not None
    np.testing.assert_allclose(logits.grad, gradient, rtol=1e-5, atol=1e-7)


def test_cores_sieve_uses_the_uniform_mean_whatever_the_prior(cores_batch: Any) -> None:
    logits, target = (torch.tensor(a) for a in cores_batch)
    skewed = torch.tensor([1000.0, 1, 1, 1, 1, 1])
    criterion = Loss("cores", reduction="none")
    criterion.start_epoch(31, skewed)
    kept = criterion(logits, target) != 0
    assert np.array_equal(kept, oracles.cores_keeps(oracles.log_softmax(cores_batch[0]), cores_batch[1]))


@pytest.mark.parametrize("soft", [False, True])
def test_cores_prior_leaves_out_what_the_epoch_before_sieved_out(soft: bool, cores_batch: Any) -> None:
    z, y = cores_batch
    logits, target = torch.tensor(z), torch.tensor(y)
    counts = torch.bincount(target, minlength=6).float()
    gone = torch.tensor(~oracles.cores_keeps(oracles.log_softmax(z), y))
    left = counts - torch.bincount(target[gone], minlength=6)
    assert (left > 0).any()
    assert (left < counts).any()
    given = torch.nn.functional.one_hot(target, 6).double() if soft else target
    criterion = Loss("cores")
    criterion.start_epoch(40, counts)
    for half in (slice(20), slice(20, None)):  # an epoch of two batches
        criterion(logits[half], given[half])
    criterion.eval()(logits, given)  # a validation loss does not count
    criterion.train().start_epoch(41, counts)
    assert criterion.class_counts is not None
    assert torch.equal(criterion.class_counts, left)
    criterion.start_epoch(42, counts)  # no example was seen, so none is left out
    assert torch.equal(criterion.class_counts, counts)
    # A single vector counts, and ignored examples do not.
    first = int(gone.nonzero()[0])
    criterion(logits[first], given[first])
    if not soft:
        criterion(logits, torch.full_like(target, -100))
    criterion.start_epoch(43, counts)
    assert (counts - criterion.class_counts).tolist() == torch.nn.functional.one_hot(target[first], 6).tolist()


def test_cores_counts_no_ignored_example_and_none_below_0() -> None:
    criterion, counts = Loss("cores"), torch.tensor([1.0, 5.0])
    criterion.start_epoch(40, counts)
    criterion(torch.zeros(4, 2), torch.full((4,), -100))
    criterion.start_epoch(41, counts)
    assert criterion.class_counts is not None
    assert criterion.class_counts.tolist() == [1, 5]
    for _ in range(3):  # as a sampler with replacement gives it
        criterion(torch.tensor([[0.0, 3.0]]), torch.tensor([0]))
    criterion.start_epoch(42, counts)
    assert criterion.class_counts.tolist() == [0, 5]


def test_cores_works_with_no_prior_and_no_epoch(cores_batch: Any) -> None:
    z, y = cores_batch
    uniform = oracles.loss("cores", z, y, beta=2.0).values
    np.testing.assert_allclose(losses.cores(torch.tensor(z), torch.tensor(y)), uniform, rtol=1e-9)
    criterion = Loss("cores", reduction="none", sieve_after=200)
    criterion.start_epoch(100)
    np.testing.assert_allclose(criterion(torch.tensor(z), torch.tensor(y)), uniform, rtol=1e-9)


def test_cores_with_everything_sieved_out_is_0() -> None:
    criterion = Loss("cores")
    criterion.start_epoch(50)
    logits = torch.tensor([[9.0, 0.0, 0.0]], requires_grad=True)
    loss = criterion(logits, torch.tensor([1]))  # a confident mistake
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert (logits.grad == 0).all()


def test_cores_schedule_is_set_by_its_knobs(cores_batch: Any) -> None:
    z, y = cores_batch
    criterion = Loss("cores", reduction="none", beta=3.0, warmup=2, ramp=5, sieve_after=100)
    for epoch, beta in {1: 0.0, 2: 0.0, 3: 0.75, 4: 1.5, 6: 3.0, 7: 3.0}.items():
        criterion.start_epoch(epoch)
        expected = oracles.loss("cores", z, y, beta=beta).values
        np.testing.assert_allclose(criterion(torch.tensor(z), torch.tensor(y)), expected, rtol=1e-9)


def test_cores_clipped_uses_clipped_probabilities_everywhere(cores_batch: Any) -> None:
    z, y = cores_batch
    linked = oracles.clip(1.0)(z)[0]
    expected = oracles.loss("cores", linked, y, beta=2.0).values
    keeps = oracles.cores_keeps(oracles.log_softmax(linked), y)
    criterion = LogitClip("cores", tau=1.0)
    criterion.start_epoch(60)
    assert criterion(torch.tensor(z), torch.tensor(y)).item() == pytest.approx(expected[keeps].mean(), rel=1e-9)


def test_cores_in_half_precision_keeps_its_floor() -> None:
    # log(p + 1e-8) would be log 0 in float16.
    logits = torch.tensor([[0.0, -100.0, -100.0]], dtype=torch.float16)
    floor = -2 * (2 * -math.log(1e-8)) / 3
    assert losses.cores(logits, torch.tensor([0])).item() == pytest.approx(floor, rel=1e-6)


@pytest.mark.parametrize("counts", [torch.ones(5), torch.ones(1), torch.ones(1, 6)])
def test_cores_refuses_class_counts_of_another_size(counts: Tensor, cores_batch: Any) -> None:
    logits, target = (torch.tensor(a) for a in cores_batch)
    criterion = Loss("cores")
    criterion.start_epoch(0, counts)
    with pytest.raises(ValueError, match="class_counts needs 6 entries"):
        criterion(logits, target)
