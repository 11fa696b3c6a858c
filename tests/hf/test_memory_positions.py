"""`hf.Memory` of a text with more positions than the model knows: chunks are read by themselves, at the same positions."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import transformers
from hf_models import model, pair, tokens

import nearfield
from nearfield import hf
from nearfield.hf.memory import plan_reading
from nearfield.hf.memory_file import Reading

NAME = "nearfield-positions"
KNOWN, GAP, SINKS, CHUNK, LENGTH, NEW = 48, 6, 3, 20, 70, 8
SHARPNESS = math.log(LENGTH) / math.log(KNOWN)
SIZES = {"segment": 8, "cell_size": 4, "sinks": SINKS, "window": 0}
ALL = nearfield.Cells(probes=10**6, **SIZES)


@pytest.fixture(scope="module")
def nets() -> tuple[Any, Any]:
    hf.register(NAME, nearfield.Exact())
    return pair("llama", NAME, max_position_embeddings=KNOWN)


@pytest.fixture(scope="module")
def text() -> Tensor:
    return tokens(1, LENGTH)


def by_hand(net: Any, text: Tensor, more: Tensor, first: int = 0) -> Tensor:
    """Logits of `more` after a text, by a plain model in one pass: chunks see the first tokens and themselves, `more` sees all.

    `first` is the position of the first token.
    """
    length, total = text.shape[1], text.shape[1] + more.shape[1]
    place = torch.arange(total)
    chunk = torch.where(place < length, place // CHUNK, -1)
    seen = (chunk[:, None] == chunk) | (place < SINKS) | (chunk[:, None] < 0)
    seen &= place <= place[:, None]
    sharper = torch.ones(total, total)
    sharper[length:, SINKS:length] = SHARPNESS
    # Chunks begin right after the first tokens, and `more` a gap after the end of a whole chunk.
    inside = torch.where(chunk > 0, SINKS + place % CHUNK, place)
    positions = torch.where(chunk >= 0, inside, SINKS + CHUNK + GAP + place - length) + first

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        logits = (query @ key.transpose(2, 3) * scaling * sharper).masked_fill(~seen, -torch.inf)
        return (logits.softmax(-1) @ value).transpose(1, 2), None

    transformers.AttentionInterface.register("by-hand", attend)
    net.set_attn_implementation("by-hand")
    with torch.no_grad():
        logits: Tensor = net(torch.cat([text, more], 1), position_ids=positions[None], use_cache=False).logits
    return logits[:, length:]


def after_memory(net: Any, memory: hf.Memory, more: Tensor) -> Tensor:
    """The same by a memory, which finds the positions itself."""
    with torch.no_grad():
        logits: Tensor = net(more, past_key_values=memory.cache()).logits
    return logits


def test_a_question_sees_all_chunks_a_gap_before_it(nets: tuple[Any, Any], text: Tensor, tmp_path: Path) -> None:
    plain, ours = nets
    memory = hf.Memory.read(ours, text, ALL, positions="restart", chunk=CHUNK)
    memory.save(tmp_path / "memory")
    loaded = hf.Memory.load(tmp_path / "memory", ours)
    assert loaded.reading == memory.reading == Reading("restart", CHUNK, GAP, SHARPNESS)
    assert SHARPNESS > 1.09
    more = tokens(1, 9, seed=5)
    wanted = by_hand(plain, text, more)
    for one in (memory, loaded):
        torch.testing.assert_close(after_memory(ours, one, more), wanted, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(by_hand(plain, text, more, first=-30), wanted, rtol=1e-3, atol=1e-3)
    running = hf.Memory.read(ours, text, ALL, positions="running", chunk=CHUNK)
    assert not torch.allclose(after_memory(ours, running, more), wanted, rtol=0.1, atol=0.1)


def test_a_model_that_cannot_ask_does_not_read(nets: tuple[Any, Any], text: Tensor) -> None:
    told: list[int] = []
    for positions in ("running", "restart"):
        with pytest.raises(ValueError, match=r"attends by 'sdpa'.*set_attn_implementation"):
            hf.Memory.read(model("llama"), text, ALL, positions=positions, chunk=CHUNK, progress=told.append)
    assert not told


@pytest.mark.parametrize("known", [1, 2, 8])
def test_models_that_know_hardly_a_position(known: int) -> None:
    config = model("llama", max_position_embeddings=known).config
    with pytest.raises(ValueError, match=f"the model knows {known} positions"):
        plan_reading(config, LENGTH, SINKS, None, None)


@pytest.mark.parametrize("beams", [1, 3])
def test_generate_needs_no_positions(nets: tuple[Any, Any], text: Tensor, beams: int) -> None:
    plain, ours = nets
    cache = hf.Memory.read(ours, text, ALL, positions="restart", chunk=CHUNK).cache()
    cache.batch_repeat_interleave(beams)
    given = torch.cat([text, tokens(1, 4, seed=6)], 1)
    options = {"max_new_tokens": NEW, "do_sample": False, "num_beams": beams, "output_scores": True}
    found = ours.generate(given, past_key_values=cache, return_dict_in_generate=True, **options)
    said = found.sequences[0, -NEW:]
    scores = by_hand(plain, text, found.sequences[:, LENGTH:])[0, -NEW - 1 : -1].log_softmax(-1)
    if beams == 1:
        assert torch.equal(said, scores.argmax(-1))
    else:
        assert float(found.sequences_scores) == pytest.approx(float(scores.gather(1, said[:, None]).mean()), rel=1e-4)


def test_chunks_do_not_depend_on_each_other(nets: tuple[Any, Any], text: Tensor) -> None:
    _, ours = nets
    other = text.clone()
    other[:, CHUNK : 2 * CHUNK] = tokens(1, CHUNK, seed=9)
    one, two = (hf.Memory.read(ours, x, ALL, positions="restart", chunk=CHUNK).cache() for x in (text, other))
    for layer in range(2):
        same = (one.layers[layer].keys == two.layers[layer].keys).all(-1).all(1)[0]
        assert same[:CHUNK].all()
        assert same[2 * CHUNK :].all()
        assert same[CHUNK : 2 * CHUNK].sum() < CHUNK // 4


def test_progress(nets: tuple[Any, Any], text: Tensor) -> None:
    for positions in ("running", "restart"):
        told: list[int] = []
        hf.Memory.read(nets[1], text, ALL, positions=positions, chunk=CHUNK, progress=told.append)
        assert told == [20, 40, 60, 70]


@pytest.mark.parametrize(
    ("length", "positions", "chunk", "wanted"),
    [
        (448, None, None, Reading("running", 448)),
        (448, None, 50, Reading("running", 50)),
        (449, None, None, Reading("restart", 256, 64)),
        (449, None, 60, Reading("restart", 60, 64)),
        (512**2, None, None, Reading("restart", 256, 64, 2.0)),
        (600, "running", None, Reading("running", 600)),
        (50, "restart", None, Reading("restart", 256, 64)),
    ],
)
def test_what_suits_a_text(length: int, positions: str | None, chunk: int | None, wanted: Reading) -> None:
    config = model("llama", max_position_embeddings=512).config
    assert plan_reading(config, length, SINKS, positions, chunk) == wanted


def test_what_cannot_start_again(nets: tuple[Any, Any], text: Tensor) -> None:
    _, ours = nets
    for options, message in (
        ({"positions": "both"}, "positions must be one of running, restart, got 'both'"),
        ({"chunk": 0}, "chunk must be a positive integer, got 0"),
        ({"positions": "restart", "chunk": 3}, "chunk must be more than 3 and at most 33, got 3"),
        ({"positions": "restart", "chunk": 34}, "chunk must be more than 3 and at most 33, got 34: the model knows 48 positions"),
    ):
        with pytest.raises(ValueError, match=message):
            hf.Memory.read(ours, text, ALL, **options)
    with pytest.raises(ValueError, match=r"models with rotary embeddings .* got gpt2 and a text of 300 tokens"):
        hf.Memory.read(pair("gpt2", NAME)[1], tokens(1, 300), ALL)
    by_length = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ValueError, match="rotary embeddings"):
        hf.Memory.read(
            pair("llama", NAME, max_position_embeddings=KNOWN, rope_parameters=by_length)[1], text, ALL, positions="restart"
        )
