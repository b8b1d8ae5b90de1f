"""LogitClip in skorch: `LogitClipNet`, a `NeuralNetClassifier` for modules that return logits."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from logitclip.criterion import LogitClip
from logitclip.text import explain_missing

DEFAULT_TEMP = 1.5  # the clip if neither tau nor temp is given

with explain_missing("LogitClipNet needs skorch", "skorch"):
    from skorch import NeuralNetClassifier

__all__ = ["LogitClipNet"]


class LogitClipNet(NeuralNetClassifier):
    """skorch's `NeuralNetClassifier` with LogitClip as its criterion, for modules that return logits [N, K].

    `predict_proba` returns the softmax of the unclipped logits; `NeuralNetClassifier` does not know the criterion and
    would return the logits. ``criterion__tau`` or ``criterion__temp`` sets the clip and works in a grid search; without
    either, temp is 1.5.

    Args:
        module: A module, or a class of modules, that returns logits [N, K].
        *args: As for `NeuralNetClassifier`.
        criterion: The criterion.
        criterion__loss: The loss behind the clip, as in ``"gce:q=0.7"``.
        predict_nonlinearity: From logits [N, K] to probabilities [N, K].
        **kwargs: As for `NeuralNetClassifier`.

    >>> from torch import nn
    >>> net = LogitClipNet(nn.Linear, module__in_features=2, module__out_features=3, criterion__tau=1.0, verbose=0)
    >>> net.initialize().predict_proba(torch.zeros(4, 2)).sum(1).round(4).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """

    def __init__(
        self,
        module: Any,
        *args: Any,
        criterion: Any = LogitClip,
        criterion__loss: Any = "ce",
        predict_nonlinearity: Any = partial(torch.softmax, dim=-1),  # noqa: B008  # never changed
        **kwargs: Any,
    ) -> None:
        super().__init__(
            module,
            *args,
            criterion=criterion,
            criterion__loss=kwargs.pop("criterion__criterion", criterion__loss),  # its name before
            predict_nonlinearity=predict_nonlinearity,
            **kwargs,
        )

    def get_params_for(self, prefix: str) -> dict[str, Any]:
        """Return the arguments of a part of the net; the criterion gets its default clip here."""
        given = super().get_params_for(prefix)
        if prefix == "criterion" and self.criterion is LogitClip and given.get("tau") is given.get("temp") is None:
            given["temp"] = DEFAULT_TEMP
        return given
