"""Densely connected networks (Huang et al., 2017), with torchvision's layers and initialisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from logitclip.models import MODELS
from logitclip.models.blocks import (
    Activation,
    Stem,
    conv,
    conv_norm,
    init_he,
    make_activation,
    make_head,
    make_stem,
    one_of,
    sequence,
)

COUNTS = {121: (6, 12, 24, 16), 169: (6, 12, 32, 32), 201: (6, 12, 48, 32)}  # layers in each dense block
GROWTH = 32  # channels that a layer adds


class DenseLayer(nn.Module):
    """Append `GROWTH` channels, computed from all previous ones through a 1x1 bottleneck."""

    def __init__(self, inputs: int, activation: str) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(inputs),
            make_activation(activation),
            conv_norm(inputs, 4 * GROWTH, 1, activation=activation),
            conv(4 * GROWTH, GROWTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], 1)


@MODELS.register
def densenet(
    num_classes: int,
    *,
    in_channels: int = 3,
    depth: int = 121,
    stem: Stem = "imagenet",
    activation: Activation = "relu",
) -> nn.Module:
    """DenseNet-BC of depth 121, 169 or 201, as in torchvision; `stem=cifar` keeps the resolution of small images.

    The ImageNet stem needs 29 pixels, the other 8.

    Args:
        depth: 121, 169 or 201.
        stem: "imagenet" has stride 4; "cifar" has stride 1, for small images.
        activation: Relu, relu6, leaky_relu, gelu, silu or tanh.
    """
    counts = COUNTS[one_of("depth of a densenet", depth, COUNTS)]
    width = 64
    body = nn.Sequential(make_stem(stem, in_channels, width, activation))
    for i, count in enumerate(counts):
        body.append(nn.Sequential(*(DenseLayer(width + j * GROWTH, activation) for j in range(count))))
        width += count * GROWTH
        body.extend([nn.BatchNorm2d(width), make_activation(activation)])
        if i < len(counts) - 1:  # between two blocks: half the channels, half the image
            body.extend([conv(width, width // 2, 1), nn.AvgPool2d(2)])
            width //= 2
    return init_he(sequence(body=body, head=make_head(width, num_classes)), "fan_in", zero_bias=True)
