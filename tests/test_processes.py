"""A process that hangs is a failure with a stack."""

from __future__ import annotations

import subprocess
import sys

import pytest
from processes import finished

HANGING = "import ctypes, os\nprint('here', flush=True)\nctypes.PyDLL(None).sleep(1000)"  # it keeps the GIL


def started() -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HANGING]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def test_a_process_that_hangs_ends_with_its_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECONDS_TO_LIVE", "2")
    code, _, errors = finished(started(), 100)
    assert code == 1
    assert "Timeout (0:00:02)!" in errors
    assert 'File "<string>", line 3 in <module>' in errors


def test_a_test_that_gives_a_process_up_shows_its_stack() -> None:
    process = started()
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    with pytest.raises(pytest.fail.Exception, match=r"(?s)still running after 1 s.*line 3 in <module>"):
        finished(process, 1)
