"""Checks of logits and targets, and of the knobs of losses."""

from __future__ import annotations

import torch
from torch import Tensor

from logitclip.clip import check_logits, eager_on_cpu

_everywhere = False  # set by `check_values`


def check_values(everywhere: bool = True) -> None:
    """Check the values of targets on GPUs and in compiled code too, for finding errors.

    By default they are checked in eager mode on a CPU only: elsewhere a check waits for the device, and breaks the
    graph of `torch.compile` (so `fullgraph=True` fails). Shapes and types are always checked.

    Args:
        everywhere: Whether to check everywhere; False restores the default.

    >>> check_values()  # before the first step, while you look for an error
    >>> check_values(False)
    """
    global _everywhere
    _everywhere = everywhere


def check_class_dim(logits: Tensor, dim: int = -1) -> None:
    """Refuse logits with fewer than two classes along `dim`.

    Raises:
        ValueError: If there are fewer, or the logits are integers or a single number.
    """
    check_logits(logits)
    if logits.shape[dim] < 2:
        raise ValueError(
            f"There must be at least two logits per example, got {logits.shape[dim]}: turn a single one into two, for "
            "instance by torch.cat([-logits, logits], 1) / 2, and use class indices 0 and 1."
        )


def check_target(
    logits: Tensor, target: Tensor, ignore_index: int | None = None, dim: int = -1
) -> tuple[Tensor, Tensor | None]:
    """Check a target against logits with the classes along `dim`.

    Values are checked in eager mode on a CPU only, see `check_values`: elsewhere that would wait for the device.

    Args:
        logits: [N, K, ...] for ``dim=1``.
        target: Class indices [N, ...], or probabilities in the shape of the logits.
        ignore_index: A class index that marks examples to leave out.
        dim: The class dimension.

    Returns:
        The target, with 0 in place of `ignore_index`, and the mask of the examples to keep, or None for all of them.

    Raises:
        TypeError: If the target is not a tensor.
        ValueError: If its shape does not fit or its values are out of range.
    """
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a tensor, got {type(target).__name__}: use torch.as_tensor(target).")
    check_class_dim(logits, dim)
    shape, classes = logits.shape, logits.shape[dim]
    without_classes = shape[:dim] + shape[dim:][1:]
    look = _everywhere or eager_on_cpu(logits)
    if target.is_floating_point():
        if target.shape != shape:
            hint = " Class indices must be integers: use target.long()." if target.shape == without_classes else ""
            raise ValueError(
                f"Probability targets must have the shape of the logits, {tuple(shape)}, "
                f"got {tuple(target.shape)}.{hint}"
            )
        if look and target.numel():
            tolerance = 1e-3 if target.dtype in (torch.float32, torch.float64) else 2e-2
            sums = target.sum(dim, dtype=torch.float32)
            if not (target.min() >= 0 and (sums - 1).abs().max() <= tolerance):  # also refuses NaN
                single = " If these are N single logits, use torch.stack([-z, z], 1) / 2 and target.long()."
                raise ValueError(
                    "Probability targets must be non-negative and sum to 1 over the classes. Multi-label targets are "
                    "not supported: train one two-class problem per label, or normalise the rows."
                    + (single if logits.ndim == 1 else "")
                )
        return target, None
    if target.shape != without_classes:
        if target.shape == shape:
            raise ValueError(
                f"An integer target in the shape of the logits, {tuple(shape)}, is a multi-label target, which is not "
                "supported: give class indices (one-hot rows: target.argmax(1)), or probabilities as target.float()."
            )
        raise ValueError(
            f"Logits of shape {tuple(shape)} need targets of shape {tuple(without_classes)}, got {tuple(target.shape)}."
        )
    if target.dtype != torch.int64:
        target = target.long()
    if look:
        if not target.numel():
            return target, None
        low, high = map(int, target.aminmax())
        if ignore_index is None or not low <= ignore_index <= high:
            if low < 0 or high >= classes:
                raise ValueError(f"Targets must lie in 0..{classes - 1}, got {low if low < 0 else high}.")
            return target, None
    elif ignore_index is None:
        return target, None
    kept = target != ignore_index
    if look and bool((kept & ((target < 0) | (target >= classes))).any()):
        bad = target[kept & ((target < 0) | (target >= classes))][0]
        raise ValueError(f"Targets must lie in 0..{classes - 1} or be ignore_index={ignore_index}, got {int(bad)}.")
    return target.where(kept, 0), kept
