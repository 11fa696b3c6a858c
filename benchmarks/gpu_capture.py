"""Queries, keys and values of a model on a long text, for `bench_gpu.py --captured`: tokens here, the model on a GPU.

python benchmarks/gpu_capture.py tokens --out tokens.pt [--text TEXT]                  # where the tokenizer is
python benchmarks/gpu_capture.py layers --ids tokens.pt --model FOLDER --out FOLDER    # where the GPU is: saves layer_00.pt, ...

The model's folder is what `make smollm2`, `make qwen` or `make gemma` makes, or what `fetch_model.py NAME --gguf` writes (this
needs the package gguf). Gemma's layers have a window, all but 5, 11 and 17 (`--layers 5 11 17`). For more tokens than a model was
trained on, the base of its rotary embedding is raised to base * factor^(dim / (dim - 2)), so that its slowest turn is that many
times slower ("NTK-aware"). The model runs in bfloat16, and what it computes is saved so (SmolLM2 at 131,072 tokens: 250 MB a
layer), next to capture.json: what was done, and the perplexity of each eighth of the text.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import gguf_qwen
import real
import torch
import torch.nn.functional as F
from torch import Tensor

from nearfield.app.evaluate.models import load_model

TOKENS = 131_072
DTYPE = torch.bfloat16
CHARACTERS_PER_TOKEN = 6
"""More than there are in text; the standard library has enough docstrings for 131,072 tokens."""
HEAD_ROWS = 2048
"""Positions whose logits over the vocabulary are held at a time."""


def tokens(text: Path | None, model_folder: Path, count: int, out: Path) -> None:
    """Save the first `count` ids of the text, int32."""
    with tempfile.TemporaryDirectory() as folder:
        if text is None:
            text = Path(folder) / "docstrings.txt"
            text.write_text(real.standard_library_text(CHARACTERS_PER_TOKEN * count), encoding="utf-8")
        ids = real.token_ids(model_folder, text, count)
    torch.save({"ids": ids.int(), "text": text.name}, out)
    print(f"written: {out}, {ids.shape[1]:,} tokens of {text.name}")


def load(folder: Path, device: str) -> Any:
    """The model in bfloat16. The packed weights of Qwen are unpacked on the device, those of others before."""
    config = folder / "config.json"
    if any(folder.glob("*.gguf")) and config.exists() and json.loads(config.read_text())["model_type"] == "qwen2":
        return gguf_qwen.load(folder, device, DTYPE)
    return load_model(folder, device, DTYPE)[0]


def lengthen(model: Any, count: int) -> Any:
    """Raise the base of the rotary embedding so that `count` positions make sense; returns the base."""
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None)
    factor = count / config.max_position_embeddings
    if rope and "rope_theta" not in rope:
        if factor > 1:
            raise ValueError(f"each kind of layer has a base of its own; read at most {config.max_position_embeddings} tokens")
        base = {kind: own["rope_theta"] for kind, own in rope.items()}
    else:
        base = rope["rope_theta"] if rope else config.rope_theta
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if factor > 1:
        base *= factor ** (dim / (dim - 2))
        if rope:
            rope["rope_theta"] = base
        else:
            config.rope_theta = base
    # Made anew in any case: its frequencies have been rounded to bfloat16 like everything else.
    inner = model.base_model
    inner.rotary_emb = type(inner.rotary_emb)(config=config).to(model.device)
    return base


def layers(ids_file: Path, model_folder: Path, wanted: list[int] | None, out: Path, device: str) -> None:
    """Run the model once and save the chosen layers; None: every fifth one, and the last."""
    given = torch.load(ids_file)
    ids = given["ids"].long().to(device)
    model = load(model_folder, device)
    if wanted is None:
        last = model.config.get_text_config().num_hidden_layers - 1
        wanted = [*range(0, last, 5), last]
    base = lengthen(model, ids.shape[1])
    out.mkdir(parents=True, exist_ok=True)
    shapes: dict[str, list[int]] = {}

    def save(layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        path = out / f"layer_{layer:02}.pt"
        torch.save({name: x.to("cpu", DTYPE) for name, x in (("q", query), ("k", key), ("v", value))}, path)
        shapes.update(q=list(query.shape), k=list(key.shape))
        print(path, tuple(query.shape), tuple(key.shape), flush=True)

    states: list[Tensor] = []
    hook = model.base_model.register_forward_hook(lambda _, __, output: states.append(output.last_hidden_state))
    try:
        real.visit_layers(model, ids, save, wanted)
    finally:
        hook.remove()
    about = {
        "model": model_folder.name,
        "text": given["text"],
        "tokens": ids.shape[1],
        "layers": wanted,
        "shapes": shapes,
        "rope_base": base,
        "dtype": str(DTYPE),
        "perplexity_of_eighths": perplexities(model, states[0], ids, 8),
    }
    (out / "capture.json").write_text(json.dumps(about, indent=2) + "\n")
    print(json.dumps(about))


@torch.inference_mode()
def perplexities(model: Any, states: Tensor, ids: Tensor, parts: int) -> list[float]:
    """exp of the mean loss of each part of the text: whether the model still reads well where it was never trained."""
    losses = []
    for hidden, following in zip(states[0, :-1].split(HEAD_ROWS), ids[0, 1:].split(HEAD_ROWS), strict=True):
        losses.append(F.cross_entropy(model.get_output_embeddings()(hidden).float(), following, reduction="none"))
    return [math.exp(float(part.mean())) for part in torch.cat(losses).chunk(parts)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    first = modes.add_parser("tokens", help="turn a text into ids")
    first.add_argument("--text", type=Path, help="what the model reads; without it, docstrings of Python's standard library")
    first.add_argument("--tokens", type=int, default=TOKENS)
    second = modes.add_parser("layers", help="run the model over them and save q, k, v of some layers")
    second.add_argument("--ids", type=Path, required=True, help="what `tokens` has saved")
    second.add_argument("--layers", type=int, nargs="+", help="default: every fifth one, and the last")
    second.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for mode in (first, second):
        mode.add_argument("--model", type=Path, default=real.SMOLLM2)
        mode.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.mode == "tokens":
        tokens(options.text, options.model, options.tokens, options.out)
    else:
        layers(options.ids, options.model, options.layers, options.out, options.device)


if __name__ == "__main__":
    main()
