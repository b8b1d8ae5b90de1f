"""Writes the generated parts of the documentation: tables from the registries, and pictures.

    python docs/generate.py            write them
    python docs/generate.py --check    fail if a page is not current (pictures are not compared)

A page marks the place of a table with two comments, `<!-- generated: losses -->` and `<!-- end -->`; everything between
them is replaced.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import evidence_tables
import head_tables
import torch

DOCS = Path(__file__).parent
MARKED = re.compile(r"(<!-- generated: ([a-z0-9_ ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def registry_table(kind: str) -> str:
    """The entries of a registry with their knobs and first sentences."""
    from logitclip.config import registries
    from logitclip.studies.recipe import load_recipe, recipe_names, recipe_scales

    if kind == "recipes":
        lines = ["| recipe | paper | scales (runs) | what it shows |", "|---|---|---|---|"]
        for name in recipe_names():
            scales = ", ".join(f"{scale} ({len(load_recipe(name, scale).cells)})" for scale in recipe_scales(name))
            recipe = load_recipe(name)
            lines.append(f"| `{name}` | {recipe.paper or ''} | {scales} | {recipe.title} |")
        return "\n".join(lines)
    registry = registries()[kind]
    lines = ["| spec, with its defaults | what it is |", "|---|---|"]
    for name in registry:
        spec, summary = (text.replace("|", r"\|") for text in registry.describe(name))
        lines.append(f"| `{spec}` | {summary} |")
    return "\n".join(lines)


KINDS = {
    "losses": "loss",
    "clips": "clip",
    "penalties": "penalty",
    "noises": "noise",
    "datasets": "data",
    "augmentations": "augment",
    "networks": "model",
    "methods": "method",
    "recipes": "recipes",
}


def run_options() -> str:
    """Every field of RunConfig with its help: the options of `logitclip train`."""
    import ast
    import inspect

    from logitclip import config

    (definition,) = ast.parse(inspect.getsource(config.RunConfig)).body
    lines = ["| option | default | meaning |", "|---|---|---|"]
    assert isinstance(definition, ast.ClassDef)
    for field, doc in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
            name = "--" + ast.unparse(field.target).replace("_", "-")
            default = "" if field.value is None else ast.unparse(field.value).strip("'")
            default = "the dataset's" if default == "None" else f"`{default}`"
            lines.append(f"| `{name}` | {default} | {doc.value.value} |")
    return "\n".join(lines)


def generated(name: str) -> str:
    if name.startswith("evidence "):
        return evidence_tables.table(name.removeprefix("evidence "))
    if name.startswith("heads "):
        return head_tables.table(name.removeprefix("heads "))
    return run_options() if name == "run options" else registry_table(KINDS[name])


def write_pages(*, check: bool) -> list[str]:
    """Bring the marked parts of all pages up to date, or with `check` only name the pages that are not."""
    stale = []
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        new = MARKED.sub(lambda m: f"{m[1]}\n{generated(m[2])}\n\n{m[3]}", text)
        if new != text:
            stale.append(page.name)
            if not check:
                page.write_text(new, encoding="utf-8")
    return stale


# -- pictures ----------------------------------------------------------------------------------------------------------


def loss_shapes() -> Any:
    """Every loss over the probability of the label, with ten classes and the rest of the mass spread evenly."""
    import altair as alt

    from logitclip.losses import LOSSES

    p = torch.linspace(0.001, 0.999, 120, dtype=torch.float64)
    logits = torch.stack([p.log(), *[((1 - p) / 9).log()] * 9], dim=1)
    target = torch.zeros(len(p), dtype=torch.int64)
    points = []
    for name in LOSSES:
        values = LOSSES[name](logits, target)
        points += [{"loss": name, "p": a, "value": b} for a, b in zip(p.tolist(), values.tolist(), strict=True)]
    base = alt.Chart(alt.Data(values=points), width=150, height=90).mark_line(color="#4269d0")  # type: ignore[arg-type]
    chart = base.encode(
        x=alt.X("p:Q", title="probability of the label", axis=alt.Axis(tickCount=3)),
        y=alt.Y("value:Q", title=None, axis=alt.Axis(tickCount=4)),
    )
    return chart.facet(alt.Facet("loss:N", title=None), columns=4).resolve_scale(y="independent")


def link() -> Any:
    """The norm after the clip over the norm before it: Eq. 3, and temp on both sides of 1."""
    import altair as alt

    from logitclip.clip import threshold_and_scale

    kinds = {"tau=1 (Eq. 3)": {"tau": 1.0}, "temp=1.5": {"temp": 1.5}, "temp=0.5": {"temp": 0.5}}
    points = []
    for name, given in kinds.items():
        tau, delta = threshold_and_scale(**given)
        ends = [(0.0, 0.0, "below"), (tau, tau, "below"), (tau, delta, "above"), (4.0, delta, "above")]
        points += [{"clip": name, "norm": x, "clipped": y, "side": side} for x, y, side in ends]
    return (
        alt.Chart(alt.Data(values=points), width=320, height=220)  # type: ignore[arg-type]
        .mark_line(strokeWidth=2.5)
        .encode(
            x=alt.X("norm:Q", title="norm of the logits"),
            y=alt.Y("clipped:Q", title="norm after the clip"),
            color=alt.Color("clip:N", title=None),
            detail="side:N",
        )
    )


def noise_matrices() -> Any:
    """The transition matrix of each synthetic noise, on the digits."""
    import altair as alt

    from logitclip import data, noise

    digits = data.load("digits")
    specs = ("symmetric:rate=0.4", "asymmetric:rate=0.4", "pair:rate=0.4", "instance:rate=0.4,variant=released")
    cells = [
        {"noise": spec, "true": j, "label": k, "share": float(share)}
        for spec in specs
        for j, row in enumerate(noise.apply(spec, digits, seed=0).transition.tolist())
        for k, share in enumerate(row)
    ]
    return (
        alt.Chart(alt.Data(values=cells), width=170, height=170)  # type: ignore[arg-type]
        .mark_rect()
        .encode(
            x=alt.X("label:O", title="label"),
            y=alt.Y("true:O", title="true class"),
            color=alt.Color("share:Q", title="share", scale=alt.Scale(scheme="blues", domain=[0, 1])),
        )
        .facet(alt.Facet("noise:N", title=None), columns=4)
    )


PICTURES: dict[str, Callable[[], Any]] = {"losses.svg": loss_shapes, "link.svg": link, "noise.svg": noise_matrices}


def main() -> None:
    if "--check" in sys.argv[1:]:
        stale = write_pages(check=True)
        if stale:
            sys.exit(f"Not current: {', '.join(stale)}. Run python docs/generate.py.")
        return
    for name, draw in PICTURES.items():
        draw().configure(background="white").save(str(DOCS / "img" / name))
    write_pages(check=False)


if __name__ == "__main__":
    main()
