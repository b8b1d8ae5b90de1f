"""Wide residual networks (Zagoruyko and Komodakis, 2016): the paper's main model is WRN-40-2."""

from __future__ import annotations

from functools import partial

from torch import nn

from logitclip.models import MODELS
from logitclip.models.blocks import (
    Activation,
    PreActBlock,
    check_at_most,
    check_sizes,
    conv,
    init_he,
    make_activation,
    make_head,
    make_stages,
    sequence,
)


@MODELS.register
def wrn(
    num_classes: int,
    *,
    in_channels: int = 3,
    depth: int = 40,
    width: int = 2,
    dropout: float = 0.0,
    activation: Activation = "relu",
) -> nn.Module:
    """Wide ResNet: three stages of (depth - 4) / 6 pre-activation blocks, `width` times 16, 32 and 64 channels.

    Args:
        depth: Number of layers: 4 more than a multiple of 6.
        width: Factor of the channels.
        dropout: Between the two convolutions of a block. The paper does not mention dropout. Its recipes use 0.3, the
            authors' value in their related code (LogitNorm, ODNL) and the unused default of the released script.
        activation: Relu, relu6, leaky_relu, gelu, silu or tanh.
    """
    check_sizes(1, width=width)
    if depth < 10 or (depth - 4) % 6:
        raise ValueError(f"depth of a wrn must be 6 n + 4 (10, 16, 22, 28, 34, 40, ...), got {depth}.")
    check_at_most(1000, depth=depth)
    widths = [16 * width, 32 * width, 64 * width]
    block = partial(PreActBlock, activation=activation, dropout=dropout)
    model = sequence(
        stem=conv(in_channels, 16),
        stages=make_stages(block, 16, widths, [(depth - 4) // 6] * 3),
        norm=nn.BatchNorm2d(widths[-1]),
        activation=make_activation(activation),
        head=make_head(widths[-1], num_classes),
    )
    return init_he(model, "fan_out", zero_bias=True)
