"""SqueezeNet 1.1 (Iandola et al., 2016), with torchvision's layers and initialisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from logitclip.models import MODELS
from logitclip.models.blocks import Activation, make_activation, sequence


class Fire(nn.Module):
    """Squeeze to few channels by 1x1, then expand by 1x1 and by 3x3, side by side."""

    def __init__(self, inputs: int, squeezed: int, activation: str) -> None:
        super().__init__()
        self.squeeze = nn.Sequential(nn.Conv2d(inputs, squeezed, 1), make_activation(activation))
        self.expand1 = nn.Conv2d(squeezed, 4 * squeezed, 1)
        self.expand3 = nn.Conv2d(squeezed, 4 * squeezed, 3, padding=1)
        self.activation = make_activation(activation)

    def forward(self, x: Tensor) -> Tensor:
        x = self.squeeze(x)
        return self.activation(torch.cat([self.expand1(x), self.expand3(x)], 1))


@MODELS.register
def squeezenet(
    num_classes: int,
    *,
    in_channels: int = 3,
    dropout: float = 0.5,
    activation: Activation = "relu",
    last_activation: bool = True,
) -> nn.Module:
    """SqueezeNet 1.1, as in torchvision, for images of 17 pixels and more.

    Args:
        dropout: Share that dropout sets to 0 before the head.
        activation: Relu, relu6, leaky_relu, gelu, silu or tanh.
        last_activation: Also apply the activation to the class scores, as torchvision does: with `relu` no logit is
            negative, with `relu6` none exceeds 6. Trained from scratch at learning rates of 0.01 and more, soon all
            logits are 0, with no gradient to recover: then use False.
    """
    body = nn.Sequential(nn.Conv2d(in_channels, 64, 3, stride=2), make_activation(activation))
    inputs = 64
    for squeezed in ((16, 16), (32, 32), (48, 48, 64, 64)):
        body.append(nn.MaxPool2d(3, 2, ceil_mode=True))
        for width in squeezed:
            body.append(Fire(inputs, width, activation))
            inputs = 8 * width
    scores = nn.Conv2d(inputs, num_classes, 1)
    last = make_activation(activation) if last_activation else nn.Identity()
    head = nn.Sequential(nn.Dropout(dropout), scores, last, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = sequence(body=body, head=head)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_uniform_(module.weight)
            nn.init.zeros_(module.bias)  # pyright: ignore[reportArgumentType]
    nn.init.normal_(scores.weight, std=0.01)
    return model
