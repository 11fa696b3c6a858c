"""A call of a model that is broken off in the middle: the next one is refused, or right; never wrong."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from broken_off import at_line, break_off, points
from torch import Tensor

pytest.importorskip("transformers")

from hf_models import pair, tokens

import nearfield
from nearfield import hf
from nearfield.hf.cache import CellLayer

NAME = "nearfield-interrupted"
CELLS = nearfield.Cells(segment=8, cell_size=4, probes=2, sinks=3, window=0)
LENGTH = 24


@pytest.fixture(scope="module")
def nets() -> dict[str, Any]:
    hf.register(NAME, nearfield.Exact())
    return {family: pair(family, NAME, num_hidden_layers=2)[1] for family in ("llama", "gemma3")}


def begun(net: Any) -> Any:
    cache = hf.CellCache(CELLS, config=net.config)
    step(net, cache, tokens(1, LENGTH))
    return cache


@torch.no_grad()
def step(net: Any, cache: Any, ids: Tensor) -> Tensor:
    mask = torch.ones(1, cache.get_seq_length() + ids.shape[1], dtype=torch.long)
    found: Tensor = net(ids, past_key_values=cache, attention_mask=mask).logits
    return found


@contextmanager
def interrupted_in(layer: int, late: bool) -> Iterator[None]:
    """A call of a model that is interrupted in this layer, before it has stored anything or after that."""
    update = hf.CellCache.update

    def stop(cache: Any, key: Tensor, value: Tensor, layer_idx: int, *rest: Any, **options: Any) -> Any:
        if layer_idx == layer and not late:
            raise KeyboardInterrupt
        found = update(cache, key, value, layer_idx, *rest, **options)
        if layer_idx == layer:
            raise KeyboardInterrupt
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf.CellCache, "update", stop)
        with pytest.raises(KeyboardInterrupt):
            yield


@pytest.mark.parametrize("new", [1, 3])
def test_a_step(nets: dict[str, Any], new: int) -> None:
    net, ids = nets["llama"], tokens(1, new)
    cache = begun(net)
    expected = step(net, copy.deepcopy(cache), ids)
    for layer, late in ((0, True), (1, False)):
        with interrupted_in(layer, late):
            step(net, cache, ids)
        with pytest.raises(RuntimeError, match=rf"have 24 to {24 + new} tokens: .* crop\(24\) .*or reset\(\)"):
            step(net, cache, ids)
        cache.crop(24)
        assert torch.equal(step(net, copy.deepcopy(cache), ids), expected)
    with interrupted_in(0, False):
        step(net, cache, ids)
    assert torch.equal(step(net, cache, ids), expected)


def test_a_prompt(nets: dict[str, Any]) -> None:
    """The second layer is empty then, as it is in models whose layers share keys."""
    net, ids = nets["llama"], tokens(1, 1)
    expected = step(net, begun(net), ids)
    cache = hf.CellCache(CELLS, config=net.config)
    with interrupted_in(1, False):
        step(net, cache, tokens(1, LENGTH))
    for again in (ids, tokens(1, LENGTH)):
        with pytest.raises(RuntimeError, match=r"have 0 to \d+ tokens: .*; call reset\(\)"):
            step(net, cache, again)
    cache.reset()
    step(net, cache, tokens(1, LENGTH))
    assert torch.equal(step(net, cache, ids), expected)


@pytest.mark.parametrize("late", [False, True])
def test_layers_with_a_window(nets: dict[str, Any], late: bool) -> None:
    """What such a layer has forgotten does not come back."""
    net, ids = nets["gemma3"], tokens(1, 1)
    cache = begun(net)
    expected = step(net, copy.deepcopy(cache), ids)
    with interrupted_in(0 if late else 1, late):
        step(net, cache, ids)
    with pytest.raises(RuntimeError, match=r"have 24 to 25 tokens: .*; call reset\(\)"):
        step(net, cache, ids)
    cache.reset()
    step(net, cache, tokens(1, LENGTH))
    assert torch.equal(step(net, cache, ids), expected)


CHANGES = {
    "reorder_cache": torch.tensor([0, 0]),
    "batch_select_indices": torch.tensor([0, 0]),
    "batch_repeat_interleave": 2,
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("late", [False, True])
def test_batch_entries(nets: dict[str, Any], name: str, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    net = nets["llama"]
    cache, method = begun(net), getattr(CellLayer, name)

    def fails(layer: CellLayer, argument: Any) -> None:
        if late or layer is cache.layers[0]:
            method(layer, argument)
        if layer is cache.layers[1]:
            raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(CellLayer, name, fails)
        with pytest.raises(torch.OutOfMemoryError):
            getattr(cache, name)(CHANGES[name])
    with pytest.raises(RuntimeError, match=rf"{name} was interrupted.*reset\(\)"):
        step(net, cache, tokens(1, 1))
    cache.reset()
    assert begun(net).get_seq_length() == LENGTH
    step(net, cache, tokens(1, LENGTH))


def test_what_cannot_be_selected_changes_nothing(nets: dict[str, Any]) -> None:
    net, ids = nets["llama"], tokens(1, 1)
    cache = begun(net)
    with pytest.raises(ValueError, match="entries must be from 0 to 0"):
        cache.reorder_cache(torch.tensor([3]))
    assert torch.equal(step(net, cache, ids), step(net, begun(net), ids))


@pytest.mark.parametrize("most", [12, pytest.param(None, marks=pytest.mark.slow)])
def test_anywhere(nets: dict[str, Any], most: int | None) -> None:
    """With what the error says, or without an error, a call that was broken off can be made again."""
    net, ids = nets["llama"], tokens(1, 1)
    template = begun(net)
    expected = step(net, copy.deepcopy(template), ids)
    fresh = copy.deepcopy(template)
    refused = 0
    for at in points(at_line, lambda: step(net, fresh, ids), most):
        cache = copy.deepcopy(template)
        assert break_off(at_line, at, lambda: step(net, cache, ids))  # noqa: B023
        lengths = {layer.get_seq_length() for layer in cache.layers}
        if len(lengths) > 1:
            refused += 1
            with pytest.raises(RuntimeError, match=r"crop\(24\)"):
                step(net, cache, ids)
        cache.crop(LENGTH)
        assert torch.equal(step(net, cache, ids), expected)
    assert refused
