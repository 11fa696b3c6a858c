"""Kernels: plain tensors in, plain tensors out. `reference` is the specification; the others are held to it."""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

import torch

from nearfield.kernels import cpu, gpu, reference

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
    """The module whose pair kernels serve `backend` on `device`. `"auto"` takes the fastest there is."""
    check(backend, device)
    if backend == "triton" or (backend == "auto" and runs_triton(device)):
        return gpu
    return cpu if backend == "cpu" or (backend == "auto" and device.type == "cpu") else reference


def name(backend: str, device: torch.device) -> str:
    """What `backend` comes to on `device` for what is not done in Triton."""
    if backend in ("auto", "triton"):
        return "cpu" if device.type == "cpu" else "reference"
    return backend


def pairs_in_triton(backend: str, *tables: torch.Tensor) -> bool:
    """Whether the pair kernels in Triton serve rows of these tables. Raises where they were asked for by name and do not."""
    if choose(backend, tables[0].device) is not gpu:
        return False
    misses = gpu.misses(*tables)
    if backend == "triton" and misses:
        raise ValueError(f"the kernels in Triton do not serve {misses}; backend='auto' takes others")
    return not misses


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
