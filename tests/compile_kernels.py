"""Compile, for a card that need not be there, every kernel that a forward and a backward pass, a step of a cache, and sums over
chosen keys would launch. A script: see test_triton_compiles.py. Prints the name of each kernel, the bytes of shared memory that
it takes, and whether it waits for the previous kernel."""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import nearfield as nf
from nearfield.cells.cache import decode as cache_decode
from nearfield.cells.cache.store import CellStore
from nearfield.cells.sizes import CellSizes, MemoryPolicy
from nearfield.cells.triton import backward as triton_backward
from nearfield.cells.triton import forward as triton_forward
from nearfield.kernels import pairs_triton

POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
}
HOPPER = GPUTarget("cuda", 90, 32)
done: set[str] = set()


def compile_only(kernel: JITFunction, grid: Any = None, warmup: bool = False, **values: Any) -> None:
    """In place of a launch."""
    options = {name: values.pop(name) for name in ("num_warps", "num_stages", "launch_pdl") if name in values}
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1 and not parameter.do_not_specialize):
            signature[parameter.name], constants[place,] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name], attributes[place,] = POINTERS[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[place,] = [["tt.divisibility", 16]]
    key = f"{kernel.fn.__name__} {signature} {constants} {options}"
    if key not in done:
        done.add(key)
        made = triton.compile(ASTSource(kernel, signature, constants, attributes), target=HOPPER, options=options)
        print(kernel.fn.__name__, made.metadata.shared, "griddepcontrol.wait" in made.asm["ptx"], flush=True)


def passes(dim: int, dtype: torch.dtype, causal: bool, probes: int, length: int = 4096) -> None:
    query, key, value, upstream = (torch.randn(2, length, dim).to(dtype) for _ in range(4))
    sizes = CellSizes(1, 512 if causal else 0, 0, 16, 32, probes, 0, 4 if causal else 1)
    visible = (torch.arange(length) + 1).repeat(2, 1) if causal else torch.full((2, length), length)
    output, lse = torch.empty_like(value), torch.empty(2, length)
    cell_of = torch.empty(2, sizes.span_levels, length, dtype=torch.int32)
    opened = torch.empty(2, length, probes, dtype=torch.int32)
    plan = sizes, dim**-0.5
    triton_forward.forward(query, key, value, visible, *plan, 2, 0, output, lse, cell_of, opened, MemoryPolicy().beyond)
    # Nothing has run: there is no plan yet.
    triton_backward.backward(upstream, query, key, value, visible, output, lse, cell_of.fill_(-1), opened.fill_(-1), *plan)


def step(dim: int, dtype: torch.dtype) -> None:
    """As on a card, with dependent launches."""
    store = CellStore(nf.Cells(segment=512, cell_size=32, probes=6))
    store.append(*torch.randn(2, 1, 2, 2000, dim).to(dtype))
    store.close()
    assert store.state is not None
    for moment in ("centroid", "variance", "value"):
        buffer = getattr(store.state.tables, moment)
        buffer.storage = buffer.storage.to(dtype)
    query = torch.randn(2, 4, dim).to(dtype)
    with mock.patch.object(torch.Tensor, "is_cuda", True), mock.patch.object(torch.cuda, "is_current_stream_capturing", bool):
        cache_decode.decode(store.state, query, dim**-0.5, store.probes, 4096)


def chosen_keys(dim: int, dtype: torch.dtype) -> None:
    rows, table, weights, ids = torch.randn(8, dim).to(dtype), torch.randn(9, dim).to(dtype), torch.randn(8, 5), torch.arange(40)
    pairs_triton.scores(rows, table, ids.view(8, 5) % 9)
    pairs_triton.sums(weights, table, ids.view(8, 5) % 9)
    pairs_triton.scatter_(torch.zeros(9, dim), weights, rows, ids.view(8, 5) % 9)


if __name__ == "__main__":
    JITFunction.run = compile_only  # type: ignore[method-assign]
    name, dtype_name, kind, probes_wanted = sys.argv[1:]
    size, kept_as = int(name), getattr(torch, dtype_name)
    passes(size, kept_as, kind == "causal", int(probes_wanted))
    step(size, kept_as)
    chosen_keys(size, kept_as)
