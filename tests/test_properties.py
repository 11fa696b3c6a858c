"""What must hold of every estimate whatever the input, on many small inputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from by_hand import QKV, attention64, inputs, seeded
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import nearfield as nf
from nearfield.cells.partition.equal import Blocks, HashBuckets
from nearfield.cells.partition.kmeans import KMeans


@dataclass(frozen=True)
class Case:
    """A small problem in float64."""

    batch: int
    kv_heads: int
    group: int
    queries: int
    keys: int
    dim: int
    value_dim: int
    causal: bool
    padded: bool
    seed: int
    spread: float

    @property
    def tensors(self) -> QKV:
        q, k, v = inputs(
            self.batch, self.kv_heads * self.group, queries=self.queries, keys=self.keys, dim=self.dim,
            value_dim=self.value_dim, kv_heads=self.kv_heads, seed=self.seed, dtype=torch.float64,
        )  # fmt: skip
        return q * self.spread, k, v

    @property
    def mask(self) -> Tensor | None:
        """Key padding that leaves at least the first key."""
        if not self.padded:
            return None
        mask = torch.rand(self.batch, 1, 1, self.keys, generator=seeded(self.seed + 1)) < 0.6
        mask[..., 0] = True
        return mask

    def run(self, tensors: QKV, method: Any, **options: Any) -> Tensor:
        options = {"attn_mask": self.mask, "is_causal": self.causal, "enable_gqa": True} | options
        return nf.attention(*tensors, method=method, generator=seeded(self.seed), **options)


cases = st.builds(
    Case,
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    queries=st.integers(1, 8),
    keys=st.integers(1, 12),
    dim=st.integers(1, 5),
    value_dim=st.integers(1, 4),
    causal=st.booleans(),
    padded=st.booleans(),
    seed=st.integers(0, 2**20),
    spread=st.sampled_from([0.0, 0.1, 1.0, 8.0]),
)
near = st.integers(1, 13)
tails = st.integers(0, 13)
near_everything = st.sampled_from(
    [
        nf.Exact(),
        nf.TopK(k=50),
        nf.TopK(k=1, tail=50),
        nf.TopK(k=4, tail=50),
        nf.Cells(cell_size=2, probes=12, segment=3, sinks=1),
        nf.Cells(cell_size=1, probes=12, segment=4, sinks=0, samples=2),
    ]
)
cells = st.builds(
    nf.Cells,
    cell_size=st.integers(1, 4),
    probes=st.integers(1, 3),
    segment=st.integers(1, 5),
    sinks=st.integers(0, 2),
    samples=st.sampled_from([0, 0, 2, 3]),
    partition=st.sampled_from([KMeans(), Blocks(), HashBuckets()]),
)
deterministic_indices = st.sampled_from(
    [nf.ExactIndex(), nf.KMeansIndex(cells=3, probes=1), nf.ConcentricLSH(rungs=2, tables=2, flips=1, shells=2)]
)


@given(cases, near, tails, cells, st.floats(-30, 30))
def test_a_constant_added_to_the_logits_changes_nothing(case: Case, k: int, tail: int, groups: nf.Cells, constant: float) -> None:
    """One more feature, 1 in every key, adds `constant` to all logits of a row."""
    q, key, v = case.tensors
    wider = (
        torch.cat([q, torch.full_like(q[..., :1], constant)], -1),
        torch.cat([key, torch.ones_like(key[..., :1])], -1),
        v,
    )
    # A hash of one more feature is another hash.
    groups = replace(groups, partition=Blocks()) if isinstance(groups.partition, HashBuckets) else groups
    for method in (nf.Exact(), nf.TopK(k), nf.TopK(k, tail), groups):
        if case.spread == 0.0 and not isinstance(method, nf.Exact):
            continue  # all keys tie, and rounding may choose another top k
        torch.testing.assert_close(
            case.run(wider, method, scale=1.0), case.run((q, key, v), method, scale=1.0), atol=1e-9, rtol=1e-9
        )


@given(cases, near_everything)
def test_permuting_keys_changes_nothing(case: Case, method: Any) -> None:
    q, k, v = case.tensors
    order = torch.randperm(case.keys, generator=seeded(case.seed + 2))
    mask = case.mask
    shuffled = None if mask is None else mask[..., order]
    torch.testing.assert_close(
        case.run((q, k[:, :, order], v[:, :, order]), method, is_causal=False, attn_mask=shuffled),
        case.run((q, k, v), method, is_causal=False),
    )


@given(cases, near)
def test_permuting_keys_does_not_change_the_top_k(case: Case, k: int) -> None:
    q, key, v = case.tensors
    if case.spread == 0.0:
        return  # all keys tie: any k of them will do
    order = torch.randperm(case.keys, generator=seeded(case.seed + 2))
    mask = case.mask
    shuffled = None if mask is None else mask[..., order]
    torch.testing.assert_close(
        case.run((q, key[:, :, order], v[:, :, order]), nf.TopK(k), is_causal=False, attn_mask=shuffled),
        case.run((q, key, v), nf.TopK(k), is_causal=False),
    )


@given(cases, near, tails, deterministic_indices, cells, st.floats(-3, 3))
def test_linear_in_the_values(case: Case, k: int, tail: int, index: Any, groups: nf.Cells, factor: float) -> None:
    q, key, v = case.tensors
    other = torch.randn(v.shape, generator=seeded(case.seed + 3), dtype=v.dtype)
    for method in (nf.Exact(), nf.TopK(k, tail, index), groups):
        torch.testing.assert_close(
            case.run((q, key, v + factor * other), method),
            case.run((q, key, v), method) + factor * case.run((q, key, other), method),
            atol=1e-10,
            rtol=1e-10,
        )


@given(cases, near, tails, deterministic_indices, cells)
def test_values_of_one_give_one(case: Case, k: int, tail: int, index: Any, groups: nf.Cells) -> None:
    """Also where far keys are drawn: numerator and denominator are corrected by the same draws."""
    q, key, v = case.tensors
    for method in (nf.Exact(), nf.TopK(k, tail, index), groups):
        got = case.run((q, key, torch.ones_like(v)), method)
        torch.testing.assert_close(got, torch.ones_like(got), atol=1e-12, rtol=0)


@given(cases, near, tails, deterministic_indices)
def test_weights_are_a_distribution_over_visible_keys(case: Case, k: int, tail: int, index: Any) -> None:
    q, key, _ = case.tensors
    eye = torch.eye(case.keys, dtype=torch.float64).expand(case.batch, case.kv_heads, -1, -1)
    visible = torch.ones(case.queries, case.keys, dtype=torch.bool)
    if case.causal:
        visible = visible.tril()
    hidden = ~visible if case.mask is None else ~(visible & case.mask)
    for method in (nf.Exact(), nf.TopK(k, tail, index)):
        weights = case.run((q, key, eye), method)
        assert bool((weights >= 0).all())
        assert bool((weights.masked_select(hidden) == 0).all())
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1], dtype=torch.float64), atol=1e-12, rtol=0)
        used = (weights > 1e-300).sum(-1)
        if isinstance(method, nf.TopK) and k < case.keys and case.mask is None:
            assert bool((used <= k + tail).all())


def perturb(tensors: QKV, row: int, size: float, seed: int, which: str) -> QKV:
    """Other queries, keys and values (those named) after position `row`."""
    generator = seeded(seed + 4)

    def change(x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=generator, dtype=x.dtype) * size
        later = torch.arange(x.shape[2])[:, None] > row
        return torch.where(later, noise, x)

    q, k, v = (change(x) if name in which else x for name, x in zip("qkv", tensors, strict=True))
    return q, k, v


def assert_past_unchanged(case: Case, method: Any, size: float, which: str) -> None:
    tensors = case.tensors
    row = case.seed % case.queries
    options = {"is_causal": True}
    before = case.run(tensors, method, **options)[:, :, : row + 1]
    after = case.run(perturb(tensors, row, size, case.seed, which), method, **options)[:, :, : row + 1]
    assert torch.equal(before, after)


@given(cases, near, tails, cells, st.sampled_from([1.0, 1e6, 1e100]))
def test_a_causal_row_ignores_the_future(case: Case, k: int, tail: int, groups: nf.Cells, size: float) -> None:
    """Bit for bit. A tail is drawn by rank among the visible keys, so not even the draw may change."""
    for method in (nf.Exact(), nf.TopK(k), nf.TopK(k, tail), groups):
        assert_past_unchanged(case, method, size, "qkv")


LEARNING_INDICES = st.sampled_from(
    [nf.KMeansIndex(probes=1, leaf=3), nf.ConcentricLSH(rungs=2, tables=2, enough=1.0, leaf=3), nf.FaissIndex("Flat", leaf=3)]
)


@given(cases, near, tails, st.sampled_from([1.0, 1e6]), LEARNING_INDICES)
def test_a_causal_row_ignores_the_future_with_any_index(case: Case, k: int, tail: int, size: float, index: Any) -> None:
    """Not even through centroids, radii or hash widths: those of a causal row are made of keys that it sees."""
    if isinstance(index, nf.FaissIndex):
        pytest.importorskip("faiss")
    assert_past_unchanged(case, nf.TopK(k, tail, index), size, "qkv")


@given(cases, near_everything)
def test_everything_near_is_exact(case: Case, method: Any) -> None:
    torch.testing.assert_close(case.run(case.tensors, method), attention64(*case.tensors, case.mask, case.causal))


@given(cases, near, deterministic_indices)
def test_standard_error_is_zero_at_full_budget(case: Case, k: int, index: Any) -> None:
    est = nf.estimate(
        *case.tensors, case.mask, is_causal=case.causal, enable_gqa=True,
        method=nf.TopK(k, case.keys, index), generator=seeded(case.seed),
    )  # fmt: skip
    assert est.stderr is not None
    assert bool((est.stderr == 0).all())
    torch.testing.assert_close(est.output, attention64(*case.tensors, case.mask, case.causal))


@given(cases, cells)
def test_standard_error_of_cells_is_zero_at_full_budget(case: Case, groups: nf.Cells) -> None:
    method = replace(groups, probes=12, samples=2)
    est = nf.estimate(
        *case.tensors, case.mask, is_causal=case.causal, enable_gqa=True, method=method, generator=seeded(case.seed)
    )
    assert est.stderr is not None
    assert bool((est.stderr == 0).all())
    torch.testing.assert_close(est.output, attention64(*case.tensors, case.mask, case.causal))


@given(cases, near, tails, deterministic_indices, cells, st.sampled_from([0.0, 1.0, 1e300, float("nan"), float("inf")]))
def test_padding_content_is_irrelevant(case: Case, k: int, tail: int, index: Any, groups: nf.Cells, content: float) -> None:
    q, key, v = case.tensors
    mask = torch.rand(case.batch, 1, 1, case.keys, generator=seeded(case.seed + 1)) < 0.6
    hidden = ~mask[:, :, 0, :, None]
    for method in (nf.Exact(), nf.TopK(k, tail, index), groups):
        filled = (q, key.masked_fill(hidden, content), v.masked_fill(hidden, content))
        assert torch.equal(case.run(filled, method, attn_mask=mask), case.run((q, key, v), method, attn_mask=mask))


@given(cases, near, tails, cells)
def test_padding_is_the_same_as_fewer_keys(case: Case, k: int, tail: int, groups: nf.Cells) -> None:
    q, key, v = (x[:1] for x in case.tensors)
    mask = torch.rand(case.keys, generator=seeded(case.seed + 1)) < 0.6
    mask[0] = True
    kept = (q, key[:, :, mask], v[:, :, mask])
    for method in (nf.Exact(), nf.TopK(k), nf.TopK(k, tail), groups):
        torch.testing.assert_close(
            case.run((q, key, v), method, attn_mask=mask, is_causal=False),
            case.run(kept, method, attn_mask=None, is_causal=False),
        )


@given(cases, near, cells)
def test_batch_entries_are_independent(case: Case, k: int, groups: nf.Cells) -> None:
    """Whatever else is in the batch: other numbers, even huge ones or NaN, leave an entry alone bit for bit."""
    q, key, v = (torch.cat([x[:1], x[:1]]) for x in case.tensors)
    options = {"attn_mask": None}
    for method in (nf.Exact(), nf.TopK(k), nf.TopK(k, 3), groups):
        before = case.run((q, key, v), method, **options)
        for content in (1e100, float("nan")):
            other = [x.clone() for x in (q, key, v)]
            for x in other:
                x[1] = content
            assert torch.equal(case.run((other[0], other[1], other[2]), method, **options)[0], before[0])


@given(cases, near, cells)
def test_batches_are_loops(case: Case, k: int, groups: nf.Cells) -> None:
    q, key, v = case.tensors
    mask = case.mask
    for method in (nf.Exact(), nf.TopK(k), replace(groups, samples=0)):
        if case.spread == 0.0 and isinstance(method, nf.TopK):
            continue  # all keys tie: any k of them will do
        together = case.run((q, key, v), method)
        for b in range(case.batch):
            one = (q[b : b + 1], key[b : b + 1], v[b : b + 1])
            alone = case.run(one, method, attn_mask=None if mask is None else mask[b : b + 1])
            torch.testing.assert_close(together[b : b + 1], alone)


@given(cases, near, cells, st.sampled_from([nf.ExactIndex(), nf.KMeansIndex(cells=3, probes=1)]))
def test_grouped_queries_equal_repeated_keys(case: Case, k: int, groups: nf.Cells, index: Any) -> None:
    q, key, v = case.tensors
    repeated = (q, key.repeat_interleave(case.group, 1), v.repeat_interleave(case.group, 1))
    for method in (nf.Exact(), nf.TopK(k, 0, index), nf.TopK(k, 50, index), groups):
        torch.testing.assert_close(case.run((q, key, v), method), case.run(repeated, method))
