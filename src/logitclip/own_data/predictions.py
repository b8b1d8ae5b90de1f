"""The file with out-of-fold predictions of every row: its most probable classes, by models not trained on it."""

from __future__ import annotations

import io

import numpy as np

MOST = 5  # classes kept for a row


def predictions_to_bytes(probabilities: np.ndarray) -> bytes:
    """Keep the most probable classes of each row.

    Args:
        probabilities: Calibrated probabilities [N, K]; NaN in rows without an out-of-fold prediction.

    Returns:
        An npz file with `classes`, int32 [N, T], -1 where there is none, and `probabilities`, float16 [N, T], the most
        probable first; T is at most 5.
    """
    known = ~np.isnan(probabilities).any(axis=1, keepdims=True)
    shown = np.where(known, probabilities, 0.0)
    order = np.argsort(-shown, axis=1, kind="stable")[:, :MOST]
    chosen = np.take_along_axis(shown, order, 1)
    content = io.BytesIO()
    np.savez_compressed(
        content,
        classes=np.where(known, order, -1).astype(np.int32),
        probabilities=chosen.astype(np.float16),
    )
    return content.getvalue()


def predictions_from_bytes(content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Read what `predictions_to_bytes` wrote.

    >>> classes, probabilities = predictions_from_bytes(predictions_to_bytes(np.array([[0.25, 0.75], [np.nan] * 2])))
    >>> classes.tolist(), probabilities.tolist()
    ([[1, 0], [-1, -1]], [[0.75, 0.25], [0.0, 0.0]])
    """
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        return file["classes"], file["probabilities"].astype(float)
