"""Perplexity, the error of attention on the model's own queries, keys and values, and text that the model writes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.shakespeare.methods import keys_per_query
from experiments.shakespeare.model import GPT, precision
from nearfield.problem import Method

WARMTH = 0.8
"""Samples are drawn from the model's distribution to the power 1 / WARMTH."""


@torch.no_grad()
def perplexity(model: GPT, windows: Tensor, batch: int) -> float:
    """exp of the mean of -log p(next character) over windows `[count, context + 1]`."""
    with precision(windows.device):
        losses = [model.loss(some) for some in windows.split(batch)]
    return float(torch.stack(losses).mean().exp())


def perplexity_with(model: GPT, method: Method | None, own: Method | None, windows: Tensor, batch: int) -> float:
    """The perplexity with another method in place of the model's `own`."""
    model.attend_with(method)
    found = perplexity(model, windows, batch)
    model.attend_with(own)
    return found


class Errors:
    """Relative errors of the rows of every layer: its output, next to exact attention in float32 on the same inputs."""

    def __init__(self) -> None:
        self.means: list[Tensor] = []
        self.most: list[Tensor] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        with torch.autocast(query.device.type, enabled=False):
            exact = F.scaled_dot_product_attention(query.float(), key.float(), value.float(), is_causal=True)
            error = (output.float() - exact).norm(dim=-1) / exact.norm(dim=-1).clamp(min=1e-12)
        self.means.append(error.mean())
        self.most.append(error.max())


@torch.no_grad()
def attention_errors(model: GPT, windows: Tensor) -> dict[str, float | list[float]]:
    """Mean and largest relative error of a row, over all layers, and the mean of each layer."""
    errors = Errors()
    model.show(errors)
    with precision(windows.device):
        model(windows[:, :-1])
    model.show(None)
    means = torch.stack(errors.means)
    return {"mean": float(means.mean()), "max": float(torch.stack(errors.most).max()), "means": means.tolist()}


@torch.no_grad()
def keys(model: GPT, windows: Tensor, method: Method | None) -> float:
    """Keys that a row looks at one by one, on average over the layers."""
    found: list[float] = []
    model.show(lambda query, key, value, output: found.append(keys_per_query(query, key, value, method)))
    with precision(windows.device):
        model(windows[:1, :-1])
    model.show(None)
    return sum(found) / len(found)


@torch.no_grad()
def write(model: GPT, prompt: Tensor, count: int, seed: int) -> Tensor:
    """`count` characters that continue `prompt`, `[length]`.

    The model always reads a whole context; what is not written yet is hidden from it. Shapes stay the same in this way.
    """
    ids = torch.cat([prompt, prompt.new_zeros(count)])
    # On the host: the same numbers on every device.
    chance = torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(ids.device)
    for i in range(count):
        place = len(prompt) + i
        with precision(ids.device):
            logits = model(ids[None])[0, place - 1]
        shares = (logits.double() / WARMTH).softmax(-1).cumsum(-1)
        ids[place] = torch.searchsorted(shares, chance[i : i + 1] * shares[-1]).clamp(max=len(shares) - 1)[0]
    return ids[len(prompt) :]
