"""The page of a model folder: accuracy of the learners, estimated noise, suspicious labels. It opens offline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from logitclip import files
from logitclip.own_data.issues import UNCERTAIN, Issues, count_marked, find_suggestion, show_values
from logitclip.own_data.kind import Source
from logitclip.own_data.model import Model
from logitclip.studies import drawing

ISSUES_ON_PAGE = 60  # suspicious labels on the page
MATRIX = 20  # classes up to which the transition matrix is shown

TEMPLATE = "own_data.html"


def write_page(path: Path, model: Model, source: Source, issues: Issues, mattered: Mapping[int, Sequence[str]]) -> None:
    """Write the page; of the rows in `mattered` it shows these columns."""
    page = drawing.render(
        TEMPLATE,
        source=source,
        facts=model.facts,
        clip=model.clip,
        noise=model.noise_summary,
        accuracy=model.accuracy_summary,
        marked=count_marked(int(issues.wrong.sum()), len(issues.ranking), learnt=issues.learnt),
        matrix=_format_matrix(source, issues),
        rows=[
            {
                "name": source.rows.names[i],
                "given": source.class_names[int(source.labels[i])],
                "suggested": find_suggestion(issues, i, source) or UNCERTAIN,
                "score": f"{issues.scores[i]:.3f}",
                "wrong": bool(issues.wrong[i]),
                "text": show_values(source, i, mattered.get(i, ())),
                "image": source.kind.thumbnail(i),
            }
            for i in map(int, issues.ranking[:ISSUES_ON_PAGE])
        ],
        accuracies=_list_accuracies(model),
    )
    files.replace(path, page.encode(errors="backslashreplace"))  # the name of the data need not be UTF-8


def _format_matrix(source: Source, issues: Issues) -> list[tuple[str, list[tuple[str, str]]]] | None:
    """Return the transition matrix as text, with its intervals; None if it is unknown or too large."""
    noise = issues.noise
    if not issues.learnt or noise.matrix is None or len(source.class_names) > MATRIX:
        return None
    assert noise.matrix_lower is not None
    assert noise.matrix_upper is not None
    rows = zip(source.class_names, noise.matrix, noise.matrix_lower, noise.matrix_upper, strict=True)
    return [
        (name, [(f"{m:.0%}", f"{low:.0%} to {high:.0%}") for m, low, high in zip(*cells, strict=True)])
        for name, *cells in rows
    ]


def _list_accuracies(model: Model) -> list[tuple[str, str]]:
    """Return the accuracy of the learners and of all together on held-out noisy labels."""
    each = [(one["name"], one["noisy_accuracy"]) for one in model.facts["learners"] if "noisy_accuracy" in one]
    return [(name, f"{share:.1%}") for name, share in [*each, ("the model", model.facts["noisy_accuracy"])]]
