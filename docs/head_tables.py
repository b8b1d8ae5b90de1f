"""The tables of large_heads.md, made from CSV files. `python docs/generate.py` writes them into the page."""

from __future__ import annotations

import csv
import statistics
from pathlib import Path

ROOT = Path(__file__).parents[1]
Row = dict[str, str]
MEASURED = ("test_accuracy", "memorised", "cpu_seconds")


def table(name: str) -> str:
    """`time`, `memory`, `classes` or `language model`."""
    tables = {"time": time, "memory": memory, "classes": classes, "language model": language_model}
    return tables[name]()


def time() -> str:
    """Seconds of every case over those of plain cross entropy, and how they grow from a quarter of the classes."""
    cases = ["ours", "ours unclipped", "products", "clip", "torch", "torch chunked"]
    heads = ["with the clip", "without", "products alone", "unfused clip", "torch", "torch, chunked", "growth"]
    of, notes = _costs("seconds")
    lines = []
    for cell in _cells(of):
        plain = of.get((*cell, "plain"))
        line = []
        for case in cases:
            here = of.get((*cell, case))
            line.append(f"{here / plain:.2f}" if here and plain else _dash(notes.get((*cell, case), "")))
        quarter, here = of.get((cell[0] // 4, *cell[1:], "ours")), of.get((*cell, "ours"))
        line.append(f"{here / quarter:.1f}" if here and quarter else "")
        lines.append([*(f"{x:,}" for x in cell), *line])
    return _markdown(["classes", "width", "rows", *heads], lines)


def memory() -> str:
    """Megabytes of every case over those of the unfused clip."""
    cases = ["ours", "plain", "torch", "torch chunked"]
    of, notes = _costs("extra_mb")
    lines = []
    for cell in _cells(of):
        clip, ours = of.get((*cell, "clip")), of.get((*cell, "ours"))
        line = [f"{ours:.0f}" if ours else "-"]
        for case in cases:
            here = of.get((*cell, case))
            line.append(f"{here / clip:.3f}" if here and clip else _dash(notes.get((*cell, case), "")))
        lines.append([*(f"{x:,}" for x in cell), *line])
    heads = ["with the clip, MB", "with the clip", "plain", "torch", "torch, chunked"]
    return _markdown(["classes", "width", "rows", *heads], lines)


def classes() -> str:
    """Each setting and clip at its last epoch, and beside no clip early stopping, the best epoch and true labels."""
    runs: dict[tuple[str, ...], dict[str, list[Row]]] = {}
    for row in _read(ROOT / "results" / "hundred_thousand_classes.csv"):
        key = row["classes"], row["examples"], row["noise"], row["clip"]
        runs.setdefault(key, {}).setdefault(row["seed"], []).append(row)
    lines = []
    for (classes, examples, noise, clip), seeds in runs.items():
        if float(noise) == 0:
            continue
        last = [rows[-1] for rows in seeds.values()]
        test, memorised, seconds = (statistics.mean(float(row[name]) for row in last) for name in MEASURED)
        epochs = len(next(iter(seeds.values())))
        others = ["", "", ""]
        if clip == "none":
            stopped = [max(rows, key=lambda row: float(row["validation_accuracy"])) for rows in seeds.values()]
            best = [max(rows, key=lambda row: float(row["test_accuracy"])) for rows in seeds.values()]
            true = [rows[epochs - 1] for rows in runs.get((classes, examples, "0.0", clip), {}).values()]
            others = [_mean_test(found) for found in (stopped, best, true)]
        line = [f"{epochs} of {last[0]['epochs']}", clip, f"{test:.1f}", *others, f"{memorised:.1f}"]
        lines.append([f"{int(classes):,}", f"{int(examples):,}", *line, f"{seconds / 60:.1f}", str(len(seeds))])
    heads = ["classes", "examples", "epoch", "clip", "test", "stopped early", "best epoch", "true labels", "memorised"]
    return _markdown([*heads, "CPU minutes", "seeds"], lines)


def _mean_test(rows: list[Row]) -> str:
    return f"{statistics.mean(float(row['test_accuracy']) for row in rows):.1f}" if rows else "–"


def language_model() -> str:
    """The mean accuracy over the seeds: without and with the clip, and without it on true tokens."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in _read(ROOT / "results" / "causal_lm.csv"):
        column = f"`{row['clip']}`" if float(row["noise"]) else "true tokens"
        found.setdefault(row["loss"], {}).setdefault(column, []).append(float(row["accuracy"]))
    columns = list(next(iter(found.values())))
    lines = [[f"`{loss}`", *(f"{statistics.mean(of[column]):.1f}" for column in columns)] for loss, of in found.items()]
    return _markdown(["loss", *columns], lines)


def _read(path: Path) -> list[Row]:
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def _costs(field: str) -> tuple[dict[tuple[int, int, int, str], float], dict[tuple[int, int, int, str], str]]:
    """Medians, and reasons where nothing was measured."""
    values: dict[tuple[int, int, int, str], list[float]] = {}
    notes = {}
    [path] = (ROOT / "benchmarks" / "results").glob("million_classes-*.csv")
    for row in _read(path):
        key = int(row["classes"]), int(row["width"]), int(row["rows"]), row["case"]
        if row[field]:
            values.setdefault(key, []).append(float(row[field]))
        else:
            notes[key] = row["note"].replace("more than", ">").replace("a minute", "1 min")
    return {key: statistics.median(of) for key, of in values.items()}, notes


def _cells(of: dict[tuple[int, int, int, str], float]) -> list[tuple[int, int, int]]:
    return sorted({(k, d, n) for k, d, n, _ in of})


def _dash(reason: str) -> str:
    return f"- ({reason})" if reason else "-"


def _markdown(heads: list[str], lines: list[list[str]]) -> str:
    rows = [heads, ["--:"] * len(heads), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
