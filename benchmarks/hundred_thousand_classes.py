"""100,000 classes with noisy labels, made on the spot and trained on a CPU, with and without the clip.

    python benchmarks/hundred_thousand_classes.py [--classes 100000] [--epochs 3] [--clips none temp=0.05]

Each class is a random direction, each example a noisy copy of it; half of the training labels are wrong. A small
network is trained with `LinearLogitClip`, which never holds the logits of a batch. The test accuracy against the true
classes goes to a CSV in benchmarks/results/, one row per epoch.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from logitclip import LinearLogitClip, noise

HEADER = [
    *("classes", "examples", "noise", "loss", "clip", "epoch", "train_loss", "test_accuracy", "memorised"),
    *("cpu_seconds", "load"),
]
WIDTH = 64


def data(classes: int, per_class: int, spread: float, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training inputs and true classes, test inputs and classes."""
    generator = torch.Generator().manual_seed(seed)
    centres = F.normalize(torch.randn(classes, WIDTH, generator=generator), dim=1)

    def draw(labels: Tensor) -> Tensor:
        return centres[labels] + spread / WIDTH**0.5 * torch.randn(len(labels), WIDTH, generator=generator)

    train = torch.arange(classes).repeat(per_class)
    test = torch.randint(classes, (5000,), generator=generator)
    return draw(train), train, draw(test), test


@torch.no_grad()
def accuracy(body: nn.Module, head: LinearLogitClip, x: Tensor, labels: Tensor) -> float:
    right = [(head.logits(body(a)).argmax(1) == b).sum() for a, b in zip(x.split(500), labels.split(500), strict=True)]
    return 100 * float(sum(right)) / len(x)


def train(clip: str, args: argparse.Namespace) -> list[list[object]]:
    x, clean, test_x, test_y = data(args.classes, args.per_class, args.spread, args.seed)
    generator = torch.Generator().manual_seed(args.seed + 1)
    y = noise.symmetric(clean, args.classes, rate=args.noise, generator=generator)
    wrong = (y != clean).nonzero().squeeze(1)[:5000]
    torch.manual_seed(args.seed)
    body = nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, WIDTH), nn.LayerNorm(WIDTH))
    options: dict[str, Any] = {} if clip == "none" else {key: float(value) for key, value in [clip.split("=")]}
    head = LinearLogitClip(WIDTH, args.classes, args.loss, bias=False, **options)
    optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=args.lr)
    rows: list[list[object]] = []
    start = time.process_time()
    steps = args.epochs * -(-len(x) // args.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=steps, pct_start=0.1)
    for epoch in range(1, args.epochs + 1):
        total = 0.0
        for index in torch.randperm(len(x), generator=generator).split(args.batch):
            loss = head(body(x[index]), y[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += float(loss.detach()) * len(index)
        row = [args.classes, len(x), args.noise, args.loss, clip, epoch, round(total / len(x), 4)]
        row += [round(accuracy(body, head, test_x, test_y), 2), round(accuracy(body, head, x[wrong], y[wrong]), 2)]
        rows.append([*row, round(time.process_time() - start), round(os.getloadavg()[0], 1)])
        print(*rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, default=100_000)
    parser.add_argument("--per-class", type=int, default=2)
    parser.add_argument("--spread", type=float, default=0.5)
    parser.add_argument("--noise", type=float, default=0.5)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--loss", default="ce")
    parser.add_argument("--clips", nargs="+", default=["none", "temp=0.05"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(*HEADER)
    rows = [row for clip in args.clips for row in train(clip, args)]
    if args.out:
        name = f"hundred_thousand_classes-cpu-{platform.machine()}-1thread-torch{torch.__version__}.csv"
        with (args.out / name).open("w", newline="") as stream:
            csv.writer(stream, lineterminator="\n").writerows([HEADER, *rows])


if __name__ == "__main__":
    main()
