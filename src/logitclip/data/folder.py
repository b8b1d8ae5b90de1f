"""A folder of your own images: one folder per class, or files with a list."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from logitclip.data._images import ImageFiles, find_images, own_image_defaults
from logitclip.data._listings import (
    Listing,
    class_folders,
    find_list,
    image_dataset,
    list_classes,
    read_lines,
    read_list,
)
from logitclip.data._loading import Part
from logitclip.data.dataset import DATASETS, Dataset, locate, with_defaults, with_files


def _describe_files(root: Path, path: str) -> Iterator[bytes]:
    place = locate(path, root)
    return ImageFiles(place, sorted(find_images(place))).describe()


@DATASETS.register
@with_files(_describe_files)
@with_defaults(own_image_defaults)
def folder(
    root: str | Path = ".",
    *,
    path: str = "",
    train_list: str | None = None,
    test_list: str | None = None,
    classes: str | None = None,
    size: int = 256,
    test: float = 0.2,
    fold: int = 0,
    split_seed: int = 0,
    memory: bool = False,
    raw: bool = False,
) -> Dataset:
    """Your own images: one folder per class, or a list of files.

    Without `train_list`, the folder holds `train/<class>/*.jpg` and `test/<class>/*.jpg` (or `val`), or only
    `<class>/*.jpg`; a `train` without folders in it is a class.

    Args:
        path: The folder, as written or within `root`.
        train_list, test_list: Files with lines `name label`; names are relative to the folder.
        classes: A file with one class name per line, in the order of the label numbers.
        size: Side of the decoded images; training crops 7/8 of it.
        test: The share of each class to hold out, if there are no test images.
        fold: Which of the `1 / test` disjoint parts to hold out, from 0.
        split_seed: Seed of this split.
        memory: Decode every image once, keep it in memory, and skip unreadable images with a warning.
    """
    place = locate(path, root)
    if not place.is_dir():
        raise ValueError(f"There is no folder {place}; write 'folder:path=...' with the folder of the images.")
    if train_list is not None:
        train, held_out, names = _from_lists(place, train_list, test_list, classes)
    elif test_list is not None or classes is not None:
        raise ValueError("test_list and classes need train_list=FILE, a file with lines 'name label'.")
    else:
        train, held_out, names = _from_folders(place)
    part = Part(test, fold, split_seed)
    return image_dataset("folder", train, held_out, names, size, part=part, memory=memory and not raw)


def _from_folders(folder: Path) -> tuple[Listing, Listing | None, Sequence[str]]:
    inner = train_folder(folder)
    train, classes = list_classes(folder if inner is None else inner)
    for name in ("test", "val") if inner is not None else ():
        if (folder / name).is_dir():
            return train, list_classes(folder / name, classes)[0], classes
    return train, None, classes


def train_folder(folder: Path) -> Path | None:
    """Return the folder `train` within a folder; None if there is none, or if it is a class: it holds no folders."""
    train = folder / "train"
    return train if train.is_dir() and class_folders(train) else None


def _from_lists(
    folder: Path, train_list: str, test_list: str | None, classes: str | None
) -> tuple[Listing, Listing | None, Sequence[str]]:
    source = find_list(train_list, folder)
    rows = list(read_list(source))
    if classes is not None:
        names = [line for _, line in read_lines(find_list(classes, folder))]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"{find_list(classes, folder)} names the class {twice[0]!r} twice.")
    else:
        names = sorted({label for _, _, label in rows})
        if all(name.isdecimal() and name == str(int(name)) for name in names):
            count = max(map(int, names), default=-1) + 1
            if count > len(rows):  # checked before that many names are made
                raise ValueError(
                    f"{source} has a label {count - 1} and only {len(rows)} images; number the classes from 0."
                )
            names = [str(i) for i in range(count)]
    test = None
    if test_list is not None:
        test_source = find_list(test_list, folder)
        test = Listing(test_source, folder, read_list(test_source))
    return Listing(source, folder, rows), test, names
