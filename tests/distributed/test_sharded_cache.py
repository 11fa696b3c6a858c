"""`CellCache(mesh=...)`: models on several ranks generate what one process does, and all ranks the same."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew, crew

pytest.importorskip("transformers")

from hf_models import model
from sharded_cases import ALL, SMALL
from torch.distributed import DeviceMesh

import nearfield as nf
from nearfield import hf

FEW, EVERYTHING = nf.Cells(probes=2, **SMALL), nf.Cells(probes=ALL, **SMALL)
GREEDY: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}


@pytest.fixture(scope="module")
def ranks() -> Crew:
    return crew()


def prompts(length: int = 70, batch: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


def tiny(family: str = "llama") -> Any:
    found = model(family)
    hf.register("nearfield")
    found.set_attn_implementation("nearfield")
    return found


def generated(group: Any, cases: list[Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and logits of each case; without a group, by this process alone."""
    net, found = tiny(), []
    for method, made, ids, options in cases:
        torch.manual_seed(7)
        cache = hf.CellCache(method, config=net.config, **({} if group is None else {"mesh": group}), **made)
        given = dict(options)
        if given.pop("mask", False):
            given["attention_mask"] = (torch.arange(ids.shape[1]) >= torch.tensor([0, 23])[:, None]).long()
        out = hf.generate(net, ids, cache=cache, return_dict_in_generate=True, output_logits=True, **given)
        logits = torch.stack([] if out.logits is None else out.logits) if "num_beams" not in given else torch.zeros(0)
        found.append((out.sequences, logits))
    return found


CASES = [
    (EVERYTHING, {}, prompts(), GREEDY),
    (EVERYTHING, {"balance": "local", "check": False}, prompts(), GREEDY),
    (EVERYTHING, {"offload": True}, prompts(batch=2), GREEDY),
    (EVERYTHING, {}, prompts(batch=2), GREEDY | {"mask": True}),
    (EVERYTHING, {}, prompts(), GREEDY | {"prefill_chunk_size": 32}),
    (EVERYTHING, {}, prompts(), GREEDY | {"num_beams": 3}),
    (EVERYTHING, {}, prompts(40).repeat(1, 3), GREEDY | {"prompt_lookup_num_tokens": 3}),
    (EVERYTHING, {}, prompts(), GREEDY | {"do_sample": True, "top_k": 20}),
    (EVERYTHING, {"eps": 0.1}, prompts(), GREEDY),
]
OTHERS = [
    (FEW, {}, prompts(), GREEDY | {"do_sample": True}),
    (FEW, {"balance": "local"}, prompts(batch=2), GREEDY | {"do_sample": True, "mask": True}),
    (FEW, {"eps": 0.05, "audit": True}, prompts(), GREEDY | {"num_beams": 2}),
]


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_ranks_generate_what_one_process_does(ranks: Crew, size: int) -> None:
    one = [(method, {x: y for x, y in made.items() if x not in ("balance", "check")}, *rest) for method, made, *rest in CASES]
    expected = generated(None, one)
    found = ranks.run(generated, CASES + OTHERS, ranks=size)
    for number, (tokens, logits) in enumerate(expected):
        assert torch.equal(found[0][number][0], tokens), f"case {number}"
        # With speculation, rounding decides which rows come together, and logits are those of the same tokens.
        torch.testing.assert_close(found[0][number][1], logits, atol=1e-4, rtol=1e-4)
    for other in found[1:]:
        for mine, theirs in zip(found[0], other, strict=True):
            assert torch.equal(mine[0], theirs[0])
            assert torch.equal(mine[1], theirs[1])


def continued_together(group: Any) -> list[torch.Tensor]:
    """Two prompts of different lengths, each with a cache of its own, then both in one."""
    net = tiny()
    lists = [prompts(70)[0], prompts(45, seed=1)[0]]
    made = {} if group is None else {"mesh": DeviceMesh.from_group(group, "cpu")}
    caches = [hf.CellCache(EVERYTHING, config=net.config, **made) for _ in lists]
    with torch.no_grad():
        for ids, cache in zip(lists, caches, strict=True):
            net(ids[None, :-1], past_key_values=cache)
    # A copy has keys of its own, and exchanges them with the same ranks.
    copies = copy.deepcopy(caches)
    found = hf.generate(net, lists, cache=hf.CellCache.batch(caches), **GREEDY)
    again = hf.generate(net, lists, cache=hf.CellCache.batch(copies), **GREEDY)
    assert all(torch.equal(x, y) for x, y in zip(found, again, strict=True))
    return found


def test_requests_of_different_lengths(ranks: Crew) -> None:
    expected = continued_together(None)
    for found in ranks.run(continued_together, ranks=2):
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def reset_apart(group: Any) -> list[Any]:
    """The layers of a cache that rank 1 has reset once more than others, and tokens that it generates then."""
    net = tiny()
    cache = hf.CellCache(EVERYTHING, config=net.config, mesh=group)
    for _ in range(1 + (torch.distributed.get_rank(group) == 1)):
        cache.reset()
    found = hf.generate(net, prompts(), cache=cache, max_new_tokens=2, do_sample=False)
    return [[layer.store.layer for layer in cache.layers], found.tolist()]


def test_layers_are_what_they_were_after_a_reset(ranks: Crew) -> None:
    """A reset that was interrupted on one rank may be made again there alone."""
    found = ranks.run(reset_apart, ranks=2)
    assert found[0] == found[1]
    assert found[0][0] == [0, 1]


def refused(group: Any) -> list[str]:
    net, found = tiny(), []
    attempts: list[Any] = [
        lambda: hf.CellCache(mesh=group, offload=True, resident=64),
        lambda: hf.CellCache(mesh=group, regroup=False),
        lambda: hf.CellCache(mesh=group, min_weight=0.01),
        lambda: hf.CellCache(nf.TopK(8), mesh=group),
        lambda: hf.CellCache(mesh=group, balance="equal"),
        lambda: hf.CellCache(mesh="cp"),
        lambda: hf.CellCache(mesh=group).watch(None),
        lambda: hf.generate(net, prompts(), cache=hf.CellCache(mesh=group, config=net.config), graph=True),
        lambda: hf.CellCache().save("nowhere"),
        lambda: hf.CellCache(mesh=group).save("nowhere"),
    ]
    for attempt in attempts:
        try:
            attempt()
            found.append("nothing")
        except (ValueError, TypeError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_what_cannot_be_is_refused(ranks: Crew) -> None:
    reasons = (
        "resident=64 is for keys on one machine",
        "regroup=False is for keys on one machine",
        "min_weight=0.01 is for keys on one machine",
        "mesh is for Cells",
        "balance must be one of global, local",
        "TypeError: mesh must be a DeviceMesh or a ProcessGroup",
        "are not watched",
        "graph=True, but",
        "the cache has no layers yet",
        "the cache has no layers yet",
    )
    for found in ranks.run(refused, ranks=2):
        for reason, told in zip(reasons, found, strict=True):
            assert reason in told


def saved_and_loaded(group: Any, folder: Path, method: nf.Cells, make: bool) -> Any:
    """A text that one number of ranks has read is continued by others, and by the same."""
    net, ids = tiny(), prompts(200)
    if make:
        cache = hf.CellCache(method, config=net.config, mesh=group)
        hf.generate(net, ids, cache=cache, max_new_tokens=20, do_sample=False)
        cache.save(folder)
    else:
        cache = hf.CellCache.load(folder, group)
    held = [layer.store.held for layer in cache.layers]  # type: ignore[union-attr]
    outputs, token = [], torch.tensor([[5]])
    with torch.no_grad():
        for _ in range(40):  # until more segments are closed
            outputs.append(net(token, past_key_values=cache, logits_to_keep=1).logits)
            token = outputs[-1].argmax(-1)
    return torch.cat(outputs), held


@pytest.mark.parametrize("method", [EVERYTHING, FEW], ids=["all", "few"])
def test_a_cache_goes_on_after_it_was_saved(ranks: Crew, method: nf.Cells, tmp_path: Path) -> None:
    before = ranks.run(saved_and_loaded, tmp_path, method, True, ranks=3)
    for size in (3, 2, 1):
        after = ranks.run(saved_and_loaded, tmp_path, method, False, ranks=size)
        for outputs, _ in after:
            assert torch.equal(outputs, after[0][0])
            if size == 3:
                assert torch.equal(outputs, before[0][0])
            else:
                torch.testing.assert_close(outputs, before[0][0], atol=1e-4, rtol=1e-4)
        held = [x[1][0] for x in after]
        assert sum(held) == 219
        assert max(held) <= 1.25 * 219 / size
