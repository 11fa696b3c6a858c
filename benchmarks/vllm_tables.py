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


def excess(way: dict[str, Any]) -> str:
    return f"{way['excess']:+.2%} ± {way['stderr']:.2%}"


def rows(name: str) -> list[list[str]]:
    return {"blocks": blocks, "quality": quality, "speed": speed}[name]()
