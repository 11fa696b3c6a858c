"""Section of bench_gpu.py: a small causal language model of bytes on long inputs, trained with SDPA and with Cells()."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import real
import torch
import torch.nn.functional as F
from gpu_speed import attend, gradients, with_grad
from gpu_timing import CUDA, DEFAULT, DEVICE, DTYPE, backends, clustered, fastest, interleaved, peak_megabytes, sdpa
from record import each, table
from rich.table import Table
from torch import Tensor, nn

LAYERS, HEADS, HEAD_DIM, VOCABULARY = 4, 8, 64, 256
WIDTH = HEADS * HEAD_DIM
LENGTH, STEPS, LAST = 65_536, 200, 50
REACH = 4
ROPE_BASE, RATE, WARM_UP, DECAY = 500_000.0, 3e-4, 50, 0.1
TIMED_MS = 3000.0

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Block(nn.Module):
    """A short convolution, attention, and an MLP four times as wide; each is added to its input, the last two after a norm.

    The convolution learns what the last few bytes tell. Without it, attention over 65,536 bytes would still be flat after 200
    steps, and there would be nothing to compare.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.short = nn.Conv1d(WIDTH, WIDTH, REACH, groups=WIDTH, bias=False)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        before = F.pad(x.transpose(1, 2), (REACH - 1, 0))
        x = x + self.short(before).transpose(1, 2)
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        found = attend(rotated(query, *turn), rotated(key, *turn), value.contiguous())
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Model(nn.Module):
    def __init__(self, length: int, seed: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02 if parameter.dim() == 2 else REACH**-0.5, generator=generator)
        for block in self.blocks:
            assert isinstance(block, Block)
            for layer in (block.out, block.down):  # what is added up stays of order one
                nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * LAYERS), generator=generator)
        frequency = ROPE_BASE ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angle = torch.arange(length)[:, None] * frequency
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def loss(self, ids: Tensor, attend: Attend) -> Tensor:
        """Mean over `[1, length + 1]` bytes of -log p(the next one)."""
        x = self.embedding(ids[:, :-1])
        for block in self.blocks:
            x = block(x, (self.cos, self.sin), attend)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[0, 1:])


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotary embedding of `[batch, heads, length, dim]`, in the dtype of attention."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1).to(DTYPE)


class Trainer:
    """A model with its optimizer, and the windows of a text that it reads, a fresh one in every step."""

    def __init__(self, text: Tensor, length: int, attend: Attend, seed: int = 0) -> None:
        self.model = Model(length, seed).to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), RATE, betas=(0.9, 0.95), weight_decay=DECAY, fused=CUDA)
        self.text, self.length, self.attend = text, length, attend
        self.order = torch.Generator().manual_seed(0)
        self.steps = 0

    def step(self) -> Tensor:
        """One step of training. Returns its loss without waiting for the device."""
        start = int(torch.randint(len(self.text) - self.length, (), generator=self.order))
        window = self.text[start : start + self.length + 1].long()[None]
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = RATE * min(1.0, self.steps / WARM_UP)
        with torch.autocast(DEVICE.type, DTYPE):
            loss = self.model.loss(window, self.attend)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def model(quick: bool, text: Path | None = None) -> dict[str, Any]:
    """Time and memory of a step, and losses from the same weights on the same windows; all of it once more from other weights."""
    length, steps, last = (512, 4, 2) if quick else (LENGTH, STEPS, LAST)
    data = text_bytes(text)
    if len(data) < 2 * length:
        raise ValueError(f"the text has {len(data):,} bytes, and {2 * length:,} are needed; give a longer one with --text")
    leaves = with_grad(clustered(length, HEAD_DIM, HEADS))
    upstream = torch.randn_like(leaves[0])
    backend, _ = fastest({name: functools.partial(gradients, leaves, upstream, True, name) for name in backends()})
    del leaves, upstream
    ways: dict[str, Attend] = {
        "sdpa": lambda query, key, value: exactly(backend, query, key, value),
        "cells": lambda query, key, value: attend((query, key, value), True, DEFAULT),
    }
    trainers = {name: Trainer(data, length, way) for name, way in ways.items()}
    for trainer in trainers.values():
        trainer.step()
        trainer.step()
    runs = interleaved({name: trainer.step for name, trainer in trainers.items()}, TIMED_MS)
    del trainers, trainer
    losses, memory = {}, {}
    for seed, more in each(list(enumerate(("", "_other_weights"))), lambda item: f"model, weights {item[0]}"):
        for name, way in ways.items():
            losses[name + more], memory[name] = _trained(Trainer(data, length, way, seed), steps)
    ends = {name: statistics.fmean(curve[-last:]) for name, curve in losses.items()}
    return {
        "n": length,
        "layers": LAYERS,
        "width": WIDTH,
        "heads": HEADS,
        "text": text.name if text else "docstrings of the standard library",
        "text_bytes": len(data),
        "backend": backend,
        "step_ms": {name: statistics.median(some) for name, some in runs.items()},
        "runs_ms": runs,
        "sdpa_over_cells": statistics.median(runs["sdpa"]) / statistics.median(runs["cells"]),
        "peak_megabytes": memory,
        "rate": RATE,
        "last": last,
        "loss_of_the_last": ends,
        "cells_less_sdpa": ends["cells"] - ends["sdpa"],
        "cells_less_sdpa_other_weights": ends["cells_other_weights"] - ends["sdpa_other_weights"],
        "other_weights_less_sdpa": ends["sdpa_other_weights"] - ends["sdpa"],
        "losses": {name: [round(loss, 5) for loss in curve] for name, curve in losses.items()},
    }


def exactly(backend: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """SDPA, whose incoming gradients are made contiguous.

    cuDNN stores its plans by the layout of inputs, and not by that of the incoming gradient: after a call with a contiguous one,
    a gradient with heads next to columns gives wrong results, and the other way round.
    """
    output = sdpa(backend, query, key, value, causal=True)
    if output.requires_grad:
        output.register_hook(Tensor.contiguous)
    return output


def text_bytes(text: Path | None) -> Tensor:
    """The text as bytes, `[length]`, uint8; without one, docstrings of Python's standard library, all there are."""
    found = text.read_bytes() if text else real.standard_library_text(1 << 30).encode()
    return torch.frombuffer(bytearray(found), dtype=torch.uint8).to(DEVICE)


def _trained(trainer: Trainer, steps: int) -> tuple[list[float], float | None]:
    """Losses, and the megabytes that were allocated at most in one of the steps, everything included."""
    losses = [trainer.step(), trainer.step()]
    found: list[Tensor] = []
    peak = peak_megabytes(lambda: found.append(trainer.step()), ())
    losses += found or [trainer.step()]
    losses += [trainer.step() for _ in range(steps - len(losses))]
    return torch.stack(losses).tolist(), peak["allocated"] if peak else None


def show_model(results: dict[str, Any]) -> Table:
    title = f"{results['layers']} layers of {results['width']}, n = {results['n']:,}, {results['text']}"
    last = f"loss, mean of the last {results['last']}"
    found = table("attention", "step, ms", "SDPA / ours", "peak MB", "first loss", last, title=title, words=("attention",))
    labels = {"sdpa": f"SDPA, {results['backend']}", "cells": "Cells()"}
    labels |= {f"{name}_other_weights": f"{label}, other weights" for name, label in labels.items()}
    for name, label in labels.items():
        ms, memory = results["step_ms"].get(name), results["peak_megabytes"].get(name)
        found.add_row(
            label,
            f"{ms:.1f}" if ms else "",
            f"{results['sdpa_over_cells']:.2f}" if name == "cells" else "",
            f"{memory:,.0f}" if memory else "",
            f"{results['losses'][name][0]:.4f}",
            f"{results['loss_of_the_last'][name]:.4f}",
        )
    return found
