"""`hf.CellCache` with `TopK` and `LazyGumbel`: new tokens attend by the method, and with other caches exactly, which is told."""

from __future__ import annotations

import copy
import logging
import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from hf_models import model, pair, tokens
from transformers import DynamicCache

import nearfield as nf
from nearfield import hf
from nearfield.hf import calls
from nearfield.knn import store as stores
from nearfield.knn.store import IndexStore

NAME = "nearfield-indexed"
ALL = nf.TopK(10**6, index=nf.KMeansIndex(probes=3))
FEW = nf.TopK(2)
LENGTH, NEW = 23, 20


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    hf.register(NAME, ALL)


@pytest.fixture(scope="module")
def nets() -> tuple[Any, Any]:
    return pair("llama", NAME)


def prompts() -> dict[str, Tensor]:
    """Two prompts, the first one shorter."""
    ids, mask = tokens(2, LENGTH), torch.ones(2, LENGTH, dtype=torch.long)
    ids[0, :11], mask[0, :11] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def generated(net: Any, cache: Any, given: dict[str, Tensor], **options: Any) -> Tensor:
    torch.manual_seed(5)
    found: Tensor = net.generate(**given, max_new_tokens=NEW, past_key_values=cache, **{"do_sample": False} | options)
    return found


@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"num_beams": 3}], ids=["greedy", "sampling", "beams"])
def test_all_keys_give_the_tokens_of_exact_attention(nets: tuple[Any, Any], options: dict[str, Any]) -> None:
    plain, ours = nets
    cache = hf.CellCache(ALL, config=ours.config, audit=True)
    theirs = generated(plain, DynamicCache(config=plain.config), prompts(), **options)
    assert torch.equal(generated(ours, cache, prompts(), **options), theirs)
    assert cache.get_seq_length() == LENGTH + NEW - 1
    assert len(cache.errors) == 2
    for errors in cache.errors.values():
        assert len(errors) == NEW - 1
        assert max(float(error.relative.max()) for error in errors) < 2e-6


@pytest.mark.parametrize("options", [{"prompt_lookup_num_tokens": 4}, {"prefill_chunk_size": 10}], ids=["lookup", "chunks"])
def test_several_queries_at_a_time(nets: tuple[Any, Any], options: dict[str, Any]) -> None:
    plain, ours = nets
    given = {"input_ids": tokens(1, LENGTH).repeat(1, 2)}
    cache = hf.CellCache(ALL, config=ours.config, audit=True)
    theirs = generated(plain, DynamicCache(config=plain.config), given)
    assert torch.equal(generated(ours, cache, given, **options), theirs)
    assert max(error.relative.shape[2] for error in cache.errors[0]) > 1


def test_assistant_takes_tokens_back(nets: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    plain, ours = nets
    crops: list[int] = []
    crop = IndexStore.crop
    monkeypatch.setattr(IndexStore, "crop", lambda self, length: (crops.append(self.length - length), crop(self, length))[1])
    given = {"input_ids": tokens(1, LENGTH)}
    theirs = generated(plain, None, given)
    found = generated(ours, hf.CellCache(ALL), given, assistant_model=model("llama", num_hidden_layers=1))
    assert torch.equal(found, theirs)
    assert max(crops) > 0


def test_few_keys_have_an_error_that_is_told(nets: tuple[Any, Any]) -> None:
    _, ours = nets
    for method, least in ((FEW, 0.05), (nf.LazyGumbel(draws=30, estimator="mean"), 0.01)):
        cache = hf.CellCache(method, audit=True)
        generated(ours, cache, prompts())
        errors = torch.stack([error.relative.mean() for error in cache.errors[1]])
        assert least < errors.mean() < 1.5
    assert repr(cache.layers[0]).startswith("CellLayer(42 keys, 42 of them in ExactIndex()")
    assert set(cache.nbytes) == {"keys", "values", "index"}


@torch.no_grad()
def test_a_step_is_that_of_a_store(nets: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer by layer: what the cache returns is attention by the method to all keys of the layer."""
    _, ours = nets
    seen = []
    attend = IndexStore.attend

    def watched(self: IndexStore, query: Tensor, scale: float | None = None) -> Tensor:
        seen.append((self, query, attend(self, query, scale)))
        return seen[-1][2]

    monkeypatch.setattr(IndexStore, "attend", watched)
    cache = hf.CellCache(FEW)
    ours(tokens(1, LENGTH), past_key_values=cache)
    assert not seen
    ours(tokens(1, 1, seed=2), past_key_values=cache)
    assert len(seen) == 2
    for store, query, output in seen:
        truth = nf.attention(query, store.keys, store.values, enable_gqa=True, method=FEW)
        assert torch.allclose(output, truth, atol=1e-6)


def test_methods_by_layer(nets: tuple[Any, Any]) -> None:
    plain, ours = nets
    cells = nf.Cells(probes=10**6, segment=8, cell_size=4, sinks=3, window=0)
    cache = hf.CellCache({1: ALL, "default": cells}, config=ours.config, audit=True)
    assert [layer.store.method for layer in cache.layers] == [cells, ALL]
    theirs = generated(plain, DynamicCache(config=plain.config), prompts(), num_beams=2)
    assert torch.equal(generated(ours, cache, prompts(), num_beams=2), theirs)
    assert set(cache.nbytes) == {"keys", "values", "order", "moments", "index"}
    assert sorted(cache.errors) == [0, 1]


@torch.no_grad()
def test_copies_crops_and_resets(nets: tuple[Any, Any]) -> None:
    plain, ours = nets
    ids = tokens(1, LENGTH)
    cache = hf.CellCache(ALL)
    ours(ids[:, :-4], past_key_values=cache)
    kept = copy.deepcopy(cache)
    theirs = generated(plain, None, {"input_ids": ids})
    assert torch.equal(generated(ours, cache, {"input_ids": ids}), theirs)
    assert torch.equal(generated(ours, kept, {"input_ids": ids}), theirs)
    kept.crop(-(kept.get_seq_length() - LENGTH + 4))
    assert torch.equal(generated(ours, kept, {"input_ids": ids}), theirs)
    kept.reset()
    assert kept.get_seq_length() == 0
    assert torch.equal(generated(ours, kept, {"input_ids": ids}), theirs)


@torch.no_grad()
def test_bfloat16() -> None:
    plain, ours = pair("llama", NAME, torch.bfloat16)
    ids = tokens(2, LENGTH + 1)
    cache = hf.CellCache(ALL)
    ours(ids[:, :-1], past_key_values=cache)
    last = ours(ids[:, -1:], past_key_values=cache).logits[:, -1]
    assert cache.layers[0].keys.dtype == torch.bfloat16
    assert (last.float() - plain(ids).logits[:, -1].float()).abs().max() < 0.1


def test_what_a_cache_refuses(nets: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match=r"offload=True is for Cells\(...\) only, got TopK"):
        hf.CellCache(FEW, offload=True)
    with pytest.raises(ValueError, match="give its recipe"):
        hf.CellCache({0: nf.TopK(index=nf.ExactIndex().build(torch.randn(2, 5, 4))), "default": nf.Cells()})
    with pytest.raises(TypeError, match=r"attends by Cells\(...\), got TopK.*IndexStore"):
        hf.Memory.read(nets[1], tokens(1, LENGTH), FEW)  # type: ignore[arg-type]


def test_exact_decoding_is_told_once(nets: tuple[Any, Any], caplog: pytest.LogCaptureFixture) -> None:
    """With a cache of Transformers tokens are those of exact attention after the prompt, and the log says so."""
    plain, ours = nets
    calls.tell_exact.cache_clear()
    with caplog.at_level(logging.WARNING, logger="nearfield"):
        generated(ours, hf.CellCache(ALL), prompts())
        assert not caplog.records
        theirs = generated(plain, DynamicCache(config=plain.config), prompts())
        for _ in range(2):
            assert torch.equal(generated(ours, DynamicCache(config=ours.config), prompts()), theirs)
    assert [record.name for record in caplog.records] == ["nearfield.hf.calls"]
    assert "past_key_values=hf.CellCache(config" in caplog.text


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
def test_nothing_is_told_of_windows(family: str, caplog: pytest.LogCaptureFixture) -> None:
    """Layers with a sliding window attend exactly by every cache, and no other cache would change that."""
    calls.tell_exact.cache_clear()
    plain, ours = pair(family, NAME)
    given = {"input_ids": tokens(1, LENGTH)}
    with caplog.at_level(logging.WARNING, logger="nearfield"):
        cache = hf.CellCache(config=ours.config)
        assert torch.equal(generated(ours, cache, given), generated(plain, None, given))
    searched = [isinstance(getattr(layer, "store", None), IndexStore) for layer in cache.layers]
    assert searched == [False, family == "gemma3"]
    assert not caplog.records


@torch.no_grad()
def test_registering_decides_how_tokens_attend(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that is told no method attends by the registered one, layer by layer, and its index grows with the tokens."""
    near = nf.TopK(3, index=nf.KMeansIndex(probes=10**6))
    lazy = nf.LazyGumbel(draws=4, estimator="mean")
    hf.register("nearfield-decides", {0: near, 1: nf.Exact(), "default": lazy})
    ours = model("llama", num_hidden_layers=3)
    assert [layer.store.method for layer in hf.CellCache(config=ours.config).layers] == [nf.Cells()] * 3
    ours.set_attn_implementation("nearfield-decides")
    cache = hf.CellCache(config=ours.config)
    assert [layer.store.method for layer in cache.layers] == [near, nf.Cells(), lazy]
    assert [layer.store.method for layer in hf.CellCache(nf.Cells(4), config=ours.config).layers] == [nf.Cells(4)] * 3
    hf.register("nearfield-decides", near)
    cache = hf.CellCache(config=ours.config)
    seen: list[tuple[IndexStore, Tensor, Tensor]] = []
    attend = IndexStore.attend

    def watched(self: IndexStore, query: Tensor, scale: float | None = None) -> Tensor:
        seen.append((self, query, attend(self, query, scale)))
        truth = nf.attention(query, self.keys, self.values, enable_gqa=True, method=near)  # type: ignore[arg-type]
        assert torch.allclose(seen[-1][2], truth, atol=1e-6)
        return seen[-1][2]

    monkeypatch.setattr(IndexStore, "attend", watched)
    builds: list[int] = []
    build = nf.KMeansIndex.build
    monkeypatch.setattr(nf.KMeansIndex, "build", lambda self, keys: (builds.append(keys.shape[-2]), build(self, keys))[1])
    generated(ours, cache, {"input_ids": tokens(1, LENGTH)})
    assert len(seen) == 3 * (NEW - 1)
    # What the test itself asks for is a build in every step; the stores have built theirs of the prompt, once.
    assert builds.count(LENGTH) == 3 + 3
    assert all(layer.store.closed == LENGTH + NEW - 1 for layer in cache.layers)


def test_nothing_is_told_of_other_methods(caplog: pytest.LogCaptureFixture) -> None:
    calls.tell_exact.cache_clear()
    hf.register("nearfield-untold", nf.Cells())
    _, ours = pair("llama", "nearfield-untold")
    with caplog.at_level(logging.WARNING, logger="nearfield"):
        generated(ours, DynamicCache(config=ours.config), {"input_ids": tokens(1, LENGTH)})
    assert not caplog.records


def test_rows_of_a_chunk_in_parts(nets: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "MOST_ROWS", 3)
    plain, ours = nets
    theirs = generated(plain, DynamicCache(config=plain.config), prompts())
    assert torch.equal(generated(ours, hf.CellCache(ALL), prompts(), prefill_chunk_size=8), theirs)
