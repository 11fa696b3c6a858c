"""`Memory`: a text that a model has read once, kept in cells and in a file, for later questions to attend to."""

from __future__ import annotations

import dataclasses
import math
import os
import weakref
from collections.abc import Callable, Mapping
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearfield import _compat
from nearfield.cells.cache.saved import moved, state_of, tensors_of
from nearfield.cells.cache.state import CacheState
from nearfield.cells.cache.steps import check_numbers
from nearfield.cells.cache.store import CellStore, check_method
from nearfield.cells.method import Cells
from nearfield.crossover import dtype_name
from nearfield.hf.cache import CellCache, CellLayer, DynamicCache
from nearfield.hf.memory_file import Contents, Reading, check_model, fingerprint, read_memory, write_memory
from nearfield.hf.register import is_registered
from nearfield.problem import to_autocast_dtype

PROBES = 256
"""Cells that a token after the text opens: 4,096 keys if cells have 16 (up to 8,192 tokens), 16,384 of 131,072."""

KNOWN_POSITIONS = 8192
"""For a model that does not say how many positions it knows."""

CHUNK, GAP = 4096, 1024
"""Largest sizes where positions restart; half and an eighth of the positions that a model knows if that is less."""

RELATIVE = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings for which only differences of positions matter, however large the positions are."""

GENERATION = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1, "return_dict_in_generate": False}
"""Options of `generate` for an answer, unless the caller says otherwise."""


class Memory:
    """What a model keeps of a text: its tokens, and the keys and values of each layer, in cells as far as segments are closed.

    Attributes:
        tokens: `[1, length]`, the text.
        method: the `Cells(...)` that keeps it and attends to it.
        reading: how it was read: the positions of its tokens, and how many of them were read at a time.
        fingerprint: of the model. `load` and `ask` refuse any other model. A cache does not check: use it with this model only.

    Questions come after the text. Their tokens attend to it as later tokens attend to a `CellCache`, and nothing of it is
    computed again. A loaded memory leaves keys and values of closed segments in its file, and a step reads those it opens; the
    moments of all cells are in memory.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from nearfield import hf
        >>> small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=50, **small)).eval()
        >>> hf.register()
        >>> model.set_attn_implementation("nearfield")
        >>> memory = hf.Memory.read(model, torch.arange(40)[None], nearfield.Cells(segment=8, window=0, probes=2))
        >>> question = torch.cat([memory.tokens, torch.tensor([[7, 8, 9]])], 1)
        >>> answer = model.generate(question, past_key_values=memory.cache(), max_new_tokens=5, do_sample=False)
    """

    def __init__(self, contents: Contents, model: Any = None) -> None:
        self.tokens, self.method = contents.tokens, contents.method
        self.reading, self.fingerprint = contents.reading, contents.fingerprint
        self._contents = contents
        self._model = None if model is None else weakref.ref(model)
        """a model that is known to be the one that has read the text"""

    def __reduce__(self) -> tuple[Any, ...]:
        return Memory, (self._contents,)

    @staticmethod
    @torch.no_grad()
    def read(
        model: Any,
        tokens: Tensor,
        method: Cells | None = None,
        *,
        positions: str | None = None,
        chunk: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Memory:
        """Let a model read a text, given as integers `[1, length]`.

        Args:
            method: `Cells(...)`, as for `CellCache`. None: `Cells(probes=256)`; a question is short, so each of its tokens may
                look at more than the tokens of a long answer.
            positions: "running": the text is one sequence, and every token sees all tokens before it. "restart": for texts longer
                than any the model was trained on, and models with rotary embeddings. The text is read in chunks, each by itself
                after the first `sinks` tokens of the text, and all chunks get the same positions, a little before those of a
                question. None: "restart" if the text would leave a question less than an eighth of the positions that the model
                knows.
            chunk: tokens to read at a time. None: all of them; if positions restart, 4,096, or half of the positions that the
                model knows if that is less.
            progress: called after every chunk with the number of tokens read so far.
        """
        text = _checked_text(tokens)
        _check_reader(model)
        method = Cells(probes=PROBES) if method is None else method
        check_method(method)
        # Regrouped: a file has the same segments for all layers, and cells in proportion. Also of a short text: it opens many.
        cache = CellCache(method, config=model.config, regroup=True, group_from=0)
        others = {type(layer).__name__ for layer in cache.layers if not isinstance(layer, CellLayer)}
        if others:
            raise ValueError(f"a memory needs full attention in all layers, but this model has a {others.pop()}")
        reading = plan_reading(model.config.get_text_config(), text.shape[1], method.sinks, positions, chunk)
        _read_text(model, text.to(model.device), cache, reading, progress)
        states = [store.state for store in _stores(cache) if store.state]
        bounds, layers = torch.tensor(states[0].bounds), [tensors_of(state) for state in states]
        return Memory(Contents(text, method, reading, fingerprint(model), dtype_name(model.dtype), bounds, layers), model)

    def __repr__(self) -> str:
        return f"Memory({self.tokens.shape[1]} tokens, {self.method}, {self.reading})"

    def cache(self, audit: bool = False, device: torch.device | str | None = None) -> CellCache:
        """A cache that holds the text; pass it along with the tokens of text and question. It never changes the memory itself.

        `device`: of the model. None: where the memory is; a loaded one is on the CPU.
        """
        cache = CellCache(self.method, audit=audit, group_from=0)
        for tensors in self._contents.layers:
            layer = CellLayer(self.method, audit)
            layer.store = CellStore(self.method, audit=audit, group_from=0)
            layer.store.state = _restored(moved(tensors, device), self._contents.bounds, layer.store)
            cache.layers.append(layer)
        return cache

    def to(self, device: torch.device | str) -> Memory:
        """The same memory on another device, so that not every question has to move it there."""
        layers = [moved(tensors, device) for tensors in self._contents.layers]
        return Memory(dataclasses.replace(self._contents, layers=layers), self._model and self._model())

    def ask(self, model: Any, tokenizer: Any, question: str, max_new_tokens: int = 64, **options: Any) -> str:
        """What the model says after the text and a question. `options` go to `generate`, which is greedy by default.

        Beam search works. For several answers, or for a dictionary, call `generate` yourself with `cache()`.
        """
        chosen = _generation_options(options)
        if self._model is None or self._model() is not model:
            check_model("this memory", self.fingerprint, self._contents.dtype, model)
            self._model = weakref.ref(model)
        more = tokenizer(question, return_tensors="pt", add_special_tokens=False)["input_ids"].long()
        if more.shape[1] == 0:
            raise ValueError(f"question must have at least one token, got {question!r}")
        given = torch.cat([self.tokens, more], 1).to(model.device)
        cache = self.cache(device=model.device)
        cache.batch_repeat_interleave(chosen["num_beams"] or 1)
        found = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            past_key_values=cache,
            max_new_tokens=max_new_tokens,
            **chosen,
        )
        answer: str = tokenizer.decode(found[0, given.shape[1] :], skip_special_tokens=True)
        return answer

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file. If that fails or is interrupted, a file that was there before stays as it was.

        The same memory makes the same bytes. What an earlier save has left behind, because it was killed, is removed.
        """
        write_memory(Path(path), self._contents)

    @staticmethod
    def load(path: str | os.PathLike[str], model: Any, verify: bool = True) -> Memory:
        """Read a file that `save` has written, of a text that this model has read. Raises ValueError on any other file.

        `verify`: read every byte once and compare with the digest in the file. Without it a large file loads at once, but damage
        to its numbers may go unnoticed; shapes, sizes and places are always checked.
        """
        return Memory(read_memory(Path(path), model, verify), model)


def _checked_text(tokens: object) -> Tensor:
    """A copy `[1, length]` in int64, on the CPU."""
    if not isinstance(tokens, Tensor):
        raise TypeError(f"tokens must be a tensor of integers [1, length], got {type(tokens).__name__}")
    check_numbers("tokens", tokens)
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise TypeError(f"tokens must be integers, got {tokens.dtype}")
    if tokens.dim() != 2 or len(tokens) != 1 or tokens.shape[1] == 0:
        raise ValueError(f"tokens must be [1, length], got {tuple(tokens.shape)}")
    return tokens.detach().to("cpu", torch.int64, copy=True)


def _check_reader(model: Any) -> None:
    """Raises before any work if the model cannot attend to a cell cache: with "restart" only the first question would fail."""
    if model.training:
        raise ValueError("the model is in training mode, where dropout may change what it reads; call model.eval() first")
    name = _compat.attention_name(model)
    if not is_registered(name):
        raise ValueError(
            f"the model attends by {name!r}, and only attention registered by nearfield can read a memory: hf.register(); "
            'model.set_attn_implementation("nearfield")'
        )


def _generation_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options of `generate` for an answer that is one text: those given, those of a `generation_config`, then our own."""
    config = {name: getattr(options.get("generation_config"), name, None) for name in GENERATION}
    chosen = {**GENERATION, **{name: x for name, x in config.items() if x is not None}, **options}
    for name in ("num_return_sequences", "return_dict_in_generate"):
        if (chosen[name] or GENERATION[name]) != GENERATION[name]:
            raise ValueError(
                f"ask answers with one text, got {name}={chosen[name]}; for more call model.generate with memory.tokens and the "
                "tokens of the question, and past_key_values=memory.cache()"
            )
    return chosen


def plan_reading(config: Any, length: int, sinks: int, positions: str | None, chunk: int | None) -> Reading:
    """How a model of this configuration reads `length` tokens; None: what suits the model."""
    known = getattr(config, "max_position_embeddings", None) or KNOWN_POSITIONS
    usable = known - known // 8  # an eighth is for question and answer
    if positions is None:
        positions = "running" if length <= usable else "restart"
    if positions == "running":
        return Reading(positions, length if chunk is None else chunk)
    gap = min(GAP, known // 8)
    chunk = max(1, min(CHUNK, known // 2)) if chunk is None else chunk
    reading = Reading(positions, chunk, gap, max(1.0, math.log(length) / math.log(max(2, known))))
    if not _is_relative(getattr(config, "rope_parameters", None)):
        raise ValueError(
            f"positions can only restart in models with rotary embeddings ({', '.join(RELATIVE)}), got {config.model_type} "
            f"and a text of {length} tokens; read less of it, or pass positions='running' if the model knows that many"
        )
    if not sinks < chunk <= usable - sinks - gap:
        raise ValueError(
            f"chunk must be more than {sinks} and at most {usable - sinks - gap}, got {chunk}: the model knows {known} "
            f"positions, of which {sinks} are for sinks, {gap} are a gap, and an eighth is for question and answer"
        )
    return reading


def _is_relative(rope: Any) -> bool:
    if not rope:
        return False
    kinds = [rope] if "rope_type" in rope else list(rope.values())  # or one for each kind of layer
    return all(
        isinstance(kind, Mapping) and kind.get("rope_type") in RELATIVE and "llama_4_scaling_beta" not in kind for kind in kinds
    )


def _read_text(model: Any, tokens: Tensor, cache: CellCache, reading: Reading, progress: Callable[[int], None] | None) -> None:
    """Fill an empty cache with a text `[1, length]`."""
    for start in range(0, tokens.shape[1], reading.chunk):
        own = slice(start, start + reading.chunk)
        if reading.positions == "running":
            model.base_model(tokens[:, own], past_key_values=cache)
        else:
            _read_chunk(model, tokens, own, cache, reading)
        if progress is not None:
            progress(min(own.stop, tokens.shape[1]))
    # Chunks that do not attend to each other are grouped into cells together, as one segment, when all of them are there.
    for store in _stores(cache):
        store.close()


def _stores(cache: CellCache) -> list[CellStore]:
    """By layer; all have cells."""
    layers = [layer.store for layer in cache.layers if isinstance(layer, CellLayer)]
    return [store for store in layers if isinstance(store, CellStore)]


def _read_chunk(model: Any, tokens: Tensor, own: slice, cache: CellCache, reading: Reading) -> None:
    """Read a chunk by itself, after the first tokens of the text.

    All chunks get the same positions, which end `gap` before those of a question. A question counts its positions from the length
    of the text, as always; where only differences matter, that is as good as counting from 0. The first tokens of the text come
    before every chunk, because idle heads attend to the first tokens they read. Otherwise each chunk would bring such tokens of
    its own, and together they would outweigh everything else. They are stored once.
    """
    stores = _stores(cache)
    sinks = stores[0].sizes.sinks
    shared = sinks if own.start else 0
    given = torch.cat([tokens[:, :shared], tokens[:, own]], 1)
    first = tokens.shape[1] - reading.gap - sinks - reading.chunk
    positions = torch.arange(first, first + given.shape[1], device=given.device)[None]
    seen: Any = DynamicCache(config=model.config)
    model.base_model(given, past_key_values=seen, position_ids=positions)
    for store, layer in zip(stores, seen.layers, strict=True):
        key, value = to_autocast_dtype(layer.keys, layer.values)
        key[:, :, sinks:] *= reading.sharpness
        store.append(key[:, :, shared:], value[:, :, shared:])


def _restored(tensors: dict[str, Tensor], bounds: Tensor, store: CellStore) -> CacheState:
    """The state of a store that has read the text. Keys and values of closed segments stay where they are."""
    cells = [0, *accumulate(store.sizes.cells(*ends) for ends in pairwise(bounds.tolist()))]
    return state_of(tensors, bounds.tolist(), cells, store.sizes, store.method.partition, in_place=True)
