"""The model folder: network, preprocessing, classes and calibration; no pickle in it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from logitclip import files, models
from logitclip.data.augment import transform
from logitclip.data.columns import Columns, from_frame, read_table, row_count
from logitclip.data.dataset import Split
from logitclip.data.images import ImageFiles, find_images
from logitclip.data.loading import batches
from logitclip.data.preprocessing import Preprocessor
from logitclip.data.table import column_text
from logitclip.noise.estimate import CLEAN
from logitclip.own_data.calibration import calibrated
from logitclip.own_data.facts import FORMAT, check_facts, check_file
from logitclip.own_data.source import check_names
from logitclip.text import first_line, unguard_formula

log = logging.getLogger(__name__)

MODEL, WEIGHTS, PREPROCESSING, ISSUES, PAGE = (
    *("model.json", "weights.safetensors", "preprocessing.skops", "issues.csv", "page.html"),
)
PREDICTIONS = "predictions.npz"  # out of fold, for `review`


@dataclass(frozen=True, eq=False)
class Model:
    """A fitted model in its folder. `fit` makes it, `load` reads it.

    Attributes:
        folder: the model folder.
        facts: the content of model.json.
        network: from preprocessed inputs to logits [N, K].
        preprocessor: from columns to features [N, D]; None for images.

    >>> import tempfile
    >>> import logitclip as lc
    >>> import pandas as pd
    >>> height = [0.1, 0.3, 0.4, 0.6, 0.7] * 10 + [1.5, 1.9, 2.2, 2.4, 3.1] * 10  # metres
    >>> plants = pd.DataFrame({"height": height, "kind": ["herb"] * 50 + ["shrub"] * 50})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model = lc.fit(plants, "kind", out=folder, clip="norm:temp=1.5", epochs=5)
    >>> names, probabilities = model.probabilities(pd.DataFrame({"height": [0.2, 1.8, 2.5]}))
    >>> model.class_names, names, probabilities.shape
    (['herb', 'shrub'], ['1', '2', '3'], (3, 2))
    """

    folder: Path
    facts: dict[str, Any]
    network: nn.Module
    preprocessor: Preprocessor | None

    @property
    def class_names(self) -> list[str]:
        """The classes, in the order of the columns of `probabilities`."""
        return self.facts["class_names"]

    @property
    def noise(self) -> dict[str, Any]:
        """The estimated noise: rate, rate_interval, at_most, and matrix with matrix_lower and matrix_upper.

        It means nothing unless the network has `learnt`.
        """
        return self.facts["noise"]

    @property
    def noise_summary(self) -> str:
        """The estimated noise in words, and what the estimate cannot see."""
        if not self.learnt:
            text = "The noise cannot be estimated: the network is not clearly better than guessing the largest class"
            held_out = " on the held-out rows. With few of them, judging every row (--find-issues) may tell more"
            return f"{text}{'' if self.noise['from'] == 'out of fold' else held_out}."
        noise = self.noise
        low, high = noise["rate_interval"]
        rows = "every row, out of fold" if noise["from"] == "out of fold" else "the held-out rows"
        contradicted = (
            f" They contradict {noise['at_most']:.0%} of the labels: so many are wrong if every prediction is right."
            if noise["at_most"] > high
            else ""
        )
        clean = " The labels look clean: the clip can only cost accuracy. Try --clip none."
        return (
            f"About {noise['rate']:.0%} of the labels are wrong (95 % interval {low:.0%} to {high:.0%}), by "
            f"predictions for {rows}.{contradicted} Errors that follow from the features, as those of labelling rules "
            f"do, are not counted: the network learns them.{clean if noise['at_most'] <= CLEAN else ''}"
        )

    @property
    def accuracy_summary(self) -> str:
        """The accuracy on held-out noisy labels in words, and what a perfect classifier would score on them."""
        text = f"Accuracy on held-out noisy labels: {self.facts['noisy_accuracy']:.1%}. "
        if not self.learnt:
            share = self.facts.get("largest_share", 1 / len(self.class_names))  # older folders do not have it
            return f"{text}Guessing the largest class scores about {share:.1%}."
        low, high = self.noise["rate_interval"]
        return (
            f"{text}At the estimated noise rate a perfect classifier would score about {1 - self.noise['rate']:.0%} "
            f"({1 - high:.0%} to {1 - low:.0%} over its interval)."
        )

    @property
    def learnt(self) -> bool:
        """Whether the predictions are clearly better than guessing the largest class."""
        return self.facts.get("learnt", self.facts["noisy_accuracy"] > 1 / len(self.class_names))

    @cached_property
    def issues(self) -> Any:
        """The labels that are probably wrong, most suspicious first: a pandas data frame, see docs/wrong_labels.md."""
        import pandas as pd

        names = ("row", "given", "suggested")
        return pd.read_csv(
            self.folder / ISSUES,
            converters=dict.fromkeys(names, unguard_formula),
            keep_default_na=False,  # a class may be called None
        )

    def predict(self, data: Any) -> Any:
        """Predict the class of each row.

        Args:
            data: A csv, tsv, parquet or npz file, a folder of images, or a pandas data frame with the columns that the
                model was fitted on. Other columns are ignored.

        Returns:
            A pandas data frame with a row per input: `row` (row number or file name), `class`, and `probability`, the
            calibrated probability that this is the true class. An image that cannot be read has no class.

        Raises:
            ValueError: If a column is missing or has another type than when the model was fitted.
        """
        import pandas as pd

        names, probabilities = self.probabilities(data)
        best = probabilities.argmax(1)
        known = ~np.isnan(probabilities[:, 0])
        classes = np.array([*self.class_names, None], dtype=object)[np.where(known, best, -1)]
        return pd.DataFrame(
            {
                "row": names,
                "class": classes,
                "probability": probabilities[np.arange(len(best)), best],
            }
        )

    def agreement(self, data: Any, predicted: Any) -> str | None:
        """Compare predictions with the labels in `data`, if it has the label column.

        Args:
            data: The argument of `predict`.
            predicted: Its return value.

        Returns:
            A sentence with the accuracy over the rows that have a label and a prediction, and how to read it; None
            without labels.
        """
        label = self.facts["label"]
        if label is None or (isinstance(data, str | os.PathLike) and Path(data).is_dir()):
            return None
        try:
            file = isinstance(data, str | os.PathLike)
            columns = read_table(os.fspath(data), text=[label]) if file else from_frame(data)
            if label not in columns:
                return None
            text = column_text(columns, label, "the data")
        except ValueError as error:  # the predictions need no labels
            return f"They cannot be compared with the column {label!r}: {error}"
        known = (text.codes >= 0) & predicted["class"].notna().to_numpy()
        if not known.any():
            return None
        given = np.array(text.values, dtype=object)[text.codes[known]]
        new = sorted(set(given) - set(self.class_names))
        are = "classes are" if len(new) > 1 else "class is"
        unknown = f" {len(new)} {are} new to the model and counted as wrong: {', '.join(new[:3])}." if new else ""
        share = (given == predicted["class"].to_numpy()[known]).mean()
        return (
            f"{share:.1%} agree with the column {label!r}. If a share r of these labels is wrong, a perfect "
            f"classifier would agree with about 1 - r.{unknown}"
        )

    def probabilities(self, data: Any) -> tuple[list[str], np.ndarray]:
        """Return row names and calibrated class probabilities [N, K]; a row of NaN where an image cannot be read."""
        names, x = self._inputs(data)
        return names, self.calibrated(self.logits(x).numpy())

    def calibrated(self, logits: np.ndarray) -> np.ndarray:
        """Turn logits [N, K] into probabilities of the true class."""
        return calibrated(logits, self.facts["temperature"], np.array(self.facts["log_prior"]))

    def logits(self, x: Any) -> Tensor:
        """Return the network's logits [N, K]; `x` are features [N, D], images [N, 3, S, S] or image files."""
        view = transform(self.facts["augment"], self.facts["mean"], self.facts["std"])
        return logits_of(self.network, x, view)

    def _inputs(self, data: Any) -> tuple[list[str], Any]:
        if isinstance(data, str | os.PathLike) and (Path(data) / MODEL).is_file():
            raise ValueError(f"{data} is a model folder, not data: name a table or a folder of images.")
        if self.facts["kind"] == "image":
            return self._images(data)
        assert self.preprocessor is not None
        columns = self._columns(data)
        features = self.preprocessor.transform(columns)
        for name, values in self.preprocessor.unknown(columns).items():
            shown = ", ".join(map(repr, values[:3])) + (f" and {len(values) - 3} more" if len(values) > 3 else "")
            log.warning("column %r has values that the model does not know: %s; they count as rare ones", name, shown)
        return [str(i + 1) for i in range(row_count(columns))], features

    def _columns(self, data: Any) -> Columns:
        if isinstance(data, str | os.PathLike):
            text = self.preprocessor.text_columns if self.preprocessor is not None else ()
            return read_table(os.fspath(data), text=text)
        return from_frame(data)

    def _images(self, data: Any) -> tuple[list[str], Any]:
        if isinstance(data, str | os.PathLike) and Path(data).is_dir():
            folder, names = Path(data), sorted(find_images(Path(data)))
            if not names:
                raise ValueError(f"{folder} holds no image.")
            check_names(names)
        else:
            column = self.facts["image"]
            if column is None:
                raise ValueError(f"The model was fitted on a folder of images; give a folder, not {data}.")
            columns = self._columns(data)
            text = column_text(columns, column, str(data) if isinstance(data, str | os.PathLike) else "The data frame")
            folder = Path(data).parent if isinstance(data, str | os.PathLike) else Path()
            names = ["" if code < 0 else text.values[code] for code in text.codes]
        return names, ImageFiles(folder, names, self.facts["size"])


def logits_of(network: nn.Module, x: Any, view: Any) -> Tensor:
    """Return logits [N, K] in batches; NaN for image files that cannot be read."""
    network.eval()
    rows = []
    with torch.no_grad():
        if isinstance(x, Tensor):
            empty = Split(x, torch.zeros(len(x), dtype=torch.int64))
            rows = [network(view(batch, None)) for _, batch, _ in batches(empty, 1024)]
            return torch.cat(rows)
        for i in range(len(x)):
            try:
                rows.append(network(view(x.decode(i)[None], None)))
            except ValueError as error:
                log.warning("skipped: %s", error)
                rows.append(None)
    width = next((row.shape[1] for row in rows if row is not None), 1)
    return torch.cat([torch.full((1, width), torch.nan) if row is None else row for row in rows])


def write_model(folder: Path, facts: dict[str, Any], contents: Mapping[str, bytes]) -> None:
    """Write a model folder; `model.json` comes last, so a folder with it is complete.

    Args:
        folder: The folder.
        facts: The content of model.json, without its format and digests.
        contents: The files beside it, by name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MODEL).unlink(missing_ok=True)
    for name, content in contents.items():
        files.replace(folder / name, content)
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    facts = {"format": FORMAT, **facts, "files": digests}
    facts["digest"] = files.object_digest(facts)
    check_facts(facts)
    files.write_json(folder / MODEL, facts)


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
    from safetensors.torch import load as from_bytes

    folder = Path(os.path.expanduser(folder))
    if not (folder / MODEL).is_file():
        raise ValueError(f"{folder} is not a model folder: it has no {MODEL}. `logitclip fit` makes one.")
    try:
        facts = json.loads(files.read_bytes(folder / MODEL))
        check_facts(facts)
        network = models.build(facts["model"], len(facts["class_names"]), facts["input_shape"])
        network.load_state_dict(from_bytes(read_checked(folder, WEIGHTS, facts)))
        preprocessor = None
        if facts["kind"] != "image":
            preprocessor = Preprocessor.from_bytes(read_checked(folder, PREPROCESSING, facts))
    except Exception as error:  # damaged files fail in many ways
        raise ValueError(f"The model in {folder} cannot be read: {first_line(error)}.") from error
    if facts["format"] != FORMAT:
        log.warning("%s was written by an older version, without digests: damaged files are not noticed.", folder)
    return Model(folder, facts, network.eval(), preprocessor)


def read_checked(folder: Path, name: str, facts: Mapping[str, Any]) -> bytes:
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
