"""What inputs are like on a device."""

from __future__ import annotations

import torch


def on_cpu(device: str) -> bool:
    return torch.device(device).type == "cpu"


def dtype_on(device: str) -> torch.dtype:
    """Of the inputs: what one would use there."""
    return torch.float32 if on_cpu(device) else torch.bfloat16
