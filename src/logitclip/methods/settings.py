"""`Settings`: how to train. The type and the bounds of each field stand in its annotation, here and in `RunConfig`."""

from __future__ import annotations

import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

LARGEST_FLOAT32 = 3.4028234663852886e38  # torch is not imported here: the command line reads this module


@dataclass(frozen=True)
class Limit:
    """A note in the annotation of a field: what its value must be, in words, and the test of it.

    >>> at_least(1).words, at_least(1).allows(0)
    ('at least 1', False)
    """

    words: str
    allows: Callable[[Any], bool]


def at_least(least: int) -> Limit:
    return Limit(f"at least {least}", lambda value: value >= least)


def at_most(most: int) -> Limit:
    return Limit(f"at most {most}", lambda value: value <= most)


FINITE = Limit("at least 0 and finite in float32", lambda value: 0 <= value < LARGEST_FLOAT32)
POSITIVE = Limit("positive and finite in float32", lambda value: 0 < value < LARGEST_FLOAT32)
SHARES = Limit("shares of the epochs between 0 and 1", lambda values: all(0 <= share <= 1 for share in values))

Count = Annotated[int, at_least(1)]
Seed = Annotated[int, at_least(0), at_most(2**63 - 1)]
Positive = Annotated[float, POSITIVE]
Strength = Annotated[float, FINITE]
Schedule = Literal["multistep", "cosine", "constant"]
Milestones = Annotated[tuple[float, ...], SHARES]
Workers = Annotated[int, at_least(0), at_most(1024)]
Threads = Annotated[int, at_least(1), at_most(1024)]
Whole = Annotated[int, at_least(0)]


@dataclass(frozen=True)
class Settings:
    """How to train. The fields have the same meaning as in `RunConfig`.

    Attributes:
        epochs: Passes over the training data.
        batch_size: Examples of one step in each process.
        lr: Learning rate of the first epoch.
        momentum: Momentum of SGD.
        nesterov: Use Nesterov momentum.
        weight_decay: Weight decay of SGD.
        schedule: "multistep", "cosine" or "constant", see `logitclip.engine.learning_rate`.
        milestones: Milestones of the schedule "multistep", as shares of the epochs.
        grad_clip: Largest global norm of the gradient; 0: no limit.
        penalty: A function of a batch's logits [N, K], or of the parameters, to a scalar that is added to the loss.
        drop_last: Drop an incomplete last batch.
        seed: Seed of the weights, the order and the augmentation.
        channels_last: Keep images in the channels-last layout.
        compile: Compile the network with torch.compile.
        workers: Workers that decode image files.
        threads: CPU threads of this process.
        per_example: Record loss, margin and prediction of every training example.
        measure_every: Epochs between two measurements of memorisation; 0: 1 up to 20,000 examples, else 10.

    Raises:
        ValueError: If a number is out of range, the schedule is unknown, or Nesterov momentum has no momentum.

    >>> Settings(epochs=5, lr=0.05).schedule
    'multistep'
    """

    epochs: Count = 150
    batch_size: Count = 128
    lr: Positive = 0.1
    momentum: Strength = 0.9
    nesterov: bool = False
    weight_decay: Strength = 0.0
    schedule: Schedule = "multistep"
    milestones: Milestones = (0.4, 0.7)
    grad_clip: Strength = 0.0
    penalty: Callable[[Any], Any] | None = None
    drop_last: bool = False
    seed: Seed = 0
    channels_last: bool = True
    compile: bool = False
    workers: Workers = 0
    threads: Threads = 1
    per_example: bool = False
    measure_every: Whole = 0

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.schedule not in typing.get_args(Schedule):
            raise ValueError(f"schedule must be multistep, cosine or constant, got {self.schedule!r}.")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0.")


def check_bounds(options: object) -> None:
    """Check the fields of a dataclass against the bounds in their annotations; None is not checked.

    Raises:
        ValueError: If a value is out of bounds.
    """
    for name, notes in annotations_of(type(options)).items():
        value = getattr(options, name)
        if value is None:
            continue
        for note in notes:
            if isinstance(note, Limit) and not note.allows(value):
                raise ValueError(f"{name} must be {note.words}, got {value}.")


@cache
def annotations_of(kind: type) -> dict[str, tuple[Any, ...]]:
    """Return what the annotation of each field of a dataclass says besides its type: bounds, and other notes.

    >>> [note.words for note in annotations_of(Settings)["threads"]]
    ['at least 1', 'at most 1024']
    """
    return {name: _notes(hint) for name, hint in typing.get_type_hints(kind, include_extras=True).items()}


def _notes(hint: Any) -> tuple[Any, ...]:
    own = hint.__metadata__ if typing.get_origin(hint) is Annotated else ()
    inner = typing.get_args(hint)[:1] if own else typing.get_args(hint)
    return (*(note for part in inner for note in _notes(part)), *own)
