"""A cache that opens only the cells that matter."""

from __future__ import annotations

from catalogue.mutant import Mutant

BY_HAND = "test_opened_cells_by_hand"
AS_MANY = "test_a_step_is_the_one_that_opens_as_many"
KERNELS = "test_min_weight.py::test_the_kernels_are_the_step_in_torch"

MUTANTS = (
    Mutant(
        "min_weight: cells of less weight are opened too",
        "cache.attention:route",
        "taken = best > lowest",
        "taken = best > lowest - 2.0",
        (BY_HAND, KERNELS),
    ),
    Mutant(
        "min_weight: cells that stay closed count for nothing",
        "cache.attention:route",
        "log_masses.gather(2, cells).masked_fill_(_of_queries(taken, heads, group_rows), -torch.inf)",
        "torch.full_like(log_masses.gather(2, cells), -torch.inf)",
        (AS_MANY, KERNELS),
    ),
    Mutant(
        "min_weight: cells that stay closed are read all the same",
        "cached_attention",
        "opened_places(state.tables.flat, routed.opened, heads, routed.taken)",
        "opened_places(state.tables.flat, routed.opened, heads)",
        (AS_MANY, "test_fewer_keys_are_read_where_weights_are_spread_out"),
    ),
    Mutant(
        "min_weight: a query alone is not compared with all that it sees",
        "cached_attention",
        "if group_rows > rows or lowest > -math.inf:",
        "if group_rows > rows:",
        (KERNELS,),
    ),
    Mutant(
        "min_weight: not known to the kernel",
        "triton.decode:choose_cells",
        "best > tl.maximum(lowest, LEAST_SCORE)",
        "best > LEAST_SCORE",
        (KERNELS,),
    ),
    Mutant(
        "min_weight: cells stay closed where all may be opened",
        "CellStore._lowest",
        "if self.min_weight is None or probes >= cells:",
        "if self.min_weight is None:",
        ("test_where_all_cells_may_be_opened_a_step_is_exact",),
    ),
    Mutant(
        "min_weight: a guard cannot open more",
        "CellStore._lowest",
        "- 2 * math.log(factor)",
        "",
        ("test_a_guard_opens_more_cells",),
    ),
    Mutant(
        "min_weight: no more cells than usual",
        "CellStore._probes",
        "usual *= TIMES_BY_WEIGHT",
        "usual *= 1",
        ("test_default_probes_are_four_times_as_many",),
    ),
    Mutant(
        "min_weight: chunks open four times as many",
        "CellStore._chunk_sizes",
        "probes = self._usual_probes(state.closed, state.cells)",
        "probes = self._probes(state.closed, state.cells)",
        ("test_later_chunks_open_the_usual_number",),
    ),
    Mutant(
        "min_weight: lost on the way to a layer",
        "StoreOptions.of",
        "of_steps = store.min_weight,",
        "of_steps = None,",
        ("test_a_cache_hands_it_on",),
    ),
)
