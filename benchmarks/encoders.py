"""Encoders: speed over a bare forward loop, memory, resuming after kills, and the same bytes on Ray.

    python benchmarks/encoders.py --cifar CIFAR

CIFAR is a folder with cifar-10-batches-bin. Needs EfficientNet-Lite0 (see efficientnet_lite0.py), Ray and Pillow.

- speed: rows per second of `Features.complete` over those of a loop that only calls the network on batches that were
  decoded before. PNG files are read, decoded and prepared in background threads, so a second core must be free. Median
  of interleaved repeats.
- memory: the largest resident size of a process that encodes 1,024 photos, and of one that encodes 4,096.
- kills: a process that encodes is killed ten times with SIGKILL; then it ends, and its bytes are compared with those of
  an uninterrupted one.
- ray: two actors, the same bytes.
- predict: the largest resident size of `logitclip predict` on a table of 10,000 texts and on one of a million, with an
  encoder that counts letters, so that the memory is that of the reading, predicting and writing.

With `--only`, the other rows of the result file stay.
"""

from __future__ import annotations

import argparse
import csv
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from logitclip import data
from logitclip.data._images import ImageFiles
from logitclip.encoders import blocks, features
from logitclip.encoders.features import Features
from logitclip.runs.encoding import load_encoder
from logitclip.runs.plugins import load_plugins

PLUGIN = str(Path(__file__).with_name("efficientnet_lite0.py"))
RESULTS = Path(__file__).parent / "results" / "encoders-cpu.csv"
SPEC = "efficientnet_lite0"
LOAD = partial(load_encoder, (PLUGIN,), SPEC, "images", "cpu")


def write_photos(root: str, folder: Path, count: int) -> ImageFiles:
    """Write images of CIFAR-10 as PNG files of 128 pixels."""
    from PIL import Image

    images = data.load("cifar10", root).train.x[torch.arange(count)]
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{i:05d}.png" for i in range(count)]
    for name, pixels in zip(names, images.permute(0, 2, 3, 1).numpy(), strict=True):
        if not (folder / name).exists():
            Image.fromarray(pixels).resize((128, 128), Image.Resampling.BICUBIC).save(folder / name)
    return ImageFiles(folder, names)


def encode(files: ImageFiles, cache: Path, pool: Any = blocks.in_this_process) -> Features:
    """Compute the features of photos in a cache of their own."""
    os.environ["LOGITCLIP_FEATURES"] = str(cache)
    load_plugins((PLUGIN,))
    kept = Features.of(files, SPEC)
    kept.complete(files, partial(pool, LOAD))
    return kept


def measure_speed(files: ImageFiles, cache: Path, repeats: int) -> Iterator[dict[str, Any]]:
    """Compare the rows per second with those of a bare loop."""
    encoder = LOAD()
    torch.set_num_threads(1)
    ready = [encoder.prepare(files.open(i)) for i in range(len(files))]
    batches = [ready[start : start + blocks.BATCH] for start in range(0, len(ready), blocks.BATCH)]
    ratios, speeds = [], []
    for repeat in range(repeats):
        started = time.perf_counter()
        for batch in batches:
            encoder(batch)
        bare = len(files) / (time.perf_counter() - started)
        started = time.perf_counter()
        encode(files, cache / f"speed{repeat}", lambda _, some: blocks.in_this_process(lambda: encoder, some))
        speeds.append(len(files) / (time.perf_counter() - started))
        ratios.append(speeds[-1] / bare)
    shown = {"what": "rows/s over a bare loop", "value": round(statistics.median(ratios), 3)}
    detail = f"of {repeats} repeats {min(ratios):.3f} to {max(ratios):.3f}; {max(speeds):.0f} rows/s"
    yield {**shown, "detail": f"{detail}; load {os.getloadavg()[0]:.1f}"}


def child(arguments: list[str], options: argparse.Namespace) -> list[str]:
    """Return the command of a process that encodes photos."""
    return [sys.executable, __file__, "--cifar", options.cifar, "--child", *arguments]


def measure_memory(folder: Path, cache: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure the largest resident size for two numbers of photos."""
    for count in (1024, 4096):
        command = child([str(folder), str(cache / f"memory{count}"), str(count)], options)
        peak = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) / 1024
        yield {"what": f"peak memory of {count} photos, MB", "value": round(peak), "detail": ""}


def measure_kills(files: ImageFiles, folder: Path, cache: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Kill a process ten times, let it end, and compare its bytes."""
    wanted = {path.name: path.read_bytes() for path in encode(files, cache / "whole").folder.glob("*.npy")}
    command = child([str(folder), str(cache / "killed"), str(len(files)), "64"], options)
    kills = 0
    while kills < 10:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        before = len(list((cache / "killed").rglob("*.npy")))
        while process.poll() is None and len(list((cache / "killed").rglob("*.npy"))) <= before:
            time.sleep(0.05)
        if process.poll() is not None:
            break
        time.sleep(0.2)  # into the next block
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    [folder] = [path for path in (cache / "killed").iterdir() if path.is_dir()]
    found = {path.name: path.read_bytes() for path in folder.glob("*.npy")}
    detail = f"{len(found)} blocks, all bytes the same: {found == wanted}"
    return {"what": "kills survived", "value": kills, "detail": detail}


def measure_ray(files: ImageFiles, cache: Path) -> dict[str, Any]:
    """Compare the bytes of two Ray actors with those of one process."""
    import ray

    wanted = {path.name: path.read_bytes() for path in encode(files, cache / "whole").folder.glob("*.npy")}
    ray.init(address="local", num_cpus=2, log_to_driver=False, include_dashboard=False)
    try:
        kept = encode(files, cache / "ray", partial(blocks.on_ray, jobs=2))
    finally:
        ray.shutdown()
    same = {path.name: path.read_bytes() for path in kept.folder.glob("*.npy")} == wanted
    return {"what": "Ray with 2 workers, same bytes", "value": int(same), "detail": f"{len(wanted)} blocks"}


LETTERS = """
import torch
from logitclip.encoders import ENCODERS

@ENCODERS.register
def letters(*, takes, device):
    return Letters()

class Letters:
    width, size = 26, 0
    def prepare(self, example):
        return example
    def __call__(self, batch):
        return torch.tensor([[text.count(chr(97 + i)) for i in range(26)] for text in batch], dtype=torch.float32)
"""
PREDICT = """
import resource, sys
from pathlib import Path
from logitclip.runs.plugins import load_plugins
load_plugins((sys.argv[1],))
import logitclip as lc
from logitclip.cli.own_data import predict
train, table, out = map(Path, sys.argv[2:])
lc.fit(train, "label", text="text", encoder="letters", learner="logistic", out=out)
predict(out, table, out=out / "predictions.csv")
print(sum(1 for _ in (out / "predictions.csv").open()) - 1, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def measure_predictions(work: Path) -> Iterator[dict[str, Any]]:
    """Measure the largest resident size of predicting tables of two lengths."""
    (work / "letters.py").write_text(LETTERS, encoding="utf-8")
    words = ("alder", "birch", "cedar", "hazel", "larch", "maple", "rowan", "walnut")
    for count in (500, 10_000, 1_000_000):
        with (work / f"{count}.csv").open("w", encoding="utf-8") as file:
            file.write("text,label\n")
            for i in range(count):
                some = " ".join(words[(i * k + k) % 8] for k in range(1, 20))
                file.write(f"{some} {i},{'ab'[i % 2]}\n")
    for count in (10_000, 1_000_000):
        paths = [work / name for name in ("letters.py", "500.csv", f"{count}.csv", f"model{count}")]
        found = subprocess.run(
            [sys.executable, "-c", PREDICT, *map(str, paths)], capture_output=True, text=True, check=True
        )
        rows, peak = map(int, found.stdout.split()[-2:])
        yield {"what": f"peak memory of predicting {rows:,} texts, MB", "value": round(peak / 1024), "detail": ""}


def write_results(rows: list[dict[str, Any]]) -> None:
    """Write rows to the result file; those that were not measured now stay."""
    kept: dict[str, dict[str, Any]] = {}
    if RESULTS.exists():
        with RESULTS.open(newline="", encoding="utf-8") as file:
            kept = {row["what"]: row for row in csv.DictReader(file)}
    machine = f"torch {torch.__version__}, {os.cpu_count()} cores"
    kept |= {row["what"]: {**row, "machine": machine} for row in rows}
    with RESULTS.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["what", "value", "detail", "machine"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--cifar", required=True)
    parser.add_argument("--photos", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=["speed", "memory", "kills", "ray", "predict"])
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        folder, cache, count, *block = options.child
        features.BLOCK_ROWS = int(block[0]) if block else features.BLOCK_ROWS
        encode(ImageFiles(folder, [f"{i:05d}.png" for i in range(int(count))]), Path(cache))
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        return
    with tempfile.TemporaryDirectory() as work:
        folder, cache, rows = Path(work) / "photos", Path(work) / "cache", list[dict[str, Any]]()
        files = write_photos(options.cifar, folder, options.photos)
        few = ImageFiles(folder, [f"{i:05d}.png" for i in range(min(1024, options.photos))])
        if "speed" in options.only:
            rows += measure_speed(few.select(torch.arange(512)), cache, options.repeats)
        if "memory" in options.only:
            write_photos(options.cifar, folder, 4096)
            rows += measure_memory(folder, cache, options)
        features.BLOCK_ROWS = 64
        if "kills" in options.only:
            rows.append(measure_kills(few, folder, cache, options))
        if "ray" in options.only:
            rows.append(measure_ray(files.select(torch.arange(512)), cache / "r"))
        if "predict" in options.only:
            rows += measure_predictions(Path(work))
        for row in rows:
            print(row, flush=True)
        write_results(rows)


if __name__ == "__main__":
    main()
