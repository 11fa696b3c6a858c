"""Attention by cells for inputs of one shape: everything that follows from the shape is decided, and kernels are replayed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nearfield.cells.operator import CellsBackward, Recipe, backward, forward
from nearfield.cells.sizes import CellSizes
from nearfield.kernels.backends import full_precision
from nearfield.kernels.replay import form, replayed
from nearfield.problem import Problem, is_traced


class ReadyCells:
    """A call of the Triton engine, for the inputs of `problem` and others like them."""

    def __init__(self, problem: Problem, recipe: Recipe) -> None:
        batch, kv_heads, length, _ = problem.key.shape
        groups, rows = batch * kv_heads, problem.group_size * problem.query.shape[2]
        self.recipe, self.trained = recipe, problem.needs_grad
        self.query_rows = (groups, rows, problem.query.shape[3])
        self.key_rows = (groups, length, problem.key.shape[3])
        self.value_rows = (groups, length, problem.value.shape[3])
        self.output_rows = (groups, rows, problem.value.shape[3])
        # By way of the host, so that all streams may read it.
        visible = problem.visible[:1].to("cpu", torch.int32).contiguous().to(problem.query.device)
        self.visible = visible.expand(groups, -1)
        self.seed = torch.zeros((), dtype=torch.int64)

    @property
    def sizes(self) -> CellSizes:
        return self.recipe.sizes

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.trained:
            return _Trained.apply(query, key, value, self)
        (output,) = self.forward(query, key, value, 1)
        return output.view(*query.shape[:-1], value.shape[-1])

    def forward(self, query: Tensor, key: Tensor, value: Tensor, wanted: int) -> Sequence[Tensor]:
        """The first `wanted` of: output `[groups, rows, value_dim]`, log-normalisers, cells of keys, opened cells, order."""
        inputs = query.reshape(self.query_rows), key.reshape(self.key_rows), value.reshape(self.value_rows)

        def run() -> Sequence[Tensor]:
            with full_precision(query):
                output, lse, _, *plan = forward(*inputs, self.visible, self.seed, *self.recipe.arguments())
            return (output, lse, *plan[:3])[:wanted]

        with torch.no_grad():
            return replayed((self, wanted), inputs, run)

    def backward(self, grad: Tensor, saved: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Gradients of queries, keys and values, by rows, from that of the output and what `forward` was given and returned."""
        query, key, value, output, lse, cell_of, opened, *order = saved
        inputs = query.reshape(self.query_rows), key.reshape(self.key_rows), value.reshape(self.value_rows)
        do, output = (_packed(x.reshape(self.output_rows)) for x in (grad, output))
        # Nothing is drawn.
        nothing = lse.new_empty(0)
        plan = cell_of, opened, order[0] if order else opened.new_empty((len(opened), 0)), nothing, nothing
        between = self.visible, self.seed, output, lse, *plan
        if torch.is_grad_enabled() or is_traced():
            # Second derivatives are refused there, and several gradients at once are served.
            return CellsBackward.apply(do, None, *inputs, *between, *self.recipe.arguments())
        given = do, *inputs, output, lse, cell_of, opened, *order
        # Hooks on saved tensors may have laid all of them out anew.
        key_of = self, torch.are_deterministic_algorithms_enabled(), *map(form, given)

        def run() -> tuple[Tensor, ...]:
            with full_precision(query):  # It may have been started under autocast.
                return backward(do, None, *inputs, *between, *self.recipe.arguments())

        return tuple(replayed(key_of, given, run))


def _packed(x: Tensor) -> Tensor:
    """With contiguous columns, as kernels want it."""
    return x if x.stride(-1) == 1 else x.contiguous()


class _Trained(torch.autograd.Function):
    """For calls outside of torch.compile and torch.func, which take the operators of `cells.operator`: this one is faster."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ready: ReadyCells) -> Tensor:
        # An empty order of rows is no memory of its own, and could not be replayed.
        output, *rest = ready.forward(query, key, value, 5 if ready.sizes.ordered else 4)
        output = output.view(*query.shape[:-1], value.shape[-1])
        if ready.recipe.memory.heads:
            output = output.transpose(-2, -3).contiguous().transpose(-2, -3)
        output = output.detach()  # It is no view of anything that a caller could see.
        ctx.save_for_backward(query, key, value, output, *rest)
        ctx.ready = ready
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        grads = ctx.ready.backward(grad, saved)
        return *(x.view(like.shape) for x, like in zip(grads, saved[:3], strict=True)), None
