"""The options that commands share: those of a run, in groups, read from a file if --config names one."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import json
import os
import sys
import tomllib
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro
from tyro.conf import FlagCreatePairsOff, Positional, arg

from logitclip.files import Json
from logitclip.registry import suggest
from logitclip.runs import config as config_module
from logitclip.runs.config import RunConfig
from logitclip.runs.plugins import check_plugins

T = TypeVar("T")
Flag = Annotated[FlagCreatePairsOff[bool], arg(help_behavior_hint="")]  # without a --no- form
Text = Annotated[str | None, arg(metavar="TEXT", help_behavior_hint="")]
File = Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")]
OptionalInt = Annotated[int | None, arg(metavar="INT", help_behavior_hint="")]
Number = Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")]
Plugins = Annotated[tuple[str, ...], arg(metavar="FILE", help_behavior_hint="")]
Root = Annotated[File, arg(help="The folder with the data; $LOGITCLIP_DATA or ./data if not given.")]
Runs = Annotated[File, arg(help="The folder with the runs; $LOGITCLIP_RUNS or ./runs if not given.")]
ModelFolder = Annotated[Positional[Path], arg(help="The model folder.")]
ModelPlugins = Annotated[Plugins, arg(help="Python files with the model's own encoder, loss or network.")]
Quiet = Annotated[Flag, arg(aliases=["-q"], help="Print no progress.")]
Verbose = Annotated[Flag, arg(aliases=["-v"], help="Print more: a line for every epoch, and the log.")]

Executor = Annotated[  # the names are checked later: their module imports torch
    str,
    arg(metavar="NAME", help_behavior_hint="(default: local)"),
]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where runs are made."""

    executor: Executor = "local"
    """Where to run: processes on this machine (local), only this process (inline), or a Ray cluster (ray)."""
    jobs: OptionalInt = None
    """Number of runs at the same time; as many as fit if not given."""
    per_device: int = 1
    """Number of runs that share a GPU."""
    address: Text = None
    """The address of a Ray cluster, or auto; without it, Ray is started on this machine."""


def run_options() -> Callable[..., RunConfig]:
    """Make a function from groups of options to a `RunConfig`, which tyro calls with the parsed command line."""
    defaults = _read_defaults()
    group_of = config_module.notes_of(config_module.Group)
    groups = {}
    for group in config_module.Group:
        names = tuple(name for name, its in group_of.items() if its is group)
        kind = _make_group(group.value, names, defaults)
        groups[group.value.replace(" ", "_")] = Annotated[kind, arg(name=group.value)]

    def build(**typed: object) -> RunConfig:
        values = {name: value for group in typed.values() for name, value in vars(group).items()}
        file = values.pop("config")  # the defaults hold its content, except plugins
        if file is not None:
            check_plugins(read_config(file).get("plugin", ()), values["plugin"], str(file))
        return RunConfig(**_spell_out(values))

    return _with_options(build, groups)


def change_options() -> Callable[..., Json]:
    """Make a function from options of a run to the fields that were given, which a sweep sets in every run."""
    kept = ("root", "runs", "plugin")  # options of the sweep itself
    hints, helps, defaults = config_module.field_types(), _read_helps(), RunConfig()
    options: Json = {}  # annotations
    for name in (field.name for field in dataclasses.fields(RunConfig) if field.name not in kept):
        if getattr(defaults, name) is False:  # a switch
            options[name] = Annotated[Flag, arg(help=helps[name])]
            continue
        hint = str if name == "milestones" else hints[name]
        hint = hint if type(None) in typing.get_args(hint) else hint | None
        options[name] = Annotated[hint, arg(help=helps[name], metavar=_format_metavar(hint), help_behavior_hint="")]

    unset = {name: False if getattr(defaults, name) is False else None for name in options}

    def build(**given: object) -> Json:
        named = _spell_out({name: value for name, value in given.items() if value is not unset[name]})
        return {name: getattr(RunConfig(**{name: value}), name) for name, value in named.items()}

    return _with_options(build, options, unset)


def _with_options(build: Callable[..., T], options: Json, unset: Json | None = None) -> Callable[..., T]:
    """Give a function the keywords that tyro reads, with their annotations and defaults."""
    keyword, none = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    build.__annotations__ = dict(options)
    build.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, keyword, default=(unset or {}).get(name, none), annotation=kind)
            for name, kind in options.items()
        ]
    )
    return build


RunOptions = Annotated[RunConfig, arg(constructor_factory=run_options, name="")]
ChangeOptions = Annotated[Json, arg(constructor_factory=change_options, name="every run")]


def _spell_out(values: Json) -> Json:
    """Write the clip `auto` in full: the temp of a clip by norm is searched.

    >>> _spell_out({"clip": "auto", "lr": 0.1})
    {'clip': 'norm:temp=auto', 'lr': 0.1}
    """
    return values | ({"clip": "norm:temp=auto"} if values.get("clip") == "auto" else {})


def _make_group(title: str, names: tuple[str, ...], defaults: RunConfig) -> type:
    """Make a dataclass of some fields of `RunConfig`, with their help and the given defaults."""
    hints, helps = config_module.field_types(), _read_helps()
    fields = []
    for name in names:
        hint, default = hints[name], getattr(defaults, name)
        if name == "milestones":  # one word, as in 0.4,0.7
            hint, default = str | None, None if default is None else ",".join(map(str, default))
        more: Json = {}
        if type(None) in typing.get_args(hint):
            more["metavar"] = _format_metavar(hint)
        if default is None:
            more["help_behavior_hint"] = "" if name == "root" else functools.partial(_describe_default, name)
        elif default == ():
            more["help_behavior_hint"] = ""
        fields.append((name, Annotated[hint, arg(help=helps[name], **more)], default))
    if title == "running":
        about = "A file with options: run.toml, or the config.json of a run. Options on the command line win."
        fields.insert(
            0, ("config", Annotated[Path | None, arg(help=about, metavar="FILE", help_behavior_hint="")], None)
        )
    group = dataclasses.make_dataclass(title.replace(" ", "_"), fields)
    group.__doc__ = ""
    return group


def _format_metavar(hint: Any) -> str:
    """Return how the help shows an option that may default to the dataset's value.

    >>> _format_metavar(int | None), _format_metavar(typing.Literal["cosine", "constant"] | None)
    ('INT', '{cosine,constant}')
    """
    kind, _ = typing.get_args(hint)
    choices = ("True", "False") if kind is bool else typing.get_args(kind)
    return "{" + ",".join(choices) + "}" if choices else kind.__name__.upper()


@functools.cache
def _read_helps() -> dict[str, str]:
    """Return the docstring of each field of `RunConfig`."""
    (body,) = (node.body for node in ast.parse(inspect.getsource(RunConfig)).body if isinstance(node, ast.ClassDef))
    pairs = itertools.pairwise(body)
    return {
        field.target.id: ast.literal_eval(text.value)
        for field, text in pairs
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr)
    }


# -- defaults ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _First:
    """The options that decide the defaults of the others."""

    config: Path | None = None
    data: str = "digits"


@functools.cache
def _parse_first(arguments: tuple[str, ...]) -> _First:
    return tyro.cli(_First, args=arguments, return_unknown_args=True, add_help=False)[0]


def _read_defaults() -> RunConfig:
    """Return the defaults: those of the file of --config, if given, and $LOGITCLIP_RUNS."""
    path = _parse_first(tuple(sys.argv[2:])).config
    values = {} if path is None else read_config(path)
    RunConfig(**values)  # refuse values of a wrong type
    values.pop("plugin", None)  # code: it has to be named on the command line
    return RunConfig(**{"runs": str(runs_folder()), **values})


def read_config(path: Path) -> Json:
    """Read the options in a TOML file or in the config.json of a run.

    The folder of runs and the digest in a config.json are ignored, because this is another run.
    """
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise ValueError(f"The file of --config, {path}, cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is neither TOML (a name that ends in .toml) nor JSON: {error}.") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold options of a run by name, as in lr = 0.1.")
    if path.suffix != ".toml":
        for name in ("runs", "digest"):
            values.pop(name, None)
    known = {field.name for field in dataclasses.fields(RunConfig)}
    for name in values.keys() - known:
        raise ValueError(f"{path} has an unknown option {name!r}. {suggest(name, known)}")
    return values


def runs_folder(given: Path | None = None) -> Path:
    """Return the folder of runs: the given one, $LOGITCLIP_RUNS, or ./runs."""
    return given or Path(os.environ.get("LOGITCLIP_RUNS") or "runs")


def _describe_default(field: str, _: str) -> str:
    """Return the help for an option whose default depends on the dataset."""
    data = _parse_first(tuple(sys.argv[2:])).data
    try:
        default = getattr(_resolve_defaults(data), field)
        return f"(default for {data}: {','.join(map(str, default)) if isinstance(default, tuple) else default})"
    except (ValueError, OSError, ImportError):
        return "(default: the dataset's)"


@functools.cache
def _resolve_defaults(data: str) -> RunConfig:
    return RunConfig(data=data).resolve()
