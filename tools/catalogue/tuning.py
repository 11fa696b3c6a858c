"""Budgets by layer for the steps of an answer: how they are measured, kept in a file, and read by a cache."""

from __future__ import annotations

from catalogue.mutant import Mutant

LOSSES = ("test_losses_are_those_of_a_cache_that_answers_step_by_step",)
CHOICE = ("test_the_choice_holds_in_a_cache",)
KEPT = ("test_a_config_keeps_what_it_says_of_the_other_part",)

MUTANTS = (
    Mutant(
        "tuning: a pass changes the states of the next one",
        "Prompt.losses",
        "copy.deepcopy(layer)",
        "copy.copy(layer)",
        LOSSES,
    ),
    Mutant("tuning: short prompts are in no cells", "Prompt._in_cells", "group_from=0", "group_from=None", LOSSES),
    Mutant(
        "tuning: cells know nothing of the queries of the prompt",
        "Prompt._in_cells",
        "made.close(query=read.queries)",
        "made.close()",
        LOSSES,
    ),
    Mutant(
        "tuning: the errors of a rung are those of the one before",
        "evaluate_answers",
        "errors.at(list(range(1, len(tried))))",
        "errors.at(list(range(len(rungs))))",
        CHOICE,
    ),
    Mutant(
        "tuning: a layer gets the rung of the layer before",
        "recommend",
        "ladder[rung].method if rung >= 0 else Exact() for layer, rung in enumerate(rungs)",
        "ladder[rungs[layer - 1]].method if rung >= 0 else Exact() for layer, rung in enumerate(rungs)",
        ("test_each_layer_gets_the_rung_that_was_chosen_for_it",),
    ),
    Mutant(
        "tuning: moments of cells cost nothing",
        "answer:_keys",
        " + store.cells * (2 * dim + value_dim) / (dim + value_dim)",
        "",
        ("test_what_a_step_reads_is_counted",),
    ),
    Mutant(
        "tuning: prompts drop what was chosen for answers",
        "report:_joined",
        "{} if kept is None else",
        "{} if True else",
        KEPT,
    ),
    Mutant(
        "tuning: answers drop what was chosen for prompts",
        "report:_joined",
        "replace(kept or new,",
        "replace(new,",
        KEPT,
    ),
    Mutant(
        "tuning: what another run writes meanwhile is lost",
        "command:_tell",
        "_kept(out, name, found.layers)",
        "None",
        ("test_what_another_run_has_written_meanwhile_is_kept",),
    ),
    Mutant(
        "config: written over as it goes",
        "write_config",
        "user_cache.replace_bytes(target,",
        "target.write_bytes(",
        ("test_a_file_that_is_not_written_to_the_end_is_as_it_was",),
    ),
    Mutant(
        "config: what is said of a cache is not registered",
        "_registered",
        "if function.cache is not None:",
        "if False:",
        ("test_a_file_about_a_cache_alone_leaves_prompts_to_auto",),
    ),
    Mutant(
        "config: a cache for a model of another depth",
        "_from_file",
        "layers != found.num_hidden_layers",
        "False",
        ("test_a_file_is_for_one_model",),
    ),
    Mutant(
        "cache: exact layers are grouped",
        "_make_store",
        "method = UNGROUPED",
        "method = Cells()",
        ("test_an_exact_cache_reads_all_keys",),
    ),
    Mutant(
        "cache: a segment without end is not for the kernels",
        "decode:most_open",
        "return min(state.sizes.most_open(state.closed), room)",
        "return state.sizes.most_open(state.closed)",
        ("test_a_segment_without_end_is_read_as_far_as_there_is_room",),
    ),
)
