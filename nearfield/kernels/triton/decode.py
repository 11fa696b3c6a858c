"""One new token per batch entry against what a cell cache holds, in four kernels.

1. Near keys (the open end and the first keys), a tile per program; and, in the same launch, scores and masses of all cells.
2. Which cells are opened: those where a query head of the group may have the largest share of its weights. They lose their mass.
3. What is left of the masses, times values; and each opened cell by itself.
4. All these parts of a row, merged by their normalisers.

A program serves all query heads that share its keys. How many keys and cells there are is read on the device (`numbers`), so that
a captured graph stays right while they grow.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nearfield.kernels.triton.launch import Kernel


@triton.jit
def put(parts, part_lse, place, row, real, column, wide, total, top, mass, value_dim):
    """Write the part of some rows: its mean, and its log-normaliser in base 2."""
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
def part(parts, part_lse, which, row, real, query, key, value, seen, column, wide, value_dim, scale, IP: tl.constexpr):
    """Rows against one tile of keys, which is a part by itself."""
    logits = tl.dot(query, tl.trans(key), input_precision=IP) * (scale * 1.4426950408889634)
    logits = tl.where(seen[None, :], logits, -float("inf"))
    top = tl.max(logits, 1)
    weight = tl.exp2(logits - tl.where(top > -float("inf"), top, 0.0)[:, None])
    total = tl.dot(weight.to(value.dtype), value, input_precision=IP)
    put(parts, part_lse, which, row, real, column, wide, total, top, tl.sum(weight, 1), value_dim)


@triton.jit
def base_of(entry, heads, batch_stride, head_stride):
    return (entry // heads) * batch_stride + (entry % heads) * head_stride


@triton.jit
def load_places(room, base, place, real, column, wide, dim, offset, HAS_BASE: tl.constexpr):
    """Rows of keys or values at some places `[places, columns]`: the first `offset` of them are in `base`."""
    if HAS_BASE:
        early = real & (place < offset)
        late = real & (place >= offset)
        found = tl.load(room + (place - offset)[:, None] * dim + column[None, :], mask=late[:, None] & wide[None, :], other=0.0)
        before = tl.load(base + place[:, None] * dim + column[None, :], mask=early[:, None] & wide[None, :], other=0.0)
        return tl.where(early[:, None], before, found)
    else:
        return tl.load(room + place[:, None] * dim + column[None, :], mask=real[:, None] & wide[None, :], other=0.0)


@Kernel
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
    numbers,
    parts,
    part_lse,
    scores,
    masses,
    cell_lse,
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
    most_cells,
    part_count,
    scale,
    NEAR: tl.constexpr,
    BK: tl.constexpr,
    BC: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    BS: tl.constexpr,
    HAS_BASE: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    SPREADS: tl.constexpr,
    MOST_SQ: tl.constexpr,
    MOST_SPREAD: tl.constexpr,
    VOID: tl.constexpr,
    IP: tl.constexpr,
):
    LOG2E: tl.constexpr = 1.4426950408889634
    entry = tl.program_id(1).to(tl.int64)
    job = tl.program_id(0)
    length = tl.load(numbers).to(tl.int64)
    closed = tl.load(numbers + 1).to(tl.int64)
    cells = tl.load(numbers + 2)
    row = tl.arange(0, BR)
    real = row < group
    column, value_column = tl.arange(0, BD), tl.arange(0, BV)
    wide, value_wide = column < dim, value_column < value_dim
    query = tl.load(
        queries + (entry * group + row)[:, None] * dim + column[None, :], mask=real[:, None] & wide[None, :], other=0.0
    )
    first_part = (entry * group + row) * part_count
    if job <= NEAR:
        keys += entry * key_entry
        values += entry * value_entry
        if job < NEAR:
            place = closed + job * BK + tl.arange(0, BK)
            there = place < length
            seen = there
            if HAS_COUNTS:
                seen = seen & (tl.load(counts + (entry // heads) * count_entry + place, mask=there, other=0) != 0)
            at = (place - offset)[:, None]
            key = tl.load(keys + at * dim + column[None, :], mask=there[:, None] & wide[None, :], other=0.0)
            value = tl.load(values + at * value_dim + value_column[None, :], mask=there[:, None] & value_wide[None, :], other=0.0)
            part(parts, part_lse, job, first_part, real, query, key, value, seen, value_column, value_wide, value_dim, scale, IP)
        else:
            number = tl.arange(0, BS)
            sink = tl.load(sinks + (entry // heads) * sink_count + number, mask=number < sink_count, other=-1)
            known = sink >= 0
            key_base += base_of(entry, heads, key_batch, key_head)
            value_base += base_of(entry, heads, value_batch, value_head)
            first_key = load_places(keys, key_base, sink, known, column, wide, dim, offset, HAS_BASE)
            first_value = load_places(values, value_base, sink, known, value_column, value_wide, value_dim, offset, HAS_BASE)
            part(
                parts,
                part_lse,
                job,
                first_part,
                real,
                query,
                first_key,
                first_value,
                known,
                value_column,
                value_wide,
                value_dim,
                scale,
                IP,
            )
    else:
        cell = (job - NEAR - 1) * BC + tl.arange(0, BC)
        is_cell = cell < cells
        at_cell = entry * centroid_entry + cell[None, :] * dim + column[:, None]
        mean = tl.load(centroid + at_cell, mask=is_cell[None, :] & wide[:, None], other=0.0)
        spread = tl.load(variance + at_cell, mask=is_cell[None, :] & wide[:, None], other=0.0)
        asked = query.to(tl.float32) * scale
        square = tl.minimum(asked * asked, MOST_SQ).to(spread.dtype)
        first = tl.dot(query.to(mean.dtype), mean, input_precision=IP) * scale
        second = tl.minimum(tl.dot(square, spread, input_precision=IP), MOST_SPREAD)
        none = tl.maximum(tl.load(void + entry * cell_entry + cell, mask=is_cell, other=-float("inf")), VOID)
        many = tl.load(size + entry * cell_entry + cell, mask=is_cell, other=0.0)
        score = first + SPREADS * tl.sqrt(second) + none[None, :]
        count = tl.where(many > 0.0, tl.log2(tl.maximum(many, 1.0)), -float("inf"))
        weight = first * LOG2E + 2.0 * tl.log2(1.0 + 0.25 * second) + count[None, :]
        weight = tl.where(none[None, :] > VOID / 2, weight, -float("inf"))
        into = (entry * group + row)[:, None] * most_cells + cell[None, :]
        write = real[:, None] & (cell < most_cells)[None, :]
        tl.store(scores + into, tl.where(is_cell[None, :], score, VOID), mask=write)
        weight = tl.where(is_cell[None, :], weight, -float("inf"))
        tl.store(masses + into, weight, mask=write)
        tl.store(cell_lse + (entry * group + row) * tiles + job - NEAR - 1, log2_of_sum(weight), mask=real)


@Kernel
def select(
    scores,
    masses,
    part_lse,
    cell_lse,
    opened,
    group,
    most_cells,
    part_count,
    near,
    tiles,
    probes,
    STEPS: tl.constexpr,
    VOID: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    """The best `probes` cells of a group (up to bisection): listed, and without mass from now on."""
    entry = tl.program_id(0).to(tl.int64)
    cell = tl.arange(0, BC)
    near_part, tile = tl.arange(0, BN), tl.arange(0, BT)
    best = tl.full([BC], VOID, tl.float32)
    for member in range(group):
        row = entry * group + member
        score = tl.load(scores + row * most_cells + cell, mask=cell < most_cells, other=VOID)
        one = tl.load(part_lse + row * part_count + near_part, mask=near_part < near, other=-float("inf"))
        other = tl.load(cell_lse + row * tiles + tile, mask=tile < tiles, other=-float("inf"))
        top = tl.maximum(tl.max(one, 0), tl.max(other, 0))
        top = tl.where(top > -float("inf"), top, 0.0)
        everything = top + tl.log2(tl.maximum(tl.sum(tl.exp2(one - top), 0) + tl.sum(tl.exp2(other - top), 0), 1e-30))
        best = tl.maximum(best, tl.where(score > VOID / 2, score - everything * 0.6931471805599453, VOID))
    is_one = best > VOID / 2
    high = tl.max(best, 0)
    low = tl.minimum(tl.min(tl.where(is_one, best, float("inf")), 0), high)
    for _ in range(STEPS):
        # Three numbers between, and how many scores reach each: three counts in one sum.
        quarter = 0.25 * (high - low)
        reach = (best >= low + quarter).to(tl.int64)
        reach += (best >= low + 2.0 * quarter).to(tl.int64) << 20
        reach += (best >= low + 3.0 * quarter).to(tl.int64) << 40
        count = tl.sum(reach, 0)
        enough = ((count & 0xFFFFF) >= probes).to(tl.float32)
        enough += (((count >> 20) & 0xFFFFF) >= probes).to(tl.float32) + ((count >> 40) >= probes).to(tl.float32)
        low += enough * quarter
        high = tl.where(enough < 3.0, low + quarter, high)
    taken = is_one & (best >= low)
    slot = tl.cumsum(taken.to(tl.int32), 0) - 1
    filled = tl.minimum(tl.max(slot, 0) + 1, probes)
    taken = taken & (slot < probes)
    tl.store(opened + entry * probes + slot, cell, mask=taken)
    tl.store(opened + entry * probes + cell, -1, mask=(cell >= filled) & (cell < probes))
    for member in range(group):
        tl.store(masses + (entry * group + member) * most_cells + cell, -float("inf"), mask=taken)


@Kernel
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
    scale,
    FAR: tl.constexpr,
    BK: tl.constexpr,
    BC: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    HAS_BASE: tl.constexpr,
    IP: tl.constexpr,
):
    LOG2E: tl.constexpr = 1.4426950408889634
    entry = tl.program_id(1).to(tl.int64)
    job = tl.program_id(0)
    value_column = tl.arange(0, BV)
    value_wide = value_column < value_dim
    row = tl.arange(0, BR)
    real = row < group
    total = tl.zeros([BR, BV], tl.float32)
    top = tl.full([BR], -float("inf"), tl.float32)
    mass = tl.zeros([BR], tl.float32)
    if job < FAR:
        cell = job * BC + tl.arange(0, BC)
        weight = tl.load(
            masses + (entry * group + row)[:, None] * most_cells + cell[None, :],
            mask=real[:, None] & (cell < most_cells)[None, :],
            other=-float("inf"),
        )
        # Beyond the last cell there is anything: no weight, but not a number perhaps.
        some = tl.max(weight, 0) > -float("inf")
        at = entry * mean_entry + cell[:, None] * value_dim + value_column[None, :]
        mean = tl.load(mean_value + at, mask=some[:, None] & value_wide[None, :], other=0.0)
        total, top, mass = more(total, top, mass, weight, mean, IP)
    else:
        column = tl.arange(0, BD)
        wide = column < dim
        own_cell = tl.load(opened + entry * probes + job - FAR)
        query = tl.load(
            queries + (entry * group + row)[:, None] * dim + column[None, :], mask=real[:, None] & wide[None, :], other=0.0
        )
        about = entry * cell_entry + tl.maximum(own_cell, 0)
        first_place = tl.load(start + about).to(tl.int64)
        members = tl.where(own_cell >= 0, tl.load(size + about).to(tl.int32), 0)
        keys += entry * key_entry
        values += entry * value_entry
        key_base += base_of(entry, heads, key_batch, key_head)
        value_base += base_of(entry, heads, value_batch, value_head)
        for begin in range(0, members, BK):
            lane = begin + tl.arange(0, BK)
            inside = lane < members
            place = first_place + lane
            key = load_places(keys, key_base, place, inside, column, wide, dim, offset, HAS_BASE)
            value = load_places(values, value_base, place, inside, value_column, value_wide, value_dim, offset, HAS_BASE)
            logits = tl.dot(query, tl.trans(key), input_precision=IP) * (scale * LOG2E)
            logits = tl.where(inside[None, :], logits, -float("inf"))
            total, top, mass = more(total, top, mass, logits, value, IP)
    first_part = (entry * group + row) * part_count
    put(parts, part_lse, first_far + job, first_part, real, value_column, value_wide, total, top, mass, value_dim)


@Kernel
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
):
    """Merge the parts of a row, and tilt what came from cells that stayed closed.

    By what a value gains with the query, on average over all cells: the covariance of values and keys, times the query.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BV + tl.arange(0, BV)
    wide = column < value_dim
    part = tl.arange(0, PARTS)
    lse = tl.load(part_lse + row * part_count + part, mask=part < part_count, other=-float("inf"))
    top = tl.max(lse, 0)
    base = tl.where(top > -float("inf"), top, 0.0)
    weight = tl.exp2(lse - base)
    mass = tl.sum(weight, 0)
    closed = tl.sum(tl.where((part >= first_far) & (part < first_far + far), weight, 0.0), 0)
    entry = row // group
    side = tl.arange(0, BD)
    query = tl.load(queries + row * dim + side, mask=side < dim, other=0.0).to(tl.float32)
    together = cross + (entry * value_dim + column)[:, None] * dim + side[None, :]
    factor = tl.load(together, mask=wide[:, None] & (side < dim)[None, :], other=0.0)
    gain = tl.sum(factor * query[None, :], 1) * (scale / tl.maximum(tl.load(pooled + entry), 1.0))
    total = closed * gain
    for start in range(0, part_count, BP):
        some = start + tl.arange(0, BP)
        there = some < part_count
        own = tl.exp2(tl.load(part_lse + row * part_count + some, mask=there, other=-float("inf")) - base)
        found = tl.load(
            parts + (row * part_count + some)[:, None] * value_dim + column[None, :],
            mask=there[:, None] & wide[None, :],
            other=0.0,
        )
        total += tl.sum(own[:, None] * found, 0)
    result = total / tl.where(mass > 0.0, mass, 1.0)
    tl.store(output + row * value_dim + column, result.to(output.dtype.element_ty), mask=wide)
