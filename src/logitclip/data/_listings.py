"""Listings of image files with labels, and datasets made from them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from logitclip.data._images import IMAGE_SUFFIXES, IMAGENET_MEAN, IMAGENET_STD, ImageFiles, find_images, read_all
from logitclip.data._loading import Part, stratified_split
from logitclip.data.dataset import Dataset, Split, locate

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Listing:
    """Image files with labels as text; `rows` are `(line number, file name, label)`."""

    source: Path  # the list file or the listed folder, for messages
    folder: Path  # file names are relative to it
    rows: Iterable[tuple[int, str, str]]

    def where(self, number: int) -> str:
        return f"{self.source}, line {number}" if number else f"{self.source}"


def read_lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """Yield `(line number, line)` of a text file, skipping blank lines."""
    try:
        with open(path, encoding="utf-8-sig", errors="surrogateescape") as lines:
            for number, line in enumerate(lines, 1):
                if line := line.strip():
                    yield number, line
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"There is no file {path}; put it there or name the right folder.") from None


def read_list(path: str | Path) -> Iterator[tuple[int, str, str]]:
    """Yield `(line number, file name, label)` of a file with lines `name label`; names may contain spaces."""
    for number, line in read_lines(path):
        name, _, label = line.rpartition("\t" if "\t" in line else " ")
        if not name:
            raise ValueError(f"{path}, line {number}: expected a file name and a label, got {line!r}.")
        yield number, name.rstrip(), label


def _leaves_folder(name: str) -> bool:
    return os.path.isabs(name) or name[0] in "/\\" or ".." in name.replace("\\", "/").split("/")


def collect(listing: Listing, classes: Sequence[str]) -> tuple[list[str], Tensor]:
    """Check a listing and return its file names and its labels as class positions.

    Args:
        listing: Labels are class names or class positions.
        classes: The K class names.

    Returns:
        N file names and the labels, int64 [N].

    Raises:
        ValueError: If a path leaves the folder, a label is unknown, or a file is missing.
    """
    index = {str(i): i for i in range(len(classes))} | {name: i for i, name in enumerate(classes)}
    names, labels, numbers = [], [], []
    for number, name, label in listing.rows:
        if _leaves_folder(name):
            raise ValueError(
                f"{listing.where(number)}: {name!r} is outside {listing.folder}; write paths relative to that folder."
            )
        if label not in index:
            raise ValueError(
                f"{listing.where(number)}: label {label!r} is not one of the {len(classes)} classes; "
                f"use 0..{len(classes) - 1} or the class's name."
            )
        names.append(name)
        labels.append(index[label])
        numbers.append(number)
    if not names:
        raise ValueError(f"{listing.source} lists no image.")
    if missing := _find_missing(listing.folder, names):
        others = f" (and {len(missing) - 1} others)" if len(missing) > 1 else ""
        raise ValueError(
            f"{listing.where(numbers[missing[0]])}: there is no image {listing.folder / names[missing[0]]}{others}; "
            "unpack the images there or remove the line."
        )
    return names, torch.tensor(labels)


def _find_missing(folder: Path, names: list[str]) -> list[int]:
    """Return the positions of names without a file. Listing each folder once is much faster than one stat per file."""
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
    """Raise a ValueError if a class has no training example."""
    empty = (torch.bincount(labels, minlength=len(classes)) == 0).nonzero().flatten().tolist()
    if empty:
        more = len(empty) - 1
        others = f"; {more} other {'class has' if more == 1 else 'classes have'} none either" if more else ""
        raise ValueError(
            f"{source}: class {classes[empty[0]]!r} has no training image{others}; add some or remove the class "
            "(labels count from 0)."
        )


def class_folders(folder: Path) -> list[str]:
    """Return the names of the folders in a folder, sorted, without hidden ones."""
    return sorted(e.name for e in os.scandir(folder) if e.is_dir() and not e.name.startswith("."))


def list_classes(folder: Path, classes: Sequence[str] | None = None) -> tuple[Listing, Sequence[str]]:
    """List the images of one folder per class. Without `classes`, the sorted folder names are the classes."""
    found = class_folders(folder)
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


def find_list(path: str, folder: Path) -> Path:
    """Return a list file: within the folder of the images if it is there, else where `path` says."""
    return folder / path if (folder / path).exists() else locate(path, folder)


def image_dataset(
    name: str,
    train: Listing,
    test: Listing | None,
    classes: Sequence[str],
    size: int,
    *,
    part: Part | None = None,
    memory: bool = False,
) -> Dataset:
    """Build a dataset from listings.

    Args:
        name: Name of the dataset.
        train: The training images.
        test: The test images; None holds out `part` of the training images.
        classes: The K class names.
        size: Side of the decoded images, in pixels.
        part: The part to hold out; by default a fifth.
        memory: Decode every image once and keep it in memory. Unreadable images are skipped with a warning.

    Raises:
        ValueError: If there are fewer than two classes, a class has no image, or a listing is wrong.
    """
    if len(classes) < 2:
        raise ValueError(f"{train.source} holds {len(classes)} classes; at least two are needed.")
    parts = [_make_split(train, classes, size, memory)]
    if test is not None:
        parts.append(_make_split(test, classes, size, memory))
    else:
        part = part or Part()
        split = stratified_split(parts[0].labels, part.share, part.seed, fold=part.fold)
        parts = [parts[0].select(index) for index in split]
    check_every_class(parts[0].labels, classes, train.source)
    log.info("%s: %d training images, %d test images, %d classes", train.source, *map(len, parts), len(classes))
    return Dataset(
        name=name,
        train=parts[0],
        test=parts[1],
        num_classes=len(classes),
        class_names=tuple(classes),
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )


def _make_split(listing: Listing, classes: Sequence[str], size: int, memory: bool) -> Split:
    names, labels = collect(listing, classes)
    files, rows = ImageFiles(listing.folder, names, size), torch.arange(len(names))
    if not memory:
        return Split(files, labels, rows=rows)
    images, rows = read_all(files)
    if not len(rows):
        raise ValueError(f"{listing.source} holds no readable image.")
    return Split(images, labels[rows], rows=rows)
