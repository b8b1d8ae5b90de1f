"""Commands for your own data: fit, predict, issues."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from logitclip.cli.encoding import EncodingBar
from logitclip.cli.options import File, Flag, Number, Text, Whole
from logitclip.cli.output import Exit, fail, make_table, show, show_json, tell
from logitclip.cli.review import correct, fuse, show_round
from logitclip.cli.training import stop_on_sigterm
from logitclip.runs.results import Failed
from logitclip.text import duration, guard_formula

Out = Annotated[Path, arg(aliases=["-o"], metavar="PATH")]
Data = Annotated[Positional[Path], arg(metavar="DATA")]

NAMES = ("row", "class")  # columns that a spreadsheet must not read as formulas
SHOWN = 20  # suspicious labels on the terminal


def fit(
    data: Data,
    /,
    *,
    label: Text = None,
    text: Text = None,
    image: Text = None,
    folder: Text = None,
    drop: Text = None,
    weight: Text = None,
    group: Text = None,
    time: Text = None,
    test: Annotated[Path | None, arg(metavar="FILE")] = None,
    answers: File = None,
    annotators: Text = None,
    item: Text = None,
    annotator: Text = None,
    answer: Text = None,
    out: Out = Path("model"),
    encoder: str = "none",
    bundle: Flag = False,
    download: Flag = False,
    learner: str = "auto",
    find_issues: Flag = False,
    balance: Literal["on", "off", "auto"] = "off",
    clip: str = "auto",
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

    Every label is judged by models that have not seen it. For that the rows are split into folds, parts of about equal
    size: a model learns from the other folds and predicts the rows of this one. Predictions that disagree with a label
    make it suspicious. First it prints what it found in the data and its plan. If it is interrupted, repeat the command
    to resume it.

    Args:
        data: A csv, tsv, parquet or npz file, or a folder with one folder of images per class.
        label: The label column of a table. Rows without a label are predicted.
        text: Columns with free text, separated by commas.
        image: The column with image files, if there is one.
        folder: The folder of these files, if it is not that of the table.
        drop: Columns to leave out, separated by commas.
        weight: A column with a weight for each row.
        group: A column whose equal values belong together, such as a patient: they are in the same fold.
        time: A column with times: rows are judged only by what was learnt from earlier ones.
        test: A file with labels you trust, to measure the accuracy on.
        answers: Answers of a review (answers.csv, or a model folder) to correct the labels of the model in --out with.
        annotators: Columns with the answers of one annotator each, separated by commas, instead of a label column.
        item: The column that names the item, in a table with one row per answer.
        annotator: The column that names the annotator in such a table.
        answer: The column with the answer in such a table.
        out: The model folder to write.
        encoder: A pretrained encoder of images or texts, as in hf:FOLDER; auto chooses one.
        bundle: Copy the encoder into the model folder, so that it predicts on a machine without it.
        download: Fetch the encoder from the hub if it is missing.
        learner: network, forest, logistic or neighbours, several separated by commas, or auto for all four.
        find_issues: Let the network judge the labels in five folds instead of two: better, and 2.5 times as long.
        balance: Let every class count the same (on), or if one is five times as large as another (auto).
        clip: The network's clip: auto chooses it, norm:temp=auto searches, norm:temp=grid tries the paper's values.
        loss: The network's loss, as in gce:q=0.7.
        model: The network, instead of the one that fits the data.
        epochs: Passes of the network over the data.
        batch_size: Examples in a batch of the network.
        lr: Learning rate of the network.
        augment: Augmentation of images, as in flip_crop:padding=4.
        seed: Seed of all learners.
        jobs: Cores to use.
        json: Print the facts of the model as one JSON object on stdout.
    """
    from rich.markup import escape

    columns = {"text": text, "image": image, "folder": folder, "drop": drop}
    columns |= {"weight": weight, "group": group, "time": time}
    network = {"loss": loss, "model": model, "epochs": epochs, "batch_size": batch_size, "lr": lr, "augment": augment}
    options = {"learner": learner, "balance": balance, "clip": clip, "seed": seed, "jobs": jobs, "test": test}
    options |= {"encoder": encoder, "bundle": bundle, "download": download}
    before = None
    if answers is not None:
        data, label, before = correct(data, answers, out, columns)
    elif annotators or item or annotator or answer:
        named = {"item": item, "annotator": annotator, "answer": answer}
        data, label = fuse(data, out, columns, annotators=_names(annotators), **named)
    fitted = _fit(data, label, columns, out=out, find_issues=find_issues, **options, **network)
    if json:
        show_json(fitted.facts)
        return
    _report(fitted)
    if before is not None:
        show_round(before, fitted)
    new = "new.csv" if fitted.facts["label"] else "FOLDER"
    show(escape(f"The model is in {out}; predict with: logitclip predict {shlex.quote(str(out))} {new} -o out.csv"))


def issues(
    data: Data,
    /,
    *,
    label: Text = None,
    text: Text = None,
    image: Text = None,
    folder: Text = None,
    drop: Text = None,
    weight: Text = None,
    group: Text = None,
    time: Text = None,
    out: Out = Path("issues"),
    fast: Flag = False,
    encoder: str = "none",
    download: Flag = False,
    learner: str = "auto",
    clip: str = "auto",
    model: Text = None,
    epochs: Whole = None,
    seed: int = 0,
    jobs: int = 1,
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
        label: The label column of a table.
        text: Columns with free text, separated by commas.
        image: The column with image files, if there is one.
        folder: The folder of these files, if it is not that of the table.
        drop: Columns to leave out, separated by commas.
        weight: A column with a weight for each row.
        group: A column whose equal values belong together, such as a patient: they are in the same fold.
        time: A column with times: rows are judged only by what was learnt from earlier ones.
        out: The folder to write issues.csv and page.html to.
        fast: Leave the network out: it takes most of the time.
        encoder: A pretrained encoder of images or texts, as in hf:FOLDER; auto chooses one.
        download: Fetch the encoder from the hub if it is missing.
        learner: network, forest, logistic or neighbours, several separated by commas, or auto for all four.
        clip: The network's clip; auto chooses it.
        model: The network, instead of the one that fits the data.
        epochs: Passes of the network over the data.
        seed: Seed of all learners.
        jobs: Cores to use.
        json: Print the ranking as a JSON list on stdout.
    """
    from rich.markup import escape

    from logitclip.own_data.issues import count_marked

    columns = {
        "text": text,
        "image": image,
        "folder": folder,
        "drop": drop,
        "weight": weight,
        "group": group,
        "time": time,
    }
    learner = "forest,logistic,neighbours" if fast and learner == "auto" else learner
    options = {"learner": learner, "clip": clip, "seed": seed, "jobs": jobs, "model": model, "epochs": epochs}
    options |= {"encoder": encoder, "download": download}
    fitted = _fit(data, label, columns, out=out, **options)
    if json:
        show_json(fitted.issues.to_dict("records"))
        return
    _report(fitted)
    table = make_table("Most suspicious labels", "row", "given", "suggested", "score", "wrong")
    for row in fitted.issues.head(SHOWN).to_dict("records"):
        names = (escape(row[name]) for name in ("row", "given", "suggested"))
        table.add_row(*names, f"{row['score']:.3f}", "yes" if row["wrong"] else "")
    show(table)
    show(count_marked(int(fitted.issues["wrong"].sum()), len(fitted.issues), learnt=fitted.learnt))
    show(escape(f"All of them: {out / 'issues.csv'}; with {_content(fitted)}: {out / 'page.html'}."))


def predict(
    model: Positional[Path],
    data: Data,
    /,
    *,
    out: Out = Path("predictions.csv"),
    probabilities: Flag = False,
    json: Flag = False,
) -> None:
    """Predict classes with a fitted model.

    Example: logitclip predict model new.csv -o out.csv

    Args:
        model: The model folder.
        data: A table with the columns that the model was fitted on, or a folder of images.
        out: The CSV file to write: row, class, and the calibrated probability that this is the true class.
        probabilities: Add a column for each class, with its probability.
        json: Print the predictions as a JSON list on stdout instead of writing a file.
    """
    from logitclip.own_data import load

    if not json and out.resolve() == data.resolve():
        raise ValueError(f"{out} is the data itself: name another file with -o.")
    loaded = load(model)
    if json:
        found = loaded.predict(data, probabilities=probabilities)
        show_json(found.to_dict("records"))
    else:
        found = _write_predictions(loaded.predict_parts(data, probabilities=probabilities), out)
        tell(f"{len(found):,} predictions in {out}.")
    compared = loaded.agreement(data, found)
    if compared is not None:
        tell(compared)


def _write_predictions(parts: Iterable[Any], out: Path) -> Any:
    """Write data frames of predictions to one CSV file, and return the classes."""
    import pandas as pd

    from logitclip.files import open_to_write

    classes: list[Any] = []
    with open_to_write(out) as file:
        for found in parts:
            names = {
                name: found[name].map(str, na_action="ignore").map(guard_formula, na_action="ignore") for name in NAMES
            }
            file.write(found.assign(**names).to_csv(index=False, header=not classes).encode())
            classes.append(found[["class"]])
    return pd.concat(classes, ignore_index=True)


def _fit(data: Path, label: str | None, columns: dict[str, Any], **options: Any) -> Any:
    from logitclip.own_data import fit

    stop_on_sigterm()
    pace, encoding = Pace(), EncodingBar()
    lists = {name: _names(columns[name]) for name in ("text", "drop")}
    calls = {"on_plan": pace.plan, "on_progress": pace, "on_rows": encoding}
    try:
        return fit(data, label, **calls, **{**columns, **lists}, **options)
    except Failed as error:
        fail(Exit.FAILED, str(error))
    finally:
        encoding.stop()


class Pace:
    """Print the plan, then the progress and the time left, about twice a minute."""

    EVERY = 30.0  # seconds

    def __init__(self) -> None:
        self.started = self.told = time.monotonic()

    def plan(self, plan: Any) -> None:
        for line in plan.lines():
            tell(line)
        self.started = self.told = time.monotonic()

    def __call__(self, share: float) -> None:
        now = time.monotonic()
        if 0 < share < 1 and now - self.told >= self.EVERY:
            self.told = now
            left = (now - self.started) * (1 - share) / share
            tell(f"{share:.0%} done, about {duration(max(1.0, left))} left")


def _report(model: Any) -> None:
    """Print the findings, and which labels the accuracy was measured on."""
    show(model.noise_summary)
    learners = ", ".join(f"{one['name']} {one['weight']:.0%}" for one in model.facts["learners"])
    show(f"{model.accuracy_summary} Learners: {learners}; clip {model.facts['clip']}.")


def _content(model: Any) -> str:
    return "thumbnails" if model.facts["kind"] == "image" else "their values"


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in text.split(",")] if text else []
