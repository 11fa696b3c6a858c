"""Causal language models, and texts as tokens. Everything is read from this machine unless a download is asked for."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

WEIGHTS = ("*.safetensors", "*.bin")


def placement(device: torch.device | None, dtype: torch.dtype | None) -> tuple[torch.device, torch.dtype]:
    """Where a model runs and in what dtype, if the user does not say: on a GPU in bfloat16, or on the CPU in float32."""
    place = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return place, dtype or (torch.bfloat16 if place.type == "cuda" else torch.float32)


def load_model(
    name: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, download: bool = False
) -> tuple[Any, Any]:
    """A causal language model of Transformers, ready for inference, and its tokenizer.

    Args:
        name: a folder that `save_pretrained` has written, a `.gguf` file (or a folder with one and no other weights), or anything
            else that `from_pretrained` takes.
        download: whether Transformers may look for the model on the hub.
    """
    with _reading(name):
        from transformers import AutoModelForCausalLM

        weights = _gguf(Path(name))
        if weights is not None:
            model = _from_gguf(weights, dtype)
        else:
            options: dict[str, Any] = {"local_files_only": not download, "trust_remote_code": False}
            model = AutoModelForCausalLM.from_pretrained(str(name), dtype=dtype, **options)
    return model.to(device).eval(), load_tokenizer(name, download)


def load_config(name: str | Path, download: bool = False) -> Any:
    """The configuration of such a model alone; None: there is no file for it, as where a GGUF file has everything."""
    if Path(name).exists() and not (Path(name) / "config.json").exists():
        return None
    with _reading(name):
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(str(name), local_files_only=not download, trust_remote_code=False)


def load_tokenizer(name: str | Path, download: bool = False) -> Any:
    """The tokenizer of such a model alone."""
    with _reading(name):
        from transformers import AutoTokenizer

        weights = _gguf(Path(name))
        if weights is None:
            return AutoTokenizer.from_pretrained(str(name), local_files_only=not download, trust_remote_code=False)
        # A tokenizer beside the weights loads faster than the one inside them.
        beside = (weights.parent / "tokenizer.json").exists()
        return AutoTokenizer.from_pretrained(str(weights.parent), local_files_only=True) if beside else gguf_tokenizer(weights)


@contextmanager
def _reading(name: str | Path) -> Iterator[None]:
    """Files of a model are read inside: what can go wrong is said in one line, and Transformers shows no bars."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError("language models need Transformers: pip install 'nearfield[transformers]'") from error
    messages = transformers.utils.logging
    with_bars = messages.is_progress_bar_enabled()
    messages.disable_progress_bar()  # the command line shows its own
    try:
        yield
    except OSError as error:
        if (Path(name) / "config.json").exists():
            raise _damaged(name, error) from error
        raise FileNotFoundError(
            f"Transformers finds no causal language model {name} on this machine ({_first_line(error)}); give the folder of one "
            "or a .gguf file, or allow a download with --download"
        ) from error
    except Exception as error:
        if not _is_damage(error):
            raise
        raise _damaged(name, error) from error
    finally:
        if with_bars:
            messages.enable_progress_bar()


def _damaged(name: str | Path, error: Exception) -> OSError:
    return OSError(
        f"the files of {name} cannot be read ({_first_line(error)}); the download is incomplete or damaged: remove the "
        "folder and fetch the model again"
    )


def _is_damage(error: Exception) -> bool:
    """Whether this is what readers of weights and tokenizers raise when a file is cut off or altered."""
    return type(error).__name__ in ("SafetensorError", "UnpicklingError", "JSONDecodeError")


def _gguf(path: Path) -> Path | None:
    """The GGUF file that `path` is, or holds; None if there is none."""
    if path.suffix == ".gguf" and path.is_file():
        return path
    if not path.is_dir() or any(next(path.glob(kind), None) for kind in WEIGHTS):
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise ValueError(f"{path} holds {len(files)} GGUF files; name one of them, such as {files[0]}")
    return files[0] if files else None


def _from_gguf(weights: Path, dtype: torch.dtype) -> Any:
    import transformers

    if importlib.util.find_spec("gguf") is None:
        raise ImportError(".gguf files need the package gguf: pip install 'nearfield[real]'")
    # Later versions may keep weights packed. Earlier ones always unpack them, and have no such setting.
    unpacked = {"quantization_config": transformers.GgufConfig(dequantize=True)} if hasattr(transformers, "GgufConfig") else {}
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        str(weights.parent), gguf_file=weights.name, local_files_only=True, dtype=torch.float32, **unpacked
    )
    # Only the parameters: the frequencies of rotary embeddings are buffers, and must stay in float32.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def gguf_tokenizer(weights: Path) -> Any:
    """The tokenizer inside a GGUF file."""
    from gguf import GGUFReader
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(weights.parent), gguf_file=weights.name, local_files_only=True)
    # Transformers leaves this out. Gemma without its first token has twice the perplexity.
    begins = GGUFReader(weights).get_field("tokenizer.ggml.add_bos_token")
    if begins is not None and begins.contents():
        tokenizer.add_bos_token = True
    return tokenizer


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")


def read_text(path: Path) -> str:
    """A text in UTF-8. Raises ValueError, with the reason, if there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a text file in UTF-8 ({_first_line(error)})") from error


def token_ids(tokenizer: Any, text: Path) -> Tensor:
    """All tokens of a text, `[1, tokens]`."""
    ids: Tensor = tokenizer(read_text(text), return_tensors="pt", verbose=False)["input_ids"]
    return ids


def longest_context(model: Any) -> int | None:
    """How many positions the model knows; None if it does not say."""
    return known_positions(model.config)


def known_positions(config: Any) -> int | None:
    """The same by the configuration of a model."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def layer_count(model: Any) -> int:
    count: int = model.config.get_text_config().num_hidden_layers
    return count


def generation_config(model: Any, tokenizer: Any, most: int, **options: Any) -> Any:
    """Options of `generate` for up to `most` tokens, by default the likeliest ones. Of the model's own, only what ends a text."""
    from transformers import GenerationConfig

    own = model.generation_config.eos_token_id
    ends = own if own is not None else tokenizer.eos_token_id
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    return GenerationConfig(max_new_tokens=most, eos_token_id=ends, pad_token_id=pad, **{"do_sample": False, **options})
