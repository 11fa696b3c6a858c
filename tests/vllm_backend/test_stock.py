"""vLLM's own kernel for CPUs, where that is installed: what it reads and writes is what the rest of us does."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from storage_bytes import fill_bytes

from nearfield.vllm import installed

if installed() is None:
    pytest.skip("vLLM is not installed: make test-vllm", allow_module_level=True)

from nearfield.vllm import stock
from nearfield.vllm.attend import Reach, attend
from nearfield.vllm.blocks import write_keys
from nearfield.vllm.pages import READABLE, PageLayout

LAYOUT = PageLayout(heads=2, size=64, dim=32, value_dim=32, by_columns=True)
LENGTHS, ROWS = (333, 64, 1, 90), (5, 1, 1, 90)
DTYPES = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@DTYPES
def test_keys_are_written_where_others_read_them(dtype: torch.dtype, tolerance: float, generator: torch.Generator) -> None:
    key, value = torch.randn(2, 200, 2, 32, generator=generator).to(dtype)
    slots = torch.randperm(7 * 64, generator=generator)[:200]
    slots[[3, 50]] = -1
    pages = [LAYOUT.empty(7, dtype) for _ in range(2)]
    for own in pages:
        fill_bytes(own, 255)
    stock.write(pages[0], LAYOUT, key, value, slots)
    write_keys(pages[1], LAYOUT, key, value, slots)
    assert bytes(pages[0].untyped_storage()) == bytes(pages[1].untyped_storage())


@DTYPES
@pytest.mark.parametrize("dim", [32, 80])
@pytest.mark.parametrize("is_alone", [False, True])
def test_rows_read_all_their_keys(
    is_alone: bool, dim: int, dtype: torch.dtype, tolerance: float, generator: torch.Generator
) -> None:
    """Of the second to the last request, with rows of others before theirs; in all forms that there are on this CPU."""
    form = stock.form_of("auto", dtype, 64, dim, dim, is_alone)
    if form is None:
        pytest.skip("this CPU's form for such heads is read by nothing else")
    layout, plain = PageLayout(2, 64, dim, dim, is_packed=True), PageLayout(2, 64, dim, dim)
    pages, others = layout.empty(20, dtype), plain.empty(20, dtype)
    fill_bytes(pages, 0x44)  # Numbers: the kernel gives keys that were not written a weight of zero.
    free = torch.randperm(20, generator=generator).tolist()
    table = torch.zeros(4, 8, dtype=torch.int32)
    for own, length in zip(table, LENGTHS, strict=True):
        blocks = torch.tensor([free.pop() for _ in range(-(-length // 64))])
        own[: len(blocks)] = blocks
        place = torch.arange(length)
        key, value = torch.randn(2, length, 2, dim, generator=generator).to(dtype)
        slots = blocks[place // 64] * 64 + place % 64
        stock.write(pages, layout, key, value, slots, form)
        write_keys(others, plain, key, value, slots)
    starts = torch.tensor([0, *accumulate(ROWS)], dtype=torch.int32)
    query = torch.randn(int(starts[-1]), 6, dim, generator=generator).to(dtype)
    output = torch.full_like(query, torch.nan)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    some = stock.ExactRows.of(starts[1:], lengths[1:], table[1:], layout, 6, dtype, form)
    some.attend(query, pages, layout, 0.3, output)
    assert bool(output[:5].isnan().all())
    for request in (1, 2, 3):
        rows = slice(int(starts[request]), int(starts[request + 1]))
        blocks = table[request, : -(-LENGTHS[request] // 64)].long()
        wanted = attend(query[rows], others, plain, blocks, LENGTHS[request], Reach(64, 1 << 40, None), 0.3)
        torch.testing.assert_close(output[rows], wanted, rtol=tolerance, atol=tolerance)
    with pytest.raises(RuntimeError, match="packed"):
        layout.keys(pages)


def test_what_it_does_not_read() -> None:
    assert stock.form_of("auto", torch.bfloat16, 256, 64, 64, False) == READABLE
    for about in (
        ("auto", torch.bfloat16, 256, 64, 32),
        ("auto", torch.bfloat16, 48, 64, 64),
        ("auto", torch.bfloat16, 256, 72, 72),
        ("bfloat16", torch.float32, 256, 64, 64),
    ):
        assert stock.form_of(*about, False) is stock.form_of(*about, True) is None


def test_pages_that_nobody_else_reads_have_the_form_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU with AMX its kernel packs keys in tiles."""
    monkeypatch.setattr(stock, "form_of", stock.form_of.__wrapped__)  # Nothing of this is remembered.
    monkeypatch.setattr(stock, "_get_attn_isa", lambda *_: "amx")
    assert stock.form_of("auto", torch.float16, 512, 64, 64, True) == "amx"
    assert stock.form_of("auto", torch.float16, 512, 64, 64, False) == READABLE
    monkeypatch.setattr(stock, "_get_attn_isa", lambda *_: "neon")
    assert stock.form_of("auto", torch.float16, 1024, 64, 64, True) == "neon"
    assert stock.form_of("auto", torch.float16, 1024, 64, 64, False) is None
