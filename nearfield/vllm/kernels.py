"""Pages on a card, in Triton: what `blocks` and `attend` do, for many requests at a time.

    write_pages        puts keys and values at their slots
    group_blocks      groups the keys of blocks that have just become full, and writes their cells behind them
    score_pages       scores the cells that a row sees, and attends to what it reads key by key
    choose_pages      chooses the cells that each group of queries opens
    read_pages        reads the keys of opened cells, and the mean values of the others
    merge_pages       merges what these two have found
    read_prompts      the rows of prompts, exactly, in tiles

An *entry* is a row (one token) and a head of keys. What differs from row to row is on the card: which request it belongs to, and
how many keys it sees. The host knows bounds alone, so nobody waits, and a captured graph serves all lengths up to its bound. A
program whose row is too short for it says so with a log-normaliser of -inf.
"""

from __future__ import annotations

from functools import partial

import triton
import triton.language as tl

from nearfield.cells.cache.attention import RECENT as RECENT_KEYS
from nearfield.cells.moments import MOST_VARIANCE as MOST_VARIANCE_OF
from nearfield.cells.triton.decode import add_tile, largest, log2_of_sum, store_part
from nearfield.cells.triton.far_field import LEAST_SCORE, VOID, cell_score, log2_cell_mass, squares
from nearfield.kernels.launch import LN2, LOG2E, Kernel, launch_dependents, wait_for_previous
from nearfield.vllm.attend import MOST_SCORED_SPREAD as MOST_SCORED_SPREAD_OF

RECENT = tl.constexpr(RECENT_KEYS)
MOST_VARIANCE = tl.constexpr(MOST_VARIANCE_OF)
MOST_SCORED_SPREAD = tl.constexpr(MOST_SCORED_SPREAD_OF)

CHANGING = (
    "padded_cells",
    "cell_tiles",
    "cell_jobs",
    "near_parts",
    "part_count",
    "first_far",
    "far_parts",
    "readers",
    "probes",
    "table_row",
)
"""Numbers that change with the longest request that is served."""


@triton.jit
def first_near(length, exact_below, window, SIZE: tl.constexpr):
    """`Reach.first_near` of the row that sees so many keys; less than zero: it reads all of them."""
    return tl.where(length < exact_below, 1, tl.maximum(1, (length - window) // SIZE))


@triton.jit
def load_page(block_table, request, block, table_row, mask):
    """Where the blocks of a request lie."""
    return tl.load(block_table + request * table_row + block, mask=mask, other=0).to(tl.int64)


@triton.jit
def load_rows(queries, token, head, row, real, column, wide, query_row, group, dim):
    """The queries of a group, `[rows, columns]`."""
    at = token * query_row + (head * group + row)[:, None] * dim + column[None, :]
    return tl.load(queries + at, mask=real[:, None] & wide[None, :], other=0.0)


@partial(Kernel, do_not_specialize=())
def write_pages(
    keys,
    values,
    slots,
    pages,
    dim,
    value_dim,
    key_row,
    value_row,
    page_stride,
    head_stride,
    page_row,
    SIZE: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
):
    """One token and head. A slot of -1 is nowhere."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        column, value_column = tl.arange(0, BD), tl.arange(0, BV)
        into = pages + (slot // SIZE) * page_stride + head * head_stride + (slot % SIZE) * page_row
        key = tl.load(keys + token * key_row + head * dim + column, mask=column < dim, other=0.0)
        value = tl.load(values + token * value_row + head * value_dim + value_column, mask=value_column < value_dim, other=0.0)
        tl.store(into + column, key.to(pages.dtype.element_ty), mask=column < dim)
        tl.store(into + dim + value_column, value.to(pages.dtype.element_ty), mask=value_column < value_dim)


@triton.jit
def load_keys(held, key, column, wide, page_row, SIZE: tl.constexpr):
    """Some rows of a page in float32; zeros beyond its end."""
    at = key[:, None] * page_row + column[None, :]
    return tl.load(held + at, mask=(key < SIZE)[:, None] & wide[None, :], other=0.0).to(tl.float32)


@triton.jit
def closeness(points, centroids, cell, CELLS: tl.constexpr, IP: tl.constexpr):
    """Of points to centroids: half the squared length of a point, less half their squared distance."""
    half = tl.sum(centroids * centroids, 1) * 0.5
    close = tl.dot(points, tl.trans(centroids), input_precision=IP) - half[None, :]
    return tl.where((cell < CELLS)[None, :], close, -float("inf"))


@partial(Kernel, do_not_specialize=())
def group_blocks(
    slots,
    first_keys,
    pages,
    centroid,
    variance,
    value,
    stop,
    order,
    dim,
    value_dim,
    page_stride,
    head_stride,
    page_row,
    part_page,
    part_head,
    ITERATIONS: tl.constexpr,
    SIZE: tl.constexpr,
    CELLS: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    IP: tl.constexpr,
):
    """One token and head: if the token is the last of a block, its keys are grouped by `KMeans(iterations=ITERATIONS)`.

    Keys come in pieces of BM, again for each iteration. K-means starts at `first_keys`.
    """
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    if (slot >= 0) & (slot % SIZE == SIZE - 1):
        page, head = slot // SIZE, tl.program_id(1).to(tl.int64)
        held = pages + page * page_stride + head * head_stride
        column, value_column, cell, piece = tl.arange(0, BD), tl.arange(0, BV), tl.arange(0, BC), tl.arange(0, BM)
        wide, value_wide = column < dim, value_column < value_dim
        total = tl.zeros([BD], tl.float32)
        square = tl.zeros([BD], tl.float32)
        for begin in tl.range(0, SIZE, BM, num_stages=1):
            keys = load_keys(held, begin + piece, column, wide, page_row, SIZE)
            total += tl.sum(keys, 0)
            square += tl.sum(keys * keys, 0)
        offset = total / SIZE
        weight = tl.sqrt(square / SIZE)
        first = tl.load(first_keys + cell, mask=cell < CELLS, other=SIZE)
        centroids = (load_keys(held, first, column, wide, page_row, SIZE) - offset[None, :]) * weight[None, :]
        for _ in range(ITERATIONS):
            sums = tl.zeros([BC, BD], tl.float32)
            count = tl.zeros([BC], tl.float32)
            for begin in tl.range(0, SIZE, BM, num_stages=1):
                real = begin + piece < SIZE
                points = (load_keys(held, begin + piece, column, wide, page_row, SIZE) - offset[None, :]) * weight[None, :]
                found = tl.argmax(closeness(points, centroids, cell, CELLS, IP), 1)
                is_in = ((found[:, None] == cell[None, :]) & real[:, None]).to(tl.float32)
                count += tl.sum(is_in, 0)
                sums += tl.dot(tl.trans(is_in), points, input_precision=IP)
            middles = sums / tl.maximum(count, 1.0)[:, None]
            # An empty cell starts again at one of the keys that are farthest from their centroids.
            empty = (count == 0.0) & (cell < CELLS)
            rank = tl.cumsum(empty.to(tl.int32), 0)
            number, last = 1, float("inf")
            while number <= tl.sum(empty.to(tl.int32), 0):
                most, place = -float("inf"), 0
                for begin in tl.range(0, SIZE, BM, num_stages=1):
                    points = (load_keys(held, begin + piece, column, wide, page_row, SIZE) - offset[None, :]) * weight[None, :]
                    best = tl.max(closeness(points, centroids, cell, CELLS, IP), 1)
                    distance = tl.sum(points * points, 1) - 2.0 * best
                    distance = tl.where((begin + piece < SIZE) & (distance < last), distance, -float("inf"))
                    if tl.max(distance, 0) > most:
                        most, place = tl.max(distance, 0), begin + tl.argmax(distance, 0)
                at = tl.load(held + place * page_row + column, mask=wide, other=0.0).to(tl.float32)
                middles = tl.where((empty & (rank == number))[:, None], ((at - offset) * weight)[None, :], middles)
                number, last = number + 1, most
            centroids = middles

        sums = tl.zeros([BC, BD], tl.float32)
        value_sums = tl.zeros([BC, BV], tl.float32)
        count = tl.zeros([BC], tl.float32)
        for begin in tl.range(0, SIZE, BM, num_stages=1):
            real = begin + piece < SIZE
            keys = load_keys(held, begin + piece, column, wide, page_row, SIZE)
            values = load_keys(held + dim, begin + piece, value_column, value_wide, page_row, SIZE)
            points = (keys - offset[None, :]) * weight[None, :]
            found = tl.argmax(closeness(points, centroids, cell, CELLS, IP), 1)
            is_in = ((found[:, None] == cell[None, :]) & real[:, None]).to(tl.float32)
            count += tl.sum(is_in, 0)
            sums += tl.dot(tl.trans(is_in), keys, input_precision=IP)
            value_sums += tl.dot(tl.trans(is_in), values, input_precision=IP)
        share = 1.0 / tl.maximum(count, 1.0)
        mean = sums * share[:, None]
        after = tl.cumsum(count, 0)
        placed = after - count
        spread = tl.zeros([BC, BD], tl.float32)
        into_order = order + 2 * (page * part_page + head * part_head)
        for begin in tl.range(0, SIZE, BM, num_stages=1):
            real = begin + piece < SIZE
            keys = load_keys(held, begin + piece, column, wide, page_row, SIZE)
            points = (keys - offset[None, :]) * weight[None, :]
            found = tl.argmax(closeness(points, centroids, cell, CELLS, IP), 1)
            is_in = ((found[:, None] == cell[None, :]) & real[:, None]).to(tl.float32)
            away = keys - tl.dot(is_in, mean, input_precision=IP)
            spread += tl.dot(tl.trans(is_in), away * away, input_precision=IP)
            before = tl.cumsum(is_in, 0) - is_in
            place = tl.sum(is_in * (before + placed[None, :]), 1).to(tl.int32)
            tl.store(into_order + place, (begin + piece).to(tl.uint8), mask=real)
            placed += tl.sum(is_in, 0)
        spread = tl.minimum(spread * share[:, None], MOST_VARIANCE)
        at = page * part_page + head * part_head
        into = at + cell[:, None] * dim + column[None, :]
        is_cell = (cell < CELLS)[:, None]
        tl.store(centroid + into, mean.to(tl.bfloat16), mask=is_cell & wide[None, :])
        tl.store(variance + into, spread.to(tl.bfloat16), mask=is_cell & wide[None, :])
        into = at + cell[:, None] * value_dim + value_column[None, :]
        tl.store(value + into, (value_sums * share[:, None]).to(tl.bfloat16), mask=is_cell & value_wide[None, :])
        tl.store(stop + at + cell, after.to(tl.int16), mask=cell < CELLS)


@partial(Kernel, do_not_specialize=CHANGING)
def score_pages(
    queries,
    pages,
    centroid,
    variance,
    stop,
    block_table,
    tokens,
    request_of,
    length_of,
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
    query_row,
    page_stride,
    head_stride,
    page_row,
    part_page,
    part_head,
    table_row,
    window,
    exact_below,
    padded_cells,
    cell_tiles,
    cell_jobs,
    near_parts,
    part_count,
    scale,
    SIZE: tl.constexpr,
    CELLS: tl.constexpr,
    BK: tl.constexpr,
    BC: tl.constexpr,
    BG: tl.constexpr,
    GRAIN: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    IP: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Jobs of an entry: tiles of cells, then tiles of the keys that the row reads one by one. Those that there are, which only
    the card knows, are dealt out in turn."""
    launch_dependents(PDL)
    entry, job = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head = entry % heads
    token = tl.load(tokens + entry // heads).to(tl.int64)
    request, length = tl.load(request_of + token).to(tl.int64), tl.load(length_of + token)
    near = first_near(length, exact_below, window, SIZE)
    length = tl.abs(length)
    row = tl.arange(0, BR)
    real = row < group
    column = tl.arange(0, BD)
    wide = column < dim
    query = load_rows(queries, token, head, row, real, column, wide, query_row, group, dim)
    if job >= cell_jobs:
        part = job - cell_jobs
        value_column = tl.arange(0, BV)
        value_wide = value_column < value_dim
        acc = tl.zeros([BR, BV], tl.float32)
        m_i = tl.full([BR], -float("inf"), tl.float32)
        l_i = tl.zeros([BR], tl.float32)
        recent = tl.full([BR], -float("inf"), tl.float32)
        hidden = (near - 1) * SIZE
        count = length - hidden
        for tile in tl.range(part, (count + BK - 1) // BK, near_parts, num_stages=2):
            place = tile * BK + tl.arange(0, BK)
            there = place < count
            position = tl.where(place < SIZE, place, place + hidden)
            page = load_page(block_table, request, position // SIZE, table_row, there)
            at = page * page_stride + head * head_stride + (position % SIZE) * page_row
            key = tl.load(pages + at[None, :] + column[:, None], mask=there[None, :] & wide[:, None], other=0.0)
            held = tl.load(
                pages + dim + at[:, None] + value_column[None, :], mask=there[:, None] & value_wide[None, :], other=0.0
            )
            logits = tl.dot(query, key.to(query.dtype), input_precision=IP) * (scale * LOG2E)
            logits = tl.where(there[None, :], logits, -float("inf"))
            acc, m_i, l_i = add_tile(acc, m_i, l_i, logits, held.to(query.dtype), IP)
            is_late = (place < SIZE) | (position >= length - RECENT)
            new = log2_of_sum(tl.where(is_late[None, :], logits, -float("inf")))
            both = tl.maximum(tl.maximum(recent, new), -1e38)
            recent = both + tl.log2(tl.maximum(tl.exp2(recent - both) + tl.exp2(new - both), 1e-30))
        first_part = (entry * group + row) * part_count
        store_part(parts, part_lse, part, first_part, real, value_column, value_wide, acc, m_i, l_i, value_dim)
        tl.store(recent_lse + (entry * group + row) * near_parts + part, recent, mask=real)
    else:
        cells = (near - 1) * CELLS
        for tile in tl.range(job, (cells + BC - 1) // BC, cell_jobs, num_stages=STAGES):
            cell = tile * BC + tl.arange(0, BC)
            is_cell = cell < cells
            page = load_page(block_table, request, 1 + cell // CELLS, table_row, is_cell)
            own = cell % CELLS
            at = page * part_page + head * part_head
            moments = at[None, :] + own[None, :] * dim + column[:, None]
            mean = tl.load(centroid + moments, mask=is_cell[None, :] & wide[:, None], other=0.0).to(query.dtype)
            var = tl.load(variance + moments, mask=is_cell[None, :] & wide[:, None], other=0.0)
            end = tl.load(stop + at + own, mask=is_cell, other=0)
            begin = tl.load(stop + at + own - 1, mask=is_cell & (own > 0), other=0)
            n = (end - begin).to(tl.float32)
            first_logit = tl.dot(query, mean, input_precision=IP) * scale
            # Squares may leave the range of float16, as variances may.
            SQUARE: tl.constexpr = tl.float32 if query.dtype == tl.float32 else tl.bfloat16
            spread = tl.dot(squares(query, scale, SQUARE), var.to(SQUARE), input_precision=IP)
            exists = tl.where(n > 0.0, 0.0, VOID)[None, :]
            score = cell_score(first_logit, tl.minimum(spread, MOST_SCORED_SPREAD), exists)
            log2_mass = log2_cell_mass(first_logit * LOG2E, spread) + tl.log2(tl.maximum(n, 1.0))[None, :]
            log2_mass = tl.where(exists > LEAST_SCORE, log2_mass, -float("inf"))
            into = (entry * padded_cells + cell)[None, :] * BG + row[:, None]
            tl.store(scores + into, score, mask=real[:, None])
            tl.store(log2_masses + into, log2_mass, mask=real[:, None])
            grain = tile * (BC // GRAIN) + tl.arange(0, BC // GRAIN)
            grain_at = (entry * group + row)[:, None] * (padded_cells // GRAIN) + grain[None, :]
            tl.store(grain_best + grain_at, tl.max(tl.reshape(score, [BR, BC // GRAIN, GRAIN]), 2), mask=real[:, None])
            tl.store(cell_lse + (entry * group + row) * cell_tiles + tile, log2_of_sum(log2_mass), mask=real)


@partial(Kernel, do_not_specialize=CHANGING)
def choose_pages(
    scores,
    log2_masses,
    cell_lse,
    recent_lse,
    grain_best,
    stop,
    block_table,
    tokens,
    request_of,
    length_of,
    probes_of,
    grain_list,
    opened_page,
    opened_first,
    opened_stop,
    heads,
    group,
    part_page,
    part_head,
    table_row,
    window,
    exact_below,
    padded_cells,
    cell_tiles,
    near_parts,
    probes,
    STEPS: tl.constexpr,
    SIZE: tl.constexpr,
    CELLS: tl.constexpr,
    BC: tl.constexpr,
    GRAIN: tl.constexpr,
    BG: tl.constexpr,
    BT: tl.constexpr,
    BA: tl.constexpr,
    BN: tl.constexpr,
    BP: tl.constexpr,
    BO: tl.constexpr,
    PDL: tl.constexpr,
):
    """The cells that a group opens: the page of each, its first place there, and how many keys it and those before it have.

    They lie in at most as many grains (runs of GRAIN cells), namely those whose best cells are best: only these are looked at.
    `probes` is the length of lists; a row opens `probes_of` its first near block.
    """
    launch_dependents(PDL)
    none = -float("inf")
    entry = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + entry // heads).to(tl.int64)
    request, length = tl.load(request_of + token).to(tl.int64), tl.load(length_of + token)
    near = first_near(length, exact_below, window, SIZE)
    cells = (near - 1) * CELLS
    opened_stop += entry * probes
    slot = tl.arange(0, BO)
    wait_for_previous(PDL)
    if cells == 0:
        tl.store(opened_stop + slot, tl.zeros([BO], tl.int32), mask=slot < probes)
    else:
        wanted = tl.load(probes_of + near)
        member, tile, part, grain = tl.arange(0, BG), tl.arange(0, BT), tl.arange(0, BA), tl.arange(0, BN)
        member_row, is_member = entry * group + member, member < group
        row, is_row = member_row[:, None], is_member[:, None]
        # A score less the log-normaliser of all that a query sees: how large a share of its weights it may have in the cell.
        late = tl.load(recent_lse + row * near_parts + part[None, :], mask=is_row & (part < near_parts)[None, :], other=none)
        is_tile = is_row & (tile * BC < cells)[None, :]
        far = tl.load(cell_lse + row * cell_tiles + tile[None, :], mask=is_tile, other=none)
        m_i = tl.maximum(tl.max(late, 1), tl.max(far, 1))
        m_i = tl.where(m_i > none, m_i, 0.0)
        l_i = tl.sum(tl.exp2(late - m_i[:, None]), 1) + tl.sum(tl.exp2(far - m_i[:, None]), 1)
        lse_i = (m_i + tl.log2(tl.maximum(l_i, 1e-30))) * LN2
        is_grain = is_row & (grain * GRAIN < cells)[None, :]
        best_of = tl.load(grain_best + row * (padded_cells // GRAIN) + grain[None, :], mask=is_grain, other=VOID)
        best_grain = tl.max(tl.where(best_of > LEAST_SCORE, best_of - lse_i[:, None], VOID), 0)
        chosen, place, least = largest(best_grain, best_grain > LEAST_SCORE, wanted, VOID, STEPS, BN)
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
        least = tl.where(found == wanted, least, VOID)
        taken, _, _ = largest(best, best > LEAST_SCORE, wanted, least, STEPS, BP * GRAIN)
        tl.store(log2_masses + at, tl.full([BP * GRAIN, BG], none, tl.float32), mask=taken[:, None] & is_member[None, :])
        page = load_page(block_table, request, 1 + cell // CELLS, table_row, taken)
        about = page * part_page + (entry % heads) * part_head + cell % CELLS
        end = tl.load(stop + about, mask=taken, other=0).to(tl.int64)
        begin = tl.load(stop + about - 1, mask=taken & (cell % CELLS > 0), other=0).to(tl.int64)
        # How many cells there are up to here, and how many keys they have. Both counts in one sum.
        counted = taken.to(tl.int64) << 32
        both = tl.cumsum(counted + tl.where(taken, end - begin, 0), 0)
        into = (both >> 32) - 1
        tl.store(opened_page + entry * probes + into, page.to(tl.int32), mask=taken)
        tl.store(opened_first + entry * probes + into, begin.to(tl.int32), mask=taken)
        tl.store(opened_stop + into, (both & 0xFFFFFFFF).to(tl.int32), mask=taken)
        total = tl.sum(counted + tl.where(taken, end - begin, 0), 0)
        is_left = (slot >= (total >> 32)) & (slot < probes)
        tl.store(opened_stop + slot, tl.zeros([BO], tl.int32) + (total & 0xFFFFFFFF).to(tl.int32), mask=is_left)


@partial(Kernel, do_not_specialize=CHANGING)
def read_pages(
    queries,
    pages,
    value,
    order,
    block_table,
    tokens,
    request_of,
    length_of,
    log2_masses,
    opened_page,
    opened_first,
    opened_stop,
    parts,
    part_lse,
    heads,
    group,
    dim,
    value_dim,
    query_row,
    page_stride,
    head_stride,
    page_row,
    part_page,
    part_head,
    table_row,
    window,
    exact_below,
    padded_cells,
    part_count,
    first_far,
    far_parts,
    readers,
    probes,
    scale,
    SIZE: tl.constexpr,
    CELLS: tl.constexpr,
    HALVINGS: tl.constexpr,
    BK: tl.constexpr,
    BC: tl.constexpr,
    BG: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    IP: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first jobs of an entry read opened cells. To the others tiles of cells are dealt out; opened ones have no mass."""
    launch_dependents(PDL)
    entry, job = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head = entry % heads
    token = tl.load(tokens + entry // heads).to(tl.int64)
    request, length = tl.load(request_of + token).to(tl.int64), tl.load(length_of + token)
    cells = (first_near(length, exact_below, window, SIZE) - 1) * CELLS
    value_column = tl.arange(0, BV)
    value_wide = value_column < value_dim
    row = tl.arange(0, BR)
    real = row < group
    acc = tl.zeros([BR, BV], tl.float32)
    m_i = tl.full([BR], -float("inf"), tl.float32)
    l_i = tl.zeros([BR], tl.float32)
    if job >= readers:
        part = job - readers
        wait_for_previous(PDL)
        for tile in tl.range(part, (cells + BC - 1) // BC, far_parts, num_stages=2):
            cell = tile * BC + tl.arange(0, BC)
            is_cell = cell < cells
            page = load_page(block_table, request, 1 + cell // CELLS, table_row, is_cell)
            at = page * part_page + head * part_head + cell % CELLS * value_dim
            mean = tl.load(value + at[:, None] + value_column[None, :], mask=is_cell[:, None] & value_wide[None, :], other=0.0)
            into = (entry * padded_cells + cell)[None, :] * BG + row[:, None]
            log2_mass = tl.load(log2_masses + into, mask=real[:, None] & is_cell[None, :], other=-float("inf"))
            acc, m_i, l_i = add_tile(acc, m_i, l_i, log2_mass, mean.to(queries.dtype.element_ty), IP)
    else:
        part = far_parts + job
        column = tl.arange(0, BD)
        wide = column < dim
        query = load_rows(queries, token, head, row, real, column, wide, query_row, group, dim)
        opened_page += entry * probes
        opened_first += entry * probes
        opened_stop += entry * probes
        wait_for_previous(PDL)
        total = tl.load(opened_stop + probes - 1)
        for tile in tl.range(job, (total + BK - 1) // BK, readers, num_stages=2):
            number = tile * BK + tl.arange(0, BK)
            there = number < total
            # The first cell that ends behind this key.
            low = tl.zeros([BK], tl.int32)
            high = tl.zeros([BK], tl.int32) + probes
            for _ in range(HALVINGS):  # Written out, it takes half of the registers there are.
                middle = (low + high) // 2
                is_over = tl.load(opened_stop + middle, mask=middle < high, other=0) <= number
                low = tl.where((low < high) & is_over, middle + 1, low)
                high = tl.where((low < high) & (middle < high) & (is_over == 0), middle, high)
            before = tl.load(opened_stop + low - 1, mask=there & (low > 0), other=0)
            first = tl.load(opened_first + low, mask=there, other=0)
            page = tl.load(opened_page + low, mask=there, other=0).to(tl.int64)
            about = 2 * (page * part_page + head * part_head) + first + number - before
            place = tl.load(order + about, mask=there, other=0).to(tl.int64)
            at = page * page_stride + head * head_stride + place * page_row
            key = tl.load(pages + at[None, :] + column[:, None], mask=there[None, :] & wide[:, None], other=0.0)
            held = tl.load(
                pages + dim + at[:, None] + value_column[None, :], mask=there[:, None] & value_wide[None, :], other=0.0
            )
            logits = tl.dot(query, key.to(query.dtype), input_precision=IP) * (scale * LOG2E)
            logits = tl.where(there[None, :], logits, -float("inf"))
            acc, m_i, l_i = add_tile(acc, m_i, l_i, logits, held.to(query.dtype), IP)
    first_part = (entry * group + row) * part_count
    store_part(parts, part_lse, first_far + part, first_part, real, value_column, value_wide, acc, m_i, l_i, value_dim)


@partial(Kernel, do_not_specialize=CHANGING)
def merge_pages(
    parts,
    part_lse,
    tokens,
    output,
    query_heads,
    value_dim,
    output_row,
    part_count,
    PARTS: tl.constexpr,
    BP: tl.constexpr,
    BV: tl.constexpr,
    PDL: tl.constexpr,
):
    """The output of one row and query head. Zeros where a row sees no key."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BV + tl.arange(0, BV)
    wide = column < value_dim
    part = tl.arange(0, PARTS)
    parts += row * part_count * value_dim + column[None, :]
    part_lse += row * part_count
    wait_for_previous(PDL)
    lse = tl.load(part_lse + part, mask=part < part_count, other=-float("inf"))
    m_i = tl.max(lse, 0)
    base = tl.where(m_i > -float("inf"), m_i, 0.0)
    l_i = tl.sum(tl.exp2(lse - base), 0)
    acc = tl.zeros([BV], tl.float32)
    for start in range(0, part_count, BP):
        some = start + tl.arange(0, BP)
        p = tl.exp2(tl.load(part_lse + some, mask=some < part_count, other=-float("inf")) - base)
        found = tl.load(parts + some[:, None] * value_dim, mask=(p > 0.0)[:, None] & wide[None, :], other=0.0)
        acc += tl.sum(p[:, None] * found, 0)
    result = acc / tl.where(l_i == 0.0, 1.0, l_i)
    token = tl.load(tokens + row // query_heads).to(tl.int64)
    into = token * output_row + (row % query_heads) * value_dim + column
    tl.store(output + into, result.to(output.dtype.element_ty), mask=wide)


@triton.jit
def load_part(at, mask, FULL: tl.constexpr):
    """FULL: nothing is masked."""
    return tl.load(at) if FULL else tl.load(at, mask=mask, other=0.0)


@triton.jit
def read_keys(
    acc,
    m_i,
    l_i,
    query,
    length,
    held,
    blocks,
    position,
    most,
    dim,
    value_dim,
    page_stride,
    page_row,
    scale,
    MASKED: tl.constexpr,
    SIZE: tl.constexpr,
    BK: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    FULL: tl.constexpr,
    IP: tl.constexpr,
):
    """Add some consecutive keys of a request to running softmaxes. `held`: a head of pages; MASKED: not all rows see all of them,
    and there are `most`."""
    column, value_column = tl.arange(0, BD), tl.arange(0, BV)
    there = position < most
    if SIZE % BK == 0 and not MASKED:  # They are in one block.
        page = tl.load(blocks + tl.max(position, 0) // SIZE).to(tl.int64) * page_stride
    elif MASKED:
        page = tl.load(blocks + position // SIZE, mask=there, other=0).to(tl.int64) * page_stride
    else:
        page = tl.load(blocks + position // SIZE).to(tl.int64) * page_stride
    held += page + (position % SIZE) * page_row
    wide, value_wide = (column < dim)[:, None], (value_column < value_dim)[None, :]
    if MASKED:
        wide, value_wide = wide & there[None, :], value_wide & there[:, None]
    key = load_part(held[None, :] + column[:, None], wide, FULL and not MASKED)
    value = load_part(held[:, None] + dim + value_column[None, :], value_wide, FULL and not MASKED)
    logits = tl.dot(query, key.to(query.dtype), input_precision=IP) * (scale * LOG2E)
    if MASKED:
        logits = tl.where(position[None, :] < length[:, None], logits, -float("inf"))
    return add_tile(acc, m_i, l_i, logits, value.to(query.dtype), IP)


@partial(Kernel, do_not_specialize=("requests", "table_row"))
def read_prompts(
    queries,
    pages,
    block_table,
    query_start,
    is_read,
    length_of,
    output,
    requests,
    group,
    dim,
    value_dim,
    query_row,
    output_row,
    page_stride,
    head_stride,
    page_row,
    table_row,
    scale,
    SIZE: tl.constexpr,
    BQ: tl.constexpr,
    BM: tl.constexpr,
    BG: tl.constexpr,
    BK: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    FULL: tl.constexpr,
    STAGES: tl.constexpr,
    IP: tl.constexpr,
):
    """A tile of BM rows of one request with all queries that share a head of keys, exactly. Requests without `is_read` are left
    out, and tiles are numbered through all others."""
    number, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    some = tl.arange(0, BQ)
    start = tl.load(query_start + some, mask=some < requests, other=0)
    end = tl.load(query_start + some + 1, mask=some < requests, other=0)
    read = tl.load(is_read + some, mask=some < requests, other=0) != 0
    tiles = tl.where(read, (end - start + BM - 1) // BM, 0)
    after = tl.cumsum(tiles, 0)
    request = tl.sum((after <= number).to(tl.int32), 0)
    if request < requests:
        is_own = some == request
        first = tl.sum(tl.where(is_own, start + (number - after + tiles) * BM, 0), 0)
        last = tl.sum(tl.where(is_own, end, 0), 0)
        lane = tl.arange(0, BM * BG)
        token, member = (first + lane // BG).to(tl.int64), lane % BG
        real = (token < last) & (member < group)
        column, value_column = tl.arange(0, BD), tl.arange(0, BV)
        wide, value_wide = column < dim, value_column < value_dim
        length = tl.load(length_of + token, mask=real, other=0)
        at = token * query_row + (head * group + member) * dim
        query = tl.load(queries + at[:, None] + column[None, :], mask=real[:, None] & wide[None, :], other=0.0)
        acc = tl.zeros([BM * BG, BV], tl.float32)
        m_i = tl.full([BM * BG], -float("inf"), tl.float32)
        l_i = tl.zeros([BM * BG], tl.float32)
        most = tl.max(length, 0)
        blocks, head_pages, key = block_table + request.to(tl.int64) * table_row, pages + head * head_stride, tl.arange(0, BK)
        seen_by_all = tl.min(tl.where(real, length, most), 0) // BK * BK
        for masked in tl.static_range(2):
            from_key = masked * seen_by_all
            to_key = most if masked else seen_by_all
            for begin in tl.range(from_key, to_key, BK, num_stages=1 if masked else STAGES):
                acc, m_i, l_i = read_keys(
                    acc,
                    m_i,
                    l_i,
                    query,
                    length,
                    head_pages,
                    blocks,
                    begin + key,
                    most,
                    dim,
                    value_dim,
                    page_stride,
                    page_row,
                    scale,
                    masked == 1,
                    SIZE,
                    BK,
                    BD,
                    BV,
                    FULL,
                    IP,
                )
        result = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
        into = token * output_row + (head * group + member) * value_dim
        tl.store(
            output + into[:, None] + value_column[None, :],
            result.to(output.dtype.element_ty),
            mask=real[:, None] & value_wide[None, :],
        )
