"""Records of label noise: `apply` runs a rule with its own seed and returns the result as `NoisyLabels`."""

from __future__ import annotations

import functools
import hashlib
import inspect
import io
import json
import operator
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from logitclip import files
from logitclip.files import Json
from logitclip.noise.checks import class_labels, inputs_of, is_integer, noisy_labels
from logitclip.noise.rules import NOISES
from logitclip.rng import hashed_seed
from logitclip.search import beats_chance


@dataclass(frozen=True, eq=False)
class NoisyLabels:
    """Noisy labels, clean labels, and the rule that made one from the other. `apply` makes it.

    Attributes:
        labels: Noisy labels: int64 [N], or float32 [N, K] if they are soft.
        clean_labels: int64 [N].
        num_classes: K.
        rule: Canonical spec of the rule.
        options: Every knob of the rule with its value, and the arrows of asymmetric noise if given.
        seed: Seed of the noise.
        replaced: For open_set, int64 [M, 2]: the position of each replaced image and the index of its source image.
        images: For open_set, the inputs after replacement; `save` leaves them out.

    >>> from logitclip.noise import apply
    >>> record = apply("pair:rate=0.5", [0, 1, 2, 0], seed=3, num_classes=3)
    >>> record.rate, record.wrong.tolist()
    (0.5, [1.0, 1.0, 0.0, 0.0])
    >>> record.transition.tolist()
    [[0.5, 0.5, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 1.0]]
    """

    labels: Tensor
    clean_labels: Tensor
    num_classes: int
    rule: str
    options: Mapping[str, Any]
    seed: int
    replaced: Tensor | None = None
    images: Tensor | None = None

    @functools.cached_property
    def wrong(self) -> Tensor:
        """[N] float64: 1 if the label is wrong or the image replaced, else 0; if soft, the weight of wrong classes."""
        if self.labels.ndim == 2:
            return 1 - self.labels.double().gather(1, self.clean_labels[:, None]).squeeze(1)
        wrong = (self.labels != self.clean_labels).double()
        return wrong if self.replaced is None else wrong.index_fill(0, self.replaced[:, 0], 1)

    @property
    def rate(self) -> float:
        """The realised share of wrong labels."""
        return float(self.wrong.mean())

    @property
    def class_sizes(self) -> Tensor:
        """[K] int64: number of examples of each true class."""
        return self.clean_labels.bincount(minlength=self.num_classes)

    @property
    def class_rates(self) -> Tensor:
        """[K] float64: share of wrong labels in each true class; 0 for an empty class."""
        wrong = self.clean_labels.bincount(self.wrong, minlength=self.num_classes)
        return wrong / self.class_sizes.clamp_min(1)

    @functools.cached_property
    def transition(self) -> Tensor:
        """[K, K] float64: share of each true class (row) that has each label; 0 for an empty class."""
        k = self.num_classes
        if self.labels.ndim == 2:
            counts = torch.zeros(k, k, dtype=torch.float64).index_add(0, self.clean_labels, self.labels.double())
        else:
            counts = (self.clean_labels * k + self.labels).bincount(minlength=k * k).view(k, k)
        return counts / self.class_sizes.clamp_min(1).double()[:, None]

    @functools.cached_property
    def content_hash(self) -> str:
        """SHA-256 of the noisy and clean labels, the replacements, and the rule with its options and seed."""
        made = json.dumps([self.rule, dict(self.options), self.seed, self.num_classes], sort_keys=True)
        return _sha256(made, *self._arrays().values())

    def _arrays(self) -> dict[str, Tensor]:
        arrays = {"labels": self.labels, "clean_labels": self.clean_labels, "replaced": self.replaced}
        return {name: array for name, array in arrays.items() if array is not None}

    def describe(self) -> Json:
        """Return the record as a dict for JSON, as `save` writes it; without the matrix for more than 100 classes."""
        return {
            "rule": self.rule,
            "options": dict(self.options),
            "seed": self.seed,
            "num_classes": self.num_classes,
            "examples": len(self.labels),
            "rate": self.rate,
            "class_rates": self.class_rates.tolist(),
            "transition": self.transition.tolist() if self.num_classes <= 100 else None,
            "clean_hash": _sha256(self.clean_labels),
            "content_hash": self.content_hash,
        }

    def check(self, clean_labels: Any, num_classes: int) -> None:
        """Check that the record was made for this data.

        Args:
            clean_labels: [N] int64.
            num_classes: K.

        Raises:
            ValueError: If it was made for other labels, for another order of them, or for another number of classes.
        """
        clean = class_labels(clean_labels, num_classes)
        if num_classes != self.num_classes:
            raise ValueError(f"The noise record has {self.num_classes} classes, the data {num_classes}.")
        if len(clean) != len(self.labels):
            raise ValueError(f"The noise record has {len(self.labels)} labels, the data {len(clean)}.")
        if not torch.equal(clean, self.clean_labels):
            raise ValueError("The noise record was made for other true labels, or for the same in another order.")

    def select(self, index: Tensor) -> NoisyLabels:
        """Return the record of the examples at `index`, int64 [M]."""
        chosen = replace(self, labels=self.labels[index], clean_labels=self.clean_labels[index])
        if self.replaced is None:
            return chosen
        place = torch.full((len(self.labels),), -1)
        place[index] = torch.arange(len(index))
        replaced = torch.stack([place[self.replaced[:, 0]], self.replaced[:, 1]], dim=1)
        images = None if self.images is None else self.images[index]
        return replace(chosen, replaced=replaced[replaced[:, 0] >= 0], images=images)

    def save(self, path: str | Path) -> Path:
        """Write `path`.npz (arrays) and `path`.json (everything else), each atomically; return the path of the .npz."""
        npz, text = record_files(path)
        arrays: dict[str, Any] = {name: array.numpy() for name, array in self._arrays().items()}
        content = io.BytesIO()
        np.savez_compressed(content, **arrays)
        files.write(npz, content.getvalue())
        files.write(text, files.line_per_key(self.describe()))  # last: it holds the hash of both
        return npz

    @classmethod
    def from_file(cls, path: str, clean_labels: Tensor, num_classes: int, source: str | None = None) -> NoisyLabels:
        """Read a record that `save` wrote, or a file of labels, and check that it fits the data.

        Args:
            path: A record; or a .json, .csv or .npy file with a label for each example; or, as released with the
                LogitClip code, pairs of the position of an example and the index of the source image that replaces it.
            clean_labels: [N] int64.
            num_classes: K.
            source: The dataset that these images are from.

        Returns:
            The record.

        Raises:
            ValueError: If the file is missing, damaged or made for other data.
        """
        content = read_noise_file(path)
        if content is None:
            record = cls.load(path)
            record.check(clean_labels, num_classes)
            return record
        options = {"path": path} | ({} if source is None else {"source": source})
        rule = NOISES.format("file", options)
        if content.ndim == 1 or content.is_floating_point():
            labels, replaced = noisy_labels(content, num_classes, len(clean_labels)), None
            check_agreement(path, labels, clean_labels, num_classes)
        else:
            labels, replaced = clean_labels, check_pairs(path, content, len(clean_labels), source)
        return cls(labels, clean_labels, operator.index(num_classes), rule, options, seed=0, replaced=replaced)

    @classmethod
    def load(cls, path: str | Path) -> NoisyLabels:
        """Read a record that `save` wrote.

        Raises:
            ValueError: If it is missing or damaged, or its hash does not match.
        """
        npz, text = record_files(path)
        try:
            about = json.loads(files.read_bytes(text))
            with np.load(io.BytesIO(files.read_bytes(npz)), allow_pickle=False) as stored:
                arrays = {name: torch.from_numpy(stored[name]) for name in stored.files}
            made = {name: about[name] for name in ("rule", "options", "seed", "num_classes")}
            record = cls(**arrays, **made)
            intact = record.content_hash == about["content_hash"]
            class_labels(record.clean_labels, record.num_classes, what="its true labels")
            noisy_labels(record.labels, record.num_classes, len(record.clean_labels))
        except FileNotFoundError as error:
            raise ValueError(f"There is no noise record {path}: {error.filename} is missing.") from error
        except Exception as error:  # zipfile, zlib and numpy raise many types for a damaged archive
            raise ValueError(f"{path} is not a noise record: {type(error).__name__}, {error}") from error
        if not intact:
            raise ValueError(f"The noise record {path} was changed after it was saved: its hash does not match.")
        return record


def apply(
    spec: str,
    data: Any,
    seed: int = 0,
    *,
    num_classes: int | None = None,
    images: Any = None,
    mapping: Mapping[int, int] | None = None,
    label_sets: Mapping[str, Any] | None = None,
    load: Callable[[str], Any] | None = None,
    **knobs: Any,
) -> NoisyLabels:
    """Run a noise rule by its spec and record the result.

    Args:
        spec: Name and knobs of the rule: ``"symmetric:rate=0.5"``.
        data: A `Dataset`, or only integer labels [N], with `num_classes`.
        seed: Seed of the noise, independent of a model or loader with the same seed.
        num_classes: K; by default that of the dataset.
        images: [N, C, H, W] or [N, D], for rules that depend on them; by default those of the dataset.
        mapping: Source class -> target class, for asymmetric noise; by default that of the dataset.
        label_sets: Human labels [N] by name, for the rule `real`; by default those of the dataset.
        load: Function from a name to a dataset, for the source of `open_set`.
        **knobs: Knobs of the rule that are not in the spec, such as arrays.

    Returns:
        The record: noisy and clean labels, the rule, its options and the seed.

    Raises:
        ValueError: If the rule or a knob is unknown or out of range, or the rule needs something that `data` lacks.

    >>> record = apply("pair:rate=0.5", [0, 1, 2, 0], seed=3, num_classes=3)
    >>> record.rate, record.rule, record.options
    (0.5, 'pair:rate=0.5', {'rate': 0.5, 'draw': 'exact'})
    """
    given = clean = data
    if hasattr(data, "train"):
        given, clean = data.train.labels, data.train.clean_labels
        clean = given if clean is None else clean
        num_classes = data.num_classes if num_classes is None else num_classes
        images = data.train.x if images is None else images
        mapping = data.asymmetric if mapping is None else mapping
        label_sets = data.label_sets if label_sets is None else label_sets
    if num_classes is None:
        raise ValueError("noise.apply needs num_classes=... when it is given labels and not a dataset.")
    given, clean = class_labels(given, num_classes), class_labels(clean, num_classes, what="clean labels")
    name, options = NOISES.parse(spec, **knobs)

    def load_source(source: Any) -> Any:
        return load(source) if load is not None and isinstance(source, str) else source

    if name == "file":
        record = NoisyLabels.from_file(options["path"], clean, num_classes, options.get("source"))
        return _replace_images(record, images, load_source(record.options.get("source")))

    context = {"images": images, "mapping": mapping, "label_sets": label_sets, "generator": _make_generator(seed)}
    if options.get("variant", "map") != "map":  # the other variants have their own arrows
        del context["mapping"]
    accepted = inspect.signature(NOISES[name]).parameters
    context = {key: value for key, value in context.items() if key in accepted}
    if "source" in options:
        options["source"] = load_source(options["source"])
    result = NOISES[name](given, num_classes, **options, **context)
    spec = NOISES.format(name, NOISES.split(spec)[1] | {key: _describe_knob(value) for key, value in knobs.items()})
    recorded = {key: knob.default for key, knob in NOISES.knobs(name).items()} | NOISES.parse(spec)[1]
    if arrows := context.get("mapping"):  # they depend on the dataset, not on the spec
        recorded["mapping"] = {str(start): int(end) for start, end in arrows.items()}
    record = NoisyLabels(
        labels=given if name == "open_set" else noisy_labels(result, num_classes, len(given)),
        clean_labels=clean,
        num_classes=operator.index(num_classes),
        rule=NOISES.canonical(spec),
        options=recorded,
        seed=operator.index(seed),
        replaced=result if name == "open_set" else None,
    )
    return _replace_images(record, images, options.get("source"))


def reads_examples(spec: str) -> bool:
    """Return whether a noise reads a file with an entry for each training example, so for the whole training set.

    >>> reads_examples("file:path=noisy.csv"), reads_examples("symmetric:rate=0.5")
    (True, False)
    """
    return NOISES.split(spec)[0] in ("file", "votes")


def reads_inputs(spec: str) -> bool:
    """Return whether a noise depends on the inputs or replaces some of them.

    >>> reads_inputs("instance:rate=0.2"), reads_inputs("symmetric:rate=0.5")
    (True, False)
    """
    name = NOISES.split(spec)[0]
    return name != "none" and not {"images", "source"}.isdisjoint(inspect.signature(NOISES[name]).parameters)


def _make_generator(seed: int) -> torch.Generator:
    """Return a generator only for noise: a loader that shuffles with the seed would see flipped labels first."""
    if not is_integer(seed):
        raise ValueError(f"The seed of the noise must be an integer, got {seed!r}.")
    return torch.Generator().manual_seed(hashed_seed(f"label noise {operator.index(seed)}"))


def _describe_knob(value: Any) -> Any:
    """Return a keyword knob in a record: a plain value as it is, a dataset by name, an array by its hash."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (str, int, float, os.PathLike)):
        return value
    return value.name if hasattr(value, "train") else f"array-{_sha256(value)[:12]}"


def _replace_images(record: NoisyLabels, images: Any, source: Any) -> NoisyLabels:
    """Replace the images of an open_set record, in a copy."""
    if record.replaced is None or images is None:
        return record
    if isinstance(source, str):
        raise ValueError(f"The noise record takes images from {source!r}: pass load=... to noise.apply to get them.")
    source = inputs_of(source)
    if not (isinstance(images, Tensor) and isinstance(source, Tensor)):
        raise ValueError("open_set needs both datasets as tensors in memory; one of them decodes files.")
    if len(record.replaced) and int(record.replaced[:, 1].max()) >= len(source):
        raise ValueError(f"open_set takes image {int(record.replaced[:, 1].max())} of a source with {len(source)}.")
    kinds = [f"{list(x.shape[1:])} {x.dtype}" for x in (images, source)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"open_set needs images of one kind, got {kinds[0]} and {kinds[1]}.")
    return replace(record, images=images.index_copy(0, record.replaced[:, 0], source[record.replaced[:, 1]]))


def _sha256(*parts: Any) -> str:
    """Return the hash of strings and arrays, the same on every platform."""
    digest = hashlib.sha256()
    for part in parts:
        array = np.asarray(part.detach().cpu() if isinstance(part, Tensor) else part)
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes())
    return digest.hexdigest()


# -- files of noisy labels: which they are, how they are read, and whether they fit the data ---------------------------


def record_files(path: str | Path) -> tuple[Path, Path]:
    """Return the two files of a noise record: its arrays (.npz) and everything else (.json)."""
    stem = os.fspath(path).removesuffix(".npz").removesuffix(".json")
    return Path(f"{stem}.npz"), Path(f"{stem}.json")


def read_noise_file(path: str) -> Tensor | None:
    """Read the labels in a .json, .csv or .npy file.

    Args:
        path: The file.

    Returns:
        Labels int64 [N], soft labels float32 [N, K], or pairs int64 [M, 2] of replaced images; None for a record.

    Raises:
        ValueError: If the file is missing, or holds something else.
    """
    file = Path(os.path.expanduser(path))
    if file.suffix not in READERS or (file.suffix == ".json" and record_files(path)[0].is_file()):
        return None
    try:
        content = READERS[file.suffix](file)
        if content is None:
            return None
        numbers = torch.from_numpy(content)
    except FileNotFoundError as error:
        raise ValueError(f"There is no noise file {path}.") from error
    except Exception as error:  # not JSON, ragged lists, no numbers, a damaged array
        raise ValueError(f"{path} is not a noise file: {type(error).__name__}, {error}") from error
    pairs = numbers.ndim == 2 and not numbers.is_floating_point()
    if not numbers.ndim or numbers.ndim > 2 or (pairs and numbers.shape[1] != 2):
        raise ValueError(f"{path} must be a list of labels or of pairs, got the shape {list(numbers.shape)}.")
    if numbers.is_floating_point():
        sums = numbers.double().sum(1)
        if not bool((numbers >= 0).all() and ((sums - 1).abs() < 1e-3).all()):  # also refuses NaN
            raise ValueError(f"Each row of {path} must hold probabilities of the classes, which sum to 1.")
    return numbers


def _read_json(file: Path) -> np.ndarray | None:
    content = json.loads(files.read_bytes(file))
    return np.array(content).astype(np.int64, casting="safe") if isinstance(content, list) and content else None


def _read_csv(file: Path) -> np.ndarray:
    """Read one class number in each row, or a probability for each class; a first row that is no number is a header."""
    lines = io.StringIO(files.read_bytes(file).decode("utf-8-sig"), newline=None)
    first = lines.readline().split(",")[0]
    if not first:
        raise ValueError("the file is empty")
    try:
        float(first)
        skip = 0
    except ValueError:
        skip = 1
    lines.seek(0)
    rows = np.loadtxt(lines, delimiter=",", ndmin=2, skiprows=skip, dtype=np.float64)
    if rows.shape[1] > 1:
        return rows.astype(np.float32)
    if not (rows == np.floor(rows)).all():
        raise ValueError("a label must be a class number, an integer")
    return rows[:, 0].astype(np.int64)


def _read_npy(file: Path) -> np.ndarray:
    array = np.load(io.BytesIO(files.read_bytes(file)), allow_pickle=False)
    if array.ndim == 2 and array.dtype.kind == "f":
        return array.astype(np.float32)
    return array.astype(np.int64, casting="safe")


READERS = {".json": _read_json, ".csv": _read_csv, ".npy": _read_npy}


def check_agreement(path: str, labels: Tensor, clean: Tensor, num_classes: int) -> None:
    """Refuse labels that agree with the truth no more often than by chance."""
    labels = labels.argmax(1) if labels.ndim > 1 else labels
    counts = [values.bincount(minlength=num_classes) / len(values) for values in (labels, clean)]
    chance = float(counts[0] @ counts[1])
    agreement = float((labels == clean).double().mean())
    if not beats_chance(agreement, chance, len(clean), errors=3.0):
        raise ValueError(
            f"Only {agreement:.1%} of the labels in {path} are the true ones: it was made for other data, or for the "
            "same in another order."
        )


def check_pairs(path: str, pairs: Tensor, examples: int, source: str | None) -> Tensor:
    """Refuse pairs of replaced images that do not fit a dataset of `examples` images."""
    positions, images = pairs.unbind(1)
    if source is None:
        raise ValueError(f"{path} replaces images: name their dataset, as in file:path={path},source=cifar100.")
    if len(positions.unique()) < len(positions) or not 0 <= int(positions.min()) <= int(positions.max()) < examples:
        raise ValueError(f"The positions in {path} must be different and lie in 0..{examples - 1}.")
    if int(images.min()) < 0:
        raise ValueError(f"The image indices in {path} must not be negative, got {int(images.min())}.")
    return pairs
