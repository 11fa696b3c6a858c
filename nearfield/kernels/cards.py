"""Classes of NVIDIA cards by compute capability: which one a card belongs to, and what its kernels may use."""

from __future__ import annotations

import functools
import os

import torch

from nearfield import _compat

SHARED = {"8.0": 163 << 10, "8.6": 99 << 10, "9.0": 227 << 10, "10.0": 227 << 10, "12.0": 99 << 10}
"""Bytes of shared memory that a block of threads may take, by class. A class serves its capability and those up to the next."""
LEAST_CAPABILITY = (8, 0)
"""The least compute capability of a GPU that runs the Triton kernels."""
LEAST_DEPENDENT = (9, 0)
"""The least compute capability with programmatic dependent launch."""
SWITCH = "NEARFIELD_TILES"
"""The environment variable that names a class whose block sizes are to be used on a card that has room for them."""


def capability_of(name: str) -> tuple[int, int]:
    """The compute capability that a class is named after."""
    major, minor = name.split(".")
    return int(major), int(minor)


def imposed_class() -> str:
    """What `NEARFIELD_TILES` says; empty where nothing is imposed."""
    return os.environ.get(SWITCH, "")


@functools.cache
def class_of(device: torch.device, imposed: str) -> str:
    """The class of a card, or the one that is imposed on it. Without a card, as in the interpreter: "9.0"."""
    own = "9.0"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        own = max((name for name in SHARED if capability_of(name) <= capability), key=capability_of, default="8.0")
    if not imposed:
        return own
    if imposed not in SHARED:
        raise ValueError(f"{SWITCH} must be one of {', '.join(SHARED)}, got {imposed!r}")
    if SHARED[imposed] > SHARED[own]:
        raise ValueError(
            f"{SWITCH}={imposed!r} takes up to {SHARED[imposed]:,} bytes of shared memory per block, and {device} "
            f"(class {own}) has {SHARED[own]:,}; unset it or name a smaller class"
        )
    return imposed


@_compat.constant_for_compile
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a block of threads may take on this card, or on one of the class that is imposed."""
    return SHARED[class_of(device, imposed_class())]


def starts_early(device: torch.device) -> bool:
    """Whether a kernel on this card can start while the one before still runs. An imposed class counts as well."""
    return _starts_early(device, imposed_class())


@functools.cache
def _starts_early(device: torch.device, imposed: str) -> bool:
    return min(torch.cuda.get_device_capability(device), capability_of(class_of(device, imposed))) >= LEAST_DEPENDENT
