"""Sequences shared out over ranks."""

from __future__ import annotations

from catalogue.mutant import Mutant

EQUAL = ("test_sharded.py::test_equal_to_one_process",)

MUTANTS = (
    Mutant(
        "ranks: the rows of a late piece stand where those of the first one do",
        "distributed.call:_in_pieces",
        "piece.start + offset, method)",
        "offset, method)",
        EQUAL,
    ),
    Mutant(
        "ranks: both pieces of a rank are neighbours",
        "ZigZag.pieces",
        "for number in (rank, 2 * self.size - 1 - rank))",
        "for number in (2 * rank, 2 * rank + 1))",
        ("test_causal_work_is_equal",),
    ),
    Mutant(
        "ranks: gathered pieces stay in the order of ranks",
        "Layout.joined",
        "sorted(found, key=lambda place: place[0])",
        "found",
        EQUAL,
    ),
    Mutant(
        "ranks: a rank keeps the gradient that it found for its own keys alone",
        "Ranks.start_sum",
        "return Pending(self, what, found, work)",
        "return Pending(self, what, x[self.rank], work)",
        ("test_gather_and_sum", *EQUAL),
    ),
    Mutant(
        "ranks: cells are those that another rank has found",
        "Dealt.together",
        "zip(self.shares, found, strict=True)",
        "zip(self.shares, reversed(found), strict=True)",
        EQUAL,
    ),
    Mutant(
        "ranks: what is left of the heads is grouped by the last rank alone",
        "Dealt.shares",
        "key=lambda one: (work[one], one)",
        "key=lambda one: (one, work[one])",
        ("test_spans_of_few_heads_are_dealt_out_by_cost",),
    ),
    Mutant(
        "ranks: cells of a rank that sees fewer segments keep their numbers",
        "Spans.renumbered",
        "part + (own[base] - other[of._base[level]])",
        "part",
        ("test_cells_of_fewer_segments_are_numbered_anew", *EQUAL),
    ),
    Mutant(
        "ranks: keys are grouped as if the last rows saw none of their own",
        "ByCells._seen",
        "self.rows.length + self.facts.offset",
        "self.rows.length // 2 + self.facts.offset",
        EQUAL,
    ),
    Mutant(
        "ranks: nobody is asked what it was called with",
        "distributed.call:_agreed",
        "arguments=_plain(str(replace(asked, s_aux=None))),\n        method=_plain(above.told),",
        "",
        ("test_all_ranks_are_told_that_one_makes_another_call",),
    ),
    Mutant(
        "ranks: what is wrong with the inputs of one rank is its own affair",
        "distributed.call:_agreed",
        'error=None if wrong is None else f"{type(wrong).__name__}: {wrong}",',
        "",
        ("test_all_ranks_are_told_that_one_makes_another_call",),
    ),
    Mutant(
        "ranks: gathered keys are kept for the backward pass",
        "Flash.forward",
        "return Found(output, lse)",
        "return Found(output, lse, (part.key,))",
        ("test_a_rank_keeps_what_is_its_own",),
    ),
    Mutant(
        "ranks: the keys of the next heads set out when they are needed",
        "Passes._parts",
        "            coming = self._start(key, value, groups[number + 1]) if number + 1 < len(groups) else None\n",
        "",
        ("test_what_is_needed_next_is_on_its_way_while_rows_attend",),
    ),
    Mutant(
        "ranks: a late piece sees the keys beside its rows alone",
        "Flash._blocks",
        "yield [*before, _Block(",
        "yield [_Block(",
        EQUAL,
    ),
    Mutant(
        "ranks: packed sequences end where their rows do",
        "distributed.call:_in_sequences",
        "place = begin - start + (key_stop - key_start) - (stop - start)",
        "place = begin - start + (key_stop - key_start) - (end - begin)",
        ("test_packed_sequences_over_ranks",),
    ),
    Mutant(
        "ranks: inside of a context lengths are exchanged all the same",
        "distributed.call:_agreed",
        "[] if layouts is not None else counts,",
        "counts,",
        ("test_contexts",),
    ),
    Mutant(
        "ranks: buffers stay shares",
        "context_parallel",
        "x.resize_(before.shape).copy_(before)",
        "pass",
        ("test_contexts",),
    ),
    Mutant(
        "ranks: the gradient of a whole sequence is that of one rank's loss",
        "_Unshard.backward",
        'ctx.ranks.start_sum("gradients of whole sequences", ctx.layout.dealt(grad, ctx.dim)).wait()',
        "ctx.layout.dealt(grad, ctx.dim)[ctx.ranks.rank]",
        ("test_shard_and_unshard_are_differentiable",),
    ),
    Mutant(
        "ranks: windows longer than a rank's tokens are none",
        "make_sharded_mask",
        "    shift = _as_int(q_offset - kv_offset)\n",
        "    shift = _as_int(q_offset - kv_offset)\n    pattern = _without_idle_bounds(pattern, q_length, kv_length, 0)\n",
        ("test_models_of_transformers",),
    ),
    Mutant(
        "ranks: a model may turn its tokens by any positions",
        "hf.sharded:_check_positions",
        "torch.equal(positions, wanted.expand_as(positions))",
        "True",
        ("test_models_of_transformers",),
    ),
)
