"""Train a small model of characters with exact, top-k and random-walk gradients, from the same weights on the same batches.

python examples/train_walks.py        # on Python's own documentation, without any download; under two minutes on two cores
python examples/train_walks.py --text TEXT --walks 64 --dropout 0.1 --out FOLDER

It draws the losses against the steps to FOLDER/train_walks.png and writes them to FOLDER/train_walks.json.
"""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from example_options import Parser, count, new_folder, positive, python_documentation, share, text_file
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

import nearfield as nf
from nearfield.app.environment import environment

WIDTH, HEADS, LAYERS, BATCH = 64, 4, 2, 16
HELD_OUT = 32
"""Windows at the end of the text that are kept for the last measurement."""
SMOOTH = 20
"""Steps that a point of a curve averages; and the first ones, in which the learning rate grows."""


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = nf.nn.Attention(WIDTH, HEADS, dropout)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x), is_causal=True)[0]
        return x + self.wide(self.norms[1](x))


class Model(nn.Module):
    """Characters in, logits of the next character out."""

    def __init__(self, symbols: int, context: int, dropout: float) -> None:
        super().__init__()
        self.symbol, self.place = nn.Embedding(symbols, WIDTH), nn.Embedding(context, WIDTH)
        for table in (self.symbol, self.place):
            nn.init.normal_(table.weight, std=0.1)
        self.blocks = nn.Sequential(*(Block(dropout) for _ in range(LAYERS)))
        self.last = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, symbols))

    def attend(self, method: nf.Method, gradient: nf.gradients.Gradient | None = None) -> Model:
        for block in self.blocks:
            block.attention.method, block.attention.gradient = method, gradient
        return self

    def loss(self, windows: Tensor) -> Tensor:
        """Mean of -log p(next character) over windows `[batch, context + 1]`."""
        ids = windows[:, :-1]
        logits = self.last(self.blocks(self.symbol(ids) + self.place.weight[: ids.shape[1]]))
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def train(model: Model, batches: list[Tensor], rate: float, progress: Progress, name: str) -> tuple[list[float], float]:
    """The loss of every step, and processor seconds per step, which others on the same machine do not change much."""
    torch.manual_seed(0)  # all walks and all dropout
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / SMOOTH, total_iters=SMOOTH)
    losses = []
    start = time.process_time()
    for windows in progress.track(batches, description=name):
        loss = model.loss(windows)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    return losses, (time.process_time() - start) / len(batches)


def draw(runs: dict[str, Any], path: Path) -> None:
    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for (name, run), color in zip(runs.items(), ("#1f2933", "#d97706", "#2a7f86"), strict=True):
        losses = torch.tensor(run["losses"])
        width = min(SMOOTH, len(losses))
        smooth = losses.unfold(0, width, 1).mean(-1)
        axis.plot(range(1, len(losses) + 1), losses, color=color, alpha=0.2, linewidth=0.8)
        axis.plot(range(width, len(losses) + 1), smooth, color=color, label=f"{name}: {run['cpu_seconds']:.3f} CPU s per step")
    axis.set(
        xlabel=f"step (thick: mean of {SMOOTH} steps)",
        ylabel="loss (nats per character)",
        title="The same weights and batches, three gradients",
    )
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--text", type=text_file, help="default: Python's own documentation")
    parser.add_argument("--steps", type=count, default=500)
    parser.add_argument("--context", type=count, default=64, help="characters that the model sees")
    parser.add_argument("--k", type=count, default=16, help="keys per row of top-k attention")
    parser.add_argument("--walks", type=count, default=16, help="walks per row")
    parser.add_argument("--rate", type=positive, default=3e-3, help="learning rate")
    parser.add_argument("--dropout", type=share, default=0.0, help="on the attention weights")
    parser.add_argument("--out", type=new_folder, default=Path("train-walks"), help="folder of the picture and the numbers")
    options = parser.parse_args()
    text = options.text.read_text(encoding="utf-8") if options.text else python_documentation()
    symbols = sorted(set(text))
    if len(text) < 2 * HELD_OUT * (options.context + 1):
        parser.error(f"--text must have at least {2 * HELD_OUT * (options.context + 1):,} characters, got {len(text):,}")
    number = {symbol: i for i, symbol in enumerate(symbols)}
    ids = torch.tensor([number[symbol] for symbol in text])
    held_out = ids[-HELD_OUT * (options.context + 1) :].view(HELD_OUT, -1)
    windows = ids[: -held_out.numel()].unfold(0, options.context + 1, 1)
    order = torch.Generator().manual_seed(0)
    batches = [windows[torch.randint(len(windows), (BATCH,), generator=order)] for _ in range(options.steps)]

    torch.manual_seed(0)
    start = Model(len(symbols), options.context, options.dropout)
    ways: dict[str, tuple[nf.Method, nf.gradients.Gradient | None]] = {
        "exact": (nf.Exact(), None),
        f"top-k, k = {options.k}": (nf.TopK(k=options.k), None),
        f"{options.walks} random walks": (nf.Exact(), nf.gradients.RandomWalk(walks=options.walks)),
    }
    table = Table("gradient", "CPU s per step", "first loss", "last losses", "held-out text", title=f"{options.steps} steps")
    runs: dict[str, Any] = {}
    console = Console()
    with Progress(console=console) as progress:
        for name, way in ways.items():
            model = copy.deepcopy(start).attend(*way)
            losses, seconds = train(model, batches, options.rate, progress, name)
            with torch.no_grad():  # with exact attention, whatever the model was trained with
                after = float(model.eval().attend(nf.Exact()).loss(held_out))
            runs[name] = {"cpu_seconds": seconds, "held_out": after, "losses": [round(x, 5) for x in losses]}
            last = sum(losses[-SMOOTH:]) / len(losses[-SMOOTH:])
            table.add_row(name, f"{seconds:.3f}", f"{losses[0]:.3f}", f"{last:.3f}", f"{after:.3f}")
    options.out.mkdir(parents=True, exist_ok=True)
    draw(runs, options.out / "train_walks.png")
    settings = {name: str(x) if isinstance(x, Path) else x for name, x in vars(options).items() if name != "out"}
    kept = {"environment": environment(torch.device("cpu")), "settings": settings, "runs": runs}
    (options.out / "train_walks.json").write_text(json.dumps(kept, indent=1) + "\n")
    console.print(table)
    console.print(f"Losses are in nats per character. Picture and numbers: {options.out}/train_walks.png and .json")


if __name__ == "__main__":
    main()
