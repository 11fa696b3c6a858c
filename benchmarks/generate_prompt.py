"""Keys and values of a real prompt in every layer of a model, and longer caches made of them.

A prompt is read once, by exact attention, and kept in a file. To read 32,768 tokens with 1.5 billion weights takes two cores a
quarter of an hour and more. So a longer cache is the same prompt several times over: keys are turned to their new positions (for
rotary embeddings that is a turn by the distance), and keys and values get noise of a tenth of their own size, so that no two are
alike. How long a step takes does not depend on it; its error does, and is that of such a text.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import real
import torch
from torch import Tensor

NOISE = 0.1
"""times the standard deviation of the numbers that a head has"""

Layers = list[tuple[Tensor, Tensor]]
"""keys and values `[1, heads, length, dim]`, layer by layer"""


def load(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()


def token_ids(folder: Path, text: Path | None, tokens: int) -> Tensor:
    """The first tokens of a text, `[1, tokens]`, or of the docstrings of Python's standard library."""
    with real.text_file(text) as path:
        return real.token_ids(folder, path, tokens)


@torch.no_grad()
def read(model: Any, ids: Tensor) -> Layers:
    """What a model keeps of token ids `[1, length]`, read by exact attention."""
    from transformers import DynamicCache

    model.set_attn_implementation("sdpa")
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache, logits_to_keep=1)
    return [(layer.keys, layer.values) for layer in cache.layers]


def kept(model: Any, ids: Tensor, file: Path | None) -> Layers:
    """`read`, or what it has written to this file before."""
    if file is not None and file.exists():
        saved = torch.load(file)
        if torch.equal(saved["ids"], ids):
            return saved["layers"]
        print(f"{file} is of another text, and is written anew")
    start = time.perf_counter()
    layers = read(model, ids)
    print(f"read {ids.shape[1]:,} tokens in {time.perf_counter() - start:.0f} s", flush=True)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"ids": ids, "layers": layers}, file)
    return layers


@torch.no_grad()
def extended(model: Any, layers: Layers, length: int, seed: int = 0) -> Layers:
    """Layers of this length: the first keys and values are those of the prompt, and all others repeat it with some noise."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (_grown(model, key, length, generator, turned=True), _grown(model, value, length, generator)) for key, value in layers
    ]


def _grown(model: Any, x: Tensor, length: int, generator: torch.Generator, turned: bool = False) -> Tensor:
    read = x.shape[2]
    if length <= read:
        return x[:, :, :length].clone()
    found = x.new_empty(*x.shape[:2], length, x.shape[3])
    found[:, :, :read] = x
    size = NOISE * x.float().std(2, keepdim=True)
    for start in range(read, length, read):
        part = x[:, :, : length - start].float()
        if turned:
            part = _turned(model, part, start)
        noise = torch.randn(part.shape, generator=generator)
        found[:, :, start : start + part.shape[2]] = noise.mul_(size).add_(part).to(x.dtype)
    return found


def _turned(model: Any, key: Tensor, distance: int) -> Tensor:
    """Keys as they would be so many positions later."""
    position = torch.tensor([[distance]])
    cos, sin = model.base_model.rotary_emb(key, position)
    if model.config.rope_parameters.get("rope_type", "default") != "default":
        raise ValueError("keys can be turned for plain rotary embeddings only")
    first, second = key.chunk(2, -1)
    return key * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]
