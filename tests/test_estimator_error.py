"""The error of the estimators on eight kinds of input, held to stored values.

A change of more than 10% in either direction is a change of the estimator. If it is meant, write the values again:

    python tests/test_estimator_error.py --write
"""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path

import pytest
import torch
from by_hand import QKV, attention64, seeded
from torch import Tensor

import nearfield as nf
from nearfield import synthetic

STORED = Path(__file__).with_name("stored_rmse.json")

BUDGETS = {
    "top": nf.TopK(k=48),
    "tail": nf.TopK(k=24, tail=24),
    "kmeans": nf.TopK(k=24, tail=24, index=nf.KMeansIndex(cells=24, probes=4)),
    "cells": nf.Cells(cell_size=8, probes=6, segment=64, sinks=0),
    "cells-drawn": nf.Cells(cell_size=8, probes=3, segment=64, sinks=0, samples=24),
}
DRAWS = {"top": 1, "cells": 1}
"""Seeds that are averaged. Those that draw take 4, so that another stream moves a value by a few percent only."""


@functools.cache
def problem(family: str) -> tuple[QKV, dict[bool, Tensor]]:
    """Inputs, and exact attention with and without a causal mask."""
    tensors = synthetic.make(family, 1, 2, 512, 32, seed=17)
    return tensors, {causal: attention64(*tensors, causal=causal) for causal in (False, True)}


def rmse(family: str, budget: str) -> float:
    """Root mean square error of a row, in units of the rms norm of the values; causal and not, over several draws."""
    tensors, exact = problem(family)
    unit = tensors[2].double().square().sum(-1).mean().sqrt()
    total, draws = torch.zeros(()), DRAWS.get(budget, 4)
    for causal in (False, True):
        for draw in range(draws):
            got = nf.attention(*tensors, is_causal=causal, method=BUDGETS[budget], generator=seeded(draw))
            total = total + ((got.double() - exact[causal]) / unit).square().sum(-1).mean()
    return float((total / (2 * draws)).sqrt())


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("family", synthetic.FAMILIES)
def test_error_is_as_stored(family: str, budget: str) -> None:
    stored = json.loads(STORED.read_text())
    # 1e-6 is the rounding of float32, which is all the error there is where one key carries a row.
    assert rmse(family, budget) == pytest.approx(stored[family][budget], rel=0.1, abs=1e-6)


def test_stored_values_make_sense() -> None:
    """The stored values say what the method is for; they must not be overwritten by nonsense."""
    stored = json.loads(STORED.read_text())
    assert set(stored) == set(synthetic.FAMILIES)
    assert stored["clustered"]["tail"] < 0.8 * stored["clustered"]["top"], "a cluster larger than k needs its tail"
    for family in ("gaussian", "clustered", "local", "duplicates", "anisotropic"):
        assert stored[family]["cells"] < 0.5 * stored[family]["top"], "the same number of keys, and a far field"
    assert stored["sharp"]["top"] < 0.05
    assert all(0 <= value < 1 for values in stored.values() for value in values.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"replace {STORED.name}; otherwise print what it would hold")
    torch.set_num_threads(1)
    text = json.dumps(
        {family: {budget: round(rmse(family, budget), 7) for budget in BUDGETS} for family in synthetic.FAMILIES}, indent=2
    )
    if parser.parse_args().write:
        STORED.write_text(text + "\n")
    else:
        print(text)
