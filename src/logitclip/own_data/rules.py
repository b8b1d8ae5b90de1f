"""Notice labels that a few rules explain: errors of rules cannot be seen in what learners say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from logitclip.own_data.combining import Votes, errors_behind
from logitclip.own_data.folds import FOLDS, choose_rows, make_folds
from logitclip.own_data.issues import Issues
from logitclip.own_data.kind import Source

# Chosen by benchmarks/own_data_decide.py:
RULES = 16  # leaves of the tree that stands for a few rules
RULE_ROWS = 3  # rows in a leaf
LEAST_PREDICTED = 0.8  # share of the labels that it must predict
BEHIND = 2.0  # paired standard errors that it may be behind all learners together
ROWS = 5_000  # rows that it is looked for in


def share_by_rules(source: Source, votes: Votes, judged: np.ndarray, seed: int) -> float | None:
    """Return the share of held-out labels that a small decision tree predicts, if no learner does much better.

    The votes are those on the rows at the positions `judged`. None: the labels are not explained by a few rules.
    """
    right = votes.probabilities.argmax(1) == source.labels[judged]
    if right.mean() < LEAST_PREDICTED:
        return None
    found = check_by_rules(source, seed)[judged]
    explained = found.mean() >= LEAST_PREDICTED and errors_behind(found, right) <= BEHIND
    return float(found.mean()) if explained else None


def check_by_rules(source: Source, seed: int) -> np.ndarray:
    """Return which labels a small decision tree predicts that has not seen them, bool [N]."""
    from sklearn.tree import DecisionTreeClassifier

    right = np.zeros(len(source.labels), bool)
    for train, test in make_folds(source, FOLDS, seed):
        some = train[choose_rows(len(train), ROWS, seed)]
        tree = DecisionTreeClassifier(max_leaf_nodes=RULES, min_samples_leaf=RULE_ROWS, random_state=seed)
        tree.fit(source.rows.features[some], source.labels[some])
        right[test] = tree.predict(source.rows.features[test]) == source.labels[test]
    return right


def widen_for_rules(issues: Issues, classes: int) -> Issues:
    """Return the issues with the only range of the noise rate that holds for rules: up to guessing."""
    high = 1 - 1 / classes
    return replace(issues, noise=replace(issues.noise, rate_interval=(0.0, high), at_most=high))
