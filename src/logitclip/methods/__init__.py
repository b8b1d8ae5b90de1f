"""Training methods by name: what happens in one step, or in one epoch.

A method is a class `Method(job, *, knobs)`; see `standard.py` for the contract.
"""

from logitclip.registry import Registry

METHODS = Registry("method", modules=tuple(f"{__name__}.{m}" for m in ("standard", "sam", "sop", "dividemix")))
