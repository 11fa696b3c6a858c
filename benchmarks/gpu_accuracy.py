"""Section of bench_gpu.py: the error of Cells next to that of exact top-k with as many keys, on rows of long inputs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import real
import torch
import torch.nn.functional as F
from cells_speed import settings
from gpu_keys import closed_keys, keys_of
from gpu_speed import mask_name
from gpu_timing import DEVICE, DTYPE, QKV, clustered, methods
from record import each, table
from rich.table import Table
from torch import Tensor

import nearfield as nf

LENGTH, DIM, ROWS = 131_072, 64, 256
BLOCK = 128
"""Rows whose logits are held at a time."""


class Sample(NamedTuple):
    """Some rows of one query head, in float32, and the keys and values that they may see."""

    queries: Tensor
    """`[rows, dim]`, times scale"""
    keys: Tensor
    values: Tensor
    positions: Tensor
    """`[rows]`: a causal row sees the keys up to its own position"""
    causal: bool

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Positions and logits `[rows, n]` of some rows, -inf for later keys."""
        place = torch.arange(len(self.keys), device=self.keys.device)
        for queries, positions in zip(self.queries.split(BLOCK), self.positions.split(BLOCK), strict=True):
            logits = queries @ self.keys.T
            yield positions, logits.masked_fill_(place > positions[:, None], -torch.inf) if self.causal else logits

    def exact(self) -> Tensor:
        return torch.cat([logits.softmax(-1) @ self.values for _, logits in self.blocks()])

    def top_k(self, info: dict[str, Any], counts: Tensor) -> Tensor:
        """Softmax over the `counts` heaviest keys of each row (a perfect index), the rest dropped.

        Causal, as in bench_real.py: what Cells see one by one, the row's own segment and the sinks, is exact here too, and
        the keys to choose are those of the past.
        """
        found = []
        place = torch.arange(len(self.keys), device=self.keys.device)
        for (positions, logits), count in zip(self.blocks(), counts.split(BLOCK), strict=True):
            near = torch.zeros_like(logits, dtype=torch.bool)
            if self.causal:
                near = (place >= closed_keys(positions, info, len(self.keys))[:, None]) | (place < info["sinks"])
            heavy = logits.masked_fill(near, -torch.inf).topk(min(int(count.max()), len(place)), dim=-1).indices
            kept = torch.arange(heavy.shape[1], device=count.device) < count[:, None]
            near |= torch.zeros_like(near).scatter_(1, heavy, kept)
            found.append(logits.masked_fill_(~near, -torch.inf).softmax(-1) @ self.values)
        return torch.cat(found)


def accuracy(quick: bool, captured: Path | None = None) -> dict[str, Any]:
    """Clustered inputs without a mask and causal, and causal real ones that gpu_capture.py has saved."""
    n, rows = (1024, 16) if quick else (LENGTH, ROWS)
    plan: list[tuple[str, bool, Path | None]] = [("clustered", causal, None) for causal in (False, True)]
    if captured is None:
        print("no --captured: real inputs are left out")
    else:
        plan += [(path.stem, True, path) for path in sorted(captured.glob("layer_*.pt"))]
    layers: dict[tuple[str, bool], list[tuple[str, dict[str, list[dict[str, Any]]]]]] = {}
    for label, causal, path in each(plan, lambda item: f"accuracy, {item[0]}, {mask_name(item[1])}"):
        inputs = clustered(n, DIM) if path is None else _saved(path)
        kind = ("clustered" if path is None else "real", causal)
        layers.setdefault(kind, []).append((label, per_head(inputs, causal, rows)))
    found = [
        {"inputs": inputs, "causal": causal, "setting": setting, **_summary([(name, one[setting]) for name, one in some])}
        for (inputs, causal), some in layers.items()
        for setting in methods(causal)
    ]
    return {"rows_per_head": rows, "dtype": str(DTYPE), "captured": _about(captured), "rows": found}


def _saved(path: Path) -> QKV:
    ((_, *tensors),) = real.saved(path.parent, [int(path.stem.removeprefix("layer_"))])
    query, key, value = (x.to(DEVICE, DTYPE) for x in tensors)
    return query, key, value


def _about(captured: Path | None) -> dict[str, Any] | None:
    """What gpu_capture.py says of the inputs it saved."""
    if captured is None:
        return None
    path = captured / "capture.json"
    return json.loads(path.read_text()) if path.exists() else {}


def per_head(inputs: QKV, causal: bool, rows: int) -> dict[str, list[dict[str, Any]]]:
    """For each setting, one entry for each query head: mean relative errors of its rows, and keys."""
    query, key, value = inputs
    group = query.shape[1] // key.shape[1]
    n = key.shape[2]
    generator = torch.Generator().manual_seed(1)
    compared = methods(causal)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in compared}
    for head in range(key.shape[1]):
        own = query[:, head * group : (head + 1) * group], key[:, head : head + 1], value[:, head : head + 1]
        wide_key, wide_value = (x.expand(-1, group, -1, -1).contiguous() for x in own[1:])
        sdpa = F.scaled_dot_product_attention(own[0], wide_key, wide_value, is_causal=causal)
        # Head by head, so that the number of keys is that of the head.
        ours = {name: nf.estimate(*own, is_causal=causal, enable_gqa=True, method=method) for name, method in compared.items()}
        known = {name: keys_read(own, causal, method, ours[name]) for name, method in compared.items()}
        for member in range(group):
            positions = torch.randperm(n, generator=generator)[:rows].to(DEVICE)
            scaled = own[0][0, member, positions].float() / math.sqrt(query.shape[3])
            sample = Sample(scaled, own[1][0, 0].float(), own[2][0, 0].float(), positions, causal)
            exact = sample.exact()
            for name, estimate in ours.items():
                counts = keys_to_choose(positions, n, known[name])
                outputs = {
                    "cells": estimate.output[0, member, positions],
                    "topk": sample.top_k(estimate.info, counts).to(DTYPE),  # rounded as the others are
                    "sdpa": sdpa[0, member, positions],
                }
                off = {way: float(_relative(output.float(), exact).mean()) for way, output in outputs.items()}
                found[name].append({**off, "keys": float(counts.float().mean()), "settings": settings(estimate.info), "n": n})
    return found


def keys_read(own: QKV, causal: bool, method: nf.Cells, whole: nf.Estimate) -> list[tuple[int, float]]:
    """How many keys a row chose to read, as (up to this position, keys).

    Causal: of the past, for the first eighth of the rows, the second eighth, the second quarter, and the second half.

    The library tells the mean over all rows of a call, so that of a part is a difference. Rows without a past do not count.
    """
    n = own[1].shape[2]
    if not causal:
        return [(n, whole.info["keys_per_query"])]
    found: list[tuple[int, float]] = []
    before_keys = before_rows = 0.0
    for rows in (n // 8, n // 4, n // 2, n):
        some = own[0][:, :, :rows], own[1], own[2]
        info = whole.info if rows == n else nf.estimate(*some, is_causal=True, enable_gqa=True, method=method).info
        seen = keys_of(rows, info)
        with_past = seen.share * rows
        opened = seen.opened * with_past
        found.append((rows, (opened - before_keys) / max(1.0, with_past - before_rows)))
        before_keys, before_rows = opened, with_past
    return found


def keys_to_choose(positions: Tensor, n: int, known: list[tuple[int, float]]) -> Tensor:
    """How many keys top-k may choose for each row."""
    stops = torch.tensor([stop for stop, _ in known], device=positions.device)
    counts = torch.tensor([round(keys) for _, keys in known], device=positions.device)
    return counts[torch.searchsorted(stops, positions, right=True)].clamp(max=n)


def _relative(output: Tensor, exact: Tensor) -> Tensor:
    return (output - exact).norm(dim=-1) / exact.norm(dim=-1)


def _summary(layers: list[tuple[str, list[dict[str, Any]]]]) -> dict[str, Any]:
    """Over all heads of all layers, and without the first layer of a model."""
    heads = [head for _, some in layers for head in some]
    found: dict[str, Any] = {
        "n": heads[0]["n"],
        "settings": {name: x for name, x in heads[0]["settings"].items() if name != "keys_per_query"},
        "keys_per_query": sum(head["settings"]["keys_per_query"] for head in heads) / len(heads),
        "keys_of_topk": sum(head["keys"] for head in heads) / len(heads),
        **_compared(heads),
    }
    later = [head for name, some in layers for head in some if name != "layer_00"]
    if 0 < len(later) < len(heads):
        found["without_layer_0"] = _compared(later)
    found["per_head"] = {
        name: {way: [round(head[way], 6) for head in some] for way in ("cells", "topk", "sdpa")} for name, some in layers
    }
    return found


def _compared(heads: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"heads": len(heads)}
    for way in ("cells", "topk", "sdpa"):
        errors = [head[way] for head in heads]
        found |= {f"{way}_mean": sum(errors) / len(errors), f"{way}_worst_head": max(errors)}
    found["ratio_of_means"] = found["cells_mean"] / found["topk_mean"]
    found["ratio_of_worst_heads"] = found["cells_worst_head"] / found["topk_worst_head"]
    found["heads_where_topk_is_better"] = sum(head["topk"] < head["cells"] for head in heads)
    return found


def show_accuracy(results: dict[str, Any]) -> Table:
    titles = ("inputs", "mask", "n", "cells", "keys", "top-k's", "mean: Cells", "top-k", "ratio", "SDPA", "worst: Cells", "top-k")
    title = f"relative error, mean of {results['rows_per_head']} rows of a head; mean and worst of the heads"
    found = table(*titles, "ratio", "top-k better", title=title, words=("inputs", "mask", "cells"))
    for row in results["rows"]:
        sizes = f"{row['settings']['probes']} x {row['settings']['cell_size']}"
        for label, some in ((row["inputs"], row), (f"{row['inputs']}, without layer 0", row.get("without_layer_0"))):
            if some:
                found.add_row(
                    label,
                    mask_name(row["causal"]),
                    f"{row['n']:,}",
                    sizes,
                    f"{row['keys_per_query']:,.0f}",
                    f"{row['keys_of_topk']:,.0f}",
                    *(f"{some[name]:.4f}" for name in ("cells_mean", "topk_mean", "ratio_of_means", "sdpa_mean")),
                    *(f"{some[name]:.4f}" for name in ("cells_worst_head", "topk_worst_head", "ratio_of_worst_heads")),
                    f"{some['heads_where_topk_is_better']} of {some['heads']}",
                )
    return found
