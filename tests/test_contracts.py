"""Contracts of everything in a registry, of the paper's items and of the public names."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
import types
import typing
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import logitclip
from logitclip import losses
from logitclip.cli.reference import knob_helps
from logitclip.clip import CLIPS, PENALTIES
from logitclip.data import AUGMENTS, DATASETS
from logitclip.encoders import ENCODERS
from logitclip.losses import LOSSES
from logitclip.methods import METHODS
from logitclip.models import MODELS
from logitclip.noise import NOISES
from logitclip.registry import Knob, Registry

SOURCE = Path(logitclip.__file__).parent
REGISTRIES = (LOSSES, CLIPS, PENALTIES, NOISES, DATASETS, ENCODERS, AUGMENTS, MODELS, METHODS)
ENTRIES = [pytest.param(registry, name, id=f"{registry.kind}-{name}") for registry in REGISTRIES for name in registry]


def test_no_registry_is_left_out() -> None:
    files = [file for file in SOURCE.rglob("*.py") if file.parent.name != "studies"]  # a run has no kind of figure
    made = [file for file in files for _ in re.findall(r"(?m)^\w+ = \w*Registry\(", file.read_text(encoding="utf-8"))]
    assert len(made) == len(REGISTRIES)


# -- everything that has a name ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("registry", "name"), ENTRIES)
def test_entry_is_named_and_described(registry: Registry, name: str) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name)
    lines = (inspect.getdoc(registry[name]) or "").splitlines()
    assert lines, "no docstring"
    assert re.fullmatch(r"[A-Z].*[.:]", lines[0]), "the first line is a sentence by itself"
    assert lines[1:2] in ([], [""]), "the summary is one line"
    assert registry.describe(name)[1] == lines[0]


@pytest.mark.parametrize(("registry", "name"), ENTRIES)
def test_knobs_have_help(registry: Registry, name: str) -> None:
    helps = knob_helps(registry[name])
    assert [knob for knob in registry.knobs(name) if not helps.get(knob)] == []


@pytest.mark.parametrize(("registry", "name"), ENTRIES)
def test_knobs_are_annotated_with_what_a_spec_can_say(registry: Registry, name: str) -> None:
    readable = {float, int, bool, str, types.NoneType, Any}  # Any: a string that the function interprets
    written = inspect.signature(registry[name]).parameters
    for knob in registry.knobs(name).values():
        assert written[knob.name].annotation is not inspect.Parameter.empty, knob
        parts = typing.get_args(knob.annotation) if _is_union(knob.annotation) else (knob.annotation,)
        for part in parts:
            assert part in readable or typing.get_origin(part) is typing.Literal, knob
        assert knob.required or knob.default is None or any(_is_a(knob.default, part) for part in parts), knob


@pytest.mark.parametrize(("registry", "name"), ENTRIES)
def test_specs_round_trip(registry: Registry, name: str) -> None:
    knobs = registry.knobs(name)
    given = {k: _sample(knob) for k, knob in knobs.items() if knob.required}
    text = ",".join(f"{k}={v}" for k, v in given.items())
    spec = f"{name}:{text}" if text else name
    assert registry.canonical(spec) == spec
    values = {k: given.get(k, knob.default) for k, knob in knobs.items()}
    full = registry.format(name, values)
    assert registry.parse(full) == (name, values)
    assert registry.canonical(full) == spec
    with pytest.raises(ValueError, match="has no knob 'no_such_knob'"):
        registry.parse(f"{spec}{',' if text else ':'}no_such_knob=1")


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _is_a(value: Any, part: Any) -> bool:
    if typing.get_origin(part) is typing.Literal:
        return value in typing.get_args(part)
    return type(value) is part


def _sample(knob: Knob) -> Any:
    for part in (knob.annotation, *typing.get_args(knob.annotation)):
        if typing.get_origin(part) is typing.Literal:
            return typing.get_args(part)[-1]
        if part in (int, float, str, Any):
            return {int: 3, float: 0.25, str: "word", Any: "word"}[part]
    raise AssertionError(knob)


# -- losses ------------------------------------------------------------------------------------------------------------

PROMISED = ["ce", "focal", "mae", "phuber_ce", "rce", "sce", "gce", "taylor_ce", "nce", "ael", "aul", "agce", "cores"]
PROMISED += [
    "nce_mae",
    "nce_agce",
    "nce_rce",
    "anl_ce",
    "anl_fl",
    "eps_ce_mae",
    "eps_focal_mae",
    "amse",
    "jal_ce",
    "jal_fl",
]
PROMISED += ["ogc_ce", "ogc_focal", "ogc_gce", "nfl", "js", "ldr_kl", "bi_tempered", "poly1", "unhinged"]
PROMISED += ["bootstrap_soft", "bootstrap_hard", "forward", "backward"]


def test_all_promised_losses_exist() -> None:
    assert set(PROMISED) <= set(LOSSES)
    for name in LOSSES:
        assert getattr(losses, name) is LOSSES[name]
        assert list(inspect.signature(LOSSES[name]).parameters)[:2] == ["logits", "target"]


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_names_its_paper_and_says_when_to_take_it(name: str) -> None:
    doc = inspect.getdoc(LOSSES[name]) or ""
    assert re.search(r"(?m)^When: \w", doc)
    if not re.search(r"(?m)^Paper: Eq", doc):
        assert re.search(
            r"Reference: [^()]+ \(\d{4}\), .+(arXiv \d{4}\.\d{4,5}|[A-Z][\w ]+ \d+)\.", doc.replace("\n", " ")
        )


@pytest.mark.parametrize("name", LOSSES)
def test_the_settings_of_authors_are_options_that_train_takes(name: str) -> None:
    function: Any = LOSSES[name]
    for options in function.settings.values():
        spec, *others = options.split(" --")
        assert LOSSES.parse(spec)[0] == name
        for option in others:
            key, value = option.split(" ")
            assert key in ("penalty", "weight-decay")
            assert key != "penalty" or PENALTIES.parse(value)


def test_clip_words_belong_to_the_clip_alone() -> None:
    for registry in (LOSSES, NOISES, METHODS, AUGMENTS, DATASETS, MODELS):
        for name in registry:
            assert not {"tau", "delta", "p", "temp"} & set(registry.knobs(name)), name


# -- the paper ---------------------------------------------------------------------------------------------------------

HOMES = {
    "Eq. 1": "ce",
    "Eq. 2": "ce_bound_from_gap",
    "Eq. 3": "clip_logits",
    "Eq. 4": "clip_logits",
    "Prop 2.1": "loss_bounds",
    "Thm 2.2": "symmetric_risk_gap",
    "Thm 2.3": "asymmetric_risk_gap",
    "Prop 2.4": "lipschitz_loss_bound",
    "Thm E.1": "instance_risk_gap",
    "LC-V": "clip_by_value",
    "LogitNorm": "logit_norm",
    "Norm Regularization": "norm_penalty",
    "ReLU6": "make_activation",
    "gradient clipping": "update",
}


def test_each_item_of_the_paper_has_one_home() -> None:
    homes = []
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                for line in re.findall(r"(?m)^Paper: (.*)\.$", ast.get_docstring(node) or ""):
                    homes += [(tag, node.name) for tag in line.split(", ")]
    assert {tag: name for tag, name in homes if tag in HOMES} == HOMES
    assert max(Counter(tag for tag, _ in homes).values()) == 1


# -- the public names --------------------------------------------------------------------------------------------------

USES = {
    "LinearLogitClip": "lc.LinearLogitClip(3, 3, tau=1.0)(z, y)",
    "LogitClip": "lc.LogitClip('ce', tau=1.0)(z, y)",
    "Loss": "lc.Loss('gce:q=0.7')(z, y)",
    "Result": "lc.Result.__doc__",
    "RunConfig": "lc.RunConfig(data='digits')",
    "build_criterion": "lc.build_criterion('ce', 'softcap:cap=1')(z, y)",
    "clip_by_value": "lc.clip_by_value(z, 1.0)",
    "clip_hidden": "lc.clip_hidden(z, z, tau=1.0)",
    "clip_logits": "lc.clip_logits(z, 1.0)",
    "data": "lc.data.load",
    "extended_logit_norm": "lc.extended_logit_norm(z, z)",
    "find_issues": "lc.find_issues.__doc__",
    "fit": "lc.fit.__doc__",
    "l1_penalty": "lc.l1_penalty([z])",
    "linear_cross_entropy": "lc.linear_cross_entropy(z, z, y, tau=1.0)",
    "load": "lc.load.__doc__",
    "logit_norm": "lc.logit_norm(z, 1.0)",
    "losses": "lc.losses.gce(z, y, q=0.7)",
    "models": "lc.models.build('mlp', 3, (4,))",
    "engine": "lc.engine.fit.__doc__",
    "noise": "lc.noise.symmetric(y, 3, rate=0.5, generator=torch.Generator().manual_seed(0))",
    "norm_penalty": "lc.norm_penalty(z)",
    "softcap": "lc.softcap(z, 1.0)",
    "z_penalty": "lc.z_penalty(z)",
    "theory": "lc.theory.loss_bounds(1.0, 10)",
    "train": "lc.train.__doc__",
    "tune": "lc.tune.__doc__",
}


def _python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_public_names_work_twice_and_after_the_command_line_is_imported() -> None:
    assert set(USES) == set(logitclip.__all__)
    uses = "\n".join(USES.values())
    _python(
        "import torch, logitclip as lc\n"
        "z, y = torch.eye(3), torch.tensor([0, 1, 2])\n"
        f"{uses}\n{uses}\nimport logitclip.cli\n{uses}\n"
        "import pkgutil, importlib\n"  # no module may shadow a public function of the same name
        "[importlib.import_module(f'logitclip.{m.name}') for m in pkgutil.iter_modules(lc.__path__)]\n"
        f"{uses}\n"
    )


def test_public_names_are_listed_and_others_are_not_there() -> None:
    assert sorted(logitclip.__all__) == logitclip.__all__
    assert set(logitclip.__all__) <= set(dir(logitclip))
    modules = {file.stem for file in SOURCE.glob("*.py")} | {file.parent.name for file in SOURCE.glob("*/__init__.py")}
    for name in logitclip.__all__:
        value = getattr(logitclip, name)
        assert value is getattr(logitclip, name)
        assert isinstance(value, types.ModuleType) == (name in modules)
    with pytest.raises(AttributeError, match="has no attribute 'clip_logit'"):
        logitclip.clip_logit  # noqa: B018


def test_importing_takes_few_modules_and_leaves_torch_alone() -> None:
    new = _python("import sys; before = set(sys.modules); import logitclip; print(*set(sys.modules) - before)").split()
    assert "logitclip" in new
    assert not {"torch", "numpy", "tyro", "rich"} & set(new)
    assert len(new) < 60  # all but one are of the standard library


@pytest.mark.parametrize("module", ["logitclip.registry"])
def test_what_needs_no_torch_does_not_import_it(module: str) -> None:
    _python(f"import sys, {module}; assert 'torch' not in sys.modules")


# Modules with public names: those in `__all__`, or (losses) all that `dir` shows.
PUBLIC = (
    *("", "data", "engine", "losses", "methods.base", "models", "noise", "own_data", "registry", "search", "theory"),
    *(f"integrations.{library}" for library in ("huggingface", "lightning", "sklearn", "skorch")),
)


def _public() -> dict[str, Any]:
    """Return every public function and class by its (shortest) full name."""
    found: dict[str, Any] = {"losses.loss": losses.loss}  # not in dir(losses), which shows losses alone
    for path in PUBLIC:
        module = importlib.import_module(f"logitclip.{path}".rstrip("."))
        for name in getattr(module, "__all__", None) or dir(module):
            value = getattr(module, name)
            if (inspect.isroutine(value) or inspect.isclass(value)) and value not in found.values():
                found[f"{path}.{name}".lstrip(".")] = value
    return found


def _documented(doc: str, *sections: str) -> set[str]:
    """Return the names that the sections of a docstring explain."""
    names: set[str] = set()
    for text in re.findall(rf"(?m)^(?:{'|'.join(sections)}):\n((?:    .*\n|\n)+)", doc + "\n"):
        for entry in re.findall(r"(?m)^    (\**\w+(?:, \**\w+)*):", text):
            names |= {name.strip("* ") for name in entry.split(",")}
    return names


@pytest.mark.parametrize(("name", "value"), [pytest.param(*item, id=item[0]) for item in _public().items()])
def test_public_names_are_documented(name: str, value: Any) -> None:
    """A name has Args (or Attributes), Returns, an example that runs as a doctest, and a place in the docs."""
    doc, source = inspect.getdoc(value) or "", inspect.getsource(value)
    explained = _documented(doc, "Args", "Attributes")
    explained |= set(re.findall(r'(?m)^    (\w+): .*\n    """', source))  # a docstring below a field
    takes_arguments = not inspect.isclass(value) or {"__init__", "__new__"} & set(vars(value))
    if takes_arguments and not getattr(value, "_is_protocol", False):
        assert set(inspect.signature(value).parameters) - explained == set(), "not explained"
    assert ">>> " in doc, "no example"
    module = re.escape(f"logitclip.{name}".rpartition(".")[0])
    pages = (SOURCE.parents[1] / "docs" / "reference").glob("*.md")
    reference = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert re.search(rf"(?m):: {module}\.{value.__name__}$|automodule:: {module}$", reference), "not in the reference"
    if inspect.isclass(value):
        members = {key: member for key, member in vars(value).items() if not key.startswith("_")}
        members = {key: member for key, member in members.items() if callable(member) or isinstance(member, property)}
        assert [key for key, member in members.items() if not inspect.getdoc(member)] == [], "no docstring"
        return
    if inspect.signature(value).return_annotation not in (None, "None"):
        assert re.search(r"(?m)^(Returns|Yields):$", doc), "no Returns"


def _raising() -> dict[str, Any]:
    """Return the functions of the reference, and the methods of its classes, that raise something themselves."""
    shown = dict(_public())
    for page in (SOURCE.parents[1] / "docs" / "reference").glob("*.md"):
        for path in re.findall(r"auto(?:function|class):: logitclip\.(\S+)", page.read_text(encoding="utf-8")):
            module, _, name = f"logitclip.{path}".rpartition(".")
            shown[path] = getattr(importlib.import_module(module), name)
    found: dict[str, Any] = {}
    for path, value in shown.items():
        methods = vars(value).items() if inspect.isclass(value) else [("", value)]
        found |= {f"{path}.{key}".rstrip("."): f for key, f in methods if key[:1] != "_" and inspect.isfunction(f)}
    return {name: f for name, f in found.items() if re.search(r"\braise \w", inspect.getsource(f))}


@pytest.mark.parametrize(("name", "value"), [pytest.param(*item, id=item[0]) for item in _raising().items()])
def test_what_raises_says_so_in_the_reference(name: str, value: Any) -> None:
    assert re.search(r"(?m)^Raises:$", inspect.getdoc(value) or ""), name
