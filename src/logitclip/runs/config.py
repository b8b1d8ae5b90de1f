"""`RunConfig`: all options of a run, flat and frozen, and the id derived from them."""

from __future__ import annotations

import enum
import functools
import hashlib
import json
import os
import time
import types
import typing
import warnings
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from logitclip.files import Json, sha256_once
from logitclip.methods import settings
from logitclip.methods.settings import Limit, Settings, annotations_of, at_least, at_most, check_bounds
from logitclip.registry import Registry
from logitclip.runs.plugins import imports_plugins, load_plugins

# Increased when the maths changes, so that old results are not reused. If only one method changes, raise
# its `revision` where it is registered instead: then only its own runs are repeated. So does a changed default.
PROTOCOL = 2

N = TypeVar("N")


class Group(enum.Enum):
    """A note in the annotation of a field: the group of options that it belongs to on the command line."""

    DATA = "data"
    NOISE = "noise"
    LOSS = "clip and loss"
    NETWORK = "network"
    OPTIMISATION = "optimisation"
    RUNNING = "running"


class Note(enum.Enum):
    """Other notes in the annotation of a field."""

    UNCOUNTED = enum.auto()  # it changes no number of the result, and is not part of the id
    TUNABLE = enum.auto()  # a spec, in which one number may be the word `grid` or `auto`


@dataclass(frozen=True)
class Otherwise:
    """A note in the annotation of a field: its value if neither the user nor the dataset gives one."""

    value: object


DATA, NOISE, LOSS, NETWORK, OPTIMISATION, RUNNING = Group
BELOW_ONE = Limit("at least 0 and below 1", lambda value: 0 <= value < 1)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run. None means the dataset's own default; see `logitclip list data`.

    Raises:
        ValueError: If a value has the wrong type or is out of range.

    >>> config = RunConfig(data="digits", noise="symmetric:rate=0.5", clip="norm:temp=1.5")
    >>> config.resolve().epochs
    150
    """

    data: Annotated[str, DATA] = "digits"
    """The dataset, as in cifar10 or table:path=my.csv,label=kind."""
    encoder: Annotated[str, DATA] = "none"
    """A pretrained encoder of images or texts, as in hf:FOLDER; the network then trains on its features."""
    root: Annotated[str | None, DATA, Note.UNCOUNTED] = None
    """The folder with the data; $LOGITCLIP_DATA or ./data if not given."""
    noise: Annotated[str, NOISE] = "none"
    """Label noise of the training set, as in symmetric:rate=0.5."""
    noise_seed: Annotated[settings.Seed, NOISE] = 0
    """Seed of the label noise, independent of --seed."""
    loss: Annotated[str, LOSS, Note.TUNABLE] = "ce"
    """The loss, as in gce:q=0.7."""
    clip: Annotated[str, LOSS, Note.TUNABLE] = "none"
    """The clip of the logits before the loss, as in norm:temp=1.5 or norm:tau=1."""
    balance: Annotated[bool, LOSS] = False
    """Weight each class by the inverse of its share of the training labels, at most tenfold."""
    penalty: Annotated[str, LOSS, Note.TUNABLE] = "none"
    """A penalty on the logits, as in norm:weight=0.1."""
    method: Annotated[str, OPTIMISATION, Note.TUNABLE] = "standard"
    """The training method."""
    model: Annotated[str | None, NETWORK, Note.TUNABLE] = None
    """The network, as in wrn:depth=40,width=2 or mlp:width=256,depth=3."""
    epochs: Annotated[settings.Count | None, OPTIMISATION] = None
    """Passes over the training data."""
    batch_size: Annotated[settings.Count | None, OPTIMISATION] = None
    """Examples per batch in each process."""
    lr: Annotated[settings.Positive | None, OPTIMISATION] = None
    """Learning rate of SGD at the start."""
    momentum: Annotated[settings.Strength | None, OPTIMISATION, Otherwise(Settings.momentum)] = None
    """Momentum of SGD."""
    nesterov: Annotated[bool | None, OPTIMISATION, Otherwise(Settings.nesterov)] = None
    """Nesterov's momentum."""
    weight_decay: Annotated[settings.Strength | None, OPTIMISATION, Otherwise(Settings.weight_decay)] = None
    """Weight decay of SGD, on all parameters."""
    schedule: Annotated[settings.Schedule | None, OPTIMISATION, Otherwise(Settings.schedule)] = None
    """Schedule of the learning rate: divide by 10 at each milestone, follow a half cosine, or keep it constant."""
    milestones: Annotated[settings.Milestones | None, OPTIMISATION, Otherwise(Settings.milestones)] = None
    """Milestones of the schedule multistep, as shares of the epochs: 0.4,0.7."""
    drop_last: Annotated[bool | None, OPTIMISATION, Otherwise(Settings.drop_last)] = None
    """Drop an incomplete last batch."""
    augment: Annotated[str | None, DATA, Otherwise("none")] = None
    """Augmentation of the training inputs, as in flip_crop:padding=4."""
    grad_clip: Annotated[settings.Strength, OPTIMISATION] = 0.0
    """Largest global norm of the gradient; 0: no limit."""
    seed: Annotated[settings.Seed, OPTIMISATION] = 0
    """Seed of the weights, the order and the augmentation."""
    limit: Annotated[settings.Whole, DATA] = 0
    """Train on only this many examples, a fixed random choice; 0: all."""
    test_limit: Annotated[settings.Whole, DATA] = 0
    """Test on only this many examples, a fixed random choice; 0: all."""
    val: Annotated[float, BELOW_ONE, DATA] = 0.0
    """Share of the noisy training examples held out for validation."""
    val_rule: Annotated[Literal["random", "released"], DATA] = "random"
    """Hold out random examples without augmentation, or, like the released code, the last ones with augmentation."""
    precision: Annotated[Literal["32", "64", "bf16-mixed", "16-mixed", "bf16-true"], RUNNING] = "32"
    """Floating-point precision."""
    accelerator: Annotated[Literal["auto", "cpu", "cuda", "mps"], RUNNING] = "auto"
    """Kind of device."""
    devices: Annotated[int, at_least(1), at_most(1024), RUNNING] = 1
    """Processes on this machine, one for each device."""
    nodes: Annotated[int, at_least(1), at_most(65536), RUNNING] = 1
    """Machines; start one process for each device with torchrun."""
    threads: Annotated[settings.Threads, RUNNING] = 1
    """CPU threads of each process. The last bits of a result depend on it."""
    compile: Annotated[bool, RUNNING] = False
    """Compile the network with torch.compile."""
    deterministic: Annotated[bool, RUNNING] = False
    """Use only deterministic algorithms, so that a GPU repeats a run bit for bit; slower."""
    channels_last: Annotated[bool, RUNNING] = True
    """Keep images in the channels-last layout, which is faster."""
    measure_every: Annotated[settings.Whole, RUNNING] = 0
    """Epochs between two measurements of memorised labels; 0: 1 up to 20,000 examples, else 10."""
    per_example: Annotated[bool, RUNNING] = False
    """Also write loss, margins, prediction and first epoch learnt of every training example, and test predictions."""
    plugin: Annotated[tuple[str, ...], RUNNING] = ()
    """Python files with your own losses, models or datasets, imported first."""
    workers: Annotated[settings.Workers, RUNNING, Note.UNCOUNTED] = 0
    """Processes that decode images from disk."""
    checkpoint_seconds: Annotated[float, at_least(0), RUNNING, Note.UNCOUNTED] = 15.0
    """Minimum seconds between two checkpoints, which are saved at the end of an epoch; 0: after every epoch."""
    tensorboard: Annotated[bool, RUNNING, Note.UNCOUNTED] = False
    """Also log to TensorBoard."""
    runs: Annotated[str, RUNNING, Note.UNCOUNTED] = "runs"
    """The folder for all runs."""

    def __post_init__(self) -> None:
        if isinstance(self.milestones, str):
            try:
                shares = tuple(float(part) for part in self.milestones.split(",") if part.strip())
            except ValueError:
                raise ValueError(
                    f"milestones must be shares of the epochs, as in 0.4,0.7; got {self.milestones!r}."
                ) from None
            object.__setattr__(self, "milestones", shares)
        for name, hint in field_types().items():
            object.__setattr__(self, name, check_type(name, hint, getattr(self, name)))
        check_bounds(self)

    def resolved(self) -> RunConfig:
        """Do what `resolve` does, under its old name, until version 0.3."""
        warnings.warn("RunConfig.resolved is called resolve now.", DeprecationWarning, stacklevel=2)
        return self.resolve()

    def resolve(self) -> RunConfig:
        """Return the run with the dataset's defaults filled in and every spec in canonical form. Reads no data.

        Raises:
            ValueError: For an unknown name or knob, a number that is still to be tuned, a combination that cannot be
                trained, or a dataset that has no default for an option that was not given.
        """
        from logitclip.data import defaults_of
        from logitclip.encoders import HEAD
        from logitclip.methods import METHODS

        load_plugins(self.plugin)
        all_known = not self.plugin or imports_plugins()  # if not, unknown names may belong to a plugin
        require_numbers(self)
        filled = dict(vars(self))
        filled["encoder"] = encoder_spec(self)
        for name, registry in registries().items():
            if filled[name] is not None and (all_known or registry.knows(filled[name])):
                filled[name] = registry.canonical(filled[name])
        method: Any = None
        if all_known or METHODS.knows(self.method):
            filled["method"] = _with_preset(self.method, self.data, self.noise)
            method = METHODS[filled["method"].partition(":")[0]]
        accepted = getattr(method, "losses", None)
        if accepted is not None and filled["loss"].partition(":")[0] not in accepted:
            raise ValueError(
                f"The method {self.method!r} has its own objective and accepts only the loss {' or '.join(accepted)}, "
                f"got {self.loss!r}."
            )
        if self.devices * self.nodes > 1 and not getattr(method, "distributed", True):
            raise ValueError(f"The method {self.method!r} trains in one process: devices and nodes must be 1.")
        missing = [name for name, value in filled.items() if value is None and name != "root"]
        if missing:
            known = all_known or registries()["data"].knows(filled["data"])
            own = HEAD if self.encoder != "none" else defaults_of(filled["data"]) if known else {}
            defaults = {**{name: note.value for name, note in notes_of(Otherwise).items()}, **own}
            for name in missing:
                if name not in defaults:
                    raise ValueError(
                        f"The dataset {self.data!r} has no default for {name}: give --{name.replace('_', '-')}."
                    )
                value = defaults[name]
                filled[name] = registries()[name].canonical(value) if name in registries() else value
        if self.encoder != "none" and filled["augment"] != "none":
            raise ValueError(
                f"An encoder computes the features once, without augmentation: leave out {self.augment!r}."
            )
        shares = sorted(filled["milestones"]) if filled["schedule"] == "multistep" else ()
        filled["milestones"] = tuple(float(f"{share:g}") for share in shares)
        return replace(self, **filled)

    @property
    def id(self) -> str:
        """The name of the run's folder: a hash of the resolved config, the files it names, and the protocol number."""
        return resolved_id(self.resolve())


def notes_of(kind: type[N]) -> dict[str, N]:
    """Return the note of this type in the annotation of each field of `RunConfig` that has one.

    >>> notes_of(Group)["lr"]
    <Group.OPTIMISATION: 'optimisation'>
    """
    every = annotations_of(RunConfig).items()
    return {name: note for name, notes in every for note in notes if isinstance(note, kind)}


def _fields_with(note: Note) -> tuple[str, ...]:
    return tuple(name for name, notes in annotations_of(RunConfig).items() if note in notes)


UNCOUNTED, TUNABLE = _fields_with(Note.UNCOUNTED), _fields_with(Note.TUNABLE)


def resolved_id(config: RunConfig) -> str:
    """Return the id of a resolved config."""
    # Only values that differ from the defaults, so that a new option does not change the ids of earlier runs.
    changed = {f.name: getattr(config, f.name) for f in fields(config) if getattr(config, f.name) != f.default}
    counted = {name: value for name, value in changed.items() if name not in UNCOUNTED}
    if not config.val:
        counted.pop("val_rule", None)  # nothing is held out
    counted["milestones"] = ",".join(f"{share:g}" for share in config.milestones or ())
    counted["plugin"] = _digests_of_plugins(config)
    if config.encoder != "none":
        counted["encoder"] = identity_of_encoder(config)
    counted["files"] = _digests_of_files(config, [name for name in registries() if name != "encoder"])
    revisions = {
        field: revision
        for field, registry in registries().items()
        if (revision := registry.revision(getattr(config, field) or ""))
    }
    if revisions:  # only then, so that the ids of all other runs stay
        counted["revisions"] = revisions
    if images := _digest_of_images(config):
        counted["images"] = images
    text = json.dumps({"protocol": PROTOCOL, **counted}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def identify_data(config: RunConfig) -> tuple[str, ...]:
    """Return what the examples and labels of a resolved config depend on: fields, and the content of files."""
    names = ("data", "root", "encoder", "accelerator", "noise", "noise_seed", "limit", "test_limit")
    values = [str(getattr(config, name)) for name in names]
    if config.encoder != "none":
        from logitclip.encoders.features import cache_folder

        values += [json.dumps(identity_of_encoder(config)), str(cache_folder())]
    read = json.dumps(_digests_of_files(config, ["data", "noise"]))
    return (*values, *_digests_of_plugins(config), read, _digest_of_images(config))


def _digests_of_plugins(config: RunConfig) -> list[str]:
    return [sha256_once(Path(os.path.expanduser(path))) for path in config.plugin]


def _digests_of_files(config: RunConfig, specs: list[str]) -> dict[str, str]:
    """Return the digests of the files that these specs of a resolved config name."""
    return {
        file: digest
        for field in specs
        for file, digest in _digests_of_spec(registries()[field], getattr(config, field), config.root).items()
    }


def encoder_spec(config: RunConfig) -> str:
    """Return the encoder of a run, and for auto the one that it stands for."""
    from logitclip.encoders import AUTO_ENCODERS

    if config.encoder != "auto":
        return config.encoder
    return AUTO_ENCODERS["texts" if registries()["data"].split(config.data)[1].get("text") else "images"]


def identity_of_encoder(config: RunConfig) -> Json:
    """Return what the id of a run holds of its encoder: its spec without its place, and the digests of its files.

    An encoder of a plugin counts by its spec and by the files that the spec names: the plugin itself is in the id, and
    commands that only read do not import it.
    """
    from logitclip.encoders import identify, is_ours

    if is_ours(config.encoder):
        return identify(config.encoder)
    return {"spec": config.encoder, "files": _digests_of_spec(registries()["encoder"], config.encoder, config.root)}


@functools.cache
def registries() -> dict[str, Registry]:
    """Return the registry of each field that holds a spec: the one table of registries."""
    from logitclip.clip import CLIPS, PENALTIES
    from logitclip.data import DATASETS
    from logitclip.data.augment import AUGMENTS
    from logitclip.encoders import ENCODERS
    from logitclip.losses import LOSSES
    from logitclip.methods import METHODS
    from logitclip.models import MODELS
    from logitclip.noise import NOISES

    return {
        "data": DATASETS,
        "encoder": ENCODERS,
        "noise": NOISES,
        "loss": LOSSES,
        "clip": CLIPS,
        "penalty": PENALTIES,
        "method": METHODS,
        "model": MODELS,
        "augment": AUGMENTS,
    }


def words_to_tune(config: RunConfig) -> list[tuple[str, str, str]]:
    """Find the knobs with the word `grid` or `auto` in a config: (field, knob, word) each.

    >>> words_to_tune(RunConfig(clip="norm:temp=auto"))
    [('clip', 'temp', 'auto')]

    Raises:
        ValueError: If there are several, other than one `auto` of the loss and one of the clip.
    """
    found = [
        (field, knob, word)
        for field in TUNABLE
        if "grid" in (spec := getattr(config, field) or "") or "auto" in spec
        for knob, word in registries()[field].split(spec)[1].items()
        if word in ("grid", "auto")
    ]
    if len(found) > 1 and [(field, word) for field, _, word in found] != [("loss", "auto"), ("clip", "auto")]:
        raise ValueError(
            f"One number can be tuned at a time, got {' and '.join(f'{f}.{k}' for f, k, _ in found)}; only a knob of "
            "the loss and one of the clip may both be `auto`."
        )
    return found


def require_numbers(config: RunConfig) -> None:
    """Raise a ValueError if a number is still to be tuned."""
    for field, knob, _ in words_to_tune(config):
        raise ValueError(
            f"{knob} of the {field} {getattr(config, field)!r} is to be tuned, but a run needs a number: give one, "
            f"or use `logitclip tune` or a sweep."
        )


@functools.cache
def field_types() -> dict[str, Any]:
    """Return the type of each field of `RunConfig`, without the notes in its annotation."""
    return typing.get_type_hints(RunConfig)


def check_type(name: str, hint: Any, value: Any) -> Any:
    """Return `value` if it has the annotated type of the field `name`; an int is accepted for a float."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = typing.get_args(hint) if union else (hint,)
    for kind in kinds:
        origin, choices = typing.get_origin(kind) or kind, typing.get_args(kind)
        if origin is Literal:
            if value in choices:
                return value
            if value is not None:
                raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}.")
        elif origin is tuple:
            if isinstance(value, list | tuple):
                return tuple(check_type(f"each of {name}", choices[0], item) for item in value)
        elif origin is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        elif isinstance(value, origin) and (origin is bool or not isinstance(value, bool)):
            return value
    words = {int: "a whole number", float: "a number", bool: "True or False", str: "text", types.NoneType: "None"}
    wanted = " or ".join(words.get(kind, "a mapping" if "dict" in str(kind) else "a list") for kind in kinds)
    raise ValueError(f"{name} must be {wanted}, got {value!r}.")


def _with_preset(method: str, data: str, noise: str) -> str:
    """Return the method's canonical spec; its presets for this data and noise fill in knobs that are not given."""
    from logitclip.methods import METHODS

    name, given = METHODS.parse(method)
    chosen: Any = getattr(METHODS[name], "preset", lambda *_: {})
    preset = chosen(data, noise)
    spec = METHODS.canonical(METHODS.format(name, {**preset, **given}))
    # The canonical spec leaves out knobs at their default. A default that overrides a preset must stay in it, or the
    # preset would be used when the spec is read again.
    shown = METHODS.parse(spec)[1]
    against = {k: given[k] for k in preset if k in given and k not in shown and given[k] != preset[k]}
    return METHODS.format(name, {**shown, **against}) if against else spec


def _digests_of_spec(registry: Registry, spec: str, root: str | None) -> dict[str, str]:
    """Return the digests of the files that a spec names, by the values that name them.

    Files are found as the data and noise functions find them: as written, in the root, and in the folder of a `path`.
    """
    from logitclip.data.dataset import data_folder

    # The name may be that of a plugin that is not imported here.
    knobs = registry.parse(spec)[1] if registry.knows(spec) else registry.split(spec)[1]
    folders = [Path(), data_folder(root)]
    if isinstance(knobs.get("path"), str):
        folders += [folder / knobs["path"] for folder in folders]
    found = {}
    for value in knobs.values():
        if isinstance(value, str):
            names = (value, f"{value}.npz")
            files = (folder / os.path.expanduser(name) for folder in folders for name in names)
            file = next((file for file in files if file.is_file()), None)
            if file is not None:
                found[value] = sha256_once(file)
    return found


LISTED = 10.0  # a listing of files is reused for this many times the seconds that it took
_listings: dict[tuple[str, str], tuple[float, str]] = {}


def _digest_of_images(config: RunConfig) -> str:
    """Return the digest of names, sizes and times of your own image files; empty for other data.

    A million files take seconds to list, and an id is asked for often: a listing is used again for a while.
    """
    from logitclip.data.dataset import data_folder, describe_files

    place = config.data, str(data_folder(config.root).resolve())
    until, digest = _listings.get(place, (0.0, ""))
    if time.monotonic() >= until:
        started = time.monotonic()
        found, count = hashlib.sha256(), 0
        for line in describe_files(config.data, config.root):
            found.update(line)
            count += 1
        digest = found.hexdigest() if count else ""
        ended = time.monotonic()
        _listings[place] = ended + LISTED * (ended - started), digest
    return digest
