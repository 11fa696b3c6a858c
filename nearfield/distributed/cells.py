"""Attention by cells over ranks: keys are grouped once by all together, and rows attend with the cells that are known."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nearfield.cells.method import Cells
from nearfield.cells.moments import TableGradient
from nearfield.cells.operator import Given, Recipe, backward, forward, wide
from nearfield.cells.partition import asks_queries
from nearfield.cells.partition.by_queries import latest_squares, sizes_of, strewn_squares
from nearfield.cells.spans import Spans, closed_keys
from nearfield.cells.torch.head import edges_of
from nearfield.distributed.dealing import Dealt
from nearfield.distributed.group import Ranks
from nearfield.distributed.layout import Layout
from nearfield.distributed.tables import Tables
from nearfield.distributed.ways import Again, Begun, Facts, Found, Grads, Part
from nearfield.kernels.dense import sink_share, sink_weight
from nearfield.problem import Problem, Rows, check, isolate_non_finite


@dataclass(frozen=True)
class ByCells:
    """`Cells`. All rows of this rank attend in one call, so that tables are made once; blocks of rows that open cells together
    are cut from each piece by itself."""

    facts: Facts
    recipe: Recipe
    ranks: Ranks
    rows: Layout
    keys: Layout
    keeps_lse = True
    shared = 1

    @property
    def method(self) -> Cells:
        assert isinstance(self.facts.method, Cells)
        return self.facts.method

    @torch.no_grad()
    def begin(self, query: Tensor, key: Tensor, padding: Tensor | None, kept: tuple[Tensor, ...] = ()) -> Begun:
        """The cells of all keys. This rank groups its share, unless it has `kept` what it found."""
        batch, kv_heads = key.shape[:2]
        seen = self._seen(batch * kv_heads, padding)
        closed = closed_keys(seen, self.recipe.sizes._replace(group=1, share=1))[:, 0].tolist()
        dealt = Dealt(self.recipe, tuple(closed), self.keys.length, self.ranks.size)
        if not kept:
            asked = self._query_sizes(dealt, query, padding)
            kept = (dealt.group(self.ranks.rank, *self._inputs(dealt, key, padding, seen), asked),)
        found = self.ranks.gather("cells", kept[0])
        cells = dealt.together(list(found)).unflatten(0, (batch, kv_heads))
        return Begun(kept, cells, torch.tensor(closed).view(batch, kv_heads).tolist())

    def _seen(self, entries: int, padding: Tensor | None) -> Tensor:
        """`[entries, 1]`: how many keys the last row of the sequence sees, which sees the most. Without padding it is on the CPU:
        nobody need wait for a GPU."""
        length = self.keys.length if self.rows.length else 0
        if self.facts.is_causal:
            length = max(0, min(length, self.rows.length + self.facts.offset))
        if padding is None:
            return torch.full((entries, 1), length)
        counts = padding[..., :length].sum(-1, keepdim=True)
        return counts.expand(-1, entries // len(counts), -1).reshape(entries, 1)

    def _query_sizes(self, dealt: Dealt, query: Tensor, padding: Tensor | None) -> Tensor | None:
        """`[entries, segments, dim]`: how large queries are when each segment is closed, on all ranks together.

        None: the partition does not ask, or there are no cells.
        """
        ends, is_causal = dealt.ends, self.facts.is_causal
        if not asks_queries(dealt.partition) or not (ends if is_causal else dealt.length):
            return None
        batch, group = query.shape[0], self.recipe.sizes.group
        members = query.unflatten(1, (-1, group))
        if not dealt.by_kernels and not bool(members.sum(dtype=torch.promote_types(query.dtype, torch.float32)).isfinite()):
            members = members.masked_fill(~members.isfinite().all(-1, keepdim=True), 0)
        places = self.rows.places(self.ranks.rank)
        if not is_causal:
            squares = strewn_squares(members, places.to(query.device), self.rows.length)
        else:
            # Without padding this is on the CPU: nobody need wait for a GPU.
            visible = (places + 1 + self.facts.offset).clamp(0, self.keys.length)
            if padding is None:
                squares = latest_squares(members, visible, ends)
            else:
                seen = torch.nn.functional.pad(padding.cumsum(-1), (1, 0))[..., visible.to(padding.device)]
                entries = seen.expand(batch, members.shape[1], -1).flatten(0, 1)
                own = zip(members.flatten(0, 1), entries, strict=True)
                squares = torch.stack([latest_squares(x, sees, ends) for x, sees in own])
        return sizes_of(self.ranks.gather("sizes of queries", squares.reshape(-1, *squares.shape[-2:])).sum(0))

    def _inputs(self, dealt: Dealt, key: Tensor, padding: Tensor | None, seen: Tensor) -> tuple[Tensor, Tensor]:
        """The keys that this rank groups, `[shares, n, dim]` with zeros for others, and how many are seen, `[shares, 1]`."""
        rank, entries = self.ranks.rank, key.flatten(0, 1)
        # Of padded keys the places where they are grouped are others.
        every = [slice(0, dealt.length)]
        wanted = [[(x.entry, dealt.keys(x) if padding is None else every) for x in shares] for shares in dealt.shares]
        parts = [[entries[entry, x] for entry, some in each for x, _ in self.keys.within(rank, some)] for each in wanted]
        counts = [
            sum(x.stop - x.start for _, some in wanted[rank] for x, _ in self.keys.within(other, some))
            for other in range(self.ranks.size)
        ]
        flat = [torch.cat(part) if part else entries[0, :0] for part in parts]
        coming = self.ranks.start_exchange("keys to group", flat, [(count, key.shape[3]) for count in counts])
        own = [entry for entry, _ in wanted[rank]]
        visible = torch.full((len(own), 1), int(seen[0, 0]), device=key.device) if padding is None else seen[own]
        keys = key.new_zeros(len(own), dealt.length, key.shape[3])
        for other, pending in enumerate(coming):
            come = pending.wait()
            come = come if dealt.by_kernels else _without_non_finite(come)
            for place, (_, some) in zip(keys, wanted[rank], strict=True):
                for x, there in self.keys.within(other, some):
                    count = x.stop - x.start
                    place[there], come = come[:count], come[count:]
        if padding is not None:
            counted = padding.expand(-1, key.shape[1], -1).flatten(0, 1)[own]
            # As in `Problem.grouped`: what padding hides comes last.
            order = counted.logical_not().to(torch.int8).argsort(dim=1, stable=True)
            keys = keys.gather(1, order[..., None].expand_as(keys)).masked_fill(~counted.gather(1, order)[..., None], 0)
        return keys, visible

    def _grouped(self, part: Part) -> Rows:
        """Keys and values of a part as they are grouped: the same on all ranks, whatever rows they have."""
        places = torch.arange(0, device=part.key.device) if self.facts.is_causal else None
        return self._problem(part._replace(query=part.query[:, :, :0]), places).grouped

    def _tables(self, part: Part) -> Tables | None:
        """Those of all keys. None: kernels make their own."""
        if self.recipe.engine == "triton":
            return None
        assert part.begun.cells is not None
        rows, sizes = self._grouped(part), self.recipe.sizes
        cells = part.begun.cells[..., : rows.length].flatten(0, 1)
        edges = []
        for cell_of, closed in zip(cells, itertools.chain(*part.begun.closed), strict=True):
            segment = sizes.segment or closed
            edges.append(edges_of(Spans(closed // segment if segment else 0, sizes.span_levels), sizes, segment, cell_of))
        return Tables.made(self.ranks, [*map(wide, rows.keys)], [*map(wide, rows.values)], cells.long(), edges)

    def forward(self, part: Part, trained: bool) -> Found:
        outputs: list[Tensor] = []
        lses: list[Tensor] = []
        kept: list[Tensor] = []
        tables = self._tables(part)
        for own, places in self._calls(part):
            found = self._attend(own, places, tables)
            outputs.append(found.output)
            lses += [] if found.lse is None else [found.lse]
            kept += found.kept
        if not outputs:
            output = part.query.new_zeros(*part.query.shape[:3], part.value.shape[3])
            return Found(output, output.new_zeros(output.shape[:3], dtype=self._compute(part)))
        return Found(torch.cat(outputs, 2), torch.cat(lses, 2), tuple(kept))

    def backward(
        self, part: Part, output: Tensor, lse: Tensor | None, kept: tuple[Tensor, ...], grad: Tensor, lse_grad: Tensor | None
    ) -> Grads:
        assert lse is not None
        query_grads = []
        total = Grads(
            part.query.new_zeros(part.query.shape),
            part.key.new_zeros(part.key.shape, dtype=self._compute(part)),
            part.value.new_zeros(part.value.shape, dtype=self._compute(part)),
            None if part.sink is None else torch.zeros_like(part.sink),
        )
        start, tables = 0, self._tables(part)
        table_grads = [] if tables is None else [TableGradient.zeros_like(table) for table in tables.every]
        for number, (own, places) in enumerate(self._calls(part)):
            rows = slice(start, start + own.query.shape[2])
            start = rows.stop
            of_lse = None if lse_grad is None else lse_grad[:, :, rows]
            given = output[:, :, rows], lse[:, :, rows], kept[2 * number : 2 * number + 2], grad[:, :, rows], of_lse
            found = self._differentiate(own, places, *given, tables, table_grads)
            query_grads.append(found.query)
            total.key.add_(found.key)
            total.value.add_(found.value)
            if total.sink is not None and found.sink is not None:
                total.sink.add_(found.sink)
        if tables is not None:
            self._spread(part, tables, table_grads, total)
        query_grad = torch.cat(query_grads, 2) if query_grads else total.query
        return total._replace(query=query_grad, key=total.key.to(part.key.dtype), value=total.value.to(part.value.dtype))

    def _spread(self, part: Part, tables: Tables, table_grads: list[TableGradient], total: Grads) -> None:
        """Add what moments pass on to keys and values, the gradients of all ranks together: each rank does so for its cells."""
        tables.summed_(table_grads)
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in (part.key, part.value)]
            rows = self._grouped(part._replace(key=inputs[0], value=inputs[1]))
        found: list[list[Tensor]] = [[], []]
        for entry, (table, parts) in enumerate(zip(tables.every, tables.parts, strict=True)):
            own = [wide(x[entry].detach()) for x in (rows.keys, rows.values)]
            key_grad, value_grad = (torch.zeros_like(x, dtype=self._compute(part)) for x in own)
            table_grads[entry].spread_(table, own[0], own[1], key_grad, value_grad, parts[self.ranks.rank].cells)
            found[0].append(key_grad)
            found[1].append(value_grad)
        reached = rows.keys, rows.values
        grads = [torch.stack(x)[..., : y.shape[2]].to(y.dtype) for x, y in zip(found, reached, strict=True)]
        of_inputs = torch.autograd.grad(reached, inputs, grads)
        total.key.add_(of_inputs[0])
        total.value.add_(of_inputs[1])

    def _calls(self, part: Part) -> Iterator[tuple[Part, Tensor | None]]:
        """The calls to make, with the rows of each and where these stand."""
        if not self.facts.work:
            return
        if not self.facts.is_causal:
            yield part, None
            return
        device = part.query.device
        places = [torch.arange(x.rows.stop - x.rows.start, device=device) + (x.offset or 0) for x in self.facts.work]
        if self.recipe.sizes.share == 1:
            yield part, torch.cat(places)
            return
        for work, own in zip(self.facts.work, places, strict=True):
            yield part._replace(query=part.query[:, :, work.rows]), own

    def _compute(self, part: Part) -> torch.dtype:
        return torch.promote_types(part.query.dtype, torch.float32)

    def _problem(self, part: Part, places: Tensor | None) -> Problem:
        facts, padding = self.facts, None if part.padding is None else part.padding[:, :, None]
        is_causal = places is not None
        problem = check(
            part.query, part.key, part.value, padding, 0.0, is_causal, facts.scale, True, None, facts.softcap, part.sink
        )
        problem = replace(problem, places=places)
        if self.method.is_async(problem, facts.backend):
            return replace(problem, sync=False)
        return isolate_non_finite(problem, False)

    def _given(self, part: Part, rows: Rows) -> Tensor:
        """`[entries, span_levels, n]`: the cells of all keys."""
        assert part.begun.cells is not None
        return part.begun.cells[..., : rows.length].flatten(0, 1)

    @torch.no_grad()
    def _attend(self, part: Part, places: Tensor | None, tables: Tables | None) -> Found:
        problem = self._problem(part, places)
        if problem.is_empty:
            output, lse = self._by_calls.attend(part)
            nothing = part.query.new_zeros(0, dtype=torch.int32)
            return Found(output, lse, (nothing, nothing))
        rows = problem.grouped
        inputs = rows.queries, rows.keys, rows.values, rows.visible, _no_seed()
        given, made = Given(self._given(part, rows)), () if tables is None else tables.every
        found, lse, _, _, opened, order, *_ = forward(*inputs, *self.recipe.arguments(), given=given, tables=made)
        if problem.row_sinks is not None:
            share, lse = sink_share(lse, problem.row_sinks)
            found = found * share[..., None]
        output, lse = problem.by_head(found).to(problem.query.dtype), problem.by_head(lse)
        if problem.poison is not None:
            output, lse = output * problem.poison[..., None], lse * problem.poison
        return Found(output, lse, (opened, order))

    def _differentiate(
        self,
        part: Part,
        places: Tensor | None,
        output: Tensor,
        lse: Tensor,
        kept: tuple[Tensor, ...],
        grad: Tensor,
        lse_grad: Tensor | None,
        tables: Tables | None,
        table_grads: list[TableGradient],
    ) -> Grads:
        """Gradients of the inputs; those of `tables` are added to `table_grads`."""
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in (part.query, part.key, part.value)]
            sink = None if part.sink is None else part.sink.detach().requires_grad_()
            own = part._replace(query=inputs[0], key=inputs[1], value=inputs[2], sink=sink)
            problem = self._problem(own, places)
            if problem.is_empty:
                return self._by_calls.backward(part, output, lse, (), grad, lse_grad)
            rows, sinks = problem.grouped, problem.row_sinks
        if problem.poison is not None:
            grad = grad * problem.poison[..., None]
        output, grad, lse = (problem.by_row(x) for x in (output, grad, lse))
        of_lse = None if lse_grad is None else problem.by_row(lse_grad)
        opened, order = kept
        detached = rows.detach()
        drawn = opened.new_empty(*rows.visible.shape, 0)
        plan = self._given(part, detached), opened, order, drawn, drawn.to(lse.dtype)
        between = detached.visible, _no_seed(), output, lse, *plan
        with torch.no_grad():
            of_inputs = detached.queries, detached.keys, detached.values
            made = () if tables is None else tables.every
            settings = self.recipe.arguments()
            found = list(backward(grad, of_lse, *of_inputs, *between, *settings, tables=made, table_grads=table_grads))
        reached = [rows.queries, rows.keys, rows.values]
        if sink is not None and sinks is not None:
            delta = (grad.to(lse.dtype) * output.to(lse.dtype)).sum(-1)
            delta = delta if of_lse is None else delta - of_lse
            reached, inputs, found = [*reached, sinks], [*inputs, sink], [*found, -sink_weight(lse, sinks.detach()) * delta]
        gradients = torch.autograd.grad(reached, inputs, found)
        return Grads(gradients[0], gradients[1], gradients[2], None if sink is None else gradients[3])

    @property
    def _by_calls(self) -> Again:
        """For rows that see no key at all."""
        return Again(replace(self.facts, return_lse=True))


def _without_non_finite(keys: Tensor) -> Tensor:
    """Keys `[n, dim]`, those with NaN or inf as zeros."""
    # A sum is finite only if all its terms are: one cheap pass for the usual case.
    if bool(keys.sum(dtype=torch.promote_types(keys.dtype, torch.float32)).isfinite()):
        return keys
    return keys.masked_fill(~keys.isfinite().all(-1, keepdim=True), 0)


def _no_seed() -> Tensor:
    """Nothing is drawn."""
    return torch.zeros((), dtype=torch.int64)
