"""Ways to break causal offsets, soft caps, sinks and packed sequences."""

from __future__ import annotations

from catalogue.mutant import Mutant

READ_ALL = "test_causal_offset.py::test_methods_that_read_all_keys_are_exact"
LOGITS = "test_logits.py::test_methods_that_read_all_keys_are_exact"
NORMALISER = "test_the_normaliser_has_a_gradient"
COMPILED = "test_compiled_with_a_cap_and_sinks"
ENGINE = "test_the_engine_is_the_specification"

MUTANTS = (
    Mutant(
        "offset: rows see one key fewer",
        "Problem.visible",
        "torch.arange(1 + self.offset, queries + 1 + self.offset,",
        "torch.arange(self.offset, queries + self.offset,",
        (READ_ALL,),
    ),
    Mutant(
        "offset: exact attention counts from the first key",
        "exact:_sdpa",
        "device=key.device)[:, None] + offset)[None, None]",
        "device=key.device)[:, None])[None, None]",
        (READ_ALL,),
    ),
    Mutant(
        "offset: a lower-right bias is an upper-left one",
        "causal:resolve",
        "asked[1] - asked[0] if",
        "0 if",
        ("test_the_biases_of_torch_are_offsets",),
    ),
    Mutant(
        "offset: a remembered call serves another offset",
        "attention:attention",
        "is_causal, offset, scale, enable_gqa, method, crossover",
        "is_causal, scale, enable_gqa, method, crossover",
        ("test_kernels_in_triton",),
    ),
    Mutant(
        "offset: NaN spreads as if there were none",
        "isolate_non_finite",
        "device=bad_key.device) + problem.offset",
        "device=bad_key.device)",
        ("test_a_nan_reaches_the_rows_that_see_it",),
    ),
    Mutant(
        "sinks: no gradient in cells",
        "_SunkCells.backward",
        "-(sinks - lse).exp() * delta",
        "0.0 * (sinks - lse).exp() * delta",
        (LOGITS,),
    ),
    Mutant(
        "sinks: cells keep their normaliser",
        "_SunkCells.forward",
        ".to(output.dtype), total,",
        ".to(output.dtype), lse,",
        (LOGITS,),
    ),
    Mutant(
        "sinks: the gradient of the lse forgotten by cells",
        "_SunkCells.backward",
        "delta = delta if lse_grad is None else delta - lse_grad",
        "delta = delta",
        (NORMALISER,),
    ),
    Mutant(
        "sinks: the specification takes them for none in the gradient of the lse",
        "_reference_backward",
        "[*grads, lse_grad * share.detach()]",
        "[*grads, lse_grad]",
        (ENGINE,),
    ),
    Mutant(
        "sinks: no part of the normaliser of exact attention",
        "_beside_sinks",
        "sink_share(lse, problem.row_sinks)[1]",
        "lse",
        (NORMALISER,),
    ),
    Mutant(
        "sinks: compiled top-k attention has no gradient of them",
        "knn.operator:_TopK.backward",
        "None if sinks is None else sinks_grad",
        "None",
        (COMPILED,),
    ),
    Mutant(
        "softcap: compiled top-k attention has none",
        "_traced_planner",
        "softcap=settings.softcap",
        "softcap=0.0",
        (COMPILED,),
    ),
    Mutant(
        "softcap: the normaliser of exact attention has none",
        "exact:_lse",
        "capped(queries @ keys.mT, problem.softcap)",
        "queries @ keys.mT",
        (NORMALISER,),
    ),
    Mutant("sinks: the wrong sign in TopK", "_weighted_backward", "= -(sinks[:, block]", "= (sinks[:, block]", (LOGITS,)),
    Mutant(
        "sinks: the audit forgets them",
        "_exact_masked_rows",
        "if problem.sink is not None:",
        "if False:",
        (LOGITS,),
    ),
    Mutant(
        "softcap: near keys have the slope of plain logits",
        "torch.backward:_near",
        "if slope is not None:",
        "if False:",
        (LOGITS,),
    ),
    Mutant("softcap: TopK has the slope of plain logits", "_weighted_backward", "if softcap:", "if False:", (LOGITS,)),
    Mutant(
        "softcap: spreads of cells as without",
        "cap_moments",
        "spread * slope.square(), slope",
        "spread, slope",
        (ENGINE,),
    ),
    Mutant("softcap: slopes are constant", "cap_moments_backward", "bend = -2.0 / softcap", "bend = 0.0 / softcap", (ENGINE,)),
    Mutant(
        "softcap: drawn keys are not capped",
        "Draws.correct",
        "head.keys[drawn].to(head.compute)), head.softcap)",
        "head.keys[drawn].to(head.compute)), 0.0)",
        (ENGINE,),
    ),
    Mutant(
        "packed: rows stay in the order of the calls",
        "attend_packed",
        ".index_select(0, rows.argsort())",
        ".index_select(0, rows)",
        ("test_each_sequence_is_as_if_it_were_alone",),
    ),
    Mutant(
        "packed: lengths of keys do not count",
        "attend_packed",
        "groups.setdefault((last - first, key_last - key_first), [])",
        "groups.setdefault((last - first, key_edges[1]), [])",
        ("test_each_sequence_is_as_if_it_were_alone",),
    ),
    Mutant(
        "packed: causal sequences aligned at their first key",
        "attention_varlen",
        "offset=key.shape[2] - query.shape[2] if causal else None",
        "offset=0 if causal else None",
        ("test_each_sequence_is_as_if_it_were_alone",),
    ),
    Mutant(
        "sinks: nothing beside nothing",
        "dense:sink_share",
        "blind = lse == -torch.inf",
        "blind = torch.zeros_like(lse, dtype=torch.bool)",
        ("test_logits.py::test_a_row_without_keys_and_without_a_sink_is_zero",),
    ),
    Mutant(
        "packed: keys between sequences",
        "packed:jagged",
        "if lengths is None:",
        "if True:",
        ("test_varlen.py::test_rows_between_sequences_are_not_seen",),
    ),
)
