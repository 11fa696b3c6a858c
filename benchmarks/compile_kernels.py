"""Compile, for a card that need not be there, every kernel that forward and backward passes, a step of a cache, and sums over
chosen keys would launch, with the block sizes of its class.

python benchmarks/compile_kernels.py 8.6 --dims 64 --dtypes bfloat16     # for cards of one class, one line for each kernel

A line is a JSON object: see `Compiled`. Nothing runs, so that no results are right; kernels are compiled where they would be
launched. `fit_tiles.py` and tests/cells/triton/test_triton_compiles.py use it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
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
from nearfield.cells.triton import trial
from nearfield.cells.triton.closing import tabulate_segment
from nearfield.cells.triton.halve import halve
from nearfield.cells.triton.merge_two import merge_two
from nearfield.kernels import cards, exact_rows, pairs_triton
from nearfield.knn import attend_triton
from nearfield.knn.index.cells import CellIndex
from nearfield.knn.index.cells_triton import KernelCells
from nearfield.vllm import steps as page_steps
from nearfield.vllm.attend import Reach
from nearfield.vllm.pages import PageLayout

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
}
OPTIONS = ("num_warps", "num_stages", "launch_pdl")
TENSOR_COLUMNS = 512
"""Columns of tensor memory that a block may take, on the cards of class 10.0 that have it."""


VERSIONS: tuple[dict[str, Any], ...] = (
    {"causal": True, "probes": 4, "by_queries": True},
    {"causal": False, "probes": 40, "cell_size": 64},
    {"causal": True, "probes": 4, "share": 128},
    {"causal": False, "probes": 40, "share": 128, "cell_size": 64},
)
"""Passes that together launch every kernel, with and without a causal mask, for few probes and for many."""


class Compiled(NamedTuple):
    """What a kernel takes on a card of the class."""

    kernel: str
    shared: int
    """bytes of shared memory per block"""
    registers: int
    """per thread"""
    stack: int
    """bytes per thread, of arrays and spilled registers"""
    columns: int
    """of tensor memory"""
    waits: bool
    """for the kernel before it: programmatic dependent launch"""
    error: str = ""
    """of the compiler; then all the numbers are zero"""

    def fits(self, name: str) -> bool:
        return not self.error and self.shared <= cards.SHARED[name] and self.columns <= TENSOR_COLUMNS


class Compiler:
    """Takes the place of a launch. `seen`: every kernel and version of it, once."""

    def __init__(self, name: str, only: frozenset[str] | None = None, forgiving: bool = False, quick: bool = False) -> None:
        major, minor = cards.capability_of(name)
        self.target = GPUTarget("cuda", 10 * major + minor, 32)
        self.only, self.forgiving, self.quick = only, forgiving, quick
        self.seen: dict[str, Compiled] = {}
        self.latest: list[Compiled] = []
        """those of the launches since this was last emptied"""

    def launch(self, kernel: JITFunction, grid: Any = None, warmup: bool = False, **values: Any) -> None:
        name = kernel.fn.__name__
        if self.only is not None and name not in self.only:
            return
        options = {option: values.pop(option) for option in OPTIONS if option in values}
        signature, constants, attributes = {}, {}, {}
        for place, parameter in enumerate(kernel.params):
            value = values[parameter.name]
            is_one = isinstance(value, int) and value == 1 and not parameter.do_not_specialize
            if parameter.is_constexpr or value is None or is_one:
                signature[parameter.name], constants[place,] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name], attributes[place,] = POINTERS[value.dtype], [["tt.divisibility", 16]]
            elif isinstance(value, float):
                signature[parameter.name] = "fp32"
            else:
                signature[parameter.name] = "i32"
                if value % 16 == 0 and not parameter.do_not_specialize:
                    attributes[place,] = [["tt.divisibility", 16]]
        key = f"{name} {signature} {constants} {attributes} {options}"
        if key not in self.seen:
            try:
                made = triton.compile(ASTSource(kernel, signature, constants, attributes), target=self.target, options=options)
                self.seen[key] = resources(name, made)
            except Exception as error:
                if not self.forgiving:
                    raise RuntimeError(f"{name} {constants} {options} for {self.target}: {str(error)[-1500:]}") from None
                self.seen[key] = Compiled(name, 0, 0, 0, 0, False, type(error).__name__)
        self.latest.append(self.seen[key])

    @contextmanager
    def in_place_of_launches(self, name: str) -> Iterator[None]:
        """As if the tensors were on a card of class `name`."""
        compiler = self

        def run(kernel: JITFunction, **values: Any) -> None:
            if not (compiler.quick and values.get("AGAIN")):
                compiler.launch(kernel, **values)

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(JITFunction, "run", run))
            stack.enter_context(mock.patch.dict(os.environ, {cards.SWITCH: name}))
            stack.enter_context(mock.patch.object(torch.cuda, "get_device_capability", return_value=cards.capability_of(name)))
            yield


def resources(name: str, made: Any) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        said = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    columns = getattr(made.metadata, "tmem_size", None) or 0
    waits = "griddepcontrol.wait" in made.asm["ptx"]
    return Compiled(name, made.metadata.shared, int(found[1]), int(found[2]), columns, waits)


def passes(
    dim: int, dtype: torch.dtype, causal: bool, probes: int, share: int = 1, cell_size: int = 32, by_queries: bool = False
) -> None:
    """A forward and a backward pass, and a forward pass with a plan that is there already."""
    length = 4096
    query, key, value, upstream = (torch.randn(2, length, dim).to(dtype) for _ in range(4))
    sizes = CellSizes(1, 512 if causal else 0, 0, 16, cell_size, probes, 0, 4 if causal else 1, share)
    visible = (torch.arange(length) + 1).repeat(2, 1) if causal else torch.full((2, length), length)
    output, lse = torch.empty_like(value), torch.empty(2, length)
    cell_of = torch.empty(2, sizes.span_levels, length, dtype=torch.int32)
    opened = torch.empty(2, sizes.blocks_of(length), probes, dtype=torch.int32)
    order = torch.empty(2, length if sizes.ordered else 0, dtype=torch.int32)
    given, how = (query, key, value, visible), (sizes, dim**-0.5)
    cells = nf.KMeans(by_queries=by_queries)
    triton_forward.forward(*given, *how, cells, output, lse, cell_of, opened, order, MemoryPolicy().beyond)
    # Nothing has run: there is no plan yet.
    plan = cell_of.fill_(-1), opened.fill_(-1), order.copy_(torch.arange(order.shape[1]))
    triton_backward.backward(upstream, *given, output, lse, *plan, *how)
    known = frozenset(("cell_of", "opened", "order"))
    triton_forward.forward(*given, *how, cells, output, lse, *plan, MemoryPolicy().beyond, known)
    chosen = torch.arange(4)
    exact_rows.exact_rows(query, key, value, visible, chosen % 2, chosen, dim**-0.5)
    level_of, of_rows = torch.zeros(4, 9, dtype=torch.uint8), (chosen, chosen, chosen, chosen % 2, chosen)
    trial.level_sums(query, key, value, *of_rows, cell_of, level_of, sizes.segment, dim**-0.5, 4)


def step(dim: int, dtype: torch.dtype) -> None:
    """A step of a cache, as on a card: with all keys there, with some of them, and with none that are in cells."""
    for kept in ({}, {"offload": True}, {"offload": True, "resident": 0}):
        store = CellStore(nf.Cells(segment=512, cell_size=32, probes=6), **kept)
        store.append(*torch.randn(2, 1, 2, 2000, dim).to(dtype))
        store.close()
        assert store.state is not None
        for moment in ("centroid", "variance", "value"):
            buffer = getattr(store.state.tables, moment)
            buffer.storage = buffer.storage.to(dtype)
        query = torch.randn(2, 4, dim).to(dtype)
        with mock.patch.object(torch.Tensor, "is_cuda", True), mock.patch.object(torch.cuda, "is_current_stream_capturing", bool):
            cache_decode.decode(store.state, query, dim**-0.5, store.opening)


def close(dim: int, dtype: torch.dtype) -> None:
    """Cells of a prompt that a cache makes, and those that it takes over."""
    keys, values = torch.randn(2, 2, 1024, dim).to(dtype)
    triton_forward.group_keys(keys, 512, 1, 0)
    cell_of = torch.zeros(2, 1024, dtype=torch.int32)
    halve(keys, cell_of, 16)
    tabulate_segment(keys, values, cell_of, 16, 32)


def chunk(dim: int, dtype: torch.dtype) -> None:
    """What the rows of a chunk find near by, which often lies head by head in each row, and in closed segments."""
    near, past = torch.randn(1, 64, 4, dim).to(dtype).transpose(1, 2), torch.randn(1, 4, 64, dim).to(dtype)
    merge_two(near, past, *torch.randn(2, 1, 4, 64), dtype)


def chosen_keys(dim: int, dtype: torch.dtype) -> None:
    rows, table, weights, ids = torch.randn(8, dim).to(dtype), torch.randn(9, dim).to(dtype), torch.randn(8, 5), torch.arange(40)
    pairs_triton.scores(rows, table, ids.view(8, 5) % 9)
    pairs_triton.sums(weights, table, ids.view(8, 5) % 9)
    pairs_triton.scatter_(torch.zeros(9, dim), weights, rows, ids.view(8, 5) % 9)


def search(dim: int, dtype: torch.dtype, quick: bool) -> None:
    """The search of an index by cells, for few and (unless `quick`) for many keys of a row's own segment."""
    keys = torch.randn(2, 4096, dim).to(dtype)
    visible = (torch.arange(4096) + 1).repeat(2, 1)
    for segment in (512,) if quick else (512, 4096):
        sizes = CellIndex(cell_size=32, probes=6, segment=segment).sizes(4096, 64, True, True)
        cells = KernelCells(keys, sizes, None, 0)
        cells.tables.starts.zero_()
        cells.find(keys, 64, visible, sizes)
    ids, ranks = torch.arange(1000, dtype=torch.int32).expand(8, -1).contiguous(), torch.zeros(8, 16, dtype=torch.int64)
    drawn = attend_triton.tail_ids(ranks, ids)
    some = keys[0, :8]
    attend_triton.attend_rows(some, keys[0], keys[0], ids.float(), ids, drawn, ranks[:, 0], 0.1, torch.empty_like(some))


def pages(dim: int, dtype: torch.dtype) -> None:
    """Pages of vLLM: keys come in, rows of answers attend by cells, rows of prompts exactly."""
    layout, reach = PageLayout(2, 256, dim, dim), Reach(64, 512, None)
    held, key = layout.empty(9, dtype), torch.randn(3, 2, dim).to(dtype)
    page_steps.write(held, layout, key, key, torch.arange(3))
    numbers = torch.arange(3, dtype=torch.int32)
    rows = page_steps.StepRows(numbers, numbers, numbers, torch.zeros(3, 8, dtype=torch.int32), 2048)
    query, probes_of = torch.randn(3, 8, dim).to(dtype), page_steps.probes_table(reach, layout, 2048, torch.device("cpu"))
    with mock.patch.object(torch.Tensor, "is_cuda", True):
        page_steps.decode(query, held, layout, rows, reach, probes_of, 0.1, torch.empty_like(query))
    prompts = page_steps.Prompts(torch.arange(2, dtype=torch.int32), torch.ones(1, dtype=torch.int8), (3,))
    page_steps.read_exactly(query, held, layout, rows, prompts, 0.1, torch.empty_like(query))


def compile_all(name: str, dim: int, dtype: torch.dtype, quick: bool = False) -> list[Compiled]:
    """Every kernel, in all its versions, for cards of class `name`; if `quick`, a mask for rows and none for blocks, and
    nothing for rows that are computed again."""
    compiler = Compiler(name, quick=quick)
    with compiler.in_place_of_launches(name):
        for version in VERSIONS[::3] if quick else VERSIONS:
            passes(dim, dtype, **version)
        step(dim, dtype)
        close(dim, dtype)
        chunk(dim, dtype)
        chosen_keys(dim, dtype)
        search(dim, dtype, quick)
        pages(dim, dtype)
    return list(compiler.seen.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("classes", nargs="+", choices=cards.SHARED, help="of cards, by compute capability")
    parser.add_argument("--dims", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--quick", action="store_true", help="only one version of most kernels")
    arguments = parser.parse_args()
    for name in arguments.classes:
        for dtype in arguments.dtypes:
            for dim in arguments.dims:
                for found in compile_all(name, dim, getattr(torch, dtype), arguments.quick):
                    print(json.dumps({"class": name, "dim": dim, "dtype": dtype, **found._asdict()}), flush=True)


if __name__ == "__main__":
    main()
