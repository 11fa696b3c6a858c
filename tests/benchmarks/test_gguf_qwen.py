"""`gguf_qwen.py`: packed weights, unpacked number by number, and the names of the parts of a model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from by_hand import seeded


@pytest.fixture
def gguf_qwen(load: Callable[[str], Any]) -> Any:
    return load("gguf_qwen")


def half(low: int, high: int) -> float:
    return float(torch.tensor([low, high], dtype=torch.uint8).view(torch.float16))


def q4_k(block: list[int]) -> list[float]:
    unit, offset_unit, packed, numbers = half(*block[0:2]), half(*block[2:4]), block[4:16], block[16:]
    found = []
    for index in range(256):
        group = index // 32
        if group < 4:
            scale, offset = packed[group] % 64, packed[group + 4] % 64
        else:
            scale = packed[group + 4] % 16 + 16 * (packed[group - 4] // 64)
            offset = packed[group + 4] // 16 + 16 * (packed[group] // 64)
        byte = numbers[32 * (group // 2) + index % 32]
        found.append(unit * scale * (byte // 16 if group % 2 else byte % 16) - offset_unit * offset)
    return found


def q6_k(block: list[int]) -> list[float]:
    low, high, scales, unit = block[:128], block[128:192], block[192:208], half(*block[208:])
    found = []
    for index in range(256):
        part, row, column = index // 128, index % 128 // 32, index % 32
        byte = low[64 * part + 32 * (row % 2) + column]
        number = (byte // 16 if row >= 2 else byte % 16) + 16 * (high[32 * part + column] // 4**row % 4) - 32
        scale = scales[index // 16]
        found.append(unit * (scale - 256 if scale > 127 else scale) * number)
    return found


@pytest.mark.parametrize(("kind", "by_hand", "halves"), [("Q4_K", q4_k, (0, 2)), ("Q6_K", q6_k, (208,))])
def test_unpack(gguf_qwen: Any, kind: str, by_hand: Callable[[list[int]], list[float]], halves: tuple[int, ...]) -> None:
    rows, blocks, (size, _) = 3, 2, gguf_qwen.KINDS[kind]
    packed = torch.randint(256, (rows, blocks, size), generator=seeded(0), dtype=torch.uint8)
    for place in halves:  # Any bytes are a number, but not any two are a finite half.
        units = torch.randn(rows, blocks, 1, generator=seeded(place)).half()
        packed[..., place : place + 2] = units.view(torch.uint8)
    found = gguf_qwen.unpack(packed.flatten(1), kind)
    expected = [[number for block in row for number in by_hand(block)] for row in packed.tolist()]
    torch.testing.assert_close(found.double(), torch.tensor(expected, dtype=torch.float64), atol=1e-4, rtol=1e-6)


def test_other_types_are_refused(gguf_qwen: Any) -> None:
    with pytest.raises(ValueError, match="GGUF type Q5_0 is not read here"):
        gguf_qwen.unpack(torch.zeros(1, 22, dtype=torch.uint8), "Q5_0")


KINDS = ["attn_norm.weight", "ffn_norm.weight", "attn_output.weight", "ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"]
KINDS += [f"attn_{name}.{kind}" for name in "qkv" for kind in ("weight", "bias")]
PARTS = ["token_embd.weight", "output_norm.weight", "output.weight", *(f"blk.{n}.{kind}" for n in (0, 1) for kind in KINDS)]


def test_a_model_is_read_from_its_parts(gguf_qwen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is played by a stub: the package that reads such files is not among what tests need."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 8}
    config = transformers.Qwen2Config(vocab_size=9, max_position_embeddings=32, **sizes)
    model = transformers.Qwen2ForCausalLM(config).eval()
    state = model.state_dict()
    assert {gguf_qwen.transformers_name(name) for name in PARTS} == set(state)

    def part(name: str) -> Any:
        numbers = state[gguf_qwen.transformers_name(name)].numpy()
        return SimpleNamespace(name=name, data=numbers, tensor_type=SimpleNamespace(name="F32"))

    stub: Any = ModuleType("gguf")
    stub.GGUFReader = lambda path: SimpleNamespace(tensors=[part(name) for name in PARTS] if path.name == "tiny.gguf" else [])
    monkeypatch.setitem(sys.modules, "gguf", stub)
    config.save_pretrained(tmp_path)
    (tmp_path / "tiny.gguf").touch()
    ids = torch.arange(9)[None]
    with torch.inference_mode():
        found = gguf_qwen.load(tmp_path, "cpu", torch.float32)(ids).logits
        assert torch.equal(found, model(ids).logits)


def test_other_models_are_left_to_transformers(gguf_qwen: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma3_text"}')
    assert not gguf_qwen.serves(tmp_path)


def test_parts_of_other_models_are_refused(gguf_qwen: Any) -> None:
    with pytest.raises(ValueError, match="no such part of a Qwen2 model"):
        gguf_qwen.transformers_name("blk.0.ssm.weight")
