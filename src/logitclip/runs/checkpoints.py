"""A run in progress: the rows of `metrics.jsonl`, one for each epoch, and the checkpoints `checkpoints/<epochs done>/`.

Files are written atomically. Only `metrics.jsonl` grows during a run; a resumed run rewrites it from the checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import shutil
from pathlib import Path
from typing import Any

from logitclip import files
from logitclip.registry import first_line

log = logging.getLogger(__name__)

KEPT = 2  # checkpoints to keep: the last one, and the one before in case the last is damaged


# -- metrics -----------------------------------------------------------------------------------------------------------


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write all rows of `metrics.jsonl`."""
    files.write(path, _lines(rows))


def _lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Append one row, all of it or nothing; only a crash can cut it short."""
    files.append(path, _lines([row]))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl`, without a last row that a crash cut short."""
    rows = []
    with contextlib.suppress(FileNotFoundError), path.open(encoding="utf-8") as stream:
        for line in stream:
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
    return rows


# -- checkpoints -------------------------------------------------------------------------------------------------------

FILES: tuple[str, ...] = ("weights.safetensors", "state.pt", "rows.jsonl")


def save_checkpoint(
    folder: Path, weights: dict[str, Any], state: dict[str, Any], rows: list[dict[str, Any]], run: str
) -> None:
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
    target = folder / "checkpoints" / f"{len(rows):06d}"
    scratch = files.scratch_name(target)
    with files.explained(target):
        try:
            scratch.mkdir(parents=True)
            for name, content in contents.items():
                files.write_synced(scratch / name, content)
            if target.exists():  # a damaged one, whose epoch has just been repeated
                shutil.rmtree(target)
            scratch.rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        files.sync_folder(target.parent)
    older = [checkpoint for checkpoint in _checkpoints(folder) if checkpoint < target]
    for old in older[KEPT - 1 :]:
        shutil.rmtree(old, ignore_errors=True)


def as_safetensors(weights: dict[str, Any]) -> bytes:
    """Weights by name as the content of a safetensors file."""
    from safetensors.torch import save

    # Copies, because safetensors does not store weights that are shared between layers.
    return save({name: weight.detach().to("cpu", copy=True).contiguous() for name, weight in weights.items()})


Checkpoint = tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]


def load_checkpoint(folder: Path, run: str) -> Checkpoint | None:
    """Weights, state and rows of the last intact checkpoint of this run; None if there is none.

    Damaged checkpoints and those of another run are logged and skipped.
    """
    import torch
    from safetensors.torch import load

    for checkpoint in _checkpoints(folder):
        try:
            manifest = json.loads((checkpoint / "manifest.json").read_bytes())
            if manifest["run"] != run:
                log.warning("Skipped the checkpoint %s: it belongs to another run.", checkpoint)
                continue
            contents = [(checkpoint / name).read_bytes() for name in FILES]
            for name, content in zip(FILES, contents, strict=True):
                if hashlib.sha256(content).hexdigest() != manifest["sha256"][name]:
                    raise ValueError(f"{name} has been changed")
            weights, state, rows = contents
            return (
                load(weights),
                torch.load(io.BytesIO(state), weights_only=True, map_location="cpu"),  # no pickle is ever executed
                [json.loads(row) for row in rows.splitlines()],
            )
        except Exception as error:  # whatever the damage, an older one may be intact
            log.warning("Skipped the checkpoint %s: it is damaged (%s).", checkpoint, first_line(error))
    return None


def tidy(folder: Path) -> None:
    """Remove temporary files of killed processes."""
    for left_over in (*folder.glob(f"{files.SCRATCH}*"), *(folder / "checkpoints").glob(f"{files.SCRATCH}*")):
        if left_over.is_dir():
            shutil.rmtree(left_over, ignore_errors=True)
        else:
            left_over.unlink(missing_ok=True)


def _checkpoints(folder: Path) -> list[Path]:
    """Newest first."""
    return sorted((p for p in (folder / "checkpoints").glob("[0-9]*") if p.is_dir()), reverse=True)
