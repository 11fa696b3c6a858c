"""What the errors say about the paper's claims on k."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.error_vs_k.select import authors, lengths, over_seeds, powers, spreads
from experiments.error_vs_k.spreads import AUTHORS, EARLIER, FIGURE
from experiments.experiment import Finding, Rows, Section, Table, Verdict, judged
from experiments.words import listed, middle, number, percent, times

SMALL = 0.01
"""An error of 1% of a value's norm counts as negligible."""
NEAR = 1.1
"""An error within 10% of that at n^{1/2} counts as minimal."""
CLAIMED = "n^{1/8}"
MOST = "n^{1/2}"
IN_WORDS = {"confirmed": "is confirmed", "partly": "holds in part", "refuted": "is refuted", "untested": "is untested"}


def tell(rows: Rows) -> Section:
    findings = [minimal(rows), decreasing(rows), small_spread(rows), tails(rows), cells(rows)]
    n = lengths(rows)[-1]
    verdict = findings[0]
    return Section(
        paper="Q, K, V uniform in [-B, B]; the error of plain top-k attention for k from 3 to n^{1/2}. Found there: the error "
        "is minimal from k = n^{1/8} on, so that n^{1/2} may be too many, and it is more pronounced for small B and small k. The "
        f'caption says "different values of B" and names none: B = {FIGURE:g} is the smallest in the script of the repository '
        f"that the paper links (`forward_pass_test_batched.py`: 10, 30, 50), B = {_values(EARLIER)} are those of an earlier "
        "version of that script, with a figure of its own, in the authors' own repository.",
        here=f"The same inputs, d = 64, one head, no mask, {sizes(rows)}. With the usual scale the logits have standard "
        f"deviation B^{{2}}/3: {FIGURE**2 / 3:.0f} at B = {FIGURE:g}, where the softmax is nearly an argmax, and "
        f"{max(EARLIER) ** 2 / 3:.2g} at B = {max(EARLIER):g}. Claims are judged at the authors' B; smaller ones are ours, for "
        "flat attention. Errors are norms of rows in units of the rms norm of the values.",
        findings=findings,
        captions={
            "error-vs-k": f"The claim that the error is minimal from n^{{1/8}} on {IN_WORDS[verdict.verdict]}. "
            f"{verdict.evidence} Lines are medians, bands the range over seeds; dashed: B that are ours.",
            "error-vs-k-methods": f"Three methods against the number of keys that each looks at one by one, as measured, n = "
            f"{n:,}; dotted: the largest error. {matched(rows)} {findings[4].evidence}",
        },
        tables=[table(rows, n), fitted_table(rows)],
        notes=[
            "The softmax mass outside the top k is what plain top-k drops, so its error is p_{far} (O_{near} - O_{far}) "
            "exactly. No k is right for all inputs: it is right when little mass is left, which the normaliser tells "
            "(`estimate(...).lse`, `audit=`).",
            "Beside the keys that it opens, `Cells` scores the centroids of all cells; the exact index behind top-k scores every "
            "key.",
        ],
    )


def sizes(rows: Rows) -> str:
    seeds = len({row["seed"] for row in rows})
    return f"n = {listed([f'{n:,}' for n in lengths(rows)])}, {seeds} seeds"


def matched(rows: Rows) -> str:
    """How near the keys of `Cells` come to k."""
    mine = [row for row in rows if row["method"] == "cells"]
    off = [abs(row["keys"] / row["k"] - 1) for row in mine]
    size, opened = ({row[what] for row in mine} for what in ("cell_size", "probes"))
    return (
        f"Cells hold {min(size)} to {max(size)} keys on average, and {min(opened)} to {max(opened)} of them are opened: for each "
        f"input and k the combination of those tried whose keys per query come near to k, within {percent(max(off))} at worst "
        f"and {percent(sum(off) / len(off))} on average."
    )


def error(rows: Rows, n: int, spread: float, power: str, method: str = "topk", what: str = "mean_additive") -> float:
    return middle(over_seeds(rows, n, spread, method, power, what))


def _values(some: Sequence[float]) -> str:
    return listed([f"{spread:g}" if spread in AUTHORS else f"{spread:g} (ours)" for spread in some])


def is_minimal(rows: Rows, n: int, spread: float) -> bool:
    """Within 10% of the error at n^{1/2}, or below 1%."""
    return error(rows, n, spread, CLAIMED) <= max(SMALL, NEAR * error(rows, n, spread, MOST))


def minimal(rows: Rows) -> Finding:
    """Judged at the authors' B, not by how many of ours there are."""
    n = lengths(rows)[-1]
    k = dict(powers(rows, n))[CLAIMED]
    holds = [spread for spread in spreads(rows) if is_minimal(rows, n, spread)]
    fails = [spread for spread in spreads(rows) if spread not in holds]

    def pair(spread: float) -> str:
        return f"{percent(error(rows, n, spread, CLAIMED))} against {percent(error(rows, n, spread, MOST))}"

    def excess(spread: float) -> float:
        return error(rows, n, spread, CLAIMED) / error(rows, n, spread, MOST)

    parts = []
    if holds:
        parts.append(f"it is minimal for {listed([f'B = {spread:g} ({pair(spread)})' for spread in holds])}")
    if fails:
        worst = max(fails, key=excess)
        parts.append(
            f"{'not' if holds else 'it is not minimal'} for B = {_values(fails)} (furthest off: {worst:g}, {pair(worst)})"
        )
    text = (
        f"Mean error at k = {k} against that at n^{{1/2}}, n = {n:,}, minimal if below {percent(SMALL)} or within "
        f"{percent(NEAR - 1)}: {', and '.join(parts)}."
    )
    kept = [spread for spread in authors(rows) if spread in holds]
    verdict = judged([spread in holds for spread in authors(rows)])
    return Finding("For k >= n^{1/8} the error is minimal.", verdict, text, _why_minimal(rows, n, kept, fails))


def _why_minimal(rows: Rows, n: int, holds: Sequence[float], fails: Sequence[float]) -> str:
    if not fails:
        return ""
    k = dict(powers(rows, n))[CLAIMED]
    few = powers(rows, n)[0]

    def left(spread: float) -> str:
        return percent(1 - error(rows, n, spread, CLAIMED, what="mass"))

    text = f"n^{{1/8}} is {k} keys at this length. "
    if holds:
        sharp = max(holds)
        mean, most = (percent(error(rows, n, sharp, few[0], what=what)) for what in ("mean_additive", "max_additive"))
        text += (
            f"At B = {sharp:g} they leave {left(sharp)} of the mass to the others, and the mean error is {mean} with {few[1]} "
            f"keys already; the largest error of a row is {most}. "
        )
    return text + f"At B = {max(fails):g} they leave {left(max(fails))}, and every key that is added takes some of it."


def decreasing(rows: Rows) -> Finding:
    cases = worse = 0
    for n in lengths(rows):
        names = powers(rows, n)
        for spread in authors(rows):
            means = [error(rows, n, spread, power) for power, _ in names]
            for (_, small), (_, large), before, after in zip(names, names[1:], means, means[1:], strict=False):
                if large > small and before > 1e-6:
                    cases += 1
                    worse += after > before
    verdict: Verdict = "confirmed" if worse == 0 else "partly" if worse < cases / 2 else "refuted"
    if not cases:
        verdict = "untested"
    return Finding(
        "The error increases as k decreases.",
        verdict,
        f"In {cases - worse} of {cases} steps from one k to the next larger one the mean error fell.",
    )


def small_spread(rows: Rows) -> Finding:
    """Judged between the smallest and the largest B of the authors."""
    claim = "The error is larger for small B and small k; for larger k the difference becomes negligible."
    theirs, n = authors(rows), lengths(rows)[-1]
    if len(theirs) < 2:
        return Finding(claim, "untested", "Errors at two B of the authors would be needed.")
    low, high = theirs[0], theirs[-1]
    few, k = powers(rows, n)[0]
    by_spread = [error(rows, n, spread, few) for spread in theirs]
    flat, sharp = (error(rows, n, spread, MOST) for spread in (low, high))
    larger, vanishes = by_spread[0] > by_spread[-1], abs(flat - sharp) <= SMALL
    direction = "falling" if larger else "rising"
    if by_spread != sorted(by_spread, reverse=larger):
        direction += " (not at every step)"
    text = (
        f"With {k} keys, n = {n:,}: {percent(by_spread[0])} at B = {low:g}, {direction} to "
        f"{percent(by_spread[-1])} at B = {high:g}. With n^{{1/2}} keys the difference "
        f"{'is' if vanishes else 'is not'} negligible: {percent(flat)} against {percent(sharp)}."
    )
    least = spreads(rows)[0]
    if least < low:
        text += (
            f" At B = {least:g}, which is ours: {percent(error(rows, n, least, few))} and "
            f"{percent(error(rows, n, least, MOST))}, which is {percent(error(rows, n, least, MOST, what='mean'))} of the small "
            "output there."
        )
    verdict: Verdict = "confirmed" if larger and vanishes else "partly" if larger else "refuted"
    why = ""
    if larger:
        held = [percent(error(rows, n, spread, few, what="mass")) for spread in (low, high)]
        why = f"Not limited approximation power, but a flatter softmax: {k} keys hold {held[0]} of the mass at B = {low:g} and "
        why += f"{held[1]} at B = {high:g}."
    return Finding(claim, verdict, text, why)


def tails(rows: Rows) -> Finding:
    n = lengths(rows)[-1]
    ratios = {spread: error(rows, n, spread, MOST) / max(error(rows, n, spread, MOST, "tail"), 1e-12) for spread in spreads(rows)}
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
        top, far = (error(rows, n, spread, MOST, method) for method in ("topk", "cells"))
        parts.append((spread, top, far))
    better = [part for part in parts if part[2] < part[1]]
    k = dict(powers(rows, n))[MOST]
    most = middle(row["keys"] for row in rows if (row["n"], row["power"], row["method"]) == (n, MOST, "cells"))
    said = listed([f"B = {spread:g}: {percent(far)} against {percent(top)}" for spread, top, far in parts])
    text = (
        f"With about n^{{1/2}} keys ({number(most)} against {k}), `Cells` has a smaller mean error than a perfect top-k index "
        f"for {len(better)} of {len(parts)} values of B ({said})."
    )
    why = ""
    if len(better) < len(parts):
        why = (
            "Uniform inputs have no clusters: a cell's centroid says little about its keys. While logits are tame the moments "
            "of the far field are all that matters; once few keys decide, the right cells are not found. Real queries and keys "
            "are neither flat nor without structure."
        )
    return Finding("`Cells` with about as many keys.", "beyond", text, why)


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


def fitted_table(rows: Rows) -> Table:
    """Which cells were taken."""
    body = []
    for n in lengths(rows):
        for k in sorted({k for _, k in powers(rows, n)}):
            mine = [row for row in rows if (row["n"], row["k"], row["method"]) == (n, k, "cells")]
            taken = sorted({(row["cell_size"], row["probes"]) for row in mine})
            keys = [row["keys"] for row in mine]
            measured = f"{number(sum(keys) / len(keys))} ({number(min(keys))} to {number(max(keys))})"
            body.append([f"n = {n:,}, k = {k}", measured, ", ".join(f"{probes} of {size}" for size, probes in taken)])
    return Table("Cells: keys per query over all inputs, and cells opened, of what size", ["", "measured keys", "taken"], body)
