"""Divide rows into folds that do not leak."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from logitclip.data._folds import Pairs, group_folds, time_folds
from logitclip.data._loading import stratified_split
from logitclip.own_data.kind import Source

FOLDS = 5  # of all learners but the network, which may have fewer
MOST_PREDICTIONS = 50_000_000  # rows times classes up to which every row is predicted


@dataclass(frozen=True, eq=False)
class Folds:
    """Pairs of positions: to train on, and to predict."""

    parts: Pairs
    free: bool = True  # whether any row may be learnt from for any other: there are neither groups nor times

    @property
    def judged(self) -> np.ndarray:
        """The positions that are predicted, sorted."""
        return np.sort(np.concatenate([test for _, test in self.parts]))

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return iter(self.parts)


def make_folds(source: Source, count: int, seed: int) -> Folds:
    """Return `count` folds.

    Each holds out another part of every class. With groups, all rows of a group are held out together. With times, the
    rows are cut into `count` + 1 periods, and each period but the first is predicted from the earlier ones. Where rows
    and classes are so many that their probabilities would fill the memory, only a part of the rows is predicted: the
    latest, whole groups, or random ones.

    Raises:
        ValueError: If there are fewer groups or times than folds.
    """
    classes = len(source.class_names)
    if len(source.labels) * classes > MOST_PREDICTIONS:
        few = _choose_part(source, max(100, MOST_PREDICTIONS // 10 // classes), seed)
        return Folds([(np.setdiff1d(np.arange(len(source.labels)), few), few)], free=False)
    if source.times is not None:
        return Folds(time_folds(source.times, count), free=False)
    if source.groups is not None:
        return Folds(group_folds(source.groups, source.labels, count, seed), free=False)
    labels = torch.from_numpy(source.labels)
    parts = (stratified_split(labels, 1 / count, seed, fold=fold) for fold in range(count))
    return Folds([(train.numpy(), test.numpy()) for train, test in parts])


def _choose_part(source: Source, most: int, seed: int) -> np.ndarray:
    """Return about `most` rows to predict from the others: the latest, or whole groups, or random ones."""
    if source.times is not None:
        cut = np.sort(source.times)[-most]
        later = np.flatnonzero(source.times > cut)
        return later if len(later) else np.flatnonzero(source.times >= cut)
    if source.groups is not None:
        groups, sizes = np.unique(source.groups, return_counts=True)
        order = np.random.default_rng(seed).permutation(len(groups))
        count = max(1, int((np.cumsum(sizes[order]) <= most).sum()))
        return np.flatnonzero(np.isin(source.groups, groups[order[:count]]))
    return choose_rows(len(source.labels), most, seed)


def choose_rows(count: int, most: int, seed: int) -> np.ndarray:
    """Return all positions, or `most` random ones, sorted."""
    if count <= most:
        return np.arange(count)
    return np.sort(np.random.default_rng(seed).choice(count, most, replace=False))
