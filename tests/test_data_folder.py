"""Image files and the layouts they come in; every file is written here, in the format of the real ones."""

import io
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from logitclip.data import batches
from logitclip.data.dataset import DATASETS, Split
from logitclip.data.folder import ANIMAL10N, CLOTHING1M, ImageFiles, folder, read_list, stratified_split

Image = pytest.importorskip("PIL.Image")

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def write_image(path: Path, colour=RED, size=(20, 16)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path, **({"quality": 95} if path.suffix in (".jpg", ".JPEG") else {}))
    return path


def quadrants(size=(64, 64)) -> "Image.Image":
    """Red, green / blue, white: no two turns of it look the same."""
    w, h = size[0] // 2, size[1] // 2
    image = Image.new("RGB", size, (255, 255, 255))
    for colour, place in ((RED, (0, 0)), (GREEN, (w, 0)), (BLUE, (0, h))):
        image.paste(colour, (*place, place[0] + w, place[1] + h))
    return image


def corners(image: torch.Tensor) -> list[tuple[int, ...]]:
    """The colours near the four corners, rounded to 0 or 255."""
    near = image[:, [1, 1, -2, -2], [1, -2, 1, -2]].T
    return [tuple(c) for c in (near.int() // 128 * 255).tolist()]


# -- decoding --------------------------------------------------------------------------------------------------------


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
    """A wide image with red, green and blue thirds: the green third is what is left; and so for a tall one."""
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
    }  # Pillow's Transpose that makes the stored image from the upright one
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
    """Decoding at a fraction of the size is for speed: it may not cost detail."""
    cells = np.random.default_rng(0).integers(0, 256, (80, 80, 3), dtype=np.uint8)
    Image.fromarray(cells).resize((1600, 1600), Image.Resampling.BICUBIC).save(tmp_path / "x.jpg", quality=95)
    expected = np.asarray(Image.open(tmp_path / "x.jpg").resize((160, 160), Image.Resampling.BILINEAR), dtype=int)
    got = ImageFiles(tmp_path, ["x.jpg"], 160).decode(0).permute(1, 2, 0).numpy().astype(int)
    assert np.abs(got - expected).mean() < 1  # 2 with half the margin


def test_a_damaged_or_missing_image_is_one_sentence_with_its_path(tmp_path):
    data = io.BytesIO()
    quadrants((200, 200)).save(data, "JPEG")
    (tmp_path / "cut.jpg").write_bytes(data.getvalue()[:600])
    (tmp_path / "text.jpg").write_text("<html>404</html>")
    images = ImageFiles(tmp_path, ["cut.jpg", "text.jpg", "gone.jpg"], 32)
    for i, name in enumerate(["cut.jpg", "text.jpg"]):
        with pytest.raises(ValueError, match=rf"{name} is not a readable image .*; repair it or take it out"):
            images.decode(i)
    with pytest.raises(ValueError, match=r"There is no image .*gone.jpg"):
        images[torch.tensor([2])]
    with pytest.raises(ValueError, match="size must be at least 1 pixel, got 0"):
        ImageFiles(tmp_path, [], 0)


def test_worker_processes_give_the_same_batches_and_sentences(tmp_path):
    for i in range(5):
        write_image(tmp_path / f"{i}.png", colour=(40 * i, 0, 0))
    (tmp_path / "4.jpg").write_text("no image")
    names = [f"{i}.png" for i in range(5)]
    split = Split(ImageFiles(tmp_path, names, 8), torch.arange(5))
    for index, x, y in batches(split, 2, workers=2):
        assert torch.equal(x, split.x[index])
        assert (x[:, 0, 0, 0].int() // 40).tolist() == y.tolist()
    with pytest.raises(
        ValueError, match=r"^\S*4.jpg is not a readable image \(.*\); repair it or take it out of the data.$"
    ):
        list(batches(Split(ImageFiles(tmp_path, ["4.jpg"], 8), torch.zeros(1).long()), 2, workers=1))


def test_without_pillow_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(ImportError, match=r"pip install 'logitclip\[data\]'"):
        ImageFiles(tmp_path, [])


# -- one folder per class --------------------------------------------------------------------------------------------


def test_train_and_test_folders(tmp_path):
    for split, count in (("train", 3), ("val", 2)):
        for label, colour in (("b", BLUE), ("a", RED)):
            for i in range(count):
                write_image(tmp_path / split / label / f"{i}.jpg", colour)
    write_image(tmp_path / "train" / "a" / "deeper" / "x.PNG".lower())
    (tmp_path / "train" / "a" / "notes.txt").write_text("not an image")
    (tmp_path / "train" / "a" / "._0.jpg").write_text("hidden")
    (tmp_path / "train" / ".cache").mkdir()
    data = DATASETS.build(f"folder:path={tmp_path},size=16")()
    assert data.class_names == ("a", "b")
    assert data.train.labels.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert data.test.labels.tolist() == [0, 0, 1, 1]
    assert data.protocol["augment"] == "crop:size=14"
    assert data.train.x[torch.tensor([0, 6])].float().mean((2, 3)).argmax(1).tolist() == [0, 2]
    assert data.test.x[torch.tensor([0, 3])].float().mean((2, 3)).argmax(1).tolist() == [0, 2]


def test_the_path_may_be_within_the_root(tmp_path):
    for label in "ab":
        for i in range(5):
            write_image(tmp_path / "photos" / label / f"{i}.jpg")
    assert len(folder(tmp_path, path="photos").train) == 8
    with pytest.raises(ValueError, match=r"There is no folder .*/nowhere; write 'folder:path=...'"):
        folder(tmp_path, path="nowhere")


def test_one_level_holds_out_a_share_of_each_class_by_its_seed(tmp_path):
    for label, count in (("a", 20), ("b", 10)):
        for i in range(count):
            write_image(tmp_path / label / f"{i:02}.jpg")
    first, again, other = (folder(tmp_path, test=0.3, split_seed=s) for s in (0, 0, 1))
    assert torch.bincount(first.train.labels).tolist() == [14, 7]
    assert torch.bincount(first.test.labels).tolist() == [6, 3]
    names = {*first.train.x.names.tolist(), *first.test.x.names.tolist()}
    assert len(names) == 30
    assert np.array_equal(first.test.x.names, again.test.x.names)
    assert not np.array_equal(first.test.x.names, other.test.x.names)
    with pytest.raises(ValueError, match=r"test must be a share between 0 and 1, got 1.5"):
        folder(tmp_path, test=1.5)


def test_wrong_class_folders_are_named(tmp_path):
    write_image(tmp_path / "train" / "a" / "0.jpg")
    (tmp_path / "train" / "b").mkdir()
    with pytest.raises(ValueError, match=r"train/b holds no image \(.jpg"):
        folder(tmp_path)
    (tmp_path / "train" / "b").rmdir()
    with pytest.raises(ValueError, match="holds 1 classes; at least two"):
        folder(tmp_path, test=0.5)
    write_image(tmp_path / "train" / "b" / "0.jpg")
    write_image(tmp_path / "test" / "c" / "0.jpg")
    with pytest.raises(ValueError, match="test: 'c' is not a class of the training images"):
        folder(tmp_path)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_the_split_keeps_the_share_of_every_class_and_loses_nobody(share):
    labels = torch.randint(0, 7, (1000,), generator=torch.Generator().manual_seed(0))
    train, test = stratified_split(labels, share, seed=3)
    assert torch.equal(torch.cat([train, test]).sort().values, torch.arange(1000))
    counts = torch.bincount(labels)
    assert torch.equal(torch.bincount(labels[test]), (counts * share).round().long())


def test_the_split_never_empties_a_class():
    train, test = stratified_split(torch.tensor([0, 1, 1, 1, 1]), 0.9, seed=0)
    assert torch.tensor([0, 1, 1, 1, 1])[train].tolist() == [0, 1]
    assert len(test) == 3
    with pytest.raises(ValueError, match="less than one of 4 examples; raise it"):
        stratified_split(torch.tensor([0, 0, 1, 1]), 0.1, seed=0)


# -- lists -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def listed(tmp_path):
    for i in range(6):
        write_image(tmp_path / "images" / f"photo {i}.jpg")
    (tmp_path / "train.txt").write_text("".join(f"images/photo {i}.jpg {i % 2}\n" for i in range(4)) + "\n")
    (tmp_path / "test.txt").write_text("images/photo 4.jpg\t1\r\nimages/photo 5.jpg\t0\r\n")
    return tmp_path


def test_lists(listed):
    data = DATASETS.build(f"folder:path={listed},train_list=train.txt,test_list=test.txt,size=8")()
    assert data.train.labels.tolist() == [0, 1, 0, 1]
    assert data.test.labels.tolist() == [1, 0]
    assert data.class_names == ("0", "1")
    assert data.train.x[torch.arange(4)].shape == (4, 3, 8, 8)
    assert data.test.x[torch.arange(2)].shape == (2, 3, 8, 8)
    assert len(folder(listed, train_list="train.txt", test=0.5).test) == 2


def test_lists_with_class_names(listed):
    (listed / "classes.txt").write_text("dog\nguinea pig\n")
    named = folder(listed, train_list="train.txt", test_list="test.txt", classes="classes.txt")
    assert named.class_names == ("dog", "guinea pig")
    (listed / "words.txt").write_text("images/photo 0.jpg\tguinea pig\nimages/photo 1.jpg\tdog\n")
    by_name = folder(listed, train_list="words.txt", test_list="words.txt")
    assert by_name.class_names == ("dog", "guinea pig")
    assert by_name.train.labels.tolist() == [1, 0]
    both = folder(listed, train_list="words.txt", test_list="test.txt", classes="classes.txt")
    assert both.train.labels.tolist() == [1, 0]
    assert both.test.labels.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("images/photo 0.jpg 2", "train.txt, line 3: label '2' is none of the 2 classes; use 0..1"),
        ("images/photo 0.jpg -1", "train.txt, line 3: label '-1' is none"),
        ("images/photo 0.jpg x", "train.txt, line 3: label 'x' is none"),
        ("alone.jpg", "train.txt, line 3: expected a file name and a label, got 'alone.jpg'"),
        ("/etc/passwd 0", "train.txt, line 3: '/etc/passwd' leads out of .*; write paths relative"),
        ("images/../../x.jpg 0", "train.txt, line 3: 'images/../../x.jpg' leads out of"),
        ("images\\..\\..\\x.jpg 0", "leads out of"),
        ("images/gone.jpg 0", "train.txt, line 3: there is no image .*images/gone.jpg; unpack"),
        ("images/gone.jpg 0\nnowhere/x.jpg 1", r"line 3: there is no image .*images/gone.jpg \(and 1 others\); unpack"),
    ],
)
def test_a_wrong_line_is_named(listed, line, message):
    (listed / "classes.txt").write_text("dog\ncat\n")
    (listed / "train.txt").write_text(f"images/photo 0.jpg 0\nimages/photo 1.jpg 1\n{line}\n")
    with pytest.raises(ValueError, match=message):
        folder(listed, train_list="train.txt", test_list="test.txt", classes="classes.txt")


def test_a_class_without_images_is_named(listed):
    (listed / "train.txt").write_text("".join(f"images/photo {i}.jpg {y}\n" for i, y in enumerate((0, 0, 3, 3))))
    with pytest.raises(ValueError, match=r"train.txt: class '1' has no training image \(nor have 1 others\)"):
        folder(listed, train_list="train.txt", test_list="test.txt")


def test_numbers_that_cannot_be_classes(listed):
    (listed / "train.txt").write_text("images/photo 0.jpg 0\nimages/photo 1.jpg 99999999999\n")
    with pytest.raises(
        ValueError, match=r"train.txt has a label 99999999999 and only 2 images; number the classes from 0"
    ):
        folder(listed, train_list="train.txt")
    (listed / "train.txt").write_text("images/photo 0.jpg 007\nimages/photo 1.jpg 008\n")
    assert folder(listed, train_list="train.txt", test_list="train.txt").class_names == ("007", "008")


def test_wrong_lists_and_knobs(listed):
    with pytest.raises(ValueError, match=r"There is no file .*/none.txt; put it there"):
        folder(listed, train_list="none.txt")
    with pytest.raises(ValueError, match="layout=list needs train_list=FILE"):
        folder(listed, layout="list")
    with pytest.raises(ValueError, match="layout=classes takes no train_list; leave it out, or use layout=list"):
        folder(listed, layout="classes", train_list="train.txt")
    (listed / "empty.txt").write_text("\n")
    with pytest.raises(ValueError, match=r"empty.txt holds 0 classes"):
        folder(listed, train_list="empty.txt")
    with pytest.raises(ValueError, match=r"empty.txt names no image"):
        folder(listed, train_list="train.txt", test_list="empty.txt")
    (listed / "classes.txt").write_text("dog\ndog\n")
    with pytest.raises(ValueError, match="names the class 'dog' twice"):
        folder(listed, train_list="train.txt", classes="classes.txt")


def test_names_that_are_not_utf8_survive(tmp_path):
    (tmp_path / "list.txt").write_bytes(b"caf\xe9.jpg 0\n")
    ((_, name, label),) = read_list(tmp_path / "list.txt")
    assert (name.encode("utf-8", "surrogateescape"), label) == (b"caf\xe9.jpg", "0")


# -- published sets --------------------------------------------------------------------------------------------------


@pytest.fixture
def clothing(tmp_path):
    """14 noisy images, one per class; two clean test images; two clean training images."""
    keys = [f"images/{i % 10}/{i:02}/{1000 + i},{2000 + i}.jpg" for i in range(18)]
    for key in keys:
        write_image(tmp_path / key)
    (tmp_path / "noisy_label_kv.txt").write_text("".join(f"{key} {i}\n" for i, key in enumerate(keys[:14])))
    (tmp_path / "clean_label_kv.txt").write_text(
        "".join(f"{key} {i}\n" for i, key in zip((3, 5, 7, 9), keys[14:], strict=True))
    )
    (tmp_path / "noisy_train_key_list.txt").write_text("\n".join(keys[:14]))
    (tmp_path / "clean_test_key_list.txt").write_text("\n".join(keys[14:16]))
    (tmp_path / "clean_val_key_list.txt").write_text("\n".join(keys[16:]))
    return tmp_path


def test_clothing1m(clothing):
    data = folder(clothing, size=8)
    assert data.class_names == CLOTHING1M
    assert data.num_classes == 14
    assert data.train.labels.tolist() == list(range(14))
    assert data.test.labels.tolist() == [3, 5]
    assert data.train.x[torch.arange(14)].shape == (14, 3, 8, 8)
    assert folder(clothing, test_list="clean_val_key_list.txt").test.labels.tolist() == [7, 9]


def test_clothing1m_as_people_keep_it(clothing):
    (clothing / "annotations").mkdir()
    for file in clothing.glob("*.txt"):
        file.rename(clothing / "annotations" / file.name)
    for part in (clothing / "images").iterdir():
        part.rename(clothing / part.name)
    (clothing / "images").rmdir()
    data = folder(clothing, size=8)
    assert data.test.labels.tolist() == [3, 5]
    assert data.test.x[torch.arange(2)].shape == (2, 3, 8, 8)


def test_clothing1m_wrong_files(clothing):
    (clothing / "noisy_train_key_list.txt").write_text("images/0/00/1000,2000.jpg\nimages/9/9.jpg\n")
    with pytest.raises(
        ValueError, match=r"noisy_train_key_list.txt, line 2: 'images/9/9.jpg' has no label in .*noisy_label_kv"
    ):
        folder(clothing)
    with pytest.raises(
        ValueError, match=r"There is no file .*noisy_label_kv.txt|There is no file .*noisy_train_key_list"
    ):
        folder(clothing / "images", layout="clothing1m")


def test_animal10n(tmp_path):
    for i in range(10):
        write_image(tmp_path / "training" / f"{i}_{1000 + i}.jpg", size=(64, 64))
    write_image(tmp_path / "testing" / "8_7.jpg", size=(64, 64))
    data = folder(tmp_path)
    assert data.class_names == ANIMAL10N
    assert data.train.labels.tolist() == list(range(10))
    assert data.test.labels.tolist() == [8]
    assert data.train.x.shape == (10, 3, 64, 64)
    write_image(tmp_path / "testing" / "10_7.jpg")
    with pytest.raises(ValueError, match="testing: label '10' is none of the 10 classes"):
        folder(tmp_path)
    with pytest.raises(ValueError, match=r"There is no folder .*training; unpack Animal-10N"):
        folder(tmp_path / "testing", layout="animal10n")


@pytest.fixture
def food(tmp_path):
    base = tmp_path / "Food-101N_release"
    keys = [f"{name}/{i:032x}.jpg" for name in ("apple_pie", "waffles") for i in range(3)]
    for key in keys:
        write_image(base / "images" / key)
    (base / "meta").mkdir()
    (base / "meta" / "classes.txt").write_text("class_name\napple_pie\nwaffles\n")
    (base / "meta" / "imagelist.tsv").write_text("class_name/key\n" + "\n".join(keys))
    verified = "".join(f"{key}\t{i % 2}\n" for i, key in enumerate(keys))
    (base / "meta" / "verified_train.tsv").write_text("class_name/key\tverification_label\n" + verified)
    (base / "meta" / "verified_val.tsv").write_text("class_name/key\tverification_label\n" + verified)
    for key in ("apple_pie/1011328", "waffles/7"):
        write_image(tmp_path / "food-101" / "images" / f"{key}.jpg")
    (tmp_path / "food-101" / "meta").mkdir()
    (tmp_path / "food-101" / "meta" / "test.txt").write_text("waffles/7\napple_pie/1011328\n")
    return tmp_path


@pytest.mark.parametrize("place", ["", "Food-101N_release"])
def test_food101n_is_tested_on_food101(food, place):
    data = folder(food / place, size=8)
    assert data.class_names == ("apple_pie", "waffles")
    assert data.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.test.labels.tolist() == [1, 0]
    assert data.test.x[torch.arange(2)].shape == (2, 3, 8, 8)


def test_food101n_verified(food):
    data = folder(food, train_list="meta/verified_train.tsv", test_list="meta/verified_val.tsv")
    assert [Path(name.decode()).name[-5] for name in data.train.x.names] == ["1", "0", "2"]
    assert data.test.labels.tolist() == [0, 1, 1]
    (food / "food-101" / "meta" / "test.txt").unlink()
    with pytest.raises(
        ValueError, match=r"there is no .*food-101/meta/test.txt; unpack Food-101 there, or test on test_list="
    ):
        folder(food)
    with pytest.raises(ValueError, match=r"There is no file .*imagelist.tsv; unpack Food-101N there"):
        folder(food / "food-101", layout="food101n")


def test_every_message_is_one_sentence(listed):
    """No message ends in a traceback's worth of lines."""
    with pytest.raises(ValueError, match="There is no file") as error:
        folder(listed, train_list="none.txt")
    assert "\n" not in str(error.value)
    assert re.search(r"\.$", str(error.value))
