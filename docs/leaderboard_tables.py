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

RESULTS = Path(__file__).parents[1] / "results"
FILE, COST = RESULTS / "leaderboard_mini.csv", RESULTS / "leaderboard_cost.csv"
MADE = ("digits", "fashion")  # how the names of columns with rules of noise begin; people and keywords made the others
Row = tuple[str, str]  # loss and clip, as they are shown
Board = dict[str, dict[Row, float]]  # column -> accuracy of each row, -inf if it diverged; only columns with all rows


def table(name: str) -> str:
    """`summary`, `choice`, `ranks`, `columns`, `losses` or `cost`."""
    makers = {"summary": summary, "choice": choice, "ranks": ranks, "columns": columns, "losses": losses}
    return cost() if name == "cost" else makers[name](read_board())


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
    """What is measured, and the leader."""
    planned = len({cell.coordinates["column"] for cell in load_recipe("leaderboard", "mini").cells})
    ranked = rank(board)
    first, *others = ranked
    every = "" if len(board) == planned else f" of {planned}"
    low, high = bootstrap_interval(ranked[first])
    distance = critical_difference(len(ranked), len(board))
    pairs = [gain for column in board for gain in gains(board, column).values()]
    helped = sum(gain > 0 for gain in pairs)
    near = [row for row in others if ranked[row].mean() - ranked[first].mean() < distance]
    return (
        f"{counted(len(board), 'column')}{every}, {counted(len(ranked), 'row')}. Best mean rank: `{first[0]}` with "
        f"{name_clip(first)}, {ranked[first].mean():.1f} ({low:.1f} to {high:.1f}). The test that corrects for so many "
        f"rows (Nemenyi's, at {100 * LEVEL:g} %) cannot tell it from {len(near)} others, whose ranks are within "
        f"{distance:.1f} of it. In {helped} of {len(pairs)} pairs of runs that differ only in the clip, it raises "
        "accuracy."
    )


def name_clip(row: Row) -> str:
    return "no clip" if row[1] == "no clip" else "the clip"


def choice(board: Board) -> str:
    """The row that 13 columns choose, by its rank in the 14th; and the best rows on labels of people and of rules."""
    ranked = rank(board)
    rows, names = list(ranked), list(board)
    ranks = np.array(list(ranked.values()))
    left_out = [int(np.delete(ranks, i, axis=1).mean(1).argmin()) for i in range(len(names))]
    chosen = {rows[i] for i in left_out}
    if len(chosen) > 1:
        raise ValueError(f"The columns disagree: {sorted(chosen)}. Write the sentence anew.")
    (row,) = chosen
    mean = statistics.fmean(ranks[i, column] for column, i in enumerate(left_out))
    gap = [max(found.values()) - found[row] for found in board.values()]
    real = np.array([not name.startswith(MADE) for name in names])
    best_real = rows[int(ranks[:, real].mean(1).argmin())]
    of = {each: ranks[rows.index(each)] for each in (row, best_real)}
    ce = {clip: statistics.fmean(found["ce", clip] for found in board.values()) for clip in ("no clip", "tuned temp")}
    accuracy = statistics.fmean(found[row] for found in board.values())
    return (
        f"**`{row[0]}` with {name_clip(row)}.** Leave out one column at a time: the other {len(names) - 1} choose it "
        f"every time, and in the column left out its rank is {mean:.1f} of {len(rows)} on average. Its mean "
        f"accuracy is {accuracy:.1f} %; CE has {ce['no clip']:.1f} %, with the clip {ce['tuned temp']:.1f} %. It is "
        f"{statistics.fmean(gap):.1f} points behind the best row of a column on average, "
        f"{max(gap):.1f} at most ({names[int(np.argmax(gap))]}).\n\n"
        f"For labels of people and keyword rules only, `{best_real[0]}` with {name_clip(best_real)} is ahead: mean "
        f"rank {of[best_real][real].mean():.1f} in these {counted(int(real.sum()), 'column')}, where `{row[0]}` has "
        f"{of[row][real].mean():.1f}. Under synthetic noise it is the other way round: "
        f"{of[best_real][~real].mean():.1f} against {of[row][~real].mean():.1f}."
    )


def cost() -> str:
    """Runs, trials and their seconds of training, by column."""
    with COST.open(encoding="utf-8", newline="") as stream:
        rows = [{**line, "seconds": float(line["seconds"])} for line in csv.DictReader(stream)]
    lines = ["| column | runs | trials | minutes of one core |", "|---|--:|--:|--:|"]
    lines += [f"| {row['column']} | {row['runs']} | {row['trials']} | {row['seconds'] / 60:.1f} |" for row in rows]
    runs, trials = (sum(int(row[key]) for row in rows) for key in ("runs", "trials"))
    lines.append(f"| all | {runs:,} | {trials:,} | {sum(row['seconds'] for row in rows) / 60:.0f} |")
    return "\n".join(lines)


def ranks(board: Board) -> str:
    """Every row with its mean rank, the interval over the columns, and its mean accuracy."""
    lines = ["| place | loss | clip | mean rank | interval | mean accuracy |", "|--:|---|---|--:|---|--:|"]
    for place, (row, found) in enumerate(rank(board).items(), start=1):
        low, high = bootstrap_interval(found)
        interval = f"{low:.1f} to {high:.1f}"
        accuracy = statistics.fmean(column[row] for column in board.values())
        lost = sum(column[row] == -math.inf for column in board.values())
        shown = f"{accuracy:.1f}" if not lost else f"diverged in {lost}"
        lines.append(f"| {place} | `{row[0]}` | {row[1]} | {found.mean():.1f} | {interval} | {shown} |")
    return "\n".join(lines)


def columns(board: Board) -> str:
    """For each column the best row, CE, and what the clip does on average."""
    heads = ["column", "best", "its accuracy", "CE", "stopped early", "best epoch", "CE with the clip", "true labels"]
    heads += ["median gain of the clip", "losses it helps"]
    lines = [f"| {' | '.join(heads)} |", "|---|---|" + "--:|" * (len(heads) - 2)]
    with (RESULTS / "early_stopping.csv").open(encoding="utf-8", newline="") as stream:
        rivals = {row["variant"]: row for row in csv.DictReader(stream) if row["recipe"] == "leaderboard"}
    for column, found in board.items():
        best = max(found, key=found.__getitem__)
        gained = gains(board, column)
        helped = f"{sum(gain > 0 for gain in gained.values())} of {len(gained)}"
        plain, clipped = (f"{accuracy:.1f}" for row, accuracy in found.items() if row[0] == "ce")
        other = rivals.get(column, {})
        early, best_epoch, true = (
            f"{float(other[name]):.1f}" if other else "–" for name in ("early", "oracle", "true_labels")
        )
        ce = [plain, early, best_epoch, clipped, true]
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
