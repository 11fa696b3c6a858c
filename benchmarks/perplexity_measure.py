"""What bench_perplexity_gpu.py measures: losses of the tokens of a text, read or written in some way, next to exact attention.

Ways are those of `nearfield ruler`. Layers with a sliding window are exact in all of them.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nearfield.app.evaluate.measure import head
from nearfield.app.peers.cache import PeerCache, PeerLayer
from nearfield.app.peers.rules import Blocks, budget_of
from nearfield.app.ruler.ways import RECORDED, BudgetWay, CellWay, PeerWay, Way
from nearfield.hf.cache import CellCache, CellLayer
from nearfield.hf.model_step import stepping

HEAD_BYTES = {"cuda": 4 << 30, "cpu": 256 << 20}
"""For float32 logits over the vocabulary at a time."""
RULE_LOGITS = {"cuda": 1 << 27, "cpu": 1 << 23}
"""So many logits of attention a rule computes at a time in a layer: 256 rows of Qwen at 32,768 keys."""
BLOCKS = 64
"""Standard errors are those of the mean of so many stretches of a text: neighbours have errors that are alike."""
EVERY = 16
"""Keys that steps read are counted at every 16th."""
KEEPS_ANSWER = ("snapkv", "retroinfer")
"""Rules that read all tokens after the prompt, beyond their budget."""


@torch.no_grad()
def reading_losses(model: Any, ids: Tensor, way: Way) -> Tensor:
    """-log p of every token of a text `[1, n]` but the first, all read at once: `[n - 1]`, float64, on the CPU."""
    cache = PeerCache(model.config) if isinstance(way, PeerWay) else None
    with way.reading(model, ids.shape[1]):
        states = model.base_model(ids, past_key_values=cache, use_cache=cache is not None).last_hidden_state
    return losses_of(model, states[:, :-1], ids[0, 1:])


def losses_of(model: Any, states: Tensor, targets: Tensor) -> Tensor:
    """-log p of tokens `[n]` for the states before them `[1, n, width]`; the n x vocabulary logits never exist at once."""
    words = model.get_output_embeddings().weight.shape[0]
    rows = max(1, HEAD_BYTES[states.device.type] // (4 * words))
    found = [
        F.cross_entropy(head(model, some, targets[None])[0].float(), own, reduction="none")
        for some, own in zip(states.split(rows, 1), targets.split(rows), strict=True)
    ]
    return torch.cat(found).double().cpu()


@dataclass(frozen=True)
class Prompts:
    """Texts `[texts, n]` of which all but the last tokens were read exactly.

    The last token of what was read is left to the answer, as in `nearfield ruler`: it is the row that predicts the first of the
    `written` tokens, and attends as they do.
    """

    ids: Tensor
    written: int
    caches: list[PeerCache]

    @property
    def start(self) -> int:
        """How many tokens the caches have."""
        return self.ids.shape[1] - self.written - 1


@torch.no_grad()
def read_prompts(model: Any, ids: Tensor, written: int) -> Prompts:
    """Each text by itself, once for all ways to write."""
    found = Prompts(ids, written, [])
    for text in ids:
        cache = RECORDED.cache(model.config)
        with RECORDED.reading(model, found.start):
            model.base_model(text[None, : found.start], past_key_values=cache, use_cache=True)
        found.caches.append(cache)
    return found


@torch.no_grad()
def rows_losses(model: Any, prompts: Prompts, number: int, way: Way, rows: int | None = None) -> Tensor:
    """-log p of the written tokens of one text, `[written]`: by a rule, or exactly if the way is `RECORDED`.

    Several rows attend at a time: what a row reads does not depend on others.
    """
    source, ids = prompts.caches[number], prompts.ids[number]
    cache = copied(source) if way is RECORDED else way.adopt(source, model.config)
    heads = model.config.get_text_config().num_attention_heads
    step = rows or max(16, min(512, RULE_LOGITS[ids.device.type] // (heads * len(ids)) // 16 * 16))
    found = []
    with way.writing(model, prompts.start):
        for start in range(prompts.start, len(ids) - 1, step):
            stop = min(start + step, len(ids) - 1)
            logits = model(ids[None, start:stop], past_key_values=cache, use_cache=True).logits[0].float()
            found.append(F.cross_entropy(logits, ids[start + 1 : stop + 1], reduction="none"))
    return torch.cat(found).double().cpu()


def copied(cache: PeerCache) -> PeerCache:
    """Another one with the same tokens. Updates replace keys and values, so these need no copy."""
    made = copy.copy(cache)
    made.layers = [copy.copy(layer) for layer in cache.layers]
    return made


@torch.no_grad()
def steps_losses(model: Any, prompts: Prompts, way: CellWay) -> tuple[Tensor, float]:
    """-log p of the written tokens of all texts, `[texts, written]`, token by token as `hf.generate` does, in a CUDA graph
    where the model has one; and how many keys a step reads, mean over steps and layers without a window.

    All texts are a batch, which chooses cells for each entry by itself: it saves most of the time of a step.
    """
    cache, ids = cell_cache(model, prompts, way), prompts.ids
    layers = SimpleNamespace(layers=[layer for layer in cache.layers if isinstance(layer, CellLayer)])
    losses = torch.empty(prompts.written, len(ids), device=ids.device)
    read = []
    with way.writing(model, prompts.start), stepping(model, cache, graph=None):
        for step in range(prompts.written):
            place = prompts.start + step
            if step % EVERY == 0:
                read.append(way.keys_read(layers) + 1)
            positions = torch.full((len(ids), 1), place, device=ids.device)
            given = {"input_ids": ids[:, place : place + 1], "position_ids": positions, "past_key_values": cache}
            logits = model(**given, use_cache=True).logits[:, -1].float()
            losses[step] = F.cross_entropy(logits, ids[:, place + 1], reduction="none")
    return losses.T.double().cpu(), statistics.fmean(read)


def cell_cache(model: Any, prompts: Prompts, way: CellWay) -> CellCache:
    """A cache of cells for all texts as a batch, made of what was read exactly."""
    joined = PeerCache(model.config)
    for number, layer in enumerate(joined.layers):
        own: list[Any] = [cache.layers[number] for cache in prompts.caches]
        if not isinstance(layer, PeerLayer):
            joined.layers[number] = layer = copy.copy(own[0])
        layer.keys, layer.values = (torch.cat([getattr(one, name) for one in own]) for name in ("keys", "values"))
        layer.is_initialized = True
        if isinstance(layer, PeerLayer) and own[0].queries is not None:
            layer.queries, layer.scale = torch.cat([one.queries for one in own]), own[0].scale
    if isinstance(way, BudgetWay):
        return way.adopt(joined, model.config)
    made = way.cache(model.config)
    for number, (layer, read) in enumerate(zip(made.layers, joined.layers, strict=True)):
        if isinstance(layer, CellLayer):
            layer.store.append(read.keys, read.values)
            layer.store.close(query=read.queries)
        else:
            made.layers[number] = read
    return made


def keys_of(way: Way, prompts: Prompts) -> float:
    """How many keys a row of `rows_losses` reads, mean over rows, in a layer without a window."""
    own = (prompts.written + 1) / 2
    if not isinstance(way, PeerWay):
        return prompts.start + own
    if isinstance(way.rule, Blocks):
        size = way.rule.size
        return min(prompts.start + own, (budget_of(way.share, prompts.start) // size - 1) * size + prompts.start % size + own)
    return min(prompts.start + own, budget_of(way.share, prompts.start) + (own if way.rule.name in KEEPS_ANSWER else 0))


def compared(losses: Tensor, exact: Tensor, parts: int) -> dict[str, Any]:
    """Losses of the same tokens in pairs: mean difference in nats, its standard error, and both by position."""
    difference = losses - exact
    return {
        "loss": float(losses.mean()),
        "difference": float(difference.mean()),
        "stderr": stderr(difference),
        "loss_by_position": means(losses, parts),
        "difference_by_position": means(difference, parts),
    }


def means(numbers: Tensor, parts: int) -> list[float]:
    return [round(float(part.mean()), 7) for part in numbers.tensor_split(parts)]


def stderr(numbers: Tensor) -> float:
    """Of the mean, from the means of stretches."""
    own = torch.tensor(means(numbers, min(BLOCKS, len(numbers))), dtype=torch.float64)
    return float(own.std()) / math.sqrt(len(own))


def pooled(texts: Sequence[dict[str, Any]], way: str) -> dict[str, Any]:
    """Over the texts that were measured in this way, next to exact attention on the same ones. Texts have the same length."""
    own = [text["ways"][way] for text in texts if way in text["ways"]]
    exact = [text["ways"]["exact"] for text in texts if way in text["ways"]]
    kinds = sorted({text["kind"] for text in texts if way in text["ways"]})
    difference = statistics.fmean(one["difference"] for one in own)
    excess = math.expm1(difference)
    by_kind = {
        kind: [text["ways"][way]["difference"] for text in texts if text["kind"] == kind and way in text["ways"]]
        for kind in kinds
    }
    return {
        "texts": len(own),
        "perplexity": math.exp(statistics.fmean(one["loss"] for one in own)),
        "exact": math.exp(statistics.fmean(one["loss"] for one in exact)),
        "excess": excess,
        "stderr": (1 + excess) * math.sqrt(sum(one["stderr"] ** 2 for one in own)) / len(own),
        "excess_by_kind": {kind: math.expm1(statistics.fmean(some)) for kind, some in by_kind.items()},
        "loss_by_position": [statistics.fmean(some) for some in zip(*(one["loss_by_position"] for one in own), strict=True)],
        "excess_by_position": [
            math.expm1(statistics.fmean(some)) for some in zip(*(one["difference_by_position"] for one in own), strict=True)
        ],
        **({"keys_read": statistics.fmean(one["keys_read"] for one in own)} if "keys_read" in own[0] else {}),
    }
