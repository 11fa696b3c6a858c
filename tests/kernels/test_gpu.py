"""On a CUDA device: the same results as on a CPU, in every precision, and offsets beyond 2^31."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from by_hand import QKV, attention64, gradients, inputs, seeded
from torch import Tensor

import nearfield as nf

pytestmark = pytest.mark.gpu

DETERMINISTIC: dict[str, Any] = {
    "exact": nf.Exact(),
    "topk": nf.TopK(k=8),
    "everything-near": nf.TopK(k=1000),
    "covering-tail": nf.TopK(k=8, tail=1000),
    "kmeans-all-probes": nf.TopK(k=8, index=nf.KMeansIndex(cells=4, probes=4)),
}
"""Methods without chance, and with indices that find the true top k on any device."""

RANDOM: dict[str, Any] = {
    "tail": nf.TopK(k=8, tail=8),
    "kmeans": nf.TopK(k=8, tail=8, index=nf.KMeansIndex(cells=8, probes=2)),
    "lsh": nf.TopK(k=8, tail=8, index=nf.ConcentricLSH()),
    "gumbel": nf.LazyGumbel(draws=64),
}


def on_device(tensors: QKV) -> QKV:
    q, k, v = (x.cuda() for x in tensors)
    return q, k, v


def options(name: str) -> dict[str, Any]:
    mask = torch.rand(2, 1, 1, 60, generator=seeded(1)) < 0.7
    return {
        "plain": {},
        "causal": {"is_causal": True},
        "padded": {"attn_mask": mask},
        "padded-causal": {"attn_mask": mask, "is_causal": True},
        "negative-scale": {"scale": -0.4, "is_causal": True},
    }[name]


def to_device(keywords: dict[str, Any]) -> dict[str, Any]:
    return {name: x.cuda() if isinstance(x, Tensor) else x for name, x in keywords.items()}


@pytest.mark.parametrize("name", ["plain", "causal", "padded", "padded-causal", "negative-scale"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("method", DETERMINISTIC.values(), ids=DETERMINISTIC)
def test_agrees_with_the_cpu(method: Any, dtype: torch.dtype, name: str) -> None:
    tensors = inputs(2, 4, queries=60, dim=16, kv_heads=2, dtype=dtype)
    upstream = torch.randn(2, 4, 60, 16, generator=seeded(2), dtype=dtype)
    here = options(name)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keywords = to_device(here) if q.is_cuda else here
        return nf.attention(q, k, v, **keywords, enable_gqa=True, method=method, generator=seeded(0))

    expected, expected_grads = gradients(run, tensors, upstream)
    got, got_grads = gradients(run, on_device(tensors), upstream.cuda())
    assert got.is_cuda
    # 60 terms of order 1: some hundred roundings. torch's float32 products on a GPU are full float32 unless TF32 is asked for.
    tolerance = 1e-10 if dtype == torch.float64 else 2e-5
    torch.testing.assert_close(got.cpu(), expected, atol=tolerance, rtol=tolerance)
    for x, y in zip(got_grads, expected_grads, strict=True):
        torch.testing.assert_close(x.cpu(), y, atol=5 * tolerance, rtol=5 * tolerance)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 17, 257, 1024])
def test_half_precision(length: int, dtype: torch.dtype, causal: bool) -> None:
    """Everything near: within 2x (gradients 3x) of the error of torch's own attention in the same dtype."""
    tensors = on_device(inputs(1, 4, queries=length, dim=64, kv_heads=2, dtype=dtype))
    upstream = torch.randn(1, 4, length, 64, generator=seeded(2)).to("cuda", dtype)
    repeat = 2

    def true(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        logits = q @ k.mT / 8
        if causal:
            logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -torch.inf)
        return logits.softmax(-1) @ v

    wide = (tensors[0].double(), tensors[1].double(), tensors[2].double())
    exact, exact_grads = gradients(true, wide, upstream)
    plain, plain_grads = gradients(
        lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True),
        tensors,
        upstream,
    )
    for method in (nf.Exact(), nf.TopK(k=length), nf.TopK(k=max(1, length // 2), tail=length)):
        got, grads = gradients(
            lambda q, k, v, method=method: nf.attention(
                q, k, v, is_causal=causal, enable_gqa=True, method=method, generator=seeded(0)
            ),
            tensors,
            upstream,
        )
        assert got.dtype == dtype
        for factor, x, y, z in ((2, got, plain, exact), *((3, *g) for g in zip(grads, plain_grads, exact_grads, strict=True))):
            assert float((x.double() - z).abs().max()) <= factor * float((y.double() - z).abs().max()) + 1e-5


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("method", RANDOM.values(), ids=RANDOM)
def test_random_methods_follow_the_generator(method: Any, device: str) -> None:
    """A generator of either device will do; the same state gives the same result, and the global ones are not used."""
    tensors = on_device(inputs(2, 4, queries=60, dim=16, kv_heads=2))
    upstream = torch.ones(2, 4, 60, 16, device="cuda")

    def run(seed: int) -> tuple[Tensor, QKV]:
        generator = torch.Generator(device).manual_seed(seed)
        return gradients(
            lambda q, k, v: nf.attention(q, k, v, is_causal=True, enable_gqa=True, method=method, generator=generator),
            tensors,
            upstream,
        )

    before = torch.get_rng_state(), torch.cuda.get_rng_state()
    first, again, other = run(0), run(0), run(1)
    assert torch.equal(before[0], torch.get_rng_state())
    assert torch.equal(before[1], torch.cuda.get_rng_state())
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], other[0])
    for x, y in zip(first[1], again[1], strict=True):
        # Gradients are summed by atomic additions on a GPU: the same numbers in any order.
        torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", RANDOM.values(), ids=RANDOM)
def test_random_methods_are_within_their_error(method: Any) -> None:
    tensors = inputs(1, 2, queries=200, dim=16)
    est = nf.estimate(*on_device(tensors), is_causal=True, method=method, generator=seeded(0), audit=400)
    expected = attention64(*tensors, causal=True)
    off = (est.output.cpu().double() - expected).norm(dim=-1)
    assert est.stderr is not None
    assert est.audit is not None
    unit = tensors[2].double().square().sum(-1).mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(est.audit.additive_errors.cpu().double(), (off / unit).flatten(), atol=1e-4, rtol=1e-3)
    # Half of 400 rows within twice their standard error is far below what calibration gives, and far above a wrong weight.
    rows = off > 1e-5
    assert float((off < 2 * est.stderr.cpu().double())[rows].double().mean()) > 0.5


@pytest.mark.parametrize("method", [nf.Exact(), nf.TopK(k=8), nf.TopK(k=8, tail=8)], ids=["exact", "topk", "tail"])
def test_dropout(method: Any) -> None:
    q, k, v = on_device(inputs(1, 4, queries=60, dim=16))
    ones = torch.ones_like(v[..., :1]).expand_as(v).contiguous()
    before = torch.get_rng_state(), torch.cuda.get_rng_state()
    first, again = (nf.attention(q, k, ones, dropout_p=0.5, method=method, generator=seeded(0)) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(before[0], torch.get_rng_state())
    assert torch.equal(before[1], torch.cuda.get_rng_state())
    assert bool(((first - 1).abs() > 1e-3).any())
    assert float(first.mean()) == pytest.approx(1.0, abs=0.2)
    free, other = (nf.attention(q, k, ones, dropout_p=0.5, method=method) for _ in range(2))
    assert not torch.equal(free, other)


def test_cpu_dropout_leaves_the_cuda_generator_alone() -> None:
    torch.cuda.manual_seed(3)
    before = torch.cuda.get_rng_state()
    nf.attention(*inputs(1, 2, queries=10), dropout_p=0.5, generator=seeded(0))
    assert torch.equal(torch.cuda.get_rng_state(), before)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_device_mismatch(which: int) -> None:
    tensors = list(inputs(1, 2, queries=10))
    tensors[which] = tensors[which].cuda()
    for method in (nf.Exact(), nf.TopK(k=2)):
        with pytest.raises(ValueError, match=r"must be on the same device, got (cpu and cuda:0|cuda:0 and cpu)"):
            nf.attention(*tensors, method=method)


def test_mask_on_another_device() -> None:
    with pytest.raises(ValueError, match="query and attn_mask must be on the same device, got cuda:0 and cpu"):
        nf.attention(*on_device(inputs(1, 2, queries=10)), torch.ones(10, dtype=torch.bool))


def test_cpu_kernels_refuse_cuda_tensors() -> None:
    with pytest.raises(ValueError, match="backend='cpu' needs CPU tensors, got cuda:0"):
        nf.attention(*on_device(inputs(1, 2, queries=10)), method=nf.TopK(k=2), backend="cpu")


def test_bad_query_row() -> None:
    q, k, v = on_device(inputs(1, 2, queries=20, dim=8))
    expected = nf.attention(q, k, v, is_causal=True, method=nf.TopK(k=4))
    q[0, 1, 7] = float("nan")
    got = nf.attention(q, k, v, is_causal=True, method=nf.TopK(k=4))
    assert bool(got[0, 1, 7].isnan().all())
    got[0, 1, 7] = expected[0, 1, 7]
    assert torch.equal(got, expected)


def needs_memory(gigabytes: float) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < gigabytes * 2**30:
        pytest.skip(f"needs {gigabytes} GiB of free device memory, has {free / 2**30:.0f}")


def sentinel_problem(batch: int, length: int, dim: int, sentinels: list[tuple[int, int]]) -> QKV:
    """All keys and values zero but for the sentinels (batch entry, key): sentinel i has a key along axis i and the value
    i + 1 there, and query i of its entry looks for it."""
    key = torch.zeros(batch, 1, length, dim, dtype=torch.bfloat16, device="cuda")
    value = torch.zeros(batch, 1, length, dim, dtype=torch.bfloat16, device="cuda")
    query = torch.zeros(batch, 1, len(sentinels), dim, dtype=torch.bfloat16, device="cuda")
    for i, (entry, position) in enumerate(sentinels):
        # Logits of 64 * 32 = 2048 for the sentinel and 0 for every other key, whose weight is exp(-2048) = 0.
        query[entry, 0, i, i], key[entry, 0, position, i], value[entry, 0, position, i] = 64.0, 32.0, i + 1.0
    return query, key, value


def assert_sentinels_found(output: Tensor, sentinels: list[tuple[int, int]]) -> None:
    for i, (entry, position) in enumerate(sentinels):
        expected = torch.zeros(output.shape[-1])
        expected[i] = i + 1.0
        assert torch.equal(output[entry, 0, i].float().cpu(), expected), f"sentinel {i} at {entry}, {position}"


BEYOND = 2**25 + 5
"""So many keys of 64 dimensions are 2^31 + 320 numbers: the last five rows lie beyond what an int32 offset can reach."""


@pytest.mark.parametrize("tail", [0, 2])
def test_one_table_beyond_int32(tail: int) -> None:
    needs_memory(60)
    places = [0, 1, BEYOND // 2, 2**25 - 1, 2**25, 2**25 + 1, BEYOND - 2, BEYOND - 1]
    sentinels = [(0, place) for place in places]
    tensors = sentinel_problem(1, BEYOND, 64, sentinels)
    assert_sentinels_found(nf.attention(*tensors, scale=1.0, method=nf.TopK(k=1, tail=tail), generator=seeded(0)), sentinels)


def test_many_entries_beyond_int32() -> None:
    """The places of all entries laid end to end pass 2^31 numbers, and sentinels sit in the first and in the last entry."""
    needs_memory(60)
    batch, length = 64, 2**19 + 3
    assert batch * length * 64 > 2**31
    sentinels = [(0, 0), (0, length - 1), (31, 7), (63, 0), (63, length - 2), (63, length - 1)]
    tensors = sentinel_problem(batch, length, 64, sentinels)
    assert_sentinels_found(nf.attention(*tensors, scale=1.0, method=nf.TopK(k=1)), sentinels)


def test_gradients_beyond_int32() -> None:
    """The value of the last key gets the gradient of the query that found it, and no other value any."""
    needs_memory(90)
    query, key, value = sentinel_problem(1, BEYOND, 64, [(0, 3), (0, 2**25 + 2), (0, BEYOND - 1)])
    value.requires_grad_()
    output = nf.attention(query, key, value, scale=1.0, method=nf.TopK(k=1))
    upstream = torch.arange(1, 4, device="cuda", dtype=torch.bfloat16)[:, None].expand(1, 1, 3, 64)
    (grad,) = torch.autograd.grad(output, value, upstream)
    rows = grad[0, 0].abs().amax(-1).float()
    assert rows.nonzero().flatten().tolist() == [3, 2**25 + 2, BEYOND - 1]
    for place, size in ((3, 1.0), (2**25 + 2, 2.0), (BEYOND - 1, 3.0)):
        assert bool((grad[0, 0, place] == size).all())
