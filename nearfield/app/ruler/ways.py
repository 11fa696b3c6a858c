"""Ways to read a prompt and to answer it, side by side in one run: attention for the prompt, and a cache for the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nearfield.auto import Auto
from nearfield.cells.method import Cells
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
    and `keys_read`.

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

    def cache(self, config: Any) -> Any:
        """An empty cache for one prompt."""
        return DynamicCache(config=config)

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
    """

    method: CacheMethod | Mapping[int | str, CacheMethod] | None = None
    opens_cells = True

    def cache(self, config: Any) -> CellCache:
        return CellCache(self.method, config=config)

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
add(CellWay("default", "Auto() for the prompt, a CellCache for the answer", Auto()))
add(Way("default+exact", "Auto() for the prompt, the answer exactly", Auto()))
add(CellWay("cells", "Cells() for the prompt, a CellCache for the answer", Cells()))
add(Way("cells+exact", "Cells() for the prompt, the answer exactly", Cells()))
add(CellWay("shared", "Cells(share=128) for the prompt, a CellCache for the answer", Cells(share=128)))
add(Way("shared+exact", "Cells(share=128) for the prompt, the answer exactly", Cells(share=128)))
add(CellWay("exact+cache", "the prompt exactly, a CellCache for the answer", Exact()))
