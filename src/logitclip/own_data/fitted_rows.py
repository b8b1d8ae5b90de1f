"""The rows that a model was fitted on, for people to look at: content, digests, pictures, nearest neighbours."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from logitclip.data._images import ImageFiles, to_png
from logitclip.engine import View
from logitclip.own_data.images import Images
from logitclip.own_data.kind import Source
from logitclip.own_data.model import Model
from logitclip.own_data.network import Network, predict_logits
from logitclip.own_data.source import look_again
from logitclip.own_data.tables import Texts

DIGITS = 16  # of a digest
PICTURE = 640  # pixels of the longer side of a picture
COMPARED = 4_000  # rows that neighbours are chosen from; of more, a random part
PICTURES_COMPARED = 1_000
SHOWN_NEIGHBOURS = 5
LONGEST_VALUE = 20_000  # characters of a value


class FittedRows:
    """The rows of a model's data.

    Args:
        model: The model.
        data: The data, if it is no longer where the model was fitted on it.

    Raises:
        ValueError: If the data is not there, or has other classes or fewer rows than the model knows.
    """

    def __init__(self, model: Model, data: str | Path | None = None) -> None:
        self.model = model
        self.source: Source = look_again(model.facts, data)
        if list(self.source.class_names) != model.class_names:
            raise ValueError(f"{self.source.path} has other classes than the model was fitted on: fit it again.")

    def __len__(self) -> int:
        return len(self.source.labels)

    @property
    def names(self) -> Sequence[str]:
        """The names of the rows: numbers or files."""
        return self.source.rows.names

    @property
    def has_pictures(self) -> bool:
        """Whether the rows are pictures."""
        return isinstance(self.source.kind, Images)

    @cached_property
    def _places(self) -> dict[str, int]:
        return {self.names[i]: i for i in reversed(range(len(self)))}

    def place(self, name: str) -> int | None:
        """Return the position of a row by its name; None if there is none."""
        return self._places.get(name)

    def content(self, i: int) -> list[tuple[str, str]]:
        """Return names and values of the columns of a row; of a picture, its file name."""
        return [(name, value[:LONGEST_VALUE]) for name, value in self.source.kind.content(i)]

    def digest(self, i: int) -> str:
        """Return a digest of the content of a row, without its label."""
        return hashlib.sha256(self.source.kind.content_bytes(i)).hexdigest()[:DIGITS]

    def digest_of(self, name: str) -> str | None:
        """Return the digest of the row with a name; None if there is none."""
        place = self.place(name)
        return None if place is None else self.digest(place)

    @cached_property
    def _by_digest(self) -> dict[str, str | None]:
        found: dict[str, str | None] = {}
        for i in range(len(self)):
            digest = self.digest(i)
            found[digest] = None if digest in found else self.names[i]
        return found

    def find(self, digest: str) -> str | None:
        """Return the name of the only row with a digest."""
        return self._by_digest.get(digest)

    def picture(self, i: int) -> bytes | None:
        """Return a picture as PNG; None if the row has none, or if it cannot be read."""
        kind = self.source.kind
        if not isinstance(kind, Images):
            return None
        try:
            shown = ImageFiles(kind.folder, [kind.names[i]]).open(0)
        except ValueError:
            return None
        shown.thumbnail((PICTURE, PICTURE))
        return to_png(shown)

    # -- neighbours ----------------------------------------------------------------------------------------------------

    @cached_property
    def _network(self) -> Network | None:
        """The model's network, if it has one and the rows are pictures."""
        networks = (learner for learner, _ in self.model.learners if isinstance(learner, Network))
        return next(networks, None) if self.has_pictures else None

    @cached_property
    def compared(self) -> tuple[np.ndarray, np.ndarray]:
        """Positions of the rows that neighbours are chosen from, [n], and their features, [n, D]."""
        most = COMPARED if self._network is None else PICTURES_COMPARED
        chosen = np.random.default_rng(0).permutation(len(self))[:most]
        features = self._embed(chosen)
        known = ~np.isnan(features).any(1)
        return chosen[known], features[known]

    def neighbours(self, i: int) -> list[int]:
        """Return the nearest other rows: by the features of a table or text, or what the network makes of a picture."""
        chosen, features = self.compared
        distances = np.square(features - self._embed(np.array([i]))).sum(1)
        order = np.argsort(distances, kind="stable")[: SHOWN_NEIGHBOURS + 1]
        return [int(j) for j in chosen[order] if j != i][:SHOWN_NEIGHBOURS] if not np.isnan(distances).any() else []

    def _embed(self, rows: np.ndarray) -> np.ndarray:
        if self._network is None:
            features = self.source.rows.features[rows].astype(np.float64)
            scale = np.linalg.norm(features, axis=1, keepdims=True) if isinstance(self.source.kind, Texts) else 1.0
            return features / np.maximum(scale, 1e-12)
        assert self._network.network is not None
        return last_hidden(self._network.network, self.source.rows.take(rows).inputs, self._network.view)


def last_hidden(network: nn.Module, images: Tensor | ImageFiles, view: View) -> np.ndarray:
    """Return the input of the last linear layer, [n, D]; NaN for images that cannot be read."""
    last = [module for module in network.modules() if isinstance(module, nn.Linear)][-1]
    seen: list[Tensor] = []
    handle = last.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].flatten(1)))
    try:
        known = ~predict_logits(network, images, view).isnan().any(1).numpy()
    finally:
        handle.remove()
    hidden = np.full((len(images), last.in_features), np.nan)
    hidden[known] = torch.cat([*seen, torch.empty(0, last.in_features)]).numpy()
    return hidden
