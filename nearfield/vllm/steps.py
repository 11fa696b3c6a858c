"""A step on a GPU: how pages, and what a step is asked for, go into the kernels of `kernels`. The host waits for nothing."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearfield.cells.cache.decode import MERGED_AT_A_TIME, STEPS, candidates
from nearfield.cells.partition.kmeans import sample_of
from nearfield.cells.triton.limits import MOST_COMPARED, MOST_GROUP
from nearfield.cells.triton.tiles import DecodeTiles
from nearfield.cells.triton.tuning import decode_tiles, fitting_warps
from nearfield.kernels import cards
from nearfield.kernels.launch import cdiv, dependent_launch, next_power_of_2, padded, precision
from nearfield.vllm.attend import Reach
from nearfield.vllm.blocks import GROUPED
from nearfield.vllm.kernels import choose_pages, group_blocks, merge_pages, read_pages, read_prompts, score_pages, write_pages
from nearfield.vllm.pages import PageLayout

PROGRAMS = 512
"""With more programs than about this, each reads more tiles: what programs have found has to be merged."""
MOST_TILES = 32
"""of keys or cells that one program reads"""
GROUPED_AT_A_TIME = 64
"""Keys of a block, of as many columns at most; fewer if they have more."""
GRAIN = 8
"""Consecutive cells in a grain. Cells are chosen from the grains whose best cells are best."""
SCORED = 2
"""Tiles of cells that a step of a cache would score go into one."""
COMPARED_PER_WARP = 512
"""Fewer than in a step of a cache, where a program has more to do besides."""
SCORED_STAGES = 2
"""So many tiles of cells are loaded ahead."""
SCRATCH_BYTES = 512 << 20
"""Rows attend some at a time where scores of cells, and what parts of a row have found, would take more than this."""


class PromptTiles(NamedTuple):
    """What a program reads at a time where a prompt is read exactly."""

    queries: int
    keys: int
    """of up to 256 bytes; fewer of both if they have more"""
    warps: int
    stages: int


PROMPT_TILES = {"9.0": PromptTiles(256, 128, 8, 2), "10.0": PromptTiles(128, 128, 8, 2)}
"""By class of cards, in 16 bits."""
OTHER_PROMPT_TILES = PromptTiles(64, 64, 4, 2)


class StepRows(NamedTuple):
    """What a step is asked for, on the card: rows (tokens) that attend by cells, or by themselves."""

    tokens: Tensor
    """int32 `[rows]`: which tokens of the step these are"""
    request_of: Tensor
    """int32 `[tokens]`: the request of each token of the step"""
    length_of: Tensor
    """int32 `[tokens]`: how many keys each sees; 0: it is none, and gets zeros; less than zero: it reads all of so many"""
    block_table: Tensor
    """int32 `[requests, blocks]`"""
    most: int
    """no row sees more keys than this"""


class Prompts(NamedTuple):
    """Requests whose rows are read exactly, in tiles."""

    query_start: Tensor
    """int32 `[requests + 1]`: where the rows of each request begin"""
    is_read: Tensor
    """int8 `[requests]`: whether they are read here"""
    rows: tuple[int, ...]
    """how many rows those have that are"""


class StepBuffers:
    """What is known of the tokens of a step, where a captured graph finds it again."""

    def __init__(self, tokens: int, device: torch.device) -> None:
        """For steps of at most so many tokens."""
        self.numbers = torch.arange(tokens, dtype=torch.int32, device=device)
        self.request_of, self.length_of = torch.zeros(2, tokens, dtype=torch.int32, device=device)

    def fill(self, query_start: Tensor, seq_lens: Tensor, reads_all: Tensor | None = None) -> None:
        """Which request each token belongs to, and how many keys it sees; those behind the last request see none.

        `query_start` `[requests + 1]`: where the tokens of each request begin, and the end of the last one's; `seq_lens`
        `[requests]`: its keys after this step; `reads_all` int8 `[requests]`: whether its rows read all of them one by one.
        """
        tokens = query_start[-1]
        request = torch.searchsorted(query_start, self.numbers, right=True).sub_(1).clamp_(0, len(seq_lens) - 1)
        length = seq_lens[request] - (query_start[request + 1] - 1 - self.numbers)
        if reads_all is not None:
            length = torch.where(reads_all[request] != 0, -length, length)
        self.request_of.copy_(request)
        self.length_of.copy_(length.masked_fill_(self.numbers >= tokens, 0))


@functools.lru_cache(maxsize=64)
def first_keys(layout: PageLayout, device: torch.device) -> Tensor:
    """The keys at which k-means starts in a block, as in torch."""
    picked = sample_of(layout.size, layout.cells, layout.size, torch.Generator("cpu").manual_seed(GROUPED.seed))
    return picked[: layout.cells].to(device, torch.int32)


def probes_table(reach: Reach, layout: PageLayout, most: int, device: torch.device) -> Tensor:
    """How many cells a row opens, by its first near block, int32, where rows see at most so many keys."""
    blocks = reach.first_near(most - 1, layout.size) if most else 1
    opened = [0] + [reach.opened((near - 1) * layout.cells, (near - 1) * layout.size) for near in range(1, blocks + 1)]
    return torch.tensor(opened, dtype=torch.int32, device=device)


def unsupported(reach: Reach, layout: PageLayout, group: int, most: int) -> str | None:
    """What the kernels cannot serve of requests of at most so many keys, in words for an error; None: they serve it all."""
    if group > MOST_GROUP:
        return f"more than {MOST_GROUP} query heads per head of keys"
    blocks = reach.first_near(max(0, most - 1), layout.size) - 1
    cells = blocks * layout.cells
    compared = next_power_of_2(group) * max(
        candidates(cells, reach.opened(cells, blocks * layout.size), GRAIN), cdiv(cells, GRAIN)
    )
    if compared > MOST_COMPARED:
        return f"{cells} cells for {group} query heads per head of keys; allow shorter requests, or fewer probes"
    return None


def _page_strides(pages: Tensor) -> dict[str, int]:
    page, head, row, _ = pages.stride()
    return {"page_stride": page, "head_stride": head, "page_row": row}


def _part_strides(layout: PageLayout, centroid: Tensor) -> dict[str, int]:
    """Between pages, and between heads in a page, in numbers of two bytes."""
    return {"part_page": centroid.stride(0), "part_head": layout.bytes_per_head // 2}


def write(pages: Tensor, layout: PageLayout, key: Tensor, value: Tensor, slots: Tensor, has_cells: bool = True) -> None:
    """`write_keys`, and if pages have cells, `write_cells` of all blocks that become full.

    Keys and values are `[tokens, heads, dim]`.
    """
    tokens, heads, dim = key.shape
    value_dim = value.shape[2]
    if not tokens:
        return
    key, value = (x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in (key, value))
    blocks = {"BD": padded(dim), "BV": padded(value_dim)}
    write_pages[(tokens, heads)](
        keys=key,
        values=value,
        slots=slots,
        pages=pages,
        dim=dim,
        value_dim=value_dim,
        key_row=key.stride(0),
        value_row=value.stride(0),
        **_page_strides(pages),
        SIZE=layout.size,
        **blocks,
        num_warps=1,
    )
    if not has_cells:
        return
    summary = layout.summaries(pages)
    wide = max(1, max(blocks.values()) // GROUPED_AT_A_TIME)
    group_blocks[(tokens, heads)](
        slots=slots,
        first_keys=first_keys(layout, pages.device),
        pages=pages,
        centroid=summary.centroid,
        variance=summary.variance,
        value=summary.value,
        stop=summary.stop,
        order=summary.order,
        dim=dim,
        value_dim=value_dim,
        **_page_strides(pages),
        **_part_strides(layout, summary.centroid),
        ITERATIONS=GROUPED.iterations,
        SIZE=layout.size,
        CELLS=layout.cells,
        BM=max(16, min(GROUPED_AT_A_TIME // wide, next_power_of_2(layout.size))),
        BC=max(16, next_power_of_2(layout.cells)),
        **blocks,
        IP=precision(torch.float32),
        num_warps=4,
    )


class Plan(NamedTuple):
    """How a step is cut into programs: it depends on bounds alone."""

    members: int
    cells: int
    """that a row sees at most"""
    scored: int
    """cells of a tile"""
    cell_tiles: int
    cell_jobs: int
    probes: int
    near_parts: int
    far_parts: int
    readers: int

    @staticmethod
    def of(layout: PageLayout, tiles: DecodeTiles, reach: Reach, query_heads: int, rows: int, most: int) -> Plan:
        """For so many rows, each of which sees at most so many keys."""
        size, entries = layout.size, rows * layout.heads
        blocks = reach.first_near(most - 1, size)
        cells, hidden = (blocks - 1) * layout.cells, (blocks - 1) * size
        scored, probes = SCORED * tiles.cells, reach.opened(cells, hidden)
        # Rows that see less may read more one by one: all that they see, below the length from which cells are used.
        most_near = min(most, max(reach.window + 2 * size, reach.exact_below - 1))
        cell_tiles, near_tiles, far_tiles = cdiv(cells, scored), cdiv(most_near, tiles.open_end), cdiv(cells, tiles.far)
        opened_tiles = cdiv(probes * size, tiles.opened * layout.cells)
        return Plan(
            next_power_of_2(query_heads // layout.heads),
            cells,
            scored,
            cell_tiles,
            cdiv(cell_tiles, _tiles_per_program(entries, cell_tiles, 1)),
            probes,
            cdiv(near_tiles, _tiles_per_program(entries, near_tiles, tiles.open_end_tiles)),
            cdiv(far_tiles, _tiles_per_program(entries, far_tiles, 1)),
            cdiv(opened_tiles, _tiles_per_program(entries, opened_tiles, 1)),
        )

    @property
    def parts(self) -> int:
        return self.near_parts + self.far_parts + self.readers

    @property
    def padded_cells(self) -> int:
        return self.scored * self.cell_tiles

    def row_bytes(self, layout: PageLayout, query_heads: int) -> int:
        """What a row takes beside its output."""
        return 8 * layout.heads * self.padded_cells * self.members + 4 * query_heads * self.parts * layout.value_dim


def decode(
    query: Tensor,
    pages: Tensor,
    layout: PageLayout,
    rows: StepRows,
    reach: Reach,
    probes_of: Tensor,
    scale: float,
    output: Tensor,
) -> None:
    """Some rows of `query` `[tokens, query heads, dim]` attend, each by itself, as `attend` says. Writes `output`.

    `probes_of`: a `probes_table` of no fewer keys than `rows.most`.
    """
    count, query_heads = len(rows.tokens), query.shape[1]
    most = max(1, min(rows.most, rows.block_table.shape[1] * layout.size))
    tiles = decode_tiles(max(layout.dim, layout.value_dim), query.dtype, query.device)
    plan = Plan.of(layout, tiles, reach, query_heads, count, most)
    step = max(1, SCRATCH_BYTES // plan.row_bytes(layout, query_heads))
    for first in range(0, count, step):
        some = rows._replace(tokens=rows.tokens[first : first + step])
        _decode(query, pages, layout, some, reach, probes_of, scale, output, plan, tiles)


def _decode(
    query: Tensor,
    pages: Tensor,
    layout: PageLayout,
    rows: StepRows,
    reach: Reach,
    probes_of: Tensor,
    scale: float,
    output: Tensor,
    plan: Plan,
    tiles: DecodeTiles,
) -> None:
    count, query_heads, dim = len(rows.tokens), query.shape[1], layout.dim
    heads, size, value_dim = layout.heads, layout.size, layout.value_dim
    group, entries = query_heads // heads, count * heads
    members, cells, scored, cell_tiles, cell_jobs, probes, near_parts, far_parts, readers = plan
    padded_cells, part_count = plan.padded_cells, plan.parts
    device = query.device
    parts = torch.empty(count * query_heads, part_count, value_dim, dtype=torch.float32, device=device)
    part_lse = torch.empty(count * query_heads, part_count, dtype=torch.float32, device=device)
    scores, log2_masses = torch.empty(2, entries, max(1, padded_cells), members, dtype=torch.float32, device=device)
    cell_lse = torch.empty(count * query_heads, max(1, cell_tiles), dtype=torch.float32, device=device)
    recent_lse = torch.empty(count * query_heads, near_parts, dtype=torch.float32, device=device)
    grain_best = torch.empty(count * query_heads, max(1, padded_cells // GRAIN), dtype=torch.float32, device=device)
    grain_list, opened_page, opened_first, opened_stop = torch.empty(4, entries, max(1, probes), dtype=torch.int32, device=device)

    # Where all that rows see is read one by one, pages may have no room for cells, and kernels look at none.
    has_room = layout.has_room(pages.stride(0) * pages.element_size(), pages.element_size())
    summary = layout.summaries(pages if cells or has_room else layout.empty(0, pages.dtype, device))
    asked = {"block_table": rows.block_table, "tokens": rows.tokens, "request_of": rows.request_of, "length_of": rows.length_of}
    sizes = {"heads": heads, "group": group, "dim": dim, "value_dim": value_dim, "query_row": query.stride(0)}
    strides = {**_page_strides(pages), **_part_strides(layout, summary.centroid), "table_row": rows.block_table.stride(0)}
    bounds = {"window": reach.window, "exact_below": min(reach.exact_below, 1 << 30)}
    wide = {"BR": max(16, members), "BD": padded(dim), "BV": padded(value_dim)}
    input_precision = precision(query.dtype)
    pdl = dependent_launch(query)
    dependent: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    score_pages[(entries, cell_jobs + near_parts)](
        queries=query,
        pages=pages,
        centroid=summary.centroid,
        variance=summary.variance,
        stop=summary.stop,
        **asked,
        parts=parts,
        part_lse=part_lse,
        scores=scores,
        log2_masses=log2_masses,
        cell_lse=cell_lse,
        recent_lse=recent_lse,
        grain_best=grain_best,
        **sizes,
        **strides,
        **bounds,
        padded_cells=padded_cells,
        cell_tiles=cell_tiles,
        cell_jobs=cell_jobs,
        near_parts=near_parts,
        part_count=part_count,
        scale=scale,
        SIZE=size,
        CELLS=layout.cells,
        BK=tiles.open_end,
        BC=scored,
        BG=members,
        GRAIN=GRAIN,
        **wide,
        IP=input_precision,
        STAGES=SCORED_STAGES,
        PDL=pdl,
        num_warps=tiles.warps,
    )
    if cells:
        compared = candidates(padded_cells, probes, GRAIN)
        choose_pages[(entries,)](
            scores=scores,
            log2_masses=log2_masses,
            cell_lse=cell_lse,
            recent_lse=recent_lse,
            grain_best=grain_best,
            stop=summary.stop,
            **asked,
            probes_of=probes_of,
            grain_list=grain_list,
            opened_page=opened_page,
            opened_first=opened_first,
            opened_stop=opened_stop,
            heads=heads,
            group=group,
            **_part_strides(layout, summary.centroid),
            table_row=rows.block_table.stride(0),
            **bounds,
            padded_cells=padded_cells,
            cell_tiles=cell_tiles,
            near_parts=near_parts,
            probes=probes,
            STEPS=STEPS,
            SIZE=size,
            CELLS=layout.cells,
            BC=scored,
            GRAIN=GRAIN,
            BG=members,
            BT=next_power_of_2(cell_tiles),
            BA=next_power_of_2(near_parts),
            BN=next_power_of_2(padded_cells // GRAIN),
            BP=compared // GRAIN,
            BO=next_power_of_2(probes),
            PDL=pdl,
            num_warps=max(tiles.warps, min(16, compared * members // COMPARED_PER_WARP)),
            **dependent,
        )
        read_pages[(entries, readers + far_parts)](
            queries=query,
            pages=pages,
            value=summary.value,
            order=summary.order,
            **asked,
            log2_masses=log2_masses,
            opened_page=opened_page,
            opened_first=opened_first,
            opened_stop=opened_stop,
            parts=parts,
            part_lse=part_lse,
            **sizes,
            **strides,
            **bounds,
            padded_cells=padded_cells,
            part_count=part_count,
            first_far=near_parts,
            far_parts=far_parts,
            readers=readers,
            probes=probes,
            scale=scale,
            SIZE=size,
            CELLS=layout.cells,
            HALVINGS=probes.bit_length(),
            BK=tiles.opened,
            BC=tiles.far,
            BG=members,
            **wide,
            IP=input_precision,
            PDL=pdl,
            num_warps=tiles.warps,
            **dependent,
        )
    columns = min(tiles.columns, padded(value_dim))
    merge_pages[(count * query_heads, cdiv(value_dim, columns))](
        parts=parts,
        part_lse=part_lse,
        tokens=rows.tokens,
        output=output,
        query_heads=query_heads,
        value_dim=value_dim,
        output_row=output.stride(0),
        part_count=part_count,
        PARTS=next_power_of_2(part_count),
        BP=min(MERGED_AT_A_TIME, next_power_of_2(part_count)),
        BV=columns,
        PDL=pdl,
        num_warps=4,
        **dependent,
    )


def _tiles_per_program(entries: int, tiles: int, least: int) -> int:
    """A power of two, so that few versions are compiled: how many parts a row has is known to kernels that merge them."""
    return max(least, min(MOST_TILES, next_power_of_2(entries * tiles // PROGRAMS)))


@functools.cache
def _prompt_tiles(dtype: torch.dtype, device: torch.device, imposed: str) -> PromptTiles:
    known = PROMPT_TILES if dtype.itemsize == 2 else {}
    return known.get(cards.class_of(device, imposed), OTHER_PROMPT_TILES)


def read_exactly(
    query: Tensor, pages: Tensor, layout: PageLayout, rows: StepRows, prompts: Prompts, scale: float, output: Tensor
) -> None:
    """The rows of prompts attend to all keys that they see. Writes `output`, token by token."""
    query_heads, heads = query.shape[1], layout.heads
    group = query_heads // heads
    members = next_power_of_2(group)
    chosen = _prompt_tiles(query.dtype, query.device, cards.imposed_class())
    columns = {"BD": padded(layout.dim), "BV": padded(layout.value_dim)}
    wide = max(1, max(columns.values()) * query.dtype.itemsize // 256)
    of_a_tile = max(1, max(16, chosen.queries // wide) // members)
    tiles = sum(cdiv(count, of_a_tile) for count in prompts.rows)
    if not tiles:
        return
    requests = len(prompts.is_read)
    read_prompts[(tiles, heads)](
        queries=query,
        pages=pages,
        block_table=rows.block_table,
        query_start=prompts.query_start,
        is_read=prompts.is_read,
        length_of=rows.length_of,
        output=output,
        requests=requests,
        group=group,
        dim=layout.dim,
        value_dim=layout.value_dim,
        query_row=query.stride(0),
        output_row=output.stride(0),
        **_page_strides(pages),
        table_row=rows.block_table.stride(0),
        scale=scale,
        SIZE=layout.size,
        BQ=next_power_of_2(requests),
        BM=of_a_tile,
        BG=members,
        BK=max(16, chosen.keys // wide),
        **columns,
        FULL=columns == {"BD": layout.dim, "BV": layout.value_dim},
        STAGES=chosen.stages,
        IP=precision(query.dtype),
        num_warps=fitting_warps(chosen.warps, layout.dim, layout.value_dim),
    )
