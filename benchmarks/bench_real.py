"""Cells against exact top-k with as many keys, on queries, keys and values of a real model.

python benchmarks/bench_real.py --text TEXT                    # writes results/real.json and docs/figures/cells_real.png
python benchmarks/bench_real.py --captured FOLDER [--quick]    # inputs that real.py has saved; quick: two layers, nothing written

8,192 tokens, causal, all layers and heads; rows from the last segment of 1,024. That segment and the first 16 keys are exact for
both. Of the past, top-k takes the heaviest keys of each row (a perfect index) and drops the rest, as the paper does; Cells opens
some cells and sums up the others by their moments. Errors are relative errors of rows, averaged per head.

It takes five minutes on two cores for SmolLM2-135M (`make smollm2`), and two more to run the model.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import real
import real_plot
import torch
from record import each, show, table
from torch import Tensor

import nearfield as nf

SEGMENT, SINKS = 1024, 16
LONGEST = 128
"""The most segments that are grouped into cells together."""
SETTINGS = ((16, 41), (16, 75), (8, 79), (8, 144))
"""(keys per cell, cells opened): on SmolLM2 about 650 and 1,200 keys of the past."""
ROUTED = SETTINGS[0]
"""The setting at which routing per query head and per group of heads are compared."""


@dataclass(frozen=True)
class Group:
    """The chosen rows of the query heads that share a key-value head, head by head, and their exact attention."""

    heads: int
    queries: Tensor
    """`[heads * rows, dim]`, times scale"""
    keys: Tensor
    values: Tensor
    logits: Tensor
    """`[heads * rows, n]`, -inf for later keys"""
    exact: Tensor

    @property
    def past(self) -> int:
        return len(self.keys) - SEGMENT

    def per_head(self, x: Tensor) -> Tensor:
        """`[heads]`: means over the rows of each head."""
        return x.view(self.heads, -1).mean(1)

    def errors(self, output: Tensor) -> Tensor:
        return self.per_head((output - self.exact).norm(dim=-1) / self.exact.norm(dim=-1))


def groups(query: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> Iterator[Group]:
    heads = query.shape[1] // key.shape[1]
    for member, keys, values in zip(query[0].split(heads), key[0], value[0], strict=True):
        queries = member[:, positions].flatten(0, 1) / math.sqrt(query.shape[3])
        hidden = torch.arange(len(keys)) > positions.repeat(heads)[:, None]
        logits = (queries @ keys.T).masked_fill_(hidden, -torch.inf)
        yield Group(heads, queries, keys, values, logits, logits.softmax(-1) @ values)


def topk_errors(group: Group, counts: list[int]) -> Tensor:
    """Errors of attention to the `counts[h]` heaviest past keys in each row of head h; segment and sinks are exact."""
    near = torch.zeros_like(group.logits, dtype=torch.bool)
    near[:, :SINKS] = near[:, group.past :] = True
    heavy = group.logits[:, SINKS : group.past].topk(max(counts), dim=-1).indices
    kept = torch.arange(max(counts)) < torch.tensor(counts).repeat_interleave(len(heavy) // group.heads)[:, None]
    near[:, SINKS : group.past].scatter_(1, heavy, kept)
    return group.errors(group.logits.masked_fill(~near, -torch.inf).softmax(-1) @ group.values)


def cells_of_the_past(group: Group, cell_size: int) -> tuple[Tensor, int]:
    """The cell of each key before the last segment `[past]`, and how many cells there are.

    Closed segments are grouped in spans of 1, 2, 4, ... of them, the longest first: 7 are 4, 2 and 1.
    """
    parts, cells, done = [], 0, 0
    while done < group.past:
        length = min(LONGEST, 1 << (((group.past - done) // SEGMENT).bit_length() - 1)) * SEGMENT
        own = length // cell_size
        parts.append(nf.KMeans().build(group.keys[None, done : done + length], own)[0] + cells)
        done, cells = done + length, cells + own
    return torch.cat(parts), cells


def routed(group: Group, cell_size: int, probes: int, together: bool = False) -> tuple[Tensor, Tensor]:
    """Errors and opened keys per head of the cells engine, written again in plain dense torch.

    The library says how many keys its rows read on average, but not which cells a row opens. A test compares this copy with the
    library. Cells are chosen for each query head, or `together` for all heads of the group, by the largest score among them.
    """
    cell, cells = cells_of_the_past(group, cell_size)
    cell = cell[SINKS:]
    keys, values = group.keys[SINKS : group.past], group.values[SINKS : group.past]
    member = torch.nn.functional.one_hot(cell, cells).to(keys.dtype)
    size = member.sum(0)
    share = (member / size.clamp(min=1)).T
    centroid, mean = share @ keys, share @ values
    off_key, off_value = keys - centroid[cell], values - mean[cell]
    score = group.queries @ centroid.T
    spread = group.queries.square() @ (share @ off_key.square()).T
    route = (score + 3 * spread.sqrt()).masked_fill(size == 0, -torch.inf)
    if together:
        route = route.view(group.heads, -1, len(size)).amax(0).repeat(group.heads, 1)
    opened = torch.zeros_like(route, dtype=torch.bool).scatter_(1, route.topk(min(probes, cells)).indices, True)
    near = torch.ones_like(group.logits, dtype=torch.bool)
    near[:, SINKS : group.past] = opened[:, cell]
    far = (size.log() + score + 2 * torch.log1p(spread / 4)).masked_fill(opened, -torch.inf)
    weights = torch.cat([group.logits.masked_fill(~near, -torch.inf), far], 1).softmax(-1)
    on_keys, on_cells = weights.split([len(group.keys), len(size)], 1)
    tilt = group.queries @ (off_value.T @ off_key / len(keys)).T
    output = on_keys @ group.values + on_cells @ mean + on_cells.sum(1, keepdim=True) * tilt
    return group.errors(output), group.per_head((opened * size).sum(1))


def measure(layers: Collection[tuple[int, Tensor, Tensor, Tensor]], rows: int) -> dict[str, Any]:
    found: dict[tuple[int, int], list[dict[str, Tensor]]] = {setting: [] for setting in SETTINGS}
    routes: dict[str, list[dict[str, Tensor]]] = {"per head": [], "per group": []}
    numbers, tokens = [], 0
    for layer, query, key, value in each(layers, lambda item: f"layer {item[0]}"):
        numbers.append(layer)
        tokens = query.shape[2]
        if tokens % SEGMENT or tokens < 2 * SEGMENT:
            raise ValueError(f"tokens must be a multiple of {SEGMENT}, at least {2 * SEGMENT}, got {tokens}")
        step = SEGMENT // rows
        positions = torch.arange(tokens - SEGMENT + step - 1, tokens, step)
        parts = list(groups(query, key, value, positions))
        for cell_size, probes in SETTINGS:
            method = nf.Cells(cell_size=cell_size, probes=probes, segment=SEGMENT, sinks=SINKS)
            output = nf.estimate(query, key, value, is_causal=True, enable_gqa=True, method=method).output[0, :, positions]
            chosen = output.unflatten(0, (key.shape[1], -1)).flatten(1, 2)
            counts = torch.cat([routed(group, cell_size, probes)[1] for group in parts])
            ours = torch.cat([group.errors(x) for group, x in zip(parts, chosen, strict=True)])
            found[cell_size, probes].append({"cells": ours, "topk": _topk(parts, counts), "keys": counts})
        for name, route in routes.items():
            pairs = [routed(group, *ROUTED, together=name == "per group") for group in parts]
            ours, counts = (torch.cat(x) for x in zip(*pairs, strict=True))
            route.append({"cells": ours, "topk": _topk(parts, counts), "keys": counts})
    return {
        "tokens": tokens,
        "layers": numbers,
        "rows_per_head": rows,
        "segment": SEGMENT,
        "sinks": SINKS,
        "settings": [{"cell_size": size, "probes": probes, **_summary(x, numbers)} for (size, probes), x in found.items()],
        "routing": {
            "cell_size": ROUTED[0],
            "probes": ROUTED[1],
            **{name: _summary(x, numbers, short=True) for name, x in routes.items()},
        },
    }


def _topk(parts: list[Group], counts: Tensor) -> Tensor:
    each_group = counts.round().long().split(parts[0].heads)
    return torch.cat([topk_errors(group, some.tolist()) for group, some in zip(parts, each_group, strict=True)])


def _summary(rows: list[dict[str, Tensor]], layers: list[int], short: bool = False) -> dict[str, Any]:
    """Means and worst heads of errors `[layers, heads]`, with and without the first layer; and all errors unless `short`."""
    cells, topk, keys = (torch.stack([row[name].double() for row in rows]) for name in ("cells", "topk", "keys"))

    def compared(cells: Tensor, topk: Tensor) -> dict[str, float]:
        return {
            "cells_mean": float(cells.mean()),
            "topk_mean": float(topk.mean()),
            "ratio_of_means": float(cells.mean() / topk.mean()),
            "cells_worst_head": float(cells.max()),
            "topk_worst_head": float(topk.max()),
            "ratio_of_worst_heads": float(cells.max() / topk.max()),
            "median_ratio": float((cells / topk).median()),
            "heads": cells.numel(),
            "heads_where_topk_is_better": int((topk < cells).sum()),
        }

    later = [i for i, layer in enumerate(layers) if layer > 0]
    summed: dict[str, Any] = {"keys": float(keys.mean()), "all_layers": compared(cells, topk)}
    if later:
        summed["without_layer_0"] = compared(cells[later], topk[later])
    if short:
        return summed
    for name, error in (("cells", cells), ("topk", topk)):
        order = error.flatten().argsort(descending=True)[:5].tolist()
        summed[f"worst_heads_of_{name}"] = [[layers[i // error.shape[1]], i % error.shape[1]] for i in order]
    per_head = {"keys": (keys, 1), "cells": (cells, 5), "topk": (topk, 5)}
    summed["per_head"] = {
        name: [[round(y, digits) for y in x] for x in all_of.tolist()] for name, (all_of, digits) in per_head.items()
    }
    return summed


def report(results: dict[str, Any]) -> None:
    titles = ("cells", "keys", "mean: Cells", "top-k", "ratio", "worst head: Cells", "top-k", "ratio", "top-k better")
    for name in ("all_layers", "without_layer_0"):
        title = f"relative error, {name.replace('_', ' ')}, {results['tokens']:,} tokens"
        found = table(*titles, title=title, words=("cells",))
        rows = {f"{x['probes']} of {x['cell_size']} keys": x for x in results["settings"]}
        routing = results["routing"]
        rows |= {
            f"{routing['probes']} of {routing['cell_size']} keys, dense, routed {x}": routing[x]
            for x in ("per head", "per group")
        }
        for label, row in rows.items():
            if name in row:
                some = row[name]
                found.add_row(
                    label,
                    f"{row['keys']:.0f}",
                    f"{some['cells_mean']:.4f}",
                    f"{some['topk_mean']:.4f}",
                    f"{some['ratio_of_means']:.3f}",
                    f"{some['cells_worst_head']:.4f}",
                    f"{some['topk_worst_head']:.4f}",
                    f"{some['ratio_of_worst_heads']:.3f}",
                    f"{some['heads_where_topk_is_better']} of {some['heads']} heads",
                )
        show(found)
    first = results["settings"][0]
    for name, label in (("topk", "top-k"), ("cells", "Cells")):
        worst = first[f"worst_heads_of_{name}"]
        print(f"worst heads of {label} (layer, head):", ", ".join(f"({layer}, {head})" for layer, head in worst))
    if first["worst_heads_of_topk"][0][0] == 0:
        print("top-k's worst head is in layer 0: without that layer the worst heads compare as in the second table")


def main() -> None:
    real.command_line(__doc__, "real", 32, SEGMENT, measure, report, real_plot.plot)


if __name__ == "__main__":
    main()
