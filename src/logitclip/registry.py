"""Everything that has a name on the command line: registries and spec strings.

A *spec* is ``"name"`` or ``"name:key=value,key=value"``: ``"gce:q=0.7"``, ``"symmetric:rate=0.5"``. The keys, called
*knobs*, are the keyword-only parameters of the registered function, so a function's signature is its whole declaration.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import math
import pkgutil
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from logitclip.text import join_names

__all__ = ["Knob", "Registry", "UnknownName"]

F = typing.TypeVar("F", bound=Callable[..., Any])


def suggest(name: str, known: typing.Iterable[str]) -> str:
    """Return the end of an error message about an unknown name: a near miss, an abbreviation of it, or the list.

    >>> suggest("GCEE", ["ce", "gce"]), suggest("cross_entropy", ["ce", "gce"])
    ("Did you mean 'gce'?", "Did you mean 'ce'?")
    """
    known = sorted(known)
    by_lower_case = {word.lower(): word for word in known}
    near = difflib.get_close_matches(name.lower(), by_lower_case, n=1, cutoff=0.6)
    initials = "".join(word[0] for word in re.findall("[a-z]+", name.lower()))
    if not near and initials in by_lower_case:
        near = [initials]
    if near:
        return f"Did you mean {by_lower_case[near[0]]!r}?"
    return f"Known: {join_names(known)}." if known else "It takes none."


class UnknownName(ValueError):
    """A registry does not have this name.

    Args:
        kind: What the registry holds, such as "loss".
        name: The unknown name.
        known: The names to suggest.

    >>> print(UnknownName("loss", "gcee", ["ce", "gce"]))
    Unknown loss 'gcee'. Did you mean 'gce'?
    """

    def __init__(self, kind: str, name: str, known: typing.Iterable[str]) -> None:
        self.kind, self.name, self.known = kind, name, tuple(known)
        super().__init__(f"Unknown {kind} {name!r}. {suggest(name, self.known)}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.kind, self.name, self.known)  # it may come from another process


@dataclass(frozen=True)
class Knob:
    """One keyword-only parameter of a registered function.

    Attributes:
        name: Its name.
        annotation: Its type.
        default: Its default; `inspect.Parameter.empty` if the knob must be given.

    >>> Knob("q", float, 0.7).required
    False
    """

    name: str
    annotation: Any
    default: Any

    @property
    def required(self) -> bool:
        """Whether the knob must be given."""
        return self.default is inspect.Parameter.empty


def attach(**facts: Any) -> Callable[[F], F]:
    """Return a decorator that gives a function these attributes.

    >>> @attach(epochs=30)
    ... def wine(root): ...
    >>> wine.epochs
    30
    """

    def decorate(function: F) -> F:
        vars(function).update(facts)
        return function

    return decorate


@dataclass
class Registry:
    """Functions by name.

    Attributes:
        kind: What the functions are, for messages: "loss", "noise".
        injected: Keyword-only parameters that code supplies, so they are not knobs.
        package: All its modules are imported before the first look-up, so that they can register their functions.

    >>> shapes = Registry("shape")
    >>> @shapes.register
    ... def circle(*, radius: float = 1.0):
    ...     return 3.14 * radius**2
    >>> list(shapes), shapes.parse("circle:radius=2"), shapes.build("circle:radius=2")()
    (['circle'], ('circle', {'radius': 2.0}), 12.56)
    """

    kind: str
    injected: tuple[str, ...] = ()
    package: str = ""
    _entries: dict[str, Callable[..., Any]] = field(default_factory=dict, init=False)
    _revisions: dict[str, int] = field(default_factory=dict, init=False)

    def register(self, function: F, name: str | None = None, *, revision: int = 0) -> F:
        """Add a function; usable as a decorator.

        Args:
            function: The function or class.
            name: Its name in specs; by default its own.
            revision: Raised when the results of this entry change, and of no other: a revision above 0 is part of the
                ids of runs that use it, so that old results are not taken for new ones.

        Returns:
            The function.

        Raises:
            ValueError: If the name is taken.
        """
        name = name or function.__name__
        if name in self._entries:
            raise ValueError(f"The {self.kind} {name!r} is registered already; choose another name.")
        self._entries[name] = function
        self._revisions[name] = revision
        return function

    def __iter__(self) -> Iterator[str]:
        self._load()
        return iter(sorted(self._entries))

    def __contains__(self, name: str) -> bool:
        self._load()
        return name in self._entries

    def __getitem__(self, name: str) -> Callable[..., Any]:
        self._load()
        if name not in self._entries:
            raise UnknownName(self.kind, name, self._entries)
        return self._entries[name]

    def revision(self, spec: str) -> int:
        """Return the revision of the entry that a spec names; 0 for an unknown one."""
        self._load()
        return self._revisions.get(spec.partition(":")[0].strip(), 0)

    def knows(self, spec: str) -> bool:
        """Return whether the name of a spec is registered."""
        return spec.partition(":")[0].strip() in self

    def knobs(self, name: str) -> dict[str, Knob]:
        """Return the knobs of a name: the keyword-only parameters of its function, in order."""
        function = self[name]
        hints = typing.get_type_hints(function.__init__ if inspect.isclass(function) else function)
        return {
            p.name: Knob(p.name, hints.get(p.name, Any), p.default)
            for p in inspect.signature(function).parameters.values()
            if p.kind is p.KEYWORD_ONLY and p.name not in self.injected
        }

    def split(self, spec: str) -> tuple[str, dict[str, str]]:
        """Split a spec into its name and its knobs as written, without checking them.

        One bare value stands for the first knob: ``"timm:resnet18"`` is ``"timm:name=resnet18"``. A first knob whose
        default is None must be named: the 1.5 of ``"norm:1.5"`` might be tau or temp.

        Raises:
            ValueError: If the spec is not of the form ``name:key=value,key=value``.
            TypeError: If it is not a string.
        """
        if not isinstance(spec, str):
            raise TypeError(f"A {self.kind} is named by a spec string such as 'name:key=value', got {spec!r}.")
        name, colon, text = (part.strip() for part in spec.partition(":"))
        if not colon and "=" in name:
            known, value = (part.strip() for part in name.split("=", 1))
            if known in self:
                knobs = " or ".join(f"{known}:{knob}={value}" for knob in self.knobs(known)) or known
                raise ValueError(f"In the {self.kind} {spec!r}, a colon follows the name: write {knobs}.")
        values: dict[str, str] = {}
        # A value may hold a comma (a path, say): only a comma before `key=` ends it.
        for item in re.split(r",(?=\s*[A-Za-z_]\w*\s*=)", text) if text else []:
            key, sign, value = item.partition("=")
            if not sign:  # only the first can be bare: after a comma there is a key
                knobs = self.knobs(name)
                key, value = next(iter(knobs), ""), item
                if not key:
                    raise ValueError(f"In the {self.kind} {spec!r}, {item!r} is not of the form key=value.")
                if knobs[key].default is None:
                    raise ValueError(f"In the {self.kind} {spec!r}, {item!r} needs its knob: {', '.join(knobs)}.")
            key = key.strip()
            if key in values:
                raise ValueError(f"The knob {key!r} is given twice in the {self.kind} {spec!r}.")
            values[key] = value.strip()
        return name, values

    def parse(self, spec: str, **more: Any) -> tuple[str, dict[str, Any]]:
        """Split a spec into its name and its checked knobs; `more` are knobs given as keywords.

        Raises:
            ValueError: If the name or a knob is unknown, or a value is missing, wrong or given twice.
            TypeError: If the spec is not a string.
        """
        name, given = self.split(spec)
        knobs, values = self.knobs(name), dict[str, Any]()
        for key, text in given.items():
            if key in more:
                raise ValueError(f"The knob {key!r} is given twice in the {self.kind} {spec!r}.")
            self._check_knob(name, key, knobs)
            values[key] = _convert(text, knobs[key], f"{self.kind} {name!r}")
        for key, value in more.items():
            self._check_knob(name, key, knobs)
            simple = value is None or isinstance(value, (str, int, float))  # same rules as in a spec
            values[key] = _convert(str(value), knobs[key], f"{self.kind} {name!r}") if simple else value
        missing = [k.name for k in knobs.values() if k.required and k.name not in values]
        if missing:
            raise ValueError(f"The {self.kind} {name!r} needs {missing[0]!r}: write '{name}:{missing[0]}=...'.")
        return name, values

    def _check_knob(self, name: str, key: str, knobs: dict[str, Knob]) -> None:
        if key not in knobs:
            raise ValueError(f"The {self.kind} {name!r} has no knob {key!r}. {suggest(key, knobs)}")

    def build(self, spec: str, **more: Any) -> Callable[..., Any]:
        """Return the registered function with the knobs of `spec` bound."""
        name, knobs = self.parse(spec, **more)
        return functools.partial(self[name], **knobs)

    def canonical(self, spec: str) -> str:
        """Return the canonical spelling: knobs in signature order, without those at their default."""
        name, given = self.parse(spec)
        shown = {k: given[k] for k, knob in self.knobs(name).items() if k in given and given[k] != knob.default}
        return self.format(name, shown)

    @staticmethod
    def format(name: str, knobs: Mapping[str, Any]) -> str:
        """Return the spec of a name and its knobs; the inverse of `split`.

        >>> Registry.format("norm", {"tau": 1.0, "delta": 0.5}), Registry.format("ce", {})
        ('norm:tau=1,delta=0.5', 'ce')
        """
        text = ",".join(f"{key}={show_value(value)}" for key, value in knobs.items())
        return f"{name}:{text}" if text else name

    def describe(self, name: str) -> tuple[str, str]:
        """Return (spec with its defaults, first line of the docstring), for listings."""
        knobs = ",".join(f"{k}={'...' if v.required else _shorten(v.default)}" for k, v in self.knobs(name).items())
        summary = (inspect.getdoc(self[name]) or "").partition("\n")[0]
        return (f"{name}:{knobs}" if knobs else name), summary

    def _load(self) -> None:
        if self.package:
            _import_modules(self.package)


@functools.cache
def _import_modules(package: str) -> None:
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__, prefix=f"{package}."):
        importlib.import_module(module.name)


def _convert(text: str, knob: Knob, owner: str) -> Any:
    """Read `text` as the type the knob is annotated with."""
    allowed = typing.get_args(knob.annotation) if _is_union(knob.annotation) else (knob.annotation,)
    word = text.lower()
    if word == "none" and (types.NoneType in allowed or knob.default is None):
        return None
    for wanted in (bool, int, float):
        if wanted not in allowed:
            continue
        if wanted is bool:
            if word in ("true", "false"):
                return word == "true"
            continue
        try:
            value = wanted(text)
        except ValueError:
            continue
        if isinstance(value, float) and math.isnan(value):
            continue
        return value
    for choice in allowed:
        if typing.get_origin(choice) is typing.Literal:
            choices = typing.get_args(choice)
            if text in choices:
                return text
            raise ValueError(f"{knob.name} of the {owner} is one of {', '.join(choices)}; got {text!r}.")
    if str in allowed or Any in allowed:
        return text
    words = {bool: "true or false", int: "an integer", float: "a number", types.NoneType: "none"}
    wanted = " or ".join(words.get(a, getattr(a, "__name__", str(a))) for a in allowed)
    raise ValueError(f"{knob.name} of the {owner} must be {wanted}, got {text!r}.")


def _is_union(annotation: object) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _shorten(value: object) -> str:
    """Return a knob's value for a listing.

    >>> _shorten(-9.210340371976182), _shorten(0.0625), _shorten("none")
    ('-9.21', '0.0625', 'none')
    """
    text = show_value(value)
    return f"{value:.3g}" if isinstance(value, float) and len(text) > 8 else text


def show_value(value: object) -> str:
    """Return a knob's value as a spec writes it.

    >>> show_value(1.0), show_value(None), show_value(True)
    ('1', 'none', 'true')
    """
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) and value == float(f"{value:g}") else str(value)
