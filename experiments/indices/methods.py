"""What is timed: SDPA, and `TopK` with k = sqrt(n), with and without a tail, over several indices."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import nearfield as nf
from experiments.devices import dtype_on, on_cpu
from experiments.powers import power
from experiments.row_errors import mean_error
from nearfield import synthetic

DIM = 64
PROBES = 8
RECALL_ROWS = 64
TAIL = "+tail"
DRAWN = 32
"""Keys of a tail. Drawing as many as are near would take longer than finding those."""
NAMES = {
    "sdpa": "SDPA",
    "exact": "exact search",
    "kmeans": "k-means",
    "cells": "cells",
    "ivf": "Faiss IVF",
    "hnsw": "Faiss HNSW",
    "lsh": "concentric LSH",
}
SCANS = ("exact",)
"""Those that score every key. The others are what sub-quadratic time is claimed of."""
ON_CPU_ONLY = ("ivf", "hnsw", "lsh")
FAISS = ("ivf", "hnsw")
PLACES = {("clustered", False): "clusters, no mask", ("clustered", True): "clusters, causal", ("uniform", False): "no structure"}
"""By kind of input and whether there is a causal mask."""
INPUTS = {"clustered": "in sqrt(n) clusters", "uniform": "uniform, without any structure"}


def heads_on(device: str) -> int:
    """As many as the paper's on a GPU; one on a CPU, or a million keys would take hours."""
    return 1 if on_cpu(device) else 10


def methods_on(device: str) -> tuple[str, ...]:
    return tuple(name for name in NAMES if on_cpu(device) or name not in ON_CPU_ONLY)


def is_missing(method: str) -> bool:
    """Whether a method needs Faiss, and there is none."""
    return method.removesuffix(TAIL) in FAISS and find_spec("faiss") is None


def index_of(name: str, n: int) -> Any:
    """Cells and lists are sqrt(n), of which 8 are opened."""
    lists = power(n, 1 / 2)
    made: dict[str, Callable[[], Any]] = {
        "exact": nf.ExactIndex,
        "kmeans": lambda: nf.KMeansIndex(cells=lists, probes=PROBES),
        "cells": nf.CellIndex,
        "ivf": lambda: nf.FaissIndex(f"IVF{lists},Flat", nprobe=PROBES),
        "hnsw": lambda: nf.FaissIndex("HNSW32"),
        "lsh": nf.ConcentricLSH,
    }
    return made[name]()


def recipe(method: str, n: int) -> nf.TopK | None:
    """k = sqrt(n), and a tail where the method's name says so; none for SDPA."""
    name = method.removesuffix(TAIL)
    k = power(n, 1 / 2)
    return None if name == "sdpa" else nf.TopK(k, tail=DRAWN if method.endswith(TAIL) else 0, index=index_of(name, n))


def inputs_of(kind: str, heads: int, n: int, seed: int, device: str) -> tuple[Tensor, ...]:
    """Of one head; further heads have the same rows in random orders, for making ten heads of a million takes minutes."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "clustered":
        made = synthetic.make("clustered", 1, 1, n, DIM, seed=seed)
    else:
        made = tuple(torch.rand((1, 1, n, DIM), generator=generator).mul_(2).sub_(1) for _ in range(3))
    query, key, value = (x.to(device, dtype_on(device)) for x in made)

    def orders() -> Tensor:
        some = [torch.randperm(n, generator=generator) for _ in range(heads - 1)]
        return torch.stack([torch.arange(n), *some]).to(device)

    asked, kept = orders(), orders()
    return query[0, 0, asked][None], key[0, 0, kept][None], value[0, 0, kept][None]


def prepare(
    method: str, kind: str, n: int, causal: bool, seed: int, device: str
) -> tuple[Callable[[], Tensor], Callable[[Tensor], dict[str, Any]]]:
    """For `isolate`: the call, and the error of some of its rows with the recall of their near sets."""
    heads = heads_on(device)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with torch.no_grad():
            chosen = recipe(method, key.shape[2])
            if chosen is None:
                return F.scaled_dot_product_attention(query, key, value, is_causal=causal)
            return nf.attention(query, key, value, is_causal=causal, method=chosen)

    attend(*inputs_of(kind, heads, 256, seed, device))  # threads are started, kernels compiled
    query, key, value = inputs_of(kind, heads, n, seed, device)

    def judge(output: Tensor) -> dict[str, Any]:
        error = mean_error(output, query, key, value, causal, seed)
        return {"error": error, "recall": recall(method, query[0], key[0], causal, seed)}

    return lambda: attend(query, key, value), judge


def recall(method: str, query: Tensor, key: Tensor, causal: bool, seed: int) -> float | None:
    """The share of the k keys of largest inner product that the index finds, over random rows of the first head; None for SDPA.

    Rows that see no more than k keys are left out: they have nothing to search for.
    """
    chosen = recipe(method, key.shape[1])
    if chosen is None:
        return None
    n, k = key.shape[1], chosen.k or 1
    generator = torch.Generator().manual_seed(seed)
    low = min(n - 1, k) if causal else 0
    rows = torch.randint(low, n, (RECALL_ROWS,), generator=generator).sort().values.to(query.device)
    some, keys = query[:1, rows].float(), key[:1].float()
    offset = (rows - torch.arange(RECALL_ROWS, device=rows.device))[None] if causal else None
    _, found = chosen.index.build(keys).search(some, k, offset)
    _, best = nf.ExactIndex().build(keys).search(some, k, offset)
    hits = (found[0, :, :, None] == best[0, :, None, :]).any(1) & (best[0] >= 0)
    return float(hits.sum() / (best[0] >= 0).sum().clamp(min=1))
