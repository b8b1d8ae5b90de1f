"""`logitclip train` as a command: signals, two at once, several processes, user errors."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from disk import read_rows
from processes import finished, wait_until

from logitclip import data, files, models, noise
from logitclip.cli import terminal as progress
from logitclip.runs import checkpoints, results
from logitclip.runs import train as training
from logitclip.runs.config import RunConfig
from logitclip.runs.train import train

SMALL = RunConfig(
    noise="symmetric:rate=0.5", limit=200, model="mlp:width=16,depth=2", epochs=300, batch_size=64, lr=0.02
)


def options(config: RunConfig) -> list[str]:
    """Return the command line of a config."""
    plain = RunConfig()
    changed = {k: v for k, v in vars(config).items() if v != getattr(plain, k)}
    return [text for k, v in changed.items() for text in (f"--{k.replace('_', '-')}", str(v))]


def started(config: RunConfig, *launcher: str) -> subprocess.Popen[str]:
    command = [sys.executable, *(launcher or ("-m",)), "logitclip", "train", *options(config)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def rows(config: RunConfig) -> list[dict[str, Any]]:
    return read_rows(Path(config.runs) / config.id / "metrics.jsonl")


def when_rows_are(count: int, config: RunConfig, process: subprocess.Popen[str]) -> None:
    """Wait until a process has trained `count` epochs."""
    wait_until(lambda: len(rows(config)) >= count, process)


@pytest.fixture
def typed(command) -> Any:
    """Run `logitclip train ...` in this process."""
    return lambda *arguments: command("train", *arguments)


# -- one run -----------------------------------------------------------------------------------------------------------


def test_nothing_is_computed_twice(tmp_path, typed, monkeypatch):
    """One command loads the data, resolves the config and builds the network once each.

    The criterion and the settings are made before anything is written, to report mistakes, and again for the run.
    """
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def counted(*args: Any, **more: Any) -> Any:
            counts[name] += 1
            return function(*args, **more)

        monkeypatch.setattr(owner, name, counted)

    monkeypatch.setattr(training, "_prepared", {})  # another test may have loaded the same data
    count(data, "load")
    count(RunConfig, "resolve")
    count(noise, "apply")
    count(models, "build")
    cheap = ("build_criterion", "settings_of")
    for name in ("resolved_id", "transform", "make_fabric", *cheap):
        count(training, name)
    code, *_ = typed(*options(replace(SMALL, epochs=1, clip="norm:temp=1.5", runs=str(tmp_path))))
    assert code == 0
    assert {name: counts.pop(name) for name in cheap} == dict.fromkeys(cheap, 2)
    assert set(counts.values()) == {1}, counts
    assert len(counts) == 7


def test_a_config_file_runs_no_code_that_was_not_asked_for(tmp_path, typed):
    plugin, file = tmp_path / "mine.py", tmp_path / "run.toml"
    plugin.write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n", encoding="utf-8")
    file.write_text(f'plugin = ["{plugin}"]\nepochs = 1\nlimit = 64\nruns = "{tmp_path / "runs"}"\n', encoding="utf-8")
    code, _, err = typed("--config", str(file))
    assert (code, err) == (
        2,
        f"logitclip: {file} names the plugin {plugin}, which is Python code: add --plugin {plugin} to run it.\n",
    )
    assert not (tmp_path / "executed").exists()
    assert typed("--config", str(file), "--plugin", str(plugin))[0] == 0
    assert (tmp_path / "executed").exists()


# -- signals -----------------------------------------------------------------------------------------------------------


def test_signals_and_a_second_process(tmp_path, typed):
    """Ctrl-C, SIGTERM and SIGKILL hit the same run in turn; it ends with the same files as an uninterrupted run."""
    config = replace(SMALL, epochs=900, runs=str(tmp_path / "parts"))  # long enough to be stopped on a busy machine too
    last = 0
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)):
        process = started(config if code > 0 else replace(config, checkpoint_seconds=0))
        when_rows_are(last + 10, config, process)
        if code == 130:  # meanwhile, a second process is refused
            process.send_signal(signal.SIGSTOP)  # so that it does not end meanwhile on a busy machine
            answer, out, err = typed(*options(config), "-q")
            assert (answer, out) == (2, "")
            assert err.count("\n") == 1
            assert f"is being trained by process {process.pid} on " in err
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)
        left, _, stderr = finished(process)
        assert left == code, stderr
        assert "Traceback" not in stderr
        if code > 0:  # the end of the last whole epoch was saved, though no checkpoint was due
            assert "logitclip: interrupted. Repeat the command to resume" in stderr
            found = checkpoints.load_checkpoint(Path(config.runs) / config.id, config.id)
            assert found is not None
            assert len(found[2]) - len(rows(config)) in (0, 1)  # the signal may arrive between the two
        last = len(rows(config))
        assert last < 900
    code, out, _ = typed(*options(config), "--json")
    assert code == 0
    result = json.loads(out)
    written = json.loads((Path(config.runs) / config.id / "result.json").read_text(encoding="utf-8"))
    assert result == {name: value for name, value in written.items() if name not in ("sha256", "digest")}
    whole = train(replace(config, runs=str(tmp_path / "whole")))
    assert result["last10_accuracy"] == whole.last10_accuracy
    one, other = (Path(folder) / config.id / "metrics.jsonl" for folder in (config.runs, tmp_path / "whole"))
    assert one.read_bytes() == other.read_bytes()


PAIR = replace(SMALL, devices=2, accelerator="cpu", epochs=400, model="mlp:width=16,depth=1,norm=batch")


def interrupted_pair(folder: Path) -> list[dict[str, Any]]:
    """Start two ranks, signal their parent, and return the rows they wrote."""
    config = replace(PAIR, runs=str(folder))
    process = started(config)
    when_rows_are(3, config, process)
    process.send_signal(signal.SIGINT)
    code, _, stderr = finished(process)
    assert code == 130, stderr
    assert stderr.count("logitclip: interrupted.") == 1
    for word in ("Traceback", "Warning", "Error"):
        assert word not in stderr
    return rows(config)


def test_of_several_processes_the_first_is_interrupted_and_all_stop_and_save(tmp_path):
    before = interrupted_pair(tmp_path)
    found = checkpoints.load_checkpoint(tmp_path / PAIR.id, PAIR.id)
    assert found is not None
    assert found[2][: len(before)] == before
    assert len(found[2]) - len(before) in (0, 1)
    assert not (tmp_path / PAIR.id / "claim").exists()


def test_an_interrupt_while_processes_start_prints_no_traceback(tmp_path):
    """They import torch for seconds, and the terminal sends Ctrl-C to all of them."""
    process = started(replace(PAIR, runs=str(tmp_path)))

    def starting() -> bool:
        commands = [Path(f"/proc/{entry}/cmdline") for entry in os.listdir("/proc") if entry.isdecimal()]
        with contextlib.suppress(OSError):
            return sum(_is_child(path, process.pid) for path in commands) == 2
        return False

    wait_until(starting, process)
    os.killpg(process.pid, signal.SIGINT)
    code, _, err = finished(process)
    assert code == 130
    assert "Traceback" not in err


def _is_child(command, pid) -> bool:
    """Return whether a process is one of those that multiprocessing has spawned for `pid`."""
    return b"spawn_main" in command.read_bytes() and os.getpgid(int(command.parent.name)) == pid


@pytest.mark.slow
def test_several_processes_are_resumed(tmp_path):
    before = interrupted_pair(tmp_path / "parts")
    written = []
    for name in ("parts", "whole"):
        code, _, stderr = finished(started(replace(PAIR, runs=str(tmp_path / name))))
        assert code == 0, stderr
        written.append((tmp_path / name / PAIR.id / "metrics.jsonl").read_bytes())
    assert written[0] == written[1]
    after = rows(replace(PAIR, runs=str(tmp_path / "parts")))
    assert after[: len(before)] == before
    # The accuracy that both ranks computed together is that of the saved weights.
    result = results.read_result(tmp_path / "parts" / PAIR.id)
    assert result is not None
    network = models.build(str(PAIR.model), 10, (1, 8, 8))
    network.load_state_dict(result.weights())
    test = data.load("digits").test
    with torch.no_grad():
        right = network.eval()(test.x[torch.arange(len(test))] / 255).argmax(1) == test.labels
    assert after[-1]["test_accuracy"] == pytest.approx(100 * float(right.double().mean()))


@pytest.mark.slow
def test_spawned_and_under_torchrun_the_bytes_are_the_same(tmp_path):
    config = replace(SMALL, devices=2, accelerator="cpu", epochs=30)
    torchrun = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", "-m")
    written = []
    for name, launcher in (("spawned", ()), ("torchrun", torchrun)):
        own = replace(config, runs=str(tmp_path / name))
        if launcher:
            own = replace(own, devices=1)  # torchrun sets the number
        code, out, stderr = finished(started(own, *launcher))
        assert code == 0, stderr
        assert out.count("memorised") == 1  # one of them reports
        written.append((tmp_path / name / config.id / "metrics.jsonl").read_bytes())
    assert written[0] == written[1]
    assert written[0].count(b"\n") == 30


@pytest.mark.slow
def test_what_stops_one_of_two_processes_is_one_sentence(tmp_path):
    diverging = replace(SMALL, runs=str(tmp_path), devices=2, accelerator="cpu", lr=1e20)
    code, out, stderr = finished(started(diverging))
    assert (code, out) == (3, "")
    assert stderr.count("logitclip: Training diverged in epoch") == 1
    assert "Traceback" not in stderr


# -- what is printed ---------------------------------------------------------------------------------------------------


def test_the_table_and_the_bar(tmp_path, typed):
    config = replace(SMALL, runs=str(tmp_path / "x[/]"), epochs=3, clip="norm:temp=1.5")  # not markup
    code, out, err = typed(*options(config))
    assert code == 0
    assert "x[/]" in out
    for text in ("test accuracy, mean of the last 10", "memorised", "recovered", "50.00 %", "clip norm:temp=1.5"):
        assert text in " ".join(out.split())
    assert "3/3" in err
    assert typed(*options(config))[1] == out  # read back


def test_the_bar_shows_epoch_loss_accuracy_memorised_and_time_left(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich treats it as a terminal
    bar = progress.TrainingBar()
    config = RunConfig(epochs=4).resolve()
    bar(config, None)
    (task,) = bar.progress.tasks
    assert (task.completed, task.total) == (0, 4)
    row = {"epoch": 1, "loss": 1.25, "test_accuracy": 87.5, "memorised": 12.5}
    bar(config, row)
    assert task.completed == 2
    assert task.fields["numbers"] == "loss 1.250, test accuracy 87.5 %, memorised 12.5 %"
    assert any("TimeRemaining" in type(column).__name__ for column in bar.progress.columns)
    bar(config, {**row, "epoch": 3, "memorised": None})
    assert bar.progress.finished
    assert not bar.progress.live.is_started
    resumed = progress.TrainingBar()
    resumed(config, row)
    assert resumed.progress.tasks[0].completed == 2
    resumed.stop()


def test_lines_in_a_pipe(monkeypatch, capsys):
    """A line at the start, one after the first and the last epoch, and one every half minute."""
    clock = [0.0]
    monkeypatch.setattr(progress, "monotonic", lambda: clock[0])
    bar, config = progress.TrainingBar(), RunConfig(epochs=100, runs="here").resolve()
    bar(config, None)
    assert capsys.readouterr().err == f"logitclip: network mlp, 100 epochs, in here/{config.id}.\n"
    for epoch in range(100):
        clock[0] += 4.0
        bar(config, {"epoch": epoch, "loss": 1.0, "test_accuracy": 50.0, "val_accuracy": 40.0, "memorised": None})
    lines = capsys.readouterr().err.splitlines()
    assert [int(line.split()[1].partition("/")[0]) for line in lines] == [1, *range(9, 100, 8), 100]
    accuracies = "test accuracy 50.0 %, validation accuracy (noisy labels) 40.0 %"
    assert lines[1] == f"epoch 9/100: loss 1.000, {accuracies}, 6 min 4 s left"
    for options, count in (({"verbose": True}, 5), ({"quiet": True}, 0)):
        bar = progress.TrainingBar(**options)
        for row in (None, *({"epoch": epoch, "loss": 1.0, "test_accuracy": 50.0} for epoch in range(4))):
            bar(config, row)
        assert len(capsys.readouterr().err.splitlines()) == count


def test_options_in_a_file(tmp_path, typed):
    """Options on the command line override the file; the config.json of a run repeats it."""
    file = tmp_path / "run.toml"
    file.write_text('noise = "symmetric:rate=0.5"\nlimit = 64\nepochs = 3\nmodel = "mlp:width=8"\n', encoding="utf-8")
    code, out, _ = typed("--config", file, "--epochs", "1", "--runs", tmp_path / "runs", "--json", "-q")
    assert code == 0
    config = json.loads(out)["config"]
    assert (config["epochs"], config["limit"], config["noise"]) == (1, 64, "symmetric:rate=0.5")
    (folder,) = (tmp_path / "runs").glob("*/config.json")
    again = typed(f"--config={folder}", "--runs", tmp_path / "runs", "--json", "-q")[1]
    assert json.loads(again)["id"] == json.loads(out)["id"]
    file.write_text("epoch = 3", encoding="utf-8")
    code, _, err = typed("--config", file)
    assert (code, "unknown option 'epoch'. Did you mean 'epochs'?" in err) == (2, True)


def test_the_folder_of_runs_is_in_the_environment(tmp_path, typed, monkeypatch):
    monkeypatch.setenv("LOGITCLIP_RUNS", str(tmp_path / "mine"))
    code, _, err = typed("--limit", "64", "--epochs", "1", "--quiet")
    assert (code, err) == (0, "")
    assert len(list((tmp_path / "mine").glob("*/result.json"))) == 1


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--loss", "gcee"], "Unknown loss 'gcee'. Did you mean 'gce'?"),
        (["--model", "mlpp"], "Unknown model 'mlpp'. Did you mean 'mlp'?"),
        (["--method", "standrad"], "Unknown method 'standrad'. Did you mean 'standard'?"),
        (["--clip", "norm:tau=-1"], "tau must be positive and finite, got -1.0."),
        (["--clip", "norm:temp=auto"], "temp of the clip 'norm:temp=auto' is to be tuned"),
        (["--noise", "symmetric:rate=2"], "rate must"),
        (["--epochs", "0"], "epochs must be at least 1, got 0."),
        (["--model", "wrn:depth=41"], "depth of a wrn must be 6 n + 4"),
        (
            ["--model", "resnet:depth=18", "--data", "digits", "--augment", "crop:size=99"],
            "size must be between 1 and 8",
        ),
        (["--plugin", "/nowhere.py"], "There is no plugin file /nowhere.py."),
        (["--data", "cifar10", "--root", "/nowhere"], ""),
        (["--precision", "16-mixed", "--accelerator", "cpu"], "The precision 16-mixed needs a GPU"),
        (["--lr", "1e8"], "Training diverged in epoch 1:"),
        (["--runs", "/proc/none"], "Cannot write /proc/none/"),
        (["--batch-size", "999", "--drop-last", "True"], "200 examples make no batch of 999"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(tmp_path, typed, arguments, sentence):
    code, out, err = typed("--limit", "200", "--epochs", "2", "--runs", str(tmp_path), *arguments)
    assert (code, out) == (3 if "diverged" in sentence else 2, "")
    *_, line = err.splitlines()  # the lines before it are progress
    assert line.startswith(f"logitclip: {sentence}")
    assert not list(tmp_path.rglob("result.json"))


def test_a_full_disk_is_one_sentence(tmp_path, typed):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "none", disk], capture_output=True).returncode:
        pytest.skip("mounting needs root")
    try:
        config = replace(SMALL, runs=str(disk), epochs=100, model="mlp:width=64,depth=1", checkpoint_seconds=0)
        code, out, err = typed(*options(config))
        assert (code, out) == (2, "")
        assert "logitclip: Cannot write " in err
        assert "No space left on device. Earlier files are intact." in err
        assert "Traceback" not in err
        folder = disk / config.id
        assert not list(folder.rglob(f"{files.SCRATCH}*"))
        assert not (folder / "claim").exists()
        assert (folder / "metrics.jsonl").read_bytes()[-2:] in (b"", b"}\n")
    finally:
        subprocess.run(["umount", disk], check=True)
