"""What the rows on indices say about the paper's claim of sub-quadratic time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from experiments.experiment import Finding, Row, Rows, Section, Table, Verdict, judged
from experiments.growth import SUBQUADRATIC, Fit, fitted, is_below
from experiments.indices.methods import DIM, DRAWN, INPUTS, NAMES, ON_CPU_ONLY, PLACES, PROBES, RECALL_ROWS, SCANS, TAIL
from experiments.row_errors import UNIT
from experiments.timing_words import dtypes, growth, load, rounds, stopped, stops
from experiments.words import faster, listed, megabytes, percent, seconds, sentence, times

MILLION = 1_000_000
FOUND = 0.95
"""The recall from which on a near set counts as found."""
Case = tuple[str, tuple[str, bool]]
"""A method and its place."""


def tell(rows: Rows) -> Section:
    heads = {row["heads"] for row in rows}
    many = "one head" if heads == {1} else f"{max(heads)} heads (the same rows in random orders)"
    return Section(
        paper="Its theorem needs an index that finds the k = n^{1/2} keys of largest inner product in time n^{1/2} or so; with "
        "it kNN attention takes n^{3/2}. Its experiments are said to scale sub-quadratically and to handle n = 10^{6}; "
        "the listing scores all keys.",
        here=f"`TopK` with k = n^{{1/2}}, with and without a tail of {DRAWN} keys, {many} of {DIM}, {dtypes(rows)}, on keys "
        f"and queries {INPUTS['clustered']} and {INPUTS['uniform']}. K-means and Faiss IVF have n^{{1/2}} cells; rows open "
        f"{PROBES}. Cells, HNSW and concentric LSH have their usual settings. Every call builds its index, which counts. "
        f"Recall is the share of the k best keys of a row that are found, over {RECALL_ROWS} rows. "
        + " ".join(filter(None, [gaps(rows), stops(rows), rounds(rows), load(rows)])),
        findings=[scaling(rows), found_at(rows), both(rows), space(rows), million(rows), against_sdpa(rows)],
        captions={
            "indices": "Time of one forward pass, the index included, how much of the near sets is found, and peak memory beyond "
            "the inputs. Lines end where the next length would pass a limit, or was left out. Dotted: slopes to compare with."
        },
        tables=[table(rows, place) for place in PLACES],
        notes=["An index that finds few of the near keys is fast for the wrong reason: read time and recall together."],
    )


def of(rows: Rows, case: Case) -> Rows:
    method, place = case
    return [row for row in rows if row["method"] == method and (row["kind"], row["causal"]) == place]


def done(rows: Rows, case: Case) -> Rows:
    return [row for row in of(rows, case) if row["status"] == "ok"]


def searched(rows: Rows, tails: bool = True) -> list[str]:
    """The methods with an index, in their order."""
    names = [name for name in NAMES if name != "sdpa"]
    names += [f"{name}{TAIL}" for name in names] if tails else []
    return [name for name in names if any(row["method"] == name for row in rows)]


def cases(rows: Rows, tails: bool = True) -> Iterator[Case]:
    """Those that any row is about: methods with an index, place by place."""
    return ((method, place) for place in PLACES for method in searched(rows, tails) if of(rows, (method, place)))


def is_scan(case: Case) -> bool:
    return case[0].removesuffix(TAIL) in SCANS


def called(method: str) -> str:
    return NAMES[method.removesuffix(TAIL)] + (" with a tail" if method.endswith(TAIL) else "")


def named(case: Case) -> str:
    return f"{called(case[0])} ({PLACES[case[1]]})"


def gaps(rows: Rows) -> str:
    """What was not measured for another reason than the limits of a call."""
    said = []
    if any(row["device"] != "cpu" for row in rows):
        said.append(f"{listed([NAMES[name] for name in ON_CPU_ONLY])} search on a CPU and are not run on a GPU.")
    missing = {called(row["method"].removesuffix(TAIL)) for row in rows if row["status"] == "missing"}
    if missing:
        said.append(f"Not run, for Faiss is not installed: {listed(sorted(missing))}.")
    left: dict[Case, Row] = {}
    for row in rows:
        if row["status"] == "left":
            left.setdefault((row["method"], (row["kind"], row["causal"])), row)
    if left:
        limit = max(row["limit"] for row in left.values())
        names = listed([f"{named(case)} from {row['n']:,} on" for case, row in left.items()])
        said.append(f"Not begun within the {limit:g} s of the whole run: {names}.")
    return " ".join(said)


def by_place(rows: Rows, say: Callable[[Case], str | None], tails: bool = True) -> list[str]:
    """What there is to say of every case, place by place."""
    parts = []
    for place, words in PLACES.items():
        said = [text for method in searched(rows, tails) if (text := say((method, place))) is not None]
        parts += [f"{words}: {listed(said)}"] if said else []
    return parts


def fits(rows: Rows, what: str) -> dict[Case, Fit]:
    return {case: fit for case in cases(rows) if (fit := fitted(of(rows, case), what)) is not None}


def by_most(answers: Sequence[bool | None]) -> Verdict:
    """By the answers that are known, if these are half of all at least: a few fits among many that are open say nothing."""
    known = [answer for answer in answers if answer is not None]
    return judged(known if 2 * len(known) >= len(answers) else [])


def grows(rows: Rows, what: str, claim: str) -> Finding:
    """Judged by the indices that do not scan, and of these by those whose margins leave nothing open."""
    found = fits(rows, what)
    counted = {case: is_below(fit) for case, fit in found.items() if not is_scan(case)}
    text = growth(what, by_place(rows, lambda case: f"{called(case[0])} {found[case]}" if case in found else None))
    below = [case for case, answer in counted.items() if answer]
    text += f" Exact search not counted, {len(below) or 'none'} of {len(counted)} stay below {SUBQUADRATIC} with their margins."
    open_ones = [named(case) for case, answer in counted.items() if answer is None]
    if open_ones:
        text += f" Left open: {listed(open_ones)}, whose margins neither stay below nor lie above it and reach 2."
    return Finding(claim, by_most(list(counted.values())), text)


def scaling(rows: Rows) -> Finding:
    return grows(rows, "seconds", "With an index, kNN attention takes sub-quadratic time.")


def space(rows: Rows) -> Finding:
    return grows(rows, "megabytes", "With an index, kNN attention takes sub-quadratic space.")


def last_recall(rows: Rows, case: Case) -> float | None:
    """At the longest length that ran."""
    ran = done(rows, case)
    return ran[-1]["recall"] if ran else None


def found_at(rows: Rows) -> Finding:
    asked = [case for case in cases(rows, tails=False) if not is_scan(case) and done(rows, case)]
    holds = [done(rows, case)[-1]["recall"] >= FOUND for case in asked]

    def say(case: Case) -> str | None:
        row = done(rows, case)[-1] if case in asked else None
        return f"{called(case[0])} {percent(row['recall'])} at {row['n']:,}" if row else None

    lost = {case[1][0] for case, hold in zip(asked, holds, strict=True) if not hold}
    why = "Where keys have no structure, no few cells or buckets hold the best of them." if "uniform" in lost else ""
    claim = f"The index finds the near set (recall of at least {percent(FOUND)} at the longest length that ran)."
    parts = by_place(rows, say, tails=False)
    return Finding(claim, judged(holds), sentence("; ".join(parts) or "nothing ran") + ".", why)


def both(rows: Rows) -> Finding:
    """A fast index that misses the near keys is no kNN attention, nor is one that finds them in quadratic time sub-quadratic."""
    below = {case: is_below(fit) for case, fit in fits(rows, "seconds").items() if not is_scan(case)}
    holds = {case: answer and (last_recall(rows, case) or 0.0) >= FOUND for case, answer in below.items()}
    able = [named(case) for case, answer in holds.items() if answer]
    text = f"{len(able) or 'None'} of {len(holds)}" + (f": {listed(able)}." if able else ".")
    left = sum(answer is None for answer in holds.values())
    text += f" The exponents of {left} are left open." if left else ""
    return Finding("Sub-quadratic time and the near set found, both at once.", by_most(list(holds.values())), text)


def million(rows: Rows) -> Finding:
    """One index that gets there, and finds the near set, shows that it can be done. Time and limits refute nothing."""
    claim = "kNN attention handles n = 10^{6}."
    asked = [row for case in cases(rows) for row in of(rows, case) if row["n"] == MILLION]
    if not asked:
        return Finding(claim, "untested", f"No run was asked for {MILLION:,} keys.")
    there = [row for row in asked if row["status"] == "ok"]
    said = [
        f"{named((row['method'], (row['kind'], row['causal'])))} in {seconds(row['seconds'])} and {megabytes(row['megabytes'])}, "
        f"recall {percent(row['recall'])}"
        for row in there
    ]
    text = f"Within the limits {len(there) or 'none'} of {len(asked)} runs got there" + (f": {'; '.join(said)}." if said else ".")
    found = any(row["recall"] >= FOUND for row in there)
    verdict: Verdict = "confirmed" if found else "partly" if there else "untested"
    return Finding(claim, verdict, text, "" if found or not there else "No index that got there finds the near set.")


def against_sdpa(rows: Rows) -> Finding:
    def say(case: Case) -> str | None:
        exact = {row["n"]: row for row in done(rows, ("sdpa", case[1]))}
        pairs = [(row, exact[row["n"]]) for row in done(rows, case) if row["n"] in exact]
        if not pairs:
            return None
        slower = [row["n"] for row, other in pairs if not faster(row["seconds"], other["seconds"])]
        wins = [row["n"] for row, _ in pairs if row["n"] > max(slower, default=0)]
        row, other = pairs[-1]
        ratio = f"{called(case[0])} {times(other['seconds'] / row['seconds'])} at {row['n']:,}"
        return ratio + (f" (faster from {min(wins):,} on)" if wins else "")

    parts = by_place(rows, say)
    text = "SDPA's time over that of `TopK`, at the longest length of both. " + sentence("; ".join(parts) or "no length") + "."
    return Finding("kNN attention with an index against SDPA, which the paper does not compare with.", "beyond", text)


def table(rows: Rows, place: tuple[str, bool]) -> Table:
    methods = ["sdpa", *searched(rows)]
    body = [[called(row["method"]), f"{row['n']:,}", *cells(row)] for method in methods for row in of(rows, (method, place))]
    head = ["index", "n", "k", "tail", "time", "peak memory", "recall", "error"]
    return Table(f"Peak memory is beyond the inputs, errors are over {UNIT}; {PLACES[place]}", head, body)


def cells(row: Row) -> list[str]:
    """What was measured, column by column, or why nothing was."""
    sizes = ["–" if row[name] is None else f"{row[name]:,}" for name in ("k", "tail")]
    if row["status"] == "ok":
        recall = "–" if row["recall"] is None else percent(row["recall"])
        return [*sizes, seconds(row["seconds"]), megabytes(row["megabytes"]), recall, percent(row["error"])]
    others = {"left": "left out", "missing": "not installed"}
    return [*sizes, others.get(row["status"]) or stopped(row), "–", "–", "–"]
