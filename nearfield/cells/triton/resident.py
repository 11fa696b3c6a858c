"""Which pieces of offloaded cells are on the card, and which have to leave: one program per entry, between two kernels of a step.

A piece is up to PIECE keys of a cell, in a row: cells are cut into pieces from their first key on, so that no two cells share
one, and a tile of `read_cells` is made of whole pieces. Its number, `start // PIECE + cell + i` for piece i of a cell, is unique,
since cells come in the order of their keys. A slot is room on the card for one piece. Per entry there are

    slot_of [pieces]   the slot of a piece; ABSENT; or `pending(slot)`: the slot is its own, but may not hold it yet
    piece_of [slots]   the piece that a slot belongs to; -1: none
    used [slots]       when that was last opened, in steps
    is_filled [slots]  whether the slot holds its piece; `read_cells` sets it when it has copied the piece there
    clock [1]          steps so far
    counts [2]         how many pieces were opened so far, and how many of them were on the card

These are right after every kernel: a step may end after any of them, and nothing has to be repaired.
"""

from __future__ import annotations

from functools import partial

import triton.language as tl

from nearfield.cells.triton.decode import ABSENT, largest, pending
from nearfield.kernels.launch import Kernel, launch_dependents, wait_for_previous


@partial(Kernel, do_not_specialize=("offset", "probes", "pieces", "slots"))
def find_slots(
    opened,
    start,
    size,
    slot_of,
    piece_of,
    used,
    is_filled,
    clock,
    counts,
    missing,
    cell_entry,
    offset,
    probes,
    pieces,
    slots,
    PIECE: tl.constexpr,
    MOST_AGE: tl.constexpr,
    STEPS: tl.constexpr,
    BP: tl.constexpr,
    BJ: tl.constexpr,
    BS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Note that the pieces of opened cells are used now, and give those that are absent the slots that were used longest ago.

    A slot that is used now is nobody else's: if there are not enough others, the rest stays absent. `missing` `[slots]` is
    memory to work in.
    """
    launch_dependents(PDL)
    entry = tl.program_id(0).to(tl.int64)
    slot_of += entry * pieces
    piece_of += entry * slots
    used += entry * slots
    is_filled += entry * slots
    missing += entry * slots
    now = tl.load(clock + entry) + 1
    looked, found = tl.load(counts + 2 * entry), tl.load(counts + 2 * entry + 1)
    wait_for_previous(PDL)
    # BJ pieces of each opened cell at a time.
    lane = tl.arange(0, BP * BJ)
    cell = tl.load(opened + entry * probes + lane // BJ, mask=lane // BJ < probes, other=-1)
    about = entry * cell_entry + tl.maximum(cell, 0)
    first_key = tl.load(start + about, mask=cell >= 0, other=0).to(tl.int32)
    keys = tl.load(size + about, mask=cell >= 0, other=0.0).to(tl.int32)
    # Cells of a segment that was closed just now are still on the card as a whole.
    own_pieces = tl.where(first_key < offset, (keys + PIECE - 1) // PIECE, 0)
    wanted = 0
    for first in range(0, tl.max(own_pieces, 0), BJ):
        number = first + lane % BJ
        there = number < own_pieces
        piece = first_key // PIECE + cell + number
        said = tl.load(slot_of + piece, mask=there, other=ABSENT)
        slot = tl.where(said >= 0, said, pending(said))
        known = there & (said != ABSENT)
        filled = tl.load(is_filled + slot, mask=known, other=0) != 0
        tl.store(slot_of + piece, slot, mask=known & filled)
        tl.store(used + slot, now, mask=known)
        absent = there & (said == ABSENT)
        rank = wanted + tl.cumsum(absent.to(tl.int32), 0) - 1
        tl.store(missing + rank, piece, mask=absent & (rank < slots))
        wanted += tl.sum(absent.to(tl.int32), 0)
        looked += tl.sum(there.to(tl.int32), 0)
        found += tl.sum((known & filled).to(tl.int32), 0)
    tl.store(clock + entry, now)
    tl.store(counts + 2 * entry, looked)
    tl.store(counts + 2 * entry + 1, found)
    if wanted > 0:
        tl.debug_barrier()  # All threads have written what they know.
        slot = tl.arange(0, BS)
        age = now - tl.load(used + slot, mask=slot < slots, other=now)
        # Whole numbers, of which STEPS cuts into four tell any two apart.
        oldest, place, _ = largest(tl.minimum(age, MOST_AGE).to(tl.float32), age > 0, wanted, 0.0, STEPS, BS)
        new = tl.load(missing + place, mask=oldest, other=0)
        old = tl.load(piece_of + slot, mask=oldest, other=-1)
        tl.debug_barrier()  # All threads have read what others now write over.
        tl.store(slot_of + old, tl.full([BS], ABSENT, tl.int32), mask=oldest & (old >= 0))
        tl.store(slot_of + new, pending(slot), mask=oldest)
        tl.store(piece_of + slot, new, mask=oldest)
        tl.store(is_filled + slot, tl.zeros([BS], tl.int32), mask=oldest)
        tl.store(used + slot, tl.zeros([BS], tl.int32) + now, mask=oldest)
