"""Interrupted, out of memory, in threads and workers, with parts missing: state as before, a typed error or the same result."""

from __future__ import annotations

import multiprocessing
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from by_hand import QKV, gradients, inputs, seeded
from torch import Tensor

import nearfield as nf
from nearfield.knn.index.base import BuiltIndex
from nearfield.knn.topk import TopK


class BuiltFailing(BuiltIndex):
    def __init__(self, keys: Tensor, recipe: FailingIndex) -> None:
        super().__init__(keys)
        self.recipe, self.inner = recipe, nf.ExactIndex().build(keys)

    def _search(self, queries: Tensor, k: int, visible: Tensor) -> tuple[Tensor, Tensor]:
        self.recipe.calls.append(1)
        if len(self.recipe.calls) > self.recipe.good:
            raise self.recipe.error
        return self.inner._search(queries, k, visible)


@dataclass(frozen=True)
class FailingIndex:
    """The exact index, failing after so many searches."""

    error: BaseException
    good: int = 0
    calls: list[int] = field(default_factory=list)

    def build(self, keys: Tensor) -> BuiltFailing:
        return BuiltFailing(keys, self)


def surroundings() -> tuple[Any, ...]:
    return (
        torch.get_rng_state().tolist(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
    )


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("good", [0, 1, 3])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("no room"), RuntimeError("broken index")], ids=repr)
def test_interrupted_in_the_forward_pass(error: BaseException, good: int, grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nearfield.chunks.BLOCK_BYTES", 2000)  # several blocks, so that it happens midway
    leaves = [x.requires_grad_() for x in inputs(1, 2, queries=30, dim=4)]
    index = FailingIndex(error, good)
    generator = seeded(0)
    before = surroundings()
    with torch.set_grad_enabled(grad), pytest.raises(type(error)) as caught:
        nf.attention(*leaves, dropout_p=0.1, method=TopK(4, 4, index), generator=generator)
    assert caught.value is error, "passed on as it is"
    assert len(index.calls) == good + 1
    assert surroundings() == before
    if good == 0:
        assert torch.equal(generator.get_state(), seeded(0).get_state())
    after = nf.attention(*leaves, dropout_p=0.1, method=TopK(4, 4), generator=seeded(0))
    again = nf.attention(*leaves, dropout_p=0.1, method=TopK(4, 4), generator=seeded(0))
    assert torch.equal(after, again)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("no room")], ids=repr)
def test_interrupted_in_the_backward_pass(error: BaseException) -> None:
    leaves = [x.requires_grad_() for x in inputs(1, 2, queries=30, dim=4)]
    output = nf.attention(*leaves, method=TopK(4, 4, FailingIndex(error, good=1)), generator=seeded(0))
    before = surroundings()
    with pytest.raises(type(error)):
        output.sum().backward()
    assert surroundings() == before
    assert all(x.grad is None for x in leaves)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), torch.OutOfMemoryError("no room")], ids=repr)
def test_interrupted_in_exact_dropout(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact attention borrows torch's default generator for dropout, and gives it back whatever happens."""

    def fail(*_: Any, **__: Any) -> Tensor:
        torch.rand(3)
        raise error

    tensors = inputs(1, 2, queries=10)
    before = surroundings()
    with monkeypatch.context() as patch:
        patch.setattr("nearfield.exact.sdpa", fail)
        with pytest.raises(type(error)):
            nf.attention(*tensors, dropout_p=0.5, generator=seeded(0))
    assert surroundings() == before
    first, second = (nf.attention(*tensors, dropout_p=0.5, generator=seeded(0)) for _ in range(2))
    assert torch.equal(first, second), "and can borrow it again"


def test_interrupted_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("nearfield.kernels.reference.exact_attention", interrupted)
    before = surroundings()
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(KeyboardInterrupt):
        nf.estimate(*inputs(1, 2, queries=10), method=TopK(5), audit=5, generator=seeded(0))
    assert surroundings() == before


METHODS: dict[str, tuple[Any, float]] = {
    "exact": (nf.Exact(), 0.0),
    "exact-dropout": (nf.Exact(), 0.4),
    "topk": (TopK(5), 0.0),
    "topk-dropout": (TopK(5), 0.4),
    "tail": (TopK(5, 5), 0.0),
    "kmeans": (TopK(5, 5, nf.KMeansIndex()), 0.0),
    "lsh": (TopK(5, 5, nf.ConcentricLSH()), 0.0),
    "gumbel": (nf.LazyGumbel(draws=20), 0.0),
    "cells": (nf.Cells(cell_size=4, probes=2, segment=8, sinks=2), 0.0),
    "cells-dropout": (nf.Cells(cell_size=4, probes=2, segment=8, sinks=2, samples=2), 0.4),
}


def work(name: str, seed: int) -> tuple[Tensor, QKV]:
    """Output and gradients of one call; what threads and workers do."""
    method, dropout_p = METHODS[name]
    upstream = torch.ones(1, 2, 40, 4)
    return gradients(
        lambda q, k, v: nf.attention(q, k, v, None, dropout_p, True, method=method, generator=seeded(seed)),
        inputs(1, 2, queries=40, dim=4, seed=seed),
        upstream,
    )


def assert_same(found: tuple[Tensor, QKV], expected: tuple[Tensor, QKV]) -> None:
    assert torch.equal(found[0], expected[0])
    for x, y in zip(found[1], expected[1], strict=True):
        assert torch.equal(x, y)


@pytest.mark.long
@pytest.mark.parametrize("name", METHODS)
def test_concurrent_calls(name: str) -> None:
    jobs = list(range(12))
    expected = [work(name, seed) for seed in jobs]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(2):
            for found, one in zip(pool.map(lambda seed: work(name, seed), jobs), expected, strict=True):
                assert_same(found, one)


def test_concurrent_calls_of_different_methods() -> None:
    jobs = [(name, seed) for seed in range(4) for name in METHODS]
    expected = [work(*job) for job in jobs]
    before = torch.get_rng_state()
    with ThreadPoolExecutor(6) as pool:
        for found, one in zip(pool.map(lambda job: work(*job), jobs), expected, strict=True):
            assert_same(found, one)
    assert torch.equal(torch.get_rng_state(), before)


def in_worker(connection: Any) -> None:
    """Numbers, not tensors: no shared memory between the processes."""
    torch.set_num_threads(1)
    results = {}
    for name in METHODS:
        output, grads = work(name, 3)
        results[name] = [x.tolist() for x in (output, *grads)]
    connection.send(results)
    connection.close()


@pytest.mark.long
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers(start: str) -> None:
    if start not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {start} here")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a forked child cannot use its parent's threads
    try:
        expected = {name: [x.tolist() for x in (output, *grads)] for name in METHODS for output, grads in [work(name, 3)]}
        context = multiprocessing.get_context(start)
        receiver, sender = context.Pipe(duplex=False)
        worker = context.Process(target=in_worker, args=(sender,))
        worker.start()
        sender.close()
        assert receiver.poll(120), "the worker hangs"
        assert receiver.recv() == expected
        worker.join(30)
        assert worker.exitcode == 0
    finally:
        torch.set_num_threads(threads)


def test_missing_faiss_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    index = nf.FaissIndex("Flat")
    before = surroundings()
    with pytest.raises(ImportError, match=r"pip install 'nearfield\[faiss\]'"):
        nf.attention(*inputs(1, 2, queries=30), method=TopK(3, index=index))
    assert surroundings() == before


def test_keys_changed_before_the_backward_pass() -> None:
    """The backward pass plans again: with other keys it would be the gradient of another estimate."""
    for method in (TopK(4), TopK(4, 3), TopK(4, 3, nf.KMeansIndex()), nf.Cells(cell_size=4, probes=1, sinks=0)):
        q, k, v = inputs(1, 1, queries=20)
        leaf = q.clone().requires_grad_()
        output = nf.attention(leaf, k, v, method=method, generator=seeded(0))
        k[..., 0] += 1.0
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|changed in place"):
            output.sum().backward()


@pytest.mark.parametrize("index", [nf.ExactIndex(), nf.KMeansIndex(), nf.ConcentricLSH()], ids=["exact", "kmeans", "lsh"])
def test_stale_index(index: Any) -> None:
    keys = inputs(2, queries=40)[1]
    built = index.build(keys)
    built.search(keys[:, :3], 2)
    keys[0, 0, 0] = 5.0
    with pytest.raises(RuntimeError, match=r"changed in place after this index was built; call build\(keys\) again"):
        built.search(keys[:, :3], 2)


def test_every_call_sees_the_keys_as_they_are() -> None:
    """An index is built anew for each call: no cache to go stale."""
    method = TopK(4, index=nf.KMeansIndex())
    q, k, v = inputs(1, 1, queries=40)
    nf.attention(q, k, v, method=method)
    k.neg_()
    assert torch.equal(
        nf.attention(q, k, v, method=method), nf.attention(q, k.clone(), v, method=TopK(4, index=nf.KMeansIndex()))
    )
