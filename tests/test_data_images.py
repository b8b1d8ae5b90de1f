"""Image files of every mode, decoded on demand; every file is written here."""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from logitclip.data import batches
from logitclip.data._images import ImageFiles, read_all
from logitclip.data.dataset import Split

Image = pytest.importorskip("PIL.Image")

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def write_image(path: Path, colour=RED, size=(20, 16)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path, **({"quality": 95} if path.suffix in (".jpg", ".JPEG") else {}))
    return path


def quadrants(size=(64, 64)) -> Any:
    """Make an image with red, green / blue, white corners, which differs from all its rotations."""
    w, h = size[0] // 2, size[1] // 2
    image = Image.new("RGB", size, (255, 255, 255))
    for colour, place in ((RED, (0, 0)), (GREEN, (w, 0)), (BLUE, (0, h))):
        image.paste(colour, (*place, place[0] + w, place[1] + h))
    return image


def corners(image: torch.Tensor) -> list[tuple[int, ...]]:
    """Return the colours near the four corners, rounded to 0 or 255."""
    near = image[:, [1, 1, -2, -2], [1, -2, 1, -2]].T
    return [tuple(c) for c in (near.int() // 128 * 255).tolist()]


def test_images_have_one_shape_and_come_out_the_same_every_time(tmp_path):
    for i, size in enumerate([(40, 30), (30, 40), (7, 200), (32, 32)]):
        write_image(tmp_path / f"{i}.png", size=size)
    images = ImageFiles(tmp_path, [f"{i}.png" for i in range(4)], size=32)
    batch = images[torch.tensor([3, 0, 1, 2])]
    assert len(images) == 4
    assert images.shape == (4, 3, 32, 32)
    assert batch.shape == (4, 3, 32, 32)
    assert batch.dtype == torch.uint8
    assert batch.is_contiguous()
    assert torch.equal(batch, images[torch.tensor([3, 0, 1, 2])])
    assert torch.equal(batch[1], images.decode(0))
    assert torch.equal(pickle.loads(pickle.dumps(images))[torch.tensor([3, 0, 1, 2])], batch)
    assert images[torch.tensor([], dtype=torch.int64)].shape == (0, 3, 32, 32)
    assert torch.equal(images.select(torch.tensor([2, 0]))[torch.tensor([1, 0])], batch[[1, 3]])
    assert len(images) == 4


def test_the_centre_square_is_kept(tmp_path):
    """Of a wide or tall image with red, green and blue thirds, the green third remains."""
    wide = Image.new("RGB", (90, 30), RED)
    wide.paste(GREEN, (30, 0, 60, 30))
    wide.paste(BLUE, (60, 0, 90, 30))
    wide.save(tmp_path / "wide.png")
    wide.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "tall.png")
    for image in ImageFiles(tmp_path, ["wide.png", "tall.png"], size=30)[torch.arange(2)]:
        assert torch.equal(image, torch.tensor(GREEN, dtype=torch.uint8).view(3, 1, 1).expand(3, 30, 30))


def test_the_scaled_image_is_pillows_resize_then_centre_crop(tmp_path):
    rng = np.random.default_rng(0)
    smooth = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize(
        (400, 300), Image.Resampling.BICUBIC
    )
    smooth.save(tmp_path / "x.png")
    expected = np.asarray(smooth.resize((128, 96), Image.Resampling.BILINEAR).crop((16, 0, 112, 96)), dtype=int)
    got = ImageFiles(tmp_path, ["x.png"], size=96).decode(0).permute(1, 2, 0).numpy().astype(int)
    assert np.abs(got - expected).max() <= 1


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_tags_are_obeyed(tmp_path, orientation):
    upright = quadrants()
    undo = {
        2: 0,
        3: 3,
        4: 1,
        5: 5,
        6: 2,
        7: 6,
        8: 4,
    }  # the Pillow Transpose from the upright image to the stored one
    stored = upright if orientation == 1 else upright.transpose(Image.Transpose(undo[orientation]))
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / "x.png", exif=exif)
    assert corners(ImageFiles(tmp_path, ["x.png"], 32).decode(0)) == [RED, GREEN, BLUE, (255, 255, 255)]


@pytest.mark.filterwarnings("error")
def test_a_broken_exif_block_is_ignored(tmp_path):
    quadrants().save(tmp_path / "x.jpg", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff broken", quality=95)
    assert corners(ImageFiles(tmp_path, ["x.jpg"], 32).decode(0))[0] == RED


@pytest.mark.parametrize(
    ("mode", "suffix"), [("L", "png"), ("1", "png"), ("LA", "png"), ("RGBA", "png"), ("P", "gif"), ("CMYK", "jpg")]
)
def test_every_mode_becomes_rgb(tmp_path, mode, suffix):
    image = quadrants().convert(mode)
    image.save(tmp_path / f"x.{suffix}")
    seen = corners(ImageFiles(tmp_path, [f"x.{suffix}"], 64).decode(0))
    assert seen[3] == (255, 255, 255)
    if mode in ("RGBA", "P", "CMYK"):
        assert seen[:3] == [RED, GREEN, BLUE]


def test_palettes_with_transparency_and_16_bits(tmp_path):
    quadrants().convert("P").save(tmp_path / "p.png", transparency=bytes(range(256)))
    assert corners(ImageFiles(tmp_path, ["p.png"], 64).decode(0))[:3] == [RED, GREEN, BLUE]
    ramp = np.linspace(0, 65535, 64).astype(np.uint16)[None].repeat(64, 0)
    Image.fromarray(ramp).save(tmp_path / "deep.png")
    got = ImageFiles(tmp_path, ["deep.png"], 64).decode(0)
    assert torch.equal(got[0, 0], torch.from_numpy((ramp[0] >> 8).astype(np.uint8)))


def test_a_large_jpeg_is_close_to_its_full_decode(tmp_path):
    """Decoding at a fraction of the size must not lose detail."""
    cells = np.random.default_rng(0).integers(0, 256, (80, 80, 3), dtype=np.uint8)
    Image.fromarray(cells).resize((1600, 1600), Image.Resampling.BICUBIC).save(tmp_path / "x.jpg", quality=95)
    expected = np.asarray(Image.open(tmp_path / "x.jpg").resize((160, 160), Image.Resampling.BILINEAR), dtype=int)
    got = ImageFiles(tmp_path, ["x.jpg"], 160).decode(0).permute(1, 2, 0).numpy().astype(int)
    assert np.abs(got - expected).mean() < 1  # 2 with half the margin


def test_a_damaged_or_missing_image_is_one_sentence_with_its_path(tmp_path):
    data = io.BytesIO()
    quadrants((200, 200)).save(data, "JPEG")
    (tmp_path / "cut.jpg").write_bytes(data.getvalue()[:600])
    (tmp_path / "text.jpg").write_text("<html>404</html>", encoding="utf-8")
    images = ImageFiles(tmp_path, ["cut.jpg", "text.jpg", "gone.jpg"], 32)
    for i, name in enumerate(["cut.jpg", "text.jpg"]):
        with pytest.raises(ValueError, match=rf"{name} is not a readable image .*; repair it or remove it"):
            images.decode(i)
    with pytest.raises(ValueError, match=r"There is no image .*gone.jpg"):
        images[torch.tensor([2])]
    with pytest.raises(ValueError, match="size must be at least 1 pixel, got 0"):
        ImageFiles(tmp_path, [], 0)


def test_worker_processes_give_the_same_batches_and_sentences(tmp_path):
    for i in range(5):
        write_image(tmp_path / f"{i}.png", colour=(40 * i, 0, 0))
    (tmp_path / "4.jpg").write_text("no image", encoding="utf-8")
    names = [f"{i}.png" for i in range(5)]
    split = Split(ImageFiles(tmp_path, names, 8), torch.arange(5))
    for index, x, y in batches(split, 2, workers=2):
        assert torch.equal(x, split.x[index])
        assert (x[:, 0, 0, 0].int() // 40).tolist() == y.tolist()
    with pytest.raises(ValueError, match=r"^[^(]*4.jpg is not a readable image \(.*\); repair it or remove it.$"):
        list(batches(Split(ImageFiles(tmp_path, ["4.jpg"], 8), torch.zeros(1).long()), 2, workers=1))


def test_without_pillow_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(ImportError, match=r"pip install 'logitclip\[data\]'"):
        ImageFiles(tmp_path, [])


def test_every_image_once_and_the_unreadable_ones_skipped(tmp_path, caplog):
    for i in range(3):
        write_image(tmp_path / f"{i}.png", colour=(80 * i, 0, 0))
    (tmp_path / "cut.jpg").write_text("no image", encoding="utf-8")
    files = ImageFiles(tmp_path, ["0.png", "cut.jpg", "1.png", "2.png"], 8)
    images, kept = read_all(files)
    assert kept.tolist() == [0, 2, 3]
    assert torch.equal(images, files[kept])
    assert len(caplog.messages) == 1
    assert "cut.jpg is not a readable image" in caplog.messages[0]
    assert files.sizes(torch.tensor([0, 1])).tolist() == [[20, 16], [0, 0]]
