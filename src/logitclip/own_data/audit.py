"""Audit labels: draw rows at random with known probabilities, and turn a person's answers into rates with intervals.

The rows are put into strata by score, so that the interval is short if the score is good. It is valid whatever the
score is. A rate is the weighted mean of the rates of the strata. Its interval inverts a test: a rate is inside if a
weighted mean as low (or as high) as the one seen has a probability above 2.5 % under it. The probabilities are those of
drawing without replacement, and the rates of the strata are the most likely ones that give the tested rate. No normal
approximation is used, so that fifty answers and rare errors are no exception.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

STRATA = (0.5, 0.25, 0.15, 0.07, 0.03)  # of the rows in each stratum, the least suspicious first
LEAST_ANSWERS = 5  # answers in a stratum
CONFIDENCE = 0.95
CELLS = 2048  # of the grid on which the distribution of a weighted mean is computed
BISECTIONS = 14  # bisections of an end of an interval: an error below 1e-4
REVIEWED = -1  # the stratum of rows that were reviewed before the audit
PRIOR = 0.2  # rate that stands for half of what is known about a stratum before any answer


@dataclass(frozen=True)
class Rate:
    """An estimated share with its 95 % interval."""

    value: float
    low: float
    high: float
    answers: int = 0

    @property
    def width(self) -> float:
        return self.high - self.low

    @property
    def complement(self) -> Rate:
        """The share of the other rows.

        >>> Rate(0.25, 0.0, 0.5).complement
        Rate(value=0.75, low=0.5, high=1.0, answers=0)
        """
        return Rate(1 - self.value, 1 - self.high, 1 - self.low, self.answers)

    def __str__(self) -> str:
        digits = 1 if self.width < 0.2 else 0
        return f"{self.value:.{digits}%} ({self.low:.{digits}%} to {self.high:.{digits}%})"


# -- which rows to ask for ---------------------------------------------------------------------------------------------


def make_strata(scores: np.ndarray, reviewed: np.ndarray, shares: Sequence[float] = STRATA) -> np.ndarray:
    """Put rows into strata by score.

    Args:
        scores: How suspicious each label is, [N]; NaN counts as the least suspicious.
        reviewed: Which rows have been reviewed, bool [N]; they are a stratum of their own.
        shares: Share of the other rows in each stratum, the least suspicious first.

    Returns:
        The stratum of each row, int [N]; `REVIEWED` for the reviewed ones.

    >>> make_strata(np.array([0.9, 0.1, 0.2, 0.3, 0.8]), np.array([False, False, False, False, True]), (0.5, 0.5))
    array([ 1,  0,  0,  1, -1])
    """
    strata = np.full(len(scores), REVIEWED)
    rest = np.flatnonzero(~np.asarray(reviewed, bool))
    order = rest[np.argsort(np.where(np.isnan(scores[rest]), -np.inf, scores[rest]), kind="stable")]
    ends = np.rint(np.cumsum(shares) * len(rest)).astype(int)
    for i, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        strata[order[start:end]] = i
    return strata


def allocate(sizes: np.ndarray, spreads: np.ndarray, total: int) -> np.ndarray:
    """Divide answers among strata in proportion to size times spread (Neyman), with at least `LEAST_ANSWERS` in each.

    Args:
        sizes: Rows in each stratum, [H].
        spreads: Standard deviation of what is measured in each stratum, [H].
        total: Answers to divide; if they are too few, each stratum gets the least, or all of its rows.

    Returns:
        Answers in each stratum, int [H], with the sum `total` unless the rows are fewer.

    >>> allocate(np.array([800, 200]), np.array([0.1, 0.4]), 100)
    array([50, 50])
    >>> allocate(np.array([990, 10, 3]), np.array([0.5, 0.0, 0.5]), 100)
    array([92,  5,  3])
    """
    sizes = np.asarray(sizes)
    wanted, fewest = sizes * np.maximum(spreads, 1e-9), np.minimum(sizes, LEAST_ANSWERS)
    total = int(np.clip(total, fewest.sum(), sizes.sum()))
    low, high = 0.0, float(total / max(wanted[wanted > 0].min(initial=1.0), 1e-12)) + 1.0
    for _ in range(200):  # a common factor gives the sum, whatever limits apply
        middle = (low + high) / 2
        low, high = (middle, high) if np.clip(middle * wanted, fewest, sizes).sum() < total else (low, middle)
    real = np.clip(high * wanted, fewest, sizes)
    whole = np.floor(real + 1e-6).astype(int)
    for i in np.argsort(-(real - whole), kind="stable"):
        if whole.sum() < total and whole[i] < sizes[i]:
            whole[i] += 1
    return whole


def draw_rows(scores: np.ndarray, strata: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Draw the rows of an audit, at random without replacement in each stratum.

    A larger audit with the same seed contains the smaller one. The order spreads the strata evenly and is random within
    each, so that the rows of an audit that is stopped early are a random sample too.

    Args:
        scores: Probability that each label is wrong, [N]; NaN where it is unknown. It only decides how many rows each
            stratum gets: half of the anticipated rate of a stratum is a prior, because a score may be wrong.
        strata: The stratum of each row, from `make_strata`.
        count: Rows to draw.
        seed: Seed of the draw.

    Returns:
        The rows, int [count].
    """
    rng = np.random.default_rng(seed)
    groups = [rng.permutation(np.flatnonzero(strata == h)) for h in range(strata.max(initial=REVIEWED) + 1)]
    if not groups:
        return np.empty(0, int)
    known = np.nan_to_num(np.clip(scores, 0, 1), nan=PRIOR)
    rates = np.array([(known[rows].mean() + PRIOR) / 2 if len(rows) else 0.0 for rows in groups])
    counts = allocate(np.array([len(rows) for rows in groups]), np.sqrt(rates * (1 - rates)), count)
    places = np.concatenate([(np.arange(n) + 0.5) / max(n, 1) for n in counts])
    drawn = np.concatenate([rows[:n] for rows, n in zip(groups, counts, strict=True)])
    return drawn[np.argsort(places, kind="stable")]


# -- intervals ---------------------------------------------------------------------------------------------------------


def estimate_rate(values: np.ndarray, strata: np.ndarray, asked: np.ndarray, within: np.ndarray | None = None) -> Rate:
    """Estimate the share of rows with a property, from answers to a stratified random sample.

    Args:
        values: 1 if a row has the property, 0 if not, NaN if it is unknown, [N].
        strata: The stratum of each row, from `make_strata`. All answers in the stratum `REVIEWED` count.
        asked: The rows that were drawn, in other strata, int [n].
        within: Rows to estimate the share among, bool [N]; all rows by default.

    Returns:
        The share. Rows without a value are left out, as if they were missing at random within their stratum.

    >>> strata = np.zeros(1000, int)
    >>> values = np.full(1000, np.nan)
    >>> values[:50] = [1] * 5 + [0] * 45
    >>> print(estimate_rate(values, strata, np.arange(50)))  # Clopper and Pearson's is 3.3 % to 21.8 %
    10.0% (3.4% to 21.5%)
    """
    among = np.ones(len(values), bool) if within is None else within
    seen = strata == REVIEWED
    seen[asked] = True
    seen &= among & ~np.isnan(values)
    cells = strata - REVIEWED  # from 0
    number = int(cells.max(initial=0)) + 1
    sizes = np.bincount(cells[among], minlength=number)
    counts = np.bincount(cells[seen], minlength=number)
    hits = np.bincount(cells[seen], values[seen], minlength=number)
    value, low, high = combine_strata(hits, counts, sizes)
    return Rate(float(value), float(low), float(high), int(counts.sum()))


def combine_strata(
    hits: np.ndarray, counts: np.ndarray, sizes: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the weighted mean of the rates of strata and the ends of its interval.

    Args:
        hits: Answers with the property in each stratum, [..., H]; fractions are possible.
        counts: Answers in each stratum, [H].
        sizes: Rows in each stratum, [H]. A stratum without answers may have any rate.

    Returns:
        Value, low and high, each [...].
    """
    hits, counts, sizes = (np.asarray(v, float) for v in (hits, counts, sizes))
    asked, total = counts > 0, sizes.sum()
    if not asked.any():
        shape = hits.shape[:-1]
        return np.full(shape, np.nan), np.zeros(shape), np.ones(shape)
    share = sizes[asked].sum() / total
    hits, counts, sizes = hits[..., asked], counts[asked], sizes[asked]
    weights = sizes / sizes.sum()
    value = (weights * hits / counts).sum(-1)
    fewest, most = (hits / sizes * weights).sum(-1), ((1 - (counts - hits) / sizes) * weights).sum(-1)
    low = _bisect(value, fewest, lambda rate: _tails(rate, hits, counts, sizes)[1])
    high = _bisect(value, most, lambda rate: _tails(rate, hits, counts, sizes)[0])
    return value, share * low, share * high + (1 - share)


def _bisect(inside: np.ndarray, outside: np.ndarray, tail: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return the rate between `inside` and `outside` where a tail probability falls to 2.5 %."""
    inside, outside = inside.copy(), np.broadcast_to(outside, inside.shape).copy()
    for _ in range(BISECTIONS):
        middle = (inside + outside) / 2
        likely = tail(middle) > (1 - CONFIDENCE) / 2
        inside, outside = np.where(likely, middle, inside), np.where(likely, outside, middle)
    return outside


def _tails(rate: np.ndarray, hits: np.ndarray, counts: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the probabilities of a weighted mean at most, and at least, as large as the one seen, under a rate."""
    weights = sizes / sizes.sum()
    rates = _most_likely(rate, hits, counts, sizes)
    spectrum, place = 1.0, np.zeros(hits.shape[:-1], int)
    for h in np.flatnonzero(counts < sizes):
        n = math.ceil(counts[h])
        grid = np.rint(np.arange(n + 1) / n * weights[h] * (CELLS - 2 * len(counts))).astype(int)
        chances = _chances(n, int(sizes[h]), rates[..., h] * sizes[h])
        spread = np.zeros((*chances.shape[:-1], 2 * CELLS))
        starts = np.flatnonzero(np.diff(grid, prepend=-1))  # in a stratum of little weight, several share a place
        spread[..., grid[starts]] = np.add.reduceat(chances, starts, -1)
        spectrum = spectrum * np.fft.rfft(spread)
        place = place + grid[np.rint(hits[..., h]).astype(int)]
    below = np.fft.irfft(spectrum, 2 * CELLS).cumsum(-1) if np.ndim(spectrum) else None
    if below is None:  # every row was seen
        return np.zeros_like(rate), np.zeros_like(rate)
    at = np.take_along_axis(below, place[..., None], -1)[..., 0]
    before = np.take_along_axis(below, np.maximum(place - 1, 0)[..., None], -1)[..., 0]
    return at, 1 - np.where(place > 0, before, 0.0)


def _most_likely(rate: np.ndarray, hits: np.ndarray, counts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the rates of the strata [..., H] that explain the answers best and have the weighted mean `rate`.

    With a multiplier m, the derivative of the log-likelihood is hits / p - misses / (1 - p) = m * weight, a quadratic
    equation for each p, which falls with m.
    """
    weights = sizes / sizes.sum()
    surer = sizes / np.maximum(sizes - counts, 1e-9)  # drawing without replacement tells more
    yes, no = hits * surer, (counts - hits) * surer
    least, most = hits / sizes, 1 - (counts - hits) / sizes

    def rates(m: np.ndarray) -> np.ndarray:
        slope = m[..., None] * weights
        middle = slope + yes + no
        root = np.sqrt(np.maximum(middle**2 - 4 * slope * yes, 0))
        with np.errstate(divide="ignore", invalid="ignore"):
            p = np.where(middle >= 0, 2 * yes / (middle + root), (middle - root) / (2 * slope))
        return np.clip(np.nan_to_num(p), least, most)

    limit = 4.0 * sizes.sum() ** 2 / weights.min()
    low, high = np.full_like(rate, -limit), np.full_like(rate, limit)
    for _ in range(90):
        middle = (low + high) / 2
        above = (rates(middle) * weights).sum(-1) > rate
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return rates((low + high) / 2)


def _chances(drawn: int, size: int, marked: np.ndarray) -> np.ndarray:
    """Return the probabilities of 0..drawn marked rows among `drawn` of `size`, of which `marked` are, [..., drawn+1].

    The hypergeometric distribution, interpolated between whole numbers of marked rows.
    """
    from scipy.special import gammaln

    x = np.arange(drawn + 1)
    below = np.floor(np.clip(marked, 0, size) + 1e-9)
    part = np.clip(marked - below, 0, 1)

    def chances(k: np.ndarray) -> np.ndarray:
        k = np.minimum(k, size)[..., None]
        left, other = k - x, size - k - drawn + x
        logs = gammaln(k + 1) + gammaln(size - k + 1) - gammaln(x + 1) - gammaln(drawn - x + 1)
        logs = logs - gammaln(np.maximum(left, 0) + 1) - gammaln(np.maximum(other, 0) + 1)
        logs = logs - (gammaln(size + 1) - gammaln(drawn + 1) - gammaln(size - drawn + 1))
        return np.where((left >= 0) & (other >= 0), np.exp(logs), 0.0)

    return (1 - part)[..., None] * chances(below) + part[..., None] * chances(below + 1)


# -- what an audit says ------------------------------------------------------------------------------------------------

UNANSWERED_CODE, UNSURE_CODE, NO_CLASS_CODE = -1, -2, -3  # in an array of answers; others are positions of classes


@dataclass(frozen=True)
class Report:
    """What the answers of an audit say about labels and model, on true labels."""

    noise: Rate  # share of wrong labels, without the rows that were answered unsure or in no class
    noise_bounds: tuple[float, float]  # low end if those labels are right, high end if they are wrong
    classes: dict[int, Rate]  # given class -> share of its labels that is wrong
    model: Rate | None  # accuracy of the out-of-fold predictions; None without them
    undecided: int  # answers unsure or in no class
    halved_by: int  # further answers that would halve the interval of the noise rate

    @property
    def labels(self) -> Rate:
        """The accuracy of the given labels."""
        return self.noise.complement


@dataclass(frozen=True)
class Earlier:
    """What an audit said about labels that were then corrected, and about the model that was fitted on them."""

    of: str  # the digest of that model
    noise: Rate
    model: Rate | None


def report(
    given: np.ndarray, predicted: np.ndarray, answers: np.ndarray, strata: np.ndarray, asked: np.ndarray
) -> Report:
    """Estimate noise and accuracy on true labels from the answers of an audit.

    Args:
        given: Labels in the data, int [N].
        predicted: Out-of-fold predictions, int [N]; -1 where there is none.
        answers: True classes, `UNANSWERED_CODE`, `UNSURE_CODE` or `NO_CLASS_CODE`, int [N].
        strata: The stratum of each row, from `make_strata`.
        asked: The rows of the audit, from `draw_rows`.
    """
    decided = answers >= 0
    wrong = np.where(decided, given != answers, np.nan)
    right = np.where(decided, predicted == answers, np.nan)
    noise = estimate_rate(wrong, strata, asked)
    undecided = (answers == UNSURE_CODE) | (answers == NO_CLASS_CODE)
    bounds = noise.low, noise.high
    if undecided.any():
        if_right = estimate_rate(np.where(undecided, 0.0, wrong), strata, asked)
        if_wrong = estimate_rate(np.where(undecided, 1.0, wrong), strata, asked)
        bounds = min(if_right.low, noise.low), max(if_wrong.high, noise.high)
    known = predicted >= 0
    model = estimate_rate(right, strata, asked, known) if known.any() else None
    classes = {int(k): estimate_rate(wrong, strata, asked, given == k) for k in np.unique(given)}
    sampled = np.isin(np.arange(len(given)), asked) | (strata == REVIEWED)
    return Report(
        noise=noise,
        noise_bounds=bounds,
        classes=classes,
        model=model if model is not None and model.answers else None,
        undecided=int((undecided & sampled).sum()),
        halved_by=answers_to_halve(wrong, strata, asked),
    )


def answers_to_halve(values: np.ndarray, strata: np.ndarray, asked: np.ndarray) -> int:
    """Return how many further answers would halve the interval of a rate, if they are as those so far."""
    rate = estimate_rate(values, strata, asked)
    fresh = strata != REVIEWED
    answered = np.zeros(len(values), bool)
    answered[asked] = True
    answered &= ~np.isnan(values) & fresh
    number = int(strata.max(initial=REVIEWED)) + 1
    sizes = np.bincount(strata[fresh], minlength=number)
    counts = np.bincount(strata[answered], minlength=number)
    rates = (np.bincount(strata[answered], values[answered], minlength=number) + 0.5) / (counts + 1)
    used = sizes > 0
    sizes, rates = sizes[used], rates[used]
    share = sizes.sum() / len(values)

    def width(total: int) -> float:
        planned = allocate(sizes, np.sqrt(rates * (1 - rates)), total)
        _, low, high = combine_strata(rates * planned, planned, sizes)
        return share * float(high - low)

    enough, few = int(sizes.sum()), int(answered.sum())
    while enough - few > max(1, few // 50):
        middle = (enough + few) // 2 if enough < 8 * few else 4 * max(few, LEAST_ANSWERS)
        few, enough = (middle, enough) if width(middle) > rate.width / 2 else (few, middle)
    return max(0, enough - int(answered.sum()))


def contradicts(rate: Rate, interval: Sequence[float]) -> bool:
    """Return whether an interval of another estimate lies outside that of an audit.

    >>> contradicts(Rate(0.3, 0.2, 0.4), (0.05, 0.15)), contradicts(Rate(0.3, 0.2, 0.4), (0.15, 0.25))
    (True, False)
    """
    return interval[1] < rate.low or interval[0] > rate.high
