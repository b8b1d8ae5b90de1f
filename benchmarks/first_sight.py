"""The paper's effect on digits: cross entropy memorises wrong labels, clipped cross entropy mostly does not.

    python benchmarks/first_sight.py

Half of the labels flipped to any other class, or 40 % to the next one; with and without LogitClip; three seeds, each
with its own draw of the noise. First with the dataset's default, an MLP that can memorise everything; then with batch
norm and weight decay, where the temp that helps is another one. Some minutes on one core; an interrupted run goes on.
The results, one row for each run, go to results/first_sight.csv.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from pathlib import Path

from rich.console import Console
from rich.table import Table

from logitclip.config import RunConfig
from logitclip.run_folder import Result
from logitclip.training import train

NETWORKS = {
    "mlp": {},
    "mlp:norm=batch": {"model": "mlp:norm=batch", "weight_decay": 5e-4},
}
# The clip helps from another temp on with batch norm: show some around it.
TEMPS = {
    ("mlp", "symmetric:rate=0.5"): (1.5,),
    ("mlp", "asymmetric:rate=0.4"): (2.5,),
    ("mlp:norm=batch", "symmetric:rate=0.5"): (1.5, 4.0, 5.0),
    ("mlp:norm=batch", "asymmetric:rate=0.4"): (2.5, 4.0, 5.0),
}
COLUMNS = (
    "network",
    "noise",
    "clip",
    "seed",
    "last10_accuracy",
    "best_accuracy",
    "memorised",
    "recovered",
    "noise_rate",
)


def shown(results: list[Result], name: str) -> str:
    values = [getattr(result, name) for result in results]
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values) if len(values) > 1 else 0:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", default="runs", help="the folder that holds the folders of runs")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "first_sight.csv")
    args = parser.parse_args()
    table = Table("network", "noise", "clip", "test accuracy", "memorised", "recovered", title="digits, percent")
    rows: list[list[object]] = []
    versions: list[str] = []
    for (network, noise), temps in TEMPS.items():
        for clip in ("none", *(f"norm:temp={temp:g}" for temp in temps)):
            results = []
            for seed in range(args.seeds):
                config = RunConfig(
                    noise=noise, clip=clip, seed=seed, noise_seed=seed, runs=args.runs, **NETWORKS[network]
                )
                results.append(train(config))
                result = results[-1]
                numbers = [f"{getattr(result, name):.4f}" for name in COLUMNS[4:]]
                versions = list(result.versions)
                provenance = [result.id, result.commit, result.device, *result.versions.values()]
                rows.append([network, noise, clip, seed, *numbers, *provenance])
            numbers = [shown(results, name) for name in ("last10_accuracy", "memorised", "recovered")]
            table.add_row(network, noise, clip, *numbers)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow([*COLUMNS, "id", "commit", "device", *versions])
        writer.writerows(rows)
    Console(width=120).print(table)
    print(args.out)


if __name__ == "__main__":
    main()
