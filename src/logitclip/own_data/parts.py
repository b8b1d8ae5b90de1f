"""What a killed fit has computed: arrays in the model folder, under a digest of everything they depend on."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import logitclip
from logitclip import files
from logitclip.own_data.kind import Source

FOLDER = "parts"
Arrays = dict[str, np.ndarray]


class Parts:
    """The finished parts of a fit.

    Args:
        folder: The model folder.
        source: The data; another content gives other parts.
    """

    def __init__(self, folder: Path, source: Source) -> None:
        self.folder = folder / FOLDER
        self.data = digest_of(source)

    def compute(self, what: dict[str, Any], function: Callable[[], Arrays]) -> Arrays:
        """Return the arrays of a part: those of an earlier fit that was killed, or else computed now and kept.

        Args:
            what: Everything beside the data that the part depends on.
            function: Computes the arrays.
        """
        content = {"data": self.data, "version": logitclip.__version__, **what}
        key = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:32]
        path = self.folder / f"{key}.npz"
        if path.is_file():
            try:
                with np.load(path, allow_pickle=False) as kept:
                    return dict(kept)
            except (ValueError, OSError, EOFError, KeyError):  # damaged: compute it again
                pass
        arrays = function()
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)  # type: ignore[arg-type]
        files.replace(path, buffer.getvalue())
        return arrays

    def remove(self) -> None:
        """Remove the parts: the model folder has what they were for."""
        if self.folder.is_dir() and not self.folder.is_symlink():
            shutil.rmtree(self.folder, ignore_errors=True)


def digest_of(source: Source) -> str:
    """Return a digest of the rows, their labels and all that the columns mean."""
    content = hashlib.sha256()
    facts = [source.kind.name, list(source.class_names), len(source.labels)]
    content.update(json.dumps(facts).encode())
    arrays = (source.rows.features, source.labels, source.weight, source.groups, source.times, source.reviewed)
    for array in arrays:
        content.update(b"" if array is None else np.ascontiguousarray(array).tobytes())
    return content.hexdigest()
