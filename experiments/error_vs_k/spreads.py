"""The B of the inputs, which are uniform in [-B, B], and where each comes from.

The paper's caption says "different values of B" and names none. With d = 64 and the usual scale logits have standard deviation
B^2/3: 0.08 to 5.3 for B up to 4, and 33 for 10.
"""

from __future__ import annotations

FIGURE = 10.0
"""The smallest B (of 10, 30 and 50) of the script for this figure in the repository that the paper links,
github.com/sansui-123/knn_attention, forward_pass/forward_pass_test_batched.py."""
EARLIER = (2.0, 2.5, 3.0, 3.5, 4.0)
"""Those of an earlier version of that script and its figure, github.com/tkhar/demystifying_knn_attention."""
OURS = (0.5, 1.0)
"""Flat attention: nobody has claimed anything about these."""
AUTHORS = (*EARLIER, FIGURE)
"""Those that the paper's claims are judged by."""


def named(spread: float) -> str:
    whose = " (paper)" if spread == FIGURE else " (ours)" if spread not in AUTHORS else ""
    return f"B = {spread:g}{whose}"
