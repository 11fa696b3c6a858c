"""Every kernel set computes what `kernels/reference.py` says, and the reference what its docstrings say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from by_hand import inputs, pairs, seeded
from torch import Tensor

import nearfield as nf
from nearfield.kernels import backends, pairs_cpu, pairs_gpu, reference
from nearfield.knn.index.base import PADDING, flat_ids, gathered_scores

SETS = {"reference": reference, "cpu": pairs_cpu}
kernel_sets = pytest.mark.parametrize("kernel", SETS.values(), ids=SETS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])

SHAPES = {
    "usual": (7, 5, 20, 3),
    "one-pair": (1, 1, 1, 1),
    "one-row": (1, 9, 40, 8),
    "wider-than-table": (6, 30, 4, 3),
    "as-wide-as-table": (6, 4, 4, 3),
    "no-rows": (0, 5, 20, 3),
    "no-pairs": (7, 0, 20, 3),
    "long-table": (3, 4, 5000, 2),
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def scores_by_hand(rows: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros(ids.shape, dtype=rows.dtype)
    for f in range(ids.shape[0]):
        for t in range(ids.shape[1]):
            out[f, t] = (rows[f] * table[ids[f, t]]).sum()
    return out


def sums_by_hand(weights: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros(ids.shape[0], table.shape[1], dtype=table.dtype)
    for f in range(ids.shape[0]):
        for t in range(ids.shape[1]):
            out[f] += weights[f, t] * table[ids[f, t]]
    return out


def scatter_by_hand(out: Tensor, weights: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    for f in range(ids.shape[0]):
        for t in range(ids.shape[1]):
            out[ids[f, t]] += weights[f, t] * rows[f]
    return out


@kernel_sets
@dtypes
@shapes
@pytest.mark.usefixtures("poisoned")
def test_pair_scores(kernel: Any, dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    rows, table, ids, _ = pairs(shape, dtype)
    torch.testing.assert_close(kernel.pair_scores(rows, table, ids), scores_by_hand(rows, table, ids))


@kernel_sets
@dtypes
@shapes
@pytest.mark.usefixtures("poisoned")
def test_pair_sums(kernel: Any, dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    _, table, ids, weights = pairs(shape, dtype)
    torch.testing.assert_close(kernel.pair_sums(weights, table, ids), sums_by_hand(weights, table, ids))


@kernel_sets
@dtypes
@shapes
@pytest.mark.usefixtures("poisoned")
def test_pair_scatter(kernel: Any, dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    rows, table, ids, weights = pairs(shape, dtype)
    start = torch.randn(table.shape, generator=seeded(2), dtype=dtype)
    expected = scatter_by_hand(start.clone(), weights, rows, ids)
    out = start.clone()
    assert kernel.pair_scatter_(out, weights, rows, ids) is out
    torch.testing.assert_close(out, expected)


@kernel_sets
def test_strided_arguments(kernel: Any) -> None:
    rows, table, ids, weights = pairs((6, 4, 30, 3), torch.float64)
    strided = [torch.stack([x, x], -1)[..., 0] for x in (rows, table, ids, weights)]
    assert not any(x.is_contiguous() for x in strided)
    s_rows, s_table, s_ids, s_weights = strided
    torch.testing.assert_close(kernel.pair_scores(s_rows, s_table, s_ids), scores_by_hand(rows, table, ids))
    torch.testing.assert_close(kernel.pair_sums(s_weights, s_table, s_ids), sums_by_hand(weights, table, ids))
    out = torch.zeros_like(table)
    kernel.pair_scatter_(out, s_weights, s_rows, s_ids)
    torch.testing.assert_close(out, scatter_by_hand(torch.zeros_like(table), weights, rows, ids))


@kernel_sets
def test_rows_outside_the_pairs_are_not_touched(kernel: Any) -> None:
    rows, table, ids, weights = pairs((6, 4, 30, 3), torch.float64)
    unused = torch.ones(30, dtype=torch.bool)
    unused[ids.flatten()] = False
    assert bool(unused.any())
    poisoned_table = table.clone()
    poisoned_table[unused] = torch.nan
    torch.testing.assert_close(kernel.pair_scores(rows, poisoned_table, ids), scores_by_hand(rows, table, ids))
    torch.testing.assert_close(kernel.pair_sums(weights, poisoned_table, ids), sums_by_hand(weights, table, ids))
    out = torch.full_like(table, torch.nan)
    out[~unused] = 0
    kernel.pair_scatter_(out, weights, rows, ids)
    assert bool(out[unused].isnan().all())
    assert bool(out[~unused].isfinite().all())


@kernel_sets
def test_same_bits_every_time(kernel: Any) -> None:
    rows, table, ids, weights = pairs((40, 30, 20, 8), torch.float32)
    for _ in range(5):
        assert torch.equal(kernel.pair_scores(rows, table, ids), kernel.pair_scores(rows, table, ids))
        assert torch.equal(kernel.pair_sums(weights, table, ids), kernel.pair_sums(weights, table, ids))
        first, second = torch.zeros_like(table), torch.zeros_like(table)
        assert torch.equal(kernel.pair_scatter_(first, weights, rows, ids), kernel.pair_scatter_(second, weights, rows, ids))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("method", [nf.TopK(k=3), nf.TopK(k=3, tail=2), nf.TopK(k=3, tail=2, index=nf.KMeansIndex(probes=1))])
def test_no_method_reads_fresh_memory(method: Any, backend: str) -> None:
    leaves = [x.requires_grad_() for x in inputs(2, 4, queries=12, dim=4, kv_heads=2)]
    mask = torch.rand(2, 1, 1, 12, generator=seeded(3)) < 0.5
    mask[0] = False
    est = nf.estimate(
        *leaves, mask, is_causal=True, enable_gqa=True, method=method, backend=backend, audit=10, generator=seeded(0)
    )
    est.output.sum().backward()
    assert bool(est.output.isfinite().all())
    assert not bool(est.lse.isnan().any())
    assert est.stderr is None or bool(est.stderr.isfinite().all())
    for x in leaves:
        assert x.grad is not None
        assert bool(x.grad.isfinite().all())


@dtypes
def test_weighted_softmax(dtype: torch.dtype) -> None:
    logits = torch.randn(5, 4, generator=seeded(0), dtype=dtype)
    logits[1, 2:] = -torch.inf
    logits[2] = -torch.inf
    logits[3] += 1e4
    log_weight = torch.randn(5, 4, generator=seeded(1), dtype=dtype)
    for bias in (None, log_weight):
        weights, lse = reference.weighted_softmax(logits, bias)
        shifted = logits if bias is None else logits + bias
        seen = torch.tensor([0, 1, 3, 4])
        torch.testing.assert_close(weights[seen], shifted[seen].softmax(-1))
        torch.testing.assert_close(lse[seen], shifted[seen].logsumexp(-1))
        assert bool((weights[2] == 0).all())
        assert lse[2] == -torch.inf


def test_exact_attention_sees_a_prefix() -> None:
    q, k, v = (x[0] for x in inputs(1, 2, queries=3, keys=5, dim=4, dtype=torch.float64))
    visible = torch.tensor([[5, 0, 2], [1, 3, 4]])
    output, lse = reference.exact_attention(q, k, v, visible)
    for b in range(2):
        for r in range(3):
            n = int(visible[b, r])
            logits = k[b, :n] @ q[b, r]
            torch.testing.assert_close(output[b, r], logits.softmax(0) @ v[b, :n])
            torch.testing.assert_close(lse[b, r], logits.logsumexp(0))


@pytest.mark.parametrize("length", [2**31, 2**31 - 1, 2**33 + 7, 2**40])
def test_flat_ids_do_not_overflow(length: int) -> None:
    """Places beyond 2^31, in the entries of a batch and within one; the keys themselves need not exist."""
    ids = torch.tensor([[[0, length - 1, PADDING]], [[5, length - 1, PADDING]], [[0, 1, PADDING]]])
    flat = flat_ids(ids, length)
    assert flat.dtype == torch.int64
    assert flat.tolist() == [
        [0, length - 1, 0],
        [length + 5, 2 * length - 1, length],
        [2 * length, 2 * length + 1, 2 * length],
    ]


def test_flat_ids_of_many_entries() -> None:
    """70,000 entries of 70,000 keys are 4.9e9 places."""
    ids = torch.full((70_000, 1, 1), 69_999)
    flat = flat_ids(ids, 70_000)
    assert int(flat[-1, 0]) == 70_000**2 - 1
    assert bool((flat[1:, 0] - flat[:-1, 0] == 70_000).all())


def test_gathered_scores_read_the_right_entry() -> None:
    keys, queries = torch.randn(3, 5, 2, generator=seeded(0)), torch.randn(3, 4, 2, generator=seeded(1))
    ids = torch.randint(-1, 5, (3, 4, 6), generator=seeded(2))
    for backend in ("cpu", "reference"):
        scores = gathered_scores(queries, keys, ids, backend)
        expected = (queries @ keys.mT).gather(-1, ids.clamp(min=0)).masked_fill(ids == PADDING, -torch.inf)
        torch.testing.assert_close(scores, expected)


@pytest.mark.parametrize("in_triton", [False, True])
def test_choose(in_triton: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "runs_triton", lambda device: in_triton and device.type == "cuda")
    host, other = torch.device("cpu"), torch.device("cuda")
    assert backends.pair_kernels("auto", host) is pairs_cpu
    assert backends.pair_kernels("cpu", host) is pairs_cpu
    assert backends.pair_kernels("reference", host) is reference
    assert backends.pair_kernels("reference", other) is reference
    assert backends.pair_kernels("auto", other) is (pairs_gpu if in_triton else reference)
    with pytest.raises(ValueError, match="backend='cpu' needs CPU tensors, got cuda"):
        backends.pair_kernels("cpu", other)
    with pytest.raises(ValueError, match=r"backend must be one of 'auto', .* got 'gpu'"):
        backends.pair_kernels("gpu", host)


@pytest.mark.parametrize("in_triton", [False, True])
def test_triton_by_name(in_triton: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "runs_triton", lambda device: in_triton)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if in_triton:
        assert backends.pair_kernels("triton", torch.device("cuda")) is pairs_gpu
    else:
        with pytest.raises(ValueError, match="backend='triton' needs Triton and an NVIDIA GPU of compute capability"):
            backends.pair_kernels("triton", torch.device("cuda"))


def test_name() -> None:
    host, other = torch.device("cpu"), torch.device("cuda")
    for backend, device, expected in (
        ("auto", host, "cpu"),
        ("cpu", host, "cpu"),
        ("reference", host, "reference"),
        ("auto", other, "reference"),
        ("triton", other, "reference"),
        ("reference", other, "reference"),
    ):
        assert backends.without_triton(backend, device) == expected


def test_who_serves_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "runs_triton", lambda device: True)
    served = [torch.zeros(3, 256, dtype=dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32)]
    missed = {"torch.float64": torch.zeros(3, 2, dtype=torch.float64), "more than 256 columns": torch.zeros(3, 257)}
    for backend in ("auto", "triton"):
        assert backends.pairs_backend(backend, *served) == "triton"
    for backend in ("reference", "cpu"):
        assert backends.pairs_backend(backend, *served) == backend
    for what, table in missed.items():
        assert backends.pairs_backend("auto", served[0], table) == "cpu"
        with pytest.raises(ValueError, match=f"the Triton kernels do not serve {what}; use backend='auto'"):
            backends.pairs_backend("triton", served[0], table)


def test_cpu_kernels_leave_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    rows, table, ids, _ = pairs((6, 4, 30, 3), torch.float32)
    pairs_cpu._acknowledge_sparse_csr.cache_clear()
    pairs_cpu.pair_scores(rows, table, ids)
    assert not recwarn.list
