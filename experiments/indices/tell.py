"""What the rows on indices say about the paper's claim of sub-quadratic time."""

from __future__ import annotations

from experiments.efficiency.tell import SUBQUADRATIC, UNIT, dtypes, is_below, load, rounds, stops
from experiments.experiment import Finding, Row, Rows, Section, Table, judged
from experiments.growth import FIXED, fitted
from experiments.indices.methods import INPUTS, NAMES, PLACES, PROBES, SCANS, TAIL
from experiments.words import faster, listed, megabytes, percent, seconds, sentence, times

MILLION = 1_000_000
FOUND = 0.95
"""The recall from which on a near set counts as found."""


def tell(rows: Rows) -> Section:
    heads = {row["heads"] for row in rows}
    many = "one head" if heads == {1} else f"{max(heads)} heads"
    return Section(
        paper="Its theorem needs an index that finds the k = n^{1/2} keys of largest inner product in time n^{1/2} or so; with "
        "it kNN attention takes n^{3/2}. Its experiments search all keys.",
        here=f"`TopK` with k = n^{{1/2}}, with and without a tail of as many keys, {many} of 64, {dtypes(rows)}, on keys "
        f"and queries {INPUTS['clustered']} and {INPUTS['uniform']}. K-means and Faiss IVF have n^{{1/2}} cells; rows open "
        f"{PROBES}. Cells, HNSW and concentric LSH have their usual settings. Every call builds its index, which counts. "
        f"Recall is the share of the k best keys of a row that are found. {stops(rows)} {rounds(rows)} {load(rows)}",
        findings=[scaling(rows), found_at(rows), million(rows), against_sdpa(rows)],
        captions={
            "indices": "Time of one forward pass without a tail, the index included, and how much of the near sets is found. "
            "Lines end where the next length would pass a limit."
        },
        tables=[table(rows, *place) for place in PLACES],
        notes=["An index that finds few of the near keys is fast for the wrong reason: read time and recall together."],
    )


def of(rows: Rows, method: str, kind: str, causal: bool) -> Rows:
    return [row for row in rows if (row["method"], row["kind"], row["causal"]) == (method, kind, causal)]


def searched(rows: Rows, tails: bool = False) -> list[str]:
    """The methods with an index, in their order."""
    names = [name for name in NAMES if name != "sdpa"]
    names += [f"{name}{TAIL}" for name in names] if tails else []
    return [name for name in names if any(row["method"] == name for row in rows)]


def called(method: str) -> str:
    return NAMES[method.removesuffix(TAIL)] + (" with a tail" if method.endswith(TAIL) else "")


def scaling(rows: Rows) -> Finding:
    holds: list[bool] = []
    parts = []
    for place, words in PLACES.items():
        said = []
        for method in searched(rows, tails=True):
            fit = fitted(of(rows, method, *place))
            if fit is None:
                continue
            said.append(f"{called(method)} n^{{{fit.exponent:.2f} ± {fit.margin:.2f}}}")
            below = is_below(fit)
            if below is not None and method.removesuffix(TAIL) not in SCANS:
                holds.append(below)
        parts += [f"{words}: {listed(said)}"] if said else []
    text = f"Time against n (calls from {seconds(FIXED)} on, three lengths at least; 95% confidence): "
    text += f"{'; '.join(parts) or 'nothing to fit'}. Below {SUBQUADRATIC} with its margin counts as sub-quadratic; an index "
    text += "whose margin leaves it open does not count, nor does an exact search."
    return Finding("With an index, kNN attention takes sub-quadratic time.", judged(holds), text)


def found_at(rows: Rows) -> Finding:
    holds, parts = [], []
    for place, words in PLACES.items():
        last = {method: ran[-1] for method in searched(rows) if method not in SCANS and (ran := done(rows, method, place))}
        holds += [row["recall"] >= FOUND for row in last.values()]
        said = [f"{called(method)} {percent(row['recall'])} at {row['n']:,}" for method, row in last.items()]
        parts += [f"{words}: {listed(said)}"] if said else []
    why = "" if all(holds) else "Where keys have no structure, no few cells or buckets hold the best of them."
    claim = f"The index finds the near set (recall of at least {percent(FOUND)} at the longest length that ran)."
    return Finding(claim, judged(holds), sentence("; ".join(parts)) + ".", why)


def done(rows: Rows, method: str, place: tuple[str, bool]) -> Rows:
    return [row for row in of(rows, method, *place) if row["status"] == "ok"]


def million(rows: Rows) -> Finding:
    claim = "kNN attention handles n = 10^{6}."
    asked = [row for row in rows if row["n"] == MILLION and row["method"] in searched(rows, tails=True)]
    if not asked:
        return Finding(claim, "untested", f"No run was asked for {MILLION:,} keys.")
    there = [row for row in asked if row["status"] == "ok"]
    said = [
        f"{called(row['method'])} ({PLACES[row['kind'], row['causal']]}) in {seconds(row['seconds'])} and "
        f"{megabytes(row['megabytes'])}, recall {percent(row['recall'])}"
        for row in there
    ]
    text = f"Within the limits {len(there) or 'none'} of {len(asked)} runs got there" + (f": {'; '.join(said)}." if said else ".")
    # One index that gets there shows that it can be done.
    return Finding(claim, "confirmed" if there else "untested", text)


def against_sdpa(rows: Rows) -> Finding:
    parts = []
    for place, words in PLACES.items():
        exact = {row["n"]: row for row in done(rows, "sdpa", place)}
        said = []
        for method in searched(rows):
            both = [(row, exact[row["n"]]) for row in done(rows, method, place) if row["n"] in exact]
            if not both:
                continue
            slower = [row["n"] for row, other in both if not faster(row["seconds"], other["seconds"])]
            wins = [row["n"] for row, _ in both if row["n"] > max(slower, default=0)]
            row, other = both[-1]
            ratio = f"{times(other['seconds'] / row['seconds'])} at {row['n']:,}"
            said.append(f"{called(method)} {ratio}" + (f", faster from {min(wins):,} on" if wins else ""))
        parts += [f"{words}: {'; '.join(said)}"] if said else []
    text = "SDPA's time over that of `TopK` without a tail, at the longest length of both. " + sentence(". ".join(parts)) + "."
    return Finding("kNN attention with an index against SDPA, which the paper does not compare with.", "beyond", text)


def table(rows: Rows, kind: str, causal: bool) -> Table:
    methods = ["sdpa", *searched(rows, tails=kind == "clustered")]
    by_size = {method: {row["n"]: row for row in of(rows, method, kind, causal)} for method in methods}
    body = [[f"{n:,}", *(cell(by_size[method].get(n)) for method in methods)] for n in sorted({row["n"] for row in rows})]
    title = f"Time, peak memory beyond the inputs, recall, mean error of a row over {UNIT}; {PLACES[kind, causal]}"
    return Table(title, ["n", *map(called, methods)], body)


def cell(row: Row | None) -> str:
    if row is None:
        return "–"
    if row["status"] != "ok":
        return f"out of {row['status']}" + ("" if row["tried"] else " (predicted)")
    recall = "" if row["recall"] is None else f", {percent(row['recall'])}"
    return f"{seconds(row['seconds'])}, {megabytes(row['megabytes'])}{recall}, {percent(row['error'])}"
