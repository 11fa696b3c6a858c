"""Kernels: plain tensors in, plain tensors out. `reference` is the specification; the others are held to it."""

from __future__ import annotations

from types import ModuleType

import torch

from nearfield.kernels import cpu, reference

BACKENDS = ("auto", "reference", "cpu")


def choose(backend: str, device: torch.device) -> ModuleType:
    """The module whose kernels serve `backend` on `device`. `"auto"` takes the fastest there is."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))}, got {backend!r}")
    if backend == "cpu" and device.type != "cpu":
        raise ValueError(f"backend='cpu' needs CPU tensors, got {device}; use backend='auto' or 'reference'")
    return cpu if backend == "cpu" or (backend == "auto" and device.type == "cpu") else reference


def name(backend: str, device: torch.device) -> str:
    """What `backend` comes to on `device`."""
    return choose(backend, device).__name__.rpartition(".")[2]
