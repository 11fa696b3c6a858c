"""`hf.Memory`: a text is read once, and every later question gets the answer that it would get with the text before it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from hf_models import model, pair, tokens
from safetensors import safe_open
from safetensors.torch import save_file

import nearfield
from nearfield import hf

NAME = "nearfield-memory"
SIZES = {"segment": 8, "cell_size": 4, "sinks": 3, "window": 0}
ALL = nearfield.Cells(probes=10**6, **SIZES)
FEW = nearfield.Cells(probes=2, partition=nearfield.KMeans(seed=3), **SIZES)
LENGTH, NEW = 45, 12


@pytest.fixture(scope="module")
def nets() -> tuple[Any, Any]:
    hf.register(NAME, nearfield.Exact())
    return pair("llama", NAME)


@pytest.fixture(scope="module")
def text() -> Tensor:
    return tokens(1, LENGTH)


@pytest.fixture
def saved(nets: tuple[Any, Any], text: Tensor, tmp_path: Path) -> Path:
    path = tmp_path / "memory.safetensors"
    hf.Memory.read(nets[1], text, FEW).save(path)
    return path


def answer(net: Any, text: Tensor, cache: Any, seed: int = 2, **options: Any) -> Tensor:
    question = torch.cat([text, tokens(1, 3, seed=seed)], 1)
    found: Tensor = net.generate(question, past_key_values=cache, max_new_tokens=NEW, do_sample=False, **options)
    return found


@pytest.mark.parametrize("chunk", [None, 10])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_answers_are_those_with_the_text_before_them(
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
    remembered, fresh = loaded.cache(audit=True), hf.CellCache(FEW, audit=True)
    with torch.no_grad():
        ours(text, past_key_values=fresh)
    assert torch.equal(answer(ours, text, remembered), answer(ours, text, fresh))
    for layer in range(2):
        for one, other in zip(remembered.errors[layer], fresh.errors[layer], strict=True):
            assert torch.allclose(one.relative, other.relative, rtol=1e-3, atol=1e-6)
        assert max(float(error.relative.max()) for error in remembered.errors[layer]) > 0.01
        assert torch.equal(remembered.layers[layer].keys, fresh.layers[layer].keys)


def test_closed_segments_stay_in_the_file(nets: tuple[Any, Any], text: Tensor, saved: Path) -> None:
    _, ours = nets
    cache = hf.Memory.load(saved, ours).cache()
    answer(ours, text, cache)
    held = cache.layers[0].store.held
    assert held is not None
    assert held.keys.offset == 40
    assert held.keys.room.shape[2] < 30
    cache.crop(-(cache.get_seq_length() - LENGTH))
    assert torch.equal(answer(ours, text, cache), answer(ours, text, hf.Memory.load(saved, ours).cache()))
    with pytest.raises(ValueError, match="the first 40 belong to a memory"):
        cache.crop(5)


def test_ask(nets: tuple[Any, Any], text: Tensor) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"?": 0} | {f"w{i}": i for i in range(1, 97)}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
    memory = hf.Memory.read(nets[1], text, ALL)
    question = tokens(1, 3, seed=2)
    said = memory.ask(nets[1], tokenizer, " ".join(f"w{i}" for i in question[0]), max_new_tokens=NEW)
    theirs = answer(nets[0], text, None)[0, -NEW:]
    assert said.split() == [f"w{i}" for i in theirs]
    with pytest.raises(ValueError, match="at least one token, got ''"):
        memory.ask(nets[1], tokenizer, "")


def test_other_models_are_refused(nets: tuple[Any, Any], saved: Path) -> None:
    _, ours = nets
    for other in (model("llama", rms_norm_eps=1e-3), model("llama", torch.bfloat16), model("qwen2")):
        with pytest.raises(ValueError, match="another model"):
            hf.Memory.load(saved, other)
    changed = pair("llama", NAME)[1]
    with torch.no_grad():
        changed.model.layers[1].self_attn.k_proj.weight.mul_(1.001)
    with pytest.raises(ValueError, match="another model"):
        hf.Memory.load(saved, changed)
    assert hf.Memory.load(saved, ours).tokens.shape == (1, LENGTH)


def test_flipped_bytes(nets: tuple[Any, Any], saved: Path) -> None:
    _, ours = nets
    whole = saved.read_bytes()
    generator = torch.Generator().manual_seed(0)
    header = 8 + int.from_bytes(whole[:8], "little")
    ranges = ((0, header, 40), (header, len(whole), 20))
    for place in torch.cat([torch.randint(a, b, (n,), generator=generator) for a, b, n in ranges]).tolist():
        damaged = bytearray(whole)
        damaged[place] ^= 1 << (place % 8)
        saved.write_bytes(bytes(damaged))
        with pytest.raises(ValueError, match=r"memory .*memory\.safetensors"):
            hf.Memory.load(saved, ours)
    saved.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="cannot be read"):
        hf.Memory.load(saved, ours)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("layers.1.start", lambda x: x + 100, "layer 1, start"),
        ("layers.0.sinks", lambda x: x + 100, "layer 0, sinks"),
        ("layers.0.order", lambda x: x - 1, "layer 0, order"),
        ("layers.0.order", lambda x: x[:, :, :-1], "layer 0, order"),
        ("layers.0.size", lambda x: x + 1, "layer 0, start and size"),
        ("layers.0.size", lambda x: x * torch.nan, "layer 0, size"),
        ("layers.1.values", lambda x: x.double(), "layer 1, values"),
        ("layers.1.cross", lambda x: x[:, :1], "layer 1, cross"),
        ("tokens", lambda x: x[0], "tokens of shape"),
        ("other", lambda x: torch.zeros(1), r"\['other'\] are missing or unknown"),
    ],
)
def test_crafted_files(nets: tuple[Any, Any], saved: Path, name: str, change: Any, message: str) -> None:
    with safe_open(str(saved), framework="pt") as file:
        about, tensors = file.metadata(), {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    tensors[name] = change(tensors.get(name)).contiguous()
    save_file(tensors, str(saved), about)
    with pytest.raises(ValueError, match=message):
        hf.Memory.load(saved, nets[1], verify=False)
    with pytest.raises(ValueError, match="digest"):
        hf.Memory.load(saved, nets[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "must be a file of format"),
        ({"version": "2"}, "version '1', got"),
        ({"method": "{"}, "makes no sense"),
        ({"method": json.dumps({"method": "Exact"})}, "method must be Cells"),
        ({"method": json.dumps({"method": "Cells", "size": 3})}, r"unknown arguments \['size'\]"),
        ({"method": json.dumps({"method": "Cells", "probes": -1})}, "probes must be a positive integer"),
        ({"method": json.dumps({"method": "Cells", "partition": {"name": "os"}})}, "makes no sense"),
        ({"method": json.dumps({"method": "Cells", "samples": 4})}, "has no samples"),
        ({"layers": "-1"}, "makes no sense"),
        ({"layers": "3"}, "missing or unknown"),
    ],
)
def test_crafted_headers(nets: tuple[Any, Any], saved: Path, change: dict[str, str], message: str) -> None:
    with safe_open(str(saved), framework="pt") as file:
        about, tensors = file.metadata(), {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    save_file(tensors, str(saved), {**about, **change})
    with pytest.raises(ValueError, match=message):
        hf.Memory.load(saved, nets[1], verify=False)


def test_what_cannot_be_remembered(nets: tuple[Any, Any], tmp_path: Path) -> None:
    _, ours = nets
    with pytest.raises(ValueError, match=r"tokens must be \[1, length\], got \(2, 5\)"):
        hf.Memory.read(ours, tokens(2, 5))
    with pytest.raises(ValueError, match="full attention in all layers, and this model has a DynamicSlidingWindowLayer"):
        hf.Memory.read(pair("gemma3", NAME)[1], tokens(1, 5))
    with pytest.raises(RuntimeError, match="set_attn_implementation"):
        hf.Memory.read(nets[0], tokens(1, 5))
    with pytest.raises(FileNotFoundError, match="is not a file"):
        hf.Memory.load(tmp_path / "nothing", ours)
