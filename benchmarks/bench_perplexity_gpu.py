"""Perplexity of long texts by position: exact attention, cells, and the rules of others at equal keys read.

python benchmarks/bench_perplexity_gpu.py --model models/qwen2.5-coder-1.5b --text TEXT   # results/perplexity_gpu.json
python benchmarks/bench_perplexity_gpu.py --model models/gemma-3-270m --text TEXT         # adds another model
python benchmarks/bench_perplexity_gpu.py --model DIR --section writing --ways topk-6 cells-6
python benchmarks/bench_perplexity_gpu.py --model DIR --device cpu --tokens 2048          # small enough for a CPU
python benchmarks/bench_perplexity_gpu.py --model DIR --text TEXT --prepare FILE          # tokens, to be taken elsewhere
python benchmarks/bench_perplexity_gpu.py --model DIR --prepared FILE                     # there, without a tokenizer
python benchmarks/bench_perplexity_gpu.py --plot-only                                     # docs/figures/perplexity.png
python benchmarks/bench_perplexity_gpu.py --quick                                         # tiny, anywhere: to see that it runs

reading     whole texts in one pass, as a prompt is read
writing     all but the last 1,024 tokens are read exactly; each of these is then predicted as a step of an answer would be
both-rules  with --both-rules TOKENS: the beginnings of the texts, read by the rules of others, which are slow

Ways are those of `nearfield ruler` (docs/ruler.md), texts those of perplexity_texts.py. All ways have the same tokens and
targets, so differences are taken token by token. Steps of a CellCache are computed one by one, for all texts together and in a
CUDA graph where the model has one; rows of exact attention and of rules some hundred at a time. Rules serve the first text of
each kind, unless --rule-texts says more. Results are written after every text and every CellCache: a run that ends early, or at
--minutes, has all until then, and another one adds to them.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import perplexity_plot
import perplexity_texts
import record
import torch
from gpu_timing import CUDA, card, wait
from perplexity_measure import (
    compared,
    keys_of,
    pooled,
    read_prompts,
    reading_losses,
    rows_losses,
    steps_losses,
)
from perplexity_texts import Text

from nearfield.app.ruler.ways import EXACT, RECORDED, SHARES, WAYS, WEIGHTS, CellWay, PeerWay

FILE = "perplexity_gpu"
TOKENS, WRITTEN = 32_768, 1024
PARTS = {"reading": 16, "writing": 8, "both-rules": 16}
"""Stretches of a text for which losses are given."""
READ = ("default", "cells", "queries", "shared", *(f"cells-{percent:g}-both" for percent in SHARES))
STEPPED = ("exact+cache", *(f"cells-{percent:g}" for percent in SHARES), *(f"weight-{percent:g}" for percent in WEIGHTS))
BY_RULE = tuple(name for name, way in WAYS.items() if isinstance(way, PeerWay) and not way.both)
BOTH = tuple(name for name, way in WAYS.items() if isinstance(way, PeerWay) and way.both)
PASS = "one pass"
"""Exact attention again, computed in another way: the difference is that of rounding."""


class OutOfTime(Exception):
    pass


class Clock:
    """Tells how long a stage took, and ends a run in time."""

    def __init__(self, minutes: float) -> None:
        self.end = time.perf_counter() + 60 * minutes

    def timed(self, what: str, call: Callable[[], Any]) -> tuple[Any, float]:
        if time.perf_counter() > self.end:
            raise OutOfTime(what)
        wait()
        start = time.perf_counter()
        found = call()
        wait()
        spent = time.perf_counter() - start
        print(f"{spent:7.2f} s  {what}", flush=True)
        return found, spent


def served(texts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The texts with the most ways, all with the same ones: only there are excesses of all ways those of the same tokens."""
    most = max(texts, key=lambda text: len(text["ways"]))["ways"].keys()
    return [text for text in texts if text["ways"].keys() == most]


def identity(found: dict[str, Any]) -> list[Any]:
    """What two runs must have in common. Another driver is no other card."""
    return [found.get(name) for name in ("model", "dtype", "tokens", "written")] + [found.get("card", {}).get("gpu")]


class Section:
    """Results of a model, by text and way. Those that were saved before stay where they are of the same tokens and card."""

    def __init__(self, name: str, about: dict[str, Any], texts: Sequence[Text], saves: bool) -> None:
        self.name, self.parts, self.saves = name, PARTS[name], saves
        self.key = f"{about['model']}/{name}"
        path = record.RESULTS / f"{FILE}.json"
        before = json.loads(path.read_text()).get(self.key, {}).get("results", {}) if saves and path.exists() else {}
        if identity(before) != identity(about):
            before = {}
        self.found: dict[str, Any] = {**about, "texts": before.get("texts", {})}
        for text in texts:
            old = self.found["texts"].get(text.name, {})
            ways = old["ways"] if old.get("sha256") == text.sha256 else {}
            self.found["texts"][text.name] = {**text.about, "ways": ways}

    def add(self, text: Text, way: str, losses: torch.Tensor, exact: torch.Tensor, **more: float) -> None:
        self.found["texts"][text.name]["ways"][way] = {**compared(losses, exact, self.parts), **more}

    def save(self) -> None:
        texts = [text for text in self.found["texts"].values() if text["ways"]]
        if not texts:
            return
        names = dict.fromkeys(way for text in texts for way in text["ways"])
        self.found["pooled"] = {name: pooled(texts, name) for name in names}
        same = served(texts)
        self.found["same_texts"] = {name: pooled(same, name) for name in same[0]["ways"]}
        if self.saves:
            record.merge(FILE, self.key, self.found)


def reading(model: Any, texts: Sequence[Text], names: Sequence[str], section: Section, clock: Clock) -> None:
    for text in texts:
        ids = text.ids.to(model.device)
        try:
            exact, spent = clock.timed(f"{text.name}, exact", lambda ids=ids: reading_losses(model, ids, EXACT))
            section.add(text, "exact", exact, exact, seconds=spent)
            for name in names:
                label = f"{text.name}, {name}"
                losses, spent = clock.timed(label, lambda ids=ids, name=name: reading_losses(model, ids, WAYS[name]))
                section.add(text, name, losses, exact, seconds=spent)
        finally:
            section.save()


def writing(
    model: Any, texts: Sequence[Text], names: Sequence[str], section: Section, clock: Clock, written: int, rule_texts: int
) -> None:
    ids = torch.cat([text.ids for text in texts]).to(model.device)
    prompts, _ = clock.timed("reading all but the end of the texts", lambda: read_prompts(model, ids, written))
    exact = []
    for number, text in enumerate(texts):
        label = f"{text.name}, exact"
        losses, spent = clock.timed(label, lambda number=number: rows_losses(model, prompts, number, RECORDED))
        exact.append(losses)
        section.add(text, "exact", losses, losses, seconds=spent, keys_read=keys_of(EXACT, prompts))
        once, spent = clock.timed(f"{text.name}, {PASS}", lambda number=number: reading_losses(model, ids[number][None], EXACT))
        section.add(text, PASS, once[-written:], losses, seconds=spent, keys_read=keys_of(EXACT, prompts))
        section.save()
    for name in names:
        way = WAYS[name]
        if isinstance(way, CellWay):
            (losses, keys), spent = clock.timed(f"all texts, {name}", lambda way=way: steps_losses(model, prompts, way))
            for text, own, right in zip(texts, losses, exact, strict=True):
                section.add(text, name, own, right, seconds=spent / len(texts), keys_read=keys)
            section.save()
    rules = [name for name in names if isinstance(WAYS[name], PeerWay)]
    chosen = [number for number, text in enumerate(texts) if int(text.name.split()[-1]) <= rule_texts]
    for number in chosen if rules else ():
        text = texts[number]
        try:
            for name in rules:
                way, label = WAYS[name], f"{text.name}, {name}"
                losses, spent = clock.timed(label, lambda way=way, number=number: rows_losses(model, prompts, number, way))
                section.add(text, name, losses, exact[number], seconds=spent, keys_read=keys_of(way, prompts))
        finally:
            section.save()


def show_reading(found: dict[str, Any]) -> Any:
    kinds = sorted({kind for way in found["pooled"].values() for kind in way["excess_by_kind"]})
    title = f"{found['model']}: texts of {found['tokens']:,} tokens in one pass"
    shown = record.table("way", "texts", "perplexity", "excess", *kinds, "first quarter", "last", title=title, words=("way",))
    for name, way in found["pooled"].items():
        quarter = len(way["excess_by_position"]) // 4
        ends = (way["excess_by_position"][:quarter], way["excess_by_position"][-quarter:])
        shown.add_row(
            name,
            str(way["texts"]),
            f"{way['perplexity']:.3f}",
            "" if name == "exact" else percent_of(way),
            *("" if name == "exact" else f"{way['excess_by_kind'].get(kind, math.nan):+.2%}" for kind in kinds),
            *("" if name == "exact" else f"{sum(part) / len(part):+.2%}" for part in ends),
        )
    return shown


def show_writing(found: dict[str, Any]) -> Any:
    kinds = sorted({kind for way in found["pooled"].values() for kind in way["excess_by_kind"]})
    title = f"{found['model']}: the last {found['written']:,} tokens of {found['tokens']:,}"
    columns = ("way", "keys read", "share", "texts", "perplexity", "excess", *kinds, "texts of all ways", "excess there")
    shown = record.table(*columns, title=title, words=("way",))
    length = found["tokens"] - found["written"] / 2
    for name, way in found["pooled"].items():
        shown.add_row(
            name,
            f"{way['keys_read']:,.0f}",
            f"{way['keys_read'] / length:.1%}",
            str(way["texts"]),
            f"{way['perplexity']:.3f}",
            "" if name == "exact" else percent_of(way),
            *("" if name == "exact" else f"{way['excess_by_kind'].get(kind, math.nan):+.2%}" for kind in kinds),
            *(
                (str(same["texts"]), percent_of(same))
                if (same := found["same_texts"].get(name)) and name != "exact"
                else ("", "")
            ),
        )
    return shown


def percent_of(way: dict[str, Any]) -> str:
    return f"{way['excess']:+.2%} ± {way['stderr']:.2%}"


def tiny() -> Any:
    """Random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=500, num_key_value_heads=2, **sizes)).eval()


def random_texts(tokens: int) -> list[Text]:
    made = torch.Generator().manual_seed(0)
    return [Text(f"{kind} 1", kind, "at random", torch.randint(500, (1, tokens), generator=made)) for kind in ("code", "book")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a causal language model, its weights packed or not")
    parser.add_argument("--name", help="of the model in the results; default: that of its folder, without -gguf")
    parser.add_argument("--text", type=Path, action="append", default=[], help="a book; may be repeated")
    parser.add_argument("--section", nargs="+", choices=("reading", "writing"), default=("reading", "writing"), metavar="SECTION")
    parser.add_argument("--ways", nargs="+", choices=WAYS, metavar="WAY", help="these ways beside exact, of those of a section")
    parser.add_argument(
        "--both-rules", type=int, metavar="TOKENS", help="also read the first TOKENS of each text by rules of others"
    )
    parser.add_argument("--tokens", type=int, help=f"of a text, instead of {TOKENS:,}")
    parser.add_argument("--written", type=int, help=f"tokens at the end that are written, instead of {WRITTEN:,}")
    parser.add_argument("--texts", type=int, default=2, help="of each kind")
    parser.add_argument("--rule-texts", type=int, default=1, help="of each kind that are written by rules of others")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin nothing more after that")
    parser.add_argument("--prepare", type=Path, metavar="FILE", help="write the tokens of all texts to FILE, and end")
    parser.add_argument("--prepared", type=Path, metavar="FILE", help="texts that --prepare has written for the same model")
    parser.add_argument("--device", help="default: a GPU")
    parser.add_argument("--quick", action="store_true", help="a tiny model, nothing written unless --out says where")
    parser.add_argument("--plot-only", action="store_true", help="draw the figure from the saved results")
    parser.add_argument("--out", type=Path, help="folder for perplexity_gpu.json and perplexity.png")
    options = parser.parse_args()
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        record.RESULTS = options.out
    if not options.plot_only:
        if not (CUDA or options.quick or options.device or options.prepare):
            print("skipped: there is no CUDA device (--device cpu --tokens 2048 runs without one, and so does --quick)")
            return
        if not options.quick and (options.model is None or not options.model.exists()):
            print(f"skipped: no model in {options.model} (`make qwen` or `make gemma` fetches one; --model names its folder)")
            return
        if options.prepare:
            perplexity_texts.save(texts_of(options, options.tokens or TOKENS), options.prepare)
            print("written:", options.prepare)
            return
        measure(options)
    if options.out is not None or not options.quick:
        perplexity_plot.plot(record.read_sections(FILE), options.out or record.FIGURES)


def texts_of(options: argparse.Namespace, tokens: int) -> list[Text]:
    if options.prepared:
        return perplexity_texts.load(options.prepared, tokens)
    from nearfield.app.evaluate.models import load_tokenizer

    return perplexity_texts.find(load_tokenizer(options.model), options.text, tokens, options.texts)


def measure(options: argparse.Namespace) -> None:
    clock = Clock(options.minutes)
    begun = time.perf_counter()
    tokens = options.tokens or (1600 if options.quick else TOKENS)
    written = options.written or (48 if options.quick else min(WRITTEN, tokens // 4))
    device = torch.device(options.device or ("cuda" if CUDA else "cpu"))
    if options.quick:
        name, model, texts = options.name or "tiny", tiny().to(device), random_texts(tokens)
    else:
        from generate_qwen import load

        name = options.name or options.model.name.removesuffix("-gguf")
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model, _ = clock.timed(f"loading {name}", lambda: load(options.model, device, dtype))
        texts, _ = clock.timed("finding texts", lambda: texts_of(options, tokens))
    about = {"model": name, "dtype": str(model.dtype).removeprefix("torch."), "card": card(), "tokens": tokens}
    saves = options.out is not None or not options.quick

    def wanted(ways: Sequence[str], quick: Sequence[str]) -> list[str]:
        given = [way for way in ways if options.ways is None or way in options.ways]
        return [way for way in given if way in quick] if options.quick and options.ways is None else given

    try:
        if "reading" in options.section:
            section = Section("reading", about, texts, saves)
            reading(model, texts, wanted(READ, ("cells", "cells-12-both")), section, clock)
            record.show(show_reading(section.found))
        if "writing" in options.section:
            section = Section("writing", {**about, "written": written}, texts, saves)
            names = wanted((*STEPPED, *BY_RULE), ("exact+cache", "cells-12", *(way for way in BY_RULE if way.endswith("-12"))))
            writing(model, texts, names, section, clock, written, options.rule_texts)
            record.show(show_writing(section.found))
        if options.both_rules:
            short = min(tokens, options.both_rules)
            begins = [Text(text.name, text.kind, text.source, text.ids[:, :short]) for text in texts]
            section = Section("both-rules", {**about, "tokens": short}, begins, saves)
            reading(model, begins, wanted(BOTH, ("topk-12-both",)), section, clock)
            record.show(show_reading(section.found))
    except OutOfTime as stopped:
        print(f"stopped after {options.minutes:g} minutes, before {stopped}; a run with --section and --ways adds the rest")
        if "pooled" in section.found:
            record.show((show_writing if section.name == "writing" else show_reading)(section.found))
    print(f"{time.perf_counter() - begun:.0f} s in all")


if __name__ == "__main__":
    sys.exit(main())
