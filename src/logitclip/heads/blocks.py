"""The logits of a last linear layer in blocks: their statistics, and their contributions to the gradients.

`LinearTerms` are the numbers per row that are linear in the hidden states, and `BlockedHead` the others, norm and
log-sum-exp. Neither holds all logits. Classes may be sharded over processes, see `Shard`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from logitclip.clip import Clip, clip_factor
from logitclip.fused import EXP_SAFE, LOG2_E

# Chosen by measurement on CPUs, see benchmarks/million_classes.py.
SHARE_OF_ROWS = 12  # a block has this fraction of the rows, so that it takes 1/24 of what logits and gradient would
SMALL_BLOCK = 4 * 1024 * 1024  # entries that a block may have in any case
MOST_ROWS = 256  # more rows in a block do not make the matrix products faster
FEWEST_ROWS = 40  # with fewer, the matrix products are so slow that computing the logits three times takes less time
CHUNK = 192 * 1024  # entries of a block that are processed at a time, while they are in the cache

STEP = 4096  # classes whose weights are converted or summed at a time

Sums = Sequence[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]]  # f(log p) and its slope
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]  # of hidden states, weight and bias


class Shard:
    """The classes of this process, and sums and maxima over all processes that share the classes."""

    def __init__(self, classes: int, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self.group, self.first, self.num_classes, self.most = group, 0, classes, classes
        if group is not None:
            sizes = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=device)
            sizes[dist.get_rank(group)] = classes
            sizes = self.sum(sizes).tolist()
            self.first, self.num_classes, self.most = sum(sizes[: dist.get_rank(group)]), sum(sizes), max(sizes)

    def sum(self, x: Tensor) -> Tensor:
        if self.group is not None:
            dist.all_reduce(x, dist.ReduceOp.SUM, group=self.group)
        return x

    def norm(self, x: Tensor) -> Tensor:
        """Return the norms of vectors whose parts have the norms `x`."""
        return x if self.group is None else self.sum(x.square()).sqrt()

    def max(self, x: Tensor) -> Tensor:
        if self.group is not None:
            dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x


class LinearTerms:
    """z_y = W_y h + b_y and v.z = (v W) h + v.b: the numbers that do not need all logits."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, v: Tensor | None, shard: Shard
    ) -> None:
        full = torch.promote_types(hidden.dtype, torch.float32)
        self.hidden, self.v, self.shard = hidden.to(full), v, shard
        index = target - shard.first
        mine = (index >= 0) & (index < len(weight))  # this process has the class
        index = index.clamp(0, len(weight) - 1)
        # Rounded as the matrix products round it, so that log p_y of bfloat16 logits is not above 0.
        of_target = weight[index].to(hidden.dtype).to(full)
        at_target = (self.hidden * of_target).sum(1).to(hidden.dtype).to(full)
        self.at_target = shard.sum((at_target if bias is None else at_target + bias[index]) * mine)
        self.d_mean = torch.zeros_like(at_target)
        self.mean = self.of_mean = None
        self.v_sum = 1.0
        if v is not None:
            parts = zip(v.split(STEP), weight.split(STEP), strict=True)
            self.of_mean = torch.stack([a @ w.to(v.dtype) for a, w in parts]).sum(0)
            mean = self.hidden @ self.of_mean
            self.mean = shard.sum(mean if bias is None else mean + v @ bias)
            self.v_sum = shard.sum(v.sum())

    def add_to(self, d_hidden: Tensor | None, d_weight: Tensor | None, d_bias: Tensor | None) -> Gradients:
        """Add the contributions of v.z to the gradients; each process adds its own part."""
        if d_hidden is not None:
            if self.of_mean is not None:
                d_hidden.addr_(self.d_mean, self.of_mean)
            self.shard.sum(d_hidden)
        if d_weight is not None and self.v is not None:
            d_weight.addr_(self.v, self.d_mean @ self.hidden)
        if d_bias is not None and self.v is not None:
            d_bias.add_(self.v * self.d_mean.sum())
        return d_hidden, d_weight, d_bias


class BlockedHead:
    """All logits of a block of rows at a time, in chunks of classes that stay in the cache.

    The chunks hold z in the first pass, then, without a clip, exp(z - shift), and with one s z log2(e), as the gradient
    needs both. With at most as many rows as features, one block is kept where the gradient of the weight will be, which
    overwrites it chunk by chunk. Where other blocks would have too few rows, chunks are computed again in each pass.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        clip: Clip | None,
        needs: tuple[bool, ...],
        shard: Shard,
        sums: Sums = (),
        wants_top: bool = False,
    ) -> None:
        self.hidden, self.weight, self.bias, self.clip, self.shard = hidden, weight, bias, clip, shard
        self.sums, self.wants_top = sums, wants_top
        self.shifted = clip is None or max(clip.tau, clip.delta) > EXP_SAFE
        self.needs_gradient = any(needs)
        n, (classes, width) = len(hidden), weight.shape
        make = {"dtype": torch.promote_types(hidden.dtype, torch.float32), "device": weight.device}
        self.d_hidden = torch.zeros(hidden.shape, **make) if needs[0] else None
        # The first block writes the gradient of the weight, the others add to it.
        self.d_weight = (torch.empty if n else torch.zeros)(weight.shape, **make) if needs[1] else None
        self.d_bias = torch.zeros(classes, **make) if bias is not None and needs[2] else None
        size = block_size(n, shard.most)  # the same rows in all processes, which wait for each other
        chunk = CHUNK if weight.is_cpu else size * classes
        in_gradient = self.d_weight is not None and n <= width
        self.kept = in_gradient or size >= min(n, FEWEST_ROWS)
        size = n if in_gradient else min(n, size if self.kept else MOST_ROWS)
        self.blocks = row_blocks(n, size)
        self.step = max(1, min(classes, chunk // max(size, 1)))
        if self.d_weight is not None and in_gradient:
            self.buffer, self.per_class = self.d_weight.view(-1), width
        elif self.kept:
            self.buffer, self.per_class = torch.empty(size * classes, **make), size
        else:
            self.buffer, self.per_class = torch.empty(size * self.step, **make), 0
        self.scratch = torch.empty(size * self.step, **make)

    def statistics(self, rows: slice) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """Return the norm, `log sum exp(s z)` and the expectation of z under p; without a clip, only the second."""
        self.rows = rows
        self.norm, self.top = self._norm_and_largest()
        self.scale = None if self.norm is None or self.clip is None else clip_factor(self.norm, self.clip)
        if self.sums and self.scale is None and self.top is not None:  # chunks then hold z log2(e), which sums need
            self.scale = torch.ones_like(self.top)
        total, dot = [], []
        for _, _, z, scratch in self._chunks(2):
            e = self._exponentials(z, scratch)
            total.append(e.sum(1))
            if self.scale is not None and self.needs_gradient:
                dot.append(e.mul_(z).sum(1))
        self.total = self.shard.sum(torch.stack(total).sum(0))
        log_total = self.total.log()
        if self.top is not None:
            log_total += self.top if self.scale is None else self.top * self.scale
        expected = None
        if dot and self.scale is not None:
            expected = self.shard.sum(torch.stack(dot).sum(0)) / (self.total * self.scale * LOG2_E)
        self.log_total = log_total.clone()
        return None if self.norm is None else self.norm.clone(), log_total, expected

    def _norm_and_largest(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the norm of each row of logits, if there is a clip, and its largest, if exponentials need a shift."""
        norms, largest = [], []
        for part, _, z, _ in self._chunks(1):
            if self.clip is not None:
                norms.append(torch.linalg.vector_norm(z, dim=1))
            if self.wants_top:
                largest.append(self._raise_top(z, part.start))
            elif self.shifted:
                largest.append(z.amax(1))
        norm = self.shard.norm(torch.linalg.vector_norm(torch.stack(norms), dim=0)) if norms else None
        if norm is not None:  # squares overflowed: NaN, as is documented, rather than clipped to 0
            norm = norm.masked_fill(norm.isinf(), torch.nan)
        top = self.shard.max(torch.stack(largest).amax(0)) if largest else None
        if top is not None and self.wants_top:
            here = torch.where(self.largest == top, self.shard.first + self.at_largest, self.shard.num_classes)
            self.at_top, self.z_top = -self.shard.max(-here), top.clone()  # the first class, if several tie
        return norm, top if self.shifted else None

    def _raise_top(self, z: Tensor, start: int) -> Tensor:
        """Keep the largest logit of the chunks so far, and its class in this process."""
        value, index = z.max(1)
        if start == 0:
            self.largest, self.at_largest = value, index
        else:
            higher = value > self.largest
            self.largest = torch.where(higher, value, self.largest)
            self.at_largest = torch.where(higher, index + start, self.at_largest)
        return value

    def sum_statistics(self, log_total: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Of each sum over k of f(log p_k): its value, and the sums of f' and of f' z."""
        if not self.sums or self.scale is None:
            return []
        found = [log_total.new_zeros(3, len(log_total)) for _ in self.sums]
        for _, _, z, scratch in self._chunks(3):
            log_p = torch.div(z, LOG2_E, out=scratch).sub_(log_total.unsqueeze(1))
            for into, (value, slope) in zip(found, self.sums, strict=True):
                slopes = slope(log_p)
                into += torch.stack([value(log_p).sum(1), slopes.sum(1), (slopes * z).sum(1)])
        results = []
        for into in found:
            value, slopes, along = self.shard.sum(into)
            results.append((value, slopes, along / (self.scale * LOG2_E)))
        return results

    def add_gradients(
        self, picks: list[tuple[Tensor, Tensor]], d_log_total: Tensor, d_norm: Tensor | None, d_sums: list[Tensor]
    ) -> None:
        """Add the contributions of the block's logits to the gradients.

        Args:
            picks: Classes, and the gradients with respect to their logits: those of the labels, and of the largest.
            d_log_total: Gradient with respect to the log-sum-exp.
            d_norm: Gradient with respect to the norm, if there is a clip.
            d_sums: Gradients with respect to the sums.
        """
        h = self.hidden[self.rows]
        of_e = (d_log_total / self.total).unsqueeze(1)
        of_z = None
        if d_norm is not None and self.norm is not None and self.scale is not None:
            of_e = of_e * self.scale.unsqueeze(1)
            tiny = torch.finfo(self.norm.dtype).tiny  # zero logits are not clipped: d_norm is 0
            of_z = (d_norm / (self.norm.clamp_min(tiny) * self.scale * LOG2_E)).unsqueeze(1)
        log_total = self.log_total.unsqueeze(1) if d_sums else None
        for part, w, z, scratch in self._chunks(3):
            dz = torch.mul(self._exponentials(z, scratch), of_e, out=scratch)
            if of_z is not None:
                dz.addcmul_(z, of_z)
            if d_sums and self.scale is not None:
                log_p = (z / LOG2_E).sub_(log_total)  # type: ignore[arg-type]
                for (_, slope), d in zip(self.sums, d_sums, strict=True):
                    dz.addcmul_(slope(log_p), (d * self.scale).unsqueeze(1))
            # Before dz is rounded: p_y - 1 is small where p_y is near 1.
            for classes, d in picks:
                at = classes - (self.shard.first + part.start)
                mine = (at >= 0) & (at < len(w))
                dz.scatter_add_(1, at.clamp_(0, len(w) - 1).unsqueeze(1), (d * mine).unsqueeze(1))
            if self.d_bias is not None:
                self.d_bias[part] += dz.sum(0)
            dz = dz.to(h.dtype)
            if self.d_hidden is not None:
                add_product(dz, w, self.d_hidden[self.rows])
            if self.d_weight is not None:
                (multiply if self.rows.start == 0 else add_product)(dz.t(), h, self.d_weight[part])

    def _exponentials(self, z: Tensor, scratch: Tensor) -> Tensor:
        """exp(s z - shift) of what a chunk holds after the first pass."""
        if self.scale is None:
            return z
        if self.top is None:
            return torch.exp2(z, out=scratch)
        shift = self.top * (self.scale * LOG2_E)  # rounded as z is: at delta = 1e10 a unit in the last place is 1024
        return torch.sub(z, shift.unsqueeze(1), out=scratch).exp2_()

    def _chunks(self, turn: int) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Classes, their weight, what the chunk holds in this pass (1, 2 or 3), and as much scratch memory."""
        h = self.hidden[self.rows]
        for k in range(0, len(self.weight), self.step):
            part = slice(k, k + self.step)
            w = self.weight[part].to(h.dtype)
            start = self.per_class * k
            z = self.buffer[start : start + len(h) * len(w)].view(len(h), len(w))
            if turn == 1 or not self.kept:
                multiply(h, w.t(), out=z)
                if self.bias is not None:
                    z += self.bias[part]
            if turn == 2 or (turn == 3 and not self.kept):
                if self.scale is not None:
                    z.mul_((self.scale * LOG2_E).unsqueeze(1))
                elif self.top is not None:
                    z.sub_(self.top.unsqueeze(1)).mul_(LOG2_E).exp2_()
            yield part, w, z, self.scratch[: z.numel()].view_as(z)


def block_size(rows: int, classes: int) -> int:
    """How many rows to process at a time."""
    size = min(max(rows // SHARE_OF_ROWS, SMALL_BLOCK // classes), MOST_ROWS)
    return max(1, round(size / 8) * 8)  # whole vectors of the processor


def row_blocks(rows: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, rows)) for i in range(0, rows, max(size, 1))]


def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """`out = a b`; `out` is float32 for bfloat16."""
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    else:
        out.copy_(a @ b)


def add_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """`out += a b`."""
    if a.dtype == out.dtype:
        out.addmm_(a, b)
    else:
        out.add_(a @ b)
