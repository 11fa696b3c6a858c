"""Cells on a CUDA device, through the public API: which kernels serve a call, what they promise, and what is around a call."""

from __future__ import annotations

import gc
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from by_hand import QKV, gradients, inputs, seeded
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import nearfield as nf
from nearfield.cells.sizes import LEAST_QUERIES
from nearfield.synthetic import make

pytestmark = pytest.mark.gpu

# cuBLAS is deterministic only with this, and torch looks for it once, before the first product.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

DEVICE = "cuda"
BF16 = torch.bfloat16
EPS = torch.finfo(BF16).eps
SEGMENT = 256
FEW = nf.Cells(cell_size=16, probes=8, segment=SEGMENT)
ALL = nf.Cells(cell_size=16, probes=160, segment=SEGMENT)
"""Opens all the cells of up to 2,560 keys: exact attention, but for rounding."""


def tensors(
    length: int = 2048,
    batch: int = 1,
    heads: int = 4,
    kv_heads: int | None = None,
    keys: int | None = None,
    value_dim: int | None = None,
    dtype: torch.dtype = BF16,
    seed: int = 0,
) -> QKV:
    q, k, v = inputs(
        batch, heads, queries=length, keys=keys, dim=64, value_dim=value_dim, kv_heads=kv_heads, seed=seed, dtype=dtype
    )
    return q.to(DEVICE), k.to(DEVICE), v.to(DEVICE)


def normal(*shape: int, seed: int = 9, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, generator=seeded(seed)).to(DEVICE, dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, method: Any = FEW, **options: Any) -> Tensor:
    return nf.attention(q, k, v, enable_gqa=True, method=method, **options)


def exact(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """In float64, for which torch has but plain products and a softmax."""
    q, k, v = q.double(), k.double(), v.double()
    return F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal, enable_gqa=True)


def off(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def tolerance(dtype: torch.dtype) -> float:
    """Of `off`, all opened. Weights (or slopes), parts and results are rounded to the dtype and all else is float32: 0.3 eps for
    outputs and 0.4 for gradients, by the same steps in float64."""
    return max(torch.finfo(dtype).eps, 1e-5)


def leaves(*values: Tensor) -> list[Tensor]:
    """Gradients on, in the memory and with the strides that they have."""
    return [x.detach().requires_grad_() for x in values]


def call(values: tuple[Tensor, ...] | list[Tensor], upstream: Tensor, **options: Any) -> list[Tensor]:
    """Output and gradients."""
    q, k, v = leaves(*values)
    output = attend(q, k, v, **options)
    return [output.detach(), *torch.autograd.grad(output, (q, k, v), upstream)]


def assert_same(found: Any, expected: Any) -> None:
    """Bit by bit, and something to compare."""
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)
        assert bool(x.isfinite().all())
        assert bool(x.any())


# Which kernels serve a call


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=["bfloat16", "float16", "float32"])
def test_the_triton_kernels_are_chosen(dtype: torch.dtype) -> None:
    q, k, v = tensors(dtype=dtype)
    est = nf.estimate(q, k, v, method=ALL)
    assert est.info["backend"] == "triton"
    assert est.output.dtype == dtype
    assert off(est.output, exact(q, k, v)) <= tolerance(dtype)
    lse = (q.double() @ k.double().mT / 8).logsumexp(-1)
    # Sums of float32, whatever the inputs are.
    torch.testing.assert_close(est.lse.double(), lse, atol=1e-4, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("dtype", "method", "bound"),
    [
        (torch.float64, ALL, 1e-10),
        (BF16, nf.Cells(cell_size=16, probes=160, segment=SEGMENT, partition=nf.Blocks()), EPS),
        (torch.float32, nf.Cells(cell_size=16, probes=160, segment=SEGMENT, samples=2), 1e-5),
    ],
    ids=["float64", "blocks", "samples"],
)
def test_other_kernels_serve_the_rest(dtype: torch.dtype, method: Any, bound: float, causal: bool) -> None:
    q, k, v = tensors(600, dtype=dtype)
    est = nf.estimate(q, k, v, is_causal=causal, method=method, generator=seeded(0))
    assert est.info["backend"] == "reference"
    assert est.output.dtype == dtype
    assert off(est.output, exact(q, k, v, is_causal=causal)) <= bound
    with pytest.raises(ValueError, match="the Triton kernels do not serve"):
        nf.attention(q, k, v, is_causal=causal, method=method, backend="triton")


def test_dropout_is_served() -> None:
    q, k, v = tensors(600)
    est = nf.estimate(q, k, torch.ones_like(v), dropout_p=0.5, method=ALL, generator=seeded(0))
    assert est.info["backend"] == "reference"
    # Sums of 600 weights, each dropped or doubled: a standard deviation of sqrt(sum of squares), about sqrt(e / 600) = 0.07.
    rows = est.output[..., 0].float()
    assert 0.03 < float(rows.std()) < 0.15
    # The mean of 2,400 rows has one of 0.0014.
    assert float(rows.mean()) == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("causal", [False, True])
def test_as_accurate_as_the_reference(causal: bool) -> None:
    """Another plan, as k-means is done another way, but not a worse one."""
    q, k, v = (x.to(DEVICE) for x in make("clustered", 1, 2, 2048, 64, dtype=BF16))
    true = exact(q, k, v, is_causal=causal)
    found, reference = (off(attend(q, k, v, is_causal=causal, backend=name), true) for name in ("auto", "reference"))
    assert 0 < found <= 2 * reference + EPS


@pytest.mark.parametrize("causal", [False, True])
def test_audit(causal: bool) -> None:
    q, k, v = (x.to(DEVICE) for x in make("clustered", 1, 2, 2048, 64, dtype=BF16))
    est = nf.estimate(q, k, v, is_causal=causal, method=FEW, audit=4096)
    assert est.info["backend"] == "triton"
    assert est.audit is not None
    assert est.audit.rows == 4096
    error = (est.output.double() - exact(q, k, v, is_causal=causal)).norm(dim=-1)
    unit = v.double().square().sum(-1).mean(-1, keepdim=True).sqrt()
    # Audits are float32: their exact rows are within 1e-6 of these.
    torch.testing.assert_close(est.audit.additive_errors.double(), (error / unit).flatten(), atol=1e-5, rtol=1e-3)
    assert 0 < est.audit.additive < 0.3  # the worst of all rows; other cells than on a CPU (0.04)
    assert float(est.audit.additive_errors.mean()) < 0.01
    some = nf.estimate(q, k, v, is_causal=causal, method=FEW, audit=59, generator=seeded(1)).audit
    assert some is not None
    assert 0 < some.additive <= est.audit.additive


# Nobody waits


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def problem(name: str) -> tuple[QKV, dict[str, Any]]:
    lengths = torch.tensor([2000, 1500], device=DEVICE)[:, None, None, None]
    mask = torch.arange(2048, device=DEVICE) < lengths
    mask[:, :, :, 7] = False
    problems: dict[str, tuple[QKV, dict[str, Any]]] = {
        "plain": (tensors(batch=2, heads=2), {}),
        "causal": (tensors(batch=2, heads=2), {"is_causal": True}),
        "grouped": (tensors(batch=2, heads=4, kv_heads=2), {"is_causal": True}),
        "padded": (tensors(batch=2, heads=2), {"attn_mask": mask}),
        "padded-causal": (tensors(batch=2, heads=2), {"attn_mask": mask, "is_causal": True}),
    }
    return problems[name]


@pytest.mark.parametrize("name", ["plain", "causal", "grouped", "padded", "padded-causal"])
@pytest.mark.parametrize("method", [FEW, None], ids=["cells", "auto"])
def test_no_call_waits_for_the_device(method: Any, name: str) -> None:
    values, options = problem(name)
    upstream = torch.ones_like(values[0])
    expected = call(values, upstream, method=method, **options)
    with no_waiting():
        found = call(values, upstream, method=method, **options)
        with pytest.raises(RuntimeError, match="synchroniz"):
            upstream.sum().item()
    assert torch.equal(found[0], expected[0])
    assert all(bool(x.isfinite().all()) and bool(x.any()) for x in found)


@pytest.mark.parametrize("name", ["padded", "padded-causal"])
def test_padding(name: str) -> None:
    """Hidden keys are as good as gone, whatever they hold."""
    (q, k, v), options = problem(name)
    mask = options["attn_mask"]
    hidden = ~mask[:, :, 0, :, None]
    output = attend(q, k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.nan), **options)
    assert torch.equal(output, attend(q, k, v, **options))
    every = attend(q, k, v, method=ALL, **options)
    if "is_causal" in options:
        mask = mask & torch.ones(2048, 2048, dtype=torch.bool, device=DEVICE).tril()
    assert off(every, exact(q, k, v, mask)) <= tolerance(BF16)


# Graphs, programs, and what else is around a call


def captured(function: Callable[[], Any]) -> tuple[Any, Any]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = function()
    return graph, found


@pytest.mark.parametrize("share", [1, 64])
@pytest.mark.parametrize("causal", [False, True])
def test_captured_forward(causal: bool, share: int) -> None:
    static, method = tensors(), replace(FEW, share=share)
    graph, output = captured(lambda: attend(*static, method, is_causal=causal))
    for seed in (1, 2):
        fresh = tensors(seed=seed)
        for x, y in zip(static, fresh, strict=True):
            x.copy_(y)
        output.fill_(torch.nan)
        graph.replay()
        assert_same([output], [attend(*fresh, method, is_causal=causal)])


def test_a_captured_graph_keeps_what_it_reads() -> None:
    """Tables are made once per shape and forgotten after 64 others, but not those that a graph reads."""
    static = tensors()
    graph, output = captured(lambda: attend(*static, is_causal=True))
    expected = attend(*static, is_causal=True)
    for length in range(784, 784 + 70 * 16, 16):
        q, k, v = (x[:, :, :length] for x in static)
        attend(q, k, v, is_causal=True)
    gc.collect()
    kept = [torch.full((1 << size,), torch.nan, device=DEVICE) for size in range(8, 24)]
    output.fill_(torch.nan)
    graph.replay()
    assert_same([output], [expected])
    assert all(bool(x.isnan().all()) for x in kept)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("causal", [False, True])
def test_captured_backward(causal: bool) -> None:
    static = [*tensors(), normal(1, 4, 2048, 64)]
    graph, found = captured(lambda: call(static[:3], static[3], is_causal=causal))
    fresh = [*tensors(seed=1), normal(1, 4, 2048, 64, seed=8)]
    for x, y in zip(static, fresh, strict=True):
        x.copy_(y)
    for x in found:
        x.fill_(torch.nan)
    graph.replay()
    assert_same(found, call(fresh[:3], fresh[3], is_causal=causal))


class Layer(nn.Module):
    """Attention on heads as a projection would leave them, and a projection after it."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.projection = nn.Linear(128, 128, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # No arithmetic before the call: a rounding there might give a key another cell.
        q, k, v = x.unflatten(-1, (3, 2, 64)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.projection(attend(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_compiled_equals_eager(causal: bool, dynamic: bool) -> None:
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("the default backend of torch.compile needs a C++ compiler")
    torch.manual_seed(0)
    layer = Layer(causal).to(DEVICE, BF16)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic)
    for length in (2048, 1280) if dynamic else (2048,):
        upstream = normal(2, length, 128)

        def run(function: Callable[[Tensor], Tensor], length: int = length, upstream: Tensor = upstream) -> list[Tensor]:
            (x,) = leaves(normal(2, length, 384, seed=1))
            output = function(x)
            return [output.detach(), *torch.autograd.grad(output, (x, layer.projection.weight), upstream)]

        for found, expected in zip(run(compiled), run(layer), strict=True):
            assert found.dtype == expected.dtype
            # The same sums in another order: some numbers are rounded the other way.
            assert off(found, expected) <= EPS / 4


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("causal", [False, True])
def test_autocast(causal: bool) -> None:
    values = tensors(dtype=torch.float32)
    narrow = [x.to(BF16) for x in values]
    upstream = normal(1, 4, 2048, 64)
    expected = call(narrow, upstream, is_causal=causal)
    q, k, v = leaves(*values)
    with torch.autocast("cuda", dtype=BF16):
        output = attend(q, k, v, is_causal=causal)
        inside = torch.autograd.grad(output, (q, k, v), upstream, retain_graph=True)
    outside = torch.autograd.grad(output, (q, k, v), upstream)
    assert output.dtype == BF16
    assert all(x.dtype == torch.float32 for x in inside)
    assert_same([output, *inside], [expected[0], *(x.float() for x in expected[1:])])
    assert_same(outside, inside)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("causal", [False, True])
def test_checkpoint(causal: bool) -> None:
    upstream = normal(1, 4, 2048, 64)
    expected = call(tensors(), upstream, is_causal=causal)
    runs: list[int] = []

    def function(*values: Tensor) -> Tensor:
        runs.append(1)
        return attend(*values, is_causal=causal)

    values = leaves(*tensors())
    output = checkpoint(function, *values, use_reentrant=False)
    assert_same([output.detach(), *torch.autograd.grad(output, values, upstream)], expected)
    assert len(runs) == 2


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("causal", [False, True])
def test_another_stream(causal: bool) -> None:
    """Inputs come late on that stream: whatever ran on another one would not have seen them."""
    fresh = [*tensors(), normal(1, 4, 2048, 64)]
    expected = call(fresh[:3], fresh[3], is_causal=causal)
    late = [torch.full_like(x, torch.nan) for x in fresh]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # cycles: about a tenth of a second
        for x, y in zip(late, fresh, strict=True):
            x.copy_(y)
        found = call(late[:3], late[3], is_causal=causal)
    torch.cuda.current_stream().wait_stream(side)
    assert_same(found, expected)


def test_what_one_stream_keeps_serves_another() -> None:
    """Tables are kept from call to call: a call must not find one that another stream has not filled in yet."""
    values = tensors(2032, heads=7)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        attend(*tensors(2032, heads=6))  # all but what depends on the number of heads
        zeros = [torch.zeros(4096, device=DEVICE) for _ in range(512)]
        del zeros  # memory that is given out next: an unfilled table would be all zero
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)
        attend(*values)
    found = attend(*values)
    torch.cuda.synchronize()
    assert_same([found], [attend(*values)])


@pytest.mark.usefixtures("deterministic")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_another_device() -> None:
    values = [*tensors(), normal(1, 4, 2048, 64)]
    expected = call(values[:3], values[3], is_causal=True)
    there = [x.to("cuda:1") for x in values]
    assert torch.cuda.current_device() == 0
    found = call(there[:3], there[3], is_causal=True)
    assert all(x.device == torch.device("cuda:1") for x in found)
    assert_same([x.cpu() for x in found], [x.cpu() for x in expected])


@pytest.mark.parametrize("share", [1, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_the_output_is_the_same_every_time(causal: bool, share: int) -> None:
    values = tensors(4096)
    outputs = [attend(*values, replace(FEW, share=share), is_causal=causal) for _ in range(4)]
    assert_same(outputs[1:], outputs[:1] * 3)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", ["causal", "grouped", "plain"])
def test_gradients_are_the_same_every_time_when_asked(name: str) -> None:
    """4,096 keys in segments of 256: spans of 1, 2, 4 and 8 segments, so that a key gets its gradient from four cells."""
    values = tensors(4096, kv_heads=2 if name == "grouped" else None)
    upstream, causal = normal(1, 4, 4096, 64), name != "plain"
    first = call(values, upstream, is_causal=causal)
    for _ in range(3):
        assert_same(call(values, upstream, is_causal=causal), first)
    torch.use_deterministic_algorithms(False)
    for found, expected in zip(call(values, upstream, is_causal=causal), first, strict=True):
        # float32 sums in another order.
        assert off(found, expected) <= EPS / 4


# The future, and what is not finite: 1,000 positions of two query heads per key head, so that the last rows of one head
# and the first of the next are served together


def grouped() -> QKV:
    return tensors(1000, heads=4, kv_heads=2)


CHANGES = {"noise": 1.0, "large": 1e4, "huge": 3e36, "zero": 0.0, "nan": math.nan, "inf": math.inf}
PLACES = [1, SEGMENT + 44, 2 * SEGMENT, 2 * SEGMENT + 64, 3 * SEGMENT - 1, 999]
"""The first row, the middle of a segment, the edge of one, the edge of a block of rows, the end of a segment, the last row."""


@pytest.mark.parametrize("share", [1, 64])
@pytest.mark.parametrize("change", CHANGES)
def test_the_future_has_no_influence_on_any_bit(change: str, share: int) -> None:
    """Where rows open cells together, nothing after their block has."""
    values = grouped()

    def run(q: Tensor, k: Tensor, v: Tensor) -> nf.Estimate:
        return nf.estimate(q, k, v, is_causal=True, enable_gqa=True, method=replace(FEW, share=share))

    before = run(*values)
    assert bool(before.output.isfinite().all())
    for start in [place // share * share for place in PLACES if place >= share]:
        for which in ("q", "k", "v", "qkv"):
            changed = [x.clone() for x in values]
            for letter, x in zip("qkv", changed, strict=True):
                if letter in which:
                    # The square of a query has to be finite.
                    size = min(CHANGES[change], 1e18) if letter == "q" and change == "huge" else CHANGES[change]
                    later = x[:, :, start:]
                    later.copy_(size * normal(*later.shape, seed=start, dtype=torch.float32))
            after = run(changed[0], changed[1], changed[2])
            for x, y in ((after.output, before.output), (after.lse, before.lse)):
                assert torch.equal(x[:, :, :start], y[:, :, :start]), f"{which} from {start} on"
            assert not torch.equal(after.output, before.output)


@pytest.mark.parametrize("start", PLACES)
def test_a_row_has_no_gradient_for_what_follows(start: int) -> None:
    upstream = normal(1, 4, 1000, 64)
    upstream[:, :, start:] = 0.0
    for x in call(grouped(), upstream, is_causal=True)[1:]:
        assert not bool(x[:, :, start:].any())
    _, *grads = call(grouped(), upstream, is_causal=True, method=ALL)
    q, k, v = leaves(*grouped())
    for x, y in zip(grads, torch.autograd.grad(exact(q, k, v, is_causal=True), (q, k, v), upstream.double()), strict=True):
        # One row sees one key alone: the gradients of both are zero but for rounding.
        assert float((x.double() - y.double()).norm()) <= 2 * EPS * max(1.0, float(y.double().norm()))


def assert_spoiled(after: Tensor, before: Tensor, rows: Tensor, whole: bool = True) -> None:
    """NaN in these rows (all their columns, if `whole`), and every other bit as it was."""
    bad = after.isnan()
    assert torch.equal(bad.any(-1), rows)
    assert not whole or bool(bad[rows].all())
    assert torch.equal(after[~rows], before[~rows])
    assert bool(rows.any())
    assert not bool(rows.all())


@pytest.mark.parametrize("share", [1, 64])
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "one-number"])
@pytest.mark.parametrize("which", ["key", "value"])
def test_rows_that_see_a_nan_are_nan_and_no_others(which: str, whole: bool, share: int) -> None:
    method = replace(FEW, share=share)
    columns = slice(None) if whole else slice(7, 8)
    for position in (3, SEGMENT - 1, SEGMENT, 2 * SEGMENT + 70, 999):
        for causal in (True, False):
            q, k, v = grouped()
            before = attend(q, k, v, method, is_causal=causal)
            (k if which == "key" else v)[0, 1, position, columns] = torch.nan
            seen = torch.zeros(1, 4, 1000, dtype=torch.bool, device=DEVICE)
            seen[:, 2:, position if causal else 0 :] = True
            # One NaN in a value is in one column of an exact sum.
            assert_spoiled(attend(q, k, v, method, is_causal=causal), before, seen, whole or which == "key")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("causal", [False, True])
def test_a_query_that_is_not_finite_spoils_its_own_row_at_most(causal: bool, bad: float) -> None:
    q, k, v = grouped()
    together = replace(FEW, share=64)
    before, before_shared = attend(q, k, v, is_causal=causal), attend(q, k, v, together, is_causal=causal)
    rows = torch.zeros(1, 4, 1000, dtype=torch.bool, device=DEVICE)
    for head, position in ((0, 999), (1, 0), (2, 300), (3, SEGMENT)):
        rows[0, head, position] = True
    q[rows] = bad
    after = attend(q, k, v, is_causal=causal)
    if math.isnan(bad):
        assert_spoiled(after, before, rows)
    assert torch.equal(after[~rows], before[~rows])
    # Where rows open cells together, the others of a block may get other cells, and none is spoiled. Without a mask a row that
    # goes elsewhere moves others from block to block.
    shared = attend(q, k, v, together, is_causal=causal)
    assert bool(shared[~rows].isfinite().all())
    if causal:
        block = torch.arange(1000, device=DEVICE) // 64
        near = (rows[..., None] & (block[:, None] == block)).any(-2)
        assert torch.equal(shared[~near], before_shared[~near])
    else:
        assert off(shared[~rows], before_shared[~rows]) <= 0.5


@pytest.mark.parametrize("causal", [False, True])
def test_rows_open_cells_together_where_they_are_told_to_or_may(causal: bool) -> None:
    q, k, v = tensors()
    assert q.shape[2] >= LEAST_QUERIES
    for method, share in ((nf.Cells(), 1 if causal else 128), (FEW, 1), (nf.Cells(share=1), 1), (nf.Cells(share=64), 64)):
        est = nf.estimate(q, k, v, is_causal=causal, method=method)
        assert est.info["share"] == share
        assert est.info["backend"] == "triton"
        sizes = {name: est.info[name] for name in ("cell_size", "probes", "share")}
        segment = {"segment": est.info["segment"]} if causal else {}
        assert torch.equal(est.output, attend(q, k, v, nf.Cells(**sizes, **segment), is_causal=causal))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("causal", [False, True])
def test_a_bad_key_that_kmeans_did_not_look_at(causal: bool, bad: float) -> None:
    """Cells of 64 are made from a quarter of the keys, and a span has fewer of them than kernels look at together."""
    segment, length = 1024, 4096 if causal else 2048
    method = nf.Cells(cell_size=64, probes=8, segment=segment)
    q, k, v = tensors(length, heads=8)
    before = attend(q, k, v, method=method, is_causal=causal)
    sees = torch.zeros(1, 8, length, dtype=torch.bool, device=DEVICE)
    through_cells = sees.clone()
    for head, position in ((0, 2600), (2, 2700), (4, 2901), (6, 3003)):
        position = position if causal else position - 2 * segment
        k[0, head, position, 5] = bad
        sees[0, head, position if causal else 0 :] = True
        through_cells[0, head, 3 * segment if causal else 0 :] = True
    after = attend(q, k, v, method=method, is_causal=causal)
    assert torch.equal(after[~sees], before[~sees])
    assert bool(after[through_cells].isnan().all())


# Layouts


def laid_out(x: Tensor, kind: str) -> Tensor:
    """The same numbers with other strides, and NaN in between."""
    if kind == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "packed":
        heads_last = x.transpose(1, 2)
        nothing = torch.full_like(heads_last, torch.nan)
        return torch.stack([nothing, heads_last, nothing], 2)[:, :, 1].transpose(1, 2)
    return torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("kind", ["transposed", "packed", "strided-columns"])
@pytest.mark.parametrize(("batch", "causal"), [(1, False), (1, True), (2, True)])
def test_strides_do_not_matter(batch: int, causal: bool, kind: str) -> None:
    values = [*tensors(batch=batch), normal(batch, 4, 2048, 64)]
    other = [laid_out(x, kind) for x in values]
    assert not any(x.is_contiguous() for x in other)
    found = call(other[:3], other[3], is_causal=causal)
    assert_same(found, call(values[:3], values[3], is_causal=causal))


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("causal", [False, True])
def test_expanded_tensors(causal: bool) -> None:
    q, k, v = tensors()
    k, v = (x[:, :1].expand(-1, 4, -1, -1) for x in (k, v))
    row = normal(64)
    for upstream in (torch.ones((), device=DEVICE, dtype=BF16).expand(1, 4, 2048, 64), row.expand(1, 4, 2048, 64)):
        found = call((q, k, v), upstream, is_causal=causal)
        assert_same(found, call((q, k.contiguous(), v.contiguous()), upstream.contiguous(), is_causal=causal))
    q, k, v = leaves(*tensors())
    attend(q, k, v, is_causal=causal).sum().backward()
    assert_same((q.grad, k.grad, v.grad), call(tensors(), torch.ones_like(q), is_causal=causal)[1:])


# Shapes and inputs at the edge

EDGES: dict[str, dict[str, Any]] = {
    "one-query": {"length": 1, "keys": 600},
    "odd": {"length": 1237},
    "odd-causal": {"length": 1237, "causal": True},
    "less-than-a-segment": {"length": 100, "causal": True},
    "one-more-than-a-segment": {"length": SEGMENT + 1, "causal": True},
    "fewer-queries": {"length": 300, "keys": 1000},
    "fewer-queries-causal": {"length": 300, "keys": 1000, "causal": True},
    "fewer-keys": {"length": 1000, "keys": 300},
    "fewer-keys-causal": {"length": 1000, "keys": 300, "causal": True},
    "batch-of-groups": {"length": 600, "batch": 3, "heads": 8, "kv_heads": 2},
    "batch-of-groups-causal": {"length": 600, "batch": 3, "heads": 8, "kv_heads": 2, "causal": True},
    "narrow-values": {"length": 600, "value_dim": 32, "causal": True},
}


@pytest.mark.parametrize("name", EDGES)
def test_shapes(name: str) -> None:
    """All opened: exact attention and its gradients."""
    shape = dict(EDGES[name])
    causal = shape.pop("causal", False)
    values = tensors(**shape)
    upstream = normal(*values[0].shape[:3], values[2].shape[3])
    output, *grads = call(values, upstream, method=ALL, is_causal=causal)
    true, true_grads = gradients(lambda q, k, v: exact(q, k, v, is_causal=causal), values, upstream)
    assert output.dtype == BF16
    assert off(output, true) <= tolerance(BF16)
    for found, expected in zip(grads, true_grads, strict=True):
        assert found.dtype == BF16
        assert off(found, expected) <= tolerance(BF16)


def degenerate(name: str) -> QKV:
    q, k, v = tensors(1200, keys=1 if name == "one-key" else None)
    if name == "identical-keys":
        k = k[:, :, :1].repeat(1, 1, 1200, 1)
    if name == "few-keys":
        k = k[:, :, :5].repeat(1, 1, 240, 1)
    if name == "zero-queries":
        q = torch.zeros_like(q)
    if name == "zero-everything":
        q, k, v = (torch.zeros_like(x) for x in (q, k, v))
    return (1000 * q if name == "huge-logits" else q), k, v


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["one-key", "identical-keys", "few-keys", "zero-queries", "zero-everything", "huge-logits"])
def test_degenerate_inputs(name: str, causal: bool) -> None:
    """Exact whatever is opened, where all keys weigh the same; else with all opened."""
    values = degenerate(name)
    method = ALL if name in ("few-keys", "huge-logits") else FEW
    output, *grads = call(values, torch.ones_like(values[0]), is_causal=causal, method=method)
    assert all(bool(x.isfinite().all()) for x in (output, *grads))
    true = exact(*values, is_causal=causal)
    # Logits of up to 5,000 are known to 5e-4 in float32, and weights no better.
    assert float((output.double() - true).norm()) <= EPS * float(true.norm())
    if name == "one-key":
        assert torch.equal(output, values[2].expand_as(output))


# Memory, and what needs much of it


def peak(function: Callable[[], Any], *given: Tensor) -> int:
    """Bytes at most, with what is given, and without what is there from the first call on (tables of a shape, cuBLAS)."""
    function()
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before + sum(x.numel() * x.element_size() for x in given)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("training", "share"), [(False, 1), (False, 128), (True, 1)], ids=["forward", "shared", "training"])
def test_memory(training: bool, share: int, causal: bool) -> None:
    """No more than half as much again as FlashAttention takes."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    q, k, v, upstream = torch.randn(4, 1, 8, 65536, 64, generator=generator, device=DEVICE, dtype=BF16).unbind(0)
    given = leaves(q.clone(), k.clone(), v.clone()) if training else [q, k, v]

    def of(attention: Callable[..., Tensor]) -> int:
        def run() -> None:
            output = attention(*given, is_causal=causal)
            if training:
                torch.autograd.grad(output, given, upstream)

        return peak(run, *given, *([upstream] if training else []))

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        flash = of(F.scaled_dot_product_attention)
    cells = of(lambda *values, **options: nf.attention(*values, method=nf.Cells(share=share), **options))
    least = q.numel() * q.element_size() * (8 if training else 4)
    assert least <= flash < 2 * least
    assert least <= cells <= 1.5 * flash, f"{cells / 2**20:.0f} MiB, FlashAttention {flash / 2**20:.0f} MiB"


def test_offsets_beyond_int32() -> None:
    """The last of 20 heads lies beyond 2^31 numbers, and is what it is by itself."""
    free, _ = torch.cuda.mem_get_info()
    if free < 80 * 2**30:
        pytest.skip(f"needs 80 GiB of free device memory, has {free / 2**30:.0f}")
    heads, length = 20, 1_700_000
    assert (heads - 1) * length * 64 < 2**31 < heads * length * 64
    generator = torch.Generator(DEVICE).manual_seed(0)
    q, k, v, upstream = (torch.randn(1, heads, length, 64, generator=generator, device=DEVICE, dtype=BF16) for _ in range(4))
    found = [x[:, -1:].clone() for x in call((q, k, v), upstream, method=nf.Cells())]
    alone = [x[:, -1:].clone() for x in (q, k, v, upstream)]
    del q, k, v, upstream
    expected = call(alone[:3], alone[3], method=nf.Cells())
    for x, y in zip(found, expected, strict=True):
        # Of the same plan. The covariances of 20 heads may be summed in another order than those of one.
        for rows in (slice(None), slice(length - 4, None)):
            assert off(x[:, :, rows], y[:, :, rows]) <= EPS
