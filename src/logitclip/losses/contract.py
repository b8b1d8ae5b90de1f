"""What a loss may ask for, and how it is called: the decorator `loss` and `evaluate`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, cast, overload

import torch
from torch import Tensor

from logitclip.clip import Clip, apply_clip, full_precision
from logitclip.fused import (
    ONLY_TARGET,
    STATISTICS,
    Wanted,
    clipped_log_probs,
    pick,
    row_log_probs,
    statistics_of,
)
from logitclip.losses.targets import check_target
from logitclip.registry import Registry

Knobs = ParamSpec("Knobs")


class TrainingState(NamedTuple):
    """The state of training for a loss with a schedule; `Loss.start_epoch` sets it."""

    epoch: Tensor | int  # counted from 0
    class_counts: Tensor | None = None  # how many examples carry each label, [K]


class LossFunction(Protocol[Knobs]):
    """A loss as the decorator `loss` makes it: a function of logits and targets that knows its phi."""

    phi: Callable[..., Any]
    __name__: str
    takes: tuple[str, ...]  # names of the positional parameters of phi
    statistics: tuple[str, ...]  # those among them that are statistics of a row
    optional: dict[str, str]  # statistics and the knobs they belong to
    settings: dict[str, str]  # of its authors, by dataset
    tune: dict[str, tuple[float, ...]]  # its main knob, and values of it to try
    defaults: dict[str, Any]  # of its knobs

    def __call__(self, logits: Tensor, target: Tensor, *args: Knobs.args, **kwargs: Knobs.kwargs) -> Tensor: ...


class LossRegistry(Registry):
    """The registry of losses."""

    def __getitem__(self, name: str) -> LossFunction[...]:
        return cast("LossFunction[...]", super().__getitem__(name))


LOSSES = LossRegistry("loss")


@overload
def loss(phi: Callable[Concatenate[Tensor, Any, Any, Any, Knobs], Any]) -> LossFunction[Knobs]: ...
@overload
def loss(phi: Callable[Concatenate[Tensor, Any, Any, Knobs], Any]) -> LossFunction[Knobs]: ...
@overload
def loss(phi: Callable[Concatenate[Tensor, Any, Knobs], Any]) -> LossFunction[Knobs]: ...
@overload
def loss(phi: Callable[Concatenate[Tensor, Knobs], Any]) -> LossFunction[Knobs]: ...
@overload
def loss(
    *,
    tune: Mapping[str, Sequence[float]] | None = None,
    settings: Mapping[str, str] | None = None,
    optional: Mapping[str, str] | None = None,
) -> Callable[[Callable[..., Any]], Any]: ...
def loss(
    phi: Callable[..., Any] | None = None,
    *,
    tune: Mapping[str, Sequence[float]] | None = None,
    settings: Mapping[str, str] | None = None,
    optional: Mapping[str, str] | None = None,
) -> Any:
    """Make the public function of a loss from its `phi`, and register it under the name of phi.

    Args:
        phi: Called with tensors of one shape; returns values of that shape. The names of its positional parameters say
            what it gets. The first is `log_p`, the log-probability of the label; then come any of the names in
            `logitclip.fused.STATISTICS`, such as `sum_log_p`, the sum over the classes, or `max_log_p`. If the first is
            `log_probs`, all log-probabilities [..., K], or `logits`, the clipped logits, phi returns the loss of every
            possible label instead, [..., K]. A loss with a schedule takes `log_p`, `log_probs` and `state`, a
            `TrainingState` or None, and returns its values with a weight per example, or None.
        tune: Its main knob and five values to try of it, in order, the default among the inner three; a spec with the
            word `auto`, as in ``mine:a=auto``, then chooses one of them on noisy labels.
        settings: The settings of its authors, by dataset: the options of `logitclip train`, as in
            ``{"CIFAR-10": "mine:a=2 --penalty l1:weight=1e-5"}``.
        optional: A statistic and the knob it belongs to: it is None where the knob is 0, and then costs nothing.

    Returns:
        ``fn(logits, target, **knobs)``, which returns one value per example. Its knobs are the keyword-only parameters
        of phi, and its docstring is that of phi.

    Raises:
        ValueError: If the name is taken, or a positional parameter is unknown.

    >>> import torch
    >>> from logitclip.losses import one_minus_p
    >>> @loss
    ... def squared(log_p, *, scale: float = 1.0):
    ...     '''Squared error of the label's probability.'''
    ...     return scale * one_minus_p(log_p) ** 2
    >>> squared(torch.zeros(1, 4), torch.tensor([2]), scale=16.0)
    tensor([9.])
    """
    if phi is None:
        return functools.partial(loss, tune=tune, settings=settings, optional=optional)
    parameters = list(inspect.signature(phi, eval_str=True).parameters.values())
    takes = tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)
    _check_parameters(phi.__name__, takes)

    @functools.wraps(phi)
    def function(logits: Tensor, target: Tensor, **knobs: Any) -> Tensor:
        values, weights = evaluate(function, logits, check_target(logits, target)[0], knobs)  # type: ignore[arg-type]
        return values if weights is None else values * weights

    arguments = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Tensor)
        for name in ("logits", "target")
    ]
    knobs = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    function.__doc__ = inspect.cleandoc(phi.__doc__ or f"The loss {phi.__name__}.")
    function.__annotations__ = {p.name: p.annotation for p in (*arguments, *knobs)}
    vars(function).update(
        __signature__=inspect.Signature([*arguments, *knobs], return_annotation=Tensor),
        phi=phi,
        takes=takes,
        statistics=tuple(name for name in takes[1:] if name in STATISTICS),
        tune={knob: tuple(values) for knob, values in (tune or {}).items()},
        settings=dict(settings or {}),
        optional=dict(optional or {}),
        defaults={p.name: p.default for p in knobs},
    )
    return LOSSES.register(function)


def _check_parameters(name: str, takes: tuple[str, ...]) -> None:
    first, *others = takes or ("nothing",)
    if first in ("log_probs", "logits") and not others:
        return
    unknown = [word for word in others if word not in (*STATISTICS, "_", "log_probs", "state", "threshold")]
    if first != "log_p" or unknown:
        word = unknown[0] if unknown else first
        raise ValueError(
            f"The loss {name!r} takes {word!r}: the first positional parameter is log_p, log_probs or logits, and the "
            f"others are from {', '.join(STATISTICS)}."
        )


def evaluate(
    function: LossFunction[...],
    logits: Tensor,
    target: Tensor,
    knobs: dict[str, Any],
    clip: Clip | None = None,
    class_weight: Tensor | None = None,
    state: Any = None,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute a loss over the last dimension of `logits`.

    Args:
        function: A loss from `LOSSES`.
        logits: [..., K].
        target: Class indices [...], or probabilities [..., K].
        knobs: Knobs of the loss.
        clip: The clip, or None.
        class_weight: Weights of the terms of soft targets, [K]; ignored for class indices.
        state: A `TrainingState` for a loss with a schedule, a `GradientMemory` for one with a threshold.
        kept: [...], False for examples that do not count; their values are finite, whatever their targets are.

    Returns:
        One value per example, [...], and one weight per example, or None if all weigh the same.

    Raises:
        ValueError: If a knob is out of range, or there are class weights for soft targets and a loss with a schedule.
    """
    soft, takes = target.is_floating_point(), function.takes
    wanted = wanted_statistics(function, knobs)
    # With class indices, most losses need only numbers per row: log p of the label, and statistics.
    if not soft and takes[0] == "log_p" and "log_probs" not in takes:
        log_p, *found = row_log_probs(logits, target, clip, wanted)
        log_p = _finite(log_p, kept)
        if state is not None and torch.is_grad_enabled():  # not a loss for validation
            state.observe(log_p, kept)
        return call(function, log_p, dict(zip(wanted.names, found, strict=True)), knobs, state), None

    # Otherwise all classes are needed: the loss of every possible label, from which the target picks or averages.
    if takes[0] == "logits":
        per_class = full_precision(logits) if clip is None else apply_clip(full_precision(logits), clip)
    else:
        per_class = clipped_log_probs(logits, clip)
    unmasked = per_class
    if soft:
        target = target.to(per_class.dtype)
        # 0 log 0 = 0 for masked classes, which no target names
        unmasked = per_class.masked_fill(per_class.isneginf() & (target == 0), 0.0)
    if "log_probs" in takes[1:]:
        if soft and class_weight is not None:
            raise ValueError(f"{function.__name__} takes class weights with class-index targets only.")
        log_p = (target * unmasked).sum(-1) if soft else pick(per_class, target)
        return function.phi(_finite(log_p, kept), per_class, state, **knobs)
    if takes[0] != "log_p":
        values = function.phi(per_class, **knobs)
        if not soft:
            values = pick(values, target)
            return values if kept is None else values.masked_fill(~kept, 0.0), None
        values = values.masked_fill(target == 0, 0.0)  # a masked class has an infinite loss
    else:
        values = call(function, unmasked, statistics_of(per_class, logits, wanted), knobs, state)
    terms = target if class_weight is None else target * class_weight.to(target.dtype)
    return (terms * values).sum(-1), None


def wanted_statistics(function: LossFunction[...], knobs: dict[str, Any]) -> Wanted:
    """Return the statistics that a loss needs with these knobs."""
    values, optional = {**function.defaults, **knobs}, function.optional
    names = tuple(name for name in function.statistics if name not in optional or values[optional[name]])
    return Wanted(names, values) if names else ONLY_TARGET


def call(
    function: LossFunction[...], log_p: Tensor, found: Mapping[str, Tensor], knobs: dict[str, Any], state: Any = None
) -> Tensor:
    """Call the phi of a loss of log p_y with what it takes."""
    if len(function.takes) == 1:
        return function.phi(log_p, **knobs)
    if not found and state is None:
        return function.phi(log_p, *[None] * (len(function.takes) - 1), **knobs)
    others = [
        (None if state is None else state.threshold) if name == "threshold" else found.get(name)
        for name in function.takes[1:]
    ]
    return function.phi(log_p, *others, **knobs)


def _finite(log_p: Tensor, kept: Tensor | None) -> Tensor:
    """Replace log p_y of examples that do not count: their target may be a masked class, and 0 times inf is NaN."""
    return log_p if kept is None else log_p.masked_fill(~kept, -1.0)
