"""The paper's figures, and accuracy, memorised share and logit norms by epoch.

A chart is defined once, in Altair: `save` writes it as SVG, PDF, PNG or an interactive page that works offline.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from logitclip import theory
from logitclip.files import write
from logitclip.runs.results import Result
from logitclip.studies.measures import bootstrap_interval
from logitclip.studies.ranking import rank_rows
from logitclip.studies.recipe import FIGURES, Recipe
from logitclip.studies.sweeping import CellOutcome
from logitclip.studies.tables import (
    AVERAGED,
    axes_of,
    bare_axes,
    label,
    measure_of,
    noisy_test,
    paper_title,
    results_of,
    series,
    tabulate,
)
from logitclip.text import printable

SUFFIXES = (".svg", ".pdf", ".png", ".html")
COLOURS = (
    *("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7"),
    *("#a463f2", "#97bbf5", "#9c6b4e", "#9498a0", "#2a9d8f", "#c2410c"),
)
DASHES = ([1, 0], [5, 3], [2, 2], [9, 3, 2, 3])
POINTS = 100  # most epochs drawn in a curve
QUANTITIES = {
    "test_accuracy": "test accuracy in %",
    "memorised": "memorised wrong labels in %",
    "norms": "norm of the logits",
}


def draw(recipe: Recipe, rows: Sequence[CellOutcome]) -> Any:
    """Return the recipe's figure or, if it has none, its memorisation curves, as an Altair chart."""
    if recipe.figure is None:
        chart = _memorisation(recipe, rows)
    else:
        options = {key: value for key, value in recipe.figure.items() if key != "kind"}
        chart = FIGURES[recipe.figure["kind"]](recipe, rows, **options)
    noisy = noisy_test(rows)
    head = paper_title(recipe) if noisy is None else {"text": paper_title(recipe), "subtitle": noisy}
    return _apply_style(chart.properties(title=head))


def check_suffix(path: Path) -> None:
    """Refuse a file name that `save` has no format for, before anything is computed."""
    if path.name.lower() in SUFFIXES:
        raise ValueError(f"{str(path)!r} is only an ending: name the file, as in figure{path.name}.")
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"Unknown format of a figure: {str(path)!r}. Use {', '.join(SUFFIXES)}.")


def save(chart: Any, path: Path) -> None:
    """Write a chart in the format of its file suffix: .svg, .pdf, .png or .html (interactive, offline)."""
    check_suffix(path)
    converter, spec = vl_convert(), _printable(chart.to_dict())
    version = vega_lite_version()
    suffix = path.suffix.lower()
    if suffix == ".html":  # not vl-convert's page, which does not escape the names in a chart
        content = render("figure.html", title=path.stem, spec=spec, script=runtime())
    elif suffix == ".png":
        content = converter.vegalite_to_png(spec, vl_version=version, scale=2)
    else:
        content = getattr(converter, f"vegalite_to_{suffix[1:]}")(spec, vl_version=version)
    if suffix == ".svg":
        content = _without_the_invisible(content)
    write(path, content.encode() if isinstance(content, str) else content)


def _without_the_invisible(svg: str) -> str:
    """Remove the points under the pointer, and the digits of coordinates below a hundredth of a pixel."""
    shown = re.sub(r'<path [^<>]*opacity="0"/>', "", svg)
    return re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), shown)


def _printable(spec: Any) -> Any:
    """Make the control characters in a chart visible: vl-convert aborts the process on some."""
    if isinstance(spec, dict):
        return {_printable(key): _printable(value) for key, value in spec.items()}
    if isinstance(spec, list):
        return [_printable(value) for value in spec]
    return printable(spec) if isinstance(spec, str) else spec


def render(template: str, **values: Any) -> str:
    """Fill in a template of this package; text is escaped, control characters are made visible."""
    try:
        from jinja2 import Environment
    except ImportError as error:
        raise ImportError("The HTML page needs Jinja: pip install 'logitclip[report]'.") from error
    page = Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,  # scripts are not of type str
    )
    return page.from_string((Path(__file__).parent / "templates" / template).read_text("utf-8")).render(values)


def altair() -> Any:
    try:
        import altair
    except ImportError as error:
        raise ImportError("Figures need Altair: pip install 'logitclip[report]'.") from error
    return altair


def vl_convert() -> Any:
    try:
        import vl_convert
    except ImportError as error:
        raise ImportError("Figures need vl-convert: pip install 'logitclip[report]'.") from error
    return vl_convert


@cache
def runtime() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script."""
    return vl_convert().javascript_bundle(vl_version=vega_lite_version())


def vega_lite_version() -> str:
    """Return the version of Vega-Lite that Altair writes for, as vl-convert names it."""
    return ".".join(altair().SCHEMA_VERSION.lstrip("v").split(".")[:2])


def _apply_style(chart: Any) -> Any:
    chart = chart.configure(font="Helvetica, Arial, sans-serif", background="white", padding=8)
    chart = chart.configure_view(stroke=None).configure_range(category=list(COLOURS))
    chart = chart.configure_axis(
        labelOverlap=True,
        labelSeparation=4,
        gridColor="#e8e8e8",
        domainColor="#999",
        tickColor="#999",
        titleFontWeight="normal",
        titleFontSize=13,
        labelFontSize=12,
    )
    return chart.configure_header(title=None, labelFontSize=13, labelFontWeight="bold").configure_legend(
        titleFontWeight="normal", symbolStrokeWidth=2, symbolOpacity=1, labelLimit=300, labelFontSize=12
    )


# -- the paper's figures -----------------------------------------------------------------------------------------------


@FIGURES.register
def bounds(recipe: Recipe, rows: Sequence[CellOutcome], *, classes: list[int], tau: list[float]) -> Any:
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
        alt.Chart(alt.Data(values=values), width=420, height=280)
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


def _points(recipe: Recipe, rows: Sequence[CellOutcome], x: str, y: str, panel: str) -> list[dict[str, Any]]:
    """Mean and spread of the statistic of a figure, for each of its points."""
    table = tabulate(replace(recipe, statistics=(y,)), rows)
    apart = (x, panel, *_constant(rows))
    points = [
        {
            "x": entry.coordinates[x],
            "panel": _label(entry.coordinates, panel),
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
        raise ValueError(f"No run of {recipe.name} at scale {recipe.scale} has a result yet: {recipe.command()} first.")
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
) -> Any:
    """y over the number in x, a line with an error band for each colour; the reference is a dashed level."""
    alt = altair()
    points = _points(recipe, rows, x, y, panel)
    name = reciprocal or _knob(recipe, x)
    without, swept = _label({x: reference}, x), f"{name} on the x axis"
    levels = [{**point, "line": without} for point in points if point["x"] == reference]
    points = [{**point, "x": _number(point["x"]), "line": swept} for point in points if point["x"] != reference]
    if reciprocal:
        points = [{**point, "x": 1 / point["x"]} for point in points]
    picked = alt.selection_point(fields=["series"], bind="legend")
    shown = alt.condition(picked, alt.value(1), alt.value(0.12))
    each = alt.Color("series:N", title=None, sort=_order(points, "series"))
    low, mean = (alt.Y(f"{f}:Q", title=_title(y), scale=alt.Scale(zero=False)) for f in ("low", "mean"))
    along = alt.X("x:Q", title=name, scale=alt.Scale(type="log" if reciprocal else "linear"))
    base = alt.Chart().transform_filter("!datum.level").encode(x=along, color=each)
    faint = alt.condition(picked, alt.value(0.15), alt.value(0.02))
    band = base.mark_area().encode(y=low, y2="high:Q", opacity=faint)
    line = base.mark_line(point=True).encode(y=mean, opacity=shown, tooltip=_tooltips("x"))
    layers = [band, line.add_params(picked)]
    if levels:
        dashes = alt.Scale(domain=[swept, without], range=[DASHES[0], DASHES[1]])
        legend = alt.Legend(symbolType="stroke", symbolStrokeColor="#666")
        dash = alt.StrokeDash("line:N", title=None, scale=dashes, legend=legend)
        layers[1] = layers[1].encode(strokeDash=dash)
        level = alt.Chart().transform_filter("datum.level").mark_rule()
        layers.append(level.encode(y=mean, color=each, opacity=shown, strokeDash=dash, tooltip=_tooltips()))
    values = [*points, *({**point, "level": True} for point in levels)]
    return _in_panels(alt.layer(*layers).properties(width=300, height=220), values)


@FIGURES.register
def bars(recipe: Recipe, rows: Sequence[CellOutcome], *, x: str, y: str, panel: str = "") -> Any:
    """y in groups of x, a bar with its standard deviation for each colour."""
    alt = altair()
    points = [{**point, "x": label(x, point["x"])} for point in _points(recipe, rows, x, y, panel)]
    order = _order(points, "series")
    base = alt.Chart().encode(
        x=alt.X("x:N", title=None, sort=_order(points, "x"), axis=alt.Axis(labelAngle=0)),
        xOffset=alt.XOffset("series:N", sort=order),
        tooltip=_tooltips("x"),
    )
    heights = alt.Y("mean:Q", title=_title(y))
    boxes = base.mark_bar().encode(y=heights, color=alt.Color("series:N", title=None, sort=order))
    errors = base.mark_rule(size=1.2).encode(y="low:Q", y2="high:Q", color=alt.value("#333"))
    numbers = base.mark_text(dy=-7, fontSize=12, color="#333").encode(y="high:Q", text=alt.Text("mean:Q", format=".1f"))
    wide = max(320, 34 * len(order) * len(_order(points, "x")))
    return _in_panels(alt.layer(boxes, errors, numbers).properties(width=wide, height=240), points)


@FIGURES.register
def ranks(recipe: Recipe, rows: Sequence[CellOutcome], *, x: str, colour: str) -> Any:
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
    names = alt.Y("row:N", title=None, sort=None, axis=alt.Axis(labelLimit=300))
    base = alt.Chart(alt.Data(values=points)).encode(
        y=names, color=alt.Color("series:N", title=None), tooltip=_tooltips("row")
    )
    spans = base.mark_rule(size=1.5).encode(x=alt.X("low:Q", title="mean rank"), x2="high:Q")
    return alt.layer(spans, base.mark_point(filled=True, size=36).encode(x="mean:Q")).properties(
        width=420, height={"step": 13}
    )


def _in_panels(chart: Any, values: list[dict[str, Any]]) -> Any:
    alt = altair()
    panels = _order(values, "panel")
    data = alt.Data(values=values)
    if len(panels) == 1:
        return chart.properties(data=data)
    return chart.facet(column=alt.Column("panel:N", sort=panels), data=data).resolve_scale(y="independent")


def _tooltips(*names: str) -> list[Any]:
    alt = altair()
    numbers = [alt.Tooltip(f"{name}:Q", format=".2f") for name in ("mean", "low", "high")]
    return ["series:N", *(f"{name}:N" for name in names), *numbers, "n:Q"]


def _title(statistic: str) -> str:
    return measure_of(statistic).title.partition(",")[0]


def _order(values: Iterable[Mapping[str, Any]], key: str) -> list[Any]:
    return list(dict.fromkeys(value[key] for value in values))


def _number(value: Any) -> float:
    """Return the number in a coordinate: 1.5 of norm:temp=1.5."""
    found = re.findall(r"(?<![\w.])[-+]?\d+(?:\.\d*)?(?:e[-+]?\d+)?", str(value))
    if not found:
        raise ValueError(f"There is no number in {value!r} to draw along an axis.")
    return float(found[-1])


def _knob(recipe: Recipe, axis: str) -> str:
    """Return the name of the numbers along an axis: temp for norm:temp=1.5."""
    names = {match for cell in recipe.cells for match in re.findall(r"(\w+)=", str(cell.coordinates[axis]))}
    return names.pop() if len(names) == 1 else axis


def _label(coordinates: Mapping[str, Any], axis: str) -> str:
    return label(axis, coordinates[axis]) if axis else ""


def _constant(rows: Iterable[CellOutcome]) -> list[str]:
    """Axes with a single value."""
    return [axis for axis, values in axes_of(rows).items() if len(values) == 1]


# -- epoch by epoch ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curves:
    """Accuracy, memorised share and logit norms in each epoch: mean, smallest and largest over the seeds."""

    values: list[dict[str, Any]]  # panel, group, link, quantity, epoch, mean, low, high, n
    panels: list[str]  # one for each column of the table
    groups: list[str]  # have a colour each
    links: list[str]  # have a dash each: with and without clip; empty if there is only one

    @property
    def quantities(self) -> list[str]:
        return [name for name in QUANTITIES if any(value["quantity"] == name for value in self.values)]

    @property
    def epochs(self) -> int:
        return max((value["epoch"] for value in self.values), default=0)

    def of(self, panel: str, quantity: str) -> list[dict[str, Any]]:
        """Return the values of one chart, without the fields they share."""
        return [
            {key: entry for key, entry in value.items() if key not in ("panel", "quantity")}
            for value in self.values
            if value["panel"] == panel and value["quantity"] == quantity
        ]


def curves(recipe: Recipe, rows: Sequence[CellOutcome]) -> Curves:
    """Means over the seeds for each epoch: accuracy, memorised share and quantiles of the logit norm."""
    axes = axes_of(rows)
    bare = bare_axes(axes)
    cols = [axis for axis in recipe.cols if axis in axes]
    apart = {*cols, *AVERAGED, *_constant(rows)}
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


def _over_seeds(runs: list[list[dict[str, Any]]]) -> Iterable[dict[str, Any]]:
    """Mean and range over runs with the same settings, for at most `POINTS` epochs."""
    epochs = list(itertools.zip_longest(*runs))  # the rows of each; some runs may be shorter
    for quantity, field in (
        ("test_accuracy", "test_accuracy"),
        ("memorised", "memorised"),
        ("norms", "norm_quantiles"),
    ):
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


def curve_chart(all_curves: Curves, shown: Any, *, norms: bool = False, legend: bool = True) -> Any:
    """Return a quantity over the epochs: lines with bands, and the nearest point with its numbers under the pointer.

    Args:
        shown: An Altair predicate; other curves are faded.
        norms: The quantity is quantiles of a norm, on a logarithmic axis.
        legend: Draw a legend; a page has its own.
    """
    alt = altair()
    key = alt.Undefined if legend else None
    scale = alt.Scale(type="log") if norms else alt.Scale(zero=False)
    axis = alt.Axis(values=[10.0**i for i in range(-6, 10)]) if norms else alt.Axis()
    faint = 0.12 if len(all_curves.groups) * max(1, len(all_curves.links)) <= 8 else 0.03
    base = alt.Chart().encode(
        x=alt.X("epoch:Q", title="epoch", scale=alt.Scale(nice=False), axis=alt.Axis(tickMinStep=1, format="d")),
        color=alt.Color(
            "group:N", title=None, legend=key, scale=alt.Scale(domain=all_curves.groups, range=colours(all_curves))
        ),
        detail="link:N",
    )
    y = alt.Y("mean:Q", title=None, scale=scale, axis=axis)
    band = base.mark_area().encode(
        y=alt.Y("low:Q", title=None, scale=scale, axis=axis),
        y2="high:Q",
        opacity=alt.condition(shown, alt.value(faint), alt.value(0)),
    )
    line = base.mark_line(strokeWidth=1.8).encode(y=y, opacity=alt.condition(shown, alt.value(1), alt.value(0.08)))
    if all_curves.links:
        dashes = alt.Scale(domain=all_curves.links, range=list(DASHES[: len(all_curves.links)]))
        line = line.encode(strokeDash=alt.StrokeDash("link:N", title=None, legend=key, scale=dashes))
    near = alt.selection_point(name="near", on="pointerover", nearest=True, empty=False, clear="pointerout")
    names = ("median", "5 % quantile", "95 % quantile") if norms else ("mean", "least", "largest")
    tooltip = {"run": "group", **({"clip": "link"} if all_curves.links else {}), "epoch": "epoch"}
    tooltip |= dict(zip(names, ("mean", "low", "high"), strict=True)) | {"runs": "n"}
    dots = (
        base.transform_filter(shown)
        .mark_point(filled=True, size=45, tooltip=alt.expr(_tooltip(tooltip)))
        # A single epoch makes no line.
        .encode(y=y, opacity=alt.condition(near, alt.value(1), alt.value(0 if all_curves.epochs > 1 else 0.7)))
    )
    return alt.layer(band, line, dots.add_params(near))


def _tooltip(fields: Mapping[str, str]) -> str:
    """Return the expression of a tooltip, by title and field.

    Vega-Lite itself writes a wrong one for text at the nearest point, where the datum is nested in another datum.
    """
    rounded = "isNumber({0}) ? format({0}, '.4~g') : {0}"
    values = {title: f"(datum.datum || datum)['{field}']" for title, field in fields.items()}
    return "{" + ", ".join(f"'{title}': {rounded.format(value)}" for title, value in values.items()) + "}"


def colours(all_curves: Curves) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(len(all_curves.groups))]


def _memorisation(recipe: Recipe, rows: Sequence[CellOutcome]) -> Any:
    """Accuracy and memorised share over the epochs, a column for each column of the recipe's table."""
    alt = altair()
    if not results_of(rows):
        raise ValueError(f"No run of {recipe.name} at scale {recipe.scale} has a result yet: {recipe.command()} first.")
    found = curves(recipe, rows)
    picked = alt.selection_point(name="picked", fields=["group"], bind="legend")
    quantities = [QUANTITIES[name] for name in found.quantities if name != "norms"]
    values = [
        {**value, "quantity": QUANTITIES[value["quantity"]]} for value in found.values if value["quantity"] != "norms"
    ]
    width = min(280, 700 // len(found.panels))  # several panels fit a page and stay readable
    chart = curve_chart(found, picked).add_params(picked).properties(width=width, height=180)
    return chart.facet(
        row=alt.Row("quantity:N", sort=quantities, title=None),
        column=alt.Column("panel:N", sort=found.panels, title=None),
        data=alt.Data(values=values),
    ).resolve_scale(y="independent")


# -- charts of the report ----------------------------------------------------------------------------------------------

# The page has one legend for all its charts, whose buttons fill these two lists.
_CHOSEN = (
    "(!length(groups) || indexof(groups, datum.group) >= 0) && (!length(links) || indexof(links, datum.link) >= 0)"
)


def curve_charts(all_curves: Curves) -> list[tuple[str, list[dict[str, Any]]]]:
    """For each panel, the charts of all quantities as Vega-Lite, as wide as their container and without a legend."""
    alt = altair()
    lists = [alt.param(name=name, value=[]) for name in ("groups", "links")]
    panels = []
    for panel in all_curves.panels:
        charts = []
        for quantity in all_curves.quantities:
            values = all_curves.of(panel, quantity)
            if values:
                chart = curve_chart(all_curves, _CHOSEN, norms=quantity == "norms", legend=False).add_params(*lists)
                charts.append(_for_page(chart, values, height=220, title=QUANTITIES[quantity]))
        panels.append((panel, charts))
    return panels


def noise_charts(rows: Sequence[CellOutcome]) -> tuple[list[dict[str, Any]], list[str]]:
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


def _heat_map(matrix: list[list[float]], names: Sequence[str], title: str) -> dict[str, Any]:
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
    return _for_page(alt.layer(squares, *([numbers] if small else [])), values, height=300, title=title)


def _for_page(chart: Any, values: list[dict[str, Any]], height: int, title: str) -> dict[str, Any]:
    spec = chart.properties(data=altair().Data(values=values), width="container", height=height).to_dict()
    for key in ("config", "$schema"):  # the page has one config for all
        spec.pop(key, None)
    return {"title": title, "spec": spec}
