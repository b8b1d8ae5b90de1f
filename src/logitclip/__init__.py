"""logitclip: train on noisy labels by clipping the norm of the logits.

The public names, on one screen; each is imported when it is first used, so `import logitclip` is instant.

>>> import logitclip as lc
>>> criterion = lc.LogitClip("ce", tau=1.0)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "LinearLogitClip",
    "LogitClip",
    "Loss",
    "Result",
    "RunConfig",
    "build_criterion",
    "clip_by_value",
    "clip_hidden",
    "clip_logits",
    "data",
    "engine",
    "extended_logit_norm",
    "find_issues",
    "fit",
    "l1_penalty",
    "linear_cross_entropy",
    "load",
    "logit_norm",
    "losses",
    "models",
    "noise",
    "norm_penalty",
    "softcap",
    "theory",
    "train",
    "tune",
    "z_penalty",
]

if TYPE_CHECKING:  # where each lives
    from logitclip import data, engine, losses, models, noise, theory
    from logitclip.clip import (
        clip_by_value,
        clip_logits,
        extended_logit_norm,
        l1_penalty,
        logit_norm,
        norm_penalty,
        softcap,
        z_penalty,
    )
    from logitclip.criterion import LogitClip, Loss, build_criterion
    from logitclip.heads import LinearLogitClip, clip_hidden, linear_cross_entropy
    from logitclip.own_data import find_issues, fit, load
    from logitclip.runs.config import RunConfig
    from logitclip.runs.results import Result
    from logitclip.runs.train import train
    from logitclip.search import tune

_WHERE = {
    "clip": (
        *("clip_logits", "clip_by_value", "softcap", "logit_norm", "extended_logit_norm"),
        *("norm_penalty", "z_penalty", "l1_penalty"),
    ),
    "runs.config": ("RunConfig",),
    "criterion": ("LogitClip", "Loss", "build_criterion"),
    "heads": ("LinearLogitClip", "clip_hidden", "linear_cross_entropy"),
    "own_data": ("find_issues", "fit", "load"),
    "runs.results": ("Result",),
    "search": ("tune",),
    "runs.train": ("train",),
}


def __getattr__(name: str) -> Any:
    for module, names in _WHERE.items():
        if name in names:
            return getattr(importlib.import_module(f"logitclip.{module}"), name)
    if name in __all__:
        return importlib.import_module(f"logitclip.{name}")
    raise AttributeError(f"module 'logitclip' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
