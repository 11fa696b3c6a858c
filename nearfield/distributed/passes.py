"""One call over all ranks: keys and values of a few heads at a time come from everywhere while others are attended to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nearfield.checks import double_backward_error
from nearfield.distributed.group import Pending, Ranks, told
from nearfield.distributed.layout import Layout
from nearfield.distributed.ways import Begun, Grads, Part, Way
from nearfield.kernels.backends import full_precision
from nearfield.problem import needs_grad

GROUP_BYTES = 64 << 20
"""Keys and values of so many heads travel together that they take about this much on each rank; those of two such groups are
there at a time. There are at least two groups if there are two heads: one travels while the other is attended to."""


@dataclass(frozen=True)
class Passes:
    """The forward and the backward pass of a call. Ranks make the same exchanges in the same order, whatever rows they have."""

    ranks: Ranks
    rows: Layout
    keys: Layout
    way: Way
    padding: Tensor | None
    """`[batch, 1 or kv_heads, n]`: True where a key counts"""
    return_lse: bool

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, trained: bool
    ) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """Output and log-normaliser of this rank's rows, and what the backward pass needs beside them."""
        begun = self.way.begin(query, key, self.padding)
        output = query.new_empty(*query.shape[:3], value.shape[3])
        compute = torch.promote_types(query.dtype, torch.float32)
        wants_lse = self.return_lse or (trained and self.way.keeps_lse)
        lse = query.new_empty(query.shape[:3], dtype=compute) if wants_lse else None
        kept: list[Tensor] = []
        for part, heads in self._parts(query, key, value, sink, begun):
            found = self.way.forward(part, trained)
            output[:, heads] = found.output
            if lse is not None and found.lse is not None:
                lse[:, heads] = found.lse
            kept += found.kept if trained else ()
            del part  # before keys and values of the next heads are put in order
        return output, lse, [*begun.kept, *kept]

    def backward(
        self,
        inputs: tuple[Tensor, Tensor, Tensor, Tensor | None],
        output: Tensor,
        lse: Tensor | None,
        kept: list[Tensor],
        grad: Tensor,
        lse_grad: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Gradients of the inputs of this rank. Those of its keys and values are sums of what all ranks have found."""
        query, key, value, sink = inputs
        begun = self.way.begin(query, key, self.padding, tuple(kept[: self.way.shared]))
        kept = kept[self.way.shared :]
        query_grad = torch.empty_like(query, memory_format=torch.contiguous_format)
        key_grad, value_grad = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (key, value))
        sink_grad = None if sink is None else torch.zeros_like(sink)
        each = len(kept) // max(1, len(self._groups(key, value)))
        on_their_way: list[tuple[slice, Pending, Pending]] = []
        for part, heads in self._parts(query, key, value, sink, begun):  # `enumerate` would hold on to a part
            own, kept = tuple(kept[:each]), kept[each:]
            of_heads = None if lse is None else lse[:, heads]
            of_lse = None if lse_grad is None else lse_grad[:, heads]
            grads = self.way.backward(part, output[:, heads], of_heads, own, grad[:, heads], of_lse)
            query_grad[:, heads] = grads.query
            if sink_grad is not None and grads.sink is not None:
                sink_grad[heads] = grads.sink
            on_their_way.append((part.heads, *self._start_sums(grads)))
            del part, grads
            if len(on_their_way) > 1:
                self._land(on_their_way.pop(0), key_grad, value_grad)
        for sums in on_their_way:
            self._land(sums, key_grad, value_grad)
        return query_grad, key_grad, value_grad, sink_grad

    def _start_sums(self, grads: Grads) -> tuple[Pending, Pending]:
        keys = self.ranks.start_sum("gradients of keys", self.keys.dealt(grads.key, 2))
        return keys, self.ranks.start_sum("gradients of values", self.keys.dealt(grads.value, 2))

    def _land(self, sums: tuple[slice, Pending, Pending], key_grad: Tensor, value_grad: Tensor) -> None:
        heads, keys, values = sums
        key_grad[:, heads] = keys.wait()[:, :, : key_grad.shape[2]]
        value_grad[:, heads] = values.wait()[:, :, : value_grad.shape[2]]

    def _groups(self, key: Tensor, value: Tensor) -> list[slice]:
        """Which key-value heads travel together: the same on all ranks."""
        kv_heads = key.shape[1]
        one = key.shape[0] * self.keys.length * (key.shape[3] + value.shape[3]) * key.element_size()
        step = max(1, min(-(-kv_heads // 2), GROUP_BYTES // max(1, one)))
        return [slice(first, min(kv_heads, first + step)) for first in range(0, kv_heads, step)]

    def _parts(
        self, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, begun: Begun
    ) -> Iterator[tuple[Part, slice]]:
        """Each group of heads with the keys and values of all ranks, and which query heads these are.

        The next group is on its way while one is attended to.
        """
        groups, members = self._groups(key, value), query.shape[1] // max(1, key.shape[1])
        coming = self._start(key, value, groups[0]) if groups else []
        for number, heads in enumerate(groups):
            # What has come is let go of once it is in order, and what is in order by whoever attends to it: two groups at a time.
            here = [self.keys.joined(coming.pop(0).wait(), 2) for _ in range(2)]
            coming = self._start(key, value, groups[number + 1]) if number + 1 < len(groups) else []
            own = slice(heads.start * members, heads.stop * members)
            padding = self.padding
            if padding is not None and padding.shape[1] > 1:
                padding = padding[:, heads]
            of_heads = None if sink is None else sink[own]
            yield Part(query[:, own], here.pop(0), here.pop(0), of_heads, padding, heads, begun.of(heads)), own

    def _start(self, key: Tensor, value: Tensor, heads: slice) -> list[Pending]:
        keys = self.ranks.start_gather("keys", self.keys.padded(key[:, heads], 2))
        return [keys, self.ranks.start_gather("values", self.keys.padded(value[:, heads], 2))]


def run(passes: Passes, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Output and, if it is wanted, log-normaliser, with gradients where they are wanted."""
    if needs_grad(query, key, value) or (sink is not None and needs_grad(sink)):
        return _Sharded.apply(query, key, value, sink, passes)
    with torch.no_grad(), full_precision(query):
        output, lse, _ = passes.forward(query, key, value, sink, False)
    return output, lse if passes.return_lse else None


class _Sharded(torch.autograd.Function):
    """What is kept between the passes is this rank's own: its inputs, its output, and what a way keeps of its rows. Keys and
    values of other ranks come again."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, passes: Passes
    ) -> tuple[Tensor, Tensor | None]:
        with full_precision(query):
            output, lse, kept = passes.forward(query, key, value, sink, True)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, sink, output, lse, *kept)
        ctx.passes, ctx.number = passes, passes.ranks.exchanges
        return output, lse if passes.return_lse else None

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, lse_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, sink, output, lse, *kept = ctx.saved_tensors
        # Other ranks wait for this one, also where nothing depends on its rows.
        grad = torch.zeros_like(output) if grad is None else grad
        ranks = ctx.passes.ranks
        wrong = double_backward_error() if torch.is_grad_enabled() else None
        with full_precision(query), ranks.together("a backward pass"):
            # A rank that differentiates another call, or none, would send what has the same shape here.
            ranks.agree("a backward pass", moving={"number": ctx.number}, error=told(wrong))
            if wrong is None:
                return *ctx.passes.backward((query, key, value, sink), output, lse, kept, grad, lse_grad), None
        raise wrong
