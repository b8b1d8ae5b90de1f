"""Texts as inputs, for an encoder."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class TextInputs:
    """A text for each example; `texts[index]` with a tensor of positions is a list of strings.

    >>> import torch
    >>> TextInputs(["one", "two", "three"])[torch.tensor([2, 0])]
    ['three', 'one']
    """

    def __init__(self, values: Sequence[str]) -> None:
        self.values = list(values)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Tensor) -> list[str]:
        return [self.values[i] for i in index.tolist()]

    def join(self, others: TextInputs) -> TextInputs:
        """Return these texts and then the others."""
        return TextInputs(self.values + others.values)

    def select(self, index: Tensor) -> TextInputs:
        """Return the texts at `index`."""
        return TextInputs(self[index])
