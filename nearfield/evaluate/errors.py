"""How wrong attention is in each head of each layer, measured on the queries, keys and values that the layer really has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nearfield.evaluate.models import layer_count
from nearfield.evaluate.perplexity import attending, token_losses
from nearfield.evaluate.settings import Setting
from nearfield.methods.base import Call, Method, Outcome
from nearfield.methods.exact import Exact
from nearfield.problem import Problem


@dataclass(frozen=True)
class LayerErrors:
    """Of several settings. NaN for a layer whose attention no method serves (a sliding window): it is exact anyway."""

    relative: Tensor
    """`[settings, layers, heads]`: ||output - exact|| / ||exact|| of a row, mean over the rows that have a past"""
    keys: Tensor
    """`[settings, layers]`: keys read per query"""
    squared: Tensor
    """`[settings, layers]`: sum of ||output - exact||^2 over that of ||exact||^2, over these rows of all heads"""
    all_keys: float
    """keys that exact attention reads per query"""

    def at(self, settings: list[int]) -> LayerErrors:
        """Of some of the settings."""
        return LayerErrors(self.relative[settings], self.keys[settings], self.squared[settings], self.all_keys)


@torch.no_grad()
def measure_errors(
    model: Any, ids: Tensor, settings: Sequence[Setting], segment: int, tick: Callable[[], None] | None = None
) -> tuple[LayerErrors, Tensor]:
    """Run the model over `ids` with exact attention, and try every setting in every layer on the way.

    Returns:
        the errors, and the losses of the tokens (`token_losses`), which are those of exact attention.
    """
    layers = layer_count(model)
    probes = [_Probe([setting.method for setting in settings], segment, []) for _ in range(layers)]
    by_layer: dict[int | str, Method] = {"default": Exact(), **dict(enumerate(probes))}
    with attending(model, by_layer):
        losses = token_losses(model, ids, tick)
    if not any(probe.found for probe in probes):
        raise ValueError(
            f"no layer of {type(model).__name__} asks Transformers' registry for plain causal attention over more than "
            f"{segment:,} tokens, so there is nothing to replace; give a longer text, or a model without sliding windows"
        )
    heads = next(len(one.relative[0]) for probe in probes for one in probe.found)
    unknown = [torch.nan] * len(settings)
    nothing = _Found(torch.full((len(settings), heads), torch.nan), unknown, unknown)
    found = [probe.found[0] if probe.found else nothing for probe in probes]
    relative = torch.stack([one.relative for one in found], 1)
    keys, squared = (
        torch.tensor(lists, dtype=torch.float64).T for lists in zip(*((x.keys, x.squared) for x in found), strict=True)
    )
    return LayerErrors(relative.double(), keys, squared, (ids.shape[1] + 1) / 2), losses


@dataclass(frozen=True)
class _Found:
    relative: Tensor
    """`[settings, heads]`"""
    keys: list[float]
    squared: list[float]


@dataclass(frozen=True)
class _Probe:
    """Exact attention that tries other methods on the same problem."""

    methods: list[Any]
    segment: int
    found: list[_Found]

    def run(self, problem: Problem, call: Call) -> Outcome:
        exact = Exact().run(problem, replace(call, diagnostics=False))
        if problem.is_causal and problem.query.shape[2] > self.segment:
            right = exact.output.float()
            norm = self._norms(problem, right)
            relative, keys, squared = [], [], []
            for method in self.methods:
                outcome = method.run(problem, replace(call, diagnostics=True))
                error = self._norms(problem, outcome.output.float() - right)
                relative.append((error / norm).mean(-1).cpu())
                keys.append(float(outcome.info["keys_per_query"]))
                squared.append(float(error.square().sum() / norm.square().sum()))
            self.found.append(_Found(torch.stack(relative), keys, squared))
        return exact

    def _norms(self, problem: Problem, output: Tensor) -> Tensor:
        """`[heads, rows]`, of the rows beyond the first segment; the others have no past."""
        rows = problem.unflatten(output)[0, :, self.segment :]
        return rows.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
