"""Encoders of sentence-transformers, with the pooling and the modules that their folders describe."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from logitclip.encoders import ENCODERS, Encoder, InputKind, reads
from logitclip.encoders._weights import find_folder, model_files
from logitclip.text import explain_missing, first_line


@ENCODERS.register
@reads(model_files)
def sentence_transformers(*, name: str, prompt: str = "", takes: InputKind, device: torch.device) -> Encoder:
    """An encoder of sentence-transformers: texts through all its modules, as its authors use it.

    Args:
        name: A folder, or a name on the hub.
        prompt: Words to put before each text, as in query: for the E5 models.
    """
    if takes != "texts":
        raise ValueError(f"The encoder sentence_transformers takes texts, not {takes}: use hf:{name}.")
    model_files(name)
    with explain_missing("The encoder sentence_transformers needs its package", "encoders"):
        from sentence_transformers import SentenceTransformer
    safe: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        model = SentenceTransformer(
            str(find_folder(name)), device="cpu", model_kwargs={"use_safetensors": True}, **safe
        )
    except (OSError, ValueError, KeyError) as error:
        reason = first_line(error)
        raise ValueError(f"sentence-transformers cannot load {name!r}: {reason}.") from error
    return _Sentences(model, prompt, device)


class _Sentences:
    size = 0

    def __init__(self, model: Any, prompt: str, device: torch.device) -> None:
        dtype = torch.float32 if device.type == "cpu" else torch.float16
        self.model = model.eval().requires_grad_(False).to(device, dtype)
        self.prompt = f"{prompt} " if prompt else ""
        self.width = self([self.prepare("")]).shape[1]

    def prepare(self, example: str) -> str:
        return self.prompt + example

    def __call__(self, batch: list[str]) -> Tensor:
        found = self.model.encode(
            batch, batch_size=len(batch), show_progress_bar=False, convert_to_tensor=True, prompt=""
        )
        return found.float().cpu()
