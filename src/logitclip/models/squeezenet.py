"""SqueezeNet 1.1 (Iandola et al., 2016), with torchvision's layers and initialisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from logitclip.models import MODELS
from logitclip.models.blocks import Activation, Norm, make_activation, named, one_of


class Fire(nn.Module):
    """Squeeze to few channels by 1x1, then expand by 1x1 and by 3x3, side by side."""

    def __init__(self, inputs: int, squeezed: int, activation: str, normed: bool) -> None:
        super().__init__()
        self.squeeze = nn.Sequential(nn.Conv2d(inputs, squeezed, 1), *_after(squeezed, activation, normed))
        self.expand1 = nn.Conv2d(squeezed, 4 * squeezed, 1)
        self.expand3 = nn.Conv2d(squeezed, 4 * squeezed, 3, padding=1)
        self.after = nn.Sequential(*_after(8 * squeezed, activation, normed))

    def forward(self, x: Tensor) -> Tensor:
        x = self.squeeze(x)
        return self.after(torch.cat([self.expand1(x), self.expand3(x)], 1))


def _after(channels: int, activation: str, normed: bool) -> list[nn.Module]:
    return [*([nn.BatchNorm2d(channels)] if normed else []), make_activation(activation)]


@MODELS.register
def squeezenet(
    num_classes: int,
    *,
    in_channels: int = 3,
    dropout: float = 0.5,
    norm: Norm = "none",
    activation: Activation = "relu",
) -> nn.Module:
    """SqueezeNet 1.1, as in torchvision, for images of 17 pixels and more.

    Args:
        norm: "none" is torchvision's network. It applies the activation to the class scores as well, so no logit is
            negative, and with learning rates of 0.01 and more all logits soon are 0, with no gradient to recover.
            "batch" adds batch norm after each layer but the last, and leaves the scores as they are.
    """
    normed = one_of("norm", norm, ("none", "batch")) == "batch"
    body = nn.Sequential(nn.Conv2d(in_channels, 64, 3, stride=2), *_after(64, activation, normed))
    inputs = 64
    for squeezed in ((16, 16), (32, 32), (48, 48, 64, 64)):
        body.append(nn.MaxPool2d(3, 2, ceil_mode=True))
        for width in squeezed:
            body.append(Fire(inputs, width, activation, normed))
            inputs = 8 * width
    scores = nn.Conv2d(inputs, num_classes, 1)
    last = nn.Identity() if normed else make_activation(activation)
    head = nn.Sequential(nn.Dropout(dropout), scores, last, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = named(body=body, head=head)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_uniform_(module.weight)
            nn.init.zeros_(module.bias)  # pyright: ignore[reportArgumentType]
    nn.init.normal_(scores.weight, std=0.01)
    return model
