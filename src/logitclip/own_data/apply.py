"""Put answers back into the data: a table with corrected labels, or a list of image files with them.

`correct_data` does it for the next `fit` of the same model.
"""

from __future__ import annotations

import gzip
import io
import logging
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from logitclip import files
from logitclip.data._columns import find_delimiter, read_table, table_kind, to_frame
from logitclip.data.table import column_text
from logitclip.files import Json
from logitclip.own_data.answers import (
    ANSWERS,
    NO_CLASS,
    UNSURE,
    Answer,
    merge_answers,
    read_answers,
    read_answers_csv,
)
from logitclip.own_data.facts import Facts
from logitclip.own_data.fitted_rows import FittedRows
from logitclip.own_data.images import Images
from logitclip.own_data.model import MODEL, PAGE, is_model, load
from logitclip.own_data.review import Review
from logitclip.own_data.source import CORRECTED, KEPT, REVIEW_COLUMN

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger(__name__)

CORRECTED_FILES = ("corrected.csv", "corrected.parquet")  # in the model folder: of text or a list of images, of others
LISTED_FILE, LISTED_LABEL = "file", "label"  # columns of a list of image files


@dataclass(frozen=True)
class Applied:
    """What `apply_answers` did."""

    rows: int  # written
    corrected: int
    kept: int  # labels that a reviewer confirmed
    unsure: int
    dropped: int  # rows in no class


def apply_answers(rows: FittedRows, settled: dict[str, Answer], out: Path) -> Applied:
    """Write the data with the answers in it, never over the data itself.

    A table keeps its columns; its label column has the corrected labels, and a column says what was changed. Rows that
    are in no class are left out. Of a folder of images nothing is moved: the result is a list of files and labels. It
    is data for the next `fit`, so every value is written as it is, whatever a spreadsheet would make of it, and a csv
    file keeps its delimiter, beside which 1,5 may be a number. A parquet file made from text has numbers as numbers; a
    csv file made from parquet has a column for each number of a vector.

    Raises:
        ValueError: If `out` is the data itself or looks like it, or is neither csv, tsv nor parquet.
    """
    source = rows.source
    if out.exists() and source.path.exists() and os.path.samefile(out, source.path):
        raise ValueError(f"{out} is the data itself: name another file with -o.")
    suffix = out.suffix.lower()
    if suffix not in (".csv", ".tsv", ".parquet"):
        raise ValueError(f"{out} should end in .csv, .tsv or .parquet.")
    if _is_like_the_data(out, source.kind.label):
        raise ValueError(
            f"{out} has the column {source.kind.label!r} and no column {REVIEW_COLUMN!r}, as the data of the first "
            "round: name another file with -o."
        )
    classes = list(source.class_names)
    given = [classes[k] for k in source.labels.tolist()]
    frame, column, lines = _read_lines(rows, given, suffix)
    labels, notes, dropped = frame[column].astype(object).tolist(), [""] * len(frame), set[int]()
    typed = {name: labels[line] for name, line in zip(given, lines, strict=True) if not isinstance(labels[line], str)}
    if REVIEW_COLUMN in frame:  # an earlier round
        notes = frame[REVIEW_COLUMN].fillna("").tolist()
    for name, answer in settled.items():
        i = rows.place(name)
        if i is None:
            continue
        line = lines[i]
        if answer.kind == NO_CLASS:
            dropped.add(line)
        elif answer.kind == UNSURE:
            notes[line] = notes[line] or UNSURE
        else:
            first = notes[line].removeprefix(CORRECTED) if notes[line].startswith(CORRECTED) else given[i]
            notes[line] = KEPT if answer.label == first else CORRECTED + first
            if answer.label != given[i]:
                labels[line] = typed.get(answer.label, answer.label)  # False, and not "0", which counts as true
    frame[column] = _with_type(labels, frame, column)
    frame[REVIEW_COLUMN] = notes
    files.write(out, _to_bytes(frame.drop(index=frame.index[sorted(dropped)]), suffix, source.path))
    said = [notes[line] for line in lines if line not in dropped]
    corrected = sum(note.startswith(CORRECTED) for note in said)
    return Applied(len(said), corrected, said.count(KEPT), said.count(UNSURE), dropped=len(dropped))


def _is_like_the_data(path: Path, label: str | None) -> bool:
    """Return whether a file is a table with the label column that no review has gone into.

    After the first round a model does not know the table any more that the user began with.
    """
    if label is None or not path.is_file():
        return False
    try:
        columns = {str(column).strip() for column in read_frame(path).columns}
    except (OSError, ValueError):
        return False  # some other file
    return label in columns and REVIEW_COLUMN not in columns


def _read_lines(rows: FittedRows, labels: list[str], suffix: str) -> tuple[pd.DataFrame, str, list[int]]:
    """Return the table, its label column, and the line that each row is from; of a folder, a list of its images.

    Lines without a label or a readable image are not among the rows. The table will be written to a file with `suffix`.
    """
    import pandas as pd

    source, kind = rows.source, rows.source.kind
    if not source.path.is_file():
        listed = pd.DataFrame({LISTED_FILE: list(rows.names), LISTED_LABEL: labels})
        return listed, LISTED_LABEL, list(range(len(rows)))
    frame = _read_as(rows, suffix)
    columns = {str(column).strip(): column for column in frame.columns}
    if isinstance(kind, Images):
        values = enumerate(frame[columns[str(kind.image)]])  # in the order of the rows
        lines = [next(line for line, value in values if str(value).strip() == name) for name in kind.names]
    else:
        lines = [int(name) - 1 for name in rows.names]
    return frame, columns[str(kind.label)], lines


def _read_as(rows: FittedRows, suffix: str) -> pd.DataFrame:
    """Read the table of the rows for a file with `suffix`: its values as they are, but for what that format changes.

    In a parquet file numbers of text are numbers. In a csv file a vector has a column for each number, and labels are
    called as the classes are.
    """
    import pandas as pd

    path, label = rows.source.path, str(rows.source.kind.label)
    written = None if table_kind(path) == ".npz" else read_frame(path)
    if written is not None and _is_text(path) == (suffix != ".parquet"):
        return written
    texts = {label, *rows.source.kind.text_columns, rows.model.facts["source"]["options"].get("group")} - {None}
    read = read_table(path, text=texts)
    frame = to_frame({**read, label: column_text(read, label, path)})
    if written is None:
        return frame
    written.columns = [str(name).strip() for name in written.columns]
    if suffix == ".parquet":
        typed = {str(name): values for name, values in frame.items()}
        return pd.DataFrame(
            {name: _as_numbers(typed.get(str(name), values), values) for name, values in written.items()}
        )
    kept = written[[name for name in written.columns if name in read]].assign(**{label: frame[label]})
    return pd.concat([kept, frame[[name for name in frame.columns if name not in kept]]], axis=1)


def _as_numbers(column: pd.Series, written: pd.Series) -> pd.Series:
    """Return a column of numbers as they are written, whole ones with all digits; any other column as it is."""
    import pandas as pd

    if not pd.api.types.is_numeric_dtype(column):
        return column
    try:
        return pd.Series(pd.to_numeric(written))
    except ValueError:  # decimal commas, or a word for what is missing
        return column


def _to_bytes(frame: pd.DataFrame, suffix: str, data: Path) -> bytes:
    if suffix == ".parquet":
        return frame.to_parquet(index=False)
    delimiter = "\t" if suffix == ".tsv" else find_delimiter(_read_text(data)) if _is_text(data) else ","
    return frame.to_csv(index=False, sep=delimiter, lineterminator="\n").encode()


def _is_text(path: Path) -> bool:
    """Return whether the data is a csv or tsv file."""
    return path.is_file() and table_kind(path) in (".csv", ".tsv")


def _read_text(path: Path) -> str:
    content = path.read_bytes()
    return (gzip.decompress(content) if path.name.lower().endswith(".gz") else content).decode("utf-8-sig")


def read_frame(path: Path) -> pd.DataFrame:
    """Read a csv, tsv or parquet file with every value as it is written; numbers in a csv file stay text."""
    import pandas as pd

    if table_kind(path) == ".parquet":
        return pd.read_parquet(path)
    text = _read_text(path)
    return pd.read_csv(io.StringIO(text), sep=find_delimiter(text), dtype=str, keep_default_na=False, na_filter=False)


def _with_type(labels: list[object], frame: pd.DataFrame, column: str) -> pd.Series:
    """Return labels with the type of their column; as text if one of them does not fit."""
    import pandas as pd

    given = pd.Series(labels, frame.index, object)
    kind = frame.dtypes[column]
    fits = not isinstance(kind, pd.CategoricalDtype) or given.dropna().isin(kind.categories).all()
    try:
        return given.astype(kind) if fits else given.map(str, na_action="ignore")
    except (TypeError, ValueError):
        return given.map(str, na_action="ignore")


# -- the next round ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CorrectedData:
    """The data of a model with the answers of a review in it, and how to fit on it."""

    path: Path  # the table, or a list of the image files of a folder
    label: str  # its label column
    columns: Json  # the options of `fit` that name columns, as the model was fitted, and the folder of image files
    encoder: str  # of the model, or none
    round: Round | None  # None: an interrupted fit is to be finished first


@dataclass(frozen=True, eq=False)
class Round:
    """What the answers of a review have changed."""

    applied: Applied  # in all rounds
    earlier: int  # labels that were corrected in rounds before this one
    review: Review


def correct_data(folder: Path, answers: Path, data: Path | None = None) -> CorrectedData:
    """Write the data of a model with the answers of a review into the model folder.

    If a fit on such data was interrupted while it wrote the model, that data stays as it is; the answers are only kept.

    Args:
        folder: The model folder, whose answers count too.
        answers: A file answers.csv or answers.jsonl, or another model folder.
        data: The data, if it is no longer where the model was fitted.

    Raises:
        ValueError: If there are no answers.
    """
    if answers.is_dir():
        new = read_answers(answers / ANSWERS)
    else:
        new = read_answers_csv(answers) if answers.suffix == ".csv" else read_answers(answers)
    if not new:
        command = f"logitclip review {shlex.quote(str(folder))}"
        raise ValueError(f"There are no answers in {answers}: `{command}` asks for them.")
    facts = _facts_of_interrupted(folder)
    if facts is not None:
        merge_answers(folder / ANSWERS, new)
        log.warning(
            "A fit of %s was interrupted: it is finished first, with the answers that it had. Newer answers are kept; "
            "repeat the command to use them.",
            folder,
        )
        path, columns = Path(facts["source"]["path"]), facts["source"]["options"]
        return CorrectedData(path, facts["label"], columns, _encoder_of(facts), None)
    model = load(folder)
    merge_answers(folder / ANSWERS, new)
    review = Review(model, FittedRows(model, data))
    kind, read = review.rows.source.kind, review.rows.source.path
    path = folder / CORRECTED_FILES[0 if read.is_dir() or _is_text(read) else 1]
    again = Path(model.facts["source"]["path"]) == path.resolve() and path.is_file()  # this is not the first round
    (Review(model, FittedRows(model)) if again else review).keep_report()  # of the labels that the model was fitted on
    earlier = _count_corrected(path) if again else 0
    corrected = path.with_stem("corrected_next")  # the data may be that of an earlier round, in `path`
    applied = apply_answers(review.rows, review.settled, corrected)
    corrected.replace(path)
    columns = dict(model.facts["source"]["options"])
    if isinstance(kind, Images):
        columns |= {"image": kind.image or LISTED_FILE, "folder": str(kind.folder.resolve())}
    label, done = kind.label or LISTED_LABEL, Round(applied, earlier, review)
    return CorrectedData(path, label, columns, _encoder_of(model.facts), done)


def _facts_of_interrupted(folder: Path) -> Facts | None:
    """Return the content of model.json if a fit on corrected data was killed, or found the disk full, at its end."""
    facts = files.read_json(folder / MODEL)
    if (folder / PAGE).is_file() or not is_model(folder):
        return None
    made_of = facts.get("source", {}).get("path")
    return facts if made_of in [str((folder / name).resolve()) for name in CORRECTED_FILES] else None


def _encoder_of(facts: Facts) -> str:
    return facts.get("encoder", {}).get("spec", "none")


def _count_corrected(path: Path) -> int:
    """Return how many labels an earlier round has corrected, by the file that it wrote."""
    return sum(note.startswith(CORRECTED) for note in read_frame(path)[REVIEW_COLUMN])
