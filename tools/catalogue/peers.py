"""Rules of others, RULER, and a cache that looks at its error."""

from __future__ import annotations

from catalogue.mutant import Mutant

MUTANTS = (
    Mutant(
        "guard: a look is not served",
        "CellStore._within_eps",
        "output = found.to(query.dtype).view(output.shape)",
        "found.to(query.dtype).view(output.shape)",
        ("test_guard.py",),
    ),
    Mutant(
        "guard: a number that is none is content",
        "CellStore._within_eps",
        "while not error.pooled <= guard.eps and",
        "while error.pooled > guard.eps and",
        ("test_guard.py",),
    ),
    Mutant(
        "guard: what was opened is never closed",
        "CellStore._within_eps",
        "factor //= 2",
        "factor //= 1",
        ("test_guard.py",),
    ),
    Mutant(
        "guard: a captured step may look",
        "CellStore.unguarded",
        "made.look_next(sys.maxsize)",
        "made.look_next(0)",
        ("test_guard.py",),
    ),
    Mutant(
        "guard: the step that closes the first segment is not seen coming",
        "CellStore.is_due",
        "self.closed > 0 or self.length + new > self.sizes.next_close(0)",
        "self.closed > 0",
        ("test_guard.py",),
    ),
    Mutant(
        "cache: keys are grouped from the first on",
        "CacheSizes.length",
        "max(SEGMENT, self.group_from)",
        "SEGMENT",
        ("test_cell_cache.py",),
    ),
    Mutant(
        "cache: a captured step has room until the segment is closed",
        "CacheSizes.room",
        "min(self.next_close(closed) - length, max(ROOM, length))",
        "self.next_close(closed) - length",
        ("test_cell_cache_sizes.py",),
    ),
    Mutant(
        "peers: a block ahead of a row may be read",
        "Blocks.choose",
        ">= own, -torch.inf",
        "> own, -torch.inf",
        ("test_peers.py",),
    ),
    Mutant(
        "peers: blocks are counted from the padding",
        "Blocks.choose",
        "(place + missing) % rows.length",
        "place + 0 * missing",
        ("test_peers.py",),
    ),
    Mutant(
        "peers: a page is bounded from below",
        "Quest.scores",
        "positive.times(blocks.amax(3)) + negative.times(blocks.amin(3))",
        "positive.times(blocks.amin(3)) + negative.times(blocks.amax(3))",
        ("test_peers.py",),
    ),
    Mutant(
        "peers: a cluster counts once, whatever its size",
        "RetroInfer.choose",
        "scores + rows.per_head(size).clamp(min=1).log()[:, :, None]",
        "scores + 0 * rows.per_head(size).clamp(min=1).log()[:, :, None]",
        ("test_peers.py",),
    ),
    Mutant(
        "peers: a sample counts once",
        "VAttention.choose",
        "torch.where(drawn, times.clamp(min=1).log(), 0.0)",
        "torch.where(drawn, 0 * times.clamp(min=1).log(), 0.0)",
        ("test_peers.py",),
    ),
    Mutant(
        "peers: what the last queries looked at is not what is kept",
        "SnapKV.notes",
        "_best(smooth, budget - seen)",
        "_best(-smooth, budget - seen)",
        ("test_peers.py",),
    ),
    Mutant(
        "ruler: a prompt is read again for every rule",
        "_readings",
        "not in readings:",
        "not in {}:",
        ("test_peers.py",),
    ),
    Mutant(
        "compiled steps: the compiler gives up after eight layers",
        "compiled_steps",
        "recompile_limit=1 << 16, accumulated_recompile_limit=1 << 16",
        "recompile_limit=8",
        ("test_model_step.py::test_steps_of_many_layers_are_compiled_once",),
    ),
)
