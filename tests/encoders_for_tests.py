"""Tiny encoders, made on the spot and saved as transformers saves them; and data for them."""

from __future__ import annotations

import numpy as np
import torch

FILM = ["good", "bad", "film", "plot", "actor", "song", "rain", "sun"]
OTHER = ["fish", "dog", "cat", "blue", "red", "one", "two", "three", "four"]


def save_text_encoder(folder, *, seed=0):
    """Save a BERT of one layer with its tokenizer; return the folder."""
    from transformers import BertConfig, BertModel, BertTokenizerFast  # type: ignore[attr-defined]  # found late

    folder.mkdir(parents=True, exist_ok=True)
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *FILM, *OTHER]
    (folder / "vocab.txt").write_text("\n".join(vocab), encoding="utf-8")
    tokenizer = BertTokenizerFast(vocab_file=str(folder / "vocab.txt"), vocab={word: i for i, word in enumerate(vocab)})
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = BertModel(BertConfig(vocab_size=len(vocab), max_position_embeddings=32, **sizes))
    model.save_pretrained(folder)
    return folder


def save_image_encoder(folder, *, seed=0):
    """Save a ViT of one layer for images of 16 pixels with its image processor; return the folder."""
    from transformers import ViTConfig, ViTImageProcessor, ViTModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = ViTModel(ViTConfig(image_size=16, patch_size=8, **sizes))
    model.save_pretrained(folder)
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(folder)
    return folder


def make_texts(count, *, seed=0):
    """Return texts of 1 to 12 words and a label for each: whether they are about films."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 2, count)
    return [" ".join(generator.choice((FILM, OTHER)[k], generator.integers(1, 13))) for k in labels], labels


def save_photos(folder, count, *, classes=("cat", "dog"), side=20, seed=0):
    """Write `count` PNG files, in turn dark and bright, into a folder for each class; return the folder."""
    from PIL import Image

    generator = np.random.default_rng(seed)
    for i in range(count):
        name = classes[i % len(classes)]
        (folder / name).mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 100, (side, side + 4, 3)) + 100 * (i % len(classes))
        Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{i:04d}.png")
    return folder
