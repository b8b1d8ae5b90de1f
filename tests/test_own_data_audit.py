"""Audits: the intervals against exact ones of SciPy, coverage in simulations, the draw, and what a report says."""

import numpy as np
import pytest
from scipy import stats

from logitclip.own_data import audit
from logitclip.own_data.audit import NO_CLASS_CODE, REVIEWED, UNANSWERED_CODE, UNSURE_CODE, Rate


@pytest.mark.parametrize(("hits", "n"), [(0, 50), (1, 50), (5, 50), (25, 50), (50, 50), (7, 200)])
def test_one_stratum_is_clopper_and_pearson(hits: int, n: int) -> None:
    value, low, high = audit.combine_strata(np.array([hits]), np.array([n]), np.array([10**7]))
    expected = stats.binomtest(hits, n).proportion_ci(method="exact")
    assert value == pytest.approx(hits / n)
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=3e-4)


@pytest.mark.parametrize(("hits", "n", "size"), [(3, 20, 40), (0, 30, 60), (12, 50, 80)])
def test_without_replacement_it_inverts_the_hypergeometric_test(hits: int, n: int, size: int) -> None:
    _, low, high = audit.combine_strata(np.array([hits]), np.array([n]), np.array([size]))
    inside = [
        k
        for k in range(hits, size - (n - hits) + 1)
        if stats.hypergeom.cdf(hits, size, k, n) > 0.025 and stats.hypergeom.sf(hits - 1, size, k, n) > 0.025
    ]
    assert low * size == pytest.approx(inside[0], abs=1.001)
    assert high * size == pytest.approx(inside[-1], abs=1.001)
    assert low * size <= inside[0] + 0.01
    assert high * size >= inside[-1] - 0.01


def test_a_census_has_no_width() -> None:
    assert audit.combine_strata(np.array([3, 1]), np.array([10, 4]), np.array([10, 4])) == pytest.approx((4 / 14,) * 3)


def test_a_stratum_without_answers_may_have_any_rate() -> None:
    value, low, high = audit.combine_strata(np.array([0, 0]), np.array([10, 0]), np.array([10, 30]))
    assert (value, low, high) == pytest.approx((0.0, 0.0, 0.75))


def test_the_most_likely_rates_have_the_mean_and_no_other_rates_explain_more() -> None:
    hits, counts, sizes = (np.array(v, float) for v in ([1, 3, 0], [30, 10, 10], [6e5, 2e5, 1e5]))
    weights = sizes / sizes.sum()
    best = audit._most_likely(np.array(0.2), hits, counts, sizes)
    assert weights @ best == pytest.approx(0.2, abs=1e-6)

    def likelihood(p: np.ndarray) -> float:
        return float(stats.binom.logpmf(hits, counts, p).sum())

    rng = np.random.default_rng(0)
    for _ in range(200):
        other = np.clip(best + rng.normal(0, 0.05, 3), 1e-6, 1 - 1e-6)
        other *= 0.2 / (weights @ other)
        if (other < 1).all():
            assert likelihood(other) <= likelihood(np.maximum(best, 1e-12)) + 1e-6


@pytest.mark.parametrize("rate", [0.004, 0.02, 0.3])
def test_intervals_cover_at_fifty_answers_with_a_good_and_a_useless_score(rate: float) -> None:
    rng = np.random.default_rng(1)
    wrong = np.arange(4000) < round(rate * 4000)
    for scores in (wrong + rng.normal(0, 0.5, 4000), rng.random(4000)):
        strata = audit.make_strata(scores, np.zeros(4000, bool))
        sizes, marked = np.bincount(strata), np.bincount(strata, wrong).astype(int)
        counts = np.bincount(strata[audit.draw_rows(np.clip(scores, 0, 1), strata, 50, seed=0)])
        hits = np.stack(
            [rng.hypergeometric(m, s - m, n, 100) for m, s, n in zip(marked, sizes, counts, strict=True)], 1
        )
        _, low, high = audit.combine_strata(hits, counts, sizes)
        covered = ((low <= wrong.mean()) & (wrong.mean() <= high)).mean()
        assert covered >= 0.9  # 95 % and two standard errors of 100 audits


def test_strata_and_draw() -> None:
    scores = np.linspace(0, 1, 1000)
    reviewed = np.arange(1000) >= 990
    strata = audit.make_strata(scores, reviewed)
    assert (strata[990:] == REVIEWED).all()
    assert np.bincount(strata[:990]).tolist() == [495, 247, 149, 69, 30]
    assert (np.diff(strata[:990]) >= 0).all()  # by score
    rows = audit.draw_rows(scores, strata, 50, seed=3)
    assert len(set(rows.tolist())) == 50
    assert np.bincount(strata[rows]).min() >= 5
    assert (rows == audit.draw_rows(scores, strata, 50, seed=3)).all()
    assert set(rows) <= set(audit.draw_rows(scores, strata, 120, seed=3))
    assert set(rows) != set(audit.draw_rows(scores, strata, 50, seed=4))
    half = rows[:25]  # of an audit that is stopped in the middle
    assert np.abs(np.bincount(strata[half], minlength=5) - np.bincount(strata[rows]) / 2).max() <= 1


def test_every_row_of_a_stratum_is_drawn_equally_often() -> None:
    scores = np.linspace(0, 1, 60)
    strata = audit.make_strata(scores, np.zeros(60, bool))
    times = np.bincount(np.concatenate([audit.draw_rows(scores, strata, 30, seed=s) for s in range(800)]), minlength=60)
    for h in range(5):
        part = times[strata == h]
        assert stats.chisquare(part).pvalue > 1e-4 if part.std() else part[0] == 800


@pytest.mark.parametrize(
    ("sizes", "spreads", "total", "expected"),
    [
        ([500, 500], [0.3, 0.3], 50, [25, 25]),
        ([900, 100], [0.1, 0.3], 40, [30, 10]),
        ([900, 100], [0.5, 0.0], 40, [35, 5]),  # at least five
        ([900, 3], [0.1, 0.5], 40, [37, 3]),  # no more than there are
        ([10, 10], [0.5, 0.5], 99, [10, 10]),
        ([100, 100], [0.0, 0.0], 20, [10, 10]),
        ([100, 100], [0.5, 0.5], 3, [5, 5]),
    ],
)
def test_allocation(sizes: list[int], spreads: list[float], total: int, expected: list[int]) -> None:
    assert audit.allocate(np.array(sizes), np.array(spreads), total).tolist() == expected


def audited(rng: np.random.Generator, answers: int = 100):
    given = np.repeat([0, 1, 2], 400)
    true = np.where(rng.random(1200) < 0.25, (given + 1) % 3, given)
    predicted = np.where(rng.random(1200) < 0.1, (true + 1) % 3, true)
    scores = np.where(predicted != given, 0.8, 0.05)
    strata = audit.make_strata(scores, np.zeros(1200, bool))
    asked = audit.draw_rows(scores, strata, answers, seed=0)
    told = np.full(1200, UNANSWERED_CODE)
    told[asked] = true[asked]
    return given, true, predicted, told, strata, asked


def test_report() -> None:
    given, true, predicted, told, strata, asked = audited(np.random.default_rng(0))
    found = audit.report(given, predicted, told, strata, asked)
    assert found.noise.low < (given != true).mean() < found.noise.high
    assert found.noise.answers == 100
    assert found.labels.value == pytest.approx(1 - found.noise.value)
    assert found.model is not None
    assert found.model.low < (predicted == true).mean() < found.model.high
    assert found.noise_bounds == (found.noise.low, found.noise.high)
    assert sorted(found.classes) == [0, 1, 2]
    for k, rate in found.classes.items():
        assert rate.low < (given != true)[given == k].mean() < rate.high
    plain = stats.binomtest(round(100 * found.noise.value), 100).proportion_ci()
    assert found.noise.width < plain.high - plain.low  # the score is good


def test_unsure_answers_widen_the_bounds_and_not_the_rate() -> None:
    given, _, predicted, told, strata, asked = audited(np.random.default_rng(0))
    decided = audit.report(given, predicted, told, strata, asked)
    told[asked[:3]], told[asked[3:6]] = UNSURE_CODE, NO_CLASS_CODE
    found = audit.report(given, predicted, told, strata, asked)
    assert found.undecided == 6
    assert found.noise.answers == 94
    assert found.noise_bounds[0] < found.noise.low
    assert found.noise_bounds[1] > found.noise.high
    assert found.noise_bounds[1] - found.noise_bounds[0] > decided.noise.width


def test_reviewed_rows_are_known_and_only_the_rest_is_uncertain() -> None:
    rng = np.random.default_rng(2)
    given, true = np.zeros(1000, int), (np.arange(1000) < 300).astype(int)
    reviewed = np.arange(1000) < 400  # all wrong labels have been found
    strata = audit.make_strata(rng.random(1000), reviewed)
    asked = audit.draw_rows(rng.random(1000), strata, 60, seed=0)
    told = np.full(1000, UNANSWERED_CODE)
    told[asked], told[reviewed] = true[asked], true[reviewed]
    noise = audit.report(given, np.full(1000, -1), told, strata, asked).noise
    assert noise.value == pytest.approx(0.3)
    assert noise.low == pytest.approx(0.3)
    assert noise.high < 0.3 + 0.6 * 0.1


def test_the_answers_it_asks_for_halve_the_interval() -> None:
    rng = np.random.default_rng(5)
    given, true, predicted, told, strata, asked = audited(rng, 50)
    found = audit.report(given, predicted, told, strata, asked)
    scores = np.where(predicted != given, 0.8, 0.05)
    more = audit.draw_rows(scores, strata, 50 + found.halved_by, seed=0)
    told[more] = true[more]
    again = audit.report(given, predicted, told, strata, more)
    assert 0.35 < again.noise.width / found.noise.width < 0.65
    assert 0 < found.halved_by < 1150


def test_rates_in_words() -> None:
    assert str(Rate(0.123, 0.05, 0.2)) == "12.3% (5.0% to 20.0%)"
    assert str(Rate(0.5, 0.1, 0.9)) == "50% (10% to 90%)"
