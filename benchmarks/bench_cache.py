"""A key-value cache that is searched, `hf.CellCache` and `CellStore`, next to one that is read whole.

python benchmarks/bench_cache.py --text TEXT                       # results/cache.json
python benchmarks/bench_cache.py --only steps --text TEXT          # leaves the other sections of the file as they are
python benchmarks/bench_cache.py --quick                           # short texts, few keys; writes only with --out

steps       8,192 tokens of each --text and of the prose of Python's language reference, the last 2,048 fed one by one: tokens per
            second, perplexity and how much of K and V is read, next to a DynamicCache with SDPA     about 20 minutes a text
appends     a million keys appended one by one: the time of a step, and memory beyond the keys       2 minutes
operations  20 times 2,000 random operations (append, crop, reorder, select, save, load), checked against lists of keys
                                                                                                     3 minutes
memory      30 sentences to find in 51,200 tokens through hf.Memory                                  minutes on a GPU
decode      one token against 32,768 to 1,048,576 keys on a GPU, next to SDPA                        minutes on a GPU

Times are for two cores, or for a large GPU. Without a GPU, `memory` and `decode` run only if --only names them. The model is what
`make smollm2` fetches, or a folder that holds nothing but its .gguf file.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_language import read_texts
from real import SMOLLM2
from record import RESULTS, merge, show

from nearfield.app.evaluate.models import load_model
from nearfield.app.evaluate.report import environment

SECTIONS = {
    "steps": "cache_steps",
    "appends": "cache_appends",
    "operations": "cache_operations",
    "memory": "cache_memory",
    "decode": "cache_decode",
}
"""Section and file. The file has a function of that name, and `show_...` for its results."""
WITH_MODEL, ON_GPU = ("steps", "memory"), ("memory", "decode")


def measures(section: str) -> tuple[Callable[..., dict[str, Any]], Callable[[dict[str, Any]], Any]]:
    module = importlib.import_module(SECTIONS[section])
    return getattr(module, section), getattr(module, f"show_{section}")


def main() -> int:
    """Returns 0, or 1 if a store differs from the lists it is checked against."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=SMOLLM2, help="folder of a causal language model")
    parser.add_argument("--text", type=Path, action="append", default=[], help="an English text; may be repeated")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="SECTION", help="these sections")
    parser.add_argument("--out", type=Path, help="folder for cache.json")
    parser.add_argument("--device", help="of the model: cpu, cuda, ...; without it a GPU, if there is one")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of the model")
    parser.add_argument("--tokens", type=int, help="per text or case, instead of what is said above")
    parser.add_argument("--cases", type=int, help="sentences of `memory`")
    parser.add_argument("--quick", action="store_true", help="small sizes, nothing written unless --out says where")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    chosen = options.only or [section for section in SECTIONS if on_gpu or options.quick or section not in ON_GPU]
    if any(section in WITH_MODEL for section in chosen) and not options.model.exists():
        print(f"skipped: no model in {options.model} (`make smollm2` fetches one)")
        return 0
    path = (options.out or RESULTS).absolute() / "cache"
    path.parent.mkdir(parents=True, exist_ok=True)
    failures: list[str] = []
    for section in chosen:
        measure, tabulated = measures(section)
        if section in WITH_MODEL:
            device = options.device or ("cuda" if on_gpu else "cpu")
            model, tokenizer = load_model(options.model, device, getattr(torch, options.dtype))
            results = measure(model, tokenizer, read_texts(options.text), options)
            results = {"model": options.model.name, "where": environment(model), **results}
        else:
            results = measure(options.quick)
        show(tabulated(results))
        if options.out is not None or not options.quick:
            print("written:", merge(str(path), section, results), flush=True)
        failures += [f"{section}, seed {seed}: {why}" for seed, why in results.get("failed", {}).items()]
    for failure in failures:
        print(failure)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
