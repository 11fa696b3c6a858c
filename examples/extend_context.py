"""Teach a model longer texts: raise the base of its rotary positions, then train it on long texts with attention by cells.

python examples/extend_context.py                # a tiny random model of bytes, without any download; seconds on two cores
python examples/extend_context.py --model FOLDER --text BOOKS NOTES.md --tokens 65536 --steps 200 --save LONGER --out extend.json

It measures a training step with SDPA and with cells in turn: time and memory. Before and after training it measures the loss at
each position of held-out text, and how often a number that was told once in a long text is found again; with exact attention,
which judges the weights alone, and with cells if they train it. "Before" is the model with the raised base. What was measured
is in the file --out after every stage. Ctrl-C and --minutes end a run early: what was measured and trained so far is kept.

Texts are files or folders. They are read in the order given, put one after the other with the model's end mark in between, and
cut into windows: give folders whose neighbouring files have to do with each other. The last ones are held out, or --held-out.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from example_options import Parser, count, device_name, model_name, new_file, positive, usual_device
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import nearfield as nf
from nearfield import hf
from nearfield.app.arguments import counts
from nearfield.app.environment import environment
from nearfield.app.evaluate.models import load_model, longest_context, read_text

CELLS, NAME = nf.Cells(), "nearfield-extend"
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
KINDS = (".txt", ".md", ".rst", ".py")
"""Files that are read from a folder."""
HEAD_ROWS = 2048
"""Positions whose logits over the vocabulary exist at a time."""
BINS = 16
"""of the positions, each with a loss of its own"""
NEEDLE, QUESTION = "\n\nThe secret code of {place} is {number}.\n\n", "\n\nThe secret code of {place} is"
PLACES = "Lisbon Oslo Cairo Lima Quito Hanoi Perth Turin Bergen Porto Dakar Kyoto Denver Boston Vienna Athens Dublin Seoul"
LEAST_RATE = 0.1
"""Where the learning rate ends, as a share of its peak."""

Encode = Callable[[list[str]], list[list[int]]]


@dataclass(frozen=True)
class Plan:
    """What a run does."""

    tokens: int
    """per training step: one window"""
    positions: int
    """that the model is to know; windows of held-out text are as long"""
    lengths: tuple[int, ...]
    """of the texts with needles"""
    steps: int
    rate: float
    method: str = "cells"
    """that it trains with: cells or exact"""
    minutes: float = math.inf
    base: float | None = None
    """of the rotary positions; None: `raised_base`"""
    cases: int = 12
    """needles per length"""
    windows: int = 4
    """of held-out text"""
    rounds: int = 3
    """in which the steps of both ways are timed"""
    checkpointing: bool = False

    @property
    def judges(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(("exact", self.method)))


# Positions


def raised_base(base: float, dim: int, factor: float) -> float:
    """The base with which `factor` times as many positions look like those the model knows.

    Pair i of the `dim` coordinates turns by base^(-2i / dim) per position. With base * factor^(dim / (dim - 2)) the slowest pair,
    i = dim/2 - 1, is `factor` times slower: over the new length it turns as far as it did over the old one, so no distance shows
    the model an angle that it has never seen there. The fast pairs, which tell neighbours apart, hardly change.
    """
    return base * factor ** (dim / (dim - 2)) if factor > 1 else base


def check_rotary(model: Any) -> dict[str, Any]:
    """The part of the config with the base; raises if there is none to raise."""
    rope, name = getattr(model.config.get_text_config(), "rope_parameters", None), type(model).__name__
    if rope and "rope_theta" not in rope:
        rope = rope.get("full_attention")  # layers with a window see no more than it, however long the text
    if not rope or longest_context(model) is None or not hasattr(model.base_model, "rotary_emb"):
        raise ValueError(f"{name} has no rotary positions that can be stretched; give a model that has, such as Llama or Qwen")
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"the positions of {name} are stretched already (rope_type {rope['rope_type']!r}); give its base model")
    return rope


def lengthen(model: Any, positions: int, base: float | None = None) -> dict[str, float]:
    """Let the model know `positions` positions: base and maximum in its config, and the frequencies made from them."""
    config, rope = model.config.get_text_config(), check_rotary(model)
    known, before = config.max_position_embeddings, rope["rope_theta"]
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope["rope_theta"] = base or raised_base(before, int(dim * rope.get("partial_rotary_factor", 1.0)), positions / known)
    config.max_position_embeddings = max(known, positions)
    model.base_model.rotary_emb = type(model.base_model.rotary_emb)(config=config).to(model.device)
    return {"base_before": before, "base": rope["rope_theta"], "positions_before": known}


# Texts


def text_paths(given: list[Path]) -> list[Path]:
    """The files themselves, and all texts in the folders, in order; each once."""
    found: dict[Path, None] = {}
    for path in given:
        if not path.exists():
            raise ValueError(f"there is no text at {path}; give files in UTF-8, or folders of {', '.join(KINDS)} files")
        below = sorted(x for x in path.rglob("*") if x.suffix in KINDS and x.is_file()) if path.is_dir() else [path]
        found.update(dict.fromkeys(x.resolve() for x in below))
    return list(found)


def read_texts(given: list[Path]) -> list[str]:
    """What is in them; those in folders that are no UTF-8 are left out."""
    named = {path.resolve() for path in given}
    texts = []
    for path in text_paths(given):
        try:
            texts.append(read_text(path))
        except ValueError:
            if path in named:
                raise
    return texts


def distinct(texts: list[str], held_out: list[str]) -> list[str]:
    """Texts without copies, and without those that are held out."""
    known = set(held_out)
    return [text for text in dict.fromkeys(texts) if text.strip() and text not in known]


def encoded(encode: Encode, texts: list[str], end: int | None) -> list[Tensor]:
    """The tokens of each text, with an end mark."""
    mark = [] if end is None else [end]
    return [torch.tensor([*ids, *mark], dtype=torch.int32) for ids in encode(texts)] if texts else []


def split_off(documents: list[Tensor], needed: int) -> tuple[list[Tensor], list[Tensor]]:
    """The last documents, as many as have `needed` tokens, are held out, and the others are for training."""
    first, tokens = len(documents), 0
    while first > 1 and tokens < needed:
        first -= 1
        tokens += len(documents[first])
    if first == len(documents):
        raise ValueError("one text cannot be both trained on and held out; give more with --text, or another with --held-out")
    return documents[:first], documents[first:]


def packed(tokens: Tensor, length: int) -> list[Tensor]:
    """Windows of `length` tokens; every token is in one of them. The last window may be shorter."""
    return list(tokens.split(length))


def whole_windows(tokens: Tensor, length: int, what: str) -> list[Tensor]:
    """Windows that are full: a shorter one would be a step, or a loss, of another kind."""
    found = [window for window in packed(tokens, length) if len(window) == length]
    if not found:
        raise ValueError(f"{what} has {len(tokens):,} tokens, and a window {length:,}; give more text, or fewer --tokens")
    return found


# Losses


def token_losses(model: Any, ids: Tensor) -> Tensor:
    """-log p of every token of `ids` `[n]` but the first, `[n - 1]`, with gradients.

    The logits of 65,536 positions over 49,152 words would take 13 GB, and their gradient as much. Here they exist for `HEAD_ROWS`
    positions at a time, and are computed once more for the gradient.
    """
    head = model.get_output_embeddings()

    def losses(some: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(head(some).float(), tokens, reduction="none")

    with arithmetic(model):
        states = model.base_model(ids[None], use_cache=False).last_hidden_state[0, :-1]
        parts = zip(states.split(HEAD_ROWS), ids[1:].long().split(HEAD_ROWS), strict=True)
        return torch.cat([checkpoint(losses, *part, use_reentrant=False, preserve_rng_state=False) for part in parts])


def arithmetic(model: Any) -> Any:
    """Matrix products in bfloat16 on a GPU, while weights stay float32. On a CPU that would save nothing."""
    return torch.autocast("cuda", torch.bfloat16) if model.device.type == "cuda" else nullcontext()


@torch.no_grad()
def check_head(model: Any) -> None:
    """Raises unless logits are a product with the output matrix: some models also scale or cap them."""
    ids = torch.arange(8, device=model.device)[None]
    theirs = model(ids, use_cache=False).logits
    ours = model.get_output_embeddings()(model.base_model(ids, use_cache=False).last_hidden_state)
    if not torch.allclose(theirs.float(), ours.float(), rtol=1e-3, atol=1e-3):
        raise ValueError(f"{type(model).__name__} scales or caps its logits; do the same in token_losses of this example")


# Attention, time, memory


@contextmanager
def attending(model: Any, way: str) -> Iterator[None]:
    """Attention by cells, or exact: by SDPA, with a backend if one is named."""
    hf.register(NAME, CELLS)
    model.set_attn_implementation(NAME if way == "cells" else "sdpa")
    with sdpa_kernel(BACKENDS[way]) if way in BACKENDS else nullcontext():
        yield


@dataclass(frozen=True)
class Clock:
    """When a run has to end."""

    end: float

    def left(self) -> float:
        return self.end - time.monotonic()

    def check(self) -> None:
        if self.left() <= 0:
            raise TimeoutError


def wait(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


def megabytes(model: Any) -> float | None:
    """Most that was allocated on the card since the last call; None without a card."""
    if model.device.type != "cuda":
        return None
    most = torch.cuda.max_memory_allocated() / 2**20
    torch.cuda.reset_peak_memory_stats()
    return most


# Measurements


@torch.no_grad()
def loss_by_position(model: Any, way: str, windows: list[Tensor], clock: Clock) -> list[float]:
    """Mean loss in each of `BINS` parts of the windows."""
    found = []
    with attending(model.eval(), way):
        for window in windows:
            clock.check()
            found.append(token_losses(model, window.to(model.device)).double().cpu())
    return [float(part.mean()) for part in torch.stack(found).mean(0).chunk(BINS)]


def hide(encode: Encode, text: Tensor, tokens: int, depth: float, draw: random.Random) -> tuple[Tensor, int, int]:
    """`tokens` tokens of a text with a number told at `depth` (0: first, 1: last) and asked for at the end, the number included.

    Returns:
        the tokens, how many of them at the end are the number, and where the needle begins.
    """
    words = {"place": draw.choice(PLACES.split()), "number": str(draw.randrange(10_000, 100_000))}
    needle, question, both = encode([x.format(**words) for x in (NEEDLE, QUESTION, f"{QUESTION} {{number}}")])
    if both[: len(question)] != question:
        raise ValueError(f"the tokenizer does not cut {QUESTION!r} before a number; change QUESTION")
    room = tokens - len(needle) - len(both)
    if not 0 < room <= len(text):
        raise ValueError(f"needles in {tokens:,} tokens need as many of held-out text, which has {len(text):,}; give more of it")
    start, place = draw.randrange(len(text) - room + 1), round(depth * room)
    hay = text[start : start + room]
    ids = torch.cat([hay[:place], torch.tensor(needle), hay[place:], torch.tensor(both)])
    return ids, len(both) - len(question), place


@torch.no_grad()
def find_needles(model: Any, way: str, encode: Encode, text: Tensor, plan: Plan, clock: Clock, found: dict[str, Any]) -> None:
    """For each length, at depths from first to last, whether every token of the number is the model's first choice.

    One pass over the whole text: the number itself is read too, each of its tokens after those before it. `found` grows case by
    case, so that an interrupted run has those it got to.
    """
    head = model.get_output_embeddings()
    with attending(model.eval(), way), arithmetic(model):
        for length in plan.lengths:
            rows = found.setdefault(str(length), [])
            for case in range(plan.cases):
                clock.check()
                draw = random.Random(1000 * length + case)
                ids, answer, place = hide(encode, text, length, (case + draw.random()) / plan.cases, draw)
                states = model.base_model(ids[None].to(model.device), use_cache=False).last_hidden_state
                likeliest = head(states[0, -answer - 1 : -1]).argmax(-1).cpu()
                rows.append({"position": place, "found": bool((likeliest == ids[-answer:]).all())})


def one_step(model: Any, optimizer: Any, window: Tensor) -> float:
    """The loss of a step; the weights are changed only if it is finite."""
    loss = token_losses(model, window).mean()
    value = float(loss.detach())
    if not math.isfinite(value):
        raise FloatingPointError(f"the loss is {value}")
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return value


def make_optimizer(model: Any, rate: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), rate, (0.9, 0.95), weight_decay=0.0, fused=model.device.type == "cuda")


def step_times(model: Any, window: Tensor, plan: Plan, clock: Clock) -> dict[str, Any]:
    """Seconds and memory of a training step with SDPA, by its fastest backend, and with cells, in turn.

    With a learning rate of 0, so that all of a step is done and the weights stay as they are.
    """
    model.train()
    optimizer = make_optimizer(model, 0.0)
    window = window.to(model.device)
    cuda = model.device.type == "cuda"

    def timed(way: str) -> float:
        with attending(model, way):
            wait(model)
            start = time.perf_counter()
            one_step(model, optimizer, window)
            wait(model)
            return time.perf_counter() - start

    tried: dict[str, float] = {}
    for backend in BACKENDS if cuda else ("cpu",):
        if backend == "efficient" and tried:
            continue  # for older cards, which have no other; it is not the fastest elsewhere
        try:
            tried[backend] = min(timed(backend), timed(backend))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            continue  # this backend does not serve this model
    if not tried:
        raise ValueError(f"no backend of SDPA trains {type(model).__name__} on {len(window):,} tokens; give another model")
    exact = min(tried, key=tried.__getitem__)
    ways = {"sdpa": exact, "cells": "cells"}
    timed("cells")  # its first step compiles kernels
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    memory: dict[str, float | None] = {}
    for _ in range(plan.rounds):
        for name, way in ways.items():
            clock.check()
            megabytes(model)
            seconds[name].append(timed(way))
            memory[name] = megabytes(model)
    medians = {name: statistics.median(some) for name, some in seconds.items()}
    return {
        "tokens": len(window),
        "backend": exact,
        "tried_seconds": tried,
        "seconds": medians,
        "runs_seconds": seconds,
        "sdpa_over_cells": medians["sdpa"] / medians["cells"],
        "peak_megabytes": memory,
        "checkpointing": plan.checkpointing,
    }


# Training


def rate_at(step: int, steps: int, rate: float) -> float:
    """A tenth of the steps to warm up, then a cosine down to `LEAST_RATE` of the peak."""
    warm = max(1, steps // 10)
    if step < warm:
        return rate * (step + 1) / warm
    progress = (step - warm) / max(1, steps - warm)
    return rate * (LEAST_RATE + (1 - LEAST_RATE) * (1 + math.cos(math.pi * progress)) / 2)


def train(model: Any, way: str, windows: list[Tensor], steps: int, plan: Plan, clock: Clock, done: dict[str, Any]) -> None:
    """Steps on windows in random order, all of them before any comes again. `done` grows step by step."""
    model.train()
    optimizer, order = make_optimizer(model, plan.rate), random.Random(0)
    waiting: list[Tensor] = []
    done.update(steps_planned=steps, losses=[], seconds=[], peak_megabytes=None)
    with attending(model, way):
        for step in range(steps):
            if clock.left() <= 0:
                print(f"no time for more: {step} of {steps} steps were done")
                return
            waiting = waiting or order.sample(windows, len(windows))
            for group in optimizer.param_groups:
                group["lr"] = rate_at(step, steps, plan.rate)
            start = time.perf_counter()
            try:
                loss = one_step(model, optimizer, waiting.pop().to(model.device))
            except FloatingPointError as error:
                raise FloatingPointError(f"{error} at step {step + 1} of {steps}; lower --rate, which is {plan.rate:g}") from None
            wait(model)
            done["losses"].append(round(loss, 5))
            done["seconds"].append(round(time.perf_counter() - start, 4))
            done["peak_megabytes"] = memory = max(filter(None, (megabytes(model), done["peak_megabytes"])), default=None)
            if step % max(1, steps // 20) == 0 or step == steps - 1:
                used = f", {memory:,.0f} MB" if memory else ""
                print(f"step {step + 1} of {steps}: loss {loss:.3f}, {done['seconds'][-1]:.2f} s{used}", flush=True)


def affordable(wanted: int, seconds: float, per_step: float) -> int:
    """Steps that fit, known before the first one: the learning rate comes down by the last."""
    return wanted if seconds == math.inf else max(1, min(wanted, int(seconds / per_step)))


# The run


@dataclass(frozen=True)
class Texts:
    """As tokens."""

    train: Tensor
    held_out: Tensor
    hay: Tensor
    """in which needles are hidden"""


def extend(model: Any, encode: Encode, texts: Texts, plan: Plan, found: dict[str, Any], keep: Callable[[], None]) -> None:
    """Everything, in stages. `found` has what was measured so far, whatever happens; `keep` is called after every stage."""
    clock = Clock(time.monotonic() + 60 * plan.minutes)
    check_head(model)
    check_rotary(model)
    windows = whole_windows(texts.train, plan.tokens, "the text to train on")
    judged = whole_windows(texts.held_out, plan.positions, "the held-out text")[: plan.windows]
    found.update(plan=asdict(plan) | {"minutes": None if plan.minutes == math.inf else plan.minutes}, cells=repr(CELLS))
    sizes = {"train": len(texts.train), "held_out": plan.positions * len(judged), "windows": len(windows)}
    found["text_tokens"] = sizes
    print(f"{sizes['train']:,} tokens to train on, {sizes['held_out']:,} held out", flush=True)
    if plan.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    found["step"] = step = step_times(model, windows[0], plan, clock)
    keep()
    print("a step: " + ", ".join(f"{x:.2f} s with {name}" for name, x in step["seconds"].items()), flush=True)
    exact = step["backend"]

    found["as_it_was"] = {"exact": {"loss": loss_by_position(model, exact, judged, clock)}}
    found["rope"] = lengthen(model, plan.positions, plan.base)
    print("the base of the rotary positions: {base_before:,.0f} before, {base:,.0f} now".format(**found["rope"]), flush=True)

    def judge(stage: str) -> float:
        start = time.monotonic()
        for name in plan.judges:
            way = exact if name == "exact" else name
            own = found.setdefault(stage, {}).setdefault(name, {})
            own["loss"] = loss_by_position(model, way, judged, clock)
            find_needles(model, way, encode, texts.hay, plan, clock, own.setdefault("needles", {}))
            keep()
        print(f"{stage}:\n{summary(found[stage])}", flush=True)
        return time.monotonic() - start

    spent = judge("before")
    per_step = step["seconds"]["cells" if plan.method == "cells" else "sdpa"]
    reserved = Clock(clock.end - 1.1 * spent)  # judging takes as long again
    steps = affordable(plan.steps, reserved.left(), 1.05 * per_step)
    found["training"] = done = {}
    train(model, exact if plan.method == "exact" else plan.method, windows, steps, plan, reserved, done)
    keep()
    judge("after")


def summary(stage: dict[str, Any]) -> str:
    """Losses by position and needles, in lines."""
    lines = []
    for name, own in stage.items():
        lines.append(f"  {name}, loss by position: " + " ".join(f"{x:.3f}" for x in own.get("loss", ())))
        told = (f"{sum(x['found'] for x in rows)} of {len(rows)} at {int(n):,}" for n, rows in own.get("needles", {}).items())
        lines.append(f"  {name}, needles found: " + ", ".join(told))
    return "\n".join(lines)


def write_atomically(path: Path, words: str) -> None:
    draft = path.with_name(f".{path.name}.partial")
    try:
        draft.write_text(words, encoding="utf-8")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """A folder for `from_pretrained`. It appears under its name only once it is complete."""
    draft = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    model.set_attn_implementation("sdpa")
    logging.disable_progress_bar()
    try:
        model.save_pretrained(draft)
        if tokenizer is not None:
            tokenizer.save_pretrained(draft)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def run(model: Any, encode: Encode, texts: Texts, plan: Plan, found: dict[str, Any], keep: Callable[[], None]) -> bool:
    """`extend`; an interruption or the end of the time ends it early. Returns whether there are new weights to save."""
    found["stopped"] = None
    try:
        extend(model, encode, texts, plan, found, keep)
    except KeyboardInterrupt:
        found["stopped"] = "interrupted"
    except TimeoutError:
        found["stopped"] = f"the {plan.minutes:g} minutes were over"
    except FloatingPointError as error:
        found["stopped"] = str(error)
        raise
    except torch.OutOfMemoryError:
        found["stopped"] = "out of memory"
        raise
    finally:
        keep()
    return bool(found.get("training", {}).get("losses"))


def tiny_model() -> Any:
    """A random model of bytes that knows 128 positions."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=256, **sizes, max_position_embeddings=128, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    return LlamaForCausalLM(config)


def encoder(tokenizer: Any) -> Encode:
    if tokenizer is None:
        return lambda texts: [list(text.encode()) for text in texts]
    return lambda texts: tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]


def default_lengths(known: int, positions: int) -> tuple[int, ...]:
    """Doubled from the positions that the model knows: 16,384, 32,768, ..."""
    found = [known * 2**i for i in range(1, 32) if known * 2**i <= positions]
    return tuple(found) or (positions,)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--model", type=model_name, help="folder of a causal language model; default: a tiny random one")
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="files or folders to train on")
    parser.add_argument("--held-out", type=Path, nargs="+", default=[], help="files or folders to judge by")
    parser.add_argument("--tokens", type=count, help="per training step; default: 65,536, and 512 for the tiny model")
    parser.add_argument("--positions", type=count, help="that the model is to know; default: --tokens")
    parser.add_argument("--steps", type=count, help="default: 200, and 20 for the tiny model")
    parser.add_argument("--rate", type=positive, help="peak of the learning rate; default: 2e-4, and 3e-3 for the tiny model")
    parser.add_argument("--base", type=positive, help="of the rotary positions; default: raised with the number of positions")
    parser.add_argument("--method", choices=("cells", "exact"), default="cells", help="attention to train with")
    parser.add_argument("--needles", help="lengths of the texts with needles; default: doubled from what the model knows")
    parser.add_argument("--cases", type=count, default=12, help="needles per length")
    parser.add_argument("--windows", type=count, default=4, help="of held-out text, as long as --positions")
    parser.add_argument("--minutes", type=positive, default=math.inf, help="for all but loading; fewer steps if need be")
    parser.add_argument("--checkpointing", action="store_true", help="compute activations again instead of keeping them")
    parser.add_argument("--save", type=Path, help="new folder for the trained model")
    parser.add_argument("--out", type=new_file, help="JSON file for what was measured")
    parser.add_argument("--device", type=device_name, default=usual_device())
    options = parser.parse_args()
    tiny = options.model is None
    if not tiny and not options.text:
        parser.error("a trained model needs --text")
    if options.save and (options.save.exists() or not options.save.absolute().parent.is_dir()):
        parser.error(f"--save must be a new folder in one that exists, got {options.save}")
    tokens = options.tokens or (512 if tiny else 65_536)
    positions = max(tokens, options.positions or tokens)
    found: dict[str, Any] = {}
    failed: list[OSError] = []

    def keep() -> None:
        """Write what is known. A full disk does not end the run: what comes later may fit, and weights are saved all the same."""
        if not options.out:
            return
        about = {"environment": environment(options.device), "model": options.model or "tiny, random"}
        try:
            write_atomically(options.out, json.dumps({**about, **found}, indent=1) + "\n")
        except OSError as error:
            if not failed:
                told = f"{options.out} cannot be written ({error.strerror}); the run goes on and tries again: free some space"
                print(f"{parser.prog}: {told}", file=sys.stderr)
            failed[:] = [error]
        else:
            failed.clear()

    try:
        # Weights in float32: what a step adds to them is often less than bfloat16 can tell apart.
        model, tokenizer = (tiny_model().to(options.device), None) if tiny else load_model(options.model, options.device)
        known = longest_context(model) or positions
        lengths = tuple(counts("--needles", options.needles)) if options.needles else default_lengths(known, positions)
        plan = Plan(
            tokens,
            positions,
            lengths,
            options.steps or (20 if tiny else 200),
            options.rate or (3e-3 if tiny else 2e-4),
            options.method,
            options.minutes,
            options.base,
            options.cases,
            options.windows,
            checkpointing=options.checkpointing,
        )
        encode, end = encoder(tokenizer), None if tokenizer is None else tokenizer.eos_token_id
        judged = read_texts(options.held_out)
        learnt = distinct(read_texts(options.text) if options.text else list(topics.values()), judged)
        train_on, held_out = encoded(encode, learnt, end), encoded(encode, judged, end)
        if not held_out:
            train_on, held_out = split_off(train_on, max(*lengths, options.windows * positions))
        texts = Texts(torch.cat(train_on), torch.cat(held_out), torch.cat(held_out))
        trained = run(model, encode, texts, plan, found, keep)
    except KeyboardInterrupt:
        parser.exit(130, f"{parser.prog}: interrupted before anything was measured\n")
    except torch.OutOfMemoryError:
        parser.exit(1, f"{parser.prog}: {tokens:,} tokens do not fit into memory; give --checkpointing or fewer --tokens\n")
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    if options.save and trained:
        try:
            save(model, tokenizer, options.save)
        except OSError as error:
            parser.exit(1, f"{parser.prog}: {options.save} cannot be written ({error.strerror or error}); free some space\n")
        print(f"saved: {options.save}, after {len(found['training']['losses'])} steps")
    elif options.save:
        print("nothing was trained, so nothing is saved")
    if failed:
        keep()
    if failed:
        parser.exit(1, f"{parser.prog}: {options.out} cannot be written ({failed[0].strerror}); free some space\n")
    if found["stopped"]:
        parser.exit(130 if found["stopped"] == "interrupted" else 0, f"{parser.prog}: stopped early: {found['stopped']}\n")
    if tiny:
        print("A tiny random model finds no needles. With --model and --text this extends a real one.")


if __name__ == "__main__":
    main()
