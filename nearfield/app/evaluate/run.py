"""`evaluate`: measure settings on texts, and choose a mixture of them by layer."""

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
    AnswerGeometry,
    Geometry,
    Ladder,
    Setting,
    Trial,
    choose_budgets,
    usual_segment,
)
from nearfield.auto import Auto
from nearfield.exact import Exact
from nearfield.hf.config import LayerConfig, sharing_rows
from nearfield.problem import Method


@dataclass(frozen=True)
class SettingResult:
    """What one setting does to the model."""

    setting: Setting
    perplexities: list[Perplexity]
    """one per text"""
    seconds: float
    """of the passes over all texts"""
    errors: Tensor | None = None
    """`[layers, heads]`, mean over texts; None if not measured"""
    keys: float | None = None
    """read per query, mean over layers"""

    @property
    def excess(self) -> float:
        """Of perplexity, in the worst text."""
        return max(one.excess for one in self.perplexities)


@dataclass(frozen=True)
class Recommendation:
    """The cheapest mixture of settings whose measured perplexity stays within the tolerance."""

    tolerance: float
    config: LayerConfig
    chosen: Trial
    result: SettingResult
    trials: list[Trial]
    ladder: list[Setting]
    sensitivity: Tensor
    """`[layers]`; see `measure_sensitivity`"""


@dataclass(frozen=True)
class Evaluation:
    """The results of `evaluate`, or of `evaluate_answers`."""

    texts: list[str]
    geometry: Geometry | AnswerGeometry
    layers: int
    exact: SettingResult
    results: list[SettingResult]
    recommendation: Recommendation | None


class Progress(Protocol):
    """What `evaluate` reports to: the number of steps, each step done, and what is being measured."""

    def start(self, steps: int) -> None: ...

    def step(self) -> None: ...

    def at(self, what: str) -> None: ...


class Silent:
    """Reports to nobody."""

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
    """Measure perplexity and the errors of all heads, for methods at several budgets and for a mixture chosen by layer.

    Args:
        model: a causal language model of Transformers (see `load_model`).
        texts: token ids `[1, n]` by the name of a text. All texts are cut to the same length: `tokens`, the shortest of them, or
            what the model knows, whichever is least.
        methods: "cells", "topk" (as many keys of the past, the heaviest ones, as a perfect index would find them) or "auto".
        budgets: shares of the past keys that a row reads (see `Geometry`).
        segment: keys per segment; None: 1,024, or an eighth of a short text.
        config: methods by layer (see `nearfield.hf.config`), to compare as well.
        tolerance: how much perplexity may grow in each text with the mixture, as a share of that of exact attention; None: choose
            no mixture.
        ladder: budgets of cells to choose from for each layer.
    """
    progress = progress or Silent()
    count = common_length(model, texts, tokens)
    geometry = Geometry(count, segment or usual_segment(count), sinks, cell_size)
    settings = geometry.settings(methods, budgets)
    rungs = _rungs(geometry, settings, ladder) if tolerance is not None else []
    tried = list(dict.fromkeys([*settings, *rungs]))
    if config is not None:
        if config.num_hidden_layers not in (None, layer_count(model)):
            raise ValueError(
                f"config is for a model of {config.num_hidden_layers} layers, but this one has {layer_count(model)}; "
                "choose one for it with a tolerance"
            )
        by_layer = {"default": Auto(), **config.methods}
        # The model reads each text at once, as a prompt.
        settings.append(Setting("config", by_layer | sharing_rows(by_layer) if config.prefill == "shared" else by_layer))
    passes = _Passes(model, {name: found[:, :count].to(model.device) for name, found in texts.items()}, progress)
    progress.start((2 + len(settings) + (TRIALS if tolerance is not None else 0)) * len(texts) * ticks_per_pass(model))

    errors = passes.errors(tried, geometry.segment)
    exact = replace(passes.result_of(Setting("exact", Exact())), keys=errors.all_keys)
    results = []
    for setting in settings:
        one = passes.result_of(setting)
        if setting in tried:
            place = tried.index(setting)
            one = replace(one, errors=errors.relative[place], keys=float(errors.keys[place].nanmean()))
        results.append(one)
    recommendation = None
    if tolerance is not None:
        errors_of_rungs = errors.at([tried.index(setting) for setting in rungs])
        recommendation = recommend(passes, rungs, errors_of_rungs, tolerance, [exact, *results])
    return Evaluation(list(texts), geometry, layer_count(model), exact, results, recommendation)


def common_length(model: Any, texts: Mapping[str, Tensor], tokens: int) -> int:
    """The most tokens that all texts and the model have, up to `tokens`."""
    if not texts:
        raise ValueError("at least one text is needed")
    return min(tokens, *(found.shape[1] for found in texts.values()), longest_context(model) or tokens)


def _rungs(geometry: Geometry, settings: Sequence[Setting], budgets: Sequence[float]) -> list[Setting]:
    """The cells among the settings, and cells at these budgets; each method once."""
    found = {setting.method: setting for setting in settings if setting.kind == "cells"}
    for budget in sorted(set(budgets)):
        found.setdefault(geometry.cells(budget).method, geometry.cells(budget))
    return list(found.values())


@dataclass
class _Passes:
    """Passes of a model over all texts."""

    model: Any
    ids: Mapping[str, Tensor]
    progress: Progress
    exact: list[Tensor] = field(default_factory=list)
    """losses with exact attention, one tensor per text"""

    def errors(self, settings: Sequence[Setting], segment: int) -> LayerErrors:
        """Errors of all settings, mean over the texts."""
        self.progress.at("errors of all heads")
        found = [measure_errors(self.model, ids, settings, segment, self.progress.step) for ids in self.ids.values()]
        self.exact = [losses for _, losses in found]
        relative = torch.stack([errors.relative for errors, _ in found]).mean(0)
        keys = torch.stack([errors.keys for errors, _ in found]).mean(0)
        squared = torch.stack([errors.squared for errors, _ in found]).mean(0)
        return LayerErrors(relative, keys, squared, found[0][0].all_keys)

    def sensitivity(self, layers: Sequence[int]) -> Tensor:
        self.progress.at("sensitivity of layers")
        return measure_sensitivity(self.model, next(iter(self.ids.values())), layers)

    def result_of(self, setting: Setting) -> SettingResult:
        self.progress.at(setting.label)
        start = time.perf_counter()
        with attending(self.model, setting.method):
            losses = [token_losses(self.model, ids, self.progress.step) for ids in self.ids.values()]
        seconds = time.perf_counter() - start
        return SettingResult(setting, [compared(ours, exact) for ours, exact in zip(losses, self.exact, strict=True)], seconds)


class Passes(Protocol):
    """What a choice needs to measure."""

    def sensitivity(self, layers: Sequence[int]) -> Tensor: ...

    def result_of(self, setting: Setting) -> SettingResult: ...


def recommend(
    passes: Passes, ladder: Sequence[Setting], errors: LayerErrors, tolerance: float, results: Sequence[SettingResult]
) -> Recommendation:
    """The cheapest mixture of the settings in `ladder`; known `results` are not measured again."""
    layers = errors.keys.shape[1]
    served = errors.keys.isfinite().any(0).tolist()
    weights = passes.sensitivity([layer for layer in range(layers) if served[layer]])
    costs = Ladder(weights * errors.squared, errors.keys, errors.all_keys)
    done: dict[tuple[int, ...], SettingResult] = {}

    def methods(rungs: tuple[int, ...]) -> dict[int | str, Method]:
        chosen = {layer: ladder[rung].method if rung >= 0 else Exact() for layer, rung in enumerate(rungs) if served[layer]}
        return {"default": Exact(), **chosen}  # type: ignore[dict-item]

    def verify(rungs: tuple[int, ...]) -> float:
        if rungs not in done:
            done[rungs] = passes.result_of(Setting("mixture", methods(rungs)))
        return done[rungs].excess

    known = []
    for one in results:
        if one.setting.kind == "exact" or one.setting in ladder:
            rung = -1 if one.setting.kind == "exact" else ladder.index(one.setting)
            same_rung = (rung,) * layers
            done[same_rung] = one
            known.append(Trial(costs.mixture(same_rung), one.excess))
    chosen, trials = choose_budgets(costs, tolerance, verify, known)
    rungs = chosen.mixture.rungs
    final = replace(done[rungs], setting=Setting("by layer", methods(rungs)), errors=None, keys=chosen.mixture.keys)
    return Recommendation(tolerance, LayerConfig(methods(rungs), layers), chosen, final, trials, list(ladder), weights)
