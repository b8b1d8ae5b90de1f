"""Printing for the commands: data to stdout, everything else to stderr."""

from __future__ import annotations

import json
import math
import os
import sys
from typing import Any

from logitclip.progress import Printable, printable


def show(what: Any) -> None:
    """Print text or a table to stdout. Text is rich markup: escape what others wrote."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 200  # a file or a pipe has no edge to fold a table at
    console.print(Printable(what))


def show_json(what: Any) -> None:
    print(json.dumps(_finite(what), indent=2, default=str))


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
