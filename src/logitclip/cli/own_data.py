"""Commands for your own data: fit, predict, issues."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from logitclip.cli.options import Flag, Number, Text, Whole
from logitclip.cli.output import Exit, fail, make_table, show, show_json, tell
from logitclip.cli.terminal import seconds_left
from logitclip.cli.training import stop_on_sigterm
from logitclip.runs.results import Failed
from logitclip.studies.listener import Listener
from logitclip.text import duration, guard_formula

Out = Annotated[Path, arg(aliases=["-o"], metavar="PATH")]
Data = Annotated[Positional[Path], arg(metavar="DATA")]

SHOWN = 20  # suspicious labels on the terminal


def fit(
    data: Data,
    /,
    *,
    label: Text = None,
    text: Text = None,
    image: Text = None,
    drop: Text = None,
    out: Out = Path("model"),
    find_issues: Flag = False,
    clip: str = "norm:temp=auto",
    loss: Text = None,
    model: Text = None,
    epochs: Whole = None,
    batch_size: Whole = None,
    lr: Number = None,
    augment: Text = None,
    seed: int = 0,
    jobs: int = 1,
    json: Flag = False,
) -> None:
    """Fit a model to your own data, with labels you do not trust.

    Example: logitclip fit train.csv --label kind --out model

    It first prints what it found in the data and its plan. If it is interrupted, repeat the command to resume it.

    Args:
        data: A csv, tsv, parquet or npz file, or a folder with one folder of images per class.
        label: The label column of a table.
        text: Columns with free text, separated by commas.
        image: The column with image files, if there is one.
        drop: Columns to leave out, separated by commas.
        out: The model folder to write.
        find_issues: Score every label by a model not trained on it (five more runs), instead of by the one run.
        clip: The clip; auto searches its number, grid tries the paper's values, none trains without a clip.
        loss: The loss, as in gce:q=0.7.
        model: The network, instead of the one that fits the data.
        epochs: Passes over the data.
        batch_size: Examples in a batch.
        lr: Learning rate.
        augment: Augmentation of images, as in flip_crop:padding=4.
        seed: Seed of the training.
        jobs: Runs at the same time.
        json: Print the facts of the model as one JSON object on stdout.
    """
    from rich.markup import escape

    settings: dict[str, Any] = {"loss": loss, "model": model, "epochs": epochs, "batch_size": batch_size, "lr": lr}
    settings |= {"augment": augment, "seed": seed}
    fitted = _fit(data, label, text, image, drop, out, clip, find_issues=find_issues, jobs=jobs, **settings)
    if json:
        show_json(fitted.facts)
        return
    _report(fitted)
    new = "new.csv" if fitted.facts["label"] else "FOLDER"
    show(escape(f"The model is in {out}; predict with: logitclip predict {shlex.quote(str(out))} {new} -o out.csv"))


def issues(
    data: Data,
    /,
    *,
    label: Text = None,
    text: Text = None,
    image: Text = None,
    drop: Text = None,
    out: Out = Path("issues"),
    fast: Flag = False,
    clip: str = "norm:temp=auto",
    model: Text = None,
    epochs: Whole = None,
    seed: int = 0,
    jobs: int = 1,
    json: Flag = False,
) -> None:
    """Find the labels of your own data that are probably wrong.

    Example: logitclip issues train.csv --label kind

    Args:
        data: A csv, tsv, parquet or npz file, or a folder with one folder of images per class.
        label: The label column of a table.
        text: Columns with free text, separated by commas.
        image: The column with image files, if there is one.
        drop: Columns to leave out, separated by commas.
        out: The folder to write issues.csv and page.html to.
        fast: Score the labels with one training run instead of five folds.
        clip: The clip; auto searches its number.
        model: The network, instead of the one that fits the data.
        epochs: Passes over the data.
        seed: Seed of the training.
        jobs: Runs at the same time.
        json: Print the ranking as a JSON list on stdout.
    """
    from rich.markup import escape

    from logitclip.own_data.issues import marked

    settings = {"model": model, "epochs": epochs, "seed": seed}
    fitted = _fit(data, label, text, image, drop, out, clip, find_issues=not fast, jobs=jobs, **settings)
    if json:
        show_json(fitted.issues.to_dict("records"))
        return
    _report(fitted)
    table = make_table("Most suspicious labels", "row", "given", "suggested", "score", "wrong")
    for row in fitted.issues.head(SHOWN).to_dict("records"):
        names = (escape(row[name]) for name in ("row", "given", "suggested"))
        table.add_row(*names, f"{row['score']:.3f}", "yes" if row["wrong"] else "")
    show(table)
    wrong = int(fitted.issues["wrong"].sum())
    show(marked(wrong, len(fitted.issues), fitted.noise["from"], learnt=fitted.learnt))
    show(escape(f"All of them: {out / 'issues.csv'}; with {_content(fitted)}: {out / 'page.html'}."))


def predict(model: Positional[Path], data: Data, /, *, out: Out = Path("predictions.csv"), json: Flag = False) -> None:
    """Predict classes with a fitted model.

    Example: logitclip predict model new.csv -o out.csv

    Args:
        model: The model folder.
        data: A table with the columns that the model was fitted on, or a folder of images.
        out: The CSV file to write: row, class, and the calibrated probability that this is the true class.
        json: Print the predictions as a JSON list on stdout instead of writing a file.
    """
    from logitclip.files import write
    from logitclip.own_data import load

    if not json and out.resolve() == data.resolve():
        raise ValueError(f"{out} is the data itself: name another file with -o.")
    loaded = load(model)
    found = loaded.predict(data)
    if json:
        show_json(found.to_dict("records"))
    else:
        names = {name: found[name].map(guard_formula, na_action="ignore") for name in ("row", "class")}
        write(out, found.assign(**names).to_csv(index=False).encode())
        tell(f"{len(found):,} predictions in {out}.")
    judged = loaded.agreement(data, found)
    if judged is not None:
        tell(judged)


def _fit(
    data: Path,
    label: str | None,
    text: str | None,
    image: str | None,
    drop: str | None,
    out: Path,
    clip: str,
    **options: Any,
) -> Any:
    from logitclip.own_data import fit

    stop_on_sigterm()
    pace = Pace()
    shared = {"text": _names(text), "image": image, "drop": _names(drop), "out": out, "clip": clip}
    try:
        return fit(data, label, on_plan=pace.plan, listener=pace, **shared, **options)
    except Failed as error:
        fail(Exit.FAILED, str(error))


class Pace(Listener):
    """Print the plan, then the progress and the time left, about twice a minute."""

    EVERY = 30.0  # seconds

    def __init__(self) -> None:
        self.total = self.done = 0.0  # planned seconds
        self.part = 0.0  # planned seconds of the current epoch that have passed
        self.started = self.told = time.monotonic()

    def plan(self, plan: Any) -> None:
        for line in plan.lines():
            tell(line)
        self.total, self.planned = plan.seconds, plan
        self.started = self.told = time.monotonic()

    def on_start(self, config: Any, row: dict[str, Any] | None) -> None:
        self.done += self.planned.start_seconds
        if row is not None:  # a run that is resumed
            self.total -= (row["epoch"] + 1) * self.planned.epoch_seconds(self.planned.rows_of(config))
        self._tell_progress()

    def on_batch(self, config: Any, examples: int) -> None:
        self.part = self.planned.training_seconds(examples)
        self._tell_progress()

    def on_epoch(self, config: Any, row: dict[str, Any]) -> None:
        self.part = 0.0
        self.done += self.planned.epoch_seconds(self.planned.rows_of(config))
        self._tell_progress()

    def on_skipped(self, config: Any, outcome: Any) -> None:
        self.total -= self.planned.run_seconds(self.planned.rows_of(config))

    def on_failed(self, config: Any, failure: Any) -> None:
        tell(f"A run failed: {failure.error}")

    def _tell_progress(self) -> None:
        now = time.monotonic()
        done = self.done + self.part
        if done and now - self.told >= self.EVERY:
            self.told = now
            left = seconds_left(now - self.started, done, self.total)
            tell(f"{done / self.total:.0%} done, about {duration(max(1.0, left or 0))} left")


def _report(model: Any) -> None:
    """Print the findings, and which labels the accuracy was measured on."""
    show(model.noise_summary)
    show(f"{model.accuracy_summary} Clip: {model.facts['clip']}.")


def _content(model: Any) -> str:
    return "thumbnails" if model.facts["kind"] == "image" else "their values"


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in text.split(",")] if text else []
