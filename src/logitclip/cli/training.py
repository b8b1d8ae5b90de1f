"""The command that trains one model."""

from __future__ import annotations

import logging
import os
import signal
from dataclasses import asdict
from pathlib import Path

from logitclip.cli.options import Flag, Quiet, RunOptions, Text, Verbose
from logitclip.cli.output import Exit, fail, show, show_json, tell
from logitclip.cli.terminal import EncodingBar, TrainingBar, announce, result_table
from logitclip.runs.config import require_numbers
from logitclip.runs.results import record_failure


def train(
    config: RunOptions,
    *,
    download: Flag = False,
    mirror: Text = None,
    json: Flag = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Train one model; without options, cross entropy on the digits.

    Example: logitclip train --noise symmetric:rate=0.5 --clip norm:temp=1.5

    Args:
        download: Download the data, and the encoder if there is one, if they are missing.
        mirror: Download it from this folder or address instead of the official one.
        json: Print the result as one JSON object on stdout.
    """
    first = os.environ.get("RANK", "0") == "0"  # of several processes of torchrun, the first one reports
    set_verbosity(quiet, verbose)
    require_numbers(config)
    if first and not quiet:
        what = f"{config.data}, loss {config.loss}, clip {config.clip}, noise {config.noise}"
        announce(f"training on {what}", config.runs)
    from logitclip.engine import Diverged  # slow: it imports torch
    from logitclip.launch import without_destructors
    from logitclip.runs.train import train

    stop_on_sigterm()
    bar, encoding = TrainingBar(quiet=quiet, verbose=verbose), EncodingBar(quiet=quiet or not first)
    try:
        with without_destructors():  # under torchrun it has joined a process group
            result = train(config, on_epoch=bar, on_rows=encoding, download=download, mirror=mirror)
    except (KeyboardInterrupt, SystemExit):
        encoding.stop()
        bar.stop()
        tell("interrupted. Repeat the command to resume from the last whole epoch.")
        raise
    except Diverged as error:
        bar.stop()
        record_failure(Path(config.runs) / config.id, config, str(error), final=True)
        fail(Exit.FAILED, str(error))
    finally:
        bar.stop()
    if not first:
        return
    if json:
        show_json(asdict(result))
        return
    show(result_table(result))


def set_verbosity(quiet: bool, verbose: bool) -> None:
    """Log at the level that -q and -v ask for."""
    if quiet and verbose:
        raise ValueError("--quiet and --verbose exclude each other.")
    logging.getLogger("logitclip").setLevel(logging.INFO if verbose else logging.WARNING)


def stop_on_sigterm() -> None:
    """On SIGTERM, save and stop as on Ctrl-C; ignore a second signal."""

    def stop(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
