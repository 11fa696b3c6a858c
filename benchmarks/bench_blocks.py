"""What it costs that cells end where the blocks of a paged cache do, on a CPU: perplexity of the end of long texts.

python benchmarks/bench_blocks.py                                   # SmolLM2, 8,192 tokens; writes results/blocks.json
python benchmarks/bench_blocks.py --kept FOLDER --kinds code        # keeps what was read there, and takes it from there
python benchmarks/bench_blocks.py --quick                           # a tiny model, nothing written

All but the last 448 tokens of a text are read exactly; these are then predicted with a cache whose keys are grouped block by
block, each from its own keys alone, as they are in vLLM. A way is BLOCK/CELL/CUT: keys of a block ("all": a prompt is one), keys
of a cell on average, and where spreads are cut off in scores. Ways open as many keys as a `CellCache` on a GPU does. What a step
reads is the keys that it reads one by one, and for each cell three vectors where a key and its value are two.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import perplexity_texts
import record
import torch
from bench_perplexity_gpu import random_texts, tiny
from bench_sharp import LARGE, Prompt, exact_cache, losses
from perplexity_measure import stderr
from perplexity_texts import Text
from real import SMOLLM2

import nearfield as nf
from nearfield.app.evaluate.measure import attending
from nearfield.app.evaluate.models import load_model
from nearfield.app.ruler.ways import WAYS as KNOWN_WAYS
from nearfield.cells.cache import segments
from nearfield.cells.sizes import OPENED_ON_GPU
from nearfield.hf.cache import CellCache, CellLayer

TOKENS, WRITTEN = 8192, 448
WAYS = (
    *("all/16/64", "1024/16/64", "512/16/64", "256/32/64", "256/16/64", "256/8/64", "64/16/64", "16/16/64"),
    *("all/16/9", "256/16/9"),
)


@contextmanager
def cut_off(most: float) -> Iterator[None]:
    """Spreads in scores of cells that were grouped as keys are large."""
    before = segments.MOST_SPREAD
    segments.MOST_SPREAD = most
    try:
        yield
    finally:
        segments.MOST_SPREAD = before


def filled(prompt: Prompt, model: Any, block: int | None, cell: int) -> CellCache:
    """A cache with what was read, grouped in blocks of so many keys."""
    tokens = prompt.start
    probes = max(1, round(OPENED_ON_GPU * math.sqrt(tokens) / cell))
    made = CellCache(nf.Cells(segment=block, cell_size=cell, probes=probes), config=model.config, group_from=0, audit=True)
    for number, read in enumerate(prompt.cache.layers):
        layer = made.layers[number]
        if not isinstance(layer, CellLayer):
            raise SystemExit(f"layer {number} has a window; take a model that has none")
        layer.store.append(read.keys, read.values)
        layer.store.close()
    return made


@torch.no_grad()
def study(model: Any, text: Text, written: int, kept: Path | None, ways: list[str]) -> dict[str, Any]:
    begun = time.perf_counter()
    prompt = Prompt(model, text, written, kept)
    found: dict[str, Any] = {**text.about, "ways": {}}
    print(f"{time.perf_counter() - begun:7.1f} s  {text.name}, read", flush=True)
    with attending(model, nf.Exact()):
        exact = losses(model, prompt, exact_cache(prompt))
        found["loss"] = float(exact.mean())
        for way in ways:
            block, cell, most = way.split("/")
            with cut_off(float(most)):
                cache = filled(prompt, model, None if block == "all" else int(block), int(cell))
                cells = SimpleNamespace(layers=cache.layers)
                read = KNOWN_WAYS["exact+cache"].keys_read(cells)
                tables = 1.5 * sum(layer.store.cells for layer in cache.layers) / len(cache.layers)
                difference = losses(model, prompt, cache) - exact
            errors = torch.cat([step.relative.flatten() for steps in cache.errors.values() for step in steps])
            found["ways"][way] = {
                "keys_read": read,
                "tables": tables,
                "difference": float(difference.mean()),
                "absolute": float(difference.abs().mean()),
                "stderr": stderr(difference),
                "error": float(errors.mean()),
                "far_off": float((errors > LARGE).double().mean()),
            }
            spent = time.perf_counter() - begun
            excess = math.expm1(float(difference.mean()))
            print(f"{spent:7.1f} s  {text.name}, {way}: {excess:+.2%}, error {float(errors.mean()):.3f}", flush=True)
    return found


def pooled(texts: list[dict[str, Any]]) -> dict[str, Any]:
    """By way, over all texts that have it."""
    made: dict[str, Any] = {}
    for name in dict.fromkeys(way for text in texts for way in text["ways"]):
        own = [text["ways"][name] for text in texts if name in text["ways"]]
        mean = {what: sum(one[what] for one in own) / len(own) for what in own[0]}
        excess = math.expm1(mean["difference"])
        wide = (1 + excess) * math.sqrt(sum(one["stderr"] ** 2 for one in own)) / len(own)
        made[name] = mean | {"texts": len(own), "excess": excess, "stderr": wide}
    return made


def show(title: str, found: dict[str, Any]) -> None:
    columns = ("block/cell/cut", "keys read", "tables", "excess", "error of a step", f"rows over {LARGE:.0%}")
    shown = record.table(*columns, title=title, words=columns[:1])
    for name, way in found["pooled"].items():
        excess = f"{way['excess']:+.2%} ± {way['stderr']:.2%}"
        shown.add_row(
            name, f"{way['keys_read']:,.0f}", f"{way['tables']:,.0f}", excess, f"{way['error']:.3f}", f"{way['far_off']:.1%}"
        )
    record.show(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=SMOLLM2, help="folder of a causal language model without windows")
    parser.add_argument("--text", type=Path, action="append", default=[], help="a book; default: the essays of RULER")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--kinds", nargs="+", choices=perplexity_texts.KINDS, default=perplexity_texts.KINDS)
    parser.add_argument("--ways", nargs="+", default=WAYS, help="BLOCK/CELL/CUT")
    parser.add_argument("--kept", type=Path, metavar="FOLDER", help="where what was read is kept, and taken from")
    parser.add_argument("--quick", action="store_true", help="a tiny model, nothing written")
    options = parser.parse_args()
    if options.quick:
        model, texts, written = tiny(), random_texts(1600), 64
    elif not options.model.exists():
        print(f"skipped: no model in {options.model} (`make help` says how to fetch it)")
        return
    else:
        model, tokenizer = load_model(options.model)
        texts = perplexity_texts.find(tokenizer, options.text, options.tokens, 1)
        texts, written = [text for text in texts if text.kind in options.kinds], WRITTEN
    name = "tiny" if options.quick else options.model.name
    found: dict[str, Any] = {"tokens": texts[0].ids.shape[1], "written": written, "texts": {}}
    section = f"{name}/{found['tokens']}"
    for text in texts:
        kept = None if options.kept is None else options.kept / name
        found["texts"][text.name] = study(model, text, written, kept, options.ways)
    found["pooled"] = pooled(list(found["texts"].values()))
    show(f"{name}: the last {written} of {found['tokens']:,} tokens", found)
    if not options.quick:
        record.merge("blocks", section, found)


if __name__ == "__main__":
    main()
