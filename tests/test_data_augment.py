"""Augmentation: every output is a window of the padded, perhaps mirrored input, and all windows are equally likely."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad

from logitclip.data.augment import AUGMENTS, crop, flip_crop, none, normalise, transform


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def images(n, channels=3, height=8, width=8, seed=1):
    """Make images without zero pixels, so that padding differs from content."""
    return torch.randint(1, 256, (n, channels, height, width), generator=generator(seed), dtype=torch.uint8)


def windows(image, height, width):
    """Return every window of `image` and of its mirror image: {(mirrored, top, left): pixels}."""
    return {
        (mirrored, top, left): view[:, top : top + height, left : left + width]
        for mirrored, view in enumerate((image, image.flip(-1)))
        for top in range(image.shape[1] - height + 1)
        for left in range(image.shape[2] - width + 1)
    }


def which(output, candidates):
    found = [key for key, view in candidates.items() if torch.equal(output, view)]
    assert len(found) == 1, "the output is not exactly one of the windows"
    return found[0]


@given(
    n=st.integers(1, 5),
    channels=st.integers(1, 4),
    height=st.integers(4, 9),
    width=st.integers(4, 9),
    padding=st.integers(0, 3),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_flip_crop_cuts_windows_out_of_the_padded_images(n, channels, height, width, padding, seed):
    x = images(n, channels, height, width)
    out = flip_crop(x, generator(seed), padding=padding)
    assert out.shape == x.shape
    assert out.dtype == torch.uint8
    for image, result in zip(pad(x, [padding] * 4), out, strict=True):
        which(result, windows(image, height, width))


def test_every_shift_and_mirror_is_equally_likely():
    n, padding = 40_500, 1
    x = images(1, 1, 4, 4).expand(n, 1, 4, 4)
    out = flip_crop(x, generator(), padding=padding)
    flat = out.flatten(1).to(torch.int64)
    table = windows(pad(x[0], [padding] * 4), 4, 4)
    counts = torch.tensor([int((flat == view.flatten().to(torch.int64)).all(1).sum()) for view in table.values()])
    assert len(counts) == 18
    assert int(counts.sum()) == n
    expected = n / 18
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 50  # 17 degrees of freedom: p = 4e-5


def test_crop_cuts_random_squares_and_evaluates_the_centre():
    x = images(200, 3, 10, 12)
    out = crop(x, generator(), size=7)
    assert out.shape == (200, 3, 7, 7)
    seen = {which(result, windows(image, 7, 7)) for image, result in zip(x, out, strict=True)}
    assert {mirrored for mirrored, _, _ in seen} == {0, 1}
    assert {top for _, top, _ in seen} == set(range(4))
    assert {left for _, _, left in seen} == set(range(6))
    assert torch.equal(crop(x, None, size=7), x[:, :, 1:8, 2:9])


@pytest.mark.parametrize("spec", ["none", "flip_crop:padding=2", "crop:size=6"])
def test_augmentation_is_pure_and_repeatable(spec):
    x, augment = images(64), AUGMENTS.build(spec)
    before, state = x.clone(), torch.get_rng_state()
    first, again, other = (augment(x, generator(seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert spec == "none" or not torch.equal(first, other)
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), state), "the global generator was used"


def test_a_generator_gives_new_views_each_time():
    x, g = images(64), generator()
    assert not torch.equal(flip_crop(x, g), flip_crop(x, g))


def test_without_a_generator_nothing_is_random():
    x = images(5)
    assert torch.equal(flip_crop(x, None), x)
    assert torch.equal(none(x, None), x)


def test_inputs_of_any_memory_layout():
    x = images(6, 3, 8, 8)
    strided = x.to(memory_format=torch.channels_last)
    assert torch.equal(flip_crop(strided, generator()), flip_crop(x, generator()))
    assert torch.equal(crop(strided, generator(), size=5), crop(x, generator(), size=5))


def test_floats_are_augmented_as_bytes_are():
    x = images(32)
    assert torch.equal(flip_crop(x.float(), generator()), flip_crop(x, generator()).float())
    assert torch.equal(crop(x.float(), generator(), size=5), crop(x, generator(), size=5).float())


def test_empty_batches_stay_empty():
    assert flip_crop(images(0), generator()).shape == (0, 3, 8, 8)
    assert crop(images(0), generator(), size=4).shape == (0, 3, 4, 4)


def test_normalise_is_the_definition():
    x, mean, std = images(4), (0.492, 0.482, 0.446), (0.247, 0.244, 0.262)
    m, s = (torch.tensor(v, dtype=torch.float64).view(3, 1, 1) for v in (mean, std))
    expected = (x.double() / 255 - m) / s
    out = normalise(x, mean, std)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)


def test_normalise_leaves_features_alone_and_scales_bytes():
    features = torch.randn(4, 7, generator=generator())
    assert torch.equal(normalise(features), features)
    assert float(normalise(images(3)).max()) <= 1
    before = features.clone()
    out = normalise(features, (1.0,) * 7, (2.0,) * 7)
    torch.testing.assert_close(out, (before - 1) / 2)
    assert torch.equal(features, before), "the input was changed"


def test_padding_is_black_before_normalisation():
    view = transform("flip_crop:padding=4", (0.5, 0.4, 0.3), (0.25, 0.2, 0.1))
    out = view(torch.full((64, 3, 8, 8), 255, dtype=torch.uint8), generator())
    black, white = torch.tensor([-2.0, -2.0, -3.0]), torch.tensor([2.0, 3.0, 7.0])
    for channel in range(3):
        torch.testing.assert_close(out[:, channel].unique(), torch.stack([black[channel], white[channel]]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: flip_crop(images(2), generator(), padding=-1),
            "padding must be between 0 and 8 for 8x8",
        ),
        (lambda: flip_crop(torch.zeros(4, 7), generator()), r"needs images \[N, C, H, W\], got shape \(4, 7\)"),
        (lambda: crop(images(2), generator(), size=9), "size must be between 1 and 8 for 8x8 images, got 9"),
        (lambda: crop(images(2), None, size=0), "got 0"),
        (lambda: normalise(images(2), (0.5,), (0.5,)), "1 means and 1 deviations do not fit"),
        (lambda: transform("flipcrop"), "Did you mean 'flip_crop'"),
        (lambda: transform("flip_crop:pad=4"), "has no knob 'pad'"),
    ],
)
def test_wrong_use_is_one_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_it_is_faster_than_image_by_image():
    """A loose bound for any machine; benchmarks/data.py measures the real factor."""
    import time

    x, view, g = images(256, 3, 32, 32), transform("flip_crop", (0.5,) * 3, (0.25,) * 3), generator()
    view(x, g)

    def seconds(function):
        best = math.inf
        for _ in range(3):
            start = time.thread_time()
            function()
            best = min(best, time.thread_time() - start)
        return best

    assert seconds(lambda: view(x, g)) * 3 < seconds(lambda: [view(image[None], g) for image in x])
