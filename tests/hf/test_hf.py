"""Transformers: with all cells opened, nearfield gives what SDPA gives, up to rounding."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")

import transformers
from hf_models import model, pair, tokens
from transformers import masking_utils

import nearfield
from nearfield import exact, hf
from nearfield.chunks import BLOCK_BYTES
from nearfield.hf import calls, masks
from nearfield.hf.masks import LazyMask, make_mask
from nearfield.hf.register import AttentionFunction

DECODERS = ("llama", "qwen2", "mistral", "gemma2", "gemma3", "gpt2")
ENCODER_DECODERS = ("bart", "t5")
LENGTH = 23
NEAR = nearfield.Cells(cell_size=4, segment=8, probes=10**6, sinks=0)
"""Sequences of these lengths have several segments and cells, and all cells are opened."""
METHODS = {"nearfield-exact": nearfield.Exact(), "nearfield-near": NEAR, "nearfield": None}
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 0.05}
"""Of logits with a standard deviation of .7. In bfloat16, SDPA is off by up to .044."""


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    for name, method in METHODS.items():
        hf.register(name, method)


@pytest.fixture(params=METHODS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@functools.cache
def _built(family: str, dtype: torch.dtype) -> tuple[Any, Any]:
    return pair(family, "nearfield", dtype)


def shared_pair(family: str, name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """`pair`, built once for all tests that leave the models as they are."""
    plain, ours = _built(family, dtype)
    ours.set_attn_implementation(name)
    return plain, ours


def assert_close(ours: Tensor, theirs: Tensor, where: Tensor | None = None) -> None:
    """Equal up to rounding, where `where` `[batch, length]` is True."""
    assert ours.dtype == theirs.dtype
    difference = (ours.float() - theirs.float()).abs().amax(-1)
    if where is not None:
        difference = difference[where.bool()]
    assert difference.max() <= ROUNDING[ours.dtype]


def padded(side: str, batch: int = 2, length: int = LENGTH) -> Tensor:
    """An attention mask with padding in the first entry."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, slice(0, 7) if side == "left" else slice(length - 7, length)] = 0
    return mask


def inputs(family: str, mask: Tensor | None = None) -> dict[str, Any]:
    given: dict[str, Any] = {"input_ids": tokens(2, LENGTH)}
    if mask is not None:
        given["attention_mask"] = mask
    if family in ENCODER_DECODERS:
        given["decoder_input_ids"] = tokens(2, 11, seed=2)
    return given


@torch.no_grad()
def logits(net: Any, **given: Any) -> Tensor:
    return net(**given).logits


# One pass over whole sequences.


@pytest.mark.parametrize("family", [*DECODERS, *ENCODER_DECODERS, "bert"])
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_logits(family: str, name: str, padding: str) -> None:
    plain, ours = shared_pair(family, name)
    mask = None if padding == "none" else padded(padding)
    given = inputs(family, mask)
    assert_close(logits(ours, **given), logits(plain, **given), None if family in ENCODER_DECODERS else mask)


@pytest.mark.parametrize("family", [*DECODERS, *ENCODER_DECODERS, "bert"])
def test_bfloat16(family: str, name: str) -> None:
    plain, ours = shared_pair(family, name, torch.bfloat16)
    given = inputs(family, padded("left"))
    where = torch.ones(2, 11) if family in ENCODER_DECODERS else given["attention_mask"]
    in_bfloat16 = [logits(net, **given)[where.bool()] for net in (ours, plain)]
    in_float32 = logits(shared_pair(family, name)[0], **given)[where.bool()]
    our_error, their_error = ((x - in_float32).abs().max() for x in in_bfloat16)
    assert our_error <= 2 * their_error
    if family == "t5":  # it is chaotic in bfloat16: both errors are as large as the logits
        assert_close(*in_bfloat16)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_autocast(family: str, name: str) -> None:
    plain, ours = shared_pair(family, name)
    given = inputs(family, padded("right"))
    with torch.autocast("cpu", torch.bfloat16):
        a, b = logits(ours, **given), logits(plain, **given)
    assert_close(a.bfloat16(), b.bfloat16(), given["attention_mask"])


@pytest.mark.parametrize("family", DECODERS)
def test_packed_sequences(family: str, name: str) -> None:
    plain, ours = shared_pair(family, name)
    lengths = ([9, 1, 13], [14, 9])
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    given = {"input_ids": tokens(2, LENGTH), "position_ids": positions, "use_cache": False}
    packed = logits(ours, **given)
    assert_close(packed, logits(plain, **given))
    alone = logits(ours, input_ids=given["input_ids"][1:, 14:], use_cache=False)
    assert_close(packed[1:, 14:], alone)


@pytest.mark.parametrize("kind", ["boolean", "float"])
def test_masks_of_the_user(name: str, kind: str) -> None:
    """A prefix that sees itself in both directions, given as a tensor."""
    plain, ours = shared_pair("llama", name)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    mask[:8, :8] = True
    mask = mask.expand(2, 1, -1, -1)
    if kind == "float":
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    given = {"input_ids": tokens(2, LENGTH), "attention_mask": mask}
    assert_close(logits(ours, **given), logits(plain, **given))


# Queries at the end of keys.


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", ["none", "left"])
def test_chunked_prefill(family: str, name: str, cache: str, padding: str) -> None:
    plain, ours = shared_pair(family, name)
    ids, mask = tokens(2, LENGTH), torch.ones(2, LENGTH, dtype=torch.long) if padding == "none" else padded("left")
    want = logits(plain, input_ids=ids, attention_mask=mask, position_ids=_positions(mask))
    if cache == "static":
        past = transformers.StaticCache(config=ours.config, max_cache_len=40)
    else:
        past = transformers.DynamicCache(config=ours.config)
    parts = []
    for start, stop in ((0, 8), (8, 12), (12, 22), (22, LENGTH)):
        here = {"input_ids": ids[:, start:stop], "position_ids": _positions(mask)[:, start:stop], "past_key_values": past}
        parts.append(logits(ours, attention_mask=mask[:, :stop], **here))
    assert_close(torch.cat(parts, 1), want, mask)


def _positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(1) - 1).clamp(min=0)


OPTIONS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "dynamic cache": ({"cache_implementation": "dynamic"}, (*DECODERS, *ENCODER_DECODERS)),
    "static cache": ({"cache_implementation": "static", "disable_compile": True}, ("llama", "mistral", "gemma3", "bart")),
    "no cache": ({"use_cache": False}, ("llama", "gemma3", "t5")),
    "beams": ({"num_beams": 3}, ("llama", "gemma3", "bart")),
    "chunks": ({"prefill_chunk_size": 8}, ("llama", "mistral", "gemma3", "gpt2")),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, ("llama", "mistral", "gemma3", "gpt2")),
}
"""Ways to generate, and families: one for each kind of mask (full, window, both, cross-attention)."""


@pytest.mark.parametrize(("kind", "family"), [(kind, family) for kind, (_, families) in OPTIONS.items() for family in families])
def test_generation_is_the_same_token_for_token(kind: str, family: str) -> None:
    options = OPTIONS[kind][0]
    batch = 1 if "prompt_lookup_num_tokens" in options else 2
    plain, ours = shared_pair(family, "nearfield-near")
    given = {"input_ids": tokens(2, LENGTH)[:batch], "attention_mask": padded("left")[:batch]}
    # Random models tend to repeat themselves.
    options = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False, "no_repeat_ngram_size": 1, **options}
    want = plain.generate(**given, **options)
    assert len(want[0].unique()) > 5
    assert torch.equal(ours.generate(**given, **options), want)


# Training.


def assert_same_gradients(ours: Any, theirs: Any) -> None:
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None and b.grad is not None:
            assert (a.grad - b.grad).norm() <= 1e-4 * b.grad.norm() + 1e-6, name


TRAINED = [(family, False) for family in (*DECODERS, *ENCODER_DECODERS, "bert")]
CHECKPOINTED = [(family, True) for family in ("llama", "gemma3", "bart", "bert")]


@pytest.mark.parametrize(("family", "checkpointing"), TRAINED + CHECKPOINTED)
def test_training(family: str, checkpointing: bool) -> None:
    plain, ours = pair(family, "nearfield-near")
    given = {"input_ids": tokens(2, LENGTH), "attention_mask": padded("right"), "labels": tokens(2, LENGTH, seed=3)}
    given["labels"][given["attention_mask"] == 0] = -100
    if checkpointing:
        ours.gradient_checkpointing_enable()
    for net in (plain, ours):
        net.train()
        net(**given, use_cache=False).loss.backward()
    assert_same_gradients(ours, plain)


def test_dropout_is_drawn_again_by_checkpointing() -> None:
    net = model("llama", attention_dropout=0.3)
    net.set_attn_implementation("nearfield-exact")
    given = {"input_ids": tokens(2, LENGTH), "labels": tokens(2, LENGTH), "use_cache": False}
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            net.gradient_checkpointing_enable()
        net.train().zero_grad()
        torch.manual_seed(5)
        net(**given).loss.backward()
        gradients.append(net.model.layers[0].self_attn.q_proj.weight.grad.clone())
    torch.testing.assert_close(*gradients)
    net.eval()
    assert torch.equal(logits(net, input_ids=given["input_ids"]), logits(net, input_ids=given["input_ids"]))


# The future.


@pytest.mark.parametrize(
    ("family", "padding"), [*((family, "none") for family in DECODERS), ("llama", "left"), ("gemma3", "left"), ("gpt2", "left")]
)
def test_no_bit_depends_on_the_future(family: str, padding: str) -> None:
    """There are 44 tokens, so that the last ones see four closed segments in one span."""
    hf.register("nearfield-few", nearfield.Cells(cell_size=4, segment=8, probes=1))
    net = shared_pair(family, "nearfield-few")[1]
    mask = None if padding == "none" else padded("left", length=44)
    ids = tokens(2, 44)
    before = logits(net, input_ids=ids, attention_mask=mask)
    for at in (43, 27, 8):
        changed = ids.clone()
        changed[:, at:] = tokens(2, 44, seed=9)[:, at:]
        after = logits(net, input_ids=changed, attention_mask=mask)
        assert torch.equal(after[:, :at], before[:, :at])
        assert not torch.equal(after[:, at:], before[:, at:])


# Choosing methods.


class Recorder(nearfield.Method):
    """Exact attention that counts its calls."""

    any_mask = True

    def __init__(self) -> None:
        self.calls = 0

    def run(self, problem: Any, call: Any) -> Any:
        self.calls += 1
        return nearfield.Exact().run(problem, call)


def test_methods_per_layer() -> None:
    first, others = Recorder(), Recorder()
    hf.register("nearfield-layers", {0: first, "default": others})
    plain, ours = pair("llama", "nearfield-layers", num_hidden_layers=3)
    assert_close(logits(ours, **inputs("llama")), logits(plain, **inputs("llama")))
    assert (first.calls, others.calls) == (1, 2)


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_windows_need_no_method(family: str) -> None:
    recorder = Recorder()
    hf.register("nearfield-window", recorder)
    _, ours = shared_pair(family, "nearfield-window")
    logits(ours, **inputs(family))
    assert recorder.calls == (0 if family == "mistral" else 1)


def test_the_method_serves_whole_sequences_and_long_ends() -> None:
    recorder = Recorder()
    hf.register("nearfield-ends", recorder)
    _, ours = shared_pair("llama", "nearfield-ends")
    past = transformers.DynamicCache(config=ours.config)
    served = []
    for start, stop in ((0, 10), (10, 21), (21, 23), (23, 24)):
        logits(ours, input_ids=tokens(1, 24)[:, start:stop], past_key_values=past)
        served.append(recorder.calls)
    assert served == [2, 4, 4, 4]


def test_a_method_that_is_not_exact_is_really_used() -> None:
    hf.register("nearfield-top2", nearfield.TopK(2))
    plain, ours = shared_pair("llama", "nearfield-top2")
    assert (logits(ours, **inputs("llama")) - logits(plain, **inputs("llama"))).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "sdpa"}, "taken"),
        ({"name": "eager"}, "taken"),
        ({"name": "flash-nearfield"}, "must not contain 'flash'"),
        ({"name": "near/field"}, "must not contain '/'"),
        ({"name": ""}, "must be a string"),
        ({"method": {"first": nearfield.Exact()}}, "got 'first'"),
        ({"method": {-1: nearfield.Exact()}}, "got -1"),
    ],
)
def test_bad_registrations(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hf.register(**arguments)


def test_methods_are_checked_when_registered() -> None:
    with pytest.raises(TypeError, match=r"method\[1\] must be a method such as"):
        hf.register(method={1: "exact"})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="method must be a method such as"):
        hf.register(method=nearfield.Exact)  # type: ignore[arg-type]


def test_missing_transformers_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'nearfield\[transformers\]'"):
        hf.register()


def test_from_pretrained(tmp_path: Any) -> None:
    plain = model("llama")
    plain.save_pretrained(tmp_path)
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="nearfield-near").eval()
    assert ours.config._attn_implementation == "nearfield-near"
    assert_close(logits(ours, **inputs("llama")), logits(plain, **inputs("llama")))


CAPPED = {"gemma2": {"attn_logit_softcapping": 0.05}, "gpt_oss": {}}
"""Models that ask for soft-capped logits, and for sinks that are parameters."""


@pytest.mark.parametrize("family", CAPPED)
@pytest.mark.parametrize(
    "method", [nearfield.Exact(), nearfield.Cells(cell_size=4, probes=200, segment=16), nearfield.TopK(k=400)]
)
def test_soft_caps_and_sinks_are_honoured(family: str, method: Any) -> None:
    net = model(family, **CAPPED[family])
    for name, parameter in net.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=2.0)
    found = []
    hf.register("nearfield-logits", method)
    for implementation in ("eager", "nearfield-logits"):
        net.set_attn_implementation(implementation)
        net.zero_grad()
        out = net(**inputs(family)).logits
        out.square().mean().backward()
        grads = {name: parameter.grad for name, parameter in net.named_parameters() if parameter.grad is not None}
        found.append({"out": out.detach(), **{name: grad.clone() for name, grad in grads.items()}})
    assert found[0].keys() == found[1].keys()
    for name, want in found[0].items():
        torch.testing.assert_close(found[1][name], want, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("family", CAPPED)
def test_a_cell_cache_refuses_soft_caps_and_sinks(family: str) -> None:
    net = model(family, **CAPPED[family])
    net.requires_grad_(False)
    net.set_attn_implementation("nearfield")
    with pytest.raises(
        ValueError, match=r"this model asks for .* which a cell cache does not have; use Transformers' DynamicCache"
    ):
        net(**inputs(family), past_key_values=hf.CellCache(config=net.config))


# What is refused.


@pytest.mark.parametrize("option", ["indices", "block_indices", "cache", "output_attentions"])
def test_other_options_are_refused(option: str) -> None:
    function = AttentionFunction({"default": nearfield.Exact()})
    x = torch.randn(1, 2, 5, 4)
    with pytest.raises(ValueError, match=rf"\({option}\)"):
        function(torch.nn.Module(), x, x, x, None, **{option: True})


def test_layers_without_a_number_cannot_choose() -> None:
    function = AttentionFunction({"default": nearfield.Exact(), 0: nearfield.Exact()})
    x = torch.randn(1, 2, 5, 4)
    with pytest.raises(ValueError, match="register one method for all layers"):
        function(torch.nn.Module(), x, x, x, None)


def test_masks_of_another_size_are_refused() -> None:
    call = calls.LayerCall(*(torch.randn(1, 2, 5, 4) for _ in range(3)))
    with pytest.raises(ValueError, match="made for 6 queries and 6 keys, but the layer has 5 and 5"):
        calls.serve(call, LazyMask(1, 6, 6, masks.Pattern()), False)
    with pytest.raises(ValueError, match="got \\(1, 1, 5, 6\\)"):
        calls.serve(call, torch.ones(1, 1, 5, 6, dtype=torch.bool), False)


# Masks.


def checkered(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx % 3 != q_idx % 2


MASK_FUNCTIONS: dict[str, Callable[[], Any]] = {
    "causal": lambda: masking_utils.causal_mask_function,
    "open": lambda: masking_utils.bidirectional_mask_function,
    "window": lambda: masking_utils.sliding_window_causal_mask_function(5),
    "wide window": lambda: masking_utils.sliding_window_causal_mask_function(500),
    "both sides": lambda: masking_utils.sliding_window_bidirectional_mask_function(3),
    "chunks": lambda: masking_utils.chunked_causal_mask_function(6, torch.tensor([7, 0])),
    "custom and": lambda: masking_utils.and_masks(masking_utils.causal_mask_function, checkered),
    "custom or": lambda: masking_utils.or_masks(masking_utils.causal_mask_function, checkered),
}


# Only functions that stay whole are evaluated, with vmap or without.
EVALUATED = [(kind, True) for kind in ("chunks", "custom and", "custom or")]


@pytest.mark.parametrize(("kind", "use_vmap"), [*((kind, False) for kind in MASK_FUNCTIONS), *EVALUATED])
@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize(("first_query", "first_key", "extra"), [(0, 0, 0), (0, 0, 9), (4, 0, 4), (4, 0, 9), (6, 2, 4)])
def test_any_mask(
    kind: str, use_vmap: bool, padding: str, first_query: int, first_key: int, extra: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`dense` is Transformers' own mask, and attention with it is SDPA's, in blocks of a few rows."""
    queries = 19
    length = queries + extra
    given = {
        "batch_size": 2,
        "q_length": queries,
        "kv_length": length,
        "q_offset": first_query,
        "kv_offset": first_key,
        "mask_function": MASK_FUNCTIONS[kind](),
        "attention_mask": None if padding == "none" else padded(padding, length=queries + first_query).bool(),
        "allow_is_causal_skip": False,
        "use_vmap": use_vmap,
    }
    mask, dense = make_mask(**given), masking_utils.sdpa_mask(**given)
    assert isinstance(mask, LazyMask)
    assert mask.shape == dense.shape
    found = mask.dense(slice(0, queries), slice(0, mask.keys))
    found = torch.ones(1, 1, 1, 1, dtype=torch.bool) if found is None else found
    assert torch.equal(found.expand(2, 1, queries, mask.keys), dense[..., : mask.keys])
    assert not dense[..., mask.keys :].any()
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, queries, 8, generator=generator)
    k, v = torch.randn(2, 2, 2, length, 8, generator=generator)
    monkeypatch.setattr(calls, "BLOCK_BYTES", 4 * 2 * 2 * length * 5)
    monkeypatch.setattr(exact, "WINDOW_ROWS", {False: 4, True: 4})
    for method in (nearfield.Exact(), NEAR):
        out = calls.serve(calls.LayerCall(q, k, v, method), mask, True)
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, dense, enable_gqa=True)
        torch.testing.assert_close(out, want, rtol=0, atol=2e-6)


def test_known_masks_are_recognised() -> None:
    """If they were not, all results would be right, but slow."""
    made = {kind: masks.recognise(function()) for kind, function in MASK_FUNCTIONS.items()}
    assert made["causal"] == masks.Pattern(after=0)
    assert made["open"] == masks.Pattern()
    assert made["window"] == masks.Pattern(before=4, after=0)
    assert made["both sides"] == masks.Pattern(before=3, after=3)
    assert (made["chunks"].before, made["chunks"].after, len(made["chunks"].others)) == (5, 0, 1)
    sequence_of = torch.zeros(1, 3)
    packed = masking_utils.packed_sequence_mask_function(sequence_of)
    both = masks.recognise(masking_utils.and_masks(MASK_FUNCTIONS["window"](), packed))
    assert both == masks.Pattern(before=4, after=0, sequence_of=sequence_of)


def test_what_is_causal_says_needs_no_mask() -> None:
    causal = {"batch_size": 2, "q_length": 5, "kv_length": 5}
    assert make_mask(**causal) is None
    assert make_mask(**causal, attention_mask=torch.ones(2, 5, dtype=torch.bool)) is None
    assert make_mask(**causal | {"kv_length": 9}) is None
    assert make_mask(**causal | {"kv_length": 9, "q_offset": 4}) is not None
    open_ = {"mask_function": masking_utils.bidirectional_mask_function, "allow_is_causal_skip": False}
    assert make_mask(**causal, **open_, allow_is_bidirectional_skip=True) is None
    assert make_mask(**causal, **open_) is not None


def test_a_single_query_that_sees_all_has_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where Transformers makes one whatever it hides, as some versions do while a CUDA graph is captured."""
    monkeypatch.setattr(masking_utils, "_ignore_causal_mask_sdpa", lambda *args, **options: False)
    one = {"batch_size": 2, "q_length": 1, "kv_length": 5, "q_offset": 4}
    assert make_mask(**one) is None
    assert make_mask(**one, mask_function=MASK_FUNCTIONS["window"]()) is None
    for hides in ({"q_offset": 3}, {"kv_length": 6, "q_offset": 5, "mask_function": MASK_FUNCTIONS["window"]()}):
        mask = make_mask(**one | hides)
        assert isinstance(mask, Tensor)
        assert not bool(mask.all())
    for shown in ({"attention_mask": torch.ones(2, 5, dtype=torch.bool)}, {"allow_is_causal_skip": False}):
        assert isinstance(make_mask(**one, **shown), Tensor)


class NothingLarge(TorchDispatchMode):
    """No operator may take more than `limit` bytes for what it returns."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                assert x.untyped_storage().nbytes() <= self.limit, f"{func} made {tuple(x.shape)}"
        return out


def scenarios(length: int) -> Iterator[tuple[str, dict[str, Any]]]:
    positions = torch.cat([torch.arange(length // 2), torch.arange(length - length // 2)])[None]
    yield "llama", {}
    yield "llama", {"attention_mask": padded("left", 1, length)}
    yield "llama", {"position_ids": positions, "use_cache": False}
    yield "mistral", {"attention_mask": padded("left", 1, length)}
    yield "mistral", {"position_ids": positions, "use_cache": False}
    yield "bert", {"attention_mask": padded("right", 1, length)}


@pytest.mark.parametrize("case", range(6))
def test_nothing_of_length_times_length_is_made(case: int) -> None:
    length = 20_000
    family, given = list(scenarios(length))[case]
    hf.register("nearfield-cells", nearfield.Cells())
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "max_position_embeddings": length}
    heads = {} if family == "bert" else {"num_key_value_heads": 1}
    net = model(family, **sizes | heads).base_model
    net.set_attn_implementation("nearfield-cells")
    with torch.no_grad(), NothingLarge(2 * BLOCK_BYTES):
        out = net(input_ids=tokens(1, length), **given).last_hidden_state
    assert out.isfinite().all()
    assert length**2 / 2 > 2 * BLOCK_BYTES


@pytest.mark.parametrize("kind", ["custom or", "both sides", "chunks"])
def test_other_masks_of_long_inputs_exist_in_blocks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    length, block = 5000, 1 << 22
    assert length**2 > 2 * block
    monkeypatch.setattr(calls, "BLOCK_BYTES", block)
    x = torch.randn(1, 1, length, 8)
    with NothingLarge(2 * block):
        function = MASK_FUNCTIONS[kind]()
        mask = make_mask(batch_size=1, q_length=length, kv_length=length, mask_function=function, allow_is_causal_skip=False)
        out = calls.serve(calls.LayerCall(x, x, x, nearfield.Cells()), mask, True)
    assert out.isfinite().all()


# torch.compile.


@pytest.fixture
def compiled() -> Iterator[Callable[..., Any]]:
    torch._dynamo.reset()
    yield lambda net, **options: torch.compile(net, backend="aot_eager", fullgraph=True, **options)
    torch._dynamo.reset()


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "padding"), [("llama", "none"), ("llama", "left"), ("mistral", "none"), ("gemma3", "left"), ("bert", "left")]
)
def test_compiled_models(family: str, padding: str, compiled: Callable[..., Any]) -> None:
    plain, ours = pair(family, "nearfield-near", num_hidden_layers=2 if family == "gemma3" else 1)
    mask = None if padding == "none" else padded(padding)
    given = inputs(family, mask) | ({} if family == "bert" else {"use_cache": False})
    assert_close(logits(compiled(ours), **given), logits(plain, **given), mask)


def test_compiled_packed_sequences(compiled: Callable[..., Any]) -> None:
    plain, ours = pair("llama", "nearfield-near", num_hidden_layers=1)
    positions = torch.cat([torch.arange(9), torch.arange(14)]).expand(2, -1)
    given = {"input_ids": tokens(2, LENGTH), "position_ids": positions, "use_cache": False}
    assert_close(logits(compiled(ours), **given), logits(plain, **given))


@pytest.mark.long
def test_compiled_training(compiled: Callable[..., Any]) -> None:
    plain, ours = pair("llama", "nearfield-near", num_hidden_layers=1)
    ids, mask = tokens(2, LENGTH), padded("right")
    for net in (plain.train(), compiled(ours.train())):
        net(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), use_cache=False).loss.backward()
    assert_same_gradients(ours, plain)


@pytest.mark.long
@pytest.mark.parametrize(("family", "layers"), [("llama", 1), ("gemma3", 2)])
def test_compiled_generation(family: str, layers: int) -> None:
    plain, ours = pair(family, "nearfield-near", num_hidden_layers=layers)
    given = {"input_ids": tokens(2, LENGTH), "attention_mask": padded("left")}
    options = {"max_new_tokens": 9, "do_sample": False, "no_repeat_ngram_size": 1, "cache_implementation": "static"}
    how = transformers.CompileConfig(backend="aot_eager", fullgraph=True, mode=None)
    how._compile_all_devices = True
    want = plain.generate(**given, **options, disable_compile=True)
    torch._dynamo.reset()
    assert torch.equal(ours.generate(**given, **options, compile_config=how), want)
    torch._dynamo.reset()
