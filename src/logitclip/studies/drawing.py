"""The look of every figure, and the files it is written to.

A figure is at most `WIDE` pixels wide, the width of a page, and no text in it is below `SMALL` pixels. Lines have a
dash beside their colour. An SVG is dark where the reader's system is dark.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from logitclip.files import write
from logitclip.text import explain_missing, printable

if TYPE_CHECKING:
    import altair as alt
    from altair import TopLevelMixin as Chart  # any chart
else:
    Chart = object  # the registry of figures reads annotations, also where Altair is not installed

SUFFIXES = (".svg", ".pdf", ".png", ".html")
WIDE, SMALL = 736, 12
PADDING = {"left": 14, "top": 6, "right": 6, "bottom": 6}  # fonts differ: a reader's may be wider
BLUE, ORANGE, GREEN, PURPLE, GREY = "#3565c4", "#d9710b", "#20854f", "#8f4fc9", "#7a7a7a"
COLOURS = (
    *(ORANGE, BLUE, GREEN, PURPLE, GREY, "#c2305a"),
    *("#1f8a99", "#8a6d1a", "#5a7fd6", "#a0522d", "#4f772d", "#b0479f"),
)
DASHES = ([6, 3], [1, 0], [2, 2], [9, 3, 2, 3], [12, 4])
DARK = {  # the same colours on a dark page
    "#000": "#d8d8d8",
    "#333": "#c8c8c8",
    "#e8e8e8": "#33363b",
    "#999": "#888",
    GREY: "#a6a6a6",
    BLUE: "#7da7ff",
    ORANGE: "#ffa657",
    GREEN: "#56d364",
    PURPLE: "#d2a8ff",
    "#c2305a": "#ff7b9c",
    "#1f8a99": "#56c8d8",
    "#8a6d1a": "#d9b84a",
    "#5a7fd6": "#9db8ff",
    "#a0522d": "#e0956b",
    "#4f772d": "#9ccc65",
    "#b0479f": "#f099dd",
}


def check_suffix(path: Path, known: Collection[str] = SUFFIXES, what: str = "figure") -> None:
    """Refuse a file name without a known format, before anything is computed."""
    if path.name.lower() in known:
        raise ValueError(f"{str(path)!r} is only an ending: name the file, as in {what}{path.name}.")
    if path.suffix.lower() not in known:
        raise ValueError(f"Unknown format of a {what}: {str(path)!r}. Use {', '.join(known)}.")


def save(chart: Chart, path: Path) -> None:
    """Write a chart in the format of its file suffix: .svg, .pdf, .png or .html (interactive, offline)."""
    check_suffix(path)
    suffix = path.suffix.lower()
    if suffix == ".svg":
        write(path, svg(chart).encode())
        return
    converter, spec, version = vl_convert(), _printable(chart.to_dict()), vega_lite_version()
    if suffix == ".html":  # not vl-convert's page, which does not escape the names in a chart
        content = render("figure.html", title=path.stem, spec=spec, script=runtime()).encode()
    elif suffix == ".png":
        content = converter.vegalite_to_png(spec, vl_version=version, scale=2)
    else:
        content = converter.vegalite_to_pdf(spec, vl_version=version)
    write(path, content)


def svg(chart: Chart) -> str:
    """Return a chart as an SVG that follows the reader's light or dark system."""
    shown = vl_convert().vegalite_to_svg(_printable(chart.to_dict()), vl_version=vega_lite_version())
    shown = re.sub(r'<path [^<>]*opacity="0"/>', "", shown)  # points under the pointer
    # Without digits of coordinates below a hundredth of a pixel.
    shown = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), shown)
    head, _, rest = shown.partition(">")
    rules = "".join(
        f'[{what}="{light}"]{{{what}:{dark}}}' for light, dark in DARK.items() for what in ("fill", "stroke")
    )
    return f"{head}><style>@media (prefers-color-scheme: dark){{svg>rect{{fill:#131416}}{rules}}}</style>{rest}"


def _printable(spec: object) -> object:
    """Make the control characters in a chart visible: vl-convert aborts the process on some."""
    if isinstance(spec, dict):
        return {_printable(key): _printable(value) for key, value in spec.items()}
    if isinstance(spec, list):
        return [_printable(value) for value in spec]
    return printable(spec) if isinstance(spec, str) else spec


def render(template: str, **values: object) -> str:
    """Fill in a template of this package; text is escaped, control characters are made visible."""
    with explain_missing("The HTML page needs Jinja", "report"):
        from jinja2 import Environment
    page = Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,  # scripts are not of type str
    )
    return page.from_string((Path(__file__).parent / "templates" / template).read_text("utf-8")).render(values)


def altair() -> ModuleType:
    with explain_missing("Figures need Altair", "report"):
        import altair
    return altair


def vl_convert() -> ModuleType:
    with explain_missing("Figures need vl-convert", "report"):
        import vl_convert
    return vl_convert


@cache
def runtime() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script."""
    return vl_convert().javascript_bundle(vl_version=vega_lite_version())


def vega_lite_version() -> str:
    """Return the version of Vega-Lite that Altair writes for, as vl-convert names it."""
    return ".".join(altair().SCHEMA_VERSION.lstrip("v").split(".")[:2])


def apply_style(chart: Chart) -> Chart:
    """Set the sizes, colours and lines that every figure has."""
    chart = chart.configure(font="Helvetica, Arial, sans-serif", background="white", padding=PADDING)
    chart = chart.configure_view(stroke=None).configure_range(category=list(COLOURS))
    texts = {"labelFontSize": SMALL, "titleFontSize": 13, "titleFontWeight": "normal"}
    lines = {"gridColor": "#e8e8e8", "domainColor": "#999", "tickColor": "#999"}
    chart = chart.configure_axis(labelOverlap=True, labelSeparation=4, **lines, **texts)
    chart = chart.configure_header(title=None, labelFontSize=13, labelFontWeight="bold")
    chart = chart.configure_title(fontSize=14, subtitleFontSize=SMALL)
    return chart.configure_legend(
        labelFontSize=13,
        titleFontSize=13,
        titleFontWeight="normal",
        symbolStrokeWidth=2.2,
        symbolOpacity=1,
        symbolSize=250,
        labelLimit=400,
    )


def colour_and_dash(field: str, names: Sequence[str], *, show: bool = True, columns: int = 0) -> dict[str, Any]:
    """Return the encodings of lines with these names in a field: each has a colour and a dash, in one legend.

    Args:
        columns: Names that stand side by side in the legend; 0: as many as fit.
    """
    alt = altair()
    columns = columns or legend_columns(names)
    shown = alt.Legend(orient="bottom", symbolType="stroke", columnPadding=32, columns=columns) if show else None

    def scale(looks: Sequence[object]) -> alt.Scale:
        return alt.Scale(domain=list(names), range=[looks[i % len(looks)] for i in range(len(names))])

    return {
        "color": alt.Color(f"{field}:N", title=None, scale=scale(COLOURS), legend=shown),
        "strokeDash": alt.StrokeDash(f"{field}:N", title=None, scale=scale(DASHES), legend=shown),
    }


def legend_columns(names: Sequence[str]) -> int:
    """Return how many names stand side by side below a figure as wide as a page."""
    widest = max(map(len, names), default=1)
    return max(1, min(len(names) or 1, 5, (WIDE - 40) // (8 * widest + 60)))
