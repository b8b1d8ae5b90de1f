"""Plugins: Python files of the user, imported once, that register losses, networks, datasets and so on."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path

PLUGIN_MODULE = "logitclip_plugin_"  # how the name of a plugin's module begins

_importing: ContextVar[bool] = ContextVar("importing", default=True)


@contextlib.contextmanager
def plugins_ignored() -> Iterator[None]:
    """Import no plugin in this block, for commands that only read.

    A config that names a plugin still has an id, if its specs of plugin names are in canonical form.
    """
    token = _importing.set(False)
    try:
        yield
    finally:
        _importing.reset(token)


def imports_plugins() -> bool:
    """Return whether plugins are imported; False inside `plugins_ignored`."""
    return _importing.get()


def check_plugins(named: Iterable[str], given: Iterable[str], where: str) -> None:
    """Reject plugins that a file names, unless the user gives the same files: importing a plugin executes its code."""
    trusted = {Path(os.path.expanduser(path)).resolve() for path in given}
    for path in named if imports_plugins() else ():
        if Path(os.path.expanduser(path)).resolve() not in trusted:
            raise ValueError(f"{where} names the plugin {path}, which is Python code: add --plugin {path} to run it.")


def load_plugins(paths: tuple[str, ...]) -> None:
    """Import plugin files, each once; they register their own losses, models and so on."""
    if not imports_plugins():
        return
    for path in paths:
        file = Path(os.path.expanduser(path)).resolve()
        name = f"{PLUGIN_MODULE}{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
        if name in sys.modules:
            continue
        if not file.is_file():
            raise ValueError(f"There is no plugin file {path}.")
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise ValueError(f"The plugin {path} is not a Python file: its name must end in .py.")
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            raise ValueError(f"The plugin {path} cannot be imported: {type(error).__name__}: {error}") from error


def loaded_plugins() -> tuple[str, ...]:
    """Return the plugin files that were imported, for processes that need them too."""
    return tuple(str(module.__file__) for name, module in sys.modules.items() if name.startswith(PLUGIN_MODULE))
