"""`CellCache`: a cache for Transformers that keeps keys and values in cells, or in an index."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearfield._compat import outside_of_compiled
from nearfield.cells.cache.guard import Guard
from nearfield.cells.cache.heavy import Watch
from nearfield.cells.cache.steps import StepError
from nearfield.cells.cache.store import CellStore, check_resident
from nearfield.cells.method import Cells
from nearfield.checks import MOST, check_has, check_positive
from nearfield.distributed.group import Ranks
from nearfield.distributed.store import ShardedStore
from nearfield.exact import Exact
from nearfield.hf.config import by_layer, read_config
from nearfield.hf.register import registered_function
from nearfield.hf.requests import RequestStores
from nearfield.hf.shards import load_stores, save_stores
from nearfield.hf.stored import StoredKeys
from nearfield.knn.store import IndexMethod, IndexStore, can_search
from nearfield.problem import to_autocast_dtype
from nearfield.results import figure_colours, new_figure

try:
    from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
except ImportError as error:
    raise ImportError("nearfield.hf needs Transformers 5.5 or later: pip install 'nearfield[transformers]'") from error


CacheMethod = Cells | IndexMethod | Exact
"""What a layer of a cache attends by: `Cells`, `TopK`, `LazyGumbel`, a method of your own like these two, or `Exact`."""

UNGROUPED = Cells(segment=MOST)
"""`Exact` for a store: its first segment never ends."""


class StoreOptions(NamedTuple):
    """How a layer keeps its keys: see `CellCache`."""

    offload: bool = False
    resident: int | None = None
    regroup: bool = True
    group_from: int | None = None
    min_weight: float | None = None
    eps: float | None = None
    ranks: Ranks | None = None
    balance: str = "global"
    layer: int | None = None
    """with `ranks`: which layer of the model this is"""

    @staticmethod
    def of(store: CellStore | IndexStore) -> StoreOptions:
        """Those with which this one was made."""
        if not isinstance(store, CellStore):
            return StoreOptions()
        of_steps = store.min_weight, store.guard and store.guard.eps
        found = StoreOptions(store.offload, store.resident, store.regroup, store.group_from, *of_steps)
        if isinstance(store, ShardedStore):
            return found._replace(resident=None, ranks=store.ranks, balance=store.balance, layer=store.layer)
        return found


class CellLayer(CacheLayerMixin):
    """One layer of a `CellCache`: a `CellStore` or an `IndexStore` with the interface of Transformers."""

    store: CellStore | IndexStore | RequestStores
    is_sliding = False
    is_croppable = True

    def __init__(self, method: CacheMethod | None = None, audit: bool = False, options: StoreOptions | None = None) -> None:
        self._options = StoreOptions() if options is None else options
        self.store = _make_store(Cells() if method is None else method, audit, self._options)

    # In Transformers the next three are attributes.

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        return self.store.length > 0

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """`[batch, heads, length, dim]` in the order of the tokens: a copy, for inspection."""
        return self.store.keys

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        return self.store.values

    def __repr__(self) -> str:
        return f"CellLayer({self.store.summary})"

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.store.append(key_states[:, :, :0], value_states[:, :, :0])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store keys and values `[batch, heads, new, dim]`; returns handles that only nearfield's attention can read."""
        key, value = to_autocast_dtype(key_states, value_states)
        self.store.append(key, value)
        return StoredKeys(self.store, key), StoredKeys(self.store, value)

    def get_seq_length(self, *args: Any) -> int:
        return self.store.length

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        # Older versions of Transformers pass the positions of the queries.
        more = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.store.length + more, 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1

    def reset(self) -> None:
        self.store = _make_store(self.store.method, self.store.audit, self._options)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the latest `-tokens_to_remove` tokens. A positive number says how many to keep, as in older versions."""
        if not tokens_to_remove or not self.store.length:
            return
        kept = self.store.length + tokens_to_remove if tokens_to_remove < 0 else min(tokens_to_remove, self.store.length)
        self.store.crop(max(0, kept))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.store.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.store.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.store.length:
            self.store.repeat(repeats)

    def offload(self) -> None:
        raise NotImplementedError("a CellCache cannot be offloaded layer by layer; make it with CellCache(offload=True)")

    prefetch = offload


class RequestLayer(CellLayer):
    """One layer of requests of different lengths."""

    store: RequestStores

    def __init__(self, stores: Sequence[CellStore | IndexStore], padding: int = 0) -> None:
        self._options = StoreOptions()
        self.store = RequestStores(stores, padding)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Every request has its store already."""

    def reset(self) -> None:
        stores = self.store.stores
        self.store = RequestStores([_make_store(x.method, x.audit, StoreOptions.of(x)) for x in stores])


def _make_store(method: CacheMethod, audit: bool, options: StoreOptions) -> CellStore | IndexStore:
    """An empty store for this method; raises where there is none."""
    if isinstance(method, Exact):
        method = UNGROUPED
    if isinstance(method, Cells):
        alone = options._asdict()
        ranks, balance, layer = alone.pop("ranks"), alone.pop("balance"), alone.pop("layer")
        if ranks is None:
            return CellStore(method, audit=audit, **alone)
        here = [f"{name}={getattr(options, name)!r}" for name in ("resident", "min_weight") if getattr(options, name) is not None]
        for given in [*here, *([] if options.regroup else ["regroup=False"])]:
            raise ValueError(f"{given} is for keys on one machine, and mesh shares them out over ranks; leave one of them out")
        together = {name: alone[name] for name in ("offload", "group_from", "eps")}
        return ShardedStore(method, ranks, balance=balance, audit=audit, layer=layer, **together)
    if not can_search(method):
        raise TypeError(f"a cell cache attends by Cells(...), TopK(...), LazyGumbel(...) or Exact(), got {method!r}")
    if options.offload:
        raise ValueError(f"offload=True is for Cells(...) only, got {method!r}; an index needs its keys where queries are")
    if options.ranks is not None:
        raise ValueError(f"mesh is for Cells(...) only, got {method!r}; an index needs its keys where queries are")
    for name in ("eps", "group_from", "min_weight"):
        given = getattr(options, name)
        if given is not None:
            raise ValueError(f"{name}={given!r} is for Cells(...) only, got {method!r}; leave it out: an index has no cells")
    check_resident(options.resident, options.offload)
    return IndexStore(method, audit=audit)


class CellCache(Cache):
    """A cache of keys and values that new tokens search, instead of reading all of it.

    It is for models whose attention nearfield has registered. The prompt attends by the registered method. Later tokens attend
    by the cache, one at a time, a few (assisted decoding) or many (chunked prefill): exactly to their own segment and the first
    keys, and to earlier segments through cells, of which they open the best (`nearfield.cells.cache.CellStore`). Or, with `TopK`
    or `LazyGumbel`, to what an index finds that grows with the keys (`nearfield.knn.store.IndexStore`).

    Args:
        method: `Cells(...)`, as for `CellStore`; `TopK(...)` or `LazyGumbel(...)`, as for `IndexStore`; `Exact()` reads all keys
            in every step, and offloads none (with a `mesh`, one rank has all of them). A mapping gives layers methods of their
            own: its keys are layer numbers, and `"default"` for all other layers (`Cells()` if it is missing). Or the path of a
            file with such a mapping, as `nearfield tune --cache` writes it. None: what is registered for the model of `config`:
            the `"cache"` of the file that `hf.register` was given, if it has one; else, layer by layer, its method where that is
            `TopK` or `LazyGumbel`, and `Cells()` elsewhere.
        config: of the model. Layers that have a sliding window or another kind of state then get the cache that Transformers has
            for them, and new tokens attend to it exactly. Needed for models with such layers.
        audit: compare each step of each layer with exact attention over all stored keys; see `errors`. It may be switched on and
            off at any time.
        offload: keep keys and values of closed segments in CPU memory, pinned if the model is on a GPU. Results are the same with
            the same probes; a step moves only the keys and values of the cells it opens, and the first ones, and by default opens
            fewer than from a GPU's memory. For `Cells` only.
        resident: with `offload`, on a GPU that runs the Triton kernels: how many keys per layer, head and batch entry stay on
            the card as well, with their values, because they were opened lately. None: what eight steps open, but no more than an
            eighth; 0: none. Results are the same bit for bit; see `CellStore`.
        regroup: False: take over the cells of a prompt's attention where it was by `Cells`, from 32,768 keys on, instead of
            grouping its keys anew; see `CellStore`.
        group_from: how many tokens there are before any are grouped into cells; until then all steps are exact. None: 8,192, on
            a GPU 16,384, since up to there cells save little time or none. Where the method has a segment, that decides.
        min_weight: cells stay closed in which no query may give a key more than this share of its weights, such as 0.004. So a
            step opens as many as it needs, up to four times the usual number; see `CellStore`. None: always the same number.
        eps: the error that the attention of a step may have, pooled over the heads of a layer. Every 32nd step is compared with
            exact attention, and where a layer is off by more, it opens more cells from then on; see `CellStore` and `guards`.
            None: nobody looks.
        mesh: a `DeviceMesh` of one dimension, such as `mesh["cp"]`, or a process group of torch.distributed: its ranks share the
            keys out among them. All of them run the model on the same tokens, and get the same tokens; see
            `nearfield.distributed.ShardedStore` and docs/distributed.md. `offload` and `eps` work with it, `resident`,
            `min_weight` and `regroup=False` do not. None: all keys are here.
        balance: with `mesh`, "global": the best cells of all ranks are opened; "local": each rank opens as many, its own best
            ones.
        check: with `mesh`, whether the ranks compare what they are asked before each layer of a step.

    A call of the model that is interrupted leaves some layers with its tokens and others without. The next call is then refused,
    with an error that says how to go on: `crop(n)` to the n tokens that all layers have (for layers with a window, `reset()`).
    Interrupted after the last layer, all of them have the tokens: `get_seq_length()` tells. So is a cache whose batch entries
    were reordered in some layers only.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from nearfield import hf
        >>> small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=50, **small))
        >>> hf.register()
        >>> model.set_attn_implementation("nearfield")
        >>> cache = hf.CellCache(nearfield.Cells(segment=32, probes=2), config=model.config)
        >>> prompt = torch.arange(40)[None]
        >>> text = model.generate(prompt, max_new_tokens=8, do_sample=False, past_key_values=cache)
    """

    def __init__(
        self,
        method: CacheMethod | Mapping[int | str, CacheMethod] | str | os.PathLike[str] | None = None,
        *,
        config: Any = None,
        audit: bool = False,
        offload: bool = False,
        resident: int | None = None,
        regroup: bool = True,
        group_from: int | None = None,
        min_weight: float | None = None,
        eps: float | None = None,
        mesh: Any = None,
        balance: str = "global",
        check: bool = True,
    ) -> None:
        if hasattr(method, "get_text_config") or hasattr(method, "config"):
            told = "model" if hasattr(method, "config") else "model.config"
            raise TypeError(
                f"method must be a method, got {type(method).__name__}; for the cache of a model write "
                f"CellCache(config=model.config), not CellCache({told})"
            )
        if config is not None and not hasattr(config, "get_text_config"):
            raise TypeError(
                f"config must be the config of a model, got {type(config).__name__}; write CellCache(config=model.config)"
            )
        if isinstance(method, str | os.PathLike):
            method = _from_file(method, config)
        self.methods: dict[int | str, CacheMethod] = by_layer(_registered(config) if method is None else method, Cells())
        ranks = None if mesh is None else Ranks.of(mesh, check)
        options = StoreOptions(offload, resident, regroup, group_from, min_weight, eps, ranks, balance)
        for one in self.methods.values():
            _make_store(one, audit, options)  # raises if it cannot be
        self._audit, self._options = audit, options
        self._torn: str | None = None
        """an operation that some layers may have seen, and others not"""
        super().__init__(layers=[])
        kinds = DynamicCache(config=config).layers
        # Made here, and not by Transformers, to which the cache would have to give a method of its own: then it would go round in
        # a circle, and its memory would be free only when the garbage collector comes by.
        self._grows = not kinds
        """whether layers are made when they are first needed, because no config says how many there are"""
        for layer in kinds:
            self.layers.append(self._next_layer() if type(layer) is DynamicLayer else layer)

    def _next_layer(self) -> CellLayer:
        number = len(self.layers)
        method = self.methods.get(number, self.methods["default"])
        return CellLayer(method, self._audit, self._options._replace(layer=number))

    @classmethod
    def batch(cls, caches: Sequence[CellCache], padding: int = 0) -> CellCache:
        """One cache for requests of different lengths, each with a cache of its own until now.

        A model then serves them as a batch, one token of each in a step. Nothing in cells is copied, nothing is padded, and each
        request gets the result that it gets alone. To the model it is a batch padded on the left to the longest request
        (`get_seq_length`): pass `cache.attention_mask()`, and position ids `[batch, 1]` from `lengths`. `nearfield.hf.generate`
        does all of this for a list of prompts. `padding`: so many more tokens of padding stand before the longest request.

        Layers with a sliding window become a batch of their own, which needs every request to fill the window.

        The given caches are part of it from now on, and are not to be used by themselves.
        """
        caches = list(caches)
        if not caches:
            raise ValueError("there are no caches to put together; pass a list of CellCache(...)")
        check_positive("padding", padding, least=0, most=MOST)
        layers = [_layers_of(cache, number) for number, cache in enumerate(caches)]
        if len(set(map(len, layers))) > 1:
            raise ValueError(f"the caches must be of one model, got {[*map(len, layers)]} layers")
        made = cls(caches[0].methods["default"])
        for name in ("methods", "_audit", "_options"):
            setattr(made, name, getattr(caches[0], name))
        made._grows = False
        made.layers = [_joined(own, number, padding) for number, own in enumerate(zip(*layers, strict=True))]
        return made

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write a cache with a `mesh` into a folder that all ranks have in common, each rank its own file; see
        `nearfield.distributed.files`. If that fails or is interrupted, what an earlier save has left there stays."""
        self.check_torn()
        save_stores(Path(folder), [getattr(layer, "store", layer) for layer in self.layers], self._options.group_from)

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        mesh: Any,
        *,
        device: torch.device | str | None = None,
        audit: bool = False,
        offload: bool = False,
        eps: float | None = None,
        balance: str = "global",
        check: bool = True,
    ) -> CellCache:
        """What `save` has written, on as many ranks or on others, on the `device` of the model (None: the CPU). The other
        arguments are those of a new cache. To be used with the model that has made it. Raises ValueError, on all ranks, on any
        other folder."""
        ranks = Ranks.of(mesh, check)
        methods, shares, group_from = load_stores(Path(folder), ranks, device, offload)
        by_number: dict[int | str, CacheMethod] = dict(enumerate(methods))
        cache = cls(by_number, audit=audit, offload=offload, group_from=group_from, eps=eps, mesh=ranks, balance=balance)
        for share in shares:
            layer = cache._next_layer()
            assert isinstance(layer.store, ShardedStore)
            layer.store.restore(share)
            cache.layers.append(layer)
        return cache

    @property
    def sent(self) -> dict[str, int]:
        """With `mesh`: bytes that this rank has sent to others, by what they were."""
        return {} if self._options.ranks is None else dict(self._options.ranks.sent)

    @property
    def lengths(self) -> list[int]:
        """How many keys each entry of the batch has; of a cache with padding, its padding among them."""
        layer = next(iter(self._cell_layers().values()), None)
        if layer is None:
            return []
        return layer.store.lengths if isinstance(layer.store, RequestStores) else [layer.store.length] * layer.store.entries

    def attention_mask(self, new: int = 1) -> Tensor:
        """`[batch, keys + new]`, 0 before the first key of each request: the mask of a step with so many new tokens."""
        layer = next(iter(self._cell_layers().values()), None)
        if layer is None or not isinstance(layer.store, RequestStores):
            raise ValueError("only a cache made by CellCache.batch([...]) knows its mask")
        return layer.store.counts(new).long()

    def replace(self, number: int, cache: CellCache) -> None:
        """Put another request in the place of request `number` of a cache that `batch` has made."""
        before = [layer for layer in self.layers if isinstance(layer, RequestLayer)]
        if not before:
            raise ValueError("only requests of a cache made by CellCache.batch([...]) can be replaced")
        if len(before) < len(self.layers):
            raise ValueError("requests of a model with sliding windows cannot be replaced; make another batch")
        # Behind a longer request, layers of different lengths would no longer be noticed.
        self.check_alike()
        requests = len(before[0].store.stores)
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < requests:
            raise ValueError(f"number must be that of a request, from 0 to {requests - 1}, got {number!r}")
        new: list[Any] = [layer.store for layer in _layers_of(cache, number) if isinstance(layer, CellLayer)]
        if len(new) != len(self.layers):
            raise ValueError(f"the cache of another request must be of the same model: {len(self.layers)} layers, got {len(new)}")
        both = zip((layer.store for layer in before), new, strict=True)
        self.layers = [RequestLayer([*old.stores[:number], store, *old.stores[number + 1 :]], old.padding) for old, store in both]

    @outside_of_compiled
    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self._check_whole(layer_idx, key_states.shape[-2])
        while self._grows and len(self.layers) <= layer_idx:
            self.layers.append(self._next_layer())
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def _check_whole(self, layer_idx: int, new: int) -> None:
        """Raise unless all layers before this one have `new` tokens more than those from this one on, which are alike."""
        first = next((i for i, layer in enumerate(self.layers) if isinstance(layer, CacheLayerMixin)), layer_idx)
        if layer_idx <= first:
            self.check_alike()
            return
        self.check_torn()
        layers: list[Any] = self.layers
        own = layers[layer_idx].get_seq_length() if layer_idx < len(layers) else 0
        if own + new != layers[first].get_seq_length():
            raise self._interrupted()

    def check_alike(self) -> None:
        """Raise unless all layers have the same tokens, as they have between two calls of the model."""
        self.check_torn()
        lengths = self._lengths()
        # A layer that borrows keys from another one never has any; one that has lost them is found when its turn comes.
        if any(length not in (0, lengths[0]) for length in lengths):
            raise self._interrupted()

    def _interrupted(self) -> RuntimeError:
        least, most = min(self._lengths()), max(self._lengths())
        can_crop = least and all(isinstance(layer, CellLayer) for layer in self.layers)
        remedy = f"crop({least}) to go on from the tokens that all layers have, or reset()" if can_crop else "reset()"
        return RuntimeError(
            f"the layers of this cache have {least} to {most} tokens: a call of the model was interrupted, or did not use all"
            f" layers; call {remedy}"
        )

    def _lengths(self) -> list[int]:
        """By layer, how many tokens it has; without layers that count none."""
        return [layer.get_seq_length() for layer in self.layers if isinstance(layer, CacheLayerMixin)]

    @contextmanager
    def in_one_go(self, name: str) -> Iterator[None]:
        """For what changes layer after layer: if it ends half-way, the cache refuses to be used."""
        self.check_torn()
        self._torn = name
        yield
        self._torn = None

    def check_torn(self) -> None:
        """Raise if some layers may have seen an operation that others have not."""
        if self._torn is not None:
            raise RuntimeError(
                f"{self._torn} was interrupted, and the layers of this cache may no longer hold the same tokens of the same "
                "batch entries; call reset() and begin again"
            )

    def _in_all_layers(self, name: str, argument: Any) -> None:
        """Call a method of all layers. If that ends half-way, the cache refuses to be used."""
        self.check_torn()
        self._torn = name
        for number, layer in enumerate(self.layers):
            try:
                getattr(layer, name)(argument)
            except Exception as error:
                # A layer of ours that raises is as it was; requests are where they have refused.
                if number == 0 and (type(layer) is CellLayer or (type(layer) is RequestLayer and type(error) is ValueError)):
                    self._torn = None
                raise
        self._torn = None

    def crop(self, tokens_to_remove: int) -> None:
        if any(isinstance(layer, RequestLayer) for layer in self.layers):
            # Lengths of layers would not tell: they are those of the longest request.
            self._in_all_layers("crop", tokens_to_remove)
        else:
            super().crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._in_all_layers("reorder_cache", beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._in_all_layers("batch_select_indices", indices)
        requests = next((layer for layer in self.layers if isinstance(layer, RequestLayer)), None)
        if requests is not None:
            for layer in self.layers:
                if isinstance(layer, DynamicSlidingWindowLayer):
                    layer.cumulative_length = requests.store.length  # that of the longest one which is left

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._in_all_layers("batch_repeat_interleave", repeats)

    def reset(self) -> None:
        super().reset()
        self._torn = None

    @property
    def audit(self) -> bool:
        """Whether steps are compared with exact attention."""
        return self._audit

    @audit.setter
    def audit(self, audit: bool) -> None:
        self._audit = audit
        for layer in self._cell_layers().values():
            layer.store.audit = audit

    @property
    def errors(self) -> dict[int, list[StepError]]:
        """By layer, the error of every call after the prompt that was made while `audit` was set."""
        return {number: layer.store.errors for number, layer in self._cell_layers().items()}

    @property
    def guards(self) -> dict[int, Guard]:
        """With `eps`, by layer: the error at the last look, and how many times the usual number of cells is opened. Of a cache
        made by `batch`, of the request that opens most."""
        found = {}
        for number, layer in self._cell_layers().items():
            stores = layer.store.stores if isinstance(layer.store, RequestStores) else [layer.store]
            guards = [store.guard for store in stores if isinstance(store, CellStore) and store.guard is not None]
            if guards:
                found[number] = max(guards, key=lambda guard: (guard.factor, guard.error or 0.0))
        return found

    def watch(self, heavy: Watch | Mapping[int, Watch] | None) -> None:
        """Count from now on which keys the steps of all layers look at most; None: no longer. For layers with `Cells`.

        A mapping gives layers what counts for them alone, by their number; the others are not watched.
        """
        stores = {number: layer.store for number, layer in self._cell_layers().items()}
        for one in heavy.values() if isinstance(heavy, Mapping) else [heavy]:
            if one is not None:
                check_has("heavy", one, "add", "what counts, such as HeavyKeys(length), or None")
        if self._options.ranks is not None:
            raise ValueError("keys that are shared out over ranks are not watched: no rank sees what the others open")
        if any(isinstance(store, RequestStores) for store in stores.values()):
            raise ValueError("requests of different lengths cannot be watched together; watch the cache of one of them alone")
        for number, store in stores.items():
            if isinstance(store, CellStore):
                store.watch = heavy.get(number) if isinstance(heavy, Mapping) else heavy

    def plot_errors(self) -> Any:
        """A figure of `errors`: the relative error of every step, averaged over batch entries and heads, layer by layer.

        Needs matplotlib, and steps that were made while `audit` was set.
        """
        errors = {layer: steps for layer, steps in self.errors.items() if steps}
        if not errors:
            raise ValueError("there are no errors to plot: set cache.audit = True, or make CellCache(audit=True), and decode")
        figure, (axes,) = new_figure(1)
        colours = figure_colours(len(errors))
        for colour, (layer, steps) in zip(colours, errors.items(), strict=True):
            rows = [(step.first + row, float(error)) for step in steps for row, error in enumerate(step.relative.mean((0, 1)))]
            positions, means = zip(*rows, strict=True)
            axes.plot(positions, means, "o-", color=colour, linewidth=1, markersize=3, label=f"layer {layer}")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set(title="Error of decoding steps", xlabel="position", ylabel="relative error, mean over heads", ylim=(0, None))
        axes.legend(frameon=False, fontsize="small", ncols=1 + len(errors) // 9, loc="center left", bbox_to_anchor=(1.0, 0.5))
        return figure

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of all layers with cells or an index, by what they are for."""
        total: dict[str, int] = {}
        for layer in self._cell_layers().values():
            for what, size in layer.store.nbytes.items():
                total[what] = total.get(what, 0) + size
        return total

    def _cell_layers(self) -> dict[int, CellLayer]:
        return {number: layer for number, layer in enumerate(self.layers) if isinstance(layer, CellLayer)}


def _layers_of(cache: CellCache, number: int) -> list[Any]:
    """The layers of a request. Raises where one of them cannot be put together with those of others."""
    if not isinstance(cache, CellCache):
        raise TypeError(f"request {number} must have a CellCache of its own, got {type(cache).__name__}")
    cache.check_alike()
    for place, layer in enumerate(cache.layers):
        if isinstance(layer, CellLayer):
            refused = "requests of its own" if isinstance(layer.store, RequestStores) else None
            entries = 1 if isinstance(layer.store, RequestStores) or not layer.store.length else layer.store.entries
        else:
            is_window = isinstance(layer, DynamicSlidingWindowLayer)
            refused = None if is_window else f"a {type(layer).__name__}"
            keys = getattr(layer, "keys", None)
            entries = 1 if keys is None else len(keys)
        if refused is not None:
            raise ValueError(f"layer {place} of request {number} has {refused}, which cannot be put together with others")
        if entries != 1:
            raise ValueError(f"request {number} must be one sequence, got a batch of {entries}")
    return cache.layers


def _joined(layers: Sequence[Any], number: int, padding: int) -> Any:
    """One layer for those of several requests, with so much padding before the longest one."""
    if isinstance(layers[0], CellLayer):
        return RequestLayer([layer.store for layer in layers], padding)
    return joined_windows(layers, number, max(layer.get_seq_length() for layer in layers) + padding)


def joined_windows(layers: Sequence[Any], number: int, longest: int) -> Any:
    """A layer with a sliding window for several requests. Each must fill the window: then it has no padding in it."""
    made = copy.copy(layers[0])
    if len(layers) == 1 and made.get_seq_length() == longest:
        return made
    short = [i for i, x in enumerate(layers) if x.get_seq_length() < x.sliding_window]
    if short:
        raise ValueError(
            f"layer {number} has a window of {made.sliding_window} tokens, and request {short[0]} has fewer: it cannot be put "
            "together with others; continue it by itself"
        )
    made.keys, made.values = (torch.cat([getattr(x, name) for x in layers]) for name in ("keys", "values"))
    made.cumulative_length = longest
    return made


def _registered(config: Any) -> dict[int | str, CacheMethod] | None:
    """What is registered for the cache of a model; if nothing is, its methods for prompts, with `Cells()` in place of those that
    no index serves; None: there are none."""
    if config is None:
        return None
    function = registered_function(getattr(config.get_text_config(decoder=True), "_attn_implementation", None) or "eager")
    if function is None:
        return None
    if function.cache is not None:
        return dict(function.cache)  # type: ignore[arg-type]  # the file was checked when it was registered
    return {layer: method if can_search(method) else Cells() for layer, method in function.methods.items()}


def _from_file(path: str | os.PathLike[str], config: Any) -> dict[int | str, CacheMethod]:
    """What a file says about the cache of a model."""
    found = read_config(path)
    if found.cache is None:
        raise ValueError(
            f'config {os.fspath(path)} says nothing about a cache; `nearfield tune MODEL TEXT --cache` adds "cache" to it'
        )
    layers = None if config is None else getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
    if None not in (layers, found.num_hidden_layers) and layers != found.num_hidden_layers:
        raise ValueError(
            f"config {os.fspath(path)} is for a model of {found.num_hidden_layers} layers, but this one has {layers}; make one "
            "for it with `nearfield tune MODEL TEXT --cache`"
        )
    return dict(found.cache)  # type: ignore[arg-type]
