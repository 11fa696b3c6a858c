"""Calls of the operators behind `Cells`, for tests to put through what torch can do with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from by_hand import seeded
from torch import Tensor

import nearfield as nf

METHOD = nf.Cells(cell_size=8, probes=2, sinks=2, segment=16)
DRAWN = nf.Cells(cell_size=8, probes=2, sinks=2, segment=16, samples=4)
SHARED = nf.Cells(cell_size=4, probes=2, sinks=2, segment=12, share=16)
MANY_SPANS = nf.Cells(cell_size=2, probes=2, sinks=0, segment=4)

LENGTH = 48


def tensors(*shape: int, count: int = 3, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = seeded(seed)
    return [torch.randn(shape or (2, 2, LENGTH, 8), generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]


def leaves(*inputs: Tensor) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in inputs]


def padding(length: int = LENGTH) -> Tensor:
    """`[batch, 1, 1, length]`: True where a key counts; the first entry is padded on the left, the second here and there."""
    counts = torch.rand(2, 1, 1, length, generator=seeded(7)) > 0.3
    counts[0] = torch.arange(length) >= 5
    return counts


def assert_all_equal(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def attend(*inputs: Tensor, method: Any = METHOD, **options: Any) -> Tensor:
    return nf.attention(*inputs, method=method, **options)


def grads(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    """The output, and the gradients of its inner product with some fixed weights."""
    inputs = tuple(leaves(*inputs))
    output = function(*inputs)
    output.backward(torch.randn(output.shape, generator=seeded(3)).to(output.dtype))
    return output.detach(), *(x.grad for x in inputs)


def states(length: int = LENGTH) -> Tensor:
    return torch.randn(2, length, 16, generator=seeded(0))


def compiled(model: Callable[..., Tensor], backend: str = "aot_eager", **options: Any) -> Callable[..., Tensor]:
    torch.compiler.reset()
    return torch.compile(model, fullgraph=True, backend=backend, **options)
