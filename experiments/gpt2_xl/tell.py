"""What the rows say about fine-tuning a large model with approximate attention."""

from __future__ import annotations

import math
from collections.abc import Mapping

from experiments.experiment import Finding, Row, Rows, Section, Verdict, judged
from experiments.gpt2_xl.select import NAMES, cost_at, costs, curve_of, has_memory, last, of_kind, pairs, stopped, tuned
from experiments.gpt2_xl.sizes import PAPERS_GPU
from experiments.gpt2_xl.tables import cost_table, sample_tables
from experiments.words import change, faster, fixed, listed, megabytes, number, percent, seconds, sentence, signed, times

LARGE = 1.5e9
"""Parameters from which on a model tells something about GPT-2 XL."""
SEVERE = 0.1
"""Shares of perplexity that count as a small and as a severe loss of quality."""
UNHARMED = "Fine-tuning with kNN attention does not severely degrade the model."
PAPER = (
    "GPT-2 XL is fine-tuned on Shakespeare with kNN attention on an L40 with 48 GB, which is called infeasible with quadratic "
    "attention for lack of memory. Shown are two samples; there is no loss, no time, no memory, no k, and no sample of the same "
    "model with exact attention. The conclusion is that kNN attention closely matches the original performance while "
    "significantly reducing the cost of training."
)


def tell(rows: Rows) -> Section:
    findings = [fits(rows), cheaper(rows), cells(rows)]
    memory = (
        " Memory is the peak of the step with weights and moments of the optimizer, which no way of attending changes."
        if has_memory(rows)
        else ""
    )
    captions = {
        "gpt2-xl-cost": "A training step (forward, backward, clipping, AdamW), batch 1. Open circles: all activations kept; "
        f"lines: layers computed again in the backward pass.{memory}",
        "gpt2-xl-losses": "The same random weights and the same windows, with SDPA and with Cells.",
    }
    models = tuned(rows)
    if not any(("topk", 0) in runs for runs in models):
        findings.append(Finding(UNHARMED, "untested", "No real weights were fine-tuned with `TopK`."))
    if models:
        findings += [quality(runs, method) for runs in models for method in ("topk", "cells") if (method, 0) in runs]
        captions["gpt2-xl-tuned"] = (
            "Real weights, the same windows in the same order, and once more with SDPA in another order, which is chance alone."
        )
    findings.append(agreement(rows))
    return Section(PAPER, here(rows), findings, captions, [cost_table(rows), *sample_tables(rows)], notes(rows))


def here(rows: Rows) -> str:
    first = of_kind(rows, "cost")[0]
    some = of_kind(rows, "curve")
    contexts = sorted({row["n"] for row in of_kind(rows, "cost")})
    text = (
        f"{sentence(first['model'])} ({count(first['parameters'])} parameters) in Transformers, weights in float32, batch 1, no "
        "dropout, with the attention that stores the matrix (naive), torch's SDPA, `TopK` with k = n^{1/2} and `Cells()` through "
        f"`hf.register`; random weights, so that its table of positions can be as long as the context: {contexts[0]:,} to "
        f"{contexts[-1]:,} tokens. Methods take turns on one model. "
    )
    text += "Layers are computed again in the backward pass, for all methods alike; at short contexts also with everything kept. "
    text += f"Loss curves read {some[0]['corpus']} as bytes. "
    for runs in tuned(rows):
        found = runs["exact", 0]
        text += (
            f"{found['model']} ({count(found['parameters'])} parameters) has real weights: {found['steps']} steps of "
            f"{found['n']:,} tokens of {found['corpus']}, and perplexity on {found['held_out']:,} tokens after those. "
        )
    return text.strip()


def count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} billion" if parameters >= 1e9 else f"{parameters / 1e6:.3g} million"


def fits(rows: Rows) -> Finding:
    """At the context that GPT-2 has, or the shortest one there is."""
    claim = f"Fine-tuning GPT-2 XL with quadratic attention does not fit into {PAPERS_GPU} GB, and with kNN attention it does."
    n = min(row["n"] for row in of_kind(rows, "cost"))
    first = next(row for row in of_kind(rows, "cost") if row["n"] == n)
    if first["parameters"] < LARGE:
        text = f"Weights and moments of AdamW take {megabytes(first['held'])} here."
        why = f"{sentence(first['model'])} is too small to tell; `--device cuda` takes the shape of GPT-2 XL."
        return Finding(claim, "beyond", text, why)
    kept, again = ({method: cost_at(rows, method, n, recomputed) for method in NAMES} for recomputed in (False, True))
    text = (
        f"A step at {n:,} tokens (batch 1) needs at its peak: {needs(kept)} with all activations kept, and {needs(again)} with "
        f"layers computed again in the backward pass. {megabytes(first['held'])} of it are weights and moments of AdamW."
    )
    reached = [row["n"] for row in costs(rows, "exact") if within(row)]
    if reached:
        text += f" The longest context at which SDPA stays within {PAPERS_GPU} GB: {reached[-1]:,}."
    exact = any(within(row) for row in (kept["exact"], again["naive"], again["exact"]))
    knn = within(kept["topk"]) or within(again["topk"])
    verdict: Verdict = "refuted" if within(kept["naive"]) or not knn else "partly" if exact else "confirmed"
    why = (
        "Weights, gradients and moments take their memory whatever attention does. What attention adds is quadratic only if the "
        "matrix is stored: SDPA, which is exact as well, does not, and computing layers again keeps one matrix instead of all."
    )
    return Finding(claim, verdict, text, why if exact else "")


def within(row: Row | None) -> bool:
    return row is not None and row["megabytes"] <= 1024 * PAPERS_GPU


def needs(found: Mapping[str, Row | None]) -> str:
    return listed(
        [f"{NAMES[method]} {'does not fit' if row is None else megabytes(row['megabytes'])}" for method, row in found.items()]
    )


def ratio(a: Row, b: Row) -> str:
    """How much faster a is than b."""
    found = b["seconds"] / a["seconds"]
    if faster(a["seconds"], b["seconds"]):
        return f"{times(found)} as fast"
    return f"{times(1 / found)} slower" if faster(b["seconds"], a["seconds"]) else "as fast"


def cheaper(rows: Rows) -> Finding:
    claim = "kNN attention significantly reduces the cost of training."
    both = pairs(rows, "topk", "exact")
    if not both:
        return Finding(claim, "refuted", "A step with TopK fitted at no context.")
    wins = [faster(a["seconds"], b["seconds"]) for a, b in both]
    said = [f"{ratio(a, b)} at {a['n']:,} tokens ({seconds(a['seconds'])} against {seconds(b['seconds'])})" for a, b in both]
    text = f"A training step with `TopK` is, against SDPA, {listed(said)}."
    why = "An exact search does the products of exact attention and selects on top; it has to do so again in the backward pass."
    return Finding(claim, judged(wins), text, "" if all(wins) else why)


def cells(rows: Rows) -> Finding:
    claim = "What a step costs with `Cells`, which the paper does not have."
    both = pairs(rows, "cells", "exact")
    if not both:
        return Finding(claim, "beyond", "There is no context at which a step fits both with `Cells` and with SDPA.")
    said = [f"{ratio(a, b)} at {a['n']:,}" for a, b in both]
    a, b = both[-1]
    text = (
        f"A step with `Cells`, against SDPA, is {listed(said)}; at {a['n']:,} tokens {number(a['tokens_per_second'])} tokens per "
        f"second against {number(b['tokens_per_second'])}"
    )
    if has_memory(rows):
        more = a["megabytes"] / b["megabytes"]
        text += f", at {more:.2f} times the memory ({megabytes(a['megabytes'])} against {megabytes(b['megabytes'])})"
    text += "."
    ends = [f"{NAMES[method]} at {n:,}" for method in NAMES if (n := stopped(rows, method)) is not None]
    if ends:
        text += f" Out of memory: {listed(ends)}."
    slower = [a["n"] for a, b in both if not faster(a["seconds"], b["seconds"])]
    pays = next((a["n"] for a, _ in both if a["n"] > max(slower, default=0)), None)
    why = ""
    if slower:
        why = (
            f"Cells pay from {pays:,} tokens on." if pays else "At these contexts cells do not pay."
        ) + " `Auto()` uses SDPA below a crossover that can be measured (`nearfield bench --calibrate`)."
    return Finding(claim, "beyond", text, why)


def quality(runs: Mapping[tuple[str, int], Row], method: str) -> Finding:
    """Of one model. How far another order of windows ends away is chance: it is told, and decides nothing."""
    exact, ours, other = runs["exact", 0], runs[method, 0], runs["exact", 1]
    excess, chance = (change(row["after"], exact["after"]) for row in (ours, other))
    learnt = all(row["after"] < row["before"] for row in (exact, ours))
    verdict: Verdict = "refuted" if excess >= SEVERE else "confirmed" if learnt else "partly"
    if not math.isfinite(exact["after"]):
        verdict = "untested"
    text = (
        f"{exact['model']}, {exact['steps']} steps of {exact['n']:,} tokens: the perplexity of held-out text goes from "
        f"{fixed(exact['before'])} to {fixed(exact['after'])} with SDPA and from {fixed(ours['before'])} to "
        f"{fixed(ours['after'])} with `{NAMES[method]}` (difference: {signed(excess)}; of SDPA with the windows in another "
        f"order: {signed(chance)}). What was tuned with `{NAMES[method]}` and is then read with SDPA has "
        f"{fixed(ours['after_exact'])}."
    )
    why = "" if learnt else "Not both of them have learnt anything from the text: the steps are too few, or their rate is wrong."
    if method != "topk":
        return Finding(f"Fine-tuning with `{NAMES[method]}`, which the paper does not have.", "beyond", text, why)
    return Finding(UNHARMED, verdict, f"{text} Severe would be {percent(SEVERE)} or more.", why)


def agreement(rows: Rows) -> Finding:
    parts = []
    for n in sorted({row["n"] for row in of_kind(rows, "curve")}):
        exact, ours = (curve_of(rows, method, n) for method in ("exact", "cells"))
        away = [abs(a - b) for a, b in zip(exact["losses"], ours["losses"], strict=True)]
        apart = max(away) if all(map(math.isfinite, away)) else math.inf
        parts.append(
            f"{exact['steps']} steps of {n:,} tokens take the loss from {fixed(exact['losses'][0])} to "
            f"{fixed(last(exact['losses']), 3)} with SDPA and to {fixed(last(ours['losses']), 3)} with `Cells` (last quarter); "
            f"the largest difference on the way is {number(apart)}"
        )
    text = "; ".join(parts) + "."
    return Finding("Loss curves from the same random weights on the same windows.", "beyond", text)


def notes(rows: Rows) -> list[str]:
    found = [
        "The paper's samples, the beginning of a review of a video game and of a page about hiking, have nothing of Shakespeare: "
        "they do not show that the model was fine-tuned.",
    ]
    last_context = max(row["n"] for row in of_kind(rows, "cost"))
    ends = {method: max((row["n"] for row in costs(rows, method)), default=0) for method in NAMES}
    chosen = [f"{NAMES[m]} beyond {n:,}" for m, n in ends.items() if n < last_context and stopped(rows, m) is None]
    if chosen:
        found.append(f"By choice not run, to save time: {listed(chosen)}.")
    some = costs(rows, "exact")[:2]
    if len(some) == 2 and some[0]["seconds"] > some[1]["seconds"] / 2:
        said = listed([f"{seconds(row['seconds'])} at {row['n']:,} tokens" for row in some])
        found.append(f"With SDPA a step takes {said}: at short contexts it is not attention that takes the time.")
    if not tuned(rows):
        found.append("Run with `--model DIR` to fine-tune real weights as well, such as those of GPT-2 XL.")
    return found
