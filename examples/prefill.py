"""Read a long prompt with a language model: time, and the predicted next tokens, with SDPA and with nearfield.

python examples/prefill.py                                        # a small random model of bytes; half a minute on two cores
python examples/prefill.py MODEL --text TEXT --tokens 8192        # a folder of Transformers or a .gguf file
python examples/prefill.py MODEL --text TEXT --config nearfield-eval/config.json    # chosen by `nearfield eval`
"""

from __future__ import annotations

import time
from pathlib import Path
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
from nearfield.app.evaluate.models import load_model, token_ids

LAST = 64
"""How many positions at the end are compared."""


def random_model(positions: int) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    # Larger weights than usual: the usual ones make attention nearly uniform.
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=256, **sizes, initializer_range=0.05, max_position_embeddings=positions)
    ).eval()


def prompt(tokenizer: Any | None, text: Path | None, tokens: int) -> Tensor:
    """`[1, tokens]` of a text, or of Python's own documentation; bytes if there is no tokenizer."""
    if tokenizer is not None and text is not None:
        return token_ids(tokenizer, text)[:, :tokens]
    words = text.read_text(encoding="utf-8") if text else python_documentation()
    if tokenizer is not None:
        return tokenizer(words[: 8 * tokens], return_tensors="pt", verbose=False)["input_ids"][:, :tokens]
    return torch.tensor([list(words.encode()[:tokens])])


@torch.no_grad()
def read(model: Any, ids: Tensor, attention: str) -> tuple[float, Tensor]:
    """Seconds, and log-probabilities of the next token at the last positions."""
    model.set_attn_implementation(attention)
    if ids.is_cuda:
        model(ids, use_cache=False, logits_to_keep=LAST)  # compiles kernels for this shape
    else:
        model(ids[:, :64])  # warm-up
    start = time.perf_counter()
    logits = model(ids, use_cache=False, logits_to_keep=LAST).logits[0]
    found = logits.float().log_softmax(-1).cpu()  # waits for a GPU
    return time.perf_counter() - start, found


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("model", nargs="?", type=model_name, help="default: a small random model")
    parser.add_argument("--text", type=text_file, help="default: Python's own documentation")
    parser.add_argument(
        "--tokens",
        type=count,
        default=131_072 if torch.cuda.is_available() else 32_768,
        help="at most the positions that the model knows",
    )
    parser.add_argument("--config", type=old_file, help="methods by layer, as `nearfield eval` writes them")
    parser.add_argument("--device", type=device_name, default=usual_device())
    options = parser.parse_args()
    if options.model:
        dtype = torch.bfloat16 if options.device.startswith("cuda") else torch.float32
        model, tokenizer = load_model(options.model, options.device, dtype)
    else:
        model, tokenizer = random_model(options.tokens).to(options.device), None
    tokens = min(options.tokens, model.config.get_text_config().max_position_embeddings)
    ids = prompt(tokenizer, options.text, tokens).to(options.device)

    hf.register("nearfield")  # SDPA or cells, whichever is faster at this length
    hf.register("nearfield-cells", nf.Cells())
    names = ["nearfield", "nearfield-cells"]
    if options.config:
        hf.register("nearfield-config", config=options.config)
        names.append("nearfield-config")

    seconds, exact = read(model, ids, "sdpa")
    table = Table("attention", "seconds", "SDPA / this", "same next token", "divergence", title=f"{ids.shape[1]:,} tokens")
    table.add_row("sdpa", f"{seconds:.2f}", "1.00", "", "")
    taken = {}
    for name in names:
        own, found = read(model, ids, name)
        taken[name] = own
        same = (found.argmax(-1) == exact.argmax(-1)).float().mean()
        divergence = (exact.exp() * (exact - found)).sum(-1).mean()
        table.add_row(name, f"{own:.2f}", f"{seconds / own:.2f}", f"{same:.0%}", f"{divergence:.1e}")
    console = Console()
    console.print(table)
    console.print(verdict(taken["nearfield-cells"], seconds, ids.shape[1], PAYS))
    console.print(f"Same next token and Kullback-Leibler divergence (nats): over the last {LAST} positions, against SDPA.")


if __name__ == "__main__":
    main()
