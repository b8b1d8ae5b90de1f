"""Encoders of timm: pooled features before the classifier, with the model's own data config."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from logitclip.encoders import ENCODERS, Encoder, InputKind, reads
from logitclip.encoders._weights import find_folder, model_files
from logitclip.files import Json
from logitclip.text import first_line

if TYPE_CHECKING:
    from PIL.Image import Image, Resampling


@ENCODERS.register
@reads(model_files)
def timm(*, name: str, takes: InputKind, device: torch.device) -> Encoder:
    """An encoder of timm: the pooled features of a network, without its classifier.

    Args:
        name: A folder with config.json and model.safetensors, or a name on the hub such as timm/resnet18.a1_in1k.
    """
    if takes != "images":
        raise ValueError(f"The encoder timm takes images, not {takes}: use hf or sentence_transformers.")
    model_files(name)
    try:
        package = importlib.import_module("timm")
        resolve_model_data_config = importlib.import_module("timm.data").resolve_model_data_config
    except (ImportError, RuntimeError) as error:  # torchvision may not load beside this torch
        raise ImportError("The encoder timm needs timm and torchvision: pip install 'logitclip[timm]'.") from error
    try:
        model = package.create_model(f"local-dir:{find_folder(name).resolve()}", pretrained=True, num_classes=0)
    except Exception as error:  # timm raises RuntimeError, KeyError and others
        reason = first_line(error)
        raise ValueError(f"timm cannot load {name!r}: {reason}.") from error
    return _Pooled(model, resolve_model_data_config(model), device)


class _Pooled:
    def __init__(self, model: nn.Module, config: Json, device: torch.device) -> None:
        from PIL.Image import Resampling

        self.dtype = torch.float32 if device.type == "cpu" else torch.float16
        self.model, self.device = model.eval().requires_grad_(False).to(device, self.dtype), device
        self.crop = int(config["input_size"][-1])
        self.size = round(self.crop / config["crop_pct"])
        self.mean, self.std = (torch.tensor(config[key]).view(-1, 1, 1) for key in ("mean", "std"))
        self.how = getattr(Resampling, str(config["interpolation"]).upper(), Resampling.BICUBIC)
        self.width = self([torch.zeros(3, self.crop, self.crop)]).shape[1]

    def prepare(self, example: Image) -> Tensor:
        """Scale the shorter side to `size`, keep the centre square, and normalise, as timm's evaluation does."""
        return normalise_image(resize_and_crop(example, self.size, self.crop, self.how), self.mean, self.std)

    def __call__(self, batch: list[Tensor]) -> Tensor:
        with torch.inference_mode():
            return self.model(torch.stack(batch).to(self.device, self.dtype)).float().cpu()


def resize_and_crop(image: Image, size: int, crop: int, how: Resampling) -> Image:
    """Scale the shorter side of a PIL image to `size` and keep the square of side `crop` in its centre."""
    width, height = image.size
    scale = size / min(width, height)
    image = image.resize((max(size, round(width * scale)), max(size, round(height * scale))), how)
    left, top = round((image.width - crop) / 2), round((image.height - crop) / 2)
    return image.crop((left, top, left + crop, top + crop))


def normalise_image(image: Image, mean: Tensor, std: Tensor) -> Tensor:
    """Return a PIL image as a tensor [3, H, W]: bytes scaled to [0, 1], less the mean, over the deviation."""
    import numpy as np

    pixels = torch.from_numpy(np.asarray(image, dtype=np.float32)).permute(2, 0, 1)
    return (pixels / 255 - mean) / std
