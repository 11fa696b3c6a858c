"""How large queries are along each coordinate, for k-means that weights coordinates by it.

A cell is good if the logits of its keys differ little: if (q_i (k_i - mu_i))^2 is small, summed over coordinates i, for the
queries that will come. The latest queries say it better than the keys do: a head asks along the same coordinates from one token
to the next. Sums of squares can be added up, also over ranks; `sizes_of` makes sizes of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LATEST = 64
"""So many of the latest queries of each head are looked at: more of them make no better cells."""


def latest_squares(queries: Tensor, visible: Tensor, ends: Sequence[int]) -> Tensor:
    """`[..., ends, dim]`: squares of queries `[..., group, length, dim]`, summed over rows that see `end - 63` to `end` keys.

    `visible` `[length]`, ascending: how many keys the rows at each position see. Rows that see the keys before `end` through
    cells come later, so nothing they use depends on a later query.
    """
    compute = torch.promote_types(queries.dtype, torch.float32)
    edges = torch.tensor([[max(0, end - LATEST), end] for end in ends], device=visible.device, dtype=visible.dtype).view(-1, 2)
    found = queries.new_empty(*queries.shape[:-3], len(ends), queries.shape[-1], dtype=compute)
    for number, (first, last) in enumerate(torch.searchsorted(visible.contiguous(), edges, right=True).tolist()):
        found[..., number, :] = _squares(queries[..., first:last, :].to(compute))
    return found


def strewn_squares(queries: Tensor, places: Tensor, length: int) -> Tensor:
    """`[..., 1, dim]`: without a mask, of 64 rows that are all over the `length` rows of a sequence.

    `places` `[rows]`: where in it queries `[..., group, rows, dim]` are.
    """
    looked_at = torch.arange(min(LATEST, length), device=places.device) * length // max(1, min(LATEST, length))
    own = queries[..., torch.isin(places, looked_at).nonzero()[:, 0], :]
    return _squares(own.to(torch.promote_types(queries.dtype, torch.float32)))[..., None, :]


def _squares(queries: Tensor) -> Tensor:
    return queries.square().sum((-3, -2))


def sizes_of(squares: Tensor) -> Tensor:
    """Root mean squares `[..., dim]`, up to a factor: the largest is 1.

    All zeros where they say nothing: no row was looked at, or one that is not finite.
    """
    sizes = squares.sqrt()
    most = sizes.amax(-1, keepdim=True) if sizes.shape[-1] else sizes
    known = squares.isfinite().all(-1, keepdim=True) & (most > 0.0)
    return torch.where(known, sizes / most, 0.0)
