"""What the efficiency rows say about the paper's claims."""

from __future__ import annotations

import math

from experiments.efficiency.methods import METHODS
from experiments.efficiency.paper import MARKS
from experiments.experiment import Finding, Row, Rows, Section, Table, Verdict
from experiments.words import listed, megabytes, number, percent, seconds, times

SUBQUADRATIC = 1.75
"""A fitted exponent below this counts as sub-quadratic."""
NAMES = {
    "naive": "naive",
    "sdpa": "SDPA",
    "topk-sqrt": "TopK, k = n^{1/2}",
    "topk-fourth": "TopK, k = n^{1/4}",
    "cells": "Cells",
}


def tell(rows: Rows) -> Section:
    findings = [faster_than_naive(rows), faster_than_sdpa(rows), exponents(rows), memory(rows), cells(rows)]
    return Section(
        paper="Batch 1, 10 heads, uniform random inputs, PyTorch on a laptop (M3, 8 GB). Brute force runs out of memory beyond "
        "20,000 keys; top-k with k = n^{1/2} beyond 50,000, with k = n^{1/4} later; the text says that a million is reached. "
        "Claimed: superior speed and sub-quadratic scaling.",
        here="The same shapes, causal as in the listing and without a mask, float32, with entries uniform in [-1, 1]. Every "
        "call runs in a process of its own under a limit of memory beyond the inputs; a length is not tried where the shorter "
        f"ones predict that a limit would be passed. {stops(rows)} {load(rows)}",
        findings=findings,
        captions={
            "efficiency": "Time and peak memory of one forward pass. Crosses: where a method ran out of time or memory (at the "
            "predicted value, where that is why it was not started). Diamonds: the last points of the paper's own figure, from "
            "another and much smaller machine; they are there to compare slopes and stops, not seconds."
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


def ok(rows: Rows, method: str, causal: bool) -> Rows:
    return [row for row in rows if row["method"] == method and row["causal"] == causal and row["status"] == "ok"]


def at(rows: Rows, method: str, causal: bool, n: int) -> Row | None:
    return next((row for row in ok(rows, method, causal) if row["n"] == n), None)


def last_common(rows: Rows, one: str, other: str, causal: bool) -> tuple[Row, Row] | None:
    """Both methods at the longest length that both of them ran."""
    pairs = [(row, at(rows, other, causal, row["n"])) for row in ok(rows, one, causal)]
    both = [(a, b) for a, b in pairs if b is not None]
    return both[-1] if both else None


def compared(rows: Rows, one: str, other: str, causal: bool) -> str:
    both = last_common(rows, one, other, causal)
    if both is None:
        return "no common length"
    a, b = both
    ratio = b["seconds"] / a["seconds"]
    factor = f"{times(ratio)} as fast as" if ratio >= 1 else f"{times(1 / ratio)} slower than"
    return f"{NAMES[one]} is {factor} {NAMES[other]} at n = {a['n']:,} ({seconds(a['seconds'])} against {seconds(b['seconds'])})"


def faster_than_naive(rows: Rows) -> Finding:
    claim = "kNN attention is faster than brute force."
    wins = []
    for method in ("topk-sqrt", "topk-fourth"):
        both = last_common(rows, method, "naive", True)
        wins.append(both is not None and both[0]["seconds"] < both[1]["seconds"])
    evidence = "Causal: " + "; ".join(compared(rows, method, "naive", True) for method in ("topk-sqrt", "topk-fourth")) + "."
    return Finding(claim, "confirmed" if all(wins) else "partly" if any(wins) else "refuted", evidence)


def faster_than_sdpa(rows: Rows) -> Finding:
    claim = "kNN attention is superior in speed (the paper compares with brute force only; a user would otherwise call SDPA)."
    losing, evidence = [], []
    for causal in (True, False):
        for method in ("topk-sqrt", "topk-fourth"):
            both = last_common(rows, method, "sdpa", causal)
            losing.append(both is not None and both[0]["seconds"] > both[1]["seconds"])
            evidence.append(f"{'causal' if causal else 'no mask'}: {compared(rows, method, 'sdpa', causal)}")
    verdict: Verdict = "refuted" if all(losing) else "partly" if any(losing) else "confirmed"
    why = (
        "SDPA never stores the matrix and multiplies at full speed; an exact search does the same products and then has to "
        "select."
    )
    return Finding(claim, verdict, "; ".join(evidence) + ".", why if any(losing) else "")


def slope(rows: Rows) -> float | None:
    """Exponent of time in n over the longer half of the lengths, least squares."""
    rows = rows[-3:]
    if len(rows) < 2:
        return None
    x, y = [math.log(row["n"]) for row in rows], [math.log(row["seconds"]) for row in rows]
    mean = sum(x) / len(x)
    return sum((a - mean) * b for a, b in zip(x, y, strict=True)) / sum((a - mean) ** 2 for a in x)


def exponents(rows: Rows) -> Finding:
    found = {method: slope(ok(rows, method, True)) for method in METHODS}
    said = [f"{NAMES[method]} n^{{{power:.2f}}}" for method, power in found.items() if power is not None]
    knn = [found[method] for method in ("topk-sqrt", "topk-fourth")]
    below = [power is not None and power < SUBQUADRATIC for power in knn]
    verdict: Verdict = "confirmed" if all(below) else "partly" if any(below) else "refuted"
    why = (
        ""
        if all(below)
        else "A search over all keys is quadratic. Less needs an index, and the listing leaves its own undefined."
    )
    return Finding(
        "kNN attention scales sub-quadratically.",
        verdict,
        f"Fitted to the last three causal lengths of each: {listed(said)}.",
        why,
    )


def memory_stops(rows: Rows, method: str) -> Rows:
    """Causal lengths up to the paper's that a method has no memory for."""
    return [
        row for row in rows if row["method"] == method and row["causal"] and row["status"] == "memory" and row["n"] <= 100_000
    ]


def memory(rows: Rows) -> Finding:
    claim = "Brute force runs out of 8 GB beyond 20,000 keys, kNN attention with k = n^{1/2} beyond 50,000 (batch 1, 10 heads)."
    parts = []
    for method in ("naive", "topk-sqrt"):
        ran = ok(rows, method, True)
        stopped = next(iter(memory_stops(rows, method)), None)
        text = (
            f"{NAMES[method]} needs {megabytes(ran[-1]['megabytes'])} at n = {ran[-1]['n']:,}"
            if ran
            else f"{NAMES[method]} never ran"
        )
        if stopped is not None:
            need = f", {megabytes(stopped['predicted'])} by extrapolation," if stopped["predicted"] else ""
            text += f" and{need} more than the limit of {stopped['limit']:g} GB at {stopped['n']:,}"
        parts.append(text)
    naive_stops, topk_stops = (bool(memory_stops(rows, method)) for method in ("naive", "topk-sqrt"))
    verdict: Verdict = "confirmed" if naive_stops and topk_stops else "partly" if naive_stops else "refuted"
    why = (
        ""
        if topk_stops
        else "`TopK` takes rows in blocks, so its memory is linear in n; the listing gathers k values for all rows of a head."
    )
    return Finding(claim, verdict, "; ".join(parts) + ".", why)


def cells(rows: Rows) -> Finding:
    parts = []
    for causal in (True, False):
        ran = ok(rows, "cells", causal)
        if ran:
            word = "causal" if causal else "no mask"
            parts.append(
                f"{word}: {compared(rows, 'cells', 'sdpa', causal)}, and it reaches n = {ran[-1]['n']:,} in "
                f"{seconds(ran[-1]['seconds'])}"
            )
    errors = []
    for method in ("topk-fourth", "topk-sqrt", "cells"):
        ran = ok(rows, method, False)
        if ran:
            errors.append(f"{NAMES[method]} {percent(ran[-1]['error'])} (n = {ran[-1]['n']:,})")
    text = "; ".join(parts) + f". Mean relative error of a row without a mask, at the last length of each: {listed(errors)}."
    return Finding("`Cells`, which the paper does not have, on the same inputs.", "beyond", text)


def stops(rows: Rows) -> str:
    limits = {row["status"]: row["limit"] for row in rows if row["status"] != "ok"}
    words = [f"{limits['time']:g} s" if "time" in limits else "", f"{limits['memory']:g} GB" if "memory" in limits else ""]
    words = [word for word in words if word]
    return f"The limits here: {listed(words)} for a call." if words else "No limit was reached."


def load(rows: Rows) -> str:
    """How busy the machine was: with more to do than it has cores, times are too long."""
    found = sorted(row["load"] for row in rows if row["status"] == "ok")
    return (
        f"Load of the machine after a call: {found[len(found) // 2]:.1f} in the middle, {found[-1]:.1f} at most." if found else ""
    )


def table(rows: Rows, causal: bool) -> Table:
    sizes = sorted({row["n"] for row in rows})
    body = []
    for n in sizes:
        line = [f"{n:,}"]
        for method in METHODS:
            row = next(row for row in rows if (row["method"], row["causal"], row["n"]) == (method, causal, n))
            if row["status"] == "ok":
                line.append(f"{number(row['seconds'])} s, {megabytes(row['megabytes'])}, {percent(row['error'])}")
            else:
                line.append(f"out of {row['status']}" + ("" if row["tried"] else " (predicted)"))
        body.append(line)
    mask = "causal" if causal else "no mask"
    marks = "; ".join(f"{NAMES[mark.method]} {mark.seconds:,.0f} s at {mark.n:,}" for mark in MARKS)
    title = f"Seconds, peak memory beyond the inputs, mean relative error of a row; {mask}"
    return Table(title + (f" (paper: {marks})" if causal else ""), ["n", *(NAMES[method] for method in METHODS)], body)
