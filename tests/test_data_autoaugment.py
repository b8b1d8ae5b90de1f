"""Every operation against Pillow, image by image, and the policy against the table in SOP's code."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from logitclip.data.autoaugment import OPERATIONS, POLICY, autoaugment, cutout

# data_loader/augmentation_archive.py of SOP, autoaug_paper_cifar10: (name, probability, level).
STATED = """
Invert .1 7 Contrast .2 6; Rotate .7 2 TranslateXAbs .3 9; Sharpness .8 1 Sharpness .9 3;
ShearY .5 8 TranslateYAbs .7 9; AutoContrast .5 8 Equalize .9 2; ShearY .2 7 Posterize2 .3 7;
Color .4 3 Brightness .6 7; Sharpness .3 9 Brightness .7 9; Equalize .6 5 Equalize .5 1;
Contrast .6 7 Sharpness .6 5; Color .7 7 TranslateXAbs .5 8; Equalize .3 7 AutoContrast .4 8;
TranslateYAbs .4 3 Sharpness .2 6; Brightness .9 6 Color .2 6; Solarize .5 2 Invert 0 3;
Equalize .2 0 AutoContrast .6 0; Equalize .2 8 Equalize .6 4; Color .9 9 Equalize .6 6;
AutoContrast .8 4 Solarize .2 8; Brightness .1 3 Color .7 0; Solarize .4 5 AutoContrast .9 3;
TranslateYAbs .9 9 TranslateYAbs .7 9; AutoContrast .9 2 Solarize .8 3; Equalize .8 8 Invert .1 3;
TranslateYAbs .7 9 AutoContrast .9 1
"""
NAMES = {"translatexabs": "translate_x", "translateyabs": "translate_y", "sheary": "shear_y", "color": "colour"}
NAMES |= {"posterize2": "posterize"}


def magnitude(name: str, level: int) -> float:
    """Return the magnitude that SOP's code derives from a level between 0 and 10."""
    if name in ("Contrast", "Color", "Brightness", "Sharpness"):
        return level * 1.8 / 10 + 0.1
    whole = {
        "Rotate": int(level * 30 / 10),
        "Solarize": 256 - int(level * 256 / 10),
        "Posterize2": 4 - int(level * 4 / 10),
    }
    plain = {"ShearY": level * 0.3 / 10, "TranslateXAbs": level, "TranslateYAbs": level}
    return (whole | plain).get(name, 0.0)


def test_the_policy_is_the_published_one() -> None:
    stated = []
    for line in STATED.split(";"):
        words = line.split()
        pair = [(words[i], float(words[i + 1]), int(words[i + 2])) for i in (0, 3)]
        stated.append(
            [(NAMES.get(n.lower(), n.lower()), p, pytest.approx(magnitude(n, level))) for n, p, level in pair]
        )
    assert [[*pair] for pair in POLICY] == stated


def affine(*matrix: float):
    return lambda image: image.transform(image.size, Image.Transform.AFFINE, matrix)


PILLOW = {
    ("translate_x", 9.0): affine(1, 0, 9, 0, 1, 0),
    ("translate_y", 3.0): affine(1, 0, 0, 0, 1, 3),
    ("shear_y", 0.24): affine(1, 0, 0, 0.24, 1, 0),
    ("rotate", 6.0): lambda image: image.rotate(6),
    ("brightness", 1.72): lambda image: ImageEnhance.Brightness(image).enhance(1.72),
    ("brightness", 0.64): lambda image: ImageEnhance.Brightness(image).enhance(0.64),
    ("contrast", 1.36): lambda image: ImageEnhance.Contrast(image).enhance(1.36),
    ("colour", 0.1): lambda image: ImageEnhance.Color(image).enhance(0.1),
    ("colour", 1.72): lambda image: ImageEnhance.Color(image).enhance(1.72),
    ("sharpness", 0.28): lambda image: ImageEnhance.Sharpness(image).enhance(0.28),
    ("sharpness", 1.72): lambda image: ImageEnhance.Sharpness(image).enhance(1.72),
    ("autocontrast", 0.0): ImageOps.autocontrast,
    ("equalize", 0.0): ImageOps.equalize,
    ("invert", 0.0): ImageOps.invert,
    ("solarize", 52.0): lambda image: ImageOps.solarize(image, 52),
    ("posterize", 2.0): lambda image: ImageOps.posterize(image, 2),
}


def pictures() -> torch.Tensor:
    """Make four images: noise, low-contrast noise, a ramp, and one colour."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (2, 3, 32, 32), generator=generator, dtype=torch.uint8)
    narrow = torch.randint(90, 130, (2, 3, 32, 32), generator=generator, dtype=torch.uint8)
    ramp = torch.arange(3 * 32 * 32).mul(255).div(3 * 32 * 32).to(torch.uint8).view(1, 3, 32, 32)
    return torch.cat([noise, narrow, ramp, torch.full((1, 3, 32, 32), 77, dtype=torch.uint8)])


@pytest.mark.parametrize(("name", "value"), PILLOW)
def test_operations_are_pillows(name: str, value: float) -> None:
    x = pictures()
    ours = OPERATIONS[name](x, value, torch.ones(len(x)))
    assert ours.dtype == torch.uint8
    for image, got in zip(x, ours, strict=True):
        expected = PILLOW[name, value](Image.fromarray(image.permute(1, 2, 0).numpy()))
        assert np.array_equal(np.asarray(expected), got.permute(1, 2, 0).numpy())


def test_every_operation_is_compared() -> None:
    assert {name for name, _ in PILLOW} == set(OPERATIONS) == {name for pair in POLICY for name, _, _ in pair}


def test_signs_mirror_the_geometry() -> None:
    x = pictures()
    both = OPERATIONS["translate_x"](x[:2], 9.0, torch.tensor([1.0, -1.0]))
    assert torch.equal(both[0, :, :, :23], x[0, :, :, 9:])
    assert torch.equal(both[1, :, :, 9:], x[1, :, :, :23])
    assert not both[0, :, :, 23:].any()
    assert not both[1, :, :, :9].any()


def test_sub_policies_are_drawn_evenly_and_the_input_stays() -> None:
    x = torch.randint(0, 256, (3000, 1, 8, 8), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    before = x.clone()
    one, again = (autoaugment(x, torch.Generator().manual_seed(2)) for _ in range(2))
    assert torch.equal(one, again)
    assert torch.equal(x, before)
    assert torch.equal(autoaugment(x, None), x)
    inverted = (one == 255 - x).flatten(1).all(1).float().mean().item()
    # Sub-policies 1, 15 (which never inverts) and 24 invert; alone only without the other operation of the pair.
    assert inverted == pytest.approx((0.1 * 0.8 + 0.1 * 0.2) / 25, abs=0.004)


@pytest.mark.parametrize("x", [torch.zeros(2, 3, 8, 8), torch.zeros(2, 5, dtype=torch.uint8)])
def test_other_inputs_are_refused(x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="autoaugment needs uint8 images"):
        autoaugment(x, torch.Generator())


def test_cutout_is_a_square_cut_at_the_border() -> None:
    x = torch.ones(400, 2, 32, 32)
    out = cutout(x, torch.Generator().manual_seed(0), 16)
    assert (x == 1).all()
    assert torch.equal(out[:, 0], out[:, 1])
    sides = torch.stack([(out[:, 0] == 0).any(2).sum(1), (out[:, 0] == 0).any(1).sum(1)], 1)
    assert torch.equal((out[:, 0] == 0).sum((1, 2)), sides.prod(1))
    assert sides.min() == 8
    assert sides.max() == 16
