"""Images on disk: one folder per class, or files with a list; Clothing1M, Animal-10N and Food-101N are such lists."""

from __future__ import annotations

import copy
import inspect
import logging
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from logitclip.data.dataset import DATASETS, Dataset, Split

log = logging.getLogger(__name__)

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")

# How the EXIF orientations 2 to 8 are undone.
_UNDO = ("FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90")
TURNS = dict(enumerate(_UNDO, start=2))

# In the order of their label numbers.
CLOTHING1M = (
    *("T-shirt", "Shirt", "Knitwear", "Chiffon", "Sweater", "Hoodie", "Windbreaker"),
    *("Jacket", "Down coat", "Suit", "Shawl", "Dress", "Vest", "Underwear"),
)
ANIMAL10N = (
    *("cat", "lynx", "wolf", "coyote", "cheetah", "jaguar", "chimpanzee", "orangutan", "hamster", "guinea pig"),
)


# -- images ----------------------------------------------------------------------------------------------------------


class ImageFiles:
    """Image files that are decoded when asked for, each to the same uint8 tensor every time.

    The shorter side is scaled to `size` and the square in the centre is kept, so that every image has one shape and a
    batch is one tensor; the random part of augmentation (a smaller crop, a flip) is done later, on whole batches. The
    paper does not say how WebVision's images are cropped: this is our choice. Orientation tags are obeyed, and
    grayscale, 16-bit, CMYK, palette and transparent images become RGB.

    Args:
        folder: the folder that `names` are relative to.
        names: file names, with forward slashes.
        size: the side S of the square.

    `images[index]` with a tensor of n positions is uint8 [n, 3, S, S].
    """

    def __init__(self, folder: str | Path, names: Sequence[str], size: int = 256) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1 pixel, got {size}.")
        _pillow()  # a missing package is said now, not by a worker process in the middle of an epoch
        self.folder = os.fspath(folder)
        self.size = size
        # One array, not a list of strings: worker processes then share it, or receive it, at little cost.
        self.names = np.array([os.fsencode(name) for name in names], dtype=bytes)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self), 3, self.size, self.size))

    def select(self, index: Tensor) -> ImageFiles:
        """The files at `index` alone."""
        chosen = copy.copy(self)
        chosen.names = self.names[index.numpy()]
        return chosen

    def path(self, i: int) -> str:
        return os.path.join(self.folder, os.fsdecode(self.names[i]))

    def decode(self, i: int) -> Tensor:
        """Image `i`, uint8 [3, S, S]."""
        path = self.path(i)
        try:
            return _decode(path, self.size)
        except FileNotFoundError:
            raise ValueError(f"There is no image {path}; restore it or take it out of the data.") from None
        except Exception as error:  # decoders fail on damaged files in every way there is
            raise ValueError(
                f"{path} is not a readable image ({error}); repair it or take it out of the data."
            ) from error

    def __getitem__(self, index: Tensor | Sequence[int]) -> Tensor:
        positions = torch.as_tensor(index).tolist()
        images = torch.empty((len(positions), 3, self.size, self.size), dtype=torch.uint8)
        for image, i in zip(images, positions, strict=True):
            image.copy_(self.decode(i))
        return images


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("Reading image files needs pillow: pip install 'logitclip[data]'.") from error
    return Image


def _decode(path: str, size: int) -> Tensor:
    Image = _pillow()
    # Photos from the web have broken EXIF blocks; viewers say nothing about them either.
    with warnings.catch_warnings(action="ignore"), Image.open(path) as image:
        # A large JPEG is decoded at 1/2, 1/4 or 1/8 of its size, never below twice what is needed.
        image.draft("RGB", (2 * size, 2 * size))
        try:
            orientation = image.getexif().get(0x0112, 1)
        except Exception:
            orientation = 1
        if image.mode.startswith("I"):  # 16 bits a pixel, which `convert` would clip to 8
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        elif image.mode in ("P", "PA"):
            image = image.convert("RGBA")
        image = image.convert("RGB")
    side = min(image.size)
    left, top = (image.width - side) / 2, (image.height - side) / 2
    square = image.resize((size, size), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))
    if orientation in TURNS:  # turning the square is turning the image: the centre stays where it is
        square = square.transpose(Image.Transpose[TURNS[orientation]])
    return torch.from_numpy(np.array(square)).permute(2, 0, 1)


def locate(path: str, root: str | Path) -> Path:
    """What a user calls `path`: that, if it exists, else that within `root`."""
    plain = Path(os.path.expanduser(path))
    return plain if path and plain.exists() else Path(root) / plain


# -- lists of images -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Listing:
    """Image files with their labels as text: `rows` are `(line number, file name, label)`."""

    source: Path  # the list file, or the folder that was listed: named in messages
    folder: Path  # the file names are relative to it
    rows: Iterable[tuple[int, str, str]]

    def where(self, number: int) -> str:
        return f"{self.source}, line {number}" if number else f"{self.source}"


def read_lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """`(line number, line)` of a text file, without the blank lines."""
    try:
        with open(path, encoding="utf-8-sig", errors="surrogateescape") as lines:
            for number, line in enumerate(lines, 1):
                if line := line.strip():
                    yield number, line
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"There is no file {path}; put it there or name the right folder.") from None


def read_list(path: str | Path) -> Iterator[tuple[int, str, str]]:
    """`(line number, file name, label)` of a file with lines `name label`; a name may have spaces in it."""
    for number, line in read_lines(path):
        name, _, label = line.rpartition("\t" if "\t" in line else " ")
        if not name:
            raise ValueError(f"{path}, line {number}: expected a file name and a label, got {line!r}.")
        yield number, name.rstrip(), label


def _outside(name: str) -> bool:
    return os.path.isabs(name) or name[0] in "/\\" or ".." in name.replace("\\", "/").split("/")


def collect(listing: Listing, classes: Sequence[str]) -> tuple[list[str], Tensor]:
    """The file names and the labels as numbers: a label is the name of a class or its position. Every file is there."""
    index = {str(i): i for i in range(len(classes))} | {name: i for i, name in enumerate(classes)}
    names, labels, numbers = [], [], []
    for number, name, label in listing.rows:
        if _outside(name):
            raise ValueError(
                f"{listing.where(number)}: {name!r} leads out of {listing.folder}; write paths relative to that folder."
            )
        if label not in index:
            raise ValueError(
                f"{listing.where(number)}: label {label!r} is none of the {len(classes)} classes; "
                f"use 0..{len(classes) - 1} or the class's name."
            )
        names.append(name)
        labels.append(index[label])
        numbers.append(number)
    if not names:
        raise ValueError(f"{listing.source} names no image.")
    if missing := _missing(listing.folder, names):
        others = f" (and {len(missing) - 1} others)" if len(missing) > 1 else ""
        raise ValueError(
            f"{listing.where(numbers[missing[0]])}: there is no image {listing.folder / names[missing[0]]}{others}; "
            "unpack the images there or take the line out."
        )
    return names, torch.tensor(labels)


def _missing(folder: Path, names: list[str]) -> list[int]:
    """Positions of the names without a file. Listing each folder once is far quicker than asking for every file."""
    present: dict[str, set[str]] = {}
    missing = []
    for i, name in enumerate(names):
        parent, _, file = name.rpartition("/")
        if parent not in present:
            try:
                present[parent] = set(os.listdir(folder / parent))
            except OSError:
                present[parent] = set()
        if file not in present[parent]:
            missing.append(i)
    return missing


def check_every_class(labels: Tensor, classes: Sequence[str], source: str | Path) -> None:
    """A class without a training example is an error: its output would never be trained."""
    empty = (torch.bincount(labels, minlength=len(classes)) == 0).nonzero().flatten().tolist()
    if empty:
        others = f" (nor have {len(empty) - 1} others)" if len(empty) > 1 else ""
        raise ValueError(
            f"{source}: class {classes[empty[0]]!r} has no training image{others}; add some or remove the class "
            "(labels count from 0)."
        )


def stratified_split(labels: Tensor, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Positions to train on and to test on: `share` of each class, drawn with `seed`, is tested on; both sorted.

    >>> train, test = stratified_split(torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]), 0.25, seed=0)
    >>> len(train), len(test)
    (6, 2)
    """
    if not 0 < share < 1:
        raise ValueError(f"test must be a share between 0 and 1, got {share}.")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    order = order[labels[order].argsort(stable=True)]  # by class, at random within one
    counts = torch.bincount(labels)
    rank = torch.arange(len(labels)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    tested = rank < (counts * share).round().clamp(max=counts - 1).long().repeat_interleave(counts)
    if not tested.any():
        raise ValueError(f"test={share} of each class is less than one of {len(labels)} examples; raise it.")
    return order[~tested].sort().values, order[tested].sort().values


# -- layouts ---------------------------------------------------------------------------------------------------------
# Each gives the training and the test listing (None: hold some out) and the classes.

Layout = tuple[Listing, Listing | None, Sequence[str]]


def list_classes(folder: Path, classes: Sequence[str] | None = None) -> tuple[Listing, Sequence[str]]:
    """The images in one folder per class; the classes are the sorted folder names unless given."""
    found = sorted(e.name for e in os.scandir(folder) if e.is_dir() and not e.name.startswith("."))
    unknown = [name for name in found if classes is not None and name not in classes]
    if unknown:
        raise ValueError(f"{folder}: {unknown[0]!r} is not a class of the training images; rename or remove it.")
    rows = []
    for name in found:
        images = sorted(find_images(folder, name))
        if not images:
            raise ValueError(f"{folder / name} holds no image ({' '.join(IMAGE_SUFFIXES)}); add some or remove it.")
        rows += [(0, image, name) for image in images]
    return Listing(folder, folder, rows), found if classes is None else classes


def find_images(folder: Path, under: str = "") -> Iterator[str]:
    """Names of the image files at any depth, hidden ones left out."""
    for parent, _, files in os.walk(folder / under):
        for file in files:
            if file.lower().endswith(IMAGE_SUFFIXES) and not file.startswith("."):
                yield Path(parent, file).relative_to(folder).as_posix()


def _classes_layout(folder: Path) -> Layout:
    if not (folder / "train").is_dir():
        train, classes = list_classes(folder)
        return train, None, classes
    train, classes = list_classes(folder / "train")
    for name in ("test", "val"):
        if (folder / name).is_dir():
            return train, list_classes(folder / name, classes)[0], classes
    return train, None, classes


def _list_layout(
    folder: Path, train_list: str | None = None, test_list: str | None = None, classes: str | None = None
) -> Layout:
    if train_list is None:
        raise ValueError("layout=list needs train_list=FILE, a file with lines 'name label'.")
    source = _find(train_list, folder)
    rows = list(read_list(source))
    if classes is not None:
        names = [line for _, line in read_lines(_find(classes, folder))]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"{_find(classes, folder)} names the class {twice[0]!r} twice.")
    else:
        names = sorted({label for _, _, label in rows})
        if all(name.isdecimal() and name == str(int(name)) for name in names):
            count = max(map(int, names), default=-1) + 1
            if count > len(rows):  # said here, before as many names are made
                raise ValueError(
                    f"{source} has a label {count - 1} and only {len(rows)} images; number the classes from 0."
                )
            names = [str(i) for i in range(count)]
    test = None
    if test_list is not None:
        test_source = _find(test_list, folder)
        test = Listing(test_source, folder, read_list(test_source))
    return Listing(source, folder, rows), test, names


def _clothing1m(
    folder: Path, train_list: str = "noisy_train_key_list.txt", test_list: str = "clean_test_key_list.txt"
) -> Layout:
    lists = next((d for d in (folder, folder / "annotations") if (d / "noisy_label_kv.txt").exists()), folder)
    unpacked = (folder / "images").is_dir()  # else the folders 0..9 stand where `images` should be

    def listing(source: Path) -> Listing:
        labels = lists / ("noisy_label_kv.txt" if source.name.startswith("noisy") else "clean_label_kv.txt")
        known = {name: label for _, name, label in read_list(labels)}

        def rows() -> Iterator[tuple[int, str, str]]:
            for number, key in read_lines(source):
                if key not in known:
                    raise ValueError(f"{source}, line {number}: {key!r} has no label in {labels}.")
                yield number, key if unpacked else key.removeprefix("images/"), known[key]

        return Listing(source, folder, rows())

    return listing(_find(train_list, lists)), listing(_find(test_list, lists)), CLOTHING1M


def _animal10n(folder: Path) -> Layout:
    """The label is the number that a file's name begins with: `training/3_1234.jpg`."""

    def listing(part: Path) -> Listing:
        if not part.is_dir():
            raise ValueError(f"There is no folder {part}; unpack Animal-10N's images there.")
        return Listing(part, part, [(0, name, name.partition("_")[0]) for name in sorted(find_images(part))])

    return listing(folder / "training"), listing(folder / "testing"), ANIMAL10N


def _food101n_folder(folder: Path) -> Path | None:
    places = (folder, folder / "Food-101N_release", folder / "food-101n")
    return next((place for place in places if (place / "meta" / "imagelist.tsv").exists()), None)


def _food101n(folder: Path, train_list: str = "meta/imagelist.tsv", test_list: str | None = None) -> Layout:
    """Trained on Food-101N, tested on the test list of Food-101, in a folder `food-101` beside it or in it."""
    base = _food101n_folder(folder)
    if base is None:
        raise ValueError(f"There is no file {folder / 'meta' / 'imagelist.tsv'}; unpack Food-101N there.")
    classes = [line for _, line in read_lines(base / "meta" / "classes.txt") if line != "class_name"]

    def listing(source: Path) -> Listing:
        """Of the verified lists, the images whose label was found right."""
        rows = ((number, *line.split("\t")) for number, line in read_lines(source) if not line.startswith("class_name"))
        right = ((n, name, name.partition("/")[0]) for n, name, *verified in rows if verified in ([], ["1"]))
        return Listing(source, base / "images", right)

    train = listing(_find(train_list, base))
    if test_list is not None:
        return train, listing(_find(test_list, base)), classes
    places = (base / "food-101", base.parent / "food-101")
    food101 = next((place for place in places if (place / "meta" / "test.txt").exists()), None)
    if food101 is None:
        raise ValueError(
            f"Food-101N is tested on Food-101, and there is no {places[1] / 'meta' / 'test.txt'}; "
            "unpack Food-101 there, or test on test_list=meta/verified_val.tsv."
        )
    source = food101 / "meta" / "test.txt"
    rows = ((number, f"{line}.jpg", line.partition("/")[0]) for number, line in read_lines(source))
    return train, Listing(source, food101 / "images", rows), classes


def _find(path: str, folder: Path) -> Path:
    """A list file: within the folder of the images, or else where `path` says."""
    return folder / path if (folder / path).exists() else locate(path, folder)


LAYOUTS = {
    "classes": _classes_layout,
    "list": _list_layout,
    "clothing1m": _clothing1m,
    "animal10n": _animal10n,
    "food101n": _food101n,
}


def _guess_layout(folder: Path, train_list: str | None) -> str:
    if any((d / "noisy_label_kv.txt").exists() for d in (folder, folder / "annotations")):
        return "clothing1m"
    if _food101n_folder(folder):
        return "food101n"
    if train_list is not None:
        return "list"
    return "animal10n" if (folder / "training").is_dir() and (folder / "testing").is_dir() else "classes"


@DATASETS.register
def folder(
    root: str | Path = ".",
    *,
    path: str = "",
    layout: Literal["auto", "classes", "list", "clothing1m", "animal10n", "food101n"] = "auto",
    train_list: str | None = None,
    test_list: str | None = None,
    classes: str | None = None,
    size: int | None = None,
    test: float = 0.2,
    split_seed: int = 0,
) -> Dataset:
    """Images in a folder of yours: one folder per class, a list of files, Clothing1M, Animal-10N or Food-101N.

    Args:
        path: the folder; as it stands, or within `root`.
        layout: `classes`: `train/<class>/*.jpg` and `test/<class>/*.jpg` (or `val`), or only `<class>/*.jpg`; `list`:
            `train_list` and `test_list` are files with lines `name label`, names relative to the folder;
            the three others as they are published; `auto` looks at the folder.
        train_list, test_list: for Clothing1M and Food-101N, other lists than the usual ones, such as
            `train_list=clean_train_key_list.txt` or `train_list=meta/verified_train.tsv`.
        classes: a file with the name of one class per line, in the order of the label numbers.
        size: side of the decoded images, 256 by default (64 for Animal-10N, whose images are that large);
            training crops 7/8 of it.
        test, split_seed: where there are no test images, the share of each class that is held out, and its seed.
    """
    place = locate(path, root)
    if not place.is_dir():
        raise ValueError(f"There is no folder {place}; write 'folder:path=...' with the folder of the images.")
    chosen = _guess_layout(place, train_list) if layout == "auto" else layout
    given = {"train_list": train_list, "test_list": test_list, "classes": classes}
    given = {knob: value for knob, value in given.items() if value is not None}
    for knob in given.keys() - inspect.signature(LAYOUTS[chosen]).parameters.keys():
        raise ValueError(f"A folder with layout={chosen} takes no {knob}; leave it out, or use layout=list.")
    train, held_out, names = LAYOUTS[chosen](place, **given)
    if len(names) < 2:
        raise ValueError(f"{train.source} holds {len(names)} classes; at least two are needed.")

    if size is None:
        size = 64 if chosen == "animal10n" else 256
    parts = [_split(train, names, size)]
    if held_out is not None:
        parts.append(_split(held_out, names, size))
    else:
        parts = [parts[0].select(index) for index in stratified_split(parts[0].labels, test, split_seed)]
    check_every_class(parts[0].labels, names, train.source)
    log.info("%s: %d images to train on, %d to test on, %d classes", place, *map(len, parts), len(names))
    return Dataset(
        name="folder",
        train=parts[0],
        test=parts[1],
        num_classes=len(names),
        class_names=tuple(names),
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        protocol={**image_protocol(size), "drop_last": False},  # one's own images may be few
    )


def _split(listing: Listing, classes: Sequence[str], size: int) -> Split:
    names, labels = collect(listing, classes)
    return Split(ImageFiles(listing.folder, names, size), labels)


def image_protocol(size: int) -> dict[str, Any]:
    """How the paper trains on WebVision, with a crop of 7/8 of the decoded size: 224 of 256."""
    return {
        "model": "resnet:depth=18" if size >= 128 else "resnet:depth=18,stem=cifar",
        "epochs": 120,
        "batch_size": 128,
        "lr": 0.1,
        "momentum": 0.9,
        "nesterov": True,
        "weight_decay": 5e-4,
        "schedule": "multistep",
        "milestones": (1 / 3, 2 / 3),
        "augment": f"crop:size={size * 7 // 8}",
        "drop_last": True,
    }
