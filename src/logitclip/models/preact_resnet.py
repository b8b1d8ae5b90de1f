"""Pre-activation residual networks (He et al., 2016), in the variant DivideMix and its successors train."""

from __future__ import annotations

from functools import partial
from typing import Literal

from torch import nn

from logitclip.models import MODELS
from logitclip.models.blocks import (
    Activation,
    PreActBlock,
    make_activation,
    make_head,
    make_stages,
    make_stem,
    one_of,
    sequence,
)

COUNTS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}  # blocks in each stage


@MODELS.register
def preact_resnet(
    num_classes: int,
    *,
    in_channels: int = 3,
    depth: int = 18,
    final_norm: bool = False,
    shortcut: Literal["activated", "raw"] = "activated",
    activation: Activation = "relu",
) -> nn.Module:
    """Pre-activation ResNet of depth 18 or 34 with the CIFAR stem; the defaults are DivideMix's network.

    That one differs from the textbook's twice: nothing follows the last block (`final_norm` adds norm and
    activation there), and its identity shortcuts carry the activated input (`shortcut=raw` undoes it). Its
    convolutions are initialised as `nn.Conv2d` does.

    Args:
        depth: 18 or 34.
        final_norm: Add norm and activation after the last block.
        shortcut: What identity shortcuts carry: the activated input, or the raw one.
        activation: Relu, relu6, leaky_relu, gelu, silu or tanh.
    """
    counts = COUNTS[one_of("depth of a preact_resnet", depth, COUNTS)]
    activated = one_of("shortcut", shortcut, ("activated", "raw")) == "activated"
    block = partial(PreActBlock, activation=activation, activated_shortcut=activated)
    return sequence(
        stem=make_stem("cifar", in_channels, 64, activation),
        stages=make_stages(block, 64, (64, 128, 256, 512), counts),
        norm=nn.Sequential(nn.BatchNorm2d(512), make_activation(activation)) if final_norm else nn.Identity(),
        head=make_head(512, num_classes),
    )
