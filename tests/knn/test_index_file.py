"""The file of an index: damaged, crafted and foreign files are refused, and a save leaves a whole one."""

from __future__ import annotations

import errno
import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from index_contract import KINDS, UNSAVED, build, random
from torch import Tensor

pytest.importorskip("safetensors")

from safetensors import safe_open
from safetensors.torch import save_file

import nearfield as nf
from nearfield.knn.index import load
from nearfield.tensor_file import write_tensors


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "index.safetensors"


@pytest.fixture
def saved(path: Path) -> Path:
    built = nf.KMeansIndex(cells=3, leaf=10).build(random(2, 25, 4))
    built.search(random(2, 25, 4, seed=1), 2, 0)
    built.save(path)
    return path


@pytest.mark.parametrize("kind", sorted(set(KINDS) - UNSAVED))
def test_names_in_a_file_never_change(kind: str, path: Path) -> None:
    """So that every version from now on reads it."""
    if kind.startswith("faiss"):
        pytest.importorskip("faiss")
    built = build(kind, random(2, 150, 8, dtype=torch.bfloat16))
    for offset in (None, 0):
        built.search(random(2, 150, 8, seed=9), 4, offset)
    built.save(path)
    with safe_open(str(path), framework="pt") as file:
        names, about = set(file.keys()), file.metadata()
    assert set(about) == {"format", "version", "index", "keys", "digest"}
    assert (about["format"], about["version"]) == ("nearfield-index", "1")
    assert set(json.loads(about["index"])) == {"kind", "settings"}
    keys = json.loads(about["keys"])
    assert (keys["shape"], keys["dtype"], keys["held"], len(keys["fingerprint"])) == ([2, 150, 8], "bfloat16", "bfloat16", 64)
    lessons = {
        "KMeansIndex": {"centroids", "radii", "longest", "sizes", "order"},
        "ConcentricLSH": {"directions", "shifts", "weights", "codes", "order", "middle", "limits", "widths"},
        "FaissIndex": {"faiss-0", "faiss-1"},
    }
    expected = {"keys"}
    name = type(KINDS[kind]).__name__
    if name in lessons:
        leaf = KINDS[kind].leaf
        whole = [(start, start + leaf) for start in range(0, 150 - leaf, 2 * leaf)]
        assert {f"learned.blocks.{a}-{b}.{lesson}" for a, b in whole for lesson in lessons[name]} <= names
        names = {found for found in names if not found.startswith("learned.blocks.")}
        expected |= {"learned.counts"} | {f"learned.base.{lesson}" for lesson in lessons[name]}
    if name == "CellIndex":
        parts = [f"learned.{part}.{entry}" for part in ("base", "spans") for entry in range(2)]
        expected |= {f"{part}.{lesson}" for part in parts for lesson in ("order", "starts", "centroid", "variance")}
        expected |= {"learned.counts", "learned.base.changed", "learned.base.made"}
    assert names == expected


def test_faiss_reads_its_part(path: Path) -> None:
    faiss = pytest.importorskip("faiss")
    nf.FaissIndex("IVF4,Flat", nprobe=2).build(random(2, 300, 8)).save(path)
    with safe_open(str(path), framework="pt") as file:
        index = faiss.deserialize_index(file.get_tensor("learned.base.faiss-1").numpy())
    assert (index.ntotal, index.nprobe) == (300, 2)


def test_flipped_bits(saved: Path) -> None:
    """Any one of them is an error that names the file and a remedy, or makes no difference."""
    whole = saved.read_bytes()
    generator = torch.Generator().manual_seed(0)
    places = torch.randperm(len(whole), generator=generator)[:300].tolist()
    errors = []
    for place in places:
        saved.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        try:
            load(saved)
        except ValueError as error:
            errors.append(str(error))
    assert len(errors) > 0.99 * len(places)
    assert all("index.safetensors" in error and (";" in error) for error in errors)


def test_files_of_another_length(saved: Path) -> None:
    whole = saved.read_bytes()
    lengths = (0, 1, 8, 9, 100, 1000, len(whole) // 2, len(whole) - 1)
    for damaged in (*(whole[:length] for length in lengths), whole + b"\0", whole + whole):
        saved.write_bytes(damaged)
        with pytest.raises(
            ValueError, match=r"index .*index\.safetensors cannot be read: .*index.build\(keys\).save\(path\) makes"
        ):
            load(saved)


def test_foreign_files(path: Path, tmp_path: Path) -> None:
    for foreign in (b"{}", os.urandom(500), pickle.dumps({"keys": 1})):
        path.write_bytes(foreign)
        with pytest.raises(ValueError, match="cannot be read"):
            load(path)
    torch.save({"keys": torch.zeros(1, 3)}, path)
    with pytest.raises(ValueError, match="cannot be read"):
        load(path)
    for about in (None, {"format": "pt"}, {"format": "nearfield-memory", "version": "3"}):
        save_file({"keys": torch.zeros(1, 3)}, str(path), about)
        with pytest.raises(ValueError, match="must be a file of format 'nearfield-index', version '1', got"):
            load(path)
    for missing in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(FileNotFoundError, match=r"is not a file; index.build\(keys\).save\(path\) makes one"):
            load(missing)
    with pytest.raises(TypeError, match="path must be the name of a file, got 3"):
        load(3)  # type: ignore[arg-type]


def rewrite(path: Path, change: Callable[[dict[str, str], dict[str, Tensor]], None]) -> None:
    """The same file with a change, and with a digest that is right."""
    with safe_open(str(path), framework="pt") as file:
        about, tensors = file.metadata(), {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    del about["digest"]
    change(about, tensors)
    write_tensors("index", path, about, tensors)


def test_a_newer_version(saved: Path) -> None:
    rewrite(saved, lambda about, _: about.update(version="2"))
    with pytest.raises(ValueError, match="version '1', got 'nearfield-index', version '2'; update nearfield"):
        load(saved)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("index", {"kind": "os", "settings": {}}, "kind 'os' is none of ExactIndex"),
        ("index", {"kind": "KMeansIndex", "settings": {"probes": -1}}, "probes must be a positive integer"),
        ("index", {"kind": "KMeansIndex", "settings": {"probe": 1}}, "unexpected keyword argument 'probe'"),
        ("index", {"kind": "KMeansIndex", "settings": {"seed": 2**70}}, "seed must be from"),
        ("index", {"kind": "ConcentricLSH", "settings": {"hashes": 10**9}}, "hashes must be at most 256"),
        ("index", {"kind": "ConcentricLSH", "settings": {"rungs": 1000, "tables": 9000, "hashes": 9}}, "rungs . tables . hashes"),
        ("index", {"kind": "ExactIndex", "settings": {}}, "unknown tensors, .'base.centroids'"),
        ("index", {"kind": "ConcentricLSH", "settings": {}}, "damaged: base.directions"),
        ("index", [], "invalid header"),
        ("keys", {"shape": [2, 25, 4]}, "invalid header"),
        ("keys", {"shape": [2, 24, 4], "dtype": "float32", "held": "float32", "fingerprint": ""}, r"keys of shape \(2, 25, 4\)"),
        ("keys", {"shape": [2, 25, 4], "dtype": "int64", "held": "float32", "fingerprint": ""}, "invalid header: KeyError"),
        ("keys", {"shape": [2, 25, 4], "dtype": "float32", "held": "float16", "fingerprint": ""}, "invalid header"),
    ],
)
def test_crafted_headers(saved: Path, name: str, change: Any, message: str) -> None:
    rewrite(saved, lambda about, _: about.update({name: json.dumps(change)}))
    with pytest.raises(ValueError, match=rf"index\.safetensors .*{message}"):
        load(saved)


@pytest.mark.parametrize(
    ("recipe", "name", "change"),
    [
        (nf.KMeansIndex(leaf=10), "counts", lambda x: x + 1),
        (nf.KMeansIndex(leaf=10), "counts", lambda x: -x),
        (nf.KMeansIndex(leaf=10), "base.order", lambda x: x + 1),
        (nf.KMeansIndex(leaf=10), "base.order", lambda x: x * 0),
        (nf.KMeansIndex(leaf=10), "base.order", lambda x: x.int()),
        (nf.KMeansIndex(leaf=10), "base.sizes", lambda x: x + 1),
        (nf.KMeansIndex(leaf=10), "base.sizes", lambda x: x - 2 * x.flip(1)),
        (nf.KMeansIndex(leaf=10), "base.radii", lambda x: x[:, 1:]),
        (nf.KMeansIndex(leaf=10), "base.longest", None),
        (nf.KMeansIndex(leaf=10), "blocks.0-20.centroids", lambda x: x[:1]),
        (nf.ConcentricLSH(leaf=10), "base.order", lambda x: x * 0),
        (nf.ConcentricLSH(leaf=10), "base.codes", lambda x: x.flip(-1)),
        (nf.ConcentricLSH(leaf=10), "base.widths", None),
        (nf.ConcentricLSH(leaf=10, shells=3), "base.limits", lambda x: torch.cat([x, x], 1)),
        (nf.ConcentricLSH(leaf=10, shells=3), "base.limits", lambda x: x[:, :0]),
        (nf.CellIndex(segment=8, cell_size=2), "spans.1.order", lambda x: x + 25),
        (nf.CellIndex(segment=8, cell_size=2), "spans.1.starts", lambda x: x + 1),
        (nf.CellIndex(segment=8, cell_size=2), "spans.1.starts", lambda x: x[:0]),
        (nf.CellIndex(segment=8, cell_size=2), "spans.1.starts", lambda x: x[[0, -1]]),
        (nf.CellIndex(segment=8, cell_size=2), "spans.0.centroid", lambda x: x[1:]),
        (nf.CellIndex(segment=8, cell_size=2), "base.0.order", lambda x: x * 0),
        (nf.CellIndex(segment=8, cell_size=2), "base.1.starts", lambda x: x[:0]),
        (nf.CellIndex(segment=8, cell_size=2), "base.1.starts", lambda x: x[[0, -1]]),
        (nf.CellIndex(segment=8, cell_size=2), "base.1.variance", None),
        (nf.CellIndex(segment=8, cell_size=2), "base.made", lambda x: -x),
        (nf.CellIndex(segment=8, cell_size=2), "base.made", lambda x: x[:1]),
        (nf.CellIndex(segment=8, cell_size=2), "base.changed", lambda x: x.long()),
        (nf.FaissIndex("Flat", leaf=10), "base.faiss-0", lambda x: x[:40]),
        (nf.FaissIndex("Flat", leaf=10), "blocks.0-20.faiss-1", "base.faiss-1"),
        (nf.FaissIndex("Flat", leaf=10), "base.faiss-1", None),
    ],
)
def test_crafted_tensors(recipe: Any, name: str, change: Any, path: Path) -> None:
    """Nothing outside of the memory of the index can be read, even where the digest is right."""
    if isinstance(recipe, nf.FaissIndex):
        pytest.importorskip("faiss")
    built = recipe.build(random(2, 25, 4))
    for offset in (None, 0):
        built.search(random(2, 25, 4), 2, offset)
    built.save(path)

    def alter(_: dict[str, str], tensors: dict[str, Tensor]) -> None:
        found = tensors.pop(f"learned.{name}")
        if change is not None:
            made = tensors[f"learned.{change}"].clone() if isinstance(change, str) else change(found)
            tensors[f"learned.{name}"] = made.contiguous()

    rewrite(path, alter)
    with pytest.raises(
        ValueError, match=rf"index\.safetensors (is damaged: {name}|cannot be read by Faiss).*build the index again"
    ):
        load(path)


@pytest.mark.parametrize("recipe", [nf.KMeansIndex(), nf.ConcentricLSH()])
def test_blocks_larger_than_all_keys(recipe: Any, path: Path) -> None:
    built = recipe.build(random(2, 25, 4))
    built.save(path)

    def alter(about: dict[str, str], _: dict[str, Tensor]) -> None:
        index = json.loads(about["index"])
        index["settings"]["leaf"] = 2**70
        about["index"] = json.dumps(index)

    rewrite(path, alter)
    for offset in (None, 0):
        found, expected = (x.search(random(2, 25, 4, seed=1), 2, offset) for x in (load(path), built))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_files_with_empty_shells(path: Path) -> None:
    """As they were written where there were more shells than keys: their limits were those of the shells before them."""
    built = nf.ConcentricLSH(shells=16).build(random(2, 9, 4))
    built.save(path)
    places = torch.searchsorted(torch.arange(9) * 16 // 9, torch.arange(16), right=True) - 1
    rewrite(path, lambda _, tensors: tensors.update({"learned.base.limits": tensors["learned.base.limits"][:, places]}))
    old, more = load(path), random(2, 3, 4, seed=1)
    assert old.limits.shape == (2, 16)  # type: ignore[attr-defined]
    for one, other in zip(old.add(more).search(more, 4), built.add(more).search(more, 4), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["3-2", "0-26", "x", "-1-5", "0-10.1"])
def test_crafted_blocks(saved: Path, name: str) -> None:
    rewrite(saved, lambda _, tensors: tensors.update({f"learned.blocks.{name}.order": torch.zeros(2, 3)}))
    with pytest.raises(ValueError, match="is damaged"):
        load(saved)


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device"), MemoryError()])
@pytest.mark.parametrize("there", [True, False])
def test_a_failed_save_leaves_what_was_there(
    saved: Path, failure: BaseException, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = saved.read_bytes()
    if not there:
        saved.unlink()

    def fail(file: Any, *_: Any) -> None:
        file.write(before[: len(before) // 2])
        raise failure

    monkeypatch.setattr("nearfield.tensor_file._write", fail)
    with pytest.raises(type(failure)):
        nf.ExactIndex().build(random(1, 9, 4)).save(saved)
    assert [path.read_bytes() for path in saved.parent.iterdir()] == ([before] if there else [])


def test_places_where_nothing_can_be_written(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built, before = nf.ExactIndex().build(random(1, 9, 4)), saved.read_bytes()
    for place in (saved.parent, saved / "below", saved.parent / "nowhere" / "index"):
        with pytest.raises(
            OSError, match=r"index .* cannot be written: .*; what was there is unchanged. It needs a name in a folder"
        ):
            built.save(place)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    # Stands in for a folder without rights, for whoever runs the tests may have them all.
    with monkeypatch.context() as patch:
        patch.setattr("nearfield.tensor_file.os.open", refuse)
        with pytest.raises(OSError, match=r"cannot be written: .*Permission denied.*where you may write"):
            built.save(saved)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        with pytest.raises(OSError, match=r"cannot be read: .*Permission denied.*it needs a file that you may read"):
            load(saved)
    with pytest.raises(TypeError, match="path must be the name of a file, got None"):
        built.save(None)  # type: ignore[arg-type]
    assert [path.read_bytes() for path in saved.parent.iterdir()] == [before]


def test_a_file_in_use_may_change(saved: Path) -> None:
    loaded, queries = load(saved), random(2, 4, 4)
    wanted = loaded.search(queries, 3)
    with saved.open("r+b") as file:
        file.write(b"\0" * saved.stat().st_size)
    assert all(map(torch.equal, loaded.search(queries, 3), wanted))
    loaded.save(saved)
    assert all(map(torch.equal, load(saved).search(queries, 3), wanted))


def test_safetensors_is_not_needed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    nf.ExactIndex().build(random(1, 9, 4)).save(path)
    assert load(path).length == 9
