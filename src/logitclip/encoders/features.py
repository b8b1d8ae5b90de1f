"""The cache of features: computed once, in blocks of rows, each a file with its digest.

`<cache>/<key>/` belongs to one encoder and one set of inputs. A block is a NumPy array in float16, and its name holds
the digest of its bytes: `000012-<sha256>.npy`. To resume is to compute the blocks that are missing.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import re
import shutil
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from logitclip import files
from logitclip.data._images import ImageFiles
from logitclip.data._texts import TextInputs
from logitclip.data.dataset import Examples
from logitclip.encoders import InputKind, identify

log = logging.getLogger(__name__)

BLOCK_ROWS = 2048  # rows
CACHE_FORMAT = 1
WAIT = 7 * 24 * 3600.0  # seconds to wait for another process that computes the same features
UNUSED = 24 * 3600.0  # seconds that features wait for their first run
ABOUT, USERS, LOCK = "about.json", "users.txt", "lock"
LARGEST_FLOAT16 = 65504.0

Inputs = Tensor | ImageFiles | TextInputs
InputBlock = tuple[int, Inputs]
ComputeBlocks = Callable[[Iterator[InputBlock]], Iterable[tuple[int, np.ndarray]]]  # features of blocks, in any order
OnRows = Callable[[int, int], None]  # rows done so far, all rows


def cache_folder() -> Path:
    """Return the folder of all features: $LOGITCLIP_FEATURES, else `logitclip/features` in the user's cache."""
    if asked := os.environ.get("LOGITCLIP_FEATURES"):
        return Path(os.path.expanduser(asked))
    if sys.platform == "win32":
        cache = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        cache = "~/Library/Caches"
    else:
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(cache)) / "logitclip" / "features"


def input_kind(inputs: Examples) -> InputKind:
    """Return what inputs are.

    Raises:
        ValueError: If they are neither images nor texts.
    """
    if isinstance(inputs, TextInputs):
        return "texts"
    if isinstance(inputs, ImageFiles) or (
        isinstance(inputs, Tensor) and inputs.dtype == torch.uint8 and inputs.dim() == 4
    ):
        return "images"
    shape = list(getattr(inputs, "shape", ()))[1:]
    raise ValueError(f"An encoder takes images or texts, not features of shape {shape}: leave it out, or give text.")


def digest_inputs(inputs: Inputs) -> str:
    """Return the digest of inputs: bytes of images in memory and of texts; name, size and time of files."""
    found = hashlib.sha256(f"{type(inputs).__name__} {len(inputs)}".encode())
    if isinstance(inputs, Tensor):
        found.update(f"{tuple(inputs.shape)}".encode())
        found.update(inputs.contiguous().numpy().data.cast("B"))
    elif isinstance(inputs, TextInputs):
        for text in inputs.values:
            encoded = text.encode("utf-8", "surrogatepass")
            found.update(struct.pack("<q", len(encoded)) + encoded)
    else:
        for line in inputs.describe():
            found.update(line)
    return found.hexdigest()


@dataclass(frozen=True)
class Features:
    """The features of one set of inputs by one encoder, in their folder."""

    folder: Path
    rows: int

    @classmethod
    def of(cls, inputs: Inputs, spec: str) -> Features:
        """Find the features of inputs by the encoder `spec`, computed or not."""
        about = {
            "format": CACHE_FORMAT,
            "block": BLOCK_ROWS,
            "encoder": identify(spec),
            "inputs": digest_inputs(inputs),
        }
        key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]
        features = cls(cache_folder() / key, len(inputs))
        if not (features.folder / ABOUT).is_file():
            files.write_json(features.folder / ABOUT, {**about, "rows": len(inputs), "name": spec})
        return features

    @property
    def key(self) -> str:
        return self.folder.name

    def missing_blocks(self) -> list[int]:
        """Return the numbers of the blocks that have no file."""
        present = set(self._paths())
        return [number for number in range(-(-self.rows // BLOCK_ROWS)) if number not in present]

    def complete(self, inputs: Inputs, compute: ComputeBlocks, on_rows: OnRows | None = None) -> None:
        """Compute the missing blocks, while no other process does.

        Args:
            inputs: The inputs that the features were made for.
            compute: From blocks of inputs to their features.
            on_rows: Called after each block, and once before the first.
        """
        if not self.missing_blocks():
            return
        waiting = f"Another process computes the features in {self.folder}: waiting for it."
        with files.lock(self.folder / LOCK, WAIT, waiting=waiting):
            for path in self.folder.glob(f"{files.SCRATCH}*"):  # of a process that was killed
                path.unlink(missing_ok=True)
            wanted = self.missing_blocks()
            done = self.rows - sum(len(_block_positions(number, self.rows)) for number in wanted)
            if on_rows is not None:
                on_rows(done, self.rows)
            blocks = ((number, select_inputs(inputs, _block_positions(number, self.rows))) for number in wanted)
            for number, features in compute(blocks):
                self._write(number, features)
                done += len(features)
                if on_rows is not None:
                    on_rows(done, self.rows)

    def _write(self, number: int, features: np.ndarray) -> None:
        content = io.BytesIO()
        np.save(content, np.clip(features, -LARGEST_FLOAT16, LARGEST_FLOAT16).astype(np.float16), allow_pickle=False)
        digest = hashlib.sha256(content.getbuffer()).hexdigest()
        files.replace(self.folder / f"{number:06d}-{digest}.npy", content.getvalue())

    def read(self) -> np.ndarray:
        """Return all features, float16 [N, D], after a check of every block.

        Raises:
            ValueError: If a block is damaged. It is removed, so that the next attempt computes it again.
        """
        paths = self._paths()
        blocks = [self._block(paths[number]) for number in range(-(-self.rows // BLOCK_ROWS))]
        return np.concatenate(blocks)

    def _block(self, path: Path) -> np.ndarray:
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != path.stem.partition("-")[2]:
            path.unlink(missing_ok=True)
            raise ValueError(f"{path} was damaged and has been removed: start again to compute it once more.")
        return np.load(io.BytesIO(content), allow_pickle=False)

    def _paths(self) -> dict[int, Path]:
        found = {}
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if match := re.fullmatch(r"(\d{6})-[0-9a-f]{64}\.npy", path.name):
                found[int(match[1])] = path
        return found

    def add_user(self, run: Path) -> None:
        """Record that a run uses these features, so that `remove_unused` keeps them."""
        line, users = f"{run.resolve()}\n", self.folder / USERS
        if not self.folder.is_dir():  # removed since they were read
            return
        if not users.is_file() or line not in users.read_text(encoding="utf-8"):
            files.append(users, line.encode())


def _block_positions(number: int, rows: int) -> Tensor:
    return torch.arange(number * BLOCK_ROWS, min((number + 1) * BLOCK_ROWS, rows))


def select_inputs(inputs: Inputs, index: Tensor) -> Inputs:
    """Return the inputs at `index`."""
    return inputs[index] if isinstance(inputs, Tensor) else inputs.select(index)


def read_examples(inputs: Inputs, size: int) -> Sequence[Callable[[], Any]]:
    """Return a function for each input that reads it: a PIL image in RGB, or a text."""
    if isinstance(inputs, TextInputs):
        return [partial(inputs.values.__getitem__, i) for i in range(len(inputs))]
    if isinstance(inputs, ImageFiles):
        return [partial(inputs.open, i, size) for i in range(len(inputs))]
    from PIL import Image

    pixels = inputs.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).contiguous().numpy()
    return [partial(Image.fromarray, pixels[i]) for i in range(len(pixels))]


def remove_unused(*, dry: bool = False) -> dict[str, int]:
    """Remove the features that no run names any more.

    Args:
        dry: Only list them. Features that wait for their first run are kept for a day.

    Returns:
        The bytes of each folder of features that was removed.
    """
    freed = {}
    for folder in sorted(cache_folder().glob("[0-9a-f]" * 32)):
        about, users = files.read_json(folder / ABOUT), folder / USERS
        if not isinstance(about, dict) or about.get("format") != CACHE_FORMAT:
            continue
        runs = users.read_text(encoding="utf-8").splitlines() if users.is_file() else []
        if any(Path(run, "config.json").is_file() for run in runs):
            continue
        if not runs and time.time() - max(file.stat().st_mtime for file in folder.iterdir()) < UNUSED:
            continue
        try:
            with files.lock(folder / LOCK, 0, late="in use"):
                freed[str(folder)] = sum(file.stat().st_size for file in folder.iterdir())
                if not dry:
                    shutil.rmtree(folder)
        except TimeoutError:  # they are being computed
            continue
    return freed
