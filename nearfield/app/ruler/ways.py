"""Ways to read a prompt and to answer it, side by side in one run: attention for the prompt, and a cache for the answer."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nearfield import _compat
from nearfield.app.evaluate.measure import attending
from nearfield.app.peers.cache import PeerCache, PeerLayer, by_peer
from nearfield.app.peers.rules import RULES, Rule, budget_of
from nearfield.auto import Auto
from nearfield.cells.method import Cells
from nearfield.cells.sizes import CacheSizes
from nearfield.exact import Exact
from nearfield.hf.cache import CacheMethod, CellCache, CellLayer
from nearfield.hf.generation import generate
from nearfield.problem import Method

# Last: without Transformers, nearfield.hf says what to install.
from transformers.cache_utils import DynamicCache, DynamicLayer  # isort: skip


@dataclass(frozen=True)
class Way:
    """A prompt is read by `prefill`; each token of the answer reads the whole cache.

    Another way is another object: `add` makes it known to `--methods`. A way to answer overrides `cache`, `join`, `continued`
    and `keys_read`. One that reads prompts as others do names their `source`, so that a prompt is read once for all of them, and
    overrides `adopt`.

    Attributes:
        name: for `--methods`, tables and the page.
        about: the same in a few words.
        prefill: what the prompt attends by, as in `nearfield.hf.register`; None: the model's own attention.
        decode: what the answer attends by: the name of an attention that Transformers knows; None: what the prompt does.
        opens_cells: whether `nearfield.cells.cache` counts what the answer opens.
    """

    name: str
    about: str
    prefill: Method | Mapping[int | str, Method] | None = None
    decode: str | None = None
    opens_cells = False

    @property
    def source(self) -> Way | None:
        """The way whose prompts it answers; None: it reads them itself."""
        return None

    def reading(self, model: Any, tokens: int) -> AbstractContextManager[None]:
        """A context in which the model attends as it reads prompts of so many tokens."""
        return nullcontext() if self.prefill is None else attending(model, self.prefill)

    def writing(self, model: Any, tokens: int) -> AbstractContextManager[None]:
        """A context in which it attends as it writes answers to them."""
        return self.reading(model, tokens) if self.decode is None else _named(model, self.decode)

    def cache(self, config: Any) -> Any:
        """An empty cache for one prompt."""
        return DynamicCache(config=config)

    def adopt(self, cache: Any, config: Any) -> Any:
        """The cache that answers a prompt, made of the one that has read it. That one stays as it is if it is a source's."""
        return cache

    def join(self, caches: Sequence[Any], config: Any) -> Any:
        """One cache for several prompts that were read by themselves, as a batch that is padded on the left."""
        joined = DynamicCache(config=config)
        longest = max(cache.get_seq_length() for cache in caches)
        for number, layer in enumerate(joined.layers):
            if type(layer) is not DynamicLayer:
                raise ValueError(f"layer {number} has a window, and cannot be answered in batches; use --batch 1")
            own = [cache.layers[number] for cache in caches]
            keys = torch.cat([_padded(x.keys, longest) for x in own])
            joined.update(keys, torch.cat([_padded(x.values, longest) for x in own]), number)
        return joined

    def continued(self, model: Any, prompts: Sequence[Tensor], cache: Any, config: Any) -> list[Tensor]:
        """Prompts `[length]`, of which the cache has all tokens but the last, with the tokens of their answers."""
        longest = max(map(len, prompts))
        ids = torch.stack([F.pad(x, (longest - len(x), 0)) for x in prompts])
        mask = torch.stack([torch.arange(longest) >= longest - len(x) for x in prompts]).long().to(ids.device)
        found = model.generate(ids, attention_mask=mask, past_key_values=cache, generation_config=config)
        return [row[longest - len(prompt) :] for row, prompt in zip(found, prompts, strict=True)]

    def keys_read(self, cache: Any) -> float:
        """How many keys a token of the answer reads, mean over layers; of the cache for one prompt, when the answer begins."""
        return _mean([_length(layer) for layer in cache.layers])


@dataclass(frozen=True)
class CellWay(Way):
    """Tokens of the answer read what a `CellCache` opens.

    Attributes:
        method: as in `CellCache`; None: its default.
        group_from: as in `CellCache`: by default it is exact for short prompts; 0 for cells in all of them.
    """

    method: CacheMethod | Mapping[int | str, CacheMethod] | None = None
    group_from: int | None = 0
    opens_cells = True

    def cache(self, config: Any) -> CellCache:
        return CellCache(self.method, config=config, group_from=self.group_from)

    def join(self, caches: Sequence[CellCache], config: Any) -> CellCache:
        return CellCache.batch(caches)

    def continued(self, model: Any, prompts: Sequence[Tensor], cache: CellCache, config: Any) -> list[Tensor]:
        if len(prompts) == 1:
            # The step of one request is captured in a CUDA graph where it can be, and does not wait for others.
            ids = prompts[0][None]
            return list(generate(model, ids, cache=cache, attention_mask=torch.ones_like(ids), generation_config=config))
        return generate(model, prompts, cache=cache, generation_config=config)

    def keys_read(self, cache: CellCache) -> float:
        return _mean([_keys_read(layer) for layer in cache.layers])


class Recorded(Way):
    """Reads prompts exactly, and keeps their last queries, for ways that answer by a rule."""

    def reading(self, model: Any, tokens: int) -> AbstractContextManager[None]:
        return by_peer(model, None)

    def cache(self, config: Any) -> PeerCache:
        return PeerCache(config)


RECORDED = Recorded("recorded", "the prompt exactly, once for all that answer by a rule")


@dataclass(frozen=True)
class PeerWay(Way):
    """Tokens of the answer read a share of the prompt's keys, by a rule that others have published.

    Attributes:
        rule: see `nearfield.app.peers.rules`.
        share: of the prompt's keys.
        both: whether rows of the prompt read by the rule, too, the same share of what they see on average.
    """

    rule: Rule = RULES["topk"]
    share: float = 0.06
    both: bool = False

    @property
    def source(self) -> Way | None:
        return None if self.both else RECORDED

    def reading(self, model: Any, tokens: int) -> AbstractContextManager[None]:
        return by_peer(model, self.rule, self.share if self.both else None)

    def cache(self, config: Any) -> PeerCache:
        return PeerCache(config)

    def adopt(self, cache: PeerCache, config: Any) -> PeerCache:
        return cache.by_rule(self.rule, self.share)

    def join(self, caches: Sequence[PeerCache], config: Any) -> PeerCache:
        return PeerCache.join(caches, config)

    def keys_read(self, cache: PeerCache) -> float:
        read = [min(_length(layer), layer.budget) if isinstance(layer, PeerLayer) else _length(layer) for layer in cache.layers]
        return _mean(read)


@dataclass(frozen=True)
class BudgetWay(CellWay):
    """The same with cells: a `CellCache` that reads a share of the prompt's keys.

    Attributes:
        share: of the prompt's keys.
        both: whether rows of the prompt attend by `Cells`, too, with the same share of what they see on average.
    """

    share: float = 0.06
    both: bool = False
    opens_cells = False

    @property
    def source(self) -> Way | None:
        return None if self.both else RECORDED

    def reading(self, model: Any, tokens: int) -> AbstractContextManager[None]:
        return attending(model, cells_of_budget(self.share, tokens) if self.both else Exact())

    def cache(self, config: Any) -> Any:
        return PeerCache(config)

    def adopt(self, cache: Any, config: Any) -> CellCache:
        lengths = [layer.get_seq_length() for layer in cache.layers if type(layer) in (DynamicLayer, PeerLayer)]
        made = CellCache(cache_of_budget(self.share, max(lengths, default=0)), config=config, group_from=0)
        for number, layer in enumerate(cache.layers):
            own = made.layers[number]
            if isinstance(own, CellLayer):
                own.store.append(layer.keys, layer.values)
                own.store.close()
            else:
                made.layers[number] = copy.copy(layer)
        return made


def cache_of_budget(share: float, tokens: int) -> Cells:
    """Cells for a cache that reads this share of a prompt, with cells of half the default size."""
    sizes = CacheSizes.of(None, None, None, 16)
    size = max(4, round(tokens / max(1, sizes.cells(0, tokens)) / 2))
    always = sizes.window + 16
    return Cells(cell_size=size, probes=max(1, (budget_of(share, tokens) - always) // size))


def cells_of_budget(share: float, tokens: int) -> Cells:
    """Cells whose rows read this share of what they see on average: their own segment takes up to a quarter of it."""
    budget = budget_of(share / 2, tokens)
    segment = 1 << max(6, int(math.log2(budget / 2)))
    return Cells(segment=segment, cell_size=32, probes=max(1, (budget - segment // 2 - 16) // 32))


@contextmanager
def _named(model: Any, name: str) -> Iterator[None]:
    before = _compat.attention_name(model)
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _padded(rows: Tensor, length: int) -> Tensor:
    """Keys or values `[1, heads, length, dim]`, with zeros before them."""
    return F.pad(rows, (0, 0, length - rows.shape[2], 0))


def _length(layer: Any) -> float:
    return float(layer.keys.shape[-2])


def _keys_read(layer: Any) -> float:
    """The first keys, those in no cell yet, and those in opened cells, which have the mean size."""
    if not isinstance(layer, CellLayer):
        return _length(layer)
    store: Any = layer.store
    closed, cells = getattr(store, "closed", 0), getattr(store, "cells", 0)
    if not closed:
        return float(store.length)
    opened = min(closed, store.probes * closed / cells)
    return min(store.length, store.length - closed + min(closed, store.method.sinks) + opened)


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / max(1, len(numbers))


WAYS: dict[str, Way] = {}
"""By name, in the order in which they were made known."""


def add(way: Way) -> Way:
    """Make a way known to `--methods`."""
    if way.name in WAYS:
        raise ValueError(f"there is a way {way.name!r} already; choose another name")
    WAYS[way.name] = way
    return way


EXACT = add(Way("exact", "the model's own attention"))
add(CellWay("default", "Auto() for the prompt, a CellCache for the answer", Auto(), group_from=None))
add(Way("default+exact", "Auto() for the prompt, the answer exactly", Auto()))
add(CellWay("cells", "Cells() for the prompt, a CellCache for the answer", Cells()))
add(Way("cells+exact", "Cells() for the prompt, the answer exactly", Cells()))
add(CellWay("shared", "Cells(share=128) for the prompt, a CellCache for the answer", Cells(share=128)))
add(Way("shared+exact", "Cells(share=128) for the prompt, the answer exactly", Cells(share=128)))
add(CellWay("exact+cache", "the prompt exactly, a CellCache for the answer", Exact()))

SHARES = (1.5, 3, 6, 12)
"""Percent of the keys of a prompt that ways with a budget read."""


def _add_budgets() -> None:
    """`NAME-6`: answers read 6% of the keys; `NAME-6-both`: prompts, too."""
    for percent in SHARES:
        share = percent / 100
        for rule in RULES.values():
            said = f"{percent:g}% of the keys by {type(rule).__name__}"
            add(PeerWay(f"{rule.name}-{percent:g}", f"the prompt exactly, the answer with {said}", rule=rule, share=share))
            if rule.reads_prompts:
                add(PeerWay(f"{rule.name}-{percent:g}-both", f"prompt and answer with {said}", rule=rule, share=share, both=True))
        said = f"{percent:g}% of the keys by cells"
        add(BudgetWay(f"cells-{percent:g}", f"the prompt exactly, the answer with {said}", share=share))
        add(BudgetWay(f"cells-{percent:g}-both", f"prompt and answer with {said}", share=share, both=True))


_add_budgets()
