"""Photos and texts as features of a pretrained encoder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from logitclip import encoders, files
from logitclip.data._columns import Columns, row_count, take
from logitclip.data._images import ImageFiles
from logitclip.data._preprocessing import Preprocessor
from logitclip.data.table import join_texts
from logitclip.encoders import blocks
from logitclip.encoders.features import Features, Inputs, OnRows, input_kind
from logitclip.files import Json
from logitclip.own_data.facts import Facts
from logitclip.own_data.images import Images
from logitclip.own_data.kind import Kind, NewRows, Read, RowNumbers, Rows
from logitclip.own_data.tables import PREPROCESSING, Texts
from logitclip.runs.encoding import Pool, find_scale, load_encoder
from logitclip.runs.plugins import loaded_plugins

if TYPE_CHECKING:
    from logitclip.own_data.kind import Data

BUNDLE = "encoder"  # the folder of the weights in a model folder


@dataclass(frozen=True)
class Encoding:
    """How `fit` should encode."""

    spec: str  # an encoder, or auto
    jobs: int | None = 1  # processes that encode
    on_rows: OnRows | None = None  # called with the rows done and all rows

    def features(self, inputs: Inputs) -> np.ndarray:
        """Return the features of training inputs, float32 [N, D], from the cache; missing ones are computed."""
        kept = Features.of(inputs, self.spec)
        load = partial(load_encoder, loaded_plugins(), self.spec, input_kind(inputs), "auto")
        pool: Pool = partial(blocks.in_processes, jobs=self.jobs or torch.get_num_threads())
        if torch.accelerator.is_available():
            pool = blocks.in_this_process
        kept.complete(inputs, partial(pool, load), self.on_rows)
        return kept.read().astype(np.float32)

    def resolve(self, takes: encoders.InputKind) -> Encoding:
        """Return this with the encoder that `auto` stands for, in canonical form, and a folder with its whole path."""
        spec = encoders.AUTO_ENCODERS[takes] if self.spec.strip() == "auto" else self.spec
        name, knobs = encoders.ENCODERS.parse(spec)
        if "name" in knobs and (folder := Path(os.path.expanduser(knobs["name"]))).is_dir():
            spec = encoders.ENCODERS.format(name, {**knobs, "name": str(folder.resolve())})
        return replace(self, spec=encoders.ENCODERS.canonical(spec))


def check_bundle(spec: str) -> None:
    """Raise a ValueError if an encoder cannot be copied into a model folder."""
    name = spec.partition(":")[0].strip()
    if name == "none":
        raise ValueError("bundle copies an encoder into the model folder: name one with encoder.")
    if name == "auto":
        return
    if "name" not in encoders.ENCODERS.knobs(name) or not hasattr(encoders.ENCODERS[name], "reads"):
        raise ValueError(f"The encoder {name} cannot be bundled: it has no folder of weights to name.")


def copy_encoder(facts: Facts, out: Path) -> None:
    """Copy the files of the encoder into the model folder."""
    found = encoders.files_of(facts["encoder"]["spec"])
    home = Path(*min((path.parent.parts for path in found), key=len))
    if home.resolve() == (out / BUNDLE).resolve():
        return
    files.clear_place(out / BUNDLE)
    for path in found:
        place = out / BUNDLE / path.relative_to(home)
        files.make_folder(place.parent)
        place.unlink(missing_ok=True)  # it may be a link
        shutil.copyfile(path, place)
    if not _is_bundled(facts, out):
        raise ValueError(f"{out / BUNDLE} has other files beside those of the encoder: remove it and start again.")


def with_bundle(facts: Facts, folder: Path) -> Facts:
    """Return the facts of a model with its encoder in the model folder, if that has the files."""
    return {**facts, "encoder": _name_bundle(facts, folder)} if _is_bundled(facts, folder) else facts


def _name_bundle(facts: Facts, folder: Path) -> Facts:
    name, knobs = encoders.ENCODERS.parse(facts["encoder"]["spec"])
    return {**facts["encoder"], "spec": encoders.ENCODERS.format(name, {**knobs, "name": str(folder / BUNDLE)})}


def _is_bundled(facts: Facts, folder: Path) -> bool:
    """Return whether the encoder of this model is in its folder; that of an earlier model may be."""
    if not isinstance(facts.get("encoder"), dict) or not (folder / BUNDLE).is_dir():
        return False
    try:
        return encoders.identify(_name_bundle(facts, folder)["spec"]) == facts["encoder"]["identity"]
    except ValueError:  # a file is missing
        return False


class _Encoded(Kind):
    """What photos and texts have in common."""

    takes: ClassVar[encoders.InputKind]
    encoding: Encoding
    hint = ""
    # Measured by benchmarks/encoder_fit.py: noisy labels prefer what repeats their errors.
    alike = ("network", "logistic")

    @staticmethod
    def restore_encoding(facts: Facts) -> Json:
        """Return the fields `mean`, `std` and `encoding`, or raise a ValueError if the encoder has other files now."""
        spec = facts["encoder"]["spec"]
        if encoders.identify(spec) != facts["encoder"]["identity"]:
            raise ValueError(
                f"the encoder {spec} has other weights or another tokenizer than when the model was fitted"
            )
        return {"mean": tuple(facts["mean"]), "std": tuple(facts["std"]), "encoding": Encoding(spec)}

    def facts(self) -> Facts:
        spec = self.encoding.spec
        return {**super().facts(), "encoder": {"spec": spec, "identity": encoders.identify(spec)}}

    def standardise(self, names: Sequence[str], x: np.ndarray) -> Rows:
        """Return features [N, D] as rows."""
        features = (x - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)
        return Rows(names, features.astype(np.float32), torch.from_numpy(x))

    def network(self, rows: int) -> dict[str, str | float]:
        names = ("model", "lr", "weight_decay", "batch_size", "epochs", "augment")
        return {name: encoders.HEAD[name] for name in names}

    def describe(self, rows: Rows) -> str:
        return f"{len(self.mean)} features of {self.encoding.spec}"

    @cached_property
    def encoder(self) -> encoders.Encoder:
        """The encoder, loaded once."""
        return encoders.build(self.encoding.spec, self.takes)

    def read_beside(self, data: Data, columns: Columns | None) -> Rows:
        rows = self.read(data, columns)
        assert isinstance(rows, NewRows)
        return rows.finish(self.encoding.features(rows.inputs), np.arange(len(rows)))

    def _encode(self, part: Inputs) -> np.ndarray:
        return blocks.encode_block(self.encoder, part)


@dataclass(frozen=True, eq=False)
class EncodedImages(_Encoded, Images):
    """Image files as features of an encoder."""

    takes = "images"
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    encoding: Encoding = field(kw_only=True)

    @classmethod
    def restore(cls, facts: Facts, read: Read) -> EncodedImages:
        return cls(facts["label"], facts["image"], facts["size"], **cls.restore_encoding(facts))

    @classmethod
    def encode(cls, images: Images, encoding: Encoding) -> tuple[EncodedImages, Rows, np.ndarray]:
        """Encode the training images; return the kind, its rows, and their positions: unreadable ones are skipped."""
        encoding = encoding.resolve("images")
        x = encoding.features(ImageFiles(images.folder, images.names))
        kept = np.flatnonzero(np.isfinite(x).all(1))
        if not len(kept):
            raise ValueError(f"{images.folder} holds no readable image.")
        mean, std = find_scale(x[kept])
        own = {**vars(images), "mean": mean, "std": std, "encoding": encoding}
        kind = cls(**own).keep(kept)
        return kind, kind.standardise(kind.names, x[kept]), kept

    def read(self, data: Data, columns: Columns | None = None) -> NewRows:
        folder, names = self._files(data, columns)

        def finish(x: np.ndarray, index: np.ndarray) -> Rows:
            return self.standardise([names[i] for i in index.tolist()], x)

        return NewRows(names, ImageFiles(folder, names), self._encode, finish)


@dataclass(frozen=True, eq=False)
class EncodedTexts(_Encoded, Texts):
    """Texts as features of an encoder, with the numbers and categories beside them."""

    takes = "texts"
    preprocessor: Preprocessor = field(default_factory=Preprocessor)
    text: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    encoding: Encoding = field(kw_only=True)

    @classmethod
    def encode(cls, columns: Columns, label: str, text: Sequence[str], encoding: Encoding) -> EncodedTexts:
        """Learn the scale of the features, and the preprocessing of the other columns, from the training rows."""
        beside = Preprocessor.fit_beside(columns, text)
        kind = cls(label, beside, columns, text=tuple(text), encoding=encoding.resolve("texts"))
        mean, std = find_scale(kind._features(columns), beside.transform(columns).shape[1])
        return replace(kind, mean=mean, std=std)

    @classmethod
    def restore(cls, facts: Facts, read: Read) -> EncodedTexts:
        kept = PREPROCESSING in facts["files"]
        preprocessor = Preprocessor.from_bytes(read(PREPROCESSING)) if kept else Preprocessor()
        return cls(facts["label"], preprocessor, text=tuple(facts["text"]), **cls.restore_encoding(facts))

    def facts(self) -> Facts:
        return {**super().facts(), "text": list(self.text)}

    def contents(self) -> dict[str, bytes]:
        return super().contents() if self.preprocessor.kinds else {}

    @property
    def used(self) -> dict[str, str]:
        return {**dict.fromkeys(self.text, "text"), **self.preprocessor.kinds}

    @property
    def shown_columns(self) -> list[str]:
        return list(self.text)

    def _features(self, columns: Columns) -> np.ndarray:
        return self._with_beside(self.encoding.features(join_texts(columns, self.text)), columns)

    def _with_beside(self, x: np.ndarray, columns: Columns) -> np.ndarray:
        if not self.preprocessor.kinds:  # concatenating nothing would copy the features
            return x
        return np.concatenate([x, self.preprocessor.transform(columns).numpy()], 1)

    def rows(self, columns: Columns, numbers: np.ndarray | None = None) -> Rows:
        names = RowNumbers(np.arange(row_count(columns)) if numbers is None else numbers)
        return self.standardise(names, self._features(columns))

    @property
    def text_columns(self) -> set[str]:
        return {*self.text, *self.preprocessor.text_columns}

    def _read_part(self, columns: Columns, start: int, warned: set[str]) -> NewRows:
        missing = [name for name in self.text if name not in columns]
        if missing:
            raise ValueError(f"There is no column {missing[0]!r}, and the model was fitted on it.")
        names = RowNumbers(start + np.arange(row_count(columns)))

        def finish(x: np.ndarray, index: np.ndarray) -> Rows:
            return self.standardise(RowNumbers(start + index), self._with_beside(x, take(columns, index)))

        return NewRows(names, join_texts(columns, self.text), self._encode, finish)
