"""The stores of a cache whose keys are shared out over ranks, in a folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from nearfield.cells.cache.store import check_method
from nearfield.cells.method import Cells
from nearfield.cells.partition import Partition
from nearfield.distributed.files import load_shares, save_shares
from nearfield.distributed.group import Ranks
from nearfield.distributed.share import Share
from nearfield.distributed.store import ShardedStore
from nearfield.hf.config import describe, parse_method


class Loaded(NamedTuple):
    """What a folder holds, layer by layer."""

    methods: list[Cells]
    shares: list[Share]
    group_from: int | None


def save_stores(folder: Path, stores: Sequence[object], group_from: int | None) -> None:
    """Write the stores of all layers; see `CellCache.save`."""
    sharded: list[ShardedStore] = []
    shares: list[Share] = []
    for number, store in enumerate(stores):
        if not isinstance(store, ShardedStore):
            raise ValueError(
                f"layer {number} has a {type(store).__name__}, whose keys are not shared out over ranks; only a cache made with "
                "CellCache(mesh=...), for a model with full attention in all layers, can be saved like this"
            )
        if store.share is None:
            raise ValueError(f"layer {number} has no keys yet; let the model read something first")
        sharded.append(store)
        shares.append(store.share)
    if not sharded:
        raise ValueError("the cache has no layers yet; let the model read something first")
    methods = json.dumps([describe(store.method) for store in sharded])
    save_shares(folder, sharded[0].ranks, shares, {"methods": methods, "group_from": json.dumps(group_from)})


def load_stores(folder: Path, ranks: Ranks, device: torch.device | str | None, offload: bool) -> Loaded:
    """Read what `save_stores` has written."""
    about, shares = load_shares(folder, ranks, _partitions, device, offload)
    return Loaded(_methods(about), shares, json.loads(about["group_from"]))


def _methods(about: dict[str, str]) -> list[Cells]:
    methods = [parse_method(f"method of layer {number}", given) for number, given in enumerate(json.loads(about["methods"]))]
    for method in methods:
        check_method(method)
    return methods


def _partitions(about: dict[str, str]) -> list[Partition]:
    return [method.partition for method in _methods(about)]
