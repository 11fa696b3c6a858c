"""Ways to break what makes nearfield a drop-in: torch's own function, results that merge, hints in errors, plots."""

from __future__ import annotations

from catalogue.mutant import Mutant

MUTANTS = (
    Mutant(
        "drop-in: exact attention asks for the function that was replaced",
        "exact:_grouped",
        "return sdpa(query, key, value,",
        "return torch.nn.functional.scaled_dot_product_attention(query, key, value,",
        ("test_dropin.py",),
    ),
    Mutant(
        "drop-in: short calls ask for the function that was replaced",
        "_sdpa_if_faster",
        "    output = sdpa(",
        "    output = torch.nn.functional.scaled_dot_product_attention(",
        ("test_dropin.py",),
    ),
    Mutant(
        "lse: exact attention keeps its logits for the backward pass",
        "_recomputed",
        "return checkpoint(make, *inputs, use_reentrant=False, preserve_rng_state=False)",
        "return make(*inputs)",
        ("test_merge.py",),
    ),
    Mutant(
        "lse: NaN gradients where a row sees nothing",
        "log_normaliser",
        "return logits.masked_fill(blind, 0.0).logsumexp(-1)",
        "return logits.logsumexp(-1)",
        ("test_merge.py",),
    ),
    Mutant(
        "lse: its gradient forgotten by the cells in torch",
        "_with_results",
        "delta[:-1] -= lse_grad.index_select(0, rows)",
        "pass",
        ("test_merge.py",),
    ),
    Mutant(
        "lse: its gradient forgotten for keys that rows see one by one",
        "cells.torch.backward:_local",
        "part.delta[run.rows].view(run.shape[:2]) if part.has_lse_grad else None",
        "None",
        ("test_merge.py",),
    ),
    Mutant(
        "lse: its gradient forgotten by the kernels",
        "triton.backward:backward",
        "rows.delta.sub_(lse_grad)",
        "pass",
        ("test_gradients_of_the_log_normaliser",),
    ),
    Mutant(
        "lse: its gradient forgotten by top-k attention",
        "_weighted_backward",
        " - grad_lse[:, block].flatten()",
        "",
        ("test_merge.py",),
    ),
    Mutant(
        "top-k operator: keys of the plan are not noted",
        "_Planner.plan",
        "self.found[:, block] = ids",
        "self.found[:, block] = 0",
        ("test_topk_operator.py::test_compiled_equals_eager",),
    ),
    Mutant(
        "top-k operator: drawn keys count once",
        "_Planner._weighted",
        "weight = (left_out.to(logits.dtype) / count.clamp(min=1)).clamp(min=1).log()",
        "weight = (left_out.to(logits.dtype) / count.clamp(min=1)).clamp(min=1).log() * 0.0",
        ("test_topk.py",),
    ),
    Mutant(
        "cells operator: sizes cannot be symbols",
        "cells.operator:_SETTINGS",
        "SymInt[] sizes",
        "int[] sizes",
        ("test_sizes_follow_the_length_in_one_program",),
    ),
    Mutant(
        "hints: any square mask looks causal",
        "_looks_causal",
        "return all(bool(part.all()) for part in parts)",
        "return True",
        ("test_a_causal_mask_that_was_written_out",),
    ),
    Mutant(
        "hints: heads that can be grouped are taken for lengths",
        "_layout_hint",
        "heads % kv_heads == 0 or ",
        "",
        ("test_bad_inputs.py::test_refused",),
    ),
    Mutant(
        "audit per head: rows of the first batch entry alone",
        "_rows_of_heads",
        "found.append((rows // max(1, length) * heads + head) * length + rows % max(1, length))",
        "found.append(head * length + rows % max(1, length))",
        ("test_results.py",),
    ),
    Mutant(
        "audit per head: heads told apart by position",
        "audit:run_audit",
        "head = (chosen // length % heads)",
        "head = (chosen % heads)",
        ("test_results.py",),
    ),
    Mutant(
        "plots: steps of a cache at the wrong positions",
        "CellCache.plot_errors",
        "(step.first + row, float(error))",
        "(row, float(error))",
        ("test_one_partition_per_segment_and_an_error_that_is_told",),
    ),
    Mutant(
        "merge: rows that see nothing become NaN",
        "merge:merge",
        "parts = parts.masked_fill(blind, 0.0)",
        "parts = parts.clone()",
        ("test_merge.py",),
    ),
    Mutant(
        "merge: every part counts the same",
        "merge:merge",
        "share = parts.softmax(0)",
        "share = torch.full_like(parts, 1 / len(parts))",
        ("test_merge.py",),
    ),
)
