"""Speed of data augmentation on CIFAR-10, and of label noise.

    python benchmarks/data.py --root DATA

DATA has CIFAR-10 in the form that `logitclip train --data cifar10` reads. Three pipelines flip, crop the zero-padded
image and normalise, from stored bytes to a batch of floats. They run in one process with interleaved repeats:

- pil: image by image with Pillow, like most public training code;
- gather: the whole batch at once, with an index for every pixel;
- ours: `batches` and `transform`.

The results go to benchmarks/results/, one row per case: median, minimum and maximum over the repeats of the images per
second, and of their ratio to Pillow's. Time is CPU time over all threads, so that other programs count as little as
possible. Then benchmarks/noise.py runs with the same options.
"""

from __future__ import annotations

import argparse
import csv
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import noise as noise_benchmark
import numpy as np
import PIL
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn.functional import pad

from logitclip.data import Dataset, batches, load, transform

PADDING = 4


def pil_pipeline(data: Dataset) -> Callable[[int], Tensor]:
    """Process image by image: flip, pad and crop with Pillow, convert to floats in [0, 1], normalise."""
    images = torch.as_tensor(data.train.x)
    pixels = np.ascontiguousarray(images.permute(0, 2, 3, 1).numpy())
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (data.mean, data.std))
    rng = random.Random(0)

    def one(i: int, augment: bool = True) -> Tensor:
        image = Image.fromarray(pixels[i])
        if augment:
            if rng.random() < 0.5:
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            image = ImageOps.expand(image, border=PADDING, fill=0)
            left, top = rng.randint(0, 2 * PADDING), rng.randint(0, 2 * PADDING)
            image = image.crop((left, top, left + 32, top + 32))
        x = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div_(255)
        return x.sub_(mean).div_(std)

    def run(batch_size: int) -> Tensor:
        x = torch.empty(0)
        for part in torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0)).split(batch_size):
            x = torch.stack([one(i) for i in part.tolist()])
        return x

    sample = torch.stack([one(i, augment=False) for i in range(100)])
    torch.testing.assert_close(transform("none", data.mean, data.std)(images[:100], None), sample)  # same numbers
    return run


def gather_pipeline(data: Dataset) -> Callable[[int], Tensor]:
    """Process a whole batch the obvious way: index every pixel of every image, and gather once."""
    images, generator = torch.as_tensor(data.train.x), torch.Generator().manual_seed(0)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (data.mean, data.std))
    steps = torch.arange(32)

    def run(batch_size: int) -> Tensor:
        x = torch.empty(0)
        for part in torch.randperm(len(images), generator=generator).split(batch_size):
            n, wide = len(part), 32 + 2 * PADDING
            rows, columns = (torch.randint(0, 2 * PADDING + 1, (n, 1), generator=generator) + steps for _ in range(2))
            flip = torch.rand(n, 1, generator=generator) < 0.5
            columns = torch.where(flip, wide - 1 - columns, columns)
            index = (rows[:, :, None] * wide + columns[:, None, :]).view(n, 1, -1).expand(n, 3, -1)
            x = pad(images[part], [PADDING] * 4).view(n, 3, -1).gather(2, index).view(n, 3, 32, 32)
            x = x.float().div_(255).sub_(mean).div_(std)
        return x

    return run


def our_pipeline(data: Dataset) -> Callable[[int], Tensor]:
    view, generator = transform(f"flip_crop:padding={PADDING}", data.mean, data.std), torch.Generator().manual_seed(0)

    def run(batch_size: int) -> Tensor:
        x = torch.empty(0)
        for _, images, _ in batches(data.train, batch_size, generator=generator):
            x = view(images, generator)
        return x

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder with CIFAR-10")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    full = load("cifar10", args.root)
    count = 5120
    data = Dataset(
        "part", full.train.select(torch.arange(count)), full.test, 10, full.class_names, mean=full.mean, std=full.std
    )
    makers = {"pil": pil_pipeline, "gather": gather_pipeline, "ours": our_pipeline}
    pipelines = {name: make(data) for name, make in makers.items()}
    speeds: dict[tuple[int, str], list[float]] = {(b, name): [] for b in (128, 512) for name in pipelines}
    for repeat in range(3 * args.repeats + 1):  # repeats are short; the first one warms up
        for (batch_size, name), found in speeds.items():
            rounds, x = 1 if name == "pil" else 5, torch.empty(0)
            start = time.process_time()
            for _ in range(rounds):
                x = pipelines[name](batch_size)
            took = time.process_time() - start
            assert x.dtype == torch.float32
            assert x.shape[1:] == (3, 32, 32)
            if repeat:
                found.append(rounds * count / took)

    args.out.mkdir(parents=True, exist_ok=True)
    versions = f"torch{torch.__version__}-numpy{np.__version__}-pillow{PIL.__version__}"
    path = args.out / f"data-cpu-{platform.machine()}-{args.threads}thread-{versions}.csv"
    summary = (statistics.median, min, max)
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        header = ["case", "batch", "repeats", "images_per_s", "min", "max", "times_pil", "min", "max"]
        writer.writerow(header)
        line = "{:<8}{:>7}{:>9}" + "{:>14}" * 3 + "{:>11}" * 3
        print(line.format(*header))
        for (batch_size, name), found in speeds.items():
            ratios = [a / b for a, b in zip(found, speeds[batch_size, "pil"], strict=True)]
            row = [name, batch_size, len(found), *(round(f(found)) for f in summary)]
            row += [f"{f(ratios):.1f}" for f in summary]
            writer.writerow(row)
            print(line.format(*row))
    print(path)
    noise_benchmark.main()


if __name__ == "__main__":
    main()
