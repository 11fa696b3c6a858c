"""Ways to break attention to vLLM's pages, in PyTorch and in Triton."""

from __future__ import annotations

from catalogue.mutant import Mutant

FORMULA = "test_rows_are_as_the_formula_has_them"
KERNELS = "test_rows_attend_to_pages_as_in_torch"
GROUPED = "test_blocks_are_grouped_as_in_torch"
PROMPTS = "test_prompts_are_read_exactly"

MUTANTS = (
    Mutant(
        "pages: the window may lie behind cells",
        "Reach.first_near",
        "(position + 1 - self.window) // size",
        "(position + 1) // size",
        (FORMULA, "test_what_a_row_reads_depends_on_its_position_alone"),
    ),
    Mutant(
        "pages: rows begin to use cells one key early",
        "Reach.first_near",
        "if position + 1 < self.exact_below:",
        "if position + 2 < self.exact_below:",
        ("test_what_a_row_reads_depends_on_its_position_alone",),
    ),
    Mutant(
        "pages: spreads in scores cut off where masses are",
        "vllm.attend:MOST_SCORED_SPREAD",
        "64.0",
        "9.0",
        ("test_large_spreads_are_told_apart",),
    ),
    Mutant(
        "pages: the first block may lie behind cells",
        "vllm.attend:_through_cells",
        "behind = blocks[1 : rows.near]",
        "behind = blocks[: rows.near - 1]",
        (FORMULA,),
    ),
    Mutant(
        "pages: later keys seen",
        "vllm.attend:_through_cells",
        "(position > own).repeat(group, 1)",
        "(position > own + 1).repeat(group, 1)",
        ("test_later_keys_change_nothing", FORMULA),
    ),
    Mutant(
        "pages: opened cells keep their mass",
        "vllm.attend:_through_cells",
        "far_logits.scatter_(2, taken, -torch.inf)",
        "pass",
        (FORMULA,),
    ),
    Mutant(
        "pages: cells written when a block has one key less",
        "full_blocks",
        "size - 1)] // size",
        "size - 2)] // size",
        ("test_cells_come_with_the_last_key_of_a_block",),
    ),
    Mutant(
        "pages: keys of no slot written into the last block",
        "write_keys",
        "if not bool(is_real.all()):",
        "if False:",
        ("test_tokens_without_a_slot_go_nowhere",),
    ),
    Mutant(
        "pages: kernels: cells below the length from which they are used",
        "vllm.kernels:first_near",
        "tl.where(length < exact_below, 1,",
        "tl.where(length < 0, 1,",
        (KERNELS,),
    ),
    Mutant(
        "pages: kernels: the latest key left out",
        "score_pages",
        "there = place < count",
        "there = place < count - 1",
        (KERNELS,),
    ),
    Mutant(
        "pages: kernels: the keys behind cells not left out",
        "score_pages",
        "position = tl.where(place < SIZE, place, place + hidden)",
        "position = place",
        (KERNELS,),
    ),
    Mutant(
        "pages: kernels: a normaliser of far cells alone",
        "score_pages",
        "is_late = (place < SIZE) | (position >= length - RECENT)",
        "is_late = position < 0",
        (KERNELS,),
    ),
    Mutant(
        "pages: kernels: the mass of a cell without its size",
        "score_pages",
        " + tl.log2(tl.maximum(n, 1.0))[None, :]",
        "",
        (KERNELS,),
    ),
    Mutant(
        "pages: kernels: a cell opened too many",
        "choose_pages",
        "wanted = tl.load(probes_of + near)",
        "wanted = tl.load(probes_of + near) + 1",
        (KERNELS,),
    ),
    Mutant(
        "pages: kernels: opened cells keep their mass",
        "choose_pages",
        "tl.full([BP * GRAIN, BG], none, tl.float32)",
        "tl.full([BP * GRAIN, BG], 0.0, tl.float32)",
        (KERNELS,),
    ),
    Mutant(
        "pages: kernels: each cell begins at the start of its block",
        "choose_pages",
        "tl.store(opened_first + entry * probes + into, begin, mask=taken)",
        "tl.store(opened_first + entry * probes + into, begin * 0, mask=taken)",
        (KERNELS,),
    ),
    Mutant(
        "pages: kernels: the cell behind the right one",
        "read_pages",
        "mask=middle < high, other=0) <= number",
        "mask=middle < high, other=0) < number",
        (KERNELS,),
    ),
    Mutant(
        "pages: kernels: values of another head",
        "read_pages",
        "at = page * part_page + head * part_head + cell % CELLS * value_dim",
        "at = page * part_page + cell % CELLS * value_dim",
        (KERNELS,),
    ),
    Mutant(
        "pages: kernels: rows of prompts see the next token",
        "read_prompts",
        "position[None, :] < length[:, None]",
        "position[None, :] <= length[:, None]",
        (PROMPTS,),
    ),
    Mutant(
        "pages: kernels: requests counted that are not read",
        "read_prompts",
        "tiles = tl.where(read, (end - start + BM - 1) // BM, 0)",
        "tiles = (end - start + BM - 1) // BM",
        (PROMPTS,),
    ),
    Mutant(
        "pages: kernels: k-means on keys as they are",
        "group_blocks",
        "weight = tl.sqrt(square / SIZE)",
        "weight = tl.sqrt(square / SIZE) * 0.0 + 1.0",
        (GROUPED,),
    ),
    Mutant(
        "pages: kernels: empty cells stay empty",
        "group_blocks",
        "while number <= tl.sum(empty.to(tl.int32), 0):",
        "while number <= 0:",
        ("test_cells_that_are_empty_start_again",),
    ),
    Mutant(
        "pages: kernels: keys of a piece placed as if it were the first",
        "group_blocks",
        "placed += tl.sum(is_in, 0)",
        "placed += 0.0 * tl.sum(is_in, 0)",
        (GROUPED,),
    ),
    Mutant(
        "pages: kernels: rows that read all of their keys see none",
        "score_pages",
        "length = tl.abs(length)",
        "pass",
        ("test_a_row_that_reads_all_of_its_keys",),
    ),
    Mutant(
        "pages: tokens of a step see those after them",
        "StepBuffers.fill",
        "(query_start[request + 1] - 1 - self.numbers)",
        "(query_start[request + 1] - 2 - self.numbers)",
        ("test_what_is_known_of_the_tokens_of_a_step",),
    ),
    Mutant(
        "pages: padding of a captured step is as it was",
        "StepBuffers.fill",
        ".masked_fill_(self.numbers >= tokens, 0)",
        "",
        ("test_what_is_known_of_the_tokens_of_a_step",),
    ),
)
