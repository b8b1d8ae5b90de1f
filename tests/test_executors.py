"""Executors: every run finishes exactly once, whatever fails, dies or runs elsewhere."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from disk import read_rows
from events import Log

from logitclip import files
from logitclip.runs import checkpoints, claims
from logitclip.runs.config import RunConfig
from logitclip.runs.results import Failure, Result, find_outcome
from logitclip.runs.train import train
from logitclip.studies import executors, on_ray, queue
from logitclip.studies.executors import execute
from logitclip.studies.queue import Room

SMALL = RunConfig(
    noise="symmetric:rate=0.5", limit=64, model="mlp:width=8,depth=1", epochs=2, batch_size=32, checkpoint_seconds=0
)


def configs(folder: Path, seeds: int, **change: Any) -> list[RunConfig]:
    return [replace(SMALL, runs=str(folder), seed=seed, **change) for seed in range(seeds)]


def failing(folder: Path) -> RunConfig:
    return replace(SMALL, runs=str(folder), batch_size=1000, drop_last=True)


def diverging(folder: Path) -> RunConfig:
    return replace(SMALL, runs=str(folder), lr=1e30)


def metrics(config: RunConfig) -> bytes:
    return (Path(config.runs) / config.id / "metrics.jsonl").read_bytes()


def owner(config: RunConfig) -> int:
    """Return the process that trains a run."""
    return json.loads((Path(config.runs) / config.id / "claim").read_text(encoding="utf-8"))["pid"]


# -- in this process ---------------------------------------------------------------------------------------------------


def test_a_failure_is_recorded_and_the_others_go_on(tmp_path):
    one, two = configs(tmp_path, 2)
    bad, log = failing(tmp_path), Log()
    execute([one, bad, two], executor="inline", listener=log)
    assert isinstance(find_outcome(one), Result)
    assert isinstance(find_outcome(two), Result)
    failure = find_outcome(bad)
    assert isinstance(failure, Failure)
    assert failure.error.startswith("ValueError: 64 examples make no batch of 1000")
    assert "Traceback" in failure.traceback
    assert "loading.py" in failure.traceback
    assert (failure.id, failure.attempts, failure.final) == (bad.id, 1, False)
    assert json.loads((tmp_path / bad.id / "failure.json").read_text(encoding="utf-8"))["error"] == failure.error
    assert log.kinds(one) == log.kinds(two) == ["queued", "start", "epoch", "epoch", "done"]
    assert log.kinds(bad)[-1] == "failed"
    assert [detail for kind, _, detail in log if kind == "failed"] == [failure]
    rows = [detail for kind, of, detail in log if kind == "epoch" and of == one]
    assert rows == train(one).rows


def test_the_recorded_error_is_one_sentence(tmp_path, monkeypatch):
    (config,) = configs(tmp_path, 1)
    for error, sentence in (
        (RuntimeError("two sizes differ\nat this place"), "RuntimeError: two sizes differ."),
        (KeyError(), "KeyError."),
    ):
        monkeypatch.setattr(queue, "train", lambda *_, error=error, **__: (_ for _ in ()).throw(error))
        failure = queue.attempt(config, tmp_path / config.id, None)
        assert isinstance(failure, Failure)
        assert failure.error == sentence


def test_what_diverged_is_not_repeated_and_what_failed_otherwise_is(tmp_path, monkeypatch):
    bad, wrong = failing(tmp_path), diverging(tmp_path)
    execute([bad, wrong], executor="inline")
    final = find_outcome(wrong)
    assert isinstance(final, Failure)
    assert final.final
    assert final.error.startswith("Diverged: Training diverged in epoch 1:")
    log = Log()
    execute([bad, wrong], executor="inline", listener=log)
    assert log.kinds(wrong) == ["skipped"]
    assert log.kinds(bad)[-1] == "failed"
    assert find_outcome(wrong) == final
    again = find_outcome(bad)
    assert isinstance(again, Failure)
    assert again.attempts == 2
    good = train(configs(tmp_path, 1)[0])
    monkeypatch.setattr(queue, "train", lambda config, **_: good)  # the cause has passed
    execute([bad], executor="inline")
    assert not (tmp_path / bad.id / "failure.json").exists()


def test_a_result_wins_over_an_old_failure(tmp_path):
    (config,) = configs(tmp_path, 1)
    execute([config], executor="inline")
    old = Failure(config.id, "it failed once", "", 1, True)
    files.write_json(tmp_path / config.id / "failure.json", vars(old))
    assert isinstance(find_outcome(config), Result)
    (tmp_path / config.id / "result.json").unlink()
    assert find_outcome(config) == old
    (tmp_path / config.id / "failure.json").write_text('{"id": "of another version"}', encoding="utf-8")
    assert find_outcome(config) is None


def test_a_disk_that_takes_no_record_harms_nobody(tmp_path, monkeypatch, caplog):
    def full(path: Path, content: Any) -> None:
        raise files.CannotWrite("Cannot write: the disk is full.")

    monkeypatch.setattr(files, "write_json", full)
    log = Log()
    execute([failing(tmp_path), *configs(tmp_path, 1)], executor="inline", listener=log)
    assert len(log.of("failed")) == 2
    assert "the disk is full" in caplog.text


def test_one_id_is_one_run_and_what_is_there_is_skipped(tmp_path):
    one, two = configs(tmp_path, 2)
    result, log = train(one), Log()
    execute([one, two, replace(two, loss="ce:", threads=1), two], executor="inline", listener=log)
    assert [(kind, of, detail) for kind, of, detail in log if of == one] == [("skipped", one, result)]
    assert (len(log.of("start")), len(log.of("done"))) == (1, 1)


def test_what_follows_from_an_outcome_runs_next(tmp_path):
    first, second, third, last = configs(tmp_path, 4)
    train(third)
    # The third has a result already, and the first is known.
    follows = {first: [second], second: [third], third: [first]}
    log, asked = Log(), []

    def then(config: RunConfig, found: Result | Failure) -> list[RunConfig]:
        asked.append(config)
        assert isinstance(found, Result)
        return follows.get(config, [])

    execute([first, last], executor="inline", listener=log, then=then)
    assert [config for kind, config, _ in log if kind == "start"] == [first, second, last]
    assert asked == [first, second, third, last]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"executor": "locall"}, "Unknown executor 'locall'. Did you mean 'local'?"),
        ({"jobs": 0}, "jobs must be at least 1, got 0"),
        ({"executor": "inline", "jobs": 2}, "one job at a time: jobs must be 1, got 2"),
        ({"address": "auto"}, "An address is for the executor ray, not for local"),
    ],
)
def test_mistakes(options, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        execute([], **options)


def test_an_executor_is_one_function(command, tmp_path, monkeypatch):
    def lazy(queue, room):
        assert (len(queue.todo), room) == (12, Room(jobs=3))

    monkeypatch.setitem(executors.EXECUTORS, "lazy", lazy)
    words = ("sweep", "quickstart", "--scale", "smoke", "--runs", tmp_path, "--jobs", 3, "--executor")
    code, out, _ = command(*words, "lazy")
    assert code == 4  # no run has a result
    assert out.startswith("0 runs done")
    code, _, err = command(*words, "lasy")
    assert code == 2
    assert "lazy" in err


def test_a_name_that_does_not_exist_is_found_before_anything_runs(tmp_path):
    log = Log()
    with pytest.raises(ValueError, match="Did you mean"):
        execute([*configs(tmp_path, 1), replace(SMALL, loss="gcee")], executor="inline", listener=log)
    assert len(log.of("start")) == 0


def test_without_ray_a_sentence_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'logitclip\[ray\]'"):
        execute(configs(tmp_path, 1), executor="ray")


# -- worked on elsewhere -----------------------------------------------------------------------------------------------


def test_a_claimed_run_is_waited_for_while_the_others_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(queue, "POLL", 0.05)
    free, taken = configs(tmp_path, 2)
    released = threading.Event()

    def react(kind: str, config: RunConfig, detail: Any) -> None:
        if kind == "done":
            released.set()  # as if the other process had been killed

    log = Log(react)
    with claims.claim(tmp_path / taken.id):
        worker = threading.Thread(target=execute, args=([taken, free],), kwargs={"executor": "inline", "listener": log})
        worker.start()
        assert released.wait(400)
        time.sleep(0.3)  # several polls
        assert log.kinds(taken) == ["queued", "elsewhere"]
    worker.join()
    assert log.kinds(taken) == ["queued", "elsewhere", "start", "epoch", "epoch", "done"]


@pytest.mark.parametrize("content", ["result.json", "failure.json"])
def test_what_comes_out_elsewhere_is_taken_as_it_is(tmp_path, monkeypatch, content):
    monkeypatch.setattr(queue, "POLL", 0.05)
    (config,) = configs(tmp_path, 1)
    if content == "result.json":
        found = train(config)
        (found.folder / content).rename(found.folder / "kept")
    else:
        old = Failure(config.id, "it failed once", "", 1, False)
        files.write_json(tmp_path / config.id / "failure.json", vars(old))
        files.write_json(tmp_path / config.id / "kept", {**vars(old), "attempts": 2})

    def react(kind: str, config: RunConfig, detail: Any) -> None:
        if kind == "elsewhere":
            (tmp_path / config.id / "kept").rename(tmp_path / config.id / content)

    log = Log(react)
    with claims.claim(tmp_path / config.id):
        execute([config], executor="inline", listener=log)
    assert log.kinds(config) == ["queued", "elsewhere", "done" if content == "result.json" else "failed"]


# -- the pool ----------------------------------------------------------------------------------------------------------


def test_the_pool_gives_the_same_numbers_and_harms_nobody(tmp_path):
    log, bad, wrong = Log(), failing(tmp_path / "pool"), diverging(tmp_path / "pool")
    there = configs(tmp_path / "pool", 3)
    execute([bad, there[0], wrong, *there], jobs=2, listener=log)
    here = configs(tmp_path / "here", 3)
    execute(here, executor="inline")
    assert [metrics(config) for config in there] == [metrics(config) for config in here]
    for config in there:
        assert log.kinds(config) == ["queued", "start", "epoch", "epoch", "done"]
    assert Counter(kind for kind, _, _ in log)["failed"] == 2
    failures = [find_outcome(bad), find_outcome(wrong)]
    assert [isinstance(failure, Failure) and failure.final for failure in failures] == [False, True]
    assert all(isinstance(failure, Failure) and "Traceback" in failure.traceback for failure in failures)


def test_a_worker_that_dies_is_replaced_and_its_run_tried_once_more(tmp_path):
    once, always, other = configs(tmp_path, 3, epochs=200, checkpoint_seconds=1000)
    always, other = replace(always, epochs=5000), replace(other, epochs=2)

    def react(kind: str, config: RunConfig, detail: Any) -> None:
        # Rows may arrive after the process has died; then the claim has no new owner.
        if kind == "epoch":
            assert detail["epoch"] >= 0
        if config != other and kind in ("start", "epoch") and (config == always or len(killed) == 0):
            process = owner(config)
            if process not in killed:
                killed.append(process)
                os.kill(process, signal.SIGKILL)

    killed: list[int] = []
    log = Log(react)
    execute([once, always, other], jobs=1, listener=log)
    assert len(killed) == 3
    for config in (once, other):
        assert isinstance(find_outcome(config), Result)
        assert len(log.of("start")) == 3  # a retried run resumes; it does not start again
    assert [row["epoch"] for row in train(once).rows] == list(range(200))
    failure = find_outcome(always)
    assert isinstance(failure, Failure)
    assert (failure.attempts, failure.final) == (2, False)
    assert "died 2 times (SIGKILL). It may have run out of memory" in failure.error
    assert log.kinds(always)[-1] == "failed"


def test_an_interrupt_ends_the_workers_and_they_save(tmp_path):
    (config,) = configs(tmp_path, 1, epochs=5000, checkpoint_seconds=1000)
    process = 0

    def react(kind: str, config: RunConfig, detail: Any) -> None:
        nonlocal process
        if kind == "epoch" and detail["epoch"] >= 5:
            process = owner(config)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute([config], jobs=1, listener=Log(react))
    checkpoint = checkpoints.load_checkpoint(tmp_path / config.id, config.id)
    assert checkpoint is not None
    assert 5 < len(checkpoint[2]) < 5000
    assert find_outcome(config) is None
    assert not (tmp_path / config.id / "claim").exists()
    assert not Path(f"/proc/{process}").exists()


def test_workers_end_with_their_parent_and_save(tmp_path):
    (config,) = configs(tmp_path, 1, epochs=50_000, checkpoint_seconds=1000)
    code = f"""
from logitclip.runs.config import RunConfig
from logitclip.studies.executors import execute
from logitclip.studies.queue import Room
if __name__ == "__main__":
    execute([RunConfig(**{vars(config)!r})], jobs=1)
"""
    (tmp_path / "script.py").write_text(code, encoding="utf-8")
    parent = subprocess.Popen([sys.executable, tmp_path / "script.py"], stderr=subprocess.PIPE, text=True)
    rows, deadline = tmp_path / config.id / "metrics.jsonl", time.monotonic() + 400
    while len(read_rows(rows)) < 5:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    parent.kill()
    assert parent.communicate()[1] == ""
    while (tmp_path / config.id / "claim").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    checkpoint = checkpoints.load_checkpoint(tmp_path / config.id, config.id)
    assert checkpoint is not None
    assert 5 <= len(checkpoint[2]) < 50_000
    assert find_outcome(config) is None  # a worker that ends with its parent is not a failure


def test_a_worker_raises_interrupts_only_while_it_has_a_run():
    code = """
import signal, sys
from logitclip.studies import executors

def state():
    return signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, sys.unraisablehook is sys.__unraisablehook__

class Pipe:
    left = [(None, None)]
    recv = left.pop  # the second call raises IndexError
    def send(self, what):
        print(*what, *state())

executors.attempt = lambda *_: state()
try:
    executors._run_worker(Pipe())
except IndexError:
    pass
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert answer.stdout == "outcome (False, False) True True\n"


def test_a_worker_that_starts_while_its_parent_dies_says_nothing(tmp_path):
    code = """
import os
from logitclip.studies import executors
if __name__ == "__main__":
    executors._start_worker(0, [])
    os._exit(0)
"""
    (tmp_path / "script.py").write_text(code, encoding="utf-8")
    answer = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True)
    # The output of both processes: the pipes close with the worker.
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "", "")


@pytest.mark.slow
def test_runs_of_several_processes_in_the_pool(tmp_path):
    (config,) = configs(tmp_path, 1, devices=2, accelerator="cpu")
    for folder, executor in (("inline", "inline"), ("pool", "local")):
        log, there = Log(), replace(config, runs=str(tmp_path / folder))
        execute([there], executor=executor, jobs=1, listener=log)
        epochs = ["epoch", "epoch"] if folder == "pool" else []  # inline runs do not report epochs
        assert log.kinds(there) == ["queued", "start", *epochs, "done"], log.events[-1]


def test_without_signal_masks_and_affinity_runs_are_still_made(tmp_path, monkeypatch):
    """As on Windows and macOS."""
    monkeypatch.setattr("multiprocessing.resource_tracker._HAVE_SIGMASK", False)  # set at import time
    monkeypatch.delattr(signal, "pthread_sigmask")
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.setattr(executors.torch.accelerator, "is_available", lambda: False)
    assert executors._count_slots([SMALL], 1) == 6
    (config,) = configs(tmp_path, 1)
    log = Log()
    execute([config], executor="local", jobs=1, listener=log)
    assert log.kinds(config)[-1] == "done"


def test_how_many_runs_there_is_room_for(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(executors.torch.accelerator, "is_available", lambda: False)
    assert executors._count_slots([SMALL], 1) == 8
    assert executors._count_slots([SMALL, replace(SMALL, threads=3)], 1) == 2
    assert executors._count_slots([replace(SMALL, devices=2, threads=2)], 1) == 2
    assert executors._count_slots([replace(SMALL, threads=16)], 1) == 1
    monkeypatch.setattr(executors.torch.accelerator, "is_available", lambda: True)
    assert executors._count_slots([SMALL], 1) == 1
    assert executors._count_slots([SMALL], 3) == 3
    assert executors._count_slots([replace(SMALL, accelerator="cpu")], 1) == 8


@pytest.fixture
def four_gpus(monkeypatch):
    """A machine with four CUDA devices, as far as the parent of the workers can see."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(executors.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(executors.torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(executors.torch.accelerator, "is_available", lambda: True)


@pytest.mark.usefixtures("four_gpus")
def test_runs_are_spread_over_the_devices(monkeypatch):
    def devices(config, per_device=1, jobs=None):
        gpus = executors._visible_gpus([config])
        slots = jobs or executors._count_slots([config], per_device)
        return [",".join(executors._gpus_of_slot(slot, gpus, config.devices)) for slot in range(slots)]

    assert devices(SMALL) == ["0", "1", "2", "3"]
    assert devices(SMALL, 2) == ["0", "1", "2", "3", "0", "1", "2", "3"]
    assert devices(SMALL, jobs=5) == ["0", "1", "2", "3", "0"]
    assert devices(replace(SMALL, devices=2)) == ["0,1", "2,3"]
    assert devices(replace(SMALL, devices=3)) == ["0,1,2"]
    assert executors._visible_gpus([replace(SMALL, accelerator="cpu")]) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-ab, 7")
    monkeypatch.setattr(executors.torch.cuda, "device_count", lambda: 2)
    assert devices(SMALL) == ["GPU-ab", "7"]


@pytest.mark.usefixtures("four_gpus")
def test_each_worker_sees_its_own_device(tmp_path, monkeypatch):
    """The workers themselves have no CUDA here: they train on the CPU, and a plugin writes down what they see."""
    plugin = tmp_path / "plugin.py"
    plugin.write_text(
        "import os, pathlib\n"
        f"file = pathlib.Path({str(tmp_path)!r}, f'{{os.getpid()}}.seen')\n"
        "file.write_text(os.environ.get('CUDA_VISIBLE_DEVICES', ''))\n",
        encoding="utf-8",
    )
    execute(configs(tmp_path / "runs", 2, epochs=60, plugin=(str(plugin),)), jobs=2)
    seen = {int(file.stem): file.read_text(encoding="utf-8") for file in tmp_path.glob("*.seen")}
    assert seen.pop(os.getpid()) == ""  # this process needs the plugin for the ids
    assert sorted(seen.values()) == ["0", "1"]
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_several_runs_per_device_need_a_device_each(tmp_path):
    with pytest.raises(ValueError, match="per_device must be 1, got 2"):
        execute(configs(tmp_path, 1, devices=2), per_device=2)
    with pytest.raises(ValueError, match="per_device must be at least 1, got 0"):
        execute(configs(tmp_path, 1), per_device=0)


# -- Ray ---------------------------------------------------------------------------------------------------------------


def test_which_nodes_have_room_for_a_run():
    node = {"Alive": True, "Resources": {"CPU": 4.0, "memory": 1e9}}
    with_gpu = {"Alive": True, "Resources": {"CPU": 2.0, "GPU": 1.0}}
    gone = {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}}
    assert on_ray._has_room([node, gone], {"CPU": 4, "GPU": 0})
    assert not on_ray._has_room([node, gone], {"CPU": 5, "GPU": 0})
    assert not on_ray._has_room([node, with_gpu], {"CPU": 4, "GPU": 1})  # not both on the same
    assert on_ray._has_room([node, with_gpu], {"CPU": 2, "GPU": 1})


@pytest.mark.parametrize(
    ("change", "gpus", "per_device", "needs"),
    [
        ({}, False, 3, {"CPU": 1, "GPU": 0}),
        ({}, True, 3, {"CPU": 1, "GPU": 1 / 3}),
        ({"devices": 2, "threads": 2}, True, 1, {"CPU": 4, "GPU": 2}),
        ({"accelerator": "cpu"}, True, 2, {"CPU": 1, "GPU": 0}),
        ({"accelerator": "cuda"}, False, 2, {"CPU": 1, "GPU": 0.5}),
    ],
)
def test_what_a_run_takes_of_a_cluster(change, gpus, per_device, needs):
    assert on_ray.resources(replace(SMALL, **change), gpus=gpus, per_device=per_device) == needs


@pytest.mark.slow
def test_ray_on_this_machine(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.chdir(tmp_path)  # folders are relative to it
    log, there, here = Log(), configs(Path("ray"), 3), configs(Path("here"), 3)
    bad, wrong = failing(Path("ray")), diverging(Path("ray"))
    before = signal.getsignal(signal.SIGTERM)
    execute([bad, wrong, *there, there[0]], executor="ray", jobs=2, listener=log)
    assert signal.getsignal(signal.SIGTERM) is before
    execute(here, executor="inline")
    assert [metrics(config) for config in there] == [metrics(config) for config in here]
    for config in there:
        assert log.kinds(config)[:2] == ["queued", "start"]
        assert log.kinds(config)[-1] == "done"
    failures = [find_outcome(bad), find_outcome(wrong)]
    assert [isinstance(failure, Failure) and failure.final for failure in failures] == [False, True]
    assert len(log.of("failed")) == 2


@pytest.mark.slow
def test_ray_survives_the_loss_of_a_node(tmp_path):
    pytest.importorskip("ray")
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    node = cluster.add_node(num_cpus=1)
    there, here = (configs(tmp_path / name, 4, epochs=600, checkpoint_seconds=1) for name in ("ray", "here"))
    lost: list[Any] = []
    owners: dict[RunConfig, set[int]] = defaultdict(set)  # the processes that trained a run

    def react(kind: str, config: RunConfig, detail: Any) -> None:
        if kind == "epoch":
            now = {}
            for run in there:
                with contextlib.suppress(FileNotFoundError, ValueError):  # not claimed, or just being claimed
                    now[run] = owner(run)
            for run, process in now.items():
                owners[run].add(process)
            if len(set(now.values())) == 2 and not lost:  # one on each node, at the same time
                lost.append(node)
                cluster.remove_node(node, allow_graceful=False)

    log = Log(react)
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        execute(there, executor="ray", listener=log)
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert lost
    print("processes that worked on each run:", [len(owners[config]) for config in there])
    assert any(len(processes) == 2 for processes in owners.values())
    execute(here, executor="inline")
    for one, other in zip(there, here, strict=True):
        assert log.kinds(one)[-1] == "done"
        assert log.kinds(one).count("start") == 1
        assert metrics(one) == metrics(other)


def test_a_ray_address_that_does_not_answer_is_soon_a_sentence(tmp_path):
    pytest.importorskip("ray")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # without listening
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        before = time.monotonic()
        for form in (address, f"ray://{address}"):
            with pytest.raises(ValueError, match=f"^No Ray cluster answers at {form} "):
                execute(configs(tmp_path, 1), executor="ray", address=form)
        assert time.monotonic() - before < 20
