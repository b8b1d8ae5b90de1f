"""A process that hangs fails its test and prints its stack."""

from __future__ import annotations

import subprocess
import sys

import pytest
from processes import finished


def test_a_process_that_hangs_with_the_gil_ends_with_its_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECONDS_TO_LIVE", "2")
    hanging = [sys.executable, "-c", "import ctypes\nctypes.PyDLL(None).sleep(1000)"]
    pipe = subprocess.PIPE
    code, _, errors = finished(subprocess.Popen(hanging, stdout=pipe, stderr=pipe, text=True, start_new_session=True))
    assert code == 1
    assert "Timeout (0:00:02)!" in errors
    assert 'File "<string>", line 2 in <module>' in errors
