"""What no Triton kernel serves. Importing this does not import Triton."""

from __future__ import annotations

import torch
from torch import Tensor

TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MOST_COLUMNS = 256
"""The largest head dimension."""


def unsupported(*tensors: Tensor) -> str | None:
    """What no Triton kernel serves in these tensors, in words for an error; None: they are served."""
    for x in tensors:
        if x.dtype not in TRITON_DTYPES:
            return f"{x.dtype}"
        if x.shape[-1] > MOST_COLUMNS:
            return f"more than {MOST_COLUMNS} columns"
    return None
