"""For tests of memories: small models, a text, the file of its memory, and what to compare."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from hf_models import pair, tokens

import nearfield
from nearfield import hf
from nearfield.cells.cache.segments import PER_CELL
from nearfield.hf.cache import CellLayer

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


def everything(memory: hf.Memory) -> list[Tensor]:
    """All tensors of a memory."""
    layers = [layer for layer in memory.cache().layers if isinstance(layer, CellLayer)]
    states = [layer.store.state for layer in layers if layer.store.state is not None]
    assert len(states) == len(layers) > 0
    found = [memory.tokens]
    for state in states:
        found += [state.keys.filled, state.values.filled, state.order.filled, state.sinks]
        found += [getattr(state.tables, name).filled for name in PER_CELL]
        found += [state.tables.cross, state.tables.pooled]
    return found
