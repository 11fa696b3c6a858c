"""Kernels: plain tensors in, plain tensors out. `reference` is the specification; the others are held to it."""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

import torch

from nearfield.kernels import cpu, reference

BACKENDS = ("auto", "reference", "cpu", "triton")
HAS_TRITON = importlib.util.find_spec("triton") is not None
LEAST_CAPABILITY = (9, 0)
"""of a card that the kernels in Triton are written for"""


def check(backend: str, device: torch.device) -> None:
    """Raises on a backend that there is not, or not on this device."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))}, got {backend!r}")
    if backend == "cpu" and device.type != "cpu":
        raise ValueError(f"backend='cpu' needs CPU tensors, got {device}; use backend='auto' or 'reference'")
    # On a CPU Triton's interpreter runs the kernels, slowly: for tests.
    if backend == "triton" and not (runs_triton(device) or (HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1")):
        raise ValueError(
            "backend='triton' needs Triton and an NVIDIA GPU of compute capability "
            f"{LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} or later, got {device}; use backend='auto'"
        )


def choose(backend: str, device: torch.device) -> ModuleType:
    """The module whose kernels serve `backend` on `device`. `"auto"` takes the fastest there is."""
    check(backend, device)
    if backend == "triton":
        raise ValueError("only Cells() has kernels for backend='triton'; use backend='auto'")
    return cpu if backend == "cpu" or (backend == "auto" and device.type == "cpu") else reference


def name(backend: str, device: torch.device) -> str:
    """What `backend` comes to on `device`."""
    return choose(backend, device).__name__.rpartition(".")[2]


def on(device: torch.device) -> AbstractContextManager[object]:
    """Triton starts kernels on the current device, whatever the tensors are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def runs_triton(device: torch.device) -> bool:
    """Whether this device runs the kernels in Triton."""
    if device.type != "cuda" or not HAS_TRITON or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


# See crossover.length.
runs_triton.__dict__["_dynamo_marked_constant"] = True
