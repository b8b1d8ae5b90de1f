"""Animal-10N (Song et al., 2019): pictures of five pairs of animals that people confuse."""

from __future__ import annotations

from pathlib import Path

from logitclip.data._images import find_images, own_image_defaults
from logitclip.data._listings import Listing, image_dataset
from logitclip.data.dataset import DATASETS, Dataset, locate, with_defaults

# In the order of the label numbers.
CLASSES = ("cat", "lynx", "wolf", "coyote", "cheetah", "jaguar", "chimpanzee", "orangutan", "hamster", "guinea pig")


@DATASETS.register
@with_defaults(own_image_defaults)
def animal10n(root: str | Path = ".", *, path: str = "", size: int = 64) -> Dataset:
    """Animal-10N: 50,000 training images with about 8 % wrong labels and 5,000 test images, 64x64 pixels.

    Args:
        path: The published folder with `training` and `testing`, as written or within `root`. A file's label is the
            number before the underscore in its name.
        size: Side of the decoded images; training crops 7/8 of it.
    """
    folder = locate(path, root)

    def listing(part: Path) -> Listing:
        if not part.is_dir():
            raise ValueError(f"There is no folder {part}; unpack Animal-10N's images there.")
        return Listing(part, part, [(0, name, name.partition("_")[0]) for name in sorted(find_images(part))])

    train, test = listing(folder / "training"), listing(folder / "testing")
    return image_dataset("animal10n", train, test, CLASSES, size)
