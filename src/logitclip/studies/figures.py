"""The paper's figures, and accuracy, memorised share and logit norms by epoch.

A chart is defined once, in Altair; `drawing.save` writes it as SVG, PDF, PNG or an interactive page that works offline.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from logitclip import theory
from logitclip.files import Json
from logitclip.runs.results import Result
from logitclip.studies.drawing import (
    COLOURS,
    DASHES,
    WIDE,
    Chart,
    altair,
    apply_style,
    colour_and_dash,
    legend_columns,
)
from logitclip.studies.measures import MEASURES, bootstrap_interval
from logitclip.studies.ranking import rank_rows
from logitclip.studies.recipe import FIGURES, Recipe
from logitclip.studies.sweeping import CellOutcome
from logitclip.studies.tables import (
    AVERAGED,
    axes_of,
    bare_axes,
    label,
    noisy_test,
    paper_title,
    results_of,
    series,
    tabulate,
)

if TYPE_CHECKING:
    import altair as alt

POINTS = 100  # most epochs drawn in a curve
MARGIN = 90  # of a figure, for its y axis
SIDE_BY_SIDE = 5  # panels of curves
LINK_DASHES = (DASHES[1], DASHES[0], *DASHES[2:])  # the clip solid
QUANTITIES = {
    "test_accuracy": "test accuracy in %",
    "memorised": "wrong labels memorised, %",
    "norms": "norm of the logits",
}


def draw(recipe: Recipe, rows: Sequence[CellOutcome]) -> Chart:
    """Return the recipe's figure or, if it has none, its memorisation curves, as an Altair chart."""
    if recipe.figure is None:
        if not results_of(rows):
            raise _no_results(recipe)
        chart = draw_epochs(curves(recipe, rows))
    else:
        options = {key: value for key, value in recipe.figure.items() if key != "kind"}
        chart = FIGURES[recipe.figure["kind"]](recipe, rows, **options)
    noisy = noisy_test(rows)
    head = paper_title(recipe) if noisy is None else {"text": paper_title(recipe), "subtitle": noisy}
    return apply_style(chart.properties(title=head))


def _no_results(recipe: Recipe) -> ValueError:
    return ValueError(f"No run of {recipe.name} at scale {recipe.scale} has a result yet: {recipe.command()} first.")


# -- the paper's figures -----------------------------------------------------------------------------------------------


@FIGURES.register
def bounds(recipe: Recipe, rows: Sequence[CellOutcome], *, classes: list[int], tau: list[float]) -> Chart:
    """Prop 2.1's bounds over tau: upper dashed, lower solid, a colour for each number of classes."""
    alt = altair()
    first, last = tau
    points = [first + (last - first) * i / 200 for i in range(201)]
    values = [
        {"tau": point, "K": str(count), "bound": name, "loss": loss}
        for count in classes
        for point in points
        if point > 0
        for name, loss in zip(("lower", "upper"), theory.loss_bounds(point, count), strict=True)
    ]
    picked = alt.selection_point(fields=["K"], bind="legend")
    return (
        alt.Chart(alt.Data(values=values), width=520, height=280)
        .mark_line(clip=True)
        .encode(
            x=alt.X("tau:Q", title="τ"),
            y=alt.Y("loss:Q", title="bounds of the clipped cross entropy"),
            color=alt.Color("K:N", sort=[str(count) for count in classes]),
            strokeDash=alt.StrokeDash("bound:N", scale=alt.Scale(domain=["upper", "lower"], range=[[5, 3], [1, 0]])),
            opacity=alt.condition(picked, alt.value(1), alt.value(0.12)),
            tooltip=["K:N", "bound:N", alt.Tooltip("tau:Q", format=".3g"), alt.Tooltip("loss:Q", format=".3f")],
        )
        .add_params(picked)
    )


def _points(recipe: Recipe, rows: Sequence[CellOutcome], x: str, y: str, panel: str) -> list[Json]:
    """Return mean and spread of the statistic of a figure, for each of its points."""
    table = tabulate(replace(recipe, statistics=(y,)), rows)
    apart = (x, panel, *_constant_axes(rows))
    points = [
        {
            "x": entry.coordinates[x],
            "panel": label(panel, entry.coordinates[panel]) if panel else "",
            "series": series(entry.coordinates, apart, table.bare),
            "mean": entry.mean,
            "low": entry.mean - (entry.std or 0.0),
            "high": entry.mean + (entry.std or 0.0),
            "n": entry.n,
        }
        for entry in table.entries.values()
        if entry.mean is not None
    ]
    if not points:
        raise _no_results(recipe)
    return points


@FIGURES.register
def lines(
    recipe: Recipe,
    rows: Sequence[CellOutcome],
    *,
    x: str,
    y: str,
    panel: str = "",
    reference: str = "",
    reciprocal: str = "",
) -> Chart:
    """y over the number in x, a line with an error band for each colour; the reference is a dashed level."""
    alt = altair()
    points = _points(recipe, rows, x, y, panel)
    knobs = {knob for cell in recipe.cells for knob in re.findall(r"(\w+)=", str(cell.coordinates[x]))}
    name = reciprocal or (knobs.pop() if len(knobs) == 1 else x)  # temp for norm:temp=1.5
    levels = [{**point, "level": True} for point in points if point["x"] == reference]
    points = [{**point, "x": _find_number(point["x"])} for point in points if point["x"] != reference]
    if reciprocal:
        points = [{**point, "x": 1 / point["x"]} for point in points]
    picked = alt.selection_point(fields=["series"], bind="legend")
    shown = alt.condition(picked, alt.value(1), alt.value(0.12))
    each = colour_and_dash("series", _distinct([*points, *levels], "series"))
    low, mean = (alt.Y(f"{f}:Q", title=_axis_title(y), scale=alt.Scale(zero=False)) for f in ("low", "mean"))
    along = f"{name} (dotted: {label(x, reference)})" if levels else name
    x_axis = alt.X("x:Q", title=along, scale=alt.Scale(type="log" if reciprocal else "linear"))
    base = alt.Chart().transform_filter("!datum.level").encode(x=x_axis, color=each["color"])
    faint = alt.condition(picked, alt.value(0.15), alt.value(0.02))
    band = base.mark_area().encode(y=low, y2="high:Q", opacity=faint)
    line = base.mark_line(point=True).encode(
        y=mean, opacity=shown, strokeDash=each["strokeDash"], tooltip=_tooltips("x")
    )
    level = alt.Chart().transform_filter("datum.level").mark_rule(strokeDash=[1, 3], strokeWidth=2)
    layers = [band, line.add_params(picked)]
    if levels:
        layers.append(level.encode(y=mean, color=each["color"], opacity=shown, tooltip=_tooltips()))
    return _in_panels(alt.layer(*layers).properties(height=220), [*points, *levels])


@FIGURES.register
def bars(recipe: Recipe, rows: Sequence[CellOutcome], *, x: str, y: str, panel: str = "") -> Chart:
    """y in groups of x, a bar with its standard deviation for each colour."""
    alt = altair()
    points = [{**point, "x": label(x, point["x"])} for point in _points(recipe, rows, x, y, panel)]
    order = _distinct(points, "series")
    base = alt.Chart().encode(
        x=alt.X("x:N", title=None, sort=_distinct(points, "x"), axis=alt.Axis(labelAngle=0)),
        xOffset=alt.XOffset("series:N", sort=order),
        tooltip=_tooltips("x"),
    )
    heights = alt.Y("mean:Q", title=_axis_title(y))
    legend = alt.Legend(orient="bottom", columns=legend_columns(order))
    boxes = base.mark_bar().encode(y=heights, color=alt.Color("series:N", title=None, sort=order, legend=legend))
    errors = base.mark_rule(size=1.2).encode(y="low:Q", y2="high:Q", color=alt.value("#333"))
    wide = 34 * len(order) * len(_distinct(points, "x"))  # a number fits above each bar
    layers = [boxes, errors]
    if wide <= WIDE - MARGIN:
        numbers = base.mark_text(dy=-7, fontSize=12, color="#333")
        layers.append(numbers.encode(y="high:Q", text=alt.Text("mean:Q", format=".1f")))
    return _in_panels(alt.layer(*layers).properties(height=240), points, least=wide)


@FIGURES.register
def ranks(recipe: Recipe, rows: Sequence[CellOutcome], *, x: str, colour: str) -> Chart:
    """The mean rank of each row over the values of x, best first, with its bootstrap interval; `colour` is an axis."""
    alt = altair()
    table = tabulate(replace(recipe, cols=(x,), rows=tuple(axis for axis in recipe.rows if axis != x)), rows)
    points = []
    for row, found in sorted(rank_rows(table).items(), key=lambda item: float(item[1].mean())):
        at = dict(zip(table.row_axes, row, strict=True))
        low, high = bootstrap_interval(found)
        shown = {"series": label(colour, at[colour], table.bare), "mean": float(found.mean()), "low": low, "high": high}
        points.append({"row": series(at, bare=table.bare), **shown})
    if not points:
        raise ValueError(f"No value of {x} has a result in every row yet: {recipe.command()} makes the missing runs.")
    legend = alt.Legend(orient="bottom")
    widest = int(7.4 * max(len(point["row"]) for point in points))  # also in a font wider than ours
    axis = alt.Axis(labelLimit=300, labelOverlap=False, minExtent=min(300, widest))
    names = alt.Y("row:N", title=None, sort=None, axis=axis)
    base = alt.Chart(alt.Data(values=points)).encode(
        y=names,
        color=alt.Color("series:N", title=None, legend=legend),
        tooltip=_tooltips("row"),
    )
    spans = base.mark_rule(size=1.5).encode(x=alt.X("low:Q", title="mean rank"), x2="high:Q")
    shape = alt.Shape("series:N", legend=None)
    return alt.layer(spans, base.mark_point(filled=True, size=42).encode(x="mean:Q", shape=shape)).properties(
        width=420, height={"step": 16}
    )


def _in_panels(chart: alt.LayerChart, values: list[Json], least: int = 180) -> Chart:
    """Put a chart into panels side by side, as many as fit a page with at least this width each; one y axis for all."""
    alt = altair()
    panels = _distinct(values, "panel")
    data = alt.Data(values=values)
    if len(panels) == 1:
        return chart.properties(data=data, width=max(300, min(least, WIDE - MARGIN)) if least > 180 else 520)
    columns = max(1, min(len(panels), (WIDE - MARGIN) // least))
    width = min(300, (WIDE - MARGIN) // columns - 20)
    facet = alt.Facet("panel:N", sort=panels, title=None)
    return chart.properties(width=width).facet(facet, columns=columns, data=data)


def _tooltips(*names: str) -> list[str | alt.Tooltip]:
    alt = altair()
    numbers = [alt.Tooltip(f"{name}:Q", format=".2f") for name in ("mean", "low", "high")]
    return ["series:N", *(f"{name}:N" for name in names), *numbers, "n:Q"]


def _axis_title(statistic: str) -> str:
    return MEASURES[statistic].title.partition(",")[0]


def _distinct(values: Iterable[Json], key: str) -> list[str]:
    return list(dict.fromkeys(value[key] for value in values))


def _find_number(value: object) -> float:
    """Return the number in a coordinate: 1.5 of norm:temp=1.5."""
    found = re.findall(r"(?<![\w.])[-+]?\d+(?:\.\d*)?(?:e[-+]?\d+)?", str(value))
    if not found:
        raise ValueError(f"There is no number in {value!r} to draw along an axis.")
    return float(found[-1])


def _constant_axes(rows: Iterable[CellOutcome]) -> list[str]:
    """Return the axes with a single value."""
    return [axis for axis, values in axes_of(rows).items() if len(values) == 1]


# -- epoch by epoch ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curves:
    """Accuracy, memorised share and logit norms in each epoch: mean, smallest and largest over the seeds."""

    values: list[Json]  # panel, group, link, quantity, epoch, mean, low, high, n
    panels: list[str]  # one for each column of the table
    groups: list[str]  # have a colour each
    links: list[str]  # have a dash each: with and without clip; empty if there is only one

    @property
    def quantities(self) -> list[str]:
        return [name for name in QUANTITIES if any(value["quantity"] == name for value in self.values)]


def curves(recipe: Recipe, rows: Sequence[CellOutcome]) -> Curves:
    """Return means over the seeds for each epoch: accuracy, memorised share and quantiles of the logit norm."""
    axes = axes_of(rows)
    bare = bare_axes(axes)
    cols = [axis for axis in recipe.cols if axis in axes]
    apart = {*cols, *AVERAGED, *_constant_axes(rows)}
    linked = (
        1 < len(axes.get("clip", ())) <= len(DASHES) and "clip" not in cols and bool(axes.keys() - apart - {"clip"})
    )
    apart |= {"clip"} if linked else set()
    cells: dict[tuple[str, str, str], list[Result]] = {}
    for row in rows:
        if isinstance(row.outcome, Result):
            at = row.cell.coordinates
            panel = series({axis: at[axis] for axis in cols}) if cols else ""
            group = series(at, apart, bare) or recipe.name
            cells.setdefault((panel, group, label("clip", at["clip"]) if linked else ""), []).append(row.outcome)
    values = [
        {"panel": panel, "group": group, "link": link, **value}
        for (panel, group, link), results in cells.items()
        for value in _over_seeds([result.rows for result in results])
    ]
    links = sorted(dict.fromkeys(link for _, _, link in cells if link), key=lambda link: link == label("clip", "none"))
    panels, groups = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
    return Curves(values, panels, groups, links)


def _over_seeds(runs: list[list[Json]]) -> Iterable[Json]:
    """Return mean and range over runs with the same settings, for at most `POINTS` epochs."""
    epochs = list(itertools.zip_longest(*runs))  # the rows of each; some runs may be shorter
    for quantity in QUANTITIES:
        field = "norm_quantiles" if quantity == "norms" else quantity
        measured = [
            (i, [row[field] for row in rows if row and row[field] is not None]) for i, rows in enumerate(epochs)
        ]
        measured = [(epoch, numbers) for epoch, numbers in measured if numbers]  # not measured in every epoch
        step = math.ceil(len(measured) / POINTS) or 1
        for epoch, numbers in dict([*measured[::step], *measured[-1:]]).items():
            if quantity == "norms":
                low, _, middle, _, high = (statistics.fmean(quantile) for quantile in zip(*numbers, strict=True))
            else:
                low, middle, high = min(numbers), statistics.fmean(numbers), max(numbers)
            spread = {"mean": middle, "low": low, "high": high}
            spread = {name: float(f"{number:.4g}") for name, number in spread.items()}
            yield {"quantity": quantity, "epoch": epoch + 1, **spread, "n": len(numbers)}


def curve_chart(
    all_curves: Curves, *, norms: bool = False, legend: bool = True, title: str | None = None, shown: str = ""
) -> alt.LayerChart:
    """Return a quantity over the epochs, as lines with bands.

    Args:
        norms: The quantity is quantiles of a norm, on a logarithmic axis.
        legend: Draw a legend; a page has its own.
        title: Title of the y axis.
        shown: For a page, a predicate in Vega's language: other curves are faded, and the nearest point under the
            pointer shows its numbers.
    """
    alt = altair()
    key = alt.Legend(orient="bottom", columns=legend_columns(all_curves.groups)) if legend else None
    scale = alt.Scale(type="log") if norms else alt.Scale(zero=False)
    axis = alt.Axis(values=[10.0**i for i in range(-6, 10)]) if norms else alt.Axis()
    each = colour_and_dash("group", all_curves.groups, show=legend)
    base = alt.Chart().encode(
        x=alt.X("epoch:Q", title="epoch", scale=alt.Scale(nice=False), axis=alt.Axis(tickMinStep=1, format="d")),
        color=each["color"],
        detail="link:N",
    )

    def opacity(value: float, otherwise: float) -> object:
        return alt.condition(shown, alt.value(value), alt.value(otherwise)) if shown else alt.value(value)

    low, mean = (alt.Y(f"{field}:Q", title=title, scale=scale, axis=axis) for field in ("low", "mean"))
    few = len(all_curves.groups) * max(1, len(all_curves.links)) <= 8
    band = base.mark_area().encode(y=low, y2="high:Q", opacity=opacity(0.12 if few else 0.03, 0))
    line = base.mark_line(strokeWidth=2).encode(y=mean, strokeDash=each["strokeDash"], opacity=opacity(1, 0.08))
    if all_curves.links:
        dashes = alt.Scale(domain=all_curves.links, range=list(LINK_DASHES[: len(all_curves.links)]))
        line = line.encode(strokeDash=alt.StrokeDash("link:N", title=None, legend=key, scale=dashes))
    single = all(value["epoch"] == 1 for value in all_curves.values)  # makes no line
    if not shown:
        return alt.layer(band, line, *([base.mark_point(filled=True, size=45).encode(y=mean)] if single else []))
    near = alt.selection_point(name="near", on="pointerover", nearest=True, empty=False, clear="pointerout")
    names = ("median", "5 % quantile", "95 % quantile") if norms else ("mean", "least", "largest")
    tooltip = {"run": "group", **({"clip": "link"} if all_curves.links else {}), "epoch": "epoch"}
    tooltip |= dict(zip(names, ("mean", "low", "high"), strict=True)) | {"runs": "n"}
    dots = (
        base.transform_filter(shown)
        .mark_point(filled=True, size=45, tooltip=alt.expr(_tooltip(tooltip)))
        .encode(y=mean, opacity=alt.condition(near, alt.value(1), alt.value(0.7 if single else 0)))
    )
    return alt.layer(band, line, dots.add_params(near))


def _tooltip(fields: Mapping[str, str]) -> str:
    """Return the expression of a tooltip, by title and field.

    Vega-Lite itself writes a wrong one for text at the nearest point, where the datum is nested in another datum.
    """
    rounded = "isNumber({0}) ? format({0}, '.4~g') : {0}"
    values = {title: f"(datum.datum || datum)['{field}']" for title, field in fields.items()}
    return "{" + ", ".join(f"'{title}': {rounded.format(value)}" for title, value in values.items()) + "}"


def draw_epochs(found: Curves) -> Chart:
    """Draw accuracy above the memorised share over the epochs: a column for each panel, one y axis for a row."""
    alt = altair()
    rows = []
    for i in range(0, len(found.panels), SIDE_BY_SIDE):
        side_by_side = found.panels[i : i + SIDE_BY_SIDE]
        width = min(280, (WIDE - MARGIN) // min(len(found.panels), SIDE_BY_SIDE) - 20)
        above: list[str] = []
        for quantity in (name for name in found.quantities if name != "norms"):
            values = [v for v in found.values if v["quantity"] == quantity and v["panel"] in side_by_side]
            here = [panel for panel in side_by_side if any(v["panel"] == panel for v in values)]
            if not here:
                continue
            chart = curve_chart(found, title=QUANTITIES[quantity]).properties(width=width, height=165)
            header = alt.Header(labels=here != above and here != [""])
            column = alt.Column("panel:N", sort=here, title=None, header=header)
            above = here
            rows.append(chart.facet(column=column, spacing=18, data=alt.Data(values=values)))
    return alt.vconcat(*rows, spacing=8)


# -- charts of the report ----------------------------------------------------------------------------------------------

# The page has one legend for all its charts, whose buttons fill these two lists.
_CHOSEN = (
    "(!length(groups) || indexof(groups, datum.group) >= 0) && (!length(links) || indexof(links, datum.link) >= 0)"
)


def curve_charts(all_curves: Curves) -> list[tuple[str, list[Json]]]:
    """Return for each panel the charts of all quantities as Vega-Lite, as wide as their container, without legends."""
    alt = altair()
    lists = [alt.param(name=name, value=[]) for name in ("groups", "links")]
    panels = []
    for panel in all_curves.panels:
        charts = []
        for quantity in all_curves.quantities:
            values = [
                {key: entry for key, entry in value.items() if key not in ("panel", "quantity")}  # which all share
                for value in all_curves.values
                if value["panel"] == panel and value["quantity"] == quantity
            ]
            if values:
                chart = curve_chart(all_curves, norms=quantity == "norms", legend=False, shown=_CHOSEN)
                charts.append(_spec_for_page(chart.add_params(*lists), values, height=220, title=QUANTITIES[quantity]))
        panels.append((panel, charts))
    return panels


def noise_charts(rows: Sequence[CellOutcome]) -> tuple[list[Json], list[str]]:
    """Return the transition matrix of each noise as a chart, and a sentence for each noise that cannot be shown.

    The matrix is read from the folder of the first run.
    """
    first: dict[tuple[str, str], Result] = {}
    for result in results_of(rows):
        first.setdefault((result.config["data"], result.config["noise"]), result)
    charts, unknown = [], []
    for (name, noise), result in first.items():
        try:
            record = result.noise
        except ValueError as error:
            unknown.append(f"The noise {noise} of {name} is not shown: {error}")
            continue
        matrix = record["transition"]
        if matrix is None:
            unknown.append(f"The noise {noise} of {name} is not shown: {record['num_classes']} classes are too many.")
        elif any(share for i, row in enumerate(matrix) for j, share in enumerate(row) if i != j):
            charts.append(_heat_map(matrix, record["class_names"], f"{name}, {label('noise', noise)}"))
    return charts, unknown


def _heat_map(matrix: list[list[float]], names: Sequence[str], title: str) -> Json:
    alt = altair()
    values = [
        {"true": names[i], "given": names[j], "share": round(100 * share, 2)}
        for i, row in enumerate(matrix)
        for j, share in enumerate(row)
        if share
    ]
    small = len(matrix) <= 12
    short = small and max(map(len, names)) <= 3  # longer names would overlap
    axis = {"labels": len(matrix) <= 20, "ticks": False, "domain": False, "grid": False, "labelLimit": 90}
    along, up = alt.Axis(**axis, labelAngle=0 if short else -90), alt.Axis(**axis)
    base = alt.Chart().encode(
        x=alt.X("given:N", sort=list(names), title="given label", axis=along, scale=alt.Scale(domain=list(names))),
        y=alt.Y("true:N", sort=list(names), title="true label", axis=up, scale=alt.Scale(domain=list(names))),
        tooltip=["true:N", "given:N", alt.Tooltip("share:Q", title="share in %", format=".1f")],
    )
    # Opacity rather than colour: right on a light and on a dark page.
    squares = base.mark_rect(color=COLOURS[0]).encode(
        opacity=alt.Opacity("share:Q", legend=None, scale=alt.Scale(domain=[0, 100], range=[0.04, 0.9]))
    )
    numbers = base.mark_text(fontSize=12).encode(text=alt.Text("share:Q", format=".0f"))
    return _spec_for_page(alt.layer(squares, *([numbers] if small else [])), values, height=300, title=title)


def _spec_for_page(chart: alt.LayerChart, values: list[Json], height: int, title: str) -> Json:
    spec = chart.properties(data=altair().Data(values=values), width="container", height=height).to_dict()
    for key in ("config", "$schema"):  # the page has one config for all
        spec.pop(key, None)
    return {"title": title, "spec": spec}
