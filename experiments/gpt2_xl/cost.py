"""Time and memory of a training step at one context, by method."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from experiments import isolate
from experiments.experiment import Row, Rows
from experiments.gpt2_xl.methods import METHODS, attend
from experiments.gpt2_xl.model import parameters, random_model
from experiments.gpt2_xl.sizes import Size
from experiments.gpt2_xl.tokens import BYTES, split, windows_of
from experiments.gpt2_xl.train import let_go, ready_to_train, step

TURNS = 2
"""Of every method, after one that does not count: kernels are compiled, moments made."""
PATIENCE = 30.0
"""Seconds that a method may take at one context: a slow one has fewer turns."""
MEGABYTE = 1 << 20


def methods_at(size: Size, n: int) -> list[str]:
    return [method for method in METHODS if n <= size.longest.get(method, n)]


def cost(size: Size, n: int, recompute: bool, text: str, device: str, seed: int) -> Rows:
    """All methods on one model, taking turns. A method that has no memory left is out, and the others go on.

    Args:
        recompute: compute layers again in the backward pass instead of keeping all activations.
    """
    model = random_model(size.shape, n, device, seed)
    optimizer = ready_to_train(model, recompute, rate=1e-6)
    windows = windows_of(split(text, BYTES, n, 0)[0], n, seed, device)
    turns: dict[str, list[isolate.Measured]] = {method: [] for method in methods_at(size, n)}
    for _ in range(1 + TURNS):
        for method, found in turns.items():
            if goes_on(found):
                attend(model, method)
                found.append(isolate.here(prepare, model, optimizer, windows))
                if found[-1].status != "ok":
                    optimizer.zero_grad(set_to_none=True)
                    let_go()
    # Weights and two moments, all in float32; gradients come and go with the step.
    held = 3 * 4 * parameters(model) / MEGABYTE
    about: Row = {"kind": "cost", "model": size.shape.name, "parameters": parameters(model), "n": n, "held": held}
    about["recomputed"] = recompute
    del model, optimizer
    let_go()
    return [{**about, "method": method, **told(found, n, held)} for method, found in turns.items()]


def goes_on(turns: list[isolate.Measured]) -> bool:
    """Whether a method has the memory and the time for another turn. The first that counts is never left out."""
    spent = [sum(turn.seconds) for turn in turns]
    in_time = len(turns) < 2 or sum(spent) + spent[-1] <= PATIENCE
    return in_time and all(turn.status == "ok" for turn in turns)


def prepare(
    model: Any, optimizer: torch.optim.Optimizer, windows: Iterator[Tensor]
) -> tuple[Callable[[], Tensor], Callable[[Tensor], dict[str, Any]]]:
    """For `isolate`: a step on a window that lies ready."""
    window = next(windows)
    return lambda: step(model, optimizer, window), lambda loss: {"loss": float(loss)}


def told(turns: list[isolate.Measured], n: int, held: float) -> Row:
    """Medians of the turns that count. Peak memory is told on a GPU: a CPU's allocator keeps what the turn before has freed."""
    if turns[-1].status != "ok":
        return {"status": turns[-1].status}
    counted = turns[1:]
    runs = [seconds for turn in counted for seconds in turn.seconds]
    middle = statistics.median(runs)
    found: Row = {"status": "ok", "seconds": middle, "runs": runs, "tokens_per_second": n / middle, "megabytes": None}
    if torch.cuda.is_initialized():
        found["megabytes"] = held + max(turn.megabytes or 0.0 for turn in counted)
    return found
