"""Two small convolutional networks, for CPUs."""

from __future__ import annotations

from torch import nn

from logitclip.models import MODELS
from logitclip.models.blocks import (
    Activation,
    Norm,
    check_sizes,
    conv,
    init_he,
    make_activation,
    make_head,
    one_of,
    sequence,
)


@MODELS.register
def cnn(
    num_classes: int,
    *,
    in_channels: int = 3,
    width: int = 32,
    norm: Norm = "batch",
    activation: Activation = "relu",
    dropout: float = 0.0,
) -> nn.Module:
    """Small CNN: six 3x3 convolutions of `width`, twice and four times that, for images of 4 pixels and more.

    About a ninth of WRN-40-2's work at 32 px. Without norms, keep the learning rate at 0.02 or less.

    Args:
        width: Channels of the first two convolutions.
        norm: Batch, or none.
        activation: Relu, relu6, leaky_relu, gelu, silu or tanh.
        dropout: Share that dropout sets to 0 after each of the two max-pools.
    """
    check_sizes(1, width=width)
    normed = one_of("norm", norm, ("none", "batch")) == "batch"
    body = nn.Sequential()
    inputs = in_channels
    for stage, outputs in enumerate((width, 2 * width, 4 * width)):
        if stage:
            body.extend([nn.MaxPool2d(2), nn.Dropout(dropout)])
        for source in (inputs, outputs):
            body.append(conv(source, outputs, bias=not normed))
            if normed:
                body.append(nn.BatchNorm2d(outputs))
            body.append(make_activation(activation))
        inputs = outputs
    # fan_in keeps the scale of the forward pass; without norms the network does not learn otherwise.
    return init_he(sequence(body=body, head=make_head(inputs, num_classes)), "fan_in", zero_bias=True)


@MODELS.register
def strided_cnn(
    num_classes: int,
    *,
    in_channels: int = 3,
    width: int = 16,
    hidden: int = 256,
    norm: Norm = "none",
    activation: Activation = "relu",
) -> nn.Module:
    """Smallest CNN: three stride-2 convolutions of `width`, twice and four times that, and a `hidden` layer.

    About 1/340 of WRN-40-2's work at 32 px; it still memorises thousands of wrong labels. Weights keep
    torch's default initialisation. The features are pooled to 4x4, which changes nothing at 32 px.

    Args:
        width: Channels of the first convolution.
        hidden: Units of the layer before the head.
        norm: Batch, or none.
        activation: Relu, relu6, leaky_relu, gelu, silu or tanh.
    """
    check_sizes(1, width=width, hidden=hidden)
    normed = one_of("norm", norm, ("none", "batch")) == "batch"
    body = nn.Sequential()
    inputs = in_channels
    for outputs in (width, 2 * width, 4 * width):
        body.append(conv(inputs, outputs, stride=2, bias=not normed))
        if normed:
            body.append(nn.BatchNorm2d(outputs))
        body.append(make_activation(activation))
        inputs = outputs
    head = nn.Sequential(
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(16 * inputs, hidden),
        make_activation(activation),
        nn.Linear(hidden, num_classes),
    )
    return sequence(body=body, head=head)
