"""Loss curves from the same random weights on the same windows, and samples from prompts afterwards."""

from __future__ import annotations

from experiments.corpus import Corpus
from experiments.experiment import Row, Rows
from experiments.gpt2_xl.methods import attend
from experiments.gpt2_xl.model import parameters, random_model
from experiments.gpt2_xl.sample import sampled
from experiments.gpt2_xl.sizes import Size
from experiments.gpt2_xl.tokens import BYTES, split, windows_of
from experiments.gpt2_xl.train import let_go, ready_to_train, train

METHODS = ("exact", "cells")


def curve(size: Size, method: str, n: int, steps: int, corpus: Corpus, device: str, seed: int) -> Rows:
    model = random_model(size.shape, n, device, seed)
    attend(model, method)
    optimizer = ready_to_train(model, n > size.stored, size.rate)
    windows = windows_of(split(corpus.text, BYTES, n, 0)[0], n, seed, device)
    losses = train(model, optimizer, windows, steps)
    about: Row = {"model": size.shape.name, "method": method, "n": n, "corpus": corpus.name, "sha256": corpus.sha256}
    found: Row = {"kind": "curve", **about, "parameters": parameters(model), "steps": steps, "rate": size.rate, "losses": losses}
    del optimizer
    count = size.sampled if n == min(size.curves) else 0
    shown = [{"kind": "sample", **about, "when": "after", **one} for one in sampled(model, BYTES, count, seed)]
    del model
    let_go()
    return [found, *shown]
