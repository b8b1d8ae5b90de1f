"""All methods: they train on noisy digits, resume bit for bit, and accept or reject every clip, loss and setting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jobs import CLIPS
from torch import Tensor, nn

from logitclip import cli
from logitclip.clip import PENALTIES
from logitclip.criterion import build_criterion
from logitclip.data import Dataset, Split
from logitclip.engine import Progress, Settings, fit
from logitclip.launch import make_fabric
from logitclip.losses import LOSSES
from logitclip.methods import METHODS
from logitclip.methods.sop import SOP
from logitclip.methods.standard import Standard
from logitclip.models import build
from logitclip.runs import train as training
from logitclip.runs.config import RunConfig
from logitclip.runs.results import Result

MODEL = "mlp:width=64,depth=2,norm=batch"
SHORT = RunConfig(limit=400, epochs=5, batch_size=32, lr=0.1, model=MODEL, noise_seed=3, seed=4)

# Both phases of DivideMix and the sieve of CORES fall into five epochs.
TRAININGS = {
    "ce": {},
    "sam": {"method": "sam:rho=0.05"},
    "sop": {"method": "sop"},
    "sop_plus": {"method": "sop_plus", "model": MODEL + ",dropout=0.2"},
    "dividemix": {"method": "dividemix:warm_up=2,loss_window=2"},
    "elr": {"method": "elr"},
    "co_teaching": {"method": "co_teaching:gradual=3"},
    "gjs": {"method": "gjs", "model": MODEL + ",dropout=0.2"},
    "cores": {"loss": "cores:warmup=1,ramp=2,sieve_after=1"},
}
NOISES = ("symmetric:rate=0.5", "asymmetric:rate=0.4")


class Stop(RuntimeError):
    pass


def stopping(after: int, error: BaseException) -> Callable[[RunConfig, Any], None]:
    """Raise `error` at the end of an epoch."""

    def on_epoch(config: RunConfig, row: dict[str, Any] | None) -> None:
        if row is not None and row["epoch"] == after:
            raise error

    return on_epoch


def written(result: Result) -> tuple[bytes, dict[str, Tensor]]:
    """Return the rows of a run on disk, and its last weights."""
    return (result.folder / "metrics.jsonl").read_bytes(), result.weights()


@pytest.mark.parametrize("clip", ["none", "norm:temp=0.8"])
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("name", TRAININGS)
def test_trains_on_digits_and_resumes_to_the_bit(name: str, noise: str, clip: str, tmp_path: Path) -> None:
    config = replace(SHORT, noise=noise, clip=clip, **TRAININGS[name])
    whole = training.train(replace(config, runs=str(tmp_path / "whole")))
    assert len(whole.rows) == 5
    assert whole.best_accuracy > 30, "of ten classes"
    broken = replace(config, runs=str(tmp_path / "broken"))
    with pytest.raises(Stop):  # like a kill: only the files are left, without the last epoch
        training.train(replace(broken, checkpoint_seconds=0), on_epoch=stopping(1, Stop()))
    with pytest.raises(KeyboardInterrupt):
        training.train(broken, on_epoch=stopping(3, KeyboardInterrupt()))
    resumed = training.train(broken)
    (rows, weights), (rows_again, weights_again) = written(whole), written(resumed)
    assert rows == rows_again
    assert weights.keys() == weights_again.keys()
    assert all(torch.equal(value, weights_again[key]) for key, value in weights.items())


def test_methods_differ(tmp_path: Path) -> None:
    """No two entries of the table above are the same method."""
    rows = {
        name: training.train(replace(SHORT, noise=NOISES[0], runs=str(tmp_path), **t)).rows
        for name, t in TRAININGS.items()
    }
    losses = [[row["loss"] for row in of_one] for of_one in rows.values()]
    assert all(a != b for i, a in enumerate(losses) for b in losses[:i])


# -- every combination works or is refused -----------------------------------------------------------------------------


def points(n: int = 120) -> Dataset:
    """Make three clouds of points with a third of the labels wrong."""
    g = torch.Generator().manual_seed(0)
    y = torch.randint(3, (n,), generator=g)
    x = torch.randn(n, 6, generator=g) + 2 * torch.nn.functional.one_hot(y, 6)
    noisy = torch.where(torch.rand(n, generator=g) < 0.3, (y + 1) % 3, y)
    return Dataset("points", Split(x, y).relabel(noisy), Split(x, y), 3, tuple("abc"))


POINTS = points()


def train(
    method: str,
    *,
    loss: str = "ce",
    clip: str = "none",
    watch: Any = None,
    spec: str = "mlp:width=8,depth=1",
    **more: Any,
) -> list[dict[str, Any]]:
    """Train briefly on points; return the rows."""
    rows: list[dict[str, Any]] = []

    def after_epoch(progress: Progress) -> None:
        rows.append(progress.row)
        if watch is not None:
            watch(progress)

    extra = {name: more.pop(name) for name in ("index", "held_out", "view", "fabric") if name in more}
    settings = Settings(**{"epochs": 3, "batch_size": 20, "lr": 0.1, **more})
    factory = lambda seed: build(spec, 3, (6,), seed=seed)  # noqa: E731
    fit(POINTS, factory, build_criterion(loss, clip), METHODS.build(method), settings, after_epoch=after_epoch, **extra)
    return rows


FOR_POINTS = {"sop_plus": "sop_plus:strong=false", "dividemix": "dividemix:warm_up=1"}  # short runs on features
ALL_METHODS = [FOR_POINTS.get(method, method) for method in METHODS]


@pytest.mark.parametrize("method", ALL_METHODS)
def test_every_clip_composes(method: str) -> None:
    losses = {clip: [row["loss"] for row in train(method, clip=clip)] for clip in CLIPS}
    assert np.isfinite(list(losses.values())).all()
    assert len(set(map(tuple, losses.values()))) == len(CLIPS)  # and each has an effect


@pytest.mark.parametrize("method", ALL_METHODS)
def test_extended_logit_norm_composes_with_one_network(method: str) -> None:
    if method.partition(":")[0] in ("dividemix", "co_teaching"):
        with pytest.raises(
            ValueError, match=r"needs the last layer of one network, and (DivideMix|CoTeaching) trains two"
        ):
            train(method, clip="extended_logit_norm")
        return
    losses = [[row["loss"] for row in train(method, clip=clip)] for clip in ("extended_logit_norm", "none")]
    assert np.isfinite(losses).all()
    assert losses[0] != losses[1]


@pytest.mark.parametrize("method", ALL_METHODS)
@pytest.mark.parametrize("loss", list(LOSSES))
def test_every_loss_composes_or_is_refused(method: str, loss: str) -> None:
    accepted: Any = METHODS[method.partition(":")[0]]
    if accepted.losses is None or loss in accepted.losses:
        assert all(np.isfinite(row["loss"]) for row in train(method, loss=loss, clip="norm:tau=1"))
        assert RunConfig(method=method, loss=loss).resolve().loss == loss
    else:
        with pytest.raises(ValueError, match="has its own objective and accepts only the loss ce"):
            train(method, loss=loss, clip="norm:tau=1")
        with pytest.raises(ValueError, match="has its own objective and accepts only the loss ce"):
            RunConfig(method=method, loss=loss).resolve()


PLAIN = {"spec": "mlp:width=8,depth=1"}
LARGE = {"spec": "mlp:width=8,depth=1", "view": lambda x, generator: 30 * x, "lr": 1e-3}  # features beyond 6
SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (PLAIN, {"penalty": PENALTIES.build("norm:weight=0.5")}),
    (PLAIN, {"grad_clip": 0.01}),
    (PLAIN, {"momentum": 0.5}),
    (PLAIN, {"weight_decay": 0.05}),
    (PLAIN, {"seed": 1}),
    (PLAIN, {"index": torch.arange(80), "held_out": torch.arange(80, 120)}),
    (PLAIN, {"view": lambda x, generator: x if generator is None else x + torch.randn(x.shape, generator=generator)}),
    (PLAIN, {"spec": "mlp:width=8,depth=1,norm=batch"}),
    (PLAIN, {"spec": "mlp:width=8,depth=1,dropout=0.5"}),
    (LARGE, {"spec": "mlp:width=8,depth=1,activation=relu6"}),
    ({"batch_size": 50}, {"drop_last": True}),
]


@pytest.mark.parametrize("method", ALL_METHODS)
def test_no_setting_is_ignored(method: str) -> None:
    for base, setting in SETTINGS:
        plain, changed = train(method, **base), train(method, **{**base, **setting})
        assert [row["loss"] for row in changed] != [row["loss"] for row in plain], setting
        assert all(np.isfinite(row["loss"]) for row in changed), setting
        assert all((row["val_accuracy"] is None) == ("held_out" not in setting) for row in changed)


@pytest.mark.parametrize("precision", ["64", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("method", ALL_METHODS)
def test_every_precision(method: str, precision: str) -> None:
    single = train(method, clip="norm:tau=1", spec="mlp:width=8,depth=1,norm=batch")
    fabric = make_fabric(accelerator="cpu", precision=precision)
    rows = train(method, clip="norm:tau=1", spec="mlp:width=8,depth=1,norm=batch", fabric=fabric)
    for row, other in zip(rows, single, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-4 if precision == "64" else 0.1)
        assert row["loss"] != other["loss"]


def test_sop_leaves_the_rows_of_held_out_examples_alone() -> None:
    tables: list[tuple[Tensor, Tensor]] = []

    def watch(progress: Progress) -> None:
        assert isinstance(progress.method, SOP)
        tables.append((progress.method.u.clone(), progress.method.v.clone()))

    index = torch.arange(0, 120, 2)
    train("sop", index=index, held_out=index + 1, watch=watch)
    (u, v), (u_later, v_later) = tables[0], tables[-1]
    assert torch.equal(u[index + 1], u_later[index + 1])
    assert torch.equal(v[index + 1], v_later[index + 1])
    assert (u[index] != u_later[index]).all()


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--method", "sop", "--loss", "gce"], "accepts only the loss ce, got 'gce'"),
        (["--method", "sop_plus", "--loss", "cores"], "accepts only the loss ce, got 'cores'"),
        (["--method", "dividemix", "--loss", "nce_mae"], "accepts only the loss ce, got 'nce_mae'"),
        (["--method", "dividemix", "--devices", "2"], "trains in one process: devices and nodes must be 1"),
        (["--method", "dividemix", "--noise", "votes:counts={votes}"], "needs class labels, not soft ones"),
        (["--method", "sam:rho=0"], "rho must be positive, got 0.0"),
        (["--method", "sop:lr_u=-1"], "lr_u must be at least 0 and finite, got -1.0"),
        (["--method", "dividemix:warm_up=1.5"], "warm_up of the method 'dividemix' must be an integer"),
        (["--method", "divide_mix"], "Did you mean 'dividemix'?"),
        (["--method", "sam:roh=0.1"], "Did you mean 'rho'?"),
    ],
)
def test_refusals_are_a_sentence_and_exit_code_2(
    args: list[str], sentence: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    votes = tmp_path / "votes.npy"
    np.save(votes, np.ones((1400, 10)))
    args = [arg.format(votes=votes) for arg in args]
    monkeypatch.setattr("sys.argv", ["logitclip", "train", "--epochs", "1", "--runs", str(tmp_path / "runs"), *args])
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


# -- the comparisons of the paper are settings of `train` --------------------------------------------------------------


class Watched(Standard):
    """Records the logits of each loss and the norm of the gradient of each step."""

    def __init__(self, job: Any) -> None:
        super().__init__(job)
        self.linked: list[Tensor] = []
        self.norms: list[float] = []

    def objective(self, logits: Tensor, y: Tensor) -> Tensor:
        self.linked.append(self.criterion.link(logits).detach())  # type: ignore[operator]
        return super().objective(logits, y)

    def update(self, model: Any, optimizer: Any) -> None:
        super().update(model, optimizer)
        self.norms.append(torch.nn.utils.get_total_norm([w.grad for w in model.parameters()]).item())


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[Result, Watched]]:
    """Train on digits with `train`, and inspect the steps."""
    workers: list[Watched] = []

    def method(job: Any) -> Watched:
        workers.append(Watched(job))
        return workers[-1]

    def train_watched(**fields: Any) -> tuple[Result, Watched]:
        monkeypatch.setattr(METHODS, "build", lambda spec: method)
        result = training.train(replace(SHORT, noise=NOISES[0], runs=str(tmp_path), **fields))
        return result, workers[-1]

    return train_watched


def test_comparison_plain(watched: Any) -> None:
    """The baseline of the comparisons below: none of them is active."""
    _, worker = watched()
    linked = torch.cat(worker.linked)
    assert linked.abs().max() > 1
    assert linked.norm(dim=1).std() > 0.1
    assert max(worker.norms) > 0.2
    assert not any(isinstance(m, nn.ReLU6) for m in worker.network.modules())


def test_comparison_logit_norm(watched: Any) -> None:
    _, worker = watched(clip="logit_norm:temperature=0.5")
    norms = torch.cat(worker.linked).norm(dim=1)
    torch.testing.assert_close(norms, torch.full_like(norms, 2.0), rtol=1e-4, atol=0)


def test_comparison_clip_by_value(watched: Any) -> None:
    _, worker = watched(clip="value:limit=0.4")
    assert torch.cat(worker.linked).abs().max() <= 0.4


def test_comparison_relu6(watched: Any) -> None:
    _, worker = watched(model=MODEL + ",activation=relu6")
    kinds = [type(m) for m in worker.network.modules()]
    assert kinds.count(nn.ReLU6) == 2
    assert nn.ReLU not in kinds


def test_comparison_norm_penalty(watched: Any) -> None:
    plain, _ = watched()
    result, _ = watched(penalty="norm:weight=0.5")
    assert result.id != plain.id
    assert result.rows[-1]["norm_quantiles"][2] < 0.5 * plain.rows[-1]["norm_quantiles"][2]
    weak, _ = watched(penalty="norm:weight=0.01")
    assert weak.rows[-1]["norm_quantiles"][2] > result.rows[-1]["norm_quantiles"][2]


def test_comparison_gradient_clipping(watched: Any) -> None:
    _, worker = watched(grad_clip=0.05)
    assert max(worker.norms) <= 0.05 * (1 + 1e-6)


# -- state -------------------------------------------------------------------------------------------------------------


def test_a_method_that_saves_and_does_not_restore_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(METHODS, "_entries", dict(METHODS._entries))

    class Forgetful(Standard):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "seen": 1}

    class Inherits(Forgetful):
        pass

    class Restores(Forgetful):
        def load(self, weights: Any, state: Any) -> None:
            super().load(weights, state)

    for cls in (Forgetful, Inherits):
        with pytest.raises(ValueError, match="Forgetful has its own state_dict and no load beside it"):
            METHODS.register(cls)
    METHODS.register(Restores)
    assert "Restores" in METHODS
