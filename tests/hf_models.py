"""Tiny random models of the families of Hugging Face Transformers. Nothing is downloaded."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers

VOCABULARY = 97
WINDOW = 6
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW, "head_dim": 8}


def config(family: str, **changes: Any) -> Any:
    """The configuration of a tiny model, with `changes`."""
    match family:
        case "llama":
            return transformers.LlamaConfig(**GROUPED | changes)
        case "qwen2":
            return transformers.Qwen2Config(**GROUPED | changes)
        case "mistral":
            return transformers.MistralConfig(**GROUPED | {"sliding_window": WINDOW} | changes)
        case "gemma2":
            options = {"attn_logit_softcapping": None, "query_pre_attn_scalar": 8}
            return transformers.Gemma2Config(**GROUPED | ALTERNATING | options | changes)
        case "gemma3":
            return transformers.Gemma3TextConfig(**GROUPED | ALTERNATING | {"query_pre_attn_scalar": 8} | changes)
        case "lfm2":
            return transformers.Lfm2Config(**GROUPED | {"layer_types": ["conv", "full_attention"]} | changes)
        case "gpt2":
            names = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "n_inner": 48}
            dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
            ends = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
            return transformers.GPT2Config(**names | dropout | ends | changes)
        case "gpt_oss":
            options = {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": WINDOW, "head_dim": 8}
            return transformers.GptOssConfig(**GROUPED | options | changes)
        case "bert":
            dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            return transformers.BertConfig(**SIZES | dropout | changes)
        case "bart":
            sides = {f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in _SIDE.items()}
            options = {"d_model": 32, "vocab_size": VOCABULARY, "max_position_embeddings": 256, "dropout": 0.0}
            ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
            return transformers.BartConfig(**sides | options | ends | {"forced_eos_token_id": None} | changes)
        case "t5":
            names = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
            ends = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 1}
            return transformers.T5Config(**names | ends | changes)
    raise ValueError(f"no such family: {family}")


_SIDE = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}

CLASSES = {
    "bert": transformers.BertForMaskedLM,
    "bart": transformers.BartForConditionalGeneration,
    "t5": transformers.T5ForConditionalGeneration,
}


def model(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A tiny model with random weights, the same every time, with torch's attention."""
    torch.manual_seed(0)
    made = config(family, **changes)
    made._attn_implementation = "eager" if family in ("gemma2", "gpt_oss") else "sdpa"  # they have no SDPA
    found = CLASSES.get(family)
    built = found(made) if found else transformers.AutoModelForCausalLM.from_config(made)
    with torch.no_grad():
        for weight in built.parameters():
            # The usual small weights make attention nearly uniform, so that masks and keys would hardly matter.
            if weight.dim() > 1:
                weight.mul_(6.0)
    return built.to(dtype).eval()


def pair(family: str, name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[Any, Any]:
    """The same model with torch's attention and with the attention registered as `name`."""
    plain = model(family, dtype, **changes)
    ours = copy.deepcopy(plain)
    ours.set_attn_implementation(name)
    return plain, ours


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    """Random tokens other than padding and end."""
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def tokenizer_of_letters() -> Any:
    """A tokenizer whose tokens are single characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,\n'\"()-"
    found = Tokenizer(models.WordLevel({letter: i + 3 for i, letter in enumerate(letters)} | {"?": 0}, unk_token="?"))
    found.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    found.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=found, unk_token="?")
