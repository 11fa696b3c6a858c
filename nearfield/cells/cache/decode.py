"""A step on a GPU: how the state of a cache goes into the kernels of `cells/triton/decode.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nearfield.cells.cache.attention import RECENT, Opening
from nearfield.cells.cache.resident import PIECE, Pool
from nearfield.cells.cache.segments import PER_CELL
from nearfield.cells.cache.state import CacheState
from nearfield.cells.triton.decode import choose_and_read_open_end, merge_parts, read_cells, score_cells
from nearfield.cells.triton.limits import MOST_PROGRAMS, unsupported_step
from nearfield.cells.triton.resident import find_slots
from nearfield.cells.triton.tuning import decode_tiles
from nearfield.kernels import cards
from nearfield.kernels.launch import cdiv, dependent_launch, next_power_of_2, padded, precision
from nearfield.kernels.replay import form, replayed

STEPS = 8
"""Cuts of the range of scores into four: cells whose scores differ by less than a 65,536th of it count as equally good."""

GRAIN = 16
"""Consecutive cells in a grain. Cells are chosen from the grains whose best cells are best."""

COMPARED_PER_WARP = 2048

MOST_AGE, AGE_STEPS = 4095, 6
"""Steps for which a piece of a cell was not opened count up to the first number, and so many cuts into four tell them apart."""

PIECES_AT_A_TIME = 16
"""of each opened cell"""

MERGED_AT_A_TIME = 128
"""parts of a row"""


def unsupported(state: CacheState, query: Tensor, probes: int) -> str | None:
    """What the kernels cannot serve of a query `[batch, heads, rows, dim]` to these keys; None: they serve it."""
    cells, group = len(state.tables), query.shape[1] // state.heads
    compared = next_power_of_2(group) * max(candidates(cells, probes), cells // GRAIN)
    return unsupported_step(query, state.keys.storage, state.values.storage, cells, compared, most_open(state))


def most_open(state: CacheState) -> int:
    """How many keys may be in no closed segment until one is closed, or memory moves: a segment may be without end."""
    room = state.keys.offset + state.keys.storage.shape[2] - state.closed
    return min(state.sizes.most_open(state.closed), room)


def candidates(cells: int, probes: int, grain: int = GRAIN) -> int:
    """How many cells are compared to find the best ones."""
    return grain * next_power_of_2(max(1, min(probes, cdiv(cells, grain))))


def decode(state: CacheState, queries: Tensor, scale: float, opening: Opening) -> Tensor:
    """Output `[batch * heads, group, value_dim]` of queries `[batch * heads, group, dim]` at the position of the latest key.

    A captured graph serves all lengths with up to `most_open` keys in no closed segment.
    """
    keys, values = state.keys, state.values
    open_end, most = state.length - state.closed, most_open(state)
    if keys.offset != values.offset:
        raise RuntimeError(f"keys from {keys.offset} on are stored, and values from {values.offset} on: the cache is broken")
    if open_end > most:
        raise ValueError(f"{open_end} keys are in no closed segment, and there may be at most {most}")
    is_captured = queries.is_cuda and torch.cuda.is_current_stream_capturing()
    # Rounded up, so that the kernels of a step are those of the step before.
    reserved = most if is_captured else min(most, next_power_of_2(open_end))
    state.sync_device_length()
    pool = state.pool(opening.most)
    if state.key_padding is not None:  # which is a longer tensor at every step
        return _decode(state, queries, scale, opening, reserved, pool)
    given = [queries, *_read_by(state), *(pool or ())]
    sizes = state.closed, len(state.tables), keys.offset, state.sizes.sinks, state.tables.most_spread
    forms = [(x.shape[:2], x.shape[3:], form(x)) for x in given]
    key = ("decode", scale, opening, reserved, sizes, *forms, cards.imposed_class())
    return replayed(key, given, lambda: [_decode(state, queries, scale, opening, reserved, pool)])[0]


def _read_by(state: CacheState) -> list[Tensor]:
    """What a step without padding reads of a state, each tensor once."""
    tables, keys, values = state.tables, state.keys, state.values
    tensors = [keys.storage, values.storage, keys.base, values.base, state.sinks, state.device_length.tensor]
    tensors += [tables.cross, tables.pooled, *(getattr(tables, name).storage for name in PER_CELL)]
    return [x for x in tensors if x is not None]


def _decode(state: CacheState, queries: Tensor, scale: float, opening: Opening, reserved: int, pool: Pool | None) -> Tensor:
    """`decode`, with programs for `reserved` keys in no closed segment."""
    entries, group, dim = queries.shape
    keys, values, tables = state.keys, state.values, state.tables
    value_dim, cells = values.storage.shape[3], len(tables)
    tiles = decode_tiles(max(dim, value_dim), queries.dtype, queries.device)
    members, probes = next_power_of_2(group), min(opening.most, cells)
    cell_tiles = cdiv(cells, tiles.cells)
    padded_cells = tiles.cells * cell_tiles
    compared = candidates(padded_cells, probes)

    open_end_parts = cdiv(reserved, tiles.open_end * tiles.open_end_tiles)
    first_far = open_end_parts + 1
    far_parts = cdiv(padded_cells, tiles.far)
    readers = min(probes * cdiv(state.closed, tiles.opened * max(1, cells)), MOST_PROGRAMS)
    part_count = first_far + far_parts + readers
    device, rows = queries.device, entries * group
    parts = torch.empty(rows, part_count, value_dim, dtype=torch.float32, device=device)
    part_lse = torch.empty(rows, part_count, dtype=torch.float32, device=device)
    scores, log2_masses = torch.empty(2, entries, max(1, padded_cells), members, dtype=torch.float32, device=device)
    cell_lse = torch.empty(rows, max(1, cell_tiles), dtype=torch.float32, device=device)
    recent_lse = torch.empty(rows, dtype=torch.float32, device=device)
    grain_best = torch.empty(rows, max(1, padded_cells // GRAIN), dtype=torch.float32, device=device)
    opened, grain_list = torch.empty(2, entries, max(1, probes), dtype=torch.int32, device=device)
    output = queries.new_empty(entries, group, value_dim)
    device_length = state.device_length.tensor

    key_base, value_base = (buffer.storage if buffer.base is None else buffer.base for buffer in (keys, values))
    key_batch, value_batch = (x.stride(0) if len(x) > 1 else 0 for x in (key_base, value_base))
    sizes = {"heads": state.heads, "group": group, "dim": dim, "value_dim": value_dim}
    entry_strides = {"key_entry": keys.storage.stride(1), "value_entry": values.storage.stride(1)}
    stored = {"keys": keys.storage, "values": values.storage, "key_base": key_base, "value_base": value_base}
    places = {
        **entry_strides,
        "key_batch": key_batch,
        "key_head": key_base.stride(1),
        "value_batch": value_batch,
        "value_head": value_base.stride(1),
        "offset": keys.offset,
    }
    # Without padding the kernels do not read what they get for it.
    has_padding = state.key_padding is not None
    key_padding = state.sinks if state.key_padding is None else state.key_padding.view(torch.int8)
    padding_entry = key_padding.stride(0) if has_padding else 0
    blocks = {"BR": max(16, members), "BD": padded(dim), "BV": padded(value_dim)}
    has_base, input_precision = keys.base is not None, precision(tables.value.storage.dtype)
    pdl = dependent_launch(queries)
    dependent: dict[str, Any] = {"launch_pdl": True} if pdl else {}

    score_cells[(entries, cell_tiles + 2)](
        queries=queries,
        **stored,
        sinks=state.sinks,
        key_padding=key_padding,
        centroid=tables.centroid.storage,
        variance=tables.variance.storage,
        log_exists=tables.log_exists.storage,
        size=tables.size.storage,
        device_length=device_length,
        parts=parts,
        part_lse=part_lse,
        scores=scores,
        log2_masses=log2_masses,
        cell_lse=cell_lse,
        recent_lse=recent_lse,
        grain_best=grain_best,
        **sizes,
        **places,
        closed=state.closed,
        padding_entry=padding_entry,
        sink_count=state.sizes.sinks,
        cell_entry=tables.size.storage.stride(1),
        centroid_entry=tables.centroid.storage.stride(1),
        cells=cells,
        padded_cells=padded_cells,
        cell_tiles=cell_tiles,
        part_count=part_count,
        open_end_parts=open_end_parts,
        scale=scale,
        BL=RECENT,
        BC=tiles.cells,
        BS=max(16, next_power_of_2(state.sizes.sinks)),
        BG=members,
        GRAIN=GRAIN,
        **blocks,
        MOST_SPREAD=tables.most_spread,
        HAS_PADDING=has_padding,
        HAS_BASE=has_base,
        IP=input_precision,
        PDL=pdl,
        num_warps=tiles.warps,
    )
    choose_and_read_open_end[(entries, 1 + open_end_parts)](
        scores=scores,
        log2_masses=log2_masses,
        recent_lse=recent_lse,
        cell_lse=cell_lse,
        grain_best=grain_best,
        grain_list=grain_list,
        opened=opened,
        queries=queries,
        keys=keys.storage,
        values=values.storage,
        key_padding=key_padding,
        device_length=device_length,
        parts=parts,
        part_lse=part_lse,
        **sizes,
        **entry_strides,
        offset=keys.offset,
        closed=state.closed,
        padding_entry=padding_entry,
        padded_cells=padded_cells,
        cell_tiles=cell_tiles,
        probes=probes,
        part_count=part_count,
        open_end_parts=open_end_parts,
        scale=scale,
        lowest=opening.lowest,
        PER=tiles.open_end_tiles,
        BK=tiles.open_end,
        **blocks,
        STEPS=STEPS,
        GRAIN=GRAIN,
        BG=members,
        BT=next_power_of_2(cell_tiles),
        BN=next_power_of_2(padded_cells // GRAIN),
        BP=compared // GRAIN,
        HAS_CELLS=cells > 0,
        HAS_PADDING=has_padding,
        IP=input_precision,
        PDL=pdl,
        num_warps=max(tiles.warps, min(16, compared * members // COMPARED_PER_WARP)),
        **dependent,
    )
    # Without a pool the kernel does not read what it gets for it.
    resident = dict.fromkeys(("slot_of", "is_filled", "key_pool", "value_pool"), queries)
    if pool is not None:
        _find_slots(pool, state, opened, pdl)
        resident = {"slot_of": pool.slot_of, "is_filled": pool.is_filled, "key_pool": pool.keys, "value_pool": pool.values}
    if cells:
        read_cells[(entries, readers + far_parts)](
            queries=queries,
            **stored,
            mean_value=tables.value.storage,
            start=tables.start.storage,
            size=tables.size.storage,
            log2_masses=log2_masses,
            opened=opened,
            parts=parts,
            part_lse=part_lse,
            **resident,
            **sizes,
            **places,
            cell_entry=tables.size.storage.stride(1),
            mean_entry=tables.value.storage.stride(1),
            cells=cells,
            padded_cells=padded_cells,
            probes=probes,
            part_count=part_count,
            first_far=first_far,
            far_parts=far_parts,
            readers=readers,
            pieces=0 if pool is None else pool.pieces,
            slots=0 if pool is None else pool.slots,
            scale=scale,
            BG=members,
            BP=next_power_of_2(probes),
            BK=tiles.opened,
            BC=tiles.far,
            **blocks,
            PIECE=PIECE,
            HAS_BASE=has_base,
            HAS_POOL=pool is not None,
            IP=input_precision,
            PDL=pdl,
            num_warps=tiles.warps,
            **dependent,
        )
    columns = min(tiles.columns, padded(value_dim))
    merge_parts[(rows, cdiv(value_dim, columns))](
        parts=parts,
        part_lse=part_lse,
        queries=queries,
        cross=tables.cross,
        pooled=tables.pooled,
        output=output,
        group=group,
        dim=dim,
        value_dim=value_dim,
        part_count=part_count,
        first_far=first_far,
        far_parts=far_parts,
        scale=scale,
        PARTS=next_power_of_2(part_count),
        BP=min(MERGED_AT_A_TIME, next_power_of_2(part_count)),
        BD=padded(dim),
        BV=columns,
        PDL=pdl,
        num_warps=4,
        **dependent,
    )
    return output


def _find_slots(pool: Pool, state: CacheState, opened: Tensor, pdl: bool) -> None:
    """Give the pieces of the cells `opened` `[entries, probes]` their slots."""
    entries, probes = opened.shape
    cells, slots = next_power_of_2(probes), next_power_of_2(pool.slots)
    find_slots[(entries,)](
        opened=opened,
        start=state.tables.start.storage,
        size=state.tables.size.storage,
        slot_of=pool.slot_of,
        piece_of=pool.piece_of,
        used=pool.used,
        is_filled=pool.is_filled,
        clock=pool.clock,
        counts=pool.counts,
        missing=torch.empty_like(pool.piece_of),
        cell_entry=state.tables.size.storage.stride(1),
        offset=state.keys.offset,
        probes=probes,
        pieces=pool.pieces,
        slots=pool.slots,
        PIECE=PIECE,
        MOST_AGE=MOST_AGE,
        STEPS=AGE_STEPS,
        BP=cells,
        BJ=PIECES_AT_A_TIME,
        BS=slots,
        PDL=pdl,
        num_warps=4 if max(cells * PIECES_AT_A_TIME, slots) <= 1024 else 8,
        **({"launch_pdl": True} if pdl else {}),
    )
