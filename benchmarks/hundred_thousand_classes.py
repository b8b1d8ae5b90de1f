"""Train on synthetic data with 100,000 classes and noisy labels on a CPU, with and without the clip.

    python benchmarks/hundred_thousand_classes.py [--classes 100000] [--epochs 3] [--clips none tau=300]

Each class is a random direction, and each example a noisy copy of it, as the features of a frozen network might be. Few
classes are common and most are rare: their frequencies fall as 1/rank. Half of the training labels are wrong. The last
layer is a `LinearLogitClip`, which never stores the logits of a whole batch. Each epoch prints a row, and appends it to
a CSV with `--out`: the accuracy on test examples with true labels, on held-out examples with noisy labels (choose the
clip by this one, which needs no true label), and on the wrong labels of the training set (the memorised share).
"""

from __future__ import annotations

import argparse
import csv
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from logitclip import LinearLogitClip, noise

HEADER = [
    *("classes", "examples", "noise", "batch", "lr", "loss", "clip", "seed", "epochs", "epoch"),
    *("train_loss", "test_accuracy", "validation_accuracy", "memorised", "cpu_seconds", "load"),
]
WIDTH = 64


def data(classes: int, examples: int, spread: float, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training inputs and true classes, test inputs and classes."""
    generator = torch.Generator().manual_seed(seed)
    centres = F.normalize(torch.randn(classes, WIDTH, generator=generator), dim=1)

    def draw(labels: Tensor) -> Tensor:
        x = centres[labels] + spread / WIDTH**0.5 * torch.randn(len(labels), WIDTH, generator=generator)
        return F.layer_norm(x, [WIDTH])

    often = 1 / torch.arange(10, classes + 10)
    train = torch.multinomial(often, examples, replacement=True, generator=generator)
    test = torch.multinomial(often, 4000, replacement=True, generator=generator)
    return draw(train), train, draw(test), test


@torch.no_grad()
def accuracy(head: LinearLogitClip, x: Tensor, labels: Tensor) -> float:
    right = [(head.logits(a).argmax(1) == b).sum() for a, b in zip(x.split(500), labels.split(500), strict=True)]
    return 100 * float(sum(right)) / len(x) if len(x) else float("nan")  # without noise, no label is wrong


def train(clip: str, args: argparse.Namespace) -> list[list[object]]:
    x, clean, test_x, test_y = data(args.classes, args.examples, args.spread, args.seed)
    generator = torch.Generator().manual_seed(args.seed + 1)
    y = noise.symmetric(clean, args.classes, rate=args.noise, generator=generator)
    held_out = torch.randperm(len(x), generator=generator)[: min(4000, len(x) // 20)]
    validation = x[held_out], y[held_out]
    kept = torch.ones(len(x), dtype=torch.bool).index_fill(0, held_out, False)
    x, y, clean = x[kept], y[kept], clean[kept]
    wrong = (y != clean).nonzero().squeeze(1)[:4000]
    options: dict[str, Any] = {} if clip == "none" else {key: float(value) for key, value in [clip.split("=")]}
    head = LinearLogitClip(WIDTH, args.classes, args.loss, bias=False, **options)
    nn.init.zeros_(head.weight)
    optimizer = torch.optim.Adam(head.parameters(), lr=args.lr)
    rows: list[list[object]] = []
    start = time.process_time()
    steps = args.epochs * -(-len(x) // args.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=steps, pct_start=0.1)
    for epoch in range(1, args.epochs + 1):
        total = 0.0
        for index in torch.randperm(len(x), generator=generator).split(args.batch):
            loss = head(x[index], y[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += float(loss.detach()) * len(index)
        row = [args.classes, len(x), args.noise, args.batch, args.lr, args.loss, clip, args.seed, args.epochs, epoch]
        row.append(round(total / len(x), 4))
        pairs = ((test_x, test_y), validation, (x[wrong], y[wrong]))
        row += [round(accuracy(head, *pair), 2) for pair in pairs]
        rows.append([*row, round(time.process_time() - start), round(os.getloadavg()[0], 1)])
        print(*rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, default=100_000)
    parser.add_argument("--examples", type=int, default=100_000)
    parser.add_argument("--spread", type=float, default=0.5)
    parser.add_argument("--noise", type=float, default=0.5)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--loss", default="ce")
    parser.add_argument("--clips", nargs="+", default=["none", "tau=300"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="append the rows to this CSV")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(*HEADER)
    for clip in args.clips:
        rows = train(clip, args)
        if args.out:
            new = not args.out.exists()
            with args.out.open("a", newline="", encoding="utf-8") as stream:
                csv.writer(stream, lineterminator="\n").writerows([HEADER, *rows] if new else rows)


if __name__ == "__main__":
    main()
