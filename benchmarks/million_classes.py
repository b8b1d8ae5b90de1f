"""A last linear layer of up to a million classes: time and memory of forward and backward, against the unfused forms.

    python benchmarks/million_classes.py [--minutes 20] [--repeats 3]      # run missing measurements, then print
    python benchmarks/million_classes.py --print                           # only print

Each measurement runs in its own process and adds one row to a CSV in benchmarks/results/; repeat the command to run
those that are missing. The cases:

- `products`: the three matrix products alone, in the shapes of the unfused form, as a lower bound of the time;
- `plain`: `F.cross_entropy(F.linear(...))`, and `clip`: `LogitClip("ce")(F.linear(...))`;
- `torch`: `F.linear_cross_entropy`, and `torch chunked`: the same with `LinearCrossEntropyOptions()`;
- `ours`: `linear_cross_entropy` with the clip, and `ours unclipped`.

Liger and cut-cross-entropy need Triton, which has no CPU backend. Time is the CPU time of one thread, so waiting for
other programs does not count. They still share caches and memory, so each row has the load average. Memory is the peak
resident memory during the step, minus the resident memory before it and minus the gradients. Unfused forms run only
where logits, log-probabilities and gradient together are below 8 GB; other libraries are stopped after a minute.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HEADER = ["classes", "width", "rows", "case", "seconds", "extra_mb", "load", "note"]
# The goals are for 262,144 classes, so these come first; the smaller ones take seconds.
CELLS = [(k, d, n) for k in (262_144, 65_536, 16_384, 1_048_576) for d in (128, 512) for n in (256, 2048)]
CASES = ["products", "plain", "clip", "ours", "ours unclipped", "torch", "torch chunked"]
OURS = ("products", "ours", "ours unclipped")
Cell = tuple[int, int, int, str]


def steps() -> dict[str, Callable[..., Any]]:
    import torch
    import torch.nn.functional as F

    from logitclip import LogitClip, linear_cross_entropy

    def products(hidden: Any, weight: Any, target: Any) -> Any:
        with torch.no_grad():
            logits = hidden @ weight.t()
            hidden.grad, weight.grad = logits @ weight, logits.t() @ hidden

    def chunked(hidden: Any, weight: Any, target: Any) -> Any:
        options = torch.nn.LinearCrossEntropyOptions()  # type: ignore[attr-defined]
        return F.linear_cross_entropy(hidden, weight, target, options=options)  # type: ignore[attr-defined]

    clip = LogitClip("ce", tau=1.0)
    return {
        "products": products,
        "plain": lambda h, w, y: F.cross_entropy(F.linear(h, w), y),
        "clip": lambda h, w, y: clip(F.linear(h, w), y),
        "ours": lambda h, w, y: linear_cross_entropy(h, w, y, tau=1.0),
        "ours unclipped": linear_cross_entropy,
        "torch": lambda h, w, y: F.linear_cross_entropy(h, w, y),  # type: ignore[attr-defined]
        "torch chunked": chunked,
    }


def status(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"There is no {field} in /proc/self/status.")


def measure(classes: int, width: int, rows: int, case: str, threads: int = 1) -> tuple[float, float]:
    """Measure one step in this process: seconds and extra bytes."""
    import torch

    torch.set_num_threads(threads)
    step = steps()[case]

    def data(classes: int, rows: int) -> list[Any]:
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(rows, width, generator=generator).requires_grad_()
        weight = torch.empty(classes, width).normal_(std=width**-0.5, generator=generator).requires_grad_()
        return [hidden, weight, torch.randint(classes, (rows,), generator=generator)]

    def run(tensors: list[Any]) -> None:
        loss = step(*tensors)
        if loss is not None:
            loss.backward()

    run(data(500, 50))  # loads the code
    tensors = data(classes, rows)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets the peak
    start = time.process_time()
    run(tensors)
    seconds = time.process_time() - start
    gradients = sum(t.grad.nbytes for t in tensors if t.grad is not None)
    return seconds, status("VmHWM") - before - gradients


def reason_to_skip(classes: int, width: int, rows: int, case: str) -> str:
    if case in ("plain", "clip", "torch", "products") and 3 * 4 * classes * rows > 8e9:
        return "more than 8 GB"
    if case == "torch chunked" and classes * rows * (width + 256) > 1.1e11:
        return "more than a minute"  # 24 s at 512 rows, 262,144 classes and width 128
    return ""


def in_a_process(cell: Cell) -> list[Any]:
    """Measure a cell in a new process; return a row of the results."""
    load = round(os.getloadavg()[0], 1)
    skip = reason_to_skip(*cell)
    if skip:
        return [*cell, "", "", load, skip]

    def limit() -> None:
        if cell[3] not in OURS:
            resource.setrlimit(resource.RLIMIT_CPU, (75, 80))  # the step, and making the data

    arguments = [sys.executable, __file__, "--one", *map(str, cell)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(arguments, capture_output=True, text=True, preexec_fn=limit, env=environment)
    if done.returncode == -signal.SIGXCPU:
        return [*cell, "", "", load, "more than a minute"]
    if done.returncode:
        raise RuntimeError(f"{cell} ended with {done.returncode}: {done.stderr}")
    seconds, extra = json.loads(done.stdout)
    return [*cell, round(seconds, 3), round(extra / 2**20, 1), load, ""]


def read(path: Path) -> dict[Cell, list[dict[str, str]]]:
    results: dict[Cell, list[dict[str, str]]] = {}
    if path.exists():
        with path.open(newline="", encoding="utf-8") as stream:
            for row in csv.DictReader(stream):
                key = int(row["classes"]), int(row["width"]), int(row["rows"]), row["case"]
                results.setdefault(key, []).append(row)
    return results


def medians(rows: list[dict[str, str]]) -> tuple[float, float] | None:
    """Return the medians of seconds and megabytes, or None if nothing was measured."""
    measured = [(float(row["seconds"]), float(row["extra_mb"])) for row in rows if row["seconds"]]
    if not measured:
        return None
    seconds, memory = zip(*measured, strict=True)
    return statistics.median(seconds), statistics.median(memory)


def show(path: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    results = read(path)
    table = Table("classes", "width", "rows", "case", "seconds", "x plain", "x products", "extra MB", "/ clip's", "n")
    for cell in sorted({key[:3] for key in results}):
        of = {case: medians(results.get((*cell, case), [])) for case in CASES}
        for case in CASES:
            rows = results.get((*cell, case), [])
            if not rows:
                continue
            got = of[case]
            values = [f"- ({rows[0]['note']})", *[""] * 4]
            if got is not None:
                plain, products, clip = of["plain"], of["products"], of["clip"]
                values = [
                    f"{got[0]:.2f}",
                    f"{got[0] / plain[0]:.2f}" if plain else "",
                    f"{got[0] / products[0]:.2f}" if products else "",
                    f"{got[1]:.0f}",
                    f"{got[1] / clip[1]:.3f}" if clip else "",
                ]
            table.add_row(*(f"{x:,}" for x in cell), case, *values, str(len(rows)), end_section=case == CASES[-1])
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="start no measurement after this time")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--classes", type=int, nargs="+", default=[], help="only these numbers of classes")
    parser.add_argument("--widths", type=int, nargs="+", default=[], help="only these widths")
    parser.add_argument("--rows", type=int, nargs="+", default=[], help="only these numbers of rows")
    parser.add_argument("--print", action="store_true", help="measure nothing")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--one", nargs=4, metavar=("CLASSES", "WIDTH", "ROWS", "CASE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(int(args.one[0]), int(args.one[1]), int(args.one[2]), args.one[3])))
        return
    from importlib.metadata import version

    path = args.out / f"million_classes-cpu-{platform.machine()}-1thread-torch{version('torch')}.csv"
    deadline = time.monotonic() + 60 * args.minutes
    if not path.exists() and not args.print:
        path.write_text(",".join(HEADER) + "\n", encoding="utf-8")
    wanted = [
        cell
        for cell in CELLS
        if all(x in (only or [x]) for x, only in zip(cell, (args.classes, args.widths, args.rows), strict=True))
    ]
    for repeat in range(0 if args.print else args.repeats):
        for cell in wanted:
            for case in CASES:
                key = (*cell, case)
                done = read(path).get(key, [])
                if len(done) > repeat or any(row["note"] for row in done):
                    continue
                if time.monotonic() < deadline:
                    row = in_a_process(key)
                    with path.open("a", newline="", encoding="utf-8") as stream:
                        csv.writer(stream, lineterminator="\n").writerow(row)
    show(path)


if __name__ == "__main__":
    main()
