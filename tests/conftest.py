"""Fixtures of all tests: time limits, devices, and the command line in this process."""

import inspect
import os
import re
import signal
import sys
import tempfile
from pathlib import Path

import hypothesis
import pytest

hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.load_profile("repeatable")

# A shell starts background jobs with SIGINT ignored; restore it, because tests interrupt the processes they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


PRINTED = {"command", "terminal", "capsys", "capfd", "caplog"}  # fixtures that give printed text
PATHS = {"tmp_path", "tmp_path_factory"}


def pytest_collection_modifyitems(items):
    """Mark the tests that read printed text, and those that use paths or start processes, for `.ci/surroundings`."""
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if PRINTED & fixtures:
            item.add_marker("printed")
        elif PATHS & fixtures or "subprocess" in _names_used(item):
            item.add_marker("paths")


def _names_used(item):
    """Return the names in the code of a test and of the functions of its module that it calls."""
    if not isinstance(item, pytest.Function):  # a doctest
        return set()
    called = set(inspect.unwrap(item.function).__code__.co_names)
    helpers = [vars(item.module).get(name) for name in called]
    return called.union(*(helper.__code__.co_names for helper in helpers if inspect.isfunction(helper)))


@pytest.fixture(scope="session", autouse=True)
def _processes_have_a_time_limit(pytestconfig):
    """End every Python process that a test starts, and print its stack, before the test reaches its own time limit.

    faulthandler needs no GIL, so this works in a process that hangs while it holds the GIL.
    """
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        Path(folder, "sitecustomize.py").write_text(  # imported by every Python process at start-up
            "import faulthandler, os, sys\n"
            "faulthandler.enable()\n"
            "if 'resource_tracker' not in ' '.join(sys.orig_argv):  # of multiprocessing or loky: it serves all tests\n"
            "    faulthandler.dump_traceback_later(float(os.environ['SECONDS_TO_LIVE']), exit=True)\n",
            encoding="utf-8",
        )
        patch.setenv("PYTHONPATH", folder, prepend=os.pathsep)
        patch.setenv("SECONDS_TO_LIVE", str(0.8 * float(pytestconfig.getini("timeout"))))
        yield


@pytest.fixture(scope="session", autouse=True)
def _features_have_their_own_cache():
    """Keep the tests out of the user's cache of features, which `runs gc` empties."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOGITCLIP_FEATURES", folder)
        yield


@pytest.fixture(scope="session")
def bert(tmp_path_factory):
    """The folder of a tiny encoder of texts."""
    from encoders_for_tests import save_text_encoder

    return save_text_encoder(tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture(scope="session")
def vit(tmp_path_factory):
    """The folder of a tiny encoder of images."""
    from encoders_for_tests import save_image_encoder

    return save_image_encoder(tmp_path_factory.mktemp("models") / "vit")


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


@pytest.fixture
def terminal(command, monkeypatch):
    """Run `logitclip ...` as if stdout and stderr were a terminal; return what it prints, without colours."""

    def call(width, *arguments):
        monkeypatch.setenv("COLUMNS", str(width))
        for stream in (sys.stdout, sys.stderr):
            monkeypatch.setattr(stream, "isatty", lambda: True)
        _, out, err = command(*arguments)
        return re.sub(r"\x1b\[[0-9;]*m", "", out + err)

    return call
