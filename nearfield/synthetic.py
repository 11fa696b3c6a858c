"""Eight families of queries, keys and values that stress attention estimators in different ways.

With the default scale 1/sqrt(dim), unit Gaussian queries and keys have logits of standard deviation 1. Every family is
deterministic in its seed and draws from a generator of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

QKV = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class _Source:
    """Shapes and a generator. Keys and values have `kv_heads` heads, queries `kv_heads * group`."""

    batch: int
    kv_heads: int
    group: int
    length: int
    dim: int
    generator: torch.Generator

    def normal(self, *shape: int) -> Tensor:
        """Unit Gaussians `[batch, kv_heads, *shape]`."""
        return torch.randn(self.batch, self.kv_heads, *shape, generator=self.generator)

    def rows(self) -> Tensor:
        """One unit Gaussian vector for each key, `[batch, kv_heads, length, dim]`."""
        return self.normal(self.length, self.dim)

    def query_rows(self) -> Tensor:
        """One unit Gaussian vector for each query, `[batch, kv_heads, group, length, dim]`."""
        return self.normal(self.group, self.length, self.dim)

    def pick(self, table: Tensor, *count: int) -> Tensor:
        """Rows of `table` `[batch, kv_heads, choices, dim]`, drawn uniformly: `[batch, kv_heads, *count, dim]`."""
        ids = torch.randint(table.shape[2], (self.batch, self.kv_heads, math.prod(count)), generator=self.generator)
        return table.gather(2, ids[..., None].expand(-1, -1, -1, table.shape[3])).unflatten(2, count)

    def few(self) -> int:
        """About sqrt(length): as many groups as a group has members."""
        return max(1, round(math.sqrt(self.length)))


def gaussian(source: _Source) -> QKV:
    """Flat: logits of standard deviation 1. No single key matters, the far field decides."""
    return source.query_rows(), source.rows(), source.rows()


def sharp(source: _Source) -> QKV:
    """Logits of standard deviation 6: a handful of keys carry a row, and missing one of them is fatal."""
    return 6.0 * source.query_rows(), source.rows(), source.rows()


def clustered(source: _Source) -> QKV:
    """sqrt(n) tight clusters of keys, each query near one of them: what an index is made for."""
    centres = source.normal(source.few(), source.dim)
    values = source.normal(source.few(), source.dim)
    both = source.pick(torch.cat([centres, values], -1), source.length)
    # Centres have norm sqrt(dim): the factor puts the logit of a query's own cluster near 7 in every dimension.
    aim = 7.0 / math.sqrt(source.dim)
    query = aim * source.pick(centres, source.group, source.length) + 0.3 * source.query_rows()
    key = both[..., : source.dim] + 0.3 * source.rows()
    value = both[..., source.dim :] + 0.5 * source.rows()
    return query, key, value


def heavy_tailed(source: _Source) -> QKV:
    """Student-t rows with 3 degrees of freedom: a few keys and values of enormous norm, where error bars fail first."""

    def row_scale() -> Tensor:
        return source.normal(source.length, 3).square().mean(-1, keepdim=True).rsqrt()

    return source.query_rows(), source.rows() * row_scale(), source.rows() * row_scale()


def mixture_of_scales(source: _Source) -> QKV:
    """Queries from flat to sharp (logit sd 1/4 to 8) in one input: no single budget suits all rows."""
    exponent = torch.rand(source.batch, source.kv_heads, source.group, source.length, 1, generator=source.generator)
    return source.query_rows() * 2.0 ** (5 * exponent - 2), source.rows(), source.rows()


def local(source: _Source) -> QKV:
    """A random walk in time, as in language or time series: neighbours are alike, near keys are recent keys."""
    span = 64

    def walk() -> Tensor:
        steps = source.normal(source.length + span, source.dim)
        # Sums of the last `span` steps are differences of running sums. These grow with the length, hence float64.
        total = steps.double().cumsum(2)
        return ((total[:, :, span:] - total[:, :, :-span]) / math.sqrt(span)).float()

    path = walk()
    aim = 7.0 / math.sqrt(source.dim)
    return aim * path[:, :, None] + 0.5 * source.query_rows(), path, walk()


def duplicates(source: _Source) -> QKV:
    """Only sqrt(n) distinct keys, repeated exactly, each time with another value: ties everywhere, radii of zero."""
    table = source.normal(source.few(), source.dim)
    return 2.0 * source.query_rows(), source.pick(table, source.length), source.rows()


def anisotropic(source: _Source) -> QKV:
    """A few dominant directions, and keys with a common mean three times their spread: hard for hashing and for norms."""
    spectrum = torch.arange(1, source.dim + 1, dtype=torch.float32).reciprocal()
    # Scaled so that logits have a standard deviation of 2 in every dimension. A common mean shifts all logits of a row alike.
    spectrum = spectrum * math.sqrt(source.dim) / spectrum.norm()
    key = spectrum * source.rows()
    mean = source.normal(1, source.dim)
    mean = 3.0 * spectrum.norm() * mean / mean.norm(dim=-1, keepdim=True)
    gain = 2.0 * math.sqrt(source.dim) / spectrum.square().norm()
    return gain * spectrum * source.query_rows(), key + mean, source.rows()


FAMILIES: dict[str, Callable[[_Source], QKV]] = {
    "gaussian": gaussian,
    "sharp": sharp,
    "clustered": clustered,
    "heavy_tailed": heavy_tailed,
    "mixture_of_scales": mixture_of_scales,
    "local": local,
    "duplicates": duplicates,
    "anisotropic": anisotropic,
}
"""The families by name."""


def make(
    family: str,
    batch: int,
    heads: int,
    length: int,
    dim: int,
    *,
    kv_heads: int | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> QKV:
    """Queries `[batch, heads, length, dim]`, keys and values `[batch, kv_heads, length, dim]` of a named family.

    The same seed gives the same numbers in every dtype, up to its rounding.

    >>> q, k, v = make("clustered", 1, 8, 256, 64, kv_heads=2)
    >>> q.shape, k.shape
    (torch.Size([1, 8, 256, 64]), torch.Size([1, 2, 256, 64]))
    """
    if family not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}; got {family!r}")
    for name, size in (("batch", batch), ("heads", heads), ("length", length), ("dim", dim)):
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be a positive integer, got {size!r}")
    kv_heads = heads if kv_heads is None else kv_heads
    if isinstance(kv_heads, bool) or not isinstance(kv_heads, int) or kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"kv_heads must divide heads={heads}, got {kv_heads!r}")
    generator = torch.Generator().manual_seed(seed)
    query, key, value = FAMILIES[family](_Source(batch, kv_heads, heads // kv_heads, length, dim, generator))
    return query.flatten(1, 2).to(dtype), key.to(dtype), value.to(dtype)
