"""Parts of the networks: convolutions, stems, pre-activation blocks, heads, initialisation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeVar

from torch import Tensor, nn

Activation = Literal["relu", "relu6", "leaky_relu", "gelu", "silu", "tanh"]
Norm = Literal["none", "batch"]
Stem = Literal["imagenet", "cifar"]

T = TypeVar("T")
ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "leaky_relu": nn.LeakyReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
}


def one_of(name: str, value: T, allowed: Iterable[T]) -> T:
    """Return `value`; raise unless it is one of `allowed`."""
    if value not in (allowed := tuple(allowed)):
        raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}; got {value!r}.")
    return value


def check_sizes(minimum: int, **values: int) -> None:
    """Refuse the first of `values` below `minimum`."""
    for name, value in values.items():
        if value < minimum:
            raise ValueError(f"{name} must be at least {minimum}, got {value}.")


def check_at_most(maximum: int, **values: int) -> None:
    """Refuse the first of `values` above `maximum`."""
    for name, value in values.items():
        if value > maximum:
            raise ValueError(f"{name} must be at most {maximum:,}, got {value:,}.")


def make_activation(name: str) -> nn.Module:
    """Return the activation of that name. `relu6`, min(max(0, x), 6), is the paper's comparison with bounded features.

    Paper: ReLU6.
    """
    return ACTIVATIONS[one_of("activation", name, ACTIVATIONS)]()


def sequence(**parts: nn.Module) -> nn.Sequential:
    """Return a sequence with named parts, such as `model.head`."""
    return nn.Sequential(OrderedDict(parts))


def conv(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, *, bias: bool = False) -> nn.Conv2d:
    """Return a padded convolution: the image keeps its size, divided by `stride`."""
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=bias)


def conv_norm(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, activation: str = "") -> nn.Sequential:
    """Convolution, batch norm and, if given, an activation."""
    tail = [make_activation(activation)] if activation else []
    return nn.Sequential(conv(inputs, outputs, kernel, stride), nn.BatchNorm2d(outputs), *tail)


def make_stem(kind: str, in_channels: int, width: int, activation: str) -> nn.Sequential:
    """Return the first layer: `imagenet` divides the image by 4 (7x7, max-pool), `cifar` keeps its size (3x3)."""
    if one_of("stem", kind, ("imagenet", "cifar")) == "cifar":
        return conv_norm(in_channels, width, activation=activation)
    return conv_norm(in_channels, width, 7, 2, activation).append(nn.MaxPool2d(3, 2, padding=1))


def make_stages(
    block: Callable[..., nn.Module], inputs: int, widths: Sequence[int], counts: Sequence[int]
) -> nn.Sequential:
    """Stages of `block(inputs, outputs, stride)`: `counts[i]` of `widths[i]`; all but the first halve the image."""
    stages = nn.Sequential()
    for i, (width, count) in enumerate(zip(widths, counts, strict=True)):
        strides = [2 if i else 1] + [1] * (count - 1)
        sources = [inputs] + [width] * (count - 1)
        stages.append(nn.Sequential(*(block(n, width, stride) for n, stride in zip(sources, strides, strict=True))))
        inputs = width
    return stages


def make_head(features: int, num_classes: int) -> nn.Sequential:
    """Mean over the image, then the linear layer, for images of any size."""
    return sequence(pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), linear=nn.Linear(features, num_classes))


class PreActBlock(nn.Module):
    """Norm and activation before each of two 3x3 convolutions, with a 1x1 shortcut where the shape changes.

    Args:
        activated_shortcut: An identity shortcut carries the activated input (as DivideMix's network does), not the
            raw one (as in He et al., 2016). A 1x1 shortcut always starts from the activated input.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        stride: int,
        *,
        activation: str,
        dropout: float = 0.0,
        activated_shortcut: bool = False,
    ) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.BatchNorm2d(inputs), make_activation(activation))
        self.body = nn.Sequential(
            conv_norm(inputs, outputs, 3, stride, activation), nn.Dropout(dropout), conv(outputs, outputs)
        )
        changed = stride != 1 or inputs != outputs
        self.shortcut = conv(inputs, outputs, 1, stride) if changed else nn.Identity()
        self.activated_shortcut = activated_shortcut or changed

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        return self.body(y) + self.shortcut(y if self.activated_shortcut else x)


def init_he(model: nn.Module, mode: Literal["fan_in", "fan_out"], *, zero_bias: bool = False) -> nn.Module:
    """He et al.'s normal initialisation of every convolution; `zero_bias` also zeroes biases, except those of norms."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode=mode, nonlinearity="relu")
        if isinstance(module, (nn.Conv2d, nn.Linear)) and module.bias is not None and zero_bias:
            nn.init.zeros_(module.bias)
    return model
