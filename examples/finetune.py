"""Train a language model on long sequences with nearfield, next to the same steps with SDPA.

python examples/finetune.py                   # a small random model of bytes, without any download; half a minute on two cores
python examples/finetune.py MODEL --text TEXT --tokens 8192 --steps 10 --rate 1e-5
"""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from example_options import (
    PAYS,
    Parser,
    count,
    device_name,
    model_name,
    positive,
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


def random_model(positions: int) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes, max_position_embeddings=positions))


def train(model: Any, ids: Tensor, attention: str, tokens: int, steps: int, rate: float) -> tuple[list[float], float]:
    """Losses, and seconds per step. The same sequences in the same order every time."""
    model.set_attn_implementation(attention)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    order = torch.Generator().manual_seed(0)
    losses: list[float] = []
    start = time.perf_counter()
    for step in range(steps):
        first = int(torch.randint(max(1, ids.shape[1] - tokens), (), generator=order))
        batch = ids[:, first : first + tokens]
        loss = model(batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
        if step == 0:
            start = time.perf_counter()  # the first step may have compiled kernels
    return losses, (time.perf_counter() - start) / max(1, steps - 1)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("model", nargs="?", type=model_name, help="default: a small random model")
    parser.add_argument("--text", type=text_file, help="default: Python's own documentation")
    parser.add_argument("--tokens", type=count, default=65_536 if torch.cuda.is_available() else 2048, help="per sequence")
    parser.add_argument("--steps", type=count, default=20)
    parser.add_argument("--rate", type=positive, default=3e-3, help="learning rate; about 1e-5 for a trained model")
    parser.add_argument("--device", type=device_name, default=usual_device())
    options = parser.parse_args()
    if options.model:
        model, tokenizer = load_model(options.model, options.device)
        if options.text is None:
            parser.error("a trained model needs --text")
        ids = token_ids(tokenizer, options.text)
    else:
        model = random_model(options.tokens).to(options.device)
        words = options.text.read_text(encoding="utf-8") if options.text else python_documentation()
        ids = torch.tensor([list(words.encode()[: 16 * options.tokens])])
    ids = ids.to(options.device)

    # Gradients are exact for the estimate, with the choice of cells held fixed, and need no quadratic memory.
    hf.register("nearfield", nf.Cells())
    taken = {}
    table = Table(
        "attention", "s per step", "first loss", "last loss", title=f"{options.steps} steps of {options.tokens:,} tokens"
    )
    curves = {}
    for name in ("sdpa", "nearfield"):
        curves[name], seconds = train(copy.deepcopy(model), ids, name, options.tokens, options.steps, options.rate)
        taken[name] = seconds
        table.add_row(name, f"{seconds:.2f}", f"{curves[name][0]:.4f}", f"{curves[name][-1]:.4f}")
    console = Console()
    console.print(table)
    apart = max(abs(a - b) for a, b in zip(*curves.values(), strict=True))
    console.print(f"Largest difference between the losses of the same step: {apart:.4f}")
    console.print(verdict(taken["nearfield"], taken["sdpa"], options.tokens, PAYS))


if __name__ == "__main__":
    main()
