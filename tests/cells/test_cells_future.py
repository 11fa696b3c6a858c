"""Cells: no bit of a causal row depends on a later key, value or query (but for the queries with which it opens cells)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from by_hand import inputs, seeded
from cells_cases import method_of, problem, span_levels_at_most
from torch import Tensor

import nearfield as nf

FUTURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "groups": {"group": 3},
    "window": {"window": 20},
    "samples": {"samples": 3},
    "dropout": {"dropout_p": 0.3, "group": 3},
    "dropout-samples": {"dropout_p": 0.3, "samples": 2, "cell_size": 2},
    "odd-dims": {"dim": 5, "group": 3, "segment": 32},
    "odd-dims-wide-values": {"dim": 3, "value_dim": 11, "group": 3, "segment": 32},
    "head-dim": {"dim": 80, "segment": 50, "probes": 4},
    "no-sinks": {"sinks": 0, "segment": 4, "cell_size": 2, "probes": 9},
    "many-sinks": {"sinks": 70},
    "blocks": {"partition": nf.Blocks(), "segment": 32},
    "hash": {"partition": nf.HashBuckets(), "segment": 32},
    "by-queries": {"partition": nf.KMeans(by_queries=True), "group": 2, "segment": 16},
    "by-queries-padding": {"partition": nf.KMeans(by_queries=True), "mask": "anywhere", "segment": 8, "batch": 3},
    "by-queries-share": {"partition": nf.KMeans(by_queries=True), "share": 16, "segment": 12},
    "cross-attention": {"keys": 150},
    "cross-attention-few-queries": {"queries": 150, "keys": 200, "cell_size": 2},
    "many-spans": {"segment": 8, "cell_size": 3, "probes": 3},
    "many-spans-samples": {"segment": 8, "cell_size": 3, "samples": 3},
    "many-spans-sinks": {"segment": 6, "sinks": 15, "cell_size": 2},
    "many-spans-empty-cells": {"segment": 8, "kind": "few-places", "cell_size": 2},
    "many-spans-empty-cells-sinks": {"segment": 9, "kind": "few-places", "sinks": 12, "cell_size": 2},
    "spans-of-two": {"segment": 8, "span_levels": 2},
    "spans-of-two-samples": {"segment": 8, "span_levels": 2, "samples": 2, "cell_size": 2},
    "padding-left": {"mask": "left", "segment": 8, "group": 2, "batch": 3},
    "padding-left-samples": {"mask": "left", "segment": 8, "samples": 3, "batch": 3, "cell_size": 2},
    "padding-anywhere": {"mask": "anywhere", "segment": 8, "batch": 3},
    "share": {"share": 16, "group": 2, "segment": 12},
    "share-long-segments": {"share": 16, "group": 2, "segment": 50, "cell_size": 3, "probes": 4},
    "share-many-spans-samples": {"share": 32, "segment": 7, "cell_size": 2, "samples": 2, "window": 8},
    "share-cross-attention-padding": {"share": 16, "keys": 150, "mask": "left", "batch": 3, "segment": 9},
}


def assert_no_future(case: dict[str, Any], dtype: torch.dtype, changes: int = 12) -> None:
    """Change some of what follows a row, by little or by very much: the row and all before it stay what they are, bit by bit.

    Where rows open cells together, queries are changed from the next block on, keys and values from the next row on.
    """
    case = {"queries": 200, "causal": True} | case
    tensors, mask = problem(case, dtype)

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        with span_levels_at_most(case.get("span_levels")):
            est = nf.estimate(
                q, k, v, mask, case.get("dropout_p", 0.0), True, enable_gqa=True, method=method_of(case), generator=seeded(3)
            )
        return est.output, est.lse

    before = run(*tensors)
    generator = seeded(7)
    for number in range(changes):
        row = int(torch.randint(max(120, 3 * case["queries"] // 5), (), generator=generator)) + 20
        which = ("q", "k", "v", "qkv", "qk")[number % 5]
        share = case.get("share", 1) if "q" in which else 1
        row = (row // share + 1) * share - 1
        size = (1.0, 0.01, 1e4, 1e18, torch.finfo(dtype).max / 100)[number % 4 if number < 8 else 4]
        changed = [x.clone() for x in tensors]
        for letter, x in zip("qkv", changed, strict=True):
            if letter in which:
                # One of them alone, or all that follow.
                last = row + 2 if number % 3 == 0 else None
                # The square of a query has to be finite.
                times = min(size, 1e18) if letter == "q" else size
                noise = times * torch.randn(x.shape, generator=generator, dtype=torch.float64)
                x[:, :, row + 1 : last] = noise[:, :, row + 1 : last].to(dtype)
        for x, y in zip(before, run(changed[0], changed[1], changed[2]), strict=True):
            assert torch.equal(x[:, :, : row + 1], y[:, :, : row + 1]), f"{which} after {row}, {size:g}"


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float64, marks=pytest.mark.long), torch.float32], ids=["float64", "float32"]
)
@pytest.mark.parametrize("name", FUTURES)
def test_the_future_has_no_influence_on_any_bit(name: str, dtype: torch.dtype) -> None:
    assert_no_future(FUTURES[name], dtype)


@pytest.mark.parametrize("name", ["plain", "many-spans-samples", "spans-of-two", "padding-left-samples"])
def test_the_future_has_no_influence_on_bfloat16(name: str) -> None:
    assert_no_future(FUTURES[name], torch.bfloat16)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["plain", "many-spans-samples", "padding-left", "share"])
def test_the_future_has_no_influence_with_two_threads(name: str, dtype: torch.dtype) -> None:
    assert_no_future(FUTURES[name], dtype, changes=6)


@pytest.mark.usefixtures("two_threads")
def test_the_future_has_no_influence_on_long_inputs_with_two_threads() -> None:
    """Long enough for torch to share the work of one operation out."""
    case = {"queries": 2000, "dim": 64, "group": 2, "segment": 64, "cell_size": 4, "probes": 8, "samples": 2}
    assert_no_future(case, torch.float32, changes=3)


def test_a_later_query_whose_square_overflows() -> None:
    q, k, v = inputs(1, 1, queries=64, dim=8)
    q, k[:, :, :8] = 1e5 * q, 0.0  # u_c of some 10^10, which is cut off; and cells without any spread
    later = q.clone()
    later[:, :, 62] = 1e20
    method = nf.Cells(cell_size=4, probes=1, segment=32, sinks=0, partition=nf.Blocks())
    before, after = (nf.attention(x, k, v, is_causal=True, method=method)[:, :, :62] for x in (q, later))
    assert torch.equal(before, after)


def test_a_query_whose_square_overflows() -> None:
    q, k, v = torch.full((1, 1, 1, 8), 1e20), torch.ones(1, 1, 20, 8), torch.ones(1, 1, 20, 8)
    est = nf.estimate(q, k, v, method=nf.Cells(cell_size=4, probes=2, sinks=0))
    torch.testing.assert_close(est.output, torch.ones(1, 1, 1, 8))
