"""The threshold of optimised gradient clipping, found in training from the losses of recent examples."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

LOWEST = 1e-7  # probabilities are looked at between this and 1 minus this
RECENT = 4096  # examples that are remembered
EVERY = 32  # steps between two searches for the threshold
GRID = 1000  # points of -log p at which mean gradients are computed


class GradientMemory(nn.Module):
    """The recent -log p_y, and the probability below which the gradient of a loss is clipped.

    Args:
        function: The loss.
        knobs: Its knobs; `epsilon` says how much more gradient noisy labels may have.

    Every 32 steps a mixture of two Gaussians is fitted to the last 4,096 values of -log p_y: the one with the lower
    mean stands for clean labels. The threshold is where the mean clipped gradient of noisy labels is 1 + lr epsilon
    times that of clean ones. Each process has a memory of its own.
    """

    recent: Tensor
    seen: Tensor
    threshold: Tensor
    lr: Tensor

    def __init__(self, function: Any, knobs: dict[str, Any]) -> None:
        super().__init__()
        self.function, self.knobs = function, knobs
        self.register_buffer("recent", torch.zeros(RECENT))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))  # examples, steps
        self.register_buffer("threshold", torch.tensor(LOWEST))
        self.register_buffer("lr", torch.tensor(0.1), persistent=False)
        self.examples = self.steps = 0  # what `seen` says, to be read without a sync
        self.register_load_state_dict_post_hook(_read_counts)
        _keep_out_of_graphs()

    @torch.no_grad()
    def observe(self, log_p: Tensor, kept: Tensor | None = None) -> None:
        """Remember the log-probabilities of a batch's labels in training, and search for the threshold when due."""
        if not self.training:
            return
        if self.recent.device != log_p.device:
            self.to(log_p.device)
        new = -log_p.detach().clamp(math.log(LOWEST), math.log1p(-LOWEST)).to(self.recent.dtype)
        new = (new if kept is None else new.masked_fill(~kept, math.nan)).flatten()
        self.recent.copy_(torch.cat([self.recent, new])[-RECENT:])
        self.examples, self.steps = self.examples + len(new), self.steps + 1
        self.seen[0].fill_(self.examples)
        self.seen[1].fill_(self.steps)
        if self.examples >= RECENT and self.steps % EVERY == 0:
            known = self.recent[~self.recent.isnan()]
            most = 1 + float(self.lr) * self.knobs.get("epsilon", self.function.defaults["epsilon"])
            if len(known) > 1:
                self.threshold.fill_(find_threshold(known, self._slope, most))

    def _slope(self, p: Tensor) -> Tensor:
        """|d loss / dp| before the clip."""
        with torch.enable_grad():
            log_p = p.log().requires_grad_()
            (slope,) = torch.autograd.grad(self.function.phi(log_p, None, **self.knobs).sum(), log_p)
        return slope.abs() / p


@functools.cache
def _keep_out_of_graphs() -> None:
    """Let compiled code call `observe` outside its graph. A decorator would import the compiler, for seconds."""
    GradientMemory.observe = torch.compiler.disable(GradientMemory.observe)  # type: ignore[method-assign]


def _read_counts(memory: GradientMemory, _: Any) -> None:
    memory.examples, memory.steps = memory.seen.tolist()


def find_threshold(recent: Tensor, slope: Callable[[Tensor], Tensor], most: float) -> float:
    """Return the probability at which clipped gradients of noisy labels are `most` times those of clean ones.

    Args:
        recent: -log p_y of recent examples, [N].
        slope: The absolute slope of the loss in p; it falls.
        most: The ratio.

    Returns:
        t, by ten bisections; an end of the interval if the ratio is not reached in it.

    >>> recent = torch.cat([torch.linspace(0.05, 0.4, 2048), torch.linspace(2.0, 5.0, 2048)])
    >>> round(find_threshold(recent, torch.reciprocal, 3.0), 3)
    0.264
    """
    values = torch.linspace(-math.log1p(-LOWEST), -math.log(LOWEST), GRID, dtype=torch.float64)
    slopes = slope((-values).exp())
    densities = [
        torch.exp(-((values - mean) ** 2) / (2 * variance)) for mean, variance in fit_mixture(recent.double().cpu())
    ]

    def ratio(t: float) -> float:
        clipped = slopes.clamp_max(float(slope(torch.tensor(t, dtype=torch.float64))))
        clean, noisy = (float((density * clipped).sum() / density.sum()) for density in densities)
        return noisy / clean

    low, high = LOWEST, 1 - LOWEST
    if ratio(high) > most:
        return high
    if ratio(low) < most:
        return low
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (middle, high) if ratio(middle) > most else (low, middle)
    return high


def fit_mixture(x: Tensor) -> list[tuple[float, float]]:
    """Means and variances of two Gaussians in one dimension, the lower mean first: ten steps of EM.

    It starts from two means (Lloyd's algorithm), which start at the quartiles, so that the result repeats. Variances
    are at least 1e-3.

    >>> [round(mean, 2) for mean, _ in fit_mixture(torch.tensor([0.0, 0.1, 0.2, 5.0, 5.1, 5.2]))]
    [0.1, 5.1]
    """
    means = torch.quantile(x, x.new_tensor([0.25, 0.75]))
    shares = torch.stack([torch.ones_like(x), torch.zeros_like(x)])
    for _ in range(10):
        nearest = ((x - means[:, None]) ** 2).argmin(0)
        shares = torch.stack([nearest == 0, nearest == 1]).to(x.dtype)
        means = (shares @ x + 1e-12 * means) / (shares.sum(1) + 1e-12)
    weights, variances = shares.sum(1), torch.ones_like(means)
    for step in range(11):  # the first only takes the moments of the start
        if step:
            log_density = (weights / len(x) / variances.sqrt()).log()[:, None] - (x - means[:, None]) ** 2 / (
                2 * variances[:, None]
            )
            shares = log_density.softmax(0)
        weights = shares.sum(1) + 1e-12
        means = (shares @ x) / weights
        variances = (shares * (x - means[:, None]) ** 2).sum(1) / weights + 1e-3
    order = means.argsort()
    return [(float(means[i]), float(variances[i])) for i in order]
