"""The search around any training function."""

import math

import numpy as np
import pytest
import torch

import logitclip as lc
from logitclip.search import Trial, best, contenders, has_learnt, propose_values, score_trials

LABELS = np.arange(2000) % 5


def peaked(peak, calls=None):
    """Make a training function whose predictions are best at `peak`."""

    def train(value):
        if calls is not None:
            calls.append(value)
        rng = np.random.default_rng(round(1000 * value))
        wrong = rng.random(len(LABELS)) < 0.3 * abs(math.log(value / peak))
        return np.where(wrong, (LABELS + 1) % 5, LABELS), LABELS, 0.5

    return train


@pytest.mark.parametrize("peak", [0.2, 0.5, 1.0, 1.6, 3.0, 5.0, 12.0])
def test_it_comes_near_the_peak_also_outside_the_range(peak):
    calls = []
    tuned = lc.tune(peaked(peak, calls))
    assert abs(math.log(tuned.best / peak)) < 0.5
    assert calls == list(tuned.scores)
    assert len(set(calls)) == 5


def test_more_trials_come_nearer():
    def distance(trials):
        return abs(math.log(lc.tune(peaked(1.5), trials=trials).best / 1.5))

    assert distance(9) < distance(3)
    assert distance(9) < 0.1


def test_given_values_are_chosen_by_validation_accuracy_alone():
    tuned = lc.tune(peaked(2.0), values=[1, 2, 4])
    assert tuned.best == 2
    assert tuned.scores[2.0] == 1.0
    assert list(tuned.scores) == [1, 2, 4]


def test_tensors_and_logits_are_understood():
    logits = torch.eye(3)[torch.tensor([0, 1, 2, 2])].requires_grad_()
    assert lc.tune(lambda _: (logits, torch.tensor([0, 1, 2, 0])), values=[1.0]).scores == {1.0: 0.75}


@pytest.mark.timeout(60)
def test_values_and_range_may_be_tensors():
    """A tensor does not equal itself as a key of a dictionary: the search never ended."""
    calls = []
    assert lc.tune(peaked(2.0, calls), values=torch.tensor([1.0, 2.0])).best == 2
    assert lc.tune(peaked(2.0, calls), between=(torch.tensor(1.0), torch.tensor(5.0)), trials=3).best == 2.24
    assert calls == [1.0, 2.0, 1.0, 2.24, 5.0]


def test_logits_may_be_bfloat16():
    logits = torch.eye(3, dtype=torch.bfloat16)[torch.tensor([0, 1, 2, 2])]
    assert lc.tune(lambda _: (logits, torch.tensor([0, 1, 2, 0])), values=[1.0]).scores == {1.0: 0.75}


def test_a_column_of_classes_is_refused():
    """Its largest entry is always the first, so that every class was 0."""
    with pytest.raises(ValueError, match=r"must be \[N\], or logits \[N, K\], got a column of shape \(2000, 1\)"):
        lc.tune(lambda _: (LABELS, LABELS[:, None]))


def test_a_failed_training_is_not_chosen():
    def train(value):
        return None if value > 1 else peaked(5.0)(value)

    tuned = lc.tune(train)
    assert tuned.best <= 1
    assert tuned.scores[5.0] is None
    with pytest.raises(ValueError, match="all trials failed"):
        lc.tune(lambda value: None)


def predicted(right, seed=0):
    """Predictions of which this share is right."""
    wrong = np.random.default_rng(seed).permutation(len(LABELS)) >= right * len(LABELS)
    return np.where(wrong, (LABELS + 1) % 5, LABELS)


def test_of_values_with_about_the_same_accuracy_the_one_that_memorised_least_wins():
    memorising, honest = Trial(predicted(0.55), LABELS, 1.0), Trial(predicted(0.53, 1), LABELS, 0.6)
    worse = Trial(predicted(0.4), LABELS, 0.41)
    done = {1.0: memorising, 2.0: honest, 3.0: worse, 4.0: None}
    assert contenders(done) == [1.0, 2.0]  # one standard error is 1.6 points
    assert best(done) == 2.0
    assert best({**done, 2.0: Trial(predicted(0.52, 1), LABELS, 0.5)}) == 1.0  # three points are more than 1.5 errors
    unknown = {value: trial and Trial(trial.predictions, LABELS) for value, trial in done.items()}
    assert best(unknown) == 1.0  # without training accuracies, the highest validation accuracy
    augmented = Trial(predicted(0.55), LABELS, 0.3)  # its training accuracy is lower: no gap
    assert best({**done, 1.0: augmented}) == 1.0


def test_a_loss_that_underfits_is_not_punished_for_learning_more():
    """The better of two networks may have the larger gap, as with GCE and NCE."""
    flat, steep = Trial(predicted(0.3), LABELS, 0.3), Trial(predicted(0.5), LABELS, 0.9)
    scores = score_trials({5.0: flat, 0.2: steep})
    assert scores[5.0].total > scores[0.2].total
    assert best({5.0: flat, 0.2: steep}) == 0.2


def test_the_score_is_accuracy_minus_gap_minus_the_votes_against():
    """Right on 0.6, 0.6 and 0.5 of the examples; the third differs from the other two on the last tenth."""
    first, third = predicted(0.6), predicted(0.5)
    done = {1.0: Trial(first, LABELS, 0.7), 2.0: Trial(first, LABELS, 0.4), 3.0: Trial(third, LABELS, 0.5), 4.0: None}
    scores = score_trials(done)
    assert scores.pop(4.0) is None
    assert {value: score.total for value, score in scores.items()} == pytest.approx({1.0: 0.5, 2.0: 0.6, 3.0: 0.4})
    constant = Trial(np.zeros_like(LABELS), LABELS, 0.2)  # has no vote
    assert score_trials({1.0: done[1.0], 5.0: constant, 6.0: constant})[1.0].total == pytest.approx(0.5)


def test_the_standard_error_is_that_of_the_difference():
    """Both are right on the same examples but for a few, so that a small difference counts."""
    better = predicted(0.5)
    worse = better.copy()
    worse[np.flatnonzero(better == LABELS)[:10]] = 4
    done = {1.0: Trial(better, LABELS, 0.9), 2.0: Trial(worse, LABELS, 0.5)}
    assert contenders(done) == [1.0]


def test_a_network_that_learnt_nothing_loses_to_one_that_did():
    """It has no gap, and with few examples its accuracy is within one standard error."""
    labels = LABELS[:60]
    learnt, constant = np.where(np.arange(60) % 3 > 0, labels, 0), np.zeros_like(labels)
    done = {0.2: Trial(learnt, labels, 0.9, 0.25), 1.0: Trial(constant, labels, 0.2), 5.0: Trial(constant, labels, 0.2)}
    assert best(done) == 0.2
    assert best({1.0: done[1.0], 5.0: done[5.0]}) == 1.0
    with pytest.raises(ValueError, match="all trials failed"):
        best({1.0: None})


def test_trials_that_all_learnt_nothing_are_warned_of():
    with pytest.warns(UserWarning, match="No trial is better than chance"):
        tuned = lc.tune(lambda value: (np.zeros_like(LABELS), LABELS, 0.2))
    assert tuned.best == 1.0


def test_unknown_training_accuracies_are_no_advantage():
    known, unknown = Trial(predicted(0.55), LABELS, 0.9), Trial(predicted(0.545, 1), LABELS)
    assert contenders({1.0: known, 2.0: unknown}) == [1.0, 2.0]
    assert best({1.0: known, 2.0: unknown}) == 1.0


def test_a_network_that_finds_the_rare_class_has_learnt():
    """With weighted classes it may not beat the most frequent label."""
    labels = (np.arange(900) % 10 == 0).astype(int)
    rng = np.random.default_rng(0)
    weighted = np.where(rng.random(900) < 0.15, 1 - labels, labels)
    constant, guessing = np.zeros_like(labels), (rng.random(900) < 0.1).astype(int)
    assert (weighted == labels).mean() < (constant == labels).mean()
    assert [has_learnt(Trial(p, labels)) for p in (weighted, constant, guessing)] == [True, False, False]
    assert best({1.0: Trial(weighted, labels, 0.95), 2.0: Trial(constant, labels, 0.9)}) == 1.0


def test_held_out_examples_must_be_the_same():
    def train(value):
        return LABELS[: int(100 * value)], LABELS[: int(100 * value)]

    with pytest.raises(ValueError, match="held-out examples must be the same in every call"):
        lc.tune(train)
    with pytest.raises(ValueError, match="held-out examples must be the same in every call"):
        lc.tune(lambda value: (LABELS, LABELS if value < 2 else LABELS[::-1]), values=[1.0, 3.0])


def test_a_decision_does_not_depend_on_later_trials():
    done = {}
    while ahead := [value for value in propose_values((0.5, 5.0), done, 6) if value not in done]:
        earlier = list(done)
        done |= {value: Trial(*peaked(3.0)(value)) for value in ahead}
        assert propose_values((0.5, 5.0), done, 6)[: len(earlier)] == earlier


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (0.9, "must return"),
        ((np.zeros(3), np.zeros(4)), "as many predictions as labels"),
        ((np.zeros(0), np.zeros(0)), "at least one"),
        ((np.zeros(3), np.zeros(3), 87.5), r"train_accuracy must lie in \[0, 1\], got 87.5. Divide"),
    ],
)
def test_a_training_function_that_returns_something_else_is_told(returned, message):
    with pytest.raises(ValueError, match=message):
        lc.tune(lambda _: returned)


@pytest.mark.parametrize("options", [{"trials": 2}, {"between": (5, 0.5)}, {"between": (0, 1)}, {"values": []}])
def test_bad_arguments_are_refused(options):
    with pytest.raises(ValueError, match=r"trials must|between must|values must"):
        lc.tune(peaked(1.0), **options)
