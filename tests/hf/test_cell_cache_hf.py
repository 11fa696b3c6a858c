"""`hf.CellCache`: with all cells opened, tokens are those of SDPA with a DynamicCache; other attention cannot read it."""

from __future__ import annotations

import copy
import gc
import os
import sys
import weakref
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from few_keys import few_keys
from torch import Tensor
from torch._dynamo.utils import counters

pytest.importorskip("transformers")

from hf_models import model, pair, tokens
from transformers import DynamicCache, EncoderDecoderCache

import nearfield
from nearfield import hf
from nearfield.cells.cache import adopted
from nearfield.cells.cache import store as cache_store
from nearfield.cells.cache.stretch import query_sizes

NAME = "nearfield-cached"
FAMILIES = ("llama", "gemma3", "gpt2")
SIZES = {"segment": 8, "cell_size": 4, "sinks": 3, "window": 0}
ALL = nearfield.Cells(probes=10**6, **SIZES)
FEW = nearfield.Cells(probes=1, **SIZES)
LENGTH, NEW = 23, 20


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    hf.register(NAME, nearfield.Cells(cell_size=4, segment=8, probes=10**6, sinks=0))


@pytest.fixture(scope="module")
def nets() -> dict[str, tuple[Any, Any]]:
    return {family: pair(family, NAME) for family in FAMILIES}


def prompts() -> dict[str, Tensor]:
    """Two prompts, the first one shorter by more than a segment."""
    ids, mask = tokens(2, LENGTH), torch.ones(2, LENGTH, dtype=torch.long)
    ids[0, :11], mask[0, :11] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def generated(net: Any, cache: Any, given: dict[str, Tensor], **options: Any) -> Tensor:
    torch.manual_seed(5)
    found: Tensor = net.generate(**given, max_new_tokens=NEW, past_key_values=cache, **{"do_sample": False} | options)
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"num_beams": 3}], ids=["greedy", "sampling", "beams"])
def test_generate(nets: dict[str, tuple[Any, Any]], family: str, options: dict[str, Any]) -> None:
    plain, ours = nets[family]
    cache = hf.CellCache(ALL, config=ours.config, audit=True)
    theirs = generated(plain, DynamicCache(config=plain.config), prompts(), **options)
    assert torch.equal(generated(ours, cache, prompts(), **options), theirs)
    assert cache.get_seq_length() == LENGTH + NEW - 1
    for errors in cache.errors.values():
        assert len(errors) == NEW - 1
        assert max(float(error.relative.max()) for error in errors) < 2e-6


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{"prompt_lookup_num_tokens": 4}, {"prefill_chunk_size": 10}], ids=["lookup", "chunks"])
def test_several_queries_at_a_time(nets: dict[str, tuple[Any, Any]], family: str, options: dict[str, Any]) -> None:
    plain, ours = nets[family]
    given = {"input_ids": tokens(1, LENGTH).repeat(1, 2)}
    cache = hf.CellCache(ALL, config=ours.config, audit=True)
    theirs = generated(plain, DynamicCache(config=plain.config), given)
    assert torch.equal(generated(ours, cache, given, **options), theirs)
    assert max(error.relative.shape[2] for error in next(iter(cache.errors.values()))) > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_by_the_engine_for_whole_sequences(
    nets: dict[str, tuple[Any, Any]], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a chunk attend to each other by the registered method, and to what is closed through cells."""
    plain, ours = nets[family]
    served: list[int] = []
    attend_chunk = cache_store.CellStore._attend_chunk

    def counted(self: Any, state: Any, query: Tensor, *arguments: Any) -> Tensor:
        served.append(query.shape[2])
        return attend_chunk(self, state, query, *arguments)

    monkeypatch.setattr(cache_store, "LEAST_CHUNK", 4)
    monkeypatch.setattr(cache_store.CellStore, "_attend_chunk", counted)
    given = {"input_ids": tokens(1, LENGTH).repeat(1, 2)}
    cache = hf.CellCache(ALL, config=ours.config, audit=True)
    theirs = generated(plain, DynamicCache(config=plain.config), given)
    assert torch.equal(generated(ours, cache, given, prefill_chunk_size=10), theirs)
    assert set(served) == {10, 6}  # of 46 tokens
    assert max(float(error.relative.max()) for errors in cache.errors.values() for error in errors) < 2e-6


@pytest.mark.parametrize("regroup", [False, True])
def test_a_prompt_is_grouped_once(nets: dict[str, tuple[Any, Any]], regroup: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, ours = nets["llama"]
    few_keys(monkeypatch, segment=8)
    monkeypatch.setattr(adopted, "LEAST_KEYS", 64)
    given = {"input_ids": tokens(1, LENGTH).repeat(1, 4)}
    cache = hf.CellCache(nearfield.Cells(probes=10**6, sinks=0), config=ours.config, regroup=regroup)
    theirs = generated(plain, DynamicCache(config=plain.config), given)
    assert torch.equal(generated(ours, cache, given), theirs)
    # 92 tokens, of which 11 segments are closed: spans of 8, 2 and 1, of which the first one is long enough.
    bounds = cache.layers[0].store.state.bounds[:2]
    assert (bounds == [0, 64]) is not regroup
    cache.reset()
    assert torch.equal(generated(ours, cache, given), theirs)
    assert (cache.layers[0].store.state.bounds[:2] == [0, 64]) is not regroup


def test_a_prompt_says_how_large_its_queries_are(nets: dict[str, tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = nets["llama"]
    seen = {}
    close = cache_store.CellStore.close

    def noted(self: Any, prepared: Any = None, query: Tensor | None = None) -> None:
        close(self, prepared, query)
        seen[id(self)] = query

    monkeypatch.setattr(cache_store.CellStore, "close", noted)
    cache = hf.CellCache(FEW, config=ours.config)
    with torch.no_grad():
        ours(**prompts(), past_key_values=cache)
    assert len(seen) == len(cache.layers)
    for layer in cache.layers:
        query, state = seen[id(layer.store)], layer.store.state
        assert query is not None
        assert query.shape[2] == LENGTH
        assert torch.equal(state.query_sizes, query_sizes(query, state.heads, state.key_padding))
        assert state.closed > 0


def test_assistant(nets: dict[str, tuple[Any, Any]]) -> None:
    plain, ours = nets["llama"]
    given = {"input_ids": tokens(1, LENGTH)}
    theirs = generated(plain, None, given)
    cache = hf.CellCache(ALL)
    assert torch.equal(generated(ours, cache, given, assistant_model=model("llama", num_hidden_layers=1)), theirs)


def test_one_partition_per_segment_and_an_error_that_is_told(nets: dict[str, tuple[Any, Any]]) -> None:
    _, ours = nets["llama"]
    cache = hf.CellCache(FEW, audit=True)
    generated(ours, cache, prompts())
    assert repr(cache.layers[0]) == "CellLayer(42 keys, 40 of them in 10 cells per head)"
    errors = torch.stack([error.relative.mean() for error in cache.errors[1]])
    assert 1e-3 < errors.mean() < 1.0
    (axes,) = cache.plot_errors().axes
    first, second = axes.lines
    assert list(first.get_xdata()) == [error.first for error in cache.errors[0]]
    assert torch.allclose(torch.tensor(second.get_ydata()).float(), errors)
    cache.audit = False
    mask = torch.ones(2, 45, dtype=torch.long)
    mask[0, :11] = 0
    generated(ours, cache, {"input_ids": tokens(2, 45, seed=2), "attention_mask": mask})
    assert not cache.audit
    assert len(cache.errors[0]) == NEW - 1
    assert set(cache.nbytes) == {"keys", "values", "order", "moments"}


@torch.no_grad()
def test_the_prompt_attends_by_the_registered_method() -> None:
    hf.register("nearfield-top1", nearfield.TopK(1))
    net = model("llama")
    net.set_attn_implementation("nearfield-top1")
    ids = tokens(1, LENGTH)
    cache = hf.CellCache(ALL)
    assert torch.equal(net(ids, past_key_values=cache).logits, net(ids, use_cache=False).logits)
    assert cache.layers[1].store.closed == 16


@torch.no_grad()
@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16(autocast: bool) -> None:
    plain, ours = pair("llama", NAME, torch.float32 if autocast else torch.bfloat16)
    ids = tokens(2, LENGTH + 1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        cache = hf.CellCache(ALL)
        ours(ids[:, :-1], past_key_values=cache)
        ours_last = ours(ids[:, -1:], past_key_values=cache).logits[:, -1]
        theirs = plain(ids).logits[:, -1]
    assert cache.layers[0].keys.dtype == torch.bfloat16
    assert (ours_last.float() - theirs.float()).abs().max() < 0.1


@torch.no_grad()
def test_a_prompt_is_read_once_for_several_questions(nets: dict[str, tuple[Any, Any]]) -> None:
    plain, ours = nets["llama"]
    ids = tokens(1, LENGTH)
    cache = hf.CellCache(ALL)
    ours(ids[:, :-4], past_key_values=cache)
    kept = copy.deepcopy(cache)
    theirs = generated(plain, None, {"input_ids": ids})
    assert torch.equal(generated(ours, cache, {"input_ids": ids}), theirs)
    assert torch.equal(generated(ours, kept, {"input_ids": ids}), theirs)
    kept.crop(-(kept.get_seq_length() - LENGTH + 4))
    assert kept.get_seq_length() == LENGTH - 4
    assert torch.equal(generated(ours, kept, {"input_ids": ids}), theirs)
    kept.crop(3)
    assert kept.get_seq_length() == 3
    kept.reset()
    assert kept.get_seq_length() == 0
    assert torch.equal(generated(ours, kept, {"input_ids": ids}), theirs)


@torch.no_grad()
def test_batch_entries(nets: dict[str, tuple[Any, Any]]) -> None:
    plain, ours = nets["llama"]
    ids = tokens(2, LENGTH)
    cache = hf.CellCache(ALL)
    ours(ids[:, :-1], past_key_values=cache)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([2, 1]))
    cache.reorder_cache(torch.tensor([1, 0, 1]))
    assert torch.equal(cache.layers[0].keys[0], cache.layers[0].store.keys[0])
    found = ours(ids[[0, 1, 0], -1:], past_key_values=cache).logits
    assert torch.allclose(found, plain(ids[[0, 1, 0]]).logits[:, -1:], atol=1e-5)


def test_methods_by_layer() -> None:
    cache = hf.CellCache({1: ALL, "default": FEW}, config=model("llama").config)
    assert [layer.store.method for layer in cache.layers] == [FEW, ALL]
    with pytest.raises(ValueError, match="got 'first'"):
        hf.CellCache({"first": ALL})
    told = r"attends by Cells\(...\), TopK\(...\), LazyGumbel\(...\) or Exact\(\), got Auto"
    with pytest.raises(TypeError, match=told):
        hf.CellCache(nearfield.Auto())  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{}, {"group_from": 0}, {"offload": True}, {"eps": 0.1}])
def test_an_exact_layer_reads_all_keys(nets: dict[str, tuple[Any, Any]], options: dict[str, Any]) -> None:
    plain, ours = nets["llama"]
    inputs = {"input_ids": tokens(1, LENGTH)}
    cache = hf.CellCache({0: nearfield.Exact(), "default": ALL}, config=ours.config, **options)
    for _ in range(2):
        assert torch.equal(generated(ours, cache, inputs), generated(plain, DynamicCache(), inputs))
        assert [layer.store.cells > 0 for layer in cache.layers] == [False, True]
        cache.reset()


@torch.no_grad()
def test_encoder_and_decoder() -> None:
    plain, ours = pair("bart", NAME)
    ids = tokens(2, LENGTH)
    cache = EncoderDecoderCache(hf.CellCache(ALL), DynamicCache())
    theirs = plain.generate(ids, max_new_tokens=NEW, min_new_tokens=NEW, num_beams=2, do_sample=False)
    found = ours.generate(ids, max_new_tokens=NEW, min_new_tokens=NEW, num_beams=2, do_sample=False, past_key_values=cache)
    assert torch.equal(found, theirs)


# Errors.


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_other_attention_is_refused(attention: str) -> None:
    net = model("llama")
    net.set_attn_implementation(attention)
    with pytest.raises(RuntimeError, match=r"set_attn_implementation\(\"nearfield\"\)"):
        generated(net, hf.CellCache(ALL), prompts())


def test_sliding_windows_need_the_config() -> None:
    _, ours = pair("mistral", NAME)
    with pytest.raises(ValueError, match=r"CellCache\(config=model.config\)"):
        generated(ours, hf.CellCache(ALL), prompts())
    with pytest.raises(ValueError, match="no sliding window"):
        generated(ours, hf.CellCache(ALL), {"input_ids": tokens(1, 4)})


def test_nothing_to_plot() -> None:
    with pytest.raises(ValueError, match="there are no errors to plot"):
        hf.CellCache(ALL).plot_errors()


def test_a_config_in_the_place_of_a_method() -> None:
    net = model("llama")
    for given, told in ((net.config, "model.config"), (net, "model")):
        with pytest.raises(TypeError, match=rf"write CellCache\(config=model.config\), not CellCache\({told}\)$"):
            hf.CellCache(given)


def test_a_config_that_is_none_of_a_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"got str; write CellCache\(config=model.config\)"):
        hf.CellCache(config="llama")


def test_position_bias_is_refused() -> None:
    _, ours = pair("t5", NAME)
    cache = EncoderDecoderCache(hf.CellCache(ALL), DynamicCache())
    with pytest.raises(ValueError, match="position bias"):
        ours.generate(tokens(1, 5), max_new_tokens=3, past_key_values=cache)


def test_training_is_refused() -> None:
    _, ours = pair("llama", NAME, attention_dropout=0.1)
    with pytest.raises(ValueError, match="no gradients"):
        ours(tokens(1, 5), past_key_values=hf.CellCache(ALL))
    with pytest.raises(ValueError, match=r"no dropout, got 0.1; call model.eval\(\)"), torch.no_grad():
        ours.train()(tokens(1, 5), past_key_values=hf.CellCache(ALL))


@torch.no_grad()
def test_other_masks_are_refused(nets: dict[str, tuple[Any, Any]]) -> None:
    _, ours = nets["llama"]
    mask = torch.zeros(1, 1, 5, 5)
    with pytest.raises(ValueError, match=r"padding only, got a mask of torch\.float32"):
        ours(tokens(1, 5), attention_mask=mask, past_key_values=hf.CellCache(ALL))


@torch.no_grad()
def test_a_cache_looks_at_its_error(nets: dict[str, tuple[Any, Any]]) -> None:
    _, ours = nets["llama"]
    cache = hf.CellCache(FEW, config=ours.config, eps=0.01)
    assert {layer: guard.looks for layer, guard in cache.guards.items()} == {0: 0, 1: 0}
    ours(tokens(1, LENGTH), past_key_values=cache)
    ours.generate(tokens(1, LENGTH + 1), past_key_values=cache, max_new_tokens=4, do_sample=False)
    for guard in cache.guards.values():
        assert guard.looks == 1
        assert guard.error is not None
        assert guard.error <= 0.01
    caches = []
    for eps in (None, 0.02):
        caches.append(hf.CellCache(FEW, config=ours.config, eps=eps))
        ours(tokens(1, LENGTH), past_key_values=caches[-1])
    both = hf.CellCache.batch(caches)
    hf.generate(ours, [tokens(1, LENGTH + 1)[0]] * 2, cache=both, max_new_tokens=2, do_sample=False)
    assert {guard.eps for guard in both.guards.values()} == {0.02}
    with pytest.raises(ValueError, match=r"eps=0.1 is for Cells\(...\) only"):
        hf.CellCache(nearfield.TopK(4), eps=0.1)


@torch.no_grad()
def test_a_compiled_model_generates_the_same(nets: dict[str, tuple[Any, Any]]) -> None:
    """What lies between the attention of two layers is compiled, once for the prompt and once for all steps."""
    graphs = []
    _, ours = nets["llama"]
    compiled: Any = torch.compile(copy.deepcopy(ours), backend="eager")
    counters.clear()
    found = []
    for net in (ours, compiled):
        cache = hf.CellCache(FEW, config=ours.config)
        logits, tokens_so_far = net(tokens(1, LENGTH), past_key_values=cache).logits, []
        for _ in range(10):
            tokens_so_far.append(logits[:, -1].argmax(-1, keepdim=True))
            positions = torch.tensor([[cache.get_seq_length()]])
            logits = net(tokens_so_far[-1], position_ids=positions, past_key_values=cache).logits
            graphs.append(counters["stats"]["unique_graphs"])
        found.append(torch.cat(tokens_so_far, 1))
    assert torch.equal(*found)
    assert 0 == graphs[9] < graphs[11] == graphs[-1]


@torch.no_grad()
def test_compilation_in_one_piece_is_refused(nets: dict[str, tuple[Any, Any]]) -> None:
    _, ours = nets["llama"]
    with pytest.raises(Exception, match="CellCache"):
        torch.compile(copy.deepcopy(ours), fullgraph=True, backend="eager")(tokens(1, 5), past_key_values=hf.CellCache(ALL))


def test_missing_transformers_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.cache_utils", None)
    monkeypatch.delitem(sys.modules, "nearfield.hf.cache")
    monkeypatch.delattr(hf, "cache")
    with pytest.raises(ImportError, match=r"pip install 'nearfield\[transformers\]'"):
        hf.CellCache()
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = hf.Nothing


@torch.no_grad()
def test_memory_is_free_as_soon_as_nobody_has_the_cache(nets: dict[str, tuple[Any, Any]]) -> None:
    """Not when the garbage collector comes by: a cache that held itself would stay on a card until then."""
    net = nets["llama"][1]
    gc.collect()
    gc.disable()
    try:
        for config in (None, net.config):
            cache = hf.CellCache(nearfield.Cells(segment=8, cell_size=4, probes=2), config=config)
            net(tokens(1, 30), past_key_values=cache)
            left = weakref.ref(cache), weakref.ref(cache.layers[1].store)  # type: ignore[union-attr]
            del cache
            assert [x() for x in left] == [None, None]
    finally:
        gc.enable()
