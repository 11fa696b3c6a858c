"""Keys of all ranks in a folder: a file per rank, and an index that says which files belong together.

A save gets a name of its own, and so do its files, which lie beside those of the save before. When all of them are on disk, the
index is replaced, in one step, and those before it are removed. A save that does not come to its end leaves the one before it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearfield.cells.cache.saved import BY_QUERIES, MOMENTS, SIZES, TENSORS, state_of, tensors_of
from nearfield.cells.cache.segments import cross_of
from nearfield.cells.cache.state import CacheState
from nearfield.cells.partition import Partition
from nearfield.cells.sizes import CacheSizes
from nearfield.distributed.deal import Deal, Segment
from nearfield.distributed.group import CommonError, Ranks
from nearfield.distributed.share import Share
from nearfield.tensor_file import DIGEST, check_digest, check_format, read_about, read_tensors, remove_unfinished, write_tensors

FORMAT, VERSION = "nearfield-shards", "2"
INDEX, SUFFIX = "index.shards", ".shard"

UNEQUAL = 1.25
"""On another number of ranks, whole segments move, unless a rank would get so many times its share of the keys."""

REMEDY = "save the cache again, or take all files of one save"


class Layer(NamedTuple):
    """What the index says of a layer."""

    sizes: CacheSizes
    segments: tuple[Segment, ...]
    length: int
    closed_segments: int
    by_queries: bool
    settled: int
    key_padding: Tensor | None

    @staticmethod
    def of(share: Share) -> Layer:
        deal = share.deal
        return Layer(
            deal.sizes,
            deal.segments,
            deal.length,
            share.closed_segments,
            share.by_queries,
            share.settled,
            share.key_padding,
        )

    def deal(self, ranks: int, segments: Sequence[Segment] | None = None) -> Deal:
        found = self.segments if segments is None else tuple(segments)
        return Deal(self.sizes, ranks, self.length, found, hash(found))

    def keys_of(self, segment: Segment) -> int:
        """How many it has so far."""
        return min(segment.stop, self.length) - segment.start

    def share(self, own: CacheState, deal: Deal, rank: int, closed_segments: int) -> Share:
        """The share of a rank that has this of its own."""
        found = Share(own, deal, rank)
        if self.key_padding is not None:
            padding = self.key_padding.to(own.sinks.device)
            mine = padding[:, deal.positions(rank, slice(0, self.length), padding.device)]
            found = found.but(own=own.but(key_padding=mine), key_padding=padding, counted=padding.sum(1).tolist())
        cells = sum(self.sizes.cells(*segment[:2]) for segment in deal.segments[:closed_segments])
        # Where all cells are made anew, what those in the files were grouped by says nothing of them.
        by_queries = self.by_queries or not closed_segments
        return found.but(closed_segments=closed_segments, cells=cells, by_queries=by_queries, settled=self.settled)


def save_shares(folder: Path, ranks: Ranks, shares: list[Share], about: dict[str, str]) -> None:
    """Write the shares of all layers, each rank its own. All ranks must have the folder in common.

    `about`: what `load_shares` returns with them. If it fails on one rank, it does on all, and what was there stays.
    """
    with ranks.together("save"):
        ranks.agree("save", moving={"layers": [share.facts for share in shares]}, about=about)
        name = ranks.texts("save", secrets.token_hex(8))[0]
        own = folder / f"{name}-{ranks.rank}{SUFFIX}"

        def write_own() -> str:
            folder.mkdir(parents=True, exist_ok=True)
            tensors = {f"layers.{number}.{x}": y for number, share in enumerate(shares) for x, y in tensors_of(share.own).items()}
            write_tensors("shard", own, _header(name, rank=ranks.rank, ranks=ranks.size), tensors)
            return read_about("shard", own, _maker(folder))[DIGEST]

        def write_index() -> str:
            _sync(folder)
            for rank in range(ranks.size):
                if not (shard := folder / f"{name}-{rank}{SUFFIX}").is_file():
                    raise ValueError(
                        f"{shard}, which {ranks.name(rank)} has written, is not there; the ranks need a folder in common"
                    )
            layers = list(map(Layer.of, shares))
            tensors = {f"layers.{i}.key_padding": x.key_padding for i, x in enumerate(layers) if x.key_padding is not None}
            # They are many, and most layers have the same ones.
            numbers: dict[tuple[Segment, ...], int] = {}
            told = [_told(layer) | {"segments": numbers.setdefault(layer.segments, len(numbers))} for layer in layers]
            tensors |= {f"segments.{i}": torch.tensor(x, dtype=torch.int64).view(-1, 3) for x, i in numbers.items()}
            facts = {
                "digests": json.dumps(digests),
                "layers": json.dumps(told),
                "about": json.dumps(about),
            }
            write_tensors("index", folder / INDEX, _header(name, ranks=ranks.size) | facts, tensors)
            return ""

        try:
            digests = _all_succeed(ranks, "save", write_own)
            _all_succeed(ranks, "save", write_index if ranks.rank == 0 else str)
        except CommonError:
            with contextlib.suppress(OSError):  # it may never have been there
                own.unlink()
            raise
        if ranks.rank == 0:
            _remove_others(folder, name)


def load_shares(
    folder: Path,
    ranks: Ranks,
    partitions: Callable[[dict[str, str]], list[Partition]],
    device: torch.device | str | None = None,
    offload: bool = False,
) -> tuple[dict[str, str], list[Share]]:
    """What `save_shares` has written, by as many ranks or others: `about`, and the share of this rank of each layer.

    `partitions` of `about`: how each layer groups keys. `device`: where keys are to be; None: on the CPU. Raises ValueError on
    all ranks where one of them cannot read what it needs.

    On as many ranks, all is as it was, bit by bit. On others, whole segments move with their cells, so that the ranks have about
    as many keys each; where there are too few segments for that, keys are dealt out anew, and grouped again.
    """
    about: dict[str, str] = {}
    layers: list[Layer] = []
    files: list[dict[str, Tensor]] = []
    shares: list[Share] = []

    def read() -> str:
        index, found = _read_index(folder)
        about.update(json.loads(index["about"]))
        layers.extend(found)
        # Every file is read whole by one rank; the others read what they need of it.
        for number in range(int(index["ranks"])):
            files.append(_read_shard(folder, index, number, number % ranks.size == ranks.rank))
        return ""

    def restore() -> str:
        for number, (layer, partition) in enumerate(zip(layers, partitions(about), strict=True)):
            parts = [{x: file[f"layers.{number}.{x}"] for x in TENSORS} for file in files]
            source = _Source(layer, layer.deal(len(files)), parts)
            shares.append(_restored(source, ranks, _Kept(partition, torch.device(device or "cpu"), offload)))
        return ""

    with ranks.together("load"):
        _all_succeed(ranks, "load", read)
        _all_succeed(ranks, "load", restore)  # once it is known that no file is damaged
        ranks.agree("load", moving={"layers": [share.facts for share in shares]}, about=about)
    return about, shares


def _all_succeed(ranks: Ranks, what: str, act: Callable[[], str]) -> list[str]:
    """What this gives on each rank. Raises an error on all of them if it fails on one."""
    try:
        said, failure = json.dumps([act(), None]), None
    except Exception as error:  # whatever it is, the others wait for an answer
        told = f"{error}" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {error}"
        said, failure = json.dumps(["", told]), error
    found = [json.loads(text) for text in ranks.texts(what, said)]
    for rank, (_, reason) in enumerate(found):
        if reason is not None:
            raise CommonError(f"{what} has failed on {ranks.name(rank)}: {reason}") from failure
    return [given for given, _ in found]


def _header(name: str, **numbers: int) -> dict[str, str]:
    return {"format": FORMAT, "version": VERSION, "save": name} | {what: str(x) for what, x in numbers.items()}


def _maker(folder: Path) -> str:
    return f"CellCache(mesh=...).save({str(folder)!r})"


def _told(layer: Layer) -> dict[str, Any]:
    facts = layer._asdict() | {"sizes": dataclasses.asdict(layer.sizes)}
    del facts["key_padding"], facts["segments"]
    return facts


def _sync(folder: Path) -> None:
    """See to it that the names of new files are on disk before what comes next."""
    with contextlib.suppress(OSError):  # where folders cannot be opened, as on Windows
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove_others(folder: Path, name: str) -> None:
    """Remove the files of other saves, also of those that were never finished."""
    _sync(folder)
    remove_unfinished(folder)
    for file in folder.glob(f"*{SUFFIX}"):
        if not file.name.startswith(f"{name}-"):
            with contextlib.suppress(OSError):
                file.unlink()


def _read_index(folder: Path) -> tuple[dict[str, str], list[Layer]]:
    path = folder / INDEX
    about, tensors = read_tensors("index", path, _maker(folder))
    check_format("index", path, about, (FORMAT, VERSION), REMEDY)
    check_digest("index", path, about, tensors)
    layers = []
    for number, told in enumerate(json.loads(about["layers"])):
        sizes = CacheSizes(**told["sizes"])
        segments = tuple(Segment(*segment) for segment in tensors[f"segments.{told['segments']}"].tolist())
        padding = tensors.get(f"layers.{number}.key_padding")
        layers.append(Layer(**{**told, "sizes": sizes, "segments": segments}, key_padding=padding))
    return about, layers


def _read_shard(folder: Path, index: dict[str, str], number: int, verify: bool) -> dict[str, Tensor]:
    path = folder / f"{index['save']}-{number}{SUFFIX}"
    about, tensors = read_tensors("shard", path, _maker(folder))
    check_format("shard", path, about, (FORMAT, VERSION), REMEDY)
    expected = _header(index["save"], rank=number, ranks=int(index["ranks"]))
    expected[DIGEST] = json.loads(index["digests"])[number]
    if about != expected:
        raise ValueError(f"shard {path} is of another save than {folder / INDEX}; {REMEDY}")
    if verify:
        check_digest("shard", path, about, tensors)
    return tensors


class _Kept(NamedTuple):
    """How keys are to be kept."""

    partition: Partition
    device: torch.device
    offload: bool


class _Piece(NamedTuple):
    """A segment in the file that has it."""

    tensors: dict[str, Tensor]
    places: slice
    """of its keys, among those of its rank"""
    cells: slice
    """of its cells; empty if it is not closed"""


class _Source:
    """A layer in the files of all ranks that have saved it."""

    def __init__(self, layer: Layer, deal: Deal, parts: list[dict[str, Tensor]]) -> None:
        self.layer, self.deal, self.parts = layer, deal, parts
        self.pieces: list[_Piece] = []
        places, cells = [0] * deal.ranks, [0] * deal.ranks
        for number, segment in enumerate(deal.segments):
            own = segment.owner
            end = places[own] + layer.keys_of(segment)
            last = cells[own]
            if number < layer.closed_segments:
                last += layer.sizes.cells(segment.start, segment.stop)
            self.pieces.append(_Piece(parts[own], slice(places[own], end), slice(cells[own], last)))
            places[own], cells[own] = end, last
        for rank, part in enumerate(parts):
            _check_shapes(part, parts[0], places[rank], cells[rank], rank)

    def in_order(self, name: str, keys: slice) -> Tensor:
        """Keys or values at these positions, in the order in which they came."""
        found = []
        for number, (segment, piece) in enumerate(zip(self.deal.segments, self.pieces, strict=True)):
            part = segment.within(keys)
            if part.start >= part.stop:
                continue
            rows = piece.tensors[name][:, :, piece.places]
            if number < self.layer.closed_segments:
                order = piece.tensors["order"][:, :, piece.places].long()[..., None].expand_as(rows)
                rows = torch.empty_like(rows).scatter_(2, order, rows)
            found.append(rows[:, :, part.start - segment.start : part.stop - segment.start])
        return torch.cat(found, 2) if found else self.parts[0][name][:, :, :0]


NOT_BY_CELL = ("cross", "pooled", "sinks", "order", SIZES, BY_QUERIES)


def _check_shapes(part: dict[str, Tensor], like: dict[str, Tensor], keys: int, cells: int, rank: int) -> None:
    for name, x in part.items():
        count = None if name in NOT_BY_CELL else {"keys": keys, "values": keys}.get(name, cells)
        if x.dtype != like[name].dtype or x.dim() != like[name].dim() or (count is not None and x.shape[2] != count):
            raise ValueError(f"the shard of rank {rank} does not hold what the index says: {name}")


def _restored(source: _Source, ranks: Ranks, kept: _Kept) -> Share:
    layer, rank = source.layer, ranks.rank
    if ranks.size == source.deal.ranks:
        owners = [segment.owner for segment in source.deal.segments]
        own = _moved(source, owners, rank, kept)
        # What was added up over all segments of this rank is as it was.
        tables = own.tables.but(**{name: source.parts[rank][name].to(kept.device, copy=True) for name in ("cross", "pooled")})
        return layer.share(own.but(tables=tables), source.deal, rank, layer.closed_segments)
    new_owners = _equal_shares(layer, ranks.size)
    if new_owners is not None:
        deal = layer.deal(ranks.size, [x._replace(owner=y) for x, y in zip(layer.segments, new_owners, strict=True)])
        own = _moved(source, new_owners, rank, kept)
        return layer.share(own, deal, rank, layer.closed_segments)
    return _dealt_anew(source, ranks, kept)


def _equal_shares(layer: Layer, ranks: int) -> list[int] | None:
    """The ranks that segments go to, the largest first and each to the rank with fewest keys; None if that is not equal."""
    held, owners = [0] * ranks, [0] * len(layer.segments)
    for number in sorted(range(len(owners)), key=lambda i: -layer.keys_of(layer.segments[i])):
        owners[number] = held.index(min(held))
        held[owners[number]] += layer.keys_of(layer.segments[number])
    return owners if max(held) <= UNEQUAL * layer.length / ranks else None


def _moved(source: _Source, owners: list[int], rank: int, kept: _Kept) -> CacheState:
    """The state of a rank that has these segments, with their cells."""
    layer, like = source.layer, source.parts[0]
    bounds, cell_bounds = [0], [0]
    parts: dict[str, list[Tensor]] = {name: [like[name][:, :, :0]] for name in ("keys", "values", "order", *MOMENTS)}
    sinks = torch.full_like(like["sinks"], -1)
    cross, pooled = torch.zeros_like(like["cross"]), torch.zeros_like(like["pooled"])
    place = 0
    for number, (owner, piece) in enumerate(zip(owners, source.pieces, strict=True)):
        if owner != rank:
            continue
        old, count = piece.tensors, piece.places.stop - piece.places.start
        for name in ("keys", "values"):
            parts[name].append(old[name][:, :, piece.places])
        if number < layer.closed_segments:
            parts["order"].append(old["order"][:, :, piece.places])
            for name in MOMENTS:
                x = old[name][:, :, piece.cells]
                parts[name].append(x - piece.places.start + place if name == "start" else x)
            is_here = (old["sinks"] >= piece.places.start) & (old["sinks"] < piece.places.stop)
            sinks = torch.where(is_here, old["sinks"] - piece.places.start + place, sinks)
            keys, values, centroid, value = (parts[name][-1].flatten(0, 1) for name in ("keys", "values", "centroid", "value"))
            start = (parts["start"][-1] - place).flatten(0, 1).long()
            cross = cross + cross_of(keys, values, start, centroid, value).view_as(cross)
            pooled = pooled + parts["size"][-1].sum(2)
            bounds.append(place + count)
            cell_bounds.append(cell_bounds[-1] + piece.cells.stop - piece.cells.start)
        place += count
    tensors = {name: torch.cat(found, 2) for name, found in parts.items()}
    tensors |= {"sinks": sinks, "cross": cross, "pooled": pooled, SIZES: like[SIZES]}
    tensors[BY_QUERIES] = torch.tensor([layer.by_queries])
    tensors = {name: x.to(kept.device) for name, x in tensors.items()}
    return state_of(tensors, bounds, cell_bounds, layer.sizes, kept.partition, offload=kept.offload)


def _dealt_anew(source: _Source, ranks: Ranks, kept: _Kept) -> Share:
    """The share of a rank, where all keys come together as a prompt does, and are grouped into cells as its are."""
    layer, like = source.layer, source.parts[0]
    deal = Deal(layer.sizes, ranks.size).extended(layer.length)
    parts = deal.own(ranks.rank, slice(0, layer.length))
    key, value = (
        torch.cat([like[name][:, :, :0], *(source.in_order(name, part) for part in parts)], 2).to(kept.device)
        for name in ("keys", "values")
    )
    own = CacheState(key, value, layer.sizes, kept.partition, offload=kept.offload, resident=0 if kept.offload else None)
    own = own.append(key, value, None).but(
        settled=key.shape[2], query_sizes=like[SIZES].to(kept.device) if like[SIZES].shape[2] else None
    )
    share = layer.share(own, deal, ranks.rank, 0)
    for segment in deal.segments:
        if segment.stop + layer.sizes.window < layer.length:
            share = share.close_next(segment.stop, _nothing_to_keep)
    return share.offload_closed()


def _nothing_to_keep(saved: object) -> None:
    """Nobody has these rows yet."""
