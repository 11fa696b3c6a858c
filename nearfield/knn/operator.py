"""Top-k attention as torch operators, for programs that torch.compile traces: indices cannot be traced.

`nearfield::topk` searches, draws and attends. `nearfield::topk_backward` is its gradient over the keys that were found and drawn.
`knn.topk` says how both are computed (`implement`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearfield.kernels.backends import full_precision
from nearfield.knn.index.base import Index
from nearfield.knn.index.exact import ExactIndex

EXACT = 0
"""The number of any `ExactIndex()`, which has no options."""

_KNOWN: dict[int, Callable[[], Index | None]] = {}


def make_known(index: Index) -> None:
    """Make an index known to the operators for as long as it exists. Called when it becomes part of a method."""
    if type(index) is ExactIndex or torch.compiler.is_compiling():
        return
    number = id(index)
    try:
        _KNOWN[number] = weakref.ref(index, lambda _: _KNOWN.pop(number, None))
    except TypeError:  # Some objects, such as those with __slots__, cannot be weakly referenced. They stay for good.
        _KNOWN[number] = lambda: index


class Settings(NamedTuple):
    """The arguments of an operator that are not tensors."""

    k: int
    tail: int
    dropout_p: float
    number: int
    """of the index: see `number_of`"""
    backend: str
    keep: bool
    """whether the keys that were found and drawn are returned, for a backward pass"""
    softcap: float = 0.0
    """see `Problem.softcap`"""

    def known_index(self) -> Index:
        found = ExactIndex() if self.number == EXACT else _KNOWN.get(self.number, lambda: None)()
        if found is None:
            raise RuntimeError(
                "this index is unknown or gone: make TopK(index=...) outside of the compiled function, and keep it"
            )
        return found


def number_of(index: Index) -> int:
    """What stands for an index in a program, in this process."""
    return EXACT if type(index) is ExactIndex else id(index)


_LIBRARY = torch.library.Library("nearfield", "FRAGMENT")

_INPUTS = "Tensor queries, Tensor keys, Tensor values, Tensor visible, Tensor seed, Tensor? sinks"
_SETTINGS = "SymInt k, SymInt tail, float dropout_p, int number, str backend, bool keep, float softcap"

_LIBRARY.define(f"topk({_INPUTS}, {_SETTINGS}) -> (Tensor output, Tensor lse, Tensor ids)")

_LIBRARY.define(
    f"topk_backward(Tensor output_grad, Tensor lse_grad, {_INPUTS}, Tensor ids, {_SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor)"
)


def implement(forward: Callable[..., tuple[Tensor, ...]], backward: Callable[..., tuple[Tensor, ...]]) -> None:
    """Say how the operators compute: functions of their tensors and of `Settings`."""
    for name, engine, tensors in (("topk", forward, 6), ("topk_backward", backward, 9)):

        def run(
            *arguments: Any, engine: Callable[..., tuple[Tensor, ...]] = engine, tensors: int = tensors
        ) -> tuple[Tensor, ...]:
            with full_precision(arguments[0]), torch.no_grad():
                return engine(*arguments[:tensors], Settings(*arguments[tensors:]))

        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")


@torch.library.register_fake("nearfield::topk")
def _(
    queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, seed: Tensor, sinks: Tensor | None, *settings: Any
) -> tuple[Tensor, ...]:
    batch, rows, _ = queries.shape
    given = Settings(*settings)
    width = given.k + given.tail if given.keep else 0
    return (
        values.new_empty(batch, rows, values.shape[2]),
        queries.new_empty(batch, rows),
        queries.new_empty(batch, rows, width, dtype=torch.int64),
    )


@torch.library.register_fake("nearfield::topk_backward")
def _(
    output_grad: Tensor,
    lse_grad: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    seed: Tensor,
    sinks: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    grads = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (queries, keys, values))
    return (*grads, queries.new_empty(0) if sinks is None else torch.empty_like(sinks, memory_format=torch.contiguous_format))


def traced_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    seed: Tensor,
    sinks: Tensor | None,
    settings: Settings,
) -> tuple[Tensor, Tensor]:
    """Output and log-normaliser of rows as `Problem.rows` has them, as a part of a traced program.

    `sinks` `[batch, rows]`: see `Problem.row_sinks`.
    """
    output, lse, _ = _TopK.apply(queries, keys, values, visible, seed, sinks, *settings)
    return output, lse


class _TopK(torch.autograd.Function):
    @staticmethod
    def forward(  # every argument by name: torch.compile counts them
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        visible: Tensor,
        seed: Tensor,
        sinks: Tensor | None,
        k: int,
        tail: int,
        dropout_p: float,
        number: int,
        backend: str,
        keep: bool,
        softcap: float,
    ) -> tuple[Tensor, ...]:
        return torch.ops.nearfield.topk(
            queries, keys, values, visible, seed, sinks, k, tail, dropout_p, number, backend, keep, softcap
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        queries, keys, values, visible, seed, sinks, *settings = inputs
        _, _, ids = output
        ctx.mark_non_differentiable(ids)
        ctx.save_for_backward(queries, keys, values, visible, seed, sinks, ids)
        ctx.settings = settings

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor, lse_grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        sinks = ctx.saved_tensors[5]
        *grads, sinks_grad = torch.ops.nearfield.topk_backward(output_grad, lse_grad, *ctx.saved_tensors, *ctx.settings)
        return (*grads, None, None, None if sinks is None else sinks_grad, *(None,) * 7)
