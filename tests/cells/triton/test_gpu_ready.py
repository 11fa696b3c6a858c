"""Calls that were made before, on a card: in graphs, on other streams, in threads, and how many kernels they start."""

from __future__ import annotations

import gc
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from by_hand import QKV, inputs
from torch import Tensor

import nearfield as nf
from nearfield.kernels import ready

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
METHOD = nf.Cells(cell_size=16, probes=2, segment=128)


def tensors(seed: int = 0, length: int = 512, heads: int = 1) -> QKV:
    q, k, v = inputs(1, heads, queries=length, dim=64, seed=seed, dtype=torch.bfloat16)
    return q.to(DEVICE), k.to(DEVICE), v.to(DEVICE)


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return nf.attention(q, k, v, **{"method": METHOD, "is_causal": True, **options})


def prepared(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """The same, by way of the operator: `estimate` remembers nothing."""
    return nf.estimate(q, k, v, **{"method": METHOD, "is_causal": True, **options}).output


def tapes() -> list[Any]:
    from nearfield.kernels import replay

    return [x for x in replay._TAPES.values() if isinstance(x, replay.Tape)]


def plain_method(share: int = 1) -> nf.Cells:
    return replace(METHOD, segment=None, share=share)


@pytest.mark.parametrize("share", [1, 64])
@pytest.mark.parametrize("causal", [False, True])
def test_replayed_calls_have_the_same_bits(causal: bool, share: int) -> None:
    options = {"is_causal": causal, "method": replace(METHOD, share=share) if causal else plain_method(share)}
    for seed in range(4):
        fresh = tensors(seed, heads=3)
        assert torch.equal(attend(*fresh, **options), prepared(*fresh, **options))
    assert len(tapes()) == 1


def kernels_of(function: Any) -> int:
    """How many kernels it starts."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        function()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in seen.events())


@pytest.mark.parametrize(("share", "causal", "most"), [(64, True, 16), (64, False, 20), (1, True, 23), (1, False, 22)])
def test_how_many_kernels_a_call_starts(share: int, causal: bool, most: int) -> None:
    options = {"is_causal": causal, "method": replace(METHOD, share=share) if causal else plain_method(share)}
    fresh = tensors()
    for _ in range(3):
        attend(*fresh, **options)
    (tape,) = tapes()
    assert len(tape.launches) <= most
    assert kernels_of(lambda: attend(*fresh, **options)) == len(tape.launches)


@pytest.mark.parametrize("before", [1, 2, 3])
def test_captured_after_so_many_calls(before: int) -> None:
    """While it has to be recorded, and when it is replayed already. What the graph reads is there when all else is forgotten."""
    static = tensors()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(before):
            attend(*static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = attend(*static)
    from nearfield.kernels import replay

    ready.forget()
    replay.forget()
    gc.collect()
    kept = [torch.full((1 << size,), -1, dtype=torch.int32, device=DEVICE) for size in range(8, 20)]
    for seed in (1, 2):
        fresh = tensors(seed)
        for x, y in zip(static, fresh, strict=True):
            x.copy_(y)
        output.fill_(torch.nan)
        graph.replay()
        assert torch.equal(output, prepared(*fresh))
    assert all(bool((x == -1).all()) for x in kept)


def test_a_backward_pass_in_a_graph_keeps_what_it_reads() -> None:
    static = [x.requires_grad_() for x in tensors()]
    upstream = torch.ones_like(static[0])

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(*static), static, upstream)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    expected = [x.clone() for x in step()]
    from nearfield.kernels import replay

    ready.forget()
    replay.forget()
    gc.collect()
    kept = [torch.full((1 << size,), -1, dtype=torch.int32, device=DEVICE) for size in range(8, 20)]
    for x in found:
        x.fill_(torch.nan)
    graph.replay()
    for mine, true in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, true, atol=1e-2, rtol=1e-2)
    assert all(bool((x == -1).all()) for x in kept)


def test_side_streams() -> None:
    """Recorded on one stream and replayed on others, whose work is not done yet."""
    for seed in range(2):
        attend(*tensors(seed))
    given = [tensors(seed) for seed in range(6)]
    expected = [prepared(*x) for x in given]
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in range(3)], []
    for number, x in enumerate(given):
        with torch.cuda.stream(streams[number % 3]):
            torch.cuda._sleep(2_000_000)
            found.append(attend(*x))
    torch.cuda.synchronize()
    assert len(tapes()) == 1
    for mine, true in zip(found, expected, strict=True):
        assert torch.equal(mine, true)


def test_the_first_call_on_another_stream() -> None:
    """What the first call has made can be read at once by all streams."""
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    x = tensors(length=500)
    expected = prepared(*x)
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        torch.cuda._sleep(50_000_000)
        attend(*x)
    with torch.cuda.stream(second):
        found = attend(*x)
    torch.cuda.synchronize()
    assert torch.equal(found, expected)


def test_threads_with_a_stream_each() -> None:
    given = [[tensors(10 * number + seed) for seed in range(8)] for number in range(4)]
    expected = [[prepared(*x) for x in own] for own in given]
    torch.cuda.synchronize()

    def work(number: int) -> list[Tensor]:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            found = [attend(*x) for x in given[number]]
        stream.synchronize()
        return found

    with ThreadPoolExecutor(4) as pool:
        for found, true in zip(pool.map(work, range(4)), expected, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(found, true, strict=True))


def test_compiled_with_graphs() -> None:
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("the default backend of torch.compile needs a C++ compiler")
    from nearfield.cells.triton.layout import layout_of

    torch.compiler.reset()
    # Tables that are made while a graph is recorded must outlive it.
    layout_of.cache_clear()
    counters = torch._dynamo.utils.counters["inductor"]
    skipped = counters["cudagraph_skips"]
    compiled = torch.compile(lambda q, k, v: attend(q, k, v) * 2, mode="reduce-overhead")
    for seed in range(5):
        fresh = tensors(seed)
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(compiled(*fresh).clone(), prepared(*fresh) * 2)
        assert torch.equal(attend(*fresh), prepared(*fresh))
    assert counters["cudagraph_skips"] == skipped, "no graph was recorded"


def test_no_call_made_before_keeps_memory() -> None:
    fresh = tensors(heads=4, length=2048)
    for _ in range(3):
        attend(*fresh)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        attend(*fresh)
    assert torch.cuda.memory_allocated() == before
