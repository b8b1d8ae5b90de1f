"""LogitClip in Lightning: use `lc.LogitClip` as the criterion; `ClipMonitor` logs how the clip acts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from logitclip.clip import QUANTILES, logit_norms
from logitclip.criterion import Linked, LogitClip, Loss
from logitclip.registry import suggest
from logitclip.text import explain_missing

with explain_missing("ClipMonitor needs Lightning", "lightning"):
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback

__all__ = ["ClipMonitor"]

PER_OCTAVE = 128  # bins of the histogram of norms between a norm and its double: quantiles are within 0.3 %
SMALLEST = -16  # the first bin begins at 2**-16
NORM_BINS = 32 * PER_OCTAVE  # the last one ends at 2**16


class ClipMonitor(Callback):
    """A callback that logs how the clip acts in every training epoch.

    It looks for the criterion, a `LogitClip` or (to compare) a `Loss`, among the modules of the LightningModule, and
    logs at the end of each epoch, over all logits that the criterion was called with in training and whose target is
    not its `ignore_index`:

    - ``logitclip/clipped``: the share of logit vectors that were clipped;
    - ``logitclip/norm_0.05`` ... ``logitclip/norm_0.95``: quantiles of their norms before the clip, within 0.3 %, from
      a histogram of fixed size;
    - ``logitclip/memorised`` and ``logitclip/recovered``, if the true labels are known: of the wrong labels, the share
      that the model predicted as given and the share that it predicted as true, before the step on that batch.

    With several devices, the logged values are means over the devices.

    Args:
        true_labels: A function from a training batch to the true labels of its examples, in the shape of the targets.
        criterion: The name of the criterion in the LightningModule, as in ``"criterion"`` or ``"heads.main"``; needed
            only if there are several.

    >>> from lightning.pytorch import Trainer
    >>> monitor = ClipMonitor(true_labels=lambda batch: batch[2])
    >>> trainer = Trainer(callbacks=[monitor], logger=False, enable_checkpointing=False)
    """

    def __init__(self, true_labels: Callable[[Any], Tensor] | None = None, *, criterion: str | None = None) -> None:
        self.true_labels, self.criterion = true_labels, criterion
        self._hook: Any = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the criterion and hook into its calls."""
        self._criterion = _find_criterion(pl_module, self.criterion)
        self._hook = self._criterion.register_forward_pre_hook(self._look, with_kwargs=True)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reset the statistics."""
        self._histogram: Tensor | None = None  # of the norms, [NORM_BINS]
        self._clipped: Tensor | None = None
        self._labels: Tensor | None = None  # wrong labels, how many predicted as given, how many as true, [3]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Keep the true labels of the batch."""
        self._truth = None if self.true_labels is None else self.true_labels(batch)

    @torch.no_grad()
    def _look(self, criterion: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not criterion.training:
            return
        logits, target = (*args, *(kwargs[name] for name in ("logits", "target") if name in kwargs))[:2]
        dim = 1 if logits.ndim > 1 else 0
        p, tau = (criterion.p, criterion.tau) if isinstance(criterion, LogitClip) else (2.0, torch.inf)
        norms = logit_norms(logits, p, dim)
        counts = torch.ones_like(norms, dtype=torch.bool)
        ignored = _ignore_index(criterion)
        if ignored is not None and not target.is_floating_point():
            counts = target != ignored
        place = (
            ((norms.double().log2() - SMALLEST) * PER_OCTAVE).nan_to_num(nan=NORM_BINS).clamp(0, NORM_BINS - 1).long()
        )
        histogram = torch.zeros(NORM_BINS, dtype=torch.int64, device=norms.device)
        histogram.index_add_(0, place.flatten(), counts.flatten().long())  # no wait for the device
        clipped = ((norms >= tau) & counts).sum()
        self._histogram = histogram if self._histogram is None else self._histogram + histogram
        self._clipped = clipped if self._clipped is None else self._clipped + clipped
        if self._truth is not None:
            predicted, wrong = logits.argmax(dim), (target != self._truth) & counts
            memorised, recovered = wrong & (predicted == target), wrong & (predicted == self._truth)
            labels = torch.stack([wrong.sum(), memorised.sum(), recovered.sum()])
            self._labels = labels if self._labels is None else self._labels + labels

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the epoch."""
        total = 0 if self._histogram is None else int(self._histogram.sum())
        if self._histogram is None or self._clipped is None or not total:
            warnings.warn(
                "ClipMonitor has nothing to log: its criterion was not called in this epoch. A LinearLogitClip has no "
                "logits to look at.",
                stacklevel=1,
            )
            return
        row = {f"norm_{q}": value for q, value in zip(QUANTILES, _quantiles(self._histogram), strict=True)}
        if isinstance(self._criterion, LogitClip):
            row["clipped"] = int(self._clipped) / total
        if self._labels is not None:
            wrong, memorised, recovered = self._labels.tolist()
            row |= {"memorised": memorised / wrong, "recovered": recovered / wrong} if wrong else {}
        pl_module.log_dict({f"logitclip/{name}": value for name, value in row.items()}, sync_dist=True)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove the hook."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def _find_criterion(module: nn.Module, name: str | None) -> nn.Module:
    """Return the criterion of this name, or the only one."""
    found = {path: m for path, m in module.named_modules() if isinstance(m, Linked | LogitClip | Loss)}
    outer = {path: m for path, m in found.items() if not any(path.startswith(f"{other}.") for other in found)}
    if not outer:
        raise ValueError(
            "ClipMonitor found no criterion: set one in __init__ of the LightningModule, as in "
            "self.criterion = logitclip.LogitClip('ce', temp=1.5)."
        )
    if name is not None and name not in found:
        raise ValueError(f"ClipMonitor found no criterion {name!r}. {suggest(name, outer)}")
    if name is None and len(outer) > 1:
        raise ValueError(
            f"ClipMonitor found several criteria, {' and '.join(outer)}: name one, as in "
            f"ClipMonitor(criterion={next(iter(outer))!r})."
        )
    return next(iter(outer.values())) if name is None else found[name]


def _ignore_index(criterion: Any) -> int | None:
    """Return the label that the innermost criterion ignores, if it has one."""
    while isinstance(criterion, Linked | LogitClip):
        criterion = criterion.criterion
    return getattr(criterion, "ignore_index", None)


def _quantiles(histogram: Tensor) -> list[float]:
    """Return the `QUANTILES` of norms by their histogram: each norm counts as the middle of its bin."""
    ends = histogram.cpu().cumsum(0)
    ranks = (ends[-1] - 1) * torch.tensor(QUANTILES, dtype=torch.float64)
    below, above = (
        2 ** ((torch.searchsorted(ends, rank.long(), right=True) + 0.5) / PER_OCTAVE + SMALLEST)
        for rank in (ranks.floor(), ranks.ceil())
    )
    return torch.lerp(below, above, (ranks - ranks.floor()).to(below)).tolist()
