"""The methods that models are trained with. Those of one context look at equally many keys one by one, sqrt(context)."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

import nearfield as nf
from nearfield.problem import Method

PAPER = 5
"""Near keys in the authors' code."""
NAMES = {
    "exact": "exact",
    "topk-5": f"top {PAPER}",
    "topk": "top √n",
    "tail": "top √n/2 + √n/2 drawn",
    "cells": "cells",
    "cells-default": "cells, default sizes",
}
KNN = ("topk-5", "topk", "tail")
"""Methods of the paper."""
CAPTURED = ("exact", "cells", "cells-default")
"""Methods that never wait for a GPU: on one, a step of theirs is captured as a graph, and starting kernels takes no time."""


def method(name: str, context: int) -> Method | None:
    """A strategy of the library; None: SDPA."""
    k = math.ceil(math.sqrt(context))
    # Half a segment on average, and half as many keys again in cells.
    cell_size = max(4, k // 8)
    cells = nf.Cells(segment=k, cell_size=cell_size, probes=max(1, round(k / 2 / cell_size)), sinks=0)
    return {
        "exact": None,
        "topk-5": nf.TopK(PAPER),
        "topk": nf.TopK(k),
        "tail": nf.TopK(k - k // 2, tail=k // 2),
        "cells": cells,
        "cells-default": nf.Cells(),
    }[name]


def attend(query: Tensor, key: Tensor, value: Tensor, chosen: Method | None) -> Tensor:
    """Causal attention of `[batch, heads, length, dim]`."""
    if chosen is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return nf.attention(query, key, value, is_causal=True, method=chosen)


def keys_per_query(query: Tensor, key: Tensor, value: Tensor, chosen: Method | None) -> float:
    """Keys that a row looks at one by one, on average."""
    if chosen is None:
        return (key.shape[2] + 1) / 2
    return float(nf.estimate(query, key, value, is_causal=True, method=chosen).info["keys_used"])
