"""Recipes: the paper's tables and figures as data files, and the loader that turns them into runs.

A recipe is a TOML file. Every key is optional, unless noted::

    title = "Robust losses on CIFAR-10"
    about = "A sentence or two."
    paper = "Table 1"
    tune_seed = 0                # tune each cell on this seed, for all seeds; "each": tune every seed separately

    [base]                       # fields of RunConfig
    loss = "ce"

    [grid]                       # the cells are the product of these axes: fields of RunConfig or your own names
    clip = ["none", "norm:temp=grid"]
    noise = ["symmetric:rate=0.5", "real"]
    seed = [0, 1, 2]             # loss = ["*"]: every loss, also those of plugins, with its main knob tuned

    [variant.real]               # a value of an axis with such a section stands for these fields
    noise = "real:set=worst"

    [[override]]                 # the only conditional: changes what runs, never the coordinates
    when = { noise = "real", clip = ["norm:temp=grid"] }     # a list: any of these
    set = { clip = "norm:temp=2.5" }                         # or `skip = true`: leave the cell out

    [table]                      # all axes but seed; cells are statistics, see `measures.MEASURES`
    rows = ["clip"]
    cols = ["noise"]
    cells = ["last10_accuracy"]

    [figure]                     # for `logitclip figures`; kind is one of
    kind = "lines"               #   lines: y over the number in x; bars: y in groups x;
                                 #   ranks: mean ranks of the rows over the columns x, with a `colour` for an axis;
    x = "clip"                   #   bounds: no runs, Prop 2.1's bounds for the `classes` = [K, ...], `tau` = [from, to]
    y = "last10_accuracy"
    panel = "noise"              #   lines and bars: a panel for each value of this axis; other axes get colours
    reference = "none"           #   lines only: draw this value of x as a horizontal line
    reciprocal = "tau"           #   lines only: plot over 1 / the number in x, under this name

    [scale.cpu]                  # `--scale cpu`: other fields, other values of axes, further overrides
    data = "digits"
    [scale.cpu.grid]
    noise = ["symmetric:rate=0.5"]
    [[scale.cpu.override]]
    when = { clip = "none" }
    set = { epochs = 100 }

``norm:temp=published`` is the temp of Table 6 for the data and the noise of a cell.

Later settings win, in this order: base, scale, axes and their variants, overrides, overrides of the scale, options of
the command line. The scale `full` always exists; without a section [scale.full] it is the recipe without any scale.
Each seed draws its own noise, because `noise_seed` follows `seed` unless the recipe sets it.

To compare your own method with the paper's, add a variant with a plugin::

    [variant.mine]
    loss = "my_loss:knob=2"
    plugin = ["my_loss.py"]
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import math
import os
import re
import shlex
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from logitclip.files import Json
from logitclip.registry import Registry, suggest
from logitclip.runs.config import TUNABLE, RunConfig, registries, words_to_tune
from logitclip.runs.plugins import check_plugins, imports_plugins, load_plugins
from logitclip.studies.measures import MEASURES, PER_EXAMPLE

RECIPES = Path(__file__).parents[1] / "recipes"
FIGURES = Registry("figure", package="logitclip.studies")  # the knobs of a kind are the keys of [figure]
_FIELDS = {field.name: object for field in fields(RunConfig) if field.name != "runs"}  # the sweep sets it
MOST_CELLS = 100_000
_PUBLISHED = "norm:temp=published"
Value = str | int | float | None  # of an axis: a canonical spec, the name of a variant, a plain value, or none
Coordinates = Mapping[str, Value]  # axis -> value
Grid = dict[str, dict[Value, Value]]  # axis -> canonical value -> value as written
Draft = tuple[Json, Json]  # coordinates and fields of a cell


@dataclass(frozen=True)
class Cell:
    """One run of a recipe: its coordinates and its config, in which one number may still have to be tuned."""

    coordinates: Coordinates
    config: RunConfig
    own_noise: bool = True  # each seed draws its own


@dataclass(frozen=True)
class Recipe:
    """A recipe at one scale."""

    name: str
    title: str
    about: str
    paper: str | None
    scale: str
    tune_seed: int | None  # None: tune every seed separately
    rows: tuple[str, ...]
    cols: tuple[str, ...]
    statistics: tuple[str, ...]
    figure: Json | None
    cells: tuple[Cell, ...]
    arguments: str = ""  # the command-line arguments it was loaded with
    changes: Json = field(default_factory=dict)  # fields that the command line sets in every cell
    digest: str = ""  # of the recipe's file
    ids: Mapping[RunConfig, str] | None = None  # of the runs, as the sweep computed them; see `manifest`

    def command(self, task: str = "sweep") -> str:
        """Return the shell command that runs the recipe, or another command for it."""
        words = [word for name, value in self.changes.items() for word in _as_arguments(name, value)]
        words += [word for file in self.plugins for word in ("--plugin", file)]
        more = f" {shlex.join(words)}" if words and task == "sweep" else ""
        return f"logitclip {task} {self.arguments or self.name}{more}"

    @property
    def plugins(self) -> tuple[str, ...]:
        """The plugins that its runs use, which `sweep` must be allowed to import."""
        return tuple(dict.fromkeys(file for cell in self.cells for file in cell.config.plugin))

    def data(self) -> list[tuple[str, str | None]]:
        """Return the datasets of its runs and their folders, with human labels if the noise uses them."""
        from logitclip.data import DATASETS
        from logitclip.studies.tuning import with_value

        needed: dict[tuple[str, str | None], str] = {}
        for config in (cell.config for cell in self.cells):
            needed.setdefault((config.data, config.root), config.data)
            if config.noise.partition(":")[0] == "real" and "human" in DATASETS.knobs(config.data.partition(":")[0]):
                needed[config.data, config.root] = with_value(config, "data.human", "true").data
        return [(spec, root) for (_, root), spec in needed.items()]

    def to_tune(self, cell: Cell) -> RunConfig:
        """Return the config that is tuned for this cell: that of the seed to tune on, or the cell's own."""
        if self.tune_seed is None:
            return cell.config
        noise_seed = self.tune_seed if cell.own_noise else cell.config.noise_seed
        return replace(cell.config, seed=self.tune_seed, noise_seed=noise_seed)


def _as_arguments(name: str, value: object) -> list[str]:
    """Return an option of a run as the command line of a sweep reads it.

    >>> _as_arguments("batch_size", 64), _as_arguments("milestones", (0.4, 0.7)), _as_arguments("compile", True)
    (['--batch-size', '64'], ['--milestones', '0.4,0.7'], ['--compile'])
    """
    if value is True and getattr(RunConfig, name) is False:  # a switch
        return [f"--{name.replace('_', '-')}"]
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return [f"--{name.replace('_', '-')}", text]


@dataclass(frozen=True)
class Published:
    """A number of the paper, with its place in the table of the recipe at full scale."""

    coordinates: Mapping[str, str]
    statistic: str
    value: float
    std: float | None


def recipe_names() -> list[str]:
    """Return the recipes that come with the package.

    >>> "table1" in recipe_names()
    True
    """
    by_number = [(re.sub(r"\d+", lambda n: n[0].zfill(3), file.stem), file.stem) for file in RECIPES.glob("*.toml")]
    return [name for _, name in sorted(by_number)]


def recipe_scales(recipe: str) -> list[str]:
    """Return the scales of a recipe, smallest first; `full` always exists."""
    return _scale_names(_read_file(recipe)[1])


@cache
def read_published(name: str) -> tuple[Published, ...]:
    """Return the paper's numbers for a recipe; none for recipes that are not the paper's.

    >>> read_published("table8")[0].value
    75.9
    """
    with (RECIPES / "published.csv").open(encoding="utf-8", newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["recipe"] == name]
    return tuple(
        Published(
            {k: v for k, v in row.items() if v and k not in ("recipe", "statistic", "value", "std")},
            row["statistic"],
            float(row["value"]),
            float(row["std"]) if row["std"] else None,
        )
        for row in rows
    )


def load_recipe(
    recipe: str,
    scale: str = "full",
    *,
    runs: str = "runs",
    root: str | None = None,
    plugin: Sequence[str] = (),
    changes: Json | None = None,
) -> Recipe:
    """Return the recipe of that name, or in that .toml file, at one scale.

    Args:
        runs: The folder for the folders of runs.
        root: The folder of the data, instead of the recipe's or the default one.
        plugin: The plugins that the recipe may name; others are refused, because plugins are code.
        changes: Fields of `RunConfig` to set in every cell, whatever the recipe says.

    Raises:
        ValueError: If there is no such recipe or scale, or what it says cannot be run.

    >>> len(load_recipe("quickstart").cells)
    36
    >>> {cell.config.epochs for cell in load_recipe("quickstart", changes={"epochs": 2}).cells}
    {2}
    """
    name, content, digest = _read_file(recipe)
    folders = {"runs": runs} | ({} if root is None else {"root": root})
    try:
        built = _build_recipe(name, content, scale, folders, dict(changes or {}), plugin)
    except ValueError as error:
        raise ValueError(f"Recipe {name}: {error}") from error
    words = [*(["--runs", runs] if runs != "runs" else []), *(["--root", root] if root is not None else [])]
    return replace(built, digest=digest, arguments=shlex.join([recipe, "--scale", scale, *words]))


# -- reading -----------------------------------------------------------------------------------------------------------


def _read_file(recipe: str) -> tuple[str, Json, str]:
    """Return the name of a recipe, its content, and the digest of its file."""
    file = Path(os.path.expanduser(recipe)) if recipe.endswith(".toml") else RECIPES / f"{recipe}.toml"
    if not recipe.endswith(".toml") and recipe not in (known := recipe_names()):
        raise ValueError(f"Unknown recipe {recipe!r}. {suggest(recipe, known)} Or give the path of a .toml file.")
    if not file.is_file():
        raise ValueError(f"There is no recipe file {recipe}.")
    try:
        text = file.read_text(encoding="utf-8")
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, or nested too deep
        raise ValueError(f"The recipe {file} is not valid TOML: {error}.") from error
    sections = {"base": dict, "grid": dict, "variant": dict, "override": list, "table": dict, "figure": dict}
    texts = {"title": str, "about": str, "paper": str}
    _check_keys(content, f"the recipe {file.stem}", **texts, tune_seed=(int, str), **sections, scale=dict)
    return file.stem, content, hashlib.sha256(text.encode()).hexdigest()


def _scale_names(content: Json) -> list[str]:
    order = {"smoke": 0, "cpu": 1, "mini": 2, "full": 9}
    return sorted({*content.get("scale", {}), "full"}, key=lambda name: (order.get(name, 3), name))


def _check_keys(section: object, where: str, /, **allowed: type | tuple[type, ...]) -> Json:
    """Return the section if it has only allowed keys, each with a value of an allowed type."""
    if not isinstance(section, dict):
        raise ValueError(f"{where} must be a section with keys, got {section!r}.")
    words = {str: "text", int: "a whole number", list: "a list", dict: "a section", bool: "true or false"}
    for key, value in section.items():
        if key not in allowed:
            raise ValueError(f"Unknown key {key!r} in {where}. {suggest(key, allowed)}")
        kind = allowed[key]
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if object not in kinds and type(value) not in kinds:  # not isinstance: a bool is not an int here
            wanted = " or ".join(words[kind] for kind in kinds)
            raise ValueError(f"{key} in {where} must be {wanted}, got {value!r}.")
    return section


def _build_recipe(name: str, content: Json, scale: str, folders: Json, changes: Json, plugin: Sequence[str]) -> Recipe:
    """Return the recipe at one scale, from the content of its file; every section is checked."""
    tune_seed = None if content.get("tune_seed") == "each" else content.get("tune_seed", 0)
    if tune_seed is not None and (isinstance(tune_seed, str) or tune_seed < 0):
        raise ValueError(f'tune_seed must be a whole number of at least 0 or "each", got {tune_seed!r}.')
    if scale not in _scale_names(content):
        raise ValueError(f"There is no scale {scale!r}. Known: {', '.join(_scale_names(content))}.")
    place = f"scale.{scale}"
    own = _check_keys(content.get("scale", {}).get(scale, {}), f"[{place}]", **_FIELDS, grid=dict, override=list)
    fixed = dict(_check_keys(content.get("base", {}), "[base]", **_FIELDS))
    fixed |= {key: value for key, value in own.items() if key in _FIELDS}
    variants = {k: _check_keys(v, f"[variant.{k}]", **_FIELDS) for k, v in content.get("variant", {}).items()}
    for section in (fixed, *variants.values()):  # they may register names that the rest of the recipe uses
        named = RunConfig(plugin=section.get("plugin", ())).plugin
        check_plugins(named, plugin, "it")
        load_plugins(named)

    full = _read_grid(content.get("grid", {}), "grid", variants)
    known = dict.fromkeys(full, list)
    grid = full | _read_grid(_check_keys(own.get("grid", {}), f"[{place}.grid]", **known), f"{place}.grid", variants)
    for key in sorted(fixed.keys() & grid.keys()):
        raise ValueError(f"{key} is an axis of the grid: it cannot be set in [base] or [{place}] as well.")
    for axis in sorted(changes.keys() & grid.keys()):
        raise ValueError(f"{axis} is an axis of the grid, so it cannot be set for all cells.")
    if (count := math.prod(map(len, grid.values()))) > MOST_CELLS:
        raise ValueError(f"The grid has {count:,} cells, and a recipe has at most {MOST_CELLS:,}: leave out values.")
    figure = _read_figure(content.get("figure"), grid)
    theory = figure is not None and "x" not in figure  # it shows no runs
    cells = [] if theory else list(_make_drafts(grid, fixed | folders, variants))
    for override in content.get("override", []):
        cells = _apply_override(cells, override, "[[override]]", grid, full)
    for override in own.get("override", []):
        cells = _apply_override(cells, override, f"[[{place}.override]]", grid, grid)
    rows, cols, statistics = _read_table(content.get("table"), grid)
    if "per_example" not in changes and not theory:
        _check_per_example(statistics, [values for _, values in cells])
    return Recipe(
        name=name,
        title=content.get("title", name),
        about=content.get("about", ""),
        paper=content.get("paper"),
        scale=scale,
        tune_seed=tune_seed,
        rows=rows,
        cols=cols,
        statistics=statistics,
        figure=figure,
        cells=tuple(
            Cell(coordinates, _make_config({**values, **changes}), "noise_seed" not in {**values, **changes})
            for coordinates, values in cells
        ),
        changes=changes,
    )


def _check_per_example(statistics: Sequence[str], cells: Sequence[Json]) -> None:
    for name in (name for name in statistics if name in PER_EXAMPLE):
        if not all(values.get("per_example") for values in cells):
            raise ValueError(f"{name} in [table] needs the records of single examples: per_example = true in [base].")


# -- cells -------------------------------------------------------------------------------------------------------------


def _read_grid(section: Json, where: str, variants: Mapping[str, Json]) -> Grid:
    """Return the axes with their values in canonical spelling."""
    grid = {}
    for axis, values in section.items():
        values = _every_loss() if axis == "loss" and values == ["*"] else values
        if not isinstance(values, list) or not values:
            raise ValueError(f"{axis} in [{where}] must be a list of one value or more, got {values!r}.")
        for value in values:
            if not isinstance(value, str | int | float):
                raise ValueError(f"A value of {axis} in [{where}] must be text or a number, got {value!r}.")
            if axis not in _FIELDS and value not in variants:
                raise ValueError(
                    f"{axis!r} in [{where}] is not a field of a run, so its values need sections, and there is no "
                    f"[variant.{value}]. {suggest(axis, _FIELDS)}"
                )
        grid[axis] = {value if value in variants else _canonical(axis, value): value for value in values}
        if len(grid[axis]) < len(values):
            raise ValueError(f"{axis} in [{where}] has a value twice: {values}.")
    return grid


def _every_loss() -> list[str]:
    """Return every loss, also those of plugins, with its main knob to be tuned."""
    from logitclip.losses import LOSSES

    main = {name: next(iter(LOSSES[name].tune), None) for name in LOSSES}
    return [name if knob is None else f"{name}:{knob}=auto" for name, knob in main.items()]


def _make_drafts(grid: Grid, fixed: Json, variants: Mapping[str, Json]) -> Iterator[Draft]:
    """Yield the coordinates and fields of each cell: the product of the axes, before any override."""
    for values in itertools.product(*grid.values()):
        coordinates = dict(zip(grid, values, strict=True))
        chosen: Json = {}
        for axis, value in coordinates.items():
            # As written: where a method has presets, a knob at its default is not the same as no knob.
            own = variants[value] if isinstance(value, str) and value in variants else {axis: grid[axis][value]}
            for key, setting in own.items():
                if key in chosen:
                    raise ValueError(f"{axis} = {value!r} sets {key}, which another axis of the grid sets as well.")
                chosen[key] = setting
        yield coordinates, {**fixed, **chosen}


def _apply_override(cells: list[Draft], override: Json, where: str, grid: Grid, possible: Grid) -> list[Draft]:
    """Return the cells after one override. `possible` are the values that `when` may name."""
    _check_keys(override, where, when=dict, set=dict, skip=bool)
    if "when" not in override or ("set" in override) == override.get("skip", False):
        raise ValueError(f"{where} needs `when = {{...}}` and either `set = {{...}}` or `skip = true`, got {override}.")
    when, change = override["when"], _check_keys(override.get("set", {}), where, **_FIELDS)
    _check_keys(when, f"`when` of {where}", **dict.fromkeys(grid, object))
    wanted = {}
    for axis, value in when.items():
        values = value if isinstance(value, list) else [value]
        known = grid[axis] | possible[axis]
        if not all(isinstance(v, str | int | float) for v in values):
            raise ValueError(f"`when` of {where} must have a value of {axis} or a list of them, got {value!r}.")
        wanted[axis] = [v if v in known else _canonical(axis, v) for v in values]
        for missed in [v for v in wanted[axis] if v not in known]:
            raise ValueError(
                f"{where} matches nothing: {axis} is never {missed!r}. {suggest(str(missed), map(str, known))}"
            )
    kept = []
    for coordinates, values in cells:
        if all(coordinates[axis] in values for axis, values in wanted.items()):
            if not override.get("skip"):
                kept.append((coordinates, {**values, **change}))
        else:
            kept.append((coordinates, values))
    return kept


def _make_config(values: Json) -> RunConfig:
    """Return the config of a cell, with the published temp filled in; a config that cannot be run is refused."""
    from logitclip.studies.tuning import fast_search

    config = RunConfig(**values)
    if config.clip == _PUBLISHED:
        temp = _published_temps().get(_key_of_temp(config.data, config.noise))
        if temp is None:
            raise ValueError(
                f"Table 6 has no temp for {config.data} with the noise {config.noise}: give a number, or tune it."
            )
        config = replace(config, clip=f"norm:temp={temp:g}")
    for name, registry in registries().items():
        spec = getattr(config, name)
        if spec is not None and not config.plugin:
            registry[registry.split(spec)[0]]  # rejects an unknown name
        _canonical(name, spec)  # rejects a wrong spec
    for name, knob, _ in words_to_tune(config):
        fast_search(config, f"{name}.{knob}")  # rejects an option without a search
    return replace(config, noise_seed=values.get("noise_seed", config.seed))


@cache
def _published_temps() -> dict[tuple[str, str], float]:
    """Return the paper's best temp of CE for each dataset and noise of Table 6."""
    temps = {(n.coordinates["data"], n.coordinates["noise"]): n.value for n in read_published("table6")}
    return {
        _key_of_temp(cell.config.data, cell.config.noise): temps[
            str(cell.coordinates["data"]), str(cell.coordinates["noise"])
        ]
        for cell in load_recipe("table6").cells
    }


def _key_of_temp(data: str, noise: str) -> tuple[str, str]:
    return data.partition(":")[0], _canonical("noise", noise)


def _canonical(field: str, value: Any) -> Any:
    """Return one spelling for a spec; other values as they are."""
    if not isinstance(value, str) or field not in registries():
        return value
    if not imports_plugins() and not registries()[field].knows(value):
        return value  # it may be a plugin's
    return _canonical_spec(field, value)


@cache
def _canonical_spec(field: str, spec: str) -> str:
    words = r"=\s*(grid|auto|published)\s*(?=,|$)"
    numbered = re.sub(words, "=1", spec) if field in TUNABLE else spec
    canonical = registries()[field].canonical(numbered)  # rejects unknown knobs
    return canonical if numbered == spec else spec  # a value to tune stays as written


# -- tables and figures ------------------------------------------------------------------------------------------------


def _read_table(section: Json | None, grid: Grid) -> tuple[tuple[str, ...], ...]:
    """Return rows, columns and statistics; without a section, a row for each cell."""
    section = _check_keys(section or {}, "[table]", rows=list, cols=list, cells=list)
    shown = [axis for axis in grid if axis != "seed"]
    rows, cols = section.get("rows"), section.get("cols", [])
    if rows is None:
        rows = [axis for axis in shown if axis not in cols]
    for axis in (*rows, *cols):
        if axis not in shown:
            raise ValueError(f"[table] has {axis!r}, which is not an axis of the grid. {suggest(str(axis), shown)}")
    for axis in shown:
        if [*rows, *cols].count(axis) != 1 and len(grid[axis]) > 1:
            raise ValueError(f"The axis {axis!r} must be in rows or in cols of [table], once.")
    statistics = section.get("cells", ["last10_accuracy"])
    if not statistics:
        raise ValueError(f"cells in [table] must be one statistic or more of {', '.join(MEASURES)}; got none.")
    for name in statistics:
        _check_statistic(name, "[table]")
    if "rank" in statistics and "last10_accuracy" not in statistics:
        raise ValueError("cells in [table] has rank, which needs last10_accuracy as well.")
    return tuple(rows), tuple(cols), tuple(statistics)


def _read_figure(section: Json | None, grid: Grid) -> Json | None:
    """Return the section [figure], if its keys are those of its kind."""
    if section is None:
        return None
    kind = section.get("kind")
    if not isinstance(kind, str) or kind not in FIGURES:
        raise ValueError(f"kind in [figure] must be one of {', '.join(FIGURES)}; got {kind!r}.")
    knobs = FIGURES.knobs(kind)
    types = {knob.name: typing.get_origin(knob.annotation) or knob.annotation for knob in knobs.values()}
    _check_keys(section, f"[figure] of kind {kind}", kind=str, **types)
    for knob in knobs.values():
        if knob.required and knob.name not in section:
            raise ValueError(f"[figure] of kind {kind} needs {knob.name}.")
    axes = [axis for axis in grid if axis != "seed"]  # a point is a mean over the seeds
    for key in ("x", "panel", "colour"):
        if key in section and section[key] not in axes:
            raise ValueError(
                f"{key} in [figure] is not an axis of the figure: {section[key]!r}. It has {', '.join(axes)}."
            )
    if "y" in section:
        _check_statistic(section["y"], "[figure]")
    classes, tau = section.get("classes", [2]), section.get("tau", [1, 2])
    if not classes or not all(type(k) is int and k >= 2 for k in classes):
        raise ValueError(f"classes in [figure] must be whole numbers of at least 2, got {classes}.")
    if [type(end) in (int, float) for end in tau] != [True, True] or not 0 < tau[0] < tau[1]:
        raise ValueError(f"tau in [figure] must be two positive numbers, [from, to], got {tau}.")
    return section


def _check_statistic(name: object, where: str) -> None:
    if name not in MEASURES:
        raise ValueError(f"Unknown statistic {name!r} in {where}. {suggest(str(name), MEASURES)}")
