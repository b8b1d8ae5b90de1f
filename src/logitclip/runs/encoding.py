"""Features in place of the inputs of a run: which inputs share a cache, and where blocks are computed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from logitclip import data, encoders
from logitclip.data._images import ImageFiles
from logitclip.data._loading import limit_examples
from logitclip.data._texts import TextInputs
from logitclip.encoders import blocks
from logitclip.encoders.features import Features, InputBlock, Inputs, OnRows, cache_folder, input_kind, select_inputs
from logitclip.noise import NoisyLabels
from logitclip.runs.config import RunConfig, encoder_spec
from logitclip.runs.plugins import load_plugins

log = logging.getLogger(__name__)

# Where blocks are computed: (a function that loads the encoder, the blocks) -> their features, in any order.
Pool = Callable[[blocks.LoadEncoder, Iterator[InputBlock]], Iterable[tuple[int, np.ndarray]]]


def compute_features(
    config: RunConfig, dataset: data.Dataset, *, pool: Pool = blocks.in_this_process, on_rows: OnRows | None = None
) -> None:
    """Compute the features of a dataset that the cache does not have yet.

    Args:
        config: The run, for its encoder and its limits.
        dataset: Images or texts, as `data.load(..., raw=True)` returns them.
        pool: Where blocks are computed.
        on_rows: Called with the rows done and all rows, after each block and once before the first.
    """
    sources = [inputs for inputs, _ in _sources(limit_examples(dataset, config.limit, config.test_limit))]
    before, rows = 0, sum(map(len, sources))
    for inputs in sources:
        on_part = None if on_rows is None else partial(lambda before, done, _: on_rows(before + done, rows), before)
        _complete(config, inputs, pool, on_part)
        before += len(inputs)


def encode_dataset(config: RunConfig, dataset: data.Dataset) -> data.Dataset:
    """Replace the images or texts of a dataset by features, float32 [N, D]; what is missing in the cache is computed.

    The features of the training rows give the mean and deviation that features are standardised with. Numbers and
    categories beside texts follow the features. An image that cannot be read has a row of NaN.
    """
    keys, parts = [], dict[str, Tensor]()
    for inputs, positions in _sources(dataset):
        features = _complete(config, inputs)
        keys.append(features.key)
        x = torch.from_numpy(features.read().astype(np.float32))
        parts |= {split: x[index] for split, index in positions.items()}
    splits = {"train": dataset.train, "test": dataset.test}
    beside = dataset.train.beside
    if beside is not None:
        parts = {name: torch.cat([x, splits[name].beside], 1) for name, x in parts.items()}  # type: ignore[list-item]
    mean, std = find_scale(parts["train"].numpy(), 0 if beside is None else beside.shape[1])
    splits = {name: replace(split, x=parts[name], beside=None) for name, split in splits.items()}
    return replace(dataset, **splits, mean=mean, std=std, features=tuple(keys))


def find_scale(x: np.ndarray, beside: int = 0) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and deviation of features [N, D]; the last `beside` columns have been standardised already."""
    mean, std = np.nanmean(x, 0), np.nanstd(x, 0)
    std = np.where(std > 1e-6, std, 1.0)
    if beside:
        mean[-beside:], std[-beside:] = 0.0, 1.0
    return tuple(mean.tolist()), tuple(std.tolist())


def encode_inputs(config: RunConfig, inputs: Inputs) -> Tensor:
    """Return the features of inputs, float32 [N, D]; what is missing in the cache is computed."""
    return torch.from_numpy(_complete(config, inputs).read().astype(np.float32))


def _complete(
    config: RunConfig, inputs: Inputs, pool: Pool = blocks.in_this_process, on_rows: OnRows | None = None
) -> Features:
    """Return the features of inputs; what is missing in the cache is computed."""
    load = partial(load_encoder, config.plugin, config.encoder, input_kind(inputs), config.accelerator)
    features = Features.of(inputs, config.encoder)
    features.complete(inputs, partial(pool, load), on_rows)
    return features


def fetch_encoders(configs: Iterable[RunConfig]) -> None:
    """Download the encoders of runs that are not in the user's hub cache.

    Raises:
        ValueError: If one cannot be downloaded.
    """
    with encoders.downloads_allowed():
        for plugins, spec in {(config.plugin, encoder_spec(config)) for config in configs}:
            load_plugins(plugins)
            if spec != "none":
                encoders.identify(spec)


def load_encoder(plugins: tuple[str, ...], spec: str, takes: encoders.InputKind, accelerator: str) -> encoders.Encoder:
    """Load an encoder, in any process."""
    load_plugins(plugins)
    return encoders.build(spec, takes, accelerator=accelerator)


def keep_features(dataset: data.Dataset, run: Path) -> None:
    """Record in the cache that a run uses the features of a dataset; `runs gc` removes those that no run names."""
    for key in dataset.features:
        Features(cache_folder() / key, rows=0).add_user(run)


def _sources(dataset: data.Dataset) -> list[tuple[Inputs, dict[str, Tensor]]]:
    """Return the inputs to encode, and the positions of the splits in them.

    Splits of one table or folder are put together in the order of its rows, so that all folds share their features.
    """
    splits: dict[str, Any] = {"train": dataset.train, "test": dataset.test}
    for split in splits.values():
        input_kind(split.x)
    both = [split.x for split in splits.values()]
    rows = [split.rows for split in splits.values()]
    of_one_folder = all(isinstance(x, ImageFiles) for x in both) and both[0].folder == both[1].folder
    if (of_one_folder or all(isinstance(x, TextInputs) for x in both)) and not any(part is None for part in rows):
        joined = torch.cat(rows)
        if len(joined.unique()) == len(joined):  # else the test rows are those of another file
            order = joined.argsort()
            place = order.argsort().split([len(part) for part in rows])
            return [(select_inputs(both[0].join(both[1]), order), dict(zip(splits, place, strict=True)))]
    return [(split.x, {name: torch.arange(len(split))}) for name, split in splits.items()]


def without_unreadable(dataset: data.Dataset, noisy: NoisyLabels) -> tuple[data.Dataset, NoisyLabels]:
    """Leave out the rows without features: images that cannot be read."""
    splits = {}
    for name in ("train", "test"):
        split: data.Split = getattr(dataset, name)
        assert isinstance(split.x, Tensor)
        known = split.x.isfinite().all(1).nonzero().flatten()
        if len(known) < len(split):
            log.warning("%d of %d %s rows cannot be read and are left out", len(split) - len(known), len(split), name)
            splits[name] = split.select(known)
            noisy = noisy.select(known) if name == "train" else noisy
    return replace(dataset, **splits), noisy
