"""The run folder: rows, claims, checkpoints, results. The tests kill real processes and simulate full disks."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from disk import everything_in, files_of_at_most

from logitclip import files
from logitclip.runs import folder as run_folder

ROWS = [{"epoch": 0, "loss": 1.5, "val_accuracy": None}, {"epoch": 1, "loss": 0.1 + 0.2, "val_accuracy": None}]


# -- metrics -----------------------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(files.CannotWrite, match=r"Cannot write .*file/run: Not a directory\."),
        run_folder.claim(tmp_path / "file" / "run"),
    ):
        pass


def test_a_row_is_appended_whole_or_not_at_all(tmp_path):
    path = tmp_path / "metrics.jsonl"
    run_folder.write_rows(path, ROWS[:1])
    before = path.read_bytes()
    with files_of_at_most(len(before) + 10), pytest.raises(files.CannotWrite, match="metrics"):
        run_folder.append_row(path, ROWS[1])
    assert path.read_bytes() == before  # not even the ten bytes that fitted
    run_folder.append_row(path, ROWS[1])
    assert run_folder.read_rows(path) == ROWS


def test_a_row_cut_by_a_crash_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    run_folder.write_rows(path, ROWS)
    with path.open("a") as stream:
        stream.write('{"epoch": 2, "lo')
    assert run_folder.read_rows(path) == ROWS
    assert run_folder.read_rows(tmp_path / "none") == []


# -- claims ------------------------------------------------------------------------------------------------------------

CLAIM = """
import sys, time
from pathlib import Path
from logitclip import files
from logitclip.runs import folder as run_folder
try:
    with run_folder.claim(Path(sys.argv[1])):
        print("got it", flush=True)
        time.sleep(float(sys.argv[2]))
except run_folder.Claimed as error:
    print(error, flush=True)
"""


def claiming(folder: Path, seconds: float, code: str = CLAIM) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, str(folder), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def leave_claim(folder: Path, **owner: object) -> Path:
    file = folder / "claim"
    file.write_text(json.dumps({"host": "elsewhere", "machine": "elsewhere", "pid": 1, "started": "1", **owner}))
    return file


def make_older(file: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(file, (then, then))


def test_one_works_and_the_other_is_told_by_whom(tmp_path):
    with run_folder.claim(tmp_path):
        with (
            pytest.raises(run_folder.Claimed, match=rf"trained by process {os.getpid()} on ") as caught,
            run_folder.claim(tmp_path),
        ):
            pass
        assert str(tmp_path / "claim") in str(caught.value)
    assert not (tmp_path / "claim").exists()
    with run_folder.claim(tmp_path):
        pass


def test_the_claim_of_a_killed_process_is_taken_over_at_once(tmp_path):
    process = claiming(tmp_path, 60)
    try:
        assert first_line(process) == "got it"
        with pytest.raises(run_folder.Claimed, match=f"process {process.pid} "), run_folder.claim(tmp_path):
            pass
    finally:
        process.kill()
        process.wait()
    start = time.monotonic()
    with run_folder.claim(tmp_path):
        assert time.monotonic() - start < 1


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_a_dead_process_that_its_parent_has_not_asked_about_holds_no_claim(tmp_path):
    process = claiming(tmp_path, 60)
    first_line(process)
    process.kill()
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    with run_folder.claim(tmp_path):
        pass
    process.wait()


def test_of_many_that_take_over_a_void_claim_one_gets_it(tmp_path):
    leave_claim(tmp_path, machine=run_folder._machine(), pid=2**22 + 1)  # there is no such process
    processes = [claiming(tmp_path, 3) for _ in range(6)]
    answers = [first_line(process) for process in processes]
    for process in processes:
        process.kill()
        process.wait()
    assert answers.count("got it") == 1
    assert sum("is being trained by process" in answer for answer in answers) == 5


def test_a_reused_process_number_is_not_the_owner(tmp_path):
    leave_claim(tmp_path, machine=run_folder._machine(), pid=os.getpid(), started="0")
    with run_folder.claim(tmp_path):
        pass


def test_another_machine_is_believed_until_it_is_silent(tmp_path):
    file = leave_claim(tmp_path, pid=2**22 + 1)
    with pytest.raises(run_folder.Claimed, match="on elsewhere"), run_folder.claim(tmp_path):
        pass
    make_older(file, run_folder.SILENCE - 20)
    with pytest.raises(run_folder.Claimed, match="on elsewhere"), run_folder.claim(tmp_path):
        pass
    make_older(file, run_folder.SILENCE + 20)
    with run_folder.claim(tmp_path):
        pass


def test_a_claim_stamped_in_the_future_is_void(tmp_path):
    file = leave_claim(tmp_path)
    make_older(file, -20)  # clocks may differ a little
    with pytest.raises(run_folder.Claimed, match="on elsewhere"), run_folder.claim(tmp_path):
        pass
    make_older(file, -1000)
    with run_folder.claim(tmp_path):
        pass


@pytest.mark.parametrize("content", ["[1]", "3", "null", '"text"', '{"pid": "x"}', '{"pid": [1]}', "[" * 100_000])
def test_a_claim_of_another_json_type_is_soon_void(tmp_path, content):
    file = tmp_path / "claim"
    file.write_text(content)
    with pytest.raises(run_folder.Claimed, match="another process"), run_folder.claim(tmp_path):
        pass
    with pytest.raises(run_folder.Claimed, match="no longer claimed"):
        run_folder.check_claim(tmp_path, "key")
    make_older(file, run_folder.HEARTBEAT + 5)
    with run_folder.claim(tmp_path):
        pass


def test_without_locks_a_claim_is_still_exclusive(tmp_path, monkeypatch):
    def unsupported(_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(files.FileLock, "_acquire", unsupported)
    with (
        run_folder.claim(tmp_path),
        pytest.raises(run_folder.Claimed, match="being trained by"),
        run_folder.claim(tmp_path),
    ):
        pass


def test_a_claim_cut_while_it_was_written_is_soon_void(tmp_path):
    file = tmp_path / "claim"
    file.touch()
    with pytest.raises(run_folder.Claimed, match="another process"), run_folder.claim(tmp_path):
        pass
    make_older(file, run_folder.HEARTBEAT + 5)
    with run_folder.claim(tmp_path):
        pass


def test_a_claim_shows_signs_of_life(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "HEARTBEAT", 0.05)
    with run_folder.claim(tmp_path):
        os.utime(tmp_path / "claim", (0, 0))
        time.sleep(0.5)
        assert time.time() - (tmp_path / "claim").stat().st_mtime < 5


def test_who_was_given_up_stops_and_leaves_the_new_claim_alone(tmp_path):
    with run_folder.claim(tmp_path) as key:
        run_folder.check_claim(tmp_path, key)
        file = leave_claim(tmp_path, key="other")  # as another machine does after this one slept
        with pytest.raises(run_folder.Claimed, match="no longer claimed by this process but by process 1 on elsewhere"):
            run_folder.check_claim(tmp_path, key)
    assert json.loads(file.read_text())["key"] == "other"


def test_an_interrupt_during_the_release_leaves_no_claim(tmp_path, monkeypatch):
    owner, calls = run_folder._owner, []

    def interrupted(file):
        calls.append(file)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return owner(file)

    with pytest.raises(KeyboardInterrupt), run_folder.claim(tmp_path):
        monkeypatch.setattr(run_folder, "_owner", interrupted)
    assert not (tmp_path / "claim").exists()


def test_a_claim_on_a_full_disk_leaves_no_half_file(tmp_path):
    with files_of_at_most(20), pytest.raises(files.CannotWrite, match="Cannot write"), run_folder.claim(tmp_path):
        pass
    assert not (tmp_path / "claim").exists()


# -- checkpoints -------------------------------------------------------------------------------------------------------


def rows(count: int) -> list[dict[str, float]]:
    return [{"epoch": epoch, "loss": 1 / (epoch + 1)} for epoch in range(count)]


def save(folder: Path, epochs: int, run: str = "run") -> Path:
    weights = {"w": torch.full((3, 2, 4, 4), float(epochs)).to(memory_format=torch.channels_last)}
    state = {"method": {"momentum": [torch.full((3,), float(epochs))]}, "seconds": 1.5, "name": "x", "none": None}
    run_folder.save_checkpoint(folder, weights, state, rows(epochs), run)
    return folder / "checkpoints" / f"{epochs:06d}"


def load_epoch(folder: Path, run: str = "run") -> int | None:
    """Load the checkpoint, check that its parts agree, and return its number of epochs."""
    found = run_folder.load_checkpoint(folder, run)
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
    assert run_folder.load_checkpoint(tmp_path, "run") is None
    for epochs in (1, 2, 5):
        save(tmp_path, epochs)
        assert load_epoch(tmp_path) == epochs
    assert names(tmp_path) == ["000002", "000005"]


@pytest.mark.parametrize("name", [*run_folder.FILES, "manifest.json"])
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
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        manifest["sha256"]["state.pt"] = hashlib.sha256((checkpoint / "state.pt").read_bytes()).hexdigest()
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))
        caplog.clear()
        assert load_epoch(tmp_path) == 1
        assert "000002: it is damaged" in caplog.text
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
        run_folder.write_rows(folder / "metrics.jsonl", ROWS)
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
            run_folder.append_row(folder / "metrics.jsonl", {"epoch": 2, "text": "x" * 5000})
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
    (tmp_path / f"{files.SCRATCH}0-result.json").write_text("{")
    run_folder.tidy(tmp_path)
    assert names(tmp_path) == ["000001"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoints"]


def test_weights_shared_between_layers_are_saved(tmp_path):
    layer = torch.nn.Linear(3, 3)
    model = torch.nn.Sequential(layer, layer)
    run_folder.save_checkpoint(tmp_path, model.state_dict(), {}, rows(1), "run")
    found = run_folder.load_checkpoint(tmp_path, "run")
    assert found is not None
    for name, weight in model.state_dict().items():
        assert torch.equal(found[0][name], weight)


# -- results -----------------------------------------------------------------------------------------------------------

RESULT = {
    "config": {"runs": "elsewhere"},
    "last10_accuracy": 90.0,
    "best_accuracy": 91.0,
    "val_accuracy": None,
    "memorised": 3.5,
    "recovered": 80,
    "noise_rate": 50.0,
    "clip": "none",
    "epochs": 2,
    "seconds": 1.0,
    "versions": {"torch": "2.6"},
    "device": "cpu",
    "commit": None,
}


def finished(folder: Path) -> Path:
    """A folder with a finished run."""
    save(folder, 2)
    run_folder.write_rows(folder / "metrics.jsonl", ROWS)
    files.write_json(folder / "noise.json", {"rule": "none"})
    result = run_folder.Result(id=folder.name, **RESULT)
    run_folder.finish(folder, result, {"w": torch.arange(4.0)})
    return folder


def test_a_finished_run_keeps_one_set_of_weights(tmp_path):
    folder = finished(tmp_path / "run")
    assert sorted(everything_in(folder)) == ["metrics.jsonl", "noise.json", "result.json", "weights.safetensors"]
    result = run_folder.read_result(folder)
    assert result is not None
    assert result.rows == ROWS
    assert result.noise == {"rule": "none"}
    assert result.weights()["w"].tolist() == [0, 1, 2, 3]
    assert result.folder == folder  # though it was written elsewhere: folders may be moved


@pytest.mark.parametrize("name", ["metrics.jsonl", "noise.json", "weights.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "cut", "changed"])
def test_a_result_without_its_files_is_a_failure_that_is_logged(tmp_path, caplog, name, damage):
    folder = finished(tmp_path / "run")
    result = run_folder.read_result(folder)
    file = folder / name
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(content[:-3] if damage == "cut" else content[:-2] + b"!" + content[-1:])
    if name == "weights.safetensors" and damage != "missing":  # large: checked when they are loaded
        assert isinstance(result, run_folder.Result)
        with pytest.raises(run_folder.Damaged, match="has been changed"):
            result.weights()
        return
    reason = "is missing" if damage == "missing" else "has been changed"
    sentence = f"The result in {folder} is not used: {name} {reason}. Repeat the command to train it again."
    assert run_folder.read_outcome(folder) == run_folder.Failure("run", sentence, "", 0, False)
    assert run_folder.read_result(folder) is None
    assert sentence in caplog.text


def test_the_result_of_another_folder_is_refused(tmp_path, caplog):
    one, other = finished(tmp_path / "one"), finished(tmp_path / "other")
    one.rename(tmp_path / "swap")
    other.rename(one)
    (tmp_path / "swap").rename(other)
    for folder in (one, other):
        assert run_folder.read_result(folder) is None
    assert "result.json belongs to the run other" in caplog.text
    assert "result.json belongs to the run one" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        {"last10_accuracy": "90"},
        {"last10_accuracy": None},
        {"last10_accuracy": True},
        {"best_accuracy": float("nan")},
        {"epochs": 2.5},
        {"config": []},
        {"config": {"runs": 3}},
        {"config": {"unknown": 3}},
        {"versions": "2.6"},
        {"sha256": {}},
        {"sha256": None},
        {"more": 1},
    ],
)
def test_a_result_with_other_types_is_refused(tmp_path, caplog, change):
    folder = finished(tmp_path / "run")
    content = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**content, **change}))
    failure = run_folder.read_outcome(folder)
    assert isinstance(failure, run_folder.Failure)
    assert "result.json cannot be read" in failure.error
    assert failure.error in caplog.text


@pytest.mark.parametrize("content", ["3", "null", "[]", '"text"', "{", '{"id": 1}'])
def test_json_of_another_type_is_no_outcome(tmp_path, content):
    (tmp_path / "failure.json").write_text(content)
    assert run_folder.read_outcome(tmp_path) is None
    (tmp_path / "result.json").write_text(content)
    assert isinstance(run_folder.read_outcome(tmp_path), run_folder.Failure)


def test_a_rename_is_synced(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.readlink(f"/proc/self/fd/{handle}")))
    files.write(tmp_path / "file", b"")
    save(tmp_path, 1)
    assert synced[1] == str(tmp_path)
    assert synced[-1] == str(tmp_path / "checkpoints")


# -- without what only POSIX, or only Linux, has -----------------------------------------------------------------------


def test_without_proc_a_killed_process_still_holds_no_claim(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "PROC", tmp_path / "nowhere")
    process = claiming(tmp_path, 60, CLAIM.replace("try:", "run_folder.PROC = Path('nowhere')\ntry:", 1))
    try:
        assert first_line(process) == "got it"
        with pytest.raises(run_folder.Claimed, match=f"process {process.pid} "), run_folder.claim(tmp_path):
            pass
    finally:
        process.kill()
        process.wait()
    with run_folder.claim(tmp_path):
        pass


def test_on_windows_the_heartbeat_decides_and_no_process_gets_a_signal(tmp_path, monkeypatch):
    def signalled(*_):
        raise AssertionError("os.kill(pid, 0) is Ctrl-C there")

    monkeypatch.setattr(run_folder, "PROC", tmp_path / "nowhere")
    monkeypatch.setattr(run_folder, "WINDOWS", True)
    monkeypatch.setattr(os, "kill", signalled)
    with run_folder.claim(tmp_path):
        owner = json.loads((tmp_path / "claim").read_text())
    file = leave_claim(tmp_path, **{**owner, "machine": owner["machine"].replace(str(os.getpid()), "1"), "pid": 1})
    with pytest.raises(run_folder.Claimed), run_folder.claim(tmp_path):
        pass
    make_older(file, 10 * run_folder.SILENCE)
    with run_folder.claim(tmp_path):
        pass


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
