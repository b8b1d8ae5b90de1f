"""Images per second of a whole training step, including the data, against a plain loop; and the cost of the clip.

    python benchmarks/throughput.py --root DATA

DATA has CIFAR-10 in the form that `logitclip train --data cifar10` reads. The network is WRN-40-2, with batches of 128
and SGD with momentum, on a CPU. The plain loop is a typical script: it flips, pads, crops, converts and normalises each
PIL image by itself, and keeps the network in PyTorch's default layout. The other cases change one thing at a time:
augmentation of whole batches, the channels-last layout, both, and the loop of `logitclip train` with its metrics,
without and with LogitClip. All cases run in one process with interleaved repeats.

A step takes seconds and varies by far more than the cost of the clip, so that is measured separately: the time of
criterion and gradient on a batch of logits with the clip minus the time without it, as a share of the median step. The
profiler gives the share of the convolutions, which limits what a faster loop can gain.

The results go to benchmarks/results/: for each case the median, minimum and maximum of the images per second, and of
the ratio to the plain loop in the same repeat.
"""

from __future__ import annotations

import argparse
import csv
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from logitclip import engine, models
from logitclip.criterion import LogitClip, Loss
from logitclip.data import Split, batches, transform
from logitclip.data.cifar import cifar10
from logitclip.launch import make_fabric
from logitclip.methods.base import Job
from logitclip.methods.standard import Standard

BATCH, CLASSES = 128, 10
AUGMENT = "flip_crop:padding=4"


def pil_batches(split: Split, index: Tensor, mean: Tensor, std: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Flip, pad, crop, convert and normalise image by image, as the usual transforms do."""
    from PIL import Image, ImageOps

    rng = np.random.default_rng(seed)
    images = [Image.fromarray(image) for image in split.x[index].permute(0, 2, 3, 1).numpy()]  # as a dataset holds them
    for start in range(0, len(index), BATCH):
        tensors = []
        for image in images[start : start + BATCH]:
            if rng.random() < 0.5:
                image = ImageOps.mirror(image)
            image = ImageOps.expand(image, border=4, fill=0)
            left, top = rng.integers(0, 9, 2)
            image = image.crop((int(left), int(top), int(left) + 32, int(top) + 32))
            tensor = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div(255)
            tensors.append(tensor.sub_(mean).div_(std))
        yield torch.stack(tensors), split.labels[index[start : start + BATCH]]


def plain_loop(order: Iterator[tuple[Tensor, Tensor]], network: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    network.train()
    loss = torch.tensor(torch.nan)
    for x, y in order:
        loss = nn.functional.cross_entropy(network(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def cases(root: Path, count: int, compiled: bool) -> dict[str, Callable[[int], float]]:
    """Return a function for each case that trains on `count` batches, in an order that depends on its seed."""
    data = cifar10(root)
    train, view = data.train, transform(AUGMENT, data.mean, data.std)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (data.mean, data.std))

    def chosen(seed: int) -> Tensor:
        return torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))[: count * BATCH]

    def whole_batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        g = torch.Generator().manual_seed(seed)
        for _, x, y in batches(train, BATCH, index=chosen(seed), generator=g):
            yield view(x, g), y

    def image_by_image(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        return pil_batches(train, chosen(seed), mean, std, seed)

    def loop(
        order: Callable[[int], Iterator[tuple[Tensor, Tensor]]], layout: torch.memory_format
    ) -> Callable[[int], float]:
        network = models.build("wrn", CLASSES, (3, 32, 32)).to(memory_format=layout)  # type: ignore[call-overload]
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
        return lambda seed: plain_loop(order(seed), network, optimizer)

    def ours(criterion: nn.Module, compiled: bool = False) -> Callable[[int], float]:
        fabric = make_fabric(accelerator="cpu")
        settings = engine.Settings(batch_size=BATCH, weight_decay=5e-4, compile=compiled)
        job = Job(train, CLASSES, torch.arange(len(train)), view, network, criterion, settings, fabric)
        worker = Standard(job)

        def train_some(seed: int) -> float:
            part = replace(job, index=chosen(seed))
            return engine._train_epoch(worker, part, 0, torch.Generator().manual_seed(seed))["loss"]

        return train_some

    def network(seed: int) -> nn.Module:
        return models.build("wrn", CLASSES, (3, 32, 32), seed=seed)

    listed = {
        "plain: PIL, default layout": loop(image_by_image, torch.contiguous_format),
        "whole batches": loop(whole_batches, torch.contiguous_format),
        "channels_last": loop(image_by_image, torch.channels_last),
        "whole batches and channels_last": loop(whole_batches, torch.channels_last),
        "logitclip, ce": ours(Loss("ce")),
        "logitclip, ce with LogitClip": ours(LogitClip("ce", temp=1.5)),
    }
    return listed | ({"logitclip, compiled": ours(LogitClip("ce", temp=1.5), True)} if compiled else {})


def data_only(root: Path, count: int) -> dict[str, float]:
    """Measure the milliseconds to load and augment one batch, without training."""
    data = cifar10(root)
    view = transform(AUGMENT, data.mean, data.std)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (data.mean, data.std))
    index = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(0))[: count * BATCH]
    start = time.perf_counter()
    for _ in pil_batches(data.train, index, mean, std, 0):
        pass
    middle = time.perf_counter()
    g = torch.Generator().manual_seed(0)
    for _, x, _ in batches(data.train, BATCH, index=index, generator=g):
        view(x, g)
    return {"PIL": 1e3 * (middle - start) / count, "whole batches": 1e3 * (time.perf_counter() - middle) / count}


def convolution_share(step: Callable[[int], float]) -> float:
    """Measure the share of a step spent in convolutions, which no loop can make faster."""
    with profile(activities=[ProfilerActivity.CPU]) as record:
        step(0)
    seconds = {event.key: event.self_cpu_time_total for event in record.key_averages()}
    return sum(seconds[name] for name in ("aten::mkldnn_convolution", "aten::convolution_backward")) / sum(
        seconds.values()
    )


def criterion_seconds(repeats: int = 2000) -> dict[str, float]:
    """Measure the seconds of criterion and gradient on a batch of logits, without and with the clip."""
    logits = 3 * torch.randn(BATCH, CLASSES, generator=torch.Generator().manual_seed(0))
    y = torch.arange(BATCH) % CLASSES
    times: dict[str, list[float]] = {"ce": [], "ce with LogitClip": []}
    criteria = {"ce": Loss("ce"), "ce with LogitClip": LogitClip("ce", temp=1.5)}
    for _ in range(repeats):
        for name, criterion in criteria.items():
            z = logits.clone().requires_grad_()
            start = time.perf_counter()
            criterion(z, y).backward()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder with CIFAR-10")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batches", type=int, default=2, help="batches in each repeat")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="also with torch.compile")
    parser.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall", help="cpu for a busy machine, with one thread"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.clock == "cpu" and args.threads > 1:
        parser.error("--clock cpu adds up the seconds of all threads: use it with --threads 1.")
    now = time.perf_counter if args.clock == "wall" else time.process_time

    functions = cases(args.root, args.batches, args.compile)
    speed: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(args.repeats + 1):  # the first one warms up
        for name, function in functions.items():
            start = now()
            loss = function(repeat)
            took = now() - start
            assert np.isfinite(loss), name
            if repeat:
                speed[name].append(args.batches * BATCH / took)
    data = data_only(args.root, 5)
    criterion = criterion_seconds()
    step = BATCH / statistics.median(speed["logitclip, ce with LogitClip"])
    clip = criterion["ce with LogitClip"] - criterion["ce"]
    convolutions = convolution_share(functions["logitclip, ce with LogitClip"])

    args.out.mkdir(parents=True, exist_ok=True)
    clock = "" if args.clock == "wall" else "-cpu-seconds"
    name = f"throughput-cpu-{platform.machine()}-{args.threads}thread-torch{torch.__version__}{clock}.csv"
    path = args.out / name
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        header = ["case", "repeats", "median", "min", "max", "times_plain", "min_times", "max_times", "unit"]
        writer.writerow(header)
        plain = next(iter(speed.values()))
        for name, values in speed.items():
            ratios = [ours / theirs for ours, theirs in zip(values, plain, strict=True)]
            numbers = [f"{f(v):.2f}" for v in (values, ratios) for f in (statistics.median, min, max)]
            writer.writerow([name, len(values), *numbers, "images/s"])
            print(
                f"{name:<34}{numbers[0]:>8} images/s ({numbers[1]} to {numbers[2]}), {numbers[3]} times the plain loop"
            )
        for name, value in data.items():
            writer.writerow([f"data of a batch: {name}", 1, f"{value:.2f}", "", "", "", "", "", "ms"])
            print(f"{'data of a batch: ' + name:<34}{value:>8.2f} ms")
        for name, value in criterion.items():
            writer.writerow([f"criterion and gradient: {name}", 2000, f"{1e6 * value:.1f}", "", "", "", "", "", "us"])
            print(f"{'criterion: ' + name:<34}{1e6 * value:>8.1f} us")
        writer.writerow(["the clip's share of a step", "", f"{100 * clip / step:.4f}", "", "", "", "", "", "%"])
        writer.writerow(["the convolutions' share of a step", 1, f"{100 * convolutions:.1f}", *[""] * 5, "%"])
        print(f"convolutions take {100 * convolutions:.1f} % of a step")
        print(f"the clip adds {1e6 * clip:.1f} us to a step of {1e3 * step:.0f} ms: {100 * clip / step:.4f} %")
    print(path)


if __name__ == "__main__":
    main()
