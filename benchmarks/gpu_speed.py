"""Sections of bench_gpu.py: how fast Cells are next to the fastest backend of SDPA, forward and in training."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Collection
from typing import Any

import errors
import torch
from cells_speed import settings
from gpu_timing import (
    DEFAULT,
    DTYPE,
    HEADS,
    QKV,
    Call,
    backends,
    clustered,
    fastest,
    hopeful,
    interleaved,
    methods,
    peak_megabytes,
    sdpa,
    usual,
)
from record import each, exponent, table
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import nearfield as nf

DIMS = (64, 128)
SIZES = (8192, 16_384, 32_768, 65_536, 131_072, 262_144, 1_048_576)
TRAINING = (16_384, 32_768, 65_536, 131_072)
LONGEST_EXACT = 262_144
"""Beyond this SDPA is not run: its time is taken to grow as n^2, its memory as n."""
COMPARED = 131_072
"""The length at which other settings are measured as well."""
FITTED_FROM = 65_536
GRADIENTS_AT = 16_384
AUDITED = 299

Row = dict[str, Any]


def forward(quick: bool) -> dict[str, Any]:
    """No mask and causal."""
    sizes, dims = ((512, 1024), (16,)) if quick else (SIZES, DIMS)
    plan = [(dim, causal, n) for dim in dims for causal in (False, True) for n in sizes]
    rows: list[Row] = []
    tried: dict[tuple[int, bool], tuple[str, ...]] = {}
    longest = 512 if quick else LONGEST_EXACT
    for dim, causal, n in each(plan, lambda item: f"forward, d = {item[0]}, {mask_name(item[1])}, n = {item[2]:,}"):
        inputs = clustered(n, dim)
        several = methods(causal) if n == (512 if quick else COMPARED) else usual(causal)
        names = tried.get((dim, causal), backends()) if n <= longest else ()
        exact = {name: functools.partial(sdpa, name, *inputs, causal) for name in names}
        # The audits come first: they also compile the kernels.
        ours = {name: audited(inputs, causal, method) for name, method in several.items()}
        calls = {name: functools.partial(attend, inputs, causal, method) for name, method in several.items()}
        row = {"n": n, "dim": dim, "causal": causal, **compared(exact, calls, inputs, ours)}
        if row["exact"]:
            tried[dim, causal] = hopeful(row["exact"]["tried_ms"])
        else:
            extrapolate(row, next(x for x in rows if (x["dim"], x["causal"], x["n"]) == (dim, causal, longest)))
        rows.append(row)
    found = [_trend([row for row in rows if (row["dim"], row["causal"]) == pair]) for pair in tried]
    return {"family": "clustered", "heads": HEADS, "dtype": str(DTYPE), "trends": found, "rows": rows}


def training(quick: bool) -> dict[str, Any]:
    """Forward and backward: the gradients of query, key and value. Causal, and without a mask up to where cells are faster."""
    sizes, free, dims = ((512,), (512,), (16,)) if quick else (TRAINING, TRAINING[:2], DIMS)
    plan = [(dim, n, causal) for dim in dims for causal in (False, True) for n in (sizes if causal else free)]
    rows: list[Row] = []
    tried: dict[int, tuple[str, ...]] = {}
    for dim, n, causal in each(plan, lambda item: f"training, d = {item[0]}, n = {item[1]:,}, {mask_name(item[2])}"):
        inputs = clustered(n, dim)
        upstream = torch.randn_like(inputs[0])
        ours = {"default": audited(inputs, causal, DEFAULT)}
        leaves = with_grad(inputs)
        exact = {name: functools.partial(gradients, leaves, upstream, causal, name) for name in tried.get(dim, backends())}
        calls = {"default": functools.partial(gradients, leaves, upstream, causal, DEFAULT)}
        row = {"n": n, "dim": dim, "causal": causal, **compared(exact, calls, (*leaves, upstream), ours)}
        tried[dim] = hopeful(row["exact"]["tried_ms"])
        if causal and (quick or n == GRADIENTS_AT):
            row["relative_error_of_gradients"] = gradient_errors(leaves, upstream, row["exact"]["backend"])
        rows.append(row)
    found = [_trend([row for row in rows if row["dim"] == dim and row["causal"]]) for dim in dims]
    return {"family": "clustered", "heads": HEADS, "dtype": str(DTYPE), "trends": found, "rows": rows}


def mask_name(causal: bool) -> str:
    return "causal" if causal else "no mask"


def with_grad(inputs: QKV) -> QKV:
    """The same tensors, which require gradients from now on."""
    query, key, value = (x.requires_grad_() for x in inputs)
    return query, key, value


def attend(inputs: QKV, causal: bool, method: nf.Cells) -> Tensor:
    return nf.attention(*inputs, is_causal=causal, method=method)


def gradients(leaves: QKV, upstream: Tensor, causal: bool, way: str | nf.Cells) -> tuple[Tensor, ...]:
    """By a backend of SDPA or by Cells."""
    output = sdpa(way, *leaves, causal) if isinstance(way, str) else attend(leaves, causal, way)
    return torch.autograd.grad(output, leaves, upstream)


def audited(inputs: QKV, causal: bool, method: nf.Cells) -> dict[str, Any]:
    """What Cells did, and its error on random rows."""
    generator = torch.Generator().manual_seed(0)
    found = nf.estimate(*inputs, is_causal=causal, method=method, generator=generator, audit=AUDITED)
    assert found.audit is not None
    off = errors.of_audit(found.audit) | {"mean_additive": float(found.audit.additive_errors.mean())}
    return {"settings": settings(found.info), "errors": off}


def compared(
    exact: dict[str, Any], ours: dict[str, Any], inputs: Collection[Tensor], known: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Times and memory of the fastest backend in `exact` (if there is any) and of `ours`; `known` goes with each of ours."""
    calls: dict[str, Call] = dict(ours)
    for call in ours.values():
        call()
    best = None
    if exact:
        backend, tried = fastest(exact)
        best = {"backend": backend, "tried_ms": tried, "extrapolated": False}
        calls = {"exact": exact[backend], **calls}
    runs = interleaved(calls)
    memory = {name: peak_megabytes(call, inputs) for name, call in calls.items()}
    found = {name: {"ms": statistics.median(runs[name]), "runs_ms": runs[name], "peak_megabytes": memory[name]} for name in calls}
    row = {"exact": best | found["exact"] if best else None, "ours": {name: found[name] | known[name] for name in ours}}
    if best:
        _ratios(row)
    return row


def extrapolate(row: Row, last: Row) -> None:
    """Fills in what SDPA would take, by what it took at the longest inputs that it was given."""
    times = row["n"] / last["n"]
    memory = last["exact"]["peak_megabytes"]
    row["exact"] = {
        "backend": last["exact"]["backend"],
        "extrapolated": True,
        "ms": last["exact"]["ms"] * times**2,
        "peak_megabytes": memory and {name: times * memory[name] for name in ("total", "beyond_inputs")},
    }
    _ratios(row)


def _ratios(row: Row) -> None:
    for own in row["ours"].values():
        own["exact_over_ours"] = row["exact"]["ms"] / own["ms"]
        if own["peak_megabytes"]:
            own["memory_over_exact"] = own["peak_megabytes"]["total"] / row["exact"]["peak_megabytes"]["total"]


def _trend(rows: list[Row]) -> dict[str, Any]:
    """The length from which Cells stay faster, and how their time grows over long inputs; None where it cannot be told."""
    faster_from = None
    for row in reversed(rows):
        if row["ours"]["default"]["exact_over_ours"] <= 1:
            break
        faster_from = row["n"]
    long = [row for row in rows if row["n"] >= FITTED_FROM]
    grows = exponent([row["n"] for row in long], [row["ours"]["default"]["ms"] for row in long]) if len(long) > 2 else None
    return {"dim": rows[0]["dim"], "causal": rows[0]["causal"], "faster_from": faster_from, "exponent": grows}


def gradient_errors(leaves: QKV, upstream: Tensor, backend: str) -> dict[str, dict[str, float]]:
    """||ours - exact|| / ||exact|| of each gradient, and the same of SDPA in bfloat16, which is rounding alone."""
    exact = _exact_gradients(leaves, upstream)
    ways: dict[str, str | nf.Cells] = {"default": DEFAULT, "sdpa": backend}
    found = {}
    for name, way in ways.items():
        pairs = zip(("query", "key", "value"), gradients(leaves, upstream, True, way), exact, strict=True)
        found[name] = {which: float((own.float() - want).norm() / want.norm()) for which, own, want in pairs}
    return found


def _exact_gradients(leaves: QKV, upstream: Tensor) -> tuple[Tensor, ...]:
    """In float32, head by head."""
    found: list[tuple[Tensor, ...]] = []
    for head in range(upstream.shape[1]):
        query, key, value = own = tuple(x.detach()[:, head : head + 1].float().requires_grad_() for x in leaves)
        with sdpa_kernel(SDPBackend.MATH):
            output = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        found.append(torch.autograd.grad(output, own, upstream[:, head : head + 1].float()))
    return tuple(torch.cat(parts, 1) for parts in zip(*found, strict=True))


def show_forward(results: dict[str, Any]) -> Table:
    return _show(results, "forward")


def show_training(results: dict[str, Any]) -> Table:
    return _show(results, "forward and backward")


def _show(results: dict[str, Any], title: str) -> Table:
    trends = "; ".join(
        f"d = {x['dim']}, {mask_name(x['causal'])}: "
        + (f"faster from {x['faster_from']:,} on" if x["faster_from"] else "not faster yet")
        + (f", time ~ n^{x['exponent']:.2f}" if x["exponent"] else "")
        for x in results["trends"]
    )
    titles = (
        "n",
        "d",
        "mask",
        "ours",
        "exact, ms",
        "by",
        "ours, ms",
        "ratio",
        "rel. mean, worst",
        "add. mean, worst",
        "keys",
        "cells",
    )
    found = table(*titles, "MB exact", "ours", "ratio", "dq dk dv rel.", title=f"{title}; {trends}")
    for row in results["rows"]:
        for name, own in row["ours"].items():
            exact, off, sizes = row["exact"], own["errors"], own["settings"]
            memory = [x["peak_megabytes"]["total"] for x in (exact, own)] if own["peak_megabytes"] else []
            off_gradients = row.get("relative_error_of_gradients", {}).get("default", {})
            found.add_row(
                f"{row['n']:,}",
                f"{row['dim']}",
                mask_name(row["causal"]),
                name,
                f"{exact['ms']:.2f}",
                "n^2" if exact["extrapolated"] else exact["backend"],
                f"{own['ms']:.2f}",
                f"{own['exact_over_ours']:.2f}",
                *(f"{off[f'mean_{kind}']:.4f} {off[f'max_{kind}']:.4f}" for kind in ("relative", "additive")),
                f"{sizes['keys_per_query']:,.0f}",
                f"{sizes['probes']} x {sizes['cell_size']}",
                *([f"{x:,.0f}" for x in memory] or ["", ""]),
                f"{own['memory_over_exact']:.2f}" if memory else "",
                " ".join(f"{x:.3f}" for x in off_gradients.values()),
            )
    return found
