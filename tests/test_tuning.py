"""The grid, the fast search and studies, on curves with a known peak and on small real runs."""

from __future__ import annotations

import io
import itertools
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from events import Log
from rich.console import Console

from logitclip.cli.tuning import Tried, tried_table
from logitclip.losses import LOSSES
from logitclip.runs import claims
from logitclip.runs.config import RunConfig, words_to_tune
from logitclip.runs.results import Failure, Result, find_outcome
from logitclip.runs.train import train
from logitclip.search import HELD_OUT, TRIALS, best, score_trials
from logitclip.search import Trial as SearchTrial
from logitclip.studies import executors, queue, sweeping, tuning, with_optuna
from logitclip.studies.tuning import GRIDS, Search

AUTO = RunConfig(noise="symmetric:rate=0.5", clip="norm:temp=auto")
GRID = replace(AUTO, clip="norm:temp=grid")
ONE = np.zeros(1, dtype=np.int64)
PAPER = (0.1, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5)


@dataclass(frozen=True)
class Trial(Result):
    """A stand-in for a run and its folder."""

    held_out: dict[str, np.ndarray]

    @property
    def validation(self) -> dict[str, np.ndarray]:
        return self.held_out

    @property
    def rows(self) -> list[dict[str, Any]]:
        return []


def trial(accuracy: float, clip: str = "none", label: np.ndarray = ONE, prediction: np.ndarray = ONE) -> Trial:
    held_out = {"label": label, "prediction": prediction}
    nowhere = {"runs": "nowhere"}
    return Trial("x", nowhere, 0.0, 0.0, accuracy, None, None, 0.5, clip, 1, 0.0, {}, "", None, held_out)


class Curve:
    """A stand-in for run folders: each trained config has the validation accuracy of a curve over log temp."""

    def __init__(self, peak: float, broken: tuple[float, ...] = ()) -> None:
        self.peak, self.broken, self.done = peak, broken, list[RunConfig]()

    def train(self, configs: list[RunConfig]) -> None:
        assert not [config for config in configs if config in self.done]  # no trial is requested twice
        self.done += configs

    def __call__(self, config: RunConfig) -> Result | Failure | None:
        if config not in self.done:
            return None
        temp = float(config.clip.rpartition("=")[2])
        if temp in self.broken:
            return Failure("", "Diverged", "", 1, final=True)
        return trial(60 - 10 * abs(math.log(temp / self.peak)), config.clip)


def tune(config: RunConfig, outcome: Curve) -> float:
    while asked := tuning.next_trials(config, outcome):
        outcome.train(asked)
    chosen = tuning.choose(config, outcome)
    assert replace(chosen, clip=config.clip) == config  # nothing else is changed
    return float(chosen.clip.removeprefix("norm:temp="))


@pytest.mark.parametrize("value", PAPER)
def test_the_grid_is_the_papers_and_finds_the_best_of_it(value: float) -> None:
    outcome = Curve(peak=value)
    assert tune(GRID, outcome) == value
    assert [config.clip for config in outcome.done] == [f"norm:temp={v:g}" for v in PAPER]
    assert {config.val for config in outcome.done} == {0.1}


def test_the_grid_runs_in_one_wave_and_asks_for_what_is_missing() -> None:
    outcome = Curve(peak=2)
    asked = tuning.next_trials(GRID, outcome)
    assert len(asked) == 11
    outcome.train(asked[::2])
    assert tuning.next_trials(GRID, outcome) == asked[1::2]


@pytest.mark.parametrize("peak", [0.05, 0.1, 0.3, 0.9, 1.4, 2.0, 2.6, 3.3, 4.8, 9.0, 30.0])
def test_the_fast_search_comes_near_the_peak_also_outside_the_grid(peak: float) -> None:
    outcome = Curve(peak)
    found = tune(AUTO, outcome)
    # Beyond its first three values it can take two steps by a factor of 2.2.
    reach = 1.0 / 2.24**2 <= peak <= 5.0 * 2.24**2
    assert abs(math.log(found / peak)) < (math.log(2.24) / 2 + 0.02 if reach else math.log(1.3) + abs(math.log(peak)))
    assert len(outcome.done) == TRIALS
    assert len({config.clip for config in outcome.done}) == TRIALS


def test_the_fast_search_costs_at_most_a_quarter_of_the_grid() -> None:
    fast, grid = Curve(peak=2), Curve(peak=2)
    tune(AUTO, fast)
    tune(GRID, grid)
    cost = [sum(1 - config.val for config in outcome.done) for outcome in (fast, grid)]
    assert cost[0] <= cost[1] / 4


def test_a_failed_trial_is_not_chosen() -> None:
    assert tune(GRID, Curve(peak=2, broken=(2.0,))) in (1.5, 2.5)
    assert tune(AUTO, Curve(peak=1, broken=(1.0,))) != 1.0
    with pytest.raises(ValueError, match="all trials failed"):
        tune(GRID, Curve(peak=2, broken=PAPER))


def test_own_validation_share_is_kept_and_the_fast_search_holds_out_at_random() -> None:
    own = replace(GRID, val=0.3, val_rule="released")
    assert {(config.val, config.val_rule) for config in tuning.next_trials(own, Curve(1))} == {(0.3, "released")}
    fast = replace(AUTO, val_rule="released")
    assert {config.val_rule for config in tuning.next_trials(fast, Curve(1))} == {"random"}


@pytest.mark.parametrize(
    ("fields", "values"),
    [
        ({"clip": "value:limit=grid"}, PAPER),
        ({"clip": "logit_norm:temperature=grid"}, PAPER),
        ({"clip": "softcap:cap=grid"}, PAPER),
        ({"penalty": "norm:weight=grid"}, (0.01, 0.05, 0.1, 0.5)),
    ],
)
def test_the_rivals_have_grids(fields: dict[str, str], values: tuple[float, ...]) -> None:
    config = RunConfig(**fields)
    assert tuning.search_for(config).values == values
    (field, spec), *_ = fields.items()
    asked = tuning.next_trials(config, lambda _: None)
    assert [getattr(trial, field) for trial in asked] == [spec.replace("grid", f"{v:g}") for v in values]


class Valley(Curve):
    """Trials of two numbers: the accuracy falls with the distance from the best temp and from the best q."""

    def __call__(self, config: RunConfig) -> Result | Failure | None:
        if config not in self.done:
            return None
        temp, q = float(config.clip.rpartition("=")[2]), float(config.loss.rpartition("=")[2])
        if temp in self.broken:
            return Failure("", "Diverged", "", 1, final=True)
        return trial(60 - 10 * abs(math.log(temp / self.peak)) - 20 * abs(q - 0.5), config.clip)


BOTH = replace(AUTO, loss="gce:q=auto")


@pytest.mark.parametrize(("peak", "temp"), [(1.0, 1.0), (2.0, 2.24), (9.0, 5.0)])
def test_a_knob_of_the_loss_and_temp_share_five_trials(peak: float, temp: float) -> None:
    outcome = Valley(peak)
    while asked := tuning.next_trials(BOTH, outcome):
        outcome.train(asked)
    tried = [(config.clip, config.loss) for config in outcome.done]
    assert tried == [
        *((f"norm:temp={value:g}", "gce:q=0.7") for value in (1.0, 2.24, 5.0)),
        *((f"norm:temp={temp:g}", f"gce:q={q:g}") for q in (0.5, 0.8)),
    ]
    chosen = tuning.choose(BOTH, outcome)
    assert (chosen.clip, chosen.loss, chosen.val) == (f"norm:temp={temp:g}", "gce:q=0.5", 0.0)


def test_two_numbers_without_a_trial_that_worked() -> None:
    outcome = Valley(1.0, broken=(1.0, 2.24, 5.0))
    outcome.train(tuning.next_trials(BOTH, outcome))
    assert tuning.next_trials(BOTH, outcome) == []
    with pytest.raises(ValueError, match="all trials failed"):
        tuning.choose(BOTH, outcome)


@pytest.mark.parametrize("name", [name for name in LOSSES if getattr(LOSSES[name], "tune", None)])
def test_the_main_knob_of_a_loss_has_five_values_around_its_default(name: str) -> None:
    loss: Any = LOSSES[name]
    ((knob, values),) = loss.tune.items()
    assert len(values) == 5
    assert list(values) == sorted(values)
    assert loss.defaults[knob] in values[1:4]
    logits, target = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3, 0, 1])
    for value in values:
        assert loss(logits, target, **{knob: value}).isfinite().all()
    asked = tuning.next_trials(RunConfig(loss=f"{name}:{knob}=auto"), lambda _: None)
    assert [float(config.loss.partition(f"{knob}=")[2]) for config in asked] == list(values)
    assert {(config.val, config.val_rule) for config in asked} == {(HELD_OUT, "random")}


def test_every_grid_names_a_knob_that_exists() -> None:
    for key, values in GRIDS.items():
        field, name, knob = key.split(".")
        for value in values:
            RunConfig(**{field: f"{name}:{knob}={value}"}).resolve()


def test_what_is_to_be_tuned_is_no_run() -> None:
    assert words_to_tune(AUTO) == [("clip", "temp", "auto")]
    assert tuning.is_tuned(GRID)
    assert not tuning.is_tuned(RunConfig())
    with pytest.raises(ValueError, match="temp of the clip 'norm:temp=auto' is to be tuned"):
        train(AUTO)
    with pytest.raises(ValueError, match=r"One number can be tuned at a time, got clip\.temp and penalty\.weight"):
        tuning.is_tuned(replace(AUTO, penalty="norm:weight=grid"))
    with pytest.raises(ValueError, match="Nothing to tune"):
        tuning.next_trials(RunConfig())
    with pytest.raises(ValueError, match=r"--option loss\.beta --values"):
        tuning.next_trials(RunConfig(loss="sce:beta=grid"))


def test_any_option_can_be_set() -> None:
    assert tuning.with_value(RunConfig(loss="sce:alpha=0.1,beta=1"), "loss.beta", 0.5).loss == "sce:alpha=0.1,beta=0.5"
    assert tuning.with_value(RunConfig(clip="norm: temp = grid"), "clip.temp", 0.5).clip == "norm:temp=0.5"
    assert tuning.with_value(RunConfig(model="timm:resnet18"), "model.rate", 0.5).model == "timm:name=resnet18,rate=0.5"
    assert tuning.with_value(RunConfig(clip="value:1.5"), "clip.limit", 0.5).clip == "value:limit=0.5"
    assert tuning.with_value(RunConfig(clip="value:auto"), "clip.limit", 0.5).clip == "value:limit=0.5"
    assert tuning.with_value(RunConfig(), "batch_size", 32).batch_size == 32
    with pytest.raises(ValueError, match="The option lr has no knob 'size'"):
        tuning.with_value(RunConfig(), "lr.size", 0.1)
    with pytest.raises(ValueError, match="There is no option 'learning_rate' to tune"):
        tuning.with_value(RunConfig(), "learning_rate", 0.1)


def test_own_values_on_real_runs(tmp_path) -> None:
    config = RunConfig(noise="symmetric:rate=0.5", epochs=4, limit=200, runs=str(tmp_path))
    search = Search("lr", values=(1e-6, 0.1))
    executors.execute(tuning.next_trials(config, search=search), executor="inline")
    assert tuning.next_trials(config, search=search) == []
    scores = tuning.scores_of_trials(config, find_outcome, search)
    assert list(scores) == [1e-6, 0.1]
    assert tuning.choose(config, search=search).lr == max(scores, key=lambda value: scores[value] or 0)


@pytest.mark.parametrize("storage", [None, "study.db", "study.log"])
def test_a_study_is_resumed_and_repeats_nothing(storage, tmp_path) -> None:
    config = RunConfig(noise="symmetric:rate=0.5", clip="norm:temp=1", epochs=1, limit=100, runs=str(tmp_path))
    where = None if storage is None else str(tmp_path / storage)
    first = [t.params for t in with_optuna.run_study(config, "clip.temp", 0.1, 10, 3, storage=where).trials]
    more = with_optuna.run_study(config, "clip.temp", 0.1, 10, 4, storage=where)
    assert len(more.trials) == 4
    assert [t.params for t in more.trials[:3]] == first
    assert all(0.1 <= t.params["clip.temp"] <= 10 for t in more.trials)
    assert len({t.params["clip.temp"] for t in more.trials}) == 4
    whole = with_optuna.run_study(config, "batch_size", 16, 64, 2, storage=where)
    assert all(isinstance(t.params["batch_size"], int) for t in whole.trials)
    whole = with_optuna.run_study(replace(config, model="mlp"), "model.width", 8, 64, 2, storage=where)
    assert all(isinstance(t.params["model.width"], int) for t in whole.trials)


def test_a_trial_that_was_killed_is_done_first(tmp_path) -> None:
    config = RunConfig(noise="symmetric:rate=0.5", clip="norm:temp=1", epochs=1, limit=100, runs=str(tmp_path))
    where = str(tmp_path / "study.db")
    study = with_optuna.run_study(config, "clip.temp", 0.1, 10, 1, storage=where)
    lost = study.ask()
    lost.suggest_float("clip.temp", 0.1, 10, log=True)  # and its process is gone
    resumed = with_optuna.run_study(config, "clip.temp", 0.1, 10, 2, storage=where)
    assert [t.state.name for t in resumed.trials] == ["COMPLETE", "FAIL", "COMPLETE"]
    assert resumed.trials[2].params == lost.params


def test_a_trial_that_was_killed_after_its_result_is_tidied_up(tmp_path) -> None:
    import optuna

    config = RunConfig(noise="symmetric:rate=0.5", clip="norm:temp=1", epochs=1, limit=100, runs=str(tmp_path))
    whole = with_optuna.run_study(config, "clip.temp", 0.1, 10, 1)
    (tmp_path / "index.csv").unlink()
    (folder,) = tmp_path.glob("?" * 16)
    claim = {"machine": claims._machine(), "pid": 2**22 + 1, "started": "0"}  # there is no such process
    (folder / "claim").write_text(json.dumps(claim), encoding="utf-8")
    where = str(tmp_path / "study.db")
    storage = f"sqlite:///{where}"
    study = optuna.create_study(storage=storage, study_name=whole.study_name, direction="maximize")
    study.enqueue_trial(whole.trials[0].params)
    study.ask().suggest_float("clip.temp", 0.1, 10, log=True)
    resumed = with_optuna.run_study(config, "clip.temp", 0.1, 10, 1, storage=where)
    assert resumed.best_value == whole.best_value
    assert folder.name in (tmp_path / "index.csv").read_text(encoding="utf-8")
    assert not (folder / "claim").exists()


def test_a_trial_that_another_process_has_given_up_is_no_error(tmp_path) -> None:
    import optuna

    config = RunConfig(noise="symmetric:rate=0.5", clip="norm:temp=1", epochs=1, limit=100, runs=str(tmp_path))
    where = str(tmp_path / "study.db")

    def give_up(kind: str, *_: Any) -> None:
        study = optuna.load_study(study_name=None, storage=f"sqlite:///{where}")
        if kind == "start" and len(study.trials) == 1:
            study.tell(0, state=optuna.trial.TrialState.FAIL)

    study = with_optuna.run_study(config, "clip.temp", 0.1, 10, 1, storage=where, listener=Log(give_up))
    assert [t.state.name for t in study.trials] == ["FAIL", "COMPLETE"]


def test_a_killed_study_makes_the_trials_of_an_undisturbed_one(tmp_path) -> None:
    config = RunConfig(noise="symmetric:rate=0.5", clip="norm:temp=1", epochs=1, limit=64, model="mlp:width=8,depth=1")

    def values(name: str, *stops: int) -> list[float]:
        """The values of a study that is stopped in the midst of these trials, and while it writes."""
        there, journal = replace(config, runs=str(tmp_path / name)), tmp_path / f"{name}.log"
        for stop in stops:
            starts = itertools.count(1)

            def react(kind: str, *_: Any, stop: int = stop, starts: Any = starts) -> None:
                if kind == "start" and next(starts) == stop:
                    raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                with_optuna.run_study(there, "clip.temp", 0.1, 10, 13, storage=str(journal), listener=Log(react))
            with journal.open("ab") as stream:
                stream.write(b'{"op_code": 4, "wor')
        study = with_optuna.run_study(there, "clip.temp", 0.1, 10, 13, storage=str(journal))
        return [trial.params["clip.temp"] for trial in study.trials if trial.state.name == "COMPLETE"]

    undisturbed = values("whole")  # the first ten are random
    assert len(undisturbed) == 13
    assert values("killed", 1, 3, 8) == undisturbed


def test_a_trial_that_failed_for_a_passing_reason_is_tried_again(tmp_path, monkeypatch) -> None:
    config = RunConfig(clip="norm:temp=1", epochs=1, limit=64, model="mlp:width=8,depth=1", runs=str(tmp_path / "runs"))
    where = str(tmp_path / "study.db")

    def full(*_: Any, **__: Any) -> None:
        raise OSError("The disk is full.")

    with monkeypatch.context() as patch:
        patch.setattr("logitclip.studies.queue.train", full)
        study = with_optuna.run_study(config, "clip.temp", 0.1, 10, 2, storage=where)
    assert [trial.state.name for trial in study.trials] == ["FAIL", "FAIL"]
    study = with_optuna.run_study(config, "clip.temp", 0.1, 10, 2, storage=where)
    assert [trial.state.name for trial in study.trials] == ["FAIL", "FAIL", "COMPLETE", "COMPLETE"]
    assert [trial.params for trial in study.trials[2:]] == [trial.params for trial in study.trials[:2]]
    assert len(with_optuna.run_study(config, "clip.temp", 0.1, 10, 2, storage=where).trials) == 4


@pytest.mark.parametrize(("low", "high", "count"), [(0.0, 1.0, 3), (2.0, 1.0, 3), (0.1, 1.0, 0), (0.1, math.inf, 3)])
def test_bad_bounds_of_a_study(low: float, high: float, count: int) -> None:
    with pytest.raises(ValueError, match="got"):
        with_optuna.run_study(RunConfig(clip="norm:temp=1"), "clip.temp", low, high, count)


def test_the_choice_among_real_runs_is_that_of_the_search(tmp_path) -> None:
    config = RunConfig(noise="asymmetric:rate=0.4", clip="norm:temp=auto", limit=300, epochs=40, runs=str(tmp_path))
    search = Search("clip.temp", grid=(0.5, 3.0))
    scores = sweeping.tune(config, search, executor="inline")
    trials = tuning.fast_trials(config, find_outcome, search)
    assert list(trials) == list(scores)
    for value, trial in trials.items():
        result = find_outcome(tuning.make_trial(config, search, value))
        assert isinstance(result, Result)
        assert trial is not None
        assert result.val_accuracy == scores[value] == pytest.approx(100 * trial.accuracy)
        fitted = [row["train_accuracy"] for row in result.rows[-10:]]
        assert 100 * (trial.train_accuracy or 0) == pytest.approx(sum(fitted) / 10)
        assert (trial.predictions == result.validation["prediction"]).all()
    assert len({trial and trial.train_accuracy for trial in trials.values()}) > 1
    assert tuning.best_value(config, find_outcome, search) == best(trials)
    assert tuning.choose(config, search=search).clip == f"norm:temp={best(trials):g}"


def test_trials_that_all_failed_are_no_reason_to_train_longer(caplog) -> None:
    broken = Curve(1.0, broken=(1.0, 2.24, 5.0, 0.446, 0.199))
    with pytest.raises(ValueError, match="all trials failed"):
        tune(AUTO, broken)
    assert "better than chance" not in caplog.text


@pytest.mark.parametrize("name", ["validation.npz", "metrics.jsonl"])
def test_a_trial_whose_files_are_lost_or_cut_has_failed_and_is_made_again(tmp_path, caplog, name) -> None:
    config = RunConfig(clip="norm:temp=auto", limit=100, epochs=2, runs=str(tmp_path))
    executors.execute(tuning.next_trials(config), executor="inline")
    search = tuning.search_for(config)
    before = tuning.scores_of_trials(config, find_outcome, search)
    lost = tmp_path / tuning.make_trial(config, search, next(iter(before))).id / name
    whole = lost.read_bytes()
    for content in (b"", whole[: len(whole) // 2], None):
        lost.unlink() if content is None else lost.write_bytes(content)
        scores = tuning.scores_of_trials(config, find_outcome, search)
        assert [value for value, score in scores.items() if score is None] == [next(iter(before))]
        assert f"The result in {lost.parent} is not used: {name} " in caplog.text
        caplog.clear()
    after = sweeping.tune(config, search, executor="inline")
    assert {value: after[value] for value in before} == before


def test_a_knob_without_a_value_can_be_studied(tmp_path) -> None:
    config = RunConfig(clip="norm", epochs=1, limit=100, runs=str(tmp_path))
    assert with_optuna.run_study(config, "clip.temp", 0.5, 2, 1).best_params.keys() == {"clip.temp"}


@pytest.mark.parametrize("storage", ["/dev/null/study.db", "/dev/null/study.log", "nothing://study"])
def test_a_storage_that_is_none_is_said_in_a_sentence(storage: str) -> None:
    with pytest.raises(ValueError, match=r"^The study cannot be stored in .*\.$"):
        with_optuna.run_study(RunConfig(clip="norm:temp=1"), "clip.temp", 0.1, 1, 1, storage=storage)


# -- the command line --------------------------------------------------------------------------------------------------


@pytest.fixture
def typed(command, tmp_path: Path) -> Any:
    """Run `logitclip tune` with small runs in this process."""
    small = ["--epochs", "1", "--limit", "100", "--model", "mlp:width=8,depth=1", "--executor", "inline"]
    return lambda *arguments: command("tune", *small, "--runs", tmp_path, *arguments)


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        (["--clip", "norm:temp=auto"], 5),
        (["--option", "penalty.weight", "--penalty", "norm:weight=1", "--fast"], 5),
        (["--option", "clip.temp", "--values", "0.5,1.5"], 2),
        (["--option", "nesterov", "--values", "true,false"], 2),
        (["--option", "milestones", "--values", "0.4,0.7;0.5"], 2),
        (["--option", "lr", "--between", "0.01,0.1", "--trials", "3"], 3),
    ],
)
def test_what_is_tuned_is_trained_with_the_best_value_on_everything(arguments, count, typed, tmp_path) -> None:
    code, out, _ = typed("--noise", "symmetric:rate=0.5", "--json", *arguments)
    assert code == 0
    said = json.loads(out)
    assert len(said["tried"]) == count
    assert len(list(tmp_path.glob("*/result.json"))) == count + 1
    field, _, knob = said["option"].partition(".")
    found, chosen = said["result"]["config"][field], said["chosen"]
    if knob:
        assert f"{knob}={chosen:g}" in found
    else:
        assert found == ([float(share) for share in chosen.split(",")] if field == "milestones" else chosen)
    assert said["result"]["config"]["val"] == 0
    winner = next(trial for trial in said["tried"] if trial["value"] == said["chosen"])
    if "contender" in winner:
        assert winner["contender"]
        assert winner["score"] == max(trial["score"] for trial in said["tried"] if trial["contender"])
    else:
        assert winner["val_accuracy"] == max(trial["val_accuracy"] for trial in said["tried"])


def test_trials_that_learnt_nothing_are_warned_of(typed, caplog) -> None:
    learns_nothing = ["--lr", "1e-9", "--noise", "symmetric:rate=0.5", "--clip", "norm:temp=auto"]
    assert typed(*learns_nothing)[0] == 0
    sentence = "The search for clip.temp (loss ce, noise symmetric:rate=0.5): No trial is better than chance"
    assert caplog.text.count(sentence) == 1


def test_what_won_and_why() -> None:
    def told(found: dict[float, float | None], fast_trials: dict[float, Any]) -> tuple[str, list[str]]:
        console = Console(width=200, file=io.StringIO(), record=True)
        console.print(tried_table(Tried("clip.temp", found, 1.0, score_trials(fast_trials) if fast_trials else {})))
        first, *lines = console.export_text().splitlines()
        return first, next(line.split() for line in lines if "chosen" in line)

    scores: dict[float, float | None] = {0.5: 80.0, 1.0: 90.0, 1.5: None}
    assert told(scores, {}) == ("Chosen: clip.temp = 1, the highest accuracy.", ["1", "90.00", "chosen"])
    two = told(scores | {2.0: 90.0}, {})[0]
    assert two == "Chosen: clip.temp = 1, the first tried of 2 values with the highest accuracy."
    label = np.arange(100) % 4
    wrong = [np.where(np.arange(100) % 10 == k, 0, label) for k in (1, 3)]
    trials = {0.5: SearchTrial(wrong[0], label, 1.0), 1.0: SearchTrial(wrong[1], label, 0.95)}
    first, row = told({0.5: 92.0, 1.0: 92.0, 1.5: None}, trials | {1.5: None})
    assert first.endswith("1, the highest score of 2 values within 1.5 standard errors of the highest accuracy.")
    assert row == ["1", "92.00", "5.00", "20.00", "65.00", "yes", "chosen"]  # they differ on 20 %
    unknown = {value: replace(trial, train_accuracy=None) for value, trial in trials.items()}
    assert told({0.5: 91.0, 1.0: 92.0}, unknown)[1] == ["1", "92.00", "20.00", "70.00", "yes", "chosen"]  # no gap


def test_trials_that_fail_are_said_and_tried_again(typed, monkeypatch) -> None:
    real, calls = queue.train, []

    def broken(config: RunConfig, **_: Any) -> Any:
        calls.append(config)
        raise RuntimeError("no memory")

    monkeypatch.setattr(queue, "train", broken)
    code, out, err = typed("--option", "lr", "--values", "0.1,0.2")
    assert (code, out, len(calls)) == (3, "", 2)
    assert "and 1 more: RuntimeError: no memory. See " in err
    assert err.endswith("logitclip: No value can be chosen: all trials failed.\n")
    monkeypatch.setattr(queue, "train", real)  # the cause has passed
    assert typed("--option", "lr", "--values", "0.1,0.2")[0] == 0


def test_a_folder_that_takes_nothing_ends_it(typed) -> None:
    code, out, err = typed("--option", "lr", "--values", "0.1,0.2", "--runs", "/dev/null/runs")
    assert (code, out) == (2, "")
    assert err.endswith("\nlogitclip: Cannot write runs to /dev/null/runs: Not a directory.\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Nothing to tune"),
        (["--option", "lr"], "Give --option with one of"),
        (["--fast"], "Give --option with one of"),
        (["--option", "lr", "--values", "0.1,0.2", "--storage", "s.db"], "are for a study"),
        (["--option", "lr", "--values", "0.1,0.2", "--linear"], "are for a study"),
        (["--option", "lr", "--between", "0.1,0.2", "--jobs", "2"], "A study makes one run at a time"),
        (["--option", "lr", "--between", "0.1,0.2", "--address", "auto"], "A study makes one run at a time"),
        (["--option", "lr", "--between", "0.1,0.2", "--executor", "nope"], "A study makes one run at a time"),
        (["--option", "lr", "--values", "0.1,0.2", "--trials", "2"], "--trials and --storage are for a study"),
        (["--option", "lr", "--fast"], "No values are known to choose lr from"),
        (["--option", "lr", "--between", "0.1"], "between must be two numbers"),
        (["--option", "lr", "--fast"], "No values are known to choose"),
    ],
)
def test_mistakes_are_a_sentence(arguments, message, typed) -> None:
    code, out, err = typed(*arguments, "-q")
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_what_is_chosen_trains_on_everything() -> None:
    outcome = Curve(peak=1.5)
    config = replace(GRID, val=0.3)
    outcome.train(tuning.next_trials(config, outcome))
    assert {trial.val for trial in outcome.done} == {0.3}
    assert tuning.choose(config, outcome).val == 0


@pytest.mark.parametrize("name", ["study.db", "study.log"])
@pytest.mark.parametrize("damage", ["deleted", "cut"])
def test_a_study_whose_file_is_lost_is_one_sentence(tmp_path, name, damage) -> None:
    pytest.importorskip("optuna")
    config = RunConfig(epochs=1, limit=100, model="mlp:width=8,depth=1", runs=str(tmp_path / "runs"))
    file = tmp_path / name

    def damaged(kind: str, *_: Any) -> None:
        if kind == "start":
            file.unlink() if damage == "deleted" else file.write_bytes(file.read_bytes()[:100])

    with pytest.raises(ValueError, match=f"^The study cannot be stored in .*{name}'?: .*"):
        with_optuna.run_study(config, "lr", 0.01, 0.1, 2, storage=str(file), listener=Log(damaged))
    assert len(list((tmp_path / "runs").glob("*/result.json"))) == 1


def test_one_value_is_tuned_at_a_time(command, tmp_path) -> None:
    typed = ("tune", "--clip", "norm:temp=auto", "--option", "lr", "--values", "0.05,0.1", "--runs", tmp_path)
    code, out, err = command(*typed)
    sentence = "One value is tuned at a time: give temp in --clip norm:temp=auto a number, or leave out --option lr."
    assert (code, out, err) == (2, "", f"logitclip: {sentence}\n")
