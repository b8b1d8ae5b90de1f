"""Sweeps: no run is repeated or lost, whatever is killed and however many processes share a folder."""

from __future__ import annotations

import io
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from disk import read_rows
from events import Log
from processes import finished, wait_until

from logitclip.cli import terminal as progress
from logitclip.runs.config import RunConfig
from logitclip.runs.results import Failure, Result
from logitclip.search import TRIALS
from logitclip.studies import queue, sweeping, tuning
from logitclip.studies.recipe import Cell, Recipe, load_recipe
from logitclip.studies.tables import missing_runs

SMALL = RunConfig(limit=64, model="mlp:width=8,depth=1", epochs=1, batch_size=32)
GRID = "norm:weight=grid"  # the shortest search: four values


def recipe(folder: Path, change: dict[str, Any] | None = None, tune_seed: int | None = 0, **axes: list[Any]) -> Recipe:
    """Make a recipe from the product of axes; each seed has its own noise."""
    axes = axes or {"noise": ["symmetric:rate=0.5", "pair:rate=0.2"], "penalty": ["none", GRID], "seed": [0, 1]}
    cells = []
    for values in itertools.product(*axes.values()):
        coordinates = dict(zip(axes, values, strict=True))
        seed = coordinates.get("seed", 0)
        cells.append(
            Cell(coordinates, replace(SMALL, runs=str(folder), noise_seed=seed, **coordinates, **(change or {})))
        )
    return Recipe(
        name="small",
        title="",
        about="",
        paper=None,
        scale="full",
        tune_seed=tune_seed,
        rows=("penalty",),
        cols=("noise",),
        statistics=("last10_accuracy",),
        figure=None,
        cells=tuple(cells),
    )


def swept(recipe: Recipe, log: Log | None = None, **options: Any) -> list[sweeping.CellOutcome]:
    return sweeping.sweep(recipe, executor="inline", listener=log, **options)


def accuracies(rows: list[sweeping.CellOutcome]) -> list[float]:
    return [row.outcome.last10_accuracy for row in rows if isinstance(row.outcome, Result)]


# -- tune, then train --------------------------------------------------------------------------------------------------


def test_values_are_tuned_once_and_used_by_all_seeds(tmp_path):
    study, log = recipe(tmp_path), Log()
    assert {row.outcome for row in sweeping.collect(study)} == {None}
    assert [row.config is None for row in sweeping.collect(study)] == [tuning.is_tuned(c.config) for c in study.cells]
    rows = swept(study, log)
    assert len(log.of("start")) == 2 * 4 + 8  # two values to find, eight cells
    assert all(isinstance(row.outcome, Result) for row in rows)
    assert rows == sweeping.collect(study)
    assert [row.cell for row in rows] == list(study.cells)
    for row in rows:
        config = row.cell.config
        if tuning.is_tuned(config):
            chosen = tuning.choose(study.to_tune(row.cell))
            assert chosen.seed == chosen.noise_seed == 0
            assert row.config == replace(config, penalty=chosen.penalty)
        else:
            assert row.config == config
    assert [detail for kind, _, detail in log if kind == "tuning"] == [2, 2]
    assert all(isinstance(detail, RunConfig) for kind, _, detail in log if kind == "chosen")
    log.events.clear()
    assert swept(study, log) == rows  # everything is finished
    assert not log.of("start")
    assert len(log.of("skipped")) == 2 * 4 + 8


def test_the_cells_of_a_value_run_as_soon_as_it_is_chosen(tmp_path):
    log = Log()
    swept(recipe(tmp_path, noise=["none", "pair:rate=0.2"], penalty=[GRID], seed=[0]), log)
    order = [(config.noise, config.val > 0) for config in log.of("start")]
    first, other = (list(group) for _, group in itertools.groupby(order, key=lambda run: run[0]))
    assert [trial for _, trial in first] == [trial for _, trial in other] == [True] * 4 + [False]


def test_each_seed_may_tune_for_itself_and_step_by_step(tmp_path):
    log = Log()
    study = recipe(tmp_path, tune_seed=None, clip=["norm:temp=auto"], seed=[0, 1])
    rows = swept(study, log)
    assert len(log.of("start")) == 2 * (TRIALS + 1)
    assert [row.config and row.config.clip for row in rows] == [tuning.choose(c.config).clip for c in study.cells]


def test_cells_with_the_same_id_are_one_run(tmp_path):
    log = Log()
    rows = swept(recipe(tmp_path, loss=["gce", "gce:q=0.7", "ce"]), log)
    assert len(log.of("start")) == 2
    assert accuracies(rows)[0] == accuracies(rows)[1]


def test_a_value_that_cannot_be_chosen_leaves_the_rest_alone(tmp_path):
    study, log = recipe(tmp_path, lr=[0.1, 1e30], penalty=["none", GRID], seed=[0]), Log()
    rows = swept(study, log)
    assert [type(row.outcome) for row in rows] == [Result, Result, Failure, Failure]
    assert isinstance(rows[3].outcome, Failure)
    assert "all trials failed" in rows[3].outcome.error
    assert rows[3].config is None
    assert rows == sweeping.collect(study)
    log.events.clear()
    assert swept(study, log) == rows  # they diverged, which is final
    assert not log.of("start")


def test_what_failed_before_is_tried_again_also_as_a_trial(tmp_path, monkeypatch):
    study = recipe(tmp_path, penalty=["none", GRID], seed=[0])
    real = queue.train

    def broken(config: RunConfig, **more: Any) -> Result:
        raise OSError("the disk was away")

    monkeypatch.setattr(queue, "train", broken)
    assert {type(row.outcome) for row in swept(study)} == {Failure}
    monkeypatch.setattr(queue, "train", real)
    log = Log()
    rows = swept(study, log)
    assert {type(row.outcome) for row in rows} == {Result}
    assert len(log.of("start")) == 6
    assert rows == sweeping.collect(study)


# -- parts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 5])
def test_shards_are_disjoint_and_together_everything(tmp_path, monkeypatch, n):
    study, made = recipe(tmp_path), []
    logs = [Log() for _ in range(n)]
    for i in range(n):
        rows = swept(study, logs[i], shard=(i + 1, n))
        assert all(isinstance(row.outcome, Result) for row in rows)  # a part does not depend on the others
        made += [row.cell for row in rows]
    assert sorted(map(study.cells.index, made)) == list(range(8))
    starts = Counter(config.id for log in logs for config in log.of("start"))
    assert set(starts.values()) == {1}
    assert len(starts) == 2 * 4 + 8
    assert all(isinstance(row.outcome, Result) for row in sweeping.collect(study))
    assert not any(log.of("skipped") for log in logs)


def test_shard_out_of_range(tmp_path):
    for shard in ((0, 2), (3, 2)):
        with pytest.raises(ValueError, match="A shard is one of 1/n to n/n"):
            swept(recipe(tmp_path), shard=shard)


# -- several at once, and kills ----------------------------------------------------------------------------------------

RECIPE = """
[base]
data = "digits"
limit = 64
model = "mlp:width=8,depth=1"
batch_size = 32
epochs = {epochs}
checkpoint_seconds = 0.2
[grid]
noise = ["symmetric:rate=0.5", "none"]
penalty = ["none", "norm:weight=grid"]
seed = [0, 1]
[table]
rows = ["penalty"]
cols = ["noise"]
cells = ["last10_accuracy"]
"""


COUNTING = """
import sys
from pathlib import Path
from logitclip.studies import sweeping
from logitclip.studies.listener import Listener
from logitclip.studies.recipe import load_recipe

class Teller(Listener):
    def on_start(self, config, row):
        print("start", config.id, flush=True)
    def on_done(self, config, result):
        print("done", config.id, flush=True)
    def on_failed(self, config, failure):
        print("failed", config.id, flush=True)

if __name__ == "__main__":
    recipe = load_recipe(sys.argv[1], runs=sys.argv[2])
    sweeping.sweep(recipe, executor=sys.argv[3], listener=Teller())
"""


def started(*command: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def results(folder: Path) -> dict[str, int]:
    """Return the finished runs and their times."""
    return {file.parent.name: file.stat().st_mtime_ns for file in folder.glob("*/result.json")}


def wait_for(count: int, folder: Path, process: subprocess.Popen[str]) -> None:
    """Wait until `count` runs are finished."""
    wait_until(lambda: len(results(folder)) >= count, process)


def test_two_sweeps_on_one_folder(tmp_path):
    own, script, folder = tmp_path / "own.toml", tmp_path / "script.py", tmp_path / "runs"
    own.write_text(RECIPE.format(epochs=60), encoding="utf-8")
    script.write_text(COUNTING, encoding="utf-8")
    said = [finished(process) for process in [started(script, own, folder, "inline") for _ in range(2)]]
    assert [(code, err) for code, _, err in said] == [(0, ""), (0, "")]
    events = [[line.split() for line in out.splitlines()] for _, out, _ in said]
    starts = Counter(run for log in events for kind, run in log if kind == "start")
    assert set(starts) == set(results(folder))
    assert len(starts) == 16
    assert set(starts.values()) == {1}
    assert "failed" not in {kind for log in events for kind, _ in log}
    assert not list(folder.glob("*/claim"))
    assert not list(folder.glob("*/failure.json"))
    alone = swept(load_recipe(str(own), runs=str(tmp_path / "alone")))
    assert accuracies(alone) == accuracies(sweeping.collect(load_recipe(str(own), runs=str(folder))))
    assert len(accuracies(alone)) == 8


@pytest.mark.parametrize("first", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_sweep_that_is_interrupted_and_killed_repeats_nothing(tmp_path, first):
    own, folder = tmp_path / "own.toml", tmp_path / "runs"
    own.write_text(RECIPE.format(epochs=60), encoding="utf-8")
    command = ("-m", "logitclip", "sweep", own, "--runs", folder, "--jobs", "1")
    for number, count in ((first, 2), (signal.SIGKILL, 6)):
        process = started(*command)
        wait_for(count, folder, process)
        os.killpg(process.pid, number)  # as a terminal does; after a SIGKILL nobody cleans up
        code, _, err = finished(process)
        assert code == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number], err
        assert "Traceback" not in err
        if number == first:
            assert "logitclip: interrupted. Repeat the command to resume." in err
            assert not list(folder.glob("*/claim"))
    before = results(folder)
    assert 6 <= len(before) < 16
    code, out, err = finished(started(*command))
    assert code == 0, err
    after = results(folder)
    assert len(after) == 16
    assert {run: after[run] for run in before} == before
    assert out.startswith(f"{16 - len(before)} runs done, ")
    assert "Next: " + shlex.join(["logitclip", "report", str(own), "--scale", "full", "--runs", str(folder)]) in out
    for run in after:
        assert [row["epoch"] for row in read_rows(folder / run / "metrics.jsonl")] == list(range(60))


def test_a_removed_trial_is_named_by_the_report_and_is_all_that_is_repeated(tmp_path):
    study, log = recipe(tmp_path, penalty=["none", GRID], seed=[0]), Log()
    rows = swept(study, log)
    assert missing_runs(study, rows) is None
    trial = next(config for config in log.of("start") if config.val > 0)
    shutil.rmtree(tmp_path / trial.id)
    without = missing_runs(study, sweeping.collect(study))
    assert without is not None
    assert without.startswith("1 of 2 runs have no result yet: logitclip sweep ")
    assert "For 1 of them a value is not chosen, because trials were not run yet or were removed" in without
    log.events.clear()
    assert swept(study, log) == rows
    assert log.of("start") == [trial]
    untuned = missing_runs(study, [replace(rows[0], outcome=None), rows[1]])
    assert untuned is not None
    assert untuned.endswith(" makes them.")


def test_tuned_cells_train_on_all_examples(tmp_path):
    """A share that the recipe holds out is for the trials only."""
    (row,) = swept(recipe(tmp_path, {"val": 0.25}, penalty=[GRID], noise=["pair:rate=0.2"], seed=[0]))
    assert row.config is not None
    assert isinstance(row.outcome, Result)
    assert row.config.val == 0.0
    assert row.outcome.config["val"] == 0.0
    assert row.outcome.val_accuracy is None


# -- the command line --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_tuned_sweep_on_two_ray_nodes_of_which_one_is_lost(tmp_path):
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    axes = {"noise": ["symmetric:rate=0.5", "pair:rate=0.2"], "clip": ["none", "norm:temp=auto"], "seed": [0, 1]}
    there, here = (
        recipe(tmp_path / name, {"epochs": 100, "checkpoint_seconds": 1}, **axes)  # type: ignore[arg-type]
        for name in ("ray", "here")
    )
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    node = cluster.add_node(num_cpus=1)
    lost: list[int] = []

    def react(kind: str, config: RunConfig, detail: Any) -> None:
        if kind == "chosen" and not lost:  # halfway: some values are chosen, some are not
            lost.append(len(log.of("done")))
            cluster.remove_node(node, allow_graceful=False)

    log = Log(react)
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        rows = sweeping.sweep(there, executor="ray", listener=log)
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert 5 <= lost[0] < len(log.of("done")) == 2 * 5 + 8
    assert not log.of("failed")
    local = swept(here)
    assert accuracies(rows) == accuracies(local)
    for one, other in zip(rows, local, strict=True):
        assert one.config is not None
        assert other.config is not None
        assert one.config.clip == other.config.clip
        assert metrics(one.config) == metrics(other.config)


def metrics(config: RunConfig) -> bytes:
    return (Path(config.runs) / config.id / "metrics.jsonl").read_bytes()


@pytest.fixture
def typed(command) -> Any:
    """Run `logitclip sweep ...` in this process."""
    return lambda *arguments: command("sweep", *arguments, "--executor", "inline")


def test_summary_exit_code_and_failures_in_a_sentence_each(tmp_path, typed):
    own = tmp_path / "own.toml"
    own.write_text(
        RECIPE.format(epochs=1).replace("seed = [0, 1]", "lr = [0.1, 1e30]").replace('["noise"]', '["noise", "lr"]'),
        encoding="utf-8",
    )
    code, out, err = typed(own, "--runs", tmp_path / "runs")
    assert code == 3
    assert out.startswith("12 runs done, 0 done before, 12 failed, in ")  # 10, and 2 without a chosen value
    first, opening, *sentences = [line for line in err.splitlines() if line.startswith("logitclip: ")]
    assert first.startswith("logitclip: sweep of ")
    assert opening.startswith("logitclip: own (full): ")
    assert len(sentences) == 2  # one reason, one sentence
    assert "lr 1e+30" in sentences[0]
    assert "tuning and 9 more: Diverged: Training diverged in epoch 1:" in sentences[0]
    assert "failure.json." in sentences[0]
    assert "and 1 more: No value can be chosen: all trials failed." in sentences[1]
    code, out, err = typed(own, "--runs", tmp_path / "runs")
    assert code == 3
    assert out.startswith("0 runs done, 12 done before, 12 failed, in ")
    assert "Diverged" in err


def test_no_terminal_no_more_than_a_line_every_few_seconds(tmp_path, typed, monkeypatch):
    own = tmp_path / "own.toml"
    own.write_text(RECIPE.format(epochs=1), encoding="utf-8")
    began = time.monotonic()
    code, out, err = typed(own, "--runs", tmp_path / "one", "--shard", "1/2")
    seconds = time.monotonic() - began
    assert code == 0
    lines = err.splitlines()
    assert f"kept in {tmp_path / 'one'}/. Ctrl-C saves and stops; repeat the command to resume." in lines[0]
    assert lines[1] == "logitclip: own (full): 8 runs and trials to tune 2 values."
    assert lines[2].startswith("own (full): of ")
    assert "; started " in lines[2]
    assert len(lines) <= 4 + seconds / progress.SweepBoard.PAUSE
    assert out.startswith("8 runs done, ")
    monkeypatch.setattr(progress.SweepBoard, "PAUSE", 0.0)
    code, out, err = typed(own, "--runs", tmp_path / "all")
    assert code == 0
    _, _, *lines = err.splitlines()
    assert len(lines) == 32  # the start and the end of each
    assert lines[1].startswith("own (full): of 16 runs 1 done, 0 running, 0 failed, 15 left, about ")
    assert "; symmetric:rate=0.5, norm:weight=0.01, seed 0, tuning: validation accuracy (noisy labels) " in lines[1]
    assert lines[-1].startswith("own (full): of 16 runs 16 done, 0 running, 0 failed, 0 left; ")
    assert ": test accuracy " in lines[-1]
    for line in lines:  # the counts add up
        total, *counts = map(int, re.findall(r"(?:of )?(\d+) (?:runs|done|running|failed|left)", line)[:5])
        assert sum(counts) == total


def test_the_live_table(tmp_path, monkeypatch):
    from rich.console import Console

    board = progress.SweepBoard("small", [cell.config for cell in recipe(tmp_path).cells])
    one, other, *_ = (cell.config for cell in recipe(tmp_path).cells)
    to_tune = recipe(tmp_path).cells[2].config
    clock = itertools.count(board.started, 10)
    monkeypatch.setattr(progress, "monotonic", lambda: next(clock))
    row = {"epoch": 4, "loss": 1.5, "test_accuracy": 81.25}
    board.on_tuning(to_tune, 2)
    board.on_queued(one)
    board.on_queued(other)
    board.on_start(one, None)
    board.on_start(other, row)
    board.on_epoch(one, row)
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(board.table())
    text = console.export_text()
    assert "small: of 4 runs 0 done, 2 running, 0 failed, 2 left" in text
    assert "symmetric:rate=0.5, penalty none, seed 0" in text
    assert text.count("5/1 ") == 2
    assert text.count("81.2 %") == 2
    assert "noisy" not in text
    own = replace(one, data="table:path=x.csv,label=y", epochs=5)
    board.epochs[own], board.running[own] = 5, (0, row)
    console.print(board.table())
    assert "81.2 % (noisy labels)" in console.export_text()
    del board.running[own]
    board.on_failed(one, Failure(one.id, "It failed.", "", 1, False))
    assert board.ended == 1
    board.fields.append("plugin")
    assert "mine.py" not in board.label(replace(one, plugin=("mine.py",)))
    assert "of 4 runs 0 done, 1 running, 1 failed, 2 left, about " in board.state()
    assert [label for label, _ in board.errors["It failed."]] == ["symmetric:rate=0.5, penalty none, seed 0"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quickstartt"], "Did you mean 'quickstart'?"),
        (["quickstart", "--scale", "smoke", "--shard", "2"], "shard must be one of n parts, from 1/n to n/n"),
        (["quickstart", "--scale", "smoke", "--shard", "5/4"], "as in 1/4; got '5/4'"),
        (["quickstart", "--scale", "smoke", "--jobs", "0"], "jobs must be at least 1, got 0"),
        (["quickstart", "--scale", "smoke", "--address", "auto"], "An address is for the executor ray"),
    ],
)
def test_mistakes_are_a_sentence(tmp_path, typed, arguments, message):
    code, out, err = typed(*arguments, "--runs", tmp_path, "-q")
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_human_labels_are_part_of_the_data(tmp_path):
    def data_of(configs: list[RunConfig]) -> list[tuple[str, str | None]]:
        return replace(recipe(tmp_path), cells=tuple(Cell({}, config) for config in configs)).data()

    two = [
        RunConfig(data="cifar10", noise=noise, root=root) for root in ("a", "b") for noise in ("none", "real:set=worst")
    ]
    assert data_of(two[:3]) == [("cifar10:human=true", "a"), ("cifar10", "b")]
    assert data_of([RunConfig(data="cifar100:subset=true", noise="real:set=fine")]) == [
        ("cifar100:subset=true,human=true", None)
    ]
    assert data_of([RunConfig(data="folder:path=x", noise="real:set=a")]) == [("folder:path=x", None)]


def test_a_figure_without_runs(tmp_path, typed):
    code, out, _ = typed("figure1", "--runs", tmp_path)
    assert code == 0
    assert "0 runs done, 0 done before, in " in out
    assert "Next: logitclip figures figure1 --scale full" in out
