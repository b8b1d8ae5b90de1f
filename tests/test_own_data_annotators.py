"""Fusing the answers of annotators: a plain form of Dawid and Skene as the oracle, simulated annotators, intervals."""

import importlib.util

import numpy as np
import pytest

from logitclip.own_data import annotators as module
from logitclip.own_data.annotators import dawid_skene, from_columns, from_table, fuse_with_features, reliability


def simulated(items: int = 400, people: int = 8, each: int = 3, seed: int = 0, skill: np.ndarray | None = None):
    """Answers of annotators with known accuracies, the true classes, and features that follow them."""
    rng = np.random.default_rng(seed)
    true = rng.integers(0, 3, items)
    skill = np.linspace(0.35, 0.95, people) if skill is None else skill
    item = np.repeat(np.arange(items), each)
    who = np.concatenate([rng.permutation(people)[:each] for _ in range(items)])
    wrong = (true[item] + rng.integers(1, 3, len(item))) % 3
    answer = np.where(rng.random(len(item)) < skill[who], true[item], wrong)
    answers = from_table([str(i) for i in item], [f"p{w}" for w in who], [f"c{k}" for k in answer])
    features = np.eye(3)[true] * 2 + rng.normal(size=(items, 3))
    return answers, true, features, dict(zip([f"p{w}" for w in range(people)], skill, strict=True))


def test_em_agrees_with_a_plain_form() -> None:
    """The same model with loops instead of arrays."""
    answers, _, _, _ = simulated(60)
    n, r, k = len(answers.items), len(answers.annotators), 3
    current = (answers.votes + 0.1) / (answers.votes + 0.1).sum(1, keepdims=True)
    for _ in range(module.EM_STEPS):
        prior = [(current[:, c].sum() + 1) / (n + k) for c in range(k)]
        counts = np.zeros((r, k, k))
        for i, who, answer in zip(answers.item, answers.annotator, answers.answer, strict=True):
            for c in range(k):
                counts[who, c, answer] += current[i, c]
        shared = counts.sum(0) + np.eye(k) + 0.1
        shared = shared / shared.sum(1)[:, None]
        confusion = counts + module.PSEUDO * k * shared
        confusion = confusion / confusion.sum(2)[:, :, None]
        current = np.tile(prior, (n, 1))
        for i, who, answer in zip(answers.item, answers.annotator, answers.answer, strict=True):
            current[i] *= confusion[who, :, answer]
        current /= current.sum(1)[:, None]
    found = dawid_skene(answers)
    assert found.probabilities == pytest.approx(current, abs=1e-4)
    assert found.confusion.sum(2) == pytest.approx(np.ones((r, k)))


def test_it_beats_the_majority_and_features_help() -> None:
    answers, true, features, _ = simulated(600)
    majority = (answers.votes.argmax(1) == true).mean()
    fused = (dawid_skene(answers).probabilities.argmax(1) == true).mean()
    seen = (fuse_with_features(answers, features).probabilities.argmax(1) == true).mean()
    assert fused > majority + 0.03
    assert seen > fused + 0.01


def test_crowd_kit_agrees() -> None:
    """Another implementation finds the same classes; it has no prior, so that a few items may differ."""
    if importlib.util.find_spec("crowdkit") is None:
        pytest.skip("needs crowd-kit: pip install crowd-kit")
    import pandas as pd
    from crowdkit.aggregation import DawidSkene

    answers, _, _, _ = simulated(400)
    frame = pd.DataFrame(
        {
            "task": np.array(answers.items)[answers.item],
            "worker": np.array(answers.annotators)[answers.annotator],
            "label": np.array(answers.class_names)[answers.answer],
        }
    )
    theirs = DawidSkene(n_iter=100).fit_predict(frame)
    ours = np.array(answers.class_names)[dawid_skene(answers).probabilities.argmax(1)]
    assert np.mean([theirs[item] == label for item, label in zip(answers.items, ours, strict=True)]) > 0.97


def test_intervals_of_reliability_hold() -> None:
    inside = []
    for seed in range(6):
        answers, _, _, skill = simulated(300, each=4, seed=seed)
        rows = reliability(answers, dawid_skene(answers))
        assert [row["accuracy"] for row in rows] == sorted((row["accuracy"] for row in rows), reverse=True)
        assert sum(row["answers"] for row in rows) == 1200
        inside += [row["low"] <= skill[row["annotator"]] <= row["high"] for row in rows]
    assert np.mean(inside) >= 0.88  # of 48


def test_columns_and_rows_are_the_same_answers() -> None:
    columns = from_columns({"a": ["x", "y", None], "b": [None, "y", "x"]})
    table = from_table(["1", "2", "2", "3"], ["a", "a", "b", "b"], ["x", "y", "y", "x"])
    assert columns.votes.tolist() == table.votes.tolist() == [[1, 0], [0, 2], [1, 0]]
    some = from_columns({"a": ["x", None, "y"], "b": ["x", None, None]})
    assert (some.items, some.votes.tolist()) == (["1", "3"], [[2, 0], [0, 1]])  # nobody was asked about row 2
    with pytest.raises(ValueError, match="no answer in the columns a, b"):
        from_columns({"a": [None], "b": [None]})


def test_few_items_and_one_class() -> None:
    answers = from_table(["1", "2"], ["a", "a"], ["x", "x"])
    assert dawid_skene(answers).probabilities.tolist() == [[1.0], [1.0]]
    assert fuse_with_features(answers, np.zeros((2, 1))).probabilities.tolist() == [[1.0], [1.0]]
