"""Writers of a table: terminal, Markdown, LaTeX, CSV, JSON, and the HTML page with its charts."""

from __future__ import annotations

import itertools
import json as json_module
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import datetime

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from logitclip.files import Json
from logitclip.runs.config import UNCOUNTED, RunConfig
from logitclip.runs.results import RESULT, Result, csv_line
from logitclip.studies import drawing, examples, figures
from logitclip.studies.ranking import rank_rows
from logitclip.studies.recipe import Coordinates
from logitclip.studies.sweeping import CellOutcome
from logitclip.studies.tables import (
    AVERAGED,
    DASH,
    Entry,
    ResultTable,
    caption_title,
    datasets_of,
    label,
    paper_title,
    results_of,
    title,
)
from logitclip.text import duration, printable

# -- writers -----------------------------------------------------------------------------------------------------------


def terminal(table: ResultTable, *, bold: bool = True) -> Group:
    """Return the table for a terminal, as a rich renderable; without `bold`, as in a pipe, a star marks the best."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, axis in enumerate(table.row_axes):
        longest = max(len(table.labels(row)[i]) for row in table.rows)
        # On a narrow terminal, numbers wrap first.
        shown.add_column(escape(axis), overflow="fold", min_width=min(longest, 16))
    for head in table.heads():
        shown.add_column(escape(head.replace(", ", "\n")), justify="right", overflow="fold")
    before = None
    for row in table.rows:
        labels = table.labels(row, before)
        if before is not None and len(row) > 1 and labels[0]:
            shown.add_section()
        cells = []
        for entry in table.line(row):
            star = "*" if entry.best and not bold else ""
            cell = Text(f"{star}{table.ours(entry)}", style="bold" if entry.best else "")
            for detail in table.details(entry):
                cell.append(f"\n{detail}", "dim not bold")
            cells.append(cell)
        shown.add_row(*map(escape, labels), *cells)
        before = row
    below = [Text(table.explain("Bold" if bold else "*"), style="dim"), *map(Text, table.notes)]
    head = Text(title(table.recipe), style="bold")  # not the table's own title, which would be as narrow as the table
    above = [head, Text(f"\n{table.headline}")] if table.headline else [head]
    return Group(*above, shown, *below, *(Text(f"Warning: {warning}", style="yellow") for warning in table.warnings))


def markdown(table: ResultTable) -> str:
    """Return the table as GitHub's Markdown; the paper's number and the difference stand in parentheses."""

    def cell(entry: Entry) -> str:
        ours = f"**{table.ours(entry)}**" if entry.best else table.ours(entry)
        return " ".join([ours, *map(_escape_markdown, table.details(entry))])

    def line(texts: Iterable[str]) -> str:
        return "| " + " | ".join(texts) + " |"

    lines = [f"### {_escape_markdown(title(table.recipe))}", ""]
    lines += [_escape_markdown(table.headline), ""] if table.headline else []
    lines.append(line(map(_escape_markdown, [*table.row_axes, *table.heads()])))
    lines.append(line([*["---"] * len(table.row_axes), *["---:"] * len(table.columns)]))
    lines += [line([*map(_escape_markdown, table.labels(row)), *map(cell, table.line(row))]) for row in table.rows]
    lines += ["", table.caption, *(f"\n{_escape_markdown(note)}" for note in table.notes)]
    lines += [f"\n**Warning:** {_escape_markdown(warning)}" for warning in table.warnings]
    made = ", ".join(f"{name} {' and '.join(found)}" for name, found in table.made_with.items())
    lines.append(f"\n{_escape_markdown(f'Made with {made}.')}")
    return "\n".join(lines) + "\n"


def _escape_markdown(text: str) -> str:
    r"""Return text for Markdown: one line, without markup, HTML and links.

    >>> print(_escape_markdown("a|b <script> [x](y)"))
    a\|b &lt;script&gt; \[x\](y)
    """
    escaped = re.sub(r"([\\`*|\[\]])", r"\\\1", " ".join(printable(text).split()))
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def latex(table: ResultTable) -> str:
    """Return the table as LaTeX, for booktabs and graphicx: at most as wide as its column."""

    def cell(entry: Entry) -> str:
        return f"\\textbf{{{_escape_latex(table.ours(entry))}}}" if entry.best else _escape_latex(table.ours(entry))

    def below(entry: Entry) -> str:
        details = _escape_latex(" ".join(table.details(entry)))
        return f"{{\\scriptsize {details}}}" if details else ""

    recipe, several = table.recipe, len(table.statistics)
    item = f" Laid out as {recipe.paper} of the paper." if recipe.paper else ""
    caption = " ".join([f"{caption_title(recipe)}.{item}", table.caption, *table.notes, *table.warnings])
    name = re.sub(r"[^A-Za-z0-9-]", "-", f"{recipe.name}-{recipe.scale}")
    lines = ["% \\usepackage{booktabs,graphicx}", "\\begin{table}", "\\centering"]
    lines += [f"\\caption{{{_escape_latex(caption)}}}", f"\\label{{tab:{name}}}", "\\smallskip"]
    lines += ["\\resizebox{\\ifdim\\width>\\columnwidth\\columnwidth\\else\\width\\fi}{!}{%"]  # shrink, never enlarge
    lines += [f"\\begin{{tabular}}{{{'l' * len(table.row_axes)}{'r' * len(table.columns)}}}", "\\toprule"]
    if several > 1 and table.col_axes:
        groups = [f"\\multicolumn{{{several}}}{{c}}{{{_escape_latex(head)}}}" for head in table.col_heads()]
        lines.append(" & ".join([*[""] * len(table.row_axes), *groups]) + " \\\\")
        starts = range(len(table.row_axes) + 1, len(table.row_axes) + 1 + several * len(table.cols), several)
        lines.append("".join(f"\\cmidrule(lr){{{start}-{start + several - 1}}}" for start in starts))
        heads = table.statistic_heads() * len(table.cols)
    else:
        heads = table.heads()
    lines += [" & ".join(map(_escape_latex, [*table.row_axes, *heads])) + " \\\\", "\\midrule"]
    before = None
    for row in table.rows:
        labels = table.labels(row, before)
        if before is not None and len(row) > 1 and labels[0]:
            lines.append("\\addlinespace")
        lines.append(" & ".join([*map(_escape_latex, labels), *map(cell, table.line(row))]) + " \\\\")
        if any(table.details(entry) for entry in table.line(row)):
            lines.append(" & ".join([*[""] * len(labels), *map(below, table.line(row))]).strip() + " \\\\")
        before = row
    lines += ["\\bottomrule", "\\end{tabular}}", "\\end{table}"]
    return "\n".join(lines) + "\n"


_TEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "[": "{[}",  # after a line break, a bracket would start an option
    "\\": "\\textbackslash{}",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "±": "$\\pm$",
    "\N{MINUS SIGN}": "$-$",
    DASH: "--",
    "\0": "{}",  # between two hyphens, which would make a dash
}


def _escape_latex(text: str) -> str:
    r"""Return text for LaTeX.

    >>> print(_escape_latex("50 % of a_b: --scale"))
    50 \% of a\_b: -{}-scale
    """
    apart = re.sub("-(?=-)", "-\0", " ".join(text.split()))
    return "".join(_TEX.get(c, c if c.isprintable() else "?") for c in apart)


def json(table: ResultTable) -> str:
    """Return the table as JSON."""
    return json_module.dumps(as_json(table), indent=2) + "\n"


def records(table: ResultTable) -> list[Json]:
    """Return the entries as flat records, the long form of the table."""
    return [
        {
            **entry.coordinates,
            "statistic": entry.statistic,
            "mean": entry.mean,
            "std": entry.std,
            "half_width": entry.half_width,
            "n": entry.n,
            "published": entry.published,
            "published_std": entry.published_std,
            "difference": entry.difference,
            "chosen": entry.chosen,
            "ids": list(entry.ids),
        }
        for entry in table.entries.values()
    ]


def csv(table: ResultTable) -> str:
    """Return the table in long form, a line for each cell and statistic."""
    rows = [{**record, "ids": " ".join(record["ids"])} for record in records(table)]
    return printable("".join(map(csv_line, [rows[0], *(row.values() for row in rows)])))


def as_json(table: ResultTable) -> Json:
    """Return the table as JSON types: the records, notes, warnings and versions."""
    recipe = table.recipe
    return {
        "recipe": recipe.name,
        "title": recipe.title,
        "paper": recipe.paper,
        "scale": recipe.scale,
        "headline": table.headline,
        "cells": records(table),
        "notes": list(table.notes),
        "warnings": list(table.warnings),
        "made_with": dict(table.made_with),
    }


CITATION = """@inproceedings{wei2023logitclip,
  title = {Mitigating Memorization of Noisy Labels by Clipping the Model Prediction},
  author = {Wei, Hongxin and Zhuang, Huiping and Xie, Renchunzi and Feng, Lei and Niu, Gang and An, Bo and Li, Yixuan},
  booktitle = {International Conference on Machine Learning (ICML)},
  year = {2023},
}"""


# -- the page ----------------------------------------------------------------------------------------------------------


def html(table: ResultTable, rows: Sequence[CellOutcome]) -> str:
    """Return a page with the table, examples, curves, noise and settings, in one file that opens offline."""
    drawing.vl_convert()  # fail now if a package is missing, before anything is computed
    ranked = table.recipe.figure is not None and table.recipe.figure["kind"] == "ranks"  # too many rows for curves
    curves = figures.curves(table.recipe, () if ranked else rows)
    matrices, unknown = figures.noise_charts(() if ranked else rows)
    return drawing.render(
        "report.html",
        table=table,
        title=paper_title(table.recipe),
        facts=_describe_runs(rows, table.recipe.scale),
        comparison=None if ranked else examples.compare(rows),
        commands=[table.recipe.command(), f"{table.recipe.command('report')} -o report.html"],
        citation=CITATION,
        # None as long as no column has a result in every row.
        figure=drawing.svg(figures.draw(table.recipe, rows)) if ranked and rank_rows(table) else None,
        curves=figures.curve_charts(curves),
        groups=list(zip(curves.groups, itertools.cycle(drawing.COLOURS), strict=False)),
        links=list(zip(curves.links, figures.LINK_DASHES, strict=False)),
        matrices=matrices,
        unknown=unknown,
        settings=_describe_settings(rows),
        provenance=table.made_with,
        script="" if ranked else drawing.runtime(),
    )


def _describe_runs(rows: Sequence[CellOutcome], scale: str) -> dict[str, str]:
    """Return the numbers in the header of the page."""
    results = results_of(rows)
    data = datasets_of(row.cell for row in rows)
    facts = {"data": data, "scale": scale, "runs": f"{len(results)} of {len(rows)}"}
    if results:
        newest = max((result.folder / RESULT).stat().st_mtime for result in results)
        facts["training time, summed over runs"] = duration(sum(result.seconds for result in results))
        facts["newest run"] = f"{datetime.fromtimestamp(newest):%Y-%m-%d %H:%M}"
    return facts


def _describe_settings(rows: Sequence[CellOutcome]) -> dict[str, list[str]]:
    """Return the resolved settings that differ from `RunConfig`'s defaults; for several values, the cells of each."""
    results = [(row.cell.coordinates, row.outcome) for row in rows if isinstance(row.outcome, Result)]
    defaults = {option.name: option.default for option in fields(RunConfig)}
    settings = {}
    for name in (name for name in defaults if name not in UNCOUNTED):
        cells: dict[str, list[Coordinates]] = {}
        for coordinates, result in results:
            cells.setdefault(str(result.config.get(name)), []).append(coordinates)
        if cells and (name == "data" or list(cells) not in ([str(defaults[name])], ["[]"])):
            settings[name] = [f"{value}{_describe_cells(name, value, cells)}" for value in cells]
    return settings


def _describe_cells(name: str, value: str, cells: Mapping[str, list[Coordinates]]) -> str:
    """Return the cells that have a setting, described by one or two axes if these are enough."""
    if len(cells) == 1 or max(cells, key=lambda other: len(cells[other])) == value:
        return ""  # only exceptions to the majority are described
    others = [coordinates for other, found in cells.items() if other != value for coordinates in found]
    axes = [axis for axis in cells[value][0] if axis not in (name, *AVERAGED)]
    for some in (*itertools.combinations(axes, 1), *itertools.combinations(axes, 2)):
        here = dict.fromkeys(tuple(coordinates[axis] for axis in some) for coordinates in cells[value])
        if not here.keys() & {tuple(coordinates[axis] for axis in some) for coordinates in others}:
            return f" ({'; '.join(', '.join(map(label, some, place)) for place in here)})"
    return ""


WRITERS: Mapping[str, Callable[[ResultTable, Sequence[CellOutcome]], str]] = {  # by the end of a file's name
    ".html": html,
    ".md": lambda table, _: markdown(table),
    ".tex": lambda table, _: latex(table),
    ".csv": lambda table, _: csv(table),
    ".json": lambda table, _: json(table),
}
