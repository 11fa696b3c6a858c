"""Which keys are on which rank: every key once, in turn, in shares that are as equal as they can be."""

from __future__ import annotations

import random

import pytest

from nearfield.cells.sizes import CacheSizes
from nearfield.distributed.deal import Deal, Segment
from nearfield.distributed.layout import ZigZag

DEFAULT = CacheSizes.of(None, None, None, 16)
GIVEN = CacheSizes.of(64, None, 4, 16)


def owners(deal: Deal) -> list[int]:
    """The rank of each key; the segments follow one another."""
    found: list[int] = []
    for segment in deal.segments:
        assert segment.start == len(found)
        found += [segment.owner] * (segment.stop - segment.start)
    assert deal.length <= len(found) or not deal.segments
    return found[: deal.length]


@pytest.mark.parametrize("sizes", [DEFAULT, GIVEN], ids=["default", "given"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_key_is_on_one_rank(sizes: CacheSizes, ranks: int) -> None:
    chance, deal = random.Random(ranks), Deal(sizes, ranks)
    for _ in range(40):
        if chance.random() < 0.2:
            deal = deal.cropped(chance.randrange(deal.length + 1))
        else:
            deal = deal.extended(deal.length + chance.choice([1, 1, 30, 700, 9000]))
        found = owners(deal)
        start = chance.randrange(deal.length + 1)
        stop = chance.randrange(start, deal.length + 1)
        for rank in range(ranks):
            expected = [position for position in range(start, stop) if found[position] == rank]
            assert deal.positions(rank, slice(start, stop)).tolist() == expected
            assert deal.held_from(rank, start, stop) == len(expected)
            assert deal.held(rank) == found.count(rank)
        assert deal.digest == (hash(deal.segments) if deal.segments else deal.digest)


def test_one_rank_and_one_key_at_a_time_is_one_machine() -> None:
    deal, bounds = Deal(DEFAULT, 1), [0]
    for length in range(1, 20_000):
        deal = deal.extended(length)
    while bounds[-1] < 20_000:
        bounds.append(DEFAULT.next_end(bounds[-1], DEFAULT.next_close(bounds[-1])))
    assert [segment.stop for segment in deal.segments] == bounds[1:]


def test_segments_take_turns() -> None:
    deal = Deal(GIVEN, 3)
    for length in range(1, 500):
        deal = deal.extended(length)
    assert deal.segments == tuple(Segment(64 * i, 64 * i + 64, i % 3) for i in range(8))
    assert Deal(GIVEN, 3).extended(499).segments == deal.segments  # and so do those of a prompt


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_prompt_is_a_segment_per_rank(ranks: int) -> None:
    length = 20_007
    deal = Deal(DEFAULT, ranks).extended(length)
    *shares, running = deal.segments
    assert [share.owner for share in shares] == [*range(ranks)]
    assert running.start == shares[-1].stop == DEFAULT.next_end(0, length) <= length - DEFAULT.window
    lengths = [share.stop - share.start for share in shares]
    assert max(lengths) - min(lengths) <= 32
    assert running.owner == 0
    # Behind a segment that has begun, which gets no more than it would have had.
    more = Deal(DEFAULT, ranks).extended(3).extended(length)
    assert more.segments[0] == Segment(0, 8192, 0)
    assert len(more.segments) == ranks + 2


def test_a_small_prompt_is_not_cut_to_pieces() -> None:
    deal = Deal(CacheSizes.of(None, None, None, 16, group_from=0), 4).extended(2500)
    assert [segment.owner for segment in deal.segments] == [0, 1, 2]
    assert Deal(DEFAULT, 4).extended(8000).segments == (Segment(0, 8192, 0),)


def test_a_segment_that_was_cropped_gets_no_larger_than_it_would_have_been() -> None:
    deal = Deal(DEFAULT, 2).extended(40_000)
    cropped = deal.cropped(30_000)
    first, second = cropped.segments
    assert first == deal.segments[0]
    assert second == Segment(first.stop, 30_000, 1)
    assert cropped.extended(30_001).segments[2].owner == 0
    assert deal.cropped(first.stop).segments == (first,)
    least = first.stop + DEFAULT.length(first.stop)
    assert deal.cropped(first.stop + 1).segments[1] == Segment(first.stop, least, 1)


@pytest.mark.parametrize("length", [8300, 20_000, 65_536])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_prompt_read_in_zig_zag_stays_where_it_is(ranks: int, length: int) -> None:
    layout = ZigZag(length, ranks)
    deal = Deal(DEFAULT, ranks).sharded(layout)
    found = owners(deal)
    for rank in range(ranks):
        for piece in layout.pieces(rank):
            assert set(found[piece]) == {rank}
    assert deal.length == length
    # The last segment that is whole can be closed for the next token.
    assert deal.segments[-2].stop + DEFAULT.window <= length < deal.segments[-2].stop + DEFAULT.window + 16
    assert deal.extended(length + 5000).segments[: len(deal.segments)] == deal.segments
