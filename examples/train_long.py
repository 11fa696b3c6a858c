"""Train on one long sequence at a time: a small model of bytes with SDPA and with cells, from the same weights on the same text.

python examples/train_long.py                                  # 32,768 bytes a step; some minutes on two cores
python examples/train_long.py --text BOOK --tokens 65536 --device cuda

Cells train with gradients that are exact for what they compute, and need no memory of length times length.
"""

from __future__ import annotations

import copy
import time

import torch
import torch.nn.functional as F
from example_options import PAYS, Parser, count, device_name, positive, python_documentation, text_file, usual_device, verdict
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

import nearfield as nf
from nearfield.app.evaluate.models import read_text

WIDTH, HEADS = 64, 1


class Model(nn.Module):
    """Bytes in, logits of the next byte out. A short convolution tells the attention what came just before a byte."""

    def __init__(self) -> None:
        super().__init__()
        self.symbol, self.recent = nn.Embedding(256, WIDTH), nn.Conv1d(WIDTH, WIDTH, 8)
        self.norm, self.attention = nn.LayerNorm(WIDTH), nf.nn.Attention(WIDTH, HEADS, method=nf.Exact())
        self.last = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def loss(self, ids: Tensor) -> Tensor:
        """Mean of -log p(next byte) over `ids` `[1, n]`."""
        x = self.symbol(ids[:, :-1])
        x = x + self.recent(F.pad(x.transpose(1, 2), (7, 0))).transpose(1, 2)
        x = x + self.attention(self.norm(x), is_causal=True)[0]
        return F.cross_entropy(self.last(x).flatten(0, 1), ids[0, 1:])


def train(model: Model, batches: list[Tensor], rate: float, progress: Progress, name: str) -> tuple[list[float], float]:
    """The loss of every step, and seconds per step; the first one may compile kernels and does not count if there are more."""
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    losses, seconds = [], []
    for ids in progress.track(batches, description=name):
        start = time.perf_counter()
        loss = model.loss(ids)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        seconds.append(time.perf_counter() - start)
    counted = seconds[1:] or seconds
    return losses, sum(counted) / len(counted)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--text", type=text_file, help="default: Python's own documentation")
    parser.add_argument("--tokens", type=count, default=32_768, help="bytes per step")
    parser.add_argument("--steps", type=count, default=4)
    parser.add_argument("--rate", type=positive, default=3e-3, help="learning rate")
    parser.add_argument("--device", type=device_name, default=usual_device())
    options = parser.parse_args()
    words = (read_text(options.text) if options.text else python_documentation()).encode()
    if len(words) < options.tokens + options.steps:
        parser.error(f"--tokens {options.tokens:,} and --steps {options.steps:,} are more than a text of {len(words):,} bytes")
    order = torch.Generator().manual_seed(0)
    starts = torch.randint(len(words) - options.tokens, (options.steps,), generator=order).tolist()
    batches = [torch.tensor([list(words[start : start + options.tokens + 1])]).to(options.device) for start in starts]

    torch.manual_seed(0)
    begin = Model().to(options.device)
    title = f"{options.steps} steps of {options.tokens:,} bytes, {options.device}"
    table = Table("attention", "s per step", "first loss", "last loss", title=title)
    console, results = Console(), {}
    with Progress(console=console, transient=True) as progress:
        for name, method in (("exact (SDPA)", nf.Exact()), ("cells", nf.Cells())):
            model = copy.deepcopy(begin)
            model.attention.method = method
            losses, seconds = results[name] = train(model, batches, options.rate, progress, name)
            table.add_row(name, f"{seconds:.2f}", f"{losses[0]:.4f}", f"{losses[-1]:.4f}")
    console.print(table)
    (exact, theirs), (cells, ours) = results.values()
    apart = max(abs(a - b) for a, b in zip(exact, cells, strict=True))
    console.print(f"Largest difference between the losses of the same step: {apart:.4f}")
    console.print(verdict(ours, theirs, options.tokens, PAYS))


if __name__ == "__main__":
    main()
