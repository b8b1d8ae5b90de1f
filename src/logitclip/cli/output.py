"""Printing for the commands: data to stdout, everything else to stderr. `put` decides what is wrapped."""

from __future__ import annotations

import codecs
import contextlib
import enum
import json
import math
import re
import sys
from collections.abc import Sequence
from typing import NoReturn, TextIO

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from logitclip.text import printable

_TO_COPY = re.compile(
    r"`[^`]*`|(?<!\w)'[^']*'(?!\w)|--[a-z][\w-]* \w\S*"  # something quoted, an option and its value
    r"|pip install \S+|\b(logitclip|ssh) [a-z-].*?(?=[;,.]( |$)|$)"  # a command, up to the end of the clause
)


class Piped(Console):
    """A console that tells when nobody reads its output any more; rich would exit with 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def put(what: RenderableType, stream: TextIO) -> None:
    """Print text or a table. All output for people passes here, and only here is decided what is wrapped.

    Nothing is wrapped in a pipe or a file. In a terminal, text and the cells of a table are wrapped between words. What
    is to be copied, as a command, and a column that holds such things (see `make_table`) stay whole in a terminal too.

    Args:
        what: A string, printed as it is; or a `Text`, a table or a group of them.
        stream: Where to print it.
    """
    console = Piped(file=stream, highlight=False)
    terminal = console.is_terminal
    for part in what.renderables if isinstance(what, Group) else [what]:
        title = Text(part) if isinstance(part, str) else part
        if isinstance(part, Table):  # its title is a line like any other, not as narrow as the table
            title, part.title = part.title, None
        if isinstance(title, Text):
            for line in title.split("\n", allow_blank=True):
                for piece in _wrap(line, console.width) if terminal else [line]:
                    console.print(Printable(piece), soft_wrap=True)
        if isinstance(part, Table):
            _keep_whole(part, console, every=not terminal)
        if not isinstance(part, str | Text):
            console.print(Printable(part), crop=False)


def _wrap(line: Text, width: int) -> list[Text]:
    """Break a line between words, but not within what is to be copied; something longer than the width stays whole."""
    plain = line.plain
    known = [re.escape(word) + r"\S*" for word in sys.argv[1:] if " " in word]  # as in my photos/a.png
    copied = [found.span() for pattern in (_TO_COPY, *known) for found in re.finditer(pattern, plain)]
    spaces = [found for found in re.finditer(" +", plain) if not any(a < found.end() < b for a, b in copied)]
    indent = Text(" " * (len(plain) - len(plain.lstrip(" "))))
    breaks, start, last = [], 0, 0
    for end, following in [*(found.span() for found in spaces), (len(plain), len(plain))]:
        if cell_len(plain[start:end]) > width - len(indent) * bool(breaks) and plain[start:last].strip():
            breaks.append(last)
            start = last
        last = following
    pieces = list(line.divide(breaks))
    for piece in pieces[:-1]:
        piece.rstrip()
    return [pieces[0], *(indent + piece for piece in pieces[1:])]


def _keep_whole(table: Table, console: Console, *, every: bool) -> None:
    """Make columns as wide as their cells, those that `make_table` was told or every one, and the console so wide."""
    if not every and not any(column.no_wrap for column in table.columns):
        return
    wide, needed = console.options.update(max_width=10**6), 0
    for column in table.columns:
        longest = max(console.measure(cell, options=wide).maximum for cell in (column.header, *column.cells))
        column.min_width = longest if column.no_wrap or every else min(longest, column.min_width or 12)
        needed += column.min_width + 3  # 3: the most between two columns
    console.width = max(console.width, needed)


class Printable:
    """Something for rich to print, with the control characters in its text made visible."""

    def __init__(self, content: RenderableType) -> None:
        self.content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self.content, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def make_table(title: str, *columns: str, whole: Sequence[str] = ()) -> Table:
    """Make a table for `put`.

    Args:
        title: The line above it.
        columns: The heads of its columns.
        whole: Columns that are never wrapped: what is in them is to be copied.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.title = Text(title, "italic") if title else None
    for column in columns:
        justify = "right" if column in ("lower", "upper") else "left"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=column in whole)
    return table


def show(what: RenderableType) -> None:
    """Print text or a table to stdout. A string is rich markup: escape what comes from files or users."""
    put(Text.from_markup(what) if isinstance(what, str) else what, sys.stdout)


def can_be_bold(stream: TextIO) -> bool:
    """Return whether people see bold text in what is printed there: not in a pipe, or in a terminal without styles."""
    return Console(file=stream).color_system is not None


def tell(sentence: str) -> None:
    """Print a sentence to stderr."""
    put(f"logitclip: {sentence}", sys.stderr)


def show_json(what: object) -> None:
    """Print JSON to stdout; NaN and infinity, which it does not have, become null."""
    print(json.dumps(_replace_nonfinite(what), indent=2, default=str))


def _replace_nonfinite(what: object) -> object:
    if isinstance(what, dict):
        return {key: _replace_nonfinite(value) for key, value in what.items()}
    if isinstance(what, list | tuple):
        return [_replace_nonfinite(value) for value in what]
    return None if isinstance(what, float) and not math.isfinite(what) else what


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


def print_every_character() -> None:
    """Let stdout and stderr take any text, whatever the locale.

    The bytes of a file name that is not text are printed as they are; a letter that the encoding does not have is
    printed as its number.
    """

    def encode(error: UnicodeError) -> tuple[str | bytes, int]:
        assert isinstance(error, UnicodeEncodeError)
        handler = "surrogateescape" if "\udc80" <= error.object[error.start] <= "\udcff" else "backslashreplace"
        one = UnicodeEncodeError(error.encoding, error.object, error.start, error.start + 1, error.reason)
        return codecs.lookup_error(handler)(one)

    codecs.register_error("logitclip", encode)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # a stream that somebody put there, or none
            stream.reconfigure(errors="logitclip")  # type: ignore[union-attr]
