"""Block sizes that a user has measured: kept, preferred, and never believed blindly. No card is needed: names are enough."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton

from nearfield.cells.triton import candidates, measured, tuning
from nearfield.cells.triton.tiles import TileSizes
from nearfield.kernels import cards, ready, replay

CARD = torch.device("cuda", 0)
NAME = "NVIDIA H200"
HALF = torch.bfloat16
OURS = TileSizes(32, 8, 1, 128)


@pytest.fixture(autouse=True)
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """One card, and a cache of its own."""
    monkeypatch.setenv("NEARFIELD_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: NAME)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.delenv(cards.SWITCH, raising=False)
    forget()
    yield tmp_path / "blocks.json"
    monkeypatch.undo()
    forget()


def forget() -> None:
    tuning.forget()
    cards.class_of.cache_clear()


def near_fwd(dim: int = 64, dtype: torch.dtype = HALF, cell_size: int = 128) -> TileSizes:
    return tuning.blocks_for("near_fwd", dim, dtype, CARD, cell_size)


def write(file: Path, entry: Any, **more: Any) -> None:
    """One card, as `keep` writes it."""
    version = {"kernels": measured.fingerprint(), "blocks": entry} | more
    file.write_text(json.dumps({"cards": {NAME: {f"Triton {triton.__version__}": version}}}))
    forget()


def test_what_is_kept_is_used_at_once() -> None:
    shipped = near_fwd()
    assert shipped != OURS
    tuning.keep(NAME, "half", {("near_fwd", 64, 128): OURS})
    assert near_fwd() == OURS
    assert near_fwd(dim=40) == OURS, "the same table serves smaller heads"
    assert near_fwd(dtype=torch.float16) == OURS


def test_the_rest_is_what_is_shipped() -> None:
    """Other cell sizes, dimensions, dtypes and kernels, and the steps of a cache."""

    def others() -> list[object]:
        found: list[object] = [near_fwd(cell_size=32), near_fwd(dim=128), near_fwd(dtype=torch.float32)]
        found.append(tuning.blocks_for("near_dq", 64, HALF, CARD, 128))
        return [*found, tuning.blocks_for("products", 64, HALF, CARD), tuning.decode_tiles(64, HALF, CARD)]

    before = others()
    tuning.keep(NAME, "half", {("near_fwd", 64, 128): OURS})
    assert others() == before
    assert near_fwd() == OURS


def test_other_cards_and_a_cpu_go_without(monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = near_fwd()
    tuning.keep("Another", "half", {("near_fwd", 64, 128): OURS})
    assert near_fwd() == shipped
    tuning.keep(NAME, "half", {("near_fwd", 64, 128): OURS})
    assert tuning.blocks_for("near_fwd", 64, HALF, torch.device("cpu"), 128) == shipped
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Another")
    tuning.forget()
    assert near_fwd() == OURS


def test_a_card_that_nobody_else_has_measured_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's sizes come before those that were derived for its class."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Small")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    forget()
    derived = near_fwd(dim=128)
    tuning.keep("Small", "half", {("near_fwd", 64, 128): OURS})
    assert near_fwd() == OURS
    assert near_fwd(dim=128) == derived


def test_an_imposed_class_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    tuning.keep(NAME, "half", {("near_fwd", 64, 128): OURS})
    monkeypatch.setenv(cards.SWITCH, "8.6")
    assert near_fwd() == TileSizes(*tuning._tables("derived.json")["classes"]["8.6"]["blocks"]["near_fwd"]["half, 64"]["128"])
    monkeypatch.delenv(cards.SWITCH)
    assert near_fwd() == OURS


def test_shipped_tables_are_not_touched() -> None:
    before = json.dumps(tuning._tables("tuning.json"))
    tuning.keep(NAME, "half", {("near_fwd", 64, 128): OURS})
    assert near_fwd() == OURS
    assert json.dumps(tuning._tables("tuning.json")) == before
    assert tuning.shipped_for(CARD)["blocks"]["near_fwd"]["half, 64"]["128"] != list(OURS)


def test_keeping_adds_to_what_is_there(own_file: Path) -> None:
    other = TileSizes(16, 4, 1, 16)
    measured.keep(NAME, "half", {("near_fwd", 64, 128): OURS, ("near_fwd", 128, 128): OURS})
    measured.keep("Another", "half", {("near_fwd", 64, 128): OURS})
    measured.keep(NAME, "float32", {("near_fwd", 64, 128): OURS})
    tuning.keep(NAME, "half", {("near_fwd", 64, 128): other, ("near_fwd", 64, 64): other})
    assert near_fwd() == near_fwd(cell_size=64) == other
    assert near_fwd(dim=128) == near_fwd(dtype=torch.float32) == OURS
    saved = json.loads(own_file.read_text())["cards"]
    assert set(saved) == {NAME, "Another"}
    assert set(saved[NAME]) == {f"Triton {triton.__version__}"}


def test_another_version_of_triton_measures_for_itself(own_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = near_fwd()
    measured.keep(NAME, "half", {("near_fwd", 64, 128): OURS})
    monkeypatch.setattr(triton, "__version__", "99.1.0")
    tuning.forget()
    assert near_fwd() == shipped
    measured.keep(NAME, "half", {("near_fwd", 64, 128): TileSizes(16, 4, 1, 16)})
    assert len(json.loads(own_file.read_text())["cards"][NAME]) == 2


def test_other_kernels_are_measured_anew(own_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Sizes that suited the kernels of another version may not fit these."""
    shipped = near_fwd()
    write(own_file, {"half": {"near_fwd": {"64": {"128": list(OURS)}}}}, kernels="of old")
    with caplog.at_level("INFO"):
        assert near_fwd() == shipped
    assert "other kernels" in caplog.text
    tuning.keep(NAME, "half", {("near_fwd", 128, 128): OURS})
    assert (near_fwd(), near_fwd(dim=128)) == (shipped, OURS)


def test_what_calls_remember_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(replay._TAPES, "a call", "a tape")
    monkeypatch.setitem(ready._KNOWN, "a call", lambda *x: x[0])
    tuning.forget()
    assert not replay._TAPES
    assert not ready._KNOWN


BROKEN = {
    "empty": b"",
    "cut": b'{"cards": {"',
    "not text": b"\xff\xfe\x00",
    "a list": b"[]",
    "another table": b'{"lengths": {}}',
    "cards in a list": b'{"cards": []}',
    "a card that is a number": b'{"cards": {"a card": 5}}',
    "too deep": b"[" * 100_000,
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.filterwarnings("error")
def test_a_broken_file_is_ignored_and_named(case: str, own_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    shipped = near_fwd()
    own_file.write_bytes(BROKEN[case])
    forget()
    for dim in (64, 128, 64):
        near_fwd(dim)
    assert near_fwd() == shipped
    (said,) = caplog.messages
    assert str(own_file) in said
    assert "calibrate" in said
    tuning.keep(NAME, "half", {("near_fwd", 64, 128): OURS})
    assert near_fwd() == OURS, "a new measurement mends it"


def one(sizes: object, kind: str = "half", kernel: str = "near_fwd", dim: str = "64", cell_size: str = "128") -> dict[str, Any]:
    return {kind: {kernel: {dim: {cell_size: sizes}}}}


BAD = {
    "rows that are no power of two": one([48, 4, 2, 64, 32, 64]),
    "rows that are too many": one([4096, 4, 2, 64, 32, 64]),
    "too few keys": one([64, 4, 2, 8, 32, 64]),
    "nothing": one([0, 4, 2, 64, 32, 64]),
    "a negative number": one([-64, 4, 2, 64, 32, 64]),
    "three warps": one([64, 3, 2, 64, 32, 64]),
    "sixteen warps": one([64, 16, 2, 64, 32, 64]),
    "no stages": one([64, 4, 0, 64, 32, 64]),
    "many stages": one([64, 4, 9, 64, 32, 64]),
    "a fraction": one([64.0, 4, 2, 64, 32, 64]),
    "truth": one([64, 4, True, 64, 32, 64]),
    "a word": one(["64", 4, 2, 64, 32, 64]),
    "words": one("64, 4, 2"),
    "too short": one([64, 4, 2]),
    "too long": one([64, 4, 2, 64, 32, 64, 1]),
    "a number": one(5),
    "null": one(None),
    "an unknown kernel": one(list(OURS), kernel="nearby"),
    "a kernel that is not searched for": one(list(OURS), kernel="products"),
    "an unknown kind": one(list(OURS), kind="bfloat16"),
    "an unknown dimension": one(list(OURS), dim="65"),
    "cells of no size": one(list(OURS), cell_size="large"),
    "cells of a size without end": one(list(OURS), cell_size="9" * 5000),
    "cells of size zero": one(list(OURS), cell_size="0"),
    "no kernels": {"half": 5},
    "no cell sizes": {"half": {"near_fwd": {"64": [64, 4, 2, 64, 32, 64]}}},
    "no kinds": [1, 2],
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.filterwarnings("error")
def test_a_bad_entry_is_ignored_and_the_others_are_used(case: str, own_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    shipped, bad = near_fwd(), BAD[case]
    if isinstance(bad, dict):
        bad = bad | {"float32": {"near_fwd": {"64": {"128": list(OURS)}}}}
    write(own_file, bad)
    assert near_fwd() == shipped
    assert near_fwd(dim=128) != OURS
    for kernel in ("products", "far_dcross"):
        assert tuning.blocks_for(kernel, 64, HALF, CARD) != OURS
    (said,) = caplog.messages
    assert str(own_file) in said
    if isinstance(bad, dict):
        assert near_fwd(dtype=torch.float32) == OURS


def test_a_file_that_cannot_be_read_is_no_error(own_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = near_fwd()
    own_file.mkdir()
    forget()
    assert near_fwd() == shipped
    monkeypatch.setattr(measured, "cache_file", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    forget()
    assert near_fwd() == shipped


def test_an_interrupted_calibration_leaves_the_old_file(own_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured.keep(NAME, "half", {("near_fwd", 64, 128): OURS})
    before = own_file.read_text()

    def half(path: Path, content: bytes) -> int:
        with path.open("wb") as file:
            file.write(content[:5])
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", half)
        with pytest.raises(KeyboardInterrupt):
            measured.keep(NAME, "half", {("near_fwd", 64, 128): TileSizes(16, 4, 1, 16)})
    assert own_file.read_text() == before
    assert [path.name for path in own_file.parent.iterdir()] == [own_file.name]


@pytest.mark.parametrize("kernel", candidates.KERNELS)
def test_all_that_is_tried_or_shipped_is_allowed(kernel: str) -> None:
    tables = [*tuning._tables("tuning.json")["cards"].values(), *tuning._tables("derived.json")["classes"].values()]
    for table in tables:
        for where, sizes in table["blocks"][kernel].items():
            kind, dim = where.split(", ")
            for blocks in (TileSizes(*x) for x in sizes.values()):
                assert candidates.is_allowed(kernel, blocks)
                for other in candidates.by_promise(kernel, kind, int(dim), candidates.plain(kernel, blocks)):
                    assert candidates.is_allowed(kernel, other)
                    assert candidates.plain(kernel, other) == other
    assert all(candidates.is_allowed(kernel, TileSizes(*x)) for x in candidates.CANDIDATES[kernel])


@pytest.mark.parametrize("kernel", candidates.KERNELS)
def test_neighbours_are_one_step_away(kernel: str) -> None:
    middle = {field: 4 * least if most >= 4 * least else least for field, (least, most) in candidates.RANGES[kernel].items()}
    blocks = candidates.plain(kernel, TileSizes(warps=4, stages=2, **{**candidates.UNREAD, **middle}))
    found = candidates.neighbours(kernel, blocks)
    assert {candidates.distance(kernel, one, blocks) for one in found} == {1.0}
    assert len(set(found)) == len(found) >= 2 + 1 + len(middle)
