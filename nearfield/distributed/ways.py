"""How rows of this rank attend to keys of all ranks, once these are here: forward, and backward from what was kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from nearfield.problem import Method


class Begun(NamedTuple):
    """What a way finds out about all keys before it attends to some heads."""

    kept: tuple[Tensor, ...] = ()
    """for the backward pass"""
    cells: Tensor | None = None
    """`[batch, kv_heads, span_levels, n]`: the cells of all keys, as `Cells` numbers them for the whole sequence"""
    closed: list[list[int]] = []  # noqa: RUF012
    """`[batch][kv_heads]`: how many keys the last row of the sequence sees through cells"""

    def of(self, heads: slice) -> Begun:
        cells = None if self.cells is None else self.cells[:, heads]
        return Begun(self.kept, cells, [counts[heads] for counts in self.closed])


class Part(NamedTuple):
    """Some key-value heads, with the query heads that read them."""

    query: Tensor
    """`[batch, heads, own rows, dim]`"""
    key: Tensor
    """`[batch, kv_heads, n, dim]`: of all ranks, in order"""
    value: Tensor
    sink: Tensor | None
    """`[heads]`"""
    padding: Tensor | None
    """`[batch, 1 or kv_heads, n]`: True where a key counts"""
    heads: slice
    """which key-value heads these are"""
    begun: Begun


class Work(NamedTuple):
    """Consecutive rows of this rank, and keys that they may see."""

    rows: slice
    keys: slice
    offset: int | None
    """row i of these stands at key i + offset of these; None: all rows see all keys"""
    method: Method


@dataclass(frozen=True)
class Facts:
    """What all parts of a call have in common."""

    method: Method
    is_causal: bool
    offset: int
    """of the first row of the sequence"""
    scale: float
    softcap: float
    window: tuple[int, int] | None
    backend: str
    return_lse: bool
    attention: Callable[..., Any]
    """`nearfield.attention`"""
    work: tuple[Work, ...]


class Found(NamedTuple):
    """What a part has computed."""

    output: Tensor
    """`[batch, heads, own rows, value_dim]`"""
    lse: Tensor | None
    """`[batch, heads, own rows]`; None: nobody wants it"""
    kept: tuple[Tensor, ...] = ()
    """for the backward pass, beside the inputs, the output and the lse; as much for each part"""


class Grads(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    sink: Tensor | None


class Way(Protocol):
    """Forward and backward pass of a part. No graph connects them."""

    @property
    def keeps_lse(self) -> bool:
        """Whether `backward` needs the lse."""
        ...

    @property
    def shared(self) -> int:
        """How many tensors `begin` keeps."""
        ...

    def begin(self, query: Tensor, key: Tensor, padding: Tensor | None, kept: tuple[Tensor, ...] = ()) -> Begun: ...

    def forward(self, part: Part, trained: bool) -> Found: ...

    def backward(
        self, part: Part, output: Tensor, lse: Tensor | None, kept: tuple[Tensor, ...], grad: Tensor, lse_grad: Tensor | None
    ) -> Grads: ...


@dataclass(frozen=True)
class Again:
    """Any method, by calls of `attention`. The backward pass attends a second time, and keeps nothing in between."""

    facts: Facts
    keeps_lse = False
    shared = 0

    def begin(self, query: Tensor, key: Tensor, padding: Tensor | None, kept: tuple[Tensor, ...] = ()) -> Begun:
        return Begun()

    def forward(self, part: Part, trained: bool) -> Found:
        with torch.no_grad():
            return Found(*self.attend(part))

    def backward(
        self, part: Part, output: Tensor, lse: Tensor | None, kept: tuple[Tensor, ...], grad: Tensor, lse_grad: Tensor | None
    ) -> Grads:
        if not self.facts.work:
            return Grads(*(None if x is None else torch.zeros_like(x) for x in part[:4]))  # type: ignore[arg-type]
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in (part.query, part.key, part.value)]
            sink = None if part.sink is None else part.sink.detach().requires_grad_()
            found, own_lse = self.attend(part._replace(query=inputs[0], key=inputs[1], value=inputs[2], sink=sink))
        results, grads = [found], [grad]
        if lse_grad is not None and own_lse is not None:
            results, grads = [found, own_lse], [grad, lse_grad]
        wanted = inputs if sink is None else [*inputs, sink]
        gradients = torch.autograd.grad(results, wanted, grads, allow_unused=True, materialize_grads=True)
        return Grads(gradients[0], gradients[1], gradients[2], None if sink is None else gradients[3])

    def attend(self, part: Part) -> tuple[Tensor, Tensor | None]:
        """Output and log-normaliser of all rows, piece by piece."""
        facts = self.facts
        outputs: list[Tensor] = []
        lses: list[Tensor] = []
        for work in facts.work:
            padding = None if part.padding is None else part.padding[:, :, None, work.keys]
            found = facts.attention(
                part.query[:, :, work.rows],
                part.key[:, :, work.keys],
                part.value[:, :, work.keys],
                padding,
                is_causal=facts.is_causal,
                scale=facts.scale,
                enable_gqa=True,
                method=work.method,
                backend=facts.backend,
                return_lse=facts.return_lse,
                offset=work.offset,
                softcap=facts.softcap or None,
                s_aux=part.sink,
                window_size=facts.window,
            )
            outputs.append(found[0] if facts.return_lse else found)
            lses += [found[1]] if facts.return_lse else []
        if not outputs:
            rows = part.query.shape[:3]
            empty = part.query.new_zeros(*rows, part.value.shape[3])
            compute = torch.promote_types(part.query.dtype, torch.float32)
            return empty, part.query.new_zeros(rows, dtype=compute) if facts.return_lse else None
        return torch.cat(outputs, 2), torch.cat(lses, 2) if facts.return_lse else None
