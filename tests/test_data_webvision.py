"""Small versions of WebVision's lists and folders, and of ILSVRC12's validation images in the usual layouts."""

import pickle

import pytest
import torch

from logitclip.data.dataset import DATASETS, defaults_of
from logitclip.data.webvision import webvision

Image = pytest.importorskip("PIL.Image")

CLASSES = 60
WNIDS = [f"n{1440764 + 1000 * i:08}" for i in range(CLASSES)]
KNOWN = [0, 1, 49]  # classes with more than one image


def write_image(path, label):
    """The image's red encodes its label."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (40, 32), (4 * label, 0, 0)).save(path)


def labels_seen(images) -> list[int]:
    return (images[torch.arange(len(images))][:, 0, 8, 8].int() // 4).tolist()


@pytest.fixture
def tree(tmp_path):
    """Google has an image of each class, and a second one of the `KNOWN`; Flickr has one of class 2 and of class 55."""
    root = tmp_path / "webvision"
    (root / "info").mkdir(parents=True)
    (root / "info" / "synsets.txt").write_text(
        "".join(f"{wnid} name {i}, other name\n" for i, wnid in enumerate(WNIDS)), encoding="utf-8"
    )
    google = [(f"google/q{i + 1:04}/a{i}.jpg", i) for i in range(CLASSES)]
    google += [(f"google/q{i + 1:04}/b{i}.jpg", i) for i in KNOWN]
    flickr = [("flickr/q0003/c.jpg", 2), ("flickr/q0056/c.jpg", 55)]
    val = [(f"val{i:06}.jpg", label) for i, label in enumerate((55, 3, 49))]
    for name, rows in (("train_filelist_google", google), ("train_filelist_flickr", flickr), ("val_filelist", val)):
        (root / "info" / f"{name}.txt").write_text(
            "".join(f"{path} {label}\n" for path, label in rows), encoding="utf-8"
        )
    # JPEG changes the red a little, PNG does not; the suffix does not matter to Pillow.
    for path, label in google + flickr:
        write_image(root / path.replace(".jpg", ".png"), label)
        (root / path.replace(".jpg", ".png")).rename(root / path)
    for path, label in val:
        write_image(root / "val_images_256" / path.replace(".jpg", ".png"), label)
        (root / "val_images_256" / path.replace(".jpg", ".png")).rename(root / "val_images_256" / path)
    return tmp_path


def write_ilsvrc(folder, nested=True):
    rows = [(f"ILSVRC2012_val_{i:08}.png", label) for i, label in enumerate((0, 49, 5, 55, 0))]
    rows += [(f"ILSVRC2012_val_{100 + i:08}.png", i) for i in range(CLASSES)]
    rows = [(f"{WNIDS[label]}/{name}" if nested else name, label) for name, label in rows]
    for name, label in rows:
        write_image(folder / name, label)
    return rows


def test_mini_is_the_google_images_of_the_first_fifty_classes(tree):
    data = DATASETS.build("webvision:subset=mini,test=webvision")(tree)
    assert data.num_classes == 50
    assert data.class_names[:2] == ("name 0", "name 1")
    assert data.train.labels.tolist() == [*range(50), *KNOWN]
    assert labels_seen(data.train.x) == data.train.labels.tolist()
    assert data.test.labels.tolist() == [3, 49]
    assert labels_seen(data.test.x) == [3, 49]
    assert data.train.x.shape == (53, 3, 256, 256)
    assert torch.equal(pickle.loads(pickle.dumps(data.train.x)).decode(7), data.train.x.decode(7))


def test_full_has_every_class_of_both_engines(tree):
    data = webvision(tree / "webvision", subset="full", test="webvision", size=16)
    assert data.num_classes == CLASSES
    assert data.train.labels.tolist() == [*range(CLASSES), *KNOWN, 2, 55]
    assert labels_seen(data.train.x) == data.train.labels.tolist()
    assert data.test.labels.tolist() == [55, 3, 49]


@pytest.mark.parametrize("place", ["ilsvrc12", "ilsvrc12/val", "webvision/ilsvrc12", "webvision/ilsvrc12/val"])
def test_ilsvrc_with_a_folder_per_wordnet_id(tree, place):
    write_ilsvrc(tree / place)
    data = webvision(tree)
    assert data.test.labels.tolist() == [0, 0, 0, *range(1, 5), 5, *range(5, 49), 49, 49]
    assert labels_seen(data.test.x) == data.test.labels.tolist()


@pytest.mark.parametrize(("images", "file"), [("val", "val.txt"), (".", "val.txt"), ("val", "val/val.txt")])
def test_ilsvrc_flat_with_a_list(tree, images, file):
    folder = tree / "elsewhere"
    rows = write_ilsvrc(folder / images, nested=False)
    (folder / file).write_text("".join(f"{name} {label}\n" for name, label in rows), encoding="utf-8")
    for place in (folder, folder / file):
        data = webvision(tree, ilsvrc=str(place))
        assert data.test.labels.tolist() == [label for _, label in rows if label < 50]
        assert labels_seen(data.test.x) == data.test.labels.tolist()


def test_a_list_whose_names_begin_with_val(tree):
    folder = tree / "imagenet"
    rows = write_ilsvrc(folder / "val")
    (folder / "first50.txt").write_text(
        "".join(f"val/{name} {label}\n" for name, label in rows if label < 50), encoding="utf-8"
    )
    data = webvision(tree, ilsvrc=str(folder / "first50.txt"))
    assert labels_seen(data.test.x) == data.test.labels.tolist()


def test_the_protocol_is_the_papers():
    assert defaults_of("webvision:test=webvision") == {
        "model": "resnet:depth=18",
        "epochs": 120,
        "batch_size": 128,
        "lr": 0.1,
        "momentum": 0.9,
        "nesterov": True,
        "weight_decay": 5e-4,
        "schedule": "multistep",
        "milestones": (1 / 3, 2 / 3),
        "augment": "crop:size=224",
        "drop_last": True,
    }


def test_only_the_images_of_the_subset_need_to_be_there(tree):
    (tree / "webvision" / "google" / "q0056" / "a55.jpg").unlink()
    assert len(webvision(tree, test="webvision").train) == 53
    with pytest.raises(
        ValueError, match=r"train_filelist_google.txt, line 56: there is no image .*q0056/a55.jpg; unpack"
    ):
        webvision(tree, subset="full", test="webvision")


def test_wrong_trees_are_one_sentence(tree, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(ValueError, match=r"There is no WebVision in .*get it from https://data.vision.ee.ethz.ch"):
        webvision(empty)
    with pytest.raises(
        ValueError, match=r"no ILSVRC12 validation images in .*ilsvrc12 .*ilsvrc=FOLDER, .*test=webvision"
    ):
        webvision(tree)
    write_ilsvrc(tree / "ilsvrc12")
    for image in (tree / "ilsvrc12" / WNIDS[7]).iterdir():
        image.unlink()
    with pytest.raises(ValueError, match=f"There is no image in .*{WNIDS[7]}; unpack"):
        webvision(tree)
    info = tree / "webvision" / "info"
    good = (info / "train_filelist_google.txt").read_text(encoding="utf-8")
    (info / "train_filelist_google.txt").write_text(good + "google/q0001/a0.jpg 60\n", encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"train_filelist_google.txt, line 64: label '60' is not one of the 50 classes"
    ):
        webvision(tree, test="webvision")
    (info / "train_filelist_google.txt").write_text(good + "../../x.jpg 0\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"line 64: '../../x.jpg' is outside"):
        webvision(tree, test="webvision")
    (info / "train_filelist_google.txt").write_text("google/q0001/a0.jpg 0\n", encoding="utf-8")
    with pytest.raises(
        ValueError, match=f"class '{WNIDS[1]} name 1, other name' has no training image; 48 other classes have none"
    ):
        webvision(tree, test="webvision")
    (info / "synsets.txt").unlink()
    with pytest.raises(ValueError, match=r"There is no file .*info/synsets.txt"):
        webvision(tree)


def test_a_list_needs_classes_in_wordnet_order(tree):
    rows = write_ilsvrc(tree / "flat", nested=False)
    (tree / "flat" / "val.txt").write_text("".join(f"{name} {label}\n" for name, label in rows), encoding="utf-8")
    synsets = tree / "webvision" / "info" / "synsets.txt"
    synsets.write_text("\n".join(reversed(synsets.read_text(encoding="utf-8").splitlines())), encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"flat/val.txt are in the order of their WordNet ids, and info/synsets.txt is not"
    ):
        webvision(tree, ilsvrc=str(tree / "flat"))
