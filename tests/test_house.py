"""The size of functions and files, the number of parameters, names, and old names that still work."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import logitclip as lc

SOURCE = Path(lc.__file__).parent
ROOT = Path(__file__).parents[1]
MODULES = {entry.stem for entry in SOURCE.iterdir()}
MOST_LINES, MOST_CODE, MOST_PARAMETERS = 600, 60, 8
# Public entry points and commands may have more parameters: all are options that a user names.
ENTRY_POINTS = {
    *("data.batches", "engine.fit", "own_data.fitting.fit", "theory.risk_gaps.all_bounds"),
    *("heads.layer.linear_cross_entropy", "heads.layer.LinearLogitClip.__init__"),
    "integrations.sklearn.LogitClipClassifier.__init__",
    *("cli.own_data.fit", "cli.own_data.issues", "cli.review.review", "cli.studies.sweep"),
}
# Words that end like participles, and are nouns, verbs or adjectives here.
NO_PARTICIPLES = {"counted", "shared", "seed", "embed", "speed", "need", "feed", "required", "learnt"}
ALLOWED = {
    "losses.other.unhinged",  # the name of a loss
    "theory.ranges._unhinged",
    "runs.config.RunConfig.resolved",  # the old name of `resolve`
}
OLD = {
    "logitclip.data": ("with_protocol", "with_defaults"),
    "logitclip.engine": ("make_fabric", "launch"),
    "logitclip.linear": ("gram_matrix", "heads"),
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions() -> Iterator[tuple[str, Function, list[str]]]:
    """The name with its module, the node and the lines of the file of each function."""
    for file in sorted(SOURCE.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        module = ".".join(file.relative_to(SOURCE).with_suffix("").parts)
        for name, node in _walk(ast.parse(text), module):
            yield name, node, text.splitlines()


def _walk(tree: ast.AST, where: str) -> Iterator[tuple[str, Function]]:
    for node in ast.iter_child_nodes(tree):
        name = f"{where}.{node.name}" if isinstance(node, Function | ast.ClassDef) else where
        if isinstance(node, Function):
            yield name, node
        yield from _walk(node, name)


def code_lines(node: Function, lines: list[str]) -> int:
    """The lines of a function without its docstring, comments and blank lines."""
    start, end = node.lineno, node.end_lineno or node.lineno
    doc = range(0)
    if ast.get_docstring(node) is not None:
        doc = range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    return sum(
        1
        for number in range(start, end + 1)
        if number not in doc and lines[number - 1].strip() and not lines[number - 1].lstrip().startswith("#")
    )


def knobs_of_a_registry(node: Function, name: str) -> bool:
    """Whether the parameters are options that a user names on the command line, as in `table:path=...`."""
    return any("register" in ast.unparse(decorator) for decorator in node.decorator_list) or "DivideMix" in name


def test_functions_and_files_are_short():
    files = {str(f): len(f.read_text(encoding="utf-8").splitlines()) for f in SOURCE.rglob("*.py")}
    assert {file: lines for file, lines in files.items() if lines > MOST_LINES} == {}
    lengths = {name: code_lines(node, lines) for name, node, lines in functions()}
    assert len(lengths) > 1000
    assert {name: length for name, length in lengths.items() if length > MOST_CODE} == {}


def test_few_parameters():
    found = set()
    for name, node, _ in functions():
        given = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        count = len([argument for argument in given if argument not in ("self", "cls")])
        if count > MOST_PARAMETERS and not knobs_of_a_registry(node, name):
            found.add(name.replace("data._loading", "data"))
    assert found <= ENTRY_POINTS


def test_no_function_is_named_by_a_bare_participle():
    names = [name for name, node, _ in functions() if not _is_flag(node)]
    last = {name: name.rpartition(".")[2].strip("_") for name in names}
    found = {name for name, word in last.items() if re.fullmatch(r"[a-z]+ed", word) and word not in NO_PARTICIPLES}
    assert found == ALLOWED


def _is_flag(node: Function) -> bool:
    """Whether it is an attribute: `facts.required` reads as an adjective, and says what it is."""
    return any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


def test_imports_follow_the_list_in_the_docs():
    listed = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    order = re.findall(r"^  (\w+)(?:\.py|/) ", listed, flags=re.MULTILINE)
    assert {"clip", "theory", "own_data"} < {*order}
    for file in SOURCE.rglob("*.py"):
        home = file.relative_to(SOURCE).parts[0].removesuffix(".py")
        if home.startswith("__"):
            continue
        for name in _imported(ast.parse(file.read_text(encoding="utf-8"))):
            assert name == home or order.index(name) < order.index(home), f"{file} imports {name}"


def test_the_walks_in_the_docs_name_what_is_there():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    walks = text[text.index("## The path of a batch") : text.index("## Adding one")]
    named = {name for name in re.findall(r"`([a-z_]+(?:\.\w+)+)`", walks) if not name.endswith(".jsonl")}
    assert {"criterion.LogitClip.forward", "own_data.source.look"} < named
    for name in named:
        parts = name.split(".")
        found: Any = importlib.import_module(f"logitclip.{parts[0]}")
        for i in range(1, len(parts)):
            if (SOURCE / "/".join(parts[: i + 1])).with_suffix(".py").is_file():  # a module, not a function of its name
                found = importlib.import_module(f"logitclip.{'.'.join(parts[: i + 1])}")
            else:
                assert hasattr(found, parts[i]), f"{name} is not there"
                found = getattr(found, parts[i])


def _imported(tree: ast.Module) -> Iterator[str]:
    """The parts of the package that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "logitclip":
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("logitclip."):
            yield (node.module or "").split(".")[1]


@pytest.mark.parametrize("module", OLD)
def test_old_names_work_and_warn(module):
    name, new = OLD[module]
    owner = importlib.import_module(module)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found: Any = getattr(owner, name)
        if name == "with_protocol":
            found = found({"epochs": 3})
    assert inspect.isfunction(found)
    assert [warning.category for warning in seen] == [DeprecationWarning]
    assert new in str(seen[0].message)


def test_an_old_method_works_and_warns():
    config = lc.RunConfig(data="digits", epochs=2)
    with pytest.warns(DeprecationWarning, match="resolve"):
        old = config.resolved()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert config.resolve() == old
