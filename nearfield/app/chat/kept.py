"""What a model keeps of documents, in a file beside them: found again if documents, model and settings are the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearfield.cells.method import Cells
from nearfield.hf.memory import Memory, plan_reading
from nearfield.hf.memory_file import Reading, fingerprint, read_header


def check_place(place: Path) -> None:
    """Raises if there is a file that is no memory: it must not be replaced."""
    if place.exists() and place.stat().st_size:
        try:
            read_header(place)
        except ValueError as error:
            raise ValueError(
                f"{place} is in the way ({error}); remove it, name another file with --memory, or keep nothing with --no-keep"
            ) from error


def load_kept(place: Path | None, model: Any, tokens: Tensor, method: Cells) -> tuple[Memory | None, str]:
    """The memory in a file, if it is what this model would keep of these tokens; else None, and why."""
    if place is None or not place.exists() or not place.stat().st_size:
        return None, ""
    if read_header(place)["fingerprint"] != fingerprint(model):
        return None, "another model, or another dtype"
    memory = Memory.load(place, model)
    if not torch.equal(memory.tokens, tokens):
        return None, "other documents, or the documents have changed"
    if memory.method != method or memory.reading != usual_reading(model, tokens, method):
        return None, "other settings"
    return memory, ""


def usual_reading(model: Any, tokens: Tensor, method: Cells) -> Reading:
    """How a model reads tokens `[1, length]`. Raises ValueError if it cannot."""
    return plan_reading(model.config.get_text_config(), tokens.shape[1], method.sinks, None, None)


def read_new(model: Any, tokens: Tensor, method: Cells, place: Path | None, progress: Callable[[float], None]) -> Memory:
    """Let the model read tokens `[1, length]`, and keep what it remembers in a file. `progress` is told which share is done."""
    length, chunk = tokens.shape[1], usual_reading(model, tokens, method).chunk
    # A text that is read as one sequence is a single call of the model, so the layers are counted as well.
    parts = [module for module in model.modules() if hasattr(module, "layer_idx")]
    done, passed = 0, 0

    def part_done(*_: Any) -> None:
        nonlocal passed
        passed += 1
        progress((done + min(chunk, length - done) * min(1.0, passed / len(parts))) / length)

    def chunk_done(now: int) -> None:
        nonlocal done, passed
        done, passed = now, 0
        progress(done / length)

    hooks = [part.register_forward_hook(part_done) for part in parts]
    try:
        memory = Memory.read(model, tokens, method, progress=chunk_done)
    finally:
        for hook in hooks:
            hook.remove()
    if place is not None:
        memory.save(place)
    return memory
