"""Encoders of transformers: a folder that `save_pretrained` wrote, or a name on the Hugging Face hub."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from logitclip.encoders import ENCODERS, Encoder, InputKind, reads
from logitclip.encoders._weights import find_folder, model_files
from logitclip.text import explain_missing, first_line

Pooling = Literal["mean", "cls", "pooler"]


@ENCODERS.register
@reads(model_files)
def hf(
    *,
    name: str,
    pooling: Pooling | None = None,
    prompt: str = "",
    tokens: int = 256,
    takes: InputKind,
    device: torch.device,
) -> Encoder:
    """An encoder of transformers: AutoModel with its tokenizer or its image processor.

    Args:
        name: A folder, or a name on the hub.
        pooling: One of mean (of the tokens), cls (the first token) and pooler (the model's own). By default texts take
            the mean, and images the model's own where the weights have one, else the first token.
        prompt: Words to put before each text.
        tokens: The longest text, in tokens; the rest is cut off.
    """
    model_files(name)  # refuse unsafe weights before they are opened
    with explain_missing("The encoder hf needs transformers", "encoders"):
        import transformers
    transformers.utils.logging.disable_progress_bar()
    folder = str(find_folder(name))
    safe: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        if takes == "images":
            prepare: Any = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil", **safe)
        else:
            prepare = transformers.AutoTokenizer.from_pretrained(folder, **safe)
    except (OSError, ValueError, KeyError) as error:
        what = "image processor" if takes == "images" else "tokenizer"
        raise ValueError(f"The encoder {name!r} does not take {takes}: it has no {what} here.") from error
    try:
        model, info = transformers.AutoModel.from_pretrained(
            folder, use_safetensors=True, dtype=torch.float32, output_loading_info=True, **safe
        )
    except (OSError, ValueError) as error:
        reason = first_line(error)
        raise ValueError(f"transformers cannot load {name!r}: {reason}.") from error
    model = model.eval().requires_grad_(False).to(device, torch.float32 if device.type == "cpu" else torch.float16)
    pooled = not any("pool" in key or key.startswith("head") for key in info["missing_keys"])
    if takes == "images":
        return _Images(model, prepare, _pooling(pooling, pooled, name, "pooler" if pooled else "cls"))
    return _Texts(model, prepare, _pooling(pooling, pooled, name, "mean"), prompt, tokens)


def _pooling(asked: Pooling | None, pooled: bool, name: str, default: Pooling) -> Pooling:
    if asked == "pooler" and not pooled:
        raise ValueError(f"The weights of {name!r} have no pooler: choose pooling=mean or pooling=cls.")
    return asked or default


class _Base:
    """A model whose hidden states are pooled."""

    half: str  # of a model for images and texts: the method for these inputs, and
    part: str  # its network for them

    def __init__(self, model: Any, pooling: Pooling) -> None:
        self.model, self.pooling = model, pooling
        config = model.config.get_text_config() if self.half == "get_text_features" else model.config
        self.limit = getattr(config, "max_position_embeddings", None)

    def encode(self, inputs: dict[str, Tensor], mask: Tensor | None = None) -> Tensor:
        inputs = {key: value.to(self.model.device) for key, value in inputs.items()}
        inputs = {key: v.to(self.model.dtype) if v.is_floating_point() else v for key, v in inputs.items()}
        with torch.inference_mode():
            if self.pooling == "pooler" and hasattr(self.model, self.half):
                output = getattr(self.model, self.half)(**inputs)
                return (output if isinstance(output, Tensor) else output.pooler_output).float().cpu()
            model = getattr(self.model, self.part) if hasattr(self.model, self.half) else self.model
            output = model(**inputs)
            if self.pooling == "pooler":
                return output.pooler_output.flatten(1).float().cpu()
            hidden = output.last_hidden_state
            if hidden.dim() == 4:  # a convolutional network: [N, D, H, W]
                return hidden.float().mean((2, 3)).cpu()
            if self.pooling == "cls":
                return hidden[:, 0].float().cpu()
            weight = torch.ones(hidden.shape[:2], device=hidden.device) if mask is None else mask.to(hidden.device)
            weight = weight[..., None].float()
            return ((hidden.float() * weight).sum(1) / weight.sum(1).clamp_min(1)).cpu()


class _Images(_Base):
    half, part = "get_image_features", "vision_model"

    def __init__(self, model: Any, processor: Any, pooling: Pooling) -> None:
        super().__init__(model, pooling)
        self.processor = processor
        sides = dict(getattr(processor, "size", None) or {})
        self.size = max((int(side) for side in sides.values() if side), default=224)
        from PIL import Image

        self.width = self([self.prepare(Image.new("RGB", (self.size, self.size)))]).shape[1]

    def prepare(self, example: Any) -> Tensor:
        return self.processor(images=[example], return_tensors="pt")["pixel_values"][0]

    def __call__(self, batch: list[Tensor]) -> Tensor:
        return self.encode({"pixel_values": torch.stack(batch)})


class _Texts(_Base):
    half, part = "get_text_features", "text_model"

    def __init__(self, model: Any, tokenizer: Any, pooling: Pooling, prompt: str, tokens: int) -> None:
        super().__init__(model, pooling)
        if tokens < 2:
            raise ValueError(f"tokens must be at least 2, got {tokens}.")
        self.tokenizer, self.prompt, self.size = tokenizer, f"{prompt} " if prompt else "", 0
        self.tokens = min(tokens, self.limit or tokens)
        if tokenizer.pad_token is None:  # of a language model, which has never seen padding; the mask hides it
            tokenizer.pad_token = tokenizer.eos_token
        self.width = self([self.prepare("")]).shape[1]

    def prepare(self, example: str) -> str:
        return self.prompt + example

    def __call__(self, batch: list[str]) -> Tensor:
        inputs = self.tokenizer(batch, padding=True, truncation=True, max_length=self.tokens, return_tensors="pt")
        return self.encode(dict(inputs), inputs["attention_mask"])
