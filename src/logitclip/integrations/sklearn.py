"""LogitClip as a scikit-learn classifier: `LogitClipClassifier`."""

from __future__ import annotations

import operator
import threading
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from logitclip import engine, models, search
from logitclip.criterion import LogitClip, Loss
from logitclip.data import Dataset, Split, hold_out
from logitclip.launch import make_fabric
from logitclip.methods.base import Settings
from logitclip.methods.standard import Standard, Weighted
from logitclip.text import explain_missing

with explain_missing("LogitClipClassifier needs scikit-learn >= 1.6", "sklearn"):
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils import check_array, check_consistent_length, check_random_state
    from sklearn.utils.class_weight import compute_sample_weight
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data

__all__ = ["LogitClipClassifier"]

_ONE_AT_A_TIME = threading.Lock()  # networks draw from torch's global generator, which is restored afterwards


class LogitClipClassifier(ClassifierMixin, BaseEstimator):
    """A multilayer perceptron trained on noisy labels with clipped logits.

    Scale the features, as for scikit-learn's own networks: ``make_pipeline(StandardScaler(), LogitClipClassifier())``.

    Args:
        loss: A loss and its knobs, as in ``"gce:q=0.7"``.
        temp: The clip: threshold temp, scale 1/temp. None trains without a clip; "auto" finds a value with
            `logitclip.tune`, which takes five trainings on half of the examples before the one on all of them.
        tau: The clip of Eq. 3, threshold and scale tau. If it is given, it is used instead of temp.
        width: Units of a hidden layer.
        depth: Number of hidden layers; 0 is multinomial logistic regression.
        epochs: Passes over the training data.
        batch_size: Examples of one step.
        lr: Learning rate, divided by 10 after 40 % and again after 70 % of the epochs.
        momentum: Momentum of the gradient steps.
        weight_decay: Weight decay.
        class_weight: A weight by class label, or "balanced": the inverse of a class's share of the examples.
        device: "auto", "cpu", "cuda" or "mps", for the training; the trained model is on the CPU.
        random_state: Seed of the initial weights and of the order of the examples. An int makes `fit` reproducible.

    Attributes:
        classes_: The labels [K], sorted.
        model_: The trained `nn.Module`, from features [N, D] to logits [N, K], in float64 on the CPU.
        temp_: The temp used for training, found or given; None if tau is given.
        tuned_: With ``temp="auto"``, the validation accuracies of the values tried (`logitclip.search.Tuned`).
        n_features_in_, feature_names_in_: As in every estimator.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> classifier = LogitClipClassifier(random_state=0).fit(X, y)
    >>> classifier.predict(X[:3]).tolist(), classifier.score(X, y) > 0.9
    ([0, 0, 0], True)
    """

    def __init__(
        self,
        loss: str = "ce",
        temp: float | str | None = 1.5,
        *,
        width: int = 256,
        depth: int = 3,
        epochs: int = 50,
        batch_size: int = 128,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        tau: float | None = None,
        class_weight: Any = None,
        device: str = "auto",
        random_state: Any = None,
    ) -> None:
        self.loss = loss
        self.temp = temp
        self.tau = tau
        self.width = width
        self.depth = depth
        self.epochs = epochs
        self.batch_size = batch_size
        self.lr = lr
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.class_weight = class_weight
        self.device = device
        self.random_state = random_state

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> LogitClipClassifier:
        """Train on features and noisy labels.

        Args:
            X: Features [N, D]: an array, a data frame or a sparse matrix.
            y: Labels [N] of any type.
            sample_weight: A weight per example, [N], at least 0; only their ratios matter.

        Returns:
            This classifier.

        Raises:
            ValueError: If the data or a parameter is invalid, or if training diverges.
        """
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float32)
        check_classification_targets(y)
        weights = None
        if sample_weight is not None:
            X, y, weights = _select_weighted(X, y, sample_weight)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"There must be at least 2 classes to learn, got 1 class: {self.classes_[0]!r}.")
        if self.class_weight is not None:
            weights = _times(weights, compute_sample_weight(self.class_weight, y))
        split = Split(_examples(X), torch.from_numpy(labels.astype(np.int64)))
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        self.temp_ = None if self.tau is not None else self.temp
        if self.temp_ == "auto":
            self.tuned_ = self._tune(split, weights, seed)
            self.temp_ = self.tuned_.best
        elif isinstance(self.temp_, str):
            raise ValueError(f"temp must be a positive number, 'auto' or None, got {self.temp!r}.")
        try:
            self.model_ = self._train(split, weights, seed, self.temp_)
        except engine.Diverged as error:
            raise ValueError(f"{error} Scale the features: make_pipeline(StandardScaler(), ...).") from error
        return self

    def decision_function(self, X: Any) -> np.ndarray:
        """Return the unclipped logits [N, K] in the order of `classes_`; of two classes, their difference [N]."""
        logits = self._logits(X)
        return (logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits).numpy()

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return class probabilities [N, K] in the order of `classes_`: the softmax of the unclipped logits."""
        return self._logits(X).softmax(1).numpy()

    def _logits(self, X: Any) -> Tensor:
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=np.float32, reset=False)
        return _logits(self.model_, _examples(X))

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable class of each example, [N]."""
        most_probable = self.predict_proba(X).argmax(1)
        return self.classes_[most_probable]

    def _tune(self, split: Split, weights: Tensor | None, seed: int) -> search.Tuned:
        """Search for temp on a random half of the examples, validated on the others with their noisy labels."""
        part = hold_out(len(split), search.HELD_OUT, generator=torch.Generator().manual_seed(seed))

        def train(temp: float) -> Any:
            try:
                model = self._train(split, weights, seed, temp, part.train)
            except engine.Diverged:
                return None
            predicted = _logits(model, split.x).argmax(1)
            hits = (predicted == split.labels).double()
            return predicted[part.val], split.labels[part.val], hits[part.train].mean()

        return search.tune(train)

    def _train(
        self, split: Split, weights: Tensor | None, seed: int, temp: Any, index: Tensor | None = None
    ) -> nn.Module:
        classes, features = len(self.classes_), int(self.n_features_in_)  # type: ignore[attr-defined]
        spec, nothing = f"mlp:width={self.width},depth={self.depth}", split.select(torch.arange(0))
        with _ONE_AT_A_TIME:
            worker = engine.fit(
                Dataset("X", split, nothing, classes, tuple(map(str, self.classes_))),
                lambda seed: models.build(spec, classes, (features,), seed=seed).float(),  # whatever torch's default is
                self._criterion(temp),
                Standard if weights is None else partial(Weighted, weights=weights),
                Settings(
                    epochs=self.epochs,
                    batch_size=operator.index(self.batch_size),  # torch refuses the integers of NumPy
                    lr=self.lr,
                    momentum=self.momentum,
                    weight_decay=self.weight_decay,
                    seed=seed,
                ),
                index=index,
                fabric=make_fabric(accelerator=self.device),
            )
        return worker.network.cpu().double().eval()

    def _criterion(self, temp: Any) -> nn.Module:
        if self.tau is not None:
            return LogitClip(self.loss, tau=self.tau)
        return Loss(self.loss) if temp is None else LogitClip(self.loss, temp=temp)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


class _SparseRows:
    """Rows of a sparse matrix, converted to dense tensors batch by batch."""

    def __init__(self, matrix: Any) -> None:
        self.matrix = matrix

    def __len__(self) -> int:
        return self.matrix.shape[0]

    def __getitem__(self, index: Tensor) -> Tensor:
        return torch.from_numpy(self.matrix[index.numpy()].toarray())

    def select(self, index: Tensor) -> _SparseRows:
        return _SparseRows(self.matrix[index.numpy()])


def _examples(X: Any) -> Any:
    """Return validated features as the examples of a split."""
    return torch.from_numpy(np.require(X, requirements=["C", "W"])) if isinstance(X, np.ndarray) else _SparseRows(X)


def _select_weighted(X: Any, y: np.ndarray, sample_weight: Any) -> tuple[Any, np.ndarray, Tensor]:
    """Return the examples with a nonzero weight, and their weights scaled to mean 1."""
    weights = check_array(sample_weight, ensure_2d=False, dtype="float64", input_name="sample_weight")
    if weights.ndim != 1:
        raise ValueError(f"Sample weights must be 1D, got {weights.ndim} dimensions.")
    check_consistent_length(X, weights)
    if (weights < 0).any() or not weights.any():
        raise ValueError("Sample weights must not be negative, and not all zero.")
    kept = np.flatnonzero(weights)
    weights = weights[kept]
    return X[kept], y[kept], torch.from_numpy(weights / weights.mean()).float()


def _times(weights: Tensor | None, others: np.ndarray) -> Tensor:
    """Return the product of two weights per example, scaled to mean 1."""
    product = torch.from_numpy(others).float() * (1.0 if weights is None else weights)
    if not bool(product.any()):
        raise ValueError("The product of class_weight and sample_weight is 0 for every example.")
    return product / product.mean()


@torch.no_grad()
def _logits(model: nn.Module, examples: Any) -> Tensor:
    return torch.cat([model(examples[part].double()) for part in torch.arange(len(examples)).split(4096)])
