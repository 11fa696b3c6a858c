"""The kernels for pages on a card, held to the step in torch: interpreted on a CPU, for real on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from storage_bytes import fill_bytes
from torch import Tensor

pytest.importorskip("triton")

from nearfield.vllm import steps
from nearfield.vllm.attend import Reach, attend
from nearfield.vllm.blocks import full_blocks, write_cells, write_keys
from nearfield.vllm.pages import PageLayout
from nearfield.vllm.steps import Prompts, StepBuffers, StepRows, decode, probes_table, read_exactly, unsupported, write

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYOUT = PageLayout(heads=2, size=32, dim=16, value_dim=16)
SCALE = 0.3
ALL = 1 << 40


def on_cpu(pages: Tensor) -> Tensor:
    """A copy, padding and all."""
    whole = torch.empty(0, dtype=pages.dtype).set_(pages.untyped_storage().cpu().clone())
    return whole.as_strided(pages.shape, pages.stride(), pages.storage_offset())


class Batch:
    """Requests of several lengths in pages that lie anywhere, with NaN wherever nothing was written."""

    def __init__(
        self,
        lengths: tuple[int, ...] = (333, 17, 64, 250),
        layout: PageLayout = LAYOUT,
        group: int = 3,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        size, self.layout, self.lengths = layout.size, layout, lengths
        blocks = [-(-length // size) for length in lengths]
        self.pages = layout.empty(sum(blocks) + 5, dtype, DEVICE)
        fill_bytes(self.pages, 255)
        free = torch.randperm(len(self.pages), generator=generator).tolist()
        self.table = torch.full((len(lengths), max(blocks) + 2), 10**6, dtype=torch.int32)
        self.key, self.value, self.slots = [], [], []
        for request, (length, count) in enumerate(zip(lengths, blocks, strict=True)):
            own = torch.tensor([free.pop() for _ in range(count)])
            self.table[request, :count] = own
            centres = torch.randn(9, layout.heads, layout.dim, generator=generator) * 2
            which = torch.randint(9, (length,), generator=generator)
            self.key.append(centres[which] + torch.randn(length, layout.heads, layout.dim, generator=generator) * 0.6)
            self.value.append(torch.randn(length, layout.heads, layout.value_dim, generator=generator))
            place = torch.arange(length)
            self.slots.append(own[place // size] * size + place % size)
        self.query = torch.randn(len(lengths) * 40, layout.heads * group, layout.dim, generator=generator).to(DEVICE, dtype)
        self.table = self.table.to(DEVICE)

    def written(self, by_kernels: bool) -> Batch:
        key, value, slots = (torch.cat(x) for x in (self.key, self.value, self.slots))
        key, value = key.to(self.pages.dtype), value.to(self.pages.dtype)
        if by_kernels:
            write(self.pages, self.layout, *(x.to(DEVICE) for x in (key, value, slots)))
        else:
            pages = on_cpu(self.pages)
            write_keys(pages, self.layout, key, value, slots)
            write_cells(pages, self.layout, full_blocks(slots, self.layout.size))
            self.pages.untyped_storage().copy_(pages.untyped_storage())
        return self

    def rows(self, counts: tuple[int, ...]) -> tuple[StepRows, list[int]]:
        """The last rows of each request, and where those of each begin."""
        starts = [0]
        for count in counts:
            starts.append(starts[-1] + count)
        requests = [request for request, count in enumerate(counts) for _ in range(count)]
        seen = [length - count + 1 + row for length, count in zip(self.lengths, counts, strict=True) for row in range(count)]
        ints: dict[str, Any] = {"dtype": torch.int32, "device": DEVICE}
        tokens = torch.arange(starts[-1], **ints)
        return StepRows(tokens, torch.tensor(requests, **ints), torch.tensor(seen, **ints), self.table, max(self.lengths)), starts

    def expected(self, counts: tuple[int, ...], reach: Reach) -> Tensor:
        found, first, pages = [], 0, on_cpu(self.pages)
        for request, (length, count) in enumerate(zip(self.lengths, counts, strict=True)):
            blocks = self.table[request, : -(-length // self.layout.size)].long().cpu()
            query = self.query[first : first + count].cpu()
            found.append(attend(query, pages, self.layout, blocks, length, reach, SCALE))
            first += count
        return torch.cat(found).to(DEVICE)

    def decoded(self, counts: tuple[int, ...], reach: Reach, most: int | None = None) -> Tensor:
        rows, starts = self.rows(counts)
        rows = rows if most is None else rows._replace(most=most)
        query = self.query[: starts[-1]]
        output = torch.full((starts[-1], *query.shape[1:2], self.layout.value_dim), torch.nan, device=DEVICE, dtype=query.dtype)
        probes_of = probes_table(reach, self.layout, max(rows.most, max(self.lengths)), DEVICE)
        decode(query, self.pages, self.layout, rows, reach, probes_of, SCALE, output)
        return output


@pytest.mark.parametrize("reach", [Reach(40, 90, 5), Reach(16, 0, 3), Reach(24, 0, None), Reach(40, ALL, 5)])
@pytest.mark.parametrize("group", [1, 3])
def test_rows_attend_to_pages_as_in_torch(reach: Reach, group: int, poisoned: None) -> None:
    batch = Batch(group=group).written(by_kernels=False)
    counts = (1, 1, 1, 1)
    torch.testing.assert_close(batch.decoded(counts, reach), batch.expected(counts, reach), rtol=2e-5, atol=2e-5)


def test_large_spreads_are_told_apart_on_a_card(poisoned: None) -> None:
    """Scores cut them off at 64, masses at 9."""
    batch, reach, counts = Batch().written(by_kernels=False), Reach(16, 0, 4), (1, 1, 1, 1)
    batch.query *= 8.0
    torch.testing.assert_close(batch.decoded(counts, reach), batch.expected(counts, reach), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("what", ["query", "near key", "far key", "near value", "far value"])
def test_what_is_not_a_number_in_pages_is_never_left_out(what: str, poisoned: None) -> None:
    batch, reach, counts = Batch(), Reach(16, 0, 3), (1, 1, 1, 1)
    place = 320 if "near" in what else 100
    held = {"key": batch.key, "value": batch.value}.get(what.split()[-1])
    if held is None:
        batch.query[0, 0, 2] = torch.nan
    else:
        held[0][place, 1, 2] = torch.nan
    batch.written(by_kernels=False)
    found, wanted = batch.decoded(counts, reach), batch.expected(counts, reach)
    assert bool(wanted[0].isnan().any())
    assert torch.equal(found.isnan(), wanted.isnan())
    torch.testing.assert_close(found[1:], wanted[1:], rtol=2e-5, atol=2e-5)


def test_rows_of_one_request_attend_each_by_itself(poisoned: None) -> None:
    batch, reach, counts = Batch().written(by_kernels=False), Reach(16, 50, 3), (23, 2, 0, 9)
    torch.testing.assert_close(batch.decoded(counts, reach), batch.expected(counts, reach), rtol=2e-5, atol=2e-5)


def test_a_bound_that_is_too_large_changes_nothing(poisoned: None) -> None:
    """As in a captured graph, which serves all lengths up to the model's."""
    batch, reach, counts = Batch().written(by_kernels=False), Reach(16, 60, 3), (1, 1, 1, 1)
    torch.testing.assert_close(batch.decoded(counts, reach, most=384), batch.expected(counts, reach), rtol=2e-5, atol=2e-5)


def test_pages_may_have_no_cells_where_all_keys_are_read(poisoned: None) -> None:
    batch, expected = (Batch().written(by_kernels=False) for _ in range(2))
    batch.pages = torch.full(batch.pages.shape, torch.nan, device=DEVICE)
    key, value, slots = (torch.cat(x).to(DEVICE) for x in (batch.key, batch.value, batch.slots))
    write(batch.pages, LAYOUT, key, value, slots, has_cells=False)
    counts, reach = (1, 1, 1, 1), Reach(40, ALL, 5)
    torch.testing.assert_close(batch.decoded(counts, reach), expected.expected(counts, reach), rtol=2e-5, atol=2e-5)
    with pytest.raises(ValueError, match="bytes behind their keys and values, got 0"):
        batch.decoded(counts, Reach(40, 90, 5))


def test_rows_that_are_none_get_zeros(poisoned: None) -> None:
    batch, reach = Batch().written(by_kernels=False), Reach(16, 60, 3)
    rows, _ = batch.rows((1, 1, 1, 1))
    rows.length_of[1] = 0
    output = torch.full((4, 6, 16), torch.nan, device=DEVICE)
    decode(batch.query[:4], batch.pages, LAYOUT, rows, reach, probes_table(reach, LAYOUT, 333, DEVICE), SCALE, output)
    assert bool((output[1] == 0).all())
    others = [0, 2, 3]
    torch.testing.assert_close(output[others], batch.expected((1, 1, 1, 1), reach)[others], rtol=2e-5, atol=2e-5)


def test_only_some_tokens_attend(poisoned: None) -> None:
    batch, reach = Batch().written(by_kernels=False), Reach(16, 60, 3)
    rows, _ = batch.rows((1, 1, 1, 1))
    output = torch.full((4, 6, 16), 7.0, device=DEVICE)
    some = rows._replace(tokens=torch.tensor([3, 0], dtype=torch.int32, device=DEVICE))
    decode(batch.query[:4], batch.pages, LAYOUT, some, reach, probes_table(reach, LAYOUT, 333, DEVICE), SCALE, output)
    torch.testing.assert_close(output[[0, 3]], batch.expected((1, 1, 1, 1), reach)[[0, 3]], rtol=2e-5, atol=2e-5)
    assert bool((output[[1, 2]] == 7.0).all())


@pytest.mark.parametrize("layout", [PageLayout(3, 64, 24, 8), PageLayout(1, 48, 16, 32), PageLayout(2, 16, 16, 16)])
def test_pages_of_other_sizes(layout: PageLayout, poisoned: None) -> None:
    batch, reach, counts = Batch((200, 97, 260), layout, 2).written(by_kernels=False), Reach(20, 0, 4), (2, 1, 3)
    torch.testing.assert_close(batch.decoded(counts, reach), batch.expected(counts, reach), rtol=2e-5, atol=2e-5)


@pytest.mark.gpu  # the interpreter has no products in bfloat16
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reach", [Reach(16, 0, ALL), Reach(16, 0, 3)], ids=["all", "few"])
def test_pages_of_two_byte_numbers(dtype: torch.dtype, reach: Reach, poisoned: None) -> None:
    batch, counts = Batch(dtype=dtype).written(by_kernels=False), (1, 1, 1, 1)
    torch.testing.assert_close(batch.decoded(counts, reach), batch.expected(counts, reach), rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize(
    "layout", [LAYOUT, PageLayout(2, 64, 16, 8), PageLayout(1, 48, 24, 16), PageLayout(1, 192, 16, 16)], ids=str
)
def test_blocks_are_grouped_as_in_torch(layout: PageLayout) -> None:
    ours, theirs = (Batch((200, 97, 260), layout).written(by_kernels=kernels) for kernels in (True, False))
    for length, table in zip(ours.lengths, ours.table, strict=True):
        full = table[: length // layout.size].long()
        assert torch.equal(ours.pages[full], theirs.pages[full])
        found, wanted = ([x[full] for x in layout.summaries(batch.pages)] for batch in (ours, theirs))
        assert torch.equal(found[3], wanted[3])
        assert torch.equal(found[4], wanted[4])
        for own, other in zip(found[:3], wanted[:3], strict=True):
            torch.testing.assert_close(own, other, rtol=1e-2, atol=1e-3)
    rest = ours.table[0, 200 // layout.size].long()
    assert bool((layout.summaries(ours.pages).order[rest] == 255).all())  # a block that is not full has no cells yet


def test_cells_that_are_empty_start_again() -> None:
    """Many keys that are the same: k-means finds cells without keys, which begin anew at keys that are far away."""
    layout = PageLayout(1, 64, 16, 16)
    batches = [Batch((64,), layout) for _ in range(2)]
    for batch, kernels in zip(batches, (True, False), strict=True):
        batch.key[0][:58] = batch.key[0][0].clone()
        batch.key[0][58:] = 5 * torch.randn(6, 1, 16, generator=torch.Generator().manual_seed(3))
        batch.written(by_kernels=kernels)
    found, wanted = (layout.summaries(batch.pages) for batch in batches)
    page = int(batches[0].table[0, 0])
    assert torch.equal(found.stop[page], wanted.stop[page])
    assert torch.equal(found.order[page], wanted.order[page])


def test_tokens_without_a_slot_are_written_nowhere() -> None:
    batch = Batch((40,))
    before = batch.pages.untyped_storage().tolist()
    key = torch.randn(3, 2, 16, device=DEVICE)
    write(batch.pages, LAYOUT, key, key, torch.full((3,), -1, device=DEVICE))
    write(batch.pages, LAYOUT, key[:0], key[:0], torch.full((0,), -1, device=DEVICE))
    assert batch.pages.untyped_storage().tolist() == before


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("group", "layout"), [(1, LAYOUT), (3, LAYOUT), (2, PageLayout(1, 128, 16, 16)), (2, PageLayout(3, 64, 24, 8))]
)
def test_prompts_are_read_exactly(dtype: torch.dtype, group: int, layout: PageLayout, poisoned: None) -> None:
    """In blocks smaller than a tile of keys, and in larger ones; with columns that fill a tile, and fewer."""
    batch, counts = Batch((333, 17, 64, 290), layout, group, dtype).written(by_kernels=False), (40, 17, 1, 25)
    rows, starts = batch.rows(counts)
    query = batch.query[: starts[-1]]
    is_read = torch.tensor([1, 1, 0, 1], dtype=torch.int8, device=DEVICE)
    output = torch.full((starts[-1], layout.heads * group, layout.value_dim), 7.0, device=DEVICE, dtype=dtype)
    start = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
    read_exactly(query, batch.pages, layout, rows, Prompts(start, is_read, (40, 17, 25)), SCALE, output)
    expected = batch.expected(counts, Reach(16, ALL, None))
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    read = torch.arange(starts[-1]) != 57
    torch.testing.assert_close(output[read], expected[read], rtol=tolerance, atol=tolerance)
    assert bool((output[57] == 7.0).all())


def test_what_kernels_do_not_serve_is_told() -> None:
    layout = PageLayout(8, 256, 128, 128)
    reach = Reach(64, 8192, None)
    assert unsupported(reach, layout, 4, 262_144) is None
    assert unsupported(reach, layout, 4, 100) is None
    assert unsupported(reach, layout, 65, 4096) == "more than 64 query heads per head of keys"
    assert str(unsupported(reach, layout, 16, 1 << 21)).endswith("allow shorter requests, or fewer probes")


def test_rows_attend_some_at_a_time_where_they_take_much_memory(monkeypatch: pytest.MonkeyPatch, poisoned: None) -> None:
    batch, reach, counts = Batch().written(by_kernels=False), Reach(16, 50, 3), (5, 1, 0, 3)
    whole, launched = batch.decoded(counts, reach), []
    monkeypatch.setattr(steps, "SCRATCH_BYTES", 1 << 14)
    original = steps._decode
    monkeypatch.setattr(steps, "_decode", lambda *given: (launched.append(len(given[3].tokens)), original(*given)))
    torch.testing.assert_close(batch.decoded(counts, reach), whole, rtol=1e-6, atol=1e-6)
    assert sum(launched) == 9
    assert len(launched) > 1


def test_a_row_that_reads_all_of_its_keys(poisoned: None) -> None:
    """A row of a prompt among those of answers, longer than the bound of what others read one by one."""
    batch, reach, exactly = Batch().written(by_kernels=False), Reach(16, 60, 3), Reach(16, ALL, None)
    rows, _ = batch.rows((1, 1, 1, 1))
    rows.length_of[0] *= -1
    output = torch.full((4, 6, 16), torch.nan, device=DEVICE)
    decode(batch.query[:4], batch.pages, LAYOUT, rows, reach, probes_table(reach, LAYOUT, 333, DEVICE), SCALE, output)
    wanted = torch.cat([batch.expected((1, 1, 1, 1), exactly)[:1], batch.expected((1, 1, 1, 1), reach)[1:]])
    torch.testing.assert_close(output, wanted, rtol=2e-5, atol=2e-5)


def test_programs_that_go_through_many_tiles(monkeypatch: pytest.MonkeyPatch, poisoned: None) -> None:
    batch, reach, counts = Batch((900, 17, 640)).written(by_kernels=False), Reach(16, 400, 3), (1, 1, 1)
    whole = batch.decoded(counts, reach)
    torch.testing.assert_close(whole, batch.expected(counts, reach), rtol=2e-5, atol=2e-5)
    monkeypatch.setattr(steps, "PROGRAMS", 1)
    torch.testing.assert_close(batch.decoded(counts, reach), whole, rtol=1e-5, atol=1e-5)


def test_keys_of_a_head_may_lie_together(poisoned: None) -> None:
    """As in a benchmark, which has them head by head."""
    pages = []
    for apart in (False, True):
        batch = Batch((70,))
        key, value = (x[0].to(DEVICE) for x in (batch.key, batch.value))
        if apart:
            key, value = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (key, value))
        write(batch.pages, LAYOUT, key, value, batch.slots[0].to(DEVICE))
        pages.append(batch.pages[batch.table[0, :2].long()])
    assert torch.equal(*pages)


def test_what_is_known_of_the_tokens_of_a_step() -> None:
    """Three requests, the second of which is at the end of its prompt, and a fourth that is padding."""
    buffers = StepBuffers(12, DEVICE)
    buffers.length_of.fill_(99)
    start = torch.tensor([0, 1, 6, 8, 8], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([70, 33, 2, 0], dtype=torch.int32, device=DEVICE)
    buffers.fill(start, lengths)
    assert buffers.request_of.tolist()[:8] == [0, 1, 1, 1, 1, 1, 2, 2]
    assert buffers.length_of.tolist() == [70, 29, 30, 31, 32, 33, 1, 2, 0, 0, 0, 0]
    assert bool((buffers.request_of < 4).all())
    buffers.fill(start, lengths, torch.tensor([1, 0, 0, 1], dtype=torch.int8, device=DEVICE))
    assert buffers.length_of.tolist() == [-70, 29, 30, 31, 32, 33, 1, 2, 0, 0, 0, 0]
