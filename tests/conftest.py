"""Fixtures of all tests: time limits, devices, and the command line in this process."""

import os
import signal
import sys

import hypothesis
import pytest

hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.load_profile("repeatable")

# A shell starts background jobs with SIGINT ignored; restore it, because tests interrupt the processes they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _processes_have_a_time_limit(pytestconfig, tmp_path_factory):
    """End every Python process that a test starts, and print its stack, before the test reaches its own time limit.

    faulthandler needs no GIL, so this works in a process that hangs while it holds the GIL.
    """
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(  # imported by every Python process at start-up
        "import faulthandler, os, sys\n"
        "faulthandler.enable()\n"
        "if 'resource_tracker' not in ' '.join(sys.orig_argv):  # of multiprocessing or loky: it serves all tests\n"
        "    faulthandler.dump_traceback_later(float(os.environ['SECONDS_TO_LIVE']), exit=True)\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        patch.setenv("SECONDS_TO_LIVE", str(0.8 * float(pytestconfig.getini("timeout"))))
        yield


def _devices():
    import torch

    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    return [name for name, available in there.items() if available]


@pytest.fixture(params=_devices())
def device(request):
    """Each available device: the CPU, and CUDA or MPS."""
    return request.param


@pytest.fixture
def command(monkeypatch, capsys):
    """Run `logitclip ...` in this process; return (exit code, stdout, stderr)."""
    from logitclip import cli

    before = signal.getsignal(signal.SIGTERM)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["logitclip", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        return code, *capsys.readouterr()

    yield call
    signal.signal(signal.SIGTERM, before)
