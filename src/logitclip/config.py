"""`RunConfig`: everything that decides a run, flat and frozen, and the id that follows from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

# Raised when the maths changes, so that old results are not taken for new ones.
PROTOCOL = 1

# Fields that do not change a number of the result.
_UNCOUNTED = ("root", "runs", "workers", "checkpoint_seconds", "tensorboard")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run. What is None is the dataset's own default; see `logitclip list data`."""

    data: str = "digits"
    """The dataset, as in cifar10 or table:path=my.csv,label=kind."""
    root: str | None = None
    """The folder with the data; $LOGITCLIP_DATA or ./data if not given."""
    noise: str = "none"
    """Label noise for the training part, as in symmetric:rate=0.5."""
    noise_seed: int = 0
    """The seed of the noise, which is a draw of its own."""
    loss: str = "ce"
    """The loss, as in gce:q=0.7."""
    clip: str = "none"
    """What is done to the logits before the loss, as in official:temp=1.5 or norm:tau=1."""
    penalty: str = "none"
    """A penalty on the logits, as in norm:weight=0.1."""
    method: str = "standard"
    """The training method."""
    model: str | None = None
    """The network, as in wrn:depth=40,width=2 or mlp:width=256,depth=3."""
    epochs: int | None = None
    """Passes over the training data."""
    batch_size: int | None = None
    """Examples in a batch, of each process."""
    lr: float | None = None
    """Learning rate of SGD at the start."""
    momentum: float | None = None
    """Momentum of SGD."""
    nesterov: bool | None = None
    """Nesterov's momentum."""
    weight_decay: float | None = None
    """Weight decay of SGD, on all parameters."""
    schedule: Literal["multistep", "cosine", "constant"] | None = None
    """How the learning rate falls: by 10 at each milestone, along a half cosine, or not."""
    milestones: str | None = None
    """When it falls, as shares of the epochs: 0.4,0.7."""
    drop_last: bool | None = None
    """Leave out a last batch that is not full."""
    augment: str | None = None
    """Augmentation of the training inputs, as in flip_crop:padding=4."""
    grad_clip: float = 0.0
    """Largest global norm of the gradient; 0: no limit."""
    seed: int = 0
    """Seed of the weights, the order and the augmentation."""
    limit: int = 0
    """Use only so many training and test examples, a fixed random choice; 0: all."""
    val: float = 0.0
    """Share of the noisy training examples held out for validation."""
    val_rule: Literal["random", "released"] = "random"
    """Held out at random and seen without augmentation, or as in the released code: the last ones, augmented."""
    precision: Literal["32", "64", "bf16-mixed", "16-mixed", "bf16-true"] = "32"
    """Numbers to compute with."""
    accelerator: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Kind of device."""
    devices: int = 1
    """Processes on this machine, one for each device."""
    nodes: int = 1
    """Machines; start one process for each device with torchrun."""
    threads: int = 1
    """CPU threads of each process. The last bits of a result depend on it."""
    compile: bool = False
    """Compile the network with torch.compile."""
    channels_last: bool = True
    """Keep images in the channels-last layout, which is faster."""
    measure_every: int = 0
    """Epochs between two measurements of what is memorised; 0: each epoch up to 20,000 examples, else each tenth."""
    per_example: bool = False
    """Also write loss, margin, prediction and first epoch learnt of every training example."""
    plugin: tuple[str, ...] = ()
    """Python files with own losses, models or datasets, imported first."""
    workers: int = 0
    """Processes that decode images from disk."""
    checkpoint_seconds: float = 15.0
    """Least time between two checkpoints; they are made at the ends of epochs. 0: after every epoch."""
    tensorboard: bool = False
    """Also write the rows for TensorBoard."""
    runs: str = "runs"
    """The folder that holds the folders of runs."""

    def __post_init__(self) -> None:
        for name, least in (("noise_seed", 0), ("seed", 0), ("limit", 0), ("devices", 1), ("nodes", 1), ("threads", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}.")
        for name in ("epochs", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if not 0 <= self.val < 1:
            raise ValueError(f"val must be at least 0 and below 1, got {self.val}.")
        if self.milestones is not None:
            parse_milestones(self.milestones)

    def resolved(self, protocol: Mapping[str, Any] | None = None) -> RunConfig:
        """The same run with the dataset's defaults filled in and every spec in its one canonical spelling.

        Args:
            protocol: the dataset's defaults, if they are at hand; else they are looked up by name.
        """
        from logitclip.clip import CLIPS, PENALTIES
        from logitclip.data import DATASETS
        from logitclip.data.augment import AUGMENTS
        from logitclip.losses import LOSSES
        from logitclip.methods import METHODS
        from logitclip.models import MODELS
        from logitclip.noise import NOISES

        load_plugins(self.plugin)
        protocol = _protocol(self.data) if protocol is None else protocol
        filled = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in filled.items():
            if value is None and name in protocol:
                value = protocol[name]
                filled[name] = ",".join(f"{m:g}" for m in value) if name == "milestones" else value
        specs = {"data": DATASETS, "noise": NOISES, "loss": LOSSES, "clip": CLIPS, "penalty": PENALTIES}
        specs |= {"method": METHODS, "model": MODELS, "augment": AUGMENTS}
        filled["method"] = _with_preset(filled["method"], filled["data"], filled["noise"])
        for name, registry in specs.items():
            filled[name] = registry.canonical(filled[name])
        method: Any = METHODS[filled["method"].partition(":")[0]]
        accepted = method.losses
        if accepted is not None and filled["loss"].partition(":")[0] not in accepted:
            raise ValueError(
                f"The method {self.method!r} has its own objective and takes the loss {' or '.join(accepted)} alone, "
                f"got {self.loss!r}."
            )
        for name in ("model", "epochs", "batch_size", "lr", "augment"):
            if filled[name] is None:
                raise ValueError(
                    f"The dataset {self.data!r} has no default for {name}: give --{name.replace('_', '-')}."
                )
        return replace(self, **filled)

    @property
    def id(self) -> str:
        """The name of the run's folder: a hash of the resolved config, the files it names, and the protocol number."""
        config = self.resolved()
        counted = {k: v for k, v in asdict(config).items() if k not in _UNCOUNTED}
        counted["files"] = {str(path): _digest(path) for path in _named_files(config)}
        text = json.dumps({"protocol": PROTOCOL, **counted}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _protocol(spec: str) -> Mapping[str, Any]:
    """The defaults that stand beside a dataset's function."""
    from logitclip.data import load

    return load(spec).protocol


def _with_preset(method: str, data: str, noise: str) -> str:
    """The method's spec with the knobs it would choose for this data and noise, where they are not given."""
    from logitclip.methods import METHODS

    name, given = METHODS.parse(method)
    chosen: Any = getattr(METHODS[name], "preset", lambda *_: {})
    preset = chosen(data, noise)
    missing = ",".join(f"{key}={value}" for key, value in preset.items() if key not in given)
    return method + (("," if ":" in method else ":") + missing if missing else "")


def load_plugins(paths: tuple[str, ...]) -> None:
    """Import own code by path, once: what it registers can then be named like everything else."""
    import importlib.util
    import sys

    for path in paths:
        file = Path(path).resolve()
        name = f"logitclip_plugin_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
        if name in sys.modules:
            continue
        if not file.is_file():
            raise ValueError(f"There is no plugin file {path}.")
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise ValueError(f"The plugin {path} is not a Python file.")
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise


def parse_milestones(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        values = (-1.0,)
    if any(not 0 <= value <= 1 for value in values):
        raise ValueError(f"milestones must be shares of the epochs between 0 and 1, as in 0.4,0.7; got {text!r}.")
    return values


def _named_files(config: RunConfig) -> list[Path]:
    """The files that the config names: plugins, and the values of knobs that are files."""
    from logitclip.data import DATASETS
    from logitclip.noise import NOISES

    root = Path(config.root or ".")
    values = list(config.plugin)
    for registry, spec in ((DATASETS, config.data), (NOISES, config.noise)):
        values += [value for value in registry.parse(spec)[1].values() if isinstance(value, str)]
    found = [path for value in values for path in (Path(value), Path(value + ".npz"), root / value) if path.is_file()]
    return sorted(set(found))


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
