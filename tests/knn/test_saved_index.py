"""An index that is saved and loaded is the same index; what is no such file, or a damaged one, is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import index_contract
import pytest
import torch
from by_hand import inputs, seeded
from index_contract import KINDS, UNSAVED, assert_loads_the_same, assert_same_answers, build, random
from own_indices import OwnIndex
from torch import Tensor

pytest.importorskip("safetensors")

from safetensors import safe_open

import nearfield as nf
from nearfield.knn.index import BuiltIndex, build_index, load, prefixes
from nearfield.knn.index.kmeans import BuiltKMeans

every_kind = index_contract.kind


@pytest.fixture(params=[name for name in KINDS if name not in ("lsh", "lsh-theory", "kmeans-one-probe", "faiss-flat")])
def kind(request: pytest.FixtureRequest) -> str:
    """One of every class, in small sizes."""
    if request.param.startswith("faiss"):
        pytest.importorskip("faiss")
    return str(request.param)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "index.safetensors"


@pytest.fixture
def small_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few keys are enough to see an index take some in."""
    monkeypatch.setattr(prefixes, "LEAST_REST", 4)


def searched(built: BuiltIndex) -> BuiltIndex:
    """With what all rows need, and with the blocks of causal ones."""
    for offset in (None, 0):
        built.search(random(2, 150, 8, seed=9), 4, offset)
    return built


HISTORIES: dict[str, Callable[[BuiltIndex], BuiltIndex]] = {
    "fresh": lambda built: built,
    "searched": searched,
    "with a rest": lambda built: searched(built).add(random(2, 3, 8, seed=3)),
    "taken in": lambda built: built.add(random(2, 60, 8, seed=4)),
    "shrunk": lambda built: searched(searched(built).add(random(2, 60, 8, seed=5)).remove(range(40, 90))),
    "shrunk with a rest": lambda built: built.add(random(2, 4, 8, seed=6)).remove([7, 130, 153]),
    "reserved": lambda built: searched(built).reserve(30),
    "with a rest that is not taken in": lambda built: searched(built).add(random(2, 60, 8, seed=7), take_in=False),
    "cropped": lambda built: searched(searched(built).add(random(2, 60, 8, seed=8)).first(190)),
    "grown, cropped and reserved": lambda built: (
        searched(built).add(random(2, 60, 8, seed=10)).add(random(2, 4, 8, seed=11)).first(212).reserve(9)
    ),
    "without its rest": lambda built: searched(built).add(random(2, 4, 8, seed=12)).first(150),
}


def test_every_kind_loads_the_same(every_kind: str, path: Path, small_rest: None) -> None:
    built = HISTORIES["with a rest"](build(every_kind, random(2, 150, 8, seed=1)))
    assert_loads_the_same(every_kind, built, random(2, 20, 8, seed=2), 6, path)


@pytest.mark.parametrize("history", [name for name in HISTORIES if name != "with a rest"])
def test_a_loaded_index_is_the_same(kind: str, history: str, path: Path, small_rest: None) -> None:
    built = HISTORIES[history](build(kind, random(2, 150, 8, seed=1)))
    assert_loads_the_same(kind, built, random(2, 20, 8, seed=2), 6, path)


def test_ties(kind: str, path: Path, small_rest: None) -> None:
    """Which of several keys with the same score is found, and in what order, depends on the parts that a search has."""
    keys, more, queries = (torch.randint(-1, 2, (2, n, 4), generator=seeded(n)).float() for n in (150, 3, 20))
    built = build(kind, keys)
    for changed in (built.reserve(9), built.add(more).first(150), built.add(more)):
        assert_loads_the_same(kind, changed, queries, 6, path)


@pytest.mark.parametrize("length", [0, 1, 7])
def test_few_keys(kind: str, length: int, path: Path) -> None:
    assert_loads_the_same(kind, build(kind, random(2, length, 4)), random(2, 3, 4, seed=1), 2, path)


@pytest.mark.parametrize(("dtype", "grown"), [(torch.float64, True), (torch.bfloat16, False), (torch.bfloat16, True)])
def test_dtypes(kind: str, dtype: torch.dtype, grown: bool, path: Path) -> None:
    keys = random(2, 100, 8, seed=1, dtype=dtype)
    built = build(kind, keys[:, :90]).add(keys[:, 90:]) if grown else build(kind, keys)
    assert_loads_the_same(kind, built, random(2, 20, 8, seed=2, dtype=dtype), 6, path)
    if kind not in UNSAVED:
        built.save(path)
        with safe_open(str(path), framework="pt") as file:
            assert file.get_tensor("keys").dtype == dtype, "half precision takes half the space"
        assert load(path)._source.dtype == built._source.dtype


def test_a_graph_that_threads_have_built(path: Path) -> None:
    """Built again it would be another one."""
    pytest.importorskip("faiss")
    built = searched(nf.FaissIndex("HNSW8", leaf=32).build(random(2, 150, 8)))
    built.save(path)
    for offset in (None, 0, -1):
        found, true = (x.search(random(2, 150, 8, seed=9), 4, offset) for x in (load(path), built))
        assert all(map(torch.equal, found, true))


def test_blocks_have_a_number_of_cells_of_their_own(path: Path) -> None:
    """Two cells for all keys, and six for 32: a row still opens one of either."""
    built = searched(nf.KMeansIndex(cells=2, probes=1, leaf=32).build(random(2, 150, 8)))
    built.save(path)
    assert_same_answers(load(path), built, random(2, 150, 8, seed=9), 4, 0, None)


def test_nothing_is_learned_again(kind: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind in UNSAVED:
        pytest.skip("is not saved")
    queries = random(2, 150, 8, seed=9)
    built = build(kind, random(2, 150, 8))
    wanted = [built.search(queries, 4, offset) for offset in (None, 0)]
    built.save(path)

    def never(*_: Any) -> None:
        raise AssertionError("learned again")

    for name in ("kmeans.lloyd", "lsh.torch.randn", "faiss.BuiltFaiss._build_one", "cells.assign"):
        monkeypatch.setattr(f"nearfield.knn.index.{name}", never)
    loaded = load(path)
    for offset, true in zip((None, 0), wanted, strict=True):
        assert all(map(torch.equal, loaded.search(queries, 4, offset), true))


@pytest.mark.parametrize("method", [lambda x: nf.TopK(5, 4, x), lambda x: nf.LazyGumbel(draws=9, k=5, index=x, always_lazy=True)])
def test_calls_with_a_loaded_index(kind: str, method: Callable[[Any], Any], path: Path) -> None:
    """Output and gradients to the last bit, with grouped queries and a mask."""
    if kind in UNSAVED:
        pytest.skip("is not saved")
    q, k, v = inputs(2, 4, queries=30, dim=4, kv_heads=2, keys=60)

    def run(index: Any) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = nf.attention(*leaves, is_causal=True, enable_gqa=True, method=method(index), generator=seeded(3))
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    built = build_index(KINDS[kind], k)
    built.save(path)
    built.save(path.with_name("alone"), keys=False)
    wanted = run(built)
    for loaded in (load(path), load(path.with_name("alone"), keys=k)):
        assert all(map(torch.equal, run(loaded), wanted))
        with pytest.raises(ValueError, match="the keys of the call are not the keys of the index"):
            nf.attention(q, k + 1, v, enable_gqa=True, method=method(loaded))


@pytest.mark.parametrize("has_keys", [False, True])
def test_given_keys_are_not_copied(has_keys: bool, path: Path) -> None:
    keys = random(2, 3, 50, 4)
    nf.KMeansIndex().build(keys).save(path, keys=has_keys)
    loaded = load(path, keys=keys)
    assert loaded.keys.data_ptr() == keys.data_ptr()
    keys.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        loaded.search(random(6, 2, 4), 3)


@pytest.mark.parametrize("has_keys", [False, True])
def test_other_keys_are_refused(has_keys: bool, path: Path) -> None:
    keys = random(2, 3, 50, 4, dtype=torch.bfloat16)
    built = nf.KMeansIndex().build(keys)
    built.save(path, keys=has_keys)
    other = keys.clone()
    other[1, 2, 49, 3] += 0.5
    with pytest.raises(ValueError, match=r"index\.safetensors was built of other keys than those given; build"):
        load(path, keys=other)
    with pytest.raises(ValueError, match=r"keys of shape \(6, 50, 4\).*those given have shape \(2, 3, 49, 4\)"):
        load(path, keys=keys[:, :, :49])
    for wrong in (keys.double(), keys.int()):
        with pytest.raises(TypeError, match=r"keys of torch.bfloat16, and those given are torch\.(float64|int32)"):
            load(path, keys=wrong)
    with pytest.raises(TypeError, match="keys must be a tensor or None, got list"):
        load(path, keys=keys.tolist())
    # The same numbers in another dtype and layout.
    same = keys.float().transpose(1, 2).contiguous().transpose(1, 2)
    assert load(path, keys=same).build(keys).dtype == torch.bfloat16
    assert all(map(torch.equal, load(path, keys=same).search(random(6, 2, 4), 3), built.search(random(6, 2, 4), 3)))


def test_zero_has_no_sign(path: Path) -> None:
    keys = random(1, 20, 4)
    keys[0, 3] = 0.0
    nf.ExactIndex().build(keys).save(path, keys=False)
    keys[0, 3] = -0.0
    assert load(path, keys=keys).length == 20


def test_keys_must_be_somewhere(path: Path) -> None:
    nf.ExactIndex().build(random(1, 20, 4)).save(path, keys=False)
    with pytest.raises(ValueError, match=r"saved without its keys; give them: load\(path, keys=...\)"):
        load(path)


def test_how_much_has_changed_is_remembered(path: Path, small_rest: None) -> None:
    """So that it learns anew when it would have without the file: here, after 50 of 100 keys."""
    built = nf.KMeansIndex().build(random(1, 100, 4)).add(random(1, 30, 4, seed=1))
    built.save(path)
    loaded = load(path)
    assert (loaded._learned, loaded._changes) == (built._learned, built._changes) == (100, 30)  # type: ignore[attr-defined]
    assert loaded.add(random(1, 19, 4, seed=2))._learned == 100  # type: ignore[attr-defined]
    assert loaded.add(random(1, 20, 4, seed=2))._learned == 150  # type: ignore[attr-defined]


def test_stale_keys_are_not_saved(kind: str, path: Path) -> None:
    keys = random(1, 20, 4)
    built = build(kind, keys)
    keys.add_(1)
    with pytest.raises(TypeError if kind in UNSAVED else RuntimeError, match=r"changed in place|save its keys"):
        built.save(path)
    assert not path.exists()


def test_what_is_saved_may_be_anywhere_in_memory(path: Path) -> None:
    """Keys between heads, keys that want a gradient, and an index made and loaded in inference mode."""
    keys = random(1, 90, 3, 4).transpose(1, 2).requires_grad_()
    queries = random(3, 5, 4, seed=1)
    with torch.inference_mode():
        built = nf.KMeansIndex().build(keys)
        built.save(path)
        loaded = load(path)
    assert all(map(torch.equal, loaded.search(queries, 4), built.search(queries, 4)))
    q, k, v = (x.detach().requires_grad_() for x in (random(1, 3, 5, 4), keys, keys))
    nf.attention(q, k, v, method=nf.TopK(4, index=loaded)).sum().backward()
    assert q.grad is not None


def test_only_indices_of_this_library(path: Path) -> None:
    class Own(nf.KMeansIndex):
        pass

    class BuiltOwn(BuiltKMeans):
        pass

    keys = random(1, 20, 4)
    for built in (Own().build(keys), BuiltOwn(keys, nf.KMeansIndex()), build_index(OwnIndex(), keys)):
        with pytest.raises(TypeError, match="save its keys, and build it of them again"):
            built.save(path)


@pytest.mark.parametrize("device", ["cuda:7", "nowhere", "meta", 3.5, "cpu:x"])
def test_devices_that_are_not_there(device: Any, path: Path) -> None:
    nf.ExactIndex().build(random(1, 20, 4)).save(path)
    with pytest.raises(ValueError, match=r"device must be one .*such as 'cpu', got"):
        load(path, device=device)
    assert load(path, device="cpu").keys.device == torch.device("cpu")
    with pytest.raises(ValueError, match="device must be that of keys, meta, got 'cpu'"):
        load(path, keys=random(1, 20, 4).to("meta"), device="cpu")
