"""Clothing1M (Xiao et al., 2015): a million pictures of clothes from shops, labelled by the words around them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from logitclip.data._images import own_image_defaults
from logitclip.data._listings import Listing, find_list, image_dataset, read_lines, read_list
from logitclip.data.dataset import DATASETS, Dataset, locate, with_defaults

# In the order of the label numbers.
CLASSES = (
    *("T-shirt", "Shirt", "Knitwear", "Chiffon", "Sweater", "Hoodie", "Windbreaker"),
    *("Jacket", "Down coat", "Suit", "Shawl", "Dress", "Vest", "Underwear"),
)


@DATASETS.register
@with_defaults(own_image_defaults)
def clothing1m(
    root: str | Path = ".",
    *,
    path: str = "",
    train_list: str = "noisy_train_key_list.txt",
    test_list: str = "clean_test_key_list.txt",
    size: int = 256,
) -> Dataset:
    """Clothing1M: 1,000,000 noisy training images and 10,526 clean test images of clothes, in 14 classes.

    Args:
        path: The published folder, as written or within `root`; its lists may be in a subfolder `annotations`.
        train_list, test_list: The key lists to use, for example `train_list=clean_train_key_list.txt`.
        size: Side of the decoded images; training crops 7/8 of it.
    """
    folder = locate(path, root)
    lists = next((d for d in (folder, folder / "annotations") if (d / "noisy_label_kv.txt").exists()), folder)
    unpacked = (folder / "images").is_dir()  # otherwise the folders 0..9 are where `images` should be

    def listing(source: Path) -> Listing:
        labels = lists / ("noisy_label_kv.txt" if source.name.startswith("noisy") else "clean_label_kv.txt")
        known = {name: label for _, name, label in read_list(labels)}

        def rows() -> Iterator[tuple[int, str, str]]:
            for number, key in read_lines(source):
                if key not in known:
                    raise ValueError(f"{source}, line {number}: {key!r} has no label in {labels}.")
                yield number, key if unpacked else key.removeprefix("images/"), known[key]

        return Listing(source, folder, rows())

    train, test = (listing(find_list(name, lists)) for name in (train_list, test_list))
    return image_dataset("clothing1m", train, test, CLASSES, size)
