"""What a killed fit has computed: arrays in the model folder, under a digest of everything they depend on."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

import logitclip
from logitclip import files
from logitclip.files import Json
from logitclip.own_data.kind import Arrays, Source

PARTS = "parts"


class Parts:
    """The finished parts of a fit. Data with another content has other parts."""

    def __init__(self, folder: Path, source: Source) -> None:
        self.folder = folder / PARTS
        self.data = digest_of(source)

    def compute(self, settings: Json, function: Callable[[], Arrays]) -> Arrays:
        """Return the arrays of a part: those of an earlier fit that was killed, or else computed now and kept.

        Beside the data, the settings are everything that the part depends on.
        """
        content = {"data": self.data, "version": logitclip.__version__, **settings}
        key = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:32]
        path = self.folder / f"{key}.npz"
        try:
            with np.load(io.BytesIO(files.read_bytes(path)), allow_pickle=False) as kept:
                return dict(kept)
        except (OSError, ValueError, EOFError, KeyError, BadZipFile):  # missing or damaged
            pass
        arrays = function()
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)  # type: ignore[arg-type]
        files.clear_place(self.folder)
        files.replace(path, buffer.getvalue())
        return arrays

    def remove(self) -> None:
        """Remove the parts: the model folder has what they were for."""
        if self.folder.is_dir() and not self.folder.is_symlink():
            name = f"{'[0-9a-f]' * 32}.npz"
            for path in (*self.folder.glob(name), *self.folder.glob(f"{files.SCRATCH}*-{name}")):
                path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # files of somebody else are in it
                self.folder.rmdir()


def digest_of(source: Source) -> str:
    """Return a digest of the rows, their names and labels, and all that the columns mean."""
    arrays = {
        "features": source.rows.features,
        "unlabelled": None if source.unlabelled is None else source.unlabelled.features,
        **{name: getattr(source, name) for name in ("labels", "weight", "groups", "times", "reviewed")},
    }
    facts = {
        "kind": source.kind.name,
        "classes": list(source.class_names),
        "columns": source.used,
        "names": list(source.rows.names),
        "unlabelled": None if source.unlabelled is None else list(source.unlabelled.names),
        "arrays": {
            name: None if array is None else hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
            for name, array in arrays.items()
        },
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
