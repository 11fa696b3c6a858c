"""`hf.Memory`: a text is read once, and later questions get the answers that they would get after the text itself."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from few_keys import few_keys
from torch import Tensor

pytest.importorskip("transformers")

import memories
from hf_models import model, pair, tokens
from memories import ALL, FEW, LENGTH, NAME, NEW, answer, everything

import nearfield
from nearfield import hf
from nearfield.cells.cache.buffers import Buffer
from nearfield.cells.cache.segments import CacheTables
from nearfield.hf.memory_file import fingerprint

# Fixtures.
nets, saved, text = memories.nets, memories.saved, memories.text


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Its words are w1, w2, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"?": 0} | {f"w{i}": i for i in range(1, 97)}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")


def spoken(ids: Tensor) -> str:
    return " ".join(f"w{i}" for i in ids)


@pytest.mark.parametrize("chunk", [None, 10])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_answers_are_those_after_the_text_itself(
    nets: tuple[Any, Any], text: Tensor, tmp_path: Path, chunk: int | None, options: dict[str, Any]
) -> None:
    plain, ours = nets
    memory = hf.Memory.read(ours, text, ALL, chunk=chunk)
    memory.save(tmp_path / "memory")
    loaded = hf.Memory.load(tmp_path / "memory", ours)
    assert torch.equal(loaded.tokens, text)
    for seed in (2, 3):
        theirs = answer(plain, text, None, seed, **options)
        for one in (memory, loaded):
            cache = one.cache()
            if options:
                cache.batch_repeat_interleave(3)
            assert torch.equal(answer(ours, text, cache, seed, **options), theirs)


def test_few_probes_are_those_of_a_cache(nets: tuple[Any, Any], text: Tensor, saved: Path) -> None:
    _, ours = nets
    loaded = hf.Memory.load(saved, ours, verify=False)
    assert loaded.method == FEW
    from_memory, fresh = loaded.cache(audit=True), hf.CellCache(FEW, audit=True)
    with torch.no_grad():
        ours(text, past_key_values=fresh)
    assert torch.equal(answer(ours, text, from_memory), answer(ours, text, fresh))
    for layer in range(2):
        for one, other in zip(from_memory.errors[layer], fresh.errors[layer], strict=True):
            assert torch.allclose(one.relative, other.relative, rtol=1e-3, atol=1e-6)
        assert max(float(error.relative.max()) for error in from_memory.errors[layer]) > 0.01
        assert torch.equal(from_memory.layers[layer].keys, fresh.layers[layer].keys)


def test_closed_segments_stay_in_the_file(nets: tuple[Any, Any], text: Tensor, saved: Path) -> None:
    _, ours = nets
    cache = hf.Memory.load(saved, ours).cache()
    answer(ours, text, cache)
    state = cache.layers[0].store.state
    assert state is not None
    assert state.keys.offset == 40
    for buffer in (state.keys, state.values):
        assert buffer.base is not None
        assert saved.name in mapped_at(buffer.base.data_ptr())
    assert state.keys.storage.shape[2] < 30
    cache.crop(-(cache.get_seq_length() - LENGTH))
    assert torch.equal(answer(ours, text, cache), answer(ours, text, hf.Memory.load(saved, ours).cache()))
    with pytest.raises(ValueError, match="the first 40 belong to a memory"):
        cache.crop(5)


def mapped_at(address: int) -> str:
    """The file that is mapped to this address."""
    if sys.platform != "linux":
        pytest.skip("only Linux lists mapped files")
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(end, 16) for end in line.split()[0].split("-"))
        if start <= address < stop:
            return line
    raise AssertionError(f"nothing is mapped at {address}")


@pytest.mark.parametrize(("chunk", "positions"), [(None, "running"), (20, "running"), (20, "restart")])
def test_a_text_is_one_segment(
    nets: tuple[Any, Any], text: Tensor, tmp_path: Path, chunk: int | None, positions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it is read in chunks that attend to each other."""
    few_keys(monkeypatch, segment=8)
    _, ours = nets
    memory = hf.Memory.read(ours, text, nearfield.Cells(probes=2, sinks=3, window=2), chunk=chunk, positions=positions)
    memory.save(tmp_path / "memory")
    loaded = hf.Memory.load(tmp_path / "memory", ours)
    wanted = [0, 16, 25, 36] if (chunk, positions) == (20, "running") else [0, 40]
    caches = [one.cache() for one in (memory, loaded)]
    assert all(layer.store.state.bounds == wanted for cache in caches for layer in cache.layers)
    assert all(torch.equal(*both) for both in zip(everything(memory), everything(loaded), strict=True))
    assert torch.equal(answer(ours, text, caches[0]), answer(ours, text, caches[1]))
    assert torch.equal(caches[0].layers[1].keys, caches[1].layers[1].keys)
    assert caches[1].layers[0].store.closed > 40  # The answer is in segments of its own.
    caches[1].crop(LENGTH)
    assert caches[1].layers[0].store.state.bounds == wanted
    with pytest.raises(ValueError, match=f"the first {wanted[-1]} belong to a memory"):
        caches[1].crop(wanted[-1])


class Bfloat16Tables(CacheTables):
    """In bfloat16 as on a GPU."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        super().__init__(key, value)
        self.centroid, self.variance = Buffer(key, torch.bfloat16), Buffer(key, torch.bfloat16)
        self.value = Buffer(value, torch.bfloat16)


def test_tables_in_bfloat16(text: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf.register(NAME, nearfield.Exact())
    ours = pair("llama", NAME, torch.bfloat16)[1]
    monkeypatch.setattr("nearfield.cells.cache.state.CacheTables", Bfloat16Tables)
    memory = hf.Memory.read(ours, text, FEW)
    memory.save(tmp_path / "memory")
    loaded = hf.Memory.load(tmp_path / "memory", ours)
    assert loaded.cache().layers[0].store.state.tables.value.storage.dtype == torch.bfloat16
    assert all(torch.equal(*both) for both in zip(everything(memory), everything(loaded), strict=True))
    monkeypatch.undo()
    elsewhere = hf.Memory.load(tmp_path / "memory", ours).cache()
    assert elsewhere.layers[0].store.state.tables.value.storage.dtype == torch.float32
    assert answer(ours, text, elsewhere).shape == (1, LENGTH + 3 + NEW)


@pytest.mark.gpu
@pytest.mark.parametrize("positions", ["running", "restart"])
def test_a_memory_of_a_gpu(tokenizer: Any, tmp_path: Path, positions: str) -> None:
    hf.register(NAME, nearfield.Exact())
    ours = pair("llama", NAME, torch.bfloat16)[1].to("cuda")
    memory = hf.Memory.read(ours, tokens(1, 300), nearfield.Cells(probes=4, segment=32, window=0), positions=positions)
    memory.save(tmp_path / "memory")
    loaded = hf.Memory.load(tmp_path / "memory", ours)
    assert all(torch.equal(*both) for both in zip(everything(memory.to("cpu")), everything(loaded), strict=True))
    question = spoken(tokens(1, 3, seed=2)[0])
    said = [one.ask(ours, tokenizer, question, max_new_tokens=NEW) for one in (memory, loaded, loaded.to("cuda"))]
    assert len(said[0].split()) == NEW
    assert said[0] == said[1] == said[2]
    assert hf.Memory.load(tmp_path / "memory", ours.to("cpu")).ask(ours, tokenizer, question, max_new_tokens=NEW)


def test_on_another_device(nets: tuple[Any, Any], text: Tensor, saved: Path) -> None:
    loaded = hf.Memory.load(saved, nets[1])
    moved = loaded.to("meta")
    assert all(layer.store.state.keys.base.device.type == "meta" for layer in moved.cache().layers)
    assert torch.equal(answer(nets[1], text, loaded.to("cpu").cache()), answer(nets[1], text, loaded.cache()))
    assert str(loaded) == f"Memory(45 tokens, {FEW}, Reading(positions='running', chunk=45, gap=0, sharpness=1.0))"


@pytest.mark.parametrize("beams", [1, 3])
def test_ask(nets: tuple[Any, Any], text: Tensor, tokenizer: Any, beams: int) -> None:
    from transformers import GenerationConfig

    memory = hf.Memory.read(nets[1], text, ALL)
    question = spoken(tokens(1, 3, seed=2)[0])
    wanted = spoken(answer(nets[0], text, None, num_beams=beams)[0, -NEW:])
    for options in ({"num_beams": beams}, {"generation_config": GenerationConfig(num_beams=beams, pad_token_id=0)}):
        assert memory.ask(nets[1], tokenizer, question, max_new_tokens=NEW, **options) == wanted
    with pytest.raises(ValueError, match="at least one token, got ''"):
        memory.ask(nets[1], tokenizer, "")
    for option in ({"num_return_sequences": 2}, {"return_dict_in_generate": True}):
        for options in (option, {"generation_config": GenerationConfig(do_sample=True, **option)}):
            with pytest.raises(ValueError, match=f"one text, got {next(iter(option))}={next(iter(option.values()))}; for more"):
                memory.ask(nets[1], tokenizer, question, **options)


def test_ask_of_another_model(nets: tuple[Any, Any], text: Tensor, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = hf.Memory.read(nets[1], text, ALL)
    other = pair("llama", NAME, rms_norm_eps=1e-3)[1]
    for one in (memory, memory.to("cpu"), pickle.loads(pickle.dumps(memory))):
        with pytest.raises(ValueError, match="this memory was made with another model"):
            one.ask(other, tokenizer, "w3")
        with pytest.raises(ValueError, match="in float32, but this one is in bfloat16; load it in float32"):
            one.ask(pair("llama", NAME, torch.bfloat16)[1], tokenizer, "w3")
    same = pair("llama", NAME)[1]
    said = memory.ask(same, tokenizer, "w3")

    def never(model: Any) -> str:
        raise AssertionError("a model that has passed is checked again")

    monkeypatch.setattr("nearfield.hf.memory_file.fingerprint", never)
    assert memory.ask(same, tokenizer, "w3") == said


def test_other_models_are_refused(nets: tuple[Any, Any], saved: Path) -> None:
    _, ours = nets
    for other in (model("llama", rms_norm_eps=1e-3), model("llama", torch.bfloat16, rms_norm_eps=1e-3), model("qwen2")):
        with pytest.raises(ValueError, match="another model"):
            hf.Memory.load(saved, other)
    with pytest.raises(ValueError, match=r"memory\.safetensors .* float32, but this one is in bfloat16; load it in float32"):
        hf.Memory.load(saved, model("llama", torch.bfloat16))
    changed = pair("llama", NAME)[1]
    with torch.no_grad():
        changed.model.layers[1].self_attn.k_proj.weight.mul_(1.001)
    with pytest.raises(ValueError, match="another model"):
        hf.Memory.load(saved, changed)
    assert hf.Memory.load(saved, ours).tokens.shape == (1, LENGTH)


def test_what_makes_no_difference_to_the_fingerprint() -> None:
    net = model("llama")
    net.config.inner = {"pad_token_id": 6, "layers": 2}
    before = fingerprint(net)
    for name, value in {
        "pad_token_id": 5,
        "eos_token_id": [3, 4],
        "output_hidden_states": True,
        "return_dict": False,
        "id2label": {0: "yes", 1: "no", 2: "perhaps"},
        "label2id": {"yes": 0},
        "problem_type": "regression",
        "use_cache": False,
        "architectures": ["Other"],
        "inner": {"pad_token_id": 7, "layers": 2},
    }.items():
        setattr(net.config, name, value)
        assert fingerprint(net) == before
    net.config.inner = {"layers": 3}
    assert fingerprint(net) != before


def test_tokens_are_a_copy(nets: tuple[Any, Any], text: Tensor, tmp_path: Path) -> None:
    for given in (text.int(), text.clone()):
        memory = hf.Memory.read(nets[1], given, FEW)
        given.zero_()
        memory.save(tmp_path / "memory")
        assert torch.equal(hf.Memory.load(tmp_path / "memory", nets[1]).tokens, text)


def test_what_cannot_be_remembered(nets: tuple[Any, Any], tmp_path: Path) -> None:
    _, ours = nets
    with pytest.raises(ValueError, match=r"tokens must be \[1, length\], got \(2, 5\)"):
        hf.Memory.read(ours, tokens(2, 5))
    with pytest.raises(TypeError, match=r"tokens must be a tensor of integers \[1, length\], got list"):
        hf.Memory.read(ours, [[1, 2]])
    with pytest.raises(ValueError, match="tokens is on the device meta"):
        hf.Memory.read(ours, tokens(1, 5).to("meta"))
    for wrong in (torch.float32, torch.bool):
        with pytest.raises(TypeError, match=f"tokens must be integers, got {wrong}"):
            hf.Memory.read(ours, tokens(1, 5).to(wrong))
    with pytest.raises(ValueError, match=r"call model\.eval\(\) first"):
        hf.Memory.read(pair("llama", NAME)[1].train(), tokens(1, 5))
    with pytest.raises(ValueError, match="full attention in all layers, but this model has a DynamicSlidingWindowLayer"):
        hf.Memory.read(pair("gemma3", NAME)[1], tokens(1, 5))
    with pytest.raises(ValueError, match="set_attn_implementation"):
        hf.Memory.read(nets[0], tokens(1, 5))
    with pytest.raises(FileNotFoundError, match="is not a file"):
        hf.Memory.load(tmp_path / "nothing", ours)
