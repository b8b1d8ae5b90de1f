"""Folders of images and lists of images; every file is written here."""

import re
from pathlib import Path

import pytest
import torch

from logitclip.data._images import ImageFiles
from logitclip.data._listings import read_list
from logitclip.data.dataset import DATASETS, defaults_of
from logitclip.data.folder import folder

Image = pytest.importorskip("PIL.Image")

RED, BLUE = (255, 0, 0), (0, 0, 255)


def names(split) -> list[bytes]:
    assert isinstance(split.x, ImageFiles)
    return split.x.names.tolist()


def write_image(path: Path, colour=RED, size=(20, 16)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path, **({"quality": 95} if path.suffix in (".jpg", ".JPEG") else {}))
    return path


# -- one folder per class --------------------------------------------------------------------------------------------


def test_train_and_test_folders(tmp_path):
    for split, count in (("train", 3), ("val", 2)):
        for label, colour in (("b", BLUE), ("a", RED)):
            for i in range(count):
                write_image(tmp_path / split / label / f"{i}.jpg", colour)
    write_image(tmp_path / "train" / "a" / "deeper" / "x.PNG".lower())
    (tmp_path / "train" / "a" / "notes.txt").write_text("not an image", encoding="utf-8")
    (tmp_path / "train" / "a" / "._0.jpg").write_text("hidden", encoding="utf-8")
    (tmp_path / "train" / ".cache").mkdir()
    data = DATASETS.build(f"folder:path={tmp_path},size=16")()
    assert data.class_names == ("a", "b")
    assert data.train.labels.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert data.test.labels.tolist() == [0, 0, 1, 1]
    assert defaults_of("folder:path=x,size=16")["augment"] == "crop:size=14"
    assert data.train.x[torch.tensor([0, 6])].float().mean((2, 3)).argmax(1).tolist() == [0, 2]
    assert data.test.x[torch.tensor([0, 3])].float().mean((2, 3)).argmax(1).tolist() == [0, 2]


def test_a_class_may_be_called_train(tmp_path):
    for label in ("train", "car"):
        for i in range(5):
            write_image(tmp_path / label / f"{i}.jpg")
    data = folder(path=str(tmp_path))
    assert data.class_names == ("car", "train")
    assert (len(data.train), len(data.test)) == (8, 2)


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
    assert len({*names(first.train), *names(first.test)}) == 30
    assert names(first.test) == names(again.test)
    assert names(first.test) != names(other.test)
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


# -- lists -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def listed(tmp_path):
    for i in range(6):
        write_image(tmp_path / "images" / f"photo {i}.jpg")
    (tmp_path / "train.txt").write_text(
        "".join(f"images/photo {i}.jpg {i % 2}\n" for i in range(4)) + "\n", encoding="utf-8"
    )
    (tmp_path / "test.txt").write_text("images/photo 4.jpg\t1\r\nimages/photo 5.jpg\t0\r\n", encoding="utf-8")
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
    (listed / "classes.txt").write_text("dog\nguinea pig\n", encoding="utf-8")
    named = folder(listed, train_list="train.txt", test_list="test.txt", classes="classes.txt")
    assert named.class_names == ("dog", "guinea pig")
    (listed / "words.txt").write_text("images/photo 0.jpg\tguinea pig\nimages/photo 1.jpg\tdog\n", encoding="utf-8")
    by_name = folder(listed, train_list="words.txt", test_list="words.txt")
    assert by_name.class_names == ("dog", "guinea pig")
    assert by_name.train.labels.tolist() == [1, 0]
    both = folder(listed, train_list="words.txt", test_list="test.txt", classes="classes.txt")
    assert both.train.labels.tolist() == [1, 0]
    assert both.test.labels.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("images/photo 0.jpg 2", "train.txt, line 3: label '2' is not one of the 2 classes; use 0..1"),
        ("images/photo 0.jpg -1", "train.txt, line 3: label '-1' is not"),
        ("images/photo 0.jpg x", "train.txt, line 3: label 'x' is not"),
        ("alone.jpg", "train.txt, line 3: expected a file name and a label, got 'alone.jpg'"),
        ("/etc/passwd 0", "train.txt, line 3: '/etc/passwd' is outside .*; write paths relative"),
        ("images/../../x.jpg 0", "train.txt, line 3: 'images/../../x.jpg' is outside"),
        ("images\\..\\..\\x.jpg 0", "is outside"),
        ("images/gone.jpg 0", "train.txt, line 3: there is no image .*images/gone.jpg; unpack"),
        ("images/gone.jpg 0\nnowhere/x.jpg 1", r"line 3: there is no image .*images/gone.jpg \(and 1 others\); unpack"),
    ],
)
def test_a_wrong_line_is_named(listed, line, message):
    (listed / "classes.txt").write_text("dog\ncat\n", encoding="utf-8")
    (listed / "train.txt").write_text(f"images/photo 0.jpg 0\nimages/photo 1.jpg 1\n{line}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        folder(listed, train_list="train.txt", test_list="test.txt", classes="classes.txt")


def test_a_class_without_images_is_named(listed):
    (listed / "train.txt").write_text(
        "".join(f"images/photo {i}.jpg {y}\n" for i, y in enumerate((0, 0, 3, 3))), encoding="utf-8"
    )
    with pytest.raises(ValueError, match=r"train.txt: class '1' has no training image.*; 1 other class has none"):
        folder(listed, train_list="train.txt", test_list="test.txt")


def test_numbers_that_cannot_be_classes(listed):
    (listed / "train.txt").write_text("images/photo 0.jpg 0\nimages/photo 1.jpg 99999999999\n", encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"train.txt has a label 99999999999 and only 2 images; number the classes from 0"
    ):
        folder(listed, train_list="train.txt")
    (listed / "train.txt").write_text("images/photo 0.jpg 007\nimages/photo 1.jpg 008\n", encoding="utf-8")
    assert folder(listed, train_list="train.txt", test_list="train.txt").class_names == ("007", "008")


def test_wrong_lists_and_knobs(listed):
    with pytest.raises(ValueError, match=r"There is no file .*/none.txt; put it there"):
        folder(listed, train_list="none.txt")
    with pytest.raises(ValueError, match="test_list and classes need train_list=FILE"):
        folder(listed, test_list="test.txt")
    (listed / "empty.txt").write_text("\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"empty.txt holds 0 classes"):
        folder(listed, train_list="empty.txt")
    with pytest.raises(ValueError, match=r"empty.txt lists no image"):
        folder(listed, train_list="train.txt", test_list="empty.txt")
    (listed / "classes.txt").write_text("dog\ndog\n", encoding="utf-8")
    with pytest.raises(ValueError, match="names the class 'dog' twice"):
        folder(listed, train_list="train.txt", classes="classes.txt")


def test_names_that_are_not_utf8_survive(tmp_path):
    (tmp_path / "list.txt").write_bytes(b"caf\xe9.jpg 0\n")
    ((_, name, label),) = read_list(tmp_path / "list.txt")
    assert (name.encode("utf-8", "surrogateescape"), label) == (b"caf\xe9.jpg", "0")


def test_every_message_is_one_sentence(listed):
    """Every message is one short line."""
    with pytest.raises(ValueError, match="There is no file") as error:
        folder(listed, train_list="none.txt")
    assert "\n" not in str(error.value)
    assert re.search(r"\.$", str(error.value))


def test_images_in_memory_are_the_same_and_a_damaged_one_is_skipped(tmp_path, caplog):
    for label, colour in (("a", RED), ("b", BLUE)):
        for i in range(5):
            write_image(tmp_path / label / f"{i}.png", colour)
    kept = folder(tmp_path, size=8, memory=True)
    lazy = folder(tmp_path, size=8)
    assert torch.equal(kept.train.x, lazy.train.x[torch.arange(8)])
    assert torch.equal(kept.train.rows, lazy.train.rows)
    (tmp_path / "a" / "2.png").write_text("not an image", encoding="utf-8")
    again = folder(tmp_path, size=8, memory=True)
    assert sorted([*again.train.rows.tolist(), *again.test.rows.tolist()]) == [0, 1, 3, 4, 5, 6, 7, 8, 9]
    assert "skipped: " in caplog.text
    assert "2.png is not a readable image" in caplog.text
