"""`hf.register(prefill="shared")`: rows of a prompt open cells together, and nothing else changes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from by_hand import inputs

pytest.importorskip("transformers")

import transformers
from hf_models import model, tokens
from torch import Tensor

import nearfield as nf
from nearfield import hf
from nearfield.hf.config import LayerConfig, read_config, write_config
from nearfield.hf.masks import LazyMask, Pattern

FEW = nf.Cells(cell_size=4, segment=16, probes=2, sinks=0)
LENGTH = 256
HEAD = {"format": "nearfield-layers", "version": 1}


def attending(method: Any = FEW, family: str = "llama", prefill: str | None = "shared", **changes: Any) -> Any:
    """A tiny model in eval mode that attends by this method."""
    name = f"nearfield-{prefill}"
    hf.register(name, method, prefill=prefill)
    net = model(family, **changes)
    net.set_attn_implementation(name)
    return net


@torch.no_grad()
def logits(net: Any, ids: Tensor, **given: Any) -> Tensor:
    return net(input_ids=ids, **given).logits


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The `share` of every call that cells serve from now on."""
    found = []
    run = nf.Cells.run

    def watched(self: nf.Cells, *arguments: Any) -> Any:
        found.append(self.share)
        return run(self, *arguments)

    monkeypatch.setattr(nf.Cells, "run", watched)
    return found


# What it does to a prompt


@pytest.mark.parametrize("padding", [False, True])
def test_a_prompt_is_read_as_if_the_method_had_the_share(padding: bool) -> None:
    ids = tokens(2, LENGTH)
    given = {"attention_mask": (torch.arange(LENGTH) >= torch.tensor([[9], [0]])).long()} if padding else {}
    shared, by_hand, strict, usual = (
        logits(attending(method, prefill=prefill), ids, **given)
        for method, prefill in ((FEW, "shared"), (replace(FEW, share=128), "strict"), (FEW, "strict"), (FEW, None))
    )
    assert torch.equal(shared, by_hand)
    assert torch.equal(strict, usual)
    assert (shared - strict).abs().max() > 1e-2


def test_a_layer_attends_as_nearfield_does() -> None:
    hf.register("nearfield-shared", FEW, prefill="shared")
    function = transformers.AttentionInterface()["nearfield-shared"]
    q, k, v = inputs(1, 4, queries=LENGTH, kv_heads=2)
    found, _ = function(torch.nn.Module().eval(), q, k, v, None)
    expected = nf.attention(q, k, v, is_causal=True, enable_gqa=True, method=replace(FEW, share=128))
    assert torch.equal(found, expected.transpose(1, 2))


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (None, []),
        (nf.Auto(crossover=32, check=False), [128, 128]),
        (nf.Auto(crossover=32, share=16, check=False), [16, 16]),
        ({0: FEW, "default": nf.Exact()}, [128]),
        ({0: FEW, "default": nf.TopK(4)}, [128]),
        ({0: replace(FEW, share=1), "default": FEW}, [1, 128]),
        ({1: replace(FEW, share=64), "default": nf.Auto(crossover=32, check=False)}, [128, 64]),
    ],
    ids=["short", "auto", "auto-16", "exact", "topk", "by-itself", "mixed"],
)
def test_only_cells_that_say_nothing_get_a_share(method: Any, expected: list[int], shares: list[int | None]) -> None:
    logits(attending(method), tokens(1, LENGTH))
    assert shares == expected


def test_encoders_are_as_they_were(shares: list[int | None]) -> None:
    logits(attending(family="bert"), tokens(1, LENGTH))
    assert shares == [None, None]


def test_a_prompt_for_a_cell_cache(shares: list[int | None]) -> None:
    net, ids = attending(), tokens(1, LENGTH)
    cache = hf.CellCache(method=nf.Cells(cell_size=4, segment=16, probes=2))
    logits(net, ids[:, :140], past_key_values=cache)
    assert shares == [128, 128]
    logits(net, ids[:, 140:141], past_key_values=cache)
    assert shares == [128, 128]


# Causality


def test_the_choice_looks_ahead_within_a_block_and_no_further() -> None:
    net, ids = attending(), tokens(2, LENGTH)
    before = logits(net, ids)
    # The first block has no cells before it.
    for at, untouched in ((100, 100), (128, 128), (140, 128), (255, 128)):
        changed = ids.clone()
        changed[:, at:] = tokens(2, LENGTH, seed=9)[:, at:]
        after = logits(net, changed)
        assert torch.equal(after[:, :untouched], before[:, :untouched])
        assert at == untouched or not torch.equal(after[:, untouched:at], before[:, untouched:at])


def in_chunks(net: Any, ids: Tensor, edge: int) -> Tensor:
    past = transformers.DynamicCache(config=net.config)
    return torch.cat([logits(net, part, past_key_values=past) for part in (ids[:, :edge], ids[:, edge:])], 1)


def test_chunks_of_whole_blocks_agree_with_the_whole() -> None:
    net, ids = attending(), tokens(2, LENGTH)
    whole = logits(net, ids)
    torch.testing.assert_close(in_chunks(net, ids, 128), whole, atol=1e-4, rtol=0)
    assert (in_chunks(net, ids, 140) - whole)[:, 128:140].abs().max() > 1e-2, "a block that was cut"


# What stays as it was


@pytest.mark.parametrize("prompt", [2, 128])
def test_decoding_is_as_it_was(prompt: int, shares: list[int | None]) -> None:
    net, ids = attending(), tokens(1, prompt + 3)
    after = []
    for name in ("nearfield-strict", "nearfield-shared"):
        hf.register("nearfield-strict", FEW)
        net.set_attn_implementation("nearfield-strict")
        past = transformers.DynamicCache(config=net.config)
        logits(net, ids[:, :prompt], past_key_values=past)
        net.set_attn_implementation(name)
        after.append([logits(net, ids[:, at : at + 1], past_key_values=past) for at in range(prompt, prompt + 3)])
    assert all(torch.equal(one, two) for one, two in zip(*after, strict=True))
    assert set(shares) == {None}


def test_a_single_query_is_no_prompt(shares: list[int | None]) -> None:
    """It is half of two keys, and so served by the method."""
    hf.register("nearfield-shared", FEW, prefill="shared")
    q, k, v = inputs(1, 2, queries=1, keys=2)
    mask = LazyMask(1, 1, 2, Pattern(after=0), shift=1)
    transformers.AttentionInterface()["nearfield-shared"](torch.nn.Module().eval(), q, k, v, mask)
    assert shares == [None]


def test_training_is_as_it_was(shares: list[int | None]) -> None:
    ids, found = tokens(1, LENGTH), []
    for prefill in ("shared", "strict"):
        net = attending(prefill=prefill).train()
        net(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        found.append([weight.grad for weight in net.parameters()])
    assert shares == [None] * 4
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_gradients_are_as_they_were_in_eval_mode(shares: list[int | None]) -> None:
    net = attending()
    net(input_ids=tokens(1, LENGTH))
    assert shares == [None] * 2
    net.requires_grad_(False)
    net(input_ids=tokens(1, LENGTH))
    assert shares == [None] * 2 + [128] * 2
    one = net.model.layers[1].self_attn.v_proj.weight.requires_grad_()
    net(input_ids=tokens(1, LENGTH)).logits.sum().backward()
    assert shares[4:] == [128, None], "the first layer has no gradient"
    assert one.grad is not None


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_computes_both_passes_alike(reentrant: bool, shares: list[int | None]) -> None:
    """The first of two reentrant passes is one without gradients."""
    net = attending().train()
    net.gradient_checkpointing_enable({"use_reentrant": reentrant})
    net(input_ids=tokens(1, LENGTH), labels=tokens(1, LENGTH), use_cache=False).loss.backward()
    assert shares == [None] * 4


# Files


def test_a_file_may_say_it(tmp_path: Path, shares: list[int | None]) -> None:
    path = tmp_path / "config.json"
    for prefill in (None, "strict", "shared"):
        config = LayerConfig({0: FEW, "default": nf.Exact()}, 2, prefill)
        write_config(path, config)
        assert read_config(path) == config
        for given in (None, "strict", "shared"):
            hf.register("nearfield-shared", config=path, prefill=given)
            net = model("llama")
            net.set_attn_implementation("nearfield-shared")
            logits(net, tokens(1, LENGTH))
            assert shares.pop() == (128 if (given or prefill) == "shared" else None)
    assert shares == []


@pytest.mark.parametrize("wrong", ["share", "Shared", "", 128, True, ["shared"]])
def test_anything_else_is_refused(wrong: Any) -> None:
    message = r"prefill must be 'strict' .* or 'shared' .*, got .*; leave it out for 'strict'"
    with pytest.raises(ValueError, match=message):
        hf.register("nearfield-wrong", prefill=wrong)
    with pytest.raises(ValueError, match="config: " + message):
        hf.register("nearfield-wrong", config={**HEAD, "prefill": wrong})
    assert "nearfield-wrong" not in transformers.AttentionInterface()


def test_a_file_cannot_say_nothing() -> None:
    with pytest.raises(ValueError, match="got None; leave it out"):
        hf.register("nearfield-wrong", config={**HEAD, "prefill": None})


# torch.compile


@pytest.fixture
def compiled() -> Iterator[Callable[..., Any]]:
    torch._dynamo.reset()
    yield lambda net: torch.compile(net, backend="aot_eager", fullgraph=True)
    torch._dynamo.reset()


@pytest.mark.long
def test_compiled_prompts(compiled: Callable[..., Any]) -> None:
    ids, given = tokens(1, LENGTH), {"attention_mask": torch.ones(1, LENGTH, dtype=torch.long), "use_cache": False}
    net = attending(num_hidden_layers=1)
    whole = logits(net, ids, **given)
    torch.testing.assert_close(logits(compiled(net), ids, **given), whole, atol=1e-4, rtol=0)
    assert (whole - logits(attending(num_hidden_layers=1, prefill="strict"), ids, **given)).abs().max() > 1e-2
