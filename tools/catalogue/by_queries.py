"""Keys that are grouped as queries are large."""

from __future__ import annotations

from catalogue.mutant import Mutant

SUIT = "test_by_queries.py::test_cells_suit_the_queries"
KERNEL = "test_triton_by_queries.py::test_sizes_are_those_of_torch"
OVER_RANKS = "test_sharded.py::test_every_argument"

MUTANTS = (
    Mutant(
        "by queries: a later query says how keys are grouped",
        "by_queries:latest_squares",
        "torch.searchsorted(visible.contiguous(), edges, right=True)",
        "torch.searchsorted(visible.contiguous(), edges + 20, right=True)",
        ("test_cells_future.py", "test_latest_squares_by_hand"),
    ),
    Mutant(
        "by queries: all earlier queries, not the latest",
        "by_queries:latest_squares",
        "[max(0, end - LATEST), end]",
        "[0, end]",
        ("test_latest_squares_by_hand",),
    ),
    Mutant(
        "by queries: without a mask the first rows alone",
        "strewn_squares",
        "* length // max(1, min(LATEST, length))",
        "* 1",
        ("test_strewn_squares_by_hand",),
    ),
    Mutant(
        "by queries: squares that are not finite",
        "by_queries:sizes_of",
        "squares.isfinite().all(-1, keepdim=True) & (most > 0.0)",
        "most > 0.0",
        ("test_sizes_say_nothing_where_nothing_is_known",),
    ),
    Mutant(
        "by queries: not told",
        "asks_queries",
        "return type(partition) is KMeans and partition.by_queries",
        "return False",
        (SUIT,),
    ),
    Mutant(
        "by queries: partitions of one's own are made anew in windows",
        "asks_queries",
        "type(partition) is KMeans",
        "isinstance(partition, KMeans)",
        ("test_partitions_of_ones_own_build_from_keys_alone",),
    ),
    Mutant(
        "by queries: nothing known, and no weight at all",
        "KMeans.build",
        "torch.where((sizes > 0.0).any(-1, keepdim=True), sizes, weight)",
        "sizes",
        ("test_distances_are_weighted_by_sizes", "test_rows_that_come_after_all_keys_change_no_cell"),
    ),
    Mutant(
        "by queries: the queries at the begin of a span",
        "torch.head:assign",
        "[span.first + span.segments - 1 for span in own]",
        "[span.first for span in own]",
        ("test_each_span_is_grouped_by_the_queries_at_its_end",),
    ),
    Mutant(
        "by queries: one query more in the kernel",
        "triton.by_queries:rows_that_see",
        "<= keys:",
        "<= keys + 1:",
        (KERNEL,),
    ),
    Mutant(
        "by queries: one member of a group in the kernel",
        "_sizes_of_queries",
        "for member in range(group):",
        "for member in range(1):",
        (KERNEL,),
    ),
    Mutant(
        "by queries: the kernel without a mask looks at the first rows",
        "_sizes_of_queries",
        "row = row * length // last",
        "row = row * 1",
        ("test_triton_by_queries.py::test_without_a_mask",),
    ),
    Mutant(
        "by queries: the kernel keeps what is not finite",
        "_sizes_of_queries",
        '(tl.sum((size < float("inf")).to(tl.int32), 0) == BD) & (most > 0.0)',
        "(most > 0.0) | (most <= 0.0)",
        ("test_triton_by_queries.py::test_sizes_that_say_nothing",),
    ),
    Mutant(
        "by queries: k-means of the kernels takes zeros for weights",
        "triton.cluster:_prepare",
        "tl.where(tl.max(other, 0) > 0.0, other, stretch)",
        "other",
        ("test_weights_that_are_zero_are_those_of_keys",),
    ),
    Mutant(
        "by queries: the queries of one rank alone",
        "ByCells._query_sizes",
        ".sum(0))",
        "[0])",
        (OVER_RANKS,),
    ),
    Mutant(
        "by queries: rows of ranks see a key more",
        "ByCells._query_sizes",
        "(places + 1 + self.facts.offset)",
        "(places + 2 + self.facts.offset)",
        (OVER_RANKS,),
    ),
    Mutant(
        "by queries: kernels of ranks take the queries of the first segment for all spans",
        "Dealt._by_kernels",
        "// max(1, layout.segment) - 1)",
        "// max(1, layout.segment) * 0)",
        ("test_kernels_in_triton_over_ranks",),
    ),
)
