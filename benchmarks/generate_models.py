"""What the sections of bench_generate_gpu.py share: models with random weights, exact attention in a graph, times and memory.

Models have the shapes of Llama 3.2 1B and Llama 3.1 8B, where time is short with 8 of its 32 layers. Times do not depend on what
the weights are, but what their keys and values are like does.
"""

from __future__ import annotations

import copy
import gc
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from gpu_timing import BACKENDS, CUDA, DEVICE, clustered, wait
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import sdpa_mask

from nearfield import hf
from nearfield._compat import compiled_steps
from nearfield.cells.cache import CellStore
from nearfield.hf.model_step import ModelStep

EXACT, OURS, NONE = "bench-exact", "bench-cells", "bench-none"
DTYPE = torch.bfloat16 if CUDA else torch.float32
SHAPES: dict[str, dict[str, Any]] = {
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "head_dim": 64},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "head_dim": 128},
    "8b, 8 layers": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 8,
        "num_attention_heads": 32,
        "head_dim": 128,
    },
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16},
}
ROUNDS, STEPS = 7, 20
"""A time of a step is the median of so many rounds of so many steps, with those of the others in between."""

Step = Callable[[], Any]


def make_model(shape: str) -> Any:
    """Random weights, made on the device."""
    sizes = SHAPES[shape]
    heads = {"num_key_value_heads": 2 if shape == "tiny" else 8}
    few = {"vocab_size": 500 if shape == "tiny" else 128_256, "max_position_embeddings": 1 << 21}
    config = LlamaConfig(tie_word_embeddings=True, **sizes, **heads, **few)
    config._attn_implementation = OURS
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPE)
    try:
        with torch.device(DEVICE):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


class Models:
    """The model of the shape that was asked for last: cases of one shape share it."""

    def __init__(self) -> None:
        self.shape, self.model = "", None

    def __call__(self, shape: str) -> Any:
        if shape != self.shape:
            self.drop()
            self.shape, self.model = shape, make_model(shape)
        return self.model

    def drop(self) -> None:
        self.shape, self.model = "", None
        free()


def keys_and_values(shape: str, keys: int, batch: int = 1) -> tuple[Tensor, Tensor]:
    """Of one layer, of the family `clustered`, `[batch, heads, keys, dim]`; entries of a batch are alike."""
    _, key, value = clustered(keys, SHAPES[shape]["head_dim"], 2 if shape == "tiny" else 8)
    return key.to(DTYPE).repeat(batch, 1, 1, 1), value.to(DTYPE).repeat(batch, 1, 1, 1)


class ExactAttention:
    """Static keys and values of all layers; a step writes its own over the last ones, and attends to all.

    Query heads that share keys are rows of one call. `mask` `[batch, 1, 1, keys]` is False for padding.
    """

    def __init__(self, stored: list[tuple[Tensor, Tensor]], group: int, mask: Tensor | None = None) -> None:
        self.stored, self.mask = stored, mask
        self.backend = self._fastest(*stored[0], group)

    def _fastest(self, key: Tensor, value: Tensor, group: int) -> str:
        if not CUDA:
            return "cpu"
        query = torch.randn(len(key), key.shape[1], group, key.shape[3], dtype=key.dtype, device=key.device)
        times = {}
        for name, backend in BACKENDS.items():
            with sdpa_kernel(backend):
                try:
                    times[name] = median_ms(lambda: self._attend(query, key, value, None), 5)
                except RuntimeError:  # this backend does not serve the shape, or no masks
                    continue
        return min(times, key=lambda name: times[name]) if times else "any"

    def _attend(self, rows: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
        mask = None if self.mask is None else self.mask.expand(-1, -1, rows.shape[2], -1)
        return F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale)

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        keys, values = self.stored[module.layer_idx]
        keys[:, :, -1:], values[:, :, -1:] = key, value
        rows = query.unflatten(1, (keys.shape[1], -1)).squeeze(3)
        if self.backend not in BACKENDS:
            found = self._attend(rows, keys, values, scaling)
        else:
            with sdpa_kernel(BACKENDS[self.backend]):
                found = self._attend(rows, keys, values, scaling)
        return found.reshape(len(query), 1, query.shape[1], -1), None


def exact_step(
    model: Any,
    stored: list[tuple[Tensor, Tensor]],
    mask: Tensor | None = None,
    positions: Tensor | None = None,
    compile: bool = False,
) -> tuple[Step, str]:
    """A step over keys and values `[batch, heads, keys, dim]` of all layers, captured; and SDPA's backend."""
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    attention = ExactAttention(stored, group, mask)
    AttentionInterface.register(EXACT, torch.compiler.disable(attention.__call__))
    AttentionMaskInterface.register(EXACT, sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(EXACT)
    ids = torch.ones(len(stored[0][0]), 1, dtype=torch.long, device=DEVICE)
    if positions is None:
        positions = torch.full_like(ids, stored[0][0].shape[2] - 1)

    forward = forward_of(model, compile)

    def step() -> Any:
        if not CUDA:  # A graph does not look at it again.
            model.set_attn_implementation(EXACT)
        return forward(input_ids=ids, position_ids=positions, use_cache=False).logits

    found = captured(step)
    model.set_attn_implementation(before)
    return found, attention.backend


def forward_of(model: Any, compile: bool) -> Callable[..., Any]:
    """What `hf.generate` calls for a step, `compile` or not."""
    return compiled_steps(model.forward) if compile else model


def step_without_attention(model: Any, entries: int, compile: bool = False) -> Step:
    """All that a step does besides its attention, captured: what no attention can be faster than."""

    @torch.compiler.disable
    def attend(module: Any, query: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return query.transpose(1, 2), None

    AttentionInterface.register(NONE, attend)
    AttentionMaskInterface.register(NONE, sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(NONE)
    ids = torch.ones(entries, 1, dtype=torch.long, device=DEVICE)
    forward = forward_of(model, compile)

    def step() -> Any:
        if not CUDA:
            model.set_attn_implementation(NONE)
        return forward(input_ids=ids, position_ids=ids, use_cache=False).logits

    found = captured(step)
    model.set_attn_implementation(before)
    return found


def captured(step: Step) -> Step:
    if not CUDA:
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def cells_step(
    model: Any,
    cache: hf.CellCache,
    entries: int = 1,
    name: str = OURS,
    at_random: bool = False,
    text: Tensor | None = None,
    compile: bool = False,
) -> Step:
    """A step with a cache, captured, for the same token every time, for one at random, or for those of a text in turn; it returns
    the logits. Until the last one, the model has to have this attention."""
    model.set_attn_implementation(name)
    same = torch.ones(entries, 1, dtype=torch.long, device=DEVICE)
    read = None if text is None else itertools.cycle(text.view(-1, 1, 1))

    def ids() -> Tensor:
        if read is not None:
            return next(read)
        return torch.randint(model.config.vocab_size, (entries, 1), device=DEVICE) if at_random else same

    if not CUDA:

        def uncaptured() -> Any:
            model.set_attn_implementation(name)
            mask = {"attention_mask": cache.attention_mask()} if len(set(cache.lengths)) > 1 else {}
            return model(input_ids=ids(), position_ids=torch.tensor(cache.lengths)[:, None], past_key_values=cache, **mask).logits

        return uncaptured
    step, positions = ModelStep(model, cache, compile), torch.tensor(cache.lengths, device=DEVICE)[:, None]

    def run() -> Any:
        found = step(ids(), positions)
        positions.add_(1)
        return found

    run()
    return run


def store_of(key: Tensor, value: Tensor, **options: Any) -> CellStore:
    """A store that holds these keys, closed as a prompt is."""
    store = CellStore(**options)
    store.append(key, value)
    store.close()
    return store


def cache_of(model: Any, store: CellStore) -> hf.CellCache:
    """A cache whose layers all hold what the store does, in memory of their own."""
    model.set_attn_implementation(OURS)
    cache = hf.CellCache(config=model.config, offload=store.offload)
    for layer in cache.layers:
        layer.store = copy.deepcopy(store)
    return cache


def median_ms(call: Step, rounds: int = ROUNDS) -> float:
    call()
    return statistics.median(timed(call) for _ in range(rounds))


def timed(call: Step, steps: int | None = None) -> float:
    """Milliseconds of a call."""
    steps = STEPS if steps is None else steps
    wait()
    start = time.perf_counter()
    for _ in range(steps):
        call()
    wait()
    return (time.perf_counter() - start) / steps * 1e3


def interleaved(steps: dict[str, Step]) -> dict[str, list[float]]:
    """Milliseconds of each in every round, after some that are not timed."""
    for step in steps.values():
        timed(step, 3)
    rounds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            rounds[name].append(timed(step))
    return rounds


def medians(rounds: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(found) for name, found in rounds.items()}


def keys_read(store: CellStore) -> int:
    """By a step, per head: opened cells, the first keys and all that are in no closed segment."""
    opened = store.probes * store.closed / max(1, store.cells)
    return round(opened + store.sizes.sinks + store.length - store.closed)


def free() -> None:
    """Give back what nobody holds any more."""
    AttentionInterface.register(EXACT, _gone)
    if CUDA:
        gc.collect()
        torch.cuda.empty_cache()


def _gone(*_: Any, **__: Any) -> Any:
    raise RuntimeError("what exact attention had stored was given back")


def watch_memory() -> Callable[[], float | None]:
    """A function that tells the most gigabytes that were allocated since this was called; None without a card."""
    if not CUDA:
        return lambda: None
    wait()
    torch.cuda.reset_peak_memory_stats()
    return lambda: torch.cuda.max_memory_allocated() / 1e9
