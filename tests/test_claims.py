"""Claims: one process trains a run. The tests kill real processes."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from disk import files_of_at_most
from interrupts import interrupted_at_every_line

from logitclip import files
from logitclip.runs import claims

CLAIM = """
import sys, time
from pathlib import Path
from logitclip import files
from logitclip.runs import checkpoints, claims, results
try:
    with claims.claim(Path(sys.argv[1])):
        print("got it", flush=True)
        time.sleep(float(sys.argv[2]))
except claims.Claimed as error:
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
    file.write_text(
        json.dumps({"host": "elsewhere", "machine": "elsewhere", "pid": 1, "started": "1", **owner}), encoding="utf-8"
    )
    return file


def make_older(file: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(file, (then, then))


def test_one_works_and_the_other_is_told_by_whom(tmp_path):
    with claims.claim(tmp_path):
        with (
            pytest.raises(claims.Claimed, match=rf"trained by process {os.getpid()} on ") as caught,
            claims.claim(tmp_path),
        ):
            pass
        assert str(tmp_path / "claim") in str(caught.value)
    assert not (tmp_path / "claim").exists()
    with claims.claim(tmp_path):
        pass


def test_the_claim_of_a_killed_process_is_taken_over_at_once(tmp_path):
    process = claiming(tmp_path, 60)
    try:
        assert first_line(process) == "got it"
        with pytest.raises(claims.Claimed, match=f"process {process.pid} "), claims.claim(tmp_path):
            pass
    finally:
        process.kill()
        process.wait()
    with claims.claim(tmp_path):  # which would raise rather than wait
        pass


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_a_dead_process_that_its_parent_has_not_asked_about_holds_no_claim(tmp_path):
    process = claiming(tmp_path, 60)
    first_line(process)
    process.kill()
    while Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    with claims.claim(tmp_path):
        pass
    process.wait()


def test_of_many_that_take_over_a_void_claim_one_gets_it(tmp_path):
    leave_claim(tmp_path, machine=claims._machine(), pid=2**22 + 1)  # there is no such process
    processes = [claiming(tmp_path, 1000) for _ in range(6)]  # the first may start long before the last
    try:
        answers = [first_line(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert answers.count("got it") == 1
    assert sum("is being trained by process" in answer for answer in answers) == 5


def test_a_reused_process_number_is_not_the_owner(tmp_path):
    leave_claim(tmp_path, machine=claims._machine(), pid=os.getpid(), started="0")
    with claims.claim(tmp_path):
        pass


def test_another_machine_is_believed_until_it_is_silent(tmp_path):
    file = leave_claim(tmp_path, pid=2**22 + 1)
    with pytest.raises(claims.Claimed, match="on elsewhere"), claims.claim(tmp_path):
        pass
    make_older(file, claims.SILENCE - 20)
    with pytest.raises(claims.Claimed, match="on elsewhere"), claims.claim(tmp_path):
        pass
    make_older(file, claims.SILENCE + 20)
    with claims.claim(tmp_path):
        pass


def test_a_claim_stamped_in_the_future_is_void(tmp_path):
    file = leave_claim(tmp_path)
    make_older(file, -20)  # clocks may differ a little
    with pytest.raises(claims.Claimed, match="on elsewhere"), claims.claim(tmp_path):
        pass
    make_older(file, -1000)
    with claims.claim(tmp_path):
        pass


@pytest.mark.parametrize("content", ["[1]", "3", "null", '"text"', '{"pid": "x"}', '{"pid": [1]}', "[" * 100_000])
def test_a_claim_of_another_json_type_is_soon_void(tmp_path, monkeypatch, content):
    monkeypatch.setattr(claims, "HEARTBEAT", 500.0)  # so that it is not void yet, on a busy machine too
    file = tmp_path / "claim"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(claims.Claimed, match="another process"), claims.claim(tmp_path):
        pass
    with pytest.raises(claims.Claimed, match="no longer claimed"):
        claims.check_claim(tmp_path, "key")
    make_older(file, claims.HEARTBEAT + 5)
    with claims.claim(tmp_path):
        pass


def test_without_locks_a_claim_is_still_exclusive(tmp_path, monkeypatch):
    def unsupported(_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(files.FileLock, "_acquire", unsupported)
    with (
        claims.claim(tmp_path),
        pytest.raises(claims.Claimed, match="being trained by"),
        claims.claim(tmp_path),
    ):
        pass


def test_a_claim_cut_while_it_was_written_is_soon_void(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "HEARTBEAT", 500.0)
    file = tmp_path / "claim"
    file.touch()
    with pytest.raises(claims.Claimed, match="another process"), claims.claim(tmp_path):
        pass
    make_older(file, claims.HEARTBEAT + 5)
    with claims.claim(tmp_path):
        pass


def test_a_claim_shows_signs_of_life(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "HEARTBEAT", 0.05)
    with claims.claim(tmp_path):
        os.utime(tmp_path / "claim", (0, 0))
        while not (tmp_path / "claim").stat().st_mtime:
            time.sleep(0.01)


def test_who_was_given_up_stops_and_leaves_the_new_claim_alone(tmp_path):
    with claims.claim(tmp_path) as key:
        claims.check_claim(tmp_path, key)
        file = leave_claim(tmp_path, key="other")  # as another machine does after this one slept
        with pytest.raises(claims.Claimed, match="no longer claimed by this process but by process 1 on elsewhere"):
            claims.check_claim(tmp_path, key)
    assert json.loads(file.read_text(encoding="utf-8"))["key"] == "other"


def test_an_interrupt_at_any_line_leaves_no_claim_and_no_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "LOCK_TIMEOUT", 1000.0)  # the test would wait for a lock that is left

    def train(folder: Path) -> None:
        with claims.claim(folder / "run"):
            (folder / "run" / "file").touch()

    passed = 0
    for folder in interrupted_at_every_line(train, tmp_path, claims, files):
        assert not (folder / "run" / claims.CLAIM).exists(), f"interrupted at line {folder.name}"
        passed += 1
    assert passed > 80


def test_a_claim_on_a_full_disk_leaves_no_half_file(tmp_path):
    with files_of_at_most(20), pytest.raises(files.CannotWrite, match="Cannot write"), claims.claim(tmp_path):
        pass
    assert not (tmp_path / "claim").exists()


def test_a_new_folder_in_which_nothing_was_written_is_removed(tmp_path):
    for folder in (tmp_path / "new", tmp_path):
        with pytest.raises(ValueError, match="refused"), claims.claim(folder):
            raise ValueError("refused")
    assert sorted(path.name for path in tmp_path.iterdir()) == [claims.CLAIM_LOCK]  # the user's own folder stays
    with claims.claim(tmp_path / "new"):
        (tmp_path / "new" / "file").touch()
    assert (tmp_path / "new" / "file").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with (
        pytest.raises(files.CannotWrite, match=r"Cannot write .*file/run: Not a directory\."),
        claims.claim(tmp_path / "file" / "run"),
    ):
        pass


# -- without what only POSIX, or only Linux, has -----------------------------------------------------------------------


def test_without_proc_a_killed_process_still_holds_no_claim(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "PROC", tmp_path / "nowhere")
    process = claiming(tmp_path, 60, CLAIM.replace("try:", "claims.PROC = Path('nowhere')\ntry:", 1))
    try:
        assert first_line(process) == "got it"
        with pytest.raises(claims.Claimed, match=f"process {process.pid} "), claims.claim(tmp_path):
            pass
    finally:
        process.kill()
        process.wait()
    with claims.claim(tmp_path):
        pass


def test_a_process_may_have_any_name(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "PROC", tmp_path)
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_bytes(b"7 (gr\xf6\xdfer) \xe6) S " + b" ".join(b"%d" % i for i in range(4, 30)))
    assert claims._start_time(7) == "22"  # the field of that number, see proc(5)


def test_on_windows_the_heartbeat_decides_and_no_process_gets_a_signal(tmp_path, monkeypatch):
    def signalled(*_):
        raise AssertionError("os.kill(pid, 0) is Ctrl-C there")

    monkeypatch.setattr(claims, "PROC", tmp_path / "nowhere")
    monkeypatch.setattr(claims, "WINDOWS", True)
    monkeypatch.setattr(os, "kill", signalled)
    with claims.claim(tmp_path):
        owner = json.loads((tmp_path / "claim").read_text(encoding="utf-8"))
    file = leave_claim(tmp_path, **{**owner, "machine": owner["machine"].replace(str(os.getpid()), "1"), "pid": 1})
    with pytest.raises(claims.Claimed), claims.claim(tmp_path):
        pass
    make_older(file, 10 * claims.SILENCE)
    with claims.claim(tmp_path):
        pass
