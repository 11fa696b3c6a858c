"""`TopK` with k = sqrt(n) near keys over `CellIndex` on a GPU, to a million keys: time, memory, recall and error, next to SDPA.

python benchmarks/bench_topk_gpu.py --captured FOLDER    # results/topk_gpu.json; three minutes on an H200
python benchmarks/bench_topk_gpu.py --lengths 65536      # one length of clusters
python benchmarks/bench_topk_gpu.py --quick              # tiny sizes, on a CPU too; written only with --out

Ten heads of 64 in bfloat16, sqrt(n) clusters strewn over all positions, without a mask and causal, without a tail and with one of
32 keys. Real inputs are layers that gpu_capture.py has saved, at their own length and head size: only what the index finds there
counts. Recall is that of the k keys of largest inner product, of random rows of the first head that see more than k keys; error
the mean of |output - exact| / |exact| over random rows of all heads, against float64.
"""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path
from typing import Any

import record
import torch
from gpu_timing import (
    CUDA,
    DEVICE,
    QKV,
    Call,
    backends,
    card,
    clustered,
    elapsed,
    fastest,
    hopeful,
    interleaved,
    peak_megabytes,
    sdpa,
)
from peers_inputs import captured, row_errors, some_rows
from torch import Tensor

import nearfield as nf

LENGTHS, HEADS, DIM, TAIL = (65_536, 131_072, 262_144, 1_048_576), 10, 64, 32
QUICK_LENGTHS, QUICK_HEADS = (512,), 2
ROWS, RECALL_ROWS = 64, 128
LONG_MS = 1000.0
"""A call that takes longer is timed twice."""


def near(n: int) -> int:
    return math.isqrt(n - 1) + 1


def recall(query: Tensor, key: Tensor, causal: bool) -> dict[str, float]:
    """Of queries and keys `[length, dim]` of one head: the share of the best k keys that are found, and keys scored for it."""
    n, k = len(key), near(len(key))
    generator = torch.Generator().manual_seed(2)
    rows = torch.randint(k if causal else 0, n, (RECALL_ROWS,), generator=generator).sort().values.to(DEVICE)
    offset = (rows - torch.arange(RECALL_ROWS, device=DEVICE))[None] if causal else None
    found = nf.CellIndex().build(key[None]).find(query[None, rows], k, offset)
    logits = query[rows].double() @ key.double().T
    if causal:
        logits.masked_fill_(torch.arange(n, device=DEVICE) > rows[:, None], -torch.inf)
    best = logits.topk(k).indices
    hits = sum(int(torch.isin(best[row], found.ids[0, row]).sum()) for row in range(RECALL_ROWS))
    assert found.scored is not None
    return {"recall": hits / best.numel(), "scored": float(found.scored.double().mean())}


def exact(inputs: QKV, rows: Tensor, causal: bool) -> Tensor:
    """Attention at these positions, `[heads, rows, dim]`, in float64 and head by head."""
    query, key, value = (x[0] for x in inputs)
    later = torch.arange(key.shape[1], device=DEVICE) > rows[:, None]
    found = []
    for head in range(len(query)):
        logits = query[head, rows].double() @ key[head].double().T / math.sqrt(key.shape[2])
        found.append((logits.masked_fill_(later, -torch.inf) if causal else logits).softmax(-1) @ value[head].double())
    return torch.stack(found)


def times(calls: dict[str, Call]) -> dict[str, list[float]]:
    """Milliseconds in turn; of long calls two, all of which were made before."""
    if max(elapsed(call) for call in calls.values()) < LONG_MS:
        return interleaved(calls)
    rounds = [{name: elapsed(call) for name, call in calls.items()} for _ in range(2)]
    return {name: [one[name] for one in rounds] for name in calls}


def measure(n: int, heads: int, causal: bool, tried: tuple[str, ...]) -> tuple[dict[str, Any], tuple[str, ...]]:
    inputs = clustered(n, DIM, heads)
    rows = some_rows(n, ROWS)
    truth = exact(inputs, rows, causal)
    backend, tried_ms = fastest({name: lambda name=name: sdpa(name, *inputs, causal) for name in tried})
    methods = {f"tail={tail}": nf.TopK(near(n), tail, index=nf.CellIndex()) for tail in (0, TAIL)}
    calls: dict[str, Call] = {"SDPA": lambda: sdpa(backend, *inputs, causal)}
    calls |= {name: lambda x=x: nf.attention(*inputs, is_causal=causal, method=x) for name, x in methods.items()}
    found: dict[str, Any] = {}
    for name, call in calls.items():
        output = call()
        assert isinstance(output, Tensor)
        found[name] = {"errors": row_errors(output, truth, rows)}
        del output
        found[name]["peak_megabytes"] = peak_megabytes(call, inputs)
    for name, runs in times(calls).items():
        found[name] |= {"ms": statistics.median(runs), "runs_ms": runs}
    for name in methods:
        found[name]["speedup"] = found["SDPA"]["ms"] / found[name]["ms"]
    about = {"n": n, "k": near(n), "heads": heads, "dim": DIM, "causal": causal, "backend": backend}
    return {**about, **recall(inputs[0][0, 0], inputs[1][0, 0], causal), "methods": found}, hopeful(tried_ms)


def real(folder: Path) -> list[dict[str, Any]]:
    """Recall on the first head of every layer that was captured."""
    found = []
    for name, (query, key, _) in captured(folder):
        for causal in (True, False):
            found.append({"layer": name, "n": key.shape[2], "causal": causal, **recall(query[0, 0], key[0, 0], causal)})
    return found


def show(results: list[dict[str, Any]]) -> None:
    shown = record.table(
        "keys", "mask", "method", "ms", "SDPA / method", "peak, MB", "recall", "scored", "error", words=("mask", "method")
    )
    for one in results:
        for name, method in one["methods"].items():
            peak = method["peak_megabytes"]
            shown.add_row(
                f"{one['n']:,}",
                "causal" if one["causal"] else "none",
                name,
                f"{method['ms']:.1f}",
                f"{method.get('speedup', 1.0):.2f}",
                f"{peak['total']:,.0f}" if peak else "-",
                "" if name == "SDPA" else f"{one['recall']:.3f}",
                "" if name == "SDPA" else f"{one['scored']:,.0f}",
                f"{method['errors']['mean']:.4f}",
            )
    record.show(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", help=f"default: {LENGTHS}")
    parser.add_argument("--captured", type=Path, help="folder with real inputs that gpu_capture.py has saved")
    parser.add_argument("--quick", action="store_true", help="small sizes, nothing written unless --out says where")
    parser.add_argument("--out", type=Path, help="folder for topk_gpu.json")
    arguments = parser.parse_args()
    if not CUDA and not arguments.quick:
        print("skipped: there is no CUDA device (--quick runs without one)")
        return
    if arguments.out:
        record.RESULTS = arguments.out
    writes = arguments.out is not None or not arguments.quick
    lengths, heads = (QUICK_LENGTHS, QUICK_HEADS) if arguments.quick else (arguments.lengths or LENGTHS, HEADS)
    with torch.no_grad():
        if arguments.captured:
            layers = real(arguments.captured)
            for one in layers:
                mask = "causal" if one["causal"] else "no mask"
                print(f"{one['layer']}, {one['n']:,} keys, {mask}: recall {one['recall']:.3f}, scored {one['scored']:,.0f}")
            if writes:
                record.merge("topk_gpu", "real", {"card": card(), "layers": layers})
        for causal in (False, True):
            tried, results = backends(), []
            for n in lengths:
                one, tried = measure(n, heads, causal, tried)
                results.append(one)
                show([one])
                if writes:
                    record.merge("topk_gpu", "causal" if causal else "no mask", {"card": card(), "lengths": results})
            show(results)


if __name__ == "__main__":
    main()
