"""Sliding windows for methods that know none: rows that see the same keys are handed to them without a mask.

Where the window of a row reaches beyond the first or the last key, its rows have a causal mask, in the order of the keys or
against it, or none. In between, take a block of B consecutive rows, the first of which stands at key p. All of them see the

    core        keys p - left + B .. p + right - 1,

row i of the block sees in addition

    left edge   keys p - left + i .. p - left + B - 1        (a causal mask, with rows and keys in reverse order),
    right edge  keys p + right    .. p + right + i           (a causal mask).

The method attends to the core, exact attention to the edges, and their outputs are put together by their log-normalisers
(`merge`), through which gradients flow. All blocks are served together, as entries of one batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nearfield.exact import Exact, zeros
from nearfield.kernels.dense import sink_share
from nearfield.merge import merge
from nearfield.problem import Call, Method, Problem, Rows
from nearfield.results import Outcome, mean_info

LEAST = 256
"""Windows of fewer keys are exact attention, whatever the method: there is little to leave out."""

BLOCKS = 8
"""A block has so many times fewer rows than its rows see keys. Fewer rows make edges shorter, but a key is in as many cores."""


def reversed_problem(problem: Problem) -> Problem:
    """A window without a bound on the right is a causal mask for rows and keys in reverse order."""
    assert problem.window is not None
    assert problem.window[1] < 0
    turned = _turned(problem)
    offset = problem.key.shape[2] - problem.query.shape[2] - problem.offset + problem.window[0]
    return replace(turned, window=None, is_causal=True, offset=offset)


def reversed_outcome(outcome: Outcome) -> Outcome:
    """What was computed for `reversed_problem`, in the order of the problem."""
    lse, stderr = (None if x is None else x.flip(2) for x in (outcome.lse, outcome.stderr))
    return replace(outcome, output=outcome.output.flip(2), lse=lse, stderr=stderr)


def _turned(problem: Problem) -> Problem:
    mask, padding, poison = problem.attn_mask, problem.key_padding, problem.poison
    return replace(
        problem,
        query=problem.query.flip(2),
        key=problem.key.flip(2),
        value=problem.value.flip(2),
        attn_mask=None if mask is None else mask.flip(3),
        key_padding=None if padding is None else padding.flip(2),
        poison=None if poison is None else poison.flip(2),
    )


LEAST_ROWS = 128
"""A block of `in_blocks` has at least so many rows, or as many as a window has keys: then there are about two copies of a key."""


@dataclass(frozen=True)
class Blocks:
    """The rows of a problem with a window, as `Rows`: blocks of rows are entries of the batch, with keys of their own."""

    problem: Problem
    blocks: int
    size: int
    """rows of a block. The last one may have some that are not there, and that see no key"""
    rows: Rows

    def by_row(self, x: Tensor) -> Tensor:
        """From `[batch, heads, length, ...]` to the layout of `rows`, `[batch * kv_heads * blocks, group * size, ...]`."""
        (batch, heads, length, _), kv_heads = self.problem.query.shape, self.problem.key.shape[1]
        more = x.new_zeros(batch, heads, self.blocks * self.size - length, *x.shape[3:])
        whole = torch.cat([x, more], 2).reshape(batch, kv_heads, -1, self.blocks, self.size, *x.shape[3:])
        return whole.transpose(2, 3).flatten(0, 2).flatten(1, 2)

    def by_head(self, rows: Tensor) -> Tensor:
        """From the layout of `rows` to `[batch, heads, length, ...]`."""
        (batch, kv_heads), length = self.problem.key.shape[:2], self.problem.query.shape[2]
        whole = rows.reshape(batch, kv_heads, self.blocks, -1, self.size, *rows.shape[2:])
        return whole.transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, :, :length]


def in_blocks(problem: Problem) -> Blocks:
    """The rows of a problem with a window with bounds on both sides, in blocks with the keys that some of their rows see.

    Keys and values are copied about twice, and no table of all rows and keys is made. Gradients flow through the copies.
    """
    assert problem.window is not None
    band = problem.band
    assert band is not None
    assert band.first is not None
    entries, length = problem.key.shape[0] * problem.key.shape[1], problem.key.shape[2]
    count, device = problem.query.shape[2], problem.key.device
    blocks = -(-count // max(LEAST_ROWS, problem.reach))
    size = -(-count // blocks)
    begins = torch.arange(blocks, device=device)[:, None] * size + band.first
    # Beyond the ends the first and the last key are repeated, and no row sees that.
    places = (begins + torch.arange(size + sum(problem.window), device=device)).clamp(0, length - 1).flatten()
    start, stop = (x.view(blocks, size) - begins for x in band.ends(blocks * size, length, device))
    # Rows that are not there, or whose window lies beyond all keys, see none.
    none = (start == stop) | (torch.arange(blocks * size, device=device).view(blocks, size) >= count)
    start, stop = start.masked_fill(none, 0), stop.masked_fill(none, 0)

    def of_blocks(x: Tensor) -> Tensor:
        """`[batch, kv_heads, length, ...]` as `[batch * kv_heads * blocks, width, ...]`."""
        return x.index_select(2, places).unflatten(2, (blocks, -1)).flatten(0, 2)

    keys, values = of_blocks(problem.key), of_blocks(problem.value)
    start, stop = (x.repeat(entries, 1) for x in (start, stop))
    if problem.key_padding is not None:
        # Hidden keys go to the end, and the others move up.
        counts = of_blocks(problem.key_padding)
        order = counts.logical_not().to(torch.int8).argsort(dim=1, stable=True)
        keys, values = (x.gather(1, order[..., None].expand(-1, -1, x.shape[-1])) for x in (keys, values))
        so_far = torch.nn.functional.pad(counts.cumsum(1), (1, 0))
        start, stop = so_far.gather(1, start), so_far.gather(1, stop)
    visible = stop - start
    first, visible = (x.repeat(1, problem.group_size) for x in (start.masked_fill(visible == 0, 0), visible))
    compute = problem.compute_dtype
    made = Blocks(problem, blocks, size, Rows(keys.new_empty(0), keys.to(compute), values.to(compute), visible, first))
    queries = made.by_row(problem.query.to(compute) * problem.scale)
    return replace(made, rows=replace(made.rows, queries=queries))


def check_serves(method: Method, window: tuple[int, int], reach: int) -> None:
    """Raise where a method cannot be put together from parts of the keys, or would not do what it says.

    `reach`: how many keys a row sees at most.
    """
    who = f"window_size={window}, with bounds on both sides,"
    if getattr(method, "always_lazy", False):
        raise ValueError(
            f"always_lazy=True asks for an index of the keys that a row sees, and {who} has none; leave out always_lazy"
        )
    if getattr(method, "any_window", False):
        return
    if not getattr(method, "gives_lse", False):
        raise ValueError(
            f"{who} is put together from parts of the keys by their log-normalisers, and {method!r} gives none with a gradient; "
            "use Exact(), Cells(...) or TopK(...)"
        )
    if getattr(method, "joint", False) and reach >= LEAST:
        raise ValueError(
            f"joint=True promises something for all entries of a call at once, and {who} is served in several; leave out joint, "
            "or use Exact()"
        )


@dataclass(frozen=True)
class _Part:
    """Some rows of a problem."""

    rows: slice
    served: str
    """how: `"causal"`, `"reversed"`, `"all keys"`, `"blocks"` or `"exact"`"""
    blocks: int = 1
    """of equal sizes, which all rows are in"""


def _parts(problem: Problem) -> Iterator[_Part]:
    """All rows, by which ends of the keys their windows reach."""
    assert problem.window is not None
    (left, right), count, keys = problem.window, problem.query.shape[2], problem.key.shape[2]
    # Rows before the first of these see the first key, unless they see none; those from the second one on the last key.
    past_first = max(0, min(count, left - problem.offset + 1))
    at_last = max(0, min(count, keys - 1 - right - problem.offset))
    first, last = min(past_first, at_last), max(past_first, at_last)
    if first > 0:
        yield _Part(slice(0, first), "causal")
    if past_first < at_last:
        blocks = -(-(last - first) // (problem.reach // BLOCKS))
        # Fewer rows than there are blocks are left over.
        whole = last - (last - first) % blocks
        yield _Part(slice(first, whole), "blocks", blocks)
        if whole < last:
            yield _Part(slice(whole, last), "exact")
    elif first < last:
        yield _Part(slice(first, last), "all keys")
    if last < count:
        yield _Part(slice(last, count), "reversed")


def run(method: Method, problem: Problem, call: Call) -> Outcome:
    """Attention in a window with bounds on both sides, by a method that knows none."""
    assert problem.window is not None
    if problem.reach < LEAST:
        outcome = Exact().run(problem, call)
        info = {**outcome.info, "parts": [{"rows": problem.query.shape[2], "served": "exact"}]}
        return replace(outcome, info=info) if call.diagnostics else outcome
    whole = replace(problem, sink=None, poison=None, leading=tuple(problem.query.shape[:2]), is_part=True)
    # A sink counts once, beside all keys, and needs their normaliser.
    own = replace(call, return_lse=call.return_lse or problem.sink is not None, signature=None)
    parts, outcomes = list(_parts(whole)), []
    for number, part in enumerate(parts):
        outcomes.append(_run_part(method, whole, part, replace(own, seeds=call.seeds.part(number))))
    output = torch.cat([x.output.to(problem.compute_dtype) for x in outcomes], 2)
    lses = [x.lse for x in outcomes if x.lse is not None]
    lse = torch.cat(lses, 2) if len(lses) == len(outcomes) else None
    if problem.sink is not None and lse is not None:
        share, lse = sink_share(lse, problem.sink[:, None])
        output = output * share[..., None]
    return Outcome(output, lse, None, _info(parts, outcomes) if call.diagnostics else {})


def _info(parts: list[_Part], outcomes: list[Outcome]) -> dict[str, Any]:
    """Means over all rows, and what each part says of itself."""
    counts = [part.rows.stop - part.rows.start for part in parts]
    own = [{"rows": n, "served": part.served, **x.info} for n, part, x in zip(counts, parts, outcomes, strict=True)]
    return {**mean_info(own), "parts": own}


def _run_part(method: Method, problem: Problem, part: _Part, call: Call) -> Outcome:
    here = _at(problem, part.rows)
    if part.served == "blocks":
        return _run_blocks(method, here, part.blocks, call)
    if part.served == "exact":
        return Exact().run(here, call)
    if part.served == "reversed":
        assert here.window is not None
        return reversed_outcome(_serve(method, reversed_problem(replace(here, window=(here.window[0], -1))), call))
    if part.served == "all keys":
        return _serve(method, replace(here, window=None, offset=0), call)
    assert here.window is not None
    return _serve(method, replace(here, window=None, is_causal=True, offset=here.offset + here.window[1]), call)


def _serve(method: Method, problem: Problem, call: Call) -> Outcome:
    """Rows that may see no key at all: all of those that they have may be padding."""
    return zeros(problem) if problem.is_empty else method.run(problem, call)


def _at(problem: Problem, rows: slice) -> Problem:
    """Some rows of a problem, with the keys that some of them see."""
    assert problem.band is not None
    keys = problem.band.keys_of(rows, problem.key.shape[2])
    mask, padding = problem.attn_mask, problem.key_padding
    return replace(
        problem,
        query=problem.query[:, :, rows],
        key=problem.key[:, :, keys],
        value=problem.value[:, :, keys],
        attn_mask=None if mask is None else mask[..., keys],
        key_padding=None if padding is None else padding[..., keys],
        offset=problem.offset + rows.start - keys.start,
    )


def _run_blocks(method: Method, problem: Problem, blocks: int, call: Call) -> Outcome:
    """Rows whose windows reach neither end of the keys, in blocks of equal sizes."""
    assert problem.window is not None
    left, right = problem.window
    size, first = problem.query.shape[2] // blocks, problem.offset - left
    core = _in_blocks(problem, blocks, size, first + size, left + right - size)
    middle = _serve(method, core, replace(call, return_lse=True, seeds=call.seeds.part(0)))
    before = _turned(_in_blocks(problem, blocks, size, first, size))
    after = _in_blocks(problem, blocks, size, problem.offset + right, size)
    edges = Exact().run(
        replace(_stacked(before, after), is_causal=True),
        replace(call, return_lse=True, seeds=call.seeds.part(1)),
    )
    assert edges.lse is not None
    if middle.lse is None:
        raise ValueError(f"{method!r}.run must return an Outcome with lse where call.return_lse is set, got None")
    outputs, lses = edges.output.to(problem.compute_dtype).chunk(2), edges.lse.chunk(2)
    output, lse = merge(
        [middle.output.to(problem.compute_dtype), outputs[0].flip(2), outputs[1]], [middle.lse, lses[0].flip(2), lses[1]]
    )
    info = dict(middle.info)
    for name in ("keys_per_query", "keys_used"):
        if name in info:
            # The mean over edges of which each row has two.
            info[name] += 2 * edges.info["keys_per_query"]
    return Outcome(_joined(output, blocks), _joined(lse, blocks), None, {**info, "blocks": blocks, "block": size})


def _in_blocks(problem: Problem, blocks: int, size: int, start: int, width: int) -> Problem:
    """Each block of rows an entry of the batch, with `width` keys of its own: the first block's begin at `start`."""

    def keys_of(x: Tensor, dim: int) -> Tensor:
        """Each block's keys, with the blocks behind the batch."""
        found = x.narrow(dim, start, (blocks - 1) * size + width).unfold(dim, width, size)
        return found.movedim(dim, 1).movedim(-1, dim + 1).flatten(0, 1)

    padding = None if problem.key_padding is None else keys_of(problem.key_padding, 2)
    mask = None
    if problem.attn_mask is not None:
        # One entry of the batch may stand for all of them, but not for all blocks.
        mask = keys_of(problem.attn_mask.expand(len(problem.key), -1, -1, -1), 3)
    query = problem.query.unflatten(2, (blocks, size)).movedim(2, 1).flatten(0, 1)
    return replace(
        problem,
        query=query,
        key=keys_of(problem.key, 2),
        value=keys_of(problem.value, 2),
        attn_mask=mask,
        key_padding=padding,
        window=None,
        offset=0,
        leading=tuple(query.shape[:2]),
    )


def _stacked(one: Problem, other: Problem) -> Problem:
    """Two problems of one shape as entries of one batch."""

    def both(x: Tensor | None, y: Tensor | None) -> Any:
        return None if x is None or y is None else torch.cat([x, y])

    names = ("query", "key", "value", "attn_mask", "key_padding")
    found = {name: both(getattr(one, name), getattr(other, name)) for name in names}
    return replace(one, **found, leading=tuple(found["query"].shape[:2]))


def _joined(x: Tensor, blocks: int) -> Tensor:
    """From `[batch * blocks, heads, rows, ...]` to `[batch, heads, blocks * rows, ...]`."""
    return x.unflatten(0, (-1, blocks)).movedim(1, 2).flatten(2, 3)
