"""`nearfield remember` and `nearfield ask`: a model reads a text once, and answers questions about it later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from nearfield.app.evaluate.models import load_model, placement, token_ids
from nearfield.hf.register import register


def remember(
    model_name: str,
    text: Path,
    out: Path,
    *,
    positions: str | None,
    chunk: int | None,
    device: str | None,
    dtype: torch.dtype | None,
    download: bool,
) -> None:
    """All of `nearfield remember`. Raises ValueError, OSError or ImportError with a remedy if it cannot be done."""
    from nearfield.hf.memory import Memory

    if out.is_dir() or not out.absolute().parent.is_dir():
        raise ValueError(f"--out must be a file in an existing folder, got {out}")
    console = Console(stderr=True)
    model, tokenizer = _loaded(console, model_name, device, dtype, download)
    tokens = token_ids(tokenizer, text).to(model.device)
    if tokens.shape[1] == 0:
        raise ValueError(f"{text} has no tokens; give a text to read")
    columns = (TextColumn("tokens read"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=tokens.shape[1])

        def advance(done: int) -> None:
            progress.update(bar, completed=done)

        memory = Memory.read(model, tokens, positions=positions, chunk=chunk, progress=advance)
    with console.status(f"writing {out}"):
        memory.save(out)
    reading = memory.reading
    how = "as one sequence" if reading.positions == "running" else f"in chunks of {reading.chunk:,}, each by itself"
    size = out.stat().st_size / 1e6
    print(f"{tokens.shape[1]:,} tokens of {text.name}, read {how}: {out}, {size:,.1f} MB")


def ask(
    model_name: str,
    memory: Path,
    question: str,
    *,
    tokens: int,
    device: str | None,
    dtype: torch.dtype | None,
    download: bool,
) -> None:
    """All of `nearfield ask`. Raises ValueError, OSError or ImportError with a remedy if it cannot be done."""
    from nearfield.hf.memory import Memory

    if not memory.is_file():
        raise FileNotFoundError(f"--memory {memory} is not a file; `nearfield remember MODEL TEXT -o {memory}` makes one")
    console = Console(stderr=True)
    model, tokenizer = _loaded(console, model_name, device, dtype, download)
    with console.status(f"reading {memory}"):
        remembered = Memory.load(memory, model)
    with console.status("answering"):
        answer = remembered.ask(model, tokenizer, question, max_new_tokens=tokens)
    print(answer)


def _loaded(console: Console, name: str, device: str | None, dtype: torch.dtype | None, download: bool) -> tuple[Any, Any]:
    """A model that attends by nearfield, and its tokenizer."""
    with console.status(f"loading {name}"):
        model, tokenizer = load_model(name, *placement(device, dtype), download)
    register()
    model.set_attn_implementation("nearfield")
    return model, tokenizer
