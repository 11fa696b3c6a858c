"""Files of tensors: the safetensors format, the same bytes every time, whole whatever others do, and nothing left over."""

from __future__ import annotations

import json
import mmap
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nearfield import tensor_file
from nearfield.tensor_file import DTYPES, check_digest, read_about, read_tensors, write_tensors

ABOUT = {"format": "some", "note": 'ä ∑ " \\ \n'}


def tensors(number: int = 3) -> dict[str, Tensor]:
    made = {name: torch.arange(number).to(dtype) for name, dtype in DTYPES.items()}
    return made | {"empty": torch.empty(2, 0, 3), "number": torch.tensor(7), "turned": torch.randn(3, 2).T}


def write(path: Path, found: dict[str, Tensor]) -> None:
    write_tensors("thing", path, ABOUT, found)


def read(path: Path) -> dict[str, Tensor]:
    about, found = read_tensors("thing", path, "somebody")
    check_digest("thing", path, about, found)
    assert {name: about[name] for name in ABOUT} == ABOUT == {name: read_about("thing", path, "")[name] for name in ABOUT}
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, x in expected.items():
        assert found[name].dtype == x.dtype
        assert torch.equal(found[name], x)


def test_others_read_what_we_write_and_we_what_they_write(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    from safetensors.torch import save_file

    path, wanted = tmp_path / "file", tensors()
    write(path, wanted)
    assert_same(read(path), wanted)
    with safetensors.safe_open(str(path), framework="pt") as file:
        assert_same({name: file.get_tensor(name) for name in file.keys()}, wanted)  # noqa: SIM118
        about = file.metadata()
    save_file({name: x.contiguous() for name, x in wanted.items()}, str(path), about)
    assert_same(read(path), wanted)


def test_the_same_bytes(tmp_path: Path) -> None:
    wanted = tensors()
    for name, found in (("one", wanted), ("other", dict(reversed(wanted.items())))):
        write(tmp_path / name, found)
    about = dict(reversed(ABOUT.items()))
    write_tensors("thing", tmp_path / "third", about, wanted)
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


def test_numbers_that_begin_anywhere(tmp_path: Path) -> None:
    """Ours begin at multiples of their size; others need not."""
    path, header = tmp_path / "file", {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    encoded = json.dumps(header).encode()
    encoded += b" " * (7 - len(encoded) % 8)
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + torch.tensor([1.5, -2.0]).numpy().tobytes())
    assert read_tensors("thing", path, "")[1]["x"].tolist() == [1.5, -2.0]
    write(path, tensors())
    assert all(x.data_ptr() % x.itemsize == 0 for x in read(path).values())


def test_names_of_any_length(tmp_path: Path) -> None:
    most = os.pathconf(tmp_path, "PC_NAME_MAX")
    for name in ("x", "n" * most, "ü" * (most // 2), "[*]?"):
        for number in (3, 4):
            write(tmp_path / name, tensors(number))
        assert read(tmp_path / name)["I64"].tolist() == [0, 1, 2, 3]
        assert [path.name for path in tmp_path.iterdir()] == [name]
        (tmp_path / name).unlink()
    with pytest.raises(OSError, match=r"thing .* cannot be written: .*too long"):
        write(tmp_path / ("n" * (most + 1)), tensors())


def test_a_file_that_is_replaced_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Header and tensors are those of one file, because it is opened once."""
    path, opened = tmp_path / "file", []
    write(path, tensors(3))
    mapped, plain = mmap.mmap, Path.open

    def late(*arguments: Any, **options: Any) -> mmap.mmap:
        write(path, tensors(4))
        return mapped(*arguments, **options)

    def counted(place: Path, *arguments: Any, **options: Any) -> Any:
        opened.append(place)
        return plain(place, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr("nearfield.tensor_file.mmap.mmap", late)
        patch.setattr(Path, "open", counted)
        about, found = read_tensors("thing", path, "")
    check_digest("thing", path, about, found)
    assert found["I64"].tolist() == [0, 1, 2]
    assert opened == [path]
    assert read(path)["I64"].tolist() == [0, 1, 2, 3]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="has no fork")
def test_what_a_killed_save_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write(path, tensors(3))
    other = tmp_path / "other"

    def killed(file: Any, about: Any, found: Any) -> None:
        file.write(b"half")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    for place in (path, path, other):
        child = os.fork()
        if not child:
            monkeypatch.setattr(tensor_file, "_write", killed)
            try:
                write(place, tensors(4))
            finally:
                os._exit(1)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1 + 2, "the second one has removed what the first one left"
    assert read(path)["I64"].tolist() == [0, 1, 2]
    write(path, tensors(4))
    assert read(path)["I64"].tolist() == [0, 1, 2, 3]
    assert len(list(tmp_path.iterdir())) == 1 + 1, "what belongs to another file is left to its next save"
    write(other, tensors(4))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "other"]


def test_a_save_that_goes_on_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, plain = tmp_path / "file", tensor_file._write
    begun, go_on = threading.Event(), threading.Event()

    def waits(file: Any, about: Any, found: dict[str, Tensor]) -> None:
        if len(found["I64"]) == 5:
            begun.set()
            assert go_on.wait(30)
        plain(file, about, found)

    monkeypatch.setattr(tensor_file, "_write", waits)
    slow = threading.Thread(target=write, args=(path, tensors(5)))
    slow.start()
    assert begun.wait(30)
    for number in (3, 4):
        write(path, tensors(number))
        assert len(read(path)["I64"]) == number
    assert len(list(tmp_path.iterdir())) == 2
    go_on.set()
    slow.join(30)
    assert len(read(path)["I64"]) == 5
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_save_that_is_removed_before_it_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a save that takes it for a leftover: it begins once more."""
    fcntl = pytest.importorskip("fcntl")
    path, flock, removed = tmp_path / "file", fcntl.flock, []

    def late(descriptor: int, how: int) -> None:
        if not removed:
            removed.extend(tmp_path.glob(".nearfield-*.part"))
            removed[0].unlink()
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    write(path, tensors())
    assert len(removed) == 1
    assert len(read(path)) == len(tensors())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_folders_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as those of some network drives: saving works, and leftovers stay."""
    fcntl = pytest.importorskip("fcntl")

    def refuse(*_: Any) -> None:
        raise OSError("no locks available")

    path = tmp_path / "file"
    left = tmp_path / f"{tensor_file._leftover(path)}0.part"
    left.write_bytes(b"half")
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", refuse)
        write(path, tensors())
    assert sorted(tmp_path.iterdir()) == sorted([path, left])
    write(path, tensors())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


X = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("[" * 10**6, "recursion"),
        ("[]", "not an object"),
        ({"x": 3}, "needs dtype, shape and data_offsets"),
        ({"x": X | {"more": 1}}, "needs dtype, shape and data_offsets"),
        ({"x": X | {"dtype": "F31"}}, "unknown dtype"),
        ({"x": X | {"dtype": []}}, "unknown dtype"),
        ({"x": X | {"shape": [3]}}, "more or fewer bytes"),
        ({"x": X | {"shape": [2.0]}}, "cannot be"),
        ({"x": X | {"shape": [True, 2]}}, "cannot be"),
        ({"x": X | {"shape": [-1, -2]}}, "cannot be"),
        ({"x": X | {"shape": [2**62, 2**62, 0], "data_offsets": [0, 0]}}, "cannot be"),
        ({"x": X | {"shape": [1] * 10**5}}, "cannot be"),
        ({"x": X | {"shape": [10**4000] * 60}}, "cannot be"),
        ({"x": X | {"data_offsets": [0]}}, "cannot be"),
        ({"x": X | {"data_offsets": [8, 16]}}, "does not begin where"),
        ({"x": X, "y": X}, "does not begin where"),
        ({"x": X, "y": X | {"data_offsets": [4, 12]}}, "does not begin where"),
        ({"x": X, "y": X | {"data_offsets": [8, 16]}}, "16 bytes of tensors are announced, and 8 are there"),
        ({"x": X, "__metadata__": {"a": 1}}, "not a list of texts"),
        ({"x": X, "__metadata__": []}, "not a list of texts"),
    ],
)
def test_crafted_headers(tmp_path: Path, header: Any, message: str) -> None:
    encoded = (header if isinstance(header, str) else json.dumps(header)).encode()
    path = tmp_path / "file"
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + b"\0" * 8)
    began = time.process_time()
    for call in (read_tensors, read_about):
        with pytest.raises(ValueError, match=rf"thing .*file cannot be read: .*{message}.*; somebody makes such a file"):
            call("thing", path, "somebody")
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize("length", [0, 2**64 - 1, 2**40, 5 << 20, 3 << 20])
def test_headers_of_impossible_lengths(tmp_path: Path, length: int) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.write(length.to_bytes(8, "little"))
        file.truncate(6 << 20)
    with pytest.raises(ValueError, match=rf"a header of {length} bytes is not possible in a file of"):
        read_tensors("thing", path, "somebody")


def test_more_tensors_than_a_file_may_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them is looked at. Empty ones take no bytes, so the file is small however many there are."""
    path = tmp_path / "file"
    empty = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    encoded = json.dumps(dict.fromkeys(map(str, range(20_000)), empty)).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded)
    with monkeypatch.context() as patch:
        patch.setattr(tensor_file, "_entry", lambda *_: pytest.fail("an entry was looked at"))
        for call in (read_tensors, read_about):
            with pytest.raises(ValueError, match="20000 tensors are announced, and there may be 16384; somebody makes"):
                call("thing", path, "somebody")
    monkeypatch.setattr(tensor_file, "MOST_TENSORS", 3)
    few = {str(number): torch.empty(0) for number in range(3)}
    write(path, few)
    with pytest.raises(OSError, match=r"it would have 4 tensors and a header of [0-9]* bytes, and may have 3 and"):
        write(path, few | {"3": torch.empty(0)})
    assert_same(read(path), few)
