"""`Memory`: a text that a model has read once, kept in cells in a file, for later questions to attend to."""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearfield.cells.cache.state import CacheState
from nearfield.cells.method import Cells
from nearfield.crossover import dtype_name
from nearfield.hf.cache import CellCache, CellLayer
from nearfield.hf.memory_file import MOMENTS, Contents, check_model, fingerprint, read_memory, write_memory
from nearfield.hf.reading import check_reader, plan_reading, read_text

PROBES = 256
"""Cells that a token after the text opens: 4,096 keys where cells have 16 (up to 8,192 tokens), 16,384 of 131,072."""

ONE_ANSWER = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1, "return_dict_in_generate": False}
"""What `generate` is told of an answer where nobody says otherwise."""


class Memory:
    """What a model keeps of a text: its tokens, and per layer its keys and values, in cells as far as segments are closed.

    Attributes:
        tokens: `[1, length]`, the text.
        method: the `Cells(...)` by which it is kept, and attended to.
        reading: how it was read: which positions its tokens had, and how many of them were read at a time.
        fingerprint: of the model; `load` and `ask` refuse any other. Nobody asks a cache: use it with no other one either.

    Questions come after the text. Their tokens attend to it as later tokens attend to a `CellCache`, and nothing of it is
    computed again. A memory that was loaded leaves keys and values of closed segments in its file, of which a step reads what it
    opens; the moments of all cells are in memory.

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
        """known to be the one that has read the text"""

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
        """Let a model read a text, integers `[1, length]`.

        Args:
            method: `Cells(...)`, as for `CellCache`. None: `Cells(probes=256)`, for a question is short and may look at more than
                each token of a long answer.
            positions: "running": the text is one sequence, and every token sees all before it. "restart": the text may be longer
                than any that the model was trained on. It is read in chunks, each by itself after the first `sinks` tokens of
                the text, and all chunks have the same positions, shortly before those of a question. For models with rotary
                embeddings. None: "restart" if the text would leave a question less than an eighth of the positions the model
                knows.
            chunk: how many tokens are read at a time. None: all; where positions start again 4,096, or half of the positions that
                the model knows if that is less.
            progress: is told how many tokens have been read, after every chunk.
        """
        text = _checked_text(tokens)
        check_reader(model)
        method = Cells(probes=PROBES) if method is None else method
        cache = CellCache(method, config=model.config)
        other = {type(layer).__name__ for layer in cache.layers if not isinstance(layer, CellLayer)}
        if other:
            raise ValueError(f"a memory needs full attention in all layers, and this model has a {other.pop()}")
        reading = plan_reading(model.config.get_text_config(), text.shape[1], method.sinks, positions, chunk)
        read_text(model, text.to(model.device), cache, reading, progress)
        state = [layer.store.state for layer in cache.layers if isinstance(layer, CellLayer) and layer.store.state]
        bounds = torch.tensor(state[0].bounds)
        contents = Contents(text, method, reading, fingerprint(model), dtype_name(model.dtype), bounds, [_kept(x) for x in state])
        return Memory(contents, model)

    def __repr__(self) -> str:
        return f"Memory({self.tokens.shape[1]} tokens, {self.method}, {self.reading})"

    def cache(self, audit: bool = False, device: torch.device | str | None = None) -> CellCache:
        """A cache that has the text in it; pass it with the tokens of text and question. The memory stays as it is.

        `device`: where the model is; None: where the memory is, which is the CPU for one that was loaded.
        """
        cache = CellCache(self.method, audit=audit)
        for kept in self._contents.layers:
            layer = CellLayer(self.method, audit)
            layer.store.state = _held({name: x.to(device) for name, x in kept.items()}, self._contents.bounds, layer)
            cache.layers.append(layer)
        return cache

    def to(self, device: torch.device | str) -> Memory:
        """The same memory on another device, so that not every question has to bring it there."""
        layers = [{name: x.to(device) for name, x in kept.items()} for kept in self._contents.layers]
        return Memory(dataclasses.replace(self._contents, layers=layers), self._model and self._model())

    def ask(self, model: Any, tokenizer: Any, question: str, max_new_tokens: int = 64, **options: Any) -> str:
        """What the model says after the text and a question; `options` go to `generate`, which is greedy if they say nothing.

        Beams may be asked for, several answers or a dictionary may not: those are for `generate` itself, and `cache`.
        """
        chosen = _one_answer(options)
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
        """Write a file of safetensors. If that fails or is interrupted, a file that was there before stays as it was."""
        write_memory(Path(path), self._contents)

    @staticmethod
    def load(path: str | os.PathLike[str], model: Any, verify: bool = True) -> Memory:
        """Read a file that `save` has written of a text that this model has read. Raises ValueError on any other.

        `verify`: look at every byte once, and compare with the digest that the file has of itself. Without it a large file is
        there at once, and a damaged one may go unnoticed; shapes, sizes and places are checked in any case.
        """
        return Memory(read_memory(Path(path), model, verify), model)


def _checked_text(tokens: object) -> Tensor:
    """A copy `[1, length]` in int64, on the CPU."""
    if not isinstance(tokens, Tensor):
        raise TypeError(f"tokens must be a tensor of integers [1, length], got {type(tokens).__name__}")
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise TypeError(f"tokens must be integers, got {tokens.dtype}")
    if tokens.dim() != 2 or len(tokens) != 1 or tokens.shape[1] == 0:
        raise ValueError(f"tokens must be [1, length], got {tuple(tokens.shape)}")
    return tokens.detach().to("cpu", torch.int64, copy=True)


def _one_answer(options: dict[str, Any]) -> dict[str, Any]:
    """Options of `generate` for an answer that is a text."""
    given = {name: getattr(options.get("generation_config"), name, None) for name in ONE_ANSWER}
    chosen = {**ONE_ANSWER, **{name: x for name, x in given.items() if x is not None}, **options}
    for name in ("num_return_sequences", "return_dict_in_generate"):
        if (chosen[name] or ONE_ANSWER[name]) != ONE_ANSWER[name]:
            raise ValueError(
                f"ask answers with one text, got {name}={chosen[name]}; for more call model.generate with memory.tokens and the "
                "tokens of the question, and past_key_values=memory.cache()"
            )
    return chosen


def _kept(state: CacheState) -> dict[str, Tensor]:
    """The tensors of a layer, of a cache that nobody uses any more."""
    found = {"keys": state.keys.filled, "values": state.values.filled, "order": state.order.filled, "sinks": state.sinks}
    # On a GPU some are in bfloat16; a file is for all devices, and tables take them in as they keep them.
    moments = {name: getattr(state.tables, name).filled for name in MOMENTS}
    found |= {name: x.to(state.tables.cross.dtype) if x.is_floating_point() else x for name, x in moments.items()}
    found |= {"cross": state.tables.cross, "pooled": state.tables.pooled}
    return {name: x.contiguous() for name, x in found.items()}


def _held(kept: dict[str, Tensor], bounds: Tensor, layer: CellLayer) -> CacheState:
    """What a store holds after it has read the text: closed segments stay where they are."""
    keys, values = kept["keys"], kept["values"]
    closed = kept["order"].shape[2]
    state = CacheState(keys, values, layer.store.sizes, layer.store.method.partition, base=closed)
    state.keys.append(keys[:, :, closed:])
    state.values.append(values[:, :, closed:])
    state.order.append(kept["order"])
    for name in MOMENTS:
        getattr(state.tables, name).append(kept[name])
    state.tables.cross, state.tables.pooled = kept["cross"].clone(), kept["pooled"].clone()
    state.sinks = kept["sinks"].clone()
    state.bounds = bounds.tolist()
    state.mark(None)
    return state
