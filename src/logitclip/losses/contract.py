"""What a loss may ask for, and how it is called: the decorator `loss` and `evaluate`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, overload

from torch import Tensor

from logitclip.clip import Clip
from logitclip.fused import clipped_log_probs, pick, row_log_probs, sum_log_probs
from logitclip.losses.targets import check_target
from logitclip.registry import Registry

LOSSES = Registry("loss")

Knobs = ParamSpec("Knobs")


class TrainingState(NamedTuple):
    """The state of training for a loss with a schedule; `Loss.start_epoch` sets it."""

    epoch: Tensor | int  # counted from 0
    class_counts: Tensor | None = None  # how many examples carry each label, [K]


class LossFunction(Protocol[Knobs]):
    """A loss as the decorator `loss` makes it: a function of logits and targets that knows its phi."""

    phi: Callable[..., Any]
    takes: tuple[str, ...]  # names of the positional parameters of phi

    def __call__(self, logits: Tensor, target: Tensor, *args: Knobs.args, **kwargs: Knobs.kwargs) -> Tensor: ...


@overload  # with a schedule
def loss(
    phi: Callable[Concatenate[Tensor, Tensor, TrainingState | None, Knobs], tuple[Tensor, Tensor | None]],
) -> LossFunction[Knobs]: ...
@overload
def loss(phi: Callable[Concatenate[Tensor, Any, Knobs], Tensor]) -> LossFunction[Knobs]: ...
@overload
def loss(phi: Callable[Concatenate[Tensor, Knobs], Tensor]) -> LossFunction[Knobs]: ...
def loss(phi: Callable[..., Any]) -> Any:
    """Make the public function of a loss from its `phi`, and register it under the name of phi.

    Args:
        phi: called as ``phi(log_p, sum_log_p, **knobs)`` with tensors of one shape; returns values of that shape. The
            names of its positional parameters say what it gets: `log_p`, then `sum_log_p` if the loss needs it. With
            `log_probs`, all log-probabilities [..., K], instead, phi takes a `TrainingState` or None as its third
            argument and returns its values with a weight per example, or None.

    Returns:
        ``fn(logits, target, **knobs)``, which returns one value per example. Its knobs are the keyword-only parameters
        of phi, and its docstring is that of phi.

    Raises:
        ValueError: if the name is taken.

    >>> import torch
    >>> from logitclip.losses import one_minus_p
    >>> @loss
    ... def squared(log_p, *, scale: float = 1.0):
    ...     '''Squared error of the label's probability.'''
    ...     return scale * one_minus_p(log_p) ** 2
    >>> squared(torch.zeros(1, 4), torch.tensor([2]), scale=16.0)
    tensor([9.])
    """
    parameters = list(inspect.signature(phi, eval_str=True).parameters.values())

    @functools.wraps(phi)
    def function(logits: Tensor, target: Tensor, **knobs: Any) -> Tensor:
        values, weights = evaluate(function, logits, check_target(logits, target)[0], knobs)
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
        takes=tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY),
    )
    return LOSSES.register(function)


def evaluate(
    function: Any,
    logits: Tensor,
    target: Tensor,
    knobs: dict[str, Any],
    clip: Clip | None = None,
    class_weight: Tensor | None = None,
    state: TrainingState | None = None,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute a loss over the last dimension of `logits`.

    Args:
        function: a loss from `LOSSES`.
        logits: [..., K].
        target: class indices [...], or probabilities [..., K].
        knobs: knobs of the loss.
        clip: the clip, or None.
        class_weight: weights of the terms of soft targets, [K]; ignored for class indices.
        state: the epoch and class counts, for a loss with a schedule.
        kept: [...], False for examples that do not count; their values are finite, whatever their targets are.

    Returns:
        One value per example, [...], and one weight per example, or None if all weigh the same.
    """
    soft = target.is_floating_point()
    if not soft and "log_probs" not in function.takes:
        log_p, total = row_log_probs(logits, target, clip, total="sum_log_p" in function.takes)
        return call(function, _finite(log_p, kept), total, knobs), None

    log_probs = clipped_log_probs(logits, clip)
    expected = log_probs
    if soft:
        target = target.to(log_probs.dtype)
        # 0 log 0 = 0 for masked classes, which no target names
        expected = log_probs.masked_fill(log_probs.isneginf() & (target == 0), 0.0)
    if "log_probs" in function.takes:
        if soft and class_weight is not None:
            raise ValueError(f"{function.__name__} takes class weights with class-index targets only.")
        log_p = (target * expected).sum(-1) if soft else pick(log_probs, target)
        return function.phi(_finite(log_p, kept), log_probs, state, **knobs)
    terms = target if class_weight is None else target * class_weight.to(target.dtype)
    total = sum_log_probs(log_probs, keepdim=True) if "sum_log_p" in function.takes else None
    return (terms * call(function, expected, total, knobs)).sum(-1), None


def call(function: Any, log_p: Tensor, sum_log_p: Tensor | None, knobs: dict[str, Any]) -> Tensor:
    """Call the phi of a loss with what it takes."""
    return function.phi(log_p, **knobs) if len(function.takes) == 1 else function.phi(log_p, sum_log_p, **knobs)


def _finite(log_p: Tensor, kept: Tensor | None) -> Tensor:
    """Replace log p_y of examples that do not count: their target may be a masked class, and 0 times inf is NaN."""
    return log_p if kept is None else log_p.masked_fill(~kept, -1.0)
