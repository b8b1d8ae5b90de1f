"""Measure the memory of tensors."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Memory(TorchDispatchMode):
    """Record the largest tensor (in entries) and the peak memory of all tensors except the inputs (in bytes)."""

    def __init__(self, *inputs: Tensor) -> None:
        super().__init__()
        self.largest = self.live = self.peak = 0
        self.seen: dict[int, Any] = {x.untyped_storage()._cdata: x for x in inputs}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self.largest = max(self.largest, x.numel())
                self.count(x.untyped_storage())
        return result

    def count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.seen:
            self.live += size
            self.peak = max(self.peak, self.live)
            self.seen[key] = weakref.ref(storage, lambda _: self.forget(key, size))

    def forget(self, key: int, size: int) -> None:
        self.live -= size
        del self.seen[key]
