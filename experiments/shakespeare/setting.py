"""What was trained, with how many seeds, and what was not."""

from __future__ import annotations

from experiments.experiment import Rows
from experiments.shakespeare.methods import NAMES, PAPER
from experiments.shakespeare.seeds import counted, rule, span
from experiments.shakespeare.select import contexts, ends, seed_counts, seed_of, shared
from experiments.words import listed


def bands(rows: Rows) -> str:
    """What lines and bands are."""
    seeds = seed_counts(rows)
    return "One seed." if max(seeds) == 1 else f"Lines: mean of {span(seeds)} seeds; bands: from the least to the largest."


def setting(rows: Rows) -> str:
    firsts = [ends(rows, context, "exact")[0] for context in contexts(rows)]
    first = firsts[0]
    lengths = listed(
        [
            f"{row['context']:,} (batches of {row['batch']}, {row['asked']:,} iterations, "
            f"{'rotary' if row['rotary'] else 'learned'} positions, {counted(len(shared(rows, row['context'], 'exact')))})"
            for row in firsts
        ]
    )
    said = (
        f"A GPT of {first['layers']} layers, {first['heads']} heads, {first['width']} wide ({first['parameters']:,} weights), "
        f"dropout {first['dropout']:g}, on {first['corpus']} ({first['characters']:,} characters, the last tenth for "
        f"validation), context {lengths}. Attention is causal, and trains with the exact gradient of each estimator. Methods: "
        f"`TopK({PAPER})`, `TopK` with √n keys, half of them near and half drawn, and `Cells` that look at about as many. "
        f"{rule_of(rows)} {left(rows)}"
    )
    return said.strip()


def rule_of(rows: Rows) -> str:
    """When a difference counts."""
    return rule(min(seed_counts(rows)), max(seed_counts(rows)))


def left(rows: Rows) -> str:
    """What was not begun, seed by seed."""
    found: dict[int, dict[int, list[str]]] = {}
    for row in rows:
        if row["kind"] == "left":
            found.setdefault(seed_of(row), {}).setdefault(row["context"], []).append(NAMES[row["method"]])
    if not found:
        return ""
    limit = max(row["limit"] for row in rows if row["kind"] == "left")
    ran = {(seed_of(row), row["context"]) for row in rows if row["kind"] == "end"}
    parts = []
    for seed, missing in found.items():
        said = [
            f"{listed(names) if (seed, context) in ran else 'all'} at context {context:,}" for context, names in missing.items()
        ]
        parts.append(f"of seed {seed} {', '.join(said)}")
    return f"Not begun within the {limit:g} s of the whole run: {'; '.join(parts)}."


def basis(rows: Rows, among: list[int], seeds: list[int]) -> str:
    """On what a finding rests: models of these contexts, steps and seeds."""
    firsts = [ends(rows, context, "exact")[0] for context in among]
    weights = list(dict.fromkeys(f"{row['parameters']:,}" for row in firsts))
    steps = list(dict.fromkeys(f"{row['asked']:,}" for row in firsts))
    models = "a character-level GPT" if len(weights) == 1 else "character-level GPTs"
    many = "one seed" if max(seeds) == 1 else f"{span(seeds)} seeds"
    return f"This rests on {models} of {listed(weights)} parameters, {listed(steps)} steps, {many}."


def stops(rows: Rows) -> list[str]:
    """Which units ran out of time."""
    found = [row for row in rows if row["kind"] == "end" and row["stopped"]]
    if not found:
        return []
    several = max(seed_counts(rows)) > 1
    said = listed(
        [
            f"{NAMES[row['method']]} at context {row['context']:,}{f', seed {seed_of(row)}' if several else ''} "
            f"({row['iterations']:,} of {row['asked']:,})"
            for row in found
        ]
    )
    return [f"Stopped after {found[0]['limit']:g} s, with so many iterations: {said}."]
