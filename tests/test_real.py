"""benchmarks/real.py: what it captures from a model is what the model's own attention works on."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

transformers = pytest.importorskip("transformers")

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))  # it imports others
spec = importlib.util.spec_from_file_location("real", BENCHMARKS / "real.py")
assert spec is not None
assert spec.loader is not None
real = importlib.util.module_from_spec(spec)
spec.loader.exec_module(real)

TOKENS = 40
SIZES = {
    "vocab_size": 32,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,  # ten times the usual one, so that attention is not uniform
}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES),
    "own scale": transformers.GraniteConfig(**SIZES, attention_multiplier=0.7),
    "window": transformers.MistralConfig(**SIZES, sliding_window=8),
}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"w{7 * i % 31}" for i in range(TOKENS + 10)))
    return path


def folder_of(config: Any, folder: Path) -> Path:
    """A random model with a tokenizer that knows the words w0, w1, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({"?": 0, **{f"w{i}": i + 1 for i in range(31)}}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder)
    return folder


def own_attention(model: Any, ids: Tensor) -> list[Tensor]:
    """What each layer of the model, left as it is, hands to its output projection: [1, n, heads * dim]."""
    outputs: list[Tensor] = []
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, inputs: outputs.append(inputs[0]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return outputs


@pytest.mark.parametrize("name", ["llama", "own scale"])
def test_attention_of_the_captured_tensors_is_the_models(name: str, tmp_path: Path, text: Path) -> None:
    folder = folder_of(CONFIGS[name], tmp_path / "model")
    layers = real.capture(folder, text, TOKENS)
    expected = own_attention(real.load(folder), real.token_ids(folder, text, TOKENS))
    assert len(layers) == len(expected) == 2
    for (query, key, value), output in zip(layers, expected, strict=True):
        assert query.shape == (1, 6, TOKENS, 8)
        assert key.shape == value.shape == (1, 2, TOKENS, 8)
        assert {tensor.dtype for tensor in (query, key, value)} == {torch.float32}
        again = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(again.transpose(1, 2).reshape(1, TOKENS, 48), output)


def test_layers_are_chosen_and_the_model_is_left_as_it_was(tmp_path: Path, text: Path) -> None:
    folder = folder_of(CONFIGS["llama"], tmp_path / "model")
    model, ids = real.load(folder), real.token_ids(folder, text, TOKENS)
    before, seen = real.perplexity(model, ids), []
    real.visit_layers(model, ids, lambda layer, *_: seen.append(layer), layers=[1])
    assert seen == [1]
    assert model.config._attn_implementation == "sdpa"
    assert real.perplexity(model, ids) == before
    assert before == pytest.approx(float(model(ids, labels=ids).loss.detach().exp()), rel=1e-5)


def test_what_cannot_be_captured_is_refused(tmp_path: Path, text: Path) -> None:
    with pytest.raises(FileNotFoundError, match="make smollm2"):
        real.capture(tmp_path / "nothing", text, TOKENS)
    folder = folder_of(CONFIGS["window"], tmp_path / "model")
    with pytest.raises(ValueError, match="layers 0 to 1"):
        real.capture(folder, text, TOKENS, layers=[2])
    with pytest.raises(ValueError, match="has only 50"):
        real.capture(folder, text, 51)
    with pytest.raises(ValueError, match="layer 0 hides more than the future"):
        real.capture(folder, text, TOKENS)
    assert len(real.capture(folder, text, 7)) == 2  # shorter than the window: nothing but the future is hidden
