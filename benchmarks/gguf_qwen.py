"""Qwen2 models from a GGUF file, unpacked by torch on the device where they run: seconds on a GPU, minutes in NumPy.

Transformers reads such files too, and is what `fetch_model.py` uses. This is for machines to which the packed file has to be
carried. The folder holds what `python benchmarks/fetch_model.py qwen --gguf` writes: the file and config.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""What GGUF calls them, and Transformers."""


def serves(folder: Path) -> bool:
    """Whether the folder holds a model of the kind that this reads."""
    return bool(json.loads((folder / "config.json").read_text())["model_type"] == "qwen2")


def load(folder: Path, device: torch.device | str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The model, ready for inference. It has an output matrix of its own, as in the file that is fetched."""
    from gguf import GGUFReader
    from transformers import AutoConfig, AutoModelForCausalLM

    (weights,) = folder.glob("*.gguf")
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if not serves(folder):
        raise ValueError(f"{folder} holds a model of type {config.model_type!r}; this reads 'qwen2', and Transformers many more")
    state = {
        transformers_name(part.name): unpack(torch.tensor(part.data, device=device), part.tensor_type.name).to(dtype)
        for part in GGUFReader(weights).tensors
    }
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict(state, assign=True)
    # Its frequencies are no weights, so they are not in the file.
    inner = model.base_model
    inner.rotary_emb = type(inner.rotary_emb)(config=config).to(device)
    return model.eval()


def transformers_name(name: str) -> str:
    """`model.layers.3.self_attn.q_proj.bias` for `blk.3.attn_q.bias`."""
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if found is None or found[2] not in NAMES:
        raise ValueError(f"no such part of a Qwen2 model: {name!r}")
    layer = f"model.layers.{found[1]}." if found[1] else ""
    return f"{layer}{NAMES[found[2]]}.{found[3]}"


def unpack(packed: Tensor, kind: str) -> Tensor:
    """The numbers, float32 `[..., columns]`, of uint8 blocks `[..., bytes]`, or of float32 itself."""
    if kind == "F32":
        return packed.float()
    if kind not in KINDS:
        raise ValueError(f"GGUF type {kind} is not read here, only F32, {', '.join(KINDS)}")
    size, read = KINDS[kind]
    return read(packed.unflatten(-1, (-1, size))).flatten(-2)


def _q4_k(block: Tensor) -> Tensor:
    """256 numbers of four bits in eight groups, each with a scale and an offset of six bits.

    Bytes: two halves (what scales and offsets are multiples of), 12 bytes of scales and offsets, 128 of numbers.
    """
    scale, offset = _half(block[..., 0:2]), _half(block[..., 2:4])
    low, high, mixed = block[..., 4:8], block[..., 8:12], block[..., 12:16]
    scales = torch.cat([low & 63, (mixed & 15) | (low >> 6 << 4)], -1)
    offsets = torch.cat([high & 63, (mixed >> 4) | (high >> 6 << 4)], -1)
    pairs = block[..., 16:].unflatten(-1, (4, 1, 32))
    numbers = torch.cat([pairs & 15, pairs >> 4], -2).flatten(-3, -2)
    found = (scale * scales)[..., None] * numbers - (offset * offsets)[..., None]
    return found.flatten(-2)


def _q6_k(block: Tensor) -> Tensor:
    """256 numbers of six bits in sixteen groups, each with a signed scale of eight bits.

    Bytes: 128 with the low four bits of the numbers, 64 with the high two, 16 scales, and a half (their unit).
    """
    low, high = block[..., :128].unflatten(-1, (2, 2, 32)), block[..., 128:192].unflatten(-1, (2, 1, 32))
    scales = block[..., 192:208].contiguous().view(torch.int8)
    fours = torch.cat([low & 15, low >> 4], -2)
    twos = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], -2)
    numbers = (fours | (twos << 4)).to(torch.int8) - 32
    found = (_half(block[..., 208:]) * scales)[..., None] * numbers.flatten(-3).unflatten(-1, (16, 16))
    return found.flatten(-2)


def _half(two_bytes: Tensor) -> Tensor:
    return two_bytes.contiguous().view(torch.float16).float()


KINDS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {"Q4_K": (144, _q4_k), "Q6_K": (210, _q6_k)}
"""Bytes of a block of 256 numbers, and how to read it."""
