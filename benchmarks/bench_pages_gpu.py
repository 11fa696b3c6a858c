"""Attention to vLLM's pages on a GPU, outside of vLLM, on tensors in its layout: steps of 1, 16 and 64 requests, short requests
where long ones are allowed, blocks that become full, chunks of prompts, errors.

python benchmarks/bench_pages_gpu.py --minutes 8                   # results/pages_gpu.json, case by case
python benchmarks/bench_pages_gpu.py --section steps --only 1x131072 64x131072 --out $OUT
python benchmarks/bench_pages_gpu.py --quick                       # tiny sizes, on a CPU too; nothing written

One layer of the 8B shape: 32 query heads, 8 heads of keys of 128, bfloat16, blocks of 256 keys that lie anywhere, keys in sqrt(n)
clusters, of which 128 keys in a row come from one. "errors" also has clusters strewn over all positions, the worst there is for
cells that end with their block. A step is captured in a CUDA graph, over as many copies of the pages as it takes to leave the L2
cache behind. "paged" is exact attention to the same pages by the same kernels, split over programs as in flash decoding; "sdpa"
the fastest backend of SDPA over keys and values that lie in one piece. An error is the mean of |output - exact| / |exact| over
rows and heads.

"short" is what requests pay that are exact because they are short: the default in a graph that was captured for 131,072 keys,
beside the same kernels in one for no more keys than there are.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import record
import torch
from gpu_timing import CUDA, DEVICE, DTYPE, backends, captured, card, clustered, fastest, interleaved, sdpa
from torch import Tensor

from nearfield.vllm.attend import Reach
from nearfield.vllm.pages import PageLayout
from nearfield.vllm.settings import Settings
from nearfield.vllm.steps import Prompts, StepRows, decode, probes_table, read_exactly, write

HEADS, GROUP, DIM, SIZE = 8, 4, 128, 256
LENGTHS = (4096, 16_384, 32_768, 65_536, 131_072, 262_144)
STEPS = (*((1, length) for length in (*LENGTHS, 1_048_576)), *((16, length) for length in LENGTHS), *((64, x) for x in LENGTHS))
SHORT, MOST = ((1, 2048), (1, 8000), (16, 2048), (16, 8000), (64, 2048), (64, 8000)), 131_072
CHUNKS = ((8192, 8192), (8192, 32_768), (8192, 131_072))
EXACT = Reach(64, 1 << 30, None)
CELLS = Reach(64, 0, None)
SECTIONS = ("steps", "errors", "short", "blocks", "chunks")
DEFAULT = Settings().reach(on_card=True)
BEYOND_CACHE = 256 << 20 if CUDA else 1
"""Bytes that a timed graph goes through at least."""
MOST_BYTES = 100 << 30
KINDS = 4
"""Requests of a batch have so many different keys."""
RUN = 128
"""So many keys in a row come from one cluster."""


class Pages:
    """Requests of one length, in blocks that lie anywhere."""

    def __init__(
        self, requests: int, length: int, layout: PageLayout, size_of_group: int, dtype: torch.dtype, run: int = RUN
    ) -> None:
        self.requests, self.length, self.layout = requests, length, layout
        blocks = -(-length // layout.size)
        self.pages = layout.empty(requests * blocks, dtype, DEVICE)
        order = torch.randperm(requests * blocks, generator=torch.Generator().manual_seed(0))
        self.table = order.view(requests, blocks).to(DEVICE, torch.int32)
        self.kinds = [
            tuple(x[0] for x in clustered(length, layout.dim, layout.heads, seed, run, size_of_group))
            for seed in range(min(KINDS, requests))
        ]
        place = torch.arange(length, device=DEVICE)
        for request in range(requests):
            _, key, value = self.kinds[request % len(self.kinds)]
            slots = self.table[request].long()[place // layout.size] * layout.size + place % layout.size
            write(self.pages, layout, *(x.transpose(0, 1).to(dtype) for x in (key, value)), slots)
        queries = [self.kinds[request % len(self.kinds)][0][:, -1 - request // len(self.kinds)] for request in range(requests)]
        self.query = torch.stack(queries).to(dtype)
        numbers = torch.arange(requests, dtype=torch.int32, device=DEVICE)
        self.rows = StepRows(numbers, numbers, torch.full_like(numbers, length), self.table, length)

    def step(self, reach: Reach, pages: Tensor | None = None, most: int | None = None) -> Callable[[], Tensor]:
        """`most`: how many keys a row may have for all that the host knows; None: no more than there are."""
        bound = self.length if most is None else most
        output, probes_of = torch.empty_like(self.query), probes_table(reach, self.layout, bound, DEVICE)
        table = torch.nn.functional.pad(self.table, (0, -(-bound // self.layout.size) - self.table.shape[1]))
        rows = self.rows._replace(block_table=table, most=bound)

        def call() -> Tensor:
            held = self.pages if pages is None else pages
            decode(self.query, held, self.layout, rows, reach, probes_of, self.layout.dim**-0.5, output)
            return output

        return call

    def copies(self) -> list[Tensor]:
        """The pages, as often as it takes to leave the cache behind."""
        whole = self.pages.untyped_storage()
        count = max(1, -(-BEYOND_CACHE // len(whole)))
        made = [self.pages]
        for _ in range(count - 1):
            copy = torch.empty(0, dtype=self.pages.dtype, device=DEVICE).set_(whole.clone())
            made.append(copy.as_strided(self.pages.shape, self.pages.stride(), 0))
        return made


def graphed(calls: list[Callable[[], Any]]) -> Callable[[], Any]:
    def run() -> list[Any]:
        return [call() for call in calls]

    return captured(run) if CUDA else run


def error_of(held: Pages) -> dict[str, float]:
    found, wanted = held.step(CELLS)().double(), held.step(EXACT)().double()
    error = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(min=1e-12)
    return {"error": float(error.mean()), "far_off": float((error > 0.3).double().mean())}


def errors(length: int, layout: PageLayout, group: int, dtype: torch.dtype) -> dict[str, Any]:
    """Of one request's last rows, by how its clusters lie."""
    return {name: error_of(Pages(1, length, layout, group, dtype, run)) for name, run in (("runs", RUN), ("strewn", 1))}


def steps(requests: int, length: int, layout: PageLayout, group: int, dtype: torch.dtype) -> dict[str, Any]:
    held = Pages(requests, length, layout, group, dtype)
    error = error_of(held)
    copies = held.copies()
    calls = {name: graphed([held.step(reach, x) for x in copies]) for name, reach in (("cells", CELLS), ("paged", EXACT))}
    keys = [torch.stack([kind[i].to(dtype) for kind in held.kinds]) for i in (1, 2)]
    if requests % len(held.kinds) == 0 and 2 * keys[0].nbytes * requests // len(held.kinds) < MOST_BYTES // 4:
        keys = [x.repeat(requests // len(held.kinds), 1, 1, 1) for x in keys]
        rows = held.query.view(requests, layout.heads, group, layout.dim)
        ways = {name: (lambda name=name: sdpa(name, rows, *keys, False)) for name in backends()}
        best, _ = fastest(ways)
        many = max(1, -(-BEYOND_CACHE // (2 * keys[0].nbytes)))
        others = [[x.clone() for x in keys] for _ in range(many - 1)]
        calls["sdpa"] = graphed([lambda own=own: sdpa(best, rows, *own, False) for own in (keys, *others)])
    runs = interleaved(calls)
    counts = {name: len(copies) for name in ("cells", "paged")} | ({"sdpa": many} if "sdpa" in calls else {})
    ms = {name: statistics.median(times) / counts[name] for name, times in runs.items()}
    near = CELLS.first_near(length - 1, layout.size)
    opened = CELLS.opened((near - 1) * layout.cells, (near - 1) * layout.size)
    return {
        "requests": requests,
        "length": length,
        "ms": ms,
        "least_ms": {name: min(times) / counts[name] for name, times in runs.items()},
        "paged_over_cells": ms["paged"] / ms["cells"],
        **error,
        "keys_read": opened * layout.size // layout.cells + length - (near - 1) * layout.size,
        "cells": (near - 1) * layout.cells,
        "page_bytes": copies[0].stride(0) * copies[0].element_size(),
        "cells_bytes": layout.bytes_per_page,
        "copies": len(copies),
    }


def short(
    requests: int, length: int, most: int, reach: Reach, layout: PageLayout, group: int, dtype: torch.dtype
) -> dict[str, Any]:
    held = Pages(requests, length, layout, group, dtype)
    copies = held.copies()
    ways = {"default": (reach, most), "paged": (EXACT, length)}
    found = {name: held.step(one, most=bound)() for name, (one, bound) in ways.items()}
    off = float((found["default"] - found["paged"]).double().norm() / found["paged"].double().norm())
    calls = {name: graphed([held.step(one, x, bound) for x in copies]) for name, (one, bound) in ways.items()}
    ms = {name: statistics.median(times) / len(copies) for name, times in interleaved(calls).items()}
    return {
        "requests": requests,
        "length": length,
        "most": most,
        "off": off,
        "ms": ms,
        "times_as_long": ms["default"] / ms["paged"],
    }


def blocks(tokens: int, layout: PageLayout, dtype: torch.dtype) -> dict[str, Any]:
    """What it takes to write so many keys: of a step in which no block becomes full, of one in which all do, of a chunk."""
    pages = layout.empty(max(64, 2 * tokens // layout.size), dtype, DEVICE)
    torch.nn.init.normal_(pages)
    key, value = torch.randn(2, tokens, layout.heads, layout.dim, device=DEVICE).to(dtype)
    block = torch.arange(tokens, device=DEVICE)
    slots = {"chunk": block} if tokens > 64 else {"none full": block * layout.size, "all full": (block + 1) * layout.size - 1}
    calls = {name: graphed([lambda own=own: write(pages, layout, key, value, own)]) for name, own in slots.items()}
    return {"tokens": tokens, "ms": {name: statistics.median(runs) for name, runs in interleaved(calls).items()}}


def chunk(rows: int, length: int, layout: PageLayout, group: int, dtype: torch.dtype) -> dict[str, Any]:
    """The last rows of a prompt, exactly, next to SDPA over keys in one piece."""
    held = Pages(1, length, layout, group, dtype)
    query, key, value = (x[None].to(dtype) for x in held.kinds[0])
    asked = query[0, :, -rows:].transpose(0, 1).contiguous()
    ints: dict[str, Any] = {"dtype": torch.int32, "device": DEVICE}
    seen = torch.arange(length - rows + 1, length + 1, **ints)
    own = StepRows(torch.empty(0, **ints), torch.zeros(rows, **ints), seen, held.table, length)
    start = torch.tensor([0, rows], **ints)
    prompts, output = Prompts(start, torch.ones(1, dtype=torch.int8, device=DEVICE), (rows,)), torch.empty_like(asked)

    def paged() -> Tensor:
        read_exactly(asked, held.pages, layout, own, prompts, layout.dim**-0.5, output)
        return output

    from torch.nn.attention.bias import causal_lower_right

    def whole() -> Tensor:
        mask = causal_lower_right(rows, length)
        return torch.nn.functional.scaled_dot_product_attention(query[:, :, -rows:], key, value, mask, enable_gqa=True)

    found, wanted = paged().transpose(0, 1).double(), whole()[0].double()
    off = float((found - wanted).norm() / wanted.norm())
    runs = interleaved({"paged": paged, "sdpa": whole})
    return {"rows": rows, "length": length, "off": off, "ms": {name: statistics.median(x) for name, x in runs.items()}}


def show(found: dict[str, dict[str, Any]]) -> None:
    table = record.table("requests", "keys", "paged, ms", "SDPA, ms", "cells, ms", "times as fast", "error", "keys read")
    for row in found.get("steps", {}).values():
        exact = f"{row['ms']['sdpa']:.3f}" if "sdpa" in row["ms"] else ""
        ms, ratio = row["ms"], f"{row['paged_over_cells']:.2f}"
        cells = f"{row['requests']}", f"{row['length']:,}", f"{ms['paged']:.3f}", exact, f"{ms['cells']:.3f}", ratio
        table.add_row(*cells, f"{row['error']:.3f}", f"{row['keys_read']:,}")
    record.show(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--only", nargs="+", help="steps: REQUESTSxLENGTH")
    parser.add_argument("--minutes", type=float, help="no case is begun after so many")
    parser.add_argument("--out", type=Path, default=record.RESULTS, help="folder of pages_gpu.json")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, nothing written")
    options = parser.parse_args()
    begun = time.monotonic()
    if options.quick:
        layout, dtype, group = PageLayout(2, 32, 16, 16), torch.float32, 2
        cases: dict[str, Callable[[], dict[str, Any]]] = {
            "steps/2x200": lambda: steps(2, 200, layout, group, dtype),
            "errors/200": lambda: errors(200, layout, group, dtype),
            "short/2x100": lambda: short(2, 100, 1000, Reach(16, 200, None), layout, group, dtype),
            "blocks/4": lambda: blocks(4, layout, dtype),
            "chunks/20x100": lambda: chunk(20, 100, layout, group, dtype),
        }
    else:
        layout, dtype, group = PageLayout(HEADS, SIZE, DIM, DIM), DTYPE, GROUP
        cases = {f"steps/{b}x{n}": (lambda b=b, n=n: steps(b, n, layout, group, dtype)) for b, n in STEPS}
        cases |= {f"errors/{n}": (lambda n=n: errors(n, layout, group, dtype)) for n in (*LENGTHS, 1_048_576)}
        cases |= {f"short/{b}x{n}": (lambda b=b, n=n: short(b, n, MOST, DEFAULT, layout, group, dtype)) for b, n in SHORT}
        cases |= {f"blocks/{n}": (lambda n=n: blocks(n, layout, dtype)) for n in (1, 64, 8192)}
        cases |= {f"chunks/{r}x{n}": (lambda r=r, n=n: chunk(r, n, layout, group, dtype)) for r, n in CHUNKS}
    found: dict[str, dict[str, Any]] = {}
    for name, case in cases.items():
        section, _, own = name.partition("/")
        if section not in options.section or (
            options.only and section == "steps" and own not in options.only and not options.quick
        ):
            continue
        if options.minutes is not None and time.monotonic() - begun > 60 * options.minutes:
            print(f"no time left for {name}")
            continue
        found.setdefault(section, {})[own] = case()
        print(f"{time.monotonic() - begun:7.1f} s  {name}: {found[section][own].get('ms', found[section][own])}", flush=True)
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()
        if not options.quick:
            record.RESULTS = options.out
            record.merge("pages_gpu", section, {"card": card(), "rows": found[section]})
    show(found)


if __name__ == "__main__":
    main()
