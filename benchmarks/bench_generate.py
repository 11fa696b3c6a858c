"""Decoding a whole model on a CPU: a step with `hf.CellCache`, and with Transformers' own caches and SDPA, side by side.

    python benchmarks/bench_generate.py                              # results/generate.json: SmolLM2 and Qwen, about 25 minutes
    python benchmarks/bench_generate.py --only smollm2 overhead      # leaves the other sections of the file as they are
    python benchmarks/bench_generate.py --quick                      # tiny, without a model; writes only with --out

smollm2     SmolLM2-135M in float32, 8,192, 16,384 and 32,768 keys                  `make smollm2` fetches it
qwen        Qwen2.5-Coder-1.5B in bfloat16, the same                                `make qwen`
overhead    what a step takes per layer where there is next to nothing to compute   a minute

All caches are filled before any is timed, which takes 17 GB of memory for both models. A prompt of 8,192 tokens is read, the
docstrings of Python's standard library unless --text is given; longer caches are made of it (`generate_prompt.py`). Caches take
turns, a few steps each, and what counts is the median over the turns: by the clock, and of the processor. They get the same
tokens: those that come next in the text. A `StaticCache` has room for the steps that come and no more. Steps after those that are
timed are audited: how far attention with cells is from exact attention, head by head.

Threads that wait for each other take many times as long where other work has the cores. So `others` says, for every turn, how
many cores other processes had. With --wait, a turn begins when they have left them, and one in which they came back is repeated,
for so many minutes in all; medians are over turns that had the machine for themselves (`quiet_turns`), or over all if none had.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import generate_prompt
import record
import torch
from generate_overhead import overhead, show_overhead
from generate_prompt import Layers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import nearfield as nf
from nearfield import hf

MODELS = {"smollm2": ("smollm2-135m", torch.float32), "qwen": ("qwen2.5-coder-1.5b", torch.bfloat16)}
"""Section, folder in models/, and dtype on a CPU."""
FOLDER = Path(__file__).parent.parent / "models"
READ, LENGTHS = 8192, (8192, 16_384, 32_768)
THREADS, ROUNDS, STEPS, AUDITED = 2, 9, 3, 4
"""A turn is so many steps, and each cache gets so many turns; after them, some steps are audited."""
QUIET = 0.2
"""Cores that others may have while steps are timed."""
NAME = "nearfield-generate"


@dataclass
class Case:
    """Caches of one length that hold the same keys, and the tokens that come next."""

    section: str
    model: Any
    length: int
    read: int
    following: torch.Tensor
    rounds: int
    caches: dict[str, Any] = field(default_factory=dict)
    seconds_to_close: float = 0.0

    @property
    def turns(self) -> int:
        """The most there may be: some are repeated."""
        return 4 * self.rounds + 1

    def fill(self, layers: Layers) -> None:
        start = time.perf_counter()
        self.caches["cells"] = cells_of(self.model, layers)
        self.seconds_to_close = time.perf_counter() - start
        room = self.length + self.turns * STEPS
        self.caches["static"] = filled(StaticCache(config=self.model.config, max_cache_len=room), layers)
        self.caches["dynamic"] = filled(DynamicCache(config=self.model.config), layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=(*MODELS, "overhead"), metavar="SECTION", help="these sections")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, help="numbers of keys")
    parser.add_argument("--text", type=Path, help="a text in UTF-8 that is read in place of docstrings")
    parser.add_argument("--models", type=Path, default=FOLDER, help="the folder that models are in, and read prompts are kept in")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--wait", type=float, default=0.0, help="for at most so many minutes, until the machine is quiet")
    parser.add_argument("--out", type=Path, help="folder for generate.json")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, nothing written unless --out says where")
    options = parser.parse_args()
    if options.out:
        record.RESULTS = options.out
    hf.register(NAME, nf.Exact())
    sections = options.only or (*MODELS, "overhead")
    cases = [case for section in sections if section in MODELS for case in prepare(section, options)]
    filling, until = torch.get_num_threads(), time.monotonic() + 60 * options.wait
    if not options.quick:
        torch.set_num_threads(THREADS)
    if "overhead" in sections:
        quiet(until)
        start = Usage()
        found = overhead(options.quick) | {"others": start.others()}
        save(options, "overhead", found)
        record.show(show_overhead(found))
    for case in cases:
        spent = timed(case, until)
        row = {"keys": case.length, "read": case.read, **spent, "seconds_to_close": case.seconds_to_close, **audited(case)}
        row |= {"threads": torch.get_num_threads(), "threads_to_close": filling}
        folder, dtype = MODELS[case.section]
        results = {"model": folder, "dtype": str(dtype).removeprefix("torch.")}
        results |= {"text": str(options.text or "docstrings of the standard library"), "rows": rows_with(case.section, row)}
        save(options, case.section, results)
        record.show(show_decode(case.section, [row]))


def rows_with(section: str, row: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of other lengths that were saved before, and this one."""
    path = record.RESULTS / "generate.json"
    saved = record.read_sections("generate").get(section, {"rows": []}) if path.exists() else {"rows": []}
    rows = {old["keys"]: old for old in saved["rows"]} | {row["keys"]: row}
    return [rows[keys] for keys in sorted(rows)]


def save(options: argparse.Namespace, section: str, results: dict[str, Any]) -> None:
    if options.out is not None or not options.quick:
        print("written:", record.merge("generate", section, results), flush=True)


class Usage:
    """What the machine and this process have done so far (Linux)."""

    def __init__(self) -> None:
        fields = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        self.all = (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")  # without idling, and waiting for a disk
        self.own, self.clock = time.process_time(), time.perf_counter()

    def others(self) -> float:
        """How many cores other processes have had since then."""
        now = Usage()
        return max(0.0, (now.all - self.all - (now.own - self.own)) / (now.clock - self.clock))


def quiet(until: float) -> None:
    """Wait until others leave the processor alone, or until that time."""
    while time.monotonic() < until:
        start = Usage()
        time.sleep(1)
        if start.others() < QUIET:
            return


@torch.no_grad()
def prepare(section: str, options: argparse.Namespace) -> Iterator[Case]:
    """All lengths of one model, with caches that are filled; none if there is no such model."""
    folder, dtype = MODELS[section]
    if options.quick:
        model, lengths, rounds = tiny_model(), [1500, 2048], 1
        ids = torch.randint(50, (1, 1600), generator=torch.Generator().manual_seed(0))
        prompt = generate_prompt.read(model, ids[:, :1500])
    elif not (options.models / folder).exists():
        print(f"skipped: no model in {options.models / folder} (`make {section}` fetches it)")
        return
    else:
        model, lengths, rounds = generate_prompt.load(options.models / folder, dtype), options.lengths, options.rounds
        ids = generate_prompt.token_ids(options.models / folder, options.text, READ + (4 * rounds + 1) * STEPS + AUDITED)
        prompt = generate_prompt.kept(model, ids[:, :READ], options.models / "prompts" / f"{folder}-{READ}.pt")
    read = prompt[0][0].shape[2]
    for length in lengths:
        case = Case(section, model, length, min(length, read), ids[:, read:], rounds)
        case.fill(generate_prompt.extended(model, prompt, length))
        print(f"{section}, {length:,} keys: caches are filled, ours in {case.seconds_to_close:.0f} s", flush=True)
        yield case


@torch.no_grad()
def timed(case: Case, until: float) -> dict[str, Any]:
    """Seconds of a step with each cache, interleaved."""
    turns: list[dict[str, Any]] = []
    for turn in range(case.turns):
        if turn:  # the first one is to get warm
            quiet(until)
        start = Usage()
        found = {name: _turn(case, name, turn) for name in case.caches}
        if turn:
            turns.append({"others": start.others(), **found})
            shown = ", ".join(f"{name} {1e3 * spent:.0f} ms" for name, (spent, _) in found.items())
            print(f"{case.section}, {case.length:,} keys: {shown}; others {turns[-1]['others']:.2f} cores", flush=True)
        enough = sum(turn["others"] < QUIET for turn in turns) if time.monotonic() < until else len(turns)
        if enough >= case.rounds:
            break
    alone = [turn for turn in turns if turn["others"] < QUIET]
    median = [{name: statistics.median(turn[name][kind] for turn in alone or turns) for name in case.caches} for kind in (0, 1)]
    return {
        "seconds": median[0],
        "processor_seconds": median[1],
        "tokens_per_second": {name: 1 / spent for name, spent in median[0].items()},
        "quiet_turns": len(alone),
        "others": [turn["others"] for turn in turns],
        "runs": {name: [turn[name][0] for turn in turns] for name in case.caches},
        "processor_runs": {name: [turn[name][1] for turn in turns] for name in case.caches},
    }


def _turn(case: Case, name: str, turn: int) -> tuple[float, float]:
    """Seconds of a step by the clock, and of the processor."""
    case.model.set_attn_implementation(NAME if name == "cells" else "sdpa")
    start, start_processor = time.perf_counter(), time.process_time()
    for step in range(turn * STEPS, (turn + 1) * STEPS):
        step_of(case, name, step)
    return (time.perf_counter() - start) / STEPS, (time.process_time() - start_processor) / STEPS


def step_of(case: Case, name: str, step: int) -> None:
    """Feed one more token of those that follow."""
    token, position = case.following[:, step : step + 1], torch.tensor([[case.length + step]])
    case.model(token, past_key_values=case.caches[name], position_ids=position)


def cells_of(model: Any, layers: Layers) -> hf.CellCache:
    """A cache that holds these keys and values, closed as a prompt is."""
    model.set_attn_implementation(NAME)
    cache = hf.CellCache(config=model.config, group_from=0)
    for layer, (key, value) in zip(cache.layers, layers, strict=True):
        layer.store.append(key, value)
        layer.store.close()
    return cache


def filled(cache: Any, layers: Layers) -> Any:
    """A cache of Transformers that holds these."""
    for number, (key, value) in enumerate(layers):
        cache.update(key, value, number)
    return cache


@torch.no_grad()
def audited(case: Case) -> dict[str, Any]:
    """The error of some more steps, and how many keys they read of how many."""
    cache = case.caches["cells"]
    case.model.set_attn_implementation(NAME)
    cache.audit = True
    done = cache.get_seq_length() - case.length
    for step in range(done, done + AUDITED):
        step_of(case, "cells", step)
    cache.audit = False
    errors = torch.stack([torch.cat([step.relative.flatten() for step in steps]) for steps in cache.errors.values()])
    store = cache.layers[0].store
    opened = store.probes * store.closed / max(1, store.cells)
    return {
        "error": {"mean": float(errors.mean()), "worst_layer": float(errors.mean(1).max()), "worst": float(errors.max())},
        "keys_read": round(opened + store.sizes.sinks + store.length - store.closed),
        "cells": store.cells,
        "probes": store.probes,
    }


def tiny_model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, num_key_value_heads=2, max_position_embeddings=8192, **sizes)).eval()


def show_decode(section: str, rows: list[dict[str, Any]]) -> Any:
    names = ("keys", "cells, tokens/s", "static", "dynamic", "processor ms: cells", "static ", "dynamic ", "keys read", "error")
    found = record.table(*names, title=f"{section}: decoding, tokens per second")
    for row in rows:
        found.add_row(
            f"{row['keys']:,}",
            *(f"{row['tokens_per_second'][name]:.2f}" for name in ("cells", "static", "dynamic")),
            *(f"{1e3 * row['processor_seconds'][name]:.0f}" for name in ("cells", "static", "dynamic")),
            f"{row['keys_read']:,}",
            f"{row['error']['mean']:.1%} / {row['error']['worst_layer']:.1%}",
        )
    return found


if __name__ == "__main__":
    main()
