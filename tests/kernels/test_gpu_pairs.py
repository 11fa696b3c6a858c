"""On a CUDA device: the pair kernels in Triton at real sizes, what `TopK` makes of them, and draws that do not wait."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from by_hand import gradients, inputs, pairs, seeded
from laws import assert_frequencies
from test_gpu import needs_memory, on_device
from torch import Tensor

import nearfield as nf
from nearfield.kernels import backends, pairs_gpu, reference
from nearfield.sampling import FEW, without_replacement

pytestmark = pytest.mark.gpu

SHAPES = {
    "topk": (20_000, 16, 5000, 64),
    "one-each": (50_001, 1, 5000, 64),
    "wide": (300, 700, 5000, 128),
    "odd": (7001, 13, 333, 40),
    "most-columns": (3000, 40, 999, 256),
    "few-columns": (9000, 5, 999, 3),
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])


@pytest.fixture(autouse=True)
def in_triton() -> None:
    if not backends.runs_triton(torch.device("cuda")):
        pytest.skip("needs a card that runs the kernels in Triton")


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype, terms: int) -> None:
    """Sums of `terms` products of order 1 in float32, brought to `dtype` at the end. `expected` is float64."""
    assert found.dtype == dtype
    rounding = 8 * torch.finfo(torch.float32).eps * terms**0.5
    torch.testing.assert_close(found.double(), expected, atol=max(1e-5, rounding), rtol=torch.finfo(dtype).eps)


@dtypes
@shapes
def test_scores(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    rows, table, ids, _ = pairs(shape, dtype, "cuda")
    expected = reference.pair_scores(rows.double(), table.double(), ids)
    assert_close(pairs_gpu.pair_scores(rows, table, ids), expected, dtype, shape[3])


@dtypes
@shapes
def test_sums(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    _, table, ids, weights = pairs(shape, dtype, "cuda")
    expected = reference.pair_sums(weights.double(), table.double(), ids)
    assert_close(pairs_gpu.pair_sums(weights, table, ids), expected, dtype, shape[1])


@dtypes
@shapes
def test_scatter(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    rows, table, ids, weights = pairs(shape, dtype, "cuda")
    out = torch.ones(table.shape, device="cuda")
    expected = reference.pair_scatter_(out.double(), weights.double(), rows.double(), ids)
    assert_close(pairs_gpu.pair_scatter_(out, weights, rows, ids), expected, torch.float32, shape[0] * shape[1])


def test_tables_beyond_int32() -> None:
    """Three rows, a billion numbers apart."""
    needs_memory(30)
    _, _, ids, weights = pairs((50, 4, 3, 64), torch.float32, "cuda")
    rows = torch.randn(50, 64, generator=seeded(0)).cuda()
    table, out = (torch.zeros(2**31 + 64, device="cuda").as_strided((3, 64), (2**30, 1)) for _ in range(2))
    table.copy_(torch.randn(3, 64, generator=seeded(1)))
    near = table.contiguous()
    torch.testing.assert_close(
        pairs_gpu.pair_scores(rows, table, ids), reference.pair_scores(rows, near, ids), atol=1e-4, rtol=1e-4
    )
    torch.testing.assert_close(
        pairs_gpu.pair_sums(weights, table, ids), reference.pair_sums(weights, near, ids), atol=1e-4, rtol=1e-4
    )
    expected = reference.pair_scatter_(torch.zeros_like(near), weights, rows, ids)
    torch.testing.assert_close(pairs_gpu.pair_scatter_(out, weights, rows, ids).contiguous(), expected, atol=1e-4, rtol=1e-4)


def test_pairs_beyond_int32() -> None:
    needs_memory(60)
    count, width = 2**27 + 3, 16
    ids = torch.zeros(count, width, dtype=torch.long, device="cuda")
    ids[-1], ids[-2, 1] = 1, 2
    rows, table = torch.ones(count, 1, device="cuda"), torch.tensor([[1.0], [2.0], [3.0]], device="cuda")
    scores = pairs_gpu.pair_scores(rows, table, ids)
    assert scores[-3:].tolist() == [[1.0] * 16, [1.0, 3.0] + [1.0] * 14, [2.0] * 16]
    sums = pairs_gpu.pair_sums(scores, table, ids)
    assert sums[-3:, 0].tolist() == [16.0, 24.0, 64.0]
    weights = scores.fill_(0)
    weights[-2:] = 1
    assert pairs_gpu.pair_scatter_(torch.zeros(3, 1, device="cuda"), weights, rows, ids)[:, 0].tolist() == [15.0, 16.0, 1.0]


METHODS: dict[str, Any] = {
    "topk": nf.TopK(k=16),
    "tail": nf.TopK(k=8, tail=8),
    "large-plan": nf.TopK(k=100, tail=60),
    "kmeans": nf.TopK(k=8, tail=8, index=nf.KMeansIndex(cells=8, probes=2)),
}


def differentiate(method: Any, backend: str, dtype: torch.dtype, dropout_p: float = 0.0) -> tuple[Tensor, ...]:
    tensors = on_device(inputs(2, 4, queries=256, dim=64, kv_heads=2, dtype=dtype))
    upstream = torch.randn(2, 4, 256, 64, generator=seeded(2)).to("cuda", dtype)
    output, grads = gradients(
        lambda q, k, v: nf.attention(
            q, k, v, None, dropout_p, True, enable_gqa=True, method=method, generator=seeded(0), backend=backend
        ),
        tensors,
        upstream,
    )
    return output, *grads


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@dtypes
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_same_attention_as_the_reference(method: Any, dtype: torch.dtype, dropout_p: float) -> None:
    tolerance = 1e-4 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    found, expected = (differentiate(method, backend, dtype, dropout_p) for backend in ("auto", "reference"))
    for mine, true in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, true, atol=tolerance, rtol=tolerance)


@pytest.mark.usefixtures("deterministic")
def test_deterministic_when_asked() -> None:
    first, second = (differentiate(nf.TopK(k=8, tail=8), "auto", torch.float32) for _ in range(2))
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))


@pytest.mark.parametrize(("dtype", "expected"), [(torch.bfloat16, "triton"), (torch.float64, "reference")])
def test_what_ran_is_told(dtype: torch.dtype, expected: str) -> None:
    est = nf.estimate(*on_device(inputs(1, 2, queries=60, dim=16, dtype=dtype)), method=nf.TopK(k=8, tail=8))
    assert est.info["backend"] == expected


def test_no_gathered_rows_in_memory() -> None:
    """2 * 4 * 2048 rows of 32 pairs: 128 MiB of gathered rows, which the reference holds in its backward pass."""
    tensors = [x.requires_grad_() for x in on_device(inputs(2, 4, queries=2048, dim=64))]

    def peak(backend: str) -> int:
        output = nf.attention(*tensors, method=nf.TopK(k=32), backend=backend)
        upstream = torch.ones_like(output)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(output, tensors, upstream)
        return torch.cuda.max_memory_allocated() - before

    assert peak("auto") < peak("reference") - (100 << 20)


def test_draws_do_not_wait() -> None:
    """A few without replacement, on the card: nothing goes back to the host, and all subsets are equally likely."""
    population = torch.full((60_000,), 7, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    without_replacement(population, 3, generator)
    torch.cuda.set_sync_debug_mode("error")
    try:
        drawn = without_replacement(population, 3, generator)
        without_replacement(population, FEW, generator)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    code = (1 << drawn).sum(1)
    counts = code.bincount(minlength=128).cpu()
    likely = torch.tensor([float(bin(code).count("1") == 3) for code in range(128)])
    assert_frequencies(counts, likely / likely.sum())
