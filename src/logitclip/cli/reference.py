"""Commands that look things up: list, paper, noise, bound."""

from __future__ import annotations

import ast
import inspect
import math
import re
import sys
import tomllib
import typing
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import docstring_parser
from rich.markup import escape
from tyro.conf import Positional, arg

from logitclip.cli.options import File, Flag, Number, Plugins, Root, Text
from logitclip.cli.output import make_table, put, show, show_json
from logitclip.files import Json
from logitclip.registry import Registry, show_value, suggest
from logitclip.runs.config import RunConfig, registries
from logitclip.runs.plugins import load_plugins

Name = Annotated[Positional[str], arg(help_behavior_hint="")]  # may be left out
RegistryName = Literal[
    "losses", "clips", "penalties", "noises", "data", "encoders", "augments", "models", "methods", "recipes"
]
_OPTIONS = {  # kind -> the option that such a name is given by
    "losses": "loss",
    "clips": "clip",
    "penalties": "penalty",
    "noises": "noise",
    "data": "data",
    "encoders": "encoder",
    "augments": "augment",
    "models": "model",
    "methods": "method",
}


def list_names(kind: Positional[RegistryName], name: Name = "", /, *, plugin: Plugins = (), json: Flag = False) -> None:
    """List the losses, clips, noises, datasets, networks, methods or recipes, or explain one of them.

    Example: logitclip list losses, or logitclip list data table

    Args:
        kind: What to list: losses, clips, penalties, noises, data, encoders, augments, models, methods or recipes.
        name: One of them, to show its knobs: what may be written after the colon of a spec.
        plugin: Python files with your own losses, models or datasets.
        json: Print a JSON object instead of a table.
    """
    load_plugins(plugin)
    if kind == "recipes":
        if name:
            raise ValueError(f"A recipe has no knobs: `logitclip report {name}` shows its table.")
        _list_recipes(json)
        return
    registry = registries()[_OPTIONS[kind]]
    if name:
        _explain_name(registry, name, json)
        return
    rows = {name: registry.describe(name) for name in registry}
    if json:
        show_json({name: {"spec": spec, "summary": summary} for name, (spec, summary) in rows.items()})
        return
    table = make_table(kind.capitalize(), "spec, with its defaults", "what it is")
    for name, (spec, summary) in rows.items():
        shown = escape(spec).replace(name, f"[bold]{name}[/]", 1).replace(",", ", ")
        table.add_row(shown, escape(summary.replace("`", "")))
    show(table)
    show(f"`logitclip list {kind} NAME` explains the knobs of one.")


def _explain_name(registry: Registry, name: str, json: bool) -> None:
    """Show the knobs of one name, with the help in its docstring."""
    spec, _ = registry.describe(name)
    doc = docstring_parser.parse(inspect.getdoc(registry[name]) or "")
    helps = knob_helps(registry[name])
    rows = [
        {
            "knob": knob.name,
            "type": "|".join(
                "none" if kind is type(None) else getattr(kind, "__name__", str(kind))
                for kind in typing.get_args(knob.annotation) or (knob.annotation,)
            ),
            "default": "required" if knob.required else knob.default,
            "help": helps.get(knob.name, ""),
        }
        for knob in registry.knobs(name).values()
    ]
    about = " ".join(filter(None, [doc.short_description, doc.long_description]))
    settings: dict[str, str] = getattr(registry[name], "settings", {})
    if json:
        show_json({"spec": spec, "about": about, "knobs": rows} | ({"settings": settings} if settings else {}))
        return
    show(f"[bold]{escape(spec)}[/]\n\n{escape(about)}")
    for dataset, options in settings.items():
        show(f"its authors on {escape(dataset)}: --loss {escape(options)}")
    if rows:
        table = make_table("", "knob", "type", "default", "what it is")
        for row in rows:
            default = row["default"] if row["default"] == "required" else show_value(row["default"])
            table.add_row(row["knob"], escape(row["type"]), escape(default), escape(row["help"]))
        show(table)


def knob_helps(function: Callable[..., object]) -> dict[str, str]:
    """Return the help of each knob: the Args in the docstring of a function, or of the `__init__` of a class."""
    home = function.__init__ if inspect.isclass(function) else function
    doc = f"Knobs.\n\n{inspect.getdoc(home)}"  # without a summary, the parser finds no Args
    entries = docstring_parser.parse(doc).params
    return {
        knob.strip(): " ".join((entry.description or "").split())
        for entry in entries
        for knob in entry.arg_name.split(",")
    }


def _list_recipes(json: bool) -> None:
    from logitclip.studies.recipe import load_recipe, recipe_names, recipe_scales

    described: dict[str, Json] = {}
    for name in recipe_names():
        scales = [load_recipe(name, scale) for scale in recipe_scales(name)]
        described[name] = {about: getattr(scales[0], about) for about in ("paper", "title", "about")}
        described[name]["runs"] = {recipe.scale: len(recipe.cells) for recipe in scales}
    if json:
        show_json(described)
        return
    table = make_table("Recipes", "recipe", "paper", "what it is", "runs by scale")
    for name, recipe in described.items():
        runs = ", ".join(f"{scale} {count}" for scale, count in recipe["runs"].items())
        table.add_row(f"[bold]{name}[/]", recipe["paper"] or "", escape(recipe["title"]), runs)
    show(table)
    show("Without the trials that choose a value. `logitclip sweep NAME --scale SCALE` runs one; your own by path.")


def bound(
    *,
    tau: float,
    classes: int,
    delta: Number = None,
    p: float = math.inf,
    loss: str = "ce",
    noise: Text = None,
    data: Text = None,
    json: Flag = False,
) -> None:
    """Print the paper's bounds for a clip, loss and noise, and mark the smallest that applies.

    Example: logitclip bound --tau 1 --classes 10 --noise symmetric:rate=0.5

    Args:
        tau: Threshold on the norm of the logits.
        classes: Number of classes, K.
        delta: Norm of clipped logits; tau if not given.
        p: Order of the norm. The paper states its bounds for inf; those for a smaller p are sharper.
        loss: A loss spec such as gce:q=0.7.
        noise: One of symmetric:rate=R, asymmetric:rate=R, pair:rate=R, instance:rate=R and transition:matrix=FILE.
        data: The dataset whose classes asymmetric noise confuses, as in cifar10; otherwise each class becomes the next.
        json: Print a JSON list instead of a table.
    """
    from logitclip import theory
    from logitclip.losses import LOSSES

    loss_name, loss_knobs = LOSSES.parse(loss)
    rows = theory.all_bounds(
        tau, classes, delta=delta, p=p, loss=loss_name, knobs=loss_knobs, **_describe_noise(noise, classes, data)
    )
    if json:
        show_json([{**asdict(row), "applies": row.applies} for row in rows])
        return
    scale = "" if delta is None else f", delta = {delta:g}"
    title = f"tau = {tau:g}{scale}, p = {p:g}, K = {classes}"
    table = make_table(title, "", "quantity", "bound", "paper", "lower", "upper")
    for row in rows:
        style = "bold green" if row.smallest else "" if row.applies else "dim"
        name = row.name if row.applies else f"{row.name}: {row.reason}"
        ends = (f"{row.lower:.6g}", f"{row.upper:.6g}") if row.applies else ("-", "-")
        table.add_row("*" if row.smallest else "", row.quantity, name, row.paper, *ends, style=style)
    show(table)
    show("[bold green]*[/] the smallest that applies. f~ minimises the noisy risk R^eta, f* the clean risk R.")


def paper(item: Name = "", /) -> None:
    """Show the code or the recipe behind an item of the paper, or list all items.

    Example: logitclip paper "Eq. 4", or logitclip paper "Table 1"

    Args:
        item: An equation, proposition, theorem, table, figure or comparison: "Eq. 4", "Thm E.1", "Table 1", "ReLU6".
    """
    homes = _find_homes()
    if not item:
        table = make_table("The paper in the code", "item", "name", "file", whole=("file",))
        for tag, home in sorted(homes.items(), key=lambda pair: _natural_key(pair[0])):
            table.add_row(tag, home.name, f"{home.file}:{home.line}")
        show(table)
        return
    known = {_normalise(tag): tag for tag in homes}
    if _normalise(item) not in known:
        raise ValueError(f"The code has no item {item!r} of the paper. {suggest(item, homes)}")
    tag = known[_normalise(item)]
    home = homes[tag]
    show(f"[bold]{tag}[/] is [bold]{home.name}[/] in src/logitclip/{home.file}, line {home.line}\n")
    put(home.doc, sys.stdout)


def noise(
    spec: Positional[str],
    /,
    *,
    data: str = "digits",
    root: Root = None,
    noise_seed: int = 0,
    download: Flag = False,
    mirror: Text = None,
    save: File = None,
    json: Flag = False,
) -> None:
    """Preview label noise: its rate, the rate of each class, and the transition matrix.

    Example: logitclip noise --data digits symmetric:rate=0.5

    Args:
        spec: The noise, as in symmetric:rate=0.5; see `logitclip list noises`.
        data: The dataset, as in cifar10; see `logitclip list data`.
        noise_seed: Seed of the label noise.
        download: Download the data if it is missing.
        mirror: Download it from this folder or address instead of the official one.
        save: Also save the labels to this path, as .npz and .json; file:path=... reads them back.
        json: Print a JSON object instead of a table.
    """
    from logitclip import data as datasets
    from logitclip import noise as noises
    from logitclip.cli.terminal import noise_preview

    noises.NOISES.parse(spec)  # check the spec before the data
    RunConfig(noise_seed=noise_seed)  # and the seed
    load = partial(datasets.load, root=root, download=download or mirror is not None, mirror=mirror)
    dataset = load(data)
    record = noises.apply(spec, dataset, noise_seed, load=load)
    if save is not None:
        record.save(save)
    if json:
        show_json(record.describe())
    else:
        show(noise_preview(record, dataset.class_names))


def _describe_noise(spec: str | None, classes: int, data: str | None) -> Json:
    """Return the noise as `theory.all_bounds` takes it: by name and rate, or as a transition matrix."""
    from logitclip.data.dataset import asymmetric_of, classes_of
    from logitclip.noise import NOISES, arrow_matrix, read_matrix

    name, knobs = NOISES.parse(spec or "none")
    arrows = None if data is None else asymmetric_of(data)
    if data is not None and name != "asymmetric":
        raise ValueError("--data tells which classes asymmetric noise confuses; it needs --noise asymmetric:rate=...")
    known = None if data is None else classes_of(data)
    if known not in (None, classes):
        raise ValueError(f"{data} has {known} classes, so --classes must be {known}, got {classes}.")
    if spec is None:
        return {}
    if name == "transition":
        return {"noise": name, "transition": read_matrix(knobs["matrix"]).tolist()}
    if name == "asymmetric":
        variant = knobs.get("variant", "map")
        if variant == "pairs":
            raise ValueError(
                "The pairs of asymmetric noise are drawn at random: give a matrix, transition:matrix=FILE."
            )
        if variant == "blocks" or arrows is not None:
            mapping = arrows if variant == "map" else None
            matrix = arrow_matrix(classes, rate=knobs["rate"], variant=variant, mapping=mapping)
            return {"noise": "transition", "transition": matrix.tolist()}
    share = (classes - 1) / classes if knobs.get("include_self") else 1.0  # of the redrawn labels that become wrong
    return {"noise": name, "rate": share * knobs["rate"] if "rate" in knobs else None}


class _Home(NamedTuple):
    """Where an item of the paper is."""

    name: str
    file: str
    line: int
    doc: str


def _find_homes() -> dict[str, _Home]:
    """Find the functions and classes with a line `Paper: ...` in their docstrings, and the recipes, without imports."""
    root, homes = Path(__file__).parents[1], dict[str, _Home]()
    for file in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                doc = ast.get_docstring(node) or ""
                for line in doc.splitlines():
                    if line.startswith("Paper: "):
                        home = _Home(node.name, str(file.relative_to(root)), node.lineno, doc)
                        tags = line.removeprefix("Paper: ").rstrip(".").split(",")
                        homes |= {tag.strip(): home for tag in tags}
    for file in sorted((root / "recipes").glob("*.toml")):
        recipe = tomllib.loads(file.read_text(encoding="utf-8"))
        if "paper" in recipe:
            next_steps = f"logitclip sweep {file.stem} --scale cpu\nlogitclip report {file.stem} --scale cpu"
            doc = f"{recipe['title']}. {recipe.get('about', '')}\n\n{next_steps}"
            homes[recipe["paper"]] = _Home(f"the recipe {file.stem}", str(file.relative_to(root)), 1, doc)
    return homes


def _natural_key(item: str) -> list[tuple[int, str]]:
    """Return a sort key that puts Table 2 before Table 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", item)]


def _normalise(item: str) -> str:
    words = {"equation": "eq", "proposition": "prop", "theorem": "thm", "fig": "figure", "tab": "table"}
    text = item.lower().replace(".", " ").split()
    return " ".join(words.get(word, word) for word in text)
