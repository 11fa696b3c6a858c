"""What the errors say about the paper's claims on k."""

from __future__ import annotations

from experiments.error_vs_k.select import lengths, over_seeds, powers, spreads
from experiments.experiment import Finding, Rows, Section, Table, Verdict
from experiments.words import listed, middle, number, percent, times

SMALL = 0.01
"""An error of 1% of a value's norm counts as negligible."""
NEAR = 1.1
"""An error within 10% of that at n^{1/2} counts as minimal."""
CLAIMED = "n^{1/8}"


def tell(rows: Rows) -> Section:
    findings = [minimal(rows), decreasing(rows), small_spread(rows), tails(rows), cells(rows)]
    n = lengths(rows)[-1]
    verdict = findings[0]
    return Section(
        paper="Q, K, V uniform in [-B, B]; the error of plain top-k attention for k from 3 to n^{1/2}. Found there: the error "
        "is minimal from k = n^{1/8} on, so that n^{1/2} may be too many, and it is more pronounced for small B and small k.",
        here=f"The same inputs, d = 64, one head, no mask, {percent_rows(rows)}. With the usual scale the logits have standard "
        f"deviation B^{{2}}/3: 33 for the figure's B = 10, where the softmax is nearly an argmax, and below 6 for B up to 4. "
        "Errors are norms of rows in units of the rms norm of the values.",
        findings=findings,
        captions={
            "error-vs-k": f"The claim that the error is minimal from n^{{1/8}} on is {verdict.verdict}. {verdict.evidence} Lines "
            "are medians, bands the range over seeds.",
            "error-vs-k-methods": f"Three methods that attend to as many keys one by one, n = {n:,}; dotted: the largest error. "
            f"{findings[4].evidence}",
        },
        tables=[table(rows, n)],
        notes=[
            "The softmax mass outside the top k is what plain top-k drops, so its error is p_{far} (O_{near} - O_{far}) "
            "exactly. No k is right for all inputs: it is right when little mass is left, which the normaliser tells "
            "(`estimate(...).lse`, `audit=`).",
            "`Cells` opens as many keys and scores the centroids of the others; the exact index behind top-k scores every key.",
        ],
    )


def percent_rows(rows: Rows) -> str:
    seeds = len({row["seed"] for row in rows})
    return f"n = {listed([f'{n:,}' for n in lengths(rows)])}, {seeds} seeds"


def error(rows: Rows, n: int, spread: float, power: str, method: str = "topk", what: str = "mean_additive") -> float:
    return middle(over_seeds(rows, n, spread, method, power, what))


def minimal(rows: Rows) -> Finding:
    """Minimal at n^{1/8}: within 10% of the error at n^{1/2}, or below 1%."""
    n = lengths(rows)[-1]
    holds: list[tuple[float, float, float]] = []
    fails: list[tuple[float, float, float]] = []
    for spread in spreads(rows):
        here, best = error(rows, n, spread, CLAIMED), error(rows, n, spread, "n^{1/2}")
        (holds if here <= max(SMALL, NEAR * best) else fails).append((spread, here, best))
    k = dict(powers(rows, n))[CLAIMED]
    parts = []
    if fails:
        spread, here, best = max(fails, key=lambda case: case[1] / case[2])
        parts.append(
            f"At n = {n:,}, k = {k}, the mean error is neither below {percent(SMALL)} nor within {percent(NEAR - 1)} of that at "
            f"n^{{1/2}} for B = {listed([f'{case[0]:g}' for case in fails])}; furthest off is B = {spread:g}, {percent(here)} "
            f"against {percent(best)}"
        )
    if holds:
        said = listed([f"B = {spread:g} ({percent(here)} against {percent(best)})" for spread, here, best in holds])
        parts.append(f"{'it' if fails else 'The mean error'} is minimal for {said}")
    verdict: Verdict = "refuted" if len(fails) > len(holds) else "partly" if fails else "confirmed"
    why = ""
    if fails:
        why = (
            f"n^{{1/8}} is {k} keys at this length. Where {k} keys hold nearly all the mass (the paper's B) any k will do; where "
            "they do not, the error falls with every key added."
        )
    return Finding("For k >= n^{1/8} the error is minimal.", verdict, "; ".join(parts) + ".", why)


def decreasing(rows: Rows) -> Finding:
    cases = worse = 0
    for n in lengths(rows):
        names = powers(rows, n)
        for spread in spreads(rows):
            means = [error(rows, n, spread, power) for power, _ in names]
            for (_, small), (_, large), before, after in zip(names, names[1:], means, means[1:], strict=False):
                if large > small and before > 1e-6:
                    cases += 1
                    worse += after > before
    verdict: Verdict = "confirmed" if worse == 0 else "partly" if worse < cases / 2 else "refuted"
    return Finding(
        "The error increases as k decreases.",
        verdict,
        f"In {cases - worse} of {cases} steps from one k to the next larger one the mean error fell.",
    )


def small_spread(rows: Rows) -> Finding:
    n = lengths(rows)[-1]
    few = powers(rows, n)[0][0]
    by_spread = {spread: error(rows, n, spread, few) for spread in spreads(rows)}
    many = {spread: error(rows, n, spread, "n^{1/2}") for spread in spreads(rows)}
    falls = list(by_spread.values()) == sorted(by_spread.values(), reverse=True)
    low, high = min(by_spread), max(by_spread)
    verdict: Verdict = "confirmed" if by_spread[low] > by_spread[high] else "refuted"
    mostly = "" if falls else " (not at every step)"
    text = (
        f"With 3 keys, n = {n:,}: {percent(by_spread[low])} at B = {low:g}, falling{mostly} to {percent(by_spread[high])} at B = "
        f"{high:g}. For larger k the difference does not become negligible: with n^{{1/2}} keys it is {percent(many[low])} "
        f"against {percent(many[high])}."
    )
    relative = error(rows, n, low, "n^{1/2}", what="mean")
    text += f" Relative to the output itself, which is small there, {percent(relative)} at B = {low:g}."
    if many[low] - many[high] > SMALL and verdict == "confirmed":
        verdict = "partly"
    why = "Not limited approximation power: with small B the softmax is nearly flat, and k of n keys hold about k/n of the mass."
    return Finding(
        "The error is larger for small B and small k; for larger k the difference becomes negligible.", verdict, text, why
    )


def tails(rows: Rows) -> Finding:
    n = lengths(rows)[-1]
    ratios = {
        spread: error(rows, n, spread, "n^{1/2}") / max(error(rows, n, spread, "n^{1/2}", "tail"), 1e-12)
        for spread in spreads(rows)
    }
    gains = [f"B = {spread:g}: {times(ratio)}" for spread, ratio in ratios.items() if ratio > 1.05]
    loses = [f"B = {spread:g}: {times(1 / ratio)}" for spread, ratio in ratios.items() if ratio < 0.95]
    text = f"With n^{{1/2}} keys at n = {n:,}, half of them sampled from the rest, the mean error is "
    text += f"smaller at {listed(gains)}" if gains else "nowhere smaller"
    text += f", and larger at {listed(loses)}." if loses else "."
    why = ""
    if loses:
        why = (
            "Values are independent of keys here: leaving the rest out costs variance and no bias; so does sampling it. A tail "
            "pays where values and keys go together, as in clustered inputs."
        )
    return Finding("The sampled tail of the theorem, which the paper's experiments leave out.", "beyond", text, why)


def cells(rows: Rows) -> Finding:
    n = lengths(rows)[-1]
    parts = []
    for spread in spreads(rows):
        top, far = (error(rows, n, spread, "n^{1/2}", method) for method in ("topk", "cells"))
        parts.append((spread, top, far))
    better = [part for part in parts if part[2] < part[1]]
    said = listed([f"B = {spread:g}: {percent(far)} against {percent(top)}" for spread, top, far in parts])
    text = (
        f"With n^{{1/2}} keys, `Cells` has a smaller mean error than a perfect top-k index for {len(better)} of {len(parts)} "
        f"values of B ({said})."
    )
    why = ""
    if len(better) < len(parts):
        why = (
            "Uniform inputs have no clusters: a cell's centroid says little about its keys. While logits are tame the moments "
            "of the far field are all that matters; once few keys decide, the right cells are not found. Real queries and keys "
            "are neither flat nor without structure."
        )
    return Finding("`Cells` at an equal number of keys.", "beyond", text, why)


def table(rows: Rows, n: int) -> Table:
    names = powers(rows, n)
    body = []
    for spread in spreads(rows):
        for method, label in (("topk", "top k"), ("tail", "top k/2 + k/2 sampled"), ("cells", "cells")):
            means = [error(rows, n, spread, power, method) for power, _ in names]
            most = error(rows, n, spread, names[-1][0], method, "max_additive")
            body.append([f"B = {spread:g}, {label}", *(number(mean) for mean in means), number(most)])
    head = ["", *(f"{power} = {k}" if power != "3" else "3" for power, k in names), "largest row at the last"]
    return Table(f"Mean error of a row over the rms norm of the values, n = {n:,}, median over seeds", head, body)
