"""An index that is built once serves every call with its keys, and refuses all others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from by_hand import gradients, inputs, seeded
from index_contract import KINDS
from torch import Tensor

import nearfield as nf
from nearfield.knn.index import BuiltIndex, build_index

pytestmark = pytest.mark.usefixtures("lazy_draws")

METHODS: dict[str, Callable[[Any], Any]] = {
    "topk": lambda index: nf.TopK(5, 4, index),
    "gumbel": lambda index: nf.LazyGumbel(draws=9, k=5, index=index),
    "always lazy": lambda index: nf.LazyGumbel(draws=9, k=5, index=index, always_lazy=True),
}


@pytest.fixture(params=[name for name in KINDS if name not in ("lsh", "kmeans-one-probe", "faiss-lifted")])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param.startswith("faiss"):
        pytest.importorskip("faiss")
    return str(request.param)


@pytest.fixture
def no_builds(kind: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From when it is called on, the recipe must not be built."""

    def fail(*_: Any) -> None:
        raise AssertionError("built again")

    return lambda: monkeypatch.setattr(type(KINDS[kind]), "build", fail)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_calls_are_those_with_a_recipe(kind: str, method: str, causal: bool, no_builds: Callable[[], None]) -> None:
    """Output and gradients to the last bit, with grouped queries and a scale, in a second call as in the first."""
    tensors = inputs(2, 4, queries=30, dim=4, kv_heads=2, keys=60)
    upstream = torch.randn(2, 4, 30, 4, generator=seeded(2))
    built = build_index(KINDS[kind], tensors[1])

    def run(index: Any) -> list[Tensor]:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            chosen = METHODS[method](index)
            return nf.attention(q, k, v, is_causal=causal, scale=-0.7, enable_gqa=True, method=chosen, generator=seeded(3))

        output, grads = gradients(call, tensors, upstream)
        return [output, *grads]

    expected = run(KINDS[kind])
    no_builds()
    for _ in range(2):
        for mine, true in zip(run(built), expected, strict=True):
            assert torch.equal(mine, true)


def test_gradients_of_a_grown_index_are_exact() -> None:
    """By finite differences: keys get the gradient of the estimator, given the keys that were found."""
    q, k, v = inputs(1, 2, queries=3, keys=80, dim=3, dtype=torch.float64)
    built = nf.KMeansIndex(probes=1).build(k[:, :, :70]).add(k[:, :, 70:])
    ids = built.search(q[0] / 3**0.5, 6)[1]
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = nf.attention(*leaves, method=nf.TopK(6, index=built))
    found = torch.autograd.grad(out.square().sum(), leaves)
    near = [x[0][torch.arange(2)[:, None, None], ids] for x in leaves[1:]]
    weights = (torch.einsum("hrd,hrkd->hrk", leaves[0][0], near[0]) / 3**0.5).softmax(-1)
    byhand = torch.einsum("hrk,hrkd->hrd", weights, near[1])
    torch.testing.assert_close(out[0], byhand)
    for mine, true in zip(found, torch.autograd.grad(byhand.square().sum(), leaves), strict=True):
        torch.testing.assert_close(mine, true)


def test_a_backward_pass_finds_the_index_of_its_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """It plans block by block again, and meanwhile keys were added behind those of the index."""
    monkeypatch.setattr("nearfield.chunks.BLOCK_BYTES", 1 << 12)
    q, k, v = (x.requires_grad_() for x in inputs(1, 2, queries=50, keys=80, dim=4))
    built = nf.KMeansIndex(probes=2).build(k[:, :, :60]).add(k[:, :, 60:])

    def run(meanwhile: Callable[[], Any]) -> tuple[Tensor, ...]:
        out = nf.attention(q, k, v, method=nf.TopK(4, 3, built), generator=seeded(1))
        meanwhile()
        return torch.autograd.grad(out.square().sum(), (q, k, v))

    expected = run(lambda: None)
    for mine, true in zip(run(lambda: built.add(torch.ones(1, 2, 9, 4)).search(q[0], 3)), expected, strict=True):
        assert torch.equal(mine, true)


def test_the_walks_use_it(kind: str, no_builds: Callable[[], None]) -> None:
    q, k, v = inputs(1, 2, queries=12, dim=3)
    g, built = torch.randn(1, 2, 12, 3, generator=seeded(1)), build_index(KINDS[kind], k)

    def run(index: Any) -> list[Tensor]:
        walk = nf.gradients.RandomWalk(4, k=3, index=index)
        product = nf.gradients.estimate_product(q, k, g, 5, k=3, index=index, generator=seeded(3))
        return [*nf.gradients.estimate(q, k, v, g, walk, generator=seeded(2)), product]

    expected = run(KINDS[kind])
    no_builds()
    assert all(map(torch.equal, run(built), expected))


def test_layouts_of_keys(kind: str) -> None:
    """[batch, heads, length, dim], with heads beside dim in memory or not, and [batch * heads, length, dim]."""
    k = torch.randn(2, 70, 3, 4, generator=seeded(0)).transpose(1, 2)
    assert not k.is_contiguous()
    queries = torch.randn(6, 9, 4, generator=seeded(1))
    wanted = build_index(KINDS[kind], k.flatten(0, 1)).search(queries, 5)
    for keys in (k, k.contiguous()):
        built = build_index(KINDS[kind], keys)
        assert built.keys.shape == (6, 70, 4)
        for same in (k, k.contiguous(), k.flatten(0, 1)):
            assert built.build(same) is built
        assert all(map(torch.equal, built.search(queries, 5), wanted))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes_of_a_call(kind: str, dtype: torch.dtype) -> None:
    q, k, v = inputs(1, 2, queries=9, keys=40, dim=4, dtype=dtype)
    built = build_index(KINDS[kind], k)
    wanted = nf.attention(q, k, v, method=nf.TopK(5, index=KINDS[kind]))
    assert torch.equal(nf.attention(q, k, v, method=nf.TopK(5, index=built)), wanted)
    if dtype == torch.float64:
        with pytest.raises(TypeError, match=r"keys of torch.float64 and the call has .*torch.float32"):
            nf.attention(q.float(), k.float(), v.float(), method=nf.TopK(5, index=built))


def calls(built: BuiltIndex) -> Iterator[Any]:
    yield from (make(built) for make in METHODS.values())
    yield nf.TopK(1000, index=built)


@pytest.mark.parametrize("least", [0, 1 << 22], ids=["asked", "not asked"])
def test_other_keys_are_refused(kind: str, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by calls that turn out to need no index."""
    monkeypatch.setattr("nearfield.paper.lazy.LEAST_KEYS", least)
    q, k, v = inputs(2, 2, queries=9, keys=30, dim=4)
    built = build_index(KINDS[kind], k)
    other = k.clone()
    assert nf.attention(q, other, v, method=nf.TopK(3, index=built)).shape == (2, 2, 9, 4)
    other[1, 1, 29, 3] += 1e-3
    for method in calls(built):
        with pytest.raises(ValueError, match="keys of the call are not the keys of the index"):
            nf.attention(q, other, v, method=method)
        with pytest.raises(ValueError, match=r"keys of shape \(4, 30, 4\) and the call has keys \(4, 20, 4\)"):
            nf.attention(q, k[:, :, :20], v[:, :, :20], method=method)
        with pytest.raises(ValueError, match=r"\(4, 30, 4\) and the call has keys \(2, 30, 4\), \[batch \* key heads"):
            nf.attention(q, k[:, :1], v[:, :1], enable_gqa=True, method=method)
    with pytest.raises(ValueError, match="keys on cpu and the call has keys on meta"):
        built.build(k.to("meta"))


def test_keys_that_were_changed_in_place_are_refused(kind: str) -> None:
    q, k, v = inputs(1, 2, queries=9, keys=30, dim=4)
    built = build_index(KINDS[kind], k)
    k[0, 0, 0, 0] = 9.0
    for method in calls(built):
        with pytest.raises(RuntimeError, match="changed in place"):
            nf.attention(q, k, v, method=method)


def test_changes_that_nobody_counts(kind: str) -> None:
    """Inside inference mode tensors have no version."""
    with torch.inference_mode():
        q, k, v = inputs(1, 2, queries=9, keys=30, dim=4)
        k = k.clone()
        assert k.is_inference()
        built = build_index(KINDS[kind], k)
        wanted = nf.attention(q, k, v, method=nf.TopK(3, index=built))
        assert torch.equal(wanted, nf.attention(q, k, v, method=nf.TopK(3, index=KINDS[kind])))
        grown = built.add(k[:, :, :5])
        k[0, 0, 0, 0] = 9.0
        with pytest.raises(ValueError, match="not the keys of the index"):
            nf.attention(q, k, v, method=nf.TopK(3, index=built))
    # What was made there can be used elsewhere.
    assert grown.add(torch.ones(1, 2, 1, 4)).length == 36


def test_masks_and_nan() -> None:
    """The index has the keys as they are when it is asked: without hidden ones at the front, 0 in place of others."""
    q, k, v = inputs(2, 2, queries=9, keys=30, dim=4)
    mask = torch.arange(30) < torch.tensor([30, 21])[:, None, None, None]
    index = nf.KMeansIndex(probes=2, leaf=8)
    wanted = nf.attention(q, k, v, mask, method=nf.TopK(3, 2, index), generator=seeded(0))
    with pytest.raises(ValueError, match="A mask drops the keys it hides"):
        nf.attention(q, k, v, mask, method=nf.TopK(3, 2, index.build(k)))
    padded = index.build(k.masked_fill(~mask.mT, 0.0))
    assert torch.equal(nf.attention(q, k, v, mask, method=nf.TopK(3, 2, padded), generator=seeded(0)), wanted)
    k[0, 0, 3, 1] = torch.nan
    with pytest.raises(ValueError, match="NaN and inf become 0"):
        nf.attention(q, k, v, method=nf.TopK(3, index=index.build(k)))


def test_the_same_memory_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(2, 2, queries=9, keys=30, dim=4)
    built = nf.KMeansIndex().build(k).add(k[:, :, :3])
    value = torch.cat([v, v[:, :, :3]], 2)

    def fail(*_: Any) -> bool:
        raise AssertionError("compared")

    monkeypatch.setattr(torch, "equal", fail)
    nf.attention(q, k, v, method=nf.TopK(3, index=nf.KMeansIndex().build(k)))
    nf.attention(q, built.keys.unflatten(0, (2, 2)), value, method=nf.TopK(3, index=built))
    with pytest.raises(AssertionError, match="compared"):
        nf.attention(q, built.keys.unflatten(0, (2, 2)).clone(), value, method=nf.TopK(3, index=built))


def test_what_it_says_of_itself() -> None:
    assert "index=<BuiltKMeans of keys (6, 5, 4)>" in repr(nf.TopK(index=nf.KMeansIndex().build(torch.zeros(2, 3, 5, 4))))
