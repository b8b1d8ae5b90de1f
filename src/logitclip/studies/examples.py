"""Training examples whose wrong label one run memorised and another did not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from logitclip.data import Dataset
from logitclip.data._images import png_address
from logitclip.runs.config import RunConfig
from logitclip.runs.results import Result
from logitclip.runs.train import prepare, rebuild_network
from logitclip.studies.sweeping import CellOutcome
from logitclip.studies.tables import pairs_of

MOST = 2000  # wrong labels to look at, at most


@dataclass(frozen=True)
class Example:
    """A training example with a wrong label."""

    index: int
    given: str
    true: str
    picture: str | None  # as a data: address, if it is a picture


@dataclass(frozen=True)
class Comparison:
    """Examples that the run without the clip predicts as given and the run with it as true."""

    without: Result
    clipped: Result
    share: float  # of the wrong labels, in %
    examples: list[Example]


def compare(rows: Sequence[CellOutcome], count: int = 8) -> Comparison | None:
    """Compare the first two runs that differ only in the clip; None if there are none, or they cannot be read.

    Cross entropy is preferred. Plugins are never imported: a run that needs one is not shown.
    """
    pairs = [pair for pair in pairs_of(rows) if not any(run.config["plugin"] for run in pair)]
    pairs.sort(key=lambda pair: pair[0].config["loss"] != "ce")
    try:
        found = _compare_runs(*pairs[0], count) if pairs else None
    except (ValueError, OSError, ImportError, RuntimeError):  # no data here, or weights of another network
        return None
    return found if found is not None and found.examples else None


def _compare_runs(without: Result, clipped: Result, count: int) -> Comparison:
    """Predict the wrong labels with both networks, and choose `count` examples that only one of them memorised."""
    dataset, _ = prepare(RunConfig(**{**without.config, "plugin": ()}))
    train = dataset.train
    if train.clean_labels is None or train.labels.dim() > 1:
        raise ValueError("The true labels are not known.")
    wrong = (train.labels != train.clean_labels).nonzero().flatten()[:MOST]
    memorised = _predict(without, dataset, wrong) == train.labels[wrong]
    recovered = _predict(clipped, dataset, wrong) == train.clean_labels[wrong]
    shown = wrong[memorised & recovered]
    examples = []
    for i in shown[:: max(1, len(shown) // count)][:count].tolist():
        given, true = (dataset.class_names[int(labels[i])] for labels in (train.labels, train.clean_labels))
        x = train.x[torch.tensor([i])][0]
        is_picture = x.dtype == torch.uint8 and x.dim() == 3 and len(x) in (1, 3)
        examples.append(Example(i, given, true, png_address(x) if is_picture else None))
    return Comparison(without, clipped, 100 * len(shown) / max(1, len(wrong)), examples)


@torch.no_grad()
def _predict(result: Result, dataset: Dataset, index: Tensor) -> Tensor:
    """Return the classes that the trained network of a run predicts for some training examples."""
    network, view = rebuild_network(result, dataset)
    return torch.cat([network(view(dataset.train.x[part], None)).argmax(1) for part in index.split(200)])
