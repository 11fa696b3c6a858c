"""Real weights: fine-tune, with perplexity on held-out text and samples before and after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.corpus import Corpus
from experiments.experiment import Row, Rows
from experiments.gpt2_xl.methods import attend
from experiments.gpt2_xl.model import parameters, real_model
from experiments.gpt2_xl.sample import sampled
from experiments.gpt2_xl.sizes import Size
from experiments.gpt2_xl.tokens import split, vocabulary_of, windows_of
from experiments.gpt2_xl.train import in_half, let_go, ready_to_train, train
from nearfield.app.evaluate.measure import token_losses

COMPARED = (("exact", 0), ("cells", 0), ("exact", 1))
"""Methods and orders of the windows. The other order tells how much of a difference is chance."""
RUNS = (*COMPARED, ("topk", 0))


def tune(size: Size, folder: Path, method: str, order: int, corpus: Corpus, device: str, seed: int) -> Rows:
    model, tokenizer, n = real_model(folder, size.tuning.n, device)
    vocabulary = vocabulary_of(tokenizer)
    training, held_out = split(corpus.text, vocabulary, n, size.tuning.held_out)
    held_out = held_out[None].to(device)
    about: Row = {"model": name_of(folder), "method": method, "order": order, "n": n}
    about |= {"corpus": corpus.name, "sha256": corpus.sha256}
    attend(model, method)
    before = perplexity(model, held_out, n)
    count = 0 if order else size.sampled
    shown = [{"when": "before", **one} for one in sampled(model, vocabulary, count, seed)]
    optimizer = ready_to_train(model, n > size.stored, size.tuning.rate)
    losses = train(model, optimizer, windows_of(training, n, seed + order, device), size.tuning.steps)
    del optimizer
    model.gradient_checkpointing_disable()
    found: Row = {"kind": "tuned", **about, "parameters": parameters(model), "steps": size.tuning.steps}
    found |= {"rate": size.tuning.rate, "losses": losses, "held_out": held_out.shape[1]}
    found |= {"before": before, "after": perplexity(model, held_out, n)}
    shown += [{"when": "after", **one} for one in sampled(model, vocabulary, count, seed)]
    attend(model, "exact")
    found["after_exact"] = perplexity(model, held_out, n)
    del model
    let_go()
    return [found, *({"kind": "sample", **about, **one} for one in shown)]


def name_of(path: Path) -> str:
    """Of a model, for people: that of its folder, or of its file."""
    return path.stem if path.is_file() else path.resolve().name


@torch.no_grad()
def perplexity(model: Any, ids: Tensor, n: int) -> float:
    """Of tokens `[1, ...]`, each given those before it in its window of n."""
    model.eval()
    with in_half(str(ids.device)):
        losses = torch.cat([token_losses(model, window) for window in ids.split(n, 1) if window.shape[1] > 1])
    return float(losses.mean().exp())
