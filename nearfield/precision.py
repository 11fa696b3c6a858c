"""Autocast ends where arithmetic begins."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor


def full_precision(like: Tensor) -> AbstractContextManager[None]:
    """Autocast off: inputs were cast once, at the boundary; sums and products are float32 or better from there on."""
    return torch.autocast(like.device.type, enabled=False)
