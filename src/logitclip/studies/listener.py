"""`Listener`: what a command line, a notebook or a test hears about runs while they are made."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from logitclip.engine import EpochRow
    from logitclip.runs.config import RunConfig
    from logitclip.runs.results import Failure, Result


class Listener:
    """Hears what happens to runs. Every method does nothing: override those you need.

    >>> class Counter(Listener):
    ...     done = 0
    ...     def on_done(self, config, result):
    ...         self.done += 1
    """

    def on_queued(self, config: RunConfig) -> None:
        """The run has no result yet and will be made."""

    def on_skipped(self, config: RunConfig, outcome: Result | Failure) -> None:
        """The run already has an outcome."""

    def on_encoding(self, config: RunConfig, done: int, rows: int) -> None:
        """`done` of the rows have features; called after each block, before any run starts."""

    def on_start(self, config: RunConfig, row: EpochRow | None) -> None:
        """The run starts; `row` is the last row of a run that is resumed."""

    def on_epoch(self, config: RunConfig, row: EpochRow) -> None:
        """An epoch has ended; `row` is its row of metrics."""

    def on_done(self, config: RunConfig, result: Result) -> None:
        """The run has a result."""

    def on_failed(self, config: RunConfig, failure: Failure) -> None:
        """The run failed; the others continue."""

    def on_elsewhere(self, config: RunConfig) -> None:
        """Another process trains the run."""

    def on_tuning(self, config: RunConfig, cells: int) -> None:
        """A value of the config is to be tuned; `cells` cells wait for it."""

    def on_chosen(self, config: RunConfig, decision: RunConfig | Failure) -> None:
        """The value is chosen: the tuned config, or a failure if no value could be chosen."""
