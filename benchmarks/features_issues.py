"""Wrong labels found among the 50,000 of CIFAR-10N's `worst`, by us and by cleanlab; results/features_issues.csv.

    python benchmarks/features_issues.py --root DATA

The features and the settings of the heads are those of `benchmarks/features.toml:worst`, the temp of each clip is the
one that `auto` chose there on noisy labels (results/features_worst.csv), and seed 0 is used throughout. Rankings are
compared with the true labels: AUROC, average precision, F1 at the best of all thresholds, which only the true labels
show, and F1 of the labels that a tool marks by itself. Minutes are those of one core, without encoding. A ranking that
is in the file is not computed again.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
import time
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from encoder_fit import share_features, write_photos

import logitclip as lc
from logitclip.data._images import ImageFiles
from logitclip.data.augment import transform
from logitclip.runs.train import _commit, prepare, settings_of, versions

HERE = Path(__file__).parent
OUT = HERE.parent / "results" / "features_issues.csv"
LINEAR, MLP = ("mlp:depth=0", 1.5), ("mlp:width=256,depth=1", 2.24)  # and the temp that auto chose
FOLDS = 5
C = 1e-4  # chosen on noisy labels, see results/features_logistic.csv
COLUMNS: tuple[str, ...] = (
    "ranking",
    "auroc",
    "average_precision",
    "best_f1",
    "marked_f1",
    "marked",
    "minutes",
    "commit",
    "torch",
)


class Labels:
    """The features with their given labels, and which of these are wrong."""

    def __init__(self, root: str) -> None:
        base = tomllib.loads((HERE / "features.toml").read_text(encoding="utf-8"))["base"]
        plugin = tuple(str(HERE.parent / path) for path in base.pop("plugin"))
        config = lc.RunConfig(**base, plugin=plugin, noise="real:set=worst", root=root, per_example=True).resolve()
        self.root = root
        self.dataset, _ = prepare(config)
        self.settings = settings_of(config)
        train = self.dataset.train
        assert isinstance(train.x, torch.Tensor)
        assert train.clean_labels is not None
        self.x, self.y = train.x, train.labels.numpy()
        self.wrong = self.y != train.clean_labels.numpy()
        self.view = transform("none", self.dataset.mean, self.dataset.std)

    def folds(self) -> Any:
        from sklearn.model_selection import StratifiedKFold

        return StratifiedKFold(FOLDS, shuffle=True, random_state=0)

    def train(self, head: str, criterion: torch.nn.Module, **options: Any) -> Any:
        build = partial(lc.models.build, head, self.dataset.num_classes, tuple(self.x.shape[1:]))
        network = build(seed=self.settings.seed)
        return lc.engine.fit(self.dataset, network, criterion, settings=self.settings, **options)


Ranking = tuple[np.ndarray, np.ndarray | None]  # a score for each label, high if suspicious; which are marked


def mean_margin(labels: Labels, head: str, temp: float | None) -> Ranking:
    """Rank by the mean over the epochs of the margin of the given label. Without a clip this is AUM."""
    last: list[Any] = []
    criterion = lc.Loss("ce") if temp is None else lc.LogitClip("ce", temp=temp)
    labels.train(head, criterion, after_epoch=lambda progress: last.append(progress.examples["mean_margin"]))
    return -last[-1].numpy(), None


def out_of_fold(labels: Labels, head: str, temp: float) -> Ranking:
    """Rank by the probability of the given label, by a head that has not seen it."""
    confidence = np.zeros(len(labels.y))
    for inside, outside in labels.folds().split(labels.y, labels.y):
        trained = labels.train(head, lc.LogitClip("ce", temp=temp), index=torch.from_numpy(inside))
        with torch.no_grad():
            logits = trained.predict(labels.view(labels.x[torch.from_numpy(outside)], None))
        confidence[outside] = logits.softmax(1).numpy()[np.arange(len(outside)), labels.y[outside]]
    return -confidence, None


def cleanlab_ranking(labels: Labels, strength: float) -> Ranking:
    """Rank and mark by cleanlab, from the probabilities of a logistic regression out of fold."""
    from cleanlab.filter import find_label_issues
    from cleanlab.rank import get_label_quality_scores
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import cross_val_predict

    learner = LogisticRegression(C=strength, max_iter=300)
    x = labels.view(labels.x, None).numpy()
    found: Any = cross_val_predict(learner, x, labels.y, cv=labels.folds(), method="predict_proba")
    return -get_label_quality_scores(labels.y, found), find_label_issues(labels.y, found, n_jobs=1)


def issues(labels: Labels, **options: Any) -> Ranking:
    """Rank and mark as `logitclip issues` does with a table of photos and the encoder."""
    with tempfile.TemporaryDirectory() as folder:
        images = lc.data.load("cifar10", labels.root).train.x
        names = write_photos(Path(folder), "train", images, len(labels.y))
        share_features(ImageFiles(Path(folder), names), images)
        path = Path(folder, "labels.csv")
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([("file", "label"), *zip(names, labels.y.tolist(), strict=True)])
        found = lc.find_issues(path, "label", out=Path(folder, "issues"), encoder="efficientnet_lite0", **options)
    at = found["row"].map({name: i for i, name in enumerate(names)}.get).to_numpy()
    scores, marked = np.full(len(labels.y), -1.0), np.zeros(len(labels.y), bool)
    scores[at], marked[at] = found["score"], found["wrong"]
    return scores, marked


RANKINGS: dict[str, Callable[[Labels], Ranking]] = {
    "linear head, CE: mean margin (AUM)": partial(mean_margin, head=LINEAR[0], temp=None),
    "linear head, clipped: mean margin": partial(mean_margin, head=LINEAR[0], temp=LINEAR[1]),
    "MLP head, CE: mean margin (AUM)": partial(mean_margin, head=MLP[0], temp=None),
    "MLP head, clipped: mean margin": partial(mean_margin, head=MLP[0], temp=MLP[1]),
    "linear head, clipped: out of fold": partial(out_of_fold, head=LINEAR[0], temp=LINEAR[1]),
    "cleanlab, logistic regression with chosen C": partial(cleanlab_ranking, strength=C),
    "cleanlab, logistic regression with C=1": partial(cleanlab_ranking, strength=1.0),
    "logitclip issues --fast": partial(issues, fast=True),
    "logitclip issues": issues,
}


def measure(wrong: np.ndarray, scores: np.ndarray, marked: np.ndarray | None) -> dict[str, Any]:
    """Compare a ranking and its marks with which labels are wrong."""
    from sklearn.metrics import average_precision_score, f1_score, precision_recall_curve, roc_auc_score

    precision, recall, _ = precision_recall_curve(wrong, scores)
    shares = {
        "auroc": roc_auc_score(wrong, scores),
        "average_precision": average_precision_score(wrong, scores),
        "best_f1": (2 * precision * recall / np.maximum(precision + recall, 1e-12)).max(),
    }
    if marked is not None:
        shares |= {"marked_f1": f1_score(wrong, marked), "marked": marked.mean()}
    return {name: f"{100 * share:.2f}" for name, share in shares.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="folder with CIFAR-10 and CIFAR-10N")
    parser.add_argument("--rankings", nargs="+", default=list(RANKINGS), choices=RANKINGS, metavar="RANKING")
    options = parser.parse_args()
    torch.set_num_threads(1)
    labels = Labels(options.root)
    made_by = {"commit": (_commit() or "")[:12], "torch": versions()["torch"]}
    known = OUT.read_text(encoding="utf-8").splitlines() if OUT.exists() else []
    done = {row["ranking"] for row in csv.DictReader(known)}
    with OUT.open("a", encoding="utf-8", newline="") as stream:
        table = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
        if not known:
            table.writeheader()
        for name in options.rankings:
            if name not in done:
                started = time.process_time()
                scores, marked = RANKINGS[name](labels)
                minutes = f"{(time.process_time() - started) / 60:.1f}"
                row = {"ranking": name, **measure(labels.wrong, scores, marked), "minutes": minutes, **made_by}
                table.writerow(row)
                stream.flush()
                print(row, flush=True)


if __name__ == "__main__":
    main()
