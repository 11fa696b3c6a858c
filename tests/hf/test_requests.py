"""Requests of different lengths in one cache: each gets what it gets alone, and nothing is padded."""

from __future__ import annotations

import copy
import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import transformers
from hf_models import model, tokens

import nearfield
from nearfield import hf
from nearfield.cells.cache import CellStore
from nearfield.hf.cache import RequestLayer
from nearfield.hf.generation import read_prompt
from nearfield.hf.requests import RequestStores

NAME = "nearfield-requests"
FEW = nearfield.Cells(probes=2, segment=8, cell_size=4, sinks=3, window=4)
LENGTHS = (31, 5, 1, 18)
NO_CACHE = transformers.GenerationConfig(use_cache=False, max_new_tokens=3)
NO_CHUNKS = transformers.GenerationConfig(prefill_chunk_size=2.5, max_new_tokens=3)


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    hf.register(NAME, nearfield.Cells(cell_size=4, segment=8, probes=2, sinks=0))


@pytest.fixture(scope="module")
def net() -> Any:
    made = model("llama", torch.float64)
    made.set_attn_implementation(NAME)
    return made


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    return [(tokens(1, 40)[0, :length] + number) % 90 + 3 for number, length in enumerate(lengths)]


def read(net: Any, ids: Tensor, method: Any = FEW) -> hf.CellCache:
    cache = hf.CellCache(method, config=net.config)
    with torch.no_grad():
        read_prompt(net, ids[:-1], cache)
    return cache


def alone(net: Any, ids: Tensor, new: int, method: Any = FEW) -> Tensor:
    """As Transformers does it, with the prompt but for its last token read before."""
    found: Tensor = net.generate(ids[None], past_key_values=read(net, ids, method), max_new_tokens=new, do_sample=False)
    return found[0]


@pytest.mark.parametrize("method", [FEW, nearfield.TopK(6)], ids=["cells", "index"])
def test_every_request_gets_what_it_gets_alone(net: Any, method: Any) -> None:
    cache = hf.CellCache.batch([read(net, ids, method) for ids in prompts()])
    found = hf.generate(net, prompts(), cache=cache, max_new_tokens=20, do_sample=False)
    for ids, own in zip(prompts(), found, strict=True):
        assert torch.equal(own, alone(net, ids, 20, method))
    assert cache.lengths == [length + 19 for length in LENGTHS]
    assert cache.get_seq_length() == max(LENGTHS) + 19
    keys = cache.layers[0].keys
    assert keys is not None
    assert keys.shape[2] == max(LENGTHS) + 19
    assert not keys[1, :, : -cache.lengths[1]].any()
    assert keys[1, :, -cache.lengths[1] :].any(-1).all()


def test_prompts_are_read_here_if_nobody_has(net: Any) -> None:
    for chunk in (None, 7):
        options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "prefill_chunk_size": chunk}
        expected = [hf.generate(net, [ids], **options)[0] for ids in prompts()]
        found = hf.generate(net, [x.tolist() for x in prompts()], **options)
        assert all(map(torch.equal, found, expected))
    whole = hf.generate(net, prompts()[0], max_new_tokens=6, do_sample=False, cache=hf.CellCache(FEW, config=net.config))
    theirs = net.generate(
        prompts()[0][None], max_new_tokens=6, do_sample=False, past_key_values=hf.CellCache(FEW, config=net.config)
    )
    assert torch.equal(whole, theirs[0])


def test_a_batch_padded_on_the_left_is_a_list_of_requests(net: Any) -> None:
    own, options = prompts(), {"max_new_tokens": 6, "do_sample": False}
    ids, mask = torch.full((4, 31), 7), torch.zeros(4, 31, dtype=torch.long)
    for row, ones, prompt in zip(ids, mask, own, strict=True):
        row[31 - len(prompt) :], ones[31 - len(prompt) :] = prompt, 1
    found = hf.generate(net, ids, attention_mask=mask, **options)
    assert torch.equal(found[:, :31], ids)
    for row, expected, prompt in zip(found, hf.generate(net, own, **options), own, strict=True):
        assert torch.equal(row[31 - len(prompt) :], expected)
    for more in ({"num_beams": 2}, {"cache": hf.CellCache(FEW, config=net.config)}):
        assert hf.generate(net, ids, attention_mask=mask, **options, **more).shape == (4, 37)
    gaps = mask.clone()
    gaps[0, 3] = 0
    assert hf.generate(net, ids, attention_mask=gaps, **options).shape == (4, 37)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_padding_before_the_longest_request(family: str) -> None:
    """As where batches are padded to a length that is given."""
    made = model(family, torch.float64)
    made.set_attn_implementation(NAME)
    lengths, new, padding = (20, 31, 9), 8, 5
    own = [x[:length] for x, length in zip(prompts((31, 31, 31)), lengths, strict=True)]
    ids, mask = torch.full((3, 31 + padding), 7), torch.zeros(3, 31 + padding, dtype=torch.long)
    for row, ones, prompt in zip(ids, mask, own, strict=True):
        row[-len(prompt) :], ones[-len(prompt) :] = prompt, 1
    options: dict[str, Any] = {"max_new_tokens": new, "do_sample": False}
    found = hf.generate(made, ids, attention_mask=mask, **options)
    assert torch.equal(found[:, :-new], ids)
    for row, prompt in zip(found, own, strict=True):
        assert torch.equal(row[-len(prompt) - new :], hf.generate(made, [prompt], **options)[0])
    cache = hf.CellCache.batch([read(made, x) for x in own], padding=padding)
    assert (cache.lengths, cache.get_seq_length()) == ([length - 1 for length in lengths], 30 + padding)
    assert torch.equal(cache.attention_mask(), mask)
    again = hf.generate(made, own, cache=copy.deepcopy(cache), **options)
    assert all(torch.equal(x, alone(made, prompt, new)) for x, prompt in zip(again, own, strict=True))
    # A batch of one, in which all that stands before its only request is padding.
    assert torch.equal(hf.generate(made, ids[:1], attention_mask=mask[:1], **options)[0], found[0])
    cache.batch_select_indices(torch.tensor([2, 0]))
    assert cache.get_seq_length() == 19 + padding
    if family == "llama":
        cache.replace(0, read(made, own[1]))
        assert cache.get_seq_length() == 30 + padding
        left = torch.stack([ids[1], ids[0]])
        again = made.generate(left, attention_mask=mask[[1, 0]], past_key_values=cache, **options)
        for row, prompt in zip(again, (own[1], own[0]), strict=True):
            assert torch.equal(row[-len(prompt) - new :], alone(made, prompt, new))
        assert "2 requests of 27 to 38 keys" in repr(cache.layers[0])


def test_a_cache_that_has_the_prompt_already_is_refused(net: Any) -> None:
    """Transformers would append the prompt to itself."""
    ids, options = prompts()[0], {"max_new_tokens": 6, "do_sample": False}
    cache = read(net, ids)
    once = hf.generate(net, ids, cache=cache, **options)
    assert cache.get_seq_length() == 36
    for again in (ids, ids[None], once[:36]):
        length = again.shape[-1]
        with pytest.raises(
            ValueError, match=rf"cache has 36 tokens already.*of {length}; .*cache\.crop\({length - 1}\), or pass"
        ):
            hf.generate(net, again, cache=cache, **options)
    with pytest.raises(ValueError, match=r"go back with cache\.reset\(\), or pass a new cache"):
        hf.generate(net, ids[:1], cache=cache, **options)
    with pytest.raises(
        ValueError, match=r"but the last, \[30\], got \[36\]; .*of caches that have read no more, or leave it out"
    ):
        hf.generate(net, [ids], cache=cache, **options)
    assert cache.get_seq_length() == 36
    # What it says helps: a chat goes on, and a prompt is continued again.
    whole = read(net, ids, nearfield.Cells(probes=99, segment=8, cell_size=4))
    more = hf.generate(net, hf.generate(net, ids, cache=whole, **options), cache=whole, **options)
    assert torch.equal(
        more, hf.generate(net, ids, max_new_tokens=12, do_sample=False, cache=read(net, ids, whole.methods["default"]))
    )
    whole.crop(30)
    assert torch.equal(hf.generate(net, ids, cache=whole, **options), more[:37])
    whole.reset()
    hf.generate(net, ids, cache=whole, **options)
    assert whole.get_seq_length() == 36


def test_a_cache_that_has_a_window_and_the_prompt_is_refused() -> None:
    made = model("gemma3", torch.float64)
    made.set_attn_implementation(NAME)
    cache = hf.CellCache(config=made.config)
    hf.generate(made, prompts()[0], cache=cache, max_new_tokens=2, do_sample=False)
    with pytest.raises(ValueError, match=r"cache has 32 tokens already.*cache\.reset\(\)"):
        hf.generate(made, prompts()[0], cache=cache, max_new_tokens=2, do_sample=False)


def test_a_request_ends_at_its_own_end(net: Any) -> None:
    free = hf.generate(net, prompts(), max_new_tokens=12, do_sample=False)
    end = int(free[0][LENGTHS[0] + 3])
    found = hf.generate(net, prompts(), max_new_tokens=12, do_sample=False, eos_token_id=end)
    for ids, own, whole in zip(prompts(), found, free, strict=True):
        new = whole[len(ids) :].tolist()
        kept = new.index(end) + 1 if end in new else len(new)
        assert torch.equal(own, whole[: len(ids) + kept])


def test_steps_by_hand_and_requests_that_are_replaced(net: Any) -> None:
    ids = prompts()
    cache = hf.CellCache.batch([read(net, x) for x in ids])
    other = tokens(1, 40)[0, 3:29]
    for round_ in range(2):
        batch = torch.stack([x[-1:] for x in ids])
        positions = torch.tensor(cache.lengths)[:, None]
        with torch.no_grad():
            logits = net(batch, cache.attention_mask(), positions, past_key_values=cache).logits[:, -1]
        for own, x in zip(logits, ids, strict=True):
            single = read(net, x)
            with torch.no_grad():
                torch.testing.assert_close(own, net(input_ids=x[None, -1:], past_key_values=single).logits[0, -1])
        if round_ == 0:
            cache.crop(-1)
            assert cache.lengths == [length - 1 for length in LENGTHS]
            cache.replace(1, read(net, other))
            ids[1] = other
            assert cache.lengths[1] == len(other) - 1


def test_order_memory_audit_and_reset(net: Any) -> None:
    cache = hf.CellCache.batch([read(net, x) for x in prompts()])
    parts = [read(net, x).nbytes.get("keys", 0) for x in prompts()]
    assert cache.nbytes["keys"] == sum(parts)
    cache.reorder_cache(torch.tensor([3, 0, 1, 2]))
    assert cache.lengths == [17, 30, 4, 0]
    cache.audit = True
    assert cache.audit
    with torch.no_grad():
        net(tokens(4, 1), cache.attention_mask(), torch.tensor(cache.lengths)[:, None], past_key_values=cache)
    assert len(cache.errors[0]) == 4
    assert "4 requests of 1 to 31 keys" in repr(cache.layers[0])
    with pytest.raises(ValueError, match="cannot be repeated"):
        cache.batch_repeat_interleave(2)
    cache.reset()
    assert cache.get_seq_length() == 0


def test_a_step_that_fails_in_one_request_has_happened_to_none(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    both = RequestStores([read(net, x).layers[0].store for x in prompts((9, 12))])
    before, new = both.keys, torch.ones(2, 2, 1, 8, dtype=torch.float64)
    append, calls = CellStore.append, list[int]()

    def fails(store: CellStore, key: Tensor, value: Tensor) -> None:
        calls.append(store.length)
        if len(calls) == 2:
            raise KeyboardInterrupt
        append(store, key, value)

    with monkeypatch.context() as patched:
        patched.setattr(CellStore, "append", fails)
        with pytest.raises(KeyboardInterrupt):
            both.append(new, new)
    assert calls == both.lengths == [8, 11]
    assert before is not None
    assert torch.equal(both.keys, before)  # type: ignore[arg-type]
    both.append(new, new)
    assert both.lengths == [9, 12]


def test_a_crop_that_ends_half_way_is_not_gone_on_with(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = hf.CellCache.batch([read(net, x) for x in prompts((9, 12))])
    crop, calls = CellStore.crop, list[int]()

    def fails(store: CellStore, length: int) -> None:
        calls.append(length)
        if len(calls) == 4:
            raise KeyboardInterrupt
        crop(store, length)

    with monkeypatch.context() as patched:
        patched.setattr(CellStore, "crop", fails)
        with pytest.raises(KeyboardInterrupt):
            cache.crop(-1)
    for use in (lambda: cache.crop(-1), lambda: cache.reorder_cache(torch.tensor([1, 0]))):
        with pytest.raises(RuntimeError, match=r"crop was interrupted.*call reset"):
            use()
    cache.reset()
    assert cache.lengths == [0, 0]


def test_settings_of_the_model_count_where_those_given_are_silent(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"generation_config": transformers.GenerationConfig(max_new_tokens=12, do_sample=False)}
    free = hf.generate(net, prompts(), **options)
    end = int(free[0][LENGTHS[0] + 3])
    monkeypatch.setattr(net.generation_config, "eos_token_id", end)
    found = hf.generate(net, prompts(), **options)
    new = free[0][LENGTHS[0] :].tolist()
    assert len(found[0]) == LENGTHS[0] + new.index(end) + 1
    monkeypatch.setattr(net.generation_config, "eos_token_id", None)
    penalised = hf.generate(net, prompts(), repetition_penalty=1.5, max_new_tokens=12, do_sample=False)
    for own, ids in zip(penalised, prompts(), strict=True):
        (alone,) = hf.generate(net, [ids], repetition_penalty=1.5, max_new_tokens=12, do_sample=False)
        assert torch.equal(own, alone)


def test_a_request_that_was_interrupted_is_not_taken(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layers have different lengths, which are not seen any more among longer requests."""
    update = hf.CellCache.update

    def stops(cache: Any, key: Tensor, value: Tensor, layer: int, *rest: Any, **options: Any) -> Any:
        if layer == 1:
            raise KeyboardInterrupt
        return update(cache, key, value, layer, *rest, **options)

    whole, broken = read(net, prompts()[0]), read(net, prompts()[1])
    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(hf.CellCache, "update", stops)
        with pytest.raises(KeyboardInterrupt):
            net(input_ids=tokens(1, 1), past_key_values=broken)
    both = hf.CellCache.batch([whole, read(net, prompts()[2])])
    for use in (lambda: hf.CellCache.batch([whole, broken]), lambda: both.replace(1, broken)):
        with pytest.raises(RuntimeError, match=r"have 4 to 5 tokens: .*call crop\(4\) to go on"):
            use()
    assert both.lengths == [30, 0]
    broken.crop(4)
    both.replace(1, broken)
    found = hf.generate(net, [prompts()[0], prompts()[1]], cache=both, max_new_tokens=5, do_sample=False)
    assert torch.equal(found[1], alone(net, prompts()[1], 5))
    torn = read(net, prompts()[1])
    with monkeypatch.context() as patched:
        patched.setattr(CellStore, "select", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            torn.reorder_cache(torch.tensor([0]))
    with pytest.raises(RuntimeError, match="reorder_cache was interrupted"):
        hf.CellCache.batch([whole, torn])


def test_no_request_is_replaced_after_an_interrupt(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A longer one would hide that layers have different lengths."""
    update = hf.CellCache.update

    def stops(cache: Any, key: Tensor, value: Tensor, layer: int, *rest: Any, **options: Any) -> Any:
        if layer == 1:
            raise KeyboardInterrupt
        return update(cache, key, value, layer, *rest, **options)

    ids = prompts((9, 12, 20))
    both = hf.CellCache.batch([read(net, x) for x in ids[:2]])
    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(hf.CellCache, "update", stops)
        with pytest.raises(KeyboardInterrupt):
            net(tokens(2, 1), both.attention_mask(), torch.tensor(both.lengths)[:, None], past_key_values=both)
    with pytest.raises(RuntimeError, match=r"have 11 to 12 tokens: .*call crop\(11\) to go on"):
        both.replace(0, read(net, ids[2]))
    both.crop(11)
    both.replace(0, read(net, ids[2]))
    found = hf.generate(net, [ids[2], ids[1]], cache=both, max_new_tokens=5, do_sample=False)
    for own, x in zip(found, (ids[2], ids[1]), strict=True):
        assert torch.equal(own, alone(net, x, 5))


def test_requests_are_chosen_by_number_or_by_a_mask(net: Any) -> None:
    cache = hf.CellCache.batch([read(net, x) for x in prompts()])
    for wrong in (torch.tensor([4]), torch.tensor([0, -1])):
        with pytest.raises(ValueError, match="entries must be from 0 to 3, got"):
            cache.batch_select_indices(wrong)
    assert cache.lengths == [30, 4, 0, 17]
    cache.batch_select_indices(torch.tensor([True, False, False, True]))
    assert cache.lengths == [30, 17]
    cache.batch_select_indices(torch.tensor([True, True]))
    assert cache.lengths == [30, 17]
    cache.batch_select_indices(torch.tensor([1]))
    assert cache.lengths == [17]


def test_a_mask_of_a_single_prompt(net: Any) -> None:
    """As the prompt, it may come without a dimension for the batch."""
    ids, mask = prompts()[0], torch.ones(31, dtype=torch.long)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    expected = hf.generate(net, ids, **options)
    assert torch.equal(hf.generate(net, ids, attention_mask=mask, **options), expected)
    mask[:13] = 0
    hidden = hf.generate(net, ids[None], attention_mask=mask[None], **options)[0]
    assert torch.equal(hf.generate(net, ids, attention_mask=mask, **options), hidden)
    assert torch.equal(hidden[13:], hf.generate(net, ids[13:], **options))


def test_bad_requests(net: Any) -> None:
    cache = hf.CellCache.batch([read(net, x) for x in prompts((9, 12))])
    plain = model("llama")
    bad: list[tuple[str, Any]] = [
        ("has registered, and this model has 'sdpa'", lambda: hf.generate(plain, prompts())),
        ("no prompts", lambda: hf.generate(net, [])),
        ("prompt 1 must be at least one token", lambda: hf.generate(net, [[1], []])),
        ("tokenize texts first", lambda: hf.generate(net, ["hello"])),
        ("token ids", lambda: hf.generate(net, torch.randn(3))),
        ("token ids", lambda: hf.generate(net, torch.ones(1, 3, dtype=torch.bool))),
        (r"got torch.int64 of shape \(1, 0\)", lambda: hf.generate(net, torch.ones(1, 0).long())),
        ("prompts is on the device meta", lambda: hf.generate(net, prompts()[0].to("meta"))),
        ("prompt 1 is on the device meta", lambda: hf.generate(net, [[1], prompts()[0].to("meta")])),
        ("pass a CellCache as cache=", lambda: hf.generate(net, prompts()[0], past_key_values=cache)),
        ("decodes with a cache; leave it out", lambda: hf.generate(net, prompts()[0], use_cache=False)),
        ("decodes with a cache", lambda: hf.generate(net, prompts(), generation_config=NO_CACHE)),
        ("attention_mask is not for a list", lambda: hf.generate(net, prompts(), attention_mask=torch.ones(1))),
        (r"but the last, \[30, 4, 0, 17\], got \[8, 11\]", lambda: hf.generate(net, prompts(), cache=cache)),
        ("holds 2 requests, but the batch has 3", lambda: net(input_ids=torch.ones(3, 1).long(), past_key_values=cache)),
        ("padding must be", lambda: hf.CellCache.batch([read(net, prompts()[0])], padding=-1)),
        ("padding must be at most 2147483647", lambda: hf.CellCache.batch([read(net, prompts()[0])], padding=2**70)),
        ("prefill_chunk_size must be a positive", lambda: hf.generate(net, prompts(), prefill_chunk_size=-3)),
        ("prefill_chunk_size must be a positive", lambda: hf.generate(net, prompts()[0], prefill_chunk_size=0)),
        ("prefill_chunk_size must be at most 2147483647", lambda: hf.generate(net, prompts(), prefill_chunk_size=2**70)),
        ("prefill_chunk_size must be a positive", lambda: hf.generate(net, prompts(), generation_config=NO_CHUNKS)),
        ("no caches", lambda: hf.CellCache.batch([])),
        ("requests of its own", lambda: hf.CellCache.batch([cache])),
        ("cannot be watched together", lambda: cache.watch(None)),
        ("from 0 to 1, got 2", lambda: cache.replace(2, read(net, prompts()[0]))),
        ("made by CellCache.batch", lambda: read(net, prompts()[0]).replace(0, cache)),
        ("one sequence, got a batch of 2", lambda: hf.CellCache.batch([batch_of_two(net)])),
        ("got one of them twice", lambda: hf.CellCache.batch([read(net, prompts()[0])] * 2)),
        ("num_beams=2 needs prompts of one length", lambda: hf.generate(net, prompts(), num_beams=2)),
        ("cannot remove 9 keys", lambda: cache.crop(-9)),
        ("knows its mask", lambda: read(net, prompts()[0]).attention_mask()),
        ("padded to 12", lambda: net(torch.ones(2, 1).long(), torch.ones(2, 12).long(), past_key_values=cache)),
    ]
    for message, call in bad:
        with torch.no_grad(), pytest.raises(ValueError, match=message):
            call()
        cache = hf.CellCache.batch([read(net, x) for x in prompts((9, 12))])
    with pytest.raises(TypeError, match="a CellCache of its own, got int"):
        hf.CellCache.batch([3])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"prompts must be a dense tensor, .* pass prompts.to_dense\(\)"):
        hf.generate(net, prompts()[0].to_sparse())
    with pytest.raises(TypeError, match=r"heavy must be what counts, such as HeavyKeys\(length\), or None, got 3"):
        read(net, prompts()[0]).watch({0: 3})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="must be a CellCache or None, got str"):
        hf.generate(net, prompts()[0], cache="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="causal language model"):
        hf.generate(3, prompts())
    with pytest.raises(TypeError, match="or a list of them, got int"):
        hf.generate(net, 3)  # type: ignore[arg-type]
    assert isinstance(cache.layers[0], RequestLayer)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_tokens_in_any_integers(net: Any, dtype: torch.dtype) -> None:
    ids = prompts()[0]
    expected = hf.generate(net, ids, max_new_tokens=3, do_sample=False)
    for given in (ids, ids[None]):
        found = hf.generate(net, given.to(dtype), max_new_tokens=3, do_sample=False)
        assert found.dtype == torch.int64
        assert torch.equal(found.view(-1), expected)


def batch_of_two(net: Any) -> hf.CellCache:
    cache = hf.CellCache(FEW, config=net.config)
    with torch.no_grad():
        net(input_ids=tokens(2, 9), past_key_values=cache)
    return cache


def test_layers_with_a_window_become_a_batch_of_their_own() -> None:
    """Where every request fills the window; the longest one leaves, and the others are served as before."""
    net = model("gemma3", torch.float64)
    net.set_attn_implementation(NAME)
    window = net.config.sliding_window
    ids = [(tokens(1, 90)[0, :length] + number) % 90 + 3 for number, length in enumerate((window + 9, window + 40, window + 1))]
    found = hf.generate(net, ids, cache=hf.CellCache.batch([read(net, x) for x in ids]), max_new_tokens=6, do_sample=False)
    for own, x in zip(found, ids, strict=True):
        assert torch.equal(own, alone(net, x, 6))
    cache = hf.CellCache.batch([read(net, x) for x in ids])
    assert {type(layer).__name__ for layer in cache.layers} == {"RequestLayer", "DynamicSlidingWindowLayer"}
    cache.batch_select_indices(torch.tensor([2, 0]))
    left = [ids[2], ids[0]]
    for own, x in zip(hf.generate(net, left, cache=cache, max_new_tokens=6, do_sample=False), left, strict=True):
        assert torch.equal(own, alone(net, x, 6))
    with pytest.raises(ValueError, match="with sliding windows cannot be replaced; make another batch"):
        cache.replace(0, read(net, ids[1]))
    short = [read(net, ids[0]), read(net, ids[1][: window - 3])]
    with pytest.raises(ValueError, match=rf"a window of {window} tokens, and request 1 has fewer: .*continue it by itself"):
        hf.CellCache.batch(short)
