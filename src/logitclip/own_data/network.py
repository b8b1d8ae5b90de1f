"""The clipped network as a learner."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from logitclip import engine, models
from logitclip.criterion import build_criterion
from logitclip.data._images import ImageFiles
from logitclip.data.augment import transform
from logitclip.data.dataset import Dataset, Split
from logitclip.files import Json
from logitclip.launch import make_fabric
from logitclip.methods.standard import Standard, Weighted
from logitclip.own_data.facts import Facts
from logitclip.own_data.folds import MOST_PREDICTIONS, Folds
from logitclip.own_data.kind import Arrays, Read, Rows
from logitclip.own_data.learners import Learner
from logitclip.runs.checkpoints import as_safetensors

AVERAGED_ROWS = 20_000  # rows up to which every epoch is averaged, and not every fifth


@dataclass(frozen=True)
class NetworkOptions:
    """The settings of the network: the model, the loss, the clip, and those of `engine.Settings` that matter here."""

    model: str
    epochs: int
    batch_size: int
    lr: float
    weight_decay: float = 1e-4
    augment: str = "none"
    loss: str = "ce"
    clip: str = "none"
    momentum: float = 0.9
    nesterov: bool = True
    schedule: str = "cosine"
    grad_clip: float = 0.0
    threads: int = 1
    accelerator: str = "auto"
    precision: str = "32"

    def settings(self, seed: int) -> engine.Settings:
        """Return the settings of the engine."""
        names = {field.name for field in fields(engine.Settings)}
        return engine.Settings(**{k: v for k, v in vars(self).items() if k in names}, seed=seed)

    def check(self, classes: int, shape: tuple[int, ...]) -> None:
        """Raise a ValueError if the network cannot be built or trained with these settings."""
        self.settings(0)
        build_criterion(self.loss, self.clip)
        models.build(self.model, classes, shape)


class Network(Learner):
    """A network trained with the clip.

    Attributes:
        network: From inputs to logits [N, K].
        averaged: After `fit`, the class probabilities of the training rows, averaged over the epochs [N, K]. A clipped
            network learns wrong labels late or never, so they say what the network believed before.
    """

    name = "network"
    file = "weights.safetensors"

    def __init__(
        self, classes: int, options: NetworkOptions, mean: tuple[float, ...] = (), std: tuple[float, ...] = ()
    ) -> None:
        super().__init__(classes, options.threads)
        self.options, self.mean, self.std = options, mean, std
        self.view = transform(options.augment, mean, std)
        self.network: nn.Module | None = None
        self.averages = True  # whether `fit` records the averages
        self.averaged = np.empty((0, classes))

    def fresh(self) -> Network:
        return Network(self.classes, self.options, self.mean, self.std)

    def settings(self) -> Json:
        return vars(self.options)

    def to_learn_again(self, found: Arrays) -> Network:
        network = self.fresh()
        network.averages = False
        return network

    def fit(self, rows: Rows, y: np.ndarray, weight: np.ndarray | None = None, seed: int = 0) -> None:
        split = Split(rows.inputs, torch.from_numpy(np.ascontiguousarray(y)).long())
        nothing = split.select(torch.arange(0))
        names = tuple(map(str, range(self.classes)))
        self.shape = self.input_shape(rows)
        every = 1 if len(y) <= AVERAGED_ROWS else 5
        averages = self.averages and len(y) * self.classes <= MOST_PREDICTIONS
        total, count = torch.zeros(len(y) if averages else 0, self.classes, dtype=torch.float64), 0

        def average(progress: engine.Progress) -> None:
            nonlocal count
            assert isinstance(progress.method, Standard)
            if progress.row["epoch"] % every == 0:
                total.add_(predict_logits(progress.method.network, rows.inputs, self.view).double().softmax(1))
                count += 1

        trained = engine.fit(
            Dataset("rows", split, nothing, self.classes, names, mean=self.mean, std=self.std),
            lambda seed: models.build(self.options.model, self.classes, self.shape, seed=seed),
            build_criterion(self.options.loss, self.options.clip),
            Standard if weight is None else partial(Weighted, weights=torch.from_numpy(weight).float()),
            self.options.settings(seed),
            view=self.view,
            fabric=make_fabric(accelerator=self.options.accelerator, precision=self.options.precision),
            after_epoch=average if averages else None,
        )
        self.network = trained.network.cpu().float().eval()
        self.averaged = (total / max(1, count)).numpy()

    def out_of_fold(self, rows: Rows, y: np.ndarray, weight: np.ndarray | None, folds: Folds, seed: int) -> Arrays:
        judged = folds.judged
        held_out, seen = np.empty((len(judged), self.classes)), np.zeros((len(judged), self.classes))
        times = np.zeros(len(judged))
        for train, test in folds:
            network = self.fresh()
            network.fit(rows.take(train), y[train], None if weight is None else weight[train], seed)
            held_out[np.searchsorted(judged, test)] = network.predict_proba(rows.take(test))
            at = np.flatnonzero(np.isin(judged, train) & (len(network.averaged) > 0))
            seen[at] += network.averaged[np.searchsorted(train, judged[at])]
            times[at] += 1
        return {
            "held_out": held_out,
            "seen": np.where(times[:, None] > 0, seen / np.maximum(times, 1)[:, None], held_out),
        }

    def input_shape(self, rows: Rows) -> tuple[int, ...]:
        """Return the shape of an input, after the view."""
        return tuple(self.view(rows.inputs[torch.tensor([0])], None).shape[1:])

    def predict_proba(self, rows: Rows) -> np.ndarray:
        assert self.network is not None
        return predict_logits(self.network, rows.inputs, self.view).double().softmax(1).numpy()

    def facts(self) -> Facts:
        return {"name": self.name, "recipe": vars(self.options), "input_shape": list(self.shape)}

    def contents(self) -> dict[str, bytes]:
        assert self.network is not None
        return {self.file: as_safetensors(self.network.state_dict())}

    def restore(self, facts: Facts, read: Read) -> None:
        from safetensors.torch import load

        self.shape = tuple(facts["input_shape"])
        self.network = models.rebuild(self.options.model, self.classes, self.shape, load(read(self.file)))


def with_clip(network: Network, clip: str) -> Network:
    """Return a fresh network with another clip."""
    return Network(network.classes, replace(network.options, clip=clip), network.mean, network.std)


@torch.no_grad()
def predict_logits(network: nn.Module, x: Tensor | ImageFiles, view: engine.View) -> Tensor:
    """Return logits [N, K] in batches; NaN for image files that cannot be read."""
    training = network.training
    network.eval()
    device = next(network.parameters()).device
    if isinstance(x, Tensor):
        found = [network(view(batch.to(device), None)).cpu() for batch in x.split(1024)]
    else:
        images = (x.decode_or_skip(i) for i in range(len(x)))
        found = [None if image is None else network(view(image[None].to(device), None)).cpu() for image in images]
    width = next((logits.shape[1] for logits in found if logits is not None), 1)
    network.train(training)
    return torch.cat([torch.full((1, width), torch.nan) if logits is None else logits for logits in found]).float()
