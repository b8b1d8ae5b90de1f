"""Terminal output: progress of an encoder, of one run and of many, and tables of results."""

from __future__ import annotations

import atexit
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from rich import progress
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from logitclip.cli.output import Printable, make_table, put, tell
from logitclip.runs.config import RunConfig, resolved_id, words_to_tune
from logitclip.runs.results import Failure
from logitclip.studies.listener import Listener
from logitclip.text import counted, duration

if TYPE_CHECKING:
    from logitclip.engine import EpochRow
    from logitclip.noise import NoisyLabels
    from logitclip.runs.results import Result


def announce(what: str, runs: str | Path) -> None:
    """Print on stderr what will run, where it is kept, and how to stop and resume it; before anything slow happens."""
    tell(f"{what}; kept in {runs}/. Ctrl-C saves and stops; repeat the command to resume.")


def seconds_left(seconds: float, done: float, total: float) -> float | None:
    """Estimate the time left if `done` of `total`, in any unit, took `seconds`; None if nothing is done.

    >>> seconds_left(30, 1, 3)
    60.0
    """
    return seconds * max(0.0, total - done) / done if done > 0 else None


class SweepBoard(Listener):
    """The state of a sweep, on stderr: a live table on a terminal, lines in a pipe or a log file.

    Args:
        configs: The runs; a run is described by the options that differ between them.
        tuned: The field that is being tuned, if any.
        quiet: Print only errors.
        verbose: Print every event.
    """

    PAUSE = 5.0  # least seconds between two lines about runs that start or end
    LONG = 30.0  # seconds without a line after which an epoch is worth one

    def __init__(
        self,
        name: str,
        configs: list[RunConfig],
        tuned: str | None = None,
        *,
        quiet: bool = False,
        verbose: bool = False,
    ) -> None:
        words = [tuned, *(field for config in configs for field, *_ in words_to_tune(config))]
        self.fields = [f for f in vars(RunConfig()) if len({getattr(c, f) for c in configs}) > 1 or f in words]
        self.name, self.quiet, self.verbose = name, quiet, verbose
        self.queued = self.done = self.failed = 0
        self.before = 0  # results of earlier sweeps
        self.errors: dict[str, list[tuple[str, str]]] = {}  # a sentence -> the runs it is about, and where to read more
        self.undecided: dict[RunConfig, int] = {}  # a config to tune -> the runs that wait for it
        self.running: dict[RunConfig, tuple[float, EpochRow | None]] = {}  # run -> epochs at its start, last row
        self.epochs: dict[RunConfig, int | None] = {}
        self.ended = 0  # runs that were made here
        self.started, self.first = monotonic(), math.inf  # when this began, and its first run
        self.encoding, self.rows = "", EncodingBar()
        self.printed = -math.inf
        self.console = Console(stderr=True, highlight=False)
        self.live = Live(get_renderable=self.table, console=self.console, refresh_per_second=2, transient=True)
        if self.console.is_terminal and not quiet:
            atexit.register(self.stop)  # or the cursor stays hidden
            self.live.start()

    def on_tuning(self, config: RunConfig, cells: int) -> None:
        self.undecided[config] = cells

    def on_chosen(self, config: RunConfig, decision: RunConfig | Failure) -> None:
        waiting = self.undecided.pop(config, 0)
        if not isinstance(decision, RunConfig):
            self.queued, self.failed = self.queued + waiting, self.failed + waiting
            self._note(config, decision)

    def on_queued(self, config: RunConfig) -> None:
        self.queued += 1

    def on_encoding(self, config: RunConfig, done: int, rows: int) -> None:
        self.encoding = self.rows.text(done, rows) if done < rows else ""
        self._line(monotonic(), self.encoding or "features are ready", self.LONG)

    def on_skipped(self, config: RunConfig, outcome: Result | Failure) -> None:
        failed = isinstance(outcome, Failure)
        self.queued += 1
        self.before += not failed
        self.failed += failed
        self._note(config, outcome)

    def on_elsewhere(self, config: RunConfig) -> None:
        self.running.pop(config, None)

    def on_start(self, config: RunConfig, row: EpochRow | None) -> None:
        now = monotonic()
        self.first = min(self.first, now)
        self.epochs[config] = config.resolve().epochs
        self.running[config] = _count_epochs(row), row
        self._line(now, f"started {self.label(config)}", self.PAUSE)

    def on_epoch(self, config: RunConfig, row: EpochRow) -> None:
        self.running[config] = (self.running[config][0] if config in self.running else 0), row
        self._line(monotonic(), f"{self.label(config)}: {epoch_text(row, self.epochs[config], config.data)}", self.LONG)

    def on_done(self, config: RunConfig, result: Result) -> None:
        self.done += 1
        self._end(config, result)

    def on_failed(self, config: RunConfig, failure: Failure) -> None:
        self.failed += 1
        self._end(config, failure)

    def _end(self, config: RunConfig, outcome: Result | Failure) -> None:
        self.ended += self.running.pop(config, None) is not None  # or another process has made it
        self._note(config, outcome)
        if isinstance(outcome, Failure):
            event = outcome.error
        elif config.val:
            event = f"validation accuracy (noisy labels) {outcome.val_accuracy:.2f} %"
        else:
            event = f"{test_words(config.data)} {outcome.last10_accuracy:.2f} %"
        self._line(monotonic(), f"{self.label(config)}: {event}", self.PAUSE)

    def _line(self, now: float, event: str, pause: float) -> None:
        """Print the state and an event, unless there is a live table or the last line is younger than `pause`."""
        if self.quiet or self.console.is_terminal or now - self.printed < (0 if self.verbose else pause):
            return
        self.printed = now
        put(f"{self.state()}; {event}", sys.stderr)

    def _note(self, config: RunConfig, found: Result | Failure) -> None:
        """Keep what went wrong for the end."""
        if isinstance(found, Failure):
            file = Path(config.runs) / found.id / "failure.json"
            see = f" See {file}." if found.id and file.exists() else ""
            self.errors.setdefault(found.error, []).append((self.label(config), see))

    def label(self, config: RunConfig) -> str:
        """Describe a run by the options that differ from the other runs."""
        values = {name: getattr(config, name) for name in self.fields if name not in ("noise_seed", "plugin")}
        values = {name: value for name, value in values.items() if value not in (None, ())}
        plain = {name: isinstance(value, str) and value != "none" for name, value in values.items()}
        text = ", ".join(f"{value}" if plain[name] else f"{name} {value}" for name, value in values.items())
        return text + (", tuning" if config.val else "") or self.name

    def state(self) -> str:
        """Return the number of runs in each state, which add up to all runs, and an estimate of the time left."""
        total = self.queued + sum(self.undecided.values())
        done, running = self.done + self.before, len(self.running)
        left = total - done - running - self.failed
        text = f"{self.name}: of {total} runs {done} done, {running} running, {self.failed} failed, {left} left"
        parts = [(_count_epochs(row) - first) / (self.epochs[c] or 1) for c, (first, row) in list(self.running.items())]
        seconds = seconds_left(monotonic() - self.first, self.ended + sum(parts), self.ended + running + left)
        text = f"{text}. {self.encoding}" if self.encoding else text
        return text if seconds is None or not left + running else f"{text}, about {duration(seconds)}"

    def table(self) -> Printable:
        """Return the state, and the runs at work."""
        from logitclip.data.dataset import trusted_test

        table = make_table("", "run", "epoch", "test accuracy")
        for config, (_, row) in list(self.running.items())[: max(1, self.console.height - 6)]:
            noisy = "" if trusted_test(config.data) else " (noisy labels)"
            accuracy = "" if row is None else f"{row['test_accuracy']:.1f} %{noisy}"
            table.add_row(escape(self.label(config)), f"{_count_epochs(row)}/{self.epochs[config]}", accuracy)
        return Printable(Group(escape(self.state()), table) if self.running else escape(self.state()))

    @property
    def seconds(self) -> float:
        return monotonic() - self.started

    def stop(self) -> None:
        self.live.stop()

    def __enter__(self) -> SweepBoard:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Print the failures and, after an interrupt, how to resume."""
        self.stop()
        for error, [(label, file), *more] in self.errors.items():
            others = f" and {len(more)} more" if more else ""
            tell(f"{label}{others}: {error}{file}")
        if kind is not None and issubclass(kind, KeyboardInterrupt | SystemExit):
            tell("interrupted. Repeat the command to resume.")


def _count_epochs(row: EpochRow | None) -> int:
    """Return how many epochs have ended, by the last row of a run."""
    return 0 if row is None else row["epoch"] + 1


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
        self.progress: progress.Progress | None = None

    def text(self, done: int, rows: int) -> str:
        """Return the progress in words."""
        if self.first is None:
            self.first, self.started = done, monotonic()
        speed = (done - self.first) / max(monotonic() - self.started, 1e-9)
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
            columns = (progress.BarColumn(), progress.TextColumn("{task.description}"))
            self.progress = progress.Progress(*columns, console=Console(stderr=True), transient=True)
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


class TrainingBar:
    """Progress of one run on stderr: a bar on a terminal, lines in a pipe or a log file.

    The first line has the network, the number of epochs and the folder. A line follows the first and the last epoch,
    and every epoch that ends `PAUSE` seconds or more after the last line.

    Args:
        quiet: Print nothing.
        verbose: Print a line for every epoch, also on a terminal.
    """

    PAUSE = 30.0

    def __init__(self, *, quiet: bool = False, verbose: bool = False) -> None:
        self.quiet, self.verbose = quiet, verbose
        self.progress: progress.Progress | None = None  # made in the process that trains
        self.started = self.printed = -math.inf
        self.first = 0  # epochs done when it started

    def __call__(self, config: RunConfig, row: EpochRow | None) -> None:
        """Show the row of an epoch; the first call, with the last row of a resumed run or None, starts the bar."""
        if self.quiet:
            return
        done = _count_epochs(row)
        if self.started == -math.inf:
            self._start(config, done)
            return
        assert row is not None
        total = config.epochs or done
        text = epoch_text(row, config.epochs, config.data)
        if self.progress is not None:
            self.progress.update(self.task, completed=done, numbers=text.partition(": ")[2])
        elif self.verbose or done in (self.first + 1, config.epochs) or monotonic() - self.printed >= self.PAUSE:
            self.printed = monotonic()
            left = seconds_left(self.printed - self.started, done - self.first, total - self.first)
            put(f"{text}, {duration(left or 0)} left", sys.stderr)
        if done == config.epochs:
            self.stop()

    def _start(self, config: RunConfig, done: int) -> None:
        self.started, self.first = monotonic(), done
        console = Console(stderr=True)
        epochs = counted(config.epochs or 0, "epoch")
        resumed = f", resumed after epoch {done}" if done else ""
        folder = Path(config.runs) / resolved_id(config)
        tell(f"network {config.model}, {epochs}{resumed}, in {folder}.")
        if not console.is_terminal or self.verbose:
            return
        columns = (
            progress.TextColumn("epoch"),
            progress.MofNCompleteColumn(),
            progress.BarColumn(bar_width=20),
            progress.TextColumn("{task.fields[numbers]}"),
            progress.TimeRemainingColumn(),
        )
        self.progress = progress.Progress(*columns, console=console)
        self.task = self.progress.add_task("", total=config.epochs, completed=done, numbers="")
        self.progress.start()
        atexit.register(self.stop)  # or the cursor stays hidden

    def stop(self) -> None:
        if self.progress is not None:
            self.progress.stop()


def epoch_text(row: EpochRow, epochs: int | None, data: str) -> str:
    """Describe an epoch in one line.

    >>> row = {"epoch": 1, "loss": 1.25, "test_accuracy": 87.5, "memorised": 12.5}
    >>> epoch_text(row, 4, "digits")
    'epoch 2/4: loss 1.250, test accuracy 87.5 %, memorised 12.5 %'
    >>> epoch_text({**row, "memorised": None}, 4, "table:path=x.csv,label=y")
    'epoch 2/4: loss 1.250, test accuracy (noisy labels) 87.5 %'
    """
    test = test_words(data)
    text = f"epoch {row['epoch'] + 1}/{epochs}: loss {row['loss']:.3f}, {test} {row['test_accuracy']:.1f} %"
    validation, memorised = row.get("val_accuracy"), row.get("memorised")
    text += "" if validation is None else f", validation accuracy (noisy labels) {validation:.1f} %"
    return text + ("" if memorised is None else f", memorised {memorised:.1f} %")


def test_words(data: str) -> str:
    """Name the test accuracy on a dataset, with a word if its labels may be noisy."""
    from logitclip.data.dataset import trusted_test

    return "test accuracy" if trusted_test(data) else "test accuracy (noisy labels)"


def result_table(result: Result) -> Group:
    """Return the result of a run as a table, with its folder below."""
    from logitclip.data.dataset import trusted_test

    known = result.noise_rate > 0
    test = "test accuracy" if trusted_test(result.config["data"]) else "test accuracy on labels that may be noisy"
    rows = {
        f"{test}, mean of the last 10 epochs": f"[bold]{result.last10_accuracy:.2f} %[/]",
        f"{test}, best epoch (chosen on the test set)": f"{result.best_accuracy:.2f} %",
        "of noisy labels, a perfect classifier predicts": None if test == "test accuracy" else "1 - their noise rate",
        "validation accuracy, on noisy labels": _format_percent(result.val_accuracy),
        "wrong labels among the training labels": f"{result.noise_rate:.2f} %" if known else "unknown or none",
        "of these memorised (predicted as given)": _format_percent(result.memorised),
        "of these recovered (predicted as true)": _format_percent(result.recovered),
        "time": f"{result.seconds:.1f} s for {counted(result.epochs, 'epoch')} on {result.device}",
    }
    setting = f"{result.config['data']}, {result.config['loss']}, clip {result.clip}, noise {result.config['noise']}"
    table = make_table(setting, "", "")
    table.show_header = False
    for name, value in rows.items():
        if value is not None:
            table.add_row(name, value)
    return Group(table, f"Folder: {result.folder}")


def _format_percent(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f} %"


def noise_preview(record: NoisyLabels, class_names: Sequence[str] | None = None) -> Group:
    """Return rate, rates per class and the transition matrix of a noise record, coloured by value, for a terminal.

    With more than 12 classes, the range of the rates and the largest confusions replace the matrix.
    """
    names = [str(c) for c in (range(record.num_classes) if class_names is None else class_names)]
    percent, rates = 100 * record.transition, 100 * record.class_rates
    wrong = "images are replaced" if record.replaced is not None else "labels are wrong"
    head = Text.assemble(
        (record.rule, "bold"),
        f", seed {record.seed}\n",
        (f"{100 * record.rate:.2f} %", "bold"),
        f" of {len(record.labels):,} {wrong}; content {record.content_hash[:12]}\n",
    )
    table = Table(box=None, padding=0, header_style="dim")
    if record.num_classes <= 12:
        head.append("\ntrue class (row), label (column), in % of the row", "dim")
        table.add_column("", no_wrap=True, max_width=12)
        for title in ("examples", " wrong ", *(escape(f"{name[:4]} ") for name in names)):
            table.add_column(title, justify="right", no_wrap=True)
        for j, (name, size) in enumerate(zip(names, record.class_sizes.tolist(), strict=True)):
            cells = [_colour_cell(value, right=j == k) for k, value in enumerate(percent[j].tolist())]
            table.add_row(escape(name), f"{size:,}", f"{rates[j]:.1f} ", *cells)
        return Group(head, table)

    order = rates.argsort().tolist()
    marks = {"least": order[0], "median": order[len(order) // 2], "most": order[-1]}
    head.append("wrong per class: " + ", ".join(f"{word} {rates[c]:.1f} % ({names[c]})" for word, c in marks.items()))
    head.append("\n\nlargest confusions, in % of the true class", "dim")
    for title in ("true class", "label"):
        table.add_column(title, no_wrap=True, min_width=16)
    table.add_column("share ", justify="right")
    wrong_only = percent - percent.diag().diag()
    for cell in wrong_only.flatten().topk(15).indices.tolist():
        j, k = divmod(cell, record.num_classes)
        if wrong_only[j, k] > 0:
            table.add_row(escape(names[j]), escape(names[k]), _colour_cell(float(percent[j, k]), right=False))
    return Group(head, table)


def _colour_cell(percent: float, *, right: bool) -> Text:
    """Return a number on a background that brightens with it, green for right labels and red for wrong ones."""
    if percent == 0:
        return Text(" .  ", "dim")
    glow = round(40 + 16 * math.sqrt(percent))
    number = f"{percent:4.1f} " if percent < 99.95 else " 100 "
    return Text(number, f"white on rgb(0,{glow},0)" if right else f"white on rgb({glow},0,0)")
