"""Methods in two gloo processes: each step against a plain loop over two replicas, and resuming to the bit."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jobs import CLASSES, labels, make_job, network, numbers
from torch import Tensor, nn
from torch.multiprocessing import ProcessRaisedException

from logitclip.clip import clip_logits
from logitclip.launch import launch
from logitclip.methods import METHODS
from logitclip.methods.sop import sop_loss
from logitclip.runs.config import RunConfig
from logitclip.runs.train import train

N = 22
X, Y = 2 * numbers(N, 5, seed=50), labels(N, seed=51)
OWN = [torch.arange(rank, N, 2) for rank in (0, 1)]  # the examples of each process
CLIP = "norm:tau=2,delta=1.5"
JOBS = {
    "sam": ("sam:rho=0.3", "ce"),
    "sop": ("sop:lr_u=0.5,lr_v=0.7", "ce"),
    "sop_plus": ("sop_plus:lr_u=0.5,lr_v=0.7,strong=false", "ce"),
    "elr": ("elr:beta=0.6,weight=2", "ce"),
    "gjs": ("gjs:weight=0.4", "ce"),
    "cores": ("standard", "cores:warmup=0,ramp=1,sieve_after=0"),
}
EPOCHS = (0, 1, 2)


def second_view(x: Tensor, call: int) -> Tensor:
    return x if call % 2 == 0 else x + 0.3 * x.sin()


def in_each_process(fabric: Any, path: Path) -> None:
    """Take one step in each of three epochs with each method; rank 0 writes the state of both ranks."""
    results = {}
    own, start = OWN[fabric.global_rank], network(5, 6, CLASSES, norm=True)
    for name, (method, loss) in JOBS.items():
        worker = METHODS.build(method)(make_job(X, Y, start, loss=loss, clip=CLIP, fabric=fabric))
        if name.startswith("sop"):  # large enough to matter
            worker.u, worker.v = 0.8 * numbers(N, 1, seed=52), 0.8 * numbers(N, CLASSES, seed=53)
        calls, counts = iter(range(100)), []
        for epoch in EPOCHS:
            worker.start_epoch(epoch, 0.1)
            if name == "cores":
                counts.append(worker.criterion.criterion.class_counts.tolist())
            order = [(own, X[own], Y[own])]
            list(worker.train_epoch(epoch, order, lambda x, calls=calls: second_view(x, next(calls))))
        state, weights = worker.state_dict(), worker.weights()
        flat = torch.cat([w.double().flatten() for w in weights.values()])
        results[name] = {
            "weights": {key: value.tolist() for key, value in weights.items()},
            "apart": [float((other - flat).abs().max()) for other in fabric.all_gather(flat)],
            "counts": counts,
            "removed": [v.tolist() for k, v in state["criterion"].items() if k.endswith("removed")],
            "tables": {key: state[key].tolist() for key in ("u", "v", "targets") if key in state},
        }
    if fabric.is_global_zero:
        path.write_text(json.dumps(results), encoding="utf-8")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("pair") / "results.json"
    launch(in_each_process, path, accelerator="cpu", devices=2, precision="64")
    return json.loads(path.read_text(encoding="utf-8"))


# -- the same with two replicas in a plain loop ------------------------------------------------------------------------


def link(z: Tensor) -> Tensor:
    return clip_logits(z, 2.0, 1.5)


def ce(z: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(link(z), y)


class Replicas:
    """Train two replicas of a network with the mean of their gradients."""

    def __init__(self) -> None:
        self.nets = [network(5, 6, CLASSES, norm=True).train() for _ in OWN]

    def step(self, gradients: list[tuple[Tensor, ...]]) -> None:
        with torch.no_grad():
            for net in self.nets:
                for w, *of_each in zip(net.parameters(), *gradients, strict=True):
                    w -= 0.1 * sum(of_each) / 2

    def share_statistics(self) -> None:
        for own, other in zip(self.nets[0].buffers(), self.nets[1].buffers(), strict=True):
            if own.is_floating_point():
                own.copy_((own + other) / 2)
                other.copy_(own)

    def compare(self, result: dict[str, Any], tolerance: float = 1e-9) -> None:
        for key, value in self.nets[0].state_dict().items():
            np.testing.assert_allclose(result["weights"][key], value.numpy(), atol=tolerance, err_msg=key)
        assert result["apart"] == [0, 0], "both processes have the same network"


def gradient(loss: Tensor, net: nn.Module) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)


def test_sam_perturbs_each_replica_by_its_own_gradient(results: dict[str, Any]) -> None:
    replicas = Replicas()
    for epoch in EPOCHS:
        gradients = []
        for net, own in zip(replicas.nets, OWN, strict=True):
            x = second_view(X[own], epoch)
            first = gradient(ce(net(x), Y[own]), net)
            norm = torch.cat([g.flatten() for g in first]).norm()
            moved = copy.deepcopy(net)
            with torch.no_grad():
                for w, g in zip(moved.parameters(), first, strict=True):
                    w += 0.3 * g / norm
            gradients.append(gradient(ce(moved(x), Y[own]), moved))
        replicas.step(gradients)
        replicas.share_statistics()
    replicas.compare(results["sam"])


@pytest.mark.parametrize("name", ["sop", "sop_plus"])
def test_sop_keeps_the_rows_of_each_process_and_gathers_them(results: dict[str, Any], name: str) -> None:
    replicas = Replicas()
    u, v = 0.8 * numbers(N, 1, seed=52), 0.8 * numbers(N, CLASSES, seed=53)
    for epoch in EPOCHS:
        gradients, new_u, new_v = [], u.clone(), v.clone()
        for net, own in zip(replicas.nets, OWN, strict=True):
            mine = [u[own].requires_grad_(), v[own].requires_grad_()]
            y = nn.functional.one_hot(Y[own], CLASSES).double()
            if name == "sop":
                z = net(second_view(X[own], epoch))
                loss = sop_loss(z, link(z).softmax(1), y, *mine)[0]  # its formula is tested elsewhere
            else:
                z, other = net(torch.cat([X[own], second_view(X[own], 1)])).chunk(2)
                p, q = link(z).softmax(1), link(other).softmax(1)
                loss, phat = sop_loss(z, p, y, *mine)
                p = p.detach()
                loss = loss + 0.1 * -phat.mean(0).log().mean() + 0.9 * (p * (p / q).log()).sum(1).mean()
            gradients.append(gradient(loss, net))
            for table, rate, g in zip((new_u, new_v), (0.5, 0.7), torch.autograd.grad(loss, mine), strict=True):
                table[own] -= rate * g
        u, v = new_u, new_v
        replicas.step(gradients)
        replicas.share_statistics()
    replicas.compare(results[name])
    np.testing.assert_allclose(results[name]["tables"]["u"], u, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(results[name]["tables"]["v"], v, rtol=1e-8, atol=1e-10)


def test_elr_keeps_the_rows_of_each_process_and_gathers_them(results: dict[str, Any]) -> None:
    replicas, targets = Replicas(), torch.zeros(N, CLASSES, dtype=torch.float64)
    for epoch in EPOCHS:
        gradients = []
        for net, own in zip(replicas.nets, OWN, strict=True):
            z = link(net(second_view(X[own], epoch)))
            p = z.softmax(1).clamp(1e-4, 1 - 1e-4)
            targets[own] = 0.6 * targets[own] + 0.4 * (p / p.sum(1, keepdim=True)).detach()
            term = (1 - (targets[own] * p).sum(1)).log().mean()
            gradients.append(gradient(nn.functional.cross_entropy(z, Y[own]) + 2 * term, net))
        replicas.step(gradients)
        replicas.share_statistics()
    replicas.compare(results["elr"], 1e-6)  # the targets are kept in single precision
    np.testing.assert_allclose(results["elr"]["tables"]["targets"], targets, atol=1e-6)


def test_gjs_averages_the_gradients_of_both_views(results: dict[str, Any]) -> None:
    replicas = Replicas()
    for _ in EPOCHS:
        gradients, first = [], [net(X[own]) for net, own in zip(replicas.nets, OWN, strict=True)]
        for own, other in zip(replicas.nets[0].buffers(), replicas.nets[1].buffers(), strict=True):
            other.data.copy_(own.data)  # as DDP does before each pass
        for net, own, z in zip(replicas.nets, OWN, first, strict=True):
            y = nn.functional.one_hot(Y[own], CLASSES).double()
            p, q = link(z).softmax(1), link(net(second_view(X[own], 1))).softmax(1)
            m = 0.4 * y + 0.3 * p + 0.3 * q
            parts = [-m[range(len(own)), Y[own]].log(), (p * (p / m).log()).sum(1), (q * (q / m).log()).sum(1)]
            loss = (0.4 * parts[0] + 0.3 * parts[1] + 0.3 * parts[2]).mean() / -(0.6 * np.log(0.6))
            gradients.append(gradient(loss, net))
        replicas.step(gradients)
        replicas.share_statistics()
    replicas.compare(results["gjs"])


def test_cores_sums_what_is_left_out_over_the_processes(results: dict[str, Any]) -> None:
    replicas, every = Replicas(), torch.bincount(Y, minlength=CLASSES).double()
    removed = torch.zeros(CLASSES)
    for epoch in EPOCHS:
        prior = (every - removed) / (every - removed).sum()
        assert results["cores"]["counts"][epoch] == (every - removed).tolist()
        gradients, removed = [], torch.zeros(CLASSES)
        for net, own in zip(replicas.nets, OWN, strict=True):
            p = link(net(second_view(X[own], epoch))).softmax(1)
            cross_entropy, others = -p[range(len(own)), Y[own]].log(), -(p + 1e-8).log()
            kept = (cross_entropy <= others.mean(1)) | (epoch == 0)
            beta = 0.0 if epoch == 0 else 2.0
            loss = (kept * (cross_entropy - beta * (prior * others).sum(1))).sum() / kept.sum()
            removed += torch.bincount(Y[own][~kept], minlength=CLASSES)
            gradients.append(gradient(loss, net))
        assert (removed.sum() > 0) == (epoch > 0)
        replicas.step(gradients)
        replicas.share_statistics()
    assert results["cores"]["removed"] == [removed.tolist()]
    replicas.compare(results["cores"], 1e-6)  # the prior is kept in single precision


# -- through the run layer ---------------------------------------------------------------------------------------------


class Stopping:
    """Raises at the end of an epoch; a class, so that it can be pickled."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def __call__(self, config: RunConfig, row: dict[str, Any] | None) -> None:
        if row is not None and row["epoch"] == self.epoch:
            raise RuntimeError("stopped on purpose")


@pytest.mark.slow
@pytest.mark.parametrize("clip", ["none", "norm:temp=0.8"])
@pytest.mark.parametrize("name", JOBS)
def test_two_processes_train_on_digits_and_resume_to_the_bit(name: str, clip: str, tmp_path: Path) -> None:
    method, loss = JOBS[name]
    config = RunConfig(
        noise="symmetric:rate=0.5",
        method=method,
        loss=loss.replace("sieve_after=0", "sieve_after=1"),
        clip=clip,
        devices=2,
        limit=401,  # one process has one example more
        epochs=4,
        batch_size=32,
        lr=0.05,
        model="mlp:width=64,depth=1,norm=batch",
        checkpoint_seconds=0,
        runs=str(tmp_path / "whole"),
    )
    whole = train(config)
    assert whole.best_accuracy > 30
    broken = replace(config, runs=str(tmp_path / "broken"))
    with pytest.raises(ProcessRaisedException, match="stopped on purpose"):
        train(broken, on_epoch=Stopping(1))
    resumed = train(broken)
    assert (whole.folder / "metrics.jsonl").read_bytes() == (resumed.folder / "metrics.jsonl").read_bytes()
    weights = resumed.weights()
    assert all(torch.equal(value, weights[key]) for key, value in whole.weights().items())
