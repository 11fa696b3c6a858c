"""One step of a cache: the attention of one query per head to everything that is stored, in four kernels.

    score_cells               scores all cells, attends to the sinks, and sums up the weights of the most recent keys
    choose_and_read_open_end  chooses the cells that each group of queries opens, and meanwhile reads the open end
    read_cells                reads the keys of opened cells, and the moments of closed ones
    merge_parts               merges what these have found

The open end is all keys that are in no closed segment. Where cells are chosen, its most recent keys stand for it. Keys and values
are found at *places*: those before `offset` are in a base that several batch entries may share, the others in the store. If the
base is in CPU memory, cells that were opened lately are on the card as well; `find_slots` of `triton/resident.py`, which then
comes before `read_cells`, says where.

What a row has found is in `part_count` parts, each with a mean of values and a log-normaliser to base 2: `open_end_parts` of the
open end, one of the sinks, `far_parts` of closed cells, and one for each reader of opened cells.
"""

from __future__ import annotations

from functools import partial

import triton
import triton.language as tl

from nearfield.cells.triton.far_field import LEAST_SCORE, VOID, cell_score, log2_cell_mass, squares
from nearfield.kernels.launch import LN2, LOG2E, Kernel, launch_dependents, wait_for_previous

CHANGING = (
    "offset",
    "closed",
    "cells",
    "padded_cells",
    "cell_tiles",
    "probes",
    "part_count",
    "open_end_parts",
    "first_far",
    "far_parts",
    "readers",
    "pieces",
    "slots",
)
"""Numbers that change as keys are added."""

ABSENT = tl.constexpr(-1)
"""In place of a slot: the piece of a cell is not on the card. See `triton/resident.py`."""


@triton.jit
def pending(slot):
    """What is said of a piece whose slot may not hold it yet; and of that, the slot."""
    return -2 - slot


@triton.jit
def largest(x, some, wanted, least, STEPS: tl.constexpr, LENGTH: tl.constexpr):
    """Which of `some` numbers `[LENGTH]` are the `wanted` largest, a place for each of those in a list without gaps, and a number
    that `wanted` of them reach. That many are known to reach `least`.
    """
    # Three counts in one sum: in half as many bits where they fit.
    COUNT: tl.constexpr = tl.int32 if LENGTH <= 512 else tl.int64
    BITS: tl.constexpr = 10 if LENGTH <= 512 else 20
    ONES: tl.constexpr = (1 << BITS) - 1
    high = tl.max(x, 0)
    low = tl.minimum(tl.maximum(tl.min(tl.where(some, x, float("inf")), 0), least), high)
    reached = tl.sum((some & (x >= low)).to(tl.int32), 0)
    step = 0
    while (reached > wanted) & (step < STEPS):
        quarter = 0.25 * (high - low)
        reach = (x >= low + quarter).to(COUNT)
        reach += (x >= low + 2.0 * quarter).to(COUNT) << BITS
        reach += (x >= low + 3.0 * quarter).to(COUNT) << 2 * BITS
        count = tl.sum(reach, 0)
        first = (count & ONES).to(tl.int32)
        second = ((count >> BITS) & ONES).to(tl.int32)
        third = (count >> 2 * BITS).to(tl.int32)
        enough = (first >= wanted).to(tl.int32) + (second >= wanted).to(tl.int32) + (third >= wanted).to(tl.int32)
        reached = tl.where(enough == 3, third, tl.where(enough == 2, second, tl.where(enough == 1, first, reached)))
        low += enough.to(tl.float32) * quarter
        high = tl.where(enough < 3, low + quarter, high)
        step += 1
    # First come all that are surely among them, then those as good as the last one. Both counts in one sum.
    high = tl.where(reached > wanted, high, low)
    sure = some & (x >= high)
    tied = some & (x >= low) & (x < high)
    rank = tl.cumsum(sure.to(tl.int64) + (tied.to(tl.int64) << 32), 0)
    place = tl.where(tied, tl.sum(sure.to(tl.int64), 0) + (rank >> 32), rank & 0xFFFFFFFF) - 1
    return (sure | tied) & (place < wanted), place, low


@triton.jit
def choose_cells(
    scores,
    log2_masses,
    sink_lse,
    recent_lse,
    cell_lse,
    grain_best,
    grain_list,
    opened,
    entry,
    group,
    padded_cells,
    cell_tiles,
    part_count,
    probes,
    lowest,
    STEPS: tl.constexpr,
    GRAIN: tl.constexpr,
    BG: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BP: tl.constexpr,
):
    """The best `probes` cells of a group, of those in which a query may have a share above e^lowest of its weights in one key:
    listed in `opened`, and without mass from now on.

    They lie in at most as many grains (runs of GRAIN cells), namely those whose best cells are best: only these are looked at.
    `scores` and `log2_masses` are `[entries, padded_cells, BG]`.
    """
    none = -float("inf")
    member, tile, grain = tl.arange(0, BG), tl.arange(0, BT), tl.arange(0, BN)
    grains = padded_cells // GRAIN
    member_row, is_member = entry * group + member, member < group
    row, is_row = member_row[:, None], is_member[:, None]
    # A score less the log-normaliser of all that a query sees: how large a share of its weights it may have in the cell.
    sinks = tl.load(sink_lse + member_row * part_count, mask=is_member, other=none)
    recent = tl.load(recent_lse + member_row, mask=is_member, other=none)
    far = tl.load(cell_lse + row * cell_tiles + tile[None, :], mask=is_row & (tile < cell_tiles)[None, :], other=none)
    best_of = tl.load(grain_best + row * grains + grain[None, :], mask=is_row & (grain < grains)[None, :], other=VOID)
    m_i = tl.maximum(tl.maximum(sinks, recent), tl.max(far, 1))
    m_i = tl.where(m_i > none, m_i, 0.0)
    l_i = tl.exp2(sinks - m_i) + tl.exp2(recent - m_i) + tl.sum(tl.exp2(far - m_i[:, None]), 1)
    lse_i = (m_i + tl.log2(tl.maximum(l_i, 1e-30))) * LN2
    best_grain = tl.max(tl.where(best_of > LEAST_SCORE, best_of - lse_i[:, None], VOID), 0)
    chosen, place, least = largest(best_grain, best_grain > LEAST_SCORE, probes, VOID, STEPS, BN)
    grain_list += entry * probes
    tl.store(grain_list + place, grain, mask=chosen)
    found = tl.sum(chosen.to(tl.int32), 0)
    tl.debug_barrier()  # All threads have written their part of the list.
    candidate = tl.arange(0, BP * GRAIN)
    is_candidate = candidate // GRAIN < found
    cell = tl.load(grain_list + candidate // GRAIN, mask=is_candidate, other=0) * GRAIN + candidate % GRAIN
    at = (entry * padded_cells + cell)[:, None] * BG + member[None, :]
    score = tl.load(scores + at, mask=is_candidate[:, None] & is_member[None, :], other=VOID)
    best = tl.max(tl.where(score > LEAST_SCORE, score - lse_i[None, :], VOID), 1)
    # Every grain has a cell that is as good as the grain.
    is_wanted = best > tl.maximum(lowest, LEAST_SCORE)
    taken, slot, _ = largest(best, is_wanted, probes, tl.where(found == probes, least, VOID), STEPS, BP * GRAIN)
    tl.store(opened + entry * probes + slot, cell, mask=taken)
    filled = tl.sum(taken.to(tl.int32), 0)
    tl.store(opened + entry * probes + candidate, -1, mask=(candidate >= filled) & (candidate < probes))
    tl.store(log2_masses + at, tl.full([BP * GRAIN, BG], none, tl.float32), mask=taken[:, None] & is_member[None, :])


@triton.jit
def add_tile(acc, m_i, l_i, logits, value, IP: tl.constexpr):
    """Add a tile of logits (base 2) and values to a running softmax."""
    m_new = tl.maximum(m_i, tl.max(logits, 1))
    base = tl.where(m_new > -float("inf"), m_new, 0.0)
    alpha = tl.exp2(m_i - base)
    p = tl.exp2(logits - base[:, None])
    acc = acc * alpha[:, None] + tl.dot(p.to(value.dtype), value, input_precision=IP)
    return acc, m_new, l_i * alpha + tl.sum(p, 1)


@triton.jit
def store_part(parts, part_lse, part, first_part, real, column, wide, acc, m_i, l_i, value_dim):
    """Write one part of some rows. A part without weight has no mean, and what stands in its place is never looked at."""
    some = (l_i > 0.0) | (l_i != l_i)  # What is NaN stays so.
    mean = acc / tl.where(some, l_i, 1.0)[:, None]
    into = parts + (first_part + part)[:, None] * value_dim + column[None, :]
    tl.store(into, mean, mask=(real & some)[:, None] & wide[None, :])
    lse = tl.where(some, m_i + tl.log2(tl.where(some, l_i, 1.0)), -float("inf"))
    tl.store(part_lse + first_part + part, lse, mask=real)


@triton.jit
def log2_of_sum(x):
    """log2 of the sum of 2^x along the last axis."""
    m_i = tl.max(x, 1)
    base = tl.where(m_i > -float("inf"), m_i, 0.0)
    return base + tl.log2(tl.sum(tl.exp2(x - base[:, None]), 1))


@triton.jit
def base_offset(entry, heads, batch_stride, head_stride):
    """Where the base of an entry (one head of one batch entry) begins."""
    return (entry // heads) * batch_stride + (entry % heads) * head_stride


@triton.jit
def load_places(stored, base, place, real, column, wide, dim, offset, HAS_BASE: tl.constexpr):
    """Keys or values at some places. Places and columns span a block, in either order."""
    # One load from any memory, and not one from each, which would take a buffer each. Addresses with columns are what is
    # chosen from: Triton forgets how addresses of rows are aligned, and would load number by number.
    if HAS_BASE:
        where = tl.where(place < offset, base + place * dim + column, stored + (place - offset) * dim + column)
    else:
        where = stored + place * dim + column
    return tl.load(where, mask=real & wide, other=0.0)


@triton.jit
def load_resident(stored, base, pool, place, at_pool, is_kept, real, column, wide, dim, offset):
    """`load_places` with a base, where some places are in a pool on the card too: rows `at_pool` if `is_kept`."""
    before = tl.where(is_kept, pool + at_pool * dim + column, base + place * dim + column)
    where = tl.where(place < offset, before, stored + (place - offset) * dim + column)
    return tl.load(where, mask=real & wide, other=0.0)


@triton.jit
def load_both(
    keys,
    key_base,
    values,
    value_base,
    place,
    real,
    column,
    wide,
    dim,
    value_column,
    value_wide,
    value_dim,
    offset,
    HAS_BASE: tl.constexpr,
):
    """Keys `[columns, places]` and values `[places, columns]`, as products want them."""
    across, down = place[None, :], place[:, None]
    key = load_places(keys, key_base, across, real[None, :], column[:, None], wide[:, None], dim, offset, HAS_BASE)
    value_columns, values_wide = value_column[None, :], value_wide[None, :]
    value = load_places(values, value_base, down, real[:, None], value_columns, values_wide, value_dim, offset, HAS_BASE)
    return key, value


@triton.jit
def load_queries(queries, first_row, row, real, column, wide, dim):
    """The queries of a group, `[rows, columns]`."""
    at = (first_row + row)[:, None] * dim + column[None, :]
    return tl.load(queries + at, mask=real[:, None] & wide[None, :], other=0.0)


@partial(Kernel, do_not_specialize=CHANGING)
def score_cells(
    queries,
    keys,
    values,
    key_base,
    value_base,
    sinks,
    key_padding,
    centroid,
    variance,
    log_exists,
    size,
    device_length,
    parts,
    part_lse,
    scores,
    log2_masses,
    cell_lse,
    recent_lse,
    grain_best,
    heads,
    group,
    dim,
    value_dim,
    key_entry,
    value_entry,
    key_batch,
    key_head,
    value_batch,
    value_head,
    offset,
    closed,
    padding_entry,
    sink_count,
    cell_entry,
    centroid_entry,
    cells,
    padded_cells,
    cell_tiles,
    part_count,
    open_end_parts,
    scale,
    BL: tl.constexpr,
    BC: tl.constexpr,
    BS: tl.constexpr,
    BG: tl.constexpr,
    GRAIN: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    MOST_SPREAD: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    HAS_BASE: tl.constexpr,
    IP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Jobs of an entry: a tile of cells each, then the sinks, then the most recent keys."""
    launch_dependents(PDL)
    entry = tl.program_id(0).to(tl.int64)
    job = tl.program_id(1)
    row = tl.arange(0, BR)
    real = row < group
    column, value_column = tl.arange(0, BD), tl.arange(0, BV)
    wide, value_wide = column < dim, value_column < value_dim
    first_part = (entry * group + row) * part_count
    # All loads are issued before any is waited for: loads that wait for each other are what makes a program slow.
    if job >= cell_tiles:
        keys += entry * key_entry
        values += entry * value_entry
        if job > cell_tiles:
            place = tl.load(device_length).to(tl.int64) - BL + tl.arange(0, BL)
            there = place >= closed
            seen = there
            if HAS_PADDING:
                seen = seen & (tl.load(key_padding + (entry // heads) * padding_entry + place, mask=there, other=0) != 0)
            recent = tl.load(
                keys + (place - offset)[None, :] * dim + column[:, None], mask=there[None, :] & wide[:, None], other=0.0
            )
            recent_query = load_queries(queries, entry * group, row, real, column, wide, dim)
            recent_logits = tl.dot(recent_query, recent, input_precision=IP) * (scale * LOG2E)
            recent_logits = tl.where(seen[None, :], recent_logits, -float("inf"))
            tl.store(recent_lse + entry * group + row, log2_of_sum(recent_logits), mask=real)
        else:
            number = tl.arange(0, BS)
            sink = tl.load(sinks + (entry // heads) * sink_count + number, mask=number < sink_count, other=-1)
            known = sink >= 0
            key_base += base_offset(entry, heads, key_batch, key_head)
            value_base += base_offset(entry, heads, value_batch, value_head)
            sink_key, sink_value = load_both(
                keys,
                key_base,
                values,
                value_base,
                sink,
                known,
                column,
                wide,
                dim,
                value_column,
                value_wide,
                value_dim,
                offset,
                HAS_BASE,
            )
            sink_query = load_queries(queries, entry * group, row, real, column, wide, dim)
            logits = tl.dot(sink_query, sink_key, input_precision=IP) * (scale * LOG2E)
            logits = tl.where(known[None, :], logits, -float("inf"))
            acc = tl.zeros([BR, BV], tl.float32)
            m_i = tl.full([BR], -float("inf"), tl.float32)
            l_i = tl.zeros([BR], tl.float32)
            acc, m_i, l_i = add_tile(acc, m_i, l_i, logits, sink_value, IP)
            store_part(parts, part_lse, open_end_parts, first_part, real, value_column, value_wide, acc, m_i, l_i, value_dim)
    else:
        cell = job * BC + tl.arange(0, BC)
        is_cell = cell < cells
        at_cell = entry * centroid_entry + cell[None, :] * dim + column[:, None]
        mean = tl.load(centroid + at_cell, mask=is_cell[None, :] & wide[:, None], other=0.0)
        var = tl.load(variance + at_cell, mask=is_cell[None, :] & wide[:, None], other=0.0)
        exists = tl.maximum(tl.load(log_exists + entry * cell_entry + cell, mask=is_cell, other=-float("inf")), VOID)
        n = tl.load(size + entry * cell_entry + cell, mask=is_cell, other=0.0)
        query = load_queries(queries, entry * group, row, real, column, wide, dim)
        square = squares(query, scale, var.dtype)
        first = tl.dot(query.to(mean.dtype), mean, input_precision=IP) * scale
        spread = tl.dot(square, var, input_precision=IP)
        score = cell_score(first, tl.minimum(spread, MOST_SPREAD), exists[None, :])
        log2_n = tl.where(n > 0.0, tl.log2(tl.maximum(n, 1.0)), -float("inf"))
        log2_mass = log2_cell_mass(first * LOG2E, spread) + log2_n[None, :]
        log2_mass = tl.where(exists[None, :] > LEAST_SCORE, log2_mass, -float("inf"))
        into = (entry * padded_cells + cell)[None, :] * BG + row[:, None]
        score = tl.where(is_cell[None, :], score, VOID)
        tl.store(scores + into, score, mask=real[:, None])
        grain = job * (BC // GRAIN) + tl.arange(0, BC // GRAIN)
        grain_at = (entry * group + row)[:, None] * (padded_cells // GRAIN) + grain[None, :]
        tl.store(grain_best + grain_at, tl.max(tl.reshape(score, [BR, BC // GRAIN, GRAIN]), 2), mask=real[:, None])
        log2_mass = tl.where(is_cell[None, :], log2_mass, -float("inf"))
        tl.store(log2_masses + into, log2_mass, mask=real[:, None])
        tl.store(cell_lse + (entry * group + row) * cell_tiles + job, log2_of_sum(log2_mass), mask=real)


@partial(Kernel, do_not_specialize=CHANGING)
def choose_and_read_open_end(
    scores,
    log2_masses,
    recent_lse,
    cell_lse,
    grain_best,
    grain_list,
    opened,
    queries,
    keys,
    values,
    key_padding,
    device_length,
    parts,
    part_lse,
    heads,
    group,
    dim,
    value_dim,
    key_entry,
    value_entry,
    offset,
    closed,
    padding_entry,
    padded_cells,
    cell_tiles,
    probes,
    part_count,
    open_end_parts,
    scale,
    lowest,
    PER: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    STEPS: tl.constexpr,
    GRAIN: tl.constexpr,
    BG: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BP: tl.constexpr,
    HAS_CELLS: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    IP: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first job of an entry chooses. Each of the others reads PER tiles of the open end, and need not wait."""
    launch_dependents(PDL)
    entry = tl.program_id(0).to(tl.int64)
    job = tl.program_id(1) - 1
    if job < 0:
        wait_for_previous(PDL)
        if HAS_CELLS:
            choose_cells(
                scores,
                log2_masses,
                part_lse + open_end_parts,
                recent_lse,
                cell_lse,
                grain_best,
                grain_list,
                opened,
                entry,
                group,
                padded_cells,
                cell_tiles,
                part_count,
                probes,
                lowest,
                STEPS,
                GRAIN,
                BG,
                BT,
                BN,
                BP,
            )
    else:
        row = tl.arange(0, BR)
        real = row < group
        column, value_column = tl.arange(0, BD), tl.arange(0, BV)
        wide, value_wide = column < dim, value_column < value_dim
        first_part = (entry * group + row) * part_count
        keys += entry * key_entry
        values += entry * value_entry
        length = tl.load(device_length).to(tl.int64)
        first_place = closed + job.to(tl.int64) * (PER * BK)
        if first_place < length:
            query = load_queries(queries, entry * group, row, real, column, wide, dim)
            acc = tl.zeros([BR, BV], tl.float32)
            m_i = tl.full([BR], -float("inf"), tl.float32)
            l_i = tl.zeros([BR], tl.float32)
            # Pipelined, so that keys and values are loaded at the same time.
            for tile in tl.range(0, PER, num_stages=2):
                place = first_place + tile * BK + tl.arange(0, BK)
                there = place < length
                seen = there
                if HAS_PADDING:
                    seen = seen & (tl.load(key_padding + (entry // heads) * padding_entry + place, mask=there, other=0) != 0)
                at = place - offset
                key = tl.load(keys + at[None, :] * dim + column[:, None], mask=there[None, :] & wide[:, None], other=0.0)
                value = tl.load(
                    values + at[:, None] * value_dim + value_column[None, :],
                    mask=there[:, None] & value_wide[None, :],
                    other=0.0,
                )
                logits = tl.dot(query, key, input_precision=IP) * (scale * LOG2E)
                logits = tl.where(seen[None, :], logits, -float("inf"))
                acc, m_i, l_i = add_tile(acc, m_i, l_i, logits, value, IP)
            store_part(parts, part_lse, job, first_part, real, value_column, value_wide, acc, m_i, l_i, value_dim)
        else:
            tl.store(part_lse + first_part + job, -float("inf"), mask=real)
        wait_for_previous(PDL)


@partial(Kernel, do_not_specialize=CHANGING)
def read_cells(
    queries,
    keys,
    values,
    key_base,
    value_base,
    mean_value,
    start,
    size,
    log2_masses,
    opened,
    parts,
    part_lse,
    slot_of,
    is_filled,
    key_pool,
    value_pool,
    heads,
    group,
    dim,
    value_dim,
    key_entry,
    value_entry,
    key_batch,
    key_head,
    value_batch,
    value_head,
    offset,
    cell_entry,
    mean_entry,
    cells,
    padded_cells,
    probes,
    part_count,
    first_far,
    far_parts,
    readers,
    pieces,
    slots,
    scale,
    BG: tl.constexpr,
    BP: tl.constexpr,
    BK: tl.constexpr,
    BC: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    PIECE: tl.constexpr,
    HAS_BASE: tl.constexpr,
    HAS_POOL: tl.constexpr,
    IP: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first jobs of an entry are readers of opened cells. The others take a tile of cells each; opened ones have no mass.

    With a pool, pieces of cells that are in it are read there. Others are read from the base, and those that have got a slot
    are copied to it. Each piece has one reader, so that nobody reads what another one is copying.
    """
    launch_dependents(PDL)
    entry = tl.program_id(0).to(tl.int64)
    job = tl.program_id(1)
    value_column = tl.arange(0, BV)
    value_wide = value_column < value_dim
    row = tl.arange(0, BR)
    real = row < group
    acc = tl.zeros([BR, BV], tl.float32)
    m_i = tl.full([BR], -float("inf"), tl.float32)
    l_i = tl.zeros([BR], tl.float32)
    if job >= readers:
        part = job - readers
        cell = part * BC + tl.arange(0, BC)
        # Beyond the last cell memory may hold anything, even NaN, which a weight of zero does not remove.
        at = entry * mean_entry + cell[:, None] * value_dim + value_column[None, :]
        mean = tl.load(mean_value + at, mask=(cell < cells)[:, None] & value_wide[None, :], other=0.0)
        wait_for_previous(PDL)
        log2_mass = tl.load(
            log2_masses + (entry * padded_cells + cell)[None, :] * BG + row[:, None],
            mask=real[:, None] & (cell < padded_cells)[None, :],
            other=-float("inf"),
        )
        acc, m_i, l_i = add_tile(acc, m_i, l_i, log2_mass, mean, IP)
    else:
        part = far_parts + job
        column = tl.arange(0, BD)
        wide = column < dim
        query = load_queries(queries, entry * group, row, real, column, wide, dim)
        keys += entry * key_entry
        values += entry * value_entry
        key_base += base_offset(entry, heads, key_batch, key_head)
        value_base += base_offset(entry, heads, value_batch, value_head)
        if HAS_POOL:
            slot_of += entry * pieces
            is_filled += entry * slots
            key_pool += entry * slots * PIECE * dim
            value_pool += entry * slots * PIECE * value_dim
        wait_for_previous(PDL)
        # Cells differ in size: the tiles of all opened ones are dealt out to the readers in turn.
        slot = tl.arange(0, BP)
        own = tl.load(opened + entry * probes + slot, mask=slot < probes, other=-1)
        about = entry * cell_entry + tl.maximum(own, 0)
        size_of = tl.load(size + about, mask=own >= 0, other=0.0).to(tl.int32)
        start_of = tl.load(start + about, mask=own >= 0, other=0)
        tiles = (size_of + BK - 1) // BK
        after = tl.cumsum(tiles, 0)
        before = after - tiles
        for tile in tl.range(job, tl.sum(tiles, 0), readers, num_stages=2):
            is_own = (before <= tile) & (tile < after)
            lane = (tile - tl.sum(tl.where(is_own, before, 0), 0)) * BK + tl.arange(0, BK)
            inside = lane < tl.sum(tl.where(is_own, size_of, 0), 0)
            place = tl.sum(tl.where(is_own, start_of, 0), 0).to(tl.int64) + lane
            if HAS_POOL:
                piece = tl.sum(tl.where(is_own, start_of // PIECE + own, 0), 0) + lane // PIECE
                early = inside & (place < offset)
                said = tl.load(slot_of + piece, mask=early, other=ABSENT)
                is_kept = said >= 0
                is_new = early & (said < ABSENT)
                into = tl.where(is_kept, said, pending(said))
                row_of = into * PIECE + lane % PIECE
                key = load_resident(
                    keys,
                    key_base,
                    key_pool,
                    place[None, :],
                    row_of[None, :],
                    is_kept[None, :],
                    inside[None, :],
                    column[:, None],
                    wide[:, None],
                    dim,
                    offset,
                )
                value = load_resident(
                    values,
                    value_base,
                    value_pool,
                    place[:, None],
                    row_of[:, None],
                    is_kept[:, None],
                    inside[:, None],
                    value_column[None, :],
                    value_wide[None, :],
                    value_dim,
                    offset,
                )
                tl.store(key_pool + row_of[None, :] * dim + column[:, None], key, mask=is_new[None, :] & wide[:, None])
                value_at = row_of[:, None] * value_dim + value_column[None, :]
                tl.store(value_pool + value_at, value, mask=is_new[:, None] & value_wide[None, :])
                tl.store(is_filled + into, tl.full([BK], 1, tl.int32), mask=is_new & (lane % PIECE == 0))
            else:
                key, value = load_both(
                    keys,
                    key_base,
                    values,
                    value_base,
                    place,
                    inside,
                    column,
                    wide,
                    dim,
                    value_column,
                    value_wide,
                    value_dim,
                    offset,
                    HAS_BASE,
                )
            logits = tl.dot(query, key, input_precision=IP) * (scale * LOG2E)
            logits = tl.where(inside[None, :], logits, -float("inf"))
            acc, m_i, l_i = add_tile(acc, m_i, l_i, logits, value, IP)
    first_part = (entry * group + row) * part_count
    store_part(parts, part_lse, first_far + part, first_part, real, value_column, value_wide, acc, m_i, l_i, value_dim)


@partial(Kernel, do_not_specialize=CHANGING)
def merge_parts(
    parts,
    part_lse,
    queries,
    cross,
    pooled,
    output,
    group,
    dim,
    value_dim,
    part_count,
    first_far,
    far_parts,
    scale,
    PARTS: tl.constexpr,
    BP: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the parts of a row, and tilt what came from closed cells by X q, where X is the covariance of values and keys inside
    cells, pooled over all cells."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BV + tl.arange(0, BV)
    wide = column < value_dim
    entry = row // group
    key_column = tl.arange(0, BD)
    query = tl.load(queries + row * dim + key_column, mask=key_column < dim, other=0.0).to(tl.float32)
    matrix_at = cross + (entry * value_dim + column)[:, None] * dim + key_column[None, :]
    matrix = tl.load(matrix_at, mask=wide[:, None] & (key_column < dim)[None, :], other=0.0)
    tilt = tl.sum(matrix * query[None, :], 1) * (scale / tl.maximum(tl.load(pooled + entry), 1.0))
    wait_for_previous(PDL)
    some, part = tl.arange(0, BP), tl.arange(0, PARTS)
    parts += row * part_count * value_dim + column[None, :]
    part_lse += row * part_count
    # The first parts are loaded before it is known which of them count: those that do not may be NaN, and are left out below.
    found = tl.load(parts + some[:, None] * value_dim, mask=(some < part_count)[:, None] & wide[None, :], other=0.0)
    some_lse = tl.load(part_lse + some, mask=some < part_count, other=-float("inf"))
    lse = tl.load(part_lse + part, mask=part < part_count, other=-float("inf"))
    m_i = tl.max(lse, 0)
    base = tl.where(m_i > -float("inf"), m_i, 0.0)
    weight = tl.exp2(lse - base)
    l_i = tl.sum(weight, 0)
    far_l = tl.sum(tl.where((part >= first_far) & (part < first_far + far_parts), weight, 0.0), 0)
    p = tl.exp2(some_lse - base)
    acc = far_l * tilt + tl.sum(tl.where((p == 0.0)[:, None], 0.0, p[:, None] * found), 0)
    for start in range(BP, part_count, BP):
        some = start + tl.arange(0, BP)
        p = tl.exp2(tl.load(part_lse + some, mask=some < part_count, other=-float("inf")) - base)
        found = tl.load(parts + some[:, None] * value_dim, mask=(p > 0.0)[:, None] & wide[None, :], other=0.0)
        acc += tl.sum(p[:, None] * found, 0)
    result = acc / tl.where(l_i == 0.0, 1.0, l_i)
    tl.store(output + row * value_dim + column, result.to(output.dtype.element_ty), mask=wide)
