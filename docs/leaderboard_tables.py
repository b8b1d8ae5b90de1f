"""The tables of leaderboard.md, made from results/leaderboard_mini.csv, a report of the recipe `leaderboard`."""

from __future__ import annotations

import csv
import math
import statistics
from pathlib import Path

import numpy as np

from logitclip.studies.measures import LEVEL, average_ranks, bootstrap_interval, critical_difference
from logitclip.studies.recipe import load_recipe
from logitclip.studies.tables import label
from logitclip.text import counted

FILE = Path(__file__).parents[1] / "results" / "leaderboard_mini.csv"
Row = tuple[str, str]  # loss and clip, as they are shown
Board = dict[str, dict[Row, float]]  # column -> accuracy of each row, -inf if it diverged; only columns with all rows


def table(name: str) -> str:
    """`summary`, `ranks`, `columns` or `losses`."""
    board = read_board()
    if not board:
        return "No column is measured yet."
    return {"summary": summary, "ranks": ranks, "columns": columns, "losses": losses}[name](board)


def read_board() -> Board:
    """The columns in which every row has ended: a row without a number has diverged."""
    found: Board = {}
    if not FILE.is_file():
        return found
    with FILE.open(encoding="utf-8", newline="") as stream:
        for line in csv.DictReader(stream):
            if line["statistic"] == "last10_accuracy":
                row = label("loss", line["loss"], {"loss"}), label("clip", line["clip"])
                found.setdefault(line["column"], {})[row] = float(line["mean"] or -math.inf)
    return found


def rank(board: Board) -> dict[Row, np.ndarray]:
    """The rank of each row in each column, [C], best mean first."""
    rows = list(next(iter(board.values())))
    each = np.array([average_ranks(-np.array([column[row] for row in rows])) for column in board.values()])
    found = dict(zip(rows, each.T, strict=True))
    return dict(sorted(found.items(), key=lambda item: float(item[1].mean())))


def gains(board: Board, column: str) -> dict[str, float]:
    """The gain of the clip for each loss in a column, in points; infinite if only the run without it diverged."""
    found = board[column]
    (plain, clipped) = dict.fromkeys(clip for _, clip in found)
    names = [loss for loss, clip in found if clip == plain]
    return {loss: found[loss, clipped] - found[loss, plain] for loss in names if found[loss, clipped] > -math.inf}


def summary(board: Board) -> str:
    """What is measured, and the leaders."""
    planned = len({cell.coordinates["column"] for cell in load_recipe("leaderboard", "mini").cells})
    ranked = rank(board)
    first, *others = ranked
    text = f"Measured so far: {counted(len(board), 'column')} of {planned} ({', '.join(board)}), "
    text += f"{counted(len(ranked), 'row')} each. "
    if len(board) < 2:
        return text + f"Best: {', '.join(first)}. One column with one seed ranks nothing: take it as a first look."
    distance = critical_difference(len(ranked), len(board))
    near = [row for row in others if ranked[row].mean() - ranked[first].mean() < distance]
    text += f"Best mean rank: {', '.join(first)}, {ranked[first].mean():.1f}. By Nemenyi's test at {100 * LEVEL:g} % "
    return text + f"{counted(len(near), 'row')} cannot be told from it (ranks within {distance:.1f})."


def ranks(board: Board) -> str:
    """Every row with its mean rank, the interval over the columns, and its mean accuracy."""
    lines = ["| place | loss | clip | mean rank | interval | mean accuracy |", "|--:|---|---|--:|---|--:|"]
    for place, (row, found) in enumerate(rank(board).items(), start=1):
        low, high = bootstrap_interval(found)
        interval = f"{low:.1f} to {high:.1f}" if len(board) > 1 else "–"
        accuracy = statistics.fmean(column[row] for column in board.values())
        shown = f"{accuracy:.1f}" if accuracy > -math.inf else "diverged"
        lines.append(f"| {place} | `{row[0]}` | {row[1]} | {found.mean():.1f} | {interval} | {shown} |")
    return "\n".join(lines)


def columns(board: Board) -> str:
    """For each column the best row, CE, and what the clip does on average."""
    heads = ["column", "best", "its accuracy", "CE", "CE with the clip", "median gain of the clip", "losses it helps"]
    lines = [f"| {' | '.join(heads)} |", "|---|---|--:|--:|--:|--:|--:|"]
    for column, found in board.items():
        best = max(found, key=found.__getitem__)
        gained = gains(board, column)
        helped = f"{sum(gain > 0 for gain in gained.values())} of {len(gained)}"
        ce = [f"{accuracy:.1f}" for row, accuracy in found.items() if row[0] == "ce"]
        median = f"{statistics.median(gained.values()):+.1f}".replace("-", "−")
        shown = [column, ", ".join(best), f"{found[best]:.1f}", *ce, median, helped]
        lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines)


def losses(board: Board) -> str:
    """For each loss the mean gain of the clip over the columns, largest first, and where the clip does not help."""
    each = {column: gains(board, column) for column in board}
    names = dict.fromkeys(loss for gained in each.values() for loss in gained)
    found = {name: [gained[name] for gained in each.values() if name in gained] for name in names}
    lines = ["| loss | mean gain of the clip | where it does not help |", "|---|--:|---|"]
    for name, values in sorted(found.items(), key=lambda item: -statistics.fmean(item[1])):
        mean = statistics.fmean(values)
        shown = "diverges without it" if math.isinf(mean) else f"{mean:+.1f}".replace("-", "−")
        without = [column for column, gained in each.items() if gained.get(name, 1) <= 0]
        where = "everywhere" if len(without) == len(board) > 1 else ", ".join(without) or "–"
        lines.append(f"| `{name}` | {shown} | {where} |")
    return "\n".join(lines)
