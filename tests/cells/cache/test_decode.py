"""One step of a cache by the Triton kernels, held to the step in torch: interpreted on a CPU, for real on a GPU."""

from __future__ import annotations

import math

import pytest
import torch
from by_hand import seeded
from torch import Tensor

import nearfield as nf
from nearfield.cells.cache.attention import Opening, cached_attention, scaled_queries
from nearfield.cells.cache.graph import StepGraph
from nearfield.cells.cache.state import CacheState
from nearfield.cells.cache.store import CellStore
from nearfield.checks import MOST

pytest.importorskip("triton")

from nearfield.cells.cache.decode import GRAIN, STEPS, decode, most_open, unsupported
from nearfield.cells.cache.graph import captured_reads, check_capturable
from nearfield.cells.triton import far_field
from nearfield.cells.triton.decode import choose_and_read_open_end, merge_parts
from nearfield.cells.triton.tuning import decode_tiles
from nearfield.kernels import replay

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = {"cell_size": 4, "sinks": 5, "window": 8}
VOID = far_field.VOID.value


def filled(
    length: int,
    probes: int = 3,
    batch: int = 2,
    heads: int = 2,
    dim: int = 16,
    value_dim: int = 16,
    padding: int = 0,
    segment: int = 32,
) -> CellStore:
    store = CellStore(nf.Cells(probes=probes, **SIZES, segment=segment))
    key, value = (torch.randn(batch, heads, length, wide, generator=seeded(wide + i)) for i, wide in enumerate((dim, value_dim)))
    counts = None
    if padding:
        counts = torch.ones(batch, length, dtype=torch.bool)
        counts[0, :padding] = False
    last = length - 1
    store.append(key[:, :, :last].to(DEVICE), value[:, :, :last].to(DEVICE), None if counts is None else counts[:, :last])
    store.close()
    store.append(key[:, :, last:].to(DEVICE), value[:, :, last:].to(DEVICE), None if counts is None else counts[:, last:])
    return store


def both(store: CellStore, group: int = 2, scale: float = 0.3) -> tuple[Tensor, Tensor]:
    """A step by the kernels, and in torch."""
    state = the(store)
    batch, heads, _, dim = state.keys.storage.shape
    query = 2 * torch.randn(batch, heads * group, 1, dim, generator=seeded(7)).to(DEVICE)
    assert unsupported(state, query, store.probes) is None
    expected = cached_attention(state, scaled_queries(query, heads, scale), state.length - 1, 1, store.opening)
    return decode(state, query.reshape(batch * heads, group, dim), scale, store.opening), expected


def the(store: CellStore) -> CacheState:
    assert store.state is not None
    return store.state


def assert_alike(found: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(*found, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("what", ["query", "keys", "values"])
@pytest.mark.parametrize("place", [3, 40, 202])
def test_what_is_not_a_number_is_never_left_out(place: int, what: str) -> None:
    """Of the first keys, of cells, and of the open end."""
    store = filled(203)
    state = the(store)
    query = 2 * torch.randn(2, 4, 1, 16, generator=seeded(7)).to(DEVICE)
    if what == "query":
        query[0, 0, 0, 2] = torch.nan
    else:
        getattr(state, what).storage[0, 0, place, 2] = torch.nan
    wanted = cached_attention(state, scaled_queries(query, 2, 0.3), state.length - 1, 1, Opening(1000))
    found = decode(state, query.reshape(4, 2, 16), 0.3, Opening(1000))
    assert bool(wanted.isnan().any())
    assert torch.equal(found.isnan(), wanted.isnan())
    torch.testing.assert_close(found[1:], wanted[1:], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("length", [1, 20, 41, 100, 203])
@pytest.mark.parametrize("group", [1, 3])
def test_a_step_is_the_step_in_torch(length: int, group: int) -> None:
    assert_alike(both(filled(length), group))


def test_spreads_in_scores_are_cut_off_later_where_keys_are_grouped_as_queries_are_large() -> None:
    store = filled(203)
    state = the(store)
    outputs = []
    for by_queries in (False, True):
        store.state = state.but(tables=state.tables.but(by_queries=by_queries))
        found = both(store, scale=2.0)
        assert_alike(found)
        outputs.append(found[0])
    assert not torch.allclose(*outputs, atol=0.01)


@pytest.mark.parametrize("padding", [0, 150])
def test_an_open_end_of_several_tiles(padding: int) -> None:
    """Longer than what stands for it where cells are chosen."""
    store = filled(300, segment=160, padding=padding)
    assert store.length - store.closed == 140
    assert_alike(both(store, 3))


def test_columns_that_fill_no_block() -> None:
    assert_alike(both(filled(150, dim=24, value_dim=40), 5))


@pytest.mark.long
def test_all_cells_opened_is_exact_attention() -> None:
    store = filled(150, probes=10**6)
    found, expected = both(store)
    assert_alike((found, expected))
    state = the(store)
    query = 2 * torch.randn(2, 4, 1, 16, generator=seeded(7)).to(DEVICE)
    keys, values = (state.in_order(x) for x in (state.keys, state.values))
    exact = torch.nn.functional.scaled_dot_product_attention(query, keys, values, scale=0.3, enable_gqa=True)
    assert_alike((found, exact.reshape(found.shape)))


def test_padding_is_not_seen() -> None:
    assert_alike(both(filled(150, padding=70)))
    assert_alike(both(filled(40, padding=39)))


def test_padding_among_the_latest_keys() -> None:
    """A prompt that is padding up to the open end: what is padding there weighs nothing where cells are chosen."""
    store = filled(203, batch=1, heads=1, segment=160)
    state = the(store)
    counts = torch.ones(1, 203, dtype=torch.bool, device=DEVICE)
    counts[0, 180:195] = False
    loud = state.keys.view(slice(180, 195))
    found, _ = both(store, 2)
    state.key_padding = counts
    loud.mul_(50.0)  # padding is zero in a store; here it is not, and may not matter either way
    assert_alike(both(store, 2))
    assert not torch.allclose(both(store, 2)[0], found)


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [{"length": 150, "group": 17}, {"length": 150, "padding": 149}, {"length": 64, "probes": 8}, {"length": 203, "probes": 200}],
    ids=str,
)
def test_cases_at_the_edge(case: dict[str, int]) -> None:
    case = dict(case)
    assert_alike(both(filled(**{name: x for name, x in case.items() if name != "group"}), case.get("group", 2)))


def test_cells_that_are_all_empty() -> None:
    """All keys of closed segments are first keys, which are read anyway."""
    store = CellStore(nf.Cells(segment=16, cell_size=4, sinks=32, window=0, probes=2))
    store.append(*torch.randn(2, 1, 2, 40, 16, generator=seeded(0)).to(DEVICE))
    store.close()
    assert float(the(store).tables.size.filled.sum()) == 0.0
    assert_alike(both(store))


def test_a_mask_of_any_layout() -> None:
    """A mask that is a view, and that its maker changes later."""
    store, other = (filled(120) for _ in range(2))
    counts = torch.ones(120, 2, dtype=torch.bool, device=DEVICE).T
    counts[1, 110:114] = False
    for one in (store, other):
        the(one).settled = the(one).closed
    other.mark(counts.contiguous())
    store.mark(counts)
    counts[:] = False
    assert_alike((both(store)[0], both(other)[1]))


def test_the_kernels_of_a_step_are_launched_from_a_list() -> None:
    """From the third step on, and for another store of the same sizes at once. A closed segment is another list."""
    replay.forget()
    stores = [CellStore(nf.Cells(probes=3, segment=32, **SIZES)) for _ in range(2)]
    for number, store in enumerate(stores):
        store.append(*torch.randn(2, 2, 2, 140, 16, generator=seeded(number)).to(DEVICE))
        store.close()
    recorded: list[int] = []
    for turn in range(4):
        for number, store in enumerate(stores):
            assert_alike(both(store))
            recorded.append(sum(isinstance(tape, replay.Tape) for tape in replay._TAPES.values()))
            store.append(*torch.randn(2, 2, 2, 1, 16, generator=seeded(10 * turn + number)).to(DEVICE))
    # Appending to a full buffer moves it, and its rows lie further apart: another list.
    assert recorded == [0, 1, 1, 2, 2, 2, 2, 2]
    # The same memory with fewer cells in it, and as many keys outside of them.
    closed, length = the(stores[1]).closed, stores[1].length
    stores[1].crop(length - 32)
    assert the(stores[1]).closed == closed - 32
    assert_alike(both(stores[1]))
    replay.forget()


def test_a_graph_knows_what_it_was_captured_for() -> None:
    """As many keys in closed segments, but of other segments: those have other cells."""
    stores = [CellStore(nf.Cells(cell_size=4, sinks=5, window=8), group_from=0) for _ in range(2)]
    key, value = torch.randn(2, 1, 2, 3000, 16, generator=seeded(0)).to(DEVICE)
    keys = []
    for store, ends in zip(stores, ([1032, 2056], [2056]), strict=True):
        for start, end in zip([0, *ends], [*ends, 2057], strict=False):
            store.append(key[:, :, start:end], value[:, :, start:end])
            store.close()
        keys.append(captured_reads(the(store))[0])
    assert [the(store).closed for store in stores] == [2048, 2048]
    assert keys[0] != keys[1]


def test_what_a_graph_cannot_go_on_with_is_said() -> None:
    store = filled(40)
    query = torch.randn(2, 4, 1, 16, device=DEVICE)
    assert check_capturable(store, query) is the(store)
    with pytest.raises(ValueError, match=r"store\.attend instead"):
        check_capturable(store, query.double())
    store.audit = True
    with pytest.raises(ValueError, match="neither audited nor watched"):
        check_capturable(store, query)
    store.audit = False
    store.append(*torch.randn(2, 2, 2, 1, 16, device=DEVICE), torch.tensor([[True], [False]]))
    with pytest.raises(ValueError, match="without padding"):
        check_capturable(store, query)


def test_a_segment_without_end_is_read_as_far_as_there_is_room() -> None:
    store = filled(100, segment=MOST)
    query = torch.randn(2, 4, 1, 16, device=DEVICE)
    assert check_capturable(store, query) is the(store)
    assert_alike(both(store))
    store.reserve(500)
    assert most_open(the(store)) == 600
    assert_alike(both(store))


def test_more_than_the_kernels_have_room_for_is_not_theirs() -> None:
    store = filled(150)
    state = the(store)
    assert unsupported(state, torch.randn(2, 2 * 64, 1, 16, device=DEVICE), 3) is None
    assert unsupported(state, torch.randn(2, 2 * 65, 1, 16, device=DEVICE), 3) is not None
    assert unsupported(state, torch.randn(2, 4, 2, 16, device=DEVICE), 3) is not None
    assert unsupported(state, torch.randn(2, 4, 1, 16, device=DEVICE, dtype=torch.float64), 3) is not None
    state.tables.size.length = 1 << 16
    assert unsupported(state, torch.randn(2, 2 * 4, 1, 16, device=DEVICE), 256) is None
    assert unsupported(state, torch.randn(2, 2 * 64, 1, 16, device=DEVICE), 256) is not None


def test_a_cell_with_something_that_is_not_finite_stays_closed() -> None:
    store = filled(150)
    tables = the(store).tables
    tables.log_exists.storage[:, :, 3] = -torch.inf
    tables.centroid.storage[:, :, 3] = 0.0
    tables.value.storage[:, :, 3] = 0.0
    assert_alike(both(store))


def test_a_beginning_that_somebody_else_keeps() -> None:
    """A memory: the first keys are in a tensor that all batch entries share, the others in the store."""
    whole = filled(203, batch=1)
    state = the(whole)
    base = state.closed - 32
    expected = both(whole)[1]
    for buffer in (state.keys, state.values):
        buffer.base = buffer.filled.clone()
        buffer.storage = buffer.storage[:, :, base:].contiguous()
        buffer.offset = base
    assert_alike((both(whole)[0], expected))


def test_the_number_of_keys_is_where_kernels_read_it() -> None:
    store = filled(100)
    place = the(store).device_length.tensor.data_ptr()
    for _ in range(3):
        assert the(store).sync_device_length().tolist() == [store.length]
        store.append(*torch.randn(2, 2, 2, 1, 16).to(DEVICE))
    store.crop(50)
    assert the(store).sync_device_length().tolist() == [50]
    assert the(store).device_length.tensor.data_ptr() == place


@pytest.mark.parametrize("length", [50, 100])
def test_the_number_of_keys_after_an_interrupt(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows whether the device has it; so it is told again."""
    store = filled(100)
    the(store).sync_device_length()
    store.crop(50)
    fill = Tensor.fill_

    def interrupted(tensor: Tensor, number: int) -> Tensor:
        fill(tensor, 7)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "fill_", interrupted)
        with pytest.raises(KeyboardInterrupt):
            the(store).sync_device_length()
    store.append(*torch.randn(2, 2, 2, length - 50, 16).to(DEVICE))
    assert the(store).sync_device_length().tolist() == [length]


def opened_by(scores: Tensor, lse: Tensor, probes: int) -> tuple[Tensor, Tensor]:
    """What `choose_and_read_open_end` opens for queries `[entries, group, cells]` and the masses that it leaves of ones."""
    entries, group, cells = scores.shape
    members, most, grains = 1 << (group - 1).bit_length(), GRAIN * (-(-cells // GRAIN)), -(-cells // GRAIN)
    log2_masses = torch.ones(entries, most, members, device=DEVICE)
    by_cell = torch.full_like(log2_masses, torch.nan)
    by_cell[..., :group] = VOID
    by_cell[:, :cells, :group] = scores.transpose(1, 2)
    grain_best = by_cell[..., :group].unflatten(1, (grains, GRAIN)).amax(2).transpose(1, 2).contiguous()
    nothing = torch.full((entries * group, 1), -torch.inf, device=DEVICE)
    opened, grain_list = torch.full((2, entries, probes), -7, dtype=torch.int32, device=DEVICE)
    unread = dict.fromkeys(("queries", "keys", "values", "key_padding", "device_length", "parts"), nothing)
    choose_and_read_open_end[(entries, 1)](
        scores=by_cell,
        log2_masses=log2_masses,
        recent_lse=lse.to(DEVICE),
        cell_lse=nothing,
        grain_best=grain_best,
        grain_list=grain_list,
        opened=opened,
        **unread,
        part_lse=nothing,
        heads=1,
        group=group,
        dim=16,
        value_dim=16,
        key_entry=0,
        value_entry=0,
        offset=0,
        closed=0,
        padding_entry=0,
        padded_cells=most,
        cell_tiles=1,
        probes=probes,
        part_count=1,
        open_end_parts=0,
        scale=1.0,
        lowest=-math.inf,
        PER=1,
        BK=16,
        BR=16,
        BD=16,
        BV=16,
        STEPS=STEPS,
        GRAIN=GRAIN,
        BG=members,
        BT=1,
        BN=1 << (grains - 1).bit_length(),
        BP=1 << (min(probes, grains) - 1).bit_length(),
        HAS_CELLS=True,
        HAS_PADDING=False,
        IP="tf32x3",
        PDL=False,
        num_warps=4,
    )
    return opened.cpu().long(), log2_masses[:, :cells, :group].transpose(1, 2).cpu()


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("probes", [1, 7, 200, 300])
def test_the_best_share_in_a_group_opens_a_cell(group: int, probes: int) -> None:
    scores = 4 * torch.randn(2, group, 300, generator=seeded(0))
    scores[0, :, 11] = VOID
    lse = 2 * torch.randn(2, group, generator=seeded(1))
    opened, masses = opened_by(scores, lse, probes)
    share = torch.where(scores > VOID / 2, scores - lse[..., None] * math.log(2), -torch.inf).amax(1)
    wide = (share[share > -torch.inf].max() - share[share > -torch.inf].min()) / 4**STEPS
    for own, best, left in zip(opened, share, masses, strict=True):
        cells = own[own >= 0]
        assert len(cells) == min(probes, int((best > -torch.inf).sum())) == len(cells.unique())
        assert float(best[cells].min()) >= float(best.sort(descending=True).values[len(cells) - 1]) - 2 * float(wide)
        assert torch.equal(left == -torch.inf, torch.isin(torch.arange(300), cells).expand(group, -1))


def test_ties_keep_out_nothing_that_is_better() -> None:
    """Many cells as good as the last one: those above are all there, wherever they stand."""
    scores = torch.zeros(1, 1, 300)
    scores[0, 0, [290, 299]] = torch.tensor([3.0, 5.0])
    scores[0, 0, :20] = -1.0
    opened, _ = opened_by(scores, torch.zeros(1, 1), 6)
    cells = opened[0]
    assert {290, 299} < set(cells.tolist())
    assert len(cells.unique()) == 6
    assert float(scores[0, 0, cells].min()) == 0.0


def test_cells_that_are_all_alike_are_opened_in_order() -> None:
    opened, _ = opened_by(torch.full((1, 2, 40), 2.5), torch.zeros(1, 2), 5)
    assert opened[0].tolist() == [0, 1, 2, 3, 4]
    opened, _ = opened_by(torch.full((1, 2, 40), VOID), torch.zeros(1, 2), 5)
    assert opened[0].tolist() == [-1] * 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 64, 96, 128, 160, 192, 224, 256])
def test_tiles_are_blocks_that_triton_multiplies(dim: int, dtype: torch.dtype) -> None:
    tiles = decode_tiles(dim, dtype, DEVICE)
    for size in (tiles.open_end, tiles.cells, tiles.far, tiles.opened):
        assert size >= 16
        assert size & (size - 1) == 0


def test_a_graph_is_for_a_card() -> None:
    store = filled(40)
    key, value, query = torch.randn(3, 2, 2, 1, 16)
    with pytest.raises(ValueError, match="on a GPU"):
        StepGraph(store, key, value, query)


@pytest.mark.parametrize("count", [3, 8, 20])
def test_nobody_reads_a_part_without_weight(count: int) -> None:
    """It was never written: there is anything in its place. Tiles of 8 parts, the last one not full."""
    generator = seeded(0)
    parts, lse = torch.randn(2, count, 16, generator=generator), torch.randn(2, count, generator=generator)
    empty = torch.arange(count) % 3 == 1
    expected = torch.einsum("rp,rpd->rd", (lse * math.log(2)).masked_fill(empty, -torch.inf).softmax(-1), parts)
    parts[:, empty], lse[:, empty] = torch.nan, -torch.inf
    parts, lse, zeros = parts.to(DEVICE), lse.to(DEVICE), torch.zeros(2, 16, 16, device=DEVICE)
    output = torch.empty(2, 16, device=DEVICE)
    merge_parts[(2, 1)](
        parts=parts,
        part_lse=lse,
        queries=zeros[:, 0],
        cross=zeros,
        pooled=zeros[:, 0, 0],
        output=output,
        group=1,
        dim=16,
        value_dim=16,
        part_count=count,
        first_far=count,
        far_parts=0,
        scale=1.0,
        PARTS=1 << (count - 1).bit_length(),
        BP=min(8, 1 << (count - 1).bit_length()),
        BD=16,
        BV=16,
        PDL=False,
        num_warps=4,
    )
    torch.testing.assert_close(output.cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_real_sizes_on_a_card(dim: int, dtype: torch.dtype) -> None:
    store = CellStore(nf.Cells(segment=512, cell_size=32, probes=6))
    key, value = (torch.randn(1, 2, 5000, dim, device="cuda").to(dtype) for _ in range(2))
    store.append(key, value)
    query = 2 * torch.randn(1, 8, 1, dim, device="cuda").to(dtype)
    found = store.attend(query)
    state = the(store)
    expected = cached_attention(state, scaled_queries(query, 2, dim**-0.5), 4999, 1, store.opening).view(found.shape)
    off = (found.double() - expected.double()).norm() / expected.double().norm()
    assert float(off) < {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]


@pytest.mark.gpu
def test_dependent_launches_read_nothing_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many steps in a row, each with other queries, and memory that is used again."""
    from nearfield.kernels import launch

    store = CellStore(nf.Cells(segment=2048, cell_size=64, probes=10))
    store.append(*torch.randn(2, 1, 2, 20_000, 128, device="cuda").bfloat16())
    queries = torch.randn(300, 1, 8, 1, 128, device="cuda").bfloat16()
    found = []
    assert launch.dependent_launch(queries)
    for pdl in (False, True):
        monkeypatch.setattr(launch, "HAS_PDL", pdl)
        found.append(torch.stack([store.attend(query) for query in queries]))
    assert torch.equal(*found)


@pytest.mark.gpu
def test_a_captured_step_goes_on_being_right() -> None:
    """Append and attend in a graph: every replay is one more token."""
    store = CellStore(nf.Cells(segment=64, cell_size=16, probes=6))
    key, value = torch.randn(2, 1, 2, 700, 64, device="cuda")
    query = torch.randn(1, 8, 700, 64, device="cuda")
    store.append(key[:, :, :610], value[:, :, :610])
    store.attend(query[:, :, 609:610])
    inputs = [x[:, :, 610:611].clone() for x in (key, value, query)]
    step = StepGraph(store, *inputs)
    for at in range(610, 700):
        for place, x in zip(inputs, (key, value, query), strict=True):
            place.copy_(x[:, :, at : at + 1])
        found = step()
        expected = cached_attention(the(store), scaled_queries(inputs[2], 2, 0.125), at, 1, store.opening)
        torch.testing.assert_close(found, expected.view(found.shape), atol=2e-5, rtol=2e-5)
    assert store.length == 700
    assert store.closed > 512
    for stored, given in ((store.keys, key), (store.values, value)):
        torch.testing.assert_close(stored, given, atol=0, rtol=0)
