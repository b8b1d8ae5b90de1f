"""The multilayer perceptron: for features, and for small images on a CPU."""

from __future__ import annotations

from torch import nn

from logitclip.models import MODELS
from logitclip.models.blocks import Activation, Norm, check_at_most, check_sizes, make_activation, one_of, sequence


@MODELS.register
def mlp(
    num_classes: int,
    *,
    in_features: int,
    width: int = 256,
    depth: int = 3,
    norm: Norm = "none",
    activation: Activation = "relu",
    dropout: float = 0.0,
) -> nn.Module:
    """Multilayer perceptron: `depth` hidden layers of `width`; it flattens inputs of any shape.

    `depth=0` is multinomial logistic regression. Weights are initialised as `nn.Linear` does.

    Args:
        width: Units of each hidden layer.
        depth: Number of hidden layers.
        norm: Batch, or none.
        activation: Relu, relu6, leaky_relu, gelu, silu or tanh.
        dropout: Share of the units of each hidden layer that dropout sets to 0.
    """
    check_sizes(1, width=width)
    check_sizes(0, depth=depth)
    check_at_most(1000, depth=depth)  # or building the layers would take hours
    normed = one_of("norm", norm, ("none", "batch")) == "batch"
    hidden = nn.Sequential()
    for inputs in ([in_features] + [width] * depth)[:depth]:
        hidden.append(nn.Linear(inputs, width))
        if normed:
            hidden.append(nn.BatchNorm1d(width))
        hidden.extend([make_activation(activation), nn.Dropout(dropout)])
    return sequence(flatten=nn.Flatten(), hidden=hidden, head=nn.Linear(width if depth else in_features, num_classes))
