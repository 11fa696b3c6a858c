"""Examples that people train their own models with."""

from __future__ import annotations

from catalogue.mutant import Mutant

MUTANTS = (
    Mutant(
        "extend: the slowest pair turns too far",
        "examples.extend_context:raised_base",
        "factor ** (dim / (dim - 2))",
        "factor ** ((dim - 2) / dim)",
        ("test_the_slowest_pair_turns_as_far_as_before",),
    ),
    Mutant(
        "extend: a token predicts itself",
        "examples.extend_context:token_losses",
        "ids[1:].long()",
        "ids[:-1].long()",
        ("test_losses_in_parts_are_those_of_all_at_once",),
    ),
    Mutant(
        "extend: held-out texts are trained on",
        "examples.extend_context:distinct",
        " and text not in known",
        "",
        ("test_what_is_held_out_is_not_trained_on",),
    ),
    Mutant(
        "extend: the end of a text is left out",
        "examples.extend_context:packed",
        "list(tokens.split(length))",
        "list(tokens.split(length))[:-1]",
        ("test_every_token_is_in_one_window",),
    ),
    Mutant(
        "extend: one right digit is a number found",
        "examples.extend_context:find_needles",
        "(likeliest == ids[-answer:]).all()",
        "(likeliest == ids[-answer:]).any()",
        ("test_a_number_is_found_if_all_its_tokens_are",),
    ),
    Mutant(
        "extend: cells are asked for and SDPA trains",
        "examples.extend_context:attending",
        'NAME if way == "cells" else "sdpa"',
        '"sdpa"',
        ("test_who_attends",),
    ),
    Mutant(
        "extend: a loss that is no number is learnt from",
        "examples.extend_context:one_step",
        "not math.isfinite(value)",
        "value == math.inf",
        ("test_a_loss_that_is_no_number_changes_nothing",),
    ),
    Mutant(
        "extend: an interrupted run is not kept",
        "examples.extend_context:run",
        "    finally:\n        keep()\n",
        "    finally:\n        pass\n",
        ("test_an_interrupted_run_keeps_what_it_has",),
    ),
)
