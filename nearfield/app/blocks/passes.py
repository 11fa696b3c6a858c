"""Whole passes, in which a kernel is compiled, timed and tried."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearfield.cells import operator
from nearfield.cells.partition import to_plain
from nearfield.cells.partition.kmeans import KMeans
from nearfield.cells.sizes import CellSizes, MemoryPolicy, span_levels
from nearfield.cells.triton.candidates import BACKWARD, TOGETHER
from nearfield.cells.triton.measured import KINDS
from nearfield.kernels import launch

HEADS, SEGMENT, SINKS, PROBES = 8, 2048, 16, 8
TOGETHER_SHARE, TOGETHER_PROBES = 128, 16
"""Rows that open cells together are so many, and open more of them."""
CLUSTERS, SPREAD = 64, 0.7
"""Queries, keys and values lie around so many centres, at this distance."""


class Pass(NamedTuple):
    """A forward pass or, if `backward`, its gradient."""

    dtype: torch.dtype
    dim: int
    heads: int
    length: int
    sizes: CellSizes
    backward: bool
    memory: MemoryPolicy = MemoryPolicy()


class Setting(NamedTuple):
    """What the fastest block sizes of kernels depend on. Kernels of one setting are timed in the same passes."""

    dtype: torch.dtype
    dim: int
    cell_size: int
    rows: str
    """"apart", "together" (rows open cells together), or "backward" """

    def passes(self, length: int) -> list[Pass]:
        """With and without a causal mask; of gradients, with."""
        together = self.rows == "together"
        share, probes = (TOGETHER_SHARE, TOGETHER_PROBES) if together else (1, PROBES)
        found = []
        for causal in (False, True):
            sizes = sizes_of(length, causal, SEGMENT, self.cell_size, probes, share)
            found.append(Pass(self.dtype, self.dim, HEADS, length, sizes, self.rows == "backward"))
        return found[1:] if self.rows == "backward" else found


def setting_of(kernel: str, dtype: torch.dtype, dim: int, cell_size: int) -> Setting:
    rows = "together" if kernel in TOGETHER else "backward" if kernel in BACKWARD else "apart"
    return Setting(dtype, dim, cell_size, rows)


def other_passes(kernel: str, kind: str, dim: int) -> list[Pass]:
    """Short ones in which a kernel may need more room than where it is timed: other dtypes of its kind, many and few probes."""
    share = TOGETHER_SHARE if kernel in TOGETHER else 1
    found = []
    for dtype in KINDS[kind]:
        for causal, probes, cell_size in ((True, 4, 32), (False, 40, 64)):
            sizes = sizes_of(4096, causal, 512, cell_size, probes, share)
            found.append(Pass(dtype, dim, 2, 4096, sizes, kernel in BACKWARD))
    return found


def sizes_of(length: int, causal: bool, segment: int, cell_size: int, probes: int, share: int) -> CellSizes:
    sizes = CellSizes(1, 0, 0, SINKS, cell_size, probes, 0, 1, share)
    return sizes._replace(segment=segment, span_levels=span_levels(length, segment)) if causal else sizes


def ready(one: Pass, device: torch.device) -> Callable[[], object]:
    """Inputs for a pass on a device, and a function that runs it on them. A gradient has its forward pass run here."""
    recipe = operator.Recipe(one.sizes, one.dim**-0.5, 0.0, *to_plain(KMeans()), "triton", one.memory)
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(0)
    query, key, value, upstream = (_clustered(one, device, generator) for _ in range(4))
    sees = torch.full((one.length,), one.length, dtype=torch.int32, device=device)
    if one.sizes.segment:
        sees = torch.arange(1, one.length + 1, dtype=torch.int32, device=device)
    seed = torch.zeros((), dtype=torch.int64)
    inputs = query, key, value, sees.expand(one.heads, -1), seed
    if not one.backward:
        return torch.no_grad()(lambda: operator.forward(*inputs, *recipe.arguments()))
    with torch.no_grad():
        output, lse, _, *plan = operator.forward(*inputs, *recipe.arguments())
    return torch.no_grad()(lambda: operator.backward(upstream, None, *inputs, output, lse, *plan, *recipe.arguments()))


def _clustered(one: Pass, device: torch.device, generator: torch.Generator | None) -> Tensor:
    shape = one.heads, one.length, one.dim
    if generator is None:
        return torch.empty(shape, dtype=one.dtype, device=device)
    centres = torch.randn(one.heads, CLUSTERS, one.dim, device=device, generator=generator)
    which = torch.randint(CLUSTERS, (one.heads, one.length), device=device, generator=generator)
    noise = torch.randn(shape, device=device, generator=generator)
    return (centres.gather(1, which[..., None].expand(shape)) + SPREAD * noise).to(one.dtype)


class Launched(NamedTuple):
    """A launch that was not made."""

    kernel: launch.Kernel
    grid: launch.Grid
    arguments: tuple[Any, ...]
    """in the order of the signature, with a dtype for each tensor"""
    options: dict[str, Any]

    def key(self) -> Hashable:
        return self.kernel.__name__, self.arguments, tuple(self.options.items())


class _Notes:
    """Takes the place of launches, see `launch.recording`."""

    def __init__(self) -> None:
        self.launched: list[Launched] = []

    def start(self, kernel: launch.Kernel, grid: launch.Grid, arguments: dict[str, Any]) -> None:
        kernel.check(arguments)
        values = [x.dtype if isinstance(x, Tensor) else x for x in arguments.values()]
        count = len(kernel.parameters)
        options = dict(zip(list(arguments)[count:], values[count:], strict=True))
        self.launched.append(Launched(kernel, grid, tuple(values[:count]), options))


def launches_of(one: Pass) -> list[Launched]:
    """What a pass would launch. Tensors have no memory, and nothing runs: what is launched follows from shapes alone."""
    notes = _Notes()
    with launch.recording(notes):
        ready(one, torch.device("meta"))()
    return list({x.key(): x for x in notes.launched}.values())
