"""The cells engine over a batch of heads: plan, attend, and the gradient. Plain tensors and numbers in, plain tensors out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nearfield import kernels
from nearfield.kernels import cells_cpu, cells_cpu_backward, cells_reference
from nearfield.kernels.cells_assign import assign
from nearfield.kernels.cells_head import Head
from nearfield.kernels.cells_plan import CellPlan, CellSettings, closed_keys
from nearfield.partition import BY_NAME


def empty_results(queries: Tensor, keys: Tensor, values: Tensor, settings: CellSettings, backend: str) -> tuple[Tensor, ...]:
    """Where the results of `forward` go: output, lse, stderr, and the plan."""
    batch, rows, length = *queries.shape[:2], keys.shape[1]
    compute = torch.promote_types(queries.dtype, torch.float32)
    on_gpu = backend == "triton"
    return (
        values.new_empty((batch, rows, values.shape[2]), dtype=queries.dtype if on_gpu else compute),
        queries.new_empty((batch, rows), dtype=compute),
        # Without draws there is no standard error: no columns (NaN would not even be equal to itself).
        queries.new_empty((batch, rows if settings.samples else 0), dtype=compute),
        keys.new_empty((batch, settings.heights, length), dtype=torch.int32),
        keys.new_empty((batch, settings.heights, length if settings.branching else 0), dtype=torch.int32),
        queries.new_empty((batch, rows, settings.probes), dtype=torch.int32),
        queries.new_empty((batch, rows, settings.unfold), dtype=torch.int32),
        queries.new_empty((batch, rows, settings.samples), dtype=torch.int32),
        queries.new_empty((batch, rows, settings.samples), dtype=compute),
    )


def forward(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    seed: Tensor,
    sizes: Sequence[int],
    scale: float,
    dropout_p: float,
    partition: str,
    options: Sequence[int],
    backend: str,
    trained: bool = False,
) -> tuple[Tensor, ...]:
    """Attention of queries `[batch, group * length, dim]`; see `empty_results` for what comes out."""
    settings = CellSettings(*sizes)
    results = empty_results(queries, keys, values, settings, backend)
    output, lse, stderr, *plans = results
    if backend == "triton":
        from nearfield.kernels import cells_gpu

        iterations, start = options
        with kernels.on(queries.device):
            beyond = cells_gpu.BEYOND_TRAINED if trained else cells_gpu.BEYOND
            told = settings, scale, iterations, start
            cells_gpu.forward(queries, keys, values, visible, *told, output, lse, results[3], results[5], beyond)
        return results
    build = BY_NAME[partition](*options)
    for entry in range(len(queries)):
        plan = CellPlan(*(x[entry] for x in plans))
        query, key, value = (_wide(x[entry]) for x in (queries, keys, values))
        cell_of, coarse_of = assign(key, visible[entry], settings, build)
        plan.cell_of.copy_(cell_of)
        plan.coarse_of.copy_(coarse_of)
        first_row = entry * queries.shape[1]
        head = Head(query, key, value, visible[entry], cell_of, coarse_of, settings, scale, dropout_p, int(seed), first_row)
        place = output[entry] if value.shape[1] == values.shape[2] else _wide(output[entry])
        cells_cpu.forward(head, place, lse[entry], stderr[entry], plan)
        if backend == "reference":
            place, lse[entry] = _reference(head, plan, query, key, value)
        if place.data_ptr() != output[entry].data_ptr():
            output[entry] = place[:, : values.shape[2]]
    return results


def backward(
    output_grad: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    seed: Tensor,
    output: Tensor,
    lse: Tensor,
    cell_of: Tensor,
    coarse_of: Tensor,
    opened: Tensor,
    unfolded: Tensor,
    drawn: Tensor,
    log_factor: Tensor,
    sizes: Sequence[int],
    scale: float,
    dropout_p: float,
    partition: str,
    options: Sequence[int],
    backend: str,
    trained: bool = False,
) -> tuple[Tensor, ...]:
    """Gradients of queries, keys and values, the plan held fixed."""
    if backend == "triton":
        from nearfield.kernels import cells_gpu_backward

        settings = CellSettings(*sizes)
        with kernels.on(queries.device):
            return cells_gpu_backward.backward(
                output_grad, queries, keys, values, visible, output, lse, cell_of, opened, settings, scale
            )
    grads = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (queries, keys, values))
    for entry in range(len(queries)):
        plan = CellPlan(*(x[entry] for x in (cell_of, coarse_of, opened, unfolded, drawn, log_factor)))
        query, key, value = (_wide(x[entry]) for x in (queries, keys, values))
        head = Head(
            query,
            key,
            value,
            visible[entry],
            plan.cell_of.long(),
            plan.coarse_of.long(),
            CellSettings(*sizes),
            scale,
            dropout_p,
            int(seed),
            entry * queries.shape[1],
        )
        out, out_grad = _wide(output[entry]), _wide(output_grad[entry])
        if backend == "reference":
            found = _reference_backward(head, plan, out_grad)
        else:
            into = [
                x[entry] if x.dtype == head.compute and x.shape[2] == y.shape[1] else None
                for x, y in zip(grads, (query, key, value), strict=True)
            ]
            found = cells_cpu_backward.backward(head, plan, out, lse[entry], out_grad, into)
        for place, grad in zip(grads, found, strict=True):
            if place[entry].data_ptr() != grad.data_ptr():
                place[entry] = grad[:, : place.shape[2]]
    return grads


def _wide(x: Tensor) -> Tensor:
    """Rows filled up with zeros to a multiple of 8 columns, where they are not one.

    A matrix product of rows that are not aligned may round a row differently at another place of a tile, and where it stands
    depends on later queries.
    """
    columns = x.shape[1]
    wide = max(8, -(-columns // 8) * 8)
    return x if columns == wide else torch.nn.functional.pad(x, (0, wide - columns))


def _reference(head: Head, plan: CellPlan, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    scaled = queries.to(head.compute) * head.scale
    keep = None
    if head.dropout_p:
        rows = torch.arange(len(queries), device=queries.device)[:, None]
        coarse = head.coarse.cells if head.coarse is not None else 0
        items = torch.arange(len(keys) + head.fine.cells + coarse, device=queries.device)
        every = head.keep(rows, items)
        assert every is not None
        keep = every[:, : len(keys)], every[:, len(keys) :]
    plan = CellPlan(*(x if x.is_floating_point() else x.long() for x in vars(plan).values()))
    closed = closed_keys(head.visible, head.settings)
    cells = (head.fine.cells, head.coarse.cells if head.coarse is not None else 0)
    keys, values = keys.to(head.compute), values.to(head.compute)
    return cells_reference.attend(scaled, keys, values, head.visible, closed, head.settings.segment, plan, cells, keep)


def _reference_backward(head: Head, plan: CellPlan, output_grad: Tensor) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (head.queries, head.keys, head.values)]
        output, _ = _reference(head, plan, *inputs)
        return torch.autograd.grad(output, inputs, output_grad.to(output.dtype))
