"""Whole files: atomic writes on full disks, and one process at a time."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from disk import everything_in, files_of_at_most
from interrupts import interrupted_at_every_line

from logitclip import files


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "result.json"
    files.write_json(path, {"a": 1})
    before = everything_in(tmp_path)
    with (
        files_of_at_most(100),
        pytest.raises(files.CannotWrite, match=r"^Cannot write .*result\.json: File too large\."),
    ):
        files.write_json(path, {"a": "x" * 1000})
    assert everything_in(tmp_path) == before
    assert files.read_json(path) == {"a": 1}


def test_a_full_disk_is_named_in_one_sentence(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(files.CannotWrite) as caught:
        files.write(tmp_path / "a", b"content")
    assert str(caught.value) == f"Cannot write {tmp_path / 'a'}: No space left on device. Earlier files are intact."
    assert everything_in(tmp_path) == {}


@pytest.mark.parametrize("pieces", [[b"x" * 10] * 3, [b"x" * 10_000_000], [b"x" * 101]])
def test_a_full_disk_is_named_for_content_that_comes_in_pieces(tmp_path, pieces):
    path = tmp_path / "predictions.csv"
    path.write_bytes(b"old")

    def write() -> None:
        with files.open_to_write(path) as write_piece:
            for piece in pieces:
                write_piece(piece)

    with files_of_at_most(20), pytest.raises(files.CannotWrite) as caught:
        write()
    assert str(caught.value) == f"Cannot write {path}: File too large. Earlier files are intact."
    assert everything_in(tmp_path) == {"predictions.csv": b"old"}
    write()
    assert path.read_bytes() == b"".join(pieces)


def test_a_rename_that_fails_midway_is_not_called_intact(tmp_path):
    (tmp_path / "b").mkdir()  # a folder cannot be replaced by a file

    def stage() -> None:
        with files.stage(tmp_path, {"a": b"new", "b": b"new"}) as paths:
            for name, path in paths.items():
                path.replace(tmp_path / name)

    with pytest.raises(files.CannotWrite) as caught:
        stage()
    assert str(caught.value).endswith("Some of its files may be new: repeat the command.")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_folders_that_cannot_be_opened_are_not_synced(tmp_path, monkeypatch):
    """As on Windows."""
    real = os.open

    def windows(path, flags, *more, **options):
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", windows)
    files.write(tmp_path / "a", b"content")
    assert everything_in(tmp_path) == {"a": b"content"}


def test_what_is_not_a_number_is_never_written(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        files.write_json(tmp_path / "result.json", {"loss": float("nan")})
    assert everything_in(tmp_path) == {}


def test_broken_json_is_missing_json(tmp_path, caplog):
    (tmp_path / "result.json").write_text('{"a": ', encoding="utf-8")
    assert files.read_json(tmp_path / "result.json") is None
    assert "result.json: it is not valid JSON." in caplog.text
    assert files.read_json(tmp_path / "none.json") is None


def test_writing_follows_links_and_does_not_replace_devices(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for content in (b"one", b"two"):
        files.write(tmp_path / "link", content)
        assert (tmp_path / "real").read_bytes() == content
    assert (tmp_path / "link").is_symlink()
    files.write(Path("/dev/null"), b"gone")
    assert Path("/dev/null").is_char_device()
    os.mkfifo(tmp_path / "fifo")
    with subprocess.Popen(["cat", str(tmp_path / "fifo")], stdout=subprocess.PIPE) as reader:
        files.write(tmp_path / "fifo", b"through")
        assert reader.communicate()[0] == b"through"
    assert (tmp_path / "fifo").is_fifo()


def test_a_link_in_our_folder_is_replaced(tmp_path):
    theirs = tmp_path / "theirs"
    for write in (
        lambda path: files.replace(path, b"ours"),
        lambda path: files.write_json(path, {"a": 1}),
        lambda path: files.append(path, b"a line\n"),
    ):
        theirs.write_bytes(b"photo")
        path = tmp_path / "ours"
        path.unlink(missing_ok=True)
        path.symlink_to(theirs)
        write(path)
        assert theirs.read_bytes() == b"photo"
        assert path.is_file()
        assert not path.is_symlink()


def put_fifo(path: Path) -> None:
    os.mkfifo(path)


def put_device(path: Path) -> None:
    path.symlink_to("/dev/zero")  # it never ends


@pytest.mark.parametrize("put", [put_fifo, put_device])
@pytest.mark.timeout(20)
def test_a_fifo_or_device_is_neither_read_nor_waited_for(tmp_path, caplog, put):
    path = tmp_path / "config.json"
    put(path)
    for read in (files.read_bytes, files.sha256):
        with pytest.raises(OSError, match="it is not a regular file"):
            read(path)
    assert files.read_json(path) is None
    assert "config.json: it is not a regular file." in caplog.text
    for write in (files.append, files.replace):
        path.unlink()
        put(path)
        write(path, b"{}")
        assert path.read_bytes() == b"{}"
    path.unlink()
    put(path)
    with files.lock(path, 5, late="Too late."):
        assert path.is_file()
        assert not path.is_symlink()


def test_remove_leaves_what_a_link_points_to(tmp_path):
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    (theirs / "photo").touch()
    ours.mkdir()
    (ours / "link").symlink_to(theirs)
    (ours / "file").touch()
    files.remove(ours)
    ours.symlink_to(theirs)
    files.remove(ours)
    files.remove(ours)  # there is nothing left
    assert not ours.is_symlink()
    assert everything_in(tmp_path) == {"theirs/photo": b""}


def test_the_parents_of_new_folders_are_synced(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.readlink(f"/proc/self/fd/{handle}")))
    files.write(tmp_path / "a" / "b" / "file", b"")
    files.make_folder(tmp_path / "a" / "b")  # it exists
    folders = [Path(path) for path in synced if Path(path).is_dir()]
    assert sorted(folders) == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]


# -- the lock ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def held(tmp_path):
    """A lock file that another process holds."""
    path = tmp_path / "lock"
    with files.lock(path, 0):  # its own file handle, as in another process
        yield path


def in_pieces(path, content):
    with files.open_to_write(path) as write:
        for byte in content:
            write(bytes([byte]))


def staged(path, content):
    with files.stage(path.parent, {path.name: content}) as scratch:
        scratch[path.name].replace(path)


@pytest.mark.parametrize("write", [files.write, files.replace, in_pieces, staged, files.append])
def test_an_interrupt_at_any_line_leaves_the_old_file_or_the_new(tmp_path, write):
    whole = b"old new" if write is files.append else b" new"

    def overwrite(folder):
        (folder / "file").write_bytes(b"old")
        write(folder / "file", b" new")

    passed = 0
    for folder in interrupted_at_every_line(overwrite, tmp_path, files):
        assert [path.name for path in folder.iterdir()] == ["file"], f"interrupted at line {folder.name}"
        assert (folder / "file").read_bytes() in (b"old", whole)
        passed += 1
    assert passed > 20


def test_one_block_at_a_time(tmp_path):
    inside = []

    def block(_):
        with files.lock(tmp_path / "lock", 60):
            inside.append(len(inside) % 2)
            threading.Event().wait(0.05)
            inside.append(len(inside) % 2)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(block, range(3)))
    assert inside == [0, 1] * 3


def test_a_free_lock_does_not_make_anybody_wait(tmp_path, caplog):
    with files.lock(tmp_path / "lock", 0, waiting="Waiting.", late="Too late."):
        pass
    assert caplog.text == ""


def test_waiting_is_logged_and_has_a_limit(held, caplog):
    with (
        pytest.raises(TimeoutError, match=r"^Too late\.$"),
        files.lock(held, 0.1, waiting="Waiting for another process.", late="Too late."),
    ):
        pytest.fail("the block ran without the lock")
    assert [record.message for record in caplog.records] == ["Waiting for another process."]


def test_without_a_message_the_block_runs_after_the_timeout(held):
    with files.lock(held, 0.1):
        return
    pytest.fail("the block did not run")


def test_waiting_can_be_interrupted(held, monkeypatch):
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    monkeypatch.setattr(files.log, "warning", lambda *_: timer.start())  # not before the wait begins
    with pytest.raises(KeyboardInterrupt), files.lock(held, 500, waiting="Waiting.", late="Too late."):
        pytest.fail("the block ran without the lock")
    timer.join()


@pytest.mark.parametrize("error", [OSError(errno.ENOLCK, "No locks available"), NotImplementedError()])
def test_without_locks_the_block_runs_at_once(tmp_path, monkeypatch, error):
    def unsupported(_):
        raise error

    monkeypatch.setattr(files.FileLock, "_acquire", unsupported)
    with files.lock(tmp_path / "lock", 60, late="Too late."):
        return
    pytest.fail("the block did not run")


def test_two_writes_in_one_tick_of_the_clock_have_two_digests(tmp_path):
    path, now = tmp_path / "list.txt", time.time_ns()
    digests = []
    for text in ("a 0", "a 1"):
        path.write_text(text, encoding="utf-8")
        os.utime(path, ns=(now, now))
        digests.append(files.sha256_once(path))
    assert digests[0] != digests[1]
