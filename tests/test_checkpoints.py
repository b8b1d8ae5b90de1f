"""Rows and checkpoints. The tests kill real processes and simulate full disks."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import pickle
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from disk import everything_in, files_of_at_most, read_rows
from interrupts import interrupted_at_every_line

from logitclip import files
from logitclip.runs import checkpoints

ROWS = [{"epoch": 0, "loss": 1.5, "val_accuracy": None}, {"epoch": 1, "loss": 0.1 + 0.2, "val_accuracy": None}]


# -- metrics -----------------------------------------------------------------------------------------------------------


def test_a_row_is_appended_whole_or_not_at_all(tmp_path):
    path = tmp_path / "metrics.jsonl"
    checkpoints.write_rows(path, ROWS[:1])
    before = path.read_bytes()
    with files_of_at_most(len(before) + 10), pytest.raises(files.CannotWrite, match="metrics"):
        checkpoints.append_row(path, ROWS[1])
    assert path.read_bytes() == before  # not even the ten bytes that fitted
    checkpoints.append_row(path, ROWS[1])
    assert read_rows(path) == ROWS


# -- checkpoints -------------------------------------------------------------------------------------------------------


def rows(count: int) -> list[dict[str, float]]:
    return [{"epoch": epoch, "loss": 1 / (epoch + 1)} for epoch in range(count)]


def save(folder: Path, epochs: int, run: str = "run") -> Path:
    weights = {"w": torch.full((3, 2, 4, 4), float(epochs)).to(memory_format=torch.channels_last)}
    state = {"method": {"momentum": [torch.full((3,), float(epochs))]}, "seconds": 1.5, "name": "x", "none": None}
    checkpoints.save_checkpoint(folder, weights, state, rows(epochs), run)
    return folder / "checkpoints" / f"{epochs:06d}"


def load_epoch(folder: Path, run: str = "run") -> int | None:
    """Load the checkpoint, check that its parts agree, and return its number of epochs."""
    found = checkpoints.load_checkpoint(folder, run)
    if found is None:
        return None
    weights, state, table = found
    assert table == rows(len(table))
    assert weights["w"].unique().tolist() == [len(table)]
    assert state["method"]["momentum"][0].unique().tolist() == [len(table)]
    assert state["seconds"] == 1.5
    return len(table)


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "checkpoints").iterdir())


def test_checkpoints_come_back_and_two_are_kept(tmp_path):
    assert checkpoints.load_checkpoint(tmp_path, "run") is None
    for epochs in (1, 2, 5):
        save(tmp_path, epochs)
        assert load_epoch(tmp_path) == epochs
    assert names(tmp_path) == ["000002", "000005"]


@pytest.mark.parametrize("name", [*checkpoints.FILES, "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "empty"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(tmp_path, caplog, name, damage):
    save(tmp_path, 1)
    file = save(tmp_path, 2) / name
    content = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    elif damage == "flip":
        content[len(content) // 2] ^= 0x40
        file.write_bytes(content)
    else:
        file.write_bytes(content[: len(content) // 2 if damage == "cut" else 0])
    assert load_epoch(tmp_path) == 1
    assert str(tmp_path / "checkpoints" / "000002") in caplog.text
    assert "Skipped the checkpoint" in caplog.text


def test_a_checkpoint_of_another_run_is_named_and_the_one_before_used(tmp_path, caplog):
    save(tmp_path, 1)
    save(tmp_path, 2, run="foreign")
    assert load_epoch(tmp_path) == 1
    assert "000002: it belongs to another run" in caplog.text


class Malicious:
    def __reduce__(self):
        return os.mkdir, (os.environ["MALICIOUS"],)


def test_no_pickle_is_executed(tmp_path, caplog, monkeypatch):
    save(tmp_path, 1)
    checkpoint = save(tmp_path, 2)
    monkeypatch.setenv("MALICIOUS", str(tmp_path / "executed"))
    for attack in (
        lambda file: torch.save({"x": Malicious()}, file),
        lambda file: pickle.dump(Malicious(), file, protocol=2),
    ):
        with (checkpoint / "state.pt").open("wb") as file:
            attack(file)
        manifest = json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))
        manifest["sha256"]["state.pt"] = hashlib.sha256((checkpoint / "state.pt").read_bytes()).hexdigest()
        (checkpoint / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
        caplog.clear()
        assert load_epoch(tmp_path) == 1
        assert "000002: it holds objects other than tensors and numbers." in caplog.text
        assert "weights_only" not in caplog.text  # torch's advice is to switch its safety off
        assert not (tmp_path / "executed").exists()


def test_new_checkpoints_are_not_displaced_by_damaged_ones_with_higher_numbers(tmp_path):
    save(tmp_path, 1)
    for epochs in (8, 9):
        (save(tmp_path, epochs) / "state.pt").write_bytes(b"")
    save(tmp_path, 1)  # the repeated epoch
    save(tmp_path, 2)
    save(tmp_path, 3)
    assert load_epoch(tmp_path) == 3
    assert names(tmp_path) == ["000002", "000003", "000008", "000009"]
    save(tmp_path, 9)
    assert load_epoch(tmp_path) == 9


def test_a_full_disk_leaves_the_last_checkpoint_and_no_other_file(tmp_path):
    save(tmp_path, 1)
    before = everything_in(tmp_path)
    for size in (0, 100, 700):
        with (
            files_of_at_most(size),
            pytest.raises(files.CannotWrite, match=r"Cannot write .*000002: File too large\."),
        ):
            save(tmp_path, 2)
        assert everything_in(tmp_path) == before
    assert names(tmp_path) == ["000001"]


def test_a_real_full_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", disk], capture_output=True).returncode:
        pytest.skip("mounting needs root")
    try:
        folder = disk / "run"
        checkpoints.write_rows(folder / "metrics.jsonl", ROWS)
        save(folder, 1)
        before = everything_in(folder)
        with (disk / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
            while True:
                filler.write(bytes(4096))
        full = pytest.raises(files.CannotWrite, match="No space left on device")
        with full:
            save(folder, 2)
        with full:
            files.write(folder / "result.json", bytes(5000))
        with full:
            checkpoints.append_row(folder / "metrics.jsonl", {"epoch": 2, "text": "x" * 5000})
        assert everything_in(folder) == before
        assert names(folder) == ["000001"]
        assert load_epoch(folder) == 1
    finally:
        subprocess.run(["umount", disk], check=True)


def test_an_interrupt_inside_a_write_leaves_nothing_and_can_be_repeated(tmp_path, monkeypatch):
    calls = []

    def interrupted(_):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 1)
    assert names(tmp_path) == []
    save(tmp_path, 1)
    assert load_epoch(tmp_path) == 1


def test_an_interrupt_at_any_line_leaves_whole_checkpoints(tmp_path):
    def saved(folder):
        for epochs in (1, 2, 3):
            save(folder, epochs)

    found = []
    for folder in interrupted_at_every_line(saved, tmp_path, checkpoints, files, step=3):
        assert not list(folder.rglob(f"{files.SCRATCH}*"))
        found.append(load_epoch(folder))
    assert [epoch for epoch, _ in itertools.groupby(found)] == [None, 1, 2, 3]


def test_what_a_kill_inside_a_write_leaves_is_tidied(tmp_path):
    save(tmp_path, 1)
    pid = os.fork()
    if not pid:  # dies in the middle of the second file
        calls = []

        def die(_):
            calls.append(1)
            if len(calls) == 2:
                os.kill(os.getpid(), signal.SIGKILL)

        os.fsync = die
        save(tmp_path, 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    (left_over,) = (name for name in names(tmp_path) if name.startswith(files.SCRATCH))
    assert len(list((tmp_path / "checkpoints" / left_over).iterdir())) == 2
    assert load_epoch(tmp_path) == 1
    (tmp_path / f"{files.SCRATCH}0-result.json").write_text("{", encoding="utf-8")
    checkpoints.remove_temporary_files(tmp_path)
    assert names(tmp_path) == ["000001"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoints"]


def test_weights_shared_between_layers_are_saved(tmp_path):
    layer = torch.nn.Linear(3, 3)
    model = torch.nn.Sequential(layer, layer)
    checkpoints.save_checkpoint(tmp_path, model.state_dict(), {}, rows(1), "run")
    found = checkpoints.load_checkpoint(tmp_path, "run")
    assert found is not None
    for name, weight in model.state_dict().items():
        assert torch.equal(found[0][name], weight)


def test_a_rename_is_synced(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.readlink(f"/proc/self/fd/{handle}")))
    files.write(tmp_path / "file", b"")
    save(tmp_path, 1)
    assert synced[1] == str(tmp_path)
    assert synced[-1] == str(tmp_path / "checkpoints")


def test_a_folder_that_cannot_be_opened_is_not_synced(tmp_path, monkeypatch):
    real = os.open

    def as_on_windows(path, *args, **kwargs):
        if Path(path).is_dir():
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", as_on_windows)
    files.write(tmp_path / "file", b"content")
    assert (tmp_path / "file").read_bytes() == b"content"
    save(tmp_path, 1)
    assert (tmp_path / "checkpoints" / "000001" / "manifest.json").exists()
