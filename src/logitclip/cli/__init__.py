"""The command line. Data goes to stdout, progress and errors to stderr; docs/cli.md lists the exit codes.

A command is a function in one of this package's modules and a line in `COMMANDS`. The modules import nothing heavy
before a command runs, so that `logitclip --help` is quick.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import inspect
import io
import logging
import os
import re
import shlex
import shutil
import sys
import tempfile
import textwrap
import traceback
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import tyro
from tyro.conf import OmitArgPrefixes, PositionalMetavarFromFieldName

import logitclip
from logitclip import files
from logitclip.cli.output import Exit, fail, make_table, print_every_character, put, show
from logitclip.cli.own_data import export, fit, issues, predict
from logitclip.cli.reference import bound, list_names, noise, paper
from logitclip.cli.review import apply, review
from logitclip.cli.runs import runs
from logitclip.cli.studies import figures, report, sweep
from logitclip.cli.training import train
from logitclip.cli.tuning import tune
from logitclip.registry import UnknownName, suggest
from logitclip.runs.claims import Claimed
from logitclip.runs.config import RunConfig as RunConfig
from logitclip.runs.plugins import PLUGIN_MODULE

COMMANDS: dict[str, Callable[..., None]] = {
    "train": train,
    "tune": tune,
    "sweep": sweep,
    "fit": fit,
    "predict": predict,
    "export": export,
    "issues": issues,
    "review": review,
    "apply": apply,
    "report": report,
    "figures": figures,
    "runs": runs,
    "list": list_names,
    "paper": paper,
    "noise": noise,
    "bound": bound,
}

FIRST = {  # things to try: a command, and what it does
    "logitclip fit train.csv --label COLUMN": "a model of your own table, images or texts, and their wrong labels",
    "logitclip train --noise symmetric:rate=0.5": "digits with half of the labels wrong: the network memorises them",
    "logitclip train --noise symmetric:rate=0.5 --clip norm:temp=1.5": "the same with the clip",
    "logitclip sweep quickstart": "both for three losses and two kinds of noise, in about two minutes",
}

MARKERS = (OmitArgPrefixes, PositionalMetavarFromFieldName)


def main() -> None:
    """Run the command line: the entry point of the console script `logitclip`."""
    print_every_character()
    handler = logging.StreamHandler()
    handler.addFilter(Once())
    logging.basicConfig(format="logitclip: %(message)s", handlers=[handler])
    atexit.register(gc.freeze)  # with torch imported, the last garbage collection would take a second
    try:
        _run_command(sys.argv[1:])
    except BrokenPipeError:  # `logitclip list losses | head`
        raise SystemExit(0) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:
        _flush_streams()
        _explain_error(error)
    finally:
        _flush_streams()


def _flush_streams() -> None:
    """Flush; on a broken pipe, redirect to /dev/null first, or the interpreter would fail at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Once(logging.Filter):
    """A filter that lets each message pass once: every run of a search reads the same data and repeats its warnings."""

    def __init__(self) -> None:
        super().__init__()
        self.passed: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            message = record.getMessage()
        except Exception:  # a call with wrong arguments, which the handler reports
            return True
        known = message in self.passed
        self.passed.add(message)
        return not known


def _run_command(arguments: list[str]) -> None:
    first = arguments[0] if arguments else None
    if first in COMMANDS:
        _parse(first, arguments[1:])()
    elif first == "--version":
        put(f"logitclip {logitclip.__version__}", sys.stdout)
    elif first in (None, "-h", "--help"):
        _show_overview(every_command=first is not None)
    elif first is not None and first.startswith("--tyro-"):  # the shell's completion
        _complete(arguments)
    else:
        raise ValueError(f"Unknown command {first!r}. {suggest(str(first), COMMANDS)} `logitclip --help` lists them.")


def _parse(name: str, arguments: list[str]) -> Callable[[], None]:
    """Parse the arguments of a command, and return a call of it."""
    for option in ("--text", "--drop"):
        if sum(word == option or word.startswith(f"{option}=") for word in arguments) > 1:
            raise ValueError(f"{option} is given twice: give it once, with the columns separated by commas.")

    @functools.wraps(COMMANDS[name])
    def prepare(*args: object, **options: object) -> Callable[[], None]:
        return functools.partial(COMMANDS[name], *args, **options)

    about = _fill(COMMANDS[name].__doc__ or "") if sys.stdout.isatty() else None
    with contextlib.nullcontext() if {"-h", "--help"} & {*arguments} else _unframed_in_pipes():
        return tyro.cli(prepare, prog=f"logitclip {name}", description=about, args=arguments, config=MARKERS)


def _fill(docstring: str) -> str:
    """Wrap what stands before the arguments, which tyro leaves to the terminal: that would break words."""
    paragraphs = inspect.cleandoc(docstring).partition("\nArgs:")[0].strip().split("\n\n")
    fill = functools.partial(textwrap.fill, break_long_words=False, break_on_hyphens=False)
    # tyro joins lines that begin with a letter, so each begins with a space.
    space = {"width": shutil.get_terminal_size().columns, "initial_indent": " ", "subsequent_indent": " "}
    return "\n\n".join(fill(" ".join(part.split()), **space) for part in paragraphs)


@contextlib.contextmanager
def _unframed_in_pipes() -> Iterator[None]:
    """Print what tyro says about a mistake without its frame, which would wrap lines, unless stderr is a terminal."""
    if sys.stderr.isatty():
        yield
        return
    before, said = os.environ.get("COLUMNS"), io.StringIO()
    os.environ["COLUMNS"] = "10000"
    try:
        with contextlib.redirect_stderr(said):
            yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
        lines = (re.sub(r"^[│|] ?|\s*[│|]?$", "", line) for line in said.getvalue().splitlines())
        for line in lines:
            if line.strip(" ╭╮╰╯─-+") and line[0] not in "╭╰":
                put(line, sys.stderr)


def _complete(arguments: list[str]) -> None:
    """Print or write the completions of a shell, and exit."""
    options, path = arguments, None
    if len(arguments) == 3 and arguments[0] == "--tyro-write-completion" and arguments[2] != "-":
        # tyro would write the file in the encoding of the locale, which may lack letters of the help.
        options, path = ["--tyro-print-completion", arguments[1]], Path(arguments[2])
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(sys.stdout if path is None else printed):
            tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="logitclip", args=options, config=(OmitArgPrefixes,))
    finally:
        if path is not None and printed.getvalue():
            files.write(path, printed.getvalue().encode())


def _show_overview(*, every_command: bool) -> None:
    """Show what logitclip is and the first things to try, or all commands."""
    show(
        f"[bold]logitclip {logitclip.__version__}[/]: train on labels you do not trust. It clips the norm of the "
        "logits before the loss, so that the network memorises fewer wrong labels.\n"
    )
    if every_command:
        table = make_table("", "command", "what it does")
        for name, function in COMMANDS.items():
            table.add_row(f"[bold]{name}[/]", (function.__doc__ or "").partition("\n")[0])
        show(table)
        show("`logitclip COMMAND --help` shows the options of a command, `logitclip --version` the version.")
        return
    for command, about in FIRST.items():
        show(f"[bold]{command}[/]")
        show(f"    {about}")
    show("\n`logitclip --help` lists all commands.")


def _explain_error(error: Exception) -> NoReturn:
    """Print what went wrong in one sentence, and exit."""
    place = _find_plugin_line(error)
    if isinstance(error, ValueError | OSError | ImportError | Claimed):
        where = "" if place is None else f" (raised in the plugin {place})"
        fail(Exit.MISTAKE, f"{_describe(error)}{_suggest_remedy(error)}{where}")
    with tempfile.NamedTemporaryFile(prefix="logitclip-", suffix=".txt", delete=False) as file:
        file.write("".join(traceback.format_exception(error)).encode("utf-8", "backslashreplace"))
    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200] or 'no reason given'}"
    if place is not None:
        fail(Exit.MISTAKE, f"The plugin {place} raised {reason}. The traceback is in {file.name}.")
    fail(Exit.UNEXPECTED, f"Unexpected {reason}. The traceback is in {file.name}.")


def _describe(error: Exception) -> str:
    """Return the message of an error; of one of the system, the file and the reason without their notation."""
    if isinstance(error, OSError) and error.filename is not None and str(error).startswith("[Errno"):
        return f"{error.filename} cannot be used: {error.strerror}."
    return str(error)


def _find_plugin_line(error: Exception) -> str | None:
    """Return the line of a plugin that is nearest to an error; None if no plugin was involved."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if str(frame.f_globals.get("__name__")).startswith(PLUGIN_MODULE):
            return f"{frame.f_code.co_filename}, line {line}"
    return None


def _suggest_remedy(error: BaseException | None) -> str:
    """Suggest what to do about an unknown name."""
    while error is not None and not isinstance(error, UnknownName):
        error = error.__cause__
    if error is None:
        return ""
    if error.kind == "dataset" and (Path(error.name).suffix or Path(error.name).exists()):
        table, folder = (shlex.quote(f"{what}:path={error.name}") for what in ("table", "folder"))
        own = f"--data {table},label=COLUMN or --data {folder}"
        return f" For your own data: `logitclip fit {shlex.quote(error.name)} --label COLUMN`, or {own}."
    if not _takes_plugins(command := sys.argv[1]):
        return ""
    recipe = ', and in the recipe plugin = ["FILE.py"]' if command == "sweep" else ""
    return f" To add your own, name its file: --plugin FILE.py{recipe}."


def _takes_plugins(command: str) -> bool:
    """Return whether a command has the option --plugin, of its own or among those of a run."""
    options = typing.get_type_hints(COMMANDS[command]) if command in COMMANDS else {}
    return "plugin" in options or any(hasattr(kind, "plugin") for kind in options.values())
