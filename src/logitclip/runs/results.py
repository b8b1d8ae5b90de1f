"""The outcome of a run: its result or its failure, written to its folder and read back.

A run in progress has `config.json`, `noise.json` (the noise record), `metrics.jsonl` and `checkpoints/`. A finished run
has `weights.safetensors` and `result.json` in place of the checkpoints, `validation.npz` if examples were held out, and
`examples.npz` and `test.npz` if asked for. `result.json` names its run and has the digest of every other file, and one
of itself, so a result that is incomplete, changed or of another run is never used.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import hashlib
import io
import json
import logging
import math
import typing
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from logitclip import files
from logitclip.files import Json
from logitclip.runs import claims
from logitclip.runs.checkpoints import CHECKPOINTS, as_safetensors, remove_temporary_files
from logitclip.runs.config import UNCOUNTED, RunConfig, check_type
from logitclip.text import first_line, guard_formula

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

LAST = 10  # epochs over which the reported accuracy is averaged
CONFIG, NOISE, METRICS = "config.json", "noise.json", "metrics.jsonl"
RESULT, FAILURE, WEIGHTS = "result.json", "failure.json", "weights.safetensors"
VALIDATION, EXAMPLES, TEST = "validation.npz", "examples.npz", "test.npz"
ROW: Json = {  # a row of `metrics.jsonl`
    "epoch": int,
    "lr": float,
    "loss": float,
    **dict.fromkeys(("train_accuracy", "test_accuracy", "val_accuracy"), float | None),
    **dict.fromkeys(("memorised", "recovered", "clipped"), float | None),
    "norm_quantiles": tuple[float, ...] | None,
}


@dataclass(frozen=True)
class Result:
    """The result of a finished run; accuracies and shares are percentages. `train` returns it.

    Attributes:
        id: The id of the run, which names its folder.
        config: The resolved `RunConfig` as a dict.
        last10_accuracy: Test accuracy, mean of the last 10 epochs.
        best_accuracy: Test accuracy of the best epoch, chosen on the test set.
        val_accuracy: Accuracy on held-out noisy labels, mean of the last 10 epochs; None if none are held out.
        memorised: Share of the wrong labels that the final model predicts as given; None if there are none.
        recovered: Share of the wrong labels for which the final model predicts the true class.
        noise_rate: Realised share of wrong training labels.
        clip: The clip, in canonical form: without knobs that have their default.
        epochs: Number of epochs.
        seconds: Training time.
        versions: Versions of Python and the libraries, by name.
        device: Name of the device.
        commit: The git commit of the code, if known.

    >>> import tempfile
    >>> import logitclip as lc
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = lc.train(lc.RunConfig(noise="symmetric:rate=0.5", epochs=2, runs=folder))
    ...     rows = result.rows
    >>> result.epochs, result.noise_rate, len(rows)
    (2, 50.0, 2)
    """

    id: str
    config: Json
    last10_accuracy: float
    best_accuracy: float
    val_accuracy: float | None
    memorised: float | None
    recovered: float | None
    noise_rate: float
    clip: str
    epochs: int
    seconds: float
    versions: dict[str, str]
    device: str
    commit: str | None

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return Path(self.config["runs"]) / self.id

    @property
    def rows(self) -> list[Json]:
        """The rows of `metrics.jsonl`, one for each epoch."""
        with self._explain_damage(METRICS):
            rows = [_as_fields(ROW, json.loads(line)) for line in self._read_unchanged(METRICS).splitlines()]
            if len(rows) != self.epochs:
                raise ValueError(f"it has {len(rows)} rows, not {self.epochs}")
            return rows

    @property
    def noise(self) -> Json:
        """The noise record: rule, seed, realised rate, transition matrix, and the classes by name and size."""
        with self._explain_damage(NOISE):
            record = json.loads(self._read_unchanged(NOISE))
            check_type("num_classes", int, record["num_classes"])
            names = check_type("class_names", tuple[str, ...], record["class_names"])
            matrix, classes = record["transition"], record["num_classes"]
            if len(names) != classes:
                raise ValueError("it does not name every class")
            if matrix is not None and np.array(matrix, dtype=float).shape != (classes, classes):
                raise ValueError("its transition matrix is not one number for each pair of classes")
            return record

    @property
    def validation(self) -> dict[str, np.ndarray]:
        """The `index`, `label` and `prediction` (after the last epoch) of each held-out example of a run with `val`."""
        return self._arrays(VALIDATION, "index", "label", "prediction")

    @property
    def examples(self) -> dict[str, np.ndarray]:
        """What a run with `per_example` knows of each training example, among it `mean_margin` and `prediction`."""
        return self._arrays(EXAMPLES, "loss", "margin", "mean_margin", "prediction", "other", "first_learnt", "label")

    @property
    def test_predictions(self) -> dict[str, np.ndarray]:
        """The `label`, `prediction` and `confidence`, its softmax probability, of each test example."""
        return self._arrays(TEST, "label", "prediction", "confidence")

    def weights(self) -> dict[str, Tensor]:
        """Return the trained weights, as tensors by name."""
        from safetensors.torch import load

        with self._explain_damage(WEIGHTS):
            return load(self._read_unchanged(WEIGHTS))

    def _arrays(self, file: str, *names: str) -> dict[str, np.ndarray]:
        """Return the arrays of an .npz file, among them those with these names, all of one length."""
        with self._explain_damage(file), np.load(io.BytesIO(self._read_unchanged(file)), allow_pickle=False) as content:
            arrays = {name: content[name] for name in content.files}
            missing = [name for name in names if name not in arrays]
            if missing:
                raise ValueError(f"it has no {missing[0]}")
            if any(array.dtype.kind not in "iuf" for array in arrays.values()):
                raise ValueError("its arrays must hold numbers")
            if len({len(array) for array in arrays.values()}) > 1:
                raise ValueError("its arrays differ in length")
            return arrays

    @contextlib.contextmanager
    def _explain_damage(self, name: str) -> Iterator[None]:
        """Raise whatever a damaged or crafted file makes its reader raise as `Damaged`."""
        try:
            yield
        except Damaged:
            raise
        except Exception as error:
            raise damage_error(self.folder, f"{name} cannot be read ({first_line(error)})") from error

    def _read_unchanged(self, name: str) -> bytes:
        """Return the content of a file that belongs to the result, if it is unchanged."""
        digests = (files.read_json(self.folder / RESULT) or {}).get("sha256", {})
        try:
            content = files.read_bytes(self.folder / name)
        except OSError as error:
            raise damage_error(self.folder, f"{name} is missing") from error
        if hashlib.sha256(content).hexdigest() != digests.get(name):
            raise damage_error(self.folder, f"{name} has been changed")
        return content


@dataclass(frozen=True)
class Failure:
    """A run that failed, as `failure.json` in its folder records it."""

    id: str
    error: str  # one sentence
    traceback: str
    attempts: int  # over all sweeps
    final: bool  # it would fail again (it diverged): do not retry


class Failed(ValueError):
    """A run that is needed has failed, or all runs of a search have."""


class Damaged(ValueError):
    """A result whose files are missing or changed, or that belongs to another run."""


def damage_error(folder: Path, reason: str) -> Damaged:
    """Return the error about the result in a folder."""
    return Damaged(f"The result in {folder} is not used: {reason}. Repeat the command to train it again.")


def finish(folder: Path, result: Result, weights: dict[str, Tensor]) -> None:
    """Write the weights and the result, with the digests of all files that belong to it, and remove the checkpoints."""
    files.replace(folder / WEIGHTS, as_safetensors(weights))
    names = (METRICS, NOISE, WEIGHTS, VALIDATION, EXAMPLES, TEST)
    digests = {name: files.sha256(folder / name) for name in names if (folder / name).exists()}
    content = {**asdict(result), "sha256": digests}
    files.write_json(folder / RESULT, {**content, "digest": files.object_digest(content)})
    tidy_finished(folder, result)


def tidy_finished(folder: Path, result: Result) -> None:
    """Remove what a finished run does not need, and add the run to the index unless it is there."""
    try:
        files.remove(folder / CHECKPOINTS)
    except OSError as error:
        log.warning("Cannot remove %s: %s", folder / CHECKPOINTS, error)
    remove_temporary_files(folder)
    _add_to_index(result, folder)


def _tidy_after_death(folder: Path, result: Result) -> None:
    """Do what a process that was killed after it had written the result left undone.

    It left its claim, which goes last; without a claim there is nothing to mend.
    """
    if not (folder / claims.CLAIM).exists() or folder.is_symlink() or claims.describe_owner(folder):
        return
    with contextlib.suppress(OSError, claims.Claimed), claims.claim(folder):
        try:
            tidy_finished(folder, result)
        except (KeyboardInterrupt, SystemExit):  # the claim, which says that there is something to mend, goes now
            tidy_finished(folder, result)
            raise


INDEX = "index.csv"  # of a folder of runs: a line for each finished run
INDEX_LOCK = ".index.lock"  # held while a line is added
OPTIONS = tuple(field.name for field in fields(RunConfig) if field.name not in UNCOUNTED)
NUMBERS = (
    *("last10_accuracy", "best_accuracy", "val_accuracy", "memorised", "recovered", "noise_rate", "seconds"),
    *("device", "commit"),
)
COLUMNS = ("id", "status", *OPTIONS, *NUMBERS)


def can_write_index(index: Path) -> bool:
    """Return whether `index` is missing or an index of runs; another file of its name is left alone, with a warning."""
    files.clear_place(index)
    start = csv_line(COLUMNS[:2]).strip().encode()
    if not index.exists() or start.startswith(files.read_bytes(index)[: len(start)]):
        return True
    log.warning("%s is not an index of runs: it is left as it is, and the runs are not listed in it.", index)
    return False


def _add_to_index(result: Result, folder: Path) -> None:
    """Add a line for a finished run to the index of all runs."""
    index = folder.parent / INDEX
    values = {"id": result.id, "status": "done", **result.config, **vars(result)}
    try:
        with files.lock(folder.parent / INDEX_LOCK, claims.LOCK_TIMEOUT):
            if not can_write_index(index):
                return
            before = files.read_bytes(index) if index.exists() else b""
            whole = before[: before.rfind(b"\n") + 1] or csv_line(COLUMNS).encode()  # a crash may have cut a line
            if whole != before:
                files.replace(index, whole)
            if not any(line.startswith(f"{result.id},".encode()) for line in whole.splitlines()):
                files.append(index, csv_line(values.get(name) for name in COLUMNS).encode())  # safe without a lock, too
    except OSError as error:
        log.warning("Cannot add the run %s to %s: %s", result.id, index, error)


def csv_line(values: Iterable[object]) -> str:
    """Return one line of CSV; lists as 0.4,0.7, and a quote before text that a spreadsheet would read as a formula."""
    texts = [",".join(map(str, value)) if isinstance(value, list | tuple) else value for value in values]
    texts = [guard_formula(text) if isinstance(text, str) else text for text in texts]
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(texts)
    return line.getvalue()


def find_outcome(config: RunConfig) -> Result | Failure | None:
    """Read the outcome of a run from its folder: a result, else a failure, else None."""
    return read_outcome(Path(config.runs) / config.id)


def read_outcome(folder: Path) -> Result | Failure | None:
    """Read the outcome in the folder of a run. A damaged result is logged and counts as a failure."""
    try:
        result = _read_intact_result(folder)
    except Damaged as error:
        log.warning("%s", error)
        return Failure(id=folder.name, error=str(error), traceback="", attempts=0, final=False)
    if result is not None:
        _tidy_after_death(folder, result)
        return result
    content = files.read_json(folder / FAILURE)
    try:
        return None if content is None else Failure(**_as_fields(typing.get_type_hints(Failure), content))
    except (TypeError, ValueError) as error:
        log.warning("%s is ignored: %s", folder / FAILURE, error)
        return None


def read_result(folder: Path) -> Result | None:
    """Read the result of a finished run; None if there is none, or if it is damaged, which is logged."""
    found = read_outcome(folder)
    return found if isinstance(found, Result) else None


def _read_intact_result(folder: Path) -> Result | None:
    """Return the result in a folder; None if there is none.

    Raises:
        Damaged: It is incomplete or changed, or belongs to another run.
    """
    if not (folder / RESULT).exists():
        return None
    content = files.read_json(folder / RESULT)
    try:
        if not isinstance(content, dict):
            raise TypeError(f"it must be a JSON object, got {type(content).__name__}")
        signed, right = content.pop("digest", None), files.object_digest(content)
        digests = content.pop("sha256", None)
        result = Result(**_as_fields(typing.get_type_hints(Result), content))
        RunConfig(**result.config)
        if not isinstance(digests, dict) or not {METRICS, NOISE, WEIGHTS} <= digests.keys():
            raise ValueError("it has no digests")
    except (TypeError, ValueError) as error:
        raise damage_error(folder, f"{RESULT} cannot be read ({error})") from error
    if result.id != folder.name:
        raise damage_error(folder, f"{RESULT} belongs to the run {result.id}")
    if signed is None:
        _warn_of_older_results(folder.parent)
    elif signed != right:
        raise damage_error(folder, f"{RESULT} has been changed")
    for name, digest in digests.items():
        file = folder / Path(name).name
        if not file.is_file():
            raise damage_error(folder, f"{name} is missing")
        if name != WEIGHTS and files.sha256(file) != digest:  # weights are large: they are checked when they are read
            raise damage_error(folder, f"{name} has been changed")
    result.config["runs"] = str(folder.parent)  # folders may be moved
    return result


@functools.cache
def _warn_of_older_results(folder: Path) -> None:
    log.warning("Results in %s are of an older version, without a digest: changed numbers are not noticed.", folder)


def write_config(folder: Path, config: RunConfig) -> None:
    """Write `config.json` with its digest."""
    options = asdict(config)
    files.write_json(folder / CONFIG, {**options, "digest": files.object_digest(options)})


def record_failure(
    folder: Path, config: RunConfig, error: str, trace: str = "", *, attempts: int = 1, final: bool = False
) -> Failure:
    """Write `failure.json`, counting earlier attempts, and return the failure. Nothing is written through a link.

    If the run failed before its folder had a `config.json`, that is written too.
    """
    before = read_outcome(folder)
    earlier = before.attempts if isinstance(before, Failure) else 0
    failure = Failure(folder.name, error, trace, earlier + attempts, final)
    if folder.is_symlink():
        return failure
    try:
        if not (folder / CONFIG).is_file():
            with contextlib.suppress(Exception):  # it may be why the run failed
                config = config.resolve()
            write_config(folder, config)
        files.write_json(folder / FAILURE, asdict(failure))
    except files.CannotWrite as problem:  # only the caller is told
        log.warning("%s", problem)
    return failure


def _as_fields(hints: Json, content: object) -> Json:
    """Return a JSON object if its fields in `hints` are there and have these types; numbers must be finite."""
    if not isinstance(content, dict):
        raise TypeError(f"it must be a JSON object, got {type(content).__name__}")
    for name, hint in hints.items():
        if name not in content:
            raise ValueError(f"it has no {name}")
        value = check_type(name, hint, content[name])
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise ValueError(f"{name} must be finite, got {number}.")
    return content
