"""Small jobs for the tests of methods: little data, a small network, one process."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from logitclip.criterion import build_criterion
from logitclip.data import Split
from logitclip.launch import make_fabric
from logitclip.methods.base import Job, Settings

CLASSES = 4
CLIPS = (
    "none",
    "norm:tau=1",
    "norm:tau=1,delta=0.5,p=inf",
    "norm:temp=0.5",
    "value:limit=0.5",
    "logit_norm:temperature=0.5",
)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Fixed normal numbers in double precision."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(n: int, *, seed: int = 1, classes: int = CLASSES) -> Tensor:
    return torch.randint(classes, (n,), generator=torch.Generator().manual_seed(seed))


def network(*layers: int, norm: bool = False, seed: int = 0) -> nn.Module:
    """Make linear layers of these sizes with tanh between them, and optional batch norm before each tanh."""
    model = nn.Sequential()
    for i in range(len(layers) - 1):
        if i:
            model.extend([nn.BatchNorm1d(layers[i])] if norm else [])
            model.append(nn.Tanh())
        model.append(nn.Linear(layers[i], layers[i + 1]))
    with torch.no_grad():
        for i, w in enumerate(model.parameters()):
            w.copy_(numbers(*w.shape, seed=100 * seed + i) if w.ndim > 1 else 1 + 0.1 * numbers(*w.shape, seed=i))
    return model.double()


def make_job(
    x: Tensor,
    y: Tensor,
    model: nn.Module | Callable[[int], nn.Module],
    *,
    criterion: nn.Module | None = None,
    loss: str = "ce",
    clip: str = "none",
    fabric: Any = None,
    index: Tensor | None = None,
    view: Any = lambda x, generator: x,
    classes: int = CLASSES,
    **settings: Any,
) -> Job:
    """Make a job in double precision with a copy of the model, all examples in one batch, lr 0.1 and no momentum."""
    make_model = (lambda seed: copy.deepcopy(model)) if isinstance(model, nn.Module) else model
    return Job(
        train=Split(x, y),
        num_classes=classes,
        index=torch.arange(len(x)) if index is None else index,
        view=view,
        make_model=make_model,
        criterion=build_criterion(loss, clip) if criterion is None else criterion,
        settings=Settings(**{"lr": 0.1, "momentum": 0.0, "batch_size": len(x), **settings}),
        fabric=make_fabric(accelerator="cpu", precision="64") if fabric is None else fabric,
    )


def scaling_fabric(scale: float) -> Any:
    """Make a single-precision Fabric with the gradient scaler that half precision uses on a GPU."""
    from lightning_fabric import Fabric
    from lightning_fabric.plugins import MixedPrecision

    class Scaled(MixedPrecision):
        def forward_context(self) -> Any:
            return contextlib.nullcontext()

        def convert_input(self, data: Any) -> Any:
            return data

        def convert_output(self, data: Any) -> Any:
            return data

    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    return Fabric(accelerator="cpu", devices=1, plugins=[Scaled("16-mixed", "cpu", scaler)])
