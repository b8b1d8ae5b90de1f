"""Training methods by name: what one step, or one epoch, does.

A method is a class that follows the protocol `Method` in `base.py`.
"""

from __future__ import annotations

import inspect
from typing import Any

from logitclip.registry import F, Registry


class MethodRegistry(Registry):
    """The registry of methods, which refuses a method that saves state and does not restore it."""

    def register(self, function: F, name: str | None = None, *, revision: int = 0) -> F:
        """Add a method; see `Registry.register`."""
        check_restores(function)
        return super().register(function, name, revision=revision)


def check_restores(method: Any) -> None:
    """Refuse a class that overrides `state_dict` or `weights` and not `load`: a resumed run would lose that state.

    Raises:
        ValueError: If it is such a class.

    >>> class Forgetful:
    ...     def state_dict(self): ...
    >>> check_restores(Forgetful)
    Traceback (most recent call last):
    ValueError: Forgetful has its own state_dict and no load beside it: a resumed run would lose it. Define load.
    """
    for base in inspect.getmro(method) if inspect.isclass(method) else ():
        if "load" in vars(base):
            return
        own = [name for name in ("state_dict", "weights") if name in vars(base)]
        if own:
            raise ValueError(
                f"{base.__name__} has its own {own[0]} and no load beside it: a resumed run would lose it. Define load."
            )


METHODS = MethodRegistry("method", package=__name__)
