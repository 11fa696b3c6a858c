"""Draws from every row of a call, block by block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nearfield.chunks import row_blocks
from nearfield.knn.index.base import BuiltIndex, Index, default_k
from nearfield.knn.index.own import build_index
from nearfield.paper.lazy import LazyRows, RowDraws, index_that_pays, prepare
from nearfield.problem import Rows
from nearfield.sampling import Seeds


@dataclass(frozen=True)
class Sampler:
    """The same number of draws from every row of a call, block by block: what `LazyGumbel` and `sample` share."""

    rows: Rows
    built: BuiltIndex | None
    """None: all rows are drawn from their full softmax"""
    k: int
    draws: int
    certify: bool
    slack: float | None
    always_lazy: bool
    backend: str

    @classmethod
    def of(
        cls,
        rows: Rows,
        index: Index,
        k: int | None,
        draws: int,
        certify: bool,
        slack: float | None,
        always_lazy: bool,
        backend: str,
    ) -> Sampler:
        """With the index built once, if that pays or if all draws have to be lazy."""
        near = default_k(k, rows.length)
        if always_lazy:
            built: BuiltIndex | None = build_index(index, rows.keys)
        else:
            built = index_that_pays(rows, index, near, draws, certify, backend, slack)
        return cls(rows, built, near, draws, certify, slack, always_lazy, backend)

    def blocks(self, seeds: Seeds) -> Iterator[tuple[slice, LazyRows, RowDraws]]:
        """Ranges of rows that fit into memory, prepared, with the draws of those that see a key."""
        groups = 1 if self.built is None else self.built.groups
        budgeted = 0 if self.always_lazy else self.draws
        for block in row_blocks(self.rows.visible.shape, 40 * max(self.draws, self.k, groups)):
            lazy = prepare(self.rows.at(block), self.built, self.k, self.certify, self.backend, budgeted, self.slack)
            yield block, lazy, lazy.draw_each(self.draws, seeds.generator(block.start))
