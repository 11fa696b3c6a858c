"""Ways to read a prompt and to answer it, side by side in one run: attention for the prompt, and a cache for the answer."""

from __future__ import annotations

import copy
import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from nearfield.app.evaluate.measure import attending
from nearfield.app.evaluate.settings import half_cell_size
from nearfield.app.peers.answering import AnswerCache, write
from nearfield.app.peers.cache import PeerCache, PeerLayer, by_peer
from nearfield.app.peers.rules import RULES, Rule, budget_of
from nearfield.auto import Auto, is_exact_faster
from nearfield.cells.cache.store import CellStore
from nearfield.cells.method import Cells
from nearfield.cells.partition.kmeans import KMeans
from nearfield.cells.sizes import CacheSizes
from nearfield.exact import Exact
from nearfield.hf.cache import CacheMethod, CellCache, CellLayer, RequestLayer
from nearfield.hf.generation import generate
from nearfield.problem import Method

# Last: without Transformers, nearfield.hf says what to install.
from transformers.cache_utils import DynamicLayer  # isort: skip

ALGORITHM = 2
"""To be raised by whoever changes what a way answers while its name and parameters stay: how keys are grouped, which cells are
opened, how many by default. Answers by another number are not gone on with."""


@dataclass(frozen=True)
class Way:
    """A prompt is read by `prefill`; each token of the answer reads the whole cache.

    Another way is another object: `add` makes it known to `--methods`. A way to answer overrides `writing`, `cache`, `join`,
    `continued` and `keys_read`. One that reads prompts as others do names their `source`, so that a prompt is read
    once for all of them, and overrides `adopt`.

    Attributes:
        name: for `--methods`, tables and the page.
        about: the same in a few words.
        prefill: what the prompt attends by, as in `nearfield.hf.register`; None: the model's own attention.
        opens_cells: whether `nearfield.cells.cache` counts what the answer opens.
        rounds: after so many tokens, answers that are done leave the batch.
    """

    name: str
    about: str
    prefill: Method | Mapping[int | str, Method] | None = None
    opens_cells = False
    rounds: ClassVar[tuple[int, ...]] = (16, 48)

    @property
    def digest(self) -> str:
        """Of all that is set, so that answers of another way with the same name are known from its own."""
        told = re.sub(r" at 0x[0-9a-f]+", "", repr(self))
        return hashlib.sha256(told.encode()).hexdigest()[:16]

    @property
    def source(self) -> Way | None:
        """The way whose prompts it answers; None: it reads them itself."""
        return RECORDED if self.prefill is None else None

    def source_for(self, model: Any, tokens: int) -> Way | None:
        """The same for a prompt of so many tokens: the default reads it exactly where that is faster."""
        return RECORDED if self.prefill == Auto() and _is_exact_faster(model, tokens) else self.source

    def reading(self, model: Any, tokens: int) -> AbstractContextManager[None]:
        """A context in which the model attends as it reads prompts of so many tokens."""
        return by_peer(model, None) if self.prefill is None else attending(model, self.prefill)

    def writing(self, model: Any, tokens: int) -> AbstractContextManager[None]:
        """A context in which it attends as it writes answers to them."""
        return by_peer(model, None)

    def cache(self, config: Any) -> Any:
        """An empty cache for one prompt."""
        return PeerCache(config)

    def adopt(self, cache: Any, config: Any) -> Any:
        """The cache that answers a prompt, made of the one that has read it. That one stays as it is if it is a source's."""
        return cache

    def join(self, caches: Sequence[Any]) -> Any:
        """One cache for several prompts that were read by themselves."""
        return AnswerCache(caches)

    def continued(self, model: Any, prompts: Sequence[Tensor], cache: Any, config: Any) -> list[Tensor]:
        """Prompts `[length]`, of which the cache has all tokens but the last, with the next tokens of their answers."""
        return write(model, cache, prompts, config.max_new_tokens)

    def keys_read(self, cache: Any) -> float:
        """How many keys a token of the answer reads, mean over layers without a window (all, if each has one); of the cache for
        one prompt, when the answer begins."""
        return _over_layers(cache, _length)


class Recorded(Way):
    """Reads prompts exactly, and keeps their last queries, for ways that answer them."""

    @property
    def source(self) -> Way | None:
        return None


RECORDED = Recorded("recorded", "the prompt exactly, once for all that answer it")


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
    rounds: ClassVar[tuple[int, ...]] = (32,)

    def writing(self, model: Any, tokens: int) -> AbstractContextManager[None]:
        return attending(model, Exact() if self.prefill is None else self.prefill)

    def cache(self, config: Any) -> CellCache:
        return self._cells(config, self.method)

    def _cells(self, config: Any, method: CacheMethod | Mapping[int | str, CacheMethod] | None) -> CellCache:
        return CellCache(method, config=config, group_from=self.group_from)

    def adopt(self, cache: Any, config: Any) -> CellCache:
        return cache if isinstance(cache, CellCache) else self._filled(cache, self.cache(config))

    def _filled(self, cache: Any, made: CellCache) -> CellCache:
        """With the keys and values of a prompt that another cache has."""
        for number, layer in enumerate(cache.layers):
            own = made.layers[number]
            if isinstance(own, CellLayer):
                own.store = _grouped(layer, own.store)
            else:
                made.layers[number] = copy.copy(layer)
        return made

    def join(self, caches: Sequence[CellCache]) -> CellCache:
        return caches[0] if len(caches) == 1 else CellCache.batch(caches)

    def continued(self, model: Any, prompts: Sequence[Tensor], cache: CellCache, config: Any) -> list[Tensor]:
        if len(prompts) == 1 and not any(isinstance(layer, RequestLayer) for layer in cache.layers):
            # The step of one request is captured in a CUDA graph where it can be, and does not wait for others.
            ids = prompts[0][None]
            return list(generate(model, ids, cache=cache, attention_mask=torch.ones_like(ids), generation_config=config))
        return generate(model, prompts, cache=cache, generation_config=config)

    def keys_read(self, cache: CellCache) -> float:
        return _over_layers(cache, _keys_read)


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

    def writing(self, model: Any, tokens: int) -> AbstractContextManager[None]:
        return by_peer(model, self.rule)

    def adopt(self, cache: PeerCache, config: Any) -> PeerCache:
        return cache.by_rule(self.rule, self.share)

    def keys_read(self, cache: PeerCache) -> float:
        return _over_layers(
            cache, lambda layer: min(_length(layer), layer.budget) if isinstance(layer, PeerLayer) else _length(layer)
        )


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

    def writing(self, model: Any, tokens: int) -> AbstractContextManager[None]:
        return self.reading(model, tokens)

    def cache(self, config: Any) -> Any:
        return PeerCache(config)

    def adopt(self, cache: Any, config: Any) -> CellCache:
        lengths = [layer.get_seq_length() for layer in cache.layers if type(layer) in (DynamicLayer, PeerLayer)]
        return self._filled(cache, self._cells(config, cache_of_budget(self.share, max(lengths, default=0))))


LOOKED_AT = 16
"""Rows that tell how many keys a step reads."""


@dataclass(frozen=True)
class WeightWay(BudgetWay):
    """The same with as many cells as a step needs: those in which a query may give a key a share of its weights.

    Attributes:
        share: of the prompt's keys, that a step reads at most.
        min_weight: as in `CellCache`.
    """

    min_weight: float = 0.004

    def _cells(self, config: Any, method: CacheMethod | Mapping[int | str, CacheMethod] | None) -> CellCache:
        return CellCache(method, config=config, group_from=self.group_from, min_weight=self.min_weight)

    def adopt(self, cache: Any, config: Any) -> CellCache:
        made = super().adopt(cache, config)
        for layer, read in zip(made.layers, cache.layers, strict=True):
            if isinstance(layer, CellLayer):
                layer.latest = read.queries[:, :, -LOOKED_AT:], read.scale  # type: ignore[attr-defined]
        return made

    def keys_read(self, cache: CellCache) -> float:
        """As the last rows of the prompt would have: how many cells a step opens depends on its query."""
        return _over_layers(cache, lambda layer: _keys_read(layer, _opened_lately(layer)))


def _opened_lately(layer: Any) -> float | None:
    """How many keys the last rows of a prompt read in cells that they open, if cells are what they read."""
    if not isinstance(layer, CellLayer) or not isinstance(layer.store, CellStore) or not layer.store.closed:
        return None
    return layer.store.opened_keys(*layer.latest)  # type: ignore[attr-defined]


def cache_of_budget(share: float, tokens: int) -> Cells:
    """Cells for a cache that reads this share of a prompt, with cells of half the default size."""
    size = half_cell_size(tokens)
    always = CacheSizes.of(None, None, None, 16).window + 16
    return Cells(cell_size=size, probes=max(1, (budget_of(share, tokens) - always) // size))


def cells_of_budget(share: float, tokens: int) -> Cells:
    """Cells whose rows read this share of what they see on average: their own segment takes up to a quarter of it."""
    budget = budget_of(share / 2, tokens)
    segment = 1 << max(6, int(math.log2(budget / 2)))
    return Cells(segment=segment, cell_size=32, probes=max(1, (budget - segment // 2 - 16) // 32))


def _grouped(layer: Any, store: Any) -> Any:
    """A store with the keys and values of a prompt's layer, in cells. Those made of them last serve again if they differ
    in nothing but how many are opened."""
    kept = layer.grouped
    if kept is None or not _has_same_cells(kept, store):
        layer.grouped = None  # Two of them may not fit on a card.
        store.append(layer.keys, layer.values)
        if not isinstance(store, CellStore):
            store.close()
            return store
        store.close(query=layer.queries)
        layer.grouped = store
    # It shares memory with the one that is kept, which nobody appends to.
    found = copy.copy(layer.grouped)
    found.method, found.min_weight = store.method, store.min_weight
    return found


def _has_same_cells(kept: CellStore, store: Any) -> bool:
    if not isinstance(store, CellStore) or kept.group_from != store.group_from:
        return False
    return replace(kept.method, probes=store.method.probes) == store.method


def _is_exact_faster(model: Any, tokens: int) -> bool:
    config = model.config.get_text_config(decoder=True)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    one = torch.empty(1, 1, 1, dim, dtype=model.dtype, device=model.device)
    query, key = (one.expand(1, heads, tokens, dim) for heads in (config.num_attention_heads, config.num_key_value_heads))
    return is_exact_faster(query, key, is_causal=True)


def _length(layer: Any) -> float:
    return float(layer.keys.shape[-2])


def _keys_read(layer: Any, opened: float | None = None) -> float:
    """The first keys, those in no cell yet, and those in opened cells; None: as many as these cells have on average."""
    if not isinstance(layer, CellLayer):
        return _length(layer)
    store: Any = layer.store
    closed, cells = getattr(store, "closed", 0), getattr(store, "cells", 0)
    if not closed:
        return float(store.length)
    opened = min(closed, store.probes * closed / cells) if opened is None else opened
    return min(store.length, store.length - closed + min(closed, store.method.sinks) + opened)


def _over_layers(cache: Any, count: Callable[[Any], float]) -> float:
    """The mean of what is counted in each layer that has no window."""
    layers = [layer for layer in cache.layers if not getattr(layer, "is_sliding", False)] or list(cache.layers)
    return sum(map(count, layers)) / max(1, len(layers))


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
BY_QUERIES = Cells(partition=KMeans(by_queries=True))
add(CellWay("queries", "Cells made for the queries for the prompt, a CellCache for the answer", BY_QUERIES))
add(Way("queries+exact", "Cells made for the queries for the prompt, the answer exactly", BY_QUERIES))
add(CellWay("shared", "Cells(share=128) for the prompt, a CellCache for the answer", Cells(share=128)))
add(Way("shared+exact", "Cells(share=128) for the prompt, the answer exactly", Cells(share=128)))
add(CellWay("exact+cache", "the prompt exactly, a CellCache for the answer"))

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


WEIGHTS = (0.2, 0.4, 1)
"""Percent of its weights that a query may give a key, for a cell to be opened by ways with a least weight."""


def _add_weights() -> None:
    """`weight-0.4`: answers open the cells in which a key may have 0.4% of a query's weights."""
    for percent in WEIGHTS:
        said = f"the prompt exactly, the answer by cells in which a key may have {percent:g}% of the weights"
        add(WeightWay(f"weight-{percent:g}", said, share=max(SHARES) / 100, min_weight=percent / 100))


_add_budgets()
_add_weights()
