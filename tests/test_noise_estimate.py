"""The noise estimate, against known noise and against cleanlab."""

import numpy as np
import pytest

from logitclip.noise.estimate import MOST_CLASSES, estimate_noise


def noisy(n, classes, rate, seed=0, rule="next"):
    """True and noisy labels, and probabilities of a model that is right for 95 % of the examples."""
    rng = np.random.default_rng(seed)
    true = rng.integers(0, classes, n)
    flipped = rng.random(n) < rate
    other = (true + (1 if rule == "next" else rng.integers(1, classes, n))) % classes
    given = np.where(flipped, other, true)
    confidence = rng.uniform(0.5, 1, n)
    predicted = np.where(rng.random(n) < 0.95, true, rng.integers(0, classes, n))
    rest = np.repeat(((1 - confidence) / (classes - 1))[:, None], classes, 1)
    rest[np.arange(n), predicted] = confidence
    return true, given, rest


@pytest.mark.parametrize(("rate", "rule"), [(0.0, "next"), (0.2, "next"), (0.4, "next"), (0.4, "any")])
def test_the_rate_and_the_matrix_are_found(rate, rule):
    true, given, probabilities = noisy(4000, 5, rate, rule=rule)
    found = estimate_noise(given, probabilities, resamples=50)
    assert found.matrix is not None
    assert found.rate == pytest.approx(rate, abs=0.05)
    low, high = found.rate_interval
    assert low <= found.rate <= high
    assert high - low < 0.05
    actual = np.array([[np.mean(given[true == i] == j) for j in range(5)] for i in range(5)])
    np.testing.assert_allclose(found.matrix, actual, atol=0.08)
    np.testing.assert_allclose(found.matrix.sum(1), 1)
    assert (found.matrix_lower <= found.matrix_upper).all()


def test_the_same_counts_as_cleanlab():
    count = pytest.importorskip("cleanlab.count")
    _, given, probabilities = noisy(2000, 6, 0.3, seed=3)
    joint = count.estimate_joint(given, probabilities)
    found = estimate_noise(given, probabilities, resamples=2)
    assert found.matrix is not None
    assert found.rate == pytest.approx(1 - np.trace(joint), abs=0.01)
    np.testing.assert_allclose(found.matrix, (joint / joint.sum(0)).T, atol=0.03)


def test_the_interval_covers_chance():
    """Of 40 draws of 400 rows with a perfect model, about 95 % of the intervals hold the rate."""
    held = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        true = rng.integers(0, 3, 400)
        given = np.where(rng.random(400) < 0.3, (true + 1) % 3, true)
        low, high = estimate_noise(given, 0.97 * np.eye(3)[true] + 0.01, resamples=100).rate_interval
        held += low <= 0.3 <= high
    assert 34 <= held <= 40


def test_clean_labels_look_clean():
    true = np.arange(900) % 3
    assert estimate_noise(true, 0.9 * np.eye(3)[true] + 0.1 / 3, resamples=20).looks_clean
    _, given, probabilities = noisy(900, 3, 0.3)
    assert not estimate_noise(given, probabilities, resamples=20).looks_clean


def test_many_classes_have_a_rate_but_no_matrix():
    rng = np.random.default_rng(0)
    classes = MOST_CLASSES + 1
    true = rng.integers(0, classes, 3000)
    given = np.where(rng.random(3000) < 0.2, (true + 1) % classes, true)
    found = estimate_noise(given, 0.9 * np.eye(classes)[true] + 0.1 / classes, resamples=3)
    assert found.matrix is None
    assert found.rate == pytest.approx(0.2, abs=0.03)


@pytest.mark.parametrize(
    ("labels", "probabilities"), [(np.zeros(2, int), np.ones((3, 2))), (np.zeros(0, int), np.ones((0, 2)))]
)
def test_wrong_shapes(labels, probabilities):
    with pytest.raises(ValueError, match=r"Labels \[N\] and probabilities \[N, K\] are needed"):
        estimate_noise(labels, probabilities)
    with pytest.raises(ValueError, match=r"Labels must be in 0..1, got 0..2"):
        estimate_noise(np.array([0, 2]), np.ones((2, 2)))
