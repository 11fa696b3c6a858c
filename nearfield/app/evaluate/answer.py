"""`evaluate_answers`: the same as `evaluate` for the steps of an answer, which read a prompt through a cache of cells."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from nearfield.app.evaluate.measure import (
    LayerErrors,
    attending,
    compared,
    losses_of,
    measure_sensitivity,
    ticking,
    ticks_per_pass,
)
from nearfield.app.evaluate.models import layer_count
from nearfield.app.evaluate.run import Evaluation, Progress, SettingResult, Silent, common_length, recommend
from nearfield.app.evaluate.settings import BUDGETS, LADDER, TRIALS, WRITTEN, AnswerGeometry, Setting
from nearfield.cells.cache.store import CellStore, Near
from nearfield.cells.method import Cells
from nearfield.cells.partition.by_queries import LATEST
from nearfield.cells.trial import Prepared
from nearfield.exact import Exact
from nearfield.hf.cache import UNGROUPED, CellCache, CellLayer
from nearfield.hf.config import LayerConfig
from nearfield.hf.stored import UnreadableError

ROWS = 128
"""So many steps at a time: each reads what it would read alone, while more rows would be a chunk of a prompt."""


def evaluate_answers(
    model: Any,
    texts: Mapping[str, Tensor],
    *,
    tokens: int = 8192,
    written: int = WRITTEN,
    budgets: Sequence[float] = BUDGETS,
    tolerance: float = 0.004,
    ladder: Sequence[float] = LADDER,
    progress: Progress | None = None,
) -> Evaluation:
    """Measure perplexity and errors of the steps of an answer at several budgets, and choose one for each layer.

    All but the last tokens of each text are read exactly, once. The last ones are predicted as steps of an answer, through a
    `CellCache` that has grouped what was read into cells. Layers with sliding windows stay exact.

    Args:
        model: a causal language model of Transformers (see `load_model`).
        texts: token ids `[1, n]` by the name of a text; as in `evaluate`, all texts are cut to the same length.
        written: tokens of an answer.
        budgets: shares of the prompt's keys that are in the cells which a step opens, to show, and to choose from.
        tolerance: how much perplexity of the answer may grow in each text, as a share of that of exact attention.
        ladder: more budgets to choose from for each layer.
    """
    progress = progress or Silent()
    count = common_length(model, texts, tokens)
    geometry = AnswerGeometry(count, written)
    rungs = geometry.settings([*budgets, *ladder])
    settings = [Setting("default", Cells()), *geometry.settings(budgets)]
    tried = [settings[0], *rungs]
    steps = len(range(0, written, ROWS))
    progress.start((1 + steps * (2 + len(settings) + TRIALS)) * len(texts) * ticks_per_pass(model))
    progress.at("prompts")
    every_size = {setting.method.cell_size for setting in tried if isinstance(setting.method, Cells)}
    prompts = [Prompt(model, ids[:, :count].to(model.device), written, every_size, progress.step) for ids in texts.values()]
    passes = _Steps(model, geometry, prompts, progress)

    errors = passes.errors(tried)
    exact = replace(passes.result_of(Setting("exact", Exact())), keys=errors.all_keys)
    results = []
    for setting in settings:
        place = next(i for i, one in enumerate(tried) if one.method == setting.method)
        keys = float(errors.keys[place].nanmean())
        results.append(replace(passes.result_of(setting), errors=errors.relative[place], keys=keys))
    found = recommend(passes, rungs, errors.at(list(range(1, len(tried)))), tolerance, [exact, *results])
    chosen = replace(found, config=LayerConfig({}, layer_count(model), cache=found.config.methods))
    return Evaluation(list(texts), geometry, layer_count(model), exact, results, chosen)


class _Unread(CellStore):
    """The keys of a prompt in no cells, and its latest queries."""

    queries: Tensor | None = None

    def close(self, prepared: Prepared | None = None, query: Tensor | None = None) -> None:
        self.queries = None if query is None else query[:, :, -LATEST:].clone()


class Prompt:
    """A text `[1, n]` of which all but the last tokens were read exactly.

    Attributes:
        layers: what was read, as a cache has it. Nobody appends to it: passes go on with copies, one after the other.
        grouped: for the layers without a window, the same keys in cells of several sizes (None: that of a cache).
    """

    def __init__(
        self, model: Any, ids: Tensor, written: int, cell_sizes: Iterable[int | None], tick: Callable[[], None] | None = None
    ) -> None:
        self.ids, self.start = ids, ids.shape[1] - written - 1
        cache = CellCache(Exact(), config=model.config)
        in_cells = [layer for layer in cache.layers if isinstance(layer, CellLayer)]
        if not in_cells:
            raise ValueError(
                f"no layer of {type(model).__name__} keeps all of its keys (they have sliding windows, or another kind of "
                "state), so there is nothing for a cache of cells to do; give another model"
            )
        for layer in in_cells:
            layer.store = _Unread(UNGROUPED)
        try:
            with torch.no_grad(), attending(model, Exact()), ticking(model, tick):
                model.base_model(ids[:, : self.start], past_key_values=cache, use_cache=True)
        except UnreadableError as error:
            raise ValueError(
                f"the layers of {type(model).__name__} do not leave the keys of their cache to the attention that is registered "
                "with Transformers, so no cache of cells serves them; give another model"
            ) from error
        self.layers: list[Any] = list(cache.layers)
        self.grouped: dict[int, dict[int | None, CellStore]] = {}
        for number, layer in enumerate(self.layers):
            # A layer that borrows the keys of another one has none.
            if isinstance(layer, CellLayer) and layer.store.length:
                self.grouped[number] = {size: self._in_cells(layer.store, size) for size in cell_sizes}

    @staticmethod
    def _in_cells(read: Any, cell_size: int | None) -> CellStore:
        made = CellStore(Cells(cell_size), group_from=0)
        made.append(read.keys, read.values)
        made.close(query=read.queries)
        return made

    def store(self, layer: int, method: Any) -> CellStore:
        """What was read in a layer, for steps by this method."""
        if isinstance(method, Exact):
            read: CellStore = self.layers[layer].store
            return copy.copy(read)
        made = copy.copy(self.grouped[layer][method.cell_size])
        made.method = method
        return made

    @torch.no_grad()
    def losses(self, model: Any, stores: Mapping[int, CellStore], tick: Callable[[], None] | None = None) -> Tensor:
        """-log p of the written tokens. `stores`: what each layer in `grouped` reads and appends to."""
        cache = CellCache(Exact(), config=model.config)
        for number, layer in enumerate(self.layers):
            if number in self.grouped:
                cache.layers[number] = made = copy.copy(layer)
                made.store = stores[number]
            else:  # Some kinds of state are changed in place.
                cache.layers[number] = copy.deepcopy(layer)
        written = self.ids[:, self.start : -1]
        with attending(model, Exact()), ticking(model, tick):
            states = [
                model.base_model(part, past_key_values=cache, use_cache=True).last_hidden_state for part in written.split(ROWS, 1)
            ]
        return losses_of(model, torch.cat(states, 1), self.ids[:, self.start :])


class _Trying(CellStore):
    """Exact steps that also try other methods with the same keys, and record their errors."""

    def __init__(self, prompt: Prompt, layer: int, methods: Sequence[Any]) -> None:
        super().__init__(UNGROUPED)
        self.state = _state(prompt.store(layer, Exact()))
        self.tried, self.methods = {size: copy.copy(store) for size, store in prompt.grouped[layer].items()}, methods
        self.relative: list[Any] = [0.0] * len(methods)
        """by method, sums over rows: of ||output - exact|| / ||exact|| by head"""
        self.squared = [0.0] * len(methods)
        """of ||output - exact||^2, all heads together"""
        self.size, self.rows = 0.0, 0
        """of ||exact||^2, and the number of rows"""

    def append(self, key: Tensor, value: Tensor, counts: Tensor | None = None) -> None:
        super().append(key, value, counts)
        for store in self.tried.values():
            store.append(key, value, counts)

    def attend(self, query: Tensor, scale: float | None = None, near: Near | None = None) -> Tensor:
        exact = super().attend(query, scale)
        right = exact.float()
        norm = right.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
        self.size += float(norm.square().sum())
        self.rows += query.shape[2]
        for place, method in enumerate(self.methods):
            store = copy.copy(self.tried[method.cell_size])
            store.method = method
            off = (store.attend(query, scale).float() - right).norm(dim=-1)
            self.relative[place] += (off / norm).sum((0, 2)).cpu()
            self.squared[place] += float(off.square().sum())
        return exact


@dataclass
class _Steps:
    """Passes of a model over the answers of all texts."""

    model: Any
    geometry: AnswerGeometry
    prompts: Sequence[Prompt]
    progress: Progress
    exact: list[Tensor] = field(default_factory=list)
    """losses with exact attention, one tensor per text"""

    def errors(self, settings: Sequence[Setting]) -> LayerErrors:
        """Errors of cells in the layers without a window, on what these get with exact attention; mean over the texts."""
        self.progress.at("errors of all heads")
        found = [self._errors_in(prompt, [setting.method for setting in settings]) for prompt in self.prompts]
        relative, keys, squared = (torch.stack(part).mean(0) for part in zip(*found, strict=True))
        return LayerErrors(relative, keys, squared, self.geometry.all_keys)

    def _errors_in(self, prompt: Prompt, methods: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor]:
        trying = {layer: _Trying(prompt, layer, methods) for layer in prompt.grouped}
        self.exact.append(prompt.losses(self.model, trying, self.progress.step))
        heads = next(len(one.relative[0]) for one in trying.values())
        layers, unknown = layer_count(self.model), torch.nan
        relative = torch.full((len(methods), layers, heads), unknown, dtype=torch.float64)
        keys, squared = (torch.full((len(methods), layers), unknown, dtype=torch.float64) for _ in range(2))
        for layer, one in trying.items():
            relative[:, layer] = torch.stack(one.relative).double() / one.rows
            squared[:, layer] = torch.tensor(one.squared, dtype=torch.float64) / one.size
            for place, method in enumerate(methods):
                keys[place, layer] = _keys(prompt.store(layer, method)) + self.geometry.all_keys - prompt.start
        return relative, keys, squared

    def sensitivity(self, layers: Sequence[int]) -> Tensor:
        self.progress.at("sensitivity of layers")
        return measure_sensitivity(self.model, self.prompts[0].ids, layers)

    def result_of(self, setting: Setting) -> SettingResult:
        self.progress.at(setting.label)
        begun, losses = time.perf_counter(), []
        for prompt in self.prompts:
            stores = {layer: prompt.store(layer, _method_of(setting, layer)) for layer in prompt.grouped}
            losses.append(prompt.losses(self.model, stores, self.progress.step))
        seconds = time.perf_counter() - begun
        return SettingResult(setting, [compared(ours, exact) for ours, exact in zip(losses, self.exact, strict=True)], seconds)


def _method_of(setting: Setting, layer: int) -> Any:
    method = setting.method
    return method.get(layer, method["default"]) if isinstance(method, Mapping) else method


def _state(store: CellStore) -> Any:
    assert store.state is not None
    return store.state


def _keys(store: CellStore) -> float:
    """What a step reads, in keys with their values: those of no cell, the first ones, those of the opened cells, which have the
    mean size, and of every cell its centroid, variances and mean value."""
    state = _state(store)
    dim, value_dim = (x.storage.shape[3] for x in (state.keys, state.values))
    alone = store.length - store.closed + min(store.closed, store.method.sinks)
    opened = store.closed * min(1.0, store.probes / max(1, store.cells))
    return alone + opened + store.cells * (2 * dim + value_dim) / (dim + value_dim)
