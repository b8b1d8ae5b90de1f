"""Commands for your own data: fit, predict, issues, export."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.markup import escape
from tyro.conf import Positional, arg

from logitclip.cli.options import File, Flag, ModelFolder, ModelPlugins, Number, OptionalInt, Plugins, Text
from logitclip.cli.output import Exit, fail, make_table, show, show_json, tell
from logitclip.cli.review import correct, fuse, name_plugins, show_round
from logitclip.cli.terminal import EncodingBar
from logitclip.cli.training import stop_on_sigterm
from logitclip.files import Json
from logitclip.runs.plugins import load_plugins
from logitclip.runs.results import Failed
from logitclip.text import duration, split_names

if TYPE_CHECKING:
    import pandas as pd

    from logitclip.own_data.apply import Round
    from logitclip.own_data.labelled import Agreement
    from logitclip.own_data.model import Model
    from logitclip.own_data.planning import Plan

Out = Annotated[Path, arg(aliases=["-o"], metavar="PATH")]
Data = Annotated[Positional[Path], arg(metavar="DATA")]

ISSUES_SHOWN = 20  # suspicious labels on the terminal


@dataclass(frozen=True)
class FitOptions:
    """What `fit` and `issues` have in common."""

    label: Text = None
    """The label column of a table. Rows without a label are predicted."""
    answers: File = None
    """Answers of a review (answers.csv, or a model folder): do it again in --out, with the labels corrected."""
    annotators: Text = None
    """Columns with the answers of one annotator each, separated by commas, instead of a label column."""
    item: Text = None
    """The column that names the item, in a table with one row per answer."""
    annotator: Text = None
    """The column that names the annotator in such a table."""
    answer: Text = None
    """The column with the answer in such a table."""
    text: Text = None
    """Columns with free text, separated by commas."""
    image: Text = None
    """The column with image files, if there is one."""
    folder: Text = None
    """The folder of these files, if it is not that of the table."""
    drop: Text = None
    """Columns to leave out, separated by commas."""
    weight: Text = None
    """A column with a weight for each row."""
    group: Text = None
    """A column whose equal values belong together, such as a patient: they are in the same fold."""
    time: Text = None
    """A column with times: rows are judged only by what was learnt from earlier ones."""
    val: Annotated[File, arg(metavar="FILE")] = None
    """A file with labels that decide how much each learner counts, and that calibrate the probabilities."""
    test: Annotated[File, arg(metavar="FILE")] = None
    """A file with labels you trust, to measure the accuracy on."""
    encoder: str = "none"
    """A pretrained encoder of images or texts, as in hf:FOLDER; auto chooses one."""
    bundle: Flag = False
    """Copy the encoder into the model folder, so that it predicts on a machine without it."""
    download: Flag = False
    """Fetch the encoder from the hub if it is missing."""
    learner: str = "auto"
    """network, forest, logistic, neighbours, several separated by commas, or auto: all, unless classes are many."""
    find_issues: Flag = False
    """Let the network judge the labels in five folds instead of two: better, and 2.5 times as long."""
    balance: Literal["on", "off", "auto"] = "off"
    """Let every class count the same (on), or if one is five times as large as another (auto)."""
    clip: str = "auto"
    """The network's clip: auto chooses it, norm:temp=auto searches, norm:temp=grid tries the paper's values."""
    loss: Text = None
    """The network's loss, as in gce:q=0.7."""
    model: Text = None
    """The network, instead of the one that fits the data."""
    epochs: OptionalInt = None
    """Passes of the network over the data."""
    batch_size: OptionalInt = None
    """Examples in a batch of the network."""
    lr: Number = None
    """Learning rate of the network."""
    augment: Text = None
    """Augmentation of images, as in flip_crop:padding=4."""
    seed: int = 0
    """Seed of all learners."""
    jobs: int = 1
    """Cores to use."""
    plugin: Plugins = ()
    """Python files with your own encoders, losses or models."""

    @property
    def columns(self) -> Json:
        """The options that name columns or where their files are."""
        several = {"text": split_names(self.text), "drop": split_names(self.drop)}
        return {**{name: getattr(self, name) for name in ("image", "folder", "weight", "group", "time")}, **several}

    @property
    def of_answers(self) -> dict[str, str | None]:
        """The columns of a table with one row per answer."""
        return {"item": self.item, "annotator": self.annotator, "answer": self.answer}

    @property
    def makes_data(self) -> bool:
        """Whether the labels are made first: corrected by a review, or fused from several annotators."""
        return self.answers is not None or bool(self.annotators) or any(self.of_answers.values())


FIT_DEFAULTS = FitOptions()
FitFlags = Annotated[FitOptions, arg(name="")]


def fit(
    data: Data,
    /,
    *,
    options: FitFlags = FIT_DEFAULTS,
    out: Out = Path("model"),
    json: Flag = False,
) -> None:
    """Fit a model to your own data, with labels you do not trust.

    Example: logitclip fit train.csv --label kind --out model

    Every label is judged by models that have not seen it. For that the rows are split into folds, parts of about equal
    size: a model learns from the other folds and predicts the rows of this one. Predictions that disagree with a label
    make it suspicious. First it prints what it found in the data and its plan. If it is interrupted, repeat the command
    to resume it.

    Args:
        data: A csv, tsv, parquet or npz file, or a folder with one folder of images per class.
        out: The model folder to write.
        json: Print the facts of the model as one JSON object on stdout.
    """
    load_plugins(options.plugin)
    out = out.expanduser()
    fitted, last = _make_data_and_fit(data, options, out, "fit")
    if json:
        show_json(fitted.facts)
        return
    _report(fitted)
    if last is not None:
        show_round(last, fitted)
    marked, folder = fitted.marked, shlex.quote(str(out))
    code = name_plugins(options.plugin)
    if marked:
        which = "label is" if marked == 1 else "labels are"
        show(
            escape(f"{marked:,} {which} marked wrong: {out / 'page.html'}. Check them: logitclip review {folder}{code}")
        )
    new = "new.csv" if fitted.facts["label"] else "FOLDER"
    show(escape(f"The model is in {out}; predict with: logitclip predict {folder} {new} -o out.csv{code}"))


def issues(
    data: Data,
    /,
    *,
    options: FitFlags = FIT_DEFAULTS,
    out: Out = Path("issues"),
    fast: Flag = False,
    json: Flag = False,
) -> None:
    """Find the labels of your own data that are probably wrong.

    Example: logitclip issues train.csv --label kind

    Every label is judged by models that have not seen it. For that the rows are split into folds, parts of about equal
    size: a model learns from the other folds and predicts the rows of this one. The score of a row, from 0 to 1, says
    how suspicious its label is, and `suggested` what the models would say. It is a ranking for a person to check:
    `logitclip review` shows the rows one by one.

    Args:
        data: A csv, tsv, parquet or npz file, or a folder with one folder of images per class.
        out: The folder to write issues.csv and page.html to. A model that `fit` made there stays as it is.
        fast: Leave the network out: it takes most of the time.
        json: Print the ranking as a JSON list on stdout.
    """
    load_plugins(options.plugin)
    out = out.expanduser()
    if fast and options.learner == "auto":
        options = replace(options, learner="forest,logistic,neighbours")
    fitted, last = _make_data_and_fit(data, options, out, "issues")
    if json:
        show_json(fitted.issues.to_dict("records"))
        return
    from logitclip.own_data.issues import UNCERTAIN, count_marked

    _report(fitted)
    if last is not None:
        show_round(last, fitted)
    table = make_table("Most suspicious labels", "row", "given", "suggested", "score", "wrong")
    for row in fitted.issues.head(ISSUES_SHOWN).to_dict("records"):
        suggested = row["suggested"] or UNCERTAIN
        table.add_row(
            *map(escape, (row["row"], row["given"], suggested)), f"{row['score']:.3f}", "yes" if row["wrong"] else ""
        )
    show(table)
    show(count_marked(fitted.marked, len(fitted.issues), learnt=fitted.learnt))
    content = "thumbnails" if fitted.facts["kind"] == "image" else "their values"
    show(escape(f"All of them: {out / 'issues.csv'}; with {content}: {out / 'page.html'}."))


def predict(
    model: ModelFolder,
    data: Data,
    /,
    *,
    out: Out = Path("predictions.csv"),
    probabilities: Flag = False,
    download: Flag = False,
    plugin: ModelPlugins = (),
    json: Flag = False,
) -> None:
    """Predict classes with a fitted model.

    Example: logitclip predict model new.csv -o out.csv

    Args:
        data: A table with the columns that the model was fitted on, or a folder of images.
        out: The CSV file to write: row, class, and the calibrated probability that this is the true class.
        probabilities: Add a column for each class, with its probability.
        download: Fetch the encoder of the model from the hub if it is missing.
        json: Print the predictions as a JSON list on stdout instead of writing a file.
    """
    from logitclip.encoders import downloads_allowed
    from logitclip.own_data import load

    if not json and out.resolve() == data.resolve():
        raise ValueError(f"{out} is the data itself: name another file with -o.")
    if not json and out.suffix.lower() in (".xlsx", ".xls", ".ods", ".parquet", ".json"):
        raise ValueError(f"Predictions are written as csv: {out} should end in .csv.")
    load_plugins(plugin)
    with downloads_allowed(download):
        loaded = load(model)
    compared = loaded.comparison(data)
    if json:
        found = loaded.predict(data, probabilities=probabilities)
        show_json(found.to_dict("records"))
        compared.add(found)
    else:
        rows = _write_predictions(loaded.predict_parts(data, probabilities=probabilities), out, compared)
        tell(f"{rows:,} predictions in {out}.")
    if (sentence := compared.sentence()) is not None:
        tell(sentence)


def export(model: ModelFolder, /, *, out: Out = Path("model.onnx"), plugin: ModelPlugins = ()) -> None:
    """Write a fitted model as an ONNX file, for programs without Python.

    Example: logitclip export model -o model.onnx

    Numbers, categories and features of an encoder can be exported. The inputs are the columns by name, [N, 1]: float64
    for numbers, where NaN is missing, and text for categories, where an empty text is missing; or `features` of an
    encoder, float32 [N, D]. The outputs are `probabilities` [N, K] and `class` [N].

    Args:
        out: The file to write, .onnx.
    """
    from logitclip.own_data import load
    from logitclip.own_data.export import export as write

    load_plugins(plugin)
    write(load(model), out)
    tell(f"The model is in {out}.")


def _write_predictions(parts: Iterable[pd.DataFrame], out: Path, compared: Agreement) -> int:
    """Write data frames of predictions to one CSV file, compare them with labels, and return the number of rows."""
    from logitclip.files import open_to_write
    from logitclip.own_data.model import predictions_as_csv

    rows = 0
    with open_to_write(out) as write:
        for found in parts:
            write(predictions_as_csv(found, header=not rows))
            compared.add(found)
            rows += len(found)
    return rows


def _make_data_and_fit(data: Path, options: FitOptions, out: Path, made_by: str) -> tuple[Model, Round | None]:
    """Fit on the data, with labels that are first corrected or fused if the options say so.

    Returns the model, and the last round of review if its answers corrected the labels.
    """
    if data.exists():
        tell(f"reading {data}")  # loading torch and scikit-learn takes seconds
    columns = options.columns
    if not options.makes_data:
        return _fit_with_progress(data, options, out=out, made_by=made_by, **columns), None
    with _claim(out, made_by):
        last = None
        if options.answers is not None:
            corrected = correct(data, options.answers, out)
            fitted_with = {name: columns.get(name) or value for name, value in corrected.columns.items()}
            data, columns, last = corrected.path, columns | fitted_with, corrected.round
            encoder = corrected.encoder if options.encoder == "none" else options.encoder
            options = replace(options, label=corrected.label, encoder=encoder)
        elif options.label is not None:
            raise ValueError("Give either a label column or the answers of annotators, from which labels are made.")
        else:
            answers = {"annotators": split_names(options.annotators), **options.of_answers}
            data, label = fuse(data, out, columns, **answers)
            options = replace(options, label=label)
        return _fit_with_progress(data, options, out=out, made_by=made_by, claimed=True, **columns), last


@contextlib.contextmanager
def _claim(out: Path, made_by: str) -> Iterator[None]:
    """Claim the model folder for the data that is made there, and for the fit on it."""
    from logitclip.own_data.annotators import FUSED_FILES, RELIABILITY
    from logitclip.own_data.apply import CORRECTED_FILES
    from logitclip.own_data.fitting import claim_folder
    from logitclip.own_data.model import maker

    if made_by == "issues" and maker(out) == "fit":
        raise ValueError(f"{out} has a model that `fit` made: name another folder with --out, or use `logitclip fit`.")
    with claim_folder(out, (*CORRECTED_FILES, *FUSED_FILES, RELIABILITY)):
        yield


def _fit_with_progress(data: Path, options: FitOptions, **others: Any) -> Model:
    from logitclip.own_data import fit

    stop_on_sigterm()
    pace, encoding = Pace(), EncodingBar()
    cli_only = ("plugin", "answers", "annotators", *options.of_answers)
    given = {name: value for name, value in vars(options).items() if name not in cli_only} | options.columns | others
    calls = {"on_plan": pace.plan, "on_progress": pace, "on_rows": encoding}
    try:
        return fit(data, **calls, **given)
    except (KeyboardInterrupt, SystemExit):
        encoding.stop()
        tell("interrupted. Repeat the command to resume after the last finished part.")
        raise
    except Failed as error:
        fail(Exit.FAILED, str(error))
    finally:
        encoding.stop()


class Pace:
    """Progress of `fit` on stderr: the plan, then the share that is done and the time left, about twice a minute."""

    EVERY = 30.0  # seconds

    def __init__(self) -> None:
        self.started = self.told = time.monotonic()

    def plan(self, plan: Plan) -> None:
        for line in plan.lines():
            tell(line)
        self.started = self.told = time.monotonic()

    def __call__(self, share: float) -> None:
        now = time.monotonic()
        if 0 < share < 1 and now - self.told >= self.EVERY:
            self.told = now
            tell(f"{share:.0%} done, about {duration(max(1.0, (now - self.started) * (1 - share) / share))} left")


def _report(model: Model) -> None:
    """Print the findings, and which labels the accuracy was measured on."""
    show(model.noise_summary)
    learners = ", ".join(f"{one['name']} {one['weight']:.0%}" for one in model.facts["learners"])
    clip = f"; clip {model.clip}" if model.clip is not None else ""
    show(f"{model.accuracy_summary} Learners: {learners}{clip}.")
