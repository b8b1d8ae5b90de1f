"""Training methods by name: what one step, or one epoch, does.

A method is a class that follows the protocol `Method` in `base.py`.
"""

from logitclip.registry import Registry

METHODS = Registry("method", package=__name__)
