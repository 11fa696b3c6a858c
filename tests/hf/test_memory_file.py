"""The file of an `hf.Memory`: damaged, crafted and foreign files are refused, and a save leaves a whole one."""

from __future__ import annotations

import errno
import json
import os
import pickle
import stat
import time
import tracemalloc
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import memories
from hf_models import pair, tokens
from memories import FEW, LENGTH, NAME, answer, everything
from safetensors import safe_open
from safetensors.torch import save_file

import nearfield
from nearfield import hf
from nearfield.tensor_file import DIGEST, digest_of

# Fixtures.
nets, saved, text = memories.nets, memories.saved, memories.text


@pytest.mark.parametrize("flips", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_flipped_bytes(flips: int, text: Tensor, tmp_path: Path) -> None:
    """A flipped bit is an error that names the file, or makes no difference. One layer keeps the file small."""
    hf.register(NAME, nearfield.Exact())
    ours = pair("llama", NAME, num_hidden_layers=1)[1]
    path = tmp_path / "memory.safetensors"
    hf.Memory.read(ours, text, FEW).save(path)
    whole = path.read_bytes()
    wanted = everything(hf.Memory.load(path, ours))
    generator = torch.Generator().manual_seed(0)
    places = torch.randperm(len(whole), generator=generator)[:flips].tolist()
    bits = torch.randint(8, (flips,), generator=generator).tolist()
    assert len(places) == flips
    errors = []
    with path.open("r+b", buffering=0) as file:
        for place, bit in zip(places, bits, strict=True):
            file.seek(place)
            file.write(bytes([whole[place] ^ 1 << bit]))
            try:
                found = hf.Memory.load(path, ours)
            except ValueError as error:
                errors.append(str(error))
            else:
                assert all(torch.equal(found, there) for found, there in zip(everything(found), wanted, strict=True))
            file.seek(place)
            file.write(whole[place : place + 1])
    assert len(errors) > 0.99 * flips
    assert all("memory.safetensors" in error for error in errors)
    assert path.read_bytes() == whole


def test_names_in_a_file_never_change(saved: Path) -> None:
    """So that later versions read what this one has written."""
    with safe_open(str(saved), framework="pt") as file:
        names, about = set(file.keys()), file.metadata()
    moments = {"start", "size", "void", "centroid", "variance", "value", "cross", "pooled", "query_sizes", "by_queries"}
    layer = {"keys", "values", "order", "sinks"} | moments
    assert names == {"tokens", "bounds"} | {f"layers.{i}.{name}" for i in range(2) for name in layer}
    assert set(about) == {"format", "version", "fingerprint", "dtype", "method", "reading", "layers", "digest"}
    assert (about["format"], about["version"], about["layers"]) == ("nearfield-memory", "4", "2")
    assert json.loads(about["reading"]) == {"positions": "running", "chunk": LENGTH, "gap": 0, "sharpness": 1.0}
    method = {"method": "Cells", "cell_size": 4, "probes": 2, "samples": 0, "sinks": 3, "segment": 8, "window": 0}
    # Without a number, version 0.1 makes 5 iterations, as caches do here.
    partition = {"name": "KMeans", "seed": 3}
    assert json.loads(about["method"]) == {**method, "partition": partition}


def test_files_of_another_length(nets: tuple[Any, Any], saved: Path) -> None:
    whole = saved.read_bytes()
    lengths = (0, 1, 7, 8, 9, 100, 1000, len(whole) // 2, len(whole) - 1)
    for damaged in (*(whole[:length] for length in lengths), whole + b"\0", whole + whole):
        saved.write_bytes(damaged)
        with pytest.raises(ValueError, match="cannot be read"):
            hf.Memory.load(saved, nets[1], verify=False)


def test_foreign_files(nets: tuple[Any, Any], tmp_path: Path) -> None:
    path = tmp_path / "memory"
    for foreign in (b"{}", os.urandom(500), pickle.dumps({"tokens": 1}), b"\xff" * 64):
        path.write_bytes(foreign)
        with pytest.raises(ValueError, match="memory cannot be read"):
            hf.Memory.load(path, nets[1])
    torch.save({"tokens": torch.zeros(1, 3)}, path)
    with pytest.raises(ValueError, match="memory cannot be read"):
        hf.Memory.load(path, nets[1])
    for about in (None, {"format": "pt"}, {"format": "nearfield-memory"}):
        save_file({"tokens": torch.zeros(1, 3)}, str(path), about)
        with pytest.raises(ValueError, match="must be a file of format"):
            hf.Memory.load(path, nets[1])
    with pytest.raises(FileNotFoundError, match="is not a file"):
        hf.Memory.load(tmp_path, nets[1])


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device"), MemoryError()])
@pytest.mark.parametrize("there", [True, False])
def test_a_failed_save_leaves_what_was_there(
    nets: tuple[Any, Any], saved: Path, failure: BaseException, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = saved.read_bytes()
    if not there:
        saved.unlink()

    def fail(file: Any, *_: Any) -> None:
        file.write(before[: len(before) // 2])
        raise failure

    memory = hf.Memory.read(nets[1], tokens(1, 20), FEW)
    monkeypatch.setattr("nearfield.tensor_file._write", fail)
    with pytest.raises(type(failure)):
        memory.save(saved)
    assert [path.read_bytes() for path in saved.parent.iterdir()] == ([before] if there else [])


def test_a_full_disk(nets: tuple[Any, Any], saved: Path) -> None:
    """Stood in for by a limit to the size of files."""
    resource = pytest.importorskip("resource")
    before = saved.read_bytes()
    memory = hf.Memory.read(nets[1], tokens(1, 60), FEW)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, hard))
    try:
        with pytest.raises(OSError, match=r"cannot be written.*unchanged"):
            memory.save(saved)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.read_bytes() for path in saved.parent.iterdir()] == [before]
    memory.save(saved)
    assert hf.Memory.load(saved, nets[1]).tokens.shape == (1, 60)


@pytest.mark.skipif(os.name != "posix", reason="has no such modes")
def test_who_may_read_it(nets: tuple[Any, Any], text: Tensor, tmp_path: Path) -> None:
    """A new file has the mode that the umask leaves; one that is replaced keeps its mode."""
    memory = hf.Memory.read(nets[1], text, FEW)
    path = tmp_path / "memory"
    before = os.umask(0o027)
    try:
        memory.save(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o604)
        memory.save(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o604
    finally:
        os.umask(before)


def test_a_link_stays(nets: tuple[Any, Any], text: Tensor, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link, file = tmp_path / "link", tmp_path / "there" / "memory"
    link.symlink_to(Path("there") / "memory")
    for length in (20, LENGTH):
        hf.Memory.read(nets[1], text[:, :length], FEW).save(link)
        assert link.is_symlink()
        assert not file.is_symlink()
        assert hf.Memory.load(file, nets[1]).tokens.shape == (1, length)
    with pytest.raises(OSError, match=r"memory .*nowhere/memory cannot be written"):
        hf.Memory.read(nets[1], text, FEW).save(tmp_path / "nowhere" / "memory")


def test_a_file_in_use_may_be_replaced(nets: tuple[Any, Any], text: Tensor, saved: Path) -> None:
    _, ours = nets
    first = hf.Memory.load(saved, ours)
    wanted = answer(ours, text, first.cache())
    hf.Memory.read(ours, tokens(1, 20), FEW).save(saved)
    assert torch.equal(answer(ours, text, first.cache()), wanted)
    first.save(saved)
    assert torch.equal(answer(ours, text, hf.Memory.load(saved, ours).cache()), wanted)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("layers.1.start", lambda x: x + 100, "layer 1, start"),
        ("layers.0.sinks", lambda x: x + 100, "layer 0, sinks"),
        ("layers.0.order", lambda x: x - 1, "layer 0, order"),
        ("layers.0.order", lambda x: x[:, :, :-1], "layer 0, order"),
        ("layers.0.size", lambda x: x + 1, "layer 0, start and size"),
        ("layers.0.size", lambda x: x * torch.nan, "layer 0, size"),
        ("layers.1.values", lambda x: x.double(), "layer 1, values"),
        ("layers.1.cross", lambda x: x[:, :1], "layer 1, cross"),
        ("layers.1.order", lambda x: x.clamp(max=6), "layer 1, order"),
        ("bounds", lambda x: x[1:], "damaged: bounds"),
        ("bounds", lambda x: x[:0], "damaged: bounds"),
        ("bounds", lambda x: x[None], "damaged: bounds"),
        ("bounds", lambda x: x.int(), "damaged: bounds"),
        ("bounds", lambda x: x.flip(0), "damaged: bounds"),
        ("bounds", lambda x: x.repeat_interleave(2), "damaged: bounds"),
        ("bounds", lambda x: torch.cat([x, x[-1:] + 6]), "damaged: bounds"),
        ("bounds", lambda x: torch.cat([x[:1], x[1:] - 2**63]), "damaged: bounds"),
        ("bounds", lambda x: x[:-1], "layer 0, order"),
        ("bounds", lambda x: torch.cat([x[:2], x[3:]]), "layer 0, order"),
        ("bounds", lambda x: torch.arange(41), "layer 0, start"),
        ("tokens", lambda x: x[0], r"tokens of shape \(45,\)"),
        ("tokens", lambda x: x.int(), r"tokens of shape \(1, 45\) and torch.int32, not"),
        ("other", lambda x: torch.zeros(1), r"\['other'\] are missing or unknown"),
    ],
)
def test_crafted_files(nets: tuple[Any, Any], saved: Path, name: str, change: Any, message: str) -> None:
    with safe_open(str(saved), framework="pt") as file:
        about, tensors = file.metadata(), {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    tensors[name] = change(tensors.get(name)).contiguous()
    save_file(tensors, str(saved), about)
    with pytest.raises(ValueError, match=message):
        hf.Memory.load(saved, nets[1], verify=False)
    with pytest.raises(ValueError, match="digest"):
        hf.Memory.load(saved, nets[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "must be a file of format"),
        ({"version": "2"}, "version '4', got .*, version '2'"),
        ({"method": "{"}, "invalid header"),
        ({"method": json.dumps({"method": "Exact"})}, r"attends by Cells\(...\), got Exact\(\)"),
        ({"method": json.dumps({"method": "Cells", "size": 3})}, "Cells takes cell_size, .*; got 'size'"),
        ({"method": json.dumps({"method": "Cells", "probes": -1})}, "probes must be a positive integer"),
        ({"method": json.dumps({"method": "Cells", "partition": {"name": "os"}})}, "invalid header"),
        ({"method": json.dumps({"method": "Cells", "samples": 4})}, "has an invalid header: .*samples"),
        ({"method": '{"method": ' + "[" * 10**5 + "]" * 10**5 + "}"}, "invalid header"),
        ({"reading": json.dumps({"positions": "both", "chunk": 3})}, "positions must be one of running, restart, got 'both'"),
        ({"reading": json.dumps({"positions": "restart", "chunk": 0})}, "chunk must be a positive integer"),
        ({"reading": json.dumps({"positions": "restart", "chunk": 9, "gap": -1})}, "gap must be an integer of at least 0"),
        ({"reading": json.dumps({"positions": "restart", "chunk": 9, "sharpness": 0.5})}, "sharpness must be a number"),
        ({"reading": json.dumps({"positions": "restart"})}, "invalid header"),
        ({"reading": "[]"}, "invalid header"),
        ({"layers": "-1"}, "invalid header"),
        ({"layers": "3"}, "missing or unknown"),
    ],
)
def test_crafted_headers(nets: tuple[Any, Any], saved: Path, change: dict[str, str], message: str) -> None:
    with safe_open(str(saved), framework="pt") as file:
        about, tensors = file.metadata(), {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    save_file(tensors, str(saved), {**about, **change})
    with pytest.raises(ValueError, match=rf"memory\.safetensors.*{message}"):
        hf.Memory.load(saved, nets[1], verify=False)


def test_files_of_the_version_before_are_read(nets: tuple[Any, Any], saved: Path) -> None:
    """They do not say how large queries are, and may say nothing else that this version does not know."""
    new = hf.Memory.load(saved, nets[1])
    with safe_open(str(saved), framework="pt") as file:
        about, tensors = file.metadata(), {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    old = {name: x for name, x in tensors.items() if not name.endswith(("query_sizes", "by_queries"))}
    assert len(tensors) - len(old) == 4
    header = {name: x for name, x in about.items() if name != DIGEST} | {"version": "3"}
    save_file(old, str(saved), header | {DIGEST: digest_of(header, old)})
    found = hf.Memory.load(saved, nets[1])
    assert all(torch.equal(x, y) for x, y in zip(everything(found), everything(new), strict=True))
    assert torch.equal(*(answer(nets[1], x.tokens, x.cache()) for x in (found, new)))  # of few keys, grouped as keys are large
    save_file(tensors, str(saved), {**about, "version": "3"})
    with pytest.raises(ValueError, match=r"wrong tensors; \['layers\.0\.by_queries"):
        hf.Memory.load(saved, nets[1], verify=False)


def test_more_layers_than_there_are_tensors(nets: tuple[Any, Any], saved: Path) -> None:
    """Refused at once: nobody goes through layers that are not there."""
    with safe_open(str(saved), framework="pt") as file:
        about, tensors = file.metadata(), {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    save_file(tensors, str(saved), {**about, "layers": "99999"})
    began = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"wrong tensors; \['layers.2.keys', .*\] are missing"):
            hf.Memory.load(saved, nets[1], verify=False)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
    assert time.process_time() - began < 1.0


def test_two_saves_are_the_same_bytes(nets: tuple[Any, Any], text: Tensor, saved: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    hf.Memory.load(saved, nets[1]).save(other)
    assert other.read_bytes() == saved.read_bytes()
    hf.Memory.read(nets[1], text, FEW).save(other)
    assert other.read_bytes() == saved.read_bytes()


@pytest.mark.parametrize("window", [5, 6])
def test_a_segment_that_ends_inside_the_window(nets: tuple[Any, Any], saved: Path, window: int) -> None:
    """Closed segments hold 40 of the 45 tokens."""
    with safe_open(str(saved), framework="pt") as file:
        about, tensors = file.metadata(), {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    about["method"] = json.dumps(json.loads(about["method"]) | {"window": window})
    save_file(tensors, str(saved), about)
    if window == 5:
        assert hf.Memory.load(saved, nets[1], verify=False).cache().layers[0].store.closed == 40
        return
    with pytest.raises(ValueError, match=r"memory\.safetensors is damaged: bounds"):
        hf.Memory.load(saved, nets[1], verify=False)
