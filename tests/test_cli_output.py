"""What is wrapped, and what is not: prose in a terminal, and nothing else."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Group
from rich.text import Text

from logitclip.cli import output

PROSE = "A sentence of many words that is longer than a narrow terminal is wide, so it is wrapped."
MARKED = [  # between the marks is what a terminal of 40 columns must not break
    "The model is in «/somewhere/or/other/and/a/long/name/model,» ready to be used.",
    "predict with: «logitclip predict model new.csv -o out.csv,» which takes a second.",
    "A search is slow here; use «`a quoted command of several words`» instead of it.",
    "The extra is missing here: run «pip install 'logitclip[encoders]'» and try again.",
    "Lower the learning rate: it is the option «--lr 0.1» for the digits, in the paper.",
    "From there: «ssh -L 8765:127.0.0.1:8765 THIS_MACHINE.» Stop with Ctrl-C.",
    f"«{'x' * 100}»",
]
TO_COPY = [re.sub("[«»]", "", line) for line in MARKED]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(what, stream, monkeypatch, columns="40"):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    output.put(what, stream)
    return re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())


@pytest.mark.parametrize("columns", ["10", "40", "240"])
@pytest.mark.parametrize("line", [PROSE, *TO_COPY])
def test_a_pipe_wraps_nothing(line, columns, monkeypatch):
    assert printed(line, io.StringIO(), monkeypatch, columns) == f"{line}\n"


def test_a_terminal_wraps_prose_between_words(monkeypatch):
    lines = printed(PROSE, Terminal(), monkeypatch).splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) <= 40
    assert " ".join(line.strip() for line in lines) == PROSE
    assert printed(PROSE, Terminal(), monkeypatch, "240") == f"{PROSE}\n"


@pytest.mark.parametrize("marked", MARKED)
def test_a_terminal_gets_what_is_to_be_copied_in_one_piece(marked, monkeypatch):
    line, piece = re.sub("[«»]", "", marked), marked.partition("«")[2].partition("»")[0]
    lines = printed(line, Terminal(), monkeypatch).splitlines()
    assert any(piece in one for one in lines)
    assert all(len(one) <= 40 or one == piece for one in lines)
    assert " ".join(lines) == line  # every break is at a space


def test_what_was_typed_with_a_space_is_not_wrapped(monkeypatch):
    line = "It was written to this file: my own predictions.csv"
    assert "my own predictions.csv" not in printed(line, Terminal(), monkeypatch)
    monkeypatch.setattr(sys, "argv", ["logitclip", "predict", "-o", "my own predictions.csv"])
    assert "my own predictions.csv" in printed(line, Terminal(), monkeypatch)


def test_the_other_lines_of_a_sentence_are_indented_like_the_first(monkeypatch):
    lines = printed(f"    {PROSE}", Terminal(), monkeypatch).splitlines()
    assert all(line.startswith("    ") and len(line) <= 40 for line in lines)
    assert " ".join(line.strip() for line in lines) == PROSE


def test_each_line_and_each_part_is_judged_by_itself(monkeypatch):
    styled = Text(PROSE, "bold")
    lines = printed(Group(Text("one\ntwo"), styled, "three"), Terminal(), monkeypatch).splitlines()
    assert lines[:2] == ["one", "two"]
    assert lines[-1] == "three"
    assert " ".join(lines[2:-1]) == PROSE


def example(whole=()):
    table = output.make_table(TO_COPY[0], "file", "about", whole=whole)
    table.add_row("a folder/with spaces/that is longer than the terminal.csv", PROSE)
    return table


def test_a_table_is_as_wide_as_its_cells_in_a_pipe(monkeypatch):
    out = printed(example(), io.StringIO(), monkeypatch)
    assert out.startswith(f"{TO_COPY[0]}\n")
    assert PROSE in out


def test_a_table_in_a_terminal_wraps_the_columns_that_are_prose(monkeypatch):
    out = printed(example(whole=["file"]), Terminal(), monkeypatch)
    assert "a folder/with spaces/that is longer than the terminal.csv" in out
    assert PROSE not in out
    assert "sentence" in out.split()
    narrow = printed(example(), Terminal(), monkeypatch)
    assert max(map(len, narrow.splitlines()[3:])) <= 40


def test_control_characters_are_visible(monkeypatch):
    for stream in (io.StringIO(), Terminal()):
        assert printed("red: \x1b[31m", stream, monkeypatch) == "red: ␛[31m\n"


@pytest.mark.parametrize("locale", [{"LC_ALL": "C", "PYTHONUTF8": "0"}, {"PYTHONUTF8": "1"}])
def test_any_text_can_be_printed_in_any_locale(locale):
    """A letter that the locale does not have, and the bytes of a file name that are no text."""
    if locale["PYTHONUTF8"] == "0" and not Path(sys.executable).as_posix().isascii():
        pytest.skip("in the C locale Python does not start in an environment whose path is not ASCII")
    code = "from logitclip.cli import output; output.print_every_character(); output.tell('Gr\\xf6sse \\udcff')"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | locale, capture_output=True)
    assert done.returncode == 0, done.stderr
    letter = "ö".encode() if locale["PYTHONUTF8"] == "1" else rb"\xf6"
    assert done.stderr == b"logitclip: Gr" + letter + b"sse \xff\n"
