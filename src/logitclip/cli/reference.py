"""Commands that look things up: list, paper, noise, bound."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional

from logitclip.cli.options import File, Flag, Text
from logitclip.cli.output import show, show_json
from logitclip.config import RunConfig
from logitclip.progress import make_table

Kind = Literal["losses", "clips", "penalties", "noises", "data", "augments", "models", "methods", "recipes"]
_REGISTRIES: dict[str, tuple[str, str]] = {
    "losses": ("losses", "LOSSES"),
    "clips": ("clip", "CLIPS"),
    "penalties": ("clip", "PENALTIES"),
    "noises": ("noise", "NOISES"),
    "data": ("data", "DATASETS"),
    "augments": ("data", "AUGMENTS"),
    "models": ("models", "MODELS"),
    "methods": ("methods", "METHODS"),
}


def list_names(kind: Positional[Kind], /, *, json: Flag = False) -> None:
    """List what can be named, with its knobs: losses, clips, noises, data, models, methods, recipes and so on.

    Args:
        kind: What to list.
        json: Print a JSON object instead of a table.
    """
    import importlib

    from rich.markup import escape

    if kind == "recipes":
        _list_recipes(json)
        return
    module, name = _REGISTRIES[kind]
    registry = getattr(importlib.import_module(f"logitclip.{module}"), name)
    rows = {name: registry.describe(name) for name in registry}
    if json:
        show_json({name: {"spec": spec, "summary": summary} for name, (spec, summary) in rows.items()})
        return
    table = make_table(kind.capitalize(), "spec, with its defaults", "what it is")
    for name, (spec, summary) in rows.items():
        table.add_row(spec.replace(name, f"[bold]{name}[/]", 1).replace(",", ", "), escape(summary.replace("`", "")))
    show(table)


def _list_recipes(json: bool) -> None:
    from rich.markup import escape

    from logitclip.studies.recipe import load_recipe, recipe_names, recipe_scales

    loaded = {name: [load_recipe(name, scale) for scale in recipe_scales(name)] for name in recipe_names()}
    if json:
        described = {
            name: {
                "paper": scales[0].paper,
                "title": scales[0].title,
                "about": scales[0].about,
                "runs": {recipe.scale: len(recipe.cells) for recipe in scales},
            }
            for name, scales in loaded.items()
        }
        show_json(described)
        return
    table = make_table("Recipes", "recipe", "paper", "what it is", "runs by scale")
    for name, scales in loaded.items():
        runs = ", ".join(f"{recipe.scale} {len(recipe.cells)}" for recipe in scales)
        table.add_row(f"[bold]{name}[/]", scales[0].paper or "", escape(scales[0].title), runs)
    show(table)
    show("Not counted: trainings to choose a value. `logitclip sweep NAME --scale SCALE` runs one; own ones by path.")


def bound(
    *,
    tau: float,
    classes: int,
    delta: float | None = None,
    p: float = math.inf,
    loss: str = "ce",
    noise: Text = None,
    json: Flag = False,
) -> None:
    """Print every bound of the paper for one clip, loss and noise, and the smallest that applies.

    Example: logitclip bound --tau 1 --classes 10 --noise symmetric:rate=0.5

    Args:
        tau: Threshold on the norm of the logits.
        classes: Number of classes, K.
        delta: Norm of clipped logits; tau if not given.
        p: Which norm; the paper prints its bounds for inf, and for smaller p sharper ones are shown beside them.
        loss: A loss spec such as gce:q=0.7.
        noise: symmetric:rate=R, asymmetric:rate=R, pair:rate=R, instance:rate=R or transition:matrix=FILE.
        json: Print a JSON object instead of a table.
    """
    from logitclip import theory

    loss_name, loss_knobs = _loss_for_theory(loss)
    rows = theory.all_bounds(
        tau, classes, delta=delta, p=p, loss=loss_name, knobs=loss_knobs, **_noise_for_theory(noise, classes)
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


def paper(item: Positional[str] = "", /) -> None:
    """Show where the code keeps a numbered item of the paper, or list them all.

    Example: logitclip paper "Eq. 4"

    Args:
        item: An equation, proposition or theorem, as in "Eq. 4", "Prop 2.1" or "Thm E.1".
    """
    from logitclip.registry import suggest

    homes = {tag: home for home in _tagged() for tag in home[0]}
    if not item:
        table = make_table("The paper in the code", "item", "function", "file")
        for tag, (_, name, file, line, _doc) in sorted(homes.items()):
            table.add_row(tag, name, f"{file}:{line}")
        show(table)
        return
    known = {_normalised(tag): tag for tag in homes}
    if _normalised(item) not in known:
        raise ValueError(f"No home for {item!r} in the code. {suggest(item, homes)}")
    tag = known[_normalised(item)]
    _, name, file, line, doc = homes[tag]
    show(f"[bold]{tag}[/] is [bold]{name}[/] in src/logitclip/{file}, line {line}\n")
    print(doc)


def noise(
    spec: Positional[str],
    /,
    *,
    data: str = "digits",
    root: File = None,
    noise_seed: int = 0,
    download: Flag = False,
    mirror: Text = None,
    save: File = None,
    json: Flag = False,
) -> None:
    """Preview a label noise: its rate, the rates of the classes, and the transition matrix.

    Example: logitclip noise --data digits symmetric:rate=0.5

    Args:
        spec: The noise, as in symmetric:rate=0.5; see `logitclip list noises`.
        data: The dataset, as in cifar10; see `logitclip list data`.
        root: The folder with the data; $LOGITCLIP_DATA or ./data if not given.
        noise_seed: The seed of the noise, which is a draw of its own.
        download: Get the data from its official address if it is not there.
        mirror: Get it from this folder, or address, instead.
        save: Also save the labels there, as .npz and .json; file:path=... reads them back.
        json: Print a JSON object instead of a table.
    """
    from logitclip import data as datasets
    from logitclip import noise as noises
    from logitclip.progress import noise_preview

    noises.NOISES.parse(spec)  # a mistake in it is found before the data is looked for
    RunConfig(noise_seed=noise_seed)  # as is one in the seed
    load = partial(datasets.load, root=root, download=download or mirror is not None, mirror=mirror)
    dataset = load(data)
    record = noises.apply(spec, dataset, noise_seed, load=load)
    if save is not None:
        record.save(save)
    if json:
        show_json(record.describe())
    else:
        show(noise_preview(record, dataset.class_names))


def _loss_for_theory(spec: str) -> tuple[str, dict[str, Any]]:
    from logitclip import theory
    from logitclip.losses import LOSSES

    name, knobs = LOSSES.parse(spec)
    return name, {key: value for key, value in knobs.items() if key in theory.knobs(name)}


def _noise_for_theory(spec: str | None, classes: int) -> dict[str, Any]:
    if spec is None:
        return {}
    from logitclip.noise import NOISES

    name, knobs = NOISES.parse(spec)
    if name == "transition":
        from logitclip.noise import read_matrix

        return {"noise": name, "transition": read_matrix(knobs["matrix"]).tolist()}
    if name == "asymmetric" and knobs.get("variant", "map") != "map":
        raise ValueError(
            "bound knows asymmetric noise from each class to the next; for others: transition:matrix=FILE."
        )
    share = (classes - 1) / classes if knobs.get("include_self") else 1.0  # of the redrawn labels that become wrong
    return {"noise": name, "rate": share * knobs["rate"] if "rate" in knobs else None}


def _tagged() -> Iterator[tuple[list[str], str, str, int, str]]:
    """Every function or class with a `Paper: ...` line: tags, name, file, line and docstring. Nothing is imported."""
    root = Path(__file__).parents[1]
    for file in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                doc = ast.get_docstring(node) or ""
                for line in doc.splitlines():
                    if line.startswith("Paper: "):
                        tags = [tag.strip() for tag in line.removeprefix("Paper: ").rstrip(".").split(",")]
                        yield tags, node.name, str(file.relative_to(root)), node.lineno, doc


def _normalised(item: str) -> str:
    words = {"equation": "eq", "proposition": "prop", "theorem": "thm"}
    text = item.lower().replace(".", " ").split()
    return " ".join(words.get(word, word) for word in text)
