"""Words for people: counts, lists, durations, and text that cannot steer a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

# Control characters as visible symbols of the same width, so that text from files cannot steer a terminal or reorder a
# line. Tab and newline stay.
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {0x7F: 0x2421}
_VISIBLE |= dict.fromkeys([*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)], 0xFFFD)


def printable(text: str) -> str:
    """Replace control characters by visible ones.

    >>> printable("red: \\x1b[31m")
    'red: ␛[31m'
    """
    return text.translate(_VISIBLE)


def guard_formula(text: str) -> str:
    """Keep spreadsheets from reading the text of a CSV cell as a formula: a quote comes first.

    It is for lists that people look at, such as issues.csv; data that `fit` may read has its values as they are.

    >>> guard_formula("=HYPERLINK(1)"), guard_formula("ce"), guard_formula("-1.5")
    ("'=HYPERLINK(1)", 'ce', '-1.5')
    """
    return f"'{text}" if _is_formula(text) else text


def unguard_formula(text: str) -> str:
    """Undo `guard_formula`."""
    return text[1:] if text[:1] == "'" and _is_formula(text) else text


def _is_formula(text: str) -> bool:
    text = text.lstrip("'")  # a quote before a formula gets another one, so that each text has its own guarded form
    return text[:1] in ("=", "+", "@", "\t", "\r") or (text[:1] == "-" and not text[1:2].isdigit())


def counted(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "run"), counted(36, "run")
    ('1 run', '36 runs')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def join_names(names: Iterable[str], most: int = 20) -> str:
    """Return names in a row, and how many are left out.

    >>> join_names(["a", "b", "c", "d"], most=2), join_names(["a", "b"])
    ('a, b, ... 2 more', 'a, b')
    """
    every = list(names)
    return ", ".join([*every[:most], *([f"... {len(every) - most} more"] if len(every) > most else [])])


def split_names(text: str | None) -> list[str]:
    """Return the names in a text that separates them with commas.

    >>> split_names("age, height"), split_names(None)
    (['age', 'height'], [])
    """
    return [name.strip() for name in text.split(",")] if text else []


def quote_some(names: Sequence[str]) -> str:
    """Return the first three names, quoted, and how many there are besides.

    >>> quote_some(["a", "b"]), quote_some(["a", "b", "c", "d", "e"])
    ("'a', 'b'", "'a', 'b', 'c' and 2 more")
    """
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def duration(seconds: float) -> str:
    """Return seconds as people say them.

    >>> duration(31.2), duration(100), duration(9000)
    ('31 s', '1 min 40 s', '2 h 30 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, without its full stop; the name of its type if it has no message.

    >>> first_line(OSError("The disk is full.\\nTraceback")), first_line(KeyError())
    ('The disk is full', 'KeyError')
    """
    return (str(error).strip() or type(error).__name__).partition("\n")[0].rstrip(".")


@contextlib.contextmanager
def explain_missing(sentence: str, extra: str) -> Iterator[None]:
    """Say which extra to install if a package that is imported in this block is missing.

    >>> with explain_missing("Figures need Altair", "report"):
    ...     import no_such_package
    Traceback (most recent call last):
    ImportError: Figures need Altair: pip install 'logitclip[report]'.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{sentence}: pip install 'logitclip[{extra}]'.") from error
