"""Residual networks (He et al., 2015), with torchvision's layers and initialisation."""

from __future__ import annotations

from functools import partial
from typing import Literal

from torch import Tensor, nn

from logitclip.models import MODELS
from logitclip.models.blocks import (
    Activation,
    Stem,
    conv_norm,
    init_he,
    make_activation,
    make_head,
    make_stages,
    make_stem,
    one_of,
    sequence,
)

COUNTS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}  # blocks in each stage


class ResidualBlock(nn.Module):
    """activation(body(x) + shortcut(x)): two 3x3 convolutions, or in a bottleneck 1x1, 3x3 (with the stride), 1x1."""

    def __init__(self, inputs: int, outputs: int, stride: int, *, activation: str, bottleneck: bool) -> None:
        super().__init__()
        if bottleneck:
            inner = outputs // 4
            self.body = nn.Sequential(
                conv_norm(inputs, inner, 1, 1, activation),
                conv_norm(inner, inner, 3, stride, activation),
                conv_norm(inner, outputs, 1),
            )
        else:
            self.body = nn.Sequential(conv_norm(inputs, outputs, 3, stride, activation), conv_norm(outputs, outputs))
        changed = stride != 1 or inputs != outputs
        self.shortcut = conv_norm(inputs, outputs, 1, stride) if changed else nn.Identity()
        self.activation = make_activation(activation)

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.body(x) + self.shortcut(x))


@MODELS.register
def resnet(
    num_classes: int,
    *,
    in_channels: int = 3,
    depth: int = 18,
    stem: Stem = "imagenet",
    init: Literal["he", "torch"] = "he",
    activation: Activation = "relu",
) -> nn.Module:
    """ResNet of depth 18, 34 or 50, as in torchvision; `stem=cifar` keeps the resolution of small images.

    The paper's ResNet-34 on CIFAR has the ImageNet stem: the released code uses torchvision's.

    Args:
        depth: 18, 34 or 50.
        stem: "imagenet" has stride 4; "cifar" has stride 1, for small images.
        init: "he" initialises convolutions as torchvision does (He et al., fan-out); "torch" keeps the default
            initialisation of torch's layers, as in SOP's code.
        activation: Relu, relu6, leaky_relu, gelu, silu or tanh.
    """
    counts = COUNTS[one_of("depth of a resnet", depth, COUNTS)]
    bottleneck = depth >= 50
    widths = [w * (4 if bottleneck else 1) for w in (64, 128, 256, 512)]
    block = partial(ResidualBlock, activation=activation, bottleneck=bottleneck)
    model = sequence(
        stem=make_stem(stem, in_channels, 64, activation),
        stages=make_stages(block, 64, widths, counts),
        head=make_head(widths[-1], num_classes),
    )
    return init_he(model, "fan_out") if one_of("init", init, ("he", "torch")) == "he" else model
