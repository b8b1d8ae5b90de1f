"""The rival of the clip on features: logistic regression, its C chosen on noisy labels; results/features_logistic.csv.

    python benchmarks/features_logistic.py --root DATA

The data, the features and the noise are those of `benchmarks/features.toml:worst`. A tenth of the noisy labels chooses
C; then all rows are fitted. Test accuracy is on true labels.
"""

from __future__ import annotations

import argparse
import csv
import time
import tomllib
from pathlib import Path

import numpy as np
from sklearn.linear_model import LogisticRegression

import logitclip as lc
from logitclip.data._loading import hold_out
from logitclip.rng import stream as random_stream
from logitclip.runs.train import prepare

HERE = Path(__file__).parent
OUT = HERE.parent / "results" / "features_logistic.csv"
STRENGTHS = (1e-5, 1e-4, 1e-3, 1e-2)
HELD_OUT = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="folder with CIFAR-10 and CIFAR-10N")
    parser.add_argument("--noise", default="real:set=worst")
    options = parser.parse_args()
    base = tomllib.loads((HERE / "features.toml").read_text(encoding="utf-8"))["base"]
    plugin = tuple(str(HERE.parent / path) for path in base.pop("plugin"))
    config = lc.RunConfig(**base, plugin=plugin, noise=options.noise, root=options.root)
    dataset, _ = prepare(config.resolve())
    assert dataset.train.clean_labels is not None
    mean, std = (np.array(values, np.float32) for values in (dataset.mean, dataset.std))
    x, test = ((np.asarray(split.x) - mean) / std for split in (dataset.train, dataset.test))
    y, true = dataset.train.labels.numpy(), dataset.test.labels.numpy()
    part = hold_out(len(y), HELD_OUT, generator=random_stream("cpu", 0, "logistic"))
    inside, outside = part.train.numpy(), part.val.numpy()
    with OUT.open("w", encoding="utf-8", newline="") as stream:
        table = csv.writer(stream, lineterminator="\n")
        table.writerow(["noise", "C", "rows", "noisy_validation", "test_accuracy", "memorised", "chosen", "seconds"])
        scores = {}
        for strength in STRENGTHS:
            model, seconds = _fit(x[inside], y[inside], strength)
            scores[strength] = model.score(x[outside], y[outside])
            row = [options.noise, strength, len(inside), f"{100 * scores[strength]:.2f}"]
            table.writerow([*row, f"{100 * model.score(test, true):.2f}", "", "", f"{seconds:.0f}"])
            stream.flush()
        best = max(scores, key=lambda strength: scores[strength])
        model, seconds = _fit(x, y, best)
        wrong = y != dataset.train.clean_labels.numpy()
        memorised = f"{100 * (model.predict(x)[wrong] == y[wrong]).mean():.2f}"
        accuracy = f"{100 * model.score(test, true):.2f}"
        table.writerow([options.noise, best, len(y), "", accuracy, memorised, "yes", f"{seconds:.0f}"])


def _fit(x: np.ndarray, y: np.ndarray, strength: float) -> tuple[LogisticRegression, float]:
    started = time.perf_counter()
    return LogisticRegression(C=strength, max_iter=300).fit(x, y), time.perf_counter() - started


if __name__ == "__main__":
    main()
