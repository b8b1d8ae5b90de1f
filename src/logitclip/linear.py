"""The old place of `logitclip.heads`; its names work until version 0.3."""

from __future__ import annotations

import warnings
from typing import Any

from logitclip import heads


def __getattr__(name: str) -> Any:
    if name not in heads.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"Import {name} from logitclip.heads instead.", DeprecationWarning, stacklevel=2)
    return getattr(heads, name)
