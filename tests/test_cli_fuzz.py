"""Commands with random options: every call ends within its time limit, with a documented exit code and no traceback."""

import contextlib
import dataclasses
import inspect
import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
import types
import typing
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from logitclip import cli
from logitclip.runs.config import RunConfig, registries

PATIENCE = 20.0  # time limit of a call in seconds, on an idle machine
CODES = {0, 2, 3, 4}

TEXTS = [
    *("", " ", "x", "none", "auto", "grid", "0", "-1", "nan", "inf", "1e300", "1e-300", "9" * 400, "a" * 5000),
    *("[/]", "[bold]", "%s", "{0}", "$HOME", "`id`", "../..", "/", "/dev/null", "/proc/self/mem", "~nobody/x", "C:\\x"),
    *(
        "\x1b[31mred",
        "a\tb",
        "a\nb",
        "\u202ereversed",
        "日本",
        "😀",
        "=1+1",
        "<script>",
        "a:b=c",
        ":",
        "=",
        ",",
        "a,b;c",
    ),
    *(
        "quickstart",
        "figure1",
        "table1",
        "digits",
        "my.csv",
        "x.toml",
        "x.json",
        "x.html",
        "Eq. 4",
        "ce",
        "norm",
        "mlp",
    ),
]
INTEGERS = ["-1", "0", "1", "2", "7", "1000000", str(2**31), str(2**63), str(2**64), "1.5", "x", "9" * 400]
FLOATS = [*INTEGERS, "0.5", "1e-300", "1e300", "-0.0", "nan", "inf", "-inf"]
# Valid values of these options may take long, start processes, use the network or compile.
FEW = {
    "epochs": ["-1", "0", "1", "2", "x"],
    "devices": ["-1", "0", "1", "1000"],
    "nodes": ["-1", "0", "1", "2"],
    "workers": ["-1", "0"],
    "executor": ["inline", "inlin"],
    "jobs": ["-1", "0", "1"],
    "trials": ["-1", "0", "1"],
    "address": ["x"],
    "mirror": ["", "nowhere", "~nobody"],
    "storage": ["study.db", "study.log", "/", "x://y"],
    "scale": ["smoke", "big", ""],
    "model": ["mlp:width=4,depth=1", "mlp:width=-1", "mlp:width=100000000000", "mlpp", "cnn:width=1", "wrn:depth=41"],
    "plugin": ["nowhere.py", "x", "/dev/null"],
}
LEFT_OUT = {"download", "compile", "tensorboard"}


# Positional arguments that make sense: files of `prepared`, names of recipes, registries, actions.
PLACES = {
    "recipe": ["own.toml", "own.toml", "quickstart", "figure1", "x.toml"],
    "data": ["my.csv", "my.csv", "own.toml"],
    "model": ["model", "model", "my.csv"],
    "spec": ["none", "symmetric:rate=0.5", "pair:rate=0.2", "instance:rate=0.4", "real"],
    "action": ["list", "show", "diff", "rm", "gc"],
    "ids": [*"0123456789abcdef"],  # the beginning of an id is enough
    "kind": ["losses", "noises", "data", "models", "methods", "clips", "recipes"],
    "name": ["ce", "gce", "digits", "mlp", "norm"],
    "item": ["Eq. 4", "Table 1", "Prop 2.1"],
}
NETWORK = ["--epochs", "1", "--model", "mlp:width=4,depth=1"]
USUAL = {  # options that a command needs, or that make it quick; those drawn later win
    "train": ["--limit", "24", *NETWORK],
    "tune": ["--limit", "24", *NETWORK, "--executor", "inline"],
    "sweep": ["--executor", "inline", "--scale", "smoke"],
    "report": ["--scale", "smoke"],
    "figures": ["--scale", "smoke", "--out", "x.svg"],
    "fit": ["--label", "y", "--clip", "none", *NETWORK],
    "issues": ["--label", "y", "--clip", "none", *NETWORK],
    "review": ["--report"],
    "apply": ["--out", "corrected.csv"],
    "bound": ["--tau", "1", "--classes", "10"],
}
OWN = """
[base]
epochs = 1
limit = 24
model = "mlp:width=4,depth=1"
[grid]
loss = ["ce", "gce"]
[scale.smoke]
"""


def parameters_of(name: str, positional: bool) -> list[str]:
    parameters = inspect.signature(cli.COMMANDS[name]).parameters.values()
    return [p.name for p in parameters if (p.kind is p.POSITIONAL_ONLY) == positional and p.name != "config"]


def options_of(name: str) -> dict[str, typing.Any]:
    """Return the options of a command and their types."""
    hints = typing.get_type_hints(cli.COMMANDS[name])
    options = {option: hints[option] for option in parameters_of(name, positional=False)}
    if "config" in hints:
        options |= typing.get_type_hints(RunConfig)
    for option in [option for option, kind in options.items() if dataclasses.is_dataclass(kind)]:
        options |= typing.get_type_hints(options.pop(option))
    return {option: kind for option, kind in options.items() if option not in LEFT_OUT}


def specs(field: str) -> st.SearchStrategy[str]:
    """Draw names of a registry with random knobs."""
    registry = registries()[field]
    names = [name for name in registry if field != "data" or name in ("digits", "table", "folder")]

    def with_knobs(name: str) -> st.SearchStrategy[str]:
        knobs = st.dictionaries(
            st.sampled_from([*registry.knobs(name), "x"]), st.sampled_from(FLOATS + TEXTS), max_size=2
        )
        return knobs.map(lambda given: name + ":" * bool(given) + ",".join(f"{k}={v}" for k, v in given.items()))

    return st.sampled_from(names).flatmap(with_knobs)


def values(option: str, kind: typing.Any) -> st.SearchStrategy[str]:
    """Draw values of an option by its type: valid, borderline and invalid ones."""
    if option in FEW:
        return st.sampled_from(FEW[option])
    kinds = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    if typing.get_origin(kinds[0]) is typing.Literal:
        return st.sampled_from([*map(str, typing.get_args(kinds[0])), "x"])
    texts = st.sampled_from(TEXTS)
    if option in registries():
        return st.one_of(specs(option), texts)
    numbers = {int: INTEGERS, float: FLOATS, bool: ["True", "False", "x"]}.get(kinds[0])
    return texts if numbers is None else st.sampled_from(numbers)


@st.composite
def calls(draw: st.DrawFn) -> list[str]:
    """Draw a command line. Most arguments make sense; training is quick unless an option makes it slower."""
    name = draw(st.sampled_from([*cli.COMMANDS, "train", "train", "train"]))
    options = options_of(name)
    places = [draw(st.sampled_from([*20 * PLACES[place], *TEXTS])) for place in parameters_of(name, True)]
    places = places[: draw(st.sampled_from([1, 2]))]  # the second may be left out
    places += [draw(st.sampled_from(TEXTS))] if draw(st.integers(0, 9)) == 0 else []
    words = [word for word in places if not word.startswith("-")] + USUAL.get(name, [])
    for option in draw(st.lists(st.sampled_from(sorted(options)), max_size=4, unique=True)) if options else []:
        flag = f"--{option.replace('_', '-')}"
        if options[option] is not bool:
            words += [flag, draw(values(option, options[option]))]
        elif option in RunConfig.__annotations__:
            words.append(draw(st.sampled_from([flag, f"--no-{flag[2:]}"])))
        else:
            words.append(flag)
    return [name, *words]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a table, a recipe, its runs and a model."""
    folder = tmp_path_factory.mktemp("prepared")
    rows = "".join(f"{i},{i % 7},{'no' if i % 3 else 'yes'}\n" for i in range(60))
    (folder / "my.csv").write_text("a,b,y\n" + rows, encoding="utf-8")
    (folder / "own.toml").write_text(OWN, encoding="utf-8")
    for call in (
        ["sweep", "own.toml", *USUAL["sweep"], "--runs", "runs"],
        ["fit", "my.csv", *USUAL["fit"], "--out", "model"],
    ):
        with contextlib.chdir(folder), mock.patch.object(sys, "argv", ["logitclip", *call]):
            cli.main()
    return folder


def ended(code: int, err: str, seconds: float, call: list[str]) -> None:
    assert code in CODES, (call, code, err[-2000:], traceback_in(err))
    assert "Traceback" not in err, (call, err)
    busy = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    assert seconds < PATIENCE * busy, (call, seconds)


def traceback_in(err: str) -> str:
    """Return the content of the traceback file, if one was written."""
    file = Path(err.rsplit("The traceback is in ", 1)[-1].strip().rstrip("."))
    return file.read_text(encoding="utf-8") if file.suffix == ".txt" and file.exists() else ""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_calls_in_this_process(prepared):
    @settings(
        max_examples=int(os.environ.get("FUZZ", "1000")),
        derandomize=True,
        deadline=None,
        phases=[Phase.generate],  # to shrink a slow call would take longer than to read it
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(call=calls())
    def check(call: list[str]) -> None:
        out, err, begin, code = io.StringIO(), io.StringIO(), time.monotonic(), 0
        with (
            tempfile.TemporaryDirectory() as place,
            contextlib.chdir(shutil.copytree(prepared, f"{place}/here")),
            mock.patch.dict(os.environ, {"LOGITCLIP_RUNS": "runs", "LOGITCLIP_DATA": "data"}),
            mock.patch.object(sys, "argv", ["logitclip", *call]),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            try:
                cli.main()
            except SystemExit as end:
                code = int(end.code or 0)
        ended(code, err.getvalue(), time.monotonic() - begin, call)

    check()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fifty_calls_as_processes(prepared, tmp_path):
    drawn: list[list[str]] = []

    @settings(max_examples=50, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(call=calls())
    def draw(call: list[str]) -> None:
        drawn.append(call)

    draw()
    for i, call in enumerate(word for word in drawn if not any("\0" in part for part in word)):
        folder = shutil.copytree(prepared, tmp_path / str(i))
        begin = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "logitclip", *call],
            cwd=folder,
            env={**os.environ, "LOGITCLIP_RUNS": "runs", "LOGITCLIP_DATA": "data"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        ended(done.returncode, done.stderr, time.monotonic() - begin, call)
