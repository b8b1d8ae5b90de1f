"""Networks of timm and torchvision, where these are installed: `timm:NAME` and `torchvision:NAME`."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from logitclip.models import MODELS
from logitclip.text import first_line


@MODELS.register
def timm(num_classes: int, *, name: str, pretrained: bool = False, in_channels: int = 3) -> nn.Module:
    """Any model of timm: `timm:resnet18`.

    Args:
        name: Its name in timm.
        pretrained: Download its weights, all but the head's.
    """
    create = _import("timm", "timm").create_model
    return _create("timm", create, name, pretrained=pretrained, num_classes=num_classes, in_chans=in_channels)


@MODELS.register
def torchvision(num_classes: int, *, name: str, in_channels: int = 3) -> nn.Module:
    """Any classifier of torchvision, with new weights: `torchvision:resnet18`.

    Args:
        name: Its name in torchvision.
    """
    if in_channels != 3:
        raise ValueError(f"torchvision's models take 3 channels, got {in_channels}; 'timm:NAME' takes any number.")
    # These two return a tuple in training by default.
    plain = {"aux_logits": False, "init_weights": True} if name in ("googlenet", "inception_v3") else {}
    create = _import("torchvision", "torchvision.models").get_model
    return _create("torchvision", create, name, num_classes=num_classes, **plain)


def _import(package: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:  # builds for another torch fail with RuntimeError, AttributeError or OSError
        raise ImportError(
            f"'{package}:NAME' needs {package}, which cannot be imported here ({first_line(error)}); install one that "
            f"fits torch: pip install {package}"
        ) from error


def _create(package: str, create: Any, name: str, **options: Any) -> nn.Module:
    try:
        return create(name, **options)
    except Exception as error:  # each library has its own for an unknown name or a network that is no classifier
        raise ValueError(f"{package} cannot make {name!r} ({first_line(error)}).") from error
