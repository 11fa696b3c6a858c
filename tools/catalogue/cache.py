"""Breaks of the cache that retrieves, and of memories."""

from __future__ import annotations

from catalogue.mutant import Mutant

HAND = "test_one_step_by_hand"
ENGINE = "test_few_opened_is_the_engine_with_a_span_per_segment"
LISTS = "test_a_store_is_as_good_as_lists"
STEP = "test_a_step_is_the_step_in_torch"

MUTANTS = (
    Mutant(
        "cache: a group that opens what its first query wants",
        "route",
        "scores = scores.view(heads, -1, rows, scores.shape[2]).amax(1)",
        "scores = scores.view(heads, -1, rows, scores.shape[2])[:, 0]",
        (HAND,),
    ),
    Mutant(
        "cache: shares of a group not normalised",
        "route",
        "scores -= torch.logaddexp(logits.logsumexp(2), near)[..., None]",
        "scores -= 0.0 * torch.logaddexp(logits.logsumexp(2), near)[..., None]",
        (HAND, "test_cell_cache.py"),
    ),
    Mutant(
        "cache: opened cells keep their mass",
        "route",
        "return Routed(opened, logits.scatter_(2, taken.reshape(heads, every, -1), -torch.inf))",
        "return Routed(opened, logits)",
        (HAND, ENGINE),
    ),
    Mutant(
        "cache: covariance of values and keys forgotten",
        "sum_up",
        "tilt = products(queries, covariance).mul_(weight.sum(2, keepdim=True))",
        "tilt = products(queries, covariance).mul_(0.0)",
        (HAND, ENGINE),
    ),
    Mutant(
        "cache: keys of a reopened segment in another order",
        "Held._reopen",
        "place.copy_(_unsorted(place, self.order.filled[:, :, part]))",
        "place.copy_(place.clone())",
        (LISTS, "test_cell_cache.py"),
    ),
    Mutant(
        "cache: a prompt in as many segments as tokens one by one",
        "StoreSizes.next_end",
        "return least if self.segment is not None else max(least, (position - self.window) // ROUND * ROUND)",
        "return least",
        ("test_cell_cache_sizes.py",),
    ),
    Mutant(
        "cache: a segment that the window still reads is closed",
        "StoreSizes.next_end",
        "max(least, (position - self.window) // ROUND * ROUND)",
        "max(least, position // ROUND * ROUND)",
        ("test_cell_cache_sizes.py",),
    ),
    Mutant(
        "cache: rows before the latest served by the kernels",
        "CellStore._attend",
        "if first + 1 == held.length and decode.serves(held, query, self.probes):",
        "if decode.serves(held, query, self.probes):",
        ("test_kernels_serve_the_latest_row",),
    ),
    Mutant(
        "cache: queries that are a part of others given to the kernels",
        "CellStore._attend",
        "query.shape[3]).contiguous()",
        "query.shape[3])",
        ("test_kernels_serve_the_latest_row",),
    ),
    Mutant(
        "offload: all batch entries read the keys of the first one",
        "Buffer.rows",
        "head % (batch * heads) * rows",
        "head % heads * rows",
        ("test_cell_cache_offload.py",),
    ),
    Mutant(
        "offload: what is put away is not reordered",
        "Buffer.select",
        "self.away.select(entries.cpu())",
        "self.away.select(torch.zeros_like(entries.cpu()))",
        ("test_cell_cache_offload.py",),
    ),
    Mutant(
        "memory: ends of segments in any order",
        "_are_bounds",
        "bool((bounds[1:] > bounds[:-1]).all())",
        "bool((bounds[1:] >= 0).all())",
        ("test_crafted_files",),
    ),
    Mutant(
        "decode: a key too few",
        "select",
        "there = place < length\n",
        "there = place < length - 1\n",
        (STEP,),
    ),
    Mutant(
        "decode: opened cells keep their mass",
        "choose",
        "mask=taken[:, None] & is_one_row[None, :])",
        "mask=(taken & (slot < 0))[:, None] & is_one_row[None, :])",
        (STEP,),
    ),
    Mutant(
        "decode: only one member of the group chooses",
        "choose",
        "best = tl.max(tl.where(score > VOID / 2, score - everything[None, :], VOID), 1)",
        "best = tl.max(tl.where((score > VOID / 2) & (member == 0)[None, :], score - everything[None, :], VOID), 1)",
        (STEP,),
    ),
    Mutant(
        "decode: values of closed cells not tilted",
        "unite",
        "total = closed * gain",
        "total = 0.0 * gain",
        (STEP,),
    ),
    Mutant(
        "decode: padding seen",
        "select",
        'logits = tl.where(seen[None, :], logits, -float("inf"))',
        'logits = tl.where(there[None, :], logits, -float("inf"))',
        ("test_padding_is_not_seen",),
    ),
    Mutant(
        "decode: padding among the latest keys",
        "look",
        "late_logits = tl.where(seen[None, :]",
        "late_logits = tl.where(there[None, :]",
        ("test_padding_among_the_latest_keys",),
    ),
    Mutant(
        "decode: all near keys count where cells are chosen",
        "_recent",
        "<= own - RECENT",
        "< own - RECENT",
        ("test_rows_at_once_are_rows_one_by_one",),
    ),
    Mutant(
        "decode: ties before what is better",
        "largest",
        "place = tl.where(tied, tl.sum(sure.to(tl.int64), 0) + (rank >> 32), rank & 0xFFFFFFFF) - 1",
        "place = tl.cumsum((sure | tied).to(tl.int64), 0) - 1",
        ("test_ties_keep_out_nothing_that_is_better",),
    ),
    Mutant(
        "decode: as many grains as cells are wanted, and no more cells than grains",
        "choose",
        "tl.where(found == probes, least, VOID)",
        "least",
        ("test_decode.py",),
    ),
    Mutant(
        "decode: parts that are not numbers count",
        "unite",
        "tl.where((own > 0.0)[:, None], own[:, None] * found, 0.0)",
        "own[:, None] * found",
        ("test_decode.py",),
    ),
    Mutant(
        "decode: names that older versions of Triton do not know",
        "IS_NEW",
        'IS_NEW = VERSION >= (3, 6) and hasattr(cuda, "gdc_wait")',
        "IS_NEW = True",
        ("test_versions_without_early_starts_never_see_the_name",),
    ),
    Mutant(
        "graph: other cells go unnoticed",
        "read_of",
        "tuple(held.bounds), *",
        "held.closed, *",
        ("test_a_graph_knows_what_it_was_captured_for",),
    ),
    Mutant(
        "decode: what a memory keeps read from the store",
        "load_places",
        "return tl.where(early, before, found)",
        "return found",
        ("test_a_beginning_that_somebody_else_keeps",),
    ),
    Mutant(
        "memory: a save that never arrives",
        "write_memory",
        "os.replace(",
        "(lambda *_: None)(",
        ("test_memory_file.py",),
    ),
)
