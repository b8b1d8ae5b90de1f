"""The noise estimate, against known noise and against cleanlab."""

import numpy as np
import pytest

from logitclip.noise.estimate import LARGEST_MATRIX, SUREST, estimate_noise


def noisy(n, classes, rate, seed=0, rule="next"):
    """Make true and noisy labels, and probabilities of a model with 94 % accuracy, higher where it is confident."""
    rng = np.random.default_rng(seed)
    true = rng.integers(0, classes, n)
    flipped = rng.random(n) < rate
    other = (true + (1 if rule == "next" else rng.integers(1, classes, n))) % classes
    given = np.where(flipped, other, true)
    confidence = rng.uniform(0.5, 1, n)
    predicted = np.where(rng.random(n) < confidence**0.2, true, rng.integers(0, classes, n))
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
    assert high - low < 0.1
    actual = np.array([[np.mean(given[true == i] == j) for j in range(5)] for i in range(5)])
    np.testing.assert_allclose(found.matrix, actual, atol=0.08)
    np.testing.assert_allclose(found.matrix.sum(1), 1)
    assert (found.matrix_lower <= found.matrix_upper).all()


def weak(n, rate, seed=0):
    """Two overlapping classes: the model knows the true posterior, with an accuracy of 80 %."""
    rng = np.random.default_rng(seed)
    true = rng.integers(0, 2, n)
    x = 1.7 * (true - 0.5) + rng.normal(size=n)
    given = np.where(rng.random(n) < rate, 1 - true, true)
    posterior = 1 / (1 + np.exp(-1.7 * x))
    return given, np.stack([1 - posterior, posterior], 1)


@pytest.mark.parametrize("rate", [0.0, 0.2, 0.4])
def test_errors_of_a_weak_model_are_not_counted_as_noise(rate):
    found = estimate_noise(*weak(6000, rate), resamples=20)
    assert found.rate == pytest.approx(rate, abs=0.04)
    assert found.at_most > rate + 0.02


def test_nearer_than_cleanlab_with_a_weak_model():
    count = pytest.importorskip("cleanlab.count")
    given, probabilities = weak(3000, 0.2)
    counted = 1 - np.trace(count.estimate_joint(given, probabilities))
    found = estimate_noise(given, probabilities, resamples=2)
    assert abs(found.rate - 0.2) < 0.04 < abs(counted - 0.2)


def test_against_the_definition():
    """Compute ranks by comparing all pairs, the line by polyfit, the matrix by counting."""
    rng = np.random.default_rng(0)
    predicted, surest = rng.integers(0, 4, 300), rng.uniform(0.5, 1, 300).round(2)  # with ties
    probabilities = np.where(np.arange(4) == predicted[:, None], surest[:, None], (1 - surest[:, None]) / 3)
    given = np.where(rng.random(300) < 1.3 - surest, (predicted + rng.integers(1, 4, 300)) % 4, predicted)
    places = np.array(
        [
            (np.sum(mine > surest[i]) + np.sum(mine == surest[i]) / 2) / len(mine)
            for i in range(300)
            for mine in [surest[predicted == predicted[i]]]
        ]
    )
    half = places <= SUREST
    wrong = given != predicted
    slope, intercept = np.polyfit(places[half], wrong[half], 1)
    assert slope > 0
    assert intercept > 0
    found = estimate_noise(given, probabilities, resamples=2)
    assert found.matrix is not None
    assert found.rate == pytest.approx(intercept)
    assert found.at_most == pytest.approx(wrong.mean())
    for i in range(4):
        labels = given[half & (predicted == i)]
        for j in range(4):
            noise = np.mean(labels == j) - (i == j)
            assert found.matrix[i, j] == pytest.approx((i == j) + noise * intercept / wrong[half].mean())


def test_predictions_that_are_equally_sure():
    true = np.arange(900) % 3  # the order of the rows does not matter
    given = np.where(np.arange(900) < 90, (true + 1) % 3, true)
    assert estimate_noise(given, 0.9 * np.eye(3)[true] + 0.1 / 3, resamples=2).rate == pytest.approx(0.1)


def test_the_interval_covers_chance():
    """With a perfect model, about 95 % of the intervals of 40 draws of 400 rows contain the rate."""
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
    found = estimate_noise(true, 0.9 * np.eye(3)[true] + 0.1 / 3, resamples=20)
    assert found.at_most <= 0.05
    assert found.matrix is not None
    assert (found.matrix == np.eye(3)).all()
    # The rule of three: no confusion was seen in the 300 rows of a class, but there may be some.
    assert found.matrix_lower == pytest.approx(0.99 * np.eye(3))
    assert found.matrix_upper == pytest.approx(np.eye(3) + 0.01 * (1 - np.eye(3)))
    _, given, probabilities = noisy(900, 3, 0.3)
    assert estimate_noise(given, probabilities, resamples=20).at_most > 0.05


def test_a_few_rows_say_little():
    assert estimate_noise(np.array([0, 1]), np.eye(2)).rate_interval == (0, 1)
    found = estimate_noise(np.arange(100) % 2, np.eye(2)[np.arange(100) % 2])
    assert found.rate_interval == (0, pytest.approx(0.03))
    assert found.at_most == found.rate_interval[1]  # although no label is contradicted
    assert {type(number) for number in (found.rate, *found.rate_interval, found.at_most)} == {float}


def test_many_classes_have_a_rate_but_no_matrix():
    rng = np.random.default_rng(0)
    classes = LARGEST_MATRIX + 1
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
