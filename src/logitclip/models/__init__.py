"""Networks by name; each returns logits.

A model is a function `fn(num_classes, *, knobs) -> nn.Module`. If it has a parameter `in_channels` (image models) or
`in_features` (models that flatten), `build` supplies it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from logitclip.registry import Registry
from logitclip.text import first_line

__all__ = ["MODELS", "build"]

MODELS = Registry("model", injected=("in_channels", "in_features"), package=__name__)


def build(spec: str, num_classes: int, input_shape: Sequence[int], *, seed: int = 0) -> nn.Module:
    """Build a network by name.

    The initial weights depend only on `seed`, and the global random state stays unchanged. A forward pass of zeros
    checks that the network accepts the input and returns logits.

    Args:
        spec: Name and knobs: ``"wrn:depth=40,width=2"``.
        num_classes: K, at least 2.
        input_shape: `(C, H, W)` of images or `(D,)` of features, without the batch.
        seed: Seed of the initial weights.

    Returns:
        A network from inputs [N, ...] to logits [N, K], on the CPU and in training mode.

    Raises:
        ValueError: If the name or a knob is unknown, a number is out of range, or the network cannot take such inputs.

    >>> build("mlp:width=64", num_classes=10, input_shape=(1, 8, 8))(torch.zeros(5, 1, 8, 8)).shape
    torch.Size([5, 10])
    """
    make, name = MODELS.build(spec), spec.partition(":")[0].strip()
    shape = tuple(int(n) for n in input_shape)
    if num_classes < 2:
        raise ValueError(f"num_classes must be at least 2, got {num_classes}.")
    if not shape or min(shape) < 1:
        raise ValueError(f"input_shape must be (C, H, W) or (D,) with positive sizes, got {shape}.")
    known = {"in_features": math.prod(shape), "in_channels": shape[0] if len(shape) == 3 else None}
    wanted = {k: known[k] for k in MODELS.injected if k in inspect.signature(make).parameters}
    if None in wanted.values():
        raise ValueError(f"The model {name!r} takes images (C, H, W), got inputs of shape {shape}; 'mlp' takes any.")
    # torch.manual_seed would reseed every GPU too: seed and restore only the CPU's generator.
    with torch.random.fork_rng(devices=()), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        model = make(num_classes, **wanted)
        _check_forward(model, name, shape, num_classes)
    return model


class WrongWeights(ValueError):
    """The weights are not those of the network."""


def rebuild(spec: str, num_classes: int, input_shape: Sequence[int], weights: Mapping[str, Tensor]) -> nn.Module:
    """Build a trained network again, in evaluation mode.

    Raises:
        WrongWeights: If the weights are not those of this network.
        ValueError: If the network cannot be built.
    """
    network = build(spec, num_classes, input_shape)
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        raise WrongWeights(f"its weights are not those of the network {spec}") from error
    return network.eval()


def _check_forward(model: nn.Module, name: str, shape: tuple[int, ...], num_classes: int) -> None:
    try:
        with torch.no_grad():
            logits = model.eval()(torch.zeros(1, *shape))
    except Exception as error:
        raise ValueError(f"The model {name!r} cannot take inputs of shape {shape}: {first_line(error)}.") from error
    if not isinstance(logits, Tensor) or logits.shape != (1, num_classes):
        got = f"a tensor of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"The model {name!r} must return logits of shape (N, {num_classes}), got {got} for N = 1.")
    model.train()
