"""What every index promises, and the kinds of index that are held to it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from own_indices import BuiltWithBounds, OwnIndex, Subclassed
from torch import Tensor

from nearfield.knn.index import (
    PADDING,
    BuiltIndex,
    CellIndex,
    ConcentricLSH,
    ExactIndex,
    FaissIndex,
    KMeansIndex,
    build_index,
    load,
)

KINDS: dict[str, Any] = {
    "exact": ExactIndex(),
    "own": OwnIndex(),
    "subclassed": Subclassed(BuiltWithBounds),
    "kmeans": KMeansIndex(probes=3, leaf=32),
    "kmeans-one-probe": KMeansIndex(cells=40, probes=1, iterations=2, sample=50, leaf=20),
    "lsh": ConcentricLSH(leaf=32),
    "lsh-small": ConcentricLSH(rungs=3, tables=3, enough=1.0, flips=1, shells=2, leaf=20),
    "lsh-theory": ConcentricLSH.from_theory(200, 0.9, 0.2, delta=0.3, leaf=20),
    "cells": CellIndex(cell_size=8, probes=3, segment=32),
    "faiss-flat": FaissIndex("Flat", leaf=32),
    "faiss-lifted": FaissIndex("Flat", metric="l2", leaf=50),
    "faiss-ivf": FaissIndex("IVF4,Flat", nprobe=2, leaf=64),
}
INCOMPLETE = {"faiss-ivf", "cells"}
"""Kinds that may find fewer than min(k, visible) keys."""

FLOAT32_ONLY = {"faiss-flat", "faiss-lifted", "faiss-ivf"}

UNSAVED = {"own", "subclassed"}
"""Kinds that a user brings: no file could hold them."""


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    if request.param.startswith("faiss"):
        pytest.importorskip("faiss")
    return str(request.param)


def build(kind: str, keys: Tensor) -> BuiltIndex:
    return build_index(KINDS[kind], keys)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def logits(built: BuiltIndex, queries: Tensor, offset: int | Tensor | None) -> Tensor:
    """All inner products in float64, -inf where the row does not see the key."""
    scores = queries.double() @ built.keys.double().transpose(1, 2)
    hidden = torch.arange(built.length) >= built.visible(queries, offset)[..., None]
    return scores.masked_fill(hidden, -torch.inf)


def rounding(built: BuiltIndex, queries: Tensor) -> Tensor:
    """What an inner product may be off by, `[batch, rows, 1]`: dim * eps * ||q|| max||k||, for either of two sums compared."""
    longest = built.keys.double().norm(dim=-1).amax(1) if built.length else torch.zeros(built.keys.shape[0])
    eps = torch.finfo(built.keys.dtype).eps
    return 2 * queries.shape[-1] * eps * (queries.double().norm(dim=-1) * longest[:, None])[..., None]


def assert_contract(kind: str, built: BuiltIndex, queries: Tensor, k: int, offset: int | Tensor | None = None) -> None:
    scores, ids = built.search(queries, k, offset)
    batch, rows, _ = queries.shape
    assert scores.shape == ids.shape == (batch, rows, k)
    assert ids.dtype == torch.int64
    assert scores.dtype == built.keys.dtype
    visible = built.visible(queries, offset)[..., None]
    padding = ids == PADDING
    assert torch.equal(padding, scores == -torch.inf)
    assert bool((padding | ((ids >= 0) & (ids < visible))).all()), "an id outside the visible prefix"
    assert bool((scores[..., :-1] >= scores[..., 1:]).all()), "not sorted"
    found = (~padding).sum(-1, keepdim=True)
    assert bool((found <= visible.clamp(max=k)).all())
    if kind not in INCOMPLETE:
        assert torch.equal(found, visible.clamp(max=k)), "fewer keys than the row sees"
    ordered = ids.sort(dim=-1).values
    assert not bool(((ordered[..., :-1] == ordered[..., 1:]) & (ordered[..., 1:] != PADDING)).any()), "a key twice"
    if built.length:
        true = logits(built, queries, offset).gather(-1, ids.clamp(min=0)).masked_fill(padding, -torch.inf)
        off = (true - scores.double()).masked_fill(padding, 0).abs()
        assert bool((off <= rounding(built, queries)).all()), f"scores off by {off.max()}"
    assert_bounds(built, queries, ids, offset)


def assert_bounds(built: BuiltIndex, queries: Tensor, ids: Tensor, offset: int | Tensor | None) -> None:
    cutoffs = built.cutoffs(queries, ids, offset)
    upper = built.upper_bound(queries, ids, offset)
    if cutoffs is None:
        assert upper is None
        return
    assert upper is not None
    assert upper.shape == ids.shape[:2]
    batch, rows, _ = cutoffs.bounds.shape
    visible = built.visible(queries, offset)
    assert torch.equal(cutoffs.counts.sum(-1), visible)
    left_out = torch.ones(batch, rows, built.length + 1, dtype=torch.bool)
    left_out.scatter_(-1, torch.where(ids == PADDING, built.length, ids), False)
    rest = logits(built, queries, offset).masked_fill(~left_out[..., :-1], -torch.inf)
    slack = rounding(built, queries)
    covered = torch.zeros(batch, rows, built.length, dtype=torch.int64)
    for group in range(cutoffs.bounds.shape[-1]):
        count = cutoffs.counts[..., group, None]
        steps = torch.arange(int(count.max()) if count.numel() else 0)
        at = (cutoffs.starts[:, group, None] + steps).clamp(max=max(0, cutoffs.order.shape[1] - 1))
        members = cutoffs.order.gather(1, at)[:, None].expand(-1, rows, -1)
        covered.scatter_add_(-1, members, (steps < count).long())
        worst = rest.gather(-1, members).masked_fill(steps >= count, -torch.inf)
        assert bool((worst <= cutoffs.bounds[..., group, None].double() + slack).all()), "a bound is broken"
    seen = torch.arange(built.length) < visible[..., None]
    assert torch.equal(covered, seen.long()), "the groups of a row do not list each visible key once"
    if built.length:
        assert bool((upper.double() + slack[..., 0] >= rest.amax(-1)).all())
    assert bool((upper[visible == 0] == -torch.inf).all())


def assert_loads_the_same(kind: str, built: BuiltIndex, queries: Tensor, k: int, path: Path) -> None:
    """Saved, with its keys and without, and loaded, an index is the same to the last bit, also where it grows and shrinks on."""
    if kind in UNSAVED:
        with pytest.raises(TypeError, match="save its keys, and build it of them again"):
            built.save(path)
        assert not path.exists()
        return
    built.save(path)
    whole, state = load(path), built._state()
    built.save(path, keys=False)
    for loaded in (whole, load(path, keys=built._source)):
        assert type(loaded) is type(built)
        assert (loaded.recipe, loaded.dtype, loaded.groups) == (built.recipe, built.dtype, built.groups)
        assert loaded.build(built.keys) is loaded
        assert_same_state(loaded._state(), state)
        for offset in (None, 0, built.length - queries.shape[1]):
            assert_same_answers(loaded, built, queries, k, offset)
    for more in (3, 40):
        keys = random(built.keys.shape[0], more, built.keys.shape[2], seed=more, dtype=built.dtype)
        for change, offset in (
            (lambda x, keys=keys: x.add(keys), None),
            (lambda x: x.remove([0, x.length - 1]), 9),
            (lambda x, keys=keys: x.add(keys, take_in=False), None),
            (lambda x: x.first(x.length - 2), 9),
            (lambda x: x.reserve(5), None),
        ):
            whole, built = change(whole), change(built)
            assert_same_answers(whole, built, queries, k, offset)
            assert_same_state(whole._state(), built._state())


def assert_same_state(found: dict[str, Tensor], true: dict[str, Tensor]) -> None:
    assert found.keys() == true.keys()
    assert_equal(tuple(found.values()), tuple(true[name] for name in found))


def assert_same_answers(one: BuiltIndex, other: BuiltIndex, queries: Tensor, k: int, *offsets: int | None) -> None:
    for offset in offsets:
        found, true = one.find(queries, k, offset), other.find(queries, k, offset)
        assert_equal(tuple(found), tuple(true))
        mine, bounds = one.cutoffs(queries, found.ids, offset), other.cutoffs(queries, true.ids, offset)
        assert (mine is None) == (bounds is None)
        if mine is not None and bounds is not None:
            assert_equal(tuple(vars(mine).values()), tuple(vars(bounds).values()))


def assert_equal(found: tuple[Tensor | None, ...], true: tuple[Tensor | None, ...]) -> None:
    for mine, wanted in zip(found, true, strict=True):
        assert (mine is None) == (wanted is None)
        assert mine is None or wanted is None or torch.equal(mine, wanted)


def clustered(length: int, dim: int, seed: int) -> Tensor:
    centres = random(math.ceil(math.sqrt(length)), dim, seed=seed)
    which = torch.randint(len(centres), (length,), generator=torch.Generator().manual_seed(seed))
    return centres[which] + 0.3 * random(length, dim, seed=seed + 1)
