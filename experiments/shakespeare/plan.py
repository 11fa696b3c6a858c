"""One unit per context and method: train a model, look at it on the way, let it write."""

from __future__ import annotations

import time

import torch

from experiments.corpus import Corpus, load_corpus
from experiments.experiment import Row, Rows, Unit
from experiments.settings import Settings
from experiments.shakespeare.evaluate import attention_errors, keys, perplexity, perplexity_with, write
from experiments.shakespeare.methods import CAPTURED, method
from experiments.shakespeare.model import GPT
from experiments.shakespeare.sizes import ON_CPU, ON_GPU, QUICK, Sizes
from experiments.shakespeare.text import Text, numbered, windows
from experiments.shakespeare.train import Trainer


def plan(settings: Settings) -> list[Unit]:
    runs = QUICK if settings.quick else ON_CPU if torch.device(settings.device).type == "cpu" else ON_GPU
    corpus = load_corpus(settings)
    text = numbered(corpus, max(sizes.context for sizes in runs), settings.device)

    def unit(sizes: Sizes, name: str) -> Unit:
        return Unit(
            f"context={sizes.context}, {name}",
            lambda done: measure(corpus, text, sizes, name, settings.seed),
            lambda rows: stale(rows[-1], corpus, sizes),
        )

    return [unit(sizes, name) for sizes in runs for name in sizes.methods]


def stale(end: Row, corpus: Corpus, sizes: Sizes) -> bool:
    """Whether a model was trained on another text, or for another time."""
    longer = end["stopped"] and end["limit"] < sizes.seconds
    return longer or (end["sha256"], end["asked"]) != (corpus.sha256, sizes.iterations)


def measure(corpus: Corpus, text: Text, sizes: Sizes, name: str, seed: int) -> Rows:
    """Rows of kind "evaluation", and one of kind "end"."""
    device = text.train.device
    about: Row = {"context": sizes.context, "method": name}
    chosen = method(name, sizes.context)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # weights and dropout
        model = GPT(sizes, len(text.symbols)).to(device)
        model.attend_with(chosen)
        trainer = Trainer(model, text.train, sizes, seed, captured=device.type == "cuda" and name in CAPTURED)
        rows, seconds = train(trainer, text, sizes)
        rows = [{"kind": "evaluation", **about, **row} for row in rows]
        model.eval()
        judged = windows(text.validation, sizes.context, sizes.evaluated * sizes.batch)
        prompt = text.validation[: sizes.context - sizes.written]
        sample = text.characters(write(model, prompt, sizes.written, seed))
        others = sizes.methods if name == "exact" else ("exact",)
        swapped = {
            other: perplexity_with(model, method(other, sizes.context), chosen, judged, sizes.batch)
            for other in others
            if other != name
        }
        near = keys(model, judged, chosen)
    done = rows[-1]["iteration"]
    end: Row = {
        "kind": "end",
        **about,
        "iterations": done,
        "asked": sizes.iterations,
        "stopped": done < sizes.iterations,
        "limit": sizes.seconds,
        "seconds": seconds / max(1, done),
        "keys": near,
        "swapped": swapped,
        "prompt": text.characters(prompt[-32:]),
        "sample": sample,
        "corpus": corpus.name,
        "sha256": corpus.sha256,
        "characters": len(corpus.text),
        "parameters": model.size(),
        "layers": sizes.layers,
        "heads": sizes.heads,
        "width": sizes.width,
        "dropout": sizes.dropout,
        "batch": sizes.batch,
    }
    return [*rows, end]


def train(trainer: Trainer, text: Text, sizes: Sizes) -> tuple[Rows, float]:
    """Evaluations on the way, and the seconds that the steps took. Past the limit of time it evaluates once more and stops."""
    model = trainer.model
    parts = {
        name: windows(ids, sizes.context, sizes.evaluated * sizes.batch)
        for name, ids in (("train", text.train), ("validation", text.validation))
    }
    rows: Rows = []
    spent = 0.0
    begun = since = time.perf_counter()
    for iteration in range(sizes.iterations + 1):
        late = time.perf_counter() - begun > sizes.seconds
        if iteration % sizes.interval == 0 or iteration == sizes.iterations or late:
            wait(trainer)
            spent += time.perf_counter() - since
            model.eval()
            found = {name: perplexity(model, part, sizes.batch) for name, part in parts.items()}
            rows.append({"iteration": iteration, **found, **attention_errors(model, parts["validation"][: sizes.batch])})
            model.train()
            since = time.perf_counter()
        if late or iteration == sizes.iterations:
            break
        trainer.step(iteration)
    return rows, spent


def wait(trainer: Trainer) -> None:
    if trainer.train.is_cuda:
        torch.cuda.synchronize(trainer.train.device)
