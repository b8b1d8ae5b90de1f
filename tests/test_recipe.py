"""The recipes against Appendix F and Table 6 (copied here), the published numbers, and invalid recipes."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import json
import re
import shlex
import tomllib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logitclip import cli
from logitclip.clip import PENALTIES
from logitclip.data import AUGMENTS, DATASETS
from logitclip.losses import LOSSES
from logitclip.methods import METHODS
from logitclip.models import MODELS
from logitclip.noise import NOISES
from logitclip.registry import Registry
from logitclip.runs.config import RunConfig
from logitclip.runs.plugins import plugins_ignored
from logitclip.runs.results import Result
from logitclip.studies import tuning
from logitclip.studies.recipe import MEASURES, RECIPES, load_recipe, read_published, recipe_names, recipe_scales

# -- what the paper says, with every knob written out ------------------------------------------------------------------

SEEDS = [0, 1, 2, 3, 4]
SYM20 = "symmetric:rate=0.2,draw=exact,include_self=false"
SYM50 = "symmetric:rate=0.5,draw=exact,include_self=false"
ALL50 = "symmetric:rate=0.5,draw=exact,include_self=true"  # from all classes: the code of DivideMix and SOP
ASYM = "asymmetric:rate=0.4,variant=map,draw=exact"
# The noise of the released code (datasets/tools.py): an exact share, the wrong class by a projection of the image.
DEPENDENT = "instance:rate=0.4,variant=released,std=0.1,scaling=none"
WORST, FINE = "real:set=worst", "real:set=fine"
FIVE, FOUR = [SYM20, SYM50, ASYM, DEPENDENT, WORST], [SYM50, ASYM, DEPENDENT, WORST]

CE = "ce:label_smoothing=0"
C10 = "cifar10:subset=false,human=false,normalisation=logitclip"
C100 = "cifar100:labels=fine,subset=false,human=false,normalisation=logitclip"
C10_DIVIDEMIX = "cifar10:subset=false,human=false,normalisation=dividemix"
C10_SOP = "cifar10:subset=false,human=false,normalisation=sop"
C100_SOP = "cifar100:labels=fine,subset=false,human=false,normalisation=sop"
WEB = "webvision:subset=mini,test=ilsvrc,ilsvrc=none,size=256"

# Table 6: the best 1/tau of CE.
TEMPS = {
    C10: {SYM20: "1", SYM50: "1.5", ASYM: "2.5", DEPENDENT: "2", WORST: "2.5"},
    C100: {SYM20: "0.5", SYM50: "0.5", ASYM: "2.5", DEPENDENT: "0.5", FINE: "0.5"},
    WEB: {"none": "1.2"},
}
GRID = "norm:temp=grid"

# --droprate of the authors' code is 0.3; LogitNorm's and ODNL's pass it to this network.
WRN = "wrn:depth=40,width=2,dropout=0.3,activation=relu"
CIFAR = {
    "model": WRN,
    "epochs": 200,
    "batch_size": 128,
    "lr": 0.1,
    "momentum": 0.9,
    "nesterov": False,
    "weight_decay": 0.0005,
    "schedule": "multistep",
    "milestones": (80, 140),
    "augment": "flip_crop:padding=4",
    "drop_last": True,
    "val_rule": "released",
    # and nothing else
    "loss": CE,
    "clip": "none",
    "penalty": "none",
    "method": "standard",
    "grad_clip": 0.0,
    "limit": 0,
    "val": 0.0,
    "precision": "32",
}
WEBVISION = CIFAR | {
    "data": WEB,
    "noise": "none",
    "model": "resnet:depth=18,stem=imagenet,init=he,activation=relu",
    "epochs": 120,
    "nesterov": True,
    "milestones": (40, 80),
    "augment": "crop:size=224",
    "val_rule": "random",
}
DIVIDEMIX = CIFAR | {  # Train_cifar.py: --batch_size 64, range(num_epochs + 1), lr / 10 from epoch 150, no drop_last
    "data": C10_DIVIDEMIX,
    "model": "preact_resnet:depth=18,final_norm=false,shortcut=activated,activation=relu",
    "epochs": 301,
    "batch_size": 64,
    "lr": 0.02,
    "milestones": (150,),
    "drop_last": False,
}
SOP = CIFAR | {  # model/ResNet_Zoo.py: the CIFAR stem, and no initialisation of its own
    "model": "resnet:depth=34,stem=cifar,init=torch,activation=relu",
    "epochs": 120,
    "lr": 0.02,
    "milestones": (40, 80),
    "drop_last": False,
}

FOCAL, GCE = "focal:gamma=0.5,detach_weight=false", "gce:q=0.7"
SCE = "sce:alpha=0.5,beta=1,log_zero=-9.210340371976182"
CORES = "cores:beta=2,warmup=10,ramp=30,sieve_after=30,prior=labels"
PHUBER10, PHUBER30 = "phuber_ce:threshold=10", "phuber_ce:threshold=30"
NCE_MAE = "nce_mae:alpha=50,beta=1,scale=1"
NCE_AGCE = "nce_agce:alpha=50,beta=0.1,a=1.8,q=3"
NCE_AGCE_WEB = "nce_agce:alpha=50,beta=0.1,a=2.5,q=3"
AEL, AUL, NCE = "ael:a=2.5", "aul:a=5.5,q=3", "nce:scale=1"
MAE, TAYLOR = "mae:scale=2", "taylor_ce:order=2"
TABLE1 = [FOCAL, MAE, PHUBER10, SCE, GCE, TAYLOR, NCE, AEL, AUL, CORES]  # besides CE
TABLE2 = [FOCAL, PHUBER30, SCE, GCE, CORES, NCE_MAE, NCE_AGCE]


def product(settings: dict[str, Any], **axes: list[Any]) -> list[dict[str, Any]]:
    axes = {"seed": SEEDS, **axes}
    return [settings | dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def published_temps(settings: dict[str, Any], data: str, noises: list[str], **axes: list[Any]) -> list[dict[str, Any]]:
    """CE with the clip, at the temp of Table 6."""
    runs = [
        product(settings | {"data": data, "clip": f"norm:temp={TEMPS[data][n]}"}, noise=[n], **axes) for n in noises
    ]
    return list(itertools.chain(*runs))


def divide_mix(noise: str, **knobs: Any) -> list[dict[str, Any]]:
    knobs = {"lambda_u": 0, "confidence_penalty": "false"} | knobs
    method = (
        "dividemix:warm_up=10,lambda_u={lambda_u},p_threshold=0.5,temperature=0.5,alpha=4,views=2,ramp=16,loss_window=1,"
        "confidence_penalty={confidence_penalty},clip_warm_up=true,clip_guesses=true,clip_mixed=true,clip_mixture=true"
    )
    return product(DIVIDEMIX | {"noise": noise, "method": method.format(**knobs)}, clip=["none", GRID])


# torchvision's SqueezeNet has a ReLU after its class scores and does not train from scratch at lr 0.1.
SQUEEZENET = {"model": "squeezenet:dropout=0.5,activation=relu,last_activation=false", "lr": 0.01}
NETWORKS = [
    "resnet:depth=34,stem=imagenet,init=he,activation=relu",
    "densenet:depth=121,stem=imagenet,activation=relu",
]
ALL_TEMPS = ["0.1", "0.5", "1", "1.5", "2", "2.5", "3", "3.5", "4", "4.5", "5"]
ON10, ON100 = CIFAR | {"data": C10}, CIFAR | {"data": C100}
FIVE100, FOUR100 = [*FIVE[:4], FINE], [*FOUR[:3], FINE]
SAM = "sam:rho=0.05"

EXPECTED = {
    "table1": [
        *product(ON10, noise=FIVE, loss=TABLE1, clip=["none", GRID]),
        *product(ON10, noise=FIVE),
        *published_temps(CIFAR, C10, FIVE),
    ],
    "table2": [
        *product(ON100, noise=FIVE100, loss=TABLE2, clip=["none", GRID]),
        *product(ON100, noise=FIVE100),
        *published_temps(CIFAR, C100, FIVE100),
    ],
    "table3": [
        *product(ON10, noise=FIVE, model=NETWORKS),
        *published_temps(CIFAR, C10, FIVE, model=NETWORKS),
        *product(ON10 | SQUEEZENET, noise=FIVE),
        *published_temps(CIFAR | SQUEEZENET, C10, FIVE),
    ],
    "table4": [
        *product(WEBVISION, loss=[CE, PHUBER30, GCE, SCE, NCE_MAE, NCE_AGCE_WEB]),
        *product(WEBVISION, clip=["norm:temp=1.2"]),
        *product(WEBVISION, loss=[NCE_AGCE_WEB], clip=[GRID]),
    ],
    "table5": [
        *product(ON10, noise=FOUR, clip=["none", "logit_norm:temperature=grid"]),
        *published_temps(CIFAR, C10, FOUR),
    ],
    "table6": [
        *product(ON10, noise=FIVE, clip=[GRID], seed=[0]),
        *product(ON100, noise=FIVE100, clip=[GRID], seed=[0]),
        *product(WEBVISION, clip=[GRID], seed=[0]),
    ],
    "table7": [
        *divide_mix(ALL50, lambda_u=25),
        *divide_mix(ASYM, confidence_penalty="true"),
        *divide_mix(DEPENDENT),
        *divide_mix(WORST),
    ],
    "table8": product(
        ON100 | {"noise": "none"},
        clip=["none", *(f"norm:temp={1 / tau:g}" for tau in (20, 10, 2, 1, 0.5, 0.25))],
    ),
    "table9": [
        *product(CIFAR, data=[C10, C100], noise=[SYM50, ASYM], method=[SAM], clip=["none", GRID]),
        *product(SOP, data=[C10_SOP], noise=[ALL50, ASYM], method=["sop:lr_u=10,lr_v=10"], clip=["none", GRID]),
        *product(SOP, data=[C100_SOP], noise=[ALL50], method=["sop:lr_u=1,lr_v=10"], clip=["none", GRID]),
        *product(SOP, data=[C100_SOP], noise=[ASYM], method=["sop:lr_u=0.1,lr_v=100"], clip=["none", GRID]),
    ],
    "figure1": [],
    "figure2": [
        *product(ON10, noise=FOUR, clip=["none", *(f"norm:temp={temp}" for temp in ALL_TEMPS)]),
        *product(ON100, noise=FOUR100, clip=["none", *(f"norm:temp={temp}" for temp in ALL_TEMPS)]),
    ],
    "figure3": [
        *product(ON10, noise=FOUR, model=["wrn:depth=40,width=2,dropout=0.3,activation=relu6"]),
        *product(ON10, noise=FOUR, clip=["value:limit=grid"]),
        *published_temps(CIFAR, C10, FOUR),
    ],
    "figure4": [
        *product(ON10, noise=FOUR),
        *product(ON10, noise=FOUR, penalty=["norm:weight=grid"]),
        *published_temps(CIFAR, C10, FOUR),
    ],
    "all_losses": [
        *product(
            ON10 | {"noise": SYM50},
            loss=[
                *TABLE1,
                NCE_MAE,
                NCE_AGCE,
                "agce:a=0.6,q=0.6",
                "rce:log_zero=-9.210340371976182",
                "nce_rce:alpha=1,beta=1,log_zero=-9.210340371976182",
            ],
            clip=["none", GRID],
        ),
        *product(ON10, noise=[SYM50]),
        *published_temps(CIFAR, C10, [SYM50]),
    ],
}


def to_tune(config: RunConfig) -> dict[str, str]:
    return {name: spec for name in ("clip", "penalty") if (spec := getattr(config, name)).endswith(("=grid", "=auto"))}


def untuned(config: RunConfig) -> RunConfig:
    plain = replace(config, **dict.fromkeys(to_tune(config), "none"))
    return replace(plain, loss="ce") if config.loss.endswith("=auto") else plain


CACHE: dict[tuple[str, str], str] = {}


def in_full(registry: Registry, spec: str) -> str:
    if (registry.kind, spec) not in CACHE:
        name, given = registry.parse(spec)
        values = {knob.name: given.get(knob.name, knob.default) for knob in registry.knobs(name).values()}
        CACHE[registry.kind, spec] = registry.format(name, values)
    return CACHE[registry.kind, spec]


def described(config: RunConfig) -> dict[str, Any]:
    """Return the settings that a config runs with: every knob of every spec, and milestones in epochs."""
    registries = {"data": DATASETS, "noise": NOISES, "loss": LOSSES, "method": METHODS, "model": MODELS}
    registries |= {"augment": AUGMENTS, "penalty": PENALTIES}  # the norm clip has two ways to give its numbers
    words, resolved = to_tune(config), untuned(config).resolve()
    shown = {name: getattr(resolved, name) for name in (*CIFAR, "data", "noise", "seed")}
    shown |= {name: in_full(registry, shown[name]) for name, registry in registries.items()} | words
    shown["milestones"] = tuple(round(share * resolved.epochs) for share in resolved.milestones)  # type: ignore
    return shown


def counted(runs: list[dict[str, Any]]) -> Counter[Any]:
    return Counter(tuple(sorted(run.items())) for run in runs)


@pytest.mark.parametrize("name", EXPECTED)
def test_full_scale_is_the_papers(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name, root=str(tmp_path))  # where there is no data
    runs = counted([described(cell.config) for cell in recipe.cells])
    expected = counted(EXPECTED[name])
    assert not expected - runs, f"missing: {next(iter(expected - runs))}"
    assert not runs - expected, f"not in the paper: {next(iter(runs - expected))}"
    assert all(cell.config.noise_seed == cell.config.seed for cell in recipe.cells)
    assert all(cell.config.root == str(tmp_path) for cell in recipe.cells)


def test_every_recipe_is_checked() -> None:
    assert set(recipe_names()) == {
        *EXPECTED,
        "quickstart",
        "first_sight",
        "leaderboard",
        "memorisation",
        "methods",
        "readings",
    }


def test_figure_1_draws_four_numbers_of_classes() -> None:
    figure = load_recipe("figure1").figure
    assert figure is not None
    assert figure["kind"] == "bounds"
    assert len(figure["classes"]) == 4


# -- sizes -------------------------------------------------------------------------------------------------------------

CELLS = {  # smoke, cpu, mini, full
    "all_losses": (32, 96, 32, 160),
    "figure1": (0, 0, 0, 0),
    "figure2": (6, 180, 96, 480),
    "figure3": (6, 45, 60, 60),
    "figure4": (6, 45, 60, 60),
    "first_sight": (20, 60, 20, 60),
    "leaderboard": (16, *(count * len([*LOSSES]) for count in (8, 28, 28))),
    "memorisation": (2, 24, 30, 30),
    "methods": (11, 150, 22, 150),
    "quickstart": (12, 36, 12, 36),
    "readings": (4, 504, 60, 630),
    "table1": (4, 440, 150, 550),
    "table2": (4, 320, 24, 400),
    "table3": (6, 120, 12, 150),
    "table4": (8, 40, 8, 40),
    "table5": (3, 45, 60, 60),
    "table6": (1, 4, 5, 11),
    "table7": (4, 30, 24, 40),
    "table8": (3, 35, 21, 35),
    "table9": (4, 40, 24, 80),
}


@pytest.mark.parametrize("name", CELLS)
def test_number_of_cells(name: str) -> None:
    assert recipe_scales(name) == ["smoke", "cpu", "mini", "full"]
    assert tuple(len(load_recipe(name, scale).cells) for scale in recipe_scales(name)) == CELLS[name]


def test_a_loss_of_a_plugin_is_one_more_row(tmp_path: Path) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from logitclip.losses import loss\n@loss(tune={'a': (1, 2, 3, 4, 5)})\n"
        "def of_a_plugin(log_p, *, a: float = 2.0):\n    return -a * log_p\n",
        encoding="utf-8",
    )
    own = tmp_path / "own.toml"
    own.write_text(f'[base]\nplugin = ["{plugin}"]\n[grid]\nloss = ["*"]\n', encoding="utf-8")
    try:
        found = [cell.config.loss for cell in load_recipe(str(own), plugin=[str(plugin)]).cells]
    finally:
        LOSSES._entries.pop("of_a_plugin", None)
    assert len(found) == len([*LOSSES]) + 1
    assert {"of_a_plugin:a=auto", "gce:q=auto", "unhinged"} < set(found)


def test_table_1_on_a_laptop_takes_about_a_thousand_runs() -> None:
    recipe = load_recipe("table1", "cpu")
    to_tune = {recipe.to_tune(cell) for cell in recipe.cells if tuning.is_tuned(cell.config)}
    trials = {trial for config in to_tune for trial in tuning.next_trials(config, lambda _: None)}
    assert (len(recipe.cells), len(trials)) == (440, 484)


@pytest.mark.parametrize("name", CELLS)
def test_smoke_and_cpu_use_the_digits(name: str) -> None:
    for scale in ("smoke", "cpu"):
        for cell in load_recipe(name, scale).cells:
            assert cell.config.data == "digits"
            resolved = untuned(cell.config).resolve()
            assert resolved.epochs is not None
            assert resolved.epochs <= (2 if scale == "smoke" else 150)


# -- published numbers -------------------------------------------------------------------------------------------------


def test_every_published_number_has_one_place() -> None:
    places = []
    for name in recipe_names():
        recipe = load_recipe(name)
        axes = {*recipe.rows, *recipe.cols}
        known = {tuple(sorted((k, v) for k, v in cell.coordinates.items() if k in axes)) for cell in recipe.cells}
        for number in read_published(name):
            place = tuple(sorted(number.coordinates.items()))
            assert place in known, f"{name}: {place}"
            assert number.statistic in recipe.statistics
            places.append((name, place, number.statistic))
    assert len(places) == len(set(places)) == 286


@pytest.mark.parametrize(
    ("name", "statistic", "value", "std", "place"),
    [
        ("table1", "last10_accuracy", 84.37, 0.34, {"noise": "symmetric:rate=0.5", "loss": "ce", "clip": GRID}),
        ("table1", "last10_accuracy", 82.83, 0.40, {"noise": "real", "loss": "cores", "clip": GRID}),
        ("table2", "last10_accuracy", 47.26, 0.44, {"noise": "asymmetric:rate=0.4", "loss": PHUBER30, "clip": "none"}),
        (
            "table3",
            "last10_accuracy",
            74.16,
            None,
            {"noise": "symmetric:rate=0.2", "model": "resnet:depth=34", "clip": "none"},
        ),
        ("table4", "best_accuracy", 64.92, None, {"loss": "nce_agce:a=2.5", "clip": GRID}),
        ("table4", "last10_accuracy", 64.50, None, {"loss": "nce_agce:a=2.5", "clip": GRID}),
        (
            "table5",
            "last10_accuracy",
            81.81,
            None,
            {"noise": "asymmetric:rate=0.4", "clip": "logit_norm:temperature=grid"},
        ),
        ("table6", "temp", 1.2, None, {"data": "webvision", "noise": "real"}),
        ("table6", "temp", 2.0, None, {"data": "cifar10", "noise": "dependent"}),
        ("table7", "last10_accuracy", 93.16, None, {"noise": "real", "clip": GRID}),
        ("table8", "last10_accuracy", 46.04, None, {"clip": "norm:temp=4"}),
        ("table8", "last10_accuracy", 75.98, None, {"clip": "none"}),
        (
            "table9",
            "last10_accuracy",
            72.08,
            None,
            {"method": "sam", "data": "cifar100", "noise": "asymmetric:rate=0.4", "clip": GRID},
        ),
    ],
)
def test_published_numbers(name: str, statistic: str, value: float, std: float | None, place: dict[str, str]) -> None:
    [found] = [n for n in read_published(name) if n.coordinates == place and n.statistic == statistic]
    assert (found.value, found.std) == (value, std)


def test_recipes_of_ours_have_no_published_numbers() -> None:
    assert read_published("quickstart") == ()


def test_statistics_are_numbers_of_a_result() -> None:
    of_results = {field.name for field in dataclasses.fields(Result)}
    assert {*MEASURES} - {"gain", "rank"} - {name for name in MEASURES if MEASURES[name].compute} <= of_results


# -- the loader --------------------------------------------------------------------------------------------------------

OWN = """
title = "Mine"
[base]
data = "digits"
[grid]
method = ["paper", "mine", "sam:rho=0.05"]
noise = ["symmetric:rate=0.50", "none"]
seed = [3, 4]
[variant.paper]
clip = "norm:temp=grid"
[variant.mine]
loss = "gce:q=0.5"
[[override]]
when = { noise = "none", method = ["mine", "sam"] }
skip = true
[[override]]
when = { noise = "none" }
set = { epochs = 7 }
[table]
rows = ["method"]
cols = ["noise"]
[scale.small]
epochs = 2
[scale.small.grid]
noise = ["symmetric:rate=0.5"]
[[scale.small.override]]
when = { method = "sam", seed = 3 }
set = { lr = 0.5 }
"""


FIGURE = """
[figure]
kind = "bars"
x = "noise"
y = "last10_accuracy"
"""


def own(tmp_path: Path, text: str = OWN) -> str:
    file = tmp_path / "mine.toml"
    file.write_text(text, encoding="utf-8")
    return str(file)


def test_own_recipe(tmp_path: Path) -> None:
    recipe = load_recipe(own(tmp_path), runs="elsewhere")
    assert (recipe.name, recipe.title, recipe.paper, recipe.scale) == ("mine", "Mine", None, "full")
    assert (recipe.rows, recipe.cols, recipe.statistics) == (("method",), ("noise",), ("last10_accuracy",))
    cells = {tuple(cell.coordinates.values()): cell.config for cell in recipe.cells}
    sym = "symmetric:rate=0.5"  # in canonical spelling
    assert list(cells) == [
        *[("paper", noise, seed) for noise in (sym, "none") for seed in (3, 4)],
        *[("mine", sym, seed) for seed in (3, 4)],
        *[("sam", sym, seed) for seed in (3, 4)],
    ]
    assert cells["paper", sym, 3] == RunConfig(
        noise="symmetric:rate=0.50", clip="norm:temp=grid", seed=3, noise_seed=3, runs="elsewhere"
    )
    assert cells["paper", "none", 4].epochs == 7
    assert cells["mine", sym, 4].loss == "gce:q=0.5"
    assert cells["sam", sym, 4].method == "sam:rho=0.05"


def test_scale_of_an_own_recipe(tmp_path: Path) -> None:
    assert recipe_scales(own(tmp_path)) == ["small", "full"]
    recipe = load_recipe(own(tmp_path), "small")
    assert len(recipe.cells) == 6  # the override of noise "none" matches nothing here, which is allowed
    assert {cell.config.epochs for cell in recipe.cells} == {2}
    assert [cell.config.lr for cell in recipe.cells] == [None] * 4 + [0.5, None]


def test_knobs_at_their_defaults_are_kept_as_written(tmp_path: Path) -> None:
    # lambda_u = 25 is the default, and dividemix would choose 0 for asymmetric noise if it were left out.
    text = '[base]\nnoise = "asymmetric:rate=0.4"\n[grid]\nmethod = ["dividemix:lambda_u=25"]'
    [cell] = load_recipe(own(tmp_path, text)).cells
    assert cell.coordinates == {"method": "dividemix"}
    assert cell.config.method == "dividemix:lambda_u=25"


@pytest.mark.parametrize("data", ["cifar10", "cifar10:normalisation=sop"])
def test_published_temps_are_those_of_table_6(tmp_path: Path, data: str) -> None:
    text = f'[base]\ndata = "{data}"\nclip = "norm:temp=published"\n[grid]\nnoise = ["asymmetric:rate=0.40", "mine"]\n'
    text += '[variant.mine]\nnoise = "instance:variant=released,rate=0.4"'
    cells = load_recipe(own(tmp_path, text)).cells
    assert [cell.config.clip for cell in cells] == ["norm:temp=2.5", "norm:temp=2"]


def test_a_recipe_without_a_grid_is_one_run(tmp_path: Path) -> None:
    recipe = load_recipe(own(tmp_path, '[base]\nloss = "gce"'))
    assert [cell.config for cell in recipe.cells] == [RunConfig(loss="gce")]


def test_config_to_tune(tmp_path: Path) -> None:
    recipe = load_recipe(own(tmp_path))
    assert {recipe.to_tune(cell).seed for cell in recipe.cells} == {0}
    assert {recipe.to_tune(cell).noise_seed for cell in recipe.cells} == {0}
    each = load_recipe(own(tmp_path, 'tune_seed = "each"\n' + OWN))
    assert all(each.to_tune(cell) == cell.config for cell in each.cells)
    fixed = load_recipe(own(tmp_path, OWN.replace("[base]", "[base]\nnoise_seed = 9")))
    assert {(fixed.to_tune(cell).seed, fixed.to_tune(cell).noise_seed) for cell in fixed.cells} == {(0, 9)}
    some = load_recipe(own(tmp_path, OWN.replace("epochs = 7", "noise_seed = 9")))
    noises = {(cell.coordinates["noise"], some.to_tune(cell).noise_seed) for cell in some.cells}
    assert noises == {("symmetric:rate=0.5", 0), ("none", 9)}


def test_overrides_of_a_scale_win(tmp_path: Path) -> None:
    text = """
[grid]
loss = ["ce", "mae"]
[[override]]
when = { loss = "ce" }
set = { lr = 0.3, epochs = 7 }
[scale.small]
lr = 0.2
[[scale.small.override]]
when = { loss = "ce" }
set = { lr = 0.4 }
"""
    small = load_recipe(own(tmp_path, text), "small").cells
    assert [(cell.config.lr, cell.config.epochs) for cell in small] == [(0.4, 7), (0.2, None)]
    assert [cell.config.lr for cell in load_recipe(own(tmp_path, text)).cells] == [0.3, None]


def test_variant_with_a_plugin(tmp_path: Path) -> None:
    plugin = tmp_path / "recipe_plugin.py"
    plugin.write_text(
        "from logitclip.losses import LOSSES\n"
        "def recipe_test_loss(logits, target, *, knob: float = 1.0):\n    return logits\n"
        "LOSSES.register(recipe_test_loss)\n",
        encoding="utf-8",
    )
    text = f'[grid]\nloss = ["ce", "mine"]\n[variant.mine]\nloss = "recipe_test_loss:knob=2"\nplugin = ["{plugin}"]'
    try:
        with pytest.raises(
            ValueError, match=f"names the plugin {re.escape(str(plugin))}, which is Python code: add --plugin"
        ):
            load_recipe(own(tmp_path, text))
        with plugins_ignored():  # a reader
            read = load_recipe(own(tmp_path, text))
            ids = [cell.config.id for cell in read.cells]
        assert "recipe_test_loss" not in LOSSES
        recipe = load_recipe(own(tmp_path, text), plugin=[str(plugin)])
        assert [cell.coordinates["loss"] for cell in recipe.cells] == ["ce", "mine"]
        assert recipe.cells[1].config.plugin == (str(plugin),)
        assert recipe.cells == read.cells
        assert recipe.command().endswith(shlex.join(["--plugin", str(plugin)]))
        assert "--plugin" not in recipe.command("report")
        assert [cell.config.id for cell in recipe.cells] == ids
    finally:
        LOSSES._entries.pop("recipe_test_loss", None)


BAD = {
    "unknown section": ("[bas]\n", "Unknown key 'bas' in the recipe mine. Did you mean 'base'?"),
    "unknown field": ('[base]\nlos = "ce"', "Unknown key 'los' in [base]. Did you mean 'loss'?"),
    "runs is the sweep's": ('[base]\nruns = "here"', "Unknown key 'runs' in [base]."),
    "unknown field of a scale": (
        "[scale.full]\nepoch = 3",
        "Unknown key 'epoch' in [scale.full]. Did you mean 'epochs'?",
    ),
    "unknown field of a variant": ("[variant.a]\nepoch = 3", "Unknown key 'epoch' in [variant.a]."),
    "wrong type of a field": ('[base]\nepochs = "ten"', "epochs must be a whole number or None, got 'ten'."),
    "wrong type of a key": ("title = 3", "title in the recipe mine must be text, got 3."),
    "wrong type of a section": ("base = 3", "base in the recipe mine must be a section, got 3."),
    "wrong type of a scale": ("scale.full = 3", "[scale.full] must be a section with keys, got 3."),
    "wrong tune_seed": ('tune_seed = "all"', "tune_seed must be a whole number of at least 0 or \"each\", got 'all'."),
    "negative tune_seed": ("tune_seed = -1", 'tune_seed must be a whole number of at least 0 or "each", got -1.'),
    "bool is no seed": ("tune_seed = true", "tune_seed in the recipe mine must be a whole number or text, got True."),
    "axis that is no list": ('[grid]\nloss = "ce"', "loss in [grid] must be a list of one value or more, got 'ce'."),
    "empty axis": ("[grid]\nloss = []", "loss in [grid] must be a list of one value or more, got []."),
    "list in an axis": ("[grid]\nloss = [[1]]", "A value of loss in [grid] must be text or a number, got [1]."),
    "wrong type in an axis": ("[grid]\nloss = [1]", "loss must be text, got 1."),
    "unknown loss": ('[grid]\nloss = ["gcee"]', "Unknown loss 'gcee'. Did you mean 'gce'?"),
    "unknown knob to tune": ('[grid]\nclip = ["norm:tmp=grid"]', "The clip 'norm' has no knob 'tmp'."),
    "not to be tuned": (
        '[grid]\nloss = ["sce:beta=grid"]',
        "No values are known to choose loss.sce.beta from",
    ),
    "no published temp": (
        '[base]\nnoise = "pair:rate=0.2"\nclip = "norm:temp=published"',
        "Table 6 has no temp for digits with the noise pair:rate=0.2: give a number, or tune it.",
    ),
    "two to be tuned": (
        '[base]\npenalty = "norm:weight=grid"\n[grid]\nclip = ["norm:temp=auto"]',
        "One number can be tuned at a time, got clip.temp and penalty.weight; only a knob of the loss and",
    ),
    "value twice": ('[grid]\nloss = ["gce", "gce:q=0.7"]', "loss in [grid] has a value twice"),
    "unknown axis": ('[grid]\nlos = ["ce"]', "there is no [variant.ce]. Did you mean 'loss'?"),
    "new axis of a scale": (
        '[grid]\nloss = ["ce"]\n[scale.full.grid]\nclip = ["none"]',
        "Unknown key 'clip' in [scale.full.grid].",
    ),
    "axis is set as well": (
        '[base]\nloss = "ce"\n[grid]\nloss = ["ce"]',
        "loss is an axis of the grid: it cannot be set",
    ),
    "two axes set one field": (
        '[grid]\nm = ["a"]\nclip = ["none"]\n[variant.a]\nclip = "none"',
        "clip = 'none' sets clip, which another axis of the grid sets as well.",
    ),
    "override without when": ("[[override]]\nset = { epochs = 3 }", "[[override]] needs `when = {...}` and either"),
    "override with both": (
        '[grid]\nloss = ["ce"]\n[[override]]\nwhen = { loss = "ce" }\nset = { lr = 1 }\nskip = true',
        "[[override]] needs `when = {...}` and either",
    ),
    "override of what is no axis": (
        '[grid]\nloss = ["ce"]\n[[override]]\nwhen = { los = "ce" }\nskip = true',
        "Unknown key 'los' in `when` of [[override]]. Did you mean 'loss'?",
    ),
    "override that matches nothing": (
        '[grid]\nloss = ["gce"]\n[[override]]\nwhen = { loss = "gce:q=0.6" }\nset = { lr = 1 }',
        "[[override]] matches nothing: loss is never 'gce:q=0.6'. Known: gce.",
    ),
    "override of a scale that matches nothing": (
        '[grid]\nloss = ["gce"]\n[[scale.full.override]]\nwhen = { loss = "ce" }\nset = { lr = 1 }',
        "[[scale.full.override]] matches nothing: loss is never 'ce'.",
    ),
    "unknown field of an override": (
        '[grid]\nloss = ["ce"]\n[[override]]\nwhen = { loss = "ce" }\nset = { tau = 1 }',
        "Unknown key 'tau' in [[override]].",
    ),
    "table of what is no axis": (
        '[grid]\nloss = ["ce"]\n[table]\nrows = ["clip"]',
        "[table] has 'clip', which is not an axis of the grid.",
    ),
    "axis left out of the table": (
        '[grid]\nloss = ["ce", "gce"]\nclip = ["none"]\n[table]\nrows = ["clip"]',
        "The axis 'loss' must be in rows or in cols of [table], once.",
    ),
    "unknown statistic": ('[table]\ncells = ["accuracy"]', "Unknown statistic 'accuracy' in [table]."),
    "no statistic": ("[table]\ncells = []", "cells in [table] must be one statistic or more of last10_accuracy"),
    "unknown kind of figure": (
        '[figure]\nkind = "pie"',
        "kind in [figure] must be one of bars, bounds, lines, ranks; got 'pie'.",
    ),
    "figure without an axis": ('[figure]\nkind = "bars"', "[figure] of kind bars needs x."),
    "figure over what is no axis": (
        '[grid]\nloss = ["ce"]\n[figure]\nkind = "bars"\nx = "noise"\ny = "temp"',
        "x in [figure] is not an axis of the figure: 'noise'.",
    ),
    "figure over the seeds": (
        '[grid]\nloss = ["ce"]\nseed = [0, 1]\n[figure]\nkind = "bars"\nx = "seed"\ny = "temp"',
        "x in [figure] is not an axis of the figure: 'seed'. It has loss.",
    ),
    "unknown key of a figure": (
        '[figure]\nkind = "bounds"\npanel = "loss"',
        "Unknown key 'panel' in [figure] of kind bounds.",
    ),
    "one class": (
        '[figure]\nkind = "bounds"\nclasses = [1]\ntau = [1, 2]',
        "classes in [figure] must be whole numbers",
    ),
    "no classes": (
        '[figure]\nkind = "bounds"\nclasses = []\ntau = [1, 2]',
        "classes in [figure] must be whole numbers",
    ),
    "empty range": ('[figure]\nkind = "bounds"\nclasses = [2]\ntau = [2, 1]', "tau in [figure] must be two positive"),
    "list of lists in when": (
        '[grid]\nloss = ["ce"]\n[[override]]\nwhen = { loss = [["ce"]] }\nskip = true',
        "`when` of [[override]] must have a value of loss or a list of them, got [['ce']].",
    ),
    "no TOML": ("[base", "is not valid TOML"),
}


@pytest.mark.parametrize(("text", "sentence"), BAD.values(), ids=BAD)
def test_bad_recipes_get_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        load_recipe(own(tmp_path, text))
    assert sentence in str(error.value)
    assert "mine" in str(error.value)
    assert "\n" not in str(error.value)


def places(node: Any) -> list[tuple[Any, Any]]:
    """Return every place in nested dicts and lists as (container, key)."""
    keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else []
    return [place for key in keys for place in ((node, key), *places(node[key]))]


JUNK = st.one_of(
    st.sampled_from(
        ["", "none", "ce", "where", "section", "mine", "norm:temp=grid", "=,:", "seed", [], {}, [[]], [{}]]
    ),
    st.sampled_from(
        [True, -1, 0, 1.5, float("nan"), float("inf"), {"loss": "ce"}, [None], ["seed"], datetime.date(2023, 1, 1)]
    ),
)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_whatever_is_in_a_recipe_it_is_a_recipe_or_a_sentence(data: st.DataObject) -> None:
    content = tomllib.loads(OWN + FIGURE)
    node, key = data.draw(st.sampled_from(range(len(places(content)))).map(lambda i: places(content)[i]))
    junk = data.draw(JUNK)
    if isinstance(node, dict) and isinstance(junk, str) and data.draw(st.booleans()):
        node[junk] = node.pop(key)  # another name for it
    else:
        node[key] = junk
    with mock.patch("logitclip.studies.recipe.tomllib.loads", return_value=content):
        for scale in ("full", "small"):
            with contextlib.suppress(ValueError):
                load_recipe(str(RECIPES / "quickstart.toml"), scale)


@pytest.mark.parametrize("json_", [True, False])
def test_list_recipes(json_: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr("sys.argv", ["logitclip", "list", "recipes", *(["--json"] if json_ else [])])
    cli.main()
    shown = capsys.readouterr().out
    assert all(name in shown for name in recipe_names())
    if json_:
        assert json.loads(shown)["table1"]["runs"] == {"smoke": 4, "cpu": 440, "mini": 150, "full": 550}
    else:
        assert "smoke 4, cpu 440, mini 150, full 550" in shown


def test_commands_can_be_pasted(tmp_path: Path) -> None:
    assert load_recipe("table8").command() == "logitclip sweep table8 --scale full"
    file = tmp_path / "my study.toml"
    file.write_text("title = 'Mine'", encoding="utf-8")
    command = load_recipe(str(file), runs=str(tmp_path / "runs"), root="my data").command("report")
    arguments = [
        "logitclip",
        "report",
        str(file),
        "--scale",
        "full",
        "--runs",
        str(tmp_path / "runs"),
        "--root",
        "my data",
    ]
    assert shlex.split(command) == arguments


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="Unknown recipe 'tabel1'"):
        load_recipe("tabel1")
    with pytest.raises(ValueError, match="There is no recipe file nowhere"):
        load_recipe("nowhere.toml")
    with pytest.raises(ValueError, match=r"Recipe table1: There is no scale 'big'\. Known: smoke, cpu, mini, full"):
        load_recipe("table1", "big")


def test_a_recipe_of_millions_of_cells_is_soon_a_sentence(tmp_path):
    file = tmp_path / "huge.toml"
    numbers = list(range(300))
    file.write_text(
        f"[grid]\nseed = {numbers}\nnoise_seed = {numbers}\nlimit = {[n + 1 for n in range(100)]}\n", encoding="utf-8"
    )
    with pytest.raises(ValueError, match="The grid has 9,000,000 cells, and a recipe has at most 100,000"):
        load_recipe(str(file))


def test_changes_win_over_everything_but_axes(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text(
        '[base]\nepochs = 3\nlr = 0.5\n[grid]\nloss = ["ce", "mae"]\n'
        '[[override]]\nwhen = { loss = "mae" }\nset = { epochs = 4 }\n[scale.cpu]\nepochs = 5\n',
        encoding="utf-8",
    )
    cells = load_recipe(str(file), "cpu", changes={"epochs": 6, "precision": "bf16-mixed"}).cells
    assert {(cell.config.epochs, cell.config.precision, cell.config.lr) for cell in cells} == {(6, "bf16-mixed", 0.5)}
    with pytest.raises(ValueError, match="loss is an axis of the grid"):
        load_recipe(str(file), changes={"loss": "gce"})
    with pytest.raises(ValueError, match="epochs must be at least 1, got 0"):
        load_recipe(str(file), changes={"epochs": 0})
