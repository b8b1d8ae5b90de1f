"""Clothing1M, Animal-10N and Food-101N in their published layouts; every file is written here."""

from pathlib import Path

import pytest
import torch

from logitclip.data._images import ImageFiles
from logitclip.data.animal10n import CLASSES as ANIMAL10N
from logitclip.data.animal10n import animal10n
from logitclip.data.clothing1m import CLASSES as CLOTHING1M
from logitclip.data.clothing1m import clothing1m
from logitclip.data.dataset import DATASETS
from logitclip.data.food101n import food101n

Image = pytest.importorskip("PIL.Image")

RED = (255, 0, 0)


def write_image(path: Path, colour=RED, size=(20, 16)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path, **({"quality": 95} if path.suffix in (".jpg", ".JPEG") else {}))
    return path


@pytest.fixture
def clothing(tmp_path):
    """14 noisy images, one per class; two clean test images; two clean training images."""
    keys = [f"images/{i % 10}/{i:02}/{1000 + i},{2000 + i}.jpg" for i in range(18)]
    for key in keys:
        write_image(tmp_path / key)
    (tmp_path / "noisy_label_kv.txt").write_text(
        "".join(f"{key} {i}\n" for i, key in enumerate(keys[:14])), encoding="utf-8"
    )
    (tmp_path / "clean_label_kv.txt").write_text(
        "".join(f"{key} {i}\n" for i, key in zip((3, 5, 7, 9), keys[14:], strict=True)), encoding="utf-8"
    )
    (tmp_path / "noisy_train_key_list.txt").write_text("\n".join(keys[:14]), encoding="utf-8")
    (tmp_path / "clean_test_key_list.txt").write_text("\n".join(keys[14:16]), encoding="utf-8")
    (tmp_path / "clean_val_key_list.txt").write_text("\n".join(keys[16:]), encoding="utf-8")
    return tmp_path


def test_clothing1m(clothing):
    data = DATASETS.build(f"clothing1m:path={clothing},size=8")()
    assert data.class_names == CLOTHING1M
    assert data.num_classes == 14
    assert data.train.labels.tolist() == list(range(14))
    assert data.test.labels.tolist() == [3, 5]
    assert data.train.x[torch.arange(14)].shape == (14, 3, 8, 8)
    assert clothing1m(clothing, test_list="clean_val_key_list.txt").test.labels.tolist() == [7, 9]


def test_clothing1m_as_people_keep_it(clothing):
    (clothing / "annotations").mkdir()
    for file in clothing.glob("*.txt"):
        file.rename(clothing / "annotations" / file.name)
    for part in (clothing / "images").iterdir():
        part.rename(clothing / part.name)
    (clothing / "images").rmdir()
    data = clothing1m(clothing, size=8)
    assert data.test.labels.tolist() == [3, 5]
    assert data.test.x[torch.arange(2)].shape == (2, 3, 8, 8)


def test_clothing1m_wrong_files(clothing):
    (clothing / "noisy_train_key_list.txt").write_text("images/0/00/1000,2000.jpg\nimages/9/9.jpg\n", encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"noisy_train_key_list.txt, line 2: 'images/9/9.jpg' has no label in .*noisy_label_kv"
    ):
        clothing1m(clothing)
    with pytest.raises(
        ValueError, match=r"There is no file .*noisy_label_kv.txt|There is no file .*noisy_train_key_list"
    ):
        clothing1m(clothing / "images")


def test_animal10n(tmp_path):
    for i in range(10):
        write_image(tmp_path / "training" / f"{i}_{1000 + i}.jpg", size=(64, 64))
    write_image(tmp_path / "testing" / "8_7.jpg", size=(64, 64))
    data = animal10n(tmp_path)
    assert data.class_names == ANIMAL10N
    assert data.train.labels.tolist() == list(range(10))
    assert data.test.labels.tolist() == [8]
    assert isinstance(data.train.x, ImageFiles)
    assert data.train.x.shape == (10, 3, 64, 64)
    write_image(tmp_path / "testing" / "10_7.jpg")
    with pytest.raises(ValueError, match="testing: label '10' is not one of the 10 classes"):
        animal10n(tmp_path)
    with pytest.raises(ValueError, match=r"There is no folder .*training; unpack Animal-10N"):
        animal10n(tmp_path / "testing")


@pytest.fixture
def food(tmp_path):
    base = tmp_path / "Food-101N_release"
    keys = [f"{name}/{i:032x}.jpg" for name in ("apple_pie", "waffles") for i in range(3)]
    for key in keys:
        write_image(base / "images" / key)
    (base / "meta").mkdir()
    (base / "meta" / "classes.txt").write_text("class_name\napple_pie\nwaffles\n", encoding="utf-8")
    (base / "meta" / "imagelist.tsv").write_text("class_name/key\n" + "\n".join(keys), encoding="utf-8")
    verified = "".join(f"{key}\t{i % 2}\n" for i, key in enumerate(keys))
    (base / "meta" / "verified_train.tsv").write_text(
        "class_name/key\tverification_label\n" + verified, encoding="utf-8"
    )
    (base / "meta" / "verified_val.tsv").write_text("class_name/key\tverification_label\n" + verified, encoding="utf-8")
    for key in ("apple_pie/1011328", "waffles/7"):
        write_image(tmp_path / "food-101" / "images" / f"{key}.jpg")
    (tmp_path / "food-101" / "meta").mkdir()
    (tmp_path / "food-101" / "meta" / "test.txt").write_text("waffles/7\napple_pie/1011328\n", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("place", ["", "Food-101N_release"])
def test_food101n_is_tested_on_food101(food, place):
    data = food101n(food / place, size=8)
    assert data.class_names == ("apple_pie", "waffles")
    assert data.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.test.labels.tolist() == [1, 0]
    assert data.test.x[torch.arange(2)].shape == (2, 3, 8, 8)


def test_food101n_verified(food):
    data = food101n(food, train_list="meta/verified_train.tsv", test_list="meta/verified_val.tsv")
    assert isinstance(data.train.x, ImageFiles)
    assert [Path(name.decode()).name[-5] for name in data.train.x.names] == ["1", "0", "2"]
    assert data.test.labels.tolist() == [0, 1, 1]
    (food / "food-101" / "meta" / "test.txt").unlink()
    with pytest.raises(
        ValueError, match=r"there is no .*food-101/meta/test.txt; unpack Food-101 there, or test on test_list="
    ):
        food101n(food)
    with pytest.raises(ValueError, match=r"There is no file .*imagelist.tsv; unpack Food-101N there"):
        food101n(food / "food-101")
