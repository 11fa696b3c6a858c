"""Pages of a cache: where cells lie, what they say, and that they follow what is written."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from storage_bytes import fill_bytes
from torch import Tensor

from nearfield.vllm.blocks import full_blocks, summarise, write_cells, write_keys
from nearfield.vllm.pages import CELL_SIZE, PageLayout

LAYOUT = PageLayout(heads=2, size=64, dim=16, value_dim=8)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def written(dtype: torch.dtype, blocks: list[int], seed: int = 0, pages: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Pages in which these blocks are full, and what was written `[tokens, heads, dim + value_dim]`."""
    if pages is None:
        pages = LAYOUT.empty(7, dtype)
        fill_bytes(pages, 255)  # NaN, wherever nothing is written
    tokens = len(blocks) * LAYOUT.size
    both = torch.randn(tokens, 2, 24, generator=seeded(seed), dtype=torch.float64).to(dtype)
    slots = (torch.tensor(blocks)[:, None] * LAYOUT.size + torch.arange(LAYOUT.size)).flatten()
    write_keys(pages, LAYOUT, both[..., :16], both[..., 16:], slots)
    write_cells(pages, LAYOUT, full_blocks(slots, LAYOUT.size))
    return pages, both


@pytest.mark.parametrize(("dim", "size"), [(64, 256), (128, 256), (64, 64), (128, 16), (256, 256)])
def test_cells_take_at_most_an_eighth_less_than_that_of_a_page(dim: int, size: int) -> None:
    layout = PageLayout(8, size, dim, dim)
    assert layout.share <= 0.12
    assert layout.bytes_per_page == round(layout.share * 8 * size * 2 * dim * 2)


@pytest.mark.parametrize("size", [0, 8, 24, 272, 512])
def test_sizes_that_cannot_be(size: int) -> None:
    with pytest.raises(ValueError, match=rf"blocks must have a multiple of 16 keys, at most 256, got {size}; pass --block-size"):
        PageLayout(2, size, 16, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_keys_and_values_lie_beside_their_cells(dtype: torch.dtype) -> None:
    pages, both = written(dtype, [4, 1])
    assert torch.equal(pages[4].transpose(0, 1), both[:64])
    assert torch.equal(pages[1].transpose(0, 1), both[64:])
    others = [block for block in range(7) if block not in (4, 1)]
    assert bool(pages[others].isnan().all())
    summary = LAYOUT.summaries(pages)
    assert bool((summary.order[others] == 255).all())  # nothing is written to other blocks
    assert summary.centroid.shape == (7, 2, 4, 16)
    assert summary.order.shape == (7, 2, 64)


def test_keys_may_lie_by_columns() -> None:
    """As vLLM's kernel for CPUs has them: column by column, and values behind them."""
    layout = replace(LAYOUT, by_columns=True)
    pages, (key, value) = layout.empty(3, torch.float32), torch.randn(2, 64, 2, 16, generator=seeded(0))
    fill_bytes(pages, 255)
    write_keys(pages, layout, key, value[..., :8], 64 + torch.arange(64))
    for head in range(2):
        held = pages[1, head].flatten()
        assert torch.equal(held[: 64 * 16].view(16, 64), key[:, head].T)
        assert torch.equal(held[64 * 16 :].view(64, 8), value[:, head, :8])
    assert bool(pages[[0, 2]].isnan().all())
    rows = LAYOUT.empty(3, torch.float32)
    write_keys(rows, LAYOUT, key, value[..., :8], 64 + torch.arange(64))
    for found, wanted in zip(summarise(pages[1:2], layout), summarise(rows[1:2], LAYOUT), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_are_those_of_the_keys_in_a_cell(dtype: torch.dtype) -> None:
    pages, both = written(dtype, [2, 5, 0])
    summary = LAYOUT.summaries(pages)
    for number, block in enumerate((2, 5, 0)):
        for head in range(2):
            own = both[number * 64 : (number + 1) * 64, head].double()
            order, stop = summary.order[block, head].long(), summary.stop[block, head].tolist()
            assert sorted(order.tolist()) == list(range(64))
            assert stop[-1] == 64
            for cell, (begin, end) in enumerate(zip([0, *stop], stop, strict=False)):
                if begin == end:
                    continue
                keys, values = own[order[begin:end]].split([16, 8], 1)
                close = {"rtol": 1e-2, "atol": 1e-2}
                torch.testing.assert_close(summary.centroid[block, head, cell].double(), keys.mean(0), **close)
                torch.testing.assert_close(summary.variance[block, head, cell].double(), keys.var(0, correction=0), **close)
                torch.testing.assert_close(summary.value[block, head, cell].double(), values.mean(0), **close)


def test_keys_that_are_alike_share_a_cell() -> None:
    """Four clusters far apart, strewn over a block of four cells."""
    kind = torch.randint(4, (64,), generator=seeded(3))
    held = 9.0 * torch.randn(4, 24, generator=seeded(4))[kind] + 0.01 * torch.randn(64, 24, generator=seeded(5))
    found = summarise(held[None, None].expand(1, 2, -1, -1), LAYOUT)
    stop = found.stop[0, 0].tolist()
    for begin, end in zip([0, *stop], stop, strict=False):
        assert len(kind[found.order[0, 0, begin:end].long()].unique()) <= 1


def test_a_block_that_is_used_again_has_the_cells_of_its_new_keys() -> None:
    pages, _ = written(torch.float32, [3])
    before = [x[3].clone() for x in LAYOUT.summaries(pages)]
    _, both = written(torch.float32, [3], seed=1, pages=pages)
    after = LAYOUT.summaries(pages)
    assert not torch.equal(before[0], after.centroid[3])
    alone = summarise(both.transpose(0, 1)[None], LAYOUT)
    for found, expected in zip(after, alone, strict=True):
        assert torch.equal(found[3], expected[0])


def test_cells_come_with_the_last_key_of_a_block() -> None:
    """Not before, whatever the pieces in which keys come; tokens at slot -1 go nowhere."""
    whole, both = written(torch.float32, [6])
    pages = LAYOUT.empty(7, torch.float32)
    fill_bytes(pages, 255)
    for begin, end in ((0, 1), (1, 40), (40, 63), (63, 64)):
        assert bool((LAYOUT.summaries(pages).order == 255).all())
        slots = torch.cat([torch.arange(begin, end) + 6 * 64, torch.tensor([-1])])
        new = torch.cat([both[begin:end], torch.full_like(both[:1], 7.0)])
        write_keys(pages, LAYOUT, new[..., :16], new[..., 16:], slots)
        write_cells(pages, LAYOUT, full_blocks(slots, LAYOUT.size))
    assert torch.equal(pages[6], whole[6])
    assert bool(pages[:6].isnan().all())
    for found, expected in zip(LAYOUT.summaries(pages), LAYOUT.summaries(whole), strict=True):
        assert torch.equal(found[6], expected[6])


def test_tokens_without_a_slot_go_nowhere() -> None:
    pages, both = written(torch.float32, [6])
    before = pages.untyped_storage().tolist()
    write_keys(pages, LAYOUT, both[:3, :, :16], both[:3, :, 16:], torch.full((3,), -1))
    assert pages.untyped_storage().tolist() == before


def test_a_block_is_grouped_alike_whatever_others_there_are() -> None:
    pages, _ = written(torch.float32, [0, 1, 2, 3, 4])
    together = summarise(pages[:5], LAYOUT)
    for block in range(5):
        for found, expected in zip(summarise(pages[block : block + 1], LAYOUT), together, strict=True):
            assert torch.equal(found[0], expected[block])


def test_pages_without_room_are_refused() -> None:
    with pytest.raises(ValueError, match=rf"{LAYOUT.bytes_per_page} bytes behind their keys and values, got 0"):
        LAYOUT.summaries(torch.empty(3, 2, 64, 24))
    with pytest.raises(ValueError, match=r"pages must be \[blocks, 2, 64, 24\], each in one piece"):
        LAYOUT.summaries(torch.empty(3, 64, 2, 24).transpose(1, 2))
    most = 2 * 64 * 24 * 4 + LAYOUT.bytes_per_page
    assert [LAYOUT.has_room(page, 4) for page in (most - 1, most, most + 1)] == [False, True, True]
    assert CELL_SIZE == 16
