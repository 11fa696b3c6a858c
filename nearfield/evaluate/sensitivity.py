"""How much each layer's attention matters: noise is added to it, and what the model then predicts is compared."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nearfield.blocks import row_blocks
from nearfield.evaluate.models import layer_count
from nearfield.evaluate.perplexity import attending, bytes_of_logits, final_states, head
from nearfield.methods.base import Call, Method, Outcome
from nearfield.methods.exact import Exact
from nearfield.problem import Problem

NOISE = 0.2
"""Norm of the noise relative to that of a row: far above rounding, and small enough that effects grow with its square."""
TOKENS = 512


@torch.no_grad()
def measure_sensitivity(model: Any, ids: Tensor, layers: Collection[int]) -> Tensor:
    """`[layers]`: how much the loss grows per squared relative error of a layer's attention; NaN where it was not asked for.

    Noise of norm `NOISE` times that of each row is added to the attention of one layer at a time. The growth is the
    Kullback-Leibler divergence from the undisturbed predictions, which is the excess of the loss on text that the model itself
    would write: no text is long enough to tell the excess on its own tokens from chance for a single layer.
    """
    ids = ids[:, :TOKENS]
    by_default: dict[int | str, Method] = {"default": Exact()}
    with attending(model, by_default):
        right = final_states(model, ids)
    found = torch.full((layer_count(model),), torch.nan, dtype=torch.float64)
    for layer in layers:
        with attending(model, {**by_default, layer: _Noise(layer)}):
            found[layer] = _divergence(model, right, final_states(model, ids), ids) / NOISE**2
    return found


def _divergence(model: Any, right: Tensor, ours: Tensor, ids: Tensor) -> float:
    total = 0.0
    for block in row_blocks((1, ids.shape[1]), 2 * bytes_of_logits(model)):
        exact, noisy = (head(model, states[:, block], ids)[0].float().log_softmax(-1) for states in (right, ours))
        total += float(F.kl_div(noisy, exact, reduction="sum", log_target=True))
    return max(0.0, total / ids.shape[1])


@dataclass(frozen=True)
class _Noise:
    seed: int

    def run(self, problem: Problem, call: Call) -> Outcome:
        output = Exact().run(problem, call).output
        generator = torch.Generator(output.device).manual_seed(self.seed)
        noise = torch.randn(output.shape, generator=generator, device=output.device) / output.shape[-1] ** 0.5
        return Outcome((output + NOISE * output.float().norm(dim=-1, keepdim=True) * noise).to(output.dtype))
