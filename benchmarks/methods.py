"""Every method and comparison of the paper on digits, with and without the clip: one command makes the table.

    python benchmarks/methods.py [--runs DIR] [--jobs 2]

1,400 training digits with 50 % symmetric or 40 % asymmetric noise, the dataset's own protocol (MLP, 150 epochs, SGD
with lr 0.1) but for what a row says, three seeds that are also the seeds of the noise. Accuracy is on the clean test
digits, mean of the last 10 epochs; memorised is the share of wrong labels that the network predicts at the end.

Where a row has several settings to choose from, the choice is made as in the paper: trained with seed 0 on four fifths
of the noisy examples, best on the *noisy* labels of the last fifth; then all seeds train on everything.

- The clip is norm:temp=T with T one of 0.5, 1, 1.5, 2.5; in SOP and DivideMix, where probabilities enter the
  targets, one of 0.25, 0.5, 1, 1.5: a large T, which is a small scale, would keep them near uniform.
- SOP and SOP+ take lr_u = lr_v = 10, as on CIFAR-10. Digits are not augmented, so the two views of SOP+ are the same
  and its consistency term is 0: what it adds here is the balance term.
- DivideMix takes its presets (lambda_u = 25 with symmetric noise; 0 and the confidence penalty with asymmetric noise;
  10 epochs of warm-up) and batches of 64, as the released code does.
- CORES takes lr 0.02: with 0.1 and momentum the loss, which is not bounded below, runs away when its beta rises, until
  the sieve leaves out every example. (Its authors take no momentum and divide the rate by 1 + beta.)

Runs are kept in the folder --runs, and finished ones are not made again: the command can be stopped and continued. The
results, in results/methods_digits.csv and results/methods_digits_choices.csv, are written anew after each run.
"""

from __future__ import annotations

import argparse
import csv
import io
import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from logitclip import training
from logitclip.config import RunConfig
from logitclip.engine import Diverged
from logitclip.run_folder import Result, read_result, write

RESULTS = Path(__file__).parents[1] / "results"
SEEDS = (0, 1, 2)
NOISES = {"symmetric 50 %": "symmetric:rate=0.5", "asymmetric 40 %": "asymmetric:rate=0.4"}
TEMPS, SMALL_TEMPS = (0.5, 1.0, 1.5, 2.5), (0.25, 0.5, 1.0, 1.5)

Fields = dict[str, Any]  # of RunConfig, where they differ from the defaults
METHODS: dict[str, Fields] = {
    "CE": {},
    "SAM": {"method": "sam:rho=0.05"},
    "SOP": {"method": "sop:lr_u=10,lr_v=10"},
    "SOP+": {"method": "sop_plus:lr_u=10,lr_v=10"},
    "DivideMix": {"method": "dividemix", "batch_size": 64},
    "CORES": {"loss": "cores", "lr": 0.02},
}
COMPARISONS: dict[str, list[Fields]] = {
    "LogitNorm": [{"clip": f"logit_norm:temperature={t}"} for t in TEMPS],
    "clip by value": [{"clip": f"value:limit={limit}"} for limit in (0.1, 0.5, 1.0, 2.0)],
    "ReLU6": [{"model": "mlp:width=256,depth=3,activation=relu6"}],
    "norm penalty": [{"penalty": f"norm:weight={weight}"} for weight in (0.01, 0.05, 0.1, 0.5)],
    "gradient clipping": [{"grad_clip": most} for most in (0.1, 0.5, 1.0)],
}


class Row(NamedTuple):
    """A row of the table: a method under one noise, and the settings to choose from."""

    method: str
    clip: bool
    noise: str
    candidates: list[Fields]


def table_rows() -> list[Row]:
    rows = []
    for noise in NOISES:
        for name, fields in METHODS.items():
            temps = SMALL_TEMPS if name in ("SOP", "SOP+", "DivideMix") else TEMPS
            rows.append(Row(name, False, noise, [fields]))
            rows.append(Row(name, True, noise, [{**fields, "clip": f"norm:temp={t:g}"} for t in temps]))
        rows += [Row(name, False, noise, candidates) for name, candidates in COMPARISONS.items()]
    return rows


def make_config(row: Row, fields: Fields, seed: int, runs: str, val: float = 0.0) -> RunConfig:
    return RunConfig(noise=NOISES[row.noise], noise_seed=seed, seed=seed, runs=runs, val=val, **fields)


def trials(row: Row, runs: str) -> list[RunConfig]:
    """The runs that the choice is made by; none if there is nothing to choose."""
    return [make_config(row, c, 0, runs, val=0.2) for c in row.candidates] if len(row.candidates) > 1 else []


def chosen(row: Row, runs: str) -> Fields | None:
    """The candidate with the best accuracy on held-out noisy labels; None if not all have been tried."""
    accuracies = []
    for config in trials(row, runs):
        result = finished(config)
        if result is None and not diverged(config):
            return None
        accuracies.append(-1.0 if result is None or result.val_accuracy is None else result.val_accuracy)
    return row.candidates[accuracies.index(max(accuracies))] if accuracies else row.candidates[0]


def finished(config: RunConfig) -> Result | None:
    return read_result(Path(config.runs) / config.id)


def diverged(config: RunConfig) -> bool:
    return (Path(config.runs) / config.id / "diverged").exists()


def train(config: RunConfig) -> None:
    try:
        training.train(config)
    except Diverged as error:
        write(Path(config.runs) / config.id / "diverged", str(error).encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", default="runs/methods", help="folder of the runs")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    options = parser.parse_args()
    rows, runs = table_rows(), options.runs
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        _train_all(pool, [config for row in rows for config in trials(row, runs)], rows, runs)
        picked = [(row, chosen(row, runs)) for row in rows]
        final = [make_config(row, f, seed, runs) for seed in SEEDS for row, f in picked if f is not None]
        _train_all(pool, final, rows, runs)
    _print(rows, runs)


def _train_all(pool: ProcessPoolExecutor, configs: list[RunConfig], rows: list[Row], runs: str) -> None:
    missing = [config for config in configs if finished(config) is None and not diverged(config)]
    for future in as_completed([pool.submit(train, config) for config in missing]):
        future.result()
        write_results(rows, runs)


def write_results(rows: list[Row], runs: str) -> None:
    """The table, and what was tried to choose the settings in it, as far as they are done."""
    lines = []
    for row in rows:
        for config, fields in zip(trials(row, runs), row.candidates, strict=False):
            result = finished(config)
            if result is not None:
                lines.append(
                    {
                        "noise": row.noise,
                        "method": row.method,
                        "clip": "with" if row.clip else "without",
                        "setting": _shown(fields),
                        "chosen": fields is chosen(row, runs),
                        "noisy_validation_accuracy": round(result.val_accuracy or 0.0, 2),
                        "test_accuracy": round(result.last10_accuracy, 2),
                        "seed": 0,
                        "config_id": result.id,
                        **_provenance([result]),
                    }
                )
    _write_csv(RESULTS / "methods_digits_choices.csv", lines)
    _write_csv(RESULTS / "methods_digits.csv", [line for row in rows if (line := _line(row, runs)) is not None])


def _line(row: Row, runs: str) -> dict[str, Any] | None:
    fields = chosen(row, runs)
    if fields is None:
        return None
    configs = [make_config(row, fields, seed, runs) for seed in SEEDS]
    results = [result for config in configs if (result := finished(config)) is not None]
    if not results:
        return None
    accuracies = [result.last10_accuracy for result in results]
    return {
        "noise": row.noise,
        "method": row.method,
        "clip": "with" if row.clip else "without",
        "setting": _shown(fields),
        "n": len(results),
        "diverged": sum(map(diverged, configs)),
        "last10_accuracy_mean": round(statistics.mean(accuracies), 2),
        "last10_accuracy_std": round(statistics.stdev(accuracies), 2) if len(accuracies) > 1 else "",
        "memorised_mean": round(statistics.mean(float(result.memorised or 0) for result in results), 2),
        "recovered_mean": round(statistics.mean(float(result.recovered or 0) for result in results), 2),
        "config_ids": " ".join(result.id for result in results),
        **_provenance(results),
    }


def _provenance(results: list[Result]) -> dict[str, str]:
    versions = {f"{k} {v}" for result in results for k, v in result.versions.items()}
    return {
        "versions": ", ".join(sorted(versions)),
        "device": ", ".join(sorted({result.device for result in results})),
        "commit": " ".join(sorted({result.commit or "unknown" for result in results})),
    }


def _shown(fields: Fields) -> str:
    return "; ".join(f"{name}={value}" for name, value in fields.items()) or "defaults"


def _write_csv(path: Path, lines: list[dict[str, Any]]) -> None:
    if not lines:
        return
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    write(path, text.getvalue().encode())


def _print(rows: list[Row], runs: str) -> None:
    lines = {(row.method, row.clip, row.noise): _line(row, runs) for row in rows}
    table = Table(title="Test accuracy on digits, mean and deviation over the seeds (memorised share of wrong labels)")
    for column in ("method", "clip", *NOISES):
        table.add_column(column)
    for method, clip in dict.fromkeys((row.method, row.clip) for row in rows):
        cells = []
        for noise in NOISES:
            line = lines[method, clip, noise]
            cells.append(
                "-"
                if line is None
                else f"{line['last10_accuracy_mean']:.1f} ± {line['last10_accuracy_std'] or 0:.1f} "
                f"({line['memorised_mean']:.1f})\n[dim]{line['setting']}[/]"
            )
        table.add_row(method, "with" if clip else "", *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
