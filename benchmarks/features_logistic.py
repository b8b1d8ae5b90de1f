"""The rival of the clip on features: logistic regression, its C chosen on noisy labels; results/features_logistic.csv.

    python benchmarks/features_logistic.py --root DATA [--scale worst]

The data, the features and the noises are those of `benchmarks/features.toml` at the scale. A tenth of the noisy labels
chooses C; then all rows are fitted. Test accuracy is on true labels. A noise that is in the file is not measured again.
"""

from __future__ import annotations

import argparse
import csv
import time
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression

from logitclip.data._loading import hold_out
from logitclip.rng import stream as random_stream
from logitclip.runs.config import RunConfig
from logitclip.runs.train import prepare
from logitclip.studies.recipe import load_recipe

HERE = Path(__file__).parent
OUT = HERE.parent / "results" / "features_logistic.csv"
COLUMNS: tuple[str, ...] = (
    "data",
    "noise",
    "C",
    "rows",
    "noisy_validation",
    "test_accuracy",
    "memorised",
    "chosen",
    "seconds",
)
STRENGTHS = (1e-5, 1e-4, 1e-3, 1e-2)
HELD_OUT = 0.1


def measure(config: RunConfig) -> list[dict[str, Any]]:
    """Return a row for each C, fitted without the held-out labels, and one for the best, fitted on all."""
    dataset, _ = prepare(config.resolve())
    assert dataset.train.clean_labels is not None
    mean, std = (np.array(values, np.float32) for values in (dataset.mean, dataset.std))
    x, test = ((np.asarray(split.x) - mean) / std for split in (dataset.train, dataset.test))
    y, true = dataset.train.labels.numpy(), dataset.test.labels.numpy()
    part = hold_out(len(y), HELD_OUT, generator=random_stream("cpu", 0, "logistic"))
    inside, outside = part.train.numpy(), part.val.numpy()
    rows = []

    def fit(strength: float, index: np.ndarray) -> LogisticRegression:
        started = time.process_time()
        model = LogisticRegression(C=strength, max_iter=300).fit(x[index], y[index])
        seconds = time.process_time() - started
        rows.append({"data": config.data, "noise": config.noise, "C": strength, "rows": len(index)})
        rows[-1] |= {"test_accuracy": f"{100 * model.score(test, true):.2f}", "seconds": f"{seconds:.0f}"}
        return model

    scores = {}
    for strength in STRENGTHS:
        scores[strength] = fit(strength, inside).score(x[outside], y[outside])
        rows[-1]["noisy_validation"] = f"{100 * scores[strength]:.2f}"
    model = fit(max(scores, key=lambda strength: scores[strength]), np.arange(len(y)))
    wrong = y != dataset.train.clean_labels.numpy()
    rows[-1] |= {"memorised": f"{100 * (model.predict(x)[wrong] == y[wrong]).mean():.2f}", "chosen": "yes"}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="folder with CIFAR-10 and CIFAR-10N")
    parser.add_argument("--scale", default="full")
    options = parser.parse_args()
    plugin = [str(HERE / "efficientnet_lite0.py")]
    recipe = load_recipe(str(HERE / "features.toml"), options.scale, root=options.root, plugin=plugin)
    with OUT.open(encoding="utf-8", newline="") as stream:
        done = {(row["data"], row["noise"]) for row in csv.DictReader(stream)}
    configs = (cell.config for cell in recipe.cells if cell.config.clip == "none")
    for (data, noise), config in {(config.data, config.noise): config for config in configs}.items():
        if (data, noise) not in done:
            rows = measure(config)
            with OUT.open("a", encoding="utf-8", newline="") as stream:
                csv.DictWriter(stream, COLUMNS, lineterminator="\n").writerows(rows)
            print(data, noise, rows[-1]["test_accuracy"], flush=True)


if __name__ == "__main__":
    main()
