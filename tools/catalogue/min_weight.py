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
        "if group_rows > rows or opening.lowest > -math.inf:",
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
        "CellStore._opening",
        "if self.min_weight is None or enough >= cells:",
        "if self.min_weight is None:",
        ("test_where_all_cells_may_be_opened_a_step_is_exact",),
    ),
    Mutant(
        "min_weight: a guard cannot open more",
        "CellStore._opening",
        "- 2 * math.log(factor)",
        "",
        ("test_a_guard_opens_more_cells",),
    ),
    Mutant(
        "min_weight: no more cells than usual",
        "CellStore._opening",
        "times = TIMES_BY_WEIGHT if self.method.probes is None else 1",
        "times = 1",
        ("test_default_probes_are_four_times_as_many",),
    ),
    Mutant(
        "min_weight: all cells are opened where four times the usual number is all of them",
        "CellStore._opening",
        "enough >= cells:",
        "TIMES_BY_WEIGHT * enough >= cells:",
        ("test_of_few_cells_those_that_matter_are_opened",),
    ),
    Mutant(
        "min_weight: a guard stops where all cells may be opened, and are not",
        "CellStore._within_eps",
        "not opening.takes_all(cells):",
        "opening.most < cells:",
        ("test_a_guard_goes_on_until_all_is_read",),
    ),
    Mutant(
        "min_weight: a guard warns of what may be read",
        "CellStore._opened_keys",
        "if opening.lowest == -math.inf:",
        "if True:",
        ("test_a_guard_says_what_is_read", "test_opened_keys"),
    ),
    Mutant(
        "min_weight: chunks open four times as many",
        "CellStore._chunk_sizes",
        "probes = self._usual_probes(state.closed, state.cells)",
        "probes = self._opening(state.closed, state.cells).most",
        ("test_later_chunks_open_the_usual_number",),
    ),
    Mutant(
        "a query of a cache that is not finite has a say in what others read",
        "best_shares",
        "scores.nan_to_num_(-torch.inf, torch.inf, -torch.inf).view(",
        "scores.view(",
        ("test_a_head_that_is_not_finite_has_no_say",),
    ),
    Mutant(
        "min_weight: lost on the way to a layer",
        "StoreOptions.of",
        "of_steps = store.min_weight,",
        "of_steps = None,",
        ("test_a_cache_hands_it_on",),
    ),
)
