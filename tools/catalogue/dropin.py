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
)
