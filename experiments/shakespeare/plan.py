"""One unit per seed, context and method: train a model, look at it on the way, let it write."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import torch

from experiments.corpus import Corpus, load_corpus
from experiments.digest import digest
from experiments.experiment import Done, Row, Rows, Unit
from experiments.settings import Settings
from experiments.shakespeare.evaluate import WARMTH, attention_errors, keys, perplexity, perplexity_with, write
from experiments.shakespeare.methods import CAPTURED, method
from experiments.shakespeare.model import GPT
from experiments.shakespeare.sizes import ON_CPU, ON_GPU, QUICK, Sizes
from experiments.shakespeare.text import TRAINED, Text, numbered, windows
from experiments.shakespeare.train import BETAS, DECAY, EAGER_STEPS, LARGEST_GRADIENT, LEAST_RATE, RATE, Trainer


def plan(settings: Settings) -> list[Unit]:
    """Context by context, and seed after seed, all methods of the first before those of the next: a run that is cut ends with
    whole seeds of the first contexts."""
    runs = QUICK if settings.quick else ON_CPU if torch.device(settings.device).type == "cpu" else ON_GPU
    corpus = load_corpus(settings)
    text = numbered(corpus, max(sizes.context for sizes in runs), settings.device)

    def unit(sizes: Sizes, name: str, number: int) -> Unit:
        seed = settings.seed + number

        def measured(done: Done) -> Rows:
            if settings.is_late():
                return [{"kind": "left", "context": sizes.context, "method": name, "seed": seed, "limit": settings.total_limit}]
            patient = replace(sizes, seconds=sizes.seconds * settings.jobs)  # those beside it take their share
            return measure(corpus, text, patient, name, seed, timed=settings.jobs == 1)

        return Unit(
            # The first seed is not named: there was a time when it was the only one.
            f"context={sizes.context}, {name}" + (f", seed={seed}" if number else ""),
            measured,
            lambda rows: stale(rows[-1], sizes),
            made_with(sizes, name),
            corpus,
        )

    return [unit(sizes, name, i) for sizes in runs for i in range(sizes.seeds) for name in sizes.methods]


def stale(last: Row, sizes: Sizes) -> bool:
    """Whether a model was left to the next run, or ran out of time and there is more of it now."""
    return last["kind"] == "left" or (last["stopped"] and last["limit"] < sizes.seconds)


def made_with(sizes: Sizes, name: str) -> str:
    """The digest of all that rows depend on, but for the text, the seed and the limit of time."""
    used = [method(one, sizes.context) for one in (name, *others(sizes, name))]
    training = (RATE, LEAST_RATE, BETAS, DECAY, LARGEST_GRADIENT, TRAINED, WARMTH)
    return digest(replace(sizes, methods=(), seconds=0.0), used, training)


def others(sizes: Sizes, name: str) -> tuple[str, ...]:
    """The methods that a model trained with this one is used with as well."""
    return tuple(x for x in ((*sizes.methods, *sizes.only_used) if name == "exact" else ("exact",)) if x != name)


def measure(corpus: Corpus, text: Text, sizes: Sizes, name: str, seed: int, timed: bool = True) -> Rows:
    """Rows of kind "evaluation", and one of kind "end"; the time of a step is taken where nothing else runs."""
    device = text.train.device
    about: Row = {"context": sizes.context, "method": name, "seed": seed}
    chosen = method(name, sizes.context)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # weights and dropout
        model = GPT(sizes, len(text.symbols)).to(device)
        model.attend_with(chosen)
        trainer = Trainer(model, text.train, sizes, seed, captured=device.type == "cuda" and name in CAPTURED)
        rows = [{"kind": "evaluation", **about, **row} for row in train(trainer, text, sizes)]
        model.eval()
        judged = windows(text.validation, sizes.context, sizes.evaluated * sizes.batch)
        prompt = text.validation[: sizes.context - sizes.written]
        sample = text.characters(write(model, prompt, sizes.written, seed))
        swapped = {
            other: perplexity_with(model, method(other, sizes.context), chosen, judged, sizes.batch)
            for other in others(sizes, name)
        }
        near = keys(model, judged, chosen)
        model.train()
        # The graph first: it owns the memory of the gradients until a step without it makes others.
        graph_seconds = trainer.seconds(trainer.graph.replay) if timed and trainer.graph is not None else None
        seconds = trainer.seconds(trainer.update) if timed else None
    done = rows[-1]["iteration"]
    end: Row = {
        "kind": "end",
        **about,
        "iterations": done,
        "asked": sizes.iterations,
        "stopped": done < sizes.iterations,
        "limit": sizes.seconds,
        "seconds": seconds,
        "graph_seconds": graph_seconds,
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
        "rotary": sizes.rotary,
        "batch": sizes.batch,
    }
    return [*rows, end]


def train(trainer: Trainer, text: Text, sizes: Sizes) -> Rows:
    """Evaluations on the way. Past the limit of time it evaluates once more and stops."""
    model = trainer.model
    parts = {
        name: windows(ids, sizes.context, sizes.evaluated * sizes.batch)
        for name, ids in (("train", text.train), ("validation", text.validation))
    }
    rows: Rows = []
    begun = math.inf
    for iteration in range(sizes.iterations + 1):
        if iteration == EAGER_STEPS + 1:
            # Time to compile kernels and to capture a graph is not counted: not every method needs it.
            begun = time.perf_counter()
        late = time.perf_counter() - begun > sizes.seconds
        if iteration % sizes.interval == 0 or iteration == sizes.iterations or late:
            trainer.wait()
            model.eval()
            found = {name: perplexity(model, part, sizes.batch) for name, part in parts.items()}
            rows.append({"iteration": iteration, **found, **attention_errors(model, parts["validation"][: sizes.batch])})
            model.train()
        if late or iteration == sizes.iterations:
            break
        trainer.step(iteration)
    return rows
