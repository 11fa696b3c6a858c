"""Where the cells of a block lie: behind its keys and values, in the padding of its page.

A cache of pages is `[blocks, heads, size, dim + value_dim]`: keys, and behind each its value. A page is one block for all heads.
Or, `by_columns`, as one form of vLLM's own kernel for CPUs has them: the keys of a block and head, column by column, and then its
values. Or as its other forms have them, which nothing else reads.
vLLM lets a backend ask for more room in each page, counts it, and never looks at it. Cells lie there, head by head:

    centroid    bfloat16 [cells, dim]
    variance    bfloat16 [cells, dim]
    value       bfloat16 [cells, value_dim]
    stop        int16    [cells]            where the keys of a cell end, if those of a block are sorted cell by cell
    order       uint8    [size]             which key of the block is at each place then

So nothing has to be invalidated: a block that is used again is written again from its first key on, and its cells with its last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

ALIGNED = 16
"""The cells of a head take a multiple of so many bytes."""
MOST_KEYS = 256
"""Keys of a block: a place in it is one byte."""
CELL_SIZE = 16
"""Keys of a cell on average: then cells take a tenth of a page of 16-bit numbers."""


READABLE = "vec"
"""vLLM's name for the form of its kernel whose pages are `by_columns`."""


class Summary(NamedTuple):
    """The cells of blocks `[blocks, heads, ...]`: parts of pages, or copies of them. See the module."""

    centroid: Tensor
    variance: Tensor
    value: Tensor
    stop: Tensor
    order: Tensor


@dataclass(frozen=True)
class PageLayout:
    """The sizes of a page."""

    heads: int
    """of keys"""
    size: int
    """keys of a block"""
    dim: int
    value_dim: int
    by_columns: bool = False
    is_packed: bool = False
    """only vLLM's own kernel knows where keys and values are"""

    def __post_init__(self) -> None:
        if not CELL_SIZE <= self.size <= MOST_KEYS or self.size % CELL_SIZE:
            raise ValueError(
                f"blocks must have a multiple of {CELL_SIZE} keys, at most {MOST_KEYS}, got {self.size}; pass --block-size "
                f"{MOST_KEYS}"
            )

    @property
    def cells(self) -> int:
        """Of a block, for each head."""
        return self.size // CELL_SIZE

    @property
    def _parts(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {
            "centroid": (torch.bfloat16, (self.cells, self.dim)),
            "variance": (torch.bfloat16, (self.cells, self.dim)),
            "value": (torch.bfloat16, (self.cells, self.value_dim)),
            "stop": (torch.int16, (self.cells,)),
            "order": (torch.uint8, (self.size,)),
        }

    @property
    def bytes_per_head(self) -> int:
        """That cells take in a page."""
        used = sum(torch.Size(shape).numel() * dtype.itemsize for dtype, shape in self._parts.values())
        return -(-used // ALIGNED) * ALIGNED

    @property
    def bytes_per_page(self) -> int:
        return self.heads * self.bytes_per_head

    def has_room(self, page: int, item: int) -> bool:
        """Whether cells fit into a page of so many bytes, behind keys and values of numbers that take `item` bytes each."""
        return page - self._used(item) >= self.bytes_per_page

    def _used(self, item: int) -> int:
        return self.heads * self.size * (self.dim + self.value_dim) * item

    @property
    def share(self) -> float:
        """Of a page of 16-bit keys and values, without cells."""
        return self.bytes_per_head / (2 * self.size * (self.dim + self.value_dim))

    def keys(self, pages: Tensor) -> Tensor:
        """`[blocks, heads, size, dim]` of pages `[blocks, heads, size, dim + value_dim]`, where they lie."""
        self._check_readable()
        if not self.by_columns:
            return pages[..., : self.dim]
        return pages.flatten(2)[..., : self.size * self.dim].unflatten(2, (self.dim, self.size)).transpose(2, 3)

    def values(self, pages: Tensor) -> Tensor:
        """The same for values."""
        self._check_readable()
        if not self.by_columns:
            return pages[..., self.dim :]
        return pages.flatten(2)[..., self.size * self.dim :].unflatten(2, (self.size, self.value_dim))

    def _check_readable(self) -> None:
        if self.is_packed:
            raise RuntimeError("these pages are packed, as vLLM's own kernel has them; nothing else reads them")

    def summaries(self, pages: Tensor) -> Summary:
        """The cells of all pages of a cache `[blocks, heads, size, dim + value_dim]`, where they lie."""
        blocks, wide = len(pages), self.dim + self.value_dim
        item, heads = pages.element_size(), self.heads
        used = self._used(item)
        page = pages.stride(0) * item
        if pages.shape != (blocks, heads, self.size, wide) or pages.stride()[1:] != (self.size * wide, wide, 1):
            raise ValueError(f"pages must be [blocks, {heads}, {self.size}, {wide}], each in one piece, got {_told(pages)}")
        if not self.has_room(page, item) or page % ALIGNED or used % ALIGNED:
            raise ValueError(f"pages must have {self.bytes_per_page} bytes behind their keys and values, got {page - used}")
        begin, found = pages.storage_offset() * item + used, {}
        for name, (dtype, shape) in self._parts.items():
            whole = torch.empty(0, dtype=dtype, device=pages.device).set_(pages.untyped_storage())
            inner = (*(shape[1:] or ()), 1)
            strides = (page // dtype.itemsize, self.bytes_per_head // dtype.itemsize, *inner)
            found[name] = whole.as_strided((blocks, heads, *shape), strides, begin // dtype.itemsize)
            begin += torch.Size(shape).numel() * dtype.itemsize
        return Summary(**found)

    def empty(self, blocks: int, dtype: torch.dtype, device: torch.device | str | None = None) -> Tensor:
        """Pages with room for their cells, as vLLM lays them out; keys and values are undefined."""
        wide, item = self.dim + self.value_dim, dtype.itemsize
        used = self.heads * self.size * wide
        page = used + -(-self.bytes_per_page // item)
        page += -page % (ALIGNED // item)
        whole = torch.empty(blocks * page, dtype=dtype, device=device)
        return whole.as_strided((blocks, self.heads, self.size, wide), (page, self.size * wide, wide, 1))


def _told(pages: Tensor) -> str:
    return f"{list(pages.shape)} with strides {list(pages.stride())}"
