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


def q5_0(block: list[int]) -> list[float]:
    highest = sum(byte << 8 * place for place, byte in enumerate(block[2:6]))
    found = []
    for index in range(32):
        byte = block[6 + index % 16]
        number = (byte // 16 if index >= 16 else byte % 16) + 16 * (highest >> index & 1) - 16
        found.append(half(*block[0:2]) * number)
    return found


def q8_0(block: list[int]) -> list[float]:
    return [half(*block[0:2]) * (number - 256 if number > 127 else number) for number in block[2:]]


PACKED = [("Q4_K", q4_k, (0, 2)), ("Q6_K", q6_k, (208,)), ("Q5_0", q5_0, (0,)), ("Q8_0", q8_0, (0,))]


@pytest.mark.parametrize(("kind", "by_hand", "halves"), PACKED)
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
    with pytest.raises(ValueError, match="GGUF type Q4_0 is not read here"):
        gguf_qwen.unpack(torch.zeros(1, 22, dtype=torch.uint8), "Q4_0")


MATRICES = ["attn_output.weight", "ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"]
MATRICES += [f"attn_{name}.weight" for name in "qkv"]
GEMMA_NORMS = ("attn_q_norm", "attn_k_norm", "post_attention_norm", "post_ffw_norm")
NORMS = ["attn_norm.weight", "ffn_norm.weight"]
KINDS = {
    "qwen2": [*MATRICES, *NORMS, *(f"attn_{name}.bias" for name in "qkv")],
    "gemma3_text": [*MATRICES, *NORMS, *(f"{name}.weight" for name in GEMMA_NORMS)],
}


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text"])
def test_a_model_is_read_from_its_parts(gguf_qwen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """The file is played by a stub: the package that reads such files is not among what tests need."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 8}
    kind = transformers.Qwen2Config if family == "qwen2" else transformers.Gemma3TextConfig
    own = {} if family == "qwen2" else {"head_dim": 4, "layer_types": ["sliding_attention", "full_attention"]}
    config = kind(vocab_size=9, max_position_embeddings=32, **sizes, **own)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    state = model.state_dict()
    parts = ["token_embd.weight", "output_norm.weight", *(f"blk.{n}.{kind}" for n in (0, 1) for kind in KINDS[family])]
    parts += ["output.weight"] if family == "qwen2" else []
    expected = {gguf_qwen.transformers_name(name, family) for name in parts}
    assert expected | ({"lm_head.weight"} if config.tie_word_embeddings else set()) == set(state)

    def part(name: str) -> Any:
        numbers = state[gguf_qwen.transformers_name(name, family)]
        if family == "gemma3_text" and "norm" in name:
            numbers = numbers + 1
        return SimpleNamespace(name=name, data=numbers.numpy(), tensor_type=SimpleNamespace(name="F32"))

    stub: Any = ModuleType("gguf")
    stub.GGUFReader = lambda path: SimpleNamespace(tensors=[part(name) for name in parts] if path.name == "tiny.gguf" else [])
    monkeypatch.setitem(sys.modules, "gguf", stub)
    config.save_pretrained(tmp_path)
    (tmp_path / "tiny.gguf").touch()
    ids = torch.arange(9)[None]
    with torch.inference_mode():
        found = gguf_qwen.load(tmp_path, "cpu", torch.float32)(ids).logits
        assert torch.equal(found, model(ids).logits)


def test_other_models_are_left_to_transformers(gguf_qwen: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert not gguf_qwen.serves(tmp_path)


def test_parts_of_other_models_are_refused(gguf_qwen: Any) -> None:
    with pytest.raises(ValueError, match="no such part of a model of type qwen2"):
        gguf_qwen.transformers_name("blk.0.ssm.weight")


def test_ruler_gets_a_model_that_was_unpacked(load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    packed, asked = load("ruler_packed"), []
    monkeypatch.setattr(packed.command, "load_model", packed.command.load_model)
    monkeypatch.setattr(packed.gguf_qwen, "load", lambda folder, device, dtype: (folder, device, dtype))
    monkeypatch.setattr(packed, "load_tokenizer", lambda name, download: ("tokenizer", name, download))
    monkeypatch.setattr(packed, "app", asked.append)
    packed.main(["models/some", "--lengths", "4096"])
    assert asked == [["ruler", "models/some", "--lengths", "4096"]]
    cpu = torch.device("cpu")
    found = packed.command.load_model("models/some", cpu, torch.float32, False)
    assert found == ((Path("models/some"), cpu, torch.float32), ("tokenizer", "models/some", False))
