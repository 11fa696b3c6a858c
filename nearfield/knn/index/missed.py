"""By how much an index misses: the slack of its near sets, measured on some rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfield.audit import CONFIDENCE, audit_quantile
from nearfield.checks import check_fraction, check_generator, check_index, check_positive
from nearfield.chunks import row_blocks
from nearfield.kernels.backends import full_precision
from nearfield.knn.index.base import PADDING, BuiltIndex, CausalOffset, Index
from nearfield.knn.index.own import build_index
from nearfield.sampling import Seeds


@dataclass(frozen=True)
class Slack:
    """What `nearfield.index.slack` has measured: c of the paper's approximate k-MIPS, row by row."""

    per_row: Tensor
    """`[batch, rows]`, float64: best score left out minus smallest score returned; 0 where that is negative"""
    chosen: Tensor
    """`[batch, rows]`: which rows they are"""
    share: float
    """with 95% confidence, at least this share of all rows has a slack of at most `largest`; 1: all rows were measured"""

    @property
    def largest(self) -> float:
        """The c that all measured rows keep to."""
        return float(self.per_row.max()) if self.per_row.numel() else 0.0

    def quantile(self, q: float) -> float:
        """The c that a share q of the measured rows keeps to."""
        check_fraction("q", q)
        return float(self.per_row.flatten().quantile(q, interpolation="higher")) if self.per_row.numel() else 0.0

    def __str__(self) -> str:
        found = f"slack of {self.per_row.numel()} rows: median {self.quantile(0.5):.3g}, largest {self.largest:.3g}"
        bounds = f", which bounds {self.share:.1%} of all rows with confidence {CONFIDENCE:.0%}"
        return found if self.share == 1.0 else found + bounds


@torch.no_grad()
def slack(
    index: Index,
    *,
    keys: Tensor,
    queries: Tensor,
    k: int,
    rows: int = 59,
    scale: float | None = None,
    causal_offset: CausalOffset = None,
    generator: torch.Generator | None = None,
) -> Slack:
    """Measure how far the best key that `index` leaves out lies above the smallest one that it returns, on random rows.

        c_i = max(0, max_{j not in S_i} z_ij - min_{j in S_i} z_ij),     z = scale q.k

    This is the constant of the paper's approximate k-MIPS, which `LazyGumbel(slack=c)` and `sample(slack=c)` need to know about
    an index that bounds nothing by itself. A true top k has c = 0, up to rounding. The largest c measured is no bound for a row
    that was not measured; but rows are chosen at random, so the worst of 59 bounds 95% of them with 95% confidence, and the
    worst of 299 bounds 99%.

    Args:
        keys: `[..., length, dim]`.
        queries: `[..., rows, dim]`, with the leading dimensions of the keys.
        k: near keys per row.
        rows: how many rows of each batch entry to measure.
        scale: as for `nearfield.attention`: 1/sqrt(dim) if None.
        causal_offset: None (a row sees every key), or as for `BuiltIndex.search`, with the leading dimensions as one; 0: as
            `is_causal=True`.
        generator: chooses the rows; None: torch's default generator.

    Cost: the index is built on all keys; then a search and `length` inner products per measured row.

    Example:
        >>> keys, queries = torch.randn(2, 1, 400, 8).unbind(0)
        >>> found = nearfield.index.slack(nearfield.KMeansIndex(cells=16, probes=1), keys=keys, queries=queries, k=20)
        >>> found.largest > found.quantile(0.5) > 0
        True
    """
    check_index("index", index)
    check_positive("k", k)
    check_positive("rows", rows)
    _check_tensors(keys, queries)
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale)):
        raise ValueError(f"scale must be a finite number or None, got {scale!r}")
    check_generator(generator)
    keys, queries = (x.detach().flatten(0, -3) if x.dim() > 2 else x.detach()[None] for x in (keys, queries))
    built = build_index(index, keys)
    queries = queries.to(built.keys.dtype) * (scale if scale is not None else 1 / math.sqrt(max(1, keys.shape[2])))
    visible = built.visible(queries, causal_offset)
    batch, count = visible.shape
    size = min(rows, count)
    order = torch.rand(batch, count, generator=Seeds(generator, keys.device).generator(0), device=keys.device)
    chosen = order.argsort(1)[:, :size].sort(1).values
    entry = torch.arange(batch, device=keys.device)[:, None]
    queries, visible = queries[entry, chosen], visible[entry, chosen]
    k = min(k, keys.shape[1])
    per_row = torch.zeros(batch, size, dtype=torch.float64, device=keys.device)
    with full_precision(queries):
        for block in row_blocks((batch, size if k else 0), 24 * keys.shape[1]):
            per_row[:, block] = _slack_of(built, queries[:, block], visible[:, block], k)
    return Slack(per_row, chosen, 1.0 if size == count else audit_quantile(batch * size, CONFIDENCE))


def _slack_of(built: BuiltIndex, queries: Tensor, visible: Tensor, k: int) -> Tensor:
    """`[batch, rows]`, for rows that see the first `visible` keys."""
    offset = visible - 1 - torch.arange(visible.shape[1], device=visible.device)
    scores, ids = built.search(queries, k, offset)
    smallest = scores.double().masked_fill(ids == PADDING, torch.inf).amin(-1)
    length = built.length
    all_scores = queries.double() @ built.keys.double().mT
    all_scores.masked_fill_(torch.arange(length, device=ids.device) >= visible[..., None], -torch.inf)
    # One more column takes what fills up short rows.
    found = torch.zeros(*visible.shape, length + 1, dtype=torch.bool, device=ids.device)
    found.scatter_(-1, ids.masked_fill(ids == PADDING, length), True)
    left_out = all_scores.masked_fill_(found[..., :length], -torch.inf).amax(-1)
    # A row with no near key at all is drawn from its full softmax: inf makes its slack 0.
    return (left_out - smallest).clamp(min=0)


def _check_tensors(keys: Tensor, queries: Tensor) -> None:
    for name, x in (("keys", keys), ("queries", queries)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if not x.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {x.dtype}")
        if x.dim() < 2:
            raise ValueError(f"{name} must have shape [..., length, dim], got {tuple(x.shape)}")
    if queries.shape[:-2] != keys.shape[:-2] or queries.shape[-1] != keys.shape[-1]:
        raise ValueError(
            f"queries must have the leading dimensions and the dim of keys {tuple(keys.shape)}, got {tuple(queries.shape)}; "
            "heads that share keys are rows of one entry"
        )
