"""The command line. Data goes to stdout, progress and errors to stderr; a mistake is one sentence and exit code 2.

Nothing heavy is imported before a command runs, so that `logitclip --help` is quick.
"""

from __future__ import annotations

import ast
import contextlib
import json
import math
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional, arg

import logitclip
from logitclip.config import RunConfig
from logitclip.progress import SweepBoard, TrainingBar, duration, make_table, result_table
from logitclip.run_folder import Claimed, Result, outcome

Kind = Literal["losses", "clips", "penalties", "noises", "data", "augments", "models", "methods", "recipes"]
_REGISTRIES: dict[str, tuple[str, str]] = {
    "losses": ("losses", "LOSSES"),
    "clips": ("clip", "CLIPS"),
    "penalties": ("clip", "PENALTIES"),
    "noises": ("noise", "NOISES"),
    "data": ("data", "DATASETS"),
    "augments": ("data", "AUGMENTS"),
    "models": ("models", "MODELS"),
    "methods": ("methods", "METHODS"),
}


def list_names(kind: Positional[Kind], /, *, json: bool = False) -> None:
    """List what can be named, with its knobs: losses, clips, noises, data, models, methods, recipes and so on.

    Args:
        kind: What to list.
        json: Print a JSON object instead of a table.
    """
    import importlib

    from rich.markup import escape

    if kind == "recipes":
        _list_recipes(json)
        return
    module, name = _REGISTRIES[kind]
    registry = getattr(importlib.import_module(f"logitclip.{module}"), name)
    rows = {name: registry.describe(name) for name in registry}
    if json:
        _print_json({name: {"spec": spec, "summary": summary} for name, (spec, summary) in rows.items()})
        return
    table = make_table(kind.capitalize(), "spec, with its defaults", "what it is")
    for name, (spec, summary) in rows.items():
        table.add_row(spec.replace(name, f"[bold]{name}[/]", 1).replace(",", ", "), escape(summary.replace("`", "")))
    _print(table)


def _list_recipes(json: bool) -> None:
    from rich.markup import escape

    from logitclip.studies.recipe import load_recipe, recipe_names, recipe_scales

    loaded = {name: [load_recipe(name, scale) for scale in recipe_scales(name)] for name in recipe_names()}
    if json:
        described = {
            name: {
                "paper": scales[0].paper,
                "title": scales[0].title,
                "about": scales[0].about,
                "runs": {recipe.scale: len(recipe.cells) for recipe in scales},
            }
            for name, scales in loaded.items()
        }
        _print_json(described)
        return
    table = make_table("Recipes", "recipe", "paper", "what it is", "runs by scale")
    for name, scales in loaded.items():
        runs = ", ".join(f"{recipe.scale} {len(recipe.cells)}" for recipe in scales)
        table.add_row(f"[bold]{name}[/]", scales[0].paper or "", escape(scales[0].title), runs)
    _print(table)
    _print("Not counted: trainings to choose a value. `logitclip sweep NAME --scale SCALE` runs one; own ones by path.")


def bound(
    *,
    tau: float,
    classes: int,
    delta: float | None = None,
    p: float = math.inf,
    loss: str = "ce",
    noise: str | None = None,
    json: bool = False,
) -> None:
    """Print every bound of the paper for one clip, loss and noise, and the smallest that applies.

    Example: logitclip bound --tau 1 --classes 10 --noise symmetric:rate=0.5

    Args:
        tau: Threshold on the norm of the logits.
        classes: Number of classes, K.
        delta: Norm of clipped logits; tau if not given.
        p: Which norm; the paper prints its bounds for inf, and for smaller p sharper ones are shown beside them.
        loss: A loss spec such as gce:q=0.7.
        noise: symmetric:rate=R, asymmetric:rate=R, pair:rate=R, instance:rate=R or transition:matrix=FILE.
        json: Print a JSON object instead of a table.
    """
    from logitclip import theory

    loss_name, loss_knobs = _loss_for_theory(loss)
    rows = theory.all_bounds(
        tau, classes, delta=delta, p=p, loss=loss_name, knobs=loss_knobs, **_noise_for_theory(noise, classes)
    )
    if json:
        _print_json([{**asdict(row), "applies": row.applies} for row in rows])
        return
    scale = "" if delta is None else f", delta = {delta:g}"
    title = f"tau = {tau:g}{scale}, p = {p:g}, K = {classes}"
    table = make_table(title, "", "quantity", "bound", "paper", "lower", "upper")
    for row in rows:
        style = "bold green" if row.smallest else "" if row.applies else "dim"
        name = row.name if row.applies else f"{row.name}: {row.reason}"
        ends = (f"{row.lower:.6g}", f"{row.upper:.6g}") if row.applies else ("-", "-")
        table.add_row("*" if row.smallest else "", row.quantity, name, row.paper, *ends, style=style)
    _print(table)
    _print("[bold green]*[/] the smallest that applies. f~ minimises the noisy risk R^eta, f* the clean risk R.")


def paper(item: Positional[str] = "", /) -> None:
    """Show where the code keeps a numbered item of the paper, or list them all.

    Example: logitclip paper "Eq. 4"

    Args:
        item: An equation, proposition or theorem, as in "Eq. 4", "Prop 2.1" or "Thm E.1".
    """
    from logitclip.registry import suggest

    homes = {tag: home for home in _tagged() for tag in home[0]}
    if not item:
        table = make_table("The paper in the code", "item", "function", "file")
        for tag, (_, name, file, line, _doc) in sorted(homes.items()):
            table.add_row(tag, name, f"{file}:{line}")
        _print(table)
        return
    known = {_normalised(tag): tag for tag in homes}
    if _normalised(item) not in known:
        raise ValueError(f"No home for {item!r} in the code. {suggest(item, homes)}")
    tag = known[_normalised(item)]
    _, name, file, line, doc = homes[tag]
    _print(f"[bold]{tag}[/] is [bold]{name}[/] in src/logitclip/{file}, line {line}\n")
    print(doc)


def noise(
    spec: Positional[str],
    /,
    *,
    data: str = "digits",
    root: Path | None = None,
    noise_seed: int = 0,
    download: bool = False,
    mirror: str | None = None,
    save: Path | None = None,
    json: bool = False,
) -> None:
    """Preview a label noise: its rate, the rates of the classes, and the transition matrix.

    Example: logitclip noise --data digits symmetric:rate=0.5

    Args:
        spec: The noise, as in symmetric:rate=0.5; see `logitclip list noises`.
        data: The dataset, as in cifar10; see `logitclip list data`.
        root: The folder with the data; $LOGITCLIP_DATA or ./data if not given.
        noise_seed: The seed of the noise, which is a draw of its own.
        download: Get the data from its official address if it is not there.
        mirror: Get it from this folder, or address, instead.
        save: Also save the labels there, as .npz and .json; file:path=... reads them back.
        json: Print a JSON object instead of a table.
    """
    from logitclip import data as datasets
    from logitclip import noise as noises
    from logitclip.progress import noise_preview

    noises.NOISES.parse(spec)  # a mistake in it is found before the data is looked for
    RunConfig(noise_seed=noise_seed)  # as is one in the seed
    load = partial(datasets.load, root=root, download=download or mirror is not None, mirror=mirror)
    dataset = load(data)
    record = noises.apply(spec, dataset, noise_seed, load=load)
    if save is not None:
        record.save(save)
    if json:
        _print_json(record.describe())
    else:
        _print(noise_preview(record, dataset.class_names))


def train(
    config: Annotated[RunConfig, arg(name="")], *, download: bool = False, mirror: str | None = None, json: bool = False
) -> None:
    """Train one model; with no options, cross entropy on the digits. Everything else is an option.

    Example: logitclip train --noise symmetric:rate=0.5 --clip norm:temp=1.5

    Args:
        download: Get the data from its official address if it is not there.
        mirror: Get it from this folder, or address, instead.
        json: Print the result as one JSON object on stdout.
    """
    from logitclip.engine import without_destructors
    from logitclip.training import train

    signal.signal(signal.SIGTERM, _terminate)
    _get_data(config, download, mirror)
    bar = TrainingBar()
    try:
        with without_destructors():  # a process of torchrun has joined a group
            result = train(config, on_epoch=bar)
    except (KeyboardInterrupt, SystemExit):
        bar.stop()
        print("logitclip: interrupted. The same command goes on from the last whole epoch.", file=sys.stderr)
        raise
    finally:
        bar.stop()
    if os.environ.get("RANK", "0") != "0":  # one of several processes of torchrun: the first one reports
        return
    if json:
        _print_json(asdict(result))
        return
    _print(result_table(result))


def _get_data(config: RunConfig, download: bool, mirror: str | None) -> None:
    if download or mirror is not None:
        from logitclip import data

        data.load(config.data, config.root, download=True, mirror=mirror)


def report(
    recipe: Positional[str],
    /,
    *,
    scale: str = "full",
    html: Path | None = None,
    markdown: Path | None = None,
    latex: Path | None = None,
    csv: Path | None = None,
    json: bool = False,
    runs: Path = Path("runs"),
    root: Path | None = None,
) -> None:
    """Show the runs of a recipe as a table, beside the paper's numbers where there are any.

    Example: logitclip report quickstart --html report.html

    Args:
        recipe: A recipe, see `logitclip list recipes`, or the path of a .toml file.
        scale: The scale it was run at.
        html: Also write a page there: table, curves, noise, settings. It opens offline.
        markdown: Also write the table there as Markdown.
        latex: Also write the table there as LaTeX, for booktabs.
        csv: Also write the table there as CSV, a line for each cell and statistic.
        json: Print a JSON object instead of a table.
        runs: The folder with the folders of runs.
        root: The folder with the data; $LOGITCLIP_DATA or ./data if not given.
    """
    from logitclip.run_folder import write
    from logitclip.studies import reporting, sweeping
    from logitclip.studies.recipe import load_recipe
    from logitclip.studies.tables import tabulate

    loaded = load_recipe(recipe, scale, runs=str(runs), root=None if root is None else str(root))
    rows = sweeping.collect(loaded)
    table = tabulate(loaded, rows)
    writers = [(markdown, reporting.markdown), (latex, reporting.latex), (csv, reporting.csv)]
    writers.append((html, partial(reporting.html, rows=rows)))
    paths = [path for path, _ in writers if path is not None]
    if len(set(paths)) < len(paths):
        raise ValueError("Two formats cannot be written to the same file.")
    for path, text in writers:
        if path is not None:
            write(path, text(table).encode())
            print(f"logitclip: wrote {path}", file=sys.stderr)
    if json:
        _print_json(reporting.as_json(table))
    else:
        _print(reporting.terminal(table))


def figures(
    recipe: Positional[str],
    /,
    *,
    out: Annotated[Path, arg(aliases=["-o"])],
    scale: str = "full",
    runs: Path = Path("runs"),
    root: Path | None = None,
) -> None:
    """Draw the figure of a recipe or, if it has none, how its runs learn and memorise epoch by epoch.

    Example: logitclip figures quickstart -o curves.svg

    Args:
        recipe: A recipe, see `logitclip list recipes`, or the path of a .toml file.
        out: The file to write: .svg, .pdf, .png or, to point at and click on, .html.
        scale: The scale it was run at.
        runs: The folder with the folders of runs.
        root: The folder with the data; $LOGITCLIP_DATA or ./data if not given.
    """
    from logitclip.studies import figures, sweeping
    from logitclip.studies.recipe import load_recipe

    figures.check_suffix(out)
    loaded = load_recipe(recipe, scale, runs=str(runs), root=None if root is None else str(root))
    figures.save(figures.draw(loaded, sweeping.collect(loaded)), out)
    print(f"logitclip: wrote {out}", file=sys.stderr)


def tune(
    config: Annotated[RunConfig, arg(name="")],
    *,
    option: str | None = None,
    values: str | None = None,
    fast: bool = False,
    between: str | None = None,
    linear: bool = False,
    trials: int | None = None,
    storage: str | None = None,
    executor: Literal["local", "inline", "ray"] = "local",
    jobs: int | None = None,
    address: str | None = None,
    download: bool = False,
    mirror: str | None = None,
    json: bool = False,
) -> None:
    """Find a good value of an option on held-out noisy labels, then train with it on everything.

    Example: logitclip tune --noise symmetric:rate=0.5 --clip norm:temp=auto

    There are three ways: a fast search (temp=auto, or --option clip.temp --fast), all values of a grid (temp=grid for
    the paper's, or --values), and a study by Optuna (--between). All runs are kept: the command can be stopped and
    started again.

    Args:
        option: What to tune: an option of the run, as in lr, or a knob of one, as in clip.temp or loss.q.
        values: The values to choose from, as in 0.1,0.5,1; texts that hold commas are parted by semicolons.
        fast: Find the value in five runs on less than half of the examples.
        between: The bounds of a study by Optuna, as in 0.1,10.
        linear: Let the study look evenly at the value, not at its logarithm.
        trials: Trials of the study, with those that are in its storage; 20 if not given.
        storage: Where the study is kept: a file, a journal (a name that ends in .log), or any SQL address.
        executor: Processes on this machine, this process alone, or a Ray cluster.
        jobs: Runs at the same time; as many as there is room for if not given.
        address: The address of a Ray cluster, or auto.
        download: Get the data from its official address if it is not there.
        mirror: Get it from this folder, or address, instead.
        json: Print the trials and the result as one JSON object on stdout.
    """
    from logitclip.studies import executors, sweeping, tuning

    signal.signal(signal.SIGTERM, _terminate)
    ways = [values is not None, fast, between is not None]
    if sum(ways) != (option is not None):
        raise ValueError("Give --option with one of --values, --fast and --between; or neither, and temp=auto.")
    if between is None and (linear or storage is not None or trials is not None):
        raise ValueError("--linear, --trials and --storage are for a study: give --between as well.")
    if between is not None and (executor == "ray" or jobs is not None or address is not None):
        raise ValueError(
            "A study makes one run at a time, on this machine: --jobs, --address and --executor ray are not for it. To "
            "share the work, give the command several times with one --storage."
        )
    _get_data(config, download, mirror)
    if option == "clip.temp" and config.clip == "none":
        config = replace(config, clip="norm")
    if option is None:
        search = tuning.search_for(config)
    elif fast:
        search = tuning.fast_search(config, option)
    else:
        search = tuning.Search(option, _values(option, values or ""))
    board = SweepBoard(f"tune {search.option}", [config], tuned=search.option.partition(".")[0])
    where = {"executor": executor, "jobs": jobs, "address": address, "on_event": board}
    with board:
        if between is not None:
            bounds = _two_numbers(between)
            count = 20 if trials is None else trials
            study = tuning.study(config, search.option, *bounds, count, storage=storage, log=not linear, on_event=board)
            ended = [trial for trial in study.trials if trial.state.is_finished() and trial.params]
            scores = {tuning.six_digits(trial.params[search.option]): trial.value for trial in ended}
        else:
            scores = sweeping.tune(config, search, **where)
        best = tuning.best(scores)
        chosen = replace(tuning.with_value(config, search.option, best), val=0.0)
        executors.execute([chosen], **where)
    result: Any = outcome(chosen)
    if hasattr(result, "error"):
        raise ValueError(f"The run with the value that was chosen, {best}, has failed: {result.error}")
    if json:
        tried = [{"value": value, "score": score} for value, score in scores.items()]
        _print_json({"option": search.option, "tried": tried, "chosen": best, "result": asdict(result)})
        return
    table = make_table(f"{search.option}: {len(scores)} values tried", "value", "score")
    for value, score in scores.items() if values else sorted(scores.items()):
        name = f"{value:g}" if isinstance(value, float) else f"{value}"
        table.add_row(name, "failed" if score is None else f"{score:.2f}", style="bold green" * (value == best))
    _print(table)
    _print(result_table(result))


def sweep(
    recipe: Positional[str],
    /,
    *,
    scale: str = "full",
    executor: Literal["local", "inline", "ray"] = "local",
    jobs: int | None = None,
    address: str | None = None,
    shard: str = "1/1",
    runs: Path = Path("runs"),
    root: Path | None = None,
    download: bool = False,
    mirror: str | None = None,
) -> None:
    """Run all that is missing of a recipe, with its tuning; it can be stopped and started again at any time.

    Example: logitclip sweep quickstart

    Args:
        recipe: A recipe, see `logitclip list recipes`, or the path of a .toml file.
        scale: The scale to run it at, as in cpu or smoke.
        executor: Processes on this machine, this process alone, or a Ray cluster.
        jobs: Runs at the same time; as many as there is room for if not given.
        address: The address of a Ray cluster, or auto; without it, Ray is started on this machine.
        shard: Only one part of several, as in 1/4 to 4/4, each started as a job of its own.
        runs: The folder for the folders of runs; several sweeps may share it.
        root: The folder with the data; $LOGITCLIP_DATA or ./data if not given.
        download: Get the data, and human labels if the recipe has them, from the official address if it is not there.
        mirror: Get it from this folder, or address, instead.
    """
    from logitclip import data
    from logitclip.studies import sweeping
    from logitclip.studies.recipe import load_recipe

    part, _, parts = shard.partition("/")
    if not (part.isdecimal() and parts.isdecimal()):
        raise ValueError(f"shard must be like 1/4, the first of four parts; got {shard!r}.")
    signal.signal(signal.SIGTERM, _terminate)
    loaded = load_recipe(recipe, scale, runs=str(runs), root=None if root is None else str(root))
    for spec, place in loaded.data():
        data.load(spec, place, download=download or mirror is not None, mirror=mirror)  # one sentence if it is missing
    board = SweepBoard(f"{loaded.name} ({loaded.scale})", [cell.config for cell in loaded.cells])
    with board:
        rows = sweeping.sweep(
            loaded, executor=executor, jobs=jobs, address=address, shard=(int(part), int(parts)), on_event=board
        )
    time = duration(board.seconds)
    print(
        f"{board.done} runs done, {board.skipped} skipped as they were done before, {board.failed} failed, in {time}."
    )
    if loaded.rows:
        print(f"Next: {loaded.command('report')}")
    else:  # a figure may have no table
        print(f"Next: {loaded.command('figures')} -o {shlex.quote(loaded.name)}.svg")
    if not all(isinstance(row.outcome, Result) for row in rows):
        raise SystemExit(1)


def _terminate(*_: Any) -> None:
    """On SIGTERM: save, as on Ctrl-C, and let a second signal not disturb it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(128 + signal.SIGTERM)


COMMANDS = {"train": train, "list": list_names, "bound": bound, "paper": paper, "noise": noise}
COMMANDS |= {"tune": tune, "sweep": sweep, "report": report, "figures": figures}


def main() -> None:
    """Run the command line; the console script `logitclip`."""
    try:
        tyro.extras.subcommand_cli_from_dict(
            COMMANDS,
            prog="logitclip",
            description=f"logitclip {logitclip.__version__}: train on labels you do not trust. "
            "The norm of the logits is clipped before the loss, so that wrong labels are not memorised.",
        )
    except BrokenPipeError:  # `logitclip list losses | head`
        sys.stderr.close()  # or the interpreter complains about the pipe when it ends
        raise SystemExit(0) from None
    except (ValueError, OSError, ImportError, Claimed) as error:
        sys.stdout.flush()
        print(f"logitclip: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


# -- helpers -----------------------------------------------------------------------------------------------------------


def _loss_for_theory(spec: str) -> tuple[str, dict[str, Any]]:
    from logitclip import theory
    from logitclip.losses import LOSSES

    name, knobs = LOSSES.parse(spec)
    return name, {key: value for key, value in knobs.items() if key in theory.knobs(name)}


def _noise_for_theory(spec: str | None, classes: int) -> dict[str, Any]:
    if spec is None:
        return {}
    from logitclip.noise import NOISES

    name, knobs = NOISES.parse(spec)
    if name == "transition":
        from logitclip.noise import read_matrix

        return {"noise": name, "transition": read_matrix(knobs["matrix"]).tolist()}
    if name == "asymmetric" and knobs.get("variant", "map") != "map":
        raise ValueError(
            "bound knows asymmetric noise from each class to the next; for others: transition:matrix=FILE."
        )
    share = (classes - 1) / classes if knobs.get("include_self") else 1.0  # of the redrawn labels that become wrong
    return {"noise": name, "rate": share * knobs["rate"] if "rate" in knobs else None}


def _tagged() -> Iterator[tuple[list[str], str, str, int, str]]:
    """Every function or class with a `Paper: ...` line: tags, name, file, line and docstring. Nothing is imported."""
    root = Path(__file__).parent
    for file in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                doc = ast.get_docstring(node) or ""
                for line in doc.splitlines():
                    if line.startswith("Paper: "):
                        tags = [tag.strip() for tag in line.removeprefix("Paper: ").rstrip(".").split(",")]
                        yield tags, node.name, str(file.relative_to(root)), node.lineno, doc


def _normalised(item: str) -> str:
    words = {"equation": "eq", "proposition": "prop", "theorem": "thm"}
    text = item.lower().replace(".", " ").split()
    return " ".join(words.get(word, word) for word in text)


def _values(option: str, text: str) -> tuple[bool | int | float | str, ...]:
    """The values to choose from. An option that takes text gets text, even if it looks like a number."""
    parts = [part.strip() for part in text.split(";" if ";" in text else ",")]
    kind = str(RunConfig.__annotations__.get(option))
    return tuple(parts) if "str" in kind or "Literal" in kind else tuple(map(_value, parts))


def _value(text: str) -> bool | int | float | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def _two_numbers(text: str) -> tuple[float, float]:
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        raise ValueError(f"between must be two numbers, as in 0.1,10; got {text!r}.") from None
    return low, high


def _print(what: Any) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 200  # a file or a pipe has no edge to fold a table at
    console.print(what)


def _print_json(what: Any) -> None:
    print(json.dumps(_finite(what), indent=2, default=str))


def _finite(what: Any) -> Any:
    """The same with null for NaN and infinity, which JSON does not have."""
    if isinstance(what, dict):
        return {key: _finite(value) for key, value in what.items()}
    if isinstance(what, list | tuple):
        return [_finite(value) for value in what]
    return None if isinstance(what, float) and not math.isfinite(what) else what


if __name__ == "__main__":
    main()
