"""Which cells a group of queries opens: the largest shares, found by one program."""

from __future__ import annotations

from functools import partial

import triton
import triton.language as tl

from nearfield.kernels.launch import Kernel, let_next_start, wait_for_last


@triton.jit
def largest(x, some, wanted, least, STEPS: tl.constexpr, LENGTH: tl.constexpr):
    """Which of `some` numbers `[LENGTH]` are the `wanted` largest, the place of each of those in a list of them, without a gap,
    and a number that `wanted` of them reach. So many are known to reach `least`.
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
    # First come all that surely are, and then those that are as good as the last one. Both counts in one sum.
    high = tl.where(reached > wanted, high, low)
    sure = some & (x >= high)
    tied = some & (x >= low) & (x < high)
    rank = tl.cumsum(sure.to(tl.int64) + (tied.to(tl.int64) << 32), 0)
    place = tl.where(tied, tl.sum(sure.to(tl.int64), 0) + (rank >> 32), rank & 0xFFFFFFFF) - 1
    return (sure | tied) & (place < wanted), place, low


@triton.jit
def choose(
    scores,
    masses,
    sink_lse,
    late_lse,
    cell_lse,
    grain_top,
    grain_list,
    opened,
    entry,
    group,
    most_cells,
    part_count,
    tiles,
    probes,
    STEPS: tl.constexpr,
    VOID: tl.constexpr,
    GRAIN: tl.constexpr,
    BG: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BP: tl.constexpr,
):
    """The best `probes` cells of a group: listed, and without mass from now on.

    They are in as many grains (so many cells in a row) at most, those with the best best cells, and only these are looked at.
    `scores` and `masses` are `[entries, most_cells, BG]`.
    """
    none = -float("inf")
    member, tile, grain = tl.arange(0, BG), tl.arange(0, BT), tl.arange(0, BN)
    grains = most_cells // GRAIN
    one_row, is_one_row = entry * group + member, member < group
    row, is_row = one_row[:, None], is_one_row[:, None]
    first = tl.load(sink_lse + one_row * part_count, mask=is_one_row, other=none)
    late = tl.load(late_lse + one_row, mask=is_one_row, other=none)
    other = tl.load(cell_lse + row * tiles + tile[None, :], mask=is_row & (tile < tiles)[None, :], other=none)
    tops = tl.load(grain_top + row * grains + grain[None, :], mask=is_row & (grain < grains)[None, :], other=VOID)
    top = tl.maximum(tl.maximum(first, late), tl.max(other, 1))
    top = tl.where(top > none, top, 0.0)
    mass = tl.exp2(first - top) + tl.exp2(late - top) + tl.sum(tl.exp2(other - top[:, None]), 1)
    everything = (top + tl.log2(tl.maximum(mass, 1e-30))) * 0.6931471805599453
    best_grain = tl.max(tl.where(tops > VOID / 2, tops - everything[:, None], VOID), 0)
    chosen, place, least = largest(best_grain, best_grain > VOID / 2, probes, VOID, STEPS, BN)
    grain_list += entry * probes
    tl.store(grain_list + place, grain, mask=chosen)
    found = tl.sum(chosen.to(tl.int32), 0)
    tl.debug_barrier()  # All threads have written their part of the list.
    candidate = tl.arange(0, BP * GRAIN)
    is_one = candidate // GRAIN < found
    cell = tl.load(grain_list + candidate // GRAIN, mask=is_one, other=0) * GRAIN + candidate % GRAIN
    at = (entry * most_cells + cell)[:, None] * BG + member[None, :]
    score = tl.load(scores + at, mask=is_one[:, None] & is_one_row[None, :], other=VOID)
    best = tl.max(tl.where(score > VOID / 2, score - everything[None, :], VOID), 1)
    # Every grain has a cell that is as good as itself.
    taken, slot, _ = largest(best, best > VOID / 2, probes, tl.where(found == probes, least, VOID), STEPS, BP * GRAIN)
    tl.store(opened + entry * probes + slot, cell, mask=taken)
    filled = tl.sum(taken.to(tl.int32), 0)
    tl.store(opened + entry * probes + candidate, -1, mask=(candidate >= filled) & (candidate < probes))
    tl.store(masses + at, tl.full([BP * GRAIN, BG], none, tl.float32), mask=taken[:, None] & is_one_row[None, :])


SIZES = ("offset", "closed", "cells", "most_cells", "part_count", "near", "tiles", "probes", "first_far", "far", "readers")
"""What changes as keys are added: no value has a version of its own."""


@triton.jit
def put(parts, part_lse, place, row, real, column, wide, total, top, mass, value_dim):
    """Write the part of some rows: its mean, and its log-normaliser in base 2. Nobody reads the mean of nothing."""
    some = mass > 0.0
    found = total / tl.where(some, mass, 1.0)[:, None]
    tl.store(parts + (row + place)[:, None] * value_dim + column[None, :], found, mask=real[:, None] & wide[None, :])
    tl.store(part_lse + row + place, tl.where(some, top + tl.log2(tl.where(some, mass, 1.0)), -float("inf")), mask=real)


@triton.jit
def more(total, top, mass, logits, value, IP: tl.constexpr):
    """A tile of logits (base 2) and values, added to a running softmax."""
    higher = tl.maximum(top, tl.max(logits, 1))
    base = tl.where(higher > -float("inf"), higher, 0.0)
    shrink = tl.exp2(top - base)
    weight = tl.exp2(logits - base[:, None])
    total = total * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision=IP)
    return total, higher, mass * shrink + tl.sum(weight, 1)


@triton.jit
def log2_of_sum(x):
    """log2 of the sum of 2^x along the last axis."""
    top = tl.max(x, 1)
    base = tl.where(top > -float("inf"), top, 0.0)
    return base + tl.log2(tl.sum(tl.exp2(x - base[:, None]), 1))


@triton.jit
def base_of(entry, heads, batch_stride, head_stride):
    return (entry // heads) * batch_stride + (entry % heads) * head_stride


@triton.jit
def load_places(room, base, place, real, column, wide, dim, offset, HAS_BASE: tl.constexpr):
    """Keys or values at some places, of which the first `offset` are in `base`. Places and columns span a block, in any order."""
    if HAS_BASE:
        early = real & (place < offset)
        late = real & (place >= offset)
        found = tl.load(room + (place - offset) * dim + column, mask=late & wide, other=0.0)
        before = tl.load(base + place * dim + column, mask=early & wide, other=0.0)
        return tl.where(early, before, found)
    else:
        return tl.load(room + place * dim + column, mask=real & wide, other=0.0)


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
    """Of a group, `[rows, columns]`."""
    at = (first_row + row)[:, None] * dim + column[None, :]
    return tl.load(queries + at, mask=real[:, None] & wide[None, :], other=0.0)


@partial(Kernel, varied=SIZES)
def look(
    queries,
    keys,
    values,
    key_base,
    value_base,
    sinks,
    counts,
    centroid,
    variance,
    void,
    size,
    key_count,
    parts,
    part_lse,
    scores,
    masses,
    cell_lse,
    late_lse,
    grain_top,
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
    tiles,
    count_entry,
    sink_count,
    cell_entry,
    centroid_entry,
    closed,
    cells,
    most_cells,
    part_count,
    near,
    scale,
    BL: tl.constexpr,
    BC: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    BS: tl.constexpr,
    BG: tl.constexpr,
    GRAIN: tl.constexpr,
    HAS_BASE: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    SPREADS: tl.constexpr,
    MOST_SQ: tl.constexpr,
    MOST_SPREAD: tl.constexpr,
    VOID: tl.constexpr,
    IP: tl.constexpr,
    EARLY: tl.constexpr,
):
    LOG2E: tl.constexpr = 1.4426950408889634
    let_next_start(EARLY)
    entry = tl.program_id(0).to(tl.int64)
    job = tl.program_id(1)
    row = tl.arange(0, BR)
    real = row < group
    column, value_column = tl.arange(0, BD), tl.arange(0, BV)
    wide, value_wide = column < dim, value_column < value_dim
    first_part = (entry * group + row) * part_count
    # Everything is asked for before anything is waited for: a program is as fast as its loads follow each other.
    if job >= tiles:
        keys += entry * key_entry
        values += entry * value_entry
        if job > tiles:
            place = tl.load(key_count).to(tl.int64) - BL + tl.arange(0, BL)
            there = place >= closed
            seen = there
            if HAS_COUNTS:
                seen = seen & (tl.load(counts + (entry // heads) * count_entry + place, mask=there, other=0) != 0)
            late = tl.load(
                keys + (place - offset)[None, :] * dim + column[:, None], mask=there[None, :] & wide[:, None], other=0.0
            )
            late_query = load_queries(queries, entry * group, row, real, column, wide, dim)
            late_logits = tl.dot(late_query, late, input_precision=IP) * (scale * LOG2E)
            late_logits = tl.where(seen[None, :], late_logits, -float("inf"))
            tl.store(late_lse + entry * group + row, log2_of_sum(late_logits), mask=real)
        else:
            number = tl.arange(0, BS)
            sink = tl.load(sinks + (entry // heads) * sink_count + number, mask=number < sink_count, other=-1)
            known = sink >= 0
            key_base += base_of(entry, heads, key_batch, key_head)
            value_base += base_of(entry, heads, value_batch, value_head)
            first_key, first_value = load_both(
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
            first_query = load_queries(queries, entry * group, row, real, column, wide, dim)
            logits = tl.dot(first_query, first_key, input_precision=IP) * (scale * LOG2E)
            logits = tl.where(known[None, :], logits, -float("inf"))
            total = tl.zeros([BR, BV], tl.float32)
            top = tl.full([BR], -float("inf"), tl.float32)
            mass = tl.zeros([BR], tl.float32)
            total, top, mass = more(total, top, mass, logits, first_value, IP)
            put(parts, part_lse, near, first_part, real, value_column, value_wide, total, top, mass, value_dim)
    else:
        cell = job * BC + tl.arange(0, BC)
        is_cell = cell < cells
        at_cell = entry * centroid_entry + cell[None, :] * dim + column[:, None]
        mean = tl.load(centroid + at_cell, mask=is_cell[None, :] & wide[:, None], other=0.0)
        spread = tl.load(variance + at_cell, mask=is_cell[None, :] & wide[:, None], other=0.0)
        none = tl.maximum(tl.load(void + entry * cell_entry + cell, mask=is_cell, other=-float("inf")), VOID)
        many = tl.load(size + entry * cell_entry + cell, mask=is_cell, other=0.0)
        asker = load_queries(queries, entry * group, row, real, column, wide, dim)
        asked = asker.to(tl.float32) * scale
        square = tl.minimum(asked * asked, MOST_SQ).to(spread.dtype)
        first = tl.dot(asker.to(mean.dtype), mean, input_precision=IP) * scale
        second = tl.minimum(tl.dot(square, spread, input_precision=IP), MOST_SPREAD)
        score = first + SPREADS * tl.sqrt(second) + none[None, :]
        count = tl.where(many > 0.0, tl.log2(tl.maximum(many, 1.0)), -float("inf"))
        weight = first * LOG2E + 2.0 * tl.log2(1.0 + 0.25 * second) + count[None, :]
        weight = tl.where(none[None, :] > VOID / 2, weight, -float("inf"))
        into = (entry * most_cells + cell)[None, :] * BG + row[:, None]
        score = tl.where(is_cell[None, :], score, VOID)
        tl.store(scores + into, score, mask=real[:, None])
        grain = job * (BC // GRAIN) + tl.arange(0, BC // GRAIN)
        grain_at = (entry * group + row)[:, None] * (most_cells // GRAIN) + grain[None, :]
        tl.store(grain_top + grain_at, tl.max(tl.reshape(score, [BR, BC // GRAIN, GRAIN]), 2), mask=real[:, None])
        weight = tl.where(is_cell[None, :], weight, -float("inf"))
        tl.store(masses + into, weight, mask=real[:, None])
        tl.store(cell_lse + (entry * group + row) * tiles + job, log2_of_sum(weight), mask=real)


@partial(Kernel, varied=SIZES)
def select(
    scores,
    masses,
    late_lse,
    cell_lse,
    grain_top,
    grain_list,
    opened,
    queries,
    keys,
    values,
    counts,
    key_count,
    parts,
    part_lse,
    heads,
    group,
    dim,
    value_dim,
    key_entry,
    value_entry,
    offset,
    count_entry,
    closed,
    most_cells,
    part_count,
    near,
    tiles,
    probes,
    scale,
    PER: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    STEPS: tl.constexpr,
    VOID: tl.constexpr,
    GRAIN: tl.constexpr,
    BG: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BP: tl.constexpr,
    HAS_CELLS: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    IP: tl.constexpr,
    EARLY: tl.constexpr,
):
    LOG2E: tl.constexpr = 1.4426950408889634
    let_next_start(EARLY)
    entry = tl.program_id(0).to(tl.int64)
    job = tl.program_id(1) - 1
    if job < 0:
        wait_for_last(EARLY)
        if HAS_CELLS:
            choose(
                scores,
                masses,
                part_lse + near,
                late_lse,
                cell_lse,
                grain_top,
                grain_list,
                opened,
                entry,
                group,
                most_cells,
                part_count,
                tiles,
                probes,
                STEPS,
                VOID,
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
        length = tl.load(key_count).to(tl.int64)
        first_place = closed + job.to(tl.int64) * (PER * BK)
        if first_place < length:
            query = load_queries(queries, entry * group, row, real, column, wide, dim)
            total = tl.zeros([BR, BV], tl.float32)
            top = tl.full([BR], -float("inf"), tl.float32)
            mass = tl.zeros([BR], tl.float32)
            # Pipelined, so that keys and values are on their way at once.
            for tile in tl.range(0, PER, num_stages=2):
                place = first_place + tile * BK + tl.arange(0, BK)
                there = place < length
                seen = there
                if HAS_COUNTS:
                    seen = seen & (tl.load(counts + (entry // heads) * count_entry + place, mask=there, other=0) != 0)
                at = place - offset
                key = tl.load(keys + at[None, :] * dim + column[:, None], mask=there[None, :] & wide[:, None], other=0.0)
                value = tl.load(
                    values + at[:, None] * value_dim + value_column[None, :],
                    mask=there[:, None] & value_wide[None, :],
                    other=0.0,
                )
                logits = tl.dot(query, key, input_precision=IP) * (scale * LOG2E)
                logits = tl.where(seen[None, :], logits, -float("inf"))
                total, top, mass = more(total, top, mass, logits, value, IP)
            put(parts, part_lse, job, first_part, real, value_column, value_wide, total, top, mass, value_dim)
        else:
            tl.store(part_lse + first_part + job, -float("inf"), mask=real)
        wait_for_last(EARLY)


@partial(Kernel, varied=SIZES)
def gather(
    queries,
    keys,
    values,
    key_base,
    value_base,
    mean_value,
    start,
    size,
    masses,
    opened,
    parts,
    part_lse,
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
    most_cells,
    part_count,
    first_far,
    probes,
    far,
    readers,
    cells,
    scale,
    BG: tl.constexpr,
    BP: tl.constexpr,
    BK: tl.constexpr,
    BC: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    HAS_BASE: tl.constexpr,
    IP: tl.constexpr,
    EARLY: tl.constexpr,
):
    LOG2E: tl.constexpr = 1.4426950408889634
    let_next_start(EARLY)
    entry = tl.program_id(0).to(tl.int64)
    job = tl.program_id(1)
    value_column = tl.arange(0, BV)
    value_wide = value_column < value_dim
    row = tl.arange(0, BR)
    real = row < group
    total = tl.zeros([BR, BV], tl.float32)
    top = tl.full([BR], -float("inf"), tl.float32)
    mass = tl.zeros([BR], tl.float32)
    if job >= readers:
        which = job - readers
        cell = which * BC + tl.arange(0, BC)
        # Beyond the last cell there is anything: no weight, but not a number perhaps.
        at = entry * mean_entry + cell[:, None] * value_dim + value_column[None, :]
        mean = tl.load(mean_value + at, mask=(cell < cells)[:, None] & value_wide[None, :], other=0.0)
        wait_for_last(EARLY)
        weight = tl.load(
            masses + (entry * most_cells + cell)[None, :] * BG + row[:, None],
            mask=real[:, None] & (cell < most_cells)[None, :],
            other=-float("inf"),
        )
        total, top, mass = more(total, top, mass, weight, mean, IP)
    else:
        which = far + job
        column = tl.arange(0, BD)
        wide = column < dim
        query = load_queries(queries, entry * group, row, real, column, wide, dim)
        keys += entry * key_entry
        values += entry * value_entry
        key_base += base_of(entry, heads, key_batch, key_head)
        value_base += base_of(entry, heads, value_batch, value_head)
        wait_for_last(EARLY)
        # Cells are as large as they are, and tiles of all opened ones are dealt out to the readers.
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
            total, top, mass = more(total, top, mass, logits, value, IP)
    first_part = (entry * group + row) * part_count
    put(parts, part_lse, first_far + which, first_part, real, value_column, value_wide, total, top, mass, value_dim)


@partial(Kernel, varied=SIZES)
def unite(
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
    far,
    scale,
    PARTS: tl.constexpr,
    BP: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Merge the parts of a row, and tilt what came from cells that stayed closed.

    By what a value gains with the query, on average over all cells: the covariance of values and keys, times the query.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BV + tl.arange(0, BV)
    wide = column < value_dim
    entry = row // group
    side = tl.arange(0, BD)
    query = tl.load(queries + row * dim + side, mask=side < dim, other=0.0).to(tl.float32)
    together = cross + (entry * value_dim + column)[:, None] * dim + side[None, :]
    factor = tl.load(together, mask=wide[:, None] & (side < dim)[None, :], other=0.0)
    gain = tl.sum(factor * query[None, :], 1) * (scale / tl.maximum(tl.load(pooled + entry), 1.0))
    wait_for_last(EARLY)
    some, part = tl.arange(0, BP), tl.arange(0, PARTS)
    parts += row * part_count * value_dim + column[None, :]
    part_lse += row * part_count
    # Asked for before it is known which of them count: what is not a number is left out below.
    found = tl.load(parts + some[:, None] * value_dim, mask=(some < part_count)[:, None] & wide[None, :], other=0.0)
    own = tl.load(part_lse + some, mask=some < part_count, other=-float("inf"))
    lse = tl.load(part_lse + part, mask=part < part_count, other=-float("inf"))
    top = tl.max(lse, 0)
    base = tl.where(top > -float("inf"), top, 0.0)
    weight = tl.exp2(lse - base)
    mass = tl.sum(weight, 0)
    closed = tl.sum(tl.where((part >= first_far) & (part < first_far + far), weight, 0.0), 0)
    own = tl.exp2(own - base)
    total = closed * gain + tl.sum(tl.where((own > 0.0)[:, None], own[:, None] * found, 0.0), 0)
    for start in range(BP, part_count, BP):
        some = start + tl.arange(0, BP)
        there = some < part_count
        own = tl.exp2(tl.load(part_lse + some, mask=there, other=-float("inf")) - base)
        found = tl.load(parts + some[:, None] * value_dim, mask=(own > 0.0)[:, None] & wide[None, :], other=0.0)
        total += tl.sum(own[:, None] * found, 0)
    result = total / tl.where(mass > 0.0, mass, 1.0)
    tl.store(output + row * value_dim + column, result.to(output.dtype.element_ty), mask=wide)
