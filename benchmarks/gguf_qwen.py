"""Qwen2 and Gemma 3 from a GGUF file, unpacked by torch on the device where they run: seconds on a GPU, minutes in NumPy.

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
GEMMA = NAMES | {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
FAMILIES = {"qwen2": NAMES, "gemma3_text": GEMMA}


def serves(folder: Path) -> bool:
    """Whether the folder holds a model of a kind that this reads."""
    return json.loads((folder / "config.json").read_text())["model_type"] in FAMILIES


def load(folder: Path, device: torch.device | str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The model, ready for inference. Qwen has an output matrix of its own, as in the file that is fetched."""
    from gguf import GGUFReader
    from transformers import AutoConfig, AutoModelForCausalLM

    (weights,) = folder.glob("*.gguf")
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if config.model_type not in FAMILIES:
        known = " and ".join(map(repr, FAMILIES))
        raise ValueError(f"{folder} holds a model of type {config.model_type!r}; this reads {known}, and Transformers many more")
    state = {}
    for part in GGUFReader(weights).tensors:
        name = transformers_name(part.name, config.model_type)
        numbers = unpack(torch.tensor(part.data, device=device), part.tensor_type.name)
        if config.model_type == "gemma3_text" and name.endswith("norm.weight"):
            numbers -= 1  # In Transformers, 0 stands for a factor of 1.
        state[name] = numbers.to(dtype)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if "lm_head.weight" not in state:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    # What follows from the configuration is no weight, so it is not in the file.
    inner = model.base_model
    inner.rotary_emb = type(inner.rotary_emb)(config=config).to(device)
    if hasattr(inner.embed_tokens, "embed_scale"):
        inner.embed_tokens.embed_scale = torch.tensor(inner.embed_tokens.scalar_embed_scale, device=device)
    return model.eval()


def transformers_name(name: str, family: str = "qwen2") -> str:
    """`model.layers.3.self_attn.q_proj.bias` for `blk.3.attn_q.bias`."""
    names = FAMILIES[family]
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if found is None or found[2] not in names:
        raise ValueError(f"no such part of a model of type {family}: {name!r}")
    layer = f"model.layers.{found[1]}." if found[1] else ""
    return f"{layer}{names[found[2]]}.{found[3]}"


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


def _q5_0(block: Tensor) -> Tensor:
    """32 numbers of five bits with a scale.

    Bytes: a half (the scale), 4 with the highest bits of the numbers, 16 with the others.
    """
    shifts = torch.arange(8, dtype=torch.uint8, device=block.device)
    highest = (block[..., 2:6, None] >> shifts & 1).flatten(-2)
    fours = torch.cat([block[..., 6:] & 15, block[..., 6:] >> 4], -1)
    return _half(block[..., 0:2]) * ((fours | (highest << 4)).to(torch.int8) - 16)


def _q8_0(block: Tensor) -> Tensor:
    """32 numbers of eight bits, with a sign, after a half (their scale)."""
    return _half(block[..., 0:2]) * block[..., 2:].contiguous().view(torch.int8)


def _half(two_bytes: Tensor) -> Tensor:
    return two_bytes.contiguous().view(torch.float16).float()


KINDS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "Q4_K": (144, _q4_k),
    "Q6_K": (210, _q6_k),
    "Q5_0": (22, _q5_0),
    "Q8_0": (34, _q8_0),
}
"""Bytes of a block, of 256 numbers or of 32, and how to read it."""
