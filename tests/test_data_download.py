"""Downloads against a real HTTP server on this machine, and archives written here."""

import contextlib
import hashlib
import io
import os
import re
import signal
import subprocess
import sys
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from logitclip.data import _download as download
from logitclip.data._download import Remote, fetch, unpack, verify

CONTENT = bytes(range(256)) * 4096  # 1 MiB
MD5 = hashlib.md5(CONTENT).hexdigest()


class Server:
    """Serves `files` and records the requested ranges; can ignore ranges, stop early, be slow or return an error."""

    def __init__(self):
        self.files, self.ranges = {"file.bin": CONTENT}, []
        self.knows_ranges, self.stops_after, self.pause, self.status = True, None, 0.0, 200
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer.answer(self)

            def log_message(self, format, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, request):
        body = self.files.get(request.path.lstrip("/"))
        if body is None or self.status != 200:
            request.send_error(404 if body is None else self.status)
            return
        start = int(re.fullmatch(r"bytes=(\d+)-", request.headers["Range"])[1])
        self.ranges.append(start)
        request.send_response(206 if self.knows_ranges else 200)
        body = body[start:] if self.knows_ranges else body
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        end = len(body) if self.stops_after is None else self.stops_after
        with contextlib.suppress(ConnectionError):
            for at in range(0, end, 65536):
                request.wfile.write(body[at : min(at + 65536, end)])
                time.sleep(self.pause)


@pytest.fixture
def server():
    server = Server()
    yield server
    server.server.shutdown()
    server.server.server_close()


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch):
    monkeypatch.setattr(download, "_PAUSE", 0.0)


def remote(server, **changes):
    return Remote(**({"url": f"{server.url}/file.bin", "size": len(CONTENT), "md5": MD5} | changes))


def names(folder):
    """Return the files of a folder, without the lock."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".download.lock")


def test_a_file_arrives_under_its_name_and_is_not_fetched_twice(server, tmp_path):
    for _ in range(2):
        assert fetch(remote(server), tmp_path / "new" / "folder").read_bytes() == CONTENT
    assert names(tmp_path / "new" / "folder") == ["file.bin"]
    assert server.ranges == [0]


def test_a_partial_file_is_continued(server, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:300_000])
    assert fetch(remote(server), tmp_path).read_bytes() == CONTENT
    assert server.ranges == [300_000]


def test_a_complete_partial_file_needs_no_connection(server, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(CONTENT)
    assert fetch(remote(server), tmp_path).read_bytes() == CONTENT
    assert server.ranges == []


def test_a_server_without_ranges_sends_everything(server, tmp_path):
    server.knows_ranges = False
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:300_000])
    assert fetch(remote(server), tmp_path).read_bytes() == CONTENT


def test_a_broken_connection_is_taken_up_again(server, tmp_path):
    server.stops_after = 400_000
    assert fetch(remote(server), tmp_path).read_bytes() == CONTENT
    assert server.ranges == [0, 400_000, 800_000]


def test_a_connection_that_brings_nothing_ends_in_one_sentence_and_keeps_the_part(server, tmp_path):
    server.stops_after = 0
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:1000])
    with pytest.raises(ConnectionError, match=r"stopped after 1,000 of 1,048,576 bytes .* Run it again to resume"):
        fetch(remote(server), tmp_path)
    assert (tmp_path / "file.bin.part").read_bytes() == CONTENT[:1000]
    server.stops_after = None
    assert fetch(remote(server), tmp_path).read_bytes() == CONTENT


def test_a_server_that_never_finishes_and_knows_no_ranges_is_given_up(server, tmp_path):
    server.knows_ranges, server.stops_after = False, 1000
    with pytest.raises(ConnectionError, match="stopped after 1,000"):
        fetch(remote(server), tmp_path)
    assert len(server.ranges) <= 1 + download._ATTEMPTS


def test_a_missing_file_is_said_at_once(server, tmp_path):
    with pytest.raises(ConnectionError, match=r"nothing\.bin cannot be downloaded: HTTP Error 404"):
        fetch(remote(server, url=f"{server.url}/nothing.bin"), tmp_path)
    assert server.ranges == []


def test_a_server_error_is_tried_again_then_said(server, tmp_path):
    server.status = 503
    with pytest.raises(ConnectionError, match="503"):
        fetch(remote(server), tmp_path)


def test_no_server_at_all(tmp_path):
    with pytest.raises(ConnectionError, match="Connection refused"):
        fetch(Remote("http://127.0.0.1:9/file.bin", 10, MD5), tmp_path)


@pytest.mark.parametrize("sent", [CONTENT[:-1] + b"!", CONTENT + b"more"])
def test_other_bytes_than_published_are_not_kept(server, tmp_path, sent):
    server.files["file.bin"] = sent
    with pytest.raises(ValueError, match=r"is not the published file\.bin .* Nothing was kept"):
        fetch(remote(server), tmp_path)
    assert names(tmp_path) == []


def test_a_damaged_part_does_not_block_the_next_try(server, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(b"?" * 1000)
    with pytest.raises(ValueError, match="Nothing was kept"):
        fetch(remote(server), tmp_path)
    assert fetch(remote(server), tmp_path).read_bytes() == CONTENT


def test_a_part_longer_than_the_file_is_started_anew(server, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(CONTENT * 2)
    assert fetch(remote(server), tmp_path).read_bytes() == CONTENT


def test_a_damaged_file_is_replaced_only_by_a_good_one(server, tmp_path, caplog):
    target = tmp_path / "file.bin"
    target.write_bytes(b"old")
    server.files["file.bin"] = b"!" * len(CONTENT)
    with pytest.raises(ValueError, match="Nothing was kept"):
        fetch(remote(server), tmp_path)
    assert target.read_bytes() == b"old"
    server.files["file.bin"] = CONTENT
    assert fetch(remote(server), tmp_path).read_bytes() == CONTENT
    assert "Downloading it again" in caplog.text


def test_a_file_of_unknown_size_is_fetched_whole(server, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(b"of something else")
    assert fetch(remote(server, size=None, md5=None), tmp_path).read_bytes() == CONTENT


def test_a_file_of_unknown_size_that_is_cut_off_is_not_taken_for_whole(server, tmp_path):
    server.stops_after = 1000
    with pytest.raises(ConnectionError, match="stopped after 0"):
        fetch(remote(server, size=None, md5=None), tmp_path)
    assert not (tmp_path / "file.bin").exists()


def test_a_mirror_may_be_a_folder_or_an_address(server, tmp_path):
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    (mirror / "file.bin").write_bytes(CONTENT)
    nowhere = remote(server, url="http://127.0.0.1:9/file.bin")
    assert fetch(nowhere, tmp_path / "a", mirror).read_bytes() == CONTENT
    assert fetch(nowhere, tmp_path / "b", f"{server.url}/").read_bytes() == CONTENT
    (mirror / "file.bin").write_bytes(CONTENT[:-1] + b"!")
    with pytest.raises(ValueError, match="Nothing was kept"):
        fetch(nowhere, tmp_path / "c", mirror)
    with pytest.raises(ValueError, match=r"mirror .* has no file file\.bin"):
        fetch(nowhere, tmp_path / "d", tmp_path)
    assert not (tmp_path / "d").exists()


SCRIPT = """
import sys
from logitclip.data._download import Remote, fetch
url, size, md5, folder = sys.argv[1:]
fetch(Remote(url, int(size), md5), folder)
"""


def test_a_killed_download_goes_on_where_it_was(server, tmp_path):
    server.pause = 0.3  # five seconds in total
    part = tmp_path / "file.bin.part"
    arguments = [f"{server.url}/file.bin", str(len(CONTENT)), MD5, str(tmp_path)]
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, *arguments])
    try:
        for _ in range(2400):
            if part.exists() and part.stat().st_size:
                break
            time.sleep(0.05)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    size = part.stat().st_size
    assert 0 < size < len(CONTENT)
    assert not (tmp_path / "file.bin").exists()
    server.pause, server.ranges = 0.0, []
    assert fetch(remote(server), tmp_path).read_bytes() == CONTENT
    assert server.ranges == [size], "the download did not go on from what it had"
    assert names(tmp_path) == ["file.bin"]


@pytest.mark.skipif(sys.platform == "win32", reason="no lock there")
def test_several_want_the_same_file_and_one_fetches_it(server, tmp_path):
    server.pause = 0.02  # a third of a second in total, so the downloads overlap
    with ThreadPoolExecutor(3) as pool:  # each opens the folder to lock it, so threads behave like processes
        paths = list(pool.map(lambda _: fetch(remote(server), tmp_path), range(3)))
    assert [path.read_bytes() == CONTENT for path in paths] == [True] * 3
    assert names(tmp_path) == ["file.bin"]
    assert server.ranges == [0]


def test_verify_says_what_is_wrong(server, tmp_path):
    path = tmp_path / "file.bin"
    path.write_bytes(CONTENT)
    verify(path, remote(server))
    path.write_bytes(CONTENT[:-5])
    with pytest.raises(ValueError, match=r"file\.bin has 1,048,571 bytes where 1,048,576 .* Delete it and download"):
        verify(path, remote(server))
    damaged = bytearray(CONTENT)
    damaged[5000] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"file\.bin is damaged: .* Delete it and download it again from http"):
        verify(path, remote(server))


# -- archives --------------------------------------------------------------------------------------------------------


def archive(path, members):
    """Make a tar.gz of `(name, content)`; content may be a dict of TarInfo fields for special members."""
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if isinstance(content, dict):
                for key, value in content.items():
                    setattr(info, key, value)
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return path


GOOD = [("top", {"type": tarfile.DIRTYPE}), ("top/a.bin", b"a" * 100_000), ("top/deep/b.bin", os.urandom(300_000))]


def test_unpack_makes_the_folder(tmp_path):
    folder = unpack(archive(tmp_path / "x.tar.gz", GOOD), tmp_path / "top")
    assert (folder / "a.bin").read_bytes() == GOOD[1][1]
    assert (folder / "deep" / "b.bin").read_bytes() == GOOD[2][1]
    assert names(tmp_path) == ["top", "x.tar.gz"]


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (("../outside", b"x"), "outside the destination"),
        (("top/../../outside", b"x"), "outside the destination"),
        (("top/link", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}), "is a link to an absolute path"),
        (("top/link", {"type": tarfile.LNKTYPE, "linkname": "../outside"}), "outside the destination"),
        (("top/pipe", {"type": tarfile.FIFOTYPE}), "is a special file"),
        (("top/device", {"type": tarfile.CHRTYPE}), "is a special file"),
    ],
)
def test_a_path_traversal_archive_is_refused(tmp_path, member, message):
    data = tmp_path / "data"
    data.mkdir()
    bad = archive(data / "x.tar.gz", [*GOOD, member])
    with pytest.raises(ValueError, match=rf"x\.tar\.gz cannot be unpacked: .*{message}.* Nothing of it was kept"):
        unpack(bad, data / "top")
    assert names(data) == ["x.tar.gz"]
    assert names(tmp_path) == ["data"]


@pytest.mark.parametrize("name", ["{absolute}", "top\\..\\..\\outside", "c:/outside"])
def test_no_member_is_written_outside_the_folder(tmp_path, name):
    data = tmp_path / "data"
    data.mkdir()
    odd = archive(data / "x.tar.gz", [*GOOD, (name.replace("{absolute}", str(tmp_path / "outside")), b"x")])
    assert names(unpack(odd, data / "top")) == ["a.bin", "deep"]
    assert names(data) == ["top", "x.tar.gz"]
    assert names(tmp_path) == ["data"]


@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 0.9])
def test_a_truncated_archive_leaves_nothing(tmp_path, kept):
    path = archive(tmp_path / "x.tar.gz", GOOD)
    path.write_bytes(path.read_bytes()[: int(kept * path.stat().st_size)])
    with pytest.raises(ValueError, match=r"x\.tar\.gz cannot be unpacked: .* download it again"):
        unpack(path, tmp_path / "top")
    assert names(tmp_path) == ["x.tar.gz"]


def test_a_damaged_archive_leaves_nothing(tmp_path):
    path = archive(tmp_path / "x.tar.gz", GOOD)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.tar\.gz cannot be unpacked: .* download it again"):
        unpack(path, tmp_path / "top")
    assert names(tmp_path) == ["x.tar.gz"]


def test_an_archive_of_something_else(tmp_path):
    path = archive(tmp_path / "x.tar.gz", [("other/a", b"a")])
    with pytest.raises(ValueError, match="it holds no folder top"):
        unpack(path, tmp_path / "top")
    assert names(tmp_path) == ["x.tar.gz"]


def test_what_a_killed_process_left_is_cleared_away(tmp_path):
    (tmp_path / ".top.unpacking" / "top").mkdir(parents=True)
    (tmp_path / ".top.unpacking" / "top" / "half").write_bytes(b"")
    folder = unpack(archive(tmp_path / "x.tar.gz", GOOD), tmp_path / "top")
    assert names(folder) == ["a.bin", "deep"]
    assert names(tmp_path) == ["top", "x.tar.gz"]


def test_a_file_of_unknown_size_has_a_cap(server, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "_CAP", len(CONTENT) - 1)
    with pytest.raises(ValueError, match=r"file\.bin sent more than 1,048,575 bytes\. Is it the right address\?"):
        fetch(Remote(f"{server.url}/file.bin"), tmp_path)
    assert not (tmp_path / "file.bin").exists()
    assert (tmp_path / "file.bin.part").stat().st_size == 0
    monkeypatch.setattr(download, "_CAP", len(CONTENT))
    assert fetch(Remote(f"{server.url}/file.bin"), tmp_path).read_bytes() == CONTENT
