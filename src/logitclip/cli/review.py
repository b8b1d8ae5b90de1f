"""Commands to review labels and to put the answers back: review, apply."""

from __future__ import annotations

import contextlib
import secrets
import shlex
import sys
import webbrowser
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.markup import escape
from tyro.conf import arg

from logitclip.cli.options import File, Flag, ModelFolder, ModelPlugins
from logitclip.cli.output import make_table, put, show, show_json, tell
from logitclip.cli.training import stop_on_sigterm
from logitclip.files import Json
from logitclip.runs.plugins import load_plugins
from logitclip.text import counted, join_names

if TYPE_CHECKING:
    from logitclip.own_data.apply import CorrectedData, Round
    from logitclip.own_data.audit import Rate, Report
    from logitclip.own_data.model import Model
    from logitclip.own_data.review import Review

ModelData = Annotated[File, arg(help="The data of the model, if it is no longer where the model was fitted.")]
PlainInt = Annotated[int, arg(metavar="INT")]

NAMED = 10  # rows that are named in a message


def review(
    model: ModelFolder,
    /,
    *,
    audit: PlainInt = 0,
    answers: File = None,
    out: Annotated[File, arg(aliases=["-o"])] = None,
    data: ModelData = None,
    port: PlainInt = 0,
    no_browser: Flag = False,
    report: Flag = False,
    plugin: ModelPlugins = (),
    json: Flag = False,
) -> None:
    """Review suspicious labels in the browser, and measure how many labels are wrong.

    Example: logitclip review model --audit 100

    The page is served on this machine only. Each answer is saved in the model folder before the next example is shown.
    Stop the server with Ctrl-C; the same command continues.

    Args:
        audit: Rows to draw at random, at least about 25: they say how many labels are wrong and how good the model is.
        answers: A file answers.csv from a review page to merge, instead of serving the page.
        out: Write the page as one file, such as review.html, for somebody who has no Python, instead of serving it.
        port: The port of the server; 0 takes 8765, or another if that is taken.
        no_browser: Print the address and do not open a browser.
        report: Print what the answers so far say, instead of serving the page.
        json: Print what the answers say as one JSON object on stdout.
    """
    from logitclip.own_data import load
    from logitclip.own_data.answers import ANSWERS, merge_answers, read_answers_csv
    from logitclip.own_data.audit import LEAST_ANSWERS, STRATA
    from logitclip.own_data.fitted_rows import FittedRows
    from logitclip.own_data.review import Review

    if audit < 0:
        raise ValueError(f"--audit must not be negative, got {audit}.")
    load_plugins(plugin)
    loaded = load(model)
    if answers is not None:
        new = read_answers_csv(answers)
        tell(f"{merge_answers(loaded.folder / ANSWERS, new):,} of {len(new):,} answers are new.")
    state = Review(loaded, FittedRows(loaded, data), audit)
    _warn(state)
    if 0 < audit < len(state.asked):
        tell(
            f"--audit {audit} asks {len(state.asked):,} rows: at least {LEAST_ANSWERS} from each of {len(STRATA)} "
            "groups by score, and never fewer than before."
        )
    if out is not None:
        count, left = state.write_page(out)
        more = f"; {left:,} rows did not fit" if left else ""
        tell(
            f"{count:,} rows are in {out}{more}. "
            f"Merge the answers with: logitclip review {_quote(model)} --answers answers.csv{name_plugins(plugin)}"
        )
        return
    if answers is None and not report and not json:
        _serve(state, port, no_browser=no_browser)
    found = state.report()
    if json:
        show_json(_as_json(state, found))
    else:
        _show_report(state, found)
        if state.settled:
            _show_next(state, plugin)


def apply(
    model: ModelFolder,
    /,
    *,
    out: Annotated[Path, arg(aliases=["-o"], metavar="PATH")],
    data: ModelData = None,
    plugin: ModelPlugins = (),
    json: Flag = False,
) -> None:
    """Write your data with the labels that were corrected in a review.

    Example: logitclip apply model -o corrected.csv

    The column logitclip_review says what was changed. Rows in no class are left out. The data itself is not changed;
    of a folder of images, a list of files and labels is written.

    Args:
        out: The file to write: csv, tsv or parquet.
        json: Print the counts as one JSON object on stdout.
    """
    from logitclip.own_data import load
    from logitclip.own_data.apply import apply_answers
    from logitclip.own_data.fitted_rows import FittedRows
    from logitclip.own_data.review import Review

    load_plugins(plugin)
    loaded = load(model)
    state = Review(loaded, FittedRows(loaded, data))
    _warn(state)
    if not state.settled:
        command = f"logitclip review {_quote(model)}{name_plugins(plugin)}"
        raise ValueError(f"There are no answers in {model}: `{command}` asks for them.")
    done = apply_answers(state.rows, state.settled, out)
    if json:
        show_json(asdict(done))
        return
    tell(
        f"{out}: {counted(done.rows, 'row')}, {counted(done.corrected, 'label')} corrected, {done.kept:,} confirmed, "
        f"{done.unsure:,} unsure, {counted(done.dropped, 'row')} in no class left out."
    )
    tell(f"Fit again: logitclip fit {_fit_options(state, out)} --out {_quote(f'{model}2')}{name_plugins(plugin)}")


def _fit_options(state: Review, data: Path) -> str:
    """Return the data and the options with which `fit` reads a table that `apply` has written."""
    from logitclip.own_data.apply import LISTED_LABEL
    from logitclip.own_data.images import Images

    kind, named = state.rows.source.kind, dict(state.model.facts["source"]["options"])
    named["encoder"] = state.model.facts.get("encoder", {}).get("spec")
    named["folder"] = str(kind.folder) if isinstance(kind, Images) else None
    words = [_quote(data), "--label", _quote(kind.label or LISTED_LABEL)]
    for name, value in named.items():
        if value:
            words += [f"--{name}", _quote(value if isinstance(value, str) else ",".join(value))]
    return " ".join(words)


def _quote(what: str | Path) -> str:
    """Return a path as it may be typed here."""
    path = Path(what)
    with contextlib.suppress(ValueError, OSError):
        path = path.relative_to(Path.cwd())
    return shlex.quote(str(path))


def name_plugins(files: tuple[str, ...]) -> str:
    """Return the options with which another command loads these plugins too."""
    return "".join(f" --plugin {shlex.quote(file)}" for file in files)


def _show_next(state: Review, plugin: tuple[str, ...]) -> None:
    """Say how the answers get back into the data and the model."""
    model, code = _quote(state.model.folder), name_plugins(plugin)
    show(escape(f"Write the data with the corrected labels: logitclip apply {model} -o corrected.csv{code}"))
    show(
        escape(
            "Fit the model again with the answers: "
            f"logitclip fit {_quote(state.rows.source.path)} --answers {model} --out {model}{code}"
        )
    )


def _warn(state: Review) -> None:
    """Name the answers that are not used."""
    if state.changed:
        rows = f"row{'s' if len(state.changed) > 1 else ''} {join_names(state.changed, NAMED)}"
        tell(f"The content of {rows} has changed since it was reviewed: those answers are not used.")
    for row, answers in list(state.disagreements.items())[:NAMED]:
        said = ", ".join(f"{answer.reviewer or 'somebody'} says {answer.text}" for answer in answers)
        tell(f"The answers to row {row} disagree and are not used: {said}.")
    if len(state.disagreements) > NAMED:
        tell(f"{len(state.disagreements) - NAMED:,} more rows have answers that disagree.")


def _serve(state: Review, port: int, *, no_browser: bool) -> None:
    """Serve the review page on this machine until Ctrl-C."""
    from logitclip.own_data.server import HOST, make_server, open_socket

    listener, secret = open_socket(port), secrets.token_urlsafe(24)
    server = make_server(state, listener, secret)
    number = listener.getsockname()[1]
    address = f"http://{HOST}:{number}/?key={secret}"
    tell(f"Review at {address}")
    tell(f"From another machine: ssh -L {number}:{HOST}:{number} THIS_MACHINE. Stop with Ctrl-C: nothing is lost.")
    if not no_browser:
        webbrowser.open(address)
    stop_on_sigterm()
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    if sys.stderr.isatty():
        put("", sys.stderr)  # after the ^C of the terminal


def _as_json(state: Review, found: Report | None) -> Json:
    progress = state.state()
    shared = {name: progress[name] for name in ("answered", "left", "audit", "audit_left", "last", "last_wrong")}
    shared |= {"disagreements": list(state.disagreements), "changed": state.changed, "audit_report": None}
    shared["earlier_audits"] = [
        {"noise": asdict(one.noise), "model": one.model and asdict(one.model)} for one in state.earlier
    ]
    if found is not None:
        report = asdict(found)
        report["classes"] = {state.class_names[k]: rate for k, rate in report["classes"].items()}
        shared["audit_report"] = report | {"labels": asdict(found.labels)}
    return shared


def _show_report(state: Review, found: Report | None) -> None:
    """Print the progress, and what an audit says beside the estimate of `fit`."""
    from logitclip.own_data.annotators import FUSED_LABEL
    from logitclip.own_data.audit import contradicts

    progress = state.state()
    show(f"{progress['answered']:,} rows are reviewed; {progress['left']:,} labels that are marked wrong are left.")
    for one in state.earlier:
        model = "" if one.model is None else f"; the model of then was right for {_format_rate(one.model)} of the rows"
        show(
            f"An earlier audit, with {counted(one.noise.answers, 'answer')}: {_format_rate(one.noise)} of the labels "
            f"were wrong, as they were then{model}."
        )
    if progress["last"]:
        show(f"Wrong among the last suspects: {progress['last_wrong']} of {progress['last']}.")
    if found is None:
        if len(state.asked):
            show(f"None of the {len(state.asked):,} rows of the audit is answered yet.")
        return
    table = make_table(f"Audit: {found.noise.answers:,} answers", "on true labels", "estimate", "95 % interval")
    shares = [("labels that are wrong", found.noise), ("accuracy of the labels", found.labels)]
    shares += [("accuracy of the model, out of fold", found.model)] if found.model is not None else []
    shares += [
        (f"labels {escape(repr(state.class_names[k]))} that are wrong", rate)
        for k, rate in found.classes.items()
        if rate.answers
    ]
    for name, rate in shares:
        table.add_row(name, f"{rate.value:.1%}", f"{rate.low:.1%} to {rate.high:.1%}")
    show(table)
    if state.rows.source.kind.label == FUSED_LABEL:
        show("An item of several annotators has a row for each of its probable classes: these are shares of rows.")
    if found.undecided:
        low, high = found.noise_bounds
        show(
            f"Without {counted(found.undecided, 'answer')} unsure or in no class. Whatever the truth of those is, "
            f"{low:.1%} to {high:.1%} of the labels are wrong."
        )
    if found.model is None:
        show("Too few rows have out-of-fold predictions to measure the model: fit it with --find-issues.")
    if found.noise.width:
        wanted = len(state.asked) + found.halved_by
        show(f"About {found.halved_by:,} more answers would halve the interval: --audit {wanted}.")
    if state.model.learnt:
        rate, (low, high) = state.model.noise["rate"], state.model.noise["rate_interval"]
        verdict = "The audit contradicts it" if contradicts(found.noise, (low, high)) else "The audit agrees"
        show(f"`fit` estimated {rate:.1%} ({low:.1%} to {high:.1%}) without any true label. {verdict}.")


def _format_rate(rate: Rate) -> str:
    return f"{rate.value:.1%} ({rate.low:.1%} to {rate.high:.1%})"


# -- the next round ----------------------------------------------------------------------------------------------------


def correct(data: Path, answers: Path, out: Path) -> CorrectedData:
    """Correct the data of the model in `out` by answers, and say what was changed."""
    from logitclip.own_data.apply import correct_data

    if not (out / "model.json").is_file():
        advice = f"give --out {answers}" if (answers / "model.json").is_file() else "leave --answers out the first time"
        raise ValueError(f"--answers corrects the labels of the model in --out, but {out} has none: {advice}.")
    corrected = correct_data(out, answers, data)
    if corrected.round is not None:
        done = corrected.round.applied
        _warn(corrected.round.review)
        tell(
            f"{counted(done.corrected, 'label')} corrected, {done.kept:,} confirmed, {counted(done.dropped, 'row')} in "
            f"no class left out: {corrected.path}."
        )
    return corrected


def show_round(last: Round, fitted: Model) -> None:
    """Say what a round of review brought."""
    model, done, earlier = last.review.model, last.applied.corrected, last.earlier
    before, after = model.marked, fitted.marked
    in_all = f" ({done:,} in all)" if earlier else ""
    show(
        f"The last round: {counted(done - earlier, 'label')} corrected{in_all}; marked wrong {before:,} -> {after:,}; "
        f"wrong labels, estimated: {model.noise_range} -> {fitted.noise_range}; "
        f"accuracy on the labels as they were {model.facts['noisy_accuracy']:.1%}, as they are now "
        f"{fitted.facts['noisy_accuracy']:.1%}."
    )


def fuse(data: Path, out: Path, columns: Json, *, annotators: list[str], **names: str | None) -> tuple[Path, str]:
    """Fuse the answers of annotators, show who is reliable, and return the table to fit on and its label."""
    from logitclip.own_data.annotators import FUSED_ITEM, FUSED_LABEL, FUSED_WEIGHT, fuse_data

    for name in ("weight", "group", "time"):
        if columns[name] is not None:
            raise ValueError(f"Leave out --{name}: with annotators, weights and groups come from the answers.")
    fused = fuse_data(data, out, annotators=annotators, text=columns["text"], drop=columns["drop"], **names)
    count = len(fused.reliability)
    which = f": the {NAMED} most and the {NAMED} least reliable of {count:,}" if count > 2 * NAMED else ""
    table = make_table(f"Annotators{which}", "annotator", "answers", "right", "95 % interval")
    for row in fused.reliability[:NAMED] + fused.reliability[NAMED:][-NAMED:]:
        interval = f"{row['low']:.0%} to {row['high']:.0%}"
        table.add_row(escape(row["annotator"]), str(row["answers"]), f"{row['accuracy']:.0%}", interval)
    show(table)
    show(f"They disagree on {fused.disagree:.0%} of the items. All annotators: {escape(str(out / 'annotators.csv'))}.")
    if fused.unanswered:
        what = "their classes are predicted" if fused.predicted else "they are left out"
        show(f"{counted(fused.unanswered, 'item')} without any answer: {what}.")
    columns |= {"weight": FUSED_WEIGHT, "group": FUSED_ITEM, "drop": []}
    columns["folder"] = columns["folder"] or str(data.resolve().parent)  # fused.csv is not there
    return fused.path, FUSED_LABEL
