"""Label noise: rules are pure functions of labels and a generator; `apply` also records what a rule did.

>>> import torch
>>> noisy = symmetric([0, 1, 2, 0], 3, rate=0.5, generator=torch.Generator().manual_seed(0))
>>> record = apply("symmetric:rate=0.5", [0, 1, 2, 0], seed=0, num_classes=3)
"""

from logitclip.noise.checks import read_matrix
from logitclip.noise.instance_dependent import instance, instance_probabilities
from logitclip.noise.records import NoisyLabels, apply
from logitclip.noise.rules import (
    NOISES,
    SETS,
    arrow_matrix,
    asymmetric,
    file,
    none,
    open_set,
    pair,
    real,
    rule,
    symmetric,
    transition,
    votes,
)

__all__ = [
    "NOISES",
    "SETS",
    "NoisyLabels",
    "apply",
    "arrow_matrix",
    "asymmetric",
    "file",
    "instance",
    "instance_probabilities",
    "none",
    "open_set",
    "pair",
    "read_matrix",
    "real",
    "rule",
    "symmetric",
    "transition",
    "votes",
]
