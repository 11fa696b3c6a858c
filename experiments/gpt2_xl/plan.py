"""The units: the cost of a step at every context, loss curves, and, given a model, its fine-tuning."""

from __future__ import annotations

from experiments.corpus import load_corpus
from experiments.digest import digest
from experiments.experiment import Rows, Unit
from experiments.gpt2_xl import curves
from experiments.gpt2_xl.cost import cost, methods_at
from experiments.gpt2_xl.curves import curve
from experiments.gpt2_xl.methods import OURS
from experiments.gpt2_xl.model import need_transformers
from experiments.gpt2_xl.sample import CHOICES, PROMPTS, TEMPERATURE
from experiments.gpt2_xl.sizes import size_of
from experiments.gpt2_xl.tokens import TESTED
from experiments.gpt2_xl.train import ROWS, WARM_UP
from experiments.gpt2_xl.tune import RUNS, name_of, tune
from experiments.settings import Settings


def plan(settings: Settings) -> list[Unit]:
    """A model that is named adds units to those without one. The longest contexts, which cost most, come last."""
    size, device, seed = size_of(settings), settings.device, settings.seed
    need_transformers(size.shape, max(size.contexts))
    if settings.model is not None and not settings.model.exists():
        raise ValueError(f"--model {settings.model} is not there; give the folder of a causal language model, or a .gguf file")
    corpus = load_corpus(settings)
    training = (WARM_UP, ROWS)
    writing = (size.sampled, PROMPTS, TEMPERATURE, CHOICES)

    def step_at(n: int, recompute: bool) -> Unit:
        # What a step costs does not depend on what it reads.
        key = f"cost, n={n}" + ("" if recompute else ", all kept")
        made = digest(size.shape, [(method, OURS.get(method)) for method in methods_at(size, n)], training)
        return Unit(key, lambda done: cost(size, n, recompute, corpus.text, device, seed), digest=made)

    def losses(method: str, n: int, steps: int) -> Unit:
        key = f"losses, {method}, n={n}"
        made = digest(size.shape, OURS.get(method), steps, size.rate, n > size.stored, min(size.curves), training, writing)
        return Unit(key, lambda done: curve(size, method, n, steps, corpus, device, seed), digest=made, corpus=corpus)

    def tuned(method: str, order: int) -> Unit:
        folder = settings.model
        assert folder is not None
        key = f"{name_of(folder)}, {method}" + (", other order" if order else "")
        made = digest(OURS.get(method), size.tuning, size.stored, TESTED, training, writing)
        return Unit(key, lambda done: tune(size, folder, method, order, corpus, device, seed), digest=made, corpus=corpus)

    longest = max(size.curves)
    return [
        *(step_at(n, recompute=False) for n in size.contexts if n <= size.stored),
        *(step_at(n, recompute=True) for n in size.contexts if n <= longest),
        *(losses(method, n, steps) for n, steps in size.curves.items() for method in curves.METHODS),
        *(tuned(method, order) for method, order in RUNS if settings.model is not None),
        *(step_at(n, recompute=True) for n in size.contexts if n > longest),
    ]


def keep(rows: Rows) -> bool:
    """A model that was fine-tuned stays in the results when it, or any, is not named again."""
    return any(row["kind"] == "tuned" for row in rows)
