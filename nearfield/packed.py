"""Sequences of different lengths laid end to end: those of equal length are attended to together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

Rows = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Packed:
    """Sequences laid end to end, as one call of attention for each pair of lengths that occurs."""

    calls: list[Rows]
    """query, key and value of each call, `[sequences, heads, length, dim]`; one without sequences where there are none"""
    order: Tensor
    """where the rows of all calls, one after the other, lie among those of the query"""
    offsets: Tensor
    """where the sequences of the query begin, and where the last one ends"""

    @staticmethod
    def of(query: Tensor, key: Tensor, value: Tensor, edges: Sequence[int], key_edges: Sequence[int], offsets: Tensor) -> Packed:
        """Sequence i has the rows from edge i to edge i + 1 of query `[total, heads, dim]`, and of key and value. They are copied
        once, in the order of the calls."""
        groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for (first, last), (key_first, key_last) in zip(pairwise(edges), pairwise(key_edges), strict=True):
            groups.setdefault((last - first, key_last - key_first), []).append((first, key_first))
        if not groups:
            # What has no rows still has a shape, and depends on the inputs.
            groups[0, 0] = []
        device = query.device
        shapes = [(length, keys, len(found)) for (length, keys), found in groups.items()]
        rows = _places([(first, length) for (length, _), found in groups.items() for first, _ in found], device)
        own = _places([(first, keys) for (_, keys), found in groups.items() for _, first in found], device)
        queries = query.index_select(0, rows).split([count * length for length, _, count in shapes])
        sizes = [count * keys for _, keys, count in shapes]
        all_keys, all_values = (x.index_select(0, own).split(sizes) for x in (key, value))
        calls = []
        for (length, keys, count), q, k, v in zip(shapes, queries, all_keys, all_values, strict=True):
            inputs = [x.view(count, n, *x.shape[1:]).transpose(1, 2) for x, n in ((q, length), (k, keys), (v, keys))]
            calls.append((inputs[0], inputs[1], inputs[2]))
        return Packed(calls, rows, offsets)

    def joined(self, results: Sequence[Tensor]) -> Tensor:
        """The results of the calls, `[sequences, heads, length, ...]`, as `[total, heads, ...]` in the order of the query."""
        rows = [x.transpose(1, 2).flatten(0, 1) for x in results]
        return torch.cat(rows).index_select(0, self.order.argsort())

    def nested(self, results: Sequence[Tensor]) -> Tensor:
        """The same as a jagged nested tensor `[batch, heads, length, ...]`."""
        return torch.nested.nested_tensor_from_jagged(self.joined(results), self.offsets).transpose(1, 2)


def _places(runs: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """The numbers `first, first + 1, ...` of all runs (first, length), one after the other."""
    found = [torch.arange(first, first + length) for first, length in runs]
    return (torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)).to(device)


def edges_of(name: str, edges: object, total: int | None) -> list[int]:
    """The numbers of a tensor `cu_seqlens`, checked; `total` None: nobody knows yet how many rows there are. Waits for a GPU."""
    if not isinstance(edges, Tensor) or edges.dim() != 1 or edges.dtype not in (torch.int32, torch.int64) or len(edges) == 0:
        got = f"{edges.dtype} of shape {tuple(edges.shape)}" if isinstance(edges, Tensor) else type(edges).__name__
        raise ValueError(f"{name} must be an int32 or int64 tensor of shape [sequences + 1], got {got}")
    found: list[int] = edges.tolist()
    total = found[-1] if total is None else total
    if found[0] != 0 or found[-1] != total or any(a > b for a, b in pairwise(found)):
        raise ValueError(
            f"{name} must begin with 0, never decrease and end with the number of rows, {total}; got {_some(found)}. It is "
            "torch.nn.functional.pad(lengths.cumsum(0), (1, 0))"
        )
    return found


def _some(numbers: list[int]) -> str:
    return str(numbers) if len(numbers) <= 8 else f"[{', '.join(map(str, numbers[:4]))}, ..., {numbers[-1]}]"


def check_longest(name: str, given: object, edges: Sequence[int]) -> None:
    """A `max_seqlen` that is given must be true: kernels elsewhere trust it."""
    if given is None:
        return
    if isinstance(given, bool) or not isinstance(given, int):
        raise ValueError(f"{name} must be an integer or None, got {given!r}")
    longest = max((b - a for a, b in pairwise(edges)), default=0)
    if given < longest:
        raise ValueError(f"{name}={given}, but a sequence has {longest} rows; pass {longest}, or None to have it looked up")


def is_jagged(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_nested and x.layout == torch.jagged


def jagged(query: Tensor, key: Tensor, value: Tensor) -> Packed:
    """The calls for three jagged nested tensors `[batch, heads, length, dim]`."""
    rows, edges = [], []
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if not is_jagged(x) or x.dim() != 4 or not _is_ragged_at_length(x):
            raise ValueError(
                f"{name} must be a jagged nested tensor [batch, heads, length, dim] as the others, got "
                f"{'one' if x.is_nested else 'a tensor'} of shape {tuple(x.shape)}; make it with torch.nested.nested_tensor("
                "[...], layout=torch.jagged), of [length, heads, dim] each, and .transpose(1, 2)"
            )
        by_length: Any = x.transpose(1, 2)
        begins, lengths = by_length.offsets().tolist(), by_length.lengths()
        if lengths is None:
            rows.append(by_length.values())
            edges.append(begins)
        else:
            # There are rows between the sequences that belong to none.
            runs = list(zip(begins, lengths.tolist(), strict=False))
            rows.append(by_length.values().index_select(0, _places(runs, x.device)))
            edges.append([0, *accumulate(length for _, length in runs)])
    if edges[1] != edges[2]:
        raise ValueError("key and value must have sequences of the same lengths")
    if len(edges[0]) != len(edges[1]):
        raise ValueError(f"query has {len(edges[0]) - 1} sequences, key and value have {len(edges[1]) - 1}")
    whole: Any = query.transpose(1, 2)
    # The very offsets of the query, where it has no holes: only then can the two be added.
    offsets = whole.offsets() if whole.lengths() is None else torch.tensor(edges[0], device=query.device)
    return Packed.of(rows[0], rows[1], rows[2], edges[0], edges[1], offsets)


def _is_ragged_at_length(x: Tensor) -> bool:
    """Whether the dimension before the last one is the one whose length differs: the others are plain integers."""
    return isinstance(x.shape[1], int) and isinstance(x.shape[3], int) and not isinstance(x.shape[2], int)
