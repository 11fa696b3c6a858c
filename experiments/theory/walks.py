"""The promise for D^V = P^T D^O by random walks (Algorithm 3), and whether the zero vector would keep it as well.

For one column x of D^O. As printed: 2 lg(n) / eps^2 walks from x lifted by M, its most negative entry, and an error of at most
e_V = eps <x, 1> + 2 n eps M with probability 1 - 1/n. Corrected: 2 ln(2n / delta) / eps^2 walks that carry the sign of x, and an
error of at most eps ||x||_1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

import nearfield as nf
from experiments.experiment import Row

HARD = 64
"""Keys of the inputs on which the promise is hardest to keep."""
LENGTHS = (64, 256, 1_024)
EPS, DELTA, DIM = 0.05, 0.1, 16
"""The first two are those of the paper's descents."""
FORMS = {"printed": ("printed", "shifted"), "corrected": ("signed", "signed")}
"""The form of the number of walks (`nf.budget`), and that of the estimate."""


def count(n: int, eps: float, delta: float, form: str) -> int:
    return nf.budget(n, eps, delta, d=1, theorem="walks", form=FORMS[form][0]).walks or 1


def bound(x: Tensor, eps: float, form: str) -> float:
    """The largest error of an entry that is allowed."""
    if form == "corrected":
        return eps * float(x.abs().sum())
    lift = float((-x).clamp(min=0).amax())
    return eps * (float(x.sum()) + 2 * len(x) * lift)


def broken(form: str, eps: float, delta: float, share: float, seed: int) -> bool:
    """On inputs of large variance: one key has half the weight of every row, and x is -1 or 1 at random."""
    generator = torch.Generator().manual_seed(seed)
    query, key = torch.ones(HARD, 1, dtype=torch.float64), torch.zeros(HARD, 1, dtype=torch.float64)
    key[0] = math.log(HARD - 1)
    x = torch.randint(0, 2, (HARD, 1), generator=generator).double() * 2 - 1
    steps = max(1, round(count(HARD, eps, delta, form) * share))
    found = nf.gradients.estimate_product(query, key, x, steps, form=FORMS[form][1], scale=1.0, generator=generator)
    right = (query @ key.T).softmax(-1).T @ x
    return bool(((found - right).abs() > bound(x, eps, form)).any())


def usual(n: int, form: str, trials: int, seed: int) -> Row:
    """On Gaussian inputs: how far estimate and zero vector are from D^V, next to the bound and to D^V itself."""
    steps = count(n, EPS, DELTA, form)
    errors, zeros, relative = [], [], []
    for trial in range(trials):
        generator = torch.Generator().manual_seed(10_000 * seed + trial)
        query, key, x = (torch.randn(n, width, generator=generator, dtype=torch.float64) for width in (DIM, DIM, 1))
        found = nf.gradients.estimate_product(query, key, x, steps, form=FORMS[form][1], generator=generator)
        right = (query @ key.T / math.sqrt(DIM)).softmax(-1).T @ x
        errors.append(float((found - right).abs().amax()) / bound(x, EPS, form))
        zeros.append(float(right.abs().amax()) / bound(x, EPS, form))
        relative.append(float((found - right).norm() / right.norm()))
    return {
        "kind": "walks",
        "n": n,
        "form": form,
        "eps": EPS,
        "walks": steps,
        "seeds": trials,
        "broken": sum(error > 1 for error in errors),
        "allowed": 1 / n if form == "printed" else DELTA,
        "error": sum(errors) / trials,
        "zero": sum(zeros) / trials,
        "zero_broken": sum(zero > 1 for zero in zeros),
        "relative": sum(relative) / trials,
    }
