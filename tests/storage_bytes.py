"""The bytes of a tensor's memory, whatever lies between its numbers."""

from __future__ import annotations

import torch
from torch import Tensor


def fill_bytes(x: Tensor, byte: int) -> None:
    """Write a byte all over the storage of a tensor: 255 makes every number NaN that is not written later.

    As a tensor, since a storage takes a microsecond for each of its bytes.
    """
    torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage()).fill_(byte)
