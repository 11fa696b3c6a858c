"""Numbers of cells, sorted."""

from __future__ import annotations

import torch
from torch import Tensor


def sorted_cells(cell_of: Tensor, last: int) -> tuple[Tensor, Tensor]:
    """Where numbers from 0 to `last` stand when they are flattened and sorted; and the first place of each. Always the same."""
    shift = 1 << 15 if last < 1 << 16 else 0
    narrow = torch.int16 if shift else torch.int32  # half as many digits to sort by
    cell, order = (cell_of.view(-1) - shift).to(narrow).sort(stable=True)
    numbers = torch.arange(-shift, last + 1 - shift, device=cell_of.device, dtype=narrow)
    return order, torch.searchsorted(cell, numbers, out_int32=True)
