"""LogitClip in Hugging Face's Trainer: `Trainer(..., compute_loss_func=loss_func("ce", "norm:temp=1.5"))`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad
from torch.utils.checkpoint import checkpoint

from logitclip.clip import CLIPS, takes_weight
from logitclip.criterion import Linked, LogitClip, Loss, build_criterion
from logitclip.losses import LOSSES

__all__ = ["WeightColumn", "loss_func"]

IGNORED = -100  # the label of ignored tokens in Transformers
SMOOTHED_ENTRIES = 2**20  # entries of a block of smoothed targets
WEIGHT_COLUMN = "weight"  # the column of example weights


def loss_func(
    loss: str | Callable[[Tensor, Tensor], Tensor] = "ce",
    clip: str = "norm:temp=1.5",
    *,
    label_smoothing: float = 0.0,
    class_weight: Tensor | None = None,
    ignore_index: int = IGNORED,
    shift: bool | None = None,
) -> Callable[..., Tensor]:
    """Make the `compute_loss_func` of a Trainer: for sequences, tokens, language models, images and their pixels.

    The sum of the losses is divided by `num_items_in_batch`, the number of labels in the whole accumulated batch, so
    accumulating gradients gives the same result as one large batch. Weights do not change that number: give them a mean
    of 1. Labels of `ignore_index` do not count. Where Trainer uses several GPUs in one process (`DataParallel`), it
    gathers their logits, and the loss is that of the whole batch.

    Args:
        loss: A loss and its knobs, as in ``"gce:q=0.7"``; or your own criterion, a function of clipped logits [M, K]
            and labels [M] that returns the sum over them, such as ``nn.CrossEntropyLoss(reduction="sum")``.
        clip: The clip of the logits before the loss: ``"norm:temp=1.5"``, ``"norm:tau=1"``, ``"none"``.
        label_smoothing: Share of the target that is spread evenly over all classes. Use this instead of
            `TrainingArguments.label_smoothing_factor`, which Trainer ignores beside a `compute_loss_func`.
        class_weight: A weight per class, [K].
        ignore_index: The label that does not count; image models often use 255.
        shift: Whether the logits at a position predict the next label, as in causal language models. None decides by
            the type of the model's output.

    Returns:
        A function of the model's outputs, labels and `num_items_in_batch`, which returns a scalar. Logits are [N, K] or
        [N, T, K], or [N, K, H, W] for pixels, which are resized to the labels. Labels are class indices [N], [N, T] or
        [N, H, W]; or probabilities, in the shape of the logits.

    Raises:
        ValueError: If a spec is invalid, label_smoothing is not in [0, 1), or an option does not go with your own
            criterion.

    >>> import torch
    >>> compute_loss = loss_func("ce", "norm:tau=1")
    >>> compute_loss({"logits": torch.tensor([[30.0, 40.0]])}, torch.tensor([0]))
    tensor(0.7981)
    """
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing must be at least 0 and below 1, got {label_smoothing}.")
    own = not isinstance(loss, str)
    if takes_weight(CLIPS[CLIPS.parse(clip)[0]]):
        raise ValueError(f"The clip {clip} needs the last layer of the model, which loss_func does not see.")
    if own:
        _check_own(loss, label_smoothing, class_weight)
        criterion = build_criterion(loss, clip)
    else:
        knobs = {}
        if label_smoothing and LOSSES.parse(loss)[0] == "ce":
            knobs, label_smoothing = {"label_smoothing": label_smoothing}, 0.0  # without a target of its own per class
        base = Loss(loss, reduction="sum", class_weight=class_weight, ignore_index=ignore_index, **knobs)
        criterion = build_criterion(base, clip)

    def compute_loss(
        outputs: Any, labels: Tensor | None, num_items_in_batch: Any = None, weight: Tensor | None = None
    ) -> Tensor:
        if labels is None:
            raise ValueError("The loss needs labels, but the batch has no 'labels'.")
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
        shifts = shift
        if shifts is None and logits.ndim == 3:
            shifts = _model_shifts(outputs)
        logits, labels, per_example = _flatten(logits, labels.to(logits.device), bool(shifts), ignore_index)
        soft = labels.is_floating_point()
        counted = len(labels) if soft else (labels != ignore_index).sum().clamp_min(1)
        items = counted if num_items_in_batch is None else num_items_in_batch
        weights = None if weight is None else weight.to(logits.device).repeat_interleave(per_example)
        if own and weights is not None:
            raise ValueError("A column 'weight' needs a loss by name, such as 'ce': your own criterion gives a sum.")
        criterion.to(logits.device)  # the class weights
        if label_smoothing:
            total = _sum_smoothed(criterion, logits, labels, weights, label_smoothing, ignore_index)
        else:
            total = criterion(logits, labels) if own else criterion(logits, labels, weights)
        if isinstance(items, Tensor):  # DataParallel: one per GPU, and Trainer has scaled by their number
            items = items.to(total.device).sum()
        return total / items

    return compute_loss


class WeightColumn:
    """Mixin for a Trainer whose training set has a column `weight` with a weight for each example.

    Trainer passes the columns of a batch to the model and gives only the labels to the loss. This takes the weights out
    of the batch and hands them to `loss_func`. Every example of the training set needs one; a test set may go without.

    >>> from transformers import Trainer
    >>> class WeightedTrainer(WeightColumn, Trainer):
    ...     pass
    """

    compute_loss_func: Any

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the loss of a batch with the weights in its column `weight`.

        Raises:
            ValueError: If a training batch has no such column.
        """
        weight, compute = inputs.pop(WEIGHT_COLUMN, None), self.compute_loss_func
        if weight is None and model.training:
            raise ValueError(
                "WeightColumn found no column 'weight' in a training batch: give each example one, and set "
                "TrainingArguments(remove_unused_columns=False) if Trainer removed it."
            )
        if weight is not None:
            self.compute_loss_func = partial(compute, weight=weight)
        try:
            return super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]
        finally:
            self.compute_loss_func = compute

    def _set_signature_columns_if_needed(self) -> None:
        """Keep the column: Trainer removes those that the model does not take."""
        super()._set_signature_columns_if_needed()  # type: ignore[misc]
        columns: list[str] = self._signature_columns  # type: ignore[attr-defined]
        columns += [] if WEIGHT_COLUMN in columns else [WEIGHT_COLUMN]


def _check_own(criterion: Any, label_smoothing: float, class_weight: Tensor | None) -> None:
    """Refuse a criterion of the user's own that is clipped already or returns a mean, and options it would ignore."""
    if isinstance(criterion, Linked | LogitClip):
        raise ValueError(
            "This criterion has its clip already: give both apart, as in loss_func('ce', 'norm:temp=1.5') or "
            "loss_func(criterion.criterion, 'norm:temp=1.5')."
        )
    if getattr(criterion, "reduction", "sum") != "sum":
        raise ValueError(
            f"loss_func divides the sum by the number of labels in the accumulated batch, so your criterion needs "
            f"reduction='sum', got {criterion.reduction!r}."
        )
    if label_smoothing or class_weight is not None:
        raise ValueError("label_smoothing and class_weight need a loss by name; set them in your own criterion.")


def _model_shifts(outputs: Any) -> bool:
    """Return whether the model's loss shifts its labels, by the name of the output class."""
    name = type(outputs).__name__
    if "CausalLM" in name:
        return True
    if any(kind in name for kind in ("TokenClassifier", "MaskedLM", "Seq2SeqLM")):
        return False
    raise ValueError(
        f"Cannot tell from an output of type {name} whether its logits predict the next label. Give "
        "loss_func(..., shift=True) for a causal language model and shift=False otherwise."
    )


def _flatten(logits: Tensor, labels: Tensor, shift: bool, ignore_index: int) -> tuple[Tensor, Tensor, int]:
    """Return logits [M, K], labels [M] or [M, K], and the number of labels of an example."""
    soft = labels.is_floating_point()
    if logits.ndim == 4:  # pixels, with the classes in dimension 1
        size = labels.shape[-2:]
        if logits.shape[-2:] != size:
            logits = interpolate(logits, size=tuple(size), mode="bilinear", align_corners=False)
        logits = logits.movedim(1, -1)
        labels = labels.movedim(1, -1) if soft else labels
    elif logits.ndim == 3 and shift:  # shift the labels; copying the logits would cost more
        if soft:
            raise ValueError("Probabilities of the next token are not supported: give token ids, or shift=False.")
        labels = pad(labels, (0, 1), value=ignore_index)[..., 1:]
    fits = logits.shape if soft else logits.shape[:-1]
    if labels.shape != fits:
        kind = "Probabilities" if soft else "Labels"
        raise ValueError(
            f"{kind} for logits of shape {tuple(logits.shape)} (classes last) must have the shape {tuple(fits)}, got "
            f"{tuple(labels.shape)}."
        )
    classes = logits.shape[-1]
    labels = labels.reshape(-1, classes) if soft else labels.reshape(-1)
    return logits.reshape(-1, classes), labels, len(labels) // max(1, fits[0])


def _sum_smoothed(
    criterion: Any, logits: Tensor, labels: Tensor, weights: Tensor | None, smoothing: float, ignore_index: int
) -> Tensor:
    """Return the sum of the losses of smoothed labels, block by block: a target for each class takes much memory."""
    classes = logits.shape[-1]

    def of_block(logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        if labels.is_floating_point():
            return criterion(logits, (1 - smoothing) * labels + smoothing / classes, weights)
        kept = labels != ignore_index
        target = torch.full_like(logits, smoothing / classes, dtype=torch.float32)
        target.scatter_(1, torch.where(kept, labels, 0)[:, None], 1 - smoothing + smoothing / classes)
        return criterion(logits, target, kept.to(target.dtype) if weights is None else weights * kept)

    rows = max(1, SMOOTHED_ENTRIES // classes)
    parts = (logits.split(rows), labels.split(rows), [None] * len(labels) if weights is None else weights.split(rows))
    sums = [checkpoint(of_block, *part, use_reentrant=False) for part in zip(*parts, strict=False)]
    return torch.stack(sums).sum()
