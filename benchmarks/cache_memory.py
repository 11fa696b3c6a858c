"""Section of bench_cache.py: does a model find a sentence in a text of more tokens than it knows positions, through `hf.Memory`?

30 times, a sentence with a number is hidden in 51,200 tokens, before the last segment. The model reads the text in chunks whose
positions restart, the memory is saved and loaded, and the model is asked for the number. The control is the same sentence and
question in 1,500 tokens, with exact attention and no memory: it shows what the model can do at all.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from bench_language import NEEDLE, PLACES, QUESTION, hidden, ids_of
from record import each, table
from rich.table import Table
from torch import Tensor

import nearfield as nf
from nearfield import hf
from nearfield.app.evaluate.measure import attending
from nearfield.app.evaluate.settings import usual_segment
from nearfield.hf.memory import PROBES

TOKENS, CASES = 51_200, 30
SHORT, CHUNK, QUICK_CHUNK = 1500, 4096, 128


def memory(model: Any, tokenizer: Any, texts: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """How many numbers greedy generation finds through a memory, and how many in a short text; times and sizes."""
    cases = options.cases or (2 if options.quick else CASES)
    tokens = options.tokens or (512 if options.quick else TOKENS)
    short = min(SHORT, tokens // 2)
    method = nf.Cells(probes=PROBES)
    chunk = QUICK_CHUNK if options.quick else CHUNK
    name, text = next(iter(texts.items()))
    paragraphs = [ids_of(tokenizer, part + "\n\n")[0] for part in re.split(r"\n\s*\n", text[: 40 * tokens]) if part.strip()]
    rows = []
    # A question attends to the memory by cells; within a chunk, and in the short text, attention is exact.
    with attending(model, nf.Exact()), tempfile.TemporaryDirectory() as folder:
        for case in each(range(cases), lambda case: f"case {case + 1}"):
            # `hidden` draws the place and the number first, so that the same seed gives both texts the same ones.
            ids, answer, depth = hidden(tokenizer, paragraphs, tokens, usual_segment(tokens), random.Random(case))
            control, _, _ = hidden(tokenizer, paragraphs, short, usual_segment(short), random.Random(case))
            question = QUESTION.format(place=random.Random(case).choice(PLACES.split()))
            read = ids[:, : -answer - ids_of(tokenizer, question).shape[1]]
            row: dict[str, Any] = {"case": case, "tokens": read.shape[1], "depth": depth}
            row |= ask_memory(model, tokenizer, read, question, ids[0, -answer:], method, chunk, Path(folder) / "memory")
            row["control"] = completes(model, control, answer)
            rows.append(row)
    return {
        "text": name,
        "needle": NEEDLE,
        "question": QUESTION,
        "tokens": tokens,
        "short": short,
        "method": repr(method),
        "chunk": chunk,
        "cases": cases,
        "found": sum(row["found"] for row in rows),
        "control": sum(row["control"] for row in rows),
        "both": sum(row["found"] and row["control"] for row in rows),
        **{what: statistics.median(row[what] for row in rows) for what in ("bytes", "read_s", "save_s", "load_s", "ask_s")},
        "by_case": rows,
    }


def ask_memory(
    model: Any, tokenizer: Any, read: Tensor, question: str, number: Tensor, method: nf.Cells, chunk: int, path: Path
) -> dict[str, Any]:
    """Whether the answer to a question about the text `read` is the number; the size of the file; and seconds."""
    seconds = [time.perf_counter()]
    made = hf.Memory.read(model, read.to(model.device), method, positions="restart", chunk=chunk)
    _lap(model, seconds)
    made.save(path)
    del made
    _lap(model, seconds)
    loaded = hf.Memory.load(path, model).to(model.device)
    _lap(model, seconds)
    said = loaded.ask(model, tokenizer, question, max_new_tokens=len(number))
    _lap(model, seconds)
    spent = (after - before for before, after in itertools.pairwise(seconds))
    return {
        "found": said.strip() == tokenizer.decode(number).strip(),
        "said": said,
        "bytes": path.stat().st_size,
        **dict(zip(("read_s", "save_s", "load_s", "ask_s"), spent, strict=True)),
    }


def _lap(model: Any, seconds: list[float]) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    seconds.append(time.perf_counter())


@torch.no_grad()
def completes(model: Any, ids: Tensor, answer: int) -> bool:
    """Whether greedy generation would say the last `answer` tokens."""
    logits = model(ids.to(model.device), use_cache=False, logits_to_keep=answer + 1).logits[0, :-1]
    return bool((logits.argmax(-1).cpu() == ids[0, -answer:]).all())


def show_memory(results: dict[str, Any]) -> Table:
    title = f"numbers found in {results['tokens']:,} tokens of {results['text']}, read in chunks of {results['chunk']:,}"
    found = table("found", f"in {results['short']:,} tokens", "in both", "of", "file", "read", "save", "load", "ask", title=title)
    counts = (str(results[what]) for what in ("found", "control", "both", "cases"))
    times = (f"{results[what]:.2f} s" for what in ("read_s", "save_s", "load_s", "ask_s"))
    found.add_row(*counts, f"{results['bytes'] / 1e6:,.0f} MB", *times)
    return found
