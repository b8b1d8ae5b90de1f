"""LogitClipNet: right probabilities, and a searchable clip."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.model_selection import GridSearchCV
from sklearn.preprocessing import StandardScaler
from torch import nn

from logitclip import LogitClip, Loss
from logitclip.integrations.skorch import LogitClipNet


def net(**options) -> LogitClipNet:
    torch.manual_seed(0)
    defaults = {"criterion__tau": 1.0, "max_epochs": 20, "lr": 0.5, "batch_size": 32, "verbose": 0}
    module = {"module__in_features": 4, "module__out_features": 3}
    return LogitClipNet(nn.Linear, **module, **{**defaults, **options})


@pytest.fixture(scope="module")
def iris():
    X, y = load_iris(return_X_y=True)
    return StandardScaler().fit_transform(X).astype(np.float32), y.astype(np.int64)


def test_predict_proba_is_the_softmax_of_the_logits(iris):
    X, y = iris
    fitted = net().fit(X, y)
    with torch.no_grad():
        expected = fitted.module_(torch.from_numpy(X)).softmax(1).numpy()
    assert np.allclose(fitted.predict_proba(X), expected)
    assert np.array_equal(fitted.predict(X), expected.argmax(1))
    assert fitted.score(X, y) > 0.8


def test_the_criterion_is_the_clip_that_was_asked_for(iris):
    fitted = net(criterion__tau=None, criterion__temp=2.0, criterion__loss="gce:q=0.5").fit(*iris)
    assert isinstance(fitted.criterion_, LogitClip)
    assert (fitted.criterion_.tau, fitted.criterion_.delta) == (2.0, 0.5)
    assert isinstance(fitted.criterion_.criterion, Loss)
    assert fitted.criterion_.criterion.name == "gce"


def test_grid_search_over_tau(iris):
    search = GridSearchCV(net(max_epochs=5), {"criterion__tau": [0.01, 1.0]}, cv=3).fit(*iris)
    scores = dict(zip((0.01, 1.0), search.cv_results_["mean_test_score"], strict=True))
    assert (
        search.best_estimator_.criterion_.tau
        == search.best_params_["criterion__tau"]
        == max(scores, key=scores.__getitem__)
    )
    assert scores[0.01] != scores[1.0]


def test_clone_and_pickle(iris):
    X, y = iris
    copy: Any = clone(net())
    fitted = copy.fit(X, y)
    assert np.array_equal(pickle.loads(pickle.dumps(fitted)).predict_proba(X), fitted.predict_proba(X))


def test_a_net_without_a_clip_has_the_default_one(iris):
    plain = LogitClipNet(nn.Linear, module__in_features=4, module__out_features=3, max_epochs=1, verbose=0).fit(*iris)
    assert plain.criterion_.temp == 1.5
    assert plain.set_params(criterion__tau=2.0).fit(*iris).criterion_.tau == 2.0
    search = GridSearchCV(plain, {"criterion__tau": [None, 1.0]}, cv=3).fit(*iris)
    assert len(search.cv_results_["params"]) == 2
