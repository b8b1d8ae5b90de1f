"""`logitclip runs`: a folder of small real runs is listed, filtered, compared and cleaned."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from disk import everything_in

from logitclip import files
from logitclip.cli import main
from logitclip.engine import Diverged
from logitclip.runs import checkpoints, claims, results
from logitclip.runs import listing as studies
from logitclip.runs.config import RunConfig
from logitclip.runs.plugins import plugins_ignored
from logitclip.runs.train import train

SMALL = RunConfig(limit=64, model="mlp:width=8,depth=1", epochs=2, batch_size=32, lr=0.05, checkpoint_seconds=0)


@pytest.fixture(scope="session")
def original(tmp_path_factory) -> Path:
    """Three finished runs, one that diverged and one that was interrupted."""
    folder = tmp_path_factory.mktemp("runs")
    config = replace(SMALL, runs=str(folder))
    for change in ({}, {"seed": 1}, {"clip": "norm:temp=1.5", "noise": "symmetric:rate=0.5"}):
        train(replace(config, **change))
    bad = replace(config, lr=1e20)
    with pytest.raises(Diverged) as error:
        train(bad)
    results.record_failure(folder / bad.id, bad, str(error.value), final=True)

    def interrupt(_: RunConfig, row: dict[str, Any] | None) -> None:
        if row is not None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(replace(config, seed=2), on_epoch=interrupt)
    return folder


@pytest.fixture
def folder(original, tmp_path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "runs"))


def folder_of(folder: Path, **change: Any) -> Path:
    return folder / replace(SMALL, runs=str(folder), **change).id


def test_every_run_has_its_status(folder):
    found = {run.id: run for run in studies.read_runs(folder)}
    assert [run.status for run in found.values()].count("done") == 3
    assert found[folder_of(folder, lr=1e20).name].status == "failed"
    assert found[folder_of(folder, seed=2).name].status == "stopped"
    with claims.claim(folder_of(folder, seed=2)):
        assert studies.read_run(folder_of(folder, seed=2)).status == "running"


@pytest.mark.parametrize(
    ("conditions", "count"),
    [
        ([], 5),
        (["seed=1"], 1),
        (["seed!=1"], 4),
        (["clip=norm:*"], 1),
        (["clip=none", "status=done"], 2),
        (["lr<1"], 4),
        (["last10_accuracy>=0"], 3),  # runs without a result have none
        (["memorised>=0"], 1),
        (["memorised!=1000"], 1),
        (["memorised=none"], 4),
        (["milestones=0.4,0.7"], 5),
        (["status=failed"], 1),
        (["compile=false"], 5),
    ],
)
def test_conditions(original, conditions, count):
    assert len(studies.select(studies.read_runs(original), conditions)) == count


@pytest.mark.parametrize(
    ("condition", "sentence"),
    [
        ("sed=1", "A run has no option or number 'sed'. Did you mean 'seed'?"),
        ("seed", "A condition is an option, = or < or >, and a value"),
        ("clip<norm", "clip is compared with a number"),
    ],
)
def test_wrong_conditions(original, condition, sentence):
    with pytest.raises(ValueError) as error:
        studies.select(studies.read_runs(original), [condition])
    assert str(error.value).startswith(sentence)


def test_sorted_by_a_number_and_the_unknown_last(original):
    found = studies.sort_runs(studies.read_runs(original), "last10_accuracy")
    values = [run.record["last10_accuracy"] for run in found]
    assert values[3:] == [None, None]
    assert values[:3] == sorted(values[:3], reverse=True)
    by_text = [run.record["clip"] for run in studies.sort_runs(studies.read_runs(original), "clip")]
    assert by_text == sorted(by_text)


def test_ids_by_their_beginning(original):
    found = studies.read_runs(original)
    for run in found:
        assert studies.find(found, run.id) is run
    with pytest.raises(ValueError, match=r"^No run has an id that begins with 'xyz'"):
        studies.find(found, "xyz")
    with pytest.raises(ValueError, match=r"^5 runs have an id that begins with ''"):
        studies.find(found, "")


def test_what_differs_from_the_defaults(original):
    clipped = RunConfig(clip="norm:temp=1.5", lr=0.1, data="digits").resolve()
    assert studies.changed_options(clipped) == {"clip": "norm:temp=1.5"}  # lr is the default of digits
    with plugins_ignored():  # the dataset of a plugin has no known defaults
        theirs = replace(clipped, data="theirs", plugin=("gone.py",))
        assert studies.changed_options(theirs).items() >= {"clip": "norm:temp=1.5", "lr": 0.1}.items()


def test_index_has_a_line_for_each_finished_run(folder):
    lines = list(csv.DictReader((folder / "index.csv").open(encoding="utf-8")))
    found = {run.id: run.outcome for run in studies.read_runs(folder) if isinstance(run.outcome, results.Result)}
    assert {line["id"] for line in lines} == found.keys()
    for line in lines:
        assert float(line["last10_accuracy"]) == found[line["id"]].last10_accuracy
        assert (line["milestones"], line["model"]) == ("0.4,0.7", "mlp:width=8,depth=1")
    studies.collect_garbage(folder)  # rewrites it with all runs
    assert len(list(csv.DictReader((folder / "index.csv").open(encoding="utf-8")))) == 5


def test_an_index_of_somebody_else_stays(folder, caplog):
    result = next(run.outcome for run in studies.read_runs(folder) if isinstance(run.outcome, results.Result))
    theirs = b"page,title\n1,no newline at the end"
    (folder / "index.csv").write_bytes(theirs)
    results._add_to_index(result, folder / result.id)
    studies.collect_garbage(folder)
    assert (folder / "index.csv").read_bytes() == theirs
    assert "index.csv is not an index of runs: it is left as it is" in caplog.text
    (folder / "index.csv").write_bytes(b"id,st")  # ours, cut short by a kill
    studies.collect_garbage(folder)
    assert len(list(csv.DictReader((folder / "index.csv").open(encoding="utf-8")))) == 5


@pytest.mark.parametrize("locks", [True, False])
def test_index_is_made_again_with_or_without_locks(folder, monkeypatch, locks):
    def refuse(*_, **__):
        raise NotImplementedError("this file system has no locks")

    if not locks:
        monkeypatch.setattr(files.FileLock, "acquire", refuse)
    result = next(run.outcome for run in studies.read_runs(folder) if isinstance(run.outcome, results.Result))
    (folder / "index.csv").unlink()
    before = {*folder.iterdir(), folder / ".index.lock"}
    results._add_to_index(result, folder / result.id)
    results._add_to_index(result, folder / result.id)
    (line,) = csv.DictReader((folder / "index.csv").open(encoding="utf-8"))
    assert line["id"] == result.id
    assert {*folder.iterdir(), folder / ".index.lock"} == {*before, folder / "index.csv"}


@pytest.mark.parametrize("locks", [True, False])
def test_runs_that_finish_together_are_all_in_the_index(folder, monkeypatch, locks):
    result = next(run.outcome for run in studies.read_runs(folder) if isinstance(run.outcome, results.Result))
    if locks:
        (folder / "index.csv").write_bytes(b"")  # as a crash may leave it
    else:
        (folder / "index.csv").write_text(results.csv_line(results.COLUMNS), encoding="utf-8")
        monkeypatch.setattr(files, "lock", lambda *_: contextlib.nullcontext())
    ids = [f"{i:016x}" for i in range(20)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda id: results._add_to_index(replace(result, id=id), folder / id), ids))
    lines = list(csv.DictReader((folder / "index.csv").open(encoding="utf-8")))
    assert sorted(line["id"] for line in lines) == ids


def test_gc_removes_only_what_nobody_needs(folder):
    done, stopped = folder_of(folder), folder_of(folder, seed=2)
    shutil.copytree(stopped / "checkpoints", done / "checkpoints")  # as a kill right after the result leaves it
    (stopped / f"{files.SCRATCH}1-x").write_bytes(bytes(1000))
    (folder / ("0" * 16)).mkdir()
    (folder / ("0" * 16) / claims.CLAIM_LOCK).touch()  # it never started
    before = {run.id: run.outcome for run in studies.read_runs(folder)}
    expected = {f"{done.name}/checkpoints", f"{stopped.name}/{files.SCRATCH}1-x", "0" * 16}
    planned = studies.collect_garbage(folder, dry=True)
    assert planned.keys() == expected
    assert (done / "checkpoints").exists()
    assert studies.collect_garbage(folder) == planned
    assert planned[f"{stopped.name}/{files.SCRATCH}1-x"] == 1000
    assert checkpoints.load_checkpoint(stopped, stopped.name) is not None  # it can be resumed
    after = {run.id: run.outcome for run in studies.read_runs(folder)}
    assert after == {id: found for id, found in before.items() if id != "0" * 16}
    assert studies.collect_garbage(folder) == {}


def test_gc_leaves_alone_what_is_claimed_after_it_looked(folder, monkeypatch):
    stopped, empty = folder_of(folder, seed=2), folder / ("0" * 16)
    (stopped / f"{files.SCRATCH}1-x").touch()
    empty.mkdir()
    (empty / claims.CLAIM_LOCK).touch()
    read, held = studies.read_runs, contextlib.ExitStack()

    def read_then_claimed(folder: Path) -> list[studies.Run]:
        found = read(folder)
        monkeypatch.setattr(studies, "read_runs", read)
        for path in (stopped, empty):
            held.enter_context(claims.claim(path))
        return found

    monkeypatch.setattr(studies, "read_runs", read_then_claimed)
    with held:
        assert studies.collect_garbage(folder) == {}
        assert all(claims.describe_owner(path) for path in (stopped, empty))
    assert (stopped / f"{files.SCRATCH}1-x").exists()


def test_no_claim_is_made_while_gc_removes(folder, monkeypatch):
    done, removed = folder_of(folder), []
    (done / "checkpoints").mkdir()

    def rmtree(path: Path) -> None:
        with pytest.raises(TimeoutError, match="held"), files.lock(done / claims.CLAIM_LOCK, 0, late="held"):
            pass
        removed.append(path)

    monkeypatch.setattr(files.shutil, "rmtree", rmtree)
    studies.collect_garbage(folder)
    assert removed == [done / "checkpoints"]


def test_a_claim_that_waits_while_gc_removes_its_folder_makes_it_again(tmp_path, monkeypatch):
    folder, remove = tmp_path / ("0" * 16), claims.remove_unstarted
    folder.mkdir()
    (folder / claims.CLAIM_LOCK).touch()
    owners: list[str | None] = []

    def claim() -> None:
        with claims.claim(folder):
            owners.append(claims.describe_owner(folder))

    waiting = threading.Thread(target=claim)

    def slowly(path: Path) -> None:
        waiting.start()
        time.sleep(0.3)
        assert not owners
        remove(path)

    monkeypatch.setattr(claims, "remove_unstarted", slowly)
    studies.collect_garbage(tmp_path)
    waiting.join()
    assert len(owners) == 1
    assert owners[0] is not None


def test_a_run_that_is_trained_is_not_removed(folder):
    run = studies.read_run(folder_of(folder))
    with claims.claim(run.folder), pytest.raises(claims.Claimed, match=f"process {os.getpid()}"):
        studies.remove(run)
    assert results.read_result(run.folder) is not None
    assert studies.remove(run) > 0
    assert not run.folder.exists()


def test_a_narrow_terminal_shows_the_numbers(folder, terminal):
    out = terminal(80, "runs", "--runs", str(folder))
    assert {"test", "done", "1e+20"} <= set(out.split())
    assert max(map(len, out.splitlines())) <= 80


def test_on_the_command_line(folder, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    at = ("--runs", str(folder))
    code, out, _ = command("runs", *at)
    assert code == 0
    assert "5 runs" in out
    assert {"seed", "lr", "clip"} <= set(out.split()) >= {"1e+20", "0.05"}  # what differs between them
    assert "3 done" in out
    assert "Validation labels are noisy." in out
    assert "test labels of your own data" not in out
    assert len(json.loads(command("runs", "list", "--where", "status=done", "--json", *at)[1])) == 3
    lines = list(csv.DictReader(command("runs", "list", "--csv", "--sort", "seed", *at)[1].splitlines()))
    assert [line["seed"] for line in lines] == ["2", "1", "0", "0", "0"]
    bad = folder_of(folder, lr=1e20).name
    out = command("runs", "show", bad[:8], *at)[1]
    assert "Training diverged in epoch" in out
    assert "1e+20" in out
    one, other = folder_of(folder).name, folder_of(folder, seed=1).name
    out = command("runs", "diff", one, other, *at)[1]
    assert re.search(r"^ seed +0 +1 *$", out, re.M)
    assert not re.search(r"^ lr ", out, re.M)
    assert command("runs", "rm", *at)[0] == 2
    code, _, err = command("runs", "rm", "--where", "status=failed", "--dry", *at)
    assert err.startswith("logitclip: would remove 1 item,")
    assert (folder / bad).exists()
    assert command("runs", "rm", bad, *at)[0] == 0
    assert not (folder / bad).exists()
    assert command("runs", "show", *at)[0] == 2
    assert command("runs", "--runs", str(folder / "nowhere"))[0] == 2


def test_of_several_runs_those_that_are_trained_are_kept_and_named(folder, command):
    """The first is claimed: the others are removed all the same, and both are told."""
    first, *others = (run.id for run in studies.read_runs(folder))
    with claims.claim(folder / first):
        for option in (("--dry",), ()):
            code, out, err = command("runs", "rm", "--where", "seed>=0", "--runs", folder, *option)
            assert code == 2
            assert [line.split()[0] for line in out.splitlines()] == others
            freed, kept = err.splitlines()
            assert " 4 items, " in freed
            assert f"{first} is being trained by process {os.getpid()}" in kept
            assert len(studies.read_runs(folder)) == (5 if option else 1)
    assert command("runs", "rm", first, "--runs", folder)[0] == 0


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        ("show 0 --where seed=1", "runs show takes ids, --json and --runs, not --where."),
        ("diff 0 1 --where seed=1", "runs diff takes ids and --runs, not --where."),
        ("show 0 --csv", "runs show takes ids, --json and --runs, not --csv."),
        ("show 0 --dry", "runs show takes ids, --json and --runs, not --dry."),
        ("rm 0 --json", "runs rm takes ids, --where, --dry and --runs, not --json."),
        ("rm 0 --sort seed", "runs rm takes ids, --where, --dry and --runs, not --sort."),
        ("gc 0", "runs gc takes --dry and --runs, not ids."),
        ("list --dry", "runs list takes ids, --where, --sort, --csv, --json and --runs, not --dry."),
        ("list --csv --json", "--csv and --json exclude each other."),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(original, command, typed, sentence):
    code, out, err = command("runs", *typed.split(), "--runs", original)
    assert (code, out, err) == (2, "", f"logitclip: {sentence}\n")


def test_train_records_why_it_diverged(tmp_path, command):
    options = ["--limit", "64", "--epochs", "2", "--lr", "1e20", "--runs", str(tmp_path)]
    assert command("train", *options)[0] == 3
    (run,) = studies.read_runs(tmp_path)
    assert isinstance(run.outcome, results.Failure)
    assert run.outcome.final


# -- what is not ours is neither removed nor written to ----------------------------------------------------------------


@pytest.fixture
def photos(tmp_path) -> Path:
    """Somebody's folder, which must never change."""
    (tmp_path / "photos" / "summer").mkdir(parents=True)
    for name in ("a.jpg", f"{files.SCRATCH}1-b.jpg", "summer/c.jpg"):
        (tmp_path / "photos" / name).write_text(name, encoding="utf-8")
    return tmp_path / "photos"


def test_nothing_behind_a_link_is_removed(folder, photos, monkeypatch):
    theirs, before = folder / ("a" * 16), everything_in(photos)
    theirs.symlink_to(photos)
    done, stopped = folder_of(folder), folder_of(folder, seed=2)
    (done / "checkpoints").symlink_to(photos)
    shutil.rmtree(stopped / "checkpoints")
    (stopped / "checkpoints").symlink_to(photos)
    (stopped / f"{files.SCRATCH}1-x").symlink_to(photos)
    assert {run.id for run in studies.read_runs(folder)} >= {theirs.name}
    for dry in (True, False):
        with pytest.raises(studies.NotARun, match="aaaa is a link"):
            studies.remove(studies.read_run(theirs), dry=dry)
        expected = {f"{done.name}/checkpoints", f"{stopped.name}/{files.SCRATCH}1-x"}
        assert studies.collect_garbage(folder, dry=dry).keys() == expected
        assert everything_in(photos) == before
    result = train(replace(SMALL, seed=2, runs=str(folder)))  # it has lost its checkpoints
    assert everything_in(photos) == before
    for run in studies.read_runs(folder):
        if run.folder != theirs:
            studies.remove(run)
    assert not result.folder.exists()
    assert everything_in(photos) == before


def test_a_folder_that_is_not_a_run_is_not_removed(folder):
    theirs = folder / ("b" * 16)
    theirs.mkdir()
    for content in (None, "{}", "[]", '{"data": "mine"}', "not JSON"):
        if content is not None:
            (theirs / "config.json").write_text(content, encoding="utf-8")
        with pytest.raises(studies.NotARun, match="bbbb is not the folder of a run: it has no config"):
            studies.remove(studies.read_run(theirs))
        assert studies.collect_garbage(folder) == {}
        assert theirs.is_dir()


def test_rm_removes_the_others_and_names_what_it_leaves(folder, photos, capsys, monkeypatch):
    (folder / ("a" * 16)).symlink_to(photos)
    monkeypatch.setattr(sys, "argv", ["logitclip", "runs", "rm", "--where", "status=stopped", "--runs", str(folder)])
    with pytest.raises(SystemExit) as exit:
        main()
    err = capsys.readouterr().err
    assert exit.value.code == 2
    assert "removed 1 item" in err
    assert f"{folder / ('a' * 16)} is a link" in err.replace("\n", " ")
    assert not folder_of(folder, seed=2).exists()
    assert (photos / "a.jpg").exists()


def test_no_run_is_trained_behind_a_link(folder, photos):
    config, before = replace(SMALL, seed=7, runs=str(folder)), everything_in(photos)
    (folder / config.id).symlink_to(photos)
    with pytest.raises(ValueError, match="is a link, and a run is trained in a folder of its own: remove the link"):
        train(config)
    results.record_failure(folder / config.id, config, "it failed")
    assert everything_in(photos) == before


def test_links_inside_a_run_folder_are_replaced(folder, photos):
    config, before = replace(SMALL, seed=8, runs=str(folder), per_example=True, val=0.2), everything_in(photos)
    run = folder / config.id
    run.mkdir()
    names = ["config.json", "noise.json", "metrics.jsonl", "weights.safetensors", "result.json", "validation.npz"]
    names += ["examples.npz", "claim", ".claim.lock"]
    for name in names:
        (run / name).symlink_to(photos / "a.jpg")
    (folder / "index.csv").unlink()
    (folder / "index.csv").symlink_to(photos / "a.jpg")
    train(config)
    assert everything_in(photos) == before
    assert not [name for name in names if (run / name).is_symlink()]
    (line,) = csv.DictReader((folder / "index.csv").open(encoding="utf-8"))
    assert line["id"] == config.id


# -- what a kill leaves ------------------------------------------------------------------------------------------------


def test_the_next_reader_mends_what_a_kill_after_the_result_left(folder):
    done, stopped = folder_of(folder), folder_of(folder, seed=2)
    expected = everything_in(done)
    shutil.copytree(stopped / "checkpoints", done / "checkpoints")
    (done / f"{files.SCRATCH}1-x").touch()
    dead = {"machine": claims._machine(), "pid": 2**22 + 1, "started": "1"}
    (done / "claim").write_text(json.dumps(dead), encoding="utf-8")
    index = (folder / "index.csv").read_bytes()
    lines = index.splitlines(keepends=True)
    own = next(line for line in lines if line.startswith(done.name.encode()))
    (folder / "index.csv").write_bytes(b"".join(line for line in lines if line != own) + own[:30])  # a line cut short
    before = results.read_result(folder_of(folder, seed=1))  # another run: nothing is mended there
    assert (done / "claim").exists()
    assert before is not None
    assert results.read_result(done) is not None
    assert {name: content for name, content in everything_in(done).items() if name != ".claim.lock"} == {
        name: content for name, content in expected.items() if name != ".claim.lock"
    }
    assert sorted((folder / "index.csv").read_bytes().splitlines()) == sorted(index.splitlines())


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])  # Ctrl-C, and SIGTERM on the command line
def test_mending_is_finished_if_a_signal_comes(folder, monkeypatch, interrupt):
    done, signals = folder_of(folder), [interrupt]
    (folder / "index.csv").unlink()
    (done / "checkpoints").mkdir()
    dead = {"machine": claims._machine(), "pid": 2**22 + 1, "started": "1"}
    (done / "claim").write_text(json.dumps(dead), encoding="utf-8")
    remove = results.remove_temporary_files

    def interrupted(place: Path) -> None:
        if signals:
            raise signals.pop()
        remove(place)

    monkeypatch.setattr(results, "remove_temporary_files", interrupted)
    with pytest.raises(interrupt):
        results.read_result(done)
    assert not (done / "claim").exists()
    assert not (done / "checkpoints").exists()
    assert done.name in (folder / "index.csv").read_text(encoding="utf-8")


def test_nothing_is_mended_while_the_process_lives(folder):
    done = folder_of(folder)
    (done / "checkpoints").mkdir()
    with claims.claim(done):
        assert results.read_result(done) is not None
        assert (done / "checkpoints").exists()
        assert claims.describe_owner(done) is not None


def test_the_config_of_a_finished_run_is_that_of_its_result(folder):
    done = folder_of(folder)
    content = json.loads((done / "config.json").read_text(encoding="utf-8"))
    (done / "config.json").write_text(json.dumps({**content, "lr": 777.0}), encoding="utf-8")
    assert studies.select(studies.read_runs(folder), ["lr=777"]) == []
    assert studies.read_run(done).config.lr == 0.05


def test_edited_options_of_an_unfinished_run_select_nothing(folder, caplog):
    run = folder_of(folder)
    (run / "result.json").unlink()
    assert [found.folder for found in studies.select(studies.read_runs(folder), ["lr=0.05"])].count(run) == 1
    content = json.loads((run / "config.json").read_text(encoding="utf-8"))
    (run / "config.json").write_text(json.dumps({**content, "lr": 777.0}), encoding="utf-8")
    for condition in ("lr=777", "lr=0.05"):
        assert run not in [found.folder for found in studies.select(studies.read_runs(folder), [condition])]
    assert "config.json has been changed" in caplog.text


def test_no_form_of_the_list_prints_escapes(tmp_path, command):
    run = tmp_path / "0123456789abcdef"
    run.mkdir()
    config = asdict(RunConfig(data="folder:path=\x1b]0;pwned\x07"))
    (run / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for form in ([], ["--csv"], ["--json"]):
        code, out, err = command("runs", "list", *form, "--runs", tmp_path)
        assert code == 0
        assert "pwned" in out
        assert not set("\x1b\x07") & set(out + err)
