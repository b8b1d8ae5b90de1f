"""Accuracy with and without the clip in five libraries: runs the complete examples of the docs with several seeds.

    python benchmarks/integrations.py [--seeds 5] [--pages tune sklearn ...]

Each example trains on 40 % wrong labels and ends with two accuracies on true labels, `plain` and `clipped`; its data,
noise and weights depend on the line `seed = 0`, which is replaced here. The clip is chosen only on noisy labels. The
results go to results/integrations.csv, one row per example and seed; existing rows are kept.
"""

from __future__ import annotations

import argparse
import csv
import logging
import re
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = ("tune", "sklearn", "lightning", "skorch", "huggingface")
COLUMNS = ("page", "seed", "plain", "clipped", "seconds")


def example(page: str, seed: int) -> dict[str, float]:
    """Run the example of a page with a seed."""
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"), flags=re.DOTALL
    )
    code, found = re.subn(r"^seed = 0$", f"seed = {seed}", "\n".join(blocks), flags=re.MULTILINE)
    assert found == 1
    code = re.sub(r"^assert .*$", "", code, flags=re.MULTILINE)  # they hold for seed 0 only
    names: dict[str, float] = {}
    start = time.process_time()
    exec(compile(code, page, "exec"), names)
    accuracies = {name: round(float(names[name]), 4) for name in ("plain", "clipped")}
    return accuracies | {"seconds": round(time.process_time() - start, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--pages", nargs="+", choices=PAGES, default=PAGES)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "integrations.csv")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    rows: list[dict[Any, Any]] = (
        list(csv.DictReader(arguments.out.open(encoding="utf-8"))) if arguments.out.exists() else []
    )
    for page in arguments.pages:
        for seed in range(arguments.seeds):
            if not any((row["page"], row["seed"]) == (page, str(seed)) for row in rows):
                rows.append({"page": page, "seed": str(seed), **{k: str(v) for k, v in example(page, seed).items()}})
                with arguments.out.open("w", newline="", encoding="utf-8") as file:
                    writer = csv.DictWriter(file, COLUMNS)
                    writer.writeheader()
                    writer.writerows(rows)
        for name in ("plain", "clipped"):
            values = [100 * float(row[name]) for row in rows if row["page"] == page]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            print(f"{page} {name}: {statistics.mean(values):.1f} ± {spread:.1f} ({len(values)} seeds)")


if __name__ == "__main__":
    main()
