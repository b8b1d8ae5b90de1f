"""Seeds and streams of random numbers, derived from (seed, purpose, epoch, rank): none is ever stored."""

from __future__ import annotations

import hashlib
import operator

import torch


def hashed_seed(text: str) -> int:
    """Return a seed below 2**56 from a text, the same on every machine.

    >>> hashed_seed("label noise 0") == hashed_seed("label noise 0") != hashed_seed("label noise 1")
    True
    """
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")


def derived_seed(seed: int, purpose: str, *more: int | str) -> int:
    """Return a seed for one purpose, epoch and rank.

    >>> derived_seed(0, "order", 1, 0) != derived_seed(0, "order", 0, 1)
    True
    """
    # operator.index: a NumPy integer gives the stream of the same Python integer.
    parts = (part if isinstance(part, str) else operator.index(part) for part in (seed, purpose, *more))
    return hashed_seed(repr(tuple(parts)))


def stream(device: torch.device | str, seed: int, purpose: str, *more: int | str) -> torch.Generator:
    """Return a generator on `device`, seeded with `derived_seed`."""
    return torch.Generator(device).manual_seed(derived_seed(seed, purpose, *more))
