"""Which cells a group of queries opens: the largest shares, found by one program."""

from __future__ import annotations

import triton
import triton.language as tl


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
