"""Writers of a table: terminal, Markdown, LaTeX, CSV, JSON, and the HTML page with its charts."""

from __future__ import annotations

import csv as csv_module
import io
import json as json_module
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any

from logitclip.config import UNCOUNTED, RunConfig
from logitclip.progress import duration, printable
from logitclip.run_folder import Result
from logitclip.studies import figures
from logitclip.studies.recipe import Recipe
from logitclip.studies.sweeping import Row
from logitclip.studies.tables import DASH, Entry, Table, datasets_of, results_of

# -- writers -----------------------------------------------------------------------------------------------------------


def terminal(table: Table) -> Any:
    """The table for a terminal, as something that rich prints."""
    from rich import box
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, axis in enumerate(table.row_axes):
        longest = max(len(table.labels(row)[i]) for row in table.rows)
        shown.add_column(axis, overflow="fold", min_width=min(longest, 16))  # where it is narrow, numbers fold first
    for head in table.heads():
        shown.add_column(escape(head.replace(", ", "\n")), justify="right", overflow="fold")
    before = None
    for row in table.rows:
        labels = table.labels(row, before)
        if before is not None and len(row) > 1 and labels[0]:
            shown.add_section()
        cells = []
        for entry in table.line(row):
            cell = Text(table.ours(entry), style="bold" if entry.best else "")
            if table.compared:
                cell.append(f"\n{entry.beside}", "dim not bold")
            cells.append(cell)
        shown.add_row(*map(escape, labels), *cells)
        before = row
    below = [Text(table.caption, style="dim"), *map(Text, table.notes)]
    head = Text(title(table.recipe), style="bold")  # not the table's own title, which would be as narrow as the table
    return Group(head, shown, *below, *(Text(f"Warning: {warning}", style="yellow") for warning in table.warnings))


def markdown(table: Table) -> str:
    """The table as GitHub's Markdown; the paper's number and the difference stand in parentheses."""

    def cell(entry: Entry) -> str:
        ours = f"**{table.ours(entry)}**" if entry.best else table.ours(entry)
        return ours if entry.published is None else f"{ours} ({entry.theirs}; {entry.gap})"

    def line(texts: Iterable[str]) -> str:
        return "| " + " | ".join(texts) + " |"

    lines = [f"### {_md(title(table.recipe))}", ""]
    lines.append(line(map(_md, [*table.row_axes, *table.heads()])))
    lines.append(line([*["---"] * len(table.row_axes), *["---:"] * len(table.columns)]))
    lines += [line([*map(_md, table.labels(row)), *map(cell, table.line(row))]) for row in table.rows]
    caption = table.caption.replace("Second line:", "In parentheses:")
    lines += ["", caption, *(f"\n{_md(note)}" for note in table.notes)]
    lines += [f"\n**Warning:** {_md(warning)}" for warning in table.warnings]
    made = ", ".join(f"{name} {' and '.join(found)}" for name, found in table.made_with.items())
    lines.append(f"\n{_md(f'Made with {made}.')}")
    return "\n".join(lines) + "\n"


def _md(text: str) -> str:
    r"""Text for Markdown: one line, without markup, HTML and links.

    >>> print(_md("a|b <script> [x](y)"))
    a\|b &lt;script&gt; \[x\](y)
    """
    escaped = re.sub(r"([\\`*|\[\]])", r"\\\1", " ".join(printable(text).split()))
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def latex(table: Table) -> str:
    """The table as LaTeX with booktabs; the paper's numbers in a small second line of each row."""

    def cell(entry: Entry) -> str:
        return f"\\textbf{{{_tex(table.ours(entry))}}}" if entry.best else _tex(table.ours(entry))

    def paper(entry: Entry) -> str:
        return "" if entry.published is None else f"{{\\scriptsize {_tex(entry.beside)}}}"

    caption = " ".join([f"{title(table.recipe)}.", table.caption, *table.notes, *table.warnings])
    lines = ["\\begin{table}", "\\centering", f"\\caption{{{_tex(caption)}}}"]
    lines += [f"\\begin{{tabular}}{{{'l' * len(table.row_axes)}{'r' * len(table.columns)}}}", "\\toprule"]
    lines += [" & ".join(map(_tex, [*table.row_axes, *table.heads()])) + " \\\\", "\\midrule"]
    before = None
    for row in table.rows:
        labels = table.labels(row, before)
        if before is not None and len(row) > 1 and labels[0]:
            lines.append("\\addlinespace")
        lines.append(" & ".join([*map(_tex, labels), *map(cell, table.line(row))]) + " \\\\")
        if any(entry.published is not None for entry in table.line(row)):
            lines.append(" & ".join([""] * len(labels) + [paper(entry) for entry in table.line(row)]).strip() + " \\\\")
        before = row
    lines += ["\\bottomrule", "\\end{tabular}", "\\end{table}"]
    return "\n".join(lines) + "\n"


_TEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "[": "{[}",  # after the end of a line it would begin an option
    "\\": "\\textbackslash{}",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "±": "$\\pm$",
    "\N{MINUS SIGN}": "$-$",
    DASH: "--",
}


def _tex(text: str) -> str:
    return "".join(_TEX.get(c, c if c.isprintable() else "?") for c in " ".join(text.split()))


def json(table: Table) -> str:
    """The table as JSON."""
    return json_module.dumps(as_json(table), indent=2) + "\n"


def records(table: Table) -> list[dict[str, Any]]:
    """The entries as flat records, the long form of the table."""
    return [
        {
            **entry.coordinates,
            "statistic": entry.statistic,
            "mean": entry.mean,
            "std": entry.std,
            "n": entry.n,
            "published": entry.published,
            "published_std": entry.published_std,
            "difference": entry.difference,
            "ids": list(entry.ids),
        }
        for entry in table.entries.values()
    ]


def csv(table: Table) -> str:
    """The table in long form, a line for each cell and statistic."""
    text = io.StringIO()
    rows = [{**record, "ids": " ".join(record["ids"])} for record in records(table)]
    names = list(rows[0]) if rows else []
    writer = csv_module.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _csv(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def _csv(value: Any) -> Any:
    """A cell that no spreadsheet takes for a formula; numbers as they are.

    >>> _csv("=HYPERLINK(1)"), _csv("ce"), _csv(-1.5)
    ("'=HYPERLINK(1)", 'ce', -1.5)
    """
    if not isinstance(value, str):
        return value
    return f"'{value}" if value.startswith(("=", "+", "-", "@", "\t", "\r")) else printable(value)


def as_json(table: Table) -> dict[str, Any]:
    """The table as JSON's types: the records, and what is said below the table."""
    recipe = table.recipe
    return {
        "recipe": recipe.name,
        "title": recipe.title,
        "paper": recipe.paper,
        "scale": recipe.scale,
        "cells": records(table),
        "notes": list(table.notes),
        "warnings": list(table.warnings),
        "made_with": dict(table.made_with),
    }


def title(recipe: Recipe) -> str:
    """The recipe's title, the item of the paper, and the scale."""
    item = f"{recipe.paper}: " if recipe.paper and not recipe.title.startswith(recipe.paper) else ""
    scale = f" (scale {recipe.scale})" if recipe.paper or recipe.scale != "full" else ""
    return f"{item}{recipe.title}{scale}"


def check_suffix(path: Path) -> None:
    """Refuse a file name that has no writer, before anything is computed."""
    if path.suffix.lower() not in WRITERS:
        raise ValueError(f"A report is written as {', '.join(WRITERS)}, by the end of its name; got {str(path)!r}.")


# -- the page ----------------------------------------------------------------------------------------------------------


def html(table: Table, rows: Sequence[Row]) -> str:
    """One page with the table, curves, noise and settings that opens offline: everything it needs is inside."""
    figures.vl_convert()  # if it is missing, say so before anything is computed
    curves = figures.curves(table.recipe, rows)
    matrices, unknown = figures.noise_charts(rows)
    results = results_of(rows)
    return figures.render(
        "report.html",
        table=table,
        title=title(table.recipe),
        facts=_facts(rows),
        curves=figures.curve_charts(curves),
        groups=list(zip(curves.groups, figures.colours(curves), strict=True)),
        links=list(zip(curves.links, figures.DASHES, strict=False)),
        matrices=matrices,
        unknown=unknown,
        settings=_settings(results),
        provenance=table.made_with,
        script=figures.runtime(),
    )


def _facts(rows: Sequence[Row]) -> dict[str, str]:
    """What one wants to know first."""
    results = results_of(rows)
    facts = {"data": datasets_of(row.cell for row in rows), "runs": f"{len(results)} of {len(rows)}"}
    if results:
        newest = max((result.folder / "result.json").stat().st_mtime for result in results)
        facts["training time"] = duration(sum(result.seconds for result in results))
        facts["newest run"] = f"{datetime.fromtimestamp(newest):%Y-%m-%d %H:%M}"
    return facts


def _settings(results: Sequence[Result]) -> dict[str, list[str]]:
    """What the runs were set to, as resolved, where it differs from RunConfig's defaults; one value or several."""
    defaults = {option.name: option.default for option in fields(RunConfig)}
    settings = {}
    for name in defaults.keys() - set(UNCOUNTED):
        values = list(dict.fromkeys(str(result.config.get(name)) for result in results))
        if values and (name == "data" or values not in ([str(defaults[name])], ["[]"])):
            settings[name] = values
    return {name: settings[name] for name in defaults if name in settings}


WRITERS: Mapping[str, Callable[[Table, Sequence[Row]], str]] = {  # by the end of a file's name
    ".html": html,
    ".md": lambda table, _: markdown(table),
    ".tex": lambda table, _: latex(table),
    ".csv": lambda table, _: csv(table),
    ".json": lambda table, _: json(table),
}
