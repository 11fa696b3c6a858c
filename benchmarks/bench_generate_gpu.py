"""Whole models on a GPU: reading prompts, decoding, requests of different lengths, with exact attention and with a CellCache.

    python benchmarks/bench_generate_gpu.py                                   # all sections, on a card with 141 GB
    python benchmarks/bench_generate_gpu.py --section prefill --list          # the names of its cases
    python benchmarks/bench_generate_gpu.py --section decode --only 1b-131072
    python benchmarks/bench_generate_gpu.py --section qwen --model models/qwen2.5-coder-1.5b
    python benchmarks/bench_generate_gpu.py --quick                           # tiny, anywhere: to see that it runs

decode      a step against 65,536 to 1,048,576 keys, graph against graph
prefill     reading prompts of 4,096 to 262,144 tokens
requests    16 requests of 4,096 to 65,536 tokens, continued together
closing     the step that closes a segment
qwen        a real model on a real text; needs --model

Each section is a file, `generate_<section>.py`, which says what it measures and how. Results are written after every case to
generate_gpu.json; cases that are not measured again stay as they are. --limit bounds the rounds of a case, not its first pass.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from pathlib import Path
from typing import Any

import generate_models as models
import record
from gpu_timing import CUDA, card

from nearfield import hf

SECTIONS = ("decode", "prefill", "requests", "closing", "qwen")
"""Each has a file `generate_<section>.py` with a function of that name, `show_<section>`, `CASES` and `QUICK`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", nargs="+", choices=SECTIONS, default=SECTIONS, metavar="SECTION")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="names of cases, such as 1b-131072")
    parser.add_argument("--list", action="store_true", help="print the names of cases, and end")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for the timed rounds of a prompt")
    parser.add_argument("--resident", type=int, help="offloaded keys per head that stay on the card")
    parser.add_argument("--model", type=Path, help="folder of Qwen2.5-Coder-1.5B")
    parser.add_argument("--text", type=Path, help="what it reads")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, nothing written unless --out says where")
    parser.add_argument("--out", type=Path, help="folder for generate_gpu.json")
    options = parser.parse_args()
    if not CUDA and not options.quick and not options.list:
        print("skipped: there is no CUDA device (--quick runs without one)")
        return
    if options.out:
        record.RESULTS = options.out
    sections = {name: importlib.import_module(f"generate_{name}") for name in options.section}
    chosen = {name: _chosen(module, options) for name, module in sections.items()}
    if options.list:
        for name, cases in chosen.items():
            print(f"{name}: {' '.join(case.name for case in cases)}")
        return
    if not any(chosen.values()):
        names = sorted({case.name for module in sections.values() for case in (module.QUICK if options.quick else module.CASES)})
        parser.error(f"--only must be of {', '.join(names)}, got {' '.join(options.only)}")
    hf.register(models.OURS)
    make = models.Models()
    for name, module in sections.items():
        show, rows = getattr(module, f"show_{name}"), []
        begun = time.perf_counter()
        for row in getattr(module, name)(chosen[name], make, options):
            rows.append(row)
            record.show(show([row]))
            print(f"{name}, {row['case']}: {time.perf_counter() - begun:.0f} s so far", flush=True)
            if options.out is not None or not options.quick:
                save(name, row)
        if len(rows) > 1:
            record.show(show(rows))


def _chosen(module: Any, options: argparse.Namespace) -> list[Any]:
    return [case for case in (module.QUICK if options.quick else module.CASES) if not options.only or case.name in options.only]


def save(section: str, row: dict[str, Any]) -> None:
    """Put a row in the place of the one of the same case, or behind all others."""
    path = record.RESULTS / "generate_gpu.json"
    before = json.loads(path.read_text()).get(section) if path.exists() else None
    rows = {} if before is None else {old["case"]: old for old in before["results"]["rows"]}
    rows[row["case"]] = row
    record.merge("generate_gpu", section, {"card": card(), "rows": list(rows.values())})


if __name__ == "__main__":
    main()
