"""The sizes that the theorems ask for, printed and corrected, against eps: pure arithmetic."""

from __future__ import annotations

import nearfield as nf
from experiments.experiment import Rows

LENGTHS = (10_000, 100_000, 1_000_000)
EPS = (0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5)
DELTA = 0.1


def tail_sizes() -> Rows:
    """k = ell of the theorem on head and tail. `share`: both together, as a share of all keys; `exact`: they are all keys."""
    found = []
    for n in LENGTHS:
        for eps in EPS:
            for form in ("printed", "corrected"):
                asked = nf.budget(n, eps, DELTA, theorem="tail", form=form)
                keys = (asked.k or 0) + (asked.ell or 0)
                found.append(
                    {
                        "kind": "sizes",
                        "n": n,
                        "eps": eps,
                        "form": form,
                        "k": asked.k,
                        "ell": asked.ell,
                        "share": keys / n,
                        "exact": asked.takes_everything(n),
                    }
                )
    return found
