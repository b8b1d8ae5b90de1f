"""The training loop against plain loops, two processes against one, and how processes end."""

from __future__ import annotations

import copy
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from logitclip import engine, models
from logitclip.clip import CLIPS, QUANTILES, extended_logit_norm, norm_penalty
from logitclip.criterion import LogitClip, Loss, build_criterion
from logitclip.data import Dataset, Split, batch_indices, transform
from logitclip.engine import Diverged, Progress, Settings, fit, learning_rate
from logitclip.launch import launch, make_fabric
from logitclip.methods.base import Job
from logitclip.methods.standard import Standard
from logitclip.rng import stream

CLASSES = 4
SETTINGS = Settings(epochs=3, batch_size=32, lr=0.05, momentum=0.9, seed=1)


def make_data(n: int = 150, test: int = 70, *, seed: int = 0, wrong: float = 0.4, features: int = 6) -> Dataset:
    """Make four clouds of points with a share of wrong training labels."""
    g = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(CLASSES, features, generator=g)
    splits = []
    for count in (n, test):
        y = torch.randint(CLASSES, (count,), generator=g)
        splits.append(Split(centres[y] + torch.randn(count, features, generator=g), y))
    flipped = torch.rand(n, generator=g) < wrong
    train = splits[0].relabel(torch.where(flipped, (splits[0].labels + 1) % CLASSES, splits[0].labels))
    return Dataset("points", train, splits[1], CLASSES, tuple("abcd"))


def make_model(seed: int, *, spec: str = "mlp:width=16,depth=2", shape: tuple[int, ...] = (6,)) -> nn.Module:
    return models.build(spec, CLASSES, shape, seed=seed)


def rows_of(*args: Any, **more: Any) -> tuple[list[dict[str, Any]], Any]:
    rows: list[dict[str, Any]] = []
    worker = fit(*args, **more, after_epoch=lambda progress: rows.append(progress.row))
    return rows, worker


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


# -- one step, many settings: against a loop written out ---------------------------------------------------------------


def plain_loop(dataset: Dataset, settings: Settings, criterion: Any, index: Tensor | None = None) -> nn.Module:
    """Reimplement `fit` independently; only the order of the examples is shared."""
    torch.set_num_threads(1)
    network = make_model(settings.seed)
    optimizer = torch.optim.SGD(
        network.parameters(),
        lr=settings.lr,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        weight_decay=settings.weight_decay,
    )
    index = torch.arange(len(dataset.train)) if index is None else index
    for epoch in range(settings.epochs):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, epoch)
        g = stream("cpu", settings.seed, "order", epoch, 0)
        for batch in batch_indices(index, settings.batch_size, generator=g, drop_last=settings.drop_last):
            logits = network(dataset.train.x[batch])
            loss = criterion(logits, dataset.train.labels[batch])
            if settings.penalty is not None:
                loss = loss + settings.penalty(logits)
            optimizer.zero_grad()
            loss.backward()
            if settings.grad_clip:
                nn.utils.clip_grad_norm_(network.parameters(), settings.grad_clip)
            optimizer.step()
    return network


def tenth_of_the_norm(logits: Tensor) -> Tensor:
    return 0.1 * norm_penalty(logits)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"nesterov": True},
        {"momentum": 0.0},
        {"weight_decay": 0.05},
        {"schedule": "cosine"},
        {"schedule": "constant"},
        {"milestones": (0.34,)},
        {"grad_clip": 0.1},
        {"penalty": tenth_of_the_norm},
        {"drop_last": True},
        {"channels_last": False},
        {"batch_size": 64, "seed": 7},
    ],
    ids=lambda change: ",".join(change) or "defaults",
)
def test_training_is_the_plain_loop(change):
    dataset, settings = make_data(), replace(SETTINGS, **change)
    worker = fit(dataset, make_model, Loss("ce"), settings=settings)
    network = plain_loop(dataset, settings, nn.CrossEntropyLoss())
    for name, weight in network.state_dict().items():
        assert torch.allclose(worker.weights()[name], weight, rtol=0, atol=1e-6), name
    other = plain_loop(dataset, replace(settings, lr=0.9 * settings.lr), nn.CrossEntropyLoss())
    assert not torch.allclose(worker.weights()["head.weight"], other.state_dict()["head.weight"], atol=1e-4)


@pytest.mark.parametrize(
    "spec",
    [
        "none",
        "norm:tau=1",
        "norm:tau=1,delta=0.5,p=1",
        "norm:temp=1.5",
        "value:limit=1",
        "logit_norm:temperature=0.5",
    ],
)
def test_every_clip_trains_as_it_does_in_a_plain_loop(spec):
    dataset, link = make_data(), CLIPS.build(spec)
    worker = fit(dataset, make_model, build_criterion("ce", spec), settings=SETTINGS)
    network = plain_loop(dataset, SETTINGS, lambda z, y: nn.functional.cross_entropy(link(z), y))
    for name, weight in network.state_dict().items():
        assert torch.allclose(worker.weights()[name], weight, rtol=0, atol=1e-6), name


def test_extended_logit_norm_gets_the_last_layer(monkeypatch):
    dataset, models_made = make_data(), []
    worker = fit(dataset, make_model, build_criterion("ce", "extended_logit_norm"), settings=SETTINGS)
    monkeypatch.setattr(
        f"{__name__}.make_model", lambda seed, make=make_model: models_made.append(make(seed)) or models_made[-1]
    )

    def criterion(z, y):
        (*_, head) = (module for module in models_made[-1].modules() if isinstance(module, nn.Linear))
        return nn.functional.cross_entropy(extended_logit_norm(z, head.weight), y)

    network = plain_loop(dataset, SETTINGS, criterion)
    for name, weight in network.state_dict().items():
        assert torch.allclose(worker.weights()[name], weight, rtol=0, atol=1e-6), name


def test_it_trains_on_every_device(device):
    fabric = make_fabric(accelerator="gpu" if device == "cuda" else device)
    rows, worker = rows_of(make_data(), make_model, LogitClip("ce", tau=1.0), Standard, SETTINGS, fabric=fabric)
    assert next(worker.network.parameters()).device.type == device
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_only_the_chosen_examples_are_trained_on():
    dataset, index = make_data(), torch.arange(0, 150, 2)
    seen = []

    class Looking(Standard):
        def train_step(self, index, x, y, augment):
            seen.append(index)
            assert torch.equal(x, dataset.train.x[index])
            assert torch.equal(y, dataset.train.labels[index])
            return super().train_step(index, x, y, augment)

    worker = fit(dataset, make_model, Loss("ce"), Looking, SETTINGS, index=index)
    assert all(torch.equal(torch.cat(seen[3 * e : 3 * e + 3]).sort().values, index) for e in range(3))
    assert not torch.equal(torch.cat(seen[:3]), torch.cat(seen[3:6]))  # another order in every epoch
    network = plain_loop(dataset, SETTINGS, nn.CrossEntropyLoss(), index)
    assert torch.allclose(worker.weights()["head.weight"], network.state_dict()["head.weight"], atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (Settings(epochs=200), {0: 0.1, 79: 0.1, 80: 0.01, 139: 0.01, 140: 0.001, 199: 0.001}),
        (Settings(epochs=120, milestones=(1 / 3, 2 / 3)), {39: 0.1, 40: 0.01, 79: 0.01, 80: 0.001}),
        (Settings(epochs=100, schedule="cosine"), {0: 0.1, 50: 0.05, 99: 0.1 * (1 + math.cos(0.99 * math.pi)) / 2}),
        (Settings(epochs=9, schedule="constant"), {0: 0.1, 8: 0.1}),
        (Settings(epochs=1, milestones=(1 / 3, 2 / 3)), {0: 0.1}),
        (Settings(epochs=2), {0: 0.1, 1: 0.001}),
        (Settings(epochs=10, milestones=(0.26, 0.54)), {2: 0.1, 3: 0.01, 4: 0.01, 5: 0.001}),  # rounded, not truncated
    ],
)
def test_learning_rates(settings, expected):
    assert {epoch: learning_rate(settings, epoch) for epoch in expected} == pytest.approx(expected)


# -- what is reported --------------------------------------------------------------------------------------------------


def predictions(worker: Any, x: Any) -> Tensor:
    with torch.no_grad():
        return worker.network.eval()(x).argmax(1)


def test_the_last_row_says_what_the_network_does():
    dataset = make_data()
    rows, worker = rows_of(dataset, make_model, Loss("ce"), settings=replace(SETTINGS, epochs=20))
    train, test, last = dataset.train, dataset.test, rows[-1]
    assert train.clean_labels is not None
    wrong = train.labels != train.clean_labels
    seen = predictions(worker, train.x)
    assert 30 < wrong.sum() < 90
    assert last["memorised"] == pytest.approx(100 * float((seen == train.labels)[wrong].double().mean()))
    assert last["recovered"] == pytest.approx(100 * float((seen == train.clean_labels)[wrong].double().mean()))
    assert last["test_accuracy"] == pytest.approx(
        100 * float((predictions(worker, test.x) == test.labels).double().mean())
    )
    assert last["val_accuracy"] is None
    assert [row["epoch"] for row in rows] == list(range(20))
    assert [row["lr"] for row in rows] == [learning_rate(replace(SETTINGS, epochs=20), e) for e in range(20)]
    assert list(last) == [
        *("epoch", "lr", "loss", "train_accuracy", "clipped", "norm_quantiles"),
        *("test_accuracy", "val_accuracy", "memorised", "recovered"),
    ]


def test_loss_accuracy_norms_and_clipped_share_are_those_of_the_steps():
    dataset, steps = make_data(), []

    class Recording(Standard):
        def train_step(self, index, x, y, augment):
            step = super().train_step(index, x, y, augment)
            steps.append((y, step))
            return step

    criterion = LogitClip("ce", tau=0.8, p=1.0)
    rows, _ = rows_of(dataset, make_model, criterion, Recording, replace(SETTINGS, epochs=1))
    y, logits = torch.cat([y for y, _ in steps]), torch.cat([step.logits for _, step in steps])
    norms = logits.abs().sum(1)
    losses = [(float(step.loss), len(y)) for y, step in steps]
    assert rows[0]["loss"] == pytest.approx(sum(loss * n for loss, n in losses) / 150)
    assert rows[0]["train_accuracy"] == pytest.approx(100 * float((logits.argmax(1) == y).double().mean()))
    assert rows[0]["clipped"] == pytest.approx(100 * float((norms >= 0.8).double().mean()))
    assert 0 < rows[0]["clipped"] < 100
    expected = torch.quantile(norms, torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95])).tolist()
    assert rows[0]["norm_quantiles"] == pytest.approx(expected, abs=1e-5)


def test_validation_is_on_the_held_out_labels_as_they_are():
    dataset = make_data()
    held = torch.arange(100, 150)
    rows, worker = rows_of(dataset, make_model, Loss("ce"), settings=SETTINGS, index=torch.arange(100), held_out=held)
    right = predictions(worker, dataset.train.x[held]) == dataset.train.labels[held]
    assert rows[-1]["val_accuracy"] == pytest.approx(100 * float(right.double().mean()))


@pytest.mark.parametrize("augmented", [False, True])
def test_validation_sees_augmented_inputs_only_if_asked(augmented):
    dataset, calls = make_data(), []

    def view(x: Tensor, generator: torch.Generator | None) -> Tensor:
        calls.append((len(x), generator is not None))
        return x

    held = torch.arange(100, 117)
    more = {"index": torch.arange(100), "held_out": held, "augment_held_out": augmented}
    fit(dataset, make_model, Loss("ce"), settings=replace(SETTINGS, epochs=1), view=view, **more)
    assert [random for size, random in calls if size == 17] == [augmented]  # the validation
    assert [random for size, random in calls if size == 70] == [False]  # the test
    assert [random for size, random in calls if size == 32] == [True] * 3  # training


def test_without_test_examples_there_is_no_test_accuracy():
    data = make_data()
    no_test = replace(data, test=data.test.select(torch.arange(0)))
    (with_test, worker), (without, same_worker) = (
        rows_of(some, make_model, LogitClip("ce", tau=1.0), settings=Settings(epochs=2)) for some in (data, no_test)
    )
    assert [row["test_accuracy"] for row in without] == [None, None]
    assert [row["loss"] for row in without] == [row["loss"] for row in with_test]
    assert same(worker.weights(), same_worker.weights())


def test_measure_every_and_the_last_epoch():
    rows, _ = rows_of(make_data(), make_model, Loss("ce"), settings=replace(SETTINGS, epochs=5, measure_every=2))
    assert [row["memorised"] is not None for row in rows] == [False, True, False, True, True]
    assert [row["recovered"] is not None for row in rows] == [False, True, False, True, True]


def test_few_examples_are_measured_in_every_epoch():
    rows, _ = rows_of(make_data(300), make_model, Loss("ce"), settings=replace(SETTINGS, epochs=2))
    assert all(row["memorised"] is not None for row in rows)


def test_a_norm_of_exactly_tau_counts_as_clipped():
    layer = nn.Linear(6, CLASSES)
    nn.init.zeros_(layer.weight)
    layer.bias.data = torch.tensor([3.0, 4.0, 0.0, 0.0])
    settings = replace(SETTINGS, epochs=1, batch_size=150)
    assert rows_of(make_data(), layer, LogitClip("ce", tau=5.0), settings=settings)[0][0]["clipped"] == 100


def test_nothing_is_memorised_where_the_truth_is_not_known():
    dataset = make_data()
    unknown = replace(dataset, train=replace(dataset.train, clean_labels=None))
    clean = make_data(wrong=0)
    for data in (unknown, clean):
        rows, _ = rows_of(data, make_model, Loss("ce"), settings=replace(SETTINGS, epochs=1))
        assert rows[0]["memorised"] is None
        assert rows[0]["recovered"] is None


def test_per_example_records():
    dataset, seen = make_data(), []
    history = []

    def after_epoch(progress: Progress) -> None:
        seen.append({name: value.clone() for name, value in progress.examples.items()})
        history.append(predictions(progress.method, dataset.train.x) == dataset.train.labels)

    worker = fit(
        dataset, make_model, Loss("ce"), settings=replace(SETTINGS, epochs=6, per_example=True), after_epoch=after_epoch
    )
    with torch.no_grad():
        log_p = worker.network.eval()(dataset.train.x).log_softmax(1)
    y, last = dataset.train.labels, seen[-1]
    own = log_p[torch.arange(150), y]
    others = torch.stack([row[torch.arange(CLASSES) != int(k)].max() for row, k in zip(log_p, y, strict=True)])
    assert torch.allclose(last["loss"], -own, atol=1e-6)
    assert torch.allclose(last["margin"], own - others, atol=1e-6)
    assert torch.equal(last["prediction"], log_p.argmax(1))
    assert torch.equal(last["other"][last["prediction"] != y], last["prediction"][last["prediction"] != y])
    assert (last["other"] != y).all()
    margins = torch.stack([examples["margin"] for examples in seen])
    assert torch.allclose(last["mean_margin"], margins.mean(0), atol=1e-5)
    learnt = torch.stack(history)
    first = torch.where(learnt.any(0), learnt.int().argmax(0), -1)
    assert torch.equal(last["first_learnt"], first)
    assert (first == -1).any()
    assert (first > 0).any()


def test_live_arrays_and_a_network_of_ones_own():
    rng = __import__("numpy").random.default_rng(0)
    x = rng.normal(size=(80, 3)).astype("float32")
    y = (x[:, 0] > 0).astype("int64")
    split = Split(torch.from_numpy(x), torch.from_numpy(y))
    network = nn.Linear(3, 2)
    rows, worker = rows_of(
        Dataset("mine", split, split, 2, ("no", "yes")),
        network,
        nn.CrossEntropyLoss(),
        settings=replace(SETTINGS, epochs=30),
    )
    assert worker.network is network
    assert rows[-1]["test_accuracy"] > 95


def test_soft_labels_train_as_the_plain_loop_does():
    dataset = make_data()
    soft = 0.8 * nn.functional.one_hot(dataset.train.labels, CLASSES).float() + 0.05
    data = replace(dataset, train=replace(dataset.train, labels=soft))
    rows, worker = rows_of(data, make_model, Loss("ce"), settings=replace(SETTINGS, per_example=True))
    network = plain_loop(data, SETTINGS, nn.CrossEntropyLoss())
    assert torch.allclose(worker.weights()["head.weight"], network.state_dict()["head.weight"], atol=1e-6)
    hard, _ = rows_of(dataset, make_model, Loss("ce"), settings=SETTINGS)
    assert rows[0]["memorised"] is not None
    assert rows[0]["loss"] != hard[0]["loss"]


def test_soft_labels_reach_losses_with_class_counts():
    dataset = make_data()
    soft = nn.functional.one_hot(dataset.train.labels, CLASSES).float()
    hard, _ = rows_of(dataset, make_model, Loss("cores"), settings=SETTINGS)
    data = replace(dataset, train=replace(dataset.train, labels=soft))
    rows, _ = rows_of(data, make_model, Loss("cores"), settings=SETTINGS)
    assert rows[-1]["loss"] == pytest.approx(hard[-1]["loss"], rel=1e-4)


# -- the same numbers again --------------------------------------------------------------------------------------------


def test_the_same_twice_and_the_global_generator_is_left_alone():
    spec = "mlp:width=16,depth=2,dropout=0.3,norm=batch"
    torch.manual_seed(5)
    before = torch.get_rng_state()
    runs = []
    for _ in range(2):
        rows, worker = rows_of(make_data(), lambda s: make_model(s, spec=spec), Loss("ce"), settings=SETTINGS)
        runs.append((rows, worker.weights()))
        assert torch.equal(torch.get_rng_state(), before)
        torch.rand(3)  # other random draws in between have no effect
        before = torch.get_rng_state()
    assert runs[0][0] == runs[1][0]
    assert same(runs[0][1], runs[1][1])
    other, _ = rows_of(make_data(), lambda s: make_model(s, spec=spec), Loss("ce"), settings=replace(SETTINGS, seed=2))
    assert other != runs[0][0]


def random_draws(**change: Any) -> dict[str, list[list[float]]]:
    """The random numbers that the views and the network drew, by epoch and batch, over three epochs."""
    draws: dict[str, list[list[float]]] = {"views": [], "dropout": []}

    class Network(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            if self.training:
                draws["dropout"].append(nn.functional.dropout(torch.ones(40)).tolist())
            return super().forward(input)

    def view(x: Tensor, generator: torch.Generator | None) -> Tensor:
        if generator is not None:
            draws["views"].append(torch.rand(3, generator=generator).tolist())
        return x

    fit(make_data(), Network(6, CLASSES), Loss("ce"), settings=replace(SETTINGS, **change), view=view)
    return draws


@pytest.mark.parametrize("what", ["views", "dropout"])
def test_augmentation_and_dropout_are_new_in_every_epoch_and_repeatable(what):
    draws = random_draws()[what]
    assert len(draws) == 3 * 5  # epochs and batches
    assert len({tuple(draw) for draw in draws}) == len(draws)
    assert random_draws()[what] == draws
    assert random_draws(epochs=2)[what] == draws[:10]
    assert not {tuple(draw) for draw in random_draws(seed=2)[what]} & {tuple(draw) for draw in draws}


def test_threads_are_set_and_put_back():
    during = []
    before = torch.get_num_threads()
    fit(
        make_data(),
        make_model,
        Loss("ce"),
        settings=replace(SETTINGS, threads=2),
        after_epoch=lambda _: during.append(torch.get_num_threads()),
    )
    assert during == [2, 2, 2]
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_resuming_gives_the_same_bits(stop):
    spec = "mlp:width=16,depth=2,dropout=0.3,norm=batch"
    dataset, settings = make_data(), replace(SETTINGS, epochs=4, per_example=True, schedule="cosine", weight_decay=0.01)

    def train(**more: Any) -> tuple[list[Progress], Any]:
        seen: list[Progress] = []

        def after_epoch(progress: Progress) -> None:
            seen.append(progress)
            if progress.row["epoch"] + 1 == stop:
                saved.append(copy.deepcopy((progress.weights(), progress.state(), stop)))

        worker = fit(
            dataset,
            lambda s: make_model(s, spec=spec),
            build_criterion("cores", "norm:tau=1"),
            settings=settings,
            index=torch.arange(120),
            held_out=torch.arange(120, 150),
            after_epoch=after_epoch,
            **more,
        )
        return seen, worker

    saved: list[Any] = []
    whole, whole_worker = train()
    rest, worker = train(resume=saved[0])
    assert [p.row for p in rest] == [p.row for p in whole[stop:]]
    assert same(worker.weights(), whole_worker.weights())
    assert same(rest[-1].examples, whole[-1].examples)


def test_the_scale_of_gradients_in_half_precision_is_resumed(monkeypatch):
    """It needs a GPU, so here a precision with a state stands for it."""
    scales: list[float] = []

    def train(epochs: int, scale: float, resume: Any = None) -> Progress:
        fabric, seen = make_fabric(accelerator="cpu"), []
        precision = fabric.strategy.precision
        monkeypatch.setattr(precision, "state_dict", lambda: {"scale": scale})
        monkeypatch.setattr(precision, "load_state_dict", lambda state: scales.append(state["scale"]))
        settings = replace(SETTINGS, epochs=epochs)
        fit(
            make_data(),
            make_model,
            Loss("ce"),
            settings=settings,
            fabric=fabric,
            resume=resume,
            after_epoch=seen.append,
        )
        return seen[0]

    first = train(1, scale=1024.0)
    train(2, scale=65536.0, resume=(first.weights(), first.state(), 1))
    assert scales == [1024.0]


def test_a_method_that_would_lose_its_state_is_refused_when_it_is_saved():
    class Forgetful(Standard):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "more": torch.ones(3)}

    with pytest.raises(ValueError, match="Forgetful has its own state_dict and no load beside it"):
        fit(make_data(), make_model, Loss("ce"), Forgetful, SETTINGS, after_epoch=lambda progress: progress.state())
    fit(make_data(), make_model, Loss("ce"), Forgetful, SETTINGS)  # nothing is saved, so nothing is lost


def test_a_method_whose_load_leaves_out_a_part_of_its_state_is_not_resumed():
    class Forgetful(Standard):
        def __init__(self, job: Job) -> None:
            super().__init__(job)
            self.seen = torch.full((2,), torch.nan)

        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "seen": self.seen, "epochs": [0], "counts": np.arange(2)}

        def load(self, weights: dict[str, Tensor], state: dict[str, Any]) -> None:
            super().load(weights, state)

    saved: list[Any] = []
    data, model = make_data(), make_model(0)
    fit(data, model, Loss("ce"), Forgetful, SETTINGS, after_epoch=lambda p: saved.append((p.weights(), p.state(), 1)))
    fit(data, model, Loss("ce"), Forgetful, SETTINGS, resume=saved[0])  # it is as it was made: nothing is lost
    saved[0][1]["method"]["seen"] = torch.zeros(2)
    with pytest.raises(ValueError, match="The load of Forgetful does not restore 'seen', which its state_dict"):
        fit(data, model, Loss("ce"), Forgetful, SETTINGS, resume=saved[0])


def test_a_criterion_with_a_memory_is_resumed():
    class Remembering(nn.Module):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(CLASSES))

        def forward(self, logits: Tensor, target: Tensor) -> Tensor:
            self.mean.mul_(0.9).add_(0.1 * logits.detach().mean(0))
            return nn.functional.cross_entropy(logits - self.mean, target)

    def train(resume: Any = None) -> list[dict[str, Any]]:
        rows = []

        def after_epoch(progress: Progress) -> None:
            rows.append(progress.row)
            if progress.row["epoch"] == 0:
                saved.append(copy.deepcopy((progress.weights(), progress.state(), 1)))

        fit(make_data(), make_model, Remembering(), settings=SETTINGS, resume=resume, after_epoch=after_epoch)
        return rows

    saved: list[Any] = []
    whole = train()
    assert train(saved[0]) == whole[1:]


def test_a_network_with_masked_classes_is_not_diverged():
    class Masked(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return torch.cat([super().forward(input), torch.full((len(input), 1), -torch.inf)], 1)

    dataset = replace(make_data(), num_classes=CLASSES + 1, class_names=tuple("abcde"))
    torch.manual_seed(0)
    with_mask, _ = rows_of(dataset, Masked(6, CLASSES), LogitClip("ce", tau=1.0), settings=SETTINGS)
    torch.manual_seed(0)
    without, _ = rows_of(make_data(), nn.Linear(6, CLASSES), LogitClip("ce", tau=1.0), settings=SETTINGS)
    assert len(with_mask) == 3
    for row, other in zip(with_mask, without, strict=True):
        assert row["norm_quantiles"] == pytest.approx(other["norm_quantiles"], abs=1e-4)
        assert (row["test_accuracy"], row["clipped"]) == (other["test_accuracy"], other["clipped"])


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_at_the_end_are_noticed(broken):
    class Breaking(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) if self.training else super().forward(input) + broken

    with pytest.raises(Diverged):
        fit(make_data(), Breaking(6, CLASSES), Loss("ce"), settings=SETTINGS)


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_divergence_is_named_with_its_epoch():
    reported = []
    with pytest.raises(
        Diverged, match=r"^Training diverged in epoch \d+: .* Lower lr \(it is 1e\+06 there\), or .* grad_clip\.$"
    ):
        fit(
            make_data(),
            make_model,
            Loss("ce"),
            settings=replace(SETTINGS, lr=1e6, epochs=50, schedule="constant"),
            after_epoch=lambda p: reported.append(p.row),
        )
    assert all(math.isfinite(row["loss"]) for row in reported)


def test_divergence_in_the_very_last_step_is_noticed():
    class Poisoned(Standard):
        def train_epoch(self, epoch, batches, augment):
            yield from super().train_epoch(epoch, batches, augment)
            if epoch == 2:
                next(self.network.parameters()).data.fill_(math.nan)

    reported = []
    with pytest.raises(Diverged, match="in epoch 3"):
        fit(make_data(), make_model, Loss("ce"), Poisoned, SETTINGS, after_epoch=lambda p: reported.append(p.row))
    assert len(reported) == 2


def test_a_diverging_rate_is_saved_by_clipping_the_gradient():
    settings = replace(SETTINGS, lr=1e6, epochs=5, schedule="constant", grad_clip=1e-6, momentum=0.0)
    rows, _ = rows_of(make_data(), make_model, Loss("ce"), settings=settings)
    assert math.isfinite(rows[-1]["loss"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 0}, "epochs must be at least 1, got 0."),
        ({"lr": 0.0}, "lr must be positive and finite in float32, got 0.0."),
        ({"lr": math.nan}, "lr must be positive and finite in float32, got nan."),
        ({"lr": math.inf}, "lr must be positive and finite in float32, got inf."),
        ({"momentum": -0.1}, "momentum must be at least 0 and finite in float32, got -0.1."),
        ({"grad_clip": math.inf}, "grad_clip must be at least 0 and finite in float32, got inf."),
        ({"schedule": "linear"}, "schedule must be multistep, cosine or constant, got 'linear'."),
        ({"nesterov": True, "momentum": 0.0}, "nesterov needs a momentum above 0."),
    ],
)
def test_settings_out_of_range(change, message):
    with pytest.raises(ValueError) as caught:
        replace(SETTINGS, **change)
    assert str(caught.value) == message


def test_no_full_batch_is_a_sentence():
    with pytest.raises(ValueError, match="make no batch of 512: lower batch_size"):
        fit(make_data(), make_model, Loss("ce"), settings=replace(SETTINGS, batch_size=512, drop_last=True))


# -- precision and devices ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "weights"),
    [("32", torch.float32), ("64", torch.float64), ("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16)],
)
def test_precisions(precision, weights):
    dtypes = set()

    class Looking(Standard):
        def objective(self, logits, y):
            dtypes.add(logits.dtype)
            return super().objective(logits, y)

    spec = "mlp:width=16,depth=2,norm=batch"
    rows, worker = rows_of(
        make_data(wrong=0),
        lambda s: make_model(s, spec=spec),
        LogitClip("ce", tau=2.0),
        Looking,
        replace(SETTINGS, epochs=15),
        fabric=make_fabric(accelerator="cpu", precision=precision),
    )
    assert worker.weights()["head.weight"].dtype == weights
    assert dtypes == {
        torch.float64 if precision == "64" else torch.float32
    }  # the loss is never computed in half precision
    assert rows[-1]["test_accuracy"] > 80


def test_images_are_trained_in_channels_last():
    layouts = []

    class Looking(Standard):
        def train_step(self, index, x, y, augment):
            weight = dict(self.network.named_parameters())["stem.weight"]
            layouts.append(weight.is_contiguous(memory_format=torch.channels_last))
            return super().train_step(index, x, y, augment)

    g = torch.Generator().manual_seed(0)
    split = Split(torch.randint(0, 256, (32, 3, 8, 8), generator=g, dtype=torch.uint8), torch.arange(32) % CLASSES)
    dataset = Dataset("images", split, split, CLASSES, tuple("abcd"))
    for channels_last in (True, False):
        layouts.clear()
        fit(
            dataset,
            lambda s: make_model(s, spec="wrn:depth=10,width=1,dropout=0.3", shape=(3, 8, 8)),
            Loss("ce"),
            Looking,
            replace(SETTINGS, epochs=1, channels_last=channels_last),
            view=transform("flip_crop:padding=1"),
        )
        assert layouts == [channels_last]


@pytest.mark.slow
def test_a_compiled_network_trains_to_the_same_accuracy():
    plain, _ = rows_of(make_data(), make_model, LogitClip("ce", tau=1.0), settings=SETTINGS)
    rows, _ = rows_of(
        make_data(), make_model, LogitClip("ce", tau=1.0), settings=replace(SETTINGS, compile=True, grad_clip=5.0)
    )
    for one, other in zip(plain, rows, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-3)
        assert one["test_accuracy"] == pytest.approx(other["test_accuracy"], abs=3)


# -- two processes -----------------------------------------------------------------------------------------------------

SPEC = "mlp:width=16,depth=2,norm=batch,dropout=0.2"
# Of 513 test examples one process has 257 and the other 256, so they have two batches and one.
PAIR = Settings(epochs=3, batch_size=32, lr=0.05, seed=1, per_example=True)


def in_both(fabric: Any, folder: Path) -> None:
    """Train every case in two processes; each writes its results to a file."""
    torch.set_num_threads(1)
    warnings.simplefilter("error", FutureWarning)
    dataset = make_data(301, 513)
    owned: list[list[int]] = []
    steps: list[Any] = []

    class Looking(Standard):
        def train_epoch(self, epoch, batches, augment):
            owned.append([])
            steps.clear()
            for index, y, step in super().train_epoch(epoch, batches, augment):
                owned[-1] += index.tolist()
                steps.append((y, step.loss, step.logits))
                yield index, y, step

    def train(resume: Any = None) -> dict[str, Any]:
        out: dict[str, Any] = {"rows": []}

        def after_epoch(progress: Progress) -> None:
            out["rows"].append(progress.row)
            state = progress.state()  # on all ranks, because gathering may need all of them
            if progress.row["epoch"] == 0:
                out["saved"] = copy.deepcopy((progress.weights(), state, 1))
            out["examples"] = progress.examples

        worker = fit(
            dataset,
            lambda s: make_model(s, spec=SPEC),
            LogitClip("cores", tau=1.0),
            Looking,
            PAIR,
            index=torch.arange(280),
            held_out=torch.arange(280, 301),
            fabric=fabric,
            resume=resume,
            after_epoch=after_epoch,
        )
        return {**out, "weights": worker.weights()}

    whole = train()
    report = {"whole": whole, "owned": copy.deepcopy(owned), "steps": copy.deepcopy(steps)}
    report["resumed"] = train(whole["saved"])
    report["plain"] = fit(
        make_data(256, 64), make_model, Loss("ce"), settings=replace(SETTINGS, batch_size=16), fabric=fabric
    ).weights()
    try:
        fit(dataset, make_model, Loss("ce"), settings=replace(PAIR, lr=1e7, epochs=20), fabric=fabric)
    except Diverged as error:
        report["diverged"] = str(error)
    torch.save(report, folder / f"{fabric.global_rank}.pt")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("pair")
    launch(in_both, folder, accelerator="cpu", devices=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def test_two_processes_end_with_the_same_weights_and_rows(pair):
    for part in ("whole", "resumed"):
        assert same(pair[0][part]["weights"], pair[1][part]["weights"])
        assert pair[0][part]["rows"] == pair[1][part]["rows"]
    assert any("running_mean" in name for name in pair[0]["whole"]["weights"])
    assert same(pair[0]["plain"], pair[1]["plain"])


def test_each_example_is_owned_by_one_process(pair):
    for zero, one in zip(pair[0]["owned"], pair[1]["owned"], strict=True):
        assert sorted(zero) == list(range(0, 280, 2))
        assert sorted(one) == list(range(1, 280, 2))


def test_two_processes_report_what_one_process_measures(pair):
    dataset, whole = make_data(301, 513), pair[0]["whole"]
    network = make_model(0, spec=SPEC)
    network.load_state_dict(whole["weights"])
    with torch.no_grad():
        test, seen = (network.eval()(split.x) for split in (dataset.test, dataset.train))
    train, last = dataset.train, whole["rows"][-1]
    assert train.clean_labels is not None
    assert last["test_accuracy"] == pytest.approx(100 * float((test.argmax(1) == dataset.test.labels).double().mean()))
    right = seen.argmax(1) == train.labels
    assert last["val_accuracy"] == pytest.approx(100 * float(right[280:].double().mean()))
    wrong = (train.labels != train.clean_labels)[:280]
    assert last["memorised"] == pytest.approx(100 * float(right[:280][wrong].double().mean()))
    assert torch.equal(whole["examples"]["prediction"], seen.argmax(1))
    loss = nn.functional.cross_entropy(seen, train.labels, reduction="none")
    assert torch.allclose(whole["examples"]["loss"], loss, atol=1e-5)


def test_statistics_of_training_are_over_both_processes(pair):
    steps, last = pair[0]["steps"] + pair[1]["steps"], pair[0]["whole"]["rows"][-1]
    y, logits = torch.cat([y for y, _, _ in steps]), torch.cat([logits for _, _, logits in steps])
    assert len(y) == 280
    assert last["loss"] == pytest.approx(sum(float(loss) * len(y) for y, loss, _ in steps) / 280)
    assert last["train_accuracy"] == pytest.approx(100 * float((logits.argmax(1) == y).double().mean()))
    norms = logits.norm(dim=1)
    assert last["clipped"] == pytest.approx(100 * float((norms >= 1).double().mean()))
    expected = torch.quantile(norms, torch.tensor(QUANTILES)).tolist()
    assert last["norm_quantiles"] == pytest.approx(expected, abs=1e-5)


def test_two_processes_resume_to_the_same_bits(pair):
    for rank in pair:
        assert rank["resumed"]["rows"] == rank["whole"]["rows"][1:]
        assert same(rank["resumed"]["weights"], rank["whole"]["weights"])
        assert same(rank["resumed"]["examples"], rank["whole"]["examples"])


def test_two_processes_make_the_step_of_one_with_both_batches(pair):
    """Without batch norm, two batches of 16 equal one of 32, so this loop merges the orders of both ranks."""
    dataset, settings = make_data(256, 64), replace(SETTINGS, batch_size=16)
    network = make_model(settings.seed)
    optimizer = torch.optim.SGD(network.parameters(), lr=settings.lr, momentum=settings.momentum)
    for epoch in range(settings.epochs):
        optimizer.param_groups[0]["lr"] = learning_rate(settings, epoch)
        orders = [
            batch_indices(torch.arange(256), 16, generator=stream("cpu", 1, "order", epoch, r), rank=r, world=2)
            for r in (0, 1)
        ]
        for both in zip(*orders, strict=True):
            index = torch.cat(both)
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(dataset.train.x[index]), dataset.train.labels[index]).backward()
            optimizer.step()
    for name, weight in network.state_dict().items():
        assert torch.allclose(pair[0]["plain"][name], weight, atol=1e-5), name


def test_divergence_stops_both_processes(pair):
    assert "Training diverged in epoch" in pair[0]["diverged"]
    assert pair[0]["diverged"] == pair[1]["diverged"]


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_the_random_state_of_an_accelerator_is_restored(kind, monkeypatch):
    """Without the accelerator: its module gives a state, and gets it back."""
    state, restored = torch.zeros(3, dtype=torch.uint8), []
    module = torch.get_device_module(kind)
    monkeypatch.setattr(module, "get_rng_state", lambda device: state)
    monkeypatch.setattr(module, "set_rng_state", lambda new, device: restored.append((new, str(device))))
    before = torch.get_rng_state()
    with engine._model_randomness(torch.device(kind), 3):
        first = torch.rand(2)
    assert torch.equal(first, torch.rand(2, generator=torch.Generator().manual_seed(3)))
    assert torch.equal(torch.get_rng_state(), before)
    assert [(new is state, device) for new, device in restored] == [(True, kind)]
