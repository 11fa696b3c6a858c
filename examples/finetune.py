"""Train a language model on long sequences with nearfield, next to the same steps with SDPA.

python examples/finetune.py                   # a small random model of bytes, without any download; half a minute on two cores
python examples/finetune.py MODEL --text TEXT --tokens 8192 --steps 10 --rate 1e-5
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="default: a small random model")
    parser.add_argument("--text", type=Path, help="default: Python's own documentation")
    parser.add_argument("--tokens", type=int, default=2048, help="per sequence")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate; about 1e-5 for a trained model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.model:
        model, tokenizer = load_model(options.model, options.device)
        if options.text is None:
            parser.error("a trained model needs --text")
        ids = token_ids(tokenizer, options.text)
    else:
        model = random_model(options.tokens).to(options.device)
        words = options.text.read_text(encoding="utf-8") if options.text else "\n".join(topics.values())
        ids = torch.tensor([list(words.encode()[: 16 * options.tokens])])
    ids = ids.to(options.device)

    # Gradients are exact for the estimate, with the choice of cells held fixed, and need no quadratic memory.
    hf.register("nearfield", nf.Cells())
    table = Table(
        "attention", "s per step", "first loss", "last loss", title=f"{options.steps} steps of {options.tokens:,} tokens"
    )
    curves = {}
    for name in ("sdpa", "nearfield"):
        curves[name], seconds = train(copy.deepcopy(model), ids, name, options.tokens, options.steps, options.rate)
        table.add_row(name, f"{seconds:.2f}", f"{curves[name][0]:.4f}", f"{curves[name][-1]:.4f}")
    console = Console()
    console.print(table)
    apart = max(abs(a - b) for a, b in zip(*curves.values(), strict=True))
    console.print(f"Largest difference between the losses of the same step: {apart:.4f}")
    console.print(
        "Cells pay off at longer sequences (docs/cells.md and docs/gpu.md say where); these are enough to see that losses agree."
    )


if __name__ == "__main__":
    main()
