"""What cells cost sharp models, on a CPU: perplexity of the end of long texts, and errors of steps by layer.

python benchmarks/bench_sharp.py                                        # Gemma, 32,768 tokens; writes results/sharp.json
python benchmarks/bench_sharp.py --section reading                      # the same for whole texts that are read by Cells
python benchmarks/bench_sharp.py --model models/smollm2-135m --tokens 8192
python benchmarks/bench_sharp.py --kept FOLDER                          # keeps what was read there, and takes it from there
python benchmarks/bench_sharp.py --quick                                # a tiny model, nothing written

writing: all but the last 448 tokens of a text are read exactly. These are then predicted with a `CellCache` that opens as many
keys as on a GPU, 64 rows at a time, which reads what steps of one token do: a row opens cells by itself, and no segment is closed
meanwhile.

keys, uncut     cells grouped as keys are large, spreads not cut off: how caches of 0.1 were
keys            spreads cut off at 9
queries         cells grouped as the last 64 queries of each head are large: `CellCache()`, which cuts off later in scores
queries, 0.4%   the same with `CellCache(min_weight=0.004)`: of four times as many cells, those that matter

reading: whole texts in one pass, with the sizes of a GPU, where cells are larger, and the two iterations of its k-means. What
counts is the last quarter of the tokens, which sees the most keys.

usual           `Cells()`: cells grouped as keys are large
usual, queries  `Cells(partition=KMeans(by_queries=True))`
6%              the same two with 6% of the keys that a row sees on average, as `cells-6-both` of `nearfield ruler`
6%, queries

Errors are those of `audit`, relative to the norm of a row of exact attention's output. Texts that are not measured again stay as
they are in the file.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import perplexity_texts
import record
import torch
import torch.nn.functional as F
from bench_perplexity_gpu import random_texts, tiny
from perplexity_measure import losses_of, stderr
from perplexity_texts import Text
from real import SMOLLM2
from torch import Tensor

import nearfield as nf
from nearfield.app.evaluate.measure import attending
from nearfield.app.evaluate.models import load_model
from nearfield.app.peers.cache import PeerCache
from nearfield.app.ruler.ways import cells_of_budget
from nearfield.cells import far_field
from nearfield.cells.cache import attention, segments
from nearfield.cells.cache.heavy import ReadKeys
from nearfield.cells.cache.store import TIMES_BY_WEIGHT
from nearfield.cells.partition.by_queries import LATEST
from nearfield.cells.partition.kmeans import KERNEL_ITERATIONS
from nearfield.cells.sizes import CacheSizes, default_cache_probes, default_cell_size, default_probes, default_segment
from nearfield.hf.cache import CellCache, CellLayer

TOKENS, WRITTEN, ROWS = 32_768, 448, 64
LARGE = 0.3
"""The error from which on a row counts as far off."""
WAYS: dict[str, tuple[bool, float, float | None]] = {
    "keys, uncut": (False, 1e8, None),
    "keys": (False, far_field.MOST_SPREAD, None),
    "queries": (True, far_field.MOST_SPREAD, None),
    "queries, 0.4%": (True, far_field.MOST_SPREAD, 0.004),
}
"""Whether keys are grouped as queries are large, where spreads are cut off, and the least weight for which a cell is opened."""
READ = {"usual": (None, False), "usual, queries": (None, True), "6%": (0.06, False), "6%, queries": (0.06, True)}
"""The share of the keys that rows read, and whether keys are grouped as queries are large."""


class Prompt:
    """A text of which all but the last tokens were read exactly, with the latest queries of each layer."""

    def __init__(self, model: Any, text: Text, written: int, kept: Path | None) -> None:
        self.ids, self.start = text.ids, text.ids.shape[1] - written - 1
        self.queries: dict[int, Tensor] = {}
        begin = self.start - LATEST
        path = None if kept is None else kept / f"{text.name.replace(' ', '-')}-{text.sha256[:16]}-{begin}.pt"
        self.cache = PeerCache(model.config)
        with attending(model, nf.Exact()):
            if path is not None and path.exists():
                self.cache = torch.load(path, weights_only=False)
            else:
                model.base_model(self.ids[:, :begin], past_key_values=self.cache, use_cache=True)
                if path is not None:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    torch.save(self.cache, path)
            with recording(model, self.queries):
                model.base_model(self.ids[:, begin : self.start], past_key_values=self.cache, use_cache=True)

    def filled(self, model: Any, by_queries: bool, min_weight: float | None = None) -> CellCache:
        """A cache of cells with what was read."""
        tokens = self.start
        cells = CacheSizes.of(None, None, None, 16).cells(0, tokens)
        probes = default_cache_probes(tokens, cells, on_gpu=True)
        most = probes if min_weight is None else TIMES_BY_WEIGHT * probes
        made = CellCache(nf.Cells(probes=most), config=model.config, group_from=0, min_weight=min_weight, audit=True)
        for number, read in enumerate(self.cache.layers):
            layer = made.layers[number]
            if isinstance(layer, CellLayer):
                layer.store.append(read.keys, read.values)
                layer.store.close(query=self.queries[number] if by_queries else None)
            else:
                made.layers[number] = copy.copy(read)
        return made


@contextmanager
def recording(model: Any, queries: dict[int, Tensor]) -> Iterator[None]:
    """Inside `attending`: keep the queries of the layers that have no window."""
    from transformers import AttentionInterface

    name = model.config._attn_implementation
    inner = AttentionInterface()[name]

    def keep(module: Any, query: Tensor, key: Tensor, *rest: Any, **options: Any) -> Any:
        queries[module.layer_idx] = query.clone()
        return inner(module, query, key, *rest, **options)

    AttentionInterface.register(name, keep)
    try:
        yield
    finally:
        AttentionInterface.register(name, inner)


def losses(model: Any, prompt: Prompt, cache: Any) -> Tensor:
    """-log p of the written tokens."""
    ids, found = prompt.ids, []
    for start in range(prompt.start, ids.shape[1] - 1, ROWS):
        stop = min(start + ROWS, ids.shape[1] - 1)
        logits = model(ids[:, start:stop], past_key_values=cache, use_cache=True).logits[0].float()
        found.append(F.cross_entropy(logits, ids[0, start + 1 : stop + 1], reduction="none"))
    return torch.cat(found).double()


def exact_cache(prompt: Prompt) -> PeerCache:
    made = copy.copy(prompt.cache)
    made.layers = [copy.copy(layer) for layer in prompt.cache.layers]
    return made


@torch.no_grad()
def study(model: Any, text: Text, written: int, kept: Path | None) -> dict[str, Any]:
    begun = time.perf_counter()
    prompt = Prompt(model, text, written, kept)
    found: dict[str, Any] = {**text.about, "ways": {}}
    print(f"{time.perf_counter() - begun:7.1f} s  {text.name}, read", flush=True)
    with attending(model, nf.Exact()):
        exact = losses(model, prompt, exact_cache(prompt))
        found["loss"] = float(exact.mean())
        for name, (by_queries, cut, min_weight) in WAYS.items():
            cache = prompt.filled(model, by_queries, min_weight)
            stores: list[Any] = [layer.store for layer in cache.layers if isinstance(layer, CellLayer)]
            counted = ReadKeys()
            for store in stores:
                store.watch = counted
            usual = attention.MOST_SPREAD
            attention.MOST_SPREAD = segments.MOST_SPREAD = cut
            try:
                own = losses(model, prompt, cache)
            finally:
                attention.MOST_SPREAD = segments.MOST_SPREAD = usual
            difference = own - exact
            # Beside opened cells a row reads the first keys, and those that are in no cell yet: half of the answer on average.
            alone = sum(prompt.start - store.closed + store.method.sinks for store in stores) / len(stores)
            read = counted.mean + alone + (written + 1) / 2
            errors = {layer: torch.cat([step.relative.flatten() for step in steps]) for layer, steps in cache.errors.items()}
            found["ways"][name] = {
                "keys_read": read,
                "difference": float(difference.mean()),
                "absolute": float(difference.abs().mean()),
                "stderr": stderr(difference),
                "error": {str(layer): float(x.mean()) for layer, x in errors.items()},
                "far_off": {str(layer): float((x > LARGE).double().mean()) for layer, x in errors.items()},
            }
            excess, spent = math.expm1(float(difference.mean())), time.perf_counter() - begun
            print(f"{spent:7.1f} s  {text.name}, {name}: {excess:+.2%}", flush=True)
    return found


def cells_for(tokens: int, share: float | None, by_queries: bool) -> nf.Cells:
    partition = nf.KMeans(KERNEL_ITERATIONS, by_queries=by_queries)
    if share is not None:
        return replace(cells_of_budget(share, tokens), partition=partition)
    size = default_cell_size(tokens, True, True)
    probes = default_probes(tokens, size, True, True, 1)
    return nf.Cells(size, probes, segment=default_segment(tokens, True), partition=partition)


@torch.no_grad()
def read_study(model: Any, text: Text) -> dict[str, Any]:
    """Losses of the last quarter of a text that is read in one pass."""
    begun, ids = time.perf_counter(), text.ids
    first, tokens = 3 * ids.shape[1] // 4, ids.shape[1]
    found: dict[str, Any] = {**text.about, "ways": {}}

    def read(method: nf.Exact | nf.Cells) -> Tensor:
        with attending(model, method):
            states = model.base_model(ids, use_cache=False).last_hidden_state
        return losses_of(model, states[:, first:-1], ids[0, first + 1 :])

    exact = read(nf.Exact())
    found["loss"] = float(exact.mean())
    for name, (share, by_queries) in READ.items():
        difference = read(cells_for(tokens, share, by_queries)) - exact
        found["ways"][name] = {
            "difference": float(difference.mean()),
            "absolute": float(difference.abs().mean()),
            "stderr": stderr(difference),
        }
        excess, spent = math.expm1(float(difference.mean())), time.perf_counter() - begun
        print(f"{spent:7.1f} s  {text.name}, read by {name}: {excess:+.2%}", flush=True)
    return found


def read_pooled(texts: list[dict[str, Any]]) -> dict[str, Any]:
    """By way, over all texts: excess of perplexity and its standard error."""
    return {name: excess_of([text["ways"][name] for text in texts], [text["kind"] for text in texts]) for name in READ}


def excess_of(own: list[dict[str, Any]], kinds: list[str]) -> dict[str, Any]:
    excess = math.expm1(sum(one["difference"] for one in own) / len(own))
    return {
        "excess": excess,
        "stderr": (1 + excess) * math.sqrt(sum(one["stderr"] ** 2 for one in own)) / len(own),
        "absolute": sum(one["absolute"] for one in own) / len(own),
        "excess_by_kind": {kind: math.expm1(one["difference"]) for kind, one in zip(kinds, own, strict=True)},
    }


def pooled(texts: list[dict[str, Any]]) -> dict[str, Any]:
    """By way, over all texts: excess of perplexity, its standard error, mean error of a step, share of rows that are far off."""
    made = {}
    for name in WAYS:
        if not all(name in text["ways"] for text in texts):  # One that was measured before there was this way.
            continue
        own = [text["ways"][name] for text in texts]
        errors, off = ([x for one in own for x in one[what].values()] for what in ("error", "far_off"))
        made[name] = {
            "keys_read": sum(one["keys_read"] for one in own) / len(own),
            **excess_of(own, [text["kind"] for text in texts]),
            "error": sum(errors) / len(errors),
            "far_off": sum(off) / len(off),
        }
    return made


def show(title: str, found: dict[str, Any]) -> None:
    kinds = [text["kind"] for text in found["texts"].values()]
    columns = ("way", "keys read", "excess", *kinds, "error of a step", f"rows over {LARGE:.0%}")
    shown = record.table(*columns, title=title, words=("way",))
    for name, way in found["pooled"].items():
        by_kind = [f"{way['excess_by_kind'][kind]:+.2%}" for kind in kinds]
        excess = f"{way['excess']:+.2%} ± {way['stderr']:.2%}"
        shown.add_row(name, f"{way['keys_read']:,.0f}", excess, *by_kind, f"{way['error']:.3f}", f"{way['far_off']:.1%}")
    record.show(shown)


def show_reading(title: str, found: dict[str, Any]) -> None:
    kinds = [text["kind"] for text in found["texts"].values()]
    shown = record.table("way", "excess", *kinds, title=title, words=("way",))
    for name, way in found["pooled"].items():
        by_kind = [f"{way['excess_by_kind'][kind]:+.2%}" for kind in kinds]
        shown.add_row(name, f"{way['excess']:+.2%} ± {way['stderr']:.2%}", *by_kind)
    record.show(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=SMOLLM2.parent / "gemma-3-270m", help="folder of a causal language model")
    parser.add_argument("--text", type=Path, action="append", default=[], help="a book; default: the essays of RULER")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--section", choices=("writing", "reading"), default="writing")
    parser.add_argument("--kinds", nargs="+", choices=perplexity_texts.KINDS, default=perplexity_texts.KINDS)
    parser.add_argument("--kept", type=Path, metavar="FOLDER", help="where what was read is kept, and taken from")
    parser.add_argument("--quick", action="store_true", help="a tiny model, nothing written")
    options = parser.parse_args()
    if options.quick:
        model, texts, written = tiny(), random_texts(1600), 64
    elif not options.model.exists():
        print(f"skipped: no model in {options.model} (`make help` says how to fetch it)")
        return
    else:
        model, tokenizer = load_model(options.model)
        texts = perplexity_texts.find(tokenizer, options.text, options.tokens, 1)
        texts, written = [text for text in texts if text.kind in options.kinds], WRITTEN
    name = "tiny" if options.quick else options.model.name
    tokens, is_reading = texts[0].ids.shape[1], options.section == "reading"
    found: dict[str, Any] = {"tokens": tokens, "written": tokens - 3 * tokens // 4 - 1 if is_reading else written, "texts": {}}
    section = f"{name}/{tokens}/reading" if is_reading else f"{name}/{tokens}"
    for text in texts:
        if is_reading:
            found["texts"][text.name] = read_study(model, text)
        else:
            found["texts"][text.name] = study(model, text, written, None if options.kept is None else options.kept / name)
    if not options.quick and (record.RESULTS / "sharp.json").exists():
        found["texts"] = record.read_sections("sharp").get(section, found)["texts"] | found["texts"]
    found["texts"] = dict(sorted(found["texts"].items()))
    found["pooled"] = (read_pooled if is_reading else pooled)(list(found["texts"].values()))
    (show_reading if is_reading else show)(f"{name}: the last {found['written']:,} of {tokens:,} tokens", found)
    if not options.quick:
        record.merge("sharp", section, found)


if __name__ == "__main__":
    main()
