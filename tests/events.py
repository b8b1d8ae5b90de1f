"""What a listener heard, as (kind, config, detail), for tests of executors and sweeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from logitclip.runs.config import RunConfig
from logitclip.studies.listener import Listener

Event = tuple[str, RunConfig, Any]


class Log(Listener):
    """Keep the events in order, and call `react` with each: kind ("start" for `on_start`), config and detail."""

    def __init__(self, react: Callable[[str, RunConfig, Any], None] | None = None) -> None:
        self.events: list[Event] = []
        self.react = react or (lambda *_: None)

    def __iter__(self) -> Any:
        return iter(self.events)

    def kinds(self, config: RunConfig) -> list[str]:
        """The kinds of a run's events, without progress inside an epoch."""
        return [kind for kind, of, _ in self.events if of == config and kind != "batch"]

    def of(self, kind: str) -> list[RunConfig]:
        """The configs of all events of a kind."""
        return [config for name, config, _ in self.events if name == kind]


def _record(kind: str) -> Callable[..., None]:
    def method(self: Log, config: RunConfig, detail: Any = None) -> None:
        self.events.append((kind, config, detail))
        self.react(kind, config, detail)

    return method


for _name in [name for name in vars(Listener) if name.startswith("on_")]:
    setattr(Log, _name, _record(_name.removeprefix("on_")))
