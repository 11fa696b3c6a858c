"""Training steps: weights in float32, products in bfloat16 on a GPU, AdamW."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

WARM_UP = 10
"""Steps over which the rate of learning rises."""
ROWS = 2_048
"""Positions whose logits exist at a time: all of 65,536 would be 13 GB in float32, more than anything else in a step."""


def ready_to_train(model: Any, recompute: bool, rate: float) -> torch.optim.Optimizer:
    """Set a model to train, and make its optimizer."""
    model.train()
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.0, fused=model.device.type == "cuda")


def in_half(device: str) -> AbstractContextManager[Any]:
    """Products in bfloat16 where that is faster."""
    kind = torch.device(device).type
    return torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda")


def step(model: Any, optimizer: torch.optim.Optimizer, window: Tensor) -> Tensor:
    """One step on one window; its loss, still on the device."""
    with in_half(str(window.device)):
        loss = mean_loss(model, window)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def mean_loss(model: Any, window: Tensor) -> Tensor:
    """Of the next tokens. Logits are made for some positions at a time, and again in the backward pass."""
    states = model.base_model(window, use_cache=False).last_hidden_state[:, :-1]
    head = model.get_output_embeddings()

    def some(part: Tensor, following: Tensor) -> Tensor:
        return F.cross_entropy(head(part)[0].float(), following, reduction="sum")

    parts = zip(states.split(ROWS, 1), window[0, 1:].split(ROWS), strict=True)
    losses: list[Tensor] = [checkpoint(some, part, following, use_reentrant=False) for part, following in parts]
    return torch.stack(losses).sum() / states.shape[1]


def train(model: Any, optimizer: torch.optim.Optimizer, windows: Iterator[Tensor], steps: int) -> list[float]:
    """Losses of the steps."""
    rate = optimizer.param_groups[0]["lr"]
    losses: list[Tensor] = []
    for number in range(steps):
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (number + 1) / WARM_UP)
        losses.append(step(model, optimizer, next(windows)))
    return torch.stack(losses).tolist()


def let_go() -> None:
    """Give the memory of models that are gone back to the device."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
