"""WebVision 1.0 (Li et al., 2017): images that two search engines found for the 1,000 classes of ILSVRC12."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch

from logitclip.data._images import IMAGENET_MEAN, IMAGENET_STD, ImageFiles, find_images, image_defaults
from logitclip.data._listings import Listing, check_every_class, collect, read_lines, read_list
from logitclip.data.dataset import DATASETS, Dataset, Split, locate, with_defaults

log = logging.getLogger(__name__)

MINI = 50  # classes of the usual small version
SITE = "https://data.vision.ee.ethz.ch/cvl/webvision/dataset2017.html"


@DATASETS.register
@with_defaults(image_defaults)
def webvision(
    root: str | Path = ".",
    *,
    subset: Literal["mini", "full"] = "mini",
    test: Literal["ilsvrc", "webvision"] = "ilsvrc",
    ilsvrc: str | None = None,
    size: int = 256,
) -> Dataset:
    """WebVision: mini (the Google images of the first 50 classes) or full, with the noisy labels of the web.

    The published folders are read as they are, from `root` or `root/webvision`: `info/train_filelist_google.txt`,
    `info/train_filelist_flickr.txt` (full), `info/val_filelist.txt` with `val_images_256/`, `info/synsets.txt`.
    Classes are numbered in the order of their WordNet ids, so that ILSVRC12's numbers are the same.

    Args:
        subset: Mini or full.
        test: The test images: the validation images of ILSVRC12 or of WebVision, of the same classes.
        ilsvrc: Path of the ILSVRC12 images, as written or within `root`; by default `ilsvrc12` in either folder. It is
            a folder with one folder per WordNet id, in it or in its `val`; a folder with the images and a list
            `val.txt`; or such a list of lines `name label`, with names relative to its folder or to `val` there.
        size: Side of the decoded images; training crops 7/8 of it, 224 of 256.
    """
    places = (Path(root), Path(root) / "webvision")
    folder = next((place for place in places if (place / "info").is_dir()), None)
    if folder is None:
        raise ValueError(f"There is no WebVision in {places[0]} or {places[1]} (no folder 'info'); get it from {SITE}.")
    synsets = [line for _, line in read_lines(folder / "info" / "synsets.txt")]
    kept = synsets[:MINI] if subset == "mini" else synsets

    sources = ["google"] if subset == "mini" else ["google", "flickr"]
    lists = [folder / "info" / f"train_filelist_{source}.txt" for source in sources]
    parts = [collect(Listing(file, folder, _read_kept(file, len(kept), len(synsets))), kept) for file in lists]
    names, labels = [name for part, _ in parts for name in part], torch.cat([part for _, part in parts])
    check_every_class(labels, kept, " and ".join(map(str, lists)))

    if test == "webvision":
        file = folder / "info" / "val_filelist.txt"
        tested = Listing(file, folder / "val_images_256", _read_kept(file, len(kept), len(synsets)))
    else:
        given = (locate(ilsvrc, root),) if ilsvrc else tuple(place / "ilsvrc12" for place in (Path(root), folder))
        tested = _list_ilsvrc(next((place for place in given if place.exists()), given[0]), synsets, len(kept))
    test_names, test_labels = collect(tested, kept)
    log.info("WebVision %s: %d images to train on, %d to test on", subset, len(names), len(test_names))
    return Dataset(
        name="webvision",
        train=Split(ImageFiles(folder, names, size), labels),
        test=Split(ImageFiles(tested.folder, test_names, size), test_labels),
        num_classes=len(kept),
        class_names=tuple(_first_name(line) for line in kept),
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )


def _first_name(synset: str) -> str:
    """
    >>> _first_name("n01443537 goldfish, Carassius auratus")
    'goldfish'
    """
    wnid, _, names = synset.partition(" ")
    return names.partition(",")[0].strip() or wnid


def _read_kept(file: Path, kept: int, known: int) -> Iterator[tuple[int, str, str]]:
    """Yield the lines of the first `kept` classes, skipping other known classes; unknown labels stay, to be refused."""
    skipped = {str(i) for i in range(kept, known)}
    return (row for row in read_list(file) if row[2] not in skipped)


def _list_ilsvrc(place: Path, synsets: Sequence[str], kept: int) -> Listing:
    """List the ILSVRC12 validation images of the first `kept` classes, in any common layout."""
    wnids = [line.split()[0] for line in synsets]
    for folder in (place, place / "val"):
        if (folder / wnids[0]).is_dir():
            found = {wnid: sorted(find_images(folder, wnid)) for wnid in wnids[:kept]}
            for wnid, images in found.items():
                if not images:
                    raise ValueError(
                        f"There is no image in {folder / wnid}; unpack ILSVRC12's validation images there."
                    )
            return Listing(folder, folder, [(0, name, str(i)) for i, wnid in enumerate(found) for name in found[wnid]])
    lists = (place, place / "val.txt", place / "val" / "val.txt")
    file = next((file for file in lists if file.is_file()), None)
    if file is None:
        raise ValueError(
            f"There are no ILSVRC12 validation images in {place} (neither a folder {wnids[0]} nor a list val.txt); "
            "say where they are with ilsvrc=FOLDER, or test on WebVision's own with test=webvision."
        )
    if wnids != sorted(wnids):
        raise ValueError(f"The classes of {file} are in the order of their WordNet ids, and info/synsets.txt is not.")
    first = next((name for _, name, _ in read_list(file)), "")
    nested = not (file.parent / first).exists() and (file.parent / "val" / first).exists()
    return Listing(file, file.parent / "val" if nested else file.parent, _read_kept(file, kept, len(wnids)))
