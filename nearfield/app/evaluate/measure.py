"""Measurements of a model: the losses of tokens, the errors of heads, and how much each layer matters."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nearfield import _compat
from nearfield.app.evaluate.models import layer_count
from nearfield.app.evaluate.settings import Setting
from nearfield.chunks import BLOCK_BYTES, row_blocks
from nearfield.exact import Exact
from nearfield.hf import register
from nearfield.problem import Call, Method, Problem
from nearfield.results import Outcome

NAME = "nearfield-eval"

HEAD_BYTES = 4 * BLOCK_BYTES
"""Memory for logits over the vocabulary, in float32."""


@contextmanager
def attending(model: Any, method: Method | Mapping[int | str, Method]) -> Iterator[None]:
    """Let the layers of a model attend by `method` (see `nearfield.hf.register`), and afterwards as they did before.

    These contexts cannot be nested, because all methods are registered under one name.
    """
    before = _compat.attention_name(model)
    if before == NAME:
        raise RuntimeError("attending() cannot be nested; leave the outer one first")
    register(NAME, method)
    try:
        model.set_attn_implementation(NAME)
        yield
    finally:
        model.set_attn_implementation(before)
        register(NAME)  # drops the reference to the method


@torch.no_grad()
def token_losses(model: Any, ids: Tensor, tick: Callable[[], None] | None = None) -> Tensor:
    """-log p(token) of every token in `ids` `[1, n]` but the first: `[n - 1]`, float64, on the CPU.

    The n x vocabulary logits never exist at once: the model runs without its head, then the head on some positions at a time.

    Args:
        tick: called after each layer.
    """
    return losses_of(model, final_states(model, ids, tick), ids)


def losses_of(model: Any, states: Tensor, ids: Tensor) -> Tensor:
    """The same for tokens `[1, n]` and what the model's head gets at each of them, `[1, n, width]`; that of the last one may be
    left out."""
    found = []
    for block in row_blocks((1, ids.shape[1] - 1), bytes_of_logits(model)):
        logits = head(model, states[:, block], ids)
        next_tokens = ids[0, block.start + 1 : block.stop + 1]
        found.append(F.cross_entropy(logits[0].float(), next_tokens, reduction="none").cpu().double())
    return torch.cat(found)


def final_states(model: Any, ids: Tensor, tick: Callable[[], None] | None = None) -> Tensor:
    """The input of the model's head, `[1, n, width]`."""
    with ticking(model, tick):
        states: Tensor = model.base_model(ids, use_cache=False).last_hidden_state
    return states


def bytes_of_logits(model: Any) -> int:
    """Bytes per token for `row_blocks`, scaled so that its budget of `BLOCK_BYTES` stands for `HEAD_BYTES`."""
    words: int = model.get_output_embeddings().weight.shape[0]
    return max(1, 2 * 4 * words * BLOCK_BYTES // HEAD_BYTES)


def head(model: Any, states: Tensor, ids: Tensor) -> Tensor:
    """Logits of some hidden states, with all that the model does after its layers: some models scale or cap their logits.

    To get that right for any model, the whole model runs on one token, and a hook replaces the states at the end of its layers.
    """

    def replace_states(_module: Any, _given: Any, output: Any) -> Any:
        output.last_hidden_state = states
        return output

    hook = model.base_model.register_forward_hook(replace_states)
    try:
        logits: Tensor = model(ids[:, :1], use_cache=False).logits
    finally:
        hook.remove()
    return logits


@contextmanager
def ticking(model: Any, tick: Callable[[], None] | None) -> Iterator[None]:
    """Inside: `tick` is called after each layer."""
    layers = [part for part in model.modules() if getattr(part, "layer_idx", None) is not None]
    hooks = [part.register_forward_hook(lambda *_: tick()) for part in layers] if tick else []
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def ticks_per_pass(model: Any) -> int:
    """How often a pass calls `tick`."""
    return sum(getattr(part, "layer_idx", None) is not None for part in model.modules())


@dataclass(frozen=True)
class Perplexity:
    """The perplexity of one text, compared with exact attention."""

    perplexity: float
    excess: float
    """perplexity / exact perplexity - 1"""
    stderr: float
    """of the excess, from the differences of the losses of tokens as if they were independent"""


def compared(losses: Tensor, exact: Tensor) -> Perplexity:
    """Compare losses of the same tokens, in pairs. NaN becomes infinity, which no tolerance allows."""
    difference = losses - exact
    excess = float(difference.mean().exp().nan_to_num(nan=math.inf, posinf=math.inf)) - 1
    spread = float(difference.std()) / math.sqrt(len(difference)) if len(difference) > 1 else 0.0
    return Perplexity(float(losses.mean().exp().nan_to_num(nan=math.inf, posinf=math.inf)), excess, (1 + excess) * spread)


@dataclass(frozen=True)
class LayerErrors:
    """Errors of several settings. NaN for layers that no method serves, such as sliding windows: they are exact anyway."""

    relative: Tensor
    """`[settings, layers, heads]`: ||output - exact|| / ||exact|| of a row, mean over the rows that have a past"""
    keys: Tensor
    """`[settings, layers]`: keys read per query"""
    squared: Tensor
    """`[settings, layers]`: sum of ||output - exact||^2 over sum of ||exact||^2, for the same rows and all heads"""
    all_keys: float
    """keys that exact attention reads per query"""

    def at(self, settings: list[int]) -> LayerErrors:
        """The errors of some of the settings."""
        return LayerErrors(self.relative[settings], self.keys[settings], self.squared[settings], self.all_keys)


@torch.no_grad()
def measure_errors(
    model: Any, ids: Tensor, settings: Sequence[Setting], segment: int, tick: Callable[[], None] | None = None
) -> tuple[LayerErrors, Tensor]:
    """Run the model over `ids` with exact attention, and try every setting on the inputs of every layer.

    Returns:
        the errors, and the losses of the tokens with exact attention (see `token_losses`).
    """
    layers = layer_count(model)
    probes = [_Probe([setting.method for setting in settings], segment, []) for _ in range(layers)]
    by_layer: dict[int | str, Method] = {"default": Exact(), **dict(enumerate(probes))}
    with attending(model, by_layer):
        losses = token_losses(model, ids, tick)
    if not any(probe.found for probe in probes):
        raise ValueError(
            f"no layer of {type(model).__name__} takes plain causal attention over more than {segment:,} tokens from the "
            "registry of Transformers, so there is nothing to replace; give a longer text, or a model without sliding windows"
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
    """Exact attention that also tries other methods on the same problem, and records their errors."""

    methods: list[Any]
    segment: int
    found: list[_Found]

    any_mask = False
    any_logits = False
    any_window = False
    gives_lse = False
    drops_pairs = False

    def run(self, problem: Problem, call: Call) -> Outcome:
        exact = Exact().run(problem, replace(call, diagnostics=False))
        if problem.is_causal and problem.query.shape[2] > self.segment:
            right = exact.output.float()
            norm = self._norms(right)
            relative, keys, squared = [], [], []
            for method in self.methods:
                outcome = method.run(problem, replace(call, diagnostics=True))
                error = self._norms(outcome.output.float() - right)
                relative.append((error / norm).mean(-1).cpu())
                keys.append(float(outcome.info["keys_per_query"]))
                squared.append(float(error.square().sum() / norm.square().sum()))
            self.found.append(_Found(torch.stack(relative), keys, squared))
        return exact

    def is_async(self, problem: Problem, backend: str) -> bool:
        return False

    def _norms(self, output: Tensor) -> Tensor:
        """`[heads, rows]`, for the rows after the first segment; the others have no past."""
        rows = output[0, :, self.segment :]
        return rows.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)


NOISE = 0.2
"""Norm of the noise relative to that of a row: far above rounding, yet small enough that effects grow with its square."""

TOKENS = 512


@torch.no_grad()
def measure_sensitivity(model: Any, ids: Tensor, layers: Collection[int]) -> Tensor:
    """`[layers]`: how much the loss grows per squared relative error of a layer's attention; NaN for other layers.

    Noise of `NOISE` times the norm of each row is added to the attention of one layer at a time. The growth is the
    Kullback-Leibler divergence from the undisturbed predictions: the excess of the loss on text that the model itself would
    write. On the tokens of a real text, the excess that a single layer causes would drown in noise.
    """
    ids = ids[:, :TOKENS]
    by_default: dict[int | str, Method] = {"default": Exact()}
    with attending(model, by_default):
        right = final_states(model, ids)
    found = torch.full((layer_count(model),), torch.nan, dtype=torch.float64)
    for layer in layers:
        with attending(model, {**by_default, layer: _Noise(layer)}):
            found[layer] = _divergence(model, right, final_states(model, ids), ids) / NOISE**2
    return found


def _divergence(model: Any, right: Tensor, ours: Tensor, ids: Tensor) -> float:
    total = 0.0
    for block in row_blocks((1, ids.shape[1]), 2 * bytes_of_logits(model)):
        exact, noisy = (head(model, states[:, block], ids)[0].float().log_softmax(-1) for states in (right, ours))
        total += float(F.kl_div(noisy, exact, reduction="sum", log_target=True))
    return max(0.0, total / ids.shape[1])


@dataclass(frozen=True)
class _Noise:
    """Exact attention with noise added."""

    seed: int

    any_mask = False
    any_logits = False
    any_window = False
    gives_lse = False
    drops_pairs = False

    def is_async(self, problem: Problem, backend: str) -> bool:
        return False

    def run(self, problem: Problem, call: Call) -> Outcome:
        output = Exact().run(problem, call).output
        generator = torch.Generator(output.device).manual_seed(self.seed)
        noise = torch.randn(output.shape, generator=generator, device=output.device) / output.shape[-1] ** 0.5
        return Outcome((output + NOISE * output.float().norm(dim=-1, keepdim=True) * noise).to(output.dtype))
