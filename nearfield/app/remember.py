"""`nearfield remember` and `nearfield ask`: a model reads a text once, and answers questions about it later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from nearfield.app import arguments
from nearfield.app.arguments import check_file, check_model, check_question
from nearfield.app.evaluate.models import load_model, placement, read_text, token_ids
from nearfield.crossover import dtype_name
from nearfield.hf.register import register


def remember(
    model_name: str,
    text: Path,
    out: Path,
    *,
    positions: str | None,
    chunk: int | None,
    device: torch.device | None,
    dtype: torch.dtype | None,
    download: bool,
) -> None:
    """All of `nearfield remember`. Raises ValueError, OSError or ImportError with a remedy if it cannot be done."""
    check_file("--out", out)
    if not read_text(text).strip():
        raise ValueError(f"{text} has no tokens; give a text to read")
    check_model(model_name)
    console = Console(stderr=True)
    with console.status("importing Transformers"):
        from nearfield.hf.memory import Memory
        from nearfield.hf.memory_file import POSITIONS

    if positions not in (None, *POSITIONS):
        raise ValueError(f"--positions must be one of {', '.join(POSITIONS)}, got {positions!r}")
    model, tokenizer = loaded(console, model_name, device, dtype, download)
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
    plain: bool,
    device: torch.device | None,
    dtype: torch.dtype | None,
    download: bool,
) -> None:
    """All of `nearfield ask`. Raises ValueError, OSError or ImportError with a remedy if it cannot be done."""
    check_question(question)
    if not memory.is_file():
        raise FileNotFoundError(f"--memory {memory} is not a file; `nearfield remember MODEL TEXT -o {memory}` makes one")
    check_model(model_name)
    console = Console(stderr=True)
    with console.status("importing Transformers"):
        # These first: without Transformers they say what to install.
        from nearfield.hf.memory import Memory
        from nearfield.hf.memory_file import read_header

        from transformers import TextStreamer  # isort: skip
    was = arguments.dtype(read_header(memory)["dtype"])
    if dtype not in (None, was):
        raise ValueError(
            f"memory {memory} was made in {dtype_name(was)}; load it in {dtype_name(was)} (--dtype {dtype_name(was)})"
        )
    model, tokenizer = loaded(console, model_name, device, was, download)
    with console.status(f"reading {memory}"):
        remembered = Memory.load(memory, model)
    # Every word is printed as soon as it is known.
    words = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    remembered.ask(
        model, tokenizer, question if plain else in_template(tokenizer, question), max_new_tokens=tokens, streamer=words
    )


def in_template(tokenizer: Any, question: str) -> str:
    """The question as a turn of a chat that the model is to answer, if the tokenizer has a template for that."""
    if not getattr(tokenizer, "chat_template", None):
        return question
    turn = [{"role": "user", "content": question}]
    found: str = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    return found


def loaded(
    console: Console, name: str, device: torch.device | None, dtype: torch.dtype | None, download: bool
) -> tuple[Any, Any]:
    """A model that attends by nearfield, and its tokenizer."""
    with console.status(f"loading {name}"):
        model, tokenizer = load_model(name, *placement(device, dtype), download)
    register()
    model.set_attn_implementation("nearfield")
    return model, tokenizer
