"""The units: the cost of a step at every context, loss curves, and, given a model, its fine-tuning."""

from __future__ import annotations

from experiments.corpus import load_corpus
from experiments.experiment import Rows, Unit
from experiments.gpt2_xl import curves
from experiments.gpt2_xl.cost import cost
from experiments.gpt2_xl.curves import curve
from experiments.gpt2_xl.model import need_transformers
from experiments.gpt2_xl.sizes import size_of
from experiments.gpt2_xl.tune import RUNS, name_of, tune
from experiments.settings import Settings


def plan(settings: Settings) -> list[Unit]:
    """A model that is named adds units to those without one."""
    need_transformers()
    if settings.model is not None and not settings.model.exists():
        raise ValueError(f"--model {settings.model} is not there; give the folder of a causal language model, or a .gguf file")
    size, device, seed = size_of(settings), settings.device, settings.seed
    corpus = load_corpus(settings)

    def other_text(rows: Rows) -> bool:
        return any(row["sha256"] != corpus.sha256 for row in rows)

    def step_at(n: int, recompute: bool) -> Unit:
        # What a step costs does not depend on what it reads.
        key = f"cost, n={n}" + ("" if recompute else ", all kept")
        return Unit(key, lambda done: cost(size, n, recompute, corpus.text, device, seed))

    def losses(method: str, n: int, steps: int) -> Unit:
        key = f"losses, {method}, n={n}"
        return Unit(key, lambda done: curve(size, method, n, steps, corpus, device, seed), other_text)

    def tuned(method: str, order: int) -> Unit:
        folder = settings.model
        assert folder is not None
        key = f"{name_of(folder)}, {method}" + (", other order" if order else "")
        return Unit(key, lambda done: tune(size, folder, method, order, corpus, device, seed), other_text)

    return [
        *(losses(method, n, steps) for n, steps in size.curves.items() for method in curves.METHODS),
        *(tuned(method, order) for method, order in RUNS if settings.model is not None),
        *(step_at(n, recompute=False) for n in size.contexts if n <= size.stored),
        *(step_at(n, recompute=True) for n in size.contexts),
    ]
