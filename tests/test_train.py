"""`train(config)`: reproducible numbers, also after interruptions, and a reliable run folder."""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from disk import read_rows
from interrupts import interrupted_at_every_line

from logitclip import data, engine, files
from logitclip.data.augment import transform
from logitclip.methods.standard import Standard
from logitclip.runs import checkpoints, claims, listing, results
from logitclip.runs import train as training
from logitclip.runs.config import RunConfig
from logitclip.runs.results import Failure, Result, read_result
from logitclip.runs.train import _with_devices_of_torchrun, build_model, prepare, rebuild_network, train
from logitclip.studies.queue import attempt

SMALL = RunConfig(
    noise="symmetric:rate=0.5",
    limit=200,
    model="mlp:width=16,depth=2",
    epochs=4,
    batch_size=32,
    lr=0.05,
    checkpoint_seconds=0,
)


def metrics(result: Result) -> bytes:
    return (result.folder / "metrics.jsonl").read_bytes()


def lasting(result: Result) -> dict[str, Any]:
    """Return what must be identical whenever and wherever a run is trained."""
    content = json.loads((result.folder / "result.json").read_text(encoding="utf-8"))
    for name in ("runs", "checkpoint_seconds"):
        content["config"].pop(name)
    return {k: v for k, v in content.items() if k not in ("seconds", "digest")}


def weights(result: Result) -> bytes:
    return (result.folder / "weights.safetensors").read_bytes()


def in_folder(tmp_path: Path, name: str, config: RunConfig = SMALL, **change: Any) -> RunConfig:
    return replace(config, runs=str(tmp_path / name), **change)


# -- what comes out ----------------------------------------------------------------------------------------------------


def test_result_and_folder(tmp_path):
    seen: list[Any] = []
    config = in_folder(tmp_path, "a", epochs=12, val=0.2)
    result = train(config, on_epoch=lambda c, row: seen.append((c, row)))
    rows = result.rows
    assert [row for _, row in seen] == [None, *rows]  # once before the first epoch
    assert all(c == config.resolve() for c, _ in seen)
    assert [row["epoch"] for row in rows] == list(range(12))
    assert result.last10_accuracy == pytest.approx(np.mean([row["test_accuracy"] for row in rows[2:]]))
    assert result.best_accuracy == max(row["test_accuracy"] for row in rows)
    assert result.val_accuracy == pytest.approx(np.mean([row["val_accuracy"] for row in rows[2:]]))
    assert result.memorised == rows[-1]["memorised"] is not None
    assert result.recovered == rows[-1]["recovered"] is not None
    assert result.noise_rate == pytest.approx(50, abs=0.5)
    assert (result.id, result.clip, result.epochs) == (config.id, "none", 12)
    assert result.versions["torch"] == torch.__version__.partition("+")[0] or "+" in result.versions["torch"]
    assert result.seconds > 0
    assert sorted(p.name for p in result.folder.iterdir()) == [
        ".claim.lock",
        "config.json",
        "metrics.jsonl",
        "noise.json",
        "result.json",
        "validation.npz",
        "weights.safetensors",
    ]
    options = json.loads((result.folder / "config.json").read_text(encoding="utf-8"))
    assert options.pop("digest") == files.object_digest(options)
    assert RunConfig(**options) == config.resolve()
    assert read_result(result.folder) == result


def test_the_same_config_gives_the_same_bytes(tmp_path):
    one, other = (train(in_folder(tmp_path, name)) for name in "ab")
    assert metrics(one) == metrics(other)
    assert weights(one) == weights(other)
    assert lasting(one) == lasting(other)
    assert one.id == other.id
    third = train(in_folder(tmp_path, "a", seed=1))
    assert metrics(third) != metrics(one)
    fourth = train(in_folder(tmp_path, "a", noise_seed=1))
    assert metrics(fourth) not in (metrics(one), metrics(third))


def test_a_finished_run_is_only_read_back(tmp_path, monkeypatch):
    config = in_folder(tmp_path, "a")
    result = train(config)
    monkeypatch.setattr(training, "make_fabric", None)  # nothing is trained
    assert train(config) == result
    (tmp_path / "a").rename(tmp_path / "b")
    moved = train(in_folder(tmp_path, "b"))
    assert moved.folder == tmp_path / "b" / result.id
    assert moved.rows == json.loads("[" + ",".join(metrics(moved).decode().splitlines()) + "]")


def test_a_result_that_is_damaged_is_made_again(tmp_path, caplog):
    config = in_folder(tmp_path, "a", epochs=1)
    result = train(config)
    before = lasting(result)
    for content in ("{", "[]", '{"id": "of another version"}'):
        (result.folder / "result.json").write_text(content, encoding="utf-8")
        assert lasting(train(config)) == before
        assert "result.json cannot be read" in caplog.text
        caplog.clear()


def test_weights_of_a_finished_run(tmp_path):
    config = in_folder(tmp_path, "a", epochs=2, noise="none")
    trained = train(config)
    dataset, _ = prepare(config.resolve())
    view = transform("none", dataset.mean, dataset.std)
    network = build_model("mlp:width=16,depth=2", dataset, view, seed=7)
    network.load_state_dict(trained.weights())
    logits = network.eval()(view(dataset.test.x[torch.arange(len(dataset.test))], None))
    assert 100 * (logits.argmax(1) == dataset.test.labels).double().mean() == trained.rows[-1]["test_accuracy"]


def test_noise_record(tmp_path):
    config = in_folder(tmp_path, "a", noise="asymmetric:rate=0.4", noise_seed=3, epochs=1)
    result = train(config)
    dataset, record = prepare(config.resolve())
    kept = result.noise
    assert (kept["rule"], kept["seed"], kept["data"]) == ("asymmetric:rate=0.4", 3, "digits")
    assert kept["rate"] == record.rate == result.noise_rate / 100
    assert kept["transition"] == record.transition.tolist()
    assert kept["class_names"] == list("0123456789")
    assert kept["class_sizes"] == dataset.train.clean_labels.bincount(minlength=10).tolist()
    clean = train(in_folder(tmp_path, "a", noise="none", epochs=1)).noise
    assert (clean["rule"], clean["rate"], clean["transition"][0][0]) == ("none", 0, 1)


def test_runs_on_the_same_data_share_it_until_a_file_changes(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("x,kind\n" + "".join(f"{i * i % 7},{'ab'[i % 2]}\n" for i in range(40)), encoding="utf-8")
    config = RunConfig(data=f"table:path={file},label=kind", noise="symmetric:rate=0.2")
    first, record = prepare(config.resolve())
    again, _ = prepare(replace(config, loss="gce", clip="norm:temp=2", seed=3, lr=0.7).resolve())
    assert again is first
    _, other = prepare(replace(config, noise_seed=1).resolve())
    assert not torch.equal(record.labels, other.labels)
    file.write_text("x,kind\n" + "".join(f"{i * i % 7},{'abc'[i % 3]}\n" for i in range(40)), encoding="utf-8")
    assert prepare(config.resolve())[0].num_classes == 3


def test_limit_is_a_fixed_choice(tmp_path):
    small, record = prepare(RunConfig(limit=100).resolve())
    full = data.load("digits")
    assert (len(small.train), len(small.test), record.rate) == (100, len(full.test), 0)
    few, _ = prepare(RunConfig(test_limit=50).resolve())
    assert (len(few.train), len(few.test)) == (len(full.train), 50)
    again, _ = prepare(RunConfig(limit=100, seed=5).resolve())
    everywhere = torch.arange(100)
    assert torch.equal(small.train.x[everywhere], again.train.x[everywhere])
    noisy, record = prepare(RunConfig(limit=100, noise="symmetric:rate=0.4").resolve())
    assert torch.equal(noisy.train.x[everywhere], small.train.x[everywhere])
    assert record.rate == pytest.approx(0.4, abs=0.011)
    assert len(prepare(RunConfig(limit=10_000).resolve())[0].train) == len(full.train)


@pytest.mark.parametrize(("rule", "released"), [("random", False), ("released", True)])
def test_the_held_out_part(tmp_path, monkeypatch, rule, released):
    seen = {}

    def fit(*args: Any, **more: Any) -> None:
        seen.update(more)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "fit", fit)
    with pytest.raises(KeyboardInterrupt):
        train(in_folder(tmp_path, "a", val=0.1, val_rule=rule))
    assert seen["augment_held_out"] is released
    assert torch.equal(seen["held_out"], torch.arange(180, 200)) is released
    assert sorted(torch.cat([seen["index"], seen["held_out"]]).tolist()) == list(range(200))


def test_per_example_file(tmp_path):
    result = train(in_folder(tmp_path, "a", per_example=True))
    file = np.load(result.folder / "examples.npz")
    assert sorted(file) == [
        "clean_label",
        "first_learnt",
        "label",
        "loss",
        "margin",
        "mean_margin",
        "other",
        "prediction",
    ]
    wrong = file["label"] != file["clean_label"]
    assert all(len(file[name]) == 200 for name in file)
    assert 100 * (file["prediction"] == file["label"])[wrong].mean() == pytest.approx(result.memorised)
    assert set(file["first_learnt"].tolist()) <= {-1, 0, 1, 2, 3}
    assert np.array_equal(file["margin"] > 0, file["prediction"] == file["label"])


def test_validation_file(tmp_path):
    result = train(in_folder(tmp_path, "a", val=0.25))
    file = np.load(result.folder / "validation.npz")
    assert sorted(file) == ["clean_label", "index", "label", "prediction"]
    assert len(set(file["index"].tolist())) == 50
    assert 100 * (file["prediction"] == file["label"]).mean() == pytest.approx(result.rows[-1]["val_accuracy"])
    assert all(np.array_equal(values, file[name]) for name, values in result.validation.items())
    every = np.load(train(in_folder(tmp_path, "b", val=0.25, per_example=True)).folder / "examples.npz")
    for name in ("clean_label", "label", "prediction"):
        assert np.array_equal(every[name][file["index"]], file[name])


def test_measure_every(tmp_path):
    measured = [row["memorised"] is not None for row in train(in_folder(tmp_path, "a", measure_every=3)).rows]
    assert measured == [False, False, True, True]


def test_webvision_from_jpegs_reports_best_and_last(tmp_path):
    from PIL import Image

    rng = np.random.default_rng(0)
    info = tmp_path / "webvision" / "info"
    info.mkdir(parents=True)
    wnids = [f"n{i:08d}" for i in range(50)]
    (info / "synsets.txt").write_text("".join(f"{wnid} class {i}\n" for i, wnid in enumerate(wnids)), encoding="utf-8")
    (info / "train_filelist_google.txt").write_text(
        "".join(f"google/q/{i}.jpg {i}\n" for i in range(50)), encoding="utf-8"
    )
    for i, wnid in enumerate(wnids):
        for file in (
            tmp_path / "webvision" / "google" / "q" / f"{i}.jpg",
            tmp_path / "ilsvrc12" / "val" / wnid / "0.JPEG",
        ):
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(file, "JPEG")
    config = RunConfig(
        data="webvision:size=32",
        root=str(tmp_path),
        clip="norm:temp=1.2",
        epochs=1,
        batch_size=25,
        runs=str(tmp_path),
    )
    result = train(config)
    assert (result.config["model"], result.config["augment"]) == ("resnet:stem=cifar", "crop:size=28")
    assert result.config["nesterov"] is True
    small = replace(config, model="cnn", epochs=3)
    result = train(small)
    accuracies = [row["test_accuracy"] for row in result.rows]
    assert result.best_accuracy == max(accuracies)
    assert result.last10_accuracy == pytest.approx(sum(accuracies) / 3)
    again = train(replace(small, runs=str(tmp_path / "again"), workers=2))  # decoding in workers changes nothing
    assert metrics(again) == metrics(result)


PLUGIN = """
import torch
from torch import nn
from logitclip.losses import loss
from logitclip.models import MODELS

@loss
def half_{name}(log_p, _, *, factor: float = 0.5):
    "Half the cross entropy."
    return -factor * log_p

@MODELS.register
def linear_{name}(num_classes: int, *, in_features: int):
    "One layer."
    return nn.Sequential(nn.Flatten(), nn.Linear(in_features, num_classes))
"""


def test_own_losses_and_models_come_in_by_plugin(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(PLUGIN.format(name="own"), encoding="utf-8")
    own = in_folder(tmp_path, "a", plugin=(str(file),), model="linear_own", momentum=0.0, schedule="constant")
    half = train(replace(own, loss="half_own", lr=0.1))
    plain = train(replace(own, loss="ce", lr=0.05))
    assert [row["test_accuracy"] for row in half.rows] == pytest.approx(
        [row["test_accuracy"] for row in plain.rows], abs=1
    )
    assert half.rows[-1]["loss"] == pytest.approx(plain.rows[-1]["loss"] / 2, rel=1e-3)
    assert train(replace(own, loss="half_own:factor=1", lr=0.05)).rows[-1]["loss"] == pytest.approx(
        plain.rows[-1]["loss"]
    )


@pytest.mark.slow
def test_tensorboard(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = in_folder(tmp_path, "a", tensorboard=True)
    with pytest.raises(KeyboardInterrupt):
        train(config, on_epoch=interrupt_after(1))
    result = train(config)
    events = EventAccumulator(str(result.folder / "tensorboard")).Reload()
    for name in ("test_accuracy", "loss", "memorised", "lr"):
        shown = [(event.step, event.value) for event in events.Scalars(name)]
        assert shown == [(row["epoch"], pytest.approx(row[name], rel=1e-5)) for row in result.rows]


# -- interruptions -----------------------------------------------------------------------------------------------------


def interrupt_after(epoch: int) -> Any:
    def on_epoch(_: RunConfig, row: dict[str, Any] | None) -> None:
        if row is not None and row["epoch"] == epoch:
            raise KeyboardInterrupt

    return on_epoch


VARIED = {
    "cores, dropout, cosine, held out": {
        "loss": "cores",
        "clip": "norm:temp=1.5",
        "model": "mlp:width=16,depth=2,dropout=0.4",
        "schedule": "cosine",
        "val": 0.2,
        "per_example": True,
    },
    "wrn, augmentation, nesterov": {
        "limit": 64,
        "model": "wrn:depth=10,width=1,dropout=0.3",
        "augment": "flip_crop:padding=1",
        "nesterov": True,
        "weight_decay": 5e-4,
        "drop_last": True,
        "val": 0.2,
        "val_rule": "released",
        "batch_size": 16,
    },
    "bf16, penalty, clipped gradient": {
        "precision": "bf16-mixed",
        "penalty": "norm:weight=0.1",
        "grad_clip": 0.5,
        "clip": "norm:tau=1,delta=0.5",
        "noise": "asymmetric:rate=0.4",
    },
    "float64, two threads": {"precision": "64", "threads": 2, "loss": "gce", "clip": "value:limit=2"},
}


@pytest.mark.parametrize("saved_at", ["every epoch", "the interrupt"])
@pytest.mark.parametrize("change", VARIED.values(), ids=VARIED)
def test_an_interrupted_run_ends_with_the_same_bytes(tmp_path, monkeypatch, change, saved_at):
    seconds = 0 if saved_at == "every epoch" else 1000
    whole = train(in_folder(tmp_path, "whole", **change))
    config = in_folder(tmp_path, "parts", **change, checkpoint_seconds=seconds)
    step, calls = Standard.train_step, []

    def interrupted(self: Any, *args: Any) -> Any:
        calls.append(1)
        if len(calls) in (2, 2 * steps, 3 * steps + 1):  # in the first epoch; at the end of one; and in the middle
            raise KeyboardInterrupt
        return step(self, *args)

    trained_on, size = round((1 - config.val) * config.limit), change.get("batch_size", 32)
    steps = trained_on // size if change.get("drop_last") else -(-trained_on // size)
    monkeypatch.setattr(Standard, "train_step", interrupted)
    interruptions = 0
    while True:
        try:
            parts = train(config)
            break
        except KeyboardInterrupt:
            interruptions += 1
    assert interruptions == 3
    with pytest.raises(KeyboardInterrupt):  # and right after an epoch
        train(replace(config, runs=str(tmp_path / "third")), on_epoch=interrupt_after(2))
    resumed = []
    third = train(replace(config, runs=str(tmp_path / "third")), on_epoch=lambda _, row: resumed.append(row))
    assert resumed == whole.rows[2:]  # not one epoch was done twice
    for other in (parts, third):
        assert metrics(other) == metrics(whole)
        assert weights(other) == weights(whole)
        assert lasting(other) == lasting(whole)
        for name in ["examples.npz"] * config.per_example + ["validation.npz"] * bool(config.val):
            one, two = (np.load(r.folder / name) for r in (whole, other))
            assert all(np.array_equal(one[name], two[name]) for name in one)


def interrupt_save(monkeypatch: pytest.MonkeyPatch, number: int) -> list[str]:
    """Let a signal come during the save with this number; return the list to which written names are added."""
    write, calls = files.write_synced, []

    def interrupted(path: Path, content: bytes) -> None:
        calls.append(path.name)
        if calls.count("state.pt") == number and path.name == "state.pt":
            raise KeyboardInterrupt
        write(path, content)

    monkeypatch.setattr(files, "write_synced", interrupted)
    return calls


def test_an_interrupt_inside_the_save_saves_again(tmp_path, monkeypatch):
    whole = train(in_folder(tmp_path, "whole"))
    config = in_folder(tmp_path, "parts")
    interrupt_save(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        train(config)
    assert [p.name for p in sorted((tmp_path / "parts" / config.id / "checkpoints").iterdir())] == ["000001", "000002"]
    parts = train(config)
    assert metrics(parts) == metrics(whole)


def test_after_an_error_the_last_whole_epoch_is_saved(tmp_path, monkeypatch):
    whole = train(in_folder(tmp_path, "whole"))
    config = in_folder(tmp_path, "parts", checkpoint_seconds=1000)
    step, calls = Standard.train_step, []

    def failing(self: Any, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 20:  # of 7 in an epoch
            raise MemoryError
        return step(self, *args)

    monkeypatch.setattr(Standard, "train_step", failing)
    with pytest.raises(MemoryError):
        train(config)
    resumed: list[Any] = []
    parts = train(config, on_epoch=lambda _, row: resumed.append(row))
    assert resumed == whole.rows[1:]
    assert metrics(parts) == metrics(whole)


def test_a_signal_while_saving_does_not_prevent_it(tmp_path, monkeypatch):
    config = in_folder(tmp_path, "a", checkpoint_seconds=1000)
    calls = interrupt_save(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        train(config, on_epoch=interrupt_after(1))
    assert calls.count("state.pt") == 2
    assert checkpoints.load_checkpoint(tmp_path / "a" / config.id, config.id) is not None


def test_a_damaged_checkpoint_costs_an_epoch_and_no_bit(tmp_path, caplog):
    whole = train(in_folder(tmp_path, "whole"))
    config = in_folder(tmp_path, "parts")
    with pytest.raises(KeyboardInterrupt):
        train(config, on_epoch=interrupt_after(2))
    last = tmp_path / "parts" / config.id / "checkpoints" / "000003"
    content = bytearray((last / "weights.safetensors").read_bytes())
    content[-5] ^= 1
    (last / "weights.safetensors").write_bytes(content)
    resumed: list[Any] = []
    parts = train(config, on_epoch=lambda _, row: resumed.append(row))
    assert resumed == whole.rows[1:]
    assert f"{last}: it is damaged (weights.safetensors has been changed)" in caplog.text
    assert metrics(parts) == metrics(whole)
    assert weights(parts) == weights(whole)


def test_the_checkpoint_of_another_run_is_not_taken(tmp_path, caplog):
    other = in_folder(tmp_path, "a", seed=9)
    with pytest.raises(KeyboardInterrupt):
        train(other, on_epoch=interrupt_after(2))
    config = in_folder(tmp_path, "a")
    (tmp_path / "a" / config.id).mkdir()
    (tmp_path / "a" / other.id / "checkpoints").rename(tmp_path / "a" / config.id / "checkpoints")
    result = train(config)
    assert "000003: it belongs to another run" in caplog.text
    assert metrics(result) == metrics(train(in_folder(tmp_path, "whole")))


def test_an_interrupt_at_the_end_leaves_either_a_checkpoint_or_all_of_the_result(tmp_path):
    """After the result the checkpoints go, and the run comes into the index, also if Ctrl-C comes there."""
    config = replace(SMALL, limit=64, epochs=1, per_example=True, val=0.2, checkpoint_seconds=1000)
    whole = train(replace(config, runs=str(tmp_path)))
    expected = {path.name for path in whole.folder.iterdir()}
    states = []
    modules = training, results, checkpoints, files

    def trained(place: Path) -> None:
        train(replace(config, runs=str(place)))

    for place in interrupted_at_every_line(trained, tmp_path, *modules, begin="summarise", step=19):
        folder, index = place / whole.id, place / "index.csv"
        states.append((folder / "result.json").exists())
        if states[-1]:
            assert {path.name for path in folder.iterdir()} == expected
            assert [line.partition(",")[0] for line in index.read_text("utf-8").splitlines()] == ["id", whole.id]
        else:
            assert checkpoints.load_checkpoint(folder, whole.id) is not None
            assert not (folder / "claim").exists()
    assert states == sorted(states)
    assert {*states} == {False, True}


@pytest.mark.parametrize("second", [KeyboardInterrupt, SystemExit])  # the command line raises SystemExit on SIGTERM
def test_a_second_signal_while_a_run_is_saved_does_not_lose_its_epochs(tmp_path, monkeypatch, second):
    config = in_folder(tmp_path, "a", checkpoint_seconds=1000)
    save, signals = checkpoints.save_checkpoint, [second]

    def interrupted(*args: object) -> None:
        if signals:
            raise signals.pop()
        save(*args)  # type: ignore[arg-type]

    def stop(_: RunConfig, row: dict[str, Any] | None) -> None:
        if row is not None and row["epoch"] == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints, "save_checkpoint", interrupted)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        train(config, on_epoch=stop)
    found = checkpoints.load_checkpoint(tmp_path / "a" / config.id, config.id)
    assert found is not None
    assert len(found[2]) == 2


def slow_down_writes() -> None:
    sync = os.fsync

    def slow(fd: int) -> None:
        time.sleep(0.01)
        sync(fd)

    os.fsync = slow


def test_killed_at_random_moments_it_ends_with_the_same_bytes(tmp_path):
    config = in_folder(tmp_path, "killed", epochs=40, per_example=True)
    whole = train(replace(config, runs=str(tmp_path / "whole")))
    chance = random.Random(0)
    folder = tmp_path / "killed" / config.id
    kills = inside = 0
    for _ in range(60):
        pid = os.fork()
        if not pid:
            slow_down_writes()  # so that some kills interrupt one
            code = 1
            try:
                train(config)
                code = 0
            finally:
                os._exit(code)
        done = (0, 0)
        deadline = time.monotonic() + (chance.uniform(0.1, 0.5) if kills < 6 else 120)
        while time.monotonic() < deadline and not (done := os.waitpid(pid, os.WNOHANG))[0]:
            time.sleep(0.005)
        if done[0]:
            assert os.waitstatus_to_exitcode(done[1]) == 0
            break
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        kills += 1
        inside += bool(list(folder.rglob(f"{files.SCRATCH}*")))
    killed = train(config)
    assert kills >= 2
    assert metrics(killed) == metrics(whole)
    assert weights(killed) == weights(whole)
    assert (folder / "examples.npz").exists()
    assert not list(folder.rglob(f"{files.SCRATCH}*"))


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_a_full_disk_stops_the_run_and_costs_nothing(tmp_path, monkeypatch):
    whole = train(in_folder(tmp_path, "whole"))
    config = in_folder(tmp_path, "full")
    write, count = files.write_synced, 0

    def full(path: Path, content: bytes) -> None:
        nonlocal count
        count += 1
        if count == 10:  # inside the second checkpoint
            path.write_bytes(content[: len(content) // 2])
            raise OSError(28, "No space left on device")
        write(path, content)

    monkeypatch.setattr(files, "write_synced", full)
    with pytest.raises(files.CannotWrite, match=r"^Cannot write .*000002: No space left on device\."):
        train(config)
    folder = tmp_path / "full" / config.id
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    checkpoint = ["manifest.json", "rows.jsonl", "state.pt", "weights.safetensors"]
    assert names == [
        ".claim.lock",
        *(f"checkpoints/000001/{name}" for name in checkpoint),
        "config.json",
        "metrics.jsonl",
        "noise.json",
    ]
    assert metrics(train(config)) == metrics(whole)


def test_a_folder_that_cannot_be_written_is_one_sentence_and_nothing_is_done(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setattr(engine, "fit", None)
    with pytest.raises(files.CannotWrite, match=r"Cannot write .*file/.*: Not a directory\."):
        train(replace(SMALL, runs=str(tmp_path / "file")))


def test_divergence_leaves_no_result_and_no_nan(tmp_path):
    config = in_folder(tmp_path, "a", lr=1e6, epochs=20, schedule="constant")
    for _ in range(2):  # also when it is tried again
        with pytest.raises(engine.Diverged, match=r"diverged in epoch \d+"):
            train(config)
    folder = tmp_path / "a" / config.id
    assert not (folder / "result.json").exists()
    assert "NaN" not in (folder / "metrics.jsonl").read_text(encoding="utf-8")
    assert all(math.isfinite(row["loss"]) for row in read_rows(folder / "metrics.jsonl"))


@pytest.mark.parametrize(
    "change", [{"loss": "gce"}, {"clip": "norm:tau=1"}, {"clip": "value:limit=1"}, {"loss": "mae"}]
)
def test_a_bounded_loss_diverges_too(tmp_path, change):
    """The loss stays finite while the logits or their norms do not."""
    with pytest.raises(engine.Diverged, match=r"diverged in epoch \d+"):
        train(in_folder(tmp_path, "a", lr=1e15, epochs=8, schedule="constant", **change))


@pytest.mark.parametrize("model", ["mlp:width=100000000000", "mlp:width=10000000000000000"])
def test_out_of_memory_names_the_options_to_lower(tmp_path, model):
    with pytest.raises(
        MemoryError, match=rf"Lower batch_size \(it is 32\), .* \(it is {model}\), .* limit\.$"
    ) as caught:
        train(in_folder(tmp_path, "a", model=model))
    assert isinstance(caught.value, ValueError)  # one sentence on the command line


def test_other_errors_with_numel_are_not_about_memory(tmp_path, monkeypatch):
    def empty_maximum(*args, **kwargs):
        torch.empty(0).max()

    monkeypatch.setattr(engine, "fit", empty_maximum)
    with pytest.raises(RuntimeError, match="numel"):
        train(in_folder(tmp_path, "a"))


def test_a_dataset_without_test_examples_is_refused(tmp_path, monkeypatch):
    digits = data.load("digits")
    empty = replace(digits, test=digits.test.select(torch.arange(0)))
    monkeypatch.setattr(data, "load", lambda *args, **kwargs: empty)
    monkeypatch.setattr(training, "_prepared", {})  # another test may have loaded them
    with pytest.raises(ValueError, match="digits has no test examples, and a run is judged by them"):
        train(in_folder(tmp_path, "a"))


def test_a_limit_takes_its_part_of_a_file(tmp_path):
    """A file of labels or of votes has an entry for each example of the whole training set."""
    labels = data.load("digits").train.labels
    noisy = torch.where(torch.arange(len(labels)) % 3 == 0, (labels + 1) % 10, labels)
    np.savetxt(tmp_path / "noisy.csv", noisy.numpy(), fmt="%d")
    np.save(tmp_path / "votes.npy", torch.nn.functional.one_hot(noisy, 10).numpy())
    plain, _ = prepare(RunConfig(limit=100).resolve())
    for spec in (f"file:path={tmp_path / 'noisy.csv'}", f"votes:counts={tmp_path / 'votes.npy'}"):
        few, record = prepare(RunConfig(limit=100, noise=spec).resolve())
        everywhere = torch.arange(100)
        assert torch.equal(few.train.x[everywhere], plain.train.x[everywhere])
        given = few.train.labels.argmax(1) if few.train.labels.ndim > 1 else few.train.labels
        wrong = given != plain.train.labels
        assert torch.equal(given[wrong], (plain.train.labels[wrong] + 1) % 10)
        assert 0.2 < record.rate < 0.45
        assert record.rate == pytest.approx(float(wrong.float().mean()))


def test_too_much_padding_is_refused(tmp_path):
    with pytest.raises(ValueError, match="padding must be between 0 and 8 for 8x8 images, got 1000000"):
        train(in_folder(tmp_path, "a", augment="flip_crop:padding=1000000"))


def test_limit_also_cuts_human_labels(tmp_path):
    file = tmp_path / "human_plugin.py"
    file.write_text(
        "import dataclasses\nfrom logitclip.data import DATASETS, load\n"
        "@DATASETS.register\ndef human_digits(root=None):\n    data = load('digits')\n"
        "    return dataclasses.replace(data, label_sets={'worst': (data.train.labels + 1) % 10})\n",
        encoding="utf-8",
    )
    config = RunConfig(data="human_digits", plugin=(str(file),), limit=100, noise="real:set=worst", runs=str(tmp_path))
    dataset, record = prepare(replace(config, model="mlp", epochs=1, batch_size=32, lr=0.1).resolve())
    assert len(dataset.label_sets["worst"]) == len(dataset.train) == 100
    assert record.labels.tolist() == ((record.clean_labels + 1) % 10).tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clip": "norm:tau=-1"}, "tau must be positive and finite, got -1.0."),
        ({"loss": "gce:q=-1"}, "q "),
        ({"lr": -0.1}, "lr must be positive and finite in float32, got -0.1."),
        ({"lr": 1e300}, "lr must be positive and finite in float32, got 1e+300."),
        ({"weight_decay": 1e300}, "weight_decay must be at least 0 and finite in float32, got 1e+300."),
        ({"devices": 1000, "accelerator": "cpu"}, "devices must be at most "),
        ({"penalty": "norm"}, "The penalty 'norm' needs 'weight'"),
        ({"precision": "16-mixed", "accelerator": "cpu"}, "The precision 16-mixed needs a GPU"),
        ({"nodes": 2}, "Several nodes need torchrun on each"),
    ],
)
def test_what_is_out_of_range_is_refused_before_anything_is_written(tmp_path, change, message):
    with pytest.raises(ValueError) as caught:
        train(in_folder(tmp_path, "a", **change))
    assert str(caught.value).startswith(message)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"balance": True, "method": "sop"}, "SOP has its own objective"),
        ({"model": "mlp:depth=100000000"}, "depth must be at most 1,000, got 100,000,000."),
        ({"model": "mlp:width=100000000000", "tensorboard": True}, "Training ran out of memory."),
        ({"augment": "flip_crop:padding=1000000"}, "padding must be between 0 and 8"),
    ],
)
def test_a_run_that_is_refused_late_leaves_no_folder(tmp_path, change, message):
    config = in_folder(tmp_path, "a", **change)
    with pytest.raises((ValueError, MemoryError), match=re.escape(message)):
        train(config)
    assert not (tmp_path / "a" / config.id).exists()
    found = attempt(config, tmp_path / "a" / config.id, None)  # in a study it is a failure, to list and to remove
    assert isinstance(found, Failure)
    run = listing.read_run(tmp_path / "a" / config.id)
    assert (run.status, run.config) == ("failed", config.resolve())
    assert listing.remove(run) > 0


def test_a_network_that_is_not_known_here_is_no_damage(tmp_path):
    config = in_folder(tmp_path, "a", epochs=1)
    result = train(config)
    other = replace(result, config={**result.config, "model": "mynet"})
    with pytest.raises(ValueError, match=r"^Unknown model 'mynet'"):
        rebuild_network(other, data.load(str(result.config["data"])))


def test_a_run_that_lost_its_claim_stops_before_it_writes(tmp_path):
    config = in_folder(tmp_path, "a")
    folder = tmp_path / "a" / config.id

    def steal(_: RunConfig, row: dict[str, Any] | None) -> None:
        if row is not None and row["epoch"] == 1:
            (folder / "claim").write_text('{"key": "other", "pid": 1, "host": "elsewhere"}', encoding="utf-8")

    with pytest.raises(claims.Claimed, match="no longer claimed by this process but by process 1 on elsewhere"):
        train(config, on_epoch=steal)
    assert len(read_rows(folder / "metrics.jsonl")) == 2


def test_the_same_run_twice_at_once(tmp_path):
    config = in_folder(tmp_path, "a")

    def again(_: RunConfig, row: dict[str, Any] | None) -> None:
        if row is None:
            with pytest.raises(claims.Claimed, match=f"trained by process {os.getpid()}"):
                train(config)

    assert metrics(train(config, on_epoch=again)) == metrics(train(in_folder(tmp_path, "b")))


def test_what_torchrun_started_is_what_counts(monkeypatch):
    assert _with_devices_of_torchrun(SMALL) is SMALL
    for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    for config in (SMALL, replace(SMALL, devices=4), replace(SMALL, devices=2, nodes=2)):
        assert (_with_devices_of_torchrun(config).devices, _with_devices_of_torchrun(config).nodes) == (2, 2)
    with pytest.raises(ValueError, match="torchrun started 4 processes, but devices and nodes ask for 3"):
        _with_devices_of_torchrun(replace(SMALL, devices=3))
