"""The command line: its output and its error messages."""

import inspect
import json
import logging
import os
import re
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import get_args

import pytest

import logitclip
from logitclip import cli
from logitclip.cli import reference
from logitclip.models import MODELS
from logitclip.runs.config import registries


def run(capsys, monkeypatch, *args: str) -> tuple[int, str, str]:
    """Run a command in this process; return exit code, stdout and stderr."""
    monkeypatch.setattr("sys.argv", ["logitclip", *args])
    monkeypatch.setenv("COLUMNS", "160")
    code = 0
    try:
        cli.main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def command(capsys, monkeypatch):
    return lambda *args: run(capsys, monkeypatch, *args)


@pytest.mark.parametrize("name", [None, *cli.COMMANDS])
def test_help_teaches(command, name):
    code, out, _ = command(*([name] if name else []), "--help")
    assert code == 0
    assert "logitclip" in out
    if name:
        assert len(out.splitlines()) > 5


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_an_example(name):
    assert f"Example: logitclip {name} " in (cli.COMMANDS[name].__doc__ or "")


def test_alone_it_says_what_to_try(command):
    code, out, err = command()
    assert (code, err) == (0, "")
    commands = re.findall(r"^logitclip [a-z].*", out, re.M)
    assert len(commands) == 4
    assert all(line.split()[1] in cli.COMMANDS for line in commands)
    assert commands[0].startswith("logitclip fit ")  # most people come with data of their own


def test_version_and_module():
    shown = subprocess.run([sys.executable, "-m", "logitclip", "--version"], capture_output=True, text=True)
    assert (shown.returncode, shown.stdout) == (0, f"logitclip {logitclip.__version__}\n")


def test_help_has_groups_and_real_defaults(command):
    _, out, _ = command("train", "--help")
    for group in ("data", "noise", "clip and loss", "network", "optimisation", "running"):
        assert f"{group} options" in out
    words = " ".join(out.replace("│", " ").split())
    assert "Passes over the training data. (default for digits: 150)" in words
    assert "{multistep,cosine,constant}" in words
    assert "default: None" not in words


def test_completion_is_written(command, tmp_path):
    command("--tyro-write-completion", "bash", str(tmp_path / "script"))
    script = (tmp_path / "script").read_text(encoding="utf-8")
    assert all(name in script for name in cli.COMMANDS)
    assert "--noise-seed" in script


def test_one_name_is_explained(command):
    code, out, _ = command("list", "data", "table")
    assert code == 0
    knobs = registries()["data"].knobs("table")
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert lines.keys() >= knobs.keys()
    assert "required" in lines["label"]
    assert "none" in lines["clean_label"].split()  # as a spec writes it
    assert [knob["knob"] for knob in json.loads(command("list", "data", "table", "--json")[1])["knobs"]] == list(knobs)


def test_list_imports_plugins(command, tmp_path):
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        'from logitclip.losses import loss\n\n\n@loss\ndef listed(log_p, _):\n    """Mine."""\n    return -log_p\n',
        encoding="utf-8",
    )
    assert "listed" not in command("list", "losses")[1]
    assert "listed" in command("list", "losses", "--plugin", str(plugin))[1]


@pytest.mark.parametrize("kind", ["losses", "clips", "noises", "data", "models", "augments", "methods", "penalties"])
def test_list_shows_every_name(command, kind):
    code, out, _ = command("list", kind)
    assert code == 0
    names = json.loads(command("list", kind, "--json")[1])
    assert names
    assert all(name in out for name in names)
    assert all(entry["summary"] for entry in names.values())


def test_help_of_list_names_every_kind(command):
    _, out, _ = command("list", "--help")
    listed = re.search(r"What to list: (.*?)\.", " ".join(out.replace("│", " ").split()))
    assert listed
    assert set(re.split(", | or ", listed[1])) == set(get_args(reference.RegistryName))


def test_bound_prints_all_and_the_smallest(command):
    code, out, _ = command("bound", "--tau", "1", "--classes", "10", "--noise", "symmetric:rate=0.5")
    assert code == 0
    for item in ("Eq. 2", "Prop 2.1", "Prop 2.4", "Thm 2.2", "Thm 2.3", "Thm E.1", "4.21215", "4.26942"):
        assert item in out
    rows = json.loads(command("bound", "--tau", "1", "--classes", "10", "--noise", "symmetric:rate=0.5", "--json")[1])
    gaps = [row for row in rows if row["quantity"].startswith("clean-risk gap")]
    assert min(gaps, key=lambda row: row["upper"])["smallest"]


def test_bound_marks_the_smallest_without_colours_too(command):
    _, out, _ = command("bound", "--tau", "1", "--classes", "10", "--noise", "symmetric:rate=0.5")
    marked = [line.split() for line in out.splitlines() if line.lstrip().startswith("* ")][:-1]  # the last is a legend
    assert [words[1] for words in marked] == ["ce", "p_y", "clean-risk", "noisy-risk"]
    assert [words[-1] for words in marked] == ["4.21215", "0.450853", "3.41554", "3.41554"]


def test_json_has_neither_nan_nor_infinity(command):
    for args in (["--tau", "inf"], ["--tau", "1", "--noise", "symmetric:rate=0.95"]):
        _, out, _ = command("bound", "--classes", "10", *args, "--json")
        rows = json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
        assert any(row["upper"] is None for row in rows)


def test_bound_takes_no_option_that_it_would_ignore(command):
    def clean_gap(noise):
        rows = json.loads(command("bound", "--tau", "1", "--classes", "10", "--noise", noise, "--json")[1])
        return next(row["upper"] for row in rows if row["paper"] == "Thm 2.2")

    assert clean_gap("symmetric:rate=0.2,include_self=true") == pytest.approx(clean_gap("symmetric:rate=0.18"))
    code, _, err = command("bound", "--tau", "1", "--classes", "10", "--noise", "asymmetric:rate=0.4,variant=pairs")
    assert code == 2
    assert "transition:matrix=" in err


@pytest.mark.parametrize("loss", ["gce:q=0.5", "nce_agce", "cores", "focal:gamma=2"])
def test_bound_of_other_losses_and_norms(command, loss):
    code, out, _ = command("bound", "--tau", "2", "--delta", "0.5", "--p", "2", "--classes", "5", "--loss", loss)
    assert code == 0
    assert loss.partition(":")[0] in out


def test_bound_knows_the_arrows_of_the_data(command, tmp_path):
    """CIFAR-10's five arrows flip half of the classes: truck, bird, deer, cat and dog."""
    matrix = tmp_path / "matrix.csv"
    rows = [[float(i == j) for j in range(10)] for i in range(10)]
    for source, target in ((9, 1), (2, 0), (4, 7), (3, 5), (5, 3)):
        rows[source][source], rows[source][target] = 0.6, 0.4
    matrix.write_text("\n".join(",".join(map(str, row)) for row in rows), encoding="utf-8")
    arguments = ("bound", "--tau", "1", "--classes", "10", "--json", "--noise")
    known = json.loads(command(*arguments, "asymmetric:rate=0.4", "--data", "cifar10")[1])
    assert known == json.loads(command(*arguments, f"transition:matrix={matrix}")[1])
    assert known != json.loads(command(*arguments, "asymmetric:rate=0.4")[1])
    for classes in ("5", "100"):
        code, _, error = command(
            "bound", "--tau", "1", "--classes", classes, "--noise", "asymmetric:rate=0.4", "--data", "cifar10"
        )
        assert (code, f"cifar10 has 10 classes, so --classes must be 10, got {classes}" in error) == (2, True)
    code, _, error = command("bound", "--tau", "1", "--classes", "10", "--data", "cifar10")
    assert (code, "needs --noise asymmetric" in error) == (2, True)


def test_bound_with_a_transition_matrix(command, tmp_path):
    matrix = tmp_path / "matrix.csv"
    matrix.write_text("0.8,0.2\n0.1,0.9\n", encoding="utf-8")
    code, out, _ = command("bound", "--tau", "1", "--classes", "2", "--noise", f"transition:matrix={matrix}")
    assert code == 0
    assert "Thm 2.3" in out


def test_paper_finds_equations_by_several_spellings(command):
    for item in ("Eq. 4", "eq 4", "Equation 4", "Eq. 3"):
        code, out, _ = command("paper", item)
        assert code == 0
        assert "clip_logits" in out
    everything = command("paper")[1]
    for item in ("Thm E.1", "Table 9", "Figure 4", "LC-V"):
        assert item in everything
    for item, home in (
        ("Table 1", "the recipe table1"),
        ("fig. 2", "the recipe figure2"),
        ("relu6", "make_activation"),
    ):
        assert home in command("paper", item)[1]
    assert "Step along the gradients" in command("paper", "Gradient clipping")[1]


def test_paper_prints_the_docstring_as_it_is(command):
    from logitclip.clip import clip_logits

    assert inspect.getdoc(clip_logits) in command("paper", "Eq. 4")[1]


def test_noise_previews_and_saves(command, tmp_path):
    target = tmp_path / "noisy"
    code, out, _ = command("noise", "symmetric:rate=0.5", "--save", str(target))
    assert code == 0
    assert "50" in out
    code, out, _ = command("noise", f"file:path={target}", "--json")
    assert code == 0
    assert json.loads(out)["rate"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["bound", "--tau", "-1", "--classes", "10"], ["tau", "-1"]),
        (["bound", "--tau", "1", "--classes", "1"], ["classes", "1"]),
        (["bound", "--tau", "1", "--classes", "10", "--loss", "gcee"], ["gcee", "Did you mean 'gce'?"]),
        (["bound", "--tau", "1", "--classes", "10", "--noise", "symetric:rate=0.5"], ["Did you mean 'symmetric'?"]),
        (["noise", "symmetric:rate=1.5"], ["rate", "1.5"]),
        (["noise", "symmetric:rat=0.5"], ["Did you mean 'rate'?"]),
        (["noise", "symmetric:rate=0.5", "--data", "digitz"], ["Did you mean 'digits'?"]),
        (["paper", "Eq. 44"], ["Eq. 44", "Did you mean"]),
        (["train", "--clip", "norn:temp=1"], ["Did you mean 'norm'?"]),
        (["train", "--loss", "taylor_ce:order=1000000000"], ["order must be at most 1000"]),
        (["bound", "--tau", "1", "--classes", "9" * 400], ["classes must be at most 10^15"]),
        (["train", "--data", "table:path=~nobody-here/x.csv,label=y"], ["~nobody-here"]),
        (["train", "--data", "cifar10", "--root", "~nobody-here"], ["~nobody-here"]),
        (["report", "~nobody-here/x.toml"], ["There is no recipe file ~nobody-here/x.toml"]),
        (["train", "--config", "~nobody-here/x.toml"], ["~nobody-here/x.toml, cannot be read: No such file"]),
        (["train", "--config", "/dev/null"], ["is neither TOML"]),
        (["train", "--loss", "mine"], ["Unknown loss 'mine'", "--plugin FILE.py"]),
        (
            ["train", "--data", "my.csv"],
            ["Unknown dataset 'my.csv'", "`logitclip fit my.csv", "table:path=my.csv,label=", "folder:"],
        ),
        (["list", "data", "tabel"], ["Did you mean 'table'?"]),
        (["sweep", "quickstart", "--shard", "5/4"], ["shard must be one of n parts", "'5/4'"]),
        (["report", "quickstart", "-o", "x.bmp"], [".html, .md, .tex, .csv, .json", "'x.bmp'"]),
        (["train", "-q", "-v"], ["--quiet and --verbose exclude each other"]),
        (["trian"], ["Unknown command 'trian'. Did you mean 'train'?"]),
        (["train", "--data", "cifar10", "--root", "/nowhere"], ["cifar"]),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(command, args, words):
    code, out, err = command(*args)
    assert code == 2
    assert out == ""
    *before, sentence = err.splitlines()
    assert not before or before[0].startswith("logitclip: training on ")
    assert len(before) <= 1
    assert sentence.startswith("logitclip: ")
    assert "Traceback" not in err
    for word in words:
        assert word in err


@pytest.mark.parametrize("args", [["trian"], ["bound", "--tau", "x"], ["list", "lossses"]])
def test_what_cannot_be_parsed_is_exit_code_2(command, args):
    assert command(*args)[0] == 2


@pytest.mark.parametrize("columns", ["40", "200"])
def test_what_cannot_be_parsed_is_not_wrapped_in_a_pipe(command, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    wrong = "a value that is longer than any line of a terminal would be, " * 4
    code, out, err = command("train", "--schedule", wrong)
    assert (code, out) == (2, "")
    assert repr(wrong) in err
    assert not set("╭│╰") & set(err)
    assert "logitclip train --help" in err.splitlines()[-1]


def test_auto_is_the_searched_temp_and_refused_before_anything_is_announced(command):
    code, out, err = command("train", "--clip", "auto")
    assert (code, out) == (2, "")
    assert err.startswith("logitclip: temp of the clip 'norm:temp=auto' is to be tuned")


def test_an_error_of_the_system_is_a_sentence(command, monkeypatch, tmp_path):
    def refuse(folder):
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr("logitclip.runs.listing.read_runs", refuse)
    said = f"logitclip: {tmp_path} cannot be used: Permission denied.\n"
    assert command("runs", "--runs", str(tmp_path)) == (2, "", said)


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT to one process")
@pytest.mark.parametrize("milliseconds", [60, 120, 240])
def test_an_early_interrupt_prints_no_traceback(milliseconds):
    """While modules are imported too."""
    code = "import os, threading, time\nfrom logitclip.__main__ import main\n"
    code += f"threading.Timer({milliseconds / 1000}, os.kill, (os.getpid(), 2)).start()\nmain()\ntime.sleep(1)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "import" not in done.stderr, done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal to one thread")
@pytest.mark.parametrize(("name", "expected"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_an_interrupt_in_a_destructor_is_not_lost(name, expected):
    code = f"""
import signal, time
from logitclip import cli
from logitclip.__main__ import main
from logitclip.cli.training import stop_on_sigterm

class Dying:
    def __del__(self):
        signal.raise_signal(signal.{name})

def work():
    stop_on_sigterm()
    Dying()
    time.sleep(1000)

cli.main = work
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400)
    assert (done.returncode, done.stdout, done.stderr) == (expected, "", "")


def test_files_that_are_too_deep_or_claim_too_much_are_one_sentence(command, tmp_path):
    deep = tmp_path / "deep.toml"
    deep.write_text("x = " + "[" * 5000 + "]" * 5000, encoding="utf-8")
    huge = tmp_path / "huge.npz"
    with zipfile.ZipFile(huge, "w") as archive:
        header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,), }"
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)
    for args in (
        ["report", str(deep)],
        ["train", "--config", str(deep)],
        ["train", "--data", f"table:path={huge},label=x", "-q"],
        ["noise", f"transition:matrix={huge}"],
        ["noise", f"file:path={huge}"],
    ):
        code, out, err = command(*args)
        assert (code, out) == (2, ""), err
        assert err.startswith("logitclip: ")
        assert err.count("\n") == 1


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_a_plugin_is_suggested_by_the_commands_that_take_one(command, name):
    assert cli._takes_plugins(name) == ("--plugin" in command(name, "--help")[1])


def test_a_recipe_with_a_loss_of_a_plugin_that_it_does_not_name_is_told_to_name_it(command, tmp_path):
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "study.toml").write_text('[grid]\nloss = ["mine"]\n')
    code, _, err = command("sweep", str(tmp_path / "study.toml"), "--plugin", str(tmp_path / "mine.py"))
    assert code == 2
    assert "Unknown loss 'mine'" in err
    assert '--plugin FILE.py, and in the recipe plugin = ["FILE.py"].' in " ".join(err.split())


@pytest.mark.parametrize("typed", ["noise mine", "noise none --data mine"])
def test_no_plugin_is_suggested_by_a_command_without_the_option(command, typed):
    code, _, err = command(*typed.split())
    assert code == 2
    assert "'mine'" in err
    assert "--plugin" not in err


def test_an_unexpected_error_is_one_sentence_with_the_place_of_the_traceback(command, monkeypatch):
    def broken(*, x: int = 1) -> None:
        """Break."""
        raise ZeroDivisionError(f"cannot divide by {x}\x1b[31m")

    monkeypatch.setitem(cli.COMMANDS, "broken", broken)
    code, out, err = command("broken")
    assert (code, out) == (70, "")
    assert err.startswith("logitclip: Unexpected ZeroDivisionError: cannot divide by 1␛[31m. The traceback is in ")
    assert err.count("\n") == 1
    file = Path(err.split()[-1].rstrip("."))
    assert "in broken" in file.read_text(encoding="utf-8")
    file.unlink()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("return {}['width']", "The plugin {}, line 4 raised KeyError: 'width'. The traceback is in "),
        ("a, b = 1, 2, 3", "too many values to unpack (expected 2) (raised in the plugin {}, line 4)"),
    ],
)
def test_an_error_in_a_plugin_names_its_line(command, tmp_path, line, told):
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from logitclip.models import MODELS\n"
        f"@MODELS.register\ndef broken_in_plugin(num_classes, in_features):\n    {line}\n",
        encoding="utf-8",
    )
    try:
        code, _, err = command("train", "--model", "broken_in_plugin", "--plugin", str(plugin), "-q")
    finally:
        MODELS._entries.pop("broken_in_plugin", None)
    assert code == 2
    assert told.format(plugin) in err
    if "traceback" in err:
        Path(err.split()[-1].rstrip(".")).unlink()


@pytest.mark.parametrize(
    ("command", "what"),
    [
        (["train"], "training on digits, loss ce, clip none, noise none"),
        (["tune"], "tuning on digits"),
        (["sweep", "quickstart"], "sweep of quickstart"),
    ],
)
def test_the_first_line_comes_before_torch(command, what, tmp_path):
    code = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        assert name != "torch"

sys.meta_path.insert(0, NoTorch())
from logitclip import cli
cli.main()
"""
    call = [sys.executable, "-c", code, *command, "--runs", "here"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # for the traceback
    done = subprocess.run(call, capture_output=True, text=True, cwd=tmp_path, env=environment)
    resume = "Ctrl-C saves and stops; repeat the command to resume."
    assert done.stderr.splitlines()[0] == f"logitclip: {what}; kept in here/. {resume}"


def test_help_is_quick_and_imports_no_torch():
    resource = pytest.importorskip("resource")  # not on Windows
    code = "import sys; sys.argv = ['logitclip', '--help']\nfrom logitclip import cli\n"
    code += "try: cli.main()\nexcept SystemExit: pass\nassert 'torch' not in sys.modules, 'torch was imported'"

    def seconds() -> float:  # CPU time, so that a busy machine does not matter
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert any(seconds() < 1.0 for _ in range(10))


@pytest.mark.parametrize(
    ("typed", "code"), [("list losses", 0), ("list losses --json", 0), ("list --help", 0), ("list data tabel", 2)]
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_closed_pipe_is_no_error(typed, code, unbuffered):
    reader, writer = os.pipe()
    os.close(reader)  # nobody reads the output
    call = [sys.executable, "-m", "logitclip", *typed.split()]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(call, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment)
    assert done.returncode == code
    assert len(done.stderr.splitlines()) == (code != 0)
    assert subprocess.run(call, stdout=writer, stderr=writer, env=environment).returncode == code
    os.close(writer)


def test_a_warning_is_printed_once():
    once = cli.Once()
    records = [logging.makeLogRecord({"msg": "skipped: %s", "args": (name,)}) for name in ("a", "b", "a")]
    assert [once.filter(record) for record in records] == [True, True, False]


def test_a_sweep_can_leave_out_what_is_missing(capsys, monkeypatch, tmp_path) -> None:
    recipe = tmp_path / "two.toml"
    recipe.write_text(
        '[base]\nepochs = 1\nlimit = 64\nmodel = "mlp:width=8,depth=1"\n[grid]\n'
        'data = ["digits", "table:path=nowhere.csv,label=kind"]\n',
        encoding="utf-8",
    )
    command = ("sweep", str(recipe), "--runs", str(tmp_path / "runs"), "--root", str(tmp_path), "--executor", "inline")
    code, _, err = run(capsys, monkeypatch, *command)
    assert code == 2
    assert "nowhere.csv" in err
    code, out, err = run(capsys, monkeypatch, *command, "--skip-missing")
    assert code == 0
    assert "left out: There is no file" in err
    assert "1 runs done" in out
    code, out, _ = run(capsys, monkeypatch, "report", str(recipe), "--runs", str(tmp_path / "runs"), "--strict")
    assert code == 0  # the table is that of the sweep
    assert "nowhere" not in out


def test_what_tune_prints_to_a_pipe_has_no_markup(capsys, monkeypatch, tmp_path) -> None:
    small = ("--limit", "64", "--epochs", "1", "--model", "mlp:width=8,depth=1", "--executor", "inline")
    code, out, _ = run(capsys, monkeypatch, "tune", "--loss", "gce:q=auto", *small, "--runs", str(tmp_path))
    assert code == 0
    assert out.startswith("Chosen: loss.q = 0.")
    code, _, err = run(capsys, monkeypatch, "tune", "--loss", "gce:q=auto", "--clip", "norm:temp=auto")
    assert code == 2
    assert "One value is tuned at a time: give temp in --clip norm:temp=auto a number, or sweep a recipe." in err
