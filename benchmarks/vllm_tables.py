"""The rows of the tables of docs/vllm.md, the head first; gpu_tables.py writes them."""

from __future__ import annotations

from typing import Any

from record import read_sections

MODEL = "smollm2-135m"


def blocks() -> list[list[str]]:
    """What it costs that cells end where blocks do."""
    head = ["keys of a block", "of a cell", "spreads cut off at", "keys read", "tables", "excess perplexity", "error of a step"]
    found = [[*head, "rows over 30%"]]
    for name, way in read_sections("blocks")[f"{MODEL}/8192"]["pooled"].items():
        block, cell, cut = name.split("/")
        size = "all" if block == "all" else f"{int(block):,}"
        row = [size, cell, cut, f"{way['keys_read']:,.0f}", f"{way['tables']:,.0f}", excess(way)]
        found.append([*row, f"{way['error']:.1%}", f"{way['far_off']:.1%}"])
    return found


def quality() -> list[list[str]]:
    results = read_sections("vllm")[f"quality/{MODEL}"]
    found = [["rows open", "excess perplexity", *(about["kind"] for about in results["texts"].values())]]
    for name, way in results["ways"].items():
        if name != "vLLM":
            found.append([name, excess(way), *(f"{x:+.2%}" for x in way["by_text"].values())])
    return found


def speed() -> list[list[str]]:
    """Times of vLLM's own backend, of this one where all is read, and by cells."""
    found = [["keys", "vLLM's own", "this one", "cells", "cells: times as fast", "this one: times as long"]]
    for length, row in read_sections("vllm")[f"speed/{MODEL}"].items():
        ms = {name: row[name]["token_ms"] for name in ("vLLM", "default", "cells")}
        cells = [f"{ms[name]:.1f} ({row[name]['prompt_s']:.1f})" for name in ms]
        found.append([f"{int(length):,}", *cells, f"{ms['vLLM'] / ms['cells']:.2f}", f"{ms['default'] / ms['vLLM']:.2f}"])
    return found


def steps() -> list[list[str]]:
    """A step of one layer on a GPU: by cells, exact attention to the same pages, and SDPA over keys in one piece."""
    found = [["requests", "keys of each", "exact, µs", "SDPA, µs", "cells, µs", "times as fast", "keys read", "error"]]
    for row in pages("steps").values():
        ms = {name: f"{1e3 * x:,.0f}" for name, x in row["ms"].items()}
        own = f"{row['requests']}", f"{row['length']:,}", ms["paged"], ms.get("sdpa", ""), ms["cells"]
        found.append([*own, f"{row['paged_over_cells']:.2f}", f"{row['keys_read']:,}", f"{row['error']:.1%}"])
    return found


def errors() -> list[list[str]]:
    """Of cells that end with their block, on made-up keys."""
    found = [["keys", "clusters in runs of 128: error", "rows over 30%", "clusters strewn: error", "rows over 30%"]]
    for length, row in pages("errors").items():
        told = [f"{row[family][name]:.1%}" for family in ("runs", "strewn") for name in ("error", "far_off")]
        found.append([f"{int(length):,}", *told])
    return found


def short() -> list[list[str]]:
    """Requests that are exact since they are short, in a graph for long ones."""
    found = [["requests", "keys of each", "in a graph for as many keys, µs", "for 131,072, µs"]]
    for row in pages("short").values():
        found.append([f"{row['requests']}", f"{row['length']:,}", *(f"{1e3 * row['ms'][x]:,.0f}" for x in ("paged", "default"))])
    return found


def prompts() -> list[list[str]]:
    """The last rows of a prompt, read exactly."""
    found = [["rows", "keys", "pages, ms", "SDPA over keys in one piece, ms"]]
    for row in pages("chunks").values():
        found.append([f"{row['rows']:,}", f"{row['length']:,}", *(f"{row['ms'][name]:.2f}" for name in ("paged", "sdpa"))])
    return found


def pages(section: str) -> dict[str, Any]:
    rows: dict[str, Any] = read_sections("pages_gpu")[section]["rows"]
    return rows


def excess(way: dict[str, Any]) -> str:
    return f"{way['excess']:+.2%} ± {way['stderr']:.2%}"


def rows(name: str) -> list[list[str]]:
    tables = (blocks, quality, speed, steps, errors, short, prompts)
    return {table.__name__: table for table in tables}[name]()
