"""Where a rank dies, hangs, is interrupted or makes another call: the others say so, and nothing on disk is damaged."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew, crew
from sharded_cases import ALL, SMALL, Source

import nearfield as nf
from nearfield import tensor_file
from nearfield.cells.cache.store import CellStore
from nearfield.distributed import RankError, Ranks, ShardedStore, decode, files
from nearfield.distributed.layout import ZigZag

FEW = nf.Cells(probes=3, **SMALL)
FORM = (2, 2, 8, 6, torch.float64)


@pytest.fixture(scope="module")
def ranks() -> Crew:
    return crew()


@pytest.fixture
def impatient() -> Iterator[Callable[[], Crew]]:
    made: list[Crew] = []

    def start() -> Crew:
        made.append(Crew(3, timeout=3))
        return made[-1]

    yield start
    for one in made:
        one.close()


def with_keys(group: Any, keys: int = 150, **options: Any) -> tuple[ShardedStore, Source]:
    store, source = ShardedStore(FEW, group, **options), Source(*FORM)
    store.append(*source.keys(2, keys))
    store.close()
    return store, source


def step(store: ShardedStore, source: Source) -> torch.Tensor:
    store.append(*source.keys(2, 1))
    return store.attend(source.queries(2, 1))


# Ranks that do something else.


def differs(group: Any, how: str, check: bool) -> list[str]:
    """Rank 1 does something else; what all are told, and whether they can go on once they have gone back."""
    options = {"balance": "local"} if how == "balance" and Ranks(group).rank == 1 else {}
    store, source = with_keys(group, check=check, **options)
    step(store, source) if how != "balance" else None
    query, scale = source.queries(2, 1), None
    if store.ranks.rank == 1:
        if how == "length":
            store.append(*source.keys(2, 1))
        elif how == "entries":
            store.select(torch.tensor([1, 0]))
        elif how == "dtype":
            query = query.float()
        elif how == "rows":
            query = query.expand(-1, -1, 2, -1)
        elif how == "scale":
            scale = 0.5
        elif how == "no tensor":
            query = query.tolist()  # type: ignore[assignment]
        elif how == "shape":
            query = query[..., :4]
    found = []
    try:
        if how == "shards":
            layout = ZigZag(9, 3)
            key, value = source.keys(2, layout.on(store.ranks.rank) - (store.ranks.rank == 1))
            ShardedStore(FEW, store.ranks).append_shard(key, value, layout)
        store.attend(query, scale)
        found.append("nothing was raised")
    except RankError as error:
        found.append(str(error))
    if how == "length":
        store.crop(150)
        source = Source(*FORM, seed=1)
        found.append(f"{float(step(store, source).sum()):.12f}")
    return found


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("length", "rank 1 has length 152, but rank 0 151"),
        ("entries", "rank 1 has entries"),
        ("dtype", "TypeError: query is torch.float32 on cpu, but the store holds torch.float64"),
        ("dtype", "query [2, 4, 1, 8, 'torch.float32'], but rank 0 [2, 4, 1, 8, 'torch.float64']"),
        ("no tensor", "TypeError: query must be a torch.Tensor, got list"),
        ("shape", "ValueError: query must be [2, a multiple of 2, rows, 8]"),
        ("shards", "ValueError: each of 3 ranks must be given its keys of"),
        ("rows", "rank 1 has query [2, 4, 2, 8, 'torch.float64'], but rank 0 [2, 4, 1, 8"),
        ("scale", "rank 1 has scale 0.5, but rank 0 None"),
        ("balance", "rank 1 has balance 'local', but rank 0 'global'"),
    ],
)
def test_ranks_that_make_another_call_are_named(ranks: Crew, how: str, told: str) -> None:
    found = ranks.run(differs, how, True, ranks=3)
    for own in found:
        assert told in own[0]
        assert own[0].startswith("rank 1 has ")
        assert own[1:] == found[0][1:]  # they went back to what they have in common


def test_without_a_check_nothing_is_compared(ranks: Crew) -> None:
    assert ranks.run(differs, "scale", False, ranks=2) == [["nothing was raised"]] * 2


def starts_again(group: Any) -> tuple[list[str], bool]:
    """Rank 1 is interrupted between two layers, heals itself, and starts the step again, while the others go on. What all are
    told, and whether they go on as one machine would once all of them have healed."""
    ranks, layers = Ranks(group), (Source(*FORM), Source(*FORM, seed=1))
    method = nf.Cells(probes=ALL, **SMALL)
    stores: list[Any] = [ShardedStore(method, ranks) for _ in layers]
    single = [CellStore(method) for _ in layers]
    steps = []
    for store, one, source in zip(stores, single, layers, strict=True):
        prompt = source.keys(2, 100)
        store.append(*prompt)
        one.append(*prompt)
        store.close()
        steps.append((source.keys(2, 1), source.queries(2, 1)))

    def forward(stores: list[Any], stops: bool = False) -> list[torch.Tensor]:
        found = []
        for store, (new, query) in zip(stores, steps, strict=True):
            store.append(*new)
            found.append(store.attend(query))
            if stops:
                raise KeyboardInterrupt
        return found

    said = []
    try:
        try:
            forward(stores, stops=ranks.rank == 1)
        except KeyboardInterrupt:
            for store in stores:
                store.crop(100)
            forward(stores)
    except RankError as error:
        said.append(str(error))
    for store in stores:
        store.crop(100)
    pairs = zip(forward(stores), forward(single), strict=True)
    return said, all(torch.allclose(mine, theirs, atol=1e-10) for mine, theirs in pairs)


def test_ranks_that_are_in_other_layers_are_told_so(ranks: Crew) -> None:
    """All layers ask for tensors of the same shape: nobody would know, and outputs would be of two layers."""
    for said, goes_on in ranks.run(starts_again, ranks=3):
        assert said == ["rank 1 has layer 0, but rank 0 1. All ranks must make the same calls with the same arguments"]
        assert goes_on


# Ranks that are gone.


def leaves(group: Any, how: str) -> list[str]:
    """Rank 1 does not come to the end of a step."""
    store, source = with_keys(group)
    step(store, source)
    merge, length = decode.merged, store.length
    if store.ranks.rank == 1:

        def ends(*arguments: Any) -> Any:
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "hangs":
                time.sleep(9)
            if how == "is interrupted":
                raise KeyboardInterrupt
            return merge(*arguments)

        decode.merged = ends
    found = []
    started = time.monotonic()
    for _ in range(2 if store.ranks.rank == 1 else 1):
        try:
            step(store, source)
        except (RankError, KeyboardInterrupt) as error:
            found.append(f"{type(error).__name__}: {error} ({time.monotonic() - started < 15})")
    return [*found, str(store.length - length)]


@pytest.mark.parametrize(
    "how", [pytest.param("dies", marks=pytest.mark.slow), pytest.param("hangs", marks=pytest.mark.slow), "is interrupted"]
)
def test_survivors_name_the_rank_that_has_left(impatient: Callable[[], Crew], how: str) -> None:
    made = impatient()
    made.start(leaves, how)
    for rank in (0, 2):
        first, more = made.outcome(rank)[1]
        assert first.startswith("RankError")
        assert "(outputs) in vain: rank 1 did not answer" in first
        assert first.endswith("(True)")
        assert more == "1"  # the key is there, as it is where a step on one machine fails
    if how == "is interrupted":
        first, second, _ = made.outcome(1)[1]
        assert first.startswith("KeyboardInterrupt")
        assert "rank 1 has left attend (KeyboardInterrupt) half-way" in second


# Files.


def numbers(store: ShardedStore) -> float:
    return float(step(store, Source(*FORM, seed=1)).sum())


def saves(group: Any, folder: Path, point: str, killed: int) -> list[Any]:
    """Save, go on, and save again, which a rank does not survive."""
    store, source = with_keys(group)
    ranks = store.ranks
    files.save_shares(folder, ranks, [store.share], {"number": "1"})  # type: ignore[list-item]
    if ranks.rank == 0 and not folder.with_name("first").exists():
        shutil.copytree(folder, folder.with_name("first"))
    for _ in range(30):
        step(store, source)

    write = tensor_file._write

    def die(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    def die_half_way(file: Any, *arguments: Any) -> None:
        write(file, *arguments)
        file.flush()
        die()

    if ranks.rank == killed:
        if point == "writing":
            tensor_file._write = die_half_way  # type: ignore[assignment]
        elif point == "before the index":
            files._sync = die  # type: ignore[assignment]
        elif point == "after the index":
            files._remove_others = die  # type: ignore[assignment]
    try:
        files.save_shares(folder, ranks, [store.share], {"number": "2"})  # type: ignore[list-item]
    except RankError as error:
        return [str(error)]
    return ["nothing was raised"]


def loads(group: Any, folder: Path, anew: bool = False) -> Any:
    """`anew`: whole segments do not move to another number of ranks, however equal their shares would be."""
    ranks = Ranks(group)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(files, "UNEQUAL", 0.0 if anew else files.UNEQUAL)
            about, shares = files.load_shares(folder, ranks, lambda about: [FEW.partition])
    except ValueError as error:
        return str(error)
    store = ShardedStore(FEW, ranks)
    store.restore(shares[0])
    return about["number"], store.length, numbers(store)


POINTS = [("before the index", 0), ("writing", 1), ("after the index", 0), ("writing", 0)]


@pytest.mark.parametrize(
    ("point", "killed"), [POINTS[0], *(pytest.param(*point, marks=pytest.mark.slow) for point in POINTS[1:])]
)
def test_a_rank_that_is_killed_while_it_saves(
    ranks: Crew, impatient: Callable[[], Crew], tmp_path: Path, point: str, killed: int
) -> None:
    folder = tmp_path / "cache"
    made = impatient()
    made.start(saves, folder, point, killed)
    for rank in {0, 1, 2} - {killed}:
        told = made.outcome(rank)[1]
        assert "did not answer" in told[0] or point == "after the index"
    assert len([*folder.glob(".*.part")]) == (point == "writing")
    found = ranks.run(loads, folder, ranks=3)
    if point == "after the index":
        assert found[0][:2] == ("2", 180)
    else:
        assert found == ranks.run(loads, tmp_path / "first", ranks=3)
        assert found[0][:2] == ("1", 150)
    # The next save removes what was left behind.
    ranks.run(saves, folder, "none", -1, ranks=2)
    assert sorted(path.suffix for path in folder.iterdir()) == [".shard", ".shard", ".shards"]


def saves_on_and_on(group: Any, folder: Path) -> None:
    store, source = with_keys(group)
    number = 0
    while True:
        step(store, source)
        number += 1
        files.save_shares(folder, store.ranks, [store.share], {"number": str(number)})  # type: ignore[list-item]


@pytest.mark.slow
def test_ranks_that_are_killed_at_any_time(ranks: Crew, tmp_path: Path) -> None:
    """Twenty times, one rank of three, while they do nothing but step and save."""
    chance = random.Random(0)
    for attempt in range(20):
        made, folder = Crew(3, timeout=3), tmp_path / str(attempt)
        made.start(saves_on_and_on, folder)
        deadline = time.monotonic() + 60
        while not (folder / files.INDEX).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(chance.uniform(0.0, 0.3))
        killed = chance.randrange(3)
        made.processes[killed].kill()
        for rank in {0, 1, 2} - {killed}:
            is_right, told = made.outcome(rank)
            assert not is_right
            assert "RankError" in told
        made.close()
        for number, length, _ in ranks.run(loads, folder, ranks=2):
            assert length == 150 + int(number)


def spoil(folder: Path, how: str, other: Path) -> None:
    shards = sorted(folder.glob("*.shard"))
    if how == "missing":
        shards[1].unlink()
    elif how == "no index":
        (folder / files.INDEX).unlink()
    elif how == "damaged":
        content = bytearray(shards[1].read_bytes())
        content[-100] ^= 1
        shards[1].write_bytes(bytes(content))
    elif how == "order damaged":  # keys would go to places that are not there
        content = bytearray(shards[1].read_bytes())
        header = int.from_bytes(content[:8], "little")
        start = 8 + header + json.loads(content[8 : 8 + header])["layers.0.order"]["data_offsets"][0]
        content[start : start + 4] = (2**28).to_bytes(4, "little")
        shards[1].write_bytes(bytes(content))
    elif how == "cut short":
        shards[0].write_bytes(shards[0].read_bytes()[:-8])
    elif how == "mixed up":
        theirs = sorted(other.glob("*.shard"))
        shutil.copy(theirs[1], shards[1])
    elif how == "exchanged":
        content = shards[0].read_bytes()
        shutil.copy(shards[1], shards[0])
        shards[1].write_bytes(content)
    elif how == "index damaged":
        path = folder / files.INDEX
        path.write_bytes(path.read_bytes().replace(b"150", b"151"))


@pytest.fixture(scope="module")
def saved(ranks: Crew, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folders = tmp_path_factory.mktemp("saved") / "a", tmp_path_factory.mktemp("saved") / "b"
    for folder in folders:
        ranks.run(saves_once, folder, ranks=2)
    return folders


def saves_once(group: Any, folder: Path) -> None:
    store, _ = with_keys(group)
    files.save_shares(folder, store.ranks, [store.share], {"number": "1"})  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("missing", "is not a file"),
        ("no index", "is not a file"),
        ("damaged", "does not match its digest"),
        ("order damaged", "does not match its digest"),
        ("cut short", "cannot be read"),
        ("mixed up", "is of another save"),
        ("exchanged", "is of another save"),
        ("index damaged", "does not match its digest"),
    ],
)
@pytest.mark.parametrize("size", [2, 3])
def test_files_that_are_not_what_was_saved(
    ranks: Crew, saved: tuple[Path, Path], tmp_path: Path, how: str, told: str, size: int
) -> None:
    folder = tmp_path / "cache"
    shutil.copytree(saved[0], folder)
    spoil(folder, how, saved[1])
    for found in ranks.run(loads, folder, how == "order damaged", ranks=size):
        assert found.startswith("load has failed on rank ")
        assert told in found
    assert ranks.run(loads, saved[0], ranks=size)[0][:2] == ("1", 150)  # and the ranks go on


def test_a_folder_that_cannot_be_written(ranks: Crew, tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("no folder")
    for found in ranks.run(cannot_save, place, ranks=2):
        assert found.startswith("save has failed on rank 0: ")


def test_folders_that_ranks_do_not_have_in_common(ranks: Crew, tmp_path: Path) -> None:
    for found in ranks.run(cannot_save, tmp_path, True, ranks=2):
        assert found.startswith("save has failed on rank 0: ")
        assert "which rank 1 has written, is not there; the ranks need a folder in common" in found
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def cannot_save(group: Any, folder: Path, apart: bool = False) -> str:
    store, source = with_keys(group)
    if apart:
        folder = folder / str(store.ranks.rank)
    try:
        files.save_shares(folder, store.ranks, [store.share], {})  # type: ignore[list-item]
    except ValueError as error:
        step(store, source)
        return str(error)
    return "nothing was raised"
