"""Memories for tests: a small model, a text, the file of a memory of it, and what to compare."""

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
    """All numbers of a memory."""
    layers = [layer for layer in memory.cache().layers if isinstance(layer, CellLayer)]
    state = [layer.store.state for layer in layers if layer.store.state is not None]
    assert len(state) == len(layers) > 0
    tables = [getattr(one.tables, name) for one in state for name in ("start", "size", "void", "centroid", "variance", "value")]
    parts = [x for one in state for x in (one.keys.filled, one.values.filled, one.order.filled, one.sinks)]
    return [memory.tokens, *parts, *(x.filled for x in tables)]
