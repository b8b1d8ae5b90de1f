"""LogitClip in Hugging Face's Trainer: `Trainer(..., compute_loss_func=loss_func("ce", "norm:temp=1.5"))`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.functional import one_hot, pad

from logitclip.criterion import Loss, clipped

__all__ = ["loss_func"]

IGNORED = -100  # the label of ignored tokens in Transformers


def loss_func(
    loss: str = "ce", clip: str = "norm:temp=1.5", *, label_smoothing: float = 0.0, shift: bool | None = None
) -> Callable[..., Tensor]:
    """Make the `compute_loss_func` of a Trainer for sequence classification, token classification or language models.

    The sum of the losses is divided by `num_items_in_batch`, the number of labels in the whole accumulated batch, so
    accumulating gradients gives the same result as one large batch. Labels of -100 do not count. Where Trainer uses
    several GPUs in one process (`DataParallel`), it gathers their logits, and the loss is that of the whole batch.

    Args:
        loss: a loss and its knobs, as in ``"gce:q=0.7"``.
        clip: the clip of the logits before the loss: ``"norm:temp=1.5"``, ``"norm:tau=1"``, ``"none"``.
        label_smoothing: share of the target that is spread evenly over all classes. Use this instead of
            `TrainingArguments.label_smoothing_factor`, which Trainer ignores beside a `compute_loss_func`.
        shift: whether the logits at a position predict the next label, as in causal language models. None decides by
            the type of the model's output.

    Returns:
        A function of the model's outputs (their logits are [N, K] or [N, T, K]), labels ([N] or [N, T]) and
        `num_items_in_batch`, which returns a scalar.

    Raises:
        ValueError: if a spec is invalid, or label_smoothing is not in [0, 1).

    >>> import torch
    >>> compute_loss = loss_func("ce", "norm:tau=1")
    >>> compute_loss({"logits": torch.tensor([[30.0, 40.0]])}, torch.tensor([0]))
    tensor(0.7981)
    """
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing must be at least 0 and below 1, got {label_smoothing}.")
    criterion = clipped(Loss(loss, reduction="sum", ignore_index=IGNORED), clip)

    def compute_loss(outputs: Any, labels: Tensor | None, num_items_in_batch: Any = None) -> Tensor:
        if labels is None:
            raise ValueError("The loss needs labels, but the batch has no 'labels'.")
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
        labels = labels.to(logits.device)
        if logits.ndim > 2 and (_shifts(outputs) if shift is None else shift):
            labels = pad(labels, (0, 1), value=IGNORED)[..., 1:]  # shift the labels; copying the logits would cost more
        classes = logits.shape[-1]
        logits, labels = logits.reshape(-1, classes), labels.reshape(-1)
        kept = labels != IGNORED
        items = kept.sum().clamp_min(1) if num_items_in_batch is None else num_items_in_batch
        if label_smoothing:
            logits, labels = logits[kept], one_hot(labels[kept], classes).float()
            labels = (1 - label_smoothing) * labels + label_smoothing / classes
        total = criterion(logits, labels)
        if isinstance(items, Tensor):  # DataParallel: one per GPU, and Trainer has scaled by their number
            items = items.to(total.device).sum()
        return total / items

    return compute_loss


def _shifts(outputs: Any) -> bool:
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
