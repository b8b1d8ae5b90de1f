"""Speed and memory of label noise.

    python benchmarks/noise.py --root DATA

DATA has CIFAR-10 in the form that `logitclip train --data cifar10` reads. The cases run with interleaved repeats:

- symmetric noise on 2.4 million labels of 1,000 classes (the size of WebVision), for each way of drawing;
- part-dependent noise on the 50,000 training images, including the drawing of W, against the loop over examples in
  public code, with 10 classes and with 100 (CIFAR-10 with each class cut in ten: the pixels do not affect the speed);
- the extra peak memory of part-dependent noise, each in its own process.

The results go to benchmarks/results/, one row per case: median, minimum and maximum of the seconds, and of the speed-up
over the loop.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from logitclip import noise
from logitclip.data.cifar import cifar10


def pdn_loop(images: torch.Tensor, labels: torch.Tensor, num_classes: int, rate: float, seed: int) -> np.ndarray:
    """Make part-dependent noise one example at a time: draw all of W, then a matrix product and a choice for each."""
    from scipy import stats

    rng = np.random.default_rng(seed)
    n = len(labels)
    q: Any = stats.truncnorm.rvs(-rate / 0.1, (1 - rate) / 0.1, loc=rate, scale=0.1, size=n, random_state=rng)
    w = torch.from_numpy(rng.standard_normal((num_classes, images[0].numel(), num_classes)).astype(np.float32))
    probabilities = []
    for i in range(n):
        y = labels[i]
        logits = (images[i].float().view(1, -1) @ w[y]).squeeze(0)
        logits[y] = -torch.inf
        p = q[i] * torch.softmax(logits, dim=0)
        p[y] += 1 - q[i]
        probabilities.append(p)
    table = torch.stack(probabilities).double().numpy()
    table /= table.sum(1, keepdims=True)
    return np.array([rng.choice(num_classes, p=row) for row in table])


def pdn_ours(images: torch.Tensor, labels: torch.Tensor, num_classes: int, rate: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return noise.instance(labels, num_classes, rate=rate, images=images, generator=generator)


def symmetric(draw: str, labels: torch.Tensor, seed: int) -> torch.Tensor:
    return noise.symmetric(labels, 1000, rate=0.5, draw=draw, generator=torch.Generator().manual_seed(seed))


def cifar(root: Path, num_classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    train = cifar10(root).train
    labels = train.labels if num_classes == 10 else train.labels * 10 + torch.arange(len(train)) % 10
    return train.x[torch.arange(len(train))], labels


def peak_memory(root: Path, num_classes: int, threads: int, answer: Any) -> None:
    """Measure the peak memory in megabytes, minus the memory with the images loaded (Linux)."""
    torch.set_num_threads(threads)
    images, labels = cifar(root, num_classes)
    pdn_ours(images[:100], labels[:100], num_classes, 0.4, seed=0)  # do not count what torch sets up on first use

    def resident(what: str) -> float:
        line = next(
            line for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines() if line.startswith(what)
        )
        return int(line.split()[1]) / 1024

    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # reset the peak
    before = resident("VmRSS")
    pdn_ours(images, labels, num_classes, 0.4, seed=0)
    answer.put(resident("VmHWM") - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder with CIFAR-10")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    many = torch.randint(1000, (2_400_000,), generator=torch.Generator().manual_seed(0))
    cases: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]
    cases = {f"symmetric {draw} 2.4M": (symmetric, (draw, many)) for draw in ("exact", "per_class", "independent")}
    for k in (10, 100):
        images, labels = cifar(args.root, k)
        for name, function in (("loop", pdn_loop), ("ours", pdn_ours)):
            cases[f"pdn K={k} {name}"] = (function, (images, labels, k, 0.4))
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for repeat in range(args.repeats + 1):  # the first one warms up
        for name, (function, arguments) in cases.items():
            start = time.perf_counter()
            noisy = function(*arguments, seed=repeat)
            took = time.perf_counter() - start
            wrong = float((torch.as_tensor(noisy) != arguments[1]).double().mean())
            assert abs(wrong - (0.5 if "symmetric" in name else 0.4)) < 0.02, (name, wrong)  # the work was done
            if repeat:
                seconds[name].append(took)

    context = multiprocessing.get_context("spawn")
    memory = {}
    for k in (10, 100):
        answer = context.Queue()
        process = context.Process(target=peak_memory, args=(args.root, k, args.threads, answer))
        process.start()
        memory[f"pdn K={k} ours"] = answer.get()
        process.join()

    args.out.mkdir(parents=True, exist_ok=True)
    versions = f"cpu-{platform.machine()}-{args.threads}thread-torch{torch.__version__}-numpy{np.__version__}"
    path = args.out / f"noise-{versions}.csv"
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        header = ["case", "repeats", "median_s", "min_s", "max_s", "times_the_loop", "min", "max", "peak_extra_mb"]
        writer.writerow(header)
        print(("{:<30}" + "{:>10}" * 8).format(*(word[:9] if i else word for i, word in enumerate(header))))
        for name, times in seconds.items():
            ratio = ["", "", ""]
            if name.endswith("ours"):
                ratios = [a / b for a, b in zip(seconds[name.replace("ours", "loop")], times, strict=True)]
                ratio = [f"{f(ratios):.1f}" for f in (statistics.median, min, max)]
            numbers = [f"{f(times):.4f}" for f in (statistics.median, min, max)]
            extra = f"{memory[name]:.0f}" if name in memory else ""
            row = [name, len(times), *numbers, *ratio, extra]
            writer.writerow(row)
            print(("{:<30}" + "{:>10}" * 8).format(*row))
    print(path)


if __name__ == "__main__":
    main()
