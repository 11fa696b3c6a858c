"""How many keys a row of Cells sees in which way, on average, by what `Estimate.info` says."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Keys(NamedTuple):
    """Keys per row; all but `opened` are averages over all rows."""

    one_by_one: float
    """its own segment and window, and the sinks"""
    closed: float
    """those in closed segments; all keys without a mask"""
    share: float
    """how many of the rows have a closed segment"""
    opened: float
    """in opened cells, averaged over the rows that have a closed segment"""


def closed_keys(position: Tensor, info: dict[str, Any], n: int) -> Tensor:
    """How many keys the rows at these positions see through cells."""
    segment = info["segment"]
    if not segment:
        return torch.full_like(position, n)
    return (position // segment - info["window"]).clamp(min=0) * segment


def keys_of(n: int, info: dict[str, Any]) -> Keys:
    position = torch.arange(n)
    closed = closed_keys(position, info, n)
    own = position + 1 - closed if info["segment"] else torch.zeros_like(closed)
    one_by_one = float((own + closed.clamp(max=info["sinks"])).double().mean())
    share = float((closed > 0).double().mean())
    opened = (info["keys_per_query"] - one_by_one) / share if share else 0.0
    return Keys(one_by_one, float(closed.double().mean()), share, opened)
