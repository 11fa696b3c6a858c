"""`ShardedStore`: what ranks compute together is what one process computes that holds the same segments and cells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew, crew
from sharded_cases import (
    ALL,
    SMALL,
    Alone,
    Source,
    Step,
    alone,
    carry_out,
    on_ranks,
    one_store,
    opened_positions,
    random_steps,
)
from torch import Tensor

import nearfield as nf
from nearfield import tensor_file
from nearfield.cells.cache import attention
from nearfield.cells.cache.store import CellStore
from nearfield.distributed import Ranks, ShardedStore, decode, files
from nearfield.distributed.group import Pending
from nearfield.distributed.layout import ZigZag
from nearfield.distributed.share import Share

F64 = torch.float64
SLOW = pytest.mark.slow
FEW, EVERYTHING = nf.Cells(probes=3, **SMALL), nf.Cells(probes=ALL, **SMALL)
GROUPED, PLAIN = (2, 2, 8, 6, F64), (2, 1, 8, 8, F64)
GENERATION: list[Step] = [("append", 150), ("close",), *[step for _ in range(30) for step in (("append", 1), ("attend", 1))]]
IN_CHUNKS: list[Step] = [step for rows in (37, 1, 30, 9, 1, 71) for step in (("append", rows), ("attend", rows))]
PADDED: list[Step] = [("append", 60), ("mark", [0, 23]), *GENERATION[1:]]
REORDERED: list[Step] = [*GENERATION, ("repeat", 2), ("append", 1), ("attend", 1), ("select", [3, 0]), *GENERATION[2:8]]
CROPPED: list[Step] = [*GENERATION, ("crop", 101), *GENERATION[2:], ("crop", 3), ("append", 40), ("attend", 40)]
# The first segment is grouped without queries, those after it with them, until nothing is left of it.
MIXED: list[Step] = [("append", 24), ("close",), ("append", 40), ("close", 40), *GENERATION[2:42]]
QUERIED: list[Step] = [*MIXED, ("crop", 25), *GENERATION[2:42], ("crop", 3), ("append", 60), ("close", 60), *GENERATION[2:42]]


@pytest.fixture(scope="module")
def ranks() -> Crew:
    return crew()


def check(crew: Crew, cases: list[Any], size: int, expected: list[list[Tensor]], close: float = 1e-11) -> list[Any]:
    """On so many ranks, all cases give these outputs, bit by bit the same on all ranks."""
    found = crew.run(on_ranks, cases, ranks=size)
    for number, wanted in enumerate(expected):
        outputs = [result[number][0] for result in found]
        for other in outputs[1:]:
            assert all(torch.equal(x, y) for x, y in zip(outputs[0], other, strict=True))
        for place, (x, y) in enumerate(zip(outputs[0], wanted, strict=True)):
            off = float((x - y).abs().max())
            assert off < close, f"case {number}, {size} ranks: attend {place} is off by {off}"
    return found


@pytest.mark.parametrize("size", [pytest.param(1, marks=SLOW), 2, 3, pytest.param(4, marks=SLOW)])
def test_ranks_are_one_process_with_the_same_cells(ranks: Crew, size: int) -> None:
    steps = (GENERATION, IN_CHUNKS, PADDED, REORDERED, CROPPED, QUERIED)
    cases = [(FEW, {}, own, form, 2) for own in steps for form in (GROUPED, PLAIN)]
    found = check(ranks, cases, size, [alone(size, case) for case in cases])
    held = [result[0][1] for result in found]
    assert sum(held) == 180
    assert max(held) - min(held) <= 16


@pytest.mark.parametrize("size", [pytest.param(2, marks=SLOW), 3, pytest.param(4, marks=SLOW)])
def test_with_all_cells_opened_it_is_exact_attention(ranks: Crew, size: int) -> None:
    steps = (GENERATION, IN_CHUNKS, PADDED, REORDERED, CROPPED)
    cases = [(EVERYTHING, {"balance": balance}, own, GROUPED, 2) for own in steps for balance in ("global", "local")]
    check(ranks, cases, size, [one_store(case) for case in cases])


@pytest.mark.parametrize("size", [pytest.param(2, marks=SLOW), pytest.param(3, marks=SLOW), 4])
def test_random_operations(ranks: Crew, size: int) -> None:
    seeds = range(10 * size, 10 * size + 4)
    few = [(FEW, {}, random_steps(seed, 2, bool(seed % 2)), GROUPED, 2) for seed in seeds]
    everything = [(EVERYTHING, {"balance": "local"}, *case[2:]) for case in few]
    expected = [*(alone(size, case) for case in few), *map(one_store, everything)]
    check(ranks, [*few, *everything], size, expected)


def test_a_long_open_end(ranks: Crew) -> None:
    """Of the keys in no closed segment, which several ranks have, the latest 64 count where cells are chosen."""
    method = nf.Cells(probes=3, segment=100, cell_size=5, sinks=4, window=8)
    steps: list[Step] = [("append", 290), ("close",), *GENERATION[2:42], ("append", 60), ("attend", 60)]
    case = (method, {}, steps, GROUPED, 2)
    check(ranks, [case], 3, [alone(3, case)])


def recorded_cells(group: Any, case: Any) -> list[Tensor]:
    """For every step, which own keys are in cells that this rank opens, `[heads, length]`, by their positions."""
    method, options, steps, form, batch = case
    store, found = ShardedStore(method, group, **options), []
    find, attend = decode.opened_places, decode.attend_to_own
    at: list[Share] = []

    def attended(ranks: Any, share: Share, *arguments: Any) -> tuple[Tensor, Tensor]:
        at[:] = [share]
        return attend(ranks, share, *arguments)

    def recorded(flat: Any, opened: Tensor, heads: int, taken: Tensor) -> tuple[Tensor, Tensor]:
        place, missing = find(flat, opened, heads, taken)
        share = at[0]
        own = share.own
        bounds = torch.tensor(own.bounds)
        number = own.order.flat.gather(1, place) + bounds[torch.searchsorted(bounds, place, right=True) - 1]
        position = share.deal.positions(share.rank, slice(0, share.length))[number].masked_fill(missing, share.length)
        mine = torch.zeros(heads, share.length + 1, dtype=torch.bool).scatter_(1, position, True)
        found.append((share.length, mine[:, : share.length]))
        return place, missing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "opened_places", recorded)
        patch.setattr(decode, "attend_to_own", attended)
        carry_out(store, steps, Source(*form), batch)
    return found


def test_the_cells_that_one_process_opens_are_opened(ranks: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those, and no others, each by the rank that has it."""
    case = (FEW, {}, GENERATION, GROUPED, 2)
    found = ranks.run(recorded_cells, case, ranks=3)
    expected, single = [], Alone(FEW, 3)
    find = attention.opened_places

    def recorded(flat: Any, opened: Tensor, heads: int, taken: Tensor | None) -> tuple[Tensor, Tensor]:
        assert single.state is not None
        assert taken is None
        expected.append((single.length, opened_positions(single.state, opened)))
        return find(flat, opened, heads)

    monkeypatch.setattr(attention, "opened_places", recorded)
    carry_out(single, GENERATION, Source(*GROUPED), 2)
    monkeypatch.undo()
    by_rank = [dict(own) for own in found]
    assert len(expected) == 30
    for length, wanted in expected:
        own = [steps.get(length, torch.zeros_like(wanted)).int() for steps in by_rank]
        assert torch.equal(sum(own), wanted.int())  # type: ignore[arg-type]


def test_the_best_of_all_and_of_equal_ones_the_first() -> None:
    generator = torch.Generator().manual_seed(0)
    offered = torch.randint(0, 5, (3, 40, 4), generator=generator).double()
    offered[1, :20, 2:] = -torch.inf
    offered[:, 5] = -torch.inf
    taken = decode.among_best(offered, 4)
    for row in range(40):
        places = [(rank, column) for rank in range(3) for column in range(4)]
        best = sorted(places, key=lambda place: -float(offered[place[0], row, place[1]]))[:4]
        expected = {place for place in best if offered[place[0], row, place[1]] > -torch.inf}
        assert {place for place in places if taken[place[0], row, place[1]]} == expected


def test_what_is_sent(ranks: Crew) -> None:
    """A step of 2 entries, 2 heads of 2 queries, values of 6 and 3 probes, in float64; and a header for each."""
    heads, several = 2 * 2, [("append", 150), ("close",), ("append", 5), ("attend", 5)]
    for balance in ("global", "local"):
        for size in (2, 4):
            cases = [(FEW, {"balance": balance}, steps, GROUPED, 2) for steps in (GENERATION, several)]
            for (_, _, sent, _), (_, _, of_rows, _) in ranks.run(on_ranks, cases, ranks=size):
                others, chooses = size - 1, balance == "global"
                assert sent["outputs"] == 30 * others * heads * 2 * (6 + 1) * 8
                assert sent["checks"] == 30 * others * 64
                # Two normalisers, and 3 cells of each of two queries with the scores of both.
                assert sent.get("scores", 0) == 30 * others * heads * (2 + 2 * 3 * 2) * 8 * chooses
                assert "normalisers" not in sent
                assert sent["covariances"] == 2 * others * heads * (8 * 6 + 1) * 8  # one segment is closed on the way
                # Several rows exchange normalisers first.
                assert of_rows.get("normalisers", 0) == 5 * others * heads * 2 * 8 * chooses
                assert of_rows.get("scores", 0) == 5 * others * heads * 3 * 8 * chooses


def alone_on_one_rank(group: Any) -> tuple[bool, dict[str, int]]:
    """Whether one rank is a `CellStore`, bit by bit, and what it has sent."""
    sharded, own = ShardedStore(FEW, group), CellStore(FEW)
    found = [carry_out(store, [*PADDED, *IN_CHUNKS], Source(*GROUPED), 2) for store in (sharded, own)]
    return all(torch.equal(x, y) for x, y in zip(*found, strict=True)), dict(sharded.ranks.sent)


def test_one_rank_exchanges_nothing(ranks: Crew) -> None:
    assert ranks.run(alone_on_one_rank, ranks=1) == [(True, {})]


def order_of_a_step(group: Any, balance: str) -> list[str]:
    """When cells are scored, and when each exchange is waited for."""
    store, source, events = ShardedStore(FEW, group, balance=balance), Source(*GROUPED), []
    carry_out(store, GENERATION[:6], source, 2)
    score, wait = decode.score_cells, Pending.wait

    def scored(*arguments: Any) -> Any:
        events.append("scored")
        return score(*arguments)

    def waited(pending: Pending) -> Tensor:
        events.append(pending._what)
        return wait(pending)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "score_cells", scored)
        patch.setattr(Pending, "wait", waited)
        carry_out(store, [("append", 1), ("attend", 1)], source, 2)
    return events


def test_a_step_waits_for_two_messages_and_its_check_comes_with_the_first(ranks: Crew) -> None:
    assert ranks.run(order_of_a_step, "global", ranks=2) == [["scored", "checks", "outputs"]] * 2
    assert ranks.run(order_of_a_step, "local", ranks=2) == [["scored", "checks"]] * 2


def nobody_sees_a_key(group: Any) -> bool:
    """Whether outputs of rows that see no key of a rank do not count, whatever they are."""
    ranks = Ranks(group)
    output, lse = torch.full((3, 3, 4), torch.nan if ranks.rank else 1.0), torch.full((3, 3), -torch.inf)
    output[1], lse[1] = 2.0 + ranks.rank, -1e4
    if ranks.rank == 0:
        lse[2] = 5.0
    found = decode.merged(ranks, output, lse)
    return torch.equal(found, torch.tensor([0.0, 2.5, 1.0])[:, None, None].expand_as(found))


def test_rows_that_see_no_key_are_zero(ranks: Crew) -> None:
    assert ranks.run(nobody_sees_a_key, ranks=2) == [True, True]


@pytest.mark.parametrize("size", [2, 3])
def test_offloaded_audited_and_guarded(ranks: Crew, size: int) -> None:
    """Offloading changes no bit. Audits tell the error of one process, and with `eps` as many cells are opened."""
    cases = [
        (FEW, options, GENERATION, GROUPED, 2) for options in ({"audit": True}, {"offload": True}, {"eps": 0.02, "audit": True})
    ]
    (audited, _, _, errors), (offloaded, *_), (_, _, _, few) = ranks.run(on_ranks, cases, ranks=size)[0]
    assert all(torch.equal(x, y) for x, y in zip(audited, offloaded, strict=True))
    exact = one_store((EVERYTHING, *cases[0][1:]))
    for x, y, error in zip(audited, exact, errors, strict=True):
        pooled = ((x - y).flatten(1).norm(dim=1) / y.flatten(1).norm(dim=1)).max()
        assert abs(float(pooled) - error) < 1e-9
    assert few[0] <= 0.02 < errors[0]


def keys_and_values(group: Any) -> tuple[Tensor, Tensor]:
    store, source = ShardedStore(FEW, group), Source(*GROUPED)
    for count in (100, 3, 40):
        store.append(*source.keys(2, count))
        store.close()
    assert store.keys is not None
    assert store.values is not None
    return store.keys, store.values


def test_keys_and_values_are_gathered(ranks: Crew) -> None:
    source = Source(*GROUPED)
    pairs = [source.keys(2, count) for count in (100, 3, 40)]
    for found in ranks.run(keys_and_values, ranks=3):
        for mine, given in zip(found, zip(*pairs, strict=True), strict=True):
            assert torch.equal(mine, torch.cat(given, 2))


def from_prompt(group: Any, length: int) -> tuple[Tensor, int]:
    """A prompt of which each rank is given its tokens alone, and steps after it."""
    store, source = ShardedStore(nf.Cells(probes=ALL), group), Source(1, 2, 8, 8, F64)
    layout = ZigZag(length, store.ranks.size)
    key, value = source.keys(1, length)
    store.append_shard(*(layout.own(x, 2, store.ranks.rank) for x in (key, value)), layout)
    store.close()
    held = store.held
    outputs = []
    for _ in range(20):
        store.append(*source.keys(1, 1))
        outputs.append(store.attend(source.queries(1, 1)))
    assert store.closed == (0 if length < 8208 else (length - 16) // 16 * 16)
    return torch.cat(outputs), held


@pytest.mark.parametrize("length", [500, 9000])
def test_a_prompt_that_was_read_in_shares(ranks: Crew, length: int) -> None:
    expected = torch.cat(
        one_store((nf.Cells(probes=ALL), {}, [("append", length), ("close",), *GENERATION[2:42]], (1, 2, 8, 8, F64), 1))
    )
    found = ranks.run(from_prompt, length, ranks=3)
    for outputs, _ in found:
        assert (outputs - expected).abs().max() < 1e-11
    assert [held for _, held in found] == ([ZigZag(length, 3).on(rank) for rank in range(3)] if length > 8208 else [500, 0, 0])


def prompt_at_once(group: Any) -> tuple[list[Tensor], int]:
    steps: list[Step] = [("append", 9000), ("close",), *GENERATION[2:30]]
    store = ShardedStore(nf.Cells(), group)
    return carry_out(store, steps, Source(1, 2, 8, 8, F64), 1), store.held


def test_a_long_prompt_with_default_sizes(ranks: Crew) -> None:
    """It is a segment per rank, and rows see them through cells."""
    steps: list[Step] = [("append", 9000), ("close",), *GENERATION[2:30]]
    expected = carry_out(Alone(nf.Cells(), 3), steps, Source(1, 2, 8, 8, F64), 1)
    found = ranks.run(prompt_at_once, ranks=3)
    for outputs, held in found:
        assert all((x - y).abs().max() < 1e-11 for x, y in zip(outputs, expected, strict=True))
        assert held in (2992, 2992 + 38)


def test_bad_arguments(ranks: Crew) -> None:
    for found in ranks.run(refusals, ranks=2):
        assert "balance must be one of global, local, got 'equal'" in found[0]
        assert "its keys of ZigZag(length=10, size=2)" in found[1]
        assert "nothing is stored yet" in found[2]
        assert "no room made in advance" in found[3]
        assert "goes to an empty store" in found[4]
        assert "there are 4 queries for 3 keys" in found[5]
        assert found[6] == "still at work"


def refusals(group: Any) -> list[str]:
    source = Source(*GROUPED)
    empty, store = ShardedStore(FEW, group), ShardedStore(FEW, group)
    store.append(*source.keys(2, 3))
    found = []
    for attempt in (
        lambda: ShardedStore(FEW, group, balance="equal"),
        lambda: empty.append_shard(*source.keys(2, 3), ZigZag(10, 2)),
        lambda: empty.attend(source.queries(2, 1)),
        lambda: store.reserve(4),
        lambda: store.append_shard(*source.keys(2, 3), ZigZag(6, 2)),
        lambda: store.attend(source.queries(2, 4)),
    ):
        try:
            attempt()
            found.append("nothing")
        except ValueError as error:
            found.append(str(error))
    store.attend(source.queries(2, 2))
    return [*found, "still at work"]


def saved(group: Any, folder: Path, steps: list[Step], method: nf.Cells) -> None:
    store = ShardedStore(method, group)
    carry_out(store, steps, Source(*GROUPED), 2)
    assert store.share is not None
    files.save_shares(folder, store.ranks, [store.share], {})


def loaded(group: Any, folder: Path, steps: list[Step], batch: int, method: nf.Cells, offload: bool) -> list[Tensor]:
    ranks = Ranks(group)
    _, (share,) = files.load_shares(folder, ranks, lambda about: [method.partition], offload=offload)
    store = ShardedStore(method, ranks, offload=offload)
    store.restore(share)
    return carry_out(store, steps, Source(*GROUPED, seed=1), batch)


def summed_up(share: Share) -> tuple[Tensor, bool, bool]:
    return share.own.tables.cross, share.by_queries, share.own.tables.by_queries


def sums_before_and_after(group: Any, folder: Path, cases: list[list[Step]]) -> list[Any]:
    found = []
    for steps in cases:
        saved(group, folder, steps, FEW)
        store = ShardedStore(FEW, group)
        carry_out(store, steps, Source(*GROUPED), 2)
        assert store.share is not None
        _, (share,) = files.load_shares(folder, store.ranks, lambda about: [FEW.partition])
        found.append((summed_up(store.share), summed_up(share)))
    return found


def test_what_was_added_up_is_loaded_as_it_was(ranks: Crew, tmp_path: Path) -> None:
    """What is left of a sum after a crop has been rounded more often than a new sum of the same. Whether all cells were grouped
    as queries are large is known alike on all ranks."""
    cases: list[list[Step]] = [[*GENERATION, ("crop", 101)], MIXED, [("append", 5)], QUERIED]
    for found in ranks.run(sums_before_and_after, tmp_path, cases, ranks=2):
        for (before, *flags), (after, *loaded_flags) in found:
            assert torch.equal(before, after)
            assert flags == loaded_flags
        assert [flags for (_, *flags), _ in found] == [[False] * 2, [False] * 2, [True] * 2, [True] * 2]


def many_segments(group: Any, folder: Path) -> list[Any]:
    """Two layers that are alike, and another one, in files whose headers have room for few things."""
    shares, source = [], Source(1, 1, 2, 2, F64)
    for keys in (8000, 7000):
        store = ShardedStore(FEW, group)
        store.append(*source.keys(1, keys))
        assert store.share is not None
        shares.append(store.share)
    shares = [shares[0], *shares]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_file, "MOST_HEADER", 1 << 13)
        files.save_shares(folder, store.ranks, shares, {})
        _, found = files.load_shares(folder, store.ranks, lambda about: [FEW.partition] * 3)
    return [[share.facts for share in own] for own in (shares, found)]


def test_there_may_be_many_segments(ranks: Crew, tmp_path: Path) -> None:
    for before, after in ranks.run(many_segments, tmp_path, ranks=2):
        assert before == after


@pytest.mark.parametrize("segment", [16, 70], ids=["moved", "dealt anew"])
def test_a_store_goes_on_after_it_was_saved(ranks: Crew, segment: int, tmp_path: Path) -> None:
    """Padding, batch entries that have changed, and whatever comes after, on any number of ranks."""
    method = nf.Cells(probes=ALL, **SMALL | {"segment": segment})
    for number, (steps, batch) in enumerate(((PADDED, 2), (REORDERED, 2), ([("append", 5), ("attend", 1)], 2))):
        more: list[Step] = [("append", 30), ("attend", 30), ("crop", 21), *GENERATION[2:42]]
        if number < 2:
            more = [("crop", 80), ("append", 20), ("attend", 1), *more]
        alone = CellStore(method)
        carry_out(alone, steps, Source(*GROUPED), 2)
        expected = carry_out(alone, more, Source(*GROUPED, seed=1), batch)
        folder = tmp_path / str(number)
        ranks.run(saved, folder, steps, method, ranks=3)
        for size in (1, 2, 3, 4):
            found = ranks.run(loaded, folder, more, batch, method, size == 2, ranks=size)
            for outputs in found:
                for x, y in zip(outputs, expected, strict=True):
                    assert (x - y).abs().max() < 1e-11


def with_a_value_that_is_not_finite(group: Any) -> Tensor:
    store, source = ShardedStore(FEW, group), Source(*GROUPED)
    store.append(*source.keys(2, 40))
    store.close()
    key, value = source.keys(2, 10)
    value[0, 1, 6] = torch.inf  # on one of the ranks, and in no row before its own
    store.append(key, value)
    return store.attend(source.queries(2, 10))


def test_a_value_that_is_not_finite_spoils_the_rows_that_see_it(ranks: Crew) -> None:
    """Ranks agree about how many rows to take at a time: all of them take single rows."""
    outputs = ranks.run(with_a_value_that_is_not_finite, ranks=3)
    spoilt = torch.zeros(2, 4, 10, dtype=torch.bool)
    spoilt[0, 2:, 6:] = True
    for output in outputs:
        assert torch.equal(~output.isfinite().all(3), spoilt)
