"""Fit a model to data with labels that may be wrong, and find the wrong ones."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import logitclip
from logitclip import engine, files, search
from logitclip.data import hold_out
from logitclip.encoders import downloads_allowed
from logitclip.encoders.features import OnRows
from logitclip.own_data.calibration import find_temperature, match_confidence
from logitclip.own_data.combining import ADVISER, Vote, Votes, accuracy_of, combine, share_out
from logitclip.own_data.encoded import Encoding, check_bundle, copy_encoder
from logitclip.own_data.facts import Facts
from logitclip.own_data.folds import FOLDS, MOST_PREDICTIONS, choose_rows, make_folds
from logitclip.own_data.issues import Issues, judge_labels, spread_over, write_issues
from logitclip.own_data.kind import Arrays, Source
from logitclip.own_data.labelled import Labelled, read_labelled
from logitclip.own_data.learners import Learner, mix
from logitclip.own_data.model import (
    ISSUES,
    LEARNERS,
    MODEL,
    PAGE,
    PREDICTIONS,
    UNLABELLED,
    Model,
    is_model,
    load,
    predictions_as_csv,
    predictions_to_bytes,
    write_model,
)
from logitclip.own_data.network import Network, predict_logits, with_clip
from logitclip.own_data.page import write_page
from logitclip.own_data.parts import Parts
from logitclip.own_data.planning import AUTO, SEARCHED_ROWS, ClipSearch, Plan, make_plan
from logitclip.own_data.reasons import columns_that_mattered
from logitclip.own_data.rules import share_by_rules, widen_for_rules
from logitclip.own_data.source import Options, look
from logitclip.own_data.tables import PREPROCESSING, with_labels
from logitclip.runs.claims import CLAIM_LOCK, claim
from logitclip.runs.results import Failed

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import ArrayLike

    from logitclip.own_data.kind import Data, Labels

log = logging.getLogger(__name__)

DATA_FILE = "data.parquet"  # a data frame or an array that the model was fitted on
WRITTEN = (
    *(MODEL, ISSUES, PAGE, UNLABELLED, PREDICTIONS, DATA_FILE, PREPROCESSING),
    *(learner.file for learner in (Network, *LEARNERS.values())),
)
UNBALANCED = 5.0  # ratio of the largest to the smallest class from which `balance` auto weights classes
REVIEWED_WEIGHT = 3.0  # weight of a row whose label a person has checked; measured by benchmarks/review.py
AGAIN = 0.3  # share of a learner's time for learning again, about
CALIBRATED_ROWS = 2_000  # rows that the temperature is chosen on
OnShare = Callable[[float], None]  # called with the share of the work that is done


def fit(
    data: Data,
    label: Labels = None,
    *,
    text: str | Sequence[str] = (),
    image: str | None = None,
    folder: str | None = None,
    drop: str | Sequence[str] = (),
    weight: str | None = None,
    group: str | None = None,
    time: str | None = None,
    val: Data | tuple[Data, ArrayLike] | None = None,
    test: Data | tuple[Data, ArrayLike] | None = None,
    out: str | Path = "model",
    encoder: str = "none",
    bundle: bool = False,
    download: bool = False,
    learner: str = AUTO,
    clip: str = AUTO,
    balance: str = "off",
    find_issues: bool = False,
    on_plan: Callable[[Plan], None] | None = None,
    on_progress: OnShare | None = None,
    on_rows: OnRows | None = None,
    jobs: int | None = 1,
    seed: int = 0,
    **options: Any,
) -> Model:
    """Fit a model to labels that may be wrong.

    Several learners, one of them a network with clipped logits, predict every row without having seen its label. Their
    votes say how noisy the labels are and mark the wrong ones. Then they learn again, with less weight on labels that
    may be wrong, and held-out noisy labels decide how much each counts. If it is interrupted, call it again to resume.

    Args:
        data: A csv, tsv, parquet or npz file, a folder with one folder of images per class, a data frame (of pandas,
            polars or pyarrow), or an array [N, D].
        label: The label column of a table, or an array of labels [N]. Rows without a label are predicted.
        text: A column with free text, or several.
        image: A column with image files; detected if its values end in .jpg, .png and so on.
        folder: The folder of the image files, if it is not that of the table.
        drop: A column to leave out, or several.
        weight: A column with a weight for each row, at least 0.
        group: A column whose equal values belong together, as those of one patient: no group is in two folds.
        time: A column with times: rows are judged only by what was learnt from earlier ones.
        val: Rows with labels, of the same kind as `data`, or a pair of rows and labels: they decide how much each
            learner counts and calibrate the probabilities, instead of the noisy labels of held-out rows.
        test: Rows with labels you trust, likewise: the model's accuracy on them is measured.
        out: The model folder to write.
        encoder: A pretrained encoder of images or texts, as in ``hf:FOLDER``; auto chooses one. The learners then see
            its features.
        bundle: Copy the encoder into the model folder, so that it predicts on a machine without it.
        download: Fetch the encoder from the hub if it is missing.
        learner: One of network, forest, logistic and neighbours, several separated by commas, or auto: all four, or
            only the network beyond 60 classes.
        clip: The network's clip. ``auto`` chooses it, ``norm:temp=auto`` and ``norm:tau=auto`` search, ``=grid`` tries
            the paper's values, and ``none`` is plain training.
        balance: ``on`` lets every class count the same, so that rare classes are predicted more often; ``auto`` does so
            if one class is five times as large as another.
        find_issues: Judge the labels by five folds of the network instead of two.
        on_plan: Called with the `Plan` before anything is trained; not if the folder has the model already.
        on_progress: Called with the share of the work that is done, from 0 to 1.
        on_rows: Called with the rows that the encoder has done and all rows.
        jobs: Cores to use; None for all.
        seed: Seed of all learners.
        options: Settings of the network to use instead of the plan's, such as `epochs`, `model`, `lr` or `loss`.

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
    ...     model = fit(plants, "kind", out=folder, epochs=5)
    >>> model.predict(pd.DataFrame({"height": [0.2, 1.8]}))["class"].tolist()
    ['herb', 'shrub']
    """
    # For the commands, so not in the signature: the name of the command, and whether it holds `claim_folder(out)`.
    made_by, claimed = options.pop("made_by", "fit"), options.pop("claimed", False)
    _require_packages()
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}.")
    out = Path(os.path.expanduser(out))
    texts, dropped = ([names] if isinstance(names, str) else names for names in (text, drop))
    columns = Options(tuple(texts), image, tuple(dropped), weight, group, time, folder)
    encoding = None if encoder == "none" else Encoding(encoder, jobs, on_rows)
    if bundle:
        check_bundle(encoder)
    _refuse_foreign_files(out)  # this and the paths are checked before an encoder works for minutes
    named = {name: _expand_path(rows, name) for name, rows in (("val", val), ("test", test)) if rows is not None}
    if not isinstance(data, str | os.PathLike):
        data, label = with_labels(data, label)
    with downloads_allowed(download):
        source = look(data, label, columns, encoding=encoding)
    options |= {"clip": clip, "learner": learner, "balance": balance, "jobs": jobs, "seed": seed}
    plan = make_plan(source, five_folds=find_issues, **options)
    with contextlib.nullcontext() if claimed else claim(out):
        files.remove_scratch(out, WRITTEN)
        try:
            origin = {"path": _keep_data(data, source, out), "options": asdict(columns)}
            beside = {n: read_labelled(rows, source.kind, source.class_names, n) for n, rows in named.items()}
            model = _carry_out(plan, out, {"source": origin, "made_by": made_by}, beside, on_plan, on_progress)
            if bundle:
                copy_encoder(model.facts, out)
            return model
        except engine.Diverged as error:
            raise Failed(f"Training failed: {error}") from error


def find_issues(
    data: Data, label: Labels = None, *, out: str | Path = "issues", fast: bool = False, **options: Any
) -> Any:
    """Find the labels that are probably wrong.

    Args:
        data, label, options: As for `fit`.
        out: The folder to write: a model folder with `issues.csv` and `page.html`.
        fast: Leave the network out: it takes most of the time.

    Returns:
        A pandas data frame, most suspicious label first: `row` (row number or file name), `given`, `suggested` (empty
        where `wrong` and no other class is certain), `score`, `wrong`, and `values`, the columns that mattered for it.

    Raises:
        ValueError: If the data cannot be used, or training fails.

    >>> import tempfile
    >>> import pandas as pd
    >>> height = [0.1, 0.3, 0.4, 0.6, 0.7] * 10 + [1.5, 1.9, 2.2, 2.4, 3.1] * 10  # metres
    >>> plants = pd.DataFrame({"height": height, "kind": ["herb"] * 50 + ["shrub"] * 50})
    >>> plants.loc[[3, 14, 15], "kind"] = "shrub"  # three wrong labels
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     issues = find_issues(plants, "kind", out=folder, epochs=5)
    >>> sorted(issues["row"][issues["wrong"]])  # row numbers count from 1
    ['15', '16', '4']
    """
    if fast:
        options = {"learner": "forest,logistic,neighbours", **options}
    return fit(data, label, out=out, made_by="issues", **options).issues


def _require_packages() -> None:
    """Name all packages that are missing at once, not one after the other."""
    needed = ("lightning_fabric", "sklearn", "pandas", "skops", "pyarrow", "PIL", "jinja2")
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise ImportError(f"Your own data needs {', '.join(missing)}: pip install 'logitclip[own-data]'.")


def _expand_path(rows: Any, name: str) -> Any:
    """Return the path of rows in a file or folder, with ~ expanded, or rows that are in memory.

    Raises:
        ValueError: If there is no such path.
    """
    if not isinstance(rows, str | os.PathLike):
        return rows
    path = Path(os.path.expanduser(rows))
    if not path.exists():
        raise ValueError(f"There is no {rows}, the {name} data.")
    return path


@contextlib.contextmanager
def claim_folder(out: Path, names: Sequence[str]) -> Iterator[None]:
    """Claim a model folder, in which files with these names and then those of `fit` are written.

    Raises:
        ValueError: If a file there is not of `fit`.
    """
    _refuse_foreign_files(out, (*names, *WRITTEN))
    with claim(out):
        files.remove_scratch(out, names)
        yield


def _refuse_foreign_files(out: Path, names: Sequence[str] = WRITTEN) -> None:
    """Raise a ValueError if a name that `fit` will write is taken by something that it did not write."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file, and `fit` writes a folder: name another one with out.")
    ours = (out / CLAIM_LOCK).exists() or is_model(out)
    for name in names:
        if (out / name).is_dir():
            raise ValueError(f"{out / name} is a folder, and `fit` writes a file there: name another folder with out.")
        if not ours and (out / name).is_file():
            raise ValueError(
                f"{out / name} is a file that `fit` did not write and would replace: name another folder with out."
            )


# -- the steps ---------------------------------------------------------------------------------------------------------


def _carry_out(
    plan: Plan,
    out: Path,
    origin: Facts,
    beside: dict[str, Labelled],
    on_plan: Callable[[Plan], None] | None,
    on_progress: OnShare | None,
) -> Model:
    """Carry out a plan, unless the folder has its model: votes, marks, learning again, and the model folder."""
    on_progress = on_progress or (lambda share: None)
    source, parts = plan.source, Parts(out, plan.source)
    origin |= {"made_from": _digest_plan(plan, parts, beside), "data": parts.data}
    kept = _kept_model(out, origin)
    if kept is not None:
        parts.remove()  # of a fit that was killed when all but this was done
        return kept
    if on_plan is not None:
        on_plan(plan)
    # Votes
    learners = _with_searched_clip(plan, parts)
    out_of_fold, done = dict[str, Arrays](), 0.0
    for learner in learners:
        out_of_fold[learner.name] = _vote(plan, learner, parts)
        done += (1 - AGAIN) * plan.costs[learner.name]
        on_progress(done / plan.seconds)
    votes = {name: Vote(one["held_out"], one.get("seen")) for name, one in out_of_fold.items()}
    judged = make_folds(source, FOLDS, plan.seed).judged
    combined = combine(votes, source.labels[judged], source.kind.alike)
    # Marks
    reviewed = None if source.reviewed is None else source.reviewed[judged]
    issues = spread_over(judge_labels(combined, source.labels[judged], reviewed), judged, source.labels)
    rules = share_by_rules(source, combined, judged, plan.seed) if issues.learnt else None
    if rules is not None:
        issues, origin["rules"] = widen_for_rules(issues, len(source.class_names)), rules
    # Learning again
    weight, final = _weigh_rows(plan, issues), []
    for learner in learners:
        share = combined.weights[learner.name]
        if share > 0 or ("val" in beside and learner.name != ADVISER):
            final.append((_learn(plan, learner.to_learn_again(out_of_fold[learner.name]), weight, parts), share))
        done += AGAIN * plan.costs[learner.name]
        on_progress(done / plan.seconds)
    final, temperature = _calibrate(plan, final, issues, beside.get("val"))
    accuracies = {f"{name}_accuracy": _measure_accuracy(final, rows) for name, rows in beside.items()}
    shares = {learner.name: share for learner, share in final}
    accuracies["noisy_accuracy"] = accuracy_of(votes, shares, source.labels[judged])
    origin |= {"temperature": temperature, **accuracies}
    # The model folder
    model = _write_model(out, plan, final, combined, issues, origin)
    if source.unlabelled is not None:
        found = model.table(source.unlabelled.names, model.probabilities_of(source.unlabelled))
        files.replace(out / UNLABELLED, predictions_as_csv(found))
    mattered = columns_that_mattered(model, source, issues)
    write_issues(out / ISSUES, issues, source, mattered)
    write_page(out / PAGE, model, source, issues, mattered)
    parts.remove()
    on_progress(1.0)
    return model


def _keep_data(data: str | os.PathLike[str] | pd.DataFrame, source: Source, out: Path) -> str:
    """Return where the data is; a data frame or an array is written to the model folder, for `review`."""
    if isinstance(data, str | os.PathLike):
        return str(source.path.resolve())
    try:
        content = data.to_parquet(index=False)  # an index is no feature
    except (TypeError, ValueError):  # a column with values of several types, which are read as text
        mixed = [name for name, kind in data.dtypes.items() if kind.kind == "O"]
        content = data.astype(dict.fromkeys(mixed, "string")).to_parquet(index=False)
    files.replace(out / DATA_FILE, content)
    return str((out / DATA_FILE).resolve())


def _digest_plan(plan: Plan, parts: Parts, beside: dict[str, Labelled]) -> str:
    """Return a digest of the data and of all settings that change the model."""
    network, clip_search, version = plan.network, plan.clip_search, logitclip.__version__
    content = {
        "data": parts.data,
        "learners": [learner.name for learner in plan.learners],
        "recipe": None if network is None else vars(network.options),
        "settings": [
            None if clip_search is None else clip_search.spec,
            plan.network_folds,
            plan.seed,
            plan.balance,
            version,
        ],
        "beside": {name: rows.digest for name, rows in beside.items()},
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _kept_model(out: Path, origin: Facts) -> Model | None:
    """Return the model in the folder if it is to stay as it is.

    It stays if it was made from the same data with the same settings; and if `fit` made it and the command is `issues`.

    Raises:
        ValueError: If `issues` would replace a model that `fit` made of other data.
    """
    if not all((out / name).is_file() for name in (MODEL, ISSUES, PAGE)):
        return None
    try:
        model = load(out)
    except ValueError:
        return None
    if model.facts.get("made_from") == origin["made_from"]:
        log.warning("%s was made from the same data with the same settings: it is kept as it is.", out)
        return model
    if origin["made_by"] != "issues" or model.facts.get("made_by") == "issues":
        return None
    if model.facts.get("data") != origin["data"]:
        raise ValueError(f"{out} has a model that `fit` made of other data: name another folder with --out.")
    log.warning("%s has a model that `fit` made of this data with other settings: these are its issues.", out)
    return model


def _with_searched_clip(plan: Plan, parts: Parts) -> list[Learner]:
    """Return the learners, the network with the clip that the search found."""
    network = plan.network
    clip_search = plan.clip_search
    if network is None or clip_search is None:
        return plan.learners

    def search_value() -> Arrays:
        return {"value": np.array(_search_clip(network, clip_search, plan))}

    what = {"search": clip_search.spec, "recipe": vars(network.options), "seed": plan.seed}
    value = float(parts.compute(what, search_value)["value"])
    chosen = with_clip(network, clip_search.with_value(value))
    return [chosen if learner is network else learner for learner in plan.learners]


def _search_clip(network: Network, clip_search: ClipSearch, plan: Plan) -> float:
    """Search for the number of the clip on half of the rows, with the noisy labels of the others.

    Labels that a person has reviewed count as often here as in training.
    """
    chosen = choose_rows(len(plan.source.labels), SEARCHED_ROWS, plan.seed)
    rows, labels = plan.source.rows.take(chosen), plan.source.labels[chosen]
    part = hold_out(len(labels), search.HELD_OUT, generator=torch.Generator().manual_seed(plan.seed))
    inside, outside = part.train.numpy(), part.val.numpy()
    times = np.ones(len(labels), np.int64)
    if plan.source.reviewed is not None:
        times[plan.source.reviewed[chosen]] = REVIEWED_WEIGHT
    weight = times[inside].astype(np.float64) if (times > 1).any() else None
    outside = np.repeat(outside, times[outside])

    def train(value: float) -> tuple[np.ndarray, np.ndarray, float] | None:
        tried = with_clip(network, clip_search.with_value(value))
        try:
            tried.fit(rows.take(inside), labels[inside], weight, plan.seed)
        except engine.Diverged:
            return None
        assert tried.network is not None
        predicted = predict_logits(tried.network, rows.inputs, tried.view).argmax(1).numpy()
        return predicted[outside], labels[outside], float((predicted == labels)[inside].mean())

    values = clip_search.grid if clip_search.word == "grid" else None
    try:
        return search.tune(train, between=search.range_of(clip_search.grid), values=values).best
    except ValueError as error:
        raise Failed(f"No value of clip.{clip_search.knob} can be chosen: all trials failed.") from error


def _vote(plan: Plan, learner: Learner, parts: Parts) -> Arrays:
    """Return what a learner finds out of fold."""
    source = plan.source
    count = plan.folds_of(learner)
    what = {"vote": learner.name, "settings": learner.settings(), "folds": count, "seed": plan.seed}

    def compute() -> Arrays:
        folds = make_folds(source, count, plan.seed)
        found = learner.out_of_fold(source.rows, source.labels, source.weight, folds, plan.seed)
        return {name: array.astype(np.float32) if array.ndim else array for name, array in found.items()}

    return {name: array.astype(np.float64) for name, array in parts.compute(what, compute).items()}


def _weigh_rows(plan: Plan, issues: Issues) -> np.ndarray:
    """Return the weights of the rows to learn from again, [N]: the square of the chance that the label is right.

    It is about as good as leaving out the marked labels (benchmarks/own_data_decide.py), and no class runs out of rows.
    """
    source = plan.source
    weight = np.ones(len(source.labels)) if source.weight is None else source.weight.copy()
    if source.reviewed is not None:
        weight[source.reviewed] *= REVIEWED_WEIGHT
    if issues.learnt:
        right = (1 - issues.scores) ** 2
        weight *= np.where(np.isnan(right), np.nanmean(right), right)  # what cannot be scored counts as the average
    counts = np.maximum(np.bincount(source.labels, weight, minlength=len(source.class_names)), 1e-9)
    several = counts[source.counts > 1]  # a class of one is often a typing error
    if plan.balance == "on" or (plan.balance == "auto" and several.max() > UNBALANCED * several.min()):
        weight /= counts[source.labels]
    return weight / weight[weight > 0].mean()


def _learn(plan: Plan, learner: Learner, weight: np.ndarray, parts: Parts) -> Learner:
    """Return the learner, trained on the rows that have a weight."""
    source = plan.source
    kept = np.flatnonzero(weight)
    equal = bool((weight[kept] == weight[kept][0]).all())

    def compute() -> Arrays:
        learner.fit(source.rows.take(kept), source.labels[kept], None if equal else weight[kept], plan.seed)
        content = {name: np.frombuffer(value, np.uint8) for name, value in learner.contents().items()}
        return {**content, "facts": np.frombuffer(json.dumps(learner.facts()).encode(), np.uint8)}

    what = {"learn": learner.name, "settings": learner.settings(), "seed": plan.seed}
    what["weight"] = hashlib.sha256(weight.tobytes()).hexdigest()
    stored = parts.compute(what, compute)
    learner.restore(json.loads(stored["facts"].tobytes()), lambda name: stored[name].tobytes())
    return learner


def _calibrate(
    plan: Plan, final: list[tuple[Learner, float]], issues: Issues, val: Labelled | None
) -> tuple[list[tuple[Learner, float]], float]:
    """Return the learners with their shares, and the temperature of their mixture.

    With `val` its labels decide both. Else the shares stay as they are, and on the training rows the mean probability
    of the predicted class becomes the estimated accuracy of the votes.
    """
    if val is not None:
        found = {learner.name: learner.predict_proba(val.rows) for learner, _ in final}
        readable = np.all([~np.isnan(one[:, 0]) for one in found.values()], axis=0)
        shares = share_out({name: (one.argmax(1) == val.labels)[readable] for name, one in found.items()})
        final = [(learner, shares[learner.name]) for learner, _ in final if shares[learner.name] > 0]
        mixed = sum((share * found[learner.name] for learner, share in final), np.zeros(1))[readable]
        right = mixed.argmax(1) == val.labels[readable]
        if right.all():  # the likelihood has no maximum: few rows would make the model certain
            return final, match_confidence(_log(mixed), (len(right) + 1) / (len(right) + 2))
        return final, find_temperature(_log(mixed), val.labels[readable], None)
    if not issues.learnt:
        return final, 1.0
    some = choose_rows(len(plan.source.labels), CALIBRATED_ROWS, plan.seed)
    mixed = mix(final, plan.source.rows.take(some))
    return final, match_confidence(_log(mixed[~np.isnan(mixed[:, 0])]), issues.true_accuracy)


def _log(probabilities: np.ndarray) -> np.ndarray:
    return np.log(np.maximum(probabilities, 1e-12))


def _measure_accuracy(final: list[tuple[Learner, float]], beside: Labelled) -> float:
    """Return the share of the rows that can be read and are predicted right."""
    mixed = mix(final, beside.rows)
    readable = ~np.isnan(mixed[:, 0])
    return float((mixed.argmax(1) == beside.labels)[readable].mean())


def _write_model(
    out: Path, plan: Plan, final: list[tuple[Learner, float]], combined: Votes, issues: Issues, origin: Facts
) -> Model:
    source, noise = plan.source, issues.noise
    network = next((learner for learner, _ in final if isinstance(learner, Network)), plan.network)
    facts: Facts = {
        **source.kind.facts(),
        "class_names": list(source.class_names),
        "label_type": source.label_type,
        "mean": list(source.kind.mean),
        "std": list(source.kind.std),
        "learners": [
            {**learner.facts(), "weight": share, "noisy_accuracy": combined.accuracies[learner.name]}
            for learner, share in final
        ],
        "log_prior": [0.0] * len(source.class_names),
        "largest_share": float(source.counts.max() / len(source.labels)),
        "learnt": issues.learnt,
        "noise": {
            "from": "out of fold",
            "rate": noise.rate,
            "rate_interval": list(noise.rate_interval),
            "at_most": noise.at_most,
            **{
                name: None if (values := getattr(noise, name)) is None else values.tolist()
                for name in ("matrix", "matrix_lower", "matrix_upper")
            },
        },
        "clip": "none" if network is None else network.options.clip,
        "seed": plan.seed,
        **origin,
        "versions": _versions(),
    }
    contents = source.kind.contents()
    for learner, _ in final:
        contents |= learner.contents()
    if source.labels.size * len(source.class_names) <= MOST_PREDICTIONS:
        every = np.full((len(source.labels), len(source.class_names)), np.nan)
        every[~np.isnan(issues.scores)] = issues.probabilities
        contents[PREDICTIONS] = predictions_to_bytes(every)
    write_model(out, facts, contents)
    return load(out)


def _versions() -> dict[str, str]:
    import sklearn
    import skops

    return {module.__name__: str(module.__version__) for module in (logitclip, torch, np, sklearn, skops)}
