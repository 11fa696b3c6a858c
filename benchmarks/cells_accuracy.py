"""Sections of bench_cells.py: the error of Cells for the keys it reads, next to top-k and to published packages."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import math
import statistics
from collections.abc import Callable
from typing import Any

import errors
import torch
import torch.nn.functional as F
from cells_speed import DIM, settings
from record import each, side_by_side, table
from rich.table import Table
from torch import Tensor

import nearfield as nf
from nearfield.synthetic import make

FAMILIES = ("clustered", "mixture_of_scales")
BUDGETS = (0.25, 0.5, 1, 2, 4)
"""Times the default number of probes."""
PACKAGES = {"faiss-cpu": "faiss", "reformer-pytorch": "reformer_pytorch"}
NPROBE, BUCKET, HASHES = 16, 64, (4, 8)
SHARED = "shared q = k"
ROWS_PER_SEARCH = 8192

Contestants = dict[str, tuple[int, Callable[[], Tensor]]]


def accuracy(quick: bool) -> dict[str, Any]:
    """Cells at several budgets against exact top-k with as many keys, which drops the rest or draws half of its keys from it."""
    n = 1024 if quick else 16_384
    plan = [(family, budget) for family in FAMILIES for budget in (BUDGETS[1:3] if quick else BUDGETS)]
    rows: list[dict[str, Any]] = []
    for family, budget in each(plan, lambda item: f"{item[0]}, {item[1]} x the default probes"):
        inputs = make(family, 1, 1, n, DIM)
        exact = F.scaled_dot_product_attention(*inputs)
        default = nf.estimate(inputs[0][:, :, :16], *inputs[1:], method=nf.Cells()).info["probes"]
        method = nf.Cells(probes=max(1, round(budget * default)))
        found = nf.estimate(*inputs, method=method)
        keys = round(found.info["keys_per_query"])
        others = {"topk": nf.TopK(keys), "topk_tail": nf.TopK(keys - keys // 2, tail=keys // 2)}
        outputs = {"cells": found.output}
        for name, other in others.items():
            outputs[name] = nf.attention(*inputs, method=other, generator=torch.Generator().manual_seed(0))
        rows.append(
            {
                "family": family,
                "n": n,
                "keys": keys,
                "settings": settings(found.info),
                "errors": {name: errors.of_all_rows(output, exact, inputs[2]) for name, output in outputs.items()},
            }
        )
    return {"dim": DIM, "rows": rows}


def show_accuracy(results: dict[str, Any]) -> Table:
    found = table(
        "family",
        "keys",
        "method",
        *errors.HEADINGS,
        "mean / top-k's",
        title="as many keys for each, all rows",
        words=("family", "method"),
    )
    names = {"cells": "Cells", "topk": "exact top-k", "topk_tail": "exact top-k + tail"}
    for row in results["rows"]:
        for name, label in names.items():
            of_topk = row["errors"][name]["mean_relative"] / row["errors"]["topk"]["mean_relative"]
            found.add_row(row["family"], f"{row['keys']:,}", label, *errors.written(row["errors"][name]), f"{of_topk:.3g}")
        found.add_section()
    return found


def peers(quick: bool) -> dict[str, Any]:
    """Other ways to attend to a few near keys, without a mask: seconds (building included), error, and keys read.

    reformer-pytorch uses one vector as query and key, normalises keys and hides a row from itself. It gets the keys, times 7, for
    both, so that the logit of a row's own cluster is near 7, as in the inputs of the others; its error is against exact attention
    of that kind. Cells runs on these inputs as well.
    """
    absent = [name for name, module in PACKAGES.items() if importlib.util.find_spec(module) is None]
    for name in absent:
        print(f"skipped: {name} is not installed (pip install {name} -c constraints.txt)")
    rows: list[dict[str, Any]] = []
    for n in each((1024,) if quick else (16_384, 65_536), lambda n: f"peers, n = {n:,}"):
        query, key, value = make("clustered", 1, 1, n, DIM)
        keys = round(nf.estimate(query, key, value, method=nf.Cells()).info["keys_per_query"])
        shared = 7 * key, F.normalize(key, dim=-1), value
        found = _contestants(query, key, value, keys, absent) | _sharing_contestants(*shared, keys, absent)
        chosen = torch.randperm(n, generator=torch.Generator().manual_seed(1))[:200]
        norm = value.square().sum(-1).mean().sqrt()
        off: dict[str, Any] = {"SDPA": None}
        for name in [name for name in found if name != "SDPA"]:
            inputs = shared if SHARED in name else (query, key, value)
            exact = _exact_rows(*inputs, chosen, hide_self=name.startswith("reformer"))
            error = (found[name][1]()[0, 0, chosen] - exact).norm(dim=-1)
            off[name] = errors.summary(error / exact.norm(dim=-1), error / norm)
        # Every method has been called once, except SDPA.
        seconds = side_by_side({name: call for name, (_, call) in found.items()}, 3 if n <= 16_384 else 1, warm=False)
        for name, (count, _) in found.items():
            rows.append({"n": n, "method": name, "keys": count, "seconds": seconds[name], "errors": off[name]})
    versions = {name: importlib.metadata.version(name) for name in PACKAGES if name not in absent}
    return {"family": "clustered", "dim": DIM, "versions": versions, "rows": rows}


def _contestants(query: Tensor, key: Tensor, value: Tensor, keys: int, absent: list[str]) -> Contestants:
    """By name: how many keys a row attends to, and the call."""
    n = key.shape[2]
    found: Contestants = {
        "SDPA": (n, lambda: F.scaled_dot_product_attention(query, key, value)),
        "Cells()": (keys, lambda: nf.attention(query, key, value, method=nf.Cells())),
        "TopK, KMeansIndex": (keys, lambda: nf.attention(query, key, value, method=nf.TopK(keys, index=nf.KMeansIndex()))),
    }
    if "faiss-cpu" not in absent:
        lists = round(4 * math.sqrt(n))
        # 16 lists hold fewer keys than Cells opens; with the other setting Faiss looks at half as many again.
        for nprobe in (NPROBE, math.ceil(1.5 * keys * lists / n)):
            top = min(keys, round(nprobe * n / lists))
            call = functools.partial(faiss_attention, query, key, value, lists, nprobe, top)
            found[f"Faiss IVF{lists}, nprobe {nprobe}"] = top, call
    return found


def _sharing_contestants(query: Tensor, key: Tensor, value: Tensor, keys: int, absent: list[str]) -> Contestants:
    found: Contestants = {f"Cells(), {SHARED}": (keys, lambda: nf.attention(query, key, value, method=nf.Cells()))}
    if "reformer-pytorch" not in absent:
        for hashes in HASHES:
            call = functools.partial(reformer_attention, query, value, hashes)
            # A row sees its own chunk of a bucket and the one before, once per hash.
            found[f"reformer-pytorch, {hashes} hashes, {SHARED}"] = 2 * BUCKET * hashes, call
    return found


def show_peers(results: dict[str, Any]) -> Table:
    found = table(
        "n",
        "method",
        "keys",
        "seconds",
        "time / SDPA's",
        *errors.HEADINGS,
        title="clustered, no mask; 200 rows",
        words=("method",),
    )
    for n in dict.fromkeys(row["n"] for row in results["rows"]):
        mine = [row for row in results["rows"] if row["n"] == n]
        sdpa = statistics.median(next(row["seconds"] for row in mine if row["method"] == "SDPA"))
        for row in mine:
            seconds = statistics.median(row["seconds"])
            off = errors.written(row["errors"]) if row["errors"] else ("", "", "")
            found.add_row(f"{n:,}", row["method"], f"{row['keys']:,}", f"{seconds:.3f}", f"{seconds / sdpa:.2f}", *off)
        found.add_section()
    return found


def faiss_attention(query: Tensor, key: Tensor, value: Tensor, lists: int, nprobe: int, top: int) -> Tensor:
    """Softmax over the `top` keys of largest inner product that an inverted file finds; one head.

    The scores of Faiss are exact inner products, and values are summed without gathering them.
    """
    import faiss

    threads = torch.get_num_threads()
    try:
        index = faiss.index_factory(key.shape[-1], f"IVF{lists},Flat", faiss.METRIC_INNER_PRODUCT)
        index.nprobe = nprobe
        index.cp.min_points_per_centroid = 1  # or Faiss warns that lists are short, which is intended
        points = key[0, 0].numpy()
        index.train(points)
        index.add(points)
        output = torch.empty(query.shape[2], value.shape[3])
        for part in torch.arange(len(output)).split(ROWS_PER_SEARCH):
            scores, ids = (torch.from_numpy(x) for x in index.search(query[0, 0, part].numpy(), top))
            absent = ids < 0
            weights = (scores / math.sqrt(query.shape[3])).masked_fill(absent, -torch.inf).softmax(-1)
            ids = ids.masked_fill(absent, 0)
            output[part] = F.embedding_bag(ids, value[0, 0], per_sample_weights=weights, mode="sum")
        return output[None, None]
    finally:
        torch.set_num_threads(threads)  # Faiss's OpenMP changes it


def reformer_attention(shared: Tensor, value: Tensor, hashes: int) -> Tensor:
    from reformer_pytorch import LSHAttention

    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        attend = LSHAttention(bucket_size=BUCKET, n_hashes=hashes, causal=False).eval()
        return attend(shared[0], value[0])[0][None]


def _exact_rows(query: Tensor, key: Tensor, value: Tensor, chosen: Tensor, hide_self: bool = False) -> Tensor:
    logits = query[0, 0, chosen] @ key[0, 0].T / math.sqrt(query.shape[3])
    if hide_self:
        logits[torch.arange(len(chosen)), chosen] = -torch.inf
    return logits.double().softmax(-1).float() @ value[0, 0]
