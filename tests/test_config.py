"""`RunConfig`: defaults, the fields that count in the id, and rejected values."""

from __future__ import annotations

import json
import re
import shutil
import typing
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
import pytest

from logitclip import data, engine, noise
from logitclip.methods import METHODS
from logitclip.methods.settings import Limit, Settings, annotations_of
from logitclip.runs.config import UNCOUNTED, Group, Otherwise, RunConfig, field_types, notes_of, registries
from logitclip.runs.plugins import check_plugins, plugins_ignored
from logitclip.runs.train import settings_of

TABLE = "a,b,kind\n" + "".join(f"{i % 7},{i % 3},{'xy'[i % 2]}\n" for i in range(40))


# -- the id ------------------------------------------------------------------------------------------------------------

CIFAR_RUN = RunConfig(data="cifar10", noise="symmetric:rate=0.5", clip="norm:temp=1.5").resolve()


def test_sample_ids_are_frozen():
    """Ids name run folders: if one changes, results are lost. If the maths changed, raise `PROTOCOL`."""
    assert RunConfig().id == "656890da1940254a"
    assert (
        RunConfig(noise="asymmetric:rate=0.4", clip="norm:tau=1,delta=0.5", loss="gce", seed=3, val=0.1).id
        == "c304b957bc132b62"
    )
    assert CIFAR_RUN.id == "8b5ab72ba46d7285"


def test_a_revision_changes_the_ids_of_its_own_runs_only(monkeypatch):
    sop, standard, old = RunConfig(method="sop").id, RunConfig().id, RunConfig(method="dividemix").id
    monkeypatch.setitem(METHODS._revisions, "sop", 1)
    assert RunConfig(method="sop").id != sop
    assert RunConfig().id == standard
    assert RunConfig(method="dividemix").id == old
    monkeypatch.setitem(METHODS._revisions, "dividemix", 0)  # before its guesses came first
    assert RunConfig(method="dividemix").id == "7ca1352b70af2923" != old


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"loss": "gce"}, {"loss": "gce:q=0.7"}),
        ({"loss": "sce:alpha=0.5,beta=1"}, {"loss": "sce:beta=1.0, alpha=.5"}),
        ({"clip": "norm:tau=1"}, {"clip": "norm:tau=1.0,p=2"}),
        ({"model": None}, {"model": "mlp:depth=3"}),
        ({"epochs": None, "lr": None}, {"epochs": 150, "lr": 0.1}),
        ({"lr": 1, "val": 0, "grad_clip": 5}, {"lr": 1.0, "val": 0.0, "grad_clip": 5.0}),
        ({"milestones": "0.4,0.7"}, {"milestones": " 0.70,0.4 "}),
        ({"milestones": "0.4,0.7"}, {"milestones": (0.7, 0.4)}),
        ({"milestones": (0.4, 0.7)}, {"milestones": [0.4, 0.7]}),
        ({"val_rule": "released"}, {"val_rule": "random"}),  # nothing is held out
        ({"schedule": "cosine"}, {"schedule": "cosine", "milestones": "0.1"}),
    ],
)
def test_one_meaning_one_id(one, other):
    assert RunConfig(**one).id == RunConfig(**other).id


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"noise_seed": 1},
        {"loss": "gce:q=0.6"},
        {"clip": "norm:temp=1.5"},
        {"penalty": "norm:weight=0.1"},
        {"method": "sam"},
        {"model": "mlp:width=64"},
        {"lr": 0.2},
        {"nesterov": True},
        {"milestones": "0.5"},
        {"threads": 2},
        {"precision": "64"},
        {"val": 0.1},
        {"val": 0.1, "val_rule": "released"},
        {"limit": 100},
        {"test_limit": 100},
        {"devices": 2},
        {"compile": True},
        {"channels_last": False},
        {"per_example": True},
        {"measure_every": 5},
    ],
)
def test_what_changes_numbers_or_files_changes_the_id(change):
    plain = RunConfig(val=0.1) if "val_rule" in change else RunConfig()
    assert RunConfig(**change).id != plain.id


def test_what_does_not_change_numbers_does_not_change_the_id(tmp_path):
    changes = {"root": str(tmp_path), "runs": "elsewhere", "workers": 2, "checkpoint_seconds": 0, "tensorboard": True}
    assert set(changes) == set(UNCOUNTED)
    for name, value in changes.items():
        assert RunConfig(**{name: value}).id == RunConfig().id, name


def test_a_new_option_does_not_rename_old_runs():
    @dataclass(frozen=True, kw_only=True)
    class Newer(RunConfig):
        novelty: int = 0

    assert Newer(loss="gce").id == RunConfig(loss="gce").id
    assert Newer(loss="gce", novelty=1).id != RunConfig(loss="gce").id


def test_a_transition_matrix_counts_by_content(tmp_path):
    """A run with a new matrix under the old name got the result of the old one."""
    file = tmp_path / "T.npy"
    config = RunConfig(loss=f"forward:matrix={file}")
    ids = []
    for rate in (0.1, 0.2, 0.1):
        np.save(file, np.full((10, 10), rate / 9) + np.eye(10) * (1 - rate / 0.9))
        ids.append(config.id)
    assert ids[0] == ids[2] != ids[1]


def test_a_table_counts_by_content(tmp_path, monkeypatch):
    file = tmp_path / "my.csv"
    file.write_text(TABLE, encoding="utf-8")
    here = RunConfig(data=f"table:path={file},label=kind")
    first = here.id
    file.write_text(TABLE.replace("6,", "5,"), encoding="utf-8")
    second = here.id
    assert second != first
    file.write_text(TABLE, encoding="utf-8")
    assert here.id == first
    # The same name in two roots is the same run only if the files are the same.
    (tmp_path / "other").mkdir()
    shutil.copy(file, tmp_path / "other")
    monkeypatch.chdir(tmp_path / "other" / "..")
    in_roots = [RunConfig(data="table:path=my.csv,label=kind", root=str(tmp_path / root)) for root in ("other", ".")]
    assert in_roots[0].id == in_roots[1].id
    monkeypatch.chdir("/")
    (tmp_path / "other" / "my.csv").write_text(TABLE.replace("6,", "5,"), encoding="utf-8")
    assert in_roots[0].id != in_roots[1].id
    monkeypatch.setenv("LOGITCLIP_DATA", str(tmp_path))
    assert replace(in_roots[1], root=None).id == in_roots[1].id


def test_noise_files_count_by_content(tmp_path):
    dataset = data.load("digits")
    path = tmp_path / "labels"
    config = RunConfig(noise=f"file:path={path}")
    ids = []
    for seed in (0, 1, 0):
        noise.apply("symmetric:rate=0.5", dataset, seed).save(path)
        ids.append(config.id)
    assert ids[0] != ids[1]
    assert ids[0] == ids[2]

    matrix = tmp_path / "t.npy"
    transition = RunConfig(noise=f"transition:matrix={matrix}")
    np.save(matrix, np.eye(10))
    first = transition.id
    np.save(matrix, np.full((10, 10), 0.1))
    assert transition.id != first


def test_lists_within_the_folder_count_by_content(tmp_path):
    (tmp_path / "mine").mkdir()
    names = tmp_path / "mine" / "train.txt"
    config = RunConfig(data="folder:path=mine,train_list=train.txt", root=str(tmp_path), epochs=1, lr=0.1)
    names.write_text("a.jpg 0\n", encoding="utf-8")
    first = config.id
    names.write_text("a.jpg 1\n", encoding="utf-8")
    assert config.id != first


def test_plugins_count_by_content_not_by_place(tmp_path):
    ids = []
    for place, text in (("a.py", "A = 1\n"), ("b.py", "A = 1\n"), ("c.py", "A = 2\n")):
        (tmp_path / place).write_text(text, encoding="utf-8")
        ids.append(RunConfig(plugin=(str(tmp_path / place),)).id)
    assert ids[0] == ids[1]
    assert ids[0] != ids[2]
    assert ids[0] != RunConfig().id


# -- defaults ----------------------------------------------------------------------------------------------------------


def test_everything_is_filled_in_and_stays_so():
    config = RunConfig().resolve()
    assert [f.name for f in fields(config) if getattr(config, f.name) is None] == ["root"]
    assert (config.model, config.epochs, config.lr, config.augment) == ("mlp", 150, 0.1, "none")
    assert config.resolve() == config
    assert RunConfig(**json.loads(json.dumps(asdict(config)))) == config  # as read from config.json


@pytest.mark.parametrize(
    "spec", [*(name for name in data.DATASETS if name not in ("table", "folder")), "folder:path=x"]
)
def test_settings_and_id_need_no_data(spec, monkeypatch):
    monkeypatch.setattr(data, "load", None)
    config = RunConfig(data=spec, root="/nowhere").resolve()
    assert config.resolve() == config
    assert None not in (config.model, config.epochs, config.batch_size, config.lr)
    assert len(config.id) == 16


@pytest.mark.parametrize(
    ("name", "epochs", "drops", "nesterov", "model"),
    [
        ("cifar10", 200, (80, 140), False, "wrn"),
        ("webvision", 120, (40, 80), True, "resnet"),
    ],
)
def test_the_paper_s_protocols(name, epochs, drops, nesterov, model):
    config = RunConfig(data=name).resolve()
    assert (config.model, config.epochs, config.batch_size, config.nesterov) == (model, epochs, 128, nesterov)
    assert (config.lr, config.momentum, config.weight_decay, config.drop_last) == (0.1, 0.9, 5e-4, True)
    rates = [engine.learning_rate(settings_of(config), epoch) for epoch in range(epochs)]
    changes = [epoch for epoch in range(1, epochs) if rates[epoch] != rates[epoch - 1]]
    assert tuple(changes) == drops
    assert rates[-1] == pytest.approx(0.001)


def test_defaults_may_depend_on_knobs():
    small, large = (RunConfig(data=f"webvision:size={size}").resolve() for size in (64, 256))
    assert (small.augment, small.model) == ("crop:size=56", "resnet:stem=cifar")
    assert (large.augment, large.model) == ("crop", "resnet")


def test_a_dataset_without_defaults_asks_for_what_it_needs(tmp_path):
    file = tmp_path / "own_data.py"
    file.write_text(
        "import torch\nfrom logitclip.data import DATASETS, Dataset, Split\n"
        "@DATASETS.register\ndef no_defaults(root):\n"
        "    split = Split(torch.randn(20, 3), torch.arange(20) % 2)\n"
        "    return Dataset('no_defaults', split, split, 2, ('a', 'b'))\n",
        encoding="utf-8",
    )
    config = RunConfig(data="no_defaults", plugin=(str(file),))
    with pytest.raises(ValueError, match="'no_defaults' has no default for model: give --model"):
        config.resolve()
    with pytest.raises(ValueError, match="no default for batch_size: give --batch-size"):
        replace(config, model="mlp", epochs=1).resolve()
    full = replace(config, model="mlp", epochs=1, batch_size=4, lr=0.1).resolve()
    assert (full.momentum, full.schedule, full.augment, full.drop_last) == (0.9, "multistep", "none", False)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"epochs": 0}, "epochs must be at least 1, got 0."),
        ({"batch_size": -1}, "batch_size must be at least 1, got -1."),
        ({"seed": -1}, "seed must be at least 0, got -1."),
        ({"devices": 0}, "devices must be at least 1, got 0."),
        ({"threads": 1_000_000}, "threads must be at most 1024, got 1000000."),
        ({"devices": 100_000}, "devices must be at most 1024, got 100000."),
        ({"workers": -1}, "workers must be at least 0, got -1."),
        ({"seed": 2**64}, "seed must be at most 9223372036854775807, got 18446744073709551616."),
        ({"noise_seed": 2**64}, "noise_seed must be at most 9223372036854775807, got 18446744073709551616."),
        ({"val": 1.0}, "val must be at least 0 and below 1, got 1.0."),
        ({"val": float("nan")}, "val must be at least 0 and below 1, got nan."),
        ({"checkpoint_seconds": -1}, "checkpoint_seconds must be at least 0, got -1.0."),
        ({"milestones": "80,140"}, "milestones must be shares of the epochs between 0 and 1, got (80.0, 140.0)."),
        ({"milestones": (0.5, float("nan"))}, "milestones must be shares of the epochs between 0 and 1"),
        ({"milestones": "soon"}, "milestones must be shares of the epochs, as in 0.4,0.7; got 'soon'."),
        ({"milestones": 0.5}, "milestones must be a list or None, got 0.5."),
        ({"milestones": ("a",)}, "each of milestones must be a number, got 'a'."),
        ({"epochs": "3"}, "epochs must be a whole number or None, got '3'."),
        ({"epochs": 2.5}, "epochs must be a whole number or None, got 2.5."),
        ({"lr": "fast"}, "lr must be a number or None, got 'fast'."),
        ({"lr": True}, "lr must be a number or None, got True."),
        ({"nesterov": 1}, "nesterov must be True or False or None, got 1."),
        ({"loss": 3}, "loss must be text, got 3."),
        ({"plugin": "a.py"}, "plugin must be a list, got 'a.py'."),
        ({"precision": "8"}, "precision must be one of 32, 64, bf16-mixed, 16-mixed, bf16-true; got '8'."),
        ({"schedule": "cosin"}, "schedule must be one of multistep, cosine, constant; got 'cosin'."),
    ],
)
def test_fields_out_of_range_are_refused_when_the_config_is_made(field, message):
    with pytest.raises(ValueError) as caught:
        RunConfig(**field)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"data": "digit"}, "Unknown dataset 'digit'. Did you mean 'digits'?"),
        ({"noise": "symetric:rate=0.5"}, "Unknown noise 'symetric'. Did you mean 'symmetric'?"),
        ({"loss": "gcee"}, "Unknown loss 'gcee'. Did you mean 'gce'?"),
        ({"clip": "norn:temp=1"}, "Unknown clip 'norn'. Did you mean 'norm'?"),
        ({"penalty": "nrom:weight=1"}, "Unknown penalty 'nrom'. Did you mean 'norm'?"),
        ({"method": "standart"}, "Unknown method 'standart'. Did you mean 'standard'?"),
        ({"model": "resnett"}, "Unknown model 'resnett'. Did you mean 'resnet'?"),
        ({"augment": "flipcrop"}, "Unknown augmentation 'flipcrop'. Did you mean 'flip_crop'?"),
        ({"loss": "gce:p=0.7"}, "The loss 'gce' has no knob 'p'."),
        ({"clip": "norm:temp=auto"}, "temp of the clip 'norm:temp=auto' is to be tuned"),
        ({"method": "sop", "loss": "gce"}, "The method 'sop' has its own objective and accepts only the loss ce"),
    ],
)
def test_unknown_names_are_refused_with_a_suggestion_and_before_the_data_are_read(field, message):
    with pytest.raises(ValueError) as caught:
        RunConfig(**{"data": "cifar10", "root": "/nowhere", **field}).resolve()
    assert str(caught.value).startswith(message)


def test_plugins_that_fail_say_how(tmp_path):
    with pytest.raises(ValueError, match=r"There is no plugin file /nowhere\.py\."):
        RunConfig(plugin=("/nowhere.py",)).resolve()
    (tmp_path / "notes.txt").write_text("hello", encoding="utf-8")
    with pytest.raises(ValueError, match=r"must end in \.py"):
        RunConfig(plugin=(str(tmp_path / "notes.txt"),)).resolve()
    for text, reason in (
        ("import nothing_of_that_name", "ModuleNotFoundError"),
        ("1 +", "SyntaxError"),
        ("x", "NameError"),
    ):
        file = tmp_path / f"{reason}.py"
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=f"{reason}.py cannot be imported: {reason}: "):
            RunConfig(plugin=(str(file),)).resolve()


def test_milestones_are_numbers_however_they_are_given():
    forms: list[Any] = ["0.4,0.7", (0.4, 0.7), [0.4, 0.7]]  # on the command line, in Python, in JSON
    for given in forms:
        assert RunConfig(milestones=given).milestones == (0.4, 0.7)
    assert RunConfig(milestones=()).resolve().milestones == ()
    assert RunConfig(schedule="constant").resolve().milestones == ()
    assert settings_of(RunConfig().resolve()).milestones == RunConfig().resolve().milestones == (0.4, 0.7)


# -- plugins -----------------------------------------------------------------------------------------------------------


def test_plugins_of_a_file_must_be_given_by_the_user(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_plugins((), (), "a.toml")
    check_plugins(["mine.py"], [str(tmp_path / "." / "mine.py"), "other.py"], "a.toml")
    sentence = r"^a\.toml names the plugin mine\.py, which is Python code: add --plugin mine\.py to run it\.$"
    with pytest.raises(ValueError, match=sentence):
        check_plugins(["mine.py"], ["other.py"], "a.toml")


def test_readers_import_no_plugin_and_find_the_same_run(tmp_path):
    file = tmp_path / "reader_plugin.py"
    file.write_text(
        "from logitclip.losses import loss\n"
        "@loss\ndef reader_loss(log_p, _, *, factor: float = 1.0):\n    return -factor * log_p\n",
        encoding="utf-8",
    )
    config = RunConfig(loss="reader_loss:factor=2", plugin=(str(file),))
    with plugins_ignored():
        unread = config.id
        assert "reader_loss" not in registries()["loss"]
        with pytest.raises(ValueError, match="Unknown loss 'reader_los'"):
            RunConfig(loss="reader_los").resolve()  # an error without a plugin
    assert config.id == unread
    assert "reader_loss" in registries()["loss"]


def test_a_dataset_of_a_plugin_needs_no_import_either(tmp_path):
    """If all options are given: its defaults are in the plugin."""
    file = tmp_path / "plugin_of_the_reader_data.py"
    file.write_text(
        "from logitclip import data\n"
        "@data.DATASETS.register\ndef reader_data(root, *, knob: int = 1):\n    return data.load('digits')\n",
        encoding="utf-8",
    )
    config = RunConfig(data="reader_data:knob=2", plugin=(str(file),), **data.defaults_of("cifar10"))
    with plugins_ignored():
        unread = config.id
        assert "reader_data" not in registries()["data"]
    assert config.id == unread


# -- one home for a field ----------------------------------------------------------------------------------------------


def test_every_field_says_its_group_once():
    for name, notes in annotations_of(RunConfig).items():
        assert len([note for note in notes if isinstance(note, Group)]) == 1, name
    assert set(notes_of(Group).values()) == set(Group)


def test_training_fields_have_the_type_and_the_bounds_of_settings():
    types, ours = typing.get_type_hints(Settings), field_types()
    shared = types.keys() & ours.keys() - {"penalty"}  # a spec in a run, a function in the engine
    assert len(shared) == len(types) - 1
    for name in shared:
        bounds = [
            [note for note in annotations_of(kind)[name] if isinstance(note, Limit)] for kind in (RunConfig, Settings)
        ]
        assert bounds[0] == bounds[1], name
        assert ours[name] in (types[name], types[name] | None), name


def test_a_dataset_without_defaults_gets_those_of_settings():
    defaults = notes_of(Otherwise)
    assert defaults.pop("augment").value == "none"
    assert {name: note.value for name, note in defaults.items()} == {
        name: getattr(Settings(), name) for name in defaults
    }
    assert defaults.keys() == {"momentum", "nesterov", "weight_decay", "schedule", "milestones", "drop_last"}


@pytest.mark.parametrize("name", ["lr", "momentum", "weight_decay", "grad_clip"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), 1e39])
def test_numbers_that_sgd_cannot_use_are_refused_before_a_run(name, value):
    with pytest.raises(ValueError, match=rf"^{name} must be .* finite in float32, got {re.escape(str(value))}\.$"):
        RunConfig(**{name: value})
