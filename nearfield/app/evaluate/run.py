"""`nearfield eval`: measure, choose_budgets, and hand over."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from nearfield.app.evaluate.measure import (
    LayerErrors,
    Perplexity,
    attending,
    compared,
    measure_errors,
    measure_sensitivity,
    ticks_per_pass,
    token_losses,
)
from nearfield.app.evaluate.models import layer_count, longest_context
from nearfield.app.evaluate.settings import (
    BUDGETS,
    LADDER,
    TRIALS,
    Geometry,
    Ladder,
    Setting,
    Trial,
    choose_budgets,
    usual_segment,
)
from nearfield.exact import Exact
from nearfield.hf.config import LayerConfig
from nearfield.problem import Method


@dataclass(frozen=True)
class Shown:
    """What one setting did."""

    setting: Setting
    perplexities: list[Perplexity]
    """one per text"""
    seconds: float
    """of the passes over all texts"""
    errors: Tensor | None = None
    """`[layers, heads]`, mean over texts; None where it was not measured"""
    keys: float | None = None
    """read per query, mean over layers"""

    @property
    def excess(self) -> float:
        """In the worst text."""
        return max(one.excess for one in self.perplexities)


@dataclass(frozen=True)
class Recommendation:
    """The cheapest mixture of settings that was seen to stay within the tolerance."""

    tolerance: float
    config: LayerConfig
    chosen: Trial
    shown: Shown
    trials: list[Trial]
    ladder: list[Setting]
    sensitivity: Tensor
    """`[layers]`, see `measure_sensitivity`"""


@dataclass(frozen=True)
class Evaluation:
    """All that `evaluate` has found."""

    texts: list[str]
    geometry: Geometry
    layers: int
    exact: Shown
    shown: list[Shown]
    recommendation: Recommendation | None


class Progress(Protocol):
    """Told how many steps there are, when one is done, and what is at work."""

    def start(self, steps: int) -> None: ...

    def step(self) -> None: ...

    def at(self, what: str) -> None: ...


class _Silent:
    def start(self, steps: int) -> None: ...

    def step(self) -> None: ...

    def at(self, what: str) -> None: ...


def evaluate(
    model: Any,
    texts: Mapping[str, Tensor],
    *,
    tokens: int = 8192,
    methods: Sequence[str] = ("cells", "topk"),
    budgets: Sequence[float] = BUDGETS,
    cell_size: int = 16,
    segment: int | None = None,
    sinks: int = 16,
    config: LayerConfig | None = None,
    tolerance: float | None = None,
    ladder: Sequence[float] = LADDER,
    progress: Progress | None = None,
) -> Evaluation:
    """Perplexity and the errors of all heads with exact attention, with methods at budgets, and with a mixture chosen by layer.

    Args:
        model: a causal language model of Transformers (`load_model`).
        texts: ids `[1, n]` by the name of a text. All are cut to the same length: to `tokens`, to what the shortest of them has,
            and to what the model knows.
        methods: of "cells", "topk" (as many keys of the past, the heaviest ones: a perfect index) and "auto".
        budgets: shares of the past keys that a row reads (see `Geometry`).
        segment: keys that are read one by one before a row's past begins; None: 1,024, or an eighth of a short text.
        config: methods by layer (`nearfield.hf.config`), to be compared as well.
        tolerance: the excess of perplexity over that of exact attention, as a share, that the mixture may have in each text;
            None: no mixture is chosen.
        ladder: budgets of cells to choose from for a layer.
    """
    progress = progress or _Silent()
    count = shortest(model, texts, tokens)
    geometry = Geometry(count, segment or usual_segment(count), sinks, cell_size)
    settings = geometry.settings(methods, budgets)
    ladder_settings = _ladder(geometry, settings, ladder) if tolerance is not None else []
    tried = list(dict.fromkeys([*settings, *ladder_settings]))
    if config is not None:
        if config.num_hidden_layers not in (None, layer_count(model)):
            raise ValueError(
                f"config is for a model of {config.num_hidden_layers} layers, and this one has {layer_count(model)}; "
                "choose one for it with a tolerance"
            )
        settings.append(Setting("config", {"default": Exact(), **config.methods}))
    passes = _Passes(model, {name: found[:, :count].to(model.device) for name, found in texts.items()}, progress)
    progress.start((2 + len(settings) + (TRIALS if tolerance is not None else 0)) * len(texts) * ticks_per_pass(model))

    errors = passes.errors(tried, geometry.segment)
    exact = replace(passes.shown(Setting("exact", Exact())), keys=errors.all_keys)
    shown = []
    for setting in settings:
        one = passes.shown(setting)
        if setting in tried:
            place = tried.index(setting)
            one = replace(one, errors=errors.relative[place], keys=float(errors.keys[place].nanmean()))
        shown.append(one)
    recommendation = None
    if tolerance is not None:
        of_ladder = errors.at([tried.index(setting) for setting in ladder_settings])
        recommendation = _recommend(passes, ladder_settings, of_ladder, tolerance, [exact, *shown])
    return Evaluation(list(texts), geometry, layer_count(model), exact, shown, recommendation)


def shortest(model: Any, texts: Mapping[str, Tensor], tokens: int) -> int:
    """How many tokens all texts and the model have, and at most `tokens`."""
    if not texts:
        raise ValueError("at least one text is needed")
    return min(tokens, *(found.shape[1] for found in texts.values()), longest_context(model) or tokens)


def _ladder(geometry: Geometry, settings: Sequence[Setting], budgets: Sequence[float]) -> list[Setting]:
    """Cells of these budgets, and what is compared anyway, without two that come to the same."""
    found = {setting.method: setting for setting in settings if setting.kind == "cells"}
    for budget in sorted(set(budgets)):
        found.setdefault(geometry.cells(budget).method, geometry.cells(budget))
    return list(found.values())


@dataclass
class _Passes:
    """Passes of one model over some texts."""

    model: Any
    ids: Mapping[str, Tensor]
    progress: Progress
    exact: list[Tensor] = field(default_factory=list)
    """losses of exact attention, one tensor per text"""

    def errors(self, settings: Sequence[Setting], segment: int) -> LayerErrors:
        """Errors, mean over the texts."""
        self.progress.at("errors of all heads")
        found = [measure_errors(self.model, ids, settings, segment, self.progress.step) for ids in self.ids.values()]
        self.exact = [losses for _, losses in found]
        relative = torch.stack([errors.relative for errors, _ in found]).mean(0)
        keys = torch.stack([errors.keys for errors, _ in found]).mean(0)
        squared = torch.stack([errors.squared for errors, _ in found]).mean(0)
        return LayerErrors(relative, keys, squared, found[0][0].all_keys)

    def sensitivity(self, layers: Sequence[int]) -> Tensor:
        self.progress.at("weight of each layer")
        return measure_sensitivity(self.model, next(iter(self.ids.values())), layers)

    def shown(self, setting: Setting) -> Shown:
        self.progress.at(setting.label)
        start = time.perf_counter()
        with attending(self.model, setting.method):
            losses = [token_losses(self.model, ids, self.progress.step) for ids in self.ids.values()]
        seconds = time.perf_counter() - start
        return Shown(setting, [compared(ours, exact) for ours, exact in zip(losses, self.exact, strict=True)], seconds)


def _recommend(
    passes: _Passes, ladder: Sequence[Setting], errors: LayerErrors, tolerance: float, shown: Sequence[Shown]
) -> Recommendation:
    layers = errors.keys.shape[1]
    served = errors.keys.isfinite().any(0).tolist()
    weights = passes.sensitivity([layer for layer in range(layers) if served[layer]])
    costs = Ladder(weights * errors.squared, errors.keys, errors.all_keys)
    done: dict[tuple[int, ...], Shown] = {}

    def methods(rungs: tuple[int, ...]) -> dict[int | str, Method]:
        chosen = {layer: ladder[rung].method if rung >= 0 else Exact() for layer, rung in enumerate(rungs) if served[layer]}
        return {"default": Exact(), **chosen}  # type: ignore[dict-item]

    def verify(rungs: tuple[int, ...]) -> float:
        if rungs not in done:
            done[rungs] = passes.shown(Setting("mixture", methods(rungs)))
        return done[rungs].excess

    known = []
    for one in shown:
        if one.setting.kind == "exact" or one.setting in ladder:
            rung = -1 if one.setting.kind == "exact" else ladder.index(one.setting)
            alike = (rung,) * layers
            done[alike] = one
            known.append(Trial(costs.mixture(alike), one.excess))
    chosen, trials = choose_budgets(costs, tolerance, verify, known)
    rungs = chosen.mixture.rungs
    final = replace(done[rungs], setting=Setting("by layer", methods(rungs)), errors=None, keys=chosen.mixture.keys)
    return Recommendation(tolerance, LayerConfig(methods(rungs), layers), chosen, final, trials, list(ladder), weights)
