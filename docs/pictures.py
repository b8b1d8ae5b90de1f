"""Draws the pictures of the documentation from committed data: CSV files of results/ and benchmarks/results/, the code.

    python docs/pictures.py                 all of them
    python docs/pictures.py temp.svg ...    some of them

All have the style of `logitclip figures` (`logitclip.studies.drawing`), and one y axis for a row of panels. The
pictures of CIFAR-10's noise need its files: LOGITCLIP_DATA names their folder. Screenshots are made by
docs/screenshots.py.
"""

from __future__ import annotations

import functools
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import altair as alt
import evidence_tables
import head_tables
import leaderboard_tables
import numpy as np
import review_tables
import torch
from evidence_tables import read

from logitclip.studies import drawing, figures
from logitclip.studies.drawing import BLUE, COLOURS, GREY, ORANGE, SMALL, WIDE, colour_and_dash
from logitclip.studies.measures import bootstrap_interval

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "results"


def save(chart: Any, path: Path) -> None:
    """Write a picture in the style of `logitclip figures`, and refuse text that is too small to read."""
    drawing.save(drawing.apply_style(chart), path)
    check(path)


def check(path: Path) -> None:
    """Refuse a picture whose text a page would show below SMALL pixels."""
    svg = path.read_text(encoding="utf-8")
    width = int(re.findall(r'width="(\d+)', svg)[0])
    least = min(map(float, re.findall(r'font-size[=:]"?([\d.]+)', svg)))
    if least * min(1, WIDE / width) < SMALL:
        raise SystemExit(f"{path.name} is {width} pixels wide, with text of {least}: too small on a page.")


def data_of(values: list[dict[str, Any]]) -> Any:
    return alt.Data(values=values)  # type: ignore[arg-type]


# -- curves over the epochs --------------------------------------------------------------------------------------------

QUANTITIES = {"test_accuracy": "test accuracy, %", "memorised": "wrong labels memorised, %"}


def first_page(join: Callable[..., Any]) -> Any:
    """CE with and without the clip on people's labels, all of CIFAR-10: two panels, with the names beside the lines."""
    rows = read(RESULTS / "curves_features_curves_full.csv")
    names = {"no clip": "cross entropy", "temp=2.24": "with the clip"}
    (ceiling,) = (
        row["true_labels"]
        for row in read(RESULTS / "early_stopping.csv")
        if (row["recipe"], row["scale"], row["model"]) == ("features", "worst", "mlp:depth=1")
    )
    panels = []
    for quantity, title in QUANTITIES.items():
        points = [row | {"series": names[row["series"]]} for row in rows if row["quantity"] == quantity]
        last = max(row["epoch"] for row in points)
        base = alt.Chart(width=300, height=210)
        x = alt.X("epoch:Q", title="epoch", scale=alt.Scale(domain=[1, last], nice=False), axis=alt.Axis(tickCount=6))
        y = alt.Y("mean:Q", title=None, scale=alt.Scale(domain=[0, 110], nice=False))
        keys = colour_and_dash("series", list(names.values()), show=False)
        layers = [base.mark_line(strokeWidth=2.6).encode(x=x, y=y, **keys).properties(data=data_of(points))]
        at_end = [row for row in points if row["epoch"] == last]
        notes = [
            {
                "epoch": last,
                "mean": row["mean"],
                "text": f"{row['series']}: {row['mean']:.0f} %",
                "series": row["series"],
            }
            for row in at_end
        ]
        accuracy = quantity == "test_accuracy"
        text = base.mark_text(align="right", dy=13 if accuracy else -9, fontSize=13, fontWeight="bold").encode(
            x="epoch:Q", y="mean:Q", text="text:N", color=keys["color"]
        )
        layers.append(text.properties(data=data_of(notes)))
        if accuracy:
            line = [{"mean": ceiling, "epoch": last, "text": f"trained on true labels: {ceiling:.0f} %"}]
            rule = base.mark_rule(strokeDash=[2, 2], color=GREY).encode(y="mean:Q").properties(data=data_of(line))
            named = base.mark_text(align="right", dy=-8, fontSize=12, color=GREY).encode(
                x="epoch:Q", y="mean:Q", text="text:N"
            )
            layers += [rule, named.properties(data=data_of(line))]
        panels.append(alt.layer(*layers).properties(title=alt.TitleParams(title, fontSize=14, anchor="start")))
    return join(*panels, spacing=28)


def epochs(name: str, series: dict[str, str], panels: dict[str, str]) -> Any:
    """Test accuracy above memorised labels over the epochs: a column for each panel, one y axis for a row."""
    values = [
        {
            **{key: row[key] for key in ("quantity", "epoch", "mean")},
            "panel": panels[row["panel"]],
            "group": series[row["series"]],
            "link": "",
            "low": row["mean"],
            "high": row["mean"],
            "n": 1,
        }
        for row in read(RESULTS / f"curves_{name}.csv")
        if row["panel"] in panels
    ]
    return figures.draw_epochs(figures.Curves(values, list(panels.values()), list(series.values()), []))


# -- the clip ----------------------------------------------------------------------------------------------------------

CLIPS = {"tau=1": {"tau": 1.0}, "temp=1.5": {"temp": 1.5}, "temp=0.5": {"temp": 0.5}}


def link() -> Any:
    """The norm after the clip over the norm before it: Eq. 3, and temp on both sides of 1."""
    from logitclip.clip import make_clip

    points = []
    for name, given in CLIPS.items():
        tau, delta, _ = make_clip(**given)
        ends = [(0.0, 0.0, "below"), (tau, tau, "below"), (tau, delta, "above"), (4.0, delta, "above")]
        points += [{"clip": name, "norm": x, "clipped": y, "side": side} for x, y, side in ends]
    return (
        alt.Chart(data_of(points), width=420, height=240)
        .mark_line(strokeWidth=2.5)
        .encode(
            x=alt.X("norm:Q", title="norm of the logits"),
            y=alt.Y("clipped:Q", title="norm after the clip"),
            detail="side:N",
            **colour_and_dash("clip", list(CLIPS)),
        )
    )


def jump() -> Any:
    """The cross entropy of a well-classified example over the norm of its logits: it jumps where delta is not tau."""
    import logitclip as lc
    from logitclip.clip import apply_clip, make_clip

    direction = torch.nn.functional.normalize(torch.eye(10, dtype=torch.float64)[:1] - 0.1)
    norms = torch.linspace(0.005, 3.995, 400, dtype=torch.float64)  # beside the thresholds, not on them
    points = []
    for name, given in CLIPS.items():
        clip = make_clip(**given)
        tau, logits = clip.tau, apply_clip(norms[:, None] * direction, clip)
        values = lc.losses.ce(logits, torch.zeros(len(norms), dtype=torch.int64))
        points += [
            {"clip": name, "norm": x, "value": y, "side": "above" if x > tau else "below"}
            for x, y in zip(norms.tolist(), values.tolist(), strict=True)
        ]
    return (
        alt.Chart(data_of(points), width=420, height=240)
        .mark_line(strokeWidth=2.5)
        .encode(
            x=alt.X("norm:Q", title="norm of the logits, which point at the label"),
            y=alt.Y("value:Q", title="cross entropy", scale=alt.Scale(domain=[0, 2.4])),
            detail="side:N",
            **colour_and_dash("clip", list(CLIPS)),
        )
    )


POINTS_IN_PLANE = ((0.45, 0.6), (-0.5, 0.3), (2.2, 1.5), (-1.1, 2.1), (-2.3, -0.9), (0.5, -1.9), (1.9, -0.6))


def geometry() -> Any:
    """Logits of two classes as points: those outside a circle move along their ray, the others stay."""
    import logitclip as lc

    before = torch.tensor(POINTS_IN_PLANE, dtype=torch.float64)
    panels = []
    clips: dict[str, dict[str, Any]] = {
        "tau=1: onto the circle": {"tau": 1.0},
        "temp=1.5: onto a smaller one": {"temp": 1.5},
    }
    for title, given in clips.items():
        after = lc.clip_logits(before, **given)
        moves = [
            {"x": a, "y": b, "x2": c, "y2": d, "moved": abs(a - c) + abs(b - d) > 0}
            for (a, b), (c, d) in zip(before.tolist(), after.tolist(), strict=True)
        ]
        tau = given.get("tau", given.get("temp", 0.0))
        radii = {"threshold": tau, "after": 1 / tau}
        turn = np.linspace(0, 2 * np.pi, 90)
        circles = [
            {"x": r * np.cos(t), "y": r * np.sin(t), "i": i, "circle": name}
            for name, r in radii.items()
            for i, t in enumerate(turn)
        ]
        axis = alt.Axis(tickCount=5)
        scale = alt.Scale(domain=[-2.6, 2.6], nice=False)
        x = alt.X("x:Q", title="logit of class 1", scale=scale, axis=axis)
        y = alt.Y("y:Q", title="logit of class 2", scale=scale, axis=axis)
        base = alt.Chart(width=270, height=270)
        ring = base.mark_line(color=GREY, strokeWidth=1.6).encode(
            x=x, y=y, order="i:Q", detail="circle:N", strokeDash=alt.StrokeDash("circle:N", legend=None)
        )
        arrows = base.mark_line(color=BLUE, strokeWidth=2).encode(x=x, y=y, detail="k:N", order="end:Q")
        ends = [
            {"x": move["x2" if end else "x"], "y": move["y2" if end else "y"], "k": k, "end": end}
            for k, move in enumerate(moves)
            for end in (0, 1)
        ]
        shown = [{"x": m["x"], "y": m["y"], "when": "before"} for m in moves]
        shown += [{"x": m["x2"], "y": m["y2"], "when": "after"} for m in moves]
        dots = base.mark_point(filled=True, size=70, opacity=1).encode(
            x=x,
            y=y,
            color=alt.Color(
                "when:N",
                title=None,
                scale=alt.Scale(domain=["before", "after"], range=[ORANGE, BLUE]),
                legend=alt.Legend(orient="bottom"),
            ),
            shape=alt.Shape("when:N", scale=alt.Scale(domain=["before", "after"], range=["square", "circle"])),
        )
        layers = [
            ring.properties(data=data_of(circles)),
            arrows.properties(data=data_of(ends)),
            dots.properties(data=data_of(shown)),
        ]
        panels.append(alt.layer(*layers).properties(title=alt.TitleParams(title, fontSize=14)))
    return alt.hconcat(*panels, spacing=24)


# -- losses and noises -------------------------------------------------------------------------------------------------


def loss_shapes() -> Any:
    """The shape of every loss over the probability of the label, with ten classes and the rest spread evenly.

    Each runs from 1 to 0, so that all have the same axis.
    """
    from logitclip.losses import LOSSES

    p = torch.linspace(0.001, 0.999, 60, dtype=torch.float64)
    logits = torch.stack([p.log(), *[((1 - p) / 9).log()] * 9], dim=1)
    target = torch.zeros(len(p), dtype=torch.int64)
    points = []
    for name in LOSSES:
        values = LOSSES[name](logits, target)
        values = (values - values[-1]) / (values[0] - values[-1])
        points += [{"loss": name, "p": a, "value": b} for a, b in zip(p.tolist(), values.tolist(), strict=True)]
    base = alt.Chart(data_of(points), width=132, height=85).mark_line(color=BLUE, strokeWidth=2)
    chart = base.encode(
        x=alt.X("p:Q", title="probability", axis=alt.Axis(tickCount=3)),
        y=alt.Y("value:Q", title=None, axis=alt.Axis(tickCount=2), scale=alt.Scale(domain=[0, 1])),
    )
    return chart.facet(alt.Facet("loss:N", title=None), columns=4, spacing={"row": 36, "column": 30}, bounds="flush")


OWN_MATRIX = "transition:matrix=FILE"
MATRICES = {  # dataset and noise, by the words above them
    "symmetric 40 %": ("digits", "symmetric:rate=0.4"),
    "symmetric, itself included": ("digits", "symmetric:rate=0.4,include_self=true"),
    "pair": ("digits", "pair:rate=0.4"),
    "asymmetric, blocks": ("digits", "asymmetric:rate=0.4,variant=blocks"),
    "asymmetric, pairs": ("digits", "asymmetric:rate=0.4,variant=pairs"),
    "a matrix of your own": ("digits", OWN_MATRIX),
    "asymmetric": ("cifar10", "asymmetric:rate=0.4"),
    "instance": ("cifar10", "instance:rate=0.4"),
    "instance, released": ("cifar10", "instance:rate=0.4,variant=released"),
    "real, worst": ("cifar10", "real:set=worst"),
}


def noise_matrices() -> Any:
    """The transition matrix of each noise rule that changes labels, on the digits and on CIFAR-10."""
    from logitclip import data, noise

    load = functools.cache(data.load)
    # A matrix of one's own: 3 and 8, and 4 and 9, are taken for each other.
    matrix = torch.eye(10)
    for j, k in ((3, 8), (8, 3), (4, 9), (9, 4)):
        matrix[j, j], matrix[j, k] = 0.6, 0.4

    def transition(dataset: str, spec: str) -> list[list[float]]:
        if spec != OWN_MATRIX:
            return noise.apply(spec, load(dataset), seed=0).transition.tolist()
        with tempfile.TemporaryDirectory() as folder:
            np.save(f"{folder}/m.npy", matrix)
            return noise.apply(f"transition:matrix={folder}/m.npy", load(dataset), seed=0).transition.tolist()

    cells = [
        {
            "noise": name,
            "true": load(dataset).class_names[j],
            "label": load(dataset).class_names[k],
            "share": float(share),
        }
        for name, (dataset, spec) in MATRICES.items()
        for j, row in enumerate(transition(dataset, spec))
        for k, share in enumerate(row)
    ]
    return (
        alt.Chart(data_of(cells), width=150, height=150)
        .mark_rect()
        .encode(
            x=alt.X("label:O", title="label", sort=None),
            y=alt.Y("true:O", title="true class", sort=None),
            color=alt.Color(
                "share:Q",
                title="share of a class",
                scale=alt.Scale(scheme="blues", domain=[0, 1]),
                legend=alt.Legend(orient="bottom"),
            ),
        )
        .facet(
            alt.Facet("noise:N", title=None, sort=list(MATRICES)),
            columns=3,
            spacing={"row": 94, "column": 76},
            bounds="flush",
        )
        .resolve_scale(x="independent", y="independent")
    )


# -- evidence ----------------------------------------------------------------------------------------------------------


def readings(scale: str) -> Any:
    """Accuracy and memorised share over the tabulated value v, for each reading of tau; without a clip, dashed."""
    from logitclip.studies.tables import label

    found = evidence_tables.reading_points(read(RESULTS / f"readings_{scale}.csv"))
    noises = sorted(dict.fromkeys(noise for _, noise in found), key=lambda noise: noise == "none")  # it memorises none
    names = list(evidence_tables.READINGS.values())
    rows = []
    for model, what in dict.fromkeys((model, what) for model, _ in found for what in ("accuracy", "memorised")):
        points = [
            {"noise": label("noise", noise), **point, "reading": evidence_tables.READINGS[point["reading"]]}
            for (network, noise), of_noise in found.items()
            for point in of_noise
            if network == model and (what == "accuracy" or point["memorised"] is not None)
        ]
        base = alt.Chart(width=(WIDE - 100) // len(noises) - 22, height=115)
        lines = base.mark_line(point=alt.OverlayMarkDef(size=22)).encode(
            x=alt.X("v:Q", scale=alt.Scale(type="log"), axis=alt.Axis(values=[0.2, 0.5, 1, 2, 5]), title="v"),
            y=alt.Y(f"{what}:Q", title=f"{what}, %", scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=5)),
            **colour_and_dash("reading", names, columns=2),
        )
        plain = base.mark_rule(strokeDash=[1, 3], strokeWidth=1.5, color=GREY).encode(y=f"mean(plain_{what}):Q")
        order = [label("noise", noise) for noise in noises]
        panels = alt.layer(lines, plain, data=data_of(points))
        several = len({model for model, _ in found}) > 1
        title = {"plain": "without batch norm", "batch_norm": "with batch norm"}.get(model, model.replace("_", " "))
        column = alt.Column("noise:N", title=None, sort=order)
        row = panels.facet(column=column, spacing=16)
        rows.append(
            row.properties(title=alt.TitleParams(title, fontSize=13)) if several and what == "accuracy" else row
        )
    return alt.vconcat(*rows, spacing=10)


def temps(scale: str) -> Any:
    """Figure 2: accuracy over tau for each noise; without the clip, a dotted level with its name."""
    from logitclip.studies.tables import label

    rows = read(RESULTS / f"figure2_{scale}.csv")
    points = [
        {
            "noise": label("noise", row["noise"]),
            "tau": 1 / float(row["clip"].rpartition("=")[2]),
            "accuracy": row["with_clip"],
            "plain": row["without"],
        }
        for row in rows
    ]
    base = alt.Chart(data_of(points), width=520, height=260)
    keys = colour_and_dash("noise", list(dict.fromkeys(point["noise"] for point in points)))
    lines = base.mark_line(point=alt.OverlayMarkDef(size=30), strokeWidth=2.2).encode(
        x=alt.X("tau:Q", title="tau = 1/temp", scale=alt.Scale(type="log", domain=[0.065, 10], nice=False)),
        y=alt.Y("accuracy:Q", title="test accuracy, %", scale=alt.Scale(zero=False)),
        **keys,
    )
    levels = {point["noise"]: {"noise": point["noise"], "plain": point["plain"], "tau": 0.067} for point in points}
    plain = base.mark_rule(strokeDash=[1, 3], strokeWidth=1.5).encode(y="plain:Q", color=keys["color"])
    layers = [lines, plain.properties(data=data_of(list(levels.values())))]
    highest = max(levels, key=lambda noise: levels[noise]["plain"])
    for noise, level in levels.items():  # the name is below its line; that of the highest one above
        text = base.mark_text(align="left", dy=-8 if noise == highest else 9, fontSize=SMALL).encode(
            x="tau:Q", y="plain:Q", text="text:N", color=keys["color"]
        )
        layers.append(text.properties(data=data_of([level | {"text": f"no clip, {noise}"}])))
    return alt.layer(*layers)


THOUSANDS = "datum.value < 1e6 ? datum.value / 1024 + 'k' : '1M'"
HEADS = {"plain": "plain PyTorch", "clip": "with the clip, unfused", "ours": "linear_cross_entropy"}


def heads() -> Any:
    """Time and memory of a step over the number of classes, 256 rows of width 512."""
    panels, powers = [], [10.0**k for k in range(-1, 5)]
    for column, title in {"seconds": "seconds a step", "extra_mb": "extra memory, MB"}.items():
        of, _ = head_tables._costs(column)
        points = [
            {"classes": classes, "value": value, "head": HEADS[case]}
            for (classes, width, rows, case), value in of.items()
            if (width, rows) == (512, 256) and case in HEADS
        ]
        panels.append(
            alt.Chart(data_of(points), width=285, height=200)
            .mark_line(point=alt.OverlayMarkDef(size=40), strokeWidth=2.4)
            .encode(
                x=alt.X(
                    "classes:Q",
                    title="classes",
                    scale=alt.Scale(type="log", domain=[2**14, 2**20], nice=False),
                    axis=alt.Axis(values=[2**14, 2**16, 2**18, 2**20], labelExpr=THOUSANDS),
                ),
                y=alt.Y("value:Q", title=None, scale=alt.Scale(type="log"), axis=alt.Axis(values=powers, format="~g")),
                **colour_and_dash("head", list(HEADS.values())),
            )
            .properties(title=alt.TitleParams(title, fontSize=14, anchor="start"))
        )
    return alt.hconcat(*panels, spacing=28)


RANKINGS = {"logitclip": "logitclip", "cleanlab": "cleanlab", "random": "random order"}


def reviewed() -> Any:
    """Wrong labels found against rows reviewed, by three rankings, on eight sets."""
    rows = [row for row in read(RESULTS / "review_curves.csv") if row["reviewer"] == "right"]
    points = [{**row, "set": review_tables.SETS[row["set"]], "ranking": RANKINGS[row["ranking"]]} for row in rows]
    return (
        alt.Chart(data_of(points), width=140, height=130)
        .mark_line(point=alt.OverlayMarkDef(size=25), strokeWidth=2)
        .encode(
            x=alt.X("reviewed:Q", title="rows reviewed, %", axis=alt.Axis(tickCount=4)),
            y=alt.Y("found:Q", title="found, %", axis=alt.Axis(tickCount=4)),
            **colour_and_dash("ranking", list(RANKINGS.values())),
        )
        .facet(facet=alt.Facet("set:N", title=None), columns=4, spacing=14)
    )


def reliability() -> Any:
    """The share of wrong labels in each tenth of the score of `issues`, with the line where the score is right."""
    points = [
        {"score": (float(row["from"]) + float(row["to"])) / 2, "wrong": int(row["wrong"]) / int(row["labels"])}
        for row in read(RESULTS / "own_data_scores.csv")
        if int(row["labels"])
    ]
    x = alt.X("score:Q", title="score", scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(tickCount=5))
    y = alt.Y("wrong:Q", title="share of wrong labels", scale=alt.Scale(domain=[0, 1]))
    line = alt.Chart(data_of([{"score": end, "wrong": end} for end in (0, 1)])).mark_line(
        strokeDash=[4, 4], color=COLOURS[1]
    )
    curve = alt.Chart(data_of(points)).mark_line(
        point=alt.OverlayMarkDef(size=40, color=COLOURS[0]), strokeWidth=2, color=COLOURS[0]
    )
    return alt.layer(line.encode(x=x, y=y), curve.encode(x=x, y=y)).properties(width=300, height=240)


def ranked_losses() -> Any:
    """The mean rank of each loss with and without the clip over the columns of the leaderboard, with its interval."""
    names = {"no clip": "no clip", "tuned temp": "with the clip"}
    points = []
    for (loss, clip), found in leaderboard_tables.rank(leaderboard_tables.read_board()).items():  # best first
        low, high = bootstrap_interval(found)
        points.append({"loss": loss, "clip": names[clip], "mean": float(found.mean()), "low": low, "high": high})
    order = list(dict.fromkeys(point["loss"] for point in points))
    keys = colour_and_dash("clip", list(names.values()))
    y = alt.Y("loss:N", title=None, sort=order, axis=alt.Axis(labelOverlap=False, grid=True))
    offset = alt.YOffset("clip:N", sort=["with the clip", "no clip"])
    base = alt.Chart(data_of(points), width=WIDE - 160, height={"step": 11}).encode(y=y, yOffset=offset, **keys)
    x = alt.X("low:Q", title=f"mean rank of {len(points)}, 1 is best", scale=alt.Scale(domain=[0, len(points) + 1]))
    spans = base.mark_rule(strokeWidth=2).encode(x=x, x2="high:Q")
    return alt.layer(spans, base.mark_point(filled=True, size=50, opacity=1).encode(x="mean:Q"))


NOISES = {name: name for name in ("symmetric 20 %", "symmetric 50 %", "asymmetric 40 %", "dependent", "real")}
TEMPS = {
    "no clip": "no clip",
    "tuned temp": "tuned temp",
    "temp=1": "temp 1",
    "temp=2.5": "temp 2.5",
    "temp=5": "temp 5",
}
PICTURES: dict[str, Callable[[], Any]] = {
    "memorisation.svg": functools.partial(first_page, alt.hconcat),
    "memorisation_narrow.svg": functools.partial(first_page, alt.vconcat),
    "memorisation_mini.svg": functools.partial(
        epochs, "memorisation_mini", {"no clip": "cross entropy", "tuned temp": "with the clip"}, NOISES
    ),
    "real_noise.svg": functools.partial(
        epochs, "real_noise_full", TEMPS, {name: name for name in ("LabelMe", "TREC", "Hausa")}
    ),
    "leaderboard.svg": ranked_losses,
    "losses.svg": loss_shapes,
    "link.svg": link,
    "jump.svg": jump,
    "geometry.svg": geometry,
    "noise.svg": noise_matrices,
    "readings_mini.svg": functools.partial(readings, "mini"),
    "readings_cpu.svg": functools.partial(readings, "cpu"),
    "figure2_mini.svg": functools.partial(temps, "mini"),
    "figure2_cpu.svg": functools.partial(temps, "cpu"),
    "large_heads.svg": heads,
    "review.svg": reviewed,
    "reliability.svg": reliability,
}


def draw(names: Sequence[str]) -> None:
    for name in names:
        try:
            save(PICTURES[name](), DOCS / "img" / name)
        except ValueError as error:  # the data is not on this machine
            print(f"{name} stays as it is: {error}", file=sys.stderr)


if __name__ == "__main__":
    draw(sys.argv[1:] or list(PICTURES))
