"""Mutants of the pilot and of what it says."""

from __future__ import annotations

from catalogue.mutant import Mutant

EACH = "test_each_budget_is_a_call_with_that_budget"

MUTANTS = [
    Mutant(
        "pilot: a bound without its margin",
        "audit:pooled_bound",
        "share = math.sqrt(-math.log(miss) / (2 * (len(off) - 1))) if len(off) > 1 else 1.0",
        "share = 0.0",
        ("test_pooled_bound_holds_as_often_as_it_says", "test_pooled_bound_by_hand"),
    ),
    Mutant(
        "pilot: the pooled error of few rows is a bound",
        "pilot:_error",
        "audit.pooled_bound",
        "audit.pooled",
        ("test_eps_is_honoured",),
    ),
    Mutant(
        "pilot: budgets as sure as if each were the only one",
        "pilot:_audits",
        "looks = len(budgets) * len(numbers)",
        "looks = 1",
        ("test_a_pilot_shares_its_confidence_among_budgets",),
    ),
    Mutant(
        "pilot: a head that fails gets cells all the same",
        "pilot:run_pilot",
        "tuple(sorted(failed))",
        "()",
        ("test_per_head_gives_exact_attention_to_the_heads_that_need_it",),
    ),
    Mutant(
        "pilot: heads stay where they were put",
        "pilot:run_choice",
        ".argsort()",
        "",
        ("test_per_head_gives_exact_attention_to_the_heads_that_need_it",),
    ),
    Mutant(
        "pilot: the largest budget",
        "pilot:run_pilot",
        "next((i for i, error in enumerate(run) if error <= eps), None)",
        "next((i for i, error in reversed([*enumerate(run)]) if error <= eps), None)",
        ("test_it_is_the_call_with_the_budget_it_chose",),
    ),
    Mutant(
        "pilot: budgets that are slower than exact attention",
        "pilot:faster_budgets",
        "too_slow = expected_time(sizes._replace(probes=budget), length, limit, on_gpu) > 1.0",
        "too_slow = False",
        ("test_budgets_that_are_tried",),
    ),
    Mutant(
        "pilot: rows of the first head alone",
        "pilot:draw_rows",
        "torch.randint(batch * heads * length, (1, ROWS)",
        "torch.randint(length, (1, ROWS)",
        ("test_rows_are_drawn_over_all_heads_and_positions",),
    ),
    Mutant(
        "pilot: nothing can be looked at, and cells run",
        "Auto.run",
        "if _cannot_look(problem):",
        "if False:",
        ("test_where_nothing_can_be_looked_at_it_is_exact_attention",),
    ),
    Mutant(
        "pilot: the default is not checked",
        "attention:attention",
        "method = Auto() if method is None else method",
        "method = Auto(check=False) if method is None else method",
        ("test_a_call_that_nobody_configured_is_close_to_sdpa",),
    ),
    Mutant(
        "pilot: rows from torch's generator",
        "Seeds.repeated",
        "if self._generator is not None:",
        "if True:",
        ("test_a_pilot_draws_nothing_from_torch",),
    ),
    Mutant(
        "pilot: every fallback is told",
        "auto:tell",
        "if kind not in _TOLD:",
        "if True:",
        ("test_the_first_fallback_of_a_kind_is_logged_once",),
    ),
    Mutant(
        "pilot: a plan without its sizes",
        "plans:_frozen",
        "cell_size=sizes.cell_size",
        "cell_size=method.cell_size",
        ("test_a_plan_has_all_sizes",),
    ),
    Mutant(
        "pilot: trial: opened cells count twice",
        "trial:_try_rows",
        "far = masses * (of_cell > closed_by)",
        "far = masses * (of_cell >= 0 * closed_by)",
        (EACH,),
    ),
    Mutant(
        "pilot: trial: keys of the future",
        "trial:_sums",
        "logits.masked_fill_(position >= rows.visible[..., None], -torch.inf)",
        "pass",
        (EACH,),
    ),
    Mutant(
        "pilot: trial: each row votes for itself",
        "trial:_try_rows",
        "score(first, spread) if sizes.share == 1 else",
        "score(first, spread) if True else",
        (EACH + "[shared-torch-16]",),
    ),
    Mutant(
        "pilot: trial: the order of rows is forgotten",
        "trial:_votes",
        "if own_order is not None:",
        "if False:",
        (EACH + "[shared-torch-16]",),
    ),
    Mutant(
        "pilot: trial: every span is seen",
        "trial:seen_spans",
        "return torch.where(level == spans.tallest, first + (1 << level) <= segments, is_bit)",
        "return torch.where(level == spans.tallest, first + (1 << level) <= segments, first + (1 << level) <= segments)",
        (EACH + "[causal-torch-16]", "test_seen_spans_at_a_time"),
    ),
    Mutant(
        "pilot: trial: keys are seen through the shortest spans",
        "trial:_Columns.homes",
        "(reached.sum(0) - 1)",
        "(reached.sum(0) * 0)",
        (EACH + "[causal-torch-16]",),
    ),
    Mutant(
        "pilot: trial: the covariance of all cells",
        "trial:_columns",
        "weight = sees_span.to(table.cross.dtype)",
        "weight = torch.ones_like(sees_span, dtype=table.cross.dtype)",
        (EACH + "[causal-torch-16]",),
    ),
]
