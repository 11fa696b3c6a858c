"""Which kernels serve a call: `reference`, `cpu` or `triton`, or `auto` for the fastest of them."""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

import torch
from torch import Tensor

from nearfield import _compat
from nearfield.kernels import pairs_cpu, pairs_gpu, reference
from nearfield.kernels.cards import LEAST_CAPABILITY
from nearfield.kernels.limits import unsupported

BACKENDS = ("auto", "reference", "cpu", "triton")
"""`reference` is the specification in plain torch, on any device. `cpu` uses the fused kernels of torch, `triton` our own."""
HAS_TRITON = importlib.util.find_spec("triton") is not None


def check_backend(backend: str, device: torch.device) -> None:
    """Raise where there is no such backend, or none on this device."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))}, got {backend!r}")
    if backend == "cpu" and device.type != "cpu":
        raise ValueError(f"backend='cpu' needs CPU tensors, got {device}; use backend='auto' or 'reference'")
    # On a CPU Triton's interpreter runs the kernels, slowly. That is for tests.
    if backend == "triton" and not (runs_triton(device) or (HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1")):
        raise ValueError(
            "backend='triton' needs Triton and an NVIDIA GPU of compute capability "
            f"{LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} or later, got {device}; use backend='auto'"
        )


@_compat.constant_for_compile
def runs_triton(device: torch.device) -> bool:
    """Whether this device runs the Triton kernels."""
    if device.type != "cuda" or not HAS_TRITON or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


def without_triton(backend: str, device: torch.device) -> str:
    """The name of the backend that serves what the Triton kernels do not."""
    if backend in ("auto", "triton"):
        return "cpu" if device.type == "cpu" else "reference"
    return backend


def prefers_triton(backend: str, device: torch.device) -> bool:
    """Whether Triton is the first choice."""
    return backend == "triton" or (backend == "auto" and runs_triton(device))


def choose_triton(backend: str, device: torch.device, missing: str | None) -> bool:
    """Whether Triton serves a call. `missing`: what it cannot serve, in words; then asking for it by name is an error."""
    check_backend(backend, device)
    if backend == "triton" and missing is not None:
        raise ValueError(f"the Triton kernels do not serve {missing}; use backend='auto'")
    return missing is None and prefers_triton(backend, device)


def pair_kernels(backend: str, device: torch.device) -> ModuleType:
    """The module whose `pair_scores`, `pair_sums` and `pair_scatter_` serve `backend` on `device`."""
    check_backend(backend, device)
    if prefers_triton(backend, device):
        return pairs_gpu
    return pairs_cpu if without_triton(backend, device) == "cpu" else reference


def pairs_backend(backend: str, *tables: Tensor) -> str:
    """The name of the backend that serves pairs with rows of these tables: `reference`, `cpu` or `triton`."""
    device = tables[0].device
    if choose_triton(backend, device, unsupported(*tables)):
        return "triton"
    return without_triton(backend, device)


def device_guard(device: torch.device) -> AbstractContextManager[object]:
    """Makes `device` the current one: Triton starts kernels there, wherever the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def full_precision(like: Tensor) -> AbstractContextManager[None]:
    """Turns autocast off. Inputs were cast once, at the boundary; from there on sums and products are float32 or better."""
    return torch.autocast(like.device.type, enabled=False)
