"""Food-101N (Lee et al., 2018): pictures of food from the web, tested on Food-101."""

from __future__ import annotations

from pathlib import Path

from logitclip.data._images import own_image_defaults
from logitclip.data._listings import Listing, find_list, image_dataset, read_lines
from logitclip.data.dataset import DATASETS, Dataset, locate, with_defaults


@DATASETS.register
@with_defaults(own_image_defaults)
def food101n(
    root: str | Path = ".",
    *,
    path: str = "",
    train_list: str = "meta/imagelist.tsv",
    test_list: str | None = None,
    size: int = 256,
) -> Dataset:
    """Food-101N: 310,000 training images of 101 dishes with about 18 % wrong labels, tested on Food-101.

    Args:
        path: The published folder, or the folder that contains it, as written or within `root`.
        train_list, test_list: Lists of Food-101N, for example `meta/verified_train.tsv`, of which only the images with
            a verified label are used. Without `test_list`, the test list of Food-101 is used, from a folder `food-101`
            in or beside the folder of Food-101N.
        size: Side of the decoded images; training crops 7/8 of it.
    """
    folder = locate(path, root)
    places = (folder, folder / "Food-101N_release", folder / "food-101n")
    base = next((place for place in places if (place / "meta" / "imagelist.tsv").exists()), None)
    if base is None:
        raise ValueError(f"There is no file {folder / 'meta' / 'imagelist.tsv'}; unpack Food-101N there.")
    classes = [line for _, line in read_lines(base / "meta" / "classes.txt") if line != "class_name"]
    train = _list_images(base, train_list)
    test = _list_food101(base) if test_list is None else _list_images(base, test_list)
    return image_dataset("food101n", train, test, classes, size)


def _list_images(base: Path, name: str) -> Listing:
    """List the images of Food-101N; of a verified list, those whose label is right."""
    source = find_list(name, base)
    rows = ((number, *line.split("\t")) for number, line in read_lines(source) if not line.startswith("class_name"))
    right = ((n, name, name.partition("/")[0]) for n, name, *verified in rows if verified in ([], ["1"]))
    return Listing(source, base / "images", right)


def _list_food101(base: Path) -> Listing:
    places = (base / "food-101", base.parent / "food-101")
    food101 = next((place for place in places if (place / "meta" / "test.txt").exists()), None)
    if food101 is None:
        raise ValueError(
            f"Food-101N is tested on Food-101, and there is no {places[1] / 'meta' / 'test.txt'}; "
            "unpack Food-101 there, or test on test_list=meta/verified_val.tsv."
        )
    source = food101 / "meta" / "test.txt"
    rows = ((number, f"{line}.jpg", line.partition("/")[0]) for number, line in read_lines(source))
    return Listing(source, food101 / "images", rows)
