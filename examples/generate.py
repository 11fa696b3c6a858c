"""Continue a long prompt: nearfield reads the prompt, and each new token attends exactly to the cache.

python examples/generate.py                                       # a small random model of bytes; seconds on two cores
python examples/generate.py MODEL --text TEXT --tokens 4096       # a folder of Transformers or a .gguf file
python examples/generate.py MODEL --text TEXT --config nearfield-eval/config.json
"""

from __future__ import annotations

import time
from typing import Any

import torch
from example_options import (
    PAYS,
    Parser,
    count,
    device_name,
    model_name,
    old_file,
    python_documentation,
    text_file,
    usual_device,
    verdict,
)
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import nearfield as nf
from nearfield import hf
from nearfield.app.evaluate.models import load_model


def random_model(positions: int) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    # Larger weights than usual: the usual ones make attention nearly uniform.
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=256, **sizes, initializer_range=0.05, **ends, max_position_embeddings=positions)
    ).eval()


def generate(model: Any, ids: Tensor, attention: str, count: int) -> tuple[float, float, Tensor]:
    """Seconds until the first new token, seconds for each further one, and the new tokens."""
    model.set_attn_implementation(attention)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
    model.generate(ids, max_new_tokens=2, **options)  # warm-up
    times = []
    for tokens in (1, count):
        start = time.perf_counter()
        found = model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **options)[0, ids.shape[1] :].cpu()
        times.append(time.perf_counter() - start)
    return times[0], max(0.0, times[1] - times[0]) / max(1, count - 1), found


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("model", nargs="?", type=model_name, help="default: a small random model")
    parser.add_argument("--text", type=text_file, help="default: Python's own documentation")
    parser.add_argument("--tokens", type=count, default=65_536 if torch.cuda.is_available() else 4096, help="of the prompt")
    parser.add_argument("--new", type=count, default=24, help="tokens to generate")
    parser.add_argument("--config", type=old_file, help="methods by layer, as `nearfield eval` writes them")
    parser.add_argument("--device", type=device_name, default=usual_device())
    options = parser.parse_args()
    words = options.text.read_text(encoding="utf-8") if options.text else python_documentation()
    if options.model:
        model, tokenizer = load_model(options.model, options.device)
        ids = tokenizer(words[: 8 * options.tokens], return_tensors="pt", verbose=False)["input_ids"][:, : options.tokens]
    else:
        model, tokenizer = random_model(options.tokens + options.new).to(options.device), None
        ids = torch.tensor([list(words.encode()[: options.tokens])])

    if options.config:
        hf.register("nearfield", config=options.config)
    else:
        # The default method may still be SDPA at this length.
        hf.register("nearfield", nf.Cells())
    table = Table("attention", "prompt, s", "per token, ms", "tokens as with SDPA", title=f"a prompt of {ids.shape[1]:,} tokens")
    results = {name: generate(model, ids.to(options.device), name, options.new) for name in ("sdpa", "nearfield")}
    exact = results["sdpa"][2]
    for name, (prompt, each, found) in results.items():
        same = int((found == exact).int().cumprod(0).sum())
        table.add_row(name, f"{prompt:.2f}", f"{1000 * each:.1f}", f"the first {same} of {len(exact)}")
    console = Console()
    console.print(table)
    console.print(verdict(results["nearfield"][0], results["sdpa"][0], ids.shape[1], PAYS))
    console.print("New tokens attend exactly here, at SDPA's cost. examples/cell_cache.py has the cache that makes them cheaper.")
    if tokenizer is not None:
        for name, (_, _, found) in results.items():
            console.print(f"{name}: {tokenizer.decode(found)!r}", markup=False)


if __name__ == "__main__":
    main()
