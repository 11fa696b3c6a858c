"""Sections of bench_cells.py: the default method against SDPA at every length, and whether Auto(eps) keeps its promise."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import errors
import real
import torch
import torch.nn.functional as F
from cells_speed import DIM, settings
from record import each, median_ratio, peak_allocated, side_by_side, table
from rich.table import Table
from torch import Tensor

import nearfield as nf
from nearfield.synthetic import FAMILIES, make

LENGTHS = tuple(2**e for e in range(6, 18))
TRAINED = LENGTHS[8:]
EPS = 0.05
LONG = {"clustered": 65_536, "mixture_of_scales": 65_536}
"""Families that also run at a longer length."""
LAYERS, TOKENS = 8, 8192


def heads_at(n: int) -> int:
    return 8 if n <= 16_384 else 1


def auto_task(name: str, n: int, training: bool = False) -> Callable[[], object]:
    """A call of SDPA or of the default method, without a mask; or, for training, forward and backward, causal, one head."""
    query, key, value = (x.requires_grad_(training) for x in make("clustered", 1, 1 if training else heads_at(n), n, DIM))
    attend = F.scaled_dot_product_attention if name == "sdpa" else nf.attention

    def call() -> object:
        output = attend(query, key, value, is_causal=training)
        return torch.autograd.grad(output.sum(), (query, key, value)) if training else output

    return call


def auto(quick: bool) -> dict[str, Any]:
    """nf.attention with its default method against SDPA: time, and memory including inputs and output."""
    plan = [(n, False) for n in ((64, 512) if quick else LENGTHS)] + [(n, True) for n in ((512,) if quick else TRAINED)]
    rows = []
    for n, training in each(plan, lambda item: f"{'training' if item[1] else 'forward'}, n = {item[0]:,}"):
        calls = {name: auto_task(name, n, training) for name in ("sdpa", "auto")}
        batch = 1
        if n <= 16_384 and not quick:
            start = time.perf_counter()
            for call in calls.values():
                call()
            # Short calls in batches of about 50 ms.
            batch = max(1, min(2000, int(0.1 / (time.perf_counter() - start))))
        rounds = 3 if quick else 21 if n <= 2048 else 5 if n <= 16_384 else 3 if n <= 32_768 else 2 if n <= 65_536 else 1
        together = {name: _repeat(call, batch) for name, call in calls.items()}
        seconds = {name: [s / batch for s in all_of] for name, all_of in side_by_side(together, rounds, warm=batch > 1).items()}
        # The choice may depend on whether there will be a backward pass.
        inputs = tuple(x.requires_grad_(training) for x in make("clustered", 1, 1 if training else heads_at(n), n, DIM))
        generator = torch.Generator().manual_seed(0)
        found = nf.estimate(*inputs, is_causal=training, generator=generator, audit=59)
        megabytes = None
        if n >= 1024 and not quick and (not training or n < LENGTHS[-1]):
            held = sum(x.nbytes for x in inputs) / 2**20
            megabytes = {name: held + peak_allocated(call) for name, call in calls.items()}
        rows.append(
            {
                "n": n,
                "heads": inputs[0].shape[1],
                "training": training,
                "calls_per_batch": batch,
                "seconds": seconds,
                "auto_over_sdpa": median_ratio(seconds["auto"], seconds["sdpa"]),
                "chosen": _short_name(repr(found.info["chosen"])),
                "settings": settings(found.info),
                "errors": errors.of_audit(found.audit),
                "megabytes_in_all": megabytes,
                "memory_over_sdpa": megabytes["auto"] / megabytes["sdpa"] if megabytes else None,
            }
        )
    return {"family": "clustered", "dim": DIM, "rows": rows}


def _repeat(call: Callable[[], object], times: int) -> Callable[[], None]:
    def repeated() -> None:
        for _ in range(times):
            call()

    return repeated


def _short_name(method: str) -> str:
    """`Cells` for `Cells(...)`: another column has its sizes."""
    return method.split("(")[0]


def show_auto(results: dict[str, Any]) -> Table:
    titles = ("kind", "heads", "n", "SDPA, ms", "default, ms", "time / SDPA's", "memory / SDPA's", "chosen", *errors.HEADINGS)
    found = table(
        *titles, title="nf.attention(q, k, v) against F.scaled_dot_product_attention(q, k, v)", words=("kind", "chosen")
    )
    for row in results["rows"]:
        found.add_row(
            "causal, forward + backward" if row["training"] else "no mask, forward",
            f"{row['heads']}",
            f"{row['n']:,}",
            *(f"{1000 * statistics.median(row['seconds'][name]):,.3f}" for name in ("sdpa", "auto")),
            f"{row['auto_over_sdpa']:.3f}",
            f"{row['memory_over_sdpa']:.3f}" if row["memory_over_sdpa"] else "",
            row["chosen"],
            *errors.written(row["errors"]),
        )
    return found


def honoured(quick: bool, options: argparse.Namespace) -> dict[str, Any]:
    """Auto(eps=0.05, unit="values") with cells at every length: an audit of 299 other rows, and what the promise costs."""
    plan = [(family, 1024) for family in ("gaussian", "clustered")] if quick else [(family, 16_384) for family in FAMILIES]
    plan += [] if quick else list(LONG.items())
    rows = []
    for family, n in each(plan, lambda item: f"{item[0]}, n = {item[1]:,}"):
        rows.append({"inputs": family, **_honoured(*make(family, 1, 1, n, DIM), causal=False, rounds=3 if n <= 16_384 else 1)})
    layers = _real_layers(quick, options)
    for layer, *tensors in each(layers, lambda item: f"real, layer {item[0]}"):
        rows.append({"inputs": f"real, layer {layer}", **_honoured(*tensors, causal=True, rounds=1)})
    return {"eps": EPS, "promise": "95% of the rows within eps, with confidence 95%", "rows": rows}


def _real_layers(quick: bool, options: argparse.Namespace) -> list[tuple[int, Tensor, Tensor, Tensor]]:
    if options.captured:
        count = real.saved_layers(options.captured)
        return list(real.saved(options.captured, _spread(count, 1 if quick else LAYERS)))
    if quick or not (real.SMOLLM2 / "config.json").exists():
        print("skipped: real inputs", "(not in --quick)" if quick else "(no model; make smollm2 fetches one)")
        return []
    with real.text_file(options.text) as text:
        count = real.layer_count(real.SMOLLM2)
        chosen = _spread(count, LAYERS)
        found = real.capture(real.SMOLLM2, text, TOKENS, chosen)
    return [(layer, *tensors) for layer, tensors in zip(chosen, found, strict=True)]


def _spread(count: int, wanted: int) -> list[int]:
    """`wanted` of `count` numbers, evenly spread, from the first to the last."""
    return sorted({round(i * (count - 1) / max(1, wanted - 1)) for i in range(wanted)})


def _honoured(query: Tensor, key: Tensor, value: Tensor, causal: bool, rounds: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {"is_causal": causal, "enable_gqa": query.shape[1] != key.shape[1]}
    method = nf.Auto(eps=EPS, crossover=128, unit="values")

    def attend() -> Tensor:
        return nf.attention(query, key, value, **arguments, method=method, generator=torch.Generator().manual_seed(0))

    found = nf.estimate(query, key, value, **arguments, method=method, generator=torch.Generator().manual_seed(0))
    off, additive = errors.of_random_rows(found.output, query, key, value, rows=299, seed=1, is_causal=causal)
    calls = {"sdpa": lambda: F.scaled_dot_product_attention(query, key, value, **arguments), "auto": attend}
    seconds = side_by_side(calls, rounds, warm=False)
    within = float((additive <= EPS).double().mean())
    audit = found.info["audit"]
    return {
        "n": query.shape[2],
        "heads": query.shape[1],
        "kv_heads": key.shape[1],
        "steps": found.info["steps"],
        "chosen": repr(found.info["chosen"]),
        "settings": settings(found.info),
        "audit_of_auto": None if audit is None else {"rows": audit.rows, "additive": audit.additive},
        "errors": off,
        "share_within_eps": within,
        "honoured": within >= 0.95,
        "seconds": seconds,
        "auto_over_sdpa": median_ratio(seconds["auto"], seconds["sdpa"]),
    }


def show_honoured(results: dict[str, Any]) -> Table:
    titles = (
        "inputs",
        "n",
        "heads",
        "steps: additive error",
        "ended with",
        "keys",
        "within eps",
        *errors.HEADINGS,
        "time / SDPA's",
    )
    kept = sum(row["honoured"] for row in results["rows"])
    title = f"Auto(eps={results['eps']}): honoured {kept} times of {len(results['rows'])}; errors of 299 other rows"
    found = table(*titles, title=title, words=("inputs", "ended with"))
    for row in results["rows"]:
        found.add_row(
            row["inputs"],
            f"{row['n']:,}",
            f"{row['heads']}",
            ", ".join(f"{step['additive']:.3f}" for step in row["steps"]),
            _short_name(row["chosen"]),
            f"{row['settings']['keys_per_query']:,.0f}",
            f"{row['share_within_eps']:.1%}",
            *errors.written(row["errors"]),
            f"{row['auto_over_sdpa']:.2f}",
        )
    return found
