"""CIFAR-10 and CIFAR-100, from the official folders or archives, with the human labels of CIFAR-N."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from logitclip.data._download import Remote, fetch, md5, unpack, verify
from logitclip.data._pickles import as_labels, human_labels, read_labels, read_pickle
from logitclip.data.dataset import DATASETS, Dataset, Defaults, Split, with_defaults

PIXELS = 3 * 32 * 32


# -- the releases ----------------------------------------------------------------------------------------------------


Constants = tuple[tuple[float, ...], tuple[float, ...]]  # mean and deviation of each channel
Normalisation = Literal["logitclip", "dividemix", "sop"]


@dataclass(frozen=True)
class Layout:
    """One form of a release: an archive with one folder, and the MD5 of each file."""

    archive: Remote
    folder: str
    train: Mapping[str, str]
    test: Mapping[str, str]


@dataclass(frozen=True)
class Release:
    """CIFAR-10 or CIFAR-100 as published."""

    name: str
    title: str
    layouts: tuple[Layout, ...]  # the binary one first: downloads use it, because it needs no pickle
    classes: Mapping[str, tuple[str, ...]]  # the labels of a record, in its order, as the Python files call them
    human: Remote
    human_sets: Mapping[str, Mapping[str, str]]  # for each kind of label: name in that file -> MD5 of its 50,000 bytes
    constants: Mapping[str, Constants]  # of each code base
    asymmetric: Mapping[int, int] | None = None
    count: int = 50_000
    test_count: int = 10_000


KRIZ = "https://www.cs.toronto.edu/~kriz"
CIFAR_N = "https://github.com/UCSC-REAL/cifar-10-100n/raw/main/data"

CIFAR10 = Release(
    name="cifar10",
    title="CIFAR-10",
    layouts=(
        Layout(
            Remote(f"{KRIZ}/cifar-10-binary.tar.gz", 170_052_171, "c32a1d4ab5d03f1284b67883e8d87530"),
            folder="cifar-10-batches-bin",
            train={
                "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
                "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
                "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
                "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
                "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
            },
            test={"test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d"},
        ),
        Layout(
            Remote(f"{KRIZ}/cifar-10-python.tar.gz", 170_498_071, "c58f30108f718f92721af3b95e74349a"),
            folder="cifar-10-batches-py",
            train={
                "data_batch_1": "c99cafc152244af753f735de768cd75f",
                "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
                "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
                "data_batch_4": "634d18415352ddfa80567beed471001a",
                "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
            },
            test={"test_batch": "40351d587109b95175f43aff81a1287e"},
        ),
    ),
    classes={"labels": tuple("airplane automobile bird cat deer dog frog horse ship truck".split())},  # noqa: SIM905
    human=Remote(f"{CIFAR_N}/CIFAR-10_human.pt"),
    human_sets={
        "labels": {
            "aggre_label": "4c923cb1af2aee8a8ad935b5aa4a71e8",
            "worse_label": "ea8c18d6bc66d6bed531867413bd9b38",
            "random_label1": "b2bfe565c66e32e0240ddc3b23b8b9e2",
            "random_label2": "2b82ae63b0a579ce80d1f57b2c38b313",
            "random_label3": "dbc67e1f13d8fc043fce72a07e745db5",
        }
    },
    constants={
        "logitclip": ((0.492, 0.482, 0.446), (0.247, 0.244, 0.262)),
        "dividemix": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
        "sop": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    },
    asymmetric={9: 1, 2: 0, 4: 7, 3: 5, 5: 3},  # truck -> automobile, bird -> airplane, deer -> horse, cat <-> dog
)

CIFAR100 = Release(
    name="cifar100",
    title="CIFAR-100",
    layouts=(
        Layout(
            Remote(f"{KRIZ}/cifar-100-binary.tar.gz", 168_513_733, "03b5dce01913d631647c71ecec9e9cb8"),
            folder="cifar-100-binary",
            train={"train.bin": "6172c7755cfe09b2fe270c85cebc1b15"},
            test={"test.bin": "4499cfba6c016c1be1438163640a0898"},
        ),
        Layout(
            Remote(f"{KRIZ}/cifar-100-python.tar.gz", 169_001_437, "eb9058c3a382ffc7106e4002c42a8d85"),
            folder="cifar-100-python",
            train={"train": "16019d7e3df5f24257cddd939b257f8d"},
            test={"test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
        ),
    ),
    classes={
        "coarse_labels": tuple(
            """aquatic_mammals fish flowers food_containers fruit_and_vegetables household_electrical_devices
            household_furniture insects large_carnivores large_man-made_outdoor_things large_natural_outdoor_scenes
            large_omnivores_and_herbivores medium_mammals non-insect_invertebrates people reptiles small_mammals trees
            vehicles_1 vehicles_2""".split()  # noqa: SIM905
        ),
        "fine_labels": tuple(
            """apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel
            can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur
            dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion
            lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree
            pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal
            shark shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank
            telephone television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman
            worm""".split()  # noqa: SIM905
        ),
    },
    human=Remote(f"{CIFAR_N}/CIFAR-100_human.pt"),
    human_sets={
        "fine_labels": {"noisy_label": "0cd7feaf8063dff76fb1f4663463866e"},
        "coarse_labels": {"noisy_coarse_label": "a41ceba4beaaf95ada2755b50f2c8e3c"},
    },
    constants={
        "logitclip": ((0.507, 0.487, 0.441), (0.267, 0.256, 0.276)),
        "dividemix": ((0.507, 0.487, 0.441), (0.267, 0.256, 0.276)),
        "sop": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    },
)

DEFAULTS: Defaults = {
    "model": "wrn:depth=40,width=2",
    "epochs": 200,
    "batch_size": 128,
    "lr": 0.1,
    "momentum": 0.9,
    "nesterov": False,
    "weight_decay": 5e-4,
    "schedule": "multistep",
    "milestones": (0.4, 0.7),
    "augment": "flip_crop:padding=4",
    "drop_last": True,
}


# -- the datasets ----------------------------------------------------------------------------------------------------


@DATASETS.register
@with_defaults(DEFAULTS, asymmetric=CIFAR10.asymmetric, num_classes=10)
def cifar10(
    root: str | Path,
    *,
    subset: bool = False,
    human: bool = False,
    normalisation: Normalisation = "logitclip",
    download: bool = False,
    mirror: str | Path | None = None,
) -> Dataset:
    """CIFAR-10: 50,000 + 10,000 photos of 32x32 pixels in 10 classes, and the CIFAR-10N labels if they are there.

    Args:
        root: Has ``cifar-10-batches-bin``, ``cifar-10-batches-py`` or one of their archives.
        subset: Accept a part of the data, or changed data, without checking counts and checksums. Human labels then
            need ``train_index.npy`` beside the files, the positions of the images among the official 50,000.
        human: Require CIFAR-10N: ``CIFAR-10_human.pt`` must be in `root`, or is downloaded.
        normalisation: Whose mean and standard deviation: those of the code of LogitClip, DivideMix or SOP.
    """
    return _load_release(CIFAR10, "labels", Path(root), subset, human, normalisation, download, mirror)


@DATASETS.register
@with_defaults(DEFAULTS)
def cifar100(
    root: str | Path,
    *,
    labels: Literal["fine", "coarse"] = "fine",
    subset: bool = False,
    human: bool = False,
    normalisation: Normalisation = "logitclip",
    download: bool = False,
    mirror: str | Path | None = None,
) -> Dataset:
    """CIFAR-100: 50,000 + 10,000 photos of 32x32 pixels in 100 classes, and the CIFAR-100N labels if they are there.

    Args:
        root: Has ``cifar-100-binary``, ``cifar-100-python`` or one of their archives.
        labels: The 100 fine classes, or the 20 coarse ones.
        subset: Accept a part of the data, or changed data, without checking counts and checksums. Human labels then
            need ``train_index.npy`` beside the files, the positions of the images among the official 50,000.
        human: Require CIFAR-100N: ``CIFAR-100_human.pt`` must be in `root`, or is downloaded.
        normalisation: Whose mean and standard deviation: those of the code of LogitClip, DivideMix or SOP.
    """
    if labels not in ("fine", "coarse"):
        raise ValueError(f"labels must be 'fine' or 'coarse', got {labels!r}.")
    return _load_release(CIFAR100, f"{labels}_labels", Path(root), subset, human, normalisation, download, mirror)


def _load_release(
    release: Release,
    kind: str,
    root: Path,
    subset: bool,
    human: bool,
    normalisation: str,
    download: bool,
    mirror: str | Path | None,
) -> Dataset:
    if normalisation not in release.constants:
        raise ValueError(f"normalisation must be one of {', '.join(release.constants)}; got {normalisation!r}.")
    mean, std = release.constants[normalisation]
    folder, layout = _find_layout(release, root, download, mirror)
    train = _load_split(release, folder, layout.train, release.count, kind, subset)
    test = _load_split(release, folder, layout.test, release.test_count, kind, subset)
    positions = _read_positions(folder / "train_index.npy", len(train), release.count) if subset else None
    file = _find_human(release, root, human, download, mirror)
    if subset and positions is None and len(train) < release.count:
        if human:
            raise ValueError(
                f"Human labels of a part of the data need {folder / 'train_index.npy'}, the positions of its images."
            )
        file = None
    return Dataset(
        name=release.name,
        train=train,
        test=test,
        num_classes=len(release.classes[kind]),
        class_names=release.classes[kind],
        asymmetric=release.asymmetric,
        mean=mean,
        std=std,
        label_sets={} if file is None else _read_human(release, kind, file, train.labels, positions),
    )


# -- the files -------------------------------------------------------------------------------------------------------


def _find_layout(release: Release, root: Path, download: bool, mirror: str | Path | None) -> tuple[Path, Layout]:
    """Find the folder of the release; unpack or download it if needed."""
    for layout in release.layouts:
        if (root / layout.folder).is_dir():
            return root / layout.folder, layout
    archives = [layout for layout in release.layouts if (root / layout.archive.name).is_file()]
    layout = (archives or release.layouts)[0]
    archive = root / layout.archive.name
    if download:
        fetch(layout.archive, root, mirror)
    elif archives:
        verify(archive, layout.archive)
    else:
        raise ValueError(
            f"{release.title} is not in {root}: put the folder {layout.folder} or {archive.name} there (from "
            f"{layout.archive.url}), or ask for the download (--download)."
        )
    return unpack(archive, root / layout.folder), layout


def _find_human(release: Release, root: Path, required: bool, download: bool, mirror: str | Path | None) -> Path | None:
    official = root / release.human.name
    for path in (official, official.with_suffix(".npz")):
        if path.is_file():
            return path
    if not required:
        return None
    if not download:
        raise ValueError(
            f"There is no {release.human.name} in {root}: get it from {release.human.url}, or ask for the download "
            "(--download)."
        )
    return fetch(release.human, root, mirror)


def _read_human(release: Release, kind: str, file: Path, clean: Tensor, positions: Tensor | None) -> dict[str, Tensor]:
    published = release.human_sets[kind]
    return human_labels(
        file,
        clean,
        len(release.classes[kind]),
        keys=published if positions is None else dict.fromkeys(published),
        clean_key="clean_coarse_label" if kind == "coarse_labels" else "clean_label",
        positions=positions,
    )


def _load_split(
    release: Release, folder: Path, files: Mapping[str, str], official: int, kind: str, subset: bool
) -> Split:
    """Read the images in `files` with one kind of labels."""
    there = [name for name in files if (folder / name).is_file()]
    if missing := [name for name in files if name not in there and not (subset and there)]:
        raise ValueError(f"{folder / missing[0]} is missing: unpack the archive of {release.title} again.")
    parts = [_read_file(folder / name, release) for name in there]
    x = torch.from_numpy(np.concatenate([images for images, _ in parts])).view(-1, 3, 32, 32)
    if not subset:
        if len(x) != official:
            raise ValueError(
                f"{folder} has {len(x):,} records in {', '.join(files)} where {release.title} has {official:,}: put "
                f"the official files there, or write '{release.name}:subset=true' to use a part of the data."
            )
        for name, digest in files.items():
            if md5(folder / name) != digest:
                raise ValueError(
                    f"{folder / name} is damaged: its checksum is not the official file's. Unpack the archive of "
                    f"{release.title} again, or write '{release.name}:subset=true' to use changed data."
                )
    return Split(x, torch.cat([labels[kind] for _, labels in parts]))


def _read_file(path: Path, release: Release) -> tuple[np.ndarray, dict[str, Tensor]]:
    """Read the pixels of a file, uint8 [n, 3072], and its labels of every kind."""
    kinds = list(release.classes)
    if path.suffix == ".bin":  # records: a byte for each label, then the pixels
        raw, width = np.fromfile(path, np.uint8), len(kinds) + PIXELS
        if not raw.size or raw.size % width:
            raise ValueError(f"{path} is cut off: its {raw.size:,} bytes are not a multiple of {width}-byte records.")
        records = raw.reshape(-1, width)
        images, columns = records[:, len(kinds) :], {kind: records[:, i] for i, kind in enumerate(kinds)}
    else:
        content = read_pickle(path)
        if missing := [key for key in ("data", *kinds) if key not in content]:
            raise ValueError(f"{path} has no {missing[0]!r}: it is not a file of {release.title}.")
        images, columns = content["data"], {kind: np.asarray(content[kind]) for kind in kinds}
        if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape[1:] != (PIXELS,):
            raise ValueError(
                f"{path} must have its images as bytes [n, {PIXELS}]: it is not a file of {release.title}."
            )
    labels = {
        kind: as_labels(column, f"{path}: {kind}", length=len(images), num_classes=len(release.classes[kind]))
        for kind, column in columns.items()
    }
    return images, labels


def _read_positions(path: Path, count: int, official: int) -> Tensor | None:
    """Read which of the official training images a subset holds, if a file says so."""
    if not path.is_file():
        return None
    positions = torch.from_numpy(read_labels(path)[path.stem].astype(np.int64))
    if positions.shape != (count,) or not 0 <= int(positions.min()) <= int(positions.max()) < official:
        raise ValueError(
            f"{path} must be {count} positions in 0..{official - 1}: which images of the full data these are."
        )
    return positions
