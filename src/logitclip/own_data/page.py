"""The page of a model folder: training curves, estimated noise, suspicious labels. It opens offline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from logitclip import files
from logitclip.data.images import ImageFiles, png_address
from logitclip.own_data.issues import Issues, marked
from logitclip.own_data.model import Model
from logitclip.own_data.source import Source
from logitclip.runs.results import Result
from logitclip.studies import figures

SHOWN = 60  # suspicious labels on the page
MATRIX = 20  # classes up to which the transition matrix is shown
THUMBNAIL = 96  # pixels

TEMPLATE = "own_data.html"


def write_page(path: Path, model: Model, source: Source, issues: Issues, result: Result) -> None:
    """Write the page.

    Args:
        path: The file.
        model: The fitted model.
        source: The data it was fitted on.
        issues: The scores of its labels.
        result: The run of the final network.
    """
    suspicious = [int(i) for i in issues.ranking[:SHOWN]]
    noise = issues.noise
    matrix = None
    if issues.matrix is not None and len(source.class_names) <= MATRIX:
        assert noise.matrix_lower is not None
        assert noise.matrix_upper is not None
        matrix = [
            (name, [(f"{m:.0%}", f"{low:.0%} to {high:.0%}") for m, low, high in zip(*cells, strict=True)])
            for name, *cells in zip(
                source.class_names, issues.matrix, noise.matrix_lower, noise.matrix_upper, strict=True
            )
        ]
    page = figures.render(
        TEMPLATE,
        source=source,
        facts=model.facts,
        noise=model.noise_summary,
        accuracy=model.accuracy_summary,
        way=issues.way,
        marked=marked(int(issues.wrong.sum()), len(issues.ranking), issues.way, learnt=issues.learnt),
        matrix=matrix,
        rows=[
            {
                "name": source.names[i],
                "given": source.class_names[source.labels[i]],
                "suggested": source.class_names[issues.suggested[i]],
                "score": f"{issues.scores[i]:.3f}",
                "wrong": bool(issues.wrong[i]),
                "text": None if source.texts is None else source.texts[i][:300],
                "image": thumbnail,
            }
            for i, thumbnail in zip(suspicious, _thumbnails(source, suspicious), strict=True)
        ],
        curves=_curves(result),
    )
    files.replace(path, page.encode())


def _thumbnails(source: Source, rows: list[int]) -> list[str | None]:
    """Return the images as data addresses; None for tables and for images that cannot be read."""
    if source.kind != "image":
        return [None] * len(rows)
    folder = source.path if source.path.is_dir() else source.path.parent
    images = ImageFiles(folder, [source.names[i] for i in rows], min(THUMBNAIL, max(16, source.pixels)))
    return [_data_address(images, i) for i in range(len(rows))]


def _data_address(images: ImageFiles, i: int) -> str | None:
    try:
        return png_address(images.decode(i))
    except ValueError:
        return None


def _curves(result: Result) -> str:
    """Return loss and accuracies by epoch as one SVG picture."""
    alt: Any = figures.altair()
    rows = result.rows
    shown = {"train_accuracy": "training labels (noisy)", "test_accuracy": "held-out labels (noisy)"}
    values = [
        {"epoch": row["epoch"] + 1, "accuracy": row[name], "on": title}
        for row in rows
        for name, title in shown.items()
        if row[name] is not None
    ]
    chart = (
        alt.Chart(alt.Data(values=values))
        .mark_line()
        .encode(
            x=alt.X("epoch:Q", title="epoch", axis=alt.Axis(tickMinStep=1)),
            y=alt.Y("accuracy:Q", title="accuracy, %", scale=alt.Scale(zero=False)),
            color=alt.Color("on:N", title=None, legend=alt.Legend(orient="bottom")),
        )
        .properties(width=560, height=240)
    )
    return figures.vl_convert().vegalite_to_svg(chart.to_dict(), vl_version=figures.vega_lite_version())
