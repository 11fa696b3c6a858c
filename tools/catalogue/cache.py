"""Breaks of the cache that retrieves, and of memories."""

from __future__ import annotations

from catalogue.mutant import Mutant

HAND = "test_cell_cache.py::test_one_step_by_hand"
ENGINE = "test_cell_cache.py::test_few_opened_is_the_engine_with_a_span_per_segment"
LISTS = "test_cache_benchmark.py::test_a_store_is_as_good_as_lists"
STEP = "test_decode.py::test_a_step_is_the_step_in_torch"

MUTANTS = (
    Mutant(
        "cache: a group that opens what its first query wants",
        "cache/tables.py",
        "scores = scores.view(heads, -1, rows, scores.shape[2]).amax(1)",
        "scores = scores.view(heads, -1, rows, scores.shape[2])[:, 0]",
        (HAND,),
    ),
    Mutant(
        "cache: shares of a group not normalised",
        "cache/tables.py",
        "scores -= torch.logaddexp(logits.logsumexp(2), near)[..., None]",
        "scores -= 0.0 * torch.logaddexp(logits.logsumexp(2), near)[..., None]",
        (HAND, "test_cell_cache.py"),
    ),
    Mutant(
        "cache: opened cells keep their mass",
        "cache/tables.py",
        "return Routed(opened, logits.scatter_(2, taken.reshape(heads, every, -1), -torch.inf))",
        "return Routed(opened, logits)",
        (HAND, ENGINE),
    ),
    Mutant(
        "cache: covariance of values and keys forgotten",
        "cache/tables.py",
        "tilt = products(queries, covariance).mul_(weight.sum(2, keepdim=True))",
        "tilt = products(queries, covariance).mul_(0.0)",
        (HAND, ENGINE),
    ),
    Mutant(
        "cache: keys of a reopened segment in another order",
        "cache/held.py",
        "place.copy_(_unsorted(place, self.order.filled[:, :, part]))",
        "place.copy_(place.clone())",
        (LISTS, "test_cell_cache.py"),
    ),
    Mutant(
        "decode: a key too few",
        "kernels/triton/decode.py",
        "there = place < length\n",
        "there = place < length - 1\n",
        (STEP,),
    ),
    Mutant(
        "decode: opened cells keep their mass",
        "kernels/triton/decode.py",
        'tl.store(masses + (entry * group + member) * most_cells + cell, -float("inf"), mask=taken)',
        "tl.store(masses + (entry * group + member) * most_cells + cell, 0.0, mask=taken & (cell < 0))",
        (STEP,),
    ),
    Mutant(
        "decode: only one member of the group chooses",
        "kernels/triton/decode.py",
        "best = tl.maximum(best, tl.where(score > VOID / 2, score - everything * 0.6931471805599453, VOID))",
        "best = tl.where(score > VOID / 2, score - everything * 0.6931471805599453, VOID)",
        (STEP,),
    ),
    Mutant(
        "decode: values of closed cells not tilted",
        "kernels/triton/decode.py",
        "total = closed * gain",
        "total = 0.0 * gain",
        (STEP,),
    ),
    Mutant(
        "decode: padding seen",
        "kernels/triton/decode.py",
        "seen = seen & (tl.load(counts",
        "seen = seen | (tl.load(counts",
        ("test_decode.py::test_padding_is_not_seen",),
    ),
    Mutant(
        "decode: what a memory keeps read from the store",
        "kernels/triton/decode.py",
        "return tl.where(early[:, None], before, found)",
        "return found",
        ("test_decode.py::test_a_beginning_that_somebody_else_keeps",),
    ),
    Mutant(
        "memory: a save that never arrives",
        "hf/memory_file.py",
        "os.replace(",
        "(lambda *_: None)(",
        ("test_cell_cache_memory.py",),
    ),
)
