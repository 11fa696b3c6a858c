"""The cells engine as torch operators: opaque to torch.compile, differentiable, and batched under vmap.

`nearfield::cells` makes the plan and attends. `nearfield::cells_backward` is its gradient with the plan held fixed. An
`autograd.Function` joins the two, because that works with gradcheck, torch.func and torch.compile(fullgraph=True) alike.
Forward mode (torch.func.jvp) and second derivatives are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from nearfield import _compat
from nearfield.cells import reference
from nearfield.cells.moments import CellTable, TableGradient
from nearfield.cells.partition import from_plain
from nearfield.cells.partition.kmeans import KMeans
from nearfield.cells.reference import CellPlan
from nearfield.cells.sizes import CellSizes, MemoryPolicy
from nearfield.cells.spans import blocks_of_rows, closed_keys
from nearfield.cells.torch import backward as torch_backward
from nearfield.cells.torch import forward as torch_forward
from nearfield.cells.torch.head import Head, assign, sizes_of_queries
from nearfield.checks import double_backward_error
from nearfield.kernels import backends
from nearfield.kernels.backends import full_precision
from nearfield.problem import is_traced, needs_grad

if TYPE_CHECKING:
    from nearfield.cells.triton.moments import Tables


class Recipe(NamedTuple):
    """The arguments of an operator that are not tensors."""

    sizes: CellSizes
    scale: float
    dropout_p: float
    partition: str
    """the name that `partition.to_plain` gives it"""
    options: tuple[int, ...]
    """the integers that `partition.to_plain` gives it"""
    engine: str
    """`reference` for `cells/reference.py`, `torch` and `triton` for the folders of these names"""
    memory: MemoryPolicy = MemoryPolicy()
    softcap: float = 0.0
    """see `Problem.softcap`; the Triton engine has none"""

    def arguments(self) -> tuple[Any, ...]:
        """As the operators' schemas take them: see `_SETTINGS`."""
        return [*self.sizes], self.scale, self.dropout_p, self.partition, [*self.options], self.engine, *self.memory, self.softcap

    @staticmethod
    def of(arguments: Sequence[Any]) -> Recipe:
        """The recipe of these `arguments()`."""
        sizes, scale, dropout_p, partition, options, engine, *memory, softcap = arguments
        return Recipe(CellSizes(*sizes), scale, dropout_p, partition, tuple(options), engine, MemoryPolicy(*memory), softcap)


class Given(NamedTuple):
    """What a call is told of its plan instead of finding it out: see `cells.planned`."""

    cell_of: Tensor
    """`[batch, span_levels, n]`"""
    opened: Tensor | None = None
    """`[batch, blocks, probes]`"""
    order: Tensor | None = None
    """`[batch, rows]`, where rows are in an order"""

    def fill(self, cell_of: Tensor, opened: Tensor, order: Tensor) -> frozenset[str]:
        """Copies what is given into the plan of a call. Returns the names of these parts."""
        places = {"cell_of": cell_of, "opened": opened, "order": order}
        known = {name: x for name, x in self._asdict().items() if x is not None}
        for name, x in known.items():
            places[name].copy_(x)
        return frozenset(known)


def empty_results(queries: Tensor, keys: Tensor, values: Tensor, sizes: CellSizes, engine: str) -> tuple[Tensor, ...]:
    """Uninitialised results of `forward`: output, lse, stderr and the plan."""
    batch, rows, length = *queries.shape[:2], keys.shape[1]
    compute = torch.promote_types(queries.dtype, torch.float32)
    return (
        values.new_empty((batch, rows, values.shape[2]), dtype=queries.dtype if engine == "triton" else compute),
        queries.new_empty((batch, rows), dtype=compute),
        # Without draws there is no standard error, hence no columns.
        queries.new_empty((batch, rows if sizes.samples else 0), dtype=compute),
        keys.new_empty((batch, sizes.span_levels, length), dtype=torch.int32),
        queries.new_empty((batch, sizes.blocks_of(rows), sizes.probes), dtype=torch.int32),
        queries.new_empty((batch, rows if sizes.ordered else 0), dtype=torch.int32),
        queries.new_empty((batch, rows, sizes.samples), dtype=torch.int32),
        queries.new_empty((batch, rows, sizes.samples), dtype=compute),
    )


def forward(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    seed: Tensor,
    *settings: Any,
    given: Given | None = None,
    tables: Sequence[CellTable] | Tables = (),
) -> tuple[Tensor, ...]:
    """Attention of queries `[batch, group * length, dim]`. Returns what `empty_results` lists.

    `tables`: of all entries, where they were made for these cells already.
    """
    recipe = Recipe.of(settings)
    results = empty_results(queries, keys, values, recipe.sizes, recipe.engine)
    output, lse, stderr, *plans = results
    known = frozenset() if given is None else given.fill(*plans[:3])
    partition = from_plain(recipe.partition, recipe.options)
    if recipe.engine == "triton":
        from nearfield.cells.triton.forward import forward as run

        assert isinstance(partition, KMeans)  # see `cells.triton.limits`
        cell_of, opened, order = plans[:3]
        with backends.device_guard(queries.device):
            cells = recipe.sizes, recipe.scale, partition
            given_plan = cell_of, opened, order
            made = None if isinstance(tables, Sequence) else tables
            run(queries, keys, values, visible, *cells, output, lse, *given_plan, recipe.memory.beyond, known, made)
        return results
    for entry in range(len(queries)):
        plan = CellPlan(*(x[entry] for x in plans))
        key = wide(keys[entry])
        if "cell_of" not in known:
            asked = sizes_of_queries(queries[entry], visible[entry], recipe.sizes, partition)
            plan.cell_of.copy_(assign(key, visible[entry], recipe.sizes, partition, queries=asked))
        cell_of = plan.cell_of.long()
        table = tables[entry] if isinstance(tables, Sequence) and tables else None
        head = head_of(recipe, queries, key, values, visible, cell_of, seed, entry, table=table)
        place = output[entry] if head.values.shape[1] == values.shape[2] else wide(output[entry])
        torch_forward.forward(head, place, lse[entry], stderr[entry], plan, known)
        if recipe.engine == "reference":
            place, lse[entry] = _reference(head, plan, head.queries, head.keys, head.values)
        if place.data_ptr() != output[entry].data_ptr():
            output[entry] = place[:, : values.shape[2]]
    return results


def backward(
    output_grad: Tensor,
    lse_grad: Tensor | None,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    seed: Tensor,
    output: Tensor,
    lse: Tensor,
    cell_of: Tensor,
    opened: Tensor,
    order: Tensor,
    drawn: Tensor,
    log_factor: Tensor,
    *settings: Any,
    tables: Sequence[CellTable] = (),
    table_grads: Sequence[TableGradient] = (),
) -> tuple[Tensor, ...]:
    """Gradients of queries, keys and values, the plan held fixed. `lse_grad`: None where nothing depends on the lse.

    `tables`: as for `forward`. `table_grads`: of all entries; the torch engine adds what it finds of the moments to them, and
    passes none of it on to keys and values.
    """
    recipe = Recipe.of(settings)
    if recipe.engine == "triton":
        from nearfield.cells.triton.backward import backward as run

        with backends.device_guard(queries.device):
            results = output, lse, cell_of, opened, order
            return run(output_grad, queries, keys, values, visible, *results, recipe.sizes, recipe.scale, lse_grad)
    grads = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (queries, keys, values))
    for entry in range(len(queries)):
        plan = CellPlan(*(x[entry] for x in (cell_of, opened, order, drawn, log_factor)))
        table = tables[entry] if tables else None
        head = head_of(recipe, queries, wide(keys[entry]), values, visible, plan.cell_of.long(), seed, entry, plan.order, table)
        out, out_grad = wide(output[entry]), wide(output_grad[entry])
        own_lse_grad = None if lse_grad is None else lse_grad[entry]
        if recipe.engine == "reference":
            found = _reference_backward(head, plan, out, lse[entry], out_grad, own_lse_grad)
        else:
            into = [
                x[entry] if x.dtype == head.compute and x.shape[2] == y.shape[1] else None
                for x, y in zip(grads, (head.queries, head.keys, head.values), strict=True)
            ]
            table_grad = table_grads[entry] if table_grads else None
            found = torch_backward.backward(head, plan, out, lse[entry], out_grad, into, own_lse_grad, table_grad)
        for place, grad in zip(grads, found, strict=True):
            if place[entry].data_ptr() != grad.data_ptr():
                place[entry] = grad[:, : place.shape[2]]
    return grads


def head_of(
    recipe: Recipe,
    queries: Tensor,
    key: Tensor,
    values: Tensor,
    visible: Tensor,
    cell_of: Tensor,
    seed: Tensor,
    entry: int,
    order: Tensor | None = None,
    table: CellTable | None = None,
) -> Head:
    """One entry of the batch, for keys that are `wide` already."""
    query, value = wide(queries[entry]), wide(values[entry])
    random = recipe.dropout_p, int(seed), entry * queries.shape[1]
    return Head(query, key, value, visible[entry], cell_of, recipe.sizes, recipe.scale, *random, order, recipe.softcap, table)


def wide(x: Tensor) -> Tensor:
    """Rows padded with zeros to a multiple of 8 columns.

    A matrix product may round an unaligned row differently depending on its place in a tile, and that place depends on later
    queries.
    """
    columns = x.shape[1]
    needed = max(8, -(-columns // 8) * 8)
    return x if columns == needed else torch.nn.functional.pad(x, (0, needed - columns))


def _reference(head: Head, plan: CellPlan, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-normaliser of a head by the specification; differentiable with respect to the three tensors."""
    scaled = queries.to(head.compute) * head.scale
    keep = None
    if head.dropout_p:
        rows = torch.arange(len(queries), device=queries.device)[:, None]
        items = torch.arange(len(keys) + head.table.cells, device=queries.device)
        every = head.keep(rows, items)
        assert every is not None
        keep = every[:, : len(keys)], every[:, len(keys) :]
    plan = CellPlan(*(x if x.is_floating_point() else x.long() for x in vars(plan).values()))
    plan = plan.by_row(blocks_of_rows(len(queries), head.sizes, queries.device, plan.order))
    closed = closed_keys(head.visible, head.sizes, head.sizes.group)
    keys, values = keys.to(head.compute), values.to(head.compute)
    return reference.reference_attention(
        scaled, keys, values, head.visible, closed, head.sizes.segment, plan, head.table.cells, keep, head.softcap
    )


def _reference_backward(
    head: Head, plan: CellPlan, out: Tensor, lse: Tensor, output_grad: Tensor, lse_grad: Tensor | None
) -> tuple[Tensor, ...]:
    """`out` and `lse` may be those beside a sink: see `cells.sinks`. Without one, the share of the keys is 1."""
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (head.queries, head.keys, head.values)]
        output, own = _reference(head, plan, *inputs)
        share = (own - lse).masked_fill(own.detach() == -torch.inf, -torch.inf).exp()
        results, grads = [(output - out) * share[:, None]], [output_grad.to(output.dtype)]
        if lse_grad is not None:
            results, grads = [*results, own], [*grads, lse_grad * share.detach()]
        return torch.autograd.grad(results, inputs, grads)


_LIBRARY = torch.library.Library("nearfield", "DEF")

_INPUTS = "Tensor queries, Tensor keys, Tensor values, Tensor visible, Tensor seed"
_PLAN = "Tensor cell_of, Tensor opened, Tensor order, Tensor drawn, Tensor log_factor"
_SETTINGS = (
    "SymInt[] sizes, float scale, float dropout_p, str partition, int[] options, str engine, float beyond, int heads, "
    "float softcap"
)
_ARGUMENTS = len(f"{_INPUTS}, {_SETTINGS}, with_lse".split(", "))

_LIBRARY.define(f"cells({_INPUTS}, {_SETTINGS}) -> (Tensor output, Tensor lse, Tensor stderr, {_PLAN})")

_LIBRARY.define(
    f"cells_backward(Tensor output_grad, Tensor? lse_grad, {_INPUTS}, Tensor output, Tensor lse, {_PLAN}, {_SETTINGS}) "
    "-> (Tensor, Tensor, Tensor)"
)


def _implement(name: str, engine: Callable[..., tuple[Tensor, ...]]) -> None:
    def run(*arguments: Any) -> tuple[Tensor, ...]:
        # Here, not around the call: a backward pass may be started under autocast, and an exported program, which has lost
        # `_Cells`, may run while gradients are recorded (torch would warn that there are none).
        with full_precision(arguments[0]), torch.no_grad():
            return engine(*arguments)

    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")


_implement("cells", forward)

_implement("cells_backward", backward)


class CellsResult(NamedTuple):
    """What `nearfield::cells` returns."""

    output: Tensor
    """`[batch, rows, value_dim]`; `[batch, heads, length, value_dim]` if `MemoryPolicy.heads` is set"""
    lse: Tensor
    """`[batch, rows]`"""
    stderr: Tensor
    """`[batch, rows]`; `[batch, 0]` where nothing is drawn"""
    cell_of: Tensor
    """from here on as in `CellPlan`, for each entry of the batch"""
    opened: Tensor
    order: Tensor
    drawn: Tensor
    log_factor: Tensor


def cells_attention(
    queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, seed: Tensor, recipe: Recipe, with_lse: bool = False
) -> CellsResult:
    """Attention by cells of queries `[batch, group * length, dim]`, each row seeing the first `visible[b, r]` keys.

    `with_lse`: the log-normaliser has a gradient too.
    """
    arguments = queries, keys, values, visible, seed, *recipe.arguments()
    if is_traced() or _compat.in_forward_mode() or needs_grad(queries, keys, values) or recipe.memory.heads:
        return CellsResult(*_Cells.apply(*arguments, with_lse))
    # An autograd function looks up its own signature at every call, which takes longer than all the rest.
    return CellsResult(*torch.ops.nearfield.cells(*arguments))


class _Cells(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(  # every argument by name: torch.compile counts them
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        visible: Tensor,
        seed: Tensor,
        sizes: list[int],
        scale: float,
        dropout_p: float,
        partition: str,
        options: list[int],
        engine: str,
        beyond: float,
        heads: int,
        softcap: float,
        with_lse: bool,
    ) -> tuple[Tensor, ...]:
        output, *rest = torch.ops.nearfield.cells(
            queries, keys, values, visible, seed, sizes, scale, dropout_p, partition, options, engine, beyond, heads, softcap
        )
        if heads:
            group = sizes[0]
            batch, length = output.shape[0] * group // heads, output.shape[1] // group
            output = output.view(batch, heads, length, output.shape[2]).transpose(1, 2).contiguous().transpose(1, 2)
        return output, *rest

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        queries, keys, values, visible, seed, *settings, with_lse = inputs
        result, lse, _, *plan = output
        ctx.mark_non_differentiable(*output[2 if with_lse else 1 :])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(queries, keys, values, visible, seed, result, lse, *plan)
        ctx.settings, ctx.with_lse = settings, with_lse

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor | None, lse_grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        nothing: tuple[None, ...] = (None,) * _ARGUMENTS
        # A compiled program makes zeros of what has no gradient, and zeros would have to be subtracted.
        lse_grad = lse_grad if ctx.with_lse else None
        if output_grad is None and lse_grad is None:
            return nothing
        queries, keys, values, visible, seed, output, *rest = ctx.saved_tensors
        rows = (*queries.shape[:2], values.shape[2])
        output = output.reshape(rows)
        output_grad = torch.zeros_like(output) if output_grad is None else output_grad.reshape(rows)
        # A compiled program refuses second derivatives by itself.
        apply = torch.ops.nearfield.cells_backward if torch.compiler.is_compiling() else CellsBackward.apply
        grads = apply(output_grad, lse_grad, queries, keys, values, visible, seed, output, *rest, *ctx.settings)
        return (*grads, *nothing[3:])


class CellsBackward(torch.autograd.Function):
    """The backward pass, as a function that cannot be differentiated.

    Refusing `create_graph=True`, as other backward passes here do, would rule out torch.func.grad, which always sets it.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        return torch.ops.nearfield.cells_backward(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise double_backward_error()


@torch.library.register_fake("nearfield::cells")
def _(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, seed: Tensor, *settings: Any) -> tuple[Tensor, ...]:
    recipe = Recipe.of(settings)
    return empty_results(queries, keys, values, recipe.sizes, recipe.engine)


@torch.library.register_fake("nearfield::cells_backward")
def _(
    output_grad: Tensor, lse_grad: Tensor | None, queries: Tensor, keys: Tensor, values: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    return queries.new_empty(queries.shape), keys.new_empty(keys.shape), values.new_empty(values.shape)


def _vmap_rule(operator: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[tuple[Tensor, ...], tuple[int, ...]]]:
    """A vmapped dimension becomes part of the batch for one call, and is split off the results again.

    Draws depend on the number of a row in the batch, and the backward pass has to repeat the draws of the forward pass, which may
    have been called without that dimension. So a random call is made entry by entry.
    """

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        def entry(number: int) -> list[Any]:
            return [x if not isinstance(dim, int) else x.select(dim, number) for x, dim in zip(arguments, in_dims, strict=True)]

        def folded(x: Any, dim: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            x = x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            return x.flatten(0, 1) if x.dim() > 1 else x[0]  # The seed: any one will do, as nothing is random here.

        recipe = Recipe.of(arguments[-len(_SETTINGS.split(", ")) :])
        if recipe.sizes.samples or recipe.dropout_p:
            calls = [operator(*entry(number)) for number in range(info.batch_size)]
            outputs = tuple(torch.stack(parts) for parts in zip(*calls, strict=True))
        else:
            found = operator(*map(folded, arguments, in_dims))
            outputs = tuple(x.unflatten(0, (info.batch_size, x.shape[0] // info.batch_size)) for x in found)
        return outputs, (0,) * len(outputs)

    return rule


for _operator in (torch.ops.nearfield.cells, torch.ops.nearfield.cells_backward):
    torch.library.register_vmap(_operator.default, _vmap_rule(_operator), lib=_LIBRARY)
