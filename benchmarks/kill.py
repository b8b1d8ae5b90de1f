"""Kill a run with SIGKILL many times: its files must end up identical to those of an uninterrupted run.

    python benchmarks/kill.py

The run trains on digits with dropout, momentum, held-out examples and per-example records, and saves a checkpoint after
every epoch. A plugin slows down every flush to disk, so that many kills interrupt the writing of a checkpoint; the
temporary files tell what each kill interrupted. The log of the kills goes to benchmarks/results/. The exit code is 1 if
a byte differs, or if too few kills interrupted a write.
"""

from __future__ import annotations

import argparse
import csv
import platform
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from logitclip import files
from logitclip.runs.config import RunConfig

SLOW_DISK = """
import os, time
sync = os.fsync
def slow(fd):
    time.sleep(0.01)
    sync(fd)
os.fsync = slow
"""


def start(config: RunConfig) -> subprocess.Popen[bytes]:
    changed = {k: v for k, v in vars(config).items() if v != getattr(RunConfig(), k)}
    flags: list[str] = []
    for name, value in changed.items():
        flag = f"--{name.replace('_', '-')}"
        flags += [flag] if value is True else [flag, *(value if isinstance(value, tuple) else [str(value)])]
    command = [sys.executable, "-m", "logitclip", "train", *flags]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def rows_in(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def where(folder: Path) -> str:
    """Return what the killed process was writing."""
    scratch = list((folder / "checkpoints").glob(f"{files.SCRATCH}*"))
    if scratch:
        written = ", ".join(sorted(p.name for p in scratch[0].iterdir()))
        return f"checkpoint ({written or 'nothing yet'})"
    others = [p.name.split("-", 2)[2] for p in folder.glob(f"{files.SCRATCH}*")]
    return others[0] if others else "training"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--inside", type=int, default=5, help="how many kills must interrupt a checkpoint write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    chance = random.Random(args.seed)
    log: list[tuple[int, float, int, str]] = []
    with tempfile.TemporaryDirectory() as temporary:
        plugin = Path(temporary) / "slow_disk.py"
        plugin.write_text(SLOW_DISK, encoding="utf-8")
        config = RunConfig(
            noise="symmetric:rate=0.5",
            clip="norm:temp=1.5",
            model="mlp:width=64,depth=2,dropout=0.2,norm=batch",
            limit=400,
            epochs=20 * args.kills,
            val=0.1,
            per_example=True,
            plugin=(str(plugin),),
            runs=str(Path(temporary) / "killed"),
            checkpoint_seconds=0,
        )
        folder = Path(config.runs) / config.id
        while len(log) < args.kills:
            before = rows_in(folder)
            process = start(config)
            while rows_in(folder) <= before and process.poll() is None:  # until it has finished an epoch
                time.sleep(0.01)
            delay = chance.uniform(0, 1.5)
            time.sleep(delay)
            if process.poll() is not None:
                error = process.stderr.read().decode() if process.stderr else ""
                raise SystemExit(f"The run ended by itself, with code {process.returncode}: {error}")
            process.kill()
            process.wait()
            log.append((len(log) + 1, delay, rows_in(folder), where(folder)))
            print("kill {}: {:.2f} s after its first epoch, {} rows, in {}".format(*log[-1]), flush=True)
        if start(config).wait():
            raise SystemExit("The run could not be resumed.")
        whole = replace(config, runs=str(Path(temporary) / "whole"), checkpoint_seconds=1e9)
        if start(whole).wait():
            raise SystemExit("The uninterrupted run failed.")
        names = ("metrics.jsonl", "noise.json", "examples.npz", "validation.npz", "weights.safetensors")
        same = {
            name: (folder / name).read_bytes() == (Path(whole.runs) / config.id / name).read_bytes() for name in names
        }
    inside = sum(place.startswith("checkpoint") for _, _, _, place in log)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"kill-cpu-{platform.machine()}-torch{torch.__version__}.csv"
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["kill", "seconds_after_first_epoch", "rows", "while_writing"])
        writer.writerows([number, f"{delay:.3f}", count, place] for number, delay, count, place in log)
        for name, equal in same.items():
            writer.writerow(["end", "", config.epochs, f"{name}: {'the same bytes' if equal else 'DIFFERENT'}"])
    print(f"{len(log)} kills, {inside} of them inside a checkpoint write; the same bytes: {same}\n{path}")
    if not all(same.values()) or inside < args.inside:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
