"""The pair kernels in Triton, held to the reference: under Triton's interpreter on a CPU, for real on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from by_hand import gradients, inputs, pairs, seeded
from torch import Tensor

import nearfield as nf
from nearfield.kernels import pairs_gpu, reference

pytest.importorskip("triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

SHAPES = {
    "usual": (7, 5, 20, 3),
    "one-pair": (1, 1, 1, 1),
    "one-wide-row": (1, 40, 30, 8),
    "several-tiles-of-rows": (150, 3, 20, 24),
    "several-tiles-of-pairs": (5, 37, 20, 64),
    "whole-tiles": (8, 16, 40, 64),
    "many-short-rows": (300, 1, 9, 5),
    "most-columns": (3, 18, 20, 256),
    "no-rows": (0, 5, 20, 3),
    "no-pairs": (7, 0, 20, 3),
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])


def assert_rounded_once(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Sums of float32, brought to `dtype` at the end. `expected` is float64."""
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=torch.finfo(dtype).eps)


@dtypes
@shapes
@pytest.mark.usefixtures("poisoned")
def test_scores(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    rows, table, ids, _ = pairs(shape, dtype, DEVICE)
    expected = reference.pair_scores(rows.double(), table.double(), ids)
    assert_rounded_once(pairs_gpu.pair_scores(rows, table, ids), expected, dtype)


@dtypes
@shapes
@pytest.mark.usefixtures("poisoned")
def test_sums(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    _, table, ids, weights = pairs(shape, dtype, DEVICE)
    expected = reference.pair_sums(weights.double(), table.double(), ids)
    assert_rounded_once(pairs_gpu.pair_sums(weights, table, ids), expected, dtype)


@dtypes
@shapes
def test_scatter(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    rows, table, ids, weights = pairs(shape, dtype, DEVICE)
    out = torch.randn(table.shape, generator=seeded(2)).to(DEVICE)
    expected = reference.pair_scatter_(out.double(), weights.double(), rows.double(), ids)
    assert pairs_gpu.pair_scatter_(out, weights, rows, ids) is out
    assert_rounded_once(out, expected, torch.float32)


def test_many_pairs_of_one_place() -> None:
    rows, _, ids, weights = pairs((90, 20, 1, 16), torch.float32, DEVICE)
    out = torch.zeros(1, 16, device=DEVICE)
    expected = reference.pair_scatter_(out.double(), weights.double(), rows.double(), ids)
    torch.testing.assert_close(pairs_gpu.pair_scatter_(out, weights, rows, ids).double(), expected, atol=1e-4, rtol=1e-5)


def test_no_columns() -> None:
    rows, table, ids, weights = pairs((7, 5, 20, 0), torch.float32, DEVICE)
    assert torch.equal(pairs_gpu.pair_scores(rows, table, ids), torch.zeros_like(weights))
    assert pairs_gpu.pair_sums(weights, table, ids).shape == (7, 0)
    assert pairs_gpu.pair_scatter_(table, weights, rows, ids) is table


def test_strided_arguments() -> None:
    """Columns apart, rows apart, and both."""
    rows, table, ids, weights = pairs((6, 4, 30, 3), torch.float32, DEVICE)
    scores = reference.pair_scores(rows, table, ids)
    sums = reference.pair_sums(weights, table, ids)
    scattered = reference.pair_scatter_(torch.zeros_like(table), weights, rows, ids)
    for spread in (lambda x: torch.stack([x, x], -1)[..., 0], lambda x: torch.cat([x, x], -1)[:, : x.shape[1]]):
        s_rows, s_table, s_ids, s_weights = (spread(x) for x in (rows, table, ids, weights))
        assert not any(x.is_contiguous() for x in (s_rows, s_table, s_ids, s_weights))
        torch.testing.assert_close(pairs_gpu.pair_scores(s_rows, s_table, s_ids), scores)
        torch.testing.assert_close(pairs_gpu.pair_sums(s_weights, s_table, s_ids), sums)
        out = spread(torch.zeros_like(table))
        torch.testing.assert_close(pairs_gpu.pair_scatter_(out, s_weights, s_rows, s_ids), scattered)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_rows_outside_the_pairs_are_not_touched() -> None:
    """Nor are those that only pairs of weight zero name."""
    rows, table, ids, weights = pairs((6, 4, 30, 3), torch.float32, DEVICE)
    ids[:, 0] = 7
    weights[ids == 7] = 0
    named = torch.zeros(30, dtype=torch.bool, device=DEVICE)
    named[ids.flatten()] = True
    assert bool((~named).any())
    poisoned = table.clone()
    poisoned[~named] = torch.nan
    assert bool(pairs_gpu.pair_scores(rows, poisoned, ids).isfinite().all())
    assert bool(pairs_gpu.pair_sums(weights, poisoned, ids).isfinite().all())
    named[7] = False
    out = torch.full_like(table, torch.nan)
    out[named] = 0
    pairs_gpu.pair_scatter_(out, weights, rows, ids)
    assert bool(out[named].isfinite().all())
    assert bool(out[~named].isnan().all())
    rows[:] = torch.inf
    assert float(pairs_gpu.pair_scatter_(torch.zeros_like(table), weights, rows, ids)[7].abs().sum()) == 0


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's are not to be called."""
    for name in ("scores", "sums", "scatter_"):
        monkeypatch.delattr(f"nearfield.kernels.pairs_triton.{name}")


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize(("dim", "dtype"), [(5, torch.float64), (257, torch.float32)])
def test_the_reference_serves_the_rest(dim: int, dtype: torch.dtype) -> None:
    rows, table, ids, weights = pairs((6, 4, 30, dim), dtype, DEVICE)
    torch.testing.assert_close(pairs_gpu.pair_scores(rows, table, ids), reference.pair_scores(rows, table, ids))
    torch.testing.assert_close(pairs_gpu.pair_sums(weights, table, ids), reference.pair_sums(weights, table, ids))
    mine, true = (kernel.pair_scatter_(torch.zeros_like(table), weights, rows, ids) for kernel in (pairs_gpu, reference))
    torch.testing.assert_close(mine, true)


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_reference_adds_to_other_dtypes(dtype: torch.dtype) -> None:
    rows, table, ids, weights = pairs((6, 4, 30, 3), torch.bfloat16, DEVICE)
    out = torch.zeros_like(table, dtype=dtype)
    rows, weights = rows.to(dtype), weights.to(dtype)
    assert pairs_gpu.pair_scatter_(out, weights, rows, ids) is out
    torch.testing.assert_close(out, reference.pair_scatter_(torch.zeros_like(out), weights, rows, ids))


@pytest.mark.usefixtures("deterministic", "no_kernels")
def test_the_reference_adds_in_a_fixed_order() -> None:
    rows, table, ids, weights = pairs((6, 4, 30, 3), torch.float32, DEVICE)
    expected = reference.pair_scatter_(torch.zeros_like(table), weights, rows, ids)
    assert torch.equal(pairs_gpu.pair_scatter_(torch.zeros_like(table), weights, rows, ids), expected)


METHODS: dict[str, Any] = {
    "topk": nf.TopK(k=3),
    "tail": nf.TopK(k=3, tail=4),
    "kmeans": nf.TopK(k=3, tail=2, index=nf.KMeansIndex(cells=4, probes=2)),
}


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_same_attention_as_the_reference(method: Any, dropout_p: float) -> None:
    q, k, v = (x.to(DEVICE) for x in inputs(2, 4, queries=20, dim=8, value_dim=6, kv_heads=2))
    mask = torch.rand(2, 1, 1, 20, generator=seeded(1)).to(DEVICE) < 0.7
    upstream = torch.randn(2, 4, 20, 6, generator=seeded(2)).to(DEVICE)

    def run(backend: str) -> tuple[Tensor, ...]:
        output, grads = gradients(
            lambda q, k, v: nf.attention(
                q, k, v, mask, dropout_p, True, enable_gqa=True, method=method, generator=seeded(0), backend=backend
            ),
            (q, k, v),
            upstream,
        )
        return output, *grads

    for mine, true in zip(run("triton"), run("reference"), strict=True):
        torch.testing.assert_close(mine, true, atol=1e-5, rtol=1e-5)


def test_draws_of_the_softmax() -> None:
    """Triton's interpreter is slow: few of them."""
    q, k, v = (x.to(DEVICE) for x in inputs(1, 1, queries=8, dim=8))
    mine, true = (
        nf.estimate(q, k, v, method=nf.LazyGumbel(draws=16), generator=seeded(0), backend=backend)
        for backend in ("triton", "reference")
    )
    torch.testing.assert_close(mine.output, true.output)
    assert (mine.info["backend"], true.info["backend"]) == ("triton", "reference")
    assert mine.stderr is not None
    torch.testing.assert_close(mine.stderr, true.stderr)


def test_what_ran_is_told() -> None:
    q, k, v = (x.to(DEVICE) for x in inputs(1, 1, queries=20, dim=8))
    est = nf.estimate(q, k, v, method=nf.TopK(k=3, tail=2), backend="triton")
    assert est.info["backend"] == "triton"
    assert nf.estimate(q, k, v, method=nf.TopK(k=3), backend="reference").info["backend"] == "reference"


@pytest.mark.parametrize(
    ("dim", "dtype", "what"), [(8, torch.float64, "torch.float64"), (257, torch.float32, "more than 256 columns")]
)
def test_asked_for_by_name_they_serve_or_refuse(dim: int, dtype: torch.dtype, what: str) -> None:
    q, k, v = (x.to(DEVICE) for x in inputs(1, 1, queries=20, dim=dim, dtype=dtype))
    for method in (nf.TopK(k=3), nf.LazyGumbel(draws=4)):
        with pytest.raises(ValueError, match=f"the Triton kernels do not serve {what}; use backend='auto'"):
            nf.attention(q, k, v, method=method, backend="triton")


def test_gathered_rows_count_only_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of rows: ten words per pair, and twice the columns where rows are gathered."""
    from nearfield.knn import topk

    seen: list[int] = []
    plain = topk.row_blocks

    def spy(shape: Any, bytes_per_row: int, on_gpu: bool = False) -> Any:
        seen.append(bytes_per_row)
        return plain(shape, bytes_per_row, on_gpu)

    monkeypatch.setattr(topk, "row_blocks", spy)
    q, k, v = (x.to(DEVICE) for x in inputs(1, 1, queries=20, dim=8))
    for backend, deterministic, words in (("triton", False, 10), ("triton", True, 26), ("reference", False, 26)):
        seen.clear()
        torch.use_deterministic_algorithms(deterministic, warn_only=True)
        try:
            nf.attention(q, k, v, method=nf.TopK(k=3), backend=backend)
        finally:
            torch.use_deterministic_algorithms(False)
        assert seen == [3 * words * 4]
