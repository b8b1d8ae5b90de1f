"""Every loss as one elementwise function of a few numbers per example.

A loss is a function `phi(log_p, sum_log_p, *, knobs)`: `log_p` is the log-probability of the label and `sum_log_p` the
sum of the log-probabilities of all classes; leave out what the loss does not need. The decorator `@loss` turns phi into
the public function of logits and targets and registers it in `LOSSES`. For soft targets t the loss is the expectation
of phi under t.

Formulas are written in log-probabilities, so that values and gradients stay finite at p_y = 0 and p_y = 1::

    contract   what a phi may ask for, and how it is called
    classic    the losses of the paper, in its order
    recent     losses since 2023: active negative, epsilon-softmax, joint asymmetric, optimised gradient clipping
    other      divergences, other links than the softmax, corrections by a transition matrix
    memory     the threshold of optimised gradient clipping
    targets    checks of logits and targets
    parts      what several losses share

A family of losses is one file; a loss is one function in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from logitclip.losses import classic as _classic
from logitclip.losses import other as _other
from logitclip.losses import recent as _recent
from logitclip.losses.contract import LOSSES, TrainingState, evaluate, loss
from logitclip.losses.parts import check_at_least, one_minus_p
from logitclip.losses.targets import check_class_dim, check_target, check_values

if TYPE_CHECKING:
    from logitclip.losses.classic import *  # noqa: F403
    from logitclip.losses.other import *  # noqa: F403
    from logitclip.losses.recent import *  # noqa: F403

_CHECKS = (check_at_least, check_class_dim, check_target, check_values)
_SHARED = (LOSSES, TrainingState, evaluate, loss, one_minus_p, *_CHECKS)
_FAMILIES = (_classic, _recent, _other)


# A loss that a plugin registers can be called as `losses.name`, too.


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return list(LOSSES)
    if name in LOSSES:
        return LOSSES[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(LOSSES)
