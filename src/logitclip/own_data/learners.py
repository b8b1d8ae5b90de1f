"""The learners that `fit` chooses from, behind one contract: fit, predict_proba, out_of_fold, and how to be stored.

The network is in network.py; here are a forest, logistic regression and nearest neighbours.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from logitclip.files import Json
from logitclip.own_data.calibration import softmax
from logitclip.own_data.facts import Facts
from logitclip.own_data.folds import Folds, choose_rows
from logitclip.own_data.kind import Arrays, Read, Rows

if TYPE_CHECKING:
    from sklearn.ensemble import RandomForestClassifier

UNSEEN = 1e-4  # probability of a class that a learner has never seen
TREES = 100
LEAF = 2  # rows in a leaf
LEAVES = 500  # of a tree, about
TREE_ROWS = 20_000  # rows that a tree is grown on
LINEAR_ROWS = 50_000  # rows that logistic regression is fitted to
STRENGTHS = (0.03, 0.3, 3.0)  # inverse strengths of its penalty
SMALLER = (0.01, 0.003, 0.001, 3e-4, 1e-4)  # tried as long as the smallest is the best, as on features of encoders
NEIGHBOURS = 20
REFERENCE = 20_000  # rows that neighbours are looked for in


class Learner(ABC):
    """Learns the probabilities of K classes from rows, on `jobs` cores."""

    name: ClassVar[str]
    file: ClassVar[str]  # in the model folder
    arrays: ClassVar[tuple[str, ...]] = ()  # the attributes that are stored in it

    def __init__(self, classes: int, jobs: int | None = 1) -> None:
        self.classes, self.jobs = classes, jobs

    def settings(self) -> Json:
        """Return what decides what it learns, beside the rows and the seed."""
        return {}

    @abstractmethod
    def fit(self, rows: Rows, y: np.ndarray, weight: np.ndarray | None = None, seed: int = 0) -> None:
        """Learn from rows with labels [N] and weights [N]."""

    @abstractmethod
    def predict_proba(self, rows: Rows) -> np.ndarray:
        """Return class probabilities [N, K]; NaN where a row cannot be read."""

    def facts(self) -> Facts:
        """Return what model.json must hold for `restore`."""
        return {"name": self.name}

    def contents(self) -> dict[str, bytes]:
        """Return the files of the fitted learner."""
        from safetensors.numpy import save

        return {self.file: save({name: np.ascontiguousarray(getattr(self, name)) for name in self.arrays})}

    def restore(self, facts: Facts, read: Read) -> None:
        """Become the fitted learner that a model folder holds."""
        from safetensors.numpy import load

        arrays = load(read(self.file))
        for name in self.arrays:
            setattr(self, name, arrays[name])

    def out_of_fold(self, rows: Rows, y: np.ndarray, weight: np.ndarray | None, folds: Folds, seed: int) -> Arrays:
        """Judge the n rows that are held out by models that have not seen their labels.

        Returns:
            The probabilities `held_out`, [n, K], and what else a learner finds: the network `seen`, the probabilities
            by models that have learnt from the row; logistic regression the `strength` of its penalty.
        """
        judged = folds.judged
        probabilities = np.empty((len(judged), self.classes))
        for train, test in folds:
            learner = self.fresh()
            learner.fit(rows.take(train), y[train], None if weight is None else weight[train], seed)
            probabilities[np.searchsorted(judged, test)] = learner.predict_proba(rows.take(test))
        return {"held_out": probabilities}

    def fresh(self) -> Learner:
        """Return a learner with the same settings that has learnt nothing."""
        return type(self)(self.classes, self.jobs)

    def to_learn_again(self, found: Arrays) -> Learner:
        """Return a fresh learner for rows with less weight on those that may be wrong, after `out_of_fold`."""
        return self.fresh()

    def _every_class(self, probabilities: np.ndarray, seen: np.ndarray) -> np.ndarray:
        """Spread the columns of the classes seen over all K classes."""
        every = np.full((len(probabilities), self.classes), UNSEEN)
        every[:, seen] = np.maximum(probabilities, UNSEEN)
        return every / every.sum(1, keepdims=True)


def mix(learners: Iterable[tuple[Learner, float]], rows: Rows) -> np.ndarray:
    """Return the mean probabilities of learners with their shares, [N, K]; NaN where a row cannot be read."""
    return sum((share * learner.predict_proba(rows) for learner, share in learners), np.zeros(1))


class Forest(Learner):
    """A random forest of bounded size. Its out-of-fold predictions are those of the trees that have not seen a row.

    scikit-learn grows the trees. They are kept as plain arrays, of all trees one after the other: a node has a
    `feature` (-1 for a leaf) with a `threshold`, two children, and the class shares `value`.
    """

    name = "forest"
    file = "forest.safetensors"
    arrays = ("roots", "feature", "threshold", "left", "right", "value")

    def fit(self, rows: Rows, y: np.ndarray, weight: np.ndarray | None = None, seed: int = 0) -> None:
        forest = self._grow(rows, y, weight, seed, out_of_bag=False)
        trees = [tree.tree_ for tree in forest.estimators_]
        self.roots = np.cumsum([0, *(tree.node_count for tree in trees[:-1])])
        feature = np.concatenate([np.where(tree.children_left < 0, -1, tree.feature) for tree in trees])
        self.feature = feature.astype(np.int32)
        self.threshold = np.concatenate([tree.threshold for tree in trees])
        self.left, self.right = (
            np.concatenate([getattr(tree, name) + root for tree, root in zip(trees, self.roots, strict=True)]).astype(
                np.int32
            )
            for name in ("children_left", "children_right")
        )
        self.value = np.zeros((len(self.feature), self.classes), np.float32)
        shares = np.concatenate([tree.value[:, 0] for tree in trees])
        self.value[:, forest.classes_] = shares / shares.sum(1, keepdims=True)

    def _grow(
        self, rows: Rows, y: np.ndarray, weight: np.ndarray | None, seed: int, *, out_of_bag: bool
    ) -> RandomForestClassifier:
        from sklearn.ensemble import RandomForestClassifier

        part = min(len(y), TREE_ROWS)
        forest = RandomForestClassifier(
            TREES,
            min_samples_leaf=max(LEAF, part // LEAVES),
            max_samples=part if part < len(y) else None,
            oob_score=out_of_bag,
            n_jobs=self.jobs,
            random_state=seed,
        )
        return forest.fit(rows.features, y, weight)

    def out_of_fold(self, rows: Rows, y: np.ndarray, weight: np.ndarray | None, folds: Folds, seed: int) -> Arrays:
        if not folds.free:
            return super().out_of_fold(rows, y, weight, folds, seed)  # groups or times: bags would mix them
        forest = self._grow(rows, y, weight, seed, out_of_bag=True)
        probabilities = forest.oob_decision_function_[folds.judged]
        probabilities = np.where(np.isfinite(probabilities), probabilities, 1 / probabilities.shape[1])
        return {"held_out": self._every_class(probabilities, np.asarray(forest.classes_))}

    def predict_proba(self, rows: Rows) -> np.ndarray:
        known = np.isfinite(rows.features).all(1)
        probabilities = np.full((len(rows), self.classes), np.nan)
        for part in np.array_split(np.flatnonzero(known), max(1, int(known.sum()) // 5_000)):
            if len(part):
                shares = self.value[self._leaves(rows.features[part])].mean(1)
                probabilities[part] = self._every_class(shares, np.arange(self.classes))
        return probabilities

    def _leaves(self, x: np.ndarray) -> np.ndarray:
        """Return the leaf of each row in each tree, [N, T]."""
        node = np.broadcast_to(self.roots, (len(x), len(self.roots))).copy()
        inside = self.feature[node] >= 0
        while inside.any():
            row, tree = np.nonzero(inside)
            at = node[row, tree]
            node[row, tree] = np.where(x[row, self.feature[at]] <= self.threshold[at], self.left[at], self.right[at])
            inside[row, tree] = self.feature[node[row, tree]] >= 0
        return node

    def restore(self, facts: Facts, read: Read) -> None:
        super().restore(facts, read)
        inner = self.feature >= 0
        for child in (self.left[inner], self.right[inner]):
            later = (child > np.flatnonzero(inner)) & (child < len(inner))  # than its parent: no walk is endless
            if not later.all() or self.value.shape != (len(inner), self.classes):
                raise ValueError(f"{self.file} holds no forest of `fit`")


class Logistic(Learner):
    """Logistic regression with the penalty that suits held-out labels best; rows beyond a limit are left out."""

    name = "logistic"
    file = "logistic.safetensors"
    arrays = ("weights", "bias", "centre", "seen", "scale")

    def __init__(self, classes: int, jobs: int | None = 1, strength: float | None = None) -> None:
        super().__init__(classes, jobs)
        self.strength = strength

    def fresh(self) -> Logistic:
        return Logistic(self.classes, self.jobs, self.strength)

    def settings(self) -> Json:
        return {"strength": self.strength}

    def to_learn_again(self, found: Arrays) -> Logistic:
        strength = float(found["strength"])
        if strength >= STRENGTHS[0]:  # fewer wrong labels need less of a penalty, unless it is due to many features
            strength = min(STRENGTHS[-1], 10 * strength)
        return Logistic(self.classes, self.jobs, strength)

    def fit(self, rows: Rows, y: np.ndarray, weight: np.ndarray | None = None, seed: int = 0) -> None:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.linear_model import LogisticRegression

        chosen = choose_rows(len(y), LINEAR_ROWS, seed)
        x, y, weight = rows.features[chosen], y[chosen], None if weight is None else weight[chosen]
        self.centre = x.mean(0, dtype=np.float64)
        deviation = max(1e-9, float(np.sqrt(x.var(0, dtype=np.float64).mean())))
        self.scale = np.array([1 / deviation])  # as for standardised columns
        model = LogisticRegression(C=self.strength or STRENGTHS[1], max_iter=100, tol=1e-3)
        with warnings.catch_warnings():  # a hundred steps are enough to vote, and the user cannot add to them
            warnings.simplefilter("ignore", ConvergenceWarning)
            warnings.filterwarnings("ignore", "The number of unique classes is greater than 50%")  # the plan names them
            model.fit((x - self.centre) * self.scale, y, weight)
        weights, bias = model.coef_, model.intercept_
        if len(model.classes_) == 2:  # scikit-learn keeps only the second of two classes
            weights, bias = np.concatenate([0 * weights, weights]), np.concatenate([0 * bias, bias])
        self.weights, self.bias = weights, bias
        self.seen = model.classes_

    def out_of_fold(self, rows: Rows, y: np.ndarray, weight: np.ndarray | None, folds: Folds, seed: int) -> Arrays:
        if self.strength is not None:
            return super().out_of_fold(rows, y, weight, folds, seed) | {"strength": np.array(self.strength)}
        best, found = -np.inf, Arrays()
        for i, strength in enumerate(strengths := (*STRENGTHS, *SMALLER)):
            if strength in SMALLER and found["strength"] > min(strengths[:i]):
                break
            tried = Logistic(self.classes, self.jobs, strength).out_of_fold(rows, y, weight, folds, seed)
            held_out = tried["held_out"]
            likelihood = float(np.log(held_out[np.arange(len(held_out)), y[folds.judged]]).mean())
            if not found or likelihood > best:  # the first may be -inf
                best, found = likelihood, tried
        return found

    def predict_proba(self, rows: Rows) -> np.ndarray:
        scores = ((rows.features - self.centre) * self.scale) @ self.weights.T + self.bias
        return self._every_class(softmax(scores), self.seen)

    def facts(self) -> Facts:
        return {"name": self.name, "strength": self.strength}


class Neighbours(Learner):
    """A vote of the nearest rows. A row never votes on itself."""

    name = "neighbours"
    file = "neighbours.safetensors"
    arrays = ("x", "y", "weight")

    def fit(self, rows: Rows, y: np.ndarray, weight: np.ndarray | None = None, seed: int = 0) -> None:
        chosen = choose_rows(len(y), REFERENCE, seed)
        self.x, self.y = rows.features[chosen], y[chosen]
        self.weight = np.ones(len(chosen)) if weight is None else weight[chosen]

    def predict_proba(self, rows: Rows) -> np.ndarray:
        known = np.isfinite(rows.features).all(1)
        probabilities = np.full((len(rows), self.classes), np.nan)
        if known.any():
            probabilities[known] = self._votes(self._nearest(rows.features[known], 0))
        return probabilities

    def out_of_fold(self, rows: Rows, y: np.ndarray, weight: np.ndarray | None, folds: Folds, seed: int) -> Arrays:
        if not folds.free or len(y) > REFERENCE:
            return super().out_of_fold(rows, y, weight, folds, seed)
        self.fit(rows, y, weight, seed)
        return {"held_out": self._votes(self._nearest(rows.features, 1))[folds.judged]}

    def _nearest(self, x: np.ndarray, skip: int) -> np.ndarray:
        from sklearn.neighbors import NearestNeighbors

        count = max(1, min(NEIGHBOURS, len(self.x) // 5))
        search = NearestNeighbors(n_neighbors=min(count + skip, len(self.x)), n_jobs=self.jobs).fit(self.x)
        nearest = search.kneighbors(x, return_distance=False)
        if skip:  # itself is among them, unless that many rows are equal
            own = nearest == np.arange(len(x))[:, None]
            own[~own.any(1), -1] = True
            nearest = nearest[~own].reshape(len(x), -1)
        return nearest

    def _votes(self, nearest: np.ndarray) -> np.ndarray:
        votes = np.full((len(nearest), self.classes), 0.5 / self.classes)
        for k in range(self.classes):
            votes[:, k] += ((self.y[nearest] == k) * self.weight[nearest]).sum(1)
        return votes / votes.sum(1, keepdims=True)
