"""A run in progress: the rows of `metrics.jsonl`, one for each epoch, and the checkpoints `checkpoints/<epochs done>/`.

Files are written atomically. Only `metrics.jsonl` grows during a run; a resumed run rewrites it from the checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import pickle
from pathlib import Path
from typing import TYPE_CHECKING

from logitclip import files
from logitclip.files import Json
from logitclip.text import first_line

if TYPE_CHECKING:
    from torch import Tensor

    from logitclip.engine import EpochRow

    Checkpoint = tuple[dict[str, Tensor], Json, list[EpochRow]]  # weights, state, rows

log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"  # the subfolder
MOST_CHECKPOINTS = 2  # checkpoints to keep: the last one, and the one before in case the last is damaged


# -- metrics -----------------------------------------------------------------------------------------------------------


def write_rows(path: Path, rows: list[EpochRow]) -> None:
    """Write all rows of `metrics.jsonl`."""
    files.replace(path, _lines(rows))


def _lines(rows: list[EpochRow]) -> bytes:
    return "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()


def append_row(path: Path, row: EpochRow) -> None:
    """Append one row, all of it or nothing; only a crash can cut it short."""
    files.append(path, _lines([row]))


# -- checkpoints -------------------------------------------------------------------------------------------------------

FILES: tuple[str, ...] = ("weights.safetensors", "state.pt", "rows.jsonl")


def save_checkpoint(folder: Path, weights: dict[str, Tensor], state: Json, rows: list[EpochRow], run: str) -> None:
    """Save a checkpoint after `len(rows)` epochs, as one directory that is renamed once, when it is complete."""
    import torch

    state_file = io.BytesIO()
    torch.save(state, state_file)
    parts = (as_safetensors(weights), state_file.getvalue(), _lines(rows))
    contents = dict(zip(FILES, parts, strict=True))
    manifest = {
        "epochs": len(rows),
        "run": run,
        "sha256": {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()},
    }
    contents["manifest.json"] = json.dumps(manifest, indent=1).encode()
    target = folder / CHECKPOINTS / f"{len(rows):06d}"
    scratch = files.scratch_name(target)
    with files.explain_errors(target):
        try:
            files.clear_place(target.parent)
            files.make_folder(target.parent)
            scratch.mkdir()
            for name, content in contents.items():
                files.write_synced(scratch / name, content)
            files.remove(target)  # a damaged one, whose epoch has just been repeated
            scratch.rename(target)
        finally:
            files.remove(scratch)
        files.sync_folder(target.parent)
    older = [checkpoint for checkpoint in _checkpoints(folder) if checkpoint < target]
    for old in older[MOST_CHECKPOINTS - 1 :]:
        with contextlib.suppress(OSError):
            files.remove(old)


def as_safetensors(weights: dict[str, Tensor]) -> bytes:
    """Return weights by name as the content of a safetensors file."""
    from safetensors.torch import save

    # Copies, because safetensors does not store weights that are shared between layers.
    return save({name: weight.detach().to("cpu", copy=True).contiguous() for name, weight in weights.items()})


def load_checkpoint(folder: Path, run: str) -> Checkpoint | None:
    """Return weights, state and rows of the last intact checkpoint of this run; None if there is none.

    Damaged checkpoints and those of another run are logged and skipped.
    """
    import torch
    from safetensors.torch import load

    for checkpoint in _checkpoints(folder):
        try:
            manifest = json.loads(files.read_bytes(checkpoint / "manifest.json"))
            if manifest["run"] != run:
                log.warning("Skipped the checkpoint %s: it belongs to another run.", checkpoint)
                continue
            contents = [files.read_bytes(checkpoint / name) for name in FILES]
            for name, content in zip(FILES, contents, strict=True):
                if hashlib.sha256(content).hexdigest() != manifest["sha256"][name]:
                    raise ValueError(f"{name} has been changed")
            weights, state, rows = contents
            return (
                load(weights),
                torch.load(io.BytesIO(state), weights_only=True, map_location="cpu"),  # no pickle is ever executed
                [json.loads(row) for row in rows.splitlines()],
            )
        except pickle.UnpicklingError:  # torch would advise to load it in a way that executes code
            log.warning("Skipped the checkpoint %s: it holds objects other than tensors and numbers.", checkpoint)
        except Exception as error:  # whatever the damage, an older one may be intact
            log.warning("Skipped the checkpoint %s: it is damaged (%s).", checkpoint, first_line(error))
    return None


def remove_temporary_files(folder: Path) -> None:
    """Remove temporary files of killed processes."""
    for left_over in temporary_files(folder):
        with contextlib.suppress(OSError):
            files.remove(left_over)


def temporary_files(folder: Path) -> list[Path]:
    """Return what writers leave in a run folder when they are killed; links are not followed."""
    places = [place for place in (folder, folder / CHECKPOINTS) if not place.is_symlink()]
    return [path for place in places for path in place.glob(f"{files.SCRATCH}*")]


def _checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints, newest first, without links: checkpoints are removed, and a link may lead anywhere."""
    if (folder / CHECKPOINTS).is_symlink():
        return []
    found = (folder / CHECKPOINTS).glob("[0-9]*")
    return sorted((path for path in found if path.is_dir() and not path.is_symlink()), reverse=True)
