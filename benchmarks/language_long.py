"""Sections of bench_language.py: reading a very long text, and fine-tuning, each next to SDPA."""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
from typing import Any

import torch
from gpu_capture import lengthen
from gpu_timing import CUDA, backends, elapsed, fastest, interleaved, peak_megabytes
from record import each, table
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import nearfield as nf
from nearfield import hf
from nearfield.app.evaluate.measure import compared, token_losses

PREFILL_TOKENS = 131_072
PREFILLED = {"Cells()": nf.Cells(), "Cells(probes=4)": nf.Cells(probes=4), "Cells(probes=20)": nf.Cells(probes=20)}
TUNED_TOKENS, STEPS, RATE, HELD_OUT = 4096, 100, 3e-5, 8
LAST = 20
NAME = "nearfield-benchmark"


def prefill(model: Any, ids: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """A forward pass over one long text, without a cache, to the logits of the last token; and the perplexity of the text."""
    count = options.tokens or (512 if options.quick else PREFILL_TOKENS)
    ids = _enough(ids, count)[:, :count]
    base = lengthen(model, count)

    @torch.inference_mode()
    def read(backend: str | None = None) -> Tensor:
        if backend is None or backend == "cpu":
            return model(ids, use_cache=False, logits_to_keep=1).logits
        with sdpa_kernel(getattr(SDPBackend, f"{backend.upper()}_ATTENTION")):
            return model(ids, use_cache=False, logits_to_keep=1).logits

    model.set_attn_implementation("sdpa")
    backend, tried = fastest({name: functools.partial(read, name) for name in backends()})
    losses = token_losses(model, ids)
    rows = []
    for label, method in each(list(PREFILLED.items()), lambda item: f"prefill, {item[0]}"):

        def way(attention: str, name: str | None) -> Tensor:
            model.set_attn_implementation(attention)
            return read(name)

        hf.register(NAME, method)
        calls = {"sdpa": functools.partial(way, "sdpa", backend), "cells": functools.partial(way, NAME, None)}
        for call in calls.values():
            call()
        runs = interleaved(calls, 0.0 if options.quick else 6000.0)
        memory = {name: peak_megabytes(call, (ids,)) for name, call in calls.items()}
        model.set_attn_implementation(NAME)
        own = token_losses(model, ids)
        found = compared(own, losses)
        rows.append(
            {
                "method": label,
                "ms": {name: statistics.median(some) for name, some in runs.items()},
                "runs_ms": runs,
                "sdpa_over_cells": statistics.median(runs["sdpa"]) / statistics.median(runs["cells"]),
                "peak_megabytes": {name: own and own["total"] for name, own in memory.items()},
                "perplexity": found.perplexity,
                "excess": found.excess,
                "stderr": found.stderr,
                # The model was trained on fewer positions, and its predictions get worse and worse beyond them.
                "excess_of_eighths": [compared(a, b).excess for a, b in zip(own.chunk(8), losses.chunk(8), strict=True)],
            }
        )
    exact = [compared(part, part).perplexity for part in (losses, *losses.chunk(8))]
    about = {"tokens": count, "rope_base": base, "backend": backend, "tried_ms": tried}
    return {**about, "perplexity": exact[0], "perplexity_of_eighths": exact[1:], "rows": rows}


def finetune(model: Any, ids: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """Training on the same windows of a text with SDPA and with Cells(), and once more with SDPA in another order."""
    count = options.tokens or (256 if options.quick else TUNED_TOKENS)
    steps, held_out = (3, 1) if options.quick else (STEPS, HELD_OUT)
    ids = _enough(ids, (held_out + 2) * count)
    test, train = ids[:, : held_out * count], ids[:, held_out * count :]
    hf.register(NAME, nf.Cells())
    plan = (("sdpa", "sdpa", 0), ("cells", NAME, 0), ("sdpa_other_order", "sdpa", 1))
    before = _loss(model, test, count)
    found: dict[str, Any] = {}
    for name, attention, seed in each(plan, lambda item: f"finetune, {item[0]}"):
        found[name] = _tuned(model, attention, train, test, count, steps, seed)
        if not seed:
            again = _tuned(model, attention, train, test[:, :count], count, 3, seed, checkpointing=True)
            found[name]["peak_megabytes_checkpointing"] = again["peak_megabytes"]
    return {
        "tokens": count,
        "steps": steps,
        "rate": RATE,
        "method": repr(nf.Cells()),
        "held_out_before": before,
        "runs": found,
        "cells_less_sdpa": found["cells"]["held_out"] - found["sdpa"]["held_out"],
        "other_order_less_sdpa": found["sdpa_other_order"]["held_out"] - found["sdpa"]["held_out"],
    }


def _tuned(
    model: Any, attention: str, train: Tensor, test: Tensor, count: int, steps: int, seed: int, checkpointing: bool = False
) -> dict[str, Any]:
    """Train a copy: losses of the steps, loss on held-out text afterwards (exact attention), memory and time of a step."""
    other = torch.cuda.memory_allocated() / 2**20 if CUDA else 0.0
    model = copy.deepcopy(model)
    model.set_attn_implementation(attention)
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.0, fused=CUDA)
    order = torch.Generator().manual_seed(seed)
    losses: list[Tensor] = []

    def step() -> None:
        first = int(torch.randint(train.shape[1] - count, (), generator=order))
        window = train[:, first : first + count]
        with torch.autocast(train.device.type, torch.bfloat16):
            loss = model(window, labels=window, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())

    step()
    memory = peak_megabytes(step, ())
    times = [elapsed(step) for _ in range(steps - len(losses))]
    curve = torch.stack(losses).tolist()
    return {
        "held_out": _loss(model, test, count),
        "losses": [round(x, 5) for x in curve],
        "last": statistics.fmean(curve[-LAST:]),
        "step_ms": statistics.median(times) if times else None,
        "peak_megabytes": memory and memory["allocated"] - other,
    }


@torch.no_grad()
def _loss(model: Any, test: Tensor, count: int) -> float:
    """Mean loss on held-out text, window by window, with exact attention."""
    model.set_attn_implementation("sdpa")
    model.eval()
    return statistics.fmean(float(token_losses(model, window).mean()) for window in test.split(count, 1))


def _enough(ids: Tensor, count: int) -> Tensor:
    if ids.shape[1] < count:
        raise ValueError(f"the texts have {ids.shape[1]:,} tokens, and {count:,} are needed; give longer ones with --text")
    return ids


def show_prefill(results: dict[str, Any]) -> Table:
    exact = f"perplexity {results['perplexity']:.3f} with SDPA ({results['backend']})"
    title = f"a forward pass over {results['tokens']:,} tokens, {exact}"
    found = table("attention", "SDPA, ms", "ms", "SDPA / this", "MB, SDPA", "MB", "perplexity", "excess", title=title)
    for row in results["rows"]:
        megabytes = [f"{x:,.0f}" if x else "" for x in row["peak_megabytes"].values()]
        times = [f"{row['ms'][name]:,.0f}" for name in ("sdpa", "cells")]
        quality = (f"{row['perplexity']:.3f}", f"{100 * row['excess']:+.2f}%")
        found.add_row(row["method"], *times, f"{row['sdpa_over_cells']:.2f}", *megabytes, *quality)
    return found


def show_finetune(results: dict[str, Any]) -> Table:
    title = f"{results['steps']} steps of {results['tokens']:,} tokens; held out: {results['held_out_before']:.4f} before"
    columns = ("first loss", "last losses", "held out after", "ms per step", "peak MB", "with checkpointing")
    found = table("attention", *columns, title=title)
    for name, run in results["runs"].items():
        ms, memory = run["step_ms"], run["peak_megabytes"]
        numbers = [f"{x:.4f}" for x in (run["losses"][0], run["last"], run["held_out"])]
        less = run.get("peak_megabytes_checkpointing")
        found.add_row(name, *numbers, f"{ms:.0f}" if ms else "", *(f"{x:,.0f}" if x else "" for x in (memory, less)))
    return found
