"""Cells: the engine computes what the reference says, exact attention where everything is near, and nothing from the future."""

from __future__ import annotations

import dataclasses
import functools
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from by_hand import QKV, attention64, gradients, inputs, logits64, seeded
from cells_cases import PADDED, method_of, problem, span_levels_at_most
from torch import Tensor

import nearfield as nf
from nearfield.cells import moments as cells_moments
from nearfield.cells.torch import backward as torch_backward
from nearfield.cells.torch import forward as torch_forward
from nearfield.cells.torch import head as torch_head
from nearfield.cells.torch import tiles as torch_tiles

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "default-sizes": {"queries": 400, "causal": True, "cell_size": None, "probes": None, "segment": None, "sinks": 16},
    "groups": {"group": 3, "kv_heads": 2},
    "groups-causal": {"group": 3, "causal": True},
    "few-queries": {"queries": 30, "keys": 100},
    "few-queries-causal": {"queries": 30, "keys": 100, "causal": True},
    "few-keys": {"queries": 100, "keys": 37},
    "few-keys-causal": {"queries": 100, "keys": 37, "causal": True, "group": 2},
    "padding-right": {"mask": "right", **PADDED},
    "padding-right-causal": {"mask": "right", "causal": True, **PADDED},
    "padding-left": {"mask": "left", **PADDED},
    "padding-left-causal": {"mask": "left", "causal": True, "group": 2, **PADDED},
    "padding-anywhere": {"mask": "anywhere", **PADDED},
    "padding-anywhere-causal": {"mask": "anywhere", "causal": True, **PADDED},
    "padding-samples": {"mask": "right", "causal": True, "samples": 3, **PADDED},
    "padding-dropout": {"mask": "left", "causal": True, "dropout_p": 0.3, **PADDED},
    "samples": {"samples": 3},
    "samples-causal": {"samples": 3, "causal": True, "group": 2},
    "samples-nothing-left": {"samples": 3, "probes": 99},
    "dropout": {"dropout_p": 0.3},
    "dropout-causal": {"dropout_p": 0.3, "causal": True, "group": 2},
    "dropout-samples": {"dropout_p": 0.3, "samples": 4},
    "dropout-samples-causal": {"dropout_p": 0.3, "samples": 4, "causal": True, "cell_size": 2},
    "window": {"causal": True, "window": 20},
    "window-over-all": {"causal": True, "window": 1000},
    "no-sinks": {"causal": True, "sinks": 0},
    "default-sinks": {"causal": True, "sinks": 16},
    "sinks-over-a-segment": {"causal": True, "sinks": 40},
    "sinks-over-all": {"sinks": 1000},
    "blocks": {"causal": True, "partition": nf.Blocks()},
    "hash": {"partition": nf.HashBuckets()},
    "hash-causal": {"causal": True, "partition": nf.HashBuckets(bits=3, seed=1)},
    "wide-values": {"value_dim": 19, "causal": True},
    "narrow-values": {"value_dim": 1, "dropout_p": 0.2},
    "odd-dims": {"dim": 5, "value_dim": 7, "causal": True, "group": 2, "samples": 2},
    "one-dim": {"dim": 1},
    "cells-of-one": {"cell_size": 1, "causal": True},
    "one-cell": {"cell_size": 1000, "probes": 1},
    "segments-of-one": {"causal": True, "segment": 1, "cell_size": 1},
    "segment-over-all": {"causal": True, "segment": 1000},
    "cells-over-a-page": {"queries": 150, "keys": 900, "cell_size": 400, "probes": 1},
    "empty-cells": {"kind": "few-places", "cell_size": 4, "causal": True},
    "empty-cells-samples": {"kind": "few-places", "cell_size": 2, "samples": 3},
    "duplicates": {"kind": "duplicates", "causal": True, "samples": 2},
    "identical": {"kind": "identical"},
    "identical-causal": {"kind": "identical", "causal": True, "cell_size": 2},
    "zero-queries": {"spread": 0.0, "causal": True},
    "sharp": {"spread": 8.0, "causal": True},
    "scale": {"scale": 1.3, "causal": True},
    "negative-scale": {"scale": -0.7},
    "many-spans": {"causal": True, "segment": 7, "cell_size": 3},
    "many-spans-groups": {"causal": True, "segment": 7, "group": 2, "cell_size": 2},
    "many-spans-empty-cells": {"kind": "few-places", "causal": True, "segment": 7, "sinks": 9, "cell_size": 2},
    "many-spans-duplicates": {  # and a seed with which no row has to choose between cells that are equally good
        "kind": "duplicates", "causal": True, "segment": 9, "samples": 2, "sinks": 12, "cell_size": 2,
        "partition": nf.KMeans(seed=1),
    },
    "spans-of-one": {"causal": True, "segment": 7, "span_levels": 1},
    "spans-of-two": {"causal": True, "segment": 7, "span_levels": 2, "group": 2},
    "spans-of-two-samples": {"causal": True, "segment": 7, "span_levels": 2, "samples": 3, "window": 5},
    "spans-of-four-dropout": {"causal": True, "segment": 5, "span_levels": 3, "dropout_p": 0.3, "samples": 2, "cell_size": 2},
    "spans-of-four-padding": {"causal": True, "segment": 5, "span_levels": 3, "mask": "left", **PADDED},
    "share": {"share": 16},
    "share-causal": {"share": 16, "causal": True},
    "share-uneven-groups": {"share": 32, "group": 3, "kv_heads": 2, "causal": True, "segment": 12},
    "share-long-segments": {"share": 16, "group": 2, "causal": True, "segment": 40, "cell_size": 4},
    "share-many-parts": {"share": 128, "queries": 300, "group": 2, "causal": True, "segment": 20, "cell_size": 4},
    "share-few-queries": {"share": 16, "queries": 70, "keys": 100, "causal": True, "segment": 7},
    "share-few-keys": {"share": 16, "queries": 100, "keys": 37, "causal": True, "group": 2},
    "share-window": {"share": 64, "causal": True, "window": 20, "sinks": 20, "segment": 9},
    "share-padding": {"share": 16, "mask": "left", "causal": True, "group": 2, "segment": 7, **PADDED},
    "share-padding-plain": {"share": 32, "mask": "anywhere", **PADDED},
    "share-plain-uneven-groups": {"share": 16, "group": 3, "kv_heads": 2, "queries": 53, "value_dim": 5, "cell_size": 3},
    "share-plain-many-parts": {"share": 128, "queries": 300, "group": 2, "cell_size": 4},
    "share-plain-dropout": {"share": 16, "dropout_p": 0.3, "samples": 3, "group": 2, "queries": 70, "cell_size": 4},
    "share-plain-sharp": {"share": 32, "spread": 8.0, "group": 2},
    "share-samples": {"share": 16, "samples": 3, "causal": True, "group": 2, "cell_size": 2},
    "share-dropout": {"share": 16, "dropout_p": 0.3, "samples": 2, "causal": True, "segment": 6, "cell_size": 2},
    "share-empty-cells": {"share": 16, "kind": "few-places", "cell_size": 2, "causal": True, "segment": 7, "sinks": 9},
    "share-sharp": {"share": 32, "spread": 8.0, "causal": True},
    "everything": {"mask": "anywhere", "causal": True, "group": 2, "dropout_p": 0.2, "samples": 3, "window": 5, **PADDED},
    "everything-many-spans": {
        "mask": "left", "causal": True, "group": 2, "dropout_p": 0.2, "samples": 3, "segment": 6, "span_levels": 3,
        "cell_size": 2, **PADDED,
    },
}  # fmt: skip


def results(case: dict[str, Any], dtype: torch.dtype, backend: str = "auto") -> dict[str, Tensor]:
    """Output, log-normaliser and gradients."""
    tensors, mask = problem(case, dtype)
    leaves = [x.clone().requires_grad_() for x in tensors]
    with span_levels_at_most(case.get("span_levels")):
        est = nf.estimate(
            *leaves, mask, case.get("dropout_p", 0.0), case.get("causal", False), case.get("scale"), True,
            method=method_of(case), generator=seeded(3), backend=backend,
        )  # fmt: skip
    upstream = torch.randn(est.output.shape, generator=seeded(5), dtype=torch.float64).to(dtype)
    grads = torch.autograd.grad(est.output, leaves, upstream)
    return {"output": est.output.detach(), "lse": est.lse, **dict(zip("qkv", grads, strict=True))}


@functools.cache
def reference_of(name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    return results(CASES[name], dtype, "reference")


def assert_parity(case: dict[str, Any], dtype: torch.dtype, expected: dict[str, Tensor] | None = None) -> None:
    """The engine computes what the reference says (`expected`, where that is known already)."""
    tolerance = (1e-10 if dtype == torch.float64 else 1e-4) * max(1.0, case.get("spread", 1.0))
    expected = expected or results(case, dtype, "reference")
    for name, found in results(case, dtype).items():
        true = expected[name]
        size = max(1.0, float(true[true.isfinite()].abs().max())) if true.isfinite().any() else 1.0
        torch.testing.assert_close(found, true, rtol=tolerance, atol=tolerance * size, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_the_engine_computes_what_the_reference_says(name: str, dtype: torch.dtype) -> None:
    assert_parity(CASES[name], dtype, reference_of(name, dtype))


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_in_small_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is done in blocks is done in many of them."""
    expected = reference_of(name, torch.float64)
    monkeypatch.setattr(torch_head, "LEAST_BLOCK_BYTES", 1)
    monkeypatch.setattr(torch_head, "MOST_BLOCK_BYTES", 1)
    monkeypatch.setattr(torch_tiles, "SCALARS_PER_PASS", 1)
    monkeypatch.setattr(cells_moments, "KEYS_PER_PASS", 5)
    # The other sizes are defaults of arguments.
    for module in (torch_forward, torch_backward):
        monkeypatch.setattr(module, "row_parts", lambda part, cost, budget=1, plain=torch_forward.row_parts: plain(part, cost, 1))
        monkeypatch.setattr(module, "stacks", partial(torch_tiles.stacks, page_size=3))
    assert_parity(CASES[name], torch.float64, expected)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", [name for name in CASES if "padding" in name or "everything" in name])
def test_nothing_is_left_unwritten(name: str) -> None:
    assert_parity(CASES[name], torch.float64, reference_of(name, torch.float64))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [5, 8, 80, 256])
@pytest.mark.parametrize("length", [1, 2, 3, 17, 64, 257, 1000])
def test_lengths_and_dims(length: int, dim: int, causal: bool) -> None:
    sizes = {"cell_size": 50 if length > 64 else 4, "segment": max(1, length // 5)}
    case = {"queries": length, "dim": dim, "causal": causal, **sizes}
    assert_parity(case, torch.float64 if length < 1000 else torch.float32)


@pytest.mark.parametrize("causal", [False, True])
def test_spreads_that_are_cut_off(causal: bool) -> None:
    """u_c of some 10^10 and logits of 10^5: the far field stays finite, and its variances have no gradient."""
    assert_parity({"spread": 1e5, "causal": causal}, torch.float64)


# Everything near


def assert_as_good_as_torch(tensors: QKV, method: nf.Cells, causal: bool, unit: float = 1.0) -> None:
    """Output error within 2x, gradient errors within 3x the error of torch in the same dtype, against float64.

    `unit`: the size of queries and keys, to which gradients are rounded.
    """
    dtype = tensors[0].dtype
    slack = 1e-12 if dtype == torch.float64 else 1e-5
    upstream = torch.randn(*tensors[0].shape[:-1], tensors[2].shape[-1], generator=seeded(9)).to(dtype)
    wide = (tensors[0].double(), tensors[1].double(), tensors[2].double())
    true, true_grads = gradients(lambda q, k, v: attention64(q, k, v, causal=causal), wide, upstream)
    plain, plain_grads = gradients(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True), tensors, upstream
    )
    got, got_grads = gradients(
        lambda q, k, v: nf.attention(q, k, v, is_causal=causal, enable_gqa=True, method=method), tensors, upstream
    )
    for name, x, y, exact in zip("oqkv", (got, *got_grads), (plain, *plain_grads), (true, *true_grads), strict=True):
        error, of_torch = (float((z.double() - exact).abs().max()) for z in (x, y))
        allowed = (2 if name == "o" else 3) * of_torch + slack * (unit if name in "qk" else 1.0)
        assert error <= allowed, f"{name}: {error:.2g}, torch {of_torch:.2g}"


NEAR = {
    "small-cells": {"cell_size": 2},
    "window": {"cell_size": 6, "window": 40, "sinks": 0},
    "hash": {"cell_size": 5, "partition": nf.HashBuckets()},
    "over-a-page": {"cell_size": 300, "segment": 600},
    "share": {"cell_size": 3, "segment": 24, "share": 16},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: str(x).removeprefix("torch."))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", NEAR)
def test_everything_near_is_exact(name: str, causal: bool, dtype: torch.dtype) -> None:
    """With other sizes of cells, for more shapes: `test_attention.py`."""
    options = {"segment": 32, "probes": 9999} | NEAR[name]
    if not causal:
        options.pop("window", None)
    shapes = [(3, 8, 1), (17, 64, 2), (64, 32, 1), (257, 80, 2)] if name != "over-a-page" else [(1200, 8, 1)]
    for length, dim, group in shapes:
        tensors = inputs(1, group, queries=length, dim=dim, kv_heads=1, dtype=dtype, seed=length)
        assert_as_good_as_torch(tensors, nf.Cells(**options), causal)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: str(x).removeprefix("torch."))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spread", [10.0, 40.0, 1000.0], ids=["beyond-the-headroom", "far-beyond", "large"])
def test_rows_whose_reference_was_too_low(
    spread: float, causal: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits hundreds above that of their centroid: e^z would overflow around it, so these rows are summed up again."""
    again = []
    plain = torch_forward._sums

    def spy(head: Any, numbers: Tensor, *rest: Any, apart: bool = False) -> Any:
        again.extend([len(numbers)] if apart else [])
        return plain(head, numbers, *rest, apart=apart)

    monkeypatch.setattr(torch_forward, "_sums", spy)
    q, k, v = inputs(1, 2, queries=120, dim=8, kv_heads=1, dtype=torch.float64)
    q[:, :, ::2] *= 1e-5  # rows whose reference is good enough
    tensors = ((spread * q).to(dtype), (spread * k).to(dtype), v.to(dtype))
    for size in (8, 60):
        again.clear()
        assert_as_good_as_torch(tensors, nf.Cells(cell_size=size, probes=99, segment=60, sinks=0), causal, spread)
        assert again
        assert again[0] < 240, "only those rows"


# Properties


METHODS = {
    "plain": nf.Cells(cell_size=8, probes=2, segment=32, sinks=3, partition=nf.Blocks()),
    "small-cells": nf.Cells(cell_size=2, probes=2, segment=32, sinks=0, partition=nf.Blocks()),
    "samples": nf.Cells(cell_size=8, probes=2, segment=32, sinks=3, samples=4, partition=nf.Blocks()),
    "share": nf.Cells(cell_size=4, probes=2, segment=24, sinks=3, partition=nf.Blocks(), share=16),
}
methods = pytest.mark.parametrize("name", METHODS)
masks = pytest.mark.parametrize("causal", [False, True])


def estimate(tensors: QKV, method: nf.Cells, causal: bool) -> nf.Estimate:
    return nf.estimate(*tensors, is_causal=causal, enable_gqa=True, method=method, generator=seeded(1))


@masks
@methods
def test_a_vector_added_to_all_keys(name: str, causal: bool) -> None:
    """It adds q.c to all logits of a row. Of the partitions only blocks do not look at the keys."""
    q, k, v = inputs(2, 2, queries=150, dim=8, dtype=torch.float64)
    shift = 3 * torch.randn(8, generator=seeded(2), dtype=torch.float64)
    one, two = (estimate((q, keys, v), METHODS[name], causal) for keys in (k, k + shift))
    torch.testing.assert_close(two.output, one.output, atol=1e-10, rtol=0)
    torch.testing.assert_close(two.lse - (q @ shift) / 8**0.5, one.lse, atol=1e-10, rtol=0)


@masks
@methods
def test_linear_in_the_values(name: str, causal: bool) -> None:
    q, k, v = inputs(2, 4, queries=150, dim=8, kv_heads=2, dtype=torch.float64)
    other = torch.randn(v.shape, generator=seeded(2), dtype=torch.float64)
    mixed, one, two = (estimate((q, k, x), METHODS[name], causal).output for x in (3 * v - 0.2 * other, v, other))
    torch.testing.assert_close(mixed, 3 * one - 0.2 * two, atol=1e-10, rtol=0)
    ones = estimate((q, k, torch.ones_like(v)), METHODS[name], causal).output
    torch.testing.assert_close(ones, torch.ones_like(ones), atol=1e-10, rtol=0)


@masks
@methods
def test_full_budget(name: str, causal: bool) -> None:
    tensors = inputs(2, 4, queries=150, dim=8, kv_heads=2, dtype=torch.float64)
    method = dataclasses.replace(METHODS[name], probes=999, samples=3)
    est = estimate(tensors, method, causal)
    torch.testing.assert_close(est.output, attention64(*tensors, causal=causal))
    torch.testing.assert_close(est.lse, logits64(*tensors[:2], causal=causal).logsumexp(-1))
    assert est.stderr is not None
    assert bool((est.stderr == 0).all())
    seen = torch.arange(1, 151) if causal else torch.full((150,), 150)
    assert est.info["keys_per_query"] == pytest.approx(float(seen.double().mean())), "no key twice, none left out"
