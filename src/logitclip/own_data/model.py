"""The model folder: learners, preprocessing, classes and calibration; no pickle in it."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from logitclip import files
from logitclip.data._columns import Columns, read_table_parts
from logitclip.data._images import find_images
from logitclip.data.table import column_text
from logitclip.noise.estimate import CLEAN
from logitclip.own_data.calibration import calibrate
from logitclip.own_data.encoded import with_bundle
from logitclip.own_data.facts import FORMAT, Facts, check_facts, check_file, upgrade
from logitclip.own_data.kind import Kind, NewRows, Rows
from logitclip.own_data.labelled import Agreement
from logitclip.own_data.learners import Forest, Learner, Logistic, Neighbours, mix
from logitclip.own_data.network import Network, NetworkOptions
from logitclip.own_data.source import ENCODED, KINDS
from logitclip.own_data.tables import read_columns
from logitclip.text import first_line, guard_formula, unguard_formula

if TYPE_CHECKING:
    import pandas as pd

    from logitclip.own_data.kind import Data

log = logging.getLogger(__name__)

MODEL, ISSUES, PAGE, UNLABELLED = "model.json", "issues.csv", "page.html", "unlabelled.csv"
PREDICTIONS = "predictions.npz"  # out of fold, for `review`
KEPT_CLASSES = 5  # the most probable classes of a row, in predictions.npz
MORE = 0.01  # agreement beyond that of the true classes from which it is explained
ROWS_AT_ONCE = 50_000  # rows that are predicted at a time
ENCODED_AT_ONCE = 2048  # rows that are encoded and predicted at a time
LEARNERS: dict[str, type[Learner]] = {learner.name: learner for learner in (Forest, Logistic, Neighbours)}


@dataclass(frozen=True, eq=False)
class Model:
    """A fitted model in its folder. `fit` makes it, `load` reads it.

    Attributes:
        folder: The model folder.
        facts: The content of model.json.
        kind: How new data is read.
        learners: Fitted learners with their weights; the probabilities are their average.

    >>> import tempfile
    >>> import logitclip as lc
    >>> import pandas as pd
    >>> height = [0.1, 0.3, 0.4, 0.6, 0.7] * 10 + [1.5, 1.9, 2.2, 2.4, 3.1] * 10  # metres
    >>> plants = pd.DataFrame({"height": height, "kind": ["herb"] * 50 + ["shrub"] * 50})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model = lc.fit(plants, "kind", out=folder, epochs=5)
    >>> names, probabilities = model.probabilities(pd.DataFrame({"height": [0.2, 1.8, 2.5]}))
    >>> model.class_names, names, probabilities.shape
    (['herb', 'shrub'], ['1', '2', '3'], (3, 2))
    """

    folder: Path
    facts: Facts
    kind: Kind
    learners: list[tuple[Learner, float]]

    @property
    def class_names(self) -> list[str]:
        """The classes as text, in the order of the columns of `probabilities`."""
        return self.facts["class_names"]

    @property
    def classes_(self) -> np.ndarray:
        """The classes with the type that the labels had, [K]."""
        convert = {"int": int, "float": float, "bool": lambda name: bool(int(name))}.get(self.facts["label_type"], str)
        values = [convert(name) for name in self.class_names]
        return np.array(values, dtype=object if convert is str else None)

    @property
    def noise(self) -> Facts:
        """The estimated noise: rate, rate_interval, at_most, and matrix with matrix_lower and matrix_upper.

        It means nothing unless the model has `learnt`.
        """
        return self.facts["noise"]

    @property
    def noise_range(self) -> str:
        """The range of the noise rate in words, as in "13% to 35%" or "at most 50%"."""
        low, high = self.noise["rate_interval"]
        return f"at most {high:.0%}" if self._only_at_most else f"{low:.0%} to {high:.0%}"

    @property
    def noise_summary(self) -> str:
        """The estimated noise in words, and what the estimate cannot see."""
        if not self.learnt:
            return "The noise cannot be estimated: the predictions do not agree with the labels more than by chance."
        noise = self.noise
        low, high = noise["rate_interval"]
        if "rules" in self.facts:
            return (
                f"At most {high:.0%} of the labels are wrong. A decision tree with few leaves predicts "
                f"{self.facts['rules']:.0%} of them, about as many as all learners: if rules made the labels, nobody "
                "can see the errors of the rules in them. Have people check a sample: "
                f"logitclip review {shlex.quote(str(self.folder))} --audit 100."
            )
        if self._only_at_most:
            share = f"At most {high:.0%} of the labels are wrong"
        else:
            share = f"Between {low:.0%} and {high:.0%} of the labels are wrong, probably about {noise['rate']:.0%}"
        clean = " The labels look clean."
        if self.clip not in (None, "none"):
            clean += " Then there is little for a clip to prevent: try --clip none."
        return (
            f"{share}, by out-of-fold predictions. Systematic errors, such as those of labelling rules, "
            f"are not counted: the learners repeat them.{clean if noise['at_most'] <= CLEAN else ''}"
        )

    @property
    def clip(self) -> str | None:
        """The clip of the network; None if the model has no network."""
        return self.facts["clip"] if any(one["name"] == Network.name for one in self.facts["learners"]) else None

    @property
    def accuracy_summary(self) -> str:
        """How many labels the model agrees with in words, and how many a perfect classifier would agree with."""
        agrees = self.facts["noisy_accuracy"]
        text = f"The model agrees with {agrees:.1%} of the labels, by predictions that have not seen them. "
        for name in ("val", "test"):
            if f"{name}_accuracy" in self.facts:
                text += f"Accuracy on your {name} data: {self.facts[f'{name}_accuracy']:.1%}. "
        if not self.learnt:
            share = self.facts.get("largest_share", 1 / len(self.class_names))  # older folders do not have it
            return f"{text}Guessing the largest class would agree with about {share:.1%}."
        rate, (low, high) = self.noise["rate"], self.noise["rate_interval"]
        if self._only_at_most:
            return (
                f"{text}Some labels may be wrong: the true classes would agree with {1 - high:.0%} to {1 - low:.0%} "
                "of all labels."
            )
        text += (
            f"Some labels are wrong, so even the true classes would agree with only about {1 - rate:.0%} of all labels "
            f"({1 - high:.0%} to {1 - low:.0%})."
        )
        if agrees < 1 - rate + MORE:
            return text
        return f"{text} The model agrees with more: it repeats some wrong labels, or fewer than {rate:.0%} are wrong."

    @property
    def _only_at_most(self) -> bool:
        """Whether the range of the noise rate is so wide that a rate within it would say too much."""
        low, high = self.noise["rate_interval"]
        return "rules" in self.facts or low < high / 3

    @property
    def learnt(self) -> bool:
        """Whether the predictions agree with held-out labels more than by chance."""
        return self.facts.get("learnt", self.facts["noisy_accuracy"] > 1 / len(self.class_names))

    @cached_property
    def issues(self) -> Any:
        """The labels that are probably wrong, most suspicious first: a pandas data frame, see docs/wrong_labels.md."""
        import pandas as pd

        path, names = self.folder / ISSUES, ("row", "given", "suggested", "values")
        try:
            found = pd.read_csv(
                io.BytesIO(files.read_bytes(path)),
                converters=dict.fromkeys(names, unguard_formula),
                dtype={"score": float, "wrong": bool},
                keep_default_na=False,  # a class may be called None
            )
            found[["row", "suggested", "score", "wrong"]]
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(
                f"{path} cannot be read: {first_line(error)}. Remove it and fit the model again."
            ) from error
        return found

    @property
    def marked(self) -> int:
        """How many labels are marked wrong."""
        return int(np.count_nonzero(self.issues["wrong"]))

    def predict(self, data: Data, *, probabilities: bool = False) -> Any:
        """Predict the class of each row.

        Args:
            data: A csv, tsv, parquet or npz file, a folder of images, a data frame with the columns that the model
                was fitted on, or an array [N, D]. Other columns are ignored.
            probabilities: Add a column for each class, with its probability.

        Returns:
            A pandas data frame with a row per input: `row` (row number or file name), `class`, and `probability`, the
            calibrated probability that this is the true class. An image that cannot be read has no class. The classes
            have the type of the labels, and the index is that of a data frame.

        Raises:
            ValueError: If a column is missing or has another type than when the model was fitted.
        """
        import pandas as pd

        names, found = self.probabilities(data)
        index = data.index if isinstance(data, pd.DataFrame) else None
        return self.table(names, found, index=index, every=probabilities)

    def predict_parts(self, data: Data, *, probabilities: bool = False) -> Iterator[Any]:
        """Predict part by part: with an encoder, rows and features are never in memory together.

        Args:
            data, probabilities: As for `predict`.

        Yields:
            The data frames that make up the one of `predict`, without its index.
        """
        for rows in self.kind.read_parts(_expand_path(data)):
            for part in _divide(rows):
                yield self.table(part.names, self.probabilities_of(part), every=probabilities)

    def table(
        self, names: Sequence[str], found: np.ndarray, *, index: pd.Index | None = None, every: bool = False
    ) -> pd.DataFrame:
        """Return probabilities [N, K] as the data frame that `predict` returns."""
        import pandas as pd

        best, known = found.argmax(1), ~np.isnan(found[:, 0])
        classes = np.where(known, self.classes_[best], np.array(None)) if not known.all() else self.classes_[best]
        columns = {"row": list(names), "class": classes, "probability": found[np.arange(len(best)), best]}
        if every:
            columns |= {f"probability of {name}": found[:, k] for k, name in enumerate(self.class_names)}
        return pd.DataFrame(columns, index=index)

    def predict_proba(self, data: Data) -> np.ndarray:
        """Return the calibrated class probabilities [N, K], in the order of `classes_`."""
        return self.probabilities(data)[1]

    def agreement(self, data: Data, predicted: pd.DataFrame) -> str | None:
        """Compare predictions with the labels in `data`, if it has the label column or class folders.

        Args:
            data: The argument of `predict`.
            predicted: Its return value.

        Returns:
            A sentence with the accuracy over the rows that have a label and a prediction, and how to read it; None
            without labels.
        """
        compared = self.comparison(data)
        compared.add(predicted)
        return compared.sentence()

    def comparison(self, data: Data) -> Agreement:
        """Return what compares predictions with the labels in `data`, for predictions that come part by part."""
        try:
            labels = self._given_labels(data)
        except ValueError as error:  # the predictions need no labels
            labels = error
        return Agreement(labels, self.classes_.tolist(), self.class_names, self.facts["label"])

    def _given_labels(self, data: Data) -> np.ndarray:
        """Return label column or class folder of each row, None where there is none, [N]; empty if no row has one."""
        label, path = self.facts["label"], None
        if isinstance(data, str | os.PathLike):
            path = Path(os.path.expanduser(data))
        if path is not None and path.is_dir():
            parts = [Path(name).parts for name in sorted(find_images(path))]
            labels = [folders[0] if folders else None for *folders, _ in parts]
            return np.array(labels if {*labels} & {*self.class_names} else [], dtype=object)
        tables: Iterable[Columns] = ()
        if label is not None and path is not None:
            tables = read_table_parts(path, {label}, text={label})
        elif label is not None and hasattr(data, "columns"):
            tables = (read_columns(data),)
        texts = [column_text(columns, label, "the data") for columns in tables if label in columns]
        if not texts:
            return np.array([])
        return np.concatenate([np.array([*text.values, None], dtype=object)[text.codes] for text in texts])

    def probabilities(self, data: Data) -> tuple[list[str], np.ndarray]:
        """Return row names and calibrated class probabilities [N, K]; a row of NaN where an image cannot be read."""
        rows = self.kind.read(_expand_path(data))
        return list(rows.names), self.probabilities_of(rows)

    def probabilities_of(self, rows: Rows | NewRows) -> np.ndarray:
        """Return calibrated class probabilities [N, K] for rows that are read, in chunks."""
        if isinstance(rows, NewRows) or len(rows) > ROWS_AT_ONCE:
            return np.concatenate([self.probabilities_of(part) for part in _divide(rows)])
        mixed = mix(self.learners, rows)
        log_prior = np.array(self.facts["log_prior"])
        return calibrate(np.log(np.maximum(mixed, 1e-12)), self.facts["temperature"], log_prior)


def _expand_path(data: Data) -> Data:
    """Return the path of new data with ~ expanded, or data in memory as it is; a model folder is refused."""
    if not isinstance(data, str | os.PathLike):
        return data
    path = Path(os.path.expanduser(data))
    if (path / MODEL).is_file():
        raise ValueError(f"{data} is a model folder, not data: name a table or a folder of images.")
    return path


def predictions_as_csv(predicted: pd.DataFrame, *, header: bool = True) -> bytes:
    """Return predictions as CSV, in which a spreadsheet reads no name as a formula."""
    cells = {name: predicted[name].map(str, na_action="ignore") for name in ("row", "class")}
    cells = {name: texts.map(guard_formula, na_action="ignore") for name, texts in cells.items()}
    return predicted.assign(**cells).to_csv(index=False, header=header).encode()


def _divide(rows: Rows | NewRows) -> Iterator[Rows]:
    """Yield as many rows at a time as are predicted together."""
    size = ENCODED_AT_ONCE if isinstance(rows, NewRows) else ROWS_AT_ONCE
    for start in range(0, len(rows), size):
        yield rows.take(np.arange(start, min(start + size, len(rows))))


def write_model(folder: Path, facts: Facts, contents: Mapping[str, bytes]) -> None:
    """Write a model folder: `model.json`, with the digests of the files `contents`, and these.

    The lists and the page of an earlier model are removed: beside this one they would be wrong.
    """
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    facts = {"format": FORMAT, **facts, "files": digests}
    facts["digest"] = files.object_digest(facts)
    check_facts(facts)
    with files.stage(folder, {MODEL: files.json_bytes(facts), **contents}) as paths:
        (folder / PAGE).unlink(missing_ok=True)  # which is written last: without it, the fit was interrupted
        paths.pop(MODEL).replace(folder / MODEL)  # before the others: no file of an earlier model has its digests
        for name in (ISSUES, UNLABELLED):
            (folder / name).unlink(missing_ok=True)
        for name, path in paths.items():
            path.replace(folder / name)


def is_model(folder: Path) -> bool:
    """Return whether a folder has the model.json of a model, of this version or another."""
    facts = files.read_json(folder / MODEL)
    return isinstance(facts, dict) and {"format", "class_names"} <= facts.keys()


def maker(folder: Path) -> str | None:
    """Return the command that made the model in a folder, `fit` or `issues`; None if there is no model."""
    return files.read_json(folder / MODEL).get("made_by", "fit") if is_model(folder) else None


def load(folder: str | Path) -> Model:
    """Read a model folder that `fit` wrote.

    Args:
        folder: The folder.

    Returns:
        The model; it predicts the same as in the process that fitted it.

    Raises:
        ValueError: If the folder is not a complete model folder, or if a file in it is not the one that `fit` wrote.

    >>> import tempfile
    >>> import pandas as pd
    >>> from logitclip.own_data import fit
    >>> height = [0.1, 0.3, 0.4, 0.6, 0.7] * 10 + [1.5, 1.9, 2.2, 2.4, 3.1] * 10  # metres
    >>> plants = pd.DataFrame({"height": height, "kind": ["herb"] * 50 + ["shrub"] * 50})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fitted = fit(plants, "kind", out=folder, clip="norm:temp=1.5", epochs=5)
    ...     loaded = load(folder)
    >>> loaded.predict(plants).equals(fitted.predict(plants))
    True
    """
    folder = Path(os.path.expanduser(folder))
    if not (folder / MODEL).is_file():
        raise ValueError(f"{folder} is not a model folder: it has no {MODEL}. `logitclip fit` makes one.")
    try:
        facts = json.loads(files.read_bytes(folder / MODEL))
        check_facts(facts)
        facts = upgrade(facts)
        kinds = ENCODED if "encoder" in facts else KINDS
        if facts["kind"] not in kinds:
            raise ValueError(f"its kind {facts['kind']!r} is none of {', '.join(kinds)}")
        facts = with_bundle(facts, folder)
        kind = kinds[facts["kind"]].restore(facts, lambda name: read_checked(folder, name, facts))
        learners = [_restore(one, facts, folder) for one in facts["learners"]]
    except Exception as error:  # damaged files fail in many ways
        raise ValueError(f"The model in {folder} cannot be read: {first_line(error)}.") from error
    if facts["format"] != FORMAT:
        log.warning("%s was written by an older version, without digests: damaged files are not noticed.", folder)
    return Model(folder, facts, kind, learners)


def _restore(one: Facts, facts: Facts, folder: Path) -> tuple[Learner, float]:
    classes = len(facts["class_names"])
    if one["name"] == Network.name:
        mean, std = tuple(facts.get("mean", ())), tuple(facts.get("std", ()))
        learner: Learner = Network(classes, NetworkOptions(**one["recipe"]), mean, std)
    elif one["name"] in LEARNERS:
        learner = LEARNERS[one["name"]](classes)
    else:
        raise ValueError(f"its learner {one['name']!r} is unknown")
    learner.restore(one, lambda name: read_checked(folder, name, facts))
    return learner, one["weight"]


def read_checked(folder: Path, name: str, facts: Facts) -> bytes:
    """Read a file of a model folder.

    Raises:
        ValueError: If it is missing, is no regular file, or does not have the digest in model.json.
    """
    path = folder / name
    if not path.is_file():
        raise ValueError(f"there is no file {name}")
    content = files.read_bytes(path)
    check_file(name, content, facts)
    return content


# -- out-of-fold predictions -------------------------------------------------------------------------------------------


def predictions_to_bytes(probabilities: np.ndarray) -> bytes:
    """Keep the most probable classes of each row.

    Args:
        probabilities: Calibrated probabilities [N, K]; NaN in rows without an out-of-fold prediction.

    Returns:
        An npz file with `classes`, int32 [N, T], -1 where there is none, and `probabilities`, float16 [N, T], the most
        probable first; T is at most 5.
    """
    known = ~np.isnan(probabilities).any(axis=1, keepdims=True)
    shown = np.where(known, probabilities, 0.0)
    order = np.argsort(-shown, axis=1, kind="stable")[:, :KEPT_CLASSES]
    chosen = np.take_along_axis(shown, order, 1)
    content = io.BytesIO()
    np.savez_compressed(
        content, classes=np.where(known, order, -1).astype(np.int32), probabilities=chosen.astype(np.float16)
    )
    return content.getvalue()


def predictions_from_bytes(content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Read what `predictions_to_bytes` wrote.

    >>> classes, probabilities = predictions_from_bytes(predictions_to_bytes(np.array([[0.25, 0.75], [np.nan] * 2])))
    >>> classes.tolist(), probabilities.tolist()
    ([[1, 0], [-1, -1]], [[0.75, 0.25], [0.0, 0.0]])
    """
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        return file["classes"], file["probabilities"].astype(float)
