"""Write the tables of real_noise.toml: training rows with given and true labels, test rows with true labels.

    python benchmarks/real_noise.py FOLDER OUT

FOLDER has labelme_crowd.npz (fmenat/PyLearningCrowds), trec.csv (yueyu1030/COSINE) and hausa_news.csv
(uds-lsv/transfer-distant-transformer-african).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with np.load(options.folder / "labelme_crowd.npz") as file:
        for part, given in (("train", "one_answer_train"), ("test", "true_test")):
            features = pd.DataFrame(file[f"x_{part}"]).add_prefix("x")
            frame = features.assign(label=file[given], true_label=file[f"true_{part}"])
            frame.to_csv(options.out / f"labelme_{part}.csv", index=False)
    for name in ("trec", "hausa_news"):
        rows = pd.read_csv(options.folder / f"{name}.csv", dtype=str, keep_default_na=False)
        for part in ("train", "test"):
            frame = rows[rows["split"] == part].drop(columns="split")
            frame.to_csv(options.out / f"{name}_{part}.csv", index=False)


if __name__ == "__main__":
    main()
