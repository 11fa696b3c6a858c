"""`gpu_capture.py`: how rotary embeddings are stretched beyond the positions of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 8}


@pytest.fixture
def gpu_capture(load: Callable[[str], Any]) -> Any:
    return load("gpu_capture")


@pytest.mark.parametrize(("count", "factor"), [(32, 1.0), (20, 1.0), (128, 4.0)])
def test_the_slowest_turn_is_slower_by_the_factor(gpu_capture: Any, count: int, factor: float) -> None:
    config = transformers.LlamaConfig(vocab_size=9, max_position_embeddings=32, **SIZES)
    model = transformers.LlamaForCausalLM(config)
    before = model.model.rotary_emb.inv_freq.clone()
    base = gpu_capture.lengthen(model.to(torch.bfloat16), count)
    after = model.model.rotary_emb.inv_freq
    assert after.dtype == torch.float32
    assert base == pytest.approx(10_000.0 * factor ** (8 / 6))
    torch.testing.assert_close(after[[0, -1]], before[[0, -1]] / torch.tensor([1.0, factor]))


def test_a_model_with_several_bases_is_not_stretched(gpu_capture: Any) -> None:
    config = transformers.Gemma3TextConfig(vocab_size=9, max_position_embeddings=32, head_dim=8, **SIZES)
    model = transformers.Gemma3ForCausalLM(config)
    assert set(gpu_capture.lengthen(model, 32)) == {"full_attention", "sliding_attention"}
    with pytest.raises(ValueError, match="read at most 32 tokens"):
        gpu_capture.lengthen(model, 33)
