"""Generate with a cache that several processes share: each has its part of the keys, and all get the same tokens.

torchrun --nproc-per-node 4 examples/distributed_generate.py                 # a small random model, a minute on two cores
torchrun --nproc-per-node 4 examples/distributed_generate.py --keys 262144 --new 64
torchrun --nproc-per-node 8 examples/distributed_generate.py MODEL --keys 1048576 --device cuda

The keys are made up, each rank its own, as those of a prompt are that ranks have read together. A step exchanges scores of cells
and outputs of heads, and no keys. At the end the cache is saved, one process loads all of it, and generates the same tokens.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from example_options import Parser, count, device_name, model_name, usual_device
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from nearfield import hf
from nearfield.app.evaluate.models import load_model
from nearfield.distributed import Ranks
from nearfield.distributed.layout import ZigZag

CENTRES = 256
"""Keys are made up around so many points."""


def small_model(positions: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    # Larger weights than usual: the usual ones make attention nearly uniform.
    config = LlamaConfig(vocab_size=256, **sizes, **heads, **ends, initializer_range=0.05, max_position_embeddings=positions)
    return LlamaForCausalLM(config).eval()


def fill(cache: hf.CellCache, model: Any, ranks: Ranks, keys: int) -> None:
    """Give each layer so many keys, of which this rank makes its own."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layout = ZigZag(keys, ranks.size)
    for number, layer in enumerate(cache.layers):
        shared = torch.Generator().manual_seed(number)
        centres = 2 * torch.randn(2, heads, CENTRES, dim, generator=shared)
        own = torch.Generator().manual_seed(1000 * number + ranks.rank + 1)
        nearest = torch.randint(CENTRES, (layout.on(ranks.rank),), generator=own)
        made = centres[:, :, nearest] + 0.5 * torch.randn(2, heads, len(nearest), dim, generator=own)
        key, value = made.to(model.device, model.dtype)[:, None]
        layer.store.append_shard(key, value, layout)  # type: ignore[union-attr]
        layer.store.close()  # type: ignore[union-attr]


@torch.no_grad()
def generate(model: Any, cache: hf.CellCache, new: int, title: str | None) -> tuple[Tensor, Tensor, float]:
    """The new tokens, their logits, and seconds per token; `title` of a progress bar."""
    token, start = torch.tensor([[1]], device=model.device), cache.get_seq_length()
    tokens, logits, seconds = [], [], []
    steps = range(start, start + new)
    for position in steps if title is None else track(steps, title, transient=True):
        began = time.perf_counter()
        place = torch.tensor([[position]], device=model.device)
        logits.append(model(token, past_key_values=cache, position_ids=place).logits[0, -1].float().cpu())
        token = logits[-1].argmax().view(1, 1).to(model.device)
        tokens.append(token.cpu())
        seconds.append(time.perf_counter() - began)
    later = seconds[1:] or seconds  # the first step warms up
    return torch.cat(tokens, 1)[0], torch.stack(logits), sum(later) / len(later)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("model", nargs="?", type=model_name, help="default: a small random model")
    parser.add_argument("--keys", type=count, default=32_768, help="in the cache at first, on all ranks together")
    parser.add_argument("--new", type=count, default=32, help="tokens to generate")
    parser.add_argument(
        "--balance", choices=["global", "local"], default="global", help="whose cells are opened: the best of all"
    )
    parser.add_argument("--device", type=device_name, default=usual_device())
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun --nproc-per-node 4")

    device = torch.device(options.device, int(os.environ["LOCAL_RANK"]) if options.device == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["LOCAL_WORLD_SIZE"])))
    # Before the job is joined: with its models Transformers imports torch.distributed.nn, which holds on to a group that is there
    # already, for good. The threads of that group would go on while Python ends, and may abort the process.
    if options.model:
        model, _ = load_model(options.model, str(device))
    else:
        model = small_model(options.keys + options.new).to(device)
    hf.register()
    model.set_attn_implementation("nearfield")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        show(run(model, options.keys, options.new, options.balance))
    finally:
        dist.destroy_process_group()


def run(model: Any, keys: int, new: int, balance: str) -> Table | None:
    """What rank 0 shows at the end."""
    ranks = Ranks(dist.group.WORLD)
    alone = dist.new_group([0])
    cache = hf.CellCache(config=model.config, mesh=ranks, balance=balance)
    fill(cache, model, ranks, keys)
    folder = Path(ranks.texts("folder", tempfile.mkdtemp() if ranks.rank == 0 else "")[0])
    try:
        cache.save(folder)
        before = cache.sent
        tokens, logits, seconds = generate(model, cache, new, "all ranks" if ranks.rank == 0 else None)
        sent = {what: (size - before.get(what, 0)) / new for what, size in cache.sent.items()}
        held = ranks.texts("held", f"{cache.layers[0].store.held:,}")  # type: ignore[union-attr]
        if ranks.rank:
            ranks.texts("done", "")
            return None
        single = hf.CellCache.load(folder, alone, device=model.device)
        same_tokens, same_logits, single_seconds = generate(model, single, new, "one process")
        ranks.texts("done", "")
    finally:
        if ranks.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    same = int((tokens == same_tokens).int().cumprod(0).sum())
    off = float((logits - same_logits)[: max(1, same)].abs().max())
    table = Table("", f"{ranks.size} ranks", "one process", title=f"{new} tokens after {keys:,} keys per layer, {balance} choice")
    table.add_row("tokens per second", f"{1 / seconds:.1f}", f"{1 / single_seconds:.1f}")
    table.add_row("keys of a layer", ", ".join(held), f"{single.get_seq_length():,}")
    for what, size in sorted(sent.items()):
        if size:
            table.add_row(f"bytes sent per token: {what}", f"{size:,.0f}", "0")
    table.add_row("tokens as in one process", f"the first {same} of {new}", "")
    table.add_row("logits off by at most", f"{off:.1e}", "")
    return table


def show(table: Table | None) -> None:
    if table is not None:
        Console(width=int(os.environ.get("COLUMNS", "0")) or None).print(table)


if __name__ == "__main__":
    main()
