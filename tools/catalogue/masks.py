"""Ways to break causal offsets."""

from __future__ import annotations

from catalogue.mutant import Mutant

READ_ALL = "test_methods_that_read_all_keys_are_exact"

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
)
