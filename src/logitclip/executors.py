"""Where runs are executed: in this process, in a pool on this machine, or on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from logitclip import runs
from logitclip.config import RunConfig
from logitclip.run import Result, read_result

OnEvent = Callable[[str, RunConfig, Any], None]


@dataclass(frozen=True)
class Failure:
    """A run that failed, as `failure.json` in its folder records it."""

    id: str
    error: str  # one sentence
    traceback: str
    attempts: int  # in all, over all sweeps
    final: bool  # it would fail again (it diverged), and is not repeated


def outcome(config: RunConfig) -> Result | Failure | None:
    """What came out of a run, read from its folder; a result wins over an old failure, and None is neither."""
    return _read(Path(config.runs) / config.id)


def execute(
    configs: Iterable[RunConfig],
    *,
    executor: str = "local",
    jobs: int | None = None,
    address: str | None = None,
    on_event: OnEvent | None = None,
) -> None:
    """Run every config that has no outcome yet; a run that fails is recorded and does not harm the others."""
    raise NotImplementedError


def _read(folder: Path) -> Result | Failure | None:
    result = read_result(folder)
    if result is not None:
        return result
    try:
        return Failure(**runs.read_json(folder / "failure.json"))
    except TypeError:  # there is none, or it is of another version
        return None
