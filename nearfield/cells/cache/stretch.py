"""Keys stretched where queries are large, before they are grouped: what shares a cell should look alike to a query.

`partition.by_queries` says why. A cache remembers the sizes of queries, which come with prompts and not with single tokens, and
groups segments of many heads at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nearfield.cells.partition.by_queries import LATEST


def query_sizes(query: Tensor, heads: int, counts: Tensor | None) -> Tensor:
    """The root mean square of the latest queries by coordinate, `[batch, heads, dim]`, up to a factor for each head.

    Queries are `[batch, query heads, rows, dim]`; those that share keys count together. `counts` `[batch, rows]` is False for
    padding, whose queries may be anything.
    """
    latest = query[:, :, -LATEST:].to(torch.promote_types(query.dtype, torch.float32))
    if counts is not None:
        latest = latest.masked_fill(~counts[:, None, -LATEST:, None], 0.0)
    return torch.linalg.vector_norm(latest.unflatten(1, (heads, -1)), dim=(2, 3))


def stretched(keys: Tensor, sizes: Tensor) -> Tensor:
    """Keys `[heads, n, dim]` for k-means, which weights coordinates by `sizes` `[heads, dim]` then.

    With x_i = k_i sqrt(size_i / rms_i) its own weight, the root mean square of x_i, makes k_i size_i of it. Sizes that are not
    finite, or all of them zero, say nothing: keys are as they were.
    """
    own = torch.linalg.vector_norm(keys, dim=1, dtype=sizes.dtype)
    # Where all keys are zero, no factor matters.
    factor = torch.where(own > 0.0, sizes / own, 0.0).sqrt()
    most = factor.amax(1, keepdim=True)
    # The largest factor is one, so nothing overflows.
    factor = torch.where(factor.isfinite().all(1, keepdim=True) & (most > 0.0), factor / most, 1.0)
    return keys * factor[:, None].to(keys.dtype)
