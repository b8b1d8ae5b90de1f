"""Calibration on noisy labels: probabilities of the true class, not of the noisy one."""

import numpy as np
import pytest

from logitclip.own_data.calibration import (
    calibrate,
    find_temperature,
    given_the_label,
    match_confidence,
    softmax,
)
from logitclip.studies.measures import calibration_error


@pytest.fixture(scope="module")
def problem():
    """Logits whose calibrated temperature is 3, true labels drawn from them, and 40 % next-class noise."""
    rng = np.random.default_rng(0)
    logits = 9 * rng.normal(size=(6000, 4))
    true = np.array([rng.choice(4, p=p) for p in softmax(logits / 3)])
    given = np.where(rng.random(6000) < 0.4, (true + 1) % 4, true)
    return logits, true, given, 0.6 * np.eye(4) + 0.4 * np.roll(np.eye(4), 1, axis=1)


def test_the_temperature_accounts_for_the_noise(problem):
    logits, true, given, matrix = problem
    assert find_temperature(logits, true, None) == pytest.approx(3, rel=0.1)
    assert find_temperature(logits, given, matrix) == pytest.approx(3, rel=0.2)
    assert find_temperature(logits, given, None) > 6  # plain temperature scaling fits the noise
    right = softmax(logits / find_temperature(logits, given, matrix))
    errors = [calibration_error(p.max(1), p.argmax(1) == true) for p in (right, softmax(logits / 6))]
    assert errors[0] < 0.03 < errors[1]


def test_a_prior_is_added(problem):
    logits, *_ = problem
    prior = np.array([0.0, 1.0, 2.0, -1.0])
    np.testing.assert_allclose(calibrate(logits - 3 * prior, 3.0, prior), softmax(logits / 3))


def test_bayes_rule():
    probabilities = np.array([[0.5, 0.5, 0.0]])
    matrix = np.array([[0.6, 0.4, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    posterior = given_the_label(probabilities, np.array([1]), matrix)
    smoothed = 0.98 * np.array([0.4, 1.0, 0.0]) + 0.02 / 3
    expected = probabilities[0] * smoothed
    np.testing.assert_allclose(posterior[0], expected / expected.sum())
    even = given_the_label(np.array([[0.8, 0.2]]), np.array([1]), None)
    np.testing.assert_allclose(even, [[0.8 * 0.1 / 0.26, 0.2 * 0.9 / 0.26]])


def test_confidence_becomes_the_accuracy():
    logits = np.random.default_rng(0).normal(size=(500, 3)) * 2
    for accuracy in (0.5, 0.7, 0.9):
        temperature = match_confidence(logits, accuracy)
        assert calibrate(logits, temperature).max(1).mean() == pytest.approx(accuracy, abs=1e-3)
    assert match_confidence(logits, 0.1) == pytest.approx(5, rel=1e-3)  # not even: the end of the range
