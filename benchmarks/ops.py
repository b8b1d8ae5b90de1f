"""The cost of the clip: `LogitClip` forward and backward, as a multiple of `F.cross_entropy`.

    python benchmarks/ops.py [--quick]

The cases run on one thread with interleaved repeats, so that all see the same machine:

- `LogitClip` around ce, gce and nce by name, and around `nn.CrossEntropyLoss`;
- a literal transcription of the published formulas: norm, divide, multiply, where, then the loss as usually written;
- `F.cross_entropy` without a clip, the reference.

Time is the CPU time of a forward and backward pass, so that waiting for other programs does not count. Ratios are taken
within a repeat; the table has their median and quartiles. Memory is the peak of torch's allocations, including the
gradient, as a multiple of the logits. The results go to benchmarks/results/, one row per shape and case.
"""

from __future__ import annotations

import argparse
import csv
import gc
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from logitclip import LogitClip

TAU = 1.0
SHAPES = [(128, 10), (128, 100), (256, 1000), (1024, 1000), (512, 50_000)]
HEADER = [
    *("n", "classes", "case", "repeats", "us", "us_q1", "us_q3"),
    *("over_ce", "over_ce_q1", "over_ce_q3", "goal", "over_literal", "memory"),
]
Criterion = Callable[[Tensor, Tensor], Tensor]


def goal(classes: int) -> float:
    """Return the largest acceptable multiple of `F.cross_entropy`."""
    return 2.5 if classes <= 100 else 1.2 if classes <= 1000 else 0.9


def literal_clip(logits: Tensor) -> Tensor:
    norm = torch.norm(logits, p=2, dim=-1, keepdim=True)
    return torch.where(norm >= TAU, TAU * logits / norm, logits)


def literal_ce(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(literal_clip(logits), target)


def literal_gce(logits: Tensor, target: Tensor) -> Tensor:
    p = F.softmax(literal_clip(logits), dim=1).gather(1, target.unsqueeze(1)).squeeze(1)
    return ((1 - p**0.7) / 0.7).mean()


def literal_nce(logits: Tensor, target: Tensor) -> Tensor:
    log_probs = F.log_softmax(literal_clip(logits), dim=1)
    one_hot = F.one_hot(target, logits.shape[1]).to(log_probs.dtype)
    return ((one_hot * log_probs).sum(1) / log_probs.sum(1)).mean()


CASES: dict[str, Criterion] = {
    "F.cross_entropy": F.cross_entropy,
    "ce": LogitClip("ce", tau=TAU),
    "gce": LogitClip("gce", tau=TAU),
    "nce": LogitClip("nce", tau=TAU),
    "CrossEntropyLoss": LogitClip(nn.CrossEntropyLoss(), tau=TAU),
    "ce literal": literal_ce,
    "gce literal": literal_gce,
    "nce literal": literal_nce,
}
SAME = {"ce": "ce literal", "gce": "gce literal", "nce": "nce literal", "CrossEntropyLoss": "ce literal"}


def step(criterion: Criterion, logits: Tensor, target: Tensor) -> Tensor:
    """Run one forward and backward pass; return the gradient."""
    logits.grad = None
    criterion(logits, target).backward()
    assert logits.grad is not None
    return logits.grad


def peak_memory(criterion: Criterion, logits: Tensor, target: Tensor) -> int:
    """Return the peak of allocated bytes during a step."""
    logits.grad = None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step(criterion, logits, target)
    events: Any = record.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = [e for e in events if e.name() == "[memory]"]
    live = peak = 0
    for change in sorted(changes, key=lambda e: e.start_ns()):
        live += change.nbytes()
        peak = max(peak, live)
    return peak


def seconds_per_step(criterion: Criterion, logits: Tensor, target: Tensor, warmup: int, steps: int) -> float:
    for _ in range(warmup):  # the caches hold code and data of the previous case
        step(criterion, logits, target)
    start = time.thread_time()
    for _ in range(steps):
        step(criterion, logits, target)
    return (time.thread_time() - start) / steps


def measure(shape: tuple[int, int], seconds: float) -> dict[str, list[float]]:
    """Measure the seconds per step of every case, in interleaved repeats that take about `seconds` in total."""
    logits, target = data(shape)
    each = {name: seconds_per_step(criterion, logits, target, 2, 2) for name, criterion in CASES.items()}
    inner = {name: max(1, round(2e-3 / t)) for name, t in each.items()}  # a sample takes at least two milliseconds
    repeats = max(5, round(seconds / sum(2 * inner[name] * t for name, t in each.items())))
    took: dict[str, list[float]] = {name: [] for name in CASES}
    gc.disable()
    for _ in range(repeats):
        for name, criterion in CASES.items():
            took[name].append(seconds_per_step(criterion, logits, target, inner[name], inner[name]))
    gc.enable()
    return took


def data(shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(shape, generator=generator).requires_grad_()
    return logits, torch.randint(shape[1], shape[:1], generator=generator)


def ratios(times: list[float], base: list[float]) -> list[float]:
    return [t / b for t, b in zip(times, base, strict=True)]


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Return the median, the first and the third quartile."""
    low, median, high = statistics.quantiles(values, n=4)
    return median, low, high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only a few repeats of the four small shapes")
    parser.add_argument("--seconds", type=float, default=60.0, help="time for each shape")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    # A training process has freed larger tensors before the loss, so malloc has raised its threshold and reuses memory
    # instead of asking the system for new pages at every step. (It never keeps blocks of more than 32 MB.)
    torch.empty(31 * 2**20, dtype=torch.uint8)

    rows: list[list[Any]] = []
    for shape in SHAPES[:4] if args.quick else SHAPES:
        logits, target = data(shape)
        memory = {name: peak_memory(c, logits, target) / (4 * logits.numel()) for name, c in CASES.items()}
        for name, reference in SAME.items():  # they compute the same thing
            torch.testing.assert_close(step(CASES[name], logits, target), step(CASES[reference], logits, target))
        took = measure(shape, 2.0 if args.quick else args.seconds)
        for name, times in took.items():
            microseconds = [round(1e6 * t, 1) for t in quartiles(times)]
            over_ce = [round(r, 3) for r in quartiles(ratios(times, took["F.cross_entropy"]))]
            literal, aim = "", ""
            if name in SAME:
                literal = round(statistics.median(ratios(times, took[SAME[name]])), 3)
                aim = goal(shape[1]) if name in ("ce", "gce", "nce") else ""
            rows.append([*shape, name, len(times), *microseconds, *over_ce, aim, literal, round(memory[name], 2)])

    table = Table("shape", "case", "microseconds", "x F.cross_entropy", "goal", "x literal", "memory / logits")
    for n, classes, name, _, us, us1, us3, ratio, ratio1, ratio3, aim, literal, size in rows:
        table.add_row(
            f"({n}, {classes})",
            name,
            f"{us:.0f} [{us1:.0f}, {us3:.0f}]",
            f"{ratio:.2f} [{ratio1:.2f}, {ratio3:.2f}]",
            str(aim),
            f"{literal:.2f}" if literal else "",
            f"{size:.2f}",
            style="red" if aim and ratio > aim else None,
            end_section=name == list(CASES)[-1],
        )
    Console(width=125).print(table)
    if args.quick:
        return
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"ops-cpu-{platform.machine()}-1thread-torch{torch.__version__}.csv"
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(HEADER)
        writer.writerows(rows)
    print(path)


if __name__ == "__main__":
    main()
