"""What the efficiency rows say about the paper's claims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from experiments.efficiency.methods import DIM, HEADS, KNN, METHODS, NAMES, output_megabytes
from experiments.efficiency.paper import HANDLED, MARKS, Mark
from experiments.experiment import Finding, Row, Rows, Section, Table, Verdict, judged
from experiments.growth import SUBQUADRATIC, extrapolated, fitted, is_below
from experiments.row_errors import UNIT
from experiments.timing_words import dtypes, growth, load, rounds, stopped, stops
from experiments.words import faster, listed, megabytes, percent, seconds, sentence, times

ROUNDING = 1e-5
"""Errors below are not told."""
MASKS = {True: "causal", False: "no mask"}


def tell(rows: Rows) -> Section:
    marks = "; ".join(f"{its_name(mark)} {mark.said(f' at {mark.n:,} keys')}" for mark in MARKS)
    return Section(
        paper=f"Batch 1, {HEADS} heads, uniform random inputs, PyTorch on a laptop (M3, 8 GB). Its times: {marks}. Its text: "
        "brute force runs out of memory beyond 20,000 keys, a larger k leads to memory errors from 50,000 on, and n = 10^{6} is "
        "handled. Claimed: superior speed and sub-quadratic scaling.",
        here=f"The same shapes (d = {DIM}), causal as in the listing and without a mask, {dtypes(rows)}, with entries uniform in "
        "[-1, 1] (ours: the paper names no bound). Every method and length has a process of its own, under a limit of memory "
        "beyond the inputs; a length is not tried where the shorter ones predict that a limit would be passed. "
        f"{stops(rows)} {rounds(rows)} {load(rows)} "
        f"Errors are mean norms of rows in units of {UNIT}, as in the next experiment, against exact rows in float32 of the "
        "same inputs.",
        findings=[
            faster_than_naive(rows),
            exponents(rows),
            memory(rows),
            million(rows),
            faster_than_sdpa(rows),
            cells(rows),
        ],
        captions={
            "efficiency": "Time (median, and from the fastest to the slowest round) and peak memory of one forward pass. "
            "Crosses: where a method would pass, or passed, a limit of time or memory; at what was predicted where it was not "
            "started, else at the limit. Diamonds: the paper's own times, from another machine; they are there to compare slopes "
            "and stops, not seconds."
        },
        tables=[table(rows, True), table(rows, False)],
        notes=[
            "TopK with an exact index scores every key: its time is quadratic whatever k is. A sub-quadratic search "
            "(`KMeansIndex`, `ConcentricLSH`) is a choice of index, not of k.",
            "Errors are those of flat random inputs, where no few keys hold the mass: hard for top-k, easy for a far field. How "
            "they depend on the inputs is the matter of the next experiment; on sharper random inputs without any clusters "
            "`Cells` is the one that loses.",
        ],
    )


def its_name(mark: Mark) -> str:
    return NAMES[mark.method].removeprefix("TopK, ")


def of(rows: Rows, method: str, causal: bool) -> Rows:
    return [row for row in rows if row["method"] == method and row["causal"] == causal]


def ok(rows: Rows, method: str, causal: bool) -> Rows:
    return [row for row in of(rows, method, causal) if row["status"] == "ok"]


def last_common(rows: Rows, methods: Sequence[str], causal: bool) -> list[Row]:
    """Rows of all these methods at the longest length that all of them ran; none where there is no such length."""
    ran = [{row["n"]: row for row in ok(rows, method, causal)} for method in methods]
    common = set.intersection(*(set(found) for found in ran))
    return [found[max(common)] for found in ran] if common else []


def compared(rows: Rows, one: str, other: str, causal: bool) -> str:
    both = last_common(rows, (one, other), causal)
    if not both:
        return f"{NAMES[one]} and {NAMES[other]} have no length in common"
    a, b = (row["seconds"] for row in both)
    how = f"{times(b / a)} as fast as" if faster(a, b) else f"{times(a / b)} slower than" if faster(b, a) else "as fast as"
    return f"{NAMES[one]} is {how} {NAMES[other]} at n = {both[0]['n']:,} ({seconds(a)} against {seconds(b)})"


def speed(rows: Rows, other: str, claim: str, why: str = "") -> Finding:
    """Whether the paper's methods are faster than another at the longest length of both; `why` where one is not."""
    wins, parts = [], []
    for causal, mask in MASKS.items():
        for method in KNN:
            both = last_common(rows, (method, other), causal)
            wins += [faster(both[0]["seconds"], both[1]["seconds"])] if both else []
            parts.append(f"{mask}: {compared(rows, method, other, causal)}")
    return Finding(claim, judged(wins), sentence("; ".join(parts)) + ".", "" if all(wins) else why)


def faster_than_naive(rows: Rows) -> Finding:
    return speed(
        rows,
        "naive",
        "kNN attention is faster than brute force.",
        "As long as its matrix fits, brute force multiplies at full speed; the search does the same products and then selects.",
    )


def faster_than_sdpa(rows: Rows) -> Finding:
    """No claim of the paper, which compares with brute force; SDPA is what one would otherwise call."""
    found = speed(
        rows,
        "sdpa",
        "kNN attention against SDPA, which is exact as well, and which the paper does not compare with.",
        "SDPA never stores the matrix and multiplies at full speed; an exact search does the same products and then has to "
        "select.",
    )
    return replace(found, verdict="beyond")


def exponents(rows: Rows) -> Finding:
    parts: list[str] = []
    found: dict[tuple[str, bool], bool | None] = {}
    for causal, mask in MASKS.items():
        fits = {method: fit for method in METHODS if (fit := fitted(of(rows, method, causal))) is not None}
        said = [f"{NAMES[method]} {fit}" for method, fit in fits.items()]
        parts += [f"{mask}: {listed(said)}"] if said else []
        found |= {(method, causal): is_below(fits[method]) for method in KNN if method in fits}
    below, above, unclear = ([case for case in found if found[case] is answer] for answer in (True, False, None))
    text = growth("seconds", parts)
    if found:
        steps = listed([f"{last_step(ok(rows, *case)):.2f} for {named(*case)}" for case in found])
        text += f" Between the last two lengths the exponent is {steps}."
    if unclear:
        cases = listed([named(*case) for case in unclear])
        text += f" Left open: {cases}, whose margins neither stay below {SUBQUADRATIC} nor lie above it and reach 2."
    why = ""
    if above:
        why = "A search over all keys is quadratic. Less needs an index, and the listing leaves its own undefined."
    elif below:
        why = "The search scores all pairs, which is quadratic in the end."
    verdict = judged([True] * len(below) + [False] * len(above))
    return Finding("kNN attention scales sub-quadratically.", verdict, text, why)


def named(method: str, causal: bool) -> str:
    return f"{NAMES[method]} ({MASKS[causal]})"


def last_step(ran: Rows) -> float:
    """The exponent of time between the last two lengths."""
    before, last = ran[-2:]
    return math.log(last["seconds"] / before["seconds"]) / math.log(last["n"] / before["n"])


def expected_megabytes(rows: Rows, method: str, causal: bool, n: int) -> float | None:
    """Memory at a length that was not run, going by those that were."""
    ran = ok(rows, method, causal)
    return extrapolated(ran, n, "megabytes", per_key(ran[-1])) if ran else None


def per_key(row: Row) -> float:
    """Megabytes that a key's row of the output takes."""
    return output_megabytes(1, getattr(torch, row["dtype"]))


def memory(rows: Rows) -> Finding:
    claim = "Brute force runs out of memory (8 GB) beyond 20,000 keys, and a larger k leads to memory errors from 50,000 on."
    longest = max(mark.n for mark in MARKS)
    found = {method: out_of_memory(rows, method, 20_000, longest) for method in ("naive", "topk-sqrt")}
    known = {method: is_out for method, (is_out, _) in found.items() if is_out is not None}
    why = ""
    if known.get("topk-sqrt") is False:
        why = (
            "`TopK` takes rows in blocks, and holds little more than a block and its output; the listing gathers k values for "
            "all rows of a head."
        )
    evidence = f"Causal: {'; '.join(text for _, text in found.values())}."
    return Finding(claim, judged(list(known.values())), evidence, why)


def out_of_memory(rows: Rows, method: str, ran_at: int, longest: int) -> tuple[bool | None, str]:
    """Whether a method has no memory for a causal length after one and up to another, None where that is not known; in words."""
    ran = ok(rows, method, True)
    last = f"needs {megabytes(ran[-1]['megabytes'])} at n = {ran[-1]['n']:,}" if ran else "never ran"
    said = f"{NAMES[method]} {last}"
    beyond = [row for row in of(rows, method, True) if ran_at < row["n"] <= longest]
    out = next((row for row in beyond if row["status"] == "memory"), None)
    if out is not None:
        need = f", {megabytes(out['predicted'])} by extrapolation," if out["predicted"] else ""
        return True, f"{said} and{need} more than the limit of {out['limit']:g} GB at {out['n']:,}"
    late = next((row for row in beyond if row["status"] == "time"), None)
    if late is None:
        return (False if beyond else None), said
    expected = expected_megabytes(rows, method, True, late["n"])
    return (None, said) if expected is None else (False, f"{said} and, by extrapolation, {megabytes(expected)} at {late['n']:,}")


def million(rows: Rows) -> Finding:
    """Confirmed where all of the paper's methods get there, refuted where all were tried and ran out of memory.

    Time alone refutes nothing, nor does what is predicted.
    """
    claim = "kNN attention handles n = 10^{6}."
    asked = {(m, causal): row for m in (*KNN, "cells") for causal in MASKS for row in of(rows, m, causal) if row["n"] == HANDLED}
    if not asked:
        return Finding(claim, "untested", f"No run was asked for {HANDLED:,} keys.")
    runs = [row for (method, _), row in asked.items() if method in KNN]
    knn = [row["status"] for row in runs]
    verdict: Verdict = judged([status == "ok" for status in knn])
    if verdict == "refuted" and not all(row["status"] == "memory" and row["tried"] for row in runs):
        verdict = "untested"
    parts = [f"{named(*case)}: {arrival(rows, row)}" for case, row in asked.items()]
    reached = sum(status == "ok" for status in knn)
    text = f"Within the limits {reached or 'none'} of {len(knn)} runs of kNN attention got there. {'; '.join(parts)}."
    why = ""
    if "time" in knn:
        last = max(MARKS, key=lambda mark: mark.n)
        why = f"All pairs are scored: time runs out. The paper's own times end at {last.n:,} keys ({last.seconds:,.0f} s)."
    return Finding(claim, verdict, text, why)


def arrival(rows: Rows, row: Row) -> str:
    """How a method got to a length, or what it would take."""
    if row["status"] == "ok":
        return f"in {seconds(row['seconds'])} and {megabytes(row['megabytes'])}"
    if row["status"] == "memory":
        more = f" ({megabytes(row['predicted'])} predicted)" if row["predicted"] else ""
        return f"more than {row['limit']:g} GB{more}"
    fit = fitted(of(rows, row["method"], row["causal"]))
    spent = fit.at(row["n"]) if fit is not None else row["predicted"]
    need = expected_megabytes(rows, row["method"], row["causal"], row["n"])
    words = [seconds(float(f"{spent:.2g}")) if spent is not None else "", megabytes(need) if need is not None else ""]
    return f"not within {row['limit']:g} s" + (f" ({listed([w for w in words if w])} predicted)" if any(words) else "")


def cells(rows: Rows) -> Finding:
    parts = []
    for causal, mask in MASKS.items():
        ran = ok(rows, "cells", causal)
        if ran:
            last = f"it reaches n = {ran[-1]['n']:,} in {seconds(ran[-1]['seconds'])}"
            parts.append(f"{mask}: {compared(rows, 'cells', 'sdpa', causal)}, and {last}")
    text = sentence("; ".join(parts)) + "."
    common = last_common(rows, (*KNN, "cells"), False)
    if common:
        errors = listed([f"{NAMES[row['method']]} {error(row)}" for row in common])
        text += f" Mean error of a row over {UNIT}, no mask, n = {common[0]['n']:,}: {errors}."
    return Finding("`Cells`, which the paper does not have, on the same inputs.", "beyond", text)


def error(row: Row) -> str:
    return f"<{percent(ROUNDING)}" if row["error"] < ROUNDING else percent(row["error"])


def table(rows: Rows, causal: bool) -> Table:
    body = []
    for n in sorted({row["n"] for row in rows}):
        line = [f"{n:,}"]
        for method in METHODS:
            row = next(row for row in of(rows, method, causal) if row["n"] == n)
            if row["status"] == "ok":
                line.append(f"{seconds(row['seconds'])}, {megabytes(row['megabytes'])}, {error(row)}")
            else:
                line.append(stopped(row))
        body.append(line)
    marks = "; ".join(f"{its_name(mark)} {mark.seconds:,.0f} s at {mark.n:,}" for mark in MARKS)
    title = f"Time, peak memory beyond the inputs, mean error of a row over {UNIT}; {dtypes(rows)}, {MASKS[causal]}"
    return Table(title + (f" (paper: {marks})" if causal else ""), ["n", *NAMES.values()], body)
