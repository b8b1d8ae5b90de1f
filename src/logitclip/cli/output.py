"""Printing for the commands: data to stdout, everything else to stderr."""

from __future__ import annotations

import contextlib
import enum
import json
import math
import os
import sys
from typing import Any, NoReturn

from logitclip.cli.terminal import Printable
from logitclip.text import printable


def show(what: Any) -> None:
    """Print text or a table to stdout. Text is rich markup: escape text that comes from files or users."""
    from rich.console import Console

    class Piped(Console):
        def on_broken_pipe(self) -> None:  # rich would exit with 1
            raise BrokenPipeError

    console = Piped(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 200  # a file or a pipe has no width to wrap a table at
    console.print(Printable(what))


def show_json(what: Any) -> None:
    print(json.dumps(_finite(what), indent=2, default=str))


class Exit(enum.IntEnum):
    """Exit codes. 0 is success; 130 and 143 are an interrupt by Ctrl-C and SIGTERM. See docs/cli.md."""

    MISTAKE = 2  # in the command or a file it names, or something it needs is missing or in use
    FAILED = 3  # a run diverged or failed
    MISSING = 4  # runs have no result yet
    UNEXPECTED = 70  # a bug


def fail(code: Exit, sentence: str) -> NoReturn:
    """Print a sentence to stderr and exit."""
    with contextlib.suppress(BrokenPipeError):  # if nobody reads it, the exit code remains
        tell(sentence)
    raise SystemExit(int(code))


def tell(sentence: str) -> None:
    """Print a sentence to stderr."""
    print(f"logitclip: {printable(sentence)}", file=sys.stderr)


def _finite(what: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by null."""
    if isinstance(what, dict):
        return {key: _finite(value) for key, value in what.items()}
    if isinstance(what, list | tuple):
        return [_finite(value) for value in what]
    return None if isinstance(what, float) and not math.isfinite(what) else what
