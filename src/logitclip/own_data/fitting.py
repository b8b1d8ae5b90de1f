"""Fit a model to data with labels that may be wrong, and find the wrong ones."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from logitclip import files
from logitclip.data import load as load_dataset
from logitclip.data.augment import transform
from logitclip.data.table import load_table
from logitclip.own_data import issues as judging
from logitclip.own_data.calibration import calibrated, find_temperature
from logitclip.own_data.issues import Issues
from logitclip.own_data.model import ISSUES, MODEL, PAGE, PREDICTIONS, PREPROCESSING, WEIGHTS, Model, load, write_model
from logitclip.own_data.page import write_page
from logitclip.own_data.planning import AUTO, FOLDS, SEARCHED_ROWS, Plan, make_plan
from logitclip.own_data.predictions import predictions_to_bytes
from logitclip.own_data.source import HELD_OUT, Source, look
from logitclip.runs.claims import claim
from logitclip.runs.config import RunConfig, word_to_tune
from logitclip.runs.results import Failed, Result, outcome, require_result
from logitclip.studies import executors, sweeping, tuning
from logitclip.studies.listener import Listener

log = logging.getLogger(__name__)

RUNS = "runs"  # the subfolder of the runs


def fit(
    data: Any,
    label: str | None = None,
    *,
    text: str | Sequence[str] = (),
    image: str | None = None,
    drop: str | Sequence[str] = (),
    out: str | Path = "model",
    clip: str = AUTO,
    find_issues: bool = False,
    on_plan: Callable[[Plan], None] | None = None,
    listener: Listener | None = None,
    jobs: int | None = 1,
    **options: Any,
) -> Model:
    """Fit a network to labels that may be wrong.

    A search on noisy validation labels chooses the clip, an ordinary run trains the network, and its held-out rows give
    the noise estimate and the calibration. If it is interrupted, call it again to resume.

    Args:
        data: A csv, tsv, parquet or npz file, a folder with one folder of images per class, or a pandas data frame.
        label: The label column of a table.
        text: A column with free text, or several.
        image: A column with image files; detected if its values end in .jpg, .png and so on.
        drop: A column to leave out, or several.
        out: The model folder to write.
        clip: The clip: ``norm:temp=auto`` and ``norm:tau=auto`` search, ``=grid`` tries the paper's values, ``none`` is
            plain training.
        find_issues: Score every label by a model that was not trained on it, which takes five more runs. Otherwise all
            scores come from the one run.
        on_plan: Called with the `Plan` before anything is trained.
        listener: Hears what happens to the runs, see `studies.listener.Listener`.
        jobs: Runs at the same time; None for as many as there are cores.
        options: Fields of `RunConfig` to use instead of the plan's, such as `epochs`, `model`, `lr` or `seed`.

    Returns:
        The fitted model, also saved in `out`.

    Raises:
        ValueError: If the data cannot be used, or training fails.

    >>> import tempfile
    >>> import pandas as pd
    >>> height = [0.1, 0.3, 0.4, 0.6, 0.7] * 10 + [1.5, 1.9, 2.2, 2.4, 3.1] * 10  # metres
    >>> plants = pd.DataFrame({"height": height, "kind": ["herb"] * 50 + ["shrub"] * 50})
    >>> plants.loc[[3, 14, 15], "kind"] = "shrub"  # three wrong labels
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model = fit(plants, "kind", out=folder, clip="norm:temp=1.5", epochs=5)
    >>> model.predict(pd.DataFrame({"height": [0.2, 1.8]}))["class"].tolist()
    ['herb', 'shrub']
    """
    _require_packages()
    out = Path(os.path.expanduser(out))
    text, drop = ([names] if isinstance(names, str) else names for names in (text, drop))
    columns: dict[str, Any] = {"text": text, "image": image, "drop": drop}
    source = look(data, label, **columns) if isinstance(data, str | Path) else None
    _check_writable(out)
    with claim(out / RUNS):
        source = source or look(_write_frame(data, out), label, **columns)
        plan = make_plan(source, clip=clip, folds=FOLDS if find_issues else 0, out=str(out), **options)
        if on_plan is not None:
            on_plan(plan)
        where = {"executor": "inline" if jobs == 1 else "local", "jobs": jobs, "listener": listener}
        return _fit(plan, out, where, find_issues=find_issues)


def _fit(plan: Plan, out: Path, where: dict[str, Any], *, find_issues: bool) -> Model:
    """Carry out a plan."""
    source = plan.source
    config = _with_clip(plan, where)
    executors.execute([config], **where)
    result = require_result(config)
    shares = np.maximum(source.counts, 1) / len(source.labels)
    log_prior = np.log(shares) if config.balance else np.zeros(len(shares))
    found, held_out = judging.one_run(result, config, source.labels, log_prior)
    if find_issues:
        per_fold = replace(config, per_example=False)
        found = judging.out_of_fold(per_fold, source.labels, log_prior, FOLDS, **where)
    judging.write(out / ISSUES, found, source.names, source.class_names, source.labels)
    model = _write_model(out, source, plan, config, result, found, held_out, log_prior)
    write_page(out / PAGE, model, source, found, result)
    return model


def find_issues(
    data: Any,
    label: str | None = None,
    *,
    text: str | Sequence[str] = (),
    image: str | None = None,
    drop: str | Sequence[str] = (),
    out: str | Path = "issues",
    clip: str = AUTO,
    fast: bool = False,
    on_plan: Callable[[Plan], None] | None = None,
    listener: Listener | None = None,
    jobs: int | None = 1,
    **options: Any,
) -> Any:
    """Find the labels that are probably wrong.

    Args:
        data, label, text, image, drop, clip, on_plan, listener, jobs, options: As for `fit`.
        out: The folder to write: a model folder with `issues.csv` and `page.html`.
        fast: Score the labels with one training run instead of five folds.

    Returns:
        A pandas data frame, most suspicious label first: `row` (row number or file name), `given`, `suggested`, `score`
        and `wrong`.

    Raises:
        ValueError: If the data cannot be used, or training fails.

    >>> import tempfile
    >>> import pandas as pd
    >>> height = [0.1, 0.3, 0.4, 0.6, 0.7] * 10 + [1.5, 1.9, 2.2, 2.4, 3.1] * 10  # metres
    >>> plants = pd.DataFrame({"height": height, "kind": ["herb"] * 50 + ["shrub"] * 50})
    >>> plants.loc[[3, 14, 15], "kind"] = "shrub"  # three wrong labels
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     issues = find_issues(plants, "kind", out=folder, clip="norm:temp=1.5", epochs=5)
    >>> sorted(issues["row"][issues["wrong"]])  # row numbers count from 1
    ['15', '16', '4']
    """
    shared: dict[str, Any] = {"text": text, "image": image, "drop": drop, "out": out, "clip": clip, "jobs": jobs}
    return fit(data, label, find_issues=not fast, on_plan=on_plan, listener=listener, **shared, **options).issues


def _require_packages() -> None:
    """Name all packages that are missing at once, not one after the other."""
    needed = ("lightning_fabric", "sklearn", "pandas", "skops", "pyarrow", "PIL", "jinja2", "altair", "vl_convert")
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise ImportError(f"Your own data needs {', '.join(missing)}: pip install 'logitclip[own-data]'.")


def _check_writable(out: Path) -> None:
    """Raise a ValueError if a name that `fit` will write is taken by a folder."""
    for name in (*(MODEL, WEIGHTS, PREPROCESSING, ISSUES, PAGE), "data.parquet"):
        if (out / name).is_dir():
            raise ValueError(f"{out / name} is a folder, and `fit` writes a file there: name another folder with out.")


def _write_frame(data: Any, out: Path) -> Path:
    """Write a data frame to the model folder, so that runs can read it, and return its path."""
    if not hasattr(data, "to_parquet"):
        raise ValueError(f"data must be a file, a folder or a pandas data frame, got {type(data).__name__}.")
    try:
        content = data.to_parquet(index=False)  # an index is no feature
    except (TypeError, ValueError):  # a column with values of several types, which are read as text
        mixed = [name for name, kind in data.dtypes.items() if kind.kind == "O"]
        content = data.astype(dict.fromkeys(mixed, "string")).to_parquet(index=False)
    files.replace(out / "data.parquet", content)
    return out / "data.parquet"


def _with_clip(plan: Plan, where: dict[str, Any]) -> RunConfig:
    """Return the config of the final run, with the clip that the search found."""
    config = plan.config
    if word_to_tune(config) is None:
        return config
    tried = replace(config, per_example=False)
    if len(plan.source.labels) > 2 * SEARCHED_ROWS:
        tried = replace(tried, limit=SEARCHED_ROWS)
    search = tuning.search_for(tried)
    scores = sweeping.tune(tried, search, **where)
    if all(score is None for score in scores.values()):
        raise Failed(f"No value of {search.option} can be chosen: all trials failed.")
    best = tuning.best_value(tried, outcome, search)
    return replace(tuning.with_value(config, search.option, best), val=0.0)


def _write_model(
    out: Path,
    source: Source,
    plan: Plan,
    config: RunConfig,
    result: Result,
    found: Issues,
    held_out: np.ndarray,
    log_prior: np.ndarray,
) -> Model:
    from safetensors.torch import save

    dataset = load_dataset(config.data, config.root)
    resolved = config.resolved()
    known = ~np.isnan(held_out).any(1)
    logits, given = held_out[known], source.labels[known]
    temperature = find_temperature(logits, given, found.matrix, log_prior)
    view = transform(str(resolved.augment), dataset.mean, dataset.std)
    preprocessor = None
    if source.kind != "image":
        drop, text = (_listed(source.knobs, name) for name in ("drop", "text"))
        preprocessor = load_table(source.path, source.knobs["label"], drop=drop, text=text, test=HELD_OUT)[1]
    noise = found.noise
    facts = {
        "kind": source.kind,
        "class_names": list(source.class_names),
        "model": resolved.model,
        "input_shape": list(view(dataset.test.x[torch.tensor([0])], None).shape[1:]),
        "augment": resolved.augment,
        "mean": list(dataset.mean),
        "std": list(dataset.std),
        "size": plan.size,
        "image": source.knobs.get("image"),
        "label": source.knobs.get("label"),
        "temperature": temperature,
        "log_prior": log_prior.tolist(),
        "noisy_accuracy": float((calibrated(logits, temperature, log_prior).argmax(1) == given).mean()),
        "largest_share": float(source.counts.max() / len(source.labels)),
        "learnt": found.learnt,
        "noise": {
            "from": found.way,
            "rate": noise.rate,
            "rate_interval": list(noise.rate_interval),
            "at_most": noise.at_most,
            **{
                name: None if (values := getattr(noise, name)) is None else values.tolist()
                for name in ("matrix", "matrix_lower", "matrix_upper")
            },
        },
        "clip": result.clip,
        "run": result.id,
        "config": result.config,
        "versions": result.versions,
    }
    contents = {WEIGHTS: save({name: tensor.contiguous() for name, tensor in result.weights().items()})}
    if preprocessor is not None:
        contents[PREPROCESSING] = preprocessor.to_bytes()
    contents[PREDICTIONS] = predictions_to_bytes(found.probabilities)
    write_model(out, facts, contents)
    return load(out)


def _listed(knobs: dict[str, Any], name: str) -> list[str]:
    return str(knobs[name]).split(",") if name in knobs else []
