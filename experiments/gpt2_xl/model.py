"""Models: random ones of the shape of GPT-2 with any number of positions, and real ones from a folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from experiments.gpt2_xl.sizes import Shape
from nearfield.app.evaluate.models import load_model

MOST_BUFFERS = 4 << 30
"""Bytes that a model may hold beside its weights. There should be none."""


def need_transformers(shape: Shape, positions: int) -> None:
    """Refuse to go on without Transformers, or with one whose GPT-2 keeps a mask of [positions, positions] in every layer."""
    try:
        import transformers
    except ImportError:
        raise ValueError("gpt2-xl needs Transformers: pip install 'nearfield[transformers]'") from None
    buffers = sum(buffer.nbytes for buffer in random_model(shape, positions, "meta", 0).buffers())
    if buffers > MOST_BUFFERS:
        raise ValueError(
            f"{shape.name} with {positions:,} positions has {buffers / 2**30:,.0f} GB of buffers beside its weights in "
            f"Transformers {transformers.__version__}: pip install -U 'nearfield[transformers]'"
        )


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """torch's own generators start from `seed`, and are afterwards where they were."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def random_model(shape: Shape, positions: int, device: str, seed: int) -> Any:
    """GPT-2 with the weights that its training would start from, made on the device, and a row for each of `positions`.

    No dropout: nanoGPT fine-tunes without, and the fast kernels of cells have none.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": shape.width, "n_layer": shape.layers, "n_head": shape.heads, "vocab_size": shape.words}
    dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    config = GPT2Config(**sizes, **dropout, n_positions=positions, bos_token_id=None, eos_token_id=None)
    with seeded(seed), torch.device(device):
        return GPT2LMHeadModel(config)


def real_model(folder: Path, positions: int, device: str) -> tuple[Any, Any, int]:
    """A model in float32, its tokenizer, and how many of the positions asked for it can be tuned on."""
    model, tokenizer = load_model(folder, device)
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    table = getattr(model.base_model, "wpe", None)
    if table is not None:
        extend_positions(model, positions)
    known = getattr(model.config, "max_position_embeddings", None) or positions
    return model, tokenizer, min(positions, known)


def extend_positions(model: Any, positions: int) -> None:
    """Give a GPT-2 a longer table of positions: its rows over again.

    Repeated, not stretched: the first rows stay as they were trained, and so does the distance of neighbours everywhere. Rows in
    between would make every text, short ones too, one that the model has never seen.
    """
    table = model.base_model.wpe
    known = table.num_embeddings
    if positions <= known:
        return
    again = torch.arange(positions, device=table.weight.device) % known
    model.base_model.wpe = nn.Embedding.from_pretrained(table.weight.detach()[again], freeze=False)
    model.config.n_positions = positions


def parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
