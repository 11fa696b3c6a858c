"""The numbers and the samples of the report."""

from __future__ import annotations

from experiments.experiment import Row, Rows, Table
from experiments.gpt2_xl.select import NAMES, has_memory, of_kind
from experiments.words import as_it_is, megabytes, number, seconds


def cost_table(rows: Rows) -> Table:
    some = of_kind(rows, "cost")
    body = []
    for n, recomputed in sorted({(row["n"], row["recomputed"]) for row in some}):
        at = {row["method"]: row for row in some if (row["n"], row["recomputed"]) == (n, recomputed)}
        body.append([f"{n:,}" + ("" if recomputed else ", all kept"), *(cell(at.get(method)) for method in NAMES)])
    memory = ", peak memory" if has_memory(rows) else ""
    return Table(f"A step: seconds, tokens per second{memory}", ["context", *NAMES.values()], body)


def cell(row: Row | None) -> str:
    if row is None:
        return "–"
    if row["status"] != "ok":
        return f"out of {row['status']}"
    memory = f", {megabytes(row['megabytes'])}" if row["megabytes"] is not None else ""
    return f"{seconds(row['seconds'])}, {number(row['tokens_per_second'])}/s{memory}"


def sample_tables(rows: Rows) -> list[Table]:
    """A table for each model: a line for each prompt, with what comes after it before and after training."""
    some = [row for row in of_kind(rows, "sample") if row["when"] == "after" or row["method"] == "exact"]
    return [sample_table([row for row in some if row["model"] == model]) for model in dict.fromkeys(row["model"] for row in some)]


def sample_table(rows: Rows) -> Table:
    columns = {(row["when"], row["method"]): who(row) for row in rows}
    text = {(row["prompt"], row["when"], row["method"]): row["sample"] for row in rows}
    prompts = dict.fromkeys(row["prompt"] for row in rows)
    body = [[as_it_is(prompt), *(as_it_is(text[prompt, when, method]) for when, method in columns)] for prompt in prompts]
    return Table(f"What {rows[0]['model']} goes on with", ["prompt", *columns.values()], body)


def who(row: Row) -> str:
    return row["when"] if row["when"] == "before" else f"after {row['n']:,}-token steps, {NAMES[row['method']]}"
