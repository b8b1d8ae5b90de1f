"""Write the real sets of real_noise.toml and of the recipe `leaderboard` as tables, training and test rows apart.

    python benchmarks/real_noise.py FOLDER OUT [--cifar CIFAR]

FOLDER has labelme_crowd.npz and sentiment_crowd.csv (fmenat/PyLearningCrowds), trec.csv and agnews_rules.csv
(yueyu1030/COSINE) and hausa_news.csv (uds-lsv/transfer-distant-transformer-african); sets that are not there are left
out. CIFAR has cifar-10-batches-bin and CIFAR-10_human.npz: the first images become features of EfficientNet-Lite0, with
the labels `worst` of CIFAR-10N. Training rows have given and true labels, test rows true ones.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

ENCODER = Path(__file__).with_name("efficientnet_lite0.py")
IMAGES = {"train": 5000, "test": 2000}


def write_labelme(file: Path, out: Path) -> None:
    """Write the features of the photographs with one answer of the crowd each."""
    with np.load(file) as arrays:
        for part, given in (("train", "one_answer_train"), ("test", "true_test")):
            features = pd.DataFrame(arrays[f"x_{part}"]).add_prefix("x")
            frame = features.assign(label=arrays[given], true_label=arrays[f"true_{part}"])
            frame.to_csv(out / f"labelme_{part}.csv", index=False)


def write_texts(file: Path, out: Path) -> None:
    """Write the training and test rows of a table of texts."""
    rows = pd.read_csv(file, dtype=str, keep_default_na=False)
    for part in ("train", "test"):
        rows[rows["split"] == part].drop(columns="split").to_csv(out / f"{file.stem}_{part}.csv", index=False)


def write_cifar(root: Path, out: Path) -> None:
    """Write features of CIFAR-10 images, with the labels of CIFAR-10N."""
    from logitclip import RunConfig, data
    from logitclip.runs.encoding import encode_inputs
    from logitclip.runs.plugins import load_plugins

    load_plugins((str(ENCODER),))
    config = RunConfig(encoder="efficientnet_lite0", plugin=(str(ENCODER),)).resolve()
    dataset = data.load("cifar10:human=true", root)
    for part, split in (("train", dataset.train), ("test", dataset.test)):
        rows = slice(IMAGES[part])
        true = split.labels[rows].numpy()
        given = dataset.label_sets["worse_label"][rows].numpy() if part == "train" else true
        features = encode_inputs(config, split.x)[rows].numpy()  # type: ignore[arg-type]
        np.savez(out / f"cifar10n_{part}.npz", x=features, label=given, true_label=true)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cifar", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if (file := options.folder / "labelme_crowd.npz").is_file():
        write_labelme(file, options.out)
    for name in ("sentiment_crowd", "trec", "hausa_news", "agnews_rules"):
        if (file := options.folder / f"{name}.csv").is_file():
            write_texts(file, options.out)
    if options.cifar is not None:
        write_cifar(options.cifar, options.out)


if __name__ == "__main__":
    main()
