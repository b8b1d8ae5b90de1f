"""Progress of an encoder: rows per second and the time left."""

from __future__ import annotations

import sys
from time import monotonic
from typing import TYPE_CHECKING

from logitclip.cli.output import put
from logitclip.text import duration

if TYPE_CHECKING:
    from rich.progress import Progress


class EncodingBar:
    """Progress of the features on stderr: a bar on a terminal, a line now and then in a pipe or a log file.

    Call it with the rows done and all rows, after each block and once before the first. After the last block it may
    begin again with other rows.

    Args:
        quiet: Print nothing.
    """

    PAUSE = 30.0  # seconds between two lines

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.first: int | None = None  # rows that were done before
        self.started = self.printed = 0.0
        self.progress: Progress | None = None

    def text(self, done: int, rows: int) -> str:
        """Return the progress in words."""
        if self.first is None:
            self.first, self.started = done, monotonic()
        seconds = max(monotonic() - self.started, 1e-9)
        speed = (done - self.first) / seconds
        left = f", {speed:,.0f} rows/s, about {duration((rows - done) / speed)} left" if speed else ""
        return f"Encoding: {done:,} of {rows:,} rows{left if done < rows else ''}"

    def __call__(self, done: int, rows: int) -> None:
        text, nothing = self.text(done, rows), done == self.first == rows
        if not self.quiet and not nothing:
            self._show(text, done, rows)
        if done == rows:
            self.first = None
            self.stop()

    def _show(self, text: str, done: int, rows: int) -> None:
        if self.progress is None and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = (BarColumn(), TextColumn("{task.description}"))
            self.progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self.task = self.progress.add_task("", total=rows)
            self.progress.start()
        if self.progress is not None:
            self.progress.update(self.task, completed=done, description=text)
        elif done in (self.first, rows) or monotonic() - self.printed >= self.PAUSE:
            self.printed = monotonic()
            put(text, sys.stderr)

    def stop(self) -> None:
        """Remove the bar."""
        if self.progress is not None:
            self.progress.stop()
            self.progress = None
