"""Steps of a whole model in a CUDA graph: tokens are those of steps without one. What can go without a card is tried here."""

from __future__ import annotations

import functools
import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from hf_models import model, tokens

import nearfield
from nearfield import _compat, hf
from nearfield.hf import model_step
from nearfield.hf.generation import read_prompt
from nearfield.hf.model_step import ModelStep, stepping, why_not

NAME = "nearfield-steps"
SIZES = nearfield.Cells(segment=32, cell_size=4, probes=4, sinks=3, window=8)
ON_GPU = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    hf.register(NAME, nearfield.Exact())


def net(device: str = "cpu", **changes: Any) -> Any:
    made = model("llama", torch.float32, head_dim=16, **changes).to(device)
    made.set_attn_implementation(NAME)
    return made


def read(made: Any, ids: Tensor, method: Any = SIZES, **options: Any) -> hf.CellCache:
    cache = hf.CellCache(method, config=made.config, **options)
    with torch.no_grad():
        read_prompt(made, ids.to(made.device), cache)
    return cache


def test_why_steps_are_not_captured() -> None:
    made = net()
    ids = tokens(1, 40)[0]
    assert "the model is on cpu" in str(why_not(made, read(made, ids)))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(model_step.backends, "runs_triton", lambda device: True)
        assert "no keys yet" in str(why_not(made, hf.CellCache(SIZES, config=made.config)))
        assert "an index" in str(why_not(made, read(made, ids, nearfield.TopK(4))))
        assert "audit" in str(why_not(made, read(made, ids, audit=True)))
        longer = net(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
        assert "positions (dynamic)" in str(why_not(longer, read(longer, ids)))


def test_without_a_card_steps_go_on_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    made, ids = net(), tokens(1, 40)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    expected = hf.generate(made, ids, cache=hf.CellCache(SIZES, config=made.config), graph=False, **options)
    with caplog.at_level("INFO", "nearfield"):
        assert torch.equal(hf.generate(made, ids, cache=hf.CellCache(SIZES, config=made.config), **options), expected)
    assert [record.message for record in caplog.records if "CUDA graph" in record.message] == [
        "steps are served without a CUDA graph: the model is on cpu, where no Triton kernels run"
    ]
    with pytest.raises(ValueError, match=r"graph=True, but the model is on cpu.*leave it out"):
        hf.generate(made, ids, graph=True, **options)
    with pytest.raises(TypeError, match="graph must be True, False or None, got 1"):
        hf.generate(made, ids, graph=1, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"compile=True, but the model is on cpu.*leave it out"):
        hf.generate(made, ids, compile=True, **options)
    with pytest.raises(ValueError, match=r"compile=True, but beams change places.*leave out compile, or num_beams"):
        hf.generate(made, ids, compile=True, num_beams=2, **options)
    with pytest.raises(ValueError, match="leave out graph=False, or compile"):
        hf.generate(made, ids, compile=True, graph=False, **options)
    with pytest.raises(TypeError, match="compile must be True or False, got 'yes'"):
        hf.generate(made, ids, compile="yes", **options)  # type: ignore[arg-type]
    assert "forward" not in vars(made), "the model is as it was, also after an error"


@torch.no_grad()
def test_steps_of_many_layers_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """More layers than the compiler takes by itself, which knows each by its number; and steps over several segments."""
    graphs, layers = [], torch._dynamo.config.recompile_limit + 1

    def count(program: Any, _: Any) -> Any:
        graphs.append(program)
        return program

    monkeypatch.setattr(_compat.torch, "compile", functools.partial(torch.compile, backend=count))
    made = net(num_hidden_layers=layers)
    cache, twin = (read(made, tokens(1, 40)[0]) for _ in range(2))
    step, seen = ModelStep(made, cache, compile=True), []
    for turn in range(40):
        ids = torch.full((1, 1), 5 + turn)
        given = {"input_ids": ids, "position_ids": torch.full_like(ids, 40 + turn), "use_cache": True, "logits_to_keep": 1}
        found = step.forward(**given, past_key_values=cache).logits
        torch.testing.assert_close(found, made(**given, past_key_values=twin).logits)
        seen.append(len(graphs))
    assert seen[0] == layers + 6, "one for each layer, and what they have in common"
    assert set(seen) == {seen[0]}
    both = hf.CellCache(SIZES, config=made.config)
    made(input_ids=tokens(2, 40), past_key_values=both)
    positions = torch.full((2, 1), 40)
    step.forward(input_ids=torch.full((2, 1), 5), position_ids=positions, past_key_values=both, use_cache=True, logits_to_keep=1)
    assert len(graphs) == 2 * seen[0], "once more for another batch size, in all layers"


def test_the_model_gets_its_forward_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_step.backends, "runs_triton", lambda device: True)
    made = net()
    cache, other = (read(made, tokens(1, 9)[0], audit=True) for _ in range(2))
    calls, forward = list[str](), made.forward

    def counted(*args: Any, **options: Any) -> Any:
        calls.append("call")
        return forward(*args, **options)

    made.forward = counted
    with torch.no_grad(), stepping(made, cache, None):
        inner = made.forward
        assert inner is not counted
        with stepping(made, other, None):
            assert made.forward is inner, "one at a time"
            made(input_ids=tokens(1, 1), position_ids=torch.tensor([[9]]), past_key_values=other)
        assert made.forward is inner
        with pytest.raises(ValueError, match="generating by a graph already"), stepping(made, other, True):
            pass
        made(input_ids=tokens(1, 1), position_ids=torch.tensor([[9]]), past_key_values=cache)
    assert made.forward is counted
    assert calls == ["call", "call"]
    with pytest.raises(ValueError, match=r"graph=True, but a graph needs.*audited"), torch.no_grad(), stepping(made, cache, True):
        made(input_ids=tokens(1, 1), position_ids=torch.tensor([[10]]), past_key_values=cache)
    assert made.forward is counted
    del made.forward
    with stepping(made, cache, None):
        assert "forward" in vars(made)
    assert "forward" not in vars(made)


def test_a_step_that_is_not_captured_goes_on_without(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Here there is no device to capture anything on."""
    monkeypatch.setattr(model_step.backends, "runs_triton", lambda device: True)
    monkeypatch.setattr(model_step, "why_not", lambda *_: None)

    def fails(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(ModelStep, "_capture", fails)
    made, ids = net(), tokens(1, 40)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    expected = hf.generate(made, ids, cache=hf.CellCache(SIZES, config=made.config), graph=False, **options)
    assert torch.equal(hf.generate(made, ids, cache=hf.CellCache(SIZES, config=made.config), **options), expected)
    assert [record.levelname for record in caplog.records if "could not be captured" in record.message] == ["WARNING"]
    with pytest.raises(RuntimeError, match="not permitted"):
        hf.generate(made, ids, graph=True, **options)
    with pytest.raises(ValueError, match="beams change places"):
        hf.generate(made, ids, graph=True, num_beams=2, **options)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"attention_mask": torch.ones(1, 10), "use_cache": True, "output_attentions": False, "labels": None}, None),
        ({"position_ids": None}, "no position_ids"),
        ({"position_ids": torch.ones(1, 2)}, "no position_ids"),
        ({"output_hidden_states": True, "labels": 3}, "labels, output_hidden_states"),
    ],
)
def test_what_a_graph_does_not_know(changes: dict[str, Any], expected: str | None) -> None:
    usual = {"input_ids": torch.ones(1, 1).long(), "position_ids": torch.ones(1, 1).long(), "past_key_values": 3}
    found = model_step._unknown(usual | changes)
    assert found is None if expected is None else expected in str(found)


def test_a_mask_is_compared_before_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_step.backends, "runs_triton", lambda device: True)
    monkeypatch.setattr(model_step, "check_capturable", lambda *_: None)
    made = net()
    plain, both = read(made, tokens(1, 9)[0]), hf.CellCache.batch([read(made, tokens(1, n)[0]) for n in (9, 12)])
    assert why_not(made, plain, torch.ones(1, 10)) is None
    assert why_not(made, both, both.attention_mask()) is None
    hidden = torch.ones(1, 10)
    hidden[0, 0] = 0
    assert "hides keys" in str(why_not(made, plain, hidden))
    assert "hides keys" in str(why_not(made, both, torch.ones(2, 13)))


@ON_GPU
@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "top_k": 5}], ids=["greedy", "sampling"])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("method", [SIZES, {0: nearfield.Exact(), "default": SIZES}], ids=["cells", "by-layer"])
def test_tokens_are_the_same(options: dict[str, Any], method: Any, offload: bool) -> None:
    """Over several segments, so that it is captured more than once."""
    made, ids = net("cuda"), tokens(2, 70)
    found = []
    for graph in (False, True):
        torch.manual_seed(1)
        cache = hf.CellCache(method, config=made.config, offload=offload)
        found.append(hf.generate(made, ids, cache=cache, graph=graph, max_new_tokens=90, **options))
        assert cache.get_seq_length() == 159
    assert torch.equal(*found)


@ON_GPU
@torch.no_grad()
def test_compiled_steps_give_the_same_logits() -> None:
    made = net("cuda")
    cache, twin = (read(made, tokens(1, 70)[0]) for _ in range(2))
    step = ModelStep(made, cache, compile=True)
    for turn in range(60):
        ids = torch.full((1, 1), 5 + turn, device="cuda")
        positions = torch.full_like(ids, 70 + turn)
        eager = made(input_ids=ids, position_ids=positions, past_key_values=twin).logits
        torch.testing.assert_close(step(ids, positions), eager, atol=1e-4, rtol=1e-4)
    assert 2 <= step.captures <= 4
    ids = tokens(1, 40).cuda()
    assert hf.generate(made, ids, compile=True, max_new_tokens=5, do_sample=False).shape == (1, 45)


@ON_GPU
@torch.no_grad()
@pytest.mark.parametrize(("length", "new", "looks"), [(70, 70, 3), (20, 60, 2)], ids=["with-cells", "from-none"])
def test_steps_that_look_at_their_error_are_not_of_the_graph(length: int, new: int, looks: int) -> None:
    """Also where the first segment is closed on the way."""
    made, ids = net("cuda"), tokens(1, length).cuda()
    cache, twin = (hf.CellCache(SIZES, config=made.config, eps=0.001) for _ in range(2))
    options: dict[str, Any] = {"max_new_tokens": new, "do_sample": False}
    found = hf.generate(made, ids, cache=cache, graph=True, **options)
    assert torch.equal(found, hf.generate(made, ids, cache=twin, graph=False, **options))
    for own, other in zip(cache.guards.values(), twin.guards.values(), strict=True):
        assert own.looks == other.looks == looks
        assert own.factor == other.factor


@ON_GPU
def test_requests_crops_and_other_ways_of_moving() -> None:
    made = net("cuda")
    prompts = [tokens(1, 99, seed=i)[0, :length].cuda() for i, length in enumerate((70, 33, 1, 48))]
    options: dict[str, Any] = {"max_new_tokens": 50, "do_sample": False}
    expected = [hf.generate(made, [prompt], graph=False, **options)[0] for prompt in prompts]
    for own, theirs in zip(hf.generate(made, prompts, graph=True, **options), expected, strict=True):
        assert torch.equal(own, theirs)
    cache, twin = (read(made, prompts[0]) for _ in range(2))
    step = ModelStep(made, cache)
    with torch.no_grad():
        for turn in range(60):
            if turn == 20:
                cache.crop(-7)
                twin.crop(-7)
            if turn == 40:
                cache.reorder_cache(torch.tensor([0], device="cuda"))
            ids = torch.full((1, 1), 5 + turn, device="cuda")
            positions = torch.full_like(ids, cache.get_seq_length())
            eager = made(input_ids=ids, position_ids=positions, past_key_values=twin).logits
            torch.testing.assert_close(step(ids, positions), eager, atol=1e-4, rtol=1e-4)
    assert 2 <= step.captures <= 12
    for ours, theirs in zip(cache.layers, twin.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-4, rtol=1e-4)
