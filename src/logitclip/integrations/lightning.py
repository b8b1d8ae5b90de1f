"""LogitClip in Lightning: use `lc.LogitClip` as the criterion; `ClipMonitor` logs how the clip acts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from logitclip.clip import QUANTILES, full_precision, norm_quantiles, vector_norm
from logitclip.criterion import Linked, LogitClip, Loss

try:
    from lightning.pytorch.callbacks import Callback
except ImportError as error:
    raise ImportError("ClipMonitor needs Lightning: pip install 'logitclip[lightning]'.") from error

__all__ = ["ClipMonitor"]


class ClipMonitor(Callback):
    """Log how the clip acts in every training epoch.

    It looks for the criterion, a `LogitClip` or (to compare) a `Loss`, among the attributes of the LightningModule, and
    logs at the end of each epoch, over all logits that the criterion was called with in training:

    - ``logitclip/clipped``: the share of logit vectors that were clipped;
    - ``logitclip/norm_0.05`` ... ``logitclip/norm_0.95``: quantiles of their norms before the clip;
    - ``logitclip/memorised`` and ``logitclip/recovered``, if the true labels are known: of the wrong labels, the share
      that the model predicted as given and the share that it predicted as true, before the step on that batch.

    With several devices, the logged values are means over the devices.

    Args:
        true_labels: a function from a training batch to the true labels of its examples, in the shape of the targets.

    >>> from lightning.pytorch import Trainer
    >>> monitor = ClipMonitor(true_labels=lambda batch: batch[2])
    >>> trainer = Trainer(callbacks=[monitor], logger=False, enable_checkpointing=False)
    """

    def __init__(self, true_labels: Callable[[Any], Tensor] | None = None) -> None:
        self.true_labels = true_labels
        self._hook: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Find the criterion and hook into its calls."""
        self._criterion = next((m for m in pl_module.modules() if isinstance(m, (Linked, Loss))), None)
        if self._criterion is None:
            raise ValueError(
                "ClipMonitor found no criterion: set one in __init__ of the LightningModule, as in "
                "self.criterion = logitclip.LogitClip('ce', temp=1.5)."
            )
        self._hook = self._criterion.register_forward_pre_hook(self._look, with_kwargs=True)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Reset the statistics."""
        self._norms: list[Tensor] = []
        self._counts: list[Tensor] = []  # wrong labels, how many predicted as given, how many as true

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Keep the true labels of the batch."""
        self._truth = None if self.true_labels is None else self.true_labels(batch)

    @torch.no_grad()
    def _look(self, criterion: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not criterion.training:
            return
        logits, target = (*args, *(kwargs[name] for name in ("logits", "target") if name in kwargs))[:2]
        dim = 1 if logits.ndim > 1 else 0
        p = criterion.p if isinstance(criterion, LogitClip) else 2.0
        z = full_precision(logits)
        self._norms.append(vector_norm(z.masked_fill(z.isneginf(), 0.0), p, dim).flatten())
        if self._truth is not None:
            predicted, wrong = logits.argmax(dim), target != self._truth
            memorised, recovered = wrong & (predicted == target), wrong & (predicted == self._truth)
            self._counts.append(torch.stack([wrong.sum(), memorised.sum(), recovered.sum()]))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the epoch."""
        if not self._norms:
            warnings.warn(
                "ClipMonitor has nothing to log: its criterion was not called in this epoch. A LinearLogitClip has no "
                "logits to look at.",
                stacklevel=1,
            )
            return
        norms = torch.cat(self._norms)
        row = {f"norm_{q}": value for q, value in zip(QUANTILES, norm_quantiles(norms), strict=True)}
        if isinstance(self._criterion, LogitClip):
            row["clipped"] = (norms >= self._criterion.tau).float().mean().item()
        if self._counts:
            wrong, memorised, recovered = torch.stack(self._counts).sum(0).tolist()
            row |= {"memorised": memorised / wrong, "recovered": recovered / wrong} if wrong else {}
        pl_module.log_dict({f"logitclip/{name}": value for name, value in row.items()}, sync_dist=True)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Remove the hook."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
