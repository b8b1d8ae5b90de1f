"""LogitClipClassifier keeps scikit-learn's contract and resists wrong labels."""

import pickle
from typing import Any, cast

import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.base import clone
from sklearn.datasets import load_digits, load_iris
from sklearn.linear_model import SGDClassifier
from sklearn.model_selection import GridSearchCV, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, StandardScaler
from sklearn.utils import Bunch
from sklearn.utils.estimator_checks import parametrize_with_checks

from logitclip import LogitClip
from logitclip.integrations.sklearn import LogitClipClassifier

# Both are also expected failures of scikit-learn's own SGDClassifier.
EXPECTED_FAILURES = dict.fromkeys(
    ("check_sample_weight_equivalence_on_dense_data", "check_sample_weight_equivalence_on_sparse_data"),
    "With mini-batches a weight is not equivalent to repeating an example; in one batch it is, up to rounding.",
)


@parametrize_with_checks(
    [
        LogitClipClassifier(width=32, depth=1, epochs=20),
        LogitClipClassifier(width=32, epochs=20, class_weight="balanced"),
    ],
    expected_failed_checks=lambda _: EXPECTED_FAILURES,
)
def test_scikit_learn_contract(estimator, check):
    check(estimator)


def test_expected_failures_are_those_of_sgd_classifier():
    generator = pytest.importorskip("sklearn.utils._test_common.instance_generator")
    assert EXPECTED_FAILURES.keys() <= generator.PER_ESTIMATOR_XFAIL_CHECKS[SGDClassifier].keys()


def small(**options) -> LogitClipClassifier:
    defaults = {"width": 32, "depth": 1, "epochs": 20, "batch_size": 32, "random_state": 0}
    return LogitClipClassifier(**defaults | options)


@pytest.fixture(scope="module")
def iris():
    frame = cast(Bunch, load_iris(as_frame=True))
    return StandardScaler().set_output(transform="pandas").fit_transform(frame.data), frame.target


@pytest.fixture(scope="module")
def noisy_digits():
    """Training features with 40 % wrong labels, test features with true labels."""
    X, y = load_digits(return_X_y=True)
    X, rng = X / 16, np.random.default_rng(0)
    order = rng.permutation(len(y))
    train, test = order[:1200], order[1200:]
    wrong = rng.random(len(train)) < 0.4
    noisy = np.where(wrong, (y[train] + rng.integers(1, 10, len(train))) % 10, y[train])
    return X[train], noisy, X[test], y[test]


def test_the_clip_helps_with_40_percent_wrong_labels(noisy_digits):
    X, noisy, X_test, y_test = noisy_digits
    X, noisy = X[:800], noisy[:800]
    scaler = StandardScaler().fit(X)
    options = {"width": 128, "depth": 3, "epochs": 50, "batch_size": 128}
    fitted = {temp: small(temp=temp, **options).fit(scaler.transform(X), noisy) for temp in (None, 1.5, "auto")}
    scores = {temp: classifier.score(scaler.transform(X_test), y_test) for temp, classifier in fitted.items()}
    assert scores[1.5] > scores[None] + 0.05
    assert scores["auto"] > scores[None] + 0.1
    assert fitted["auto"].temp_ == fitted["auto"].tuned_.best
    assert len(fitted["auto"].tuned_.scores) == 5


def test_fit_is_a_function_of_random_state(iris):
    X, y = iris
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, same, other = (small(random_state=seed).fit(X, y).predict_proba(X) for seed in (3, 3, 4))
    assert np.array_equal(first, same)
    assert not np.array_equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


def _probabilities(X, y, seed):
    return small(random_state=seed, epochs=5).fit(X, y).predict_proba(X)


@pytest.mark.parametrize("backend", ["threading", "loky"])
def test_jobs_do_not_disturb_each_other(iris, backend):
    import joblib

    X, y = iris
    alone = [_probabilities(X, y, seed) for seed in range(4)]
    with joblib.parallel_config(backend=backend):
        together = joblib.Parallel(n_jobs=2)(joblib.delayed(_probabilities)(X, y, seed) for seed in range(4))
    assert np.array_equal(alone, together)


def test_strings_frames_and_clones(iris):
    X, y = iris
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    copy: Any = clone(small())
    classifier = copy.fit(X, names)
    assert classifier.classes_.tolist() == ["setosa", "versicolor", "virginica"]
    assert classifier.feature_names_in_.tolist() == list(X.columns)
    assert classifier.score(X, names) > 0.9
    assert set(classifier.predict(X)) <= set(names)


def test_probabilities_survive_pickling(iris):
    X, y = iris
    classifier = small().fit(X, y)
    probabilities = classifier.predict_proba(X)
    assert np.allclose(probabilities.sum(1), 1)
    assert np.array_equal(pickle.loads(pickle.dumps(classifier)).predict_proba(X), probabilities)


@pytest.mark.parametrize("container", [sparse.csr_array, sparse.csc_matrix, sparse.coo_array])
def test_sparse_features_give_the_same_model(noisy_digits, container):
    X, noisy, X_test, _ = noisy_digits
    dense = small(epochs=3).fit(X, noisy).predict_proba(X_test)
    assert np.array_equal(small(epochs=3).fit(container(X), noisy).predict_proba(container(X_test)), dense)


def test_weights_count_as_repetitions(iris):
    """In one batch, a weight of 0 removes an example, and only the ratios of the weights matter."""
    X, y = iris[0].to_numpy(), iris[1].to_numpy()
    weights = np.random.default_rng(0).integers(0, 4, len(y))
    repeated = small(batch_size=1000).fit(X.repeat(weights, 0), y.repeat(weights)).predict_proba(X)
    weighted = small(batch_size=1000).fit(X, y, sample_weight=7.0 * weights).predict_proba(X)
    assert np.abs(repeated - weighted).max() < 1e-4
    assert np.abs(repeated - small(batch_size=1000).fit(X, y).predict_proba(X)).max() > 1e-3


def test_weights_count_across_batches(iris):
    """A batch of light examples moves the weights less than one of heavy examples."""
    X, y = iris[0].to_numpy(), iris[1].to_numpy()
    wrong = np.concatenate([y, (y + 1) % 3])  # each example once right and once wrong
    weights = np.repeat([1.0, 0.01], len(y))
    classifier = small(batch_size=16, temp=None).fit(np.vstack([X, X]), wrong, sample_weight=weights)
    assert classifier.score(X, y) > 0.9


def test_weights_count_in_batches_of_one_example(iris):
    """Each example once right and, a millionth as heavy, once wrong: only its weight can tell."""
    X, y = iris[0].to_numpy(), iris[1].to_numpy()
    both, weights = np.concatenate([y, (y + 1) % 3]), np.repeat([1.0, 1e-6], len(y))
    options = {"batch_size": 1, "temp": None, "epochs": 3, "depth": 0, "lr": 0.02, "momentum": 0.0}
    weighted = small(**options).fit(np.vstack([X, X]), both, sample_weight=weights)
    alone = small(**options).fit(X, y)
    assert weighted.score(X, y) > 0.8
    assert abs(weighted.score(X, y) - alone.score(X, y)) < 0.1


def test_tau_is_the_clip_of_eq_3(iris, monkeypatch):
    X, y = iris
    seen = []
    monkeypatch.setattr(
        "logitclip.integrations.sklearn.LogitClip", lambda loss, **k: seen.append(k) or LogitClip(loss, **k)
    )
    by_tau = small(tau=0.8).fit(X, y)
    assert seen == [{"tau": 0.8}]
    assert by_tau.temp_ is None
    by_temp = small(temp=0.8).fit(X, y)  # scale 1.25
    assert not np.array_equal(by_tau.predict_proba(X), by_temp.predict_proba(X))
    with pytest.raises(ValueError, match="tau must be positive"):
        small(tau=-1.0).fit(X, y)


def test_decision_function_is_the_logits(iris):
    X, y = iris
    classifier = small().fit(X, y)
    logits = classifier.decision_function(X)
    assert logits.shape == (150, 3)
    e = np.exp(logits - logits.max(1, keepdims=True))
    np.testing.assert_allclose(classifier.predict_proba(X), e / e.sum(1, keepdims=True), rtol=1e-9)
    two = small().fit(X, y > 0)
    margin = two.decision_function(X)
    assert margin.shape == (150,)
    np.testing.assert_allclose(two.predict_proba(X)[:, 1], 1 / (1 + np.exp(-margin)), rtol=1e-9)
    assert np.array_equal(two.predict(X), margin > 0)


def test_class_weights_are_sample_weights(iris):
    X, y = iris[0].to_numpy(), iris[1].to_numpy()
    X, y = X[:120], y[:120]  # 50, 50, 20
    by_hand = np.where(y == 2, 5.0, np.where(y == 0, 0.5, 1.0))
    given = small(class_weight={0: 0.5, 2: 5.0}).fit(X, y).predict_proba(X)
    np.testing.assert_allclose(given, small().fit(X, y, sample_weight=by_hand).predict_proba(X), atol=1e-5)
    balanced = small(class_weight="balanced").fit(X, y).predict_proba(X)
    shares = (120 / (3 * np.bincount(y)))[y]
    np.testing.assert_allclose(balanced, small().fit(X, y, sample_weight=shares).predict_proba(X), atol=1e-5)
    weights = np.linspace(0.5, 2, 120)
    both = small(class_weight={2: 5.0}).fit(X, y, sample_weight=weights).predict_proba(X)
    product = weights * np.where(y == 2, 5.0, 1.0)
    np.testing.assert_allclose(both, small().fit(X, y, sample_weight=product).predict_proba(X), atol=1e-5)
    names = np.array(["a", "b", "c"])[y]
    assert np.array_equal(small(class_weight={"a": 0.5, "c": 5.0}).fit(X, names).predict_proba(X), given)


def test_the_device_can_be_chosen(iris):
    assert np.array_equal(
        small(device="cpu").fit(*iris).predict_proba(iris[0]), small().fit(*iris).predict_proba(iris[0])
    )
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="Cannot use 1 devices of the accelerator cuda"):
            small(device="cuda").fit(*iris)


def test_the_batch_size_may_be_an_integer_of_numpy(iris):
    """As a search over an array or a distribution gives it."""
    LogitClipClassifier(batch_size=cast(Any, np.int64(32)), epochs=1, width=8).fit(*iris)


def test_it_trains_where_float64_is_the_default(iris):
    torch.set_default_dtype(torch.float64)
    try:
        assert LogitClipClassifier(epochs=1, width=8).fit(*iris).predict_proba(iris[0]).shape == (150, 3)
    finally:
        torch.set_default_dtype(torch.float32)


def test_pipeline_grid_search_and_cross_val_predict(iris):
    X, y = iris
    pipeline = make_pipeline(MinMaxScaler(), small(epochs=10))
    grid = GridSearchCV(pipeline, {"logitclipclassifier__temp": [None, 0.5, 1.5]}, cv=3).fit(X, y)
    assert grid.best_score_ > 0.6
    held_out: Any = cross_val_predict(pipeline, X, y, cv=3, method="predict_proba")
    assert held_out.shape == (150, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temp": -1.0}, "temp must be positive"),
        ({"temp": "grid"}, "temp must be a positive number, 'auto' or None, got 'grid'"),
        ({"loss": "cee"}, "Did you mean 'ce'"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"width": 0}, "width"),
    ],
)
def test_a_wrong_parameter_is_one_sentence(iris, options, message):
    with pytest.raises(ValueError, match=message):
        small(**options).fit(*iris)


@pytest.mark.parametrize("weights", [-np.ones(150), np.zeros(150), np.full(150, np.nan), np.ones((150, 2))])
def test_wrong_weights_are_refused(iris, weights):
    with pytest.raises(ValueError, match="weight"):
        small().fit(*iris, sample_weight=weights)


def test_divergence_is_an_error_that_helps(iris):
    X, y = iris
    with pytest.raises(ValueError, match="Scale the features"):
        small(temp=None, lr=100.0).fit(1e6 * X, y)
    with pytest.raises(ValueError, match="Scale the features"):  # in the last step
        small(temp=None, lr=1e38, epochs=1, batch_size=1000).fit(1e6 * X, y)


def test_nan_is_refused(iris):
    X, y = iris
    with pytest.raises(ValueError, match="NaN"):
        small().fit(X.where(X > 0), y)


def test_other_losses_can_be_named(iris):
    assert small(loss="gce:q=0.5", temp=1.5).fit(*iris).score(*iris) > 0.8
