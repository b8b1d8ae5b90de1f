"""The content of model.json: its keys with their types and ranges, and the digests of the files beside it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeGuard

from logitclip.files import Json, object_digest

Facts = Json  # the content of model.json, or what a learner or a kind of data has in it

FORMAT = 2
WITHOUT_DIGESTS = 1  # the format of version 0.1


@dataclass(frozen=True)
class Fact:
    """A key of model.json: a test of its value, and what the value must be, in words."""

    holds: Callable[[object], bool]
    what: str
    optional: bool = False  # may be missing, as in folders of older versions


def is_text(value: object) -> bool:
    return isinstance(value, str)


def is_real(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_share(value: object) -> bool:
    return is_real(value) and 0 <= value <= 1


def is_list_of(holds: Callable[[object], bool], least: int = 0) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and len(value) >= least and all(map(holds, value))


def is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _or_none(holds: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or holds(value)


def _is_noise(value: object) -> bool:
    matrices = ("matrix", "matrix_lower", "matrix_upper")
    return (
        isinstance(value, dict)
        and is_text(value.get("from"))
        and all(is_share(value.get(name)) for name in ("rate", "at_most"))
        and is_list_of(is_share, 2)(value.get("rate_interval"))
        and all(_or_none(is_list_of(is_list_of(is_share)))(value.get(name)) for name in matrices)
    )


def _are_names(value: object) -> bool:
    return isinstance(value, list) and is_list_of(is_text, 2)(value) and len({*value}) == len(value)


def _is_learner(value: object) -> bool:
    return isinstance(value, dict) and is_text(value.get("name")) and is_share(value.get("weight"))


FACTS: Mapping[str, Fact] = {
    "kind": Fact(is_text, "a text"),
    "class_names": Fact(_are_names, "at least two different names"),
    "label": Fact(_or_none(is_text), "the name of a column, or null"),
    "label_type": Fact(lambda v: v in ("text", "int", "float", "bool"), "text, int, float or bool", optional=True),
    "learners": Fact(is_list_of(_is_learner, 1), "a list of objects with name and weight", optional=True),
    "mean": Fact(is_list_of(is_real), "a list of numbers", optional=True),
    "std": Fact(is_list_of(lambda v: is_real(v) and v > 0), "a list of positive numbers", optional=True),
    "size": Fact(is_whole, "a whole number", optional=True),
    "image": Fact(_or_none(is_text), "the name of a column, or null", optional=True),
    "temperature": Fact(lambda v: is_real(v) and v > 0, "a positive number"),
    "log_prior": Fact(is_list_of(is_real, 2), "a list of numbers"),
    "noisy_accuracy": Fact(is_share, "a number from 0 to 1"),
    "val_accuracy": Fact(is_share, "a number from 0 to 1", optional=True),
    "test_accuracy": Fact(is_share, "a number from 0 to 1", optional=True),
    "rules": Fact(is_share, "a number from 0 to 1", optional=True),
    "largest_share": Fact(is_share, "a number from 0 to 1", optional=True),
    "learnt": Fact(lambda v: isinstance(v, bool), "true or false", optional=True),
    "noise": Fact(_is_noise, "an object with from, rate, rate_interval, at_most and the matrices"),
    "clip": Fact(is_text, "the spec of a clip"),
    "versions": Fact(lambda v: isinstance(v, dict), "an object"),
    # of version 0.1, whose models were one network
    "model": Fact(is_text, "the spec of a network", optional=True),
    "input_shape": Fact(is_list_of(lambda v: is_whole(v) and v > 0, 1), "a list of positive numbers", optional=True),
    "augment": Fact(is_text, "the spec of an augmentation", optional=True),
}


def check_facts(facts: object) -> None:
    """Check the keys of model.json, their types and ranges.

    Args:
        facts: The content of the file. Keys that are not in `FACTS` are not checked.

    Raises:
        ValueError: If it is no object of a known format, a key is missing or a value is not what it must be.

    >>> check_facts({"format": 3})
    Traceback (most recent call last):
    ...
    ValueError: its format is 3, not 2
    """
    if not isinstance(facts, dict):
        raise ValueError("model.json holds no object")
    if facts.get("format") not in (WITHOUT_DIGESTS, FORMAT):
        raise ValueError(f"its format is {facts.get('format')!r}, not {FORMAT}")
    for name, fact in FACTS.items():
        if name not in facts:
            if not fact.optional:
                raise ValueError(f"model.json has no {name!r}")
        elif not fact.holds(facts[name]):
            raise ValueError(f"in model.json {name!r} must be {fact.what}, not {_short(facts[name])}")
    classes = len(facts["class_names"])
    if len(facts["log_prior"]) != classes:
        raise ValueError(f"in model.json 'log_prior' must have a number for each of the {classes} classes")
    if facts["format"] == FORMAT:
        _check_digests(facts)


def upgrade(facts: Facts) -> Facts:
    """Return the facts of an older model in the words of this version; that of version 0.1 was one network."""
    facts = {"label_type": "text", **facts}
    if "learners" in facts:
        return facts
    missing = [name for name in ("model", "input_shape", "augment") if name not in facts]
    if missing:
        raise ValueError(f"model.json has neither 'learners' nor {missing[0]!r}")
    recipe = {"model": facts["model"], "augment": facts["augment"], "epochs": 1, "batch_size": 1, "lr": 0.1}
    network = {"name": "network", "weight": 1.0, "recipe": recipe, "input_shape": facts["input_shape"]}
    return {**facts, "learners": [network]}


def _check_digests(facts: Facts) -> None:
    digests = facts.get("files")
    if not isinstance(digests, dict) or not all(map(is_text, digests.values())):
        raise ValueError("in model.json 'files' must give the digest of each file")
    odd = [name for name in digests if "/" in name or "\\" in name or name in ("", ".", "..")]
    if odd:
        raise ValueError(f"in model.json 'files' names {odd[0]!r}, which is no file of the folder")
    if facts.get("digest") != object_digest(facts):
        raise ValueError("model.json does not have the digest it names: it was changed after `fit` wrote it")


def check_file(name: str, content: bytes, facts: Facts) -> None:
    """Raise a ValueError unless a file of the model folder has the digest that `facts` names; old folders name none."""
    if facts["format"] == FORMAT and hashlib.sha256(content).hexdigest() != facts["files"].get(name):
        raise ValueError(f"{name} does not have the digest in model.json: it is damaged, or of another model")


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
