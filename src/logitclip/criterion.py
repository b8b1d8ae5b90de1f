"""`Loss` and `LogitClip`, the modules a training loop uses.

`Loss` is the one place that knows class weights, per-example weights, `ignore_index` and reductions. `LogitClip` puts
Eq. 4 before a loss. Classes are in dimension 1 (0 for a single vector), as in torch.nn.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn

from logitclip import theory
from logitclip.clip import (
    CLIPS,
    QUANTILES,
    Clip,
    apply_clip,
    check_logits,
    full_precision,
    logit_norms,
    make_clip,
    norm_quantiles,
    takes_weight,
)
from logitclip.losses import LOSSES, TrainingState, check_class_dim, check_target, evaluate
from logitclip.losses.memory import GradientMemory
from logitclip.losses.reduction import Reduction, check_weights, reduce, weights_of
from logitclip.noise import read_matrix
from logitclip.registry import suggest


class Loss(nn.Module):
    """Any loss by name, used like `nn.CrossEntropyLoss`.

    Args:
        loss: A loss and its knobs, as in ``"gce:q=0.7"``; knobs may also be given as keywords, ``Loss("gce", q=0.7)``.
        reduction: "mean", "sum" or "none". As in `nn.CrossEntropyLoss`, the mean divides by the sum of the weights of
            the examples for class indices, and by the number of examples for probabilities. The mean of an empty batch
            is 0, not NaN.
        class_weight: A weight per class, [K]; `weight`, the word of `nn.CrossEntropyLoss`, works too.
        ignore_index: Examples with this class index are left out.
        **knobs: Knobs of the loss.

    The call takes logits [N, K, ...] or [K], class indices [N, ...] or probabilities in the shape of the logits, and
    an optional `example_weight` [N, ...]. The result is float32 for half-precision logits. A class is masked by a logit
    of -inf: it has probability 0 and does not enter the loss. Values of targets are checked in eager mode on a CPU;
    `logitclip.losses.check_values` checks them on GPUs and in compiled code too.

    Raises:
        ValueError: If an option is out of range, or, in the call, if shapes or targets do not fit.

    >>> Loss("mae")(torch.zeros(2, 4), torch.tensor([0, 3]))
    tensor(1.5000)
    """

    weight: Tensor | None
    epoch: Tensor | None
    class_counts: Tensor | None
    removed: Any  # Tensor | None
    memory: Any  # GradientMemory | None

    def __init__(
        self,
        loss: str = "ce",
        *,
        reduction: Reduction = "mean",
        class_weight: Tensor | None = None,
        ignore_index: int = -100,
        **knobs: Any,
    ) -> None:
        super().__init__()
        if class_weight is not None and "weight" in knobs:
            raise ValueError("Give class_weight or weight, not both: they mean the same.")
        loss, weight = _take_old_word(knobs, "spec", "loss", loss), knobs.pop("weight", class_weight)
        if reduction not in get_args(Reduction):
            raise ValueError(f"Unknown reduction {reduction!r}. {suggest(str(reduction), get_args(Reduction))}")
        if not (weight is None or isinstance(weight, Tensor)):
            raise TypeError(f"class_weight must be a tensor, got {type(weight).__name__}: use torch.tensor(weight).")
        if weight is not None and (weight.ndim != 1 or not weight.is_floating_point()):
            raise ValueError(f"class_weight must be a float per class, got {weight.dtype}, {tuple(weight.shape)}.")
        self.name, self.knobs = LOSSES.parse(loss, **knobs)
        self.function = LOSSES[self.name]
        # The share of the target that all classes get. Another loss may have a knob of this name with its own meaning.
        self.smoothing: float = self.knobs.get("label_smoothing", 0.0) if self.name == "ce" else 0.0
        self.reduction: Reduction = reduction
        self.ignore_index = ignore_index
        self.register_buffer("weight", weight)
        # The state of a loss with a schedule, set by start_epoch. It is kept in buffers, so that a compiled criterion
        # does not recompile when it changes. Only `removed` is saved: a resumed run calls start_epoch again.
        self.register_buffer("epoch", None, persistent=False)
        self.register_buffer("class_counts", None, persistent=False)
        self.register_buffer("removed", None)  # examples of each class that the sieve left out in this epoch, [K]
        self.register_load_state_dict_pre_hook(_make_room_for_removed)
        # Evaluate the loss once, so that a knob out of its range is an error now and not in training.
        matrix = self.knobs.get("matrix")  # of transitions, for a certain number of classes
        logits = torch.zeros(1, 2 if matrix is None else len(read_matrix(matrix)))
        evaluate(self.function, logits, torch.zeros(1, dtype=torch.int64), self.knobs)
        self.scheduled = "state" in self.function.takes  # whether the loss changes with the epoch
        self.memory = GradientMemory(self.function, self.knobs) if "threshold" in self.function.takes else None

    def start_epoch(self, epoch: int, class_counts: Tensor | None = None) -> None:
        """Set the epoch of a loss with a schedule (CORES); the other losses ignore it.

        Args:
            epoch: Counted from 0.
            class_counts: How many examples carry each label, [K]. The examples that the sieve left out in the previous
                epoch are subtracted.
        """
        if not self.scheduled:
            return
        device = None if class_counts is None else class_counts.device
        self._set("epoch", torch.as_tensor(epoch, dtype=torch.float32, device=device))
        if class_counts is not None:
            counts = torch.as_tensor(class_counts, dtype=torch.float32)
            left = counts if self.removed is None else (counts - self.removed.to(counts.device)).clamp_min(0)
            self._set("class_counts", left if left.any() else counts)
            self._set("removed", torch.zeros_like(counts))

    def set_lr(self, lr: float) -> None:
        """Tell a loss that adapts to it (OGC) the learning rate; the other losses ignore it.

        Args:
            lr: The learning rate of the coming steps.
        """
        if self.memory is not None:
            self.memory.lr.fill_(lr)

    def training_state(self) -> TrainingState | GradientMemory | None:
        """What a loss remembers: the epoch and the class counts after `start_epoch`, or a `GradientMemory`."""
        if self.scheduled and self.epoch is not None:
            return TrainingState(self.epoch, self.class_counts)
        return self.memory

    def sync(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """Sum the counts of this epoch over several processes; call it on each of them at the end of the epoch.

        Args:
            reduce: Returns the sum of a tensor over the processes, such as ``fabric.all_reduce`` with
                ``reduce_op="sum"``.
        """
        if self.removed is not None:
            self.removed = reduce(self.removed)

    def _set(self, name: str, value: Tensor) -> None:
        buffer = getattr(self, name)
        if buffer is None or buffer.device != value.device:
            setattr(self, name, value.clone())
        else:
            buffer.copy_(value)

    def link(self, logits: Tensor) -> Tensor:
        """Return the logits unchanged: there is no clip."""
        return logits

    def forward(self, logits: Tensor, target: Tensor, example_weight: Tensor | None = None) -> Tensor:
        """Compute, weight and reduce the loss.

        Args:
            logits: [N, K, ...] or [K].
            target: Class indices [N, ...] or probabilities in the shape of the logits.
            example_weight: A weight per example, [N, ...].

        Returns:
            A scalar, or [N, ...] for ``reduction="none"``.

        Raises:
            ValueError: If shapes or targets do not fit.
        """
        return self.compute(logits, target, example_weight)

    def compute(
        self, logits: Tensor, target: Tensor, example_weight: Tensor | None = None, clip: Clip | None = None
    ) -> Tensor:
        """Clip the logits, compute the loss, weight and reduce it."""
        target, kept = check_target(logits, target, self.ignore_index, dim=1 if logits.ndim > 1 else 0)
        if logits.ndim > 2:
            logits = logits.movedim(1, -1)
            target = target.movedim(1, -1) if target.is_floating_point() else target
        weight = self.weight  # looked up once: finding a buffer of a module is slow
        check_weights(logits.shape, weight, example_weight)
        state = self.training_state() if self.scheduled or self.memory is not None else None
        if weight is not None and self.smoothing:
            return self._smooth_labels(logits, target, example_weight, clip, kept)
        values, own = evaluate(self.function, logits, target, self.knobs, clip, weight, state, kept)
        if own is not None and torch.is_grad_enabled():  # not for validation
            self.count_removed(own, target, kept)
        return reduce(values, weights_of(values, target, own, example_weight, kept, weight), self.reduction)

    def _smooth_labels(
        self, logits: Tensor, target: Tensor, example_weight: Tensor | None, clip: Clip | None, kept: Tensor | None
    ) -> Tensor:
        """Label smoothing with class weights as in torch: every class has its weight in the spread share, too."""
        share, present = self.smoothing, (~logits.isneginf()).to(full_precision(logits).dtype)
        hard = target if target.is_floating_point() else nn.functional.one_hot(target, logits.shape[-1])
        soft = (1 - share) * hard.to(present.dtype) + share * present / present.sum(-1, keepdim=True)
        values, _ = evaluate(self.function, logits, soft, {}, clip, self.weight)
        if kept is not None:
            values = values.masked_fill(~kept, 0.0)
        counted = weights_of(values, target, None, example_weight, kept, self.weight)
        return reduce(values, weights_of(values, soft, None, example_weight, kept, None), self.reduction, counted)

    def count_removed(self, own: Tensor, target: Tensor, kept: Tensor | None = None) -> None:
        """Count the examples of each class that the loss itself left out, with the weight 0, in training."""
        if self.removed is None or not self.training:
            return
        if self.removed.device != target.device:  # the counts of `start_epoch` were on another device
            self.removed = self.removed.to(target.device)
        removed = 1 - own
        removed = (removed if kept is None else removed * kept).detach().to(self.removed).flatten()
        if target.is_floating_point():
            self.removed += removed @ target.to(removed.dtype).reshape(len(removed), -1)
        else:
            self.removed.index_add_(0, target.flatten(), removed)

    def extra_repr(self) -> str:
        knobs = "".join(f", {key}={value}" for key, value in self.knobs.items())
        return f"{self.name!r}{knobs}, reduction={self.reduction!r}"


def _make_room_for_removed(loss: Any, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Give the buffer `removed` the size of the saved one: a new loss does not know the number of classes."""
    saved = state.get(f"{prefix}removed")
    loss.removed = None if saved is None else torch.zeros_like(saved)


def _take_old_word(options: dict[str, Any], old: str, new: str, value: Any) -> Any:
    """Return the value of an argument that had another name, which still works for a version."""
    if old in options:
        warnings.warn(f"The argument {old} is called {new} now.", DeprecationWarning, stacklevel=3)
    return options.pop(old, value)


class _Wrapper(nn.Module):
    """A criterion on transformed logits: ``criterion(link(logits), target)``."""

    def __init__(self, criterion: str | Callable[..., Tensor], **options: Any) -> None:
        super().__init__()
        if isinstance(criterion, str):
            criterion = Loss(criterion, **options)
        elif options:
            raise ValueError(
                f"{next(iter(options))} is an option of a loss by name: give it to your {type(criterion).__name__}."
            )
        if not callable(criterion) or isinstance(criterion, type):  # nn.CrossEntropyLoss without its brackets
            raise TypeError(f"criterion must be the name of a loss or a callable such as a module, got {criterion!r}.")
        self.criterion = criterion

    def link(self, logits: Tensor) -> Tensor:
        """Transform logits with the classes in dimension 1 (0 for a single vector)."""
        raise NotImplementedError

    def forward(self, logits: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(self.criterion, (Loss, _Wrapper)):  # these check their own arguments
            _check_multiclass(logits, target)
        return self.criterion(self.link(logits), target, *args, **kwargs)

    def start_epoch(self, epoch: int, class_counts: Tensor | None = None) -> None:
        """Call `start_epoch` of the criterion, if it has one; see `Loss.start_epoch`."""
        self._pass_on("start_epoch", epoch, class_counts)

    def set_lr(self, lr: float) -> None:
        """Call `set_lr` of the criterion, if it has one; see `Loss.set_lr`."""
        self._pass_on("set_lr", lr)

    def sync(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """Call `sync` of the criterion, if it has one; see `Loss.sync`."""
        self._pass_on("sync", reduce)

    def needs_head(self) -> bool:
        """Return whether a link needs the last linear layer; see `Linked.set_head`."""
        return isinstance(self.criterion, _Wrapper) and self.criterion.needs_head()

    def set_head(self, network: nn.Module) -> None:
        """Call `set_head` of the criterion, if it has one; see `Linked.set_head`."""
        self._pass_on("set_head", network)

    def _pass_on(self, name: str, *args: Any) -> None:
        method = getattr(self.criterion, name, None)
        if method is not None:
            method(*args)


class Linked(_Wrapper):
    """A criterion after any link: ``criterion(link(logits), target)``.

    Args:
        criterion: A loss by name, or any callable of logits and targets.
        link: A function of logits with the classes in the last dimension; a parameter `linear_weight` gets the weight
            of the last layer.
        **options: For a loss by name, the other arguments of `Loss`.

    >>> Linked("ce", torch.zeros_like)(torch.tensor([[30.0, 40.0]]), torch.tensor([0]))
    tensor(0.6931)
    """

    def __init__(self, criterion: str | Callable[..., Tensor], link: Callable[..., Tensor], **options: Any) -> None:
        super().__init__(criterion, **options)
        self._link, self._takes_weight = link, takes_weight(link)
        self._head: list[nn.Linear] = []  # in a list, so that its weight is no parameter of the criterion

    def needs_head(self) -> bool:
        """Return whether this link, or one behind it, needs the last linear layer."""
        return self._takes_weight or super().needs_head()

    def set_head(self, network: nn.Module) -> None:
        """Tell a link that needs it (extended LogitNorm) the last linear layer; the others ignore it.

        Args:
            network: The network, whose last `nn.Linear` it is, or the layer itself.

        Raises:
            ValueError: If the network has none.
        """
        if self._takes_weight:
            layers = [module for module in network.modules() if isinstance(module, nn.Linear)]
            if not layers:
                raise ValueError(f"{name_of(self._link)} needs a last linear layer; {type(network).__name__} has none.")
            self._head = layers[-1:]
        super().set_head(network)

    def link(self, logits: Tensor) -> Tensor:
        """Apply the link to logits with the classes in dimension 1 (0 for a single vector).

        Raises:
            ValueError: If the link needs the weight of the last layer, and no `set_head` has given it.
        """
        dim = 1 if logits.ndim > 1 else 0
        given = {}
        if self._takes_weight:
            if not self._head:
                raise ValueError(
                    f"{name_of(self._link)} needs the weight of the last layer: call set_head(network) of the "
                    "criterion, or give head=network where it is made."
                )
            given = {"linear_weight": self._head[0].weight}
        return self._link(logits.movedim(dim, -1), **given).movedim(-1, dim)

    def extra_repr(self) -> str:
        knobs = getattr(self._link, "keywords", {})
        return ", ".join([name_of(self._link), *(f"{key}={value}" for key, value in knobs.items())])


def name_of(link: Callable[..., Tensor]) -> str:
    """Return the name of a link, without its knobs."""
    return getattr(getattr(link, "func", link), "__name__", repr(link)).lstrip("_")


class LogitClip(_Wrapper):
    """A loss on clipped logits: Eq. 4, then the criterion.

    Args:
        loss: A loss by name, ``"gce:q=0.7"``, or any criterion you already have, which is called with the clipped
            logits.
        tau: The threshold on the norm of the logits.
        delta: The norm of clipped logits; None means tau (Eq. 3).
        temp: Instead of tau and delta, threshold temp and scale 1/temp: the released code, and the paper's tabulated
            "1/tau".
        p: Which norm, from 1 to `math.inf`.
        **options: For a loss by name, the other arguments of `Loss`: reduction, class_weight, ignore_index and knobs.

    Raises:
        TypeError: If the criterion is neither a name nor callable.
        ValueError: If the clip or an option is out of range, or options are given with a criterion of your own.

    Use it for training only: predictions are the same with and without the clip. Set `tau`, `delta` or `temp` to follow
    a schedule; a delta that was not given follows tau.

    >>> criterion = LogitClip("ce", tau=1.0)
    >>> criterion(torch.tensor([[30.0, 40.0]]), torch.tensor([0]))
    tensor(0.7981)
    >>> LogitClip("ce", temp=2.0)
    LogitClip(
      tau=2.0, delta=0.5, p=2.0
      (criterion): Loss('ce', reduction='mean')
    )
    """

    def __init__(
        self,
        loss: str | Callable[..., Tensor] = "ce",
        tau: float | None = None,
        delta: float | None = None,
        p: float = 2.0,
        *,
        temp: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(_take_old_word(options, "criterion", "loss", loss), **options)
        self._set_clip(tau, delta, p, temp)

    def _set_clip(self, tau: float | None, delta: float | None, p: float, temp: float | None = None) -> None:
        self.clip = make_clip(tau, delta, p, temp=temp)
        self._follows = "temp" if temp is not None else "tau" if delta is None else None

    @property
    def tau(self) -> float:
        """The threshold on the norm."""
        return self.clip.tau

    @tau.setter
    def tau(self, value: float) -> None:
        if self._follows == "temp":
            raise ValueError("This clip was made with temp: set temp, or make it with tau.")
        self._set_clip(value, None if self._follows == "tau" else self.delta, self.p)

    @property
    def delta(self) -> float:
        """The norm of a clipped vector."""
        return self.clip.delta

    @delta.setter
    def delta(self, value: float) -> None:
        if self._follows == "temp":
            raise ValueError("This clip was made with temp: set temp, or make it with tau and delta.")
        self._set_clip(self.tau, value, self.p)

    @property
    def p(self) -> float:
        """Which norm is clipped."""
        return self.clip.p

    @property
    def temp(self) -> float | None:
        """The threshold and the reciprocal of the scale; None for a clip that was made with tau."""
        return self.tau if self._follows == "temp" else None

    @temp.setter
    def temp(self, value: float) -> None:
        if self._follows != "temp":
            raise ValueError("This clip was made with tau: set tau and delta, or make it with temp.")
        self._set_clip(None, None, self.p, value)

    def link(self, logits: Tensor) -> Tensor:
        """Clip logits with the classes in dimension 1 (0 for a single vector): Eq. 4.

        Raises:
            ValueError: If the logits are integers or a single number.
        """
        return apply_clip(logits, self.clip, dim=1 if logits.ndim > 1 else 0)

    def forward(self, logits: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Clip the logits and call the criterion.

        Args:
            logits: [N, K, ...] or [K].
            target: As the criterion takes it: for a loss by name, class indices [N, ...] or probabilities in the shape
                of the logits.
            *args: More arguments of the criterion, such as `example_weight` of a loss by name.
            **kwargs: The same by keyword.

        Returns:
            What the criterion returns: for a loss by name, the reduced loss.

        Raises:
            ValueError: If shapes or targets do not fit.
        """
        criterion = self.criterion
        if isinstance(criterion, Loss) and type(criterion).forward is Loss.forward:  # clip and loss in one
            return criterion.compute(logits, target, *args, **kwargs, clip=self.clip)
        return super().forward(logits, target, *args, **kwargs)

    def extra_repr(self) -> str:
        return f"tau={self.tau}, delta={self.delta}, p={self.p}"

    @torch.no_grad()
    def diagnose(self, logits: Tensor, target: Tensor | None = None) -> Diagnosis:
        """Report how the clip acts on a batch; call it now and then in your own training loop.

        With `target`, and a loss by name, it also warns (`UserWarning`) when the mean loss has reached the lowest value
        that the clip allows, and that value is far above the lowest without a clip: delta is then too small.

        Args:
            logits: [N, K, ...] or [K].
            target: As for the call, or None. Examples whose target is `ignore_index` do not count.

        Returns:
            A `Diagnosis`.

        Raises:
            ValueError: If there are no logits that count.

        >>> report = LogitClip("ce", tau=1.0).diagnose(torch.tensor([[30.0, 40.0], [0.3, 0.4]]))
        >>> report.clipped, report.norm_quantiles[0.5]
        (0.5, 25.25)
        """
        check_logits(logits)
        dim = 1 if logits.ndim > 1 else 0
        z = full_precision(logits)
        masked = z.isneginf()
        norms = logit_norms(z, self.p, dim).flatten()
        if target is not None and isinstance(self.criterion, Loss):
            _, kept = check_target(logits, target, self.criterion.ignore_index, dim)
            norms = norms if kept is None else norms[kept.flatten()]
        if not norms.numel():
            raise ValueError(f"There is nothing to diagnose in logits of shape {tuple(logits.shape)}.")
        report = Diagnosis(
            clipped=float((norms >= self.tau).float().mean()),
            norm_quantiles={q: round(v, 6) for q, v in zip(QUANTILES, norm_quantiles(norms), strict=True)},
        )
        if target is None or not isinstance(self.criterion, Loss):
            return report
        mean = Loss(self.criterion.name, ignore_index=self.criterion.ignore_index, **self.criterion.knobs)
        report = replace(report, loss=float(mean.compute(logits, target, clip=self.clip)))
        lowest = None if masked.any() else self._lowest_loss(mean, report.clipped, logits.shape[dim])
        if lowest is None or report.loss is None:
            return report
        chance = float(mean(torch.zeros(1, logits.shape[dim]), torch.zeros(1, dtype=torch.int64)))
        unclipped = theory.base_loss_bounds(mean.name, math.inf, logits.shape[dim], p=self.p, **mean.knobs)[0]
        # Only if the lowest value is high: with a large tau, a loss near its lowest value is simply a good fit.
        if report.loss - lowest < 0.05 * (chance - lowest) and lowest - unclipped > 0.1 * (chance - unclipped):
            warnings.warn(
                f"The mean {mean.name} loss, {report.loss:.4g}, has reached {lowest:.4g}, the lowest value that logits "
                f"clipped at tau={self.tau:g}, delta={self.delta:g} allow. If the accuracy is still poor, raise delta "
                "(lower temp): too small a scale underfits (the paper's Table 8).",
                stacklevel=2,
            )
        return replace(report, lowest_loss=lowest)

    def _lowest_loss(self, loss: Loss, share: float, classes: int) -> float | None:
        """Return the lowest mean loss with this share of rows clipped; None if the range of the loss is not known."""
        # A clipped row has norm delta and, once fitted, no gradient that would take it below tau again.
        clipped, below = (
            theory.base_loss_bounds(loss.name, radius, classes, p=self.p, **loss.knobs)[0]
            for radius in (self.delta, self.tau)
        )
        lowest = share * clipped + (1 - share) * below
        return lowest if math.isfinite(lowest) else None


@dataclass(frozen=True)
class Diagnosis:
    """How a clip acts on a batch; returned by `LogitClip.diagnose`.

    Attributes:
        clipped: Share of the rows whose norm is at least tau.
        norm_quantiles: Quantiles of the norms before the clip, by their level.
        loss: The mean loss; None without targets, or if the criterion is not a loss by name.
        lowest_loss: The lowest mean loss with this share of the rows clipped, if it is known.
    """

    clipped: float
    norm_quantiles: dict[float, float]
    loss: float | None = None
    lowest_loss: float | None = None


def build_criterion(
    loss: str | Callable[..., Tensor], clip: str, *, head: nn.Module | None = None, **options: Any
) -> nn.Module:
    """Put any clip, by name, before a criterion.

    Args:
        loss: A loss by name, or any callable of logits and targets.
        clip: A clip, such as "none", "norm:tau=1", "norm:temp=1.5", "value:limit=1" or "extended_logit_norm".
        head: For "extended_logit_norm", the network or its last linear layer; `set_head` of the criterion can give it
            later.
        **options: For a loss by name, the other arguments of `Loss`: reduction, class_weight, ignore_index and knobs.

    Returns:
        A module that is called with logits and targets.

    Raises:
        ValueError: If the clip is unknown, a knob is out of range, or the network has no linear layer.

    >>> build_criterion("ce", "value:limit=1")(torch.tensor([[30.0, 40.0]]), torch.tensor([0]))
    tensor(0.6931)
    """
    name, knobs = CLIPS.parse(clip)
    if name == "none":
        return Loss(loss, **options) if isinstance(loss, str) else Linked(loss, CLIPS["none"], **options)
    if name == "norm":
        return LogitClip(loss, **knobs, **options)
    link = partial(CLIPS[name], **knobs)
    if not takes_weight(link):
        link(torch.zeros(1, 2))  # so that a knob out of its range is an error now and not in training
    criterion = Linked(loss, link, **options)
    if head is not None:
        criterion.set_head(head)
    return criterion


def _check_multiclass(logits: Tensor, target: Any) -> None:
    """Reject single logits, multi-label targets and mismatched batch sizes, even if the criterion accepts them."""
    check_logits(logits)
    dim = 1 if logits.ndim > 1 else 0
    check_class_dim(logits.movedim(dim, -1))
    if not isinstance(target, Tensor):
        return
    if dim == 1 and target.ndim and len(target) != len(logits):
        raise ValueError(f"{len(logits)} rows of logits and {len(target)} targets do not belong together.")
    if target.shape == logits.shape:
        check_target(logits.movedim(dim, -1), target.movedim(dim, -1))
