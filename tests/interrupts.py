"""Interrupt code at each of its lines in turn, as Ctrl-C may."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any


def interrupted_at_every_line(
    act: Callable[[Path], object], folder: Path, *modules: ModuleType, begin: str = "", step: int = 1
) -> Iterator[Path]:
    """Call `act` with a new folder each time, and interrupt it one line later than the time before.

    Args:
        act: What to interrupt.
        folder: Where to make the folders.
        modules: Lines of these modules count.
        begin: The function whose call starts the count; by default the first line counts.
        step: Lines between two interrupts.

    Yields:
        The folder of each interrupted call. It ends with the first call that is not interrupted.
    """
    sources = {module.__file__ for module in modules}
    for number in itertools.count(1, step):
        place = folder / str(number)
        place.mkdir()
        lines, counts = itertools.count(1), not begin

        def trace(frame: FrameType, event: str, _: Any, lines=lines, number=number) -> Any:
            nonlocal counts
            if frame.f_code.co_filename not in sources:
                return None
            counts = counts or frame.f_code.co_name == begin
            if counts and event == "line" and next(lines) == number:
                sys.settrace(None)
                raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            act(place)
            return
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        yield place
