"""Noise against its definitions: a chi-square test per row of a million labels, and the contract of records."""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from logitclip import noise
from logitclip.cli.terminal import noise_preview
from logitclip.noise import NOISES, NoisyLabels, read_matrix, rules

stats = pytest.importorskip("scipy.stats")

N, K = 1_000_000, 10
CIFAR10_ARROWS = {9: 1, 2: 0, 4: 7, 3: 5, 5: 3}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_labels(n: int = N, k: int = K, seed: int = 1) -> torch.Tensor:
    """Make classes of unequal size."""
    return torch.multinomial(torch.linspace(1, 2, k), n, replacement=True, generator=seeded(seed))


def table(clean, noisy, k: int = K) -> np.ndarray:
    counts = np.zeros((k, k))
    np.add.at(counts, (np.asarray(clean), np.asarray(noisy)), 1)
    return counts


def assert_rows_follow(counts: np.ndarray, matrix: np.ndarray, p_value: float = 1e-6) -> None:
    """Chi-square test per row; transitions of probability 0 must not occur."""
    for row, (seen, probability) in enumerate(zip(counts, np.asarray(matrix, float), strict=True)):
        possible = probability > 0
        assert seen[~possible].sum() == 0, f"row {row} has labels of probability zero"
        if possible.sum() > 1:
            p = stats.chisquare(seen[possible], seen.sum() * probability[possible] / probability[possible].sum()).pvalue
            assert p > p_value, f"row {row}: p = {p:.2g}"


def symmetric_matrix(rate: float, k: int = K, include_self: bool = False) -> np.ndarray:
    if include_self:
        return (1 - rate) * np.eye(k) + rate / k
    return (1 - rate) * np.eye(k) + rate / (k - 1) * (1 - np.eye(k))


def arrow_matrix(rate: float, arrows: dict[int, int], k: int = K) -> np.ndarray:
    matrix = np.eye(k)
    for source, target in arrows.items():
        matrix[source, source] -= rate
        matrix[source, target] += rate
    return matrix


def dataset(n: int = 400, k: int = K, seed: int = 0, **more) -> SimpleNamespace:
    """The parts of a dataset that `apply` needs."""
    x = torch.randint(0, 256, (n, 3, 4, 4), dtype=torch.uint8, generator=seeded(seed))
    train = SimpleNamespace(x=x, labels=random_labels(n, k, seed + 1), clean_labels=None)
    about = {"name": "toy", "num_classes": k, "asymmetric": CIFAR10_ARROWS, "label_sets": {}, **more}
    return SimpleNamespace(train=train, **about)


def example(case: str, labels: torch.Tensor, **more):
    """Run a rule, or a variant of it, with useful arguments, to test the contract of all rules."""
    n = len(labels)
    images = torch.randn(n, 6, generator=seeded(5))
    options = {
        "none": {},
        "symmetric": {"rate": 0.5},
        "symmetric per_class": {"rate": 0.5, "draw": "per_class"},
        "symmetric independent": {"rate": 0.5, "draw": "independent", "include_self": True},
        "asymmetric": {"rate": 0.4},
        "asymmetric pairs": {"rate": 0.4, "variant": "pairs"},
        "pair": {"rate": 0.3},
        "transition": {"matrix": symmetric_matrix(0.5)},
        "instance": {"rate": 0.4, "images": images},
        "instance released": {"rate": 0.4, "variant": "released", "images": images},
        "open_set": {"rate": 0.4, "source": torch.zeros(n, 6)},
        "real": {"set": "worst", "label_sets": {"worse_label": (torch.as_tensor(labels) + 1) % K}},
        "votes": {"counts": torch.ones(n, K)},
    }[case]
    rule = NOISES[case.split()[0]]
    if "generator" in inspect.signature(rule).parameters:
        options["generator"] = seeded()
    return rule(labels, K, **{**options, **more})


DRAWN = ["symmetric", "symmetric per_class", "symmetric independent", "asymmetric", "asymmetric pairs", "pair"]
DRAWN += ["transition", "instance", "instance released", "open_set"]
EVERY = [*DRAWN, "none", "real", "votes"]  # "file" has its own tests


def test_every_rule_is_in_these_tests():
    assert {case.split()[0] for case in EVERY} == {*NOISES} - {"file"}


# -- definitions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("include_self", [False, True])
@pytest.mark.parametrize("draw", ["exact", "per_class", "independent"])
def test_symmetric_follows_its_definition(draw, include_self):
    clean = random_labels()
    noisy = noise.symmetric(clean, K, rate=0.5, draw=draw, include_self=include_self, generator=seeded(2))
    assert_rows_follow(table(clean, noisy), symmetric_matrix(0.5, include_self=include_self))


@pytest.mark.parametrize("draw", ["exact", "per_class", "independent"])
@pytest.mark.parametrize("arrows", [CIFAR10_ARROWS, None])
def test_asymmetric_follows_its_arrows(arrows, draw):
    clean = random_labels()
    noisy = noise.asymmetric(clean, K, rate=0.4, draw=draw, mapping=arrows, generator=seeded(3))
    expected = arrows or {c: (c + 1) % K for c in range(K)}
    assert_rows_follow(table(clean, noisy), arrow_matrix(0.4, expected))


def test_asymmetric_blocks_turn_inside_five_classes():
    clean = random_labels(k=12)
    noisy = noise.asymmetric(clean, 12, rate=0.4, variant="blocks", generator=seeded(4))
    arrows = {0: 1, 1: 2, 2: 3, 3: 4, 4: 0, 5: 6, 6: 7, 7: 8, 8: 9, 9: 5, 10: 11, 11: 10}
    assert_rows_follow(table(clean, noisy, 12), arrow_matrix(0.4, arrows, 12))


def test_asymmetric_pairs_exchange_two_classes_of_each_block():
    clean = random_labels(k=100)
    noisy = noise.asymmetric(clean, 100, rate=0.4, variant="pairs", generator=seeded(5))
    counts = table(clean, noisy, 100)
    arrows = {int(j): int(k) for j, k in zip(*np.nonzero(counts * (1 - np.eye(100))), strict=True)}
    assert len(arrows) == 40  # two of five, in twenty blocks
    assert all(arrows[arrows[c]] == c and arrows[c] // 5 == c // 5 for c in arrows)
    assert_rows_follow(counts, arrow_matrix(0.4, arrows, 100))
    other = noise.asymmetric(clean, 100, rate=1.0, variant="pairs", generator=seeded(6))
    assert {int(c) for c in clean[other != clean].unique()} != set(arrows)  # the pairs are drawn


def test_asymmetric_pairs_reach_every_pair():
    seen = set()
    for seed in range(200):
        noisy = noise.asymmetric(range(5), 5, rate=1.0, variant="pairs", generator=seeded(seed))
        seen.add(tuple(np.nonzero(noisy != np.arange(5))[0]))
    assert len(seen) == 10


def test_pair_follows_its_definition():
    clean = random_labels()
    noisy = noise.pair(clean, K, rate=0.45, generator=seeded(6))
    assert_rows_follow(table(clean, noisy), arrow_matrix(0.45, {c: (c + 1) % K for c in range(K)}))


def test_transition_follows_its_matrix():
    matrix = np.random.default_rng(0).dirichlet(np.full(K, 0.5), size=K)
    matrix[:, 3] = 0  # never, though it lies in the middle
    matrix[2] = np.eye(K)[-1]  # always
    matrix /= matrix.sum(1, keepdims=True)
    clean = random_labels()
    noisy = noise.transition(clean, K, matrix=matrix, generator=seeded(7))
    assert_rows_follow(table(clean, noisy), matrix)


def test_the_borders_of_the_inverse_distribution():
    p = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0])
    u = torch.tensor([0.0, 0.25, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert rules.inverse_cdf(p, u).tolist() == [1, 1, 3, 3]
    assert rules.inverse_cdf(p.expand(4, 5), u).tolist() == [1, 1, 3, 3]


@pytest.mark.parametrize("scaling", ["raw", "standard"])
@pytest.mark.parametrize("variant", ["pdn", "released"])
def test_instance_follows_its_own_probabilities(variant, scaling):
    clean, x = random_labels(), 0.5 * torch.randn(N, 4, generator=seeded(8))
    options = {"rate": 0.4, "variant": variant, "scaling": scaling, "images": x}
    p = noise.instance_probabilities(clean, K, **options, generator=seeded(9))
    noisy = noise.instance(clean, K, **options, generator=seeded(9))
    assert torch.allclose(p.sum(1), torch.ones(N), atol=1e-5)
    assert (p.gather(1, noisy[:, None]) > 0).all()
    expected = np.stack([p[clean == c].double().mean(0).numpy() for c in range(K)])
    assert_rows_follow(table(clean, noisy), expected)
    # Per example too: labels follow the probabilities of their own example, not only the mean of the class.
    sharp = p.gather(1, noisy[:, None]).squeeze(1)[noisy != clean]
    mean = torch.from_numpy(expected)[clean, noisy][noisy != clean]
    assert sharp.mean() > 1.2 * mean.mean()


def pdn_oracle(x, labels, k, q, w):
    """Part-dependent noise by its definition, example by example, in float64."""
    p = np.zeros((len(labels), k))
    for i, y in enumerate(labels):
        a = x[i].reshape(-1).astype(float) @ w[y]
        a[y] = -np.inf
        a = np.exp(a - a.max())
        p[i] = q[i] * a / a.sum()
        p[i, y] += 1 - q[i]
    return p


@pytest.mark.parametrize("scaling", ["raw", "standard"])
@pytest.mark.parametrize(("n", "side", "tolerance"), [(1000, 3, 2e-5), (600, 64, 1e-3)])  # the last in several parts
def test_instance_probabilities_equal_a_loop_over_the_definition(n, side, tolerance, scaling):
    k, rng = 4, np.random.default_rng(0)
    labels = rng.integers(0, k - 1, n)  # the last class is empty
    x = rng.integers(0, 4, (n, 2, side, side)).astype(np.uint8)
    p = noise.instance_probabilities(labels, k, rate=0.3, std=0.2, scaling=scaling, images=x, generator=seeded(1))

    g = seeded(1)
    u = torch.rand(n, dtype=torch.float64, generator=g).numpy()
    q = stats.truncnorm.ppf(u, (0 - 0.3) / 0.2, (1 - 0.3) / 0.2, loc=0.3, scale=0.2)
    w = np.stack([torch.randn(2 * side**2, k, generator=g).double().numpy() for _ in range(k)])
    if scaling == "standard":
        x = (x - x.mean((0, 2, 3), keepdims=True)) / x.std((0, 2, 3), keepdims=True)
    np.testing.assert_allclose(p, pdn_oracle(x, labels, k, q, w), atol=tolerance)


def test_instance_rates_are_a_truncated_normal():
    p = noise.instance_probabilities(
        torch.zeros(N, dtype=torch.long), 2, rate=0.1, images=torch.ones(N, 1), generator=seeded()
    )
    q = p[:, 1].double().numpy()
    assert q.min() >= 0
    law = stats.truncnorm((0 - 0.1) / 0.1, (1 - 0.1) / 0.1, loc=0.1, scale=0.1)
    assert stats.kstest(q, law.cdf).pvalue > 1e-6
    fixed = noise.instance_probabilities([0] * 5, 2, rate=1, std=0, images=np.ones((5, 1)), generator=seeded())
    assert torch.equal(fixed[:, 1], torch.ones(5))


def test_instance_released_flips_an_exact_share_and_defaults_to_normalised_images():
    data = dataset(2000)
    clean, x = data.train.labels, data.train.x
    options = {"rate": 0.37, "variant": "released", "images": x}
    noisy = noise.instance(clean, K, **options, generator=seeded(2))
    assert int((noisy != clean).sum()) == 740
    standard = noise.instance(clean, K, **options, scaling="standard", generator=seeded(2))
    assert torch.equal(noisy, standard)
    assert not torch.equal(noisy, noise.instance(clean, K, **options, scaling="raw", generator=seeded(2)))
    raw = noise.instance(clean, K, rate=0.37, images=x, generator=seeded(2))
    assert torch.equal(raw, noise.instance(clean, K, rate=0.37, scaling="raw", images=x, generator=seeded(2)))


def test_a_column_that_is_constant_does_not_matter_to_standardised_instance_noise():
    images = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    images[:, 2] = 0.1
    options = {"rate": 0.4, "scaling": "standard"}
    p = noise.instance_probabilities(torch.arange(50) % K, K, images=images, **options, generator=seeded(1))
    images[:, 2] = 1e6  # it says as little
    again = noise.instance_probabilities(torch.arange(50) % K, K, images=images, **options, generator=seeded(1))
    torch.testing.assert_close(p, again)


def test_instance_reads_images_of_any_kind():
    data = dataset(1500)
    x = data.train.x

    class Decoded:  # like files: a length, and indexing by tensors
        def __len__(self):
            return len(x)

        def __getitem__(self, index):
            return x[index]

    frozen = x.numpy().copy()
    frozen.setflags(write=False)
    kinds = [x, frozen, Decoded(), x.tolist()]
    options = {"rate": 0.4, "scaling": "standard"}
    results = [noise.instance(data.train.labels, K, images=kind, **options, generator=seeded()) for kind in kinds]
    assert all(torch.equal(results[0], result) for result in results[1:])


def test_a_constant_channel_is_no_division_by_zero():
    x = torch.cat([torch.full((50, 1, 2, 2), 7.0), torch.randn(50, 1, 2, 2, generator=seeded())], dim=1)
    p = noise.instance_probabilities([0] * 50, 3, rate=0.5, variant="released", images=x, generator=seeded())
    assert p.isfinite().all()


def test_open_set_exchanges_an_exact_share_and_nothing_twice():
    labels = random_labels(1000)
    pairs = noise.open_set(labels, K, rate=0.4, source=torch.zeros(5000, 2), generator=seeded())
    assert pairs.shape == (400, 2)
    assert len(pairs[:, 0].unique()) == len(pairs[:, 1].unique()) == 400
    assert int(pairs[:, 0].max()) < 1000
    assert 1000 < int(pairs[:, 1].max()) < 5000


def test_real_takes_the_named_set_by_either_name():
    sets = {"worse_label": [1, 1, 1], "random_label2": [2, 2, 2], "noisy_label": [0, 0, 2]}
    for name, official in {"worst": "worse_label", "random2": "random_label2", "fine": "noisy_label"}.items():
        for asked in (name, official):
            assert noise.real([0, 1, 2], 3, set=asked, label_sets=sets).tolist() == sets[official]


def test_votes_are_shares():
    soft = noise.votes(torch.tensor([0, 1]), 3, counts=np.array([[8, 1, 1], [0, 50, 0]], np.uint8))
    assert soft.dtype == torch.float32
    torch.testing.assert_close(soft, torch.tensor([[0.8, 0.1, 0.1], [0.0, 1.0, 0.0]]))


# -- counts ------------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 300), percent=st.integers(0, 100), k=st.integers(2, 12), seed=st.integers(0, 1000))
def test_exact_draws_flip_exactly_that_many(n, percent, k, seed):
    rate = percent / 100
    labels = torch.randint(k, (n,), generator=seeded(seed))
    for rule in (noise.symmetric, noise.pair):
        assert int((rule(labels, k, rate=rate, generator=seeded(seed)) != labels).sum()) == percent * n // 100
    noisy = noise.symmetric(labels, k, rate=rate, draw="per_class", generator=seeded(seed))
    sizes = labels.bincount(minlength=k)
    assert torch.equal(labels[noisy != labels].bincount(minlength=k), percent * sizes // 100)


def test_counts_forgive_the_rounding_of_decimals():
    assert int(0.29 * 100) == 28  # the rounding error
    assert (noise.pair([0] * 100, 2, rate=0.29, generator=seeded()) != 0).sum() == 29


def test_asymmetric_exact_picks_from_all_classes():
    """The released rule chooses an exact share but flips fewer; `per_class` flips an exact share of each class."""
    clean = torch.arange(50_000) % K
    flipped = noise.asymmetric(clean, K, rate=0.4, mapping=CIFAR10_ARROWS, generator=seeded()) != clean
    assert abs(float(flipped.double().mean()) - 0.2) < 0.01
    per_class = (
        noise.asymmetric(clean, K, rate=0.4, mapping=CIFAR10_ARROWS, draw="per_class", generator=seeded()) != clean
    )
    assert per_class.sum() == 10_000
    assert clean[per_class].bincount(minlength=K).tolist() == [2000 if c in CIFAR10_ARROWS else 0 for c in range(K)]


def test_independent_draws_vary_and_exact_ones_do_not():
    clean = torch.zeros(1000, dtype=torch.long)
    for draw, distinct in (("exact", 1), ("per_class", 1), ("independent", 5)):
        sums = {
            int((noise.symmetric(clean, K, rate=0.5, draw=draw, generator=seeded(s)) != 0).sum()) for s in range(20)
        }
        assert len(sums) >= distinct
        assert len(sums) == 1 or draw == "independent"


@pytest.mark.parametrize("rate", [0, 1])
def test_extreme_rates(rate):
    clean = random_labels(1000)
    for draw in ("exact", "per_class", "independent"):
        noisy = noise.symmetric(clean, K, rate=rate, draw=draw, generator=seeded())
        assert int((noisy != clean).sum()) == 1000 * rate


def test_a_lower_rate_flips_a_part_of_what_a_higher_one_flips():
    clean = random_labels(5000)
    low, high = (noise.symmetric(clean, K, rate=rate, generator=seeded()) != clean for rate in (0.2, 0.5))
    assert bool(high[low].all())


# -- promises of every rule --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", DRAWN)
def test_same_seed_same_result_and_two_seeds_differ(case):
    labels = random_labels(2000)
    first, again, other = (example(case, labels, generator=seeded(s)) for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("case", EVERY)
def test_input_and_global_randomness_are_untouched(case):
    labels = random_labels(2000)
    before, state, numpy_state = labels.clone(), torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    result = example(case, labels)
    assert torch.equal(labels, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)  # noqa: NPY002
    result.zero_()  # the result is not a view of the input
    assert torch.equal(labels, before)


@pytest.mark.parametrize("case", EVERY)
def test_each_kind_of_labels_comes_back(case):
    labels = random_labels(500)
    tensor = example(case, labels)
    assert tensor.dtype == example(case, labels.byte()).dtype == (torch.float32 if case == "votes" else torch.int64)
    for kind in (labels.numpy(), labels.numpy().astype(np.uint8), labels.tolist()):
        result = example(case, kind)
        assert isinstance(result, np.ndarray)
        assert np.array_equal(result, tensor.numpy())


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan"), "0.5", None, True])
@pytest.mark.parametrize("name", ["symmetric", "asymmetric", "pair", "instance", "open_set"])
def test_a_rate_is_a_share(name, rate):
    with pytest.raises(ValueError, match="rate must be a share between 0 and 1"):
        example(name, random_labels(20), rate=rate)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 10], r"labels must lie in 0..9, got 10"),
        ([-1, 0], r"labels must lie in 0..9, got -1"),
        ([0.0, 1.0], "labels must be integers, got float64"),
        (torch.tensor([True]), "labels must be integers, got bool"),
        ([[0, 1]], r"one dimension and at least one entry, got the shape \(1, 2\)"),
        ([], "at least one entry"),
    ],
)
def test_labels_are_checked(labels, message):
    with pytest.raises(ValueError, match=message):
        noise.symmetric(labels, K, rate=0.5, generator=seeded())


@pytest.mark.parametrize("k", [0, 1, -3, 2.5, "10", True])
def test_num_classes_is_checked(k):
    with pytest.raises(ValueError, match="num_classes must be an integer of at least 2"):
        noise.symmetric([0], k, rate=0.5, generator=seeded())


@pytest.mark.parametrize("generator", [0, None])
@pytest.mark.parametrize("case", DRAWN)
def test_the_generator_is_checked(case, generator):
    with pytest.raises(ValueError, match=r"generator must be a torch\.Generator on the CPU"):
        example(case, random_labels(20), generator=generator)


def test_a_missing_generator_is_one_sentence():
    for name in ("symmetric", "pair", "instance"):
        with pytest.raises(ValueError, match=r"got None: pass generator=torch\.Generator\(\)\.manual_seed\(0\)"):
            noise.NOISES[name]([0, 1, 0], 2, rate=0.5)


def test_the_generator_of_the_probabilities_is_checked():
    with pytest.raises(ValueError, match=r"generator must be a torch\.Generator on the CPU, got 0"):
        noise.instance_probabilities([0, 1], 2, rate=0.4, images=torch.zeros(2, 1), generator=0)  # type: ignore[arg-type]


def call(name, **options):
    return lambda: example(name, random_labels(20), **options)


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (call("symmetric", draw="exactly"), "draw must be one of exact, per_class, independent; got 'exactly'"),
        (call("asymmetric", variant="ring"), "variant must be one of map, blocks, pairs; got 'ring'"),
        (call("asymmetric", mapping={0: 10}), r"classes in 0..9, got the arrow 0 -> 10"),
        (call("asymmetric", mapping={"0": 1}), r"got the arrow '0' -> 1"),
        (call("asymmetric", mapping={}), "mapping is empty"),
        (call("asymmetric", mapping={0: 1}, variant="blocks"), "mapping belongs to the variant 'map'"),
        (call("transition", matrix=np.eye(3)), r"a row and a column for each class \(10\), got \[3, 3\]"),
        (call("transition", matrix=np.eye(K) - 0.1), "finite and not negative"),
        (call("transition", matrix=np.full((K, K), np.nan)), "finite and not negative"),
        (call("transition", matrix=0.9 * np.eye(K)), r"must sum to 1; row \d sums to 0.9"),
        (call("transition", matrix="missing.npy"), "matrix cannot be read as the file missing.npy"),
        (call("transition", matrix=[[1, 0], [1]]), "matrix cannot be read as an array of numbers"),
        (call("instance", images=None), "depends on the images"),
        (call("instance", images=torch.zeros(19, 3)), "an image per label, got 19 images for 20 labels"),
        (call("instance", images=torch.zeros(20)), r"images must be \[N, C, H, W\] or \[N, D\]"),
        (call("instance", images=torch.full((20, 3), torch.nan)), "finite images"),
        (call("instance", std=-1.0), "std must be finite and not negative, got -1.0"),
        (call("instance", variant="pnd"), "variant must be one of pdn, released"),
        (call("instance", scaling="unit"), "scaling must be one of raw, standard"),
        (call("open_set", source=torch.zeros(3, 2)), "replaces 8 images but its source has only 3"),
        (call("open_set", source="cifar100"), "needs the images of 'cifar100', not only the name"),
        (call("real", set="worse"), "no label set 'worse'. It has: worse_label, worst"),
        (call("real", label_sets={}), "came without any"),
        (call("real", label_sets={"worse_label": [1, 2]}), "has 2 labels for 20 examples"),
        (call("real", label_sets={"worse_label": [11] * 20}), "the label set 'worse_label' must lie in 0..9, got 11"),
        (call("votes", counts=np.ones((20, 3))), r"a column per class, \(20, 10\), got \(20, 3\)"),
        (call("votes", counts=-np.ones((20, K))), "not negative"),
        (call("votes", counts=np.eye(20, K)), "Example 10 has no votes"),
        (lambda: noise.apply("symmetric", [0, 1], num_classes=2), "needs 'rate'"),
        (lambda: noise.apply("symetric:rate=0.5", [0, 1], num_classes=2), "Did you mean 'symmetric'"),
        (lambda: noise.apply("symmetric:rate=0.5,generator=3", [0, 1], num_classes=2), "no knob 'generator'"),
        (lambda: noise.apply("symmetric:rate=0.5", [0, 1]), "needs num_classes"),
        (lambda: noise.apply("symmetric:rate=0.5", [0, 1], 0.5, num_classes=2), "seed of the noise must be an integer"),
        (lambda: noise.apply("symmetric:rate=0.5,draw=all", [0, 1], num_classes=2), "one of exact, per_class, indep"),
    ],
)
def test_errors_say_what_is_wrong(attempt, message):
    with pytest.raises(ValueError, match=message):
        attempt()


# -- apply and its records ---------------------------------------------------------------------------------------------


def test_apply_records_what_was_done():
    data = dataset(1000)
    record = noise.apply("symmetric:draw=exact,rate=0.50", data, seed=7)
    clean = data.train.labels
    assert record.rule == "symmetric:rate=0.5"
    assert record.options == {"rate": 0.5, "draw": "exact", "include_self": False}
    assert record.seed == 7
    assert record.rate == 0.5
    assert int((record.labels != clean).sum()) == 500
    assert torch.equal(record.clean_labels, clean)
    counts = table(clean, record.labels)
    np.testing.assert_allclose(record.transition, counts / counts.sum(1, keepdims=True))
    np.testing.assert_allclose(record.class_rates, 1 - counts.diagonal() / counts.sum(1))
    assert record.class_sizes.tolist() == counts.sum(1).tolist()
    assert torch.equal(record.wrong.bool(), record.labels != clean)
    with pytest.raises(AttributeError):
        record.seed = 8  # type: ignore[misc]


def test_apply_uses_what_the_dataset_brings():
    data = dataset(5000, label_sets={"worse_label": torch.zeros(5000, dtype=torch.long)})
    clean = data.train.labels
    flipped = noise.apply("asymmetric:rate=0.4", data).labels != clean
    assert set(clean[flipped].tolist()) == set(CIFAR10_ARROWS)
    assert set(clean[noise.apply("asymmetric:rate=0.4,variant=blocks", data).labels != clean].tolist()) == set(range(K))
    assert set(clean[noise.apply("asymmetric:rate=0.4", clean, num_classes=K).labels != clean].tolist()) == set(
        range(K)
    )
    only = noise.apply("asymmetric:rate=1", data, mapping={0: 1})
    assert set(clean[only.labels != clean].tolist()) == {0}
    assert only.options == {"rate": 1.0, "variant": "map", "draw": "exact", "mapping": {"0": 1}}
    assert "mapping" not in noise.apply("asymmetric:rate=1", clean, num_classes=K).options
    assert noise.apply("real:set=worst", data).labels.sum() == 0
    assert noise.apply("instance:rate=0.4,variant=released", data).rate == pytest.approx(0.4)
    assert noise.apply("none", data).rate == 0


def test_apply_measures_against_the_truth_where_it_is_known():
    data = dataset(1000)
    data.train.clean_labels = data.train.labels
    data.train.labels = (data.train.labels + 1) % K
    assert noise.apply("none", data).rate == 1.0
    assert noise.apply("pair:rate=0.5", data).rate == 1.0
    assert torch.equal(noise.apply("none", data).clean_labels, data.train.clean_labels)


def test_the_seed_is_the_noises_own():
    """A loader that shuffles with the same seed must not see the flipped labels first."""
    labels = random_labels(1000)
    record = noise.apply("symmetric:rate=0.5", labels, seed=0, num_classes=K)
    first_half = torch.randperm(1000, generator=seeded(0))[:500]
    assert 0.4 < float(record.wrong[first_half].mean()) < 0.6
    again, other = (noise.apply("symmetric:rate=0.5", labels, seed=s, num_classes=K) for s in (0, 1))
    assert record.content_hash == again.content_hash != other.content_hash
    assert torch.equal(record.labels, again.labels)
    assert not torch.equal(record.labels, other.labels)


def test_knobs_as_keywords_are_written_into_the_record():
    labels = random_labels(100)
    record = noise.apply("transition", labels, num_classes=K, matrix=symmetric_matrix(0.5))
    other = noise.apply("transition", labels, num_classes=K, matrix=symmetric_matrix(0.4))
    assert record.rule.startswith("transition:matrix=array-")
    assert record.rule != other.rule
    assert noise.apply("pair", labels, num_classes=K, rate=np.float32(0.5)).rule == "pair:rate=0.5"
    assert noise.apply("pair:rate=0.5", labels, num_classes=K, draw="per_class").rule == "pair:rate=0.5,draw=per_class"


def test_read_matrix_needs_no_number_of_classes(tmp_path):
    np.savetxt(tmp_path / "matrix.csv", symmetric_matrix(0.3, 4), delimiter=",")
    np.testing.assert_array_equal(noise.read_matrix(tmp_path / "matrix.csv"), symmetric_matrix(0.3, 4))
    for bad in (np.ones((2, 3)), np.ones(4), 1.0):
        with pytest.raises(ValueError, match="matrix must be square"):
            noise.read_matrix(bad)


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".csv"])
def test_matrix_and_counts_come_from_files(tmp_path, suffix):
    labels, path = random_labels(100), tmp_path / f"array{suffix}"
    write = {".npy": np.save, ".npz": np.savez, ".csv": lambda p, a: np.savetxt(p, a, delimiter=",")}[suffix]
    write(path, symmetric_matrix(0.5))
    from_file = noise.apply(f"transition:matrix={path}", labels, num_classes=K)
    given = noise.apply("transition", labels, num_classes=K, matrix=symmetric_matrix(0.5))
    assert torch.equal(from_file.labels, given.labels)
    assert from_file.rule == f"transition:matrix={path}"
    write(path, np.full((100, K), 2.0))
    record = noise.apply(f"votes:counts={path}", labels, num_classes=K)
    assert record.labels.shape == (100, K)
    assert record.rate == pytest.approx(0.9)
    np.testing.assert_allclose(record.transition, 0.1, rtol=1e-6)


class Trap:
    """Write a pickle that leaves a trace when it is opened."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return Path.touch, (self.trace,)


def test_no_pickle_is_opened(tmp_path):
    trap, trace = np.array([Trap(tmp_path / "trace")], dtype=object), tmp_path / "trace"
    np.save(tmp_path / "matrix.npy", trap, allow_pickle=True)
    with pytest.raises(ValueError, match="matrix cannot be read"):
        noise.apply(f"transition:matrix={tmp_path / 'matrix.npy'}", [0, 1], num_classes=2)
    path = noise.apply("none", [0, 1], num_classes=2).save(tmp_path / "record")
    np.savez(path, labels=trap, clean_labels=trap)
    with pytest.raises(ValueError, match="is not a noise record"):
        NoisyLabels.load(path)
    assert not trace.exists()
    np.load(tmp_path / "matrix.npy", allow_pickle=True)
    assert trace.exists()  # the trap works


def test_a_rule_of_ones_own_is_checked():
    @NOISES.register
    def broken(labels, num_classes, *, to: int = 0):
        labels.fill_(to)  # in place: the rule gets a copy
        return labels

    try:
        labels = random_labels(50)
        before = labels.clone()
        assert noise.apply("broken:to=3", labels, num_classes=K).labels.unique().tolist() == [3]
        assert torch.equal(labels, before)
        with pytest.raises(ValueError, match=r"noisy labels must lie in 0..9, got 12"):
            noise.apply("broken:to=12", labels, num_classes=K)
    finally:
        NOISES._entries.pop("broken")


def test_open_set_exchanges_the_images():
    data, other = dataset(100), dataset(300, seed=50, name="other")
    before = data.train.x.clone()
    loaded = []

    def load(name):
        loaded.append(name)
        return other

    record = noise.apply("open_set:rate=0.4,source=other", data, seed=1, load=load)
    assert loaded == ["other"]
    assert record.rule == "open_set:rate=0.4,source=other"
    assert record.rate == pytest.approx(0.4)
    assert torch.equal(record.labels, data.train.labels)
    assert torch.equal(data.train.x, before)
    positions, sources = record.replaced.T
    assert torch.equal(record.images[positions], other.train.x[sources])
    kept = torch.ones(100, dtype=torch.bool).index_fill(0, positions, False)
    assert torch.equal(record.images[kept], before[kept])
    assert record.class_rates.sum() > 0
    assert torch.equal(record.transition, torch.eye(K, dtype=torch.float64))
    direct = noise.apply("open_set:rate=0.4", data, seed=1, source=other)
    assert torch.equal(direct.images, record.images)
    assert direct.rule == record.rule
    labels_alone = noise.apply("open_set:rate=0.4", data.train.labels, seed=1, num_classes=K, source=other.train.x)
    assert torch.equal(labels_alone.replaced, record.replaced)
    assert labels_alone.images is None
    with pytest.raises(ValueError, match=r"images of one kind, got \[3, 4, 4\] torch.uint8 and \[2\] torch.float32"):
        noise.apply("open_set:rate=0.4", data, source=torch.zeros(500, 2))
    with pytest.raises(ValueError, match="as tensors in memory"):
        noise.apply("open_set:rate=0.4", data, source=other.train.x.tolist())


# -- files -------------------------------------------------------------------------------------------------------------


def saved(tmp_path: Path, spec: str = "symmetric:rate=0.5", **more) -> tuple[SimpleNamespace, NoisyLabels, Path]:
    data = dataset(200)
    record = noise.apply(spec, data, seed=3, **more)
    return data, record, record.save(tmp_path / "made" / "noise_0.5")  # the dot is not a suffix


@pytest.mark.parametrize("written", ["noise_0.5", "noise_0.5.npz", "noise_0.5.json"])
def test_a_record_is_saved_and_read_back(tmp_path, written):
    data, record, path = saved(tmp_path)
    assert sorted(p.name for p in path.parent.iterdir()) == ["noise_0.5.json", "noise_0.5.npz"]
    back = noise.apply(f"file:path={path.parent / written}", data, seed=99)
    assert torch.equal(back.labels, record.labels)
    assert (back.rule, back.options, back.seed) == (record.rule, record.options, 3)  # the file's, not the caller's
    assert back.content_hash == record.content_hash
    assert (
        back.describe() == record.describe() == json.loads(path.with_name("noise_0.5.json").read_text(encoding="utf-8"))
    )
    direct = noise.file(data.train.labels.numpy(), K, path=str(path))
    assert np.array_equal(direct, record.labels.numpy())


def test_arrows_are_saved_and_read_back(tmp_path):
    arrows = {np.int64(9): np.int64(1), 2: 0}
    record = noise.apply("asymmetric:rate=0.4", dataset(300), mapping=arrows)
    record.save(tmp_path / "noisy")
    assert noise.NoisyLabels.load(tmp_path / "noisy").options["mapping"] == {"9": 1, "2": 0}


def test_soft_labels_are_saved_and_read_back(tmp_path):
    data, record, path = saved(tmp_path, "votes", counts=torch.rand(200, K, generator=seeded()))
    back = noise.apply(f"file:path={path}", data)
    assert torch.equal(back.labels, record.labels)
    assert back.rate == record.rate


def test_an_exchange_is_saved_and_read_back(tmp_path):
    other = dataset(300, seed=50)
    data, record, path = saved(tmp_path, "open_set:rate=0.5,source=other", load=lambda name: other)
    back = noise.apply(f"file:path={path}", data, load=lambda name: {"other": other}[name])
    assert torch.equal(back.images, record.images)
    with pytest.raises(ValueError, match="takes images from 'other': pass load="):
        noise.apply(f"file:path={path}", data)
    with pytest.raises(ValueError, match="replaces images, not labels"):
        noise.file(data.train.labels, K, path=str(path))


def released_file(tmp_path: Path, content: object) -> Path:
    """Write a noise file like the released code, with `json.dump(train_noisy_labels.tolist(), ...)`."""
    path = tmp_path / "cifar10_dependent_0.4.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_labels_of_the_released_code_are_read(tmp_path):
    data = dataset(200)
    labels = data.train.labels.clone()
    labels[:80] = (labels[:80] + 3) % K
    path = released_file(tmp_path, labels.tolist())
    record = noise.apply(f"file:path={path}", data, seed=7)
    assert torch.equal(record.labels, labels)
    assert torch.equal(record.clean_labels, data.train.labels)
    assert (record.rate, record.rule) == (0.4, f"file:path={path}")
    assert torch.equal(noise.file(data.train.labels, K, path=str(path)), labels)


def flipped(labels: torch.Tensor, n: int = 80) -> torch.Tensor:
    """Change the first n labels."""
    return torch.cat([(labels[:n] + 3) % K, labels[n:]])


@pytest.mark.parametrize("text", ["{}", "label\n{}\n", "{}\r\n", "\ufeff{}\n", "étiquette\n{}\n"])
def test_labels_are_read_from_csv(tmp_path, text):
    data, path = dataset(200), tmp_path / "noisy.csv"
    labels = flipped(data.train.labels)
    path.write_text(text.format("\n".join(map(str, labels.tolist()))), newline="", encoding="utf-8")
    record = noise.apply(f"file:path={path}", data)
    assert torch.equal(record.labels, labels)
    assert record.rate == 0.4


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.int32])
def test_labels_are_read_from_npy(tmp_path, dtype):
    data, path = dataset(200), tmp_path / "noisy.npy"
    labels = flipped(data.train.labels)
    np.save(path, labels.numpy().astype(dtype))
    assert torch.equal(noise.apply(f"file:path={path}", data).labels, labels)


@pytest.mark.parametrize("suffix", [".csv", ".npy"])
def test_soft_labels_are_read_from_a_file(tmp_path, suffix):
    data, path = dataset(200), tmp_path / f"soft{suffix}"
    soft = 0.6 * torch.eye(K)[data.train.labels] + 0.4 / K
    np.save(path, soft.numpy()) if suffix == ".npy" else np.savetxt(path, soft.numpy(), delimiter=",")
    record = noise.apply(f"file:path={path}", data)
    torch.testing.assert_close(record.labels, soft)
    assert record.rate == pytest.approx(0.36)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "cat\ndog\n", "is not a noise file: ValueError"),
        ("a.csv", "0.5\n" * 200, "a label must be a class number"),
        ("a.csv", "1,2\n3\n", "is not a noise file: ValueError"),
        ("a.csv", "0.5,0.6\n" * 200, "must hold probabilities of the classes"),
        ("a.csv", "", "the file is empty"),
        ("a.npy", "no array", "is not a noise file"),
        ("a.npy", np.zeros((2, 2, 2), np.int64), "must be a list of labels or of pairs"),
        ("a.npy", np.int64(3), "must be a list of labels or of pairs"),
        ("a.npy", np.full((200, K), np.nan), "must hold probabilities of the classes"),
        ("a.npy", np.array([None]), "is not a noise file"),
    ],
)
def test_other_files_are_a_sentence(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_text(content, encoding="utf-8") if isinstance(content, str) else np.save(path, content)
    with pytest.raises(ValueError, match=message):
        noise.apply(f"file:path={path}", dataset(200))


@pytest.mark.parametrize("suffix", [".csv", ".npy", ".json"])
@pytest.mark.timeout(60)
def test_a_fifo_in_place_of_a_file_is_not_waited_for(tmp_path, suffix):
    os.mkfifo(tmp_path / f"a{suffix}")
    with pytest.raises(ValueError, match=r"is not a noise file: OSError, .*it is not a regular file"):
        noise.apply(f"file:path={tmp_path / f'a{suffix}'}", dataset(200))
    with pytest.raises(ValueError, match=r"cannot be read as the file .*it is not a regular file"):
        read_matrix(tmp_path / f"a{suffix}")
    os.mkfifo(tmp_path / "record.json")
    with pytest.raises(ValueError, match=r"is not a noise record: OSError, .*it is not a regular file"):
        NoisyLabels.load(tmp_path / "record")


def test_a_record_of_some_examples_is_that_of_these_examples():
    data, other = dataset(200), dataset(300, seed=50)
    index = torch.randperm(200, generator=seeded())[:50].sort().values
    record = noise.apply("symmetric:rate=0.4", data)
    few = record.select(index)
    assert torch.equal(few.labels, record.labels[index])
    assert few.rate == pytest.approx(float(record.wrong[index].mean()))
    record = noise.apply("open_set:rate=0.5,source=other", data, load=lambda name: other)
    few = record.select(index)
    assert torch.equal(few.images, record.images[index])
    assert torch.equal(few.wrong, record.wrong[index])


def test_exchanges_of_the_released_code_are_read(tmp_path):
    data, other = dataset(200), dataset(300, seed=50)
    path = released_file(tmp_path, [[5, 299], [0, 7]])
    record = noise.apply(f"file:path={path},source=other", data, load={"other": other}.__getitem__)
    assert record.rate == 0.01
    assert torch.equal(record.labels, data.train.labels)
    assert record.images is not None
    assert torch.equal(record.images[[5, 0]], other.train.x[[299, 7]])
    assert torch.equal(record.images[1:5], data.train.x[1:5])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([0, 1, 2], "noisy labels must be"),
        ([K] * 200, "noisy labels must lie in 0..9, got 10"),
        ([0.5] * 200, "is not a noise file: TypeError"),
        ([[1, 2], [3]], "is not a noise file: ValueError"),
        (["cat"] * 200, "is not a noise file: TypeError"),
        ([[1, 2, 3]] * 200, "a list of labels or of pairs, got the shape"),
        ([[1, 2]], "name their dataset, as in file:path="),
    ],
)
def test_other_json_is_no_noise_file(tmp_path, content, message):
    path = released_file(tmp_path, content)
    with pytest.raises(ValueError, match=message):
        noise.apply(f"file:path={path}", dataset(200))


def test_released_files_belong_to_their_data(tmp_path):
    data = dataset(2000)
    path = released_file(tmp_path, data.train.labels[torch.randperm(2000, generator=seeded())].tolist())
    with pytest.raises(ValueError, match=r"Only \d+\.\d% of the labels in .* are the true ones"):
        noise.apply(f"file:path={path}", data)
    for pairs, message in [
        ([[5, 1], [5, 2]], "must be different"),
        ([[2000, 1]], "lie in 0..1999"),
        ([[1, -1]], "not be negative"),
    ]:
        path = released_file(tmp_path, pairs)
        with pytest.raises(ValueError, match=message):
            noise.apply(f"file:path={path},source=other", data, load=lambda name: data)
    path = released_file(tmp_path, [[0, 2000]])
    with pytest.raises(ValueError, match="takes image 2000 of a source with 2000"):
        noise.apply(f"file:path={path},source=other", data, load=lambda name: data)


def test_a_record_belongs_to_its_data(tmp_path):
    data, _, path = saved(tmp_path)
    labels = data.train.labels
    for other, k, message in [
        (labels, K + 1, "has 10 classes, the data 11"),
        (labels[:-1], K, "has 200 labels, the data 199"),
        (labels.flip(0), K, "made for other true labels, or for the same in another order"),
    ]:
        with pytest.raises(ValueError, match=message):
            noise.apply(f"file:path={path}", other, num_classes=k)
        with pytest.raises(ValueError, match=message):
            noise.file(other, k, path=str(path))


def test_a_changed_record_is_refused(tmp_path):
    data, record, path = saved(tmp_path)
    about = path.with_name("noise_0.5.json")
    original = about.read_text(encoding="utf-8"), path.read_bytes()

    def attempt(message):
        with pytest.raises(ValueError, match=message):
            noise.apply(f"file:path={path}", data)
        about.write_text(original[0], encoding="utf-8")
        path.write_bytes(original[1])

    about.write_text(original[0].replace("rate=0.5", "rate=0.4"), encoding="utf-8")
    attempt("was changed after it was saved")
    labels = record.labels.numpy().copy()
    labels[0] = (labels[0] + 1) % K
    np.savez(path, labels=labels, clean_labels=record.clean_labels.numpy())
    attempt("was changed after it was saved")
    path.write_bytes(original[1][:-40])
    attempt("is not a noise record")
    path.write_bytes(b"")
    attempt("is not a noise record")
    np.savez(path, labels=np.array([{}], dtype=object))
    attempt("is not a noise record")
    about.write_text("{", encoding="utf-8")
    attempt("is not a noise record")
    about.write_text("[]", encoding="utf-8")
    attempt("is not a noise record")
    noise.apply(f"file:path={path}", data)  # restored: valid again
    about.unlink()
    with pytest.raises(ValueError, match=r"There is no noise record .*noise_0.5.json is missing"):
        noise.apply(f"file:path={path}", data)


def test_no_byte_of_the_arrays_can_change_unseen(tmp_path):
    """Any flipped byte is rejected in one sentence, unless it has no meaning (a date inside the archive)."""
    _, record, path = saved(tmp_path)
    original, refused = path.read_bytes(), 0
    for at in range(0, len(original), 7):
        path.write_bytes(original[:at] + bytes([original[at] ^ 0xFF]) + original[at + 1 :])
        try:
            back = NoisyLabels.load(path)
            assert torch.equal(back.labels, record.labels)
        except ValueError:
            refused += 1
    assert refused > 0.7 * len(original) / 7


def test_a_consistent_forgery_with_impossible_labels_is_refused(tmp_path):
    clean = torch.zeros(5, dtype=torch.long)
    forged = NoisyLabels(clean + 12, clean, 10, "none", {}, 0)
    with pytest.raises(ValueError, match=r"noisy labels must lie in 0..9, got 12"):
        NoisyLabels.load(forged.save(tmp_path / "forged"))


def test_a_failed_save_leaves_the_old_record_and_no_draft(tmp_path, monkeypatch):
    data, record, path = saved(tmp_path)

    def fail(stream, **arrays):
        stream.write(b"half")
        raise OSError("disk full")

    with monkeypatch.context() as patch:  # every file appears by renaming
        patch.setattr(os, "replace", lambda draft, path: None)
        noise.apply("symmetric:rate=0.1", data).save(path)
    assert noise.apply(f"file:path={path}", data).content_hash == record.content_hash
    monkeypatch.setattr(np, "savez_compressed", fail)
    with pytest.raises(OSError, match="disk full"):
        noise.apply("symmetric:rate=0.1", data).save(path)
    assert sorted(p.name for p in path.parent.iterdir()) == ["noise_0.5.json", "noise_0.5.npz"]
    assert noise.apply(f"file:path={path}", data).content_hash == record.content_hash


# -- preview -----------------------------------------------------------------------------------------------------------


def printed(renderable, width: int = 80) -> str:
    from rich.console import Console

    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_preview_shows_rates_and_matrix_in_eighty_columns():
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    clean = torch.arange(10_000) % K
    record = noise.apply("asymmetric:rate=0.4,draw=per_class", clean, num_classes=K, mapping=CIFAR10_ARROWS)
    lines = printed(noise_preview(record, names)).splitlines()
    assert lines[0] == "asymmetric:rate=0.4,draw=per_class, seed 0"
    assert lines[1].startswith("20.00 % of 10,000 labels are wrong")
    rows = {line.split()[0]: line.split()[1:] for line in lines if line and line.split()[0] in names}
    assert rows["cat"] == ["1,000", "40.0", ".", ".", ".", "60.0", ".", "40.0", ".", ".", ".", "."]
    assert rows["ship"][:2] == ["1,000", "0.0"]
    assert rows["ship"][-2] == "100"


def test_preview_names_the_largest_confusions_of_many_classes():
    clean = torch.arange(100_000) % 100
    matrix = np.eye(100)
    matrix[17, [17, 3]] = 0.25, 0.75
    matrix[4, [4, 90]] = 0.5, 0.5
    record = noise.apply("transition", clean, num_classes=100, matrix=matrix)
    lines = printed(noise_preview(record, [f"class{c}" for c in range(100)])).splitlines()
    confusions = [line.split()[:2] for line in lines if line.startswith("class")]
    assert confusions == [["class17", "class3"], ["class4", "class90"]]
    assert "wrong per class: least 0.0 %" in lines[2]
    assert "(class17)" in lines[2] + lines[3]


def test_preview_of_replaced_images_and_of_soft_labels():
    data = dataset(100)
    assert "40.00 % of 100 images are replaced" in printed(
        noise_preview(noise.apply("open_set:rate=0.4", data, source=torch.zeros(99, 3, 4, 4, dtype=torch.uint8)))
    )
    assert "90.00 % of 100 labels are wrong" in printed(
        noise_preview(noise.apply("votes", data, counts=np.ones((100, K))))
    )


# -- against the noise files that were published with the paper's code -------------------------------------------------


RELEASED = Path(os.environ.get("LOGITCLIP_DATA", "data")) / "cifar10_labels.npz"


@pytest.mark.slow
@pytest.mark.skipif(not RELEASED.is_file(), reason="$LOGITCLIP_DATA is no folder with cifar10_labels.npz")
def test_noise_is_that_of_the_released_files(tmp_path):
    """Counts, rates per class and matrices agree within the error of two draws. The files are for CIFAR-10 at 0.4."""
    files = np.load(RELEASED, allow_pickle=False)
    clean = files["train"].astype(np.int64)
    n, sizes = len(clean), np.bincount(clean)
    four_errors = 4 * np.sqrt(0.4 * 0.6 / sizes * (1 - sizes / n))  # of one class, when the total is exact
    ours = {
        "symmetric": noise.symmetric(clean, K, rate=0.4, generator=seeded()),
        "asymmetric": noise.asymmetric(clean, K, rate=0.4, mapping=CIFAR10_ARROWS, generator=seeded()),
    }
    matrices = {"symmetric": symmetric_matrix(0.4), "asymmetric": arrow_matrix(0.4, CIFAR10_ARROWS)}
    for name, made in ours.items():
        released = files[f"logitclip_{name}_0.4"].astype(np.int64)
        touched = matrices[name].diagonal() < 1
        for labels in (made, released):
            rates = np.bincount(clean[labels != clean], minlength=K) / sizes
            assert (np.abs(rates - 0.4 * touched) <= four_errors * touched).all()
            assert_rows_follow(table(clean, labels), matrices[name])
        if name == "symmetric":
            assert (made != clean).sum() == (released != clean).sum() == 20_000
        for row in range(K):  # two samples of one distribution
            both = np.stack([np.bincount(labels[clean == row], minlength=K) for labels in (made, released)])
            both = both[:, both.sum(0) > 0]
            assert both.shape[1] == 1 or stats.chi2_contingency(both).pvalue > 1e-6

    dependent = files["logitclip_dependent_0.4"].astype(np.int64)
    images = np.random.default_rng(0).normal(size=(n, 50))  # images do not decide which labels flip
    made = noise.instance(clean, K, rate=0.4, variant="released", images=images, generator=seeded())
    for labels in (made, dependent):
        assert (labels != clean).sum() == 20_000
        rates = np.bincount(clean[labels != clean], minlength=K) / sizes
        assert (np.abs(rates - 0.4) <= four_errors).all()
    read = noise.apply(f"file:path={released_file(tmp_path, dependent.tolist())}", clean, num_classes=K)
    assert read.rate == 0.4

    exchange = files["logitclip_open_0.4_pairs"]
    pairs = noise.open_set(clean, K, rate=0.4, source=range(50_000), generator=seeded())
    for one in (exchange, pairs):
        assert one.shape == (20_000, 2)
        assert len(set(one[:, 0].tolist())) == len(set(one[:, 1].tolist())) == 20_000
        rates = np.bincount(clean[one[:, 0]], minlength=K) / sizes
        assert (np.abs(rates - 0.4) <= four_errors).all()
